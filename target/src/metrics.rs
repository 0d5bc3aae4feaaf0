//! What the target counts and measures, for Prometheus.
//!
//! [`METRICS`] is the one table of all families: registration, `twinrail-target metrics-table` and the
//! documentation's test all read it. Labels are resolved when a handle is made ([`Metrics::lane`],
//! [`Metrics::reactor`], [`Metrics::volume`]), so that the data path only adds to numbers of its own.

use std::cell::Cell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;

use prometheus::local::{LocalHistogram, LocalIntCounter};
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use twinrail_protocol::wire::Rail;
use twinrail_protocol::{Opcode, Status};

/// What a family is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size, see [`DURATION_BUCKETS_S`].
    Histogram,
}

impl Kind {
    /// The name that Prometheus has for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A family of metrics.
#[derive(Clone, Copy, Debug)]
pub struct MetricInfo {
    /// Full name, its unit last (before `_total`).
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it means, for people.
    pub help: &'static str,
}

/// Upper bounds of the latency histograms in seconds: 5 us to 10 s, three a decade.
pub const DURATION_BUCKETS_S: [f64; 20] = [
    0.000_005, 0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
    0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

macro_rules! vec_of {
    (Counter) => {
        IntCounterVec
    };
    (Gauge) => {
        IntGaugeVec
    };
    (Histogram) => {
        HistogramVec
    };
}

macro_rules! families {
    ($($field:ident: $kind:ident, $name:literal, [$($label:literal),*], $help:literal;)*) => {
        /// All families, in the order in which the documentation lists them.
        pub const METRICS: &[MetricInfo] = &[
            $(MetricInfo { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help },)*
        ];

        #[derive(Clone, Debug)]
        struct Families { $($field: vec_of!($kind),)* }

        impl Families {
            fn register(registry: &Registry) -> prometheus::Result<Self> {
                $(let $field = Family::create(&MetricInfo {
                    name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help,
                })?;)*
                $(registry.register(Box::new(Clone::clone(&$field)))?;)*
                Ok(Self { $($field,)* })
            }
        }
    };
}

trait Family: Sized {
    fn create(info: &MetricInfo) -> prometheus::Result<Self>;
}

impl Family for IntCounterVec {
    fn create(info: &MetricInfo) -> prometheus::Result<Self> {
        Self::new(Opts::new(info.name, info.help), info.labels)
    }
}

impl Family for IntGaugeVec {
    fn create(info: &MetricInfo) -> prometheus::Result<Self> {
        Self::new(Opts::new(info.name, info.help), info.labels)
    }
}

impl Family for HistogramVec {
    fn create(info: &MetricInfo) -> prometheus::Result<Self> {
        Self::new(HistogramOpts::new(info.name, info.help).buckets(DURATION_BUCKETS_S.to_vec()), info.labels)
    }
}

families! {
    build_info: Gauge, "twinrail_target_build_info", ["version"],
        "Always 1; the label names the running version.";
    ready: Gauge, "twinrail_target_ready", [],
        "1 while sessions are served; 0 while starting and while draining.";
    sessions: Gauge, "twinrail_target_sessions", ["mode"],
        "Sessions, by how they hold their volume: exclusive, shared, read-only.";
    paths: Gauge, "twinrail_target_paths", ["rail"],
        "Connections that are the path of a queue.";
    path_switches: Counter, "twinrail_target_path_switches_total", ["to"],
        "Times that another connection became the path of a queue, by its rail.";
    reported: Counter, "twinrail_target_reported_commands_total", ["verdict"],
        "Commands that were out when a path was replaced, by what the target knew: done (answered from its record), \
         running, unknown (sent again).";
    handshakes_in_progress: Gauge, "twinrail_target_handshakes_in_progress", [],
        "Connections whose handshake isn't over.";
    handshakes: Counter, "twinrail_target_handshakes_total", ["result"],
        "Handshakes that ended: activated, standing (it stood by and was never needed), refused, timeout, crowded_out, \
         or lost when the peer hung up.";
    refusals: Counter, "twinrail_target_refusals_total", ["reason"],
        "Connections refused or dropped during the handshake, by status.";
    accept_pauses: Counter, "twinrail_target_accept_pauses_total", [],
        "Times that accepting paused because the process or the host was out of file descriptors or memory.";
    disconnects: Counter, "twinrail_target_disconnects_total", ["status"],
        "Paths that ended, by status.";
    violations: Counter, "twinrail_target_protocol_violations_total", ["status"],
        "Paths ended because the initiator broke a rule of the protocol, by status.";
    commands: Counter, "twinrail_target_commands_total", ["op", "result"],
        "Commands answered; result is ok, request (it was wrong), storage (storage failed it) or session.";
    durations: Histogram, "twinrail_target_command_duration_seconds", ["op", "rail", "stage"],
        "Time that commands spent in a stage: queue (header arrived until given to storage), storage, wire \
         (storage ended until the last byte of the reply was given to the rail).";
    read_bytes: Counter, "twinrail_target_read_bytes_total", ["rail"],
        "Payload of successful READs in bytes.";
    written_bytes: Counter, "twinrail_target_written_bytes_total", ["rail"],
        "Payload of successful WRITEs and COMPARE AND WRITEs in bytes.";
    copied_bytes: Counter, "twinrail_target_copied_bytes_total", ["rail"],
        "Payload that was copied between buffers on its way, in bytes.";
    stale_frames: Counter, "twinrail_target_stale_frames_total", ["rail"],
        "Frames dropped because they belong to an older path of their queue.";
    payload_crc_errors: Counter, "twinrail_target_payload_crc_errors_total", ["rail"],
        "Write payloads that didn't match their CRC32C; nothing was executed.";
    refused_or_replayed: Counter, "twinrail_target_refused_or_replayed_total", [],
        "Commands answered without being executed: refused as they came, or retries that got the recorded reply.";
    arena: Gauge, "twinrail_target_arena_bytes", ["reactor"],
        "Size of a reactor's buffer memory in bytes.";
    arena_free: Gauge, "twinrail_target_arena_free_bytes", ["reactor"],
        "Free part of a reactor's buffer memory in bytes.";
    commands_parked: Gauge, "twinrail_target_commands_parked", ["reactor"],
        "Commands that wait for a buffer or for their turn.";
    turns: Counter, "twinrail_target_reactor_turns_total", ["reactor"],
        "Turns of a reactor's loop.";
    spins: Counter, "twinrail_target_reactor_spins_total", ["reactor"],
        "Turns of a reactor's loop that found nothing to do.";
    sleeps: Counter, "twinrail_target_reactor_sleeps_total", ["reactor"],
        "Times that a reactor went to sleep.";
    volume_size: Gauge, "twinrail_target_volume_size_bytes", ["volume"],
        "Size of a volume in bytes.";
    storage_errors: Counter, "twinrail_target_storage_errors_total", ["volume"],
        "Commands that the storage below a volume failed.";
    failed_syncs: Counter, "twinrail_target_failed_syncs_total", ["volume"],
        "Syncs of a volume that failed; sessions with unflushed writes at that time get no successful FLUSH any more.";
    flushes: Counter, "twinrail_target_flushes_total", ["volume"],
        "FLUSH commands of a volume that succeeded.";
}

/// Part of a command's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From the arrival of its header until it is given to storage: its payload arrives, it waits for its turn.
    Queue,
    /// At storage.
    Storage,
    /// From the end of storage until the last byte of its reply was given to the rail.
    Wire,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Queue, Self::Storage, Self::Wire];

    fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Storage => "storage",
            Self::Wire => "wire",
        }
    }
}

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeEnd {
    /// The connection is a path now.
    Activated,
    /// It stood by, and is over.
    Standing,
    /// It was refused.
    Refused,
    /// The peer was silent for too long.
    Timeout,
    /// A newer connection needed its place.
    CrowdedOut,
    /// The peer hung up.
    Lost,
}

impl HandshakeEnd {
    const ALL: [Self; 6] =
        [Self::Activated, Self::Standing, Self::Refused, Self::Timeout, Self::CrowdedOut, Self::Lost];

    fn name(self) -> &'static str {
        match self {
            Self::Activated => "activated",
            Self::Standing => "standing",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::CrowdedOut => "crowded_out",
            Self::Lost => "lost",
        }
    }
}

/// The classes of statuses that commands are counted by.
const RESULTS: [&str; 4] = ["ok", "request", "storage", "session"];

fn result_of(status: Status) -> usize {
    match status.0 {
        0 => 0,
        0x0100..=0x01ff => 1,
        0x0200..=0x02ff => 2,
        _ => 3,
    }
}

/// All metrics of a target.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    families: Families,
    /// Connections whose handshake isn't over.
    pub handshakes_in_progress: IntGauge,
    /// Times that accepting paused.
    pub accept_pauses: IntCounter,
    /// 1 while sessions are served.
    pub ready: IntGauge,
}

