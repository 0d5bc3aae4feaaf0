//! The rails between initiators and target: cables, and connections of two kinds over them.
//!
//! Everything here is the world's: what a kernel, a NIC or a cable does. Processes reach it through the methods
//! of [`Ground`], and hear of it by [`Notice`]s.

pub mod link;
pub mod rdma;
pub mod tcp;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};

use twinrail_fallback_tcp::{Filled, Inbound, Outbound};
use twinrail_protocol::canary::{Canary, broken};
use twinrail_protocol::limits::HEADER_LEN;
use twinrail_protocol::wire::{Placement, Rail};

use crate::clock::{MS, SECOND, Time};
use crate::ground::{Event, Ground, Notice, Process};
use crate::history::{Lending, Side, What};
use crate::memory::Lent;
use crate::note;
use link::{Link, across};
use rdma::{HANDSHAKE_RECEIVES, Op, QueuePair, State, Work};
use tcp::Stream;

/// A connection: counted over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u32);

impl ConnectionId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// What happens on a rail.
#[derive(Clone, Copy, Debug)]
pub struct RailEvent {
    connection: ConnectionId,
    /// The side that it happens to.
    side: Side,
    what: Happening,
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    /// The request for a connection reaches the target.
    Asked,
    /// The answer reaches the initiator.
    Answered { accepted: bool },
    /// The next piece or message arrives.
    Arrives,
    /// RDMA: the first request outstanding here is acknowledged.
    Acknowledged,
    /// TCP: there is room to send again.
    Room,
    /// The other side's reset or disconnect arrives.
    Reset,
    /// RDMA: retries are exhausted if there was no progress since.
    RetriesExhausted { progress: u32 },
    /// The device is done with this side.
    Drained,
}

/// One side of a connection.
#[derive(Debug, Default)]
pub struct End {
    /// A process has it.
    pub open: bool,
    /// The kernel knows that it is broken.
    pub broken: bool,
    /// What comes here, on TCP.
    stream: Stream,
    /// What stands here, on RDMA.
    pair: QueuePair,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    /// Rail.
    pub rail: Rail,
    /// Whose.
    pub initiator: u8,
    /// The connection stands: the handshake of the rail itself is over.
    established: bool,
    ends: [End; 2],
}

impl Default for Connection {
    fn default() -> Self {
        Self { rail: Rail::TCP, initiator: 0, established: false, ends: Default::default() }
    }
}

/// What is true of the target's host, as the network sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Host {
    /// Its kernel answers, and the process listens.
    #[default]
    Serving,
    /// Its kernel answers, and says that nobody listens.
    NobodyListens,
    /// It is silent.
    Down,
}

/// All cables and connections.
#[derive(Debug, Default)]
pub struct Network {
    /// For each initiator of the plan, TCP's and RDMA's.
    links: Vec<[Link; 2]>,
    /// Which of them each process of an initiator uses.
    plugs: Vec<u8>,
    connections: Vec<Connection>,
    used: usize,
    /// Messages' memory, for use again.
    spare: Vec<Vec<u8>>,
    /// The target's host.
    pub host: Host,
    /// Most bytes that wait in a TCP socket.
    pub window: usize,
    /// How long an RDMA request is repeated before it fails.
    pub retry_time: Time,
    /// Payloads still to be damaged towards each side.
    pub damage: [u32; 2],
}

impl Network {
    /// An empty network with these cables.
    pub fn reset(&mut self, links: impl IntoIterator<Item = [Link; 2]>, window: usize, retry_time: Time) {
        self.links.clear();
        self.links.extend(links);
        self.plugs.clear();
        self.used = 0;
        self.host = Host::Serving;
        self.damage = [0; 2];
        (self.window, self.retry_time) = (window, retry_time);
    }

    /// Number of connections so far.
    #[must_use]
    pub fn count(&self) -> usize {
        self.used
    }

    /// A connection.
    #[must_use]
    pub fn connection(&self, id: ConnectionId) -> &Connection {
        &self.connections[id.index()]
    }

