//! What is counted: scraped by a real Prometheus, checked by promtool, described in one table.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Instant;

use twinrail_initiator::{Options, VolumeUrl, blocking};
use twinrail_protocol::wire::{self, AttachMode, Payload};
use twinrail_protocol::{Opcode, Status};
use twinrail_tests::http::get;
use twinrail_tests::wire::Queue;
use twinrail_tests::{PATIENCE, Process, Scrape, Target, program, run, scratch, skip, source_root, twinrail};

/// Whether a program is there.
fn installed(name: &str) -> bool {
    Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Puts a text through `promtool check metrics`.
fn check(text: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.trim().is_empty(), "promtool says:\n{said}");
}

/// A target that has something to tell: commands of each kind, a refusal.
fn busy_target() -> Target {
    let target = Target::serve(&["disk0=memory,size=8M"]);
    let url = target.url("disk0");
    twinrail(["bench", &url, "--seconds", "1", "--read-percent", "50", "--depth", "4", "--queues", "1"]).succeeded();
    let _refused = twinrail(["info", &target.url("disk9")]).complaint();
    target
}

#[test]
fn promtool_has_nothing_to_say_about_either_side() {
    if !installed("promtool") {
        return skip("promtool isn't installed (Debian: prometheus)");
    }
    let target = busy_target();
    check(&target.scrape().text);
    let url: VolumeUrl = target.url("disk0").parse().unwrap();
    let volume = blocking::Volume::connect(&url, Options::default()).unwrap();
    volume.write_at(0, &[1; 4096]).unwrap();
    check(&volume.as_async().metrics().render());
    volume.close().unwrap();
}

#[test]
fn a_real_prometheus_scrapes_a_target_and_loads_the_alerts() {
    if !installed("prometheus") {
        return skip("prometheus isn't installed (Debian: prometheus)");
    }
    let target = busy_target();
    let directory = scratch();
    fs::copy(source_root().join("deploy/alerts.yml"), directory.path().join("alerts.yml")).unwrap();
    // The file of deploy/, but for the address and the pace.
    let config = fs::read_to_string(source_root().join("deploy/prometheus.yml")).unwrap();
    let address = target.metrics.to_string();
    let here = config.replace("127.0.0.1:9450", &address).replace("15s", "200ms");
    assert!(here.contains(&address) && here.contains("200ms"), "deploy/prometheus.yml has another form now");
    fs::write(directory.path().join("prometheus.yml"), here).unwrap();
    let mut command = Command::new("prometheus");
    command.current_dir(directory.path()).args([
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        "--web.listen-address=127.0.0.1:0",
    ]);
    let prometheus = Process::start_command(command);
    let server = prometheus.wait_for("where it listens", |line| {
        let (_, rest) = line.split_once("msg=\"Listening on\" address=")?;
        rest.split_whitespace().next()?.parse().ok()
    });
    let answer = |query: &str| -> Option<f64> {
        let (code, body) = get(server, &format!("/api/v1/query?query={query}"));
        // While it reads its own log it says that it isn't ready.
        let json: serde_json::Value = (code == 200).then(|| serde_json::from_str(&body).unwrap())?;
        json["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    };
    let deadline = Instant::now() + PATIENCE;
    let until = |query: &str, enough: fn(f64) -> bool| {
        while !answer(query).is_some_and(enough) {
            assert!(Instant::now() < deadline, "{query} is {:?}\n{}", answer(query), prometheus.log());
        }
    };
    until("up{job=\"twinrail-target\"}", |up| up == 1.0);
    until("sum(twinrail_target_commands_total{op=\"read\",result=\"ok\"})", |reads| reads > 0.0);
    until("sum(twinrail_target_command_duration_seconds_count{stage=\"storage\"})", |count| count > 0.0);
    until("twinrail_target_refusals_total{reason=\"unknown_volume\"}", |refusals| refusals == 1.0);
    let (_, rules) = get(server, "/api/v1/rules");
    assert!(rules.contains("TwinrailSyncFailed"), "{rules}");
    // What the target says itself and what Prometheus made of it are the same.
    let own = target.scrape().sum("twinrail_target_written_bytes_total", &[]);
    assert!(own > 0.0);
    assert_eq!(answer("sum(twinrail_target_written_bytes_total)"), Some(own));
}

#[test]
fn the_command_answers_prometheus_while_it_works() {
    if !installed("promtool") {
        return skip("promtool isn't installed (Debian: prometheus)");
    }
    let target = Target::serve(&["disk0=memory,size=8M"]);
    // Where: it takes an address only, so a port that was free a moment ago has to do.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let words = ["bench", &target.url("disk0"), "--seconds", "3600", "--metrics", &free.to_string()];
    let _bench = Process::start(program("twinrail"), words);
    // Both are there once the target answers commands.
    let reads = |s: &Scrape, side: &str| s.sum(&format!("twinrail_{side}_commands_total"), &[("op", "read")]);
    target.scrape_until("commands", |s| reads(s, "target") > 1000.0);
    let scrape = Scrape::until(free, "commands", |s| reads(s, "initiator") > 1000.0);
    check(&scrape.text);
    assert_eq!(scrape.sum("twinrail_initiator_sessions", &[]), 1.0);
}

#[test]
fn health_and_readiness_are_told() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    assert_eq!(get(target.metrics, "/healthz").0, 200);
    assert_eq!(get(target.metrics, "/readyz").0, 200);
    assert_eq!(get(target.metrics, "/nothing").0, 404);
}

#[test]
fn every_series_is_of_a_family_in_the_table() {
    let target = busy_target();
    let table = run(program("twinrail-target"), ["metrics-table"]).text();
    for line in target.scrape().text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        assert!(table.contains(&format!("| `{name}` | {kind} |")), "{name} ({kind}) isn't in the table");
    }
}

