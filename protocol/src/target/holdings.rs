//! Who holds which volume: the rules of the rooms beside this one, put together. No clock, no thread, no disk: the
//! driver tells what happens and takes out what is to be done.
//!
//! The life of a session:
//!
//! ```text
//!        attach              answered            path            last path lost
//!  none ────────▶ waiting ─────────────▶ attached ──────▶ serving ─────────────▶ pathless
//!                    │                      │                ▲                      │
//!                    │ gives up             │                └──────── path ────────┤
//!                    ▼                      ▼  close, preempt, takeover, lease over ▼
//!                   none                 ending ─────────────────────────────────▶ none
//!                                              (all reactors confirmed, I2)
//! ```
//!
//! An attach is decided when it comes: from then on the session holds its volume, and others are held against it.
//! It is *answered* when no older session of the volume is ending any more and the volume's record is stored. Until
//! then no path of it is taken.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

use super::admission::{Admitted, Asking, RequestId};
use super::ending::{Ending, Endings};
use super::flush::{Inherited, inherited};
use super::grace::Grace;
use super::lease::{Lease, PathId, Terms};
use super::record::{Digest, Holder, Record, SyncState};
use super::refusal::{Refusal, held};
use super::{generation, holders, takeover};
use crate::canary::{Canary, broken};
use crate::ids::{BootId, QueueId, SessionId, VolumeId};
use crate::status::Status;
use crate::wire::{AttachMode, Rail};

/// Connections that may stand by for one queue on one rail (I8): one that is wanted, and one that takes its place.
const MAX_STANDBYS: usize = 2;

/// What the holdings keep to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most sessions.
    pub max_sessions: usize,
    /// Most queues of one session.
    pub max_queues: u16,
    /// Most paths of all sessions together, standby paths included.
    pub max_paths: usize,
    /// How long a session outlives its last path, in milliseconds.
    pub lease_ms: u32,
    /// How long a session that attached may be without its first path, in milliseconds.
    pub first_path_ms: u64,
    /// How long an attach waits for its answer, in milliseconds.
    pub attach_wait_ms: u64,
}

/// A volume when the target starts.
#[derive(Clone, Debug)]
pub struct VolumeFacts {
    /// Its UUID.
    pub id: VolumeId,
    /// Nobody can write.
    pub read_only: bool,
    /// A completed write is on stable storage.
    pub write_through: bool,
    /// What the state file holds of it. A record of another UUID tells of another volume and is forgotten.
    pub record: Option<Record>,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Store and sync this record, then call [`Holdings::stored`]. A later one of the same volume takes its place.
    Store {
        /// The volume's place.
        volume: usize,
        /// What to store.
        record: Record,
    },
    /// End a session: have every reactor close its paths with `status`, drop what waits and wait for what is at
    /// storage; when all have confirmed, call [`Holdings::ended`].
    End {
        /// Which.
        session: SessionId,
        /// Why.
        status: Status,
    },
    /// Answer an ATTACH.
    Answer {
        /// Which.
        request: RequestId,
        /// With what.
        answer: Result<Admitted, Refusal>,
    },
}

#[derive(Clone, Debug)]
struct Volume {
    id: VolumeId,
    read_only: bool,
    write_through: bool,
    record: Record,
    /// Version that is known to be stored.
    stored: u64,
    /// Version that the driver was asked to store last.
    storing: u64,
    /// The boot id of the drain before this start, if it synced.
    synced_boot_id: BootId,
    /// The holders to be told of it: those of before that had no path since.
    synced_for: Vec<SessionId>,
    /// Those of before that weren't back since.
    awaited: Vec<SessionId>,
}

