//! From one path to the next. [`Rails`](twinrail_protocol::initiator::rails::Rails) decides, the session core keeps
//! the commands; here their word is done with sockets: dial, fence, activate. Nothing of it blocks.
//!
//! ```text
//!   path lost ──▶ fence: socket reset, replies that came out of it counted
//!             ──▶ dial (a thread of its own): HELLO, WELCOME; STANDBY, STANDING beside a path that serves
//!             ──▶ ACTIVATE with the report of what is out ──▶ ACTIVATED: the connection is the path
//! ```

use twinrail_protocol::Status;
use twinrail_protocol::ids::Epoch;
use twinrail_protocol::initiator::Incoming;
use twinrail_protocol::initiator::rails::{Action, Cause, PathId};
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::wire::{
    Activate, Activated, Control, ControlKind, Frame, Handshake, Payload, Rail, Standby, VerdictKind,
};
use twinrail_protocol::{QueueId, SessionId, Violation};

use super::Queue;
use super::dialer::Dialed;
use super::line::Line;
use super::path::Path;
use crate::connect::ConnectError;
use crate::error::{PathEnd, ends_the_session};
use crate::outage::Outage;
use crate::request::Done;

/// A connection that may become the path.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) id: PathId,
    pub(super) line: Line,
    /// ACTIVATE was sent, with this epoch.
    tried: Option<Epoch>,
}

/// What the target knew of the commands that were out at the last switch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdicts {
    pub(super) unknown: u64,
    pub(super) running: u64,
    pub(super) done: u64,
}

impl Verdicts {
    fn of(activated: &Activated<'_>) -> Self {
        let mut count = Self::default();
        for verdict in activated.verdicts().flatten() {
            match verdict.kind {
                VerdictKind::Unknown => count.unknown += 1,
                VerdictKind::Running => count.running += 1,
                VerdictKind::Done => count.done += 1,
            }
        }
        count
    }
}

/// What came on a candidate.
enum Heard {
    Nothing,
    Activated,
    /// It won't become the path.
    Failed(PathEnd),
}

impl Queue {
    /// Whether there are connections beside the path, or should be.
    #[inline]
    pub(super) fn is_restless(&self) -> bool {
        !self.path.is_open() || self.standby.is_some() || self.dialer.is_busy()
    }

    /// Takes what has come on connections that aren't the path.
    pub(super) fn listen(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        while let Some(dialed) = self.dialer.take() {
            self.dialed(dialed)?;
        }
        self.hear_standby()?;
        self.hear_attempt(done)
    }

    fn dialed(&mut self, Dialed { path, result }: Dialed) -> Result<(), PathEnd> {
        let wanted = self.dialing.take_if(|dialing| *dialing == path).is_some();
        match result {
            Ok(socket) if wanted => {
                self.metrics.dials.inc();
                self.standby = Some(Candidate { id: path, line: Line::new(socket), tried: None });
                self.rails.dialed(path, Epoch(0), self.now_us());
            }
            // Nobody waits for it any more.
            Ok(_) => {}
            Err(error) => {
                self.metrics.dials_failed.inc();
                let mut retry_after_us = 0;
                if let ConnectError::Refused { status, ref text, retry_after_ms, .. } = error {
                    self.refused(status, text)?;
                    retry_after_us = u64::from(retry_after_ms) * 1_000;
                }
                tracing::debug!(session = %self.session.id(), queue = %self.id, %error, "no connection");
                self.trouble = Some(error.to_string());
                self.held_since_us = None;
                self.rails.dial_failed(path, retry_after_us, self.now_us());
            }
        }
        Ok(())
    }

    /// The target has refused something of this session: an error if that is its last word.
    fn refused(&self, status: Status, text: &str) -> Result<(), PathEnd> {
        match status {
            // CLOSED was lost with its path.
            Status::SESSION_LOST if self.session.is_closing() => return Err(PathEnd::Closed),
            // It is still to come on the path.
            Status::CLOSED if self.session.is_closing() => return Ok(()),
            _ => {}
        }
        match ends_the_session(status) {
            true => Err(PathEnd::NotTakenBack { status, text: text.to_owned(), lost: Box::new(self.lost.clone()) }),
            false => Ok(()),
        }
    }

