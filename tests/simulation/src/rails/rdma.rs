//! One end of an RDMA connection: a reliable-connected queue pair, as the hardware keeps it.
//!
//! - Requests reach the peer in order, and complete in order when its NIC has acknowledged them, which says
//!   nothing of its application.
//! - An error flushes all that is outstanding on the side that erred. The other side may stay unaware until its
//!   own requests run out of retries, or a disconnect reaches it.
//! - After an error, until the drain ends, the peer's one-sided requests and answers to own ones may still land.

use std::collections::VecDeque;

use crate::clock::Time;
use crate::memory::Lent;

/// How a queue pair stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Ready to send.
    #[default]
    Up,
    /// In ERROR: nothing completes well any more, but the device may still touch memory.
    Error,
    /// Drained or destroyed: the device is done with it.
    Drained,
}

/// What the device does with a request.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// A message, and the buffer that part of it lies in.
    Send(Option<Lent>),
    /// Fetches from the peer's memory.
    Read {
        /// There.
        remote: Lent,
        /// Here.
        local: Lent,
        /// Number of bytes.
        length: u32,
    },
    /// Puts into the peer's memory.
    Write {
        /// Here.
        local: Lent,
        /// There.
        remote: Lent,
        /// Number of bytes.
        length: u32,
    },
}

/// A request that was posted.
#[derive(Debug)]
pub struct Work {
    /// What.
    pub op: Op,
    /// The driver's number for it.
    pub context: u64,
    /// The message, or what was read.
    pub bytes: Vec<u8>,
}

/// A queue pair.
#[derive(Debug, Default)]
pub struct QueuePair {
    /// How it stands.
    pub state: State,
    /// A drain was begun.
    pub draining: bool,
    /// Requests that aren't completed, in order.
    pub posted: VecDeque<Work>,
    /// Of these so many have reached the peer.
    pub reached: usize,
    /// Of these one got lost on the wire, when this side was drained already.
    pub gap: bool,
    /// Messages that the application hasn't taken.
    pub inbox: VecDeque<Vec<u8>>,
    /// Receives posted, those with a message in them included.
    pub receives: usize,
    /// Completions that the application hasn't taken.
    pub completed: VecDeque<u64>,
    /// Nothing arrives before.
    pub last_arrival: Time,
    /// No acknowledgement comes before.
    pub last_acknowledgement: Time,
    /// Arrivals here that found the cable cut.
    pub stalled: u32,
    /// Acknowledgements that did.
    pub stalled_acknowledgements: u32,
    /// Counts acknowledgements.
    pub progress: u32,
    /// The retry counter runs.
    pub watching: bool,
}

impl QueuePair {
    /// A fresh one; keeps its memory, and gives messages back to `spare`.
    pub fn reset(&mut self, spare: &mut Vec<Vec<u8>>) {
        spare.extend(self.posted.drain(..).map(|work| work.bytes));
        spare.extend(self.inbox.drain(..));
        self.completed.clear();
        let Self { posted, inbox, completed, .. } = std::mem::take(self);
        *self = Self { posted, inbox, completed, receives: HANDSHAKE_RECEIVES, ..Self::default() };
    }
}

/// Receives posted on a connection that carries the handshake and control frames only.
pub const HANDSHAKE_RECEIVES: usize = 16;
