//! Keeps the session of queues that nobody polls.
//!
//! A queue moves only while its owner polls it. An owner that is busy elsewhere for long loses its connection, since
//! nobody answers the target's probes; and with the lease it would lose the session. So a thread looks now and then
//! whether any queue was polled, and if none was it holds a connection of its own, which stands by and answers for the
//! session until they are polled again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use twinrail_protocol::ids::Epoch;
use twinrail_protocol::wire::{Control, ControlKind, Frame, Standby};

use crate::connect::{ConnectError, Connection, Route};
use crate::doorbell::Doorbell;
use crate::error::{PathEnd, ends_the_session};
use crate::queue::line::Line;

/// How often it looks at most: well within a lease (60 s), and rare enough to cost nothing.
const LONGEST: Duration = Duration::from_secs(15);

/// And at least, however short the lease.
const SHORTEST: Duration = Duration::from_millis(50);

/// The thread of one session; ends with this.
#[derive(Debug)]
pub(crate) struct Keeper {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// A queue was polled since the last look.
    polled: AtomicBool,
    over: AtomicBool,
    doorbell: Doorbell,
}

impl Keeper {
    /// Begins to look after a session that lives for `lease` without a connection.
    pub(crate) fn start(route: Arc<Route>, standby: Standby, lease: Duration) -> Result<Self, ConnectError> {
        let doorbell =
            Doorbell::new().map_err(|source| ConnectError::System { what: "no event descriptor", source })?;
        let shared = Shared { polled: AtomicBool::new(true), over: AtomicBool::new(false), doorbell };
        let shared = Arc::new(shared);
        let (there, period) = (Arc::clone(&shared), (lease / 4).clamp(SHORTEST, LONGEST));
        let thread = thread::Builder::new().name("twinrail-keeper".to_owned());
        thread
            .spawn(move || there.run(&route, &standby, period))
            .map_err(|source| ConnectError::System { what: "no thread to keep the session", source })?;
        Ok(Self { shared })
    }

    /// A queue is polled.
    #[inline]
    pub(crate) fn polled(&self) {
        // Mostly it is known already, and a look disturbs no other thread.
        if !self.shared.polled.load(Ordering::Relaxed) {
            self.shared.polled.store(true, Ordering::Relaxed);
        }
    }

    /// There is nothing to keep any more.
    pub(crate) fn stop(&self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.shared.doorbell.ring();
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn run(&self, route: &Route, standby: &Standby, period: Duration) {
        let mut line: Option<Line> = None;
        let mut next_look = Instant::now() + period;
        while !self.over.load(Ordering::SeqCst) {
            if line.as_mut().is_some_and(|line| answer(line).is_err()) {
                line = None;
            }
            let left = next_look.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                self.sleep(line.as_ref(), left);
                continue;
            }
            next_look = Instant::now() + period;
            if self.polled.swap(false, Ordering::Relaxed) {
                line = None;
            } else if line.is_none() {
                match stand_by(route, standby) {
                    Ok(standing) => line = Some(standing),
                    // The queues will hear of it.
                    Err(ConnectError::Refused { status, .. }) if ends_the_session(status) => return,
                    Err(error) => {
                        tracing::debug!(session = %standby.session, %error, "nobody polls, and no connection")
                    }
                }
            }
        }
    }

    fn sleep(&self, line: Option<&Line>, time: Duration) {
        if !self.doorbell.lie_down() {
            return self.doorbell.answer();
        }
        let timeout = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let bell = || PollFd::new(&self.doorbell, PollFlags::IN);
        let mut fds = [bell(), line.map_or_else(bell, |line| PollFd::new(line.socket(), PollFlags::IN))];
        // An error (a signal, no memory) is as good as a short sleep.
        let _count = poll(&mut fds, Some(&timeout));
        self.doorbell.get_up(!fds[0].revents().is_empty());
        self.doorbell.answer();
    }
}

fn stand_by(route: &Route, standby: &Standby) -> Result<Line, ConnectError> {
    let mut connection = Connection::dial(route)?;
    connection.stand_by(standby)?;
    Ok(Line::new(connection.into_socket(route)?))
}

/// Answers what the target asks.
fn answer(line: &mut Line) -> Result<(), PathEnd> {
    line.flush()?;
    while let Some((frame, _)) = line.hear()? {
        match frame {
            Frame::Control(Control { kind: ControlKind::Probe, token, .. }) => {
                line.say(&Frame::Control(Control::new(ControlKind::ProbeReply, Epoch(0), token)).encode())?;
            }
            // The queue's path is lost: that is what this is for.
            Frame::Control(Control { kind: ControlKind::PathLost, .. }) => {}
            _ => return Err(PathEnd::ClosedByTarget),
        }
    }
    Ok(())
}
