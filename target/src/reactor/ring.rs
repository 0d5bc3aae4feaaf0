//! The reactor's io_uring: reads and writes of files, readiness of sockets, the wake-up of the mailbox, and
//! the one place where the reactor sleeps.
//!
//! What the kernel still works on is identified by the 64-bit [`Tag`] of its operation: kind, lane, slot
//! and part of the sequence. No map, no allocation, and a completion that comes late is recognised.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use twinrail_protocol::{Sequence, Slot};

use super::arena::{Arena, CHUNK, Piece};
use crate::volume::VolumeIndex;

/// Submission entries. A full queue is submitted early, so this bounds only the batch.
const ENTRIES: u32 = 1024;
/// Completions are reaped at least once a turn; room for all that lanes may have at storage.
const COMPLETIONS: u32 = 16 * 1024;
/// Kernel threads for what can't be done without blocking (a first write into a hole, files without
/// O_DIRECT). A hung disk occupies as many as it has commands; the others need some too.
const BLOCKING_THREADS: u32 = 512;

/// How often a full submission queue is submitted, and completions are taken out of the kernel's way, for one
/// operation that is to go in. The kernel takes at least one each time, unless it is out of memory.
const PUSHES: usize = 8;

/// What a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagKind {
    /// A read or write of a slot.
    Storage,
    /// Readiness of a lane's socket to be read.
    Readable,
    /// Readiness of a lane's socket to be written.
    Writable,
    /// The mailbox.
    Mailbox,
    /// A cancellation; nothing is to be done.
    Cancel,
    /// Readiness of a connection that has ended, at a place among the farewells.
    Farewell,
}

/// The user data of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) kind: TagKind,
    pub(super) lane: u32,
    pub(super) slot: Slot,
    /// The low bits of the sequence, or of the epoch for readiness.
    pub(super) check: u16,
}

impl Tag {
    pub(super) fn storage(lane: usize, slot: Slot, sequence: Sequence) -> Self {
        Self { kind: TagKind::Storage, lane: lane as u32, slot, check: sequence.0 as u16 }
    }

    pub(super) fn path(kind: TagKind, lane: usize, check: u16) -> Self {
        Self { kind, lane: lane as u32, slot: Slot(0), check }
    }

    pub(super) fn pack(self) -> u64 {
        let kind = self.kind as u64;
        kind << 56 | u64::from(self.lane & 0xff_ffff) << 32 | u64::from(self.slot.0) << 16 | u64::from(self.check)
    }

    pub(super) fn unpack(word: u64) -> Option<Self> {
        let kind = match word >> 56 {
            0 => TagKind::Storage,
            1 => TagKind::Readable,
            2 => TagKind::Writable,
            3 => TagKind::Mailbox,
            4 => TagKind::Cancel,
            5 => TagKind::Farewell,
            _ => return None,
        };
        let (lane, slot, check) = ((word >> 32) as u32 & 0xff_ffff, Slot((word >> 16) as u16), word as u16);
        Some(Self { kind, lane, slot, check })
    }
}

/// The ring. Dropped before the arena, which it works on.
pub(super) struct Ring {
    ring: IoUring,
    /// Whether the arena is registered, so that fixed reads and writes can be used.
    fixed: bool,
    /// Completions taken out of the kernel's queue to make room in it, the oldest first. Mostly there are none.
    reaped: VecDeque<(Tag, i32)>,
}

impl Ring {
    /// A ring for the calling thread, with `files` at the places of their volumes (-1 for those that have
    /// none). A memory limit that is too low for registering the arena is no error: it costs CPU time, and
    /// a log line says what to do.
    pub(super) fn new(arena: &Arena, files: &[i32]) -> io::Result<Self> {
        Self::of_size(ENTRIES, COMPLETIONS, arena, files)
    }

