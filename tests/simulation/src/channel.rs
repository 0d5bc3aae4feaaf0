//! One side of a connection, as both drivers use it: frames in, frames out, and which buffers a device still
//! has.

use twinrail_fallback_tcp::{Arrival, Inbound, Outbound};
use twinrail_protocol::Violation;
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::wire::{Control, Frame, Handshake, HeaderBytes, Hello, Placement, Rail};

use crate::ground::Ground;
use crate::history::{Lending, Side};
use crate::memory::Lent;
use crate::rails::rdma::Op;
use crate::rails::{ConnectionId, Received, placed};

/// What comes out of a channel.
#[derive(Debug)]
pub enum Item {
    /// The first frame of an initiator; its name is in [`Channel::payload`].
    Hello(Hello),
    /// A frame; what followed it is in [`Channel::payload`].
    Frame(Frame),
    /// A frame with a payload that wants a place: [`Channel::place`] or [`Channel::skip`].
    Large(Frame),
    /// What was placed is whole.
    Placed,
    /// The device or the kernel is done with a payload that was sent.
    Sent(Lent),
    /// The peer's device has a message that brought no payload (RDMA).
    Acknowledged,
    /// An RDMA READ into this buffer is done.
    Fetched(Lent),
    /// An RDMA WRITE out of this buffer is done.
    Delivered(Lent),
    /// Nothing more for now.
    Nothing,
    /// The connection is over.
    Ended,
    /// The peer broke a rule.
    Bad(Violation),
}

/// Tags of RDMA requests, in the top byte of their context.
const SEND: u64 = 1;
const READ: u64 = 2;
const WRITE: u64 = 3;

fn context(tag: u64, lent: Option<Lent>) -> u64 {
    lent.map_or(0, |lent| tag << 56 | u64::from(lent.buffer) << 32 | u64::from(lent.lending.0))
}

fn uncontext(context: u64) -> (u64, Lent) {
    let buffer = (context >> 32) as u32 & 0xff_ffff;
    (context >> 56, Lent { buffer, lending: Lending(context as u32) })
}

/// One side of a connection.
#[derive(Debug)]
pub struct Channel {
    /// The connection.
    pub id: ConnectionId,
    /// Which side.
    pub side: Side,
    /// Rail.
    pub rail: Rail,
    /// It was activated: it carries commands.
    pub active: bool,
    /// A fence was begun.
    pub fenced: bool,
    /// No device touches anything of it any more.
    pub drained: bool,
    /// The target's side of a new connection: HELLO comes first.
    expects_hello: bool,
    header: Option<HeaderBytes>,
    /// What followed the last header.
    pub(crate) payload: Vec<u8>,
    /// Bytes of the handshake that the socket hasn't taken.
    unsent: Vec<u8>,
    inbound: Option<Box<Inbound>>,
    outbound: Option<Box<Outbound<Lent>>>,
    /// Where the payload goes that is being placed.
    place: Option<(Lent, usize)>,
    /// Buffers that a device has for this channel; one entry for each operation.
    pinned: Vec<Lent>,
    /// Sent on TCP and not told yet.
    sent: Vec<Lent>,
}

impl Channel {
    /// This side of a connection.
    #[must_use]
    pub fn new(ground: &Ground, id: ConnectionId, side: Side) -> Self {
        Self {
            id,
            side,
            rail: ground.network.connection(id).rail,
            active: false,
            fenced: false,
            drained: false,
            expects_hello: side == Side::Target,
            header: None,
            payload: Vec::new(),
            unsent: Vec::new(),
            inbound: None,
            outbound: None,
            place: None,
            pinned: Vec::new(),
            sent: Vec::new(),
        }
    }

    /// What followed the last header.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The next thing that arrived or was done.
    pub fn next(&mut self, ground: &mut Ground) -> Item {
        if self.fenced {
            return Item::Nothing;
        }
        if let Some(lent) = self.sent.pop() {
            self.unpin(lent);
            return Item::Sent(lent);
        }
        match self.rail {
            Rail::TCP if self.active => self.next_active(ground),
            Rail::TCP => self.next_handshake(ground),
            _ => self.next_message(ground),
        }
    }

