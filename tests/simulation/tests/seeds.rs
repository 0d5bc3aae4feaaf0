//! Seeds, as many as time allows: whatever is drawn, no rule is broken, and enough happens for that to mean
//! something.
//!
//! `TWINRAIL_SIMULATION_SECONDS` says for how long (default 10), `TWINRAIL_SIMULATION_FROM` with which seed to
//! begin (default 1). A seed that fails is repeated by
//! `cargo run -p twinrail-simulation -- replay SEED`.
#![expect(clippy::panic, reason = "a helper of a test, which fails by panicking")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use twinrail_simulation::checkers;
use twinrail_simulation::history::Summary;
use twinrail_simulation::plan::Plan;
use twinrail_simulation::run::World;

/// A seed with less is an empty run, which passes nothing.
const LEAST_COMMANDS: f64 = 50.0;
const LEAST_FAULTS: f64 = 2.0;

fn number(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}: a whole number belongs there"))
}

#[test]
fn no_seed_breaks_a_rule() {
    let time = Duration::from_secs(number("TWINRAIL_SIMULATION_SECONDS", 10));
    let next = AtomicU64::new(number("TWINRAIL_SIMULATION_FROM", 1));
    let failed = AtomicBool::new(false);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let began = Instant::now();
    let work = || {
        let (mut sum, mut runs, mut breaches) = (Summary::default(), 0u64, Vec::new());
        let mut world = World::new(Plan::draw(1), false);
        while !failed.load(Ordering::Relaxed) && began.elapsed() < time {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            world.restart(seed);
            sum += world.run();
            runs += 1;
            if let Err(breach) = checkers::check(&world.ground.history) {
                failed.store(true, Ordering::Relaxed);
                breaches.push(format!("seed {seed}: {breach}"));
            }
        }
        (sum, runs, breaches)
    };
    let done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a seed panicked")).collect()
    });
    let took = began.elapsed().as_secs_f64();
    let (mut sum, mut runs, mut breaches) = (Summary::default(), 0, Vec::new());
    for (one, count, found) in done {
        sum += one;
        runs += count;
        breaches.extend(found);
    }
    let mean = |total: u64| total as f64 / runs.max(1) as f64;
    println!(
        "{runs} seeds in {took:.1} s, {:.0} a second on each of {cores} cores; mean of a seed: {:.1} commands, \
         {:.2} faults, {:.2} switches, {:.2} restarts, {:.1} simulated seconds",
        runs as f64 / took / cores as f64,
        mean(sum.commands),
        mean(sum.faults),
        mean(sum.switches),
        mean(sum.restarts),
        mean(sum.simulated) / 1e6,
    );
    assert!(breaches.is_empty(), "{}", breaches.join("\n"));
    assert!(mean(sum.commands) >= LEAST_COMMANDS, "seeds with too few commands pass nothing");
    assert!(mean(sum.faults) >= LEAST_FAULTS, "seeds with too few faults pass nothing");
}
