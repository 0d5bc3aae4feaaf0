//! What can go wrong with a command, sorted by who is to blame. (Attaching has errors of its own: see
//! [`crate::ConnectError`].)

use std::io;

use twinrail_protocol::{Opcode, Status, Violation};

use crate::arena::ArenaError;

/// Who has to act on an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blame {
    /// The caller: the request can't be right, and nothing was sent.
    Caller,
    /// The target or the storage behind it.
    Target,
    /// The way between the two.
    Network,
    /// A side that doesn't keep to the protocol.
    Protocol,
}

/// A command, or a call that took several, failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The caller's request can't be right; nothing was sent.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// The target answered with an error.
    #[error("{opcode} failed: {} ({status})", advice(*status))]
    Target {
        /// The command.
        opcode: Opcode,
        /// The target's word.
        status: Status,
    },
    /// COMPARE AND WRITE found other bytes than were expected, and wrote nothing.
    #[error("compare_and_write: the volume differs from what was expected at byte {offset}; read it again")]
    CompareFailed {
        /// The first byte of the volume that differs.
        offset: u64,
    },
    /// The session ended while a change was on its way: it may have been executed, or not, or only in part.
    #[error("the outcome of {opcode} is unknown: {end}; read the range, or write it again")]
    OutcomeUnknown {
        /// The command.
        opcode: Opcode,
        /// How the session ended.
        end: PathEnd,
    },
    /// The session has ended; the command changed nothing.
    #[error("{opcode} was not served: {end}; attach the volume again")]
    ConnectionLost {
        /// The command.
        opcode: Opcode,
        /// How the session ended.
        end: PathEnd,
    },
    /// The session had ended before it was closed.
    #[error("the session had ended before it was closed: {end}")]
    Ended {
        /// How.
        end: PathEnd,
    },
    /// The target answered a command with something that can't be.
    #[error("the reply to {opcode} can't be: {detail}; the target doesn't keep to the protocol")]
    Protocol {
        /// The command.
        opcode: Opcode,
        /// What was wrong.
        detail: &'static str,
    },
    /// Something took longer than the options allow.
    #[error("{what} took longer than {timeout_ms} ms")]
    Timeout {
        /// What.
        what: &'static str,
        /// The limit in milliseconds.
        timeout_ms: u64,
    },
}

/// Why a request was turned down before anything was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// An empty range.
    #[error("{opcode} of no bytes at byte {offset}: give a length")]
    Empty {
        /// The command.
        opcode: Opcode,
        /// Offset in bytes.
        offset: u64,
    },
    /// Offset or length isn't a multiple of the logical block.
    #[error(
        "{opcode} of {length} bytes at byte {offset}: both must be multiples of the volume's block of {block} bytes"
    )]
    Misaligned {
        /// The command.
        opcode: Opcode,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Logical block in bytes.
        block: u32,
    },
    /// The range ends behind the volume's end.
    #[error("{opcode} of {length} bytes at byte {offset} ends behind the volume, which has {size} bytes")]
    OutOfRange {
        /// The command.
        opcode: Opcode,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Size of the volume in bytes.
        size: u64,
    },
    /// The range is longer than the command takes.
    #[error("{opcode} of {length} bytes: {most} is the most; do it in pieces")]
    TooLarge {
        /// The command.
        opcode: Opcode,
        /// Length in bytes.
        length: u64,
        /// Most bytes.
        most: u64,
    },
    /// The volume, or this attach of it, is read-only.
    #[error("{opcode} on a volume that is attached read-only: attach it exclusive or shared")]
    ReadOnly {
        /// The command.
        opcode: Opcode,
    },
    /// The flags don't go with the command.
    #[error("{opcode} with flags that don't go with it")]
    Flags {
        /// The command.
        opcode: Opcode,
    },
    /// A command that this library doesn't know.
    #[error("{opcode:?} is no command")]
    Opcode {
        /// The command.
        opcode: Opcode,
    },
    /// The buffer's length doesn't go with the command.
    #[error("{opcode} of {length} bytes with a buffer of {buffer}: {needed} are needed")]
    Buffer {
        /// The command.
        opcode: Opcode,
        /// Length of the range in bytes.
        length: u64,
        /// Length of the buffer in bytes.
        buffer: u64,
        /// Length that the buffer should have in bytes.
        needed: u64,
    },
    /// There is no memory for the data.
    #[error(transparent)]
    Memory(#[from] ArenaError),
    /// The volume was closed by its user.
    #[error("{opcode} on a volume that was closed")]
    Closed {
        /// The command.
        opcode: Opcode,
    },
}

