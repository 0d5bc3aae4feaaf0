//! SIGTERM: what is in flight is finished, everything is synced, the exit code is 0.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use twinrail_initiator::{Options, VolumeUrl, blocking};
use twinrail_protocol::wire::AttachMode;
use twinrail_protocol::{Flags, Opcode, Status};
use twinrail_tests::wire::Queue;
use twinrail_tests::{PATIENCE, Process, Target, program, scratch};

#[test]
fn an_idle_target_leaves_with_0_at_either_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut target = Target::serve(&["disk0=memory,size=1M"]);
        let queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
        target.process.signal(signal);
        assert_eq!(target.process.wait().code(), Some(0), "{}", target.process.log());
        drop(queue);
    }
}

#[test]
fn sigterm_in_the_middle_of_writes_keeps_every_finished_one() {
    const BLOCK: u64 = 65536;
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let mut target = Target::serve(&[&format!("disk0={},size=256M", path.display())]);
    let url: VolumeUrl = target.url("disk0").parse().unwrap();
    let options = Options { queues: 2, fail_fast: Some(Duration::from_millis(500)), ..Options::default() };
    let volume = blocking::Volume::connect(&url, options).unwrap();
    let content = |block: u64| vec![(block % 251) as u8 + 1; BLOCK as usize];
    let mut finished = 0;
    for block in 0.. {
        if block == 300 {
            target.process.signal(Signal::TERM);
        }
        // The first that fails, because the target has gone; how many more it still took is its affair.
        if volume.write_at(block % 4096 * BLOCK, &content(block % 4096)).is_err() {
            break;
        }
        finished = block + 1;
        assert!(block < 1 << 20, "the target should have stopped by now");
    }
    assert!(finished >= 300);
    assert_eq!(target.process.wait().code(), Some(0), "{}", target.process.log());
    assert!(target.process.log().contains("all volumes are synced"), "{}", target.process.log());
    let file = File::open(&path).unwrap();
    for block in 0..finished.min(4096) {
        let mut found = vec![0; BLOCK as usize];
        file.read_exact_at(&mut found, block * BLOCK).unwrap();
        assert!(found == content(block), "block {block} of {finished} finished ones isn't there");
    }
}

#[test]
fn a_slow_write_that_was_begun_is_answered_before_the_target_leaves() {
    const DELAY: Duration = Duration::from_millis(1500);
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let volume = format!("disk0={},size=1M,inject=write-delay-ms={}", path.display(), DELAY.as_millis());
    let mut target = Target::builder(&[&volume]).args(&["--allow-fault-injection"]).start();
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let begun = Instant::now();
    queue.send(0, Opcode::WRITE, Flags::NONE, (4096, 4096), &[9; 4096]);
    // Something behind it on the same connection is answered: so the write has arrived.
    queue.send(1, Opcode::READ, Flags::NONE, (0, 4096), &[]);
    assert_eq!(queue.reply().0.opcode, Opcode::READ);
    target.process.signal(Signal::TERM);
    let (reply, _) = queue.reply();
    assert_eq!((reply.opcode, reply.status), (Opcode::WRITE, Status::OK));
    assert!(begun.elapsed() >= DELAY);
    assert_eq!(target.process.wait().code(), Some(0), "{}", target.process.log());
    let mut found = [0; 4096];
    File::open(&path).unwrap().read_exact_at(&mut found, 4096).unwrap();
    assert_eq!(found, [9; 4096]);
}

#[test]
fn an_exclusive_command_is_answered_though_the_other_reactors_have_nothing_to_do() {
    let volume = "disk0=memory,size=1M,inject=write-delay-ms=1000";
    let mut target = Target::builder(&[volume]).args(&["--allow-fault-injection", "--reactors", "3"]).start();
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    queue.send(0, Opcode::COMPARE_AND_WRITE, Flags::NONE, (0, 512), &[0; 1024]);
    queue.send(1, Opcode::READ, Flags::NONE, (0, 4096), &[]);
    assert_eq!(queue.reply().0.opcode, Opcode::READ);
    target.process.signal(Signal::TERM);
    let (reply, _) = queue.reply();
    assert_eq!((reply.opcode, reply.status), (Opcode::COMPARE_AND_WRITE, Status::OK));
    assert_eq!(queue.connection().end().map(|ended| ended.status), Some(Status::SHUTDOWN));
    assert_eq!(target.process.wait().code(), Some(0), "{}", target.process.log());
}

#[test]
fn a_stop_while_waiting_for_a_volume_is_in_order() {
    let directory = scratch();
    let volume = format!("disk0={},size=1M", directory.path().join("disk0.img").display());
    let first = Target::serve(&[&volume]);
    let mut second = Target::builder(&[&volume]).launch();
    let _waits = second.wait_for_line("waiting");
    second.signal(Signal::TERM);
    assert_eq!(second.wait().code(), Some(0), "{}", second.log());
    first.stop();
}

#[test]
fn commands_that_do_not_end_keep_the_target_only_as_long_as_they_may() {
    const DRAIN: Duration = Duration::from_millis(500);
    let volume = "disk0=memory,size=1M,inject=read-delay-ms=3600000";
    let drain = DRAIN.as_millis().to_string();
    let args = ["--allow-fault-injection", "--drain-timeout-ms", &drain, "--reactors", "1"];
    let mut target = Target::builder(&[volume]).args(&args).start();
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    queue.send(0, Opcode::READ, Flags::NONE, (0, 4096), &[]);
    queue.send(1, Opcode::WRITE, Flags::NONE, (0, 4096), &[1; 4096]);
    assert_eq!(queue.reply().0.opcode, Opcode::WRITE);
    target.process.signal(Signal::TERM);
    let begun = Instant::now();
    // The initiator is told why, instead of an answer to the read.
    assert_eq!(queue.connection().end().map(|ended| ended.status), Some(Status::SHUTDOWN));
    assert_eq!(target.process.wait().code(), Some(0), "{}", target.process.log());
    assert!(begun.elapsed() >= DRAIN, "the read had less time than it may have");
}

#[test]
fn systemd_is_told_when_the_target_serves_and_when_it_stops() {
    use std::os::unix::net::UnixDatagram;
    let directory = scratch();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let variable = format!("NOTIFY_SOCKET={}", path.display());
    let target = Target::builder(&["disk0=memory,size=1M"]).under(&["env", &variable]).start();
    let receive = || {
        let mut room = [0; 4096];
        let length = socket.recv(&mut room).unwrap();
        String::from_utf8_lossy(&room[..length]).into_owned()
    };
    let ready = receive();
    assert!(ready.lines().any(|line| line == "READY=1"), "{ready}");
    target.process.signal(Signal::TERM);
    let stopping = receive();
    assert!(stopping.lines().any(|line| line == "STOPPING=1"), "{stopping}");
}

#[test]
fn a_bench_whose_target_stopped_ended_with_1() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let url = target.url("disk0");
    // With one request in flight there is often none at the end.
    let words = ["bench", &url, "--queues", "2", "--depth", "1", "--seconds", "600", "--fail-fast", "0.5"];
    let mut bench = Process::start(program("twinrail"), words);
    target.scrape_until("a busy target", |s| s.sum("twinrail_target_commands_total", &[]) > 1000.0);
    target.stop();
    assert_eq!(bench.wait().code(), Some(5), "{}", bench.log());
}
