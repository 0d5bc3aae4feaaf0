//! For how long to spin before sleeping.
//!
//! A sleep and its wake-up cost more than ten microseconds on either side; a spin costs what it lasts. So it
//! pays while the wait is mostly short, and only then. What tells is how long waits really last, those that
//! ended in a sleep included: a limit that is too short for the waits there are must be able to grow.

/// Bounded, adapting spinning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spin {
    limit_us: u64,
    most_us: u64,
}

impl Spin {
    /// The shortest limit that is tried, in microseconds; below it only the clock is read.
    const LEAST_US: u64 = 2;

    /// Spins for `most_us` microseconds at most; 0 for never.
    pub(super) fn new(most_us: u64) -> Self {
        Self { limit_us: most_us.min(Self::LEAST_US), most_us }
    }

    /// For how long to spin now.
    pub(super) fn limit_us(&self) -> u64 {
        self.limit_us
    }

    /// A wait went on beyond the limit, and lasted for `waited_us` with the sleep and the wake-up.
    pub(super) fn waited(&mut self, waited_us: u64) {
        // The wake-up is part of what was measured, and wouldn't have been there.
        self.limit_us = match waited_us <= 2 * self.most_us {
            true => (self.limit_us * 4).min(self.most_us),
            false => (self.limit_us / 2).max(Self::LEAST_US.min(self.most_us)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_make_it_spin_long_enough_even_from_the_shortest_limit() {
        let mut spin = Spin::new(50);
        for _ in 0..3 {
            spin.waited(40);
        }
        assert_eq!(spin.limit_us(), 50);
    }

    #[test]
    fn long_waits_cost_less_and_less() {
        let mut spin = Spin::new(50);
        (0..3).for_each(|_| spin.waited(20));
        (0..6).for_each(|_| spin.waited(1_000));
        assert_eq!(spin.limit_us(), 2);
    }

    #[test]
    fn who_must_not_spin_does_not() {
        let mut spin = Spin::new(0);
        spin.waited(0);
        assert_eq!(spin.limit_us(), 0);
    }
}
