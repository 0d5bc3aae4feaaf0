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
use twinrail_initiator::{Arena, Buffer, Geometry, Options, Pages, Queue, Session, VolumeUrl};

use self::load::{Control, Measured, Phase};
use self::random::{Accesses, Pattern, Random};
use self::report::Report;
use crate::attach::{self, AttachArguments, Mode};
use crate::interrupt::Interrupt;
use crate::range::aligned;
use crate::usage::usage;
use crate::{metrics, number, output, size};

/// Longest time of a bench in seconds: twelve days.
const LONGEST_SECONDS: f64 = 1_048_576.0;

/// What isn't measured at the beginning: until caches, congestion windows and clocks have settled.
const WARM_UP: Duration = Duration::from_millis(500);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// Order of the requests
    #[arg(long, value_enum, default_value_t = Pattern::Random)]
    pattern: Pattern,
    /// How many of a hundred requests read; the others DESTROY what is on the volume
    #[arg(long, value_name = "0..100", default_value_t = 100, value_parser = number::whole(0u8, 100))]
    read_percent: u8,
    /// Length of each request in bytes; 64k, 1M and so on are understood
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = size::parse)]
    block_size: u64,
    /// How long is measured, in seconds
    #[arg(long, default_value = "5", value_parser = number::seconds(0.001, LONGEST_SECONDS))]
    seconds: Duration,
    /// What isn't measured before that, in seconds [default: 0.5, or 0 with --ios]
    #[arg(long, value_name = "SECONDS", value_parser = number::seconds(0.0, LONGEST_SECONDS))]
    warm_up: Option<Duration>,
    /// Stop when so many requests were measured, if that is before --seconds are over
    #[arg(long, value_parser = number::whole(1, u64::MAX))]
    ios: Option<u64>,
    /// Beginning of the sequence of random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long a queue's thread looks for replies before it sleeps, in microseconds at most; 0 never does
    /// [default: 50]
    #[arg(long, value_name = "MICROSECONDS", value_parser = number::whole(0, 10_000u32))]
    spin_us: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Serve the initiator's metrics for Prometheus here while it runs, e.g. 127.0.0.1:9451
    #[arg(long, value_name = "ADDRESS", value_parser = metrics::address)]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    attach: AttachArguments,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, read_percent, json, .. } = arguments;
    let warm_up = if arguments.ios.is_some() { Duration::ZERO } else { WARM_UP };
    let times = (arguments.seconds, arguments.warm_up.unwrap_or(warm_up));
    let writes = *read_percent < 100;
    if writes && arguments.attach.mode == Some(Mode::ReadOnly) {
        return Err(usage("--mode read-only doesn't go with --read-percent under 100: use exclusive or shared"));
    }
    let metrics = match metrics::serve(arguments.metrics)? {
        Some(metrics) => metrics,
        None => metrics::new()?,
    };
    let defaults = arguments.attach.options(if writes { Mode::Exclusive } else { Mode::ReadOnly });
    let options = Options { spin_us: arguments.spin_us.unwrap_or(defaults.spin_us), ..defaults };
    let (session, queues) = Session::attach(url, &options, &metrics)?;
    check_block(arguments.block_size, &session.geometry())?;
    interrupt.finish_first([&session]);
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
    let error = measure(arguments, &session, queues, times, &mut report, interrupt)?;
    // Figures of nothing aren't a result.
    if report.tried() == 0 {
        let seconds = arguments.seconds.as_secs_f64();
        interrupt.check()?;
        return Err(error.unwrap_or_else(|| {
            anyhow!("nothing was measured: no request ended within {seconds} s; give more to --seconds")
        }));
    }
    output::tell(&report, *json)?;
    match error {
        // The session ended with nothing in flight.
        Some(error) if report.errors == 0 => Err(error),
        Some(error) => Err(error.context(format!("{} of {} requests failed", report.errors, report.tried()))),
        None => Ok(interrupt.check()?),
    }
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
    session: &Session,
    queues: Vec<Queue>,
    (seconds, warm_up): (Duration, Duration),
    report: &mut Report,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<anyhow::Error>> {
    let count = queues.len() as u64;
    let mut buffers = buffers(&queues, arguments.block_size as usize, arguments.seed)?;
    let blocks = session.geometry().size / arguments.block_size;
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
            let thread =
                thread.spawn_scoped(scope, move || load::run(queue, session, accesses, buffers, most, control));
            if thread.is_err() {
                control.enter(Phase::Stop);
            }
            threads.push(thread.context("no thread for a queue")?);
        }
        // A thread that ends early has failed, or measured all it had to. A signal only ends the wait.
        let _signal = interrupt.wait(warm_up, || control.has_ended_in_part());
        let (begun, before) = (Instant::now(), cpu());
        control.enter(Phase::Measure);
        let done = || if arguments.ios.is_some() { control.has_ended() } else { control.has_ended_in_part() };
        let _signal = interrupt.wait(seconds, done);
        control.enter(Phase::Stop);
        let measured: Vec<_> =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread died")))).collect();
        // What was in flight at the deadline belongs to what was measured, and so does the time that it took.
        anyhow::Ok((measured, begun.elapsed(), before, cpu()))
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
}
