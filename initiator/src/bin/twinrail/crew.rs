//! Long work divided among threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::interrupt::Interrupt;

/// Lets `count` threads repeat `step` until it says that nothing is left. The first error, or a signal, stops
/// all of them after the step they are at; each thread keeps what `begin` gave it from step to step. `give_up` is
/// called when there is an error, so that no thread waits for one that has failed.
pub(crate) fn work<S>(
    count: usize,
    interrupt: &Interrupt,
    begin: impl Fn() -> S + Sync,
    step: impl Fn(&mut S) -> anyhow::Result<bool> + Sync,
    give_up: impl Fn() + Sync,
) -> anyhow::Result<()> {
    let stopped = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let toil = || -> anyhow::Result<()> {
        let mut state = begin();
        while !stopped.load(Ordering::Relaxed) && !interrupt.came() {
            if !step(&mut state)? {
                break;
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                if let Err(error) = toil() {
                    stopped.store(true, Ordering::Relaxed);
                    // Others fail because of the first: it is kept before they hear of it.
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    give_up();
                }
            });
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(interrupt.check()?),
    }
}

/// Lets `count` threads do `task` for each of the items, which are begun in their order. For the rest see [`work`].
pub(crate) fn each<T: Send, S>(
    count: usize,
    interrupt: &Interrupt,
    items: impl Iterator<Item = T> + Send,
    begin: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, T) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<()> {
    let left = Mutex::new(items);
    let step = |state: &mut S| {
        let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
        next.map_or(Ok(false), |item| task(state, item).map(|()| true))
    };
    work(count, interrupt, begin, step, || ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::sync::{Barrier, Condvar};

    #[test]
    fn every_item_is_done_once() {
        let sum = AtomicU32::new(0);
        let add = |(): &mut (), item| {
            sum.fetch_add(item, Ordering::Relaxed);
            Ok(())
        };
        each(4, &Interrupt::default(), 0..1000, || (), add).unwrap();
        assert_eq!(sum.into_inner(), 499_500);
    }

    #[test]
    fn the_first_error_stops_all() {
        let meeting = Barrier::new(2);
        let met = |state: &mut bool| {
            // Both are at work when one of them fails; the other would go on for ever.
            if !std::mem::replace(state, true) && meeting.wait().is_leader() {
                anyhow::bail!("the leader stumbles");
            }
            Ok(true)
        };
        let error = work(2, &Interrupt::default(), || false, met, || ()).unwrap_err();
        assert_eq!(error.to_string(), "the leader stumbles");
    }

    #[test]
    fn an_error_that_followed_from_the_first_was_told_in_its_place() {
        let (meeting, given_up, changed) = (Barrier::new(2), Mutex::new(false), Condvar::new());
        let step = |(): &mut ()| -> anyhow::Result<bool> {
            if meeting.wait().is_leader() {
                anyhow::bail!("the cause");
            }
            drop(changed.wait_while(given_up.lock().unwrap(), |given_up| !*given_up));
            anyhow::bail!("what followed")
        };
        let give_up = || {
            *given_up.lock().unwrap() = true;
            changed.notify_all();
        };
        let error = work(2, &Interrupt::default(), || (), step, give_up).unwrap_err();
        assert_eq!(error.to_string(), "the cause");
    }
}
