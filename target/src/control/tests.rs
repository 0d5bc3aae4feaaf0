//! The control plane with real sockets, real reactors and volumes in memory.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use tokio::runtime::Runtime;
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::wire::{
    Activate, Activated, Attach, AttachFlags, AttachMode, Command, Control, ControlKind, Frame, Handshake, Hello,
    Payload, Rail, Standby, Standing,
};
use twinrail_protocol::{Epoch, Instance, QueueId, Secret, Sequence, SessionId, Slot, Status, VolumeId, crc32c};

use super::*;
use crate::config::{ConfigFile, Settings};

/// Longest time that anything here may take.
const LIMIT: Duration = Duration::from_secs(20);
const X: AttachMode = AttachMode::EXCLUSIVE;

struct Target {
    runtime: Runtime,
    server: Server,
}

impl Target {
    fn start(settings: Settings, volumes: &[&str]) -> Self {
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(Server::start(config(settings, volumes), Arc::default())).unwrap();
        Self { runtime, server }
    }

    fn plain() -> Self {
        Self::start(Settings::default(), &["disk0=memory,size=1M"])
    }

    fn dial(&self) -> Peer {
        let stream = TcpStream::connect(self.server.addresses()[0]).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Peer { stream }
    }

    /// A connection that was welcomed.
    fn greet(&self) -> Peer {
        let mut peer = self.dial();
        peer.hello(1, 1, "host-1");
        assert_eq!(peer.answer().0, 0x41, "no WELCOME");
        peer
    }

    /// What a GET of `path` gives: status and body.
    fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.server.metrics_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn metric(&self, series: &str) -> f64 {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200);
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// Waits until a metric has a value: what is counted is counted after the peer has its answer.
    fn await_metric(&self, series: &str, value: f64) {
        let begun = Instant::now();
        while self.metric(series) != value {
            assert!(begun.elapsed() < LIMIT, "{series} is {}, not {value}", self.metric(series));
        }
    }

    fn stop(self) -> Result<(), ServeError> {
        self.runtime.block_on(self.server.stop())
    }
}

fn config(settings: Settings, volumes: &[&str]) -> Config {
    let settings = Settings {
        listen: vec!["127.0.0.1:0".into()],
        metrics: settings.metrics.or(Some("127.0.0.1:0".into())),
        reactors: settings.reactors.or(Some(2)),
        pin: Some(false),
        arena: Some(crate::config::Size(8 << 20)),
        allow_fault_injection: Some(true),
        // Most tests see sessions end.
        lease_ms: settings.lease_ms.or(Some(0)),
        ..settings
    };
    let volumes: Vec<String> = volumes.iter().map(|&v| v.to_owned()).collect();
    Config::resolve(ConfigFile::default(), settings, &volumes).unwrap()
}

/// The initiator's end of a connection, by hand.
struct Peer {
    stream: TcpStream,
}

/// A decoded answer, without borrows.
#[derive(Debug)]
struct Refused {
    status: Status,
    text: String,
}

impl Peer {
    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn hello(&mut self, version_min: u16, version_max: u16, name: &str) {
        let payload = Payload { length: name.len() as u32, crc: crc32c(name.as_bytes()) };
        let hello = Hello { version_min, version_max, features: !0, name: payload };
        self.send(&[&hello.encode()[..], name.as_bytes()].concat());
    }

    fn frame(&mut self, frame: &Handshake<'_>) {
        let mut bytes = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
        let n = frame.encode(&mut bytes).unwrap();
        self.send(&bytes[..n]);
    }

    fn header(&mut self) -> Frame {
        let mut header = [0; HEADER_LEN];
        self.stream.read_exact(&mut header).unwrap();
        Frame::decode(&header).unwrap()
    }

    fn answer(&mut self) -> (u8, Payload, Vec<u8>) {
        let (kind, payload) = loop {
            match self.header() {
                Frame::Handshake { kind, payload } => break (kind, payload),
                // A standby is told of the path that another one takes over from.
                Frame::Control(control) if control.kind == ControlKind::PathLost => {}
                other => panic!("no handshake frame: {other:?}"),
            }
        };
        let mut bytes = vec![0; payload.length as usize];
        self.stream.read_exact(&mut bytes).unwrap();
        (kind, payload, bytes)
    }

