//! How a volume is attached.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use twinrail_initiator::{AttachMode, Metrics, Options, Queue, VolumeUrl, blocking};
use twinrail_protocol::limits::{MAX_DEPTH, MAX_QUEUES};

use crate::number;
use crate::usage::usage;

/// How long the end of the session may take to be confirmed.
const CLOSE: Duration = Duration::from_secs(5);

/// How others may use the volume meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// No other writer; readers may be there
    Exclusive,
    /// Several writers, as cluster file systems need it
    Shared,
    /// A reader, of which there may be many, whoever else is there
    ReadOnly,
}

impl From<Mode> for AttachMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Exclusive => Self::EXCLUSIVE,
            Mode::Shared => Self::SHARED,
            Mode::ReadOnly => Self::READ_ONLY,
        }
    }
}

/// When to stop waiting for a connection that was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailFast {
    After(Duration),
    Never,
}

fn fail_fast(text: &str) -> Result<FailFast, String> {
    match text {
        "never" => Ok(FailFast::Never),
        text => match number::seconds(0.001, 86_400.0)(text) {
            Ok(span) => Ok(FailFast::After(span)),
            Err(error) => Err(format!("{error}, or `never`")),
        },
    }
}

/// Options that every command with a volume takes.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Attaching")]
pub(crate) struct AttachArguments {
    /// How the volume is held [default: read-only for what only reads, exclusive for what writes]
    #[arg(long, value_enum)]
    pub(crate) mode: Option<Mode>,
    /// Fence off the writers that stand in the way: their requests fail
    #[arg(long)]
    pub(crate) preempt: bool,
    /// Name that the target knows this initiator by [default: the host's name and the process id]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Queues, each with a connection of its own [default: half the processors, at most 4]
    #[arg(long, value_parser = number::whole(1, MAX_QUEUES))]
    pub(crate) queues: Option<u16>,
    /// Requests that each queue may have in flight [default: 128]
    #[arg(long, value_parser = number::whole(1, MAX_DEPTH))]
    pub(crate) depth: Option<u16>,
    /// End with code 5 after so many seconds without a connection that answers; `never` holds requests for ever
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = fail_fast)]
    pub(crate) fail_fast: FailFast,
    /// Where the numbers go, if somebody wants them.
    #[arg(skip)]
    pub(crate) metrics: Option<Metrics>,
}

impl AttachArguments {
    /// The library's options; `mode` is how the volume is held unless the arguments say otherwise.
    pub(crate) fn options(&self, mode: Mode) -> Options {
        let default = Options::default();
        Options {
            mode: self.mode.unwrap_or(mode).into(),
            preempt: self.preempt,
            name: self.name.clone().unwrap_or(default.name),
            queues: self.queues.unwrap_or(default.queues),
            depth: self.depth.unwrap_or(default.depth),
            fail_fast: match self.fail_fast {
                FailFast::After(span) => Some(span),
                FailFast::Never => None,
            },
            metrics: self.metrics.clone(),
            ..default
        }
    }

    /// Attaches a volume to read from, unless the arguments say otherwise.
    pub(crate) fn to_read(&self, url: &VolumeUrl) -> anyhow::Result<blocking::Volume> {
        Ok(blocking::Volume::connect(url, self.options(Mode::ReadOnly))?)
    }

    /// Attaches a volume to write to.
    pub(crate) fn to_write(&self, url: &VolumeUrl) -> anyhow::Result<blocking::Volume> {
        if self.mode == Some(Mode::ReadOnly) {
            return Err(usage(format!("--mode read-only doesn't go with writing to {url}: use exclusive or shared")));
        }
        Ok(blocking::Volume::connect(url, self.options(Mode::Exclusive))?)
    }
}

/// Ends the session in order, so that the target needn't wonder. What goes wrong changes no result.
pub(crate) fn close(mut queues: Vec<Queue>) {
    let Some(first) = queues.first_mut() else { return };
    let deadline = Instant::now() + CLOSE;
    first.close();
    while first.poll(drop).is_ok() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        first.wait(Some(left));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_get_an_exit_code_unless_they_ask_not_to() {
        assert_eq!(fail_fast("never"), Ok(FailFast::Never));
        assert_eq!(fail_fast("0.5"), Ok(FailFast::After(Duration::from_millis(500))));
        for bad in ["0", "x", "-1", "", "forever"] {
            assert!(fail_fast(bad).is_err_and(|error| error.contains("seconds") && error.contains("never")), "{bad}");
        }
    }
}
