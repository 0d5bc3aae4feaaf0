//! The Twinrail target: serves volumes to initiators. The daemon `twinrail-target` is a thin shell around
//! this library.
//!
//! **What it is.** Two planes. The *control plane* ([`control`]) runs on tokio: it listens, shakes hands,
//! owns sessions and who holds which volume, answers Prometheus. The *data plane* ([`reactor`]) is pinned
//! threads with one io_uring each; once a connection's handshake is over it belongs to one reactor, which
//! alone touches its queue, its buffers and its slots. [`volume`] is the storage below both.
//!
//! **What it may depend on.** `twinrail-protocol` for every decision about slots, credits and epochs,
//! `twinrail-fallback-tcp` for bytes on sockets. Never on the initiator.
//!
//! **How it is driven.** [`control::Server::run`] with a checked [`config::Config`].

pub mod config;
pub mod control;
pub mod mapping;
pub mod metrics;
pub mod reactor;
pub mod session;
mod throttle;
pub mod volume;
