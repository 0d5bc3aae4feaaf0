//! `verify`: a volume's checksums, or how it compares with a file. The target computes, so that only sums move.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, anyhow};
use serde::Serialize;
use twinrail_initiator::{VolumeUrl, blocking};
use twinrail_protocol::crc32c_append;

use crate::attach::AttachArguments;
use crate::copy::Opened;
use crate::crew;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::Progress;
use crate::range::{Range, RangeArguments};
use crate::sums::CHUNK;
use crate::usage::usage;

/// Chunks in progress: each occupies the target's storage, and a processor here if there is a file.
const WORKERS: usize = 4;

/// How much of a file is read at once in bytes.
const READ: usize = 1 << 20;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// File to compare the volume with, from its beginning
    file: Option<PathBuf>,
    #[command(flatten)]
    range: RangeArguments,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    attach: AttachArguments,
}

/// The checksum of a stretch.
#[derive(Serialize)]
struct Sum {
    offset_bytes: u64,
    bytes: u64,
    crc32c: String,
}

#[derive(Serialize)]
struct Report {
    url: String,
    offset_bytes: u64,
    bytes: u64,
    /// Of all of it.
    crc32c: String,
    /// Of each 64 MiB.
    chunks: Vec<Sum>,
}

#[derive(Serialize)]
struct Comparison {
    url: String,
    file: String,
    offset_bytes: u64,
    bytes: u64,
    identical: bool,
    /// The first block of the volume that differs.
    first_difference: Option<Block>,
}

#[derive(Clone, Copy, Serialize)]
struct Block {
    offset_bytes: u64,
    bytes: u64,
}

pub(crate) fn run(arguments: &Arguments, interrupt: &Interrupt) -> anyhow::Result<()> {
    let Arguments { url, file, range, json, attach } = arguments;
    let opened = match file.as_deref().map(Opened::open).transpose()? {
        Some(Opened::Stream { name, .. }) => {
            return Err(usage(format!("{name} can't be compared: name a file that can be read at any place")));
        }
        opened => opened,
    };
    let volume = attach.to_read(url)?;
    interrupt.finish_first([volume.as_async().session()]);
    let Some(Opened::File { file, name, length }) = opened else {
        let range = range.in_whole_blocks(&volume.geometry())?;
        let report = sums(&volume, url, range, *json, interrupt).with_context(|| url.to_string())?;
        volume.close()?;
        return output::tell(&report, *json);
    };
    let range = compared(&volume, *range, &name, length)?;
    let first_difference = compare(&volume, range, &file, &name, *json, interrupt);
    let first_difference = first_difference.with_context(|| url.to_string())?;
    volume.close()?;
    let comparison = Comparison {
        url: url.to_string(),
        file: name,
        offset_bytes: range.offset,
        bytes: range.length,
        identical: first_difference.is_none(),
        first_difference,
    };
    if *json {
        output::print_json(&comparison)?;
    }
    match first_difference {
        Some(Block { offset_bytes: at, bytes }) => Err(anyhow!(
            "{url} and {} differ: the first block that does is at byte {at} of the volume, {bytes} bytes long",
            comparison.file
        )),
        None if *json => Ok(()),
        None => output::print(&format!("{} bytes of {url} and {} are identical", range.length, comparison.file)),
    }
}

/// The range that is compared with a file of `length` bytes.
fn compared(volume: &blocking::Volume, asked: RangeArguments, name: &str, length: u64) -> anyhow::Result<Range> {
    let room = RangeArguments { length: None, ..asked }.starting_at_a_block(&volume.geometry())?;
    if length == 0 {
        return Err(usage(format!("{name} is empty: there is nothing to compare")));
    }
    match asked.length {
        Some(asked) if asked > length => {
            Err(usage(format!("--length {asked} is more than the {length} bytes that {name} has")))
        }
        Some(_) => asked.starting_at_a_block(&volume.geometry()),
        None if length > room.length => Err(anyhow!(
            "{name} has {length} bytes, but the volume only {} from byte {}: they can't be identical",
            room.length,
            room.offset
        )),
        None => Ok(Range { length, ..room }),
    }
}

/// Chunks of a range, ending where a chunk of the volume ends.
fn chunks(range: Range) -> impl Iterator<Item = Range> {
    let mut position = range.offset;
    std::iter::from_fn(move || {
        let (offset, end) = (position, range.end().min(position - position % CHUNK + CHUNK));
        position = end;
        (offset < end).then_some(Range { offset, length: end - offset })
    })
}

fn sums(
    volume: &blocking::Volume,
    url: &VolumeUrl,
    range: Range,
    script: bool,
    interrupt: &Interrupt,
) -> anyhow::Result<Report> {
    let progress = Progress::begin("verifying", Some(range.length), script);
    let found = Mutex::new(Vec::new());
    let sum = |(): &mut (), chunk: Range| {
        let crc = volume.verify(chunk.offset, chunk.length).with_context(|| chunk.to_string())?;
        found.lock().unwrap_or_else(PoisonError::into_inner).push((chunk.offset, chunk.length, crc));
        progress.add(chunk.length);
        Ok(())
    };
    crew::each(WORKERS, interrupt, chunks(range), || (), sum)?;
    drop(progress);
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_unstable();
    let whole = found.iter().fold(0, |crc, &(_, length, next)| crc32c::crc32c_combine(crc, next, length as usize));
    let sum = |(offset_bytes, bytes, crc)| Sum { offset_bytes, bytes, crc32c: format!("{crc:08x}") };
    Ok(Report {
        url: url.to_string(),
        offset_bytes: range.offset,
        bytes: range.length,
        crc32c: format!("{whole:08x}"),
        chunks: found.into_iter().map(sum).collect(),
    })
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{:>16} {:>16}  crc32c", "offset", "bytes")?;
        for Sum { offset_bytes, bytes, crc32c } in &self.chunks {
            writeln!(f, "{offset_bytes:>16} {bytes:>16}  {crc32c}")?;
        }
        write!(f, "{:>16} {:>16}  {}", "all", self.bytes, self.crc32c)
    }
}

