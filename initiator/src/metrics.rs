//! What the initiator counts and measures, for Prometheus.
//!
//! [`METRICS`] is the one table of all families: registration and documentation both read it. Labels are
//! resolved once, when a queue gets its handles; what each command adds stays with its queue's thread and is
//! passed on a few times a second.

use std::sync::Arc;

use prometheus::local::{LocalHistogram, LocalIntCounter};
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use twinrail_protocol::wire::Rail;
use twinrail_protocol::{Opcode, Status};

use crate::error::PathEnd;

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

/// Upper bounds of the latency histograms in seconds: 5 us to 10 s, three a decade; the target's are the same.
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

        #[derive(Debug)]
        struct Families { $($field: vec_of!($kind),)* }

        impl Families {
            fn register(registry: &Registry) -> prometheus::Result<Self> {
                $(let $field: vec_of!($kind) = Family::create($name, $help, &[$($label),*])?;
                registry.register(Box::new($field.clone()))?;)*
                Ok(Self { $($field,)* })
            }
        }
    };
}

trait Family: Sized {
    fn create(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<Self>;
}

impl Family for IntCounterVec {
    fn create(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<Self> {
        Self::new(Opts::new(name, help), labels)
    }
}

impl Family for IntGaugeVec {
    fn create(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<Self> {
        Self::new(Opts::new(name, help), labels)
    }
}

impl Family for HistogramVec {
    fn create(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<Self> {
        Self::new(HistogramOpts::new(name, help).buckets(DURATION_BUCKETS_S.to_vec()), labels)
    }
}

families! {
    build_info: Gauge, "twinrail_initiator_build_info", ["version"],
        "Always 1; the label names the running version.";
    sessions: Gauge, "twinrail_initiator_sessions", [],
        "Volumes that are attached.";
    paths: Gauge, "twinrail_initiator_paths", ["rail"],
        "Connections that are the path of a queue.";
    path_ends: Counter, "twinrail_initiator_path_ends_total", ["rail", "reason"],
        "Paths that ended: lost, closed_by_target, disconnected, violation, silent, sibling, closed (in order), \
         given_up (by fail-fast, or since the target didn't take the session back), aborted.";
    dials: Counter, "twinrail_initiator_dials_total", ["result"],
        "Connections that were to replace a path: opened or failed.";
    path_switches: Counter, "twinrail_initiator_path_switches_total", ["from", "to", "cause"],
        "Times that another connection became the path of a queue, by rails and by why the one before was left.";
    blackouts: Histogram, "twinrail_initiator_switch_blackout_seconds", ["to"],
        "Time from the last progress on a path that was lost until its successor served.";
    reported: Counter, "twinrail_initiator_reported_commands_total", ["verdict"],
        "Commands that were out when a path was replaced, by what the target knew: done (answered from its record), \
         running, unknown (sent again).";
    alarms: Counter, "twinrail_initiator_alarms_total", ["reason"],
        "Times that something needs a person's eyes: silence, no_path, draining.";
    commands: Counter, "twinrail_initiator_commands_total", ["op", "result"],
        "Commands that ended; result is ok, request (it was wrong), storage (storage failed it), session or lost.";
    durations: Histogram, "twinrail_initiator_command_duration_seconds", ["op", "rail", "stage"],
        "Time that commands spent in a stage: queue (until given to the rail), wire (from there until the reply, \
         the target included), total.";
    read_bytes: Counter, "twinrail_initiator_read_bytes_total", ["rail"],
        "Payload of replies in bytes.";
    written_bytes: Counter, "twinrail_initiator_written_bytes_total", ["rail"],
        "Payload of successful WRITEs and COMPARE AND WRITEs in bytes.";
    copied_bytes: Counter, "twinrail_initiator_copied_bytes_total", ["reason"],
        "Payload copied between buffers on its way, in bytes: staged (it came with its header, or was read ahead), \
         unregistered (the caller's memory isn't the arena's).";
    crc_mismatches: Counter, "twinrail_initiator_payload_crc_mismatches_total", ["rail", "op"],
        "Payloads that arrived damaged, found here (read) or by the target (write).";
    resubmissions: Counter, "twinrail_initiator_resubmissions_total", ["rail"],
        "Commands sent again because a payload was damaged.";
    stale_frames: Counter, "twinrail_initiator_stale_frames_total", ["rail"],
        "Frames dropped because they belong to an older path of their queue.";
    in_flight: Gauge, "twinrail_initiator_commands_in_flight", [],
        "Commands that have a slot.";
    granted_slots: Gauge, "twinrail_initiator_granted_slots", [],
        "Slots that the target has granted.";
    window_used: Gauge, "twinrail_initiator_data_window_used_bytes", [],
        "Part of the data window that is in use, in bytes.";
    probes: Counter, "twinrail_initiator_probes_total", ["rail"],
        "Probes sent.";
    spins: Counter, "twinrail_initiator_spins_total", ["result"],
        "Times that a queue's thread looked for work before it would sleep; result is found or slept.";
    sleeps: Counter, "twinrail_initiator_sleeps_total", [],
        "Times that a queue's thread went to sleep.";
}

/// The classes of statuses that commands are counted by.
const RESULTS: [&str; 5] = ["ok", "request", "storage", "session", "lost"];

fn result_of(status: Status) -> usize {
    match status.0 {
        0 => 0,
        0x0100..=0x01ff => 1,
        0x0200..=0x02ff => 2,
        _ if status == Status::CONNECTION_LOST => 4,
        _ => 3,
    }
}

/// Stages of a command's life, see the help text of the histogram.
const STAGES: [&str; 3] = ["queue", "wire", "total"];

/// All metrics of the volumes that share them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    registry: Registry,
    families: Families,
    sessions: IntGauge,
    unregistered_bytes: IntCounter,
}

impl Metrics {
    /// All metrics, each at zero.
    ///
    /// # Errors
    /// Two families of [`METRICS`] have the same name, or one has an impossible name.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let families = Families::register(&registry)?;
        families.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let sessions = families.sessions.with_label_values::<&str>(&[]);
        let unregistered_bytes = families.copied_bytes.with_label_values(&["unregistered"]);
        Ok(Self { inner: Arc::new(Inner { registry, families, sessions, unregistered_bytes }) })
    }

