//! Sizes in bytes, as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};

use crate::volume::spec::parse_size;

/// A number of bytes: `4096`, or with a suffix for powers of 1024: `64K`, `64M`, `2G`, `1T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

const SUFFIXES: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// A text isn't a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no size; write a number of bytes, with K, M, G or T for powers of 1024, like 64M")]
pub struct NotASize(String);

impl FromStr for Size {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Self, NotASize> {
        parse_size(text.trim()).map(Self).ok_or_else(|| NotASize(text.into()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |shift: u32| self.0 > 0 && self.0.trailing_zeros() >= shift;
        match SUFFIXES.into_iter().find(|&(_, shift)| whole(shift)) {
            Some((suffix, shift)) => write!(f, "{}{suffix}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size, like 4096 or \"64M\"")
            }

            fn visit_i64<E: de::Error>(self, n: i64) -> Result<Size, E> {
                u64::try_from(n).map(Size).map_err(|_| E::invalid_value(de::Unexpected::Signed(n), &self))
            }

            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Size, E> {
                Ok(Size(n))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("0", 0), ("4096", 4096), ("64k", 65536), ("64M", 64 << 20), ("1G", 1 << 30)] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "99999999T", "64X", "64MB", "0x10"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_with_the_largest_suffix_that_loses_nothing() {
        let printed = [0, 1000, 1024, 3 << 20, 1 << 30, (1 << 30) + 1].map(|n| Size(n).to_string());
        assert_eq!(printed, ["0", "1000", "1K", "3M", "1G", "1073741825"]);
    }
}
