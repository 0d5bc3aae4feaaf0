//! Who holds which volume: the rules, without threads, sockets or clocks. [`super::sessions`] drives them.
//!
//! The life of a session:
//!
//! ```text
//!         attach            activate            last path lost           (lease over)
//!  none ─────────▶ attached ─────────▶ active ────────────────▶ pathless ─────────────┐
//!                     │                   ▲                        │                   ▼
//!                     │ grace over        └──── activate ──────────┘     end ───▶  ending ───▶ none
//!                     └─────────────────────────────────────────────────▶           (all reactors confirmed)
//! ```
//!
//! With a lease of 0, the only one so far, a session without a path is overdue at once. A session that is
//! *ending* accepts no activation, and while one ends no attach of its volume is answered (I2).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use twinrail_protocol::target::FlushLedger;
use twinrail_protocol::wire::{Attach, AttachFlags, AttachMode};
use twinrail_protocol::{Epoch, QueueId, Secret, SessionId, Status, VolumeId};

use super::refusal::Refusal;
use crate::session::Session;
use crate::volume::{Volume, spec::nearest};

/// Names in one message; the rest is counted.
const MOST_NAMES: usize = 4;

/// What the registry keeps to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most sessions.
    pub max_sessions: usize,
    /// Most queues of one session.
    pub max_queues: u16,
    /// Most paths of all sessions together.
    pub max_paths: usize,
    /// How long a session that attached may be without its first path, in milliseconds.
    pub grace_ms: u64,
    /// How long a session outlives its last path, in milliseconds.
    pub lease_ms: u32,
}

/// What to do with an attach that is allowed.
#[derive(Debug)]
pub enum Attaching {
    /// Answer it: the session is attached, or was already.
    Done(Arc<Session>),
    /// End these sessions (none, if all are ending already), and ask again when one has ended.
    Wait(Vec<SessionId>),
}

#[derive(Debug)]
struct Entry {
    session: Arc<Session>,
    /// Connections that are or are about to be paths.
    paths: HashSet<(QueueId, Epoch)>,
    /// The highest epoch that each queue was activated with.
    epochs: Vec<Epoch>,
    /// It had a path.
    served: bool,
    /// When it is overdue, while it has no path.
    deadline_ms: Option<u64>,
    ending: bool,
}

#[derive(Debug)]
struct Holding {
    volume: Arc<Volume>,
    generation: u64,
    /// Who may write without being another holder: recorded until another writer attaches.
    writers: Vec<SessionId>,
}

/// All sessions and volumes.
#[derive(Debug)]
pub struct Registry {
    limits: Limits,
    holdings: Vec<Holding>,
    sessions: HashMap<SessionId, Entry>,
    draining: bool,
}

impl Registry {
    /// A registry without sessions.
    #[must_use]
    pub fn new(volumes: &[Arc<Volume>], limits: Limits) -> Self {
        let holding = |volume: &Arc<Volume>| Holding { volume: volume.clone(), generation: 0, writers: Vec::new() };
        let holdings = volumes.iter().map(holding).collect();
        Self { limits, holdings, sessions: HashMap::new(), draining: false }
    }

