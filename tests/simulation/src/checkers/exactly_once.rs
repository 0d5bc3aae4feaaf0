//! I1: while a slot table exists, a command is given to storage at most once per (table, slot, sequence);
//! within one table a caller's change is given at most once, whatever its sequences. After a session was lost an
//! exclusive holder's change may be given again in the next table, unless it compares; a shared writer's not.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{Command, History, Kind, Mode, Place, Table, VerdictGiven, What};

const NAME: &str = "I1 exactly once";

/// # Errors
/// A command reached storage twice, a change was replayed that may not be, or an altered retry was served.
pub fn check(history: &History, ledger: &Ledger) -> Result<(), Breach> {
    let mut given: Vec<(Place, usize)> = Vec::with_capacity(128);
    let mut changed: Vec<(Table, Command, usize)> = Vec::with_capacity(128);
    let mut altered: Vec<(Place, u64)> = Vec::new();
    let mut other_tables: Vec<(Table, u64)> = Vec::new();
    for (position, event) in history.events.iter().enumerate() {
        match event.what {
            What::Submitted { place, kind, .. } if kind.changes() || kind == Kind::Flush => {
                given.push((place, position));
                if let Some(command) = ledger.at(place).filter(|_| kind.changes()) {
                    changed.push((place.table, command, position));
                }
            }
            What::InstanceAltered { table, epoch } => other_tables.push((table, epoch)),
            What::EpochAccepted { table, epoch, .. } if other_tables.contains(&(table, epoch)) => {
                let what = format!("an activation for another slot table took over {table:?}");
                return Err(breach(NAME, history, position, what));
            }
            What::RetryAltered { place, epoch } => altered.push((place, epoch)),
            What::VerdictSaid { place, epoch, verdict: VerdictGiven::Running | VerdictGiven::Done }
                if altered.contains(&(place, epoch)) =>
            {
                let what = format!("an altered retry was taken for the original: {place:?}");
                return Err(breach(NAME, history, position, what));
            }
            _ => {}
        }
    }
    given.sort_unstable_by_key(|(place, position)| (place.table, place.slot, place.sequence, *position));
    if let Some(pair) = given.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let what = format!("given to storage twice: {:?}, {:?}", pair[1].0, ledger.at(pair[1].0));
        return Err(breach(NAME, history, pair[1].1, what));
    }
    changed.sort_unstable();
    if let Some(pair) = changed.windows(2).find(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1)) {
        let what = format!("given to storage twice under two sequences of one table: {:?}", pair[1].1);
        return Err(breach(NAME, history, pair[1].2, what));
    }
    // Sorted by command, so that its tables stand side by side.
    changed.sort_unstable_by_key(|(_, command, position)| (*command, *position));
    for pair in changed.windows(2).filter(|pair| pair[0].1 == pair[1].1) {
        let Some(record) = ledger.command(pair[0].1) else { continue };
        let shared = ledger.mode(record.client) == Some(Mode::Shared);
        if shared || record.kind == Kind::CompareAndWrite {
            let why = if shared { "a shared writer's change" } else { "a compare-and-write" };
            let what = format!("{why} was executed in another table too: {:?}", pair[0].1);
            return Err(breach(NAME, history, pair[1].2, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;

    #[test]
    fn two_commands_are_given_once_each() {
        let mut history = history();
        write(&mut history, 1, 1, one(0), 11);
        submitted(&mut history, 2, 1, place(1, 0, 1), Kind::Write, one(0));
        write(&mut history, 3, 2, one(0), 12);
        submitted(&mut history, 4, 2, place(1, 0, 2), Kind::Write, one(0));
        passes(check, &history);
    }

    #[test]
    fn the_same_sequence_twice() {
        let mut history = history();
        submitted(&mut history, 2, 1, place(1, 0, 1), Kind::Write, one(0));
        submitted(&mut history, 4, 2, place(1, 0, 1), Kind::Write, one(0));
        caught(check, &history, "twice");
    }

    #[test]
    fn a_read_may_be_given_twice_and_a_flush_may_not() {
        let mut history = history();
        submitted(&mut history, 2, 1, place(1, 0, 1), Kind::Read, one(0));
        submitted(&mut history, 4, 2, place(1, 0, 1), Kind::Read, one(0));
        passes(check, &history);
        submitted(&mut history, 5, 3, place(1, 1, 1), Kind::Flush, one(0));
        submitted(&mut history, 6, 4, place(1, 1, 1), Kind::Flush, one(0));
        caught(check, &history, "twice");
    }

    fn assigned_twice(first: Place, second: Place, mode: Mode, kind: Kind) -> History {
        let mut history = history();
        attached(&mut history, 0, 1, 1, mode);
        invoked(&mut history, 1, 1, 1, kind, one(0), 11);
        assign(&mut history, 2, 1, first);
        submitted(&mut history, 3, 1, first, kind, one(0));
        assign(&mut history, 4, 1, second);
        submitted(&mut history, 5, 2, second, kind, one(0));
        history
    }

    #[test]
    fn the_same_change_under_another_sequence_of_its_table() {
        let history = assigned_twice(place(1, 0, 1), place(1, 0, 2), Mode::Exclusive, Kind::Write);
        caught(check, &history, "two sequences");
    }

    #[test]
    fn only_an_exclusive_holder_replays_and_never_a_compare_and_write() {
        let (old, new) = (place(1, 0, 1), place(2, 0, 1));
        passes(check, &assigned_twice(old, new, Mode::Exclusive, Kind::Write));
        passes(check, &assigned_twice(old, new, Mode::Shared, Kind::Read));
        caught(check, &assigned_twice(old, new, Mode::Shared, Kind::Write), "shared");
        caught(check, &assigned_twice(old, new, Mode::Exclusive, Kind::CompareAndWrite), "compare-and-write");
    }

    #[test]
    fn an_activation_that_names_another_slot_table_is_not_accepted() {
        let mut h = history();
        h.record(1, What::InstanceAltered { table: Table(1), epoch: 2 });
        accepted(&mut h, 2, 1, 1, 3);
        passes(check, &h);
        accepted(&mut h, 3, 1, 1, 2);
        caught(check, &h, "another slot table");
    }

    #[test]
    fn an_altered_retry_gets_no_verdict_of_the_original() {
        let altered = |epoch, verdict| {
            let mut h = history();
            h.record(1, What::RetryAltered { place: place(1, 0, 1), epoch: 2 });
            h.record(2, What::VerdictSaid { place: place(1, 0, 1), epoch, verdict });
            h
        };
        caught(check, &altered(2, VerdictGiven::Done), "for the original");
        caught(check, &altered(2, VerdictGiven::Running), "for the original");
        passes(check, &altered(2, VerdictGiven::Mismatch));
        passes(check, &altered(2, VerdictGiven::Unknown));
        passes(check, &altered(3, VerdictGiven::Done));
    }
}
