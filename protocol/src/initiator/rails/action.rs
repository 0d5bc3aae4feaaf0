//! What the path policy wants done, and why.

use crate::ids::Epoch;
use crate::wire::Rail;

/// One connection of a queue. A number is used once, so that late news of a path that is gone can't be taken
/// for news of its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PathId {
    /// The rail that it runs on.
    pub rail: Rail,
    /// Counts all paths of the queue from 1.
    pub number: u32,
}

/// Why a path was left, or taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// There was none before.
    Start,
    /// The connection was closed or reset (a CM disconnect included).
    Disconnected,
    /// A request failed at the queue pair.
    FailedCompletion,
    /// The device is gone or said that it failed.
    Device,
    /// The port is down.
    Port,
    /// The peer sent what it must not.
    Violation,
    /// The peer lost it, and said so on the standby.
    PeerSaid,
    /// It was silent while another path answered.
    Silent,
    /// The peer's hardware took what was sent, but no answer came while another path answered.
    Unanswered,
    /// Its activation was refused, or not answered in time.
    ActivationFailed,
    /// The session is lost, and all its paths with it.
    SessionLost,
    /// RDMA works again.
    Return,
}

impl Cause {
    /// The name used in logs and metric labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Disconnected => "disconnected",
            Self::FailedCompletion => "failed_completion",
            Self::Device => "device",
            Self::Port => "port",
            Self::Violation => "violation",
            Self::PeerSaid => "peer_said",
            Self::Silent => "silent",
            Self::Unanswered => "unanswered",
            Self::ActivationFailed => "activation_failed",
            Self::SessionLost => "session_lost",
            Self::Return => "return",
        }
    }
}

/// What the driver is to do. Times are microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open this path and bring it to where it may be activated (HELLO to STANDING, or to ATTACHED if there is
    /// no session yet). Answer with `dialed` or `dial_failed`.
    Dial {
        /// The new path; close what is opened for it when [`Action::Close`] comes.
        path: PathId,
    },
    /// Send PROBE, on RDMA with a completion that is reported.
    Probe {
        /// On this path.
        path: PathId,
        /// Comes back with the answer.
        token: u64,
    },
    /// Send nothing more on this path, drain it (I3; replies that come out count) and close it. Answer with
    /// `fenced`; until then no other path is activated.
    Fence {
        /// The path that served, or was to.
        path: PathId,
        /// Why it is left.
        cause: Cause,
    },
    /// Send ACTIVATE. Answer with `activated` or `activation_failed`.
    Activate {
        /// On this path.
        path: PathId,
        /// With this epoch.
        epoch: Epoch,
    },
    /// Send PATH_LOST.
    Say {
        /// On this path.
        path: PathId,
        /// Epoch of the path that is lost.
        lost: Epoch,
    },
    /// Close this path, which never served. No answer.
    Close {
        /// The path.
        path: PathId,
    },
    /// RDMA could serve again: call `turn_given` when no other queue is returning.
    AskTurn,
    /// The turn that was asked for isn't needed any more.
    EndTurn,
    /// Commands are held: there is no path, or none answers.
    Alarm {
        /// Since when.
        since_us: u64,
    },
    /// They aren't any more.
    AlarmOver {
        /// How long they were.
        lasted_us: u64,
    },
    /// Another path serves: worth a line in the log.
    Serving {
        /// The rail before, if there was one.
        from: Option<Rail>,
        /// The rail now.
        to: Rail,
        /// Why.
        cause: Cause,
        /// From the last progress until the old path was given up; 0 if nothing was in flight.
        detection_us: u64,
        /// From the last progress, or from the decision if nothing was in flight, until the new path served.
        blackout_us: u64,
    },
    /// No path for as long as fail-fast allows: end the session. Nothing comes after it.
    GiveUp,
}
