//! What happened in a run, as the checkers read it: plain facts with their times, written by the drivers
//! and the modelled devices at the moment they happen, never by the core that is being checked.
//!
//! Content is told by *stamps*: every change brings a number used once in the run, written into each of
//! its blocks together with the block's number, so that a block's bytes say whose they are and whether
//! they are whole and in their place.

/// Virtual time in microseconds since the start of the run.
pub type Micros = u64;

macro_rules! number {
    ($($(#[$doc:meta])* $name:ident($inner:ty);)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);)*
    };
}

number! {
    /// A command of a caller: counted over the run, the same through every retry and replay.
    Command(u32);
    /// A caller's handle of a volume: counted over the run, from open to close, through every re-attach.
    /// A front end that takes over another's session is a new client.
    Client(u32);
    /// A session as the target holds it: counted over the run. An attach after the target forgot the session
    /// gets a new number, a takeover too; a repeated attach that is only answered again doesn't.
    Session(u32);
    /// A secret: counted over the run.
    SecretNumber(u32);
    /// A slot table: its instance number, which is drawn at random and never twice the same.
    Table(u64);
    /// A storage command: counted over the run.
    Ticket(u32);
    /// A lending of a buffer to a device: counted over the run, one number for each time it is lent.
    Lending(u32);
    /// The content of a block.
    Stamp(u32);
}

impl Stamp {
    /// The block reads as zeros.
    pub const ZERO: Self = Self(0);
    /// The block's bytes are nobody's: damaged, mixed, or another block's.
    pub const DAMAGED: Self = Self(u32::MAX);
}

/// Most blocks of one command.
pub const MAX_BLOCKS: usize = 8;

/// Stamps of the blocks of one command, in the order of the blocks; those beyond its range are zero.
pub type Stamps = [Stamp; MAX_BLOCKS];

/// A range of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// First block.
    pub first: u16,
    /// Number of blocks, at most [`MAX_BLOCKS`].
    pub count: u16,
}

impl Blocks {
    /// `count` blocks from `first`.
    #[must_use]
    pub fn new(first: u16, count: u16) -> Self {
        Self { first, count }
    }

    /// The numbers of the blocks.
    pub fn each(self) -> impl Iterator<Item = u16> {
        self.first..self.first + self.count
    }

    /// Whether the block is one of them.
    #[must_use]
    pub fn holds(self, block: u16) -> bool {
        (self.first..self.first + self.count).contains(&block)
    }
}

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// READ.
    Read,
    /// WRITE of the stamp.
    Write,
    /// WRITE ZEROES.
    Zero,
    /// DISCARD; the modelled disk zeroes.
    Discard,
    /// COMPARE AND WRITE of the stamp, if every block holds the stamp it expects.
    CompareAndWrite,
    /// FLUSH.
    Flush,
    /// Anything else: it neither changes the volume nor brings its content.
    Other,
}

impl Kind {
    /// Whether it changes the volume.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Zero | Self::Discard | Self::CompareAndWrite)
    }
}

/// How a command ended for its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Ok,
    /// COMPARE AND WRITE found something else: nothing was changed.
    CompareFailed,
    /// *Outcome unknown*: it may have acted, or act until its session has ended at storage.
    Unknown,
    /// Refused before it was given to storage: nothing was changed.
    Refused,
    /// Failed at storage or with its session (I/O error, preempted): it may have acted.
    Failed,
}

/// A command before a target's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The queue's slot table.
    pub table: Table,
    /// Slot.
    pub slot: u16,
    /// Sequence.
    pub sequence: u64,
}

/// A verdict of an activation, as the target gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerdictGiven {
    /// Dropped; to be sent again.
    Unknown,
    /// Kept, under the new epoch from now on.
    Running,
    /// Finished; its reply is in the answer.
    Done,
    /// It isn't the command that it says it is.
    Mismatch,
}

/// How an attach asks for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The only writer.
    Exclusive,
    /// One of several writers.
    Shared,
    /// Reads only.
    ReadOnly,
}

