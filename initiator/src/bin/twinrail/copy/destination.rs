//! Where a copy goes.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

use anyhow::{Context, anyhow, bail};
use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom};
use rustix::io::Errno;
use twinrail_initiator::{Buffer, ExtentFlags, ZeroOptions, blocking};
use twinrail_protocol::crc32c;

use crate::range::{Range, aligned};
use crate::usage::usage;
use crate::{output, streams};

/// A destination that several threads write to.
pub(super) enum Destination {
    Volume(VolumeEnd),
    /// A file that was empty, so that zeros are there unless something else is written.
    File {
        file: File,
        name: String,
        /// Where it was made, if it was: a new file is on stable storage when its name is too.
        directory: Option<File>,
    },
    /// A block device.
    Device {
        file: File,
        name: String,
    },
    /// Something that can only be written in its order.
    Stream(Stream),
}

/// A range of a volume that begins at `offset`.
pub(super) struct VolumeEnd {
    pub(super) volume: blocking::Volume,
    pub(super) offset: u64,
    pub(super) manner: Manner,
}

/// How data gets to a volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Holes and zeros of the source become zeros of the volume that need no data to be sent.
    pub(crate) sparse: bool,
    /// A source may end within a block, of which the rest stays as it is.
    pub(crate) fill_up: bool,
    /// Each write is on stable storage when it ends.
    pub(crate) fua: bool,
    /// Everything is on stable storage at the end.
    pub(crate) flush: bool,
}

impl Manner {
    /// That of `copy`.
    pub(crate) const COPY: Self = Self { sparse: true, fill_up: true, fua: false, flush: true };
}

/// What a destination must have now where a piece was put.
pub(super) struct Stored {
    /// Length in bytes: that of the piece, filled up to a whole block.
    pub(super) length: u64,
    pub(super) crc: u32,
}

impl Destination {
    /// Opens a file to write `length` bytes to, or stdout for `-`.
    pub(super) fn open(path: &Path, length: u64) -> anyhow::Result<Self> {
        if path.as_os_str() == "-" {
            streams::stdout_is_open()?;
            let stdout = std::io::stdout();
            if std::io::IsTerminal::is_terminal(&stdout) {
                return Err(usage("stdout is a terminal: name a file, or send the data to another program"));
            }
            return Ok(Self::Stream(Stream::new(Box::new(stdout))));
        }
        let name = path.display().to_string();
        let failed = || format!("{name} can't be opened to write to");
        let is_new = !path.exists();
        // Not truncated here: first it must be known that nobody else uses it.
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = match opened.map_err(|error| (error.kind(), error)) {
            Err((ErrorKind::IsADirectory, _)) => {
                return Err(usage(format!("{name} is a directory: name a file, a block device, or `-` for stdout")));
            }
            Err((ErrorKind::NotFound | ErrorKind::NotADirectory, _)) => {
                return Err(usage(format!("{}: there is no such directory; make it first", failed())));
            }
            opened => opened.map_err(|(_, error)| error).with_context(failed)?,
        };
        let kind = file.metadata().with_context(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Ok(Self::Stream(Stream::new(Box::new(file))));
        }
        // A target holds this lock on the file of a volume that it serves.
        // A file system without locks has its own error.
        if let Err(Errno::WOULDBLOCK) = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            bail!("{name} is locked by another program: does a target serve it as a volume?");
        }
        if kind.is_file() {
            let sized = file.set_len(0).and_then(|()| file.set_len(length));
            sized.with_context(|| format!("{name} can't be made {length} bytes long"))?;
            let directory = if is_new { Some(directory_of(path).with_context(failed)?) } else { None };
            return Ok(Self::File { file, name, directory });
        }
        let room = rustix::fs::seek(&file, SeekFrom::End(0)).with_context(failed)?;
        if length > room {
            return Err(usage(format!("{length} bytes don't fit onto {name}, which has {room}")));
        }
        Ok(Self::Device { file, name })
    }

    /// Puts data at `offset`, counted from the beginning of what is copied.
    pub(super) fn data(&self, offset: u64, buffer: Buffer) -> anyhow::Result<Stored> {
        let stored = Stored { length: buffer.len() as u64, crc: crc32c(&buffer) };
        match self {
            Self::Volume(end) => return end.data(offset, buffer, stored),
            Self::File { file, name, .. } | Self::Device { file, name } => {
                file.write_all_at(&buffer, offset).with_context(|| format!("{name} can't be written"))?;
            }
            Self::Stream(stream) => stream.write(offset, stored.length, |out| out.write_all(&buffer))?,
        }
        Ok(stored)
    }

    /// Puts zeros at `offset`, counted as above. Gives the bytes that were zeros before.
    pub(super) fn zeros(&self, offset: u64, length: u64) -> anyhow::Result<u64> {
        match self {
            Self::Volume(end) => end.zeros(offset, length),
            Self::File { .. } => Ok(length),
            Self::Device { file, name } => {
                zero_device(file, offset, length).with_context(|| format!("{name} can't be written")).map(|()| 0)
            }
            Self::Stream(stream) => {
                stream.write(offset, length, |out| {
                    for written in (0..length).step_by(ZEROS.len()) {
                        out.write_all(&ZEROS[..(length - written).min(ZEROS.len() as u64) as usize])?;
                    }
                    Ok(())
                })?;
                Ok(0)
            }
        }
    }

    /// Brings what was written to stable storage, where there is one.
    pub(super) fn finish(&self) -> anyhow::Result<()> {
        match self {
            Self::Volume(VolumeEnd { volume, manner: Manner { flush: true, .. }, .. }) => Ok(volume.flush()?),
            Self::Volume(_) => Ok(()),
            Self::File { file, name, directory } => {
                synced(file, name)?;
                directory.as_ref().map_or(Ok(()), |directory| synced(directory, &format!("the directory of {name}")))
            }
            Self::Device { file, name } => synced(file, name),
            Self::Stream(stream) => stream.flush(),
        }
    }

    /// A thread has failed: those that wait for what it should have written shall not.
    pub(super) fn give_up(&self) {
        if let Self::Stream(stream) = self {
            stream.break_off();
        }
    }

    /// Whether stdout has the data, so that nothing else may go there.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }
}

