//! No heap allocation for a command, on neither side, in the steady state: target and initiator run in this process,
//! whose allocator counts, and a hundred thousand commands more make no more allocations.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use twinrail_initiator::queue::Queue;
use twinrail_initiator::request::Request;
use twinrail_initiator::{Buffer, Metrics, Options, Session, VolumeUrl, blocking};
use twinrail_target::config::{Config, Settings};
use twinrail_target::control::Server;
use twinrail_tests::{Random, scratch};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator as it came; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System`, as all of ours do.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the pointer came from `System`, as all of ours do.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Commands after which nothing new is met any more.
const WARM_UP: u64 = 20_000;
/// Commands that are counted.
const COMMANDS: u64 = 100_000;
/// What the control plane may need meanwhile, which works by the clock and not for commands.
const SLACK: u64 = 20;

const VOLUME_BYTES: u64 = 16 << 20;

/// A target in this process.
struct Host {
    runtime: tokio::runtime::Runtime,
    server: Option<Server>,
}

impl Host {
    fn start(volumes: &[String]) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let settings = Settings {
            listen: vec!["127.0.0.1:0".into()],
            metrics: Some("off".into()),
            reactors: Some(1),
            arena: Some("32M".parse().unwrap()),
            pin: Some(false),
            // Sessions here just go; the next one wants the volume.
            lease_ms: Some(0),
            ..Settings::default()
        };
        let config = Config::load(None, settings, volumes).unwrap();
        let server = runtime.block_on(Server::start(config, Arc::new(AtomicBool::new(false)))).unwrap();
        Self { runtime, server: Some(server) }
    }

    fn url(&self, volume: &str) -> VolumeUrl {
        format!("twinrail://{}/{volume}", self.server.as_ref().unwrap().addresses()[0]).parse().unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let server = self.server.take().unwrap();
        self.runtime.block_on(server.stop()).unwrap();
    }
}

/// Submits and polls until `count` commands have ended; `depth` of them are in flight.
fn drive(queue: &mut Queue, pool: &mut Vec<Buffer>, random: &mut Random, count: u64) {
    let (mut begun, mut ended) = (0, 0);
    while ended < count {
        while begun < count && queue.has_room() {
            let Some(buffer) = pool.pop() else { break };
            let blocks = VOLUME_BYTES / buffer.len() as u64;
            let offset = random.below(blocks) * buffer.len() as u64;
            let request = if begun % 2 == 0 { Request::read(offset, buffer) } else { Request::write(offset, buffer) };
            queue.submit(request).unwrap();
            begun += 1;
        }
        let progress = queue
            .poll(|done| {
                assert!(done.status.is_ok(), "{:?}", done.status);
                pool.extend(done.buffer);
            })
            .unwrap();
        ended += progress as u64;
        if progress == 0 {
            queue.wait(None);
        }
    }
}

/// Allocations of the whole process while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    work();
    ALLOCATIONS.load(Ordering::SeqCst) - before
}

/// One test, since another one beside it would be counted, too.
#[test]
fn a_command_allocates_nothing_on_either_side_in_the_steady_state() {
    let directory = scratch();
    let file = format!("file={},size={VOLUME_BYTES}", directory.path().join("disk.img").display());
    let host = Host::start(&[file, format!("memory=memory,size={VOLUME_BYTES}")]);
    let metrics = Metrics::new().unwrap();
    for volume in ["memory", "file"] {
        // In the capsule, and beyond it. Of the file fewer, since a disk takes its time.
        for (length, depth) in [(4096, 32), (65536, 16)] {
            let share = if volume == "file" || length > 4096 { 10 } else { 1 };
            let options = Options { queues: 1, depth, arena_bytes: 8 << 20, ..Options::default() };
            let (session, mut queues) = Session::attach(&host.url(volume), &options, &metrics).unwrap();
            let arena = twinrail_initiator::Arena::new(8 << 20, options.pages).unwrap();
            let mut pool: Vec<Buffer> = (0..depth).map(|_| arena.take(length).unwrap()).collect();
            let queue = &mut queues[0];
            let mut random = Random::new(1);
            drive(queue, &mut pool, &mut random, WARM_UP / share);
            let count = allocations(|| drive(queue, &mut pool, &mut random, COMMANDS / share));
            println!("queue, {volume}, {length} bytes: {count} allocations in {} commands", COMMANDS / share);
            assert!(count <= SLACK, "{count} allocations in {} commands of {length} bytes", COMMANDS / share);
            assert_eq!(pool.len(), usize::from(depth));
            queue.close_within(Duration::from_secs(60), drop).unwrap();
            drop((queues, session));
        }
    }

    // The layers above the queue: a blocking volume, with buffers of the arena.
    let volume = blocking::Volume::connect(&host.url("memory"), Options { queues: 1, ..Options::default() }).unwrap();
    let mut buffer = volume.buffer(4096).unwrap();
    let mut calls = |count: u64| {
        for call in 0..count {
            let offset = call % 1024 * 4096;
            let owned = std::mem::replace(&mut buffer, volume.buffer(512).unwrap());
            let (back, result) = match call % 2 {
                0 => volume.read(offset, owned),
                _ => volume.write(offset, owned),
            };
            result.unwrap();
            buffer = back;
        }
    };
    calls(WARM_UP / 10);
    let count = allocations(|| calls(COMMANDS / 10));
    println!("volume, memory, 4096 bytes: {count} allocations in {} calls", COMMANDS / 10);
    assert!(count <= SLACK, "{count} allocations in {} calls", COMMANDS / 10);
    volume.close().unwrap();
}
