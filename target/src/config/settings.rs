//! What one source, the file or the command line, says. The text above each option is its `--help`.

use serde::Deserialize;

use super::Size;

/// Options, each as it was given, or not.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, clap::Args)]
#[serde(default)]
pub struct Settings {
    /// Address to listen on for initiators; may be given several times. One that other hosts reach needs
    /// --allow [default: 127.0.0.1:4450]
    #[arg(long, value_name = "ADDR")]
    pub listen: Vec<String>,
    /// Address that answers Prometheus, or "off" [default: 127.0.0.1:9450]
    #[arg(long, value_name = "ADDR|off")]
    pub metrics: Option<String>,
    /// Name of an initiator that may connect; may be given several times. With none all may, on loopback
    /// addresses. A name is no proof of anything [default: none]
    #[arg(long, value_name = "NAME")]
    pub allow: Vec<String>,
    /// The target's name, told to initiators; empty for the host's name [default: none]
    #[arg(long)]
    pub name: Option<String>,
    /// Data-plane threads; 0 for one for each CPU, at most 4 [default: 0]
    #[arg(long, value_name = "N")]
    pub reactors: Option<usize>,
    /// Whether each data-plane thread keeps to a CPU of its own [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub pin: Option<bool>,
    /// Buffer memory of each data-plane thread [default: 64M]
    #[arg(long, value_name = "SIZE")]
    pub arena: Option<Size>,
    /// Whether buffers and volumes in memory take huge pages that an administrator has reserved
    /// (vm.nr_hugepages); without them the target doesn't start then. Else the kernel makes huge pages as far as
    /// it can [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub huge_pages: Option<bool>,
    /// Most sessions at a time [default: 1024]
    #[arg(long, value_name = "N")]
    pub max_sessions: Option<usize>,
    /// Most queues of one session [default: 8]
    #[arg(long, value_name = "N")]
    pub max_queues_per_session: Option<u16>,
    /// Most commands in flight in one queue [default: 128]
    #[arg(long, value_name = "N")]
    pub queue_depth: Option<u16>,
    /// Most write payload that one queue may send without being asked for it [default: 4M]
    #[arg(long, value_name = "SIZE")]
    pub data_window: Option<Size>,
    /// Largest payload of one command [default: 1M]
    #[arg(long, value_name = "SIZE")]
    pub max_transfer: Option<Size>,
    /// Most connections whose handshake isn't over; more crowd out the one that is silent for longest
    /// [default: 64]
    #[arg(long, value_name = "N")]
    pub max_handshakes: Option<usize>,
    /// How long a handshake waits for the initiator's next frame; also how long a session that attached
    /// waits for its first queue [default: 5000]
    #[arg(long, value_name = "MS")]
    pub handshake_timeout_ms: Option<u64>,
    /// Most connections that serve queues or stand by for them; those that stand by make room for those that serve
    /// [default: 4096]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// How long an idle data-plane thread looks for work before it sleeps: longer costs CPU time and saves
    /// latency [default: 50]
    #[arg(long, value_name = "US")]
    pub spin_us: Option<u64>,
    /// How long an initiator may take none of its replies, or send none of the payloads it was asked for,
    /// before its connection is ended, and how long an attach waits for an older session's commands at storage
    /// [default: 30000]
    #[arg(long, value_name = "MS")]
    pub stall_timeout_ms: Option<u64>,
    /// How often an idle connection is probed; three probes without an answer end it [default: 5000]
    #[arg(long, value_name = "MS")]
    pub probe_period_ms: Option<u64>,
    /// How long a stop waits for commands in flight [default: 10000]
    #[arg(long, value_name = "MS")]
    pub drain_timeout_ms: Option<u64>,
    /// How long a session outlives the last of its connections, so that its initiator can come back to it; its
    /// volume stays held meanwhile. 0 for not at all [default: 60000]
    #[arg(long, value_name = "MS")]
    pub lease_ms: Option<u64>,
    /// How long the start waits for a volume that another process holds [default: 60000]
    #[arg(long, value_name = "MS")]
    pub lock_wait_ms: Option<u64>,
    /// Congestion control of TCP connections, or "system" for the kernel's default [default: cubic]
    #[arg(long, value_name = "NAME")]
    pub congestion: Option<String>,
    /// What is logged: a level, or a filter such as "info,twinrail_target::control=debug" [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Whether volumes may inject faults; for tests [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_fault_injection: Option<bool>,
}

impl Settings {
    /// Names of all options, as they stand in a file.
    pub(super) fn keys() -> Vec<String> {
        let command = <Self as clap::Args>::augment_args(clap::Command::new(""));
        command.get_arguments().map(|argument| argument.get_id().to_string()).collect()
    }
}
