//! One connection under watch: its probes, their answers, its pulse.

use super::action::PathId;
use super::round_trip::RoundTrip;
use crate::limits::CONTROL_CREDIT;
use crate::liveness::{Liveness, Pulse};

/// Probes that may be without an answer on one path: one credit stays free for CLOSE (I6).
const PROBES_OUT: usize = CONTROL_CREDIT as usize - 1;

#[derive(Clone, Copy, Debug)]
struct Probe {
    token: u64,
    sent_us: u64,
}

/// A path and what is known of its peer's answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    pub(super) path: PathId,
    liveness: Liveness,
    /// When the pulse is to be taken next.
    pub(super) pulse_us: u64,
    out: [Option<Probe>; PROBES_OUT],
    /// When the last probe was sent.
    pub(super) probed_us: u64,
    /// When the peer last answered anything.
    pub(super) answered_us: u64,
    pub(super) round_trip: RoundTrip,
}

/// What the pulse asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beat {
    Quiet,
    Probe,
    /// As many probe periods without an answer as make a path lost.
    Silent,
}

impl Watch {
    pub(super) fn new(path: PathId, period_us: u64, now_us: u64) -> Self {
        let period_ms = (period_us / 1_000).max(1);
        Self {
            path,
            liveness: Liveness::new(period_ms, now_us / 1_000),
            pulse_us: now_us.saturating_add(period_us),
            out: [None; PROBES_OUT],
            probed_us: now_us,
            answered_us: now_us,
            round_trip: RoundTrip::default(),
        }
    }

    /// A probe with this token goes out; `false` if too many have no answer yet.
    #[must_use]
    pub(super) fn probe(&mut self, token: u64, now_us: u64) -> bool {
        let free = self.out.iter_mut().find(|p| p.is_none());
        let Some(place) = free else { return false };
        *place = Some(Probe { token, sent_us: now_us });
        self.probed_us = now_us;
        true
    }

    pub(super) fn has_room(&self) -> bool {
        self.out.iter().any(Option::is_none)
    }

    /// When the oldest probe without an answer was sent.
    pub(super) fn unanswered_since_us(&self) -> Option<u64> {
        self.out.iter().flatten().map(|p| p.sent_us).min()
    }

    /// Whether a probe has been without an answer for so long.
    pub(super) fn is_silent(&self, for_us: u64, now_us: u64) -> bool {
        self.unanswered_since_us().is_some_and(|asked_us| now_us > asked_us.saturating_add(for_us))
    }

    /// The answer to a probe: says when that was sent, or nothing if none with this token is out.
    pub(super) fn probe_answered(&mut self, token: u64, now_us: u64) -> Option<u64> {
        let place = self.out.iter_mut().find(|p| p.is_some_and(|p| p.token == token))?;
        let sent_us = place.take()?.sent_us;
        self.round_trip.sample(now_us.saturating_sub(sent_us));
        self.answered(now_us);
        Some(sent_us)
    }

    /// The path was activated: probes of the standby that have no answer by now never get one.
    pub(super) fn activated(&mut self, now_us: u64) {
        self.out = [None; PROBES_OUT];
        self.answered(now_us);
    }

    /// Any answer of the peer.
    #[inline]
    pub(super) fn answered(&mut self, now_us: u64) {
        self.answered_us = now_us;
        self.liveness.answered(now_us / 1_000);
    }

    /// Takes the pulse.
    pub(super) fn beat(&mut self, now_us: u64) -> Beat {
        if now_us < self.pulse_us {
            return Beat::Quiet;
        }
        let (next_us, beat) = match self.liveness.poll(now_us / 1_000) {
            Pulse::Quiet { until_ms } => (until_ms.saturating_mul(1_000), Beat::Quiet),
            // The next poll says until when it is quiet.
            Pulse::Probe { .. } => (now_us.saturating_add(1_000), Beat::Probe),
            // An answer is what ends this.
            Pulse::Lost => (now_us.saturating_add(1_000_000), Beat::Silent),
        };
        self.pulse_us = next_us.max(now_us.saturating_add(1));
        beat
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Rail;

    fn watch() -> Watch {
        Watch::new(PathId { rail: Rail::TCP, number: 1 }, 5_000_000, 0)
    }

    #[test]
    fn i6_one_control_credit_is_left_for_close() {
        let mut w = watch();
        let sent = (1..=10).filter(|&token| w.probe(token, 0)).count();
        assert_eq!(sent, usize::from(CONTROL_CREDIT) - 1);
        assert_eq!(w.probe_answered(2, 10), Some(0));
        assert!(w.probe(11, 20) && !w.probe(12, 20));
    }

    #[test]
    fn an_answer_to_nothing_proves_nothing() {
        let mut w = watch();
        assert!(w.probe(1, 1_000));
        assert_eq!(w.probe_answered(2, 2_000), None);
        assert_eq!((w.answered_us, w.round_trip.smoothed_us()), (0, None));
        assert_eq!(w.probe_answered(1, 3_000), Some(1_000));
        assert_eq!((w.answered_us, w.round_trip.smoothed_us()), (3_000, Some(2_000)));
        assert_eq!(w.probe_answered(1, 3_000), None);
    }

    #[test]
    fn an_idle_path_is_probed_each_period_and_silent_after_three() {
        let mut w = watch();
        let mut beats = alloc::vec::Vec::new();
        for now_us in (0..=20_000_000).step_by(1_000) {
            match w.beat(now_us) {
                Beat::Quiet => {}
                beat => beats.push((now_us / 1_000, beat)),
            }
        }
        let probe = |ms| (ms, Beat::Probe);
        assert_eq!(beats, [probe(5_000), probe(10_000), probe(15_000), (20_000, Beat::Silent)]);
    }
}
