//! What the target has granted, and what the initiator may still rely on (I6).

use crate::canary::{Canary, broken};
use crate::ids::{GrantNumber, Slot};
use crate::status::Status;
use crate::violation::Violation;
use crate::wire::Credits;

/// Statements of the grant that can be under way at once, the acknowledged one included. A power of two, so
/// that the numbers wrap where the table does. A target that changes its mind more often than once in a round
/// trip gains nothing by it.
const STATEMENTS: usize = 8;

/// The ledger of slots and of the data window of one queue.
///
/// The initiator goes by any statement that isn't older than the one it acknowledged last: the highest of
/// them binds. So a growth binds at once, and a shrink when it, or one after it, is acknowledged.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    said: Credits,
    /// Slots of the table.
    depth: u16,
    /// The latest grant that the initiator is known to keep to.
    acknowledged: GrantNumber,
    /// Slots granted by each statement from `acknowledged` to `said.number`, filed under its number.
    stated: [u16; STATEMENTS],
    /// The highest of them: slots below this one may be used.
    binding: u16,
    /// Bytes of the window that unanswered commands have used.
    window_used: u64,
}

impl Grant {
    /// A ledger that begins with `credits`, for a table of `depth` slots.
    #[must_use]
    pub fn new(credits: Credits, depth: u16) -> Self {
        let mut grant = Self {
            said: credits,
            depth,
            acknowledged: credits.number,
            stated: [0; STATEMENTS],
            binding: credits.granted_slots,
            window_used: 0,
        };
        *grant.stated_by(credits.number) = credits.granted_slots;
        grant
    }

    /// What every reply says.
    #[inline]
    #[must_use]
    pub fn said(&self) -> Credits {
        self.said
    }

    /// Slots below this one may be used: those granted, or more until a shrink is acknowledged.
    #[must_use]
    pub fn binding(&self) -> u16 {
        self.binding
    }

    /// Whether a shrink waits for its acknowledgement.
    #[must_use]
    pub fn shrinking(&self) -> bool {
        self.binding > self.said.granted_slots
    }

    /// Changes the number of granted slots; `false` when that isn't possible: for a number that isn't from 1
    /// to the depth, and while too many changes wait for their acknowledgement. The credit event makes an
    /// initiator acknowledge that is idle.
    pub fn change(&mut self, granted_slots: u16) -> bool {
        if granted_slots == self.said.granted_slots {
            return true;
        }
        if !(1..=self.depth).contains(&granted_slots) || self.unacknowledged() + 1 >= STATEMENTS {
            return false;
        }
        self.state(granted_slots);
        true
    }

    /// The initiator says which grant it keeps to. A command that waited while a control frame overtook it
    /// names an older one than is known already; that says nothing new.
    ///
    /// # Errors
    /// MALFORMED for a grant that was never stated.
    #[inline]
    pub fn seen(&mut self, number: GrantNumber) -> Result<(), Violation> {
        if number == self.acknowledged {
            return Ok(());
        }
        if self.said.number.since(number).is_none() {
            return Err(Violation::new(Status::MALFORMED, "a grant number that was never stated"));
        }
        if number.since(self.acknowledged).is_some() {
            self.acknowledged = number;
            self.bind();
        }
        Ok(())
    }

    /// Changes that the initiator hasn't shown to keep to.
    fn unacknowledged(&self) -> usize {
        usize::from(self.said.number.since(self.acknowledged).unwrap_or(0))
    }

    fn state(&mut self, granted_slots: u16) {
        self.said.granted_slots = granted_slots;
        self.said.number = self.said.number.next();
        *self.stated_by(self.said.number) = granted_slots;
        if broken(Canary::ShrinkUnacknowledged) {
            self.acknowledged = self.said.number;
        }
        self.bind();
    }

    fn stated_by(&mut self, number: GrantNumber) -> &mut u16 {
        &mut self.stated[usize::from(number.0) % STATEMENTS]
    }

    fn bind(&mut self) {
        self.binding = 0;
        let mut number = self.acknowledged;
        for _ in 0..=self.unacknowledged() {
            self.binding = self.binding.max(*self.stated_by(number));
            number = number.next();
        }
    }

    /// A new command arrived in `slot`.
    ///
    /// # Errors
    /// CREDIT_OVERRUN when the slot isn't granted.
    #[inline]
    pub fn check_slot(&self, slot: Slot) -> Result<(), Violation> {
        match slot.0 < self.binding {
            true => Ok(()),
            false => Err(Violation::new(Status::CREDIT_OVERRUN, "a command in a slot that wasn't granted")),
        }
    }

