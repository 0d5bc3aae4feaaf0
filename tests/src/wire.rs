//! The protocol, byte by byte and blocking: what an initiator would never say can be said here.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use twinrail_protocol::ids::{Epoch, GrantNumber, Instance};
use twinrail_protocol::limits::{DEFAULT_IN_CAPSULE, HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::wire::{
    Activate, Attach, AttachFlags, AttachMode, Command, Control, ControlKind, Credits, Frame, Handshake, Hello,
    Payload, Rail, Reply, VERSION,
};
use twinrail_protocol::{Flags, Opcode, QueueId, Secret, Sequence, SessionId, Slot, Status, VolumeId, crc32c};

use crate::PATIENCE;

/// One connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
}

/// A frame of the target's, with its payload.
#[derive(Debug)]
pub struct Received {
    /// The header.
    pub frame: Frame,
    /// What followed it.
    pub payload: Vec<u8>,
}

/// How a target turned something down, or ended a connection.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    /// Why.
    pub status: Status,
    /// The same for people.
    pub text: String,
}

impl Connection {
    /// Connects and says nothing.
    ///
    /// # Panics
    /// When nothing takes the connection.
    #[must_use]
    pub fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream }
    }

    /// Connects and is welcomed.
    ///
    /// # Panics
    /// When it isn't.
    #[must_use]
    pub fn welcomed(address: SocketAddr) -> Self {
        let mut connection = Self::open(address);
        connection.hello(VERSION, VERSION);
        match connection.receive() {
            Some(Received { frame: Frame::Handshake { kind: 0x41, .. }, .. }) => connection,
            other => panic!("no WELCOME but {other:?}"),
        }
    }

    /// The same connection for another thread.
    ///
    /// # Panics
    /// When there are no descriptors left.
    #[must_use]
    pub fn another(&self) -> Self {
        Self { stream: self.stream.try_clone().unwrap() }
    }

    /// Sends bytes, whatever they are. The target may have hung up in the meantime.
    pub fn send(&mut self, bytes: &[u8]) {
        // What matters is what the target says.
        let _ = self.stream.write_all(bytes);
    }

    /// Says that nothing more will be sent.
    pub fn finish_sending(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// Sends a HELLO.
    pub fn hello(&mut self, version_min: u16, version_max: u16) {
        self.send(&hello(version_min, version_max));
    }

    /// Sends a handshake frame.
    ///
    /// # Panics
    /// When it has no encoding.
    pub fn handshake(&mut self, frame: &Handshake<'_>) {
        let mut room = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
        let length = frame.encode(&mut room).unwrap();
        self.send(&room[..length]);
    }

    /// The next frame; nothing at the end of the connection.
    ///
    /// # Panics
    /// When nothing comes for too long, or what comes is no frame.
    pub fn receive(&mut self) -> Option<Received> {
        let header: [u8; HEADER_LEN] = self.receive_bytes(HEADER_LEN)?.try_into().unwrap();
        let frame = Frame::decode(&header).unwrap();
        let payload = self.receive_bytes(frame.following() as usize)?;
        Some(Received { frame, payload })
    }

    /// So many bytes; nothing when the connection ends before.
    fn receive_bytes(&mut self, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the target says nothing for {PATIENCE:?}")
            }
            Err(_) => None,
        }
    }

    /// How the target ends the connection: with REFUSED or DISCONNECT, or nothing when it hangs up without a word.
    ///
    /// # Panics
    /// When it says something else, or doesn't end it.
    pub fn end(&mut self) -> Option<Ended> {
        let ended = loop {
            let Received { frame, payload } = self.receive()?;
            match frame {
                Frame::Handshake { kind, payload: expected } => match Handshake::decode(kind, expected, &payload) {
                    Ok(Handshake::Refused(f)) => break Ended { status: f.status, text: f.text.to_owned() },
                    other => panic!("no REFUSED but {other:?}"),
                },
                Frame::Control(Control { kind: ControlKind::Disconnect, status, .. }) => {
                    break Ended { status, text: String::from_utf8(payload).unwrap() };
                }
                Frame::Control(_) | Frame::Reply(_) => {}
                other => panic!("no end but {other:?}"),
            }
        };
        assert!(self.receive().is_none(), "something came after the end");
        Some(ended)
    }

    /// Reads until the connection ends; gives the number of bytes that came before.
    ///
    /// # Panics
    /// When it doesn't end.
    pub fn wait_for_close(&mut self) -> usize {
        let mut room = [0; 4096];
        let mut count = 0;
        loop {
            match self.stream.read(&mut room) {
                Ok(0) => return count,
                Ok(more) => count += more,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    panic!("the target keeps the connection for {PATIENCE:?}")
                }
                Err(_) => return count,
            }
        }
    }
}

