//! The commands of a queue that have not ended, with their buffers.
//!
//! A flight outlasts its slot when the target answers before the command's payload has left: the slot is free
//! then, but the rail still reads the buffer (I3).

use std::cell::Cell;

use twinrail_protocol::initiator::Completion;
use twinrail_protocol::{Opcode, Slot, Status, crc32c, crc32c_append};

use crate::arena::Buffer;
use crate::metrics::{Ended, QueueMetrics};
use crate::request::{Done, Request};

/// Number of a flight; also the token that the session core gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightId(u16);

#[derive(Debug)]
struct Flight {
    token: u64,
    opcode: Opcode,
    buffer: Option<Buffer>,
    /// Bytes of payload that the command brings.
    sent: u32,
    begun_ns: u64,
    /// When it was given to the rail; 0 before that.
    railed_ns: u64,
    /// Frames that wait to be sent with this buffer behind them.
    queued: Cell<u16>,
    /// How it ended, while frames still wait.
    ended: Option<Completion>,
    taken: bool,
}

/// All flights of a queue.
#[derive(Debug)]
pub(crate) struct Flights {
    table: Box<[Flight]>,
    free: Vec<u16>,
    by_slot: Box<[FlightId]>,
    /// Flights that ended while their frames wait.
    lingering: u16,
}

impl Flights {
    /// Room for a queue of `depth` slots, and for as many flights that linger.
    pub(crate) fn new(depth: u16) -> Self {
        let flights = 2 * depth;
        let flight = |_| Flight {
            token: 0,
            opcode: Opcode::READ,
            buffer: None,
            sent: 0,
            begun_ns: 0,
            railed_ns: 0,
            queued: Cell::new(0),
            ended: None,
            taken: false,
        };
        Self {
            table: (0..flights).map(flight).collect(),
            free: (0..flights).rev().collect(),
            by_slot: vec![FlightId(0); usize::from(depth)].into_boxed_slice(),
            lingering: 0,
        }
    }

    /// The flight that the next command gets; nothing while too many linger.
    pub(crate) fn next(&self) -> Option<FlightId> {
        self.free.last().map(|&flight| FlightId(flight))
    }

    /// Takes the flight that [`Self::next`] gave, for a command that has got `slot` and brings `sent` bytes.
    pub(crate) fn begin(&mut self, slot: Slot, request: Request, sent: u32, begun_ns: u64) {
        let Some(index) = self.free.pop() else { return };
        self.by_slot[slot.index()] = FlightId(index);
        let flight = &mut self.table[usize::from(index)];
        flight.token = request.token;
        flight.opcode = request.opcode;
        flight.buffer = request.buffer;
        (flight.sent, flight.begun_ns, flight.railed_ns) = (sent, begun_ns, 0);
        flight.taken = true;
    }

    /// The flight of the command in `slot`.
    pub(crate) fn of(&self, slot: Slot) -> FlightId {
        self.by_slot[slot.index()]
    }

    /// A frame of the command goes to the rail, with the payload behind it or not.
    pub(crate) fn railed(&mut self, id: FlightId, now_ns: u64, with_payload: bool) {
        let flight = &mut self.table[usize::from(id.0)];
        if flight.railed_ns == 0 {
            flight.railed_ns = now_ns.max(1);
        }
        if with_payload {
            flight.queued.set(flight.queued.get() + 1);
        }
    }

    /// What the rail sends behind a frame.
    pub(crate) fn payload(&self, id: FlightId) -> &[u8] {
        let flight = &self.table[usize::from(id.0)];
        flight.buffer.as_ref().map_or(&[], |buffer| &buffer[..flight.sent as usize])
    }

    /// The rail has read the payload behind one frame.
    pub(crate) fn sent(&self, id: FlightId) {
        let queued = &self.table[usize::from(id.0)].queued;
        queued.set(queued.get().saturating_sub(1));
    }

    /// CRC32C of the payload that the command brings.
    pub(crate) fn payload_crc(&self, id: FlightId) -> u32 {
        crc32c(self.payload(id))
    }

    /// Copies a payload that was staged into the buffer, and gives the CRC32C of what is there now (I7).
    pub(crate) fn fill_staged(&mut self, id: FlightId, payload: &[u8]) -> u32 {
        let place = self.place(id, payload.len());
        place.copy_from_slice(payload);
        crc32c(place)
    }

