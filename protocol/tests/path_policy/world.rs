//! A queue's path policy, a peer with one reactor, and two rails between them.
//!
//! Coarse but fair: a rail keeps the order of its frames, the peer's reactor takes them in turn and not while
//! it stalls, a completion of RDMA needs the peer's hardware and not its reactor, answers may stand behind
//! data. The driver does what the policy asks for and checks that it never asks for what it must not.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use twinrail_protocol::Epoch;
use twinrail_protocol::initiator::rails::{Action, Cause, PathId, Rails, Settings};
use twinrail_protocol::wire::Rail;

pub(crate) const MS: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000_000;
/// The hardware gives up: seven attempts of 67 ms.
pub(crate) const HARDWARE_US: u64 = 7 * 67_109;

/// What reaches the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    /// To a probe of the path as it was then: a standby, or active.
    Answer {
        token: u64,
        active: bool,
    },
    /// (Reaches nobody: the peer's storage has ended a command.)
    Stored {
        in_flight: bool,
    },
    Completed,
    Progress {
        in_flight: bool,
    },
    Dialed,
    DialFailed,
    Fenced,
    Activated,
    Refused,
    Lost,
    /// The hardware gives up what it has repeated for so long, if it still doesn't pass.
    Expired,
}

/// One rail.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Frames to the target, and back, don't pass.
    pub(crate) out_cut: bool,
    pub(crate) back_cut: bool,
    pub(crate) latency_us: u64,
    /// Each frame takes up to this much longer.
    pub(crate) jitter_us: u64,
    /// One frame in this many takes up to `spike_us` longer; 0 for none.
    pub(crate) spike_one_in: u64,
    pub(crate) spike_us: u64,
    /// Answers that are sent now stand behind data until then.
    pub(crate) data_until_us: u64,
    /// The target refuses to activate paths of this rail.
    pub(crate) refuses: bool,
    /// The last arrival, since frames don't overtake each other.
    last_us: u64,
}

impl Line {
    fn passes(&self) -> bool {
        !self.out_cut && !self.back_cut
    }

    pub(crate) fn cut(&mut self) {
        (self.out_cut, self.back_cut) = (true, true);
    }
}

/// What happened so far.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) events: u64,
    pub(crate) probes: u64,
    /// Of them on the path that served.
    pub(crate) probes_serving: u64,
    pub(crate) dials: u64,
}

pub(crate) struct World {
    pub(crate) rails: Rails,
    pub(crate) now_us: u64,
    pub(crate) tcp: Line,
    pub(crate) rdma: Line,
    /// The peer's reactor does nothing from, until.
    pub(crate) peer_stall_us: (u64, u64),
    /// The initiator does nothing until then.
    pub(crate) asleep_until_us: u64,
    pub(crate) fence_us: u64,
    /// Turns are given at once.
    pub(crate) gives_turns: bool,
    /// Commands make progress each time this long after the last; nothing for no such load.
    pub(crate) load_us: Option<u64>,
    /// The hardware reports cut queue pairs.
    pub(crate) hardware: bool,
    /// Nothing comes on this path any more, though its rail works.
    pub(crate) deaf: Option<PathId>,
    /// The target takes no new connections on this rail.
    pub(crate) refuses_dials: Option<Rail>,
    /// The answers to so many activations get lost.
    pub(crate) loses_activations: u32,
    /// Everything that was asked for but probes.
    pub(crate) log: Vec<(u64, Action)>,
    pub(crate) counts: Counts,
    news: BinaryHeap<Reverse<(u64, u64, u32, News)>>,
    /// What doesn't pass, for it will be repeated.
    held: Vec<(u32, News)>,
    /// Paths that are open, by number, and the epoch they were activated with.
    open: BTreeMap<u32, (PathId, Option<Epoch>)>,
    /// The path that was activated and isn't fenced yet.
    active: Option<PathId>,
    epoch: Epoch,
    serial: u64,
    random: u64,
    inbox: Vec<(bool, u64, u32, News)>,
}

