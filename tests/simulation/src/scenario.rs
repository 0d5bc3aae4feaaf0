//! A small language for stories that fit on one screen: who is there, what is asked, what breaks when, and what
//! must come of it.
//!
//! A [`Story`] says who is there; [`Story::begin`] lets them attach. From then on nothing happens by chance:
//! callers submit what [`Scenario::write`] and its like say, things break when they are told to, and time passes
//! only in the functions named `until_…` and [`Scenario::wait`]. [`Scenario::end`] heals everything, waits for
//! every answer and holds the history against all checkers.
//!
//! Whatever isn't as expected panics with the end of the trace: this is a language for tests.
#![expect(clippy::panic, reason = "a failed expectation ends the test that uses this")]

use twinrail_protocol::wire::Rail;

use crate::checkers;
use crate::clock::{MS, SECOND, Time};
use crate::faults::{Fault, Towards};
use crate::history::{Blocks, Client, Command, Kind, Mode, Outcome, Place, Side, Stamp, Stamps, Ticket, What};
use crate::plan::{InitiatorPlan, Plan};
use crate::run::World;

/// The first initiator.
pub const A: u8 = 0;
/// The second.
pub const B: u8 = 1;

/// An initiator that attaches when the scenario says so.
pub const LATER: Time = Time::MAX;

/// How long something may take that is waited for.
const PATIENCE: Time = 300 * SECOND;

/// Who is there.
#[derive(Clone, Debug)]
pub struct Story(Plan);

impl Story {
    /// Initiators that attach in these modes, each with two queues of four slots, TCP and RDMA; a volume of 16
    /// blocks on a disk that takes 100 us; a lease of 10 s.
    #[must_use]
    pub fn of(modes: &[Mode]) -> Self {
        let initiator = |mode: &Mode| InitiatorPlan {
            mode: *mode,
            attaches_at: 0,
            preempts: false,
            fail_fast: None,
            queues: 2,
            depth: 4,
            commands: 0,
            most_out: 8,
            pause: 0,
            cables: [(100, 1), (10, 1)],
            rdma: true,
        };
        Self(Plan {
            seed: 1,
            blocks: 16,
            most_blocks: 8,
            in_capsule: 1024,
            data_window: 4096,
            granted: 4,
            lease: 10 * SECOND,
            write_through: false,
            most_stored: 4,
            disk_latency: (100, 100),
            disk_slow_permille: 0,
            turn_takes: 0,
            window: 65536,
            retry_time: 500 * MS,
            initiators: modes.iter().map(initiator).collect(),
            faults: Vec::new(),
            heals_after: 0,
        })
    }

    /// Changes anything of it.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Plan)) -> Self {
        change(&mut self.0);
        self
    }

    /// This initiator attaches only when [`Scenario::attach`] says so.
    #[must_use]
    pub fn later(mut self, initiator: u8) -> Self {
        self.0.initiators[usize::from(initiator)].attaches_at = LATER;
        self
    }

    /// This one ends the writers that stand in its way.
    #[must_use]
    pub fn preempts(mut self, initiator: u8) -> Self {
        self.0.initiators[usize::from(initiator)].preempts = true;
        self
    }

    /// Everybody who isn't told to come later attaches, and is served by RDMA where there is any.
    #[must_use]
    pub fn begin(self) -> Scenario {
        let present = self.0.initiators.iter().filter(|i| i.attaches_at != LATER);
        let mut paths: usize = present.map(|i| usize::from(i.queues)).sum();
        let best: Vec<Rail> = self.0.initiators.iter().map(|i| if i.rdma { Rail::RDMA } else { Rail::TCP }).collect();
        let mut scenario =
            Scenario { world: World::new(self.0, true), read: 0, places: Vec::new(), tickets: Vec::new() };
        scenario.until_of("every queue is served by its best rail", |it, what| {
            if let What::Switched { client, rail, .. } = *what
                && it.world.initiators.iter().any(|i| i.client == client && best[usize::from(i.planned)].0 == rail)
            {
                paths -= 1;
            }
            paths == 0
        });
        scenario
    }
}

