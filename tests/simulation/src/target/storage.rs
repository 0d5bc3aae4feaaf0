//! Commands at the disk: a fair line before it, and what comes back.

use twinrail_protocol::target::{FlushMark, Outcome, Start};
use twinrail_protocol::wire::Payload;
use twinrail_protocol::{Range, Request, Sequence, Slot, Status, crc32c};

use super::{Leaving, Target, VOLUME};
use crate::disk::{self, Action};
use crate::ground::Ground;
use crate::history::{Blocks, Kind, Place, Session as SessionNumber, Table, What};
use crate::memory::Lent;
use crate::note;
use crate::stamps::BLOCK;

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) session: SessionNumber,
    pub(super) queue: u16,
    pub(super) slot: Slot,
    pub(super) sequence: Sequence,
}

/// A command at the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    request: u32,
    key: Key,
    kind: Kind,
    opcode: twinrail_protocol::Opcode,
    buffer: Option<Lent>,
    blocks: Blocks,
    mark: Option<FlushMark>,
}

/// A sync that no command asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sync {
    request: u32,
}

/// A command whose answer has to wait until the volume's record is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct AfterStore {
    version: u64,
    key: Key,
    status: Status,
}

fn blocks(range: Range) -> Blocks {
    Blocks::new((range.offset() / BLOCK as u64) as u16, (range.length() / BLOCK as u64) as u16)
}

impl Target {
    /// A command may go to the disk.
    pub(super) fn park(&mut self, ground: &mut Ground, key: Key) {
        self.parked.push_back(key);
        self.start_parked(ground);
    }

    /// Starts what waits, as far as the disk takes it.
    fn start_parked(&mut self, ground: &mut Ground) {
        while self.at_storage < ground.plan.most_stored
            && let Some(key) = self.parked.pop_front()
        {
            self.start_command(ground, key);
        }
    }

    /// What a session that ends has in the line is dropped.
    pub(super) fn drop_parked(&mut self, _ground: &mut Ground, session: SessionNumber) {
        use twinrail_protocol::canary::{Canary, broken};
        if broken(Canary::EpochUncheckedAtSubmission) {
            return;
        }
        self.parked.retain(|key| key.session != session);
        self.wants_buffer.retain(|key| key.session != session);
    }

    /// The second look at the fence (I2), and submission.
    fn start_command(&mut self, ground: &mut Ground, key: Key) {
        let failed_syncs = self.failed_syncs;
        let Some(session) = self.session(key.session) else { return };
        let Some(lane) = session.lanes.get_mut(usize::from(key.queue)) else { return };
        let Some(core) = &mut lane.core else { return };
        let request = match core.start(key.slot, key.sequence) {
            Start::Go(request) => request,
            Start::Refuse(reply) => return self.reply(ground, key.session, key.queue, &reply, None),
            Start::Stale => return,
        };
        let Some(opcode) = core.command(key.slot, key.sequence).map(|command| command.opcode) else { return };
        let place = Place { table: Table(core.instance().0), slot: key.slot.0, sequence: key.sequence.0 };
        let own = lane.buffers.get(key.slot.index()).copied().flatten();
        let mut mark = None;
        if opcode.changes() {
            session.ledger.change_begins(failed_syncs);
        } else if request == Request::Flush {
            mark = Some(session.ledger.flush_begins());
        }
        session.at_storage += 1;
        self.at_storage += 1;
        let durable = ground.plan.write_through;
        let (kind, range, fua) = match request {
            Request::Read(range) => (Kind::Read, Some(range), false),
            Request::Write { range, fua } => (Kind::Write, Some(range), fua),
            Request::Flush => (Kind::Flush, None, false),
            Request::WriteZeroes { range, fua, .. } => (Kind::Zero, Some(range), fua),
            Request::Discard { range, fua } => (Kind::Discard, Some(range), fua),
            Request::CompareAndWrite { range, fua } => (Kind::CompareAndWrite, Some(range), fua),
            Request::BlockStatus(range) | Request::Verify(range) => (Kind::Other, Some(range), false),
            Request::Identify => (Kind::Other, None, false),
        };
        let blocks = range.map_or(Blocks::default(), blocks);
        let mut buffer = own;
        let action = match kind {
            Kind::Flush => Action::Sync,
            Kind::Read | Kind::Other => {
                let lent = self.lend(ground, usize::from(blocks.count) * BLOCK);
                buffer = Some(lent);
                Action::Read(lent)
            }
            Kind::Zero | Kind::Discard => Action::Zero,
            // Whatever has a payload has a buffer since it came.
            Kind::Write => own.map_or(Action::Zero, Action::Write),
            Kind::CompareAndWrite => own.map_or(Action::Zero, Action::CompareAndWrite),
        };
        let ticket = (kind != Kind::Flush).then(|| ground.disk.ticket());
        if let Some(ticket) = ticket {
            ground.record(What::Submitted { ticket, session: key.session, place, kind, blocks });
        }
        let durable = durable || fua;
        let request = ground.submit(disk::Request { ticket, action, blocks, durable });
        self.flights.push(Flight { request, key, kind, opcode, buffer, blocks, mark });
    }