impl World {
    pub(crate) fn new(settings: Settings, seed: u64) -> Self {
        let line = || Line { latency_us: 20, jitter_us: 30, ..Line::default() };
        let rdma = Line { latency_us: 5, jitter_us: 10, ..Line::default() };
        Self {
            rails: Rails::new(settings, seed, 0),
            now_us: 0,
            tcp: line(),
            rdma,
            peer_stall_us: (0, 0),
            asleep_until_us: 0,
            fence_us: 100,
            gives_turns: true,
            load_us: None,
            hardware: false,
            deaf: None,
            refuses_dials: None,
            loses_activations: 0,
            log: Vec::new(),
            counts: Counts::default(),
            news: BinaryHeap::new(),
            held: Vec::new(),
            open: BTreeMap::new(),
            active: None,
            epoch: Epoch(0),
            serial: 0,
            random: seed ^ 0x5eed,
            inbox: Vec::new(),
        }
    }

    /// With RDMA serving, TCP standing by, and everything quiet since.
    pub(crate) fn on_rdma(settings: Settings, seed: u64) -> Self {
        let mut world = Self::new(settings, seed);
        world.run_until(SECOND);
        world.rails.offer(Rail::RDMA, true, SECOND);
        world.run_until(3 * SECOND);
        assert_eq!(world.serving(), Some(Rail::RDMA), "{:?}", world.log);
        assert!(world.rails.standby(Rail::TCP).is_some());
        world.log.clear();
        world
    }

    /// With commands that make progress each millisecond from now on.
    pub(crate) fn load(&mut self) {
        self.load_us = Some(MS);
        self.submit(MS, true);
    }

    /// Commands go out; the path that serves makes progress after this long, unless it is cut.
    pub(crate) fn submit(&mut self, after_us: u64, in_flight: bool) {
        self.rails.submitted(self.now_us);
        if let Some(path) = self.active {
            self.later(path.number, after_us, News::Stored { in_flight });
        }
    }

    pub(crate) fn random(&mut self, most: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % (most + 1)
    }

    pub(crate) fn serving(&self) -> Option<Rail> {
        self.rails.serving().map(|path| path.rail)
    }

    /// The switches so far: when, to where, why, and how long the blackout was.
    pub(crate) fn switches(&self) -> Vec<(u64, Rail, Cause, u64)> {
        let switch = |&(at, action): &(u64, Action)| match action {
            Action::Serving { to, cause, blackout_us, .. } => Some((at, to, cause, blackout_us)),
            _ => None,
        };
        self.log.iter().filter_map(switch).collect()
    }

    pub(crate) fn did(&self, wanted: impl Fn(&Action) -> bool) -> Option<u64> {
        self.log.iter().find(|(_, action)| wanted(action)).map(|(at, _)| *at)
    }

    pub(crate) fn line(&mut self, rail: Rail) -> &mut Line {
        if rail == Rail::RDMA { &mut self.rdma } else { &mut self.tcp }
    }

    /// Nothing passes on this rail any more.
    pub(crate) fn cut(&mut self, rail: Rail) {
        self.line(rail).cut();
    }

    /// Everything passes again, and what was held comes when it is repeated.
    pub(crate) fn heal(&mut self, rail: Rail) {
        let line = self.line(rail);
        (line.out_cut, line.back_cut) = (false, false);
        let repeat_us = 1 + self.random(if rail == Rail::TCP { 200 * MS } else { HARDWARE_US / 7 });
        for (number, news) in std::mem::take(&mut self.held) {
            match self.open.get(&number) {
                Some((path, _)) if path.rail == rail => self.later(number, repeat_us, news),
                Some(_) => self.held.push((number, news)),
                None => {}
            }
        }
    }

    /// The target lost its slot tables; a new attach begins.
    pub(crate) fn session_lost(&mut self) {
        self.epoch = Epoch(0);
        self.rails.session_lost(self.now_us);
    }

