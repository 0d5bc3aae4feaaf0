//! Why the target refuses an attach or an activation: a status for the program, a text for the person.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::holders::HeldBy;
use crate::ids::{QueueId, SessionId, VolumeId};
use crate::status::Status;
use crate::wire::AttachMode;

/// Holders named in one refusal; the rest is counted.
const MOST_NAMES: usize = 4;

/// When whatever is only for a moment is worth another try, in milliseconds.
const SOON_MS: u32 = 1000;

/// Why. The volume that it is about is the one that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The target takes nothing new.
    Draining,
    /// A mode of another version.
    BadMode(AttachMode),
    /// A session without queues.
    NoQueues,
    /// Not both of preempt and takeover.
    PreemptAndTakeover,
    /// The secret that takes the place of another is none, or the same.
    BadNextSecret,
    /// There is no volume in this place.
    NoVolume,
    /// The volume has another UUID than the one expected.
    WrongVolume {
        /// Which it has.
        is: VolumeId,
        /// Which was expected.
        expected: VolumeId,
    },
    /// A writer for a volume that nobody can write.
    VolumeReadOnly,
    /// Another writer attached since.
    GenerationPast {
        /// The volume's.
        current: u64,
        /// The initiator's.
        seen: u64,
    },
    /// The volume's generation was never as high as the initiator says: the target's state was lost, or is an old
    /// copy.
    StateIsOlder {
        /// The volume's.
        current: u64,
        /// The initiator's.
        seen: u64,
    },
    /// Another writer ended the session while it waited for its answer.
    Preempted,
    /// The target has just started, and others held the volume.
    Grace {
        /// Until others may attach, in milliseconds.
        left_ms: u64,
    },
    /// Present holders don't go with this one.
    Held {
        /// The mode asked for.
        wanted: AttachMode,
        /// Who they are.
        by: Vec<HeldBy>,
    },
    /// Too many sessions.
    TooManySessions {
        /// The limit.
        limit: usize,
    },
    /// Too many paths.
    TooManyPaths {
        /// The limit.
        limit: usize,
    },
    /// The secret isn't the session's.
    BadSecret {
        /// Which session.
        session: SessionId,
    },
    /// The secret was the session's, until somebody replaced it.
    TakenOver {
        /// Which session.
        session: SessionId,
    },
    /// The session exists and is another attach.
    OtherAttach {
        /// Which session.
        session: SessionId,
        /// How it holds its volume.
        mode: AttachMode,
    },
    /// No such session.
    SessionLost {
        /// Which.
        session: SessionId,
    },
    /// The session has no such queue.
    NoQueue {
        /// Which session.
        session: SessionId,
        /// Which queue.
        queue: QueueId,
        /// How many it has.
        queues: u16,
    },
    /// Commands of older sessions haven't ended at storage, or the volume's record isn't stored yet.
    StillWaits {
        /// How long it waited, in milliseconds.
        waited_ms: u64,
    },
    /// The volume's record can't be stored.
    NotStored,
}

impl Refusal {
    /// The status to answer with.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            Self::Draining => Status::DRAINING,
            Self::BadMode(_) | Self::NoQueues | Self::PreemptAndTakeover | Self::BadNextSecret => Status::BAD_PARAMETER,
            Self::OtherAttach { .. } | Self::NoQueue { .. } => Status::BAD_PARAMETER,
            Self::NoVolume => Status::UNKNOWN_VOLUME,
            Self::WrongVolume { .. } => Status::WRONG_VOLUME,
            Self::VolumeReadOnly => Status::VOLUME_READ_ONLY,
            Self::GenerationPast { .. } | Self::StateIsOlder { .. } | Self::Preempted => Status::PREEMPTED,
            Self::TakenOver { .. } => Status::PREEMPTED,
            Self::Grace { .. } => Status::GRACE,
            Self::Held { .. } | Self::StillWaits { .. } => Status::VOLUME_HELD,
            Self::TooManySessions { .. } | Self::TooManyPaths { .. } => Status::LIMIT_REACHED,
            Self::BadSecret { .. } => Status::BAD_SECRET,
            Self::SessionLost { .. } => Status::SESSION_LOST,
            Self::NotStored => Status::IO_ERROR,
        }
    }

    /// When to try again, in milliseconds; 0 when trying again alone doesn't help.
    #[must_use]
    pub fn retry_after_ms(&self) -> u32 {
        match self {
            Self::Grace { left_ms } => u32::try_from(*left_ms).unwrap_or(u32::MAX),
            Self::Draining | Self::TooManySessions { .. } | Self::TooManyPaths { .. } => SOON_MS,
            Self::StillWaits { .. } | Self::NotStored => SOON_MS,
            _ => 0,
        }
    }
}

