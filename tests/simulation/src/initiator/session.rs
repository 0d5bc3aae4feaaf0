//! The session: attach, loss, giving up, closing.

use twinrail_protocol::Epoch;
use twinrail_protocol::initiator::replay::{Retired, Rules};
use twinrail_protocol::initiator::session::Begun;
pub(super) use twinrail_protocol::initiator::session::Next;
use twinrail_protocol::wire::{Attached, Control, ControlKind, Handshake, Rail};

use super::paths::Phase;
use super::{Initiator, State};
use crate::clock::Time;
use crate::ground::Ground;
use crate::history::What;
use crate::note;

impl Initiator {
    /// Sends ATTACH when that is due: the session isn't attached, and nothing of a former one is left.
    pub(super) fn send_attach(&mut self, ground: &mut Ground) {
        if self.session.is_attached() || self.state != State::Open || ground.now() < self.attach_not_before {
            return;
        }
        let fenced = |path: &super::Path| !matches!(path.phase, Phase::Active(_) | Phase::Activating(_));
        if !self.lanes.iter().all(|lane| lane.paths.iter().all(fenced)) {
            return;
        }
        let asks = |path: &&mut super::Path| path.phase == Phase::Welcomed && !path.channel.fenced;
        let Some(first) = self.lanes.first_mut() else { return };
        if first.paths.iter().any(|path| path.phase == Phase::Attaching && !path.channel.fenced) {
            return;
        }
        let Some(path) = first.paths.iter_mut().find(asks) else { return };
        let queues = ground.plan.initiators[usize::from(self.planned)].queues;
        path.phase = Phase::Attaching;
        let attach = self.session.attach(queues, "volume");
        note!(ground, self.process(), "asks to attach, generation {}", attach.generation);
        let Some(path) = self.lanes[0].paths.iter_mut().find(|path| path.phase == Phase::Attaching) else { return };
        path.channel.handshake(ground, &Handshake::Attach(attach));
    }

    /// The session is there.
    pub(super) fn attached(&mut self, ground: &mut Ground, lane: usize, at: usize, attached: &Attached<'_>) {
        let now = ground.now();
        let path = &mut self.lanes[lane].paths[at];
        path.phase = Phase::Ready;
        let (id, boot_id) = (path.id, path.boot_id);
        let begun = match self.session.attached(attached, boot_id, &self.durability) {
            Ok(begun) => begun,
            Err(status) => return self.follow(ground, Next::GiveUp(status)),
        };
        self.volume = attached.volume;
        // What was before is no secret any more.
        self.secrets.drain(..self.secrets.len() - 1);
        self.takeover = None;
        note!(ground, self.process(), "attached: {begun:?}");
        if let Begun::Again(rules) = begun {
            for at in 0..self.lanes.len() {
                // Another thread may own the queue, and hear of it later.
                match at != lane && self.random.chance(250) {
                    true => {
                        // It goes by all that happened since.
                        let alone = self.lanes[at].unheard.is_none_or(|before| before.alone) && rules.alone;
                        self.lanes[at].unheard = Some(Rules { alone, ..rules });
                    }
                    false => self.renew(ground, at, rules),
                }
            }
        }
        while self.lanes.len() < usize::from(attached.queues) {
            self.add_lane(ground);
        }
        let rdma = ground.plan.has_rail(self.planned, Rail::RDMA);
        for lane in &mut self.lanes {
            lane.rails.offer(Rail::RDMA, rdma, now);
        }
        self.lanes[lane].rails.dialed(id, Epoch(0), now);
        // Others waited for the session.
        for lane in 0..self.lanes.len() {
            for at in 0..self.lanes[lane].paths.len() {
                let path = &self.lanes[lane].paths[at];
                if path.phase == Phase::Welcomed && !path.channel.fenced {
                    self.stand_by(ground, lane, at);
                }
            }
        }
    }

    /// A queue hears that the session was attached again, if it hasn't.
    pub(super) fn hear(&mut self, ground: &mut Ground, lane: usize) -> bool {
        match self.lanes[lane].unheard.take() {
            Some(rules) => {
                self.renew(ground, lane, rules);
                true
            }
            None => false,
        }
    }

    /// The slot table of a queue is lost: its commands go by the rules.
    fn renew(&mut self, ground: &mut Ground, lane: usize, rules: Rules) {
        self.lanes[lane].unheard = None;
        let Some(mut queue) = self.lanes[lane].queue.take() else { return };
        let (mut ended, mut replayed) = (Vec::new(), Vec::new());
        let replays = &mut self.lanes[lane].replays;
        queue.retire(
            |orphan| rules.fate(orphan),
            |_, retired| match retired {
                Retired::Replay(operation) => {
                    replays.push_back(operation);
                    replayed.push(operation.token as u32);
                }
                Retired::Ended(completion) => ended.push(completion),
            },
        );
        replayed.into_iter().for_each(|token| self.caller.was_replayed(token));
        for completion in ended {
            self.complete(ground, lane, &completion);
        }
    }

