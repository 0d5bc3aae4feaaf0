//! The memory of one reactor: one mapping, registered once with its ring (and later once with each RDMA
//! device), in which every payload lies. Disk reads land here and leave from here.
//!
//! Only the reactor's own thread has it. The kernel reads and writes parts of it while an operation of the
//! ring is under way; those parts belong to a slot that is *at storage*, and the slot's owner touches them
//! again only after the completion (I3).

use std::io;

use twinrail_protocol::buddy::Buddy;

use crate::mapping::{Mapping, Pages};

/// The smallest block in bytes: a page, so that every block suits O_DIRECT.
const UNIT: usize = 4096;
/// The ring refuses a single registered buffer that is larger (seen with 6.18).
pub(super) const CHUNK: usize = 1 << 30;

/// Where some bytes lie in the arena. Only an address: who may use it is a matter of its [`Block`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: usize,
    pub(super) length: usize,
}

impl Piece {
    /// `length` bytes of this piece from `skip` on; cut to what there is.
    pub(super) fn part(self, skip: usize, length: usize) -> Self {
        let skip = skip.min(self.length);
        Self { offset: self.offset + skip, length: length.min(self.length - skip) }
    }
}

/// Memory that was taken and must be given back; not `Clone`, so that it can't be given back twice.
#[derive(Debug)]
pub(super) struct Block {
    piece: Piece,
    /// For a command that could have waited for it: counts against what all of those may have.
    pub(super) asked: bool,
}

impl Block {
    /// The first `length` bytes.
    pub(super) fn piece(&self, length: usize) -> Piece {
        self.piece.part(0, length)
    }

    /// Bytes that are held, `piece` or more of them used.
    pub(super) fn size(&self) -> usize {
        self.piece.length
    }
}

/// The mapping and who has which part of it.
#[derive(Debug)]
pub(super) struct Arena {
    mapping: Mapping,
    buddy: Buddy,
}

impl Arena {
    /// Maps `bytes`, rounded up to whole blocks of `largest`, on pages of this kind.
    pub(super) fn map(bytes: usize, largest: usize, pages: Pages) -> io::Result<Self> {
        let length = bytes.max(1).next_multiple_of(largest.next_power_of_two());
        let mapping = Mapping::new(length, pages)?;
        Ok(Self { buddy: Buddy::new(mapping.length(), UNIT, largest), mapping })
    }

    /// Bytes in all.
    pub(super) fn length(&self) -> usize {
        self.mapping.length()
    }

    /// Bytes that nobody has.
    pub(super) fn free_bytes(&self) -> usize {
        self.buddy.free_bytes()
    }

    /// Bytes that [`Self::take`] would take for `length`.
    pub(super) fn block_size(&self, length: usize) -> usize {
        self.buddy.block_size(length).unwrap_or(usize::MAX)
    }

    /// Takes at least `length` bytes, if there are as many in one piece.
    pub(super) fn take(&mut self, length: usize) -> Option<Block> {
        let offset = self.buddy.take(length)?;
        Some(Block { piece: Piece { offset, length: self.block_size(length) }, asked: false })
    }

    /// Gives a block back. The caller has seen to it that no device touches it any more (I3).
    pub(super) fn give_back(&mut self, block: Block) {
        self.buddy.give_back(block.piece.offset);
    }

    /// The bytes of `piece`.
    pub(super) fn bytes(&self, piece: Piece) -> &[u8] {
        let piece = self.inside(piece);
        // SAFETY: inside the mapping, which lives as long as `self`; `&self` keeps our own writes away, and
        // the kernel writes only to pieces of slots that are at storage, which the reactor doesn't read (I3).
        unsafe { std::slice::from_raw_parts(self.mapping.base().as_ptr().add(piece.offset), piece.length) }
    }

    /// The bytes of `piece`, to be changed.
    pub(super) fn bytes_mut(&mut self, piece: Piece) -> &mut [u8] {
        let piece = self.inside(piece);
        // SAFETY: as in `bytes`; `&mut self` makes it the only reference into the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base().as_ptr().add(piece.offset), piece.length) }
    }

    /// Where the kernel finds `piece`, and its length.
    pub(super) fn address(&self, piece: Piece) -> (*mut u8, u32) {
        let piece = self.inside(piece);
        // SAFETY: inside the mapping.
        (unsafe { self.mapping.base().as_ptr().add(piece.offset) }, piece.length as u32)
    }

    /// The chunks to register with the ring, each at most [`CHUNK`] bytes.
    pub(super) fn chunks(&self) -> Vec<libc::iovec> {
        let chunk = |offset: usize| libc::iovec {
            // SAFETY: `offset` is inside the mapping.
            iov_base: unsafe { self.mapping.base().as_ptr().add(offset) }.cast(),
            iov_len: CHUNK.min(self.length() - offset),
        };
        (0..self.length()).step_by(CHUNK).map(chunk).collect()
    }

    /// Pieces come from blocks and are always inside; a bug elsewhere must not become a wild pointer.
    fn inside(&self, piece: Piece) -> Piece {
        let offset = piece.offset.min(self.length());
        Piece { offset, length: piece.length.min(self.length() - offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_whole_pages_and_come_back() {
        let mut arena = Arena::map(4 << 20, 1 << 20, Pages::Plain).unwrap();
        let all = arena.free_bytes();
        let block = arena.take(5000).unwrap();
        assert_eq!(block.size(), 8192);
        let piece = block.piece(5000);
        assert_eq!(arena.address(piece).0 as usize % UNIT, 0);
        arena.bytes_mut(piece).fill(7);
        assert_eq!(arena.bytes(piece), [7; 5000]);
        arena.give_back(block);
        assert_eq!(arena.free_bytes(), all);
        assert!(arena.take((1 << 20) + 1).is_none());
    }

    #[test]
    fn a_piece_that_points_outside_is_cut() {
        let arena = Arena::map(2 << 20, 1 << 20, Pages::Plain).unwrap();
        assert_eq!(arena.bytes(Piece { offset: usize::MAX, length: 9 }).len(), 0);
    }
}
