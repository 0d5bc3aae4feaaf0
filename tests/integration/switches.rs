//! Connections that are lost are replaced, and nobody sees more than a pause: no error, nothing executed twice, nothing
//! lost.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use twinrail_initiator::{Arena, Buffer, Metrics, Options, PathEnd, Request, Session, Volume, VolumeUrl, blocking};
use twinrail_protocol::ids::Epoch;
use twinrail_protocol::wire::{Activate, AttachMode, Control, ControlKind, Frame, Handshake, Rail, Standby};
use twinrail_protocol::{Flags, Opcode, QueueId, Secret, Status};
use twinrail_tests::wire::{self, Connection, Received, attach};
use twinrail_tests::{Kill, PATIENCE, Process, Proxy, Random, Scrape, Target, program, scratch};

const BLOCK: u64 = 512;
const MIB: u64 = 1 << 20;

/// What each block of one worker's part of the volume holds: a stamp that no other write had.
struct Part {
    worker: u64,
    first_block: u64,
    stamps: Vec<u64>,
    writes: u64,
}

impl Part {
    fn new(worker: u64, bytes: u64) -> Self {
        let blocks = bytes / BLOCK;
        Self { worker, first_block: worker * blocks, stamps: vec![0; blocks as usize], writes: 0 }
    }

    /// Blocks of a range that may be written or read, 512 B to 256 KiB long; short ones are the most.
    fn draw(&self, random: &mut Random) -> (usize, usize) {
        let longest = (1 << random.below(10)).min(self.stamps.len() as u64);
        let count = 1 + random.below(longest);
        (random.below(self.stamps.len() as u64 - count + 1) as usize, count as usize)
    }

    fn stamp(&mut self, first: usize, buffer: &mut [u8]) {
        self.writes += 1;
        for (n, block) in buffer.chunks_exact_mut(BLOCK as usize).enumerate() {
            let stamp = (self.worker << 56 | self.writes << 20) + (first + n) as u64;
            self.stamps[first + n] = stamp;
            block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&stamp.to_le_bytes()));
        }
    }

    fn check(&self, first: usize, buffer: &[u8]) {
        for (n, block) in buffer.chunks_exact(BLOCK as usize).enumerate() {
            let expected = self.stamps[first + n];
            for word in block.chunks_exact(8) {
                let found = u64::from_le_bytes(word.try_into().unwrap());
                assert_eq!(found, expected, "worker {}, block {} of its part", self.worker, first + n);
            }
        }
    }

    fn offset(&self, first: usize) -> u64 {
        (self.first_block + first as u64) * BLOCK
    }
}

/// Writes and reads until told to stop, one command at a time; every block is what was written last.
async fn work(volume: Volume, mut part: Part, seed: u64, stop: Arc<AtomicBool>, commands: Arc<AtomicU64>) -> Part {
    let mut random = Random::new(seed);
    while !stop.load(Ordering::Relaxed) {
        let (first, count) = part.draw(&mut random);
        let length = count * BLOCK as usize;
        let mut buffer = volume.buffer(length).unwrap();
        let offset = part.offset(first);
        let (result, reads) = if random.below(2) == 0 {
            part.stamp(first, &mut buffer);
            let (_, result) = volume.write(offset, buffer).await;
            (result, false)
        } else {
            let (back, result) = volume.read(offset, buffer).await;
            buffer = back;
            if result.is_ok() {
                part.check(first, &buffer);
            }
            (result, true)
        };
        result.unwrap_or_else(|error| panic!("{} at {offset}: {error}", if reads { "read" } else { "write" }));
        commands.fetch_add(1, Ordering::Relaxed);
    }
    part
}

