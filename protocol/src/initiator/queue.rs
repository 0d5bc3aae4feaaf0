//! Slots, sequences and epochs of one queue, as the initiator keeps them.
//!
//! The driver submits operations, sends what [`Queue::next_frame`] gives, and hands every frame that
//! arrives to [`Queue::receive`] or [`Queue::fetch`]. Payload bytes stay with the driver, filed under the
//! slot. How a path ends and the next one takes over is in `activation`, what becomes of the commands when the
//! session is lost in `replay`.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;

use super::credit::Allowance;
use super::slots::SlotSet;
use crate::canary::{Canary, broken};
use crate::ids::{Epoch, GrantNumber, Instance, Sequence, Slot};
use crate::opcode::{Flags, Opcode};
use crate::status::Status;
use crate::violation::Violation;
use crate::wire::{Activated, Command, Credits, Frame, Payload, Placement, Rail, Reply, Transfer};

/// How often a payload that doesn't match its CRC32C is moved again before the command fails (I7). One
/// repeat mends a passing fault; three in a row are not passing.
const MAX_CRC_RETRIES: u8 = 3;

/// What an activation agreed on.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Slots in the table.
    pub depth: u16,
    /// In-capsule size in bytes.
    pub in_capsule: u32,
    /// Credits at the start.
    pub credits: Credits,
    /// Largest payload of one command in bytes.
    pub max_transfer: u32,
}

impl QueueOptions {
    /// From the target's answer to the activation.
    #[must_use]
    pub fn from_activated(activated: &Activated<'_>, max_transfer: u32) -> Self {
        let Activated { depth, in_capsule, credits, .. } = *activated;
        Self { depth, in_capsule, credits, max_transfer }
    }
}

/// What the caller wants done.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Command.
    pub opcode: Opcode,
    /// [`Flags::FUA`] and [`Flags::NO_UNMAP`] where they apply.
    pub flags: Flags,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The payload it brings.
    pub payload: Payload,
    /// Most bytes of payload that the reply may bring.
    pub room: u32,
    /// Where the payload lies, for a rail that reaches it by remote access.
    pub placement: Placement,
    /// The caller's own number, given back with the completion.
    pub token: u64,
}

/// A command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The slot it had; free again.
    pub slot: Slot,
    /// The caller's number.
    pub token: u64,
    /// The command.
    pub opcode: Opcode,
    /// How it ended.
    pub status: Status,
    /// The number that goes with it.
    pub result: u64,
    /// Bytes of payload received.
    pub received: u32,
}

/// What a reply means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The command has ended.
    Complete(Completion),
    /// The reply brings this many bytes, which follow: put them into the slot's buffer, then call
    /// [`Queue::payload_arrived`].
    Receive {
        /// The slot.
        slot: Slot,
        /// Number of bytes.
        length: u32,
    },
    /// The target found the payload damaged: compute its CRC32C afresh and call [`Queue::resubmit`].
    Resubmit {
        /// The slot.
        slot: Slot,
    },
    /// It belongs to an older path: dropped and counted.
    Stale,
}

/// A frame to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    /// Its header.
    pub frame: Frame,
    /// The slot whose payload follows it on the connection.
    pub payload_of: Option<Slot>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// A command is out.
    pub(super) out: bool,
    /// Its frame was handed out to be sent, and the target hasn't said that it doesn't know it: it may speak of
    /// it, and may have executed it.
    pub(super) sent: bool,
    /// The target refused its payload, and [`Queue::resubmit`] wasn't called yet.
    pub(super) refused: bool,
    /// The report of the last attempt to activate a path names the command, with this sequence.
    pub(super) reported: Option<Sequence>,
    pub(super) sequence: Sequence,
    pub(super) command: Command,
    /// Where the payload lies, for a rail that reaches it by remote access.
    pub(super) placement: Placement,
    pub(super) room: u32,
    pub(super) token: u64,
    /// Bytes of the data window it holds.
    pub(super) unasked: u32,
    pub(super) crc_retries: u8,
    /// The reply whose payload is on its way.
    pub(super) reply: Option<Reply>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Due {
    Command(Slot),
    Data(Slot, Sequence),
}