    /// From now on nothing new is accepted.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// An initiator wants to attach.
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn attach(&mut self, initiator: &str, attach: &Attach<'_>, now_ms: u64) -> Result<Attaching, Refusal> {
        self.refuse_when_draining()?;
        check_parameters(attach)?;
        if let Some(entry) = self.sessions.get(&attach.session) {
            return entry.attach_again(attach).map(Attaching::Done);
        }
        let place = self.find(attach.volume)?;
        let holding = &self.holdings[place];
        let volume = &holding.volume;
        check_volume(attach, volume)?;
        let writes = attach.mode != AttachMode::READ_ONLY;
        if writes && attach.generation != 0 && attach.generation < holding.generation {
            let text = format!(
                "volume {:?} had another writer since (its generation is {}, yours {}): unanswered writes may not be \
                 repeated; attach anew",
                volume.name, holding.generation, attach.generation
            );
            return Err(Refusal::new(Status::PREEMPTED, text));
        }
        let on_volume = || self.sessions.values().filter(|entry| entry.session.volume.index == volume.index);
        let in_the_way: Vec<&Entry> =
            on_volume().filter(|entry| !entry.ending && !entry.session.mode.goes_with(attach.mode)).collect();
        let preempt = attach.flags.has(AttachFlags::PREEMPT);
        if !in_the_way.is_empty() && !preempt {
            return Err(held(volume, attach.mode, &in_the_way));
        }
        if self.sessions.len() - in_the_way.len() >= self.limits.max_sessions {
            let text = format!("this target serves {} sessions at most; raise max_sessions", self.limits.max_sessions);
            return Err(Refusal::new(Status::LIMIT_REACHED, text).retry_after_ms(1000));
        }
        let preempted: Vec<SessionId> = in_the_way.iter().map(|entry| entry.session.id).collect();
        if !preempted.is_empty() || on_volume().any(|entry| entry.ending) {
            return Ok(Attaching::Wait(preempted));
        }
        Ok(Attaching::Done(self.admit(initiator, attach, place, now_ms)))
    }

    fn admit(&mut self, initiator: &str, attach: &Attach<'_>, place: usize, now_ms: u64) -> Arc<Session> {
        let live: HashSet<SessionId> = self.sessions.keys().copied().collect();
        let holding = &mut self.holdings[place];
        if attach.mode != AttachMode::READ_ONLY {
            let recorded = holding.writers.contains(&attach.session);
            if !recorded || attach.flags.has(AttachFlags::PREEMPT) {
                holding.generation += 1;
            }
            holding.writers.retain(|writer| attach.mode == AttachMode::SHARED && live.contains(writer));
            holding.writers.push(attach.session);
        }
        let queues = attach.queues.min(self.limits.max_queues);
        let volume = holding.volume.clone();
        let session = Arc::new(Session {
            id: attach.session,
            secret: attach.secret,
            initiator: initiator.to_owned(),
            mode: attach.mode,
            ledger: FlushLedger::new(volume.failed_syncs()),
            volume,
            generation: holding.generation,
            queues,
        });
        let entry = Entry {
            session: session.clone(),
            paths: HashSet::new(),
            epochs: vec![Epoch(0); usize::from(queues)],
            served: false,
            deadline_ms: Some(now_ms.saturating_add(self.limits.grace_ms)),
            ending: false,
        };
        self.sessions.insert(session.id, entry);
        session
    }

    /// A connection wants to be the path of a queue. If allowed it counts as one from now on, until
    /// [`Self::path_failed`] or [`Self::path_lost`].
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn activate(
        &mut self,
        session: SessionId,
        secret: &Secret,
        queue: QueueId,
        epoch: Epoch,
    ) -> Result<Arc<Session>, Refusal> {
        self.refuse_when_draining()?;
        let paths: usize = self.sessions.values().map(|entry| entry.paths.len()).sum();
        let limits = self.limits;
        let entry = self.sessions.get_mut(&session).filter(|entry| !entry.ending);
        let Some(entry) = entry else {
            let text = format!("there is no session {session} (any more); attach again");
            return Err(Refusal::new(Status::SESSION_LOST, text));
        };
        if !entry.session.secret.matches(secret) {
            return Err(bad_secret(session));
        }
        let Some(highest) = entry.epochs.get_mut(usize::from(queue.0)) else {
            let text = format!("session {session} has {} queues; there is no queue {queue}", entry.session.queues);
            return Err(Refusal::new(Status::BAD_PARAMETER, text));
        };
        if epoch <= *highest {
            let text = format!("epoch {epoch} of queue {queue} isn't greater than the last one, {highest}");
            return Err(Refusal::new(Status::STALE_EPOCH, text));
        }
        if paths >= limits.max_paths {
            let text = format!("this target serves {} connections at most; raise max_connections", limits.max_paths);
            return Err(Refusal::new(Status::LIMIT_REACHED, text).retry_after_ms(1000));
        }
        *highest = epoch;
        entry.paths.insert((queue, epoch));
        entry.deadline_ms = None;
        Ok(entry.session.clone())
    }

