//! The data plane: pinned threads, each with one io_uring, one arena and the queues that were given to it.
//!
//! A turn of the loop: take messages; read the sockets that are *hot*; reap what the ring has ended; let
//! commands on that waited for memory or for an exclusive one; send what is due; submit. When a turn found
//! nothing to do the reactor spins for a bounded, adapting time, and then sleeps in its ring, which watches
//! files, sockets and the mailbox: one place to wait.
//!
//! ```text
//!   mailbox   messages from other threads          path      one connection of a queue
//!   ring      io_uring (unsafe)                    lane      a queue: frames in, replies out
//!   arena     registered memory (unsafe)           storage   what a command does at storage
//!   core      what lanes share                     exclusion COMPARE AND WRITE across reactors
//!   farewell  connections that ended with a word  standbys  who waits to be a path
//! ```

mod arena;
mod core;
mod exclusion;
mod farewell;
mod lane;
pub mod mailbox;
mod path;
mod ring;
mod spin;
mod standbys;
mod storage;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use twinrail_fallback_tcp::{SendVectored, Socket};
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::liveness::Liveness;
use twinrail_protocol::target::{PathId, Queue, QueueOptions};
use twinrail_protocol::wire::{Activated, Credits, Frame, Handshake, Rail, VerdictKind, Writer};
use twinrail_protocol::{Epoch, Instance, QueueId, SessionId, Status, Violation};

use self::arena::Arena;
use self::core::Core;
use self::lane::Lane;
use self::mailbox::{Activation, Exclusion, FromReactor, Mailbox, Message, Ticket, ToReactor};
use self::path::{End, Path};
use self::ring::{Ring, Tag, TagKind};
use self::spin::Spin;
use crate::mapping::Pages;
use crate::metrics::{LaneMetrics, Metrics};
use crate::volume::{Store, Volume};

/// What a reactor is set up with.
#[derive(Clone, Debug)]
pub struct ReactorOptions {
    /// The processor it is pinned to.
    pub cpu: Option<usize>,
    /// Size of its arena in bytes.
    pub arena_bytes: usize,
    /// What the arena is made of.
    pub pages: Pages,
    /// Largest block that its arena hands out, in bytes: a command's payload, or a queue's in-capsule buffers.
    pub largest_block: u32,
    /// Largest payload of a command on any volume in bytes.
    pub max_transfer: u32,
    /// Data window of a queue in bytes, as far as the arena allows.
    pub data_window: u32,
    /// Longest time that it spins before it sleeps, in microseconds; 0 for never.
    pub spin_us: u64,
    /// How long output may wait for a peer that doesn't read, in milliseconds.
    pub stall_timeout_ms: u64,
    /// How often an idle path is probed, in milliseconds.
    pub probe_period_ms: u64,
}

/// What a reactor tells the control plane.
#[derive(Debug)]
pub enum Event {
    /// A path has ended.
    PathLost {
        /// Of which session.
        session: SessionId,
        /// Which.
        path: PathId,
        /// Why.
        status: Status,
    },
    /// The initiator asks to end its session in order.
    CloseAsked {
        /// Which.
        session: SessionId,
    },
}

/// A connection whose session has ended at the initiator's wish: CLOSED is still to be said on it.
#[derive(Debug)]
pub struct Parting {
    /// The connection.
    pub socket: Socket,
    /// Its epoch.
    pub epoch: Epoch,
    /// What the CLOSE carried.
    pub token: u64,
}

/// A session that ends, until its last command at storage has.
struct Ending {
    session: SessionId,
    partings: Vec<Parting>,
    done: Option<oneshot::Sender<Vec<Parting>>>,
}

struct Draining {
    until_ms: u64,
    done: Option<oneshot::Sender<()>>,
    /// The initiators were told that the target leaves; until then they may read it.
    leaves_ms: Option<u64>,
}

