//! Where a copy comes from.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use twinrail_initiator::{Arena, Buffer, ExtentFlags, blocking};
use twinrail_protocol::limits::MAX_SPACE_RANGE;

use super::pieces::{Content, Map, Piece, Pieces};
use crate::range::Range;
use crate::streams;
use crate::usage::usage;

/// A source that was opened. What it is cut into is settled later, when the volume is known.
pub(crate) enum Opened {
    /// A file or a block device, and its length in bytes.
    File { file: File, name: String, length: u64 },
    /// Something that can only be read in its order.
    Stream { stream: Box<dyn Read + Send>, name: String },
}

impl Opened {
    /// Opens a file, or stdin for `-`.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        if path.as_os_str() == "-" {
            streams::stdin_is_open()?;
            return Ok(Self::Stream { stream: Box::new(std::io::stdin()), name: "stdin".to_owned() });
        }
        let name = path.display().to_string();
        let failed = || format!("{name} can't be opened to read from");
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(usage(format!("{}: there is no such file; is its name spelled right?", failed())));
            }
            opened => opened.with_context(failed)?,
        };
        let kind = file.metadata().with_context(failed)?.file_type();
        if kind.is_dir() {
            return Err(usage(format!("{name} is a directory: name a file, a block device, or `-` for stdin")));
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Ok(Self::Stream { stream: Box::new(file), name });
        }
        let length = rustix::fs::seek(&file, SeekFrom::End(0)).with_context(failed)?;
        Ok(Self::File { file, name, length })
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::File { name, .. } | Self::Stream { name, .. } => name,
        }
    }

    /// Its length in bytes, if it has one.
    pub(crate) fn length(&self) -> Option<u64> {
        match self {
            Self::File { length, .. } => Some(*length),
            Self::Stream { .. } => None,
        }
    }
}

/// A source that is read by several threads, each piece by one of them.
pub(super) enum Source {
    File { file: File, name: String, pieces: Mutex<Pieces<FileMap>> },
    Stream(Mutex<Stream>),
    Volume { volume: blocking::Volume, offset: u64, pieces: Mutex<Pieces<VolumeMap>> },
}

/// How a source is cut, see [`Pieces`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Longest piece in bytes.
    pub(super) longest: u64,
    /// Block in bytes.
    pub(super) block: u64,
}

/// A piece, and its bytes unless they are known to be zeros.
pub(super) type Taken = (Piece, Option<Buffer>);

impl Source {
    /// All of a file of `length` bytes; without `holes` they are read like data.
    pub(super) fn file(file: File, name: String, length: u64, cut: Cut, holes: bool) -> anyhow::Result<Self> {
        let map = FileMap { file: file.try_clone()?, length, holes };
        let pieces = Mutex::new(Pieces::new(map, length, cut.longest, cut.block));
        Ok(Self::File { file, name, pieces })
    }

    /// A stream. `exactly` as many bytes are taken from it, or else all it has, which may be `most` bytes.
    pub(super) fn stream(
        stream: Box<dyn Read + Send>,
        name: String,
        cut: Cut,
        exactly: Option<u64>,
        most: u64,
    ) -> Self {
        Self::Stream(Mutex::new(Stream { stream, name, cut, exactly, most, position: 0, over: false }))
    }

    /// A range of a volume.
    pub(super) fn volume(volume: blocking::Volume, range: Range, cut: Cut) -> Self {
        let map = VolumeMap { volume: volume.clone(), range, known: Vec::new() };
        let pieces = Mutex::new(Pieces::new(map, range.length, cut.longest, cut.block));
        Self::Volume { volume, offset: range.offset, pieces }
    }

