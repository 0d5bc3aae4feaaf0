//! The history read once, so that every checker finds a command, a place or a session by its number.
//!
//! Positions are indices into the history's events: they order facts that have the same time.

use super::Breach;
use crate::history::{
    Blocks, Client, Command, History, Kind, Mode, Outcome, Place, Session, Stamp, Stamps, Table, Ticket, What,
};

/// A position behind every event.
pub(crate) const NEVER: usize = usize::MAX;

/// A caller's command.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Its client.
    pub client: Client,
    /// What it does.
    pub kind: Kind,
    /// It is answered only when stable.
    pub fua: bool,
    /// Where.
    pub blocks: Blocks,
    /// What it writes.
    pub stamp: Stamp,
    /// What COMPARE AND WRITE compares with.
    pub expected: Stamp,
    /// Position of its submission; `NEVER` if there is none by this number.
    pub invoked: usize,
    /// Position of its completion, or none (`NEVER`).
    pub completed: usize,
    /// How it ended; unknown if it didn't.
    pub outcome: Outcome,
    /// What it read.
    pub stamps: Stamps,
    /// Table of its first place.
    pub first_table: Option<Table>,
    /// Table of its latest place.
    pub last_table: Option<Table>,
    /// Position of the latest table's first assignment of it.
    pub last_assigned: usize,
    /// Its places are in more than one table: its session was lost and it was replayed.
    pub replayed: bool,
}

impl Record {
    /// Whether it ended with this outcome.
    #[must_use]
    pub fn is(&self, outcome: Outcome) -> bool {
        self.completed != NEVER && self.outcome == outcome
    }
}

/// A session of the target.
#[derive(Clone, Copy, Debug)]
pub struct SessionRecord {
    /// Its client.
    pub client: Client,
    /// Position where its end was answered, or none (`NEVER`).
    pub ended: usize,
}

/// The history, indexed.
#[derive(Debug)]
pub struct Ledger {
    commands: Vec<Record>,
    places: Vec<(Place, Command)>,
    tickets: Vec<Option<Place>>,
    sessions: Vec<SessionRecord>,
    tables: Vec<(Table, Session)>,
    modes: Vec<Option<Mode>>,
}

fn grow<T: Clone>(list: &mut Vec<T>, index: u32, fill: T) -> &mut T {
    let index = index as usize;
    if list.len() <= index {
        list.resize(index + 1, fill);
    }
    &mut list[index]
}

