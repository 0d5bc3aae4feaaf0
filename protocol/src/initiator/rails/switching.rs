//! From one path to the next: fence, then activate (I2, I3).
//!
//! No path is activated before the driver has said that the old one is fenced. A path whose activation was
//! tried counts as an old one too: the target may have accepted it and be at work on it.

use super::action::{Action, Cause, PathId};
use super::suspicion::Suspicion;
use super::watch::Watch;
use super::{Rails, Service, Serving};
use crate::ids::Epoch;
use crate::wire::Rail;

const NEVER: u64 = u64::MAX;

#[derive(Debug)]
enum Phase {
    /// The driver drains this path.
    Fencing(PathId),
    /// There is nothing to activate yet.
    Waiting,
    /// ACTIVATE was sent.
    Activating { watch: Watch, epoch: Epoch, since_us: u64 },
}

/// A switch under way.
#[derive(Debug)]
pub(super) struct Switch {
    phase: Phase,
    from: Option<Rail>,
    cause: Cause,
    /// The last progress, or when the path was given up if nothing was in flight.
    quiet_us: u64,
    pub(super) decided_us: u64,
    /// Since when nobody answered: that may be before the decision.
    pub(super) trouble_us: u64,
    /// The same, but paths that completed nothing and didn't last are no interruption.
    pub(super) unserved_us: u64,
    /// RDMA is to blame, if another rail turns out to work.
    blames_rdma: bool,
    pub(super) in_flight: bool,
}

impl Switch {
    /// To the first path of all.
    pub(super) fn first(now_us: u64) -> Self {
        Self {
            phase: Phase::Waiting,
            from: None,
            cause: Cause::Start,
            quiet_us: now_us,
            decided_us: now_us,
            trouble_us: now_us,
            unserved_us: now_us,
            blames_rdma: false,
            in_flight: false,
        }
    }

    pub(super) fn is_fencing(&self) -> bool {
        matches!(self.phase, Phase::Fencing(_))
    }

    /// Whether this path is the one that the driver drains.
    pub(super) fn is_draining(&self, path: PathId) -> bool {
        matches!(self.phase, Phase::Fencing(draining) if draining == path)
    }

    pub(super) fn is_activating(&self) -> bool {
        matches!(self.phase, Phase::Activating { .. })
    }

    /// Whether this is the way back to RDMA, and nothing went wrong yet.
    fn is_return(&self) -> bool {
        self.cause == Cause::Return
    }
}

impl Rails {
    /// Leaves the path that serves.
    pub(super) fn leave(&mut self, cause: Cause, now_us: u64) {
        let in_trouble = self.in_trouble(now_us);
        let Service::Serving(serving) = &self.service else { return };
        let (path, epoch, since_us) = (serving.watch.path, serving.epoch, serving.since_us);
        let trouble_us = serving.suspicion.nobody_since_us().filter(|_| in_trouble).unwrap_or(now_us);
        let (unserved_us, useful) = (serving.unserved_us.unwrap_or(trouble_us), serving.useful);
        let is_rdma = path.rail == Rail::RDMA;
        let switch = Switch {
            phase: Phase::Fencing(path),
            from: Some(path.rail),
            cause,
            quiet_us: serving.suspicion.quiet_since_us().filter(|_| cause != Cause::Return).unwrap_or(now_us),
            decided_us: now_us,
            trouble_us,
            unserved_us,
            blames_rdma: is_rdma && !in_trouble && cause != Cause::SessionLost,
            in_flight: serving.suspicion.in_flight(),
        };
        self.service = Service::Switching(switch);
        self.served(path.rail, since_us, useful, now_us);
        if is_rdma {
            self.settle.served(now_us.saturating_sub(since_us));
            if in_trouble {
                self.settle.excused();
            }
        }
        if !matches!(cause, Cause::Return | Cause::SessionLost) {
            self.end_turn();
            let standbys = [Rail::TCP, Rail::RDMA].map(|rail| self.standby(rail));
            self.actions.extend(standbys.into_iter().flatten().map(|path| Action::Say { path, lost: epoch }));
        }
        self.actions.push_back(Action::Fence { path, cause });
        if self.tcp.standby.is_none() && self.rdma.standby.is_none() {
            self.hurry(now_us);
        }
    }

    /// The target lost the path with this epoch, and said so on a standby.
    pub fn peer_says_lost(&mut self, epoch: Epoch, now_us: u64) {
        match &self.service {
            Service::Serving(serving) if serving.epoch == epoch => self.leave(Cause::PeerSaid, now_us),
            Service::Switching(Switch { phase: Phase::Activating { watch, epoch: tried, .. }, .. })
                if *tried == epoch =>
            {
                let path = watch.path;
                self.activation_failed(path, now_us);
            }
            // An older path, which is gone already.
            _ => {}
        }
    }

    /// The path is drained and closed.
    pub fn fenced(&mut self, path: PathId, now_us: u64) {
        if let Service::Switching(switch) = &mut self.service
            && switch.is_draining(path)
        {
            switch.phase = Phase::Waiting;
            self.activate_next(now_us);
        }
    }

