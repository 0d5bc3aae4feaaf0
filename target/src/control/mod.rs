//! The control plane: listens, shakes hands, owns sessions, answers Prometheus; starts and stops the whole.
//!
//! ```text
//!   listener     accepts, bounds what is unfinished        sessions      who holds what, see protocol
//!   handshake    HELLO to ACTIVATE on one connection       metrics_http  /metrics, /healthz, /readyz
//!   wire         handshake frames on a tokio socket        places        who gives way when all are taken
//!   standby      connections that wait to be a path
//! ```
//!
//! Nothing here is on the path of a command: a connection whose handshake is over belongs to its reactor.

mod handshake;
mod listener;
mod metrics_http;
mod places;
pub mod refusal;
pub mod sessions;
mod standby;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use twinrail_fallback_tcp::Options;
use twinrail_protocol::BootId;
use twinrail_protocol::limits::IN_CAPSULE_RANGE;
use twinrail_protocol::target::Limits;

use self::handshake::Host;
use self::listener::{Door, Handshakes, Reasons};
use self::metrics_http::{Observed, Readiness};
use self::sessions::Sessions;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::reactor::mailbox::{Mailbox, Message};
use crate::reactor::{Reactor, ReactorOptions};
use crate::throttle::Throttle;
use crate::volume::{OpenError, Volume, VolumeIndex, VolumeSpec, check_backings};

/// A second signal ends the process at once if it comes later than this after the first.
const IMPATIENCE: Duration = Duration::from_millis(500);
/// What a reactor gets beyond the drain's own limit to confirm it, and to let the initiators hang up.
const DRAIN_MARGIN: Duration = Duration::from_secs(3);
/// Longest time that the last sync of a volume may take.
const FINAL_SYNC_LIMIT: Duration = Duration::from_secs(60);
/// Log lines a second of sessions that begin, and of those that end: a host may attach all its volumes at once.
const SESSION_LINES: u64 = 20;
/// How often it is seen whether all reactors live.
const REACTOR_CHECK: Duration = Duration::from_secs(1);

/// Why a target doesn't start, or ends badly. Each names the thing and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A volume can't be opened.
    #[error(transparent)]
    Volume(#[from] OpenError),
    /// An address is taken.
    #[error(
        "{address} is in use by another process: end that one (`ss -ltnp` names it), or choose another with {option}"
    )]
    AddressInUse {
        /// The address.
        address: SocketAddr,
        /// The option that sets it.
        option: &'static str,
    },
    /// An address can't be listened on.
    #[error(
        "can't listen on {address}: {error}; give an address of this host and a port that is allowed with {option}"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The option that sets it.
        option: &'static str,
        /// Why. Not its source: those are printed behind it, and this would be told twice.
        error: io::Error,
    },
    /// A data-plane thread can't be started.
    #[error(
        "reactor {index} can't be started: {error}; a smaller `arena`, fewer `reactors` or a higher limit of locked \
         memory may help"
    )]
    Reactor {
        /// Which.
        index: usize,
        /// Why. Not its source: those are printed behind it, and this would be told twice.
        error: io::Error,
    },
    /// A data-plane thread ended by itself.
    #[error("reactor {index} ended; the log says why. The target stops, since half of one is worse than none")]
    ReactorEnded {
        /// Which.
        index: usize,
    },
    /// The volumes named here couldn't be synced at the end.
    #[error("the final sync failed for {0}: what was written last and not flushed may be lost")]
    FinalSync(String),
    /// Something of the system that always works.
    #[error("{what}: {error}")]
    System {
        /// What failed.
        what: &'static str,
        /// Why. Not its source: those are printed behind it, and this would be told twice.
        error: io::Error,
    },
    /// The table of metrics contradicts itself.
    #[error("the table of metrics contradicts itself")]
    Metrics(#[from] prometheus::Error),
}

