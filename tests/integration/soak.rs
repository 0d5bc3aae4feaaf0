//! Long work: memory stays flat.

use std::time::Duration;

use rustix::process::Signal;
use twinrail_tests::{Process, Target, program};

/// Growth that is no leak, in KiB: pages that a program touches for the first time.
const SLACK_KIB: u64 = 2048;

#[test]
fn memory_of_both_processes_is_flat_over_ten_million_commands() {
    const WARM: f64 = 200_000.0;
    const COMMANDS: f64 = 10_000_000.0;
    let target = Target::serve(&["disk0=memory,size=64M"]);
    let mut bench = Process::start(
        program("twinrail"),
        [
            "bench",
            &target.url("disk0"),
            "--seconds",
            "3600",
            "--block-size",
            "512",
            "--depth",
            "64",
            "--queues",
            "2",
            "--pattern",
            "random",
            "--read-percent",
            "50",
        ],
    );
    let commands = |s: &twinrail_tests::Scrape| s.sum("twinrail_target_commands_total", &[("result", "ok")]);
    let resident = |bench: &Process| [target.process.memory_kib("VmRSS"), bench.memory_kib("VmRSS")];
    target.scrape_until("that it is warm", |s| commands(s) >= WARM);
    let before = resident(&bench);
    let mut seen = WARM;
    while seen < WARM + COMMANDS {
        let next = seen + 200_000.0;
        seen = commands(&target.scrape_until("more commands", |s| commands(s) >= next));
        assert!(bench.is_running(), "{}", bench.log());
    }
    let after = resident(&bench);
    println!(
        "over {} commands: target {} -> {} KiB, twinrail {} -> {} KiB",
        seen - WARM,
        before[0],
        after[0],
        before[1],
        after[1]
    );
    for (name, (before, after)) in ["target", "twinrail"].iter().zip(before.into_iter().zip(after)) {
        assert!(after <= before + SLACK_KIB, "{name} grew from {before} to {after} KiB");
    }
    let errors = target.scrape().sum("twinrail_target_commands_total", &[]) - commands(&target.scrape());
    assert!(errors <= 0.0, "{errors} commands failed");
    bench.signal(Signal::INT);
    bench.wait_within(Duration::from_secs(30));
}
