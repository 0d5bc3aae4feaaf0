//! Both ends of a queue over paths that are lost at any moment, in any state, again and again: every command
//! completes with the truth, and changes are executed exactly once (I1, I2, I6, I7, I10).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, VecDeque};

use twinrail_protocol::initiator::{self, Completion, Incoming, Operation};
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::target::{self, Intake, Outcome, Start, Step};
use twinrail_protocol::wire::{
    Activate, Activated, Command, Credits, Frame, Handshake, Payload, Placement, Rail, VerdictKind, Writer,
};
use twinrail_protocol::{
    Epoch, Flags, Geometry, GrantNumber, Instance, Opcode, QueueId, Secret, Sequence, SessionId, Slot, Status,
};

const DEPTH: u16 = 6;
const BLOCKS: u64 = 16;
const IN_CAPSULE: u32 = 4096;
const LARGE: u32 = 8192;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A frame under way and the payload behind it. Payload bytes are stood for by their checksum.
type Parcel = (Frame, u32);

/// What the caller wants of a command. No two are out on one block, so that there is one right answer to each.
#[derive(Clone, Copy, Debug)]
struct Wish {
    opcode: Opcode,
    block: u64,
    /// What it writes; unique.
    stamp: u32,
    /// What the block holds before.
    before: u32,
}

/// How often the interesting things happened, over all runs.
#[derive(Debug, Default)]
struct Seen {
    unknown: u64,
    running: u64,
    done: u64,
    refused_payload_over_a_switch: u64,
    late_commands: u64,
    late_replies: u64,
    half_replies: u64,
    lost_reports: u64,
    lost_answers: u64,
    over_the_grant: u64,
    window_held: u64,
    completed: u64,
    switches: u64,
}

struct World<'a> {
    random: Random,
    seen: &'a mut Seen,
    ours: initiator::Queue,
    theirs: target::Queue,
    /// Of the path, as each side knows it.
    rail: Rail,
    their_rail: Rail,
    up: VecDeque<Parcel>,
    down: VecDeque<Parcel>,
    /// Both directions of paths that are over: somebody's buffers may still give them out.
    late_up: Vec<Parcel>,
    late_down: Vec<Parcel>,
    /// Private buffers at the target, and the commands that wait for storage or are at it.
    buffers: BTreeMap<Slot, u32>,
    fetching: Vec<(Slot, Sequence)>,
    parked: Vec<(Slot, Sequence)>,
    at_storage: Vec<(Slot, Sequence, Wish)>,
    disk: BTreeMap<u64, u32>,
    executed: BTreeMap<u32, u32>,
    /// The caller's side.
    wishes: BTreeMap<u64, Wish>,
    known: BTreeMap<u64, u32>,
    receiving: Option<(Slot, u32)>,
    resubmit: Vec<Slot>,
    next: u32,
}

impl<'a> World<'a> {
    fn new(seed: u64, seen: &'a mut Seen) -> Self {
        let mut random = Random(seed);
        let granted_slots = 1 + random.below(DEPTH.into()) as u16;
        let number = GrantNumber(random.below(1 << 16) as u16);
        let credits = Credits { granted_slots, number, data_window: 2 * LARGE };
        let max_transfer = 65536;
        let geometry = Geometry { size: BLOCKS * 65536, logical_block: 512, physical_block: 512, max_transfer };
        let ours = initiator::QueueOptions { depth: DEPTH, in_capsule: IN_CAPSULE, credits, max_transfer };
        let theirs = target::QueueOptions { depth: DEPTH, in_capsule: IN_CAPSULE, credits, geometry, read_only: false };
        Self {
            random,
            seen,
            ours: initiator::Queue::new(ours, Instance(7), Epoch(1)),
            theirs: target::Queue::new(theirs, Instance(7), Epoch(1)),
            rail: Rail::TCP,
            their_rail: Rail::TCP,
            up: VecDeque::new(),
            down: VecDeque::new(),
            late_up: Vec::new(),
            late_down: Vec::new(),
            buffers: BTreeMap::new(),
            fetching: Vec::new(),
            parked: Vec::new(),
            at_storage: Vec::new(),
            disk: BTreeMap::new(),
            executed: BTreeMap::new(),
            wishes: BTreeMap::new(),
            known: BTreeMap::new(),
            receiving: None,
            resubmit: Vec::new(),
            next: 1,
        }
    }

