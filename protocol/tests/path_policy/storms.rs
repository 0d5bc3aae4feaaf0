//! Everything fails at random, then heals: the policy finds a path again, and asks for nothing that it must
//! not (the world checks each action).

use twinrail_protocol::initiator::rails::Settings;
use twinrail_protocol::wire::Rail;

use crate::world::{MS, SECOND, World};

#[test]
fn after_any_storm_rdma_serves_again() {
    let mut switches = 0;
    for seed in 1..=600 {
        let mut world = World::new(Settings::DEFAULT, seed);
        world.hardware = seed % 3 > 0;
        world.load();
        world.rails.offer(Rail::RDMA, true, 0);
        for _ in 0..30 {
            let rail = if world.random(1) == 0 { Rail::TCP } else { Rail::RDMA };
            match world.random(9) {
                0 => world.cut(rail),
                1 => world.line(rail).out_cut = true,
                2 => world.line(rail).back_cut = true,
                3 | 4 => world.heal(rail),
                5 => {
                    let length_us = world.random(3 * SECOND);
                    world.peer_stall_us = (world.now_us, world.now_us + length_us);
                }
                6 => world.asleep_until_us = world.now_us + world.random(2 * SECOND),
                7 => {
                    let paths = [world.rails.serving(), world.rails.standby(rail)];
                    let after_us = world.random(20 * MS);
                    paths.into_iter().flatten().for_each(|path| world.lose(path, after_us));
                }
                8 => world.loses_activations = 1,
                _ => world.line(rail).refuses ^= true,
            }
            let pause_us = 1 << world.random(21);
            world.run_for(pause_us);
        }
        world.load_us = Some(50 * MS);
        world.heal(Rail::TCP);
        world.heal(Rail::RDMA);
        (world.tcp.refuses, world.rdma.refuses, world.loses_activations) = (false, false, 0);
        world.run_for(15 * SECOND);
        assert!(world.serving().is_some(), "seed {seed}: {:?}", world.log);
        world.run_for(100 * SECOND);
        assert_eq!(world.serving(), Some(Rail::RDMA), "seed {seed}: {:?} {:?}", world.log, world.rails);
        switches += world.switches().len();
    }
    println!("600 storms, {switches} switches");
    assert!(switches > 1_000);
}
