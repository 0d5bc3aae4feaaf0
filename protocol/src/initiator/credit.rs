//! What the target has granted, and what of it is in use (I6).

use crate::ids::GrantNumber;
use crate::wire::Credits;

/// The initiator's view of its credits.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// The latest statement heard.
    said: Credits,
    /// The grant that is kept to. Older than `said` while commands in slots above a shrunken grant are still
    /// out.
    keeps: GrantNumber,
    window_used: u64,
}

impl Allowance {
    pub(super) fn new(said: Credits) -> Self {
        Self { said, keeps: said.number, window_used: 0 }
    }

    /// What the target said last.
    #[must_use]
    pub fn said(&self) -> Credits {
        self.said
    }

    /// The number of the grant that is kept to: what every command says, and what acknowledges a shrink.
    #[inline]
    #[must_use]
    pub fn keeps(&self) -> GrantNumber {
        self.keeps
    }

    /// Whether it is the latest one that is kept to.
    #[inline]
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.keeps == self.said.number
    }

    /// Bytes of the data window in use.
    #[must_use]
    pub fn window_used(&self) -> u64 {
        self.window_used
    }

    /// The target states the credits. What is older than what is known waited while a control frame overtook
    /// it, and says nothing. A growth holds at once; a shrink is kept to for new commands at once, and
    /// acknowledged when [`Self::settle`] finds nothing out above it.
    #[inline]
    pub(super) fn hear(&mut self, credits: Credits) {
        if credits.number.since(self.said.number).is_some_and(|changes| changes > 0) {
            self.said = credits;
        }
    }

    /// `reaches(bound)` says whether a command is out in a slot at or above `bound`.
    #[inline]
    pub(super) fn settle(&mut self, reaches: impl FnOnce(u16) -> bool) {
        if !self.is_settled() && !reaches(self.said.granted_slots) {
            self.keeps = self.said.number;
        }
    }

    /// Takes `bytes` of the window if it has as many left.
    #[inline]
    pub(super) fn use_window(&mut self, bytes: u32) -> bool {
        let used = self.window_used + u64::from(bytes);
        let fits = used <= u64::from(self.said.data_window);
        if fits {
            self.window_used = used;
        }
        fits
    }

    #[inline]
    pub(super) fn free_window(&mut self, bytes: u32) {
        self.window_used = self.window_used.saturating_sub(u64::from(bytes));
    }
}
