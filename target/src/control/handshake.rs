//! The handshake on one connection, from HELLO until it is the path of a queue (SPEC.md, "Handshake").
//!
//! ```text
//!   HELLO ──▶ ◀── WELCOME      ATTACH ──▶ ◀── ATTACHED      ACTIVATE ──▶ [reactor] ◀── ACTIVATED
//!                              (first connection only)
//! ```
//!
//! STANDBY may come before ACTIVATE. Any step may be answered by REFUSED; then the connection ends.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::oneshot;
use twinrail_fallback_tcp::{Options, Socket};
use twinrail_protocol::limits::{HEADER_LEN, IN_CAPSULE_RANGE};
use twinrail_protocol::target::{PathId, QueueOptions};
use twinrail_protocol::wire::{
    Activate, Attach, Credits, Features, Frame, Handshake, Hello, Rail, Refused, Standby, VERSION, Welcome,
};
use twinrail_protocol::{BootId, Epoch, Instance, Status, Violation};

use super::listener::Stage;
use super::places::Place;
use super::refusal::Refusal;
use super::sessions::Sessions;
use super::standby::{Outcome, Standee};
use super::wire::{Connection, Failure};
use crate::metrics::HandshakeEnd;
use crate::reactor::mailbox::Activation;
use crate::throttle::Throttle;

/// A page in bytes.
const PAGE: u32 = 4096;

// What is left of any size that may be asked for is one that may be agreed on.
const _: () = assert!(IN_CAPSULE_RANGE.start().is_multiple_of(PAGE));

/// The lowest version that this target speaks.
const VERSION_MIN: u16 = 1;

/// What all handshakes need.
#[derive(Debug)]
pub(super) struct Host {
    /// The target's name.
    pub(super) name: String,
    /// Changes when the host reboots.
    pub(super) boot_id: BootId,
    /// Names of the initiators that are allowed; empty for all.
    pub(super) allow: Vec<String>,
    /// Most slots of a queue.
    pub(super) queue_depth: u16,
    /// How long the peer may take for a frame.
    pub(super) patience: Duration,
    /// How often a connection that stands by is probed, in milliseconds.
    pub(super) probe_period_ms: u64,
    /// How sockets are set up.
    pub(super) socket: Options,
    pub(super) sessions: Arc<Sessions>,
    /// Lines of sessions that attach.
    pub(super) log: Throttle,
}

/// A REFUSED frame.
pub(super) fn refused(refusal: &Refusal) -> Refused<'_> {
    Refused {
        status: refusal.status,
        version_min: VERSION_MIN,
        version_max: VERSION,
        retry_after_ms: refusal.retry_after_ms,
        text: &refusal.text,
    }
}

/// Shakes hands until the connection is a path, or stood by and is over.
pub(super) async fn shake(
    host: &Host,
    connection: &mut Option<Connection>,
    place: &Place<Stage>,
) -> Result<HandshakeEnd, Failure> {
    let Some(c) = connection else { return Ok(HandshakeEnd::Lost) };
    let hello = c.read_hello().await?;
    place.enter(Stage::Talking)?;
    let initiator = c.read_name(hello.name).await?;
    welcome(host, c, &hello, &initiator).await?;
    let mut buffer = Vec::new();
    let mut frame = c.read_frame(&mut buffer).await?;
    let mut attached = Vec::new();
    if let Handshake::Attach(attach) = frame {
        place.enter(Stage::Attaching)?;
        attach_volume(host, c, &initiator, &attach).await?;
        place.enter(Stage::Talking)?;
        frame = c.read_frame(&mut attached).await?;
    }
    match frame {
        Handshake::Activate(activate) => {
            place.enter(Stage::Activating)?;
            hand_over(host, connection, &activate).await.map(|()| HandshakeEnd::Activated)
        }
        Handshake::Standby(standby) => stand_by(host, connection, place, &standby).await,
        other => {
            let text = format!("a frame of kind {:#04x} isn't allowed here", other.kind());
            Err(Refusal::new(Status::UNEXPECTED_FRAME, text).into())
        }
    }
}

