//! Every file in deploy/ is loaded or run by a test: here, or by the one named in [`FILES`].

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use twinrail_tests::{Target, program, run, run_in, scratch, skip, source_root};

/// Each file, and what loads or runs it.
const FILES: [(&str, &str); 7] = [
    ("METRICS.md", "metrics::deploy_metrics_md_has_the_tables_of_both_programs"),
    ("alerts.test.yml", "promtool_accepts_the_prometheus_files"),
    ("alerts.yml", "promtool_accepts_the_prometheus_files"),
    ("prometheus.yml", "metrics::a_real_prometheus_scrapes_a_target_and_loads_the_alerts"),
    ("quickstart", "tests/run, a step of its own"),
    ("target.toml", "the_example_configuration_is_right_and_is_served"),
    ("twinrail-target.service", "systemd_has_nothing_to_say_about_the_unit"),
];

fn deploy(name: &str) -> PathBuf {
    source_root().join("deploy").join(name)
}

#[test]
fn every_file_in_deploy_has_its_test() {
    let entries = fs::read_dir(deploy("")).unwrap();
    let there: BTreeSet<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let tested: BTreeSet<String> = FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(there, tested);
    let steps = fs::read_to_string(source_root().join("tests/run")).unwrap();
    assert!(steps.contains("deploy/quickstart"));
}

#[test]
fn promtool_accepts_the_prometheus_files() {
    if Command::new("promtool").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return skip("promtool isn't installed (Debian: prometheus)");
    }
    for (words, file) in [
        (["check", "config"], "prometheus.yml"),
        (["check", "rules"], "alerts.yml"),
        (["test", "rules"], "alerts.test.yml"),
    ] {
        run_in(&deploy(""), "promtool", [words[0], words[1], file]).succeeded();
    }
}

#[test]
fn every_alert_has_a_test_that_sees_it_fire() {
    let alerts = fs::read_to_string(deploy("alerts.yml")).unwrap();
    let tests = fs::read_to_string(deploy("alerts.test.yml")).unwrap();
    let names: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() >= 6, "{names:?}");
    for name in names {
        let fires = tests
            .split("- eval_time:")
            .any(|part| part.contains(&format!("alertname: {name}\n        exp_alerts:\n          - exp_labels")));
        assert!(fires, "no test sees {name} fire");
    }
}

#[test]
fn the_alerts_speak_of_metrics_that_exist() {
    let table = run(program("twinrail-target"), ["metrics-table"]).text();
    for file in ["alerts.yml", "alerts.test.yml"] {
        let text = fs::read_to_string(deploy(file)).unwrap();
        let words = text.split(|c: char| !(c.is_ascii_lowercase() || c == '_'));
        let names: BTreeSet<&str> = words.filter(|word| word.starts_with("twinrail_")).collect();
        assert!(!names.is_empty());
        for name in names {
            let base = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let known = |name| table.contains(&format!("| `{name}` |"));
            assert!(known(name) || base.is_some_and(known), "{file} has {name}, which isn't in the table");
        }
    }
}

#[test]
fn systemd_has_nothing_to_say_about_the_unit() {
    if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return skip("systemd-analyze isn't installed");
    }
    let directory = scratch();
    // systemd looks whether the program is there.
    let unit = fs::read_to_string(deploy("twinrail-target.service")).unwrap();
    let here = unit.replace("/usr/local/bin/twinrail-target", program("twinrail-target").to_str().unwrap());
    assert_ne!(unit, here);
    let path = directory.path().join("twinrail-target.service");
    fs::write(&path, here).unwrap();
    let run = run("systemd-analyze", ["verify".as_ref(), path.as_os_str()]);
    run.succeeded();
    let about_ours: Vec<&str> = run.stderr.lines().filter(|line| line.contains("twinrail")).collect();
    assert!(about_ours.is_empty(), "{about_ours:?}");
}

#[test]
fn the_unit_fits_the_example_configuration() {
    let unit = fs::read_to_string(deploy("twinrail-target.service")).unwrap();
    let example = fs::read_to_string(deploy("target.toml")).unwrap();
    // What the sandbox lets the target write to is where the example has its volume.
    assert!(unit.contains("StateDirectory=twinrail\n"));
    assert!(example.contains("path = \"/var/lib/twinrail/"), "the example's volume isn't in the state directory");
    // The stop must not be cut short, nor the wait for a predecessor's lock.
    let number = |text: &str, key: &str| -> u64 {
        let line = text.lines().find_map(|line| line.trim_start_matches('#').strip_prefix(key));
        line.unwrap_or_else(|| panic!("no {key}")).trim_start_matches([' ', '=']).trim().parse().unwrap()
    };
    assert!(number(&unit, "TimeoutStartSec") * 1000 > number(&example, "lock_wait_ms"));
    assert!(number(&unit, "TimeoutStopSec") * 1000 > number(&example, "drain_timeout_ms") + 60_000);
    let files = number(&unit, "LimitNOFILE");
    assert!(files > number(&example, "max_connections") + number(&example, "max_handshakes") + 1000);
}

#[test]
fn the_example_configuration_is_right_and_is_served() {
    let said = run(program("twinrail-target"), ["check-config".as_ref(), deploy("target.toml").as_os_str()]).text();
    assert!(said.contains("ok") && said.contains('1'), "{said}");
    // Served as it stands, but for the place and size of its volume and its ports.
    let directory = scratch();
    let example = fs::read_to_string(deploy("target.toml")).unwrap();
    let path = directory.path().join("disk0.img");
    let here: Vec<String> = example
        .lines()
        .map(|line| match line.split_once(" = ") {
            Some(("path", _)) => format!("path = {path:?}"),
            Some(("size", _)) => "size = \"4M\"".to_owned(),
            Some(("#listen", _)) => "listen = [\"127.0.0.1:0\"]".to_owned(),
            Some(("#metrics", _)) => "metrics = \"127.0.0.1:0\"".to_owned(),
            _ => line.to_owned(),
        })
        .collect();
    let config = directory.path().join("target.toml");
    fs::write(&config, here.join("\n")).unwrap();
    let target = Target::builder(&[]).args(&["--config", config.to_str().unwrap()]).start();
    assert_eq!(path.metadata().unwrap().len(), 4 << 20);
    target.stop();
}

#[test]
fn a_wrong_key_in_a_configuration_is_named_with_its_line_and_the_nearest_right_one() {
    let directory = scratch();
    let config = directory.path().join("target.toml");
    fs::write(&config, "listen = [\"127.0.0.1:0\"]\nqueue_dept = 3\n").unwrap();
    let complaint = run(program("twinrail-target"), ["check-config".as_ref(), config.as_os_str()]).complaint();
    assert!(complaint.contains("target.toml:2:") && complaint.contains("\"queue_depth\""), "{complaint}");
}
