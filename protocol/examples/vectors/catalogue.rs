//! What stands in the test vectors, and how a decoded frame is described in them. Shared by the example
//! that writes the files and the test that reads them.

use serde_json::{Value, json};
use twinrail_protocol::geometry::Geometry;
use twinrail_protocol::ids::{
    BootId, Epoch, GrantNumber, Instance, QueueId, Secret, Sequence, SessionId, Slot, VolumeId,
};
use twinrail_protocol::limits::{HEADER_LEN, MAX_DEPTH, MAX_HANDSHAKE_PAYLOAD, MAX_NAME, MAX_PORTALS, MAX_TEXT};
use twinrail_protocol::wire::{
    Activate, Activated, Attach, AttachFlags, AttachMode, Attached, Auth, Command, Control, ControlKind, Credits,
    EventCode, Extent, ExtentFlags, Family, Features, Frame, Handshake, Hello, Payload, Placement, Portal, Rail,
    Refused, Reply, Standby, Standing, Transfer, Verdict, VerdictKind, VolumeFlags, Welcome, Writer,
};
use twinrail_protocol::{Flags, Opcode, Status, crc32c};

/// The volume that the requests are checked against.
pub(crate) const GEOMETRY: Geometry =
    Geometry { size: 1 << 20, logical_block: 512, physical_block: 4096, max_transfer: 1 << 17 };

const SESSION: SessionId = SessionId(*b"\x5e\x55\x10\x4e\0\x01\x42\x02\x83\x04\x05\x06\x07\x08\x09\x0a");
const SECRET: Secret = Secret(*b"sixteen secret b");
const VOLUME: VolumeId = VolumeId(*b"\x70\x1e\x4e\0\0\x01\x42\x02\x83\x04\x05\x06\x07\x08\x09\x0a");
const TABLE: Instance = Instance(0x1122_3344_5566_7788);
const CREDITS: Credits = Credits { granted_slots: 32, number: GrantNumber(0x0102), data_window: 1 << 20 };