    fn submit(&mut self) -> bool {
        let opcodes = [Opcode::WRITE, Opcode::WRITE, Opcode::READ, Opcode::COMPARE_AND_WRITE, Opcode::FLUSH];
        let opcode = opcodes[self.random.below(5) as usize];
        let block = self.random.below(BLOCKS);
        if self.wishes.values().any(|w| w.block == block) {
            return false;
        }
        let large = self.random.one_in(2);
        let length = if large { LARGE } else { 512 };
        self.next += 1;
        let before = self.known.get(&block).copied().unwrap_or(0);
        let wish = Wish { opcode, block, stamp: self.next, before };
        let brings = match opcode {
            Opcode::WRITE => length,
            Opcode::COMPARE_AND_WRITE => 2 * length,
            _ => 0,
        };
        let crc = if brings > 0 { wish.stamp } else { 0 };
        let (offset, length) = if opcode == Opcode::FLUSH { (0, 0) } else { (block * 65536, u64::from(length)) };
        let token = self.next.into();
        let operation = Operation {
            opcode,
            flags: Flags::NONE,
            offset,
            length,
            payload: Payload { length: brings, crc },
            room: if opcode == Opcode::READ { length as u32 } else { 0 },
            placement: Placement { address: token << 12, key: 5 },
            token,
        };
        let taken = self.ours.submit(&operation).is_some();
        if taken {
            self.wishes.insert(token, wish);
        }
        taken
    }

    fn send(&mut self) -> bool {
        let Some(outgoing) = self.ours.next_frame() else { return false };
        let content = match outgoing.frame {
            Frame::Command(c) => {
                assert_eq!(c.placement == Placement::default(), self.rail == Rail::TCP);
                c.payload.crc
            }
            frame => frame.payload().crc,
        };
        self.up.push_back((outgoing.frame, content));
        true
    }

    /// A payload on its way may be damaged.
    fn carried(&mut self, content: u32) -> u32 {
        if self.random.one_in(12) { !content } else { content }
    }

    fn take_up(&mut self) -> bool {
        let Some((frame, content)) = self.up.pop_front() else { return false };
        match frame {
            Frame::Command(command) => {
                let intake = self.theirs.receive(&command).unwrap();
                self.take_command(&command, intake, content);
            }
            Frame::Data(data) => {
                assert_eq!(self.theirs.receive_data(&data), Ok(Intake::Receive));
                self.payload_arrives(data.slot, data.sequence, content);
            }
            other => panic!("{other:?}"),
        }
        true
    }

    fn take_command(&mut self, command: &Command, intake: Intake, content: u32) {
        let (slot, sequence) = (command.slot, command.sequence);
        match intake {
            Intake::Ready => self.parked.push((slot, sequence)),
            Intake::Receive => self.payload_arrives(slot, sequence, content),
            Intake::Fetch => self.fetching.push((slot, sequence)),
            Intake::Reply(reply) => self.down.push_back((Frame::Reply(reply), 0)),
            Intake::Running | Intake::Stale => panic!("{command:?} on a path of its own is {intake:?}"),
        }
    }

    fn payload_arrives(&mut self, slot: Slot, sequence: Sequence, content: u32) {
        let content = self.carried(content);
        match self.theirs.payload_arrived(slot, sequence, content) {
            Step::Ready => {
                self.buffers.insert(slot, content);
                self.parked.push((slot, sequence));
            }
            Step::Refuse(reply) => self.down.push_back((Frame::Reply(reply), 0)),
            Step::Stale => panic!("a payload of a command that doesn't wait for it"),
        }
    }

    /// The target finds a buffer for a payload that didn't come by itself.
    fn fetch(&mut self) -> bool {
        if self.fetching.is_empty() {
            return false;
        }
        let which = self.random.below(self.fetching.len() as u64) as usize;
        let (slot, sequence) = self.fetching.swap_remove(which);
        let Some(transfer) = self.theirs.fetch(slot, sequence) else { return true };
        match self.their_rail {
            Rail::TCP => self.down.push_back((Frame::Fetch(transfer), 0)),
            // It reads the initiator's memory.
            _ => self.payload_arrives(slot, sequence, transfer.payload.crc),
        }
        true
    }

