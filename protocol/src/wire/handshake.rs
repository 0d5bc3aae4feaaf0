//! Payloads of the handshake frames (SPEC.md, "Handshake"). HELLO has a header of its own, see
//! [`super::Hello`]; all others travel behind a 64-byte header of their kind.

use super::codec::{Reader, Writer};
use super::fault::Fault;
use super::frame::{Command, Credits, Frame, Payload, Rail, Reply, check_granted};
use crate::ids::{BootId, Epoch, GrantNumber, Instance, QueueId, Secret, SessionId, Slot, VolumeId};
use crate::limits::{HEADER_LEN, MAX_DEPTH, MAX_HANDSHAKE_PAYLOAD, MAX_NAME, MAX_PORTALS, MAX_TEXT, MAX_VOLUME_NAME};
use crate::opcode::Flags;
use crate::status::Status;

/// Features, one bit each; used only when offered in HELLO and taken up in WELCOME.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// What version 1 knows: nothing beyond the version itself yet.
    pub const KNOWN: Self = Self(0);
}

/// WELCOME: the target's answer to HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome<'a> {
    /// The version that both sides speak from here on.
    pub version: u16,
    /// The features of the initiator's offer that the target takes up.
    pub features: Features,
    /// What changes when the target's host reboots.
    pub boot_id: BootId,
    /// Which authentication must follow: 0 for none.
    pub auth_method: u16,
    /// The target's name, for people.
    pub target_name: &'a str,
}

/// AUTH: a round of authentication, either way. Version 1 defines no method; the frame is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Auth<'a> {
    /// The method named in WELCOME.
    pub method: u16,
    /// Counts the frames of the exchange from 1.
    pub round: u16,
    /// The method's own data.
    pub data: &'a [u8],
}

/// In which way a session holds its volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttachMode(pub u8);

impl AttachMode {
    /// The only writer; readers may be there.
    pub const EXCLUSIVE: Self = Self(1);
    /// One of several writers.
    pub const SHARED: Self = Self(2);
    /// A reader.
    pub const READ_ONLY: Self = Self(3);

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::EXCLUSIVE => "exclusive",
            Self::SHARED => "shared",
            Self::READ_ONLY => "read-only",
            _ => "unknown",
        }
    }

    /// Whether sessions of these two modes may hold a volume at the same time.
    #[must_use]
    pub fn goes_with(self, other: Self) -> bool {
        self == Self::READ_ONLY || other == Self::READ_ONLY || (self == Self::SHARED && other == Self::SHARED)
    }
}

/// Options of an ATTACH.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachFlags(pub u8);

impl AttachFlags {
    /// End all other writers, then attach.
    pub const PREEMPT: Self = Self(1);
    /// Take the place of the session named in `session`: replace its secret.
    pub const TAKEOVER: Self = Self(2);
    const KNOWN: u8 = 3;

    /// Whether every flag of `other` is set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// ATTACH: begin a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attach<'a> {
    /// Minted by the initiator. A repeated ATTACH with the same id and secret is answered again.
    pub session: SessionId,
    /// What every activation of the session will show.
    pub secret: Secret,
    /// For a takeover, the secret that takes the place of `secret`; else zeros.
    pub next_secret: Secret,
    /// How the volume is held.
    pub mode: AttachMode,
    /// Options.
    pub flags: AttachFlags,
    /// Queues that the session would like to have.
    pub queues: u16,
    /// The volume expected; [`VolumeId::NIL`] for any.
    pub expected_volume: VolumeId,
    /// The generation last seen; 0 for none.
    pub generation: u64,
    /// The volume's name.
    pub volume: &'a str,
}

/// Properties of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeFlags(pub u32);

impl VolumeFlags {
    /// Nobody can write.
    pub const READ_ONLY: Self = Self(1);
    /// A completed write is on stable storage.
    pub const WRITE_THROUGH: Self = Self(2);
    /// The storage is a rotating disk.
    pub const ROTATIONAL: Self = Self(4);
    /// DISCARD frees space.
    pub const DISCARD: Self = Self(8);
    /// The content is gone when the target stops.
    pub const VOLATILE: Self = Self(16);

