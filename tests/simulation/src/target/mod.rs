//! The target's process: it carries things between rails, the core and the disk. What may happen is decided by
//! [`Holdings`] (who holds the volume) and by one [`twinrail_protocol::target::Queue`] for each queue.
//!
//! - here: its life, its turn, and its sessions;
//! - `handshake`: connections until they are a queue's path;
//! - `paths`: from one path of a queue to the next;
//! - `data`: commands, payloads and replies on a path;
//! - `storage`: commands at the disk.

mod data;
mod handshake;
mod paths;
mod storage;

use std::collections::VecDeque;

use twinrail_protocol::liveness::{Liveness, Pulse};
use twinrail_protocol::target::{Digest, FlushLedger, Holdings, Limits, Output, Queue, Record, RequestId, VolumeFacts};
use twinrail_protocol::wire::{Control, ControlKind, EventCode};
use twinrail_protocol::{ControlCredit, Epoch, SessionId, Status};

use crate::channel::Channel;
use crate::clock::{MS, Time};
use crate::ground::{Event, Ground, Notice, Process};
use crate::history::{Client, Ending, Gauge, Session as SessionNumber, Side, What};
use crate::memory::Lent;
use crate::rails::{ConnectionId, Host};
use crate::{names, note};
use data::Late;
use paths::Pending;
use storage::{AfterStore, Flight, Key, Sync};

/// Place of the only volume.
const VOLUME: usize = 0;

/// A queue of a session.
#[derive(Debug, Default)]
struct Lane {
    core: Option<Queue>,
    /// The connection that is its path.
    path: Option<ConnectionId>,
    /// An activation that waits for the old path's drain.
    pending: Option<Pending>,
    /// What came on the old path and wasn't looked at before it was fenced.
    late: Vec<Late>,
    /// The payload buffer of each slot.
    buffers: Vec<Option<Lent>>,
}

/// A session, as long as anything of it is here.
#[derive(Debug)]
struct Session {
    number: SessionNumber,
    id: SessionId,
    read_only: bool,
    ending: bool,
    ledger: FlushLedger,
    /// Its commands at the disk.
    at_storage: u32,
    lanes: Vec<Lane>,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// HELLO comes first.
    New,
    /// It may attach, stand by or activate.
    Welcomed,
    /// Its ATTACH waits.
    Attaching(RequestId),
    /// It stands by for a queue, or is about to be its path.
    Standby { session: SessionNumber, queue: u16 },
    /// It is the path of a queue.
    Active { session: SessionNumber, queue: u16, epoch: Epoch },
}

#[derive(Debug)]
struct Connection {
    channel: Channel,
    phase: Phase,
    client: Client,
    /// The session that counts it as a path.
    joined: Option<SessionId>,
    liveness: Liveness,
    control: ControlCredit,
    /// Where the payload goes that is being received.
    placing: Option<(Key, Lent)>,
    /// What it asked for with ATTACH.
    asked: Option<handshake::Asked>,
}

/// The target leaves in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// Its paths are closed; commands at the disk end.
    Quiets,
    /// The last sync runs.
    Syncs,
    /// The record is being stored.
    Stores,
    /// It has left.
    Gone,
}

/// The target.
#[derive(Debug, Default)]
pub struct Target {
    /// Counts its processes.
    pub life: u32,
    /// There is a process.
    pub running: bool,
    /// Counts reboots of its host.
    boots: u32,
    /// The state file.
    file: Option<Record>,
    /// Records on their way into it.
    storing: VecDeque<Record>,
    holdings: Option<Holdings>,
    sessions: Vec<Session>,
    connections: Vec<Connection>,
    /// Commands that may go to the disk.
    parked: VecDeque<Key>,
    /// Commands that want a buffer, to fetch their payload.
    wants_buffer: VecDeque<Key>,
    at_storage: u32,
    flights: Vec<Flight>,
    after_store: Vec<AfterStore>,
    /// Buffers that devices still have though their command is over.
    limbo: Vec<Lent>,
    buffers: u32,
    failed_syncs: u64,
    syncs: Vec<Sync>,
    leaving: Option<Leaving>,
    requests: u64,
    session_numbers: u32,
    /// When the next timer is planned.
    timer_at: Option<Time>,
}

