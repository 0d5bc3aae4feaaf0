//! Beginning a session: one ATTACH, then an ACTIVATE for each queue.

use std::sync::Arc;
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};
use twinrail_protocol::ids::{Epoch, Secret};
use twinrail_protocol::limits::DEFAULT_IN_CAPSULE;
use twinrail_protocol::wire::{Activate, Attach, AttachFlags, Rail, Standby};
use twinrail_protocol::{QueueId, SessionId};

use crate::connect::{ConnectError, Connection, Route};
use crate::doorbell::Doorbell;
use crate::keeper::Keeper;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::queue::Queue;
use crate::session::Session;
use crate::url::VolumeUrl;

impl Session {
    /// Attaches the volume and activates its queues, each to be owned by one thread. Should nobody poll them for
    /// long, a thread of the session keeps its lease.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn attach(url: &VolumeUrl, options: &Options, metrics: &Metrics) -> Result<(Self, Vec<Queue>), ConnectError> {
        let (session, queues) = Self::attach_polled(url, options, metrics)?;
        let lease = Duration::from_millis(session.lease_ms().into());
        if !lease.is_zero() {
            let (id, secret) = (session.id(), session.secret());
            let standby = Standby { session: id, secret, queue: QueueId(0), rail: Rail::TCP };
            session.has_keeper(Keeper::start(session.route().clone(), standby, lease)?);
        }
        Ok((session, queues))
    }

    /// The same for queues that are polled all the time.
    pub(crate) fn attach_polled(
        url: &VolumeUrl,
        options: &Options,
        metrics: &Metrics,
    ) -> Result<(Self, Vec<Queue>), ConnectError> {
        options.check()?;
        if let Some(portal) = &url.rdma {
            tracing::warn!(%portal, "this version has no RDMA: TCP serves");
        }
        let (id, secret) = (SessionId(random()?), Secret(random()?));
        let route = Arc::new(Route {
            target: url.target.clone(),
            name: options.name.clone(),
            timeout_ms: options.connect_timeout_ms,
            socket: twinrail_fallback_tcp::Options { congestion: options.congestion.clone(), ..Default::default() },
        });
        let dial = || Connection::dial(&route);
        let mut first = dial()?;
        let attach = Attach {
            session: id,
            secret,
            next_secret: Secret([0; 16]),
            mode: options.mode,
            flags: if options.preempt { AttachFlags::PREEMPT } else { AttachFlags::default() },
            queues: options.queues,
            expected_volume: options.expected_volume,
            generation: 0,
            volume: &url.volume,
        };
        let info = first.attach(&attach, options.attach_timeout_ms)?;
        let (queues, max_transfer) = (info.queues.min(options.queues), info.geometry.max_transfer);
        let session = Self::new((id, secret), route.clone(), info, first.target_name.clone(), options, metrics);
        let mut connection = Some(first);
        let paths = (0..queues).map(|queue| {
            let queue = QueueId(queue);
            let connection = connection.take().map_or_else(dial, Ok)?;
            let mut activate = Activate::new(id, secret, queue, Rail::TCP, Epoch(1));
            (activate.depth, activate.in_capsule) = (options.depth, DEFAULT_IN_CAPSULE);
            let activation = connection.activate(&activate, max_transfer, &route)?;
            let doorbell =
                Doorbell::new().map_err(|source| ConnectError::System { what: "no event descriptor", source })?;
            let seed = u64::from_le_bytes(random()?[..8].try_into().unwrap_or_default());
            Ok(Queue::new(queue, &session, options, activation, doorbell, seed))
        });
        let paths = paths.collect::<Result<Vec<_>, ConnectError>>()?;
        let doorbells = paths.iter().map(|queue| queue.doorbell().clone()).collect();
        session.has_doorbells(doorbells);
        tracing::info!(
            session = %id, volume = %url.volume, target = session.target_name(), mode = options.mode.name(),
            queues, depth = options.depth, "attached"
        );
        Ok((session, paths))
    }
}

/// Random bytes from the operating system.
fn random() -> Result<[u8; 16], ConnectError> {
    let mut bytes = [0; 16];
    // Up to 256 bytes come whole, or not at all.
    match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
        Ok(_) => Ok(bytes),
        Err(errno) => Err(ConnectError::System { what: "no random bytes", source: errno.into() }),
    }
}
