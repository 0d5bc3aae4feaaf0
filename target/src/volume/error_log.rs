//! Says which operation of a volume failed and why, at most once a second: a dead disk fails thousands of
//! commands a second, and one line tells as much as all of them.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Shortest time between two lines in milliseconds.
const INTERVAL_MS: u64 = 1000;

/// The errors of one volume's storage. Shared by its keeper and the reactors; without a lock.
#[derive(Debug)]
pub struct ErrorLog {
    volume: String,
    begun: Instant,
    next_ms: AtomicU64,
    unsaid: AtomicU64,
}

impl ErrorLog {
    /// The log of the volume of this name.
    #[must_use]
    pub fn new(volume: &str) -> Self {
        let (next_ms, unsaid) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { volume: volume.into(), begun: Instant::now(), next_ms, unsaid }
    }

    /// An operation failed.
    pub fn report(&self, operation: &str, error: &dyn Display) {
        let now_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if let Some(unsaid) = self.admit(now_ms) {
            tracing::error!(volume = %self.volume, operation, %error, unsaid, "the storage of a volume failed");
        }
    }

    /// Whether a line is due, and how many errors weren't said since the last one.
    fn admit(&self, now_ms: u64) -> Option<u64> {
        let next_ms = self.next_ms.load(Ordering::Relaxed);
        let due = now_ms >= next_ms && {
            let after = now_ms.saturating_add(INTERVAL_MS);
            self.next_ms.compare_exchange(next_ms, after, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if due {
            return Some(self.unsaid.swap(0, Ordering::Relaxed));
        }
        self.unsaid.fetch_add(1, Ordering::Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_counts_those_left_out() {
        let log = ErrorLog::new("disk0");
        let said: Vec<_> = [0, 1, 999, 1000, 1500, 2500].into_iter().map(|now_ms| log.admit(now_ms)).collect();
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
