//! The target's side: one end of a queue, and who holds which volume.
//!
//! ```text
//!   queue      slots, sequences, epochs, replies           holdings    who holds what: puts the rules together
//!   credit     slots granted, data window                  holders     who may hold beside whom
//!   flush      I5: a FLUSH never lies                      generation  who was away while another one wrote
//!                                                          grace       for one lease after the start
//!   admission  an attach, from request to answer           lease       how long a session lives without a path
//!   refusal    why one is refused                          ending      I2: over when nothing acts any more
//!   record     what the state file holds                   takeover    secrets that replace one another
//! ```

mod admission;
mod credit;
mod ending;
mod flush;
mod generation;
mod grace;
mod holders;
mod holdings;
mod lease;
mod queue;
mod record;
mod refusal;
mod takeover;

pub use admission::{Admitted, Asking, RequestId};
pub use credit::Grant;
pub use flush::{FlushLedger, FlushMark, Inherited};
pub use holders::HeldBy;
pub use holdings::{Holdings, Limits, Output, VolumeFacts};
pub use lease::PathId;
pub use queue::{Intake, Outcome, Queue, QueueOptions, Start, Step};
pub use record::{Digest, Holder, MAX_REPLACED, Record, SyncState};
pub use refusal::Refusal;
