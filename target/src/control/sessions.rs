//! The one owner of all sessions: drives the protocol's [`Holdings`] with real time, reactors and tasks.
//!
//! Whatever changes who may act and whatever tells the reactors of it happens under one lock, so that no
//! reactor is given a connection of a session after it was told of the session's end (I2).

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::IoSlice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{Notify, mpsc, oneshot};
use twinrail_fallback_tcp::SendVectored;
use twinrail_protocol::target::{
    Admitted, Asking, Digest, FlushLedger, Holdings, Limits, Output, PathId, Refusal as RuleRefusal, RequestId,
    VolumeFacts,
};
use twinrail_protocol::wire::{Attach, AttachMode, Control, ControlKind, Frame, Standby};
use twinrail_protocol::{BootId, QueueId, Secret, SessionId, Status};

use super::SESSION_LINES;
use super::refusal::Refusal;
use crate::metrics::Metrics;
use crate::reactor::mailbox::{Activation, FromReactor, Mailbox, Message, ToReactor};
use crate::reactor::{Event, Parting};
use crate::session::Session;
use crate::throttle::Throttle;
use crate::volume::Volume;
use crate::volume::spec::nearest;

/// Volumes named to who asked for one that isn't there; the rest is counted.
const MOST_NAMES: usize = 4;

/// All sessions.
#[derive(Debug)]
pub struct Sessions {
    state: Mutex<State>,
    volumes: Vec<Arc<Volume>>,
    mailboxes: Arc<[Arc<Mailbox>]>,
    metrics: Arc<Metrics>,
    /// A deadline may be nearer than before.
    deadlines: Notify,
    lease_ms: u32,
    begun: Instant,
    /// Lines of sessions that end.
    log: Throttle,
}

/// The rules, and what belongs to the sessions that they are about.
#[derive(Debug)]
struct State {
    holdings: Holdings,
    /// Sessions that were told that they exist, until their end begins.
    live: HashMap<SessionId, Arc<Session>>,
    /// Attaches that wait for their answer.
    asking: HashMap<RequestId, Asked>,
    /// Connections that stand by, each with what is dropped to tell it that its place is gone.
    standing: HashMap<PathId, oneshot::Sender<()>>,
    /// Number of the last request or path.
    last: u64,
}

#[derive(Debug)]
struct Asked {
    initiator: String,
    /// The volume's place.
    volume: usize,
    answer: oneshot::Sender<Result<Arc<Session>, Refusal>>,
}