/// A running target.
#[derive(Debug)]
pub struct Server {
    sessions: Arc<Sessions>,
    volumes: Arc<[Arc<Volume>]>,
    mailboxes: Arc<[Arc<Mailbox>]>,
    /// Those that run, each with its index.
    reactors: Vec<(usize, JoinHandle<()>)>,
    observed: Arc<Observed>,
    /// Accept loops; aborting them closes the listening sockets.
    listeners: JoinSet<()>,
    /// Whatever else runs as long as the server does.
    tasks: JoinSet<()>,
    addresses: Vec<SocketAddr>,
    metrics_address: Option<SocketAddr>,
    drain_timeout: Duration,
}

impl Server {
    /// Serves until SIGTERM or SIGINT comes, then finishes what is there and stops. A second signal after
    /// a moment ends the process at once.
    ///
    /// # Errors
    /// Why it doesn't start; a volume whose final sync failed.
    pub async fn run(config: Config) -> Result<(), ServeError> {
        let mut signals = Signals::new().map_err(system("can't wait for signals"))?;
        raise_file_limit();
        let give_up = Arc::new(AtomicBool::new(false));
        let mut server = tokio::select! {
            server = Self::start(config, give_up.clone()) => server?,
            name = signals.next() => {
                tracing::info!("{name}: stopped before anything was served");
                // Whoever waits for the lock of a volume stops doing so.
                give_up.store(true, Ordering::SeqCst);
                return Ok(());
            }
        };
        notify(&[NotifyState::Ready]);
        let mut check = tokio::time::interval(REACTOR_CHECK);
        let ended = loop {
            tokio::select! {
                name = signals.next() => {
                    tracing::info!("{name}: stopping; commands in flight have {:?}", server.drain_timeout);
                    break None;
                }
                _ = check.tick() => {
                    if let Some((index, _)) = server.reactors.extract_if(.., |(_, thread)| thread.is_finished()).last() {
                        break Some(ServeError::ReactorEnded { index });
                    }
                }
            }
        };
        notify(&[NotifyState::Stopping]);
        let begun = Instant::now();
        let stopping = server.stop();
        tokio::pin!(stopping);
        loop {
            tokio::select! {
                stopped = &mut stopping => return ended.map_or(stopped, Err),
                // Whoever signals a process and its group does so twice: that is no impatience.
                name = signals.next() => if begun.elapsed() >= IMPATIENCE {
                    tracing::error!("{name} again: ending at once; what wasn't flushed may be lost");
                    std::process::exit(1);
                },
            }
        }
    }

