//! Everything that a run is set up with, drawn from its seed.

use twinrail_protocol::wire::Rail;

use crate::clock::{MS, SECOND, Time};
use crate::faults::{self, Fault, Planned};
use crate::history::{MAX_BLOCKS, Mode};
use crate::random::Random;

/// Streams of chance, see [`Random::new`].
pub mod concern {
    /// The plan.
    pub const PLAN: u64 = 1;
    /// Its faults.
    pub const FAULTS: u64 = 2;
    /// What happens on rails.
    pub const RAILS: u64 = 3;
    /// At the disk.
    pub const DISK: u64 = 4;
    /// Ids and jitter of processes.
    pub const PROCESSES: u64 = 5;
    /// What callers do; one more for each initiator.
    pub const WORK: u64 = 16;
}

/// One initiator.
#[derive(Clone, Copy, Debug)]
pub struct InitiatorPlan {
    /// How it attaches.
    pub mode: Mode,
    /// When it attaches for the first time.
    pub attaches_at: Time,
    /// It ends writers that stand in its way.
    pub preempts: bool,
    /// It gives up when it has no path for this long.
    pub fail_fast: Option<Time>,
    /// Queues that it asks for.
    pub queues: u16,
    /// Slots that it asks for in each.
    pub depth: u16,
    /// Commands that it submits.
    pub commands: u32,
    /// Most commands of it that are out.
    pub most_out: u32,
    /// Longest pause between two commands.
    pub pause: Time,
    /// Latency and jitter of its TCP and RDMA cables.
    pub cables: [(Time, Time); 2],
    /// It has an RDMA device.
    pub rdma: bool,
}

/// A plan.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The seed that it was drawn from.
    pub seed: u64,
    /// Blocks of the volume.
    pub blocks: u16,
    /// Most blocks of one command.
    pub most_blocks: u16,
    /// Payload in bytes that travels inside a capsule.
    pub in_capsule: u32,
    /// Data window of a queue in bytes.
    pub data_window: u32,
    /// Slots that the target grants at first.
    pub granted: u16,
    /// How long the target keeps a session without paths.
    pub lease: Time,
    /// A completed change is on stable storage.
    pub write_through: bool,
    /// Commands of all sessions that the target gives to storage at a time.
    pub most_stored: u32,
    /// Fastest and slowest ordinary request of the disk.
    pub disk_latency: (Time, Time),
    /// Of 1000 requests, so many take much longer.
    pub disk_slow_permille: u64,
    /// How long a process is busy after each turn: what comes meanwhile waits.
    pub turn_takes: Time,
    /// Most bytes that wait in a socket.
    pub window: usize,
    /// How long an RDMA request is repeated.
    pub retry_time: Time,
    /// Initiators.
    pub initiators: Vec<InitiatorPlan>,
    /// Faults, one after the other.
    pub faults: Vec<Planned>,
    /// How long after the last fault everything heals.
    pub heals_after: Time,
}

/// A fault that comes late is no fault: of two in a row the second comes at most this much later.
const PATIENCE: Time = 20 * SECOND;

impl Plan {
    /// Draws the plan of a seed.
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        let mut plan = Self::default();
        plan.redraw(seed);
        plan
    }

    /// The same into memory that is there already.
    pub fn redraw(&mut self, seed: u64) {
        let r = &mut Random::new(seed, concern::PLAN);
        self.seed = seed;
        self.blocks = r.between(8, 32) as u16;
        self.most_blocks = (r.between(1, MAX_BLOCKS as u64) as u16).min(self.blocks);
        self.in_capsule = 512 * r.pick(&[1, 2, 4, 8]);
        self.data_window = 512 * r.pick(&[0, 2, 8, 64]);
        self.granted = r.between(1, 4) as u16;
        self.lease = r.pick(&[2, 5, 10, 30]) * SECOND;
        self.write_through = r.chance(150);
        self.most_stored = r.between(1, 6) as u32;
        self.disk_latency = (r.magnitude(10, 200), r.magnitude(200, 5 * MS));
        self.disk_slow_permille = r.pick(&[0, 5, 30]);
        self.window = r.magnitude(1024, 65536) as usize;
        self.turn_takes = if r.chance(500) { 0 } else { r.magnitude(1, 200) };
        self.retry_time = r.between(400, 600) * MS;

        let initiators = r.pick(&[1, 1, 1, 2, 2, 3]);
        let shared = r.chance(500);
        let commands = 110 / initiators as u32;
        let mut commands_of_all = 0;
        self.initiators.clear();
        for number in 0..initiators {
            let mode = match number {
                _ if shared && number < 2 => Mode::Shared,
                0 => Mode::Exclusive,
                _ if r.chance(600) => Mode::ReadOnly,
                _ if shared => Mode::Shared,
                _ => Mode::Exclusive,
            };
            self.initiators.push(InitiatorPlan {
                mode,
                attaches_at: if number == 0 { 0 } else { r.magnitude(10, 20 * MS) },
                preempts: mode != Mode::ReadOnly && number > 0 && r.chance(700),
                fail_fast: r.chance(80).then(|| r.magnitude(100 * MS, 10 * SECOND)),
                queues: r.pick(&[1, 1, 2, 3]),
                depth: r.between(1, 4) as u16,
                commands: {
                    let own = r.between(u64::from(commands) * 3 / 4, u64::from(commands) * 5 / 4);
                    commands_of_all += own;
                    own as u32
                },
                most_out: r.between(2, 12) as u32,
                pause: r.magnitude(2, 2 * MS),
                cables: [(r.magnitude(20, 500), r.magnitude(1, 500)), (r.magnitude(2, 50), r.magnitude(1, 50))],
                rdma: r.chance(800),
            });
        }
        self.heals_after = r.magnitude(MS, 10 * SECOND);
        self.faults.clear();
        let r = &mut Random::new(seed, concern::FAULTS);
        let count = r.between(2, 6);
        let share = commands_of_all / (count + 2);
        let mut faults = std::mem::take(&mut self.faults);
        for number in 1..initiators {
            // Some aren't there from the beginning.
            if r.chance(400) {
                self.initiators[number].attaches_at = Time::MAX;
            }
        }
        while (faults.len() as u64) < count {
            let mut first = true;
            let r2 = &mut r.clone();
            faults::draw(r2, self, |fault| {
                // Half of them come soon after the one before, into the middle of what it started.
                let (commands, wait) = match first && r.chance(600) {
                    true => (r.between(1, share.max(1)) as u32, PATIENCE),
                    false if first => (u32::MAX, r.magnitude(5, 3 * SECOND)),
                    false => (u32::MAX, r.magnitude(5, 5 * MS)),
                };
                first = false;
                faults.push(Planned { commands, wait, delay: r.magnitude(1, 500), fault });
            });
            r.next();
        }
        for number in 1..initiators {
            if self.initiators[number].attaches_at == Time::MAX {
                let fault = Fault::Arrives { initiator: number as u8 };
                let place = r.below(faults.len() as u64 + 1) as usize;
                let wait = r.magnitude(5, 100 * MS);
                faults.insert(place, Planned { commands: u32::MAX, wait, delay: 1, fault });
            }
        }
        self.faults = faults;
    }

    /// Whether an initiator has this rail.
    #[must_use]
    pub fn has_rail(&self, initiator: u8, rail: Rail) -> bool {
        rail == Rail::TCP || self.initiators[usize::from(initiator)].rdma
    }
}
