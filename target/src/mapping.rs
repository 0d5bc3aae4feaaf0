//! Anonymous memory from the system, what reactors' arenas and memory volumes are made of. This room and the reactor's `ring` and `arena` are the only ones with unsafe code.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Size of a huge page in bytes.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Bytes of a word.
pub(crate) const WORD: usize = size_of::<u64>();
/// Words of a cache line: copies are whole lines.
pub(crate) const LINE: usize = 8;
/// How far ahead of a long copy memory is asked for, in bytes. Measured over 1 GiB: 10.8 to 15 GB/s.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 2048;
/// From which length on a copy to shared memory goes past the caches: they hold what others need, and reading
/// a line only to overwrite it costs as much as writing it. Measured over 1 GiB: 8.5 to 21 GB/s.
#[cfg(target_arch = "x86_64")]
const PAST_CACHES: usize = 32 * 1024;

/// What memory is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Small pages, which the kernel joins to huge ones as far as it can.
    #[default]
    Plain,
    /// Huge pages that an administrator has reserved. Whoever else counts on them goes without, so they are
    /// only taken when asked for.
    Reserved,
}

/// A private anonymous mapping, zeroed; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to nobody else, and what is reached through a shared reference to it is either
// an address or atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes, rounded up to huge pages. The pages are made now: a page fault on the data path
    /// would be paid by somebody's command (I8), and that of a huge page takes a millisecond and more.
    ///
    /// # Errors
    /// When the system doesn't have as much; for reserved pages with the remedy.
    pub(crate) fn new(length: usize, pages: Pages) -> io::Result<Self> {
        let length = length.max(1).checked_next_multiple_of(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = match pages {
            Pages::Plain => MapFlags::PRIVATE,
            Pages::Reserved => MapFlags::PRIVATE | MapFlags::POPULATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping, at an address of the kernel's choice, aliases nothing.
        let mapped = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, flags) };
        let address = match (mapped, pages) {
            (Ok(address), _) => address,
            (Err(errno), Pages::Plain) => return Err(errno.into()),
            (Err(errno), Pages::Reserved) => return Err(none_reserved(length, errno.into())),
        };
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { base, length };
        if pages == Pages::Plain {
            if let Err(error) = mapping.advise(Advice::LinuxHugepage) {
                tracing::debug!(%error, "the kernel makes no huge pages: memory may be slower");
            }
            match mapping.advise(Advice::LinuxPopulateWrite) {
                // Before 5.14 the kernel doesn't know it; then the pages are made when they are first touched.
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
                _ => {}
            }
        }
        Ok(mapping)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is this mapping, and neither advice changes its content.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.length, advice) }.map_err(io::Error::from)
    }

    /// First byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// The mapping as words that threads may share.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, initialised (zeros), alive as long as `self`; any bits are a valid word, and
        // whoever uses `words` reaches the memory in no other way (the arena never calls this).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.length / size_of::<AtomicU64>()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; borrows of it have ended, and an arena's ring, which works on it
        // by address, is dropped before it (field order in `Core`, I3).
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Why reserved huge pages can't be had, and what to do.
fn none_reserved(length: usize, error: io::Error) -> io::Error {
    let pages = length / HUGE_PAGE;
    io::Error::other(format!(
        "{pages} free huge pages of 2 MiB are needed ({error}): reserve enough of them for all reactors and memory \
         volumes (`sysctl vm.nr_hugepages=N`; /proc/meminfo tells how many are free), or leave `huge_pages` out"
    ))
}

/// Copies shared words to `out`, whole lines of them. A line that others write meanwhile is mixed word by word.
pub(crate) fn load(words: &[AtomicU64], out: &mut [u8]) {
    for (line, out) in words.as_chunks::<LINE>().0.iter().zip(out.as_chunks_mut::<{ LINE * WORD }>().0) {
        ask_for(line);
        // Unrolled by the arrays: the compiler neither merges nor unrolls atomic loads by itself.
        for (word, out) in line.iter().zip(out.as_chunks_mut::<WORD>().0) {
            *out = word.load(Ordering::Relaxed).to_ne_bytes();
        }
    }
}

/// Copies `data` to shared words, whole lines of them.
pub(crate) fn store(words: &[AtomicU64], data: &[u8]) {
    let lines = words.as_chunks::<LINE>().0.iter().zip(data.as_chunks::<{ LINE * WORD }>().0);
    #[cfg(target_arch = "x86_64")]
    if data.len() >= PAST_CACHES {
        use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
        for (line, data) in lines {
            for (word, data) in line.iter().zip(data.as_chunks::<WORD>().0) {
                // SAFETY: the address is an aligned word that may be changed through a shared reference; the
                // processor writes it in one piece, so that who reads it meanwhile sees the old or the new one.
                unsafe { _mm_stream_si64(word.as_ptr().cast(), i64::from_ne_bytes(*data)) };
            }
        }
        // Such stores aren't ordered by anything else: whoever is told of the write must see it (I4).
        // SAFETY: every x86-64 processor has it.
        unsafe { _mm_sfence() };
        return;
    }
    for (line, data) in lines {
        for (word, data) in line.iter().zip(data.as_chunks::<WORD>().0) {
            word.store(u64::from_ne_bytes(*data), Ordering::Relaxed);
        }
    }
}

/// Asks for the memory that a copy will come to soon.
#[inline]
fn ask_for(line: &[AtomicU64; LINE]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; the processor ignores an address behind the mapping.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast::<i8>().wrapping_add(AHEAD)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KiB of the process that are in reserved huge pages.
    fn reserved_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"));
        value.map_or(0, |value| value.trim().trim_end_matches(" kB").parse().unwrap())
    }

    #[test]
    fn reserved_huge_pages_are_left_to_others_unless_asked_for() {
        let plain = Mapping::new(HUGE_PAGE, Pages::Plain).unwrap();
        assert_eq!((plain.length(), reserved_kib()), (HUGE_PAGE, 0));
        match Mapping::new(HUGE_PAGE, Pages::Reserved) {
            Ok(_reserved) => assert_eq!(reserved_kib(), 2048),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("1 free huge pages") && text.contains("vm.nr_hugepages"), "{text}");
            }
        }
    }

    #[test]
    fn copies_of_every_length_come_back_the_same() {
        let mapping = Mapping::new(1, Pages::Plain).unwrap();
        for lines in [1, 2, 63, 64, 511, 512, 513, 4096] {
            let data: Vec<u8> = (0..lines * LINE * WORD).map(|i| (i * 7 + lines) as u8).collect();
            let words = &mapping.words()[LINE..][..lines * LINE];
            store(words, &data);
            let mut back = vec![0; data.len()];
            load(words, &mut back);
            assert!(back == data, "{lines} lines");
            assert_eq!(mapping.words()[0].load(Ordering::Relaxed), 0);
        }
    }
}
