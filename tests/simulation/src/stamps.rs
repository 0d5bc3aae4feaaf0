//! Stamps as bytes: what the blocks of the volume look like on the wire and in memory.

use crate::history::Stamp;

/// Length of a block in bytes.
pub const BLOCK: usize = 512;

/// The word that a block with this stamp is full of at place `block`. Stamp 0 is zeros wherever it lies.
#[inline]
fn word(stamp: Stamp, block: u16) -> u64 {
    match stamp {
        Stamp::ZERO => 0,
        Stamp(number) => (u64::from(number) << 32 | u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
    }
}

/// Fills one block.
#[inline]
pub fn write(bytes: &mut [u8], stamp: Stamp, block: u16) {
    let word = word(stamp, block).to_le_bytes();
    bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|chunk| *chunk = word);
}

/// Fills consecutive blocks from `first` with one stamp.
pub fn write_all(bytes: &mut [u8], stamp: Stamp, first: u16) {
    bytes.chunks_exact_mut(BLOCK).zip(first..).for_each(|(bytes, block)| write(bytes, stamp, block));
}

/// The stamp of one block, if all of it is one and it lies in its place.
#[must_use]
pub fn read(bytes: &[u8], block: u16) -> Stamp {
    // Only the first word tells which stamp it might be: undo the multiplication.
    const INVERSE: u64 = inverse(0x9e37_79b9_7f4a_7c15);
    let words = bytes.as_chunks::<8>().0;
    let Some(&first) = words.first() else { return Stamp::DAMAGED };
    if words.iter().any(|other| *other != first) {
        return Stamp::DAMAGED;
    }
    let value = u64::from_le_bytes(first);
    if value == 0 {
        return Stamp::ZERO;
    }
    // The lowest bit was set, whatever it had been.
    [value, value & !1]
        .iter()
        .map(|candidate| Stamp((candidate.wrapping_mul(INVERSE) >> 32) as u32))
        .find(|stamp| *stamp != Stamp::ZERO && *stamp != Stamp::DAMAGED && word(*stamp, block) == value)
        .unwrap_or(Stamp::DAMAGED)
}

/// The inverse of an odd number modulo 2^64.
const fn inverse(of: u64) -> u64 {
    // Newton's iteration doubles the good bits with each step.
    let (mut x, mut step) = (of, 0);
    while step < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(of.wrapping_mul(x)));
        step += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_back_and_damage_is_seen() {
        let mut bytes = [0; BLOCK];
        for number in (0..1000).chain([u32::MAX - 1]) {
            write(&mut bytes, Stamp(number), 7);
            assert_eq!(read(&bytes, 7), Stamp(number));
            if number != 0 {
                assert_eq!(read(&bytes, 8), Stamp::DAMAGED, "at another place");
            }
            bytes[100] ^= 1;
            assert_eq!(read(&bytes, 7), Stamp::DAMAGED);
        }
        write(&mut bytes, Stamp::DAMAGED, 7);
        assert_eq!(read(&bytes, 7), Stamp::DAMAGED);
    }
}
