//! Waiting: a look for what comes next, then sleep.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use twinrail_fallback_tcp::Filled;

use super::Queue;
use crate::error::PathEnd;

/// What a look at the socket brought.
#[derive(Debug)]
pub(super) enum Look {
    /// Bytes; whether the socket is empty now.
    Bytes { drained: bool },
    /// The connection's end, once what came before it is dealt with.
    End(PathEnd),
}

impl Queue {
    /// Blocks until there is something for [`Self::poll`] to do, or `timeout` is over; `None` waits without
    /// limit. A timer of the queue's own may end it too. Call it after a `poll` that had nothing to tell.
    ///
    /// It looks for a while before it sleeps; for how long is learned from what earlier waits brought.
    ///
    /// A ring of the [`Doorbell`](crate::Doorbell) that comes after the return is kept for the next call: look for what others
    /// have left for this thread after `wait`, and none of it is missed.
    pub fn wait(&mut self, timeout: Option<Duration>) {
        self.wait_for(timeout);
        self.doorbell.answer();
    }

    fn wait_for(&mut self, timeout: Option<Duration>) {
        let path = &self.path;
        let busy = path.unread || path.looked.is_some() || (path.unsent && !path.blocked && path.is_open());
        if self.end.is_some() || busy {
            return;
        }
        self.stamp();
        if self.now_ns >= self.next_rails_ns {
            return;
        }
        let limit_ns = timeout.map_or(u64::MAX, |timeout| {
            self.now_ns.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX))
        });
        // A socket that is full is waited for in the kernel: it takes long anyway. So does a new path.
        if self.path.is_open() && !self.path.blocked && self.look_for(limit_ns) {
            self.spin.found();
            self.metrics.spins_found.inc();
            return;
        }
        if self.doorbell.is_rung() {
            return;
        }
        self.sleep(limit_ns);
    }

    /// Looks for replies and rings until the budget is spent; whether there were any.
    fn look_for(&mut self, limit_ns: u64) -> bool {
        let budget_ns = self.spin.budget_ns();
        if budget_ns == 0 {
            return false;
        }
        let until_ns = self.now_ns.saturating_add(budget_ns).min(limit_ns);
        loop {
            if self.doorbell.is_rung() || (self.core.outstanding() > 0 && self.look()) {
                return true;
            }
            // Others may be waiting for this core, the target's thread on the same host among them; alone on
            // it, a yield costs less than the look.
            std::thread::yield_now();
            self.stamp();
            if self.now_ns >= until_ns {
                self.metrics.spins_slept.inc();
                return false;
            }
        }
    }

    /// Looks at the socket once; whether there was something.
    fn look(&mut self) -> bool {
        self.path.looked = match self.fill() {
            Ok(Filled::Bytes { drained, .. }) => Some(Look::Bytes { drained }),
            Ok(Filled::WouldBlock) => None,
            Ok(Filled::Closed) => Some(Look::End(self.closed_by_target())),
            Ok(Filled::Full) => {
                self.path.unread = true;
                return true;
            }
            Err(end) => Some(Look::End(end)),
        };
        self.path.looked.is_some()
    }

    /// Sleeps until the socket, a ring or a timer.
    fn sleep(&mut self, limit_ns: u64) {
        let mut until_ns = limit_ns.min(self.next_rails_ns);
        if self.metrics.is_dirty() {
            until_ns = until_ns.min(self.next_metrics_ns);
        }
        let sleep_ns = until_ns.saturating_sub(self.now_ns);
        let timeout = Timespec {
            tv_sec: i64::try_from(sleep_ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (sleep_ns % 1_000_000_000) as _,
        };
        if sleep_ns == 0 || !self.doorbell.lie_down() {
            return;
        }
        let wanted = |blocked| if blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let bell = || PollFd::new(&self.doorbell, PollFlags::IN);
        let mut fds = [bell(), bell(), bell(), bell()];
        let mut count = 1;
        let lines =
            [&self.standby, &self.attempt].into_iter().flatten().map(|c| (c.line.socket(), c.line.is_blocked()));
        let path = self.path.socket.as_ref().map(|socket| (socket, self.path.blocked));
        for (socket, blocked) in path.into_iter().chain(lines) {
            fds[count] = PollFd::new(socket, wanted(blocked));
            count += 1;
        }
        // An error (a signal, no memory) is as good as a short sleep.
        let _count = poll(&mut fds[..count], Some(&timeout));
        let mut ready = fds[..count].iter().map(|fd| !fd.revents().is_empty());
        let rung = ready.next().unwrap_or(false);
        let readable = self.path.is_open() && ready.next().unwrap_or(false);
        let beside = ready.any(|ready| ready);
        self.doorbell.get_up(rung);
        self.path.unread |= readable;
        if beside || rung {
            self.next_listen_ns = 0;
        }
        self.metrics.sleeps.inc();
        let lay_down_ns = self.now_ns;
        self.stamp();
        self.spin.slept(self.now_ns - lay_down_ns);
    }
}