/// The bytes of a HELLO.
#[must_use]
pub fn hello(version_min: u16, version_max: u16) -> Vec<u8> {
    let name = b"a test";
    let name_sent = Payload { length: name.len() as u32, crc: crc32c(name) };
    let hello = Hello { version_min, version_max, features: 0, name: name_sent };
    [&hello.encode()[..], name].concat()
}

/// A session with one queue.
#[derive(Debug)]
pub struct Queue {
    connection: Connection,
    epoch: Epoch,
    sequences: Vec<u64>,
    grant_seen: GrantNumber,
    /// Slots granted at the start.
    pub granted_slots: u16,
}

/// An ATTACH that any volume of this name answers.
#[must_use]
pub fn attach(volume: &str, mode: AttachMode) -> Attach<'_> {
    let (session, secret) = (SessionId(random_id()), Secret(random_id()));
    let (next_secret, expected_volume) = (Secret([0; 16]), VolumeId::NIL);
    let flags = AttachFlags::default();
    Attach { session, secret, next_secret, mode, flags, queues: 1, expected_volume, generation: 0, volume }
}

/// Ids differ between tests that run at the same time.
fn random_id() -> [u8; 16] {
    let mut id = [0; 16];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut id).unwrap();
    id
}

impl Queue {
    /// Attaches a volume and activates queue 0.
    ///
    /// # Panics
    /// When the target doesn't let it.
    #[must_use]
    pub fn attach(address: SocketAddr, volume: &str, mode: AttachMode) -> Self {
        let mut connection = Connection::welcomed(address);
        let attach = attach(volume, mode);
        connection.handshake(&Handshake::Attach(attach));
        Self::attached(connection, &attach)
    }

    /// Waits for the answer to an ATTACH, and activates queue 0.
    ///
    /// # Panics
    /// When the target doesn't let it.
    #[must_use]
    pub fn attached(mut connection: Connection, attach: &Attach<'_>) -> Self {
        match connection.receive() {
            Some(Received { frame: Frame::Handshake { kind: 0x44, .. }, .. }) => {}
            Some(Received { frame: Frame::Handshake { kind, payload }, payload: bytes }) => {
                panic!("no ATTACHED but {:?}", Handshake::decode(kind, payload, &bytes))
            }
            other => panic!("no ATTACHED but {other:?}"),
        }
        Self::activate(connection, attach)
    }

    fn activate(mut connection: Connection, attach: &Attach<'_>) -> Self {
        let epoch = Epoch(1);
        let mut activate = Activate::new(attach.session, attach.secret, QueueId(0), Rail::TCP, epoch);
        (activate.depth, activate.in_capsule) = (32, DEFAULT_IN_CAPSULE);
        connection.handshake(&Handshake::Activate(activate));
        let Some(Received { frame: Frame::Handshake { kind, payload }, payload: bytes }) = connection.receive() else {
            panic!("no answer to ACTIVATE");
        };
        let Ok(Handshake::Activated(activated)) = Handshake::decode(kind, payload, &bytes) else {
            panic!("no ACTIVATED but kind {kind:#x}");
        };
        assert_ne!(activated.instance, Instance(0));
        let sequences = vec![0; activated.depth.into()];
        let Credits { granted_slots, number: grant_seen, .. } = activated.credits;
        Self { connection, epoch, sequences, grant_seen, granted_slots }
    }

