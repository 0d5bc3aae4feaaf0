//! The daemon as people and service managers meet it: exit codes, signals, what it says.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

const TARGET: &str = env!("CARGO_BIN_EXE_twinrail-target");

fn run(args: &[&str]) -> Output {
    Command::new(TARGET).args(args).output().unwrap()
}

/// A `serve` that runs, and what it logs.
struct Serving {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Serving {
    fn start(volume: &str) -> Self {
        let options =
            ["--listen", "127.0.0.1:0", "--metrics", "off", "--reactors", "1", "--pin=false", "--arena", "8M"];
        let mut child = Command::new(TARGET)
            .args(["serve", "--allow-fault-injection", "--volume", volume])
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Reads the log up to the line that says this.
    fn says(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        for line in self.log.by_ref() {
            let line = line.unwrap();
            if line.contains(text) {
                return line;
            }
            seen.push(line);
        }
        panic!("it never said {text:?}, but\n{}", seen.join("\n"));
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn exit_code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // A test that failed leaves nothing behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_target_serves_until_it_is_told_to_stop() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut serving = Serving::start("disk0=memory,size=1M");
        let line = serving.says("listening on 127.0.0.1:");
        let port: u16 = line.rsplit(':').next().unwrap().parse().unwrap();
        std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        serving.signal(signal);
        serving.says("all volumes are synced");
        assert_eq!(serving.exit_code(), Some(0));
    }
}

#[test]
fn a_failed_final_sync_is_an_error() {
    let mut serving = Serving::start("disk0=memory,size=1M,inject=sync-error@..");
    serving.says("listening on");
    serving.signal(Signal::TERM);
    serving.says("twinrail-target: the final sync failed for \"disk0\"");
    assert_eq!(serving.exit_code(), Some(1));
}

#[test]
fn a_second_signal_after_a_while_ends_the_process_at_once() {
    let mut serving = Serving::start("disk0=memory,size=1M,inject=sync-delay-ms=600000");
    serving.says("listening on");
    serving.signal(Signal::TERM);
    serving.says("SIGTERM: stopping");
    // Those that come at once don't count; one of the later ones does.
    while serving.child.try_wait().unwrap().is_none() {
        serving.signal(Signal::TERM);
        std::thread::yield_now();
    }
    serving.says("SIGTERM again: ending at once");
    assert_eq!(serving.exit_code(), Some(1));
}

#[test]
fn a_signal_that_comes_twice_at_once_still_syncs() {
    let mut serving = Serving::start("disk0=memory,size=1M");
    serving.says("listening on");
    serving.signal(Signal::TERM);
    serving.signal(Signal::TERM);
    assert_eq!(serving.exit_code(), Some(0));
}

#[test]
fn a_signal_ends_the_wait_for_a_volume_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk0.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    let mut serving = Serving::start(&format!("disk0={}", path.display()));
    serving.says("waiting");
    serving.signal(Signal::TERM);
    serving.says("stopped before anything was served");
    assert_eq!(serving.exit_code(), Some(0));
}

#[test]
fn errors_have_one_line_and_an_exit_code_by_kind() {
    let cases: [(&[&str], i32, &str); 5] = [
        (&["serve"], 2, "there is no volume to serve"),
        (&["serve", "--volume", "disk0"], 2, "--volume disk0: \"disk0\" is no volume"),
        (&["serve", "--volume", "d=memory,size=1M", "--listen", "0.0.0.0"], 2, "--allow NAME"),
        (&["serve", "--volume", "d=/no/such/file", "--metrics", "off"], 1, "/no/such/file"),
        (&["serve", "--queue-dept", "1"], 2, "--queue-depth"),
    ];
    for (args, code, text) in cases {
        let output = run(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(text) && !said.contains("panicked"), "{args:?}: {said}");
    }
}

#[test]
fn a_configuration_is_checked_without_starting_anything() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/target.toml");
    let output = run(&["check-config", example.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("target.toml: ok, volumes: 1\n"));

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bad.toml");
    std::fs::write(&path, "queue_dept = 3\n").unwrap();
    let output = run(&["check-config", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("bad.toml:1: there is no option \"queue_dept\""));
}

#[test]
fn the_table_of_metrics_is_printed() {
    let output = run(&["metrics-table"]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(table.lines().count(), 2 + twinrail_target::metrics::METRICS.len());
}
