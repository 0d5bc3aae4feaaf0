//! What the target's state file holds of a volume: the memory that a restart must not lose.
//!
//! [`super::Holdings`] changes a record and hands it out, each time under a higher version; the driver stores it,
//! synced, and says so. What depends on it is answered only then.

use alloc::vec::Vec;
use core::fmt;

use crate::ids::{BootId, SessionId, VolumeId};
use crate::wire::AttachMode;

/// Replaced secrets that a record keeps: one for each takeover. An older one is unknown again, and so it still
/// opens nothing.
pub const MAX_REPLACED: usize = 32;

/// What is recorded of a secret: a hash of it, made by the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Compares in a time that doesn't depend on where the two differ.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(other.0.iter()).fold(0u8, |sum, (a, b)| sum | (a ^ b));
        core::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({:02x}..)", self.0[0])
    }
}

/// What unflushed writes can be lost by: another boot, one more failed sync (I5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncState {
    /// Of the target's host.
    pub boot_id: BootId,
    /// Failed syncs of the volume.
    pub failed_syncs: u64,
}

/// A writer that may come back: recorded until another one attaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its session.
    pub session: SessionId,
    /// Hash of the session's secret.
    pub secret: Digest,
    /// How it holds the volume.
    pub mode: AttachMode,
    /// It has left in order: nobody waits for it after a restart.
    pub closed: bool,
    /// When everything that was written under this session was flushed, as far as the target knows; at first, when
    /// it attached.
    pub flushed_at: SyncState,
    /// It took the place of a predecessor whose unflushed writes may be lost: no FLUSH succeeds until it has left
    /// (I5).
    pub lost_writes: bool,
}

/// One volume in the state file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// One more with each change.
    pub version: u64,
    /// The volume's UUID. A record of another one says nothing.
    pub volume: VolumeId,
    /// Changes of writer so far.
    pub generation: u64,
    /// Who may write without being another holder.
    pub holders: Vec<Holder>,
    /// Secrets that takeovers replaced, the last [`MAX_REPLACED`].
    pub replaced: Vec<Digest>,
    /// Failed syncs so far.
    pub failed_syncs: u64,
    /// The boot id under which a drain synced the volume, nothing written since; nil for none.
    pub synced_boot_id: BootId,
}

impl Record {
    /// The record of a volume that nobody ever held.
    #[must_use]
    pub fn new(volume: VolumeId) -> Self {
        Self {
            version: 0,
            volume,
            generation: 0,
            holders: Vec::new(),
            replaced: Vec::new(),
            failed_syncs: 0,
            synced_boot_id: BootId::NIL,
        }
    }

    /// The holder with this session.
    #[must_use]
    pub fn holder(&self, session: SessionId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.session == session)
    }

    pub(super) fn holder_mut(&mut self, session: SessionId) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| holder.session == session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn a_digest_is_never_printed_whole() {
        assert_eq!(format!("{:?}", Digest([0xab; 32])), "Digest(ab..)");
        assert!(Digest([1; 32]).matches(&Digest([1; 32])) && !Digest([1; 32]).matches(&Digest([2; 32])));
    }
}
