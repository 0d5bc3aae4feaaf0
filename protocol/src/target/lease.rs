//! The lease: how long a session lives without a path.

use alloc::vec::Vec;

/// A connection that is or may become a path, standby paths included; numbered by the driver, no number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u64);

/// Both times, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// After the last path.
    pub(super) lease_ms: u32,
    /// Before the first path.
    pub(super) first_path_ms: u64,
}

/// The paths of one session, and until when it may be without one.
#[derive(Clone, Debug, Default)]
pub(super) struct Lease {
    paths: Vec<PathId>,
    /// It has had a path.
    served: bool,
    /// Nothing while it has a path, or wasn't told yet that it exists.
    deadline_ms: Option<u64>,
}

impl Lease {
    /// The initiator is told that the session exists: its first path is due.
    pub(super) fn attached(&mut self, terms: Terms, now_ms: u64) {
        if !self.served && self.paths.is_empty() {
            self.deadline_ms = Some(now_ms.saturating_add(terms.first_path_ms));
        }
    }

    /// A connection is about to be a path.
    pub(super) fn path_comes(&mut self, path: PathId) {
        if !self.paths.contains(&path) {
            self.paths.push(path);
        }
        self.deadline_ms = None;
    }

    /// A path is gone, or didn't become one.
    pub(super) fn path_goes(&mut self, path: PathId, was_one: bool, terms: Terms, now_ms: u64) {
        let Some(at) = self.paths.iter().position(|p| *p == path) else { return };
        self.paths.swap_remove(at);
        self.served |= was_one;
        if self.paths.is_empty() {
            let rest_ms = if self.served { u64::from(terms.lease_ms) } else { terms.first_path_ms };
            self.deadline_ms = Some(now_ms.saturating_add(rest_ms));
        }
    }

    pub(super) fn paths(&self) -> usize {
        self.paths.len()
    }

    pub(super) fn deadline_ms(&self) -> Option<u64> {
        self.deadline_ms
    }

    pub(super) fn is_over(&self, now_ms: u64) -> bool {
        self.deadline_ms.is_some_and(|deadline| deadline <= now_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { lease_ms: 60_000, first_path_ms: 5_000 };

    #[test]
    fn a_session_outlives_its_last_path_by_the_lease() {
        let mut lease = Lease::default();
        lease.attached(TERMS, 0);
        lease.path_comes(PathId(1));
        lease.path_comes(PathId(2));
        lease.path_goes(PathId(1), true, TERMS, 100);
        lease.path_goes(PathId(1), true, TERMS, 150);
        assert!(!lease.is_over(u64::MAX), "told twice of one path");
        lease.path_goes(PathId(2), true, TERMS, 200);
        assert_eq!(lease.deadline_ms(), Some(60_200));
        assert!(!lease.is_over(60_199) && lease.is_over(60_200));
        lease.path_comes(PathId(3));
        assert!(!lease.is_over(u64::MAX));
        lease.path_goes(PathId(3), false, TERMS, 300);
        assert_eq!(lease.deadline_ms(), Some(60_300), "an attempt that failed shows that the initiator lives");
    }

    #[test]
    fn a_session_that_never_gets_a_path_ends_sooner() {
        let mut lease = Lease::default();
        assert!(!lease.is_over(u64::MAX), "it waits for its answer");
        lease.attached(TERMS, 0);
        assert_eq!(lease.deadline_ms(), Some(5_000));
        lease.path_comes(PathId(1));
        lease.path_goes(PathId(1), false, TERMS, 1_000);
        assert_eq!(lease.deadline_ms(), Some(6_000));
        lease.attached(TERMS, 2_000);
        assert_eq!(lease.deadline_ms(), Some(7_000), "its answer was lost and is repeated");
    }
}
