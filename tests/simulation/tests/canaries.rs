//! Every rule that can be broken on purpose is broken, one after the other, and a checker sees it within 10,000
//! seeds.
//!
//! The switch is one for the whole process, so that all of this is one test: nothing else may run beside it.

#![expect(clippy::expect_used, reason = "a helper of a test, which fails by panicking")]

use std::sync::atomic::{AtomicU64, Ordering};

use twinrail_protocol::canary::{Canary, break_rule};
use twinrail_simulation::checkers;
use twinrail_simulation::plan::Plan;
use twinrail_simulation::run::World;

const MOST_SEEDS: u64 = 10_000;

/// The first seed that is caught, and what caught it.
fn first_caught(seeds: u64) -> Option<(u64, String)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let best = AtomicU64::new(u64::MAX);
    let work = |first: u64| {
        let mut world = World::new(Plan::draw(1), false);
        let mut found = None;
        for seed in (first..=seeds).step_by(cores as usize) {
            if seed > best.load(Ordering::Relaxed) {
                break;
            }
            world.restart(seed);
            world.run();
            if let Err(breach) = checkers::check(&world.ground.history) {
                best.fetch_min(seed, Ordering::Relaxed);
                found = Some((seed, breach.to_string()));
                break;
            }
        }
        found
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=cores).map(|first| scope.spawn(move || work(first))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("a seed panicked")).min()
    })
}

#[test]
fn every_canary_is_caught() {
    let mut missed = Vec::new();
    for canary in Canary::ALL {
        break_rule(Some(*canary));
        match first_caught(MOST_SEEDS) {
            Some((seed, breach)) => println!("{:<32} {seed:>6} seeds   {breach}", canary.name()),
            None => missed.push(canary.name()),
        }
    }
    break_rule(None);
    assert!(missed.is_empty(), "not caught within {MOST_SEEDS} seeds: {}", missed.join(", "));
    assert_eq!(first_caught(200), None, "caught though no rule is broken");
}
