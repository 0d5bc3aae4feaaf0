//! The TCP rail of Twinrail: frames out of a byte stream and into it, and the socket below.
//!
//! **What it is.** [`Inbound`] cuts what a connection delivers into frames and lets long payloads be
//! received where they belong, without a copy. [`Outbound`] queues frames, control before data, and sends
//! many with one call. Both are free of I/O: they reach a socket through [`ReceiveVectored`] and
//! [`SendVectored`], which [`Socket`] implements over a non-blocking TCP socket.
//!
//! **What it may depend on.** `twinrail-protocol`, which alone knows how a frame is laid out, and the
//! socket calls. No clock, no thread, no lock, no runtime: the target's reactors and the initiator's queue
//! threads drive the same code. Nothing is allocated after construction (I8).
//!
//! **How it is driven.** A connection comes here once its handshake is over (HELLO to ACTIVATED are read
//! and written elsewhere). Its thread waits for the socket by whatever means it has ([`Socket`] is
//! `AsFd`), then
//!
//! 1. *when readable* alternates between [`Inbound::next`] until [`Arrival::Pending`] and one
//!    [`Inbound::fill`], until the socket has no more (or the connection has had its share of the turn);
//!    an [`Arrival::Large`] is answered with [`Inbound::place`] or [`Inbound::skip`];
//! 2. *after the session core has spoken* queues its frames with [`Outbound::push`] and
//!    [`Outbound::push_control`], calls [`Outbound::flush`] once, and waits for the socket to be writable
//!    only on [`Flushed::WouldBlock`].
//!
//! To **fence** a path, cancel and reap what waits on the socket, then [`Socket::abort`] and
//! [`Outbound::drain`]: nothing that was not sent yet is sent later.
#![forbid(unsafe_code)]

mod inbound;
mod outbound;
#[cfg(test)]
mod scripted;
mod socket;

pub use inbound::{Arrival, Filled, Inbound, ReceiveVectored};
pub use outbound::{CONTROL_FRAMES, Flushed, Full, Outbound, SendVectored};
pub use socket::{Options, Socket};
