//! What a bench tells.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::size::Shown;

/// The result. The names are those of the JSON object, which scripts rely on.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) url: String,
    pub(super) pattern: &'static str,
    pub(super) read_percent: u8,
    pub(super) block_size: u64,
    pub(super) queues: usize,
    /// Of each queue.
    pub(super) depth: u16,
    pub(super) rail: &'static str,
    pub(super) congestion: Option<String>,
    /// Requests that succeeded.
    pub(super) ios: u64,
    pub(super) errors: u64,
    pub(super) seconds: f64,
    pub(super) iops: f64,
    pub(super) mib_per_s: f64,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
    /// Processor seconds of this process.
    pub(super) cpu_seconds: f64,
    pub(super) cpu_seconds_per_million_ios: Option<f64>,
    /// Processor seconds of the target, if it is local.
    pub(super) target_cpu_seconds: Option<f64>,
    pub(super) target_pid: Option<u32>,
}

impl Report {
    pub(super) fn fill(
        &mut self,
        latency_ns: &Histogram<u64>,
        elapsed: Duration,
        cpu_seconds: f64,
        target_cpu_seconds: Option<f64>,
    ) {
        let us = |ns: u64| ns as f64 / 1e3;
        self.ios = latency_ns.len();
        self.seconds = elapsed.as_secs_f64();
        self.iops = self.ios as f64 / self.seconds.max(1e-9);
        self.mib_per_s = self.iops * self.block_size as f64 / (1 << 20) as f64;
        self.mean_us = latency_ns.mean() / 1e3;
        self.p50_us = us(latency_ns.value_at_quantile(0.5));
        self.p99_us = us(latency_ns.value_at_quantile(0.99));
        self.p999_us = us(latency_ns.value_at_quantile(0.999));
        self.max_us = us(latency_ns.max());
        self.cpu_seconds = cpu_seconds;
        self.cpu_seconds_per_million_ios = self.per_million(cpu_seconds);
        self.target_cpu_seconds = target_cpu_seconds;
    }

    /// Requests that ended, one way or the other.
    pub(super) fn tried(&self) -> u64 {
        self.ios + self.errors
    }

    fn per_million(&self, seconds: f64) -> Option<f64> {
        (self.ios > 0).then(|| seconds / self.ios as f64 * 1e6)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, pattern, read_percent, queues, depth, rail, .. } = self;
        let requests = match read_percent {
            100 => "reads".to_owned(),
            0 => "writes".to_owned(),
            percent => format!("requests, {percent} % of them reads"),
        };
        writeln!(f, "{url}: {pattern} {requests} of {}", Shown(self.block_size))?;
        let congestion = self.congestion.as_ref().map_or(String::new(), |name| format!(", {name}"));
        writeln!(f, "  queues     {queues}, each with {depth} in flight, over {rail}{congestion}")?;
        writeln!(f, "  requests   {} in {:.2} s, {} failed", self.ios, self.seconds, self.errors)?;
        writeln!(f, "  rate       {:.0} IOPS, {:.1} MiB/s", self.iops, self.mib_per_s)?;
        let Self { mean_us, p50_us, p99_us, p999_us, max_us, .. } = self;
        writeln!(
            f,
            "  latency    mean {mean_us:.1} us, p50 {p50_us:.1}, p99 {p99_us:.1}, p99.9 {p999_us:.1}, max {max_us:.1}"
        )?;
        let cpu = |f: &mut fmt::Formatter<'_>, seconds: f64| {
            write!(f, "{seconds:.2} s")?;
            match self.per_million(seconds) {
                Some(each) => write!(f, ", {each:.2} s for a million requests"),
                None => Ok(()),
            }
        };
        write!(f, "  processor  here ")?;
        cpu(f, self.cpu_seconds)?;
        match self.target_cpu_seconds {
            Some(seconds) => {
                write!(f, "\n             target ")?;
                cpu(f, seconds)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_from_the_latencies() {
        let mut latency_ns = Histogram::<u64>::new(3).unwrap();
        for us in 1..=1000 {
            latency_ns.record(us * 1000).unwrap();
        }
        let mut report = Report { block_size: 4096, ..Report::default() };
        report.fill(&latency_ns, Duration::from_millis(500), 0.002, Some(0.01));
        assert_eq!((report.ios, report.iops), (1000, 2000.0));
        assert!((report.mib_per_s - 7.8125).abs() < 1e-9);
        assert!((report.p50_us - 500.0).abs() < 1.0 && (report.p99_us - 990.0).abs() < 2.0, "{report:?}");
        assert!((report.max_us - 1000.0).abs() < 1.0 && (report.mean_us - 500.5).abs() < 1.0, "{report:?}");
        assert!((report.cpu_seconds_per_million_ios.unwrap() - 2.0).abs() < 1e-9);
        let text = report.to_string();
        assert!(text.contains("2000 IOPS") && text.contains("target 0.01 s, 10.00 s for a million"), "{text}");
    }

    #[test]
    fn nothing_measured_is_no_division_by_zero() {
        let mut report = Report { block_size: 4096, ..Report::default() };
        report.fill(&Histogram::new(3).unwrap(), Duration::ZERO, 0.0, None);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((json["iops"].as_f64(), json["cpu_seconds_per_million_ios"].is_null()), (Some(0.0), true));
        assert!(json["target_cpu_seconds"].is_null());
    }

    #[test]
    fn the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(Report::default()).unwrap();
        let names = "ios seconds iops mib_per_s p50_us p99_us p999_us max_us mean_us cpu_seconds target_cpu_seconds \
                     cpu_seconds_per_million_ios queues depth block_size pattern read_percent rail congestion errors";
        for name in names.split_whitespace() {
            assert!(json.get(name).is_some(), "{name} is missing");
        }
    }
}
