//! I8: whatever is counted stays within its bound.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{History, What};

const NAME: &str = "I8 bounded";

/// # Errors
/// A gauge rose above its bound.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    for (position, event) in history.events.iter().enumerate() {
        if let What::Gauge { gauge, side, value, bound } = event.what
            && value > bound
        {
            let what = format!("{gauge:?} of the {side:?} stand at {value} of {bound}");
            return Err(breach(NAME, history, position, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Gauge, Side};

    #[test]
    fn a_gauge_may_reach_its_bound_and_not_pass_it() {
        let mut h = history();
        h.record(1, What::Gauge { gauge: Gauge::Buffers, side: Side::Target, value: 8, bound: 8 });
        passes(check, &h);
        h.record(2, What::Gauge { gauge: Gauge::Buffers, side: Side::Target, value: 9, bound: 8 });
        caught(check, &h, "9 of 8");
    }
}
