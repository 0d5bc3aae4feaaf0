//! A world from a plan, and its run in two phases: first things break, then everything heals and has to complete.

use twinrail_protocol::wire::Rail;

use crate::clock::{Clock, MS, SECOND, Time};
use crate::disk::Disk;
use crate::faults::{Fault, Mend, Planned};
use crate::ground::{Counters, Event, Ground, Notice, Process};
use crate::history::{Blocks, Command, History, Kind, Setup, Side, Stamp, Summary, What};
use crate::initiator::{FrontEndFile, Initiator, Wish};
use crate::memory::Memory;
use crate::note;
use crate::plan::{Plan, concern};
use crate::rails::link::Link;
use crate::rails::{Host, Network};
use crate::random::Random;
use crate::target::Target;
use crate::trace::Trace;

/// How long after everything is healed all has to be complete: the longest waits of the core, one after the other
/// (a lease, a grace, settling and the longest backoff), and a disk command of 40 s among them.
const PROGRESS: Time = 300 * SECOND;

/// Most processes of initiators in a run, predecessors that sleep included.
const MOST_INITIATORS: usize = 16;

/// How a process stands.
#[derive(Clone, Copy, Debug, Default)]
struct Pause {
    stands: bool,
    /// Counts its pauses.
    number: u32,
    /// It is busy until then.
    busy_until: Time,
    /// Its next turn is planned.
    planned: bool,
}

/// A world.
#[derive(Debug)]
pub struct World {
    /// Time, rails, disk, history.
    pub ground: Ground,
    /// The target.
    pub target: Target,
    /// Processes of initiators.
    pub initiators: Vec<Initiator>,
    /// For each of the plan's initiators, which process has its place now.
    current: Vec<u8>,
    files: Vec<Option<FrontEndFile>>,
    pauses: Vec<Pause>,
    /// Counts cuts, so that a cable isn't mended too early when two overlap.
    cuts: u32,
    last_cuts: Vec<[[u32; 2]; 2]>,
    /// The next fault of the plan, and how many commands it waits for.
    next_fault: usize,
    armed: Option<u32>,
    /// Faults that are left out.
    skipped: Vec<bool>,
    healed: Option<Time>,
    /// Front ends that will start.
    starting: u32,
    /// What becomes of a target that leaves in order: it is back after this time, perhaps after a reboot.
    drain: Option<(Time, bool)>,
    /// The next start finds another image.
    other_image: bool,
    notices: Vec<Notice>,
}

impl World {
    /// A world that begins.
    #[must_use]
    pub fn new(plan: Plan, trace: bool) -> Self {
        Self::without(plan, &[], trace)
    }

    /// A world that begins, and leaves these faults of its plan out.
    #[must_use]
    pub fn without(plan: Plan, skipped: &[bool], trace: bool) -> Self {
        let ground = Ground {
            counters: Counters::default(),
            clock: Clock::default(),
            history: History::default(),
            trace: Trace::new(trace),
            memory: Memory::default(),
            network: Network::default(),
            disk: Disk::default(),
            plan,
            rail_random: Random::new(0, 0),
            process_random: Random::new(0, 0),
            notices: (0..=MOST_INITIATORS).map(|_| Vec::new()).collect(),
        };
        let mut world = Self {
            ground,
            target: Target::default(),
            initiators: Vec::new(),
            current: Vec::new(),
            files: Vec::new(),
            pauses: Vec::new(),
            cuts: 0,
            last_cuts: Vec::new(),
            next_fault: 0,
            armed: None,
            skipped: skipped.to_vec(),
            healed: None,
            starting: 0,
            drain: None,
            other_image: false,
            notices: Vec::new(),
        };
        world.begin();
        world
    }

    /// Begins another run in the same memory.
    pub fn restart(&mut self, seed: u64) {
        self.ground.plan.redraw(seed);
        self.skipped.clear();
        self.begin();
    }

