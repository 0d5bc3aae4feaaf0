//! Commands, payloads and replies on a path.

use twinrail_protocol::canary::{Canary, broken};
use twinrail_protocol::target::{Intake, Step};
use twinrail_protocol::wire::{Command, Control, ControlKind, EventCode, Frame, Rail, Reply, Transfer};
use twinrail_protocol::{Epoch, Flags, Status, Violation, crc32c};

use super::storage::Key;
use super::{Phase, Target, ms};
use crate::channel::Item;
use crate::ground::Ground;
use crate::history::{Place, Session as SessionNumber, Side, Table, What};
use crate::memory::Lent;
use crate::note;
use crate::rails::ConnectionId;

/// A command that had arrived on a path when another took over.
#[derive(Debug)]
pub(super) struct Late {
    command: Command,
    pub(super) payload: Option<Lent>,
}

impl Target {
    /// What arrived on a path.
    pub(super) fn carry(&mut self, ground: &mut Ground, id: ConnectionId, item: Item) {
        let Some(connection) = self.connection(id) else { return };
        let Phase::Active { session, queue, .. } = connection.phase else {
            return match item {
                Item::Frame(_) | Item::Large(_) => {
                    ground.record(What::Accused { by: Side::Target, status: Status::UNEXPECTED_FRAME.0 });
                    self.lose(ground, id, Status::UNEXPECTED_FRAME);
                }
                _ => self.sweep_limbo(ground),
            };
        };
        let done = match item {
            Item::Frame(Frame::Command(command)) => self.command(ground, id, session, queue, &command, false),
            Item::Large(Frame::Command(command)) => self.command(ground, id, session, queue, &command, true),
            Item::Frame(Frame::Data(data)) => self.payload_comes(ground, id, session, queue, &data, false),
            Item::Large(Frame::Data(data)) => self.payload_comes(ground, id, session, queue, &data, true),
            Item::Placed => {
                let placing = self.connection(id).and_then(|connection| connection.placing.take());
                if let Some((key, lent)) = placing {
                    self.payload_is_whole(ground, key, lent);
                }
                Ok(())
            }
            Item::Fetched(lent) => {
                if let Some(key) = self.fetched(session, queue, lent) {
                    self.payload_is_whole(ground, key, lent);
                }
                self.sweep_limbo(ground);
                Ok(())
            }
            Item::Sent(_) | Item::Delivered(_) | Item::Acknowledged => {
                self.sweep_limbo(ground);
                self.fetch_more(ground);
                Ok(())
            }
            _ => Err(Violation::from(twinrail_protocol::wire::Fault::UnexpectedKind(0))),
        };
        if let Err(violation) = done {
            note!(ground, "target", "{id}: {violation}");
            ground.record(What::Accused { by: Side::Target, status: violation.status.0 });
            self.lose(ground, id, violation.status);
        }
    }

    /// A command arrived; its payload, if it follows, is in the channel or is `large` and still to come.
    fn command(
        &mut self,
        ground: &mut Ground,
        id: ConnectionId,
        session: SessionNumber,
        queue: u16,
        command: &Command,
        large: bool,
    ) -> Result<(), Violation> {
        let intake = self.intake(ground, session, queue, command);
        let Some(connection) = self.connection(id) else { return Ok(()) };
        if large && intake != Ok(Intake::Receive) {
            connection.channel.skip();
        }
        let now_ms = ms(ground.now());
        connection.liveness.heard(now_ms);
        let key = Key { session, queue, slot: command.slot, sequence: command.sequence };
        match intake? {
            Intake::Ready => self.park(ground, key),
            Intake::Running | Intake::Stale => {}
            Intake::Reply(reply) => self.reply(ground, session, queue, &reply, None),
            Intake::Fetch => {
                self.wants_buffer.push_back(key);
                self.fetch_more(ground);
            }
            Intake::Receive => self.receive(ground, id, key, command.payload.length as usize, large),
        }
        Ok(())
    }