impl State {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

impl Sessions {
    /// No sessions, on these reactors.
    #[must_use]
    pub fn new(
        volumes: &[Arc<Volume>],
        mailboxes: Arc<[Arc<Mailbox>]>,
        metrics: Arc<Metrics>,
        boot_id: BootId,
        limits: Limits,
    ) -> Arc<Self> {
        let facts = volumes.iter().map(|volume| VolumeFacts {
            id: volume.id,
            read_only: volume.read_only(),
            write_through: volume.write_through(),
            // There is no state file yet: what a target before this one knew is forgotten.
            record: None,
        });
        let holdings = Holdings::new(facts, boot_id, limits, 0);
        Arc::new(Self {
            state: Mutex::new(State {
                holdings,
                live: HashMap::new(),
                asking: HashMap::new(),
                standing: HashMap::new(),
                last: 0,
            }),
            volumes: volumes.to_vec(),
            mailboxes,
            metrics,
            deadlines: Notify::new(),
            lease_ms: limits.lease_ms,
            begun: Instant::now(),
            log: Throttle::new(SESSION_LINES),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic under the lock ends the process in a release build; in tests the state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// From now on nothing new is accepted. Attaches that wait are answered.
    pub fn drain(self: &Arc<Self>) {
        self.change(|state, _| state.holdings.drain());
    }

    /// Attaches a session, after ending those that are in the way if that was asked for.
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub async fn attach(self: &Arc<Self>, initiator: &str, attach: &Attach<'_>) -> Result<Arc<Session>, Refusal> {
        let volume = self.find(attach.volume)?;
        let request = RequestId(self.state().number());
        let asking = Asking::new(request, initiator, volume, attach, digest);
        let asking = asking.map_err(|refusal| Refusal::about(&refusal, attach.volume))?;
        let (answer, answered) = oneshot::channel();
        // Dropped when the initiator hangs up: then it doesn't wait any more.
        let _waiting = Waiting { sessions: self, request };
        self.change(|state, now_ms| {
            state.asking.insert(request, Asked { initiator: initiator.to_owned(), volume, answer });
            self.count_failed_syncs(state, volume);
            state.holdings.attach(asking, now_ms);
        });
        answered.await.unwrap_or_else(|_| Err(Refusal::new(Status::DRAINING, "this target is about to stop")))
    }

    /// The place of a volume.
    fn find(&self, name: &str) -> Result<usize, Refusal> {
        self.volumes.iter().position(|volume| volume.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.volumes.iter().map(|volume| volume.name.as_str()).collect();
            let remedy = match nearest(name, &names) {
                Some(near) => format!("did you mean {near:?}?"),
                None => format!("there is {}", listed(&names)),
            };
            Refusal::new(Status::UNKNOWN_VOLUME, format!("there is no volume {name:?}; {remedy}"))
        })
    }

    /// The reactor that serves a queue. The queues of one session are spread; the paths of one queue are
    /// not.
    #[must_use]
    pub fn reactor_of(&self, session: SessionId, queue: QueueId) -> usize {
        let mut hasher = DefaultHasher::new();
        session.hash(&mut hasher);
        let reactors = self.mailboxes.len().max(1) as u64;
        (hasher.finish().wrapping_add(u64::from(queue.0)) % reactors) as usize
    }

    /// Asks whether a connection may be the path of a queue; if so, the permit gives it to the queue's
    /// reactor. A refusal by the reactor must be told by [`Self::path_failed`]; the loss of the path is an
    /// event.
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn activate(&self, session: SessionId, secret: &Secret, queue: QueueId) -> Result<Permit<'_>, Refusal> {
        let mut state = self.state();
        let path = PathId(state.number());
        let leaves = state.holdings.join(session, &digest(secret), queue, path)?;
        self.oust(&mut state, leaves);
        let session = state.live.get(&session).cloned().ok_or(RuleRefusal::SessionLost { session })?;
        let mailbox = &self.mailboxes[self.reactor_of(session.id, queue)];
        Ok(Permit { session, path, mailbox, _state: state })
    }

    /// Asks whether a connection may stand by for a queue; if so, `tell` hears of the queue from its reactor. Gives the
    /// path that it counts as, the way to the reactor, and what tells it that a newer one took its place. Its end
    /// must be told by [`Self::standby_lost`].
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn stand_by(
        &self,
        standby: &Standby,
        tell: mpsc::Sender<FromReactor>,
    ) -> Result<(PathId, &Mailbox, oneshot::Receiver<()>), Refusal> {
        let Standby { session, ref secret, queue, rail } = *standby;
        let mut state = self.state();
        let path = PathId(state.number());
        let leaves = state.holdings.stand_by(session, &digest(secret), queue, rail, path)?;
        self.oust(&mut state, leaves);
        let (notice, ousted) = oneshot::channel();
        state.standing.insert(path, notice);
        let mailbox = &self.mailboxes[self.reactor_of(session, queue)];
        // Under the lock: the reactor hears of the session's end after this.
        mailbox.send(Message::Standby { session, queue, path, what: ToReactor::Stands { tell } });
        Ok((path, mailbox, ousted))
    }

    /// A standby loses its place (I8).
    fn oust(&self, state: &mut State, leaves: Option<(SessionId, PathId)>) {
        if let Some((session, path)) = leaves {
            state.standing.remove(&path);
            state.holdings.path_failed(session, path, self.now_ms());
            // Its session may be without a path now.
            self.deadlines.notify_one();
        }
    }

    /// A reactor refused a connection.
    pub fn path_failed(self: &Arc<Self>, session: SessionId, path: PathId) {
        self.change(|state, now_ms| state.holdings.path_failed(session, path, now_ms));
    }

    /// A connection doesn't stand by any more.
    pub fn standby_lost(self: &Arc<Self>, session: SessionId, path: PathId) {
        self.change(|state, now_ms| {
            state.standing.remove(&path);
            state.holdings.path_failed(session, path, now_ms);
        });
    }

    /// Acts on what reactors tell and on deadlines, for ever.
    pub async fn run(self: Arc<Self>, mut events: UnboundedReceiver<Event>) {
        loop {
            self.change(|state, now_ms| state.holdings.tick(now_ms));
            let deadline_ms = self.state().holdings.deadline_ms();
            let rest = Duration::from_millis(deadline_ms.map_or(3_600_000, |at| at.saturating_sub(self.now_ms())));
            tokio::select! {
                event = events.recv() => match event {
                    Some(Event::PathLost { session, path, .. }) => {
                        self.change(|state, now_ms| state.holdings.path_lost(session, path, now_ms));
                    }
                    Some(Event::CloseAsked { session }) => self.change(|state, _| state.holdings.close(session)),
                    // All reactors have ended.
                    None => return,
                },
                () = self.deadlines.notified() => {}
                () = tokio::time::sleep(rest) => {}
            }
        }
    }

    // ---- the rules: something happens, and what they ask for is done

    fn change(self: &Arc<Self>, happens: impl FnOnce(&mut State, u64)) {
        let mut state = self.state();
        let before = state.holdings.deadline_ms();
        happens(&mut state, self.now_ms());
        while let Some(output) = state.holdings.poll() {
            match output {
                // There is no state file yet: this process's memory is all that a record is kept in.
                Output::Store { volume, record } => state.holdings.stored(volume, record.version, self.now_ms()),
                Output::End { session, status } => self.end(&mut state, session, status),
                Output::Answer { request, answer } => self.answer(&mut state, request, answer),
            }
        }
        for mode in [AttachMode::EXCLUSIVE, AttachMode::SHARED, AttachMode::READ_ONLY] {
            self.metrics.sessions(mode.name()).set(state.holdings.count(mode) as i64);
        }
        if state.holdings.deadline_ms() != before {
            self.deadlines.notify_one();
        }
    }

    fn answer(&self, state: &mut State, request: RequestId, answer: Result<Admitted, RuleRefusal>) {
        let Some(Asked { initiator, volume, answer: to }) = state.asking.remove(&request) else { return };
        let Some(volume) = self.volumes.get(volume) else { return };
        let answer = match answer {
            Ok(admitted) => {
                let session = || {
                    Arc::new(Session {
                        id: admitted.session,
                        initiator,
                        mode: admitted.mode,
                        ledger: FlushLedger::inheriting(admitted.inherited, volume.failed_syncs()),
                        volume: volume.clone(),
                        generation: admitted.generation,
                        synced_boot_id: admitted.synced_boot_id,
                        queues: admitted.queues,
                        lease_ms: self.lease_ms,
                    })
                };
                Ok(state.live.entry(admitted.session).or_insert_with(session).clone())
            }
            Err(refusal) => Err(Refusal::about(&refusal, &volume.name)),
        };
        // Who has hung up by now finds the session when it asks again.
        let _ = to.send(answer);
    }

    /// Has all reactors end a session; when all have confirmed, whoever waits for the volume may have it.
    fn end(self: &Arc<Self>, state: &mut State, id: SessionId, status: Status) {
        let session = state.live.remove(&id);
        let confirmations: Vec<_> = self
            .mailboxes
            .iter()
            .map(|mailbox| {
                let (done, confirmed) = oneshot::channel();
                mailbox.send(Message::EndSession { session: id, status, done });
                confirmed
            })
            .collect();
        let this = self.clone();
        tokio::spawn(async move {
            let mut partings = Vec::new();
            for confirmed in confirmations {
                match confirmed.await {
                    Ok(some) => partings.extend(some),
                    // All reactors end, and with them all sessions.
                    Err(_) if this.state().holdings.is_draining() => return,
                    // Nobody knows what it still does: the volume stays held (I2).
                    Err(_) => return tracing::error!(session = %id, "a reactor didn't confirm the end of a session"),
                }
            }
            let flushed = session.as_ref().and_then(|session| session.ledger.flushed());
            this.change(|state, now_ms| {
                if let Some(session) = &session {
                    this.count_failed_syncs(state, session.volume.index.0);
                }
                state.holdings.ended(id, flushed, now_ms);
            });
            if let (Some(session), Some(unsaid)) = (&session, this.log.admit()) {
                let Session { initiator, mode, volume, .. } = &**session;
                let (volume, mode) = (&volume.name, mode.name());
                tracing::info!(session = %id, initiator, volume, mode, reason = %status, unsaid, "session ended");
            }
            partings.iter().for_each(say_closed);
        });
    }

    /// What the keepers have counted goes into the record.
    fn count_failed_syncs(&self, state: &mut State, place: usize) {
        if let Some(volume) = self.volumes.get(place) {
            // Answers that depend on it are given by the reactors and don't wait for it: nothing outlives this
            // process yet.
            let _version = state.holdings.sync_failed(place, volume.failed_syncs());
        }
    }
}

/// An attach that waits for its answer.
struct Waiting<'a> {
    sessions: &'a Arc<Sessions>,
    request: RequestId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.sessions.change(|state, _| {
            if state.asking.remove(&self.request).is_some() {
                state.holdings.withdraw(self.request);
            }
        });
    }
}