    /// A command brought `bytes` of payload above the in-capsule size without being asked.
    ///
    /// # Errors
    /// WINDOW_OVERRUN when that is more than the window has left.
    #[inline]
    pub fn use_window(&mut self, bytes: u32) -> Result<(), Violation> {
        let used = self.window_used + u64::from(bytes);
        if used > u64::from(self.said.data_window) {
            return Err(Violation::new(Status::WINDOW_OVERRUN, "more payload sent unasked than the window allows"));
        }
        self.window_used = used;
        Ok(())
    }

    /// The command that used `bytes` of the window is answered.
    #[inline]
    pub fn free_window(&mut self, bytes: u32) {
        self.window_used = self.window_used.saturating_sub(u64::from(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDITS: Credits = Credits { granted_slots: 32, number: GrantNumber(u16::MAX - 1), data_window: 1000 };

    fn grant() -> Grant {
        Grant::new(CREDITS, 64)
    }

    /// States a grant and gives its number.
    fn change(g: &mut Grant, granted_slots: u16) -> GrantNumber {
        assert!(g.change(granted_slots));
        g.said().number
    }

    #[test]
    fn a_growth_binds_at_once_and_a_shrink_when_it_is_acknowledged() {
        let mut g = grant();
        let growth = change(&mut g, 64);
        assert!(g.check_slot(Slot(63)).is_ok());
        g.seen(growth).unwrap();
        let shrink = change(&mut g, 16);
        assert!(g.check_slot(Slot(63)).is_ok(), "the initiator can't know yet");
        g.seen(growth).unwrap();
        assert!(g.shrinking(), "an old acknowledgement doesn't count");
        g.seen(shrink).unwrap();
        assert!(g.check_slot(Slot(16)).is_err());
        assert!(g.check_slot(Slot(15)).is_ok());
    }

    #[test]
    fn the_highest_of_all_statements_binds_that_the_initiator_may_go_by() {
        let mut g = grant();
        let numbers = [16, 48, 8, 24].map(|slots| change(&mut g, slots));
        for (number, binding) in numbers.into_iter().zip([48, 48, 24, 24]) {
            g.seen(number).unwrap();
            assert_eq!(g.binding(), binding);
        }
        assert!(!g.shrinking());
    }

    #[test]
    fn i6_a_word_from_before_a_growth_does_not_acknowledge_the_shrink_after_it() {
        let mut g = grant();
        let before = g.said().number;
        change(&mut g, 64);
        change(&mut g, 32);
        g.seen(before).unwrap();
        assert!(g.check_slot(Slot(63)).is_ok(), "the value is the same, the grant isn't");
    }

    #[test]
    fn i6_a_command_that_an_acknowledgement_overtook_takes_nothing_back() {
        let mut g = grant();
        let before = g.said().number;
        let shrink = change(&mut g, 16);
        g.seen(shrink).unwrap();
        g.seen(before).unwrap();
        assert_eq!(g.binding(), 16);
    }

    #[test]
    fn i8_only_so_many_changes_are_under_way() {
        let mut g = grant();
        let numbers: [_; STATEMENTS - 1] = core::array::from_fn(|n| change(&mut g, 1 + n as u16));
        assert!(!g.change(40));
        assert!(g.change(g.said().granted_slots), "that is no change");
        assert_eq!(g.binding(), 32);
        g.seen(numbers[0]).unwrap();
        assert!(g.change(40));
        assert!(!g.change(41));
        assert_eq!(g.binding(), 40);
    }

    #[test]
    fn no_grant_is_empty_or_larger_than_the_table() {
        let mut g = grant();
        assert!(!g.change(0) && !g.change(65));
        assert_eq!(g.said(), CREDITS);
        assert!(g.change(1) && g.change(64));
    }

    #[test]
    fn i9_a_grant_that_was_never_stated_cannot_be_acknowledged() {
        let mut g = grant();
        let next = g.said().number.next();
        assert_eq!(g.seen(next).unwrap_err().status, Status::MALFORMED);
        change(&mut g, 16);
        g.seen(next).unwrap();
    }

    #[test]
    fn the_window_is_what_unanswered_commands_may_hold() {
        let mut g = grant();
        g.use_window(600).unwrap();
        assert_eq!(g.use_window(401).unwrap_err().status, Status::WINDOW_OVERRUN);
        g.free_window(600);
        g.use_window(1000).unwrap();
    }
}
