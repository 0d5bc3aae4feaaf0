//! A session: one ATTACH, then an ACTIVATE for each queue; and what its queues share.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};
use twinrail_protocol::ids::{Epoch, Secret};
use twinrail_protocol::limits::DEFAULT_IN_CAPSULE;
use twinrail_protocol::wire::{
    Activate, Attach, AttachFlags, AttachMode, Attached, Portal, Rail, Standby, VolumeFlags,
};
use twinrail_protocol::{Geometry, QueueId, SessionId, VolumeId};

use crate::connect::{ConnectError, Connection, Route};
use crate::doorbell::Doorbell;
use crate::error::PathEnd;
use crate::keeper::Keeper;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::queue::Queue;
use crate::url::VolumeUrl;

/// What a target tells of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Its UUID.
    pub id: VolumeId,
    /// Counter of its changes of writer.
    pub generation: u64,
    /// Size, block sizes and longest transfer, in bytes.
    pub geometry: Geometry,
    /// Properties.
    pub flags: VolumeFlags,
    /// Queues that the session may have.
    pub queues: u16,
    /// How long the session outlives its last path, in milliseconds.
    pub lease_ms: u32,
    /// Syncs of the volume that failed so far (I5).
    pub failed_syncs: u64,
    /// Where the target listens for RDMA connections.
    pub portals: Vec<Portal>,
}

impl VolumeInfo {
    pub(crate) fn from_attached(attached: &Attached<'_>) -> Self {
        let Attached { size, logical_block, physical_block, max_transfer, .. } = *attached;
        Self {
            id: attached.volume,
            generation: attached.generation,
            geometry: Geometry { size, logical_block, physical_block, max_transfer },
            flags: attached.flags,
            queues: attached.queues,
            lease_ms: attached.lease_ms,
            failed_syncs: attached.failed_syncs,
            portals: attached.portals().collect(),
        }
    }
}

/// An attached session. Its queues go their own ways, each with the thread that owns it; this is what they have
/// in common. Cheap to clone.
#[derive(Clone)]
pub struct Session {
    inner: Arc<Inner>,
}

struct Inner {
    id: SessionId,
    /// What every activation shows; never logged.
    secret: Secret,
    route: Arc<Route>,
    info: VolumeInfo,
    target_name: String,
    mode: AttachMode,
    /// The origin of all time stamps.
    origin: Instant,
    /// Size of the volume in bytes, as it is now.
    size: AtomicU64,
    /// The target has said that it will leave.
    draining: AtomicBool,
    /// The target was asked to end the session.
    closing: AtomicBool,
    /// Why the session ended.
    end: OnceLock<PathEnd>,
    doorbells: OnceLock<Vec<Doorbell>>,
    /// Looks after queues whose owner may be busy elsewhere.
    keeper: OnceLock<Keeper>,
    metrics: Metrics,
}

impl Session {
    /// Attaches the volume and activates its queues, each to be owned by one thread. Should nobody poll them for
    /// long, a thread of the session keeps its lease.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn attach(url: &VolumeUrl, options: &Options, metrics: &Metrics) -> Result<(Self, Vec<Queue>), ConnectError> {
        let (session, queues) = Self::attach_polled(url, options, metrics)?;
        let lease = Duration::from_millis(session.inner.info.lease_ms.into());
        if !lease.is_zero() {
            let (id, secret) = (session.id(), session.secret());
            let standby = Standby { session: id, secret, queue: QueueId(0), rail: Rail::TCP };
            let _first_time = session.inner.keeper.set(Keeper::start(session.route().clone(), standby, lease)?);
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
        let session = Self {
            inner: Arc::new(Inner {
                id,
                secret,
                route: route.clone(),
                target_name: first.target_name.clone(),
                mode: options.mode,
                origin: Instant::now(),
                size: AtomicU64::new(info.geometry.size),
                draining: AtomicBool::new(false),
                closing: AtomicBool::new(false),
                end: OnceLock::new(),
                doorbells: OnceLock::new(),
                keeper: OnceLock::new(),
                metrics: metrics.clone(),
                info,
            }),
        };
        session.inner.metrics.sessions().inc();
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
        let _first_time = session.inner.doorbells.set(doorbells);
        tracing::info!(
            session = %id, volume = %url.volume, target = session.target_name(), mode = options.mode.name(),
            queues, depth = options.depth, "attached"
        );
        Ok((session, paths))
    }

    /// The session's id.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.inner.id
    }

    /// What the target told at the attach, with the current size.
    #[must_use]
    pub fn info(&self) -> VolumeInfo {
        VolumeInfo { geometry: self.geometry(), ..self.inner.info.clone() }
    }

    /// Size, block sizes and longest transfer in bytes, as they are now.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.inner.size.load(Ordering::Relaxed), ..self.inner.info.geometry }
    }

    /// The target's name, for people.
    #[must_use]
    pub fn target_name(&self) -> &str {
        &self.inner.target_name
    }

    /// How the volume is held.
    #[must_use]
    pub fn mode(&self) -> AttachMode {
        self.inner.mode
    }

    /// Whether changes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.inner.mode == AttachMode::READ_ONLY || self.inner.info.flags.has(VolumeFlags::READ_ONLY)
    }

    /// Whether the target has said that it will leave.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::Relaxed)
    }

    /// How the session ended, if it has.
    #[must_use]
    pub fn end(&self) -> Option<&PathEnd> {
        self.inner.end.get()
    }

    /// Time since the attach, in nanoseconds.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.inner.origin.elapsed().as_nanos() as u64
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// What every activation shows.
    pub(crate) fn secret(&self) -> Secret {
        self.inner.secret
    }

    /// How its target is reached.
    pub(crate) fn route(&self) -> &Arc<Route> {
        &self.inner.route
    }

    /// A queue is polled by its owner.
    #[inline]
    pub(crate) fn polled(&self) {
        if let Some(keeper) = self.inner.keeper.get() {
            keeper.polled();
        }
    }

    /// The target says that the volume has another size.
    pub(crate) fn resized(&self, size: u64) {
        let before = self.inner.size.swap(size, Ordering::Relaxed);
        if before != size {
            tracing::info!(session = %self.inner.id, before, size, "the volume was resized");
        }
    }

    /// The target says that it will leave.
    pub(crate) fn drains(&self, back_in_ms: u64) {
        if !self.inner.draining.swap(true, Ordering::Relaxed) {
            tracing::warn!(session = %self.inner.id, back_in_ms, "the target is about to leave");
        }
    }

    /// The session has ended. The first queue to say so names the reason, and the others hear of it.
    pub(crate) fn ends(&self, end: &PathEnd) {
        if self.inner.end.set(end.clone()).is_err() {
            return;
        }
        self.inner.metrics.sessions().dec();
        self.inner.keeper.get().into_iter().for_each(Keeper::stop);
        match end {
            PathEnd::Closed => tracing::info!(session = %self.inner.id, "closed"),
            _ => tracing::error!(session = %self.inner.id, blame = ?end.blame(), "the session ended: {end}"),
        }
        self.inner.doorbells.get().into_iter().flatten().for_each(Doorbell::ring);
    }

    /// Whether the session has ended.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.inner.end.get().is_some()
    }

    /// The target is asked to end the session.
    pub(crate) fn closes(&self) {
        self.inner.closing.store(true, Ordering::Relaxed);
    }

    /// Whether the target was asked to end the session.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.inner.closing.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("id", &self.inner.id).field("end", &self.inner.end).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.end.get().is_none() {
            self.metrics.sessions().dec();
        }
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
