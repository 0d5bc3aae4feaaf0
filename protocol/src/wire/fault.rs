//! What can be wrong with the bytes of a peer (SPEC.md, "Headers").

use crate::status::Status;

/// Why bytes from the peer can't be a frame: the connection ends with [`Fault::status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The first eight bytes of the connection aren't the magic.
    #[error("the first bytes aren't Twinrail's")]
    BadMagic,
    /// The header's CRC32C is wrong.
    #[error("a header doesn't match its CRC32C")]
    HeaderCrc,
    /// A handshake or control payload doesn't match its CRC32C.
    #[error("the payload of a control frame doesn't match its CRC32C")]
    ControlCrc,
    /// A kind that this version doesn't know, or that isn't allowed here.
    #[error("a frame of kind {0:#04x} isn't allowed here")]
    UnexpectedKind(u8),
    /// Fields that contradict each other or the specification.
    #[error("malformed frame: {0}")]
    Malformed(&'static str),
}

impl Fault {
    /// The status that the connection ends with.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            Self::BadMagic => Status::BAD_MAGIC,
            Self::HeaderCrc | Self::ControlCrc => Status::HEADER_CRC,
            Self::UnexpectedKind(_) => Status::UNEXPECTED_FRAME,
            Self::Malformed(_) => Status::MALFORMED,
        }
    }
}
