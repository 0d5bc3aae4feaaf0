//! Connections until they are a queue's path.

use twinrail_protocol::liveness::Liveness;
use twinrail_protocol::target::{Admitted, Asking, Refusal, RequestId};
use twinrail_protocol::wire::{
    Activate, Attach, AttachFlags, Attached, Features, Frame, Handshake, Payload, Refused, Standby, Standing, VERSION,
    VolumeFlags, Welcome,
};
use twinrail_protocol::{ControlCredit, Epoch, Instance, QueueId, Secret, SessionId, Status};

use super::{Connection, Lane, Phase, Session, Target, VOLUME, digest, ms};
use crate::channel::{Channel, Item};
use crate::ground::Ground;
use crate::history::{AttachAnswer, Client, Gauge, SecretNumber, Session as SessionNumber, Side, What};
use crate::rails::ConnectionId;
use crate::stamps::BLOCK;
use crate::{names, note};

/// What a connection asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    secret: SecretNumber,
    next_secret: Option<SecretNumber>,
    preempt: bool,
    goes_on: bool,
    /// The token of its CLOSE.
    pub(super) close: Option<u64>,
}

impl Target {
    pub(super) fn accept(&mut self, ground: &mut Ground, id: ConnectionId) {
        ground.accept(id);
        self.connections.push(Connection {
            channel: Channel::new(ground, id, Side::Target),
            phase: Phase::New,
            client: Client(0),
            joined: None,
            liveness: Liveness::new(Liveness::PERIOD_MS, ms(ground.now())),
            control: ControlCredit::default(),
            placing: None,
            asked: None,
        });
        let (value, bound) = (self.connections.len() as u64, 128);
        ground.record(What::Gauge { gauge: Gauge::Connections, side: Side::Target, value, bound });
    }

    /// Takes what has arrived on a connection.
    pub(super) fn serve(&mut self, ground: &mut Ground, id: ConnectionId) {
        loop {
            let now_ms = ms(ground.now());
            let Some(connection) = self.connection(id) else { return };
            connection.channel.flush(ground, false);
            let item = connection.channel.next(ground);
            if !matches!(item, Item::Nothing | Item::Ended) {
                connection.liveness.heard(now_ms);
            }
            match item {
                Item::Nothing => return,
                Item::Ended => return self.lose(ground, id, Status::CONNECTION_LOST),
                Item::Bad(violation) => {
                    ground.record(What::Accused { by: Side::Target, status: violation.status.0 });
                    note!(ground, "target", "{id}: {violation}");
                    return self.lose(ground, id, violation.status);
                }
                Item::Hello(_) => {
                    connection.client = names::client(connection.channel.payload());
                    connection.phase = Phase::Welcomed;
                    let boot_id = names::boot_id(self.boots);
                    let welcome =
                        Welcome { version: VERSION, features: Features(0), boot_id, auth_method: 0, target_name: "t" };
                    let Some(connection) = self.connection(id) else { return };
                    connection.channel.handshake(ground, &Handshake::Welcome(welcome));
                }
                Item::Frame(Frame::Handshake { kind, payload }) => self.shake(ground, id, kind, payload),
                Item::Frame(Frame::Control(control)) => self.control(ground, id, &control),
                item => self.carry(ground, id, item),
            }
        }
    }

    fn shake(&mut self, ground: &mut Ground, id: ConnectionId, kind: u8, expected: Payload) {
        let Some(connection) = self.connection(id) else { return };
        let bytes = connection.channel.payload().to_vec();
        match Handshake::decode(kind, expected, &bytes) {
            Ok(Handshake::Attach(attach)) => self.asked_to_attach(ground, id, &attach),
            Ok(Handshake::Standby(standby)) => self.asked_to_stand_by(ground, id, &standby),
            Ok(Handshake::Activate(activate)) => self.asked_to_activate(ground, id, &activate),
            _ => {
                ground.record(What::Accused { by: Side::Target, status: Status::UNEXPECTED_FRAME.0 });
                self.lose(ground, id, Status::UNEXPECTED_FRAME);
            }
        }
    }

