//! What storage does for a lane: requests begin here, and end here.
//!
//! Files are read and written by the ring, memory at once; what may block for long goes to the volume's
//! keeper. A command that can't begin yet is parked (no memory), held (an exclusive command has its range)
//! or delayed (a fault injected for a test), never dropped.

use std::fmt::Display;
use std::sync::atomic::Ordering;

use twinrail_protocol::limits::HEADER_LEN;
use twinrail_protocol::target::{FlushMark, Start};
use twinrail_protocol::wire::{Extent, Handshake};
use twinrail_protocol::{Opcode, Range, Request, Sequence, Slot, Status, crc32c, crc32c_append};

use super::arena::Piece;
use super::core::Core;
use super::lane::Lane;
use super::mailbox::{Exclusion, Ticket};
use super::ring::Tag;
use crate::volume::faults::{Access, Fault};
use crate::volume::{Answer, Job, Store, Volume, Work as KeeperWork, status_of};

/// Bytes that VERIFY reads at a time: enough for the disk, little of the arena.
const VERIFY_CHUNK: usize = 256 * 1024;

/// When a keeper that had no room is asked again, in microseconds.
const KEEPER_RETRY_US: u64 = 10_000;

/// What a slot's command is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not at storage.
    #[default]
    Idle,
    /// The ring reads the reply's payload.
    Read,
    /// The ring writes the command's payload.
    Write,
    /// The ring reads the next part of a range to be verified.
    Verify,
    /// An exclusive command stands in line.
    InLine,
    /// The ring reads what is to be compared.
    Compare,
    /// The ring writes what compared equal.
    CompareWrite,
    /// The keeper is at it.
    Keeper,
}

impl Stage {
    /// Name for people.
    fn name(self) -> &'static str {
        match self {
            Self::Idle | Self::InLine => "waiting",
            Self::Read => "read",
            Self::Write => "write",
            Self::Verify => "verify",
            Self::Compare => "compare",
            Self::CompareWrite => "write after a compare",
            Self::Keeper => "sync or space",
        }
    }
}

impl Lane {
    /// A command has all it needs from the initiator: begins it, or sees to it that it begins later.
    pub(super) fn proceed(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) {
        let Some(command) = self.queue.command(slot, sequence) else { return };
        let (opcode, length) = (command.opcode, command.length);
        let Some(request) = self.queue.request(slot, sequence) else { return };
        let volume = self.session.volume.clone();
        if core.holds.block(volume.index, request.range()) {
            self.held.push_back((slot, sequence));
            return;
        }
        // Memory first: once begun, nothing may be missing.
        let memory = match opcode {
            Opcode::READ => self.secure(core, slot, length as usize, true),
            Opcode::VERIFY => self.secure_scratch(core, slot, length.min(VERIFY_CHUNK as u64) as usize),
            Opcode::COMPARE_AND_WRITE => self.secure_scratch(core, slot, length as usize),
            _ => true,
        };
        if !memory {
            self.park(core, slot, sequence);
            return;
        }
        let access = match opcode {
            Opcode::READ | Opcode::VERIFY => Some(Access::Read),
            Opcode::WRITE => Some(Access::Write),
            Opcode::COMPARE_AND_WRITE => Some(Access::ReadWrite),
            // The keeper sees to its own.
            _ => None,
        };
        if let Some(faults) = &volume.faults
            && let (Some(access), Some(range)) = (access, request.range())
        {
            match faults.before(access, range) {
                Fault::Delay(time) if !self.work[slot.index()].delayed => {
                    self.work[slot.index()].delayed = true;
                    let due = core.now_us() + time.as_micros() as u64;
                    core.delayed.push((due, self.index, slot, sequence));
                    return;
                }
                Fault::Fail(status) => {
                    if self.start(core, slot, sequence).is_some() {
                        self.begins_at_storage(core, slot, request);
                        self.failed(core, slot, sequence, opcode.name(), &"injected", status);
                    }
                    return;
                }
                Fault::Delay(_) | Fault::Nothing => {}
            }
        }
        if let Request::CompareAndWrite { range, .. } = request {
            // It stands in line as a command that is ready; `start` is asked when its turn has come.
            self.work[slot.index()].stage = Stage::InLine;
            self.at_storage += 1;
            let command = Tag::storage(self.index, slot, sequence).pack();
            let ticket = Ticket { volume: volume.index, range, reactor: core.index, command };
            core.exclude(core.home_of(volume.index), Exclusion::Ask(ticket));
            return;
        }
        // The second look at the fence (I2).
        let Some(request) = self.start(core, slot, sequence) else { return };
        self.begins_at_storage(core, slot, request);
        self.begin_request(core, &volume, slot, sequence, request);
    }

