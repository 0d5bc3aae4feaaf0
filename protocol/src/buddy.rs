//! A buddy allocator over a stretch of registered memory: only arithmetic, the memory is elsewhere.
//!
//! Blocks are powers of two. Everything is allocated at construction, so that neither taking nor giving
//! back a block allocates; both take a number of steps bounded by the number of orders.

use alloc::boxed::Box;
use alloc::vec;

/// No unit: the end of a free list.
const NONE: u32 = u32::MAX;
/// State of a unit that isn't the first of any block.
const INSIDE: u8 = 0xff;
/// Set beside the order in the state of a free block's first unit.
const FREE: u8 = 0x80;

/// Divides `units * unit` bytes into blocks.
#[derive(Debug)]
pub struct Buddy {
    unit: usize,
    max_order: u8,
    /// First free block of each order.
    heads: [u32; 32],
    /// Neighbours of a free block in its order's list, by first unit.
    links: Box<[(u32, u32)]>,
    /// Order of the block that begins at a unit, with [`FREE`]; or [`INSIDE`].
    state: Box<[u8]>,
    free_units: usize,
}

impl Buddy {
    /// An allocator over `total` bytes, cut down to a multiple of `largest`. Blocks are `unit` bytes at
    /// least and `largest` at most, both rounded up to powers of two.
    #[must_use]
    pub fn new(total: usize, unit: usize, largest: usize) -> Self {
        let unit = unit.max(1).next_power_of_two();
        let largest = largest.next_power_of_two().max(unit);
        let max_order = (largest / unit).trailing_zeros() as u8;
        let units = total / largest * (largest / unit);
        let mut buddy = Self {
            unit,
            max_order,
            heads: [NONE; 32],
            links: vec![(NONE, NONE); units].into_boxed_slice(),
            state: vec![INSIDE; units].into_boxed_slice(),
            free_units: units,
        };
        // Backwards, so that the lowest block stands first.
        for first in (0..units).step_by(1 << max_order).rev() {
            buddy.push(first as u32, max_order);
        }
        buddy
    }

    /// Size in bytes of the block that a request for `length` bytes takes; nothing if none is that large.
    #[must_use]
    pub fn block_size(&self, length: usize) -> Option<usize> {
        Some(self.unit << self.order(length)?)
    }

    /// Bytes not taken.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.free_units * self.unit
    }

    /// Bytes in all.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.state.len() * self.unit
    }

    /// Takes a block of at least `length` bytes; gives the offset of its first byte.
    pub fn take(&mut self, length: usize) -> Option<usize> {
        let order = self.order(length)?;
        let mut found = (order..=self.max_order).find(|&o| self.heads[usize::from(o)] != NONE)?;
        let first = self.heads[usize::from(found)];
        self.unlink(first, found);
        while found > order {
            found -= 1;
            self.push(first + (1 << found), found);
        }
        self.state[first as usize] = order;
        self.free_units -= 1 << order;
        Some(first as usize * self.unit)
    }

    /// Gives back the block that begins at `offset`. An offset that no taken block begins at is ignored
    /// (and caught in debug builds): giving back twice must not hand memory out twice.
    pub fn give_back(&mut self, offset: usize) {
        let mut first = (offset / self.unit) as u32;
        let Some(&state) = self.state.get(first as usize) else {
            debug_assert!(false, "offset {offset} is outside the memory");
            return;
        };
        if state & FREE != 0 || !offset.is_multiple_of(self.unit) {
            debug_assert!(false, "no taken block begins at offset {offset}");
            return;
        }
        let mut order = state;
        self.free_units += 1 << order;
        while order < self.max_order {
            let buddy = first ^ (1 << order);
            if self.state[buddy as usize] != order | FREE {
                break;
            }
            self.unlink(buddy, order);
            self.state[first.max(buddy) as usize] = INSIDE;
            first = first.min(buddy);
            order += 1;
        }
        self.push(first, order);
    }

    fn order(&self, length: usize) -> Option<u8> {
        let units = length.div_ceil(self.unit).max(1).next_power_of_two();
        let order = units.trailing_zeros() as u8;
        (order <= self.max_order).then_some(order)
    }

    fn push(&mut self, first: u32, order: u8) {
        let head = self.heads[usize::from(order)];
        self.links[first as usize] = (NONE, head);
        if head != NONE {
            self.links[head as usize].0 = first;
        }
        self.heads[usize::from(order)] = first;
        self.state[first as usize] = order | FREE;
    }

    fn unlink(&mut self, first: u32, order: u8) {
        let (previous, next) = self.links[first as usize];
        match previous {
            NONE => self.heads[usize::from(order)] = next,
            _ => self.links[previous as usize].1 = next,
        }
        if next != NONE {
            self.links[next as usize].0 = previous;
        }
        self.state[first as usize] = INSIDE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    #[test]
    fn everything_given_back_is_one_piece_again() {
        let mut buddy = Buddy::new(1 << 20, 4096, 1 << 20);
        let blocks: Vec<usize> = (0..256).map(|_| buddy.take(4096).unwrap()).collect();
        assert_eq!(buddy.take(1), None);
        blocks.iter().rev().for_each(|&b| buddy.give_back(b));
        assert_eq!(buddy.take(1 << 20), Some(0));
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_none_is_lost(steps in proptest::collection::vec((any::<bool>(), 1usize..200_000), 1..300)) {
            let mut buddy = Buddy::new(1 << 20, 4096, 1 << 18);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (take, n) in steps {
                if take {
                    if let Some(at) = buddy.take(n) {
                        let size = buddy.block_size(n).unwrap();
                        prop_assert!(size >= n && at + size <= 1 << 20);
                        prop_assert!(taken.iter().all(|&(a, s)| at + size <= a || a + s <= at));
                        taken.push((at, size));
                    }
                } else if !taken.is_empty() {
                    let (at, _) = taken.swap_remove(n % taken.len());
                    buddy.give_back(at);
                }
                let held: usize = taken.iter().map(|t| t.1).sum();
                prop_assert_eq!(buddy.free_bytes(), (1 << 20) - held);
            }
            taken.iter().for_each(|&(at, _)| buddy.give_back(at));
            prop_assert!((0..4).all(|_| buddy.take(1 << 18).is_some()));
        }
    }
}
