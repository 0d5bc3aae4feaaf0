//! Both ends of a queue agree on the credits, whatever overtakes what (I6).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::VecDeque;

use proptest::prelude::*;
use twinrail_protocol::initiator::{self, Incoming, Operation};
use twinrail_protocol::target::{self, Intake, Outcome, Start, Step};
use twinrail_protocol::wire::{Command, Credits, Frame, Payload, Placement, Reply};
use twinrail_protocol::{Epoch, Flags, Geometry, GrantNumber, Instance, Opcode, Sequence, Slot, Status};

const DEPTH: u16 = 8;
const LENGTH: u32 = 8192;
const CRC: u32 = 7;

/// The two ends, and what is under way between them. Data frames keep their order; control frames come
/// whenever they like.
struct Pair {
    initiator: initiator::Queue,
    target: target::Queue,
    commands: VecDeque<Command>,
    replies: VecDeque<Reply>,
    events: Vec<Credits>,
    seen: Vec<GrantNumber>,
    at_storage: Vec<(Slot, Sequence)>,
    /// A credit event waits for its answer.
    unsettled: bool,
}

impl Pair {
    fn new(granted_slots: u16, number: u16) -> Self {
        let credits = Credits { granted_slots, number: GrantNumber(number), data_window: 3 * LENGTH };
        let (instance, epoch, max_transfer) = (Instance(1), Epoch(1), 65536);
        let geometry = Geometry { size: 1 << 20, logical_block: 512, physical_block: 512, max_transfer };
        let ours = initiator::QueueOptions { depth: DEPTH, in_capsule: 4096, credits, max_transfer };
        let theirs = target::QueueOptions { depth: DEPTH, in_capsule: 4096, credits, geometry, read_only: false };
        Self {
            initiator: initiator::Queue::new(ours, instance, epoch),
            target: target::Queue::new(theirs, instance, epoch),
            commands: VecDeque::new(),
            replies: VecDeque::new(),
            events: Vec::new(),
            seen: Vec::new(),
            at_storage: Vec::new(),
            unsettled: false,
        }
    }

    fn change(&mut self, granted_slots: u16) {
        let before = self.target.grant().said();
        if self.target.grant().change(granted_slots) && self.target.grant().said() != before {
            self.events.push(self.target.grant().said());
        }
    }

    fn submit(&mut self) -> bool {
        let payload = Payload { length: LENGTH, crc: CRC };
        let operation = Operation {
            opcode: Opcode::WRITE,
            flags: Flags::NONE,
            offset: 0,
            length: LENGTH.into(),
            payload,
            room: 0,
            placement: Placement::default(),
            token: 0,
        };
        self.initiator.submit(&operation).is_some()
    }

    fn send(&mut self) -> bool {
        match self.initiator.next_frame().map(|outgoing| outgoing.frame) {
            Some(Frame::Command(command)) => self.commands.push_back(command),
            None => return false,
            other => panic!("{other:?}"),
        }
        true
    }

    /// The target takes a command; whether its payload came in one piece.
    fn take_command(&mut self, intact: bool) -> bool {
        let Some(command) = self.commands.pop_front() else { return false };
        let (slot, sequence) = (command.slot, command.sequence);
        let intake = self.target.receive(&command).unwrap();
        if intake == Intake::Fetch {
            assert!(!command.flags.has(Flags::PAYLOAD_FOLLOWS));
            self.target.fetch(slot, sequence).unwrap();
        }
        match self.target.payload_arrived(slot, sequence, if intact { CRC } else { !CRC }) {
            Step::Ready => {
                assert!(matches!(self.target.start(slot, sequence), Start::Go(_)));
                self.at_storage.push((slot, sequence));
            }
            Step::Refuse(reply) => self.replies.push_back(reply),
            Step::Stale => panic!("{command:?}"),
        }
        true
    }

    fn finish(&mut self, which: usize) -> bool {
        if self.at_storage.is_empty() {
            return false;
        }
        let (slot, sequence) = self.at_storage.swap_remove(which % self.at_storage.len());
        self.replies.push_back(self.target.finish(slot, sequence, Outcome::default()).unwrap());
        true
    }

