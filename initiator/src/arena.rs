//! Buffer memory: one anonymous mapping, and the buffers cut from it. The only unsafe of this crate.
//!
//! Every byte of the mapping belongs to exactly one [`Buffer`], or to none: that is what makes the slices
//! sound, and what I3 rests on. A buffer that is given to a command moves into it, and comes back when no
//! device can touch it any more; whoever holds it then is alone with it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use twinrail_protocol::buddy::Buddy;
use twinrail_protocol::limits::MAX_TRANSFER_RANGE;

/// Alignment of every buffer in bytes: a page, which direct I/O and registration ask for.
pub const ALIGNMENT: usize = 4096;

/// Size of the huge pages asked for, in bytes: what x86-64 and most arm64 kernels have.
const HUGE_PAGE: usize = 2 << 20;

/// The pages that an arena lies on. Fewer, larger ones spare the processor and a network card look-ups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Huge pages that the administrator has set aside (`vm.nr_hugepages`); where there are too few,
    /// [`Pages::Transparent`].
    Huge,
    /// Ordinary pages that the kernel may put together.
    Transparent,
}

/// Why there is no memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// The kernel gave none.
    #[error("no memory for an arena of {bytes} bytes ({errno}): ask for fewer `arena_bytes`, or raise the limit")]
    NoMapping {
        /// Bytes asked for.
        bytes: usize,
        /// What the kernel said.
        errno: rustix::io::Errno,
    },
    /// No buffer is that long.
    #[error("a buffer of {asked} bytes: the longest has {longest}; move the data in pieces, or raise `arena_bytes`")]
    TooLong {
        /// Bytes asked for.
        asked: usize,
        /// Bytes that the longest buffer of this arena may have.
        longest: usize,
    },
    /// The arena has no such piece left.
    #[error("no buffer of {asked} bytes is free ({free} of {total} are): drop some, or raise `arena_bytes`")]
    Exhausted {
        /// Bytes asked for.
        asked: usize,
        /// Bytes that are free, in whatever pieces.
        free: usize,
        /// Bytes in all.
        total: usize,
    },
}

/// A stretch of memory that buffers are cut from. Cheap to clone; the memory stays until the last clone and
/// the last buffer are gone.
#[derive(Clone)]
pub struct Arena {
    mapping: Arc<Mapping>,
}

struct Mapping {
    base: NonNull<u8>,
    length: usize,
    huge: bool,
    longest: usize,
    /// Taken to cut and to give back; commands reuse their buffers and never come here.
    buddy: Mutex<Buddy>,
    /// For each page: how many handles share the block that begins there.
    shares: Box<[AtomicU32]>,
}

// SAFETY: the mapping is memory like any other, tied to no thread; through a shared `Mapping` its bytes are
// reached only by the one `Buffer` that owns them (see `Buffer`).
unsafe impl Send for Mapping {}
// SAFETY: as above; what else is in it is `Sync` by itself.
unsafe impl Sync for Mapping {}