fn ms(now: Time) -> u64 {
    now / MS
}

impl Target {
    /// Nothing is there yet.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// The process starts.
    pub fn start(&mut self, ground: &mut Ground) {
        self.life += 1;
        self.running = true;
        ground.network.host = Host::Serving;
        let limits = Limits {
            max_sessions: 8,
            max_queues: 3,
            max_paths: 64,
            lease_ms: ms(ground.plan.lease) as u32,
            first_path_ms: ms(ground.plan.lease),
            attach_wait_ms: 60_000,
        };
        let facts = VolumeFacts {
            id: names::volume_id(ground.disk.image),
            read_only: false,
            write_through: ground.plan.write_through,
            record: self.file.clone(),
        };
        let holdings = Holdings::new([facts], names::boot_id(self.boots), limits, ms(ground.now()));
        self.failed_syncs = holdings.record(VOLUME).map_or(0, |record| record.failed_syncs);
        self.holdings = Some(holdings);
        self.timer_at = None;
        if self.life > 1 {
            ground.record(What::Started);
        }
        note!(ground, "target", "starts, life {}, boot {}, image {}", self.life, self.boots, ground.disk.image);
        ground.tell(Process::Target, Notice::Timer);
    }

    /// The process is gone, with all that it knew. What it gave to the kernel goes on.
    pub fn crash(&mut self, ground: &mut Ground, told: bool) {
        if !self.running {
            return;
        }
        note!(ground, "target", "dies");
        for number in self.sessions.iter().map(|s| s.number) {
            ground.record(What::SessionEnding { session: number, how: Ending::TargetGone });
        }
        ground.record(What::Crashed);
        self.running = false;
        self.holdings = None;
        self.sessions.clear();
        self.connections.clear();
        self.parked.clear();
        self.wants_buffer.clear();
        self.flights.clear();
        self.after_store.clear();
        self.syncs.clear();
        // What the kernel holds for the disk isn't used again; the rest is the next process's.
        self.limbo.clear();
        (self.at_storage, self.buffers, self.leaving) = (0, 0, None);
        // A failed sync that it hadn't looked at yet is no different.
        for notice in &ground.notices[Process::Target.index()] {
            if let Notice::Disk { request } = *notice {
                ground.disk.sync_fails_later(request);
            }
        }
        ground.disk.syncs_fail_later();
        // A record that was being written is there or isn't. That a sync failed isn't forgotten here, though a
        // process that dies between the failure and the record would: see `Disk::syncs_fail_later`.
        while let Some(record) = self.storing.pop_front() {
            let failed = self.file.as_ref().map_or(0, |file| file.failed_syncs);
            let tells = self.storing.iter().chain([&record]).any(|record| record.failed_syncs > failed);
            match tells || ground.process_random.chance(500) {
                true => self.keep(ground, record),
                false => self.storing.clear(),
            }
        }
        ground.forget(Process::Target, told);
        ground.network.host = Host::NobodyListens;
    }

    /// The host goes down with everything on it.
    pub fn lose_power(&mut self, ground: &mut Ground) {
        self.crash(ground, false);
        ground.network.host = Host::Down;
        ground.record(What::Rebooted);
        ground.reboot_disk();
        self.boots += 1;
    }

    /// The host's kernel is back.
    pub fn boot(&mut self, ground: &mut Ground) {
        if ground.network.host == Host::Down {
            ground.network.host = Host::NobodyListens;
            ground.repeat(None, Side::Target);
        }
    }

    /// Whether a new process could start: the lock on the backing is free.
    #[must_use]
    pub fn can_start(&self, ground: &Ground) -> bool {
        !self.running && ground.disk.busy() == 0
    }

