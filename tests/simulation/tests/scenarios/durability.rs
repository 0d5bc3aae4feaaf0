//! What a FLUSH says, and what is there afterwards.

use super::*;

#[test]
fn fdatasync_fails_once_and_then_succeeds() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.written(A, 0, block(0));
    s.break_with(Fault::SyncFails);
    for queue in [0, 1, 0] {
        let flush = s.flush(A, queue);
        s.expect(flush, Outcome::Failed);
    }
    s.end();
}

#[test]
fn a_failed_sync_concerns_nobody_who_had_flushed() {
    let mut s = Story::of(&[Mode::Shared, Mode::Shared]).begin();
    s.written(A, 0, block(0));
    s.written(B, 0, block(1));
    let good = s.flush(A, 0);
    s.expect_ok(good);
    s.break_with(Fault::SyncFails);
    let bad = s.flush(B, 0);
    s.expect(bad, Outcome::Failed);
    let again = s.flush(A, 0);
    s.expect_ok(again);
    s.end();
}

#[test]
fn a_reboot_between_acknowledgement_and_flush() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let flushed = s.written(A, 0, block(0));
    let flush = s.flush(A, 0);
    s.expect_ok(flush);
    s.written(A, 0, block(1));
    s.break_with(Fault::Reboot { back_after: SECOND });
    s.until_started();
    let lie = s.flush(A, 0);
    s.expect(lie, Outcome::Failed);
    s.expect_content(A, 0, block(0), Some(flushed));
    s.end();
}

#[test]
fn a_reboot_over_flushed_writes_harms_nobody() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let write = s.written(A, 0, block(0));
    let flush = s.flush(A, 1);
    s.expect_ok(flush);
    s.break_with(Fault::Reboot { back_after: SECOND });
    let after = s.flush(A, 0);
    s.expect_ok(after);
    s.expect_content(A, 0, block(0), Some(write));
    s.end();
}

#[test]
fn a_flush_in_flight_over_a_reboot_fails_when_it_is_replayed() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.written(A, 0, block(0));
    s.cut(A, Rail::RDMA, Towards::One(Side::Target));
    s.cut(A, Rail::TCP, Towards::One(Side::Target));
    let flush = s.flush(A, 0);
    s.break_with(Fault::Reboot { back_after: SECOND });
    s.until_started();
    s.mend_all(A);
    s.expect(flush, Outcome::Failed);
    s.end();
}

#[test]
fn a_planned_drain_that_synced_is_no_loss() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let write = s.written(A, 0, block(0));
    s.break_with(Fault::Drain { back_after: SECOND, reboots: true });
    let flush = s.flush(A, 0);
    s.expect_ok(flush);
    s.expect_content(A, 0, block(0), Some(write));
    s.end();
}

#[test]
fn a_sync_fails_when_the_holder_has_just_come_back_and_every_flush_hears_of_it() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    s.written(A, 0, block(0));
    s.break_with(Fault::Crash { back_after: 100 * MS });
    s.until_started();
    s.break_with(Fault::SyncFails);
    let first = s.flush(A, 0);
    s.until("the sync has failed", |what| matches!(what, What::SyncEnded { ok: false, .. }));
    // The failure is still being recorded; a FLUSH whose own sync is good must hear of it all the same.
    let second = s.flush(A, 1);
    s.expect(second, Outcome::Failed);
    s.expect(first, Outcome::Failed);
    s.end();
}

#[test]
fn a_crash_of_the_process_alone_loses_nothing() {
    let mut s = Story::of(&[Mode::Exclusive]).begin();
    let write = s.written(A, 0, block(0));
    s.break_with(Fault::Crash { back_after: SECOND });
    let flush = s.flush(A, 0);
    s.expect_ok(flush);
    s.expect_content(A, 0, block(0), Some(write));
    s.end();
}