    fn asked_to_attach(&mut self, ground: &mut Ground, id: ConnectionId, attach: &Attach<'_>) {
        self.requests += 1;
        let request = RequestId(self.requests);
        let Some(connection) = self.connection(id) else { return };
        connection.phase = Phase::Attaching(request);
        let takeover = attach.flags.has(AttachFlags::TAKEOVER);
        connection.asked = Some(Asked {
            secret: names::secret_number(&attach.secret),
            next_secret: takeover.then(|| names::secret_number(&attach.next_secret)),
            preempt: attach.flags.has(AttachFlags::PREEMPT),
            goes_on: attach.generation != 0,
            close: None,
        });
        let name = names::initiator_name(connection.client);
        let name = std::str::from_utf8(&name).unwrap_or_default();
        match Asking::new(request, name, VOLUME, attach, digest) {
            Ok(asking) => {
                if let Some(holdings) = &mut self.holdings {
                    holdings.attach(asking, ms(ground.now()));
                }
            }
            Err(refusal) => self.answer(ground, request, Err(refusal)),
        }
    }

    /// Answers an ATTACH.
    pub(super) fn answer(&mut self, ground: &mut Ground, request: RequestId, answer: Result<Admitted, Refusal>) {
        let at = self.connections.iter().position(|c| c.phase == Phase::Attaching(request));
        let (asked, client) =
            at.map_or((None, Client(0)), |at| (self.connections[at].asked, self.connections[at].client));
        let admitted = match answer {
            Ok(admitted) => admitted,
            Err(refusal) => {
                note!(ground, "target", "refuses client {}: {refusal}", client.0);
                if let Some(at) = at {
                    ground.record(What::AttachRefused { client, status: refusal.status().0 });
                    self.connections[at].phase = Phase::Welcomed;
                    self.refuse(ground, self.connections[at].channel.id, refusal.status(), refusal.retry_after_ms());
                }
                return;
            }
        };
        if admitted.fresh {
            self.session_numbers += 1;
            self.sessions.push(Session {
                number: SessionNumber(self.session_numbers),
                id: admitted.session,
                read_only: names::mode(admitted.mode) == crate::history::Mode::ReadOnly,
                ending: false,
                ledger: twinrail_protocol::target::FlushLedger::inheriting(admitted.inherited, self.failed_syncs),
                at_storage: 0,
                lanes: (0..admitted.queues).map(|_| Lane::default()).collect(),
            });
            let (value, bound) = (self.sessions.len() as u64, 8 + 3);
            ground.record(What::Gauge { gauge: Gauge::Sessions, side: Side::Target, value, bound });
        }
        let Some(session) = self.sessions.iter().find(|s| s.id == admitted.session && !s.ending) else { return };
        let number = session.number;
        if let Some(Asked { secret, next_secret, preempt, goes_on, .. }) = asked {
            let (mode, volume) = (names::mode(admitted.mode), ground.disk.image);
            let generation = admitted.generation;
            ground.record(What::Attached(AttachAnswer {
                session: number,
                client,
                secret,
                next_secret,
                mode,
                preempt,
                goes_on,
                generation,
                volume,
            }));
        }
        note!(ground, "target", "client {} has session {}, generation {}", client.0, number.0, admitted.generation);
        let Some(at) = at else { return };
        let mut attached = Attached::new(names::volume_id(ground.disk.image));
        attached.generation = admitted.generation;
        attached.size = u64::from(ground.plan.blocks) * BLOCK as u64;
        attached.max_transfer = MAX_TRANSFER;
        attached.flags = if ground.plan.write_through { VolumeFlags::WRITE_THROUGH } else { VolumeFlags::default() };
        attached.queues = admitted.queues;
        attached.lease_ms = ms(ground.plan.lease) as u32;
        attached.failed_syncs = admitted.failed_syncs;
        attached.synced_boot_id = admitted.synced_boot_id;
        self.connections[at].phase = Phase::Welcomed;
        self.connections[at].channel.handshake(ground, &Handshake::Attached(attached));
    }

