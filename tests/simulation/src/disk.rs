//! The volume's disk, with the page cache of the target's host before it.
//!
//! Requests take their time and end in any order; what they do, they do at one moment between submission and
//! end. A process that dies leaves its requests to the kernel, which ends them. A reboot loses any part of what
//! wasn't synced. A sync that fails leaves what it should have written neither dirty nor safe, so that the next
//! one succeeds without it.

use crate::clock::Time;
use crate::ground::{Event, Ground, Notice, Process};
use crate::history::{Blocks, Stamp, Ticket, What};
use crate::memory::Lent;
use crate::random::Random;
use crate::stamps::{self, BLOCK};

/// What a request does.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// Reads into the buffer.
    Read(Lent),
    /// Writes the buffer.
    Write(Lent),
    /// Writes the buffer's second half if the disk holds its first half.
    CompareAndWrite(Lent),
    /// Zeroes.
    Zero,
    /// Puts what has ended before on stable storage.
    Sync,
}

/// A request at the disk.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What the history calls it; none for a sync.
    pub ticket: Option<Ticket>,
    /// What.
    pub action: Action,
    /// Where.
    pub blocks: Blocks,
    /// It ends when it is on stable storage.
    pub durable: bool,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Result {
    /// Done.
    #[default]
    Ok,
    /// COMPARE AND WRITE found something else in this byte of the range.
    Different(u64),
    /// An I/O error: perhaps it did something.
    Failed,
}

#[derive(Clone, Copy, Debug)]
struct Flying {
    request: Request,
    sync: u32,
    acted: Option<Result>,
    fails: bool,
    ended: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// What a read sees.
    cached: Stamp,
    /// What a reboot leaves.
    stable: Stamp,
    /// The cache holds something that the next sync writes.
    dirty: bool,
    /// What it held when the latest sync began.
    syncing: Option<Stamp>,
}

/// The disk.
#[derive(Debug, Default)]
pub struct Disk {
    blocks: Vec<Block>,
    flying: Vec<Flying>,
    /// Requests that haven't ended.
    busy: u32,
    syncs: u32,
    tickets: u32,
    random: Option<Random>,
    latency: (Time, Time),
    slow_permille: u64,
    /// How long the next request takes, if that was told.
    pub next_takes: Option<Time>,
    /// So many changes or reads fail from now on.
    pub failures: u32,
    /// So many syncs fail from now on.
    pub sync_failures: u32,
    /// The number of the image.
    pub image: u32,
}

impl Disk {
    /// A disk of zeros.
    pub fn reset(&mut self, blocks: u16, latency: (Time, Time), slow_permille: u64, random: Random) {
        self.blocks.clear();
        self.blocks.resize(usize::from(blocks), Block::default());
        self.flying.clear();
        (self.busy, self.syncs, self.tickets) = (0, 0, 0);
        self.random = Some(random);
        (self.latency, self.slow_permille) = (latency, slow_permille);
        (self.next_takes, self.failures, self.sync_failures, self.image) = (None, 0, 0, 1);
    }

    /// Requests that haven't ended.
    #[must_use]
    pub fn busy(&self) -> u32 {
        self.busy
    }

    /// A number for a command that is about to be submitted.
    pub fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    /// What a request did.
    #[must_use]
    pub fn result(&self, request: u32) -> Result {
        self.flying[request as usize].acted.unwrap_or(Result::Failed)
    }

    /// Which sync it is, in the history's numbers.
    #[must_use]
    pub fn sync_number(&self, request: u32) -> u32 {
        self.flying[request as usize].sync
    }

    /// The process that asked for syncs is gone. One that would fail fails for the next process instead: Linux
    /// tells a new opener of a failure that nobody was told of. What it doesn't do is tell twice: a process that
    /// dies after it was told and before it has recorded it hides the failure for ever, and no rule of the protocol
    /// can help that. The simulation leaves this case out.
    pub fn syncs_fail_later(&mut self) {
        for flying in self.flying.iter_mut().filter(|f| f.sync > 0 && !f.ended && f.fails) {
            flying.fails = false;
            // It does nothing then, neither well nor badly.
            flying.acted = Some(Result::Ok);
            self.sync_failures += 1;
        }
    }

    /// The same of one that has ended, if it did so badly.
    pub fn sync_fails_later(&mut self, request: u32) {
        let flying = &self.flying[request as usize];
        self.sync_failures += u32::from(flying.sync > 0 && flying.acted == Some(Result::Failed));
    }

