//! The rails behave as DESIGN.md says of real ones.

use super::*;
use crate::plan::Plan;
use crate::random::Random;
use crate::run::World;

/// A ground with one initiator's cables and nobody on it.
fn ground() -> World {
    let mut plan = Plan::draw(3);
    plan.faults.clear();
    plan.initiators.truncate(1);
    plan.initiators[0].attaches_at = Time::MAX;
    plan.initiators[0].cables = [(100, 0), (10, 0)];
    plan.retry_time = 500 * MS;
    let mut world = World::new(plan, false);
    world.ground.network.plug(0, 0);
    world
}

/// Lets rail events happen until `end`, and takes the notices.
fn pass(ground: &mut Ground, end: Time) -> Vec<Notice> {
    while ground.clock.next_at().is_some_and(|at| at <= end) {
        if let Some(Event::Rail(event)) = ground.clock.next_event() {
            ground.rail_event(event);
        }
    }
    ground.clock.skip_to(end);
    ground.notices.iter_mut().flat_map(|notices| notices.drain(..)).collect()
}

fn connected(ground: &mut Ground, rail: Rail) -> ConnectionId {
    let id = ground.dial(0, rail);
    let now = ground.now();
    assert!(pass(ground, now + MS).contains(&Notice::Asked(id)));
    ground.accept(id);
    assert!(pass(ground, now + 2 * MS).contains(&Notice::Dialed(id)));
    id
}

fn send(ground: &mut Ground, id: ConnectionId, side: Side, message: &[u8]) {
    ground.rdma_post(id, side, Op::Send(None), &[message], 7);
}

#[test]
fn bytes_come_in_order_and_late_after_a_cut() {
    let ground = &mut ground().ground;
    let id = connected(ground, Rail::TCP);
    ground.tcp_send(id, Side::Initiator, b"one");
    ground.cut(0, Rail::TCP, Side::Target);
    ground.tcp_send(id, Side::Initiator, b"two");
    let now = ground.now();
    assert!(pass(ground, now + SECOND).is_empty());
    let mut bytes = [0; 6];
    assert_eq!(ground.tcp_read_exact(id, Side::Target, &mut bytes), Received::Nothing);
    ground.mend(0, Rail::TCP, Side::Target);
    assert!(pass(ground, now + 4 * SECOND).contains(&Notice::Ready(id)));
    assert_eq!(ground.tcp_read_exact(id, Side::Target, &mut bytes), Received::Some);
    assert_eq!(&bytes, b"onetwo");
}

#[test]
fn a_cut_in_one_direction_lets_the_other_through() {
    let ground = &mut ground().ground;
    let id = connected(ground, Rail::TCP);
    ground.cut(0, Rail::TCP, Side::Target);
    ground.tcp_send(id, Side::Target, b"x");
    let now = ground.now();
    assert_eq!(pass(ground, now + SECOND), [Notice::Ready(id)]);
}

#[test]
fn a_completion_means_that_the_peers_device_has_it_whatever_its_process_does() {
    let ground = &mut ground().ground;
    let id = connected(ground, Rail::RDMA);
    send(ground, id, Side::Initiator, b"command");
    let now = ground.now();
    // Nobody takes a turn here, and yet it completes.
    assert_eq!(pass(ground, now + MS).len(), 2);
    assert_eq!(ground.rdma_completed(id, Side::Initiator), Some(7));
}

#[test]
fn retries_are_exhausted_after_their_time_and_the_other_side_stays_unaware() {
    let ground = &mut ground().ground;
    let id = connected(ground, Rail::RDMA);
    ground.cut(0, Rail::RDMA, Side::Target);
    send(ground, id, Side::Initiator, b"command");
    let now = ground.now();
    assert!(pass(ground, now + 499 * MS).is_empty());
    assert_eq!(pass(ground, now + SECOND), [Notice::Broken(id)]);
    assert!(!ground.is_usable(id, Side::Initiator) && ground.is_usable(id, Side::Target));
}

#[test]
fn a_cut_that_is_mended_in_time_loses_nothing() {
    let ground = &mut ground().ground;
    let id = connected(ground, Rail::RDMA);
    ground.cut(0, Rail::RDMA, Side::Target);
    [b"a", b"b"].iter().for_each(|message| send(ground, id, Side::Initiator, *message));
    let now = ground.now();
    assert!(pass(ground, now + 300 * MS).is_empty());
    ground.mend(0, Rail::RDMA, Side::Target);
    pass(ground, now + 2 * SECOND);
    let mut message = Vec::new();
    for expected in [b"a", b"b"] {
        assert!(ground.rdma_take(id, Side::Target, &mut message));
        assert_eq!(message, expected);
    }
    assert!(ground.is_usable(id, Side::Initiator));
}

#[test]
fn a_message_may_have_arrived_though_its_sender_errs() {
    let ground = &mut ground().ground;
    let id = connected(ground, Rail::RDMA);
    ground.cut(0, Rail::RDMA, Side::Initiator);
    send(ground, id, Side::Initiator, b"command");
    let now = ground.now();
    let notices = pass(ground, now + SECOND);
    assert!(notices.contains(&Notice::Broken(id)));
    let mut message = Vec::new();
    assert!(ground.rdma_take(id, Side::Target, &mut message), "only the acknowledgement was lost");
    assert_eq!(ground.rdma_completed(id, Side::Initiator), None);
}

#[test]
fn the_peers_writes_may_land_until_the_drain_ends_and_never_after() {
    let mut landed = [0; 2];
    for seed in 0..100 {
        let ground = &mut ground().ground;
        ground.rail_random = Random::new(seed, 1);
        let id = connected(ground, Rail::RDMA);
        let (own, theirs) = (ground.lend(8, Side::Target), ground.lend(8, Side::Initiator));
        for (n, landed) in landed.iter_mut().enumerate() {
            ground.memory.bytes_mut(own).fill(n as u8 + 1);
            ground.memory.bytes_mut(theirs).fill(0);
            let op = Op::Write { local: own, remote: theirs, length: 8 };
            ground.rdma_post(id, Side::Target, op, &[], 1);
            if n == 0 {
                ground.fence(id, Side::Initiator);
            }
            let now = ground.now();
            let drained = pass(ground, now + SECOND).contains(&Notice::Drained(id));
            assert_eq!(drained, n == 0);
            *landed += u64::from(ground.memory.bytes(theirs)[0] != 0);
        }
    }
    assert!((10..90).contains(&landed[0]), "{landed:?}");
    assert_eq!(landed[1], 0);
}

#[test]
fn a_host_that_is_down_is_silent_and_one_that_is_up_says_that_nobody_listens() {
    let ground = &mut ground().ground;
    ground.network.host = Host::Down;
    let id = ground.dial(0, Rail::TCP);
    let now = ground.now();
    assert!(pass(ground, now + 5 * SECOND).is_empty());
    ground.network.host = Host::NobodyListens;
    assert_eq!(pass(ground, now + 7 * SECOND), [Notice::DialFailed(id)]);
}
