//! What the tests with real processes are built of.
//!
//! **What it is.** [`Process`] is a program that runs, with its log; [`Target`] is `twinrail-target` on a free port;
//! [`twinrail`] runs the initiator's command. [`wire`] speaks the protocol byte by byte, so that a test can say what no
//! initiator of ours would say. [`Scrape`] reads `/metrics`. [`image`] makes and compares large files.
//!
//! **The rules.** A test waits for an event (a log line, an answer, the end of a process), each with a deadline of
//! [`PATIENCE`], never for a while. Processes are ended by pid. What can't be tested on this machine says why:
//! [`skip`]. All traffic stays on loopback, all files in a directory of the test's own.

// All of this is for tests: what fails here is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod command;
pub mod http;
pub mod image;
mod process;
pub mod proxy;
pub mod random;
mod skips;
mod target;
pub mod wire;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use command::{Run, run, run_in, twinrail};
pub use http::Scrape;
pub use process::Process;
pub use proxy::{Kill, Proxy};
pub use random::Random;
pub use skips::{is_root, skip};
pub use target::{Builder, Target};

/// How long a test waits for something that is to happen at once. Long, since it only matters when a test fails, and
/// the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A program of ours. Built with `cargo build --bins`; `TWINRAIL_BIN` names another folder.
///
/// # Panics
/// When it isn't built.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let beside_the_test = || {
        let test = std::env::current_exe().unwrap();
        // .build/debug/deps/integration-0123 -> .build/debug
        test.ancestors().nth(2).unwrap().to_owned()
    };
    let folder = std::env::var_os("TWINRAIL_BIN").map_or_else(beside_the_test, PathBuf::from);
    let path = folder.join(name);
    assert!(path.exists(), "{} isn't there: run `cargo build --bins` first, or tests/run", path.display());
    path
}

/// The root of the source tree.
///
/// # Panics
/// Never: this package has a parent.
#[must_use]
pub fn source_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A directory that goes when the test ends.
///
/// # Panics
/// When none can be made.
#[must_use]
pub fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("twinrail-test-").tempdir_in(scratch_root()).unwrap()
}

/// Where scratch directories are made: a real file system with direct I/O, which /tmp often isn't. Names stay short,
/// for the sake of sockets.
fn scratch_root() -> PathBuf {
    std::env::var_os("TWINRAIL_SCRATCH").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}
