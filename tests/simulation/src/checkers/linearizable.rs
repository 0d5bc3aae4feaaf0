//! I4 from outside: each block is a linearizable register, judged by nothing but what callers asked and were
//! told.
//!
//! Contents are unique, so that Gibbons and Korach's zones decide it: all operations of one content form a
//! cluster; with `first_end` the earliest end in it and `last_start` the latest start, the block certainly
//! held the content from `first_end` to `last_start` when that is a forward interval, and was certainly
//! written between `last_start` and `first_end` otherwise. Two certain stretches of different contents may not
//! overlap, and no certain write may lie within a stretch of another content.
//!
//! Three things make it wider than that:
//! - a write whose outcome wasn't told may act until its session has ended at storage, or never;
//! - a write that was replayed after the loss of its session may act several times: of it only what follows
//!   its end is certain;
//! - a block that lost its unsynced content at a reboot begins a new era with the content it fell back to.
//!
//! Zeros that somebody wrote are not unique: they are judged by themselves ([`Register::zeros`]).

use super::Breach;
use super::ledger::{Ledger, NEVER, breach};
use crate::history::{Command, History, Kind, Outcome, Stamp, What};

const NAME: &str = "I4 linearizable blocks";

#[derive(Clone, Copy, Debug)]
struct Write {
    stamp: Stamp,
    start: usize,
    end: usize,
    /// It certainly acted between start and end.
    certain: bool,
    /// It may have acted more than once.
    again: bool,
}

#[derive(Clone, Copy, Debug)]
struct Read {
    command: Command,
    stamp: Stamp,
    start: usize,
    end: usize,
}

#[derive(Clone, Copy, Debug)]
struct Zone {
    stamp: Stamp,
    from: usize,
    to: usize,
}

/// One block in one era.
#[derive(Debug, Default)]
struct Register {
    initial: Stamp,
    begin: usize,
    writes: Vec<Write>,
    reads: Vec<Read>,
    stretches: Vec<Zone>,
    moments: Vec<Zone>,
}

/// # Errors
/// No order of the operations explains what was read.
pub fn check(history: &History, ledger: &Ledger) -> Result<(), Breach> {
    let mut falls: Vec<(u16, usize, Stamp)> = Vec::new();
    for (position, event) in history.events.iter().enumerate() {
        match event.what {
            What::Lost { block, now, .. } => falls.push((block, position, now)),
            What::Replaced => falls.extend((0..history.setup.blocks).map(|block| (block, position, Stamp::ZERO))),
            _ => {}
        }
    }
    let mut register = Register::default();
    for block in 0..history.setup.blocks {
        let mut begin = (0, Stamp::ZERO);
        for (_, position, now) in falls.iter().filter(|(fallen, ..)| *fallen == block) {
            register.fill(ledger, block, begin, *position);
            register.check(history, block)?;
            begin = (*position, *now);
        }
        register.fill(ledger, block, begin, NEVER);
        register.check(history, block)?;
    }
    Ok(())
}

