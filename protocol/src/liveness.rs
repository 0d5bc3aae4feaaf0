//! Whether a path still lives: a pure function of what was heard and when.
//!
//! A path lives when its peer *answers*: a cut in one direction lets frames of the peer through and still
//! leaves the path dead, and both sides have to see that. Other frames only show that there is no hurry to
//! ask.
//!
//! Time is a number of milliseconds from any fixed point, and only its differences count.

/// Probes a path and watches for answers.
#[derive(Clone, Copy, Debug)]
pub struct Liveness {
    period_ms: u64,
    /// When anything came, and when an answer came.
    heard_ms: u64,
    answered_ms: u64,
    unanswered: Option<Unanswered>,
    token: u64,
}

/// Probes since the last answer.
#[derive(Clone, Copy, Debug)]
struct Unanswered {
    first_ms: u64,
    last_ms: u64,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulse {
    /// Nothing until this time in milliseconds.
    Quiet {
        /// When to ask again.
        until_ms: u64,
    },
    /// Send a probe with this token.
    Probe {
        /// The token.
        token: u64,
    },
    /// [`Liveness::LOST_AFTER`] periods passed since the first probe that nothing answered.
    Lost,
}

impl Liveness {
    /// How often an idle path is probed by default, in milliseconds: rare enough to cost nothing with
    /// thousands of idle sessions, and a dead peer is gone well before its lease (60 s) is.
    pub const PERIOD_MS: u64 = 5_000;
    /// Periods without an answer after which a path is lost: one lost packet or one slow turn of the
    /// peer's loop must not do it.
    pub const LOST_AFTER: u32 = 3;

    /// Begins at `now_ms`, as if an answer had just come.
    #[must_use]
    pub fn new(period_ms: u64, now_ms: u64) -> Self {
        Self { period_ms: period_ms.max(1), heard_ms: now_ms, answered_ms: now_ms, unanswered: None, token: 0 }
    }

    /// Something came from the peer: an idle probe can wait.
    #[inline]
    pub fn heard(&mut self, now_ms: u64) {
        self.heard_ms = now_ms;
    }

    /// The peer answered something that this side sent (PROBE_REPLY, EVENT_SEEN, REPLY, FETCH, DATA), or goes
    /// on with the bytes of such an answer: the path lives.
    #[inline]
    pub fn answered(&mut self, now_ms: u64) {
        self.heard_ms = now_ms;
        self.answered_ms = now_ms;
        self.unanswered = None;
    }

    /// What to do at `now_ms`. Take what has arrived before: an answer that lies in the socket counts.
    pub fn poll(&mut self, now_ms: u64) -> Pulse {
        let patience_ms = self.period_ms.saturating_mul(Self::LOST_AFTER.into());
        let due = match self.unanswered {
            // A peer that only talks is asked all the same, if more rarely.
            None => (self.heard_ms.saturating_add(self.period_ms)).min(self.answered_ms.saturating_add(patience_ms)),
            Some(Unanswered { first_ms, last_ms }) => {
                let lost = first_ms.saturating_add(patience_ms);
                if now_ms >= lost {
                    return Pulse::Lost;
                }
                last_ms.saturating_add(self.period_ms).min(lost)
            }
        };
        if now_ms < due {
            return Pulse::Quiet { until_ms: due };
        }
        let first_ms = self.unanswered.map_or(now_ms, |u| u.first_ms);
        self.unanswered = Some(Unanswered { first_ms, last_ms: now_ms });
        self.token += 1;
        Pulse::Probe { token: self.token }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a path does that is polled each second; `comes` acts on what arrives at that time.
    fn run(seconds: u64, mut comes: impl FnMut(&mut Liveness, u64)) -> (u64, Option<u64>) {
        let (mut l, mut probes) = (Liveness::new(5_000, 0), 0);
        for now_ms in (1..=seconds).map(|s| s * 1_000) {
            comes(&mut l, now_ms);
            match l.poll(now_ms) {
                Pulse::Quiet { until_ms } => assert!(until_ms > now_ms),
                Pulse::Probe { token } => {
                    probes += 1;
                    assert_eq!(token, probes);
                }
                Pulse::Lost => return (probes, Some(now_ms)),
            }
        }
        (probes, None)
    }

    #[test]
    fn a_silent_peer_is_lost_three_periods_after_the_first_unanswered_probe() {
        let mut l = Liveness::new(5_000, 0);
        assert_eq!(l.poll(4_999), Pulse::Quiet { until_ms: 5_000 });
        for n in 1..=3 {
            assert_eq!(l.poll(n * 5_000), Pulse::Probe { token: n });
        }
        assert_eq!(l.poll(19_999), Pulse::Quiet { until_ms: 20_000 });
        assert_eq!(l.poll(20_000), Pulse::Lost);
    }

    #[test]
    fn probes_that_went_out_late_do_not_put_the_end_off() {
        let mut l = Liveness::new(5_000, 0);
        for (now_ms, token) in [(5_000, 1), (12_000, 2), (17_000, 3)] {
            assert_eq!(l.poll(now_ms), Pulse::Probe { token });
        }
        assert_eq!(l.poll(17_001), Pulse::Quiet { until_ms: 20_000 });
        assert_eq!(l.poll(20_000), Pulse::Lost);
    }

    #[test]
    fn an_answer_starts_the_count_anew() {
        let mut l = Liveness::new(5_000, 0);
        for n in 1..=3 {
            assert_eq!(l.poll(n * 5_000), Pulse::Probe { token: n });
        }
        l.answered(19_999);
        assert_eq!(l.poll(20_000), Pulse::Quiet { until_ms: 24_999 });
        assert_eq!(l.poll(24_999), Pulse::Probe { token: 4 });
        assert_eq!(l.poll(39_998), Pulse::Probe { token: 5 });
        assert_eq!(l.poll(39_999), Pulse::Lost);
    }

    #[test]
    fn a_busy_peer_that_answers_is_never_probed() {
        assert_eq!(run(100, |l, now_ms| l.answered(now_ms)), (0, None));
    }

    #[test]
    fn a_peer_that_answers_probes_is_never_lost() {
        let mut probed = 0;
        let (probes, lost) = run(100, |l, now_ms| {
            if l.token > probed {
                probed = l.token;
                l.answered(now_ms);
            }
        });
        assert!(probes > 10 && lost.is_none());
    }

    /// Each side hears the other's frames or answers, but the other hears nothing of it.
    #[test]
    fn a_cut_in_one_direction_is_noticed_by_the_side_that_still_hears() {
        // It is probed as late as three periods after the last answer, and lost three more later.
        assert_eq!(run(100, |l, now_ms| l.heard(now_ms)), (3, Some(30_000)));
        // What comes every now and then, as the other side's own probes do, doesn't put it off longer.
        let (_, lost) = run(100, |l, now_ms| {
            if now_ms % 5_000 == 0 {
                l.heard(now_ms)
            }
        });
        assert_eq!(lost, Some(30_000));
    }

    #[test]
    fn any_frame_puts_an_idle_probe_off_but_none_that_is_out() {
        let mut l = Liveness::new(5_000, 0);
        l.heard(4_000);
        assert_eq!(l.poll(5_000), Pulse::Quiet { until_ms: 9_000 });
        assert_eq!(l.poll(9_000), Pulse::Probe { token: 1 });
        l.heard(13_000);
        assert_eq!(l.poll(14_000), Pulse::Probe { token: 2 });
    }
}