impl Volume {
    fn sync_state(&self, boot_id: BootId) -> SyncState {
        SyncState { boot_id, failed_syncs: self.record.failed_syncs }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    volume: usize,
    mode: AttachMode,
    secret: Digest,
    initiator: String,
    queues: u16,
    generation: u64,
    synced_boot_id: BootId,
    lease: Lease,
    /// Those of its paths that only stand by, the oldest first.
    standbys: Vec<Standby>,
    /// What its answer waits for; nothing once it was answered.
    waits: Option<Waits>,
}

/// A connection that stands by.
#[derive(Clone, Copy, Debug)]
struct Standby {
    queue: QueueId,
    rail: Rail,
    path: PathId,
}

/// An attach that isn't answered yet.
#[derive(Clone, Debug)]
struct Waits {
    /// Those who asked, and when. More than one if the initiator repeats itself; none if all went away.
    requests: Vec<(RequestId, u64)>,
    /// When the last one asked who went away.
    deserted_ms: u64,
    /// This version of the record has to be stored.
    version: u64,
    /// What it inherits is still to be judged, when its predecessor has ended.
    takeover: bool,
    /// It wasn't recorded before.
    newcomer: bool,
}

/// All sessions and volumes of a target.
#[derive(Clone, Debug)]
pub struct Holdings {
    limits: Limits,
    boot_id: BootId,
    grace: Grace,
    volumes: Vec<Volume>,
    sessions: BTreeMap<SessionId, Entry>,
    endings: Endings,
    draining: bool,
    outputs: VecDeque<Output>,
}

impl Holdings {
    /// A target starts, on a host with this boot id. Volumes are named by their place in `volumes`.
    #[must_use]
    pub fn new(volumes: impl IntoIterator<Item = VolumeFacts>, boot_id: BootId, limits: Limits, now_ms: u64) -> Self {
        let volume = |facts: VolumeFacts| {
            let known = facts.record.filter(|record| record.volume == facts.id || broken(Canary::VolumeUnchecked));
            let record = known.unwrap_or_else(|| Record::new(facts.id));
            let holders: Vec<SessionId> = record.holders.iter().map(|holder| holder.session).collect();
            Volume {
                id: facts.id,
                read_only: facts.read_only,
                write_through: facts.write_through,
                stored: record.version,
                storing: record.version,
                synced_boot_id: record.synced_boot_id,
                synced_for: holders.clone(),
                awaited: holders,
                record,
            }
        };
        Self {
            limits,
            boot_id,
            grace: Grace::new(now_ms, limits.lease_ms),
            volumes: volumes.into_iter().map(volume).collect(),
            sessions: BTreeMap::new(),
            endings: Endings::default(),
            draining: false,
            outputs: VecDeque::new(),
        }
    }

    /// What is to be done next.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`Self::tick`], in milliseconds.
    #[must_use]
    pub fn deadline_ms(&self) -> Option<u64> {
        let (wait_ms, lease_ms) = (self.limits.attach_wait_ms, u64::from(self.limits.lease_ms));
        let deadline = |entry: &Entry| match &entry.waits {
            Some(waits) if waits.requests.is_empty() => Some(waits.deserted_ms.saturating_add(lease_ms)),
            Some(waits) => waits.requests.iter().map(|(_, since_ms)| since_ms.saturating_add(wait_ms)).min(),
            None => entry.lease.deadline_ms(),
        };
        self.sessions.values().filter_map(deadline).min()
    }

    // ---- attach

    /// An initiator wants to attach. The answer is an output, now or later.
    pub fn attach(&mut self, asking: Asking, now_ms: u64) {
        let request = asking.request;
        if let Err(refusal) = self.try_attach(asking, now_ms) {
            self.answer(request, Err(refusal));
        }
    }

    fn try_attach(&mut self, mut asking: Asking, now_ms: u64) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        let place = asking.volume;
        let volume = self.volumes.get(place).ok_or(Refusal::NoVolume)?;
        let expected = asking.expected_volume;
        if !expected.is_nil() && expected != volume.id && !broken(Canary::VolumeUnchecked) {
            return Err(Refusal::WrongVolume { is: volume.id, expected });
        }
        if volume.read_only && holders::writes(asking.mode) {
            return Err(Refusal::VolumeReadOnly);
        }
        let entry = self.sessions.get(&asking.session);
        let holder = volume.record.holder(asking.session);
        let present = entry.map(|entry| &entry.secret).or(holder.map(|holder| &holder.secret));
        if let (Some(next), Some(present)) = (asking.next_secret, present)
            && next.matches(present)
            && takeover::was_replaced(&volume.record, &asking.secret)
        {
            // A takeover that was decided already: its answer was lost.
            (asking.secret, asking.next_secret) = (next, None);
        }
        takeover::check(&volume.record, asking.session, present, &asking.secret)?;
        if asking.next_secret.is_some_and(|next| takeover::was_replaced(&volume.record, &next)) {
            return Err(Refusal::BadNextSecret);
        }
        let Some(entry) = entry else { return self.admit(asking, now_ms) };
        if entry.volume != place || entry.mode != asking.mode {
            return Err(Refusal::OtherAttach { session: asking.session, mode: entry.mode });
        }
        if asking.next_secret.is_some() {
            return self.admit(asking, now_ms);
        }
        self.attach_again(&asking, now_ms);
        Ok(())
    }