#[test]
fn every_family_of_the_target_counts_what_it_says() {
    let faulty = "disk1=memory,size=1M,inject=sync-error@1+read-error@4096..8192";
    let volumes = ["disk0=memory,size=8M", faulty];
    let target = Target::builder(&volumes).args(&["--allow-fault-injection"]).start();
    let bench = ["--seconds", "1", "--read-percent", "50", "--block-size", "64k"];
    let url = target.url("disk0");
    twinrail(["bench", &url].iter().chain(bench.iter())).succeeded();
    twinrail(["write", &url, "/dev/zero", "--length", "1M", "--flush"]).succeeded();
    // A volume that isn't there, a peer that breaks the protocol, one that asks for nonsense, one damaged payload.
    let _unknown = twinrail(["info", &target.url("disk9")]).complaint();
    let mut rude = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
    rude.connection().send(&[0; 64]);
    rude.connection().wait_for_close();
    let mut queue = Queue::attach(target.address, "disk1", AttachMode::EXCLUSIVE);
    assert_eq!(queue.status(Opcode::READ, (1, 4096), &[]), Status::MISALIGNED);
    let payload = Payload { length: 4096, crc: 1 };
    let damaged = wire::Command { opcode: Opcode::WRITE, length: 4096, payload, ..wire::Command::default() };
    queue.send_command(0, damaged, &[0; 4096]);
    assert_eq!(queue.reply().0.status, Status::PAYLOAD_CRC);
    // A bad sector, and a sync that fails.
    assert_eq!(queue.status(Opcode::READ, (4096, 4096), &[]), Status::IO_ERROR);
    assert_eq!(queue.status(Opcode::WRITE, (0, 4096), &[0; 4096]), Status::OK);
    assert_eq!(queue.status(Opcode::FLUSH, (0, 0), &[]), Status::FLUSH_FAILED);

    // What takes more than this: a path that is lost, descriptors that run out, a full arena, a payload read ahead.
    let elsewhere = [
        "stale_frames_total",
        "path_switches_total",
        "reported_commands_total",
        "accept_pauses_total",
        "commands_parked",
        "copied_bytes_total",
        "handshakes_in_progress",
    ];
    let table = run(program("twinrail-target"), ["metrics-table"]).text();
    let families = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut silent: Vec<&str> =
        families.filter(|family| !elsewhere.iter().any(|name| family.ends_with(name))).collect();
    // A histogram has no series of its own name.
    let count = |s: &Scrape, name: &str| s.sum(name, &[]) + s.sum(&format!("{name}_count"), &[]);
    // All of them have a moment, since a thread passes on what it counted before it sleeps.
    let mut scrape = target.scrape();
    let deadline = Instant::now() + PATIENCE / 20;
    while silent.iter().any(|family| count(&scrape, family) == 0.0) && Instant::now() < deadline {
        scrape = target.scrape();
    }
    silent.retain(|family| count(&scrape, family) == 0.0);
    assert!(silent.is_empty(), "these count nothing: {silent:?}\n{}", scrape.text);
    drop(queue);
}

#[test]
fn deploy_metrics_md_has_the_tables_of_both_programs() {
    let document = fs::read_to_string(source_root().join("deploy/METRICS.md")).unwrap();
    for name in ["twinrail-target", "twinrail"] {
        let table = run(program(name), ["metrics-table"]).text();
        let remedy = format!("put in what `{name} metrics-table` prints");
        assert!(document.contains(table.trim()), "deploy/METRICS.md hasn't the table of {name}: {remedy}\n{table}");
    }
    let rows = document.lines().filter(|line| line.starts_with("| `twinrail_")).count();
    let tables = ["twinrail-target", "twinrail"].map(|name| run(program(name), ["metrics-table"]).text());
    let of_the_tables: usize = tables.iter().map(|table| table.matches("\n| `").count()).sum();
    assert_eq!(rows, of_the_tables, "deploy/METRICS.md has rows that no program knows");
}

#[test]
fn the_tables_of_the_two_programs_had_different_headers() {
    let [target, initiator] = ["twinrail-target", "twinrail"].map(|name| {
        let table = run(program(name), ["metrics-table"]).text();
        table.lines().take(2).map(str::to_owned).collect::<Vec<_>>()
    });
    assert_eq!(target, initiator);
}
