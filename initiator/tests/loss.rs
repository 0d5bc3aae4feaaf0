//! Ends of sessions, wanted or not, and what the target tells in between.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fake;

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use fake::{Fake, Setup, control};
use twinrail_initiator::{
    Arena, Error, Opcode, Options, Pages, PathEnd, Queue, Reason, Rejection, Request, Session, Status, Volume,
    VolumeUrl, blocking,
};
use twinrail_protocol::ids::GrantNumber;
use twinrail_protocol::wire::{ControlKind, EventCode, Payload};

fn options() -> Options {
    Options { queues: 1, ..Options::default() }
}

fn attach(fake: &Fake, options: Options) -> blocking::Volume {
    let url: VolumeUrl = fake.url().parse().unwrap();
    blocking::Volume::connect(&url, options).unwrap()
}

/// A queue without threads around it.
fn bare(fake: &Fake) -> (Session, Queue) {
    let url: VolumeUrl = fake.url().parse().unwrap();
    let metrics = twinrail_initiator::Metrics::new().unwrap();
    let (session, mut queues) = Session::attach(&url, &options(), &metrics).unwrap();
    (session, queues.remove(0))
}

fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) {
    assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

/// Looks again and again until `condition` holds: what changes has no event to wait for.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} never happened");
        thread::yield_now();
    }
}

#[test]
fn a_cut_leaves_changes_unknown_and_reads_not_served_and_gives_every_buffer_back() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, options());
    fake.mischief().hold.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let write = scope.spawn(|| volume.write(0, volume.buffer(2 << 20).unwrap()));
        let read = scope.spawn(|| volume.read(0, volume.buffer(4096).unwrap()));
        let flush = scope.spawn(|| volume.flush());
        // The whole write, in eight pieces.
        fake.until("ten commands held", |seen| seen.held.load(Ordering::SeqCst) == 10);
        fake.cut();
        let (buffer, result) = write.join().unwrap();
        let error = result.unwrap_err();
        assert!(matches!(error, Error::OutcomeUnknown { opcode: Opcode::WRITE, .. }), "{error}");
        assert_eq!(buffer.len(), 2 << 20);
        let (_, result) = read.join().unwrap();
        assert!(matches!(result, Err(Error::ConnectionLost { opcode: Opcode::READ, .. })), "{result:?}");
        let result = flush.join().unwrap();
        assert!(matches!(result, Err(Error::OutcomeUnknown { opcode: Opcode::FLUSH, .. })), "{result:?}");
    });
    // Nothing hangs afterwards either, and what was never sent isn't unknown.
    let (buffer, result) = volume.write(0, volume.buffer(512).unwrap());
    assert!(matches!(result, Err(Error::ConnectionLost { opcode: Opcode::WRITE, .. })), "{result:?}");
    drop(buffer);
    assert!(matches!(volume.close(), Err(Error::Ended { .. })));
    let arena = volume.as_async().arena();
    assert_eq!(arena.free_bytes(), arena.total_bytes());
}

#[test]
fn a_cut_in_the_middle_of_a_payload_gives_the_buffer_back() {
    let fake = Fake::start(Setup { data_window: 16 << 20, ..Setup::default() });
    let volume = attach(&fake, options());
    // More than the socket buffers of both sides take.
    fake.mischief().deaf.store(true, Ordering::SeqCst);
    volume_sees_nothing_of(&fake);
    thread::scope(|scope| {
        let writes: Vec<_> = (0..2)
            .map(|_| {
                let buffer = volume.buffer(8 << 20).unwrap();
                scope.spawn(|| volume.write(0, buffer))
            })
            .collect();
        eventually("a full window", || volume.as_async().metrics().render().contains("commands_in_flight 16\n"));
        fake.cut();
        for write in writes {
            let (buffer, result) = write.join().unwrap();
            assert!(matches!(result, Err(Error::OutcomeUnknown { .. })), "{result:?}");
            assert_eq!(buffer.len(), 8 << 20);
        }
    });
    let arena = volume.as_async().arena();
    assert_eq!(arena.free_bytes(), arena.total_bytes());
}

