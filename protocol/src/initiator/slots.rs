//! A set of slots.

use crate::ids::Slot;
use crate::limits::MAX_DEPTH;

const WORDS: usize = MAX_DEPTH as usize / 64;

/// A set of slots as a bit map, so that the lowest one is found in a few steps: low slots are used first,
/// and a shrinking grant then finds its upper slots idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotSet([u64; WORDS]);

impl SlotSet {
    pub(super) fn insert(&mut self, slot: Slot) {
        self.0[slot.index() / 64] |= 1 << (slot.0 % 64);
    }

    pub(super) fn remove(&mut self, slot: Slot) {
        self.0[slot.index() / 64] &= !(1 << (slot.0 % 64));
    }

    /// The lowest slot below `bound` that isn't in the set.
    pub(super) fn lowest_absent(&self, bound: u16) -> Option<Slot> {
        let word = self.0.iter().position(|&w| w != u64::MAX)?;
        let slot = (word * 64) as u16 + self.0[word].trailing_ones() as u16;
        (slot < bound).then_some(Slot(slot))
    }

    /// Whether the set has a slot that isn't below `bound`.
    pub(super) fn reaches(&self, bound: u16) -> bool {
        let (word, bit) = (usize::from(bound) / 64, bound % 64);
        self.0.iter().enumerate().any(|(i, &w)| match i {
            _ if i < word => false,
            _ if i == word => w >> bit != 0,
            _ => w != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_slots_come_first_and_the_bound_is_kept() {
        let mut set = SlotSet::default();
        for n in 0..MAX_DEPTH {
            assert_eq!(set.lowest_absent(n), None);
            assert_eq!(set.lowest_absent(MAX_DEPTH), Some(Slot(n)));
            set.insert(Slot(n));
            assert!(set.reaches(n) && !set.reaches(n + 1));
        }
        assert_eq!(set.lowest_absent(MAX_DEPTH), None);
        set.remove(Slot(70));
        assert_eq!(set.lowest_absent(MAX_DEPTH), Some(Slot(70)));
    }
}
