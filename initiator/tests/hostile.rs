//! I9: a target that breaks every rule. No panic, no hang; the session ends with a reason that names the fault,
//! and every buffer comes back.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fake;

use std::sync::atomic::Ordering;

use fake::{Fake, Setup, attached, control, encoded, reply_to};
use proptest::prelude::*;
use twinrail_initiator::{ConnectError, Error, Flags, Opcode, Options, PathEnd, Status, VolumeUrl, blocking};
use twinrail_protocol::crc32c;
use twinrail_protocol::ids::{BootId, Epoch, GrantNumber, Instance, Sequence, Slot};
use twinrail_protocol::wire::{
    Activated, Attached, Command, ControlKind, Credits, EventCode, Features, Frame, Handshake, Payload, Reply,
    Transfer, Welcome,
};

fn options() -> Options {
    Options { queues: 1, connect_timeout_ms: 5_000, ..Options::default() }
}

fn attach(fake: &Fake) -> blocking::Volume {
    let url: VolumeUrl = fake.url().parse().unwrap();
    blocking::Volume::connect(&url, options()).unwrap()
}

fn reply(reply: Reply, payload: &[u8]) -> Vec<u8> {
    [&Frame::Reply(reply).encode()[..], payload].concat()
}

fn transfer(command: &Command) -> Transfer {
    let Command { opcode, slot, epoch, sequence, .. } = *command;
    Transfer { opcode, slot, epoch, sequence, payload: Payload { length: 512, crc: 1 } }
}

