//! Checksums of what a volume should have, and whether it has it. The target computes its own (VERIFY), so
//! that no data moves.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use twinrail_initiator::blocking;
use twinrail_protocol::limits::MAX_VERIFY_RANGE;

use crate::crew;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::range::Range;

/// Longest range that is summed up as one, in bytes.
pub(crate) const CHUNK: u64 = MAX_VERIFY_RANGE;

/// VERIFY commands in flight: each reads up to a chunk from the target's storage.
const VERIFIERS: usize = 4;

/// Checksums of stretches of a volume. Neighbours are put together as they come, in any order, so that what is
/// kept is one sum for a chunk, and the few that are not whole yet.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    by_offset: BTreeMap<u64, Sum>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sum {
    length: u64,
    crc: u32,
}

impl Sums {
    /// Data of this length and CRC32C is at `offset`.
    pub(crate) fn data(&mut self, offset: u64, length: u64, crc: u32) {
        self.add(offset, Sum { length, crc });
    }

    /// Zeros are at `offset`. They are summed up like data: that a map calls a range zeros is no proof that it reads
    /// as zeros.
    pub(crate) fn zeros(&mut self, mut offset: u64, length: u64) {
        let end = offset + length;
        while offset < end {
            let length = (CHUNK - offset % CHUNK).min(end - offset);
            self.add(offset, Sum { length, crc: crc_of_zeros(length) });
            offset += length;
        }
    }

    fn add(&mut self, mut offset: u64, mut sum: Sum) {
        if let Some((&before, &first)) = self.by_offset.range(..offset).next_back()
            && let Some(both) = together(before, first, offset, sum)
        {
            self.by_offset.remove(&before);
            (offset, sum) = (before, both);
        }
        let after = offset + sum.length;
        if let Some(&second) = self.by_offset.get(&after)
            && let Some(both) = together(offset, sum, after, second)
        {
            self.by_offset.remove(&after);
            sum = both;
        }
        self.by_offset.insert(offset, sum);
    }

    /// Fails if the volume has anything else.
    pub(crate) fn check(
        self,
        volume: &blocking::Volume,
        interrupt: &Interrupt,
        progress: &Progress,
    ) -> anyhow::Result<()> {
        let stretches = self.by_offset.into_iter();
        crew::each(
            VERIFIERS,
            interrupt,
            stretches,
            || (),
            |(), (offset, Sum { length, crc })| {
                let range = Range { offset, length };
                let found = volume.verify(offset, length).with_context(|| range.to_string())?;
                if found != crc {
                    bail!(
                        "verification failed: the volume's {range} have checksum {found:08x}, not {crc:08x}; is somebody \
                     else writing there?"
                    );
                }
                progress.add(length);
                Ok(())
            },
        )
    }
}

/// The sum over two stretches, if the second continues the first in the same chunk.
fn together(offset: u64, first: Sum, next: u64, second: Sum) -> Option<Sum> {
    let length = first.length + second.length;
    if offset + first.length != next {
        return None;
    }
    if offset / CHUNK != next / CHUNK || length > CHUNK {
        return None;
    }
    Some(Sum { length, crc: crc32c::crc32c_combine(first.crc, second.crc, second.length as usize) })
}

/// The CRC32C of so many zeros, in steps that double.
pub(crate) fn crc_of_zeros(length: u64) -> u32 {
    let (mut crc, mut power, mut of_power) = (0, 1u64, crc32c::crc32c(&[0]));
    let mut left = length;
    while left > 0 {
        if left & 1 == 1 {
            crc = crc32c::crc32c_combine(crc, of_power, power as usize);
        }
        left >>= 1;
        of_power = crc32c::crc32c_combine(of_power, of_power, power as usize);
        power = power.wrapping_mul(2);
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sums_of_zeros() {
        for length in [0, 1, 2, 3, 511, 4096, 1_000_001] {
            assert_eq!(crc_of_zeros(length as u64), crc32c::crc32c(&vec![0; length]), "{length}");
        }
    }

    #[test]
    fn zeros_were_left_out_of_the_sums() {
        let mut sums = Sums::default();
        sums.zeros(CHUNK - 4096, CHUNK + 8192);
        sums.data(2 * CHUNK + 4096, 3, crc32c::crc32c(b"abc"));
        sums.zeros(2 * CHUNK + 4099, 5);
        let end = [&[0; 4096][..], b"abc\0\0\0\0\0"].concat();
        let expected = [
            (CHUNK - 4096, Sum { length: 4096, crc: crc_of_zeros(4096) }),
            (CHUNK, Sum { length: CHUNK, crc: crc_of_zeros(CHUNK) }),
            (2 * CHUNK, Sum { length: 4104, crc: crc32c::crc32c(&end) }),
        ];
        assert_eq!(sums.by_offset.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_sum_ends_with_its_chunk() {
        let mut sums = Sums::default();
        for piece in (0..192).rev() {
            sums.data(piece << 20, 1 << 20, 0);
        }
        let stretches: Vec<_> = sums.by_offset.iter().map(|(&offset, sum)| (offset, sum.length)).collect();
        assert_eq!(stretches, [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, CHUNK)]);
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_give_the_sum_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 40),
            order in Just((0..10usize).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let mut sums = Sums::default();
            for piece in order {
                sums.data(100 + piece as u64 * 4, 4, crc32c::crc32c(&bytes[piece * 4..][..4]));
            }
            let crc = crc32c::crc32c(&bytes);
            let whole: Vec<_> = sums.by_offset.into_iter().collect();
            prop_assert_eq!(whole, [(100, Sum { length: 40, crc })]);
        }
    }
}
