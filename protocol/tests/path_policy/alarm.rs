//! No path at all.

use twinrail_protocol::initiator::rails::{Action, Settings};
use twinrail_protocol::wire::Rail;

use crate::world::{MS, SECOND, World};

/// TCP alone, and the target is gone.
fn abandoned(settings: Settings) -> (World, u64) {
    let mut world = World::new(settings, 4);
    world.load();
    world.run_for(SECOND);
    world.cut(Rail::TCP);
    let (path, lost_us) = (world.rails.serving().unwrap(), world.now_us);
    world.lose(path, 0);
    (world, lost_us)
}

#[test]
fn without_a_path_there_is_one_alarm_after_300_ms_and_commands_are_held_for_ever() {
    let (mut world, lost_us) = abandoned(Settings::DEFAULT);
    world.run_for(30 * 24 * 3_600 * SECOND / 100);
    let alarms: Vec<_> = world.log.iter().filter(|(_, a)| matches!(a, Action::Alarm { .. })).collect();
    assert_eq!(alarms, [&(lost_us + 300 * MS, Action::Alarm { since_us: lost_us })]);
    assert_eq!(world.did(|a| *a == Action::GiveUp), None);
    let healed_us = world.now_us;
    world.heal(Rail::TCP);
    world.run_for(7 * SECOND);
    assert_eq!(world.serving(), Some(Rail::TCP));
    let over_us = world.did(|a| matches!(a, Action::AlarmOver { .. })).unwrap();
    assert!(over_us - healed_us <= 7 * SECOND);
}

#[test]
fn fail_fast_gives_up_once_and_then_nothing_more_is_done() {
    let (mut world, lost_us) = abandoned(Settings { fail_fast_us: Some(10 * SECOND), ..Settings::DEFAULT });
    world.run_for(9 * SECOND);
    assert_eq!(world.did(|a| *a == Action::GiveUp), None);
    world.run_for(60 * SECOND);
    let at: Vec<_> = world.log.iter().filter(|(_, a)| *a == Action::GiveUp).map(|(at, _)| at - lost_us).collect();
    assert_eq!(at, [10 * SECOND]);
    assert_eq!(world.log.last().unwrap().1, Action::GiveUp);
    assert_eq!(world.rails.deadline_us(), u64::MAX);
}

#[test]
fn fail_fast_counts_a_peer_that_does_not_answer_too() {
    let mut world = World::on_rdma(Settings { fail_fast_us: Some(10 * SECOND), ..Settings::DEFAULT }, 4);
    world.load();
    world.run_for(SECOND);
    world.peer_stall_us = (world.now_us, world.now_us + 60 * SECOND);
    world.run_for(9 * SECOND);
    assert_eq!(world.did(|a| *a == Action::GiveUp), None);
    world.run_for(2 * SECOND);
    assert!(world.did(|a| *a == Action::GiveUp).is_some());
}

#[test]
fn a_switch_that_works_raises_no_alarm() {
    let mut world = World::on_rdma(Settings::DEFAULT, 4);
    world.load();
    world.run_for(SECOND);
    world.cut(Rail::RDMA);
    world.run_for(60 * SECOND);
    assert_eq!(world.did(|a| matches!(a, Action::Alarm { .. })), None);
}
