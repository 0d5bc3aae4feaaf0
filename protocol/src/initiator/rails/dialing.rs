//! Which paths are wanted, and when they are dialed.
//!
//! | serving | wanted besides |
//! |---|---|
//! | nothing | a standby on each rail |
//! | RDMA | a TCP standby: it makes a switch cost one round trip |
//! | TCP | an RDMA standby to return to; once it stands, a fresh TCP standby too |
//!
//! When nobody answers, a second TCP path is dialed though there is one: the old one may be dead without a
//! word, and nothing is closed before that is known.

use super::action::{Action, Cause, PathId};
use super::backoff::Backoff;
use super::settings::Settings;
use super::standby::{Good, Standby};
use super::watch::{Beat, Watch};
use super::{Rails, Service};
use crate::ids::Epoch;
use crate::wire::Rail;

const NEVER: u64 = u64::MAX;

/// What is known of one rail.
#[derive(Debug)]
pub(super) struct Line {
    rail: Rail,
    /// There is an address to dial.
    pub(super) usable: bool,
    /// The path that is being dialed, and since when.
    dialing: Option<(PathId, u64)>,
    /// Not dialed before this.
    pub(super) dial_us: u64,
    /// Not even in a hurry.
    earliest_us: u64,
    backoff: Backoff,
    /// Paths in a row that served and didn't last.
    short_lived: u32,
    pub(super) standby: Option<Standby>,
}

impl Line {
    pub(super) fn new(rail: Rail, usable: bool, settings: &Settings, now_us: u64) -> Self {
        let backoff = Backoff::new(settings.backoff_us, settings.backoff_max_us);
        Self {
            rail,
            usable,
            dialing: None,
            dial_us: now_us,
            earliest_us: now_us,
            backoff,
            short_lived: 0,
            standby: None,
        }
    }

    fn due_us(&self) -> u64 {
        self.dial_us.max(self.earliest_us)
    }
}

impl Rails {
    /// The path is authenticated and may be activated. `epoch` is what the target says the queue has; 0 if it
    /// doesn't know any.
    pub fn dialed(&mut self, path: PathId, epoch: Epoch, now_us: u64) {
        let line = self.line(path.rail);
        if line.dialing.is_none_or(|(dialing, _)| dialing != path) {
            // Too late: it was given up, and the driver was told so.
            return;
        }
        line.dialing = None;
        self.epoch = self.epoch.max(epoch);
        let watch = Watch::new(path, self.settings.idle_probe_us, now_us);
        let good = Good::new(now_us);
        let fresh = Standby { watch, since_us: now_us, good };
        if let Some(old) = self.line(path.rail).standby.replace(fresh) {
            self.actions.push_back(Action::Close { path: old.watch.path });
        }
        self.activate_next(now_us);
    }

    /// The path couldn't be opened. `retry_after_us` is what the target asked for, 0 if nothing.
    pub fn dial_failed(&mut self, path: PathId, retry_after_us: u64, now_us: u64) {
        let line = self.line(path.rail);
        if line.dialing.is_none_or(|(dialing, _)| dialing != path) {
            return;
        }
        line.dialing = None;
        line.dial_us = line.dial_us.max(now_us.saturating_add(retry_after_us));
    }

    /// The path is gone or unusable: a connection was reset, a request failed, a device was removed, the peer
    /// sent nonsense.
    pub fn lost(&mut self, path: PathId, cause: Cause, now_us: u64) {
        self.dial_failed(path, 0, now_us);
        if self.line(path.rail).standby.as_ref().is_some_and(|s| s.watch.path == path) {
            self.drop_standby(path.rail, now_us);
        } else if self.serving() == Some(path) {
            self.leave(cause, now_us);
        } else {
            self.activation_failed(path, now_us);
        }
    }

    /// Each attempt counts as failed until a path of the rail served, or stood by for long.
    fn dial_later(&mut self, rail: Rail, now_us: u64) {
        let line = if rail == Rail::RDMA { &mut self.rdma } else { &mut self.tcp };
        line.dial_us = now_us.saturating_add(line.backoff.failed(&mut self.random));
    }

    /// The standby of this rail is no more. If it lasted, nothing speaks against another.
    pub(super) fn drop_standby(&mut self, rail: Rail, now_us: u64) {
        let lasting_us = self.settings.backoff_max_us;
        let line = self.line(rail);
        let Some(standby) = line.standby.take() else { return };
        if now_us.saturating_sub(standby.since_us) >= lasting_us {
            line.backoff.succeeded();
            self.dial_later(rail, now_us);
        }
    }

    /// A path of this rail serves. That it lasts is still to be shown.
    pub(super) fn dial_succeeded(&mut self, rail: Rail, now_us: u64) {
        self.line(rail).dial_us = now_us;
    }

    /// A path of this rail has served since then, and serves no more; `useful` if it completed commands.
    pub(super) fn served(&mut self, rail: Rail, since_us: u64, useful: bool, now_us: u64) {
        let settings = self.settings;
        let line = self.line(rail);
        if now_us.saturating_sub(since_us) >= settings.lasting_us {
            line.backoff.succeeded();
            line.short_lived = 0;
            return;
        }
        if useful {
            line.backoff.succeeded();
        }
        let most_us = if useful { settings.redial_useful_us } else { settings.redial_max_us };
        let apart_us = settings.redial_us.saturating_mul(1 << line.short_lived.min(32)).min(most_us);
        line.short_lived = line.short_lived.saturating_add(1);
        line.earliest_us = since_us.saturating_add(apart_us);
    }