impl Refusal {
    /// The text, with the volume's name in it.
    #[must_use]
    pub fn about<'a>(&'a self, volume: &'a str) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| self.tell(f, format_args!("volume {volume:?}")))
    }

    fn tell(&self, f: &mut fmt::Formatter<'_>, volume: fmt::Arguments<'_>) -> fmt::Result {
        match self {
            Self::Draining => f.write_str("this target is about to stop"),
            Self::BadMode(mode) => {
                write!(f, "there is no attach mode {}; use exclusive, shared or read-only", mode.0)
            }
            Self::NoQueues => f.write_str("a session needs at least one queue"),
            Self::PreemptAndTakeover => f.write_str("an attach is a preempt or a takeover, not both"),
            Self::BadNextSecret => f.write_str("a takeover needs a next secret, which isn't the present one"),
            Self::NoVolume => write!(f, "there is no {volume}"),
            Self::WrongVolume { is, expected } => write!(
                f,
                "{volume} has UUID {is}, not {expected}: its content is another one now; attach without an expected \
                 UUID if that is wanted"
            ),
            Self::VolumeReadOnly => write!(f, "{volume} is read-only here; attach it read-only"),
            Self::GenerationPast { current, seen } => write!(
                f,
                "{volume} had another writer since (its generation is {current}, yours {seen}): unanswered writes \
                 may not be repeated; attach anew"
            ),
            Self::StateIsOlder { current, seen } => write!(
                f,
                "the generation of {volume} is {current} and was never {seen}, as yours is: this target's state was lost \
                 or is an old copy; attach anew when it is sure that nobody else wrote"
            ),
            Self::Preempted => write!(f, "another writer has taken {volume} with --preempt"),
            Self::Grace { left_ms } => write!(
                f,
                "this target has started lately and keeps {volume} for those who held it; try again in {} s, or end \
                 their claim with --preempt",
                left_ms.div_ceil(1000)
            ),
            Self::Held { wanted, by } => {
                write!(f, "{volume} is held by ")?;
                for (n, holder) in by.iter().take(MOST_NAMES).enumerate() {
                    let separator = if n == 0 { "" } else { ", " };
                    write!(f, "{separator}{:?} ({})", holder.initiator, holder.mode.name())?;
                }
                if by.len() > MOST_NAMES {
                    write!(f, " and {} more", by.len() - MOST_NAMES)?;
                }
                let all_shared = by.iter().all(|holder| holder.mode == AttachMode::SHARED);
                let shared = if all_shared { ", shared" } else { "" };
                let wanted = wanted.name();
                write!(
                    f,
                    ", which doesn't go with {wanted}; attach read-only{shared}, or end all writers with --preempt"
                )
            }
            Self::TooManySessions { limit } => {
                write!(f, "this target serves {limit} sessions at most; raise max_sessions")
            }
            Self::TooManyPaths { limit } => {
                write!(f, "this target serves {limit} connections at most; raise max_connections")
            }
            Self::BadSecret { session } => {
                write!(f, "the secret isn't that of session {session}; attach under an id of your own")
            }
            Self::TakenOver { session } => {
                write!(f, "session {session} was taken over by a successor; whoever had it before has lost it")
            }
            Self::OtherAttach { session, mode } => {
                write!(f, "session {session} is another attach already ({}); use another session id", mode.name())
            }
            Self::SessionLost { session } => write!(f, "there is no session {session} (any more); attach again"),
            Self::NoQueue { session, queue, queues } => {
                write!(f, "session {session} has {queues} queues; there is no queue {queue}")
            }
            Self::StillWaits { waited_ms } => write!(
                f,
                "an older session of {volume} has commands at storage that haven't ended within {} s; see that the \
                 storage works, then try again",
                *waited_ms as f64 / 1000.0
            ),
            Self::NotStored => write!(f, "the target can't store who holds {volume}; its log says why"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tell(f, format_args!("the volume"))
    }
}

impl core::error::Error for Refusal {}

/// The names of those who hold a volume, as a refusal lists them.
pub(super) fn held(wanted: AttachMode, by: impl Iterator<Item = (String, AttachMode)>) -> Refusal {
    Refusal::Held { wanted, by: by.map(|(initiator, mode)| HeldBy { initiator, mode }).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn holders_are_named_with_what_goes_with_them() {
        let holder = |n: usize, mode| (alloc::format!("host-{n}"), mode);
        let one = held(AttachMode::EXCLUSIVE, [holder(1, AttachMode::EXCLUSIVE)].into_iter());
        assert_eq!(
            one.to_string(),
            "the volume is held by \"host-1\" (exclusive), which doesn't go with exclusive; attach read-only, or end all \
             writers with --preempt"
        );
        let named = one.about("disk0").to_string();
        assert!(named.starts_with("volume \"disk0\" is held by \"host-1\""), "{named}");
        let many = held(AttachMode::EXCLUSIVE, (1..=6).map(|n| holder(n, AttachMode::SHARED))).to_string();
        assert!(many.contains("(shared) and 2 more, which") && many.contains("attach read-only, shared, or"), "{many}");
    }
}
