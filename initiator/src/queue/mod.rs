//! The bottom: one queue and its path, owned by one thread. No lock, and no allocation per command.
//!
//! [`twinrail_protocol::initiator::Queue`] decides about slots, sequences and credits; the rail moves bytes;
//! this brings the two together with the caller's buffers and with time. Here commands go out and replies come
//! in; `control` has the control frames, `wait` the waiting, `end` the end, `flights` the commands that
//! are out.

mod control;
mod dialer;
mod end;
mod flights;
pub(crate) mod line;
mod path;
mod spin;
mod switch;
mod wait;

use twinrail_fallback_tcp::{Arrival, Filled, Flushed, Socket};
use twinrail_protocol::ids::Epoch;
use twinrail_protocol::initiator::rails::{Action, PathId, Rails};
use twinrail_protocol::initiator::{self as core, Incoming, Operation, Outgoing};
use twinrail_protocol::wire::{ControlKind, Credits, Frame, Payload, Placement, Rail, Reply};
use twinrail_protocol::{Geometry, Opcode, QueueId, Slot, Status, Violation, crc32c};

use self::dialer::Dialer;
use self::flights::{Arriving, Flights};
use self::path::Path;
use self::spin::Spin;
use self::switch::{Candidate, Verdicts};
use self::wait::Look;
use crate::connect::Activation;
use crate::doorbell::Doorbell;
use crate::error::PathEnd;
use crate::metrics::QueueMetrics;
use crate::options::Options;
use crate::request::{Done, NotTaken, Reason, Request};
use crate::session::Session;

/// Bytes sent, and bytes received, in one turn at most: the other direction and the caller want theirs.
const TURN_BYTES: usize = 4 << 20;

/// How often what was counted is passed on, in nanoseconds: often enough for a gauge, and rare enough to cost
/// nothing.
const METRICS_PERIOD_NS: u64 = 100_000_000;

/// How often a queue that has nothing in flight looks at its socket while somebody polls it, in nanoseconds.
/// Only control frames can come then, and a look is a call to the kernel.
const IDLE_LOOK_NS: u64 = 1_000_000;

/// How often connections beside the path are looked at while the path is busy, in nanoseconds.
const LISTEN_NS: u64 = 1_000_000;

/// One queue of a session. It moves only while its owner calls [`Self::poll`]:
///
/// 1. [`Self::submit`] takes commands, as many as the target has granted slots;
/// 2. [`Self::poll`] sends what waits, receives what is there and tells what has ended; it never blocks;
/// 3. [`Self::wait`] blocks until there is something to poll for.
///
/// A connection that is lost is replaced meanwhile: commands are held, and answered on the new one. When `poll`
/// fails the session has ended: every command was given back with [`Status::CONNECTION_LOST`].
#[derive(Debug)]
pub struct Queue {
    id: QueueId,
    session: Session,
    core: core::Queue,
    geometry: Geometry,
    read_only: bool,
    path: Path,
    flights: Flights,
    rails: Rails,
    dialer: Dialer,
    /// The dial that is waited for.
    dialing: Option<PathId>,
    /// A connection that may become the path.
    standby: Option<Candidate>,
    /// One that was asked to.
    attempt: Option<Candidate>,
    /// How the present path has ended, until it is fenced.
    path_end: Option<PathEnd>,
    /// How the last one was lost, and what its successor lacks.
    lost: PathEnd,
    trouble: Option<String>,
    /// Since when commands are held, as the session was told.
    held_since_us: Option<u64>,
    /// What the last activation brought.
    verdicts: Verdicts,
    turned: Vec<Incoming>,
    fail_fast_ms: u64,
    end: Option<PathEnd>,
    closing: bool,
    doorbell: Doorbell,
    spin: Spin,
    now_ns: u64,
    /// The stamp for submissions is as old as the last poll, and a batch shares one.
    stamped: bool,
    /// When the path policy is asked again, and how soon after a command goes out while none is.
    next_rails_ns: u64,
    quiet_ns: u64,
    next_listen_ns: u64,
    next_metrics_ns: u64,
    next_look_ns: u64,
    metrics: QueueMetrics,
}

