//! A queue as its reactor serves it: frames in, replies out, and the memory of its slots.
//!
//! Every decision about slots, sequences, epochs and credits is the protocol's; what happens at storage is
//! in [`super::storage`].

use std::collections::VecDeque;
use std::sync::Arc;

use twinrail_fallback_tcp::{Arrival, Filled};
use twinrail_protocol::target::{FlushMark, Intake, Outcome, Queue, Step};
use twinrail_protocol::wire::{Command, Control, ControlKind, EventCode, Frame, Payload, Reply, Transfer};
use twinrail_protocol::{
    Epoch, Flags, Instance, Opcode, QueueId, Range, Request, Sequence, Slot, Status, Violation, crc32c,
};

use super::arena::{Block, Piece};
use super::core::{Core, PATH_LOG};
use super::farewell::abort;
use super::mailbox::Activation;
use super::path::{Arriving, Departing, End, Path};
use super::storage::Stage;
use super::{Event, Parting};
use crate::metrics::{self, LaneMetrics};
use crate::session::Session;
use crate::volume::Work as KeeperWork;

/// Reads of the socket that one lane may do in a turn before the others have theirs.
const READS_PER_TURN: usize = 16;

/// Work that is worth a call to the socket, in bytes of payload moved: eight commands of 4 KiB. Measured over
/// loopback: with less the calls cost more than the overlap brings, with more each side idles while the other
/// one works.
const BATCH_BYTES: usize = 32 * 1024;
/// What a command without payload counts for.
const LEAST_BYTES: usize = 4 * 1024;

/// A queue of a session.
pub(super) struct Lane {
    pub(super) index: usize,
    pub(super) session: Arc<Session>,
    pub(super) id: QueueId,
    pub(super) queue: Queue,
    pub(super) path: Option<Path>,
    /// A path that has ended and whose socket the ring still holds.
    pub(super) closing: Option<Path>,
    /// The connection that becomes the path when the ring has let go of that.
    awaits_fence: Option<Box<Activation>>,
    /// When and why the last path was lost, in milliseconds.
    lost: Option<(u64, Status)>,
    pub(super) work: Box<[Work]>,
    /// The slots' in-capsule buffers, one behind the other: small payloads never wait for memory.
    capsules: Option<Block>,
    /// Commands that wait for memory.
    pub(super) parked: VecDeque<(Slot, Sequence)>,
    /// Commands that wait for an exclusive one to end.
    pub(super) held: VecDeque<(Slot, Sequence)>,
    /// Stands in `Core::waiting`.
    pub(super) waits: bool,
    /// Stands in `Core::dirty`.
    pub(super) dirty: bool,
    /// Work whose replies wait to be sent, in bytes of payload moved.
    due_bytes: usize,
    /// Bytes of blocks that its commands have asked for.
    taken: usize,
    /// Bytes promised to its data window.
    pub(super) window: usize,
    /// Commands at storage, and exclusive ones that stand in line.
    pub(super) at_storage: usize,
    /// The session has ended: nothing new is submitted.
    pub(super) ended: bool,
    pub(super) metrics: LaneMetrics,
}

/// What the driver keeps of a slot.
#[derive(Default)]
pub(super) struct Work {
    pub(super) stage: Stage,
    /// The payload, where it is too large for the slot's in-capsule buffer.
    pub(super) block: Option<Block>,
    /// A second buffer: what COMPARE AND WRITE and VERIFY read.
    pub(super) scratch: Option<Block>,
    pub(super) request: Option<Request>,
    /// Set while it is at storage: what exclusive commands have to wait for.
    pub(super) range: Option<Range>,
    /// Bytes that storage has done.
    pub(super) progress: u64,
    /// Checksum of what VERIFY has read.
    pub(super) crc: u32,
    pub(super) mark: Option<FlushMark>,
    /// Failed syncs of the volume when it began.
    pub(super) failed_syncs: u64,
    /// The ledger was told that a change begins.
    pub(super) change: bool,
    /// What the volume's keeper had no room for yet.
    pub(super) unasked: Option<KeeperWork>,
    /// A fault injected for a test was looked at already.
    pub(super) delayed: bool,
    pub(super) arrived_us: u64,
    pub(super) started_us: u64,
}

