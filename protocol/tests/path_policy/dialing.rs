//! Which connections there are, and how they come again.

use twinrail_protocol::Epoch;
use twinrail_protocol::initiator::rails::{Action, Cause, PathId, Rails, Settings};
use twinrail_protocol::wire::Rail;

use crate::world::{MS, SECOND, World};

fn dials(world: &World, rail: Rail) -> Vec<u64> {
    world
        .log
        .iter()
        .filter(|(_, a)| matches!(a, Action::Dial { path } if path.rail == rail))
        .map(|(at, _)| *at)
        .collect()
}

#[test]
fn with_tcp_alone_there_is_one_connection_and_a_lost_one_is_replaced() {
    let mut world = World::new(Settings::DEFAULT, 2);
    world.run_for(60 * SECOND);
    assert_eq!(world.counts.dials, 1);
    world.load();
    for n in 0..20 {
        world.run_for(10 * SECOND);
        let (path, lost_us) = (world.rails.serving().unwrap(), world.now_us);
        world.log.clear();
        world.lose(path, 0);
        world.run_for(10 * MS);
        let [(at_us, Rail::TCP, Cause::FailedCompletion, _)] = world.switches()[..] else { panic!("{:?}", world.log) };
        assert!(at_us - lost_us < MS, "round {n}: {} us", at_us - lost_us);
    }
    assert_eq!(world.counts.dials, 21);
}

/// Each path is lost that long after it began to serve; until then commands make progress, or none does.
fn short_lived_paths(settings: Settings, lasts_us: u64, useful: bool, time_us: u64) -> World {
    let mut world = World::new(settings, 2);
    if useful {
        world.load();
    }
    let mut doomed = None;
    while world.now_us < time_us && world.did(|a| *a == Action::GiveUp).is_none() {
        if let Some(path) = world.rails.serving().filter(|path| doomed != Some(*path)) {
            doomed = Some(path);
            world.lose(path, lasts_us);
        }
        if !useful {
            world.rails.submitted(world.now_us);
        }
        world.run_for(MS / 10);
    }
    world
}

#[test]
fn a_target_that_drops_each_path_as_it_begins_was_dialed_a_hundred_times_a_second() {
    let world = short_lived_paths(Settings::DEFAULT, 0, false, 60 * SECOND);
    assert!((50..=75).contains(&world.counts.dials), "{} dials in a minute", world.counts.dials);
}

#[test]
fn paths_that_complete_commands_but_die_soon_are_replaced_ten_times_a_second() {
    let world = short_lived_paths(Settings::DEFAULT, 5 * MS, true, 60 * SECOND);
    assert!((500..=620).contains(&world.counts.dials), "{} dials in a minute", world.counts.dials);
}

#[test]
fn a_path_that_lasted_is_replaced_at_once_however_short_those_before_lived() {
    let mut world = short_lived_paths(Settings::DEFAULT, 0, false, 20 * SECOND);
    world.load();
    world.run_for(10 * SECOND);
    let (path, lost_us) = (world.rails.serving().unwrap(), world.now_us);
    world.log.clear();
    world.lose(path, 0);
    world.run_for(SECOND);
    assert!(matches!(world.switches()[..], [(at_us, ..)] if at_us < lost_us + MS), "{:?}", world.log);
}

#[test]
fn fail_fast_began_anew_with_each_path_though_none_completed_a_command() {
    let settings = Settings { fail_fast_us: Some(10 * SECOND), ..Settings::DEFAULT };
    let world = short_lived_paths(settings, 5 * MS, false, 60 * SECOND);
    let over_us = world.did(|a| *a == Action::GiveUp).unwrap();
    assert!((10 * SECOND..12 * SECOND).contains(&over_us), "{over_us}");
    let world = short_lived_paths(settings, 5 * MS, true, 60 * SECOND);
    assert_eq!(world.did(|a| *a == Action::GiveUp), None, "commands were completed");
}

