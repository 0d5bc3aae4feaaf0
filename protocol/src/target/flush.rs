//! I5: a FLUSH never lies.
//!
//! A failed sync may have lost what was written before it, and the kernel tells of it once. So every
//! session that had unflushed acknowledged writes at that moment must hear of it with *every* FLUSH
//! until it is detached. A session that had none is not concerned, and goes on.
//!
//! What a reboot or a restart of the target may have lost is the initiator's to judge: it knows what it wrote. Only
//! a takeover has nobody who knows, and is taken to have unflushed writes of its predecessor.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use super::record::SyncState;
use crate::canary::{Canary, broken};

/// What a session has of a predecessor's writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inherited {
    /// No predecessor, or a volume on which every write is synced.
    #[default]
    Nothing,
    /// Writes that aren't flushed, and are still there.
    Unflushed,
    /// Writes that weren't flushed and may be lost: no FLUSH of this session succeeds.
    Lost,
}

/// What a takeover inherits from a session that had everything flushed at `flushed_at`.
pub(super) fn inherited(flushed_at: SyncState, now: SyncState) -> Inherited {
    let rebooted = flushed_at.boot_id != now.boot_id && !broken(Canary::FlushIgnoresBootId);
    let failed = flushed_at.failed_syncs != now.failed_syncs && !broken(Canary::FlushForgetsFailedSync);
    if rebooted || failed { Inherited::Lost } else { Inherited::Unflushed }
}

/// What one session wrote and flushed; shared by the threads that serve its queues.
///
/// `begun` counts the changes given to storage, `ended` those that storage ended, `covered` the changes
/// that a successful FLUSH is known to cover, and `baseline` is the number of failed syncs of the
/// volume at the moment when the session last went from clean to dirty. `flushed` is one more than that number was
/// when a FLUSH last covered all; 0 for never.
#[derive(Debug, Default)]
pub struct FlushLedger {
    begun: AtomicU64,
    ended: AtomicU64,
    covered: AtomicU64,
    baseline: AtomicU64,
    flushed: AtomicU64,
}

/// No count of failed syncs is this one.
const NEVER: u64 = u64::MAX;

/// What a FLUSH covers if it succeeds; taken before the sync begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushMark {
    begun: u64,
    /// Everything begun had ended: afterwards the session is clean.
    complete: bool,
    /// Nothing was unflushed.
    clean: bool,
}

impl FlushMark {
    /// Whether nothing was unflushed.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.clean
    }
}

impl FlushLedger {
    /// A session that attaches when the volume has counted `failed_syncs`.
    #[must_use]
    pub fn new(failed_syncs: u64) -> Self {
        Self::inheriting(Inherited::Nothing, failed_syncs)
    }

    /// The same with a predecessor's writes.
    #[must_use]
    pub fn inheriting(inherited: Inherited, failed_syncs: u64) -> Self {
        // They count as one change that has ended and that no FLUSH has covered.
        let (changes, baseline) = match inherited {
            Inherited::Nothing => (0, failed_syncs),
            Inherited::Unflushed => (1, failed_syncs),
            Inherited::Lost => (1, NEVER),
        };
        Self {
            begun: AtomicU64::new(changes),
            ended: AtomicU64::new(changes),
            baseline: AtomicU64::new(baseline),
            ..Self::default()
        }
    }

    /// How many syncs had failed when a FLUSH last covered everything that the session had written; nothing if none
    /// ever did.
    #[must_use]
    pub fn flushed(&self) -> Option<u64> {
        self.flushed.load(SeqCst).checked_sub(1)
    }

    /// A change is given to storage now. `failed_syncs` must have been read just before the call: a sync
    /// that fails later then always counts against this write.
    pub fn change_begins(&self, failed_syncs: u64) {
        // The session is clean only if all that ever began is covered. Of two threads that begin the
        // first change at once, one sees this; the baseline it stores is at most as new as the write of
        // the other, so the error is on the side of reporting.
        let begun = self.begun.fetch_add(1, SeqCst);
        if begun == self.covered.load(SeqCst) {
            self.baseline.store(failed_syncs, SeqCst);
        }
    }