    /// Everything in Prometheus' text format, version 0.0.4.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = Vec::with_capacity(32 << 10);
        // Only a family without members makes the encoder complain, and `gather` leaves those out.
        if let Err(error) = TextEncoder::new().encode(&self.inner.registry.gather(), &mut out) {
            tracing::error!(%error, "the metrics can't be written");
        }
        String::from_utf8_lossy(&out).into_owned()
    }

    /// Volumes that are attached.
    pub(crate) fn sessions(&self) -> &IntGauge {
        &self.inner.sessions
    }

    /// Bytes copied because the caller's memory isn't an arena's.
    pub(crate) fn unregistered_bytes(&self) -> &IntCounter {
        &self.inner.unregistered_bytes
    }

    /// Another connection became the path of a queue.
    pub(crate) fn switched(&self, from: &str, to: &str, cause: &str, blackout_us: u64) {
        let f = &self.inner.families;
        f.path_switches.with_label_values(&[from, to, cause]).inc();
        f.blackouts.with_label_values(&[to]).observe(blackout_us as f64 * 1e-6);
    }

    /// Handles for a queue on a rail.
    pub(crate) fn queue(&self, rail: Rail) -> QueueMetrics {
        let f = &self.inner.families;
        let rail = rail.name();
        let alarm = |reason| f.alarms.with_label_values(&[reason]);
        let (silence, no_path, draining) = (alarm("silence"), alarm("no_path"), alarm("draining"));
        let reported = |verdict| f.reported.with_label_values(&[verdict]);
        let paths = f.paths.with_label_values(&[rail]);
        paths.inc();
        let ends = [
            "lost",
            "closed_by_target",
            "disconnected",
            "violation",
            "sibling",
            "closed",
            "aborted",
            "silent",
            "given_up",
        ];
        QueueMetrics {
            ended: std::array::from_fn(|op| {
                let op = Opcode(op as u8).name();
                RESULTS.map(|result| f.commands.with_label_values(&[op, result]).local())
            }),
            durations: std::array::from_fn(|op| {
                let op = Opcode(op as u8).name();
                STAGES.map(|stage| f.durations.with_label_values(&[op, rail, stage]).local())
            }),
            read_bytes: f.read_bytes.with_label_values(&[rail]).local(),
            written_bytes: f.written_bytes.with_label_values(&[rail]).local(),
            staged_bytes: f.copied_bytes.with_label_values(&["staged"]).local(),
            crc_read: f.crc_mismatches.with_label_values(&[rail, "read"]),
            crc_write: f.crc_mismatches.with_label_values(&[rail, "write"]),
            resubmissions: f.resubmissions.with_label_values(&[rail]),
            stale_frames: f.stale_frames.with_label_values(&[rail]),
            probes: f.probes.with_label_values(&[rail]),
            silence,
            no_path,
            draining,
            dials: f.dials.with_label_values(&["opened"]),
            dials_failed: f.dials.with_label_values(&["failed"]),
            reported: [reported("unknown"), reported("running"), reported("done")],
            spins_found: f.spins.with_label_values(&["found"]).local(),
            spins_slept: f.spins.with_label_values(&["slept"]).local(),
            sleeps: f.sleeps.with_label_values::<&str>(&[]).local(),
            in_flight: Share::of(&f.in_flight),
            granted_slots: Share::of(&f.granted_slots),
            window_used: Share::of(&f.window_used),
            paths,
            path_ends: ends.map(|end| f.path_ends.with_label_values(&[rail, end])),
            dirty: false,
        }
    }
}

/// A queue's share of a gauge that all queues add up in.
#[derive(Debug)]
pub(crate) struct Share {
    gauge: IntGauge,
    now: i64,
}

impl Share {
    fn of(family: &IntGaugeVec) -> Self {
        Self { gauge: family.with_label_values::<&str>(&[]), now: 0 }
    }

