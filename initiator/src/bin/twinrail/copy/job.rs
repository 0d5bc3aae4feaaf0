//! A copy that was prepared: both ends are open, and it is known that it fits.

use std::path::Path;
use std::time::Instant;

use twinrail_initiator::{VolumeUrl, blocking};

use super::destination::{Destination, Manner, VolumeEnd};
use super::engine::{self, Copied, LONGEST_PIECE, Plan};
use super::source::{Cut, Opened, Source};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::range::{Range, RangeArguments};
use crate::usage::usage;

pub(crate) struct Job {
    source: Source,
    destination: Destination,
    /// The volume that is written, or read if none is.
    volume: blocking::Volume,
    /// The volume that is read, if another one is written.
    other: Option<blocking::Volume>,
    /// First byte on the volume.
    pub(crate) offset: u64,
    /// Number of bytes, if it is known.
    total: Option<u64>,
    find_zeros: bool,
}

/// What a job has done.
pub(crate) struct Done {
    pub(crate) copied: Copied,
    /// Time until everything was on stable storage, in seconds.
    pub(crate) seconds: f64,
}

impl Job {
    /// From a file or a stream to the volume, `asked` being the range on the volume.
    pub(crate) fn to_volume(
        opened: Opened,
        volume: blocking::Volume,
        url: &VolumeUrl,
        asked: RangeArguments,
        manner: Manner,
    ) -> anyhow::Result<Self> {
        let geometry = volume.geometry();
        let room = RangeArguments { length: None, ..asked }.starting_at_a_block(&geometry)?;
        let total = fits(opened.name(), opened.length(), asked.length, url, room, geometry.size)?;
        let cut = cut_for(&[&volume]);
        let source = match opened {
            Opened::File { file, name, length } => {
                Source::file(file, name, total.unwrap_or(length), cut, manner.sparse)?
            }
            Opened::Stream { stream, name } => Source::stream(stream, name, cut, asked.length, room.length),
        };
        let offset = room.offset;
        let destination = Destination::Volume(VolumeEnd { volume: volume.clone(), offset, manner });
        Ok(Self { source, destination, volume, other: None, offset, total, find_zeros: manner.sparse })
    }

    /// From a range of the volume to a file, or `-`.
    pub(crate) fn from_volume(volume: blocking::Volume, range: Range, path: &Path) -> anyhow::Result<Self> {
        let destination = Destination::open(path, range.length)?;
        let source = Source::volume(volume.clone(), range, cut_for(&[&volume]));
        let (offset, total) = (range.offset, Some(range.length));
        Ok(Self { source, destination, volume, other: None, offset, total, find_zeros: true })
    }

    /// From one volume to another, to the same place.
    pub(crate) fn between(
        other: blocking::Volume,
        range: Range,
        from: &VolumeUrl,
        volume: blocking::Volume,
        to: &VolumeUrl,
    ) -> anyhow::Result<Self> {
        let geometry = volume.geometry();
        let room = RangeArguments { offset: range.offset, length: None }.starting_at_a_block(&geometry)?;
        let total = fits(&from.to_string(), Some(range.length), None, to, room, geometry.size)?;
        let source = Source::volume(other.clone(), range, cut_for(&[&other, &volume]));
        let offset = range.offset;
        let destination = Destination::Volume(VolumeEnd { volume: volume.clone(), offset, manner: Manner::COPY });
        Ok(Self { source, destination, volume, other: Some(other), offset, total, find_zeros: true })
    }

