//! Programs that are run to their end.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

use crate::program;

/// Longest time that a command may take. The longest ones move gibibytes, unoptimised, on two cores.
const LONGEST: Duration = Duration::from_secs(600);

/// How a command ended.
#[derive(Debug)]
pub struct Run {
    /// The command, for messages.
    pub line: String,
    /// The exit code; nothing when a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it complained of.
    pub stderr: String,
}

impl Run {
    /// Demands success, and gives what was printed.
    ///
    /// # Panics
    /// When the command failed.
    #[must_use]
    pub fn text(self) -> String {
        self.succeeded();
        String::from_utf8(self.stdout).unwrap()
    }

    /// Demands success, and gives the JSON that was printed.
    ///
    /// # Panics
    /// When the command failed or printed something else.
    #[must_use]
    pub fn json(self) -> serde_json::Value {
        self.succeeded();
        let text = String::from_utf8_lossy(&self.stdout);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error} in {text}", self.line))
    }

    /// Demands success.
    ///
    /// # Panics
    /// When the command failed.
    pub fn succeeded(&self) {
        let Self { line, code, stderr, stdout } = self;
        let stdout = String::from_utf8_lossy(&stdout[..stdout.len().min(4096)]);
        assert_eq!(*code, Some(0), "{line} failed ({code:?}):\n{stderr}\n{stdout}");
    }

    /// Demands failure with an exit code of its own, and gives the complaint.
    ///
    /// # Panics
    /// When the command succeeded, or a signal ended it.
    #[must_use]
    pub fn complaint(self) -> String {
        let Self { line, code, stderr, .. } = self;
        assert!(!matches!(code, None | Some(0 | 101)), "{line} should have failed in order: {code:?}\n{stderr}");
        stderr
    }
}

/// Runs a program to its end.
///
/// # Panics
/// When it can't be started or takes longer than ten minutes.
pub fn run(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Run {
    run_in(Path::new("."), program, args)
}

/// Runs a program in a directory to its end.
///
/// # Panics
/// When it can't be started or takes longer than ten minutes.
pub fn run_in(directory: &Path, program: impl AsRef<OsStr>, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Run {
    let args: Vec<OsString> = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
    let mut command = Command::new(program);
    command.args(args).current_dir(directory).stdin(Stdio::null());
    finish(command)
}

/// Runs a command to its end.
///
/// # Panics
/// When it can't be started or takes longer than ten minutes.
#[must_use]
pub fn finish(mut command: Command) -> Run {
    let line = format!("{command:?}");
    let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.unwrap_or_else(|error| panic!("{line}: {error}"));
    let (stdout, stderr) = (drain(child.stdout.take().unwrap()), drain(child.stderr.take().unwrap()));
    if let Ok(fd) = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
        let timeout = Timespec::try_from(LONGEST).unwrap();
        if rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 0 {
            let _ = child.kill();
            let said = String::from_utf8_lossy(&stderr.join().unwrap()).into_owned();
            panic!("{line} took longer than {LONGEST:?}\n{said}");
        }
    }
    let code = child.wait().unwrap().code();
    let stderr = String::from_utf8_lossy(&stderr.join().unwrap()).into_owned();
    Run { line, code, stdout: stdout.join().unwrap(), stderr }
}

/// Runs `twinrail` to its end.
///
/// # Panics
/// When it can't be started or takes longer than ten minutes.
pub fn twinrail(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Run {
    run(program("twinrail"), args)
}

fn drain(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut all = Vec::new();
        // What came before an error is worth having.
        let _ = stream.read_to_end(&mut all);
        all
    })
}
