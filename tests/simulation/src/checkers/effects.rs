//! I4, and I1 seen from the disk: what a caller was told agrees with what happened to the blocks.
//!
//! A completed change acted between its submission and its completion; a refused one never; one whose outcome
//! was not told acts, if at all, before its session has ended at storage. A completed read brought what each
//! block held at some moment between its submission and its completion.

use super::Breach;
use super::ledger::{Ledger, NEVER, Record, breach};
use crate::history::{Blocks, Command, History, Kind, Outcome, Stamp, Ticket, What};

const NAME: &str = "I4 effects";

/// What each block held, and from which position on.
#[derive(Debug)]
struct Disk {
    blocks: Vec<Vec<(usize, Stamp)>>,
}

impl Disk {
    fn new(blocks: u16) -> Self {
        Self { blocks: (0..blocks).map(|_| vec![(0, Stamp::ZERO)]).collect() }
    }

    fn now(&self, block: u16) -> Stamp {
        self.blocks.get(usize::from(block)).and_then(|held| held.last()).map_or(Stamp::ZERO, |(_, stamp)| *stamp)
    }

    fn put(&mut self, block: u16, position: usize, stamp: Stamp) {
        if let Some(held) = self.blocks.get_mut(usize::from(block)) {
            held.push((position, stamp));
        }
    }

    /// What the block held from `from` to `to`, both included.
    fn between(&self, block: u16, from: usize, to: usize) -> impl Iterator<Item = Stamp> {
        let held = self.blocks.get(usize::from(block)).map_or(&[][..], |held| &held[..]);
        let first = held.partition_point(|(position, _)| *position <= from).saturating_sub(1);
        held[first..].iter().take_while(move |(position, _)| *position <= to).map(|(_, stamp)| *stamp)
    }
}

/// # Errors
/// A caller was told something that didn't happen, or something happened that nobody was told.
pub fn check(history: &History, ledger: &Ledger) -> Result<(), Breach> {
    let mut disk = Disk::new(history.setup.blocks);
    let mut acted = Vec::with_capacity(128);
    for (position, event) in history.events.iter().enumerate() {
        match event.what {
            What::Applied { ticket, blocks, stamp } => {
                let act = Act { ticket, blocks, stamp, position };
                acted.push(act.check(ledger, &disk).map_err(|what| breach(NAME, history, position, what))?);
                blocks.each().for_each(|block| disk.put(block, position, stamp));
            }
            What::Lost { block, now, .. } => disk.put(block, position, now),
            What::Replaced => (0..history.setup.blocks).for_each(|block| disk.put(block, position, Stamp::ZERO)),
            _ => {}
        }
    }
    acted.sort_unstable();
    for (command, record) in ledger.commands().filter(|(_, record)| record.completed != NEVER) {
        told(command, record, &disk, &acted).map_err(|what| breach(NAME, history, record.completed, what))?;
    }
    Ok(())
}

#[derive(Debug)]
struct Act {
    ticket: Ticket,
    blocks: Blocks,
    stamp: Stamp,
    position: usize,
}

impl Act {
    /// The command whose act it was.
    fn check(&self, ledger: &Ledger, disk: &Disk) -> Result<Command, String> {
        let Some(place) = ledger.place_of(self.ticket) else {
            return Err(format!("{:?} changed the volume and was never submitted", self.ticket));
        };
        let Some(command) = ledger.at(place) else {
            return Err(format!("{place:?} changed the volume and is nobody's"));
        };
        let Some(record) = ledger.command(command) else {
            return Err(format!("{command:?} changed the volume and was never invoked"));
        };
        let stamp = if matches!(record.kind, Kind::Zero | Kind::Discard) { Stamp::ZERO } else { record.stamp };
        if !record.kind.changes() || record.blocks != self.blocks || stamp != self.stamp {
            return Err(format!("{command:?} asked for {record:?} and did {self:?}"));
        }
        let until = match record.outcome {
            Outcome::Ok if record.completed != NEVER => record.completed,
            Outcome::Refused | Outcome::CompareFailed => {
                return Err(format!("{command:?} was {:?} and changed the volume", record.outcome));
            }
            _ => ledger.may_act_until(record),
        };
        if self.position < record.invoked || self.position > until {
            return Err(format!("{command:?} changed the volume after it had ended"));
        }
        if record.kind == Kind::CompareAndWrite {
            let differs = self.blocks.each().find(|block| disk.now(*block) != record.expected);
            if let Some(block) = differs {
                return Err(format!("{command:?} wrote over {:?} of block {block}", disk.now(block)));
            }
        }
        Ok(command)
    }
}

