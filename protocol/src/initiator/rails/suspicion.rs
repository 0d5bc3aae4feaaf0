//! Silence, judged by comparison.
//!
//! A path that makes no progress may have a slow disk behind it, a peer that stalls, or nothing. Only an
//! answer from the same reactor by another way tells these apart: so both paths are asked, and the one that
//! serves is left when the *other* has answered and it hasn't.
//!
//! Evidence against a path has to be as new as the evidence for it. What is cut is judged by the answers to
//! what the other path was asked after the last probe that the hardware did not take. Where the hardware
//! takes everything, only time counts in which the peer was seen to answer: if it stalls in between, that
//! holds up the answers on both paths, and says nothing.

use super::action::Cause;
use super::settings::{Settings, Silence};

/// Answers of the other path.
#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    count: u32,
    first_us: u64,
    last_us: u64,
}

impl Answers {
    fn add(&mut self, now_us: u64) {
        if self.count == 0 {
            self.first_us = now_us;
        }
        self.count = self.count.saturating_add(1);
        self.last_us = now_us;
    }

    fn suffice(&self, settings: &Settings) -> bool {
        self.count >= settings.answers && self.last_us - self.first_us >= settings.answers_over_us
    }
}

/// The two paths are being compared.
#[derive(Clone, Copy, Debug)]
struct Comparison {
    /// When the path was doubted, and both were asked for the first time.
    asked_us: u64,
    /// What came of probes sent before this proves nothing.
    began_us: u64,
    answers: Answers,
    /// A probe was sent on the path that serves, and since then its hardware completed nothing.
    untaken_us: Option<u64>,
    /// Answers to what the other path was asked since then.
    answers_since: Answers,
    /// Since when nobody answers: the beginning, or the last answer of the other path.
    nobody_since_us: u64,
    /// For how long the other path has answered, without long pauses.
    answering_us: u64,
}

/// Watches the path that serves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspicion {
    settings: Settings,
    silence: Silence,
    in_flight: bool,
    /// The last progress; or when the first command went out after a time with none.
    quiet_since_us: u64,
    /// A probe without an answer was sent then.
    asked_us: Option<u64>,
    /// Questions answered since the last progress.
    asked_in_vain: u32,
    comparison: Option<Comparison>,
}

impl Suspicion {
    /// Begins with a path that has just answered; `in_flight` says whether commands wait on it.
    #[must_use]
    pub(super) fn new(settings: Settings, silence: Silence, in_flight: bool, now_us: u64) -> Self {
        let quiet_since_us = now_us;
        Self { settings, silence, in_flight, quiet_since_us, asked_us: None, asked_in_vain: 0, comparison: None }
    }

    /// Commands are out on the path.
    #[inline]
    pub(super) fn submitted(&mut self, now_us: u64) {
        if !self.in_flight {
            self.in_flight = true;
            self.quiet_since_us = now_us;
            self.asked_in_vain = 0;
        }
    }

    /// A command made progress; `in_flight` says whether any is still out.
    #[inline]
    pub(super) fn progress(&mut self, in_flight: bool, now_us: u64) {
        self.in_flight = in_flight;
        self.asked_in_vain = 0;
        self.alive(now_us);
    }

    /// A probe on the path was answered: it lives, even if its commands wait.
    pub(super) fn answered(&mut self, now_us: u64) {
        self.asked_in_vain = self.asked_in_vain.saturating_add(1);
        self.alive(now_us);
    }

    #[inline]
    fn alive(&mut self, now_us: u64) {
        self.quiet_since_us = now_us;
        self.asked_us = None;
        self.comparison = None;
    }

    /// Since when there was no progress, if somebody waits for it.
    #[must_use]
    pub(super) fn quiet_since_us(&self) -> Option<u64> {
        self.in_flight.then_some(self.quiet_since_us)
    }

