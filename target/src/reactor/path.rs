//! One connection of a queue: a socket with its framing, and what is known of its health.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use twinrail_fallback_tcp::{Flushed, Inbound, Outbound, Socket};
use twinrail_protocol::limits::CONTROL_CREDIT;
use twinrail_protocol::liveness::Liveness;
use twinrail_protocol::target::PathId;
use twinrail_protocol::wire::{Control, ControlKind, Frame, Payload};
use twinrail_protocol::{ControlCredit, Epoch, Opcode, Sequence, Slot, Status, Violation, crc32c};

use super::arena::{Arena, Block, Piece};
use super::ring::{Ring, Tag, TagKind};

/// Bytes that one path may send in a turn before the others have theirs.
const SEND_BUDGET: usize = 4 << 20;
/// Replies that may wait beside one a slot: refusals of retries. More, and reading pauses.
const SPARE_REPLIES: usize = 8;

/// A reply on its way out.
#[derive(Debug)]
pub(super) struct Departing {
    pub(super) opcode: Opcode,
    /// When it was put on its way, in microseconds.
    pub(super) since_us: u64,
    /// Where its payload lies; empty for none.
    pub(super) piece: Piece,
    /// To give back afterwards; none for what lies in the slot's in-capsule buffer.
    pub(super) block: Option<Block>,
}

/// A large payload on its way in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arriving {
    pub(super) slot: Slot,
    pub(super) sequence: Sequence,
    pub(super) length: u32,
    /// It has a place; else a block of that length is still to be found, and nothing is read meanwhile.
    pub(super) placed: bool,
}

/// A path.
#[derive(Debug)]
pub(super) struct Path {
    /// What the control plane calls it.
    pub(super) id: PathId,
    /// Where it comes from: a socket that was reset doesn't know any more.
    pub(super) peer: SocketAddr,
    pub(super) socket: Socket,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound<Departing>,
    pub(super) arriving: Option<Arriving>,
    pub(super) epoch: Epoch,
    pub(super) credit: ControlCredit,
    pub(super) liveness: Liveness,
    /// Readiness was asked of the ring and hasn't come. While it is out, the socket must stay open.
    watched_in: bool,
    watched_out: bool,
    /// Since when output waits without a byte leaving, in milliseconds.
    stalled_since_ms: Option<u64>,
    pub(super) fetches: Fetches,
    /// Something came lately: read it each turn instead of watching it.
    pub(super) hot: bool,
    /// No further command is taken: the session closes, or the target drains.
    pub(super) quiet: bool,
    /// CLOSE came with this token.
    pub(super) close_token: Option<u64>,
    /// The peer was told why, and should come to read it: the socket isn't reset at once.
    pub(super) said_goodbye: bool,
}

/// Payloads that were asked for and haven't come.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    out: usize,
    /// Since when none has come, in milliseconds.
    since_ms: Option<u64>,
}

impl Fetches {
    /// One is asked for.
    pub(super) fn ask(&mut self, now_ms: u64) {
        self.out += 1;
        self.since_ms.get_or_insert(now_ms);
    }

    /// One comes.
    pub(super) fn came(&mut self, now_ms: u64) {
        self.out = self.out.saturating_sub(1);
        self.since_ms = (self.out > 0).then_some(now_ms);
    }
}

/// Why a path ends, and whether the peer is told.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// The peer broke a rule.
    Violation(Violation),
    /// The connection is gone.
    Lost(Status),
    /// We end it.
    Ours(Status),
}

impl End {
    pub(super) fn status(&self) -> Status {
        match self {
            Self::Violation(violation) => violation.status,
            Self::Lost(status) | Self::Ours(status) => *status,
        }
    }
}

impl From<Violation> for End {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl Path {
    pub(super) fn new(
        id: PathId,
        peer: SocketAddr,
        socket: Socket,
        epoch: Epoch,
        depth: u16,
        in_capsule: u32,
        liveness: Liveness,
    ) -> Self {
        Self {
            id,
            peer,
            socket,
            inbound: Inbound::new(in_capsule),
            outbound: Outbound::new(usize::from(depth) + SPARE_REPLIES),
            arriving: None,
            epoch,
            credit: ControlCredit::default(),
            liveness,
            watched_in: false,
            watched_out: false,
            stalled_since_ms: None,
            fetches: Fetches::default(),
            hot: true,
            quiet: false,
            close_token: None,
            said_goodbye: false,
        }
    }

    /// Whether a frame may be taken: not if the path is on its way out, a payload waits for memory, or the
    /// peer doesn't take its replies. Each frame causes one reply or FETCH at most.
    pub(super) fn takes_frames(&self, depth: u16) -> bool {
        let room = self.outbound.len() < usize::from(depth) + SPARE_REPLIES;
        room && !self.quiet && !self.is_blocked() && self.arriving.is_none_or(|a| a.placed)
    }

    /// Something came from the peer.
    pub(super) fn heard(&mut self, now_ms: u64) {
        self.liveness.heard(now_ms);
        self.hot = true;
    }

