//! A volume in a regular file or on a block device: opening, measuring and locking it. The bytes are moved
//! by the reactors' rings; what may block for long is done by the [keeper](super::keeper).

use std::fs::{File, FileType, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, StatxFlags};
use twinrail_protocol::VolumeId;
use twinrail_protocol::limits::LOGICAL_BLOCK_RANGE;
use twinrail_protocol::wire::VolumeFlags;

use super::identity;
use super::open_error::OpenError;

/// How often to see whether the lock is free. A dead predecessor's lock goes when the kernel has finished
/// its writes, and tells nobody.
const LOCK_POLL: Duration = Duration::from_millis(50);
/// Alignment that every device can do.
const PAGE: u32 = 4096;

/// An open and locked file or block device.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    path: PathBuf,
    direct: bool,
    block_device: bool,
    alignment: u32,
    size: u64,
}

/// What to open, and how.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// A regular file, a block device, or nothing yet if there is a size.
    pub path: PathBuf,
    /// Size of the volume in bytes; that of the backing when there is none.
    pub size: Option<u64>,
    /// Nobody writes: other read-only volumes may be on the same backing.
    pub read_only: bool,
    /// A completed write is on stable storage.
    pub write_through: bool,
    /// The logical block in bytes; the smallest that the backing can do when there is none.
    pub logical_block: Option<u32>,
    /// How long to wait for another holder.
    pub lock_wait: Duration,
}

/// What was opened.
#[derive(Debug)]
pub struct Opened {
    /// The open file.
    pub store: FileStore,
    /// Size of the volume in bytes, a multiple of the logical block.
    pub size: u64,
    /// Smallest addressable unit in bytes.
    pub logical_block: u32,
    /// The unit in bytes below which a write costs the storage a read.
    pub physical_block: u32,
    /// What it can do.
    pub flags: VolumeFlags,
    /// Bound to the backing.
    pub id: VolumeId,
}

impl FileStore {
    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file that carries all I/O, and the lock.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether reads and writes go past the page cache (O_DIRECT).
    #[must_use]
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// What buffers in memory must be aligned to, in bytes; 1 when the page cache takes any.
    #[must_use]
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Size of the volume in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl AsFd for FileStore {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Opens and locks what `options` say; makes a regular file that is missing if there is a size. While
/// another process holds the lock it waits, asking `give_up` now and then.
///
/// # Errors
/// Each names the path and the remedy.
pub fn open(options: &OpenOptions, give_up: &dyn Fn() -> bool) -> Result<Opened, OpenError> {
    let path = &options.path;
    let failed = |action| move |error| OpenError::from_io(path, options.read_only, action, error);
    let block_device = match (std::fs::metadata(path), options.size) {
        (Ok(metadata), _) => is_block_device(path, metadata.file_type())?,
        (Err(error), Some(size)) if error.kind() == io::ErrorKind::NotFound && !options.read_only => {
            create(path, size)?;
            false
        }
        (Err(error), _) => return Err(failed("look at")(error)),
    };

    let begun = Instant::now();
    let mut said = false;
    let (opening, metadata, measured) = loop {
        // Opened anew each time: meanwhile the path may name another file, and O_EXCL is asked for by opening.
        if let Some(opening) = Opening::new(options, block_device).map_err(failed("open"))? {
            let metadata = opening.file.metadata().map_err(failed("look at"))?;
            is_block_device(path, metadata.file_type())?;
            // What can never be served needn't wait; what the holder changed meanwhile is seen afterwards.
            measure(options, &opening, &metadata)?;
            if opening.lock(options.read_only).map_err(failed("lock"))? {
                let measured = measure(options, &opening, &metadata)?;
                break (opening, metadata, measured);
            }
        }
        if !said {
            tracing::info!(path = %path.display(), wait = ?options.lock_wait, "another process holds it: waiting");
            said = true;
        }
        if give_up() {
            return Err(OpenError::GaveUp { path: path.clone() });
        }
        let waited = begun.elapsed();
        let Some(left) = options.lock_wait.checked_sub(waited).filter(|left| !left.is_zero()) else {
            return Err(OpenError::InUse { path: path.clone(), waited });
        };
        std::thread::sleep(left.min(LOCK_POLL));
    };
    if said {
        tracing::info!(path = %path.display(), waited = ?begun.elapsed(), "no other process holds it any more");
    }

    let Measured { size, left_out, logical_block, physical_block } = measured;
    if left_out > 0 {
        let path = path.display();
        tracing::warn!(%path, left_out, logical_block, "bytes behind the last whole block are not served");
    }
    if opening.direct.is_none() {
        tracing::warn!(path = %path.display(), "no direct I/O here: the volume goes through the page cache");
    }
    let flags = flags(options, &opening, &metadata).map_err(failed("look at"))?;
    let id = identity_of(&opening, &metadata).map_err(failed("look at"))?;
    let alignment = opening.direct.map_or(1, |direct| direct.memory.max(direct.offset));
    let direct = opening.direct.is_some();
    let store = FileStore { file: opening.file, path: path.clone(), direct, block_device, alignment, size };
    Ok(Opened { store, size, logical_block, physical_block, flags, id })
}

fn is_block_device(path: &Path, kind: FileType) -> Result<bool, OpenError> {
    match kind {
        kind if kind.is_dir() => Err(OpenError::Directory { path: path.into() }),
        kind if kind.is_file() || kind.is_block_device() => Ok(kind.is_block_device()),
        _ => Err(OpenError::WrongKind { path: path.into() }),
    }
}

/// Checks a size that somebody asked for.
fn whole_blocks(path: &Path, size: u64, block: u32) -> Result<(), OpenError> {
    if size == 0 || !size.is_multiple_of(u64::from(block)) {
        return Err(OpenError::NotBlocks { of: path.display().to_string(), size, block });
    }
    Ok(())
}

/// Makes a sparse file that only its owner may read, and puts its name on stable storage.
fn create(path: &Path, size: u64) -> Result<(), OpenError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => OpenError::NoDirectory { path: path.into() },
        _ => OpenError::from_io(path, false, "make", error),
    };
    whole_blocks(path, size, *LOGICAL_BLOCK_RANGE.start())?;
    let file = match File::options().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => file,
        // Another target was faster; the lock sorts it out.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    let sized = file.set_len(size).and_then(|()| file.sync_all());
    if let Err(error) = sized {
        let _ = std::fs::remove_file(path);
        return Err(failed(error));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)?;
    tracing::info!(path = %path.display(), size, "made a sparse file");
    Ok(())
}

