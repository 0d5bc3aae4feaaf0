//! Virtual time, and what happens when.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A moment, in microseconds since the run began.
pub type Time = u64;

/// One millisecond.
pub const MS: Time = 1_000;
/// One second.
pub const SECOND: Time = 1_000_000;

#[derive(Debug)]
struct Entry<E> {
    at: Time,
    order: u64,
    what: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives the greatest first, and the earliest is wanted.
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// A clock that jumps from event to event. Events of the same moment come in the order in which they were
/// planned.
#[derive(Debug)]
pub struct Clock<E> {
    now: Time,
    order: u64,
    heap: BinaryHeap<Entry<E>>,
}

impl<E> Default for Clock<E> {
    fn default() -> Self {
        Self { now: 0, order: 0, heap: BinaryHeap::with_capacity(256) }
    }
}

impl<E> Clock<E> {
    /// Back to the beginning; keeps its memory.
    pub fn reset(&mut self) {
        (self.now, self.order) = (0, 0);
        self.heap.clear();
    }

    /// The time.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// Plans an event; one in the past happens now.
    #[inline]
    pub fn at(&mut self, at: Time, what: E) {
        self.order += 1;
        self.heap.push(Entry { at: at.max(self.now), order: self.order, what });
    }

    /// Plans an event `delay` from now.
    #[inline]
    pub fn after(&mut self, delay: Time, what: E) {
        self.at(self.now.saturating_add(delay), what);
    }

    /// When the next event happens.
    #[must_use]
    pub fn next_at(&self) -> Option<Time> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Goes on to the next event.
    #[inline]
    pub fn next_event(&mut self) -> Option<E> {
        let Entry { at, what, .. } = self.heap.pop()?;
        self.now = at;
        Some(what)
    }

    /// Nothing happens until `now`, which isn't before the present.
    pub fn skip_to(&mut self, now: Time) {
        self.now = self.now.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_planning() {
        let mut clock = Clock::default();
        for (at, what) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            clock.at(at, what);
        }
        let mut seen = Vec::new();
        while let Some(what) = clock.next_event() {
            if what == 'a' {
                clock.at(0, 'A');
            }
            seen.push((clock.now(), what));
        }
        assert_eq!(seen, [(1, 'a'), (1, 'A'), (2, 'b'), (5, 'c'), (5, 'd')]);
    }
}
