//! The 64-byte header that every frame begins with (SPEC.md, "Frames").
//!
//! ```text
//!  0  kind u8 | opcode or code u8 | flags u16 | slot u16 | status or grant seen u16
//!  8  epoch u64
//! 16  sequence u64
//! 24  28 bytes that depend on the kind
//! 52  payload length u32 | payload CRC32C u32 | CRC32C of bytes 0..60 u32
//! ```
//!
//! A header is copied out of the receive buffer once, then decoded from the copy: nothing that the peer
//! could still change is read twice (I9).

use crate::ids::{Epoch, GrantNumber, Sequence, Slot};
use crate::limits::{HEADER_LEN, MAX_CONTROL_PAYLOAD, MAX_HANDSHAKE_PAYLOAD, MAX_NAME, MAX_TEXT, MAX_TRANSFER_RANGE};
use crate::opcode::{Flags, Opcode};
use crate::status::Status;
use crate::wire::codec::{Reader, Writer, printable};
use crate::wire::fault::Fault;

/// The protocol version that this crate speaks.
pub const VERSION: u16 = 1;

/// An encoded header.
pub type HeaderBytes = [u8; HEADER_LEN];

/// Length and checksum of the payload that belongs to a frame, wherever its bytes travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// Length in bytes.
    pub length: u32,
    /// CRC32C of the bytes; 0 for an empty payload.
    pub crc: u32,
}

impl Payload {
    /// `bytes`, received for this payload, as text: the name in HELLO, the reason in DISCONNECT.
    ///
    /// # Errors
    /// [`Fault::ControlCrc`] when they don't match the checksum, [`Fault::Malformed`] when they aren't whole
    /// or aren't UTF-8 without control characters.
    pub fn text<'a>(&self, bytes: &'a [u8]) -> Result<&'a str, Fault> {
        if bytes.len() != self.length as usize {
            return Err(Fault::Malformed("a text isn't whole"));
        }
        if crate::crc32c(bytes) != self.crc {
            return Err(Fault::ControlCrc);
        }
        printable(bytes)
    }
}

/// The rail that a connection runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Rail(pub u8);

impl Rail {
    /// TCP.
    pub const TCP: Self = Self(1);
    /// RDMA over a reliable-connected queue pair.
    pub const RDMA: Self = Self(2);

    /// The name used in logs and metric labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TCP => "tcp",
            Self::RDMA => "rdma",
            _ => "unknown",
        }
    }
}

/// Where a command's payload lies in the initiator's memory, for a rail that reaches it by remote
/// access. All zeros on TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Remote address.
    pub address: u64,
    /// Remote key.
    pub key: u32,
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// What to do.
    pub opcode: Opcode,
    /// How.
    pub flags: Flags,
    /// The slot it occupies until its reply.
    pub slot: Slot,
    /// The number of the grant that the initiator keeps to: acknowledges it, and all before it.
    pub grant_seen: GrantNumber,
    /// Epoch of the path it is sent on.
    pub epoch: Epoch,
    /// The slot's sequence.
    pub sequence: Sequence,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub length: u64,
    /// Where the payload is, or is wanted.
    pub placement: Placement,
    /// The payload that the command brings.
    pub payload: Payload,
}

impl Default for Command {
    fn default() -> Self {
        Self {
            opcode: Opcode::READ,
            flags: Flags::NONE,
            slot: Slot(0),
            grant_seen: GrantNumber(0),
            epoch: Epoch(0),
            sequence: Sequence(0),
            offset: 0,
            length: 0,
            placement: Placement::default(),
            payload: Payload::default(),
        }
    }
}

impl Command {
    /// Whether `retry` repeats this command: the same opcode, flags, range and payload (I1). Where the
    /// payload lies and whether it follows may differ.
    #[must_use]
    pub fn is_repeated_by(&self, retry: &Self) -> bool {
        self.opcode == retry.opcode
            && self.flags.without(Flags::PAYLOAD_FOLLOWS) == retry.flags.without(Flags::PAYLOAD_FOLLOWS)
            && (self.offset, self.length) == (retry.offset, retry.length)
            && self.payload == retry.payload
    }
}

