//! Connections of a queue: what the path policy wants done with them, and what comes of it.

use twinrail_protocol::canary::{Canary, broken};
use twinrail_protocol::initiator::rails::{Action, Cause, PathId, Rails, Settings};
use twinrail_protocol::initiator::{Incoming, Queue, QueueOptions};
use twinrail_protocol::limits::{CONTROL_CREDIT, HEADER_LEN};
use twinrail_protocol::wire::{
    Activate, Activated, Control, ControlKind, EventCode, Frame, Handshake, Hello, Payload, Rail, Refused, Standby,
    VERSION,
};
use twinrail_protocol::{BootId, ControlCredit, Epoch, QueueId, Status, Violation, crc32c};

use super::{Initiator, Lane, State};
use crate::channel::{Channel, Item};
use crate::ground::Ground;
use crate::history::{Place, Side, Table, What};
use crate::rails::ConnectionId;
use crate::stamps::BLOCK;
use crate::{names, note};

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The rail connects.
    Dialing,
    /// HELLO was sent.
    Greeting,
    /// WELCOME came: what is next depends on the session.
    Welcomed,
    /// ATTACH was sent.
    Attaching,
    /// STANDBY was sent.
    AsksToStand,
    /// It can be activated.
    Ready,
    /// ACTIVATE was sent.
    Activating(Epoch),
    /// It serves.
    Active(Epoch),
}

/// A connection of a queue.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) id: PathId,
    pub(super) channel: Channel,
    pub(super) phase: Phase,
    control: ControlCredit,
    /// The boot id in WELCOME.
    pub(super) boot_id: BootId,
    /// Something arrived.
    ready: bool,
    /// The policy waits for the drain.
    awaited: bool,
    /// The report on it was altered on purpose.
    pub(super) altered: bool,
    /// A payload is being received into this slot's buffer.
    pub(super) placing: Option<twinrail_protocol::Slot>,
}

impl Initiator {
    pub(super) fn add_lane(&mut self, ground: &mut Ground) {
        let plan = ground.plan.initiators[usize::from(self.planned)];
        let settings = Settings { fail_fast_us: plan.fail_fast, ..Settings::DEFAULT };
        self.lanes.push(Lane {
            rails: Rails::new(settings, self.random.next(), ground.now()),
            queue: None,
            paths: Vec::new(),
            replays: Default::default(),
            held: Default::default(),
            finishing: Vec::new(),
            credit_event: None,
            unheard: None,
            late: Vec::new(),
        });
    }

    pub(super) fn find(&self, id: ConnectionId) -> Option<(usize, usize)> {
        self.lanes.iter().enumerate().find_map(|(lane, own)| {
            let path = own.paths.iter().position(|path| path.channel.id == id)?;
            Some((lane, path))
        })
    }

    fn find_path(&self, lane: usize, id: PathId) -> Option<usize> {
        self.lanes.get(lane)?.paths.iter().position(|path| path.id == id)
    }

    pub(super) fn mark_ready(&mut self, id: ConnectionId) {
        if let Some((lane, path)) = self.find(id) {
            self.lanes[lane].paths[path].ready = true;
        }
    }

    // ---- what the policy wants

