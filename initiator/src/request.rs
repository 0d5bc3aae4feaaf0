//! What is given to a queue, and what comes back.

use twinrail_protocol::geometry;
use twinrail_protocol::limits::{MAX_SPACE_RANGE, MAX_VERIFY_RANGE};
use twinrail_protocol::wire::{Command, Payload};
use twinrail_protocol::{Flags, Geometry, Opcode, Status};

use crate::arena::Buffer;
use crate::error::{Error, PathEnd, Rejection};

/// A command to submit. It owns its buffer until it has ended (I3).
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub opcode: Opcode,
    /// [`Flags::FUA`] and [`Flags::NO_UNMAP`] where they apply.
    pub flags: Flags,
    /// First byte.
    pub offset: u64,
    /// Length of the range in bytes.
    pub length: u64,
    /// What is written, or where the payload of the reply goes.
    pub buffer: Option<Buffer>,
    /// CRC32C of what is written, if it is known; else it is computed at the submission.
    pub crc: Option<u32>,
    /// A number of the caller's, given back with [`Done`].
    pub token: u64,
}

impl Request {
    fn new(opcode: Opcode, offset: u64, length: u64, buffer: Option<Buffer>) -> Self {
        Self { opcode, flags: Flags::NONE, offset, length, buffer, crc: None, token: 0 }
    }

    /// Reads `buffer.len()` bytes at `offset`.
    #[must_use]
    pub fn read(offset: u64, buffer: Buffer) -> Self {
        Self::new(Opcode::READ, offset, buffer.len() as u64, Some(buffer))
    }

    /// Writes the buffer at `offset`.
    #[must_use]
    pub fn write(offset: u64, buffer: Buffer) -> Self {
        Self::new(Opcode::WRITE, offset, buffer.len() as u64, Some(buffer))
    }

    /// Compares the volume at `offset` with the buffer's first half, and if equal writes its second half
    /// there.
    #[must_use]
    pub fn compare_and_write(offset: u64, buffer: Buffer) -> Self {
        Self::new(Opcode::COMPARE_AND_WRITE, offset, buffer.len() as u64 / 2, Some(buffer))
    }

    /// Puts every write of the session that has completed on stable storage.
    #[must_use]
    pub fn flush() -> Self {
        Self::new(Opcode::FLUSH, 0, 0, None)
    }

    /// Makes a range read as zeros.
    #[must_use]
    pub fn write_zeroes(offset: u64, length: u64) -> Self {
        Self::new(Opcode::WRITE_ZEROES, offset, length, None)
    }

    /// Says that the content of a range is no longer needed.
    #[must_use]
    pub fn discard(offset: u64, length: u64) -> Self {
        Self::new(Opcode::DISCARD, offset, length, None)
    }

    /// Asks for the extents of a range, encoded as [`crate::Extent::decode`] reads them. 4096 bytes hold as
    /// many as a reply may bring.
    #[must_use]
    pub fn block_status(offset: u64, length: u64, buffer: Buffer) -> Self {
        Self::new(Opcode::BLOCK_STATUS, offset, length, Some(buffer))
    }

    /// Computes the CRC32C of a range at the target; it comes back as [`Done::result`].
    #[must_use]
    pub fn verify(offset: u64, length: u64) -> Self {
        Self::new(Opcode::VERIFY, offset, length, None)
    }

    /// Asks what the volume is; 4096 bytes hold the answer.
    #[must_use]
    pub fn identify(buffer: Buffer) -> Self {
        Self::new(Opcode::IDENTIFY, 0, 0, Some(buffer))
    }

