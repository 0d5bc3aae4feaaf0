//! The configuration: what was said in a file and on the command line, put together and checked.
//!
//! [`Settings`] is what one source says, every option optional; [`ConfigFile`] is a file of them with the
//! lines on which they stand. [`Config::resolve`] lays the command line over the file, fills in the
//! defaults and checks the whole. All that is wrong is told at once, each with its place and its remedy.

mod file;
mod log_filter;
mod settings;
mod size;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;
use std::{fmt, fs, io};

use twinrail_protocol::limits;

pub use file::ConfigFile;
use file::GivenVolume;
pub use settings::Settings;
pub use size::Size;

use crate::mapping::Pages;
use crate::volume::VolumeSpec;

/// The port for TCP, and for RDMA-CM by default.
pub const DEFAULT_PORT: u16 = 4450;
/// The port for Prometheus.
pub const DEFAULT_METRICS_PORT: u16 = 9450;

/// Congestion control where the kernel has it.
const DEFAULT_CONGESTION: &str = "cubic";

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen for initiators.
    pub listen: Vec<SocketAddr>,
    /// Where to answer Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Names of the initiators that are allowed; empty for all.
    pub allow: Vec<String>,
    /// The target's name.
    pub name: String,
    /// Number of reactors.
    pub reactors: usize,
    /// Whether each reactor has a CPU of its own.
    pub pin: bool,
    /// Buffer memory of one reactor in bytes.
    pub arena_bytes: usize,
    /// What buffers and volumes in memory are made of.
    pub pages: Pages,
    /// Most sessions.
    pub max_sessions: usize,
    /// Most queues of one session.
    pub max_queues_per_session: u16,
    /// Most slots of one queue.
    pub queue_depth: u16,
    /// Largest data window of one queue in bytes.
    pub data_window_bytes: u32,
    /// Largest payload of one command in bytes.
    pub max_transfer_bytes: u32,
    /// Most connections whose handshake isn't over.
    pub max_handshakes: usize,
    /// How long the handshake waits for the initiator's next frame, in milliseconds.
    pub handshake_timeout_ms: u64,
    /// Most connections that are paths of queues or stand by for them.
    pub max_connections: usize,
    /// How long an idle reactor looks for work before it sleeps, in microseconds.
    pub spin_us: u64,
    /// How long an initiator may take none of its replies, in milliseconds.
    pub stall_timeout_ms: u64,
    /// How often an idle path is probed, in milliseconds.
    pub probe_period_ms: u64,
    /// How long a stop waits for commands in flight, in milliseconds.
    pub drain_timeout_ms: u64,
    /// How long a session outlives the last of its connections, in milliseconds.
    pub lease_ms: u32,
    /// How long the start waits for a volume that another process holds, in milliseconds.
    pub lock_wait_ms: u64,
    /// Congestion control of TCP connections; none for the kernel's default.
    pub congestion: Option<String>,
    /// What is logged.
    pub log: String,
    /// Whether volumes may inject faults.
    pub allow_fault_injection: bool,
    /// The volumes.
    pub volumes: Vec<VolumeSpec>,
}