    /// Does what a queue's path policy says.
    pub(super) fn act(&mut self, ground: &mut Ground, lane: usize) {
        loop {
            if matches!(self.state, State::GivingUp(_) | State::Done) {
                return;
            }
            let now = ground.now();
            let Some(action) = self.lanes.get_mut(lane).and_then(|lane| lane.rails.poll(now)) else { return };
            if ground.trace.is_on() && !matches!(action, Action::Probe { .. }) {
                note!(ground, self.process(), "queue {lane}: {action:?}");
            }
            match action {
                Action::Dial { path } => self.dial(ground, lane, path),
                Action::Probe { path, token } => {
                    if let Some(at) = self.find_path(lane, path) {
                        let path = &mut self.lanes[lane].paths[at];
                        // The policy keeps to the control credit itself, and counts what it sent.
                        let _counted = path.control.ask();
                        let epoch = path.epoch();
                        path.channel.control(ground, Control::new(ControlKind::Probe, epoch, token));
                    }
                }
                Action::Fence { path, cause } => {
                    if let Some(at) = self.find_path(lane, path) {
                        // What has come counts, whatever happens next.
                        self.serve(ground, lane, at);
                    }
                    match self.find_path(lane, path) {
                        Some(at) => {
                            let path = &mut self.lanes[lane].paths[at];
                            path.awaited = true;
                            let status = if cause == Cause::Violation { Status::MALFORMED } else { Status::OK };
                            self.hang_up(ground, lane, at, status);
                        }
                        None => self.fenced(ground, lane, path),
                    }
                }
                Action::Activate { path, epoch } => self.send_activate(ground, lane, path, epoch),
                Action::Say { path, lost } => {
                    if let Some(at) = self.find_path(lane, path) {
                        let frame = Control::new(ControlKind::PathLost, lost, 0);
                        self.lanes[lane].paths[at].channel.control(ground, frame);
                    }
                }
                Action::Close { path } => {
                    if let Some(at) = self.find_path(lane, path) {
                        self.hang_up(ground, lane, at, Status::OK);
                    }
                }
                Action::AskTurn => match self.returning {
                    None => {
                        self.returning = Some(lane);
                        self.lanes[lane].rails.turn_given(now);
                    }
                    Some(_) => self.wants_return.push_back(lane),
                },
                Action::EndTurn => {
                    self.wants_return.retain(|other| *other != lane);
                    if self.returning == Some(lane) {
                        self.returning = self.wants_return.pop_front();
                        if let Some(next) = self.returning {
                            self.lanes[next].rails.turn_given(now);
                        }
                    }
                }
                Action::Alarm { .. } | Action::AlarmOver { .. } => {}
                Action::Serving { to, .. } => {
                    ground.record(What::Switched { client: self.client, queue: lane as u16, rail: to.0 });
                }
                Action::GiveUp => {
                    let next = self.session.pathless();
                    let status = Status::OUTCOME_UNKNOWN;
                    self.follow(ground, next.unwrap_or(super::session::Next::GiveUp(status)));
                }
            }
        }
    }

    fn dial(&mut self, ground: &mut Ground, lane: usize, id: PathId) {
        let connection = ground.dial(self.number, id.rail);
        self.lanes[lane].paths.push(Path {
            id,
            channel: Channel::new(ground, connection, Side::Initiator),
            phase: Phase::Dialing,
            control: ControlCredit::default(),
            boot_id: BootId::NIL,
            ready: false,
            awaited: false,
            altered: false,
            placing: None,
        });
    }

    /// Nothing more goes over a connection; it is gone when it is drained.
    pub(super) fn hang_up(&mut self, ground: &mut Ground, lane: usize, at: usize, status: Status) {
        let path = &mut self.lanes[lane].paths[at];
        if path.channel.fenced {
            return;
        }
        if !status.is_ok() && matches!(path.phase, Phase::Active(_)) {
            let epoch = path.epoch();
            path.channel.control(ground, Control { status, ..Control::new(ControlKind::Disconnect, epoch, 0) });
        }
        path.placing = None;
        path.channel.fence(ground);
    }

    /// No device touches anything of a connection any more.
    pub(super) fn drained(&mut self, ground: &mut Ground, id: ConnectionId) {
        let Some((lane, at)) = self.find(id) else { return };
        let mut path = self.lanes[lane].paths.swap_remove(at);
        path.channel.drained();
        ground.close(id, Side::Initiator);
        if let Phase::Active(_) = path.phase
            && let Some(queue) = &mut self.lanes[lane].queue
        {
            queue.fence();
            self.lanes[lane].credit_event = None;
        }
        self.finish_what_is_free(ground);
        if path.awaited {
            self.fenced(ground, lane, path.id);
        }
    }

    fn fenced(&mut self, ground: &mut Ground, lane: usize, path: PathId) {
        let now = ground.now();
        self.lanes[lane].rails.fenced(path, now);
    }

    /// A connection is of no use any more.
    pub(super) fn lose(&mut self, ground: &mut Ground, lane: usize, at: usize, cause: Cause) {
        let now = ground.now();
        let path = &self.lanes[lane].paths[at];
        if path.channel.fenced {
            return;
        }
        let id = path.id;
        let served = matches!(path.phase, Phase::Active(_) | Phase::Activating(_));
        self.lanes[lane].rails.lost(id, cause, now);
        // The policy has those fenced that served; the others are just hung up.
        if !served {
            self.hang_up(ground, lane, at, Status::OK);
        }
    }

    pub(super) fn broken(&mut self, ground: &mut Ground, id: ConnectionId) {
        if let Some((lane, at)) = self.find(id) {
            let rail = self.lanes[lane].paths[at].id.rail;
            let cause = if rail == Rail::RDMA { Cause::FailedCompletion } else { Cause::Disconnected };
            self.lose(ground, lane, at, cause);
        }
    }