    /// The disk ended a request.
    pub(super) fn disk_ended(&mut self, ground: &mut Ground, request: u32) {
        if let Some(at) = self.syncs.iter().position(|sync| sync.request == request) {
            self.syncs.swap_remove(at);
            let ok = ground.disk.result(request) == disk::Result::Ok;
            return self.synced_to_leave(ground, ok);
        }
        // It may be a dead process's.
        let Some(at) = self.flights.iter().position(|flight| flight.request == request) else { return };
        let flight = self.flights.swap_remove(at);
        let Flight { key, kind, opcode, buffer, blocks, mark, .. } = flight;
        let result = ground.disk.result(request);
        let mut version = None;
        let mut outcome = match result {
            disk::Result::Ok => Outcome::status(Status::OK),
            disk::Result::Different(at) => Outcome { result: at, ..Outcome::status(Status::COMPARE_FAILED) },
            disk::Result::Failed => Outcome::status(Status::IO_ERROR),
        };
        self.at_storage -= 1;
        let mut failed_syncs = self.failed_syncs;
        if kind == Kind::Flush && result == disk::Result::Failed {
            failed_syncs += 1;
            self.failed_syncs = failed_syncs;
            ground.record(What::SyncFailureHeard { sync: ground.disk.sync_number(request) });
            if let Some(holdings) = &mut self.holdings {
                version = holdings.sync_failed(VOLUME, failed_syncs);
            }
        }
        let stored = self.storing.is_empty();
        let Some(session) = self.session(key.session) else { return };
        session.at_storage -= 1;
        if opcode.changes() {
            session.ledger.change_ends();
        }
        if let Some(mark) = mark {
            let clean = result == disk::Result::Ok && session.ledger.flush_ends(mark, failed_syncs);
            if !clean {
                outcome = Outcome::status(Status::FLUSH_FAILED);
            }
        }
        if kind == Kind::Flush && outcome.status != Some(Status::OK) && version.is_none() && !stored {
            // It heard of a failure whose record may still be on its way.
            version = self.storing.back().map(|record| record.version);
        }
        // A read's data.
        let mut payload = None;
        if let (Kind::Read, disk::Result::Ok, Some(lent)) = (kind, result, buffer) {
            let length = usize::from(blocks.count) * BLOCK;
            let crc = crc32c(&ground.memory.bytes(lent)[..length]);
            outcome.payload = Payload { length: length as u32, crc };
            payload = Some(lent);
        } else if let (Kind::Other, disk::Result::Ok, Some(lent)) = (kind, result, buffer) {
            outcome.result = u64::from(crc32c(ground.memory.bytes(lent)));
        }
        match version {
            Some(version) => {
                let status = outcome.status.unwrap_or(Status::OK);
                self.after_store.push(AfterStore { version, key, status });
            }
            None => self.finish(ground, key, outcome, payload),
        }
        match kind {
            Kind::Read | Kind::Other => {
                if let Some(lent) = buffer {
                    self.release(ground, lent);
                }
            }
            _ => self.free_buffer(ground, key),
        }
        self.confirm_end(ground, key.session);
        self.start_parked(ground);
        self.fetch_more(ground);
    }

    fn finish(&mut self, ground: &mut Ground, key: Key, outcome: Outcome, payload: Option<Lent>) {
        let Some(core) = self.lane(key.session, key.queue).and_then(|lane| lane.core.as_mut()) else { return };
        if let Some(reply) = core.finish(key.slot, key.sequence, outcome) {
            self.reply(ground, key.session, key.queue, &reply, payload);
        }
    }

    /// The record is stored up to this version.
    pub(super) fn answer_what_was_stored(&mut self, ground: &mut Ground, version: u64) {
        let mut at = 0;
        while at < self.after_store.len() {
            if self.after_store[at].version > version {
                at += 1;
                continue;
            }
            let AfterStore { key, status, .. } = self.after_store.swap_remove(at);
            self.finish(ground, key, Outcome::status(status), None);
        }
    }

    /// The last sync before the target leaves.
    pub(super) fn sync_to_leave(&mut self, ground: &mut Ground) {
        note!(ground, "target", "syncs before it leaves");
        let (action, blocks) = (Action::Sync, Blocks::default());
        let request = ground.submit(disk::Request { ticket: None, action, blocks, durable: false });
        self.syncs.push(Sync { request });
        debug_assert!(self.leaving == Some(Leaving::Syncs), "only then");
    }
}
