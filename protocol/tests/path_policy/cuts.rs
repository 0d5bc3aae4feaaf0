//! A path that doesn't work is left, within the time that `Blackout` says.

use twinrail_protocol::Epoch;
use twinrail_protocol::initiator::rails::{Action, Blackout, Cause, Settings, Surroundings};
use twinrail_protocol::wire::Rail;

use crate::world::{MS, SECOND, World};

fn worst_case() -> Blackout {
    let surroundings =
        Surroundings { rdma_round_trip_us: 100, tcp_round_trip_us: 200, fence_us: 100, ..Surroundings::default() };
    Blackout::worst_case(&Settings::DEFAULT, &surroundings)
}

#[test]
fn a_silent_cut_of_rdma_is_left_within_the_bound() {
    let (mut longest_us, bound_us) = (0, worst_case().silent_us);
    for seed in 1..=300 {
        let mut world = World::on_rdma(Settings::DEFAULT, seed);
        world.load();
        let before_us = world.random(50 * MS);
        world.run_for(SECOND + before_us);
        world.cut(Rail::RDMA);
        world.run_for(SECOND);
        let switches = world.switches();
        let [(_, Rail::TCP, Cause::Silent, blackout_us)] = switches[..] else { panic!("seed {seed}: {switches:?}") };
        assert!(blackout_us <= bound_us, "seed {seed}: {blackout_us} us, bound {bound_us} us");
        assert!(blackout_us >= 20 * MS, "seed {seed}: {blackout_us} us is too hasty");
        longest_us = longest_us.max(blackout_us);
    }
    println!("silent cut: longest blackout {longest_us} us, bound {bound_us} us");
}

#[test]
fn one_direction_is_enough_to_leave() {
    for out in [true, false] {
        let mut world = World::on_rdma(Settings::DEFAULT, 3);
        world.load();
        world.run_for(SECOND);
        (world.rdma.out_cut, world.rdma.back_cut) = (out, !out);
        world.run_for(SECOND);
        let switches = world.switches();
        assert!(matches!(switches[..], [(_, Rail::TCP, Cause::Silent, _)]), "{switches:?}");
    }
}

#[test]
fn a_cut_behind_a_slow_disk_is_left_within_the_bound() {
    for seed in 1..=100 {
        let mut world = World::on_rdma(Settings::DEFAULT, seed);
        world.submit(60 * SECOND, false);
        let before_us = world.random(500 * MS);
        world.run_for(SECOND + before_us);
        let cut_us = world.now_us;
        world.cut(Rail::RDMA);
        world.run_for(SECOND);
        let [(at_us, Rail::TCP, Cause::Silent, _)] = world.switches()[..] else { panic!("{:?}", world.log) };
        assert!(at_us - cut_us <= worst_case().silent_us, "seed {seed}: {} us", at_us - cut_us);
    }
}

#[test]
fn an_idle_path_that_is_cut_is_left_after_the_next_probe() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    let cut_us = world.now_us;
    world.cut(Rail::RDMA);
    world.run_for(7 * SECOND);
    let [(at_us, Rail::TCP, Cause::Silent, blackout_us)] = world.switches()[..] else { panic!("{:?}", world.log) };
    assert!(at_us - cut_us <= Settings::DEFAULT.idle_probe_us + worst_case().silent_us);
    assert!(blackout_us < MS, "nobody waited but for the switch itself");
}

/// The hardware takes everything, the reactor answers on TCP only.
#[test]
fn answers_that_never_come_are_given_a_second() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.rdma.data_until_us = world.now_us + 60 * SECOND;
    world.submit(60 * SECOND, false);
    world.run_for(2 * SECOND);
    let [(_, Rail::TCP, Cause::Unanswered, blackout_us)] = world.switches()[..] else { panic!("{:?}", world.log) };
    assert!((SECOND..=worst_case().unanswered_us).contains(&blackout_us), "{blackout_us} us");
}

#[test]
fn what_the_hardware_says_is_believed_at_once() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.load();
    world.run_for(SECOND);
    let (path, lost_us) = (world.rails.serving().unwrap(), world.now_us);
    world.lose(path, 0);
    world.run_for(100 * MS);
    let [(at_us, Rail::TCP, Cause::FailedCompletion, _)] = world.switches()[..] else { panic!("{:?}", world.log) };
    assert!(at_us - lost_us <= MS);
    let said = world.did(|a| matches!(a, Action::Say { path, lost: Epoch(2) } if path.rail == Rail::TCP));
    assert_eq!(said, Some(lost_us), "the peer hears of it on the standby");
}

#[test]
fn the_peers_word_counts_for_the_epoch_that_it_names() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.rails.peer_says_lost(Epoch(1), world.now_us);
    world.run_for(100 * MS);
    assert_eq!(world.serving(), Some(Rail::RDMA), "that path is long gone");
    world.rails.peer_says_lost(Epoch(2), world.now_us);
    world.run_for(10 * MS);
    assert!(matches!(world.switches()[..], [(_, Rail::TCP, Cause::PeerSaid, _)]), "{:?}", world.log);
}