/// A verified load over a proxy that breaks connections, until `kills` of them were.
fn survive(volume: &str, seed: u64, kills: u64) -> (Target, Vec<Part>) {
    const WORKERS: u64 = 128;
    const PART: u64 = 512 << 10;
    // The same fates in the same order; what they meet differs from run to run.
    let seed = std::env::var("TWINRAIL_SEED").map_or(seed, |seed| seed.parse().unwrap());
    println!("{volume}: TWINRAIL_SEED={seed}");
    let target = Target::serve(&[volume]);
    let proxy = Proxy::start(target.address);
    let url: VolumeUrl = proxy.url("disk0").parse().unwrap();
    // Connections that stand with one direction dead are left after three of these periods.
    let probe_period_ms = 100;
    let options = Options { queues: 4, depth: 32, arena_bytes: 128 << 20, probe_period_ms, ..Options::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let volume = Volume::connect_blocking(&url, options).unwrap();
    assert_eq!(volume.queues(), 4);
    let (stop, commands) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let part = Part::new(worker, PART);
            runtime.spawn(work(volume.clone(), part, seed ^ worker, stop.clone(), commands.clone()))
        })
        .collect();
    let begun = Instant::now();
    proxy.endanger(seed, 2 * MIB, true);
    while proxy.kills() < kills {
        assert!(begun.elapsed() < PATIENCE, "only {} kills in {PATIENCE:?}", proxy.kills());
        assert!(workers.iter().all(|worker| !worker.is_finished()), "a worker failed");
        std::thread::yield_now();
    }
    let (killed, under_kills) = (proxy.kills(), commands.load(Ordering::Relaxed));
    proxy.make_peace();
    stop.store(true, Ordering::Relaxed);
    let parts: Vec<Part> = runtime.block_on(async {
        let mut parts = Vec::new();
        for worker in workers {
            parts.push(worker.await.unwrap());
        }
        parts
    });
    // At the end everything matches.
    runtime.block_on(async {
        for part in &parts {
            let (buffer, result) = volume.read(part.offset(0), volume.buffer(PART as usize).unwrap()).await;
            result.unwrap();
            part.check(0, &buffer);
        }
        volume.flush().await.unwrap();
        volume.close().await.unwrap();
    });
    let switches = target.scrape().sum("twinrail_target_path_switches_total", &[]);
    println!("{killed} kills, {switches} switches, {under_kills} commands in {:?}", begun.elapsed());
    (target, parts)
}

#[test]
fn connections_killed_a_thousand_times_lose_nothing() {
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let (target, parts) = survive(&format!("disk0={},size=64M", path.display()), 0xf11e, 500);
    target.stop();
    let file = File::open(&path).unwrap();
    for part in &parts {
        let mut found = vec![0; part.stamps.len() * BLOCK as usize];
        file.read_exact_at(&mut found, part.offset(0)).unwrap();
        part.check(0, &found);
    }
    survive("disk0=memory,size=64M", 0x3e30, 500).0.stop();
}

/// A target with faults injected, behind a proxy, and a volume of it by one queue.
fn behind_a_proxy(volume: &str, options: Options) -> (Target, Proxy, blocking::Volume) {
    let target = Target::builder(&[volume]).args(&["--allow-fault-injection"]).start();
    let proxy = Proxy::start(target.address);
    let url: VolumeUrl = proxy.url("disk0").parse().unwrap();
    let volume = blocking::Volume::connect(&url, Options { queues: 1, ..options }).unwrap();
    (target, proxy, volume)
}

/// Begins a call: its command is on its way before any that comes later.
fn begin<F: Future>(call: F) -> Pin<Box<F>> {
    let mut call = Box::pin(call);
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    call
}

/// Waits for the end of a call.
fn finish<F: Future>(call: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(call)
}

fn switches(scrape: &Scrape) -> f64 {
    scrape.sum("twinrail_target_path_switches_total", &[])
}

fn verdicts(scrape: &Scrape, verdict: &str) -> f64 {
    scrape.sum("twinrail_target_reported_commands_total", &[("verdict", verdict)])
}

fn executed(scrape: &Scrape, op: &str) -> f64 {
    scrape.sum("twinrail_target_commands_total", &[("op", op), ("result", "ok")])
}

fn filled(volume: &blocking::Volume, length: usize, with: u8) -> Buffer {
    let mut buffer = volume.buffer(length).unwrap();
    buffer.fill(with);
    buffer
}

fn content(volume: &blocking::Volume, offset: u64, length: usize) -> Vec<u8> {
    let (buffer, result) = volume.read(offset, volume.buffer(length).unwrap());
    result.unwrap();
    buffer.to_vec()
}