    fn of_size(entries: u32, completions: u32, arena: &Arena, files: &[i32]) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(completions)
            .build(entries)
            // Before 6.1 the kernel doesn't know these; they only save work.
            .or_else(|_| IoUring::builder().setup_cqsize(completions).build(entries))?;
        // SAFETY: the chunks lie in the arena, whose mapping outlives the ring (field order in `Reactor`).
        let registered = unsafe { ring.submitter().register_buffers(&arena.chunks()) };
        if let Err(error) = &registered {
            tracing::warn!(
                %error,
                arena_bytes = arena.length(),
                "the arena can't be registered with io_uring: every command pins its pages anew. Raise the limit of \
                 locked memory (LimitMEMLOCK= in systemd, `ulimit -l`) above the arenas of all reactors, or make \
                 `arena` smaller"
            );
        }
        if !files.is_empty() {
            ring.submitter().register_files(files)?;
        }
        let mut threads = [BLOCKING_THREADS, 0];
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut threads) {
            tracing::debug!(%error, "the kernel keeps its own limit of blocking threads");
        }
        Ok(Self { ring, fixed: registered.is_ok(), reaped: VecDeque::new() })
    }

    /// Whether the arena is registered.
    pub(super) fn fixed(&self) -> bool {
        self.fixed
    }

    /// Reads from a volume's file at `offset` into `piece`.
    pub(super) fn read(
        &mut self,
        volume: VolumeIndex,
        offset: u64,
        arena: &Arena,
        piece: Piece,
        tag: Tag,
    ) -> io::Result<()> {
        let file = Fixed(volume.0 as u32);
        let (address, length) = arena.address(piece);
        let entry = match self.fixed {
            true => opcode::ReadFixed::new(file, address, length, chunk_of(piece)).offset(offset).build(),
            false => opcode::Read::new(file, address, length).offset(offset).build(),
        };
        self.push(&entry.user_data(tag.pack()))
    }

    /// Writes `piece` to a volume's file at `offset`; with `sync` onto stable storage.
    pub(super) fn write(
        &mut self,
        volume: VolumeIndex,
        offset: u64,
        arena: &Arena,
        piece: Piece,
        sync: bool,
        tag: Tag,
    ) -> io::Result<()> {
        let file = Fixed(volume.0 as u32);
        let (address, length) = arena.address(piece);
        let flags = if sync { libc::RWF_DSYNC } else { 0 };
        let entry = match self.fixed {
            true => {
                opcode::WriteFixed::new(file, address, length, chunk_of(piece)).offset(offset).rw_flags(flags).build()
            }
            false => opcode::Write::new(file, address, length).offset(offset).rw_flags(flags).build(),
        };
        self.push(&entry.user_data(tag.pack()))
    }

    /// Asks once for readiness. It is level-like: what is ready already completes at once.
    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, writable: bool, tag: Tag) -> io::Result<()> {
        let events = if writable { libc::POLLOUT } else { libc::POLLIN | libc::POLLRDHUP } as u32;
        self.push(&opcode::PollAdd::new(Fd(fd.as_raw_fd()), events).build().user_data(tag.pack()))
    }

    /// Cancels the operation with this tag; its completion comes all the same.
    pub(super) fn cancel(&mut self, tag: Tag) -> io::Result<()> {
        let cancel = Tag { kind: TagKind::Cancel, ..tag };
        self.push(&opcode::AsyncCancel::new(tag.pack()).build().user_data(cancel.pack()))
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        self.push_by(entry, Self::submit)
    }

    fn push_by(&mut self, entry: &squeue::Entry, submit: impl Fn(&mut Self) -> io::Result<()>) -> io::Result<()> {
        for _ in 0..PUSHES {
            // SAFETY: what the entry points to stays valid until its completion: a piece of the arena, which
            // belongs to a slot at storage until then (I3) and whose mapping outlives the ring; a descriptor
            // that a path keeps open until its readiness was reaped.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            submit(self)?;
            // The kernel may take nothing as long as it has no room to say what has ended.
            if self.ring.submission().is_full() {
                self.reaped.extend(std::iter::from_fn(|| next_completion(&mut self.ring)));
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Gives the kernel what was pushed and lets it report what has ended; no system call when there is
    /// neither.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        let queue = self.ring.submission();
        let (waiting, reports) = (queue.len() as u32, queue.taskrun() || queue.cq_overflow());
        drop(queue);
        if waiting == 0 && !reports {
            return Ok(());
        }
        const GET_EVENTS: u32 = 1;
        // SAFETY: the entries were checked by `push`; no argument is passed.
        match unsafe { self.ring.submitter().enter::<libc::sigset_t>(waiting, 0, GET_EVENTS, None) } {
            Ok(_) => Ok(()),
            Err(error) => harmless(error),
        }
    }

    /// Sleeps until something completes or `limit` is over; submits first.
    pub(super) fn sleep(&mut self, limit: Duration) -> io::Result<()> {
        if !self.reaped.is_empty() {
            return self.submit();
        }
        let time = Timespec::from(limit);
        match self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time)) {
            Ok(_) => Ok(()),
            Err(error) => harmless(error),
        }
    }

    /// The next thing that has ended: what, and its result (a negative errno on failure).
    pub(super) fn reap(&mut self) -> Option<(Tag, i32)> {
        self.reaped.pop_front().or_else(|| next_completion(&mut self.ring))
    }
}