/// Why a path has ended, or the session with all its paths.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathEnd {
    /// The socket says so.
    #[error("the connection was lost ({text}){}", perhaps_restarted(*kind))]
    Io {
        /// Kind of the error.
        kind: io::ErrorKind,
        /// What the system calls it.
        text: String,
    },
    /// The target closed the connection without a word.
    #[error("the connection was closed without a word; the target may have died or been restarted")]
    ClosedByTarget,
    /// The target said that it ends the connection.
    #[error("the target ended the connection: {status}{}{text}", if text.is_empty() { "" } else { ", " })]
    Disconnected {
        /// Why.
        status: Status,
        /// The same for people; may be empty.
        text: String,
    },
    /// The target broke a rule of the protocol.
    #[error("the target broke the protocol: {0}")]
    Violation(Violation),
    /// Another queue of the session found that the session has ended.
    #[error("another connection of the session ended first")]
    Sibling,
    /// The target doesn't take the session back after its connection was lost.
    #[error("{lost}; the target doesn't take the session back: {text} ({status})")]
    NotTakenBack {
        /// Why.
        status: Status,
        /// The same for people.
        text: String,
        /// How the connection was lost before.
        lost: Box<PathEnd>,
    },
    /// There was no connection for as long as fail-fast allows.
    #[error("{lost}; no connection for {limit_ms} ms (fail-fast){}", last_attempt(attempt.as_deref()))]
    FailFast {
        /// The limit in milliseconds.
        limit_ms: u64,
        /// How the connection was lost before.
        lost: Box<PathEnd>,
        /// What became of the last attempt to get another one, for people.
        attempt: Option<String>,
    },
    /// It didn't answer, while another connection of the same queue did; or nothing of it came back.
    #[error("the connection didn't answer any more")]
    Silent,
    /// The target said on another connection that it has lost this one.
    #[error("the target has lost the connection")]
    LostByTarget,
    /// It was closed from this side, in order.
    #[error("the volume was closed")]
    Closed,
    /// It was given up from this side, before everything had ended.
    #[error("the connection was given up")]
    Aborted,
}

impl PathEnd {
    /// Who has to act.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Io { .. } | Self::Sibling | Self::FailFast { .. } | Self::Silent | Self::LostByTarget => {
                Blame::Network
            }
            Self::ClosedByTarget | Self::Disconnected { .. } | Self::NotTakenBack { .. } => Blame::Target,
            Self::Violation(_) => Blame::Protocol,
            Self::Closed | Self::Aborted => Blame::Caller,
        }
    }
}

impl PathEnd {
    /// How it began: of a session that couldn't be brought back, how its connection was lost.
    #[must_use]
    pub fn origin(&self) -> &Self {
        match self {
            Self::NotTakenBack { lost, .. } | Self::FailFast { lost, .. } => lost.origin(),
            other => other,
        }
    }

    /// Whether no path of the session is worth another try.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::Disconnected { status, .. } => ends_the_session(*status),
            Self::Io { .. } | Self::ClosedByTarget | Self::Violation(_) | Self::Silent | Self::LostByTarget => false,
            Self::NotTakenBack { .. } | Self::FailFast { .. } => true,
            Self::Sibling | Self::Closed | Self::Aborted => true,
        }
    }
}

/// Whether a target that says this will never take the session back, however often it is asked. What an operator
/// can mend is held until he has.
pub(crate) fn ends_the_session(status: Status) -> bool {
    const FINAL: [Status; 6] = [
        Status::SESSION_LOST,
        Status::BAD_SECRET,
        Status::PREEMPTED,
        Status::TAKEN_OVER,
        Status::WRONG_VOLUME,
        Status::CLOSED,
    ];
    FINAL.contains(&status)
}

impl From<io::Error> for PathEnd {
    fn from(error: io::Error) -> Self {
        Self::Io { kind: error.kind(), text: error.to_string() }
    }
}