    /// Whether every flag of `other` is set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// This set with the flags of `other` added.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Address family of a [`Portal`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Family(pub u16);

impl Family {
    /// IPv4: the first four bytes of the address count, the others are zero.
    pub const V4: Self = Self(4);
    /// IPv6.
    pub const V6: Self = Self(6);
}

/// Where the target listens for RDMA connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portal {
    /// Family of the address.
    pub family: Family,
    /// Port.
    pub port: u16,
    /// Address in network order.
    pub address: [u8; 16],
}

/// ATTACHED: the session exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached<'a> {
    /// The volume.
    pub volume: VolumeId,
    /// Its generation: one more with each change of writer.
    pub generation: u64,
    /// Size in bytes.
    pub size: u64,
    /// Logical block in bytes.
    pub logical_block: u32,
    /// Physical block in bytes.
    pub physical_block: u32,
    /// Largest payload of one command in bytes.
    pub max_transfer: u32,
    /// Properties.
    pub flags: VolumeFlags,
    /// Queues that the session may have.
    pub queues: u16,
    /// How long the session outlives its last path, in milliseconds.
    pub lease_ms: u32,
    /// Failed syncs of the volume so far (I5).
    pub failed_syncs: u64,
    /// Boot id of the target's host when a drain synced all that was ever written to the volume, if nothing was
    /// written since (I5); [`BootId::NIL`] for none.
    pub synced_boot_id: BootId,
    /// Encoded portals, see [`Attached::portals`].
    portals: &'a [u8],
}

impl<'a> Attached<'a> {
    /// An answer without portals; the fields are public.
    #[must_use]
    pub fn new(volume: VolumeId) -> Self {
        Self {
            volume,
            generation: 0,
            size: 0,
            logical_block: 512,
            physical_block: 512,
            max_transfer: 0,
            flags: VolumeFlags::default(),
            queues: 0,
            lease_ms: 0,
            failed_syncs: 0,
            synced_boot_id: BootId::NIL,
            portals: &[],
        }
    }

    /// This answer with portals, encoded one behind the other by [`Portal::encode`].
    #[must_use]
    pub fn with_portals(mut self, encoded: &'a [u8]) -> Self {
        let whole = encoded.len() / Portal::LEN * Portal::LEN;
        self.portals = &encoded[..whole.min(MAX_PORTALS * Portal::LEN)];
        self
    }

    /// The portals.
    pub fn portals(&self) -> impl Iterator<Item = Portal> + 'a {
        self.portals.chunks_exact(Portal::LEN).filter_map(|chunk| Portal::decode(&mut Reader::new(chunk)).ok())
    }
}

impl Portal {
    /// Length of an encoded portal in bytes.
    pub const LEN: usize = 20;

    /// Encodes the portal.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let mut w = Writer::new(&mut out);
        w.u16(self.family.0);
        w.u16(self.port);
        w.bytes(&self.address);
        let _fits = w.finish();
        out
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, Fault> {
        Ok(Self { family: Family(r.u16()?), port: r.u16()?, address: r.array()? })
    }
}

/// ACTIVATE: make this connection the path of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activate<'a> {
    /// The session.
    pub session: SessionId,
    /// Its secret.
    pub secret: Secret,
    /// The queue.
    pub queue: QueueId,
    /// The rail of this connection.
    pub rail: Rail,
    /// The new epoch; must be greater than the queue's.
    pub epoch: Epoch,
    /// The slot table as the initiator knows it; 0 asks for a new one.
    pub instance: Instance,
    /// Slots that the queue would like to have.
    pub depth: u16,
    /// In-capsule size in bytes that the initiator would like to have.
    pub in_capsule: u32,
    /// Encoded commands in flight, see [`Activate::report`].
    report: &'a [u8],
}

impl<'a> Activate<'a> {
    /// An activation with an empty report: nothing is in flight.
    #[must_use]
    pub fn new(session: SessionId, secret: Secret, queue: QueueId, rail: Rail, epoch: Epoch) -> Self {
        let (instance, depth, in_capsule) = (Instance(0), 0, crate::limits::DEFAULT_IN_CAPSULE);
        Self { session, secret, queue, rail, epoch, instance, depth, in_capsule, report: &[] }
    }

