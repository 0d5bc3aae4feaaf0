//! Tests that this machine can't run.

use std::fs::OpenOptions;
use std::io::Write;

/// Says that the running test can't be run here, and why. `tests/run` counts these, through the file that
/// `TWINRAIL_SKIPS` names. The test returns right after.
///
/// # Panics
/// When that file can't be written.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {reason}\n", thread.name().unwrap_or("a test"));
    eprint!("SKIPPED {line}");
    if let Some(path) = std::env::var_os("TWINRAIL_SKIPS") {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}

/// Whether the test may mount and change its user.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