    fn end(&mut self, id: ConnectionId, side: Side) -> &mut End {
        &mut self.connections[id.index()].ends[side as usize]
    }

    /// A process uses the cables of an initiator of the plan.
    pub fn plug(&mut self, process: u8, planned: u8) {
        debug_assert_eq!(self.plugs.len(), usize::from(process), "one after the other");
        self.plugs.push(planned);
    }

    /// Whose cables a connection runs over.
    fn planned(&self, initiator: u8) -> u8 {
        self.plugs.get(usize::from(initiator)).copied().unwrap_or(0)
    }

    /// A cable.
    pub fn link(&mut self, initiator: u8, rail: Rail) -> &mut Link {
        &mut self.links[usize::from(initiator)][place(rail)]
    }
}

fn place(rail: Rail) -> usize {
    usize::from(rail == Rail::RDMA)
}

/// Where an RDMA peer finds a buffer.
#[must_use]
pub fn placement(lent: Lent) -> Placement {
    Placement { address: ((u64::from(lent.buffer) + 1) << 32) | u64::from(lent.lending.0), key: 1 }
}

/// The buffer that a placement names.
#[must_use]
pub fn placed(placement: Placement) -> Lent {
    Lent { buffer: ((placement.address >> 32) as u32).wrapping_sub(1), lending: Lending(placement.address as u32) }
}

/// Turns a bit of a payload if one is to be damaged.
fn damage(left: &mut u32, bytes: &mut [u8]) {
    if let (Some(byte), true) = (bytes.last_mut(), *left > 0) {
        *left -= 1;
        *byte ^= 0x10;
    }
}

/// How far reading came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Something.
    Some,
    /// Nothing more for now.
    Nothing,
    /// The stream has ended, or is broken.
    Ended,
}

// What processes do.
impl Ground {
    fn process_of(&self, connection: ConnectionId, side: Side) -> Process {
        match side {
            Side::Target => Process::Target,
            Side::Initiator => Process::Initiator(self.network.connection(connection).initiator),
        }
    }

    fn plan_rail(&mut self, at: Time, connection: ConnectionId, side: Side, what: Happening) {
        self.clock.at(at, Event::Rail(RailEvent { connection, side, what }));
    }

    fn delay(&mut self, connection: ConnectionId) -> Time {
        let Connection { initiator, rail, .. } = *self.network.connection(connection);
        let planned = self.network.planned(initiator);
        self.network.links[usize::from(planned)][place(rail)].delay(&mut self.rail_random)
    }

    fn is_cut(&self, connection: ConnectionId, side: Side) -> bool {
        let Connection { initiator, rail, .. } = *self.network.connection(connection);
        let planned = self.network.planned(initiator);
        self.network.links[usize::from(planned)][place(rail)].is_cut_to(side)
            || (side == Side::Target && self.network.host == Host::Down)
    }

    /// An initiator asks for a connection: [`Notice::Dialed`] or [`Notice::DialFailed`] may come.
    pub fn dial(&mut self, initiator: u8, rail: Rail) -> ConnectionId {
        let network = &mut self.network;
        let id = ConnectionId(network.used as u32);
        network.used += 1;
        if network.connections.len() < network.used {
            network.connections.push(Connection::default());
        }
        let window = network.window;
        let connection = &mut network.connections[id.index()];
        (connection.rail, connection.initiator, connection.established) = (rail, initiator, false);
        for end in &mut connection.ends {
            (end.open, end.broken) = (false, false);
            end.stream.reset(window);
            end.pair.reset(&mut network.spare);
        }
        connection.ends[Side::Initiator as usize].open = true;
        let at = self.now() + self.delay(id);
        self.plan_rail(at, id, Side::Target, Happening::Asked);
        id
    }

    /// The target takes a connection that was asked for.
    pub fn accept(&mut self, id: ConnectionId) {
        self.network.end(id, Side::Target).open = true;
        let at = self.now() + self.delay(id);
        self.plan_rail(at, id, Side::Initiator, Happening::Answered { accepted: true });
    }