impl Arena {
    /// Maps an arena of at least `bytes` bytes, rounded up to whole blocks of its longest buffer.
    ///
    /// # Errors
    /// [`ArenaError::NoMapping`].
    pub fn new(bytes: usize, pages: Pages) -> Result<Self, ArenaError> {
        // The longest payload of a command, unless the arena is smaller than that.
        let most = *MAX_TRANSFER_RANGE.end() as usize;
        let longest = bytes.clamp(HUGE_PAGE, most).next_power_of_two();
        let length = bytes.max(1).checked_next_multiple_of(longest).unwrap_or(usize::MAX & !(longest - 1));
        let (base, huge) = map(length, pages).map_err(|errno| ArenaError::NoMapping { bytes: length, errno })?;
        let buddy = Mutex::new(Buddy::new(length, ALIGNMENT, longest));
        let shares = (0..length / ALIGNMENT).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { mapping: Arc::new(Mapping { base, length, huge, longest, buddy, shares }) })
    }

    /// Takes a buffer of `length` bytes, aligned to [`ALIGNMENT`]. Its content is whatever was there.
    ///
    /// # Errors
    /// [`ArenaError::TooLong`] or [`ArenaError::Exhausted`].
    pub fn take(&self, length: usize) -> Result<Buffer, ArenaError> {
        let mapping = &self.mapping;
        if length > mapping.longest {
            return Err(ArenaError::TooLong { asked: length, longest: mapping.longest });
        }
        let mut buddy = mapping.buddy.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(block) = buddy.take(length) else {
            let (free, total) = (buddy.free_bytes(), buddy.total_bytes());
            return Err(ArenaError::Exhausted { asked: length, free, total });
        };
        drop(buddy);
        mapping.shares[block / ALIGNMENT].store(1, Ordering::Relaxed);
        let share = Share { mapping: Arc::clone(mapping), block };
        Ok(Buffer { share, start: block, length })
    }

    /// Bytes in all.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.mapping.length
    }

    /// Bytes that no buffer has.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.mapping.buddy.lock().unwrap_or_else(PoisonError::into_inner).free_bytes()
    }

    /// Bytes that the longest buffer may have.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.mapping.longest
    }

    /// Whether it lies on huge pages set aside for it.
    #[must_use]
    pub fn is_huge(&self) -> bool {
        self.mapping.huge
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("total_bytes", &self.total_bytes()).field("huge", &self.is_huge()).finish()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are what was mapped, and no `Buffer` is left: each holds an `Arc` of
        // this (I3: a command in flight holds its buffer).
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// Maps `length` bytes; also answers whether on huge pages.
fn map(length: usize, pages: Pages) -> rustix::io::Result<(NonNull<u8>, bool)> {
    let (protection, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    if pages == Pages::Huge && length.is_multiple_of(HUGE_PAGE) {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory that exists.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), length, protection, private | MapFlags::HUGETLB) };
        match mapped.map(|base| NonNull::new(base.cast())) {
            Ok(Some(base)) => return Ok((base, true)),
            Ok(None) => {}
            Err(errno) => tracing::info!(%errno, length, "no huge pages set aside for the arena: transparent ones"),
        }
    }
    // SAFETY: as above.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, protection, private) }?;
    // SAFETY: the range is the mapping just made; the advice changes no content. A kernel without
    // transparent huge pages refuses it, which costs only speed.
    let _advice = unsafe { madvise(base, length, Advice::LinuxHugepage) };
    Ok((NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?, false))
}

/// A handle on a block. The last one to go gives the block back.
struct Share {
    mapping: Arc<Mapping>,
    /// Offset of the block's first byte.
    block: usize,
}

impl Share {
    fn count(&self) -> &AtomicU32 {
        &self.mapping.shares[self.block / ALIGNMENT]
    }

    fn another(&self) -> Self {
        self.count().fetch_add(1, Ordering::Relaxed);
        Self { mapping: Arc::clone(&self.mapping), block: self.block }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // As in `Arc`: what others did to the bytes happens before the block is anybody else's.
        if self.count().fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            self.mapping.buddy.lock().unwrap_or_else(PoisonError::into_inner).give_back(self.block);
        }
    }
}

/// A piece of an [`Arena`], owned: nobody else reads or writes its bytes. It goes back when it is dropped.
pub struct Buffer {
    share: Share,
    /// Offset of the first byte in the mapping.
    start: usize,
    length: usize,
}

impl Buffer {
    /// Cuts the buffer short; what is cut off is lost until the buffer is dropped. Does nothing when it is
    /// shorter already.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Divides the buffer into pieces for several commands.
    pub(crate) fn divide(self) -> Divided {
        let Self { share, start, length } = self;
        Divided { share, start, length, given: 0 }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `start..start + length` lies in the mapping, which lives as long as `share`; its bytes are
        // initialised (the kernel gave zeros); and they are this buffer's alone: `Arena::take` cuts from a
        // block that nobody else has, and `Divided::next` gives each byte of it out once.
        unsafe { slice::from_raw_parts(self.share.mapping.base.as_ptr().add(self.start), self.length) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.share.mapping.base.as_ptr().add(self.start), self.length) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {:#x})", self.length, self.start)
    }
}

/// A buffer that is given out in pieces, first to last, and put together again once all of them are gone.
/// It has no access to the bytes itself.
pub(crate) struct Divided {
    share: Share,
    start: usize,
    length: usize,
    /// Bytes that were given out.
    given: usize,
}

impl Divided {
    /// Bytes that were not given out yet.
    pub(crate) fn rest(&self) -> usize {
        self.length - self.given
    }