    /// The next probe, or the end of a path that is silent or stuck. Answers when to ask again.
    pub(super) fn tick(&mut self, now_ms: u64, stall_timeout_ms: u64) -> Result<u64, End> {
        use twinrail_protocol::liveness::Pulse;
        // An initiator that doesn't send what it was asked for keeps memory from others, as one does that takes
        // no replies (I8).
        let waits = [self.stalled_since_ms, self.fetches.since_ms].into_iter().flatten();
        if waits.min().is_some_and(|since| now_ms.saturating_sub(since) >= stall_timeout_ms) {
            return Err(End::Ours(Status::TIMEOUT));
        }
        match self.liveness.poll(now_ms) {
            Pulse::Quiet { until_ms } => Ok(until_ms),
            Pulse::Probe { token } => {
                // Without credit for one more, enough questions are open already.
                if self.credit.ask() {
                    self.control(&Control::new(ControlKind::Probe, self.epoch, token))?;
                }
                Ok(now_ms)
            }
            Pulse::Lost => Err(End::Ours(Status::TIMEOUT)),
        }
    }

    /// Queues a control frame.
    pub(super) fn control(&mut self, control: &Control) -> Result<(), End> {
        let overrun = Violation { status: Status::CONTROL_OVERRUN, detail: "more control requests than allowed" };
        if control.kind.is_answer() {
            self.credit.answer();
        }
        self.outbound.push_control(Frame::Control(*control).encode(), &[]).map_err(|_| End::from(overrun))
    }

    /// Says goodbye as well as that can be done without waiting: the frame goes out if the socket takes it. Replies
    /// that leave with it are told to `sent`.
    pub(super) fn say_goodbye(&mut self, status: Status, text: &str, arena: &Arena, sent: impl FnMut(Departing)) {
        let mut payload = [0u8; twinrail_protocol::limits::MAX_TEXT];
        let mut end = text.len().min(payload.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        payload[..end].copy_from_slice(&text.as_bytes()[..end]);
        let text = &payload[..end];
        let mut control = Control::new(ControlKind::Disconnect, self.epoch, 0);
        control.status = status;
        control.payload = Payload { length: end as u32, crc: if end == 0 { 0 } else { crc32c(text) } };
        if self.outbound.push_control(Frame::Control(control).encode(), text).is_ok() {
            let flushed = self.outbound.flush(&self.socket, SEND_BUDGET, |p| arena.bytes(p.piece), sent);
            // Where a newer path takes over, the fence doesn't wait for the peer.
            self.said_goodbye = matches!(flushed, Ok(Flushed::Empty)) && status != Status::SUPERSEDED;
        }
    }

    /// Sends what waits and tells `sent` of each reply that has left. Answers whether more can be sent at
    /// once.
    pub(super) fn flush(&mut self, arena: &Arena, now_ms: u64, sent: impl FnMut(Departing)) -> io::Result<bool> {
        if self.outbound.is_empty() {
            return Ok(false);
        }
        let before = self.outbound.len();
        let flushed = self.outbound.flush(&self.socket, SEND_BUDGET, |departing| arena.bytes(departing.piece), sent)?;
        self.stalled_since_ms = match flushed {
            Flushed::WouldBlock if self.outbound.len() == before => self.stalled_since_ms.or(Some(now_ms)),
            Flushed::WouldBlock => Some(now_ms),
            Flushed::Empty | Flushed::More => None,
        };
        Ok(flushed == Flushed::More)
    }

    /// Whether output waits for the socket.
    pub(super) fn is_blocked(&self) -> bool {
        self.stalled_since_ms.is_some()
    }

    /// Has the ring tell when the socket can be read, and written if output waits.
    pub(super) fn watch(&mut self, ring: &mut Ring, lane: usize, read: bool) -> io::Result<()> {
        let check = self.epoch.0 as u16;
        if read && !self.watched_in {
            ring.watch(self.socket.as_fd(), false, Tag::path(TagKind::Readable, lane, check))?;
            self.watched_in = true;
        }
        if self.is_blocked() && !self.watched_out {
            ring.watch(self.socket.as_fd(), true, Tag::path(TagKind::Writable, lane, check))?;
            self.watched_out = true;
        }
        Ok(())
    }

    /// Readiness came.
    pub(super) fn ready(&mut self, kind: TagKind) {
        match kind {
            TagKind::Readable => self.watched_in = false,
            _ => self.watched_out = false,
        }
        // Room for replies is also a reason to read: what lacked it was left unread.
        self.hot = true;
    }

    /// Whether the ring still holds the socket.
    pub(super) fn is_watched(&self) -> bool {
        self.watched_in || self.watched_out
    }

    /// Asks the ring to let go of the socket.
    pub(super) fn unwatch(&self, ring: &mut Ring, lane: usize) -> io::Result<()> {
        let check = self.epoch.0 as u16;
        if self.watched_in {
            ring.cancel(Tag::path(TagKind::Readable, lane, check))?;
        }
        if self.watched_out {
            ring.cancel(Tag::path(TagKind::Writable, lane, check))?;
        }
        Ok(())
    }
}

const _: () = assert!(twinrail_fallback_tcp::CONTROL_FRAMES >= 2 * CONTROL_CREDIT as usize);
