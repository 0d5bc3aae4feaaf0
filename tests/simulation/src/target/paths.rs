//! From one path of a queue to the next (I2, I3).

use twinrail_protocol::canary::{Canary, broken};
use twinrail_protocol::limits::{CONTROL_CREDIT, HEADER_LEN};
use twinrail_protocol::target::{PathId, Queue, QueueOptions};
use twinrail_protocol::wire::Writer;
use twinrail_protocol::wire::{Activate, Activated, Command, Control, ControlKind, Credits, Handshake, VerdictKind};
use twinrail_protocol::{Epoch, Geometry, GrantNumber, Instance, Slot, Status};

use super::handshake::MAX_TRANSFER;
use super::{Lent, Phase, Target, ms};
use crate::ground::Ground;
use crate::history::{Place, Session as SessionNumber, Side, Table, VerdictGiven, What};
use crate::note;
use crate::rails::ConnectionId;
use crate::stamps::BLOCK;

/// An activation that was accepted and waits for the old path's drain.
#[derive(Debug)]
pub(super) struct Pending {
    connection: ConnectionId,
    /// The path that is being drained.
    old: ConnectionId,
    asked: Asked,
}

/// What an ACTIVATE says.
#[derive(Debug)]
struct Asked {
    epoch: Epoch,
    instance: Instance,
    depth: u16,
    in_capsule: u32,
    report: Vec<Command>,
}

impl Target {
    /// A connection is to be the path of its queue.
    pub(super) fn activate(
        &mut self,
        ground: &mut Ground,
        id: ConnectionId,
        number: SessionNumber,
        activate: &Activate<'_>,
    ) {
        let queue = activate.queue.0;
        let report: Result<Vec<Command>, _> = activate.report().collect();
        let Ok(report) = report else { return self.refuse(ground, id, Status::MALFORMED, 0) };
        let Activate { epoch, instance, depth, in_capsule, .. } = *activate;
        let asked = Asked { epoch, instance, depth, in_capsule, report };
        let Some(lane) = self.lane(number, queue) else { return };
        if let Some(pending) = &lane.pending
            && pending.asked.epoch >= epoch
        {
            return self.refuse(ground, id, Status::STALE_EPOCH, 0);
        }
        match &lane.core {
            // The initiator knows of no table: it never heard of this one, which then was never used.
            Some(core) if instance.0 == 0 => {
                if core.epoch() >= epoch {
                    return self.refuse(ground, id, Status::STALE_EPOCH, 0);
                }
                if core.busy() > 0 {
                    return self.refuse(ground, id, Status::SESSION_LOST, 0);
                }
            }
            Some(core) => {
                if let Err(status) = core.may_activate(epoch, instance) {
                    return self.refuse(ground, id, status, 0);
                }
            }
            None if instance.0 != 0 && !broken(Canary::InstanceIgnored) => {
                return self.refuse(ground, id, Status::SESSION_LOST, 0);
            }
            None => {}
        }
        let superseded = lane.pending.take().map(|pending| (pending.connection, pending.old));
        let old = lane.path.or(superseded.map(|(_, old)| old));
        if let Some((connection, _)) = superseded {
            self.lose(ground, connection, Status::SUPERSEDED);
        }
        let old = old.filter(|old| self.connection(*old).is_some_and(|c| !c.channel.drained));
        let Some(old) = old else { return self.take_over(ground, id, number, queue, asked) };
        let Some(lane) = self.lane(number, queue) else { return };
        lane.pending = Some(Pending { connection: id, old, asked });
        self.keep_late(ground, old, number, queue);
        self.lose(ground, old, Status::SUPERSEDED);
    }

