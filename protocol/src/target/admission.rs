//! An attach, from the request to the answer.

use alloc::borrow::ToOwned;
use alloc::string::String;

use super::flush::Inherited;
use super::record::Digest;
use super::refusal::Refusal;
use crate::ids::{BootId, Secret, SessionId, VolumeId};
use crate::wire::{Attach, AttachFlags, AttachMode};

/// An ATTACH that waits for its answer; numbered by the driver, no number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What an ATTACH asks for, looked at as far as that can be done without knowing the volume.
#[derive(Clone, Debug)]
pub struct Asking {
    pub(super) request: RequestId,
    pub(super) initiator: String,
    pub(super) volume: usize,
    pub(super) session: SessionId,
    pub(super) secret: Digest,
    /// For a takeover.
    pub(super) next_secret: Option<Digest>,
    pub(super) mode: AttachMode,
    pub(super) preempt: bool,
    pub(super) queues: u16,
    pub(super) expected_volume: VolumeId,
    /// The last one that the initiator saw; 0 for none.
    pub(super) generation: u64,
}

impl Asking {
    /// `volume` is the place of the volume named in the frame; `digest` hashes a secret.
    ///
    /// # Errors
    /// Parameters that no volume would be attached with.
    pub fn new(
        request: RequestId,
        initiator: &str,
        volume: usize,
        attach: &Attach<'_>,
        digest: impl Fn(&Secret) -> Digest,
    ) -> Result<Self, Refusal> {
        if ![AttachMode::EXCLUSIVE, AttachMode::SHARED, AttachMode::READ_ONLY].contains(&attach.mode) {
            return Err(Refusal::BadMode(attach.mode));
        }
        if attach.queues == 0 {
            return Err(Refusal::NoQueues);
        }
        let takeover = attach.flags.has(AttachFlags::TAKEOVER);
        let preempt = attach.flags.has(AttachFlags::PREEMPT);
        if takeover && preempt {
            return Err(Refusal::PreemptAndTakeover);
        }
        if takeover && (attach.next_secret.0 == [0; 16] || attach.next_secret.matches(&attach.secret)) {
            return Err(Refusal::BadNextSecret);
        }
        Ok(Self {
            request,
            initiator: initiator.to_owned(),
            volume,
            session: attach.session,
            secret: digest(&attach.secret),
            next_secret: takeover.then(|| digest(&attach.next_secret)),
            mode: attach.mode,
            preempt,
            queues: attach.queues,
            expected_volume: attach.expected_volume,
            generation: attach.generation,
        })
    }
}

/// What the initiator is told, and what the driver makes the session from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The session.
    pub session: SessionId,
    /// It exists from now on; else the driver has it already, and this repeats an answer.
    pub fresh: bool,
    /// The volume's place.
    pub volume: usize,
    /// How it is held.
    pub mode: AttachMode,
    /// Queues that the session may have.
    pub queues: u16,
    /// The volume's generation when the session attached.
    pub generation: u64,
    /// Failed syncs of the volume, now.
    pub failed_syncs: u64,
    /// Writes of this session that were made under this boot id, and acknowledged, are synced; nil for none.
    pub synced_boot_id: BootId,
    /// What the session's ledger begins with.
    pub inherited: Inherited,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_parameters_are_refused() {
        let attach = Attach {
            session: SessionId([1; 16]),
            secret: Secret([1; 16]),
            next_secret: Secret([2; 16]),
            mode: AttachMode::EXCLUSIVE,
            flags: AttachFlags::TAKEOVER,
            queues: 1,
            expected_volume: VolumeId::NIL,
            generation: 0,
            volume: "disk0",
        };
        let ask = |attach: &Attach<'_>| Asking::new(RequestId(1), "host", 0, attach, |_| Digest([0; 32])).err();
        assert_eq!(ask(&attach), None);
        assert_eq!(ask(&Attach { mode: AttachMode(7), ..attach }), Some(Refusal::BadMode(AttachMode(7))));
        assert_eq!(ask(&Attach { queues: 0, ..attach }), Some(Refusal::NoQueues));
        assert_eq!(ask(&Attach { flags: AttachFlags(3), ..attach }), Some(Refusal::PreemptAndTakeover));
        for next in [0, 1] {
            assert_eq!(ask(&Attach { next_secret: Secret([next; 16]), ..attach }), Some(Refusal::BadNextSecret));
        }
    }
}