impl Queue {
    pub(crate) fn new(
        id: QueueId,
        session: &Session,
        options: &Options,
        activation: Activation,
        doorbell: Doorbell,
        seed: u64,
    ) -> Self {
        let Activation { socket, instance, agreed } = activation;
        let (depth, now_ns, settings) = (agreed.depth, session.now_ns(), options.rails());
        let (rails, path) = served(Rails::new(settings, seed, now_ns / 1_000), now_ns / 1_000);
        Self {
            id,
            core: core::Queue::new(agreed, instance, Epoch(1)),
            geometry: session.geometry(),
            read_only: session.read_only(),
            path: Path::new(path, socket, &agreed),
            flights: Flights::new(depth),
            rails,
            dialer: Dialer::new(session.route().clone(), doorbell.clone()),
            dialing: None,
            standby: None,
            attempt: None,
            path_end: None,
            lost: PathEnd::ClosedByTarget,
            trouble: None,
            held_since_us: None,
            verdicts: Verdicts::default(),
            turned: Vec::with_capacity(usize::from(depth)),
            fail_fast_ms: settings.fail_fast_us.unwrap_or(0) / 1_000,
            end: None,
            closing: false,
            doorbell,
            spin: Spin::new(u64::from(options.spin_us) * 1_000),
            now_ns,
            stamped: true,
            next_rails_ns: 0,
            quiet_ns: settings.tcp.quiet_us.min(settings.rdma.quiet_us).saturating_mul(1_000),
            next_listen_ns: 0,
            next_metrics_ns: 0,
            next_look_ns: 0,
            metrics: session.metrics().queue(Rail::TCP),
            session: session.clone(),
        }
    }