/// Something wrong in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where: file and line, or an option of the command line.
    pub place: Option<String>,
    /// What, and what to do.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{place}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// All that is wrong in a configuration; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub Vec<Problem>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Reads a file, if there is one, lays the command line over it, and checks the whole.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn load(file: Option<&Path>, command_line: Settings, volumes: &[String]) -> Result<Self, ConfigError> {
        let file = file.map(ConfigFile::read).transpose()?.unwrap_or_default();
        Self::resolve(file, command_line, volumes)
    }

    /// Lays the command line, with its `--volume`s, over a file, and checks the whole.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn resolve(file: ConfigFile, command_line: Settings, volumes: &[String]) -> Result<Self, ConfigError> {
        let mut check = Check { file, command_line, problems: Vec::new() };
        let c = &mut check;
        let mut config = Self {
            listen: c.addresses(),
            metrics: c.metrics(),
            allow: c.allow(),
            name: c.name(),
            reactors: c.number("reactors", |s| s.reactors, 0, 0..=256),
            pin: c.pick(|s| s.pin).unwrap_or(true),
            arena_bytes: 0,
            pages: if c.pick(|s| s.huge_pages).unwrap_or(false) { Pages::Reserved } else { Pages::Plain },
            max_sessions: c.number("max_sessions", |s| s.max_sessions, 1024, 1..=65_536),
            max_queues_per_session: c.number(
                "max_queues_per_session",
                |s| s.max_queues_per_session,
                8,
                1..=limits::MAX_QUEUES,
            ),
            queue_depth: c.number("queue_depth", |s| s.queue_depth, 128, 1..=limits::MAX_DEPTH),
            data_window_bytes: c.size32("data_window", |s| s.data_window, 4 << 20, 0..=1 << 30),
            max_transfer_bytes: c.size32("max_transfer", |s| s.max_transfer, 1 << 20, limits::MAX_TRANSFER_RANGE),
            max_handshakes: c.number("max_handshakes", |s| s.max_handshakes, 64, 1..=4096),
            handshake_timeout_ms: c.number("handshake_timeout_ms", |s| s.handshake_timeout_ms, 5_000, 1..=3_600_000),
            max_connections: c.number("max_connections", |s| s.max_connections, 4096, 1..=1 << 20),
            spin_us: c.number("spin_us", |s| s.spin_us, 50, 0..=1_000_000),
            stall_timeout_ms: c.number("stall_timeout_ms", |s| s.stall_timeout_ms, 30_000, 1..=3_600_000),
            probe_period_ms: c.number("probe_period_ms", |s| s.probe_period_ms, 5_000, 1..=3_600_000),
            drain_timeout_ms: c.number("drain_timeout_ms", |s| s.drain_timeout_ms, 10_000, 0..=3_600_000),
            lease_ms: c.number("lease_ms", |s| s.lease_ms, 60_000, 0..=3_600_000) as u32,
            lock_wait_ms: c.number("lock_wait_ms", |s| s.lock_wait_ms, 60_000, 0..=3_600_000),
            congestion: c.congestion(),
            log: c.log(),
            allow_fault_injection: c.pick(|s| s.allow_fault_injection).unwrap_or(false),
            volumes: Vec::new(),
        };
        if config.reactors == 0 {
            config.reactors = std::thread::available_parallelism().map_or(1, usize::from).min(4);
        }
        // Half of an arena is for data windows, and a COMPARE AND WRITE holds two buffers of the largest
        // transfer: below eight of them one queue could starve the others.
        let least = (u64::from(config.max_transfer_bytes) * 8).max(8 << 20);
        let arena = c.number("arena", |s| s.arena, Size(64 << 20), Size(least)..=Size(256 << 30));
        config.arena_bytes = usize::try_from(arena.0).unwrap_or(usize::MAX);
        config.volumes = c.volumes(volumes, &config);
        c.check_exposure(&config);
        if check.problems.is_empty() { Ok(config) } else { Err(ConfigError(check.problems)) }
    }
}

/// The two sources, and what was found wrong so far.
struct Check {
    file: ConfigFile,
    command_line: Settings,
    problems: Vec<Problem>,
}

impl Check {
    /// What the command line says, else the file.
    fn pick<T>(&self, get: impl Fn(&Settings) -> Option<T>) -> Option<T> {
        get(&self.command_line).or_else(|| get(&self.file.settings))
    }

    fn problem(&mut self, place: Option<String>, text: impl Into<String>) {
        self.problems.push(Problem { place, text: text.into() });
    }

    /// Where the value in force of `key` was given.
    fn place(&self, key: &str, on_command_line: bool) -> Option<String> {
        match on_command_line {
            true => Some(format!("--{}", key.replace('_', "-"))),
            false => self.file.place(key),
        }
    }