/// Names and contents of all files.
pub(crate) fn files() -> [(&'static str, String); 3] {
    let frames = json!({
        "about": "Frames that are well formed, and their fields as SPEC.md names them. 'hex' is the header and what \
                  follows it. Numbers go up to 2^64 - 1. 'reencodes' is false where the bytes hold something that \
                  this version ignores.",
        "vectors": frames(),
    });
    let malformed = json!({
        "about": "Bytes that end the connection, with this status (SPEC.md, 'What ends a connection').",
        "vectors": malformed(),
    });
    let requests = json!({
        "about": "Well formed commands, and the status with which a target answers before it executes anything; 0 if \
                  it executes them (SPEC.md, 'Checks'). The volume is 'geometry'.",
        "geometry": {
            "size": GEOMETRY.size,
            "logical_block": GEOMETRY.logical_block,
            "physical_block": GEOMETRY.physical_block,
            "max_transfer": GEOMETRY.max_transfer,
        },
        "vectors": requests(),
    });
    let text = |value: &Value| format!("{value:#}\n");
    [("frames.json", text(&frames)), ("malformed.json", text(&malformed)), ("requests.json", text(&requests))]
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

// How decoded frames are described.

/// The fields of a HELLO with its name.
pub(crate) fn describe_hello(hello: &Hello, name: &str) -> Value {
    json!({
        "frame": "hello",
        "version_min": hello.version_min,
        "version_max": hello.version_max,
        "features": hello.features,
        "name": name,
    })
}

/// The fields of a frame of an activated connection, with the payload that follows it.
pub(crate) fn describe(frame: &Frame, payload: &[u8]) -> Value {
    let mut fields = describe_header(frame);
    if !payload.is_empty() {
        fields["payload"] = match frame {
            Frame::Control(_) => String::from_utf8_lossy(payload).into(),
            _ => hex(payload).into(),
        };
    }
    match frame {
        Frame::Reply(Reply { opcode: Opcode::BLOCK_STATUS, status: Status::OK, .. }) => {
            fields["extents"] = Extent::decode(payload, u64::MAX)
                .flatten()
                .map(|e| json!({ "length": e.length, "flags": e.flags.0 }))
                .collect();
        }
        Frame::Reply(Reply { opcode: Opcode::IDENTIFY, status: Status::OK, payload: expected, .. }) => {
            fields["identity"] =
                Handshake::decode(0x44, *expected, payload).map_or(Value::Null, |h| describe_handshake(&h));
        }
        _ => {}
    }
    fields
}

fn describe_header(frame: &Frame) -> Value {
    let Payload { length: payload_length, crc: payload_crc } = frame.payload();
    match frame {
        Frame::Command(c) => json!({
            "frame": "command",
            "opcode": c.opcode.0,
            "flags": c.flags.0,
            "slot": c.slot.0,
            "grant_seen": c.grant_seen.0,
            "epoch": c.epoch.0,
            "sequence": c.sequence.0,
            "offset": c.offset,
            "length": c.length,
            "address": c.placement.address,
            "key": c.placement.key,
            "payload_length": payload_length,
            "payload_crc": payload_crc,
        }),
        Frame::Reply(r) => json!({
            "frame": "reply",
            "opcode": r.opcode.0,
            "flags": r.flags.0,
            "slot": r.slot.0,
            "status": r.status.0,
            "epoch": r.epoch.0,
            "sequence": r.sequence.0,
            "result": r.result,
            "granted_slots": r.credits.granted_slots,
            "grant_number": r.credits.number.0,
            "data_window": r.credits.data_window,
            "payload_length": payload_length,
            "payload_crc": payload_crc,
        }),
        Frame::Fetch(t) | Frame::Data(t) => json!({
            "frame": if matches!(frame, Frame::Data(_)) { "data" } else { "fetch" },
            "opcode": t.opcode.0,
            "slot": t.slot.0,
            "epoch": t.epoch.0,
            "sequence": t.sequence.0,
            "payload_length": payload_length,
            "payload_crc": payload_crc,
        }),
        Frame::Control(c) => json!({
            "frame": control_name(c.kind),
            "code": c.code.0,
            "status": c.status.0,
            "epoch": c.epoch.0,
            "token": c.token,
            "granted_slots": c.credits.granted_slots,
            "grant_number": c.credits.number.0,
            "data_window": c.credits.data_window,
            "value": c.value,
            "payload_length": payload_length,
            "payload_crc": payload_crc,
        }),
        Frame::Handshake { kind, .. } => json!({ "frame": "handshake", "kind": kind }),
    }
}

fn control_name(kind: ControlKind) -> &'static str {
    match kind {
        ControlKind::Probe => "probe",
        ControlKind::ProbeReply => "probe_reply",
        ControlKind::Event => "event",
        ControlKind::EventSeen => "event_seen",
        ControlKind::Close => "close",
        ControlKind::Closed => "closed",
        ControlKind::Disconnect => "disconnect",
        ControlKind::PathLost => "path_lost",
    }
}

/// The fields of a handshake frame.
pub(crate) fn describe_handshake(frame: &Handshake<'_>) -> Value {
    match frame {
        Handshake::Welcome(f) => json!({
            "frame": "welcome",
            "version": f.version,
            "auth_method": f.auth_method,
            "features": f.features.0,
            "boot_id": hex(&f.boot_id.0),
            "target_name": f.target_name,
        }),
        Handshake::Auth(f) => {
            json!({ "frame": "auth", "method": f.method, "round": f.round, "data": hex(f.data) })
        }
        Handshake::Attach(f) => json!({
            "frame": "attach",
            "session": hex(&f.session.0),
            "secret": hex(&f.secret.0),
            "next_secret": hex(&f.next_secret.0),
            "expected_volume": hex(&f.expected_volume.0),
            "generation": f.generation,
            "mode": f.mode.0,
            "attach_flags": f.flags.0,
            "queues": f.queues,
            "volume_name": f.volume,
        }),
        Handshake::Attached(f) => json!({
            "frame": "attached",
            "volume": hex(&f.volume.0),
            "generation": f.generation,
            "size": f.size,
            "failed_syncs": f.failed_syncs,
            "synced_boot_id": hex(&f.synced_boot_id.0),
            "logical_block": f.logical_block,
            "physical_block": f.physical_block,
            "max_transfer": f.max_transfer,
            "volume_flags": f.flags.0,
            "lease_ms": f.lease_ms,
            "queues": f.queues,
            "portals": f.portals()
                .map(|p| json!({ "family": p.family.0, "port": p.port, "address": hex(&p.address) }))
                .collect::<Vec<_>>(),
        }),
        Handshake::Activate(f) => json!({
            "frame": "activate",
            "session": hex(&f.session.0),
            "secret": hex(&f.secret.0),
            "epoch": f.epoch.0,
            "instance": f.instance.0,
            "in_capsule": f.in_capsule,
            "queue": f.queue.0,
            "depth": f.depth,
            "rail": f.rail.0,
            "report": f.report().flatten().map(|c| describe_header(&Frame::Command(c))).collect::<Vec<_>>(),
        }),
        Handshake::Activated(f) => json!({
            "frame": "activated",
            "epoch": f.epoch.0,
            "instance": f.instance.0,
            "in_capsule": f.in_capsule,
            "data_window": f.credits.data_window,
            "depth": f.depth,
            "granted_slots": f.credits.granted_slots,
            "grant_number": f.credits.number.0,
            "verdicts": f.verdicts().flatten().map(|v| describe_verdict(&v)).collect::<Vec<_>>(),
        }),
        Handshake::Refused(f) => json!({
            "frame": "refused",
            "status": f.status.0,
            "version_min": f.version_min,
            "version_max": f.version_max,
            "retry_after_ms": f.retry_after_ms,
            "text": f.text,
        }),
        Handshake::Standby(f) => json!({
            "frame": "standby",
            "session": hex(&f.session.0),
            "secret": hex(&f.secret.0),
            "queue": f.queue.0,
            "rail": f.rail.0,
        }),
        Handshake::Standing(f) => {
            json!({ "frame": "standing", "epoch": f.epoch.0, "instance": f.instance.0 })
        }
    }
}

fn describe_verdict(verdict: &Verdict) -> Value {
    let kind = match verdict.kind {
        VerdictKind::Unknown => 0,
        VerdictKind::Running => 1,
        VerdictKind::Done => 2,
    };
    let mut fields = json!({ "slot": verdict.slot.0, "verdict": kind });
    if let Some(reply) = verdict.reply {
        fields["reply"] = describe_header(&Frame::Reply(reply));
    }
    fields
}

// How vectors are written down.

fn good(name: &str, layer: &str, bytes: &[u8], fields: Value) -> Value {
    json!({ "name": name, "layer": layer, "hex": hex(bytes), "fields": fields })
}

fn bad(name: &str, layer: &str, bytes: &[u8], status: Status) -> Value {
    json!({ "name": name, "layer": layer, "hex": hex(bytes), "status": status.0, "status_name": status.name() })
}

// Building blocks.

fn payload_of(bytes: &[u8]) -> Payload {
    Payload { length: u32::try_from(bytes.len()).unwrap_or(u32::MAX), crc: crc32c(bytes) }
}

/// `length` bytes that differ from place to place.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 256) as u8).collect()
}

fn join(header: &[u8], payload: &[u8]) -> Vec<u8> {
    [header, payload].concat()
}

fn hello(name: &[u8]) -> Vec<u8> {
    let hello = Hello { version_min: 1, version_max: 1, features: 0, name: payload_of(name) };
    join(&hello.encode(), name)
}

fn handshake(frame: &Handshake<'_>) -> Vec<u8> {
    let mut out = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
    // What doesn't fit leaves no bytes, and no test takes that for a frame.
    let length = frame.encode(&mut out).unwrap_or(0);
    out.truncate(length);
    out
}