fn synced(file: &File, name: &str) -> anyhow::Result<()> {
    file.sync_all().with_context(|| format!("{name} can't be brought to its disk"))
}

/// The directory that really has the file: its path may be that of a symbolic link.
fn directory_of(path: &Path) -> std::io::Result<File> {
    let path = path.canonicalize()?;
    File::open(path.parent().unwrap_or(&path))
}

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl VolumeEnd {
    fn data(&self, offset: u64, buffer: Buffer, stored: Stored) -> anyhow::Result<Stored> {
        let geometry = self.volume.geometry();
        if stored.length.is_multiple_of(geometry.logical_block.into()) {
            self.write(offset, buffer)?;
            return Ok(stored);
        }
        if !self.manner.fill_up {
            // Only the end of a stream comes as far as this.
            let length = offset + stored.length;
            let refused = aligned(&format!("the input has {length} bytes, which"), length, &geometry);
            return match (refused, offset) {
                (Err(error), 1..) => Err(anyhow!("{error}; the first {offset} bytes were written")),
                (refused, _) => refused.map(|()| stored),
            };
        }
        self.fill_up(offset, &buffer, geometry.logical_block as usize)
    }

    fn write(&self, offset: u64, buffer: Buffer) -> anyhow::Result<()> {
        let range = Range { offset: self.offset + offset, length: buffer.len() as u64 };
        let (_buffer, result) = match self.manner.fua {
            true => self.volume.write_fua(range.offset, buffer),
            false => self.volume.write(range.offset, buffer),
        };
        result.with_context(|| range.to_string())
    }

    /// Writes bytes that end within a block, and leaves the rest of that block as it is.
    fn fill_up(&self, offset: u64, bytes: &[u8], block: usize) -> anyhow::Result<Stored> {
        let whole = bytes.len() - bytes.len() % block;
        let rest = Range { offset: self.offset + offset + whole as u64, length: block as u64 };
        let (last, result) = self.volume.read(rest.offset, self.volume.buffer(block)?);
        result.with_context(|| rest.to_string())?;
        let mut buffer = self.volume.buffer(whole + block)?;
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer[bytes.len()..].copy_from_slice(&last[bytes.len() - whole..]);
        let stored = Stored { length: buffer.len() as u64, crc: crc32c(&buffer) };
        self.write(offset, buffer)?;
        Ok(stored)
    }

    /// Makes a range read as zeros, leaving alone what does; gives the length of that.
    fn zeros(&self, offset: u64, length: u64) -> anyhow::Result<u64> {
        let mut range = Range { offset: self.offset + offset, length };
        let options = ZeroOptions { fua: self.manner.fua, keep_allocated: false };
        let extents = self.volume.block_status(range.offset, length).with_context(|| range.to_string())?;
        let mut left_alone = 0;
        for extent in extents {
            range.length = extent.length;
            match extent.flags.has(ExtentFlags::ZERO) {
                true => left_alone += extent.length,
                false => {
                    let zeroed = self.volume.write_zeroes(range.offset, range.length, options);
                    zeroed.with_context(|| range.to_string())?;
                }
            }
            range.offset = range.end();
        }
        Ok(left_alone)
    }
}