    fn begin(&mut self) {
        let ground = &mut self.ground;
        let plan = &ground.plan;
        let seed = plan.seed;
        ground.clock.reset();
        ground.history.reset(Setup {
            blocks: plan.blocks,
            write_through: plan.write_through,
            lease: plan.lease,
            progress_bound: PROGRESS,
        });
        ground.trace.clear();
        ground.counters = Counters::default();
        ground.memory.reset();
        let links = plan.initiators.iter().map(|i| i.cables.map(|(latency, jitter)| Link::new(latency, jitter)));
        ground.network.reset(links, plan.window, plan.retry_time);
        ground.disk.reset(plan.blocks, plan.disk_latency, plan.disk_slow_permille, Random::new(seed, concern::DISK));
        ground.rail_random = Random::new(seed, concern::RAILS);
        ground.process_random = Random::new(seed, concern::PROCESSES);
        ground.notices.iter_mut().for_each(Vec::clear);
        let count = ground.plan.initiators.len();
        self.target.reset();
        self.initiators.clear();
        self.current.clear();
        self.current.resize(count, u8::MAX);
        self.files.clear();
        self.files.resize(count, None);
        self.pauses.clear();
        self.pauses.resize(MOST_INITIATORS + 1, Pause::default());
        self.cuts = 0;
        self.last_cuts.clear();
        self.last_cuts.resize(count, [[0; 2]; 2]);
        (self.next_fault, self.armed, self.healed) = (0, None, None);
        (self.starting, self.drain, self.other_image) = (0, None, false);
        self.target.start(&mut self.ground);
        for planned in 0..count as u8 {
            let at = self.ground.plan.initiators[usize::from(planned)].attaches_at;
            if at < Time::MAX {
                self.starting += 1;
                self.ground.clock.at(at, Event::Mend { mend: Mend::StartFrontEnd { initiator: planned } });
            }
        }
        self.arm();
        self.turn(Process::Target);
    }

    /// An initiator of the plan opens the volume.
    pub fn attach(&mut self, planned: u8) {
        self.start_front_end(planned);
        self.turns();
    }

    fn start_front_end(&mut self, planned: u8) {
        let number = self.initiators.len() as u8;
        if usize::from(number) >= MOST_INITIATORS {
            return;
        }
        let ground = &mut self.ground;
        ground.network.plug(number, planned);
        let initiator = match &mut self.files[usize::from(planned)] {
            Some(file) => Initiator::successor(ground, number, planned, file),
            None => Initiator::new(ground, number, planned),
        };
        note!(ground, Process::Initiator(number), "starts as client {}", initiator.client.0);
        self.initiators.push(initiator);
        self.current[usize::from(planned)] = number;
    }

    /// The process that has a place of the plan now.
    pub fn initiator(&mut self, planned: u8) -> Option<&mut Initiator> {
        let number = *self.current.get(usize::from(planned))?;
        self.initiators.get_mut(usize::from(number))
    }

    /// Its caller submits a command on a queue.
    #[expect(clippy::too_many_arguments, reason = "that is what a command is made of")]
    pub fn ask(
        &mut self,
        planned: u8,
        queue: u16,
        kind: Kind,
        fua: bool,
        blocks: Blocks,
        stamp: Stamp,
        expected: Stamp,
    ) -> Command {
        let number = usize::from(self.current[usize::from(planned)]);
        let wish = Wish { kind, fua, blocks, stamp, expected };
        let command = self.initiators[number].ask(&mut self.ground, queue, &wish);
        self.turns();
        command
    }

    /// Its caller closes the volume.
    pub fn close(&mut self, planned: u8) {
        let number = usize::from(self.current[usize::from(planned)]);
        self.initiators[number].close(&mut self.ground);
        self.turns();
    }

    /// The next event happens; `false` if there is none.
    pub fn step(&mut self) -> bool {
        let Some(event) = self.ground.clock.next_event() else { return false };
        match event {
            Event::Rail(event) => self.ground.rail_event(event),
            Event::Disk { request } => self.ground.disk_event(request),
            Event::RecordStored { life, number } if life == self.target.life && self.target.running => {
                self.ground.tell(Process::Target, Notice::RecordStored(number));
            }
            Event::Timer { process } => {
                let now = self.ground.now();
                // A later one may have taken its place.
                let due = match process {
                    Process::Target => self.target.timer_is_due(now),
                    Process::Initiator(number) => self.initiators[usize::from(number)].timer_is_due(now),
                };
                if due {
                    self.ground.tell(process, Notice::Timer);
                }
            }
            Event::Work { initiator } => self.ground.tell(Process::Initiator(initiator), Notice::Work),
            Event::Fault { index } => self.planned_fault(index),
            Event::Mend { mend } => self.mend(mend),
            Event::Turn { process } => self.pauses[process.index()].planned = false,
            Event::RecordStored { .. } => {}
        }
        self.turns();
        true
    }