/// A story that runs.
#[derive(Debug)]
pub struct Scenario {
    /// The world it plays in.
    pub world: World,
    /// Events of the history that were looked at.
    read: usize,
    places: Vec<(Place, Command)>,
    tickets: Vec<(Ticket, Place)>,
}

/// One block.
#[must_use]
pub fn block(block: u16) -> Blocks {
    Blocks::new(block, 1)
}

/// The first blocks of the volume.
#[must_use]
pub fn first(count: u16) -> Blocks {
    Blocks::new(0, count)
}

// What callers ask.
impl Scenario {
    fn ask(&mut self, initiator: u8, queue: u16, kind: Kind, blocks: Blocks, expected: Stamp) -> Command {
        let stamp = if matches!(kind, Kind::Write | Kind::CompareAndWrite) {
            self.world.ground.counters.stamp()
        } else {
            Stamp::ZERO
        };
        self.world.ask(initiator, queue, kind, false, blocks, stamp, expected)
    }

    /// A caller submits a WRITE.
    pub fn write(&mut self, initiator: u8, queue: u16, blocks: Blocks) -> Command {
        self.ask(initiator, queue, Kind::Write, blocks, Stamp::ZERO)
    }

    /// A READ.
    pub fn read(&mut self, initiator: u8, queue: u16, blocks: Blocks) -> Command {
        self.ask(initiator, queue, Kind::Read, blocks, Stamp::ZERO)
    }

    /// A FLUSH.
    pub fn flush(&mut self, initiator: u8, queue: u16) -> Command {
        self.ask(initiator, queue, Kind::Flush, block(0), Stamp::ZERO)
    }

    /// A COMPARE AND WRITE that expects what `expected` wrote, or zeros.
    pub fn compare_and_write(&mut self, initiator: u8, queue: u16, at: Blocks, expected: Option<Command>) -> Command {
        let expected = expected.map_or(Stamp::ZERO, |command| self.stamp_of(command));
        self.ask(initiator, queue, Kind::CompareAndWrite, at, expected)
    }

    /// A WRITE that has to succeed before time goes on.
    pub fn written(&mut self, initiator: u8, queue: u16, blocks: Blocks) -> Command {
        let command = self.write(initiator, queue, blocks);
        self.expect_ok(command);
        command
    }

    /// The initiator attaches.
    pub fn attach(&mut self, initiator: u8) {
        self.world.attach(initiator);
    }

    /// It attaches, and its session is there.
    pub fn attached(&mut self, initiator: u8) {
        self.attach(initiator);
        let client = self.client(initiator);
        self.until("the attach is answered", |what| matches!(what, What::Attached(answer) if answer.client == client));
    }

    /// It closes its volume in order.
    pub fn close(&mut self, initiator: u8) {
        self.world.close(initiator);
    }
}

// What breaks.
impl Scenario {
    /// Anything of [`Fault`].
    pub fn break_with(&mut self, fault: Fault) {
        self.world.fault(fault);
    }

    /// A cable is cut for good: until [`Self::mend`] or the end.
    pub fn cut(&mut self, initiator: u8, rail: Rail, towards: Towards) {
        self.world.fault(Fault::Cut { initiator, rail, towards, lasts: PATIENCE });
    }

    /// It is whole again.
    pub fn mend(&mut self, initiator: u8, rail: Rail) {
        for side in Towards::Both.sides() {
            self.world.ground.mend(initiator, rail, side);
        }
    }

    /// Both cables of an initiator are cut for good.
    pub fn cut_all(&mut self, initiator: u8) {
        self.cut(initiator, Rail::TCP, Towards::Both);
        self.cut(initiator, Rail::RDMA, Towards::Both);
    }

    /// They are whole again.
    pub fn mend_all(&mut self, initiator: u8) {
        self.mend(initiator, Rail::TCP);
        self.mend(initiator, Rail::RDMA);
    }

    /// The connections of a rail break, and `side` knows at once.
    pub fn reset(&mut self, initiator: u8, rail: Rail, side: Side) {
        self.world.fault(Fault::Reset { initiator, rail, side });
    }

    /// The next request of the disk takes this long.
    pub fn slow_disk(&mut self, takes: Time) {
        self.world.fault(Fault::SlowDisk { takes });
    }
}

