//! A rule that the peer broke.

use crate::status::Status;
use crate::wire::Fault;

/// Why a connection has to end. Both sides' logs and metrics name the status (I9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail} ({status})")]
pub struct Violation {
    /// The status that goes into the DISCONNECT.
    pub status: Status,
    /// What happened, for people.
    pub detail: &'static str,
}

impl Violation {
    pub(crate) const fn new(status: Status, detail: &'static str) -> Self {
        Self { status, detail }
    }
}

impl From<Fault> for Violation {
    fn from(fault: Fault) -> Self {
        let detail = match fault {
            Fault::Malformed(detail) => detail,
            Fault::BadMagic => "the first bytes aren't Twinrail's",
            Fault::HeaderCrc => "a header doesn't match its CRC32C",
            Fault::ControlCrc => "the payload of a control frame doesn't match its CRC32C",
            Fault::UnexpectedKind(_) => "a frame of this kind isn't allowed here",
        };
        Self { status: fault.status(), detail }
    }
}
