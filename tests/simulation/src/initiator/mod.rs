//! An initiator's process and the caller in it. What may happen is decided by the core: a
//! [`twinrail_protocol::initiator::Session`], and for each queue a [`Queue`] and a [`Rails`].
//!
//! - here: its life and its turn;
//! - `session`: attach, loss, giving up, closing;
//! - `paths`: what the path policy wants done;
//! - `data`: commands and replies;
//! - `caller`: who wants something of the volume.

mod caller;
mod data;
mod paths;
mod session;

use std::collections::VecDeque;

use twinrail_protocol::initiator::rails::Rails;
use twinrail_protocol::initiator::replay::Rules;
use twinrail_protocol::initiator::session::{Predecessor, Settings};
use twinrail_protocol::initiator::{Durability, Operation, Queue, Session};
use twinrail_protocol::wire::Reply;
use twinrail_protocol::{Instance, Secret, Status, VolumeId};

use crate::clock::Time;
use crate::ground::{Event, Ground, Notice, Process};
use crate::history::{Client, SecretNumber, What};
use crate::memory::Lent;
use crate::rails::ConnectionId;
use crate::random::Random;
use crate::{names, note};
use caller::Caller;
pub use caller::Wish;
use paths::Path;

/// A queue.
#[derive(Debug)]
struct Lane {
    rails: Rails,
    queue: Option<Queue>,
    /// Connections, the one that serves included.
    paths: Vec<Path>,
    /// Commands of a lost slot table, to be submitted again before all others.
    replays: VecDeque<Operation>,
    /// Commands of the caller that wait for a slot.
    held: VecDeque<u32>,
    /// Commands that ended while a device still has their buffer.
    finishing: Vec<data::Finishing>,
    /// The session was attached again, and this queue hasn't heard of it.
    unheard: Option<Rules>,
    /// A shrink that was announced by this event waits to be acknowledged.
    credit_event: Option<u64>,
    /// Replies that are looked at only when the next path serves, and their slot table.
    late: Vec<(Instance, Reply)>,
}

/// What a front end keeps on its own disk for its successor.
#[derive(Clone, Debug)]
pub struct FrontEndFile {
    /// Number of the session's id.
    session: u32,
    /// The last one that is known to have been the session's, and those minted since: each was stored here before
    /// anybody saw it, and whether the target took it nobody here knows.
    secrets: Vec<SecretNumber>,
    generation: u64,
    volume: VolumeId,
    ground: twinrail_protocol::initiator::Ground,
    client: Client,
    /// The session was attached.
    attached: bool,
}

/// How the session stands, beyond what the core knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It works, or tries to.
    Open,
    /// Nothing is out any more, and CLOSE was sent or will be.
    Closing { asked: bool },
    /// It is over: when every path is drained, all commands end with this status.
    GivingUp(Status),
    /// Closed, or given up.
    Done,
}

/// An initiator.
#[derive(Debug)]
pub struct Initiator {
    /// Number of its process.
    pub number: u8,
    /// Which of the plan's it is.
    pub planned: u8,
    /// The handle of its caller.
    pub client: Client,
    /// There is a process.
    pub running: bool,
    session: Session,
    session_number: u32,
    /// As in its file: the last one is its own.
    secrets: Vec<SecretNumber>,
    /// A takeover: which of them may be the session's, the likeliest last, and what goes with it.
    untried: Vec<SecretNumber>,
    takeover: Option<(Predecessor, Settings)>,
    volume: VolumeId,
    durability: Durability,
    state: State,
    /// The volume is attached again when this comes.
    attach_not_before: Time,
    lanes: Vec<Lane>,
    /// The lane whose turn it is to return to RDMA, and those that wait.
    returning: Option<usize>,
    wants_return: VecDeque<usize>,
    caller: Caller,
    limbo: Vec<Lent>,
    timer_at: Option<Time>,
    /// What comes out of this connection, which broke, is looked at only when the next one serves.
    looks_later: Option<ConnectionId>,
    /// Its next report tells of another command than the original, as if the caller had changed it meanwhile.
    pub alters_report: bool,
    /// Its next activation names another slot table.
    pub alters_instance: bool,
    /// The history knows that the caller is gone.
    told_closed: bool,
    random: Random,
}

