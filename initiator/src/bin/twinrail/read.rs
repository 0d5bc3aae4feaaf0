//! `read`: a range of a volume as it is.

use std::path::PathBuf;

use anyhow::Context;
use serde::Serialize;
use twinrail_initiator::VolumeUrl;

use crate::attach::AttachArguments;
use crate::copy::Job;
use crate::exit::usage;
use crate::interrupt::Interrupt;
use crate::output;
use crate::range::RangeArguments;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// File to write what is read to; `-` is stdout
    #[arg(default_value = "-")]
    file: PathBuf,
    #[command(flatten)]
    range: RangeArguments,
    /// Print one JSON object when it is done
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    attach: AttachArguments,
}

#[derive(Serialize)]
struct Summary {
    offset_bytes: u64,
    bytes: u64,
    seconds: f64,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, file, range, json, attach } = arguments;
    if *json && file.as_os_str() == "-" {
        return Err(usage("--json goes to stdout, and so would the data: name a file for it"));
    }
    let volume = attach.to_read(url)?;
    let range = range.in_whole_blocks(&volume.geometry())?;
    let job = Job::from_volume(volume, range, file)?;
    let done = job.run("reading", *json, false, interrupt).with_context(|| url.to_string())?;
    job.close()?;
    if *json {
        let summary = Summary { offset_bytes: job.offset, bytes: done.copied.bytes, seconds: done.seconds };
        return output::print_json(&summary);
    }
    Ok(())
}
