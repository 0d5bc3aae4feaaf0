//! The generation: a count of a volume's changes of writer, by which an initiator that was away hears that somebody
//! else may have written since.

use super::record::Record;
use super::refusal::Refusal;
use crate::canary::{Canary, broken};

/// Whether a writer that last saw generation `seen` (0 for none) may come back. One that is `recorded` has had no
/// other writer after it, or none that it wasn't there beside.
pub(super) fn check(record: &Record, seen: u64, recorded: bool) -> Result<(), Refusal> {
    let current = record.generation;
    if seen > current {
        return Err(Refusal::StateIsOlder { current, seen });
    }
    if seen == 0 || seen == current || recorded || broken(Canary::GenerationIgnored) {
        return Ok(());
    }
    Err(Refusal::GenerationPast { current, seen })
}

/// The generation after a writer has attached: one more for each that isn't recorded, and for each preempt.
pub(super) fn after(record: &Record, recorded: bool, preempt: bool) -> u64 {
    record.generation + u64::from(!recorded || preempt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::VolumeId;

    #[test]
    fn whoever_is_past_and_not_recorded_is_refused() {
        let record = Record { generation: 5, ..Record::new(VolumeId([1; 16])) };
        assert_eq!(check(&record, 0, false), Ok(()));
        assert_eq!(check(&record, 5, false), Ok(()));
        assert_eq!(check(&record, 4, true), Ok(()), "a shared writer that was there when the next one came");
        assert_eq!(check(&record, 4, false), Err(Refusal::GenerationPast { current: 5, seen: 4 }));
    }

    #[test]
    fn a_generation_that_was_never_reached_shows_that_the_state_was_lost() {
        let record = Record { generation: 5, ..Record::new(VolumeId([1; 16])) };
        assert_eq!(check(&record, 6, true), Err(Refusal::StateIsOlder { current: 5, seen: 6 }));
    }

    #[test]
    fn each_other_writer_and_each_preempt_counts() {
        let record = Record { generation: 5, ..Record::new(VolumeId([1; 16])) };
        assert_eq!([(true, false), (true, true), (false, false)].map(|(r, p)| after(&record, r, p)), [5, 6, 6]);
    }
}