    /// The next piece, its bytes in a buffer of `arena`.
    pub(super) fn next(&self, arena: &Arena) -> anyhow::Result<Option<Taken>> {
        match self {
            Self::Stream(stream) => lock(stream).next(arena),
            Self::File { file, name, pieces } => {
                let Some(piece) = lock(pieces).next()? else { return Ok(None) };
                if piece.content == Content::Zeros {
                    return Ok(Some((piece, None)));
                }
                let mut buffer = arena.take(piece.length as usize)?;
                match file.read_exact_at(&mut buffer, piece.offset) {
                    Ok(()) => Ok(Some((piece, Some(buffer)))),
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                        bail!("{name} became shorter while it was read")
                    }
                    Err(error) => Err(error).with_context(|| format!("{name} can't be read at byte {}", piece.offset)),
                }
            }
            Self::Volume { volume, offset, pieces } => {
                let Some(piece) = lock(pieces).next()? else { return Ok(None) };
                if piece.content == Content::Zeros {
                    return Ok(Some((piece, None)));
                }
                let buffer = volume.buffer(piece.length as usize)?;
                let range = Range { offset: offset + piece.offset, length: piece.length };
                let (buffer, result) = volume.read(range.offset, buffer);
                result.with_context(|| range.to_string())?;
                Ok(Some((piece, Some(buffer))))
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The holes of a file, if they matter.
pub(super) struct FileMap {
    file: File,
    length: u64,
    holes: bool,
}

impl Map for FileMap {
    fn look(&mut self, offset: u64) -> anyhow::Result<(Content, u64)> {
        if !self.holes {
            return Ok((Content::Data, u64::MAX));
        }
        let data = match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) => data,
            // No data up to the end.
            Err(Errno::NXIO) => return Ok((Content::Zeros, self.length.max(offset + 1))),
            // The file system, or a device, doesn't know of holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((Content::Data, u64::MAX)),
            Err(errno) => return Err(errno).context("the file's holes can't be found"),
        };
        if data > offset {
            return Ok((Content::Zeros, data));
        }
        let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(offset)).context("the file's holes can't be found")?;
        Ok((Content::Data, hole.max(offset + 1)))
    }
}

/// The holes of a volume's range.
pub(super) struct VolumeMap {
    volume: blocking::Volume,
    range: Range,
    /// What the last look at the volume brought and was not asked for yet: ends and contents, last first.
    known: Vec<(u64, Content)>,
}

impl Map for VolumeMap {
    fn look(&mut self, offset: u64) -> anyhow::Result<(Content, u64)> {
        while self.known.pop_if(|(end, _)| *end <= offset).is_some() {}
        if self.known.is_empty() {
            let length = (self.range.length - offset).min(MAX_SPACE_RANGE);
            let extents = self.volume.block_status(self.range.offset + offset, length)?;
            let ends = extents.iter().scan(offset, |end, extent| {
                *end += extent.length;
                let zeros = extent.flags.has(ExtentFlags::ZERO);
                Some((*end, if zeros { Content::Zeros } else { Content::Data }))
            });
            self.known = ends.collect();
            self.known.reverse();
        }
        let (end, content) = self.known.last().copied().context("the volume tells nothing about a range of it")?;
        Ok((content, end))
    }
}

/// A source that is read in its order, by whoever holds its lock.
pub(super) struct Stream {
    stream: Box<dyn Read + Send>,
    name: String,
    cut: Cut,
    exactly: Option<u64>,
    most: u64,
    position: u64,
    over: bool,
}

impl Stream {
    fn next(&mut self, arena: &Arena) -> anyhow::Result<Option<Taken>> {
        let left = self.exactly.unwrap_or(self.most) - self.position;
        let wanted = left.min(self.cut.longest);
        if self.over {
            return Ok(None);
        }
        if wanted == 0 {
            self.over = true;
            if self.exactly.is_none() && self.read(&mut [0])? > 0 {
                bail!("{} has more than the {} bytes that fit; those were written", self.name, self.most);
            }
            return Ok(None);
        }
        let mut buffer = arena.take(wanted as usize)?;
        let length = self.read(&mut buffer)?;
        if length < buffer.len() {
            self.over = true;
            if let Some(exactly) = self.exactly {
                bail!("{} ended after {} bytes of {exactly}", self.name, self.position + length as u64);
            }
            if length == 0 {
                return Ok(None);
            }
            buffer.truncate(length);
        }
        let piece = Piece { offset: self.position, length: length as u64, content: Content::Data };
        self.position += piece.length;
        Ok(Some((piece, Some(buffer))))
    }

