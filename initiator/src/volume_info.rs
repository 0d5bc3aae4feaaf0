//! What a target tells of a volume at the attach, and when it is asked again.

use twinrail_protocol::wire::{Attached, Portal, VolumeFlags};
use twinrail_protocol::{Geometry, VolumeId};

/// What a target tells of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Its UUID.
    pub id: VolumeId,
    /// Counter of its changes of writer.
    pub generation: u64,
    /// Size, block sizes and longest transfer, in bytes.
    pub geometry: Geometry,
    /// Properties.
    pub flags: VolumeFlags,
    /// Queues that the session may have.
    pub queues: u16,
    /// How long the session outlives its last path, in milliseconds.
    pub lease_ms: u32,
    /// Syncs of the volume that failed so far (I5).
    pub failed_syncs: u64,
    /// Where the target listens for RDMA connections.
    pub portals: Vec<Portal>,
}

impl VolumeInfo {
    pub(crate) fn from_attached(attached: &Attached<'_>) -> Self {
        let Attached { size, logical_block, physical_block, max_transfer, .. } = *attached;
        Self {
            id: attached.volume,
            generation: attached.generation,
            geometry: Geometry { size, logical_block, physical_block, max_transfer },
            flags: attached.flags,
            queues: attached.queues,
            lease_ms: attached.lease_ms,
            failed_syncs: attached.failed_syncs,
            portals: attached.portals().collect(),
        }
    }
}