/// A statement of what the target allows, absolute: it holds until a later one is heard. Frames overtake one
/// another, so that it is the number which says what is later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credits {
    /// Slots below this number may be used; at least 1.
    pub granted_slots: u16,
    /// Counts the changes of the other two.
    pub number: GrantNumber,
    /// Bytes of payload above the in-capsule size that unanswered commands may have brought unasked.
    pub data_window: u32,
}

/// The reply to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The command's opcode.
    pub opcode: Opcode,
    /// [`Flags::PAYLOAD_FOLLOWS`] or none.
    pub flags: Flags,
    /// The command's slot.
    pub slot: Slot,
    /// How it ended.
    pub status: Status,
    /// Epoch of the path it is sent on.
    pub epoch: Epoch,
    /// The command's sequence.
    pub sequence: Sequence,
    /// A number as the opcode defines it; else 0.
    pub result: u64,
    /// What the target allows from here on.
    pub credits: Credits,
    /// The payload that the reply brings.
    pub payload: Payload,
}

impl Reply {
    /// The reply to `command` that says OK and brings nothing.
    #[must_use]
    pub fn to(command: &Command, epoch: Epoch, credits: Credits) -> Self {
        let Command { opcode, slot, sequence, .. } = *command;
        let (flags, status, payload) = (Flags::NONE, Status::OK, Payload::default());
        Self { opcode, flags, slot, status, epoch, sequence, result: 0, credits, payload }
    }
}

/// FETCH (target asks for the payload of a slot) and DATA (the payload, in answer to it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The command's opcode.
    pub opcode: Opcode,
    /// The command's slot.
    pub slot: Slot,
    /// Epoch of the path it is sent on.
    pub epoch: Epoch,
    /// The command's sequence.
    pub sequence: Sequence,
    /// The command's payload.
    pub payload: Payload,
}

/// Kinds of control frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ControlKind {
    /// Are you there? Either side; answered by [`ControlKind::ProbeReply`] with the same token.
    Probe,
    /// Answer to a probe, by the thread that owns the queue.
    ProbeReply,
    /// Target to initiator: something changed; answered by [`ControlKind::EventSeen`].
    Event,
    /// Answer to an event; for a change of credit it is sent once the new grant is kept to.
    EventSeen,
    /// Initiator to target: end the session; answered by [`ControlKind::Closed`] when I2 is met.
    Close,
    /// The session has ended, and everything it gave to storage has ended.
    Closed,
    /// Either side: this connection ends now, and why. No answer.
    Disconnect,
    /// Either side, on a standby path: the path with this epoch is lost. No answer.
    PathLost,
}

impl ControlKind {
    const ALL: [(Self, u8); 8] = [
        (Self::Probe, 0x10),
        (Self::ProbeReply, 0x11),
        (Self::Event, 0x12),
        (Self::EventSeen, 0x13),
        (Self::Close, 0x14),
        (Self::Closed, 0x15),
        (Self::Disconnect, 0x16),
        (Self::PathLost, 0x17),
    ];

    /// Whether it is owed an answer, and so takes control credit.
    #[must_use]
    pub fn is_request(self) -> bool {
        matches!(self, Self::Probe | Self::Event | Self::Close)
    }

    /// Whether it answers a request.
    #[must_use]
    pub fn is_answer(self) -> bool {
        matches!(self, Self::ProbeReply | Self::EventSeen | Self::Closed)
    }

    /// The kind with this number on the wire.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.iter().find(|(_, n)| *n == number).map(|(kind, _)| *kind)
    }

    /// The kind's number on the wire.
    #[must_use]
    pub fn number(self) -> u8 {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or(0, |(_, n)| *n)
    }
}

/// What an event tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EventCode(pub u8);

