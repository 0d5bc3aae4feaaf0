//! Connections that stand by for queues of this reactor. Their sockets are the control plane's; here is who wants to
//! hear what becomes of a queue.

use std::collections::HashMap;

use tokio::sync::mpsc::Sender;
use twinrail_protocol::target::PathId;
use twinrail_protocol::{Epoch, QueueId, SessionId, Status};

use super::mailbox::FromReactor;

type Name = (SessionId, QueueId);

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Standbys {
    seats: HashMap<Name, Vec<(PathId, Sender<FromReactor>)>>,
}

impl Standbys {
    pub(super) fn stands(&mut self, name: Name, path: PathId, tell: Sender<FromReactor>) {
        self.seats.entry(name).or_default().push((path, tell));
    }

    pub(super) fn leaves(&mut self, name: Name, path: PathId) {
        if let Some(seats) = self.seats.get_mut(&name) {
            seats.retain(|seat| seat.0 != path);
            if seats.is_empty() {
                self.seats.remove(&name);
            }
        }
    }

    /// Tells one of them. One that doesn't take it doesn't take anything any more, and is found silent.
    pub(super) fn tell(&self, name: Name, path: PathId, word: FromReactor) {
        if let Some(seat) = self.seats.get(&name).and_then(|seats| seats.iter().find(|seat| seat.0 == path)) {
            let _ = seat.1.try_send(word);
        }
    }

    /// A queue has lost its path.
    pub(super) fn path_lost(&self, name: Name, epoch: Epoch) {
        for (_, tell) in self.seats.get(&name).into_iter().flatten() {
            let _ = tell.try_send(FromReactor::PathLost { epoch });
        }
    }

    /// A session has ended.
    pub(super) fn ended(&mut self, session: SessionId, status: Status) {
        let seats = self.seats.extract_if(|name, _| name.0 == session).flat_map(|(_, seats)| seats);
        for (_, tell) in seats {
            let _ = tell.try_send(FromReactor::Ended { status });
        }
    }
}
