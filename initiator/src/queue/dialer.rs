//! Connections are dialed on threads of their own: looking up a name, a lost SYN and a slow answer to HELLO take
//! as long as they like, and the queue goes on.

use std::sync::Arc;
use std::thread;

use crossbeam_queue::ArrayQueue;
use twinrail_fallback_tcp::Socket;
use twinrail_protocol::initiator::rails::PathId;
use twinrail_protocol::wire::Standby;

use crate::connect::{ConnectError, Connection, Route};
use crate::doorbell::Doorbell;

/// Dials that may be under way at once, those included that nobody waits for any more.
const MOST: usize = 8;

/// What became of a dial.
#[derive(Debug)]
pub(super) struct Dialed {
    pub(super) path: PathId,
    pub(super) result: Result<Socket, ConnectError>,
}

/// Dials for one queue.
#[derive(Debug)]
pub(super) struct Dialer {
    route: Arc<Route>,
    doorbell: Doorbell,
    results: Arc<ArrayQueue<Dialed>>,
    /// Dials whose result wasn't taken yet.
    under_way: usize,
}

impl Dialer {
    pub(super) fn new(route: Arc<Route>, doorbell: Doorbell) -> Self {
        Self { route, doorbell, results: Arc::new(ArrayQueue::new(MOST)), under_way: 0 }
    }

    /// Whether results are still to come.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.under_way > 0
    }

    /// Begins to dial, up to WELCOME, or to STANDING if `standby` is given; the queue's doorbell is rung when there
    /// is a result. `false` when that can't be done now.
    pub(super) fn dial(&mut self, path: PathId, standby: Option<Standby>) -> bool {
        if self.under_way == MOST {
            return false;
        }
        let (route, doorbell, results) = (Arc::clone(&self.route), self.doorbell.clone(), Arc::clone(&self.results));
        let dial = move || {
            let result = connect(&route, standby.as_ref());
            // There is room for all that may be under way. If the queue is gone, the connection goes with this.
            let _room = results.push(Dialed { path, result });
            doorbell.ring();
        };
        let begun = thread::Builder::new().name("twinrail-dial".to_owned()).spawn(dial).is_ok();
        self.under_way += usize::from(begun);
        begun
    }

    /// The result of a dial, if there is one.
    pub(super) fn take(&mut self) -> Option<Dialed> {
        if self.under_way == 0 {
            return None;
        }
        let dialed = self.results.pop()?;
        self.under_way -= 1;
        Some(dialed)
    }
}

fn connect(route: &Route, standby: Option<&Standby>) -> Result<Socket, ConnectError> {
    let mut connection = Connection::dial(route)?;
    if let Some(standby) = standby {
        connection.stand_by(standby)?;
    }
    connection.into_socket(route)
}
