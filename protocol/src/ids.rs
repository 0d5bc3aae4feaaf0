//! Identifiers, each a type of its own so that a slot can't be taken for a queue.

use core::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Room for one command in a queue: an index below the depth of the slot table.
    Slot(u16)
}
number! {
    /// Counter of a slot: one more with each new command in it. The first command has sequence 1.
    Sequence(u64)
}
number! {
    /// Counter of a queue's paths: one more with every activation. The first path has epoch 1.
    Epoch(u64)
}
number! {
    /// A queue of a session, counted from 0.
    QueueId(u16)
}
number! {
    /// Random number of a slot table. Another number means another table: the session was lost.
    /// Zero stands for "no table yet".
    Instance(u64)
}

number! {
    /// Number of a grant: one more with each change of it, and 0 again after the highest.
    GrantNumber(u16)
}

impl Slot {
    /// The slot as an index into a table.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl Sequence {
    /// The sequence of the slot's next command.
    #[inline]
    #[must_use]
    pub fn next(self) -> Self {
        // 2^64 commands in one slot take longer than any machine lasts.
        Self(self.0.wrapping_add(1))
    }
}

impl Epoch {
    /// Greater than that of any path: the session is over.
    pub const OVER: Self = Self(u64::MAX);

    /// The epoch of the next attempt to activate a path.
    #[inline]
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

impl GrantNumber {
    /// The number of the grant after this one.
    #[inline]
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// How many changes lie between `earlier` and this one; nothing if this one is the earlier. Numbers wrap,
    /// so that half of them count as later and half as earlier.
    #[inline]
    #[must_use]
    pub fn since(self, earlier: Self) -> Option<u16> {
        let changes = self.0.wrapping_sub(earlier.0);
        (changes < 1 << 15).then_some(changes)
    }
}

macro_rules! uuid {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl $name {
            /// All zeros: "none", or "any" where a request names one.
            pub const NIL: Self = Self([0; 16]);

            /// Whether this is [`Self::NIL`].
            #[must_use]
            pub fn is_nil(&self) -> bool {
                *self == Self::NIL
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for (i, byte) in self.0.iter().enumerate() {
                    if matches!(i, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }
    };
}

uuid! {
    /// One attach of one volume by one initiator; minted by the initiator.
    SessionId
}
uuid! {
    /// A volume, bound to its backing.
    VolumeId
}
uuid! {
    /// What changes when the target's host reboots.
    BootId
}

/// What proves that an activation belongs to a session: 128 random bits, minted by the initiator.
///
/// It has neither `Display` nor a telling `Debug`, so that no log can hold it whole.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl Secret {
    /// Compares in a time that doesn't depend on where the two differ.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(other.0.iter()).fold(0u8, |sum, (a, b)| sum | (a ^ b));
        core::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({:02x}..)", self.0[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn a_secret_is_never_printed_whole() {
        assert_eq!(format!("{:?}", Secret([0xab; 16])), "Secret(ab..)");
    }

    #[test]
    fn a_grant_number_is_later_than_the_half_of_all_numbers_before_it() {
        let since = |later, earlier| GrantNumber(later).since(GrantNumber(earlier));
        assert_eq!(GrantNumber(u16::MAX).next(), GrantNumber(0));
        assert_eq!((since(7, 7), since(2, u16::MAX), since(u16::MAX, 2)), (Some(0), Some(3), None));
        assert_eq!((since(0x7fff, 0), since(0x8000, 0)), (Some(0x7fff), None));
    }

    #[test]
    fn ids_print_as_uuids() {
        let id = SessionId([0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(format!("{id}"), "12345678-9abc-def0-0102-030405060708");
    }
}
