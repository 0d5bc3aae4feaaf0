//! How a path ends, and how a queue does: in order, given up, or because its session is lost.

use std::time::{Duration, Instant};

use twinrail_fallback_tcp::{Flushed, Outbound};
use twinrail_protocol::wire::{Control, ControlKind, Frame, Payload};
use twinrail_protocol::{Status, crc32c};

use super::flights::FlightId;
use super::{Queue, TURN_BYTES};
use crate::error::PathEnd;
use crate::request::Done;

impl Queue {
    /// Asks the target to end the session. Everything should have ended before: what has not may be cut off.
    /// [`Self::poll`] then fails with [`PathEnd::Closed`] when the target has confirmed it.
    pub fn close(&mut self) {
        if self.end.is_some() || std::mem::replace(&mut self.closing, true) {
            return;
        }
        self.session.closes();
        self.say_close();
    }

    /// Sends CLOSE, if there is a path; else, and should that be lost before the answer, on the next one.
    pub(super) fn say_close(&mut self) {
        // There is credit for it: requests of ours are few. If there were not, the caller's time limit ends it.
        if self.path.is_open() && self.path.control_credit.ask() {
            let _room = self.answer(Control::new(ControlKind::Close, self.core.epoch(), 1));
        }
    }

    /// Ends the session in order: waits for what is in flight, then for the target's word that nothing of the
    /// session acts any more. The queues of the same session end with it, so that they should be idle.
    ///
    /// # Errors
    /// [`PathEnd::Aborted`] when that takes longer than `timeout`, else how the path was lost.
    pub fn close_within(&mut self, timeout: Duration, mut done: impl FnMut(Done)) -> Result<(), PathEnd> {
        let begun = Instant::now();
        loop {
            match self.poll(&mut done) {
                Err(PathEnd::Closed) => return Ok(()),
                Err(end) => return Err(end),
                Ok(0) => {}
                Ok(_) => continue,
            }
            if self.in_flight() == 0 {
                self.close();
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                self.abort(&mut done);
                return Err(PathEnd::Aborted);
            }
            self.wait(Some(left));
        }
    }

    /// Gives the path up at once: commands in flight are told to `done` as lost.
    pub fn abort(&mut self, mut done: impl FnMut(Done)) {
        if self.end.is_none() {
            self.stamp();
            self.end_queue(&PathEnd::Aborted, &mut done);
        }
    }

    /// The connection has ended without a word. While the session closes, that is how its other paths end.
    pub(super) fn closed_by_target(&self) -> PathEnd {
        if self.session.is_closing() && !self.closing { PathEnd::Closed } else { PathEnd::ClosedByTarget }
    }

    /// Takes the path out of service: nothing of it acts any more.
    pub(super) fn close_path(&mut self, end: &PathEnd) {
        let told = self.say_last_word(end);
        let path = &mut self.path;
        if path.is_open() {
            self.metrics.path_ended(end);
        }
        // What the kernel still holds may go where it ends with our last word.
        path.close(told || *end == PathEnd::Closed);
    }

    /// Tells the target why the path ends, where that is ours to say. Answers whether that is with the kernel.
    fn say_last_word(&mut self, end: &PathEnd) -> bool {
        let (flights, outbound) = (&self.flights, &mut self.path.outbound);
        let Some(socket) = &self.path.socket else { return false };
        let (kind, status, text) = match end {
            // The target should know what it did.
            PathEnd::Violation(violation) => (ControlKind::Disconnect, violation.status, violation.detail),
            // Nobody will come back to the session: its volume is free at once, not only after the lease.
            PathEnd::Aborted if outbound.is_empty() => (ControlKind::Close, Status::OK, ""),
            _ => return false,
        };
        let payload = match text {
            "" => Payload::default(),
            text => Payload { length: text.len() as u32, crc: crc32c(text.as_bytes()) },
        };
        let token = u64::from(kind == ControlKind::Close);
        let frame =
            Frame::Control(Control { status, payload, ..Control::new(kind, self.core.epoch(), token) }).encode();
        // It has gone if the socket is full.
        let flush = |outbound: &mut Outbound<FlightId>| {
            outbound.flush(socket, TURN_BYTES, |&id| flights.payload(id), |_| {}).is_ok_and(|f| f == Flushed::Empty)
        };
        (outbound.push_control(frame, text.as_bytes()).is_ok()
            || (flush(outbound) && outbound.push_control(frame, text.as_bytes()).is_ok()))
            && flush(outbound)
    }

    /// The session has ended, and every command with it: their buffers go back, since no path is left (I3).
    pub(super) fn end_queue(&mut self, end: &PathEnd, done: &mut impl FnMut(Done)) {
        self.end = Some(end.clone());
        self.close_path(end);
        for candidate in [self.standby.take(), self.attempt.take()].into_iter().flatten() {
            candidate.line.abort();
        }
        // Whoever hears of a lost command asks why. That the session is closed is for the queue to say that
        // asked for it: the target tells it last.
        if *end != PathEnd::Closed || self.closing {
            self.session.ends(end);
        }
        self.core.abandon(Status::CONNECTION_LOST, |_| {});
        self.flights.end_all(self.now_ns, &mut self.metrics, done);
        self.metrics.queue_ended();
    }
}

impl Drop for Queue {
    /// Commands in flight have no one to be told to; the other queues of the session hear of the end.
    fn drop(&mut self) {
        self.abort(drop);
    }
}