    /// Whether the connection can still be used by this side.
    #[must_use]
    pub fn is_usable(&self, id: ConnectionId, side: Side) -> bool {
        let end = &self.network.connection(id).ends[side as usize];
        end.open && !end.broken
    }

    /// Nothing goes out or is taken in by this side any more; [`Notice::Drained`] tells when no device touches
    /// its memory any more.
    pub fn fence(&mut self, id: ConnectionId, side: Side) {
        let rail = self.network.connection(id).rail;
        let end = self.network.end(id, side);
        if rail == Rail::TCP {
            let process = self.process_of(id, side);
            self.close(id, side);
            return self.tell(process, Notice::Drained(id));
        }
        if std::mem::replace(&mut end.pair.draining, true) {
            return;
        }
        if end.pair.state == State::Up {
            end.pair.state = State::Error;
        }
        end.broken = true;
        let takes = self.rail_random.magnitude(5, 100 * MS);
        if broken(Canary::DrainSkipped) {
            let process = self.process_of(id, side);
            self.tell(process, Notice::Drained(id));
        }
        let at = self.now() + takes;
        self.plan_rail(at, id, side, Happening::Drained);
    }

    /// The process gives the connection up. On RDMA that waits for the drain by itself; who has memory there
    /// must call [`Self::fence`] and wait.
    pub fn close(&mut self, id: ConnectionId, side: Side) {
        let rail = self.network.connection(id).rail;
        if !std::mem::replace(&mut self.network.end(id, side).open, false) {
            return;
        }
        if rail == Rail::RDMA && self.network.end(id, side).pair.state != State::Drained {
            self.fence(id, side);
        }
        let at = self.now() + self.delay(id);
        self.plan_rail(at, id, across(side), Happening::Reset);
    }

    /// The process sends no more, and what it sent still arrives.
    pub fn shut_down(&mut self, id: ConnectionId, side: Side) {
        if self.network.connection(id).rail == Rail::RDMA {
            return self.close(id, side);
        }
        let at = self.now() + self.delay(id);
        let at = self.network.end(id, across(side)).stream.end(at);
        self.network.end(id, side).open = false;
        self.plan_rail(at, id, across(side), Happening::Arrives);
    }

    /// A process died, or its host: the kernel cleans up, and tells the peers or not.
    pub fn forget(&mut self, process: Process, told: bool) {
        let side = process.side();
        for n in 0..self.network.used {
            let id = ConnectionId(n as u32);
            if self.process_of(id, side) != process {
                continue;
            }
            let end = self.network.end(id, side);
            let was_open = std::mem::replace(&mut end.open, false);
            end.pair.state = State::Drained;
            if was_open && told {
                let at = self.now() + self.delay(id);
                self.plan_rail(at, id, across(side), Happening::Reset);
            }
        }
        self.notices[process.index()].clear();
    }

    // TCP.

    /// Sends bytes of the handshake; the number taken.
    pub fn tcp_send(&mut self, id: ConnectionId, side: Side, bytes: &[u8]) -> usize {
        if !self.is_usable(id, side) {
            return bytes.len();
        }
        let at = self.now() + self.delay(id);
        let (sent, at) = self.network.end(id, across(side)).stream.send([bytes], at);
        if sent > 0 {
            self.plan_rail(at, id, across(side), Happening::Arrives);
        }
        sent
    }

