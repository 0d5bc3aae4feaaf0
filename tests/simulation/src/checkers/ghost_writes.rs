//! I2: once a queue accepted an epoch nothing older is submitted to storage, and nothing of a session acts
//! once its end was answered; on the initiator's side no reply of an older path is taken.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{Ending, History, Place, Session, Table, VerdictGiven, What};

const NAME: &str = "I2 no ghost writes";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unknown,
    Live,
    Ending,
    Ended,
    /// Its process ended; the kernel still works on what it was given.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Storage {
    state: State,
    outstanding: u32,
}

#[derive(Debug, Default)]
struct Sessions {
    list: Vec<Storage>,
    tickets: Vec<Option<Session>>,
}

impl Sessions {
    fn get(&mut self, session: Session) -> &mut Storage {
        let index = session.0 as usize;
        if self.list.len() <= index {
            self.list.resize(index + 1, Storage { state: State::Unknown, outstanding: 0 });
        }
        &mut self.list[index]
    }

    fn begin(&mut self, ticket: u32, session: Session) {
        let index = ticket as usize;
        if self.tickets.len() <= index {
            self.tickets.resize(index + 1, None);
        }
        self.tickets[index] = Some(session);
        self.get(session).outstanding += 1;
    }

    fn owner(&self, ticket: u32) -> Option<Session> {
        self.tickets.get(ticket as usize).copied().flatten()
    }

    fn end(&mut self, ticket: u32) {
        if let Some(session) = self.owner(ticket) {
            self.tickets[ticket as usize] = None;
            self.get(session).outstanding -= 1;
        }
    }

    fn all_end(&mut self) {
        self.tickets.clear();
        self.list.iter_mut().for_each(|session| session.outstanding = 0);
    }
}

/// Under which epoch a place's command counts: that of its latest arrival or *running* verdict.
#[derive(Debug, Default)]
struct Epochs {
    accepted: Vec<(Table, u64)>,
    commands: Vec<(Place, u64)>,
}

impl Epochs {
    fn accept(&mut self, table: Table, epoch: u64) {
        match self.accepted.iter_mut().find(|(known, _)| *known == table) {
            Some((_, latest)) => *latest = (*latest).max(epoch),
            None => self.accepted.push((table, epoch)),
        }
    }

    fn accepted(&self, table: Table) -> u64 {
        self.accepted.iter().find(|(known, _)| *known == table).map_or(0, |(_, epoch)| *epoch)
    }

    /// A slot holds one command at a time, so that the latest of each slot is enough.
    fn stamp(&mut self, place: Place, epoch: u64) {
        match self.commands.iter_mut().find(|(known, _)| (known.table, known.slot) == (place.table, place.slot)) {
            Some((known, _)) if known.sequence > place.sequence => {}
            Some((known, latest)) if known.sequence == place.sequence => *latest = (*latest).max(epoch),
            Some(entry) => *entry = (place, epoch),
            None => self.commands.push((place, epoch)),
        }
    }

    fn of(&self, place: Place) -> Option<u64> {
        self.commands.iter().find(|(known, _)| *known == place).map(|(_, epoch)| *epoch)
    }
}