    fn set(&mut self, value: i64) {
        if value != self.now {
            self.gauge.add(value - self.now);
            self.now = value;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// What one queue counts. Everything that each command adds stays here until [`Self::flush`].
#[derive(Debug)]
pub(crate) struct QueueMetrics {
    // Row 0 stands for opcodes of no version that we know.
    ended: [[LocalIntCounter; RESULTS.len()]; Opcode::ALL.len() + 1],
    durations: [[LocalHistogram; STAGES.len()]; Opcode::ALL.len() + 1],
    read_bytes: LocalIntCounter,
    written_bytes: LocalIntCounter,
    pub(crate) staged_bytes: LocalIntCounter,
    pub(crate) crc_read: IntCounter,
    pub(crate) crc_write: IntCounter,
    pub(crate) resubmissions: IntCounter,
    pub(crate) stale_frames: IntCounter,
    pub(crate) probes: IntCounter,
    pub(crate) silence: IntCounter,
    pub(crate) no_path: IntCounter,
    pub(crate) dials: IntCounter,
    pub(crate) dials_failed: IntCounter,
    reported: [IntCounter; 3],
    pub(crate) draining: IntCounter,
    pub(crate) spins_found: LocalIntCounter,
    pub(crate) spins_slept: LocalIntCounter,
    pub(crate) sleeps: LocalIntCounter,
    in_flight: Share,
    granted_slots: Share,
    window_used: Share,
    paths: IntGauge,
    path_ends: [IntCounter; 9],
    dirty: bool,
}

// Rows are found by the opcode's number.
const _: () = {
    let mut i = 0;
    while i < Opcode::ALL.len() {
        assert!(Opcode::ALL[i].0 as usize == i + 1);
        i += 1;
    }
};

/// A command that has ended, as it is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) opcode: Opcode,
    pub(crate) status: Status,
    /// Time from the submission to the rail, in nanoseconds.
    pub(crate) queue_ns: u64,
    /// Time from there to the reply, in nanoseconds.
    pub(crate) wire_ns: u64,
    /// Payload that was written, in bytes.
    pub(crate) written: u32,
    /// Payload that was read, in bytes.
    pub(crate) read: u32,
}

impl QueueMetrics {
    #[inline]
    pub(crate) fn ended(&mut self, ended: &Ended) {
        let row = usize::from(ended.opcode.0);
        let row = if row < self.ended.len() { row } else { 0 };
        self.ended[row][result_of(ended.status)].inc();
        if ended.status != Status::CONNECTION_LOST {
            let [queue, wire, total] = &self.durations[row];
            queue.observe(ended.queue_ns as f64 * 1e-9);
            wire.observe(ended.wire_ns as f64 * 1e-9);
            total.observe((ended.queue_ns + ended.wire_ns) as f64 * 1e-9);
        }
        if ended.read > 0 {
            self.read_bytes.inc_by(ended.read.into());
        }
        if ended.written > 0 && ended.status.is_ok() {
            self.written_bytes.inc_by(ended.written.into());
        }
        self.dirty = true;
    }

    /// The queue's path has ended.
    pub(crate) fn path_ended(&mut self, end: &PathEnd) {
        self.paths.dec();
        let index = match end {
            PathEnd::Io { .. } => 0,
            PathEnd::ClosedByTarget => 1,
            PathEnd::Disconnected { .. } => 2,
            PathEnd::Violation(_) => 3,
            PathEnd::Sibling => 4,
            PathEnd::Closed => 5,
            PathEnd::Aborted => 6,
            PathEnd::Silent | PathEnd::LostByTarget => 7,
            PathEnd::NotTakenBack { .. } | PathEnd::FailFast { .. } => 8,
        };
        self.path_ends[index].inc();
    }

    /// Another path serves the queue; the target knew so many of its commands not at all, as running, as done.
    pub(crate) fn path_began(&mut self, [unknown, running, done]: [u64; 3]) {
        self.paths.inc();
        for (counter, count) in self.reported.iter().zip([unknown, running, done]) {
            counter.inc_by(count);
        }
    }

    /// The queue has ended.
    pub(crate) fn queue_ended(&mut self) {
        self.levels(0, 0, 0);
        self.flush();
    }

    /// What is in use now.
    pub(crate) fn levels(&mut self, in_flight: u16, granted_slots: u16, window_used: u64) {
        self.in_flight.set(in_flight.into());
        self.granted_slots.set(granted_slots.into());
        self.window_used.set(i64::try_from(window_used).unwrap_or(i64::MAX));
    }

    /// A command was submitted: what is in use isn't what was passed on last.
    #[inline]
    pub(crate) fn touch(&mut self) {
        self.dirty = true;
    }

    /// Whether something has changed that [`Self::flush`] has not passed on.
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Passes on what was counted since the last time.
    pub(crate) fn flush(&mut self) {
        // What wasn't touched costs a load and a branch.
        self.dirty = false;
        self.ended.iter().flatten().for_each(LocalIntCounter::flush);
        self.durations.iter().flatten().for_each(LocalHistogram::flush);
        for counter in [
            &self.read_bytes,
            &self.written_bytes,
            &self.staged_bytes,
            &self.spins_found,
            &self.spins_slept,
            &self.sleeps,
        ] {
            counter.flush();
        }
    }
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
            assert!(metric.name.starts_with("twinrail_initiator_"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Histogram, metric.name.ends_with("_seconds"), "{}", metric.name);
            assert!(metric.help.ends_with('.') && !metric.help.contains("  "), "{}: {:?}", metric.name, metric.help);
        }
    }

    #[test]
    fn what_a_queue_counts_is_seen_after_a_flush_and_levels_end_with_it() {
        let metrics = Metrics::new().unwrap();
        let mut queue = metrics.queue(Rail::TCP);
        let (opcode, status) = (Opcode::READ, Status::OK);
        queue.ended(&Ended { opcode, status, queue_ns: 3_000, wire_ns: 15_000, written: 0, read: 4096 });
        let (opcode, status) = (Opcode::WRITE, Status::CONNECTION_LOST);
        queue.ended(&Ended { opcode, status, queue_ns: 0, wire_ns: 0, written: 512, read: 0 });
        queue.levels(3, 128, 77);
        assert!(queue.is_dirty());
        queue.flush();
        let text = metrics.render();
        assert_eq!(value(&text, "twinrail_initiator_commands_total{op=\"read\",result=\"ok\"}"), 1.0);
        assert_eq!(value(&text, "twinrail_initiator_commands_total{op=\"write\",result=\"lost\"}"), 1.0);
        assert_eq!(value(&text, "twinrail_initiator_read_bytes_total{rail=\"tcp\"}"), 4096.0);
        assert_eq!(value(&text, "twinrail_initiator_written_bytes_total{rail=\"tcp\"}"), 0.0);
        assert_eq!(value(&text, "twinrail_initiator_granted_slots"), 128.0);
        let bucket = |stage, bound| {
            let labels = format!("op=\"read\",rail=\"tcp\",stage=\"{stage}\",le=\"{bound}\"");
            value(&text, &format!("twinrail_initiator_command_duration_seconds_bucket{{{labels}}}"))
        };
        assert_eq!((bucket("total", "0.00001"), bucket("total", "0.00002")), (0.0, 1.0));
        assert_eq!((bucket("queue", "0.000005"), bucket("wire", "0.000005")), (1.0, 0.0));
        queue.path_ended(&PathEnd::ClosedByTarget);
        queue.queue_ended();
        drop(queue);
        let text = metrics.render();
        assert_eq!(value(&text, "twinrail_initiator_paths{rail=\"tcp\"}"), 0.0);
        assert_eq!(value(&text, "twinrail_initiator_granted_slots"), 0.0);
        let series = "twinrail_initiator_path_ends_total{rail=\"tcp\",reason=\"closed_by_target\"}";
        assert_eq!(value(&text, series), 1.0);
    }

    #[test]
    fn every_family_is_registered_once() {
        let metrics = Metrics::new().unwrap();
        // A family appears once it has a member.
        let _queue = metrics.queue(Rail::TCP);
        metrics.switched("tcp", "tcp", "disconnected", 1_000);
        let text = metrics.render();
        for metric in METRICS {
            assert!(text.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind.name())), "{}", metric.name);
            assert!(text.contains(&format!("# HELP {} {}\n", metric.name, metric.help)), "{}", metric.name);
        }
        assert_eq!(text.matches("# TYPE ").count(), METRICS.len());
    }
}