    /// An ATTACH came for a session that exists: its answer may have been lost, or is still to come.
    fn attach_again(&mut self, asking: &Asking, now_ms: u64) {
        let terms = self.terms();
        let Some(entry) = self.sessions.get_mut(&asking.session) else { return };
        if let Some(waits) = &mut entry.waits {
            waits.requests.push((asking.request, now_ms));
            return self.answer_what_waits(asking.volume, now_ms);
        }
        entry.lease.attached(terms, now_ms);
        let admitted = self.admitted(asking.session, false, Inherited::Nothing);
        if let Some(admitted) = admitted {
            self.answer(asking.request, Ok(admitted));
        }
    }

    /// A new session, or a takeover of one.
    fn admit(&mut self, asking: Asking, now_ms: u64) -> Result<(), Refusal> {
        let (place, id, mode) = (asking.volume, asking.session, asking.mode);
        let writes = holders::writes(mode);
        let preempt = asking.preempt && writes;
        let volume = &self.volumes[place];
        let recorded = volume.record.holder(id).is_some_and(|holder| holder.mode == mode);
        let lives = self.sessions.contains_key(&id);
        if writes {
            generation::check(&volume.record, asking.generation, recorded)?;
        }
        if asking.next_secret.is_some() && !recorded && !lives {
            return Err(Refusal::SessionLost { session: id });
        }
        let others = self.sessions.iter().filter(|(other, entry)| entry.volume == place && **other != id);
        let in_the_way = holders::in_the_way(others.map(|(other, entry)| (entry.mode, *other)), mode, preempt);
        if !in_the_way.is_empty() && !preempt {
            let by = in_the_way.iter().filter_map(|other| self.sessions.get(other));
            return Err(held(mode, by.map(|entry| (entry.initiator.clone(), entry.mode))));
        }
        if writes && !recorded && !preempt {
            self.grace.check(&volume.record, &volume.awaited, now_ms)?;
        }
        let leaving = in_the_way.len() + usize::from(lives);
        if self.sessions.len() + self.endings.len() - leaving >= self.limits.max_sessions {
            return Err(Refusal::TooManySessions { limit: self.limits.max_sessions });
        }

        // Decided.
        for other in in_the_way {
            self.end(other, Status::PREEMPTED);
        }
        self.end(id, Status::TAKEN_OVER);
        let synced_boot_id = self.record_attach(&asking, recorded, preempt);
        let record = &self.volumes[place].record;
        let waits = Waits {
            requests: Vec::from([(asking.request, now_ms)]),
            deserted_ms: now_ms,
            version: record.version,
            takeover: asking.next_secret.is_some(),
            newcomer: !recorded,
        };
        let entry = Entry {
            volume: place,
            mode,
            secret: asking.next_secret.unwrap_or(asking.secret),
            initiator: asking.initiator,
            queues: asking.queues.min(self.limits.max_queues),
            generation: record.generation,
            synced_boot_id,
            lease: Lease::default(),
            standbys: Vec::new(),
            waits: Some(waits),
        };
        self.sessions.insert(id, entry);
        self.answer_what_waits(place, now_ms);
        Ok(())
    }