    /// Sends what waits, through the rail's own framing. `payload_last`: what was queued last ends with a
    /// payload, which may be damaged on the way.
    pub fn tcp_flush<P: Copy>(
        &mut self,
        id: ConnectionId,
        side: Side,
        outbound: &mut Outbound<P>,
        payload_last: bool,
        lent: impl Fn(P) -> Lent,
        sent: impl FnMut(P),
    ) {
        if !self.is_usable(id, side) || outbound.is_empty() {
            return;
        }
        let at = self.now() + self.delay(id);
        let memory = &self.memory;
        let stream = &mut self.network.connections[id.index()].ends[across(side) as usize].stream;
        let sender = tcp::Sender { stream: RefCell::new(stream), at, pieces: Cell::new(0) };
        // A broken connection is told of by a notice, and what doesn't fit waits for room.
        let _ = outbound.flush(&sender, usize::MAX, |payload| memory.bytes(lent(*payload)), sent);
        let pieces = sender.pieces.get();
        let stream = &mut self.network.connections[id.index()].ends[across(side) as usize].stream;
        if payload_last && outbound.is_empty() {
            damage(&mut self.network.damage[across(side) as usize], stream.last_byte());
        }
        let at = stream.last_arrival();
        for _ in 0..pieces {
            self.plan_rail(at, id, across(side), Happening::Arrives);
        }
    }

    /// Receives exactly as many bytes, or nothing.
    pub fn tcp_read_exact(&mut self, id: ConnectionId, side: Side, into: &mut [u8]) -> Received {
        let stream = &mut self.network.end(id, side).stream;
        match stream.read_exact(into) {
            true => {
                self.tcp_made_room(id, side);
                Received::Some
            }
            false if stream.ended => Received::Ended,
            false => Received::Nothing,
        }
    }

    /// Receives once, through the rail's own framing.
    pub fn tcp_fill(
        &mut self,
        id: ConnectionId,
        side: Side,
        inbound: &mut Inbound,
        into: Option<(Lent, usize)>,
    ) -> Received {
        let destination = into.map_or(&mut [][..], |(lent, length)| &mut self.memory.bytes_mut(lent)[..length]);
        let stream = &mut self.network.connections[id.index()].ends[side as usize].stream;
        match inbound.fill(&tcp::Receiver(RefCell::new(stream)), destination) {
            Ok(Filled::Bytes { .. }) => {
                self.tcp_made_room(id, side);
                Received::Some
            }
            Ok(Filled::WouldBlock) => Received::Nothing,
            Ok(Filled::Closed | Filled::Full) | Err(_) => Received::Ended,
        }
    }

    fn tcp_made_room(&mut self, id: ConnectionId, side: Side) {
        if std::mem::take(&mut self.network.end(id, side).stream.sender_waits) {
            let at = self.now() + self.delay(id);
            self.plan_rail(at, id, across(side), Happening::Room);
        }
    }

    // RDMA.

    /// So many receives are posted from now on.
    pub fn rdma_post_receives(&mut self, id: ConnectionId, side: Side, receives: usize) {
        self.network.end(id, side).pair.receives = receives.max(HANDSHAKE_RECEIVES);
    }

    /// Posts a request; `message` is what a send brings. `context` comes back with its completion. Nothing
    /// happens on a queue pair that isn't up: the drain covers it.
    pub fn rdma_post(&mut self, id: ConnectionId, side: Side, op: Op, message: &[&[u8]], context: u64) {
        let end = &mut self.network.connections[id.index()].ends[side as usize];
        if end.pair.state != State::Up || !end.open {
            return;
        }
        let mut bytes = self.network.spare.pop().unwrap_or_default();
        bytes.clear();
        message.iter().for_each(|part| bytes.extend_from_slice(part));
        if let Op::Write { local, length, .. } = op {
            bytes.extend_from_slice(self.memory.read(local, length as usize, self.clock.now(), &mut self.history));
        }
        end.pair.posted.push_back(Work { op, context, bytes });
        let at = self.now() + self.delay(id);
        let peer = &mut self.network.end(id, across(side)).pair;
        peer.last_arrival = peer.last_arrival.max(at);
        let at = peer.last_arrival;
        self.plan_rail(at, id, across(side), Happening::Arrives);
    }

    /// The next message that arrived, appended to `into`.
    pub fn rdma_take(&mut self, id: ConnectionId, side: Side, into: &mut Vec<u8>) -> bool {
        let end = &mut self.network.connections[id.index()].ends[side as usize];
        let Some(message) = end.pair.inbox.pop_front() else { return false };
        into.clear();
        into.extend_from_slice(&message);
        self.network.spare.push(message);
        true
    }