    fn hear_standby(&mut self) -> Result<(), PathEnd> {
        let now_us = self.now_us();
        let Some(standby) = &mut self.standby else { return Ok(()) };
        let path = standby.id;
        let end = loop {
            let control = match standby.line.hear() {
                Ok(None) => match standby.line.flush() {
                    Ok(()) => return Ok(()),
                    Err(end) => break end,
                },
                Ok(Some((Frame::Control(control), payload))) => match control.kind {
                    ControlKind::Disconnect => break disconnected(&control, payload),
                    _ => control,
                },
                Ok(Some((frame, payload))) => break refusal(&frame, payload),
                Err(end) => break end,
            };
            match control.kind {
                ControlKind::Probe => {
                    let answer = Control::new(ControlKind::ProbeReply, Epoch(0), control.token);
                    if let Err(end) = standby.line.say(&Frame::Control(answer).encode()) {
                        break end;
                    }
                }
                ControlKind::ProbeReply => self.rails.probe_answered(path, control.token, now_us),
                ControlKind::PathLost => self.rails.peer_says_lost(control.epoch, now_us),
                _ => break unexpected("a control frame that has no place on a standby path"),
            }
        };
        if let PathEnd::Disconnected { status, text } = &end {
            self.refused(*status, text)?;
        }
        tracing::debug!(session = %self.session.id(), queue = %self.id, %end, "a standby path ended");
        self.drop_standby(path);
        self.rails.lost(path, cause_of(&end), now_us);
        Ok(())
    }

    fn drop_standby(&mut self, path: PathId) {
        if let Some(standby) = self.standby.take_if(|standby| standby.id == path) {
            standby.line.abort();
        }
    }

    // ---- activation

    fn try_activate(&mut self, path: PathId) {
        let Some(mut attempt) = self.standby.take_if(|standby| standby.id == path) else {
            return self.rails.activation_failed(path, self.now_us());
        };
        let epoch = self.core.next_epoch();
        let mut report = Vec::with_capacity(usize::from(self.core.outstanding()) * HEADER_LEN);
        for command in self.core.report(path.rail) {
            report.extend_from_slice(&Frame::Command(command).encode());
        }
        let (session, secret) = (self.session.id(), self.session.secret());
        let mut activate = Activate::new(session, secret, self.id, path.rail, epoch).with_report(&report);
        activate.instance = self.core.instance();
        (activate.depth, activate.in_capsule) = (self.core.options().depth, self.core.options().in_capsule);
        let mut bytes = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
        // A report of every slot fits.
        let length = Handshake::Activate(activate).encode(&mut bytes).unwrap_or(0);
        attempt.tried = Some(epoch);
        let said = attempt.line.say(&bytes[..length]);
        self.attempt = Some(attempt);
        if let Err(end) = said {
            self.attempt_failed(path, &end);
        }
    }

    fn attempt_failed(&mut self, path: PathId, end: &PathEnd) {
        tracing::debug!(session = %self.session.id(), queue = %self.id, %end, "an activation failed");
        self.trouble = Some(end.to_string());
        self.held_since_us = None;
        self.rails.activation_failed(path, self.now_us());
    }

    fn hear_attempt(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        let Some(path) = self.attempt.as_ref().map(|attempt| attempt.id) else { return Ok(()) };
        match self.hear_answer() {
            Heard::Nothing => {}
            Heard::Activated => self.path_begins(done),
            Heard::Failed(end) => {
                match &end {
                    PathEnd::Disconnected { status, text } => self.refused(*status, text)?,
                    PathEnd::Violation(violation) => self.refused(violation.status, violation.detail)?,
                    _ => {}
                }
                self.attempt_failed(path, &end);
            }
        }
        Ok(())
    }

    fn hear_answer(&mut self) -> Heard {
        let Some(Candidate { line, tried: Some(epoch), .. }) = &mut self.attempt else { return Heard::Nothing };
        if let Err(end) = line.flush() {
            return Heard::Failed(end);
        }
        loop {
            let (kind, expected, payload) = match line.hear() {
                Ok(None) => return Heard::Nothing,
                Ok(Some((Frame::Handshake { kind, payload: expected }, payload))) => (kind, expected, payload),
                Ok(Some((Frame::Control(control), payload))) => match control.kind {
                    ControlKind::Disconnect => return Heard::Failed(disconnected(&control, payload)),
                    // Said before ACTIVATE had come. Nothing is sent until that is answered.
                    _ => continue,
                },
                Ok(Some(_)) => return Heard::Failed(unexpected("a frame that has no place before ACTIVATED")),
                Err(end) => return Heard::Failed(end),
            };
            let activated = match Handshake::decode(kind, expected, payload) {
                Ok(Handshake::Activated(activated)) => activated,
                Ok(Handshake::Refused(refused)) => {
                    let (status, text) = (refused.status, refused.text.to_owned());
                    return Heard::Failed(PathEnd::Disconnected { status, text });
                }
                Ok(_) => return Heard::Failed(unexpected("another answer to ACTIVATE than ACTIVATED")),
                Err(fault) => return Heard::Failed(Violation::from(fault).into()),
            };
            self.verdicts = Verdicts::of(&activated);
            let turned = &mut self.turned;
            return match self.core.activate(*epoch, &activated, |incoming| turned.push(incoming)) {
                Ok(()) => Heard::Activated,
                Err(violation) => Heard::Failed(violation.into()),
            };
        }
    }

