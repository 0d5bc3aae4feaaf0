//! A volume in memory. Several reactors read and write it at once without a lock: the words are atomics,
//! and overlapping concurrent commands mix word by word, which is the caller's affair (as on a disk).
//!
//! The memory is taken when the volume is opened and given back when it is closed: a discard makes the range
//! read as zeros, no more.

use std::io;
use std::ops;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use twinrail_protocol::wire::{Extent, ExtentFlags};
use twinrail_protocol::{Range, crc32c_append};
use zerocopy::FromZeros;

use super::{HOLE, push_extent};
use crate::mapping::{LINE, Mapping, Pages, WORD, load, store};

/// Unit of BLOCK STATUS in bytes.
const CHUNK: u64 = 64 * 1024;
/// Bytes that are checksummed while they are still in the first-level cache. The checksum is at its best with
/// three lanes of 8 KiB.
const CRC_STEP: usize = 24 * 1024;

/// The bytes of a volume in memory.
///
/// Ranges are multiples of 512 bytes within the size (`Geometry::range` sees to it); offsets outside are a
/// bug of the caller and panic like an index.
pub struct MemoryStore {
    memory: Mapping,
    /// One bit for each chunk: written since it was last zeroed as a whole. A clear bit promises zeros.
    written: Box<[AtomicU64]>,
    size: u64,
    /// Held by those who zero and who tell extents, never by a read or a write.
    zeroing: Mutex<()>,
}