    fn refused(&mut self) -> Refused {
        let (kind, payload, bytes) = self.answer();
        let Ok(Handshake::Refused(refused)) = Handshake::decode(kind, payload, &bytes) else {
            panic!("no REFUSED but {kind:#x}")
        };
        assert_eq!((refused.version_min, refused.version_max), (1, 1));
        let refused = Refused { status: refused.status, text: refused.text.to_owned() };
        self.hung_up();
        refused
    }

    /// The target has closed the connection, and nothing more came before it did.
    fn hung_up(&mut self) {
        let mut rest = [0; 1];
        match self.stream.read(&mut rest) {
            Ok(0) => {}
            // Closed with bytes of ours unread.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("still there: {other:?}"),
        }
    }

    fn attach(&mut self, attach: &Attach<'_>) -> Result<u64, Refused> {
        self.frame(&Handshake::Attach(*attach));
        let (kind, payload, bytes) = self.answer();
        match Handshake::decode(kind, payload, &bytes).unwrap() {
            Handshake::Attached(attached) => {
                assert_eq!(attached.size, 1 << 20);
                Ok(attached.generation)
            }
            Handshake::Refused(r) => Err(Refused { status: r.status, text: r.text.to_owned() }),
            other => panic!("{other:?}"),
        }
    }

    fn activate(&mut self, n: u8, queue: u16) -> Result<(), Refused> {
        self.activate_as(activation(n, n, queue))
    }

    fn activate_as(&mut self, activate: Activate<'_>) -> Result<(), Refused> {
        self.frame(&Handshake::Activate(activate));
        let (kind, payload, bytes) = self.answer();
        match Handshake::decode(kind, payload, &bytes).unwrap() {
            Handshake::Activated(Activated { epoch, instance, depth, .. }) => {
                assert_eq!(epoch, activate.epoch);
                assert!(instance != Instance(0) && depth > 0);
                Ok(())
            }
            Handshake::Refused(r) => Err(Refused { status: r.status, text: r.text.to_owned() }),
            other => panic!("{other:?}"),
        }
    }
}

fn id(n: u8) -> SessionId {
    SessionId([n; 16])
}

fn secret(n: u8) -> Secret {
    Secret([n; 16])
}

/// Asks for a new slot table for a queue of session `n`, showing the secret of session `s`.
fn activation(n: u8, s: u8, queue: u16) -> Activate<'static> {
    let mut activate = Activate::new(id(n), secret(s), QueueId(queue), Rail::TCP, Epoch(1));
    activate.depth = 128;
    activate
}