    /// Whether commands are out on the path.
    #[must_use]
    pub(super) fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// When the path is to be doubted; nothing if it is already, or if nothing is expected of it.
    #[must_use]
    pub(super) fn due_us(&self, round_trip_us: Option<u64>) -> Option<u64> {
        if self.comparison.is_some() {
            return None;
        }
        let patience_us = self.silence.patience_us(round_trip_us);
        let again_us = patience_us.saturating_mul(1 << self.asked_in_vain.min(16));
        let again_us = again_us.min(self.settings.ask_again_max_us.max(patience_us));
        let commands_us = self.in_flight.then(|| self.quiet_since_us.saturating_add(again_us));
        let probe_us = self.asked_us.map(|asked_us| asked_us.saturating_add(patience_us));
        [commands_us, probe_us].into_iter().flatten().min()
    }

    /// Doubts the path. Ask both now.
    pub(super) fn begin(&mut self, now_us: u64) {
        self.comparison = Some(Comparison {
            asked_us: now_us,
            began_us: now_us,
            answers: Answers::default(),
            untaken_us: None,
            answers_since: Answers::default(),
            nobody_since_us: now_us,
            answering_us: 0,
        });
    }

    /// A probe goes out on the path.
    pub(super) fn asked(&mut self, now_us: u64) {
        self.asked_us.get_or_insert(now_us);
        if let Some(comparison) = &mut self.comparison
            && comparison.untaken_us.is_none()
        {
            comparison.untaken_us = Some(now_us);
            comparison.answers_since = Answers::default();
        }
    }

    /// The peer's hardware took something that was sent on the path.
    #[inline]
    pub(super) fn send_completed(&mut self) {
        if let Some(comparison) = &mut self.comparison {
            comparison.untaken_us = None;
        }
    }

    /// Whether the hardware has taken all that was asked, so that it can be tried again.
    #[must_use]
    pub(super) fn all_taken(&self) -> bool {
        self.comparison.is_none_or(|c| c.untaken_us.is_none())
    }

    /// The other path answered a probe sent at `sent_us`; it has this smoothed round trip.
    pub(super) fn other_answered(&mut self, sent_us: u64, round_trip_us: Option<u64>, now_us: u64) {
        let Settings { pause_us, alarm_us, .. } = self.settings;
        let Some(comparison) = &mut self.comparison else { return };
        let paused_us = now_us.saturating_sub(comparison.nobody_since_us);
        comparison.answering_us = comparison.answering_us.saturating_add(paused_us.min(pause_us));
        if paused_us > alarm_us.max(round_trip_us.unwrap_or(0).saturating_mul(2)) {
            // Nobody answered for a while, and this is the first: whatever held up both may still hold up one.
            comparison.began_us = now_us;
            comparison.answering_us = 0;
            comparison.answers = Answers::default();
            comparison.answers_since = Answers::default();
        }
        comparison.nobody_since_us = now_us;
        if sent_us >= comparison.began_us {
            comparison.answers.add(now_us);
            if comparison.untaken_us.is_some_and(|untaken_us| sent_us >= untaken_us) {
                comparison.answers_since.add(now_us);
            }
        }
    }

    /// Whether the path is to be left, and why. Only true after both paths were emptied in this turn, the one
    /// that serves last: an answer that lies in a socket or completion queue must have been counted.
    #[must_use]
    pub(super) fn judge(&self) -> Option<Cause> {
        let comparison = self.comparison.as_ref()?;
        let untaken = self.silence.completes && comparison.untaken_us.is_some();
        if untaken && comparison.answers_since.suffice(&self.settings) {
            return Some(Cause::Silent);
        }
        let long = comparison.answering_us >= self.silence.unanswered_us;
        (long && comparison.answers.suffice(&self.settings)).then_some(Cause::Unanswered)
    }

    /// When the two paths were first asked.
    #[must_use]
    pub(super) fn compared_since_us(&self) -> u64 {
        self.comparison.as_ref().map_or(0, |c| c.asked_us)
    }

    /// Whether the paths are being compared.
    #[must_use]
    pub(super) fn is_comparing(&self) -> bool {
        self.comparison.is_some()
    }