    /// What the session says is next.
    pub(super) fn follow(&mut self, ground: &mut Ground, next: Next) {
        match next {
            Next::Attach { retry_after_ms } => {
                self.attach_not_before = ground.now() + u64::from(retry_after_ms) * 1000;
                match self.state {
                    State::Open if !self.session.is_attached() => self.lost(ground),
                    // Nobody wants it back.
                    State::Closing { .. } => self.closed(ground),
                    _ => {}
                }
            }
            Next::GiveUp(status) => {
                if matches!(self.state, State::GivingUp(_) | State::Done) {
                    return;
                }
                note!(ground, self.process(), "gives up: {status}");
                self.state = State::GivingUp(status);
                for lane in 0..self.lanes.len() {
                    for at in 0..self.lanes[lane].paths.len() {
                        self.hang_up(ground, lane, at, status);
                    }
                }
            }
        }
    }

    /// Every path belongs to a session that is no more.
    fn lost(&mut self, ground: &mut Ground) {
        let now = ground.now();
        for lane in 0..self.lanes.len() {
            let stands = |path: &super::Path| {
                matches!(path.phase, Phase::Ready | Phase::AsksToStand | Phase::Activating(_) | Phase::Active(_))
            };
            if self.lanes[lane].paths.iter().any(stands) || self.lanes[lane].queue.as_ref().is_some() {
                self.lanes[lane].rails.session_lost(now);
            }
            for at in 0..self.lanes[lane].paths.len() {
                let path = &self.lanes[lane].paths[at];
                if path.phase == Phase::AsksToStand && !path.channel.fenced {
                    self.lose(ground, lane, at, twinrail_protocol::initiator::rails::Cause::SessionLost);
                }
            }
        }
    }

    /// When all is drained, everything ends with the status.
    pub(super) fn give_up_when_drained(&mut self, ground: &mut Ground) {
        let State::GivingUp(status) = self.state else { return };
        if self.lanes.iter().any(|lane| !lane.paths.is_empty()) {
            return;
        }
        self.state = State::Done;
        for lane in 0..self.lanes.len() {
            let mut ended = Vec::new();
            if let Some(mut queue) = self.lanes[lane].queue.take() {
                queue.abandon(status, |completion| ended.push(completion));
            }
            for completion in ended {
                self.complete(ground, lane, &completion);
            }
            while let Some(operation) = self.lanes[lane].replays.pop_front() {
                self.end(ground, operation.token as u32, status);
            }
            while let Some(token) = self.lanes[lane].held.pop_front() {
                self.end(ground, token, status);
            }
        }
        self.finish_what_is_free(ground);
        self.record_closed(ground);
    }

    /// Asks for the end of the session when the caller has had all it wanted.
    pub(super) fn close_when_done(&mut self, ground: &mut Ground) {
        if self.state == State::Open && self.caller.wants_to_close() {
            self.state = State::Closing { asked: false };
        }
        let serves = self.lanes.first().is_some_and(|lane| lane.paths.iter().any(super::Path::is_active));
        if self.state == (State::Closing { asked: true }) && !serves {
            // The lease does the rest.
            return self.closed(ground);
        }
        if self.state != (State::Closing { asked: false }) || !self.session.is_attached() {
            return;
        }
        let Some(path) = self.lanes.first_mut().and_then(|lane| lane.paths.iter_mut().find(|path| path.is_active()))
        else {
            return;
        };
        if path.ask() {
            let close = Control::new(ControlKind::Close, path.epoch(), 1);
            path.channel.control(ground, close);
            self.state = State::Closing { asked: true };
            self.record_closed(ground);
        }
    }

    /// The caller wants to stop, within the time that the session's settings allow.
    pub fn stop(&mut self, now: Time) {
        if self.state == State::Open {
            self.session.stop(now);
            self.caller.close_soon();
        }
    }

    pub(super) fn record_closed(&mut self, ground: &mut Ground) {
        if !std::mem::replace(&mut self.told_closed, true) {
            ground.record(What::Closed { client: self.client });
        }
    }

    /// The target says that the session has ended.
    pub(super) fn closed(&mut self, ground: &mut Ground) {
        note!(ground, self.process(), "closed");
        self.record_closed(ground);
        self.state = State::Done;
        for lane in 0..self.lanes.len() {
            for at in 0..self.lanes[lane].paths.len() {
                self.hang_up(ground, lane, at, twinrail_protocol::Status::OK);
            }
        }
    }
}