#[test]
fn i1_a_write_whose_reply_was_lost_is_answered_from_the_record() {
    let (target, proxy, volume) = behind_a_proxy("disk0=memory,size=1M", Options::default());
    std::thread::scope(|scope| {
        proxy.kill(Kill::Deafen);
        let write = scope.spawn(|| volume.write(4096, filled(&volume, 4096, 7)).1);
        target.scrape_until("the write", |s| executed(s, "write") == 1.0);
        proxy.kill(Kill::Reset);
        write.join().unwrap().unwrap();
    });
    let scrape = target.scrape_until("the switch", |s| switches(s) == 1.0);
    assert_eq!((verdicts(&scrape, "done"), executed(&scrape, "write")), (1.0, 1.0));
    assert_eq!(content(&volume, 4096, 4096), [7; 4096]);
    let told = volume.as_async().metrics().render();
    assert!(told.contains("twinrail_initiator_reported_commands_total{verdict=\"done\"} 1\n"), "{told}");
    let switch = "twinrail_initiator_path_switches_total{cause=\"disconnected\",from=\"tcp\",to=\"tcp\"} 1\n";
    assert!(told.contains(switch), "{told}");
    volume.close().unwrap();
    target.stop();
}

#[test]
fn i1_a_write_on_a_slow_disk_is_executed_once_across_two_switches() {
    let volume = "disk0=memory,size=1M,inject=write-delay-ms=2000";
    let (target, proxy, volume) = behind_a_proxy(volume, Options::default());
    let begun = Instant::now();
    let write = begin(volume.as_async().write(0, filled(&volume, 4096, 9)));
    // It has arrived when a command behind it is answered.
    assert_eq!(content(&volume, 1 << 19, 512), [0; 512]);
    for switch in 1..=2 {
        proxy.kill(if switch == 1 { Kill::Reset } else { Kill::Close });
        target.scrape_until("the switch", |s| switches(s) == f64::from(switch));
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "the disk was faster than the switches");
    finish(write).1.unwrap();
    let scrape = target.scrape_until("the write", |s| executed(s, "write") > 0.0);
    assert_eq!((verdicts(&scrape, "running"), executed(&scrape, "write")), (2.0, 1.0));
    assert_eq!(content(&volume, 0, 4096), [9; 4096]);
    volume.close().unwrap();
    target.stop();
}

#[test]
fn i1_a_compare_and_write_whose_reply_was_lost_is_not_executed_twice() {
    let (target, proxy, volume) = behind_a_proxy("disk0=memory,size=1M", Options::default());
    let exchange = |expected: u8, new: u8| {
        let mut buffer = filled(&volume, 1024, expected);
        buffer[512..].fill(new);
        volume.compare_and_write(0, buffer).1
    };
    std::thread::scope(|scope| {
        proxy.kill(Kill::Deafen);
        // A second execution would find the new bytes, and fail.
        let first = scope.spawn(|| exchange(0, 1));
        target.scrape_until("its execution", |s| executed(s, "compare_and_write") == 1.0);
        proxy.kill(Kill::Reset);
        first.join().unwrap().unwrap();
    });
    assert!(exchange(0, 2).is_err());
    exchange(1, 2).unwrap();
    let scrape = target.scrape_until("the last one", |s| executed(s, "compare_and_write") == 2.0);
    assert_eq!(verdicts(&scrape, "done"), 1.0);
    volume.close().unwrap();
    target.stop();
}

#[test]
fn i4_a_flush_across_a_switch_is_one_flush() {
    let (target, proxy, volume) = behind_a_proxy("disk0=memory,size=1M,inject=sync-delay-ms=1500", Options::default());
    volume.write(0, filled(&volume, 4096, 1)).1.unwrap();
    let flush = begin(volume.as_async().flush());
    assert_eq!(content(&volume, 8192, 512), [0; 512]);
    proxy.kill(Kill::Reset);
    target.scrape_until("the switch", |s| switches(s) == 1.0);
    finish(flush).unwrap();
    let flushes = |s: &Scrape| s.sum("twinrail_target_flushes_total", &[("volume", "disk0")]);
    let scrape = target.scrape_until("the flush", |s| flushes(s) > 0.0);
    assert_eq!((verdicts(&scrape, "running"), flushes(&scrape)), (1.0, 1.0));
    volume.close().unwrap();
    target.stop();
}

