//! How often what was reached: a rule that no run comes near is not tested by any number of runs.

use std::collections::BTreeMap;

use crate::history::{Ending, History, Kind, Outcome, VerdictGiven, What};

/// Counts by name.
#[derive(Clone, Debug, Default)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// The counts so far.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, &u64)> {
        self.0.iter().map(|(what, count)| (*what, count))
    }

    /// Adds another's.
    pub fn merge(&mut self, other: Self) {
        for (what, count) in other.0 {
            *self.0.entry(what).or_default() += count;
        }
    }

    /// Adds what one run reached.
    pub fn add(&mut self, history: &History) {
        for event in &history.events {
            let what = match event.what {
                What::Attached(a) if a.next_secret.is_some() => "attached: takeover",
                What::Attached(a) if a.preempt => "attached: preempt",
                What::Attached(a) if a.goes_on => "attached: again after a loss",
                What::Attached(_) => "attached: anew",
                What::AttachRefused { status, .. } => twinrail_protocol::Status(status).name(),
                What::SessionEnding { how, .. } => match how {
                    Ending::Closed => "ended: closed",
                    Ending::LeaseOver => "ended: lease over",
                    Ending::Preempted => "ended: preempted",
                    Ending::TakenOver => "ended: taken over",
                    Ending::TargetGone => "ended: target gone",
                },
                What::VerdictSaid { verdict, .. } => match verdict {
                    VerdictGiven::Unknown => "verdict: unknown",
                    VerdictGiven::Running => "verdict: running",
                    VerdictGiven::Done => "verdict: done",
                    VerdictGiven::Mismatch => "verdict: mismatch",
                },
                What::Completed { outcome, .. } => match outcome {
                    Outcome::Ok => "outcome: ok",
                    Outcome::CompareFailed => "outcome: compare failed",
                    Outcome::Unknown => "outcome: unknown",
                    Outcome::Refused => "outcome: refused",
                    Outcome::Failed => "outcome: failed",
                },
                What::Submitted { kind: Kind::CompareAndWrite, .. } => "submitted: compare and write",
                What::Submitted { .. } => "submitted: others",
                What::CommandArrived { epoch, queue_epoch, .. } if epoch < queue_epoch => "arrived: of an older epoch",
                What::CommandArrived { .. } => "arrived",
                What::DrainSynced => "drains that synced",
                What::SyncEnded { ok: false, .. } => "syncs that failed",
                What::Lost { .. } => "blocks lost by reboots",
                What::Ended { ok: false, .. } => "disk requests that failed",
                What::Switched { rail: 1, .. } => "served by TCP",
                What::Switched { .. } => "served by RDMA",
                What::Accused { .. } => "accusations",
                What::Fault { name } => name,
                _ => continue,
            };
            *self.0.entry(what).or_default() += 1;
        }
    }
}