    /// Fills the buffer, unless the stream ends before.
    fn read(&mut self, buffer: &mut [u8]) -> anyhow::Result<usize> {
        let mut length = 0;
        while length < buffer.len() {
            match self.stream.read(&mut buffer[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).with_context(|| format!("{} can't be read", self.name)),
            }
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;
    use twinrail_initiator::Pages;

    const CUT: Cut = Cut { longest: 8192, block: 512 };

    fn stream(length: usize, exactly: Option<u64>, most: u64) -> Source {
        Source::stream(Box::new(Cursor::new(vec![7; length])), "stdin".into(), CUT, exactly, most)
    }

    fn taken(source: &Source) -> anyhow::Result<Vec<(Piece, Option<Vec<u8>>)>> {
        let arena = Arena::new(1 << 20, Pages::Transparent)?;
        let mut all = Vec::new();
        while let Some((piece, buffer)) = source.next(&arena)? {
            all.push((piece, buffer.map(|buffer| buffer.to_vec())));
        }
        Ok(all)
    }

    fn lengths(source: &Source) -> Vec<u64> {
        taken(source).unwrap().iter().map(|(piece, _)| piece.length).collect()
    }

    #[test]
    fn a_stream_is_taken_to_its_end_or_to_the_length_asked_for() {
        assert_eq!(lengths(&stream(20_000, None, 1 << 20)), [8192, 8192, 3616]);
        assert_eq!(lengths(&stream(8192, None, 8192)), [8192]);
        assert_eq!(lengths(&stream(20_000, Some(10_000), 1 << 20)), [8192, 1808]);
        assert_eq!(lengths(&stream(0, None, 8192)), [0; 0]);
    }

    #[test]
    fn a_stream_that_is_too_long_or_too_short_is_refused() {
        let error = taken(&stream(8193, None, 8192)).unwrap_err().to_string();
        assert!(error.contains("stdin has more than the 8192 bytes"), "{error}");
        let error = taken(&stream(9000, Some(10_000), 1 << 20)).unwrap_err().to_string();
        assert!(error.contains("ended after 9000 bytes of 10000"), "{error}");
    }

    #[test]
    fn the_holes_of_a_file_are_not_read() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 << 20).unwrap();
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        let source = Source::file(file.try_clone().unwrap(), "f".into(), 3 << 20, CUT, true).unwrap();
        let pieces = taken(&source).unwrap();
        let read: u64 = pieces.iter().filter(|(_, bytes)| bytes.is_some()).map(|(piece, _)| piece.length).sum();
        let ones = pieces.iter().flat_map(|(_, bytes)| bytes.iter().flatten()).filter(|&&byte| byte == 1).count();
        assert_eq!((pieces.iter().map(|(piece, _)| piece.length).sum::<u64>(), ones), (3 << 20, 4096));
        // A file system without holes has them as data.
        let holes = rustix::fs::seek(&file, SeekFrom::Data(0)).unwrap() > 0;
        assert!(!holes || read <= 64 << 10, "{read} bytes were read");
        let all = Source::file(file, "f".into(), 3 << 20, CUT, false).unwrap();
        assert!(taken(&all).unwrap().iter().all(|(_, bytes)| bytes.is_some()));
    }

    #[test]
    fn a_file_that_shrinks_is_named() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let source = Source::file(file, "image".into(), 8192, CUT, false).unwrap();
        assert!(taken(&source).unwrap_err().to_string().contains("image became shorter"));
    }
}