    /// Copies, with a progress bar unless a `script` is the caller. With `verify` the target's checksums are
    /// compared with those of what was copied. Then the sessions are ended in order.
    pub(crate) fn run(
        &self,
        what: &'static str,
        script: bool,
        verify: bool,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Done> {
        let volumes = [Some(&self.volume), self.other.as_ref()];
        interrupt.finish_first(volumes.into_iter().flatten().map(|volume| volume.as_async().session()));
        let volume = self.volume.as_async();
        let plan = Plan {
            arena: volume.arena(),
            depth: volume.depth(),
            block: self.volume.geometry().logical_block.into(),
            find_zeros: self.find_zeros,
            sums_from: verify.then_some(self.offset),
        };
        let begun = Instant::now();
        let progress = Progress::begin(what, self.total, script);
        let mut copied = engine::copy(&self.source, &self.destination, &plan, interrupt, &progress)?;
        drop(progress);
        let seconds = begun.elapsed().as_secs_f64();
        if verify {
            let progress = Progress::begin("verifying", Some(copied.bytes), script);
            std::mem::take(&mut copied.sums).check(&self.volume, interrupt, &progress)?;
        }
        self.volume.close()?;
        self.other.as_ref().map_or(Ok(()), blocking::Volume::close)?;
        Ok(Done { copied, seconds })
    }

    /// Whether the data goes to stdout, or something like it.
    pub(crate) fn is_to_stream(&self) -> bool {
        self.destination.is_stream()
    }

    /// Bytes of the destination volume behind what was copied.
    pub(crate) fn untouched(&self, copied: u64) -> u64 {
        match self.destination {
            Destination::Volume(_) => self.volume.geometry().size.saturating_sub(self.offset + copied),
            _ => 0,
        }
    }
}

/// How a source is cut for these volumes.
fn cut_for(volumes: &[&blocking::Volume]) -> Cut {
    let (mut longest, mut block) = (LONGEST_PIECE, 1);
    for geometry in volumes.iter().map(|volume| volume.geometry()) {
        longest = longest.min(geometry.max_transfer.into());
        block = block.max(u64::from(geometry.logical_block));
    }
    Cut { longest: longest - longest % block, block }
}

/// The number of bytes to copy, if it is known; refused if the source doesn't have them or the volume has no
/// room for them.
fn fits(
    name: &str,
    has: Option<u64>,
    asked: Option<u64>,
    url: &VolumeUrl,
    room: Range,
    size: u64,
) -> anyhow::Result<Option<u64>> {
    if let (Some(has), Some(asked)) = (has, asked)
        && asked > has
    {
        return Err(usage(format!("--length {asked} is more than the {has} bytes that {name} has")));
    }
    let brings = asked.or(has);
    if let Some(brings) = brings.filter(|&brings| brings > room.length) {
        let Range { offset, length } = room;
        let fit = if offset > 0 { format!(", {length} of them from --offset {offset} on") } else { String::new() };
        return Err(usage(format!(
            "{brings} bytes of {name} don't fit onto {url}, which has {size} bytes{fit}; nothing was written"
        )));
    }
    Ok(brings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Code, code};

    fn fit(has: Option<u64>, asked: Option<u64>) -> anyhow::Result<Option<u64>> {
        let url: VolumeUrl = "twinrail://shelf/d".parse()?;
        fits("image", has, asked, &url, Range { offset: 4096, length: 8192 }, 12288)
    }

    #[test]
    fn a_source_that_does_not_fit_is_refused_with_both_sizes() {
        let error = fit(Some(8193), None).unwrap_err();
        assert_eq!(code(&error), Code::Usage);
        let text = error.to_string();
        assert!(
            ["8193 bytes of image", "12288 bytes", "8192 of them"].iter().all(|part| text.contains(part)),
            "{text}"
        );
        assert!(fit(None, Some(8193)).is_err());
    }

    #[test]
    fn more_than_a_source_has_is_refused() {
        let text = fit(Some(100), Some(200)).unwrap_err().to_string();
        assert!(text.contains("--length 200") && text.contains("100 bytes that image has"), "{text}");
    }

    #[test]
    fn a_smaller_source_is_fine_and_a_stream_has_no_length() {
        assert_eq!(fit(Some(8192), None).unwrap(), Some(8192));
        assert_eq!(fit(Some(8193), Some(100)).unwrap(), Some(100));
        assert_eq!(fit(None, None).unwrap(), None);
    }
}
