//! A path that stands by: authenticated, probed, and not used.

use super::watch::Watch;

/// A path that could be activated.
#[derive(Debug)]
pub(super) struct Standby {
    pub(super) watch: Watch,
    pub(super) since_us: u64,
    /// What it has shown so far.
    pub(super) good: Good,
}

/// What a standby has shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Good {
    /// Probes answered well in a row, and since when.
    pub(super) probes: u32,
    pub(super) since_us: u64,
}

impl Good {
    pub(super) fn new(now_us: u64) -> Self {
        Self { probes: 0, since_us: now_us }
    }
}