    /// Writes an attach that was decided into the volume's record. Answers the boot id under which a drain synced
    /// what this session wrote before.
    fn record_attach(&mut self, asking: &Asking, recorded: bool, preempt: bool) -> BootId {
        let (place, session) = (asking.volume, asking.session);
        let boot_id = self.boot_id;
        let sessions = &self.sessions;
        let volume = &mut self.volumes[place];
        let now = volume.sync_state(boot_id);
        let told = recorded && volume.synced_for.contains(&session);
        let synced_boot_id = if told { volume.synced_boot_id } else { BootId::NIL };
        let before = volume.record.clone();
        let record = &mut volume.record;
        if asking.next_secret.is_some() {
            takeover::replace(record, asking.secret);
        }
        if holders::writes(asking.mode) {
            record.generation = generation::after(record, recorded, preempt);
            // What the drain synced ends with the first write after it.
            record.synced_boot_id = BootId::NIL;
            let known = record.holder(session).filter(|_| recorded).cloned();
            let (mut flushed_at, lost_writes) = known.map_or((now, false), |h| (h.flushed_at, h.lost_writes));
            if told && flushed_at.boot_id == synced_boot_id {
                // A sync that failed before isn't mended by one that succeeded.
                flushed_at.boot_id = boot_id;
            }
            // Recorded until another writer attaches, unless it is there beside it.
            let stays = |other: SessionId| (recorded && !preempt) || is_at(sessions, place, other);
            record.holders.retain(|holder| holder.session == session || stays(holder.session));
            let holder = Holder {
                session,
                secret: asking.next_secret.unwrap_or(asking.secret),
                mode: asking.mode,
                closed: false,
                flushed_at,
                lost_writes,
            };
            match record.holder_mut(session) {
                Some(present) => *present = holder,
                None => record.holders.push(holder),
            }
        }
        if *record != before || volume.storing < volume.record.version {
            self.store(place);
        }
        synced_boot_id
    }

    /// Answers the attaches of a volume that have nothing to wait for any more.
    fn answer_what_waits(&mut self, place: usize, now_ms: u64) {
        let waiting = self.sessions.iter().filter(|(_, entry)| entry.volume == place && entry.waits.is_some());
        let waiting: Vec<SessionId> = waiting.map(|(id, _)| *id).collect();
        for id in waiting {
            if self.endings.block(place, id) {
                continue;
            }
            let inherited = self.judge(id);
            let stored = self.volumes[place].stored;
            let terms = self.terms();
            let Some(entry) = self.sessions.get_mut(&id) else { continue };
            let Some(waits) = entry.waits.take_if(|waits| waits.version <= stored && !waits.requests.is_empty()) else {
                continue;
            };
            entry.lease.attached(terms, now_ms);
            self.volumes[place].awaited.retain(|holder| *holder != id);
            for (n, (request, _)) in waits.requests.into_iter().enumerate() {
                if let Some(admitted) = self.admitted(id, n == 0, inherited) {
                    self.answer(request, Ok(admitted));
                }
            }
        }
    }

    /// What a session inherits of a predecessor's unflushed writes (I5). That they are lost is recorded before
    /// anybody is told.
    fn judge(&mut self, id: SessionId) -> Inherited {
        let Some(entry) = self.sessions.get_mut(&id) else { return Inherited::Nothing };
        let place = entry.volume;
        let volume = &mut self.volumes[place];
        let now = volume.sync_state(self.boot_id);
        let Some(holder) = volume.record.holder_mut(id) else { return Inherited::Nothing };
        if volume.write_through {
            return Inherited::Nothing;
        }
        if holder.lost_writes {
            return Inherited::Lost;
        }
        let Some(waits) = entry.waits.as_mut() else { return Inherited::Nothing };
        if !waits.takeover {
            // A holder that goes on after its session was lost: what it had acknowledged before stands or falls with
            // this session's syncs. (What was lost before it, it knows itself.)
            return if waits.newcomer { Inherited::Nothing } else { Inherited::Unflushed };
        }
        let finding = inherited(holder.flushed_at, now);
        if finding == Inherited::Lost {
            holder.lost_writes = true;
            waits.version = volume.record.version + 1;
            self.store(place);
        }
        finding
    }

    fn admitted(&self, session: SessionId, fresh: bool, inherited: Inherited) -> Option<Admitted> {
        let entry = self.sessions.get(&session)?;
        Some(Admitted {
            session,
            fresh,
            volume: entry.volume,
            mode: entry.mode,
            queues: entry.queues,
            generation: entry.generation,
            failed_syncs: self.volumes[entry.volume].record.failed_syncs,
            synced_boot_id: entry.synced_boot_id,
            inherited,
        })
    }

