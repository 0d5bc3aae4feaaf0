//! A small target in this process, honest or not: a thread for each connection, the protocol crate's own end of
//! a queue, and a `Vec` as the disk. What it does wrong is set through [`Mischief`].
#![allow(dead_code, reason = "each test binary uses another part")]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use twinrail_fallback_tcp::{Arrival, Filled, Flushed, Inbound, Options, Outbound, Socket};
use twinrail_protocol::ids::{BootId, Epoch, GrantNumber, Instance};
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::target::{Intake, Outcome, Queue, QueueOptions, Start, Step};
use twinrail_protocol::wire::{
    Activate, Activated, Attached, Command, Control, ControlKind, Credits, EventCode, Extent, ExtentFlags, Features,
    Frame, Handshake, Hello, Payload, Refused, Reply, VolumeFlags, Welcome,
};
use twinrail_protocol::{Geometry, Request, Sequence, Slot, Status, VolumeId, crc32c};

/// How the target is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) geometry: Geometry,
    pub(crate) depth: u16,
    pub(crate) granted_slots: u16,
    pub(crate) data_window: u32,
    pub(crate) queues: u16,
    /// Look for commands without ever sleeping.
    pub(crate) spin: bool,
    /// Answer READs without touching a disk, and throw WRITEs away.
    pub(crate) null: bool,
    pub(crate) flags: VolumeFlags,
}

impl Default for Setup {
    fn default() -> Self {
        let geometry = Geometry { size: 8 << 20, logical_block: 512, physical_block: 4096, max_transfer: 256 << 10 };
        let (depth, granted_slots, data_window, queues) = (32, 32, 512 << 10, 4);
        let flags = VolumeFlags::default();
        Self { geometry, depth, granted_slots, data_window, queues, spin: false, null: false, flags }
    }
}

/// What it does wrong, or late. Counters say how often.
#[derive(Debug, Default)]
pub(crate) struct Mischief {
    /// Read payloads to damage.
    pub(crate) damage_reads: AtomicU32,
    /// Write payloads to find damaged.
    pub(crate) damage_writes: AtomicU32,
    /// Commands are executed, but not answered.
    pub(crate) hold: AtomicBool,
    /// Commands are not even looked at: the connection isn't read.
    pub(crate) deaf: AtomicBool,
    /// Refuse at the handshake frame with this kind (0: HELLO).
    pub(crate) refuse: Mutex<Option<(u8, Status, &'static str)>>,
    /// Answer the handshake frame with this kind by these bytes.
    pub(crate) handshake_answer: Mutex<Option<(u8, Vec<u8>)>>,
    /// BLOCK STATUS tells of zeros, whatever there is.
    pub(crate) zeros_everywhere: AtomicBool,
    /// Status for the next FLUSH.
    pub(crate) flush_status: Mutex<Option<Status>>,
    /// The grant of slots to change to; 0 for none.
    pub(crate) change_grant: AtomicU32,
    /// Hang up once `instead` was sent.
    pub(crate) hang_up: AtomicBool,
    /// Bytes to send instead of the reply to the next command, made from it.
    pub(crate) instead: Mutex<Option<Instead>>,
}

/// Bytes made from a command.
pub(crate) type Instead = fn(&Command) -> Vec<u8>;

/// What it has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) commands: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) fua: AtomicU64,
    pub(crate) fetched: AtomicU64,
    pub(crate) paths: AtomicU64,
    /// Paths whose connection is closed.
    pub(crate) ended: AtomicU64,
    pub(crate) closes: AtomicU64,
    /// Control frames of the initiator.
    pub(crate) controls: Mutex<Vec<Control>>,
    /// Commands whose replies are held.
    pub(crate) held: AtomicU64,
    /// Status of the last DISCONNECT.
    pub(crate) disconnects: Mutex<Vec<Status>>,
}

pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    pub(crate) shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

pub(crate) struct Shared {
    pub(crate) setup: Setup,
    pub(crate) disk: Mutex<Vec<u8>>,
    pub(crate) mischief: Mischief,
    pub(crate) seen: Seen,
    /// Something in `seen` changed.
    changed: Condvar,
    change: Mutex<u64>,
    stop: AtomicBool,
    /// Frames to send on the path with this number as they are.
    inject: Mutex<VecDeque<(usize, Vec<u8>)>>,
    /// Cut the paths.
    cut: AtomicBool,
    paths: Mutex<Vec<Path>>,
    mark: fn(),
}

