//! Slots, sequences and epochs of one queue, as the target keeps them.
//!
//! The life of a command:
//!
//! ```text
//!            receive                 payload_arrived           start            finish
//!  free ───────────────▶ gathering ───────────────▶ ready ─────────────▶ stored ──────────▶ answered
//!   ▲    (no payload) ───────┼───────────────────────▲│                       (reply recorded)  │
//!   └────── path lost ◀──────┴─── not reported ◀──────┘                next sequence ◀──────────┘
//! ```
//!
//! When the next path takes over, what is ready or at storage takes over its epoch if the initiator reports it;
//! what is ready and isn't reported never starts (I2).
//!
//! The driver owns buffers, storage and the rail; this owns what may be done when. It is driven by
//! `receive`/`receive_data` for each frame, `payload_arrived` when a payload is whole, `start` at the
//! very moment of submission to storage (the second look at the fence, I2), and `finish` when storage
//! has ended.

use alloc::boxed::Box;
use alloc::vec;

use super::credit::Grant;
use crate::canary::{Canary, broken};
use crate::geometry::{Geometry, Request};
use crate::ids::{Epoch, Instance, Sequence, Slot};
use crate::opcode::{Flags, Opcode};
use crate::status::Status;
use crate::violation::Violation;
use crate::wire::{Command, Credits, Payload, Reply, Transfer, Verdict, VerdictKind};

/// What an activation agrees on.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Slots in the table, at most [`crate::limits::MAX_DEPTH`].
    pub depth: u16,
    /// In-capsule size in bytes.
    pub in_capsule: u32,
    /// Slots granted and data window at the start.
    pub credits: Credits,
    /// The volume's geometry.
    pub geometry: Geometry,
    /// Whether changes are refused.
    pub read_only: bool,
}

/// What to do with a command, or with a DATA frame, that arrived. Bytes that follow the header and have
/// no other use are to be skipped: only [`Intake::Receive`] takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intake {
    /// It has no payload to wait for: call [`Queue::start`] when it may go to storage.
    Ready,
    /// Its payload follows: put it into a private buffer, then call [`Queue::payload_arrived`].
    Receive,
    /// Its payload has to be fetched from the initiator, when there is a buffer for it.
    Fetch,
    /// It is answered with this reply: refused, or a retry of what was already done.
    Reply(Reply),
    /// A retry of what is at work: its reply will come.
    Running,
    /// It belongs to an older path: dropped and counted.
    Stale,
}

/// What to do after a payload is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Call [`Queue::start`] when it may go to storage.
    Ready,
    /// The payload is damaged; nothing was executed; this is the reply.
    Refuse(Reply),
    /// The command isn't waiting for a payload any more.
    Stale,
}

/// Whether a command goes to storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// It does, and counts as at storage from here on.
    Go(Request),
    /// The volume has become too small for it; nothing was executed; this is the reply.
    Refuse(Reply),
    /// It must not (I2), or is there already.
    Stale,
}

/// How storage ended a command.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Status.
    pub status: Option<Status>,
    /// The number that goes with it (SPEC.md, "Commands").
    pub result: u64,
    /// The payload of the reply.
    pub payload: Payload,
}

