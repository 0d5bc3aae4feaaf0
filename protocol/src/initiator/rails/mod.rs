//! Which path of a queue serves, which stand by, and when that changes.
//!
//! [`Rails`] is a pure function of time and events: the driver tells it what happens to connections, and does
//! what [`Rails::poll`] says. One rule, one room:
//!
//! - `dialing`, `backoff`: which paths are wanted, and when they are dialed;
//! - `suspicion`, `comparing`: silence is judged by comparison;
//! - `switching`: fence the old path, then activate another;
//! - `returning`, `settle`: back to RDMA, eager but damped;
//! - `alarm`: no path at all;
//! - `watch`, `round_trip`: the probes of one connection;
//! - `settings`: every number, with its reason; `blackout`: what follows from them.
//!
//! In each turn of its loop the driver
//!
//! 1. empties the standby paths, then the path that serves, and reports what came ([`Rails::progress`],
//!    [`Rails::probe_answered`], [`Rails::send_completed`], [`Rails::lost`], ...). In this order, an answer on a
//!    standby never counts against a path whose own answer arrived at the same time;
//! 2. calls [`Rails::judge`];
//! 3. does what [`Rails::poll`] says until that says nothing;
//! 4. waits for an event, at most until [`Rails::deadline_us`].
//!
//! Times are microseconds from any fixed point and never go back.

mod action;
mod alarm;
mod backoff;
mod blackout;
mod comparing;
mod dialing;
mod random;
mod returning;
mod round_trip;
mod settings;
mod settle;
mod standby;
mod suspicion;
mod switching;
mod watch;

use alloc::collections::VecDeque;

pub use action::{Action, Cause, PathId};
pub use blackout::{Blackout, Surroundings};
use dialing::Line;
use random::Random;
use returning::Turn;
pub use settings::{Settings, Silence};
pub use settle::Settle;
use suspicion::Suspicion;
use switching::Switch;
use watch::Watch;

use crate::ids::Epoch;
use crate::wire::Rail;

/// The path that serves.
#[derive(Debug)]
struct Serving {
    watch: Watch,
    epoch: Epoch,
    since_us: u64,
    suspicion: Suspicion,
    /// Since when no command was completed, if paths were lost before this one and it hasn't made up for that.
    unserved_us: Option<u64>,
    /// It has completed a command.
    useful: bool,
}

impl Serving {
    /// The peer has answered on it. If it lasted, commands that are still out wait for the peer, not for a path.
    #[inline]
    fn answered(&mut self, lasting_us: u64, now_us: u64) {
        if self.unserved_us.is_some() && now_us.saturating_sub(self.since_us) >= lasting_us {
            self.unserved_us = None;
        }
    }
}

/// What the queue does: one path serves, or the next one is being looked for.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one for each queue, and it stays where it is")]
enum Service {
    Serving(Serving),
    Switching(Switch),
}

/// The path policy of one queue.
#[derive(Debug)]
pub struct Rails {
    settings: Settings,
    random: Random,
    service: Service,
    tcp: Line,
    rdma: Line,
    settle: Settle,
    turn: Turn,
    /// The alarm was raised, for a trouble that began then.
    alarmed_us: Option<u64>,
    /// [`Action::GiveUp`] was handed out.
    over: bool,
    /// The last epoch tried, or that the target had.
    epoch: Epoch,
    paths: u32,
    tokens: u64,
    actions: VecDeque<Action>,
}

impl Rails {
    /// A queue without a path: TCP is dialed at once, RDMA when [`Self::offer`] says that there is any. Queues
    /// get different seeds, so that their waits differ.
    #[must_use]
    pub fn new(settings: Settings, seed: u64, now_us: u64) -> Self {
        Self {
            settings,
            random: Random::new(seed),
            service: Service::Switching(Switch::first(now_us)),
            tcp: Line::new(Rail::TCP, true, &settings, now_us),
            rdma: Line::new(Rail::RDMA, false, &settings, now_us),
            settle: Settle::new(&settings),
            turn: Turn::Idle,
            alarmed_us: None,
            over: false,
            epoch: Epoch(0),
            paths: 0,
            tokens: 0,
            // More than one turn ever asks for.
            actions: VecDeque::with_capacity(16),
        }
    }

    /// The rail has an address to dial (the target told its portals, and there is a device), or has none any
    /// more. Paths that are there stay.
    pub fn offer(&mut self, rail: Rail, usable: bool, now_us: u64) {
        let line = self.line(rail);
        line.usable = usable;
        line.dial_us = now_us;
    }

