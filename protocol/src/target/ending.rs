//! I2: the end of a session is decided once, here, and is over when all that it gave to storage has ended and every
//! reactor has confirmed it. Until then no attach of its volume is answered.

use alloc::vec::Vec;

use crate::canary::{Canary, broken};
use crate::ids::SessionId;
use crate::status::Status;
use crate::wire::AttachMode;

#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub(super) session: SessionId,
    /// The volume's place.
    pub(super) volume: usize,
    pub(super) mode: AttachMode,
    /// Why.
    pub(super) cause: Status,
}

/// Sessions that end.
#[derive(Clone, Debug, Default)]
pub(super) struct Endings(Vec<Ending>);

impl Endings {
    pub(super) fn begin(&mut self, ending: Ending) {
        self.0.push(ending);
    }

    /// Every reactor has confirmed.
    pub(super) fn confirmed(&mut self, session: SessionId) -> Option<Ending> {
        let at = self.0.iter().position(|ending| ending.session == session)?;
        Some(self.0.swap_remove(at))
    }

    /// Whether an attach of `session` to `volume` has to wait. Of the same session there may be something left at
    /// another volume too.
    pub(super) fn block(&self, volume: usize, session: SessionId) -> bool {
        let counts = |ending: &&Ending| match ending.cause {
            Status::PREEMPTED | Status::TAKEN_OVER => !broken(Canary::PreemptAnsweredEarly),
            Status::CONNECTION_LOST => !broken(Canary::LeaseEndNotAwaited),
            _ => true,
        };
        self.0.iter().filter(counts).any(|ending| ending.volume == volume || ending.session == session)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Ending> {
        self.0.iter()
    }
}