/// Leave to give a connection to a reactor. Nobody can end the session meanwhile.
#[must_use = "the rules count the path as coming"]
#[derive(Debug)]
pub struct Permit<'a> {
    session: Arc<Session>,
    path: PathId,
    mailbox: &'a Mailbox,
    _state: MutexGuard<'a, State>,
}

impl Permit<'_> {
    /// The session.
    #[must_use]
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The path that the connection is to become.
    #[must_use]
    pub fn path(&self) -> PathId {
        self.path
    }

    /// Gives the connection to the reactor.
    pub fn send(self, activation: Activation) {
        self.mailbox.send(Message::Activate(Box::new(activation)));
    }
}

/// What the rules know of a secret. The state file will hold a hash; as long as a record is only kept in this
/// process, the secret does as well.
fn digest(secret: &Secret) -> Digest {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&secret.0);
    Digest(bytes)
}

/// The first few of a list of names, and how many more there are.
fn listed(names: &[&str]) -> String {
    let shown: Vec<String> = names.iter().take(MOST_NAMES).map(|name| format!("{name:?}")).collect();
    let more = names.len() - shown.len();
    let shown = shown.join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// Answers a CLOSE: nothing of the session acts any more. The frame goes out if the socket takes it at
/// once, and it will: it has just sent all that was due.
fn say_closed(parting: &Parting) {
    let mut closed = Control::new(ControlKind::Closed, parting.epoch, parting.token);
    closed.status = Status::CLOSED;
    let bytes = Frame::Control(closed).encode();
    if let Err(error) = parting.socket.send_vectored(&[IoSlice::new(&bytes)]) {
        tracing::debug!(%error, "the initiator hung up before its CLOSE was answered");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::{VolumeIndex, VolumeSpec};
    use tokio::task::yield_now;
    use twinrail_protocol::VolumeId;
    use twinrail_protocol::wire::AttachFlags;

    const LIMITS: Limits = Limits {
        max_sessions: 8,
        max_queues: 4,
        max_paths: 16,
        lease_ms: 0,
        first_path_ms: 60_000,
        attach_wait_ms: 60_000,
    };

    /// Sessions on two reactors, which the tests play.
    fn sessions(limits: Limits) -> Arc<Sessions> {
        let volume = |(index, spec)| {
            Arc::new(Volume::open(VolumeIndex(index), &VolumeSpec::parse(spec).unwrap(), &|| false).unwrap())
        };
        let volumes: Vec<_> =
            ["disk0=memory,size=1M", "disk1=memory,size=1M"].into_iter().enumerate().map(volume).collect();
        let mailboxes = Arc::from(vec![Mailbox::new().unwrap(), Mailbox::new().unwrap()]);
        Sessions::new(&volumes, mailboxes, Metrics::new().unwrap(), BootId([1; 16]), limits)
    }

    fn request(n: u8, flags: AttachFlags) -> Attach<'static> {
        Attach {
            session: SessionId([n; 16]),
            secret: Secret([n; 16]),
            next_secret: Secret([0; 16]),
            mode: AttachMode::EXCLUSIVE,
            flags,
            queues: 2,
            expected_volume: VolumeId::NIL,
            generation: 0,
            volume: "disk0",
        }
    }

    fn attach(
        sessions: &Arc<Sessions>,
        attach: Attach<'static>,
    ) -> tokio::task::JoinHandle<Result<Arc<Session>, Refusal>> {
        let sessions = sessions.clone();
        tokio::spawn(async move { sessions.attach("host", &attach).await })
    }

    fn plain(n: u8) -> Attach<'static> {
        request(n, AttachFlags::default())
    }

    fn preempt(n: u8) -> Attach<'static> {
        request(n, AttachFlags::PREEMPT)
    }

    /// What a reactor is asked to confirm.
    async fn end_asked(sessions: &Sessions, reactor: usize) -> (Status, oneshot::Sender<Vec<Parting>>) {
        loop {
            match sessions.mailboxes[reactor].take() {
                Some(Message::EndSession { status, done, .. }) => return (status, done),
                Some(other) => panic!("{other:?}"),
                None => yield_now().await,
            }
        }
    }

    /// Lets every other task come as far as it can.
    async fn settle() {
        for _ in 0..100 {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_preempt_is_answered_when_every_reactor_has_confirmed() {
        let sessions = sessions(LIMITS);
        attach(&sessions, plain(1)).await.unwrap().unwrap();
        let taker = attach(&sessions, preempt(2));
        let (status, first) = end_asked(&sessions, 0).await;
        assert_eq!(status, Status::PREEMPTED);
        let (_, second) = end_asked(&sessions, 1).await;
        first.send(Vec::new()).unwrap();
        settle().await;
        assert!(!taker.is_finished(), "reactor 1 may still write");
        // Nobody else gets in before.
        let third = attach(&sessions, plain(3)).await.unwrap().unwrap_err();
        assert_eq!(third.status, Status::VOLUME_HELD);
        second.send(Vec::new()).unwrap();
        taker.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_attach_does_not_wait_for_ever_for_commands_that_hang() {
        let sessions = sessions(Limits { attach_wait_ms: 20, ..LIMITS });
        let (_events, told) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(sessions.clone().run(told));
        attach(&sessions, plain(1)).await.unwrap().unwrap();
        let refusal = attach(&sessions, preempt(2)).await.unwrap().unwrap_err();
        assert_eq!((refusal.status, refusal.retry_after_ms), (Status::VOLUME_HELD, 1000));
        assert!(refusal.text.contains("volume \"disk0\" has commands at storage that haven't ended within 0.02 s"));
        // When they end at last, the volume is free.
        let (_, first) = end_asked(&sessions, 0).await;
        let (_, second) = end_asked(&sessions, 1).await;
        first.send(Vec::new()).unwrap();
        second.send(Vec::new()).unwrap();
        settle().await;
        attach(&sessions, plain(3)).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn whoever_hangs_up_while_waiting_holds_nothing() {
        let sessions = sessions(LIMITS);
        attach(&sessions, plain(1)).await.unwrap().unwrap();
        let taker = attach(&sessions, preempt(2));
        let (_, first) = end_asked(&sessions, 0).await;
        let (_, second) = end_asked(&sessions, 1).await;
        taker.abort();
        assert!(taker.await.unwrap_err().is_cancelled());
        let next = attach(&sessions, plain(3));
        first.send(Vec::new()).unwrap();
        second.send(Vec::new()).unwrap();
        next.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_reactor_that_dies_without_confirming_leaves_the_volume_held() {
        let sessions = sessions(Limits { attach_wait_ms: 20, ..LIMITS });
        let (events, told) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(sessions.clone().run(told));
        attach(&sessions, plain(1)).await.unwrap().unwrap();
        events.send(Event::CloseAsked { session: SessionId([1; 16]) }).unwrap();
        drop(end_asked(&sessions, 0).await);
        let (_, second) = end_asked(&sessions, 1).await;
        second.send(Vec::new()).unwrap();
        let refusal = attach(&sessions, preempt(2)).await.unwrap().unwrap_err();
        assert_eq!(refusal.status, Status::VOLUME_HELD);
    }

    #[tokio::test]
    async fn a_drain_answers_those_who_wait() {
        let sessions = sessions(LIMITS);
        attach(&sessions, plain(1)).await.unwrap().unwrap();
        let taker = attach(&sessions, preempt(2));
        let _asked = end_asked(&sessions, 0).await;
        sessions.drain();
        assert_eq!(taker.await.unwrap().unwrap_err().status, Status::DRAINING);
    }

    #[tokio::test]
    async fn a_session_ends_when_its_lease_is_over_or_it_asks_to() {
        let sessions = sessions(LIMITS);
        let (events, told) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(sessions.clone().run(told));
        let [lost, closing] = [1, 2].map(|n| SessionId([n; 16]));
        let readers = |n| Attach { mode: AttachMode::READ_ONLY, ..plain(n) };
        for n in [1, 2] {
            sessions.attach("host", &readers(n)).await.unwrap();
        }
        let path = sessions.activate(lost, &Secret([1; 16]), QueueId(0)).unwrap().path();
        events.send(Event::PathLost { session: lost, path, status: Status::TIMEOUT }).unwrap();
        assert_eq!(end_asked(&sessions, 0).await.0, Status::CONNECTION_LOST);
        events.send(Event::CloseAsked { session: closing }).unwrap();
        assert_eq!(end_asked(&sessions, 0).await.0, Status::CLOSED);
    }

    #[tokio::test]
    async fn a_session_outlives_its_last_path_by_its_lease() {
        let sessions = sessions(Limits { lease_ms: 60_000, ..LIMITS });
        let (events, told) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(sessions.clone().run(told));
        let attached = sessions.attach("host", &plain(1)).await.unwrap();
        assert_eq!(attached.attached().lease_ms, 60_000);
        let (session, secret) = (SessionId([1; 16]), Secret([1; 16]));
        let path = sessions.activate(session, &secret, QueueId(0)).unwrap().path();
        events.send(Event::PathLost { session, path, status: Status::TIMEOUT }).unwrap();
        while sessions.state().holdings.deadline_ms().is_none() {
            yield_now().await;
        }
        settle().await;
        assert!(sessions.mailboxes[0].take().is_none(), "it was ended");
        let again = sessions.activate(session, &secret, QueueId(0)).unwrap();
        assert!(Arc::ptr_eq(again.session(), &attached));
    }

    #[tokio::test]
    async fn a_taken_over_session_gets_a_ledger_of_its_own_and_its_old_secret_opens_nothing() {
        let sessions = sessions(LIMITS);
        let old = attach(&sessions, plain(1)).await.unwrap().unwrap();
        let takeover = Attach { next_secret: Secret([9; 16]), ..request(1, AttachFlags::TAKEOVER) };
        let successor = attach(&sessions, takeover);
        for reactor in [0, 1] {
            let (status, done) = end_asked(&sessions, reactor).await;
            assert_eq!(status, Status::TAKEN_OVER);
            done.send(Vec::new()).unwrap();
        }
        let new = successor.await.unwrap().unwrap();
        assert!(!Arc::ptr_eq(&old, &new));
        assert!(!new.ledger.flush_begins().is_clean(), "it has its predecessor's unflushed writes");
        let refused = |secret: u8| sessions.activate(new.id, &Secret([secret; 16]), QueueId(0)).err();
        assert_eq!(refused(1).unwrap().status, Status::PREEMPTED);
        assert_eq!(refused(9), None);
    }

    #[tokio::test]
    async fn a_volume_that_does_not_exist_is_refused_with_those_that_do() {
        let sessions = sessions(LIMITS);
        let text = |volume| {
            let sessions = sessions.clone();
            async move { sessions.attach("h", &Attach { volume, ..plain(1) }).await.unwrap_err().text }
        };
        assert_eq!(text("disk9").await, "there is no volume \"disk9\"; did you mean \"disk0\"?");
        assert_eq!(text("backup").await, "there is no volume \"backup\"; there is \"disk0\", \"disk1\"");
    }

    #[test]
    fn the_queues_of_a_session_are_spread_over_the_reactors() {
        let sessions = sessions(LIMITS);
        let session = SessionId([7; 16]);
        let [first, second] = [0, 1].map(|queue| sessions.reactor_of(session, QueueId(queue)));
        assert_ne!(first, second);
    }
}