/// Has the connection stand by until it is to be a path, or is over.
async fn stand_by(
    host: &Host,
    connection: &mut Option<Connection>,
    place: &Place<Stage>,
    standby: &Standby,
) -> Result<HandshakeEnd, Failure> {
    let Some(c) = connection else { return Ok(HandshakeEnd::Lost) };
    place.enter(Stage::Activating)?;
    let mut standee = Standee::begin(host, c, standby).await?;
    // It counts among the paths of its session, and not any more among what is unfinished.
    place.leave();
    match standee.stand(c).await {
        Ok(Outcome::Activate) => {}
        Ok(Outcome::Over) | Err(Failure::Lost(_) | Failure::Timeout(_)) => return Ok(HandshakeEnd::Standing),
        Err(failure) => return Err(failure),
    }
    let Handshake::Activate(activate) = standee.activate()? else { return Ok(HandshakeEnd::Standing) };
    hand_over(host, connection, &activate).await.map(|()| HandshakeEnd::Activated)
}

async fn welcome(host: &Host, c: &mut Connection, hello: &Hello, initiator: &str) -> Result<(), Failure> {
    let version = hello.version_max.min(VERSION);
    if version < hello.version_min.max(VERSION_MIN) {
        let text = format!(
            "this target speaks versions {VERSION_MIN} to {VERSION} of the protocol, the initiator {} to {}; install \
             releases that have one in common",
            hello.version_min, hello.version_max
        );
        return Err(Refusal::new(Status::UNSUPPORTED_VERSION, text).into());
    }
    if !host.allow.is_empty() && !host.allow.iter().any(|name| name == initiator) {
        let text = format!("initiator {initiator:?} isn't allowed here; add its name to the target's `allow`");
        return Err(Refusal::new(Status::NOT_ALLOWED, text).into());
    }
    let features = Features(hello.features & Features::KNOWN.0);
    let (boot_id, target_name) = (host.boot_id, host.name.as_str());
    c.send(&Handshake::Welcome(Welcome { version, features, boot_id, auth_method: 0, target_name })).await
}

async fn attach_volume(host: &Host, c: &mut Connection, initiator: &str, attach: &Attach<'_>) -> Result<(), Failure> {
    let session = host.sessions.attach(initiator, attach).await?;
    if let Some(unsaid) = host.log.admit() {
        tracing::info!(
            session = %session.id,
            initiator,
            volume = session.volume.name,
            mode = session.mode.name(),
            generation = session.generation,
            peer = %c.peer,
            unsaid,
            "session attached"
        );
    }
    c.send(&Handshake::Attached(session.attached())).await
}

/// Gives the connection to its queue's reactor, which answers ACTIVATED. When it is refused, `connection`
/// is there again, to say so.
async fn hand_over(host: &Host, connection: &mut Option<Connection>, activate: &Activate<'_>) -> Result<(), Failure> {
    check_rail(activate.rail)?;
    check_wishes(activate)?;
    let mut report = Vec::with_capacity(activate.report_len() * HEADER_LEN);
    for command in activate.report() {
        report.extend_from_slice(&Frame::Command(command?).encode());
    }
    let new_instance = random_instance()?;
    let Some(Connection { stream, peer, patience }) = connection.take() else { return Ok(()) };
    let socket = Socket::from_stream(stream.into_std()?, &host.socket)?;
    let (path, answer) = match submit(host, activate, (socket, peer), new_instance, report) {
        Ok((path, answer)) => (path, answer.await),
        Err((refusal, socket)) => {
            *connection = Some(Connection { stream: taken_back(&socket)?, peer, patience });
            return Err(refusal.into());
        }
    };
    match answer {
        Ok(Ok(())) => Ok(()),
        Ok(Err((violation, socket))) => {
            host.sessions.path_failed(activate.session, path);
            *connection = Some(Connection { stream: taken_back(&socket)?, peer, patience });
            Err(refusal_of(&violation, activate).into())
        }
        Err(_) => {
            host.sessions.path_failed(activate.session, path);
            Err(io::Error::other("it was lost before it was the path").into())
        }
    }
}

