//! Every number of the path policy, with its reason.
//!
//! Times are microseconds. All of them are the initiator's own: nothing on the wire depends on them.

/// When a path that serves is silent enough to be doubted, and when to be left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// No sooner than after this long without progress is a path doubted.
    pub quiet_us: u64,
    /// Nor sooner than after as many smoothed round trips of it.
    pub quiet_round_trips: u32,
    /// But no later than this, so that a few slow answers don't make the switch slow for minutes, and the
    /// worst case can be computed.
    pub quiet_max_us: u64,
    /// Whether the rail tells when the peer's hardware has taken what was sent. If so, a path is left as soon
    /// as the other path gave its answers and this one neither an answer nor a completion.
    pub completes: bool,
    /// Otherwise it is left after this long without an answer, counting only time in which the other path
    /// answered.
    pub unanswered_us: u64,
}

impl Silence {
    /// How long a path may make no progress before it is doubted, with this smoothed round trip.
    #[must_use]
    pub fn patience_us(&self, round_trip_us: Option<u64>) -> u64 {
        let trips = round_trip_us.unwrap_or(0).saturating_mul(self.quiet_round_trips.into());
        self.quiet_us.max(trips.min(self.quiet_max_us))
    }
}

/// The path policy in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Silence of an RDMA path that serves.
    pub rdma: Silence,
    /// Silence of a TCP path that serves.
    pub tcp: Silence,
    /// Answers of the other path that make a comparison.
    pub answers: u32,
    /// How far apart the first and the last of them are at least.
    pub answers_over_us: u64,
    /// How often the two paths are asked while they are compared and answer.
    pub compare_every_us: u64,
    /// How often a path is asked while it doesn't answer.
    pub ask_silent_every_us: u64,
    /// What a pause between two answers of the other path counts at most as time in which it answered.
    pub pause_us: u64,
    /// A path that answers but whose commands make no progress is asked again after twice as long each time,
    /// at most after this.
    pub ask_again_max_us: u64,
    /// No path, or none that answers, for this long raises the alarm and lets paths be dialed in parallel. A
    /// comparison begins anew with the next answer (after two round trips of the other path if that is longer).
    pub alarm_us: u64,
    /// How often an idle or standby path is probed.
    pub idle_probe_us: u64,
    /// A dial that takes longer than this has failed.
    pub dial_us: u64,
    /// An activation that takes longer than this has failed.
    pub activate_us: u64,
    /// Longest wait after the first failed dial.
    pub backoff_us: u64,
    /// Longest wait after any number of them.
    pub backoff_max_us: u64,
    /// Least time between an activation and the next dial on that rail, once. It doubles with each path that lasts
    /// less than [`Self::lasting_us`].
    pub redial_us: u64,
    /// It doubles up to this if the last path completed commands,
    pub redial_useful_us: u64,
    /// and else up to this.
    pub redial_max_us: u64,
    /// A path that served for so long has lasted: what speaks against its rail is forgotten.
    pub lasting_us: u64,
    /// How long a fresh RDMA path is watched after the first flap before it serves.
    pub settle_us: u64,
    /// Each further flap doubles that, up to this.
    pub settle_max_us: u64,
    /// Probes in a row that a fresh RDMA path has to answer before it serves.
    pub good_probes: u32,
    /// A probe answered later than this wasn't good, and they count from the start.
    pub good_within_us: u64,
    /// Each such time that RDMA has served without a break takes one flap off the count.
    pub stable_us: u64,
    /// With a time: no path for this long ends the session (fail-fast); paths that complete no command and don't last
    /// don't interrupt it. Without: commands are held for ever.
    pub fail_fast_us: Option<u64>,
}

