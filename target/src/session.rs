//! A session as the data plane sees it: what its queues share.

use std::sync::Arc;

use twinrail_protocol::target::FlushLedger;
use twinrail_protocol::wire::{AttachMode, Attached};
use twinrail_protocol::{Secret, SessionId};

use crate::volume::Volume;

/// One attach of one volume by one initiator. Shared by the registry, which owns its life, and the
/// reactors, which serve its queues.
#[derive(Debug)]
pub struct Session {
    /// Minted by the initiator.
    pub id: SessionId,
    /// What each activation must show.
    pub secret: Secret,
    /// The name that the initiator gave; no proof of anything.
    pub initiator: String,
    /// How the volume is held.
    pub mode: AttachMode,
    /// The volume.
    pub volume: Arc<Volume>,
    /// Queues it may have.
    pub queues: u16,
    /// The volume's generation when it attached.
    pub generation: u64,
    /// What it wrote and flushed (I5).
    pub ledger: FlushLedger,
}

impl Session {
    /// Whether its changes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.mode == AttachMode::READ_ONLY || self.volume.read_only()
    }

    /// What ATTACHED and the reply to IDENTIFY say. A session ends with its last path in this version: the
    /// lease is 0.
    #[must_use]
    pub fn attached(&self) -> Attached<'static> {
        let volume = &self.volume;
        let mut attached = Attached::new(volume.id);
        attached.generation = self.generation;
        attached.size = volume.geometry.size;
        attached.logical_block = volume.geometry.logical_block;
        attached.physical_block = volume.geometry.physical_block;
        attached.max_transfer = volume.geometry.max_transfer;
        attached.flags = volume.flags;
        attached.queues = self.queues;
        attached.failed_syncs = volume.failed_syncs();
        attached
    }
}
