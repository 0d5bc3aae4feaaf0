//! The one owner of all sessions: drives the [`Registry`]'s rules with real time, reactors and tasks.
//!
//! Whatever changes who may act and whatever tells the reactors of it happens under one lock, so that no
//! reactor is given a connection of a session after it was told of the session's end (I2).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::IoSlice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;
use twinrail_fallback_tcp::SendVectored;
use twinrail_protocol::wire::{Attach, AttachMode, Control, ControlKind, Frame};
use twinrail_protocol::{Epoch, QueueId, Secret, SessionId, Status};

use super::refusal::Refusal;
use super::registry::{Attaching, Limits, Registry};
use crate::metrics::Metrics;
use crate::reactor::mailbox::{Activation, Mailbox, Message};
use crate::reactor::{Event, Parting};
use crate::session::Session;
use crate::volume::Volume;

/// All sessions.
#[derive(Debug)]
pub struct Sessions {
    registry: Mutex<Registry>,
    mailboxes: Arc<[Arc<Mailbox>]>,
    metrics: Arc<Metrics>,
    /// A session has ended.
    ended: Notify,
    /// A deadline may be nearer than before.
    deadlines: Notify,
    /// How long an attach waits for sessions that end.
    attach_wait: Duration,
    begun: Instant,
}

impl Sessions {
    /// No sessions, on these reactors.
    #[must_use]
    pub fn new(
        volumes: &[Arc<Volume>],
        mailboxes: Arc<[Arc<Mailbox>]>,
        metrics: Arc<Metrics>,
        limits: Limits,
        attach_wait: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            registry: Mutex::new(Registry::new(volumes, limits)),
            mailboxes,
            metrics,
            ended: Notify::new(),
            deadlines: Notify::new(),
            attach_wait,
            begun: Instant::now(),
        })
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // A panic under the lock ends the process in a release build; in tests the state is still whole.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// From now on nothing new is accepted.
    pub fn drain(&self) {
        self.registry().drain();
        // Attaches that wait for the end of a session are answered.
        self.ended.notify_waiters();
    }

    /// Attaches a session, after ending those that are in the way if that was asked for.
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub async fn attach(self: &Arc<Self>, initiator: &str, attach: &Attach<'_>) -> Result<Arc<Session>, Refusal> {
        timeout(self.attach_wait, self.attach_when_free(initiator, attach)).await.unwrap_or_else(|_| {
            let text = format!(
                "an older session of volume {:?} has commands at storage that haven't ended within {} s; see that the \
                 storage works, then try again",
                attach.volume,
                self.attach_wait.as_secs_f32()
            );
            Err(Refusal::new(Status::VOLUME_HELD, text).retry_after_ms(1000))
        })
    }

    async fn attach_when_free(self: &Arc<Self>, initiator: &str, attach: &Attach<'_>) -> Result<Arc<Session>, Refusal> {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // Before looking, so that an end in between isn't missed.
            ended.as_mut().enable();
            let answer = self.registry().attach(initiator, attach, self.now_ms())?;
            match answer {
                Attaching::Done(session) => {
                    self.deadlines.notify_one();
                    self.count();
                    return Ok(session);
                }
                Attaching::Wait(in_the_way) => {
                    for session in in_the_way {
                        self.end(session, Status::PREEMPTED);
                    }
                }
            }
            ended.await;
        }
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
    pub fn activate(
        &self,
        session: SessionId,
        secret: &Secret,
        queue: QueueId,
        epoch: Epoch,
    ) -> Result<Permit<'_>, Refusal> {
        let mut registry = self.registry();
        let session = registry.activate(session, secret, queue, epoch)?;
        let mailbox = &self.mailboxes[self.reactor_of(session.id, queue)];
        Ok(Permit { session, mailbox, _registry: registry })
    }

    /// A reactor refused a connection.
    pub fn path_failed(&self, session: SessionId, queue: QueueId, epoch: Epoch) {
        self.registry().path_failed(session, queue, epoch, self.now_ms());
        self.deadlines.notify_one();
    }

    /// Ends a session, if it isn't ending already: all reactors are told, and when all have confirmed, whoever
    /// waits for the volume may have it.
    pub fn end(self: &Arc<Self>, id: SessionId, status: Status) {
        let mut registry = self.registry();
        let Some(session) = registry.begin_end(id) else { return };
        let confirmations: Vec<_> = self
            .mailboxes
            .iter()
            .map(|mailbox| {
                let (done, confirmed) = oneshot::channel();
                mailbox.send(Message::EndSession { session: id, status, done });
                confirmed
            })
            .collect();
        drop(registry);
        let this = self.clone();
        tokio::spawn(async move {
            let mut partings = Vec::new();
            for confirmed in confirmations {
                match confirmed.await {
                    Ok(some) => partings.extend(some),
                    // Nobody knows what it still does: the volume stays held (I2).
                    Err(_) => return tracing::error!(session = %id, "a reactor didn't confirm the end of a session"),
                }
            }
            this.registry().ended(id);
            this.count();
            this.ended.notify_waiters();
            let Session { initiator, mode, volume, .. } = &*session;
            tracing::info!(session = %id, initiator, volume = volume.name, mode = mode.name(), reason = %status, "session ended");
            partings.iter().for_each(say_closed);
        });
    }

    /// Acts on what reactors tell and on deadlines, for ever.
    pub async fn run(self: Arc<Self>, mut events: UnboundedReceiver<Event>) {
        loop {
            let overdue = self.registry().overdue(self.now_ms());
            for session in overdue {
                self.end(session, Status::CONNECTION_LOST);
            }
            let deadline_ms = self.registry().next_deadline_ms();
            let rest = Duration::from_millis(deadline_ms.map_or(3_600_000, |at| at.saturating_sub(self.now_ms())));
            tokio::select! {
                event = events.recv() => match event {
                    Some(Event::PathLost { session, queue, epoch, .. }) => {
                        self.registry().path_lost(session, queue, epoch, self.now_ms());
                    }
                    Some(Event::CloseAsked { session }) => self.end(session, Status::CLOSED),
                    // All reactors have ended.
                    None => return,
                },
                () = self.deadlines.notified() => {}
                () = tokio::time::sleep(rest) => {}
            }
        }
    }

    /// Sets the gauges.
    fn count(&self) {
        let registry = self.registry();
        for mode in [AttachMode::EXCLUSIVE, AttachMode::SHARED, AttachMode::READ_ONLY] {
            self.metrics.sessions(mode.name()).set(registry.count(mode) as i64);
        }
    }
}

