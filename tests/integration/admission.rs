//! Who may come in, and who has to go.

use twinrail_protocol::wire::{Attach, AttachFlags, AttachMode, Handshake};
use twinrail_protocol::{Flags, Opcode, Status};
use twinrail_tests::wire::{Connection, Queue, attach};
use twinrail_tests::{Target, twinrail};

#[test]
fn an_initiator_that_is_not_named_is_refused() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--allow", "vm-host-1"]).start();
    let mut stranger = Connection::open(target.address);
    stranger.hello(1, 1);
    let ended = stranger.end().expect("a refusal has a reason");
    assert_eq!(ended.status, Status::NOT_ALLOWED);
    assert!(ended.text.contains("a test") && ended.text.contains("allow"), "{}", ended.text);
    twinrail(["info", &target.url("disk0"), "--name", "vm-host-1"]).succeeded();
    let run = twinrail(["info", &target.url("disk0"), "--name", "vm-host-2"]);
    assert_eq!(run.code, Some(4), "{}", run.stderr);
}

#[test]
fn i2_a_preempted_writer_hears_of_it_and_nothing_of_it_lands_later() {
    let volume = "disk0=memory,size=1M,inject=write-delay-ms=700";
    let target = Target::builder(&[volume]).args(&["--allow-fault-injection"]).start();
    let mut old = Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE);
    old.send(0, Opcode::WRITE, Flags::NONE, (0, 4096), &[1; 4096]);
    // What comes behind it was answered, so the write has arrived and waits for the slow disk.
    old.send(1, Opcode::READ, Flags::NONE, (0, 4096), &[]);
    assert_eq!(old.reply().0.opcode, Opcode::READ);

    let preempt = Attach { flags: AttachFlags::PREEMPT, ..attach("disk0", AttachMode::EXCLUSIVE) };
    let mut connection = Connection::welcomed(target.address);
    connection.handshake(&Handshake::Attach(preempt));
    let mut new = Queue::attached(connection, &preempt);
    assert_eq!(old.connection().end().map(|ended| ended.status), Some(Status::PREEMPTED));
    let (reply, before) = new.call(Opcode::READ, Flags::NONE, (0, 4096), &[]);
    assert_eq!(reply.status, Status::OK);
    // This one takes as long as the old one had left, and more.
    assert_eq!(new.status(Opcode::WRITE, (4096, 4096), &[2; 4096]), Status::OK);
    let (_, after) = new.call(Opcode::READ, Flags::NONE, (0, 4096), &[]);
    assert!(before == after, "a write of the preempted session landed after the attach was answered");
    new.close();
}

#[test]
fn more_sessions_than_the_limit_are_refused_and_the_others_go_on() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--max-sessions", "2"]).start();
    let mut readers = [0, 1].map(|_| Queue::attach(target.address, "disk0", AttachMode::READ_ONLY));
    let mut third = Connection::welcomed(target.address);
    third.handshake(&Handshake::Attach(attach("disk0", AttachMode::READ_ONLY)));
    let ended = third.end().expect("a refusal has a reason");
    assert_eq!(ended.status, Status::LIMIT_REACHED);
    assert!(ended.text.contains("max_sessions"), "{}", ended.text);
    for reader in &mut readers {
        assert_eq!(reader.status(Opcode::READ, (0, 512), &[]), Status::OK);
    }
    let [first, _second] = readers;
    first.close();
    Queue::attach(target.address, "disk0", AttachMode::READ_ONLY).close();
}

#[test]
fn a_session_that_never_activates_a_queue_gives_its_volume_back() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--handshake-timeout-ms", "300"]).start();
    let mut idle = Connection::welcomed(target.address);
    idle.handshake(&Handshake::Attach(attach("disk0", AttachMode::EXCLUSIVE)));
    assert!(idle.receive().is_some());
    idle.wait_for_close();
    target.scrape_until("that the session is over", |s| s.sum("twinrail_target_sessions", &[]) == 0.0);
    Queue::attach(target.address, "disk0", AttachMode::EXCLUSIVE).close();
}