impl Metrics {
    /// All metrics, each at zero.
    ///
    /// # Errors
    /// Two families of [`METRICS`] have the same name, or one has an impossible name.
    pub fn new() -> prometheus::Result<Arc<Self>> {
        let registry = Registry::new();
        let families = Families::register(&registry)?;
        families.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        // What is never counted would else be missing, and a rate over it would hide the first event.
        for end in HandshakeEnd::ALL {
            families.handshakes.with_label_values(&[end.name()]).reset();
        }
        for mode in ["exclusive", "shared", "read-only"] {
            families.sessions.with_label_values(&[mode]).set(0);
        }
        Ok(Arc::new(Self {
            handshakes_in_progress: families.handshakes_in_progress.with_label_values::<&str>(&[]),
            accept_pauses: families.accept_pauses.with_label_values::<&str>(&[]),
            ready: families.ready.with_label_values::<&str>(&[]),
            families,
            registry,
        }))
    }

    /// Everything in Prometheus' text format, version 0.0.4.
    ///
    /// # Errors
    /// A family can't be written; the encoder says which.
    pub fn text(&self) -> prometheus::Result<String> {
        let mut out = Vec::with_capacity(64 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut out)?;
        String::from_utf8(out).map_err(|error| prometheus::Error::Msg(error.to_string()))
    }

    /// Handles for the lanes that one thread serves on one rail; clones share their numbers.
    #[must_use]
    pub fn lane(&self, rail: Rail) -> LaneMetrics {
        let f = &self.families;
        let rail = rail.name();
        LaneMetrics(Rc::new(Tally {
            // Row 0 stands for opcodes of no version that we know.
            answered: std::array::from_fn(|op| {
                let op = Opcode(op as u8).name();
                RESULTS.map(|result| f.commands.with_label_values(&[op, result]).local())
            }),
            durations: std::array::from_fn(|op| {
                let op = Opcode::ALL[op].name();
                Stage::ALL.map(|stage| f.durations.with_label_values(&[op, rail, stage.name()]).local())
            }),
            read_bytes: f.read_bytes.with_label_values(&[rail]).local(),
            written_bytes: f.written_bytes.with_label_values(&[rail]).local(),
            paths: f.paths.with_label_values(&[rail]),
            switches: f.path_switches.with_label_values(&[rail]),
            reported: ["unknown", "running", "done"].map(|verdict| f.reported.with_label_values(&[verdict])),
            unflushed: Cell::new(0),
        }))
    }

    /// Handles for a reactor.
    #[must_use]
    pub fn reactor(&self, index: usize) -> ReactorMetrics {
        let f = &self.families;
        let label = &[index.to_string()];
        // A reactor serves one rail so far.
        let rail = &[Rail::TCP.name()];
        ReactorMetrics {
            turns: f.turns.with_label_values(label),
            spins: f.spins.with_label_values(label),
            sleeps: f.sleeps.with_label_values(label),
            arena_bytes: f.arena.with_label_values(label),
            arena_free_bytes: f.arena_free.with_label_values(label),
            parked: f.commands_parked.with_label_values(label),
            copied_bytes: f.copied_bytes.with_label_values(rail),
            stale_frames: f.stale_frames.with_label_values(rail),
            payload_crc_errors: f.payload_crc_errors.with_label_values(rail),
            refused_or_replayed: f.refused_or_replayed.with_label_values::<&str>(&[]),
            disconnects: f.disconnects.clone(),
            violations: f.violations.clone(),
        }
    }

    /// Handles for a volume.
    #[must_use]
    pub fn volume(&self, name: &str) -> VolumeMetrics {
        let f = &self.families;
        let label = &[name];
        VolumeMetrics {
            size_bytes: f.volume_size.with_label_values(label),
            storage_errors: f.storage_errors.with_label_values(label),
            failed_syncs: f.failed_syncs.with_label_values(label),
            flushes: f.flushes.with_label_values(label),
        }
    }

    /// Number of sessions that hold their volume in a mode of this name.
    #[must_use]
    pub fn sessions(&self, mode: &str) -> IntGauge {
        self.families.sessions.with_label_values(&[mode])
    }

    /// A handshake ended.
    pub fn handshake_ended(&self, end: HandshakeEnd) {
        self.families.handshakes.with_label_values(&[end.name()]).inc();
    }

    /// A connection was refused or dropped during its handshake.
    pub fn refused(&self, reason: Status) {
        self.families.refusals.with_label_values(&[reason.name()]).inc();
    }
}