    /// The next completion.
    pub fn rdma_completed(&mut self, id: ConnectionId, side: Side) -> Option<u64> {
        self.network.end(id, side).pair.completed.pop_front()
    }
}

// What happens by itself.
impl Ground {
    /// Something happens on a rail.
    pub fn rail_event(&mut self, event: RailEvent) {
        let RailEvent { connection: id, side, what } = event;
        let rail = self.network.connection(id).rail;
        match what {
            Happening::Asked => self.asked(id),
            Happening::Answered { accepted } => self.answered(id, accepted),
            Happening::Arrives if rail == Rail::TCP => self.tcp_arrives(id, side),
            Happening::Arrives => self.rdma_arrives(id, side),
            Happening::Acknowledged => self.acknowledged(id, side),
            Happening::Room => {
                // A lost word of room is repeated.
                match self.is_cut(id, side) {
                    true => self.plan_rail(self.now() + 200 * MS, id, side, Happening::Room),
                    false => self.ready(id, side),
                }
            }
            Happening::Reset => self.reset_arrives(id, side),
            Happening::RetriesExhausted { progress } => self.retries_exhausted(id, side, progress),
            Happening::Drained => self.drained(id, side),
        }
    }

    fn ready(&mut self, id: ConnectionId, side: Side) {
        if self.network.end(id, side).open {
            let process = self.process_of(id, side);
            self.tell(process, Notice::Ready(id));
        }
    }

    fn asked(&mut self, id: ConnectionId) {
        if !self.network.end(id, Side::Initiator).open {
            return;
        }
        if self.is_cut(id, Side::Target) {
            return self.plan_rail(self.now() + SECOND, id, Side::Target, Happening::Asked);
        }
        match self.network.host {
            Host::Serving => self.tell(Process::Target, Notice::Asked(id)),
            _ => {
                let at = self.now() + self.delay(id);
                self.plan_rail(at, id, Side::Initiator, Happening::Answered { accepted: false });
            }
        }
    }

    fn answered(&mut self, id: ConnectionId, accepted: bool) {
        if !self.network.end(id, Side::Initiator).open || self.network.connection(id).established {
            return;
        }
        if self.is_cut(id, Side::Initiator) {
            return self.plan_rail(self.now() + SECOND, id, Side::Initiator, Happening::Answered { accepted });
        }
        let process = self.process_of(id, Side::Initiator);
        if accepted {
            self.network.connections[id.index()].established = true;
            self.tell(process, Notice::Dialed(id));
        } else {
            self.tell(process, Notice::DialFailed(id));
        }
    }

    fn tcp_arrives(&mut self, id: ConnectionId, side: Side) {
        if self.is_cut(id, side) {
            self.network.end(id, side).stream.stalled += 1;
            return;
        }
        let end = self.network.end(id, side);
        if end.open {
            end.stream.arrive();
            return self.ready(id, side);
        }
        // Nobody has it: the kernel says so, as often as it is asked.
        if self.network.end(id, across(side)).open {
            let at = self.now() + self.delay(id);
            self.plan_rail(at, id, across(side), Happening::Reset);
        }
    }

    fn reset_arrives(&mut self, id: ConnectionId, side: Side) {
        // A lost one isn't repeated: this side learns of it when it sends, or never.
        if self.is_cut(id, side) {
            return;
        }
        self.break_end(id, side);
    }

    /// This side's kernel or device finds the connection broken.
    pub fn break_end(&mut self, id: ConnectionId, side: Side) {
        let rail = self.network.connection(id).rail;
        let end = self.network.end(id, side);
        if !end.open || end.broken {
            return;
        }
        end.broken = true;
        if rail == Rail::RDMA && end.pair.state == State::Up {
            end.pair.state = State::Error;
        }
        note!(self, self.process_of(id, side), "{} {id} broke", rail.name());
        let process = self.process_of(id, side);
        self.tell(process, Notice::Broken(id));
    }