fn next_completion(ring: &mut IoUring) -> Option<(Tag, i32)> {
    loop {
        let entry = ring.completion().next()?;
        if let Some(tag) = Tag::unpack(entry.user_data()) {
            return Some((tag, entry.result()));
        }
    }
}

/// The time is over; a signal came; completions must be reaped before more can be submitted: all of these
/// are answered by the next turn of the loop.
fn harmless(error: io::Error) -> io::Result<()> {
    match error.raw_os_error() {
        Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
        _ => Err(error),
    }
}

/// Which registered chunk a piece lies in. Blocks are powers of two up to the chunk's size and aligned to
/// their own, so none reaches from one chunk into the next.
fn chunk_of(piece: Piece) -> u16 {
    (piece.offset / CHUNK) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Pages;

    #[test]
    fn a_tag_survives_the_ring() {
        use TagKind::{Cancel, Farewell, Mailbox, Readable, Storage, Writable};
        for kind in [Storage, Readable, Writable, Mailbox, Cancel, Farewell] {
            let tag = Tag { kind, lane: 0xabcdef, slot: Slot(0x1234), check: 0xffff };
            assert_eq!(Tag::unpack(tag.pack()), Some(tag));
        }
        assert_eq!(Tag::unpack(9 << 56), None);
    }

    #[test]
    fn what_is_read_from_a_file_lands_in_the_arena() {
        let mut arena = Arena::map(2 << 20, 1 << 20, Pages::Plain).unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut ring = Ring::new(&arena, &[file.as_raw_fd()]).unwrap();
        let (out, back) = (arena.take(8192).unwrap(), arena.take(8192).unwrap());
        arena.bytes_mut(out.piece(8192)).fill(0x5a);
        let tag = |sequence| Tag::storage(3, Slot(7), Sequence(sequence));
        ring.write(VolumeIndex(0), 4096, &arena, out.piece(8192), true, tag(1)).unwrap();
        ring.sleep(Duration::from_secs(10)).unwrap();
        assert_eq!(ring.reap(), Some((tag(1), 8192)));
        ring.read(VolumeIndex(0), 4096, &arena, back.piece(8192), tag(2)).unwrap();
        ring.sleep(Duration::from_secs(10)).unwrap();
        assert_eq!(ring.reap(), Some((tag(2), 8192)));
        assert_eq!(arena.bytes(back.piece(8192)), [0x5a; 8192]);
        ring.sleep(Duration::from_millis(1)).unwrap();
        assert_eq!(ring.reap(), None);
    }

    /// With both of the kernel's queues full nothing could be submitted before something was reaped, and the
    /// reactor would have gone round for ever.
    #[test]
    fn a_full_completion_queue_does_not_keep_more_from_being_submitted() {
        const COUNT: u64 = 5000;
        let arena = Arena::map(2 << 20, 1 << 20, Pages::Plain).unwrap();
        let mut ring = Ring::of_size(4, 8, &arena, &[]).unwrap();
        let tag = |sequence| Tag::storage(0, Slot(0), Sequence(sequence));
        // As kernels do that want completions to be reaped first (EBUSY).
        let strict = |ring: &mut Ring| if ring.ring.completion().is_empty() { ring.submit() } else { Ok(()) };
        for sequence in 0..COUNT {
            ring.push_by(&opcode::Nop::new().build().user_data(tag(sequence).pack()), strict).unwrap();
        }
        let mut ended = Vec::new();
        while ended.len() < COUNT as usize {
            match ring.reap() {
                Some((tag, _)) => ended.push(tag.check),
                None => ring.sleep(Duration::from_secs(10)).unwrap(),
            }
        }
        assert!(ended.iter().copied().eq(0..COUNT as u16), "each of them once, in their order");
        assert_eq!(ring.reap(), None);
    }
}