impl Initiator {
    /// A front end that begins a session of its own.
    #[must_use]
    pub fn new(ground: &mut Ground, number: u8, planned: u8) -> Self {
        let plan = ground.plan.initiators[usize::from(planned)];
        let client = ground.counters.client();
        let session_number = client.0 + 1;
        let secret = ground.counters.secret();
        let settings = Settings {
            mode: names::attach_mode(plan.mode),
            preempt: plan.preempts,
            fail_fast: plan.fail_fast.is_some(),
            ..Settings::default()
        };
        let session = Session::new(names::session_id(session_number), names::secret(secret), settings);
        let durability = Durability::new(ground.plan.write_through);
        ground.record(What::Opened { client, inherits: None });
        Self::with(ground, number, planned, client, session_number, vec![secret], session, durability)
    }

    /// One that takes the place of a session whose front end is gone, or is thought to be.
    #[must_use]
    pub fn successor(ground: &mut Ground, number: u8, planned: u8, file: &mut FrontEndFile) -> Self {
        if !file.attached {
            return Self::new(ground, number, planned);
        }
        let plan = ground.plan.initiators[usize::from(planned)];
        let inherits = Some(file.client);
        let client = ground.counters.client();
        let mut untried = file.secrets.clone();
        let next = ground.counters.secret();
        // Stored before it is shown to anybody.
        file.secrets.push(next);
        file.client = client;
        let (mode, expected_volume) = (names::attach_mode(plan.mode), file.volume);
        let settings = Settings { mode, expected_volume, ..Settings::default() };
        let predecessor =
            Predecessor { next_secret: names::secret(next), generation: file.generation, ground: file.ground };
        let id = names::session_id(file.session);
        let likely = untried.pop().unwrap_or_default();
        let session = Session::take_over(id, names::secret(likely), predecessor, settings);
        let durability = Durability::taken_over(ground.plan.write_through);
        ground.record(What::Opened { client, inherits });
        note!(ground, Process::Initiator(number), "client {} takes over from client {:?}", client.0, inherits);
        let secrets = file.secrets.clone();
        let this = Self::with(ground, number, planned, client, file.session, secrets, session, durability);
        Self { volume: file.volume, untried, takeover: Some((predecessor, settings)), ..this }
    }

    /// The target doesn't know the secret that was shown: an earlier successor's takeover wasn't decided. So it may
    /// be an older one.
    fn try_older_secret(&mut self) -> bool {
        let (Some(older), Some((predecessor, settings))) = (self.untried.pop(), self.takeover) else { return false };
        self.session = Session::take_over(self.session.id(), names::secret(older), predecessor, settings);
        true
    }

    #[expect(clippy::too_many_arguments, reason = "both ways to begin come together here")]
    fn with(
        ground: &mut Ground,
        number: u8,
        planned: u8,
        client: Client,
        session_number: u32,
        secrets: Vec<SecretNumber>,
        session: Session,
        durability: Durability,
    ) -> Self {
        let random = Random::new(ground.plan.seed, crate::plan::concern::WORK + u64::from(number));
        let mut this = Self {
            number,
            planned,
            client,
            running: true,
            session,
            session_number,
            secrets,
            untried: Vec::new(),
            takeover: None,
            volume: VolumeId::NIL,
            durability,
            state: State::Open,
            attach_not_before: 0,
            lanes: Vec::new(),
            returning: None,
            wants_return: VecDeque::new(),
            caller: Caller::default(),
            limbo: Vec::new(),
            timer_at: None,
            looks_later: None,
            alters_report: false,
            alters_instance: false,
            told_closed: false,
            random,
        };
        this.add_lane(ground);
        ground.tell(this.process(), Notice::Timer);
        this
    }

    fn process(&self) -> Process {
        Process::Initiator(self.number)
    }

    /// What its successor finds.
    #[must_use]
    pub fn file(&self) -> FrontEndFile {
        FrontEndFile {
            session: self.session_number,
            secrets: self.secrets.clone(),
            generation: self.session.generation(),
            volume: self.volume,
            ground: self.session.ground(),
            client: self.client,
            attached: self.session.generation() > 0,
        }
    }