/// # Errors
/// Something of an older path or of an ended session acted.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    let (mut sessions, mut epochs) = (Sessions::default(), Epochs::default());
    for (position, event) in history.events.iter().enumerate() {
        let found = |what: String| Err(breach(NAME, history, position, what));
        match event.what {
            What::EpochAccepted { session, table, epoch } => {
                let state = sessions.get(session).state;
                if matches!(state, State::Ending | State::Ended | State::Gone) {
                    return found(format!("a path was activated for {session:?}, whose end is decided"));
                }
                if epoch <= epochs.accepted(table) {
                    return found(format!("epoch {epoch} of {table:?} was accepted a second time"));
                }
                epochs.accept(table, epoch);
            }
            What::CommandArrived { place, epoch, queue_epoch, taken: true } => {
                if epoch < queue_epoch {
                    return found(format!("{place:?} of epoch {epoch} was taken in epoch {queue_epoch}"));
                }
                epochs.stamp(place, epoch);
            }
            What::VerdictSaid { place, epoch, verdict: VerdictGiven::Running } => epochs.stamp(place, epoch),
            What::Submitted { ticket, session, place, .. } => {
                let accepted = epochs.accepted(place.table);
                if let Some(epoch) = epochs.of(place).filter(|epoch| *epoch < accepted) {
                    return found(format!("{place:?} of epoch {epoch} reached storage after epoch {accepted}"));
                }
                // The owner of sessions and the reactor are one thread here: a decision is heard at once.
                if matches!(sessions.get(session).state, State::Ending | State::Ended) {
                    return found(format!("{place:?} reached storage after the end of {session:?} was decided"));
                }
                sessions.begin(ticket.0, session);
            }
            What::Applied { ticket, .. } => {
                if let Some(session) = sessions.owner(ticket.0)
                    && sessions.get(session).state == State::Ended
                {
                    return found(format!("{ticket:?} changed the volume after the end of {session:?}"));
                }
            }
            What::Ended { ticket, .. } => sessions.end(ticket.0),
            What::Attached(answer) if sessions.get(answer.session).state == State::Unknown => {
                let unfinished = |s: &Storage| s.state == State::Ending || s.state == State::Gone && s.outstanding > 0;
                if let Some(old) = sessions.list.iter().position(unfinished) {
                    return found(format!("an attach was answered before session {old} had ended at storage"));
                }
                sessions.get(answer.session).state = State::Live;
            }
            What::SessionEnding { session, how } => {
                let session = sessions.get(session);
                session.state = if how == Ending::TargetGone { State::Gone } else { State::Ending };
            }
            What::SessionEnded { session } => {
                let storage = sessions.get(session);
                if storage.outstanding > 0 {
                    let n = storage.outstanding;
                    return found(format!("the end of {session:?} was answered with {n} commands at storage"));
                }
                storage.state = State::Ended;
            }
            What::Crashed => {
                for session in sessions.list.iter_mut().filter(|s| matches!(s.state, State::Live | State::Ending)) {
                    session.state = State::Gone;
                }
            }
            What::Rebooted => sessions.all_end(),
            What::ReplyTaken { place, epoch, queue_epoch } if epoch < queue_epoch => {
                return found(format!("a reply of epoch {epoch} to {place:?} was taken in epoch {queue_epoch}"));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Kind, Mode};

    fn arrived(h: &mut History, at: u64, place: Place, epoch: u64) {
        h.record(at, What::CommandArrived { place, epoch, queue_epoch: epoch, taken: true });
    }

    fn session() -> History {
        let mut h = history();
        attached(&mut h, 0, 1, 1, Mode::Exclusive);
        accepted(&mut h, 1, 1, 7, 1);
        h
    }

    #[test]
    fn a_running_command_takes_over_the_new_epoch_and_a_resent_one_brings_it() {
        let mut h = session();
        arrived(&mut h, 2, place(7, 0, 1), 1);
        arrived(&mut h, 2, place(7, 1, 1), 1);
        accepted(&mut h, 3, 1, 7, 2);
        h.record(3, What::VerdictSaid { place: place(7, 0, 1), epoch: 2, verdict: VerdictGiven::Running });
        submitted(&mut h, 4, 1, place(7, 0, 1), Kind::Write, one(0));
        arrived(&mut h, 5, place(7, 1, 1), 2);
        submitted(&mut h, 6, 2, place(7, 1, 1), Kind::Write, one(0));
        passes(check, &h);
    }

    #[test]
    fn a_parked_command_of_the_old_epoch() {
        let mut h = session();
        arrived(&mut h, 2, place(7, 0, 1), 1);
        accepted(&mut h, 3, 1, 7, 2);
        submitted(&mut h, 4, 1, place(7, 0, 1), Kind::Write, one(0));
        caught(check, &h, "reached storage after epoch 2");
    }

    #[test]
    fn a_late_command_is_dropped_when_it_arrives() {
        let late = |taken| {
            let mut h = session();
            accepted(&mut h, 3, 1, 7, 2);
            h.record(4, What::CommandArrived { place: place(7, 0, 1), epoch: 1, queue_epoch: 2, taken });
            h
        };
        passes(check, &late(false));
        caught(check, &late(true), "taken in epoch 2");
    }

    #[test]
    fn an_epoch_is_accepted_once() {
        let mut h = session();
        accepted(&mut h, 3, 1, 7, 1);
        caught(check, &h, "second time");
    }

    #[test]
    fn an_end_waits_for_storage() {
        let ending = || {
            let mut h = session();
            arrived(&mut h, 2, place(7, 0, 1), 1);
            submitted(&mut h, 2, 1, place(7, 0, 1), Kind::Write, one(0));
            h.record(3, What::SessionEnding { session: Session(1), how: Ending::Preempted });
            h
        };
        let mut good = ending();
        ended(&mut good, 4, 1);
        good.record(5, What::SessionEnded { session: Session(1) });
        attached(&mut good, 6, 2, 2, Mode::Exclusive);
        passes(check, &good);

        let mut early = ending();
        early.record(4, What::SessionEnded { session: Session(1) });
        caught(check, &early, "1 commands at storage");

        let mut unanswered = ending();
        attached(&mut unanswered, 4, 2, 2, Mode::Exclusive);
        caught(check, &unanswered, "before session 1 had ended");

        let mut submitted_late = ending();
        submitted(&mut submitted_late, 4, 2, place(7, 1, 1), Kind::Write, one(0));
        caught(check, &submitted_late, "was decided");

        let mut activated = ending();
        accepted(&mut activated, 4, 1, 7, 2);
        caught(check, &activated, "whose end is decided");

        submitted(&mut good, 7, 2, place(7, 1, 1), Kind::Write, one(0));
        caught(check, &good, "was decided");
    }

    #[test]
    fn a_successor_of_a_dead_target_waits_for_the_kernel_and_not_after_a_reboot() {
        let crashed = || {
            let mut h = session();
            submitted(&mut h, 2, 1, place(7, 0, 1), Kind::Write, one(0));
            h.record(3, What::Crashed);
            h
        };
        let mut early = crashed();
        early.record(4, What::Started);
        attached(&mut early, 5, 2, 1, Mode::Exclusive);
        caught(check, &early, "before session 1 had ended");

        let mut good = crashed();
        ended(&mut good, 4, 1);
        attached(&mut good, 5, 2, 1, Mode::Exclusive);
        passes(check, &good);

        let mut rebooted = crashed();
        rebooted.record(4, What::Rebooted);
        attached(&mut rebooted, 5, 2, 1, Mode::Exclusive);
        passes(check, &rebooted);
    }

    #[test]
    fn a_late_reply_is_not_taken() {
        let mut h = session();
        h.record(2, What::ReplyTaken { place: place(7, 0, 1), epoch: 2, queue_epoch: 2 });
        passes(check, &h);
        h.record(3, What::ReplyTaken { place: place(7, 0, 1), epoch: 1, queue_epoch: 2 });
        caught(check, &h, "reply of epoch 1");
    }
}
