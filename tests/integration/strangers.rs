//! Whoever comes to the port without being an initiator: costs a bounded amount, and never a slot of a real session.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use twinrail_protocol::wire::AttachMode;
use twinrail_protocol::{Flags, Opcode, Status};
use twinrail_tests::wire::{Connection, Queue, hello};
use twinrail_tests::{Scrape, Target, skip};

/// Handshakes that ended this way.
fn ended(scrape: &Scrape, result: &str) -> f64 {
    scrape.sum("twinrail_target_handshakes_total", &[("result", result)])
}

fn read_once(queue: &mut Queue) {
    let (reply, payload) = queue.call(Opcode::READ, Flags::NONE, (0, 4096), &[]);
    assert_eq!((reply.status, payload.len()), (Status::OK, 4096));
}

#[test]
fn a_port_scanner_costs_nothing_that_lasts() {
    const CALLS: usize = 500;
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let before = target.process.open_files();
    for _ in 0..CALLS {
        drop(TcpStream::connect(target.address).unwrap());
    }
    target.scrape_until("that all calls are over", |s| {
        ended(s, "lost") + ended(s, "crowded_out") == CALLS as f64
            && s.sum("twinrail_target_handshakes_in_progress", &[]) == 0.0
    });
    read_once(&mut queue);
    assert!(target.process.open_files() <= before + 1, "descriptors were left open (one may be of the metrics)");
}

#[test]
fn an_http_client_and_a_tls_client_are_shown_the_door() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let http = b"GET / HTTP/1.1\r\nHost: 127.0.0.1:4450\r\nUser-Agent: a browser of some kind\r\nAccept: */*\r\n\r\n";
    // A TLS 1.2 record with the beginning of a ClientHello.
    let mut tls = vec![0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3];
    tls.resize(205, 7);
    for bytes in [&http[..], &tls] {
        let mut stranger = Connection::open(target.address);
        stranger.send(bytes);
        stranger.wait_for_close();
    }
    // A short one, which isn't a header's length, is known by its first bytes or by its silence.
    let mut stranger = Connection::open(target.address);
    stranger.send(b"EHLO mail.example.org\r\n");
    stranger.finish_sending();
    stranger.wait_for_close();
    target
        .scrape_until("two bad magics", |s| s.sum("twinrail_target_refusals_total", &[("reason", "bad_magic")]) >= 2.0);
    read_once(&mut queue);
}

#[test]
fn half_a_header_and_silence_ends_by_the_clock() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--handshake-timeout-ms", "300"]).start();
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let mut half = Connection::open(target.address);
    half.send(b"TWINRAIL\x01\x00\x01\x00");
    half.wait_for_close();
    // One who is known for one of ours is told why.
    let mut silent = Connection::welcomed(target.address);
    let told = silent.end().expect("a reason");
    assert_eq!(told.status, Status::TIMEOUT);
    target.scrape_until("two timeouts", |s| ended(s, "timeout") == 2.0);
    read_once(&mut queue);
}

#[test]
fn a_header_that_trickles_in_does_not_outlive_the_clock() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--handshake-timeout-ms", "300"]).start();
    let mut trickle = Connection::open(target.address);
    let over = AtomicBool::new(false);
    let mut sender = trickle.another();
    thread::scope(|scope| {
        scope.spawn(|| {
            for byte in hello(1, 1) {
                if !over.load(Ordering::Relaxed) {
                    sender.send(&[byte]);
                    // The pace of the attack, not a wait for anything.
                    thread::park_timeout(Duration::from_millis(20));
                }
            }
        });
        // Each byte came in time, but not all of them: no WELCOME.
        assert_eq!(trickle.wait_for_close(), 0);
        over.store(true, Ordering::Relaxed);
    });
    target.scrape_until("a timeout", |s| ended(s, "timeout") == 1.0);
}

#[test]
fn five_thousand_idle_connections_cost_a_bounded_amount_and_no_slot() {
    const IDLE: usize = 5000;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < IDLE as u64 + 200) {
        return skip("the limit of open files (ulimit -Hn) is below 5200");
    }
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();

    let target = Target::serve(&["disk0=memory,size=1M"]);
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    read_once(&mut queue);
    let (files, memory_kib) = (target.process.open_files(), target.process.memory_kib("VmRSS"));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut reads = 0u64;
            while !over.load(Ordering::Relaxed) {
                read_once(&mut queue);
                reads += 1;
            }
            reads
        });
        // Every tenth says HELLO before it falls silent.
        let idle: Vec<Connection> = (0..IDLE)
            .map(|i| {
                let mut connection = Connection::open(target.address);
                if i % 10 == 0 {
                    connection.hello(1, 1);
                }
                connection
            })
            .collect();
        let scrape = target.scrape_until("that all of them were seen", |s| {
            ended(s, "crowded_out") + ended(s, "timeout") >= (IDLE - 64) as f64
        });
        assert!(scrape.sum("twinrail_target_handshakes_in_progress", &[]) <= 64.0);
        // They are still there, and a real initiator comes in all the same.
        let mut reader = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
        read_once(&mut reader);
        assert!(target.process.open_files() <= files + 64 + 32, "{} descriptors", target.process.open_files());
        let grown_kib = target.process.memory_kib("VmRSS").saturating_sub(memory_kib);
        assert!(grown_kib < 16 << 10, "{IDLE} idle connections cost {grown_kib} KiB");
        println!("{IDLE} idle connections cost {grown_kib} KiB");
        drop(idle);
        over.store(true, Ordering::Relaxed);
        assert!(worker.join().unwrap() > 0);
    });
}

#[test]
fn out_of_file_descriptors_pauses_accepting_and_nothing_else() {
    let target = Target::builder(&["disk0=memory,size=1M"])
        .args(&["--reactors", "1", "--handshake-timeout-ms", "600000"])
        .under(&["prlimit", "--nofile=48:48"])
        .start();
    let mut queue = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    let idle: Vec<Connection> = (0..60).map(|_| Connection::open(target.address)).collect();
    let line = target.process.wait_for_line("no new connections for now");
    assert!(line.contains("LimitNOFILE") && line.contains("ulimit -n"), "{line}");
    for _ in 0..100 {
        read_once(&mut queue);
    }
    drop(idle);
    let mut reader = Queue::attach(target.address, "disk0", AttachMode::READ_ONLY);
    read_once(&mut reader);
    read_once(&mut queue);
    target.scrape_until("a pause", |s| s.sum("twinrail_target_accept_pauses_total", &[]) > 0.0);
    target.stop();
}
