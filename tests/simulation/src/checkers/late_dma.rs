//! I3: a buffer returns to its owner only when no device can still touch it.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{History, What};

const NAME: &str = "I3 no late DMA";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unknown,
    Lent,
    Returned,
}

/// # Errors
/// A device touched a buffer outside of its lending.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    let mut lendings: Vec<State> = Vec::with_capacity(256);
    for (position, event) in history.events.iter().enumerate() {
        let (buffer, lending, state) = match event.what {
            What::Lent { buffer, lending, .. } => (buffer, lending, State::Lent),
            What::Returned { buffer, lending } => (buffer, lending, State::Returned),
            What::Touched { buffer, lending } => (buffer, lending, State::Unknown),
            _ => continue,
        };
        let index = lending.0 as usize;
        if lendings.len() <= index {
            lendings.resize(index + 1, State::Unknown);
        }
        if state != State::Unknown {
            lendings[index] = state;
        } else if lendings[index] != State::Lent {
            let what = format!("a device touched buffer {buffer} of {lending:?}, which is {:?}", lendings[index]);
            return Err(breach(NAME, history, position, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Lending, Side};

    #[test]
    fn a_touch_belongs_between_lending_and_return() {
        let mut h = history();
        let (buffer, lending) = (3, Lending(5));
        h.record(1, What::Lent { buffer, lending, side: Side::Target });
        h.record(2, What::Touched { buffer, lending });
        h.record(3, What::Returned { buffer, lending });
        passes(check, &h);
        h.record(4, What::Lent { buffer, lending: Lending(6), side: Side::Target });
        passes(check, &h);
        h.record(5, What::Touched { buffer, lending });
        caught(check, &h, "Returned");
    }

    #[test]
    fn a_touch_of_a_buffer_never_lent() {
        let mut h = history();
        h.record(1, What::Touched { buffer: 3, lending: Lending(0) });
        caught(check, &h, "Unknown");
    }
}