/// What a frame asks for once its payload was taken care of; ends the borrow of the receive buffer.
enum Next {
    Nothing,
    Proceed(Slot, Sequence),
    Fetch(Slot, Sequence),
    Answer(Reply),
    Control(Control),
}

impl Lane {
    pub(super) fn new(
        index: usize,
        session: Arc<Session>,
        id: QueueId,
        queue: Queue,
        capsules: Block,
        window: usize,
        metrics: LaneMetrics,
    ) -> Self {
        let depth = usize::from(queue.options().depth);
        Self {
            index,
            session,
            id,
            queue,
            path: None,
            closing: None,
            awaits_fence: None,
            lost: None,
            work: (0..depth).map(|_| Work::default()).collect(),
            capsules: Some(capsules),
            parked: VecDeque::with_capacity(depth),
            held: VecDeque::with_capacity(depth),
            waits: false,
            dirty: false,
            due_bytes: 0,
            taken: 0,
            window,
            at_storage: 0,
            ended: false,
            metrics,
        }
    }

    /// Whether nothing of this lane acts any more: no command at storage, no socket in the ring's hands.
    pub(super) fn is_over(&self) -> bool {
        self.at_storage == 0 && self.closing.is_none()
    }

    /// Commands whose payload isn't whole: at a drain they will never be.
    pub(super) fn gathering(&self) -> u16 {
        self.queue.gathering()
    }

    /// The slot's in-capsule buffer, cut to `length`; nothing if that is too long for it.
    fn capsule(&self, slot: Slot, length: usize) -> Option<Piece> {
        let size = self.queue.options().in_capsule as usize;
        let all = self.capsules.as_ref()?;
        (length <= size).then(|| all.piece(all.size()).part(slot.index() * size, length))
    }

    /// Where a payload of `length` bytes lies that belongs to `slot`: its block, or its in-capsule buffer.
    pub(super) fn memory(&self, slot: Slot, length: usize) -> Option<Piece> {
        match &self.work[slot.index()].block {
            Some(block) if block.size() >= length => Some(block.piece(length)),
            Some(_) => None,
            None => self.capsule(slot, length),
        }
    }

    /// Sees to it that the slot has memory for `length` bytes. `asked` tells a command that may wait from a
    /// payload that the data window promised room for.
    pub(super) fn secure(&mut self, core: &mut Core, slot: Slot, length: usize, asked: bool) -> bool {
        let size = self.queue.options().in_capsule as usize;
        if length <= size || self.work[slot.index()].block.as_ref().is_some_and(|b| b.size() >= length) {
            return true;
        }
        let block = if asked { self.ask(core, slot, length) } else { core.arena.take(length) };
        let Some(block) = block else { return false };
        if let Some(old) = self.work[slot.index()].block.replace(block) {
            self.free(core, old);
        }
        true
    }

    /// A second buffer of `length` bytes for the slot's command.
    pub(super) fn secure_scratch(&mut self, core: &mut Core, slot: Slot, length: usize) -> bool {
        if self.work[slot.index()].scratch.is_some() {
            return true;
        }
        let block = self.ask(core, slot, length);
        self.work[slot.index()].scratch = block;
        self.work[slot.index()].scratch.is_some()
    }

    fn ask(&mut self, core: &mut Core, slot: Slot, length: usize) -> Option<Block> {
        // Who waits already comes first (I8).
        if !core.resuming && !core.waiting.is_empty() {
            return None;
        }
        let own = self.work[slot.index()].block.as_ref().filter(|block| block.asked).map_or(0, Block::size);
        let block = core.ask(length, self.taken.saturating_sub(own))?;
        self.taken += block.size();
        Some(block)
    }

    fn free(&mut self, core: &mut Core, block: Block) {
        self.taken = self.taken.saturating_sub(core.give_back(block));
    }

    /// Whether nobody uses the slot's memory: no command that isn't answered, nothing at storage.
    fn is_idle(&self, slot: Slot) -> bool {
        self.work.get(slot.index()).is_some_and(|w| w.stage == Stage::Idle) && !self.queue.is_busy(slot)
    }

    /// Gives back what the slot holds.
    pub(super) fn free_slot(&mut self, core: &mut Core, slot: Slot) {
        let work = &mut self.work[slot.index()];
        let blocks = [work.block.take(), work.scratch.take()];
        blocks.into_iter().flatten().for_each(|block| self.free(core, block));
    }