/// The initiator's end of a queue; outlives its paths.
#[derive(Debug)]
pub struct Queue {
    /// Epoch of the current path, or of the last one.
    pub(super) epoch: Epoch,
    /// The highest epoch that was ever asked for.
    pub(super) attempted: Epoch,
    /// There is no path: the last one is fenced, none has taken over.
    pub(super) fenced: bool,
    /// The rail of the path.
    pub(super) rail: Rail,
    /// The rail that the last report was for.
    pub(super) next_rail: Rail,
    pub(super) instance: Instance,
    pub(super) options: QueueOptions,
    pub(super) allowance: Allowance,
    pub(super) table: Box<[Entry]>,
    pub(super) busy: SlotSet,
    pub(super) out: u16,
    pub(super) due: VecDeque<Due>,
}

impl Queue {
    /// A queue with an empty table, whose first path has `epoch` and runs on TCP ([`Self::on_rail`]).
    #[must_use]
    pub fn new(options: QueueOptions, instance: Instance, epoch: Epoch) -> Self {
        let entry = Entry {
            out: false,
            sent: false,
            refused: false,
            reported: None,
            sequence: Sequence(0),
            command: Command::default(),
            placement: Placement::default(),
            room: 0,
            token: 0,
            unasked: 0,
            crc_retries: 0,
            reply: None,
        };
        let depth = usize::from(options.depth);
        Self {
            epoch,
            attempted: epoch,
            fenced: false,
            rail: Rail::TCP,
            next_rail: Rail::TCP,
            instance,
            options,
            allowance: Allowance::new(options.credits),
            table: vec![entry; depth].into_boxed_slice(),
            busy: SlotSet::default(),
            out: 0,
            // One command of each slot is due at a time, and `fetch` keeps the rest below 2 x depth.
            due: VecDeque::with_capacity(3 * depth),
        }
    }

    /// The first path runs on this rail.
    #[must_use]
    pub fn on_rail(self, rail: Rail) -> Self {
        Self { rail, next_rail: rail, ..self }
    }

    /// Epoch of the current path, or of the last one while there is none.
    #[inline]
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether a path is active: neither fenced, nor waiting for the next one.
    #[inline]
    #[must_use]
    pub fn has_path(&self) -> bool {
        !self.fenced
    }

    /// The rail of the path, or of the last one while there is none.
    #[must_use]
    pub fn rail(&self) -> Rail {
        self.rail
    }

    /// The number of the slot table.
    #[must_use]
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// What was agreed on.
    #[must_use]
    pub fn options(&self) -> &QueueOptions {
        &self.options
    }