    fn next_message(&mut self, ground: &mut Ground) -> Item {
        // Completions first: a reply often says that its command's own send is done.
        if let Some(done) = ground.rdma_completed(self.id, self.side) {
            let (tag, lent) = uncontext(done);
            match tag {
                SEND => self.unpin(lent),
                READ => self.unpin(lent),
                WRITE => self.unpin(lent),
                _ => return Item::Acknowledged,
            }
            return match tag {
                SEND => Item::Sent(lent),
                READ => Item::Fetched(lent),
                _ => Item::Delivered(lent),
            };
        }
        if !ground.rdma_take(self.id, self.side, &mut self.payload) {
            return Item::Nothing;
        }
        let Some((header, _)) = self.payload.split_first_chunk::<HEADER_LEN>() else { return Item::Ended };
        let header = *header;
        self.payload.drain(..HEADER_LEN);
        self.decode(&header)
    }

    fn decode(&mut self, header: &HeaderBytes) -> Item {
        if std::mem::take(&mut self.expects_hello) {
            return Hello::decode(header).map_or_else(|fault| Item::Bad(fault.into()), Item::Hello);
        }
        match Frame::decode(header).and_then(|frame| frame.on_rail(self.rail)) {
            Ok(frame) => Item::Frame(frame),
            Err(fault) => Item::Bad(fault.into()),
        }
    }

    fn next_handshake(&mut self, ground: &mut Ground) -> Item {
        let header = match self.header {
            Some(header) => header,
            None => {
                let mut header = [0; HEADER_LEN];
                match ground.tcp_read_exact(self.id, self.side, &mut header) {
                    Received::Some => {}
                    Received::Nothing => return Item::Nothing,
                    Received::Ended => return Item::Ended,
                }
                *self.header.insert(header)
            }
        };
        let following = match self.expects_hello {
            true => Hello::decode(&header).map(|hello| hello.name.length),
            false => Frame::decode(&header).map(|frame| frame.following()),
        };
        let following = match following {
            Ok(following) if following as usize <= MAX_HANDSHAKE_PAYLOAD => following as usize,
            Ok(_) => return Item::Ended,
            Err(fault) => return Item::Bad(fault.into()),
        };
        self.payload.resize(following, 0);
        if following > 0 {
            match ground.tcp_read_exact(self.id, self.side, &mut self.payload) {
                Received::Some => {}
                Received::Nothing => return Item::Nothing,
                Received::Ended => return Item::Ended,
            }
        }
        self.header = None;
        self.decode(&header)
    }

    fn next_active(&mut self, ground: &mut Ground) -> Item {
        let Some(inbound) = &mut self.inbound else { return Item::Nothing };
        loop {
            match inbound.next() {
                Ok(Arrival::Pending) => {}
                Ok(Arrival::Frame { frame, payload }) => {
                    self.payload.clear();
                    self.payload.extend_from_slice(payload);
                    return Item::Frame(frame);
                }
                Ok(Arrival::Large { frame }) => return Item::Large(frame),
                Ok(Arrival::PayloadComplete) => {
                    self.place = None;
                    return Item::Placed;
                }
                Err(fault) => return Item::Bad(fault.into()),
            }
            let place = self.place.filter(|_| inbound.wants_destination());
            match ground.tcp_fill(self.id, self.side, inbound, place) {
                Received::Some => {}
                Received::Nothing => return Item::Nothing,
                Received::Ended => return Item::Ended,
            }
        }
    }

    /// Where a large payload goes.
    pub fn place(&mut self, ground: &mut Ground, lent: Lent, length: usize) {
        if let Some(inbound) = &mut self.inbound {
            inbound.place(&mut ground.memory.bytes_mut(lent)[..length]);
            self.place = Some((lent, length));
        }
    }

    /// It goes nowhere.
    pub fn skip(&mut self) {
        if let Some(inbound) = &mut self.inbound {
            inbound.skip();
        }
    }

    /// From here on it carries commands: at most `frames` wait to be sent, and `receives` messages may come.
    pub fn activate(&mut self, ground: &mut Ground, in_capsule: u32, frames: usize, receives: usize) {
        self.active = true;
        match self.rail {
            Rail::TCP => {
                self.inbound = Some(Box::new(Inbound::new(in_capsule)));
                self.outbound = Some(Box::new(Outbound::new(frames)));
            }
            _ => ground.rdma_post_receives(self.id, self.side, receives),
        }
    }

    /// Sends HELLO.
    pub fn hello(&mut self, ground: &mut Ground, hello: &Hello, name: &[u8]) {
        self.send_bytes(ground, &hello.encode(), name);
    }

    /// Sends a frame of the handshake.
    pub fn handshake(&mut self, ground: &mut Ground, frame: &Handshake<'_>) {
        let mut bytes = [0; HEADER_LEN + 2048];
        if let Some(length) = frame.encode(&mut bytes) {
            self.send_bytes(ground, &bytes[..length], &[]);
        }
    }

