//! How other threads talk to a reactor: a bounded queue without locks, and an eventfd that the reactor's
//! ring watches. Nothing here is on the path of a plain read or write.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;
use rustix::event::EventfdFlags;
use tokio::sync::{mpsc, oneshot};
use twinrail_protocol::target::{PathId, QueueOptions};
use twinrail_protocol::{Epoch, Instance, QueueId, Range, SessionId, Status, Violation};

use super::Parting;
use crate::session::Session;
use crate::volume::{Answer, VolumeIndex};
use twinrail_fallback_tcp::Socket;

/// Messages that may wait. Each slot has at most one storage answer under way, and the control plane few.
const CAPACITY: usize = 8192;

/// A connection whose handshake is over, to become the path of a queue.
#[derive(Debug)]
pub struct Activation {
    /// The connection; ACTIVATED isn't sent yet, the reactor does that.
    pub socket: Socket,
    /// Where it comes from.
    pub peer: SocketAddr,
    /// The session, authenticated.
    pub session: Arc<Session>,
    /// What the control plane calls the path that the connection is to become.
    pub path: PathId,
    /// The queue.
    pub queue: QueueId,
    /// The path's epoch.
    pub epoch: Epoch,
    /// The slot table that the initiator knows; zero for none yet.
    pub instance: Instance,
    /// The number for a new slot table, should one be made (random, drawn by the control plane).
    pub new_instance: Instance,
    /// What the queue gets, credits apart: those the reactor sets by what its arena has.
    pub options: QueueOptions,
    /// The headers of the commands in flight, as they came.
    pub report: Vec<u8>,
    /// Told once ACTIVATED is on its way, or why not. On refusal the socket comes back for the REFUSED.
    pub done: oneshot::Sender<Result<(), (Violation, Socket)>>,
}

impl Activation {
    /// Gives the connection back, to be told why it doesn't become the path.
    pub(super) fn refuse(self, status: Status) {
        let _ = self.done.send(Err((Violation { status, detail: "it isn't possible now" }, self.socket)));
    }
}

/// What the control plane has for the reactor of a queue that a connection stands by for.
#[derive(Debug)]
pub enum ToReactor {
    /// It begins to. `tell` hears of the queue from now on, first of its epoch.
    Stands {
        /// Where words for it go.
        tell: mpsc::Sender<FromReactor>,
    },
    /// The initiator asks whether the queue's reactor lives.
    Probe {
        /// Comes back with the answer.
        token: u64,
    },
    /// The initiator has lost the queue's path.
    PathLost {
        /// Its epoch.
        epoch: Epoch,
    },
    /// It doesn't any more.
    Leaves,
}

/// What a reactor has for a connection that stands by for one of its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromReactor {
    /// It is known.
    Stands {
        /// The queue's epoch now; 0 while it has no slot table.
        epoch: Epoch,
        /// Number of the slot table; 0 if and only if the epoch is.
        instance: Instance,
    },
    /// The answer to a probe.
    Alive {
        /// Of that probe.
        token: u64,
    },
    /// The queue has lost its path.
    PathLost {
        /// Its epoch.
        epoch: Epoch,
    },
    /// The session has ended.
    Ended {
        /// Why.
        status: Status,
    },
}

/// What a reactor is told.
#[derive(Debug)]
pub enum Message {
    /// Make a connection the path of a queue.
    Activate(Box<Activation>),
    /// About a connection that stands by.
    Standby {
        /// For a queue of this session.
        session: SessionId,
        /// For this queue.
        queue: QueueId,
        /// Which connection.
        path: PathId,
        /// What.
        what: ToReactor,
    },
    /// End a session: close its paths with this status, drop what waits, and tell `done` when the last of
    /// its commands at storage has ended (I2).
    EndSession {
        /// Which.
        session: SessionId,
        /// Why; goes into the DISCONNECT.
        status: Status,
        /// Told when nothing of it acts any more, with the connections on which CLOSED is to be said.
        done: oneshot::Sender<Vec<Parting>>,
    },
    /// The keeper of a volume has ended a job.
    Stored {
        /// What the reactor gave it.
        ticket: u64,
        /// How it ended.
        answer: Answer,
    },
    /// COMPARE AND WRITE, between reactors: see `exclusion`.
    Exclusion(Exclusion),
    /// Take no more commands and finish what is there.
    Drain {
        /// Told when everything in flight was answered, or the time was over.
        done: oneshot::Sender<()>,
        /// How long that may take in milliseconds.
        limit_ms: u64,
    },
    /// All reactors have drained: tell the initiators and end the thread.
    Stop,
}

