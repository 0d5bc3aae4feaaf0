//! Checksums of what a volume should have, and whether it has it. The target computes its own (VERIFY), so
//! that no data moves.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use twinrail_initiator::{ExtentFlags, blocking};
use twinrail_protocol::limits::MAX_VERIFY_RANGE;

use crate::crew;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::range::Range;

/// Longest range that is summed up as one, in bytes.
pub(crate) const CHUNK: u64 = MAX_VERIFY_RANGE;

/// Zeros from this length on are looked for in the map of the volume before anything is read, in bytes.
const LONG_ZEROS: u64 = 1 << 20;

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
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Data { crc: u32 },
    Zeros,
}

impl Sums {
    /// Data of this length and CRC32C is at `offset`.
    pub(crate) fn data(&mut self, offset: u64, length: u64, crc: u32) {
        self.add(offset, Sum { length, content: Content::Data { crc } });
    }

    /// Zeros are at `offset`.
    pub(crate) fn zeros(&mut self, offset: u64, length: u64) {
        let content = match length < LONG_ZEROS {
            true => Content::Data { crc: crc_of_zeros(length) },
            false => Content::Zeros,
        };
        self.add(offset, Sum { length, content });
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
        let left = Mutex::new(self.by_offset.into_iter());
        crew::work(
            VERIFIERS,
            interrupt,
            || Ok(()),
            |()| {
                let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((offset, Sum { length, content })) = next else { return Ok(false) };
                match content {
                    Content::Data { crc } => same(volume, offset, length, crc)?,
                    Content::Zeros => zeros(volume, offset, length, interrupt)?,
                }
                progress.add(length);
                Ok(true)
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
    let content = match (first.content, second.content) {
        (Content::Zeros, Content::Zeros) => Content::Zeros,
        (Content::Data { crc: a }, Content::Data { crc: b }) if offset / CHUNK == next / CHUNK && length <= CHUNK => {
            Content::Data { crc: crc32c::crc32c_combine(a, b, second.length as usize) }
        }
        _ => return None,
    };
    Some(Sum { length, content })
}

/// Fails if the volume has something else than data of this CRC32C.
fn same(volume: &blocking::Volume, offset: u64, length: u64, crc: u32) -> anyhow::Result<()> {
    let range = Range { offset, length };
    let found = volume.verify(offset, length).with_context(|| range.to_string())?;
    if found == crc {
        return Ok(());
    }
    bail!(
        "verification failed: the volume's {range} have checksum {found:08x}, not {crc:08x}; is somebody else \
         writing there?"
    )
}

/// Fails if the volume has something else than zeros. What the map of the volume says to be zeros is.
fn zeros(volume: &blocking::Volume, mut offset: u64, length: u64, interrupt: &Interrupt) -> anyhow::Result<()> {
    for extent in volume.block_status(offset, length)? {
        let until = offset + extent.length;
        while !extent.flags.has(ExtentFlags::ZERO) && offset < until {
            interrupt.check()?;
            let step = (until - offset).min(CHUNK);
            same(volume, offset, step, crc_of_zeros(step))?;
            offset += step;
        }
        offset = until;
    }
    Ok(())
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
    fn long_zeros_are_one_stretch_and_short_ones_belong_to_the_data() {
        let mut sums = Sums::default();
        sums.zeros(0, 8 << 30);
        sums.zeros(8 << 30, 1 << 30);
        assert_eq!(sums.by_offset.len(), 1);
        sums.data(9 << 30, 3, crc32c::crc32c(b"abc"));
        sums.zeros((9 << 30) + 3, 5);
        let crc = crc32c::crc32c(b"abc\0\0\0\0\0");
        assert_eq!(sums.by_offset.len(), 2);
        assert_eq!(sums.by_offset[&(9 << 30)], Sum { length: 8, content: Content::Data { crc } });
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
            prop_assert_eq!(whole, [(100, Sum { length: 40, content: Content::Data { crc } })]);
        }
    }
}
