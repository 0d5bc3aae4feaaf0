//! A session as the data plane sees it: what its queues share.

use std::sync::Arc;

use twinrail_protocol::target::FlushLedger;
use twinrail_protocol::wire::{AttachMode, Attached};
use twinrail_protocol::{BootId, SessionId};

use crate::volume::Volume;

/// One attach of one volume by one initiator. Shared by the control plane, which owns its life, and the
/// reactors, which serve its queues.
#[derive(Debug)]
pub struct Session {
    /// Minted by the initiator.
    pub id: SessionId,
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
    /// The boot id under which a drain synced what it wrote before; nil for none (I5).
    pub synced_boot_id: BootId,
    /// How long it outlives its last path, in milliseconds.
    pub lease_ms: u32,
    /// What it wrote and flushed (I5).
    pub ledger: FlushLedger,
}

impl Session {
    /// Whether its changes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.mode == AttachMode::READ_ONLY || self.volume.read_only()
    }

    /// What ATTACHED and the reply to IDENTIFY say.
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
        attached.lease_ms = self.lease_ms;
        attached.failed_syncs = volume.failed_syncs();
        attached.synced_boot_id = self.synced_boot_id;
        attached
    }
}