    /// The lane has something to send or to watch.
    pub(super) fn touch(&mut self, core: &mut Core) {
        if !self.dirty {
            self.dirty = true;
            core.dirty.push(self.index);
        }
    }

    /// Parks a command until there is memory.
    pub(super) fn park(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) {
        self.parked.push_back((slot, sequence));
        self.stand_in_line(core);
    }

    fn stand_in_line(&mut self, core: &mut Core) {
        if !self.waits {
            self.waits = true;
            core.waiting.push_back(self.index);
            // Those before it may be at their own limit, and a disk that hangs keeps them there: not this one (I8).
            core.memory_freed |= !core.resuming;
        }
    }

    /// Tries one parked command, or a payload without a place. Answers whether the lane got on.
    pub(super) fn resume(&mut self, core: &mut Core) -> bool {
        if let Some(arriving) = self.path.as_ref().and_then(|p| p.arriving).filter(|a| !a.placed) {
            return self.place(core, arriving);
        }
        let Some((slot, sequence)) = self.parked.pop_front() else { return false };
        let before = self.parked.len();
        match self.queue.is_gathering(slot, sequence) {
            true => self.fetch(core, slot, sequence),
            false => self.proceed(core, slot, sequence),
        }
        // Parked again means that there still isn't enough: it keeps its place.
        if self.parked.len() > before {
            self.parked.rotate_right(1);
            return false;
        }
        true
    }

    /// Whether it waits for memory.
    pub(super) fn wants_memory(&self) -> bool {
        !self.parked.is_empty() || self.path.as_ref().and_then(|p| p.arriving).is_some_and(|a| !a.placed)
    }

    // ---- frames in

    /// Takes what has arrived. Answers whether anything had.
    pub(super) fn receive(&mut self, core: &mut Core) -> bool {
        match self.receive_frames(core) {
            Ok(heard) => heard,
            Err(end) => {
                self.end_path(core, end);
                true
            }
        }
    }