    /// The queue's number in its session.
    #[must_use]
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// The session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Slots of the queue: no more commands are ever in flight.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.core.options().depth
    }

    /// Longest payload in bytes that goes with its command or reply.
    #[must_use]
    pub fn in_capsule(&self) -> u32 {
        self.core.options().in_capsule
    }

    /// Slots and data window that the target grants now.
    #[must_use]
    pub fn credits(&self) -> Credits {
        self.core.allowance().said()
    }

    /// The rail of the queue's path; nothing while it has none.
    #[must_use]
    pub fn rail(&self) -> Option<Rail> {
        self.path.socket.as_ref().map(|_| Rail::TCP)
    }

    /// The congestion control of the queue's path, where the rail has one.
    #[must_use]
    pub fn congestion(&self) -> Option<&str> {
        self.path.socket.as_ref().map(Socket::congestion)
    }

    /// Commands that have a slot.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.core.outstanding()
    }

    /// Whether [`Self::submit`] finds a free slot.
    #[inline]
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.core.has_room() && self.flights.next().is_some()
    }

    /// How the queue ended, if it has.
    #[must_use]
    pub fn end(&self) -> Option<&PathEnd> {
        self.end.as_ref()
    }

    /// Wakes [`Self::wait`] from another thread.
    #[must_use]
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Takes a command; it is sent by the next [`Self::poll`].
    ///
    /// # Errors
    /// The request itself, and why it was not taken.
    pub fn submit(&mut self, request: Request) -> Result<(), NotTaken> {
        if !self.stamped {
            self.stamp();
        }
        let begun_ns = self.now_ns;
        self.submit_begun(request, begun_ns)
    }

    /// As [`Self::submit`], for a command that the caller wanted at `begun_ns`.
    pub(crate) fn submit_begun(&mut self, request: Request, begun_ns: u64) -> Result<(), NotTaken> {
        if let Some(end) = &self.end {
            return Err(NotTaken { request, reason: Reason::Ended(end.clone()) });
        }
        self.geometry.size = self.session.geometry().size;
        let length = match request.check(&self.geometry, self.read_only) {
            Ok(length) => length,
            Err(rejection) => return Err(NotTaken { request, reason: Reason::Rejected(rejection) }),
        };
        let Some(flight) = self.flights.next().filter(|_| self.core.has_room()) else {
            return Err(NotTaken { request, reason: Reason::Full });
        };
        let buffer = request.buffer.as_deref().unwrap_or_default();
        let Request { opcode, flags, offset, .. } = request;
        let payload = match length {
            0 => Payload::default(),
            _ => Payload { length, crc: request.crc.unwrap_or_else(|| crc32c(buffer)) },
        };
        // What a reply may bring: READ's buffer was held against its range.
        let brings_back = matches!(opcode, Opcode::READ | Opcode::BLOCK_STATUS | Opcode::IDENTIFY);
        let room = if brings_back { u32::try_from(buffer.len()).unwrap_or(u32::MAX) } else { 0 };
        let (placement, token) = (Placement::default(), flight.token());
        let operation = Operation { opcode, flags, offset, length: request.length, payload, room, placement, token };
        if self.core.outstanding() == 0 {
            self.rails.submitted(self.now_us());
            self.next_rails_ns = self.next_rails_ns.min(self.now_ns.saturating_add(self.quiet_ns));
        }
        match self.core.submit(&operation) {
            Some(slot) => {
                self.flights.begin(slot, request, length, begun_ns);
                self.path.unsent = true;
                self.metrics.touch();
                Ok(())
            }
            None => Err(NotTaken { request, reason: Reason::Full }),
        }
    }

    /// Sends what waits, receives what is there, and tells `done` what has ended; gives their number.
    ///
    /// # Errors
    /// How the session ended. Every command in flight was told to `done` as lost before.
    pub fn poll(&mut self, mut done: impl FnMut(Done)) -> Result<usize, PathEnd> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        self.session.polled();
        let mut count = 0;
        let mut counted = |ended: Done| {
            count += 1;
            done(ended);
        };
        self.stamp();
        match self.turn(&mut counted) {
            Ok(()) => {
                self.stamped = false;
                Ok(count)
            }
            Err(end) => {
                self.end_queue(&end, &mut counted);
                Err(end)
            }
        }
    }

    fn turn(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        if self.session.has_ended() {
            return Err(if self.session.end() == Some(&PathEnd::Closed) { PathEnd::Closed } else { PathEnd::Sibling });
        }
        // The path last, so that no answer beside it counts against one on it that came at the same time.
        let listens = self.is_restless() && (!self.path.is_open() || self.now_ns >= self.next_listen_ns);
        if listens {
            self.next_listen_ns = self.now_ns + LISTEN_NS;
            self.listen(done)?;
        }
        if self.path.is_open()
            && let Err(end) = self.exchange(done)
        {
            self.path_lost(end)?;
            self.follow_rails(done)?;
        } else if listens || self.now_ns >= self.next_rails_ns {
            self.follow_rails(done)?;
        }
        if self.now_ns >= self.next_metrics_ns {
            self.pass_metrics_on();
        }
        Ok(())
    }

    /// Sends and receives on the path.
    fn exchange(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        if let Err(end) = self.send(done) {
            return Err(self.last_words(end, done));
        }
        self.receive(done)?;
        self.settle_credits()?;
        if !self.path.blocked {
            // Answers to control frames, payloads that were asked for.
            self.send(done)?;
        }
        Ok(())
    }

    /// Gives frames to the socket, as many as it takes.
    fn send(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        let mut left = TURN_BYTES;
        loop {
            while self.path.outbound.len() < self.path.outbound_room {
                let Some(Outgoing { frame, payload_of }) = self.core.next_frame() else { break };
                let slot = match frame {
                    Frame::Command(ref command) => Some(command.slot),
                    _ => payload_of,
                };
                if let Some(slot) = slot {
                    self.flights.railed(self.flights.of(slot), self.now_ns, payload_of.is_some());
                }
                let payload = payload_of.map(|slot| self.flights.of(slot));
                if self.path.outbound.push(frame.encode(), payload).is_err() {
                    return Err(ours("more frames wait than there is room for"));
                }
            }
            if self.path.outbound.is_empty() {
                (self.path.blocked, self.path.unsent) = (false, false);
                return Ok(());
            }
            let Some(socket) = &self.path.socket else { return Ok(()) };
            let flights = &self.flights;
            let flushed = self.path.outbound.flush(socket, left, |&id| flights.payload(id), |id| flights.sent(id))?;
            if self.flights.any_lingering() {
                self.flights.end_lingering(self.now_ns, &mut self.metrics, done);
            }
            self.path.blocked = flushed == Flushed::WouldBlock;
            self.path.unsent = flushed == Flushed::More;
            if flushed != Flushed::Empty {
                return Ok(());
            }
            // Room for frames that had to wait for it; mostly there are none.
            left = left.min(TURN_BYTES / 2);
        }
    }

    /// Takes in what the socket has.
    fn receive(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        let outstanding = self.core.outstanding();
        let received = self.receive_frames(done);
        if self.core.outstanding() < outstanding {
            self.rails.completed(self.now_us());
        }
        if std::mem::take(&mut self.path.answered) {
            self.rails.progress(self.path.id, self.core.outstanding() > 0, self.now_us());
        }
        received
    }

    fn receive_frames(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        if self.core.outstanding() == 0
            && self.path.looked.is_none()
            && !self.path.unread
            && self.now_ns < self.next_look_ns
        {
            return Ok(());
        }
        self.next_look_ns = self.now_ns + IDLE_LOOK_NS;
        self.path.unread = false;
        let mut budget = TURN_BYTES;
        let mut drained = false;
        loop {
            let arrival = self.path.inbound.next().map_err(Violation::from)?;
            self.path.answered |= is_answer(&arrival);
            match arrival {
                Arrival::Pending => match self.path.looked.take() {
                    Some(Look::End(end)) => return Err(end),
                    Some(Look::Bytes { drained: all }) => drained = all,
                    None if drained => return Ok(()),
                    None if budget == 0 => {
                        self.path.unread = true;
                        return Ok(());
                    }
                    None => match self.fill()? {
                        Filled::Bytes { count, drained: all } => {
                            budget = budget.saturating_sub(count);
                            drained = all;
                        }
                        Filled::WouldBlock => return Ok(()),
                        Filled::Closed => return Err(self.closed_by_target()),
                        Filled::Full => return Err(ours("no room to receive although everything was taken")),
                    },
                },
                Arrival::Frame { frame: Frame::Reply(reply), payload } => match self.core.receive(&reply)? {
                    Incoming::Receive { slot, .. } => {
                        let flight = self.flights.of(slot);
                        let crc = self.flights.fill_staged(flight, payload);
                        self.metrics.staged_bytes.inc_by(payload.len() as u64);
                        self.arrived(&reply.payload, slot, crc, done);
                    }
                    other => self.replied(other, done),
                },
                Arrival::Frame { frame: Frame::Fetch(fetch), .. } => self.core.fetch(&fetch)?,
                Arrival::Frame { frame: Frame::Control(control), payload } => {
                    let text = match control.kind {
                        ControlKind::Disconnect => control.payload.text(payload).map_err(Violation::from)?.to_owned(),
                        _ => String::new(),
                    };
                    self.control(&control, text)?;
                }
                Arrival::Large { frame: Frame::Reply(reply) } => self.place(&reply, done)?,
                Arrival::Frame { .. } | Arrival::Large { .. } => {
                    let detail = "a frame that only initiators send";
                    return Err(Violation { status: Status::UNEXPECTED_FRAME, detail }.into());
                }
                Arrival::PayloadComplete => {
                    if let Some(arriving) = self.path.arriving.take() {
                        let Arriving { slot, length, expected_crc, .. } = arriving;
                        let expected = Payload { length: length as u32, crc: expected_crc };
                        self.arrived(&expected, slot, arriving.crc(), done);
                    }
                }
            }
        }
    }

    /// The socket takes nothing more. What it still has counts: replies, and often the reason.
    fn last_words(&mut self, end: PathEnd, done: &mut impl FnMut(Done)) -> PathEnd {
        self.path.unread = true;
        match self.receive(done) {
            Err(reason @ (PathEnd::Disconnected { .. } | PathEnd::Violation(_) | PathEnd::Closed)) => reason,
            _ => end,
        }
    }

    /// A long reply: its payload goes straight into the caller's buffer.
    fn place(&mut self, reply: &Reply, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        match self.core.receive(reply)? {
            Incoming::Receive { slot, length } => {
                let (flight, length) = (self.flights.of(slot), length as usize);
                let place = self.flights.place(flight, length);
                self.path.inbound.place(place);
                let mut arriving = Arriving::new(slot, flight, length, reply.payload.crc);
                arriving.sum(place, self.path.inbound.remaining());
                self.path.arriving = Some(arriving);
            }
            other => {
                self.path.inbound.skip();
                self.replied(other, done);
            }
        }
        Ok(())
    }

    /// Receives once, into the buffer of the payload that is arriving if there is one.
    fn fill(&mut self) -> Result<Filled, PathEnd> {
        let Some(socket) = &self.path.socket else { return Ok(Filled::WouldBlock) };
        let place = match &self.path.arriving {
            Some(arriving) if self.path.inbound.wants_destination() => {
                self.flights.place(arriving.flight, arriving.length)
            }
            _ => &mut [],
        };
        let filled = self.path.inbound.fill(socket, place)?;
        if let Filled::Bytes { .. } = filled {
            if let Some(arriving) = &mut self.path.arriving {
                arriving.sum(place, self.path.inbound.remaining());
                self.path.answered = true;
            }
            self.stamp();
        }
        Ok(filled)
    }

    /// A reply that brings nothing.
    fn replied(&mut self, incoming: Incoming, done: &mut impl FnMut(Done)) {
        match incoming {
            Incoming::Complete(completion) => self.ended(completion, done),
            Incoming::Resubmit { slot } => {
                // I7: the CRC32C is computed afresh, from the buffer as it is now.
                let flight = self.flights.of(slot);
                let payload = self.flights.payload(flight);
                let payload = Payload { length: payload.len() as u32, crc: self.flights.payload_crc(flight) };
                self.metrics.crc_write.inc();
                self.metrics.resubmissions.inc();
                self.core.resubmit(slot, payload);
            }
            Incoming::Stale => self.metrics.stale_frames.inc(),
            Incoming::Receive { .. } => {}
        }
    }

    /// The payload of a reply is in its buffer, where its CRC32C is `crc`.
    fn arrived(&mut self, expected: &Payload, slot: Slot, crc: u32, done: &mut impl FnMut(Done)) {
        if expected.crc != crc {
            self.metrics.crc_read.inc();
        }
        match self.core.payload_arrived(slot, crc) {
            Some(completion) => self.ended(completion, done),
            None => self.metrics.resubmissions.inc(),
        }
    }

    fn ended(&mut self, completion: core::Completion, done: &mut impl FnMut(Done)) {
        self.flights.end(completion, self.now_ns, &mut self.metrics, done);
    }

    fn pass_metrics_on(&mut self) {
        self.next_metrics_ns = self.now_ns + METRICS_PERIOD_NS;
        let allowance = *self.core.allowance();
        let granted_slots = allowance.said().granted_slots;
        self.metrics.levels(self.core.outstanding(), granted_slots, allowance.window_used());
        self.metrics.flush();
    }

    /// Time since the attach in microseconds, as of the last stamp.
    #[inline]
    fn now_us(&self) -> u64 {
        self.now_ns / 1_000
    }

    #[inline]
    fn stamp(&mut self) {
        self.now_ns = self.session.now_ns();
        self.stamped = true;
    }
}

/// The path policy of a queue whose first path serves already, and that path.
fn served(mut rails: Rails, now_us: u64) -> (Rails, PathId) {
    let mut serving = PathId { rail: Rail::TCP, number: 0 };
    while let Some(action) = rails.poll(now_us) {
        match action {
            Action::Dial { path } => rails.dialed(path, Epoch(0), now_us),
            Action::Activate { path, .. } => {
                serving = path;
                rails.activated(path, now_us);
            }
            _ => {}
        }
    }
    (rails, serving)
}

/// Whether it shows that the target hears this side; control frames are looked at by kind.
fn is_answer(arrival: &Arrival<'_>) -> bool {
    let (Arrival::Frame { frame, .. } | Arrival::Large { frame }) = arrival else { return false };
    matches!(frame, Frame::Reply(_) | Frame::Fetch(_))
}

/// A fault of ours: the rail's queues are as long as the protocol lets them get.
fn ours(detail: &'static str) -> PathEnd {
    Violation { status: Status::CONTROL_OVERRUN, detail }.into()
}
