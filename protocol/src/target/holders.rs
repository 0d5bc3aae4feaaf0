//! Who may hold a volume beside whom: one *exclusive* writer or several *shared* ones, and any number of readers.

use alloc::string::String;
use alloc::vec::Vec;

use crate::wire::AttachMode;

/// A session that holds a volume, as a refusal names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBy {
    /// The name that the initiator gave.
    pub initiator: String,
    /// How it holds the volume.
    pub mode: AttachMode,
}

/// Whether this mode changes the volume.
#[must_use]
pub(super) fn writes(mode: AttachMode) -> bool {
    mode != AttachMode::READ_ONLY
}

/// Those of the present holders that a new one doesn't go with. A preempt goes with no writer at all.
pub(super) fn in_the_way<'a, T>(
    present: impl Iterator<Item = (AttachMode, T)> + 'a,
    wanted: AttachMode,
    preempt: bool,
) -> Vec<T>
where
    T: 'a,
{
    let collides = |mode: AttachMode| match preempt && writes(wanted) {
        true => writes(mode),
        false => !mode.goes_with(wanted),
    };
    present.filter(|(mode, _)| collides(*mode)).map(|(_, holder)| holder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const X: AttachMode = AttachMode::EXCLUSIVE;
    const S: AttachMode = AttachMode::SHARED;
    const R: AttachMode = AttachMode::READ_ONLY;

    fn places(present: &[AttachMode], wanted: AttachMode, preempt: bool) -> Vec<usize> {
        in_the_way(present.iter().enumerate().map(|(n, mode)| (*mode, n)), wanted, preempt)
    }

    #[test]
    fn one_writer_or_shared_ones_and_always_readers() {
        assert_eq!(places(&[X, R], X, false), vec![0]);
        assert_eq!(places(&[X, R], S, false), vec![0]);
        assert_eq!(places(&[X, S, R], R, false), vec![]);
        assert_eq!(places(&[S, S, R], S, false), vec![]);
        assert_eq!(places(&[S, R, S], X, false), vec![0, 2]);
        assert_eq!(places(&[R, R], X, false), vec![]);
    }

    #[test]
    fn a_preempt_is_in_the_way_of_all_writers_and_of_no_reader() {
        assert_eq!(places(&[S, R, S], S, true), vec![0, 2]);
        assert_eq!(places(&[X, R], R, true), vec![]);
    }
}
