//! The target's buffer memory: all of it comes back, and who waits for some of it gets it.

use std::time::{Duration, Instant};

use twinrail_protocol::wire::{AttachMode, Command, Frame, Payload, Transfer};
use twinrail_protocol::{Flags, Opcode, Status, crc32c};
use twinrail_tests::Target;
use twinrail_tests::wire::Queue;

const MIB: u64 = 1 << 20;

/// A target with one reactor and the smallest arena: eight of the largest transfers.
fn small(volumes: &[&str]) -> Target {
    Target::builder(volumes).args(&["--reactors", "1", "--arena", "8M"]).start()
}

/// Asks to write or compare, and leaves the payload to be fetched.
fn announce(queue: &mut Queue, slot: u16, opcode: Opcode, (offset, length): (u64, u64), payload: &[u8]) {
    let payload = Payload { length: payload.len() as u32, crc: crc32c(payload) };
    queue.send_command(slot, Command { opcode, offset, length, payload, ..Command::default() }, &[]);
}

/// The next FETCH, or the status of the next reply.
fn next(queue: &mut Queue) -> Result<Transfer, (u16, Status)> {
    loop {
        match queue.connection().receive().expect("the connection ended").frame {
            Frame::Fetch(fetch) => return Ok(fetch),
            Frame::Reply(reply) => return Err((reply.slot.0, reply.status)),
            Frame::Control(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn send_data(queue: &mut Queue, fetch: Transfer, payload: &[u8]) {
    queue.connection().send(&[&Frame::Data(fetch).encode()[..], payload].concat());
}

#[test]
fn i8_replies_that_leave_with_a_goodbye_give_their_memory_back() {
    const PEERS: usize = 300;
    let args = ["--reactors", "1", "--arena", "8M", "--lease-ms", "0"];
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&args).start();
    for _ in 0..PEERS {
        let mut queue = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
        let read = Command { opcode: Opcode::READ, length: 8192, ..Command::default() };
        // What is no frame at all comes with it: the reply waits to be sent when the connection ends.
        let bytes = [queue.command(0, read, &[]), vec![1; 64]].concat();
        queue.connection().send(&bytes);
        queue.connection().wait_for_close();
    }
    target.scrape_until("that every byte of the arena is free", |s| {
        let free = s.sum("twinrail_target_arena_free_bytes", &[]);
        free > 0.0 && free == s.sum("twinrail_target_arena_bytes", &[])
    });
}

#[test]
fn i10_a_payload_within_the_window_has_memory_whatever_was_asked_for() {
    let target = small(&["disk0=memory,size=16M", "disk1=memory,size=16M"]);
    let payload = vec![7; MIB as usize];
    let attach = |volume| Queue::attach(target.address, volume, AttachMode::EXCLUSIVE);
    let (mut queue, mut silent) = (attach("disk0"), attach("disk1"));
    // As much as can be had: what one queue was asked for comes later, the other one never sends it.
    let mut fetches = Vec::new();
    for slot in 0..8 {
        announce(&mut queue, slot, Opcode::WRITE, (u64::from(slot) * MIB, MIB), &payload);
    }
    fetches.push(next(&mut queue).expect("a fetch"));
    for slot in 0..8 {
        announce(&mut silent, slot, Opcode::WRITE, (u64::from(slot) * MIB, MIB), &payload);
    }
    next(&mut silent).expect("a fetch");
    // Something behind it on the same connection is answered: so all of it has arrived.
    silent.send(9, Opcode::READ, Flags::NONE, (0, 512), &[]);
    while next(&mut silent).is_ok() {}
    for slot in [8, 9, 10] {
        queue.send(slot, Opcode::WRITE, Flags::NONE, (8 * MIB, MIB), &payload);
    }
    let mut answered = 0;
    while answered < 11 {
        while let Some(fetch) = fetches.pop() {
            send_data(&mut queue, fetch, &payload);
        }
        match next(&mut queue) {
            Ok(fetch) => fetches.push(fetch),
            Err((slot, status)) => {
                assert_eq!(status, Status::OK, "slot {slot}");
                answered += 1;
            }
        }
    }
    queue.close();
}

#[test]
fn i10_exclusive_commands_do_not_wait_for_each_other_s_memory() {
    const LENGTH: u64 = MIB / 2;
    let target = small(&["disk0=memory,size=16M"]);
    let payload = vec![0; 2 * LENGTH as usize];
    // In-capsule buffers of the idle ones leave no room that is enough for one more buffer.
    let mut queues: Vec<_> = (0..6).map(|_| Queue::attach(target.address, "disk0", AttachMode::SHARED)).collect();
    for queue in &mut queues[..2] {
        for slot in 0..8 {
            announce(queue, slot, Opcode::COMPARE_AND_WRITE, (u64::from(slot) * LENGTH, LENGTH), &payload);
        }
        queue.send(8, Opcode::READ, Flags::NONE, (0, 512), &[]);
    }
    // All that can be asked for is asked for before the first payload is sent.
    let mut fetches: Vec<Vec<Transfer>> = vec![Vec::new(); 2];
    for (queue, fetches) in queues.iter_mut().zip(&mut fetches) {
        while let Ok(fetch) = next(queue) {
            fetches.push(fetch);
        }
    }
    for (queue, fetches) in queues.iter_mut().zip(&mut fetches) {
        fetches.drain(..).for_each(|fetch| send_data(queue, fetch, &payload));
    }
    for queue in &mut queues[..2] {
        for _ in 0..8 {
            let (slot, status) = loop {
                match next(queue) {
                    Ok(fetch) => send_data(queue, fetch, &payload),
                    Err(reply) => break reply,
                }
            };
            assert_eq!(status, Status::OK, "slot {slot}");
        }
    }
}

#[test]
fn i8_a_disk_that_hangs_keeps_no_memory_from_another_volume() {
    let args = ["--reactors", "1", "--arena", "8M", "--allow-fault-injection"];
    let volumes = ["disk0=memory,size=16M,inject=read-delay-ms=3600000", "disk1=memory,size=16M"];
    let target = Target::builder(&volumes).args(&args).start();
    let attach = |volume| Queue::attach(target.address, volume, AttachMode::READ_ONLY);
    let (mut hung, mut queue) = (attach("disk0"), attach("disk1"));
    for slot in 0..16 {
        hung.send(slot, Opcode::READ, Flags::NONE, (u64::from(slot) * MIB, MIB), &[]);
    }
    target.scrape_until("that some of them wait", |s| s.sum("twinrail_target_commands_parked", &[]) > 0.0);
    let begun = Instant::now();
    for round in 0..100 {
        assert_eq!(queue.status(Opcode::READ, (round % 16 * MIB, MIB), &[]), Status::OK);
        assert_eq!(queue.status(Opcode::VERIFY, (0, MIB), &[]), Status::OK);
    }
    // Before the connection of the other one, which answers no probes, is given up and its memory free.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    queue.close();
}

#[test]
fn i8_an_initiator_that_never_sends_what_it_is_asked_for_keeps_memory_from_nobody_for_ever() {
    let volumes = ["disk0=memory,size=64M", "disk1=memory,size=1M"];
    // Probed so rarely that only the missing payload can end the path.
    let patience = ["--reactors", "1", "--arena", "8M", "--stall-timeout-ms", "1000", "--probe-period-ms", "600000"];
    let target = Target::builder(&volumes).args(&patience).start();
    let mut hog = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let payload = vec![1; MIB as usize];
    for slot in 0..32 {
        announce(&mut hog, slot, Opcode::WRITE, (u64::from(slot) * MIB, MIB), &payload);
    }
    assert!(next(&mut hog).is_ok(), "it is asked for the first of them, and doesn't answer");
    hog.connection().wait_for_close();
    let mut other = Queue::attach(target.address, "disk1", AttachMode::EXCLUSIVE);
    assert_eq!(other.status(Opcode::READ, (0, 512 * 1024), &[]), Status::OK);
    target.scrape_until("that the path ended for want of payload", |s| {
        s.sum("twinrail_target_disconnects_total", &[("status", "timeout")]) == 1.0
    });
}