impl Register {
    /// Takes the operations on `block` between `begin` and `end`. A write across a border may have acted on
    /// either side, and a read across one says nothing.
    fn fill(&mut self, ledger: &Ledger, block: u16, (begin, initial): (usize, Stamp), end: usize) {
        self.initial = initial;
        self.begin = begin;
        self.writes.clear();
        self.reads.clear();
        for (command, record) in ledger.commands().filter(|(_, record)| record.blocks.holds(block)) {
            let completed = record.is(Outcome::Ok) || record.is(Outcome::CompareFailed);
            let inside = completed && record.invoked >= begin && record.completed <= end;
            let read = match record.kind {
                Kind::Read if record.is(Outcome::Ok) => Some(record.stamps[usize::from(block - record.blocks.first)]),
                Kind::CompareAndWrite if record.is(Outcome::Ok) => Some(record.expected),
                _ => None,
            };
            if let Some(stamp) = read.filter(|_| inside) {
                self.reads.push(Read { command, stamp, start: record.invoked, end: record.completed });
            }
            let never = record.is(Outcome::Refused) || record.is(Outcome::CompareFailed);
            if !record.kind.changes() || never {
                continue;
            }
            let last = if record.is(Outcome::Ok) { record.completed } else { ledger.may_act_until(record) };
            // One that was submitted after the end of its session never acts.
            if last < begin.max(record.invoked) || record.invoked > end {
                continue;
            }
            let stamp = if record.kind == Kind::CompareAndWrite || record.kind == Kind::Write {
                record.stamp
            } else {
                Stamp::ZERO
            };
            let (start, certain) = (record.invoked.max(begin), inside && record.is(Outcome::Ok));
            let end = if last > end { NEVER } else { last };
            self.writes.push(Write { stamp, start, end, certain, again: record.replayed });
        }
    }

    fn check(&mut self, history: &History, block: u16) -> Result<(), Breach> {
        self.sources(history, block)?;
        self.zones();
        self.stretches.sort_unstable_by_key(|zone| (zone.from, zone.to));
        for pair in self.stretches.windows(2) {
            if pair[1].from < pair[0].to {
                let what = format!("block {block} held {:?} and {:?} at once", pair[0].stamp, pair[1].stamp);
                return Err(breach(NAME, history, pair[0].to, what));
            }
        }
        for moment in &self.moments {
            let after = self.stretches.partition_point(|zone| zone.from < moment.from);
            let around = self.stretches[..after].last();
            if let Some(zone) = around.filter(|zone| zone.stamp != moment.stamp && moment.to < zone.to) {
                let what = format!("block {block} kept {:?} over a write of {:?}", zone.stamp, moment.stamp);
                return Err(breach(NAME, history, zone.to, what));
            }
        }
        self.zeros(history, block)
    }

    /// Nothing is read that nobody had written before.
    fn sources(&self, history: &History, block: u16) -> Result<(), Breach> {
        for read in &self.reads {
            let written = |write: &Write| write.stamp == read.stamp && write.start < read.end;
            if read.stamp != self.initial && !self.writes.iter().any(written) {
                let what =
                    format!("{:?} read {:?} from block {block}, which nobody had written", read.command, read.stamp);
                return Err(breach(NAME, history, read.end, what));
            }
        }
        Ok(())
    }

    fn zones(&mut self) {
        self.stretches.clear();
        self.moments.clear();
        if !self.writes.iter().any(|write| write.stamp == self.initial) {
            let starts = self.reads.iter().filter(|read| read.stamp == self.initial).map(|read| read.start);
            if let Some(to) = starts.max() {
                self.stretches.push(Zone { stamp: self.initial, from: self.begin, to });
            }
        }
        for write in &self.writes {
            let moment = Zone { stamp: write.stamp, from: write.start, to: write.end };
            if write.stamp == Stamp::ZERO {
                self.moments.extend(write.certain.then_some(moment));
                continue;
            }
            let mut cluster = Zone { stamp: write.stamp, from: write.end, to: write.start };
            let mut read_at_all = false;
            for read in self.reads.iter().filter(|read| read.stamp == write.stamp) {
                read_at_all = true;
                cluster.to = cluster.to.max(read.start);
                if !write.again && write.stamp != self.initial {
                    cluster.from = cluster.from.min(read.end);
                }
            }
            if cluster.from < cluster.to {
                self.stretches.push(cluster);
            }
            let single = !write.again && write.stamp != self.initial;
            if single && cluster.to < cluster.from && (write.certain || read_at_all) {
                self.moments.push(Zone { stamp: write.stamp, from: cluster.to, to: cluster.from });
            } else if write.certain {
                self.moments.push(moment);
            }
        }
    }