// How time passes.
impl Scenario {
    /// Time passes.
    pub fn wait(&mut self, time: Time) {
        let end = self.world.ground.now() + time;
        while self.world.ground.clock.next_at().is_some_and(|at| at <= end) && self.world.step() {}
        self.world.ground.clock.skip_to(end);
        self.until_of("it is seen", |it, _| it.read == it.world.ground.history.events.len());
    }

    /// Until a fact comes that wasn't there before.
    pub fn until(&mut self, what: &str, mut come: impl FnMut(&What) -> bool) {
        self.until_of(what, |_, fact| come(fact));
    }

    fn until_of(&mut self, what: &str, mut come: impl FnMut(&Self, &What) -> bool) {
        let end = self.world.ground.now() + PATIENCE;
        loop {
            while let Some(event) = self.world.ground.history.events.get(self.read).copied() {
                self.read += 1;
                match event.what {
                    What::Assigned { command, place } => self.places.push((place, command)),
                    What::Submitted { ticket, place, .. } => self.tickets.push((ticket, place)),
                    _ => {}
                }
                if come(self, &event.what) {
                    return;
                }
            }
            if !self.world.step() || self.world.ground.now() > end {
                self.fail(&format!("it never came to this: {what}"));
            }
        }
    }

    /// The handle of the initiator's caller.
    #[must_use]
    pub fn client(&self, initiator: u8) -> Client {
        let own = self.world.initiators.iter().rev().find(|process| process.planned == initiator);
        own.map_or(Client(u32::MAX), |process| process.client)
    }

    fn is_at(&self, command: Command, place: Place) -> bool {
        self.places.contains(&(place, command))
    }

    /// Until the command's header arrived at the target.
    pub fn until_arrived(&mut self, command: Command) {
        self.until_of(
            "the command arrives",
            |it, what| matches!(what, What::CommandArrived { place, .. } if it.is_at(command, *place)),
        );
    }

    /// Until the command is at the disk.
    pub fn until_submitted(&mut self, command: Command) {
        self.until_of(
            "the command reaches the disk",
            |it, what| matches!(what, What::Submitted { place, .. } if it.is_at(command, *place)),
        );
    }

    /// Until the disk is done with the command: its reply isn't sent yet.
    pub fn until_executed(&mut self, command: Command) {
        self.until_of("the command is executed", |it, what| {
            let its = |ticket| it.tickets.iter().any(|(known, place)| *known == ticket && it.is_at(command, *place));
            matches!(*what, What::Ended { ticket, .. } if its(ticket))
        });
    }

    /// Until the initiator's queue is served by this rail, having been served by another.
    pub fn until_served_by(&mut self, initiator: u8, queue: u16, rail: Rail) {
        let wanted = (self.client(initiator), queue, rail.0);
        self.until(
            "the queue is served by the other rail",
            |what| matches!(*what, What::Switched { client, queue, rail } if (client, queue, rail) == wanted),
        );
    }

    /// Until the target serves again.
    pub fn until_started(&mut self) {
        self.until("the target serves again", |what| matches!(what, What::Started));
    }
}

// What must come of it.
impl Scenario {
    /// How the command ended, having waited for it.
    pub fn outcome(&mut self, command: Command) -> Outcome {
        self.completion(command).0
    }

    fn completion(&mut self, command: Command) -> (Outcome, Stamps) {
        let end = self.world.ground.now() + PATIENCE;
        let mut read = 0;
        loop {
            for event in &self.world.ground.history.events[read..] {
                match event.what {
                    What::Completed { command: ended, outcome, stamps } if ended == command => {
                        return (outcome, stamps);
                    }
                    _ => {}
                }
            }
            read = self.world.ground.history.events.len();
            if !self.world.step() || self.world.ground.now() > end {
                self.fail(&format!("{command:?} never completes"));
            }
        }
    }

    /// Whether it has ended by now.
    #[must_use]
    pub fn has_ended(&self, command: Command) -> bool {
        let ended = |what: &What| matches!(what, What::Completed { command: ended, .. } if *ended == command);
        self.world.ground.history.events.iter().any(|event| ended(&event.what))
    }