    /// ACTIVATED came, and the core took it.
    fn path_begins(&mut self, done: &mut impl FnMut(Done)) {
        let Some(Candidate { id, line, .. }) = self.attempt.take() else { return };
        self.path = Path::new(id, line.into_socket(), self.core.options());
        let Verdicts { unknown, running, done: cached } = self.verdicts;
        self.metrics.path_began([unknown, running, cached]);
        self.rails.activated(id, self.now_us());
        // What was told before the path was lost is told again, and counts.
        let mut turned = std::mem::take(&mut self.turned);
        let completes = turned.iter().any(|incoming| matches!(incoming, Incoming::Complete(_)));
        for incoming in turned.drain(..) {
            match incoming {
                // A verdict brings no payload.
                Incoming::Receive { .. } | Incoming::Stale => {}
                other => self.replied(other, done),
            }
        }
        self.turned = turned;
        if completes {
            self.rails.completed(self.now_us());
        }
        if self.closing {
            self.say_close();
        }
    }

    // ---- the path policy

    /// The path has ended: an error if the session has with it.
    pub(super) fn path_lost(&mut self, end: PathEnd) -> Result<(), PathEnd> {
        if end.is_final() {
            return Err(end);
        }
        let (session, queue, path) = (self.session.id(), self.id, self.path.id);
        tracing::debug!(%session, %queue, %end, "the path is lost");
        let cause = cause_of(&end);
        self.path_end = Some(end);
        self.rails.lost(path, cause, self.now_us());
        Ok(())
    }

    /// Does what the path policy says.
    pub(super) fn follow_rails(&mut self, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        let now_us = self.now_us();
        // What is left unread may be an answer.
        if !self.path.unread {
            self.rails.judge(now_us);
        }
        while let Some(action) = self.rails.poll(now_us) {
            match action {
                Action::Dial { path } => self.dial(path),
                Action::Close { path } => {
                    self.dialing.take_if(|dialing| *dialing == path);
                    self.drop_standby(path);
                }
                Action::Fence { path, cause } => self.fence(path, cause, done)?,
                Action::Activate { path, .. } => self.try_activate(path),
                Action::Probe { path, token } => self.probe(path, token)?,
                Action::Say { path, lost } => self.say_lost(path, lost),
                // One rail: nothing to return to.
                Action::AskTurn | Action::EndTurn => {}
                Action::Alarm { since_us } => self.alarm(since_us),
                Action::AlarmOver { lasted_us } => {
                    let (session, queue, lasted_ms) = (self.session.id(), self.id, lasted_us / 1_000);
                    tracing::info!(%session, %queue, lasted_ms, "the target answers again");
                }
                Action::Serving { from, to, cause, detection_us, blackout_us } => {
                    self.switched(from, to, cause, detection_us, blackout_us);
                }
                Action::GiveUp => {
                    let (limit_ms, lost, attempt) = (self.fail_fast_ms, self.last_end(), self.trouble.take());
                    return Err(PathEnd::FailFast { limit_ms, lost: Box::new(lost), attempt });
                }
            }
        }
        self.next_rails_ns = self.rails.deadline_us().saturating_mul(1_000);
        self.tell_outage();
        Ok(())
    }

    /// Tells the session since when commands are held, and why.
    fn tell_outage(&mut self) {
        let since_us = self.rails.held_since_us();
        if since_us == self.held_since_us {
            return;
        }
        self.held_since_us = since_us;
        let outage = since_us.map(|since_us| {
            let reason = self.trouble.clone().unwrap_or_else(|| self.last_end().to_string());
            Outage { since_ns: since_us.saturating_mul(1_000), reason }
        });
        self.session.outages().tell(usize::from(self.id.0), outage);
    }

    fn last_end(&self) -> PathEnd {
        match self.path.is_open() {
            true => PathEnd::Silent,
            false => self.lost.clone(),
        }
    }

    fn dial(&mut self, path: PathId) {
        // Beside a path that serves it may have to wait for its turn, and shows meanwhile that it works.
        let standby = self.path.is_open().then(|| Standby {
            session: self.session.id(),
            secret: self.session.secret(),
            queue: self.id,
            rail: path.rail,
        });
        match self.dialer.dial(path, standby) {
            true => self.dialing = Some(path),
            false => self.rails.dial_failed(path, 0, self.now_us()),
        }
    }

