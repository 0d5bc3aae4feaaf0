//! Extents in the reply to BLOCK STATUS.

use super::codec::{Reader, Writer};
use super::fault::Fault;

/// What is known of an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtentFlags(pub u32);

impl ExtentFlags {
    /// Allocated, content unknown.
    pub const DATA: Self = Self(0);
    /// Not allocated.
    pub const HOLE: Self = Self(1);
    /// Reads as zeros.
    pub const ZERO: Self = Self(2);

    /// Whether every flag of `other` is set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A stretch of the asked range with one state. The first begins at the command's offset, each further
/// one where its predecessor ends; together they cover a prefix of the range, not always all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, never 0.
    pub length: u64,
    /// State.
    pub flags: ExtentFlags,
}

impl Extent {
    /// Length of an encoded extent in bytes.
    pub const LEN: usize = 16;

    /// Writes `extents` into `out`; gives the number of bytes, or nothing if they don't fit.
    #[must_use]
    pub fn encode(extents: &[Self], out: &mut [u8]) -> Option<usize> {
        let mut w = Writer::new(out);
        for extent in extents {
            w.u64(extent.length);
            w.u32(extent.flags.0);
            w.zeros(4);
        }
        w.finish()
    }

    /// Reads the extents of a reply whose command asked for `length` bytes.
    ///
    /// # Errors
    /// [`Fault::Malformed`] when an extent is empty or they reach past the range.
    pub fn decode(payload: &[u8], length: u64) -> impl Iterator<Item = Result<Self, Fault>> {
        let mut left = length;
        let whole = payload.len().is_multiple_of(Self::LEN);
        let tail = (!whole).then_some(Err(Fault::Malformed("an extent is cut short")));
        let decode = move |chunk| {
            let mut r = Reader::new(chunk);
            let extent = Self { length: r.u64()?, flags: ExtentFlags(r.u32()?) };
            r.zeros(4)?;
            if extent.length == 0 || extent.length > left {
                return Err(Fault::Malformed("extents don't fit the range"));
            }
            left -= extent.length;
            Ok(extent)
        };
        payload.chunks_exact(Self::LEN).map(decode).chain(tail)
    }
}