    /// This request with flags.
    #[must_use]
    pub fn with_flags(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// This request with a number of the caller's.
    #[must_use]
    pub fn with_token(mut self, token: u64) -> Self {
        self.token = token;
        self
    }

    /// Checks the request as the target will, so that nothing is sent that it can only refuse. Gives the
    /// length of the payload it brings.
    pub(crate) fn check(&self, geometry: &Geometry, read_only: bool) -> Result<u32, Rejection> {
        let Self { opcode, flags, offset, length, .. } = *self;
        let buffer = self.buffer.as_ref().map_or(0, |buffer| buffer.len() as u64);
        let brings = matches!(opcode, Opcode::WRITE | Opcode::COMPARE_AND_WRITE);
        // More than 32 bits is refused for its length anyway.
        let sent = if brings { u32::try_from(buffer).unwrap_or(u32::MAX) } else { 0 };
        let payload = Payload { length: sent, crc: 0 };
        let command = Command { opcode, flags, offset, length, payload, ..Command::default() };
        if let Err(status) = geometry::Request::parse(&command, geometry, read_only) {
            return Err(rejection(opcode, offset, length, buffer, geometry, status));
        }
        let needed = match opcode {
            Opcode::READ => length,
            Opcode::BLOCK_STATUS | Opcode::IDENTIFY => buffer.max(1),
            _ => return Ok(sent),
        };
        match buffer == needed {
            true => Ok(sent),
            false => Err(Rejection::Buffer { opcode, length, buffer, needed }),
        }
    }
}

/// Checks the range of a call that may need several commands.
pub(crate) fn check_range(
    opcode: Opcode,
    offset: u64,
    length: u64,
    geometry: &Geometry,
    read_only: bool,
) -> Result<(), Rejection> {
    if read_only && opcode.changes() {
        return Err(Rejection::ReadOnly { opcode });
    }
    match geometry.range(offset, length, u64::MAX) {
        Ok(_) => Ok(()),
        Err(status) => Err(rejection(opcode, offset, length, length, geometry, status)),
    }
}

/// A status of the check in words.
fn rejection(opcode: Opcode, offset: u64, length: u64, buffer: u64, geometry: &Geometry, status: Status) -> Rejection {
    let Geometry { size, logical_block: block, max_transfer, .. } = *geometry;
    match status {
        Status::ZERO_LENGTH => Rejection::Empty { opcode, offset },
        Status::MISALIGNED => Rejection::Misaligned { opcode, offset, length, block },
        Status::OUT_OF_RANGE => Rejection::OutOfRange { opcode, offset, length, size },
        Status::READ_ONLY => Rejection::ReadOnly { opcode },
        Status::BAD_FLAGS => Rejection::Flags { opcode },
        Status::TOO_LARGE => {
            let most = match opcode {
                Opcode::VERIFY => MAX_VERIFY_RANGE,
                Opcode::READ | Opcode::WRITE => max_transfer.into(),
                Opcode::COMPARE_AND_WRITE => u64::from(max_transfer) / 2,
                _ => MAX_SPACE_RANGE,
            };
            Rejection::TooLarge { opcode, length, most }
        }
        Status::BAD_PAYLOAD_LENGTH | Status::BAD_PARAMETER => {
            let needed = if opcode == Opcode::COMPARE_AND_WRITE { length.saturating_mul(2) } else { length };
            Rejection::Buffer { opcode, length, buffer, needed }
        }
        _ => Rejection::Opcode { opcode },
    }
}

/// A command has ended.
#[derive(Debug)]
pub struct Done {
    /// The number of the [`Request`].
    pub token: u64,
    /// What it did.
    pub opcode: Opcode,
    /// How it ended; [`Status::CONNECTION_LOST`] when the path ended first.
    pub status: Status,
    /// The number that goes with it: the CRC32C of VERIFY, where COMPARE AND WRITE found a difference.
    pub result: u64,
    /// Bytes of payload that the reply brought.
    pub received: u32,
    /// Nothing of it was given to the rail before the path ended: it was surely not executed.
    pub unsent: bool,
    /// The buffer of the [`Request`]: nothing touches it any more (I3).
    pub buffer: Option<Buffer>,
}

impl Done {
    /// How the command ended, as an error of this library; `end` is how its path ended, asked for only if it
    /// did.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn outcome(&self, end: impl FnOnce() -> PathEnd) -> Result<(), Error> {
        match self.status {
            Status::OK => Ok(()),
            _ if self.unsent => Err(Error::ConnectionLost { opcode: self.opcode, end: end() }),
            status => Err(Error::of(self.opcode, status, self.result, end)),
        }
    }
}

/// A request that was not taken, given back.
#[derive(Debug)]
pub struct NotTaken {
    /// The request.
    pub request: Request,
    /// Why.
    pub reason: Reason,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// As many commands are in flight as the target has granted slots: poll, then submit again.
    Full,
    /// The path has ended.
    Ended(PathEnd),
    /// It can't be right.
    Rejected(Rejection),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, Pages};

    const GEOMETRY: Geometry =
        Geometry { size: 1 << 20, logical_block: 512, physical_block: 4096, max_transfer: 1 << 17 };

    fn refused(request: Request) -> String {
        request.check(&GEOMETRY, false).unwrap_err().to_string()
    }

    #[test]
    fn a_request_that_cannot_be_right_is_told_what_would_be() {
        let arena = Arena::new(2 << 20, Pages::Transparent).unwrap();
        let buffer = |length| arena.take(length).unwrap();
        assert!(refused(Request::read(0, buffer(1000))).contains("multiples of the volume's block of 512 bytes"));
        assert!(refused(Request::write(100, buffer(512))).contains("at byte 100: both must be multiples"));
        assert!(refused(Request::write(1 << 20, buffer(512))).contains("which has 1048576 bytes"));
        assert!(refused(Request::read(0, buffer((1 << 17) + 512))).contains("131072 is the most"));
        assert!(refused(Request::compare_and_write(0, buffer((1 << 17) + 1024))).contains("65536 is the most"));
        assert!(refused(Request::write_zeroes(0, 0)).contains("give a length"));
        assert!(refused(Request::flush().with_flags(Flags::FUA)).contains("flags"));
        let short = Request { length: 1024, ..Request::read(0, buffer(512)) };
        assert!(refused(short).contains("1024 are needed"));
        let none = Request { buffer: None, ..Request::identify(buffer(1)) };
        assert!(refused(none).contains("buffer of 0: 1 are needed"));
        let other = Request { opcode: Opcode(99), ..Request::flush() };
        assert!(refused(other).contains("is no command"));
        let write = Request::write(0, buffer(512));
        assert_eq!(write.check(&GEOMETRY, true), Err(Rejection::ReadOnly { opcode: Opcode::WRITE }));
        assert_eq!(write.check(&GEOMETRY, false), Ok(512));
    }
}
