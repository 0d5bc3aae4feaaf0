//! What an initiator asks for and can't have: a status of our own, a text that names the thing, nothing disturbed.

use twinrail_protocol::limits::{MAX_SPACE_RANGE, MAX_VERIFY_RANGE};
use twinrail_protocol::wire::{Attach, AttachMode, Command, Handshake, Payload};
use twinrail_protocol::{Flags, Opcode, Status, VolumeId};
use twinrail_tests::wire::{Connection, Ended, Queue, attach};
use twinrail_tests::{Target, twinrail};

const MIB: u64 = 1 << 20;

/// How a target refuses an ATTACH.
fn refusal(target: &Target, attach: &Attach<'_>) -> Ended {
    let mut connection = Connection::welcomed(target.address);
    connection.handshake(&Handshake::Attach(*attach));
    connection.end().expect("a refusal has a reason")
}

#[test]
fn an_unknown_volume_is_refused_and_the_nearest_name_told() {
    let target = Target::serve(&["disk0=memory,size=1M", "archive=memory,size=1M"]);
    let ended = refusal(&target, &attach("disc0", AttachMode::EXCLUSIVE));
    assert_eq!(ended.status, Status::UNKNOWN_VOLUME);
    assert!(ended.text.contains("\"disc0\"") && ended.text.contains("did you mean \"disk0\""), "{}", ended.text);
    // One that is like none of them: then they are all named.
    let ended = refusal(&target, &attach("x", AttachMode::EXCLUSIVE));
    assert!(ended.text.contains("\"disk0\"") && ended.text.contains("\"archive\""), "{}", ended.text);
    let complaint = twinrail(["info", &target.url("disc0")]).complaint();
    assert!(complaint.contains("unknown_volume") && complaint.contains("did you mean \"disk0\""), "{complaint}");
    let scrape = target.scrape_until("three refusals", |s| {
        s.sum("twinrail_target_refusals_total", &[("reason", "unknown_volume")]) == 3.0
    });
    assert_eq!(scrape.sum("twinrail_target_sessions", &[]), 0.0);
}

#[test]
fn a_held_volume_is_refused_and_its_holder_named() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let mut holder = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    for mode in [AttachMode::EXCLUSIVE, AttachMode::SHARED] {
        let ended = refusal(&target, &attach("disk0", mode));
        assert_eq!(ended.status, Status::VOLUME_HELD);
        assert!(ended.text.contains("a test") && ended.text.contains("disk0"), "{}", ended.text);
        assert!(ended.text.contains("preempt"), "the remedy is missing: {}", ended.text);
    }
    let complaint = twinrail(["write", &target.url("disk0"), "/dev/zero", "--length", "512"]).complaint();
    assert!(complaint.contains("volume_held"), "{complaint}");
    // A reader stands in nobody's way, and the holder has noticed nothing.
    let mut reader = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
    assert_eq!(reader.status(Opcode::READ, (0, 512), &[]), Status::OK);
    assert_eq!(holder.status(Opcode::WRITE, (0, 512), &[7; 512]), Status::OK);
    holder.close();
    Queue::attach(target.address, "disk0", AttachMode::SHARED).close();
}

#[test]
fn a_version_that_the_target_does_not_speak_is_refused_with_those_it_does() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    for versions in [(2, 9), (0, 0)] {
        let mut connection = Connection::open(target.address);
        connection.hello(versions.0, versions.1);
        let ended = connection.end().expect("a refusal has a reason");
        assert_eq!(ended.status, Status::UNSUPPORTED_VERSION);
        assert!(ended.text.contains("speaks versions 1 to 1"), "{}", ended.text);
    }
    // A range that contains ours is fine.
    let mut connection = Connection::open(target.address);
    connection.hello(1, 9);
    connection.handshake(&Handshake::Attach(attach("disk0", AttachMode::READ_ONLY)));
    assert!(connection.receive().is_some() && connection.receive().is_some());
}

#[test]
fn another_volume_than_the_expected_one_is_refused() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let expected_volume = VolumeId([9; 16]);
    let ended = refusal(&target, &Attach { expected_volume, ..attach("disk0", AttachMode::EXCLUSIVE) });
    assert_eq!(ended.status, Status::WRONG_VOLUME);
}

