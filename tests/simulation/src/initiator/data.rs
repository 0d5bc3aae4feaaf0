//! Commands out, replies in.

use twinrail_protocol::canary::{Canary, broken};
use twinrail_protocol::initiator::{Completion, Incoming, Queue};
use twinrail_protocol::wire::{Frame, Payload, Reply};
use twinrail_protocol::{Slot, Status, Violation, crc32c};

use super::Initiator;
use super::caller::Out;
use crate::channel::Item;
use crate::ground::Ground;
use crate::history::{Place, Table, What};
use crate::note;

/// A command that has ended; its caller hears of it when its buffer is free (I3).
#[derive(Clone, Copy, Debug)]
pub(super) struct Finishing {
    token: u32,
    status: Status,
}

impl Initiator {
    /// Gives slots to what waits: first what a lost session left over.
    pub(super) fn submit_held(&mut self, ground: &mut Ground, lane: usize) {
        loop {
            let own = &mut self.lanes[lane];
            let Some(queue) = own.queue.as_mut().filter(|queue| queue.has_room()) else { return };
            let operation = match own.replays.pop_front() {
                Some(operation) => operation,
                None => match own.held.pop_front() {
                    Some(token) => self.caller.operation(token),
                    None => return,
                },
            };
            let token = operation.token as u32;
            let Some(slot) = queue.submit(&operation) else { return };
            self.assigned(ground, lane, slot, token);
        }
    }

    /// The command has a place in the slot table, or another one.
    fn assigned(&mut self, ground: &mut Ground, lane: usize, slot: Slot, token: u32) {
        let Some(queue) = &self.lanes[lane].queue else { return };
        let Some((command, _)) = queue.in_flight().find(|(command, _)| command.slot == slot) else { return };
        let place = Place { table: Table(queue.instance().0), slot: slot.0, sequence: command.sequence.0 };
        let command = self.caller.command(token);
        ground.record(What::Assigned { command, place });
    }

    /// Replies of older paths that are looked at only now: the core drops them.
    pub(super) fn take_late(&mut self, ground: &mut Ground, lane: usize) -> Result<(), Violation> {
        while let Some((instance, reply)) = self.lanes[lane].late.pop() {
            let Some(queue) = self.lanes[lane].queue.as_mut().filter(|queue| queue.instance() == instance) else {
                continue;
            };
            let place = Place { table: Table(instance.0), slot: reply.slot.0, sequence: reply.sequence.0 };
            let (epoch, queue_epoch) = (reply.epoch.0, queue.epoch().0);
            let incoming = queue.receive(&reply);
            if incoming != Ok(Incoming::Stale) {
                ground.record(What::ReplyTaken { place, epoch, queue_epoch });
            }
            if let Incoming::Complete(completion) = incoming? {
                self.complete(ground, lane, &completion);
            }
        }
        Ok(())
    }

    fn token_of(queue: &Queue, slot: Slot) -> Option<u32> {
        queue.in_flight().find(|(command, _)| command.slot == slot).map(|(_, token)| token as u32)
    }

    /// Sends what is due.
    pub(super) fn pump(&mut self, ground: &mut Ground, lane: usize) {
        let now = ground.now();
        let own = &mut self.lanes[lane];
        let Some(queue) = &mut own.queue else { return };
        let Some(path) = own.paths.iter_mut().find(|path| path.is_active() && path.epoch() == queue.epoch()) else {
            return;
        };
        let mut sent = false;
        while let Some(outgoing) = queue.next_frame() {
            let payload = outgoing.payload_of.and_then(|slot| {
                let token = Self::token_of(queue, slot)?;
                self.caller.out(token).and_then(|out| out.buffer)
            });
            path.channel.data(ground, &outgoing.frame, payload);
            sent = true;
        }
        if sent {
            own.rails.submitted(now);
        }
    }

    /// What arrived on a path that serves.
    pub(super) fn carry(&mut self, ground: &mut Ground, lane: usize, at: usize, item: Item) -> Result<(), Violation> {
        let now = ground.now();
        let own = &mut self.lanes[lane];
        let path = &mut own.paths[at];
        let (id, active) = (path.id, path.is_active());
        let later = self.looks_later == Some(path.channel.id);
        if path.altered {
            return Ok(());
        }
        let Some(queue) = own.queue.as_mut().filter(|_| active) else {
            return Err(Violation::from(twinrail_protocol::wire::Fault::UnexpectedKind(0)));
        };
        match item {
            Item::Frame(Frame::Reply(reply)) if later && reply.payload.length == 0 => {
                own.late.push((queue.instance(), reply));
            }
            Item::Frame(Frame::Reply(reply)) => {
                let inline = std::mem::take(&mut path.channel.payload);
                let done = self.take_reply(ground, lane, &reply, &inline);
                if let Some(path) = self.lanes[lane].paths.get_mut(at) {
                    path.channel.payload = inline;
                }
                done?;
            }
            Item::Large(Frame::Reply(reply)) => match queue.receive(&reply)? {
                Incoming::Receive { slot, length } => {
                    let buffer = Self::token_of(queue, slot).and_then(|token| self.caller.out(token)?.buffer);
                    match buffer {
                        Some(lent) => {
                            path.placing = Some(slot);
                            path.channel.place(ground, lent, length as usize);
                        }
                        None => path.channel.skip(),
                    }
                }
                _ => path.channel.skip(),
            },
            Item::Placed => {
                if let Some(slot) = path.placing.take() {
                    let length = queue.in_flight().find(|(command, _)| command.slot == slot).map(|(c, _)| c.length);
                    self.payload_is_whole(ground, lane, slot, length.unwrap_or(0) as usize);
                }
            }
            Item::Frame(Frame::Fetch(fetch)) => queue.fetch(&fetch)?,
            _ => return Err(Violation::from(twinrail_protocol::wire::Fault::UnexpectedKind(0))),
        }
        let own = &mut self.lanes[lane];
        let in_flight = own.queue.as_ref().is_some_and(|queue| queue.outstanding() > 0);
        own.rails.progress(id, in_flight, now);
        self.acknowledge_credits(ground, lane);
        Ok(())
    }