/// A reactor, on its own thread.
pub struct Reactor {
    core: Core,
    mailbox: Arc<Mailbox>,
    /// What all lanes on TCP count together; each has a clone.
    lane_metrics: LaneMetrics,
    lanes: Vec<Option<Lane>>,
    /// Found by name only when a path is activated.
    by_name: HashMap<(SessionId, QueueId), usize>,
    endings: Vec<Ending>,
    draining: Option<Draining>,
    stopped: bool,
    spin: Spin,
    next_tick_ms: u64,
}

/// Closes the mailbox of a reactor that ends, so that nobody waits for it.
struct Closing(Option<Arc<Mailbox>>);

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(mailbox) = &self.0 {
            mailbox.close();
        }
    }
}

impl Reactor {
    /// Starts a reactor on a thread of its own. It is ready when this returns.
    ///
    /// # Errors
    /// When its memory, its ring or its thread can't be had.
    pub fn spawn(
        index: usize,
        options: ReactorOptions,
        volumes: Arc<[Arc<Volume>]>,
        mailboxes: Arc<[Arc<Mailbox>]>,
        events: UnboundedSender<Event>,
        metrics: Arc<Metrics>,
    ) -> io::Result<std::thread::JoinHandle<()>> {
        let (ready, started) = std::sync::mpsc::sync_channel(1);
        let closing = Closing(mailboxes.get(index).cloned());
        let run = move || {
            // However this ends.
            let _closing = closing;
            // The ring belongs to the thread that makes it.
            match Self::new(index, options, volumes, mailboxes, events, metrics) {
                Ok(mut reactor) => {
                    let _ = ready.send(Ok(()));
                    reactor.run();
                    if reactor.lanes.iter().flatten().any(|lane| lane.at_storage > 0) {
                        // The kernel still reads and writes the arena: another mapping in its place would be
                        // written to the disk, or overwritten (I3).
                        std::mem::forget(reactor);
                    }
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new().name(format!("reactor-{index}")).spawn(run)?;
        started.recv().unwrap_or_else(|_| Err(io::Error::other("the reactor's thread ended early")))?;
        Ok(thread)
    }

    fn new(
        index: usize,
        options: ReactorOptions,
        volumes: Arc<[Arc<Volume>]>,
        mailboxes: Arc<[Arc<Mailbox>]>,
        events: UnboundedSender<Event>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        if let Some(cpu) = options.cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::warn!(reactor = index, cpu, %error, "the reactor can't be pinned to its processor");
            }
        }
        let mailbox = mailboxes.get(index).cloned().ok_or_else(|| io::Error::other("a reactor without a mailbox"))?;
        let arena = Arena::map(options.arena_bytes, options.largest_block as usize, options.pages)?;
        let file = |volume: &Arc<Volume>| match &volume.store {
            Store::File(file) => file.as_fd().as_raw_fd(),
            Store::Memory(_) | Store::Null => -1,
        };
        let files: Vec<i32> = volumes.iter().map(file).collect();
        let ring = Ring::new(&arena, &files)?;
        let pages = options.pages;
        tracing::info!(
            reactor = index,
            cpu = options.cpu,
            arena_bytes = arena.length(),
            huge_pages = pages == Pages::Reserved,
            registered = ring.fixed(),
            "reactor ready"
        );
        let reactor_metrics = metrics.reactor(index);
        let spin = Spin::new(options.spin_us);
        let volume_metrics = volumes.iter().map(|v| metrics.volume(&v.name)).collect();
        reactor_metrics.arena_bytes.set(arena.length() as i64);
        let core = Core::new(ring, arena, index, options, mailboxes, events, reactor_metrics, volume_metrics);
        Ok(Self {
            core,
            mailbox,
            lane_metrics: metrics.lane(Rail::TCP),
            lanes: Vec::with_capacity(1024),
            by_name: HashMap::with_capacity(1024),
            endings: Vec::new(),
            draining: None,
            stopped: false,
            spin,
            next_tick_ms: 0,
        })
    }

    fn run(&mut self) {
        if let Err(error) = self.watch_mailbox() {
            return tracing::error!(%error, "the ring doesn't watch the mailbox");
        }
        let mut idle_since_us = None;
        let (mut turns, mut spins) = (0, 0);
        loop {
            self.core.tick();
            let busy = self.turn();
            turns += 1;
            spins += u64::from(!busy);
            if self.has_drained() {
                return;
            }
            if busy {
                idle_since_us = None;
                continue;
            }
            let since = *idle_since_us.get_or_insert(self.core.now_us());
            if self.core.now_us().saturating_sub(since) < self.spin.limit_us() {
                std::hint::spin_loop();
                continue;
            }
            self.core.metrics.turns.inc_by(std::mem::take(&mut turns));
            self.core.metrics.spins.inc_by(std::mem::take(&mut spins));
            if let Err(error) = self.sleep() {
                tracing::error!(%error, "the ring failed: this reactor ends");
                return;
            }
            self.core.tick();
            self.spin.waited(self.core.now_us().saturating_sub(since));
            idle_since_us = None;
        }
    }

    /// One turn. Answers whether there was anything to do.
    fn turn(&mut self) -> bool {
        let mut busy = self.core.send_left();
        while let Some(message) = self.mailbox.take() {
            busy = true;
            self.deliver(message);
        }
        for lane in self.lanes.iter_mut().flatten() {
            if lane.path.as_ref().is_some_and(|p| p.hot) {
                busy |= lane.receive(&mut self.core);
            }
        }
        if let Err(error) = self.core.ring.submit() {
            tracing::error!(%error, "the ring doesn't take what was submitted");
        }
        self.core.tick();
        busy |= self.reap();
        busy |= self.let_on();
        busy |= self.flush();
        if let Err(error) = self.core.ring.submit() {
            tracing::error!(%error, "the ring doesn't take what was submitted");
        }
        if self.core.now_ms() >= self.core.farewells.due_ms() {
            let now_ms = self.core.now_ms();
            self.core.farewells.tick(&mut self.core.ring, now_ms);
        }
        if self.core.now_ms() >= self.next_tick_ms {
            self.timers();
        }
        busy
    }

    fn reap(&mut self) -> bool {
        let mut any = false;
        while let Some((tag, result)) = self.core.ring.reap() {
            any = true;
            let lane = self.lanes.get_mut(tag.lane as usize).and_then(Option::as_mut);
            match (tag.kind, lane) {
                (TagKind::Storage, Some(lane)) => {
                    lane.ring_ended(&mut self.core, tag, result);
                    lane.flush_batch(&mut self.core);
                }
                (TagKind::Readable | TagKind::Writable, Some(lane)) => {
                    let fenced = lane.ready(&mut self.core, tag.kind, tag.check);
                    if fenced {
                        self.take_over(tag.lane as usize);
                    }
                }
                (TagKind::Farewell, _) => {
                    let now_ms = self.core.now_ms();
                    self.core.farewells.ready(&mut self.core.ring, tag.lane as usize, now_ms);
                }
                (TagKind::Mailbox, _) => {
                    self.mailbox.wake_up();
                    if let Err(error) = self.watch_mailbox() {
                        tracing::error!(%error, "the ring doesn't watch the mailbox");
                    }
                }
                _ => {}
            }
        }
        any
    }

    /// Lets on what waited: for memory, for a fault's delay, for the end of an exclusive command. Answers whether
    /// anything got on: a path that found a place for its payload may have all of it staged already, so that no
    /// readiness of its socket will come.
    fn let_on(&mut self) -> bool {
        let mut any = false;
        if self.core.memory_freed && !self.core.waiting.is_empty() {
            self.core.memory_freed = false;
            // Once round: each lane has one command let on, then stands at the end of the line.
            let mut stuck = 0;
            self.core.resuming = true;
            while stuck < self.core.waiting.len() {
                let Some(index) = self.core.waiting.pop_front() else { break };
                let Some(lane) = self.lanes.get_mut(index).and_then(Option::as_mut) else { continue };
                lane.waits = false;
                let got_on = lane.resume(&mut self.core);
                if lane.wants_memory() && !lane.waits {
                    lane.waits = true;
                    self.core.waiting.push_back(index);
                }
                stuck = if got_on { 0 } else { stuck + 1 };
                any |= got_on;
            }
            self.core.resuming = false;
        }
        if !self.core.delayed.is_empty() {
            let now_us = self.core.now_us();
            while let Some(at) = self.core.delayed.iter().position(|d| d.0 <= now_us) {
                let (_, index, slot, sequence) = self.core.delayed.swap_remove(at);
                if let Some(lane) = self.lanes.get_mut(index).and_then(Option::as_mut) {
                    lane.after_delay(&mut self.core, slot, sequence);
                }
            }
        }
        if std::mem::take(&mut self.core.recheck_holds) {
            self.answer_holds();
        }
        if !self.endings.is_empty() {
            self.finish_endings();
        }
        any
    }

    fn flush(&mut self) -> bool {
        let count = self.core.dirty.len();
        for n in 0..count {
            let index = self.core.dirty[n];
            if let Some(lane) = self.lanes.get_mut(index).and_then(Option::as_mut) {
                lane.dirty = false;
                lane.flush(&mut self.core);
            }
        }
        self.core.dirty.drain(..count);
        count > 0
    }

    fn timers(&mut self) {
        // Timers are coarse: the finest one is a probe period.
        let mut next = self.core.now_ms() + 1000;
        for lane in self.lanes.iter_mut().flatten() {
            next = next.min(lane.tick(&mut self.core));
        }
        self.next_tick_ms = next;
        self.lane_metrics.flush();
        let parked: usize = self.lanes.iter().flatten().map(|lane| lane.parked.len()).sum();
        self.core.metrics.parked.set(parked as i64);
        self.core.metrics.arena_free_bytes.set(self.core.arena.free_bytes() as i64);
    }

    /// Sleeps until anything happens; before that everything that is quiet is given to the ring to watch.
    fn sleep(&mut self) -> io::Result<()> {
        for lane in self.lanes.iter_mut().flatten() {
            let (index, depth) = (lane.index, lane.queue.options().depth);
            if let Some(path) = &mut lane.path {
                path.hot = false;
                // One that takes no frames is waited for elsewhere: its readiness would only wake us in vain.
                path.watch(&mut self.core.ring, index, path.takes_frames(depth))?;
            }
        }
        if !self.mailbox.fall_asleep() {
            return Ok(());
        }
        let mut until_us = self.next_tick_ms.min(self.core.farewells.due_ms()).saturating_mul(1000);
        if let Some(first) = self.core.delayed.iter().map(|d| d.0).min() {
            until_us = until_us.min(first);
        }
        if let Some(draining) = &self.draining {
            until_us = until_us.min(draining.leaves_ms.unwrap_or(draining.until_ms) * 1000);
        }
        self.lane_metrics.flush();
        self.core.metrics.sleeps.inc();
        let limit = Duration::from_micros(until_us.saturating_sub(self.core.now_us()).max(1));
        let slept = self.core.ring.sleep(limit);
        self.mailbox.stay_awake();
        slept
    }

    fn watch_mailbox(&mut self) -> io::Result<()> {
        self.core.ring.watch(self.mailbox.as_fd(), false, Tag::path(TagKind::Mailbox, 0, 0))
    }

    // ---- messages

    fn deliver(&mut self, message: Message) {
        match message {
            Message::Activate(activation) => self.activate(*activation),
            Message::Standby { session, queue, path, what } => self.standby((session, queue), path, what),
            Message::EndSession { session, status, done } => self.end_session(session, status, done),
            Message::Stored { ticket, answer } => {
                if let Some(tag) = Tag::unpack(ticket)
                    && let Some(lane) = self.lanes.get_mut(tag.lane as usize).and_then(Option::as_mut)
                {
                    lane.keeper_ended(&mut self.core, tag, answer);
                }
            }
            Message::Exclusion(message) => self.exclusion(message),
            Message::Drain { done, limit_ms } => self.drain(done, limit_ms),
            Message::Stop => self.stopped = true,
        }
    }

    fn activate(&mut self, activation: Activation) {
        let name = (activation.session.id, activation.queue);
        let known = self.by_name.get(&name).copied();
        let (epoch, instance) = (activation.epoch, activation.instance);
        let refused = match known {
            _ if self.draining.is_some() => Some(Status::DRAINING),
            Some(index) => match self.lanes[index].as_mut() {
                Some(lane) => lane.may_activate(epoch, instance).err(),
                None => Some(Status::SESSION_LOST),
            },
            None if instance != Instance(0) => Some(Status::SESSION_LOST),
            None => None,
        };
        if let Some(status) = refused {
            return activation.refuse(status);
        }
        let index = match known {
            Some(index) => index,
            None => match self.new_lane(&activation) {
                Ok(index) => index,
                Err(status) => return activation.refuse(status),
            },
        };
        let Some(lane) = self.lanes[index].as_mut() else { return };
        if known.is_some() {
            // Fence first: from here on nothing arrives on the old path (I2).
            lane.end_path(&mut self.core, End::Ours(Status::SUPERSEDED));
        }
        lane.await_fence(activation);
        self.take_over(index);
    }

    /// Makes the connection that waits for it the path of a lane, once the ring has let go of the old one.
    fn take_over(&mut self, index: usize) {
        let Some(lane) = self.lanes.get_mut(index).and_then(Option::as_mut) else { return };
        let Some(activation) = lane.fenced() else { return };
        let Activation { socket, peer, path, epoch, report, done, .. } = activation;
        let follows = lane.queue.epoch() < epoch;
        if follows {
            lane.queue.activate(epoch);
        }
        let (bytes, verdicts) = match answer(lane, epoch, &report) {
            Ok(answer) => answer,
            Err(violation) => {
                let _ = done.send(Err((violation, socket)));
                return;
            }
        };
        // Little was sent on this socket so far, and its buffer is empty: what it doesn't take at once it will never
        // take. Nobody can be told on it then.
        if !socket.send_vectored(&[io::IoSlice::new(&bytes)]).is_ok_and(|n| n == bytes.len()) {
            return farewell::abort(socket);
        }
        let QueueOptions { depth, in_capsule, .. } = *lane.queue.options();
        let liveness = Liveness::new(self.core.options.probe_period_ms, self.core.now_ms());
        // What was forgotten needs no memory.
        lane.free_forgotten(&mut self.core);
        lane.path = Some(Path::new(path, peer, socket, epoch, depth, in_capsule, liveness));
        lane.metrics.path_began();
        if follows {
            lane.switched(&self.core, verdicts);
        }
        self.next_tick_ms = 0;
        let _ = done.send(Ok(()));
    }

    fn standby(&mut self, name: (SessionId, QueueId), path: PathId, what: ToReactor) {
        let lane = self.by_name.get(&name).and_then(|&index| self.lanes.get_mut(index)?.as_mut());
        match what {
            ToReactor::Stands { tell } => {
                let (epoch, instance) =
                    lane.map_or((Epoch(0), Instance(0)), |lane| (lane.queue.epoch(), lane.queue.instance()));
                self.core.standbys.stands(name, path, tell);
                self.core.standbys.tell(name, path, FromReactor::Stands { epoch, instance });
            }
            ToReactor::Probe { token } => self.core.standbys.tell(name, path, FromReactor::Alive { token }),
            ToReactor::PathLost { epoch } => {
                let lane = lane.filter(|lane| lane.path.as_ref().is_some_and(|path| path.epoch == epoch));
                if let Some(lane) = lane {
                    lane.end_path(&mut self.core, End::Lost(Status::CONNECTION_LOST));
                }
            }
            ToReactor::Leaves => self.core.standbys.leaves(name, path),
        }
    }

    fn new_lane(&mut self, activation: &Activation) -> Result<usize, Status> {
        let Activation { ref session, queue, epoch, new_instance: instance, options, .. } = *activation;
        let QueueOptions { depth, in_capsule, geometry, .. } = options;
        let capsules = usize::from(depth) * in_capsule as usize;
        let block = self.core.take_capsules(capsules).ok_or(Status::LIMIT_REACHED)?;
        // What one queue can use, what the configuration allows, what the arena has left to promise.
        let window = (self.core.options.data_window as usize)
            .min(usize::from(depth) * geometry.max_transfer as usize)
            .min(self.core.window_free);
        // A power of two, as blocks are: no payload that fits takes more than was promised.
        let window = window.checked_ilog2().map_or(0, |order| 1 << order);
        self.core.window_free -= window;
        let credits = Credits { granted_slots: depth, data_window: window as u32, ..Credits::default() };
        let state = Queue::new(QueueOptions { credits, ..options }, instance, epoch);
        let index = self.lanes.iter().position(Option::is_none).unwrap_or_else(|| {
            self.lanes.push(None);
            self.lanes.len() - 1
        });
        let metrics = self.lane_metrics.clone();
        self.lanes[index] = Some(Lane::new(index, session.clone(), queue, state, block, window, metrics));
        self.by_name.insert((session.id, queue), index);
        Ok(index)
    }

    fn end_session(&mut self, session: SessionId, status: Status, done: oneshot::Sender<Vec<Parting>>) {
        let mut partings = Vec::new();
        for lane in self.lanes.iter_mut().flatten().filter(|l| l.session.id == session) {
            partings.extend(lane.end_session(&mut self.core, status));
        }
        self.by_name.retain(|name, _| name.0 != session);
        self.core.standbys.ended(session, status);
        self.endings.push(Ending { session, partings, done: Some(done) });
        self.finish_endings();
    }

    /// Confirms the end of sessions of which nothing acts any more (I2).
    fn finish_endings(&mut self) {
        for slot in &mut self.lanes {
            if let Some(lane) = slot.take_if(|lane| lane.ended && lane.is_over()) {
                lane.dissolve(&mut self.core);
            }
        }
        let lanes = &self.lanes;
        self.endings.retain_mut(|ending| {
            let acts = lanes.iter().flatten().any(|l| l.session.id == ending.session);
            if !acts && let Some(done) = ending.done.take() {
                let _ = done.send(std::mem::take(&mut ending.partings));
            }
            acts
        });
    }

    fn exclusion(&mut self, message: Exclusion) {
        let reactors = self.core.mailboxes.len();
        match message {
            Exclusion::Ask(ticket) => {
                let turn = self.core.holds.ask(ticket, reactors);
                self.hold_everywhere(turn);
            }
            Exclusion::Hold(ticket) => {
                self.core.holds.hold(ticket);
                self.answer_holds();
            }
            Exclusion::Held { ticket, .. } => {
                if self.core.holds.held(ticket) {
                    self.core.exclude(ticket.reactor, Exclusion::Granted(ticket));
                }
            }
            Exclusion::Granted(ticket) => {
                let lane = Tag::unpack(ticket.command).and_then(|tag| self.lanes.get_mut(tag.lane as usize)?.as_mut());
                let runs = lane.is_some_and(|lane| lane.granted(&mut self.core, &ticket));
                if !runs {
                    self.core.exclude(self.core.home_of(ticket.volume), Exclusion::Ended(ticket));
                }
            }
            Exclusion::Ended(ticket) => {
                for reactor in 0..reactors {
                    self.core.exclude(reactor, Exclusion::Release(ticket));
                }
                let turn = self.core.holds.ended(ticket, reactors);
                self.hold_everywhere(turn);
            }
            Exclusion::Release(ticket) => {
                self.core.holds.release(ticket);
                for lane in self.lanes.iter_mut().flatten().filter(|l| l.session.volume.index == ticket.volume) {
                    lane.go_on(&mut self.core);
                }
            }
        }
    }

    fn hold_everywhere(&mut self, turn: Option<Ticket>) {
        if let Some(ticket) = turn {
            for reactor in 0..self.core.mailboxes.len() {
                self.core.exclude(reactor, Exclusion::Hold(ticket));
            }
        }
    }

    fn answer_holds(&mut self) {
        let lanes = &self.lanes;
        let ready = self.core.holds.ready(|ticket| lanes.iter().flatten().any(|lane| lane.overlaps(ticket)));
        for ticket in ready {
            let held = Exclusion::Held { ticket, by: self.core.index };
            self.core.exclude(self.core.home_of(ticket.volume), held);
        }
    }

    // ---- the end

    fn drain(&mut self, done: oneshot::Sender<()>, limit_ms: u64) {
        for lane in self.lanes.iter_mut().flatten() {
            if let Some(path) = &mut lane.path {
                path.quiet = true;
            }
        }
        self.draining = Some(Draining { until_ms: self.core.now_ms() + limit_ms, done: Some(done), leaves_ms: None });
    }

    /// Whether the reactor was told to drain and has nothing left to do, neither for itself nor for exclusive
    /// commands of other reactors.
    fn has_drained(&mut self) -> bool {
        let Some(draining) = &mut self.draining else { return false };
        let over = self.core.now_ms() >= draining.until_ms;
        if draining.done.is_none() && !over {
            return self.stopped && self.end_paths();
        }
        let empty = |lane: &Lane| {
            lane.queue.busy() == lane.gathering() && lane.path.as_ref().is_none_or(|p| p.outbound.is_empty())
        };
        if !over && !self.lanes.iter().flatten().all(empty) {
            return false;
        }
        if let Some(done) = draining.done.take() {
            let _ = done.send(());
        }
        (self.stopped || over) && self.end_paths()
    }

    /// Tells the initiators that the target leaves. Answers whether all have hung up, or had the time to.
    fn end_paths(&mut self) -> bool {
        for lane in self.lanes.iter_mut().flatten() {
            lane.end_path(&mut self.core, End::Ours(Status::SHUTDOWN));
        }
        let now_ms = self.core.now_ms();
        let leaves_ms = self.draining.as_mut().map(|d| *d.leaves_ms.get_or_insert(now_ms + farewell::LINGER_MS));
        let told = self.lanes.iter().flatten().all(|lane| lane.closing.is_none()) && self.core.farewells.is_empty();
        told || leaves_ms.is_none_or(|leaves_ms| now_ms >= leaves_ms)
    }
}

/// Encodes ACTIVATED with a verdict for each command that the initiator reports in flight, and counts them by kind.
///
/// # Errors
/// The rule that the report breaks.
fn answer(lane: &mut Lane, epoch: Epoch, report: &[u8]) -> Result<(Vec<u8>, [u64; 3]), Violation> {
    let broken = |detail| Violation { status: Status::MALFORMED, detail };
    let (headers, _) = report.as_chunks::<HEADER_LEN>();
    let mut verdicts = vec![0; headers.len() * (HEADER_LEN + 4)];
    let mut writer = Writer::new(&mut verdicts);
    let (mut count, mut kinds) = (0, [0; 3]);
    for header in headers {
        let Ok(Frame::Command(command)) = Frame::decode(header).and_then(|frame| frame.on_rail(Rail::TCP)) else {
            return Err(broken("a report of something else than commands"));
        };
        let verdict = lane.queue.verdict(&command)?;
        debug_assert!((verdict.kind == VerdictKind::Done) == verdict.reply.is_some());
        kinds[match verdict.kind {
            VerdictKind::Unknown => 0,
            VerdictKind::Running => 1,
            VerdictKind::Done => 2,
        }] += 1;
        verdict.encode(&mut writer);
        count += 1;
    }
    let too_long = || broken("a report whose answer has no room");
    let length = writer.finish().ok_or_else(too_long)?;
    let options = lane.queue.options();
    let (depth, in_capsule) = (options.depth, options.in_capsule);
    let credits = lane.queue.grant().said();
    let mut activated = Activated::new(epoch, lane.queue.instance());
    (activated.depth, activated.in_capsule) = (depth, in_capsule);
    activated.credits = credits;
    let frame = Handshake::Activated(activated.with_verdicts(count, &verdicts[..length]));
    let mut bytes = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
    let length = frame.encode(&mut bytes).ok_or_else(too_long)?;
    bytes.truncate(length);
    Ok((bytes, kinds))
}
