//! `read`: a range of a volume as it is.

use std::path::PathBuf;

use twinrail_initiator::VolumeUrl;

use crate::attach::AttachArguments;
use crate::copy::Job;
use crate::interrupt::Interrupt;
use crate::range::RangeArguments;
use crate::{output, transfer};

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

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, file, range, json, attach } = arguments;
    output::keep_json_apart(*json, file)?;
    let volume = attach.to_read(url)?;
    let range = range.in_whole_blocks(&volume.geometry())?;
    let job = Job::from_volume(volume, range, file)?;
    transfer::run(&job, "reading", url, None, *json, interrupt)
}
