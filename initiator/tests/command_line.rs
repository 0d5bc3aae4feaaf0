//! The command `twinrail` as scripts meet it: exit codes, closed and full streams, wrong arguments.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fake;

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::Ordering;

use fake::{Fake, Setup, control, reply_to};
use twinrail_initiator::{Flags, Geometry, Status};
use twinrail_protocol::crc32c;
use twinrail_protocol::wire::{ControlKind, Credits, Frame, Payload, Reply};

fn twinrail(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_twinrail"));
    command.args(words).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// The command with its streams as a shell sets them up.
fn through_a_shell(words: &[&str], redirection: &str) -> Output {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("exec \"$@\" {redirection}"), "sh", env!("CARGO_BIN_EXE_twinrail")]).args(words);
    shell.env_remove("RUST_LOG").output().unwrap()
}

/// The exit code, and what was complained of.
fn ended(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_closed_or_full_stdout_was_success() {
    let fake = Fake::start(Setup::default());
    let url = &fake.url();
    let folder = scratch();
    let file = &folder.path().join("file");
    fs::write(file, [7; 4096]).unwrap();
    let commands: [&[&str]; 14] = [
        &["read", url, "--length", "4k"],
        &["copy", url, "-", "--length", "4k"],
        &["copy", text(file), url],
        &["copy", text(file), url, "--json"],
        &["write", url, text(file), "--json"],
        &["info", url],
        &["info", url, "--json"],
        &["ping", url, "--count", "1"],
        &["verify", url],
        &["verify", url, text(file)],
        &["bench", url, "--ios", "1"],
        &["metrics-table"],
        &["--help"],
        &["--version"],
    ];
    for words in commands {
        assert_eq!(ended(&through_a_shell(words, ">/dev/null")).0, Some(0), "{words:?}");
        for redirection in [">&-", ">/dev/full"] {
            let (code, complaint) = ended(&through_a_shell(words, redirection));
            assert_eq!(code, Some(1), "{words:?} {redirection}: {complaint}");
            assert!(complaint.contains("stdout can't be written"), "{words:?} {redirection}: {complaint}");
        }
    }
    // What has nothing to say needs no stdout.
    assert_eq!(ended(&through_a_shell(&["write", url, text(file)], ">&-")).0, Some(0));
}

#[test]
fn a_closed_stdin_was_an_empty_file() {
    let fake = Fake::start(Setup::default());
    let url = &fake.url();
    for words in [&["write", url, "-"], &["copy", "-", url]] {
        let (code, complaint) = ended(&through_a_shell(words, "<&-"));
        assert_eq!(code, Some(2), "{words:?}: {complaint}");
        assert!(complaint.contains("stdin is closed"), "{complaint}");
    }
}

#[test]
fn a_complaint_that_nobody_can_hear_was_a_panic() {
    assert_eq!(ended(&through_a_shell(&["info", "nonsense"], "2>/dev/full")).0, Some(2));
    assert_eq!(ended(&through_a_shell(&["verify", "twinrail://127.0.0.1:1/d"], "2>/dev/full")).0, Some(3));
}

/// Kinds of handshake frames, as the fake has them.
const HELLO: u8 = 0;
const ATTACH: u8 = 0x43;

/// A way for a target to go.
type Leave = fn(&Fake);

#[test]
fn a_target_that_goes_away_in_whatever_way_ends_a_command_with_5() {
    let says_so: Leave = |fake| {
        for path in 0..2 {
            let shutdown = control(ControlKind::Disconnect, 0, |control| control.status = Status::SHUTDOWN);
            fake.inject(path, shutdown);
        }
    };
    let ways: [(&str, Leave); 2] = [("says that it shuts down", says_so), ("hangs up", Fake::cut)];
    let folder = scratch();
    let file = folder.path().join("file");
    fs::write(&file, vec![7; 1 << 20]).unwrap();
    for (way, leave) in ways {
        let commands: [&[&str]; 8] = [
            &["read", "URL"],
            &["write", "URL", text(&file)],
            &["copy", "URL", "-"],
            &["copy", text(&file), "URL"],
            &["verify", "URL"],
            &["ping", "URL"],
            &["bench", "URL", "--seconds", "60"],
            &["bench", "URL", "--seconds", "60", "--read-percent", "0"],
        ];
        for words in commands {
            let fake = Fake::start(Setup::default());
            fake.mischief().hold.store(true, Ordering::SeqCst);
            let url = fake.url();
            let words: Vec<_> = words.iter().map(|&word| if word == "URL" { &url } else { word }).collect();
            let mut command = twinrail(&[&words[..], &["--queues", "2"]].concat());
            let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            fake.until("a command held", |seen| {
                seen.held.load(Ordering::SeqCst) > 0 && seen.paths.load(Ordering::SeqCst) == 2
            });
            leave(&fake);
            let (code, complaint) = ended(&child.wait_with_output().unwrap());
            assert_eq!(code, Some(5), "{words:?} when the target {way}: {complaint}");
            // The reason, not that another connection went first.
            assert!(!complaint.contains("another connection"), "{words:?} when the target {way}: {complaint}");
        }
    }
}

#[test]
fn a_target_that_went_away_with_nothing_in_flight_ended_a_bench_with_1() {
    let fake = Fake::start(Setup::default());
    // The answer to the only request, and the end right behind it.
    *fake.mischief().instead.lock().unwrap() = Some(|command| {
        let content = [0; 512];
        let payload = Payload { length: 512, crc: crc32c(&content) };
        let honest = reply_to(command);
        let credits = Credits { granted_slots: 1, ..honest.credits };
        let reply = Reply { flags: Flags::PAYLOAD_FOLLOWS, payload, credits, ..honest };
        let end = control(ControlKind::Disconnect, 0, |control| control.status = Status::SHUTDOWN);
        [&Frame::Reply(reply).encode()[..], &content, &end].concat()
    });
    let words = ["bench", &fake.url(), "--queues", "1", "--depth", "1", "--block-size", "512", "--seconds", "60"];
    let (code, complaint) = ended(&twinrail(&words).output().unwrap());
    assert_eq!(code, Some(5), "{complaint}");
    assert!(complaint.contains("the target ended the connection: shutdown"), "{complaint}");
}

#[test]
fn a_target_about_to_stop_refused_like_one_that_minds_the_volume() {
    for kind in [HELLO, ATTACH] {
        let fake = Fake::start(Setup::default());
        *fake.mischief().refuse.lock().unwrap() = Some((kind, Status::DRAINING, "about to stop"));
        let (code, complaint) = ended(&twinrail(&["info", &fake.url()]).output().unwrap());
        assert_eq!(code, Some(3), "{complaint}");
        assert!(complaint.contains("about to stop"), "{complaint}");
    }
}

#[test]
fn verified_left_out_what_the_map_of_the_volume_called_zeros() {
    let geometry = Geometry { size: 8 << 20, ..Setup::default().geometry };
    let folder = scratch();
    let file = folder.path().join("sparse");
    File::create(&file).unwrap().set_len(4 << 20).unwrap();
    let copy = |verify: &[&str], lies: bool| {
        let fake = Fake::start(Setup { geometry, ..Setup::default() });
        fake.mischief().zeros_everywhere.store(lies, Ordering::SeqCst);
        ended(&twinrail(&[&["copy", text(&file), &fake.url()][..], verify].concat()).output().unwrap())
    };
    assert_eq!(copy(&[], false).0, Some(0));
    let (code, complaint) = copy(&[], true);
    assert_eq!(code, Some(1), "{complaint}");
    assert!(complaint.contains("verification failed: the volume's 4194304 bytes at byte 0"), "{complaint}");
    assert_eq!(copy(&["--no-verify"], true).0, Some(0));
}

#[test]
fn a_copy_of_a_volume_onto_itself_was_a_success() {
    let fake = Fake::start(Setup::default());
    let (url, port) = (fake.url(), fake.address.port());
    for other in [url.clone(), format!("twinrail://localhost:{port}/disk0")] {
        let before = fake.shared.disk.lock().unwrap().clone();
        let (code, complaint) = ended(&twinrail(&["copy", &url, &other]).output().unwrap());
        assert_eq!(code, Some(2), "{complaint}");
        assert!(complaint.contains(&url) && complaint.contains("the same volume"), "{complaint}");
        assert!(*fake.shared.disk.lock().unwrap() == before);
    }
}

#[test]
fn a_wrong_argument_names_itself_and_the_remedy_and_nothing_is_done() {
    let fake = Fake::start(Setup::default());
    let url = &fake.url();
    let folder = scratch();
    let (directory, missing) = (text(folder.path()), text(&folder.path().join("missing/file")).to_owned());
    let without_port = &format!("{url}?rdma=xx");
    // The words, then what the complaint must have: option, value, remedy.
    let wrong: [(&[&str], &[&str]); 19] = [
        (&["info", without_port], &["`rdma=xx`", "rdma=host:port"]),
        (&["info", url, "--queues", "0"], &["--queues", "'0'", "from 1 to"]),
        (&["info", url, "--queues", "many"], &["--queues", "'many'", "from 1 to"]),
        (&["info", url, "--depth", "0"], &["--depth", "'0'", "from 1 to"]),
        (&["info", url, "--depth", "-1"], &["--depth", "'-1'", "from 1 to"]),
        (&["info", url, "--name", ""], &["name", "\"\"", "1 to"]),
        (&["ping", url, "--count", "0"], &["--count", "'0'", "from 1"]),
        (&["ping", url, "--interval", "-1"], &["--interval", "'-1'", "from 0 to 3600"]),
        (&["read", url, "--offset", "-512"], &["--offset", "'-512'", "4096, 64k"]),
        (&["read", url, "--length", "ten"], &["--length", "'ten'", "4096, 64k"]),
        (&["bench", url, "--seconds", "0"], &["--seconds", "'0'", "from 0.001"]),
        (&["bench", url, "--ios", "0"], &["--ios", "'0'", "from 1"]),
        (&["bench", url, "--read-percent", "101"], &["--read-percent", "'101'", "from 0 to 100"]),
        (&["copy", url, "-", "--metrics", "127.0.0.1:0"], &["--metrics", "127.0.0.1:0", "127.0.0.1:9451"]),
        (&["copy", "a", "b"], &["neither", "twinrail://host[:port]/volume"]),
        (&["write", url, &missing], &[&missing, "no such file"]),
        (&["write", url, directory], &[directory, "is a directory"]),
        (&["copy", &missing, url], &[&missing, "no such file"]),
        (&["verify", url, &missing], &[&missing, "no such file"]),
    ];
    for (words, parts) in wrong {
        let (code, complaint) = ended(&twinrail(words).output().unwrap());
        assert_eq!(code, Some(2), "{words:?}: {complaint}");
        assert!(parts.iter().all(|part| complaint.contains(part)), "{words:?}: {complaint}");
        assert_eq!(complaint.trim_end().lines().count(), 1, "{words:?}: {complaint}");
    }
    assert_eq!(fake.seen().paths.load(Ordering::SeqCst), 0, "nobody was asked");
    let (code, complaint) = ended(&twinrail(&["info", url]).env("RUST_LOG", "nonsense").output().unwrap());
    assert_eq!(code, Some(2), "{complaint}");
    assert!(complaint.contains("RUST_LOG can't be `nonsense`"), "{complaint}");
    // These are seen when the volume is there.
    let late: [(&[&str], &[&str]); 3] = [
        (&["read", url, directory], &[directory, "is a directory"]),
        (&["read", url, &missing], &[&missing, "no such directory"]),
        (&["read", url, "-", "--offset", "1"], &["--offset 1", "0 and 512"]),
    ];
    for (words, parts) in late {
        let (code, complaint) = ended(&twinrail(words).output().unwrap());
        assert_eq!(code, Some(2), "{words:?}: {complaint}");
        assert!(parts.iter().all(|part| complaint.contains(part)), "{words:?}: {complaint}");
    }
}

#[test]
fn what_was_asked_of_a_copy_out_of_a_volume_was_dropped() {
    let fake = Fake::start(Setup::default());
    let (code, complaint) = ended(&twinrail(&["copy", &fake.url(), "-", "--preempt"]).output().unwrap());
    assert_eq!(code, Some(2), "{complaint}");
    assert!(complaint.contains("`preempt`"), "{complaint}");
}

#[test]
fn the_summary_of_a_ping_differed_from_its_lines() {
    let fake = Fake::start(Setup::default());
    let output = twinrail(&["ping", &fake.url(), "--count", "1"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, took) = text.lines().next().unwrap().split_once("took ").unwrap();
    let summary = text.lines().last().unwrap();
    let expected = format!("min {took}, avg {took}, p99 {took}, max {took}");
    assert!(summary.ends_with(&expected), "{text}");
}

#[test]
fn a_log_that_went_to_a_file_had_colours() {
    let fake = Fake::start(Setup::default());
    let output = twinrail(&["info", &fake.url()]).env("RUST_LOG", "trace").output().unwrap();
    let (code, log) = ended(&output);
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.is_empty() && !log.contains('\u{1b}'), "{log:?}");
}

#[test]
fn the_default_of_spin_us_was_a_secret() {
    let output = twinrail(&["bench", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, rest) = help.split_once("--spin-us").unwrap();
    let default = format!("[default: {}]", twinrail_initiator::Options::default().spin_us);
    assert!(rest.split("--").next().unwrap().contains(&default), "{rest}");
}
