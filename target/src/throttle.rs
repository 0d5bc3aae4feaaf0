//! Log lines that somebody else can cause, a few a second: a dead disk fails thousands of commands a second, and
//! whoever can connect could else fill the disk. One line tells as much as all of them.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The time in which so many lines are let through, in milliseconds.
const INTERVAL_MS: u64 = 1000;

/// What times are counted from.
static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Lets so many lines of one kind through a second, and counts the others. Without a lock: threads may share it.
#[derive(Debug)]
pub(crate) struct Throttle {
    /// What one line costs of a second, in milliseconds.
    step_ms: u64,
    /// Until when the lines let through have used up their time.
    used_ms: AtomicU64,
    unsaid: AtomicU64,
}

impl Throttle {
    /// A throttle that lets `lines` a second through, all of them at once if need be; 1 to 1000.
    #[must_use]
    pub(crate) const fn new(lines: u64) -> Self {
        let lines = if lines == 0 { 1 } else { lines };
        Self { step_ms: INTERVAL_MS / lines, used_ms: AtomicU64::new(0), unsaid: AtomicU64::new(0) }
    }

    /// Whether to say it now, and how many of its kind weren't said since the last one: that goes into the line.
    pub(crate) fn admit(&self) -> Option<u64> {
        self.admit_at(u64::try_from(BEGUN.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    fn admit_at(&self, now_ms: u64) -> Option<u64> {
        let take = |used_ms: u64| {
            let used_ms = used_ms.max(now_ms) + self.step_ms;
            (used_ms <= now_ms.saturating_add(INTERVAL_MS)).then_some(used_ms)
        };
        match self.used_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Some(self.unsaid.swap(0, Ordering::Relaxed)),
            Err(_) => {
                self.unsaid.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_counts_those_left_out() {
        let throttle = Throttle::new(1);
        let said: Vec<_> = [0, 1, 999, 1000, 1500, 2500].map(|now_ms| throttle.admit_at(now_ms)).into();
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
    }

    #[test]
    fn several_lines_a_second_may_come_at_once() {
        let throttle = Throttle::new(4);
        let said = |now_ms| (0..8).filter(|_| throttle.admit_at(now_ms).is_some()).count();
        assert_eq!([0, 250, 500, 5000].map(said), [4, 1, 1, 4]);
        assert_eq!(throttle.admit_at(6000), Some(4));
    }
}
