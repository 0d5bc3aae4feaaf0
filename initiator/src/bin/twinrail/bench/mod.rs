//! `bench`: how fast a volume is.

mod cpu;
mod load;
mod random;
mod report;

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use hdrhistogram::Histogram;
use twinrail_initiator::{Arena, Buffer, Geometry, Metrics, Options, Pages, Queue, Session, VolumeUrl};

use self::load::{Control, Measured, Phase};
use self::random::{Accesses, Pattern, Random};
use self::report::Report;
use crate::attach::{self, AttachArguments, Mode};
use crate::exit::usage;
use crate::interrupt::Interrupt;
use crate::range::aligned;
use crate::{metrics, output, size};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// Order of the requests
    #[arg(long, value_enum, default_value_t = Pattern::Random)]
    pattern: Pattern,
    /// How many of a hundred requests read; the others DESTROY what is on the volume
    #[arg(long, value_name = "0..100", default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100))]
    read_percent: u8,
    /// Length of each request in bytes; 64k, 1M and so on are understood
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = size::parse)]
    block_size: u64,
    /// How long is measured, in seconds
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// What isn't measured before that, in seconds [default: 0.5, or 0 with --ios]
    #[arg(long, value_name = "SECONDS")]
    warm_up: Option<f64>,
    /// Stop when so many requests were measured, if that is before --seconds are over
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    ios: Option<u64>,
    /// Beginning of the sequence of random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long a queue's thread looks for replies before it sleeps, in microseconds at most; 0 never does
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    spin_us: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Serve the initiator's metrics for Prometheus here while it runs, e.g. 127.0.0.1:9451
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    attach: AttachArguments,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, read_percent, json, .. } = arguments;
    let warm_up = arguments.warm_up.unwrap_or(if arguments.ios.is_some() { 0.0 } else { 0.5 });
    let times = (span("--seconds", arguments.seconds)?, span("--warm-up", warm_up)?);
    let writes = *read_percent < 100;
    if writes && arguments.attach.mode == Some(Mode::ReadOnly) {
        return Err(usage("--mode read-only doesn't go with --read-percent under 100: use exclusive or shared"));
    }
    let metrics = match metrics::serve(arguments.metrics)? {
        Some(metrics) => metrics,
        None => Metrics::new().map_err(|error| anyhow!("the metrics can't be registered: {error}"))?,
    };
    let defaults = arguments.attach.options(if writes { Mode::Exclusive } else { Mode::ReadOnly });
    let options = Options { spin_us: arguments.spin_us.unwrap_or(defaults.spin_us), ..defaults };
    let (session, queues) = Session::attach(url, &options, &metrics)?;
    check_block(arguments.block_size, &session.geometry())?;
    interrupt.finish_first();
    let first = queues.first().context("the target gives no queue")?;
    let mut report = Report {
        url: url.to_string(),
        pattern: arguments.pattern.name(),
        read_percent: *read_percent,
        block_size: arguments.block_size,
        queues: queues.len(),
        depth: first.depth(),
        rail: first.rail().map_or("none", |rail| rail.name()),
        congestion: first.congestion().map(str::to_owned),
        ..Report::default()
    };
    let error = measure(arguments, queues, &session.geometry(), times, &mut report, interrupt)?;
    if *json {
        output::print_json(&report)?
    } else {
        output::print(&report.to_string())?
    };
    match error {
        Some(error) => Err(error.context(format!("{} of {} requests failed", report.errors, report.tried()))),
        None => Ok(interrupt.check()?),
    }
}

fn span(option: &str, seconds: f64) -> anyhow::Result<Duration> {
    let span = Duration::try_from_secs_f64(seconds).ok().filter(|span| *span <= Duration::from_secs(1 << 20));
    span.ok_or_else(|| usage(format!("{option} is a number of seconds from 0 to 1048576, like 5 or 0.5")))
}

/// Refuses blocks that no request to the volume may have.
fn check_block(block: u64, geometry: &Geometry) -> anyhow::Result<()> {
    let most = u64::from(geometry.max_transfer).min(geometry.size);
    if block == 0 || block > most {
        return Err(usage(format!("--block-size {block}: from {} to {most} bytes it may be", geometry.logical_block)));
    }
    aligned(&format!("--block-size {block}"), block, geometry)
}