/// One for queue 0 of session 1 that isn't quite like that.
fn changed(change: impl FnOnce(&mut Activate<'static>)) -> Activate<'static> {
    let mut activate = activation(1, 1, 0);
    change(&mut activate);
    activate
}

fn attach(n: u8) -> Attach<'static> {
    Attach {
        session: id(n),
        secret: secret(n),
        next_secret: Secret([0; 16]),
        mode: X,
        flags: AttachFlags::default(),
        queues: 2,
        expected_volume: VolumeId::NIL,
        generation: 0,
        volume: "disk0",
    }
}

#[test]
fn a_session_attaches_activates_its_queues_and_ends_with_its_last_path() {
    let target = Target::plain();
    let mut first = target.greet();
    assert_eq!(first.attach(&attach(1)).unwrap(), 1);
    first.activate(1, 0).unwrap();
    let mut second = target.greet();
    second.activate(1, 1).unwrap();
    target.await_metric("twinrail_target_paths{rail=\"tcp\"}", 2.0);
    assert_eq!(target.metric("twinrail_target_sessions{mode=\"exclusive\"}"), 1.0);
    assert_eq!(target.metric("twinrail_target_handshakes_total{result=\"activated\"}"), 2.0);
    drop(first);
    target.await_metric("twinrail_target_paths{rail=\"tcp\"}", 1.0);
    let refused = target.greet().attach(&attach(2)).unwrap_err();
    assert_eq!(refused.status, Status::VOLUME_HELD);
    assert!(refused.text.contains("held by \"host-1\" (exclusive)"), "{}", refused.text);
    drop(second);
    target.await_metric("twinrail_target_sessions{mode=\"exclusive\"}", 0.0);
    assert_eq!(target.greet().attach(&attach(2)).unwrap(), 2);
    target.stop().unwrap();
}

#[test]
fn a_session_outlives_its_last_path_and_its_queue_keeps_its_slot_table() {
    let settings = Settings { lease_ms: Some(3_600_000), ..Settings::default() };
    let target = Target::start(settings, &["disk0=memory,size=1M"]);
    let activated = |peer: &mut Peer, activate: Activate<'_>| {
        peer.frame(&Handshake::Activate(activate));
        let (kind, payload, bytes) = peer.answer();
        match Handshake::decode(kind, payload, &bytes).unwrap() {
            Handshake::Activated(activated) => Ok(activated.instance),
            Handshake::Refused(refused) => Err(refused.status),
            other => panic!("{other:?}"),
        }
    };
    let mut first = target.greet();
    first.attach(&attach(1)).unwrap();
    let instance = activated(&mut first, activation(1, 1, 0)).unwrap();
    drop(first);
    target.await_metric("twinrail_target_paths{rail=\"tcp\"}", 0.0);
    assert_eq!(target.greet().attach(&attach(2)).unwrap_err().status, Status::VOLUME_HELD);
    let next = |epoch, instance| changed(|a| (a.epoch, a.instance) = (Epoch(epoch), instance));
    assert_eq!(activated(&mut target.greet(), next(1, instance)), Err(Status::STALE_EPOCH));
    assert_eq!(activated(&mut target.greet(), next(2, Instance(!instance.0))), Err(Status::SESSION_LOST));
    assert_eq!(activated(&mut target.greet(), next(2, instance)), Ok(instance));
    target.stop().unwrap();
}

#[test]
fn in_capsule_buffers_are_whole_pages_whatever_is_asked_for() {
    let target = Target::plain();
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    let activate = changed(|a| a.in_capsule = 5000);
    peer.frame(&Handshake::Activate(activate));
    let (kind, payload, bytes) = peer.answer();
    let Ok(Handshake::Activated(activated)) = Handshake::decode(kind, payload, &bytes) else { panic!("refused") };
    assert_eq!(activated.in_capsule, 4096);
}

#[test]
fn a_close_is_answered_and_the_volume_is_free_then() {
    let target = Target::plain();
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    peer.activate(1, 0).unwrap();
    peer.send(&Frame::Control(Control::new(ControlKind::Close, Epoch(1), 77)).encode());
    let Frame::Control(closed) = peer.header() else { panic!("no control frame") };
    assert_eq!((closed.kind, closed.token), (ControlKind::Closed, 77));
    peer.hung_up();
    target.greet().attach(&attach(2)).unwrap();
    target.stop().unwrap();
}

#[test]
fn a_preempt_disconnects_the_writer_before_it_is_answered() {
    let target = Target::plain();
    let mut old = target.greet();
    old.attach(&attach(1)).unwrap();
    old.activate(1, 0).unwrap();
    let mut new = target.greet();
    assert_eq!(new.attach(&Attach { flags: AttachFlags::PREEMPT, ..attach(2) }).unwrap(), 2);
    let Frame::Control(end) = old.header() else { panic!("no control frame") };
    assert_eq!((end.kind, end.status), (ControlKind::Disconnect, Status::PREEMPTED));
    new.activate(2, 0).unwrap();
    let refused = target.greet().activate(1, 1).unwrap_err();
    assert_eq!(refused.status, Status::SESSION_LOST);
    target.stop().unwrap();
}

#[test]
fn a_repeated_attach_on_another_connection_is_answered_again() {
    let target = Target::plain();
    target.greet().attach(&attach(1)).unwrap();
    let mut again = target.greet();
    assert_eq!(again.attach(&attach(1)).unwrap(), 1);
    again.activate(1, 0).unwrap();
    let other = Attach { secret: secret(9), ..attach(1) };
    assert_eq!(target.greet().attach(&other).unwrap_err().status, Status::BAD_SECRET);
    target.stop().unwrap();
}