    /// The connection below.
    pub fn connection(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// Sends a command in a slot, with its payload right behind it, as its checksum says.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn send(&mut self, slot: u16, opcode: Opcode, flags: Flags, (offset, length): (u64, u64), payload: &[u8]) {
        let sent = Payload { length: payload.len() as u32, crc: if payload.is_empty() { 0 } else { crc32c(payload) } };
        let command = Command { opcode, flags, offset, length, payload: sent, ..Command::default() };
        self.send_command(slot, command, payload);
    }

    /// Sends a command in a slot; slot, sequence, epoch, grant and "payload follows" are put in.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn send_command(&mut self, slot: u16, command: Command, payload: &[u8]) {
        let bytes = self.command(slot, command, payload);
        self.connection.send(&bytes);
    }

    /// The bytes that [`Self::send_command`] sends.
    ///
    /// # Panics
    /// When there is no such slot.
    #[must_use]
    pub fn command(&mut self, slot: u16, command: Command, payload: &[u8]) -> Vec<u8> {
        let sequence = &mut self.sequences[usize::from(slot)];
        *sequence += 1;
        let follows = if payload.is_empty() { Flags::NONE } else { Flags::PAYLOAD_FOLLOWS };
        let command = Command {
            flags: command.flags.with(follows),
            slot: Slot(slot),
            sequence: Sequence(*sequence),
            epoch: self.epoch,
            grant_seen: self.grant_seen,
            ..command
        };
        [&Frame::Command(command).encode()[..], payload].concat()
    }

    /// The next reply, with its payload; probes are answered on the way.
    ///
    /// # Panics
    /// When something else comes, or nothing.
    pub fn reply(&mut self) -> (Reply, Vec<u8>) {
        loop {
            match self.connection.receive() {
                Some(Received { frame: Frame::Reply(reply), payload }) => return (reply, payload),
                Some(Received { frame: Frame::Control(control), payload }) => match control.kind {
                    ControlKind::Probe => {
                        let answer = Control::new(ControlKind::ProbeReply, self.epoch, control.token);
                        self.connection.send(&Frame::Control(answer).encode());
                    }
                    kind => panic!("no reply but {kind:?}: {}, {}", control.status, String::from_utf8_lossy(&payload)),
                },
                other => panic!("no reply but {other:?}"),
            }
        }
    }

    /// Sends a command in slot 0 and waits for its reply.
    ///
    /// # Panics
    /// When the connection ends instead.
    pub fn call(&mut self, opcode: Opcode, flags: Flags, range: (u64, u64), payload: &[u8]) -> (Reply, Vec<u8>) {
        self.send(0, opcode, flags, range, payload);
        self.reply()
    }

    /// How a command without flags ends.
    ///
    /// # Panics
    /// When the connection ends instead.
    pub fn status(&mut self, opcode: Opcode, range: (u64, u64), payload: &[u8]) -> Status {
        self.call(opcode, Flags::NONE, range, payload).0.status
    }

    /// Ends the session in order.
    ///
    /// # Panics
    /// When the target doesn't answer.
    pub fn close(mut self) {
        let close = Control::new(ControlKind::Close, self.epoch, 1);
        self.connection.send(&Frame::Control(close).encode());
        loop {
            match self.connection.receive() {
                Some(Received { frame: Frame::Control(Control { kind: ControlKind::Closed, status, .. }), .. }) => {
                    assert_eq!(status, Status::CLOSED);
                    return;
                }
                Some(_) => {}
                None => panic!("CLOSE was not answered"),
            }
        }
    }
}
