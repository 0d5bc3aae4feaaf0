//! Back to RDMA: a fresh path that has proved itself, a fresh TCP standby to fall back on, and a turn, since
//! one queue at a time returns.

use super::action::{Action, Cause};
use super::settings::Settings;
use super::standby::{Good, Standby};
use super::{Rails, Service};
use crate::wire::Rail;

const NEVER: u64 = u64::MAX;

/// The longest time between two of the probes that a fresh path has to answer.
const PROVE_EVERY_MAX_US: u64 = 1_000_000;

/// Whose turn it is to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Idle,
    Asked,
    Held,
}

impl Rails {
    /// It is this queue's turn to return. It ends with [`Action::EndTurn`].
    pub fn turn_given(&mut self, _now_us: u64) {
        if self.turn == Turn::Asked {
            self.turn = Turn::Held;
        } else if self.turn == Turn::Idle {
            self.actions.push_back(Action::EndTurn);
        }
    }

    pub(super) fn end_turn(&mut self) {
        if self.turn != Turn::Idle {
            self.turn = Turn::Idle;
            self.actions.push_back(Action::EndTurn);
        }
    }

    /// A standby answered a probe, and not too late, or [`Self::prepare_return`] would have noticed.
    pub(super) fn judge_good(&mut self, rail: Rail) {
        if let Some(standby) = &mut self.line(rail).standby {
            standby.good.probes = standby.good.probes.saturating_add(1);
        }
    }

    /// How far apart the probes are that a fresh RDMA path has to answer.
    fn prove_every_us(&self) -> u64 {
        let every_us = self.settle.wait_us() / u64::from(self.settings.good_probes.max(1));
        every_us.min(PROVE_EVERY_MAX_US).max(self.settings.compare_every_us)
    }

    /// Since when there has been a path to return to, watched for long enough, and one to fall back on.
    fn could_return_us(&self) -> Option<u64> {
        self.tcp.standby.as_ref()?;
        let good = self.rdma.standby.as_ref()?.good;
        (good.probes >= self.settings.good_probes).then(|| good.since_us.saturating_add(self.settle.wait_us()))
    }

    fn is_on_tcp(&self) -> bool {
        matches!(&self.service, Service::Serving(serving) if serving.watch.path.rail == Rail::TCP)
    }

    pub(super) fn prepare_return(&mut self, now_us: u64) {
        if !self.is_on_tcp() {
            return;
        }
        let every_us = self.prove_every_us();
        if let Some(standby) = &mut self.rdma.standby
            && now_us >= prove_due_us(standby, every_us, &self.settings)
        {
            if standby.watch.unanswered_since_us().is_some() {
                standby.good = Good::new(now_us);
            } else {
                Self::probe(&mut standby.watch, &mut self.tokens, &mut self.actions, now_us);
            }
        }
        let ready = self.could_return_us().is_some_and(|us| now_us >= us);
        match (self.turn, ready) {
            (Turn::Idle, true) => {
                self.turn = Turn::Asked;
                self.actions.push_back(Action::AskTurn);
            }
            (Turn::Held, true) => self.leave(Cause::Return, now_us),
            (Turn::Asked | Turn::Held, false) => self.end_turn(),
            (Turn::Asked, true) | (Turn::Idle, false) => {}
        }
    }

    pub(super) fn return_due_us(&self) -> u64 {
        if !self.is_on_tcp() {
            return NEVER;
        }
        let every_us = self.prove_every_us();
        let prove_us = self.rdma.standby.as_ref().map_or(NEVER, |s| prove_due_us(s, every_us, &self.settings));
        let turn_us = match (self.turn, self.could_return_us()) {
            (Turn::Asked, Some(_)) => NEVER,
            (_, Some(ready_us)) => ready_us,
            (Turn::Idle, None) => NEVER,
            // Nothing to return to any more.
            (_, None) => 0,
        };
        prove_us.min(turn_us)
    }
}

/// When a fresh path is to be probed, or its last probe has been without an answer for too long.
fn prove_due_us(standby: &Standby, every_us: u64, settings: &Settings) -> u64 {
    let proved = standby.good.probes >= settings.good_probes;
    match standby.watch.unanswered_since_us() {
        Some(asked_us) if standby.good.probes > 0 => asked_us.saturating_add(settings.good_within_us + 1),
        Some(_) => NEVER,
        None => standby.watch.probed_us.saturating_add(if proved { PROVE_EVERY_MAX_US } else { every_us }),
    }
}
