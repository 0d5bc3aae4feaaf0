//! Why a volume can't be served, each with the remedy.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use twinrail_protocol::limits::MAX_TRANSFER_RANGE;

use super::spec::SpecError;

/// Why a volume can't be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// What was asked for contradicts itself.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// No such file.
    #[error(
        "{} doesn't exist: make it (truncate -s 10G {}), or give the volume a size= to have it made",
        .path.display(), .path.display()
    )]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The file was to be made in a directory that isn't there.
    #[error("{} can't be made, since its directory doesn't exist: make that first", .path.display())]
    NoDirectory {
        /// The path.
        path: PathBuf,
    },
    /// A directory.
    #[error("{} is a directory: name a file in it, or a block device", .path.display())]
    Directory {
        /// The path.
        path: PathBuf,
    },
    /// A pipe, a socket, a character device.
    #[error("{} is neither a regular file nor a block device: name one of these", .path.display())]
    WrongKind {
        /// The path.
        path: PathBuf,
    },
    /// No permission.
    #[error(
        "no permission to open {} for {}: change its mode or owner, or run the target as somebody who may{}",
        .path.display(), access(.read_only), or_read_only(.read_only)
    )]
    Permission {
        /// The path.
        path: PathBuf,
        /// Whether it was to be opened for reading only.
        read_only: bool,
    },
    /// The file system or the device is read-only.
    #[error(
        "{} can only be read (a read-only file system or device): serve the volume with read-only", .path.display()
    )]
    ReadOnly {
        /// The path.
        path: PathBuf,
    },
    /// Smaller than one block.
    #[error(
        "{} holds {size} bytes, less than one block of {block}: make it larger (truncate -s 10G {})",
        .path.display(), .path.display()
    )]
    TooSmall {
        /// The path.
        path: PathBuf,
        /// What it holds in bytes.
        size: u64,
        /// The logical block in bytes.
        block: u32,
    },
    /// Asked for more than there is.
    #[error(
        "size={asked} is more than the {size} bytes of {}: {}, or ask for less", .path.display(),
        if *.block_device { "it is a block device and can't grow".into() }
        else { format!("make it larger (truncate -s {asked} {})", .path.display()) }
    )]
    LargerThanBacking {
        /// The path.
        path: PathBuf,
        /// The size asked for in bytes.
        asked: u64,
        /// What it holds in bytes.
        size: u64,
        /// Whether it is a block device.
        block_device: bool,
    },
    /// The size isn't a number of blocks.
    #[error("size={size} is no multiple of the {block} bytes of a logical block of {of}: round it")]
    NotBlocks {
        /// The path, or the name of a volume in memory.
        of: String,
        /// The size asked for in bytes.
        size: u64,
        /// The logical block in bytes.
        block: u32,
    },
    /// The logical block is smaller than the backing can do.
    #[error(
        "logical-block={block} is less than the {smallest} bytes that {} can read or write at once: \
         ask for {smallest}, or leave the option out",
        .path.display()
    )]
    BlockTooSmall {
        /// The path.
        path: PathBuf,
        /// The logical block asked for in bytes.
        block: u32,
        /// The smallest possible one in bytes.
        smallest: u32,
    },
    /// The largest transfer breaks a limit.
    #[error(
        "volume {name}: max-transfer={max_transfer} must be from {} to {} bytes, and a multiple of the logical block",
        MAX_TRANSFER_RANGE.start(), MAX_TRANSFER_RANGE.end()
    )]
    MaxTransfer {
        /// The volume.
        name: String,
        /// What was asked for in bytes.
        max_transfer: u32,
    },
    /// Write-through without direct I/O.
    #[error(
        "{} can't be write-through, since its file system has no direct I/O: through the page cache one write may \
         take the error of another. Put the file elsewhere, or leave write-through out",
        .path.display()
    )]
    WriteThroughCached {
        /// The path.
        path: PathBuf,
    },
    /// Held by another target.
    #[error(
        "{} is still in use by another process after {:.1} s: end that one (fuser -v {} names it), or wait longer \
         with lock-wait-ms=",
        .path.display(), .waited.as_secs_f64(), .path.display()
    )]
    InUse {
        /// The path.
        path: PathBuf,
        /// How long this target waited.
        waited: Duration,
    },
    /// Two volumes of this target have one backing.
    #[error(
        "volumes {:?} and {:?} have the same backing, {}{}: give each one of its own, or serve both with read-only",
        .volumes[0], .volumes[1], .paths[0].display(), alias(.paths)
    )]
    SameBacking {
        /// Their names.
        volumes: [String; 2],
        /// What each of them calls it.
        paths: [PathBuf; 2],
    },
    /// The target was told to stop while it waited.
    #[error("stopped while waiting for {}", .path.display())]
    GaveUp {
        /// The path.
        path: PathBuf,
    },
    /// No such amount of memory.
    #[error("volume {name}: {size} bytes of memory can't be had: {error}; make it smaller, or keep it in a file")]
    NoMemory {
        /// The volume.
        name: String,
        /// The size asked for in bytes.
        size: u64,
        /// Why.
        error: io::Error,
    },
    /// No thread.
    #[error("volume {name}: no thread can be started for it: raise the limit of threads (ulimit -u, TasksMax=)")]
    NoThread {
        /// The volume.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// No random numbers.
    #[error("volume {name}: no random number can be had for its UUID")]
    NoRandom {
        /// The volume.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Anything else.
    #[error("can't {action} {}: {error}", .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed. Not its source: those are printed behind it, and this would be told twice.
        error: io::Error,
    },
}

fn alias([first, second]: &[PathBuf; 2]) -> String {
    if first == second { String::new() } else { format!(" (also called {})", second.display()) }
}

fn access(read_only: &bool) -> &'static str {
    if *read_only { "reading" } else { "reading and writing" }
}

fn or_read_only(read_only: &bool) -> &'static str {
    if *read_only { "" } else { "; or serve the volume with read-only" }
}

impl OpenError {
    /// What it means that a path couldn't be opened or made.
    pub(super) fn from_io(path: &Path, read_only: bool, action: &'static str, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT) => Self::Missing { path },
            Some(libc::EISDIR) => Self::Directory { path },
            Some(libc::EACCES | libc::EPERM) => Self::Permission { path, read_only },
            Some(libc::EROFS) => Self::ReadOnly { path },
            _ => Self::Io { path, action, error: source },
        }
    }
}
