//! I5 at the initiator: a FLUSH never lies, though the session was lost in between.
//!
//! While a session lives, its target knows what was written and not flushed. If the slot tables are gone, only
//! the initiator knows. So it counts the changes that were acknowledged and that no FLUSH covered, and when it
//! attaches again it compares what they stood on: the boot of the target's host (whose memory held them) and the
//! count of failed syncs. If either is another one, they may be lost, and every FLUSH fails until the volume is
//! detached.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use crate::canary::{Canary, broken};
use crate::ids::BootId;
use crate::opcode::{Flags, Opcode};
use crate::status::Status;

/// What the acknowledged but unflushed writes of a session stand on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ground {
    /// Boot id of the target's host.
    pub boot_id: BootId,
    /// Failed syncs of the volume.
    pub failed_syncs: u64,
}

/// What a FLUSH covers if it succeeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushMark(u64);

/// What one session wrote and flushed, over all its queues and all its attaches; shared by the threads that own
/// the queues.
#[derive(Debug)]
pub struct Durability {
    /// A completed change is on stable storage: there is nothing to lose.
    write_through: bool,
    /// Changes that were acknowledged and aren't stable by themselves.
    acknowledged: AtomicU64,
    /// Those of them that a FLUSH has covered.
    covered: AtomicU64,
    /// Some that none had covered may be lost.
    poisoned: AtomicBool,
}

impl Durability {
    /// A session that begins, on a volume that is `write_through` or isn't.
    #[must_use]
    pub fn new(write_through: bool) -> Self {
        let (acknowledged, covered, poisoned) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Self { write_through, acknowledged, covered, poisoned }
    }

    /// A session that takes the place of its predecessor, of which nobody knows what it wrote: assumed is that
    /// there are unflushed writes.
    #[must_use]
    pub fn taken_over(write_through: bool) -> Self {
        Self { acknowledged: AtomicU64::new(1), ..Self::new(write_through) }
    }

    /// A command is submitted: what it covers if it is a FLUSH. A replay keeps the mark of the original.
    #[inline]
    #[must_use]
    pub fn submitted(&self) -> FlushMark {
        FlushMark(self.acknowledged.load(SeqCst))
    }

    /// A command has ended; call it before the caller hears of it. Answers the status that the caller hears.
    #[inline]
    #[must_use]
    pub fn ended(&self, opcode: Opcode, flags: Flags, status: Status, mark: FlushMark) -> Status {
        if opcode == Opcode::FLUSH {
            return self.flush_ended(status, mark);
        }
        // A change that failed may have been executed in part, but nobody was told that it is there.
        if opcode.changes() && status.is_ok() && !self.write_through && !flags.has(Flags::FUA) {
            self.acknowledged.fetch_add(1, SeqCst);
        }
        status
    }

    fn flush_ended(&self, status: Status, mark: FlushMark) -> Status {
        if self.is_poisoned() {
            return Status::FLUSH_FAILED;
        }
        if status.is_ok() {
            self.covered.fetch_max(mark.0, SeqCst);
        } else if status == Status::FLUSH_FAILED && self.is_dirty() {
            self.poisoned.store(true, SeqCst);
        }
        status
    }