fn told(command: Command, record: &Record, disk: &Disk, acted: &[Command]) -> Result<(), String> {
    let (from, to) = (record.invoked, record.completed);
    match (record.kind, record.outcome) {
        (Kind::Read, Outcome::Ok) => {
            for (block, stamp) in record.blocks.each().zip(record.stamps) {
                if !disk.between(block, from, to).any(|held| held == stamp) {
                    let held: Vec<_> = disk.between(block, from, to).collect();
                    return Err(format!("{command:?} read {stamp:?} from block {block}, which held {held:?}"));
                }
            }
        }
        (Kind::CompareAndWrite, Outcome::CompareFailed) => {
            let differed = |block| disk.between(block, from, to).any(|held| held != record.expected);
            if !record.blocks.each().any(differed) {
                return Err(format!("{command:?} failed to compare what was there all the time"));
            }
        }
        (kind, Outcome::Ok) if kind.changes() && acted.binary_search(&command).is_err() => {
            return Err(format!("{command:?} ({kind:?}) completed and never acted"));
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Mode, Session};

    /// A change by client 1 at place (1, 0, sequence = its number), executed under its number as ticket.
    fn change(h: &mut History, at: u64, command: u32, kind: Kind, blocks: Blocks, stamp: u32) {
        invoked(h, at, 1, command, kind, blocks, stamp);
        let place = place(1, 0, u64::from(command));
        assign(h, at, command, place);
        submitted(h, at, command, place, kind, blocks);
    }

    #[test]
    fn a_write_acts_before_it_completes_and_a_read_brings_it() {
        let mut h = history();
        change(&mut h, 1, 1, Kind::Write, Blocks::new(0, 2), 11);
        applied(&mut h, 2, 1, Blocks::new(0, 2), 11);
        completed(&mut h, 3, 1, Outcome::Ok);
        read(&mut h, 4, 2, Blocks::new(1, 2));
        brought(&mut h, 5, 2, &[11, 0]);
        passes(check, &h);
        read(&mut h, 6, 3, Blocks::new(1, 2));
        brought(&mut h, 7, 3, &[0, 0]);
        caught(check, &h, "Command(3) read");
    }

    #[test]
    fn a_read_may_bring_what_was_there_at_any_moment_of_it() {
        let mut h = history();
        read(&mut h, 1, 9, one(0));
        change(&mut h, 1, 1, Kind::Write, one(0), 11);
        applied(&mut h, 2, 1, one(0), 11);
        change(&mut h, 3, 2, Kind::Zero, one(0), 0);
        applied(&mut h, 4, 2, one(0), 0);
        let mut other = h.clone();
        brought(&mut h, 5, 9, &[11]);
        passes(check, &h);
        brought(&mut other, 5, 9, &[12]);
        caught(check, &other, "which held");
    }

    #[test]
    fn completed_and_never_acted() {
        let mut h = history();
        change(&mut h, 1, 1, Kind::Write, one(0), 11);
        completed(&mut h, 3, 1, Outcome::Ok);
        caught(check, &h, "never acted");
    }

    #[test]
    fn acted_after_it_completed() {
        let mut h = history();
        change(&mut h, 1, 1, Kind::Write, one(0), 11);
        applied(&mut h, 2, 1, one(0), 11);
        completed(&mut h, 3, 1, Outcome::Ok);
        applied(&mut h, 4, 1, one(0), 11);
        caught(check, &h, "after it had ended");
    }

    #[test]
    fn acted_though_refused() {
        let mut h = history();
        change(&mut h, 1, 1, Kind::Write, one(0), 11);
        applied(&mut h, 2, 1, one(0), 11);
        completed(&mut h, 3, 1, Outcome::Refused);
        caught(check, &h, "Refused");
    }

    #[test]
    fn an_unknown_outcome_acts_until_its_session_has_ended() {
        let mut h = history();
        attached(&mut h, 0, 1, 1, Mode::Shared);
        accepted(&mut h, 0, 1, 1, 1);
        change(&mut h, 1, 1, Kind::Write, one(0), 11);
        completed(&mut h, 2, 1, Outcome::Unknown);
        applied(&mut h, 3, 1, one(0), 11);
        passes(check, &h);
        h.record(4, What::SessionEnded { session: Session(1) });
        passes(check, &h);
        applied(&mut h, 5, 1, one(0), 11);
        caught(check, &h, "after it had ended");
    }

    #[test]
    fn another_range_or_content_than_asked_for() {
        for (blocks, stamp) in [(one(1), 11), (one(0), 12), (Blocks::new(0, 2), 11)] {
            let mut h = history();
            change(&mut h, 1, 1, Kind::Write, one(0), 11);
            applied(&mut h, 2, 1, blocks, stamp);
            caught(check, &h, "and did");
        }
    }

    #[test]
    fn compare_and_write_compares() {
        let mut h = history();
        change(&mut h, 1, 1, Kind::CompareAndWrite, one(0), 11);
        applied(&mut h, 2, 1, one(0), 11);
        completed(&mut h, 3, 1, Outcome::Ok);
        change(&mut h, 4, 2, Kind::CompareAndWrite, one(0), 12);
        completed(&mut h, 5, 2, Outcome::CompareFailed);
        passes(check, &h);
        change(&mut h, 6, 3, Kind::CompareAndWrite, one(1), 13);
        let mut wrong = h.clone();
        completed(&mut wrong, 7, 3, Outcome::CompareFailed);
        caught(check, &wrong, "there all the time");
        change(&mut h, 8, 4, Kind::CompareAndWrite, one(0), 14);
        applied(&mut h, 9, 4, one(0), 14);
        caught(check, &h, "wrote over Stamp(11)");
    }

    #[test]
    fn a_lost_block_reads_as_it_fell_back() {
        let mut h = history();
        change(&mut h, 1, 1, Kind::Write, one(0), 11);
        applied(&mut h, 2, 1, one(0), 11);
        completed(&mut h, 3, 1, Outcome::Ok);
        h.record(4, What::Rebooted);
        h.record(4, What::Lost { block: 0, was: Stamp(11), now: Stamp::ZERO });
        read(&mut h, 5, 2, one(0));
        brought(&mut h, 6, 2, &[0]);
        passes(check, &h);
        read(&mut h, 7, 3, one(0));
        brought(&mut h, 8, 3, &[11]);
        caught(check, &h, "Command(3) read");
    }

    #[test]
    fn nobodys_change() {
        let mut h = history();
        applied(&mut h, 1, 1, one(0), 11);
        caught(check, &h, "never submitted");
        let mut h = history();
        submitted(&mut h, 1, 1, place(1, 0, 1), Kind::Write, one(0));
        applied(&mut h, 2, 1, one(0), 11);
        caught(check, &h, "nobody's");
    }
}