    /// Whoever asked doesn't wait for the answer any more: its connection is gone. A session that took the place of
    /// its own predecessor goes on waiting for it, as one without a path does: else a stranger could take the volume
    /// before it asks again.
    pub fn withdraw(&mut self, request: RequestId) {
        let asked = |entry: &Entry| {
            entry.waits.as_ref().is_some_and(|waits| waits.requests.iter().any(|(waiting, _)| *waiting == request))
        };
        let Some(id) = self.sessions.iter().find_map(|(id, entry)| asked(entry).then_some(*id)) else { return };
        self.gives_up(id, true, |waiting, _| waiting == request);
    }

    /// Takes requests from a session that waits; gives them. When none is left the session never was, unless it was
    /// there before and `stays`.
    fn gives_up(&mut self, id: SessionId, stays: bool, gone: impl Fn(RequestId, u64) -> bool) -> Vec<RequestId> {
        let Some(waits) = self.sessions.get_mut(&id).and_then(|entry| entry.waits.as_mut()) else { return Vec::new() };
        let deserted_ms = &mut waits.deserted_ms;
        let leaving = waits.requests.extract_if(.., |(request, since_ms)| gone(*request, *since_ms));
        let leaving = leaving.map(|(request, since_ms)| {
            *deserted_ms = since_ms;
            request
        });
        let leaving = leaving.collect();
        if waits.requests.is_empty() && (waits.newcomer || !stays) {
            let newcomer = waits.newcomer;
            let entry = self.sessions.remove(&id);
            if let (Some(entry), true) = (entry, newcomer) {
                self.leaves_in_order(entry.volume, id);
            }
        }
        leaving
    }

    // ---- paths

    /// A connection wants to become a path of a queue. If it may, it counts as one until [`Self::path_lost`] or
    /// [`Self::path_failed`].
    ///
    /// Where there is no room for it a standby makes some: the driver ends the connection that this names, and tells
    /// so by [`Self::path_failed`] before anything else. No standby keeps a path out.
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn join(
        &mut self,
        session: SessionId,
        secret: &Digest,
        queue: QueueId,
        path: PathId,
    ) -> Result<Option<(SessionId, PathId)>, Refusal> {
        self.may_join(session, secret, queue)?;
        let mut leaves = None;
        if self.is_full() {
            leaves = Some(self.spare(session).ok_or(Refusal::TooManyPaths { limit: self.limits.max_paths })?);
        }
        self.path_comes(session, path, None);
        Ok(leaves)
    }

    /// A connection wants to stand by for a queue. If it may, it counts as a path until [`Self::path_lost`] or
    /// [`Self::path_failed`]. One too many for its queue takes the place of the oldest, as in [`Self::join`].
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn stand_by(
        &mut self,
        session: SessionId,
        secret: &Digest,
        queue: QueueId,
        rail: Rail,
        path: PathId,
    ) -> Result<Option<(SessionId, PathId)>, Refusal> {
        self.may_join(session, secret, queue)?;
        let standbys = self.sessions.get(&session).into_iter().flat_map(|entry| &entry.standbys);
        let mut beside = standbys.filter(|standby| standby.queue == queue && standby.rail == rail);
        let oldest = beside.next().map(|standby| (session, standby.path));
        let leaves = oldest.filter(|_| 1 + beside.count() >= MAX_STANDBYS);
        if leaves.is_none() && self.is_full() {
            return Err(Refusal::TooManyPaths { limit: self.limits.max_paths });
        }
        self.path_comes(session, path, Some(Standby { queue, rail, path }));
        Ok(leaves)
    }

    fn is_full(&self) -> bool {
        self.sessions.values().map(|entry| entry.lease.paths()).sum::<usize>() >= self.limits.max_paths
    }

    /// The standby that makes room for a path of `session`: its own oldest, else that of who has most of them.
    fn spare(&self, session: SessionId) -> Option<(SessionId, PathId)> {
        let own_first = |(id, entry): &(&SessionId, &Entry)| (**id == session, entry.standbys.len());
        let standing = self.sessions.iter().filter(|(_, entry)| !entry.standbys.is_empty());
        let (id, entry) = standing.max_by_key(own_first)?;
        entry.standbys.first().map(|standby| (*id, standby.path))
    }

    fn path_comes(&mut self, session: SessionId, path: PathId, standby: Option<Standby>) {
        let Some(entry) = self.sessions.get_mut(&session) else { return };
        // From now on it may write.
        self.volumes[entry.volume].synced_for.retain(|holder| *holder != session);
        entry.lease.path_comes(path);
        entry.standbys.retain(|present| present.path != path);
        entry.standbys.extend(standby);
    }