    /// The request of a command, if it goes to storage now. One that the volume has no room for any more is
    /// answered.
    fn start(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) -> Option<Request> {
        match self.queue.start(slot, sequence) {
            Start::Go(request) => Some(request),
            Start::Refuse(reply) => {
                self.answer(core, reply);
                None
            }
            Start::Stale => None,
        }
    }

    /// Keeps the books of what is at storage.
    fn begins_at_storage(&mut self, core: &Core, slot: Slot, request: Request) {
        let work = &mut self.work[slot.index()];
        work.request = Some(request);
        work.range = request.range();
        work.progress = 0;
        work.crc = 0;
        work.started_us = core.now_us();
        work.failed_syncs = self.session.volume.failed_syncs();
        let failed_syncs = work.failed_syncs;
        self.at_storage += 1;
        if !matches!(
            request,
            Request::Read(_) | Request::Flush | Request::BlockStatus(_) | Request::Verify(_) | Request::Identify
        ) {
            work.change = true;
            self.session.ledger.change_begins(failed_syncs);
        }
    }

    /// The counterpart, when a command ends.
    pub(super) fn ended_at_storage(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) {
        let work = &mut self.work[slot.index()];
        let exclusive = matches!(work.request, Some(Request::CompareAndWrite { .. }));
        if core.holds.any() && work.range.is_some() {
            core.recheck_holds = true;
        }
        if work.request.take().is_some() {
            self.at_storage -= 1;
        }
        if exclusive && let Some(range) = work.range {
            let command = Tag::storage(self.index, slot, sequence).pack();
            let volume = self.session.volume.index;
            let ticket = Ticket { volume, range, reactor: core.index, command };
            core.exclude(core.home_of(volume), Exclusion::Ended(ticket));
        }
        work.range = None;
        work.stage = Stage::Idle;
        work.delayed = false;
        if std::mem::take(&mut work.change) {
            self.session.ledger.change_ends();
        }
    }