    /// Storage has ended a change, well or not.
    pub fn change_ends(&self) {
        self.ended.fetch_add(1, SeqCst);
    }

    /// A FLUSH arrived.
    #[must_use]
    pub fn flush_begins(&self) -> FlushMark {
        // `ended` first: what begins in between then makes the mark incomplete, never complete.
        let ended = self.ended.load(SeqCst);
        let begun = self.begun.load(SeqCst);
        FlushMark { begun, complete: ended == begun, clean: begun == self.covered.load(SeqCst) }
    }

    /// Its sync succeeded, and the volume now counts `failed_syncs`. Answers whether the FLUSH may say so.
    #[must_use]
    pub fn flush_ends(&self, mark: FlushMark, failed_syncs: u64) -> bool {
        let may_be_lost = failed_syncs != self.baseline.load(SeqCst) && !mark.clean;
        if may_be_lost && !broken(Canary::FlushForgetsFailedSync) {
            return false;
        }
        if mark.complete {
            self.covered.fetch_max(mark.begun, SeqCst);
            self.flushed.fetch_max(failed_syncs.saturating_add(1), SeqCst);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dirty_session_hears_of_a_failed_sync_with_every_flush() {
        let s = FlushLedger::new(0);
        s.change_begins(0);
        s.change_ends();
        for _ in 0..3 {
            let mark = s.flush_begins();
            assert!(!s.flush_ends(mark, 1), "the sync of another session failed since");
            s.change_begins(1);
            s.change_ends();
        }
    }

    #[test]
    fn a_clean_session_is_not_concerned() {
        let s = FlushLedger::new(0);
        s.change_begins(0);
        s.change_ends();
        assert!(s.flush_ends(s.flush_begins(), 0));
        // Now a sync of somebody else fails.
        assert!(s.flush_ends(s.flush_begins(), 1));
        s.change_begins(1);
        s.change_ends();
        assert!(s.flush_ends(s.flush_begins(), 1));
    }

    #[test]
    fn a_write_at_the_disk_during_the_flush_leaves_the_session_dirty() {
        let s = FlushLedger::new(0);
        s.change_begins(0);
        let mark = s.flush_begins();
        s.change_ends();
        assert!(s.flush_ends(mark, 0));
        assert!(!s.flush_ends(s.flush_begins(), 1));
    }

    #[test]
    fn a_takeover_has_unflushed_writes_though_it_wrote_nothing() {
        let now = SyncState { boot_id: crate::BootId([1; 16]), failed_syncs: 3 };
        assert_eq!(inherited(now, now), Inherited::Unflushed);
        let s = FlushLedger::inheriting(Inherited::Unflushed, 3);
        assert!(!s.flush_ends(s.flush_begins(), 4), "a sync fails before the successor's first FLUSH");
        let s = FlushLedger::inheriting(Inherited::Unflushed, 3);
        assert_eq!(s.flushed(), None);
        assert!(s.flush_ends(s.flush_begins(), 3));
        assert_eq!(s.flushed(), Some(3));
        assert!(s.flush_ends(s.flush_begins(), 4), "it was covered before");
    }

    #[test]
    fn no_flush_of_a_takeover_succeeds_after_a_reboot_or_a_failed_sync() {
        let then = SyncState { boot_id: crate::BootId([1; 16]), failed_syncs: 3 };
        for now in [SyncState { boot_id: crate::BootId([2; 16]), ..then }, SyncState { failed_syncs: 4, ..then }] {
            assert_eq!(inherited(then, now), Inherited::Lost);
        }
        let s = FlushLedger::inheriting(Inherited::Lost, 4);
        for _ in 0..3 {
            assert!(!s.flush_ends(s.flush_begins(), 4));
            s.change_begins(4);
            s.change_ends();
        }
        assert_eq!(s.flushed(), None);
    }

    #[test]
    fn a_flush_beside_a_write_does_not_count_as_having_covered_all() {
        let s = FlushLedger::new(2);
        s.change_begins(2);
        let mark = s.flush_begins();
        s.change_ends();
        assert!(s.flush_ends(mark, 2));
        assert_eq!(s.flushed(), None);
    }
}