    fn rdma_arrives(&mut self, id: ConnectionId, side: Side) {
        if self.is_cut(id, side) {
            self.network.end(id, side).pair.stalled += 1;
            return self.watch(id, across(side));
        }
        let now = self.now();
        let [initiator, target] = &mut self.network.connections[id.index()].ends;
        let (sender, here) = match side {
            Side::Initiator => (target, initiator),
            Side::Target => (initiator, target),
        };
        let reached = sender.pair.reached;
        // What is on the wire arrives though its sender is drained by now, or it got lost.
        let own_device = sender.pair.state != State::Drained;
        let Some(work) = sender.pair.posted.get_mut(reached) else { return };
        let up = here.pair.state == State::Up && here.open;
        // Behind what got lost nothing arrives: the rail is reliable, and in order.
        let reaches = !sender.pair.gap && (own_device || self.rail_random.chance(500));
        sender.pair.gap = !reaches;
        let lands = match here.pair.state {
            State::Up => here.open && reaches,
            State::Error => reaches && self.rail_random.chance(500),
            State::Drained => false,
        };
        if let (Op::Send(Some(Lent { buffer, lending })) | Op::Write { local: Lent { buffer, lending }, .. }, true) =
            (work.op, own_device)
        {
            self.history.record(now, What::Touched { buffer, lending });
        }
        match work.op {
            Op::Write { .. } | Op::Read { .. } if !lands => {}
            Op::Write { remote, .. } => {
                damage(&mut self.network.damage[side as usize], &mut work.bytes);
                self.memory.write(remote, &work.bytes, now, &mut self.history);
            }
            Op::Read { remote, length, .. } => {
                work.bytes.clear();
                work.bytes.extend_from_slice(self.memory.read(remote, length as usize, now, &mut self.history));
                damage(&mut self.network.damage[across(side) as usize], &mut work.bytes);
            }
            Op::Send(_) if up && lands => {
                if here.pair.inbox.len() >= here.pair.receives {
                    self.history.record(now, What::ReceiveMissing { side });
                }
                let mut bytes = self.network.spare.pop().unwrap_or_default();
                bytes.clear();
                bytes.extend_from_slice(&work.bytes);
                if bytes.len() > HEADER_LEN && matches!(work.op, Op::Send(Some(_))) {
                    damage(&mut self.network.damage[side as usize], &mut bytes[HEADER_LEN..]);
                }
                here.pair.inbox.push_back(bytes);
            }
            _ => {}
        }
        sender.pair.reached += 1;
        if !up {
            return self.watch(id, across(side));
        }
        if matches!(self.network.end(id, across(side)).pair.posted[reached].op, Op::Send(_)) {
            self.ready(id, side);
        }
        let at = now + self.delay(id);
        let pair = &mut self.network.end(id, across(side)).pair;
        pair.last_acknowledgement = pair.last_acknowledgement.max(at);
        let at = pair.last_acknowledgement;
        self.plan_rail(at, id, across(side), Happening::Acknowledged);
    }

    fn acknowledged(&mut self, id: ConnectionId, side: Side) {
        if self.is_cut(id, side) {
            self.network.end(id, side).pair.stalled_acknowledgements += 1;
            return self.watch(id, side);
        }
        let now = self.now();
        let end = &mut self.network.connections[id.index()].ends[side as usize];
        let lands = match end.pair.state {
            State::Up => true,
            State::Error => self.rail_random.chance(500),
            State::Drained => false,
        };
        let Some(work) = end.pair.posted.pop_front() else { return };
        end.pair.reached = end.pair.reached.saturating_sub(1);
        if let (Op::Read { local, .. }, true) = (work.op, lands) {
            self.memory.write(local, &work.bytes, now, &mut self.history);
        }
        self.network.spare.push(work.bytes);
        if end.pair.state == State::Up {
            end.pair.progress += 1;
            end.pair.completed.push_back(work.context);
            self.ready(id, side);
        }
    }