impl Outcome {
    /// Nothing but a status.
    #[must_use]
    pub fn status(status: Status) -> Self {
        Self { status: Some(status), ..Self::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing was ever in it, or what was is forgotten as unknown.
    Free,
    /// The payload isn't whole yet.
    Gathering,
    /// Parked: may go to storage.
    Ready,
    /// At storage.
    Stored,
    /// Ended, its reply recorded.
    Answered,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    phase: Phase,
    sequence: Sequence,
    /// Its epoch is that of the path which answers it: of the path that it came on, or that took it over.
    command: Command,
    /// Made when the command arrived: parsed once, used once.
    request: Option<Request>,
    reply: Option<Reply>,
    /// Bytes of the data window it holds until it is answered.
    unasked: u32,
    /// The initiator was asked for the payload, which hasn't come yet.
    asked: bool,
    /// At storage, and ended for the initiator with a report that didn't match it: its reply goes to nobody.
    disowned: bool,
}

/// The target's end of a queue; outlives its paths.
#[derive(Debug)]
pub struct Queue {
    epoch: Epoch,
    instance: Instance,
    options: QueueOptions,
    grant: Grant,
    table: Box<[Entry]>,
    /// Commands that aren't answered.
    busy: u16,
}

impl Queue {
    /// A queue with an empty table, whose first path has `epoch`.
    #[must_use]
    pub fn new(options: QueueOptions, instance: Instance, epoch: Epoch) -> Self {
        let entry = Entry {
            phase: Phase::Free,
            sequence: Sequence(0),
            command: Command::default(),
            request: None,
            reply: None,
            unasked: 0,
            asked: false,
            disowned: false,
        };
        Self {
            epoch,
            instance,
            options,
            grant: Grant::new(options.credits, options.depth),
            table: vec![entry; usize::from(options.depth)].into_boxed_slice(),
            busy: 0,
        }
    }

    /// Epoch of the current path.
    #[inline]
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The number of this slot table.
    #[must_use]
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// What was agreed on.
    #[must_use]
    pub fn options(&self) -> &QueueOptions {
        &self.options
    }

    /// Commands that aren't answered.
    #[must_use]
    pub fn busy(&self) -> u16 {
        self.busy
    }

    /// The request of a command that isn't answered yet.
    #[must_use]
    pub fn request(&self, slot: Slot, sequence: Sequence) -> Option<Request> {
        let entry = self.table.get(slot.index())?;
        (entry.sequence == sequence && self.is_busy(slot)).then_some(entry.request)?
    }

    /// The sequence of the slot's command, if it has one that isn't answered.
    #[must_use]
    pub fn sequence(&self, slot: Slot) -> Option<Sequence> {
        self.is_busy(slot).then(|| self.table[slot.index()].sequence)
    }

    /// Whether the slot has a command that isn't answered.
    #[must_use]
    pub fn is_busy(&self, slot: Slot) -> bool {
        self.table.get(slot.index()).is_some_and(|e| !matches!(e.phase, Phase::Free | Phase::Answered))
    }

    /// Whether the command waits for its payload.
    #[must_use]
    pub fn is_gathering(&self, slot: Slot, sequence: Sequence) -> bool {
        self.table.get(slot.index()).is_some_and(|e| e.phase == Phase::Gathering && e.sequence == sequence)
    }

    /// Commands whose payload isn't whole yet.
    #[must_use]
    pub fn gathering(&self) -> u16 {
        self.table.iter().filter(|e| e.phase == Phase::Gathering).count() as u16
    }

    /// The ledger of credits.
    #[must_use]
    pub fn grant(&mut self) -> &mut Grant {
        &mut self.grant
    }

    /// The volume has another size from now on. Commands that aren't at storage yet, and don't fit any more,
    /// are refused by [`Self::start`].
    pub fn resize(&mut self, size: u64) {
        self.options.geometry.size = size;
    }

    /// The command that occupies `slot`, if it has sequence `sequence`.
    #[must_use]
    pub fn command(&self, slot: Slot, sequence: Sequence) -> Option<&Command> {
        let entry = self.table.get(slot.index())?;
        (entry.sequence == sequence && entry.phase != Phase::Free).then_some(&entry.command)
    }

    /// A command arrived.
    ///
    /// # Errors
    /// A [`Violation`]: the initiator broke a rule, and its path ends.
    pub fn receive(&mut self, command: &Command) -> Result<Intake, Violation> {
        if command.epoch < self.epoch && !broken(Canary::EpochUncheckedOnArrival) {
            return Ok(Intake::Stale);
        }
        if command.epoch > self.epoch {
            return Err(Violation::new(Status::UNEXPECTED_FRAME, "a command of an epoch that wasn't activated"));
        }
        let overrun = Violation::new(Status::CREDIT_OVERRUN, "a command in a slot that the queue doesn't have");
        let entry = self.table.get(command.slot.index()).ok_or(overrun)?;
        // First what it says: an initiator doesn't acknowledge a shrink and break it with the same command.
        self.grant.seen(command.grant_seen)?;
        if command.sequence != entry.sequence {
            self.grant.check_slot(command.slot)?;
        }
        if command.sequence == entry.sequence && entry.phase != Phase::Free {
            return self.retry(command);
        }
        if command.sequence != entry.sequence.next() {
            return Err(Violation::new(Status::UNEXPECTED_FRAME, "a sequence that doesn't follow its slot's last one"));
        }
        if !matches!(entry.phase, Phase::Free | Phase::Answered) {
            return Err(Violation::new(Status::CREDIT_OVERRUN, "a new command in a slot that is busy"));
        }
        self.admit(command)
    }

    /// A command with a new sequence, in a slot that is free for it.
    fn admit(&mut self, command: &Command) -> Result<Intake, Violation> {
        let parsed = Request::parse(command, &self.options.geometry, self.options.read_only);
        let length = command.payload.length;
        let follows = command.flags.has(Flags::PAYLOAD_FOLLOWS);
        // Refused or not: what follows was sent under the window's rule, and a peer that ignores the rule
        // is no better for sending nonsense.
        let unasked = if follows && length > self.options.in_capsule { length } else { 0 };
        self.grant.use_window(unasked)?;
        let entry = &mut self.table[command.slot.index()];
        *entry = Entry {
            phase: Phase::Gathering,
            sequence: command.sequence,
            command: *command,
            request: parsed.ok(),
            reply: None,
            unasked,
            asked: false,
            disowned: false,
        };
        self.busy += 1;
        Ok(match parsed {
            Err(status) => Intake::Reply(self.answer(command.slot, Outcome::status(status))),
            Ok(_) if length == 0 => {
                self.table[command.slot.index()].phase = Phase::Ready;
                Intake::Ready
            }
            Ok(_) if follows => Intake::Receive,
            Ok(_) => Intake::Fetch,
        })
    }

    /// A command whose sequence was seen before.
    fn retry(&mut self, command: &Command) -> Result<Intake, Violation> {
        let epoch = self.epoch;
        let credits = self.grant.said();
        let entry = &mut self.table[command.slot.index()];
        if !entry.command.is_repeated_by(command) && !broken(Canary::RetryNotCompared) {
            // Answered, not recorded: the original's own reply stays what it is.
            let mut reply = Reply::to(command, epoch, credits);
            reply.status = Status::RETRY_MISMATCH;
            return Ok(Intake::Reply(reply));
        }
        Ok(match entry.phase {
            Phase::Answered if is_recorded(entry.command.opcode) => match &mut entry.reply {
                Some(reply) => {
                    (reply.epoch, reply.credits) = (epoch, credits);
                    Intake::Reply(*reply)
                }
                None => Intake::Running,
            },
            // What changes nothing is executed again: its data may not have arrived.
            Phase::Answered => {
                entry.phase = Phase::Free;
                entry.sequence = Sequence(entry.sequence.0.wrapping_sub(1));
                return self.admit(command);
            }
            _ => {
                // Its one reply goes where the repetition came from.
                (entry.command.epoch, entry.command.placement) = (epoch, command.placement);
                Intake::Running
            }
        })
    }

    /// A DATA frame arrived, in answer to a fetch.
    ///
    /// # Errors
    /// A [`Violation`] when nobody asked for it, or it isn't what was announced.
    pub fn receive_data(&mut self, data: &Transfer) -> Result<Intake, Violation> {
        if data.epoch < self.epoch {
            return Ok(Intake::Stale);
        }
        let epoch = self.epoch;
        let entry = self.table.get_mut(data.slot.index()).filter(|e| {
            e.asked
                && e.phase == Phase::Gathering
                && e.sequence == data.sequence
                && e.command.payload == data.payload
                && data.epoch == epoch
        });
        let unasked = Violation::new(Status::UNEXPECTED_FRAME, "a payload that nobody asked for");
        entry.ok_or(unasked)?.asked = false;
        Ok(Intake::Receive)
    }

    /// The frame that asks for the payload of a slot; nothing if it isn't waiting for one any more. Only
    /// from here on may the payload come: the caller has a buffer for it.
    #[must_use]
    pub fn fetch(&mut self, slot: Slot, sequence: Sequence) -> Option<Transfer> {
        let entry = self.table.get_mut(slot.index())?;
        if entry.phase != Phase::Gathering || entry.sequence != sequence {
            return None;
        }
        entry.asked = true;
        let Command { opcode, payload, .. } = entry.command;
        Some(Transfer { opcode, slot, epoch: self.epoch, sequence, payload })
    }

    /// The payload of a slot is whole in a private buffer, and its CRC32C there is `crc` (I7).
    pub fn payload_arrived(&mut self, slot: Slot, sequence: Sequence, crc: u32) -> Step {
        match self.table.get_mut(slot.index()) {
            Some(entry) if entry.phase == Phase::Gathering && entry.sequence == sequence => {
                if entry.command.payload.crc == crc || broken(Canary::CrcUnchecked) {
                    entry.phase = Phase::Ready;
                    return Step::Ready;
                }
                Step::Refuse(self.answer(slot, Outcome::status(Status::PAYLOAD_CRC)))
            }
            _ => Step::Stale,
        }
    }

    /// The command goes to storage now, if it still may: the second look at the fence (I2).
    pub fn start(&mut self, slot: Slot, sequence: Sequence) -> Start {
        let (size, epoch) = (self.options.geometry.size, self.epoch);
        let Some(entry) = self.table.get_mut(slot.index()) else { return Start::Stale };
        let Some(request) = entry.request.filter(|_| entry.phase == Phase::Ready && entry.sequence == sequence) else {
            return Start::Stale;
        };
        if entry.command.epoch != epoch && !broken(Canary::EpochUncheckedAtSubmission) {
            self.forget(slot);
            return Start::Stale;
        }
        // The volume may have shrunk since the command was checked.
        if request.range().is_some_and(|range| range.end() > size) {
            return Start::Refuse(self.answer(slot, Outcome::status(Status::OUT_OF_RANGE)));
        }
        entry.phase = Phase::Stored;
        Start::Go(request)
    }

    /// Storage has ended the command: the reply, recorded for retries. Nothing if it isn't at storage, or if the
    /// initiator doesn't wait for it any more.
    pub fn finish(&mut self, slot: Slot, sequence: Sequence, outcome: Outcome) -> Option<Reply> {
        let entry = self.table.get(slot.index())?;
        if !matches!(entry.phase, Phase::Stored | Phase::Ready) || entry.sequence != sequence {
            return None;
        }
        let disowned = entry.disowned;
        let reply = self.answer(slot, outcome);
        (!disowned).then_some(reply)
    }

    /// Records the reply and frees what the command held.
    fn answer(&mut self, slot: Slot, outcome: Outcome) -> Reply {
        let entry = &mut self.table[slot.index()];
        self.grant.free_window(entry.unasked);
        self.busy = self.busy.saturating_sub(1);
        let reply = Reply {
            status: outcome.status.unwrap_or(Status::OK),
            result: outcome.result,
            payload: outcome.payload,
            ..Reply::to(&entry.command, self.epoch, self.grant.said())
        };
        entry.unasked = 0;
        entry.phase = Phase::Answered;
        entry.reply = Some(reply);
        reply
    }

    /// The command wasn't executed and never will be: as if it had not come.
    fn forget(&mut self, slot: Slot) {
        let entry = &mut self.table[slot.index()];
        entry.phase = Phase::Free;
        entry.sequence = Sequence(entry.sequence.0.wrapping_sub(1));
        entry.asked = false;
        self.grant.free_window(core::mem::take(&mut entry.unasked));
        self.busy = self.busy.saturating_sub(1);
    }

    /// The path is lost, and fenced: payloads that weren't whole will not come on it, and what came without
    /// theirs is forgotten. What is ready or at storage goes on.
    pub fn path_lost(&mut self) {
        for slot in (0..self.options.depth).map(Slot) {
            if self.table[slot.index()].phase == Phase::Gathering {
                self.forget(slot);
            }
        }
    }

    /// The session is over: nothing is accepted any more, and what is ready never starts. What is at storage
    /// ends; [`Self::at_storage`] says when (I2).
    pub fn end(&mut self) {
        self.path_lost();
        self.epoch = Epoch::OVER;
    }

    /// Commands at storage.
    #[must_use]
    pub fn at_storage(&self) -> u16 {
        self.table.iter().filter(|e| e.phase == Phase::Stored).count() as u16
    }

    /// Whether a path with this epoch may take over.
    ///
    /// # Errors
    /// STALE_EPOCH when it isn't greater than the queue's; SESSION_LOST for another instance. An initiator that
    /// never heard its first ACTIVATED asks for a new table again: it is given this one if nothing was ever done
    /// in it, which is the same.
    pub fn may_activate(&self, epoch: Epoch, instance: Instance) -> Result<(), Status> {
        let known = instance == self.instance || (instance == Instance(0) && self.is_untouched());
        if !known && !broken(Canary::InstanceIgnored) {
            return Err(Status::SESSION_LOST);
        }
        if epoch <= self.epoch && !broken(Canary::StaleEpochActivated) {
            return Err(Status::STALE_EPOCH);
        }
        Ok(())
    }

    fn is_untouched(&self) -> bool {
        self.table.iter().all(|entry| entry.phase == Phase::Free && entry.sequence == Sequence(0))
    }

    /// The old path is fenced and drained; the new one, with `epoch`, takes over. Call [`Self::verdict`] for each
    /// command of the report then, before anything else: what isn't reported doesn't take over.
    pub fn activate(&mut self, epoch: Epoch) {
        self.path_lost();
        self.epoch = epoch;
    }

    /// What is known of a command that the initiator reports in flight, after [`Self::activate`].
    ///
    /// # Errors
    /// A [`Violation`] when the report names a slot or sequence that can't be.
    pub fn verdict(&mut self, command: &Command) -> Result<Verdict, Violation> {
        let slot = command.slot;
        let no_slot = Violation::new(Status::MALFORMED, "a report of a slot that the queue doesn't have");
        let entry = self.table.get_mut(slot.index()).ok_or(no_slot)?;
        let (epoch, credits) = (self.epoch, self.grant.said());
        let unknown = Verdict { slot, kind: VerdictKind::Unknown, reply: None };
        let ended = matches!(entry.phase, Phase::Free | Phase::Answered) || entry.disowned;
        if command.sequence == entry.sequence.next() && ended {
            return Ok(unknown);
        }
        if command.sequence != entry.sequence || entry.phase == Phase::Free {
            return Err(Violation::new(Status::MALFORMED, "a report of a sequence that can't be in flight"));
        }
        if !entry.command.is_repeated_by(command) && !broken(Canary::RetryNotCompared) {
            // The initiator counts the sequence as used up, and so must we, or its next command has a wrong one.
            match entry.phase {
                Phase::Stored => entry.disowned = true,
                Phase::Answered => {}
                _ => drop(self.answer(slot, Outcome::status(Status::RETRY_MISMATCH))),
            }
            let reply = Reply { status: Status::RETRY_MISMATCH, ..Reply::to(command, epoch, credits) };
            return Ok(Verdict { slot, kind: VerdictKind::Done, reply: Some(reply) });
        }
        Ok(match entry.phase {
            Phase::Answered if is_recorded(command.opcode) => {
                if let Some(reply) = &mut entry.reply {
                    (reply.epoch, reply.credits) = (epoch, credits);
                }
                Verdict { slot, kind: VerdictKind::Done, reply: entry.reply }
            }
            // It is executed again: its data may not have arrived.
            Phase::Answered => unknown,
            _ if broken(Canary::RunningRunAgain) => {
                self.forget(slot);
                unknown
            }
            _ => {
                // The reply goes to the new path, and where the payload is wanted now.
                entry.disowned = false;
                (entry.command.epoch, entry.command.placement) = (epoch, command.placement);
                Verdict { slot, kind: VerdictKind::Running, reply: None }
            }
        })
    }
}

/// Whether the reply to such a command is kept for repetitions (I1). Else it is executed again: it changes
/// nothing.
fn is_recorded(opcode: Opcode) -> bool {
    (opcode.changes() || opcode == Opcode::FLUSH) && !broken(Canary::ReplyCacheOff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::GrantNumber;

    const CREDITS: Credits = Credits { granted_slots: 4, number: GrantNumber(7), data_window: 16384 };

    fn queue() -> Queue {
        let options = QueueOptions {
            depth: 4,
            in_capsule: 4096,
            credits: CREDITS,
            geometry: Geometry { size: 1 << 20, logical_block: 512, physical_block: 512, max_transfer: 65536 },
            read_only: false,
        };
        Queue::new(options, Instance(9), Epoch(1))
    }

    fn write(slot: u16, sequence: u64, length: u32) -> Command {
        Command {
            opcode: Opcode::WRITE,
            flags: Flags::PAYLOAD_FOLLOWS,
            slot: Slot(slot),
            grant_seen: CREDITS.number,
            epoch: Epoch(1),
            sequence: Sequence(sequence),
            length: u64::from(length),
            payload: Payload { length, crc: 7 },
            ..Command::default()
        }
    }

    fn read(slot: u16, sequence: u64) -> Command {
        Command { opcode: Opcode::READ, flags: Flags::NONE, payload: Payload::default(), ..write(slot, sequence, 4096) }
    }

    fn starts(q: &mut Queue, slot: Slot, sequence: Sequence) -> bool {
        matches!(q.start(slot, sequence), Start::Go(_))
    }

    /// Runs a write to its end.
    fn done(q: &mut Queue, command: &Command) -> Reply {
        let (slot, sequence) = (command.slot, command.sequence);
        assert_eq!(q.receive(command), Ok(Intake::Receive));
        assert_eq!(q.payload_arrived(slot, sequence, 7), Step::Ready);
        assert!(starts(q, slot, sequence));
        q.finish(slot, sequence, Outcome::status(Status::OK)).unwrap()
    }

    #[test]
    fn i1_a_retry_of_a_finished_write_gets_its_recorded_reply() {
        let mut q = queue();
        let reply = done(&mut q, &write(0, 1, 4096));
        assert_eq!(q.receive(&write(0, 1, 4096)), Ok(Intake::Reply(reply)));
        assert_eq!(q.start(Slot(0), Sequence(1)), Start::Stale, "it must not run again");
    }

    #[test]
    fn i1_a_retry_of_a_running_write_attaches_to_it() {
        let mut q = queue();
        q.receive(&write(0, 1, 4096)).unwrap();
        q.payload_arrived(Slot(0), Sequence(1), 7);
        assert!(starts(&mut q, Slot(0), Sequence(1)));
        assert_eq!(q.receive(&write(0, 1, 4096)), Ok(Intake::Running));
        assert_eq!(q.start(Slot(0), Sequence(1)), Start::Stale);
    }

    #[test]
    fn i1_a_retry_that_differs_is_refused_and_the_original_keeps_its_reply() {
        let mut q = queue();
        let reply = done(&mut q, &write(0, 1, 4096));
        let other = Command { offset: 512, ..write(0, 1, 4096) };
        let Ok(Intake::Reply(refused)) = q.receive(&other) else { panic!("not refused") };
        assert_eq!(refused.status, Status::RETRY_MISMATCH);
        assert_eq!(q.receive(&write(0, 1, 4096)), Ok(Intake::Reply(reply)));
    }

    #[test]
    fn i1_a_finished_read_is_executed_again() {
        let mut q = queue();
        assert_eq!(q.receive(&read(0, 1)), Ok(Intake::Ready));
        assert!(starts(&mut q, Slot(0), Sequence(1)));
        q.finish(Slot(0), Sequence(1), Outcome::default()).unwrap();
        assert_eq!(q.receive(&read(0, 1)), Ok(Intake::Ready));
        assert!(starts(&mut q, Slot(0), Sequence(1)));
    }

    #[test]
    fn i7_a_damaged_payload_is_refused_and_executes_nothing() {
        let mut q = queue();
        q.receive(&write(0, 1, 4096)).unwrap();
        let Step::Refuse(reply) = q.payload_arrived(Slot(0), Sequence(1), 8) else { panic!("not refused") };
        assert_eq!(reply.status, Status::PAYLOAD_CRC);
        assert_eq!(q.start(Slot(0), Sequence(1)), Start::Stale);
        done(&mut q, &write(0, 2, 4096));
    }

    #[test]
    fn i6_a_slot_that_is_busy_or_not_granted_ends_the_path() {
        let mut q = queue();
        q.receive(&write(0, 1, 4096)).unwrap();
        assert_eq!(q.receive(&write(0, 2, 4096)).unwrap_err().status, Status::CREDIT_OVERRUN);
        assert_eq!(q.receive(&write(4, 1, 4096)).unwrap_err().status, Status::CREDIT_OVERRUN);
        assert_eq!(q.receive(&write(1, 2, 4096)).unwrap_err().status, Status::UNEXPECTED_FRAME);
    }

    #[test]
    fn i6_payload_beyond_the_window_ends_the_path() {
        let mut q = queue();
        q.receive(&write(0, 1, 16384)).unwrap();
        q.receive(&write(1, 1, 4096)).unwrap();
        assert_eq!(q.receive(&write(2, 1, 8192)).unwrap_err().status, Status::WINDOW_OVERRUN);
    }

    #[test]
    fn a_refused_command_gives_back_its_window() {
        let mut q = queue();
        for sequence in 1..10 {
            let command = Command { offset: 1, ..write(0, sequence, 16384) };
            let Ok(Intake::Reply(reply)) = q.receive(&command) else { panic!("not refused") };
            assert_eq!(reply.status, Status::MISALIGNED);
        }
        assert_eq!(q.busy(), 0);
    }

    #[test]
    fn a_payload_that_is_asked_for_is_taken_once() {
        let mut q = queue();
        let command = Command { flags: Flags::NONE, ..write(0, 1, 65536) };
        assert_eq!(q.receive(&command), Ok(Intake::Fetch));
        let data = q.fetch(Slot(0), Sequence(1)).unwrap();
        assert_eq!(q.receive_data(&data), Ok(Intake::Receive));
        assert_eq!(q.payload_arrived(Slot(0), Sequence(1), 7), Step::Ready);
        assert!(q.receive_data(&data).is_err());
    }

    #[test]
    fn i6_a_payload_that_came_before_it_was_asked_for_ends_the_path() {
        let mut q = queue();
        let command = Command { flags: Flags::NONE, ..write(0, 1, 65536) };
        assert_eq!(q.receive(&command), Ok(Intake::Fetch));
        let Command { opcode, slot, epoch, sequence, payload, .. } = command;
        let data = Transfer { opcode, slot, epoch, sequence, payload };
        assert_eq!(q.receive_data(&data).unwrap_err().status, Status::UNEXPECTED_FRAME);
        q.fetch(slot, sequence).unwrap();
        assert!(q.receive_data(&Transfer { epoch: Epoch(2), ..data }).is_err(), "of a path that isn't there yet");
        assert_eq!(q.receive_data(&data), Ok(Intake::Receive));
        assert!(q.receive_data(&data).is_err(), "twice");
    }

    #[test]
    fn i2_after_an_activation_older_commands_are_stale_and_half_payloads_unknown() {
        let mut q = queue();
        let finished = write(0, 1, 4096);
        done(&mut q, &finished);
        let parked = write(1, 1, 4096);
        q.receive(&parked).unwrap();
        q.payload_arrived(Slot(1), Sequence(1), 7);
        let half = write(2, 1, 4096);
        q.receive(&half).unwrap();
        let never = write(3, 1, 4096);

        assert_eq!(q.may_activate(Epoch(1), Instance(9)), Err(Status::STALE_EPOCH));
        assert_eq!(q.may_activate(Epoch(2), Instance(8)), Err(Status::SESSION_LOST));
        q.activate(Epoch(2));
        let kinds = [finished, parked, half, never].map(|c| q.verdict(&c).unwrap().kind);
        use VerdictKind::{Done, Running, Unknown};
        assert_eq!(kinds, [Done, Running, Unknown, Unknown]);

        assert_eq!(q.receive(&half), Ok(Intake::Stale), "it was sent on the old path");
        assert_eq!(q.payload_arrived(Slot(2), Sequence(1), 7), Step::Stale);
        assert!(starts(&mut q, Slot(1), Sequence(1)), "the parked one takes over the new epoch");
        for command in [half, never] {
            assert_eq!(q.receive(&Command { epoch: Epoch(2), ..command }), Ok(Intake::Receive));
        }
    }

    /// Runs a command whose payload follows, to its end; it must be taken.
    fn again(q: &mut Queue, command: &Command) -> Reply {
        done(q, &Command { epoch: q.epoch(), ..*command })
    }

    #[test]
    fn unknown_commands_may_come_again_in_slots_that_shrank_away() {
        let mut q = queue();
        assert!(q.grant().change(2));
        let lost = write(3, 1, 4096);
        q.activate(Epoch(2));
        assert_eq!(q.verdict(&lost).unwrap().kind, VerdictKind::Unknown);
        again(&mut q, &lost);
        let acknowledged = Command { grant_seen: q.grant().said().number, ..write(0, 1, 4096) };
        again(&mut q, &acknowledged);
        let next = Command { epoch: Epoch(2), ..write(3, 2, 4096) };
        assert_eq!(q.receive(&next).unwrap_err().status, Status::CREDIT_OVERRUN);
    }

    #[test]
    fn a_damaged_payload_may_come_again_as_a_new_sequence_in_a_slot_that_shrank_away() {
        let mut q = queue();
        assert!(q.grant().change(2));
        let lost = write(3, 1, 4096);
        let refused = write(2, 1, 4096);
        q.receive(&refused).unwrap();
        assert!(matches!(q.payload_arrived(Slot(2), Sequence(1), 8), Step::Refuse(_)));
        q.activate(Epoch(2));
        assert_eq!(q.verdict(&refused).unwrap().kind, VerdictKind::Done, "with payload_crc");
        assert_eq!(q.verdict(&lost).unwrap().kind, VerdictKind::Unknown);
        assert_eq!(q.receive(&Command { epoch: Epoch(2), ..lost }), Ok(Intake::Receive));
        assert!(matches!(q.payload_arrived(Slot(3), Sequence(1), 8), Step::Refuse(_)));
        again(&mut q, &write(3, 2, 4096));
        again(&mut q, &write(2, 2, 4096));
    }

    #[test]
    fn i2_a_parked_command_that_the_new_path_does_not_report_never_starts() {
        let mut q = queue();
        let (taken, dropped) = (write(0, 1, 4096), write(1, 1, 16384));
        for command in [taken, dropped] {
            q.receive(&command).unwrap();
            q.payload_arrived(command.slot, Sequence(1), 7);
        }
        q.activate(Epoch(2));
        assert_eq!(q.verdict(&taken).unwrap().kind, VerdictKind::Running);
        assert_eq!(q.start(Slot(1), Sequence(1)), Start::Stale);
        assert!(starts(&mut q, Slot(0), Sequence(1)));
        assert_eq!(q.busy(), 1);
        // Its slot, its sequence and its part of the window are free.
        again(&mut q, &dropped);
    }

    #[test]
    fn i2_of_a_session_that_is_over_nothing_starts_and_nothing_is_accepted() {
        let mut q = queue();
        for command in [write(0, 1, 4096), write(1, 1, 4096)] {
            q.receive(&command).unwrap();
            q.payload_arrived(command.slot, Sequence(1), 7);
        }
        assert!(starts(&mut q, Slot(0), Sequence(1)));
        q.end();
        assert_eq!(q.at_storage(), 1);
        assert_eq!(q.start(Slot(1), Sequence(1)), Start::Stale);
        assert_eq!(q.receive(&write(2, 1, 4096)), Ok(Intake::Stale));
        assert_eq!(q.may_activate(Epoch(u64::MAX), Instance(9)), Err(Status::STALE_EPOCH));
        q.finish(Slot(0), Sequence(1), Outcome::default()).unwrap();
        assert_eq!((q.at_storage(), q.busy()), (0, 0));
    }

    #[test]
    fn an_initiator_that_never_heard_its_first_activation_may_ask_again() {
        let mut q = queue();
        assert_eq!(q.may_activate(Epoch(1), Instance(0)), Err(Status::STALE_EPOCH));
        assert_eq!(q.may_activate(Epoch(2), Instance(0)), Ok(()));
        done(&mut q, &write(0, 1, 4096));
        assert_eq!(q.may_activate(Epoch(2), Instance(0)), Err(Status::SESSION_LOST), "it isn't new any more");
    }

    #[test]
    fn i8_what_a_running_command_holds_of_the_window_it_holds_on_the_next_path() {
        let mut q = queue();
        let running = write(0, 1, 16384);
        q.receive(&running).unwrap();
        q.payload_arrived(Slot(0), Sequence(1), 7);
        q.activate(Epoch(2));
        q.verdict(&running).unwrap();
        let more = Command { epoch: Epoch(2), ..write(1, 1, 8192) };
        assert_eq!(q.receive(&more).unwrap_err().status, Status::WINDOW_OVERRUN);
        assert!(starts(&mut q, Slot(0), Sequence(1)));
        q.finish(Slot(0), Sequence(1), Outcome::default()).unwrap();
        again(&mut q, &write(1, 1, 16384));
    }

    #[test]
    fn a_half_payload_gives_back_its_window_with_its_path() {
        let mut q = queue();
        q.receive(&write(0, 1, 16384)).unwrap();
        q.path_lost();
        assert_eq!(q.busy(), 0);
        q.activate(Epoch(2));
        again(&mut q, &write(1, 1, 16384));
    }

    #[test]
    fn i1_a_repetition_on_the_new_path_takes_the_running_command_over() {
        let mut q = queue();
        let parked = write(0, 1, 4096);
        q.receive(&parked).unwrap();
        q.payload_arrived(Slot(0), Sequence(1), 7);
        q.activate(Epoch(2));
        assert_eq!(q.receive(&Command { epoch: Epoch(2), ..parked }), Ok(Intake::Running));
        assert!(starts(&mut q, Slot(0), Sequence(1)));
    }

    #[test]
    fn a_read_at_storage_is_answered_where_the_new_path_wants_it_and_a_finished_one_is_read_again() {
        let mut q = queue();
        for command in [read(0, 1), read(1, 1)] {
            q.receive(&command).unwrap();
            assert!(starts(&mut q, command.slot, Sequence(1)));
        }
        q.finish(Slot(1), Sequence(1), Outcome::default()).unwrap();
        q.activate(Epoch(2));
        let placement = crate::wire::Placement { address: 4096, key: 1 };
        let kinds = [read(0, 1), read(1, 1)].map(|c| q.verdict(&Command { placement, ..c }).unwrap().kind);
        assert_eq!(kinds, [VerdictKind::Running, VerdictKind::Unknown]);
        assert_eq!(q.command(Slot(0), Sequence(1)).unwrap().placement, placement);
        let reply = q.finish(Slot(0), Sequence(1), Outcome::default()).unwrap();
        assert_eq!(reply.epoch, Epoch(2));
        assert_eq!(q.receive(&Command { epoch: Epoch(2), ..read(1, 1) }), Ok(Intake::Ready));
    }

    #[test]
    fn a_report_that_mismatched_a_running_command_left_both_sides_with_other_sequences() {
        let mut q = queue();
        let (parked, stored) = (write(0, 1, 16384), write(1, 1, 4096));
        for command in [parked, stored] {
            q.receive(&command).unwrap();
            q.payload_arrived(command.slot, Sequence(1), 7);
        }
        assert!(starts(&mut q, Slot(1), Sequence(1)));
        q.activate(Epoch(2));
        for command in [parked, stored] {
            let verdict = q.verdict(&Command { offset: 512, ..command }).unwrap();
            assert_eq!(verdict.reply.map(|reply| reply.status), Some(Status::RETRY_MISMATCH));
        }
        assert_eq!(q.start(Slot(0), Sequence(1)), Start::Stale, "nobody waits for it");
        again(&mut q, &write(0, 2, 16384));
        // What is at storage keeps its slot until it has ended, and its reply goes to nobody.
        let next = Command { epoch: Epoch(2), ..write(1, 2, 4096) };
        assert_eq!(q.receive(&next).unwrap_err().status, Status::CREDIT_OVERRUN);
        assert_eq!(q.verdict(&next).unwrap().kind, VerdictKind::Unknown);
        assert_eq!(q.finish(Slot(1), Sequence(1), Outcome::default()), None);
        again(&mut q, &next);
        assert_eq!(q.busy(), 0);
    }

    #[test]
    fn i6_a_command_does_not_break_the_shrink_that_it_acknowledges() {
        let mut q = queue();
        assert!(q.grant().change(2));
        let grant_seen = q.grant().said().number;
        let command = Command { grant_seen, ..write(3, 1, 4096) };
        assert_eq!(q.receive(&command).unwrap_err().status, Status::CREDIT_OVERRUN);
    }

    #[test]
    fn i9_a_command_that_waited_while_the_volume_shrank_is_refused_and_not_executed() {
        let mut q = queue();
        let last = Command { offset: (1 << 20) - 4096, ..write(0, 1, 4096) };
        let inside = write(1, 1, 4096);
        let flush = Command { opcode: Opcode::FLUSH, length: 0, ..read(2, 1) };
        for command in [last, inside] {
            q.receive(&command).unwrap();
            q.payload_arrived(command.slot, Sequence(1), 7);
        }
        assert_eq!(q.receive(&flush), Ok(Intake::Ready));
        q.resize(1 << 19);
        let Start::Refuse(reply) = q.start(Slot(0), Sequence(1)) else { panic!("it was given to storage") };
        assert_eq!((reply.status, reply.slot), (Status::OUT_OF_RANGE, Slot(0)));
        assert_eq!(q.start(Slot(0), Sequence(1)), Start::Stale);
        assert!(starts(&mut q, Slot(1), Sequence(1)));
        assert!(starts(&mut q, Slot(2), Sequence(1)));
        assert_eq!(q.busy(), 2);
        assert_eq!(q.receive(&last), Ok(Intake::Reply(reply)), "a retry hears the same (I1)");
    }
}