#[test]
fn a_connection_that_is_dead_in_one_direction_is_replaced() {
    for kill in [Kill::Deafen, Kill::Silence] {
        // A twentieth of the times that apply else.
        let options = Options { probe_period_ms: 250, ..Options::default() };
        let (target, proxy, volume) = behind_a_proxy("disk0=memory,size=1M", options);
        proxy.kill(kill);
        // Only a standby that answers tells a dead connection from a target that stands still.
        volume.write(0, filled(&volume, 4096, 3)).1.unwrap();
        let scrape = target.scrape_until("switch and write", |s| switches(s) == 1.0 && executed(s, "write") > 0.0);
        assert_eq!(executed(&scrape, "write"), 1.0, "{kill:?}");
        let told = volume.as_async().metrics().render();
        assert!(told.contains("alarms_total{reason=\"silence\"} 1\n"), "{kill:?}: {told}");
        assert!(told.contains("path_ends_total{rail=\"tcp\",reason=\"silent\"} 1\n"), "{kill:?}: {told}");
        assert_eq!(content(&volume, 0, 4096), [3; 4096]);
        volume.close().unwrap();
        target.stop();
    }
}

#[test]
fn a_target_that_stands_still_for_a_while_costs_nothing_but_the_while() {
    let options = Options { queues: 2, ..Options::default() };
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let volume = blocking::Volume::connect(&target.url("disk0").parse().unwrap(), options).unwrap();
    target.process.signal(Signal::STOP);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| volume.write(0, filled(&volume, 65536, 5)).1);
        // Long enough for the alarm, and for an attempt to get another connection to fail.
        for none_yet in ["alarms_total{reason=\"silence\"} 0\n", "dials_total{result=\"failed\"} 0\n"] {
            let begun = Instant::now();
            while volume.as_async().metrics().render().contains(none_yet) {
                assert!(begun.elapsed() < PATIENCE, "still {none_yet}");
                std::thread::yield_now();
            }
        }
        target.process.signal(Signal::CONT);
        write.join().unwrap().unwrap();
    });
    assert_eq!(content(&volume, 0, 65536), vec![5; 65536]);
    assert_eq!(switches(&target.scrape()), 0.0, "nothing was closed: the target was silent, not the connection");
    volume.close().unwrap();
    target.stop();
}

#[test]
fn a_target_that_is_gone_for_ever_is_waited_for_as_long_as_fail_fast_says() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let words = ["bench", &target.url("disk0"), "--seconds", "600", "--fail-fast", "1"];
    let mut bench = Process::start(program("twinrail"), words);
    target.scrape_until("a busy target", |s| s.sum("twinrail_target_commands_total", &[]) > 1000.0);
    let gone = Instant::now();
    target.process.signal(Signal::KILL);
    assert_eq!(bench.wait().code(), Some(5), "{}", bench.log());
    assert!(gone.elapsed() >= Duration::from_secs(1), "it didn't wait");
    assert!(bench.log().contains("fail-fast"), "{}", bench.log());
}

#[test]
fn a_closed_volume_is_closed_though_its_connection_was_lost() {
    // The target's word is lost, or ours.
    for kill in [Kill::Deafen, Kill::Silence] {
        let (target, proxy, volume) = behind_a_proxy("disk0=memory,size=1M", Options::default());
        let sessions = |s: &Scrape| s.sum("twinrail_target_sessions", &[("mode", "exclusive")]);
        proxy.kill(kill);
        std::thread::scope(|scope| {
            let close = scope.spawn(|| volume.close());
            if kill == Kill::Deafen {
                target.scrape_until("the end of the session", |s| sessions(s) == 0.0);
            } else {
                while !volume.as_async().session().is_closing() {
                    std::thread::yield_now();
                }
            }
            proxy.kill(Kill::Reset);
            close.join().unwrap().unwrap();
        });
        assert_eq!(sessions(&target.scrape()), 0.0);
        target.stop();
    }
}

