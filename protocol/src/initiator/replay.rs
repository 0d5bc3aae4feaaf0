//! What becomes of the commands that are out when their slot table is lost (DESIGN.md, "If the slot tables are
//! gone").
//!
//! *Session lost* never means *not executed*: the reply may be what was lost. What may be executed twice is
//! replayed in the new session's table, as a new sequence. The rest ends as *outcome unknown*.

use super::credit::Allowance;
use super::queue::{Completion, Operation, Queue};
use super::slots::SlotSet;
use crate::canary::{Canary, broken};
use crate::ids::Slot;
use crate::opcode::{Flags, Opcode};
use crate::status::Status;
use crate::wire::Command;

/// What becomes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is submitted again in the new table.
    Replay,
    /// It ends with this status.
    End(Status),
}

/// A command that left a lost slot table.
#[derive(Clone, Copy, Debug)]
pub enum Retired {
    /// To be submitted in the new table, before anything that came later is answered.
    Replay(Operation),
    /// It has ended.
    Ended(Completion),
}

/// A command whose session was lost.
#[derive(Clone, Copy, Debug)]
pub struct Orphan<'a> {
    /// The command.
    pub command: &'a Command,
    /// The target may have executed it. It can't if the command never left, or if the target said on a later path
    /// that it doesn't know it.
    pub sent: bool,
}

/// The rules for one session, once it is attached again.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The session holds the volume exclusively, and no other writer was there since it last attached.
    pub alone: bool,
    /// Unflushed writes may be lost ([`super::Durability::is_poisoned`]).
    pub poisoned: bool,
}

impl Rules {
    /// What becomes of this command.
    #[must_use]
    pub fn fate(&self, orphan: &Orphan<'_>) -> Fate {
        let opcode = orphan.command.opcode;
        if opcode == Opcode::FLUSH && self.poisoned {
            return Fate::End(Status::FLUSH_FAILED);
        }
        // What changes nothing may be executed as often as one likes; of what was never executed there is no doubt.
        if !opcode.changes() || !orphan.sent {
            return Fate::Replay;
        }
        let repeatable = match self.alone {
            // A second execution does what the first did.
            true => opcode != Opcode::COMPARE_AND_WRITE || broken(Canary::CompareAndWriteReplayed),
            // Another writer may have written over it.
            false => broken(Canary::SharedChangeReplayed),
        };
        match repeatable {
            true => Fate::Replay,
            false => Fate::End(Status::OUTCOME_UNKNOWN),
        }
    }
}

