//! One property a file. Each reads a [`History`] and answers with the first breach it finds.
//!
//! A checker trusts nothing that the core under test says of itself: it reads what was invoked and
//! completed, what reached the modelled storage and devices, and what was promised in between.

pub mod bounded;
pub mod credits;
pub mod effects;
pub mod exactly_once;
pub mod flush;
pub mod ghost_writes;
pub mod holders;
pub mod honest;
pub mod integrity;
pub mod late_dma;
mod ledger;
pub mod linearizable;
pub mod progress;
#[cfg(test)]
pub(crate) mod testing;

use core::fmt;

use crate::history::{History, Micros};
pub use ledger::Ledger;

/// A rule was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    /// The checker that found it.
    pub checker: &'static str,
    /// When, in microseconds of virtual time.
    pub at: Micros,
    /// What happened.
    pub what: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} us: {}", self.checker, self.at, self.what)
    }
}

impl std::error::Error for Breach {}

/// A property: its name and what checks it.
pub type Checker = (&'static str, fn(&History, &Ledger) -> Result<(), Breach>);

/// Every property, those that name a cause before those that see its effect.
pub const ALL: &[Checker] = &[
    ("I9 honest peers", honest::check),
    ("I1 exactly once", exactly_once::check),
    ("I2 no ghost writes", ghost_writes::check),
    ("holders", holders::check),
    ("I3 no late DMA", late_dma::check),
    ("I6 credits", credits::check),
    ("I7 integrity", integrity::check),
    ("I8 bounded", bounded::check),
    ("I4 effects", effects::check),
    ("I4 linearizable blocks", linearizable::check),
    ("I4+I5 flush", flush::check),
    ("I10 progress", progress::check),
];

/// Checks every property.
///
/// # Errors
/// The first [`Breach`], in the order of [`ALL`].
pub fn check(history: &History) -> Result<(), Breach> {
    let ledger = Ledger::new(history);
    ALL.iter().try_for_each(|(_, check)| check(history, &ledger))
}

/// Every property that doesn't hold.
#[must_use]
pub fn breaches(history: &History) -> Vec<Breach> {
    let ledger = Ledger::new(history);
    ALL.iter().filter_map(|(_, check)| check(history, &ledger).err()).collect()
}