    fn receive_frames(&mut self, core: &mut Core) -> Result<bool, End> {
        let (mut heard, mut reads, mut drained) = (false, 0, false);
        let depth = self.queue.options().depth;
        loop {
            let Some(path) = &mut self.path else { return Ok(heard) };
            if !path.takes_frames(depth) {
                return Ok(heard);
            }
            let next = match path.inbound.next().map_err(Violation::from)? {
                Arrival::Pending => {
                    if drained || reads == READS_PER_TURN {
                        return Ok(heard);
                    }
                    let placed = path.arriving.filter(|_| path.inbound.wants_destination());
                    let destination = placed.and_then(|a| {
                        let block = self.work[a.slot.index()].block.as_ref()?;
                        Some(block.piece(a.length as usize))
                    });
                    let destination = match destination {
                        Some(piece) => core.arena.bytes_mut(piece),
                        None => &mut [],
                    };
                    reads += 1;
                    match path.inbound.fill(&path.socket, destination) {
                        Ok(Filled::Bytes { drained: empty, .. }) => {
                            drained = empty;
                            heard = true;
                            path.heard(core.now_ms());
                            continue;
                        }
                        Ok(Filled::WouldBlock) => return Ok(heard),
                        Ok(Filled::Closed) => return Err(End::Lost(Status::CONNECTION_LOST)),
                        // Can't be: what was whole has been taken above.
                        Ok(Filled::Full) => return Ok(heard),
                        Err(_) => return Err(End::Lost(Status::CONNECTION_LOST)),
                    }
                }
                Arrival::Frame { frame: Frame::Command(command), payload } => {
                    let intake = self.queue.receive(&command)?;
                    let (slot, sequence) = (command.slot, command.sequence);
                    note_arrival(&mut self.work, slot, core.now_us());
                    if intake == Intake::Receive {
                        let size = self.queue.options().in_capsule as usize;
                        let piece =
                            self.capsules.as_ref().map(|c| c.piece(c.size()).part(slot.index() * size, payload.len()));
                        take_small(core, &mut self.queue, piece, slot, sequence, payload)
                    } else {
                        self.begin(core, &command, intake)
                    }
                }
                Arrival::Frame { frame: Frame::Data(data), payload } => match self.queue.receive_data(&data)? {
                    Intake::Receive => {
                        path.liveness.answered(core.now_ms());
                        path.fetches.came(core.now_ms());
                        let size = self.queue.options().in_capsule as usize;
                        let piece = self
                            .capsules
                            .as_ref()
                            .map(|c| c.piece(c.size()).part(data.slot.index() * size, payload.len()));
                        take_small(core, &mut self.queue, piece, data.slot, data.sequence, payload)
                    }
                    _ => self.stale(core),
                },
                Arrival::Frame { frame: Frame::Control(control), .. } => Next::Control(control),
                Arrival::Frame { .. } => return Err(wrong_direction()),
                Arrival::Large { frame: Frame::Command(command) } => {
                    if command.payload.length > self.queue.options().geometry.max_transfer {
                        return Err(too_long());
                    }
                    let intake = self.queue.receive(&command)?;
                    note_arrival(&mut self.work, command.slot, core.now_us());
                    if intake == Intake::Receive {
                        let (slot, sequence, length) = (command.slot, command.sequence, command.payload.length);
                        self.place(core, Arriving { slot, sequence, length, placed: false });
                        Next::Nothing
                    } else {
                        path.inbound.skip();
                        self.begin(core, &command, intake)
                    }
                }
                Arrival::Large { frame: Frame::Data(data) } => match self.queue.receive_data(&data)? {
                    Intake::Receive => {
                        path.liveness.answered(core.now_ms());
                        path.fetches.came(core.now_ms());
                        let Transfer { slot, sequence, payload, .. } = data;
                        self.place(core, Arriving { slot, sequence, length: payload.length, placed: false });
                        Next::Nothing
                    }
                    _ => {
                        path.inbound.skip();
                        self.stale(core)
                    }
                },
                Arrival::Large { .. } => return Err(wrong_direction()),
                Arrival::PayloadComplete => match path.arriving.take() {
                    Some(Arriving { slot, sequence, length, .. }) => {
                        let block = self.work[slot.index()].block.as_ref();
                        let crc = block.map_or(0, |b| crc32c(core.arena.bytes(b.piece(length as usize))));
                        after_payload(core, &mut self.queue, slot, sequence, crc)
                    }
                    None => Next::Nothing,
                },
            };
            match next {
                Next::Nothing => continue,
                Next::Proceed(slot, sequence) => self.proceed(core, slot, sequence),
                Next::Fetch(slot, sequence) => self.fetch(core, slot, sequence),
                Next::Answer(reply) => self.answer(core, reply),
                Next::Control(control) => self.control(core, &control)?,
            }
            self.flush_batch(core);
        }
    }

    /// Sends when enough replies wait: the initiator then works on them while the rest of its commands is
    /// done here. Waiting for the end of the turn would have each side idle while the other one works.
    pub(super) fn flush_batch(&mut self, core: &mut Core) {
        if self.due_bytes >= BATCH_BYTES && self.path.as_ref().is_some_and(|p| !p.is_blocked()) {
            self.flush(core);
        }
    }

    /// A command whose payload, if it has any, isn't taken in.
    fn begin(&mut self, core: &mut Core, command: &Command, intake: Intake) -> Next {
        match intake {
            Intake::Ready => Next::Proceed(command.slot, command.sequence),
            Intake::Fetch => Next::Fetch(command.slot, command.sequence),
            Intake::Reply(reply) => {
                core.metrics.refused_or_replayed.inc();
                Next::Answer(reply)
            }
            Intake::Stale => self.stale(core),
            Intake::Running | Intake::Receive => Next::Nothing,
        }
    }

    fn stale(&self, core: &mut Core) -> Next {
        core.metrics.stale_frames.inc();
        Next::Nothing
    }

    /// Finds a place for a large payload that arrives now. Answers whether it did; if not, the path isn't
    /// read until there is one.
    fn place(&mut self, core: &mut Core, arriving: Arriving) -> bool {
        let Arriving { slot, length, .. } = arriving;
        let placed = self.secure(core, slot, length as usize, false);
        if !placed {
            self.stand_in_line(core);
        }
        if let (Some(path), true) = (&mut self.path, placed) {
            if let Some(block) = &self.work[slot.index()].block {
                path.inbound.place(core.arena.bytes_mut(block.piece(length as usize)));
            }
            path.hot = true;
        }
        if let Some(path) = &mut self.path {
            path.arriving = Some(Arriving { placed, ..arriving });
        }
        placed
    }