impl MemoryStore {
    /// `size` bytes of zeros, on pages of this kind.
    ///
    /// # Errors
    /// When the system doesn't have so much.
    pub fn new(size: u64, pages: Pages) -> io::Result<Self> {
        let length = usize::try_from(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let groups = usize::try_from(size.div_ceil(CHUNK).div_ceil(64)).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            memory: Mapping::new(length, pages)?,
            written: FromZeros::new_box_zeroed_with_elems(groups).map_err(|_| io::ErrorKind::OutOfMemory)?,
            size,
            zeroing: Mutex::new(()),
        })
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Copies the bytes from `offset` on to `out`.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        load(self.words(offset, out.len()), out);
    }

    /// Like [`Self::read`], and gives the CRC32C of what is now in `out`, in one pass over the memory.
    #[must_use]
    pub fn read_with_crc(&self, offset: u64, out: &mut [u8]) -> u32 {
        let words = self.words(offset, out.len());
        let steps = out.chunks_mut(CRC_STEP).zip(words.chunks(CRC_STEP / WORD));
        steps.fold(0, |crc, (out, words)| {
            load(words, out);
            crc32c_append(crc, out)
        })
    }

    /// Copies `data` to `offset`.
    pub fn write(&self, offset: u64, data: &[u8]) {
        store(self.words(offset, data.len()), data);
        // After the data, and always a read-modify-write, though the bit is mostly set already: its release
        // and the acquire in `zero` see to it that who clears the bit later also zeroes this data later.
        let (first, behind) = (offset / CHUNK, (offset + data.len() as u64).div_ceil(CHUNK));
        self.each_group(first..behind, |group, mask| {
            group.fetch_or(mask, Ordering::AcqRel);
        });
    }

    /// Makes the range read as zeros. What was never written isn't touched: it holds zeros.
    pub fn zero(&self, range: Range) {
        let _one_at_a_time = self.zeroing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut position = range.offset();
        while position < range.end() {
            let chunk = position / CHUNK;
            let (group, mask) = self.bit(chunk);
            let chunk_end = ((chunk + 1) * CHUNK).min(self.size);
            let end = range.end().min(chunk_end);
            let whole = position == chunk * CHUNK && end == chunk_end;
            // The bit first and the data after it: a write that comes between sets it again.
            let before = match whole {
                true => group.fetch_and(!mask, Ordering::AcqRel),
                false => group.load(Ordering::Acquire),
            };
            if before & mask != 0 {
                for word in self.words(position, (end - position) as usize) {
                    word.store(0, Ordering::Relaxed);
                }
            }
            position = end;
        }
    }

    /// What is written and what is a hole: at most `MAX_EXTENTS`, covering a prefix of the range.
    #[must_use]
    pub fn extents(&self, range: Range) -> Vec<Extent> {
        let _no_zeroing_halfway = self.zeroing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut extents = Vec::new();
        let mut position = range.offset();
        while position < range.end() {
            let chunk = position / CHUNK;
            let (group, mask) = self.bit(chunk);
            let end = range.end().min((chunk + 1) * CHUNK);
            let flags = if group.load(Ordering::Acquire) & mask == 0 { HOLE } else { ExtentFlags::DATA };
            if !push_extent(&mut extents, end - position, flags) {
                break;
            }
            position = end;
        }
        extents
    }

    /// Keeps those who zero waiting, for tests of who waits for them.
    #[cfg(test)]
    pub(super) fn hold_zeroing(&self) -> std::sync::MutexGuard<'_, ()> {
        self.zeroing.lock().unwrap()
    }

    fn words(&self, offset: u64, length: usize) -> &[AtomicU64] {
        debug_assert!(offset.is_multiple_of(WORD as u64) && length.is_multiple_of(LINE * WORD));
        &self.memory.words()[offset as usize / WORD..][..length / WORD]
    }

    fn bit(&self, chunk: u64) -> (&AtomicU64, u64) {
        (&self.written[(chunk / 64) as usize], 1 << (chunk % 64))
    }

    /// Calls `act` with each word of the bitmap that has bits of these chunks, and the mask of the bits.
    fn each_group(&self, chunks: ops::Range<u64>, act: impl Fn(&AtomicU64, u64)) {
        let mut chunk = chunks.start;
        while chunk < chunks.end {
            let end = chunks.end.min((chunk / 64 + 1) * 64);
            let mask = (u64::MAX >> (64 - (end - chunk))) << (chunk % 64);
            act(&self.written[(chunk / 64) as usize], mask);
            chunk = end;
        }
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("size", &self.size).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use twinrail_protocol::{Geometry, crc32c, limits};

    const SIZE: u64 = 70 * CHUNK + 512;

    fn range(offset: u64, length: u64) -> Range {
        let geometry = Geometry { size: SIZE, logical_block: 512, physical_block: 512, max_transfer: 1 << 20 };
        geometry.range(offset, length, limits::MAX_SPACE_RANGE).unwrap()
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i * 7 + i / 256) as u8 | 1).collect()
    }

    fn flags(extents: &[Extent]) -> Vec<(u64, bool)> {
        extents.iter().map(|e| (e.length, e.flags == HOLE)).collect()
    }

    #[test]
    fn what_was_written_is_read_and_its_checksum_is_right() {
        let store = MemoryStore::new(SIZE, Pages::Plain).unwrap();
        let data = pattern(3 * CRC_STEP + 512);
        store.write(SIZE - data.len() as u64, &data);
        let mut out = vec![0; data.len()];
        store.read(SIZE - data.len() as u64, &mut out);
        assert_eq!(out, data);
        out.fill(0);
        assert_eq!(store.read_with_crc(SIZE - data.len() as u64, &mut out), crc32c(&data));
        assert_eq!(out, data);
        let mut before = vec![9; 512];
        store.read(SIZE - data.len() as u64 - 512, &mut before);
        assert_eq!(before, [0; 512]);
    }

    #[test]
    fn extents_tell_holes_from_data_and_cover_the_range() {
        let store = MemoryStore::new(SIZE, Pages::Plain).unwrap();
        assert_eq!(flags(&store.extents(range(0, SIZE))), [(SIZE, true)]);
        store.write(63 * CHUNK + 512, &pattern(2 * CHUNK as usize));
        let all = [(63 * CHUNK, true), (3 * CHUNK, false), (4 * CHUNK + 512, true)];
        assert_eq!(flags(&store.extents(range(0, SIZE))), all);
        assert_eq!(flags(&store.extents(range(63 * CHUNK + 512, CHUNK))), [(CHUNK, false)]);

        // A part of a chunk stays data; a chunk as a whole, and the short one at the end, becomes a hole.
        store.zero(range(63 * CHUNK, CHUNK + 512));
        let some = [(64 * CHUNK, true), (2 * CHUNK, false), (4 * CHUNK + 512, true)];
        assert_eq!(flags(&store.extents(range(0, SIZE))), some);
        store.write(SIZE - 512, &pattern(512));
        store.zero(range(SIZE - 512, 512));
        assert_eq!(flags(&store.extents(range(0, SIZE))), some);

        let mut out = vec![1; CHUNK as usize + 1024];
        store.read(63 * CHUNK, &mut out);
        let (zeros, data) = out.split_at(CHUNK as usize + 512);
        assert!(zeros.iter().all(|&byte| byte == 0), "zeroed");
        assert_eq!(data, &pattern(2 * CHUNK as usize)[CHUNK as usize..][..512], "not zeroed");
    }

    #[test]
    fn extents_stop_at_what_a_reply_can_hold() {
        let size = 2 * CHUNK * limits::MAX_EXTENTS as u64;
        let store = MemoryStore::new(size, Pages::Plain).unwrap();
        for chunk in (0..size / CHUNK).step_by(2) {
            store.write(chunk * CHUNK, &pattern(512));
        }
        let geometry = Geometry { size, logical_block: 512, physical_block: 512, max_transfer: 1 << 20 };
        let extents = store.extents(geometry.range(0, size, u64::MAX).unwrap());
        assert_eq!(extents.len(), limits::MAX_EXTENTS);
        assert_eq!(extents.iter().map(|e| e.length).sum::<u64>(), CHUNK * limits::MAX_EXTENTS as u64);
    }

    #[test]
    fn what_was_never_written_takes_no_memory() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
            pages * rustix::param::page_size() as u64
        };
        let size = 8 << 30;
        let Ok(store) = MemoryStore::new(size, Pages::Plain) else {
            println!("skipped: this machine has less than 8 GiB");
            return;
        };
        let before = resident();
        let geometry = Geometry { size, logical_block: 512, physical_block: 512, max_transfer: 1 << 20 };
        store.zero(geometry.range(512, size - 512, size).unwrap());
        assert_eq!(flags(&store.extents(geometry.range(0, size, size).unwrap())), [(size, true)]);
        // Other tests of this process take some meanwhile.
        assert!(resident() - before.min(resident()) < size / 8);
    }

    #[test]
    fn memory_that_cannot_be_had_is_refused() {
        assert!(MemoryStore::new(u64::MAX / 2, Pages::Plain).is_err());
    }

    /// Block status must never call a chunk a hole that has data in it, whoever zeroes at the same time.
    #[test]
    fn a_hole_holds_zeros_after_writers_and_zeroers_raced() {
        let store = MemoryStore::new(SIZE, Pages::Plain).unwrap();
        for round in 0..2000 {
            let barrier = std::sync::Barrier::new(3);
            std::thread::scope(|scope| {
                for fill in [1u8, 2] {
                    let (store, barrier) = (&store, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        store.write(u64::from(fill) * 4096, &[fill; 4096]);
                    });
                }
                barrier.wait();
                store.zero(range(0, CHUNK));
            });
            let mut out = vec![0; CHUNK as usize];
            store.read(0, &mut out);
            let hole = store.extents(range(0, CHUNK))[0].flags == HOLE;
            assert!(!hole || out.iter().all(|&byte| byte == 0), "round {round}");
        }
    }
}
