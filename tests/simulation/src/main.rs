//! `twinrail-simulation`: runs seeds, repeats one with its trace, or makes a failing one smaller.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use clap::{Parser, Subcommand};
use twinrail_protocol::canary::{Canary, break_rule};
use twinrail_simulation::checkers::{self, Breach};
use twinrail_simulation::coverage::Coverage;
use twinrail_simulation::history::Summary;
use twinrail_simulation::plan::Plan;
use twinrail_simulation::run::World;

/// Twinrail under simulation.
#[derive(Debug, Parser)]
struct Arguments {
    /// Break this rule on purpose.
    #[arg(long, global = true)]
    canary: Option<String>,
    #[command(subcommand)]
    command: Order,
}

#[derive(Debug, Subcommand)]
enum Order {
    /// Runs seeds and checks them.
    Run {
        /// How many.
        #[arg(long, default_value_t = 10_000)]
        seeds: u64,
        /// The first.
        #[arg(long, default_value_t = 1)]
        from: u64,
        /// Threads, each with runs of its own.
        #[arg(long, default_value_t = 2)]
        jobs: u64,
        /// Goes on after a failure.
        #[arg(long)]
        keep_going: bool,
        /// Tells how often what was reached.
        #[arg(long)]
        coverage: bool,
    },
    /// Runs one seed and prints everything that happened.
    Replay {
        /// Which.
        seed: u64,
        /// The facts as the checkers read them, too.
        #[arg(long)]
        history: bool,
    },
    /// Leaves out faults and commands of a failing seed as long as it fails, and prints what is left.
    Minimise {
        /// Which.
        seed: u64,
    },
}