    fn send_bytes(&mut self, ground: &mut Ground, bytes: &[u8], rest: &[u8]) {
        if self.fenced {
            return;
        }
        match self.rail {
            Rail::TCP => {
                self.unsent.extend_from_slice(bytes);
                self.unsent.extend_from_slice(rest);
                self.flush(ground, false);
            }
            _ => ground.rdma_post(self.id, self.side, Op::Send(None), &[bytes, rest], 0),
        }
    }

    /// Sends a control frame.
    pub fn control(&mut self, ground: &mut Ground, control: Control) {
        let header = Frame::Control(control).encode();
        match (&mut self.outbound, self.fenced) {
            (_, true) => {}
            (Some(outbound), _) if self.rail == Rail::TCP => {
                // A peer that keeps to its credit leaves room.
                let _full = outbound.push_control(header, &[]);
                self.flush(ground, false);
            }
            _ => self.send_bytes(ground, &header, &[]),
        }
    }

    /// Sends a data frame, with the front of a buffer if a payload follows it.
    pub fn data(&mut self, ground: &mut Ground, frame: &Frame, payload: Option<Lent>) {
        if self.fenced {
            return;
        }
        let header = frame.encode();
        let payload = payload.filter(|_| frame.following() > 0);
        self.pinned.extend(payload);
        match (&mut self.outbound, self.rail) {
            (Some(outbound), Rail::TCP) => {
                // The capacity is what the credits allow.
                let _full = outbound.push(header, payload);
                self.flush(ground, payload.is_some());
            }
            _ => {
                let length = frame.following() as usize;
                let mut bytes = std::mem::take(&mut self.payload);
                bytes.clear();
                if let Some(lent) = payload {
                    bytes.extend_from_slice(&ground.memory.bytes(lent)[..length]);
                }
                ground.rdma_post(self.id, self.side, Op::Send(payload), &[&header, &bytes], context(SEND, payload));
                self.payload = bytes;
            }
        }
    }

    /// RDMA: fetches a payload from where the peer said.
    pub fn read_remote(&mut self, ground: &mut Ground, from: Placement, local: Lent, length: u32) {
        if self.fenced {
            return;
        }
        self.pinned.push(local);
        let op = Op::Read { remote: placed(from), local, length };
        ground.rdma_post(self.id, self.side, op, &[], context(READ, Some(local)));
    }

    /// RDMA: puts a payload where the peer wants it.
    pub fn write_remote(&mut self, ground: &mut Ground, to: Placement, local: Lent, length: u32) {
        if self.fenced {
            return;
        }
        self.pinned.push(local);
        let op = Op::Write { remote: placed(to), local, length };
        ground.rdma_post(self.id, self.side, op, &[], context(WRITE, Some(local)));
    }

    /// Sends on what waits.
    pub fn flush(&mut self, ground: &mut Ground, payload_last: bool) {
        if self.rail != Rail::TCP || self.fenced {
            return;
        }
        if !self.unsent.is_empty() {
            let sent = ground.tcp_send(self.id, self.side, &self.unsent);
            self.unsent.drain(..sent);
            if !self.unsent.is_empty() {
                return;
            }
        }
        if let Some(outbound) = &mut self.outbound {
            let sent = &mut self.sent;
            ground.tcp_flush(self.id, self.side, outbound, payload_last, |lent| lent, |lent| sent.push(lent));
        }
    }

    fn unpin(&mut self, lent: Lent) {
        if let Some(at) = self.pinned.iter().position(|other| *other == lent) {
            self.pinned.swap_remove(at);
        }
    }

    /// Whether a device may still touch the buffer for this channel.
    #[must_use]
    pub fn pins(&self, lent: Lent) -> bool {
        self.pinned.contains(&lent) || self.place.is_some_and(|(place, _)| place == lent)
    }

    /// Answers to control requests that the peer can't have yet.
    #[must_use]
    pub fn answers_waiting(&self) -> usize {
        self.outbound.as_ref().map_or(0, |outbound| outbound.answers_waiting())
    }

    /// Nothing goes out or is taken in any more. [`Self::is_drained`] when no device has anything of it.
    pub fn fence(&mut self, ground: &mut Ground) {
        if std::mem::replace(&mut self.fenced, true) {
            return;
        }
        ground.fence(self.id, self.side);
        if let Some(outbound) = &mut self.outbound {
            outbound.drain(|_| {});
        }
        self.place = None;
        if self.rail == Rail::TCP {
            self.drained();
        }
    }

    /// The drain has ended.
    pub fn drained(&mut self) {
        self.drained = true;
        self.pinned.clear();
        self.sent.clear();
    }
}
