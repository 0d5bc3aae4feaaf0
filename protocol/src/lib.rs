//! The Twinrail protocol: what goes over the wire, and the state machines that decide what may.
//!
//! **What it is.** [`wire`] holds the byte layouts of `SPEC.md`. [`initiator::Queue`] and
//! [`target::Queue`] are the two ends of one queue: slots, sequences, epochs, credits and the reply
//! cache. [`buddy`] divides a stretch of registered memory. The numbered invariants (I1 to I10) are
//! listed in `SPEC.md`.
//!
//! **What it may depend on.** Nothing that does I/O, reads a clock, draws a random number or starts
//! a thread: the crate is `no_std` with `alloc` and forbids unsafe code, so the compiler sees to
//! most of that. Time, random numbers and checksums of payloads come in as arguments.
//!
//! **How it is driven.** A driver owns the rail (a socket, a queue pair, a simulator) and the payload
//! buffers. Per turn of its loop it
//!
//! 1. takes what arrived, decodes the header with [`wire::Frame::decode`] and gives it to the queue's
//!    `receive`, which answers with one value saying what to do (place a payload, execute, fetch,
//!    complete, drop);
//! 2. reports what finished (a payload whole, a storage command ended);
//! 3. asks for frames to send until there are none.
//!
//! The queue never touches payload bytes: it says *fetch the payload of slot s* or *deliver the
//! payload of slot s*, and each rail does it its own way.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod buddy;
pub mod canary;
mod checksum;
pub mod control_credit;
pub mod geometry;
pub mod ids;
pub mod initiator;
pub mod limits;
pub mod liveness;
pub mod opcode;
pub mod status;
pub mod target;
mod violation;
pub mod wire;

pub use checksum::{crc32c, crc32c_append};
pub use control_credit::ControlCredit;
pub use geometry::{Geometry, Range, Request};
pub use ids::{BootId, Epoch, GrantNumber, Instance, QueueId, Secret, Sequence, SessionId, Slot, VolumeId};
pub use opcode::{Flags, Opcode};
pub use status::Status;
pub use violation::Violation;