fn main() -> ExitCode {
    match obey(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn obey(arguments: Arguments) -> anyhow::Result<()> {
    if let Some(name) = &arguments.canary {
        let canary = Canary::ALL.iter().find(|canary| canary.name() == name);
        let names = Canary::ALL.iter().map(|canary| canary.name()).collect::<Vec<_>>().join(", ");
        break_rule(Some(*canary.ok_or_else(|| anyhow::anyhow!("no rule is called {name:?}; there are {names}"))?));
    }
    match arguments.command {
        Order::Run { seeds, from, jobs, keep_going, coverage } => run(seeds, from, jobs.max(1), keep_going, coverage),
        Order::Replay { seed, history } => replay(seed, history),
        Order::Minimise { seed } => minimise(seed),
    }
}

/// What one thread runs.
#[derive(Clone, Copy, Debug)]
struct Seeds {
    from: u64,
    to: u64,
    step: u64,
    keep_going: bool,
    coverage: bool,
}

/// Runs the seeds of one thread.
fn run_some(seeds: Seeds, stop: &AtomicBool, failures: &AtomicU64) -> (Summary, u64, Coverage) {
    let Seeds { from, to, step, keep_going, coverage } = seeds;
    let mut reached = Coverage::default();
    let mut world = World::new(Plan::draw(from), false);
    let (mut sum, mut runs) = (Summary::default(), 0);
    for seed in (from..to).step_by(step as usize) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        world.restart(seed);
        sum += world.run();
        runs += 1;
        if coverage {
            reached.add(&world.ground.history);
        }
        if let Err(breach) = checkers::check(&world.ground.history) {
            println!("seed {seed}: {breach}");
            failures.fetch_add(1, Ordering::Relaxed);
            if !keep_going {
                stop.store(true, Ordering::Relaxed);
            }
        }
    }
    (sum, runs, reached)
}

fn run(seeds: u64, from: u64, jobs: u64, keep_going: bool, coverage: bool) -> anyhow::Result<()> {
    let (stop, failures) = (AtomicBool::new(false), AtomicU64::new(0));
    let began = Instant::now();
    let all: Vec<(Summary, u64, Coverage)> = std::thread::scope(|scope| {
        let (stop, failures) = (&stop, &failures);
        let jobs: Vec<_> = (0..jobs)
            .map(|job| {
                let seeds = Seeds { from: from + job, to: from + seeds, step: jobs, keep_going, coverage };
                scope.spawn(move || run_some(seeds, stop, failures))
            })
            .collect();
        jobs.into_iter().filter_map(|job| job.join().ok()).collect()
    });
    let took = began.elapsed().as_secs_f64();
    let (mut sum, mut runs) = (Summary::default(), 0);
    let mut reached = Coverage::default();
    for (one, count, its) in all {
        sum += one;
        runs += count;
        reached.merge(its);
    }
    let mean = |total: u64| total as f64 / runs.max(1) as f64;
    println!(
        "{runs} seeds in {took:.1} s: {:.0} a second on each of {jobs} cores; means a seed: {:.1} commands, {:.2} faults, \
         {:.2} switches, {:.2} restarts, {:.1} simulated seconds",
        runs as f64 / took / jobs as f64,
        mean(sum.commands),
        mean(sum.faults),
        mean(sum.switches),
        mean(sum.restarts),
        mean(sum.simulated) / 1e6,
    );
    for (what, count) in reached.counts() {
        println!("{:>12.4} a seed  {what}", mean(*count));
    }
    let failures = failures.into_inner();
    anyhow::ensure!(failures == 0, "{failures} of {runs} seeds broke a rule");
    Ok(())
}

fn replay(seed: u64, history: bool) -> anyhow::Result<()> {
    let mut world = World::new(Plan::draw(seed), true);
    let summary = world.run();
    println!("{:#?}", world.ground.plan);
    world.ground.trace.lines().iter().for_each(|line| println!("{line}"));
    if history {
        world.ground.history.events.iter().for_each(|event| println!("{:>10} {:?}", event.at, event.what));
    }
    println!("{summary:?}");
    let breaches = checkers::breaches(&world.ground.history);
    breaches.iter().for_each(|breach| println!("{breach}"));
    anyhow::ensure!(breaches.is_empty(), "seed {seed} breaks {} rules", breaches.len());
    Ok(())
}

/// Runs a plan without some of its faults.
fn attempt(plan: &Plan, skipped: &[bool]) -> Result<(), Breach> {
    let mut world = World::without(plan.clone(), skipped, false);
    world.run();
    checkers::check(&world.ground.history)
}

fn minimise(seed: u64) -> anyhow::Result<()> {
    let mut plan = Plan::draw(seed);
    let mut skipped = vec![false; plan.faults.len()];
    let Err(breach) = attempt(&plan, &skipped) else {
        anyhow::bail!("seed {seed} breaks no rule");
    };
    println!("seed {seed}: {breach}");
    let fails = |plan: &Plan, skipped: &[bool]| {
        attempt(plan, skipped).err().is_some_and(|other| other.checker == breach.checker)
    };
    loop {
        let before = (skipped.clone(), plan.initiators.iter().map(|i| i.commands).collect::<Vec<_>>());
        for fault in 0..skipped.len() {
            if !std::mem::replace(&mut skipped[fault], true) && !fails(&plan, &skipped) {
                skipped[fault] = false;
            }
        }
        for initiator in 0..plan.initiators.len() {
            let mut cut = plan.initiators[initiator].commands;
            while cut > 0 {
                let commands = plan.initiators[initiator].commands;
                plan.initiators[initiator].commands = commands.saturating_sub(cut).max(1);
                if plan.initiators[initiator].commands == commands || !fails(&plan, &skipped) {
                    plan.initiators[initiator].commands = commands;
                    cut /= 2;
                }
            }
        }
        if before == (skipped.clone(), plan.initiators.iter().map(|i| i.commands).collect()) {
            break;
        }
    }
    let mut world = World::without(plan.clone(), &skipped, true);
    world.run();
    world.ground.trace.lines().iter().for_each(|line| println!("{line}"));
    println!("faults left:");
    plan.faults.iter().zip(&skipped).filter(|(_, skipped)| !**skipped).for_each(|(fault, _)| println!("  {fault:?}"));
    let commands: Vec<u32> = plan.initiators.iter().map(|initiator| initiator.commands).collect();
    println!("commands left: {commands:?}");
    checkers::breaches(&world.ground.history).iter().for_each(|breach| println!("{breach}"));
    Ok(())
}