    /// Whether it has ended, and nothing of it is left.
    #[must_use]
    pub fn is_done(&self) -> bool {
        !self.running || self.state == State::Done
    }

    /// The process is gone.
    pub fn crash(&mut self, ground: &mut Ground) {
        if !self.running {
            return;
        }
        self.running = false;
        note!(ground, self.process(), "dies");
        self.record_closed(ground);
        self.state = State::Done;
        self.lanes.clear();
        ground.forget(self.process(), true);
    }

    /// The process takes its turn.
    pub fn turn(&mut self, ground: &mut Ground, notices: &mut Vec<Notice>) {
        loop {
            std::mem::swap(notices, &mut ground.notices[self.process().index()]);
            if notices.is_empty() || !self.running {
                notices.clear();
                break;
            }
            let mut ready = false;
            for notice in notices.drain(..) {
                match notice {
                    Notice::Dialed(id) => self.dialed(ground, id),
                    Notice::DialFailed(id) => self.dial_failed(ground, id),
                    Notice::Ready(id) => {
                        ready = true;
                        self.mark_ready(id);
                    }
                    // What had arrived before counts; now and then a reply is looked at too late.
                    Notice::Broken(id) => {
                        self.mark_ready(id);
                        let later = ground.rail_random.chance(600);
                        self.looks_later = later.then_some(id);
                        self.serve_ready(ground);
                        self.looks_later = None;
                        self.broken(ground, id);
                    }
                    Notice::Drained(id) => self.drained(ground, id),
                    Notice::Work => self.caller.planned = false,
                    Notice::Timer | Notice::Asked(_) | Notice::Disk { .. } | Notice::RecordStored(_) => {}
                }
            }
            if ready {
                self.serve_ready(ground);
            }
            self.go_on(ground);
        }
        self.plan_timer(ground);
    }

    /// Everything that follows from what came.
    fn go_on(&mut self, ground: &mut Ground) {
        if self.state == State::Done {
            return;
        }
        if let Some(next) = self.session.tick(ground.now()) {
            self.follow(ground, next);
        }
        self.work(ground);
        for at in 0..self.lanes.len() {
            self.submit_held(ground, at);
            self.pump(ground, at);
        }
        let now = ground.now();
        for at in 0..self.lanes.len() {
            if let Some(lane) = self.lanes.get_mut(at) {
                lane.rails.judge(now);
            }
            self.act(ground, at);
        }
        self.send_attach(ground);
        self.close_when_done(ground);
        self.give_up_when_drained(ground);
    }

    /// Whether the timer that comes now is the one that is waited for.
    pub fn timer_is_due(&mut self, now: Time) -> bool {
        self.timer_at.take_if(|at| *at <= now).is_some() && self.running
    }

    fn plan_timer(&mut self, ground: &mut Ground) {
        if matches!(self.state, State::Done) || !self.running {
            return;
        }
        let mut next = self.session.deadline_us().unwrap_or(u64::MAX);
        if !matches!(self.state, State::GivingUp(_)) {
            for lane in &self.lanes {
                next = next.min(lane.rails.deadline_us());
            }
        }
        if !self.session.is_attached() && self.attach_not_before > ground.now() {
            next = next.min(self.attach_not_before);
        }
        if next == u64::MAX {
            return;
        }
        let at = next.max(ground.now() + 1);
        if self.timer_at.is_none_or(|planned| at < planned) {
            self.timer_at = Some(at);
            ground.clock.at(at, Event::Timer { process: self.process() });
        }
    }

    // ---- buffers

    fn release(&mut self, ground: &mut Ground, lent: Lent) {
        match self.is_pinned(lent) {
            true => self.limbo.push(lent),
            false => ground.give_back(lent),
        }
    }

    /// Whether a device may still touch a buffer.
    fn is_pinned(&self, lent: Lent) -> bool {
        self.lanes.iter().flat_map(|lane| &lane.paths).any(|path| path.channel.pins(lent))
    }

    /// What the session shows.
    #[must_use]
    pub fn secret(&self) -> Secret {
        self.session.secret()
    }
}
