//! Slot tables are gone.

use super::*;

#[test]
fn a_compare_and_write_is_answered_and_lost_the_target_dies_and_another_queue_comes_back_first() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let swap = s.compare_and_write(A, 1, block(2), None);
    s.until_submitted(swap);
    s.cut(A, Rail::RDMA, Towards::One(Side::Initiator));
    s.until_executed(swap);
    s.break_with(Fault::Crash { back_after: 100 * MS });
    let beside = s.write(A, 0, block(5));
    s.expect_ok(beside);
    // Neither done nor failed: it may have acted, and here it has.
    s.expect(swap, Outcome::Unknown);
    s.expect_executions(swap, 1);
    s.expect_content(A, 0, block(2), Some(swap));
    s.end();
}

#[test]
fn an_exclusive_holder_replays_its_writes_when_the_target_comes_back() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let before = s.written(A, 0, block(0));
    s.break_with(Fault::Crash { back_after: 500 * MS });
    let held: Vec<_> = (1..5).map(|n| s.write(A, n % 2, block(n))).collect();
    for (write, n) in held.iter().zip(1..) {
        s.expect_ok(*write);
        s.expect_content(A, 0, block(n), Some(*write));
    }
    s.expect_content(A, 0, block(0), Some(before));
    s.end();
}

#[test]
fn a_shared_writer_is_told_that_it_isnt_known() {
    let mut s = Story::of(&[Mode::Shared]).begin();
    let write = s.write(A, 0, block(0));
    s.until_submitted(write);
    s.break_with(Fault::Crash { back_after: 100 * MS });
    s.expect(write, Outcome::Unknown);
    s.expect_executions(write, 1);
    s.written(A, 0, block(1));
    s.end();
}

#[test]
fn the_target_comes_back_with_another_image() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.written(A, 0, block(0));
    s.break_with(Fault::OtherImage { back_after: 100 * MS });
    let write = s.write(A, 0, block(1));
    let outcome = s.outcome(write);
    assert!(matches!(outcome, Outcome::Unknown | Outcome::Failed), "{outcome:?} on a volume that isn't its own");
    s.expect_executions(write, 0);
    s.end();
}

#[test]
fn fail_fast_ends_the_session_instead_of_holding() {
    let mut s = Story::of(&[Mode::Exclusive]).with(|plan| plan.initiators[0].fail_fast = Some(SECOND)).begin();
    s.slow_disk(20 * SECOND);
    let write = s.write(A, 0, block(0));
    s.until_submitted(write);
    s.cut_all(A);
    s.expect(write, Outcome::Unknown);
    s.end();
}
