//! Accepting connections, and how many of them may be unfinished (I8): one that hasn't said HELLO gives way
//! before all others, see [`super::places`].

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use twinrail_protocol::Status;
use twinrail_protocol::limits::HEADER_LEN;
use twinrail_protocol::wire::{Handshake, Hello};

use super::handshake::{self, Host};
use super::places::{CrowdedOut, Place, Places};
use super::refusal::Refusal;
use super::wire::{Connection, Failure};
use crate::metrics::{HandshakeEnd, Metrics};
use crate::throttle::Throttle;

/// Connections that the kernel keeps for us.
const BACKLOG: u32 = 4096;
/// How long accepting pauses when there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// The same, when one is about to be given back.
const SHORT_PAUSE: Duration = Duration::from_millis(1);
/// Pauses that are nearer to each other have the same cause.
const SAME_PAUSE: Duration = Duration::from_secs(10);

/// What a handshake waits for; the earlier it stands here, the sooner it is crowded out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// For a HELLO.
    Greeting,
    /// For the peer to read why it was refused, and hang up.
    Leaving,
    /// For the peer's next frame.
    Talking,
    /// For older sessions of the volume to end.
    Attaching,
    /// For the reactor; never crowded out, since the reactor has the socket.
    Activating,
}

/// Handshakes in progress.
pub(super) type Handshakes = Places<Stage>;

/// Listens on an address.
///
/// # Errors
/// As of the socket calls.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart must not wait for connections of the last run that are still in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// What the accept loops of all addresses share.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) host: Host,
    pub(super) handshakes: Arc<Handshakes>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) log: Reasons,
}

/// Accepts for ever.
pub(super) async fn accept(door: Arc<Door>, listener: TcpListener) {
    let mut paused: Option<Instant> = None;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                receive(&door, stream, peer);
                // Those just accepted have their turn before the next ones may crowd them out.
                tokio::task::yield_now().await;
            }
            Err(error) if is_exhaustion(&error) => {
                door.metrics.accept_pauses.inc();
                // One line for pauses that follow one another.
                if paused.replace(Instant::now()).is_none_or(|last| last.elapsed() > SAME_PAUSE) {
                    tracing::error!(
                        %error,
                        "no new connections for now; established sessions go on. Raise the limit of open files \
                         (LimitNOFILE= in systemd, `ulimit -n`) or lower max_connections"
                    );
                }
                // One that hasn't said HELLO gives its descriptor back.
                let pause = if door.handshakes.crowd_out(Stage::Leaving) { SHORT_PAUSE } else { PAUSE };
                tokio::time::sleep(pause).await;
            }
            // The peer was gone before we came to it.
            Err(error) => tracing::debug!(%error, "a connection ended before it was accepted"),
        }
    }
}

/// Whether accepting failed for want of something that others may give back.
fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

fn receive(door: &Arc<Door>, stream: TcpStream, peer: SocketAddr) {
    let stage = if has_greeted(&stream) { Stage::Talking } else { Stage::Greeting };
    // No place only when all others are with reactors at this very moment.
    let Some((place, crowded_out)) = door.handshakes.admit(stage, Stage::Attaching) else {
        door.ended(peer, &Err(Failure::CrowdedOut));
        return;
    };
    let door = door.clone();
    tokio::spawn(async move {
        let result = attend(&door, stream, peer, &place, crowded_out).await;
        door.ended(peer, &result);
    });
}