impl EventCode {
    /// No event: every control frame but EVENT and EVENT_SEEN.
    pub const NONE: Self = Self(0);
    /// The volume has another size; `value` is the new one in bytes.
    pub const RESIZED: Self = Self(1);
    /// The target leaves; `value` says in how many milliseconds it is expected back.
    pub const DRAINING: Self = Self(2);
    /// The credits changed.
    pub const CREDIT: Self = Self(3);
}

/// A control frame. Fields that the kind doesn't use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// Kind.
    pub kind: ControlKind,
    /// What an event tells.
    pub code: EventCode,
    /// Epoch of the path it is sent on; for PATH_LOST the epoch that was lost.
    pub epoch: Epoch,
    /// Why (DISCONNECT, CLOSED).
    pub status: Status,
    /// Ties an answer to its request.
    pub token: u64,
    /// Credits (EVENT of CREDIT); in EVENT_SEEN nothing but the number of the grant that is kept to.
    pub credits: Credits,
    /// The event's number.
    pub value: u64,
    /// Text for people (DISCONNECT): UTF-8, at most [`crate::limits::MAX_TEXT`] bytes.
    pub payload: Payload,
}

impl Control {
    /// A control frame with nothing but its kind, epoch and token.
    #[must_use]
    pub fn new(kind: ControlKind, epoch: Epoch, token: u64) -> Self {
        Self {
            kind,
            code: EventCode::NONE,
            epoch,
            status: Status::OK,
            token,
            credits: Credits::default(),
            value: 0,
            payload: Payload::default(),
        }
    }
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Initiator to target.
    Command(Command),
    /// Target to initiator.
    Reply(Reply),
    /// Target to initiator: send the payload of a slot.
    Fetch(Transfer),
    /// Initiator to target: the payload of a slot.
    Data(Transfer),
    /// Either way.
    Control(Control),
    /// The header of a handshake frame; its payload is for [`super::Handshake::decode`].
    Handshake {
        /// Kind (SPEC.md, "Handshake").
        kind: u8,
        /// Length and CRC32C of what follows.
        payload: Payload,
    },
}

const COMMAND: u8 = 1;
const REPLY: u8 = 2;
const FETCH: u8 = 3;
const DATA: u8 = 4;
const HANDSHAKE: core::ops::RangeInclusive<u8> = 0x41..=0x49;

/// The fields that all headers have, still raw.
#[derive(Default)]
struct Raw {
    kind: u8,
    code: u8,
    flags: u16,
    slot: u16,
    word: u16,
    epoch: u64,
    sequence: u64,
    body: [u8; 28],
    payload: Payload,
}

