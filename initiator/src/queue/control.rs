//! Control frames of a queue's path, both ways.

use twinrail_protocol::wire::{Control, ControlKind, Credits, EventCode, Frame};
use twinrail_protocol::{Geometry, Status, Violation};

use super::Queue;
use crate::error::PathEnd;

impl Queue {
    /// A control frame arrived; `text` is what a DISCONNECT says to people.
    pub(super) fn control(&mut self, control: &Control, text: String) -> Result<(), PathEnd> {
        let epoch = self.core.epoch();
        if control.epoch < epoch {
            self.metrics.stale_frames.inc();
            return Ok(());
        }
        if control.epoch > epoch {
            let detail = "a control frame of an epoch that wasn't activated";
            return Err(Violation { status: Status::UNEXPECTED_FRAME, detail }.into());
        }
        let Control { kind, code, token, value, status, .. } = *control;
        if kind.is_request() {
            self.path.control_credit.request_came(self.path.outbound.answers_waiting())?;
        }
        match kind {
            ControlKind::Probe => self.answer(Control::new(ControlKind::ProbeReply, epoch, token)),
            ControlKind::ProbeReply => {
                self.path.control_credit.answer_came()?;
                self.rails.probe_answered(self.path.id, token, self.now_us());
                Ok(())
            }
            ControlKind::Event if code == EventCode::CREDIT => {
                // An older change that still waits is answered with the grant that is kept to now: the answer
                // names it, so that it can't be taken for another.
                if let Some(earlier) = self.path.credit_event.replace(token) {
                    self.credits_seen(earlier)?;
                }
                self.core.credits_changed(control.credits)?;
                self.settle_credits()
            }
            ControlKind::Event => {
                match code {
                    EventCode::RESIZED if !(Geometry { size: value, ..self.geometry }).is_valid() => {
                        let detail = "a volume was resized to a size that none can have";
                        return Err(Violation { status: Status::MALFORMED, detail }.into());
                    }
                    EventCode::RESIZED => self.session.resized(value),
                    EventCode::DRAINING => {
                        self.metrics.draining.inc();
                        self.session.drains(value);
                    }
                    _ => tracing::debug!(?code, value, "an event of another version"),
                }
                self.answer(Control { code, ..Control::new(ControlKind::EventSeen, epoch, token) })
            }
            ControlKind::Closed if self.closing => Err(PathEnd::Closed),
            ControlKind::Disconnect if status == Status::CLOSED && self.session.is_closing() => Err(PathEnd::Closed),
            ControlKind::Disconnect => Err(PathEnd::Disconnected { status, text }),
            // Of this path: the target has dropped it. Of an older one: it is gone already.
            ControlKind::PathLost => Err(PathEnd::ClosedByTarget),
            ControlKind::EventSeen | ControlKind::Close | ControlKind::Closed => {
                let detail = "a control frame that nothing asked for";
                Err(Violation { status: Status::UNEXPECTED_FRAME, detail }.into())
            }
        }
    }

    /// Gives a control frame to the rail.
    pub(super) fn answer(&mut self, control: Control) -> Result<(), PathEnd> {
        if control.kind.is_answer() {
            self.path.control_credit.answer();
        }
        let room = self.path.outbound.push_control(Frame::Control(control).encode(), &[]);
        self.path.unsent = true;
        room.map_err(|_| {
            let detail = "more control requests than may be under way";
            Violation { status: Status::CONTROL_OVERRUN, detail }.into()
        })
    }

    /// Answers a change of credits once the new grant is kept to.
    pub(super) fn settle_credits(&mut self) -> Result<(), PathEnd> {
        match self.path.credit_event {
            Some(token) if self.core.allowance().is_settled() => {
                self.path.credit_event = None;
                self.credits_seen(token)
            }
            _ => Ok(()),
        }
    }

    fn credits_seen(&mut self, token: u64) -> Result<(), PathEnd> {
        let credits = Credits { number: self.core.allowance().keeps(), ..Credits::default() };
        let seen = Control::new(ControlKind::EventSeen, self.core.epoch(), token);
        self.answer(Control { code: EventCode::CREDIT, credits, ..seen })
    }
}
