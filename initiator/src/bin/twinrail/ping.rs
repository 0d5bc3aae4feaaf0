//! `ping`: round trips to the reactor that serves the volume, none of them to the storage.

use std::fmt;
use std::time::Duration;

use anyhow::Context;
use hdrhistogram::Histogram;
use serde::Serialize;
use twinrail_initiator::VolumeUrl;

use crate::attach::AttachArguments;
use crate::interrupt::Interrupt;
use crate::{number, output};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// Round trips
    #[arg(long, short, default_value_t = 10, value_parser = number::whole(1, u64::MAX))]
    count: u64,
    /// Time between two of them in seconds; 0 leaves none
    #[arg(long, short, default_value = "0.2", value_name = "SECONDS", value_parser = number::seconds(0.0, 3600.0))]
    interval: Duration,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    attach: AttachArguments,
}

#[derive(Serialize)]
struct Summary {
    url: String,
    target_name: String,
    count: u64,
    min_us: f64,
    avg_us: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, count, interval, json, attach } = arguments;
    // One round trip at a time needs one queue.
    let attach = AttachArguments { queues: Some(attach.queues.unwrap_or(1)), ..attach.clone() };
    let volume = attach.to_read(url)?;
    interrupt.finish_first([volume.as_async().session()]);
    let mut trips_ns = Histogram::<u64>::new(3)?;
    // The histogram rounds; what its summary says must be what the lines said.
    let (mut least, mut most, mut sum) = (Duration::MAX, Duration::ZERO, Duration::ZERO);
    let mut interrupted = Ok(());
    for number in 1..=*count {
        let trip = volume.ping().with_context(|| url.to_string())?;
        trips_ns.record(u64::try_from(trip.as_nanos()).unwrap_or(u64::MAX))?;
        (least, most, sum) = (least.min(trip), most.max(trip), sum + trip);
        if !json {
            output::print(&format!("{url}: round trip {number} took {:.1} us", trip.as_secs_f64() * 1e6))?;
        }
        if number < *count {
            interrupted = interrupt.wait(*interval, || false);
            if interrupted.is_err() {
                break;
            }
        }
    }
    let (us, exact_us) = (|ns: u64| ns as f64 / 1e3, |time: Duration| time.as_secs_f64() * 1e6);
    let within = |ns: u64| us(ns).clamp(exact_us(least), exact_us(most));
    let summary = Summary {
        url: url.to_string(),
        target_name: volume.as_async().target_name().to_owned(),
        count: trips_ns.len(),
        min_us: exact_us(least),
        avg_us: exact_us(sum) / trips_ns.len() as f64,
        p50_us: within(trips_ns.value_at_quantile(0.5)),
        p99_us: within(trips_ns.value_at_quantile(0.99)),
        max_us: exact_us(most),
    };
    volume.close()?;
    output::tell(&summary, *json)?;
    Ok(interrupted?)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { target_name, count, min_us, avg_us, p99_us, max_us, .. } = self;
        write!(f, "{count} round trips to {target_name}: min {min_us:.1} us, avg {avg_us:.1} us, ")?;
        write!(f, "p99 {p99_us:.1} us, max {max_us:.1} us")
    }
}