    pub(super) fn dial_failed(&mut self, ground: &mut Ground, id: ConnectionId) {
        let Some((lane, at)) = self.find(id) else { return };
        let now = ground.now();
        let path = self.lanes[lane].paths[at].id;
        self.lanes[lane].rails.dial_failed(path, 0, now);
        self.hang_up(ground, lane, at, Status::OK);
    }

    /// The rail is connected.
    pub(super) fn dialed(&mut self, ground: &mut Ground, id: ConnectionId) {
        let Some((lane, at)) = self.find(id) else { return };
        let name = names::initiator_name(self.client);
        let payload = Payload { length: name.len() as u32, crc: crc32c(&name) };
        let hello = Hello { version_min: VERSION, version_max: VERSION, features: 0, name: payload };
        let path = &mut self.lanes[lane].paths[at];
        path.phase = Phase::Greeting;
        path.channel.hello(ground, &hello, &name);
    }

    // ---- what arrives

    /// Takes what has arrived: first on standbys, then on the paths that serve.
    pub(super) fn serve_ready(&mut self, ground: &mut Ground) {
        for serving in [false, true] {
            for lane in 0..self.lanes.len() {
                let mut at = 0;
                while at < self.lanes[lane].paths.len() {
                    let path = &mut self.lanes[lane].paths[at];
                    if path.ready && matches!(path.phase, Phase::Active(_)) == serving {
                        path.ready = false;
                        self.serve(ground, lane, at);
                    }
                    at += 1;
                }
            }
        }
    }

    pub(super) fn serve(&mut self, ground: &mut Ground, lane: usize, at: usize) {
        loop {
            let Some(path) = self.lanes.get_mut(lane).and_then(|lane| lane.paths.get_mut(at)) else { return };
            if path.channel.fenced {
                return;
            }
            path.channel.flush(ground, false);
            let id = path.id;
            let done = match path.channel.next(ground) {
                Item::Nothing => return,
                Item::Ended => return self.lose(ground, lane, at, Cause::Disconnected),
                Item::Bad(violation) => Err(violation),
                Item::Frame(Frame::Handshake { kind, payload }) => self.shake(ground, lane, at, kind, payload),
                Item::Frame(Frame::Control(control)) => self.control(ground, lane, at, &control),
                Item::Sent(_) | Item::Acknowledged => {
                    if id.rail == Rail::RDMA {
                        self.lanes[lane].rails.send_completed(id);
                    }
                    self.finish_what_is_free(ground);
                    Ok(())
                }
                item => self.carry(ground, lane, at, item),
            };
            if let Err(violation) = done {
                note!(ground, self.process(), "{violation}");
                ground.record(What::Accused { by: Side::Initiator, status: violation.status.0 });
                if let Some(at) = self.find_path(lane, id) {
                    self.lose(ground, lane, at, Cause::Violation);
                }
                return;
            }
        }
    }

    fn shake(
        &mut self,
        ground: &mut Ground,
        lane: usize,
        at: usize,
        kind: u8,
        expected: Payload,
    ) -> Result<(), Violation> {
        let now = ground.now();
        let path = &mut self.lanes[lane].paths[at];
        let bytes = path.channel.payload().to_vec();
        match (Handshake::decode(kind, expected, &bytes)?, path.phase) {
            (Handshake::Welcome(welcome), Phase::Greeting) => {
                path.boot_id = welcome.boot_id;
                path.phase = Phase::Welcomed;
                if self.session.is_attached() {
                    self.stand_by(ground, lane, at);
                }
                Ok(())
            }
            (Handshake::Attached(attached), Phase::Attaching) => {
                self.attached(ground, lane, at, &attached);
                Ok(())
            }
            (Handshake::Standing(standing), Phase::AsksToStand) => {
                path.phase = Phase::Ready;
                let id = path.id;
                let own = self.lanes[lane].queue.as_ref().map(Queue::instance);
                let other = own.is_some_and(|own| standing.instance.0 != 0 && own != standing.instance);
                if other && !broken(Canary::InstanceIgnored) && !self.hear(ground, lane) {
                    let next = self.session.lost();
                    self.follow(ground, next);
                    return Ok(());
                }
                self.lanes[lane].rails.dialed(id, standing.epoch, now);
                Ok(())
            }
            (Handshake::Activated(activated), Phase::Activating(epoch)) => {
                self.activated(ground, lane, at, epoch, &activated)
            }
            (Handshake::Refused(refused), _) => {
                self.refused(ground, lane, at, &refused);
                Ok(())
            }
            _ => Err(Violation::from(twinrail_protocol::wire::Fault::UnexpectedKind(kind))),
        }
    }

