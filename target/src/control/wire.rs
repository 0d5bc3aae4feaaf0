//! Handshake frames on one connection: read whole, within a time, into memory that the peer doesn't choose.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use twinrail_protocol::limits::{HEADER_LEN, MAX_NAME};
use twinrail_protocol::wire::{Fault, Frame, Handshake, Hello, Payload};
use twinrail_protocol::{Status, crc32c};

use super::refusal::Refusal;

/// Room for any frame that a target sends before it hands the connection to a reactor.
const ANSWER_LEN: usize = HEADER_LEN + 1024;
/// How long a refused peer may take to hang up after reading why.
const LINGER: Duration = Duration::from_millis(500);

/// Why the exchange on a connection ends without a path.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// Not ours, or broken: nothing that is sent could be understood.
    #[error("{fault}: it looks like {guess}")]
    Foreign {
        /// What is wrong with its first bytes.
        fault: Fault,
        /// What the peer seems to speak.
        guess: &'static str,
    },
    /// To be answered.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The peer hung up.
    #[error("the other side hung up: {0}")]
    Lost(#[from] io::Error),
    /// The peer was silent for too long.
    #[error("nothing came for {0:?}")]
    Timeout(Duration),
    /// A newer connection needed the place.
    #[error("crowded out by newer connections")]
    CrowdedOut,
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        let text = format!("{fault}; use an initiator of the same release as this target");
        Self::Refused(Refusal::new(fault.status(), text))
    }
}

impl Failure {
    /// The status that metrics count it by.
    pub(super) fn status(&self) -> Status {
        match self {
            Self::Foreign { fault, .. } => fault.status(),
            Self::Refused(refusal) => refusal.status,
            Self::Lost(_) => Status::CONNECTION_LOST,
            Self::Timeout(_) => Status::TIMEOUT,
            Self::CrowdedOut => Status::CROWDED_OUT,
        }
    }
}

/// A connection during its handshake.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    /// How long the peer may take for a frame.
    pub(super) patience: Duration,
}

impl Connection {
    /// Reads HELLO. Nothing is allocated for a peer that hasn't sent one, and one that sends something else
    /// is known by its first byte.
    pub(super) async fn read_hello(&mut self) -> Result<Hello, Failure> {
        let patience = self.patience;
        let read = async {
            let mut header = [0; HEADER_LEN];
            let mut have = 0;
            while have < HEADER_LEN {
                match self.stream.read(&mut header[have..]).await? {
                    0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                    n => have += n,
                }
                let known = have.min(Hello::MAGIC.len());
                if header[..known] != Hello::MAGIC[..known] {
                    return Err(Failure::Foreign { fault: Fault::BadMagic, guess: guess(&header[..have]) });
                }
            }
            Ok(Hello::decode(&header)?)
        };
        timeout(patience, read).await.unwrap_or(Err(Failure::Timeout(patience)))
    }

    /// Reads the name that follows HELLO.
    pub(super) async fn read_name(&mut self, expected: Payload) -> Result<String, Failure> {
        let mut room = [0; MAX_NAME];
        let name = room.get_mut(..expected.length as usize).ok_or(Fault::Malformed("a name is too long"))?;
        self.read_exact(name).await?;
        if crc32c(name) != expected.crc {
            return Err(Fault::ControlCrc.into());
        }
        let name = std::str::from_utf8(name).map_err(|_| Fault::Malformed("a name isn't UTF-8"))?;
        // Names end up in logs and on terminals.
        if name.chars().any(char::is_control) {
            return Err(Fault::Malformed("a name has control characters").into());
        }
        Ok(name.to_owned())
    }

    /// Reads the next handshake frame: its kind, and its payload into `buffer`.
    pub(super) async fn read_frame<'b>(&mut self, buffer: &'b mut Vec<u8>) -> Result<Handshake<'b>, Failure> {
        let mut header = [0; HEADER_LEN];
        self.read_exact(&mut header).await?;
        let (kind, payload) = match Frame::decode(&header)? {
            Frame::Handshake { kind, payload } => (kind, payload),
            _ => return Err(Fault::UnexpectedKind(header[0]).into()),
        };
        // Bounded by `Frame::decode`.
        buffer.clear();
        buffer.resize(payload.length as usize, 0);
        self.read_exact(buffer).await?;
        Ok(Handshake::decode(kind, payload, buffer)?)
    }

    async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), Failure> {
        let patience = self.patience;
        match timeout(patience, self.stream.read_exact(out)).await {
            Ok(read) => Ok(read.map(drop)?),
            Err(_) => Err(Failure::Timeout(patience)),
        }
    }

    /// Sends a frame.
    pub(super) async fn send(&mut self, frame: &Handshake<'_>) -> Result<(), Failure> {
        let mut out = [0; ANSWER_LEN];
        let length = frame.encode(&mut out).ok_or_else(|| io::Error::other("an answer is too long"))?;
        self.send_bytes(&out[..length]).await
    }

    /// Sends encoded frames.
    pub(super) async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let patience = self.patience;
        match timeout(patience, self.stream.write_all(bytes)).await {
            Ok(sent) => Ok(sent?),
            Err(_) => Err(Failure::Timeout(patience)),
        }
    }

    /// Says why the handshake ends, and waits a moment for the peer to hang up: closing a socket that
    /// has unread bytes would reset it, and take the text with it.
    pub(super) async fn refuse(&mut self, refused: &Handshake<'_>) {
        if self.send(refused).await.is_err() || self.stream.shutdown().await.is_err() {
            return;
        }
        let drain = async {
            let mut sink = [0; 512];
            while matches!(self.stream.read(&mut sink).await, Ok(1..)) {}
        };
        let _ = timeout(LINGER, drain).await;
    }
}

/// What a peer seems to speak, by its first bytes.
fn guess(first: &[u8]) -> &'static str {
    const STARTS: [(&[u8], &str); 10] = [
        (b"GET ", "HTTP"),
        (b"POST", "HTTP"),
        (b"HEAD", "HTTP"),
        (b"PUT ", "HTTP"),
        (b"OPTI", "HTTP"),
        (b"PRI ", "HTTP/2"),
        (b"\x16\x03", "TLS"),
        (b"SSH-", "SSH"),
        (b"NBDM", "NBD"),
        (&[0, 0], "NVMe over TCP"),
    ];
    STARTS.iter().find(|(start, _)| first.starts_with(start)).map_or("no protocol that we know", |(_, name)| name)
}
