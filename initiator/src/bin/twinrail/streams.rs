//! Standard streams that were closed when the program was started. The runtime puts `/dev/null` in their place before
//! `main`, where writing always succeeds and reading always ends at once: results would vanish, and a closed stdin would
//! pass for an empty one. Hence it is noted before the runtime begins.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;

use crate::usage::usage;

static STDIN_CLOSED: AtomicBool = AtomicBool::new(false);
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

// SAFETY: the loader calls each pointer in `.init_array` before `main`, on the only thread, as a C function; arguments
// that it may pass are ignored by one without parameters. `note` is one and needs nothing that the runtime sets up: it
// makes two system calls and stores to atomics.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_THE_RUNTIME: extern "C" fn() = note;

extern "C" fn note() {
    let closed = |fd| rustix::io::fcntl_getfd(fd).is_err();
    STDIN_CLOSED.store(closed(rustix::stdio::stdin()), Ordering::Relaxed);
    STDOUT_CLOSED.store(closed(rustix::stdio::stdout()), Ordering::Relaxed);
}

/// Fails if nothing can come from stdin.
pub(crate) fn stdin_is_open() -> anyhow::Result<()> {
    match STDIN_CLOSED.load(Ordering::Relaxed) {
        true => Err(usage("stdin is closed: name a file, or open stdin with `<` or `|`")),
        false => Ok(()),
    }
}

/// Fails if what goes to stdout would be lost.
pub(crate) fn stdout_is_open() -> anyhow::Result<()> {
    if STDOUT_CLOSED.load(Ordering::Relaxed) {
        bail!("stdout can't be written: it is closed; `>/dev/null` is for output that nobody wants");
    }
    Ok(())
}
