//! An attached volume for threads that may block: the same calls, without `async`.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use twinrail_protocol::Geometry;
use twinrail_protocol::wire::Extent;

use crate::arena::{ArenaError, Buffer};
use crate::connect::ConnectError;
use crate::error::Error;
use crate::options::Options;
use crate::url::VolumeUrl;
use crate::volume::ZeroOptions;
use crate::volume_info::VolumeInfo;

/// An attached volume whose calls block. Cheap to clone, and many threads may use it at once. Each call does
/// what the one of the same name does in [`crate::Volume`].
#[derive(Clone, Debug)]
pub struct Volume {
    volume: crate::Volume,
}

impl Volume {
    /// Attaches a volume.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(url: &VolumeUrl, options: Options) -> Result<Self, ConnectError> {
        Ok(Self { volume: crate::Volume::connect_blocking(url, options)? })
    }

    /// The same volume for asynchronous callers.
    #[must_use]
    pub fn as_async(&self) -> &crate::Volume {
        &self.volume
    }

    /// Takes a buffer of `length` bytes from the arena.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn buffer(&self, length: usize) -> Result<Buffer, ArenaError> {
        self.volume.buffer(length)
    }

    /// Reads `buffer.len()` bytes at `offset`.
    pub fn read(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        block_on(self.volume.read(offset, buffer))
    }

    /// Writes the buffer at `offset`.
    pub fn write(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        block_on(self.volume.write(offset, buffer))
    }

    /// Writes the buffer at `offset`; done when it is on stable storage.
    pub fn write_fua(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        block_on(self.volume.write_fua(offset, buffer))
    }

    /// Compares with the buffer's first half; if equal, writes its second half.
    pub fn compare_and_write(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        block_on(self.volume.compare_and_write(offset, buffer))
    }

    /// Puts every completed write on stable storage.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn flush(&self) -> Result<(), Error> {
        block_on(self.volume.flush())
    }

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<(), Error> {
        block_on(self.volume.write_zeroes(offset, length, options))
    }

    /// Says that the content of a range is no longer needed.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        block_on(self.volume.discard(offset, length))
    }

    /// The extents of a range.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>, Error> {
        block_on(self.volume.block_status(offset, length))
    }

    /// The CRC32C of a range, computed at the target.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn verify(&self, offset: u64, length: u64) -> Result<u32, Error> {
        block_on(self.volume.verify(offset, length))
    }

    /// Asks the target again what the volume is.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn identify(&self) -> Result<VolumeInfo, Error> {
        block_on(self.volume.identify())
    }

    /// How long a command without work for the storage takes.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn ping(&self) -> Result<Duration, Error> {
        block_on(self.volume.ping())
    }

    /// Reads into memory of the caller's, by way of the arena.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn read_at(&self, offset: u64, destination: &mut [u8]) -> Result<(), Error> {
        block_on(self.volume.read_at(offset, destination))
    }

    /// Writes from memory of the caller's, by way of the arena.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn write_at(&self, offset: u64, source: &[u8]) -> Result<(), Error> {
        block_on(self.volume.write_at(offset, source))
    }

    /// Ends the session in order.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn close(&self) -> Result<(), Error> {
        block_on(self.volume.close())
    }

    /// What the target told at the attach, with the current size.
    #[must_use]
    pub fn info(&self) -> VolumeInfo {
        self.volume.info()
    }

    /// Size, block sizes and longest transfer in bytes, as they are now.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }
}

/// Wakes a thread that is parked in [`block_on`].
struct Unpark {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::Release) {
            self.thread.unpark();
        }
    }
}

impl Unpark {
    fn new() -> Arc<Self> {
        Arc::new(Self { thread: thread::current(), woken: AtomicBool::new(false) })
    }
}

/// Runs a future to its end on this thread.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    // One for each thread, so that a call allocates nothing; a call within a call has its own.
    thread_local! {
        static SPARE: RefCell<Option<Arc<Unpark>>> = const { RefCell::new(None) };
    }
    let unpark = SPARE.with_borrow_mut(Option::take).unwrap_or_else(Unpark::new);
    let waker = Waker::from(Arc::clone(&unpark));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let output = loop {
        unpark.woken.store(false, Ordering::Relaxed);
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            break output;
        }
        while !unpark.woken.load(Ordering::Acquire) {
            thread::park();
        }
    };
    SPARE.with_borrow_mut(|spare| *spare = Some(unpark));
    output
}
