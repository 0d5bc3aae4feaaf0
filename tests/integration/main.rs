//! Tests with real processes on loopback. Each module is one concern; the names of the tests say what they prove.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod backings;
mod bad_requests;
mod bad_volumes;
mod commands;
mod copy;
mod deployment;
mod log_lines;
mod memory;
mod metrics;
mod outages;
mod readme;
mod shutdown;
mod soak;
mod storage_faults;
mod strangers;
mod switches;
