//! Paths change under commands in flight.

use super::*;

#[test]
fn a_reply_is_lost_and_the_write_asked_about_after_a_newer_write_to_the_same_block() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let old = s.write(A, 0, block(3));
    s.until_submitted(old);
    s.cut(A, Rail::RDMA, Towards::One(Side::Initiator));
    s.until_executed(old);
    // The other queue leaves the dead rail and writes the same block, before or after the first is asked about.
    let newer = s.write(A, 1, block(3));
    s.expect_ok(newer);
    s.expect_ok(old);
    s.expect_executions(old, 1);
    s.expect_content(A, 0, block(3), Some(newer));
    s.end();
}

#[test]
fn a_cut_in_one_direction_is_left_for_tcp() {
    for side in [Side::Initiator, Side::Target] {
        let mut s = Story::of(&[Mode::Exclusive]).begin();
        s.cut(A, Rail::RDMA, Towards::One(side));
        let write = s.write(A, 0, block(0));
        s.until_served_by(A, 0, Rail::TCP);
        s.expect_ok(write);
        s.expect_executions(write, 1);
        s.expect_content(A, 1, block(0), Some(write));
        s.end();
    }
}

#[test]
fn both_rails_are_cut_and_nothing_is_lost() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let before = s.written(A, 0, block(0));
    s.cut_all(A);
    let held = s.write(A, 0, block(1));
    s.wait(5 * SECOND);
    assert!(!s.has_ended(held), "there is no path, and the default is to hold");
    s.mend_all(A);
    s.expect_ok(held);
    s.expect_content(A, 1, block(0), Some(before));
    s.end();
}

#[test]
fn both_sides_switch_at_the_same_moment() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let writes: Vec<_> = (0..4).map(|slot| s.write(A, 0, block(slot))).collect();
    s.until_submitted(writes[0]);
    s.reset(A, Rail::RDMA, Side::Initiator);
    s.reset(A, Rail::RDMA, Side::Target);
    for write in &writes {
        s.expect_ok(*write);
        s.expect_executions(*write, 1);
    }
    s.end();
}

#[test]
fn a_flap_in_the_middle_of_a_switch() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.slow_disk(50 * MS);
    let write = s.write(A, 0, block(0));
    s.until_submitted(write);
    s.reset(A, Rail::RDMA, Side::Initiator);
    // The path that takes over breaks before the answer to its activation is there.
    s.until("the next path is accepted", |what| matches!(what, What::EpochAccepted { .. }));
    s.reset(A, Rail::TCP, Side::Target);
    s.expect_ok(write);
    s.expect_executions(write, 1);
    s.end();
}

#[test]
fn a_slow_disk_command_outlives_two_switches() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.slow_disk(30 * SECOND);
    let slow = s.write(A, 0, block(0));
    s.until_submitted(slow);
    s.reset(A, Rail::RDMA, Side::Initiator);
    s.until_served_by(A, 0, Rail::TCP);
    let beside = s.written(A, 0, block(1));
    s.until_served_by(A, 0, Rail::RDMA);
    s.expect_content(A, 0, block(1), Some(beside));
    assert!(!s.has_ended(slow), "nothing waits for the slow command, and it isn't run again");
    s.expect_ok(slow);
    s.expect_executions(slow, 1);
    s.end();
}

#[test]
fn a_read_whose_data_was_half_delivered_when_the_path_fell() {
    for rail in [Rail::TCP, Rail::RDMA] {
        let story = Story::of(&[Mode::Exclusive]).with(|plan| {
            plan.initiators[0].rdma = rail == Rail::RDMA;
            // A socket that holds less than the payload delivers it in pieces.
            plan.window = 1024;
        });
        let mut s = story.begin();
        let write = s.written(A, 0, first(8));
        let read = s.read(A, 0, first(8));
        s.until_executed(read);
        s.wait(150);
        s.reset(A, rail, Side::Initiator);
        s.expect_read(read, first(8), Some(write));
        s.end();
    }
}

#[test]
fn damaged_payloads_are_sent_again_and_never_stored() {
    for side in [Side::Initiator, Side::Target] {
        let mut s = Story::of(&[Mode::Exclusive]).begin();
        s.break_with(Fault::Damage { side, count: 2 });
        let write = s.written(A, 0, first(8));
        s.expect_content(A, 1, first(8), Some(write));
        s.end();
    }
}

#[test]
fn a_target_that_stands_still_is_not_a_dead_rail() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.break_with(Fault::Pause { process: Process::Target, lasts: 2 * SECOND });
    let write = s.write(A, 0, block(0));
    let switches = s.count(|what| matches!(what, What::Switched { .. }));
    s.expect_ok(write);
    assert_eq!(s.count(|what| matches!(what, What::Switched { .. })), switches, "RDMA was left");
    s.end();
}