    fn start(&mut self) -> bool {
        if self.parked.is_empty() {
            return false;
        }
        let which = self.random.below(self.parked.len() as u64) as usize;
        let (slot, sequence) = self.parked.swap_remove(which);
        let command = *self.theirs.command(slot, sequence).unwrap();
        match self.theirs.start(slot, sequence) {
            Start::Go(_) => {
                assert_eq!(command.epoch, self.theirs.epoch(), "I2: it took over the queue's epoch");
                let stamp = self.buffers.remove(&slot).unwrap_or(0);
                let before = stamp; // COMPARE AND WRITE's expected bytes are looked up by the stamp.
                let wish = Wish { opcode: command.opcode, block: command.offset / 65536, stamp, before };
                self.at_storage.push((slot, sequence, wish));
            }
            other => panic!("{command:?} was parked and is {other:?}"),
        }
        true
    }

    fn finish(&mut self) -> bool {
        if self.at_storage.is_empty() {
            return false;
        }
        let which = self.random.below(self.at_storage.len() as u64) as usize;
        let (slot, sequence, wish) = self.at_storage.swap_remove(which);
        let held = self.disk.get(&wish.block).copied().unwrap_or(0);
        let mut outcome = Outcome::default();
        match wish.opcode {
            Opcode::WRITE => drop(self.disk.insert(wish.block, wish.stamp)),
            Opcode::COMPARE_AND_WRITE => {
                let expected = self.wishes.values().find(|w| w.stamp == wish.stamp).map(|w| w.before);
                match expected == Some(held) {
                    true => drop(self.disk.insert(wish.block, wish.stamp)),
                    false => outcome.status = Some(Status::COMPARE_FAILED),
                }
            }
            Opcode::READ => {
                let length = self.theirs.command(slot, sequence).unwrap().length as u32;
                outcome.payload = Payload { length, crc: held };
            }
            _ => {}
        }
        if wish.stamp != 0 {
            *self.executed.entry(wish.stamp).or_default() += 1;
        }
        let mut reply = self.theirs.finish(slot, sequence, outcome).unwrap();
        if reply.payload.length > 0 && self.their_rail == Rail::TCP {
            reply.flags = Flags::PAYLOAD_FOLLOWS;
        }
        self.down.push_back((Frame::Reply(reply), held));
        true
    }

    fn take_down(&mut self) -> bool {
        if let Some((slot, content)) = self.receiving.take() {
            let content = self.carried(content);
            if let Some(completion) = self.ours.payload_arrived(slot, content) {
                self.complete(&completion, content);
            }
            return true;
        }
        let Some((frame, content)) = self.down.pop_front() else { return false };
        match frame {
            Frame::Fetch(fetch) => self.ours.fetch(&fetch).unwrap(),
            Frame::Reply(reply) => match self.ours.receive(&reply).unwrap() {
                Incoming::Receive { slot, .. } => self.receiving = Some((slot, content)),
                incoming => self.incoming(incoming),
            },
            other => panic!("{other:?}"),
        }
        true
    }

