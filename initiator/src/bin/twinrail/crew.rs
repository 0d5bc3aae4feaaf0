//! Long work divided among threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::interrupt::Interrupt;

/// Lets `count` threads repeat `step` until it says that nothing is left. The first error, or a signal, stops
/// all of them after the step they are at; each thread keeps what `begin` gave it from step to step.
pub(crate) fn work<S>(
    count: usize,
    interrupt: &Interrupt,
    begin: impl Fn() -> anyhow::Result<S> + Sync,
    step: impl Fn(&mut S) -> anyhow::Result<bool> + Sync,
) -> anyhow::Result<()> {
    let stopped = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let toil = || -> anyhow::Result<()> {
        let mut state = begin()?;
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
                    // Others fail because of the first.
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            });
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(interrupt.check()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_step_is_taken_once() {
        let (next, sum) = (AtomicU32::new(0), AtomicU32::new(0));
        let step = |_: &mut ()| {
            let mine = next.fetch_add(1, Ordering::Relaxed);
            if mine < 1000 {
                sum.fetch_add(mine, Ordering::Relaxed);
            }
            Ok(mine < 1000)
        };
        work(4, &Interrupt::default(), || Ok(()), step).unwrap();
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
        let error = work(2, &Interrupt::default(), || Ok(false), met).unwrap_err();
        assert_eq!(error.to_string(), "the leader stumbles");
    }
}
