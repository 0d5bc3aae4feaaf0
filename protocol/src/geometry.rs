//! A volume's geometry, and commands checked against it.
//!
//! A [`Request`] exists only when every field of the command was found good: the target's storage
//! side takes requests and has nothing left to check (*parse, don't validate*).

use crate::limits;
use crate::opcode::{Flags, Opcode};
use crate::status::Status;
use crate::wire::Command;

/// Size and block sizes of a volume, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `logical_block`.
    pub size: u64,
    /// Smallest addressable unit in bytes, a power of two in [`limits::LOGICAL_BLOCK_RANGE`].
    pub logical_block: u32,
    /// The unit in bytes below which a write costs the storage a read.
    pub physical_block: u32,
    /// Largest payload of one command in bytes.
    pub max_transfer: u32,
}

impl Geometry {
    /// Whether the numbers obey the limits of the protocol.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.logical_block.is_power_of_two()
            && limits::LOGICAL_BLOCK_RANGE.contains(&self.logical_block)
            && self.physical_block.is_power_of_two()
            && self.physical_block >= self.logical_block
            && limits::MAX_TRANSFER_RANGE.contains(&self.max_transfer)
            && self.max_transfer.is_multiple_of(self.logical_block)
            && self.size > 0
            && self.size.is_multiple_of(u64::from(self.logical_block))
            && i64::try_from(self.size).is_ok()
    }

    /// Checks a range against the volume: not empty, aligned, inside, at most `longest` bytes.
    ///
    /// # Errors
    /// The first that applies of ZERO_LENGTH, MISALIGNED, TOO_LARGE, OUT_OF_RANGE.
    pub fn range(&self, offset: u64, length: u64, longest: u64) -> Result<Range, Status> {
        let block = u64::from(self.logical_block);
        if length == 0 {
            return Err(Status::ZERO_LENGTH);
        }
        if !offset.is_multiple_of(block) || !length.is_multiple_of(block) {
            return Err(Status::MISALIGNED);
        }
        if length > longest {
            return Err(Status::TOO_LARGE);
        }
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(Range { offset, length }),
            _ => Err(Status::OUT_OF_RANGE),
        }
    }
}

/// A stretch of a volume, known to be aligned, inside and not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    offset: u64,
    length: u64,
}

impl Range {
    /// First byte.
    #[inline]
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of bytes.
    #[inline]
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// First byte behind the range.
    #[inline]
    #[must_use]
    pub fn end(&self) -> u64 {
        // Can't overflow: checked by `Geometry::range`.
        self.offset + self.length
    }

    /// Whether the two share a byte.
    #[inline]
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// A command that may be given to storage as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read the range into the reply's payload.
    Read(Range),
    /// Write the payload to the range; with FUA onto stable storage.
    Write {
        /// Where.
        range: Range,
        /// Answer only when it is on stable storage.
        fua: bool,
    },
    /// Put all completed writes on stable storage.
    Flush,
    /// Make the range read as zeros.
    WriteZeroes {
        /// Where.
        range: Range,
        /// Answer only when it is on stable storage.
        fua: bool,
        /// Whether the range may lose its allocation.
        may_unmap: bool,
    },
    /// The content is no longer needed.
    Discard {
        /// Where.
        range: Range,
        /// Answer only when it is on stable storage.
        fua: bool,
    },
    /// Compare with the payload's first half; if equal, write its second half.
    CompareAndWrite {
        /// Where; the payload is twice as long.
        range: Range,
        /// Answer only when it is on stable storage.
        fua: bool,
    },
    /// Tell the extents of the range.
    BlockStatus(Range),
    /// Compute the CRC32C of the range.
    Verify(Range),
    /// Tell identity and geometry.
    Identify,
}