    /// Tells the driver that a path ended.
    pub(crate) fn lose(&mut self, path: PathId, after_us: u64) {
        self.later(path.number, after_us, News::Lost);
    }

    pub(crate) fn run_until(&mut self, end_us: u64) {
        loop {
            let next_us = self.news.peek().map_or(u64::MAX, |Reverse((at, ..))| *at).min(self.rails.deadline_us());
            let next_us = next_us.max(self.now_us).max(self.asleep_until_us);
            if next_us > end_us {
                self.now_us = self.now_us.max(end_us);
                return;
            }
            self.now_us = next_us;
            self.turn();
        }
    }

    pub(crate) fn run_for(&mut self, time_us: u64) {
        self.run_until(self.now_us + time_us);
    }

    /// One turn of the driver's loop: standbys first, then the path that serves, then the verdict.
    fn turn(&mut self) {
        let mut inbox = std::mem::take(&mut self.inbox);
        let serving = self.rails.serving().map(|path| path.number);
        while let Some(Reverse((at, serial, number, news))) = self.news.peek().copied() {
            if at > self.now_us {
                break;
            }
            self.news.pop();
            inbox.push((serving == Some(number), serial, number, news));
        }
        inbox.sort_unstable();
        for &(_, _, number, news) in &inbox {
            self.counts.events += 1;
            self.hear(number, news);
        }
        inbox.clear();
        self.inbox = inbox;
        self.rails.judge(self.now_us);
        let mut asked = 0;
        while let Some(action) = self.rails.poll(self.now_us) {
            asked += 1;
            assert!(asked < 50, "no end of {action:?}");
            self.act(action);
        }
        let deadline_us = self.rails.deadline_us();
        assert!(deadline_us > self.now_us, "deadline {deadline_us} at {} with nothing to do", self.now_us);
    }

    fn hear(&mut self, number: u32, news: News) {
        let Some(&(path, epoch)) = self.open.get(&number) else { return };
        let now_us = self.now_us;
        match news {
            // Made by the driver itself.
            News::Fenced => {
                assert_eq!(self.active, Some(path));
                self.active = None;
                self.open.remove(&number);
                return self.rails.fenced(path, now_us);
            }
            News::DialFailed => {
                self.open.remove(&number);
                return self.rails.dial_failed(path, 0, now_us);
            }
            News::Stored { in_flight } => return self.answer_later(path, 0, News::Progress { in_flight }),
            News::Expired if self.line(path.rail).passes() => return,
            News::Lost | News::Expired => {
                if epoch.is_none() {
                    self.open.remove(&number);
                }
                return self.rails.lost(path, Cause::FailedCompletion, now_us);
            }
            _ if !self.line(path.rail).passes() => {
                self.held.push((number, news));
                if path.rail == Rail::RDMA && self.hardware {
                    self.later(number, HARDWARE_US, News::Expired);
                }
                return;
            }
            _ if self.deaf == Some(path) => return,
            News::Activated if self.loses_activations > 0 => {
                self.loses_activations -= 1;
                return;
            }
            _ => {}
        }
        match news {
            // Void since the activation.
            News::Answer { active, .. } if active != epoch.is_some() => {}
            News::Answer { token, .. } => self.rails.probe_answered(path, token, now_us),
            News::Completed => self.rails.send_completed(path),
            News::Progress { in_flight } => {
                self.rails.progress(path, in_flight, now_us);
                self.rails.completed(now_us);
                if let Some(load_us) = self.load_us.filter(|_| self.active == Some(path)) {
                    self.later(number, load_us, News::Stored { in_flight: true });
                }
            }
            News::Dialed => self.rails.dialed(path, self.epoch, now_us),
            News::Refused => self.rails.activation_failed(path, now_us),
            News::Activated => {
                self.rails.activated(path, now_us);
                if let Some(load_us) = self.load_us {
                    self.submit(load_us, true);
                }
            }
            News::Stored { .. } | News::Fenced | News::DialFailed | News::Lost | News::Expired => {}
        }
    }