    /// An option with a lowest and a highest value.
    fn number<T: PartialOrd + Copy + fmt::Display>(
        &mut self,
        key: &'static str,
        get: impl Fn(&Settings) -> Option<T>,
        default: T,
        range: RangeInclusive<T>,
    ) -> T {
        let Some(value) = self.pick(&get) else { return default };
        if range.contains(&value) {
            return value;
        }
        let place = self.place(key, get(&self.command_line).is_some());
        self.problem(place, format!("{key} is {value}; it must be {} to {}", range.start(), range.end()));
        default
    }

    /// A size that is kept in 32 bits.
    fn size32(
        &mut self,
        key: &'static str,
        get: impl Fn(&Settings) -> Option<Size>,
        default: u32,
        range: RangeInclusive<u32>,
    ) -> u32 {
        let range = Size(u64::from(*range.start()))..=Size(u64::from(*range.end()));
        let size = self.number(key, get, Size(u64::from(default)), range);
        u32::try_from(size.0).unwrap_or(default)
    }

    fn addresses(&mut self) -> Vec<SocketAddr> {
        let on_command_line = !self.command_line.listen.is_empty();
        let given = match on_command_line {
            true => self.command_line.listen.clone(),
            false => self.file.settings.listen.clone(),
        };
        if given.is_empty() {
            return vec![SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT))];
        }
        let place = self.place("listen", on_command_line);
        given
            .iter()
            .filter_map(|text| {
                let address = parse_address(text, DEFAULT_PORT);
                if address.is_none() {
                    self.problem(place.clone(), not_an_address(text, DEFAULT_PORT));
                }
                address
            })
            .collect()
    }

    fn metrics(&mut self) -> Option<SocketAddr> {
        let Some(text) = self.pick(|s| s.metrics.clone()) else {
            return Some(SocketAddr::from(([127, 0, 0, 1], DEFAULT_METRICS_PORT)));
        };
        if text == "off" {
            return None;
        }
        let address = parse_address(&text, DEFAULT_METRICS_PORT);
        if address.is_none() {
            let place = self.place("metrics", self.command_line.metrics.is_some());
            self.problem(place, format!("{}; \"off\" for no metrics", not_an_address(&text, DEFAULT_METRICS_PORT)));
        }
        address
    }

    /// The default may be missing, or not for everybody: then the kernel's own does, also when somebody writes it
    /// down. Another one was meant.
    fn congestion(&mut self) -> Option<String> {
        let name = self.pick(|s| s.congestion.clone()).unwrap_or_else(|| DEFAULT_CONGESTION.into());
        if name == DEFAULT_CONGESTION {
            return Some(name);
        }
        if name == "system" {
            return None;
        }
        if let Err(error) = try_congestion(&name) {
            let place = self.place("congestion", self.command_line.congestion.is_some());
            let known = |list| fs::read_to_string(Path::new("/proc/sys/net/ipv4").join(list)).unwrap_or_default();
            let (available, allowed) =
                (known("tcp_available_congestion_control"), known("tcp_allowed_congestion_control"));
            self.problem(
                place,
                format!(
                    "congestion is {name:?}, which the kernel refuses ({error}); it has {}, and lets everybody use {}; \
                     \"system\" leaves the choice to it",
                    available.trim(),
                    allowed.trim()
                ),
            );
        }
        Some(name)
    }

    fn log(&mut self) -> String {
        let filter = self.pick(|s| s.log.clone()).unwrap_or_else(|| "info".into());
        if let Some(text) = log_filter::bad_filter(&filter) {
            let place = self.place("log", self.command_line.log.is_some());
            self.problem(place, text);
        }
        filter
    }

    /// The command line adds to the file.
    fn allow(&mut self) -> Vec<String> {
        let mut allow = self.file.settings.allow.clone();
        allow.extend(self.command_line.allow.iter().cloned());
        for name in &allow {
            if let Some(text) = bad_name(name) {
                let place = self.place("allow", self.command_line.allow.contains(name));
                self.problem(place, format!("the initiator name {name:?} {text}"));
            }
        }
        allow
    }

    fn name(&mut self) -> String {
        let name = self.pick(|s| s.name.clone()).unwrap_or_default();
        if name.is_empty() {
            return rustix::system::uname().nodename().to_string_lossy().into_owned();
        }
        if let Some(text) = bad_name(&name) {
            let place = self.place("name", self.command_line.name.is_some());
            self.problem(place, format!("the target name {name:?} {text}"));
        }
        name
    }

    /// The volumes of the file, then those of the command line.
    fn volumes(&mut self, command_line: &[String], config: &Config) -> Vec<VolumeSpec> {
        let mut given = std::mem::take(&mut self.file.volumes);
        for text in command_line {
            let place = format!("--volume {text}");
            let has = |option: &str| text.split(',').skip(1).any(|part| part.starts_with(option));
            let (has_max_transfer, has_lock_wait) = (has("max-transfer="), has("lock-wait-ms="));
            match VolumeSpec::parse(text) {
                Ok(spec) => given.push(GivenVolume { place, spec, has_max_transfer, has_lock_wait }),
                Err(error) => self.problem(Some(place), error.to_string()),
            }
        }
        if given.is_empty() && command_line.is_empty() {
            let text = "there is no volume to serve; give one with --volume NAME=PATH or a [[volume]] table";
            self.problem(None, text);
        }
        let mut volumes = Vec::with_capacity(given.len());
        let mut places: BTreeMap<String, String> = BTreeMap::new();
        for GivenVolume { place, mut spec, has_max_transfer, has_lock_wait } in given {
            let name = spec.name.clone();
            if !has_max_transfer {
                spec.max_transfer = config.max_transfer_bytes;
            }
            spec.pages = config.pages;
            if !has_lock_wait {
                spec.lock_wait = Duration::from_millis(config.lock_wait_ms);
            }
            if spec.max_transfer > config.max_transfer_bytes {
                let [own, all] = [spec.max_transfer, config.max_transfer_bytes].map(|n| Size(u64::from(n)));
                let text =
                    format!("volume {name:?}: max-transfer is {own}; raise the target's max_transfer, {all}, first");
                self.problem(Some(place.clone()), text);
            }
            if spec.faults.is_some() && !config.allow_fault_injection {
                let text = "injects faults, which is for tests; allow it with --allow-fault-injection";
                self.problem(Some(place.clone()), format!("volume {name:?} {text}"));
            }
            match places.get(&name) {
                Some(first) => {
                    let text = format!("there is a volume {name:?} already ({first}); give one of them another name");
                    self.problem(Some(place), text);
                }
                None => drop(places.insert(name, place)),
            }
            volumes.push(spec);
        }
        volumes
    }

    /// Whoever reaches a port beyond this host could take any volume: that must have been wanted.
    fn check_exposure(&mut self, config: &Config) {
        let exposed = config.listen.iter().find(|address| !address.ip().to_canonical().is_loopback());
        if let Some(address) = exposed.filter(|_| config.allow.is_empty()) {
            let place = self.place("listen", !self.command_line.listen.is_empty());
            self.problem(
                place,
                format!(
                    "listening on {address} lets other hosts in, and there is no authentication yet: name the \
                     initiators that may connect with `allow` (--allow NAME; a name is no proof), or listen on 127.0.0.1"
                ),
            );
        }
    }
}

