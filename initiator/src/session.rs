//! A session: what its queues share. `attach.rs` begins it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use twinrail_protocol::ids::Secret;
use twinrail_protocol::wire::{AttachMode, VolumeFlags};
use twinrail_protocol::{Geometry, SessionId};

use crate::connect::Route;
use crate::doorbell::Doorbell;
use crate::error::PathEnd;
use crate::keeper::Keeper;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::outage::{Outage, Outages};
use crate::url::Endpoint;
use crate::volume_info::VolumeInfo;

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
    fail_fast: Option<Duration>,
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
    outages: Outages,
    /// Looks after queues whose owner may be busy elsewhere.
    keeper: OnceLock<Keeper>,
    metrics: Metrics,
}

impl Session {
    /// A session that the target has just attached.
    pub(crate) fn new(
        (id, secret): (SessionId, Secret),
        route: Arc<Route>,
        info: VolumeInfo,
        target_name: String,
        options: &Options,
        metrics: &Metrics,
    ) -> Self {
        metrics.sessions().inc();
        let inner = Inner {
            id,
            secret,
            route,
            target_name,
            mode: options.mode,
            fail_fast: options.fail_fast,
            origin: Instant::now(),
            size: AtomicU64::new(info.geometry.size),
            draining: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            end: OnceLock::new(),
            doorbells: OnceLock::new(),
            outages: Outages::new(),
            keeper: OnceLock::new(),
            metrics: metrics.clone(),
            info,
        };
        Self { inner: Arc::new(inner) }
    }

    /// These are rung when the session ends.
    pub(crate) fn has_doorbells(&self, doorbells: Vec<Doorbell>) {
        let _first_time = self.inner.doorbells.set(doorbells);
    }

    /// This looks after its queues.
    pub(crate) fn has_keeper(&self, keeper: Keeper) {
        let _first_time = self.inner.keeper.set(keeper);
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

    /// How long it outlives its last path, in milliseconds.
    pub(crate) fn lease_ms(&self) -> u32 {
        self.inner.info.lease_ms
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

    /// How long a queue may be without a path that answers; nothing if for ever.
    #[must_use]
    pub fn fail_fast(&self) -> Option<Duration> {
        self.inner.fail_fast
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

    /// Since when, and why, commands of a queue are held; nothing while each has a connection that answers. A loss
    /// that is made good at once is seen here for as long as that takes.
    #[must_use]
    pub fn outage(&self) -> Option<Outage> {
        self.inner.outages.oldest()
    }

    /// What a queue has to say of that.
    pub(crate) fn outages(&self) -> &Outages {
        &self.inner.outages
    }

    /// The target's address.
    #[must_use]
    pub fn target(&self) -> &Endpoint {
        &self.inner.route.target
    }

    /// Time since the attach, in nanoseconds.
    #[inline]
    #[must_use]
    pub fn now_ns(&self) -> u64 {
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