/// Runs the load and fills in what was measured; gives the first error of a request.
fn measure(
    arguments: &Arguments,
    queues: Vec<Queue>,
    geometry: &Geometry,
    (seconds, warm_up): (Duration, Duration),
    report: &mut Report,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<anyhow::Error>> {
    let count = queues.len() as u64;
    let mut buffers = buffers(&queues, arguments.block_size as usize, arguments.seed)?;
    let blocks = geometry.size / arguments.block_size;
    let control = Control::new(queues.len(), interrupt);
    let target = cpu::peer_process(arguments.url.target.port);
    let cpu = || (cpu::of_this_process(), target.and_then(cpu::of_process));
    let (measured, elapsed, before, after) = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, queue) in queues.into_iter().enumerate() {
            let index = index as u64;
            let (pattern, read_percent) = (arguments.pattern, arguments.read_percent);
            let accesses =
                Accesses::new(pattern, read_percent, arguments.block_size, blocks, arguments.seed, index, count);
            let most = arguments.ios.map(|ios| ios / count + u64::from(index < ios % count));
            let (buffers, control) = (buffers.pop().unwrap_or_default(), &control);
            let name = format!("bench-{index}");
            let thread = thread::Builder::new().name(name);
            let thread = thread.spawn_scoped(scope, move || load::run(queue, accesses, buffers, most, control));
            if thread.is_err() {
                control.enter(Phase::Stop);
            }
            threads.push(thread.context("no thread for a queue")?);
        }
        // A thread that ends early has failed, or measured all it had to. A signal only ends the wait.
        let all = control.busy();
        let _signal = interrupt.wait(warm_up, || control.busy() < all);
        let (begun, before) = (Instant::now(), cpu());
        control.enter(Phase::Measure);
        let done = || if arguments.ios.is_some() { control.busy() == 0 } else { control.busy() < all };
        let _signal = interrupt.wait(seconds, done);
        let (elapsed, after) = (begun.elapsed(), cpu());
        control.enter(Phase::Stop);
        let measured: Vec<_> =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread died")))).collect();
        anyhow::Ok((measured, elapsed, before, after))
    })?;
    let mut latency_ns = Histogram::<u64>::new(3)?;
    let (mut queues, mut first_error) = (Vec::new(), None);
    for measured in measured {
        let Measured { latency_ns: one, errors, first_error: error, queue } = measured?;
        latency_ns.add(one)?;
        report.errors += errors;
        first_error = first_error.or(error);
        queues.push(queue);
    }
    attach::close(queues);
    report.fill(&latency_ns, elapsed, after.0 - before.0, before.1.zip(after.1).map(|(before, after)| after - before));
    report.target_pid = target;
    Ok(first_error.map(Into::into))
}

/// Buffers for each queue, all of them different.
fn buffers(queues: &[Queue], block: usize, seed: u64) -> anyhow::Result<Vec<Vec<Buffer>>> {
    let count: usize = queues.iter().map(|queue| usize::from(queue.depth())).sum();
    let arena = Arena::new(
        (count * block.next_power_of_two().max(twinrail_initiator::arena::ALIGNMENT)).max(1 << 20),
        Pages::Huge,
    )?;
    let mut random = Random::new(seed);
    let mut filled = || -> anyhow::Result<Buffer> {
        let mut buffer = arena.take(block)?;
        buffer.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random.next().to_ne_bytes()[..chunk.len()]));
        Ok(buffer)
    };
    queues.iter().map(|queue| (0..queue.depth()).map(|_| filled()).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_no_request_may_have_is_refused() {
        let geometry = Geometry { size: 1 << 20, logical_block: 4096, physical_block: 4096, max_transfer: 1 << 17 };
        assert!(check_block(4096, &geometry).is_ok() && check_block(1 << 17, &geometry).is_ok());
        let refused = |block| check_block(block, &geometry).unwrap_err().to_string();
        assert!(refused(0).contains("from 4096 to 131072"));
        assert!(refused(1 << 18).contains("from 4096 to 131072"));
        assert!(refused(5000).contains("4096 and 8192"));
    }

    #[test]
    fn times_are_bounded() {
        assert!(span("--seconds", 0.5).is_ok());
        for bad in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(span("--seconds", bad).is_err_and(|error| error.to_string().contains("--seconds")));
        }
    }
}