#[test]
fn a_session_that_is_never_activated_gives_its_volume_back() {
    let settings = Settings { handshake_timeout_ms: Some(50), ..Settings::default() };
    let target = Target::start(settings, &["disk0=memory,size=1M"]);
    target.greet().attach(&attach(1)).unwrap();
    target.await_metric("twinrail_target_sessions{mode=\"exclusive\"}", 0.0);
    target.stop().unwrap();
}

#[test]
fn each_bad_handshake_is_refused_by_name() {
    let target =
        Target::start(Settings { allow: vec!["host-1".into()], ..Settings::default() }, &["disk0=memory,size=1M"]);

    let mut peer = target.dial();
    peer.hello(2, 3, "host-1");
    let refused = peer.refused();
    assert_eq!(refused.status, Status::UNSUPPORTED_VERSION);
    assert!(refused.text.contains("versions 1 to 1") && refused.text.contains("2 to 3"), "{}", refused.text);

    let mut peer = target.dial();
    peer.hello(1, 1, "host-2");
    let refused = peer.refused();
    assert_eq!(refused.status, Status::NOT_ALLOWED);
    assert!(refused.text.contains("\"host-2\"") && refused.text.contains("`allow`"), "{}", refused.text);

    for (name, bad) in [("control characters", "a\nb"), ("checksum", "host-1")] {
        let mut peer = target.dial();
        let crc = if name == "checksum" { 1 } else { crc32c(bad.as_bytes()) };
        let payload = Payload { length: bad.len() as u32, crc };
        let hello = Hello { version_min: 1, version_max: 1, features: 0, name: payload };
        peer.send(&[&hello.encode()[..], bad.as_bytes()].concat());
        let expected = if name == "checksum" { Status::HEADER_CRC } else { Status::MALFORMED };
        assert_eq!(peer.refused().status, expected, "{name}");
    }

    let mut peer = target.greet();
    assert_eq!(
        peer.attach(&Attach { volume: "disk9", ..attach(1) }).unwrap_err().text,
        "there is no volume \"disk9\"; did you mean \"disk0\"?"
    );

    let mut peer = target.greet();
    peer.send(&Frame::Control(Control::new(ControlKind::Probe, Epoch(1), 1)).encode());
    assert_eq!(peer.refused().status, Status::UNEXPECTED_FRAME);

    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    let refused = peer.attach(&attach(2)).unwrap_err();
    assert_eq!(refused.status, Status::UNEXPECTED_FRAME, "a second ATTACH on one connection");

    let wrong = activation(1, 2, 0);
    assert_eq!(target.greet().activate_as(wrong).unwrap_err().status, Status::BAD_SECRET);
    let rdma = changed(|a| a.rail = Rail::RDMA);
    assert_eq!(target.greet().activate_as(rdma).unwrap_err().status, Status::BAD_PARAMETER);
    let stale = changed(|a| a.instance = Instance(5));
    let refused = target.greet().activate_as(stale).unwrap_err();
    assert_eq!(refused.status, Status::SESSION_LOST, "a slot table that the reactor doesn't have");
    assert!(refused.text.contains("attach again"), "{}", refused.text);

    target.await_metric("twinrail_target_handshakes_in_progress", 0.0);
    for reason in ["unsupported_version", "not_allowed", "unknown_volume", "bad_secret", "session_lost"] {
        assert_eq!(target.metric(&format!("twinrail_target_refusals_total{{reason=\"{reason}\"}}")), 1.0, "{reason}");
    }
    target.stop().unwrap();
}

#[test]
fn an_activation_that_asks_for_what_the_specification_excludes_is_refused() {
    let target = Target::plain();
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    let report = Frame::Command(Command::default()).encode();
    let cases = [
        (changed(|a| a.depth = 0), "at least one slot"),
        (changed(|a| a.in_capsule = 4095), "ask for 4096 or more"),
        (changed(|a| a.in_capsule = 0), "ask for 4096 or more"),
        (changed(|a| a.epoch = Epoch(0)), "epochs count from 1"),
        (activation(1, 1, 0).with_report(&report), "nothing can be in flight"),
    ];
    for (activate, text) in cases {
        let refused = target.greet().activate_as(activate).unwrap_err();
        assert_eq!(refused.status, Status::BAD_PARAMETER, "{text}");
        assert!(refused.text.contains(text), "{}", refused.text);
    }
    // None of them has spent anything.
    peer.activate(1, 0).unwrap();
    target.stop().unwrap();
}