#[test]
fn failed_dials_come_ever_more_rarely_but_never_more_than_five_seconds_apart() {
    let mut world = World::new(Settings::DEFAULT, 2);
    world.refuses_dials = Some(Rail::TCP);
    world.run_for(600 * SECOND);
    let dials = dials(&world, Rail::TCP);
    let gaps: Vec<_> = dials.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(gaps[0] <= 100 * MS, "{gaps:?}");
    assert!(gaps[8..].iter().all(|gap| (2_500 * MS..=5_000 * MS).contains(gap)), "{gaps:?}");
    assert!(
        gaps[8..].iter().any(|gap| *gap < 3_500 * MS) && gaps[8..].iter().any(|gap| *gap > 4_000 * MS),
        "no jitter"
    );
}

#[test]
fn a_lost_standby_is_dialed_again_while_rdma_serves() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    world.load();
    world.run_for(20 * SECOND);
    let standby = world.rails.standby(Rail::TCP).unwrap();
    world.lose(standby, 0);
    world.run_for(200 * MS);
    assert_eq!(world.serving(), Some(Rail::RDMA));
    assert!(world.rails.standby(Rail::TCP).is_some_and(|path| path != standby));
}

#[test]
fn the_last_path_is_replaced_at_once_however_often_dials_failed_before() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    world.refuses_dials = Some(Rail::TCP);
    let standby = world.rails.standby(Rail::TCP).unwrap();
    world.lose(standby, 0);
    world.run_for(60 * SECOND);
    world.refuses_dials = None;
    let (path, lost_us) = (world.rails.serving().unwrap(), world.now_us);
    world.rails.offer(Rail::RDMA, false, lost_us);
    world.lose(path, 0);
    world.run_for(10 * SECOND);
    assert!(matches!(world.switches()[..], [(at_us, Rail::TCP, _, _)] if at_us < lost_us + MS), "{:?}", world.log);
}

#[test]
fn a_standby_that_is_lost_as_soon_as_it_stands_is_not_dialed_in_a_rush() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    let before = world.counts.dials;
    for _ in 0..1_000 {
        if let Some(standby) = world.rails.standby(Rail::TCP) {
            world.lose(standby, 0);
        }
        world.run_for(50 * MS);
    }
    assert!((10..30).contains(&(world.counts.dials - before)), "{} dials in 50 s", world.counts.dials - before);
}

#[test]
fn a_silent_standby_is_replaced_while_the_peer_answers_elsewhere() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    world.load();
    let old = world.rails.standby(Rail::TCP);
    world.deaf = old;
    world.run_for(22 * SECOND);
    assert!(world.did(|a| matches!(a, Action::Close { path } if Some(*path) == old)).is_some());
    assert!(world.rails.standby(Rail::TCP).is_some_and(|path| Some(path) != old));
    assert_eq!(world.serving(), Some(Rail::RDMA));
}

#[test]
fn standbys_are_probed_every_five_seconds() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    world.load();
    let before = world.counts.probes;
    world.run_for(600 * SECOND);
    assert!((119..=121).contains(&(world.counts.probes - before)), "{}", world.counts.probes - before);
}

/// Three of them would leave no credit for another, and the path would never be probed again.
#[test]
fn probes_of_a_standby_are_void_once_it_serves() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    world.tcp.data_until_us = world.now_us + SECOND;
    world.rdma.data_until_us = world.now_us + SECOND;
    world.submit(SECOND, false);
    // Both are asked and don't answer, then RDMA is lost.
    world.run_for(500 * MS);
    let path = world.rails.serving().unwrap();
    world.rails.offer(Rail::RDMA, false, world.now_us);
    world.lose(path, 0);
    world.run_for(2 * SECOND);
    assert_eq!(world.serving(), Some(Rail::TCP));
    // From now on nothing waits, and the path is idle.
    world.submit(0, false);
    world.run_for(SECOND);
    let (path, before) = (world.rails.serving(), world.counts.probes_serving);
    world.run_for(60 * SECOND);
    assert!(world.counts.probes_serving >= before + 11, "{} probes", world.counts.probes_serving - before);
    assert_eq!(world.rails.serving(), path);
}

