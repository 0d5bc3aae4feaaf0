//! Back to RDMA: eager, damped, one at a time, never without a standby.

use twinrail_protocol::initiator::rails::{Action, Cause, Settings};
use twinrail_protocol::wire::Rail;

use crate::world::{MS, SECOND, World};

/// RDMA was cut, left, and works again from `now_us` on.
fn after_a_flap() -> World {
    let mut world = World::on_rdma(Settings::DEFAULT, 9);
    world.load();
    world.run_for(SECOND);
    world.cut(Rail::RDMA);
    world.run_for(10 * SECOND);
    assert_eq!(world.serving(), Some(Rail::TCP));
    world.log.clear();
    world.heal(Rail::RDMA);
    world
}

#[test]
fn the_first_rdma_path_needs_good_probes_but_no_settle_time() {
    let mut world = World::new(Settings::DEFAULT, 9);
    world.run_for(SECOND);
    world.rails.offer(Rail::RDMA, true, world.now_us);
    world.run_for(200 * MS);
    let switches = world.switches();
    assert!(
        matches!(switches[..], [(_, Rail::TCP, Cause::Start, _), (_, Rail::RDMA, Cause::Return, _)]),
        "{switches:?}"
    );
    assert!(switches[1].0 > SECOND + 50 * MS, "five probes 10 ms apart");
}

#[test]
fn a_healed_rail_serves_again_after_the_settle_time_and_a_standby_is_there_before() {
    let mut world = after_a_flap();
    world.run_for(15 * SECOND);
    let [(at_us, Rail::RDMA, Cause::Return, blackout_us)] = world.switches()[..] else { panic!("{:?}", world.log) };
    let dialed_us = world.log.iter().rev().find(|(_, a)| matches!(a, Action::Dial { path } if path.rail == Rail::RDMA));
    assert!(at_us - dialed_us.unwrap().0 >= SECOND);
    assert!(blackout_us < MS);
    let fence_us = world.did(|a| matches!(a, Action::Fence { cause: Cause::Return, .. })).unwrap();
    let standby_us = world.did(|a| matches!(a, Action::Dial { path } if path.rail == Rail::TCP)).unwrap();
    assert!(standby_us < fence_us, "a fresh standby comes first");
    assert_eq!(world.did(|a| matches!(a, Action::Say { .. })), None, "nothing was lost");
}

#[test]
fn without_a_fresh_standby_nothing_returns() {
    let mut world = after_a_flap();
    // New TCP connections fail, the one that serves goes on.
    world.refuses_dials = Some(Rail::TCP);
    world.run_for(60 * SECOND);
    assert_eq!((world.serving(), world.switches().len()), (Some(Rail::TCP), 0));
    world.refuses_dials = None;
    world.run_for(7 * SECOND);
    assert_eq!(world.serving(), Some(Rail::RDMA));
}

#[test]
fn nothing_returns_out_of_turn() {
    let mut world = after_a_flap();
    world.gives_turns = false;
    world.run_for(60 * SECOND);
    assert_eq!((world.serving(), world.switches().len()), (Some(Rail::TCP), 0));
    assert_eq!(world.log.iter().filter(|(_, a)| *a == Action::AskTurn).count(), 1);
    world.rails.turn_given(world.now_us);
    world.run_for(10 * MS);
    assert_eq!(world.serving(), Some(Rail::RDMA));
    assert_eq!(world.log.iter().filter(|(_, a)| *a == Action::EndTurn).count(), 1);
}

/// A turn is given back when the path that asked for it is gone, so that another queue may have it.
#[test]
fn a_turn_is_given_back_when_there_is_nothing_to_return_to() {
    let mut world = after_a_flap();
    world.gives_turns = false;
    world.run_for(20 * SECOND);
    assert!(world.did(|a| *a == Action::AskTurn).is_some());
    world.cut(Rail::RDMA);
    world.run_for(2 * SECOND);
    assert!(world.did(|a| *a == Action::EndTurn).is_some());
    // Given too late: it is given back at once.
    world.log.clear();
    world.rails.turn_given(world.now_us);
    world.run_for(10 * MS);
    assert!(world.did(|a| *a == Action::EndTurn).is_some());
    assert_eq!(world.serving(), Some(Rail::TCP));
}

#[test]
fn flapping_is_damped() {
    let mut world = World::on_rdma(Settings::DEFAULT, 9);
    world.load();
    let (begin_us, mut flaps) = (world.now_us, 0);
    // The rail works until it is used, then it is cut for two seconds.
    while world.now_us < begin_us + 600 * SECOND {
        world.run_for(100 * MS);
        if world.serving() == Some(Rail::RDMA) {
            world.cut(Rail::RDMA);
            world.run_for(2 * SECOND);
            world.heal(Rail::RDMA);
            flaps += 1;
        }
    }
    // 1 + 2 + 4 + 8 + 16 + 32 s, then 60 s each, and a few seconds for dialing.
    assert!((10..=16).contains(&flaps), "{flaps} flaps in ten minutes");
    assert_eq!(world.rails.settle().wait_us(), 60 * SECOND);
    // After that it is stable, and forgiven.
    world.run_for(70 * SECOND);
    assert_eq!(world.serving(), Some(Rail::RDMA));
    world.run_for(3_600 * SECOND);
    world.cut(Rail::RDMA);
    world.run_for(SECOND);
    assert_eq!(world.rails.settle().wait_us(), SECOND);
}

#[test]
fn an_activation_that_rdma_refuses_goes_back_to_tcp_and_counts_as_a_flap() {
    let mut world = after_a_flap();
    world.rdma.refuses = true;
    world.run_for(10 * SECOND);
    let switches = world.switches();
    assert!(switches.iter().all(|s| s.1 == Rail::TCP && s.2 == Cause::ActivationFailed) && !switches.is_empty());
    assert!(switches.len() <= 3, "{switches:?}");
    assert_eq!(world.rails.settle().flaps() as usize, 1 + switches.len());
    world.rdma.refuses = false;
    world.run_for(60 * SECOND);
    assert_eq!(world.serving(), Some(Rail::RDMA));
}

#[test]
fn a_fresh_path_that_answers_slowly_is_not_trusted() {
    let mut world = after_a_flap();
    world.rdma.latency_us = 80 * MS;
    world.run_for(60 * SECOND);
    assert_eq!((world.serving(), world.switches().len()), (Some(Rail::TCP), 0));
}

/// Lost while nobody answered: the rail isn't to blame, and comes back as fast as it can be dialed.
#[test]
fn a_queue_pair_lost_while_nobody_answers_comes_back_without_settle() {
    let mut world = after_a_flap();
    world.hardware = true;
    world.run_for(20 * SECOND);
    assert_eq!((world.serving(), world.rails.settle().flaps()), (Some(Rail::RDMA), 1));
    let awake_us = world.now_us + 1_500 * MS;
    world.peer_stall_us = (world.now_us, awake_us);
    let path = world.rails.serving().unwrap();
    world.lose(path, SECOND);
    world.log.clear();
    world.run_until(awake_us + 600 * MS);
    assert_eq!((world.serving(), world.rails.settle().flaps()), (Some(Rail::RDMA), 1), "{:?}", world.log);
}