#[test]
fn a_standby_answers_hears_of_the_path_s_end_and_takes_over() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let mut first = Connection::welcomed(target.address);
    let attach = attach("disk0", AttachMode::EXCLUSIVE);
    first.handshake(&Handshake::Attach(attach));
    let mut queue = wire::Queue::attached(first, &attach);
    let standby = Standby { session: attach.session, secret: attach.secret, queue: QueueId(0), rail: Rail::TCP };
    let stand = |standby: Standby| {
        let mut connection = Connection::welcomed(target.address);
        connection.handshake(&Handshake::Standby(standby));
        connection
    };
    let mut stranger = stand(Standby { secret: Secret([9; 16]), ..standby });
    assert_eq!(stranger.end().map(|ended| ended.status), Some(Status::BAD_SECRET));
    let mut connection = stand(standby);
    let Some(Received { frame: Frame::Handshake { kind, payload }, payload: bytes }) = connection.receive() else {
        panic!("no STANDING");
    };
    let Ok(Handshake::Standing(standing)) = Handshake::decode(kind, payload, &bytes) else { panic!("no STANDING") };
    assert_eq!(standing.epoch, Epoch(1));
    connection.send(&Frame::Control(Control::new(ControlKind::Probe, Epoch(0), 77)).encode());
    let control = |connection: &mut Connection| match connection.receive() {
        Some(Received { frame: Frame::Control(control), .. }) => control,
        other => panic!("{other:?}"),
    };
    let answer = control(&mut connection);
    assert_eq!((answer.kind, answer.token), (ControlKind::ProbeReply, 77));
    // The path goes with a write that was never answered, then the standby is it.
    queue.send(0, Opcode::WRITE, Flags::NONE, (0, 4096), &[1; 4096]);
    target.scrape_until("the write", |s| executed(s, "write") == 1.0);
    drop(queue);
    let lost = control(&mut connection);
    assert_eq!((lost.kind, lost.epoch), (ControlKind::PathLost, Epoch(1)));
    let mut activate = Activate::new(attach.session, attach.secret, QueueId(0), Rail::TCP, Epoch(2));
    (activate.instance, activate.depth) = (standing.instance, 32);
    connection.handshake(&Handshake::Activate(activate));
    match connection.receive() {
        Some(Received { frame: Frame::Handshake { kind: 0x46, .. }, .. }) => {}
        other => panic!("no ACTIVATED but {other:?}"),
    }
    // One more stands by when the session ends, and is told.
    let mut last = stand(standby);
    assert!(last.receive().is_some());
    connection.send(&Frame::Control(Control::new(ControlKind::Close, Epoch(2), 1)).encode());
    assert_eq!(last.end().map(|ended| ended.status), Some(Status::CLOSED));
    target.stop();
}

#[test]
fn a_queue_that_is_dropped_gives_its_volume_back_before_the_lease_is_over() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let metrics = Metrics::new().unwrap();
    let url = target.url("disk0").parse().unwrap();
    let begun = Instant::now();
    drop(Session::attach(&url, &Options { queues: 2, ..Options::default() }, &metrics).unwrap());
    target.scrape_until("the end of the session", |s| s.sum("twinrail_target_sessions", &[]) == 0.0);
    assert!(begun.elapsed() < Duration::from_secs(30), "it took as long as half a lease");
    target.stop();
}

#[test]
fn a_session_whose_queues_nobody_polls_outlives_its_lease() {
    const LEASE: Duration = Duration::from_millis(1000);
    let lease_ms = LEASE.as_millis().to_string();
    let args = ["--lease-ms", &lease_ms, "--probe-period-ms", "100"];
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&args).start();
    let url = target.url("disk0").parse().unwrap();
    let options = Options { queues: 1, ..Options::default() };
    let (session, mut queues) = Session::attach(&url, &options, &Metrics::new().unwrap()).unwrap();
    let arena = Arena::new(1 << 20, options.pages).unwrap();
    let mut buffer = arena.take(4096).unwrap();
    buffer.fill(4);
    queues[0].submit(Request::write(0, buffer)).unwrap();
    // Its owner does something else: nobody answers probes, and the path is lost, for longer than the lease.
    target.scrape_until("the end of the path", |s| {
        s.sum("twinrail_target_disconnects_total", &[]) == 1.0 && s.sum("twinrail_target_paths", &[]) == 0.0
    });
    // Leases of others that nobody keeps begin and end meanwhile.
    for _ in 0..3 {
        drop(wire::Queue::attach(target.address, "disk0", AttachMode::READ_ONLY));
        target.scrape_until("the end of its lease", |s| {
            s.sum("twinrail_target_sessions", &[("mode", "read-only")]) == 0.0
        });
    }
    assert_eq!(target.scrape().sum("twinrail_target_sessions", &[]), 1.0);
    let mut ended = Vec::new();
    while ended.is_empty() {
        queues[0].poll(|done| ended.push(done.status)).unwrap();
        queues[0].wait(Some(Duration::from_millis(100)));
    }
    assert_eq!(ended, [Status::OK]);
    queues[0].close_within(PATIENCE, drop).unwrap();
    assert_eq!(session.end(), Some(&PathEnd::Closed));
    target.stop();
}