    /// It ends like this.
    pub fn expect(&mut self, command: Command, outcome: Outcome) {
        let found = self.outcome(command);
        if found != outcome {
            self.fail(&format!("{command:?} ended {found:?} instead of {outcome:?}"));
        }
    }

    /// It is done.
    pub fn expect_ok(&mut self, command: Command) {
        self.expect(command, Outcome::Ok);
    }

    /// The blocks hold what that command wrote, or zeros.
    pub fn expect_content(&mut self, initiator: u8, queue: u16, blocks: Blocks, of: Option<Command>) {
        let read = self.read(initiator, queue, blocks);
        self.expect_read(read, blocks, of);
    }

    /// The READ brings what that command wrote, or zeros.
    pub fn expect_read(&mut self, read: Command, blocks: Blocks, of: Option<Command>) {
        let expected = of.map_or(Stamp::ZERO, |command| self.stamp_of(command));
        self.expect_ok(read);
        let (_, stamps) = self.completion(read);
        if let Some(other) = stamps[..usize::from(blocks.count)].iter().find(|stamp| **stamp != expected) {
            self.fail(&format!("{read:?} brought {other:?} instead of {expected:?}"));
        }
    }

    /// It was this many times given to storage.
    pub fn expect_executions(&self, command: Command, times: usize) {
        let events = &self.world.ground.history.events;
        let places = |what: &What| match *what {
            What::Assigned { command: given, place } if given == command => Some(place),
            _ => None,
        };
        let places: Vec<Place> = events.iter().filter_map(|event| places(&event.what)).collect();
        let given = |what: &What| matches!(what, What::Submitted { place, .. } if places.contains(place));
        let found = events.iter().filter(|event| given(&event.what)).count();
        if found != times {
            self.fail(&format!("{command:?} was executed {found} times instead of {times}"));
        }
    }

    /// How often something happened so far.
    #[must_use]
    pub fn count(&self, of: impl Fn(&What) -> bool) -> usize {
        self.world.ground.history.events.iter().filter(|event| of(&event.what)).count()
    }

    /// The same up to the fact that was waited for last.
    #[must_use]
    pub fn seen(&self, of: impl Fn(&What) -> bool) -> usize {
        self.world.ground.history.events[..self.read].iter().filter(|event| of(&event.what)).count()
    }

    /// Everything heals, every command completes, and every checker agrees.
    pub fn end(mut self) {
        self.world.heal();
        let asked: Vec<(Client, Command)> = {
            let events = self.world.ground.history.events.iter();
            let asked = |what: &What| match *what {
                What::Invoked { client, command, .. } => Some((client, command)),
                _ => None,
            };
            events.filter_map(|event| asked(&event.what)).collect()
        };
        for (client, command) in asked {
            // Nobody tells a dead caller.
            if !self.has_left(client) {
                self.outcome(command);
            }
        }
        let breaches = checkers::breaches(&self.world.ground.history);
        if !breaches.is_empty() {
            let said: Vec<String> = breaches.iter().map(ToString::to_string).collect();
            self.fail(&said.join("\n"));
        }
    }

    fn has_left(&self, client: Client) -> bool {
        self.count(|what| *what == What::Closed { client }) > 0
    }

    fn stamp_of(&self, command: Command) -> Stamp {
        let wrote = |what: &What| match *what {
            What::Invoked { command: asked, stamp, .. } if asked == command => Some(stamp),
            _ => None,
        };
        let events = &self.world.ground.history.events;
        events.iter().find_map(|event| wrote(&event.what)).unwrap_or(Stamp::DAMAGED)
    }

    fn fail(&self, why: &str) -> ! {
        panic!("{why}");
    }
}

impl Drop for Scenario {
    /// Shows the end of the trace when the test fails.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lines = self.world.ground.trace.lines();
            // The whole of it where somebody asks for it.
            let shown = if std::env::var_os("TWINRAIL_WHOLE_TRACE").is_some() { lines.len() } else { 60 };
            println!("{}", lines[lines.len().saturating_sub(shown)..].join("\n"));
        }
    }
}