    /// Nothing of the path acts any more when this is over; replies that were there count.
    fn fence(&mut self, path: PathId, cause: Cause, done: &mut impl FnMut(Done)) -> Result<(), PathEnd> {
        if let Some(attempt) = self.attempt.take_if(|attempt| attempt.id == path) {
            attempt.line.abort();
        } else if self.path.id == path && self.path.is_open() {
            let end = match self.path_end.take() {
                Some(end) => end,
                None => self.drained(cause, done)?,
            };
            self.close_path(&end);
            self.flights.path_lost(self.now_ns, &mut self.metrics, done);
            self.core.fence();
            self.lost = end;
        }
        self.rails.fenced(path, self.now_us());
        Ok(())
    }

    /// Takes what has arrived on a path that is left although its connection stands.
    fn drained(&mut self, cause: Cause, done: &mut impl FnMut(Done)) -> Result<PathEnd, PathEnd> {
        match self.receive(done) {
            Err(end) if end.is_final() => Err(end),
            // That it ends now, or has something wrong in it, is not why it is left.
            _ if cause == Cause::PeerSaid => Ok(PathEnd::LostByTarget),
            _ => Ok(PathEnd::Silent),
        }
    }

    fn probe(&mut self, path: PathId, token: u64) -> Result<(), PathEnd> {
        if let Some(standby) = self.standby.as_mut().filter(|standby| standby.id == path) {
            let probe = Control::new(ControlKind::Probe, Epoch(0), token);
            // What is wrong with it is found when it is listened to.
            let _said = standby.line.say(&Frame::Control(probe).encode());
        } else if self.path.id == path && self.path.is_open() && self.path.control_credit.ask() {
            self.metrics.probes.inc();
            let said = self.answer(Control::new(ControlKind::Probe, self.core.epoch(), token));
            said.or_else(|end| self.path_lost(end))?;
        }
        Ok(())
    }

    fn say_lost(&mut self, path: PathId, lost: Epoch) {
        if let Some(standby) = self.standby.as_mut().filter(|standby| standby.id == path) {
            let _said = standby.line.say(&Frame::Control(Control::new(ControlKind::PathLost, lost, 0)).encode());
        }
    }

    fn alarm(&mut self, since_us: u64) {
        let (session, queue, in_flight) = (self.session.id(), self.id, self.in_flight());
        let since_ms = self.now_us().saturating_sub(since_us) / 1_000;
        if self.path.is_open() {
            self.metrics.silence.inc();
            return tracing::warn!(%session, %queue, in_flight, since_ms, "the target is silent; its commands are held");
        }
        self.metrics.no_path.inc();
        let (lost, trouble) = (&self.lost, self.trouble.as_deref().unwrap_or("the target doesn't answer"));
        tracing::warn!(%session, %queue, in_flight, since_ms, %lost, trouble, "no path; commands are held");
    }

    fn switched(&mut self, from: Option<Rail>, to: Rail, cause: Cause, detection_us: u64, blackout_us: u64) {
        self.trouble = None;
        let Some(from) = from else { return };
        let (from, to, cause) = (from.name(), to.name(), cause.name());
        self.session.metrics().switched(from, to, cause, blackout_us);
        let (session, queue, lost): (SessionId, QueueId, _) = (self.session.id(), self.id, &self.lost);
        let Verdicts { unknown: resent, running, done: cached } = self.verdicts;
        tracing::info!(
            %session, %queue, from, to, cause, %lost, detection_us, blackout_us, resent, running, cached,
            "the path was replaced"
        );
    }
}

/// What the path policy calls it.
fn cause_of(end: &PathEnd) -> Cause {
    match end {
        PathEnd::Violation(_) => Cause::Violation,
        PathEnd::LostByTarget => Cause::PeerSaid,
        _ => Cause::Disconnected,
    }
}

fn unexpected(detail: &'static str) -> PathEnd {
    Violation { status: Status::UNEXPECTED_FRAME, detail }.into()
}

fn disconnected(control: &Control, payload: &[u8]) -> PathEnd {
    match control.payload.text(payload) {
        Ok(text) => PathEnd::Disconnected { status: control.status, text: text.to_owned() },
        Err(fault) => Violation::from(fault).into(),
    }
}

/// A handshake frame that came unasked: a word of the target on why it ends the connection, or nonsense.
fn refusal(frame: &Frame, payload: &[u8]) -> PathEnd {
    let Frame::Handshake { kind, payload: expected @ Payload { .. } } = *frame else {
        return unexpected("a frame that has no place on a standby path");
    };
    match Handshake::decode(kind, expected, payload) {
        Ok(Handshake::Refused(refused)) => {
            PathEnd::Disconnected { status: refused.status, text: refused.text.to_owned() }
        }
        Ok(_) => unexpected("an answer to nothing"),
        Err(fault) => Violation::from(fault).into(),
    }
}