    fn intake(
        &mut self,
        ground: &mut Ground,
        session: SessionNumber,
        queue: u16,
        command: &Command,
    ) -> Result<Intake, Violation> {
        let Some(core) = self.lane(session, queue).and_then(|lane| lane.core.as_mut()) else {
            return Ok(Intake::Stale);
        };
        let table = Table(core.instance().0);
        let place = Place { table, slot: command.slot.0, sequence: command.sequence.0 };
        let queue_epoch = core.epoch().0;
        let intake = core.receive(command);
        let taken = intake != Ok(Intake::Stale);
        ground.record(What::CommandArrived { place, epoch: command.epoch.0, queue_epoch, taken });
        if taken && intake.is_ok() {
            ground.record(What::GrantNamed { table, number: command.grant_seen.0 });
        }
        note!(ground, "target", "{} {}.{}.{}: {intake:?}", command.opcode, queue, command.slot, command.sequence);
        intake
    }

    /// Puts a payload that follows into a buffer.
    fn receive(&mut self, ground: &mut Ground, id: ConnectionId, key: Key, length: usize, large: bool) {
        let lent = self.buffer_of(ground, key, length);
        let Some(connection) = self.connection(id) else { return };
        if large {
            connection.placing = Some((key, lent));
            return connection.channel.place(ground, lent, length);
        }
        ground.memory.bytes_mut(lent)[..length].copy_from_slice(connection.channel.payload());
        self.payload_is_whole(ground, key, lent);
    }

    /// The buffer that goes with a command.
    fn buffer_of(&mut self, ground: &mut Ground, key: Key, length: usize) -> Lent {
        let lent = self.lend(ground, length);
        let old =
            self.lane(key.session, key.queue).and_then(|lane| lane.buffers.get_mut(key.slot.index())?.replace(lent));
        if let Some(old) = old {
            self.release(ground, old);
        }
        lent
    }

    /// A payload that was asked for.
    fn payload_comes(
        &mut self,
        ground: &mut Ground,
        id: ConnectionId,
        session: SessionNumber,
        queue: u16,
        data: &Transfer,
        large: bool,
    ) -> Result<(), Violation> {
        let now_ms = ms(ground.now());
        let core = self.lane(session, queue).and_then(|lane| lane.core.as_mut());
        let intake = core.map_or(Ok(Intake::Stale), |core| core.receive_data(data));
        let Some(connection) = self.connection(id) else { return Ok(()) };
        connection.liveness.answered(now_ms);
        if large && intake != Ok(Intake::Receive) {
            connection.channel.skip();
        }
        if intake? == Intake::Receive {
            let key = Key { session, queue, slot: data.slot, sequence: data.sequence };
            // The buffer was taken when it was asked for.
            let lent = self.lane(session, queue).and_then(|lane| *lane.buffers.get(key.slot.index())?);
            let Some(lent) = lent else { return Ok(()) };
            let length = data.payload.length as usize;
            let Some(connection) = self.connection(id) else { return Ok(()) };
            if large {
                connection.placing = Some((key, lent));
                connection.channel.place(ground, lent, length);
            } else {
                ground.memory.bytes_mut(lent)[..length].copy_from_slice(connection.channel.payload());
                self.payload_is_whole(ground, key, lent);
            }
        }
        Ok(())
    }

    /// The command that this buffer was fetched for.
    fn fetched(&mut self, session: SessionNumber, queue: u16, lent: Lent) -> Option<Key> {
        let lane = self.lane(session, queue)?;
        let slot = twinrail_protocol::Slot(lane.buffers.iter().position(|other| *other == Some(lent))? as u16);
        let sequence = lane.core.as_ref()?.sequence(slot)?;
        Some(Key { session, queue, slot, sequence })
    }

    /// A payload is whole in a private buffer (I7).
    fn payload_is_whole(&mut self, ground: &mut Ground, key: Key, lent: Lent) {
        let Some(core) = self.lane(key.session, key.queue).and_then(|lane| lane.core.as_mut()) else { return };
        let Some(command) = core.command(key.slot, key.sequence) else { return };
        let length = command.payload.length as usize;
        let crc = crc32c(&ground.memory.bytes(lent)[..length]);
        let crc = if broken(Canary::CrcUnchecked) { command.payload.crc } else { crc };
        match core.payload_arrived(key.slot, key.sequence, crc) {
            Step::Ready => self.park(ground, key),
            Step::Refuse(reply) => {
                self.free_buffer(ground, key);
                self.reply(ground, key.session, key.queue, &reply, None);
            }
            Step::Stale => {}
        }
    }

