//! What the lanes of one reactor share: ring, arena, clock, who waits for memory, who is held back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;
use twinrail_protocol::{Sequence, Slot};

use super::arena::{Arena, Block};
use super::exclusion::Holds;
use super::mailbox::{Exclusion, Mailbox, Message};
use super::ring::Ring;
use super::{Event, ReactorOptions};
use crate::metrics::{ReactorMetrics, VolumeMetrics};
use crate::volume::VolumeIndex;

/// The common part of a reactor.
pub(super) struct Core {
    // The ring goes before the arena that it works on (I3).
    pub(super) ring: Ring,
    pub(super) arena: Arena,
    pub(super) index: usize,
    pub(super) options: ReactorOptions,
    pub(super) mailboxes: Arc<[Arc<Mailbox>]>,
    pub(super) events: UnboundedSender<Event>,
    pub(super) metrics: ReactorMetrics,
    volume_metrics: Box<[VolumeMetrics]>,
    pub(super) holds: Holds,
    /// Lanes that wait for memory, each once, in the order in which they began to.
    pub(super) waiting: VecDeque<usize>,
    /// Lanes with something to send or to watch, each once.
    pub(super) dirty: Vec<usize>,
    /// Blocks whose payload has left.
    pub(super) returned: Vec<Block>,
    /// Memory came back since the waiting lanes were last asked.
    pub(super) memory_freed: bool,
    /// Those that wait for memory are being let on.
    pub(super) resuming: bool,
    /// A command ended while ranges are held: the holds have to be looked at.
    pub(super) recheck_holds: bool,
    /// Bytes of the arena that aren't promised to any data window.
    pub(super) window_free: usize,
    /// Commands that go on later, for a fault injected for a test or a keeper without room: when (in
    /// microseconds), lane, slot, sequence.
    pub(super) delayed: Vec<(u64, usize, Slot, Sequence)>,
    started: Instant,
    now_us: u64,
}

impl Core {
    #[expect(clippy::too_many_arguments, reason = "the parts of a reactor, put together once")]
    pub(super) fn new(
        ring: Ring,
        arena: Arena,
        index: usize,
        options: ReactorOptions,
        mailboxes: Arc<[Arc<Mailbox>]>,
        events: UnboundedSender<Event>,
        metrics: ReactorMetrics,
        volume_metrics: Box<[VolumeMetrics]>,
    ) -> Self {
        let window_free = arena.length() / 2;
        Self {
            ring,
            arena,
            index,
            options,
            mailboxes,
            events,
            metrics,
            volume_metrics,
            holds: Holds::default(),
            waiting: VecDeque::with_capacity(1024),
            dirty: Vec::with_capacity(1024),
            returned: Vec::with_capacity(1024),
            memory_freed: false,
            resuming: false,
            recheck_holds: false,
            window_free,
            delayed: Vec::new(),
            started: Instant::now(),
            now_us: 0,
        }
    }

    /// Reads the clock; done a few times a turn, not for each command.
    pub(super) fn tick(&mut self) {
        self.now_us = self.started.elapsed().as_micros() as u64;
    }

    /// Microseconds since the reactor began, as of the last tick.
    pub(super) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Milliseconds since the reactor began, as of the last tick.
    pub(super) fn now_ms(&self) -> u64 {
        self.now_us / 1000
    }

    /// Gives a block back to the arena (I3: nothing touches it any more).
    pub(super) fn give_back(&mut self, block: Block) {
        self.arena.give_back(block);
        self.memory_freed = true;
    }

    /// Gives back the blocks of replies that have left, or never will; answers how many bytes that are.
    pub(super) fn collect_returned(&mut self) -> usize {
        let mut bytes = 0;
        while let Some(block) = self.returned.pop() {
            bytes += block.size();
            self.give_back(block);
        }
        bytes
    }

    /// Storage failed a command.
    pub(super) fn storage_error(&self, volume: VolumeIndex) {
        if let Some(metrics) = self.volume_metrics.get(volume.0) {
            metrics.storage_errors.inc();
        }
    }

    /// A FLUSH succeeded.
    pub(super) fn flushed(&self, volume: VolumeIndex) {
        if let Some(metrics) = self.volume_metrics.get(volume.0) {
            metrics.flushes.inc();
        }
    }

    /// Tells the control plane; if it is gone, the process is ending.
    pub(super) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// The reactor that keeps the line of exclusive commands for a volume.
    pub(super) fn home_of(&self, volume: VolumeIndex) -> usize {
        volume.0 % self.mailboxes.len()
    }

    /// Sends a message about exclusive commands to a reactor, this one included.
    pub(super) fn exclude(&self, reactor: usize, message: Exclusion) {
        if let Some(mailbox) = self.mailboxes.get(reactor) {
            mailbox.send(Message::Exclusion(message));
        }
    }
}
