//! The caller: what it asks for, and what it gets.

use twinrail_protocol::initiator::{FlushMark, Operation};
use twinrail_protocol::wire::{Payload, Placement};
use twinrail_protocol::{Flags, Opcode, Status, crc32c};

use super::{Initiator, State};
use crate::ground::{Event, Ground};
use crate::history::{Blocks, Command, Kind, MAX_BLOCKS, Mode, Outcome, Stamp, Stamps, What};
use crate::memory::Lent;
use crate::rails::placement;
use crate::stamps::{self, BLOCK};

/// A command that is out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Out {
    token: u32,
    kind: Kind,
    blocks: Blocks,
    stamp: Stamp,
    pub(super) opcode: Opcode,
    pub(super) flags: Flags,
    pub(super) mark: FlushMark,
    pub(super) buffer: Option<Lent>,
    /// Bytes of payload that it brings.
    pub(super) payload: u32,
    crc: u32,
    /// A session was lost while it was out: it may have acted then.
    replayed: bool,
}

/// The caller.
#[derive(Debug, Default)]
pub(super) struct Caller {
    /// It has submitted so many.
    submitted: u32,
    out: Vec<Out>,
    /// The next submission is planned.
    pub(super) planned: bool,
    /// What it believes the blocks hold.
    believed: Vec<Stamp>,
    /// It was told to close.
    closes: bool,
    /// It has all it wanted.
    satisfied: bool,
}

/// What a caller asks for.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// What.
    pub kind: Kind,
    /// It is answered when it is on stable storage.
    pub fua: bool,
    /// Where.
    pub blocks: Blocks,
    /// What it writes.
    pub stamp: Stamp,
    /// What COMPARE AND WRITE expects.
    pub expected: Stamp,
}

impl Caller {
    pub(super) fn out(&self, token: u32) -> Option<&Out> {
        self.out.iter().find(|out| out.token == token)
    }

    pub(super) fn was_replayed(&mut self, token: u32) {
        if let Some(out) = self.out.iter_mut().find(|out| out.token == token) {
            out.replayed = true;
        }
    }

    pub(super) fn command(&self, token: u32) -> Command {
        Command(token)
    }

    /// It submits nothing more.
    pub(super) fn close_soon(&mut self) {
        self.satisfied = true;
    }

    pub(super) fn wants_to_close(&self) -> bool {
        (self.satisfied || self.closes) && self.out.is_empty()
    }

    pub(super) fn operation(&self, token: u32) -> Operation {
        let nothing = Operation {
            opcode: Opcode::IDENTIFY,
            flags: Flags::NONE,
            offset: 0,
            length: 0,
            payload: Payload::default(),
            room: 0,
            placement: Placement::default(),
            token: u64::from(token),
        };
        let Some(out) = self.out(token) else { return nothing };
        let whole = matches!(out.kind, Kind::Flush);
        Operation {
            opcode: out.opcode,
            flags: out.flags,
            offset: if whole { 0 } else { u64::from(out.blocks.first) * BLOCK as u64 },
            length: if whole { 0 } else { u64::from(out.blocks.count) * BLOCK as u64 },
            payload: Payload { length: out.payload, crc: out.crc },
            room: if out.kind == Kind::Read { u32::from(out.blocks.count) * BLOCK as u32 } else { 0 },
            placement: out.buffer.map(placement).unwrap_or_default(),
            ..nothing
        }
    }
}

impl Initiator {
    /// The caller submits what it wants now.
    pub(super) fn work(&mut self, ground: &mut Ground) {
        let plan = ground.plan.initiators[usize::from(self.planned)];
        if self.state != State::Open
            || self.caller.satisfied
            || self.session.generation() == 0 && !self.session.is_attached()
        {
            return;
        }
        if plan.commands == 0 {
            return;
        }
        if self.caller.submitted >= plan.commands {
            self.caller.satisfied = true;
            return;
        }
        let (share, shares) = ground.counters.shares;
        if self.caller.submitted >= (plan.commands * share).div_ceil(shares.max(1)) {
            return;
        }
        if self.caller.planned || self.caller.out.len() >= plan.most_out as usize {
            return;
        }
        let wish = self.wish(ground, plan.mode);
        let queue = self.random.below(self.lanes.len() as u64) as u16;
        self.caller.submitted += 1;
        self.ask(ground, queue, &wish);
        self.caller.planned = true;
        let pause = self.random.magnitude(1, plan.pause);
        ground.clock.after(pause, Event::Work { initiator: self.number });
    }