/// Neither rail answers: nothing is closed but what the hardware ends, and a peer that comes back goes on.
#[test]
fn a_dead_peer_closes_nothing() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.load();
    world.run_for(SECOND);
    let (serving, dead_us) = (world.rails.serving(), world.now_us);
    (world.rdma.data_until_us, world.tcp.data_until_us) = (dead_us + 20 * SECOND, dead_us + 20 * SECOND);
    world.run_for(20 * SECOND + 100 * MS);
    assert_eq!(world.rails.serving(), serving);
    assert_eq!(world.did(|a| matches!(a, Action::Fence { .. } | Action::Serving { .. })), None);
    let alarm_us = world.did(|a| matches!(a, Action::Alarm { .. })).unwrap() - dead_us;
    assert!((300 * MS..=312 * MS).contains(&alarm_us), "alarm after {alarm_us} us");
    assert!(world.did(|a| matches!(a, Action::AlarmOver { .. })).is_some());
    assert!(world.did(|a| matches!(a, Action::Dial { path } if path.rail == Rail::TCP)).is_some(), "in parallel");
}

#[test]
fn a_network_that_is_gone_for_a_minute_closes_nothing_either() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.load();
    world.run_for(SECOND);
    let paths = |world: &World| (world.rails.serving(), world.rails.standby(Rail::TCP));
    let before = paths(&world);
    world.cut(Rail::RDMA);
    world.cut(Rail::TCP);
    world.run_for(60 * SECOND);
    assert_eq!(world.did(|a| matches!(a, Action::Fence { .. } | Action::Close { .. })), None);
    assert_eq!(paths(&world), before);
    world.heal(Rail::RDMA);
    world.run_for(SECOND);
    assert_eq!(world.rails.serving(), before.0);
    assert!(world.did(|a| matches!(a, Action::AlarmOver { .. })).is_some());
}

#[test]
fn both_rails_cut_and_healed_go_on_without_blame() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.hardware = true;
    world.load();
    world.run_for(SECOND);
    world.cut(Rail::RDMA);
    world.cut(Rail::TCP);
    world.run_for(5 * SECOND);
    assert_eq!(world.serving(), None, "the hardware ended the queue pair");
    assert!(world.did(|a| matches!(a, Action::Alarm { .. })).is_some());
    world.heal(Rail::RDMA);
    world.heal(Rail::TCP);
    world.run_for(12 * SECOND);
    assert_eq!(world.serving(), Some(Rail::RDMA), "{:?}", world.log);
    assert_eq!(world.rails.settle().flaps(), 0);
}

/// The first path to come back is used, whichever it is.
#[test]
fn both_rails_cut_and_one_healed_go_on_on_that_one() {
    for healed in [Rail::TCP, Rail::RDMA] {
        let mut world = World::on_rdma(Settings::DEFAULT, 5);
        world.hardware = true;
        world.load();
        world.run_for(SECOND);
        world.cut(Rail::RDMA);
        world.cut(Rail::TCP);
        world.run_for(5 * SECOND);
        world.heal(healed);
        world.run_for(20 * SECOND);
        assert_eq!(world.serving(), Some(healed), "{:?}", world.log);
    }
}

/// A firewall forgot the connection, or the target's reactor did: the path is silent, others work.
#[test]
fn a_silent_tcp_path_is_left_when_a_fresh_one_answers() {
    let mut world = World::new(Settings::DEFAULT, 5);
    world.run_for(SECOND);
    assert_eq!(world.serving(), Some(Rail::TCP));
    world.log.clear();
    let old = world.rails.serving();
    world.submit(SECOND, false);
    world.deaf = old;
    world.run_for(20 * SECOND);
    assert!(matches!(world.switches()[..], [(_, Rail::TCP, Cause::Unanswered, _)]), "{:?}", world.log);
    assert_ne!(world.rails.serving(), old);
}

#[test]
fn what_comes_on_a_standby_does_not_speak_for_the_path_that_serves() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.load();
    world.run_for(SECOND);
    world.cut(Rail::RDMA);
    let standby = world.rails.standby(Rail::TCP).unwrap();
    for _ in 0..100 {
        world.run_for(2 * MS);
        world.rails.progress(standby, true, world.now_us);
    }
    let [(_, Rail::TCP, Cause::Silent, blackout_us)] = world.switches()[..] else { panic!("{:?}", world.log) };
    assert!(blackout_us <= worst_case().silent_us);
}

#[test]
fn of_two_standbys_the_one_that_answers_is_taken() {
    let mut world = World::on_rdma(Settings::DEFAULT, 5);
    world.gives_turns = false;
    let path = world.rails.serving().unwrap();
    world.lose(path, 0);
    world.run_for(10 * SECOND);
    assert_eq!(world.serving(), Some(Rail::TCP));
    // Both stand; nothing comes on the TCP standby any more, and it was asked.
    world.deaf = world.rails.standby(Rail::TCP);
    assert!(world.deaf.is_some() && world.rails.standby(Rail::RDMA).is_some());
    world.run_for(8 * SECOND);
    let (path, lost_us) = (world.rails.serving().unwrap(), world.now_us);
    world.lose(path, 0);
    world.run_for(10 * MS);
    assert_eq!(world.serving(), Some(Rail::RDMA), "{:?}", world.log);
    assert!(world.switches().last().unwrap().0 < lost_us + MS);
}
