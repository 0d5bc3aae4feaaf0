//! From one path of a queue to the next: fence, report, activate (I1, I2; SPEC.md, "Epochs and activation").
//!
//! ```text
//!            fence                next_epoch, report             activate
//!  path 1 ─────────▶ no path ─────────────────────────▶ asked ─────────────▶ path 2
//!                       ▲                                 │ refused, lost,
//!                       └─────────────────────────────────┘ no answer
//! ```
//!
//! The driver first drains its own side of the old path: replies that come out of it count. Then nothing of that
//! path is listened to any more, and the target is asked about every command that is out.

use super::queue::{Due, Incoming, Queue, placement_on};
use crate::canary::{Canary, broken};
use crate::ids::Epoch;
use crate::opcode::Flags;
use crate::status::Status;
use crate::violation::Violation;
use crate::wire::{Activated, Command, Rail, Reply, Verdict, VerdictKind};

impl Queue {
    /// This side of the path is drained. Replies of which only half was received are forgotten: their commands
    /// are unanswered again. From here on nothing more is sent on the path, and what still comes is stale.
    pub fn fence(&mut self) {
        self.fenced = true;
        if broken(Canary::HalfReplyKept) {
            return;
        }
        for entry in &mut self.table {
            entry.reply = None;
        }
    }

    /// The epoch of the next attempt to activate a path: greater than that of any attempt before, failed ones
    /// included.
    pub fn next_epoch(&mut self) -> Epoch {
        self.attempted = self.attempted.next();
        self.attempted
    }

