//! I5: a FLUSH never lies.
//!
//! A failed sync may have lost what was written before it, and the kernel tells of it once. So every
//! session that had unflushed acknowledged writes at that moment must hear of it with *every* FLUSH
//! until it is detached. A session that had none is not concerned, and goes on.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// What one session wrote and flushed; shared by the threads that serve its queues.
///
/// `begun` counts the changes given to storage, `ended` those that storage ended, `covered` the changes
/// that a successful FLUSH is known to cover, and `baseline` is the number of failed syncs of the
/// volume at the moment when the session last went from clean to dirty.
#[derive(Debug, Default)]
pub struct FlushLedger {
    begun: AtomicU64,
    ended: AtomicU64,
    covered: AtomicU64,
    baseline: AtomicU64,
}

/// What a FLUSH covers if it succeeds; taken before the sync begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushMark {
    begun: u64,
    /// Everything begun had ended: afterwards the session is clean.
    complete: bool,
    /// Nothing was unflushed.
    clean: bool,
}

impl FlushLedger {
    /// A session that attaches when the volume has counted `failed_syncs`.
    #[must_use]
    pub fn new(failed_syncs: u64) -> Self {
        Self { baseline: AtomicU64::new(failed_syncs), ..Self::default() }
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
        if failed_syncs != self.baseline.load(SeqCst) {
            return mark.clean;
        }
        if mark.complete {
            self.covered.fetch_max(mark.begun, SeqCst);
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
}
