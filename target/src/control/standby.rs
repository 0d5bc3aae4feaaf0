//! A connection that stands by to become the path of its queue (SPEC.md, "STANDBY"): authenticated, kept warm, and
//! told at once when the queue's path is lost.
//!
//! The socket is looked after here, but whether the queue lives is for its reactor to say: it answers the probes.

use std::io;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::liveness::{Liveness, Pulse};
use twinrail_protocol::target::PathId;
use twinrail_protocol::wire::{Control, ControlKind, Frame, Handshake, Payload, Standby, Standing};
use twinrail_protocol::{ControlCredit, Epoch, QueueId, SessionId, Status, crc32c};

use super::handshake::{Host, check_rail};
use super::refusal::Refusal;
use super::wire::{Connection, Failure};
use crate::reactor::mailbox::{FromReactor, Mailbox, Message, ToReactor};

/// What a reactor may have told and isn't passed on yet. More than the peer's control credit and one word on the path.
const TOLD: usize = 16;

/// How a standby goes on.
pub(super) enum Outcome {
    /// ACTIVATE came.
    Activate,
    /// It is over, and there is nothing to say.
    Over,
}

/// A connection that stands by. Counts as a path of its session until it is dropped.
pub(super) struct Standee<'a> {
    host: &'a Host,
    session: SessionId,
    queue: QueueId,
    path: PathId,
    mailbox: &'a Mailbox,
    told: mpsc::Receiver<FromReactor>,
    /// Ends when a newer connection took its place.
    ousted: oneshot::Receiver<()>,
    credit: ControlCredit,
    liveness: Liveness,
    begun: Instant,
    /// The frame that is being read.
    frame: Vec<u8>,
    got: usize,
}

impl<'a> Standee<'a> {
    /// Answers STANDBY.
    pub(super) async fn begin(host: &'a Host, c: &mut Connection, standby: &Standby) -> Result<Self, Failure> {
        let Standby { session, queue, rail, .. } = *standby;
        check_rail(rail)?;
        let (tell, told) = mpsc::channel(TOLD);
        let (path, mailbox, ousted) = host.sessions.stand_by(standby, tell)?;
        let mut standee = Self {
            host,
            session,
            queue,
            path,
            mailbox,
            told,
            ousted,
            credit: ControlCredit::default(),
            liveness: Liveness::new(host.probe_period_ms, 0),
            begun: Instant::now(),
            frame: vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD],
            got: 0,
        };
        match standee.told.recv().await {
            Some(FromReactor::Stands { epoch, instance }) => {
                c.send(&Handshake::Standing(Standing { epoch, instance })).await?;
                Ok(standee)
            }
            // The session has ended meanwhile, or the target does.
            _ => Err(Refusal::new(Status::SESSION_LOST, format!("there is no session {session} (any more)")).into()),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Stands by until ACTIVATE comes or the connection is over.
    pub(super) async fn stand(&mut self, c: &mut Connection) -> Result<Outcome, Failure> {
        loop {
            let rest = match self.liveness.poll(self.now_ms()) {
                Pulse::Quiet { until_ms } => Duration::from_millis(until_ms.saturating_sub(self.now_ms()).max(1)),
                Pulse::Probe { token } => {
                    if self.credit.ask() {
                        say(c, &Control::new(ControlKind::Probe, Epoch(0), token), "")?;
                    }
                    continue;
                }
                Pulse::Lost => return Ok(Outcome::Over),
            };
            tokio::select! {
                told = self.told.recv() => match told {
                    Some(FromReactor::Alive { token }) => {
                        self.credit.answer();
                        say(c, &Control::new(ControlKind::ProbeReply, Epoch(0), token), "")?;
                    }
                    Some(FromReactor::PathLost { epoch }) => {
                        say(c, &Control::new(ControlKind::PathLost, epoch, 0), "")?;
                    }
                    Some(FromReactor::Stands { .. }) => {}
                    Some(FromReactor::Ended { status }) => {
                        say_goodbye(c, status, "the session has ended")?;
                        return Ok(Outcome::Over);
                    }
                    // The reactor has ended, and the target with it.
                    None => return Ok(Outcome::Over),
                },
                _ = &mut self.ousted => {
                    say_goodbye(c, Status::SUPERSEDED, "a newer connection needs the place of this standby")?;
                    return Ok(Outcome::Over);
                }
                frame = read_frame(&c.stream, &mut self.frame, &mut self.got) => match frame? {
                    Frame::Control(control) => {
                        if let Some(over) = self.control(&control)? {
                            return Ok(over);
                        }
                    }
                    Frame::Handshake { kind: 0x45, .. } => return Ok(Outcome::Activate),
                    _ => {
                        let text = "a frame that has no place on a standby";
                        return Err(Refusal::new(Status::UNEXPECTED_FRAME, text).into());
                    }
                },
                () = tokio::time::sleep(rest) => {}
            }
        }
    }

    fn control(&mut self, control: &Control) -> Result<Option<Outcome>, Failure> {
        let wrong = |text: &str| Failure::from(Refusal::new(Status::UNEXPECTED_FRAME, text.to_owned()));
        self.liveness.heard(self.now_ms());
        match control.kind {
            ControlKind::Probe => {
                self.credit.request_came(0).map_err(|violation| wrong(violation.detail))?;
                self.ask(ToReactor::Probe { token: control.token });
            }
            ControlKind::ProbeReply => {
                self.credit.answer_came().map_err(|violation| wrong(violation.detail))?;
                self.liveness.answered(self.now_ms());
            }
            ControlKind::PathLost => self.ask(ToReactor::PathLost { epoch: control.epoch }),
            ControlKind::Disconnect => return Ok(Some(Outcome::Over)),
            _ => return Err(wrong("a control frame that has no place on a standby")),
        }
        Ok(None)
    }

    fn ask(&self, what: ToReactor) {
        let (session, queue, path) = (self.session, self.queue, self.path);
        self.mailbox.send(Message::Standby { session, queue, path, what });
    }

    /// The ACTIVATE that [`Self::stand`] has read, if it is about the queue that the connection stands by for.
    pub(super) fn activate(&self) -> Result<Handshake<'_>, Failure> {
        let header = self.frame.first_chunk().map(Frame::decode);
        let Some(Ok(Frame::Handshake { kind, payload })) = header else {
            return Err(Refusal::new(Status::MALFORMED, "no ACTIVATE").into());
        };
        let frame = Handshake::decode(kind, payload, &self.frame[HEADER_LEN..HEADER_LEN + payload.length as usize])?;
        match frame {
            Handshake::Activate(activate) if (activate.session, activate.queue) != (self.session, self.queue) => {
                let text = "a standby can only become a path of the queue that it stands by for";
                Err(Refusal::new(Status::BAD_PARAMETER, text).into())
            }
            frame => Ok(frame),
        }
    }
}