    fn incoming(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Complete(completion) => self.complete(&completion, 0),
            Incoming::Resubmit { slot } => self.resubmit.push(slot),
            other => panic!("{other:?}"),
        }
    }

    /// The caller hears of it: it must be the truth.
    fn complete(&mut self, completion: &Completion, content: u32) {
        let wish = self.wishes.remove(&completion.token).unwrap();
        let times = self.executed.get(&wish.stamp).copied().unwrap_or(0);
        self.seen.completed += 1;
        match (wish.opcode, completion.status) {
            // Damaged four times in a row: nothing was executed, and nothing is known of a read.
            (_, Status::PAYLOAD_CRC) => assert_eq!(times, 0, "{wish:?}"),
            (Opcode::READ, Status::OK) => assert_eq!(content, wish.before, "I4 {wish:?}"),
            (Opcode::WRITE | Opcode::COMPARE_AND_WRITE, Status::OK) => {
                assert_eq!(times, 1, "I1 {wish:?}");
                self.known.insert(wish.block, wish.stamp);
            }
            (Opcode::FLUSH, Status::OK) => {}
            other => panic!("{other:?} {wish:?}"),
        }
    }

    fn mend(&mut self) -> bool {
        let Some(slot) = self.resubmit.pop() else { return false };
        let token = self.ours.in_flight().find(|(c, _)| c.slot == slot).map(|(_, token)| token);
        let Some(wish) = token.and_then(|token| self.wishes.get(&token)) else { return true };
        let length = self.ours.in_flight().find(|(c, _)| c.slot == slot).unwrap().0.payload.length;
        self.ours.resubmit(slot, Payload { length, crc: wish.stamp });
        true
    }

    fn regrant(&mut self) {
        let granted = 1 + self.random.below(DEPTH.into()) as u16;
        let before = self.theirs.grant().said();
        if self.theirs.grant().change(granted) && self.theirs.grant().said() != before {
            // The event and its answer, both of which the path may lose.
            if self.random.one_in(2) {
                let credits = self.theirs.grant().said();
                if self.ours.has_path() && self.ours.credits_changed(credits).unwrap() {
                    let keeps = self.ours.allowance().keeps();
                    self.theirs.grant().seen(keeps).unwrap();
                }
            }
        }
    }

    /// Something that needs no path.
    fn go_on(&mut self) {
        for _ in 0..self.random.below(4) {
            match self.random.below(4) {
                0 => drop(self.submit()),
                1 => drop(self.mend()),
                2 => drop(self.start()),
                _ => drop(self.finish()),
            }
        }
    }

    /// The path is lost in whatever state it is in, and others are tried until one is active.
    fn switch(&mut self, certain: bool) {
        self.seen.switches += 1;
        // What the initiator still finds in its drain counts.
        for _ in 0..self.random.below(3) {
            self.take_down();
        }
        self.seen.half_replies += u64::from(self.receiving.take().is_some());
        self.ours.fence();
        self.late_down.extend(self.down.drain(..));
        loop {
            self.go_on();
            let rail = if self.random.one_in(2) { Rail::TCP } else { Rail::RDMA };
            let epoch = self.ours.next_epoch();
            let report: Vec<u8> = self.ours.report(rail).flat_map(|command| Frame::Command(command).encode()).collect();
            let granted = self.ours.allowance().said().granted_slots;
            self.seen.over_the_grant += self.ours.in_flight().filter(|(c, _)| c.slot.0 >= granted).count() as u64;
            self.go_on();
            if !certain && self.random.one_in(4) {
                self.seen.lost_reports += 1;
                continue;
            }
            // The target still takes from the old path what comes before the activation.
            for _ in 0..self.random.below(4) {
                self.take_up();
            }
            let answer = self.accept(rail, epoch, &report);
            self.go_on();
            if !certain && self.random.one_in(4) {
                self.seen.lost_answers += 1;
                self.late_down.extend(self.down.drain(..));
                continue;
            }
            self.rail = rail;
            self.adopt(epoch, &answer);
            return;
        }
    }

    /// The target accepts the activation: the frame that it answers with.
    fn accept(&mut self, rail: Rail, epoch: Epoch, report: &[u8]) -> Vec<u8> {
        self.late_up.extend(self.up.drain(..));
        self.late_down.extend(self.down.drain(..));
        let activate = Activate::new(SessionId([1; 16]), Secret([2; 16]), QueueId(0), rail, epoch);
        let activate = activate.with_report(report);
        self.theirs.may_activate(epoch, Instance(7)).unwrap();
        self.theirs.activate(epoch);
        self.their_rail = rail;
        self.fetching.clear();
        let mut verdicts = vec![0; usize::from(DEPTH) * (4 + HEADER_LEN)];
        let mut writer = Writer::new(&mut verdicts);
        let mut count = 0;
        for command in activate.report() {
            let verdict = self.theirs.verdict(&command.unwrap()).unwrap();
            match verdict.kind {
                VerdictKind::Unknown => self.seen.unknown += 1,
                VerdictKind::Running => self.seen.running += 1,
                VerdictKind::Done => self.seen.done += 1,
            }
            let damaged = verdict.reply.is_some_and(|reply| reply.status == Status::PAYLOAD_CRC);
            self.seen.refused_payload_over_a_switch += u64::from(damaged);
            verdict.encode(&mut writer);
            count += 1;
        }
        let length = writer.finish().unwrap();
        let mut activated = Activated::new(epoch, Instance(7));
        (activated.depth, activated.in_capsule) = (DEPTH, IN_CAPSULE);
        activated.credits = self.theirs.grant().said();
        let mut frame = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD];
        let activated = activated.with_verdicts(count, &verdicts[..length]);
        let length = Handshake::Activated(activated).encode(&mut frame).unwrap();
        frame.truncate(length);
        // I2: what comes late from an older path is seen to be late.
        for (frame, _) in std::mem::take(&mut self.late_up) {
            self.seen.late_commands += 1;
            match frame {
                Frame::Command(command) => assert_eq!(self.theirs.receive(&command), Ok(Intake::Stale)),
                Frame::Data(data) => assert_eq!(self.theirs.receive_data(&data), Ok(Intake::Stale)),
                other => panic!("{other:?}"),
            }
        }
        frame
    }

    /// The initiator hears of it.
    fn adopt(&mut self, epoch: Epoch, frame: &[u8]) {
        // The first replies may already be under way behind it.
        let header = frame[..HEADER_LEN].try_into().unwrap();
        let Ok(Frame::Handshake { kind, payload }) = Frame::decode(&header) else { panic!("no handshake") };
        let Ok(Handshake::Activated(activated)) = Handshake::decode(kind, payload, &frame[HEADER_LEN..]) else {
            panic!("no ACTIVATED")
        };
        let mut ended = Vec::new();
        self.ours.activate(epoch, &activated, |incoming| ended.push(incoming)).unwrap();
        self.seen.window_held += self.ours.allowance().window_used();
        ended.into_iter().for_each(|incoming| self.incoming(incoming));
        for (frame, _) in std::mem::take(&mut self.late_down) {
            if let Frame::Reply(reply) = frame
                && reply.epoch < epoch
            {
                self.seen.late_replies += 1;
                assert_eq!(self.ours.receive(&reply), Ok(Incoming::Stale));
            }
        }
    }

    fn step(&mut self) {
        match self.random.below(40) {
            0 => self.switch(false),
            1 => self.regrant(),
            2..=10 => drop(self.submit()),
            11..=17 => drop(self.send()),
            18..=23 => drop(self.take_up()),
            24..=25 => drop(self.fetch()),
            26..=29 => drop(self.start()),
            30..=33 => drop(self.finish()),
            34 => drop(self.mend()),
            _ => drop(self.take_down()),
        }
    }

    /// From here on nothing fails any more: everything completes (I10).
    fn heal(&mut self) {
        self.switch(true);
        for _ in 0..10_000 {
            let busy = self.send()
                | self.take_up()
                | self.fetch()
                | self.start()
                | self.finish()
                | self.take_down()
                | self.mend();
            if !busy {
                break;
            }
        }
        assert_eq!((self.ours.outstanding(), self.theirs.busy()), (0, 0), "{:?}", self.wishes);
        assert!(self.wishes.is_empty());
        assert_eq!(self.ours.allowance().window_used(), 0);
        assert!(self.executed.values().all(|&times| times == 1), "I1");
        for (block, stamp) in &self.known {
            assert_eq!(self.disk[block], *stamp, "I4");
        }
        // Both sides hold the same grant, and it binds once it is named: nothing leaked.
        let said = self.theirs.grant().said();
        assert_eq!(self.ours.credits_changed(said), Ok(true));
        assert_eq!(self.ours.allowance().said(), said);
        self.theirs.grant().seen(said.number).unwrap();
        assert_eq!(self.theirs.grant().binding(), said.granted_slots);
    }
}

#[test]
fn whatever_is_lost_every_command_completes_with_the_truth_and_is_executed_once() {
    let mut seen = Seen::default();
    for seed in 0..4000 {
        let mut world = World::new(seed, &mut seen);
        let steps = 50 + world.random.below(400);
        for _ in 0..steps {
            world.step();
        }
        world.heal();
    }
    println!("{seen:?}");
    let Seen { unknown, running, done, refused_payload_over_a_switch, late_commands, late_replies, .. } = seen;
    let Seen { half_replies, lost_reports, lost_answers, over_the_grant, window_held, completed, switches, .. } = seen;
    for (happened, least) in [
        (unknown, 10_000),
        (running, 10_000),
        (done, 1000),
        (refused_payload_over_a_switch, 100),
        (late_commands, 1000),
        (late_replies, 1000),
        (half_replies, 100),
        (lost_reports, 1000),
        (lost_answers, 1000),
        (over_the_grant, 100),
        (window_held, 100),
        (completed, 50_000),
        (switches, 10_000),
    ] {
        assert!(happened >= least, "{happened} is below {least}: the test has gone blunt");
    }
}