/// Whether a whole HELLO has arrived already: an initiator sends it at once.
fn has_greeted(stream: &TcpStream) -> bool {
    let mut header = [0; HEADER_LEN];
    let peeked = rustix::net::recv(stream, &mut header[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    peeked.is_ok_and(|(n, _)| n == HEADER_LEN) && Hello::decode(&header).is_ok()
}

/// One connection, until it is a path or closed.
async fn attend(
    door: &Door,
    stream: TcpStream,
    peer: SocketAddr,
    place: &Place<Stage>,
    crowded_out: oneshot::Receiver<()>,
) -> Result<HandshakeEnd, Failure> {
    let patience = door.host.patience;
    let mut connection = Some(Connection { stream, peer, patience });
    tokio::pin!(crowded_out);
    let result = tokio::select! {
        result = handshake::shake(&door.host, &mut connection, place) => result,
        _ = &mut crowded_out => Err(Failure::CrowdedOut),
    };
    let (Err(failure), Some(mut c)) = (&result, connection) else { return result };
    let refusal = match failure {
        Failure::Refused(refusal) => refusal.clone(),
        // Whoever never said HELLO wouldn't understand.
        Failure::Timeout(_) if place.stage() != Some(Stage::Greeting) => {
            Refusal::new(Status::TIMEOUT, format!("the handshake didn't go on for {} ms", patience.as_millis()))
        }
        _ => return result,
    };
    let answer = Handshake::Refused(handshake::refused(&refusal));
    if place.enter(Stage::Leaving).is_ok() {
        tokio::select! {
            () = c.refuse(&answer) => {}
            _ = &mut crowded_out => {}
        }
    }
    result
}

impl Door {
    /// Counts a handshake that ended, and says why if it failed.
    fn ended(&self, peer: SocketAddr, result: &Result<HandshakeEnd, Failure>) {
        let end = match result {
            Ok(end) => *end,
            Err(Failure::Refused(_) | Failure::Foreign { .. }) => HandshakeEnd::Refused,
            Err(Failure::Timeout(_)) => HandshakeEnd::Timeout,
            Err(Failure::CrowdedOut) => HandshakeEnd::CrowdedOut,
            Err(Failure::Lost(_)) => HandshakeEnd::Lost,
        };
        self.metrics.handshake_ended(end);
        let Err(failure) = result else { return };
        let status = failure.status();
        self.metrics.refused(status);
        if let Some(unsaid) = self.log.admit(status) {
            tracing::info!(%peer, reason = %status, unsaid, "handshake failed: {failure}");
        }
    }
}

impl From<CrowdedOut> for Failure {
    fn from(CrowdedOut: CrowdedOut) -> Self {
        Self::CrowdedOut
    }
}

/// A throttle for each reason, so that a frequent one doesn't hide the others.
#[derive(Debug, Default)]
pub(super) struct Reasons {
    // As many as there are statuses that we give.
    throttles: Mutex<HashMap<Status, Throttle>>,
}

impl Reasons {
    /// Whether to say it now, and how many of its kind weren't said since the last one.
    fn admit(&self, reason: Status) -> Option<u64> {
        let mut throttles = self.throttles.lock().unwrap_or_else(PoisonError::into_inner);
        throttles.entry(reason).or_insert_with(|| Throttle::new(1)).admit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::IntGauge;

    struct All {
        places: Arc<Handshakes>,
        gauge: IntGauge,
    }

    fn handshakes(most: usize) -> All {
        let gauge = IntGauge::new("gauge", "for the test").unwrap();
        All { places: Handshakes::new(most, Some(gauge.clone())), gauge }
    }

    impl All {
        fn admit(&self, stage: Stage) -> Option<(Place<Stage>, oneshot::Receiver<()>)> {
            self.places.admit(stage, Stage::Attaching)
        }
    }

    #[test]
    fn a_newcomer_takes_the_place_of_the_one_that_is_silent_for_longest() {
        let all = handshakes(3);
        let (first, _n1) = all.admit(Stage::Greeting).unwrap();
        let (second, _n2) = all.admit(Stage::Greeting).unwrap();
        let (third, _n3) = all.admit(Stage::Greeting).unwrap();
        first.enter(Stage::Talking).unwrap();
        let (fourth, mut noticed) = all.admit(Stage::Greeting).unwrap();
        assert!(second.enter(Stage::Talking).is_err(), "the oldest without a HELLO had to go");
        for place in [&third, &fourth] {
            place.enter(Stage::Talking).unwrap();
        }
        third.enter(Stage::Attaching).unwrap();
        fourth.enter(Stage::Activating).unwrap();
        assert!(noticed.try_recv().is_err_and(|e| e == oneshot::error::TryRecvError::Empty));
        let (_fifth, _n5) = all.admit(Stage::Talking).unwrap();
        assert!(first.enter(Stage::Talking).is_err(), "it said HELLO and then nothing for longest");
        assert_eq!(all.gauge.get(), 3);
    }

    #[test]
    fn idle_connections_without_number_keep_nobody_out() {
        let all = handshakes(64);
        let (real, _notice) = all.admit(Stage::Talking).unwrap();
        let idle: Vec<_> = (0..5_000).map(|_| all.admit(Stage::Greeting).unwrap()).collect();
        real.enter(Stage::Activating).unwrap();
        assert_eq!(all.gauge.get(), 64);
        drop(idle);
        assert_eq!(all.gauge.get(), 1);
    }

    #[test]
    fn a_want_of_descriptors_costs_idle_connections_only() {
        let all = handshakes(4);
        let (talking, _n1) = all.admit(Stage::Talking).unwrap();
        let (idle, mut noticed) = all.admit(Stage::Greeting).unwrap();
        assert!(all.places.crowd_out(Stage::Leaving));
        assert!(noticed.try_recv().is_err_and(|e| e == oneshot::error::TryRecvError::Closed));
        assert!(idle.enter(Stage::Talking).is_err());
        assert!(!all.places.crowd_out(Stage::Leaving));
        talking.enter(Stage::Activating).unwrap();
    }

    #[test]
    fn what_is_with_a_reactor_is_never_crowded_out() {
        let all = handshakes(1);
        let (place, _notice) = all.admit(Stage::Talking).unwrap();
        place.enter(Stage::Activating).unwrap();
        assert!(all.admit(Stage::Talking).is_none());
        drop(place);
        assert!(all.admit(Stage::Greeting).is_some());
    }

    #[test]
    fn a_reason_is_logged_once_and_hides_no_other() {
        let log = Reasons::default();
        assert_eq!(log.admit(Status::BAD_MAGIC), Some(0));
        assert_eq!(log.admit(Status::BAD_MAGIC), None);
        assert_eq!(log.admit(Status::TIMEOUT), Some(0));
    }
}
