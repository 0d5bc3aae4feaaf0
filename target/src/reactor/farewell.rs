//! Connections that end with a word to the initiator. A socket that is closed while it has unread bytes is reset, and
//! the reset may overtake what was sent last. So nothing more is sent, and what still comes is thrown away until the
//! initiator has hung up, for a bounded time and amount. No byte of it is looked at (I2).

use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;

use twinrail_fallback_tcp::{ReceiveVectored, Socket};
use twinrail_protocol::Slot;

use super::ring::{Ring, Tag, TagKind};

/// How long an initiator may take to hang up, in milliseconds.
pub(super) const LINGER_MS: u64 = 1000;
/// Most connections that are waited for; each has a descriptor. One more is reset.
const MOST: usize = 1024;
/// Most bytes that are thrown away for one of them: what was under way when it was told.
const MOST_BYTES: usize = 8 << 20;
/// Bytes thrown away at a time.
const SINK: usize = 16 * 1024;
/// Reads of one of them in a turn.
const READS: usize = 16;

struct Farewell {
    socket: Socket,
    until_ms: u64,
    left_bytes: usize,
}

/// All of them; each is watched by the ring as long as it is here.
pub(super) struct Farewells {
    places: Vec<Option<Farewell>>,
    /// When the time of the first is over.
    due_ms: u64,
}

impl Farewells {
    pub(super) fn new() -> Self {
        Self { places: Vec::new(), due_ms: u64::MAX }
    }

    /// All that is to be said on this connection is with the kernel.
    pub(super) fn begin(&mut self, ring: &mut Ring, socket: Socket, now_ms: u64) {
        let place = self.places.iter().position(Option::is_none).unwrap_or(self.places.len());
        if place == MOST || socket.shutdown_write().is_err() {
            return abort(socket);
        }
        if place == self.places.len() {
            self.places.push(None);
        }
        let (until_ms, left_bytes) = (now_ms + LINGER_MS, MOST_BYTES);
        self.due_ms = self.due_ms.min(until_ms);
        self.places[place] = Some(Farewell { socket, until_ms, left_bytes });
        self.watch(ring, place);
    }

    fn watch(&mut self, ring: &mut Ring, place: usize) {
        let Some(slot) = self.places.get_mut(place) else { return };
        let Some(farewell) = slot else { return };
        if ring.watch(farewell.socket.as_fd(), false, tag(place)).is_err() {
            slot.take().into_iter().for_each(|farewell| abort(farewell.socket));
        }
    }

    /// The ring says that there is something to read, or doesn't watch any more.
    pub(super) fn ready(&mut self, ring: &mut Ring, place: usize, now_ms: u64) {
        let Some(slot) = self.places.get_mut(place) else { return };
        let Some(farewell) = slot else { return };
        match farewell.discard(now_ms) {
            Ok(true) => self.watch(ring, place),
            // The initiator has hung up, and so has all that it was told.
            Ok(false) => *slot = None,
            Err(_) => slot.take().into_iter().for_each(|farewell| abort(farewell.socket)),
        }
    }

    /// Ends those whose time is over: the ring lets go of them.
    pub(super) fn tick(&mut self, ring: &mut Ring, now_ms: u64) {
        self.due_ms = u64::MAX;
        for (place, farewell) in self.places.iter().enumerate() {
            let Some(Farewell { until_ms, .. }) = *farewell else { continue };
            if until_ms > now_ms {
                self.due_ms = self.due_ms.min(until_ms);
            } else if let Err(error) = ring.cancel(tag(place)) {
                tracing::error!(%error, "the ring doesn't take a cancellation");
            }
        }
    }

    /// When to call [`Self::tick`].
    pub(super) fn due_ms(&self) -> u64 {
        self.due_ms
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }
}

impl Farewell {
    /// Throws away what has arrived. Answers `false` at the end, an error when time or bytes are over.
    fn discard(&mut self, now_ms: u64) -> io::Result<bool> {
        let mut sink = [0; SINK];
        for _ in 0..READS {
            if now_ms >= self.until_ms || self.left_bytes == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.socket.receive_vectored(&mut [IoSliceMut::new(&mut sink)]) {
                Ok(0) => return Ok(false),
                Ok(count) => self.left_bytes = self.left_bytes.saturating_sub(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn tag(place: usize) -> Tag {
    Tag { kind: TagKind::Farewell, lane: place as u32, slot: Slot(0), check: 0 }
}

/// Closes a socket so that nothing unsent is sent later (the fence of a path that ended).
pub(super) fn abort(socket: Socket) {
    if let Err(error) = socket.abort() {
        tracing::debug!(%error, "a socket that ended couldn't be reset");
    }
}