    /// A connection didn't become a path.
    pub fn path_failed(&mut self, session: SessionId, queue: QueueId, epoch: Epoch, now_ms: u64) {
        self.path_gone(session, queue, epoch, now_ms);
    }

    /// A path was lost.
    pub fn path_lost(&mut self, session: SessionId, queue: QueueId, epoch: Epoch, now_ms: u64) {
        if let Some(entry) = self.sessions.get_mut(&session) {
            entry.served = true;
        }
        self.path_gone(session, queue, epoch, now_ms);
    }

    fn path_gone(&mut self, session: SessionId, queue: QueueId, epoch: Epoch, now_ms: u64) {
        let limits = self.limits;
        let Some(entry) = self.sessions.get_mut(&session) else { return };
        if entry.paths.remove(&(queue, epoch)) && entry.paths.is_empty() {
            let rest_ms = if entry.served { u64::from(limits.lease_ms) } else { limits.grace_ms };
            entry.deadline_ms = Some(now_ms.saturating_add(rest_ms));
        }
    }

    /// Sessions that are to be ended now, because they have been without a path for too long.
    #[must_use]
    pub fn overdue(&self, now_ms: u64) -> Vec<SessionId> {
        let due = |entry: &&Entry| !entry.ending && entry.deadline_ms.is_some_and(|deadline| deadline <= now_ms);
        self.sessions.values().filter(due).map(|entry| entry.session.id).collect()
    }

    /// When to ask [`Self::overdue`] again.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.sessions.values().filter(|entry| !entry.ending).filter_map(|entry| entry.deadline_ms).min()
    }

    /// The end of a session begins: no activation of it is accepted any more. Gives nothing when there is
    /// no such session or it is ending already.
    pub fn begin_end(&mut self, session: SessionId) -> Option<Arc<Session>> {
        let entry = self.sessions.get_mut(&session).filter(|entry| !entry.ending)?;
        entry.ending = true;
        Some(entry.session.clone())
    }

    /// Every reactor has confirmed the end of a session.
    pub fn ended(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// Number of sessions that hold their volume in this mode, those that are ending included.
    #[must_use]
    pub fn count(&self, mode: AttachMode) -> usize {
        self.sessions.values().filter(|entry| entry.session.mode == mode).count()
    }

    fn refuse_when_draining(&self) -> Result<(), Refusal> {
        match self.draining {
            true => Err(Refusal::new(Status::DRAINING, "this target is about to stop").retry_after_ms(1000)),
            false => Ok(()),
        }
    }

    fn find(&self, name: &str) -> Result<usize, Refusal> {
        self.holdings.iter().position(|holding| holding.volume.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.holdings.iter().map(|holding| holding.volume.name.as_str()).collect();
            let remedy = match nearest(name, &names) {
                Some(near) => format!("did you mean {near:?}?"),
                None => format!("there is {}", listed(names.iter().map(|name| format!("{name:?}")))),
            };
            Refusal::new(Status::UNKNOWN_VOLUME, format!("there is no volume {name:?}; {remedy}"))
        })
    }
}

impl Entry {
    /// An ATTACH came for a session that exists: its answer may have been lost.
    fn attach_again(&self, attach: &Attach<'_>) -> Result<Arc<Session>, Refusal> {
        let session = &self.session;
        if !session.secret.matches(&attach.secret) {
            return Err(bad_secret(session.id));
        }
        if self.ending {
            let text = format!("session {} has ended; attach anew under another id", session.id);
            return Err(Refusal::new(Status::SESSION_LOST, text));
        }
        if session.volume.name != attach.volume || session.mode != attach.mode {
            let text = format!(
                "session {} holds volume {:?} {} already; use another session id for another attach",
                session.id,
                session.volume.name,
                session.mode.name()
            );
            return Err(Refusal::new(Status::BAD_PARAMETER, text));
        }
        Ok(session.clone())
    }
}

