//! Grace: for one lease after its start the target keeps a volume for the writers that held it before, so that they
//! come back to what they left.

use super::record::Record;
use super::refusal::Refusal;
use crate::canary::{Canary, broken};
use crate::ids::SessionId;

/// The time in which recorded holders come back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grace {
    until_ms: u64,
}

impl Grace {
    /// Begins with the target.
    pub(super) fn new(now_ms: u64, lease_ms: u32) -> Self {
        Self { until_ms: now_ms.saturating_add(lease_ms.into()) }
    }

    /// Whether a writer that isn't recorded may attach without preempt. `before` are those who held the volume when
    /// the target started and haven't been back since: not while one of them is still recorded, and hasn't left in
    /// order.
    pub(super) fn check(&self, record: &Record, before: &[SessionId], now_ms: u64) -> Result<(), Refusal> {
        let left_ms = self.until_ms.saturating_sub(now_ms);
        let awaited = before.iter().filter_map(|session| record.holder(*session)).any(|holder| !holder.closed);
        if left_ms == 0 || !awaited || broken(Canary::GraceIgnored) {
            return Ok(());
        }
        Err(Refusal::Grace { left_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::{Digest, Holder, SyncState};
    use super::*;
    use crate::ids::VolumeId;
    use crate::wire::AttachMode;
    use alloc::vec;

    fn record(closed: bool) -> Record {
        let holder = Holder {
            session: SessionId([7; 16]),
            secret: Digest([7; 32]),
            mode: AttachMode::SHARED,
            closed,
            flushed_at: SyncState::default(),
            lost_writes: false,
        };
        Record { holders: vec![holder], ..Record::new(VolumeId([1; 16])) }
    }

    #[test]
    fn others_wait_for_one_lease_as_long_as_a_holder_is_awaited() {
        let grace = Grace::new(1_000, 60_000);
        let before = [SessionId([7; 16])];
        assert_eq!(grace.check(&record(false), &before, 2_000), Err(Refusal::Grace { left_ms: 59_000 }));
        assert_eq!(grace.check(&record(false), &before, 61_000), Ok(()));
        assert_eq!(grace.check(&record(false), &[], 2_000), Ok(()), "it was back");
        assert_eq!(grace.check(&record(true), &before, 2_000), Ok(()), "it left in order");
        assert_eq!(grace.check(&Record::new(VolumeId([1; 16])), &before, 2_000), Ok(()), "another one took its place");
    }
}
