//! The target's end of a queue.

mod credit;
mod flush;
mod queue;

pub use credit::Grant;
pub use flush::{FlushLedger, FlushMark};
pub use queue::{Intake, Outcome, Queue, QueueOptions, Start, Step};