    /// Everybody who has something to look at takes a turn.
    fn turns(&mut self) {
        loop {
            let mut quiet = true;
            for index in 0..=self.initiators.len() {
                let process = if index == 0 { Process::Target } else { Process::Initiator(index as u8 - 1) };
                let now = self.ground.now();
                let pause = &mut self.pauses[index];
                if self.ground.notices[index].is_empty() || pause.stands {
                    continue;
                }
                if now < pause.busy_until {
                    if !std::mem::replace(&mut pause.planned, true) {
                        self.ground.clock.at(pause.busy_until, Event::Turn { process });
                    }
                    continue;
                }
                let takes = self.ground.plan.turn_takes;
                if takes > 0 {
                    pause.busy_until = now + self.ground.process_random.between(1, takes);
                    // What came while it was busy is found in any order; the disk's ends among them in theirs, since a
                    // FLUSH may be answered only when every sync that failed before has been counted (I5).
                    let notices = &mut self.ground.notices[index];
                    let by = self.ground.process_random.below(notices.len() as u64) as usize;
                    if notices.iter().filter(|notice| matches!(notice, Notice::Disk { .. })).count() < 2 {
                        notices.rotate_left(by);
                    }
                }
                quiet = false;
                self.turn(process);
            }
            if quiet {
                break;
            }
        }
        self.check_armed();
    }

    fn turn(&mut self, process: Process) {
        match process {
            Process::Target if self.target.running => {
                self.target.turn(&mut self.ground, &mut self.notices);
                if !self.target.running {
                    self.target_left();
                }
            }
            Process::Target => self.ground.notices[0].clear(),
            Process::Initiator(number) => {
                self.initiators[usize::from(number)].turn(&mut self.ground, &mut self.notices);
            }
        }
    }

    // ---- faults

    /// Gets the next fault of the plan ready.
    fn arm(&mut self) {
        while self.skipped.get(self.next_fault) == Some(&true) {
            self.next_fault += 1;
        }
        self.next_share();
        let Some(Planned { commands, wait, .. }) = self.ground.plan.faults.get(self.next_fault).copied() else {
            if !self.ground.plan.faults.is_empty() {
                let after = self.ground.plan.heals_after;
                self.ground.clock.after(after, Event::Mend { mend: Mend::Everything });
            }
            return;
        };
        self.armed = Some(self.ground.counters.invoked.saturating_add(commands));
        self.ground.clock.after(wait, Event::Fault { index: self.next_fault as u32 });
    }

    /// Enough commands were submitted.
    fn check_armed(&mut self) {
        if self.armed.is_some_and(|commands| self.ground.counters.invoked >= commands) {
            self.armed = None;
            let delay = self.ground.plan.faults.get(self.next_fault).map_or(0, |planned| planned.delay);
            self.ground.clock.after(delay, Event::Fault { index: self.next_fault as u32 });
        }
    }

    /// Callers submit only their share before the next fault.
    fn next_share(&mut self) {
        let faults = self.ground.plan.faults.len() as u32 + 1;
        self.ground.counters.shares = (self.next_fault as u32 + 1, faults);
        for initiator in 0..self.initiators.len() {
            self.ground.tell(Process::Initiator(initiator as u8), Notice::Timer);
        }
    }

    fn planned_fault(&mut self, index: u32) {
        // It came earlier, for the other reason.
        if index as usize != self.next_fault {
            return;
        }
        let Some(planned) = self.ground.plan.faults.get(self.next_fault).copied() else { return };
        self.fault(planned.fault);
        self.next_fault += 1;
        self.arm();
    }

