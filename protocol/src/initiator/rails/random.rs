//! Random numbers for jitter, from a seed: the same seed gives the same run.

/// SplitMix64.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `most`. (The remainder favours small numbers by less than anybody can see in a
    /// waiting time.)
    pub(super) fn up_to(&mut self, most: u64) -> u64 {
        self.next() % most.saturating_add(1).max(1)
    }
}