    /// A reply, with the payload that came in it.
    pub(super) fn take_reply(
        &mut self,
        ground: &mut Ground,
        lane: usize,
        reply: &Reply,
        inline: &[u8],
    ) -> Result<(), Violation> {
        let Some(queue) = &mut self.lanes[lane].queue else { return Ok(()) };
        match queue.receive(reply)? {
            Incoming::Receive { slot, length } => {
                let buffer = Self::token_of(queue, slot).and_then(|token| self.caller.out(token)?.buffer);
                // Else the target has put it there already.
                if let (Some(lent), false) = (buffer, inline.is_empty()) {
                    let length = inline.len().min(length as usize);
                    ground.memory.bytes_mut(lent)[..length].copy_from_slice(&inline[..length]);
                }
                self.payload_is_whole(ground, lane, slot, length as usize);
            }
            Incoming::Complete(completion) => self.complete(ground, lane, &completion),
            Incoming::Resubmit { slot } => self.resubmit(ground, lane, slot),
            Incoming::Stale => note!(ground, self.process(), "stale reply"),
        }
        Ok(())
    }

    /// The payload of a reply is in the caller's buffer.
    fn payload_is_whole(&mut self, ground: &mut Ground, lane: usize, slot: Slot, length: usize) {
        let Some(queue) = &mut self.lanes[lane].queue else { return };
        let Some(token) = Self::token_of(queue, slot) else { return };
        let Some(lent) = self.caller.out(token).and_then(|out| out.buffer) else { return };
        let bytes = ground.memory.bytes(lent);
        let crc = crc32c(&bytes[..length.min(bytes.len())]);
        match queue.payload_arrived(slot, crc) {
            Some(completion) => self.complete(ground, lane, &completion),
            // It was damaged, and is asked for again.
            None => self.assigned(ground, lane, slot, token),
        }
    }

    /// The target found a payload damaged.
    pub(super) fn resubmit(&mut self, ground: &mut Ground, lane: usize, slot: Slot) {
        let Some(queue) = &mut self.lanes[lane].queue else { return };
        let Some(token) = Self::token_of(queue, slot) else { return };
        let Some(Out { buffer: Some(lent), payload, .. }) = self.caller.out(token).copied() else { return };
        let crc = crc32c(&ground.memory.bytes(lent)[..payload as usize]);
        queue.resubmit(slot, Payload { length: payload, crc });
        self.assigned(ground, lane, slot, token);
    }

    /// A command has ended.
    pub(super) fn complete(&mut self, ground: &mut Ground, lane: usize, completion: &Completion) {
        let token = completion.token as u32;
        let Some(Out { opcode, flags, mark, buffer, .. }) = self.caller.out(token).copied() else { return };
        let status = self.durability.ended(opcode, flags, completion.status, mark);
        note!(ground, self.process(), "{opcode} {token} ended: {status}");
        let pinned = buffer.is_some_and(|lent| self.is_pinned(lent));
        if pinned && !broken(Canary::BufferBackEarly) {
            self.lanes[lane].finishing.push(Finishing { token, status });
            return;
        }
        self.end(ground, token, status);
    }

    /// Callers hear of what has ended, if no device has its buffer any more.
    pub(super) fn finish_what_is_free(&mut self, ground: &mut Ground) {
        for lane in 0..self.lanes.len() {
            let mut at = 0;
            while at < self.lanes[lane].finishing.len() {
                let Finishing { token, status } = self.lanes[lane].finishing[at];
                let buffer = self.caller.out(token).and_then(|out| out.buffer);
                if buffer.is_some_and(|lent| self.is_pinned(lent)) {
                    at += 1;
                    continue;
                }
                self.lanes[lane].finishing.swap_remove(at);
                self.end(ground, token, status);
            }
        }
        for lent in std::mem::take(&mut self.limbo) {
            self.release(ground, lent);
        }
    }
}