    /// Activates a standby, if the old path is fenced and there is one: on the way back RDMA, else one that
    /// answers, and TCP rather than an RDMA path that hasn't shown anything yet.
    pub(super) fn activate_next(&mut self, now_us: u64) {
        let Service::Switching(switch) = &self.service else { return };
        if !matches!(switch.phase, Phase::Waiting) {
            return;
        }
        let rail = if switch.is_return() && self.rdma.standby.is_some() {
            Some(Rail::RDMA)
        } else {
            self.best_standby(now_us)
        };
        let Some(standby) = rail.and_then(|rail| self.line(rail).standby.take()) else { return };
        let Service::Switching(switch) = &mut self.service else { return };
        self.epoch = self.epoch.next();
        let (path, epoch) = (standby.watch.path, self.epoch);
        switch.phase = Phase::Activating { watch: standby.watch, epoch, since_us: now_us };
        self.actions.push_back(Action::Activate { path, epoch });
    }

    /// TCP if it answers, else RDMA if that answers, else either.
    fn best_standby(&self, now_us: u64) -> Option<Rail> {
        let answers = |rail: &Rail| {
            let standby = self.line_of(*rail).standby.as_ref();
            standby.is_some_and(|s| !s.watch.is_silent(self.settings.alarm_us, now_us))
        };
        let any = |rail: &Rail| self.standby(*rail).is_some();
        let rails = [Rail::TCP, Rail::RDMA];
        rails.into_iter().find(answers).or_else(|| rails.into_iter().find(any))
    }

    /// ACTIVATED came, and the queue took it.
    pub fn activated(&mut self, path: PathId, now_us: u64) {
        let Service::Switching(switch) = &mut self.service else { return };
        let Phase::Activating { watch, epoch, .. } = &switch.phase else { return };
        if watch.path != path {
            return;
        }
        let (epoch, mut watch) = (*epoch, *watch);
        watch.activated(now_us);
        let rail = path.rail;
        self.actions.push_back(Action::Serving {
            from: switch.from,
            to: rail,
            cause: switch.cause,
            detection_us: switch.decided_us.saturating_sub(switch.quiet_us),
            blackout_us: now_us.saturating_sub(switch.quiet_us),
        });
        if switch.blames_rdma {
            // If the other rail was there at once, this one failed alone; else both had lost their peer.
            let at_once = now_us.saturating_sub(switch.decided_us) < self.settings.alarm_us;
            if at_once && rail != Rail::RDMA { self.settle.flapped() } else { self.settle.excused() }
        }
        let silence = if rail == Rail::RDMA { self.settings.rdma } else { self.settings.tcp };
        let suspicion = Suspicion::new(self.settings, silence, switch.in_flight, now_us);
        // Commands that wait are not served before one of them is completed.
        let unserved_us = switch.in_flight.then_some(switch.unserved_us);
        let serving = Serving { watch, epoch, since_us: now_us, suspicion, unserved_us, useful: false };
        self.service = Service::Serving(serving);
        self.dial_succeeded(rail, now_us);
        self.end_turn();
    }

    /// The activation was refused, or its path was lost. The path is fenced like one that served. (If the
    /// session is lost, call [`Self::session_lost`] then.)
    pub fn activation_failed(&mut self, path: PathId, now_us: u64) {
        let Service::Switching(switch) = &mut self.service else { return };
        if !matches!(&switch.phase, Phase::Activating { watch, .. } if watch.path == path) {
            return;
        }
        switch.phase = Phase::Fencing(path);
        if switch.is_return() {
            // TCP worked until we left it, and has to take over again.
            switch.cause = Cause::ActivationFailed;
            switch.decided_us = now_us;
            switch.blames_rdma = true;
        }
        self.actions.push_back(Action::Fence { path, cause: Cause::ActivationFailed });
        self.end_turn();
    }

    /// The session is lost: no path of it is of use any more, and the next epoch is 1 again. RDMA is dialed when
    /// it was offered anew.
    pub fn session_lost(&mut self, now_us: u64) {
        self.close_standbys(now_us);
        self.rdma.usable = false;
        self.end_turn();
        self.leave(Cause::SessionLost, now_us);
        if let Service::Switching(switch) = &mut self.service {
            switch.cause = Cause::SessionLost;
            switch.blames_rdma = false;
            if let Phase::Activating { watch, .. } = &switch.phase {
                let path = watch.path;
                self.activation_failed(path, now_us);
            }
        }
        self.epoch = Epoch(0);
    }

    /// Ends an activation that isn't answered.
    pub(super) fn activation_in_time(&mut self, now_us: u64) {
        if self.activation_due_us() <= now_us
            && let Service::Switching(Switch { phase: Phase::Activating { watch, .. }, .. }) = &self.service
        {
            let path = watch.path;
            self.activation_failed(path, now_us);
        }
    }

    pub(super) fn activation_due_us(&self) -> u64 {
        match &self.service {
            Service::Switching(Switch { phase: Phase::Activating { since_us, .. }, .. }) => {
                since_us.saturating_add(self.settings.activate_us)
            }
            _ => NEVER,
        }
    }
}