#[test]
fn each_bad_range_has_its_status_and_executes_nothing() {
    let target = Target::serve(&["disk0=memory,size=2M,logical-block=4096"]);
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let content = vec![0x5a; MIB as usize];
    assert_eq!(queue.status(Opcode::WRITE, (0, MIB), &content), Status::OK);
    assert_eq!(queue.status(Opcode::WRITE, (MIB, MIB), &content), Status::OK);

    let longest = |opcode: Opcode| match opcode {
        Opcode::READ | Opcode::WRITE => MIB,
        Opcode::COMPARE_AND_WRITE => MIB / 2,
        Opcode::VERIFY => MAX_VERIFY_RANGE,
        _ => MAX_SPACE_RANGE,
    };
    for opcode in [
        Opcode::READ,
        Opcode::WRITE,
        Opcode::WRITE_ZEROES,
        Opcode::DISCARD,
        Opcode::COMPARE_AND_WRITE,
        Opcode::BLOCK_STATUS,
        Opcode::VERIFY,
    ] {
        let brings = match opcode {
            Opcode::WRITE => 1,
            Opcode::COMPARE_AND_WRITE => 2,
            _ => 0,
        };
        for (range, status) in [
            ((0, 0), Status::ZERO_LENGTH),
            ((512, 4096), Status::MISALIGNED),
            ((0, 4095), Status::MISALIGNED),
            ((0, longest(opcode) + 4096), Status::TOO_LARGE),
            ((2 * MIB, 4096), Status::OUT_OF_RANGE),
            ((2 * MIB - 4096, 8192), Status::OUT_OF_RANGE),
            ((u64::MAX - 4095, 4096), Status::OUT_OF_RANGE),
            ((1 << 63, 1 << 13), Status::OUT_OF_RANGE),
        ] {
            // What a payload too long would do is another matter, and ends the connection.
            let payload = vec![1; (range.1 * brings).min(MIB) as usize];
            assert_eq!(queue.status(opcode, range, &payload), status, "{opcode} of {range:?}");
        }
    }
    assert_eq!(queue.status(Opcode::FLUSH, (0, 4096), &[]), Status::BAD_PARAMETER);
    for half in [0, MIB] {
        let (reply, payload) = queue.call(Opcode::READ, Flags::NONE, (half, MIB), &[]);
        assert_eq!((reply.status, payload == content), (Status::OK, true), "a refused command changed something");
    }
    queue.close();
}

#[test]
fn bad_opcodes_flags_and_payloads_have_their_statuses_and_execute_nothing() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let mut status = |opcode, flags, length, payload: &[u8]| queue.call(opcode, flags, (0, length), payload).0.status;
    assert_eq!(status(Opcode(77), Flags::NONE, 512, &[]), Status::UNKNOWN_OPCODE);
    assert_eq!(status(Opcode(0), Flags::NONE, 512, &[1; 512]), Status::UNKNOWN_OPCODE);
    assert_eq!(status(Opcode::READ, Flags::FUA, 512, &[]), Status::BAD_FLAGS);
    assert_eq!(status(Opcode::WRITE, Flags(1 << 12), 512, &[1; 512]), Status::BAD_FLAGS);
    assert_eq!(status(Opcode::WRITE, Flags::NONE, 512, &[1; 1024]), Status::BAD_PAYLOAD_LENGTH);
    assert_eq!(status(Opcode::WRITE, Flags::NONE, 512, &[]), Status::BAD_PAYLOAD_LENGTH);
    assert_eq!(status(Opcode::READ, Flags::NONE, 512, &[1; 512]), Status::BAD_PAYLOAD_LENGTH);
    assert_eq!(status(Opcode::COMPARE_AND_WRITE, Flags::NONE, 512, &[1; 512]), Status::BAD_PAYLOAD_LENGTH);

    // A payload damaged on its way (I7), small and large: in the capsule, and beyond it.
    for length in [512, 65536] {
        let payload = Payload { length: length as u32, crc: 0xbad };
        let damaged = Command { opcode: Opcode::WRITE, length, payload, ..Command::default() };
        queue.send_command(0, damaged, &vec![1; length as usize]);
        assert_eq!(queue.reply().0.status, Status::PAYLOAD_CRC);
    }
    let (_, payload) = queue.call(Opcode::READ, Flags::NONE, (0, 65536), &[]);
    assert!(payload == vec![0; 65536], "a refused command changed something");
    queue.close();
    target.scrape_until("two damaged payloads", |s| s.sum("twinrail_target_payload_crc_errors_total", &[]) == 2.0);
}