impl Ledger {
    /// Reads the history.
    #[must_use]
    pub fn new(history: &History) -> Self {
        let nobody = Record {
            client: Client(0),
            kind: Kind::Other,
            fua: false,
            blocks: Blocks::default(),
            stamp: Stamp::ZERO,
            expected: Stamp::ZERO,
            invoked: NEVER,
            completed: NEVER,
            outcome: Outcome::Unknown,
            stamps: Stamps::default(),
            first_table: None,
            last_table: None,
            last_assigned: NEVER,
            replayed: false,
        };
        let no_session = SessionRecord { client: Client(0), ended: NEVER };
        let mut it = Self {
            commands: Vec::with_capacity(128),
            places: Vec::with_capacity(128),
            tickets: Vec::with_capacity(128),
            sessions: Vec::with_capacity(8),
            tables: Vec::with_capacity(16),
            modes: Vec::with_capacity(8),
        };
        let mut crashed = 0;
        for (position, event) in history.events.iter().enumerate() {
            match event.what {
                What::Invoked { client, command, kind, fua, blocks, stamp, expected } => {
                    let record = grow(&mut it.commands, command.0, nobody);
                    *record = Record { client, kind, fua, blocks, stamp, expected, invoked: position, ..nobody };
                }
                What::Completed { command, outcome, stamps } => {
                    let record = grow(&mut it.commands, command.0, nobody);
                    *record = Record { completed: position, outcome, stamps, ..*record };
                }
                What::Assigned { command, place } => {
                    it.places.push((place, command));
                    let record = grow(&mut it.commands, command.0, nobody);
                    if record.last_table != Some(place.table) {
                        record.replayed = record.first_table.is_some();
                        record.first_table = record.first_table.or(Some(place.table));
                        record.last_table = Some(place.table);
                        record.last_assigned = position;
                    }
                }
                What::Submitted { ticket, place, .. } => *grow(&mut it.tickets, ticket.0, None) = Some(place),
                What::Attached(answer) => {
                    grow(&mut it.sessions, answer.session.0, no_session).client = answer.client;
                    *grow(&mut it.modes, answer.client.0, None) = Some(answer.mode);
                }
                What::SessionEnded { session } => grow(&mut it.sessions, session.0, no_session).ended = position,
                What::Crashed => crashed = it.sessions.len(),
                // A successor serves when the kernel has finished what its dead predecessor gave to it.
                What::Started => {
                    let dead = it.sessions.iter_mut().take(crashed).filter(|session| session.ended == NEVER);
                    dead.for_each(|session| session.ended = position);
                    crashed = 0;
                }
                What::EpochAccepted { session, table, .. } if it.session_of(table).is_none() => {
                    it.tables.push((table, session));
                }
                _ => {}
            }
        }
        // *Refused* speaks of the last table only: in the one before it may have acted.
        for record in it.commands.iter_mut().filter(|r| r.replayed && r.outcome == Outcome::Refused) {
            record.outcome = Outcome::Failed;
        }
        it.places.sort_unstable_by_key(|(place, _)| (place.table, place.slot, place.sequence));
        it
    }

    /// Every command that was submitted, with its number.
    pub fn commands(&self) -> impl Iterator<Item = (Command, &Record)> {
        (0u32..).map(Command).zip(&self.commands).filter(|(_, record)| record.invoked != NEVER)
    }

    /// The command, if a caller submitted it.
    #[must_use]
    pub fn command(&self, command: Command) -> Option<&Record> {
        self.commands.get(command.0 as usize).filter(|record| record.invoked != NEVER)
    }

    /// The command to which the initiator gave the place.
    #[must_use]
    pub fn at(&self, place: Place) -> Option<Command> {
        let key = (place.table, place.slot, place.sequence);
        let found = self.places.binary_search_by_key(&key, |(place, _)| (place.table, place.slot, place.sequence));
        found.ok().map(|index| self.places[index].1)
    }

    /// The place of the command that was given to storage under the ticket.
    #[must_use]
    pub fn place_of(&self, ticket: Ticket) -> Option<Place> {
        self.tickets.get(ticket.0 as usize).copied().flatten()
    }

    /// The session that owns the table.
    #[must_use]
    pub fn session_of(&self, table: Table) -> Option<Session> {
        self.tables.iter().find(|(known, _)| *known == table).map(|(_, session)| *session)
    }

    /// The session.
    #[must_use]
    pub fn session(&self, session: Session) -> Option<&SessionRecord> {
        self.sessions.get(session.0 as usize)
    }

    /// The mode in which the client attached.
    #[must_use]
    pub fn mode(&self, client: Client) -> Option<Mode> {
        self.modes.get(client.0 as usize).copied().flatten()
    }

    /// Until which position a command that ended without telling its outcome may still act: until the session
    /// of its latest place has ended at storage.
    #[must_use]
    pub fn may_act_until(&self, record: &Record) -> usize {
        let session = record.last_table.and_then(|table| self.session_of(table));
        session.and_then(|session| self.session(session)).map_or(NEVER, |session| session.ended)
    }
}

/// A breach found at a position of the history.
pub(crate) fn breach(checker: &'static str, history: &History, position: usize, what: String) -> Breach {
    let event = history.events.get(position).or(history.events.last());
    Breach { checker, at: event.map_or(0, |event| event.at), what }
}