impl Raw {
    fn encode(&self) -> HeaderBytes {
        let mut out = [0; HEADER_LEN];
        out[0] = self.kind;
        out[1] = self.code;
        out[2..4].copy_from_slice(&self.flags.to_le_bytes());
        out[4..6].copy_from_slice(&self.slot.to_le_bytes());
        out[6..8].copy_from_slice(&self.word.to_le_bytes());
        out[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        out[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        out[24..52].copy_from_slice(&self.body);
        out[52..56].copy_from_slice(&self.payload.length.to_le_bytes());
        out[56..60].copy_from_slice(&self.payload.crc.to_le_bytes());
        seal(&mut out);
        out
    }

    fn decode(bytes: &HeaderBytes) -> Result<Self, Fault> {
        check_seal(bytes)?;
        let mut r = Reader::new(bytes);
        Ok(Self {
            kind: r.u8()?,
            code: r.u8()?,
            flags: r.u16()?,
            slot: r.u16()?,
            word: r.u16()?,
            epoch: r.u64()?,
            sequence: r.u64()?,
            body: r.array()?,
            payload: Payload { length: r.u32()?, crc: r.u32()? },
        })
    }
}

/// Puts the CRC32C of bytes 0..60 into bytes 60..64.
fn seal(header: &mut HeaderBytes) {
    let crc = crate::crc32c(&header[..60]);
    header[60..].copy_from_slice(&crc.to_le_bytes());
}

fn check_seal(header: &HeaderBytes) -> Result<(), Fault> {
    match header[60..] == crate::crc32c(&header[..60]).to_le_bytes() {
        true => Ok(()),
        false => Err(Fault::HeaderCrc),
    }
}

/// Credits as they lie in bytes 32..40 of a header.
fn put_credits(credits: Credits, body: &mut [u8; 28]) {
    body[8..10].copy_from_slice(&credits.granted_slots.to_le_bytes());
    body[10..12].copy_from_slice(&credits.number.0.to_le_bytes());
    body[12..16].copy_from_slice(&credits.data_window.to_le_bytes());
}

fn take_credits(r: &mut Reader<'_>) -> Result<Credits, Fault> {
    Ok(Credits { granted_slots: r.u16()?, number: GrantNumber(r.u16()?), data_window: r.u32()? })
}

/// Without a slot nothing could be granted or acknowledged any more.
pub(super) fn check_granted(credits: &Credits) -> Result<(), Fault> {
    match credits.granted_slots {
        0 => Err(Fault::Malformed("a grant of no slot")),
        _ => Ok(()),
    }
}

impl Frame {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> HeaderBytes {
        let mut raw = Raw::default();
        match self {
            Self::Command(c) => {
                raw = Raw {
                    kind: COMMAND,
                    code: c.opcode.0,
                    flags: c.flags.0,
                    slot: c.slot.0,
                    word: c.grant_seen.0,
                    epoch: c.epoch.0,
                    sequence: c.sequence.0,
                    body: [0; 28],
                    payload: c.payload,
                };
                raw.body[0..8].copy_from_slice(&c.offset.to_le_bytes());
                raw.body[8..16].copy_from_slice(&c.length.to_le_bytes());
                raw.body[16..24].copy_from_slice(&c.placement.address.to_le_bytes());
                raw.body[24..28].copy_from_slice(&c.placement.key.to_le_bytes());
            }
            Self::Reply(r) => {
                raw = Raw {
                    kind: REPLY,
                    code: r.opcode.0,
                    flags: r.flags.0,
                    slot: r.slot.0,
                    word: r.status.0,
                    epoch: r.epoch.0,
                    sequence: r.sequence.0,
                    body: [0; 28],
                    payload: r.payload,
                };
                raw.body[0..8].copy_from_slice(&r.result.to_le_bytes());
                put_credits(r.credits, &mut raw.body);
            }
            Self::Fetch(t) | Self::Data(t) => {
                let data = matches!(self, Self::Data(_));
                raw = Raw {
                    kind: if data { DATA } else { FETCH },
                    code: t.opcode.0,
                    flags: if data { Flags::PAYLOAD_FOLLOWS.0 } else { 0 },
                    slot: t.slot.0,
                    epoch: t.epoch.0,
                    sequence: t.sequence.0,
                    payload: t.payload,
                    ..raw
                };
            }
            Self::Control(c) => {
                raw = Raw {
                    kind: c.kind.number(),
                    code: c.code.0,
                    flags: if c.payload.length > 0 { Flags::PAYLOAD_FOLLOWS.0 } else { 0 },
                    word: c.status.0,
                    epoch: c.epoch.0,
                    payload: c.payload,
                    ..raw
                };
                raw.body[0..8].copy_from_slice(&c.token.to_le_bytes());
                put_credits(c.credits, &mut raw.body);
                raw.body[16..24].copy_from_slice(&c.value.to_le_bytes());
            }
            Self::Handshake { kind, payload } => {
                raw.kind = *kind;
                raw.flags = Flags::PAYLOAD_FOLLOWS.0;
                raw.payload = *payload;
            }
        }
        raw.encode()
    }

    /// Decodes a header of a connection whose HELLO was already seen.
    ///
    /// # Errors
    /// A [`Fault`]: the stream can't be trusted any more and the connection ends.
    pub fn decode(bytes: &HeaderBytes) -> Result<Self, Fault> {
        let raw = Raw::decode(bytes)?;
        let flags = Flags(raw.flags);
        let opcode = Opcode(raw.code);
        let (slot, epoch, sequence) = (Slot(raw.slot), Epoch(raw.epoch), Sequence(raw.sequence));
        let payload = raw.payload;
        let mut r = Reader::new(&raw.body);
        let follows = flags.has(Flags::PAYLOAD_FOLLOWS);
        if follows && payload.length == 0 {
            return Err(Fault::Malformed("a payload follows, of no bytes"));
        }
        if payload.length == 0 && payload.crc != 0 {
            return Err(Fault::Malformed("an empty payload with a CRC32C"));
        }
        let most = match raw.kind {
            COMMAND | REPLY | FETCH | DATA => *MAX_TRANSFER_RANGE.end(),
            kind if HANDSHAKE.contains(&kind) => MAX_HANDSHAKE_PAYLOAD as u32,
            _ => MAX_CONTROL_PAYLOAD as u32,
        };
        if payload.length > most {
            return Err(Fault::Malformed("a payload is longer than its kind of frame may bring"));
        }
        let only_payload_flag =
            |needed: bool| match flags.without(Flags::PAYLOAD_FOLLOWS) == Flags::NONE && follows == needed {
                true => Ok(()),
                false => Err(Fault::Malformed("flags don't fit the kind of frame")),
            };
        match raw.kind {
            COMMAND => Ok(Self::Command(Command {
                opcode,
                flags,
                slot,
                grant_seen: GrantNumber(raw.word),
                epoch,
                sequence,
                offset: r.u64()?,
                length: r.u64()?,
                placement: Placement { address: r.u64()?, key: r.u32()? },
                payload,
            })),
            REPLY => {
                only_payload_flag(follows)?;
                let (result, credits) = (r.u64()?, take_credits(&mut r)?);
                r.zeros(12)?;
                check_granted(&credits)?;
                let status = Status(raw.word);
                Ok(Self::Reply(Reply { opcode, flags, slot, status, epoch, sequence, result, credits, payload }))
            }
            FETCH | DATA => {
                let data = raw.kind == DATA;
                only_payload_flag(data)?;
                r.zeros(28)?;
                if raw.word != 0 {
                    return Err(Fault::Malformed("reserved bytes aren't zero"));
                }
                let transfer = Transfer { opcode, slot, epoch, sequence, payload };
                Ok(if data { Self::Data(transfer) } else { Self::Fetch(transfer) })
            }
            kind if HANDSHAKE.contains(&kind) => {
                only_payload_flag(true)?;
                r.zeros(28)?;
                if (raw.code, raw.word, raw.slot, raw.epoch, raw.sequence) != (0, 0, 0, 0, 0) {
                    return Err(Fault::Malformed("reserved bytes aren't zero"));
                }
                Ok(Self::Handshake { kind, payload })
            }
            kind => {
                let kind = ControlKind::from_number(kind).ok_or(Fault::UnexpectedKind(kind))?;
                only_payload_flag(payload.length > 0)?;
                let (token, credits, value) = (r.u64()?, take_credits(&mut r)?, r.u64()?);
                r.zeros(4)?;
                let (code, status) = (EventCode(raw.code), Status(raw.word));
                let ends = matches!(kind, ControlKind::Closed | ControlKind::Disconnect);
                let unasked = matches!(kind, ControlKind::Disconnect | ControlKind::PathLost);
                let event = matches!(kind, ControlKind::Event | ControlKind::EventSeen);
                let none = Credits::default();
                // An event of a later version may have any.
                let fitting = match (kind, code) {
                    (ControlKind::Event, EventCode::RESIZED | EventCode::DRAINING) => none,
                    (ControlKind::Event, _) => credits,
                    (ControlKind::EventSeen, EventCode::CREDIT) => Credits { number: credits.number, ..none },
                    _ => none,
                };
                if (raw.slot, raw.sequence) != (0, 0)
                    || (!event && code != EventCode::NONE)
                    || (kind != ControlKind::Event && value != 0)
                    || (!ends && raw.word != 0)
                    || (unasked && token != 0)
                    || credits != fitting
                    || (kind != ControlKind::Disconnect && payload.length > 0)
                {
                    return Err(Fault::Malformed("a control frame has fields that its kind doesn't use"));
                }
                if payload.length > MAX_TEXT as u32 {
                    return Err(Fault::Malformed("the text of a DISCONNECT is too long"));
                }
                if (kind, code) == (ControlKind::Event, EventCode::CREDIT) {
                    check_granted(&credits)?;
                }
                Ok(Self::Control(Control { kind, code, epoch, status, token, credits, value, payload }))
            }
        }
    }

    /// Holds against the rail of its connection what [`Self::decode`] can't know: on TCP nothing is reached by
    /// remote access, so that nothing is placed.
    ///
    /// # Errors
    /// [`Fault::Malformed`] for a placement on TCP.
    #[inline]
    pub fn on_rail(self, rail: Rail) -> Result<Self, Fault> {
        match self {
            Self::Command(Command { placement, .. }) if rail == Rail::TCP && placement != Placement::default() => {
                Err(Fault::Malformed("a placement on TCP"))
            }
            frame => Ok(frame),
        }
    }

    /// How many payload bytes follow the header on the connection.
    #[inline]
    #[must_use]
    pub fn following(&self) -> u32 {
        match self {
            Self::Command(Command { flags, payload, .. }) | Self::Reply(Reply { flags, payload, .. }) => {
                if flags.has(Flags::PAYLOAD_FOLLOWS) { payload.length } else { 0 }
            }
            Self::Fetch(_) => 0,
            Self::Data(Transfer { payload, .. })
            | Self::Control(Control { payload, .. })
            | Self::Handshake { payload, .. } => payload.length,
        }
    }

    /// The payload's length and checksum.
    #[must_use]
    pub fn payload(&self) -> Payload {
        match self {
            Self::Command(Command { payload, .. })
            | Self::Reply(Reply { payload, .. })
            | Self::Fetch(Transfer { payload, .. })
            | Self::Data(Transfer { payload, .. })
            | Self::Control(Control { payload, .. })
            | Self::Handshake { payload, .. } => *payload,
        }
    }
}

/// The first frame of every connection, from the initiator. Its layout is frozen: every version of the
/// protocol begins with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Lowest version that the initiator speaks.
    pub version_min: u16,
    /// Highest version that the initiator speaks.
    pub version_max: u16,
    /// Features that the initiator offers, one bit each.
    pub features: u64,
    /// The payload: the initiator's name, UTF-8, 1 to [`MAX_NAME`] bytes.
    pub name: Payload,
}

impl Hello {
    /// What a connection to a target begins with.
    pub const MAGIC: [u8; 8] = *b"TWINRAIL";