/// A file just opened, not locked yet.
struct Opening {
    file: File,
    block_device: bool,
    /// None: through the page cache.
    direct: Option<Alignment>,
}

/// What direct I/O needs, in bytes.
#[derive(Clone, Copy)]
struct Alignment {
    memory: u32,
    offset: u32,
}

impl Opening {
    /// Opens; gives nothing if another process claims the block device.
    fn new(options: &OpenOptions, block_device: bool) -> io::Result<Option<Self>> {
        // Only writers claim a block device: claims can't be shared.
        let claim = if block_device && !options.read_only { libc::O_EXCL } else { 0 };
        let sync = if options.write_through { libc::O_DSYNC } else { 0 };
        let open = |direct: i32| {
            let mut how = File::options();
            how.read(true).write(!options.read_only).custom_flags(claim | sync | direct).open(&options.path)
        };
        let opened = || match open(libc::O_DIRECT) {
            Ok(file) => match direct_alignment(&file, block_device)? {
                Some(direct) => Ok((file, Some(direct))),
                None => {
                    drop(file);
                    Ok((open(0)?, None))
                }
            },
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok((open(0)?, None)),
            Err(error) => Err(error),
        };
        match opened() {
            Ok((file, direct)) => Ok(Some(Self { file, block_device, direct })),
            Err(error) if block_device && error.raw_os_error() == Some(libc::EBUSY) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the lock; gives `false` if another process has it. It belongs to the open file, so that it
    /// stays until the last I/O on it has ended, whatever becomes of this process.
    fn lock(&self, shared: bool) -> io::Result<bool> {
        let how = if shared { FlockOperation::NonBlockingLockShared } else { FlockOperation::NonBlockingLockExclusive };
        match rustix::fs::flock(&self.file, how) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// What direct I/O on the file needs; nothing when its file system takes O_DIRECT but can't do it.
fn direct_alignment(file: &File, block_device: bool) -> io::Result<Option<Alignment>> {
    if let Ok(stat) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let found = Alignment { memory: stat.stx_dio_mem_align, offset: stat.stx_dio_offset_align };
        return Ok((found.memory > 0 && found.offset > 0).then_some(found));
    }
    if block_device {
        let block = rustix::fs::ioctl_blksszget(file)?;
        return Ok(Some(Alignment { memory: block, offset: block }));
    }
    // An older kernel, or a file system that doesn't say: try.
    for alignment in [*LOGICAL_BLOCK_RANGE.start(), PAGE] {
        let mut page = Box::new(Pages([0; 2 * PAGE as usize]));
        let (at, length) = (alignment as usize, alignment as usize);
        match file.read_at(&mut page.0[at..at + length], u64::from(alignment)) {
            Ok(_) => return Ok(Some(Alignment { memory: alignment, offset: alignment })),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

#[repr(align(4096))]
struct Pages([u8; 2 * PAGE as usize]);

/// Sizes in bytes.
struct Measured {
    size: u64,
    left_out: u64,
    logical_block: u32,
    physical_block: u32,
}

/// Size and blocks of what was opened, held against what was asked for.
fn measure(options: &OpenOptions, opening: &Opening, metadata: &Metadata) -> Result<Measured, OpenError> {
    let path = &options.path;
    let failed = |error| OpenError::from_io(path, options.read_only, "measure", error);
    let (held, smallest, physical) = sizes(opening, metadata).map_err(failed)?;
    let logical_block = options.logical_block.unwrap_or(smallest);
    if logical_block < smallest {
        return Err(OpenError::BlockTooSmall { path: path.clone(), block: logical_block, smallest });
    }
    if options.write_through && opening.direct.is_none() {
        return Err(OpenError::WriteThroughCached { path: path.clone() });
    }
    if let Some(asked) = options.size {
        whole_blocks(path, asked, logical_block)?;
        if asked > held {
            let block_device = opening.block_device;
            return Err(OpenError::LargerThanBacking { path: path.clone(), asked, size: held, block_device });
        }
    }
    let given = options.size.unwrap_or(held);
    let left_out = given % u64::from(logical_block);
    let size = given - left_out;
    if size == 0 {
        return Err(OpenError::TooSmall { path: path.clone(), size: held, block: logical_block });
    }
    Ok(Measured { size, left_out, logical_block, physical_block: physical.max(logical_block) })
}

/// What the backing holds, its smallest block, and its preferred one.
fn sizes(opening: &Opening, metadata: &Metadata) -> io::Result<(u64, u32, u32)> {
    let file = &opening.file;
    let smallest = *LOGICAL_BLOCK_RANGE.start();
    if opening.block_device {
        let held = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
        let logical = rustix::fs::ioctl_blksszget(file)?.max(smallest);
        return Ok((held, logical, rustix::fs::ioctl_blkpbszget(file)?));
    }
    let logical = opening.direct.map_or(smallest, |direct| direct.offset.max(smallest));
    // A network file system may prefer megabytes; a power of two it must be.
    let preferred = u32::try_from(metadata.blksize()).ok().filter(|size| size.is_power_of_two()).unwrap_or(PAGE);
    Ok((file.metadata()?.len(), logical, preferred))
}

fn flags(options: &OpenOptions, opening: &Opening, metadata: &Metadata) -> io::Result<VolumeFlags> {
    let device = if opening.block_device { metadata.rdev() } else { metadata.dev() };
    let directory = identity::sysfs(rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has no queue of its own.
    let queue = |name: &str| {
        let paths = [directory.join("queue").join(name), directory.join("../queue").join(name)];
        paths.iter().find_map(|path| identity::read(path))
    };
    let set = |is: bool, flag| if is { flag } else { VolumeFlags::default() };
    let frees_space = !options.read_only
        && match opening.block_device {
            // The kernel punches holes into a device that can write zeros by unmapping.
            true => queue("write_zeroes_max_bytes").is_some_and(|bytes| bytes != "0"),
            false => can_punch(&opening.file)?,
        };
    Ok(set(options.read_only, VolumeFlags::READ_ONLY)
        .with(set(options.write_through, VolumeFlags::WRITE_THROUGH))
        .with(set(queue("rotational").is_some_and(|is| is == "1"), VolumeFlags::ROTATIONAL))
        .with(set(frees_space, VolumeFlags::DISCARD)))
}

/// Whether the file system can punch holes: tried behind the end of the file, where there is nothing.
fn can_punch(file: &File) -> io::Result<bool> {
    let end = file.metadata()?.len().next_multiple_of(u64::from(PAGE));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, punch, end, u64::from(PAGE)).is_ok())
}

fn identity_of(opening: &Opening, metadata: &Metadata) -> io::Result<VolumeId> {
    if opening.block_device {
        let device = metadata.rdev();
        return Ok(identity::of_block_device(rustix::fs::major(device), rustix::fs::minor(device)));
    }
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(&opening.file, c"", AtFlags::EMPTY_PATH, mask)?;
    Ok(identity::of_file(&stat))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::testing::{Mount, loop_device};
    use std::cell::Cell;
    use std::os::unix::fs::PermissionsExt;
    use tempfile::TempDir;

    fn options(path: impl Into<PathBuf>) -> OpenOptions {
        OpenOptions {
            path: path.into(),
            size: None,
            read_only: false,
            write_through: false,
            logical_block: None,
            lock_wait: Duration::ZERO,
        }
    }

    fn open(options: &OpenOptions) -> Result<Opened, OpenError> {
        super::open(options, &|| false)
    }

    /// A file of `length` bytes in a directory of its own.
    fn file(length: u64) -> (TempDir, OpenOptions) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        File::create(&path).unwrap().set_len(length).unwrap();
        (directory, options(path))
    }

    fn message(options: &OpenOptions) -> String {
        let message = open(options).unwrap_err().to_string();
        assert!(message.contains(options.path.to_str().unwrap()), "names no path: {message}");
        message
    }

    #[test]
    fn a_missing_file_is_made_if_there_is_a_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new.img");
        let opened = open(&OpenOptions { size: Some(1 << 30), ..options(&path) }).unwrap();
        assert_eq!((opened.size, opened.store.size()), (1 << 30, 1 << 30));
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 1 << 30);
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        assert!(metadata.blocks() * 512 < 1 << 20, "not sparse");
        assert!(opened.flags.has(VolumeFlags::DISCARD));
        assert_eq!(opened.physical_block % opened.logical_block, 0);
        let alignment = opened.store.alignment();
        assert!(alignment.is_power_of_two() && opened.store.direct() == (alignment > 1), "{alignment}");
    }

    #[test]
    fn the_size_is_that_of_the_file_or_less_and_whole_blocks() {
        let (_directory, all) = file(4096 * 3 + 700);
        let opened = open(&OpenOptions { logical_block: Some(4096), ..all.clone() }).unwrap();
        assert_eq!((opened.size, opened.logical_block), (4096 * 3, 4096));
        drop(opened);
        let opened = open(&OpenOptions { size: Some(4096), ..all.clone() }).unwrap();
        assert_eq!(opened.size, 4096);
        drop(opened);
        let text = message(&OpenOptions { size: Some(16384), ..all.clone() });
        assert!(text.contains("truncate -s 16384"), "{text}");
        let text = message(&OpenOptions { size: Some(0), ..all.clone() });
        assert!(text.contains("size=0 is no multiple"), "{text}");
        let text = message(&OpenOptions { size: Some(4100), ..all });
        assert!(text.contains("size=4100 is no multiple"), "{text}");
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_the_remedy() {
        let (directory, small) = file(100);
        let text = message(&small);
        assert!(text.contains("holds 100 bytes, less than one block of"), "{text}");
        let text = message(&options(directory.path()));
        assert!(text.contains("is a directory"), "{text}");
        let text = message(&options(directory.path().join("none.img")));
        assert!(text.contains("doesn't exist") && text.contains("size="), "{text}");
        let text = message(&OpenOptions { size: Some(4096), ..options(directory.path().join("none/none.img")) });
        assert!(text.contains("its directory doesn't exist"), "{text}");
        let text = message(&options("/dev/null"));
        assert!(text.contains("neither a regular file nor a block device"), "{text}");
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        let text = OpenError::from_io(&small.path, false, "open", denied).to_string();
        assert!(text.contains("for reading and writing") && text.contains("read-only"), "{text}");
    }

    /// A pipe that nobody writes to would keep an open for reading waiting for ever.
    #[test]
    fn a_pipe_is_refused_without_opening_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let text = message(&OpenOptions { read_only: true, ..options(path) });
        assert!(text.contains("neither a regular file nor a block device"), "{text}");
    }

    #[test]
    fn a_second_writer_is_refused_and_readers_share() {
        let (_directory, writer) = file(4096);
        let reader = OpenOptions { read_only: true, ..writer.clone() };
        let first = open(&writer).unwrap();
        for second in [&writer, &reader] {
            let text = message(second);
            assert!(text.contains("in use by another process") && text.contains("fuser"), "{text}");
        }
        drop(first);
        let readers = (open(&reader).unwrap(), open(&reader).unwrap());
        assert!(readers.0.flags.has(VolumeFlags::READ_ONLY) && !readers.0.flags.has(VolumeFlags::DISCARD));
        assert!(matches!(open(&writer), Err(OpenError::InUse { .. })));
    }

    #[test]
    fn a_successor_gets_the_lock_once_it_is_free_and_sees_the_size_of_then() {
        let (_directory, writer) = file(4096);
        let patient = OpenOptions { lock_wait: Duration::from_secs(60), ..writer.clone() };
        let first = Cell::new(Some(open(&writer).unwrap()));
        let opened = super::open(&patient, &|| {
            if let Some(first) = first.take() {
                first.store.file().set_len(8192).unwrap();
            }
            false
        });
        assert_eq!(opened.unwrap().size, 8192);
    }

    #[test]
    fn a_target_that_stops_does_not_wait_on() {
        let (_directory, writer) = file(4096);
        let patient = OpenOptions { lock_wait: Duration::from_secs(600), ..writer.clone() };
        let _first = open(&writer).unwrap();
        assert!(matches!(super::open(&patient, &|| true), Err(OpenError::GaveUp { .. })));
    }

    #[test]
    fn the_uuid_is_the_file_s_and_not_the_name_s() {
        let (directory, writer) = file(4096);
        let first = open(&writer).unwrap().id;
        assert_eq!(open(&writer).unwrap().id, first);
        assert_eq!(first.0[6] >> 4, 8, "a UUID of version 8");
        let moved = directory.path().join("moved.img");
        std::fs::rename(&writer.path, &moved).unwrap();
        assert_eq!(open(&options(moved)).unwrap().id, first);
        let another = open(&OpenOptions { size: Some(4096), ..writer }).unwrap().id;
        assert_ne!(another, first);
    }

    #[test]
    fn a_block_that_direct_io_cannot_do_is_refused() {
        let (_directory, writer) = file(1 << 20);
        let opened = open(&writer).unwrap();
        let measured = Opening {
            file: opened.store.file().try_clone().unwrap(),
            block_device: false,
            direct: Some(Alignment { memory: 512, offset: 4096 }),
        };
        let metadata = measured.file.metadata().unwrap();
        assert_eq!(measure(&writer, &measured, &metadata).unwrap().logical_block, 4096);
        let small = OpenOptions { logical_block: Some(512), ..writer.clone() };
        let text = measure(&small, &measured, &metadata).err().unwrap().to_string();
        assert!(text.contains("ask for 4096"), "{text}");
        let cached = Opening { direct: None, ..measured };
        let text = measure(&OpenOptions { write_through: true, ..writer }, &cached, &metadata).err().unwrap();
        assert!(text.to_string().contains("no direct I/O"), "{text}");
    }

    #[test]
    fn a_read_only_file_system_serves_only_read_only_volumes() {
        let Some(mount) = Mount::tmpfs("size=1m") else { return };
        let path = mount.path().join("disk.img");
        File::create(&path).unwrap().set_len(65536).unwrap();
        mount.remount("ro");
        let text = message(&options(&path));
        assert!(text.contains("serve the volume with read-only"), "{text}");
        let opened = open(&OpenOptions { read_only: true, ..options(&path) }).unwrap();
        assert_eq!(opened.size, 65536);
    }

    #[test]
    fn a_block_device_has_one_writer() {
        let Some(device) = loop_device(1 << 20) else { return };
        let writer = options(device.path());
        let first = open(&writer).unwrap();
        assert!(first.store.is_block_device());
        assert_eq!((first.size, first.logical_block), (1 << 20, 512));
        let text = message(&writer);
        assert!(text.contains("in use by another process"), "{text}");
        let text = message(&OpenOptions { read_only: true, ..writer.clone() });
        assert!(text.contains("in use by another process"), "{text}");
        let id = first.id;
        let first = Cell::new(Some(first));
        let patient = OpenOptions { lock_wait: Duration::from_secs(60), ..writer.clone() };
        let second = super::open(&patient, &|| {
            first.take();
            false
        });
        assert_eq!(second.unwrap().id, id);
        let text = message(&OpenOptions { size: Some(1 << 30), ..writer });
        assert!(text.contains("can't grow"), "{text}");
    }
}
