//! The smoothed round trip of a path.

/// An average over the last eight answers or so.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTrip {
    /// Eight times the average in microseconds, so that whole numbers lose little.
    eightfold_us: Option<u64>,
}

impl RoundTrip {
    /// An answer took this many microseconds.
    pub(super) fn sample(&mut self, took_us: u64) {
        self.eightfold_us = Some(match self.eightfold_us {
            None => took_us.saturating_mul(8),
            Some(eightfold) => (eightfold - eightfold / 8).saturating_add(took_us),
        });
    }

    /// The average in microseconds; nothing before the first answer.
    #[must_use]
    pub(super) fn smoothed_us(&self) -> Option<u64> {
        self.eightfold_us.map(|e| e / 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_answer_counts_an_eighth() {
        let mut r = RoundTrip::default();
        assert_eq!(r.smoothed_us(), None);
        r.sample(800);
        assert_eq!(r.smoothed_us(), Some(800));
        r.sample(1_600);
        assert_eq!(r.smoothed_us(), Some(900));
    }

    #[test]
    fn it_follows_a_change_and_survives_any_number() {
        let mut r = RoundTrip::default();
        r.sample(u64::MAX);
        r.sample(u64::MAX);
        for _ in 0..600 {
            r.sample(100);
        }
        assert!(matches!(r.smoothed_us(), Some(100..=101)), "{r:?}");
    }
}