    /// Asks the initiator for a payload, as soon as there is memory for it.
    fn fetch(&mut self, core: &mut Core, slot: Slot, sequence: Sequence) {
        let Some(command) = self.queue.command(slot, sequence) else { return };
        let (opcode, length) = (command.opcode, command.payload.length as usize);
        // A COMPARE AND WRITE gets both of its buffers or none: some that each had one would wait for ever for
        // their other one (I10).
        let secured = self.secure(core, slot, length, true)
            && (opcode != Opcode::COMPARE_AND_WRITE || self.secure_scratch(core, slot, length / 2));
        if !secured {
            self.free_slot(core, slot);
            self.park(core, slot, sequence);
            return;
        }
        let Some(transfer) = self.queue.fetch(slot, sequence) else { return };
        if let Some(path) = &mut self.path {
            // Parked fetches come later than the frames that caused them, when replies may fill the room.
            if path.outbound.push(Frame::Fetch(transfer).encode(), None).is_err() {
                return self.end_path(core, overrun().into());
            }
            path.fetches.ask(core.now_ms());
            self.touch(core);
        }
    }

    fn control(&mut self, core: &mut Core, control: &Control) -> Result<(), End> {
        let epoch = self.queue.epoch();
        let Some(path) = &mut self.path else { return Ok(()) };
        // PATH_LOST names the path that it tells of, all others the one that they come on.
        if control.kind != ControlKind::PathLost && control.epoch < epoch {
            self.stale(core);
            return Ok(());
        }
        if control.kind != ControlKind::PathLost && control.epoch > epoch {
            let detail = "a control frame of an epoch that wasn't activated";
            return Err(Violation { status: Status::UNEXPECTED_FRAME, detail }.into());
        }
        if control.kind.is_request() {
            path.credit.request_came(path.outbound.answers_waiting())?;
        }
        if control.kind.is_answer() {
            path.credit.answer_came()?;
            path.liveness.answered(core.now_ms());
        }
        match control.kind {
            ControlKind::Probe => path.control(&Control::new(ControlKind::ProbeReply, epoch, control.token))?,
            ControlKind::ProbeReply => {}
            ControlKind::EventSeen if control.code == EventCode::CREDIT => {
                self.queue.grant().seen(control.credits.number)?;
            }
            ControlKind::EventSeen => {}
            ControlKind::Close => {
                path.quiet = true;
                path.close_token = Some(control.token);
                core.tell(Event::CloseAsked { session: self.session.id });
            }
            ControlKind::Disconnect => return Err(End::Lost(control.status)),
            // With one rail there is no other path that could be lost.
            ControlKind::PathLost => {}
            ControlKind::Event | ControlKind::Closed => return Err(wrong_direction()),
        }
        self.touch(core);
        Ok(())
    }

    // ---- replies out

    /// Answers a command that isn't executed, or was before.
    pub(super) fn answer(&mut self, core: &mut Core, reply: Reply) {
        // A retry that doesn't match is answered while its original is still at storage, which then goes on
        // using the slot's memory (I3).
        if self.is_idle(reply.slot) {
            self.free_slot(core, reply.slot);
        }
        self.metrics.answered(reply.opcode, reply.status);
        self.reply(core, reply, None, None);
    }

    /// Ends a command that the protocol has at storage or ready, and answers it.
    pub(super) fn finish(&mut self, core: &mut Core, slot: Slot, sequence: Sequence, status: Status, result: u64) {
        self.finish_with(core, slot, sequence, status, result, None);
    }