impl Request {
    /// Checks a command against a volume and the attach mode.
    ///
    /// # Errors
    /// The status to answer with; nothing was executed.
    pub fn parse(command: &Command, geometry: &Geometry, read_only: bool) -> Result<Self, Status> {
        let Command { opcode, offset, length, .. } = *command;
        let flags = command.flags.without(Flags::PAYLOAD_FOLLOWS);
        let allowed = match opcode {
            Opcode::WRITE | Opcode::DISCARD | Opcode::COMPARE_AND_WRITE => Flags::FUA,
            Opcode::WRITE_ZEROES => Flags::FUA.with(Flags::NO_UNMAP),
            _ => Flags::NONE,
        };
        if !Opcode::ALL.contains(&opcode) {
            return Err(Status::UNKNOWN_OPCODE);
        }
        if !allowed.has(flags) {
            return Err(Status::BAD_FLAGS);
        }
        if read_only && opcode.changes() {
            return Err(Status::READ_ONLY);
        }
        let fua = flags.has(Flags::FUA);
        let transfer = u64::from(geometry.max_transfer);
        let (request, payload) = match opcode {
            Opcode::READ => (Self::Read(geometry.range(offset, length, transfer)?), 0),
            Opcode::WRITE => {
                let range = geometry.range(offset, length, transfer)?;
                (Self::Write { range, fua }, length)
            }
            Opcode::WRITE_ZEROES => {
                let range = geometry.range(offset, length, limits::MAX_SPACE_RANGE)?;
                (Self::WriteZeroes { range, fua, may_unmap: !flags.has(Flags::NO_UNMAP) }, 0)
            }
            Opcode::DISCARD => {
                let range = geometry.range(offset, length, limits::MAX_SPACE_RANGE)?;
                (Self::Discard { range, fua }, 0)
            }
            Opcode::COMPARE_AND_WRITE => {
                let range = geometry.range(offset, length, transfer / 2)?;
                (Self::CompareAndWrite { range, fua }, length * 2)
            }
            Opcode::BLOCK_STATUS => (Self::BlockStatus(geometry.range(offset, length, limits::MAX_SPACE_RANGE)?), 0),
            Opcode::VERIFY => (Self::Verify(geometry.range(offset, length, limits::MAX_VERIFY_RANGE)?), 0),
            _ => {
                if offset != 0 || length != 0 {
                    return Err(Status::BAD_PARAMETER);
                }
                (if opcode == Opcode::FLUSH { Self::Flush } else { Self::Identify }, 0)
            }
        };
        if u64::from(command.payload.length) != payload {
            return Err(Status::BAD_PAYLOAD_LENGTH);
        }
        Ok(request)
    }

    /// The range that the request touches; none for FLUSH and IDENTIFY.
    #[must_use]
    pub fn range(&self) -> Option<Range> {
        match *self {
            Self::Read(range)
            | Self::Write { range, .. }
            | Self::WriteZeroes { range, .. }
            | Self::Discard { range, .. }
            | Self::CompareAndWrite { range, .. }
            | Self::BlockStatus(range)
            | Self::Verify(range) => Some(range),
            Self::Flush | Self::Identify => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Payload;

    const GEOMETRY: Geometry =
        Geometry { size: 1 << 20, logical_block: 512, physical_block: 4096, max_transfer: 1 << 17 };

    fn parse(opcode: Opcode, offset: u64, length: u64, flags: Flags, payload: u32) -> Result<Request, Status> {
        let payload = Payload { length: payload, crc: 0 };
        let command = Command { opcode, offset, length, flags, payload, ..Command::default() };
        Request::parse(&command, &GEOMETRY, false)
    }

    #[test]
    fn each_kind_of_bad_request_has_a_status_of_its_own() {
        let read = |offset, length| parse(Opcode::READ, offset, length, Flags::NONE, 0);
        assert_eq!(read(0, 0), Err(Status::ZERO_LENGTH));
        assert_eq!(read(1, 512), Err(Status::MISALIGNED));
        assert_eq!(read(0, 513), Err(Status::MISALIGNED));
        assert_eq!(read(0, (1 << 17) + 512), Err(Status::TOO_LARGE));
        assert_eq!(read(1 << 20, 512), Err(Status::OUT_OF_RANGE));
        assert_eq!(read(u64::MAX - 511, 512), Err(Status::OUT_OF_RANGE));
        assert_eq!(parse(Opcode(99), 0, 512, Flags::NONE, 0), Err(Status::UNKNOWN_OPCODE));
        assert_eq!(parse(Opcode::READ, 0, 512, Flags::FUA, 0), Err(Status::BAD_FLAGS));
        assert_eq!(parse(Opcode::WRITE, 0, 512, Flags(1 << 9), 512), Err(Status::BAD_FLAGS));
        assert_eq!(parse(Opcode::WRITE, 0, 512, Flags::NONE, 1024), Err(Status::BAD_PAYLOAD_LENGTH));
        assert_eq!(parse(Opcode::FLUSH, 0, 512, Flags::NONE, 0), Err(Status::BAD_PARAMETER));
        assert!(parse(Opcode::COMPARE_AND_WRITE, 0, 512, Flags::FUA, 1024).is_ok());
    }

    #[test]
    fn a_read_only_attach_reads_and_flushes_but_changes_nothing() {
        for opcode in Opcode::ALL {
            let length = if matches!(opcode, Opcode::FLUSH | Opcode::IDENTIFY) { 0 } else { 512 };
            let payload = match opcode {
                Opcode::WRITE => 512,
                Opcode::COMPARE_AND_WRITE => 1024,
                _ => 0,
            };
            let command =
                Command { opcode, length, payload: Payload { length: payload, crc: 0 }, ..Command::default() };
            let parsed = Request::parse(&command, &GEOMETRY, true);
            assert_eq!(parsed.is_err(), opcode.changes(), "{opcode:?}: {parsed:?}");
        }
    }
}
