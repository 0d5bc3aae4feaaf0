//! What the command `twinrail` does, and says, while it has no connection.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use twinrail_tests::{Process, Target, program};

fn busy(target: &Target) {
    target.scrape_until("a busy target", |s| s.sum("twinrail_target_commands_total", &[]) > 1000.0);
}

#[test]
fn a_signal_without_a_connection_took_ten_seconds() {
    let target = Target::serve(&["disk0=memory,size=1G"]);
    let url = target.url("disk0");
    let commands: [&[&str]; 2] = [
        &["bench", &url, "--seconds", "600", "--queues", "1"],
        &["ping", &url, "--count", "1000000", "--interval", "0"],
    ];
    for words in commands {
        let mut command = Process::start(program("twinrail"), words);
        target.scrape_until("its path", |s| s.sum("twinrail_target_paths", &[]) == 1.0);
        target.process.signal(Signal::STOP);
        let _said = command.wait_for_line("no connection to ");
        let begun = Instant::now();
        command.signal(Signal::INT);
        assert_eq!(command.wait().code(), Some(130), "{words:?}: {}", command.log());
        assert!(begun.elapsed() < Duration::from_secs(5), "{words:?} took {:?}", begun.elapsed());
        target.process.signal(Signal::CONT);
        target.scrape_until("its end", |s| s.sum("twinrail_target_paths", &[]) == 0.0);
    }
    target.stop();
}

#[test]
fn nobody_was_told_that_there_was_no_connection() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let url = target.url("disk0");
    let words = ["ping", &url, "--count", "1000000", "--interval", "0.001"];
    let mut ping = Process::start(program("twinrail"), words);
    let _pings = ping.wait_for_line("round trip 10 ");
    target.process.signal(Signal::STOP);
    let said = ping.wait_for_line("no connection to ");
    assert!(said.contains(&target.address.to_string()), "{said}");
    assert!(said.contains(" for 1 s (") && said.contains("waiting up to 30 s (--fail-fast)"), "{said}");
    target.process.signal(Signal::CONT);
    let said = ping.wait_for_line("is back after ");
    assert!(said.contains(&target.address.to_string()), "{said}");
    ping.signal(Signal::TERM);
    assert_eq!(ping.wait().code(), Some(130));
    assert_eq!(ping.log().matches("no connection to ").count(), 1, "{}", ping.log());
    target.stop();
}

fn number(log: &str, name: &str) -> f64 {
    let (_, rest) = log.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name} in {log}"));
    rest.split([',', '}']).next().unwrap().parse().unwrap()
}

#[test]
fn an_outage_at_the_end_of_a_bench_was_in_none_of_its_figures() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let url = target.url("disk0");
    let mut bench = Process::start(program("twinrail"), ["bench", &url, "--json", "--seconds", "1", "--warm-up", "0"]);
    busy(&target);
    let stopped = Instant::now();
    target.process.signal(Signal::STOP);
    let _said = bench.wait_for_line("no connection to ");
    let outage = stopped.elapsed();
    target.process.signal(Signal::CONT);
    assert_eq!(bench.wait().code(), Some(0), "{}", bench.log());
    let log = bench.log();
    assert!(number(&log, "max_us") > 0.9 * outage.as_micros() as f64, "{outage:?}: {log}");
    assert!(number(&log, "seconds") > outage.as_secs_f64(), "{outage:?}: {log}");
    target.stop();
}

#[test]
fn requests_lost_after_the_deadline_of_a_bench_had_not_failed() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let url = target.url("disk0");
    let words = ["bench", &url, "--json", "--seconds", "1", "--warm-up", "0", "--queues", "1", "--fail-fast", "2"];
    let mut bench = Process::start(program("twinrail"), words.into_iter().chain(["--depth", "8"]));
    busy(&target);
    target.process.signal(Signal::KILL);
    assert_eq!(bench.wait().code(), Some(5), "{}", bench.log());
    let log = bench.log();
    assert_eq!(number(&log, "errors"), 8.0, "{log}");
    assert!(number(&log, "seconds") > 2.0, "{log}");
    assert!(log.contains("8 of ") && log.contains("the last attempt: ") && log.contains("refused"), "{log}");
    assert!(log.contains("may have died or been restarted"), "{log}");
}