type Broken = (&'static str, Status, fn(&Command) -> Vec<u8>);

/// Each rule, the status that names it, and the frame that breaks it, in answer to a READ of 4096 bytes.
const RULES: &[Broken] = &[
    ("a slot that isn't out", Status::UNEXPECTED_FRAME, |c| reply(Reply { slot: Slot(5), ..reply_to(c) }, &[])),
    ("a slot that isn't there", Status::UNEXPECTED_FRAME, |c| reply(Reply { slot: Slot(999), ..reply_to(c) }, &[])),
    ("a later sequence", Status::UNEXPECTED_FRAME, |c| reply(Reply { sequence: Sequence(9), ..reply_to(c) }, &[])),
    ("a later epoch", Status::UNEXPECTED_FRAME, |c| reply(Reply { epoch: Epoch(9), ..reply_to(c) }, &[])),
    ("another opcode", Status::UNEXPECTED_FRAME, |c| reply(Reply { opcode: Opcode::WRITE, ..reply_to(c) }, &[])),
    ("too large a grant", Status::MALFORMED, |c| {
        let credits = Credits { granted_slots: 33, number: GrantNumber(2), data_window: 0 };
        reply(Reply { credits, status: Status::IO_ERROR, ..reply_to(c) }, &[])
    }),
    ("more than was asked for", Status::MALFORMED, |c| {
        let payload = Payload { length: 4608, crc: crc32c(&[0; 4608]) };
        reply(Reply { payload, flags: Flags::PAYLOAD_FOLLOWS, ..reply_to(c) }, &[0; 4608])
    }),
    ("less than was asked for", Status::MALFORMED, |c| {
        let payload = Payload { length: 512, crc: crc32c(&[0; 512]) };
        reply(Reply { payload, flags: Flags::PAYLOAD_FOLLOWS, ..reply_to(c) }, &[0; 512])
    }),
    ("nothing at all", Status::MALFORMED, |c| reply(reply_to(c), &[])),
    ("a payload from nowhere", Status::MALFORMED, |c| {
        reply(Reply { payload: Payload { length: 4096, crc: 0 }, ..reply_to(c) }, &[])
    }),
    ("a second reply", Status::UNEXPECTED_FRAME, |c| {
        let payload = Payload { length: 4096, crc: crc32c(&[0; 4096]) };
        let once = reply(Reply { payload, flags: Flags::PAYLOAD_FOLLOWS, ..reply_to(c) }, &[0; 4096]);
        [once.clone(), once].concat()
    }),
    ("a fetch of nothing", Status::UNEXPECTED_FRAME, |c| Frame::Fetch(transfer(c)).encode().to_vec()),
    ("data", Status::UNEXPECTED_FRAME, |c| [&Frame::Data(transfer(c)).encode()[..], &[0; 512]].concat()),
    ("much data", Status::UNEXPECTED_FRAME, |c| {
        let payload = Payload { length: 1 << 20, crc: 1 };
        Frame::Data(Transfer { payload, ..transfer(c) }).encode().to_vec()
    }),
    ("a command", Status::UNEXPECTED_FRAME, |c| Frame::Command(*c).encode().to_vec()),
    ("a handshake", Status::UNEXPECTED_FRAME, |_| {
        encoded(&Handshake::Activated(Activated::new(Epoch(2), Instance(1))))
    }),
    ("a header that is damaged", Status::HEADER_CRC, |c| {
        let mut bytes = reply(reply_to(c), &[]);
        bytes[20] ^= 1;
        bytes
    }),
    ("another protocol", Status::HEADER_CRC, |_| b"HTTP/1.1 400 Bad Request\r\n".repeat(8)),
    ("a payload that can't be", Status::MALFORMED, |c| {
        let payload = Payload { length: u32::MAX, crc: 1 };
        reply(Reply { payload, flags: Flags::PAYLOAD_FOLLOWS, ..reply_to(c) }, &[])
    }),
    ("CLOSED unasked", Status::UNEXPECTED_FRAME, |_| control(ControlKind::Closed, 1, |_| {})),
    ("CLOSE", Status::UNEXPECTED_FRAME, |_| control(ControlKind::Close, 1, |_| {})),
    ("EVENT_SEEN", Status::UNEXPECTED_FRAME, |_| control(ControlKind::EventSeen, 1, |_| {})),
    ("a control frame of a later epoch", Status::UNEXPECTED_FRAME, |_| {
        control(ControlKind::Probe, 1, |c| c.epoch = Epoch(2))
    }),
    ("a flood of probes", Status::CONTROL_OVERRUN, |_| control(ControlKind::Probe, 1, |_| {}).repeat(200)),
    ("a size that can't be", Status::MALFORMED, |_| {
        control(ControlKind::Event, 1, |c| (c.code, c.value) = (EventCode::RESIZED, 1000))
    }),
    ("a grant that can't be, by an event", Status::MALFORMED, |_| {
        control(ControlKind::Event, 1, |c| (c.code, c.credits.granted_slots) = (EventCode::CREDIT, 500))
    }),
    ("a reason that isn't text", Status::MALFORMED, |_| {
        let mut bytes = control(ControlKind::Disconnect, 0, |c| {
            (c.payload, c.status) = (Payload { length: 2, crc: crc32c(b"\xff\n") }, Status::SHUTDOWN);
        });
        bytes.extend_from_slice(b"\xff\n");
        bytes
    }),
];

#[test]
fn i9_each_broken_rule_ends_the_session_and_is_named_on_both_sides() {
    for (name, status, instead) in RULES {
        let fake = Fake::start(Setup::default());
        let volume = attach(&fake);
        *fake.mischief().instead.lock().unwrap() = Some(*instead);
        let (buffer, result) = volume.read(0, volume.buffer(4096).unwrap());
        // The first of two replies is good, and the path ends with the second.
        let error = if *name == "a second reply" { volume.flush().unwrap_err() } else { result.unwrap_err() };
        let (Error::ConnectionLost { end, .. } | Error::OutcomeUnknown { end, .. }) = &error else {
            panic!("{name}: {error}");
        };
        assert!(matches!(end.origin(), PathEnd::Violation(v) if v.status == *status), "{name}: {error}");
        fake.until(name, |seen| seen.disconnects.lock().unwrap().contains(status));
        drop(buffer);
        let arena = volume.as_async().arena();
        assert_eq!(arena.free_bytes(), arena.total_bytes(), "{name}");
        assert!(volume.close().is_err(), "{name}");
    }
}

#[test]
fn i9_a_target_that_asks_for_a_payload_over_and_over_is_stopped_or_served_but_never_grows() {
    let fake = Fake::start(Setup { data_window: 1024, ..Setup::default() });
    let volume = attach(&fake);
    *fake.mischief().instead.lock().unwrap() = None;
    fake.mischief().hold.store(true, Ordering::SeqCst);
    let write = std::thread::scope(|scope| {
        let write = scope.spawn(|| volume.write(0, volume.buffer(8192).unwrap()));
        fake.until("the write", |seen| seen.held.load(Ordering::SeqCst) == 1);
        let (opcode, slot, sequence) = (Opcode::WRITE, Slot(0), Sequence(1));
        let payload = Payload { length: 8192, crc: crc32c(&[0; 8192]) };
        let fetch = Transfer { opcode, slot, epoch: Epoch(1), sequence, payload };
        // The fake takes the first answer that it didn't ask for as what it is: a fault of its own.
        fake.mischief().deaf.store(true, Ordering::SeqCst);
        fake.inject(0, Frame::Fetch(fetch).encode().repeat(500));
        write.join().unwrap()
    });
    let error = write.1.unwrap_err();
    let Error::OutcomeUnknown { end, .. } = &error else { panic!("{error}") };
    assert!(matches!(end.origin(), PathEnd::Violation(_)), "{error}");
    assert_eq!(write.0.len(), 8192);
}

fn welcome(version: u16, auth_method: u16) -> Vec<u8> {
    let (features, boot_id, target_name) = (Features(0), BootId([0; 16]), "t");
    encoded(&Handshake::Welcome(Welcome { version, features, boot_id, auth_method, target_name }))
}

fn attached_with(set: impl FnOnce(&mut Attached<'_>)) -> Vec<u8> {
    let mut answer = attached(&Setup::default());
    set(&mut answer);
    encoded(&Handshake::Attached(answer))
}

fn activated_with(set: impl FnOnce(&mut Activated<'_>)) -> Vec<u8> {
    let mut answer = Activated::new(Epoch(1), Instance(7));
    (answer.depth, answer.credits.granted_slots, answer.in_capsule) = (8, 8, 4096);
    set(&mut answer);
    encoded(&Handshake::Activated(answer))
}

#[test]
fn i9_a_handshake_that_cannot_be_is_named() {
    let cases: Vec<(u8, Vec<u8>, &str)> = vec![
        (0, b"SSH-2.0-OpenSSH_9.2\r\n".repeat(4), "saying hello"),
        (0, welcome(2, 0), "not offered"),
        (0, welcome(1, 7), "authentication by method 7"),
        (0, activated_with(|_| {}), "another answer to HELLO"),
        (0, control(ControlKind::Probe, 1, |_| {}), "no place in the handshake"),
        (0x43, welcome(1, 0), "another answer to ATTACH"),
        (0x43, attached_with(|a| a.logical_block = 0), "impossible numbers"),
        (0x43, attached_with(|a| a.max_transfer = 512), "impossible numbers"),
        (0x43, attached_with(|a| a.queues = 0), "impossible numbers"),
        (0x43, attached_with(|a| a.size = 1000), "impossible numbers"),
        (0x45, attached_with(|_| {}), "another answer to ACTIVATE"),
        (0x45, activated_with(|a| a.epoch = Epoch(2)), "not asked for"),
        (0x45, activated_with(|a| a.instance = Instance(0)), "not asked for"),
        (0x45, activated_with(|a| (a.depth, a.credits.granted_slots) = (0, 0)), "a grant of no slot"),
        (0x45, activated_with(|a| a.depth = 200), "not asked for"),
        (0x45, activated_with(|a| a.in_capsule = 100_000), "not asked for"),
        (0x45, activated_with(|a| a.credits.granted_slots = 9), "impossible counts"),
    ];
    for (kind, bytes, expected) in cases {
        let fake = Fake::start(Setup::default());
        *fake.mischief().handshake_answer.lock().unwrap() = Some((kind, bytes));
        let url: VolumeUrl = fake.url().parse().unwrap();
        let error = blocking::Volume::connect(&url, options()).unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert!(matches!(error, ConnectError::Protocol { .. } | ConnectError::Authentication { .. }), "{error}");
    }
}

#[test]
fn a_refusal_is_told_whole_at_every_stage() {
    for kind in [0, 0x43, 0x45] {
        let fake = Fake::start(Setup::default());
        let text = "node-3 holds disk0 exclusive; use preempt to take it";
        *fake.mischief().refuse.lock().unwrap() = Some((kind, Status::VOLUME_HELD, text));
        let url: VolumeUrl = fake.url().parse().unwrap();
        let error = blocking::Volume::connect(&url, options()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(text) && message.contains("try again in 1500 ms"), "{message}");
        let ConnectError::Refused { status, retry_after_ms, .. } = error else { panic!("{message}") };
        assert_eq!((status, retry_after_ms), (Status::VOLUME_HELD, 1500));
    }
}

#[test]
fn a_target_that_stops_answering_is_given_up_in_time() {
    let half = welcome(1, 0)[..80].to_vec();
    for (kind, bytes) in [(0, Vec::new()), (0, half), (0x43, Vec::new()), (0x45, Vec::new())] {
        let fake = Fake::start(Setup::default());
        *fake.mischief().handshake_answer.lock().unwrap() = Some((kind, bytes));
        let url: VolumeUrl = fake.url().parse().unwrap();
        let options = Options { connect_timeout_ms: 60, attach_timeout_ms: 60, ..options() };
        let error = blocking::Volume::connect(&url, options).unwrap_err();
        assert!(matches!(error, ConnectError::Timeout { timeout_ms: 60, .. }), "{error}");
    }
}

#[test]
fn nobody_there_is_said_with_the_address() {
    // A port that was just free: nobody listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url: VolumeUrl = format!("twinrail://127.0.0.1:{port}/disk0").parse().unwrap();
    let error = blocking::Volume::connect(&url, options()).unwrap_err();
    assert!(matches!(error, ConnectError::Dial { .. }), "{error}");
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let numbers = (any::<u8>(), 0u8..12, any::<u16>(), 0u16..6, prop_oneof![Just(0u16), any::<u16>()]);
    let more = (0u64..3, 0u64..3, any::<u64>(), prop_oneof![Just(0u32), Just(4096), 0u32..9000, any::<u32>()]);
    (numbers, more, any::<u32>(), 0usize..9000).prop_map(
        |((kind, opcode, flags, slot, status), (epoch, sequence, result, length), crc, following)| {
            let (opcode, slot, status) = (Opcode(opcode), Slot(slot), Status(status));
            let (epoch, sequence, flags) = (Epoch(epoch), Sequence(sequence), Flags(flags & 3));
            let payload = Payload { length, crc: if length == 0 { 0 } else { crc } };
            let credits = Credits { granted_slots: slot.0 * 8, number: GrantNumber(slot.0), data_window: crc };
            let transfer = Transfer { opcode, slot, epoch, sequence, payload };
            let frame = match kind % 5 {
                0 | 1 => Frame::Reply(Reply { opcode, flags, slot, status, epoch, sequence, result, credits, payload }),
                2 => Frame::Fetch(transfer),
                3 => Frame::Data(transfer),
                _ => Frame::Handshake { kind: 0x41 + kind % 7, payload },
            };
            let mut bytes = frame.encode().to_vec();
            bytes.resize(bytes.len() + following, kind);
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn i9_whatever_a_target_sends_a_call_ends(frames in proptest::collection::vec(any_frame(), 1..6)) {
        let fake = Fake::start(Setup::default());
        let volume = attach(&fake);
        // Something in flight of each kind, then the frames, then the end of the connection.
        fake.mischief().hold.store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let read = scope.spawn(|| volume.read(0, volume.buffer(8192).unwrap()));
            let write = scope.spawn(|| volume.write(0, volume.buffer(8192).unwrap()));
            fake.until("both", |seen| seen.held.load(Ordering::SeqCst) == 2);
            fake.mischief().hang_up.store(true, Ordering::SeqCst);
            fake.inject(0, frames.concat());
            let ((first, _), (second, _)) = (read.join().unwrap(), write.join().unwrap());
            assert_eq!((first.len(), second.len()), (8192, 8192));
        });
        let arena = volume.as_async().arena();
        prop_assert_eq!(arena.free_bytes(), arena.total_bytes());
    }
}
