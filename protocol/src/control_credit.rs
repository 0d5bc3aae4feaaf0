//! The credit of control requests of one connection, both ways (I6, I8).
//!
//! PROBE, EVENT and CLOSE are owed an answer, and [`CONTROL_CREDIT`] of them may be without one in each
//! direction. So both sides know how many control frames can ever wait.

use crate::limits::CONTROL_CREDIT;
use crate::status::Status;
use crate::violation::Violation;

/// Counts requests without an answer: ours, and the peer's.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlCredit {
    /// Requests of ours that the peer hasn't answered.
    asked: u16,
    /// Requests of the peer that we have no answer for yet.
    owed: u16,
}

impl ControlCredit {
    /// Takes the credit for a request of ours; `false` if as many as allowed are out: don't send it.
    #[must_use]
    pub fn ask(&mut self) -> bool {
        let allowed = self.asked < CONTROL_CREDIT;
        self.asked += u16::from(allowed);
        allowed
    }

    /// The peer answered a request of ours.
    ///
    /// # Errors
    /// UNEXPECTED_FRAME when none is out.
    pub fn answer_came(&mut self) -> Result<(), Violation> {
        let nothing = Violation::new(Status::UNEXPECTED_FRAME, "an answer to a control request that isn't out");
        self.asked = self.asked.checked_sub(1).ok_or(nothing)?;
        Ok(())
    }

    /// The peer sent a request. `answers_waiting` are those of our answers that the rail hasn't taken over
    /// yet: the peer can't have them back as credit.
    ///
    /// # Errors
    /// CONTROL_OVERRUN when more are unanswered than allowed.
    pub fn request_came(&mut self, answers_waiting: usize) -> Result<(), Violation> {
        if usize::from(self.owed) + answers_waiting >= usize::from(CONTROL_CREDIT) {
            return Err(Violation::new(Status::CONTROL_OVERRUN, "more unanswered control requests than allowed"));
        }
        self.owed += 1;
        Ok(())
    }

    /// We give the rail the answer to a request of the peer.
    pub fn answer(&mut self) {
        self.owed = self.owed.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_a_request_goes_out_only_while_there_is_credit_and_each_answer_gives_one_back() {
        let mut c = ControlCredit::default();
        for _ in 0..CONTROL_CREDIT {
            assert!(c.ask());
        }
        assert!(!c.ask() && !c.ask());
        c.answer_came().unwrap();
        assert!(c.ask());
        assert!(!c.ask(), "a refused request took none");
    }

    #[test]
    fn i9_an_answer_to_nothing_ends_the_path() {
        let mut c = ControlCredit::default();
        assert_eq!(c.answer_came().unwrap_err().status, Status::UNEXPECTED_FRAME);
        assert!(c.ask());
        c.answer_came().unwrap();
        assert!(c.answer_came().is_err());
    }

    #[test]
    fn i6_more_requests_than_there_is_credit_end_the_path() {
        let mut c = ControlCredit::default();
        for _ in 0..CONTROL_CREDIT {
            c.request_came(0).unwrap();
        }
        assert_eq!(c.request_came(0).unwrap_err().status, Status::CONTROL_OVERRUN);
        c.answer();
        assert!(c.request_came(1).is_err(), "the answer is still here");
        c.request_came(0).unwrap();
    }

    #[test]
    fn the_two_directions_have_credit_of_their_own() {
        let mut c = ControlCredit::default();
        for _ in 0..CONTROL_CREDIT {
            c.request_came(0).unwrap();
        }
        assert!(c.ask());
        c.answer();
        assert!(c.answer_came().is_ok());
    }
}
