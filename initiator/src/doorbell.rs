//! How other threads get the attention of the one that owns a queue.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{EventfdFlags, eventfd};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const RUNG: u32 = 2;

/// Rings for the thread that owns a queue. Cheap to clone.
///
/// While the thread is awake a ring is one atomic swap; only one that sleeps costs a call to the kernel.
#[derive(Clone, Debug)]
pub struct Doorbell {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: AtomicU32,
    event: OwnedFd,
}

impl Doorbell {
    pub(crate) fn new() -> std::io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { inner: Arc::new(Inner { state: AtomicU32::new(AWAKE), event }) })
    }

    /// Wakes the thread, or keeps it from going to sleep. What was stored before is seen by the thread when it
    /// has answered.
    pub fn ring(&self) {
        if self.inner.state.swap(RUNG, Ordering::SeqCst) == ASLEEP {
            // It can't fail but for a counter at 2^64, which is as good a ring.
            let _ = rustix::io::write(&self.inner.event, &1u64.to_ne_bytes());
        }
    }

    /// Whether somebody has rung since [`Self::answer`].
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        self.inner.state.load(Ordering::Relaxed) == RUNG
    }

    /// Takes note of a ring. Only then look for what it was about: a later ring is then a new one.
    #[inline]
    pub(crate) fn answer(&self) {
        if self.is_rung() {
            self.inner.state.swap(AWAKE, Ordering::SeqCst);
        }
    }

    /// Announces sleep; `false` if somebody has just rung.
    pub(crate) fn lie_down(&self) -> bool {
        self.inner.state.compare_exchange(AWAKE, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Ends the sleep that was announced; `rung` says whether the descriptor was found readable.
    pub(crate) fn get_up(&self, rung: bool) {
        let _rung = self.inner.state.compare_exchange(ASLEEP, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
        if rung {
            let _nothing_there = rustix::io::read(&self.inner.event, &mut [0; 8]);
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn no_ring_is_lost_between_looking_and_sleeping() {
        const RINGS: usize = 20_000;
        let (bell, work) = (Doorbell::new().unwrap(), Arc::new(AtomicUsize::new(0)));
        let ringer = {
            let (bell, work) = (bell.clone(), work.clone());
            std::thread::spawn(move || {
                for _ in 0..RINGS {
                    work.fetch_add(1, Ordering::Relaxed);
                    bell.ring();
                    while work.load(Ordering::Relaxed) > 3 {
                        std::thread::yield_now();
                    }
                }
            })
        };
        let mut seen = 0;
        while seen < RINGS {
            bell.answer();
            let found = work.swap(0, Ordering::Relaxed);
            seen += found;
            if found == 0 && bell.lie_down() {
                let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
                let woken = poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&limit)).unwrap();
                assert_eq!(woken, 1, "slept through a ring after {seen}");
                bell.get_up(true);
            }
        }
        ringer.join().unwrap();
    }
}