    /// The process takes its turn.
    pub fn turn(&mut self, ground: &mut Ground, notices: &mut Vec<Notice>) {
        loop {
            std::mem::swap(notices, &mut ground.notices[Process::Target.index()]);
            if notices.is_empty() {
                break;
            }
            for notice in notices.drain(..) {
                self.notice(ground, notice);
            }
            self.watch_time(ground);
            self.do_outputs(ground);
            self.leave(ground);
        }
        self.plan_timer(ground);
    }

    fn notice(&mut self, ground: &mut Ground, notice: Notice) {
        match notice {
            Notice::Asked(id) => self.accept(ground, id),
            Notice::Ready(id) => self.serve(ground, id),
            Notice::Broken(id) => self.lose(ground, id, Status::CONNECTION_LOST),
            Notice::Drained(id) => self.drained(ground, id),
            Notice::Disk { request } => self.disk_ended(ground, request),
            Notice::RecordStored(number) => self.record_stored(ground, number),
            Notice::Timer | Notice::Dialed(_) | Notice::DialFailed(_) | Notice::Work => {}
        }
    }

    /// Whether the timer that comes now is the one that is waited for.
    pub fn timer_is_due(&mut self, now: Time) -> bool {
        self.timer_at.take_if(|at| *at <= now).is_some() && self.running
    }

    fn watch_time(&mut self, ground: &mut Ground) {
        let now_ms = ms(ground.now());
        if let Some(holdings) = &mut self.holdings {
            holdings.tick(now_ms);
        }
        for at in (0..self.connections.len()).rev() {
            let Some(connection) = self.connections.get_mut(at) else { continue };
            if connection.channel.fenced {
                continue;
            }
            let id = connection.channel.id;
            match connection.liveness.poll(now_ms) {
                Pulse::Quiet { .. } => {}
                Pulse::Probe { token } if matches!(connection.phase, Phase::Standby { .. } | Phase::Active { .. }) => {
                    if connection.control.ask() {
                        let epoch = connection.epoch();
                        connection.channel.control(ground, Control::new(ControlKind::Probe, epoch, token));
                    }
                }
                Pulse::Probe { .. } => {}
                Pulse::Lost => self.lose(ground, id, Status::TIMEOUT),
            }
        }
    }

    fn plan_timer(&mut self, ground: &mut Ground) {
        let Some(holdings) = self.holdings.as_ref() else { return };
        let now_ms = ms(ground.now());
        let mut next_ms = holdings.deadline_ms().unwrap_or(u64::MAX);
        for connection in self.connections.iter_mut().filter(|c| !c.channel.fenced) {
            // Polled just now, so that it asks for nothing else.
            if let Pulse::Quiet { until_ms } = connection.liveness.poll(now_ms) {
                next_ms = next_ms.min(until_ms);
            } else {
                next_ms = next_ms.min(now_ms + 1);
            }
        }
        if next_ms == u64::MAX {
            return;
        }
        let at = (next_ms * MS).max(ground.now() + 1);
        if self.timer_at.is_none_or(|planned| at < planned) {
            self.timer_at = Some(at);
            ground.clock.at(at, Event::Timer { process: Process::Target });
        }
    }

    /// Does what the holdings want done.
    fn do_outputs(&mut self, ground: &mut Ground) {
        while let Some(output) = self.holdings.as_mut().and_then(Holdings::poll) {
            match output {
                Output::Store { record, .. } => {
                    let number = record.version;
                    self.storing.push_back(record);
                    let takes = ground.process_random.magnitude(50, 20 * MS);
                    ground.clock.after(takes, Event::RecordStored { life: self.life, number });
                }
                Output::End { session, status } => self.end_session(ground, session, status),
                Output::Answer { request, answer } => self.answer(ground, request, answer),
            }
        }
    }

    fn record_stored(&mut self, ground: &mut Ground, number: u64) {
        // In the order in which they were asked for: the file holds the latest that is whole.
        while let Some(record) = self.storing.pop_front_if(|record| record.version <= number) {
            self.keep(ground, record);
        }
        if let Some(holdings) = &mut self.holdings {
            holdings.stored(VOLUME, number, ms(ground.now()));
        }
        self.answer_what_was_stored(ground, number);
        if self.leaving == Some(Leaving::Stores) {
            self.leaving = Some(Leaving::Gone);
        }
    }

