//! How long commands stand still in the worst case, computed from the settings.
//!
//! Shown at start and in `status`, so that nobody has to measure what was configured. A switch has three parts: the
//! loss is noticed, both sides fence the old path, and one round trip activates the standby.

use super::settings::Settings;

/// What the settings don't say.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings {
    /// Longest round trip on RDMA in microseconds.
    pub rdma_round_trip_us: u64,
    /// Longest round trip on TCP in microseconds.
    pub tcp_round_trip_us: u64,
    /// Longest fence of one side in microseconds; a queue pair is destroyed after 100 ms (I3).
    pub fence_us: u64,
    /// After how many microseconds the hardware gives a request up: (retries + 1) x acknowledgement timeout.
    pub hardware_us: u64,
    /// Longest turn of the initiator's loop in microseconds.
    pub turn_us: u64,
}

impl Default for Surroundings {
    fn default() -> Self {
        // Timeout 14 is 4.096 us x 2^14 = 67 ms, and seven attempts are made.
        let (rdma_round_trip_us, tcp_round_trip_us) = (1_000, 1_000);
        Self { rdma_round_trip_us, tcp_round_trip_us, fence_us: 100_000, hardware_us: 7 * 67_109, turn_us: 1_000 }
    }
}

/// Longest times in microseconds that commands stand still while RDMA is left for a standby that works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blackout {
    /// The hardware or the peer says that the path is lost.
    pub told_us: u64,
    /// Nothing passes any more and nobody says so.
    pub silent_us: u64,
    /// The hardware takes what is sent, and no answer comes.
    pub unanswered_us: u64,
}

impl Blackout {
    /// Computes it.
    #[must_use]
    pub fn worst_case(settings: &Settings, surroundings: &Surroundings) -> Self {
        let Surroundings { rdma_round_trip_us, tcp_round_trip_us, fence_us, hardware_us, turn_us } = *surroundings;
        let add = |parts: &[u64]| parts.iter().fold(0u64, |sum, part| sum.saturating_add(*part));
        // This side's fence, then the target's within the round trip.
        let switch_us = add(&[fence_us, turn_us, tcp_round_trip_us, fence_us, turn_us]);
        // A question each time that the last one is old enough and answered, and one more if they come too close.
        let step_us = settings.compare_every_us.max(tcp_round_trip_us).saturating_add(turn_us);
        let steps = settings.answers.saturating_sub(1).max(
            u32::try_from(settings.answers_over_us.div_ceil(settings.compare_every_us.max(1))).unwrap_or(u32::MAX),
        );
        let compare_us = add(&[step_us.saturating_mul(u64::from(steps) + 1), tcp_round_trip_us, turn_us]);
        let patience_us = settings.rdma.patience_us(Some(rdma_round_trip_us));
        // A command that waits for a disk may have made the questions rare just before the cut.
        let doubt_us = patience_us.max(settings.ask_again_max_us).saturating_add(turn_us);
        // If the cut comes right after a probe was taken, the next one is what isn't.
        let silent_us = add(&[doubt_us, step_us, compare_us]);
        // Of each step only so much counts.
        let counted_us = step_us.min(settings.pause_us).max(1);
        let answering_us = settings.rdma.unanswered_us.div_ceil(counted_us).saturating_mul(step_us);
        let unanswered_us = add(&[doubt_us, answering_us, step_us, tcp_round_trip_us, turn_us]);
        Self {
            told_us: switch_us,
            // Probes are requests, so the hardware's own limit holds as well.
            silent_us: silent_us.min(add(&[doubt_us, hardware_us, turn_us])).saturating_add(switch_us),
            unanswered_us: unanswered_us.saturating_add(switch_us),
        }
    }

    /// The longest of them.
    #[must_use]
    pub fn longest_us(&self) -> u64 {
        self.told_us.max(self.silent_us).max(self.unanswered_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_switch_in_less_than_half_a_second_when_nothing_passes() {
        let b = Blackout::worst_case(&Settings::DEFAULT, &Surroundings::default());
        assert_eq!(b.told_us, 203_000);
        assert!((300_000..400_000).contains(&b.silent_us), "{b:?}");
        assert!((1_300_000..1_400_000).contains(&b.unanswered_us), "{b:?}");
        assert_eq!(b.longest_us(), b.unanswered_us);
    }

    #[test]
    fn each_setting_that_makes_detection_slower_makes_it_longer() {
        let of = |settings: &Settings| Blackout::worst_case(settings, &Surroundings::default());
        let (base, d) = (of(&Settings::DEFAULT), Settings::DEFAULT);
        assert!(of(&Settings { ask_again_max_us: 200_000, ..d }).silent_us > base.silent_us);
        assert!(of(&Settings { answers: 9, ..d }).silent_us > base.silent_us);
        assert!(of(&Settings { answers_over_us: 90_000, ..d }).silent_us > base.silent_us);
        assert!(of(&Settings { compare_every_us: 30_000, ..d }).silent_us > base.silent_us);
        assert!(of(&Settings { pause_us: 5_000, ..d }).unanswered_us > base.unanswered_us);
        let mut slow = d;
        slow.rdma.unanswered_us *= 2;
        assert!(of(&slow).unanswered_us > base.unanswered_us);
    }

    #[test]
    fn absurd_settings_overflow_nothing() {
        let mut settings = Settings { compare_every_us: u64::MAX, answers: u32::MAX, ..Settings::DEFAULT };
        settings.rdma.unanswered_us = u64::MAX;
        assert_eq!(Blackout::worst_case(&settings, &Surroundings::default()).longest_us(), u64::MAX);
    }
}