    pub(super) fn stand_by(&mut self, ground: &mut Ground, lane: usize, at: usize) {
        let (session, secret, queue) = (self.session.id(), self.session.secret(), QueueId(lane as u16));
        let path = &mut self.lanes[lane].paths[at];
        path.phase = Phase::AsksToStand;
        let rail = path.id.rail;
        path.channel.handshake(ground, &Handshake::Standby(Standby { session, secret, queue, rail }));
    }

    fn refused(&mut self, ground: &mut Ground, lane: usize, at: usize, refused: &Refused<'_>) {
        let now = ground.now();
        let path = &self.lanes[lane].paths[at];
        let (id, phase) = (path.id, path.phase);
        let Refused { status, retry_after_ms, .. } = *refused;
        note!(ground, self.process(), "queue {lane}: refused: {status}");
        let retry_after_us = u64::from(retry_after_ms) * 1000;
        match phase {
            // The answer to what was altered tells nothing.
            _ if path.altered => self.lose(ground, lane, at, Cause::ActivationFailed),
            Phase::Attaching => {
                self.lanes[lane].rails.dial_failed(id, retry_after_us, now);
                self.hang_up(ground, lane, at, Status::OK);
                if status == Status::BAD_SECRET && self.try_older_secret() {
                    return;
                }
                let next = self.session.refused(status, retry_after_ms);
                self.follow(ground, next);
            }
            // Of the table, not of the session: the queue is late.
            _ if status == Status::SESSION_LOST && self.hear(ground, lane) => {
                if let Some(at) = self.find_path(lane, id) {
                    self.lose(ground, lane, at, Cause::ActivationFailed);
                }
            }
            // Of such there is no way back, or only by another attach.
            _ if [Status::SESSION_LOST, Status::PREEMPTED, Status::TAKEN_OVER, Status::BAD_SECRET]
                .contains(&status) =>
            {
                self.lose(ground, lane, at, Cause::ActivationFailed);
                let next = self.session.refused(status, retry_after_ms);
                self.follow(ground, next);
            }
            Phase::Activating(_) => self.lose(ground, lane, at, Cause::ActivationFailed),
            _ => {
                self.lanes[lane].rails.dial_failed(id, retry_after_us, now);
                self.hang_up(ground, lane, at, Status::OK);
            }
        }
    }

    // ---- activation

    fn send_activate(&mut self, ground: &mut Ground, lane: usize, id: PathId, epoch: Epoch) {
        let Some(at) = self.find_path(lane, id) else { return };
        let plan = ground.plan.initiators[usize::from(self.planned)];
        let (session, secret, queue) = (self.session.id(), self.session.secret(), QueueId(lane as u16));
        let lane = &mut self.lanes[lane];
        let (mut report, mut altered) = ([0; 4 * HEADER_LEN], false);
        let mut length = 0;
        let mut activate = Activate::new(session, secret, queue, id.rail, epoch);
        activate.depth = plan.depth;
        if let Some(queue) = &mut lane.queue {
            // Both count attempts alike.
            let counted = queue.next_epoch();
            debug_assert!(counted == epoch || lane.unheard.is_some(), "the policy and the queue agree");
            let table = Table(queue.instance().0);
            for (mut command, room) in queue.report(id.rail).zip(report.as_chunks_mut::<HEADER_LEN>().0) {
                if command.payload.length > 0 && std::mem::take(&mut self.alters_report) {
                    altered = true;
                    command.payload.crc ^= 1;
                    let place = Place { table, slot: command.slot.0, sequence: command.sequence.0 };
                    ground.record(What::RetryAltered { place, epoch: epoch.0 });
                }
                // The queue may not know of an attempt that was never heard of again.
                command.epoch = epoch;
                *room = Frame::Command(command).encode();
                length += HEADER_LEN;
            }
            activate.instance = queue.instance();
            if std::mem::take(&mut self.alters_instance) {
                altered = true;
                activate.instance.0 ^= 2;
                ground.record(What::InstanceAltered { table, epoch: epoch.0 });
            }
        }
        let activate = activate.with_report(&report[..length]);
        let path = &mut lane.paths[at];
        path.phase = Phase::Activating(epoch);
        path.altered = altered;
        path.channel.handshake(ground, &Handshake::Activate(activate));
    }