#[test]
fn an_activation_that_the_arena_has_no_room_for_does_not_spend_its_epoch() {
    let target = Target::start(Settings { reactors: Some(1), ..Settings::default() }, &["disk0=memory,size=1M"]);
    let reader = |n| Attach { mode: AttachMode::READ_ONLY, queues: 1, ..attach(n) };
    let mut served = Vec::new();
    let refused = (1..).find_map(|n| {
        let mut peer = target.greet();
        peer.attach(&reader(n)).unwrap();
        match peer.activate(n, 0) {
            Ok(()) => served.push(peer),
            Err(refused) => return Some((n, refused)),
        }
        None
    });
    let (n, refused) = refused.unwrap();
    assert_eq!(refused.status, Status::LIMIT_REACHED);
    assert!(refused.text.contains("raise `arena`"), "{}", refused.text);
    let mut last = served.pop().unwrap();
    last.send(&Frame::Control(Control::new(ControlKind::Close, Epoch(1), 1)).encode());
    let Frame::Control(closed) = last.header() else { panic!("no control frame") };
    assert_eq!(closed.kind, ControlKind::Closed);
    target.await_metric("twinrail_target_paths{rail=\"tcp\"}", served.len() as f64);
    // The memory comes back a moment after its path has gone.
    let begun = Instant::now();
    while let Err(refused) = target.greet().activate(n, 0) {
        assert_eq!(refused.status, Status::LIMIT_REACHED, "{}", refused.text);
        assert!(begun.elapsed() < LIMIT, "{}", refused.text);
    }
    target.stop().unwrap();
}

#[test]
fn control_frames_of_an_older_epoch_are_dropped_and_counted() {
    let target = Target::plain();
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    peer.activate(1, 0).unwrap();
    let probe = |epoch, token| Control::new(ControlKind::Probe, Epoch(epoch), token);
    for control in [
        probe(0, 1),
        Control::new(ControlKind::Disconnect, Epoch(0), 0),
        // An answer to nothing, which would end the connection.
        Control::new(ControlKind::ProbeReply, Epoch(0), 9),
        probe(1, 2),
    ] {
        peer.send(&Frame::Control(control).encode());
    }
    let Frame::Control(answer) = peer.header() else { panic!("no control frame") };
    assert_eq!((answer.kind, answer.token), (ControlKind::ProbeReply, 2), "the first probe is of an older path");
    target.await_metric("twinrail_target_stale_frames_total{rail=\"tcp\"}", 3.0);
    // One that doesn't exist yet breaks the rules.
    peer.send(&Frame::Control(probe(2, 3)).encode());
    let Frame::Control(end) = peer.header() else { panic!("no control frame") };
    assert_eq!((end.kind, end.status), (ControlKind::Disconnect, Status::UNEXPECTED_FRAME));
    target.stop().unwrap();
}

#[test]
fn the_reason_of_an_end_is_not_lost_to_what_was_sent_behind_the_offence() {
    let target = Target::plain();
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    peer.activate(1, 0).unwrap();
    // No frame, then more than the target reads before it sees that.
    peer.send(&vec![1; 1 << 20]);
    let Frame::Control(end) = peer.header() else { panic!("no control frame") };
    assert_eq!((end.kind, end.status), (ControlKind::Disconnect, Status::HEADER_CRC));
    let mut text = vec![0; end.payload.length as usize];
    peer.stream.read_exact(&mut text).unwrap();
    assert_eq!(text, b"a header doesn't match its CRC32C");
    assert_eq!(peer.stream.read(&mut [0]).unwrap(), 0, "it ends in order, without a reset");
    // Nor does the target wait for an initiator that never hangs up.
    let begun = Instant::now();
    while peer.stream.write_all(&[1; 512]).is_ok() {
        assert!(begun.elapsed() < LIMIT);
    }
    target.stop().unwrap();
}

