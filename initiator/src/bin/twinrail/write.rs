//! `write`: a file or stdin to a range of a volume, as it is.

use std::path::PathBuf;

use twinrail_initiator::VolumeUrl;

use crate::attach::AttachArguments;
use crate::copy::{Job, Manner, Opened};
use crate::interrupt::Interrupt;
use crate::range::{RangeArguments, aligned};
use crate::transfer;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// File with what is to be written, whole blocks of it; `-` is stdin
    #[arg(default_value = "-")]
    file: PathBuf,
    #[command(flatten)]
    range: RangeArguments,
    /// Have each write on stable storage before it counts as done
    #[arg(long)]
    fua: bool,
    /// Flush at the end: everything is on stable storage then
    #[arg(long)]
    flush: bool,
    /// Print one JSON object when it is done
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    attach: AttachArguments,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, file, range, fua, flush, json, attach } = arguments;
    let opened = Opened::open(file)?;
    let volume = attach.to_write(url)?;
    let geometry = volume.geometry();
    if let Some(length) = range.length {
        aligned(&format!("--length {length}"), length, &geometry)?;
    } else if let Some(length) = opened.length() {
        aligned(&format!("{} has {length} bytes, which", opened.name()), length, &geometry)?;
    }
    let manner = Manner { sparse: false, fua: *fua, fill_up: false, flush: *flush };
    let job = Job::to_volume(opened, volume, url, *range, manner)?;
    transfer::run(&job, "writing", url, Some(*fua || *flush), *json, interrupt)
}
