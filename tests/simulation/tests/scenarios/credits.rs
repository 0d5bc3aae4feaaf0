//! Grants change under commands in flight.

use super::*;

#[test]
fn a_shrink_of_the_grant_crosses_a_command_on_the_wire() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let writes: Vec<_> = (0..4).map(|n| s.write(A, 0, block(n))).collect();
    s.break_with(Fault::Grant { slots: 1 });
    for write in writes {
        s.expect_ok(write);
    }
    let more: Vec<_> = (0..4).map(|n| s.write(A, 0, block(n))).collect();
    for write in more {
        s.expect_ok(write);
    }
    s.end();
}

#[test]
fn commands_beyond_the_grant_wait_at_the_initiator() {
    let mut s = Story::of(&[Mode::Exclusive]).with(|plan| plan.granted = 2).begin();
    s.slow_disk(50 * MS);
    let writes: Vec<_> = (0..6).map(|n| s.write(A, 0, block(n))).collect();
    for write in writes {
        s.expect_ok(write);
        s.expect_executions(write, 1);
    }
    s.end();
}

#[test]
fn a_shrink_and_a_growth_cross_a_switch() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let before: Vec<_> = (0..4).map(|n| s.write(A, 0, block(n))).collect();
    s.break_with(Fault::Grant { slots: 1 });
    s.reset(A, Rail::RDMA, Side::Initiator);
    s.break_with(Fault::Grant { slots: 3 });
    s.until_served_by(A, 0, Rail::TCP);
    s.break_with(Fault::Grant { slots: 2 });
    let after: Vec<_> = (0..4).map(|n| s.write(A, 0, block(n))).collect();
    for write in before.into_iter().chain(after) {
        s.expect_ok(write);
    }
    s.end();
}