fn verdicts(verdicts: &[Verdict]) -> Vec<u8> {
    let mut out = vec![0; verdicts.len() * (4 + HEADER_LEN)];
    let mut w = Writer::new(&mut out);
    verdicts.iter().for_each(|v| v.encode(&mut w));
    let length = w.finish().unwrap_or(0);
    out.truncate(length);
    out
}

/// Changes a frame's bytes at `offset` and makes the checksums right again, as a peer would that means it.
fn tampered(mut frame: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    frame[offset..offset + bytes.len()].copy_from_slice(bytes);
    resealed(frame)
}

/// Appends bytes to a frame's payload, lengths and checksums included.
fn lengthened(frame: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut longer = join(frame, bytes);
    let length = u32::try_from(longer.len() - HEADER_LEN).unwrap_or(u32::MAX);
    longer[52..56].copy_from_slice(&length.to_le_bytes());
    resealed(longer)
}

fn resealed(mut frame: Vec<u8>) -> Vec<u8> {
    if frame.len() > HEADER_LEN {
        let crc = crc32c(&frame[HEADER_LEN..]);
        frame[56..60].copy_from_slice(&crc.to_le_bytes());
    }
    let crc = crc32c(&frame[..60]);
    frame[60..64].copy_from_slice(&crc.to_le_bytes());
    frame
}

fn command(opcode: Opcode, offset: u64, length: u64) -> Command {
    Command {
        opcode,
        slot: Slot(5),
        grant_seen: CREDITS.number,
        epoch: Epoch(1),
        sequence: Sequence(1),
        offset,
        length,
        ..Command::default()
    }
}

/// A command with its payload behind it.
fn carrying(command: Command, payload: &[u8]) -> Vec<u8> {
    let flags = command.flags.with(Flags::PAYLOAD_FOLLOWS);
    join(&Frame::Command(Command { flags, payload: payload_of(payload), ..command }).encode(), payload)
}

fn reply(opcode: Opcode) -> Reply {
    Reply {
        opcode,
        flags: Flags::NONE,
        slot: Slot(5),
        status: Status::OK,
        epoch: Epoch(1),
        sequence: Sequence(1),
        result: 0,
        credits: CREDITS,
        payload: Payload::default(),
    }
}

fn transfer(payload: &[u8]) -> Transfer {
    let (opcode, slot) = (Opcode::WRITE, Slot(5));
    Transfer { opcode, slot, epoch: Epoch(1), sequence: Sequence(1), payload: payload_of(payload) }
}

fn attach() -> Attach<'static> {
    Attach {
        session: SESSION,
        secret: SECRET,
        next_secret: Secret([0; 16]),
        mode: AttachMode::EXCLUSIVE,
        flags: AttachFlags::default(),
        queues: 4,
        expected_volume: VolumeId::NIL,
        generation: 0,
        volume: "disk0",
    }
}

fn attached() -> Attached<'static> {
    let mut f = Attached::new(VOLUME);
    (f.generation, f.size, f.max_transfer) = (3, GEOMETRY.size, GEOMETRY.max_transfer);
    (f.logical_block, f.physical_block) = (GEOMETRY.logical_block, GEOMETRY.physical_block);
    (f.flags, f.queues) = (VolumeFlags::DISCARD, 4);
    f
}

fn activate(epoch: u64) -> Activate<'static> {
    let mut f = Activate::new(SESSION, SECRET, QueueId(1), Rail::TCP, Epoch(epoch));
    f.depth = 64;
    f
}

fn activated(epoch: u64) -> Activated<'static> {
    let mut f = Activated::new(Epoch(epoch), TABLE);
    (f.depth, f.credits, f.in_capsule) = (64, CREDITS, 4096);
    f
}

fn refused() -> Refused<'static> {
    Refused {
        status: Status::UNKNOWN_VOLUME,
        version_min: 1,
        version_max: 1,
        retry_after_ms: 0,
        text: "no volume \"disk9\"; there are: disk0",
    }
}

/// A command as it is reported in flight on the path with `epoch`.
fn reported(slot: u16, epoch: u64) -> Command {
    let (slot, epoch) = (Slot(slot), Epoch(epoch));
    Command { slot, epoch, payload: payload_of(&pattern(512)), ..command(Opcode::WRITE, 4096, 512) }
}

/// Frames that are well formed.
fn frames() -> Vec<Value> {
    let mut all = Vec::new();
    hellos(&mut all);
    handshakes(&mut all);
    commands(&mut all);
    replies(&mut all);
    controls(&mut all);
    all
}

fn hellos(all: &mut Vec<Value>) {
    let first = Hello { version_min: 1, version_max: 1, features: 0, name: payload_of(b"node-7") };
    all.push(good("hello", "hello", &join(&first.encode(), b"node-7"), describe_hello(&first, "node-7")));
    let name = "Knoten-ä";
    let later = Hello { version_min: 1, version_max: 4, features: 1 << 63, name: payload_of(name.as_bytes()) };
    let bytes = tampered(join(&later.encode(), name.as_bytes()), 24, b"of a later version");
    let mut vector = good("hello_of_a_later_version", "hello", &bytes, describe_hello(&later, name));
    vector["reencodes"] = false.into();
    all.push(vector);
}

