//! COMPARE AND WRITE is atomic against every other command on its range, on whatever reactor.
//!
//! ```text
//!   owner            home of the volume           every reactor
//!     │── Ask ───────────▶│ stands in line               │
//!     │                   │── Hold ─────────────────────▶│ new overlapping commands wait
//!     │                   │◀───────────────────── Held ──│ the last overlapping one has ended
//!     │◀──────── Granted ─│ when all hold                │
//!     │ read, compare, write                             │
//!     │── Ended ─────────▶│── Release ──────────────────▶│ those that waited go on
//! ```
//!
//! One exclusive command at a time on a volume: what is held waits only for commands that are at storage,
//! and those end without waiting for anybody, so nothing can wait in a circle. A volume that never sees
//! such a command pays one look at an empty list for each command.

use std::collections::VecDeque;

use twinrail_protocol::Range;

use super::mailbox::Ticket;
use crate::volume::VolumeIndex;

/// The ranges that this reactor holds for somebody, and the lines of the volumes whose home it is.
#[derive(Debug, Default)]
pub(super) struct Holds {
    held: Vec<Hold>,
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Hold {
    ticket: Ticket,
    /// The home was told that nothing overlapping is at storage here.
    answered: bool,
}

#[derive(Debug)]
struct Line {
    volume: VolumeIndex,
    waiting: VecDeque<Ticket>,
    /// Whose turn it is, and how many reactors don't hold yet.
    current: Option<(Ticket, usize)>,
}

impl Holds {
    /// Whether a command on this range has to wait.
    #[inline]
    pub(super) fn block(&self, volume: VolumeIndex, range: Option<Range>) -> bool {
        if self.held.is_empty() {
            return false;
        }
        range.is_some_and(|r| self.held.iter().any(|h| h.ticket.volume == volume && h.ticket.range.overlaps(&r)))
    }

    /// Whether anything is held.
    #[inline]
    pub(super) fn any(&self) -> bool {
        !self.held.is_empty()
    }

    /// Holds for `ticket`.
    pub(super) fn hold(&mut self, ticket: Ticket) {
        self.held.push(Hold { ticket, answered: false });
    }

    /// Lets go of what was held for `ticket`.
    pub(super) fn release(&mut self, ticket: Ticket) {
        self.held.retain(|h| h.ticket != ticket);
    }

    /// The tickets whose home can now be told that nothing overlapping is at storage; `busy` looks.
    pub(super) fn ready(&mut self, busy: impl Fn(&Ticket) -> bool) -> Vec<Ticket> {
        let ready = |h: &mut Hold| {
            let now = !h.answered && !busy(&h.ticket);
            h.answered |= now;
            now.then_some(h.ticket)
        };
        self.held.iter_mut().filter_map(ready).collect()
    }

    fn line(&mut self, volume: VolumeIndex) -> &mut Line {
        let at = self.lines.iter().position(|l| l.volume == volume).unwrap_or_else(|| {
            self.lines.push(Line { volume, waiting: VecDeque::new(), current: None });
            self.lines.len() - 1
        });
        &mut self.lines[at]
    }

    /// At home: `ticket` stands in line. Answers the ticket whose turn begins, if one's does.
    pub(super) fn ask(&mut self, ticket: Ticket, reactors: usize) -> Option<Ticket> {
        let line = self.line(ticket.volume);
        line.waiting.push_back(ticket);
        if line.current.is_some() { None } else { line.advance(reactors) }
    }

    /// At home: one more reactor holds. Answers whether all do.
    pub(super) fn held(&mut self, ticket: Ticket) -> bool {
        match &mut self.line(ticket.volume).current {
            Some((current, missing)) if *current == ticket => {
                *missing = missing.saturating_sub(1);
                *missing == 0
            }
            _ => false,
        }
    }

    /// At home: the turn of `ticket` is over. Answers whose begins.
    pub(super) fn ended(&mut self, ticket: Ticket, reactors: usize) -> Option<Ticket> {
        let line = self.line(ticket.volume);
        // A command that failed before its turn came leaves the line.
        line.waiting.retain(|t| *t != ticket);
        if line.current.is_some_and(|(current, _)| current != ticket) { None } else { line.advance(reactors) }
    }
}

impl Line {
    fn advance(&mut self, reactors: usize) -> Option<Ticket> {
        self.current = self.waiting.pop_front().map(|ticket| (ticket, reactors));
        self.current.map(|(ticket, _)| ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use twinrail_protocol::Geometry;

    fn ticket(command: u64, offset: u64) -> Ticket {
        let geometry = Geometry { size: 1 << 20, logical_block: 512, physical_block: 512, max_transfer: 65536 };
        let range = geometry.range(offset, 4096, 4096).unwrap();
        Ticket { volume: VolumeIndex(0), range, reactor: 1, command }
    }

    #[test]
    fn one_at_a_time_in_the_order_of_asking() {
        let (a, b) = (ticket(1, 0), ticket(2, 0));
        let mut home = Holds::default();
        assert_eq!(home.ask(a, 2), Some(a));
        assert_eq!(home.ask(b, 2), None);
        assert!(!home.held(a));
        assert!(home.held(a), "both reactors hold");
        assert_eq!(home.ended(a, 2), Some(b));
        assert_eq!(home.ended(b, 2), None);
    }

    #[test]
    fn only_overlapping_commands_wait_and_only_until_the_release() {
        let mut holds = Holds::default();
        let t = ticket(1, 4096);
        holds.hold(t);
        assert!(holds.block(VolumeIndex(0), Some(t.range)));
        assert!(!holds.block(VolumeIndex(1), Some(t.range)));
        assert!(!holds.block(VolumeIndex(0), Some(ticket(2, 0).range)));
        assert!(!holds.block(VolumeIndex(0), None), "a flush touches no range");
        assert_eq!(holds.ready(|_| true), []);
        assert_eq!(holds.ready(|_| false), [t]);
        assert_eq!(holds.ready(|_| false), [], "told once");
        holds.release(t);
        assert!(!holds.any());
    }
}