    fn activated(
        &mut self,
        ground: &mut Ground,
        lane: usize,
        at: usize,
        epoch: Epoch,
        activated: &Activated<'_>,
    ) -> Result<(), Violation> {
        let now = ground.now();
        let own = &mut self.lanes[lane];
        if own.paths[at].altered {
            // The answer was to another report: it tells nothing.
            self.lose(ground, lane, at, Cause::ActivationFailed);
            return Ok(());
        }
        let mut ended = Vec::new();
        match &mut own.queue {
            Some(queue) => queue.activate(epoch, activated, |incoming| ended.push(incoming))?,
            None => {
                let max_transfer = 2 * crate::history::MAX_BLOCKS as u32 * BLOCK as u32;
                let options = QueueOptions::from_activated(activated, max_transfer);
                let rail = own.paths[at].id.rail;
                own.queue = Some(Queue::new(options, activated.instance, epoch).on_rail(rail));
            }
        }
        let path = &mut own.paths[at];
        path.phase = Phase::Active(epoch);
        let depth = usize::from(activated.depth);
        let receives = 2 * depth + 2 * usize::from(CONTROL_CREDIT) + 4;
        path.channel.activate(ground, activated.in_capsule, 4 * depth, receives);
        let id = path.id;
        own.rails.activated(id, now);
        for incoming in ended {
            match incoming {
                Incoming::Complete(completion) => self.complete(ground, lane, &completion),
                Incoming::Resubmit { slot } => self.resubmit(ground, lane, slot),
                Incoming::Receive { .. } | Incoming::Stale => {}
            }
        }
        if self.lanes[lane].queue.as_ref().is_some_and(|queue| queue.outstanding() > 0) {
            self.lanes[lane].rails.submitted(now);
        }
        self.take_late(ground, lane)
    }

    // ---- control

    fn control(&mut self, ground: &mut Ground, lane: usize, at: usize, control: &Control) -> Result<(), Violation> {
        let now = ground.now();
        let own = &mut self.lanes[lane];
        let path = &mut own.paths[at];
        let id = path.id;
        if control.kind.is_request() {
            path.control.request_came(path.channel.answers_waiting())?;
        } else if control.kind.is_answer() {
            path.control.answer_came()?;
        }
        match control.kind {
            ControlKind::Probe => {
                path.control.answer();
                path.channel.control(ground, Control::new(ControlKind::ProbeReply, control.epoch, control.token));
            }
            ControlKind::ProbeReply => own.rails.probe_answered(id, control.token, now),
            ControlKind::Event => {
                let mut settled = true;
                if control.code == EventCode::CREDIT
                    && let Some(queue) = own.queue.as_mut().filter(|_| path.phase == Phase::Active(control.epoch))
                {
                    settled = queue.credits_changed(control.credits)?;
                }
                match settled {
                    true => path.answer_event(ground, control.code, control.token, own.queue.as_ref()),
                    // An older one that waits is answered at once: it is the latest that counts.
                    false => {
                        if let Some(token) = own.credit_event.replace(control.token) {
                            path.answer_event(ground, control.code, token, own.queue.as_ref());
                        }
                    }
                }
            }
            ControlKind::Closed => self.closed(ground),
            ControlKind::Disconnect => self.lose(ground, lane, at, Cause::Disconnected),
            ControlKind::PathLost => own.rails.peer_says_lost(control.epoch, now),
            ControlKind::EventSeen | ControlKind::Close => {}
        }
        Ok(())
    }

    /// Acknowledges a shrink, once no command is out above it.
    pub(super) fn acknowledge_credits(&mut self, ground: &mut Ground, lane: usize) {
        let own = &mut self.lanes[lane];
        let Some(queue) = own.queue.as_ref().filter(|queue| queue.allowance().is_settled()) else { return };
        let Some(token) = own.credit_event.take() else { return };
        if let Some(path) = own.paths.iter_mut().find(|path| path.phase == Phase::Active(queue.epoch())) {
            path.answer_event(ground, EventCode::CREDIT, token, Some(queue));
        }
    }
}

impl Path {
    pub(super) fn epoch(&self) -> Epoch {
        match self.phase {
            Phase::Active(epoch) => epoch,
            _ => Epoch(0),
        }
    }

    /// Whether it serves.
    pub(super) fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Active(_)) && !self.channel.fenced
    }

    fn answer_event(&mut self, ground: &mut Ground, code: EventCode, token: u64, queue: Option<&Queue>) {
        self.control.answer();
        let mut seen = Control { code, ..Control::new(ControlKind::EventSeen, self.epoch(), token) };
        if let (EventCode::CREDIT, Some(queue)) = (code, queue) {
            seen.credits.number = queue.allowance().keeps();
        }
        self.channel.control(ground, seen);
    }

    /// Takes credit for a request of ours.
    pub(super) fn ask(&mut self) -> bool {
        self.control.ask()
    }
}