struct Path {
    wake: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

const VOLUME: VolumeId = VolumeId([0xda; 16]);

impl Fake {
    pub(crate) fn start(setup: Setup) -> Self {
        Self::start_marked(setup, || {})
    }

    /// `mark` is called first by every thread of the fake.
    pub(crate) fn start_marked(setup: Setup, mark: fn()) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let disk = (0..setup.geometry.size).map(|i| (i / 512 + i * 7) as u8).collect();
        let shared = Arc::new(Shared {
            setup,
            disk: Mutex::new(disk),
            mischief: Mischief::default(),
            seen: Seen::default(),
            changed: Condvar::new(),
            change: Mutex::new(0),
            stop: AtomicBool::new(false),
            inject: Mutex::default(),
            cut: AtomicBool::new(false),
            paths: Mutex::default(),
            mark,
        });
        let there = Arc::clone(&shared);
        let acceptor = thread::spawn(move || {
            (there.mark)();
            for stream in listener.incoming() {
                if there.stop.load(Ordering::SeqCst) {
                    break;
                }
                let mut paths = there.paths.lock().unwrap();
                let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
                let (index, shared, stream) = (paths.len(), Arc::clone(&there), stream.unwrap());
                let woken = wake.try_clone().unwrap();
                let thread = thread::spawn(move || {
                    (shared.mark)();
                    serve(&shared, index, &woken, stream);
                });
                paths.push(Path { wake, thread: Some(thread) });
            }
        });
        Self { address, shared, acceptor: Some(acceptor) }
    }

    pub(crate) fn url(&self) -> String {
        format!("twinrail://{}/disk0", self.address)
    }

    pub(crate) fn mischief(&self) -> &Mischief {
        &self.shared.mischief
    }

    pub(crate) fn seen(&self) -> &Seen {
        &self.shared.seen
    }

    /// Sends a frame of its own on the path with number `path`.
    pub(crate) fn inject(&self, path: usize, bytes: impl Into<Vec<u8>>) {
        self.shared.inject.lock().unwrap().push_back((path, bytes.into()));
        self.wake();
    }

