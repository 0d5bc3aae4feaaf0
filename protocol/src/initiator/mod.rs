//! The initiator's end of a queue.

mod activation;
mod credit;
mod durability;
mod queue;
pub mod rails;
pub mod replay;
pub mod session;
mod slots;

pub use credit::Allowance;
pub use durability::{Durability, FlushMark, Ground};
pub use queue::{Completion, Incoming, Operation, Outgoing, Queue, QueueOptions};
pub use session::Session;