fn handshakes(all: &mut Vec<Value>) {
    let mut add = |name: &str, frame: Handshake<'_>| {
        all.push(good(name, "handshake", &handshake(&frame), describe_handshake(&frame)));
    };
    let boot_id = BootId(*b"\xb0\x07\x1d\0\0\x01\x42\x02\x83\x04\x05\x06\x07\x08\x09\x0a");
    let welcome = Welcome { version: 1, features: Features(0), boot_id, auth_method: 0, target_name: "shelf-3" };
    add("welcome", Handshake::Welcome(welcome));
    add("auth", Handshake::Auth(Auth { method: 1, round: 2, data: b"challenge" }));
    add("attach_exclusive", Handshake::Attach(attach()));
    let (mode, flags) = (AttachMode::SHARED, AttachFlags::PREEMPT);
    let shared = Attach { mode, flags, expected_volume: VOLUME, generation: 7, ..attach() };
    add("attach_shared_with_preempt", Handshake::Attach(shared));
    let (flags, next_secret) = (AttachFlags::TAKEOVER, Secret(*b"the next secret!"));
    add("attach_takeover", Handshake::Attach(Attach { flags, next_secret, ..attach() }));
    add("attach_read_only", Handshake::Attach(Attach { mode: AttachMode::READ_ONLY, queues: 1, ..attach() }));
    add("attached", Handshake::Attached(attached()));
    let mut v4 = [0; 16];
    v4[..4].copy_from_slice(&[192, 0, 2, 9]);
    let v6 = *b"\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x09";
    let portals = [
        Portal { family: Family::V4, port: 4450, address: v4 },
        Portal { family: Family::V6, port: 4451, address: v6 },
    ]
    .map(|p| p.encode())
    .concat();
    let flags = VolumeFlags::READ_ONLY.with(VolumeFlags::WRITE_THROUGH).with(VolumeFlags::VOLATILE);
    let mut with_portals = attached().with_portals(&portals);
    (with_portals.flags, with_portals.lease_ms, with_portals.failed_syncs) = (flags, 60_000, 2);
    with_portals.synced_boot_id = boot_id;
    add("attached_with_portals", Handshake::Attached(with_portals));
    add("activate_new_queue", Handshake::Activate(activate(1)));
    let report = [3, 9, 31].map(|slot| Frame::Command(reported(slot, 2)).encode()).concat();
    let mut next = activate(2).with_report(&report);
    next.instance = TABLE;
    add("activate_next_path", Handshake::Activate(next));
    add("activated_new_queue", Handshake::Activated(activated(1)));
    let done = Reply { slot: Slot(31), epoch: Epoch(2), ..reply(Opcode::WRITE) };
    let known = verdicts(&[
        Verdict { slot: Slot(3), kind: VerdictKind::Unknown, reply: None },
        Verdict { slot: Slot(9), kind: VerdictKind::Running, reply: None },
        Verdict { slot: Slot(31), kind: VerdictKind::Done, reply: Some(done) },
    ]);
    add("activated_next_path", Handshake::Activated(activated(2).with_verdicts(3, &known)));
    add("refused", Handshake::Refused(refused()));
    let draining = Refused { status: Status::DRAINING, retry_after_ms: 30_000, text: "", ..refused() };
    add("refused_for_a_while", Handshake::Refused(draining));
    let standby = Standby { session: SESSION, secret: SECRET, queue: QueueId(1), rail: Rail::RDMA };
    add("standby", Handshake::Standby(standby));
    add("standing", Handshake::Standing(Standing { epoch: Epoch(4), instance: TABLE }));
    add("standing_of_a_queue_without_a_table", Handshake::Standing(Standing::default()));
}

fn commands(all: &mut Vec<Value>) {
    let mut add = |name: &str, frame: Frame, payload: &[u8]| {
        all.push(good(name, "active", &join(&frame.encode(), payload), describe(&frame, payload)));
    };
    let small = pattern(512);
    let large = payload_of(&[0xa5; 65536]);
    let with = |command: Command, bytes: &[u8]| {
        let flags = command.flags.with(Flags::PAYLOAD_FOLLOWS);
        Frame::Command(Command { flags, payload: payload_of(bytes), ..command })
    };
    add("read", Frame::Command(command(Opcode::READ, 8192, 65536)), &[]);
    add("write_in_capsule", with(command(Opcode::WRITE, 4096, 512), &small), &small);
    let fua = Command { flags: Flags::FUA, ..command(Opcode::WRITE, 4096, 512) };
    add("write_fua", with(fua, &small), &small);
    let beyond = Command { payload: large, ..command(Opcode::WRITE, 0, 65536) };
    add("write_beyond_the_window", Frame::Command(beyond), &[]);
    let placement = Placement { address: 0x7f00_1234_5000, key: 0x0102_0304 };
    add("write_placed", Frame::Command(Command { placement, ..beyond }), &[]);
    add("flush", Frame::Command(command(Opcode::FLUSH, 0, 0)), &[]);
    let flags = Flags::FUA.with(Flags::NO_UNMAP);
    let zeroes = Command { flags, ..command(Opcode::WRITE_ZEROES, 0, 1 << 20) };
    add("write_zeroes", Frame::Command(zeroes), &[]);
    add("discard", Frame::Command(command(Opcode::DISCARD, 512, 1024)), &[]);
    let both = pattern(1024);
    add("compare_and_write", with(command(Opcode::COMPARE_AND_WRITE, 512, 512), &both), &both);
    add("block_status", Frame::Command(command(Opcode::BLOCK_STATUS, 0, 1 << 20)), &[]);
    add("verify", Frame::Command(command(Opcode::VERIFY, 0, 1 << 20)), &[]);
    add("identify", Frame::Command(command(Opcode::IDENTIFY, 0, 0)), &[]);
    let strange = Command {
        flags: Flags(0xfffe),
        slot: Slot(u16::MAX),
        grant_seen: GrantNumber(u16::MAX),
        epoch: Epoch(u64::MAX),
        sequence: Sequence(u64::MAX),
        ..command(Opcode(0xee), u64::MAX, u64::MAX)
    };
    add("command_of_a_later_version", Frame::Command(strange), &[]);
    add("fetch", Frame::Fetch(Transfer { payload: large, ..transfer(&[]) }), &[]);
    add("data", Frame::Data(transfer(&small)), &small);
}