    /// The retry counter of this side runs.
    fn watch(&mut self, id: ConnectionId, side: Side) {
        let pair = &mut self.network.end(id, side).pair;
        if pair.state != State::Up || std::mem::replace(&mut pair.watching, true) {
            return;
        }
        let progress = pair.progress;
        let at = self.now() + self.network.retry_time;
        self.plan_rail(at, id, side, Happening::RetriesExhausted { progress });
    }

    fn retries_exhausted(&mut self, id: ConnectionId, side: Side, progress: u32) {
        let pair = &mut self.network.end(id, side).pair;
        pair.watching = false;
        if pair.state != State::Up || pair.posted.is_empty() {
            return;
        }
        match pair.progress == progress {
            true => self.break_end(id, side),
            false => self.watch(id, side),
        }
    }

    fn drained(&mut self, id: ConnectionId, side: Side) {
        let end = &mut self.network.connections[id.index()].ends[side as usize];
        if end.pair.state == State::Drained {
            return;
        }
        end.pair.state = State::Drained;
        if !broken(Canary::DrainSkipped) {
            let process = self.process_of(id, side);
            self.tell(process, Notice::Drained(id));
        }
    }

    /// One side finds every connection of an initiator on a rail broken; the other hears of it, or doesn't.
    pub fn reset_all(&mut self, planned: u8, rail: Rail, side: Side) {
        for n in 0..self.network.used {
            let id = ConnectionId(n as u32);
            let connection = &self.network.connections[n];
            if (self.network.planned(connection.initiator), connection.rail) != (planned, rail) {
                continue;
            }
            self.break_end(id, side);
            if self.rail_random.chance(500) {
                let at = self.now() + self.delay(id);
                self.plan_rail(at, id, across(side), Happening::Reset);
            }
        }
    }

    /// A cable is cut towards one side.
    pub fn cut(&mut self, initiator: u8, rail: Rail, side: Side) {
        self.network.link(initiator, rail).set_cut_to(side, true);
    }

    /// It is mended, and what waited comes at last.
    pub fn mend(&mut self, initiator: u8, rail: Rail, side: Side) {
        let link = self.network.link(initiator, rail);
        if !link.is_cut_to(side) {
            return;
        }
        link.set_cut_to(side, false);
        if side == Side::Initiator || self.network.host != Host::Down {
            self.repeat(Some((initiator, rail)), side);
        }
    }

    /// What found nobody towards `side` is sent again.
    pub fn repeat(&mut self, only: Option<(u8, Rail)>, side: Side) {
        for n in 0..self.network.used {
            let id = ConnectionId(n as u32);
            let connection = &self.network.connections[n];
            let planned = self.network.planned(connection.initiator);
            if only.is_some_and(|only| only != (planned, connection.rail)) {
                continue;
            }
            let (rail, end) = (connection.rail, &mut self.network.connections[n].ends[side as usize]);
            let most = if rail == Rail::TCP { SECOND } else { 100 * MS };
            let pieces = std::mem::take(&mut end.stream.stalled) + std::mem::take(&mut end.pair.stalled);
            let acknowledgements = std::mem::take(&mut end.pair.stalled_acknowledgements);
            if pieces + acknowledgements == 0 {
                continue;
            }
            let mut at = self.clock.now() + self.rail_random.magnitude(100, most);
            if rail == Rail::RDMA {
                at = at.max(end.pair.last_arrival).max(end.pair.last_acknowledgement);
                (end.pair.last_arrival, end.pair.last_acknowledgement) = (at, at);
            }
            // A device that repeats a message reads its buffer once more.
            let pair = &self.network.end(id, side).pair;
            if acknowledgements > 0
                && pair.state != State::Drained
                && let Some(Work { op: Op::Send(Some(lent)), .. }) = pair.posted.front()
            {
                let Lent { buffer, lending } = *lent;
                self.record(What::Touched { buffer, lending });
            }
            for _ in 0..pieces {
                self.plan_rail(at, id, side, Happening::Arrives);
            }
            for _ in 0..acknowledgements {
                self.plan_rail(at, id, side, Happening::Acknowledged);
            }
        }
    }
}