    /// The old path is drained; the new one takes over.
    fn take_over(&mut self, ground: &mut Ground, id: ConnectionId, number: SessionNumber, queue: u16, asked: Asked) {
        let Asked { epoch, instance, depth, in_capsule, report } = asked;
        let plan = &ground.plan;
        let geometry = Geometry {
            size: u64::from(plan.blocks) * BLOCK as u64,
            logical_block: BLOCK as u32,
            physical_block: BLOCK as u32,
            max_transfer: MAX_TRANSFER,
        };
        let depth = depth.clamp(1, 4);
        let options = QueueOptions {
            depth,
            in_capsule: in_capsule.min(plan.in_capsule),
            credits: Credits {
                granted_slots: plan.granted.min(depth),
                // Not far from where the numbers wrap.
                number: GrantNumber(u16::MAX - 3),
                data_window: plan.data_window,
            },
            geometry,
            read_only: self.session(number).is_some_and(|session| session.read_only),
        };
        let Some(lane) = self.lane(number, queue) else { return };
        let stale: Vec<_> = if instance.0 == 0 { lane.buffers.drain(..).flatten().collect() } else { Vec::new() };
        if instance.0 == 0 || lane.core.is_none() {
            let instance = Instance(ground.process_random.next() | 1);
            lane.core = Some(Queue::new(options, instance, epoch));
            lane.buffers.clear();
            lane.buffers.resize(usize::from(depth), None);
        } else if let Some(core) = &mut lane.core {
            core.activate(epoch);
        }
        let Some(core) = &mut lane.core else { return };
        let table = Table(core.instance().0);
        ground.record(What::EpochAccepted { session: number, table, epoch: epoch.0 });
        let mut bytes = [0; 4 * (HEADER_LEN + 4)];
        let mut w = Writer::new(&mut bytes);
        let mut count = 0;
        for command in &report {
            match core.verdict(command) {
                Ok(verdict) => {
                    verdict.encode(&mut w);
                    count += 1;
                    let place = Place { table, slot: command.slot.0, sequence: command.sequence.0 };
                    let said = match verdict.kind {
                        VerdictKind::Unknown => VerdictGiven::Unknown,
                        VerdictKind::Running => VerdictGiven::Running,
                        VerdictKind::Done => match verdict.reply.map(|reply| reply.status) {
                            Some(Status::RETRY_MISMATCH) => VerdictGiven::Mismatch,
                            _ => VerdictGiven::Done,
                        },
                    };
                    ground.record(What::VerdictSaid { place, epoch: epoch.0, verdict: said });
                }
                Err(violation) => {
                    note!(ground, "target", "{id}: {violation}");
                    ground.record(What::Accused { by: Side::Target, status: violation.status.0 });
                    lane.path = None;
                    return self.refuse(ground, id, violation.status, 0);
                }
            }
        }
        let length = w.finish().unwrap_or(0);
        let credits = core.grant().said();
        let (depth, in_capsule) = (core.options().depth, core.options().in_capsule);
        let mut activated = Activated::new(epoch, core.instance());
        (activated.depth, activated.in_capsule, activated.credits) = (depth, in_capsule, credits);
        let activated = activated.with_verdicts(count, &bytes[..length]);
        lane.path = Some(id);
        let (slots, grant) = (credits.granted_slots, credits.number.0);
        ground.record(What::GrantSaid { table, number: grant, slots });
        let late = std::mem::take(&mut lane.late);
        // What wasn't whole is forgotten, and its buffers are free.
        let free = forgotten(&mut lane.buffers, core);
        note!(ground, "target", "session {} queue {queue} has path {id}, epoch {epoch}", number.0);
        if let Some(connection) = self.connection(id) {
            connection.phase = Phase::Active { session: number, queue, epoch };
            connection.channel.handshake(ground, &Handshake::Activated(activated));
            let frames = 4 * usize::from(depth);
            let receives = usize::from(depth) + 2 * usize::from(CONTROL_CREDIT) + 4;
            connection.channel.activate(ground, in_capsule, frames, receives);
        }
        for lent in free.into_iter().chain(stale) {
            self.release(ground, lent);
        }
        for late in late {
            self.take_late(ground, number, queue, late);
        }
    }