    /// This activation with a report: the headers of the commands in flight, each as it would be sent
    /// on the new path, one behind the other.
    #[must_use]
    pub fn with_report(mut self, headers: &'a [u8]) -> Self {
        let whole = headers.len() / HEADER_LEN * HEADER_LEN;
        self.report = &headers[..whole.min(usize::from(MAX_DEPTH) * HEADER_LEN)];
        self
    }

    /// Number of commands in the report.
    #[must_use]
    pub fn report_len(&self) -> usize {
        self.report.len() / HEADER_LEN
    }

    /// The commands in flight.
    ///
    /// # Errors
    /// For each entry that isn't the header of a command as it would be sent on this path, its [`Fault`].
    pub fn report(&self) -> impl Iterator<Item = Result<Command, Fault>> + 'a {
        let (rail, epoch) = (self.rail, self.epoch);
        let headers = self.report.as_chunks::<HEADER_LEN>().0.iter();
        let mut last = None;
        headers.map(move |header| {
            let Frame::Command(command) = Frame::decode(header)?.on_rail(rail)? else {
                return Err(Fault::Malformed("a slot report holds something else than commands"));
            };
            if command.epoch != epoch {
                return Err(Fault::Malformed("a reported command has another epoch than its ACTIVATE"));
            }
            if command.flags.has(Flags::PAYLOAD_FOLLOWS) {
                return Err(Fault::Malformed("a reported command has PAYLOAD_FOLLOWS, but nothing follows it"));
            }
            if last.replace(command.slot).is_some_and(|last| command.slot <= last) {
                return Err(Fault::Malformed("reported commands aren't in the order of their slots, each once"));
            }
            Ok(command)
        })
    }
}

/// What the target knows of a slot that was reported in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerdictKind {
    /// Never seen whole: send it again.
    Unknown,
    /// At work: its reply comes on the new path.
    Running,
    /// Executed: the reply stands in the verdict.
    Done,
}

impl VerdictKind {
    fn number(self) -> u8 {
        match self {
            Self::Unknown => 0,
            Self::Running => 1,
            Self::Done => 2,
        }
    }
}

/// The target's answer for one reported slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The slot.
    pub slot: Slot,
    /// What is known of it.
    pub kind: VerdictKind,
    /// The recorded reply, if [`VerdictKind::Done`].
    pub reply: Option<Reply>,
}

impl Verdict {
    /// Appends the verdict: 4 bytes, and 64 more with a reply.
    pub fn encode(&self, w: &mut Writer<'_>) {
        w.u16(self.slot.0);
        w.u8(self.kind.number());
        w.u8(0);
        if let Some(reply) = self.reply {
            w.bytes(&Frame::Reply(reply).encode());
        }
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, Fault> {
        let slot = Slot(r.u16()?);
        let kind = match r.u8()? {
            0 => VerdictKind::Unknown,
            1 => VerdictKind::Running,
            2 => VerdictKind::Done,
            _ => return Err(Fault::Malformed("a verdict of an unknown kind")),
        };
        r.zeros(1)?;
        let reply = match kind {
            VerdictKind::Done => match Frame::decode(&r.array()?)? {
                Frame::Reply(reply) if reply.slot == slot && reply.payload.length == 0 => Some(reply),
                _ => return Err(Fault::Malformed("a verdict holds something else than its slot's reply")),
            },
            _ => None,
        };
        Ok(Self { slot, kind, reply })
    }
}

/// ACTIVATED: the connection is the queue's path now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activated<'a> {
    /// The epoch, as activated.
    pub epoch: Epoch,
    /// The slot table.
    pub instance: Instance,
    /// Slots in the table.
    pub depth: u16,
    /// What is granted now.
    pub credits: Credits,
    /// In-capsule size in bytes.
    pub in_capsule: u32,
    /// Number of verdicts.
    verdict_count: u16,
    verdicts: &'a [u8],
}