fn check_parameters(attach: &Attach<'_>) -> Result<(), Refusal> {
    if attach.flags.has(AttachFlags::TAKEOVER) {
        let text = "this target can't hand a session over to a successor; attach with --preempt";
        return Err(Refusal::new(Status::NOT_SUPPORTED, text));
    }
    if ![AttachMode::EXCLUSIVE, AttachMode::SHARED, AttachMode::READ_ONLY].contains(&attach.mode) {
        let text = format!("there is no attach mode {}; use exclusive, shared or read-only", attach.mode.0);
        return Err(Refusal::new(Status::BAD_PARAMETER, text));
    }
    if attach.queues == 0 {
        return Err(Refusal::new(Status::BAD_PARAMETER, "a session needs at least one queue"));
    }
    Ok(())
}

fn check_volume(attach: &Attach<'_>, volume: &Volume) -> Result<(), Refusal> {
    if attach.expected_volume != VolumeId::NIL && attach.expected_volume != volume.id {
        let text = format!(
            "volume {:?} has UUID {}, not {}: its content is another one now; attach without an expected UUID if \
             that is wanted",
            volume.name, volume.id, attach.expected_volume
        );
        return Err(Refusal::new(Status::WRONG_VOLUME, text));
    }
    if volume.read_only() && attach.mode != AttachMode::READ_ONLY {
        let text = format!("volume {:?} is read-only here; attach it read-only", volume.name);
        return Err(Refusal::new(Status::VOLUME_READ_ONLY, text));
    }
    Ok(())
}

fn bad_secret(session: SessionId) -> Refusal {
    let text = format!("the secret isn't that of session {session}; attach under an id of your own");
    Refusal::new(Status::BAD_SECRET, text)
}

fn held(volume: &Volume, wanted: AttachMode, in_the_way: &[&Entry]) -> Refusal {
    let holders = in_the_way.iter().map(|e| format!("{:?} ({})", e.session.initiator, e.session.mode.name()));
    let all_shared = in_the_way.iter().all(|entry| entry.session.mode == AttachMode::SHARED);
    let shared = if all_shared { ", shared" } else { "" };
    let text = format!(
        "volume {:?} is held by {}, which doesn't go with {}; attach read-only{shared}, or end all writers with --preempt",
        volume.name,
        listed(holders),
        wanted.name()
    );
    Refusal::new(Status::VOLUME_HELD, text)
}