    /// Commands that are out.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.out
    }

    /// The credits.
    #[must_use]
    pub fn allowance(&self) -> &Allowance {
        &self.allowance
    }

    /// Whether [`Self::submit`] would find a free slot.
    #[inline]
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.free_slot().is_some()
    }

    #[inline]
    fn free_slot(&self) -> Option<Slot> {
        let granted = self.allowance.said().granted_slots + u16::from(broken(Canary::CreditOffByOne));
        self.busy.lowest_absent(granted.min(self.options.depth))
    }

    /// Takes a slot for `operation`; nothing when none is granted and free. Without a path it is taken too, and
    /// waits for the next one.
    pub fn submit(&mut self, operation: &Operation) -> Option<Slot> {
        let slot = self.free_slot()?;
        let entry = &mut self.table[slot.index()];
        *entry = Entry {
            out: true,
            sent: false,
            refused: false,
            reported: None,
            sequence: entry.sequence.next(),
            command: entry.command,
            placement: operation.placement,
            room: operation.room,
            token: operation.token,
            unasked: 0,
            crc_retries: 0,
            reply: None,
        };
        entry.command = Command {
            opcode: operation.opcode,
            flags: operation.flags,
            slot,
            grant_seen: GrantNumber(0),
            epoch: self.epoch,
            sequence: entry.sequence,
            offset: operation.offset,
            length: operation.length,
            placement: Placement::default(),
            payload: operation.payload,
        };
        self.busy.insert(slot);
        self.out += 1;
        self.due.push_back(Due::Command(slot));
        Some(slot)
    }

    /// Sends the command of `slot`, whose payload the target refused, again as a new sequence, with the payload's
    /// CRC32C computed afresh. Nothing happens if it isn't such a command (any more).
    pub fn resubmit(&mut self, slot: Slot, payload: Payload) {
        if self.table.get(slot.index()).is_some_and(|e| e.out && e.refused) {
            self.renew(slot, payload);
        }
    }

    /// The command of `slot` becomes due as a new sequence.
    fn renew(&mut self, slot: Slot, payload: Payload) {
        let entry = &mut self.table[slot.index()];
        entry.sent = false;
        entry.refused = false;
        entry.sequence = entry.sequence.next();
        entry.command.sequence = entry.sequence;
        entry.command.payload = payload;
        entry.reply = None;
        self.due.push_back(Due::Command(slot));
    }

    /// The next frame to send, if there is one.
    pub fn next_frame(&mut self) -> Option<Outgoing> {
        if self.fenced {
            return None;
        }
        loop {
            match self.due.pop_front()? {
                Due::Command(slot) => {
                    let entry = &mut self.table[slot.index()];
                    entry.sent = true;
                    let Payload { length, .. } = entry.command.payload;
                    let in_capsule = length <= self.options.in_capsule;
                    // Small payloads ride with the slot's own credit, larger ones while the window allows;
                    // beyond it the target asks. On RDMA it reaches them by itself.
                    let pushed = self.rail == Rail::TCP;
                    let follows = length > 0 && (in_capsule || (pushed && self.allowance.use_window(length)));
                    entry.command.placement = placement_on(self.rail, entry.placement);
                    entry.unasked = if follows && !in_capsule { length } else { 0 };
                    entry.command.epoch = self.epoch;
                    entry.command.grant_seen = self.allowance.keeps();
                    entry.command.flags = match follows {
                        true => entry.command.flags.with(Flags::PAYLOAD_FOLLOWS),
                        false => entry.command.flags.without(Flags::PAYLOAD_FOLLOWS),
                    };
                    let frame = Frame::Command(entry.command);
                    return Some(Outgoing { frame, payload_of: follows.then_some(slot) });
                }
                Due::Data(slot, sequence) => {
                    let entry = &self.table[slot.index()];
                    if !entry.out || entry.sequence != sequence {
                        continue;
                    }
                    let Command { opcode, payload, .. } = entry.command;
                    let frame = Frame::Data(Transfer { opcode, slot, epoch: self.epoch, sequence, payload });
                    return Some(Outgoing { frame, payload_of: Some(slot) });
                }
            }
        }
    }

    /// The target asks for the payload of a slot.
    ///
    /// # Errors
    /// A [`Violation`] when the slot has no such payload, or its frames are all due already.
    pub fn fetch(&mut self, fetch: &Transfer) -> Result<(), Violation> {
        if fetch.epoch < self.epoch || self.fenced {
            return Ok(());
        }
        let entry = self.table.get(fetch.slot.index());
        let wanted = entry.is_some_and(|e| {
            e.out
                && e.sent
                && e.sequence == fetch.sequence
                && e.command.payload == fetch.payload
                && fetch.payload.length > 0
                && fetch.epoch == self.epoch
        });
        if !wanted || self.due.len() >= 2 * self.table.len() {
            return Err(Violation::new(Status::UNEXPECTED_FRAME, "a fetch of a payload that isn't there"));
        }
        self.due.push_back(Due::Data(fetch.slot, fetch.sequence));
        Ok(())
    }

    /// A reply arrived.
    ///
    /// # Errors
    /// A [`Violation`]: the target broke a rule, and its path ends.
    pub fn receive(&mut self, reply: &Reply) -> Result<Incoming, Violation> {
        // A fenced path's commands are reported to the next one, which tells of them again.
        if (reply.epoch < self.epoch || self.fenced) && !broken(Canary::StaleReplyTaken) {
            return Ok(Incoming::Stale);
        }
        if reply.epoch > self.epoch {
            return Err(Violation::new(Status::UNEXPECTED_FRAME, "a reply of an epoch that wasn't activated"));
        }
        self.check_reply(reply)?;
        self.allowance.hear(reply.credits);
        if reply.payload.length > 0 {
            self.table[reply.slot.index()].reply = Some(*reply);
            return Ok(Incoming::Receive { slot: reply.slot, length: reply.payload.length });
        }
        Ok(self.take_reply(reply))
    }

    /// Whether the reply answers a command that is out, with what it may bring.
    pub(super) fn check_reply(&self, reply: &Reply) -> Result<(), Violation> {
        let entry = self.table.get(reply.slot.index());
        let Some(entry) = entry.filter(|e| {
            e.out
                && e.sent
                && !e.refused
                && e.reply.is_none()
                && e.sequence == reply.sequence
                && e.command.opcode == reply.opcode
        }) else {
            return Err(Violation::new(Status::UNEXPECTED_FRAME, "a reply to a command that isn't out"));
        };
        let granted = reply.credits.granted_slots;
        if granted > self.options.depth {
            return Err(Violation::new(Status::MALFORMED, "a grant of more slots than the queue has"));
        }
        if reply.payload.length > entry.room || reply.payload.length > self.options.max_transfer {
            return Err(Violation::new(Status::MALFORMED, "a reply brings more payload than was asked for"));
        }
        // Else a read would complete with whatever was in the caller's buffer before (I7).
        let least = match reply.opcode {
            Opcode::READ => entry.command.length,
            Opcode::BLOCK_STATUS | Opcode::IDENTIFY => 1,
            _ => 0,
        };
        if reply.status.is_ok() && u64::from(reply.payload.length) < least {
            return Err(Violation::new(Status::MALFORMED, "a reply brings less payload than was asked for"));
        }
        let placed = reply.flags.has(Flags::PAYLOAD_FOLLOWS) || entry.command.placement != Placement::default();
        if reply.payload.length > 0 && !placed {
            return Err(Violation::new(Status::MALFORMED, "a reply whose payload comes from nowhere"));
        }
        Ok(())
    }

    /// What a reply without a payload, which was checked, means for its command.
    pub(super) fn take_reply(&mut self, reply: &Reply) -> Incoming {
        let entry = &mut self.table[reply.slot.index()];
        if reply.status == Status::PAYLOAD_CRC && entry.crc_retries < MAX_CRC_RETRIES {
            entry.crc_retries += 1;
            entry.refused = true;
            self.allowance.free_window(core::mem::take(&mut entry.unasked));
            return Incoming::Resubmit { slot: reply.slot };
        }
        Incoming::Complete(self.complete(reply))
    }

    /// The payload of the reply to `slot` is whole, and its CRC32C is `crc` (I7). Nothing is completed
    /// when it doesn't match: the command is sent again, a bounded number of times.
    pub fn payload_arrived(&mut self, slot: Slot, crc: u32) -> Option<Completion> {
        let entry = self.table.get_mut(slot.index())?;
        let mut reply = entry.reply.take()?;
        if reply.payload.crc != crc && !broken(Canary::CrcUnchecked) {
            if entry.crc_retries < MAX_CRC_RETRIES {
                entry.crc_retries += 1;
                let payload = entry.command.payload;
                self.renew(slot, payload);
                return None;
            }
            reply.status = Status::PAYLOAD_CRC;
        }
        Some(self.complete(&reply))
    }

    pub(super) fn complete(&mut self, reply: &Reply) -> Completion {
        let Reply { slot, opcode, status, result, .. } = *reply;
        let entry = &mut self.table[slot.index()];
        entry.out = false;
        let token = entry.token;
        self.allowance.free_window(core::mem::take(&mut entry.unasked));
        self.busy.remove(slot);
        self.out -= 1;
        self.settle();
        Completion { slot, token, opcode, status, result, received: reply.payload.length }
    }

    /// The target changed the credits by an event. Answers whether the latest grant is kept to already; if
    /// not, ask [`Allowance::is_settled`] again after each completion and answer the event then, with
    /// [`Allowance::keeps`].
    ///
    /// # Errors
    /// A [`Violation`] for a grant of more slots than there are.
    pub fn credits_changed(&mut self, credits: Credits) -> Result<bool, Violation> {
        if credits.granted_slots > self.options.depth {
            return Err(Violation::new(Status::MALFORMED, "a grant of more slots than the queue has"));
        }
        self.allowance.hear(credits);
        self.settle();
        Ok(self.allowance.is_settled())
    }

    /// Keeps to the latest grant, if no command is out in a slot above it.
    pub(super) fn settle(&mut self) {
        let busy = &self.busy;
        self.allowance.settle(|bound| busy.reaches(bound));
    }

    /// The commands that are out, in the order of their slots, as they were sent last.
    pub fn in_flight(&self) -> impl Iterator<Item = (&Command, u64)> {
        self.table.iter().filter(|e| e.out).map(|e| (&e.command, e.token))
    }
}