    /// The file holds this from now on.
    fn keep(&mut self, ground: &mut Ground, record: Record) {
        ground.record(What::RecordStored);
        for holder in record.holders.iter().filter(|holder| !holder.closed) {
            let (client, mode) = (names::first_client(holder.session), names::mode(holder.mode));
            ground.record(What::Claimed { client, mode });
        }
        self.file = Some(record);
    }

    // ---- sessions

    fn session(&mut self, number: SessionNumber) -> Option<&mut Session> {
        self.sessions.iter_mut().find(|session| session.number == number)
    }

    fn lane(&mut self, number: SessionNumber, queue: u16) -> Option<&mut Lane> {
        self.session(number)?.lanes.get_mut(usize::from(queue))
    }

    fn connection(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.channel.id == id)
    }

    fn end_session(&mut self, ground: &mut Ground, id: SessionId, status: Status) {
        let Some(session) = self.sessions.iter_mut().find(|s| s.id == id && !s.ending) else { return };
        session.ending = true;
        let number = session.number;
        let how = match status {
            Status::CLOSED => Ending::Closed,
            Status::PREEMPTED => Ending::Preempted,
            Status::TAKEN_OVER => Ending::TakenOver,
            _ => Ending::LeaseOver,
        };
        note!(ground, "target", "session {} ends: {status}", number.0);
        ground.record(What::SessionEnding { session: number, how });
        let paths: Vec<ConnectionId> =
            self.connections.iter().filter(|c| c.session() == Some(number)).map(|c| c.channel.id).collect();
        for path in paths {
            // The closing path waits for CLOSED.
            if status == Status::CLOSED && self.connection(path).is_some_and(|c| c.asked_to_close()) {
                continue;
            }
            self.lose(ground, path, status);
        }
        self.drop_parked(ground, number);
        self.confirm_end(ground, number);
    }

    /// The end of a session is over when nothing of it is at the disk any more (I2).
    fn confirm_end(&mut self, ground: &mut Ground, number: SessionNumber) {
        let Some(at) = self.sessions.iter().position(|s| s.number == number && s.ending && s.at_storage == 0) else {
            return;
        };
        let mut session = self.sessions.swap_remove(at);
        for lane in &mut session.lanes {
            let buffers = lane.buffers.drain(..).flatten().chain(lane.late.drain(..).filter_map(|late| late.payload));
            for lent in buffers {
                self.release(ground, lent);
            }
        }
        ground.record(What::SessionEnded { session: number });
        if let Some(holdings) = &mut self.holdings {
            holdings.ended(session.id, session.ledger.flushed(), ms(ground.now()));
        }
        for connection in self.connections.iter_mut().filter(|c| c.session() == Some(number)) {
            if let Some(token) = connection.asked.as_ref().and_then(|asked| asked.close) {
                let closed =
                    Control { status: Status::CLOSED, ..Control::new(ControlKind::Closed, connection.epoch(), token) };
                connection.channel.control(ground, closed);
            }
        }
    }

    // ---- leaving in order

    /// The target is to leave: nothing new is accepted, and what is at the disk ends and is synced.
    pub fn drain(&mut self, ground: &mut Ground) {
        let Some(holdings) = self.holdings.as_mut().filter(|_| self.leaving.is_none()) else { return };
        note!(ground, "target", "drains");
        holdings.drain();
        self.leaving = Some(Leaving::Quiets);
        for connection in &mut self.connections {
            if matches!(connection.phase, Phase::Active { .. }) && connection.control.ask() {
                let event = Control::new(ControlKind::Event, connection.epoch(), 1);
                connection.channel.control(ground, Control { code: EventCode::DRAINING, value: 1000, ..event });
            }
        }
        let paths: Vec<ConnectionId> = self.connections.iter().map(|c| c.channel.id).collect();
        for path in paths {
            self.lose(ground, path, Status::SHUTDOWN);
        }
        let numbers: Vec<SessionNumber> = self.sessions.iter().map(|s| s.number).collect();
        for number in numbers {
            self.drop_parked(ground, number);
        }
        ground.tell(Process::Target, Notice::Timer);
    }

    fn leave(&mut self, ground: &mut Ground) {
        match self.leaving {
            Some(Leaving::Quiets) if self.at_storage == 0 => {
                self.leaving = Some(Leaving::Syncs);
                self.sync_to_leave(ground);
            }
            Some(Leaving::Gone) => {
                self.crash(ground, true);
            }
            _ => {}
        }
    }

    /// The last sync has ended.
    fn synced_to_leave(&mut self, ground: &mut Ground, ok: bool) {
        self.leaving = Some(Leaving::Stores);
        let Some(holdings) = &mut self.holdings else { return };
        if ok {
            ground.record(What::DrainSynced);
            holdings.drained(VOLUME);
        } else {
            self.failed_syncs += 1;
            holdings.sync_failed(VOLUME, self.failed_syncs);
        }
    }

    // ---- buffers

    /// A buffer for a payload.
    fn lend(&mut self, ground: &mut Ground, length: usize) -> Lent {
        self.buffers += 1;
        let bound = u64::from(self.most_buffers(ground));
        ground.record(What::Gauge { gauge: Gauge::Buffers, side: Side::Target, value: self.buffers.into(), bound });
        ground.lend(length, Side::Target)
    }

    /// What the credits of all queues allow.
    fn most_buffers(&self, ground: &Ground) -> u32 {
        let lanes: usize = self.sessions.iter().map(|session| session.lanes.len()).sum();
        // A slot's own buffer, one that a drain holds, and one that came late.
        3 * 4 * (lanes as u32 + 3) + ground.plan.most_stored
    }

    /// The target is done with a buffer; devices may not be.
    fn release(&mut self, ground: &mut Ground, lent: Lent) {
        use twinrail_protocol::canary::{Canary, broken};
        let pinned = self.connections.iter().any(|connection| connection.channel.pins(lent));
        match pinned && !broken(Canary::BufferBackEarly) {
            true => self.limbo.push(lent),
            false => {
                self.buffers -= 1;
                ground.give_back(lent);
            }
        }
    }

    /// Devices may be done with some.
    fn sweep_limbo(&mut self, ground: &mut Ground) {
        for lent in std::mem::take(&mut self.limbo) {
            self.release(ground, lent);
        }
    }

    /// The target grants another number of slots from now on.
    pub fn grant(&mut self, ground: &mut Ground, slots: u16) {
        for number in (0..self.sessions.len()).map(|at| self.sessions[at].number).collect::<Vec<_>>() {
            for queue in 0..self.session(number).map_or(0, |s| s.lanes.len() as u16) {
                self.grant_queue(ground, number, queue, slots);
            }
        }
    }

    /// What the file says, for scenarios.
    #[must_use]
    pub fn file(&self) -> Option<&Record> {
        self.file.as_ref()
    }

    /// Sessions that are here, those that end included.
    #[must_use]
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// Commands at the disk or waiting for it.
    #[must_use]
    pub fn busy(&self) -> usize {
        self.at_storage as usize + self.parked.len()
    }
}

impl Connection {
    fn epoch(&self) -> Epoch {
        match self.phase {
            Phase::Active { epoch, .. } => epoch,
            _ => Epoch(0),
        }
    }

    fn session(&self) -> Option<SessionNumber> {
        match self.phase {
            Phase::Standby { session, .. } | Phase::Active { session, .. } => Some(session),
            _ => None,
        }
    }

    fn asked_to_close(&self) -> bool {
        self.asked.as_ref().is_some_and(|asked| asked.close.is_some())
    }
}

/// What the target keeps of a secret.
fn digest(secret: &twinrail_protocol::Secret) -> Digest {
    names::digest(secret)
}
