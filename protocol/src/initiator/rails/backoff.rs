//! How long to wait before a path is dialed again.

use super::random::Random;

/// Doubles with each failure up to a cap, and takes a random part of that: queues that lost their target at
/// the same moment don't all come back at the same moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    first_us: u64,
    max_us: u64,
    failures: u32,
}

impl Backoff {
    /// Waits at most `first_us` after the first failure, and never more than `max_us`.
    pub(super) fn new(first_us: u64, max_us: u64) -> Self {
        Self { first_us: first_us.max(1), max_us: max_us.max(1), failures: 0 }
    }

    /// A failure: answers how many microseconds to wait, between half and all of what its number allows.
    pub(super) fn failed(&mut self, random: &mut Random) -> u64 {
        let doubled = self.first_us.saturating_mul(1 << self.failures.min(32));
        let most_us = doubled.min(self.max_us);
        self.failures = self.failures.saturating_add(1);
        most_us - random.up_to(most_us / 2)
    }

    /// It went well for long enough: the next failure is the first.
    pub(super) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn each_failure_doubles_the_wait_up_to_the_cap() {
        let (mut b, mut random) = (Backoff::new(100, 1_000), Random::new(7));
        for most in [100, 200, 400, 800, 1_000, 1_000] {
            let wait = b.failed(&mut random);
            assert!((most / 2..=most).contains(&wait), "{wait} of {most}");
        }
        b.succeeded();
        assert!(b.failed(&mut random) <= 100);
    }

    #[test]
    fn a_thousand_failures_overflow_nothing() {
        let (mut b, mut random) = (Backoff::new(u64::MAX / 3, u64::MAX), Random::new(7));
        assert!((0..1_000).all(|_| b.failed(&mut random) > 0));
    }

    #[test]
    fn queues_that_fail_together_come_back_apart() {
        let waits: BTreeSet<_> =
            (0..100).map(|seed| Backoff::new(100_000, 1_000_000).failed(&mut Random::new(seed))).collect();
        assert!(waits.len() > 90);
        assert!(waits.last().unwrap() - waits.first().unwrap() > 40_000);
    }
}
