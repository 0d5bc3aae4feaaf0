//! A program that runs: its log, its end.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::PATIENCE;

/// Lines that a program has printed so far, on stdout and stderr.
#[derive(Default)]
struct Log {
    lines: Mutex<Lines>,
    more: Condvar,
}

#[derive(Default)]
struct Lines {
    all: Vec<String>,
    /// Streams that are still open.
    open: usize,
}

/// A running program. Ends (SIGKILL, by its pid) when this is dropped.
pub struct Process {
    name: String,
    child: Child,
    log: Arc<Log>,
}

impl Process {
    /// Starts a program, its output going to the log.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn start(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null());
        Self::start_command(command)
    }

    /// Starts a command, its output going to the log.
    ///
    /// # Panics
    /// When it can't be started.
    #[must_use]
    pub fn start_command(mut command: Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = started.unwrap_or_else(|error| panic!("{name} can't be started: {error}"));
        let log = Arc::new(Log::default());
        log.lines.lock().unwrap().open = 2;
        follow(log.clone(), child.stdout.take().unwrap());
        follow(log.clone(), child.stderr.take().unwrap());
        Self { name, child, log }
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// What the program has printed so far.
    ///
    /// # Panics
    /// Never, unless a reading thread did.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.lines.lock().unwrap().all.join("\n")
    }

    /// Waits for a line that has `text` in it and gives the line; lines that were there before count too.
    ///
    /// # Panics
    /// When the output ends first, or it takes longer than [`PATIENCE`].
    #[must_use]
    pub fn wait_for_line(&self, text: &str) -> String {
        self.wait_for(text, |line| line.contains(text).then(|| line.to_owned()))
    }

    /// Waits for the first line for which `find` gives something.
    ///
    /// # Panics
    /// When the output ends first, or it takes longer than [`PATIENCE`]. `what` is told then.
    pub fn wait_for<T>(&self, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = 0;
        let mut lines = self.log.lines.lock().unwrap();
        loop {
            if let Some(found) = lines.all[seen..].iter().find_map(|line| find(line)) {
                return found;
            }
            seen = lines.all.len();
            let left = deadline.saturating_duration_since(Instant::now());
            if lines.open == 0 || left.is_zero() {
                drop(lines);
                panic!("{} never said {what:?}; it said:\n{}", self.name, self.log());
            }
            lines = self.log.more.wait_timeout(lines, left).unwrap().0;
        }
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When the process has ended and was waited for.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Whether it still runs.
    ///
    /// # Panics
    /// When its state can't be had.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the end of the process and of its output.
    ///
    /// # Panics
    /// When it takes longer than `within`.
    pub fn wait_within(&mut self, within: Duration) -> ExitStatus {
        if let Ok(fd) = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty()) {
            let timeout = Timespec::try_from(within).unwrap();
            let ended = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0;
            assert!(ended, "{} still runs after {within:?}; it said:\n{}", self.name, self.log());
        }
        let status = self.child.wait().unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut lines = self.log.lines.lock().unwrap();
        while lines.open > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(lines);
                panic!("{} has ended, but somebody holds its output open", self.name);
            }
            lines = self.log.more.wait_timeout(lines, left).unwrap().0;
        }
        status
    }

    /// Waits for the end of the process and of its output.
    ///
    /// # Panics
    /// When it takes longer than [`PATIENCE`].
    pub fn wait(&mut self) -> ExitStatus {
        self.wait_within(PATIENCE)
    }

    /// A number of `/proc/PID/status` in KiB, such as `VmRSS`.
    ///
    /// # Panics
    /// When the process has ended.
    #[must_use]
    pub fn memory_kib(&self, key: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        value.and_then(|value| value.trim().strip_suffix(" kB")?.parse().ok()).unwrap()
    }

    /// Descriptors that the process has open.
    ///
    /// # Panics
    /// When the process has ended.
    #[must_use]
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let mut told = String::new();
            for line in &self.log.lines.lock().unwrap().all {
                let _ = writeln!(told, "    {line}");
            }
            eprintln!("---- what {} said:\n{told}----", self.name);
        }
    }
}

/// Reads a stream to its end, line by line.
fn follow(log: Arc<Log>, stream: impl Read + Send + 'static) {
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        // A broken pipe ends the stream, too.
        while let Ok(1..) = reader.read_until(b'\n', &mut line) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            log.lines.lock().unwrap().all.push(text);
            log.more.notify_all();
            line.clear();
        }
        log.lines.lock().unwrap().open -= 1;
        log.more.notify_all();
    });
}