    /// Something breaks.
    pub fn fault(&mut self, fault: Fault) {
        let name = fault.name();
        self.ground.record(What::Fault { name });
        note!(self.ground, "fault", "{fault:?}");
        match fault {
            Fault::Cut { initiator, rail, towards, lasts } => {
                towards.sides().for_each(|side| self.cut(initiator, rail, side, lasts));
            }
            Fault::CutAll { initiator, lasts } => {
                for rail in [Rail::TCP, Rail::RDMA] {
                    for side in [Side::Initiator, Side::Target] {
                        self.cut(initiator, rail, side, lasts);
                    }
                }
            }
            Fault::Reset { initiator, rail, side } => self.ground.reset_all(initiator, rail, side),
            Fault::Pause { process, lasts } => {
                if let Some(process) = self.actual(process) {
                    self.pause(process, lasts);
                }
            }
            Fault::Crash { back_after } => {
                let told = self.ground.process_random.chance(800);
                self.target_dies(told, back_after);
            }
            Fault::Reboot { back_after } => {
                self.target.lose_power(&mut self.ground);
                self.pauses[0].stands = false;
                self.start_target_after(back_after);
            }
            Fault::FrontEndDies { initiator, back_after, wakes_after } => {
                self.front_end_dies(initiator, back_after, wakes_after);
            }
            Fault::Damage { side, count } => self.ground.network.damage[side as usize] += count,
            Fault::SlowDisk { takes } => self.ground.disk.next_takes = Some(takes),
            Fault::DiskFails { count } => self.ground.disk.failures += count,
            Fault::SyncFails => self.ground.disk.sync_failures += 1,
            Fault::Grant { slots } => {
                self.resume(Process::Target);
                self.target.grant(&mut self.ground, slots);
                self.ground.plan.granted = slots;
            }
            Fault::Drain { back_after, reboots } => {
                self.resume(Process::Target);
                self.drain = Some((back_after, reboots));
                self.target.drain(&mut self.ground);
            }
            Fault::Stop { initiator } => {
                let now = self.ground.now();
                if let Some(initiator) = self.initiator(initiator) {
                    initiator.stop(now);
                }
                if let Some(process) = self.actual(Process::Initiator(initiator)) {
                    self.ground.tell(process, Notice::Timer);
                }
            }
            Fault::Arrives { initiator } => {
                self.files[usize::from(initiator)] = None;
                self.start_front_end(initiator);
            }
            Fault::AlteredInstance { initiator } => {
                if let Some(initiator) = self.initiator(initiator) {
                    initiator.alters_instance = true;
                }
            }
            Fault::AlteredRetry { initiator } => {
                if let Some(initiator) = self.initiator(initiator) {
                    initiator.alters_report = true;
                }
            }
            Fault::OtherImage { back_after } => {
                self.other_image = true;
                self.target_dies(true, back_after);
            }
        }
        self.turns();
    }

    /// A process of the plan, and which one that is now.
    fn actual(&self, process: Process) -> Option<Process> {
        match process {
            Process::Target => Some(process),
            Process::Initiator(planned) => {
                let number = *self.current.get(usize::from(planned))?;
                (number != u8::MAX).then_some(Process::Initiator(number))
            }
        }
    }

    fn cut(&mut self, planned: u8, rail: Rail, side: Side, lasts: Time) {
        self.cuts += 1;
        self.last_cuts[usize::from(planned)][usize::from(rail == Rail::RDMA)][side as usize] = self.cuts;
        self.ground.cut(planned, rail, side);
        let mend = Mend::Cable { initiator: planned, rail, side, cut: self.cuts };
        self.ground.clock.after(lasts, Event::Mend { mend });
    }

    fn pause(&mut self, process: Process, lasts: Time) {
        let pause = &mut self.pauses[process.index()];
        pause.stands = true;
        pause.number += 1;
        let mend = Mend::Resume { process, pause: pause.number };
        self.ground.clock.after(lasts, Event::Mend { mend });
    }

    fn resume(&mut self, process: Process) {
        if std::mem::take(&mut self.pauses[process.index()].stands) {
            note!(self.ground, process, "goes on");
        }
    }

    fn target_dies(&mut self, told: bool, back_after: Time) {
        self.target.crash(&mut self.ground, told);
        self.pauses[0].stands = false;
        self.start_target_after(back_after);
    }

    fn start_target_after(&mut self, time: Time) {
        let mend = Mend::StartTarget { life: self.target.life };
        self.ground.clock.after(time, Event::Mend { mend });
    }

    /// It left in order.
    fn target_left(&mut self) {
        let (back_after, reboots) = self.drain.take().unwrap_or((MS, false));
        if reboots {
            self.target.lose_power(&mut self.ground);
        }
        self.start_target_after(back_after);
    }