impl<'a> Activated<'a> {
    /// An answer without verdicts; the other fields are public.
    #[must_use]
    pub fn new(epoch: Epoch, instance: Instance) -> Self {
        let (depth, in_capsule, credits) = (0, 0, Credits::default());
        Self { epoch, instance, depth, credits, in_capsule, verdict_count: 0, verdicts: &[] }
    }

    /// This answer with `count` verdicts, encoded one behind the other by [`Verdict::encode`].
    #[must_use]
    pub fn with_verdicts(mut self, count: u16, encoded: &'a [u8]) -> Self {
        (self.verdict_count, self.verdicts) = (count, encoded);
        self
    }

    /// The verdicts, one for each slot reported, in its order.
    ///
    /// # Errors
    /// A [`Fault`] for the first that is malformed; nothing follows it.
    pub fn verdicts(&self) -> impl Iterator<Item = Result<Verdict, Fault>> + 'a {
        let mut r = Reader::new(self.verdicts);
        let mut left = self.verdict_count;
        core::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let verdict = Verdict::decode(&mut r);
            if verdict.is_err() {
                left = 0;
            }
            Some(verdict)
        })
    }
}

/// STANDBY: keep this connection warm for a queue, without making it its path yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standby {
    /// The session.
    pub session: SessionId,
    /// Its secret.
    pub secret: Secret,
    /// The queue.
    pub queue: QueueId,
    /// The rail of this connection.
    pub rail: Rail,
}

/// STANDING: the connection is authenticated, and one ACTIVATE away from being the queue's path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Epoch of the queue now; 0 when it has no slot table yet.
    pub epoch: Epoch,
    /// Its slot table; 0 when it has none yet.
    pub instance: Instance,
}

/// REFUSED: the handshake ends, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused<'a> {
    /// Why.
    pub status: Status,
    /// Lowest version that the target speaks.
    pub version_min: u16,
    /// Highest version that the target speaks.
    pub version_max: u16,
    /// When to try again, in milliseconds; 0 says nothing.
    pub retry_after_ms: u32,
    /// The reason for people: the thing's name and the remedy.
    pub text: &'a str,
}

