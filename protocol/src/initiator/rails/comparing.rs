//! Asks the path that serves and a standby, and leaves the path when the comparison says so.

use super::action::PathId;
use super::watch::{Beat, Watch};
use super::{Rails, Service};

const NEVER: u64 = u64::MAX;

impl Rails {
    /// PROBE_REPLY came.
    pub fn probe_answered(&mut self, path: PathId, token: u64, now_us: u64) {
        if let Service::Serving(serving) = &mut self.service
            && serving.watch.path == path
        {
            if serving.watch.probe_answered(token, now_us).is_some() {
                serving.suspicion.answered(now_us);
                serving.answered(self.settings.lasting_us, now_us);
            }
            return;
        }
        let line = self.line(path.rail);
        let Some(standby) = line.standby.as_mut().filter(|s| s.watch.path == path) else { return };
        let Some(sent_us) = standby.watch.probe_answered(token, now_us) else { return };
        let round_trip_us = standby.watch.round_trip.smoothed_us();
        self.judge_good(path.rail);
        if let Service::Serving(serving) = &mut self.service {
            serving.suspicion.other_answered(sent_us, round_trip_us, now_us);
        }
    }

    /// Leaves a path that is silent while another one answers. Call it once a turn, and only after the standbys
    /// and then the path that serves were emptied in that turn.
    pub fn judge(&mut self, now_us: u64) {
        if let Service::Serving(serving) = &self.service
            && let Some(cause) = serving.suspicion.judge()
        {
            self.leave(cause, now_us);
        }
    }

    /// Probes the path that serves when it is idle or doubted, and the standbys that it is compared with.
    pub(super) fn compare(&mut self, now_us: u64) {
        let (every_us, silent_us) = (self.settings.compare_every_us, self.settings.ask_silent_every_us);
        let Service::Serving(serving) = &mut self.service else { return };
        let (watch, suspicion) = (&mut serving.watch, &mut serving.suspicion);
        let mut asks = watch.beat(now_us) == Beat::Probe;
        if suspicion.due_us(watch.round_trip.smoothed_us()).is_some_and(|due_us| now_us >= due_us) {
            suspicion.begin(now_us);
            asks = true;
        }
        asks |= suspicion.is_comparing() && now_us >= ask_us(watch, suspicion.all_taken(), every_us, silent_us);
        if asks && Self::probe(watch, &mut self.tokens, &mut self.actions, now_us) {
            suspicion.asked(now_us);
        }
        if !suspicion.is_comparing() {
            return;
        }
        for standby in [&mut self.tcp, &mut self.rdma].into_iter().flat_map(|line| &mut line.standby) {
            if now_us >= ask_other_us(&standby.watch, suspicion.compared_since_us(), every_us, silent_us) {
                Self::probe(&mut standby.watch, &mut self.tokens, &mut self.actions, now_us);
            }
        }
    }

    pub(super) fn compare_due_us(&self) -> u64 {
        let Service::Serving(serving) = &self.service else { return NEVER };
        let (watch, suspicion) = (&serving.watch, &serving.suspicion);
        let (every_us, silent_us) = (self.settings.compare_every_us, self.settings.ask_silent_every_us);
        let mut due_us = watch.pulse_us;
        if let Some(doubt_us) = suspicion.due_us(watch.round_trip.smoothed_us()) {
            due_us = due_us.min(doubt_us);
        }
        if suspicion.is_comparing() {
            due_us = due_us.min(ask_us(watch, suspicion.all_taken(), every_us, silent_us));
            for standby in [&self.tcp, &self.rdma].into_iter().flat_map(|line| &line.standby) {
                let since_us = suspicion.compared_since_us();
                due_us = due_us.min(ask_other_us(&standby.watch, since_us, every_us, silent_us));
            }
        }
        due_us
    }
}

/// When a path is asked next: soon if the hardware has taken the last question, else rarely.
fn ask_us(watch: &Watch, taken: bool, every_us: u64, silent_us: u64) -> u64 {
    if !watch.has_room() {
        return NEVER;
    }
    watch.probed_us.saturating_add(if taken { every_us } else { silent_us })
}

/// When the other path is asked next: at the beginning, then soon after each answer, else rarely.
fn ask_other_us(watch: &Watch, since_us: u64, every_us: u64, silent_us: u64) -> u64 {
    if watch.probed_us < since_us && watch.has_room() {
        return since_us;
    }
    ask_us(watch, watch.unanswered_since_us().is_none(), every_us, silent_us)
}