    /// Zeros may be read when there is a source of zeros that no other write certainly followed before the
    /// read began.
    fn zeros(&self, history: &History, block: u16) -> Result<(), Breach> {
        let zero = Stamp::ZERO;
        for read in self.reads.iter().filter(|read| read.stamp == zero) {
            let overwritten = |from: usize| {
                let after = |w: &Write| w.stamp != zero && w.certain && w.start >= from && w.end < read.start;
                self.writes.iter().any(after)
            };
            let initial = self.initial == zero && !overwritten(self.begin);
            let source = |w: &Write| w.stamp == zero && w.start < read.end && !overwritten(w.end);
            if !initial && !self.writes.iter().any(source) {
                let what = format!("{:?} read zeros from block {block}, which had been written over", read.command);
                return Err(breach(NAME, history, read.end, what));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Mode, Session};

    fn wrote(h: &mut History, start: u64, end: u64, command: u32, stamp: u32) {
        write(h, start, command, one(0), stamp);
        completed(h, end, command, Outcome::Ok);
    }

    fn reads(h: &mut History, start: u64, end: u64, command: u32, stamp: u32) {
        read(h, start, command, one(0));
        brought(h, end, command, &[stamp]);
    }

    #[test]
    fn a_write_is_seen_by_every_later_read() {
        let mut h = history();
        reads(&mut h, 0, 1, 1, 0);
        wrote(&mut h, 2, 3, 2, 11);
        reads(&mut h, 4, 5, 3, 11);
        wrote(&mut h, 6, 7, 4, 12);
        reads(&mut h, 8, 9, 5, 12);
        passes(check, &h);
        reads(&mut h, 10, 11, 6, 11);
        caught(check, &h, "Stamp(11)");
    }

    #[test]
    fn zeros_after_a_write() {
        let mut h = history();
        wrote(&mut h, 2, 3, 2, 11);
        let mut zeroed = h.clone();
        reads(&mut h, 4, 5, 3, 0);
        caught(check, &h, "written over");
        invoked(&mut zeroed, 4, 1, 3, Kind::Zero, one(0), 0);
        completed(&mut zeroed, 5, 3, Outcome::Ok);
        reads(&mut zeroed, 6, 7, 4, 0);
        passes(check, &zeroed);
        reads(&mut zeroed, 8, 9, 5, 11);
        caught(check, &zeroed, "Stamp(11)");
    }

    #[test]
    fn content_from_nowhere_or_from_a_refused_write() {
        let mut h = history();
        reads(&mut h, 1, 2, 1, 77);
        caught(check, &h, "nobody had written");
        let mut h = history();
        write(&mut h, 1, 1, one(0), 11);
        completed(&mut h, 2, 1, Outcome::Refused);
        reads(&mut h, 3, 4, 2, 11);
        caught(check, &h, "nobody had written");
    }

    #[test]
    fn concurrent_writes_may_fall_in_any_order_but_one() {
        let concurrent = |first, second| {
            let mut h = history();
            write(&mut h, 1, 1, one(0), 11);
            write(&mut h, 2, 2, one(0), 12);
            completed(&mut h, 3, 1, Outcome::Ok);
            completed(&mut h, 4, 2, Outcome::Ok);
            reads(&mut h, 5, 6, 3, first);
            reads(&mut h, 7, 8, 4, second);
            h
        };
        passes(check, &concurrent(11, 11));
        passes(check, &concurrent(12, 12));
        caught(check, &concurrent(11, 12), "at once");
        caught(check, &concurrent(12, 11), "at once");
    }

    #[test]
    fn a_write_acts_once() {
        let acts_again = |replayed: bool| {
            let mut h = history();
            attached(&mut h, 0, 1, 1, Mode::Exclusive);
            accepted(&mut h, 0, 1, 1, 1);
            write(&mut h, 1, 1, one(0), 11);
            assign(&mut h, 1, 1, place(1, 0, 1));
            reads(&mut h, 2, 3, 2, 11);
            wrote(&mut h, 4, 5, 3, 12);
            reads(&mut h, 6, 7, 4, 12);
            if replayed {
                assign(&mut h, 8, 1, place(2, 0, 1));
            }
            completed(&mut h, 9, 1, Outcome::Ok);
            reads(&mut h, 10, 11, 5, 11);
            h
        };
        caught(check, &acts_again(false), "at once");
        passes(check, &acts_again(true));
        let mut back = acts_again(true);
        reads(&mut back, 12, 13, 6, 12);
        caught(check, &back, "Stamp(1");
    }

    #[test]
    fn an_unknown_outcome_acts_later_or_never_but_not_after_its_session_ended() {
        let unknown = |ended: bool| {
            let mut h = history();
            attached(&mut h, 0, 1, 1, Mode::Shared);
            accepted(&mut h, 0, 1, 1, 1);
            write(&mut h, 1, 1, one(0), 11);
            assign(&mut h, 1, 1, place(1, 0, 1));
            completed(&mut h, 2, 1, Outcome::Unknown);
            reads(&mut h, 3, 4, 2, 0);
            if ended {
                h.record(5, What::SessionEnded { session: Session(1) });
            }
            wrote(&mut h, 6, 7, 3, 12);
            reads(&mut h, 8, 9, 4, 12);
            h
        };
        passes(check, &unknown(true));
        let mut late = unknown(false);
        reads(&mut late, 10, 11, 5, 11);
        passes(check, &late);
        let mut ghost = unknown(true);
        reads(&mut ghost, 10, 11, 5, 11);
        caught(check, &ghost, "at once");
    }

    #[test]
    fn a_write_submitted_after_the_end_of_its_session_never_acts() {
        let mut h = history();
        attached(&mut h, 0, 1, 1, Mode::Exclusive);
        accepted(&mut h, 0, 1, 1, 1);
        h.record(1, What::SessionEnded { session: Session(1) });
        for (command, stamp) in [(1, 11), (2, 12)] {
            write(&mut h, 2, command, one(0), stamp);
            assign(&mut h, 2, command, place(1, 0, u64::from(command)));
            completed(&mut h, 2, command, Outcome::Failed);
        }
        passes(check, &h);
        reads(&mut h, 4, 5, 3, 11);
        caught(check, &h, "nobody had written");
    }

    #[test]
    fn compare_and_write_reads_what_it_expects() {
        let swap = |expected| {
            let mut h = history();
            wrote(&mut h, 1, 2, 1, 11);
            wrote(&mut h, 3, 4, 2, 12);
            h.record(
                5,
                What::Invoked {
                    client: crate::history::Client(1),
                    command: Command(3),
                    kind: Kind::CompareAndWrite,
                    fua: false,
                    blocks: one(0),
                    stamp: Stamp(13),
                    expected: Stamp(expected),
                },
            );
            completed(&mut h, 6, 3, Outcome::Ok);
            h
        };
        passes(check, &swap(12));
        caught(check, &swap(11), "Stamp(11)");
    }

    #[test]
    fn a_fallen_block_begins_anew() {
        let mut h = history();
        wrote(&mut h, 1, 2, 1, 11);
        wrote(&mut h, 3, 4, 2, 12);
        h.record(5, What::Lost { block: 0, was: Stamp(12), now: Stamp(11) });
        reads(&mut h, 6, 7, 3, 11);
        passes(check, &h);
        let mut lost = h.clone();
        reads(&mut lost, 8, 9, 4, 12);
        caught(check, &lost, "nobody had written");
        wrote(&mut h, 8, 9, 4, 13);
        reads(&mut h, 10, 11, 5, 11);
        caught(check, &h, "Stamp(1");
    }

    #[test]
    fn blocks_of_one_command_are_registers_of_their_own() {
        let mut h = history();
        write(&mut h, 1, 1, crate::history::Blocks::new(0, 2), 11);
        read(&mut h, 2, 2, crate::history::Blocks::new(0, 2));
        brought(&mut h, 3, 2, &[11, 0]);
        completed(&mut h, 4, 1, Outcome::Ok);
        passes(check, &h);
        read(&mut h, 5, 3, crate::history::Blocks::new(0, 2));
        brought(&mut h, 6, 3, &[11, 0]);
        caught(check, &h, "block 1");
    }

    #[test]
    fn a_content_that_outlives_a_write_over_it() {
        let mut h = history();
        wrote(&mut h, 1, 2, 1, 11);
        wrote(&mut h, 3, 4, 2, 12);
        reads(&mut h, 5, 6, 3, 11);
        caught(check, &h, "kept Stamp(11) over a write of Stamp(12)");
    }

    /// A small generator of its own: these tests draw histories, not worlds.
    struct Draw(u64);

    impl Draw {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    #[derive(Clone, Copy, Debug)]
    struct Op {
        start: u64,
        end: u64,
        writes: bool,
        stamp: u32,
    }

    /// Tries every order that keeps to real time.
    fn explained(ops: &[Op], done: &mut Vec<usize>, value: u32) -> bool {
        if done.len() == ops.len() {
            return true;
        }
        (0..ops.len()).any(|next| {
            let op = ops[next];
            let left = |other: &usize| !done.contains(other);
            let too_early = (0..ops.len()).filter(left).any(|other| ops[other].end < op.start);
            if !left(&next) || too_early || !op.writes && op.stamp != value {
                return false;
            }
            done.push(next);
            let explained = explained(ops, done, op.stamp);
            done.pop();
            explained
        })
    }

    fn told(ops: &[Op]) -> History {
        let mut h = history();
        let mut ends: Vec<(u64, bool, usize)> = Vec::new();
        for (index, op) in ops.iter().enumerate() {
            ends.extend([(op.start, false, index), (op.end, true, index)]);
        }
        ends.sort_unstable();
        for (at, end, index) in ends {
            let (op, number) = (ops[index], index as u32);
            match (end, op.writes) {
                (false, true) => write(&mut h, at, number, one(0), op.stamp),
                (false, false) => read(&mut h, at, number, one(0)),
                (true, true) => completed(&mut h, at, number, Outcome::Ok),
                (true, false) => brought(&mut h, at, number, &[op.stamp]),
            }
        }
        h
    }

    #[test]
    fn it_agrees_with_trying_every_order() {
        let mut draw = Draw(7);
        let (mut good, mut bad) = (0, 0);
        for _ in 0..4_000 {
            let mut points: Vec<u64> = (1..=12).collect();
            (1..12).rev().for_each(|i| points.swap(i, draw.below(i as u64 + 1) as usize));
            let op = |pair: &[u64], index: u32, draw: &mut Draw| {
                let writes = draw.below(2) == 0;
                let stamp = if writes { 100 + index } else { 0 };
                Op { start: pair[0].min(pair[1]), end: pair[0].max(pair[1]), writes, stamp }
            };
            let mut ops: Vec<Op> = points.chunks(2).zip(0..).map(|(pair, index)| op(pair, index, &mut draw)).collect();
            let written: Vec<u32> = ops.iter().filter(|op| op.writes).map(|op| op.stamp).chain([0]).collect();
            for op in ops.iter_mut().filter(|op| !op.writes) {
                op.stamp = written[draw.below(written.len() as u64) as usize];
            }
            let history = told(&ops);
            let judged = check(&history, &Ledger::new(&history));
            let truth = explained(&ops, &mut Vec::new(), 0);
            assert_eq!(judged.is_ok(), truth, "{ops:?}: {judged:?}");
            if truth { good += 1 } else { bad += 1 }
        }
        assert!(good > 500 && bad > 500, "{good} good, {bad} bad");
    }
}
