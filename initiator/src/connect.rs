//! From an address to an activated path: dialing and the handshake, HELLO to ACTIVATED.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use twinrail_fallback_tcp::Socket;
use twinrail_protocol::ids::Instance;
use twinrail_protocol::initiator::QueueOptions;
use twinrail_protocol::limits::{HEADER_LEN, IN_CAPSULE_RANGE, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::wire::{
    Activate, Attach, Fault, Features, Frame, Handshake, Hello, Payload, Standby, Standing, VERSION,
};
use twinrail_protocol::{QueueId, Status, VolumeId, crc32c};

use crate::arena::ArenaError;
use crate::options::OptionError;
use crate::url::Endpoint;
use crate::volume_info::VolumeInfo;

/// How far a connection had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Looking up the host's addresses.
    Resolve,
    /// Waiting for the connection.
    Dial,
    /// HELLO was sent.
    Hello,
    /// ATTACH was sent.
    Attach,
    /// STANDBY was sent for this queue.
    Standby(QueueId),
    /// ACTIVATE was sent for this queue.
    Activate(QueueId),
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Resolve => f.write_str("looking up its address"),
            Self::Dial => f.write_str("dialing"),
            Self::Hello => f.write_str("saying hello"),
            Self::Attach => f.write_str("attaching the volume"),
            Self::Standby(queue) => write!(f, "bringing up another path of queue {queue}"),
            Self::Activate(queue) => write!(f, "activating queue {queue}"),
        }
    }
}

/// Why a volume could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// An option has a value that it can't have.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// There is no memory for buffers.
    #[error(transparent)]
    Memory(#[from] ArenaError),
    /// The system refused something that has nothing to do with the target: a thread, random bytes.
    #[error("{what}: {source}")]
    System {
        /// What.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The host has no address.
    #[error("{target}: the host's name can't be looked up ({source}); is it spelled right?")]
    Resolve {
        /// The target.
        target: Endpoint,
        /// What the resolver said.
        source: io::Error,
    },
    /// Nothing there took the connection.
    #[error("{target}: no connection to {address} ({source}); does a target listen there, and do firewalls let it?")]
    Dial {
        /// The target.
        target: Endpoint,
        /// The address tried last.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The connection broke during the handshake.
    #[error("{target}: the connection broke while {stage} ({source})")]
    Broken {
        /// The target.
        target: Endpoint,
        /// How far it had come.
        stage: Stage,
        /// What the system said; `UnexpectedEof` when the target closed it without a word.
        source: io::Error,
    },
    /// Nothing came in time.
    #[error(
        "{target}: no answer within {timeout_ms} ms while {stage}; a longer timeout helps if the target is only slow"
    )]
    Timeout {
        /// The target.
        target: Endpoint,
        /// How far it had come.
        stage: Stage,
        /// The limit in milliseconds.
        timeout_ms: u64,
    },
    /// The target refused.
    #[error("{target} refuses while {stage}: {text} ({status}){}", retry(*retry_after_ms))]
    Refused {
        /// The target.
        target: Endpoint,
        /// How far it had come.
        stage: Stage,
        /// Why.
        status: Status,
        /// The same for people.
        text: String,
        /// When to try again, in milliseconds; 0 says nothing.
        retry_after_ms: u32,
        /// Protocol versions that the target speaks, lowest and highest.
        versions: (u16, u16),
    },
    /// The target asks for an authentication that this version doesn't know.
    #[error("{target} asks for authentication by method {method}, which this version doesn't have")]
    Authentication {
        /// The target.
        target: Endpoint,
        /// Its method.
        method: u16,
    },
    /// Another volume has the name now.
    #[error("{target}: the volume is {found}, not {expected}")]
    WrongVolume {
        /// The target.
        target: Endpoint,
        /// The volume expected.
        expected: VolumeId,
        /// The volume found.
        found: VolumeId,
    },
    /// What answered doesn't speak the protocol, or not rightly.
    #[error("{target} doesn't keep to the protocol while {stage}: {detail}; is it a Twinrail target?")]
    Protocol {
        /// The target.
        target: Endpoint,
        /// How far it had come.
        stage: Stage,
        /// What was wrong.
        detail: String,
    },
}

fn retry(after_ms: u32) -> String {
    if after_ms == 0 { String::new() } else { format!("; try again in {after_ms} ms") }
}

/// How to reach a target: all that dialing takes, for whichever thread does it.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) target: Endpoint,
    /// Name of this initiator.
    pub(crate) name: String,
    /// How long dialing, and each answer, may take.
    pub(crate) timeout_ms: u64,
    pub(crate) socket: twinrail_fallback_tcp::Options,
}