    /// Every command that is out, in the order of their slots, as it would be sent on a path of `rail` with the
    /// epoch that [`Self::next_epoch`] gave last. That includes commands that never left: the target says the
    /// truth of them, too. Fences the old path if that wasn't done.
    pub fn report(&mut self, rail: Rail) -> impl Iterator<Item = Command> + '_ {
        if !self.fenced {
            self.fence();
        }
        // What is due is out, and what the target doesn't know becomes due again.
        self.due.clear();
        self.next_rail = rail;
        for entry in &mut self.table {
            entry.reported = entry.out.then_some(entry.sequence);
        }
        let (epoch, grant_seen) = (self.attempted, self.allowance.keeps());
        self.table.iter().filter(|entry| entry.out).map(move |entry| Command {
            epoch,
            grant_seen,
            flags: entry.command.flags.without(Flags::PAYLOAD_FOLLOWS),
            placement: placement_on(rail, entry.placement),
            ..entry.command
        })
    }

    /// The target accepted the attempt with `epoch`, and says what it knows of each command that was reported:
    /// what is *done* completes, or has to be resubmitted ([`Incoming::Complete`], [`Incoming::Resubmit`]; each
    /// is told to `ended`); what is *running* waits for its reply on the new path; what is *unknown* becomes due
    /// again as it was. The path is active from here on.
    ///
    /// # Errors
    /// A [`Violation`] when the answer doesn't fit the report: nothing has happened, and the path ends.
    pub fn activate(
        &mut self,
        epoch: Epoch,
        activated: &Activated<'_>,
        mut ended: impl FnMut(Incoming),
    ) -> Result<(), Violation> {
        self.check_activated(epoch, activated)?;
        (self.epoch, self.rail, self.fenced) = (epoch, self.next_rail, false);
        self.allowance.hear(activated.credits);
        for verdict in activated.verdicts() {
            if let Some(incoming) = self.apply(&verdict?) {
                ended(incoming);
            }
        }
        for entry in &mut self.table {
            entry.reported = None;
        }
        self.settle();
        Ok(())
    }

    /// Holds the whole answer against the report before anything of it is believed.
    fn check_activated(&self, epoch: Epoch, activated: &Activated<'_>) -> Result<(), Violation> {
        let malformed = |detail| Err(Violation::new(Status::MALFORMED, detail));
        if epoch != self.attempted || activated.epoch != epoch {
            return malformed("an activation of another epoch than the one asked for");
        }
        if activated.instance != self.instance && !broken(Canary::InstanceIgnored) {
            return Err(Violation::new(Status::SESSION_LOST, "an activation of another slot table"));
        }
        if (activated.depth, activated.in_capsule) != (self.options.depth, self.options.in_capsule) {
            return malformed("an activation that changes the depth or the in-capsule size of a slot table");
        }
        let mut verdicts = activated.verdicts();
        for (index, _) in self.table.iter().enumerate().filter(|(_, entry)| entry.reported.is_some()) {
            match verdicts.next() {
                Some(verdict) => self.check_verdict(index, epoch, &verdict?)?,
                None => return malformed("a reported command has no verdict"),
            }
        }
        match verdicts.next() {
            Some(_) => malformed("a verdict on a command that wasn't reported"),
            None => Ok(()),
        }
    }

    fn check_verdict(&self, index: usize, epoch: Epoch, verdict: &Verdict) -> Result<(), Violation> {
        let entry = &self.table[index];
        if verdict.slot.index() != index {
            return Err(Violation::new(Status::MALFORMED, "verdicts that aren't in the order of the report"));
        }
        if self.is_settled_otherwise(index) {
            return Ok(());
        }
        match (verdict.kind, &verdict.reply) {
            (VerdictKind::Unknown, _) => Ok(()),
            (VerdictKind::Running, _) if entry.sent => Ok(()),
            (VerdictKind::Done, Some(reply)) if reply.epoch == epoch => self.check_reply(reply),
            _ => Err(Violation::new(Status::MALFORMED, "a verdict on a command that was never sent")),
        }
    }

    /// The target has refused the payload of what was reported, and the command comes again as a new sequence
    /// whatever the verdict says.
    fn is_settled_otherwise(&self, index: usize) -> bool {
        let entry = &self.table[index];
        entry.refused || entry.reported != Some(entry.sequence)
    }

    /// A verdict of an answer that was checked.
    fn apply(&mut self, verdict: &Verdict) -> Option<Incoming> {
        let (epoch, rail) = (self.epoch, self.rail);
        if self.is_settled_otherwise(verdict.slot.index()) {
            return None;
        }
        let entry = &mut self.table[verdict.slot.index()];
        entry.command.epoch = epoch;
        entry.command.placement = placement_on(rail, entry.placement);
        match (verdict.kind, &verdict.reply) {
            (VerdictKind::Done, Some(reply)) => Some(self.take_reply(reply)),
            // It keeps its memory at the target, and so its part of the window.
            (VerdictKind::Running, _) => None,
            _ if broken(Canary::UnknownCompleted) && entry.command.opcode.changes() => {
                let reply = Reply::to(&entry.command, epoch, self.allowance.said());
                Some(Incoming::Complete(self.complete(&reply)))
            }
            _ => {
                entry.sent = false;
                self.allowance.free_window(core::mem::take(&mut entry.unasked));
                // Ahead of what was submitted since the report.
                self.due.push_front(Due::Command(verdict.slot));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::super::queue::{Operation, QueueOptions};
    use super::*;
    use crate::ids::{GrantNumber, Instance, Sequence, Slot};
    use crate::opcode::Opcode;
    use crate::wire::{Credits, Frame, Payload, Placement, Reply, Writer};

    const CREDITS: Credits = Credits { granted_slots: 4, number: GrantNumber(7), data_window: 16384 };
    const TABLE: Instance = Instance(9);

    fn queue() -> Queue {
        let options = QueueOptions { depth: 4, in_capsule: 4096, credits: CREDITS, max_transfer: 65536 };
        Queue::new(options, TABLE, Epoch(1))
    }

    fn operation(opcode: Opcode) -> Operation {
        let brings = if opcode == Opcode::WRITE { Payload { length: 8192, crc: 7 } } else { Payload::default() };
        Operation {
            opcode,
            flags: Flags::NONE,
            offset: 0,
            length: if opcode == Opcode::FLUSH { 0 } else { 8192 },
            payload: brings,
            room: if opcode == Opcode::READ { 8192 } else { 0 },
            placement: Placement { address: 0x1000, key: 3 },
            token: 42,
        }
    }

    /// A queue with one command, which was sent.
    fn sent(opcode: Opcode) -> (Queue, Command) {
        let mut q = queue();
        q.submit(&operation(opcode)).unwrap();
        let command = next(&mut q);
        (q, command)
    }

    fn next(q: &mut Queue) -> Command {
        match q.next_frame().map(|outgoing| outgoing.frame) {
            Some(Frame::Command(command)) => command,
            other => panic!("no command to send but {other:?}"),
        }
    }

    fn report(q: &mut Queue, rail: Rail) -> (Epoch, Vec<Command>) {
        let epoch = q.next_epoch();
        (epoch, q.report(rail).collect())
    }

    /// The target's answer.
    fn answer(q: &mut Queue, epoch: Epoch, verdicts: &[Verdict]) -> Result<Vec<Incoming>, Violation> {
        answer_with(q, epoch, verdicts, |_| {})
    }

    fn answer_with(
        q: &mut Queue,
        epoch: Epoch,
        verdicts: &[Verdict],
        change: impl FnOnce(&mut Activated<'_>),
    ) -> Result<Vec<Incoming>, Violation> {
        let mut encoded = vec![0; 1024];
        let mut w = Writer::new(&mut encoded);
        verdicts.iter().for_each(|verdict| verdict.encode(&mut w));
        let length = w.finish().unwrap();
        let mut activated = Activated::new(epoch, TABLE).with_verdicts(verdicts.len() as u16, &encoded[..length]);
        (activated.depth, activated.in_capsule, activated.credits) = (4, 4096, CREDITS);
        change(&mut activated);
        let mut told = Vec::new();
        q.activate(epoch, &activated, |incoming| told.push(incoming)).map(|()| told)
    }

    fn verdict(slot: u16, kind: VerdictKind) -> Verdict {
        Verdict { slot: Slot(slot), kind, reply: None }
    }

    fn done(command: &Command, epoch: Epoch, status: Status) -> Verdict {
        let reply = Reply { status, ..Reply::to(command, epoch, CREDITS) };
        Verdict { slot: command.slot, kind: VerdictKind::Done, reply: Some(reply) }
    }

    #[test]
    fn i1_an_unknown_command_is_sent_again_as_it_was() {
        let (mut q, command) = sent(Opcode::WRITE);
        let (epoch, reported) = report(&mut q, Rail::TCP);
        assert_eq!((epoch, reported.len()), (Epoch(2), 1));
        assert!(command.is_repeated_by(&reported[0]));
        assert!(q.next_frame().is_none(), "no path, nothing to send");
        assert_eq!(answer(&mut q, epoch, &[verdict(0, VerdictKind::Unknown)]), Ok(vec![]));
        let again = next(&mut q);
        assert!(command.is_repeated_by(&again));
        assert_eq!((again.sequence, again.epoch), (command.sequence, epoch));
        assert_eq!(q.allowance().window_used(), 8192, "the old path's use is over");
        let Ok(Incoming::Complete(completion)) = q.receive(&Reply::to(&again, epoch, CREDITS)) else { panic!() };
        assert_eq!(completion.token, 42);
    }

    #[test]
    fn i1_a_running_command_is_answered_on_the_new_path_and_not_sent_again() {
        let (mut q, command) = sent(Opcode::WRITE);
        let (epoch, reported) = report(&mut q, Rail::TCP);
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Running)]).unwrap();
        assert!(q.next_frame().is_none());
        assert_eq!(q.allowance().window_used(), 8192, "its payload is still at the target");
        assert_eq!(q.receive(&Reply::to(&command, Epoch(1), CREDITS)), Ok(Incoming::Stale));
        assert!(matches!(q.receive(&Reply::to(&reported[0], epoch, CREDITS)), Ok(Incoming::Complete(_))));
        assert_eq!(q.allowance().window_used(), 0);
    }

    #[test]
    fn i1_a_command_that_is_done_completes_with_its_recorded_reply() {
        let (mut q, command) = sent(Opcode::WRITE);
        let (epoch, _) = report(&mut q, Rail::TCP);
        let told = answer(&mut q, epoch, &[done(&command, epoch, Status::NO_SPACE)]).unwrap();
        assert!(matches!(told[..], [Incoming::Complete(c)] if (c.status, c.token) == (Status::NO_SPACE, 42)));
        assert_eq!((q.outstanding(), q.allowance().window_used()), (0, 0));
    }

    #[test]
    fn i7_a_payload_that_was_refused_on_the_lost_path_is_sent_as_a_new_sequence() {
        let (mut q, command) = sent(Opcode::WRITE);
        let (epoch, _) = report(&mut q, Rail::TCP);
        let told = answer(&mut q, epoch, &[done(&command, epoch, Status::PAYLOAD_CRC)]).unwrap();
        assert_eq!(told, [Incoming::Resubmit { slot: Slot(0) }]);
        q.resubmit(Slot(0), Payload { length: 8192, crc: 8 });
        assert_eq!(next(&mut q).sequence, Sequence(2));
    }

    #[test]
    fn a_resubmission_that_is_under_way_during_a_switch_happens_once() {
        let (mut q, command) = sent(Opcode::WRITE);
        let refused = Reply { status: Status::PAYLOAD_CRC, ..Reply::to(&command, Epoch(1), CREDITS) };
        assert_eq!(q.receive(&refused), Ok(Incoming::Resubmit { slot: Slot(0) }));
        let (epoch, reported) = report(&mut q, Rail::TCP);
        assert_eq!(reported[0].sequence, Sequence(1));
        q.resubmit(Slot(0), Payload { length: 8192, crc: 8 });
        let told = answer(&mut q, epoch, &[done(&command, epoch, Status::PAYLOAD_CRC)]).unwrap();
        assert_eq!(told, []);
        q.resubmit(Slot(0), Payload { length: 8192, crc: 8 });
        assert_eq!(next(&mut q).sequence, Sequence(2));
        assert!(q.next_frame().is_none());
    }

    #[test]
    fn every_attempt_takes_a_greater_epoch_and_only_the_last_one_counts() {
        let (mut q, _) = sent(Opcode::WRITE);
        let (first, _) = report(&mut q, Rail::TCP);
        let (second, reported) = report(&mut q, Rail::TCP);
        assert!(second > first && reported[0].epoch == second);
        assert!(answer(&mut q, first, &[verdict(0, VerdictKind::Unknown)]).is_err(), "an answer from before");
        assert!(!q.has_path());
        assert_eq!(answer(&mut q, second, &[verdict(0, VerdictKind::Running)]), Ok(vec![]));
        assert!(q.has_path());
    }

    #[test]
    fn a_read_of_which_half_was_delivered_is_asked_about_again() {
        let (mut q, command) = sent(Opcode::READ);
        let payload = Payload { length: 8192, crc: 5 };
        let half = Reply { flags: Flags::PAYLOAD_FOLLOWS, payload, ..Reply::to(&command, Epoch(1), CREDITS) };
        assert_eq!(q.receive(&half), Ok(Incoming::Receive { slot: Slot(0), length: 8192 }));
        q.fence();
        assert_eq!(q.payload_arrived(Slot(0), 5), None, "it belongs to the path that is over");
        let (epoch, reported) = report(&mut q, Rail::TCP);
        assert_eq!(reported.len(), 1);
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Unknown)]).unwrap();
        let again = next(&mut q);
        let whole = Reply { epoch, ..half };
        assert_eq!(again.sequence, command.sequence);
        assert_eq!(q.receive(&whole), Ok(Incoming::Receive { slot: Slot(0), length: 8192 }));
        assert!(q.payload_arrived(Slot(0), 5).is_some_and(|c| c.status.is_ok()));
    }

    #[test]
    fn what_still_comes_from_a_fenced_path_is_stale() {
        let (mut q, command) = sent(Opcode::WRITE);
        let Command { opcode, slot, epoch, sequence, payload, .. } = command;
        q.fence();
        assert_eq!(q.receive(&Reply::to(&command, epoch, CREDITS)), Ok(Incoming::Stale));
        q.fetch(&crate::wire::Transfer { opcode, slot, epoch, sequence, payload }).unwrap();
        let (epoch, _) = report(&mut q, Rail::TCP);
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Running)]).unwrap();
        assert!(q.next_frame().is_none(), "a fetch of the old path isn't answered on the new one");
    }

    #[test]
    fn commands_submitted_without_a_path_wait_for_it_and_nobody_is_asked_about_them() {
        let (mut q, _) = sent(Opcode::WRITE);
        let (epoch, reported) = report(&mut q, Rail::TCP);
        assert_eq!(reported.len(), 1);
        assert_eq!(q.submit(&operation(Opcode::FLUSH)), Some(Slot(1)));
        assert!(q.next_frame().is_none());
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Unknown)]).unwrap();
        assert_eq!([next(&mut q), next(&mut q)].map(|c| (c.slot, c.epoch)), [(Slot(0), epoch), (Slot(1), epoch)]);
        let (epoch, reported) = report(&mut q, Rail::TCP);
        assert_eq!(reported.len(), 2);
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Running), verdict(1, VerdictKind::Running)]).unwrap();
    }

    #[test]
    fn a_payload_has_a_place_on_rdma_and_none_on_tcp() {
        let (mut q, command) = sent(Opcode::READ);
        assert_eq!(command.placement, Placement::default());
        let (epoch, reported) = report(&mut q, Rail::RDMA);
        assert_eq!(reported[0].placement, operation(Opcode::READ).placement);
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Running)]).unwrap();
        // The bytes were written there before the reply came.
        let payload = Payload { length: 8192, crc: 5 };
        let placed = Reply { payload, ..Reply::to(&reported[0], epoch, CREDITS) };
        assert_eq!(q.receive(&placed), Ok(Incoming::Receive { slot: Slot(0), length: 8192 }));
        let (epoch, reported) = report(&mut q, Rail::TCP);
        assert_eq!(reported[0].placement, Placement::default());
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Running)]).unwrap();
        assert!(q.receive(&Reply { epoch, ..placed }).is_err(), "on TCP nobody wrote them");
    }

    #[test]
    fn on_rdma_the_target_fetches_large_payloads_by_itself_and_no_window_is_used() {
        let (mut q, _) = sent(Opcode::FLUSH);
        let (epoch, _) = report(&mut q, Rail::RDMA);
        answer(&mut q, epoch, &[verdict(0, VerdictKind::Running)]).unwrap();
        q.submit(&operation(Opcode::WRITE)).unwrap();
        let command = next(&mut q);
        assert!(!command.flags.has(Flags::PAYLOAD_FOLLOWS));
        assert_eq!((command.placement.key, q.allowance().window_used()), (3, 0));
    }

    #[test]
    fn i6_a_grant_that_shrank_in_between_holds_for_new_commands_and_is_named_when_it_is_kept_to() {
        let mut q = queue();
        for _ in 0..4 {
            q.submit(&operation(Opcode::FLUSH)).unwrap();
        }
        let commands = [next(&mut q), next(&mut q), next(&mut q), next(&mut q)];
        let (epoch, _) = report(&mut q, Rail::TCP);
        let shrunk = Credits { granted_slots: 2, number: GrantNumber(9), ..CREDITS };
        let verdicts: Vec<_> = (0..4).map(|slot| verdict(slot, VerdictKind::Running)).collect();
        answer_with(&mut q, epoch, &verdicts, |activated| activated.credits = shrunk).unwrap();
        assert!(!q.allowance().is_settled());
        for command in &commands {
            q.receive(&Reply::to(command, epoch, shrunk)).unwrap();
        }
        assert!(q.allowance().is_settled());
        assert!(q.submit(&operation(Opcode::FLUSH)).is_some() && q.submit(&operation(Opcode::FLUSH)).is_some());
        assert!(q.submit(&operation(Opcode::FLUSH)).is_none());
        assert_eq!(next(&mut q).grant_seen, GrantNumber(9));
    }

    #[test]
    fn i9_an_answer_that_does_not_fit_the_report_changes_nothing() {
        let mut q = queue();
        q.submit(&operation(Opcode::WRITE)).unwrap();
        let command = next(&mut q);
        q.submit(&operation(Opcode::READ)).unwrap();
        let read = next(&mut q);
        q.submit(&operation(Opcode::FLUSH)).unwrap(); // never sent
        let (epoch, _) = report(&mut q, Rail::TCP);
        use VerdictKind::{Running, Unknown};
        let [first, second, third] = [0, 1, 2].map(|slot| verdict(slot, Unknown));
        let other = Command { sequence: Sequence(9), ..command };
        for bad in [
            &[][..],
            &[first, second],
            &[first, second, third, verdict(3, Unknown)],
            &[second, first, third],
            &[first, first, third],
            &[first, second, verdict(2, Running)],
            &[done(&other, epoch, Status::OK), second, third],
            &[done(&command, Epoch(1), Status::OK), second, third],
            &[first, done(&read, epoch, Status::OK), third],
        ] {
            assert!(answer(&mut q, epoch, bad).is_err(), "{bad:?}");
        }
        let good = [first, second, third];
        assert!(answer_with(&mut q, epoch, &good, |a| a.epoch = Epoch(1)).is_err());
        assert!(answer_with(&mut q, epoch, &good, |a| a.depth = 3).is_err());
        assert!(answer_with(&mut q, epoch, &good, |a| a.in_capsule = 8192).is_err());
        let lost = answer_with(&mut q, epoch, &good, |a| a.instance = Instance(8)).unwrap_err();
        assert_eq!(lost.status, Status::SESSION_LOST);
        assert!(!q.has_path() && q.outstanding() == 3);
        answer(&mut q, epoch, &good).unwrap();
        assert_eq!(q.outstanding(), 3);
    }
}