/// Where a command's payload is said to be: on TCP nowhere, nobody reaches for it.
pub(super) fn placement_on(rail: Rail, placement: Placement) -> Placement {
    match rail {
        Rail::TCP => Placement::default(),
        _ => placement,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDITS: Credits = Credits { granted_slots: 4, number: GrantNumber(7), data_window: 16384 };

    fn queue() -> Queue {
        let options = QueueOptions { depth: 4, in_capsule: 4096, credits: CREDITS, max_transfer: 65536 };
        Queue::new(options, Instance(1), Epoch(1))
    }

    fn write(length: u32) -> Operation {
        Operation {
            opcode: Opcode::WRITE,
            flags: Flags::NONE,
            offset: 0,
            length: u64::from(length),
            payload: Payload { length, crc: 7 },
            room: 0,
            placement: Placement::default(),
            token: 42,
        }
    }

    fn read(length: u32) -> Operation {
        Operation { opcode: Opcode::READ, payload: Payload::default(), room: length, ..write(length) }
    }

    #[test]
    fn a_queue_whose_first_path_is_rdma_says_where_its_payloads_lie() {
        let placement = Placement { address: 4096, key: 7 };
        for (rail, placed) in [(Rail::TCP, Placement::default()), (Rail::RDMA, placement)] {
            let mut q = queue().on_rail(rail);
            q.submit(&Operation { placement, ..read(8192) });
            assert!(matches!(q.next_frame().unwrap().frame, Frame::Command(c) if c.placement == placed));
        }
    }

    /// A command whose reply brings nothing but a status and a number.
    fn verify(length: u32) -> Operation {
        Operation { opcode: Opcode::VERIFY, room: 0, ..read(length) }
    }

    fn sent(q: &mut Queue) -> Command {
        match q.next_frame().map(|o| o.frame) {
            Some(Frame::Command(command)) => command,
            other => panic!("no command to send but {other:?}"),
        }
    }

    fn reply(command: &Command) -> Reply {
        Reply {
            opcode: command.opcode,
            flags: Flags::NONE,
            slot: command.slot,
            status: Status::OK,
            epoch: command.epoch,
            sequence: command.sequence,
            result: 0,
            credits: CREDITS,
            payload: Payload::default(),
        }
    }

    #[test]
    fn no_more_commands_are_out_than_were_granted() {
        let mut q = queue();
        for _ in 0..4 {
            assert!(q.submit(&verify(4096)).is_some());
        }
        assert!(q.submit(&verify(4096)).is_none());
        let first = sent(&mut q);
        let Ok(Incoming::Complete(c)) = q.receive(&reply(&first)) else { panic!() };
        assert_eq!((c.slot, c.token), (Slot(0), 42));
        q.submit(&verify(4096)).unwrap();
        for _ in 0..3 {
            sent(&mut q);
        }
        assert_eq!(sent(&mut q).sequence, Sequence(2), "the slot's next command");
    }

    #[test]
    fn payloads_beyond_the_window_wait_until_they_are_asked_for() {
        let mut q = queue();
        for _ in 0..3 {
            q.submit(&write(8192)).unwrap();
        }
        let commands = [sent(&mut q), sent(&mut q), sent(&mut q)];
        assert_eq!(commands.map(|c| c.flags.has(Flags::PAYLOAD_FOLLOWS)), [true, true, false]);
        let Command { opcode, slot, epoch, sequence, payload, .. } = commands[2];
        let fetch = Transfer { opcode, slot, epoch, sequence, payload };
        q.fetch(&fetch).unwrap();
        assert_eq!(q.next_frame().unwrap().frame, Frame::Data(fetch));
        q.receive(&reply(&commands[0])).unwrap();
        q.submit(&write(8192)).unwrap();
        assert!(sent(&mut q).flags.has(Flags::PAYLOAD_FOLLOWS), "the window is free again");
    }

    #[test]
    fn a_shrink_is_acknowledged_when_nothing_is_out_above_it() {
        let mut q = queue();
        for _ in 0..4 {
            q.submit(&verify(512)).unwrap();
        }
        let commands = [sent(&mut q), sent(&mut q), sent(&mut q), sent(&mut q)];
        let shrunk = Credits { granted_slots: 2, number: CREDITS.number.next(), data_window: 0 };
        assert_eq!(q.credits_changed(shrunk), Ok(false));
        let (old, new) = (CREDITS.number, shrunk.number);
        for (command, keeps) in [(3, old), (2, new), (0, new)] {
            q.receive(&Reply { credits: shrunk, ..reply(&commands[command]) }).unwrap();
            assert_eq!(q.allowance().keeps(), keeps);
        }
        assert_eq!(q.submit(&verify(512)), Some(Slot(0)));
        assert_eq!(sent(&mut q).grant_seen, new);
        assert!(q.submit(&verify(512)).is_none(), "two are out");
    }

    #[test]
    fn i6_a_grant_on_a_reply_that_an_event_overtook_does_not_undo_the_events() {
        let mut q = queue();
        q.submit(&verify(512)).unwrap();
        let command = sent(&mut q);
        let next = CREDITS.number.next();
        let shrunk = Credits { granted_slots: 1, number: next, ..CREDITS };
        assert_eq!(q.credits_changed(shrunk), Ok(true));
        q.receive(&reply(&command)).unwrap();
        assert_eq!(q.allowance().said(), shrunk, "the reply says what was true before");
        let grown = Credits { granted_slots: 4, number: next.next(), ..CREDITS };
        assert_eq!(q.credits_changed(grown), Ok(true));
        assert_eq!(q.credits_changed(shrunk), Ok(true), "an old one");
        assert_eq!((q.allowance().said(), q.allowance().keeps()), (grown, grown.number));
    }

    #[test]
    fn i7_a_damaged_payload_is_fetched_again_three_times_then_an_error() {
        let mut q = queue();
        let slot = q.submit(&read(512)).unwrap();
        for attempt in 0..=3 {
            let command = sent(&mut q);
            let payload = Payload { length: 512, crc: 1 };
            let full = Reply { flags: Flags::PAYLOAD_FOLLOWS, payload, ..reply(&command) };
            assert_eq!(q.receive(&full), Ok(Incoming::Receive { slot, length: 512 }));
            let completion = q.payload_arrived(slot, 2);
            match attempt {
                3 => assert_eq!(completion.unwrap().status, Status::PAYLOAD_CRC),
                _ => assert_eq!(completion, None),
            }
        }
    }

    #[test]
    fn i7_a_refused_payload_is_sent_again_as_a_new_sequence() {
        let mut q = queue();
        let slot = q.submit(&write(512)).unwrap();
        let first = sent(&mut q);
        let refused = Reply { status: Status::PAYLOAD_CRC, ..reply(&first) };
        assert_eq!(q.receive(&refused), Ok(Incoming::Resubmit { slot }));
        q.resubmit(slot, Payload { length: 512, crc: 8 });
        let second = sent(&mut q);
        assert_eq!((second.sequence, second.payload.crc), (Sequence(2), 8));
        assert!(matches!(q.receive(&reply(&second)), Ok(Incoming::Complete(_))));
    }

    #[test]
    fn i9_replies_that_cannot_be_end_the_path() {
        let mut q = queue();
        q.submit(&verify(512)).unwrap();
        let command = sent(&mut q);
        let good = reply(&command);
        let too_long = Payload { length: 1024, crc: 0 };
        for bad in [
            Reply { slot: Slot(3), ..good },
            Reply { slot: Slot(900), ..good },
            Reply { sequence: Sequence(2), ..good },
            Reply { opcode: Opcode::WRITE, ..good },
            Reply { epoch: Epoch(2), ..good },
            Reply { flags: Flags::PAYLOAD_FOLLOWS, payload: too_long, ..good },
            Reply { credits: Credits { granted_slots: 5, ..CREDITS }, ..good },
        ] {
            assert!(q.receive(&bad).is_err(), "{bad:?}");
        }
        assert_eq!(q.receive(&Reply { epoch: Epoch(0), ..good }), Ok(Incoming::Stale));
        assert!(matches!(q.receive(&good), Ok(Incoming::Complete(_))));
        assert!(q.receive(&good).is_err(), "answered already");
    }

    #[test]
    fn i9_a_target_that_answers_or_fetches_what_was_not_sent_yet_ends_the_path() {
        let mut q = queue();
        let slot = q.submit(&write(8192)).unwrap();
        let guessed = Command {
            opcode: Opcode::WRITE,
            slot,
            epoch: Epoch(1),
            sequence: Sequence(1),
            payload: write(8192).payload,
            ..Command::default()
        };
        let Command { opcode, epoch, sequence, payload, .. } = guessed;
        let fetch = Transfer { opcode, slot, epoch, sequence, payload };
        assert!(q.receive(&reply(&guessed)).is_err());
        assert!(q.fetch(&fetch).is_err());
        sent(&mut q);
        assert!(q.fetch(&Transfer { epoch: Epoch(2), ..fetch }).is_err(), "of a path that isn't there yet");
        q.fetch(&fetch).unwrap();
        assert!(matches!(q.receive(&reply(&guessed)), Ok(Incoming::Complete(_))));
    }

    #[test]
    fn i7_a_read_that_succeeds_without_all_its_bytes_ends_the_path() {
        let mut q = queue();
        q.submit(&read(1024)).unwrap();
        let command = sent(&mut q);
        let short = Payload { length: 512, crc: 7 };
        assert!(q.receive(&reply(&command)).is_err(), "no bytes at all");
        assert!(q.receive(&Reply { flags: Flags::PAYLOAD_FOLLOWS, payload: short, ..reply(&command) }).is_err());
        let failed = Reply { status: Status::IO_ERROR, ..reply(&command) };
        assert!(matches!(q.receive(&failed), Ok(Incoming::Complete(_))));
    }
}