fn replies(all: &mut Vec<Value>) {
    let mut add = |name: &str, reply: Reply, payload: &[u8]| {
        let flags = if payload.is_empty() { Flags::NONE } else { Flags::PAYLOAD_FOLLOWS };
        let frame = Frame::Reply(Reply { flags, payload: payload_of(payload), ..reply });
        all.push(good(name, "active", &join(&frame.encode(), payload), describe(&frame, payload)));
    };
    let small = pattern(512);
    add("write_reply", reply(Opcode::WRITE), &[]);
    add("read_reply", reply(Opcode::READ), &small);
    let shrunk = Credits { granted_slots: 1, number: CREDITS.number.next(), data_window: 1 << 19 };
    add("reply_with_other_credits", Reply { credits: shrunk, ..reply(Opcode::FLUSH) }, &[]);
    let differs = Reply { status: Status::COMPARE_FAILED, result: 700, ..reply(Opcode::COMPARE_AND_WRITE) };
    add("compare_failed", differs, &[]);
    add("verify_reply", Reply { result: crc32c(&small).into(), ..reply(Opcode::VERIFY) }, &[]);
    add("payload_crc", Reply { status: Status::PAYLOAD_CRC, ..reply(Opcode::WRITE) }, &[]);
    add("retry_mismatch", Reply { status: Status::RETRY_MISMATCH, ..reply(Opcode::WRITE) }, &[]);
    let extents = [
        Extent { length: 4096, flags: ExtentFlags::DATA },
        Extent { length: 65536, flags: ExtentFlags(ExtentFlags::HOLE.0 | ExtentFlags::ZERO.0) },
        Extent { length: 512, flags: ExtentFlags::ZERO },
    ];
    let mut room = [0; 3 * Extent::LEN];
    let length = Extent::encode(&extents, &mut room).unwrap_or(0);
    add("block_status_reply", reply(Opcode::BLOCK_STATUS), &room[..length]);
    let identity = handshake(&Handshake::Attached(attached()));
    add("identify_reply", reply(Opcode::IDENTIFY), &identity[HEADER_LEN..]);
    add("reply_of_a_later_version", Reply { status: Status(0x7fff), ..reply(Opcode(0xee)) }, &[]);
}

fn controls(all: &mut Vec<Value>) {
    let mut add = |name: &str, control: Control, text: &str| {
        let frame = Frame::Control(Control { payload: payload_of(text.as_bytes()), ..control });
        let bytes = join(&frame.encode(), text.as_bytes());
        all.push(good(name, "active", &bytes, describe(&frame, text.as_bytes())));
    };
    let control = |kind, token| Control::new(kind, Epoch(1), token);
    let event = |code| Control { code, ..control(ControlKind::Event, 12) };
    add("probe", control(ControlKind::Probe, 11), "");
    add("probe_reply", control(ControlKind::ProbeReply, 11), "");
    add("event_resized", Control { value: 1 << 40, ..event(EventCode::RESIZED) }, "");
    add("event_draining", Control { value: 30_000, ..event(EventCode::DRAINING) }, "");
    let credits = Credits { granted_slots: 16, number: CREDITS.number.next(), data_window: 1 << 20 };
    add("event_credit", Control { credits, ..event(EventCode::CREDIT) }, "");
    let kept = Credits { number: credits.number, ..Credits::default() };
    let seen = Control { code: EventCode::CREDIT, credits: kept, ..control(ControlKind::EventSeen, 12) };
    add("event_seen_credit", seen, "");
    add("event_seen_resized", Control { code: EventCode::RESIZED, ..control(ControlKind::EventSeen, 12) }, "");
    let strange = Credits { number: GrantNumber(u16::MAX), ..Credits::default() };
    add("event_of_a_later_version", Control { value: u64::MAX, credits: strange, ..event(EventCode(200)) }, "");
    add("close", control(ControlKind::Close, 13), "");
    add("closed", Control { status: Status::CLOSED, ..control(ControlKind::Closed, 13) }, "");
    let disconnect = |status| Control { status, ..control(ControlKind::Disconnect, 0) };
    add("disconnect", disconnect(Status::SHUTDOWN), "");
    add("disconnect_with_text", disconnect(Status::WINDOW_OVERRUN), "more payload sent unasked than the window allows");
    add("disconnect_with_the_longest_text", disconnect(Status::TIMEOUT), &"x".repeat(MAX_TEXT));
    add("path_lost", Control { epoch: Epoch(7), ..control(ControlKind::PathLost, 0) }, "");
}

/// Bytes that end the connection.
fn malformed() -> Vec<Value> {
    let mut all = Vec::new();
    malformed_hellos(&mut all);
    malformed_handshakes(&mut all);
    malformed_frames(&mut all);
    malformed_on_tcp(&mut all);
    malformed_extents(&mut all);
    all
}

fn malformed_hellos(all: &mut Vec<Value>) {
    let mut add = |name: &str, bytes: &[u8], status| all.push(bad(name, "hello", bytes, status));
    let mut http = [b' '; HEADER_LEN];
    http[..14].copy_from_slice(b"GET / HTTP/1.1");
    add("hello_of_something_else", &http, Status::BAD_MAGIC);
    let mut flipped = hello(b"node-7");
    flipped[10] ^= 2;
    add("hello_damaged", &flipped, Status::HEADER_CRC);
    let backwards = tampered(hello(b"node-7"), 8, &[2, 0, 1, 0]);
    add("hello_with_versions_backwards", &backwards, Status::MALFORMED);
    add("hello_without_a_name", &hello(b""), Status::MALFORMED);
    add("hello_with_a_name_too_long", &hello(&[b'x'; MAX_NAME + 1]), Status::MALFORMED);
    let mut damaged = hello(b"node-7");
    damaged[HEADER_LEN] ^= 1;
    add("hello_with_a_damaged_name", &damaged, Status::HEADER_CRC);
    add("hello_with_a_name_not_utf8", &hello(b"node-\xff"), Status::MALFORMED);
    add("hello_with_a_control_character", &hello(b"node\n7"), Status::MALFORMED);
}

