//! A progress bar, when a person is looking.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress of long work in bytes.
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Begins a bar over `total` bytes if they are known. It is on stderr, if that is a terminal and the caller
    /// isn't a script.
    pub(crate) fn begin(what: &'static str, total: Option<u64>, script: bool) -> Self {
        let seen = !script && std::io::stderr().is_terminal();
        let target = if seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(total, target);
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what);
        if seen {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self { bar }
    }

    /// So many bytes more are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