    fn wish(&mut self, ground: &mut Ground, mode: Mode) -> Wish {
        let r = &mut self.random;
        let (blocks, most) = (u64::from(ground.plan.blocks), u64::from(ground.plan.most_blocks));
        let hot = if r.chance(600) { blocks.min(4) } else { blocks };
        let first = r.below(hot);
        let count = r.between(1, most).min(blocks - first);
        let mut blocks = Blocks::new(first as u16, count as u16);
        let kind = match r.below(100) {
            _ if mode == Mode::ReadOnly => Kind::Read,
            0..42 => Kind::Write,
            42..74 => Kind::Read,
            74..84 => Kind::Flush,
            84..89 => Kind::Zero,
            89..92 => Kind::Discard,
            92..98 => Kind::CompareAndWrite,
            _ => Kind::Other,
        };
        let mut expected = Stamp::ZERO;
        if kind == Kind::CompareAndWrite {
            blocks.count = 1;
            let believed = self.caller.believed.get(usize::from(blocks.first)).copied();
            expected = believed.filter(|_| r.chance(850)).unwrap_or(Stamp::ZERO);
        }
        let fua = kind.changes() && r.chance(150);
        let stamp = match kind {
            Kind::Write | Kind::CompareAndWrite => ground.counters.stamp(),
            _ => Stamp::ZERO,
        };
        Wish { kind, fua, blocks, stamp, expected }
    }

    /// Submits a command on a queue.
    pub fn ask(&mut self, ground: &mut Ground, queue: u16, wish: &Wish) -> Command {
        let Wish { kind, fua, blocks, stamp, expected } = *wish;
        let command = ground.counters.command();
        let token = command.0;
        let length = usize::from(blocks.count) * BLOCK;
        let (opcode, payload, room) = match kind {
            Kind::Read => (Opcode::READ, 0, length),
            Kind::Write => (Opcode::WRITE, length, length),
            Kind::Zero => (Opcode::WRITE_ZEROES, 0, 0),
            Kind::Discard => (Opcode::DISCARD, 0, 0),
            Kind::CompareAndWrite => (Opcode::COMPARE_AND_WRITE, 2 * length, 2 * length),
            Kind::Flush => (Opcode::FLUSH, 0, 0),
            Kind::Other => (Opcode::VERIFY, 0, 0),
        };
        let flags = if fua { Flags::FUA } else { Flags::NONE };
        let client = self.client;
        ground.record(What::Invoked { client, command, kind, fua, blocks, stamp, expected });
        ground.counters.invoked += 1;
        let buffer = (room > 0).then(|| ground.lend(room, crate::history::Side::Initiator));
        if let (Some(lent), true) = (buffer, payload > 0) {
            let bytes = ground.memory.bytes_mut(lent);
            let (first, second) = bytes.split_at_mut(length);
            match kind {
                Kind::CompareAndWrite => {
                    stamps::write_all(first, expected, blocks.first);
                    stamps::write_all(second, stamp, blocks.first);
                }
                _ => stamps::write_all(first, stamp, blocks.first),
            }
        }
        let mark = self.durability.submitted();
        let crc = buffer.map_or(0, |lent| crc32c(&ground.memory.bytes(lent)[..payload]));
        self.caller.out.push(Out {
            token,
            kind,
            blocks,
            stamp,
            opcode,
            flags,
            mark,
            buffer,
            payload: payload as u32,
            crc,
            replayed: false,
        });
        let lane = usize::from(queue).min(self.lanes.len() - 1);
        self.lanes[lane].held.push_back(token);
        // The session is over already.
        if let (State::Done | State::GivingUp(_), Some(status)) = (self.state, self.session.over()) {
            self.lanes[lane].held.pop_back();
            self.end(ground, token, status);
        }
        ground.tell(self.process(), crate::ground::Notice::Timer);
        command
    }

    /// The caller closes when everything that is out has ended.
    pub fn close(&mut self, ground: &mut Ground) {
        self.caller.closes = true;
        ground.tell(self.process(), crate::ground::Notice::Timer);
    }

    /// The caller hears of the end of a command.
    pub(super) fn end(&mut self, ground: &mut Ground, token: u32, status: Status) {
        let Some(at) = self.caller.out.iter().position(|out| out.token == token) else { return };
        let out = self.caller.out.swap_remove(at);
        let mut seen: Stamps = [Stamp::ZERO; MAX_BLOCKS];
        if let (Kind::Read, Status::OK, Some(lent)) = (out.kind, status, out.buffer) {
            let blocks = ground.memory.bytes(lent).chunks_exact(BLOCK).zip(out.blocks.each());
            for (seen, (bytes, block)) in seen.iter_mut().zip(blocks) {
                *seen = stamps::read(bytes, block);
            }
        }
        self.caller.believed.resize(usize::from(ground.plan.blocks), Stamp::ZERO);
        if status.is_ok() {
            for (n, block) in out.blocks.each().enumerate() {
                let believed = &mut self.caller.believed[usize::from(block)];
                match out.kind {
                    Kind::Read => *believed = seen[n],
                    kind if kind.changes() => *believed = out.stamp,
                    _ => {}
                }
            }
        }
        let outcome = match status {
            Status::OK => Outcome::Ok,
            Status::COMPARE_FAILED => Outcome::CompareFailed,
            Status::OUTCOME_UNKNOWN => Outcome::Unknown,
            Status(0x0101..=0x01ff) if !out.replayed => Outcome::Refused,
            _ => Outcome::Failed,
        };
        if let Some(lent) = out.buffer {
            ground.give_back(lent);
        }
        ground.record(What::Completed { command: Command(token), outcome, stamps: seen });
        ground.tell(self.process(), crate::ground::Notice::Timer);
    }
}
