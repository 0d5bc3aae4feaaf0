//! How long to look for the next reply before sleeping for it.

/// Decides by what the last waits brought: a look that found something is worth a longer one next time, and
/// so is a sleep that was over before the longest look would have been; any other sleep halves it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    most_ns: u64,
    budget_ns: u64,
}

/// Where a budget of nothing starts to grow again: a few looks at the socket.
const LEAST_NS: u64 = 2_000;

impl Spin {
    pub(crate) fn new(most_ns: u64) -> Self {
        Self { most_ns, budget_ns: most_ns.min(LEAST_NS) }
    }

    /// Nanoseconds to look for.
    pub(crate) fn budget_ns(&self) -> u64 {
        self.budget_ns
    }

    /// Looking found something.
    pub(crate) fn found(&mut self) {
        self.budget_ns = (self.budget_ns.max(LEAST_NS) * 2).min(self.most_ns);
    }

    /// It did not, and the sleep after it lasted for `sleep_ns`.
    pub(crate) fn slept(&mut self, sleep_ns: u64) {
        if sleep_ns <= self.most_ns {
            self.found();
        } else {
            self.budget_ns = if self.budget_ns < LEAST_NS { 0 } else { self.budget_ns / 2 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_follows_what_paid() {
        let mut spin = Spin::new(50_000);
        (0..10).for_each(|_| spin.found());
        assert_eq!(spin.budget_ns(), 50_000);
        spin.slept(1_000_000);
        assert_eq!(spin.budget_ns(), 25_000);
        (0..10).for_each(|_| spin.slept(1_000_000));
        assert_eq!(spin.budget_ns(), 0, "an idle queue takes no processor");
        spin.slept(20_000);
        assert_eq!(spin.budget_ns(), 4_000, "a short sleep would have been a good look");
    }

    #[test]
    fn none_is_none() {
        let mut spin = Spin::new(0);
        spin.found();
        spin.slept(0);
        assert_eq!(spin.budget_ns(), 0);
    }
}
