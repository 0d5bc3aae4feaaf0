//! What both sides stand on: time, chance, cables, memory, the disk, and the record of what happened.

use crate::clock::{Clock, Time};
use crate::disk::Disk;
use crate::history::{Client, Command, History, SecretNumber, Side, Stamp, What};
use crate::memory::{Lent, Memory};
use crate::plan::Plan;
use crate::rails::{ConnectionId, Network};
use crate::random::Random;
use crate::trace::Trace;

/// What happens at a moment.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// Something on a rail.
    Rail(crate::rails::RailEvent),
    /// The disk ends a request.
    Disk {
        /// Which.
        request: u32,
    },
    /// The state file's record is on stable storage.
    RecordStored {
        /// Of which life of the target's process.
        life: u32,
        /// Which one.
        number: u64,
    },
    /// A process wants its turn.
    Timer {
        /// Whose.
        process: Process,
    },
    /// A process isn't busy any more.
    Turn {
        /// Which.
        process: Process,
    },
    /// A caller may submit.
    Work {
        /// Whose.
        initiator: u8,
    },
    /// A fault of the plan.
    Fault {
        /// Which.
        index: u32,
    },
    /// Something ends that a fault began.
    Mend {
        /// What.
        mend: crate::faults::Mend,
    },
}

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// The target's.
    Target,
    /// An initiator's, by its number.
    Initiator(u8),
}

impl Process {
    /// Its place in tables of all processes.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Target => 0,
            Self::Initiator(number) => 1 + usize::from(number),
        }
    }

    /// Which side it is.
    #[must_use]
    pub fn side(self) -> Side {
        match self {
            Self::Target => Side::Target,
            Self::Initiator(_) => Side::Initiator,
        }
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Target => f.write_str("target"),
            Self::Initiator(number) => write!(f, "initiator {number}"),
        }
    }
}

/// What a process finds when it takes its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Somebody asks for a connection (target).
    Asked(ConnectionId),
    /// A connection is there (initiator).
    Dialed(ConnectionId),
    /// There will be none.
    DialFailed(ConnectionId),
    /// Something arrived, completed, or there is room to send again.
    Ready(ConnectionId),
    /// The connection is broken.
    Broken(ConnectionId),
    /// The fence of this side is drained: no device touches anything of it.
    Drained(ConnectionId),
    /// The disk ended a request (target).
    Disk {
        /// Which.
        request: u32,
    },
    /// A record is stored (target).
    RecordStored(u64),
    /// Time has come.
    Timer,
    /// The caller may submit (initiator).
    Work,
}

/// Numbers given out in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    clients: u32,
    secrets: u32,
    commands: u32,
    stamps: u32,
    /// Commands submitted by callers.
    pub invoked: u32,
    /// How many shares of its commands a caller may have submitted by now, and how many there are.
    pub shares: (u32, u32),
}

impl Counters {
    /// The next client.
    pub fn client(&mut self) -> Client {
        self.clients += 1;
        Client(self.clients - 1)
    }

    /// The next secret.
    pub fn secret(&mut self) -> SecretNumber {
        self.secrets += 1;
        SecretNumber(self.secrets)
    }

    /// The next command.
    pub fn command(&mut self) -> Command {
        self.commands += 1;
        Command(self.commands)
    }

    /// The next stamp.
    pub fn stamp(&mut self) -> Stamp {
        self.stamps += 1;
        Stamp(self.stamps)
    }
}

/// The ground.
#[derive(Debug)]
pub struct Ground {
    /// Numbers.
    pub counters: Counters,
    /// Time.
    pub clock: Clock<Event>,
    /// What happened.
    pub history: History,
    /// The same for people.
    pub trace: Trace,
    /// Buffers.
    pub memory: Memory,
    /// Cables and connections.
    pub network: Network,
    /// The volume's disk.
    pub disk: Disk,
    /// What the run is set up with.
    pub plan: Plan,
    /// Chance on the rails.
    pub rail_random: Random,
    /// Chance in the processes: ids, jitter.
    pub process_random: Random,
    /// Notices that wait for each process.
    pub notices: Vec<Vec<Notice>>,
}

impl Ground {
    /// The time.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// Adds a fact to the history.
    #[inline]
    pub fn record(&mut self, what: What) {
        self.history.record(self.clock.now(), what);
    }

    /// Tells a process.
    #[inline]
    pub fn tell(&mut self, process: Process, notice: Notice) {
        self.notices[process.index()].push(notice);
    }

    /// Lends a buffer, see [`Memory::lend`].
    pub fn lend(&mut self, length: usize, side: Side) -> Lent {
        self.memory.lend(length, side, self.clock.now(), &mut self.history)
    }

    /// Gives it back.
    pub fn give_back(&mut self, lent: Lent) {
        self.memory.give_back(lent, self.clock.now(), &mut self.history);
    }
}