    /// The same, with the payload of the reply: where it lies and its CRC32C.
    pub(super) fn finish_with(
        &mut self,
        core: &mut Core,
        slot: Slot,
        sequence: Sequence,
        status: Status,
        result: u64,
        payload: Option<(Piece, u32)>,
    ) {
        let bytes = self.work[slot.index()].range.map_or(0, |r| r.length());
        self.due_bytes += (bytes as usize).clamp(LEAST_BYTES, BATCH_BYTES);
        self.ended_at_storage(core, slot, sequence);
        let described = payload.map_or(Payload::default(), |(p, crc)| Payload { length: p.length as u32, crc });
        let outcome = Outcome { status: Some(status), result, payload: described };
        let Some(reply) = self.queue.finish(slot, sequence, outcome) else {
            self.free_slot(core, slot);
            return;
        };
        let work = &mut self.work[slot.index()];
        let (arrived, started) = (work.arrived_us, work.started_us);
        self.metrics.finished(
            reply.opcode,
            status,
            started.saturating_sub(arrived),
            core.now_us().saturating_sub(started),
        );
        match (status.is_ok(), reply.opcode) {
            (true, Opcode::FLUSH) => core.flushed(self.session.volume.index),
            (true, Opcode::READ) => self.metrics.read(described.length.into()),
            (true, Opcode::WRITE | Opcode::COMPARE_AND_WRITE) => self.metrics.wrote(bytes),
            _ => {}
        }
        let block = payload.and_then(|_| work.block.take());
        self.free_slot(core, slot);
        self.reply(core, reply, payload.map(|(piece, _)| piece), block);
    }

    /// Puts a reply on its way, if there is one: without a path it stays recorded (I1).
    fn reply(&mut self, core: &mut Core, mut reply: Reply, payload: Option<Piece>, block: Option<Block>) {
        let piece = payload.unwrap_or(Piece { offset: 0, length: 0 });
        if piece.length > 0 {
            reply.flags = Flags::PAYLOAD_FOLLOWS;
        }
        let departing = Departing { opcode: reply.opcode, since_us: core.now_us(), piece, block };
        let unsent = match &mut self.path {
            Some(path) => {
                path.outbound.push(Frame::Reply(reply).encode(), Some(departing)).err().and_then(|f| f.payload)
            }
            None => Some(departing),
        };
        match unsent {
            None => self.touch(core),
            Some(departing) => {
                if let Some(block) = departing.block {
                    self.free(core, block);
                }
                // Only an initiator that uses a slot before it has the slot's reply can fill the room.
                self.end_path(core, overrun().into());
            }
        }
    }

    /// Sends what waits, has the ring watch what has to be watched.
    pub(super) fn flush(&mut self, core: &mut Core) {
        self.due_bytes = 0;
        let Some(path) = &mut self.path else { return };
        let (now_us, metrics, returned) = (core.now_us(), &self.metrics, &mut core.returned);
        let outcome = path.flush(&core.arena, now_us / 1000, |departing| {
            metrics.observe(departing.opcode, metrics::Stage::Wire, now_us.saturating_sub(departing.since_us));
            returned.extend(departing.block);
        });
        self.taken = self.taken.saturating_sub(core.collect_returned());
        match outcome {
            Ok(true) => self.touch(core),
            Ok(false) => {
                if let Err(error) = path.watch(&mut core.ring, self.index, false) {
                    tracing::error!(%error, "the ring doesn't take a readiness request");
                    self.end_path(core, End::Ours(Status::LIMIT_REACHED));
                }
            }
            Err(_) => self.end_path(core, End::Lost(Status::CONNECTION_LOST)),
        }
    }

    // ---- the end of a path

    /// Ends the path. Commands at storage go on; their replies are recorded.
    pub(super) fn end_path(&mut self, core: &mut Core, end: End) {
        let Some(mut path) = self.path.take() else { return };
        let status = end.status();
        let peer = path.peer;
        let (session, queue, initiator) = (self.session.id, self.id, self.session.initiator.as_str());
        match &end {
            End::Violation(violation) => {
                if let Some(unsaid) = PATH_LOG.violations.admit() {
                    tracing::warn!(%session, %queue, initiator, %peer, reason = %violation, unsaid, "connection ended: the initiator broke a rule");
                }
                core.metrics.violated(status);
                path.say_goodbye(status, violation.detail, &core.arena, |d| core.returned.extend(d.block));
            }
            End::Ours(_) => {
                if let Some(unsaid) = PATH_LOG.ours.admit() {
                    tracing::info!(%session, %queue, initiator, %peer, reason = %status, unsaid, "connection ended by this side");
                }
                path.say_goodbye(status, "", &core.arena, |d| core.returned.extend(d.block));
            }
            End::Lost(_) => {
                if let Some(unsaid) = PATH_LOG.lost.admit() {
                    tracing::info!(%session, %queue, initiator, %peer, reason = %status, unsaid, "connection ended by the other side");
                }
            }
        }
        core.metrics.disconnected(status);
        self.metrics.path_ended();
        self.lost = Some((core.now_ms(), status));
        let id = path.id;
        self.retire(core, path);
        if status != Status::SUPERSEDED {
            core.standbys.path_lost((session, self.id), self.queue.epoch());
        }
        core.tell(Event::PathLost { session, path: id, status });
    }