    fn act(&mut self, action: Action) {
        if !matches!(action, Action::Probe { .. }) {
            self.log.push((self.now_us, action));
        }
        match action {
            Action::Dial { path } => {
                self.counts.dials += 1;
                assert!(self.open.insert(path.number, (path, None)).is_none(), "{path:?} is not new");
                assert!(self.open.len() <= 5, "too many paths: {:?}", self.open);
                if self.refuses_dials == Some(path.rail) {
                    self.later(path.number, 100, News::DialFailed);
                } else if self.line(path.rail).passes() {
                    self.answer_later(path, 200, News::Dialed);
                } else {
                    self.later(path.number, SECOND, News::DialFailed);
                }
            }
            Action::Probe { path, token } => {
                self.counts.probes += 1;
                self.counts.probes_serving += u64::from(self.rails.serving() == Some(path));
                assert!(self.open.contains_key(&path.number), "a probe on {path:?}, which isn't open");
                let active = self.active == Some(path);
                self.answer_later(path, 0, News::Answer { token, active });
                if path.rail == Rail::RDMA {
                    let trip_us = self.trip_us(Rail::RDMA) + self.trip_us(Rail::RDMA);
                    self.later(path.number, trip_us, News::Completed);
                }
            }
            Action::Fence { path, .. } => {
                assert_eq!(self.active, Some(path), "a fence of what isn't active");
                self.later(path.number, self.fence_us, News::Fenced);
            }
            Action::Activate { path, epoch } => {
                assert_eq!(self.active, None, "{path:?} activated before the old path was fenced");
                assert!(epoch > self.epoch, "epoch {epoch} after {}", self.epoch);
                let entry = self.open.get_mut(&path.number).unwrap_or_else(|| panic!("{path:?} isn't open"));
                assert_eq!(entry.1.replace(epoch), None, "{path:?} is activated twice");
                (self.active, self.epoch) = (Some(path), epoch);
                let news = if self.line(path.rail).refuses { News::Refused } else { News::Activated };
                self.answer_later(path, self.fence_us, news);
            }
            Action::Say { path, .. } => {
                assert!(
                    self.open.get(&path.number).is_some_and(|(_, epoch)| epoch.is_none()),
                    "{path:?} is no standby"
                );
            }
            Action::Close { path } => {
                assert_ne!(self.active, Some(path), "closed without a fence");
                self.open.remove(&path.number);
            }
            Action::AskTurn if self.gives_turns => self.rails.turn_given(self.now_us),
            _ => {}
        }
    }

    fn trip_us(&mut self, rail: Rail) -> u64 {
        let Line { latency_us, jitter_us, spike_one_in, spike_us, .. } = *self.line(rail);
        let spike = spike_one_in > 0 && self.random(spike_one_in - 1) == 0;
        latency_us + self.random(jitter_us) + if spike { self.random(spike_us) } else { 0 }
    }

    /// The peer's reactor gets a frame, works on it for this long, and answers on the same path.
    fn answer_later(&mut self, path: PathId, work_us: u64, news: News) {
        let arrives_us = self.now_us + self.trip_us(path.rail) + work_us;
        let (stall_us, awake_us) = self.peer_stall_us;
        let answers_us = if (stall_us..awake_us).contains(&arrives_us) { awake_us } else { arrives_us };
        let back_us = self.trip_us(path.rail);
        let line = self.line(path.rail);
        let at_us = (answers_us.max(line.data_until_us) + back_us).max(line.last_us);
        line.last_us = at_us;
        self.later(path.number, at_us - self.now_us, news);
    }

    fn later(&mut self, number: u32, after_us: u64, news: News) {
        self.serial += 1;
        self.news.push(Reverse((self.now_us + after_us, self.serial, number, news)));
    }
}