/// Makes sure that a target which was just made deaf has noticed: it sleeps without its socket then.
fn volume_sees_nothing_of(fake: &Fake) {
    fake.inject(0, control(ControlKind::Probe, 1, |_| {}));
}

#[test]
fn i3_a_dropped_future_keeps_its_buffer_until_the_command_has_ended() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, options());
    let volume = volume.as_async();
    fake.mischief().hold.store(true, Ordering::SeqCst);
    {
        // Eight pieces fly, the rest is never sent.
        let mut read = pin!(volume.read(0, volume.buffer(4 << 20).unwrap()));
        poll_once(read.as_mut());
        fake.until("eight reads held", |seen| seen.held.load(Ordering::SeqCst) == 8);
    }
    let mut waiting = pin!(volume.flush());
    poll_once(waiting.as_mut());
    fake.until("the flush", |seen| seen.held.load(Ordering::SeqCst) == 9);
    assert_eq!(volume.arena().free_bytes() + (4 << 20), volume.arena().total_bytes());
    fake.release();
    // Its reply comes behind those of the reads.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(waiting).unwrap();
    assert_eq!(volume.arena().free_bytes(), volume.arena().total_bytes());
    assert_eq!(fake.seen().commands.load(Ordering::SeqCst), 9);
}

#[test]
fn closing_waits_for_what_is_in_flight() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, Options { queues: 3, ..options() });
    fake.mischief().hold.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let write = scope.spawn(|| volume.write(0, volume.buffer(512).unwrap()));
        fake.until("the write", |seen| seen.held.load(Ordering::SeqCst) == 1);
        let close = scope.spawn(|| volume.close());
        // The closing has begun when nothing new is taken; what got in before is held too.
        let mut flushes = Vec::new();
        loop {
            let mut flush = Box::pin(volume.as_async().flush());
            match flush.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                std::task::Poll::Pending => flushes.push(flush),
                std::task::Poll::Ready(result) => {
                    assert_eq!(result, Err(Rejection::Closed { opcode: Opcode::FLUSH }.into()));
                    break;
                }
            }
        }
        assert_eq!(fake.seen().closes.load(Ordering::SeqCst), 0);
        fake.release();
        write.join().unwrap().1.unwrap();
        close.join().unwrap().unwrap();
    });
    assert_eq!(fake.seen().closes.load(Ordering::SeqCst), 1);
    volume.close().unwrap();
}

#[test]
fn closing_is_bounded() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, Options { close_timeout_ms: 50, queues: 2, ..options() });
    fake.mischief().hold.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let write = scope.spawn(|| volume.write(0, volume.buffer(512).unwrap()));
        fake.until("the write", |seen| seen.held.load(Ordering::SeqCst) == 1);
        assert_eq!(volume.close(), Err(Error::Timeout { what: "closing the volume", timeout_ms: 50 }));
        let (_, result) = write.join().unwrap();
        assert_eq!(result, Err(Error::OutcomeUnknown { opcode: Opcode::WRITE, end: PathEnd::Aborted }));
    });
}

#[test]
fn the_last_clone_closes_the_session() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, options());
    let other = volume.clone();
    drop(volume);
    other.flush().unwrap();
    drop(other);
    fake.until("the close", |seen| seen.closes.load(Ordering::SeqCst) == 1);
}

