//! The connection that serves a queue, and what belongs to it alone: the next path begins without any of it.

use twinrail_fallback_tcp::{Inbound, Outbound, Socket};
use twinrail_protocol::ControlCredit;
use twinrail_protocol::initiator::QueueOptions;
use twinrail_protocol::initiator::rails::PathId;

use super::flights::{Arriving, FlightId};
use super::wait::Look;

/// A path that serves, or did.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) id: PathId,
    /// None once it is fenced.
    pub(super) socket: Option<Socket>,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound<FlightId>,
    /// Data frames that may wait to be sent.
    pub(super) outbound_room: usize,
    /// The socket took less than it was offered.
    pub(super) blocked: bool,
    pub(super) arriving: Option<Arriving>,
    /// What the look in `wait` brought; `poll` goes on from there.
    pub(super) looked: Option<Look>,
    /// Something to send, or to take in, was left for the next turn.
    pub(super) unsent: bool,
    pub(super) unread: bool,
    /// The target has shown in this turn that it hears this side.
    pub(super) answered: bool,
    /// Token of the change of credits that is answered once the new grant is kept to.
    pub(super) credit_event: Option<u64>,
    pub(super) control_credit: ControlCredit,
}

impl Path {
    pub(super) fn new(id: PathId, socket: Socket, agreed: &QueueOptions) -> Self {
        let outbound_room = 2 * usize::from(agreed.depth);
        Self {
            id,
            socket: Some(socket),
            inbound: Inbound::new(agreed.in_capsule),
            outbound: Outbound::new(outbound_room),
            outbound_room,
            blocked: false,
            arriving: None,
            looked: None,
            // Whatever waited for a path.
            unsent: true,
            unread: false,
            answered: false,
            credit_event: None,
            control_credit: ControlCredit::default(),
        }
    }

    /// Whether it serves.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.socket.is_some()
    }

    /// Nothing more is sent or received on it (I2): what the kernel still holds is dropped with the connection,
    /// unless `leave_last_words`. The rail reads and writes no buffer any more (I3).
    pub(super) fn close(&mut self, leave_last_words: bool) {
        self.outbound.drain(|_| {});
        (self.arriving, self.looked, self.credit_event) = (None, None, None);
        (self.blocked, self.unsent, self.unread) = (false, false, false);
        if let Some(socket) = self.socket.take()
            && !leave_last_words
        {
            drop(socket.abort());
        }
    }
}
