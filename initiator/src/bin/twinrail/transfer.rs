//! What `read` and `write` have in common: the data as it is, from one end to the other, and what is told of it.

use anyhow::Context;
use serde::Serialize;
use twinrail_initiator::VolumeUrl;

use crate::copy::Job;
use crate::interrupt::Interrupt;
use crate::output;

#[derive(Serialize)]
struct Summary {
    offset_bytes: u64,
    bytes: u64,
    seconds: f64,
    /// Of what was written: whether it is known to be on stable storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    stable: Option<bool>,
}

/// Does the job, and tells of it if that is to be in JSON: there is nothing to say in words.
pub(crate) fn run(
    job: &Job,
    what: &'static str,
    url: &VolumeUrl,
    stable: Option<bool>,
    json: bool,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let done = job.run(what, json, false, interrupt).with_context(|| url.to_string())?;
    if !json {
        return Ok(());
    }
    let (offset_bytes, bytes, seconds) = (job.offset, done.copied.bytes, done.seconds);
    output::print_json(&Summary { offset_bytes, bytes, seconds, stable })
}