fn disconnect(status: Status, text: &str) -> Vec<u8> {
    let crc = twinrail_protocol::crc32c(text.as_bytes());
    let payload = Payload { length: text.len() as u32, crc };
    let mut bytes =
        control(ControlKind::Disconnect, 0, |control| (control.status, control.payload) = (status, payload));
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

#[test]
fn the_reason_is_not_lost_when_the_connection_breaks_while_payload_is_sent() {
    let fake = Fake::start(Setup { data_window: 16 << 20, ..Setup::default() });
    let (_session, mut queue) = bare(&fake);
    let arena = Arena::new(16 << 20, Pages::Transparent).unwrap();
    fake.mischief().deaf.store(true, Ordering::SeqCst);
    fake.mischief().hang_up.store(true, Ordering::SeqCst);
    for _ in 0..32 {
        queue.submit(Request::write(0, arena.take(256 << 10).unwrap())).unwrap();
    }
    // More than the socket takes: some is still to be sent.
    assert_eq!(queue.poll(drop), Ok(0));
    fake.inject(0, disconnect(Status::SHUTDOWN, "power is low"));
    // What the target hasn't read makes its end of the connection a reset.
    fake.until("the end of the connection", |seen| seen.ended.load(Ordering::SeqCst) == 1);
    let mut lost = 0;
    let end = loop {
        match queue.poll(|done| lost += u32::from(done.status == Status::CONNECTION_LOST)) {
            Err(end) => break end,
            Ok(_) => queue.wait(None),
        }
    };
    assert_eq!(end.origin(), &PathEnd::Disconnected { status: Status::SHUTDOWN, text: "power is low".into() });
    assert_eq!((lost, arena.free_bytes()), (32, arena.total_bytes()));
}

#[test]
fn a_disconnect_is_told_with_its_reason() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, Options { queues: 2, ..options() });
    fake.mischief().hold.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let write = scope.spawn(|| volume.write(0, volume.buffer(512).unwrap()));
        fake.until("the write", |seen| seen.held.load(Ordering::SeqCst) == 1);
        let text = "node-9 has taken the volume";
        let bytes = disconnect(Status::PREEMPTED, text);
        fake.inject(0, bytes);
        let end = PathEnd::Disconnected { status: Status::PREEMPTED, text: text.into() };
        let (_, result) = write.join().unwrap();
        assert_eq!(result, Err(Error::OutcomeUnknown { opcode: Opcode::WRITE, end: end.clone() }));
        assert_eq!(volume.flush(), Err(Error::ConnectionLost { opcode: Opcode::FLUSH, end }));
    });
}

#[test]
fn a_target_that_dies_between_commands_is_noticed_without_one() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, options());
    volume.flush().unwrap();
    fake.cut();
    eventually("the end of the session", || volume.as_async().session().end().is_some());
}

#[test]
fn events_are_taken_in_and_answered() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, options());
    let event = |token, code, value| control(ControlKind::Event, token, |c| (c.code, c.value) = (code, value));
    fake.inject(0, event(5, EventCode::RESIZED, 16 << 20));
    fake.inject(0, event(6, EventCode::DRAINING, 5_000));
    fake.inject(0, event(7, EventCode(200), 1));
    fake.inject(0, control(ControlKind::Probe, 8, |_| {}));
    let seen = |token, code| {
        fake.until("the answer", |seen| {
            let controls = seen.controls.lock().unwrap();
            controls.iter().any(|c| (c.token, c.code, c.kind) == (token, code, ControlKind::EventSeen))
        });
    };
    seen(5, EventCode::RESIZED);
    seen(6, EventCode::DRAINING);
    seen(7, EventCode(200));
    fake.until("the answer to the probe", |seen| {
        seen.controls.lock().unwrap().iter().any(|c| (c.token, c.kind) == (8, ControlKind::ProbeReply))
    });
    assert_eq!(volume.geometry().size, 16 << 20);
    assert!(volume.as_async().session().is_draining());
    let text = volume.as_async().metrics().render();
    assert!(text.contains("alarms_total{reason=\"draining\"} 1\n"), "{text}");
}

#[test]
fn a_shrunken_grant_is_acknowledged_when_it_is_kept_to() {
    let fake = Fake::start(Setup::default());
    let (_session, mut queue) = bare(&fake);
    fake.mischief().hold.store(true, Ordering::SeqCst);
    (0..8).for_each(|_| queue.submit(Request::flush()).unwrap());
    let mut ended = 0;
    while fake.seen().held.load(Ordering::SeqCst) < 8 {
        ended += queue.poll(drop).unwrap();
    }
    fake.change_grant(2);
    let acknowledged = |fake: &Fake| {
        let controls = fake.seen().controls.lock().unwrap();
        controls.iter().any(|c| (c.kind, c.token, c.credits.number) == (ControlKind::EventSeen, 40, GrantNumber(2)))
    };
    while queue.has_room() {
        ended += queue.poll(drop).unwrap();
    }
    assert_eq!((ended, queue.in_flight()), (0, 8));
    assert!(!acknowledged(&fake), "commands are out above the new grant");
    let refused = queue.submit(Request::flush()).unwrap_err();
    assert_eq!(refused.reason, Reason::Full);
    fake.release();
    while !acknowledged(&fake) {
        ended += queue.poll(drop).unwrap();
        queue.wait(Some(Duration::from_millis(10)));
    }
    assert_eq!(ended, 8);
    queue.submit(Request::flush()).unwrap();
    queue.submit(Request::flush()).unwrap();
    assert!(!queue.has_room());
}

