//! `copy`: between files or streams and volumes.

mod destination;
mod engine;
mod job;
mod pieces;
mod source;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;
use serde::Serialize;
use twinrail_initiator::{UrlError, VolumeId, VolumeUrl, blocking};

pub(crate) use self::destination::Manner;
pub(crate) use self::job::{Done, Job};
pub(crate) use self::source::Opened;
use crate::attach::AttachArguments;
use crate::interrupt::Interrupt;
use crate::range::{RangeArguments, aligned};
use crate::size::Shown;
use crate::usage::usage;
use crate::{metrics, output};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// From where: twinrail://host[:port]/volume, a file, a block device, or `-` for stdin
    source: End,
    /// To where: twinrail://host[:port]/volume, a file (which becomes sparse), a block device, or `-` for stdout
    destination: End,
    #[command(flatten)]
    range: RangeArguments,
    /// Don't compare the target's checksums with those of what was copied. With them the target reads all of the
    /// range once more, holes too
    #[arg(long)]
    no_verify: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Serve the initiator's metrics for Prometheus here while it runs, e.g. 127.0.0.1:9451
    #[arg(long, value_name = "ADDRESS", value_parser = metrics::address)]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    attach: AttachArguments,
}

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Volume(VolumeUrl),
    Path(PathBuf),
}

impl FromStr for End {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        // With one slash it is no file either, but a slip of the pen.
        match text.contains("://") || text.starts_with("twinrail:") {
            true => text.parse().map(Self::Volume),
            false => Ok(Self::Path(text.into())),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(url) => url.fmt(f),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// What is told at the end.
#[derive(Serialize)]
struct Summary {
    source: String,
    destination: String,
    /// First byte on the volume.
    offset_bytes: u64,
    bytes: u64,
    /// What moved over the network.
    data_bytes: u64,
    /// Zeros that the destination had already.
    left_alone_bytes: u64,
    /// Part of the destination volume behind what was copied, which is as it was.
    untouched_bytes: u64,
    /// Until everything was on stable storage, without the verification.
    seconds: f64,
    mib_per_s: f64,
    verified: bool,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { source, destination, range, json, no_verify, .. } = arguments;
    if let End::Path(path) = destination {
        output::keep_json_apart(*json, path)?;
    }
    let attach = AttachArguments { metrics: metrics::serve(arguments.metrics)?, ..arguments.attach.clone() };
    let job = match (source, destination) {
        (End::Path(path), End::Volume(url)) => {
            let opened = Opened::open(path)?;
            Job::to_volume(opened, attach.to_write(url)?, url, *range, Manner::COPY)?
        }
        (End::Volume(url), End::Path(path)) => {
            let volume = attach.to_read(url)?;
            let range = range.in_whole_blocks(&volume.geometry())?;
            Job::from_volume(volume, range, path)?
        }
        (End::Volume(from), End::Volume(to)) => {
            if from == to {
                return Err(onto_itself(from, to));
            }
            // Mode and fence are about who else writes: they belong to the destination.
            let reader = AttachArguments { mode: None, preempt: false, ..attach.clone() };
            let other = reader.to_read(from)?;
            let range = range.in_whole_blocks(&other.geometry())?;
            let volume = attach.to_write(to)?;
            if identity(&other) == identity(&volume) {
                return Err(onto_itself(from, to));
            }
            aligned(&format!("--offset {}", range.offset), range.offset, &volume.geometry())?;
            Job::between(other, range, from, volume, to)?
        }
        (End::Path(_), End::Path(_)) => {
            let text = "neither the source nor the destination is a volume: write one as";
            return Err(usage(format!("{text} twinrail://host[:port]/volume")));
        }
    };
    let Done { copied, seconds } =
        job.run("copying", *json, !no_verify, interrupt).with_context(|| format!("{source} to {destination}"))?;
    let summary = Summary {
        source: source.to_string(),
        destination: destination.to_string(),
        offset_bytes: job.offset,
        bytes: copied.bytes,
        data_bytes: copied.data,
        left_alone_bytes: copied.left_alone,
        untouched_bytes: job.untouched(copied.bytes),
        seconds,
        mib_per_s: copied.bytes as f64 / (1 << 20) as f64 / seconds.max(1e-9),
        verified: !no_verify,
    };
    match (json, job.is_to_stream()) {
        (true, _) => output::print_json(&summary),
        (false, false) => output::print(&summary.to_string()),
        (false, true) => {
            output::complain(&summary);
            Ok(())
        }
    }
}

/// What tells a volume from all others: clones of a machine have files of the same UUID.
fn identity(volume: &blocking::Volume) -> (VolumeId, String) {
    (volume.info().id, volume.as_async().target_name().to_owned())
}

fn onto_itself(from: &VolumeUrl, to: &VolumeUrl) -> anyhow::Error {
    usage(format!("{from} and {to} are the same volume: name another one as the destination"))
}

/// A rate with as many digits as tell something.
fn rate(mib_per_s: f64) -> String {
    match mib_per_s {
        10.0.. => format!("{mib_per_s:.0} MiB/s"),
        1.0.. => format!("{mib_per_s:.1} MiB/s"),
        _ => format!("{:.1} KiB/s", mib_per_s * 1024.0),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, data_bytes, seconds, mib_per_s, untouched_bytes, .. } = *self;
        let verified = if self.verified { "verified" } else { "not verified" };
        write!(f, "{bytes} bytes ({}) copied in {seconds:.2} s, {}, ", Shown(bytes), rate(mib_per_s))?;
        write!(f, "of which {} data; {verified}", Shown(data_bytes))?;
        match untouched_bytes {
            0 => Ok(()),
            rest => write!(f, "; the last {} of the volume are as they were", Shown(rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_copy_ran_at_0_mib_per_s() {
        assert_eq!(rate(0.25), "256.0 KiB/s");
        assert_eq!(rate(1.26), "1.3 MiB/s");
        assert_eq!(rate(1234.5), "1234 MiB/s");
    }

    #[test]
    fn an_end_is_a_volume_or_a_path() {
        assert_eq!("-".parse(), Ok(End::Path("-".into())));
        assert_eq!("./twinrail:image".parse(), Ok(End::Path("./twinrail:image".into())));
        assert!(matches!("twinrail://h/d".parse(), Ok(End::Volume(_))));
        assert!("nbd://h/d".parse::<End>().is_err());
        assert!("twinrail:/h/d".parse::<End>().is_err());
        assert!("twinrail://h".parse::<End>().is_err());
    }
}
