//! Queues whose commands are held, and why: for whoever tells people.

use std::sync::{Mutex, PoisonError};

/// No connection, or none that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outage {
    /// Since when, in nanoseconds since the attach: of all queues that have none, the first.
    pub since_ns: u64,
    /// Why: the last attempt to get another connection, or how the last one was lost.
    pub reason: String,
}

/// What each queue of a session has to say of it. Written only when paths come and go.
#[derive(Debug)]
pub(crate) struct Outages {
    queues: Mutex<Vec<Option<Outage>>>,
}

impl Outages {
    pub(crate) fn new() -> Self {
        Self { queues: Mutex::new(Vec::new()) }
    }

    pub(crate) fn tell(&self, queue: usize, outage: Option<Outage>) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if queues.len() <= queue {
            queues.resize(queue + 1, None);
        }
        queues[queue] = outage;
    }

    /// The oldest of them.
    pub(crate) fn oldest(&self) -> Option<Outage> {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.iter().flatten().min_by_key(|outage| outage.since_ns).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_that_was_cut_off_first_is_told_of() {
        let outages = Outages::new();
        let outage = |since_ns| Some(Outage { since_ns, reason: since_ns.to_string() });
        assert_eq!(outages.oldest(), None);
        outages.tell(2, outage(20));
        outages.tell(0, outage(10));
        assert_eq!(outages.oldest(), outage(10));
        outages.tell(0, None);
        assert_eq!(outages.oldest(), outage(20));
        outages.tell(2, None);
        assert_eq!(outages.oldest(), None);
    }
}