/// Commands after which [`LaneMetrics`] passes on what it counted, though nobody asked it to.
const FLUSH_AFTER: u32 = 256;

/// What one thread counts for its lanes on one rail.
///
/// The numbers of each command are kept in the thread's own memory, and passed on by [`Self::flush`], which
/// the thread calls before it sleeps, and by themselves every few hundred commands.
#[derive(Clone, Debug)]
pub struct LaneMetrics(Rc<Tally>);

#[derive(Debug)]
struct Tally {
    answered: [[LocalIntCounter; RESULTS.len()]; Opcode::ALL.len() + 1],
    durations: [[LocalHistogram; Stage::ALL.len()]; Opcode::ALL.len()],
    read_bytes: LocalIntCounter,
    written_bytes: LocalIntCounter,
    paths: IntGauge,
    switches: IntCounter,
    reported: [IntCounter; 3],
    unflushed: Cell<u32>,
}

// Rows are found by the opcode's number.
const _: () = {
    let mut i = 0;
    while i < Opcode::ALL.len() {
        assert!(Opcode::ALL[i].0 as usize == i + 1);
        i += 1;
    }
};

impl LaneMetrics {
    /// A command was answered.
    pub fn answered(&self, opcode: Opcode, status: Status) {
        let rows = &self.0.answered;
        rows.get(usize::from(opcode.0)).unwrap_or(&rows[0])[result_of(status)].inc();
        self.0.unflushed.set(self.0.unflushed.get() + 1);
        if self.0.unflushed.get() >= FLUSH_AFTER {
            self.flush();
        }
    }

    /// A command that was executed is answered: how long it waited before storage, and was there.
    pub fn finished(&self, opcode: Opcode, status: Status, queue_us: u64, storage_us: u64) {
        self.observe(opcode, Stage::Queue, queue_us);
        self.observe(opcode, Stage::Storage, storage_us);
        self.answered(opcode, status);
    }

    /// A command left a stage in which it had spent `time_us` microseconds.
    pub fn observe(&self, opcode: Opcode, stage: Stage, time_us: u64) {
        let row = usize::from(opcode.0).checked_sub(1).and_then(|row| self.0.durations.get(row));
        if let Some(row) = row {
            row[stage as usize].observe(time_us as f64 * 1e-6);
        }
    }

    /// A READ succeeded, of so many bytes.
    pub fn read(&self, bytes: u64) {
        self.0.read_bytes.inc_by(bytes);
    }

    /// A WRITE or COMPARE AND WRITE succeeded, of so many bytes.
    pub fn wrote(&self, bytes: u64) {
        self.0.written_bytes.inc_by(bytes);
    }

    /// A lane has a path.
    pub fn path_began(&self) {
        self.0.paths.inc();
    }

    /// Another path took over; so many commands were unknown, running, done.
    pub fn switched(&self, verdicts: [u64; 3]) {
        self.0.switches.inc();
        for (counter, count) in self.0.reported.iter().zip(verdicts) {
            counter.inc_by(count);
        }
    }

    /// A lane's path ended.
    pub fn path_ended(&self) {
        self.0.paths.dec();
    }

    /// Passes on what was counted since the last time.
    pub fn flush(&self) {
        // What wasn't touched costs a load and a branch.
        self.0.unflushed.set(0);
        self.0.answered.iter().flatten().for_each(LocalIntCounter::flush);
        self.0.durations.iter().flatten().for_each(LocalHistogram::flush);
        self.0.read_bytes.flush();
        self.0.written_bytes.flush();
    }
}

/// What a reactor counts.
#[derive(Clone, Debug)]
pub struct ReactorMetrics {
    /// Turns of its loop.
    pub turns: IntCounter,
    /// Turns with nothing to do.
    pub spins: IntCounter,
    /// Times that it went to sleep.
    pub sleeps: IntCounter,
    /// Size of its arena in bytes.
    pub arena_bytes: IntGauge,
    /// Free part of its arena in bytes.
    pub arena_free_bytes: IntGauge,
    /// Commands that wait for a buffer or for their turn.
    pub parked: IntGauge,
    /// Payload copied between buffers, in bytes.
    pub copied_bytes: IntCounter,
    /// Frames of older paths.
    pub stale_frames: IntCounter,
    /// Write payloads that didn't match their checksum.
    pub payload_crc_errors: IntCounter,
    /// Commands answered without being executed.
    pub refused_or_replayed: IntCounter,
    disconnects: IntCounterVec,
    violations: IntCounterVec,
}