/// An attach that was answered with ATTACHED.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachAnswer {
    /// The session it made or found.
    pub session: Session,
    /// The caller's handle it serves.
    pub client: Client,
    /// Secret shown.
    pub secret: SecretNumber,
    /// The secret that took the shown one's place, in a takeover.
    pub next_secret: Option<SecretNumber>,
    /// Mode.
    pub mode: Mode,
    /// It fenced the other writers.
    pub preempt: bool,
    /// It brought a generation: the client was attached before and goes on.
    pub goes_on: bool,
    /// The volume's generation told.
    pub generation: u64,
    /// The identity of the volume's content told, as a number of the world's.
    pub volume: u32,
}

/// How a session of the target ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Closed by its initiator.
    Closed,
    /// Its lease was over.
    LeaseOver,
    /// Fenced by another writer.
    Preempted,
    /// Its successor took its place.
    TakenOver,
    /// The target's process ended.
    TargetGone,
}

/// Who says or does something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The initiator.
    Initiator,
    /// The target.
    Target,
}

/// What is kept in bounds (I8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gauge {
    /// Bytes of payload buffers in use on one side.
    Buffers,
    /// Frames and commands that wait on one side.
    Waiting,
    /// Sessions held by the target.
    Sessions,
    /// Connections of the target.
    Connections,
}

/// One fact.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are what each fact's sentence names")]
pub enum What {
    // The callers.
    /// A caller opened a volume. `inherits`: it took over the session of that client.
    Opened { client: Client, inherits: Option<Client> },
    /// A caller closed it, or died: nothing of it is submitted from now on by the caller.
    Closed { client: Client },
    /// A caller submitted a command. `stamp` is what it writes; `expected` what COMPARE AND WRITE compares.
    Invoked { client: Client, command: Command, kind: Kind, fua: bool, blocks: Blocks, stamp: Stamp, expected: Stamp },
    /// It ended for the caller; `stamps` is what a READ brought.
    Completed { command: Command, outcome: Outcome, stamps: Stamps },
    /// The initiator gave the command this place: at submission, at each new sequence, at each replay.
    Assigned { command: Command, place: Place },

    // The target's sessions.
    /// An attach was answered.
    Attached(AttachAnswer),
    /// An attach was refused.
    AttachRefused { client: Client, status: u16 },
    /// The target decided that the session ends.
    SessionEnding { session: Session, how: Ending },
    /// Its end was answered: from now on nothing of it may act.
    SessionEnded { session: Session },
    /// An activation of a queue was accepted: what is older may not reach storage any more. `session` owns
    /// the table from its first activation on.
    EpochAccepted { session: Session, table: Table, epoch: u64 },
    /// The target's verdict on a reported command.
    VerdictSaid { place: Place, epoch: u64, verdict: VerdictGiven },
    /// The volume's record reached the state file.
    RecordStored,
    /// It names this writer, whether or not its attach is ever answered. `client` is the first that had the session.
    Claimed { client: Client, mode: Mode },

    // Storage.
    /// A command was given to storage.
    Submitted { ticket: Ticket, session: Session, place: Place, kind: Kind, blocks: Blocks },
    /// It changed the blocks, which hold `stamp` from now on, read back from the very bytes written.
    Applied { ticket: Ticket, blocks: Blocks, stamp: Stamp },
    /// Storage is done with it.
    Ended { ticket: Ticket, ok: bool },
    /// A sync of the volume began, under a number of its own.
    SyncBegan { sync: u32 },
    /// It ended.
    SyncEnded { sync: u32, ok: bool },
    /// The target heard that it failed, and counts it from now on.
    SyncFailureHeard { sync: u32 },

    // The target's life.
    /// Its process ended; what it gave to the kernel still ends.
    Crashed,
    /// It was drained, and every acknowledged change was synced.
    DrainSynced,
    /// Its host rebooted: unsynced changes may be lost. Each lost one is told by [`What::Lost`].
    Rebooted,
    /// The block's content fell back.
    Lost { block: u16, was: Stamp, now: Stamp },
    /// The process serves again.
    Started,
    /// The volume was replaced by another image (all zeros).
    Replaced,

