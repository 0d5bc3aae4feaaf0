//! Where commands of asynchronous callers end: a fixed number of cells, and a fair queue for those who find
//! none free (I8).
//!
//! A cell belongs to its caller, then to the queue's thread while the command flies, then to its caller again.
//! Whoever leaves last frees it: a caller that is dropped does not wait, and the thread finds the cell
//! abandoned.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use atomic_waker::AtomicWaker;
use crossbeam_queue::ArrayQueue;
use twinrail_protocol::Status;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) status: Status,
    pub(crate) result: u64,
    pub(crate) received: u32,
    /// It never left: the path had ended before. Goes with [`Status::CONNECTION_LOST`].
    pub(crate) unsent: bool,
}

const FLYING: u32 = 0;
const ENDED: u32 = 1;
const ABANDONED: u32 = 2;

#[derive(Debug, Default)]
struct Cell {
    state: AtomicU32,
    status: AtomicU16,
    unsent: AtomicU16,
    received: AtomicU32,
    result: AtomicU64,
    waker: AtomicWaker,
}

/// Number of a cell; also the token of its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellId(u32);

/// All cells of a volume.
#[derive(Debug)]
pub(crate) struct Cells {
    cells: Box<[Cell]>,
    free: ArrayQueue<CellId>,
    /// Length of `waiting`, to be looked at without the lock.
    waiting_count: AtomicUsize,
    /// Those who found no free cell, first come first.
    waiting: Mutex<VecDeque<Waiter>>,
    tickets: AtomicU64,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    waker: Waker,
}

impl CellId {
    pub(crate) fn token(self) -> u64 {
        self.0.into()
    }

    /// From a token that [`Self::token`] gave.
    pub(crate) fn from_token(token: u64) -> Self {
        Self(token as u32)
    }
}

impl Cells {
    pub(crate) fn new(count: usize) -> Self {
        let count = count.max(1);
        let free = ArrayQueue::new(count);
        for cell in 0..count {
            let _room = free.push(CellId(cell as u32));
        }
        Self {
            cells: (0..count).map(|_| Cell::default()).collect(),
            free,
            waiting_count: AtomicUsize::new(0),
            // Nothing is allocated until more than these wait.
            waiting: Mutex::new(VecDeque::with_capacity(count)),
            tickets: AtomicU64::new(0),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.cells.len()
    }

    /// A free cell, if there is one and nobody has waited for it longer.
    pub(crate) fn try_acquire(&self) -> Option<CellId> {
        match self.waiting_count.load(Ordering::SeqCst) {
            0 => self.free.pop(),
            _ => None,
        }
    }

    /// A free cell, in its turn.
    pub(crate) fn acquire(&self) -> Acquire<'_> {
        Acquire { cells: self, ticket: None }
    }

    /// Gives back a cell whose command never flew.
    pub(crate) fn release(&self, id: CellId) {
        let _room = self.free.push(id);
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.waiting_count.load(Ordering::SeqCst) > 0 {
            self.wake_first(&self.waiting());
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Waiter>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_first(&self, waiting: &VecDeque<Waiter>) {
        if let Some(first) = waiting.front()
            && !self.free.is_empty()
        {
            first.waker.wake_by_ref();
        }
    }

    /// The command of an acquired cell is on its way to a queue's thread.
    pub(crate) fn fly(&self, id: CellId) -> Flying<'_> {
        self.cells[id.0 as usize].state.store(FLYING, Ordering::Relaxed);
        Flying { cells: self, id: Some(id) }
    }

    /// The command of a cell has ended, and its buffer is given back already.
    pub(crate) fn end(&self, id: CellId, outcome: Outcome) {
        let cell = &self.cells[id.0 as usize];
        cell.status.store(outcome.status.0, Ordering::Relaxed);
        cell.unsent.store(outcome.unsent.into(), Ordering::Relaxed);
        cell.received.store(outcome.received, Ordering::Relaxed);
        cell.result.store(outcome.result, Ordering::Relaxed);
        match cell.state.swap(ENDED, Ordering::AcqRel) {
            ABANDONED => self.release(id),
            _ => cell.waker.wake(),
        }
    }
}

/// Waits for a free cell.
#[derive(Debug)]
pub(crate) struct Acquire<'a> {
    cells: &'a Cells,
    ticket: Option<u64>,
}

impl Future for Acquire<'_> {
    type Output = CellId;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CellId> {
        let cells = self.cells;
        if self.ticket.is_none()
            && let Some(cell) = cells.try_acquire()
        {
            return Poll::Ready(cell);
        }
        let mut waiting = cells.waiting();
        let ticket = match self.ticket {
            Some(ticket) => ticket,
            None => {
                let ticket = cells.tickets.fetch_add(1, Ordering::Relaxed);
                waiting.push_back(Waiter { ticket, waker: context.waker().clone() });
                // From here on nobody overtakes, and whoever frees a cell sees that one is waited for.
                cells.waiting_count.store(waiting.len(), Ordering::SeqCst);
                std::sync::atomic::fence(Ordering::SeqCst);
                self.ticket = Some(ticket);
                ticket
            }
        };
        if waiting.front().is_some_and(|first| first.ticket == ticket)
            && let Some(cell) = cells.free.pop()
        {
            waiting.pop_front();
            cells.waiting_count.store(waiting.len(), Ordering::SeqCst);
            cells.wake_first(&waiting);
            self.ticket = None;
            return Poll::Ready(cell);
        }
        if let Some(waiter) = waiting.iter_mut().find(|waiter| waiter.ticket == ticket) {
            waiter.waker.clone_from(context.waker());
        }
        Poll::Pending
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let mut waiting = self.cells.waiting();
            waiting.retain(|waiter| waiter.ticket != ticket);
            self.cells.waiting_count.store(waiting.len(), Ordering::SeqCst);
            // A wake-up that was meant for this one goes to the next.
            self.cells.wake_first(&waiting);
        }
    }
}

