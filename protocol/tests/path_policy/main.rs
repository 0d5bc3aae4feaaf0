//! The initiator's path policy in a small world with a coarse network: what leaves a path, what doesn't, and
//! how it comes back.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod alarm;
mod cuts;
mod dialing;
mod healthy;
mod returning;
mod spec;
mod storms;
mod world;