/// The first block of the volume that differs from the file, if there is one.
fn compare(
    volume: &blocking::Volume,
    range: Range,
    file: &File,
    name: &str,
    script: bool,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<Block>> {
    let block = u64::from(volume.geometry().logical_block);
    let tail = range.length % block;
    let whole = Range { length: range.length - tail, ..range };
    let differs = |stretch: Range, buffer: &mut [u8]| -> anyhow::Result<bool> {
        let here = crc_of_file(file, stretch.offset - range.offset, stretch.length, buffer);
        let here = here.with_context(|| format!("{name} can't be read"))?;
        let there = volume.verify(stretch.offset, stretch.length).with_context(|| stretch.to_string())?;
        Ok(there != here)
    };
    let progress = Progress::begin("comparing", Some(range.length), script);
    let first = AtomicU64::new(u64::MAX);
    // What lies behind a difference doesn't matter any more.
    let matter = chunks(whole).take_while(|chunk| chunk.offset < first.load(Ordering::Relaxed));
    let compare = |buffer: &mut Vec<u8>, chunk: Range| {
        if differs(chunk, buffer)? {
            first.fetch_min(chunk.offset, Ordering::Relaxed);
        }
        progress.add(chunk.length);
        Ok(())
    };
    crew::each(WORKERS, interrupt, matter, || vec![0; READ], compare)?;
    let first = first.into_inner();
    if let Some(chunk) = chunks(whole).find(|chunk| chunk.offset == first) {
        let mut buffer = vec![0; READ];
        let found = narrow(chunk, block, |half| {
            interrupt.check()?;
            differs(half, &mut buffer)
        })?;
        return Ok(Some(found));
    }
    if tail == 0 {
        return Ok(None);
    }
    // The file ends within a block: this one is read.
    let (there, result) = volume.read(whole.end(), volume.buffer(block as usize)?);
    result?;
    let mut here = vec![0; tail as usize];
    file.read_exact_at(&mut here, whole.length).with_context(|| format!("{name} can't be read"))?;
    let last = Block { offset_bytes: whole.end(), bytes: tail };
    Ok((there[..tail as usize] != here[..]).then_some(last))
}

/// The first block that differs in a stretch that does.
fn narrow(
    mut stretch: Range,
    block: u64,
    mut differs: impl FnMut(Range) -> anyhow::Result<bool>,
) -> anyhow::Result<Block> {
    while stretch.length > block {
        let half = Range { length: (stretch.length / block).div_ceil(2) * block, ..stretch };
        stretch = match differs(half)? {
            true => half,
            false => Range { offset: half.end(), length: stretch.length - half.length },
        };
    }
    Ok(Block { offset_bytes: stretch.offset, bytes: stretch.length })
}

fn crc_of_file(file: &File, mut offset: u64, mut length: u64, buffer: &mut [u8]) -> std::io::Result<u32> {
    let mut crc = 0;
    while length > 0 {
        let step = length.min(buffer.len() as u64);
        let bytes = &mut buffer[..step as usize];
        file.read_exact_at(bytes, offset)?;
        crc = crc32c_append(crc, bytes);
        offset += step;
        length -= step;
    }
    Ok(crc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_end_where_the_volumes_do() {
        let cut: Vec<_> = chunks(Range { offset: CHUNK - 4096, length: CHUNK + 8192 }).collect();
        let expected = [(CHUNK - 4096, 4096), (CHUNK, CHUNK), (2 * CHUNK, 4096)];
        assert_eq!(cut, expected.map(|(offset, length)| Range { offset, length }));
        assert_eq!(chunks(Range { offset: 0, length: 0 }).count(), 0);
    }

    #[test]
    fn a_file_is_summed_up_in_parts() {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
        file.write_all(&content).unwrap();
        let crc = crc_of_file(&file, 100, 9_000, &mut [0; 512]).unwrap();
        assert_eq!(crc, twinrail_protocol::crc32c(&content[100..9_100]));
        assert!(crc_of_file(&file, 100, 9_901, &mut [0; 512]).is_err());
    }

    proptest! {
        #[test]
        fn the_first_block_that_differs_is_found(
            blocks in 1u64..200,
            different in prop::collection::btree_set(0u64..200, 1..5),
        ) {
            let different: Vec<u64> = different.into_iter().filter(|&block| block < blocks).collect();
            prop_assume!(!different.is_empty());
            let mut asked = 0;
            let found = narrow(Range { offset: 8192, length: blocks * 512 }, 512, |half| {
                asked += 1;
                Ok(different.iter().any(|block| (half.offset..half.end()).contains(&(8192 + block * 512))))
            });
            let found = found.unwrap();
            prop_assert_eq!((found.offset_bytes, found.bytes), (8192 + different[0] * 512, 512));
            prop_assert!(asked <= 8);
        }
    }
}
