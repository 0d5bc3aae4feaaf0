//! How a volume is attached, and how the library goes about its work.

use std::num::NonZero;
use std::time::Duration;
use std::{fs, io, thread};

use rustix::net::{self, AddressFamily, SocketType, sockopt};
use twinrail_protocol::VolumeId;
use twinrail_protocol::initiator::rails;
use twinrail_protocol::limits::{MAX_DEPTH, MAX_NAME, MAX_QUEUES};
use twinrail_protocol::liveness::Liveness;
use twinrail_protocol::wire::AttachMode;

use crate::arena::Pages;
use crate::metrics::Metrics;

/// Options of an attach. Every field has a default that fits a disk for one virtual machine or container.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queues, each with a connection and a thread of its own, 1 to [`MAX_QUEUES`]; the target may give
    /// fewer. By default half the cores, four at most: a thread takes a core while its queue is busy and
    /// the host has other work, and four connections are more than a 100 Gbit/s link holds.
    pub queues: u16,
    /// Commands that each queue may have in flight, 1 to [`MAX_DEPTH`]; the target may grant fewer. 128
    /// keep one fast drive busy at twice the latency it has when idle.
    pub depth: u16,
    /// How the volume is held.
    pub mode: AttachMode,
    /// Whether writers that stand in the way are fenced off (their held commands fail).
    pub preempt: bool,
    /// Name that the target knows this initiator by, 1 to [`MAX_NAME`] bytes: by default the host's name
    /// and the process id.
    pub name: String,
    /// The volume's UUID, when another volume of the same name must not be taken for it.
    pub expected_volume: VolumeId,
    /// Memory for buffers in bytes, of which [`crate::Volume::buffer`] gives pieces. 64 MiB hold 64
    /// transfers of 1 MiB.
    pub arena_bytes: usize,
    /// Pages of that memory.
    pub pages: Pages,
    /// How long dialing, and each answer of the handshake but ATTACHED, may take, in milliseconds. 5 s
    /// outlast one lost SYN and its second repeat.
    pub connect_timeout_ms: u64,
    /// How long the answer to ATTACH may take, in milliseconds. The target answers when every command of
    /// the sessions it had to end has left its storage, which a slow disk delays.
    pub attach_timeout_ms: u64,
    /// How long a queue may be without a path that answers before the session ends, every command with an unknown
    /// outcome; `None`, the default, holds commands for ever: a block device that errors turns file systems
    /// read-only.
    pub fail_fast: Option<Duration>,
    /// How long [`crate::Volume::close`] may take, in milliseconds; then the connections are cut.
    pub close_timeout_ms: u64,
    /// How often an idle connection is probed, in milliseconds. One that gives no answer for
    /// [`Liveness::LOST_AFTER`] periods, while another one does, is left.
    pub probe_period_ms: u64,
    /// How long a queue's thread looks for the next reply before it sleeps, in microseconds at most; 0
    /// never. Sleeping costs about 10 us, so that more than a few of them is only worth it for latency.
    pub spin_us: u32,
    /// Congestion control of the connections; `None` leaves the kernel's default. By default `cubic` if the
    /// kernel has it; see [`twinrail_fallback_tcp::Options::congestion`] for why.
    pub congestion: Option<String>,
    /// Where the numbers go: volumes that share one add up in it. `None` makes one for this volume.
    pub metrics: Option<Metrics>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: default_queues(),
            depth: 128,
            mode: AttachMode::EXCLUSIVE,
            preempt: false,
            name: default_name(),
            expected_volume: VolumeId::NIL,
            arena_bytes: 64 << 20,
            pages: Pages::Transparent,
            connect_timeout_ms: 5_000,
            attach_timeout_ms: 60_000,
            fail_fast: None,
            close_timeout_ms: 30_000,
            probe_period_ms: Liveness::PERIOD_MS,
            spin_us: 50,
            congestion: Some("cubic").filter(|name| try_congestion(name).is_ok()).map(str::to_owned),
            metrics: None,
        }
    }
}

fn default_queues() -> u16 {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    (cores / 2).clamp(1, 4) as u16
}

fn default_name() -> String {
    let system = rustix::system::uname();
    let mut name = format!("{}-{}", system.nodename().to_string_lossy(), rustix::process::getpid());
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    name
}

/// Whether the kernel takes a congestion control from this process, and what it says if not. Only a try tells: root
/// may use what is loaded by it, others only what the administrator allows.
fn try_congestion(name: &str) -> io::Result<()> {
    // Where there are no sockets to try it on, connections have their own error.
    let Ok(socket) = net::socket(AddressFamily::INET, SocketType::STREAM, None) else { return Ok(()) };
    Ok(sockopt::set_tcp_congestion(socket, name)?)
}