/// A handshake frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshake<'a> {
    /// Target's answer to HELLO.
    Welcome(Welcome<'a>),
    /// Either way.
    Auth(Auth<'a>),
    /// Initiator begins a session.
    Attach(Attach<'a>),
    /// Target's answer to ATTACH.
    Attached(Attached<'a>),
    /// Initiator makes this connection a queue's path.
    Activate(Activate<'a>),
    /// Target's answer to ACTIVATE.
    Activated(Activated<'a>),
    /// Target's answer to anything, the last one.
    Refused(Refused<'a>),
    /// Initiator keeps this connection ready for a queue.
    Standby(Standby),
    /// Target's answer to STANDBY.
    Standing(Standing),
}

impl<'a> Handshake<'a> {
    /// The frame's kind on the wire.
    #[must_use]
    pub fn kind(&self) -> u8 {
        match self {
            Self::Welcome(_) => 0x41,
            Self::Auth(_) => 0x42,
            Self::Attach(_) => 0x43,
            Self::Attached(_) => 0x44,
            Self::Activate(_) => 0x45,
            Self::Activated(_) => 0x46,
            Self::Refused(_) => 0x47,
            Self::Standby(_) => 0x48,
            Self::Standing(_) => 0x49,
        }
    }

    /// Encodes header and payload into `out`, which [`MAX_HANDSHAKE_PAYLOAD`] + [`HEADER_LEN`] bytes
    /// always suffice for; gives the number of bytes, or nothing if `out` is too short.
    #[must_use]
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let (header, payload) = out.split_at_mut_checked(HEADER_LEN)?;
        let mut w = Writer::new(payload);
        match self {
            Self::Welcome(f) => {
                w.u16(f.version);
                w.u16(f.auth_method);
                w.u64(f.features.0);
                w.bytes(&f.boot_id.0);
                w.text(f.target_name, MAX_NAME);
            }
            Self::Auth(f) => {
                w.u16(f.method);
                w.u16(f.round);
                w.bytes(f.data);
            }
            Self::Attach(f) => {
                w.bytes(&f.session.0);
                w.bytes(&f.secret.0);
                w.bytes(&f.next_secret.0);
                w.bytes(&f.expected_volume.0);
                w.u64(f.generation);
                w.u8(f.mode.0);
                w.u8(f.flags.0);
                w.u16(f.queues);
                w.text(f.volume, MAX_VOLUME_NAME);
            }
            Self::Attached(f) => {
                w.bytes(&f.volume.0);
                w.u64(f.generation);
                w.u64(f.size);
                w.u64(f.failed_syncs);
                w.u32(f.logical_block);
                w.u32(f.physical_block);
                w.u32(f.max_transfer);
                w.u32(f.flags.0);
                w.u32(f.lease_ms);
                w.u16(f.queues);
                w.u16(u16::try_from(f.portals.len() / Portal::LEN).unwrap_or(0));
                w.bytes(&f.synced_boot_id.0);
                w.bytes(f.portals);
            }
            Self::Activate(f) => {
                w.bytes(&f.session.0);
                w.bytes(&f.secret.0);
                w.u64(f.epoch.0);
                w.u64(f.instance.0);
                w.u32(f.in_capsule);
                w.u16(f.queue.0);
                w.u16(f.depth);
                w.u8(f.rail.0);
                w.u8(0);
                w.u16(u16::try_from(f.report_len()).unwrap_or(0));
                w.bytes(f.report);
            }
            Self::Activated(f) => {
                w.u64(f.epoch.0);
                w.u64(f.instance.0);
                w.u32(f.in_capsule);
                w.u32(f.credits.data_window);
                w.u16(f.depth);
                w.u16(f.credits.granted_slots);
                w.u16(f.verdict_count);
                w.u16(f.credits.number.0);
                w.bytes(f.verdicts);
            }
            Self::Refused(f) => {
                w.u16(f.status.0);
                w.u16(f.version_min);
                w.u16(f.version_max);
                w.zeros(2);
                w.u32(f.retry_after_ms);
                w.text(f.text, MAX_TEXT);
            }
            Self::Standby(f) => {
                w.bytes(&f.session.0);
                w.bytes(&f.secret.0);
                w.u16(f.queue.0);
                w.u8(f.rail.0);
                w.zeros(5);
            }
            Self::Standing(f) => {
                w.u64(f.epoch.0);
                w.u64(f.instance.0);
            }
        }
        let length = w.finish()?;
        let crc = crate::crc32c(&payload[..length]);
        let frame = Frame::Handshake { kind: self.kind(), payload: Payload { length: length as u32, crc } };
        header.copy_from_slice(&frame.encode());
        Some(HEADER_LEN + length)
    }

    /// Decodes the payload of a handshake frame whose header said `kind` and `expected`.
    ///
    /// # Errors
    /// A [`Fault`] when it doesn't match its checksum or isn't of the form that `kind` has.
    pub fn decode(kind: u8, expected: Payload, payload: &'a [u8]) -> Result<Self, Fault> {
        if payload.len() != expected.length as usize || payload.len() > MAX_HANDSHAKE_PAYLOAD {
            return Err(Fault::Malformed("a handshake payload isn't whole"));
        }
        if crate::crc32c(payload) != expected.crc {
            return Err(Fault::ControlCrc);
        }
        let mut r = Reader::new(payload);
        let frame = match kind {
            0x41 => {
                let (version, auth_method) = (r.u16()?, r.u16()?);
                let features = Features(r.u64()?);
                let (boot_id, target_name) = (BootId(r.array()?), r.text(MAX_NAME)?);
                Self::Welcome(Welcome { version, features, boot_id, auth_method, target_name })
            }
            0x42 => {
                let (method, round) = (r.u16()?, r.u16()?);
                let data = r.bytes(payload.len().saturating_sub(4))?;
                Self::Auth(Auth { method, round, data })
            }
            0x43 => {
                let (session, secret, next_secret) = (SessionId(r.array()?), Secret(r.array()?), Secret(r.array()?));
                let (expected_volume, generation) = (VolumeId(r.array()?), r.u64()?);
                let (mode, flags, queues) = (AttachMode(r.u8()?), AttachFlags(r.u8()?), r.u16()?);
                let volume = r.text(MAX_VOLUME_NAME)?;
                if session.is_nil() || flags.0 & !AttachFlags::KNOWN != 0 {
                    return Err(Fault::Malformed("ATTACH has no session id, or unknown flags"));
                }
                Self::Attach(Attach {
                    session,
                    secret,
                    next_secret,
                    mode,
                    flags,
                    queues,
                    expected_volume,
                    generation,
                    volume,
                })
            }
            0x44 => {
                let mut f = Attached::new(VolumeId(r.array()?));
                (f.generation, f.size, f.failed_syncs) = (r.u64()?, r.u64()?, r.u64()?);
                (f.logical_block, f.physical_block, f.max_transfer) = (r.u32()?, r.u32()?, r.u32()?);
                (f.flags, f.lease_ms, f.queues) = (VolumeFlags(r.u32()?), r.u32()?, r.u16()?);
                let count = usize::from(r.u16()?);
                if count > MAX_PORTALS {
                    return Err(Fault::Malformed("too many portals"));
                }
                f.synced_boot_id = BootId(r.array()?);
                f.portals = r.bytes(count * Portal::LEN)?;
                Self::Attached(f)
            }
            0x45 => {
                let (session, secret) = (SessionId(r.array()?), Secret(r.array()?));
                let (epoch, instance, in_capsule) = (Epoch(r.u64()?), Instance(r.u64()?), r.u32()?);
                let (queue, depth, rail) = (QueueId(r.u16()?), r.u16()?, Rail(r.u8()?));
                r.zeros(1)?;
                let count = r.u16()?;
                if count > MAX_DEPTH {
                    return Err(Fault::Malformed("a slot report has more slots than a queue may have"));
                }
                let report = r.bytes(usize::from(count) * HEADER_LEN)?;
                Self::Activate(Activate { session, secret, queue, rail, epoch, instance, depth, in_capsule, report })
            }
            0x46 => {
                let mut f = Activated::new(Epoch(r.u64()?), Instance(r.u64()?));
                (f.in_capsule, f.credits.data_window) = (r.u32()?, r.u32()?);
                (f.depth, f.credits.granted_slots, f.verdict_count) = (r.u16()?, r.u16()?, r.u16()?);
                f.credits.number = GrantNumber(r.u16()?);
                check_granted(&f.credits)?;
                if f.verdict_count > MAX_DEPTH || f.depth > MAX_DEPTH || f.credits.granted_slots > f.depth {
                    return Err(Fault::Malformed("ACTIVATED has impossible counts"));
                }
                f.verdicts = r.bytes(payload.len().saturating_sub(32))?;
                let mut verdicts = Reader::new(f.verdicts);
                for _ in 0..f.verdict_count {
                    Verdict::decode(&mut verdicts)?;
                }
                verdicts.end()?;
                Self::Activated(f)
            }
            0x47 => {
                let (status, version_min, version_max) = (Status(r.u16()?), r.u16()?, r.u16()?);
                r.zeros(2)?;
                let (retry_after_ms, text) = (r.u32()?, r.text(MAX_TEXT)?);
                Self::Refused(Refused { status, version_min, version_max, retry_after_ms, text })
            }
            0x48 => {
                let (session, secret) = (SessionId(r.array()?), Secret(r.array()?));
                let (queue, rail) = (QueueId(r.u16()?), Rail(r.u8()?));
                r.zeros(5)?;
                Self::Standby(Standby { session, secret, queue, rail })
            }
            0x49 => {
                let (epoch, instance) = (Epoch(r.u64()?), Instance(r.u64()?));
                if (epoch == Epoch(0)) != (instance == Instance(0)) {
                    return Err(Fault::Malformed(
                        "STANDING names a slot table without an epoch, or the other way round",
                    ));
                }
                Self::Standing(Standing { epoch, instance })
            }
            kind => return Err(Fault::UnexpectedKind(kind)),
        };
        r.end()?;
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opcode::Opcode;
    use alloc::vec;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    const CREDITS: Credits = Credits { granted_slots: 16, number: GrantNumber(0xfffe), data_window: 4096 };

    fn round_trip(frame: Handshake<'_>) {
        let mut out = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
        let n = frame.encode(&mut out).unwrap();
        let header = out[..HEADER_LEN].try_into().unwrap();
        let Ok(Frame::Handshake { kind, payload }) = Frame::decode(&header) else { panic!("not a handshake header") };
        assert_eq!(Handshake::decode(kind, payload, &out[HEADER_LEN..n]), Ok(frame));
        // Cut short or lengthened, it is refused.
        assert!(Handshake::decode(kind, payload, &out[HEADER_LEN..n - 1]).is_err());
        let longer = &out[HEADER_LEN..n + 1];
        let crc = crate::crc32c(longer);
        let open_ended = matches!(frame, Handshake::Auth(_));
        assert_eq!(Handshake::decode(kind, Payload { length: longer.len() as u32, crc }, longer).is_ok(), open_ended);
    }

    #[test]
    fn every_frame_survives_the_wire() {
        round_trip(Handshake::Welcome(Welcome {
            version: 1,
            features: Features(3),
            boot_id: BootId([7; 16]),
            auth_method: 0,
            target_name: "shelf-3",
        }));
        round_trip(Handshake::Auth(Auth { method: 1, round: 2, data: b"challenge" }));
        round_trip(Handshake::Attach(Attach {
            session: SessionId([1; 16]),
            secret: Secret([2; 16]),
            next_secret: Secret([0; 16]),
            mode: AttachMode::SHARED,
            flags: AttachFlags::PREEMPT,
            queues: 4,
            expected_volume: VolumeId::NIL,
            generation: 9,
            volume: "disk0",
        }));
        let portal = Portal { family: Family::V4, port: 4450, address: [0; 16] };
        let portals = portal.encode();
        let attached = Attached { size: 1 << 40, ..Attached::new(VolumeId([3; 16])) }.with_portals(&portals);
        assert!(attached.portals().eq([portal]));
        round_trip(Handshake::Attached(attached));
        let (session, secret) = (SessionId([1; 16]), Secret([2; 16]));
        round_trip(Handshake::Standby(Standby { session, secret, queue: QueueId(3), rail: Rail::RDMA }));
        round_trip(Handshake::Standing(Standing { epoch: Epoch(4), instance: Instance(77) }));
        round_trip(Handshake::Standing(Standing::default()));
        round_trip(Handshake::Refused(Refused {
            status: Status::UNKNOWN_VOLUME,
            version_min: 1,
            version_max: 1,
            retry_after_ms: 250,
            text: "no volume \"disk9\"",
        }));
    }

    #[test]
    fn an_activation_carries_the_commands_in_flight_and_gets_a_verdict_for_each() {
        let commands = [3, 4].map(|slot| Command {
            opcode: Opcode::WRITE,
            slot: Slot(slot),
            epoch: Epoch(5),
            ..Command::default()
        });
        let report: Vec<u8> = commands.map(|command| Frame::Command(command).encode()).concat();
        let activate = Activate::new(SessionId([1; 16]), Secret([2; 16]), QueueId(1), Rail::TCP, Epoch(5));
        let activate = Activate { depth: 32, ..activate }.with_report(&report);
        assert!(activate.report().eq(commands.map(Ok)));
        round_trip(Handshake::Activate(activate));

        let reply = Reply {
            opcode: Opcode::WRITE,
            flags: Flags::NONE,
            slot: Slot(3),
            status: Status::OK,
            epoch: Epoch(5),
            sequence: crate::ids::Sequence(1),
            result: 0,
            credits: CREDITS,
            payload: Payload::default(),
        };
        let verdicts = [
            Verdict { slot: Slot(3), kind: VerdictKind::Done, reply: Some(reply) },
            Verdict { slot: Slot(4), kind: VerdictKind::Running, reply: None },
        ];
        let mut room = [0; 128];
        let mut w = Writer::new(&mut room);
        verdicts.iter().for_each(|v| v.encode(&mut w));
        let n = w.finish().unwrap();
        let activated = Activated { depth: 32, credits: CREDITS, ..Activated::new(Epoch(5), Instance(77)) };
        let activated = activated.with_verdicts(2, &room[..n]);
        assert!(activated.verdicts().eq(verdicts.map(Ok)));
        round_trip(Handshake::Activated(activated));
    }

    #[test]
    fn i9_a_report_of_a_placement_on_tcp_is_refused() {
        let placement = crate::wire::Placement { address: 4096, key: 0 };
        let header = Frame::Command(Command { placement, epoch: Epoch(5), ..Command::default() }).encode();
        for (rail, fits) in [(Rail::TCP, false), (Rail::RDMA, true)] {
            let activate = Activate::new(SessionId([1; 16]), Secret([2; 16]), QueueId(1), rail, Epoch(5));
            assert!(activate.with_report(&header).report().all(|command| command.is_ok() == fits));
        }
    }

    #[test]
    fn i9_reports_that_break_a_rule_were_taken() {
        let command = |slot: u16| Command { slot: Slot(slot), epoch: Epoch(5), ..Command::default() };
        let follows = Flags::PAYLOAD_FOLLOWS;
        let payload = Payload { length: 512, crc: 1 };
        let cases = [
            ([command(1), command(3)], None),
            ([command(3), command(1)], Some("order")),
            ([command(3), command(3)], Some("order")),
            ([command(1), Command { epoch: Epoch(4), ..command(3) }], Some("another epoch")),
            ([command(1), Command { flags: follows, payload, ..command(3) }], Some("PAYLOAD_FOLLOWS")),
        ];
        for (commands, rule) in cases {
            let report = commands.map(|command| Frame::Command(command).encode()).concat();
            let activate = Activate::new(SessionId([1; 16]), Secret([2; 16]), QueueId(1), Rail::TCP, Epoch(5));
            let taken: Result<alloc::vec::Vec<_>, _> = activate.with_report(&report).report().collect();
            match (taken, rule) {
                (Ok(taken), None) => assert_eq!(taken, commands),
                (Err(Fault::Malformed(text)), Some(rule)) => assert!(text.contains(rule), "{text}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn i6_an_activation_that_grants_no_slot_is_refused() {
        let mut out = [0; 2 * HEADER_LEN];
        for granted_slots in 0..2 {
            let credits = Credits { granted_slots, ..CREDITS };
            let frame = Activated { depth: 32, credits, ..Activated::new(Epoch(5), Instance(77)) };
            let n = Handshake::Activated(frame).encode(&mut out).unwrap();
            let payload = &out[HEADER_LEN..n];
            let expected = Payload { length: payload.len() as u32, crc: crate::crc32c(payload) };
            assert_eq!(Handshake::decode(0x46, expected, payload).is_ok(), granted_slots > 0);
        }
    }

    #[test]
    fn modes_that_go_together() {
        let (x, s, r) = (AttachMode::EXCLUSIVE, AttachMode::SHARED, AttachMode::READ_ONLY);
        assert!(!x.goes_with(x) && !x.goes_with(s) && !s.goes_with(x));
        assert!(s.goes_with(s) && r.goes_with(x) && x.goes_with(r) && r.goes_with(r) && s.goes_with(r));
    }

    proptest! {
        /// I9: bytes of a peer are decoded or refused, whatever they are.
        #[test]
        fn no_payload_can_cause_a_panic(kind in 0x40u8..0x4b, payload in proptest::collection::vec(any::<u8>(), 0..300)) {
            let expected = Payload { length: payload.len() as u32, crc: crate::crc32c(&payload) };
            if let Ok(frame) = Handshake::decode(kind, expected, &payload) {
                match frame {
                    Handshake::Activate(f) => assert!(f.report().count() <= usize::from(MAX_DEPTH)),
                    Handshake::Activated(f) => assert!(f.verdicts().count() <= usize::from(MAX_DEPTH)),
                    Handshake::Attached(f) => assert!(f.portals().count() <= MAX_PORTALS),
                    _ => {}
                }
            }
        }
    }
}