    fn front_end_dies(&mut self, planned: u8, back_after: Time, wakes_after: Option<Time>) {
        // The front end's file is locked for its life: of two successors one would find it so.
        if self.starting > 0 {
            return;
        }
        let number = self.current[usize::from(planned)];
        let Some(initiator) = self.initiators.get_mut(usize::from(number)).filter(|i| !i.is_done()) else { return };
        self.files[usize::from(planned)] = Some(initiator.file());
        match wakes_after {
            Some(time) => self.pause(Process::Initiator(number), time),
            None => initiator.crash(&mut self.ground),
        }
        self.starting += 1;
        self.ground.clock.after(back_after, Event::Mend { mend: Mend::StartFrontEnd { initiator: planned } });
    }

    fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Cable { initiator, rail, side, cut } => {
                let last = self.last_cuts[usize::from(initiator)][usize::from(rail == Rail::RDMA)][side as usize];
                if last == cut {
                    self.ground.mend(initiator, rail, side);
                }
            }
            Mend::Resume { process, pause } => {
                if self.pauses[process.index()].number == pause {
                    self.resume(process);
                }
            }
            Mend::StartTarget { life } => {
                if life != self.target.life || self.target.running {
                    return;
                }
                self.target.boot(&mut self.ground);
                if !self.target.can_start(&self.ground) {
                    // The lock on the backing is its predecessor's, whose writes the kernel still ends.
                    return self.start_target_after(5 * MS);
                }
                if std::mem::take(&mut self.other_image) {
                    self.ground.replace_image();
                }
                self.target.start(&mut self.ground);
            }
            Mend::StartFrontEnd { initiator } => {
                self.starting -= 1;
                self.start_front_end(initiator);
            }
            Mend::Everything => self.heal(),
        }
    }

    /// Everything that is broken is mended, and nothing breaks any more.
    pub fn heal(&mut self) {
        note!(self.ground, "world", "heals");
        self.next_fault = self.ground.plan.faults.len();
        self.armed = None;
        self.next_share();
        for planned in 0..self.current.len() as u8 {
            for rail in [Rail::TCP, Rail::RDMA] {
                for side in [Side::Initiator, Side::Target] {
                    self.ground.mend(planned, rail, side);
                }
            }
        }
        for index in 0..self.pauses.len() {
            self.pauses[index].stands = false;
        }
        let disk = &mut self.ground.disk;
        (disk.failures, disk.sync_failures, disk.next_takes) = (0, 0, None);
        self.ground.network.damage = [0; 2];
        if !self.target.running {
            self.start_target_after(MS);
        }
        self.healed = Some(self.ground.now());
        self.ground.record(What::Healed);
        self.turns();
    }

    /// Whether everybody has had all it wanted.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.starting == 0 && self.healed.is_some() && self.initiators.iter().all(Initiator::is_done)
    }

    /// Runs the plan to its end.
    pub fn run(&mut self) -> Summary {
        while !self.is_done() && self.step() {
            if self.healed.is_some_and(|healed| self.ground.now() > healed + PROGRESS + SECOND) {
                break;
            }
        }
        self.ground.history.summary()
    }

    /// Whether the target's host is there, for scenarios.
    #[must_use]
    pub fn host(&self) -> Host {
        self.ground.network.host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_a_run_exactly_also_in_memory_that_was_used_before() {
        let mut used = World::new(Plan::draw(1), false);
        for seed in 1..60 {
            used.restart(seed);
            let mut fresh = World::new(Plan::draw(seed), true);
            assert_eq!(used.run(), fresh.run(), "seed {seed}");
            assert!(used.ground.history.events == fresh.ground.history.events, "seed {seed}");
            assert!(!fresh.ground.trace.lines().is_empty() && used.ground.trace.lines().is_empty());
        }
    }

    #[test]
    fn a_run_without_faults_has_none_and_completes() {
        let plan = Plan::draw(5);
        let skipped = vec![true; plan.faults.len()];
        let commands: u32 = plan.initiators.iter().filter(|i| i.attaches_at < Time::MAX).map(|i| i.commands).sum();
        let mut world = World::without(plan, &skipped, false);
        let summary = world.run();
        assert_eq!((summary.faults, summary.restarts), (0, 0));
        assert_eq!(summary.commands, u64::from(commands));
        let completed = |event: &&crate::history::Event| matches!(event.what, What::Completed { .. });
        assert_eq!(world.ground.history.events.iter().filter(completed).count(), commands as usize);
    }
}
