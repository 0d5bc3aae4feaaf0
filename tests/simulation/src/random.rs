//! One seed decides everything.

/// A generator with a seed (SplitMix64).
///
/// Each concern of a run (plan, faults, work, network, disk) has a stream of its own, so that leaving out a
/// fault doesn't change what the others draw.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream `concern` of a seed.
    #[must_use]
    pub fn new(seed: u64, concern: u64) -> Self {
        let mut random = Self(seed ^ concern.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    /// The next number.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, or 0.
    #[inline]
    pub fn below(&mut self, end: u64) -> u64 {
        // The bias of so small ends is no matter here.
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// A number from `from` to `to`, both included.
    #[inline]
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// A number from `from` to `to` whose order of magnitude is drawn first: as often 10 to 20 as 1000 to 2000.
    pub fn magnitude(&mut self, from: u64, to: u64) -> u64 {
        let octaves = u64::from((to / from.max(1)).max(1).ilog2());
        let low = from.max(1) << self.between(0, octaves);
        self.between(low, low * 2).clamp(from, to)
    }

    /// True in `permille` of 1000 cases.
    #[inline]
    pub fn chance(&mut self, permille: u64) -> bool {
        permille > 0 && self.below(1000) < permille
    }

    /// One of several.
    #[inline]
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_a_seed_differ_and_are_the_same_each_time() {
        let draw = |concern| -> Vec<u64> {
            let mut random = Random::new(7, concern);
            (0..8).map(|_| random.next()).collect()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn draws_stay_inside_and_reach_both_ends() {
        let mut random = Random::new(1, 1);
        let (mut low, mut high) = (u64::MAX, 0);
        for _ in 0..10_000 {
            let n = random.between(3, 9);
            (low, high) = (low.min(n), high.max(n));
            assert!((10..=5_000_000).contains(&random.magnitude(10, 5_000_000)));
        }
        assert_eq!((low, high), (3, 9));
    }
}