    /// Whether there are acknowledged changes that no FLUSH has covered.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.covered.load(SeqCst) < self.acknowledged.load(SeqCst)
    }

    /// Whether unflushed writes may be lost: every FLUSH fails until the volume is detached.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(SeqCst)
    }

    /// The session is attached again, or was taken over. `before` is what its writes stood on, `now` what the
    /// target tells now; `synced` is the boot under which a drain synced the volume, if one did and nothing was
    /// written since. Every queue must have been fenced before the attach was asked for, so that no reply of the
    /// lost session counts as one of the new.
    pub fn attached_again(&self, before: Ground, now: Ground, synced: BootId) {
        if !self.is_dirty() {
            return;
        }
        // All that was acknowledged under that boot is stable, whatever happened later.
        if !synced.is_nil() && synced == before.boot_id && now.failed_syncs == before.failed_syncs {
            self.covered.fetch_max(self.acknowledged.load(SeqCst), SeqCst);
            return;
        }
        let rebooted = now.boot_id != before.boot_id && !broken(Canary::FlushIgnoresBootId);
        let failed = now.failed_syncs != before.failed_syncs && !broken(Canary::FlushForgetsFailedSync);
        if rebooted || failed {
            self.poisoned.store(true, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BootId = BootId([1; 16]);
    const B: BootId = BootId([2; 16]);

    fn ground(boot_id: BootId, failed_syncs: u64) -> Ground {
        Ground { boot_id, failed_syncs }
    }

    fn write(d: &Durability) {
        assert_eq!(d.ended(Opcode::WRITE, Flags::NONE, Status::OK, d.submitted()), Status::OK);
    }

    fn flush(d: &Durability) -> Status {
        d.ended(Opcode::FLUSH, Flags::NONE, Status::OK, d.submitted())
    }

    #[test]
    fn i5_after_a_reboot_every_flush_of_a_session_with_unflushed_writes_fails() {
        let d = Durability::new(false);
        write(&d);
        let in_flight = d.submitted();
        d.attached_again(ground(A, 0), ground(B, 0), BootId::NIL);
        assert_eq!(d.ended(Opcode::FLUSH, Flags::NONE, Status::OK, in_flight), Status::FLUSH_FAILED, "a replay");
        for _ in 0..3 {
            write(&d);
            assert_eq!(flush(&d), Status::FLUSH_FAILED);
        }
        d.attached_again(ground(B, 0), ground(B, 0), BootId::NIL);
        assert_eq!(flush(&d), Status::FLUSH_FAILED, "until the volume is detached");
    }

    #[test]
    fn i5_what_was_flushed_survives_a_reboot() {
        let d = Durability::new(false);
        write(&d);
        assert_eq!(flush(&d), Status::OK);
        d.attached_again(ground(A, 0), ground(B, 3), BootId::NIL);
        write(&d);
        assert_eq!(flush(&d), Status::OK);
    }

    #[test]
    fn i5_a_restart_of_the_target_loses_nothing_that_the_host_keeps() {
        let d = Durability::new(false);
        write(&d);
        d.attached_again(ground(A, 1), ground(A, 1), BootId::NIL);
        assert_eq!(flush(&d), Status::OK);
    }

    #[test]
    fn i5_a_sync_that_failed_while_the_session_was_away_is_not_forgotten() {
        let d = Durability::new(false);
        write(&d);
        d.attached_again(ground(A, 1), ground(A, 2), BootId::NIL);
        assert_eq!(flush(&d), Status::FLUSH_FAILED);
    }

    #[test]
    fn i5_a_drain_that_synced_excuses_the_reboot_after_it_and_no_other() {
        for (synced, expected) in [(A, Status::OK), (B, Status::FLUSH_FAILED), (BootId::NIL, Status::FLUSH_FAILED)] {
            let d = Durability::new(false);
            write(&d);
            d.attached_again(ground(A, 0), ground(B, 0), synced);
            assert_eq!(flush(&d), expected);
        }
        let d = Durability::new(false);
        write(&d);
        d.attached_again(ground(A, 0), ground(B, 1), A);
        assert_eq!(flush(&d), Status::FLUSH_FAILED, "a sync failed before it");
    }

    #[test]
    fn i4_a_flush_covers_what_completed_before_it_was_issued_and_no_more() {
        let d = Durability::new(false);
        write(&d);
        let mark = d.submitted();
        write(&d);
        assert_eq!(d.ended(Opcode::FLUSH, Flags::NONE, Status::OK, mark), Status::OK);
        assert!(d.is_dirty());
        assert_eq!(flush(&d), Status::OK);
        assert!(!d.is_dirty());
    }

    #[test]
    fn what_is_stable_by_itself_needs_no_flush() {
        let through = Durability::new(true);
        write(&through);
        let cached = Durability::new(false);
        assert_eq!(cached.ended(Opcode::WRITE, Flags::FUA, Status::OK, cached.submitted()), Status::OK);
        assert_eq!(cached.ended(Opcode::WRITE, Flags::NONE, Status::IO_ERROR, cached.submitted()), Status::IO_ERROR);
        let _ = cached.ended(Opcode::READ, Flags::NONE, Status::OK, cached.submitted());
        for d in [through, cached] {
            assert!(!d.is_dirty());
            d.attached_again(ground(A, 0), ground(B, 9), BootId::NIL);
            assert_eq!(flush(&d), Status::OK);
        }
    }

    #[test]
    fn a_takeover_assumes_unflushed_writes() {
        let d = Durability::taken_over(false);
        d.attached_again(ground(A, 0), ground(B, 0), BootId::NIL);
        assert_eq!(flush(&d), Status::FLUSH_FAILED);
        let d = Durability::taken_over(false);
        d.attached_again(ground(A, 0), ground(A, 0), BootId::NIL);
        assert_eq!(flush(&d), Status::OK);
    }

    #[test]
    fn i5_a_flush_that_failed_under_unflushed_writes_fails_for_good() {
        let d = Durability::new(false);
        assert_eq!(d.ended(Opcode::FLUSH, Flags::NONE, Status::FLUSH_FAILED, d.submitted()), Status::FLUSH_FAILED);
        assert_eq!(flush(&d), Status::OK, "it had nothing to lose");
        write(&d);
        assert_eq!(d.ended(Opcode::FLUSH, Flags::NONE, Status::FLUSH_FAILED, d.submitted()), Status::FLUSH_FAILED);
        assert_eq!(flush(&d), Status::FLUSH_FAILED);
    }
}
