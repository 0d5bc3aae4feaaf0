//! SIGINT and SIGTERM: what is in flight is finished, nothing new begins, and all of it in a bounded time. The thread
//! that waits for them also looks whether there is a connection: without one nothing can be finished.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use twinrail_initiator::Session;

use crate::exit::{Code, Interrupted};
use crate::outage::{self, Watch};
use crate::output;

/// How long a command may take to end after the first signal; the second one ends it at once.
const GRACE: Duration = Duration::from_secs(10);

/// How long a connection may be missing then: one that is replaced at once is worth the wait.
const CUT_OFF: Duration = Duration::from_millis(500);

/// Tells of signals. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Interrupt {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    came: AtomicBool,
    /// Whether there is something to finish.
    busy: AtomicBool,
    /// Held to change what [`Interrupt::wait`] waits for.
    lock: Mutex<()>,
    changed: Condvar,
    /// The sessions in use.
    watches: Mutex<Vec<Watch>>,
}

impl Interrupt {
    /// Begins to listen, on a thread of its own.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("no event loop for signals")?;
        let (interrupted, terminated) = {
            let _inside = runtime.enter();
            let listen = |kind| signal(kind).context("signals can't be listened to");
            (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?)
        };
        let this = Self::default();
        let listener = this.clone();
        let thread = thread::Builder::new().name("signals".to_owned());
        thread
            .spawn(move || runtime.block_on(listener.serve(interrupted, terminated)))
            .context("no thread to listen to signals")?;
        Ok(this)
    }

    async fn serve(&self, mut interrupted: Signal, mut terminated: Signal) {
        tokio::select! {
            _ = interrupted.recv() => {},
            _ = terminated.recv() => {},
            () = self.look() => {},
        }
        if self.inner.busy.load(Ordering::SeqCst) {
            self.raise();
            tokio::select! {
                _ = interrupted.recv() => {},
                _ = terminated.recv() => {},
                () = tokio::time::sleep(GRACE) => {},
                () = self.cut_off() => {},
            }
            output::complain("twinrail: interrupted; requests that were in flight may or may not have been executed");
        } else {
            output::complain(format_args!("twinrail: {Interrupted}"));
        }
        std::process::exit(i32::from(Code::Interrupted as u8));
    }

    /// Looks at the sessions now and then, for ever.
    async fn look(&self) {
        loop {
            tokio::time::sleep(outage::LOOK).await;
            self.watches(|watches| watches.iter_mut().for_each(Watch::look));
        }
    }

    /// Waits until a session has no connection, and doesn't get one at once.
    async fn cut_off(&self) {
        loop {
            let cut_off = self.watches(|watches| watches.iter().any(|watch| watch.cut_off() >= CUT_OFF));
            if cut_off {
                return;
            }
            tokio::time::sleep(outage::LOOK).await;
        }
    }

    fn watches<T>(&self, with: impl FnOnce(&mut Vec<Watch>) -> T) -> T {
        with(&mut self.inner.watches.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on there is something to finish with these sessions: until then a signal ends the process at once.
    pub(crate) fn finish_first<'a>(&self, sessions: impl IntoIterator<Item = &'a Session>) {
        let watches = sessions.into_iter().map(|session| Watch::new(session.clone()));
        self.watches(|all| all.extend(watches));
        self.inner.busy.store(true, Ordering::SeqCst);
    }

    fn raise(&self) {
        self.inner.came.store(true, Ordering::SeqCst);
        self.notify();
    }

    /// Whether a signal came.
    pub(crate) fn came(&self) -> bool {
        self.inner.came.load(Ordering::Relaxed)
    }

    /// Fails once a signal came.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        if self.came() { Err(Interrupted) } else { Ok(()) }
    }

    /// Makes [`Self::wait`] look at its condition again.
    pub(crate) fn notify(&self) {
        drop(self.inner.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.inner.changed.notify_all();
    }

    /// Waits until `over` holds, `timeout` is over or a signal came, which is the error.
    pub(crate) fn wait(&self, timeout: Duration, mut over: impl FnMut() -> bool) -> Result<(), Interrupted> {
        let deadline = Instant::now() + timeout;
        let mut guard = self.inner.lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            self.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || over() {
                return Ok(());
            }
            guard = self.inner.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_ends_a_wait() {
        let interrupt = Interrupt::default();
        assert!(interrupt.wait(Duration::ZERO, || false).is_ok());
        assert!(interrupt.wait(Duration::from_secs(60), || true).is_ok());
        let other = interrupt.clone();
        let raiser = thread::spawn(move || other.raise());
        assert!(interrupt.wait(Duration::from_secs(60), || false).is_err());
        raiser.join().unwrap();
        assert!(interrupt.check().is_err());
    }
}