/// All connections here are of one rail.
pub(super) fn check_rail(rail: Rail) -> Result<(), Refusal> {
    let other = match rail {
        Rail::TCP => return Ok(()),
        Rail::RDMA => "RDMA".to_owned(),
        Rail(number) => format!("rail {number}, which nobody knows"),
    };
    let text = format!("this is a TCP connection; it can't be a path on {other}: say rail {}", Rail::TCP.0);
    Err(Refusal::new(Status::BAD_PARAMETER, text))
}

/// What an ACTIVATE may ask for (SPEC.md, "ACTIVATE").
fn check_wishes(activate: &Activate<'_>) -> Result<(), Refusal> {
    let Activate { epoch, instance, depth, in_capsule, .. } = *activate;
    let (least, new_table) = (*IN_CAPSULE_RANGE.start(), instance == Instance(0));
    let text = match () {
        () if depth == 0 => "a queue needs at least one slot; ask for a depth of 1 or more".into(),
        () if in_capsule < least => {
            format!("an in-capsule size of {in_capsule} bytes can't be had; ask for {least} or more")
        }
        () if epoch == Epoch(0) => "epochs count from 1".into(),
        () if new_table && activate.report_len() > 0 => "nothing can be in flight with a new slot table".into(),
        () => return Ok(()),
    };
    Err(Refusal::new(Status::BAD_PARAMETER, text))
}

type ReactorAnswer = oneshot::Receiver<Result<(), (Violation, Socket)>>;

fn submit(
    host: &Host,
    activate: &Activate<'_>,
    (socket, peer): (Socket, SocketAddr),
    new_instance: Instance,
    report: Vec<u8>,
) -> Result<(PathId, ReactorAnswer), (Refusal, Socket)> {
    let Activate { session, secret, queue, epoch, instance, depth, in_capsule, .. } = *activate;
    let permit = match host.sessions.activate(session, &secret, queue) {
        Ok(permit) => permit,
        Err(refusal) => return Err((refusal, socket)),
    };
    let (session, path) = (permit.session().clone(), permit.path());
    let options = QueueOptions {
        depth: depth.min(host.queue_depth),
        // The buffers stand one behind the other, and direct I/O needs each of them to begin at a page.
        in_capsule: in_capsule.min(*IN_CAPSULE_RANGE.end()) / PAGE * PAGE,
        // The reactor's to set.
        credits: Credits::default(),
        geometry: session.volume.geometry,
        read_only: session.read_only(),
    };
    let (done, answer) = oneshot::channel();
    permit.send(Activation {
        socket,
        peer,
        session,
        path,
        queue,
        epoch,
        instance,
        new_instance,
        options,
        report,
        done,
    });
    Ok((path, answer))
}

/// A connection that a reactor didn't take.
fn taken_back(socket: &Socket) -> io::Result<TcpStream> {
    TcpStream::from_std(std::net::TcpStream::from(socket.as_fd().try_clone_to_owned()?))
}

/// What a reactor's refusal means.
fn refusal_of(violation: &Violation, activate: &Activate<'_>) -> Refusal {
    let status = violation.status;
    let Activate { session, queue, epoch, .. } = activate;
    let text = match status {
        Status::LIMIT_REACHED => {
            let text = "the target has no buffer memory left for another queue; raise `arena` there, lower \
                        `queue_depth`, or use fewer queues";
            return Refusal::new(status, text).retry_after_ms(1000);
        }
        Status::SESSION_LOST => format!("queue {queue} of session {session} has another slot table; attach again"),
        Status::STALE_EPOCH => format!("epoch {epoch} of queue {queue} isn't greater than the last one"),
        Status::SUPERSEDED => format!("another path of queue {queue} is being activated; try again"),
        Status::DRAINING => "this target is about to stop".into(),
        _ => format!("queue {queue} of session {session} can't be activated: {}", violation.detail),
    };
    Refusal::new(status, text)
}

/// A number for a slot table: random, so that no other table ever had it, and not zero.
fn random_instance() -> io::Result<Instance> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(Instance(u64::from_le_bytes(bytes).max(1)))
}