    /// Takes a path out of service: its buffers come back now, its socket when the ring has let go of it.
    fn retire(&mut self, core: &mut Core, mut path: Path) {
        core.metrics.copied_bytes.inc_by(path.inbound.copied_bytes());
        path.outbound.drain(|departing| core.returned.extend(departing.block));
        self.taken = self.taken.saturating_sub(core.collect_returned());
        self.queue.path_lost();
        self.free_forgotten(core);
        if path.is_watched() {
            if let Err(error) = path.unwatch(&mut core.ring, self.index) {
                tracing::error!(%error, "the ring doesn't take a cancellation");
            }
            self.closing = Some(path);
        } else {
            hang_up(core, path);
        }
    }

    /// Gives back the memory of slots that the protocol knows nothing of any more.
    pub(super) fn free_forgotten(&mut self, core: &mut Core) {
        let queue = &self.queue;
        self.parked.retain(|&(slot, sequence)| queue.command(slot, sequence).is_some());
        for n in 0..self.work.len() {
            let slot = Slot(n as u16);
            if self.is_idle(slot) {
                self.free_slot(core, slot);
            }
        }
    }

    /// Whether a path with this epoch may take over. One that waits for the fence already may be overtaken.
    pub(super) fn may_activate(&self, epoch: Epoch, instance: Instance) -> Result<(), Status> {
        if self.awaits_fence.as_ref().is_some_and(|earlier| epoch <= earlier.epoch) {
            return Err(Status::STALE_EPOCH);
        }
        self.queue.may_activate(epoch, instance)
    }

    /// The old path is on its way out; this connection is to take over.
    pub(super) fn await_fence(&mut self, activation: Activation) {
        if let Some(earlier) = self.awaits_fence.replace(Box::new(activation)) {
            earlier.refuse(Status::SUPERSEDED);
        }
    }

    /// The connection that may take over now: nothing of the old path acts any more.
    pub(super) fn fenced(&mut self) -> Option<Activation> {
        self.awaits_fence.take_if(|_| self.closing.is_none() && self.path.is_none()).map(|activation| *activation)
    }

    /// Another connection has taken over; so many commands of its report were unknown, running, done.
    pub(super) fn switched(&mut self, core: &Core, verdicts: [u64; 3]) {
        self.metrics.switched(verdicts);
        let Some((lost_ms, cause)) = self.lost.take() else { return };
        let gap_ms = core.now_ms().saturating_sub(lost_ms);
        if let Some(unsaid) = PATH_LOG.switches.admit() {
            let (session, queue, initiator) = (self.session.id, self.id, self.session.initiator.as_str());
            let (epoch, [unknown, running, done]) = (self.queue.epoch(), verdicts);
            tracing::info!(%session, %queue, initiator, %epoch, %cause, gap_ms, unknown, running, done, unsaid, "path replaced");
        }
    }

    /// The ring reports readiness. Answers whether it has let go of a path that ended.
    pub(super) fn ready(&mut self, core: &mut Core, kind: super::ring::TagKind, check: u16) -> bool {
        if let Some(closing) = &mut self.closing
            && closing.epoch.0 as u16 == check
        {
            closing.ready(kind);
            if !closing.is_watched()
                && let Some(path) = self.closing.take()
            {
                hang_up(core, path);
                return true;
            }
            return false;
        }
        if let Some(path) = &mut self.path
            && path.epoch.0 as u16 == check
        {
            path.ready(kind);
            self.touch(core);
        }
        false
    }

    /// Timers. Answers when to ask again, in milliseconds.
    pub(super) fn tick(&mut self, core: &mut Core) -> u64 {
        let Some(path) = &mut self.path else { return u64::MAX };
        match path.tick(core.now_ms(), core.options.stall_timeout_ms) {
            Ok(until_ms) => {
                if until_ms == core.now_ms() {
                    self.touch(core);
                    return core.now_ms() + 1;
                }
                until_ms
            }
            Err(end) => {
                self.end_path(core, end);
                u64::MAX
            }
        }
    }

