//! Commands and their flags, as newtypes: a value that this version doesn't know survives as a value
//! and is refused by name, never by a failed conversion (I9).

use core::fmt;

/// What a command does (SPEC.md, "Commands").
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

impl Opcode {
    /// Read a range.
    pub const READ: Self = Self(1);
    /// Write a range.
    pub const WRITE: Self = Self(2);
    /// Put every completed write of the session on stable storage.
    pub const FLUSH: Self = Self(3);
    /// Make a range read as zeros.
    pub const WRITE_ZEROES: Self = Self(4);
    /// Say that the content of a range is no longer needed.
    pub const DISCARD: Self = Self(5);
    /// Write a range if it holds what is expected, atomically.
    pub const COMPARE_AND_WRITE: Self = Self(6);
    /// Tell which parts of a range are allocated or read as zeros.
    pub const BLOCK_STATUS: Self = Self(7);
    /// Compute the CRC32C of a range at the target.
    pub const VERIFY: Self = Self(8);
    /// Tell the volume's identity and geometry.
    pub const IDENTIFY: Self = Self(9);

    /// All opcodes of this version, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::READ,
        Self::WRITE,
        Self::FLUSH,
        Self::WRITE_ZEROES,
        Self::DISCARD,
        Self::COMPARE_AND_WRITE,
        Self::BLOCK_STATUS,
        Self::VERIFY,
        Self::IDENTIFY,
    ];

    /// The name used in logs and metric labels; `unknown` for a value of another version.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::READ => "read",
            Self::WRITE => "write",
            Self::FLUSH => "flush",
            Self::WRITE_ZEROES => "write_zeroes",
            Self::DISCARD => "discard",
            Self::COMPARE_AND_WRITE => "compare_and_write",
            Self::BLOCK_STATUS => "block_status",
            Self::VERIFY => "verify",
            Self::IDENTIFY => "identify",
            _ => "unknown",
        }
    }

    /// Whether the command changes the volume. FLUSH does not, but is never repeated silently either.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Self::WRITE | Self::WRITE_ZEROES | Self::DISCARD | Self::COMPARE_AND_WRITE)
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Flags of a header (SPEC.md, "Flags").
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Flags(pub u16);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The payload's bytes follow this header on the same connection.
    pub const PAYLOAD_FOLLOWS: Self = Self(1);
    /// The command is answered only when its change is on stable storage.
    pub const FUA: Self = Self(1 << 1);
    /// WRITE ZEROES must leave the range allocated.
    pub const NO_UNMAP: Self = Self(1 << 2);

    /// Whether every flag of `other` is set.
    #[inline]
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// This set with the flags of `other` added.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without the flags of `other`.
    #[inline]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flags({:#06x})", self.0)
    }
}