    /// Starts a target; it serves when this returns. `give_up` set to true ends the wait for volumes that
    /// other processes hold.
    ///
    /// # Errors
    /// Why it can't.
    pub async fn start(config: Config, give_up: Arc<AtomicBool>) -> Result<Self, ServeError> {
        let metrics = Metrics::new()?;
        let observed = Observed::new(metrics.clone());
        let mut tasks = JoinSet::new();
        let mut metrics_address = None;
        if let Some(address) = config.metrics {
            // First of all, so that whoever asks is told that the target is starting.
            let (listener, address) = bind(address, "--metrics")?;
            tasks.spawn(metrics_http::serve(listener, observed.clone()));
            metrics_address = Some(address);
            tracing::info!("metrics on {address}");
        }
        let volumes: Arc<[Arc<Volume>]> = open_volumes(config.volumes.clone(), give_up).await?.into();
        observed.set_volumes(&volumes);

        let mailboxes = (0..config.reactors).map(|_| Mailbox::new()).collect::<io::Result<Vec<_>>>();
        let mailboxes: Arc<[_]> = mailboxes.map_err(system("can't make an eventfd"))?.into();
        let (events, told) = mpsc::unbounded_channel();
        let cpus = cpus(&config);
        let mut reactors = Vec::with_capacity(config.reactors);
        for index in 0..config.reactors {
            let options = ReactorOptions {
                cpu: cpus.get(index).copied(),
                arena_bytes: config.arena_bytes,
                pages: config.pages,
                largest_block: largest_block(&config),
                max_transfer: config.max_transfer_bytes,
                data_window: config.data_window_bytes,
                spin_us: config.spin_us,
                stall_timeout_ms: config.stall_timeout_ms,
                probe_period_ms: config.probe_period_ms,
            };
            let (volumes, mailboxes) = (volumes.clone(), mailboxes.clone());
            let reactor = Reactor::spawn(index, options, volumes, mailboxes, events.clone(), metrics.clone());
            reactors.push((index, reactor.map_err(|error| ServeError::Reactor { index, error })?));
        }

        let limits = Limits {
            max_sessions: config.max_sessions,
            max_queues: config.max_queues_per_session,
            max_paths: config.max_connections,
            lease_ms: config.lease_ms,
            first_path_ms: config.handshake_timeout_ms,
            attach_wait_ms: config.stall_timeout_ms,
        };
        let boot_id = boot_id().map_err(system("can't read the boot id"))?;
        let sessions = Sessions::new(&volumes, mailboxes.clone(), metrics.clone(), boot_id, limits);
        tasks.spawn(sessions.clone().run(told));
        let door = Arc::new(Door {
            host: Host {
                name: config.name,
                boot_id,
                allow: config.allow,
                queue_depth: config.queue_depth,
                patience: Duration::from_millis(config.handshake_timeout_ms),
                probe_period_ms: config.probe_period_ms,
                socket: Options { congestion: config.congestion, ..Options::default() },
                sessions: sessions.clone(),
                log: Throttle::new(SESSION_LINES),
            },
            handshakes: Handshakes::new(config.max_handshakes, Some(metrics.handshakes_in_progress.clone())),
            metrics,
            log: Reasons::default(),
        });
        let (mut listeners, mut addresses) = (JoinSet::new(), Vec::new());
        for address in config.listen {
            let (listener, address) = bind(address, "--listen")?;
            listeners.spawn(listener::accept(door.clone(), listener));
            addresses.push(address);
        }
        observed.set_readiness(Readiness::Serving);
        for address in &addresses {
            tracing::info!("listening on {address}");
        }
        Ok(Self {
            sessions,
            volumes,
            mailboxes,
            reactors,
            observed,
            listeners,
            tasks,
            addresses,
            metrics_address,
            drain_timeout: Duration::from_millis(config.drain_timeout_ms),
        })
    }

    /// Where it listens, with the real ports.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Where it answers Prometheus, with the real port.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Takes nothing new, finishes what is there, puts everything on stable storage.
    ///
    /// # Errors
    /// [`ServeError::FinalSync`].
    pub async fn stop(mut self) -> Result<(), ServeError> {
        self.observed.set_readiness(Readiness::Draining);
        self.listeners.shutdown().await;
        self.sessions.drain();
        self.drain_reactors().await;
        let failed = final_syncs(&self.volumes).await;
        self.tasks.shutdown().await;
        if failed.is_empty() {
            tracing::info!("stopped; all volumes are synced");
            return Ok(());
        }
        Err(ServeError::FinalSync(failed.join(", ")))
    }

    async fn drain_reactors(&mut self) {
        let limit_ms = u64::try_from(self.drain_timeout.as_millis()).unwrap_or(u64::MAX);
        let drains: Vec<_> = self
            .reactors
            .drain(..)
            .map(|(index, thread)| {
                let (done, drained) = oneshot::channel();
                self.mailboxes[index].send(Message::Drain { done, limit_ms });
                (index, drained, thread)
            })
            .collect();
        let limit = Instant::now() + self.drain_timeout + DRAIN_MARGIN;
        let mut threads = Vec::with_capacity(drains.len());
        for (index, drained, thread) in drains {
            // An error says that the reactor is gone: then it does nothing any more either.
            let _ = timeout_at(limit, drained).await;
            threads.push((index, thread));
        }
        // Not before: until the last one has drained, exclusive commands need all of them.
        threads.iter().for_each(|&(index, _)| self.mailboxes[index].send(Message::Stop));
        for (index, thread) in threads {
            let ended = tokio::task::spawn_blocking(move || thread.join());
            if timeout_at(limit, ended).await.is_err() {
                tracing::error!(reactor = index, "a reactor still has commands at storage; it is left behind");
            }
        }
    }
}

