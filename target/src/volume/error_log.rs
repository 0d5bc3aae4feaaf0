//! Says which operation of a volume failed and why.

use std::fmt::Display;

use crate::throttle::Throttle;

/// The errors of one volume's storage. Shared by its keeper and the reactors.
#[derive(Debug)]
pub struct ErrorLog {
    volume: String,
    throttle: Throttle,
}

impl ErrorLog {
    /// The log of the volume of this name.
    #[must_use]
    pub fn new(volume: &str) -> Self {
        Self { volume: volume.into(), throttle: Throttle::new(1) }
    }

    /// An operation failed, on a range that begins at `offset` if it has one.
    pub fn report(&self, operation: &str, offset: Option<u64>, error: &dyn Display) {
        if let Some(unsaid) = self.throttle.admit() {
            tracing::error!(volume = %self.volume, operation, offset, %error, unsaid, "the storage of a volume failed");
        }
    }
}