    /// There is no path: whatever rail has one first will do.
    pub(super) fn hurry(&mut self, now_us: u64) {
        for line in [&mut self.tcp, &mut self.rdma] {
            line.dial_us = line.dial_us.min(now_us);
        }
    }

    /// When this rail should be dialed; nothing if it shouldn't.
    fn wanted_us(&self, line: &Line, in_trouble: bool) -> Option<u64> {
        if !line.usable || line.dialing.is_some() {
            return None;
        }
        if in_trouble && line.rail == Rail::TCP {
            // A path that is there already has its time to help.
            let old_us = line.standby.as_ref().map_or(0, |s| s.since_us.saturating_add(self.settings.alarm_us));
            return Some(line.due_us().max(old_us));
        }
        let wanted = line.standby.is_none()
            && match &self.service {
                Service::Switching(switch) if switch.is_fencing() => {
                    in_trouble || (self.tcp.standby.is_none() && self.rdma.standby.is_none())
                }
                Service::Switching(switch) => in_trouble || !switch.is_activating(),
                Service::Serving(serving) if serving.watch.path.rail == Rail::RDMA => line.rail == Rail::TCP,
                Service::Serving(_) => line.rail == Rail::RDMA || self.rdma.standby.is_some(),
            };
        wanted.then(|| line.due_us())
    }

    pub(super) fn dial(&mut self, now_us: u64) {
        let in_trouble = self.in_trouble(now_us);
        let timeout_us = self.settings.dial_us;
        for rail in [Rail::TCP, Rail::RDMA] {
            let line = self.line(rail);
            if let Some((path, since_us)) = line.dialing
                && now_us >= since_us.saturating_add(timeout_us)
            {
                line.dialing = None;
                self.actions.push_back(Action::Close { path });
            }
            let line = if rail == Rail::RDMA { &self.rdma } else { &self.tcp };
            if self.wanted_us(line, in_trouble).is_some_and(|wanted_us| now_us >= wanted_us) {
                self.paths = self.paths.wrapping_add(1);
                let path = PathId { rail, number: self.paths };
                self.line(rail).dialing = Some((path, now_us));
                self.dial_later(rail, now_us);
                self.actions.push_back(Action::Dial { path });
            }
        }
    }

    pub(super) fn dial_due_us(&self) -> u64 {
        // Trouble begins with the alarm, which has a time of its own.
        let in_trouble = self.alarmed_us.is_some();
        let due_us = |line: &Line| match line.dialing {
            Some((_, since_us)) => since_us.saturating_add(self.settings.dial_us),
            None => self.wanted_us(line, in_trouble).unwrap_or(NEVER),
        };
        due_us(&self.tcp).min(due_us(&self.rdma))
    }

    /// Probes idle standbys. One that is silent is dropped, but only when the peer has answered elsewhere since
    /// it was first asked.
    pub(super) fn watch_standbys(&mut self, now_us: u64) {
        let serving_us = match &self.service {
            Service::Serving(serving) => serving.watch.answered_us,
            Service::Switching(_) => 0,
        };
        let standby_us = |line: &Line| line.standby.as_ref().map_or(0, |s| s.watch.answered_us);
        let answered_us = serving_us.max(standby_us(&self.tcp)).max(standby_us(&self.rdma));
        for rail in [Rail::TCP, Rail::RDMA] {
            let line = if rail == Rail::RDMA { &mut self.rdma } else { &mut self.tcp };
            let Some(standby) = &mut line.standby else { continue };
            match standby.watch.beat(now_us) {
                Beat::Quiet => {}
                Beat::Probe => {
                    Self::probe(&mut standby.watch, &mut self.tokens, &mut self.actions, now_us);
                }
                Beat::Silent => {
                    let path = standby.watch.path;
                    if standby.watch.unanswered_since_us().is_some_and(|asked_us| answered_us > asked_us) {
                        self.actions.push_back(Action::Close { path });
                        self.drop_standby(rail, now_us);
                    }
                }
            }
        }
    }

    pub(super) fn standbys_due_us(&self) -> u64 {
        let pulses = [&self.tcp, &self.rdma].into_iter().flat_map(|line| &line.standby).map(|s| s.watch.pulse_us);
        pulses.min().unwrap_or(NEVER)
    }

    /// Closes whatever never served, and begins to dial anew: the session that all this belonged to is gone.
    pub(super) fn close_standbys(&mut self, now_us: u64) {
        for rail in [Rail::TCP, Rail::RDMA] {
            let line = self.line(rail);
            line.dial_us = now_us;
            let standby = line.standby.take().map(|s| s.watch.path);
            let dialing = line.dialing.take().map(|(path, _)| path);
            self.actions.extend([standby, dialing].into_iter().flatten().map(|path| Action::Close { path }));
        }
    }
}