    /// What a read would see.
    #[must_use]
    pub fn content(&self, block: u16) -> Stamp {
        self.blocks[usize::from(block)].cached
    }
}

impl Ground {
    /// Gives a request to the disk: [`Notice::Disk`] tells the target of its end.
    pub fn submit(&mut self, request: Request) -> u32 {
        let disk = &mut self.disk;
        let number = disk.flying.len() as u32;
        let random = disk.random.get_or_insert_with(|| Random::new(0, 0));
        let (low, high) = disk.latency;
        let mut takes = random.magnitude(low, high);
        if random.chance(disk.slow_permille) {
            takes *= random.magnitude(10, 1000);
        }
        if !matches!(request.action, Action::Sync) {
            takes = disk.next_takes.take().unwrap_or(takes);
        }
        let at_once = random.chance(250);
        let failures = match request.action {
            Action::Sync => &mut disk.sync_failures,
            _ => &mut disk.failures,
        };
        let fails = *failures > 0;
        *failures = failures.saturating_sub(1);
        let sync = match request.action {
            Action::Sync => {
                disk.syncs += 1;
                disk.syncs
            }
            _ => 0,
        };
        disk.flying.push(Flying { request, sync, acted: None, fails, ended: false });
        disk.busy += 1;
        if sync > 0 {
            self.record(What::SyncBegan { sync });
            self.disk.blocks.iter_mut().for_each(|b| b.syncing = b.dirty.then_some(b.cached));
        } else if at_once {
            self.act(number);
        }
        self.clock.after(takes, Event::Disk { request: number });
        number
    }

    /// A request ends.
    pub fn disk_event(&mut self, request: u32) {
        if self.disk.flying[request as usize].ended {
            return;
        }
        self.act(request);
        self.end(request);
        self.tell(Process::Target, Notice::Disk { request });
    }

    fn end(&mut self, request: u32) {
        let flying = &mut self.disk.flying[request as usize];
        flying.ended = true;
        let Flying { request, sync, acted, .. } = *flying;
        self.disk.busy -= 1;
        let ok = acted != Some(Result::Failed);
        match request.ticket {
            Some(ticket) => self.record(What::Ended { ticket, ok }),
            None => self.record(What::SyncEnded { sync, ok }),
        }
    }

    /// A request does what it does, once.
    fn act(&mut self, number: u32) {
        let now = self.now();
        let Self { disk, memory, history, .. } = self;
        let flying = &mut disk.flying[number as usize];
        if flying.acted.is_some() {
            return;
        }
        let Flying { request, fails, .. } = *flying;
        let Request { action, blocks, .. } = request;
        let random = disk.random.get_or_insert_with(|| Random::new(0, 0));
        let acts = !fails || random.chance(500);
        let mut result = if fails { Result::Failed } else { Result::Ok };
        let length = usize::from(blocks.count) * BLOCK;
        let range = usize::from(blocks.first)..usize::from(blocks.first + blocks.count);
        match action {
            Action::Sync => {
                for block in &mut disk.blocks {
                    if let Some(stamp) = block.syncing.take() {
                        match fails {
                            false => block.stable = stamp,
                            // Some of it may have been written.
                            true if random.chance(300) => block.stable = stamp,
                            true => {}
                        }
                        block.dirty = block.cached != stamp;
                    }
                }
            }
            Action::Read(into) if acts => {
                // What the device does to the whole buffer counts as one touch.
                memory.write(into, &[], now, history);
                for (bytes, block) in memory.bytes_mut(into).chunks_exact_mut(BLOCK).zip(blocks.each()) {
                    stamps::write(bytes, disk.blocks[usize::from(block)].cached, block);
                }
            }
            Action::Read(_) => {}
            Action::Write(_) | Action::Zero | Action::CompareAndWrite(_) => {
                let mut stamp = Stamp::ZERO;
                let mut changes = acts;
                if let Action::Write(from) | Action::CompareAndWrite(from) = action {
                    let bytes = memory.read(from, usize::MAX, now, history);
                    let bytes = match action {
                        Action::CompareAndWrite(_) => {
                            let expected = bytes[..length].chunks_exact(BLOCK).zip(blocks.each());
                            let different = expected
                                .map(|(bytes, block)| stamps::read(bytes, block))
                                .zip(&disk.blocks[range.clone()])
                                .position(|(expected, block)| expected != block.cached);
                            if let (Some(different), false) = (different, fails) {
                                result = Result::Different((different * BLOCK) as u64);
                            }
                            changes &= different.is_none();
                            &bytes[length..2 * length]
                        }
                        _ => &bytes[..length],
                    };
                    let mut read = bytes.chunks_exact(BLOCK).zip(blocks.each()).map(|(b, n)| stamps::read(b, n));
                    stamp = read.next().unwrap_or(Stamp::DAMAGED);
                    if read.any(|other| other != stamp) {
                        stamp = Stamp::DAMAGED;
                    }
                }
                if changes {
                    for block in &mut disk.blocks[range] {
                        block.cached = stamp;
                        block.dirty = block.stable != stamp;
                        if request.durable && !fails {
                            (block.stable, block.dirty, block.syncing) = (stamp, false, None);
                        }
                    }
                    if let Some(ticket) = request.ticket {
                        history.record(now, What::Applied { ticket, blocks, stamp });
                    }
                }
            }
        }
        disk.flying[number as usize].acted = Some(result);
    }