impl ReactorMetrics {
    /// A path ended.
    pub fn disconnected(&self, status: Status) {
        self.disconnects.with_label_values(&[status.name()]).inc();
    }

    /// A path ended because the initiator broke a rule.
    pub fn violated(&self, status: Status) {
        self.violations.with_label_values(&[status.name()]).inc();
    }
}

/// What is counted for a volume.
#[derive(Clone, Debug)]
pub struct VolumeMetrics {
    /// Its size in bytes.
    pub size_bytes: IntGauge,
    /// Commands that storage failed.
    pub storage_errors: IntCounter,
    /// Syncs that failed.
    pub failed_syncs: IntCounter,
    /// FLUSH commands that succeeded.
    pub flushes: IntCounter,
}

/// [`METRICS`] as a table in Markdown.
#[must_use]
pub fn markdown_table() -> String {
    let mut out = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
    for metric in METRICS {
        let labels = metric.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        let labels = if labels.is_empty() { "-" } else { &labels };
        // Writing to a string can't fail.
        let _ = writeln!(out, "| `{}` | {} | {labels} | {} |", metric.name, metric.kind.name(), metric.help);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, series: &str) -> f64 {
        let line = text.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("no {series} in\n{text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    #[test]
    fn names_have_the_prefix_a_unit_and_a_help_text() {
        for metric in METRICS {
            assert!(metric.name.starts_with("twinrail_target_"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Histogram, metric.name.ends_with("_seconds"), "{}", metric.name);
            assert!(metric.help.ends_with('.') && !metric.help.contains("  "), "{}: {:?}", metric.name, metric.help);
        }
    }

    #[test]
    fn what_a_lane_counts_is_seen_after_a_flush() {
        let metrics = Metrics::new().unwrap();
        let lane = metrics.lane(Rail::TCP);
        lane.finished(Opcode::READ, Status::OK, 3, 15);
        lane.read(4096);
        lane.clone().answered(Opcode::WRITE, Status::IO_ERROR);
        lane.finished(Opcode(77), Status::UNKNOWN_OPCODE, 0, 0);
        lane.flush();
        let text = metrics.text().unwrap();
        let commands =
            |op, result| value(&text, &format!("twinrail_target_commands_total{{op=\"{op}\",result=\"{result}\"}}"));
        assert_eq!(commands("read", "ok"), 1.0);
        assert_eq!(commands("write", "storage"), 1.0);
        assert_eq!(commands("unknown", "request"), 1.0);
        assert_eq!(value(&text, "twinrail_target_read_bytes_total{rail=\"tcp\"}"), 4096.0);
        assert_eq!(value(&text, "twinrail_target_written_bytes_total{rail=\"tcp\"}"), 0.0);
        let bucket = |bound| {
            let labels = "op=\"read\",rail=\"tcp\",stage=\"storage\"";
            value(&text, &format!("twinrail_target_command_duration_seconds_bucket{{{labels},le=\"{bound}\"}}"))
        };
        assert_eq!((bucket("0.00001"), bucket("0.00002"), bucket("+Inf")), (0.0, 1.0, 1.0));
    }

    #[test]
    fn a_busy_lane_passes_its_numbers_on_without_being_asked() {
        let metrics = Metrics::new().unwrap();
        let lane = metrics.lane(Rail::TCP);
        for _ in 0..FLUSH_AFTER {
            lane.answered(Opcode::FLUSH, Status::OK);
        }
        let text = metrics.text().unwrap();
        let series = "twinrail_target_commands_total{op=\"flush\",result=\"ok\"}";
        assert_eq!(value(&text, series), f64::from(FLUSH_AFTER));
    }

    #[test]
    fn every_family_is_registered_and_in_the_table_once() {
        let metrics = Metrics::new().unwrap();
        // A family appears once it has a member.
        let (_lane, reactor, _volume) = (metrics.lane(Rail::TCP), metrics.reactor(0), metrics.volume("disk0"));
        metrics.refused(Status::BAD_MAGIC);
        reactor.disconnected(Status::TIMEOUT);
        reactor.violated(Status::MALFORMED);
        let text = metrics.text().unwrap();
        let table = markdown_table();
        for metric in METRICS {
            assert!(text.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind.name())), "{}", metric.name);
            assert!(text.contains(&format!("# HELP {} {}\n", metric.name, metric.help)), "{}", metric.name);
            assert_eq!(table.matches(&format!("`{}`", metric.name)).count(), 1);
        }
        assert_eq!(text.matches("# TYPE ").count(), METRICS.len());
    }
}