/// The first few of a list, and how many more there are.
fn listed(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(MOST_NAMES);
    let names = names.take(MOST_NAMES).collect::<Vec<_>>().join(", ");
    if more == 0 { names } else { format!("{names} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::{VolumeIndex, VolumeSpec};

    const LIMITS: Limits = Limits { max_sessions: 8, max_queues: 4, max_paths: 16, grace_ms: 5_000, lease_ms: 0 };
    const X: AttachMode = AttachMode::EXCLUSIVE;
    const S: AttachMode = AttachMode::SHARED;
    const R: AttachMode = AttachMode::READ_ONLY;

    fn id(n: u8) -> SessionId {
        SessionId([n; 16])
    }

    fn secret(n: u8) -> Secret {
        Secret([n; 16])
    }

    fn volumes() -> Vec<Arc<Volume>> {
        ["disk0=memory,size=1M", "disk1=memory,size=1M,read-only"]
            .iter()
            .enumerate()
            .map(|(n, spec)| {
                Arc::new(Volume::open(VolumeIndex(n), &VolumeSpec::parse(spec).unwrap(), &|| false).unwrap())
            })
            .collect()
    }

    fn registry() -> Registry {
        Registry::new(&volumes(), LIMITS)
    }

    fn request(n: u8, mode: AttachMode) -> Attach<'static> {
        Attach {
            session: id(n),
            secret: secret(n),
            next_secret: Secret([0; 16]),
            mode,
            flags: AttachFlags::default(),
            queues: 2,
            expected_volume: VolumeId::NIL,
            generation: 0,
            volume: "disk0",
        }
    }

    fn done(answer: Result<Attaching, Refusal>) -> Arc<Session> {
        match answer {
            Ok(Attaching::Done(session)) => session,
            other => panic!("not attached: {other:?}"),
        }
    }

    fn waits(answer: Result<Attaching, Refusal>) -> Vec<SessionId> {
        match answer {
            Ok(Attaching::Wait(mut ends)) => {
                ends.sort();
                ends
            }
            other => panic!("doesn't wait: {other:?}"),
        }
    }

    fn status<T: std::fmt::Debug>(answer: Result<T, Refusal>) -> Status {
        answer.unwrap_err().status
    }

    impl Registry {
        fn take(&mut self, n: u8, mode: AttachMode) -> Arc<Session> {
            done(self.attach(&format!("host-{n}"), &request(n, mode), 0))
        }

        fn try_take(&mut self, n: u8, mode: AttachMode) -> Result<Attaching, Refusal> {
            self.attach(&format!("host-{n}"), &request(n, mode), 0)
        }

        fn preempt(&mut self, n: u8, mode: AttachMode) -> Result<Attaching, Refusal> {
            self.attach("taker", &Attach { flags: AttachFlags::PREEMPT, ..request(n, mode) }, 0)
        }
    }

    #[test]
    fn a_writer_that_does_not_fit_is_refused_with_the_holders_and_the_remedies() {
        let mut r = registry();
        r.take(1, X);
        let refusal = r.try_take(2, X).unwrap_err();
        assert_eq!(refusal.status, Status::VOLUME_HELD);
        assert_eq!(
            refusal.text,
            "volume \"disk0\" is held by \"host-1\" (exclusive), which doesn't go with exclusive; attach read-only, or \
             end all writers with --preempt"
        );
        assert_eq!(status(r.try_take(2, S)), Status::VOLUME_HELD);
        r.take(3, R);
        r.take(4, R);
        assert_eq!((r.count(X), r.count(R)), (1, 2));
        // A reader is in nobody's way.
        let mut r = registry();
        r.take(3, R);
        r.take(1, X);
    }

    #[test]
    fn shared_writers_go_together_and_keep_an_exclusive_one_out() {
        let mut r = registry();
        for n in 1..=6 {
            r.take(n, S);
        }
        let text = r.try_take(7, X).unwrap_err().text;
        assert!(text.contains(" and 2 more, which") && text.contains("attach read-only, shared, or"), "{text}");
    }

    #[test]
    fn a_preempt_ends_the_writers_and_waits_for_their_end() {
        let mut r = registry();
        r.take(1, S);
        r.take(2, S);
        r.take(3, R);
        assert_eq!(waits(r.preempt(9, X)), [id(1), id(2)]);
        r.begin_end(id(1)).unwrap();
        r.begin_end(id(2)).unwrap();
        assert_eq!(waits(r.preempt(9, X)), []);
        r.ended(id(1));
        assert_eq!(waits(r.preempt(9, X)), [], "one of them still has commands at storage");
        r.ended(id(2));
        let taken = done(r.preempt(9, X));
        assert_eq!(taken.generation, 3);
        assert_eq!(r.count(R), 1, "readers stay");
    }

    #[test]
    fn a_shared_preempt_leaves_shared_writers_alone() {
        let mut r = registry();
        r.take(1, S);
        done(r.preempt(9, S));
    }

    #[test]
    fn no_attach_is_answered_while_a_session_of_the_volume_ends() {
        let mut r = registry();
        r.take(1, X);
        r.begin_end(id(1)).unwrap();
        assert_eq!(waits(r.try_take(2, X)), []);
        assert_eq!(waits(r.try_take(2, R)), [], "what a reader sees could still change");
        let other = Attach { volume: "disk1", ..request(2, R) };
        done(r.attach("host-2", &other, 0));
        r.ended(id(1));
        r.take(3, X);
    }

    #[test]
    fn an_ending_session_accepts_nothing_and_ends_once() {
        let mut r = registry();
        r.take(1, X);
        assert!(r.begin_end(id(1)).is_some());
        assert!(r.begin_end(id(1)).is_none());
        assert_eq!(status(r.activate(id(1), &secret(1), QueueId(0), Epoch(1))), Status::SESSION_LOST);
        assert_eq!(status(r.try_take(1, X)), Status::SESSION_LOST);
    }

    #[test]
    fn a_repeated_attach_is_answered_again_to_whoever_has_the_secret() {
        let mut r = registry();
        let first = r.take(1, X);
        let again = r.take(1, X);
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(status(r.attach("h", &Attach { secret: secret(9), ..request(1, X) }, 0)), Status::BAD_SECRET);
        assert_eq!(status(r.attach("h", &request(1, R), 0)), Status::BAD_PARAMETER);
        assert_eq!(status(r.attach("h", &Attach { volume: "disk1", ..request(1, X) }, 0)), Status::BAD_PARAMETER);
    }

    #[test]
    fn each_other_writer_raises_the_generation_and_a_past_one_is_refused() {
        let mut r = registry();
        assert_eq!(r.take(1, X).generation, 1);
        assert_eq!(r.take(2, R).generation, 1);
        r.begin_end(id(1));
        r.ended(id(1));
        // The same holder comes back.
        let back = Attach { generation: 1, ..request(1, X) };
        assert_eq!(done(r.attach("host-1", &back, 0)).generation, 1);
        r.begin_end(id(1));
        r.ended(id(1));
        assert_eq!(r.take(3, X).generation, 2);
        r.begin_end(id(3));
        r.ended(id(3));
        let refusal = r.attach("host-1", &back, 0).unwrap_err();
        assert_eq!(refusal.status, Status::PREEMPTED);
        assert!(refusal.text.contains("generation is 2, yours 1"), "{refusal}");
        // Reading what it has become is always allowed.
        done(r.attach("host-1", &Attach { mode: R, ..back }, 0));
    }

    #[test]
    fn a_volume_that_is_not_what_was_expected_is_refused() {
        let mut r = registry();
        let attach = |a: &Attach<'_>, r: &mut Registry| r.attach("h", a, 0);
        let text = attach(&Attach { volume: "disk9", ..request(1, X) }, &mut r).unwrap_err().text;
        assert_eq!(text, "there is no volume \"disk9\"; did you mean \"disk0\"?");
        let text = attach(&Attach { volume: "backup", ..request(1, X) }, &mut r).unwrap_err().text;
        assert_eq!(text, "there is no volume \"backup\"; there is \"disk0\", \"disk1\"");
        let other = Attach { expected_volume: VolumeId([9; 16]), ..request(1, X) };
        assert_eq!(status(attach(&other, &mut r)), Status::WRONG_VOLUME);
        let right = Attach { expected_volume: r.holdings[0].volume.id, ..request(1, X) };
        done(attach(&right, &mut r));
        assert_eq!(status(attach(&Attach { volume: "disk1", ..request(2, S) }, &mut r)), Status::VOLUME_READ_ONLY);
    }

    #[test]
    fn impossible_parameters_are_refused() {
        let mut r = registry();
        let takeover = Attach { flags: AttachFlags::TAKEOVER, ..request(1, X) };
        assert_eq!(status(r.attach("h", &takeover, 0)), Status::NOT_SUPPORTED);
        assert_eq!(status(r.try_take(1, AttachMode(7))), Status::BAD_PARAMETER);
        assert_eq!(status(r.attach("h", &Attach { queues: 0, ..request(1, X) }, 0)), Status::BAD_PARAMETER);
        let many = done(r.attach("h", &Attach { queues: 999, ..request(1, X) }, 0));
        assert_eq!(many.queues, LIMITS.max_queues);
    }

    #[test]
    fn an_activation_needs_session_secret_queue_and_a_newer_epoch() {
        let mut r = registry();
        r.take(1, X);
        let mut activate = |n, s, queue, epoch| r.activate(id(n), &secret(s), QueueId(queue), Epoch(epoch)).map(|_| ());
        assert_eq!(status(activate(2, 2, 0, 1)), Status::SESSION_LOST);
        assert_eq!(status(activate(1, 2, 0, 1)), Status::BAD_SECRET);
        assert_eq!(status(activate(1, 1, 2, 1)), Status::BAD_PARAMETER);
        assert_eq!(status(activate(1, 1, 0, 0)), Status::STALE_EPOCH);
        assert_eq!(activate(1, 1, 0, 1), Ok(()));
        assert_eq!(status(activate(1, 1, 0, 1)), Status::STALE_EPOCH);
        assert_eq!(activate(1, 1, 1, 1), Ok(()));
    }

    #[test]
    fn a_session_is_overdue_when_its_last_path_is_lost() {
        let mut r = registry();
        r.take(1, X);
        for queue in [0, 1] {
            r.activate(id(1), &secret(1), QueueId(queue), Epoch(1)).unwrap();
        }
        assert_eq!(r.next_deadline_ms(), None);
        r.path_lost(id(1), QueueId(0), Epoch(1), 100);
        assert!(r.overdue(u64::MAX).is_empty());
        r.path_lost(id(1), QueueId(0), Epoch(1), 200);
        assert!(r.overdue(u64::MAX).is_empty(), "told twice of one path");
        r.path_lost(id(1), QueueId(1), Epoch(1), 300);
        assert_eq!(r.overdue(300), [id(1)]);
        r.begin_end(id(1));
        assert!(r.overdue(300).is_empty() && r.next_deadline_ms().is_none());
    }

    #[test]
    fn a_session_that_never_gets_a_path_ends_after_its_grace() {
        let mut r = registry();
        r.take(1, X);
        assert_eq!(r.next_deadline_ms(), Some(LIMITS.grace_ms));
        r.activate(id(1), &secret(1), QueueId(0), Epoch(1)).unwrap();
        assert!(r.overdue(u64::MAX).is_empty(), "an activation is under way");
        // The reactor refused it.
        r.path_failed(id(1), QueueId(0), Epoch(1), 1_000);
        assert!(r.overdue(1_000 + LIMITS.grace_ms - 1).is_empty());
        assert_eq!(r.overdue(1_000 + LIMITS.grace_ms), [id(1)]);
    }

    #[test]
    fn limits_hold_and_a_preempt_does_not_get_around_them() {
        let limits = Limits { max_sessions: 2, max_paths: 1, ..LIMITS };
        let mut r = Registry::new(&volumes(), limits);
        r.take(1, X);
        r.take(2, R);
        assert_eq!(status(r.try_take(3, R)), Status::LIMIT_REACHED);
        assert_eq!(waits(r.preempt(3, X)), [id(1)], "it takes the place of the one it ends");
        r.activate(id(1), &secret(1), QueueId(0), Epoch(1)).unwrap();
        assert_eq!(status(r.activate(id(2), &secret(2), QueueId(0), Epoch(1))), Status::LIMIT_REACHED);
        r.path_lost(id(1), QueueId(0), Epoch(1), 0);
        r.activate(id(2), &secret(2), QueueId(0), Epoch(1)).unwrap();
    }

    #[test]
    fn a_draining_target_accepts_nothing() {
        let mut r = registry();
        r.take(1, X);
        r.drain();
        assert_eq!(status(r.try_take(2, R)), Status::DRAINING);
        assert_eq!(status(r.activate(id(1), &secret(1), QueueId(0), Epoch(1))), Status::DRAINING);
    }
}