/// An option has a value that it can't have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("option `{option}` is {value}: {rule}")]
pub struct OptionError {
    /// The option's name.
    pub option: &'static str,
    /// Its value.
    pub value: String,
    /// What it must be.
    pub rule: String,
}

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    /// The first option that has a value it can't have.
    pub fn check(&self) -> Result<(), OptionError> {
        let within = |option, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(OptionError {
                option,
                value: value.to_string(),
                rule: format!("it must be from {least} to {most}"),
            }),
        };
        within("queues", self.queues.into(), 1, MAX_QUEUES.into())?;
        within("depth", self.depth.into(), 1, MAX_DEPTH.into())?;
        within("arena_bytes", self.arena_bytes as u64, 1 << 20, 1 << 40)?;
        within("connect_timeout_ms", self.connect_timeout_ms, 1, 3_600_000)?;
        within("attach_timeout_ms", self.attach_timeout_ms, 1, 3_600_000)?;
        within("close_timeout_ms", self.close_timeout_ms, 1, 3_600_000)?;
        within("probe_period_ms", self.probe_period_ms, 10, 3_600_000)?;
        if let Some(limit) = self.fail_fast {
            within("fail_fast", u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), 1, 31 * 24 * 3_600_000)?;
        }
        within("spin_us", self.spin_us.into(), 0, 10_000)?;
        if self.name.is_empty() || self.name.len() > MAX_NAME || self.name.chars().any(char::is_control) {
            let rule = format!("it must be 1 to {MAX_NAME} bytes of printable UTF-8");
            return Err(OptionError { option: "name", value: format!("{:?}", self.name), rule });
        }
        if let Some(name) = &self.congestion
            && let Err(error) = try_congestion(name)
        {
            let known = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
            let known = known.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(", ");
            let rule = format!("the kernel doesn't take it ({error}); it has {known}");
            return Err(OptionError { option: "congestion", value: format!("{name:?}"), rule });
        }
        if self.mode.name() == "unknown" {
            let rule = "it must be exclusive, shared or read-only".to_owned();
            return Err(OptionError { option: "mode", value: self.mode.0.to_string(), rule });
        }
        if self.preempt && self.mode == AttachMode::READ_ONLY {
            let rule = "a reader needs no writer out of its way; attach exclusive or shared, or without it".to_owned();
            return Err(OptionError { option: "preempt", value: "true".to_owned(), rule });
        }
        Ok(())
    }

    /// The path policy that follows from them.
    pub(crate) fn rails(&self) -> rails::Settings {
        let mut settings = rails::Settings::DEFAULT;
        settings.idle_probe_us = self.probe_period_ms.saturating_mul(1_000);
        settings.tcp.unanswered_us = settings.idle_probe_us.saturating_mul(Liveness::LOST_AFTER.into());
        settings.fail_fast_us = self.fail_fast.map(|limit| u64::try_from(limit.as_micros()).unwrap_or(u64::MAX));
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_pass_and_each_bad_value_is_named() {
        let good = Options::default();
        assert_eq!(good.check(), Ok(()));
        let bad = [
            ("queues", Options { queues: 0, ..good.clone() }),
            ("depth", Options { depth: MAX_DEPTH + 1, ..good.clone() }),
            ("arena_bytes", Options { arena_bytes: 4096, ..good.clone() }),
            ("connect_timeout_ms", Options { connect_timeout_ms: 0, ..good.clone() }),
            ("attach_timeout_ms", Options { attach_timeout_ms: 0, ..good.clone() }),
            ("close_timeout_ms", Options { close_timeout_ms: 0, ..good.clone() }),
            ("probe_period_ms", Options { probe_period_ms: 0, ..good.clone() }),
            ("fail_fast", Options { fail_fast: Some(Duration::ZERO), ..good.clone() }),
            ("spin_us", Options { spin_us: 10_001, ..good.clone() }),
            ("name", Options { name: "a\nb".into(), ..good.clone() }),
            ("congestion", Options { congestion: Some("nosuch".into()), ..good.clone() }),
            ("congestion", Options { congestion: Some(String::new()), ..good.clone() }),
            ("mode", Options { mode: AttachMode(9), ..good.clone() }),
            ("preempt", Options { preempt: true, mode: AttachMode::READ_ONLY, ..good.clone() }),
        ];
        for (option, options) in bad {
            assert_eq!(options.check().unwrap_err().option, option);
        }
    }

    #[test]
    fn a_congestion_control_that_the_kernel_lacks_was_silently_another() {
        let options = Options { congestion: Some("nosuch".into()), ..Options::default() };
        let text = options.check().unwrap_err().to_string();
        // Every kernel has this one.
        assert!(text.contains("congestion") && text.contains("nosuch") && text.contains("reno"), "{text}");
        for congestion in [None, Some("reno".to_owned())] {
            assert_eq!(Options { congestion, ..Options::default() }.check(), Ok(()));
        }
    }
}