/// Asks the kernel for a congestion control: only it knows which it has, can load, and gives to whom.
fn try_congestion(name: &str) -> io::Result<()> {
    use socket2::{Domain, Socket, Type};
    Socket::new(Domain::IPV4, Type::STREAM, None)?.set_tcp_congestion(name.as_bytes())
}

/// An address with or without a port.
fn parse_address(text: &str, port: u16) -> Option<SocketAddr> {
    let bare = || Some(SocketAddr::new(text.parse::<IpAddr>().ok()?, port));
    text.parse().ok().or_else(bare)
}

fn not_an_address(text: &str, port: u16) -> String {
    format!("{text:?} is no address; write it like \"127.0.0.1:{port}\" or \"[::1]:{port}\"")
}

/// What is wrong with a name that goes into a handshake frame.
fn bad_name(name: &str) -> Option<&'static str> {
    match name {
        "" => Some("is empty"),
        _ if name.len() > limits::MAX_NAME => Some("is longer than 223 bytes"),
        _ if name.chars().any(char::is_control) => Some("has control characters"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        settings: Settings,
    }

    fn line(args: &[&str]) -> Settings {
        <Line as clap::Parser>::parse_from([&["test"], args].concat()).settings
    }

    fn file(text: &str) -> ConfigFile {
        ConfigFile::parse(Path::new("t.toml"), text).unwrap()
    }

    const VOLUME: &str = "[[volume]]\nname = \"v\"\nmemory = true\nsize = \"1M\"\n";

    fn errors(text: &str, args: &[&str]) -> String {
        let file = match ConfigFile::parse(Path::new("t.toml"), &format!("{text}{VOLUME}")) {
            Ok(file) => file,
            Err(error) => return error.to_string(),
        };
        Config::resolve(file, line(args), &[]).unwrap_err().to_string()
    }

    fn example() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/target.toml");
        std::fs::read_to_string(path).unwrap()
    }

    /// The example with every commented option put in force.
    fn example_in_force() -> String {
        let is_option = |line: &str| {
            let key = line.split_once(" = ").map(|(key, _)| key);
            key.is_some_and(|key| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        };
        example()
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if is_option(rest) => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect()
    }

    #[test]
    fn the_example_says_what_the_defaults_are() {
        let as_it_is = Config::resolve(file(&example()), Settings::default(), &[]).unwrap();
        let in_force = Config::resolve(file(&example_in_force()), Settings::default(), &[]).unwrap();
        assert_eq!(format!("{in_force:?}"), format!("{as_it_is:?}"));
    }

    #[test]
    fn every_option_is_in_the_example_and_its_help_names_the_same_default() {
        let text = example_in_force();
        let command = Line::command();
        for argument in command.get_arguments().filter(|a| !matches!(a.get_id().as_str(), "help" | "version")) {
            let key = argument.get_id().as_str();
            let value = text.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
            let value = value.unwrap_or_else(|| panic!("{key} isn't in deploy/target.toml"));
            let value = value.trim_matches(['[', ']']).trim_matches('"');
            let value = if value.is_empty() { "none" } else { value };
            let help = argument.get_help().unwrap().to_string();
            assert!(help.contains(&format!("[default: {value}]")), "--{key}: {value:?} isn't the default in {help:?}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_and_the_nearest_right_one() {
        let error = errors("listen = [\"127.0.0.1:1\"]\nqueue_dept = 3\n", &[]);
        assert_eq!(error, "t.toml:2: there is no option \"queue_dept\"; did you mean \"queue_depth\"?");
        let error = errors("zzz = 3\nlog = \"info\"\nnme = \"x\"\n", &[]);
        assert_eq!(error.lines().count(), 2, "{error}");
        assert!(error.starts_with("t.toml:1: there is no option \"zzz\"; the options are listed"), "{error}");
        assert!(error.ends_with("t.toml:3: there is no option \"nme\"; did you mean \"name\"?"), "{error}");
        let error = ConfigFile::parse(Path::new("t.toml"), &format!("{VOLUME}sise = 3\n")).unwrap_err().to_string();
        assert_eq!(error, "t.toml:5: a volume has no option \"sise\"; did you mean \"size\"?");
    }

    #[test]
    fn a_value_of_the_wrong_type_is_refused_with_its_line() {
        let error = errors("\nreactors = \"two\"\n", &[]);
        assert!(error.starts_with("t.toml:2: ") && error.contains("invalid type: string \"two\""), "{error}");
        assert!(errors("reactors = \n", &[]).starts_with("t.toml:1: "));
    }

    #[test]
    fn a_value_out_of_range_names_its_place_and_the_range() {
        assert_eq!(errors("queue_depth = 300\n", &[]), "t.toml:1: queue_depth is 300; it must be 1 to 256");
        let error = errors("queue_depth = 300\n", &["--queue-depth", "0"]);
        assert_eq!(error, "--queue-depth: queue_depth is 0; it must be 1 to 256");
        // However far out of its bounds.
        for lease in ["3600001", "4294967296"] {
            let file = format!("lease_ms = {lease}\n");
            let expected = format!("t.toml:1: lease_ms is {lease}; it must be 0 to 3600000");
            assert_eq!(errors(&file, &[]), expected, "a value of more than 32 bits had a message of its own");
        }
        let error = errors("max_transfer = \"16M\"\narena = \"64M\"\n", &[]);
        assert_eq!(error, "t.toml:2: arena is 64M; it must be 128M to 256G");
    }

    #[test]
    fn the_command_line_wins_and_its_volumes_and_names_are_added() {
        let file = file(&format!("queue_depth = 16\nspin_us = 7\nallow = [\"a\"]\n{VOLUME}"));
        let settings =
            line(&["--queue-depth", "32", "--allow", "b", "--arena", "1G", "--pin=false", "--metrics", "off"]);
        let config = Config::resolve(file, settings, &["w=memory,size=2M".into()]).unwrap();
        assert_eq!((config.queue_depth, config.spin_us, config.arena_bytes), (32, 7, 1 << 30));
        assert_eq!(config.allow, ["a", "b"]);
        assert_eq!((config.pin, config.metrics), (false, None));
        let names: Vec<_> = config.volumes.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["v", "w"]);
    }

    #[test]
    fn listening_beyond_this_host_needs_names_of_initiators() {
        for address in ["0.0.0.0", "[::]:4450", "192.168.1.7:9000", "::ffff:192.168.1.7"] {
            let error = errors("", &["--listen", address]);
            assert!(error.starts_with("--listen: listening on ") && error.contains("--allow NAME"), "{error}");
        }
        for address in ["127.0.0.3:1", "::1"] {
            Config::resolve(file(VOLUME), line(&["--listen", address]), &[]).unwrap();
        }
        let settings = line(&["--listen", "0.0.0.0:4450", "--allow", "vm-host-1"]);
        Config::resolve(file(VOLUME), settings, &[]).unwrap();
        assert!(errors("listen = [\"localhost\"]\n", &[]).contains("is no address; write it like"));
    }

    #[test]
    fn a_word_that_the_kernel_or_the_log_does_not_know_is_refused() {
        let error = errors("congestion = \"nosuch\"\n", &[]);
        assert!(error.starts_with("t.toml:1: congestion is \"nosuch\"") && error.contains("\"system\""), "{error}");
        let error = errors("", &["--congestion", "a name that is longer than any"]);
        assert!(error.starts_with("--congestion: congestion is \"a name"), "{error}");
        let error = errors("log = \"info\"\n", &["--log", "nonsense"]);
        assert!(error.starts_with("--log: log is \"nonsense\": there is no level"), "{error}");
        let config = Config::resolve(file(VOLUME), line(&["--congestion", "system"]), &[]).unwrap();
        assert_eq!(config.congestion, None);
    }

    #[test]
    fn volumes_are_needed_and_have_different_names() {
        let none = Config::resolve(ConfigFile::default(), Settings::default(), &[]).unwrap_err().to_string();
        assert!(none.contains("--volume NAME=PATH"), "{none}");
        let twice = Config::resolve(file(VOLUME), Settings::default(), &["v=memory,size=1M".into()]).unwrap_err();
        assert!(twice.to_string().contains("there is a volume \"v\" already (t.toml:1)"), "{twice}");
    }
}