impl Queue {
    /// The slot table is lost: every command leaves it, in the order of the slots, and `told` is what becomes of
    /// each. `fate` is [`Rules::fate`], or a status for all. The queue is of no use afterwards; the new table
    /// belongs to a new one.
    pub fn retire(&mut self, mut fate: impl FnMut(&Orphan<'_>) -> Fate, mut told: impl FnMut(Slot, Retired)) {
        self.fenced = true;
        self.due.clear();
        for entry in &mut self.table {
            if !core::mem::take(&mut entry.out) {
                continue;
            }
            let Command { slot, opcode, flags, offset, length, payload, .. } = entry.command;
            let (room, token, placement) = (entry.room, entry.token, entry.placement);
            let sent = entry.sent && !entry.refused;
            told(
                slot,
                match fate(&Orphan { command: &entry.command, sent }) {
                    Fate::Replay => {
                        let flags = flags.without(Flags::PAYLOAD_FOLLOWS);
                        Retired::Replay(Operation { opcode, flags, offset, length, payload, room, placement, token })
                    }
                    Fate::End(status) => {
                        Retired::Ended(Completion { slot, token, opcode, status, result: 0, received: 0 })
                    }
                },
            );
        }
        self.busy = SlotSet::default();
        self.out = 0;
        self.allowance = Allowance::new(self.allowance.said());
    }

    /// Gives every command up, with `status`: there will be no other path. `ended` is told of each.
    pub fn abandon(&mut self, status: Status, mut ended: impl FnMut(Completion)) {
        self.retire(
            |_| Fate::End(status),
            |_, retired| {
                if let Retired::Ended(completion) = retired {
                    ended(completion);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::super::queue::QueueOptions;
    use super::*;
    use crate::ids::{Epoch, GrantNumber, Instance};
    use crate::wire::{Credits, Payload, Placement, Reply};

    const CREDITS: Credits = Credits { granted_slots: 9, number: GrantNumber(7), data_window: 16384 };
    const ALONE: Rules = Rules { alone: true, poisoned: false };
    const AMONG_OTHERS: Rules = Rules { alone: false, poisoned: false };

    fn queue() -> Queue {
        let options = QueueOptions { depth: 9, in_capsule: 4096, credits: CREDITS, max_transfer: 65536 };
        Queue::new(options, Instance(1), Epoch(1))
    }

    fn operation(opcode: Opcode) -> Operation {
        let length = if opcode == Opcode::FLUSH { 0 } else { 512 };
        let payload = if opcode == Opcode::WRITE { Payload { length: 512, crc: 7 } } else { Payload::default() };
        let placement = Placement { address: 0x1000, key: 3 };
        let token = opcode.0.into();
        Operation { opcode, flags: Flags::NONE, offset: 0, length, payload, room: 0, placement, token }
    }

    /// What becomes of each opcode after it was sent.
    fn fates(rules: Rules) -> Vec<(Opcode, Fate)> {
        let mut q = queue();
        for opcode in Opcode::ALL {
            q.submit(&operation(opcode)).unwrap();
            q.next_frame().unwrap();
        }
        let mut fates = Vec::new();
        q.retire(
            |orphan| rules.fate(orphan),
            |_, retired| {
                fates.push(match retired {
                    Retired::Replay(operation) => (operation.opcode, Fate::Replay),
                    Retired::Ended(completion) => (completion.opcode, Fate::End(completion.status)),
                })
            },
        );
        assert_eq!(q.outstanding(), 0);
        fates
    }

    const UNKNOWN: Fate = Fate::End(Status::OUTCOME_UNKNOWN);

    #[test]
    fn an_exclusive_holder_replays_all_but_compare_and_write() {
        for (opcode, fate) in fates(ALONE) {
            let expected = if opcode == Opcode::COMPARE_AND_WRITE { UNKNOWN } else { Fate::Replay };
            assert_eq!(fate, expected, "{opcode:?}");
        }
    }

    #[test]
    fn a_shared_writer_replays_no_change() {
        for (opcode, fate) in fates(AMONG_OTHERS) {
            assert_eq!(fate, if opcode.changes() { UNKNOWN } else { Fate::Replay }, "{opcode:?}");
        }
    }

    #[test]
    fn i5_a_replayed_flush_does_not_hide_what_was_lost() {
        for rules in [ALONE, AMONG_OTHERS] {
            let fates = fates(Rules { poisoned: true, ..rules });
            assert!(fates.contains(&(Opcode::FLUSH, Fate::End(Status::FLUSH_FAILED))));
        }
    }

    #[test]
    fn a_change_that_never_left_is_not_in_doubt() {
        let mut q = queue();
        q.submit(&operation(Opcode::COMPARE_AND_WRITE)).unwrap();
        // Refused for its payload, and not sent again yet: it did nothing.
        let slot = q.submit(&operation(Opcode::WRITE)).unwrap();
        let frames = [q.next_frame().unwrap().frame, q.next_frame().unwrap().frame];
        let crate::wire::Frame::Command(write) = frames[1] else { panic!("no command") };
        let refused = Reply { status: Status::PAYLOAD_CRC, ..Reply::to(&write, Epoch(1), CREDITS) };
        q.receive(&refused).unwrap();
        q.submit(&operation(Opcode::COMPARE_AND_WRITE)).unwrap();
        let mut sent = Vec::new();
        q.retire(
            |orphan| {
                sent.push((orphan.command.slot, orphan.sent));
                AMONG_OTHERS.fate(orphan)
            },
            |_, _| {},
        );
        assert_eq!(sent, [(Slot(0), true), (slot, false), (Slot(2), false)]);
        let never = Orphan { command: &write, sent: false };
        assert_eq!(AMONG_OTHERS.fate(&never), Fate::Replay);
    }

    #[test]
    fn a_replay_is_the_operation_as_it_was_submitted() {
        let mut q = queue();
        q.submit(&operation(Opcode::WRITE)).unwrap();
        q.next_frame().unwrap();
        let mut replayed = None;
        q.retire(|orphan| ALONE.fate(orphan), |slot, retired| replayed = Some((slot, retired)));
        let Some((Slot(0), Retired::Replay(o))) = replayed else { panic!("not replayed") };
        assert_eq!((o.token, o.flags, o.placement.key, o.payload.crc), (2, Flags::NONE, 3, 7));
        let mut fresh = queue();
        assert_eq!(fresh.submit(&o), Some(Slot(0)));
    }
}
