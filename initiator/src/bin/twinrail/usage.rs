//! The error of a wrong argument.

use std::fmt;

/// A wrong argument.
#[derive(Debug)]
pub(crate) struct Usage(String);

/// The error of a wrong argument; the text says what would be right.
pub(crate) fn usage(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}