impl Settings {
    /// What applies when nothing is configured.
    pub const DEFAULT: Self = Self {
        rdma: Silence {
            // A hundred times the round trip of a storage network, and a tenth of what a person notices.
            quiet_us: 10_000,
            // Over a long line 10 ms is less than a round trip; eight of them are no jitter.
            quiet_round_trips: 8,
            // A quarter of the second or so that the hardware takes by itself.
            quiet_max_us: 250_000,
            completes: true,
            // The peer's hardware takes what is sent: only its answers are missing. They may stand behind all
            // that a queue can have under way: 32 MiB take 270 ms at a gigabit a second, so this is four times
            // the worst line that RDMA is used on.
            unanswered_us: 1_000_000,
        },
        tcp: Silence {
            // Linux repeats a lost segment after 200 ms at the earliest: sooner than that nothing is odd.
            quiet_us: 200_000,
            quiet_round_trips: 8,
            quiet_max_us: 1_000_000,
            // A socket takes bytes whether or not the peer lives.
            completes: false,
            // As long as the target takes to count a path as lost, and five segment repetitions: 32 MiB arrive
            // in this time at 18 Mbit/s.
            unanswered_us: 15_000_000,
        },
        // One answer may have been on its way, two may be chance.
        answers: 3,
        // Three answers that lay together in a socket say no more than one. 32 MiB pass in 27 ms at 10 Gbit/s;
        // with the 10 ms before, an RDMA path had more than that.
        answers_over_us: 20_000,
        // So that three answers come over 20 ms.
        compare_every_us: 10_000,
        // Enough to notice at once that a path is back, and nothing for the network.
        ask_silent_every_us: 100_000,
        // Five steps of a comparison. In a longer pause the peer may have stalled, and two seconds of that say
        // no more against the other path than this.
        pause_us: 50_000,
        // Ten questions a second cost nothing, even if all commands of a thousand queues wait for a slow disk.
        ask_again_max_us: 100_000,
        // Longer than one repetition of a lost segment, shorter than what makes people call.
        alarm_us: 300_000,
        // Rare enough to cost nothing with thousands of idle sessions.
        idle_probe_us: crate::liveness::Liveness::PERIOD_MS * 1_000,
        // Three steps of the handshake, 5 s each (SPEC.md, "Timers").
        dial_us: 15_000_000,
        // Longer than a peer's process is ever expected to stall (2 s); a target fences within 100 ms.
        activate_us: 3_000_000,
        // A listener that was just restarted is there in no time.
        backoff_us: 100_000,
        // Ten attempts within a lease (60 s) and within the grace of a target that was restarted.
        backoff_max_us: 5_000_000,
        // A single loss costs nothing that anybody notices.
        redial_us: 10_000,
        // Work goes on, in pieces.
        redial_useful_us: 100_000,
        // A target that takes each path and drops it at once is asked once a second.
        redial_max_us: 1_000_000,
        // Longer than the wait for the next.
        lasting_us: 1_000_000,
        // A cable that is being plugged in bounces for less.
        settle_us: 1_000_000,
        // A rail that fails each minute costs one switch a minute.
        settle_max_us: 60_000_000,
        good_probes: 5,
        // A rail that needs longer is not better than what it would replace.
        good_within_us: 100_000,
        // As long as the longest settle time: whoever lasts longer than that flaps no more.
        stable_us: 60_000_000,
        // A block device that errors turns file systems read-only.
        fail_fast_us: None,
    };
}

impl Default for Settings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_ten_milliseconds_or_eight_round_trips_but_has_an_end() {
        let rdma = Settings::DEFAULT.rdma;
        assert_eq!(rdma.patience_us(None), 10_000);
        assert_eq!(rdma.patience_us(Some(1_250)), 10_000);
        assert_eq!(rdma.patience_us(Some(2_000)), 16_000);
        assert_eq!(rdma.patience_us(Some(1_000_000)), 250_000);
    }

    /// An end below the beginning doesn't undo the beginning.
    #[test]
    fn patience_is_never_below_its_least() {
        let odd = Silence { quiet_max_us: 1, ..Settings::DEFAULT.rdma };
        assert_eq!(odd.patience_us(Some(5_000)), 10_000);
    }
}
