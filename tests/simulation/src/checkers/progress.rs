//! I10: once nothing breaks any more, every command completes within the bound.

use super::Breach;
use super::ledger::{Ledger, NEVER, breach};
use crate::history::{History, What};

const NAME: &str = "I10 progress";

/// # Errors
/// A command didn't complete, or too late.
pub fn check(history: &History, ledger: &Ledger) -> Result<(), Breach> {
    let Some(healed) = history.events.iter().find(|event| event.what == What::Healed) else { return Ok(()) };
    let mut gone = Vec::with_capacity(8);
    for event in &history.events {
        if let What::Closed { client } = event.what {
            gone.push(client);
        }
    }
    for (command, record) in ledger.commands() {
        let invoked = history.events[record.invoked].at;
        if record.completed == NEVER {
            if !gone.contains(&record.client) {
                let what = format!("{command:?} ({:?}, invoked at {invoked} us) never completed", record.kind);
                return Err(breach(NAME, history, history.events.len(), what));
            }
            continue;
        }
        let late = history.events[record.completed].at.saturating_sub(invoked.max(healed.at));
        if late > history.setup.progress_bound {
            let what = format!("{command:?} ({:?}) took {late} us of a healthy world", record.kind);
            return Err(breach(NAME, history, record.completed, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Client, Outcome};

    #[test]
    fn a_command_may_wait_for_the_heal_and_then_has_its_bound() {
        let bound = history().setup.progress_bound;
        let after = |wait| {
            let mut h = history();
            write(&mut h, 1, 1, one(0), 11);
            h.record(5_000_000, What::Healed);
            completed(&mut h, 5_000_000 + wait, 1, Outcome::Ok);
            h
        };
        passes(check, &after(bound));
        caught(check, &after(bound + 1), "healthy world");
    }

    #[test]
    fn a_command_that_never_completes() {
        let mut h = history();
        write(&mut h, 1, 1, one(0), 11);
        passes(check, &h);
        h.record(2, What::Healed);
        caught(check, &h, "never completed");
        h.record(3, What::Closed { client: Client(1) });
        passes(check, &h);
    }
}
