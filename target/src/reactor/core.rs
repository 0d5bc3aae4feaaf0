//! What the lanes of one reactor share: ring, arena, clock, who waits for memory, who is held back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;
use twinrail_fallback_tcp::Socket;
use twinrail_protocol::{Sequence, Slot};

use super::arena::{Arena, Block};
use super::exclusion::Holds;
use super::farewell::Farewells;
use super::mailbox::{Exclusion, Mailbox, Message};
use super::ring::Ring;
use super::standbys::Standbys;
use super::{Event, ReactorOptions};
use crate::metrics::{ReactorMetrics, VolumeMetrics};
use crate::throttle::Throttle;
use crate::volume::VolumeIndex;

/// Lines of paths that end, by who ended them: initiators that come and go, or break rules, cause as many as they
/// like. One line a second of each kind, for all reactors together: a session that flaps on each of its queues must not fill
/// the log.
pub(super) struct PathLog {
    pub(super) violations: Throttle,
    pub(super) ours: Throttle,
    pub(super) lost: Throttle,
    /// Of paths that took the place of one that was lost.
    pub(super) switches: Throttle,
}

/// The lines of all reactors.
pub(super) static PATH_LOG: PathLog = PathLog {
    violations: Throttle::new(1),
    ours: Throttle::new(1),
    lost: Throttle::new(1),
    switches: Throttle::new(1),
};

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
    /// Connections that have ended and wait for the initiator to hang up.
    pub(super) farewells: Farewells,
    /// Blocks whose payload has left.
    pub(super) returned: Vec<Block>,
    /// Memory came back, or the line changed, since the waiting lanes were last asked.
    pub(super) memory_freed: bool,
    /// Those that wait for memory are being let on.
    pub(super) resuming: bool,
    /// A command ended while ranges are held: the holds have to be looked at.
    pub(super) recheck_holds: bool,
    /// Bytes of the arena's one half that aren't promised to any data window.
    pub(super) window_free: usize,
    /// Bytes of the other half that are in-capsule buffers of queues.
    capsules: usize,
    /// The same, that commands have which could have waited for them.
    asked: usize,
    /// Commands that go on later, for a fault injected for a test or a keeper without room: when (in
    /// microseconds), lane, slot, sequence.
    pub(super) delayed: Vec<(u64, usize, Slot, Sequence)>,
    /// Connections that stand by, by the queue for which they do; looked after by the control plane.
    pub(super) standbys: Standbys,
    /// Messages that found full mailboxes, in their order; a few for each exclusive command at most.
    left: VecDeque<(usize, Exclusion)>,
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
            farewells: Farewells::new(),
            returned: Vec::with_capacity(1024),
            memory_freed: false,
            resuming: false,
            recheck_holds: false,
            window_free,
            capsules: 0,
            asked: 0,
            delayed: Vec::new(),
            standbys: Standbys::default(),
            left: VecDeque::new(),
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

    /// A block for a command that can wait for it, of a lane whose other commands have `taken` so much already. They
    /// share half of the arena: a payload that the data window promised room for always finds it, else a path
    /// could wait for memory that only bytes behind it on the same path set free (I10). Of this half a lane leaves
    /// as much to others as it has itself, so that no disk that hangs keeps it all (I8).
    pub(super) fn ask(&mut self, length: usize, taken: usize) -> Option<Block> {
        let size = self.arena.block_size(length);
        let spare = (self.arena.length() / 2).saturating_sub(self.capsules + self.asked);
        if size > spare || (taken > 0 && taken + size > spare) {
            return None;
        }
        let mut block = self.arena.take(length)?;
        block.asked = true;
        self.asked += block.size();
        Some(block)
    }

    /// In-capsule buffers for a queue, as long as two of the largest transfers are left to ask for: what one
    /// COMPARE AND WRITE needs.
    pub(super) fn take_capsules(&mut self, length: usize) -> Option<Block> {
        let most = (self.arena.length() / 2).saturating_sub(2 * self.options.max_transfer as usize);
        if self.capsules + self.arena.block_size(length) > most {
            return None;
        }
        let block = self.arena.take(length)?;
        self.capsules += block.size();
        Some(block)
    }

    /// Gives back what [`Self::take_capsules`] gave.
    pub(super) fn give_back_capsules(&mut self, block: Block) {
        self.capsules = self.capsules.saturating_sub(block.size());
        self.give_back(block);
    }

    /// Gives a block back to the arena (I3: nothing touches it any more); answers how many bytes of it were asked
    /// for.
    pub(super) fn give_back(&mut self, block: Block) -> usize {
        let asked = if block.asked { block.size() } else { 0 };
        self.asked = self.asked.saturating_sub(asked);
        self.arena.give_back(block);
        self.memory_freed = true;
        asked
    }

    /// Gives back the blocks of replies that have left, or never will; answers how many bytes of them were asked
    /// for.
    pub(super) fn collect_returned(&mut self) -> usize {
        let mut asked = 0;
        while let Some(block) = self.returned.pop() {
            asked += self.give_back(block);
        }
        asked
    }

    /// Lets the initiator read the last word on a connection before that is closed.
    pub(super) fn farewell(&mut self, socket: Socket) {
        let now_ms = self.now_ms();
        self.farewells.begin(&mut self.ring, socket, now_ms);
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

    /// Sends a message about exclusive commands to a reactor, this one included. What finds a full mailbox is sent
    /// in a later turn, and all that comes behind it.
    pub(super) fn exclude(&mut self, reactor: usize, message: Exclusion) {
        if !self.left.is_empty() || !self.try_exclude(reactor, message) {
            self.left.push_back((reactor, message));
        }
    }

    fn try_exclude(&self, reactor: usize, message: Exclusion) -> bool {
        self.mailboxes.get(reactor).is_none_or(|mailbox| mailbox.try_send(Message::Exclusion(message)).is_ok())
    }

    /// Sends what found full mailboxes. Answers whether there was or is any of it.
    pub(super) fn send_left(&mut self) -> bool {
        let any = !self.left.is_empty();
        while let Some(&(reactor, message)) = self.left.front() {
            if !self.try_exclude(reactor, message) {
                break;
            }
            self.left.pop_front();
        }
        any
    }
}