/// Opens all volumes at the same time: some may have to wait for their locks.
async fn open_volumes(specs: Vec<VolumeSpec>, give_up: Arc<AtomicBool>) -> Result<Vec<Arc<Volume>>, OpenError> {
    check_backings(&specs)?;
    let opening: Vec<_> = specs
        .into_iter()
        .enumerate()
        .map(|(index, spec)| {
            let give_up = give_up.clone();
            tokio::task::spawn_blocking(move || {
                let opened = Volume::open(VolumeIndex(index), &spec, &|| give_up.load(Ordering::SeqCst));
                if opened.is_err() {
                    // Nothing is served without all of them: the others need not wait any longer.
                    give_up.store(true, Ordering::SeqCst);
                }
                opened
            })
        })
        .collect();
    let (mut volumes, mut error) = (Vec::new(), None);
    for opened in opening {
        match opened.await {
            Ok(Ok(volume)) => {
                tracing::info!(
                    volume = volume.name,
                    backing = volume.backing(),
                    size_bytes = volume.geometry.size,
                    logical_block = volume.geometry.logical_block,
                    read_only = volume.read_only(),
                    write_through = volume.write_through(),
                    id = %volume.id,
                    "volume open"
                );
                volumes.push(Arc::new(volume));
            }
            // That one gave up because of another: not the reason.
            Ok(Err(why @ OpenError::GaveUp { .. })) => error = error.or(Some(why)),
            Ok(Err(why)) => {
                let known = error.take().filter(|known| !matches!(known, OpenError::GaveUp { .. }));
                error = known.or(Some(why));
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    error.map_or(Ok(volumes), Err)
}

/// Syncs all volumes; gives the names of those that failed.
async fn final_syncs(volumes: &[Arc<Volume>]) -> Vec<String> {
    let syncing: Vec<_> = volumes
        .iter()
        .map(|volume| {
            let synced = volume.clone();
            let sync = tokio::task::spawn_blocking(move || {
                let outcome = synced.keeper.final_sync();
                synced.keeper.stop();
                outcome
            });
            (volume, sync)
        })
        .collect();
    let mut failed = Vec::new();
    for (volume, sync) in syncing {
        if !matches!(timeout(FINAL_SYNC_LIMIT, sync).await, Ok(Ok(Ok(())))) {
            failed.push(format!("{:?} ({})", volume.name, volume.backing()));
        }
    }
    failed
}

fn bind(address: SocketAddr, option: &'static str) -> Result<(TcpListener, SocketAddr), ServeError> {
    let listen = || {
        let listener = listener::listen(address)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    listen().map_err(|error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => ServeError::AddressInUse { address, option },
        _ => ServeError::Listen { address, option, error },
    })
}

/// The largest piece of memory that a reactor takes from its arena, in bytes: a transfer, or the in-capsule
/// buffers of one queue.
fn largest_block(config: &Config) -> u32 {
    config.max_transfer_bytes.max(u32::from(config.queue_depth) * IN_CAPSULE_RANGE.end())
}

/// The processors that reactors are pinned to, one each; none if they aren't to be pinned.
fn cpus(config: &Config) -> Vec<usize> {
    if !config.pin {
        return Vec::new();
    }
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    if config.reactors > cpus.len() {
        tracing::warn!(
            reactors = config.reactors,
            cpus = cpus.len(),
            "there are more reactors than processors: they aren't pinned"
        );
        return Vec::new();
    }
    cpus
}

/// What changes when the host reboots.
fn boot_id() -> io::Result<BootId> {
    parse_boot_id(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?)
        .ok_or_else(|| io::Error::other("the kernel's boot id is no UUID"))
}

fn parse_boot_id(text: &str) -> Option<BootId> {
    let digits: Vec<u8> = text.trim().bytes().filter(|&b| b != b'-').collect();
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.as_chunks::<2>().0) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    (digits.len() == 32).then_some(BootId(id))
}

/// Each connection needs a descriptor, and the default limit is for programs that still use select(2).
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files can't be raised to its maximum");
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ServeError {
    move |error| ServeError::System { what, error }
}

/// Tells systemd, if it started us.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::warn!(%error, "systemd can't be told");
    }
}

/// The signals that end a target.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The name of the next one.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests;