/// A command on its way. Dropped before the end, it leaves the cell to the queue's thread.
#[derive(Debug)]
pub(crate) struct Flying<'a> {
    cells: &'a Cells,
    /// None once the cell is given back.
    id: Option<CellId>,
}

impl Flying<'_> {
    /// Waits for the end.
    pub(crate) async fn ended(mut self) -> Outcome {
        poll_fn(|context| self.poll_ended(context)).await
    }

    fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<Outcome> {
        let Some(id) = self.id else { return Poll::Pending };
        let cell = &self.cells.cells[id.0 as usize];
        if cell.state.load(Ordering::Acquire) != ENDED {
            cell.waker.register(context.waker());
            if cell.state.load(Ordering::Acquire) != ENDED {
                return Poll::Pending;
            }
        }
        let outcome = Outcome {
            status: Status(cell.status.load(Ordering::Relaxed)),
            unsent: cell.unsent.load(Ordering::Relaxed) != 0,
            received: cell.received.load(Ordering::Relaxed),
            result: cell.result.load(Ordering::Relaxed),
        };
        self.id = None;
        self.cells.release(id);
        Poll::Ready(outcome)
    }
}

impl Drop for Flying<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let cell = &self.cells.cells[id.0 as usize];
        // The waker would keep the task's memory until the cell's next use.
        drop(cell.waker.take());
        if cell.state.swap(ABANDONED, Ordering::AcqRel) == ENDED {
            self.cells.release(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;

    #[derive(Default)]
    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    impl Flag {
        fn was_woken(&self) -> bool {
            self.0.swap(false, Ordering::SeqCst)
        }
    }

    const OUTCOME: Outcome = Outcome { status: Status::IO_ERROR, result: 7, received: 9, unsent: false };

    fn poll<F: Future>(future: Pin<&mut F>, flag: &Arc<Flag>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&Waker::from(flag.clone())))
    }

    fn ready<F: Future>(future: F) -> F::Output {
        let Poll::Ready(value) = poll(pin!(future), &Arc::default()) else { panic!("not ready") };
        value
    }

    #[test]
    fn those_who_wait_are_served_in_their_order() {
        let cells = Cells::new(1);
        let cell = ready(cells.acquire());
        let (one, two) = (Arc::<Flag>::default(), Arc::<Flag>::default());
        let (mut first, mut second) = (Box::pin(cells.acquire()), Box::pin(cells.acquire()));
        assert!(poll(first.as_mut(), &one).is_pending() && poll(second.as_mut(), &two).is_pending());
        cells.release(cell);
        assert!(one.was_woken() && !two.was_woken());
        assert_eq!(cells.try_acquire(), None, "nobody overtakes");
        assert!(poll(second.as_mut(), &two).is_pending());
        let Poll::Ready(cell) = poll(first.as_mut(), &one) else { panic!("its turn") };
        cells.release(cell);
        assert!(two.was_woken());
        assert!(poll(second.as_mut(), &two).is_ready());
    }

    #[test]
    fn a_wake_up_for_one_that_was_dropped_goes_to_the_next() {
        let cells = Cells::new(1);
        let cell = ready(cells.acquire());
        let (one, two) = (Arc::<Flag>::default(), Arc::<Flag>::default());
        let (mut first, mut second) = (Box::pin(cells.acquire()), Box::pin(cells.acquire()));
        assert!(poll(first.as_mut(), &one).is_pending() && poll(second.as_mut(), &two).is_pending());
        cells.release(cell);
        drop(first);
        assert!(two.was_woken());
        assert!(poll(second.as_mut(), &two).is_ready());
    }

    #[test]
    fn whoever_leaves_last_frees_the_cell() {
        let cells = Cells::new(1);
        let id = ready(cells.acquire());
        let flying = cells.fly(id);
        drop(flying);
        assert_eq!(cells.try_acquire(), None, "the command still flies");
        cells.end(id, OUTCOME);
        let id = cells.try_acquire().unwrap();
        let flying = cells.fly(id);
        cells.end(id, OUTCOME);
        drop(flying);
        let id = cells.try_acquire().unwrap();
        let flag = Arc::<Flag>::default();
        let mut ended = Box::pin(cells.fly(id).ended());
        assert!(poll(ended.as_mut(), &flag).is_pending());
        cells.end(id, OUTCOME);
        assert!(flag.was_woken());
        assert_eq!(poll(ended.as_mut(), &flag), Poll::Ready(OUTCOME));
        assert!(cells.try_acquire().is_some());
    }

    #[test]
    fn many_threads_share_few_cells() {
        let cells = Cells::new(3);
        let (flying, ended) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let cells = &cells;
            for _ in 0..6 {
                let flying = flying.clone();
                scope.spawn(move || {
                    for n in 0..2_000u64 {
                        crate::blocking::block_on(async {
                            let id = cells.acquire().await;
                            let flight = cells.fly(id);
                            flying.send((id, n)).unwrap();
                            if n % 5 != 0 {
                                assert_eq!(flight.ended().await.result, n);
                            }
                        });
                    }
                });
            }
            drop(flying);
            for (id, n) in ended {
                cells.end(id, Outcome { result: n, ..OUTCOME });
            }
        });
        assert_eq!(cells.free.len(), 3);
    }
}