    fn take_reply(&mut self) -> bool {
        let Some(reply) = self.replies.pop_front() else { return false };
        match self.initiator.receive(&reply).unwrap() {
            Incoming::Resubmit { slot } => self.initiator.resubmit(slot, Payload { length: LENGTH, crc: CRC }),
            Incoming::Complete(completion) => assert!([Status::OK, Status::PAYLOAD_CRC].contains(&completion.status)),
            other => panic!("{other:?}"),
        }
        self.settle();
        true
    }

    fn take_event(&mut self, which: usize) -> bool {
        if self.events.is_empty() {
            return false;
        }
        let credits = self.events.swap_remove(which % self.events.len());
        self.initiator.credits_changed(credits).unwrap();
        self.unsettled = true;
        self.settle();
        true
    }

    fn settle(&mut self) {
        if self.unsettled && self.initiator.allowance().is_settled() {
            self.unsettled = false;
            self.seen.push(self.initiator.allowance().keeps());
        }
    }

    fn take_seen(&mut self, which: usize) -> bool {
        if self.seen.is_empty() {
            return false;
        }
        let number = self.seen.swap_remove(which % self.seen.len());
        self.target.grant().seen(number).unwrap();
        true
    }

    fn check(&mut self) {
        let binding = self.target.grant().binding();
        assert!(binding >= self.target.grant().said().granted_slots);
        assert!(self.initiator.outstanding() <= binding);
        assert!(self.initiator.in_flight().all(|(command, _)| command.slot.0 < binding));
        assert!((binding..DEPTH).all(|slot| !self.target.is_busy(Slot(slot))));
    }

    /// Lets everything come to an end.
    fn drain(&mut self) {
        while self.send()
            || self.take_command(true)
            || self.finish(0)
            || self.take_reply()
            || self.take_event(0)
            || self.take_seen(0)
        {
            self.check();
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    Change(u16),
    Submit,
    Send,
    TakeCommand { intact: bool },
    Finish(usize),
    TakeReply,
    TakeEvent(usize),
    TakeSeen(usize),
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        2 => (0..=DEPTH + 1).prop_map(Turn::Change),
        4 => Just(Turn::Submit),
        4 => Just(Turn::Send),
        4 => prop::bool::weighted(0.8).prop_map(|intact| Turn::TakeCommand { intact }),
        4 => any::<usize>().prop_map(Turn::Finish),
        4 => Just(Turn::TakeReply),
        1 => any::<usize>().prop_map(Turn::TakeEvent),
        1 => any::<usize>().prop_map(Turn::TakeSeen),
    ]
}

proptest! {
    /// No command is refused that was sent in good faith, none is in flight that the binding grant doesn't
    /// cover, and when all has come to an end both sides hold the same grant.
    #[test]
    fn i6_no_order_of_frames_gives_a_false_overrun_or_too_many_commands(
        granted_slots in 1..=DEPTH,
        // Some begin shortly before the numbers wrap.
        number in prop_oneof![any::<u16>(), u16::MAX - 5..=u16::MAX],
        turns in prop::collection::vec(turn(), 0..400),
    ) {
        let mut pair = Pair::new(granted_slots, number);
        for turn in turns {
            match turn {
                Turn::Change(granted_slots) => pair.change(granted_slots),
                Turn::Submit => drop(pair.submit()),
                Turn::Send => drop(pair.send()),
                Turn::TakeCommand { intact } => drop(pair.take_command(intact)),
                Turn::Finish(which) => drop(pair.finish(which)),
                Turn::TakeReply => drop(pair.take_reply()),
                Turn::TakeEvent(which) => drop(pair.take_event(which)),
                Turn::TakeSeen(which) => drop(pair.take_seen(which)),
            }
            pair.check();
        }
        pair.drain();
        let said = pair.target.grant().said();
        prop_assert_eq!(pair.initiator.allowance().said(), said);
        prop_assert_eq!(pair.target.grant().binding(), said.granted_slots);
        prop_assert_eq!(pair.initiator.allowance().window_used(), 0);
        // What is granted can be used, all of it at once.
        for _ in 0..said.granted_slots {
            prop_assert!(pair.submit());
        }
        prop_assert!(!pair.submit());
        pair.drain();
        prop_assert_eq!(pair.target.busy(), 0);
    }
}