    /// The command of a slot needs its buffer no more.
    pub(super) fn free_buffer(&mut self, ground: &mut Ground, key: Key) {
        let lent = self.lane(key.session, key.queue).and_then(|lane| lane.buffers.get_mut(key.slot.index())?.take());
        if let Some(lent) = lent {
            self.release(ground, lent);
        }
    }

    /// Asks for payloads, as far as there are buffers.
    pub(super) fn fetch_more(&mut self, ground: &mut Ground) {
        while let Some(key) = self.wants_buffer.pop_front() {
            if self.buffers >= self.most_buffers(ground) / 2 {
                self.wants_buffer.push_front(key);
                return;
            }
            let Some(lane) = self.lane(key.session, key.queue) else { continue };
            let (Some(core), Some(path)) = (&mut lane.core, lane.path) else { continue };
            let Some(fetch) = core.fetch(key.slot, key.sequence) else { continue };
            let placement = core.command(key.slot, key.sequence).map(|command| command.placement);
            let length = fetch.payload.length;
            let lent = self.buffer_of(ground, key, length as usize);
            let Some(connection) = self.connection(path) else { continue };
            match (connection.channel.rail, placement) {
                (Rail::RDMA, Some(from)) => connection.channel.read_remote(ground, from, lent, length),
                _ => connection.channel.data(ground, &Frame::Fetch(fetch), None),
            }
        }
    }

    /// Sends a reply on the queue's path, if there is one. `payload` is what it brings.
    pub(super) fn reply(
        &mut self,
        ground: &mut Ground,
        session: SessionNumber,
        queue: u16,
        reply: &Reply,
        payload: Option<Lent>,
    ) {
        let Some(lane) = self.lane(session, queue) else { return };
        let (Some(core), Some(path)) = (&mut lane.core, lane.path) else { return };
        let (in_capsule, table) = (core.options().in_capsule, Table(core.instance().0));
        let placement = core.command(reply.slot, reply.sequence).map(|command| command.placement).unwrap_or_default();
        let Some(connection) = self.connection(path) else { return };
        if connection.channel.fenced {
            return;
        }
        let mut reply = *reply;
        if let Some(lent) = payload {
            if connection.channel.rail == Rail::TCP || reply.payload.length <= in_capsule {
                reply.flags = reply.flags.with(Flags::PAYLOAD_FOLLOWS);
            } else {
                connection.channel.write_remote(ground, placement, lent, reply.payload.length);
            }
        }
        connection.channel.data(ground, &Frame::Reply(reply), payload);
        let (number, slots) = (reply.credits.number.0, reply.credits.granted_slots);
        ground.record(What::GrantSaid { table, number, slots });
        note!(ground, "target", "reply {queue}.{}.{} {} on {path}", reply.slot, reply.sequence, reply.status);
    }

    /// A control frame, on a path or a standby.
    pub(super) fn control(&mut self, ground: &mut Ground, id: ConnectionId, control: &Control) {
        let now_ms = ms(ground.now());
        let Some(connection) = self.connection(id) else { return };
        let phase = connection.phase;
        let mut done = Ok(());
        if control.kind.is_request() {
            done = connection.control.request_came(connection.channel.answers_waiting());
        } else if control.kind.is_answer() {
            connection.liveness.answered(now_ms);
            done = connection.control.answer_came();
        }
        match (control.kind, phase) {
            (_, Phase::New | Phase::Welcomed | Phase::Attaching(_)) => {
                done = done.and(Err(Violation::from(twinrail_protocol::wire::Fault::UnexpectedKind(0))));
            }
            (ControlKind::Probe, _) => {
                let reply = Control::new(ControlKind::ProbeReply, control.epoch, control.token);
                connection.control.answer();
                connection.channel.control(ground, reply);
            }
            (ControlKind::EventSeen, Phase::Active { session, queue, .. }) if control.code == EventCode::CREDIT => {
                if let Some(core) = self.lane(session, queue).and_then(|lane| lane.core.as_mut())
                    && control.epoch == core.epoch()
                {
                    let table = Table(core.instance().0);
                    ground.record(What::GrantNamed { table, number: control.credits.number.0 });
                    done = done.and(core.grant().seen(control.credits.number));
                }
            }
            (ControlKind::Close, _) => {
                let asked = connection.asked.get_or_insert_default();
                asked.close = Some(control.token);
                let session = connection.joined;
                if let (Some(session), Some(holdings)) = (session, &mut self.holdings) {
                    holdings.close(session);
                }
            }
            (ControlKind::Disconnect, _) => return self.lose(ground, id, Status::CONNECTION_LOST),
            (ControlKind::PathLost, Phase::Standby { session, queue }) => {
                let path = self.lane(session, queue).and_then(|lane| {
                    lane.path.filter(|_| lane.core.as_ref().is_some_and(|core| core.epoch() == control.epoch))
                });
                if let Some(path) = path {
                    self.lose(ground, path, Status::CONNECTION_LOST);
                }
            }
            _ => {}
        }
        if let Err(violation) = done {
            note!(ground, "target", "{id}: {violation}");
            ground.record(What::Accused { by: Side::Target, status: violation.status.0 });
            self.lose(ground, id, violation.status);
        }
    }

