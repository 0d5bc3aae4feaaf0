//! How a path ends: in order, given up, or lost.

use std::time::{Duration, Instant};

use twinrail_fallback_tcp::Outbound;
use twinrail_protocol::crc32c;
use twinrail_protocol::wire::{Control, ControlKind, Frame, Payload};

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
        // There is credit for it: requests of ours are few. If there were not, the caller's time limit ends it.
        if self.control_credit.ask() {
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
            self.end_path(&PathEnd::Aborted, &mut done);
        }
    }

    /// The connection has ended without a word. While the session closes, that is how its other paths end.
    pub(super) fn closed_by_target(&self) -> PathEnd {
        if self.session.is_closing() && !self.closing { PathEnd::Closed } else { PathEnd::ClosedByTarget }
    }

    /// The path has ended: nothing of it acts any more, so that every buffer goes back (I3).
    pub(super) fn end_path(&mut self, end: &PathEnd, done: &mut impl FnMut(Done)) {
        self.end = Some(end.clone());
        let flights = &self.flights;
        let socket = self.socket.take();
        if let (Some(socket), PathEnd::Violation(violation)) = (&socket, end) {
            // The target should know what it did. It has gone if the socket is full.
            let text = violation.detail.as_bytes();
            let payload = Payload { length: text.len() as u32, crc: crc32c(text) };
            let disconnect = Control::new(ControlKind::Disconnect, self.core.epoch(), 0);
            let frame = Frame::Control(Control { status: violation.status, payload, ..disconnect }).encode();
            let outbound = &mut self.outbound;
            let flush = |outbound: &mut Outbound<FlightId>| {
                outbound.flush(socket, TURN_BYTES, |&id| flights.payload(id), |_| {}).is_ok()
            };
            let _told = (outbound.push_control(frame, text).is_ok()
                || (flush(outbound) && outbound.push_control(frame, text).is_ok()))
                && flush(outbound);
        }
        self.outbound.drain(|_| {});
        match (socket, end) {
            // What the kernel still holds may go, it ends with our last words.
            (Some(_), PathEnd::Closed | PathEnd::Violation(_)) | (None, _) => {}
            // I2: what was not sent yet is never sent.
            (Some(socket), _) => drop(socket.abort()),
        }
        // Whoever hears of a lost command asks why. That the session is closed is for the queue to say that
        // asked for it: the target tells it last.
        if *end != PathEnd::Closed || self.closing {
            self.session.ends(end);
        }
        self.core.abandon(|_| {});
        self.arriving = None;
        self.flights.end_all(self.now_ns, &mut self.metrics, done);
        self.metrics.path_ended(end);
    }
}

impl Drop for Queue {
    /// Commands in flight have no one to be told to; the other queues of the session hear of the end.
    fn drop(&mut self) {
        self.abort(drop);
    }
}
