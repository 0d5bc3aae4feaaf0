//! The threads below the asynchronous volume: each owns one queue, takes commands from a ring and tells their
//! end to cells.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use twinrail_protocol::Status;

use crate::cells::{CellId, Cells, Flying, Outcome};
use crate::doorbell::Doorbell;
use crate::queue::Queue;
use crate::request::{Done, NotTaken, Reason, Request};
use crate::session::Session;

/// What callers and the queues' threads share.
#[derive(Debug)]
pub(crate) struct Lanes {
    session: Session,
    lanes: Box<[Lane]>,
    cells: Cells,
    /// Time since the attach in nanoseconds at which closing is given up; 0 while nobody closes.
    close_by_ns: AtomicU64,
    running: Mutex<Running>,
}

#[derive(Debug)]
struct Running {
    threads: usize,
    /// Those who wait for the last thread to end.
    wakers: Vec<Waker>,
}

/// The way to one queue.
#[derive(Debug)]
struct Lane {
    /// Has room for every cell: a push never fails.
    ring: ArrayQueue<Submission>,
    doorbell: Doorbell,
    /// Commands on their way to the queue, or in it.
    load: AtomicU32,
    /// The thread doesn't take commands from the ring any more.
    gone: AtomicBool,
}

#[derive(Debug)]
struct Submission {
    request: Request,
    begun_ns: u64,
}

/// The volume is being closed: nothing new is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closing;

impl Lanes {
    pub(crate) fn new(session: Session, queues: &[Queue]) -> Self {
        let cells = Cells::new(queues.iter().map(|queue| usize::from(queue.depth())).sum());
        let lane = |queue: &Queue| Lane {
            ring: ArrayQueue::new(cells.count()),
            doorbell: queue.doorbell().clone(),
            load: AtomicU32::new(0),
            gone: AtomicBool::new(false),
        };
        Self {
            session,
            lanes: queues.iter().map(lane).collect(),
            close_by_ns: AtomicU64::new(0),
            running: Mutex::new(Running { threads: queues.len(), wakers: Vec::new() }),
            cells,
        }
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.cells
    }

    pub(crate) fn count(&self) -> usize {
        self.lanes.len()
    }

    /// Whether nothing new is taken any more.
    pub(crate) fn is_closing(&self) -> bool {
        self.close_by_ns.load(Ordering::SeqCst) != 0
    }

    /// Sends a command on its way, to the queue with the least to do: one command at a time always finds the
    /// first, whose thread is awake and warm.
    pub(crate) fn launch(&self, cell: CellId, mut request: Request) -> Result<Flying<'_>, Closing> {
        request.token = cell.token();
        let mut lane = &self.lanes[0];
        for other in &self.lanes[1..] {
            if other.load.load(Ordering::Relaxed) < lane.load.load(Ordering::Relaxed) {
                lane = other;
            }
        }
        // Counted first: who closes then either sees it, or is seen here.
        lane.load.fetch_add(1, Ordering::SeqCst);
        if self.is_closing() {
            drop(request);
            self.cells.release(cell);
            self.unload(lane);
            return Err(Closing);
        }
        let flying = self.cells.fly(cell);
        let begun_ns = self.session.now_ns();
        if let Err(refused) = lane.ring.push(Submission { request, begun_ns }) {
            // A ring has room for every cell.
            self.unsent(lane, refused);
            return Ok(flying);
        }
        lane.doorbell.ring();
        fence(Ordering::SeqCst);
        if lane.gone.load(Ordering::SeqCst) {
            self.drain(lane);
        }
        Ok(flying)
    }

    /// The path has ended: whatever is in the ring was never sent.
    fn drain(&self, lane: &Lane) {
        while let Some(submission) = lane.ring.pop() {
            self.unsent(lane, submission);
        }
    }

    fn unsent(&self, lane: &Lane, submission: Submission) {
        let cell = CellId::from_token(submission.request.token);
        drop(submission);
        self.cells.end(cell, Outcome { status: Status::CONNECTION_LOST, result: 0, received: 0, unsent: true });
        self.unload(lane);
    }

    fn ended(&self, lane: &Lane, done: Done) {
        let Done { token, status, result, received, unsent, buffer, .. } = done;
        // Its caller puts the pieces together as soon as it hears of the end.
        drop(buffer);
        self.cells.end(CellId::from_token(token), Outcome { status, result, received, unsent });
        self.unload(lane);
    }

    fn unload(&self, lane: &Lane) {
        let before = lane.load.fetch_sub(1, Ordering::SeqCst);
        if before == 1 && self.is_closing() {
            // The first lane waits for all of them to be idle.
            self.lanes[0].doorbell.ring();
        }
    }

    /// Begins to end the session: nothing new is taken, what is in flight ends, then the target is told. After
    /// `timeout_ms` the rest is given up.
    pub(crate) fn close(&self, timeout_ms: u64) {
        let by_ns = self.session.now_ns().saturating_add(timeout_ms.saturating_mul(1_000_000)).max(1);
        let _earlier = self.close_by_ns.compare_exchange(0, by_ns, Ordering::SeqCst, Ordering::SeqCst);
        self.lanes.iter().for_each(|lane| lane.doorbell.ring());
    }

    /// Whether all threads have ended; if not, `waker` is woken when they have.
    pub(crate) fn poll_stopped(&self, waker: &Waker) -> bool {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.threads > 0 && !running.wakers.iter().any(|other| other.will_wake(waker)) {
            running.wakers.push(waker.clone());
        }
        running.threads == 0
    }

    /// A thread has ended, or was never started.
    pub(crate) fn thread_ends(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.threads -= 1;
        if running.threads == 0 {
            running.wakers.drain(..).for_each(Waker::wake);
        }
    }

    /// The life of a queue's thread.
    pub(crate) fn run(&self, index: usize, mut queue: Queue) {
        let lane = &self.lanes[index];
        while self.turn(index, lane, &mut queue) {}
        lane.gone.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.drain(lane);
        drop(queue);
        self.thread_ends();
    }

    /// One turn: commands from the ring to the queue, then whatever the path has; waits if nothing has ended.
    /// `false` when the path has ended.
    fn turn(&self, index: usize, lane: &Lane, queue: &mut Queue) -> bool {
        while queue.has_room() {
            let Some(Submission { request, begun_ns }) = lane.ring.pop() else { break };
            let Err(NotTaken { request, reason }) = queue.submit_begun(request, begun_ns) else { continue };
            match reason {
                // It was right when its caller asked: the volume has become smaller since.
                Reason::Rejected(_) => {
                    let Request { token, opcode, buffer, .. } = request;
                    let status = Status::OUT_OF_RANGE;
                    self.ended(lane, Done { token, opcode, status, result: 0, received: 0, unsent: true, buffer });
                }
                Reason::Full | Reason::Ended(_) => self.unsent(lane, Submission { request, begun_ns }),
            }
        }
        match queue.poll(|done| self.ended(lane, done)) {
            Ok(0) => {}
            // There is room for more now.
            Ok(_) => return true,
            Err(_) => return false,
        }
        let mut timeout = None;
        let close_by_ns = self.close_by_ns.load(Ordering::SeqCst);
        if close_by_ns != 0 {
            if self.lanes.iter().all(|lane| lane.load.load(Ordering::SeqCst) == 0) && index == 0 {
                queue.close();
            }
            let left_ns = close_by_ns.saturating_sub(self.session.now_ns());
            if left_ns == 0 {
                queue.abort(|done| self.ended(lane, done));
                return false;
            }
            timeout = Some(Duration::from_nanos(left_ns));
        }
        queue.wait(timeout);
        true
    }
}
