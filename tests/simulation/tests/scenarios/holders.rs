//! Who holds the volume.

use super::*;

fn refusals(s: &Scenario) -> usize {
    s.count(|what| matches!(what, What::AttachRefused { .. }))
}

#[test]
fn a_second_initiator_attaches_between() {
    let mut s = Story::of(&[Mode::Exclusive, Mode::Exclusive]).later(B).begin();
    s.written(A, 0, block(0));
    s.cut_all(A);
    let held = s.write(A, 0, block(0));
    s.until("the lease is over", |what| matches!(what, What::SessionEnded { .. }));
    s.attached(B);
    let others = s.written(B, 0, block(0));
    s.close(B);
    s.mend_all(A);
    let outcome = s.outcome(held);
    assert!(matches!(outcome, Outcome::Unknown | Outcome::Failed), "{outcome:?}");
    assert!(refusals(&s) > 0, "its generation is past");
    s.expect_executions(held, 0);
    s.expect_executions(others, 1);
    s.end();
}

#[test]
fn a_preempted_initiator_wakes_up() {
    let mut s = Story::of(&[Mode::Exclusive, Mode::Exclusive]).later(B).preempts(B).begin();
    let held = s.write(A, 0, block(0));
    s.break_with(Fault::Pause { process: Process::Initiator(A), lasts: 5 * SECOND });
    s.attached(B);
    let theirs = s.written(B, 0, block(0));
    s.wait(10 * SECOND);
    let late = s.write(A, 0, block(0));
    for command in [held, late] {
        assert_ne!(s.outcome(command), Outcome::Refused);
    }
    s.expect_executions(late, 0);
    s.expect_content(B, 0, block(0), Some(theirs));
    s.end();
}

#[test]
fn a_preempt_waits_for_the_old_session_at_the_disk() {
    let mut s = Story::of(&[Mode::Exclusive, Mode::Exclusive]).later(B).preempts(B).begin();
    s.slow_disk(3 * SECOND);
    let slow = s.write(A, 0, block(0));
    s.until_submitted(slow);
    s.attach(B);
    s.until_executed(slow);
    assert_eq!(s.seen(|what| matches!(what, What::Attached(_))), 1, "answered early");
    let theirs = s.written(B, 0, block(0));
    s.expect_content(B, 0, block(0), Some(theirs));
    s.end();
}

#[test]
fn a_front_end_that_was_taken_over_wakes_up_and_tries_to_attach() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.written(A, 0, block(0));
    let old = s.client(A);
    s.break_with(Fault::FrontEndDies { initiator: A, back_after: SECOND, wakes_after: Some(20 * SECOND) });
    s.until("the successor is attached", |what| matches!(what, What::Attached(answer) if answer.next_secret.is_some()));
    let newer = s.written(A, 0, block(0));
    s.until("the predecessor wakes up and gives up", |what| *what == What::Closed { client: old });
    assert_eq!(s.count(|what| matches!(what, What::Attached(answer) if answer.client == old)), 1, "it was let in");
    s.expect_content(A, 0, block(0), Some(newer));
    s.end();
}

#[test]
fn a_front_end_takes_over_while_its_predecessors_write_is_at_the_disk() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.slow_disk(5 * SECOND);
    let orphan = s.write(A, 0, block(0));
    s.until_submitted(orphan);
    s.break_with(Fault::FrontEndDies { initiator: A, back_after: 100 * MS, wakes_after: None });
    s.until_executed(orphan);
    assert_eq!(s.seen(|what| matches!(what, What::Attached(_))), 1, "answered early");
    s.until("the successor is attached", |what| matches!(what, What::Attached(_)));
    let newer = s.written(A, 0, block(0));
    s.expect_content(A, 0, block(0), Some(newer));
    s.end();
}

#[test]
fn a_shared_writer_came_and_went_while_an_exclusive_holder_was_away() {
    let mut s = Story::of(&[Mode::Exclusive, Mode::Shared]).later(B).begin();
    s.cut_all(A);
    let held = s.write(A, 0, block(0));
    s.until("the lease is over", |what| matches!(what, What::SessionEnded { .. }));
    s.attached(B);
    let theirs = s.written(B, 0, block(0));
    s.close(B);
    s.until("it went", |what| matches!(what, What::SessionEnded { .. }));
    s.mend_all(A);
    let outcome = s.outcome(held);
    assert!(matches!(outcome, Outcome::Unknown | Outcome::Failed), "{outcome:?}");
    s.expect_executions(held, 0);
    s.expect_executions(theirs, 1);
    s.end();
}

#[test]
fn a_lease_ends_while_a_write_sits_at_the_disk_and_somebody_else_attaches() {
    let mut s = Story::of(&[Mode::Exclusive, Mode::Exclusive]).later(B).begin();
    s.slow_disk(30 * SECOND);
    let slow = s.write(A, 0, block(0));
    s.until_submitted(slow);
    s.cut_all(A);
    s.until("the lease is over", |what| matches!(what, What::SessionEnding { .. }));
    s.attach(B);
    s.until_executed(slow);
    assert_eq!(s.seen(|what| matches!(what, What::Attached(_))), 1, "answered early");
    let theirs = s.written(B, 0, block(0));
    s.expect_content(B, 0, block(0), Some(theirs));
    s.end();
}

#[test]
fn after_a_restart_a_stranger_waits_for_the_grace_of_the_holder() {
    let mut s = Story::of(&[Mode::Exclusive, Mode::Exclusive]).later(B).begin();
    s.cut_all(A);
    s.break_with(Fault::Crash { back_after: 100 * MS });
    s.until_started();
    s.attach(B);
    s.wait(5 * SECOND);
    assert!(refusals(&s) > 0, "nobody refused the stranger");
    s.mend_all(A);
    s.written(A, 0, block(0));
    s.end();
}