/// A connection that has been welcomed.
pub(crate) struct Connection {
    stream: TcpStream,
    target: Endpoint,
    timeout_ms: u64,
    /// Of the target, for people.
    pub(crate) target_name: String,
    /// Room for one handshake frame.
    frame: Box<[u8]>,
}

/// What an activation brought.
pub(crate) struct Activation {
    pub(crate) socket: Socket,
    pub(crate) instance: Instance,
    pub(crate) agreed: QueueOptions,
}

impl Connection {
    /// Dials the target and says hello. Each of the two steps may take the route's time.
    pub(crate) fn dial(route: &Route) -> Result<Self, ConnectError> {
        let Route { target, name, timeout_ms, .. } = route;
        let timeout_ms = *timeout_ms;
        let stream = dial(target, timeout_ms)?;
        let frame = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD].into_boxed_slice();
        let mut connection = Self { stream, target: target.clone(), timeout_ms, target_name: String::new(), frame };
        let name_sent = Payload { length: name.len() as u32, crc: crc32c(name.as_bytes()) };
        let hello = Hello { version_min: VERSION, version_max: VERSION, features: Features::KNOWN.0, name: name_sent };
        let bytes = [&hello.encode()[..], name.as_bytes()].concat();
        connection.write(Stage::Hello, &bytes)?;
        let target_name = match connection.answer(Stage::Hello, timeout_ms)? {
            Handshake::Welcome(welcome) if welcome.auth_method != 0 => {
                return Err(ConnectError::Authentication { target: target.clone(), method: welcome.auth_method });
            }
            Handshake::Welcome(welcome)
                if welcome.version == VERSION && welcome.features.0 & !Features::KNOWN.0 == 0 =>
            {
                Ok(welcome.target_name.to_owned())
            }
            Handshake::Welcome(_) => Err("a version or a feature that was not offered"),
            _ => Err("another answer to HELLO than WELCOME"),
        };
        connection.target_name = target_name.map_err(|detail| connection.protocol(Stage::Hello, detail))?;
        Ok(connection)
    }

    /// Begins a session.
    pub(crate) fn attach(&mut self, attach: &Attach<'_>, timeout_ms: u64) -> Result<VolumeInfo, ConnectError> {
        const STAGE: Stage = Stage::Attach;
        self.send(STAGE, &Handshake::Attach(*attach))?;
        let info = match self.answer(STAGE, timeout_ms)? {
            Handshake::Attached(attached) => Ok(VolumeInfo::from_attached(&attached)),
            _ => Err("another answer to ATTACH than ATTACHED"),
        };
        let info = info.map_err(|detail| self.protocol(STAGE, detail))?;
        if !info.geometry.is_valid() || info.queues == 0 {
            let detail = format!("a volume with impossible numbers: {:?}, {} queues", info.geometry, info.queues);
            return Err(self.protocol(STAGE, detail));
        }
        let (expected, found) = (attach.expected_volume, info.id);
        if !expected.is_nil() && expected != found {
            return Err(ConnectError::WrongVolume { target: self.target.clone(), expected, found });
        }
        Ok(info)
    }

    /// Makes this connection one that may become the next path of a queue, at once and at any later time.
    pub(crate) fn stand_by(&mut self, standby: &Standby) -> Result<Standing, ConnectError> {
        let stage = Stage::Standby(standby.queue);
        self.send(stage, &Handshake::Standby(*standby))?;
        let standing = match self.answer(stage, self.timeout_ms)? {
            Handshake::Standing(standing) => Some(standing),
            _ => None,
        };
        standing.ok_or_else(|| self.protocol(stage, "another answer to STANDBY than STANDING"))
    }

    /// The connection itself, non-blocking; nothing beyond the last answer was read.
    pub(crate) fn into_socket(self, route: &Route) -> Result<Socket, ConnectError> {
        Socket::from_stream(self.stream, &route.socket)
            .map_err(|source| ConnectError::System { what: "a socket can't be set up", source })
    }

    /// Makes this connection the path of a queue with a new slot table.
    pub(crate) fn activate(
        mut self,
        activate: &Activate<'_>,
        max_transfer: u32,
        route: &Route,
    ) -> Result<Activation, ConnectError> {
        let stage = Stage::Activate(activate.queue);
        self.send(stage, &Handshake::Activate(*activate))?;
        let agreed = match self.answer(stage, self.timeout_ms)? {
            Handshake::Activated(activated) => {
                let Activate { epoch, depth, in_capsule, .. } = *activate;
                let right = activated.epoch == epoch
                    && activated.instance != Instance(0)
                    && (1..=depth).contains(&activated.depth)
                    && (*IN_CAPSULE_RANGE.start()..=in_capsule).contains(&activated.in_capsule)
                    && activated.verdicts().next().is_none();
                match right {
                    true => Ok((activated.instance, QueueOptions::from_activated(&activated, max_transfer))),
                    false => Err(format!("it activates what was not asked for: {activated:?}")),
                }
            }
            _ => Err("another answer to ACTIVATE than ACTIVATED".to_owned()),
        };
        let (instance, agreed) = agreed.map_err(|detail| self.protocol(stage, detail))?;
        Ok(Activation { socket: self.into_socket(route)?, instance, agreed })
    }

    fn protocol(&self, stage: Stage, detail: impl Into<String>) -> ConnectError {
        ConnectError::Protocol { target: self.target.clone(), stage, detail: detail.into() }
    }

    fn broken(&self, stage: Stage, source: io::Error, timeout_ms: u64) -> ConnectError {
        let target = self.target.clone();
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ConnectError::Timeout { target, stage, timeout_ms },
            _ => ConnectError::Broken { target, stage, source },
        }
    }

    fn send(&mut self, stage: Stage, frame: &Handshake<'_>) -> Result<(), ConnectError> {
        let length =
            frame.encode(&mut self.frame).ok_or_else(|| self.protocol(stage, "a frame of ours is too long"))?;
        let written = write(&mut self.stream, &self.frame[..length], self.timeout_ms);
        written.map_err(|source| self.broken(stage, source, self.timeout_ms))
    }

    fn write(&mut self, stage: Stage, bytes: &[u8]) -> Result<(), ConnectError> {
        let written = write(&mut self.stream, bytes, self.timeout_ms);
        written.map_err(|source| self.broken(stage, source, self.timeout_ms))
    }

    /// The target's answer; a REFUSED is an error. Reads not a byte beyond it: what follows ACTIVATED
    /// already belongs to the queue.
    fn answer(&mut self, stage: Stage, timeout_ms: u64) -> Result<Handshake<'_>, ConnectError> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let (header, payload) = self.frame.split_at_mut(HEADER_LEN);
        let read = read(&mut self.stream, header, deadline);
        let decoded = read.map(|()| header.first_chunk().map_or(Err(Fault::BadMagic), Frame::decode));
        let (kind, expected) = match decoded {
            Ok(Ok(Frame::Handshake { kind, payload })) => (kind, payload),
            Ok(Ok(_)) => return Err(self.protocol(stage, "a frame that has no place in the handshake")),
            Ok(Err(fault)) => return Err(self.protocol(stage, fault.to_string())),
            Err(source) => return Err(self.broken(stage, source, timeout_ms)),
        };
        // Bounded by `Frame::decode`.
        let length = (expected.length as usize).min(payload.len());
        if let Err(source) = self::read(&mut self.stream, &mut payload[..length], deadline) {
            return Err(self.broken(stage, source, timeout_ms));
        }
        match Handshake::decode(kind, expected, &self.frame[HEADER_LEN..HEADER_LEN + length]) {
            Ok(Handshake::Refused(refused)) => Err(ConnectError::Refused {
                target: self.target.clone(),
                stage,
                status: refused.status,
                text: refused.text.to_owned(),
                retry_after_ms: refused.retry_after_ms,
                versions: (refused.version_min, refused.version_max),
            }),
            Ok(answer) => Ok(answer),
            Err(fault) => Err(self.protocol(stage, fault.to_string())),
        }
    }
}

/// Connects to the first of the target's addresses that takes it.
fn dial(target: &Endpoint, timeout_ms: u64) -> Result<TcpStream, ConnectError> {
    let unresolved = |source| ConnectError::Resolve { target: target.clone(), source };
    let addresses = (target.host.as_str(), target.port).to_socket_addrs().map_err(unresolved)?;
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let mut failure = None;
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                // The handshake is many small frames; should this fail it only gets slower.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(source) => failure = Some((address, source)),
        }
    }
    Err(match failure {
        Some((_, source)) if source.kind() == io::ErrorKind::TimedOut => {
            ConnectError::Timeout { target: target.clone(), stage: Stage::Dial, timeout_ms }
        }
        Some((address, source)) => ConnectError::Dial { target: target.clone(), address, source },
        None => unresolved(io::Error::new(io::ErrorKind::NotFound, "it has no address")),
    })
}

/// Fills `into` before the deadline, however slowly the bytes trickle in.
fn read(stream: &mut TcpStream, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !into.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn write(stream: &mut TcpStream, bytes: &[u8], timeout_ms: u64) -> io::Result<()> {
    stream.set_write_timeout(Some(Duration::from_millis(timeout_ms)))?;
    stream.write_all(bytes)
}