/// Makes a range of a block device read as zeros, by its own means if it has any.
fn zero_device(file: &File, offset: u64, length: u64) -> std::io::Result<()> {
    let how = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(file, how, offset, length).is_ok() {
        return Ok(());
    }
    for written in (0..length).step_by(ZEROS.len()) {
        let step = (length - written).min(ZEROS.len() as u64) as usize;
        file.write_all_at(&ZEROS[..step], offset + written)?;
    }
    Ok(())
}

/// Pieces that several threads have, written in their order.
pub(super) struct Stream {
    turn: Mutex<Turn>,
    changed: Condvar,
}

struct Turn {
    out: Box<dyn Write + Send>,
    /// Where the next piece begins.
    position: u64,
    broken: bool,
}

impl Stream {
    pub(super) fn new(out: Box<dyn Write + Send>) -> Self {
        Self { turn: Mutex::new(Turn { out, position: 0, broken: false }), changed: Condvar::new() }
    }

    /// Waits until it is the turn of the piece at `offset`, then writes it.
    fn write(
        &self,
        offset: u64,
        length: u64,
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> anyhow::Result<()> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        while turn.position != offset {
            if turn.broken {
                bail!("what comes before could not be written");
            }
            turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        output::written(write(&mut turn.out))?;
        turn.position += length;
        self.changed.notify_all();
        Ok(())
    }

    fn flush(&self) -> anyhow::Result<()> {
        output::written(self.turn.lock().unwrap_or_else(PoisonError::into_inner).out.flush())
    }

    fn break_off(&self) {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner).broken = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stream_gets_its_pieces_in_order() {
        let written = Written::default();
        let stream = Stream::new(Box::new(written.clone()));
        thread::scope(|scope| {
            for piece in (0..64u64).rev() {
                let stream = &stream;
                scope.spawn(move || stream.write(piece * 3, 3, |out| out.write_all(&[piece as u8; 3])).unwrap());
            }
        });
        let expected: Vec<u8> = (0..64).flat_map(|piece| [piece; 3]).collect();
        assert_eq!(*written.0.lock().unwrap(), expected);
    }

    #[test]
    fn nobody_waits_for_a_piece_that_will_never_come() {
        let stream = Stream::new(Box::new(Written::default()));
        thread::scope(|scope| {
            let waits = scope.spawn(|| stream.write(10, 5, |_| Ok(())));
            stream.break_off();
            assert!(waits.join().unwrap().is_err());
        });
    }

    #[test]
    fn a_new_files_directory_was_not_synced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let Destination::File { file, name, directory } = Destination::open(&path, 4096).unwrap() else {
            panic!("no file")
        };
        let inode = |metadata: std::fs::Metadata| std::os::unix::fs::MetadataExt::ino(&metadata);
        let found = inode(directory.as_ref().unwrap().metadata().unwrap());
        assert_eq!(found, inode(folder.path().metadata().unwrap()));
        Destination::File { file: file.try_clone().unwrap(), name: name.clone(), directory }.finish().unwrap();
        // One that can't be synced, which nobody notices who doesn't try.
        let (unsyncable, _other_end) = std::io::pipe().unwrap();
        let directory = Some(File::from(std::os::fd::OwnedFd::from(unsyncable)));
        let error = Destination::File { file, name, directory }.finish().unwrap_err().to_string();
        assert!(error.contains("the directory of"), "{error}");
        let Destination::File { directory, .. } = Destination::open(&path, 4096).unwrap() else { panic!("no file") };
        assert!(directory.is_none(), "the file was there already");
    }

    #[test]
    fn a_file_that_somebody_has_locked_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk0.img");
        std::fs::write(&path, "precious").unwrap();
        let served = File::open(&path).unwrap();
        rustix::fs::flock(&served, FlockOperation::LockShared).unwrap();
        let error = Destination::open(&path, 4096).err().unwrap().to_string();
        assert!(error.contains("disk0.img is locked"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        drop(served);
        let Destination::File { file, .. } = Destination::open(&path, 4096).unwrap() else { panic!("no file") };
        assert_eq!(file.metadata().unwrap().len(), 4096);
        assert_eq!(std::fs::read(&path).unwrap(), [0; 4096]);
    }
}