#[test]
fn an_idle_path_is_probed_and_silence_raises_an_alarm_once() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake, Options { probe_period_ms: 20, ..options() });
    fake.until("three probes", |seen| {
        seen.controls.lock().unwrap().iter().filter(|c| c.kind == ControlKind::Probe).count() >= 3
    });
    fake.mischief().deaf.store(true, Ordering::SeqCst);
    volume_sees_nothing_of(&fake);
    let alarms = || volume.as_async().metrics().render().contains("alarms_total{reason=\"silence\"} 1\n");
    eventually("the alarm", alarms);
    fake.release();
    volume.flush().unwrap();
    assert!(alarms());
}

#[test]
fn a_queue_whose_path_has_ended_gives_everything_back_and_says_so() {
    let fake = Fake::start(Setup::default());
    let (session, mut queue) = bare(&fake);
    let arena = Arena::new(1 << 20, Pages::Transparent).unwrap();
    fake.mischief().hold.store(true, Ordering::SeqCst);
    for token in 0..3 {
        queue.submit(Request::write(0, arena.take(8192).unwrap()).with_token(token)).unwrap();
    }
    let mut back = Vec::new();
    let end = loop {
        if fake.seen().held.load(Ordering::SeqCst) == 3 {
            fake.cut();
        }
        if let Err(end) = queue.poll(|done| back.push(done)) {
            break end;
        }
        queue.wait(Some(Duration::from_millis(5)));
    };
    assert_eq!(back.len(), 3);
    for done in &back {
        assert!(done.buffer.is_some());
        let outcome = done.outcome(|| end.clone());
        assert_eq!(outcome, Err(Error::OutcomeUnknown { opcode: Opcode::WRITE, end: end.clone() }));
    }
    assert_eq!((queue.end(), session.end()), (Some(&end), Some(&end)));
    assert_eq!(queue.poll(drop), Err(end.clone()));
    let refused = queue.submit(Request::flush()).unwrap_err();
    assert_eq!(refused.reason, Reason::Ended(end));
}

#[test]
fn a_bare_queue_closes_its_session_in_order() {
    let fake = Fake::start(Setup::default());
    let (session, mut queue) = bare(&fake);
    (0..5).for_each(|_| queue.submit(Request::flush()).unwrap());
    let mut ended = 0;
    queue.close_within(Duration::from_secs(20), |done| ended += u32::from(done.status.is_ok())).unwrap();
    assert_eq!((ended, session.end()), (5, Some(&PathEnd::Closed)));
    assert_eq!(fake.seen().closes.load(Ordering::SeqCst), 1);

    let (session, mut queue) = bare(&fake);
    fake.mischief().hold.store(true, Ordering::SeqCst);
    queue.submit(Request::flush()).unwrap();
    let mut lost = 0;
    let count = |done: twinrail_initiator::Done| lost += u32::from(done.status == Status::CONNECTION_LOST);
    assert_eq!(queue.close_within(Duration::from_millis(30), count), Err(PathEnd::Aborted));
    assert_eq!((lost, session.end()), (1, Some(&PathEnd::Aborted)));
}

#[tokio::test]
async fn a_connect_that_is_dropped_leaves_no_session() {
    let fake = Fake::start(Setup::default());
    let url: VolumeUrl = fake.url().parse().unwrap();
    {
        let mut connect = pin!(Volume::connect(&url, options()));
        poll_once(connect.as_mut());
    }
    fake.until("the close", |seen| seen.closes.load(Ordering::SeqCst) == 1);
}