    /// Ends the lane with its session. A path whose initiator asked for it is given to the control plane,
    /// which says CLOSED when everything has ended.
    pub(super) fn end_session(&mut self, core: &mut Core, status: Status) -> Option<Parting> {
        self.ended = true;
        self.parked.clear();
        self.held.clear();
        // Those who stood in line behind it are asked again.
        core.memory_freed = true;
        if let Some(activation) = self.awaits_fence.take() {
            activation.refuse(Status::SESSION_LOST);
        }
        let parting = self.path.take().and_then(|path| self.part(core, path, status));
        self.release(core);
        parting
    }

    /// The last word on a path whose session ends.
    fn part(&mut self, core: &mut Core, mut path: Path, status: Status) -> Option<Parting> {
        self.metrics.path_ended();
        core.metrics.disconnected(status);
        if let (Some(token), false) = (path.close_token, path.is_watched()) {
            let (now_ms, returned) = (core.now_ms(), &mut core.returned);
            let flushed = path.flush(&core.arena, now_ms, |departing| returned.extend(departing.block));
            self.taken = self.taken.saturating_sub(core.collect_returned());
            if flushed.is_ok() && path.outbound.is_empty() {
                self.queue.path_lost();
                return Some(Parting { socket: path.socket, epoch: path.epoch, token });
            }
        }
        path.say_goodbye(status, "", &core.arena, |d| core.returned.extend(d.block));
        self.retire(core, path);
        None
    }

    /// Gives back the memory of every slot that isn't at storage.
    fn release(&mut self, core: &mut Core) {
        for n in 0..self.work.len() {
            if self.work[n].stage == Stage::Idle {
                self.free_slot(core, Slot(n as u16));
            }
        }
    }

    /// Gives back what a lane without any command holds.
    pub(super) fn dissolve(mut self, core: &mut Core) {
        for n in 0..self.work.len() {
            self.free_slot(core, Slot(n as u16));
        }
        if let Some(capsules) = self.capsules.take() {
            core.give_back_capsules(capsules);
        }
        core.window_free += self.window;
        // Another lane gets this one's place, and has commands of the same numbers.
        core.delayed.retain(|delayed| delayed.1 != self.index);
    }
}

/// Notes when a command arrived; a stale one may name any slot.
fn note_arrival(work: &mut [Work], slot: Slot, now_us: u64) {
    if let Some(work) = work.get_mut(slot.index()) {
        work.arrived_us = now_us;
    }
}

/// A small payload, whole in the staging buffer: copied to where storage wants it, and checked there.
fn take_small(
    core: &mut Core,
    queue: &mut Queue,
    piece: Option<Piece>,
    slot: Slot,
    sequence: Sequence,
    payload: &[u8],
) -> Next {
    let Some(piece) = piece else { return Next::Nothing };
    let buffer = core.arena.bytes_mut(piece);
    buffer.copy_from_slice(payload);
    let crc = crc32c(buffer);
    after_payload(core, queue, slot, sequence, crc)
}

/// A payload is whole.
fn after_payload(core: &mut Core, queue: &mut Queue, slot: Slot, sequence: Sequence, crc: u32) -> Next {
    match queue.payload_arrived(slot, sequence, crc) {
        Step::Ready => Next::Proceed(slot, sequence),
        Step::Refuse(reply) => {
            core.metrics.payload_crc_errors.inc();
            Next::Answer(reply)
        }
        Step::Stale => Next::Nothing,
    }
}

fn wrong_direction() -> End {
    Violation { status: Status::UNEXPECTED_FRAME, detail: "a frame that only a target sends" }.into()
}

fn overrun() -> Violation {
    Violation { status: Status::CREDIT_OVERRUN, detail: "more replies under way than slots" }
}

fn too_long() -> End {
    Violation { status: Status::MALFORMED, detail: "a payload longer than the largest transfer" }.into()
}

/// Closes the socket of a path that has ended and that the ring has let go of.
fn hang_up(core: &mut Core, path: Path) {
    match path.said_goodbye {
        true => core.farewell(path.socket),
        false => abort(path.socket),
    }
}
