//! The load on one queue: a thread that owns it keeps its depth in flight.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use hdrhistogram::Histogram;
use twinrail_initiator::{Buffer, Done, Error, NotTaken, PathEnd, Queue, Reason, Request, Session};

use super::random::Accesses;
use crate::interrupt::Interrupt;

/// How long a thread sleeps at most before it looks for a change of phase.
const LONGEST_WAIT: Duration = Duration::from_millis(50);

/// Longest latency that is told from longer ones, in nanoseconds: a day, as long as a connection may be waited for.
const LONGEST_NS: u64 = 86_400_000_000_000;

/// What counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Caches, congestion windows and clocks settle.
    WarmUp = 0,
    Measure = 1,
    Stop = 2,
}

/// What the threads of all queues have in common.
pub(super) struct Control<'a> {
    phase: AtomicU8,
    /// All threads: each has a queue.
    queues: usize,
    /// Threads that still measure.
    busy: AtomicUsize,
    interrupt: &'a Interrupt,
}

impl<'a> Control<'a> {
    pub(super) fn new(queues: usize, interrupt: &'a Interrupt) -> Self {
        Self { phase: AtomicU8::new(Phase::WarmUp as u8), queues, busy: AtomicUsize::new(queues), interrupt }
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    #[inline]
    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::WarmUp,
            1 => Phase::Measure,
            _ => Phase::Stop,
        }
    }

    /// Whether a thread has ended, even if it was before anybody looked.
    pub(super) fn has_ended_in_part(&self) -> bool {
        self.busy.load(Ordering::SeqCst) < self.queues
    }

    /// Whether all threads have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.busy.load(Ordering::SeqCst) == 0
    }

    fn thread_ends(&self) {
        self.busy.fetch_sub(1, Ordering::SeqCst);
        self.interrupt.notify();
    }
}

/// What one queue brought.
pub(super) struct Measured {
    /// Latencies in nanoseconds.
    pub(super) latency_ns: Histogram<u64>,
    /// Requests that failed while it was measured, or were in flight at its end and failed then.
    pub(super) errors: u64,
    /// The first failure at any time.
    pub(super) first_error: Option<Error>,
    pub(super) queue: Queue,
}

/// Runs the load until the phase is [`Phase::Stop`], or `most` requests were measured. There is one request in
/// flight for each buffer.
pub(super) fn run(
    queue: Queue,
    session: &Session,
    accesses: Accesses,
    buffers: Vec<Buffer>,
    most: Option<u64>,
    control: &Control<'_>,
) -> anyhow::Result<Measured> {
    let latency_ns = Histogram::new_with_bounds(1, LONGEST_NS, 3).context("no histogram")?;
    let mut load = Load {
        session,
        begun: vec![Instant::now(); buffers.len()],
        idle: buffers.into_iter().enumerate().collect(),
        accesses,
        left: most.unwrap_or(u64::MAX),
        measured: Measured { latency_ns, errors: 0, first_error: None, queue },
    };
    let result = load.keep_up(control);
    control.thread_ends();
    result.map(|()| load.measured)
}

/// Why the session ended, which the queue knows that lost its path first; else what this one saw.
fn reason(session: &Session, seen: PathEnd) -> PathEnd {
    session.end().cloned().unwrap_or(seen)
}

struct Load<'a> {
    session: &'a Session,
    /// When the request in each place was begun.
    begun: Vec<Instant>,
    /// Places without a request, and their buffers.
    idle: Vec<(usize, Buffer)>,
    accesses: Accesses,
    /// Requests that are still to be measured.
    left: u64,
    measured: Measured,
}

impl Load<'_> {
    fn keep_up(&mut self, control: &Control<'_>) -> anyhow::Result<()> {
        let depth = self.begun.len();
        let mut ended: Vec<Done> = Vec::with_capacity(depth);
        // One look at the clock serves for all that ended together and for what is begun in their place: a
        // request that isn't the first of its place begins when the last one ended.
        let mut now = Instant::now();
        loop {
            let phase = if self.left == 0 { Phase::Stop } else { control.phase() };
            if phase != Phase::Stop {
                self.begin(now)?;
            } else if self.idle.len() == depth {
                return Ok(());
            }
            let polled = self.measured.queue.poll(|done| ended.push(done));
            if ended.is_empty() && polled.is_ok() {
                self.measured.queue.wait(Some(LONGEST_WAIT));
                continue;
            }
            now = Instant::now();
            for done in ended.drain(..) {
                self.end(done, phase != Phase::WarmUp, now);
            }
            if let Err(end) = polled {
                // What was in flight says it more precisely. What was measured before is told all the same.
                let end = || Error::Ended { end: reason(self.session, end) };
                self.measured.first_error.get_or_insert_with(end);
                return Ok(());
            }
        }
    }

    /// Begins a request in every idle place that the target has granted a slot for.
    fn begin(&mut self, now: Instant) -> anyhow::Result<()> {
        while let Some((place, buffer)) = self.idle.pop() {
            let (offset, reads) = self.accesses.next();
            let request = if reads { Request::read(offset, buffer) } else { Request::write(offset, buffer) };
            self.begun[place] = now;
            let Err(NotTaken { request, reason }) = self.measured.queue.submit(request.with_token(place as u64)) else {
                continue;
            };
            match reason {
                Reason::Rejected(rejection) => return Err(Error::Rejected(rejection).into()),
                // `poll` says how the path ended.
                Reason::Full | Reason::Ended(_) => {
                    self.idle.extend(request.buffer.map(|buffer| (place, buffer)));
                    break;
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn end(&mut self, mut done: Done, measure: bool, now: Instant) {
        let place = done.token as usize;
        if let Some(buffer) = done.buffer.take() {
            self.idle.push((place, buffer));
        }
        let measured = &mut self.measured;
        if !done.status.is_ok() {
            measured.errors += u64::from(measure);
            let error = done.outcome(|| reason(self.session, PathEnd::Sibling)).err();
            measured.first_error = measured.first_error.take().or(error);
        } else if measure && self.left > 0 {
            let ns = now.duration_since(self.begun[place]).as_nanos() as u64;
            measured.latency_ns.saturating_record(ns);
            self.left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_had_ended_before_anybody_looked_was_waited_for_all_the_time() {
        let interrupt = Interrupt::default();
        let control = Control::new(2, &interrupt);
        assert!(!control.has_ended_in_part());
        control.thread_ends();
        assert!(control.has_ended_in_part() && !control.has_ended());
        control.thread_ends();
        assert!(control.has_ended_in_part() && control.has_ended());
    }
}
