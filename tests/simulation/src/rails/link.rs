//! The cables: one for each initiator and rail, with a latency, and cut in each direction on its own.

use crate::clock::Time;
use crate::history::Side;
use crate::random::Random;

/// One cable.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// Time that a message takes at least.
    pub latency: Time,
    /// Most that is added at random.
    pub jitter: Time,
    /// Whether nothing comes to the initiator, and to the target.
    cut: [bool; 2],
}

impl Link {
    /// A healthy cable.
    #[must_use]
    pub fn new(latency: Time, jitter: Time) -> Self {
        Self { latency, jitter, cut: [false; 2] }
    }

    /// Whether nothing reaches `side`.
    #[inline]
    #[must_use]
    pub fn is_cut_to(&self, side: Side) -> bool {
        self.cut[side as usize]
    }

    /// Cuts or mends the direction towards `side`.
    pub fn set_cut_to(&mut self, side: Side, cut: bool) {
        self.cut[side as usize] = cut;
    }

    /// How long the next message takes.
    #[inline]
    pub fn delay(&self, random: &mut Random) -> Time {
        self.latency + random.below(self.jitter + 1)
    }
}

/// The side across.
#[inline]
#[must_use]
pub fn across(side: Side) -> Side {
    match side {
        Side::Initiator => Side::Target,
        Side::Target => Side::Initiator,
    }
}