/// One exclusive command on one volume at a time: a ticket stands in line at the volume's home reactor,
/// which asks all reactors to hold the range, and tells the ticket's owner when all of them do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The volume.
    pub volume: VolumeIndex,
    /// The range that nobody else may touch.
    pub range: Range,
    /// The reactor that will run the command.
    pub reactor: usize,
    /// What that reactor calls the command.
    pub command: u64,
}

/// Messages between reactors about exclusive commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// To the home: stand in line.
    Ask(Ticket),
    /// From the home to all: hold commands that overlap, and say when none is at storage.
    Hold(Ticket),
    /// To the home: reactor `by` holds.
    Held {
        /// Whose turn it is.
        ticket: Ticket,
        /// Who holds.
        by: usize,
    },
    /// From the home to the ticket's owner: run it.
    Granted(Ticket),
    /// To the home: it has ended.
    Ended(Ticket),
    /// From the home to all: let go.
    Release(Ticket),
}

/// The receiving end belongs to one reactor, the sending end to anybody.
#[derive(Debug)]
pub struct Mailbox {
    messages: ArrayQueue<Message>,
    wake: OwnedFd,
    asleep: AtomicBool,
    /// The reactor has ended: nobody takes anything any more.
    closed: AtomicBool,
}

impl Mailbox {
    /// An empty mailbox.
    ///
    /// # Errors
    /// When no eventfd can be had.
    pub fn new() -> std::io::Result<Arc<Self>> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self {
            messages: ArrayQueue::new(CAPACITY),
            wake,
            asleep: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }))
    }

    /// Puts a message in, and wakes the reactor if it sleeps. When the mailbox is full the calling thread
    /// waits; the capacity is far above what can be under way, so that only a reactor that hangs fills it. For one
    /// that has ended the message is dropped, and with it whoever was to be told.
    pub fn send(&self, message: Message) {
        let mut message = message;
        while !self.is_closed()
            && let Err(back) = self.messages.push(message)
        {
            message = back;
            std::thread::yield_now();
        }
        self.sent();
    }

    /// The same for a reactor, which must not wait: another one may be sending to it, or it to itself.
    ///
    /// # Errors
    /// The message itself when the mailbox is full.
    pub fn try_send(&self, message: Message) -> Result<(), Message> {
        self.messages.push(message)?;
        self.sent();
        Ok(())
    }

    fn sent(&self) {
        // It may have been closed since, after its last message was dropped.
        match self.is_closed() {
            true => self.empty(),
            false => self.nudge(),
        }
    }

    /// The reactor has ended: what waits is dropped, and so is all that comes.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.empty();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn empty(&self) {
        while self.messages.pop().is_some() {}
    }

    /// Wakes the reactor if it sleeps.
    pub fn nudge(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Can only fail by a full counter, and then the reactor is being woken already.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// The next message.
    #[must_use]
    pub fn take(&self) -> Option<Message> {
        self.messages.pop()
    }

    /// The reactor is about to sleep. Answers `false` if there is a message after all: don't.
    #[must_use]
    pub fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.messages.is_empty() {
            return true;
        }
        self.asleep.store(false, Ordering::SeqCst);
        false
    }

    /// The reactor is awake, and looks into its mailbox by itself.
    pub fn stay_awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// The eventfd woke the reactor: clears it.
    pub fn wake_up(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_session() -> (Message, oneshot::Receiver<Vec<Parting>>) {
        let (done, confirmed) = oneshot::channel();
        (Message::EndSession { session: SessionId([1; 16]), status: Status::SHUTDOWN, done }, confirmed)
    }

    #[test]
    fn more_messages_than_there_is_room_for_do_not_wait_for_a_reactor_that_has_ended() {
        let mailbox = Mailbox::new().unwrap();
        let (message, mut first) = end_session();
        mailbox.send(message);
        while mailbox.try_send(end_session().0).is_ok() {}
        let sender = mailbox.clone();
        let (message, mut last) = end_session();
        let waiting = std::thread::spawn(move || sender.send(message));
        mailbox.close();
        waiting.join().unwrap();
        mailbox.send(end_session().0);
        assert!(mailbox.take().is_none());
        // Whoever was to be told knows that nobody will.
        for confirmed in [&mut first, &mut last] {
            assert_eq!(confirmed.try_recv().err(), Some(oneshot::error::TryRecvError::Closed));
        }
    }
}
