//! Ids on the wire that tell which number of the history they stand for.

use twinrail_protocol::target::Digest;
use twinrail_protocol::wire::AttachMode;
use twinrail_protocol::{BootId, Secret, SessionId, VolumeId};

use crate::history::{Client, Mode, SecretNumber};

fn bytes<const N: usize>(kind: u8, number: u32) -> [u8; N] {
    let mut bytes = [kind; N];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |first| u32::from_be_bytes(*first))
}

/// An id for a session; front ends hand it on.
#[must_use]
pub fn session_id(n: u32) -> SessionId {
    SessionId(bytes(0x5e, n))
}

/// The client that the session began with.
#[must_use]
pub fn first_client(session: SessionId) -> Client {
    Client(number(&session.0).wrapping_sub(1))
}

/// A secret.
#[must_use]
pub fn secret(n: SecretNumber) -> Secret {
    Secret(bytes(0x3c, n.0))
}

/// Which secret it is.
#[must_use]
pub fn secret_number(secret: &Secret) -> SecretNumber {
    SecretNumber(number(&secret.0))
}

/// What the target records of a secret. The simulation's secrets are easy to tell apart, so it needs no hash.
#[must_use]
pub fn digest(secret: &Secret) -> Digest {
    Digest(bytes(0xd1, number(&secret.0)))
}

/// The UUID of an image of the volume.
#[must_use]
pub fn volume_id(image: u32) -> VolumeId {
    VolumeId(bytes(0x70, image))
}

/// The boot id after so many reboots.
#[must_use]
pub fn boot_id(reboots: u32) -> BootId {
    BootId(bytes(0xb0, reboots))
}

/// The name that an initiator gives: its client's number.
#[must_use]
pub fn initiator_name(client: Client) -> [u8; 8] {
    let mut name = *b"client00";
    let (tens, ones) = (client.0 / 10 % 10, client.0 % 10);
    (name[6], name[7]) = (b'0' + tens as u8, b'0' + ones as u8);
    name
}

/// The client of that name.
#[must_use]
pub fn client(name: &[u8]) -> Client {
    let digit = |at: usize| name.get(at).map_or(0, |d| u32::from(d.wrapping_sub(b'0')));
    Client(digit(6) * 10 + digit(7))
}

/// A mode on the wire.
#[must_use]
pub fn attach_mode(mode: Mode) -> AttachMode {
    match mode {
        Mode::Exclusive => AttachMode::EXCLUSIVE,
        Mode::Shared => AttachMode::SHARED,
        Mode::ReadOnly => AttachMode::READ_ONLY,
    }
}

/// A mode from the wire.
#[must_use]
pub fn mode(mode: AttachMode) -> Mode {
    match mode {
        AttachMode::EXCLUSIVE => Mode::Exclusive,
        AttachMode::SHARED => Mode::Shared,
        _ => Mode::ReadOnly,
    }
}