#[test]
fn an_activation_that_is_not_answered_is_tried_elsewhere_with_a_greater_epoch() {
    let mut world = World::new(Settings::DEFAULT, 2);
    // The handshake passes, then nothing does.
    world.run_until(150);
    let path = world.did(|a| matches!(a, Action::Activate { .. }));
    assert_eq!(path, None);
    world.loses_activations = 1;
    world.run_for(10 * SECOND);
    let epochs: Vec<_> = world
        .log
        .iter()
        .filter_map(|(_, a)| if let Action::Activate { epoch, .. } = a { Some(*epoch) } else { None })
        .collect();
    assert_eq!(epochs, [Epoch(1), Epoch(2)]);
    assert_eq!(world.serving(), Some(Rail::TCP));
}

#[test]
fn a_lost_session_begins_again_with_epoch_one_and_without_old_paths() {
    let mut world = World::on_rdma(Settings::DEFAULT, 2);
    world.load();
    world.run_for(SECOND);
    let (serving, standby) = (world.rails.serving().unwrap(), world.rails.standby(Rail::TCP).unwrap());
    world.session_lost();
    world.run_for(SECOND);
    assert!(world.did(|a| matches!(a, Action::Fence { path, .. } if *path == serving)).is_some());
    assert!(world.did(|a| matches!(a, Action::Close { path } if *path == standby)).is_some());
    assert!(world.did(|a| matches!(a, Action::Activate { epoch: Epoch(1), .. })).is_some());
    assert_eq!(world.serving(), Some(Rail::TCP), "RDMA waits until it is offered");
    world.rails.offer(Rail::RDMA, true, world.now_us);
    world.run_for(SECOND);
    assert_eq!(world.serving(), Some(Rail::RDMA));
}

/// The one path that is being dialed.
fn next_dial(rails: &mut Rails, now_us: u64) -> Option<PathId> {
    std::iter::from_fn(|| rails.poll(now_us))
        .find_map(|a| if let Action::Dial { path } = a { Some(path) } else { None })
}

#[test]
fn a_target_that_asks_for_time_is_given_it() {
    let mut rails = Rails::new(Settings::DEFAULT, 1, 0);
    let path = next_dial(&mut rails, 0).unwrap();
    rails.dial_failed(path, 3 * SECOND, 0);
    assert_eq!(next_dial(&mut rails, 3 * SECOND - 1), None);
    assert!(next_dial(&mut rails, 3 * SECOND).is_some());
}

#[test]
fn a_path_that_was_given_up_is_not_taken_when_it_stands_at_last() {
    let mut rails = Rails::new(Settings::DEFAULT, 1, 0);
    let path = next_dial(&mut rails, 0).unwrap();
    let late_us = Settings::DEFAULT.dial_us;
    let next = next_dial(&mut rails, late_us).unwrap();
    while rails.poll(late_us).is_some() {}
    rails.dialed(path, Epoch(0), late_us);
    rails.dial_failed(path, 0, late_us);
    assert_eq!(rails.poll(late_us), None);
    rails.dialed(next, Epoch(0), late_us);
    assert_eq!(rails.poll(late_us), Some(Action::Activate { path: next, epoch: Epoch(1) }));
}

/// The answer to an activation may have been lost when this side didn't know that it was tried.
#[test]
fn an_activation_takes_an_epoch_greater_than_the_targets() {
    let mut rails = Rails::new(Settings::DEFAULT, 1, 0);
    let path = next_dial(&mut rails, 0).unwrap();
    rails.dialed(path, Epoch(7), 200);
    assert_eq!(rails.poll(200), Some(Action::Activate { path, epoch: Epoch(8) }));
}
