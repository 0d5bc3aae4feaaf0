//! The copying itself: pieces from a source to a destination, many at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use twinrail_initiator::Arena;

use super::destination::{Destination, Stored};
use super::source::Source;
use crate::crew;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::sums::Sums;

/// Pieces in flight. With pieces of 1 MiB they keep 10 Gbit/s busy over 10 ms.
const WORKERS: usize = 16;

/// Longest piece in bytes: from there on longer requests gain nothing.
pub(super) const LONGEST_PIECE: u64 = 1 << 20;

/// What goes into a copy besides its two ends.
pub(super) struct Plan<'a> {
    /// Memory for the data on its way.
    pub(super) arena: &'a Arena,
    /// Requests that may be in flight.
    pub(super) depth: usize,
    /// Block of the volume in bytes.
    pub(super) block: u64,
    /// Whether pieces that turn out to be zeros are treated like holes.
    pub(super) find_zeros: bool,
    /// First byte of the volume that is read or written, if checksums are to be kept.
    pub(super) sums_from: Option<u64>,
}

/// What was copied, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    /// All of it.
    pub(crate) bytes: u64,
    /// What was read and written.
    pub(crate) data: u64,
    /// Zeros that were there already.
    pub(crate) left_alone: u64,
    /// Checksums of what the volume must have now.
    pub(crate) sums: Sums,
}

/// Copies all pieces and brings them to stable storage.
pub(super) fn copy(
    source: &Source,
    destination: &Destination,
    plan: &Plan<'_>,
    interrupt: &Interrupt,
    progress: &Progress,
) -> anyhow::Result<Copied> {
    let (bytes, data, left_alone) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let sums = Mutex::new(Sums::default());
    let step = || -> anyhow::Result<bool> {
        let Some((piece, buffer)) = source.next(plan.arena)? else { return Ok(false) };
        let add = |add: &dyn Fn(&mut Sums, u64)| {
            if let Some(from) = plan.sums_from {
                add(&mut sums.lock().unwrap_or_else(PoisonError::into_inner), from + piece.offset);
            }
        };
        let seek_zeros = plan.find_zeros && piece.length.is_multiple_of(plan.block);
        match buffer.filter(|buffer| !(seek_zeros && is_zeros(buffer))) {
            Some(buffer) => {
                let Stored { length, crc } = destination.data(piece.offset, buffer)?;
                data.fetch_add(piece.length, Ordering::Relaxed);
                add(&|sums, offset| sums.data(offset, length, crc));
            }
            None => {
                left_alone.fetch_add(destination.zeros(piece.offset, piece.length)?, Ordering::Relaxed);
                add(&|sums, offset| sums.zeros(offset, piece.length));
            }
        }
        bytes.fetch_add(piece.length, Ordering::Relaxed);
        progress.add(piece.length);
        Ok(true)
    };
    crew::work(WORKERS.min(plan.depth), interrupt, || (), |()| step(), || destination.give_up())?;
    destination.finish()?;
    Ok(Copied {
        bytes: bytes.into_inner(),
        data: data.into_inner(),
        left_alone: left_alone.into_inner(),
        sums: sums.into_inner().unwrap_or_else(PoisonError::into_inner),
    })
}

fn is_zeros(bytes: &[u8]) -> bool {
    // Each chunk is a loop without a branch, which the compiler makes wide.
    bytes.chunks(4096).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::source::Cut;
    use std::io::{Cursor, Read};
    use twinrail_initiator::Pages;

    #[test]
    fn zeros_are_found() {
        let mut bytes = vec![0; 10_000];
        assert!(is_zeros(&bytes) && is_zeros(&[]));
        bytes[9_999] = 1;
        assert!(!is_zeros(&bytes));
    }

    fn from_stream(content: &[u8]) -> (tempfile::TempDir, std::path::PathBuf, anyhow::Result<Copied>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy");
        let arena = Arena::new(1 << 20, Pages::Transparent).unwrap();
        let stream: Box<dyn Read + Send> = Box::new(Cursor::new(content.to_vec()));
        let source = Source::stream(stream, "s".into(), Cut { longest: 65536, block: 512 }, None, 1 << 30);
        let destination = Destination::open(&path, content.len() as u64).unwrap();
        let plan = Plan { arena: &arena, depth: 16, block: 512, find_zeros: true, sums_from: Some(0) };
        let progress = Progress::begin("copying", None, true);
        let copied = copy(&source, &destination, &plan, &Interrupt::default(), &progress);
        (folder, path, copied)
    }

    #[test]
    fn many_threads_copy_every_byte_once() {
        let mut content: Vec<u8> = (0..3_000_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        content[65536..4 * 65536].fill(0);
        let (_folder, path, copied) = from_stream(&content);
        let copied = copied.unwrap();
        assert!(std::fs::read(path).unwrap() == content, "the copy differs");
        assert_eq!((copied.bytes, copied.data, copied.left_alone), (3_000_001, 3_000_001 - 3 * 65536, 3 * 65536));
        let mut expected = Sums::default();
        expected.data(0, content.len() as u64, twinrail_protocol::crc32c(&content));
        assert_eq!(format!("{:?}", copied.sums), format!("{expected:?}"));
    }
}