impl Drop for Standee<'_> {
    fn drop(&mut self) {
        self.ask(ToReactor::Leaves);
        self.host.sessions.standby_lost(self.session, self.path);
    }
}

fn say_goodbye(c: &Connection, status: Status, text: &str) -> Result<(), Failure> {
    let mut control = Control::new(ControlKind::Disconnect, Epoch(0), 0);
    control.status = status;
    say(c, &control, text)
}

/// Doesn't wait: a peer that doesn't take the little that is said on a standby has no use for one, and one whose
/// place is gone would keep its socket (I8).
fn say(c: &Connection, control: &Control, text: &str) -> Result<(), Failure> {
    let payload = match text {
        "" => Payload::default(),
        text => Payload { length: text.len() as u32, crc: crc32c(text.as_bytes()) },
    };
    let control = Control { payload, ..*control };
    let bytes = [&Frame::Control(control).encode()[..], text.as_bytes()].concat();
    match c.stream.try_write(&bytes)? == bytes.len() {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::WouldBlock).into()),
    }
}

/// The next frame, whole in `frame`; may be given up at any time and begun again.
async fn read_frame(stream: &TcpStream, frame: &mut [u8], got: &mut usize) -> Result<Frame, Failure> {
    loop {
        let mut end = HEADER_LEN;
        if *got >= HEADER_LEN
            && let Some(header) = frame.first_chunk()
        {
            let decoded = Frame::decode(header)?;
            end = HEADER_LEN + decoded.following() as usize;
            if !matches!(decoded, Frame::Handshake { .. } | Frame::Control(_)) {
                // Whatever follows it isn't read.
                end = HEADER_LEN;
            }
            if *got >= end {
                *got = 0;
                return Ok(decoded);
            }
        }
        stream.readable().await?;
        // Bounded by `Frame::decode`.
        let room = frame.get_mut(*got..end).unwrap_or_default();
        match stream.try_read(room) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => *got += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
}
