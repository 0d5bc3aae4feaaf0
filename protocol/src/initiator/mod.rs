//! The initiator's end of a queue.

mod credit;
mod queue;
mod slots;

pub use credit::Allowance;
pub use queue::{Completion, Incoming, Operation, Outgoing, Queue, QueueOptions};
