//! Places for connections that have yet to say what they want (I8).
//!
//! There are so many, no more. A newcomer that finds none free takes the place of the one that has kept us
//! waiting for longest, those at an earlier stage before all others. So idle connections, however many, never
//! keep out one that goes on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use prometheus::IntGauge;
use tokio::sync::oneshot;

#[derive(Debug)]
struct Guest<S> {
    stage: S,
    /// Counts all changes of stage of all guests: the smaller, the longer ago.
    since: u64,
    /// Dropped to tell it that its place is gone.
    notice: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Table<S> {
    guests: BTreeMap<u64, Guest<S>>,
    count: u64,
}

impl<S: Copy + Ord> Table<S> {
    /// Takes the place of the guest that has kept us waiting for longest, of those that are at `last` or
    /// before. Answers whether there was one.
    fn crowd_out(&mut self, last: S) -> bool {
        let waiting = self.guests.iter().filter(|(_, guest)| guest.stage <= last);
        let longest = waiting.min_by_key(|(_, guest)| (guest.stage, guest.since)).map(|(&id, _)| id);
        longest.is_some_and(|id| self.guests.remove(&id).is_some())
    }
}

/// All places. The earlier a stage `S` stands in its order, the sooner who is at it is crowded out.
#[derive(Debug)]
pub(super) struct Places<S> {
    most: usize,
    table: Mutex<Table<S>>,
    /// How many are taken.
    gauge: Option<IntGauge>,
}

/// A place that is taken.
#[derive(Debug)]
pub(super) struct Place<S: Copy + Ord> {
    all: Arc<Places<S>>,
    id: u64,
    /// It was given back: whoever had it needs none any more. Kept, since whoever waits to hear that the place was
    /// lost would hear so when this is dropped.
    left: OnceLock<oneshot::Sender<()>>,
}

/// The place was given to somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CrowdedOut;

impl<S: Copy + Ord> Places<S> {
    pub(super) fn new(most: usize, gauge: Option<IntGauge>) -> Arc<Self> {
        Arc::new(Self { most, table: Mutex::new(Table { guests: BTreeMap::new(), count: 0 }), gauge })
    }

    fn table(&self) -> MutexGuard<'_, Table<S>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, table: &Table<S>) {
        if let Some(gauge) = &self.gauge {
            gauge.set(table.guests.len() as i64);
        }
    }

    /// A place for a newcomer at `stage`, and what tells it that it has lost it again; somebody at `last` or
    /// before loses theirs if none is free. Nothing when all others are further than that.
    pub(super) fn admit(self: &Arc<Self>, stage: S, last: S) -> Option<(Place<S>, oneshot::Receiver<()>)> {
        let mut table = self.table();
        if table.guests.len() >= self.most && !table.crowd_out(last) {
            return None;
        }
        table.count += 1;
        let id = table.count;
        let (notice, noticed) = oneshot::channel();
        table.guests.insert(id, Guest { stage, since: id, notice });
        self.count(&table);
        Some((Place { all: self.clone(), id, left: OnceLock::new() }, noticed))
    }

    /// Takes the place of one that is at `last` or before for nobody. Answers whether there was one.
    pub(super) fn crowd_out(&self, last: S) -> bool {
        let mut table = self.table();
        let any = table.crowd_out(last);
        self.count(&table);
        any
    }
}

impl<S: Copy + Ord> Place<S> {
    /// Goes on to another stage, if the place wasn't lost.
    pub(super) fn enter(&self, stage: S) -> Result<(), CrowdedOut> {
        if self.left.get().is_some() {
            return Ok(());
        }
        let mut table = self.all.table();
        table.count += 1;
        let since = table.count;
        let guest = table.guests.get_mut(&self.id).ok_or(CrowdedOut)?;
        (guest.stage, guest.since) = (stage, since);
        Ok(())
    }

    /// Gives the place back early, if it wasn't lost.
    pub(super) fn leave(&self) {
        let mut table = self.all.table();
        if let Some(guest) = table.guests.remove(&self.id) {
            // Nobody has set it: the guest was still there.
            let _ = self.left.set(guest.notice);
        }
        self.all.count(&table);
    }

    /// The stage it is at, if the place wasn't lost.
    pub(super) fn stage(&self) -> Option<S> {
        self.all.table().guests.get(&self.id).map(|guest| guest.stage)
    }
}

impl<S: Copy + Ord> Drop for Place<S> {
    fn drop(&mut self) {
        let mut table = self.all.table();
        table.guests.remove(&self.id);
        self.all.count(&table);
    }
}