    /// Where `length` bytes of payload for the flight go. The session core has held `length` against the
    /// buffer's.
    pub(crate) fn place(&mut self, id: FlightId, length: usize) -> &mut [u8] {
        match &mut self.table[usize::from(id.0)].buffer {
            Some(buffer) => &mut buffer[..length],
            None => &mut [],
        }
    }

    /// A command has ended: tells `done`, unless the rail still reads its buffer.
    pub(crate) fn end(
        &mut self,
        completion: Completion,
        now_ns: u64,
        metrics: &mut QueueMetrics,
        done: &mut impl FnMut(Done),
    ) {
        let id = FlightId(completion.token as u16);
        let flight = &mut self.table[usize::from(id.0)];
        if flight.queued.get() > 0 {
            flight.ended = Some(completion);
            self.lingering += 1;
            return;
        }
        let Completion { opcode, status, result, received, .. } = completion;
        let (token, buffer) = (flight.token, flight.buffer.take());
        let unsent = status == Status::CONNECTION_LOST && flight.railed_ns == 0;
        flight.taken = false;
        let railed_ns = if flight.railed_ns == 0 { now_ns } else { flight.railed_ns };
        let queue_ns = railed_ns.saturating_sub(flight.begun_ns);
        let (wire_ns, written) = (now_ns.saturating_sub(railed_ns), flight.sent);
        metrics.ended(&Ended { opcode, status, queue_ns, wire_ns, written, read: received });
        self.free.push(id.0);
        done(Done { token, opcode, status, result, received, unsent, buffer });
    }

    /// Ends the flights that lingered until their frames were sent.
    pub(crate) fn end_lingering(&mut self, now_ns: u64, metrics: &mut QueueMetrics, done: &mut impl FnMut(Done)) {
        for index in 0..self.table.len() {
            if self.lingering == 0 {
                return;
            }
            let flight = &mut self.table[index];
            if flight.queued.get() == 0
                && let Some(completion) = flight.ended.take()
            {
                self.lingering -= 1;
                self.end(completion, now_ns, metrics, done);
            }
        }
    }

    /// The path is fenced: the rail has dropped its frames, and reads no buffer any more.
    pub(crate) fn path_lost(&mut self, now_ns: u64, metrics: &mut QueueMetrics, done: &mut impl FnMut(Done)) {
        self.table.iter().for_each(|flight| flight.queued.set(0));
        self.end_lingering(now_ns, metrics, done);
    }

    /// Whether flights linger.
    #[inline]
    pub(crate) fn any_lingering(&self) -> bool {
        self.lingering > 0
    }

    /// Ends every flight: the session is gone, and the rail has dropped its frames. What had ended before keeps
    /// its outcome.
    pub(crate) fn end_all(&mut self, now_ns: u64, metrics: &mut QueueMetrics, done: &mut impl FnMut(Done)) {
        self.lingering = 0;
        for index in 0..self.table.len() {
            let flight = &mut self.table[index];
            if !flight.taken {
                continue;
            }
            flight.queued.set(0);
            let (token, opcode) = (index as u64, flight.opcode);
            let lost =
                Completion { slot: Slot(0), token, opcode, status: Status::CONNECTION_LOST, result: 0, received: 0 };
            let completion = flight.ended.take().unwrap_or(lost);
            self.end(completion, now_ns, metrics, done);
        }
    }
}

impl FlightId {
    /// The flight as a token for the session core.
    pub(crate) fn token(self) -> u64 {
        self.0.into()
    }
}

/// A long payload on its way into a flight's buffer. Its CRC32C is computed while the bytes are still in the
/// processor's cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arriving {
    pub(crate) slot: Slot,
    pub(crate) flight: FlightId,
    pub(crate) length: usize,
    /// What the reply says the CRC32C is.
    pub(crate) expected_crc: u32,
    summed: usize,
    crc: u32,
}

impl Arriving {
    pub(crate) fn new(slot: Slot, flight: FlightId, length: usize, expected_crc: u32) -> Self {
        Self { slot, flight, length, expected_crc, summed: 0, crc: 0 }
    }

    /// Takes in what has arrived of `place`: all but `remaining` bytes.
    pub(crate) fn sum(&mut self, place: &[u8], remaining: usize) {
        let arrived = self.length - remaining.min(self.length);
        self.crc = crc32c_append(self.crc, &place[self.summed..arrived]);
        self.summed = arrived;
    }

    /// The CRC32C of what was taken in.
    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }
}
