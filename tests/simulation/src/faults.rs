//! What goes wrong, drawn with the plan and done to the world at its time.

use twinrail_protocol::wire::Rail;

use crate::clock::{MS, SECOND, Time};
use crate::ground::Process;
use crate::history::Side;
use crate::plan::Plan;
use crate::random::Random;

/// A fault and when it comes: when so many more commands were submitted since the one before, or after that
/// time, whichever is first; and a little later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Commands.
    pub commands: u32,
    /// Time.
    pub wait: Time,
    /// The little.
    pub delay: Time,
    /// What.
    pub fault: Fault,
}

/// Which directions of a cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    /// One.
    One(Side),
    /// Both.
    Both,
}

impl Towards {
    /// The sides that hear nothing.
    pub fn sides(self) -> impl Iterator<Item = Side> {
        [Side::Initiator, Side::Target].into_iter().filter(move |side| self == Self::Both || self == Self::One(*side))
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A cable is cut for a while.
    Cut {
        /// Whose.
        initiator: u8,
        /// Which.
        rail: Rail,
        /// Directions.
        towards: Towards,
        /// How long.
        lasts: Time,
    },
    /// Both cables of an initiator are cut for a while.
    CutAll {
        /// Whose.
        initiator: u8,
        /// How long.
        lasts: Time,
    },
    /// One side finds its connections on a rail broken; the other may hear of it or not.
    Reset {
        /// Whose.
        initiator: u8,
        /// Which.
        rail: Rail,
        /// The side that finds it.
        side: Side,
    },
    /// A process stands still for a while.
    Pause {
        /// Which.
        process: Process,
        /// How long.
        lasts: Time,
    },
    /// The target's process dies, and comes back.
    Crash {
        /// After this time.
        back_after: Time,
    },
    /// The target's host reboots.
    Reboot {
        /// It is up after this time.
        back_after: Time,
    },
    /// A front end dies, and its successor takes over.
    FrontEndDies {
        /// Which.
        initiator: u8,
        /// It is there after this time.
        back_after: Time,
        /// The predecessor wasn't dead but only stood still, and wakes up after this time.
        wakes_after: Option<Time>,
    },
    /// Payloads towards a side are damaged.
    Damage {
        /// Which side.
        side: Side,
        /// How many.
        count: u32,
    },
    /// The next request of the disk takes this long.
    SlowDisk {
        /// How long.
        takes: Time,
    },
    /// Requests of the disk fail.
    DiskFails {
        /// How many.
        count: u32,
    },
    /// The next sync fails.
    SyncFails,
    /// The target grants another number of slots to all queues.
    Grant {
        /// How many.
        slots: u16,
    },
    /// The target is stopped in order, and comes back; perhaps its host reboots meanwhile.
    Drain {
        /// After this time.
        back_after: Time,
        /// The host reboots.
        reboots: bool,
    },
    /// An initiator is asked to stop: what is out has some time to end.
    Stop {
        /// Which.
        initiator: u8,
    },
    /// An initiator opens the volume anew, whether or not one like it is there.
    Arrives {
        /// Which.
        initiator: u8,
    },
    /// An initiator's next report of commands in flight tells of another command than the original.
    AlteredRetry {
        /// Whose.
        initiator: u8,
    },
    /// An initiator's next activation with a slot table names another one.
    AlteredInstance {
        /// Whose.
        initiator: u8,
    },
    /// The target dies and comes back with another image.
    OtherImage {
        /// After this time.
        back_after: Time,
    },
}

impl Fault {
    /// Name in histories and traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cut { towards: Towards::Both, .. } => "cut",
            Self::Cut { .. } => "cut in one direction",
            Self::CutAll { .. } => "cut of both rails",
            Self::Reset { .. } => "reset",
            Self::Pause { process: Process::Target, .. } => "pause of the target",
            Self::Pause { .. } => "pause of an initiator",
            Self::Crash { .. } => "crash",
            Self::Reboot { .. } => "reboot",
            Self::FrontEndDies { wakes_after: None, .. } => "front end dies",
            Self::FrontEndDies { .. } => "front end sleeps",
            Self::Damage { .. } => "damage",
            Self::SlowDisk { .. } => "slow disk",
            Self::DiskFails { .. } => "disk fails",
            Self::SyncFails => "sync fails",
            Self::Grant { .. } => "grant",
            Self::Drain { .. } => "drain",
            Self::Stop { .. } => "an initiator stops",
            Self::Arrives { .. } => "an initiator arrives",
            Self::AlteredRetry { .. } => "altered retry",
            Self::AlteredInstance { .. } => "altered instance",
            Self::OtherImage { .. } => "other image",
        }
    }
}

/// What ends by itself some time after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// A cable is mended towards one side.
    Cable {
        /// Whose.
        initiator: u8,
        /// Which.
        rail: Rail,
        /// Which side.
        side: Side,
        /// Unless it was cut again since.
        cut: u32,
    },
    /// A process goes on, if that was its last pause.
    Resume {
        /// Which.
        process: Process,
        /// Which pause.
        pause: u32,
    },
    /// The target's host is up again, and its process starts.
    StartTarget {
        /// Which of its lives that is.
        life: u32,
    },
    /// A front end's successor starts.
    StartFrontEnd {
        /// Which.
        initiator: u8,
    },
    /// All that is broken.
    Everything,
}