    /// Says no, which ends the connection.
    pub(super) fn refuse(&mut self, ground: &mut Ground, id: ConnectionId, status: Status, retry_after_ms: u32) {
        let Some(connection) = self.connection(id) else { return };
        note!(ground, "target", "refuses {id}: {status}");
        let refused = Refused { status, version_min: VERSION, version_max: VERSION, retry_after_ms, text: "" };
        connection.channel.handshake(ground, &Handshake::Refused(refused));
        self.forget_path(ground, id, false);
        if let Some(at) = self.connections.iter().position(|c| c.channel.id == id) {
            // On RDMA the refusal needs the queue pair until it is acknowledged; the peer hangs up.
            if self.connections[at].channel.rail == twinrail_protocol::wire::Rail::TCP {
                let connection = self.connections.swap_remove(at);
                ground.shut_down(connection.channel.id, Side::Target);
            } else {
                self.connections[at].phase = Phase::Welcomed;
            }
        }
    }

    /// Counts a connection as a path, or about to be one.
    pub(super) fn join(
        &mut self,
        ground: &mut Ground,
        id: ConnectionId,
        session: SessionId,
        secret: &Secret,
        queue: QueueId,
    ) -> Option<SessionNumber> {
        let path = twinrail_protocol::target::PathId(u64::from(id.0));
        let joined = match &mut self.holdings {
            Some(holdings) => holdings.join(session, &digest(secret), queue, path),
            None => return None,
        };
        if let Err(refusal) = joined {
            self.refuse(ground, id, refusal.status(), refusal.retry_after_ms());
            return None;
        }
        let number = self.sessions.iter().find(|s| s.id == session && !s.ending)?.number;
        let connection = self.connection(id)?;
        connection.joined = Some(session);
        connection.phase = Phase::Standby { session: number, queue: queue.0 };
        Some(number)
    }

    fn asked_to_stand_by(&mut self, ground: &mut Ground, id: ConnectionId, standby: &Standby) {
        let Standby { session, secret, queue, .. } = *standby;
        let Some(number) = self.join(ground, id, session, &secret, queue) else { return };
        let standing = self.lane(number, queue.0).and_then(|lane| lane.core.as_ref()).map_or(
            Standing { epoch: Epoch(0), instance: Instance(0) },
            |core| Standing { epoch: core.epoch(), instance: core.instance() },
        );
        if let Some(connection) = self.connection(id) {
            connection.channel.handshake(ground, &Handshake::Standing(standing));
        }
    }

    fn asked_to_activate(&mut self, ground: &mut Ground, id: ConnectionId, activate: &Activate<'_>) {
        let Some(connection) = self.connection(id) else { return };
        let number = match (connection.phase, connection.joined) {
            (Phase::Standby { session, queue }, Some(joined)) if joined == activate.session => {
                // It showed the secret when it came to stand by, and shows it again.
                if queue != activate.queue.0 {
                    return self.refuse(ground, id, Status::BAD_PARAMETER, 0);
                }
                match self.join(ground, id, activate.session, &activate.secret, activate.queue) {
                    Some(now) if now == session => session,
                    Some(_) => return self.refuse(ground, id, Status::SESSION_LOST, 0),
                    None => return,
                }
            }
            _ => match self.join(ground, id, activate.session, &activate.secret, activate.queue) {
                Some(number) => number,
                None => return,
            },
        };
        self.activate(ground, id, number, activate);
    }
}

/// Largest payload of one command in bytes: a COMPARE AND WRITE of the most blocks.
pub(super) const MAX_TRANSFER: u32 = 2 * crate::history::MAX_BLOCKS as u32 * BLOCK as u32;
