//! Both sides run the real core and mean well: nobody has reason to accuse the other of a broken rule, so
//! an accusation shows that the two disagree about one (I9).

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{History, What};

const NAME: &str = "I9 honest peers";

/// # Errors
/// A side accused the other.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    for (position, event) in history.events.iter().enumerate() {
        if let What::Accused { by, status } = event.what {
            let what = format!("{by:?} accuses the other side of {status:#06x}");
            return Err(breach(NAME, history, position, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::Side;

    #[test]
    fn an_accusation_is_a_breach() {
        let mut history = history();
        history.record(1, What::Accused { by: Side::Target, status: 0x0406 });
        caught(check, &history, "accuses");
    }
}
