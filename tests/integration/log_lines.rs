//! What others cause is told, but not as often as they like.

use std::fs::File;
use std::time::Instant;

use twinrail_protocol::wire::AttachMode;
use twinrail_protocol::{Opcode, Status};
use twinrail_tests::wire::Queue;
use twinrail_tests::{Target, scratch};

/// Most lines of one kind that a second begins with, and as many may follow in each second.
const LINES: usize = 20;

fn lines(target: &Target, text: &str) -> Vec<String> {
    target.process.log().lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}

/// How many weren't said, as a line tells it.
fn unsaid(line: &str) -> usize {
    let (_, rest) = line.split_once("unsaid=").expect("no count of lines left out");
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn initiators_that_come_go_and_break_rules_do_not_fill_the_log() {
    const PEERS: usize = 400;
    let args = ["--reactors", "1", "--lease-ms", "0"];
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&args).start();
    let begun = Instant::now();
    for _ in 0..PEERS {
        let mut rude = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
        rude.connection().send(&[1; 64]);
        rude.connection().wait_for_close();
    }
    target.scrape_until("that all sessions are over", |s| {
        s.sum("twinrail_target_protocol_violations_total", &[]) == PEERS as f64
            && s.sum("twinrail_target_sessions", &[]) == 0.0
    });
    let most = LINES * (begun.elapsed().as_secs() as usize + 2);
    assert!(most < PEERS, "too slow to tell anything: {:?}", begun.elapsed());
    for kind in ["session attached", "session ended", "the initiator broke a rule"] {
        let lines = lines(&target, kind);
        assert!((1..=most).contains(&lines.len()), "{} lines of {kind:?}", lines.len());
        assert!(lines.iter().map(|line| unsaid(line) + 1).sum::<usize>() <= PEERS);
    }
}

#[test]
fn a_backing_that_was_cut_is_counted_each_time_and_told_once_a_second() {
    const READS: usize = 300;
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let target = Target::serve(&[&format!("disk0={},size=1M", path.display())]);
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
    File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let begun = Instant::now();
    for _ in 0..READS {
        assert_eq!(queue.status(Opcode::READ, (65536, 4096), &[]), Status::IO_ERROR);
    }
    let elapsed = begun.elapsed();
    queue.close();
    target.scrape_until("each of the errors", |s| {
        s.sum("twinrail_target_storage_errors_total", &[("volume", "disk0")]) == READS as f64
    });
    let lines = lines(&target, "somebody has cut it");
    assert!(lines[0].contains("disk0") && lines[0].contains("offset=65536"), "{}", lines[0]);
    assert!(lines.len() <= elapsed.as_secs() as usize + 1, "{} lines in {elapsed:?}", lines.len());
}