fn malformed_handshakes(all: &mut Vec<Value>) {
    let mut add = |name: &str, bytes: &[u8], status| all.push(bad(name, "handshake", bytes, status));
    let attach_frame = handshake(&Handshake::Attach(attach()));
    let activated_frame = handshake(&Handshake::Activated(activated(1)));
    let mut flipped = attach_frame.clone();
    flipped[52] ^= 1;
    add("handshake_header_damaged", &flipped, Status::HEADER_CRC);
    flipped = attach_frame.clone();
    flipped[HEADER_LEN + 3] ^= 1;
    add("handshake_payload_damaged", &flipped, Status::HEADER_CRC);
    add("handshake_kind_unknown", &tampered(attach_frame.clone(), 0, &[0x4a]), Status::UNEXPECTED_FRAME);
    let stray = Frame::Command(command(Opcode::FLUSH, 0, 0)).encode();
    add("command_in_a_handshake", &stray, Status::UNEXPECTED_FRAME);
    add("handshake_header_reserved", &tampered(attach_frame.clone(), 8, &[1]), Status::MALFORMED);
    add("handshake_without_its_flag", &tampered(attach_frame.clone(), 2, &[0]), Status::MALFORMED);
    let payload = Payload { length: MAX_HANDSHAKE_PAYLOAD as u32 + 1, crc: 1 };
    add("handshake_too_long", &Frame::Handshake { kind: 0x43, payload }.encode(), Status::MALFORMED);
    let refused_frame = handshake(&Handshake::Refused(refused()));
    add("refused_with_more_behind", &lengthened(&refused_frame, &[0]), Status::MALFORMED);
    add("refused_reserved", &tampered(refused_frame.clone(), HEADER_LEN + 6, &[1]), Status::MALFORMED);
    let cut = refused_frame[..refused_frame.len() - 1].to_vec();
    add("refused_cut_short", &lengthened(&cut, &[]), Status::MALFORMED);
    add("attach_without_a_session", &tampered(attach_frame.clone(), HEADER_LEN, &[0; 16]), Status::MALFORMED);
    add("attach_flags_unknown", &tampered(attach_frame.clone(), HEADER_LEN + 73, &[4]), Status::MALFORMED);
    add("attach_volume_not_printable", &tampered(attach_frame.clone(), HEADER_LEN + 78, b"\x1b"), Status::MALFORMED);
    let name_too_long = lengthened(&tampered(attach_frame, HEADER_LEN + 76, &[65, 0]), &[b'x'; 60]);
    add("attach_volume_too_long", &name_too_long, Status::MALFORMED);
    let count = MAX_PORTALS + 1;
    let attached_frame = tampered(handshake(&Handshake::Attached(attached())), HEADER_LEN + 62, &[count as u8, 0]);
    add("attached_with_nine_portals", &lengthened(&attached_frame, &vec![0; count * Portal::LEN]), Status::MALFORMED);
    let standby = Standby { session: SESSION, secret: SECRET, queue: QueueId(1), rail: Rail::TCP };
    let standby_frame = handshake(&Handshake::Standby(standby));
    add("standby_reserved", &tampered(standby_frame, HEADER_LEN + 35, &[1]), Status::MALFORMED);
    let standing_frame = handshake(&Handshake::Standing(Standing { epoch: Epoch(4), instance: TABLE }));
    let tableless = tampered(standing_frame, HEADER_LEN + 8, &[0; 8]);
    add("standing_with_an_epoch_and_no_table", &tableless, Status::MALFORMED);
    let activate_frame = handshake(&Handshake::Activate(activate(1)));
    add("activate_reserved", &tampered(activate_frame.clone(), HEADER_LEN + 57, &[1]), Status::MALFORMED);
    let count = (MAX_DEPTH + 1).to_le_bytes();
    add("activate_report_too_long", &tampered(activate_frame.clone(), HEADER_LEN + 58, &count), Status::MALFORMED);
    add("activate_report_missing", &tampered(activate_frame, HEADER_LEN + 58, &[1, 0]), Status::MALFORMED);
    let replies = Frame::Reply(reply(Opcode::WRITE)).encode();
    let strange = handshake(&Handshake::Activate(activate(2).with_report(&replies)));
    add("activate_report_of_a_reply", &strange, Status::MALFORMED);
    let placement = Placement { address: 4096, key: 0 };
    let placed = Frame::Command(Command { placement, ..reported(3, 2) }).encode();
    let placed = handshake(&Handshake::Activate(activate(2).with_report(&placed)));
    add("activate_report_of_a_placement_on_tcp", &placed, Status::MALFORMED);
    let mut damaged = Frame::Command(reported(3, 2)).encode();
    damaged[24] ^= 1;
    let damaged = handshake(&Handshake::Activate(activate(2).with_report(&damaged)));
    add("activate_report_damaged", &damaged, Status::HEADER_CRC);
    let greedy = tampered(activated_frame.clone(), HEADER_LEN + 26, &65u16.to_le_bytes());
    add("activated_grants_more_than_depth", &greedy, Status::MALFORMED);
    let deep = tampered(activated_frame.clone(), HEADER_LEN + 24, &257u16.to_le_bytes());
    add("activated_too_deep", &deep, Status::MALFORMED);
    let nothing = tampered(activated_frame.clone(), HEADER_LEN + 26, &[0, 0]);
    add("activated_grants_nothing", &nothing, Status::MALFORMED);
    add("activated_with_more_behind", &lengthened(&activated_frame, &[0; 4]), Status::MALFORMED);
    add("activated_verdict_missing", &tampered(activated_frame, HEADER_LEN + 28, &[1, 0]), Status::MALFORMED);
    let verdict = |slot, kind, reply| Verdict { slot: Slot(slot), kind, reply };
    let one = |v: Verdict| handshake(&Handshake::Activated(activated(2).with_verdicts(1, &verdicts(&[v]))));
    let unknown = tampered(one(verdict(3, VerdictKind::Unknown, None)), HEADER_LEN + 34, &[3]);
    add("verdict_unknown", &unknown, Status::MALFORMED);
    let other = one(verdict(3, VerdictKind::Done, Some(reply(Opcode::WRITE))));
    add("verdict_with_the_reply_of_another_slot", &other, Status::MALFORMED);
}

