//! SPEC.md's tables of the path policy say what the settings say.

use twinrail_protocol::initiator::rails::{Settings, Silence};

use crate::world::{MS, SECOND};

const SPEC: &str = include_str!("../../SPEC.md");

/// The rows of the table with this head: the setting, then its values.
fn rows(head: &str, values: usize) -> Vec<(String, Vec<u64>)> {
    let lines = SPEC.lines().skip_while(|line| *line != head).skip(2).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(|c| c.trim().replace('`', "")).collect();
        (cells[0].clone(), cells[1..=values].iter().map(|c| value(c)).collect())
    };
    lines.map(row).collect()
}

fn value(cell: &str) -> u64 {
    match cell.split_once(' ') {
        Some((number, "ms")) => number.parse::<u64>().unwrap() * MS,
        Some((number, "s")) => number.parse::<u64>().unwrap() * SECOND,
        _ if cell == "never" => u64::MAX,
        _ => cell.parse().unwrap(),
    }
}

#[test]
fn the_tables_of_the_path_policy_are_the_defaults() {
    // Taken apart without a rest, so that no setting is forgotten.
    let Settings {
        rdma,
        tcp,
        answers,
        answers_over_us,
        compare_every_us,
        ask_silent_every_us,
        pause_us,
        ask_again_max_us,
        alarm_us,
        idle_probe_us,
        dial_us,
        activate_us,
        backoff_us,
        backoff_max_us,
        redial_us,
        redial_useful_us,
        redial_max_us,
        lasting_us,
        settle_us,
        settle_max_us,
        good_probes,
        good_within_us,
        stable_us,
        fail_fast_us,
    } = Settings::DEFAULT;
    let of_rail = |Silence { quiet_us, quiet_round_trips, quiet_max_us, unanswered_us, completes: _ }| {
        [quiet_us, quiet_round_trips.into(), quiet_max_us, unanswered_us]
    };
    let names = ["quiet", "quiet_round_trips", "quiet_max", "unanswered"];
    let code: Vec<_> = (0..4).map(|i| (names[i].to_owned(), vec![of_rail(rdma)[i], of_rail(tcp)[i]])).collect();
    assert_eq!(rows("| setting | RDMA | TCP | why |", 2), code);
    let code = [
        ("answers", answers.into()),
        ("answers_over", answers_over_us),
        ("compare_every", compare_every_us),
        ("ask_silent", ask_silent_every_us),
        ("pause", pause_us),
        ("ask_again", ask_again_max_us),
        ("alarm", alarm_us),
        ("idle_probe", idle_probe_us),
        ("dial", dial_us),
        ("activate", activate_us),
        ("backoff", backoff_us),
        ("backoff_max", backoff_max_us),
        ("redial", redial_us),
        ("redial_useful", redial_useful_us),
        ("redial_max", redial_max_us),
        ("lasting", lasting_us),
        ("settle", settle_us),
        ("settle_max", settle_max_us),
        ("good_probes", good_probes.into()),
        ("good_within", good_within_us),
        ("stable", stable_us),
        ("fail_fast", fail_fast_us.unwrap_or(u64::MAX)),
    ];
    let code: Vec<_> = code.into_iter().map(|(name, value)| (name.to_owned(), vec![value])).collect();
    assert_eq!(rows("| setting | default | why |", 1), code);
}