    /// A connection is over for the target: by the peer, by silence, or because its session or its place is gone.
    pub(super) fn lose(&mut self, ground: &mut Ground, id: ConnectionId, status: Status) {
        let Some(connection) = self.connection(id) else { return };
        if connection.channel.fenced {
            return;
        }
        let phase = connection.phase;
        note!(ground, "target", "gives up {id}: {status}");
        connection.placing = None;
        if matches!(phase, Phase::Active { .. } | Phase::Standby { .. })
            && !matches!(status, Status::CONNECTION_LOST | Status::TIMEOUT)
        {
            let text = Control { status, ..Control::new(ControlKind::Disconnect, connection.epoch(), 0) };
            connection.channel.control(ground, text);
        }
        connection.channel.fence(ground);
        if let Phase::Attaching(request) = phase
            && let Some(holdings) = &mut self.holdings
        {
            holdings.withdraw(request);
        }
        self.forget_path(ground, id, true);
        if let Phase::Active { session, queue, epoch } = phase
            && !matches!(status, Status::SUPERSEDED)
        {
            self.say_lost(ground, session, queue, epoch);
        }
    }

    /// It doesn't count as a path any more.
    pub(super) fn forget_path(&mut self, ground: &mut Ground, id: ConnectionId, was_one: bool) {
        let now_ms = ms(ground.now());
        let Some(connection) = self.connection(id) else { return };
        let (joined, phase) = (connection.joined.take(), connection.phase);
        if let (Some(session), Some(holdings)) = (joined, &mut self.holdings) {
            let path = PathId(u64::from(id.0));
            match was_one {
                true => holdings.path_lost(session, path, now_ms),
                false => holdings.path_failed(session, path, now_ms),
            }
        }
        if let Phase::Standby { session, queue } | Phase::Active { session, queue, .. } = phase
            && let Some(lane) = self.lane(session, queue)
        {
            lane.path.take_if(|path| *path == id);
            lane.pending.take_if(|pending| pending.connection == id);
        }
    }

    /// Tells the initiator on a standby of the same queue.
    fn say_lost(&mut self, ground: &mut Ground, session: SessionNumber, queue: u16, epoch: Epoch) {
        let standby = |connection: &&mut super::Connection| {
            connection.phase == Phase::Standby { session, queue } && !connection.channel.fenced
        };
        if let Some(connection) = self.connections.iter_mut().find(standby) {
            connection.channel.control(ground, Control::new(ControlKind::PathLost, epoch, 0));
        }
    }

    /// No device touches anything of a connection any more.
    pub(super) fn drained(&mut self, ground: &mut Ground, id: ConnectionId) {
        let Some(at) = self.connections.iter().position(|c| c.channel.id == id) else { return };
        let mut connection = self.connections.swap_remove(at);
        connection.channel.drained();
        ground.close(id, Side::Target);
        self.sweep_limbo(ground);
        let Phase::Active { session, queue, epoch } = connection.phase else { return };
        let Some(lane) = self.lane(session, queue) else { return };
        if lane.pending.as_ref().is_some_and(|pending| pending.old == id)
            && let Some(Pending { connection, asked, .. }) = lane.pending.take()
        {
            return self.take_over(ground, connection, session, queue, asked);
        }
        // Nobody takes over yet. What wasn't whole won't become so.
        let Some(core) = lane.core.as_mut().filter(|core| core.epoch() == epoch && lane.path.is_none()) else {
            return;
        };
        core.path_lost();
        let free = forgotten(&mut lane.buffers, core);
        let late = std::mem::take(&mut lane.late);
        for lent in free.into_iter().chain(late.into_iter().filter_map(|late| late.payload)) {
            self.release(ground, lent);
        }
    }
}

/// Takes the buffers of slots whose commands the core knows nothing of any more.
fn forgotten(buffers: &mut [Option<Lent>], core: &Queue) -> Vec<Lent> {
    let slots = buffers.iter_mut().zip(0..);
    slots.filter(|(_, slot)| !core.is_busy(Slot(*slot))).filter_map(|(lent, _)| lent.take()).collect()
}
