//! Where the next request goes: a fast small generator of numbers, the same for the same seed.

/// SplitMix64: one multiplication more than a counter, and good enough to spread requests over a disk.
#[derive(Clone, Debug)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    #[inline]
    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `limit` - 1. Slightly uneven for limits near 2^64, which no volume has.
    #[inline]
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

/// The order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Pattern {
    /// Anywhere on the volume
    Random,
    /// One behind the other, each queue beginning at its share of the volume
    Sequential,
}

impl Pattern {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Sequential => "sequential",
        }
    }
}

/// Makes up the requests of one queue.
#[derive(Clone, Debug)]
pub(super) struct Accesses {
    random: Random,
    pattern: Pattern,
    read_percent: u64,
    block: u64,
    /// Blocks of the volume.
    blocks: u64,
    /// The next block of a sequential pattern.
    next: u64,
}

impl Accesses {
    /// For the queue `index` of `queues`.
    pub(super) fn new(
        pattern: Pattern,
        read_percent: u8,
        block: u64,
        blocks: u64,
        seed: u64,
        index: u64,
        queues: u64,
    ) -> Self {
        // Queues must not go the same way.
        let random = Random::new(Random::new(seed ^ (index << 32)).next());
        Self { random, pattern, read_percent: read_percent.into(), block, blocks, next: blocks * index / queues }
    }

    /// First byte of the next request, and whether it reads.
    #[inline]
    pub(super) fn next(&mut self) -> (u64, bool) {
        let reads = self.read_percent == 100 || self.random.below(100) < self.read_percent;
        let block = match self.pattern {
            Pattern::Random => self.random.below(self.blocks),
            Pattern::Sequential => {
                let block = self.next;
                self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            }
        };
        (block * self.block, reads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accesses(pattern: Pattern, read_percent: u8, seed: u64, index: u64) -> Vec<(u64, bool)> {
        let mut accesses = Accesses::new(pattern, read_percent, 4096, 1000, seed, index, 4);
        (0..10_000).map(|_| accesses.next()).collect()
    }

    #[test]
    fn random_requests_are_everywhere_and_repeatable() {
        let all = accesses(Pattern::Random, 100, 7, 0);
        assert!(all.iter().all(|&(offset, reads)| offset % 4096 == 0 && offset < 4096 * 1000 && reads));
        let mut seen: Vec<u64> = all.iter().map(|&(offset, _)| offset).collect();
        seen.sort_unstable();
        seen.dedup();
        // Of 1000 blocks all but a few are met in 10000 requests.
        assert!(seen.len() > 990, "{}", seen.len());
        assert_eq!(all, accesses(Pattern::Random, 100, 7, 0));
        assert_ne!(all, accesses(Pattern::Random, 100, 8, 0));
        assert_ne!(all, accesses(Pattern::Random, 100, 7, 1));
    }

    #[test]
    fn sequential_requests_begin_at_the_share_and_go_round() {
        let all = accesses(Pattern::Sequential, 100, 7, 3);
        assert_eq!(all[0].0, 750 * 4096);
        assert_eq!((all[249].0, all[250].0), (999 * 4096, 0));
    }

    #[test]
    fn reads_and_writes_are_mixed_as_asked() {
        let reads = |percent| accesses(Pattern::Random, percent, 7, 0).iter().filter(|(_, reads)| *reads).count();
        assert_eq!((reads(0), reads(100)), (0, 10_000));
        assert!((6_800..7_200).contains(&reads(70)), "{}", reads(70));
    }
}