    /// The next piece, of at most `longest` bytes; nothing when all were given out.
    pub(crate) fn next(&mut self, longest: usize) -> Option<Buffer> {
        let length = self.rest().min(longest);
        if length == 0 {
            return None;
        }
        let start = self.start + self.given;
        self.given += length;
        Some(Buffer { share: self.share.another(), start, length })
    }

    /// The buffer again, when every piece is gone; else the pieces go on as they are (I3).
    pub(crate) fn whole(self) -> Result<Buffer, Self> {
        // What the holders of the pieces did happens before what the owner does now.
        if self.share.count().load(Ordering::Acquire) != 1 {
            return Err(self);
        }
        let Self { share, start, length, .. } = self;
        Ok(Buffer { share, start, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arena {
        Arena::new(4 << 20, Pages::Transparent).unwrap()
    }

    #[test]
    fn buffers_are_aligned_apart_and_given_back() {
        let arena = arena();
        let mut buffers: Vec<Buffer> = (0..64).map(|i| arena.take(512 + i * 1000).unwrap()).collect();
        for (i, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % ALIGNMENT), (512 + i * 1000, 0));
            buffer.fill(i as u8);
        }
        assert!(buffers.iter().enumerate().all(|(i, buffer)| buffer.iter().all(|&b| b == i as u8)));
        assert!(arena.free_bytes() < arena.total_bytes());
        drop(buffers);
        assert_eq!(arena.free_bytes(), arena.total_bytes());
    }

    #[test]
    fn what_it_cannot_give_is_said() {
        let arena = arena();
        assert_eq!((arena.total_bytes(), arena.longest()), (4 << 20, 4 << 20));
        assert_eq!(arena.take(5 << 20).unwrap_err(), ArenaError::TooLong { asked: 5 << 20, longest: 4 << 20 });
        let first = arena.take(3 << 20).unwrap();
        let error = arena.take(4096).unwrap_err();
        assert_eq!(error, ArenaError::Exhausted { asked: 4096, free: 0, total: 4 << 20 });
        drop(first);
        assert!(arena.take(4096).is_ok());
    }

    #[test]
    fn a_buffer_outlives_its_arena_and_crosses_threads() {
        let mut buffer = arena().take(8192).unwrap();
        buffer.fill(7);
        let sum = std::thread::spawn(move || buffer.iter().map(|&b| u32::from(b)).sum::<u32>()).join().unwrap();
        assert_eq!(sum, 7 * 8192);
    }

    #[test]
    fn i3_a_divided_buffer_is_whole_only_when_its_pieces_are_gone() {
        let arena = arena();
        let mut buffer = arena.take(10_000).unwrap();
        buffer.fill(1);
        let mut divided = buffer.divide();
        let mut pieces = Vec::new();
        while let Some(piece) = divided.next(4096) {
            pieces.push(piece);
        }
        assert_eq!(pieces.iter().map(|p| p.len()).collect::<Vec<_>>(), [4096, 4096, 1808]);
        pieces.iter_mut().enumerate().for_each(|(i, piece)| piece.fill(i as u8));
        let last = pieces.pop();
        drop(pieces);
        let divided = divided.whole().map(drop).unwrap_err();
        drop(last);
        let Ok(buffer) = divided.whole() else { panic!("all pieces are gone") };
        assert_eq!((buffer[0], buffer[4096], buffer[9999]), (0, 1, 2));
        drop(buffer);
        assert_eq!(arena.free_bytes(), arena.total_bytes());
    }

    #[test]
    fn i3_a_piece_keeps_the_block_when_its_owner_has_gone() {
        let arena = arena();
        let mut divided = arena.take(8192).unwrap().divide();
        let piece = divided.next(4096);
        drop(divided);
        assert!(arena.free_bytes() < arena.total_bytes(), "a device may still write there");
        drop(piece);
        assert_eq!(arena.free_bytes(), arena.total_bytes());
    }

    #[test]
    fn an_arena_asked_for_huge_pages_works_with_or_without_them() {
        let arena = Arena::new(4 << 20, Pages::Huge).unwrap();
        let mut buffer = arena.take(2 << 20).unwrap();
        buffer.fill(3);
        assert!(buffer.iter().all(|&b| b == 3));
    }
}