    /// Since when neither path has answered.
    #[must_use]
    pub(super) fn nobody_since_us(&self) -> Option<u64> {
        self.comparison.as_ref().map(|c| c.nobody_since_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000;

    fn on_rdma() -> Suspicion {
        let mut s = Suspicion::new(Settings::DEFAULT, Settings::DEFAULT.rdma, false, 0);
        s.submitted(0);
        s
    }

    /// Doubts the path at this time, and asks both.
    fn doubted(at_us: u64) -> Suspicion {
        let mut s = on_rdma();
        s.begin(at_us);
        s.asked(at_us);
        s
    }

    /// The other path is asked and answers half a millisecond later, at each of these times.
    fn other(s: &mut Suspicion, times_ms: &[u64]) {
        times_ms.iter().for_each(|ms| s.other_answered(ms * MS - 500, Some(500), ms * MS));
    }

    #[test]
    fn commands_without_progress_are_doubted_after_ten_milliseconds_or_eight_round_trips() {
        let mut s = on_rdma();
        assert_eq!(s.due_us(None), Some(10 * MS));
        assert_eq!(s.due_us(Some(2 * MS)), Some(16 * MS));
        s.progress(true, 4 * MS);
        assert_eq!(s.due_us(None), Some(14 * MS));
        s.progress(false, 5 * MS);
        assert_eq!(s.due_us(None), None);
        s.submitted(900 * MS);
        assert_eq!(s.due_us(None), Some(910 * MS));
        s.submitted(905 * MS);
        assert_eq!(s.due_us(None), Some(910 * MS), "a second command doesn't excuse the first");
    }

    #[test]
    fn an_idle_probe_without_an_answer_is_doubted_too() {
        let mut s = Suspicion::new(Settings::DEFAULT, Settings::DEFAULT.rdma, false, 0);
        s.asked(5_000 * MS);
        assert_eq!(s.due_us(None), Some(5_010 * MS));
        s.answered(5_001 * MS);
        assert_eq!(s.due_us(None), None);
    }

    #[test]
    fn a_slow_disk_is_asked_about_ever_more_rarely() {
        let (mut s, mut asked_ms) = (on_rdma(), alloc::vec::Vec::new());
        for _ in 0..6 {
            let due = s.due_us(None).unwrap();
            asked_ms.push(due / MS);
            s.begin(due);
            s.asked(due);
            s.answered(due);
        }
        assert_eq!(asked_ms, [10, 30, 70, 150, 250, 350]);
        s.progress(true, 400 * MS);
        assert_eq!(s.due_us(None), Some(410 * MS));
    }

    #[test]
    fn three_answers_over_twenty_milliseconds_and_nothing_from_rdma_leave_it() {
        let mut s = doubted(10 * MS);
        other(&mut s, &[11, 21]);
        assert_eq!(s.judge(), None);
        other(&mut s, &[31]);
        assert_eq!(s.judge(), Some(Cause::Silent));
    }

    #[test]
    fn answers_that_lay_together_in_a_socket_count_as_one_moment() {
        let mut s = doubted(10 * MS);
        other(&mut s, &[11, 12, 13, 14, 15, 16, 17, 18, 19, 20]);
        assert_eq!(s.judge(), None);
        other(&mut s, &[30]);
        assert_eq!(s.judge(), None);
        other(&mut s, &[31]);
        assert_eq!(s.judge(), Some(Cause::Silent));
    }

    #[test]
    fn two_answers_are_too_few_however_far_apart() {
        let mut s = doubted(10 * MS);
        other(&mut s, &[11, 100]);
        assert_eq!(s.judge(), None);
    }

    #[test]
    fn answers_to_older_probes_prove_nothing() {
        let mut s = doubted(10 * MS);
        for ms in [11, 21, 31, 41] {
            s.other_answered(9 * MS, Some(500), ms * MS);
        }
        assert_eq!(s.judge(), None);
    }

    #[test]
    fn any_answer_on_rdma_ends_the_doubt() {
        for probe in [true, false] {
            let mut s = doubted(10 * MS);
            other(&mut s, &[11, 21, 31]);
            if probe {
                s.answered(31 * MS)
            } else {
                s.progress(true, 31 * MS)
            }
            assert_eq!(s.judge(), None);
            assert!(!s.is_comparing());
        }
    }

    #[test]
    fn completions_alone_save_rdma_for_a_second() {
        let mut s = doubted(10 * MS);
        s.send_completed();
        for ms in (11..=1_001).step_by(10) {
            other(&mut s, &[ms]);
            assert_eq!(s.judge(), None, "at {ms} ms");
        }
        other(&mut s, &[1_011]);
        assert_eq!(s.judge(), Some(Cause::Unanswered));
    }

    #[test]
    fn a_cut_after_a_completion_is_judged_from_the_next_probe() {
        let mut s = doubted(10 * MS);
        other(&mut s, &[11]);
        s.send_completed();
        assert!(s.all_taken());
        other(&mut s, &[21, 31]);
        s.asked(32 * MS);
        s.other_answered(31 * MS, Some(500), 33 * MS);
        other(&mut s, &[43, 53]);
        assert_eq!(s.judge(), None, "answers to questions from before that probe don't count");
        other(&mut s, &[63]);
        assert_eq!(s.judge(), Some(Cause::Silent));
    }

    #[test]
    fn a_peer_that_stalls_within_the_second_is_given_another() {
        let mut s = doubted(10 * MS);
        s.send_completed();
        other(&mut s, &[11, 21, 31]);
        // Two seconds of nothing from both.
        other(&mut s, &[2_031, 2_041, 2_051, 2_061]);
        assert_eq!(s.judge(), None);
    }

    /// A pause that is too short for the comparison to begin anew counts as what was seen, not as what it took.
    #[test]
    fn pauses_of_the_peer_are_not_held_against_rdma() {
        let mut s = doubted(10 * MS);
        s.send_completed();
        for pause in 1..=15 {
            other(&mut s, &[pause * 290, pause * 290 + 10]);
            assert_eq!(s.judge(), None, "after {pause} pauses");
        }
    }

    /// But a path is not saved for ever by a standby with a long round trip.
    #[test]
    fn answers_a_quarter_of_a_second_apart_are_enough_in_the_end() {
        let mut s = doubted(10 * MS);
        s.send_completed();
        let last = (1..100).map(|n| 10 + n * 250).find(|&ms| {
            s.other_answered((ms - 240) * MS, Some(240 * MS), ms * MS);
            s.judge().is_some()
        });
        assert_eq!(last, Some(5_010));
    }

    #[test]
    fn the_first_answer_after_a_silence_of_both_begins_the_comparison_anew() {
        let mut s = doubted(10 * MS);
        other(&mut s, &[11, 21]);
        assert_eq!(s.nobody_since_us(), Some(21 * MS));
        other(&mut s, &[500]);
        assert_eq!(s.judge(), None, "without the silence this would be the third answer");
        other(&mut s, &[510, 520]);
        assert_eq!(s.judge(), None, "the first answer was to an older probe");
        other(&mut s, &[530]);
        assert_eq!(s.judge(), Some(Cause::Silent));
    }

    #[test]
    fn a_tcp_path_is_left_only_after_fifteen_seconds_of_silence() {
        let mut s = Suspicion::new(Settings::DEFAULT, Settings::DEFAULT.tcp, true, 0);
        assert_eq!(s.due_us(None), Some(200 * MS));
        s.begin(200 * MS);
        s.asked(200 * MS);
        for ms in (210..15_200).step_by(10) {
            other(&mut s, &[ms]);
            assert_eq!(s.judge(), None, "at {ms} ms");
        }
        other(&mut s, &[15_200]);
        assert_eq!(s.judge(), Some(Cause::Unanswered));
    }
}