    /// States another grant.
    pub(super) fn grant_queue(&mut self, ground: &mut Ground, session: SessionNumber, queue: u16, slots: u16) {
        let Some(lane) = self.lane(session, queue) else { return };
        let (Some(core), Some(path)) = (&mut lane.core, lane.path) else { return };
        let slots = slots.min(core.options().depth);
        let before = core.grant().said();
        if !core.grant().change(slots) {
            return;
        }
        let (credits, epoch, table) = (core.grant().said(), core.epoch(), Table(core.instance().0));
        if credits == before {
            return;
        }
        note!(ground, "target", "grants {slots} slots to session {} queue {queue}", session.0);
        ground.record(What::GrantSaid { table, number: credits.number.0, slots });
        if let Some(connection) = self.connection(path)
            && connection.control.ask()
        {
            let event = Control::new(ControlKind::Event, epoch, u64::from(credits.number.0));
            connection.channel.control(ground, Control { code: EventCode::CREDIT, credits, ..event });
        }
    }

    /// What came on a path before its fence, and wasn't looked at: the next path's takeover judges it.
    pub(super) fn keep_late(&mut self, ground: &mut Ground, id: ConnectionId, session: SessionNumber, queue: u16) {
        loop {
            let Some(connection) = self.connection(id) else { return };
            match connection.channel.next(ground) {
                Item::Frame(Frame::Command(command)) => {
                    let length = connection.channel.payload().len();
                    let payload = (length > 0).then(|| self.lend(ground, length));
                    let Some(connection) = self.connection(id) else { return };
                    if let Some(lent) = payload {
                        ground.memory.bytes_mut(lent).copy_from_slice(connection.channel.payload());
                    }
                    match self.lane(session, queue) {
                        Some(lane) => lane.late.push(Late { command, payload }),
                        None => return,
                    }
                }
                Item::Frame(_) | Item::Sent(_) | Item::Fetched(_) | Item::Delivered(_) => {}
                _ => return,
            }
        }
    }

    /// It was sent under an older epoch: the core says so (I2).
    pub(super) fn take_late(&mut self, ground: &mut Ground, session: SessionNumber, queue: u16, late: Late) {
        let Late { command, payload } = late;
        let key = Key { session, queue, slot: command.slot, sequence: command.sequence };
        match (self.intake(ground, session, queue, &command), payload) {
            (Ok(Intake::Receive), Some(lent)) => {
                if let Some(slot) = self.lane(session, queue).and_then(|lane| lane.buffers.get_mut(key.slot.index())) {
                    let old = slot.replace(lent);
                    if let Some(old) = old {
                        self.release(ground, old);
                    }
                }
                return self.payload_is_whole(ground, key, lent);
            }
            (Ok(Intake::Ready), _) => self.park(ground, key),
            (Ok(Intake::Reply(reply)), _) => self.reply(ground, session, queue, &reply, None),
            _ => {}
        }
        if let Some(lent) = payload {
            self.release(ground, lent);
        }
    }

    /// Whether an epoch is the queue's.
    #[must_use]
    pub fn epoch_of(&self, session: SessionNumber, queue: u16) -> Option<Epoch> {
        let session = self.sessions.iter().find(|s| s.number == session)?;
        Some(session.lanes.get(usize::from(queue))?.core.as_ref()?.epoch())
    }
}
