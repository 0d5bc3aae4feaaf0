//! I7: a read never completes with damaged bytes, and damaged bytes never reach the volume.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{History, Outcome, Stamp, What};

const NAME: &str = "I7 integrity";

/// # Errors
/// Damaged bytes were taken for good.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    for (position, event) in history.events.iter().enumerate() {
        match event.what {
            What::Completed { command, outcome: Outcome::Ok, stamps } if stamps.contains(&Stamp::DAMAGED) => {
                return Err(breach(NAME, history, position, format!("{command:?} completed with damaged bytes")));
            }
            What::Applied { ticket, blocks, stamp: Stamp::DAMAGED } => {
                return Err(breach(NAME, history, position, format!("{ticket:?} wrote damaged bytes to {blocks:?}")));
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

    #[test]
    fn a_damaged_read_may_fail_but_not_complete() {
        let mut h = history();
        read(&mut h, 1, 1, one(0));
        completed(&mut h, 2, 1, Outcome::Failed);
        passes(check, &h);
        read(&mut h, 3, 2, one(0));
        brought(&mut h, 4, 2, &[Stamp::DAMAGED.0]);
        caught(check, &h, "Command(2)");
    }

    #[test]
    fn damaged_bytes_on_the_disk() {
        let mut h = history();
        applied(&mut h, 1, 1, one(0), 7);
        passes(check, &h);
        applied(&mut h, 2, 2, one(0), Stamp::DAMAGED.0);
        caught(check, &h, "Ticket(2)");
    }
}