    /// Encodes the header; the name follows it.
    #[must_use]
    pub fn encode(&self) -> HeaderBytes {
        let mut out = [0; HEADER_LEN];
        let mut w = Writer::new(&mut out);
        w.bytes(&Self::MAGIC);
        w.u16(self.version_min);
        w.u16(self.version_max);
        w.zeros(4);
        w.u64(self.features);
        w.zeros(28);
        w.u32(self.name.length);
        w.u32(self.name.crc);
        let _fits = w.finish();
        seal(&mut out);
        out
    }

    /// Decodes the header. Bytes that version 1 reserves are ignored: they belong to later versions.
    ///
    /// # Errors
    /// A [`Fault`]: this isn't an initiator of ours.
    pub fn decode(bytes: &HeaderBytes) -> Result<Self, Fault> {
        if bytes[..8] != Self::MAGIC {
            return Err(Fault::BadMagic);
        }
        check_seal(bytes)?;
        let mut r = Reader::new(&bytes[8..]);
        let (version_min, version_max) = (r.u16()?, r.u16()?);
        r.bytes(4)?;
        let features = r.u64()?;
        r.bytes(28)?;
        let name = Payload { length: r.u32()?, crc: r.u32()? };
        if !(1..=MAX_NAME as u32).contains(&name.length) || version_min > version_max {
            return Err(Fault::Malformed("HELLO has an impossible name length or version range"));
        }
        Ok(Self { version_min, version_max, features, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn command() -> Command {
        Command {
            opcode: Opcode::WRITE,
            flags: Flags::FUA.with(Flags::PAYLOAD_FOLLOWS),
            slot: Slot(7),
            grant_seen: GrantNumber(32),
            epoch: Epoch(u64::MAX - 3),
            sequence: Sequence(9),
            offset: 4096,
            length: 8192,
            placement: Placement { address: 0x1234_5678_9abc, key: 77 },
            payload: Payload { length: 8192, crc: 0xdead_beef },
        }
    }

    #[test]
    fn a_command_survives_the_wire() {
        let frame = Frame::Command(command());
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        assert_eq!(frame.following(), 8192);
    }

    #[test]
    fn any_flipped_bit_is_seen() {
        let bytes = Frame::Command(command()).encode();
        for bit in 0..HEADER_LEN * 8 {
            let mut broken = bytes;
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Frame::decode(&broken), Err(Fault::HeaderCrc), "bit {bit}");
        }
    }

    #[test]
    fn a_retry_may_move_its_payload_but_change_nothing_else() {
        let original = command();
        let moved = Command { placement: Placement::default(), flags: Flags::FUA, epoch: Epoch(0), ..original };
        assert!(original.is_repeated_by(&moved));
        assert!(!original.is_repeated_by(&Command { flags: Flags::NONE, ..original }));
        assert!(!original.is_repeated_by(&Command { offset: 0, ..original }));
        assert!(!original.is_repeated_by(&Command { payload: Payload { length: 8192, crc: 1 }, ..original }));
    }

    #[test]
    fn i9_a_name_that_would_garble_a_log_is_refused() {
        let text = |bytes: &'static [u8]| Payload { length: bytes.len() as u32, crc: crate::crc32c(bytes) }.text(bytes);
        assert_eq!(text(b"node-7"), Ok("node-7"));
        assert!(matches!(text(b"a\x1b[2J"), Err(Fault::Malformed(_))));
        assert!(matches!(text(b"\xff"), Err(Fault::Malformed(_))));
        assert_eq!(Payload { length: 1, crc: 0 }.text(b"a"), Err(Fault::ControlCrc));
        assert!(matches!(Payload { length: 2, crc: 0 }.text(b"a"), Err(Fault::Malformed(_))));
    }

    #[test]
    fn i9_a_status_in_a_control_frame_that_has_none_is_refused() {
        for (kind, _) in ControlKind::ALL {
            let control = Control { status: Status::TIMEOUT, ..Control::new(kind, Epoch(1), 0) };
            let allowed = matches!(kind, ControlKind::Closed | ControlKind::Disconnect);
            assert_eq!(Frame::decode(&Frame::Control(control).encode()).is_ok(), allowed, "{kind:?}");
        }
    }

    #[test]
    fn i9_a_token_in_a_control_frame_that_nothing_answers_is_refused() {
        for (kind, _) in ControlKind::ALL {
            let control = Control::new(kind, Epoch(1), 7);
            assert_eq!(
                Frame::decode(&Frame::Control(control).encode()).is_ok(),
                kind.is_request() || kind.is_answer(),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn i9_a_disconnect_explains_itself_in_a_text_of_bounded_length() {
        let with = |length| {
            let payload = Payload { length, crc: 1 };
            Frame::Control(Control { payload, ..Control::new(ControlKind::Disconnect, Epoch(1), 0) })
        };
        assert!(Frame::decode(&with(MAX_TEXT as u32).encode()).is_ok());
        assert!(Frame::decode(&with(MAX_TEXT as u32 + 1).encode()).is_err());
    }

    #[test]
    fn i6_a_grant_of_no_slot_is_refused_and_only_a_credit_event_and_replies_state_one() {
        let credits = |granted_slots| Credits { granted_slots, number: GrantNumber(5), data_window: 4096 };
        let opcode = Opcode::WRITE;
        let reply = |granted_slots| {
            let (flags, slot, status, payload) = (Flags::NONE, Slot(0), Status::OK, Payload::default());
            let (epoch, sequence, credits) = (Epoch(1), Sequence(1), credits(granted_slots));
            Frame::Reply(Reply { opcode, flags, slot, status, epoch, sequence, result: 0, credits, payload })
        };
        let control =
            |kind, code, credits| Frame::Control(Control { code, credits, ..Control::new(kind, Epoch(1), 7) });
        let event = |code, granted_slots| control(ControlKind::Event, code, credits(granted_slots));
        let seen = |code, credits| control(ControlKind::EventSeen, code, credits);
        let number = Credits { number: GrantNumber(5), ..Credits::default() };
        for (frame, fits) in [
            (reply(1), true),
            (reply(0), false),
            (event(EventCode::CREDIT, 1), true),
            (event(EventCode::CREDIT, 0), false),
            (event(EventCode::RESIZED, 1), false),
            (event(EventCode(200), 0), true),
            (seen(EventCode::CREDIT, number), true),
            (seen(EventCode::CREDIT, credits(1)), false),
            (seen(EventCode::RESIZED, number), false),
            (control(ControlKind::Probe, EventCode::NONE, number), false),
        ] {
            assert_eq!(Frame::decode(&frame.encode()).is_ok(), fits, "{frame:?}");
        }
    }

    #[test]
    fn i9_a_placement_on_tcp_is_refused() {
        let placed = Frame::Command(command());
        assert_eq!(placed.on_rail(Rail::RDMA), Ok(placed));
        assert!(matches!(placed.on_rail(Rail::TCP), Err(Fault::Malformed(_))));
        let bare = Frame::Command(Command { placement: Placement::default(), ..command() });
        assert_eq!(bare.on_rail(Rail::TCP), Ok(bare));
    }

    #[test]
    fn i9_an_empty_payload_with_a_checksum_is_refused() {
        let payload = Payload { length: 0, crc: 1 };
        let command = Command { flags: Flags::NONE, payload, ..command() };
        assert!(matches!(Frame::decode(&Frame::Command(command).encode()), Err(Fault::Malformed(_))));
    }

    #[test]
    fn hello_is_recognised_by_its_magic() {
        let hello = Hello { version_min: 1, version_max: 3, features: 5, name: Payload { length: 4, crc: 1 } };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let mut http = [b' '; HEADER_LEN];
        http[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(Hello::decode(&http), Err(Fault::BadMagic));
    }

    proptest! {
        /// Whatever decodes encodes to the same bytes again: no field is lost, none is invented.
        #[test]
        fn decoding_then_encoding_gives_the_same_bytes(
            mut bytes in (proptest::array::uniform32(any::<u8>()), any::<[u8; 8]>()).prop_map(|(head, credits)| {
                let mut all = [0u8; HEADER_LEN];
                all[..32].copy_from_slice(&head);
                all[32..40].copy_from_slice(&credits);
                all
            }),
            kind in prop_oneof![Just(COMMAND), Just(REPLY), Just(FETCH), Just(DATA), 0x10u8..0x18, 0x41u8..0x4a, any::<u8>()],
            length in 0u32..70_000,
            zeroed in any::<u64>(),
        ) {
            bytes[0] = kind;
            // Clear some of the random bytes, so that kinds with many reserved ones get through too.
            for (i, byte) in bytes[..40].iter_mut().enumerate().skip(1) {
                if zeroed >> i & 1 == 0 {
                    *byte = 0;
                }
            }
            bytes[2] &= 7;
            bytes[52..56].copy_from_slice(&length.to_le_bytes());
            seal(&mut bytes);
            if let Ok(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
                prop_assert!(frame.following() <= *MAX_TRANSFER_RANGE.end());
            }
        }
    }
}
