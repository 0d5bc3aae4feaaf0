//! The data path allocates nothing once it is warm (I8): a counting allocator sees every thread but the fake
//! target's.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fake;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;

use fake::{Fake, Setup};
use twinrail_initiator::{Arena, Buffer, Metrics, Options, Pages, Request, Session, Volume, VolumeUrl, blocking};

struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// One test at a time.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static EXEMPT: Cell<bool> = const { Cell::new(false) };
}

fn note() {
    if COUNTING.load(Ordering::Relaxed) && !EXEMPT.try_with(Cell::get).unwrap_or(true) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: everything is the system allocator's doing; the counting touches no memory of its.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn fake() -> (Fake, VolumeUrl) {
    let fake = Fake::start_marked(Setup::default(), || EXEMPT.set(true));
    let url = fake.url().parse().unwrap();
    (fake, url)
}

fn options() -> Options {
    Options { queues: 2, depth: 32, ..Options::default() }
}

/// Allocations during `run`.
fn count(run: impl FnOnce()) -> u64 {
    ALLOCATIONS.store(0, Ordering::SeqCst);
    COUNTING.store(true, Ordering::SeqCst);
    run();
    COUNTING.store(false, Ordering::SeqCst);
    ALLOCATIONS.load(Ordering::SeqCst)
}

#[test]
fn the_counting_works() {
    let _turn = TURN.lock();
    assert_eq!(count(|| drop(std::hint::black_box(Box::new(7)))), 1);
}

#[test]
fn a_queue_allocates_nothing_per_command() {
    let _turn = TURN.lock();
    let (_fake, url) = fake();
    let (_session, mut queues) = Session::attach(&url, &options(), &Metrics::new().unwrap()).unwrap();
    let mut queue = queues.remove(0);
    let arena = Arena::new(8 << 20, Pages::Transparent).unwrap();
    let mut idle: Vec<Buffer> = (0..16).map(|i| arena.take([512, 4096, 65536][i % 3]).unwrap()).collect();
    let mut rounds = |count: u64| {
        let (mut submitted, mut ended) = (0, 0);
        while ended < count {
            while submitted < count && queue.has_room() {
                let Some(buffer) = idle.pop() else { break };
                let offset = submitted % 64 * 65536;
                let request = if submitted % 2 == 0 { Request::read } else { Request::write };
                queue.submit(request(offset, buffer)).unwrap();
                submitted += 1;
            }
            let told = queue
                .poll(|done| {
                    assert!(done.status.is_ok());
                    idle.extend(done.buffer);
                })
                .unwrap();
            ended += told as u64;
            if told == 0 {
                queue.wait(None);
            }
        }
    };
    rounds(2_000);
    // Long enough for the metrics to be passed on a few times.
    assert_eq!(count(|| rounds(20_000)), 0);
}

#[test]
fn a_blocking_volume_allocates_nothing_per_call() {
    let _turn = TURN.lock();
    let (_fake, url) = fake();
    let volume = blocking::Volume::connect(&url, options()).unwrap();
    let mut buffer = Some(volume.buffer(300 << 10).unwrap());
    let mut small = vec![7; 8192];
    let mut rounds = |count: u64| {
        for n in 0..count {
            let (back, result) = volume.write(n % 16 * 512, buffer.take().unwrap());
            result.unwrap();
            let (back, result) = volume.read(n % 16 * 512, back);
            result.unwrap();
            buffer = Some(back);
            volume.read_at(0, &mut small).unwrap();
            volume.write_at(8192, &small).unwrap();
            volume.flush().unwrap();
        }
    };
    rounds(200);
    assert_eq!(count(|| rounds(1_000)), 0);
    // Its threads would look for a target that is gone, and be counted by the next test.
    volume.close().unwrap();
}

#[test]
fn an_asynchronous_volume_allocates_nothing_per_command() {
    const CALLERS: usize = 80;
    let _turn = TURN.lock();
    let (_fake, url) = fake();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let volume = Volume::connect(&url, options()).await.unwrap();
        // More callers than cells: some always wait.
        assert_eq!(volume.depth(), 64);
        let rounds = AtomicU64::new(0);
        let (volume, rounds) = (&volume, &rounds);
        let caller = |caller: usize| async move {
            let mut buffer = volume.buffer(4096).unwrap();
            while rounds.fetch_add(1, Ordering::Relaxed) < 40_000 {
                let (back, result) = volume.write(caller as u64 * 4096, buffer).await;
                result.unwrap();
                let (back, result) = volume.read(caller as u64 * 4096, back).await;
                result.unwrap();
                buffer = back;
            }
        };
        let mut callers: Vec<Option<Pin<Box<dyn Future<Output = ()> + '_>>>> =
            (0..CALLERS).map(|n| Some(Box::pin(caller(n)) as _)).collect();
        poll_fn(|context| {
            if rounds.load(Ordering::Relaxed) > 4_000 && !COUNTING.load(Ordering::SeqCst) {
                ALLOCATIONS.store(0, Ordering::SeqCst);
                COUNTING.store(true, Ordering::SeqCst);
            }
            for caller in &mut callers {
                if caller.as_mut().is_some_and(|future| future.as_mut().poll(context).is_ready()) {
                    *caller = None;
                }
            }
            if callers.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        COUNTING.store(false, Ordering::SeqCst);
        assert!(rounds.load(Ordering::Relaxed) >= 40_000);
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 0);
        volume.close().await.unwrap();
    });
}