fn malformed_frames(all: &mut Vec<Value>) {
    let mut add = |name: &str, bytes: &[u8], status| all.push(bad(name, "active", bytes, status));
    let flush = Frame::Command(command(Opcode::FLUSH, 0, 0)).encode().to_vec();
    let mut flipped = flush.clone();
    flipped[63] ^= 0x80;
    add("header_damaged", &flipped, Status::HEADER_CRC);
    add("kind_zero", &tampered(flush.clone(), 0, &[0]), Status::UNEXPECTED_FRAME);
    add("kind_unknown", &tampered(flush.clone(), 0, &[5]), Status::UNEXPECTED_FRAME);
    add("control_kind_unknown", &tampered(flush.clone(), 0, &[0x18]), Status::UNEXPECTED_FRAME);
    let late = handshake(&Handshake::Attach(attach()));
    add("handshake_on_an_active_connection", &late, Status::UNEXPECTED_FRAME);
    let follows = Command { flags: Flags::PAYLOAD_FOLLOWS, ..command(Opcode::WRITE, 0, 512) };
    add("no_bytes_follow", &Frame::Command(follows).encode(), Status::MALFORMED);
    let empty = Payload { length: 0, crc: 1 };
    let empty = Command { payload: empty, ..command(Opcode::FLUSH, 0, 0) };
    add("empty_payload_with_a_checksum", &Frame::Command(empty).encode(), Status::MALFORMED);
    let payload = Payload { length: (16 << 20) + 1, crc: 1 };
    let huge = Command { payload, ..command(Opcode::WRITE, 0, 512) };
    add("payload_too_long", &Frame::Command(huge).encode(), Status::MALFORMED);
    let answer = Frame::Reply(reply(Opcode::WRITE)).encode().to_vec();
    add("reply_flags", &tampered(answer.clone(), 2, &[2]), Status::MALFORMED);
    add("reply_grants_nothing", &tampered(answer.clone(), 32, &[0, 0]), Status::MALFORMED);
    add("reply_reserved", &tampered(answer, 40, &[1]), Status::MALFORMED);
    let payload = pattern(512);
    let fetch = Frame::Fetch(transfer(&payload)).encode().to_vec();
    add("fetch_with_a_payload", &tampered(fetch.clone(), 2, &[1]), Status::MALFORMED);
    add("fetch_reserved", &tampered(fetch.clone(), 24, &[1]), Status::MALFORMED);
    add("fetch_reserved_word", &tampered(fetch, 6, &[1]), Status::MALFORMED);
    let data = Frame::Data(transfer(&payload)).encode().to_vec();
    add("data_without_a_payload", &tampered(data, 2, &[0]), Status::MALFORMED);
    let probe = Frame::Control(Control::new(ControlKind::Probe, Epoch(1), 11)).encode().to_vec();
    for (name, offset) in [
        ("probe_code", 1),
        ("probe_flags", 2),
        ("probe_slot", 4),
        ("probe_status", 6),
        ("probe_sequence", 16),
        ("probe_credits", 32),
        ("probe_grant_number", 34),
        ("probe_value", 40),
        ("probe_reserved", 48),
    ] {
        add(name, &tampered(probe.clone(), offset, &[2]), Status::MALFORMED);
    }
    let event = |kind, code| Control { code, ..Control::new(kind, Epoch(1), 12) };
    let credit = Control { credits: CREDITS, ..event(ControlKind::Event, EventCode::CREDIT) };
    let credit = Frame::Control(credit).encode().to_vec();
    add("event_credit_grants_nothing", &tampered(credit.clone(), 32, &[0, 0]), Status::MALFORMED);
    add("event_resized_with_credits", &tampered(credit.clone(), 1, &[1]), Status::MALFORMED);
    add("event_seen_with_a_grant", &tampered(credit, 0, &[0x13]), Status::MALFORMED);
    let seen = Frame::Control(event(ControlKind::EventSeen, EventCode::RESIZED)).encode().to_vec();
    add("event_seen_resized_with_a_grant_number", &tampered(seen.clone(), 34, &[1]), Status::MALFORMED);
    add("event_seen_with_a_value", &tampered(seen, 40, &[1]), Status::MALFORMED);
    let lost = Frame::Control(Control::new(ControlKind::PathLost, Epoch(1), 0)).encode().to_vec();
    add("path_lost_with_a_token", &tampered(lost, 24, &[1]), Status::MALFORMED);
    let text = |text: &[u8]| {
        let status = Status::SHUTDOWN;
        let control =
            Control { status, payload: payload_of(text), ..Control::new(ControlKind::Disconnect, Epoch(1), 0) };
        join(&Frame::Control(control).encode(), text)
    };
    add("probe_with_a_text", &tampered(text(b"why"), 0, &[0x10]), Status::MALFORMED);
    add("disconnect_with_a_token", &tampered(text(b""), 24, &[1]), Status::MALFORMED);
    add("disconnect_with_a_text_too_long", &text(&[b'x'; MAX_TEXT + 1]), Status::MALFORMED);
    add("disconnect_too_long", &text(&[b'x'; 513]), Status::MALFORMED);
    add("disconnect_not_utf8", &text(b"\xc3"), Status::MALFORMED);
    let mut damaged = text(b"why");
    damaged[HEADER_LEN] ^= 1;
    add("disconnect_damaged", &damaged, Status::HEADER_CRC);
}

/// Frames that another rail may carry.
fn malformed_on_tcp(all: &mut Vec<Value>) {
    for (name, address, key) in [("address_on_tcp", 4096, 0), ("key_on_tcp", 0, 1)] {
        let placement = Placement { address, key };
        let placed = Frame::Command(Command { placement, ..command(Opcode::READ, 0, 512) });
        all.push(bad(name, "tcp", &placed.encode(), Status::MALFORMED));
    }
}

/// Payloads of the reply to a BLOCK STATUS that asked for 8192 bytes.
fn malformed_extents(all: &mut Vec<Value>) {
    let mut add = |name: &str, bytes: &[u8]| {
        let mut vector = bad(name, "extents", bytes, Status::MALFORMED);
        vector["asked"] = 8192.into();
        all.push(vector);
    };
    let extent = |length: u64| [&length.to_le_bytes()[..], &[0; 8]].concat();
    add("extents_none", &[]);
    add("extent_empty", &extent(0));
    add("extents_past_the_range", &[extent(4096), extent(4608)].concat());
    add("extent_cut_short", &[extent(4096), vec![0; 15]].concat());
    let mut reserved = extent(4096);
    reserved[12] = 1;
    add("extent_reserved", &reserved);
}