    /// The path that serves.
    #[must_use]
    pub fn serving(&self) -> Option<PathId> {
        match &self.service {
            Service::Serving(serving) => Some(serving.watch.path),
            Service::Switching(_) => None,
        }
    }

    /// The authenticated standby on a rail.
    #[must_use]
    pub fn standby(&self, rail: Rail) -> Option<PathId> {
        self.line_of(rail).standby.as_ref().map(|s| s.watch.path)
    }

    /// Flaps of RDMA that still count, and how many microseconds its next path will be watched.
    #[must_use]
    pub fn settle(&self) -> &Settle {
        &self.settle
    }

    /// Commands are out on the path that serves. Call it at least when the first goes out.
    #[inline]
    pub fn submitted(&mut self, now_us: u64) {
        match &mut self.service {
            Service::Serving(serving) => serving.suspicion.submitted(now_us),
            Service::Switching(switch) => switch.in_flight = true,
        }
    }

    /// The peer answered on this path by something else than PROBE_REPLY: a reply, bytes of its payload, FETCH,
    /// EVENT_SEEN. `in_flight` says whether commands are still out.
    #[inline]
    pub fn progress(&mut self, path: PathId, in_flight: bool, now_us: u64) {
        match &mut self.service {
            Service::Serving(serving) if serving.watch.path == path => {
                serving.watch.answered(now_us);
                serving.suspicion.progress(in_flight, now_us);
                serving.answered(self.settings.lasting_us, now_us);
            }
            // Replies that come out of a drain count.
            Service::Switching(switch) if switch.is_draining(path) => switch.in_flight = in_flight,
            _ => {
                let standby = self.line(path.rail).standby.as_mut().filter(|s| s.watch.path == path);
                standby.into_iter().for_each(|s| s.watch.answered(now_us));
            }
        }
    }

    /// A command was completed, on the path that serves or from its drain.
    #[inline]
    pub fn completed(&mut self, now_us: u64) {
        match &mut self.service {
            Service::Serving(serving) => (serving.unserved_us, serving.useful) = (None, true),
            Service::Switching(switch) => switch.unserved_us = now_us,
        }
    }

    /// The peer's hardware took something that was sent on this path. Of failures tell [`Self::lost`]; of a
    /// socket tell nothing.
    #[inline]
    pub fn send_completed(&mut self, path: PathId) {
        if let Service::Serving(serving) = &mut self.service
            && serving.watch.path == path
        {
            serving.suspicion.send_completed();
        }
    }

    /// What to do next; nothing until an event comes or [`Self::deadline_us`] has passed.
    pub fn poll(&mut self, now_us: u64) -> Option<Action> {
        if self.over {
            return None;
        }
        if self.actions.is_empty() && self.deadline_us() <= now_us {
            self.compare(now_us);
            self.watch_standbys(now_us);
            self.activation_in_time(now_us);
            self.prepare_return(now_us);
            self.dial(now_us);
            self.sound_alarm(now_us);
        }
        let action = self.actions.pop_front();
        self.over = action == Some(Action::GiveUp);
        action
    }

    /// When [`Self::poll`] is to be called next, if nothing happens before.
    #[must_use]
    pub fn deadline_us(&self) -> u64 {
        if self.over {
            return u64::MAX;
        }
        if !self.actions.is_empty() {
            return 0;
        }
        let rooms = [
            self.compare_due_us(),
            self.standbys_due_us(),
            self.activation_due_us(),
            self.return_due_us(),
            self.dial_due_us(),
            self.alarm_due_us(),
        ];
        rooms.into_iter().min().unwrap_or(u64::MAX)
    }

    fn line_of(&self, rail: Rail) -> &Line {
        if rail == Rail::RDMA { &self.rdma } else { &self.tcp }
    }

    fn line(&mut self, rail: Rail) -> &mut Line {
        if rail == Rail::RDMA { &mut self.rdma } else { &mut self.tcp }
    }

    /// Sends a probe on `watch`, if its credit allows.
    fn probe(watch: &mut Watch, tokens: &mut u64, actions: &mut VecDeque<Action>, now_us: u64) -> bool {
        let sent = watch.probe(*tokens + 1, now_us);
        if sent {
            *tokens += 1;
            actions.push_back(Action::Probe { path: watch.path, token: *tokens });
        }
        sent
    }
}