/// How long the target takes to notice that a path is silent, at most.
const SILENCE: Time = 25 * SECOND;

/// Draws what breaks together, in its order: mostly one fault.
pub fn draw(r: &mut Random, plan: &Plan, mut add: impl FnMut(Fault)) {
    let count = plan.initiators.len() as u64;
    let initiator = r.below(count) as u8;
    let rail = r.pick(&[Rail::TCP, Rail::RDMA, Rail::RDMA]);
    let side = r.pick(&[Side::Initiator, Side::Target]);
    match r.below(100) {
        0..14 => add(Fault::Cut { initiator, rail, towards: Towards::Both, lasts: r.magnitude(100, 9 * SECOND) }),
        14..17 => {
            // An activation that is given up, and arrives after the next one.
            let lasts = r.between(3 * SECOND, 9 * SECOND);
            add(Fault::Cut { initiator, rail: Rail::TCP, towards: Towards::One(Side::Target), lasts });
            add(Fault::Reset { initiator, rail: Rail::RDMA, side });
        }
        17..27 => add(Fault::Cut { initiator, rail, towards: Towards::One(side), lasts: r.magnitude(100, 3 * SECOND) }),
        27..33 => add(Fault::CutAll { initiator, lasts: r.magnitude(MS, 3 * SECOND) }),
        33..37 => {
            // So long that the session ends, perhaps with a command at the disk.
            let lasts = r.between(SILENCE, 2 * SILENCE + plan.lease);
            if r.chance(500) {
                add(Fault::SlowDisk { takes: r.between(MS, SILENCE + 2 * plan.lease) });
            }
            add(match r.chance(500) {
                true => Fault::CutAll { initiator, lasts },
                false => Fault::Pause { process: Process::Initiator(initiator), lasts },
            });
            if r.chance(500) {
                add(Fault::Arrives { initiator: r.below(count) as u8 });
            }
        }
        37..48 => add(Fault::Reset { initiator, rail, side }),
        48..54 => {
            add(Fault::Pause { process: Process::Target, lasts: r.magnitude(100, 3 * SECOND) });
            // Then it finds what came on the old path and on the new one at the same time.
            if r.chance(500) {
                add(Fault::Reset { initiator, rail, side: Side::Initiator });
            }
        }
        54..57 => {
            add(Fault::Pause { process: Process::Initiator(initiator), lasts: r.magnitude(MS, 2 * plan.lease) });
            // Then it finds replies, and that their path is lost.
            if r.chance(600) {
                add(Fault::Reset { initiator, rail, side: Side::Target });
            }
        }
        57..60 => add(Fault::Crash { back_after: r.magnitude(MS, 2 * SECOND) }),
        60..63 => {
            // Somebody else comes while the holder of before can't.
            let lasts = r.between(plan.lease / 4, 2 * plan.lease);
            add(match r.chance(500) {
                true => Fault::CutAll { initiator, lasts },
                false => Fault::Pause { process: Process::Initiator(initiator), lasts },
            });
            add(Fault::Crash { back_after: r.magnitude(MS, 200 * MS) });
            add(Fault::Arrives { initiator: r.below(count) as u8 });
        }
        63..67 => add(Fault::Reboot { back_after: r.magnitude(100 * MS, 5 * SECOND) }),
        67..73 => {
            if r.chance(300) {
                add(Fault::SlowDisk { takes: r.magnitude(MS, 10 * SECOND) });
            }
            let wakes_after = r.chance(400).then(|| r.magnitude(MS, 2 * plan.lease));
            add(Fault::FrontEndDies { initiator, back_after: r.magnitude(MS, plan.lease), wakes_after });
        }
        73..78 => add(Fault::Damage { side, count: r.pick(&[1, 1, 2, 5]) }),
        78..83 => add(Fault::SlowDisk { takes: r.magnitude(5 * MS, 40 * SECOND) }),
        83..85 => add(Fault::DiskFails { count: r.between(1, 3) as u32 }),
        85..89 => add(Fault::SyncFails),
        89..93 => add(Fault::Grant { slots: r.between(1, 4) as u16 }),
        93 => add(Fault::Arrives { initiator }),
        94 => {
            if r.chance(700) {
                add(Fault::CutAll { initiator, lasts: r.magnitude(SECOND, 60 * SECOND) });
            }
            add(Fault::Stop { initiator });
        }
        95 => {
            add(match r.chance(500) {
                true => Fault::AlteredRetry { initiator },
                false => Fault::AlteredInstance { initiator },
            });
            add(Fault::Reset { initiator, rail, side });
        }
        96..98 => add(Fault::Drain { back_after: r.magnitude(MS, 2 * SECOND), reboots: r.chance(300) }),
        _ => add(Fault::OtherImage { back_after: r.magnitude(MS, SECOND) }),
    }
}