    /// The host reboots: what is at the disk ends somehow, and unsynced changes may be lost.
    pub fn reboot_disk(&mut self) {
        for number in 0..self.disk.flying.len() as u32 {
            if self.disk.flying[number as usize].ended {
                continue;
            }
            let random = self.disk.random.get_or_insert_with(|| Random::new(0, 0));
            if random.chance(500) && self.disk.flying[number as usize].sync == 0 {
                self.act(number);
            }
            self.disk.flying[number as usize].acted.get_or_insert(Result::Failed);
            self.end(number);
        }
        for block in 0..self.disk.blocks.len() {
            let random = self.disk.random.get_or_insert_with(|| Random::new(0, 0));
            let own = &mut self.disk.blocks[block];
            if own.dirty && random.chance(400) {
                own.stable = own.cached;
            }
            let (was, now) = (own.cached, own.stable);
            *own = Block { cached: now, stable: now, dirty: false, syncing: None };
            if was != now {
                self.record(What::Lost { block: block as u16, was, now });
            }
        }
    }

    /// Another image lies where the volume was.
    pub fn replace_image(&mut self) {
        self.disk.blocks.iter_mut().for_each(|block| *block = Block::default());
        self.disk.image += 1;
        self.record(What::Replaced);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;
    use crate::run::World;

    fn world(seed: u64) -> World {
        let mut plan = Plan::draw(seed);
        (plan.initiators, plan.faults) = (Vec::new(), Vec::new());
        let mut world = World::new(plan, false);
        world.ground.notices.iter_mut().for_each(Vec::clear);
        world
    }

    fn ends(ground: &mut Ground, request: u32) -> Result {
        while let Some(event) = ground.clock.next_event() {
            if let Event::Disk { request } = event {
                ground.disk_event(request);
            }
        }
        ground.disk.result(request)
    }

    fn zero_to(ground: &mut Ground, stamp: u32) {
        let lent = ground.lend(BLOCK, crate::history::Side::Target);
        stamps::write_all(ground.memory.bytes_mut(lent), Stamp(stamp), 0);
        let ticket = Some(ground.disk.ticket());
        let request = Request { ticket, action: Action::Write(lent), blocks: Blocks::new(0, 1), durable: false };
        let request = ground.submit(request);
        assert_eq!(ends(ground, request), Result::Ok);
    }

    fn sync(ground: &mut Ground) -> Result {
        let request = Request { ticket: None, action: Action::Sync, blocks: Blocks::default(), durable: false };
        let request = ground.submit(request);
        ends(ground, request)
    }

    /// How often a write is still there after a reboot.
    fn survivals(before: impl Fn(&mut Ground)) -> usize {
        let survives = |seed: &u64| {
            let mut world = world(*seed);
            zero_to(&mut world.ground, 9);
            before(&mut world.ground);
            assert_eq!(world.ground.disk.content(0), Stamp(9), "the cache has it");
            world.ground.reboot_disk();
            world.ground.disk.content(0) == Stamp(9)
        };
        (1..=100).filter(survives).count()
    }

    #[test]
    fn what_was_synced_survives_and_what_was_not_may_be_lost() {
        assert_eq!(survivals(|ground| assert_eq!(sync(ground), Result::Ok)), 100);
        assert!((10..90).contains(&survivals(|_| {})));
    }

    #[test]
    fn a_sync_that_succeeds_after_one_that_failed_saves_nothing() {
        let survived = survivals(|ground| {
            ground.disk.sync_failures = 1;
            assert_eq!(sync(ground), Result::Failed);
            assert_eq!(sync(ground), Result::Ok);
        });
        assert!((5..70).contains(&survived), "{survived}");
    }
}
