//! I6: nobody sends what the receiver has not granted. A command's slot is below the grant to which the
//! initiator last said it keeps, or below one that the target said since.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{History, Table, What};

const NAME: &str = "I6 credits";

#[derive(Debug)]
struct Grants {
    table: Table,
    /// Those that may still be used: the one kept to and every later one.
    open: Vec<(u16, u16)>,
}

impl Grants {
    fn said(&mut self, number: u16, slots: u16) {
        match self.open.iter_mut().find(|(known, _)| *known == number) {
            Some(grant) => grant.1 = slots,
            None => self.open.push((number, slots)),
        }
    }

    /// Whether the number is one that was said; an older name than the last is no news.
    fn named(&mut self, number: u16) {
        if let Some(index) = self.open.iter().position(|(known, _)| *known == number) {
            self.open.drain(..index);
        }
    }

    fn slots(&self) -> u16 {
        self.open.iter().map(|(_, slots)| *slots).max().unwrap_or(0)
    }
}

/// # Errors
/// A command came in a slot that wasn't granted, or a message without a receive for it.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    let mut tables: Vec<Grants> = Vec::with_capacity(8);
    for (position, event) in history.events.iter().enumerate() {
        match event.what {
            What::GrantSaid { table, number, slots } => match tables.iter_mut().find(|known| known.table == table) {
                Some(grants) => grants.said(number, slots),
                None => tables.push(Grants { table, open: vec![(number, slots)] }),
            },
            What::GrantNamed { table, number } => {
                if let Some(grants) = tables.iter_mut().find(|known| known.table == table) {
                    grants.named(number);
                }
            }
            What::CommandArrived { place, epoch, queue_epoch, .. } if epoch == queue_epoch => {
                let granted = tables.iter().find(|known| known.table == place.table).map(Grants::slots);
                if let Some(granted) = granted.filter(|granted| place.slot >= *granted) {
                    let what = format!("a command came in slot {} of {granted} granted", place.slot);
                    return Err(breach(NAME, history, position, what));
                }
            }
            What::ReceiveMissing { side } => {
                let what = format!("a message reached the {side:?} without a receive posted for it");
                return Err(breach(NAME, history, position, what));
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
    use crate::history::Side;

    const TABLE: Table = Table(1);

    fn arrives(h: &mut History, at: u64, slot: u16) {
        h.record(at, What::CommandArrived { place: place(1, slot, 1), epoch: 1, queue_epoch: 1, taken: true });
    }

    #[test]
    fn a_shrink_binds_when_it_was_acknowledged() {
        let mut h = history();
        h.record(0, What::GrantSaid { table: TABLE, number: 0, slots: 4 });
        arrives(&mut h, 1, 3);
        h.record(2, What::GrantSaid { table: TABLE, number: 1, slots: 2 });
        arrives(&mut h, 3, 3);
        h.record(4, What::GrantNamed { table: TABLE, number: 0 });
        arrives(&mut h, 5, 3);
        passes(check, &h);
        h.record(6, What::GrantNamed { table: TABLE, number: 1 });
        arrives(&mut h, 7, 1);
        passes(check, &h);
        arrives(&mut h, 8, 2);
        caught(check, &h, "slot 2 of 2");
    }

    #[test]
    fn a_growth_binds_at_once() {
        let mut h = history();
        h.record(0, What::GrantSaid { table: TABLE, number: u16::MAX, slots: 1 });
        h.record(1, What::GrantSaid { table: TABLE, number: 0, slots: 2 });
        arrives(&mut h, 2, 1);
        passes(check, &h);
        arrives(&mut h, 3, 2);
        caught(check, &h, "slot 2 of 2");
    }

    #[test]
    fn a_message_needs_a_receive() {
        let mut h = history();
        h.record(1, What::ReceiveMissing { side: Side::Target });
        caught(check, &h, "without a receive");
    }

    #[test]
    fn a_late_command_of_an_older_path_uses_no_credit() {
        let mut h = history();
        h.record(0, What::GrantSaid { table: TABLE, number: 0, slots: 1 });
        h.record(1, What::CommandArrived { place: place(1, 3, 1), epoch: 1, queue_epoch: 2, taken: false });
        passes(check, &h);
    }
}