    fn begin_request(&mut self, core: &mut Core, volume: &Volume, slot: Slot, sequence: Sequence, request: Request) {
        match request {
            Request::Read(range) => match &volume.store {
                Store::File(_) => self.ring_next(core, slot, sequence, Stage::Read),
                Store::Memory(memory) => {
                    let Some(piece) = self.memory(slot, range.length() as usize) else {
                        return self.finish(core, slot, sequence, Status::IO_ERROR, 0);
                    };
                    let crc = memory.read_with_crc(range.offset(), core.arena.bytes_mut(piece));
                    self.finish_with(core, slot, sequence, Status::OK, 0, Some((piece, crc)));
                }
                Store::Null => {
                    let Some(piece) = self.memory(slot, range.length() as usize) else {
                        return self.finish(core, slot, sequence, Status::IO_ERROR, 0);
                    };
                    let buffer = core.arena.bytes_mut(piece);
                    buffer.fill(0);
                    let crc = crc32c(buffer);
                    self.finish_with(core, slot, sequence, Status::OK, 0, Some((piece, crc)));
                }
            },
            Request::Write { range, .. } => match &volume.store {
                Store::File(_) => self.ring_next(core, slot, sequence, Stage::Write),
                Store::Memory(memory) => {
                    if let Some(piece) = self.memory(slot, range.length() as usize) {
                        memory.write(range.offset(), core.arena.bytes(piece));
                    }
                    self.finish(core, slot, sequence, Status::OK, 0);
                }
                Store::Null => self.finish(core, slot, sequence, Status::OK, 0),
            },
            Request::Flush => {
                if volume.write_through() || !matches!(volume.store, Store::File(_)) && volume.faults.is_none() {
                    return self.finish(core, slot, sequence, Status::OK, 0);
                }
                self.work[slot.index()].mark = Some(self.session.ledger.flush_begins());
                self.ask_keeper(core, volume, slot, sequence, KeeperWork::Sync);
            }
            Request::WriteZeroes { range, fua, may_unmap } => {
                self.ask_keeper(core, volume, slot, sequence, KeeperWork::WriteZeroes { range, may_unmap, fua });
            }
            Request::Discard { range, fua } => {
                self.ask_keeper(core, volume, slot, sequence, KeeperWork::Discard { range, fua });
            }
            Request::BlockStatus(range) => {
                self.ask_keeper(core, volume, slot, sequence, KeeperWork::BlockStatus { range });
            }
            Request::Verify(_) => self.verify_next(core, volume, slot, sequence),
            Request::CompareAndWrite { range, .. } => match &volume.store {
                Store::File(_) => self.ring_next(core, slot, sequence, Stage::Compare),
                store => {
                    let Some(scratch) = self.scratch(slot, range.length() as usize) else {
                        return self.finish(core, slot, sequence, Status::IO_ERROR, 0);
                    };
                    match store {
                        Store::Memory(memory) => memory.read(range.offset(), core.arena.bytes_mut(scratch)),
                        _ => core.arena.bytes_mut(scratch).fill(0),
                    }
                    self.compare(core, volume, slot, sequence, range);
                }
            },
            Request::Identify => self.identify(core, slot, sequence),
        }
    }

    fn scratch(&self, slot: Slot, length: usize) -> Option<Piece> {
        self.work[slot.index()].scratch.as_ref().map(|block| block.piece(length))
    }

    /// Gives the ring what is left of a read or write: a short transfer is continued.
    fn ring_next(&mut self, core: &mut Core, slot: Slot, sequence: Sequence, stage: Stage) {
        self.work[slot.index()].stage = stage;
        let work = &self.work[slot.index()];
        let (Some(range), progress) = (work.range, work.progress) else { return };
        let length = range.length() as usize;
        let fua = match work.request {
            Some(Request::Write { fua, .. } | Request::CompareAndWrite { fua, .. }) => fua,
            _ => false,
        };
        let whole = match stage {
            Stage::Compare => self.scratch(slot, length),
            Stage::Verify => self.scratch(slot, (length - progress as usize).min(VERIFY_CHUNK)),
            // What compared equal stands behind what was compared with.
            Stage::CompareWrite => self.memory(slot, 2 * length).map(|p| p.part(length, length)),
            _ => self.memory(slot, length),
        };
        let Some(whole) = whole else { return self.finish(core, slot, sequence, Status::IO_ERROR, 0) };
        let piece = match stage {
            Stage::Verify => whole,
            _ => whole.part(progress as usize, length - progress as usize),
        };
        let volume = &self.session.volume;
        let sync = fua && !volume.write_through() && is_direct(volume);
        let (tag, at) = (Tag::storage(self.index, slot, sequence), range.offset() + progress);
        let given = match stage {
            Stage::Write | Stage::CompareWrite => core.ring.write(volume.index, at, &core.arena, piece, sync, tag),
            _ => core.ring.read(volume.index, at, &core.arena, piece, tag),
        };
        if let Err(error) = given {
            let error = format_args!("the ring doesn't take it: {error}");
            self.failed(core, slot, sequence, stage.name(), &error, Status::IO_ERROR);
        }
    }