    /// Cuts every path.
    pub(crate) fn cut(&self) {
        self.shared.cut.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Answers what was held.
    pub(crate) fn release(&self) {
        self.shared.mischief.hold.store(false, Ordering::SeqCst);
        self.shared.mischief.deaf.store(false, Ordering::SeqCst);
        self.wake();
    }

    /// Changes the grant of slots of the first path.
    pub(crate) fn change_grant(&self, granted_slots: u16) {
        self.shared.mischief.change_grant.store(granted_slots.into(), Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        for path in &*self.shared.paths.lock().unwrap() {
            rustix::io::write(&path.wake, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Waits until something seen fulfils `condition`.
    pub(crate) fn until(&self, what: &str, condition: impl Fn(&Seen) -> bool) {
        let guard = self.shared.change.lock().unwrap();
        let limit = Duration::from_secs(20);
        let (_guard, late) =
            self.shared.changed.wait_timeout_while(guard, limit, |_| !condition(&self.shared.seen)).unwrap();
        assert!(!late.timed_out(), "{what} was never seen");
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.cut();
        let _wakes_the_acceptor = TcpStream::connect(self.address);
        self.acceptor.take().unwrap().join().unwrap();
        // Not under the lock: the threads are still at work.
        let paths = std::mem::take(&mut *self.shared.paths.lock().unwrap());
        for mut path in paths {
            if let Some(thread) = path.thread.take() {
                let joined = thread.join();
                assert!(joined.is_ok() || thread::panicking(), "the fake target panicked");
            }
        }
    }
}

impl Shared {
    fn note(&self) {
        *self.change.lock().unwrap() += 1;
        self.changed.notify_all();
    }
}

/// Counts down; whether it was not at 0.
fn take(counter: &AtomicU32) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
}

pub(crate) fn attached(setup: &Setup) -> Attached<'static> {
    let Geometry { size, logical_block, physical_block, max_transfer } = setup.geometry;
    let mut attached = Attached::new(VOLUME);
    (attached.size, attached.logical_block, attached.physical_block) = (size, logical_block, physical_block);
    (attached.max_transfer, attached.queues, attached.generation) = (max_transfer, setup.queues, 1);
    attached.flags = setup.flags;
    attached
}

pub(crate) fn encoded(frame: &Handshake<'_>) -> Vec<u8> {
    let mut out = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
    let length = frame.encode(&mut out).unwrap();
    out.truncate(length);
    out
}

/// The handshake; gives what the queue begins with.
fn handshake(shared: &Shared, stream: &mut TcpStream) -> Option<Queue> {
    let setup = &shared.setup;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut header = [0; HEADER_LEN];
    // Whether a frame of this kind is answered by mischief, which ends the handshake.
    let mischief = |stream: &mut TcpStream, kind: u8| {
        let refusal = *shared.mischief.refuse.lock().unwrap();
        if let Some((_, status, text)) = refusal.filter(|(at, ..)| *at == kind) {
            let refused = Refused { status, version_min: 1, version_max: 1, retry_after_ms: 1500, text };
            stream.write_all(&encoded(&Handshake::Refused(refused))).unwrap();
            return true;
        }
        let answer = shared.mischief.handshake_answer.lock().unwrap();
        match &*answer {
            Some((at, bytes)) if *at == kind => {
                let _may_be_gone = stream.write_all(bytes);
                // Nothing more: until the other side has seen enough.
                let _ = stream.read(&mut [0; 1]);
                true
            }
            _ => false,
        }
    };
    stream.read_exact(&mut header).ok()?;
    let hello = Hello::decode(&header).unwrap();
    let mut name = vec![0; hello.name.length as usize];
    stream.read_exact(&mut name).ok()?;
    assert_eq!(crc32c(&name), hello.name.crc);
    if mischief(stream, 0) {
        return None;
    }
    let (features, boot_id, target_name) = (Features(0), BootId([1; 16]), "fake");
    let welcome = Welcome { version: 1, features, boot_id, auth_method: 0, target_name };
    stream.write_all(&encoded(&Handshake::Welcome(welcome))).ok()?;
    loop {
        stream.read_exact(&mut header).ok()?;
        let Ok(Frame::Handshake { kind, payload }) = Frame::decode(&header) else { panic!("no handshake frame") };
        let mut bytes = vec![0; payload.length as usize];
        stream.read_exact(&mut bytes).ok()?;
        if mischief(stream, kind) {
            return None;
        }
        match Handshake::decode(kind, payload, &bytes).unwrap() {
            Handshake::Attach(attach) => {
                assert_eq!(attach.volume, "disk0");
                stream.write_all(&encoded(&Handshake::Attached(attached(setup)))).ok()?;
            }
            // It keeps nothing of a session whose connection is lost, and has one connection for each queue.
            Handshake::Activate(Activate { instance: Instance(1..), .. }) | Handshake::Standby(_) => {
                let (status, text) = match kind {
                    0x45 => (Status::SESSION_LOST, "there is no such session"),
                    _ => (Status::UNEXPECTED_FRAME, "no standby paths here"),
                };
                let refused = Refused { status, version_min: 1, version_max: 1, retry_after_ms: 0, text };
                stream.write_all(&encoded(&Handshake::Refused(refused))).ok()?;
                return None;
            }
            Handshake::Activate(activate) => {
                let (epoch, instance) = (activate.epoch, Instance(77));
                let mut activated = Activated::new(epoch, instance);
                let depth = setup.depth.min(activate.depth);
                let (granted_slots, data_window) = (setup.granted_slots.min(depth), setup.data_window);
                let credits = Credits { granted_slots, number: GrantNumber(1), data_window };
                let in_capsule = activate.in_capsule;
                (activated.depth, activated.credits, activated.in_capsule) = (depth, credits, in_capsule);
                stream.write_all(&encoded(&Handshake::Activated(activated))).ok()?;
                let (geometry, read_only) = (setup.geometry, false);
                return Some(Queue::new(
                    QueueOptions { depth, in_capsule, credits, geometry, read_only },
                    instance,
                    epoch,
                ));
            }
            other => panic!("{other:?}"),
        }
    }
}

struct Connection<'a> {
    shared: &'a Shared,
    queue: Queue,
    inbound: Inbound,
    outbound: Outbound<usize>,
    /// Payloads of commands by slot, then of replies.
    payloads: Vec<Vec<u8>>,
    replies: Vec<Vec<u8>>,
    spare: Vec<usize>,
    placing: Option<(Slot, Sequence)>,
    held: Vec<Command>,
    raw: VecDeque<Vec<u8>>,
}

fn serve(shared: &Shared, index: usize, woken: &OwnedFd, mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let Some(queue) = handshake(shared, &mut stream) else { return };
    let socket = Socket::from_stream(stream, &Options::default()).unwrap();
    let depth = usize::from(queue.options().depth);
    let inbound = Inbound::new(queue.options().in_capsule);
    let mut connection = Connection {
        shared,
        queue,
        inbound,
        outbound: Outbound::new(4 * depth + 8),
        payloads: vec![Vec::new(); depth],
        replies: Vec::new(),
        spare: Vec::new(),
        placing: None,
        held: Vec::new(),
        raw: VecDeque::new(),
    };
    shared.seen.paths.fetch_add(1, Ordering::SeqCst);
    shared.note();
    connection.run(index, woken, &socket);
    drop(socket);
    shared.seen.ended.fetch_add(1, Ordering::SeqCst);
    shared.note();
}

impl Connection<'_> {
    fn run(&mut self, index: usize, woken: &OwnedFd, socket: &Socket) {
        loop {
            if self.shared.cut.load(Ordering::Relaxed) {
                return;
            }
            if self.shared.stop.load(Ordering::Relaxed) {
                return;
            }
            let deaf = self.shared.mischief.deaf.load(Ordering::SeqCst);
            let progress = !deaf
                && match self.receive(socket) {
                    Some(progress) => progress,
                    None => return,
                };
            if !self.held.is_empty() && !self.shared.mischief.hold.load(Ordering::SeqCst) {
                for command in std::mem::take(&mut self.held) {
                    self.execute(&command);
                }
            }
            let grant = self.shared.mischief.change_grant.swap(0, Ordering::SeqCst);
            if grant != 0 {
                assert!(self.queue.grant().change(grant as u16));
                let mut event = Control::new(ControlKind::Event, self.queue.epoch(), 40);
                (event.code, event.credits) = (EventCode::CREDIT, self.queue.grant().said());
                self.outbound.push_control(Frame::Control(event).encode(), &[]).unwrap();
            }
            self.injected(index);
            let replies = &self.replies;
            let spare = &mut self.spare;
            let Ok(flushed) = self.outbound.flush(socket, usize::MAX, |&i| &replies[i][..], |i| spare.push(i)) else {
                return;
            };
            let blocked = flushed == Flushed::WouldBlock;
            if !blocked {
                while let Some(raw) = self.raw.pop_front() {
                    use twinrail_fallback_tcp::SendVectored;
                    // Short enough to go at once.
                    if socket.send_vectored(&[std::io::IoSlice::new(&raw)]).ok() != Some(raw.len()) {
                        return;
                    }
                    if self.shared.mischief.hang_up.load(Ordering::SeqCst) {
                        return;
                    }
                }
            }
            if progress || self.shared.setup.spin {
                continue;
            }
            let mut wanted = if deaf { PollFlags::empty() } else { PollFlags::IN };
            if blocked {
                wanted |= PollFlags::OUT;
            }
            poll(&mut [PollFd::new(socket, wanted), PollFd::new(woken, PollFlags::IN)], None).unwrap();
            let _none = rustix::io::read(woken, &mut [0; 8]);
        }
    }

    fn injected(&mut self, index: usize) {
        if self.shared.setup.spin {
            return;
        }
        let mut inject = self.shared.inject.lock().unwrap();
        while let Some(at) = inject.iter().position(|(path, _)| *path == index) {
            let (_, bytes) = inject.remove(at).unwrap();
            self.raw.push_back(bytes);
        }
    }

    /// Whether something came; nothing at the end.
    fn receive(&mut self, socket: &Socket) -> Option<bool> {
        let mut progress = false;
        let mut drained = false;
        loop {
            match self.inbound.next().unwrap() {
                Arrival::Pending if drained => return Some(progress),
                Arrival::Pending => {
                    let place = match self.placing {
                        Some((slot, _)) if self.inbound.wants_destination() => &mut self.payloads[slot.index()][..],
                        _ => &mut [],
                    };
                    match self.inbound.fill(socket, place) {
                        Ok(Filled::Bytes { drained: all, .. }) => (progress, drained) = (true, all),
                        Ok(Filled::WouldBlock) => return Some(progress),
                        Ok(Filled::Closed) | Err(_) => return None,
                        Ok(Filled::Full) => panic!("full"),
                    }
                }
                Arrival::Frame { frame, payload } => {
                    if let Frame::Command(Command { slot, .. }) = frame {
                        let place = &mut self.payloads[slot.index()];
                        place.clear();
                        place.extend_from_slice(payload);
                    }
                    self.frame(&frame, false)?;
                }
                Arrival::Large { frame } => self.frame(&frame, true)?,
                Arrival::PayloadComplete => {
                    let (slot, sequence) = self.placing.take().unwrap();
                    self.payload_arrived(slot, sequence);
                }
            }
        }
    }

    fn frame(&mut self, frame: &Frame, large: bool) -> Option<()> {
        let shared = self.shared;
        let (intake, slot, sequence) = match frame {
            Frame::Command(command) => {
                let intake = self.queue.receive(command).unwrap();
                shared.seen.commands.fetch_add(1, Ordering::SeqCst);
                (intake, command.slot, command.sequence)
            }
            Frame::Data(data) => (self.queue.receive_data(data).unwrap(), data.slot, data.sequence),
            Frame::Control(control) => return self.control(control),
            other => panic!("{other:?}"),
        };
        match intake {
            Intake::Ready => self.ready(slot, sequence),
            Intake::Receive if large => {
                let place = &mut self.payloads[slot.index()];
                place.resize(frame.following() as usize, 0);
                self.inbound.place(place);
                self.placing = Some((slot, sequence));
            }
            Intake::Receive => self.payload_arrived(slot, sequence),
            Intake::Fetch => {
                shared.seen.fetched.fetch_add(1, Ordering::SeqCst);
                let fetch = self.queue.fetch(slot, sequence).unwrap();
                self.outbound.push(Frame::Fetch(fetch).encode(), None).unwrap();
            }
            Intake::Reply(reply) => {
                if large {
                    self.inbound.skip();
                }
                self.outbound.push(Frame::Reply(reply).encode(), None).unwrap();
            }
            Intake::Running | Intake::Stale => panic!("{intake:?}"),
        }
        Some(())
    }

    fn control(&mut self, control: &Control) -> Option<()> {
        let shared = self.shared;
        shared.seen.controls.lock().unwrap().push(*control);
        let answer = |kind| Frame::Control(Control::new(kind, self.queue.epoch(), control.token)).encode();
        match control.kind {
            ControlKind::Probe => self.outbound.push_control(answer(ControlKind::ProbeReply), &[]).unwrap(),
            ControlKind::Close => {
                // Unless it gave up waiting for what is held.
                let held = shared.mischief.hold.load(Ordering::SeqCst);
                assert!(held || self.queue.busy() == 0, "closed with commands in flight");
                shared.seen.closes.fetch_add(1, Ordering::SeqCst);
                self.outbound.push_control(answer(ControlKind::Closed), &[]).unwrap();
            }
            ControlKind::EventSeen if control.code == EventCode::CREDIT => {
                self.queue.grant().seen(control.credits.number).unwrap();
            }
            ControlKind::Disconnect => {
                shared.seen.disconnects.lock().unwrap().push(control.status);
                shared.note();
                return None;
            }
            _ => {}
        }
        shared.note();
        Some(())
    }

    fn payload_arrived(&mut self, slot: Slot, sequence: Sequence) {
        if take(&self.shared.mischief.damage_writes) {
            self.payloads[slot.index()][3] ^= 0x10;
        }
        let crc = crc32c(&self.payloads[slot.index()]);
        match self.queue.payload_arrived(slot, sequence, crc) {
            Step::Ready => self.ready(slot, sequence),
            Step::Refuse(reply) => self.outbound.push(Frame::Reply(reply).encode(), None).unwrap(),
            Step::Stale => {}
        }
    }

    fn ready(&mut self, slot: Slot, sequence: Sequence) {
        let command = *self.queue.command(slot, sequence).unwrap();
        if let Some(make) = self.shared.mischief.instead.lock().unwrap().take() {
            self.raw.push_back(make(&command));
            return;
        }
        if self.shared.mischief.hold.load(Ordering::SeqCst) {
            self.held.push(command);
            self.shared.seen.held.fetch_add(1, Ordering::SeqCst);
            self.shared.note();
            return;
        }
        self.execute(&command);
    }

    fn execute(&mut self, command: &Command) {
        let (slot, sequence) = (command.slot, command.sequence);
        let Start::Go(request) = self.queue.start(slot, sequence) else { panic!("not ready") };
        let null = self.shared.setup.null;
        let index = self.spare.pop().unwrap_or_else(|| {
            self.replies.push(Vec::new());
            self.replies.len() - 1
        });
        let answer = &mut self.replies[index];
        answer.clear();
        let mut outcome = Outcome::default();
        let of = |range: twinrail_protocol::Range| range.offset() as usize..range.end() as usize;
        match request {
            Request::Read(range) if null => answer.resize(range.length() as usize, 0),
            Request::Write { .. } if null => {}
            Request::Read(range) => answer.extend_from_slice(&self.shared.disk.lock().unwrap()[of(range)]),
            Request::Write { range, fua } => {
                self.shared.disk.lock().unwrap()[of(range)].copy_from_slice(&self.payloads[slot.index()]);
                self.shared.seen.fua.fetch_add(fua.into(), Ordering::SeqCst);
            }
            Request::Flush => {
                self.shared.seen.flushes.fetch_add(1, Ordering::SeqCst);
                outcome.status = self.shared.mischief.flush_status.lock().unwrap().take();
            }
            Request::WriteZeroes { range, fua, .. } => {
                self.shared.disk.lock().unwrap()[of(range)].fill(0);
                self.shared.seen.fua.fetch_add(fua.into(), Ordering::SeqCst);
            }
            Request::Discard { range, .. } => self.shared.disk.lock().unwrap()[of(range)].fill(0),
            Request::CompareAndWrite { range, .. } => {
                let mut disk = self.shared.disk.lock().unwrap();
                let (expected, new) = self.payloads[slot.index()].split_at(range.length() as usize);
                let place = &mut disk[of(range)];
                match place.iter().zip(expected).position(|(a, b)| a != b) {
                    None => place.copy_from_slice(new),
                    Some(at) => {
                        outcome.status = Some(Status::COMPARE_FAILED);
                        outcome.result = range.offset() + at as u64;
                    }
                }
            }
            Request::BlockStatus(range) => {
                let disk = self.shared.disk.lock().unwrap();
                let mut extents = Vec::<Extent>::new();
                for block in disk[of(range)].chunks(512) {
                    let lies = self.shared.mischief.zeros_everywhere.load(Ordering::SeqCst);
                    let zero = lies || block.iter().all(|&b| b == 0);
                    let flags = if zero { ExtentFlags::ZERO } else { ExtentFlags::DATA };
                    let full = extents.len() == 3;
                    match extents.last_mut() {
                        Some(last) if last.flags == flags => last.length += block.len() as u64,
                        // A prefix of the range is enough.
                        _ if full => break,
                        _ => extents.push(Extent { length: block.len() as u64, flags }),
                    }
                }
                answer.resize(extents.len() * Extent::LEN, 0);
                Extent::encode(&extents, answer).unwrap();
            }
            Request::Verify(range) => outcome.result = crc32c(&self.shared.disk.lock().unwrap()[of(range)]).into(),
            Request::Identify => {
                answer.extend_from_slice(&encoded(&Handshake::Attached(attached(&self.shared.setup)))[HEADER_LEN..]);
            }
        }
        outcome.payload = Payload { length: answer.len() as u32, crc: crc32c(answer) };
        if !answer.is_empty() && take(&self.shared.mischief.damage_reads) {
            answer[1] ^= 1;
        }
        let with_payload = !answer.is_empty();
        let mut reply = self.queue.finish(slot, sequence, outcome).unwrap();
        if with_payload {
            reply.flags = twinrail_protocol::Flags::PAYLOAD_FOLLOWS;
        } else {
            self.spare.push(index);
        }
        self.outbound.push(Frame::Reply(reply).encode(), with_payload.then_some(index)).unwrap();
    }
}

/// The reply to `command` that an honest target gives, without payload.
pub(crate) fn reply_to(command: &Command) -> Reply {
    Reply {
        opcode: command.opcode,
        flags: twinrail_protocol::Flags::NONE,
        slot: command.slot,
        status: Status::OK,
        epoch: command.epoch,
        sequence: command.sequence,
        result: 0,
        credits: Credits { granted_slots: 32, number: GrantNumber(1), data_window: 512 << 10 },
        payload: Payload::default(),
    }
}

/// A control frame as bytes.
pub(crate) fn control(kind: ControlKind, token: u64, set: impl FnOnce(&mut Control)) -> Vec<u8> {
    let mut control = Control::new(kind, Epoch(1), token);
    set(&mut control);
    Frame::Control(control).encode().to_vec()
}