/// Leave to give a connection to a reactor. Nobody can end the session meanwhile.
#[must_use = "the registry counts the path as coming"]
#[derive(Debug)]
pub struct Permit<'a> {
    session: Arc<Session>,
    mailbox: &'a Mailbox,
    _registry: MutexGuard<'a, Registry>,
}

impl Permit<'_> {
    /// The session.
    #[must_use]
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Gives the connection to the reactor.
    pub fn send(self, activation: Activation) {
        self.mailbox.send(Message::Activate(Box::new(activation)));
    }
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

    /// Sessions on two reactors, which the tests play.
    fn sessions(attach_wait: Duration) -> Arc<Sessions> {
        let spec = VolumeSpec::parse("disk0=memory,size=1M").unwrap();
        let volume = Arc::new(Volume::open(VolumeIndex(0), &spec, &|| false).unwrap());
        let mailboxes = Arc::from(vec![Mailbox::new().unwrap(), Mailbox::new().unwrap()]);
        let limits = Limits { max_sessions: 8, max_queues: 4, max_paths: 16, grace_ms: 60_000, lease_ms: 0 };
        Sessions::new(&[volume], mailboxes, Metrics::new().unwrap(), limits, attach_wait)
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
        n: u8,
        flags: AttachFlags,
    ) -> tokio::task::JoinHandle<Result<Arc<Session>, Refusal>> {
        let sessions = sessions.clone();
        tokio::spawn(async move { sessions.attach("host", &request(n, flags)).await })
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
        let sessions = sessions(Duration::from_secs(60));
        attach(&sessions, 1, AttachFlags::default()).await.unwrap().unwrap();
        let taker = attach(&sessions, 2, AttachFlags::PREEMPT);
        let (status, first) = end_asked(&sessions, 0).await;
        assert_eq!(status, Status::PREEMPTED);
        let (_, second) = end_asked(&sessions, 1).await;
        first.send(Vec::new()).unwrap();
        settle().await;
        assert!(!taker.is_finished(), "reactor 1 may still write");
        // Nobody else gets in before.
        let third = attach(&sessions, 3, AttachFlags::default());
        settle().await;
        assert!(!third.is_finished());
        second.send(Vec::new()).unwrap();
        let taken = [taker.await.unwrap(), third.await.unwrap()];
        assert_eq!(taken.iter().filter(|t| t.is_ok()).count(), 1);
        assert!(taken.iter().any(|t| t.as_ref().is_err_and(|r| r.status == Status::VOLUME_HELD)));
    }

    #[tokio::test]
    async fn an_attach_does_not_wait_for_ever_for_commands_that_hang() {
        let sessions = sessions(Duration::from_millis(20));
        attach(&sessions, 1, AttachFlags::default()).await.unwrap().unwrap();
        let refusal = attach(&sessions, 2, AttachFlags::PREEMPT).await.unwrap().unwrap_err();
        assert_eq!((refusal.status, refusal.retry_after_ms), (Status::VOLUME_HELD, 1000));
        assert!(refusal.text.contains("haven't ended within 0.02 s"), "{refusal}");
        // When they end at last, the volume is free.
        let (_, first) = end_asked(&sessions, 0).await;
        let (_, second) = end_asked(&sessions, 1).await;
        first.send(Vec::new()).unwrap();
        second.send(Vec::new()).unwrap();
        settle().await;
        attach(&sessions, 2, AttachFlags::default()).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_reactor_that_dies_without_confirming_leaves_the_volume_held() {
        let sessions = sessions(Duration::from_millis(20));
        attach(&sessions, 1, AttachFlags::default()).await.unwrap().unwrap();
        sessions.end(SessionId([1; 16]), Status::CLOSED);
        drop(end_asked(&sessions, 0).await);
        let (_, second) = end_asked(&sessions, 1).await;
        second.send(Vec::new()).unwrap();
        let refusal = attach(&sessions, 2, AttachFlags::PREEMPT).await.unwrap().unwrap_err();
        assert_eq!(refusal.status, Status::VOLUME_HELD);
    }

    #[tokio::test]
    async fn a_drain_answers_those_who_wait() {
        let sessions = sessions(Duration::from_secs(60));
        attach(&sessions, 1, AttachFlags::default()).await.unwrap().unwrap();
        let taker = attach(&sessions, 2, AttachFlags::PREEMPT);
        let _asked = end_asked(&sessions, 0).await;
        sessions.drain();
        assert_eq!(taker.await.unwrap().unwrap_err().status, Status::DRAINING);
    }

    #[tokio::test]
    async fn a_session_ends_when_its_last_path_is_lost_or_it_asks_to() {
        let sessions = sessions(Duration::from_secs(60));
        let (events, told) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(sessions.clone().run(told));
        let [lost, closing] = [1, 2].map(|n| SessionId([n; 16]));
        let readers = |n| Attach { mode: AttachMode::READ_ONLY, ..request(n, AttachFlags::default()) };
        for n in [1, 2] {
            sessions.attach("host", &readers(n)).await.unwrap();
        }
        let (queue, epoch) = (QueueId(0), Epoch(1));
        drop(sessions.activate(lost, &Secret([1; 16]), queue, epoch).unwrap());
        events.send(Event::PathLost { session: lost, queue, epoch, status: Status::TIMEOUT }).unwrap();
        assert_eq!(end_asked(&sessions, 0).await.0, Status::CONNECTION_LOST);
        events.send(Event::CloseAsked { session: closing }).unwrap();
        assert_eq!(end_asked(&sessions, 0).await.0, Status::CLOSED);
    }

    #[test]
    fn the_queues_of_a_session_are_spread_over_the_reactors() {
        let sessions = sessions(Duration::ZERO);
        let session = SessionId([7; 16]);
        let [first, second] = [0, 1].map(|queue| sessions.reactor_of(session, QueueId(queue)));
        assert_ne!(first, second);
    }
}
