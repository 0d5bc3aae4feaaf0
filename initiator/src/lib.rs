//! The Twinrail initiator: attaches volumes of a target and moves blocks.
//!
//! **What it is.** Three ways to drive a volume, each on top of the one before:
//!
//! - [`Session::attach`] gives bare [`Queue`]s, each owned by one thread of the caller's: submit, poll, wait. No
//!   lock, and no allocation per command. For whoever has an event loop of his own, and for the last
//!   microsecond.
//! - [`Volume`] is asynchronous and belongs to no runtime. Threads of its own drive the queues; calls own their
//!   buffers, so that a future may be dropped at any time (I3).
//! - [`blocking::Volume`] is the same for threads that may block.
//!
//! Data lies in [`Buffer`]s of an [`Arena`]: memory that is registered once with whatever moves it, now and when
//! RDMA comes. [`Volume::read_at`] and [`Volume::write_at`] copy through it for those who have memory of their
//! own.
//!
//! **What it may depend on.** `twinrail-protocol` for every decision about slots, credits and epochs,
//! `twinrail-fallback-tcp` for bytes on sockets. Never on the target, nor on a runtime. Unsafe code lives in
//! [`arena`] alone.
//!
//! **How it is driven.** From an address and [`Options`], this is a whole program (`examples/first_light.rs`,
//! which the tests run):
//!
//! ```no_run
#![doc = include_str!("../examples/first_light.rs")]
//! ```
//!
//! **When a connection is lost** it is replaced; commands are held meanwhile, and each is executed once. Nobody sees
//! more than a pause, of any length unless [`Options::fail_fast`] bounds it.
//!
//! **When something fails**, [`Error`] says who has to act: the caller, the target, the network. A change that
//! was on its way when the session was lost has an [unknown outcome](Error::OutcomeUnknown): the target doesn't take
//! the session back (it was restarted, the lease is over, another writer has taken the volume), or fail-fast gave up.
//! In this version a session that is lost isn't attached again by itself.
//!
//! **What it is doing** is told by [`Metrics`] in Prometheus' format, and by `tracing` events.
//!
//! The rooms: [`url`] and [`options`] are what the caller says, [`connect`] and [`session`] bring up the paths,
//! [`queue`] drives one and replaces it, [`request`] is what goes in and comes out of it; `keeper` watches over queues
//! that nobody polls. Above, `lane` has the threads, `cells` is where commands of [`volume`] end.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "the one room that has it")]
pub mod arena;
mod attach;
pub mod blocking;
mod cells;
pub mod connect;
mod doorbell;
pub mod error;
mod keeper;
mod lane;
pub mod metrics;
pub mod options;
mod outage;
pub mod queue;
pub mod request;
pub mod session;
pub mod url;
pub mod volume;
mod volume_info;

pub use arena::{Arena, ArenaError, Buffer, Pages};
pub use connect::ConnectError;
pub use doorbell::Doorbell;
pub use error::{Blame, Error, PathEnd, Rejection};
pub use metrics::{METRICS, Metrics};
pub use options::{OptionError, Options};
pub use outage::Outage;
pub use queue::Queue;
pub use request::{Done, NotTaken, Reason, Request};
pub use session::Session;
pub use url::{Endpoint, UrlError, VolumeUrl};
pub use volume::{Volume, ZeroOptions};
pub use volume_info::VolumeInfo;

pub use twinrail_protocol::wire::{AttachMode, Extent, ExtentFlags, VolumeFlags};
pub use twinrail_protocol::{Flags, Geometry, Opcode, SessionId, Status, VolumeId};