#[test]
fn nothing_can_be_changed_on_a_read_only_volume_or_attach() {
    let target = Target::serve(&["fixed=memory,size=1M,read-only", "disk0=memory,size=1M"]);
    // Who wants to write is told at once.
    let ended = refusal(&target, &attach("fixed", AttachMode::EXCLUSIVE));
    assert_eq!(ended.status, Status::VOLUME_READ_ONLY);
    assert!(ended.text.contains("fixed"), "{}", ended.text);
    for volume in ["fixed", "disk0"] {
        let mut queue = Queue::attach(target.address, volume, AttachMode::READ_ONLY);
        assert_eq!(queue.status(Opcode::WRITE, (0, 512), &[1; 512]), Status::READ_ONLY);
        assert_eq!(queue.status(Opcode::WRITE, (0, 65536), &[1; 65536]), Status::READ_ONLY);
        assert_eq!(queue.status(Opcode::WRITE_ZEROES, (0, 512), &[]), Status::READ_ONLY);
        assert_eq!(queue.status(Opcode::DISCARD, (0, 512), &[]), Status::READ_ONLY);
        assert_eq!(queue.status(Opcode::COMPARE_AND_WRITE, (0, 512), &[0; 1024]), Status::READ_ONLY);
        assert_eq!(queue.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
        let (reply, payload) = queue.call(Opcode::READ, Flags::NONE, (0, 65536), &[]);
        assert_eq!((reply.status, payload), (Status::OK, vec![0; 65536]));
        queue.close();
    }
    let complaint = twinrail(["write", &target.url("fixed"), "/dev/zero", "--length", "512"]).complaint();
    assert!(complaint.contains("read") && complaint.contains("only"), "{complaint}");
}

#[test]
fn a_peer_that_breaks_the_protocol_loses_its_connection_and_nobody_else_does() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--lease-ms", "0"]).start();
    let mut bystander = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
    type Offence = fn(&mut Queue);
    let cases: [(Status, Offence); 4] = [
        (Status::HEADER_CRC, |queue| queue.connection().send(&[1; 64])),
        // A slot that wasn't granted.
        (Status::CREDIT_OVERRUN, |queue| {
            let slot = twinrail_protocol::Slot(250);
            let sequence = twinrail_protocol::Sequence(1);
            let epoch = twinrail_protocol::Epoch(1);
            let command = Command { slot, sequence, epoch, length: 512, ..Command::default() };
            queue.connection().send(&twinrail_protocol::wire::Frame::Command(command).encode());
        }),
        // A sequence from nowhere.
        (Status::UNEXPECTED_FRAME, |queue| {
            let sequence = twinrail_protocol::Sequence(99);
            let epoch = twinrail_protocol::Epoch(1);
            let command = Command { sequence, epoch, length: 512, ..Command::default() };
            queue.connection().send(&twinrail_protocol::wire::Frame::Command(command).encode());
        }),
        // The handshake again.
        (Status::UNEXPECTED_FRAME, |queue| {
            queue.connection().handshake(&Handshake::Attach(attach("disk0", AttachMode::READ_ONLY)));
        }),
    ];
    for (status, offend) in cases {
        let mut queue = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
        offend(&mut queue);
        assert_eq!(queue.connection().end().map(|ended| ended.status), Some(status));
    }
    assert_eq!(bystander.status(Opcode::READ, (0, 512), &[]), Status::OK);
    target.scrape_until("four violations", |s| s.sum("twinrail_target_protocol_violations_total", &[]) == 4.0);
    target.scrape_until("one session", |s| s.sum("twinrail_target_sessions", &[]) == 1.0);
}
