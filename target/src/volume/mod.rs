//! Volumes: what is served, and the storage below it.
//!
//! [`file`] opens and locks a file or block device, [`memory`] keeps a volume in memory, [`keeper`] does
//! what may block for long (sync, fallocate, extents) on threads of the volume's own, so that a slow or
//! hung disk stalls no other volume. Plain reads and writes of files are the reactor's: it gives them to
//! its ring.

mod distinct;
mod error_log;
pub mod faults;
pub mod file;
mod identity;
pub mod keeper;
pub mod memory;
mod open_error;
pub mod spec;
#[cfg(test)]
mod testing;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use twinrail_protocol::wire::{Extent, ExtentFlags, VolumeFlags};
use twinrail_protocol::{Geometry, Status, VolumeId, limits};

pub use distinct::check_backings;
pub use error_log::ErrorLog;
pub use faults::{Access, Fault, Faults};
pub use file::{FileStore, OpenOptions};
pub use keeper::{Job, Keeper, Work};
pub use memory::MemoryStore;
pub use open_error::OpenError;
pub use spec::{Backing, SpecError, VolumeSpec};

/// Physical block in bytes of what has no disk below it: a page.
const PAGE: u32 = 4096;

/// A volume's place in the target's table; also in every reactor's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeIndex(pub usize);

/// What the bytes are kept in; shared by the volume and its keeper.
#[derive(Clone, Debug)]
pub enum Store {
    /// A file or a block device.
    File(Arc<FileStore>),
    /// Memory of this process; gone when it ends.
    Memory(Arc<MemoryStore>),
    /// Nothing: reads give zeros, writes are thrown away. For measuring.
    Null,
}

/// A volume that is served.
#[derive(Debug)]
pub struct Volume {
    /// Its place in the table.
    pub index: VolumeIndex,
    /// Its name.
    pub name: String,
    /// Its UUID, bound to the backing.
    pub id: VolumeId,
    /// Size at the start and block sizes.
    pub geometry: Geometry,
    /// What it can do.
    pub flags: VolumeFlags,
    /// Where the bytes are.
    pub store: Store,
    /// Does what may block.
    pub keeper: Keeper,
    /// Syncs that failed since the volume was opened (I5). Counted before any FLUSH is answered with it.
    pub failed_syncs: Arc<AtomicU64>,
    /// Faults to inject before a read or a change is given to storage; mostly there are none. The keeper
    /// sees to its own.
    pub faults: Option<Arc<Faults>>,
    /// Tells people of failed reads and writes.
    pub errors: Arc<ErrorLog>,
}

impl Volume {
    /// Opens what `spec` says, waiting if another process holds it (see [`file::open`]), and starts its keeper.
    ///
    /// # Errors
    /// Each names the volume or its path, and the remedy.
    pub fn open(index: VolumeIndex, spec: &VolumeSpec, give_up: &dyn Fn() -> bool) -> Result<Self, OpenError> {
        spec.check()?;
        let name = || spec.name.clone();
        let (store, geometry, flags, id) = match &spec.backing {
            Backing::File(path) => {
                let options = OpenOptions {
                    path: path.clone(),
                    size: spec.size,
                    read_only: spec.read_only,
                    write_through: spec.write_through,
                    logical_block: spec.logical_block,
                    lock_wait: spec.lock_wait,
                };
                let opened = file::open(&options, give_up)?;
                let geometry = Geometry {
                    size: opened.size,
                    logical_block: opened.logical_block,
                    physical_block: opened.physical_block,
                    max_transfer: spec.max_transfer,
                };
                (Store::File(Arc::new(opened.store)), geometry, opened.flags, opened.id)
            }
            backing @ (Backing::Memory | Backing::Null) => {
                let size = spec.size.unwrap_or_default();
                let logical_block = spec.logical_block.unwrap_or(*limits::LOGICAL_BLOCK_RANGE.start());
                let physical_block = logical_block.max(PAGE);
                let geometry = Geometry { size, logical_block, physical_block, max_transfer: spec.max_transfer };
                if size == 0 || !size.is_multiple_of(u64::from(logical_block)) {
                    return Err(OpenError::NotBlocks { of: name(), size, block: logical_block });
                }
                let store = match backing {
                    Backing::Memory => Store::Memory(Arc::new(
                        MemoryStore::new(size, spec.pages).map_err(|error| OpenError::NoMemory {
                            name: name(),
                            size,
                            error,
                        })?,
                    )),
                    _ => Store::Null,
                };
                let read_only = if spec.read_only { VolumeFlags::READ_ONLY } else { VolumeFlags::default() };
                let random = |source| OpenError::NoRandom { name: name(), source };
                let id = identity::random().map_err(random)?;
                (store, geometry, VolumeFlags::VOLATILE.with(read_only), id)
            }
        };
        if !geometry.is_valid() {
            return Err(OpenError::MaxTransfer { name: name(), max_transfer: spec.max_transfer });
        }
        let failed_syncs = Arc::new(AtomicU64::new(0));
        let errors = Arc::new(ErrorLog::new(&spec.name));
        let keeper = Keeper::start(keeper::Charge {
            name: name(),
            store: store.clone(),
            read_only: flags.has(VolumeFlags::READ_ONLY),
            write_through: flags.has(VolumeFlags::WRITE_THROUGH),
            logical_block: geometry.logical_block,
            failed_syncs: Arc::clone(&failed_syncs),
            faults: spec.faults.clone(),
            errors: Arc::clone(&errors),
        });
        let keeper = keeper.map_err(|source| OpenError::NoThread { name: name(), source })?;
        let (name, faults) = (name(), spec.faults.clone());
        Ok(Self { index, name, id, geometry, flags, store, keeper, failed_syncs, faults, errors })
    }

    /// Whether nobody may write.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.flags.has(VolumeFlags::READ_ONLY)
    }

    /// Whether a completed write is on stable storage without a flush.
    #[must_use]
    pub fn write_through(&self) -> bool {
        self.flags.has(VolumeFlags::WRITE_THROUGH)
    }

    /// Failed syncs so far.
    #[must_use]
    pub fn failed_syncs(&self) -> u64 {
        self.failed_syncs.load(Ordering::SeqCst)
    }

    /// Where the volume's bytes are, for people: a path, `memory` or `null`.
    #[must_use]
    pub fn backing(&self) -> String {
        match &self.store {
            Store::File(file) => file.path().display().to_string(),
            Store::Memory(_) => "memory".into(),
            Store::Null => "null".into(),
        }
    }
}

/// What a keeper answers.
#[derive(Debug)]
pub enum Answer {
    /// Done.
    Done,
    /// The extents asked for.
    Extents(Vec<Extent>),
    /// It failed. Already logged, with the errno, and counted.
    Failed(Status),
}

/// Not allocated, and reads as zeros.
const HOLE: ExtentFlags = ExtentFlags(ExtentFlags::HOLE.0 | ExtentFlags::ZERO.0);

/// Adds a stretch to the extents of an answer, to the last one if that is alike. Gives `false` when the
/// answer is full.
fn push_extent(extents: &mut Vec<Extent>, length: u64, flags: ExtentFlags) -> bool {
    let full = extents.len() == limits::MAX_EXTENTS;
    match extents.last_mut() {
        Some(last) if last.flags == flags => last.length += length,
        _ if full => return false,
        _ => extents.push(Extent { length, flags }),
    }
    true
}

/// The status for an error of the operating system: an errno never reaches the wire.
#[must_use]
pub fn status_of(error: &std::io::Error) -> Status {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Status::NO_SPACE,
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => Status::NOT_SUPPORTED,
        _ => Status::IO_ERROR,
    }
}