    /// Whether a connection shows what it needs to be a path of this queue.
    fn may_join(&self, session: SessionId, secret: &Digest, queue: QueueId) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        let entry = self.sessions.get(&session).ok_or(Refusal::SessionLost { session })?;
        takeover::check(&self.volumes[entry.volume].record, session, Some(&entry.secret), secret)?;
        if entry.waits.is_some() {
            return Err(Refusal::SessionLost { session });
        }
        if queue.0 >= entry.queues {
            return Err(Refusal::NoQueue { session, queue, queues: entry.queues });
        }
        Ok(())
    }

    /// A connection didn't become a path.
    pub fn path_failed(&mut self, session: SessionId, path: PathId, now_ms: u64) {
        self.path_goes(session, path, false, now_ms);
    }

    /// A path, or a standby, was lost.
    pub fn path_lost(&mut self, session: SessionId, path: PathId, now_ms: u64) {
        self.path_goes(session, path, true, now_ms);
    }

    fn path_goes(&mut self, session: SessionId, path: PathId, was_one: bool, now_ms: u64) {
        let terms = self.terms();
        if let Some(entry) = self.sessions.get_mut(&session) {
            entry.standbys.retain(|standby| standby.path != path);
            entry.lease.path_goes(path, was_one, terms, now_ms);
        }
    }

    // ---- the end of a session

    /// The initiator asks to end its session in order.
    pub fn close(&mut self, session: SessionId) {
        if let Some(entry) = self.sessions.get(&session) {
            let volume = entry.volume;
            self.end(session, Status::CLOSED);
            self.leaves_in_order(volume, session);
        }
    }

    /// The end of a session is decided: no path of it is taken from now on.
    fn end(&mut self, session: SessionId, cause: Status) {
        let Some(entry) = self.sessions.remove(&session) else { return };
        match entry.waits {
            // No reactor knows of it.
            Some(waits) => {
                for (request, _) in waits.requests {
                    let refusal = match cause {
                        Status::PREEMPTED => Refusal::Preempted,
                        Status::TAKEN_OVER => Refusal::TakenOver { session },
                        _ => Refusal::SessionLost { session },
                    };
                    self.answer(request, Err(refusal));
                }
            }
            None => {
                self.endings.begin(Ending { session, volume: entry.volume, mode: entry.mode, cause });
                self.outputs.push_back(Output::End { session, status: cause });
            }
        }
    }

    /// Every reactor has confirmed the end of a session: nothing that it gave to storage is still there. `flushed` is
    /// what its ledger says: [`super::FlushLedger::flushed`].
    pub fn ended(&mut self, session: SessionId, flushed: Option<u64>, now_ms: u64) {
        let Some(Ending { volume: place, .. }) = self.endings.confirmed(session) else { return };
        let boot_id = self.boot_id;
        let holder = self.volumes[place].record.holder_mut(session);
        if let (Some(holder), Some(failed_syncs)) = (holder, flushed) {
            let flushed_at = SyncState { boot_id, failed_syncs };
            if holder.flushed_at != flushed_at {
                holder.flushed_at = flushed_at;
                self.store(place);
            }
        }
        self.answer_what_waits(place, now_ms);
        // The same session may attach to another volume.
        if let Some(entry) = self.sessions.get(&session).filter(|entry| entry.volume != place) {
            self.answer_what_waits(entry.volume, now_ms);
        }
    }

    fn leaves_in_order(&mut self, place: usize, session: SessionId) {
        if let Some(holder) = self.volumes[place].record.holder_mut(session).filter(|holder| !holder.closed) {
            holder.closed = true;
            self.store(place);
        }
    }

    /// Time passes: sessions without a path end, and who has waited for too long is refused.
    pub fn tick(&mut self, now_ms: u64) {
        let lease_ms = u64::from(self.limits.lease_ms);
        let over = self.sessions.iter().filter(|(_, entry)| match &entry.waits {
            Some(waits) => waits.requests.is_empty() && waits.deserted_ms.saturating_add(lease_ms) <= now_ms,
            None => entry.lease.is_over(now_ms),
        });
        let over: Vec<SessionId> = over.map(|(id, _)| *id).collect();
        for session in over {
            self.end(session, Status::CONNECTION_LOST);
        }
        let waited_ms = self.limits.attach_wait_ms;
        let waiting: Vec<SessionId> = self.waiting().collect();
        for session in waiting {
            for request in self.gives_up(session, true, |_, since_ms| since_ms.saturating_add(waited_ms) <= now_ms) {
                self.answer(request, Err(Refusal::StillWaits { waited_ms }));
            }
        }
    }

    fn waiting(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.iter().filter(|(_, entry)| entry.waits.is_some()).map(|(id, _)| *id)
    }

    // ---- what is stored

    fn store(&mut self, place: usize) {
        let volume = &mut self.volumes[place];
        volume.record.version += 1;
        volume.storing = volume.record.version;
        self.outputs.push_back(Output::Store { volume: place, record: volume.record.clone() });
    }

    /// The record of a volume is stored and synced, up to this version.
    pub fn stored(&mut self, volume: usize, version: u64, now_ms: u64) {
        let Some(stored) = self.volumes.get_mut(volume).map(|v| &mut v.stored) else { return };
        *stored = version.max(*stored);
        self.answer_what_waits(volume, now_ms);
    }

    /// The record of a volume can't be stored. Who waits for it is refused; the next change is stored again.
    pub fn not_stored(&mut self, volume: usize) {
        let Some(v) = self.volumes.get_mut(volume) else { return };
        v.storing = v.stored;
        let waiting: Vec<SessionId> = self.waiting().collect();
        for session in waiting {
            if self.sessions.get(&session).is_some_and(|entry| entry.volume == volume) {
                for request in self.gives_up(session, false, |_, _| true) {
                    self.answer(request, Err(Refusal::NotStored));
                }
            }
        }
    }

    /// So many syncs of a volume have failed since it exists. Answers the version that has to be stored before a
    /// command is answered that heard of it (I5); nothing if it is stored already.
    pub fn sync_failed(&mut self, volume: usize, failed_syncs: u64) -> Option<u64> {
        let v = self.volumes.get_mut(volume)?;
        let news = failed_syncs > v.record.failed_syncs;
        v.record.failed_syncs = failed_syncs.max(v.record.failed_syncs);
        if news || v.storing < v.record.version {
            self.store(volume);
        }
        let v = &self.volumes[volume];
        (v.stored < v.record.version).then_some(v.record.version)
    }

    // ---- the end of the target

    /// From now on nothing new is accepted, and who waits is refused.
    pub fn drain(&mut self) {
        self.draining = true;
        let waiting: Vec<SessionId> = self.waiting().collect();
        for session in waiting {
            for request in self.gives_up(session, false, |_, _| true) {
                self.answer(request, Err(Refusal::Draining));
            }
        }
    }

    /// Whether nothing new is accepted.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// A volume was synced after its last write, and nobody writes to it before the target starts again.
    pub fn drained(&mut self, volume: usize) {
        let boot_id = self.boot_id;
        if let Some(v) = self.volumes.get_mut(volume) {
            v.record.synced_boot_id = boot_id;
            self.store(volume);
        }
    }

    // ---- to look at

    /// Number of sessions that hold their volume in this mode, those that end included.
    #[must_use]
    pub fn count(&self, mode: AttachMode) -> usize {
        let present = self.sessions.values().map(|entry| entry.mode);
        present.chain(self.endings.iter().map(|ending| ending.mode)).filter(|m| *m == mode).count()
    }

    /// The record of a volume as it is now, stored or not.
    #[must_use]
    pub fn record(&self, volume: usize) -> Option<&Record> {
        self.volumes.get(volume).map(|volume| &volume.record)
    }

    fn terms(&self) -> Terms {
        Terms { lease_ms: self.limits.lease_ms, first_path_ms: self.limits.first_path_ms }
    }

    fn answer(&mut self, request: RequestId, answer: Result<Admitted, Refusal>) {
        self.outputs.push_back(Output::Answer { request, answer });
    }
}

/// Whether a session holds the volume in this place.
fn is_at(sessions: &BTreeMap<SessionId, Entry>, place: usize, session: SessionId) -> bool {
    sessions.get(&session).is_some_and(|entry| entry.volume == place)
}

#[cfg(test)]
mod tests;
