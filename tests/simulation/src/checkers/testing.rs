//! Hand-made histories for the checkers' own tests.

use super::{Breach, Ledger};
use crate::history::{
    AttachAnswer, Blocks, Client, Command, History, Kind, Micros, Mode, Outcome, Place, SecretNumber, Session, Setup,
    Stamp, Stamps, Table, Ticket, What,
};

pub(crate) type Check = fn(&History, &Ledger) -> Result<(), Breach>;

pub(crate) fn history() -> History {
    History::new(Setup::default())
}

pub(crate) fn passes(check: Check, history: &History) {
    assert_eq!(check(history, &Ledger::new(history)), Ok(()));
}

pub(crate) fn caught(check: Check, history: &History, words: &str) {
    let breach = check(history, &Ledger::new(history)).expect_err("nothing was found");
    assert!(breach.what.contains(words), "{breach}: {words:?} expected");
}

pub(crate) fn one(block: u16) -> Blocks {
    Blocks::new(block, 1)
}

pub(crate) fn place(table: u64, slot: u16, sequence: u64) -> Place {
    Place { table: Table(table), slot, sequence }
}

pub(crate) fn invoked(h: &mut History, at: Micros, client: u32, command: u32, kind: Kind, blocks: Blocks, stamp: u32) {
    let (client, command, stamp) = (Client(client), Command(command), Stamp(stamp));
    h.record(at, What::Invoked { client, command, kind, fua: false, blocks, stamp, expected: Stamp::ZERO });
}

pub(crate) fn write(h: &mut History, at: Micros, command: u32, blocks: Blocks, stamp: u32) {
    invoked(h, at, 1, command, Kind::Write, blocks, stamp);
}

pub(crate) fn read(h: &mut History, at: Micros, command: u32, blocks: Blocks) {
    invoked(h, at, 1, command, Kind::Read, blocks, 0);
}

pub(crate) fn completed(h: &mut History, at: Micros, command: u32, outcome: Outcome) {
    h.record(at, What::Completed { command: Command(command), outcome, stamps: Stamps::default() });
}

pub(crate) fn brought(h: &mut History, at: Micros, command: u32, stamps: &[u32]) {
    let mut all = Stamps::default();
    all.iter_mut().zip(stamps).for_each(|(to, from)| *to = Stamp(*from));
    h.record(at, What::Completed { command: Command(command), outcome: Outcome::Ok, stamps: all });
}

pub(crate) fn assign(h: &mut History, at: Micros, command: u32, place: Place) {
    h.record(at, What::Assigned { command: Command(command), place });
}

pub(crate) fn submitted(h: &mut History, at: Micros, ticket: u32, place: Place, kind: Kind, blocks: Blocks) {
    h.record(at, What::Submitted { ticket: Ticket(ticket), session: Session(1), place, kind, blocks });
}

pub(crate) fn applied(h: &mut History, at: Micros, ticket: u32, blocks: Blocks, stamp: u32) {
    h.record(at, What::Applied { ticket: Ticket(ticket), blocks, stamp: Stamp(stamp) });
}

pub(crate) fn ended(h: &mut History, at: Micros, ticket: u32) {
    h.record(at, What::Ended { ticket: Ticket(ticket), ok: true });
}

pub(crate) fn answer(session: u32, client: u32, mode: Mode) -> AttachAnswer {
    AttachAnswer {
        session: Session(session),
        client: Client(client),
        secret: SecretNumber(session),
        next_secret: None,
        mode,
        preempt: false,
        goes_on: false,
        generation: 1,
        volume: 1,
    }
}

pub(crate) fn attached(h: &mut History, at: Micros, session: u32, client: u32, mode: Mode) {
    h.record(at, What::Attached(answer(session, client, mode)));
}

pub(crate) fn accepted(h: &mut History, at: Micros, session: u32, table: u64, epoch: u64) {
    h.record(at, What::EpochAccepted { session: Session(session), table: Table(table), epoch });
}