    /// Storage failed a command: it is counted, told and answered.
    fn failed(
        &mut self,
        core: &mut Core,
        slot: Slot,
        sequence: Sequence,
        operation: &str,
        error: &dyn Display,
        status: Status,
    ) {
        let volume = &self.session.volume;
        core.storage_error(volume.index);
        volume.errors.report(operation, self.work[slot.index()].range.map(|range| range.offset()), error);
        self.finish(core, slot, sequence, status, 0);
    }

    /// The ring has ended a read or write of a slot.
    pub(super) fn ring_ended(&mut self, core: &mut Core, tag: Tag, result: i32) {
        let slot = tag.slot;
        let Some(work) = self.work.get_mut(slot.index()) else { return };
        let stage = work.stage;
        let Some(sequence) = self.queue.sequence(slot).filter(|s| s.0 as u16 == tag.check) else { return };
        let (Some(range), Some(request)) = (work.range, work.request) else { return };
        let volume = self.session.volume.clone();
        if result < 0 {
            let error = std::io::Error::from_raw_os_error(-result);
            if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) {
                return self.ring_next(core, slot, sequence, stage);
            }
            // A synchronous write may have failed by its sync, which the kernel tells only once (I5). Without
            // space it didn't come to that.
            let fua = matches!(request, Request::Write { fua: true, .. } | Request::CompareAndWrite { fua: true, .. });
            let synchronous = fua && is_direct(&volume) && !volume.write_through();
            if synchronous && status_of(&error) != Status::NO_SPACE {
                volume.failed_syncs.fetch_add(1, Ordering::SeqCst);
            }
            return self.failed(core, slot, sequence, stage.name(), &error, status_of(&error));
        }
        if result == 0 {
            let error = "the backing is shorter than the volume: somebody has cut it";
            return self.failed(core, slot, sequence, stage.name(), &error, Status::IO_ERROR);
        }
        let before = work.progress;
        work.progress += result as u64;
        let length = range.length();
        match stage {
            Stage::Verify => {
                if let Some(piece) = self.scratch(slot, result as usize) {
                    let work = &mut self.work[slot.index()];
                    work.crc = crc32c_append(work.crc, core.arena.bytes(piece));
                }
                debug_assert!(before < length);
                self.verify_next(core, &volume, slot, sequence);
            }
            _ if before + (result as u64) < length => self.ring_next(core, slot, sequence, stage),
            Stage::Read => match self.memory(slot, length as usize) {
                Some(piece) => {
                    let crc = crc32c(core.arena.bytes(piece));
                    self.finish_with(core, slot, sequence, Status::OK, 0, Some((piece, crc)));
                }
                None => self.finish(core, slot, sequence, Status::IO_ERROR, 0),
            },
            Stage::Compare => self.compare(core, &volume, slot, sequence, range),
            Stage::Write | Stage::CompareWrite => self.written(core, &volume, slot, sequence, request),
            Stage::Idle | Stage::InLine | Stage::Keeper => {}
        }
    }

    /// A write is whole. Without O_DIRECT its FUA is a sync of the keeper, so that syncs of one open file
    /// never run beside each other (I5).
    fn written(&mut self, core: &mut Core, volume: &Volume, slot: Slot, sequence: Sequence, request: Request) {
        let fua = matches!(request, Request::Write { fua: true, .. } | Request::CompareAndWrite { fua: true, .. });
        if fua && !volume.write_through() && !is_direct(volume) {
            return self.ask_keeper(core, volume, slot, sequence, KeeperWork::Sync);
        }
        self.finish(core, slot, sequence, Status::OK, 0);
    }

    fn verify_next(&mut self, core: &mut Core, volume: &Volume, slot: Slot, sequence: Sequence) {
        loop {
            let work = &mut self.work[slot.index()];
            let Some(range) = work.range else { return };
            let (done, left) = (work.progress, range.length() - work.progress);
            if left == 0 {
                let crc = work.crc;
                return self.finish(core, slot, sequence, Status::OK, u64::from(crc));
            }
            let memory = match &volume.store {
                Store::File(_) => return self.ring_next(core, slot, sequence, Stage::Verify),
                Store::Memory(memory) => Some(memory),
                Store::Null => None,
            };
            let Some(piece) = self.scratch(slot, left.min(VERIFY_CHUNK as u64) as usize) else {
                return self.finish(core, slot, sequence, Status::IO_ERROR, 0);
            };
            let buffer = core.arena.bytes_mut(piece);
            match memory {
                Some(memory) => memory.read(range.offset() + done, buffer),
                None => buffer.fill(0),
            }
            let work = &mut self.work[slot.index()];
            work.crc = crc32c_append(work.crc, buffer);
            work.progress += piece.length as u64;
        }
    }

    /// What is on the volume has been read: compares, and writes if it is what was expected.
    fn compare(&mut self, core: &mut Core, volume: &Volume, slot: Slot, sequence: Sequence, range: Range) {
        let length = range.length() as usize;
        let (Some(found), Some(payload)) = (self.scratch(slot, length), self.memory(slot, 2 * length)) else {
            return self.finish(core, slot, sequence, Status::IO_ERROR, 0);
        };
        let expected = core.arena.bytes(payload.part(0, length));
        let found = core.arena.bytes(found);
        if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
            return self.finish(core, slot, sequence, Status::COMPARE_FAILED, range.offset() + at as u64);
        }
        match &volume.store {
            Store::File(_) => {
                self.work[slot.index()].progress = 0;
                self.ring_next(core, slot, sequence, Stage::CompareWrite);
            }
            Store::Memory(memory) => {
                memory.write(range.offset(), core.arena.bytes(payload.part(length, length)));
                self.finish(core, slot, sequence, Status::OK, 0);
            }
            Store::Null => self.finish(core, slot, sequence, Status::OK, 0),
        }
    }

    fn identify(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) {
        let mut room = [0; HEADER_LEN + 256];
        let encoded = Handshake::Attached(self.session.attached()).encode(&mut room);
        let (Some(end), Some(piece)) = (encoded, self.memory(slot, room.len() - HEADER_LEN)) else {
            return self.finish(core, slot, sequence, Status::IO_ERROR, 0);
        };
        let piece = piece.part(0, end - HEADER_LEN);
        let buffer = core.arena.bytes_mut(piece);
        buffer.copy_from_slice(&room[HEADER_LEN..end]);
        let crc = crc32c(buffer);
        self.finish_with(core, slot, sequence, Status::OK, 0, Some((piece, crc)));
    }

    // ---- the keeper

    fn ask_keeper(&mut self, core: &mut Core, volume: &Volume, slot: Slot, sequence: Sequence, work: KeeperWork) {
        self.work[slot.index()].stage = Stage::Keeper;
        let ticket = Tag::storage(self.index, slot, sequence).pack();
        let job = Job { work, ticket, to: core.mailboxes[core.index].clone() };
        // A disk that hangs fills its keeper's line in the end; who finds it full asks again (I8).
        if let Err(job) = volume.keeper.submit(job) {
            self.work[slot.index()].unasked = Some(job.work);
            core.delayed.push((core.now_us() + KEEPER_RETRY_US, self.index, slot, sequence));
        }
    }

    /// The time of a delayed command has come.
    pub(super) fn after_delay(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) {
        let Some(work) = self.work.get_mut(slot.index()) else { return };
        match work.unasked.take() {
            Some(work) => {
                let volume = self.session.volume.clone();
                self.ask_keeper(core, &volume, slot, sequence, work);
            }
            None if !self.ended => self.proceed(core, slot, sequence),
            None => {}
        }
    }

    /// The keeper has ended a job of a slot.
    pub(super) fn keeper_ended(&mut self, core: &mut Core, tag: Tag, answer: Answer) {
        let slot = tag.slot;
        let Some(sequence) = self.queue.sequence(slot).filter(|s| s.0 as u16 == tag.check) else { return };
        let work = &mut self.work[slot.index()];
        if work.stage != Stage::Keeper {
            return;
        }
        match answer {
            Answer::Done => {
                let (mark, request, before): (Option<FlushMark>, _, _) =
                    (work.mark.take(), work.request, work.failed_syncs);
                let failed = self.session.volume.failed_syncs();
                let honest = match (mark, request) {
                    (Some(mark), _) => self.session.ledger.flush_ends(mark, failed),
                    // A sync that failed meanwhile may have lost this change, and the kernel told only that one (I5).
                    (None, Some(request)) if self.must_last(request) => failed == before,
                    (None, _) => true,
                };
                let status = if honest { Status::OK } else { Status::FLUSH_FAILED };
                self.finish(core, slot, sequence, status, 0);
            }
            Answer::Failed(status) => {
                work.mark = None;
                core.storage_error(self.session.volume.index);
                self.finish(core, slot, sequence, status, 0);
            }
            Answer::Extents(extents) => {
                let length = extents.len() * Extent::LEN;
                let encoded = self.memory(slot, length).and_then(|piece| {
                    let buffer = core.arena.bytes_mut(piece);
                    Extent::encode(&extents, buffer)?;
                    Some((piece, crc32c(buffer)))
                });
                match encoded {
                    Some(payload) => self.finish_with(core, slot, sequence, Status::OK, 0, Some(payload)),
                    None => self.finish(core, slot, sequence, Status::IO_ERROR, 0),
                }
            }
        }
    }

    /// Whether a change is answered only when it is on stable storage.
    fn must_last(&self, request: Request) -> bool {
        match request {
            Request::Write { fua, .. }
            | Request::WriteZeroes { fua, .. }
            | Request::Discard { fua, .. }
            | Request::CompareAndWrite { fua, .. } => fua || self.session.volume.write_through(),
            Request::Read(_) | Request::Flush | Request::BlockStatus(_) | Request::Verify(_) | Request::Identify => {
                false
            }
        }
    }

    // ---- exclusive commands

    /// The turn of an exclusive command has come. Answers `false` when it doesn't run any more.
    pub(super) fn granted(&mut self, core: &mut Core, ticket: &Ticket) -> bool {
        let Some(tag) = Tag::unpack(ticket.command) else { return false };
        let slot = tag.slot;
        self.at_storage -= 1;
        if let Some(work) = self.work.get_mut(slot.index()) {
            work.stage = Stage::Idle;
        }
        let current = self.queue.sequence(slot).filter(|s| s.0 as u16 == tag.check && !self.ended);
        let Some(sequence) = current else { return false };
        let Some(request) = self.start(core, slot, sequence) else { return false };
        self.begins_at_storage(core, slot, request);
        let volume = self.session.volume.clone();
        self.begin_request(core, &volume, slot, sequence, request);
        true
    }

    /// Whether a command at storage overlaps the range of a ticket.
    pub(super) fn overlaps(&self, ticket: &Ticket) -> bool {
        self.at_storage > 0
            && self.session.volume.index == ticket.volume
            && self.work.iter().any(|w| w.range.is_some_and(|r| r.overlaps(&ticket.range)))
    }

    /// An exclusive command has ended: what it held back goes on.
    pub(super) fn go_on(&mut self, core: &mut Core) {
        for _ in 0..self.held.len() {
            if let Some((slot, sequence)) = self.held.pop_front() {
                self.proceed(core, slot, sequence);
            }
        }
    }
}

/// Whether the volume's file is open for direct I/O.
fn is_direct(volume: &Volume) -> bool {
    matches!(&volume.store, Store::File(file) if file.direct())
}