/// Commands and how a target answers them before it executes anything.
fn requests() -> Vec<Value> {
    let mut all = Vec::new();
    let mut add = |name: &str, bytes: &[u8], status: Status| {
        all.push(json!({
            "name": name,
            "read_only": name.starts_with("read_only"),
            "hex": hex(bytes),
            "status": status.0,
            "status_name": status.name(),
        }));
    };
    let bare = |opcode, offset, length| Frame::Command(command(opcode, offset, length)).encode().to_vec();
    let flagged =
        |opcode, flags, length| Frame::Command(Command { flags, ..command(opcode, 0, length) }).encode().to_vec();
    let small = pattern(512);
    let write = |offset, length| carrying(command(Opcode::WRITE, offset, length), &small);
    let most = u64::from(GEOMETRY.max_transfer);

    add("read", &bare(Opcode::READ, 0, most), Status::OK);
    add("read_the_last_block", &bare(Opcode::READ, GEOMETRY.size - 512, 512), Status::OK);
    add("write", &write(512, 512), Status::OK);
    add("write_fua", &carrying(Command { flags: Flags::FUA, ..command(Opcode::WRITE, 0, 512) }, &small), Status::OK);
    add("flush", &bare(Opcode::FLUSH, 0, 0), Status::OK);
    add("write_zeroes", &flagged(Opcode::WRITE_ZEROES, Flags::FUA.with(Flags::NO_UNMAP), 1 << 20), Status::OK);
    add("discard", &flagged(Opcode::DISCARD, Flags::FUA, 1 << 20), Status::OK);
    let both = pattern(1024);
    add("compare_and_write", &carrying(command(Opcode::COMPARE_AND_WRITE, 0, 512), &both), Status::OK);
    add("block_status", &bare(Opcode::BLOCK_STATUS, 0, 1 << 20), Status::OK);
    add("verify", &bare(Opcode::VERIFY, 0, 1 << 20), Status::OK);
    add("identify", &bare(Opcode::IDENTIFY, 0, 0), Status::OK);
    add("read_only_read", &bare(Opcode::READ, 0, 512), Status::OK);
    add("read_only_flush", &bare(Opcode::FLUSH, 0, 0), Status::OK);

    add("opcode_zero", &bare(Opcode(0), 0, 512), Status::UNKNOWN_OPCODE);
    add("opcode_unknown", &bare(Opcode(10), 0, 512), Status::UNKNOWN_OPCODE);
    add("opcode_unknown_before_flags", &flagged(Opcode(10), Flags(1 << 9), 512), Status::UNKNOWN_OPCODE);
    add("flag_unknown", &flagged(Opcode::WRITE_ZEROES, Flags(1 << 9), 512), Status::BAD_FLAGS);
    add("read_with_fua", &flagged(Opcode::READ, Flags::FUA, 512), Status::BAD_FLAGS);
    add("flush_with_fua", &flagged(Opcode::FLUSH, Flags::FUA, 0), Status::BAD_FLAGS);
    add("discard_with_no_unmap", &flagged(Opcode::DISCARD, Flags::NO_UNMAP, 512), Status::BAD_FLAGS);
    add("read_only_write", &write(0, 512), Status::READ_ONLY);
    add("read_only_discard_before_range", &bare(Opcode::DISCARD, 1, 0), Status::READ_ONLY);
    add("zero_length", &bare(Opcode::READ, 0, 0), Status::ZERO_LENGTH);
    add("zero_length_before_alignment", &bare(Opcode::READ, 1, 0), Status::ZERO_LENGTH);
    add("offset_misaligned", &bare(Opcode::READ, 256, 512), Status::MISALIGNED);
    add("length_misaligned", &write(0, 500), Status::MISALIGNED);
    add("read_too_large", &bare(Opcode::READ, 0, most + 512), Status::TOO_LARGE);
    add("compare_and_write_too_large", &bare(Opcode::COMPARE_AND_WRITE, 0, most / 2 + 512), Status::TOO_LARGE);
    add("write_zeroes_too_large", &bare(Opcode::WRITE_ZEROES, 0, (1 << 30) + 512), Status::TOO_LARGE);
    add("verify_too_large", &bare(Opcode::VERIFY, 0, (64 << 20) + 512), Status::TOO_LARGE);
    add("behind_the_end", &bare(Opcode::READ, GEOMETRY.size, 512), Status::OUT_OF_RANGE);
    add("across_the_end", &bare(Opcode::WRITE_ZEROES, 512, GEOMETRY.size), Status::OUT_OF_RANGE);
    add("around_the_end_of_numbers", &bare(Opcode::READ, u64::MAX - 511, 512), Status::OUT_OF_RANGE);
    add("flush_with_a_range", &bare(Opcode::FLUSH, 0, 512), Status::BAD_PARAMETER);
    add("identify_with_an_offset", &bare(Opcode::IDENTIFY, 512, 0), Status::BAD_PARAMETER);
    add("write_without_its_payload", &bare(Opcode::WRITE, 0, 512), Status::BAD_PAYLOAD_LENGTH);
    add("write_with_half_its_payload", &write(0, 1024), Status::BAD_PAYLOAD_LENGTH);
    let read = carrying(command(Opcode::READ, 0, 512), &small);
    add("read_with_a_payload", &read, Status::BAD_PAYLOAD_LENGTH);
    let half = carrying(command(Opcode::COMPARE_AND_WRITE, 0, 512), &small);
    add("compare_and_write_with_one_half", &half, Status::BAD_PAYLOAD_LENGTH);
    let mut damaged = write(0, 512);
    damaged[HEADER_LEN + 100] ^= 4;
    add("write_damaged", &damaged, Status::PAYLOAD_CRC);
    all
}