#[test]
fn half_open_requests_do_not_keep_metrics_from_others() {
    let target = Target::plain();
    let dial = || {
        let mut stream = TcpStream::connect(target.server.metrics_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: ").unwrap();
        stream
    };
    let begun = Instant::now();
    let mut half_open: Vec<TcpStream> = (0..200).map(|_| dial()).collect();
    assert_eq!(target.get("/healthz"), (200, "ok\n".into()));
    assert!(target.get("/metrics").1.contains("twinrail_target_ready 1"));
    assert!(begun.elapsed() < metrics_http::PATIENCE, "they were waited for");
    // And those that have a place lose it by the clock.
    for stream in &mut half_open {
        assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
    }
    assert!(begun.elapsed() < 3 * metrics_http::PATIENCE);
    target.stop().unwrap();
}

#[test]
fn a_client_of_another_protocol_is_hung_up_on_and_counted() {
    let target = Target::plain();
    let foreign: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n", &[0; 128]];
    for first in foreign {
        let mut peer = target.dial();
        peer.send(first);
        peer.hung_up();
    }
    target.await_metric("twinrail_target_refusals_total{reason=\"bad_magic\"}", 4.0);
    target.stop().unwrap();
}

#[test]
fn a_silent_connection_is_closed_and_told_why_if_it_had_said_hello() {
    let settings = Settings { handshake_timeout_ms: Some(50), ..Settings::default() };
    let target = Target::start(settings, &["disk0=memory,size=1M"]);
    let mut silent = target.dial();
    silent.hung_up();
    let mut greeted = target.greet();
    assert_eq!(greeted.refused().status, Status::TIMEOUT);
    target.await_metric("twinrail_target_handshakes_total{result=\"timeout\"}", 2.0);
    target.stop().unwrap();
}

#[test]
fn idle_connections_are_crowded_out_by_real_ones() {
    let settings = Settings { max_handshakes: Some(4), handshake_timeout_ms: Some(600_000), ..Settings::default() };
    let target = Target::start(settings, &["disk0=memory,size=1M"]);
    let mut idle: Vec<Peer> = (0..100).map(|_| target.dial()).collect();
    let mut real = target.greet();
    real.attach(&attach(1)).unwrap();
    idle.extend((0..100).map(|_| target.dial()));
    real.activate(1, 0).unwrap();
    for peer in &mut idle[..190] {
        peer.hung_up();
    }
    // The last newcomer found the real one's place taken, or just freed.
    target.await_metric("twinrail_target_handshakes_total{result=\"activated\"}", 1.0);
    assert!(target.metric("twinrail_target_handshakes_in_progress") <= 4.0);
    assert!(target.metric("twinrail_target_handshakes_total{result=\"crowded_out\"}") >= 190.0);
    target.stop().unwrap();
}

#[test]
fn connections_that_serve_queues_are_limited() {
    let settings = Settings { max_connections: Some(1), ..Settings::default() };
    let target = Target::start(settings, &["disk0=memory,size=1M"]);
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    peer.activate(1, 0).unwrap();
    let refused = target.greet().activate(1, 1).unwrap_err();
    assert_eq!(refused.status, Status::LIMIT_REACHED);
    assert!(refused.text.contains("raise max_connections"), "{}", refused.text);
    target.stop().unwrap();
}

/// STANDBY for queue 0 of session `n`.
fn stand_by(target: &Target, n: u8) -> Result<(Peer, Standing), Status> {
    let mut peer = target.greet();
    let standby = Standby { session: id(n), secret: secret(n), queue: QueueId(0), rail: Rail::TCP };
    peer.frame(&Handshake::Standby(standby));
    let (kind, payload, bytes) = peer.answer();
    match Handshake::decode(kind, payload, &bytes).unwrap() {
        Handshake::Standing(standing) => Ok((peer, standing)),
        Handshake::Refused(refused) => Err(refused.status),
        other => panic!("{other:?}"),
    }
}

#[test]
fn i8_one_session_s_standbys_took_all_connections() {
    let settings = Settings { max_connections: Some(3), lease_ms: Some(3_600_000), ..Settings::default() };
    let target = Target::start(settings, &["disk0=memory,size=1M"]);
    let reader = |n| Attach { mode: AttachMode::READ_ONLY, queues: 1, ..attach(n) };
    let ousted = |mut peer: Peer| {
        let Frame::Control(end) = peer.header() else { panic!("no control frame") };
        assert_eq!((end.kind, end.status), (ControlKind::Disconnect, Status::SUPERSEDED));
    };
    let mut greedy = target.greet();
    greedy.attach(&reader(1)).unwrap();
    greedy.activate(1, 0).unwrap();
    let mut standing = std::collections::VecDeque::new();
    for _ in 0..50 {
        standing.push_back(stand_by(&target, 1).unwrap().0);
        if standing.len() > 2 {
            ousted(standing.pop_front().unwrap());
        }
    }
    // Another session takes the room of one of them.
    let mut other = target.greet();
    other.attach(&reader(2)).unwrap();
    other.activate(2, 0).unwrap();
    ousted(standing.pop_front().unwrap());
    assert_eq!(stand_by(&target, 2).map(drop), Err(Status::LIMIT_REACHED), "no standby makes room for another one");
    // It loses its path, whose room is taken at once, and comes back.
    drop(other);
    target.await_metric("twinrail_target_paths{rail=\"tcp\"}", 1.0);
    let begun = Instant::now();
    let last = loop {
        match stand_by(&target, 1) {
            Ok((peer, _)) => break peer,
            Err(status) => assert_eq!(status, Status::LIMIT_REACHED),
        }
        assert!(begun.elapsed() < LIMIT);
    };
    // No command ever came to its table: it may ask for a new one.
    let mut again = activation(2, 2, 0);
    again.epoch = Epoch(2);
    target.greet().activate_as(again).unwrap();
    ousted(standing.pop_front().unwrap());
    drop(last);
    target.stop().unwrap();
}

#[test]
fn two_standbys_that_activate_at_once_are_both_answered() {
    let target =
        Target::start(Settings { lease_ms: Some(3_600_000), ..Settings::default() }, &["disk0=memory,size=1M"]);
    let mut first = target.greet();
    first.attach(&attach(1)).unwrap();
    first.activate(1, 0).unwrap();
    for epoch in 1..=20_u64 {
        let (mut one, standing) = stand_by(&target, 1).unwrap();
        let (mut other, _) = stand_by(&target, 1).unwrap();
        let next = |by| changed(|a| (a.epoch, a.instance) = (Epoch(2 * epoch + by), standing.instance));
        one.frame(&Handshake::Activate(next(0)));
        other.frame(&Handshake::Activate(next(1)));
        // Had one of them come too late, it was hung up on as often as not.
        let answers = [&mut one, &mut other].map(|peer| match peer.answer() {
            (0x46, ..) => None,
            (kind, payload, bytes) => match Handshake::decode(kind, payload, &bytes).unwrap() {
                Handshake::Refused(refused) => Some(refused.status),
                other => panic!("{other:?}"),
            },
        });
        assert!(answers.contains(&None), "{answers:?}");
        let reasons = [Status::STALE_EPOCH, Status::SUPERSEDED];
        assert!(answers.iter().flatten().all(|status| reasons.contains(status)), "{answers:?}");
        // A stale one is told so.
        let (mut late, _) = stand_by(&target, 1).unwrap();
        assert_eq!(late.activate_as(next(0)).unwrap_err().status, Status::STALE_EPOCH);
    }
    target.stop().unwrap();
}

#[test]
fn a_report_that_breaks_a_rule_is_refused_by_its_name() {
    let target =
        Target::start(Settings { lease_ms: Some(3_600_000), ..Settings::default() }, &["disk0=memory,size=1M"]);
    let mut first = target.greet();
    first.attach(&attach(1)).unwrap();
    first.activate(1, 0).unwrap();
    let (_standby, standing) = stand_by(&target, 1).unwrap();
    let command = |slot: u16, epoch| Command { slot: Slot(slot), sequence: Sequence(1), epoch, ..Command::default() };
    let cases = [
        ([command(1, Epoch(1)), command(2, Epoch(1))], "another epoch"),
        ([command(2, Epoch(9)), command(1, Epoch(9))], "order of their slots"),
        ([command(1, Epoch(10)), command(200, Epoch(10))], "doesn't have"),
    ];
    for (commands, rule) in cases {
        let report = commands.map(|command| Frame::Command(command).encode()).concat();
        let epoch = commands[1].epoch.max(Epoch(9));
        let activate = changed(|a| (a.epoch, a.instance) = (epoch, standing.instance)).with_report(&report);
        let refused = target.greet().activate_as(activate).unwrap_err();
        assert_eq!(refused.status, Status::MALFORMED, "{rule}");
        assert!(refused.text.contains(rule), "{}", refused.text);
    }
    target.stop().unwrap();
}

#[test]
fn a_rail_that_nobody_knows_is_told_by_its_number() {
    let target = Target::plain();
    target.greet().attach(&attach(1)).unwrap();
    let refused = target.greet().activate_as(changed(|a| a.rail = Rail(9))).unwrap_err();
    assert_eq!(refused.status, Status::BAD_PARAMETER);
    assert!(refused.text.contains("rail 9"), "{}", refused.text);
    target.stop().unwrap();
}

#[test]
fn prometheus_and_the_readiness_probe_are_answered() {
    let target = Target::start(Settings::default(), &["disk0=memory,size=1M", "disk1=null,size=2M"]);
    assert_eq!(target.get("/healthz"), (200, "ok\n".into()));
    assert_eq!(target.get("/readyz"), (200, "ready\n".into()));
    assert_eq!(target.get("/nothing").0, 404);
    assert_eq!(target.metric("twinrail_target_volume_size_bytes{volume=\"disk1\"}"), 2_097_152.0);
    assert_eq!(target.metric("twinrail_target_ready"), 1.0);
    target.server.observed.set_readiness(Readiness::Draining);
    assert_eq!(target.get("/readyz"), (503, "draining\n".into()));
    target.server.observed.set_readiness(Readiness::Starting);
    assert_eq!(target.get("/readyz"), (503, "starting\n".into()));
    target.stop().unwrap();
}

#[test]
fn a_stop_tells_the_initiators_and_a_failed_final_sync_is_an_error() {
    let target = Target::start(Settings::default(), &["disk0=memory,size=1M,inject=sync-error@.."]);
    let mut peer = target.greet();
    peer.attach(&attach(1)).unwrap();
    peer.activate(1, 0).unwrap();
    let error = target.stop().unwrap_err();
    assert!(error.to_string().contains("final sync failed for \"disk0\" (memory)"), "{error}");
    let Frame::Control(end) = peer.header() else { panic!("no control frame") };
    assert_eq!(end.kind, ControlKind::Disconnect);
    assert_eq!(end.status, Status::SHUTDOWN);
}

#[test]
fn an_address_in_use_is_named_with_its_option() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let runtime = Runtime::new().unwrap();
    let mut config = config(Settings::default(), &["disk0=memory,size=1M"]);
    config.listen = vec![address];
    let error = runtime.block_on(Server::start(config.clone(), Arc::default())).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{address} is in use")) && error.ends_with("with --listen"), "{error}");
    config.metrics = Some(address);
    let error = runtime.block_on(Server::start(config, Arc::default())).unwrap_err().to_string();
    assert!(error.ends_with("with --metrics"), "{error}");
}

#[test]
fn a_volume_that_cannot_be_opened_keeps_the_target_from_starting() {
    let runtime = Runtime::new().unwrap();
    let config = config(Settings::default(), &["disk0=memory,size=1M", "disk1=/no/such/file"]);
    let error = runtime.block_on(Server::start(config, Arc::default())).unwrap_err();
    assert!(error.to_string().contains("/no/such/file"), "{error}");
}

#[test]
fn the_boot_id_is_read_as_the_kernel_writes_it() {
    let id = parse_boot_id("3e8f1c2a-0b4d-4e6f-8a90-123456789abc\n").unwrap();
    assert_eq!(id.to_string(), "3e8f1c2a-0b4d-4e6f-8a90-123456789abc");
    for bad in ["", "3e8f1c2a", "3e8f1c2a-0b4d-4e6f-8a90-123456789abcd", "zz8f1c2a-0b4d-4e6f-8a90-123456789abc"] {
        assert_eq!(parse_boot_id(bad), None, "{bad}");
    }
}