impl From<Violation> for PathEnd {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl From<ArenaError> for Error {
    fn from(error: ArenaError) -> Self {
        Self::Rejected(Rejection::Memory(error))
    }
}

impl Error {
    /// Who has to act.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Rejected(_) | Self::CompareFailed { .. } => Blame::Caller,
            Self::Target { status, .. } if status.0 >> 8 == 1 => Blame::Caller,
            Self::Target { .. } | Self::Timeout { .. } => Blame::Target,
            Self::OutcomeUnknown { end, .. } | Self::ConnectionLost { end, .. } | Self::Ended { end } => end.blame(),
            Self::Protocol { .. } => Blame::Protocol,
        }
    }

    /// The error of a command that ended with `status`, which isn't OK; `end` is how the session ended, if it
    /// has.
    pub(crate) fn of(opcode: Opcode, status: Status, result: u64, end: impl FnOnce() -> PathEnd) -> Self {
        match status {
            Status::CONNECTION_LOST if opcode.changes() || opcode == Opcode::FLUSH => {
                Self::OutcomeUnknown { opcode, end: end() }
            }
            Status::CONNECTION_LOST => Self::ConnectionLost { opcode, end: end() },
            Status::COMPARE_FAILED => Self::CompareFailed { offset: result },
            _ => Self::Target { opcode, status },
        }
    }
}

/// A reset is what a target that died leaves behind.
fn perhaps_restarted(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "; the target may have died or been restarted",
        _ => "",
    }
}

fn last_attempt(attempt: Option<&str>) -> String {
    attempt.map_or(String::new(), |attempt| format!("; the last attempt: {attempt}"))
}

/// What to do about a status of the target.
fn advice(status: Status) -> &'static str {
    match status {
        Status::IO_ERROR => "the target's storage reported an I/O error; its log names the device",
        Status::NO_SPACE => "the target's storage is full; make room there",
        Status::FLUSH_FAILED => {
            "a sync of the target's storage failed, so that unflushed writes may be lost: close the volume, attach it \
             again and write again what was not flushed"
        }
        Status::NOT_SUPPORTED => "the target's storage can't do this",
        Status::READ_ONLY => "the volume is read-only; attach it exclusive or shared",
        Status::PAYLOAD_CRC => "the payload arrived damaged four times; look for a faulty network card or memory",
        Status::PREEMPTED => "another writer has taken the volume",
        Status::OUT_OF_RANGE => "the range ends behind the volume's end; it was made smaller",
        _ => "the target turned it down",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_change_is_unknown_and_a_lost_read_is_not_served() {
        let end = || PathEnd::ClosedByTarget;
        for opcode in Opcode::ALL {
            let error = Error::of(opcode, Status::CONNECTION_LOST, 0, end);
            let unknown = matches!(error, Error::OutcomeUnknown { .. });
            assert_eq!(unknown, opcode.changes() || opcode == Opcode::FLUSH, "{error}");
        }
    }

    #[test]
    fn a_target_that_had_died_was_said_to_have_logged_why() {
        let reset = io::Error::from(io::ErrorKind::ConnectionReset);
        for end in [PathEnd::ClosedByTarget, PathEnd::from(reset)] {
            let text = end.to_string();
            assert!(text.contains("may have died or been restarted") && !text.contains("log"), "{text}");
        }
        let timeout = PathEnd::from(io::Error::from(io::ErrorKind::TimedOut)).to_string();
        assert!(!timeout.contains("died"), "{timeout}");
    }

    #[test]
    fn fail_fast_did_not_tell_why_the_target_refused() {
        let attempt = Some("shelf:4450 refuses while dialing: 64 connections (limit_reached)".to_owned());
        let end = PathEnd::FailFast { limit_ms: 1000, lost: Box::new(PathEnd::Silent), attempt };
        assert!(end.to_string().ends_with("(limit_reached)"), "{end}");
    }

    #[test]
    fn messages_say_what_and_what_to_do() {
        let error = Error::from(ArenaError::TooLong { asked: 9, longest: 8 });
        assert!(error.to_string().contains("arena_bytes"));
        let error = Error::of(Opcode::FLUSH, Status::FLUSH_FAILED, 0, || PathEnd::Closed);
        assert!(error.to_string().starts_with("flush failed: ") && error.to_string().contains("attach it again"));
        assert_eq!(error.blame(), Blame::Target);
        let end = PathEnd::Disconnected { status: Status::DRAINING, text: "back in 5 s".into() };
        assert_eq!(end.to_string(), "the target ended the connection: draining, back in 5 s");
    }
}
