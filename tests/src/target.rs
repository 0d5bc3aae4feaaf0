//! `twinrail-target` on free ports of loopback.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::{PATIENCE, Process, Scrape, program};

/// A target that serves. Ends when this is dropped.
pub struct Target {
    /// The process.
    pub process: Process,
    /// Where it listens for initiators.
    pub address: SocketAddr,
    /// Where it answers Prometheus.
    pub metrics: SocketAddr,
}

/// What a target is started with.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    wrapper: Vec<String>,
    args: Vec<String>,
}

impl Target {
    /// A target that serves these volumes, with every option at its default.
    ///
    /// # Panics
    /// When it doesn't start.
    #[must_use]
    pub fn serve(volumes: &[&str]) -> Self {
        Self::builder(volumes).start()
    }

    /// A target that is to serve these volumes.
    #[must_use]
    pub fn builder(volumes: &[&str]) -> Builder {
        let args = volumes.iter().flat_map(|volume| ["--volume".to_owned(), (*volume).to_owned()]).collect();
        Builder { wrapper: Vec::new(), args }
    }

    /// The address of a volume.
    #[must_use]
    pub fn url(&self, volume: &str) -> String {
        format!("twinrail://{}/{volume}", self.address)
    }

    /// What `/metrics` says now.
    ///
    /// # Panics
    /// When it says nothing.
    #[must_use]
    pub fn scrape(&self) -> Scrape {
        Scrape::of(self.metrics)
    }

    /// Waits until `/metrics` says enough.
    ///
    /// # Panics
    /// When that takes longer than [`PATIENCE`].
    pub fn scrape_until(&self, what: &str, enough: impl Fn(&Scrape) -> bool) -> Scrape {
        Scrape::until(self.metrics, what, enough)
    }

    /// Asks it to stop, and demands that it does so in order.
    ///
    /// # Panics
    /// When it doesn't.
    pub fn stop(mut self) {
        self.process.signal(Signal::TERM);
        let status = self.process.wait_within(PATIENCE + Duration::from_secs(10));
        assert_eq!(status.code(), Some(0), "the target should leave with 0; it said:\n{}", self.process.log());
    }
}

impl Builder {
    /// Adds arguments to the command line.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Starts it by way of another program that executes its arguments, such as `prlimit --nofile=64`.
    #[must_use]
    pub fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&arg| arg.to_owned()).collect();
        self
    }

    /// Starts the process and waits for nothing.
    ///
    /// # Panics
    /// When there is no such program.
    #[must_use]
    pub fn launch(&self) -> Process {
        let target = program("twinrail-target");
        let mut command = match self.wrapper.split_first() {
            Some((wrapper, args)) => {
                let mut command = Command::new(wrapper);
                command.args(args).arg(target);
                command
            }
            None => Command::new(target),
        };
        command.arg("serve").args(&self.args);
        for (option, free) in [("--listen", "127.0.0.1:0"), ("--metrics", "127.0.0.1:0")] {
            if !self.args.iter().any(|arg| arg == option || arg == "--config") {
                command.args([option, free]);
            }
        }
        Process::start_command({
            command.stdin(Stdio::null()).env("NO_COLOR", "1");
            command
        })
    }

    /// Starts it and waits until it serves.
    ///
    /// # Panics
    /// When it doesn't come to that.
    #[must_use]
    pub fn start(&self) -> Target {
        let process = self.launch();
        let metrics = process.wait_for("where metrics are", |line| address_behind(line, "metrics on "));
        let address = process.wait_for("where it listens", |line| address_behind(line, "listening on "));
        Target { process, address, metrics }
    }
}

/// The address that stands behind `words` in a line.
fn address_behind(line: &str, words: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once(words)?;
    let end = rest.find(|c: char| !(c.is_ascii_hexdigit() || matches!(c, '.' | ':' | '[' | ']')));
    rest[..end.unwrap_or(rest.len())].parse().ok()
}