    // Buffers and devices (I3).
    /// A buffer was given to a device (or to the application's socket) for an operation.
    Lent { buffer: u32, lending: Lending, side: Side },
    /// It returned to its owner, who may do with it what he likes.
    Returned { buffer: u32, lending: Lending },
    /// A device read or wrote it.
    Touched { buffer: u32, lending: Lending },

    // Credits (I6).
    /// The target said a grant: on a reply, an event or an activation.
    GrantSaid { table: Table, number: u16, slots: u16 },
    /// The target heard the initiator say to which grant it keeps.
    GrantNamed { table: Table, number: u16 },
    /// A command's header arrived at the target, which took it or dropped it as stale.
    CommandArrived { place: Place, epoch: u64, queue_epoch: u64, taken: bool },
    /// The initiator took a reply for the command's (it wasn't dropped as stale).
    ReplyTaken { place: Place, epoch: u64, queue_epoch: u64 },
    /// The report for this epoch tells of another command than the original, on purpose.
    RetryAltered { place: Place, epoch: u64 },
    /// The activation with this epoch names another slot table than this one, on purpose.
    InstanceAltered { table: Table, epoch: u64 },
    /// A message arrived for which no receive was posted (an RNR NAK).
    ReceiveMissing { side: Side },
    /// One side says that the other broke a rule. Both are honest here.
    Accused { by: Side, status: u16 },

    // The rest.
    /// A gauge at its new height, with its bound.
    Gauge { gauge: Gauge, side: Side, value: u64, bound: u64 },
    /// A queue is served by another path than before. `rail`: 1 TCP, 2 RDMA.
    Switched { client: Client, queue: u16, rail: u8 },
    /// A fault was injected.
    Fault { name: &'static str },
    /// No fault from here on: what is out has to complete.
    Healed,
}

/// One fact and its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// When.
    pub at: Micros,
    /// What.
    pub what: What,
}

/// What a run was set up with, as far as checkers need it.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Blocks of the volume.
    pub blocks: u16,
    /// The volume acknowledges only what is on stable storage.
    pub write_through: bool,
    /// How long the target keeps a session without paths, in microseconds.
    pub lease: Micros,
    /// How long after [`What::Healed`] everything must have completed, in microseconds.
    pub progress_bound: Micros,
}

impl Default for Setup {
    fn default() -> Self {
        Self { blocks: 16, write_through: false, lease: 1_000_000, progress_bound: 60_000_000 }
    }
}

/// Everything that happened in a run, in order.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Options.
    pub setup: Setup,
    /// Events in the order of their happening; times never fall.
    pub events: Vec<Event>,
}

impl History {
    /// An empty history.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self { setup, events: Vec::new() }
    }

    /// Begins anew with the same memory.
    pub fn reset(&mut self, setup: Setup) {
        self.setup = setup;
        self.events.clear();
    }

    /// Adds a fact.
    #[inline]
    pub fn record(&mut self, at: Micros, what: What) {
        debug_assert!(self.events.last().is_none_or(|last| last.at <= at), "time ran backwards");
        self.events.push(Event { at, what });
    }

    /// How much happened.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let mut sum = Summary { simulated: self.events.last().map_or(0, |e| e.at), ..Summary::default() };
        for event in &self.events {
            match event.what {
                What::Invoked { .. } => sum.commands += 1,
                What::Fault { .. } => sum.faults += 1,
                What::Switched { .. } => sum.switches += 1,
                What::Started => sum.restarts += 1,
                _ => {}
            }
        }
        sum
    }
}

/// How much happened in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Commands invoked.
    pub commands: u64,
    /// Faults injected.
    pub faults: u64,
    /// Changes of path.
    pub switches: u64,
    /// Times the target began to serve, after the first.
    pub restarts: u64,
    /// Time of the last event, in microseconds.
    pub simulated: Micros,
}

impl core::ops::AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.faults += other.faults;
        self.switches += other.switches;
        self.restarts += other.restarts;
        self.simulated += other.simulated;
    }
}
