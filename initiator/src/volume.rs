//! An attached volume for asynchronous callers, of any runtime: all it needs is a waker.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use twinrail_protocol::limits::{MAX_EXTENTS, MAX_SPACE_RANGE, MAX_VERIFY_RANGE};
use twinrail_protocol::wire::{AttachMode, Extent, Handshake, Payload};
use twinrail_protocol::{Flags, Geometry, Opcode, SessionId, Status, crc32c};

use crate::arena::{Arena, ArenaError, Buffer};
use crate::cells::{CellId, Flying, Outcome};
use crate::connect::ConnectError;
use crate::error::{Error, PathEnd, Rejection};
use crate::lane::Lanes;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::request::{Request, check_range};
use crate::session::Session;
use crate::url::VolumeUrl;
use crate::volume_info::VolumeInfo;

/// Pieces of one long read or write that fly at the same time: enough to keep a connection full while the
/// next piece is prepared, few enough to leave cells to others.
const PIECES: usize = 8;

/// Longest buffer in bytes that [`Volume::read_at`] and [`Volume::write_at`] copy through.
const STAGING_BYTES: usize = 4 << 20;

/// Bytes of the answers to BLOCK STATUS and IDENTIFY at most.
const ANSWER_BYTES: usize = MAX_EXTENTS * Extent::LEN;

/// How WRITE ZEROES is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroOptions {
    /// Answer only when it is on stable storage.
    pub fua: bool,
    /// Leave the range allocated, so that later writes can't run out of space.
    pub keep_allocated: bool,
}

/// An attached volume. Cheap to clone; all clones share one session, which ends with the last of them.
///
/// Reads and writes own their buffer while they last and give it back with their result. A future that is
/// dropped leaves its commands in flight: what they change is as uncertain as if the connection had been lost,
/// and their memory goes back to the arena when nothing touches it any more (I3). To use the volume from
/// threads that may block, see [`crate::blocking::Volume`].
///
/// A FLUSH covers every write of the session that had completed when it was called, by whichever clone and on
/// whichever queue.
#[derive(Clone, Debug)]
pub struct Volume {
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    lanes: Arc<Lanes>,
    arena: Arena,
    metrics: Metrics,
    close_timeout_ms: u64,
}

impl Drop for Core {
    fn drop(&mut self) {
        // The threads see to it; nobody waits.
        self.lanes.close(self.close_timeout_ms);
    }
}

impl Volume {
    /// Attaches a volume. The handshake blocks a thread made for it, not the caller's.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(url: &VolumeUrl, options: Options) -> Result<Self, ConnectError> {
        #[derive(Default)]
        struct Handover {
            result: Option<Result<Volume, ConnectError>>,
            waker: Option<Waker>,
        }
        let handover = Arc::new(Mutex::new(Handover::default()));
        let (url, there) = (url.clone(), Arc::clone(&handover));
        let dial = move || {
            let result = Self::connect_blocking(&url, options);
            let mut handover = there.lock().unwrap_or_else(PoisonError::into_inner);
            handover.result = Some(result);
            handover.waker.take().map(Waker::wake)
        };
        thread::Builder::new()
            .name("twinrail-dial".to_owned())
            .spawn(dial)
            .map_err(|source| ConnectError::System { what: "no thread for dialing", source })?;
        poll_fn(|context| {
            let mut handover = handover.lock().unwrap_or_else(PoisonError::into_inner);
            match handover.result.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    handover.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// As [`Self::connect`], for a thread that may block.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect_blocking(url: &VolumeUrl, options: Options) -> Result<Self, ConnectError> {
        options.check()?;
        let metrics = match &options.metrics {
            Some(metrics) => metrics.clone(),
            None => Metrics::new().map_err(|error| ConnectError::System {
                what: "the metrics can't be registered",
                source: std::io::Error::other(error.to_string()),
            })?,
        };
        let arena = Arena::new(options.arena_bytes, options.pages)?;
        let (session, queues) = Session::attach_polled(url, &options, &metrics)?;
        let lanes = Arc::new(Lanes::new(session, &queues));
        // From here on, going out of scope closes what there is.
        let core = Arc::new(Core { lanes, arena, metrics, close_timeout_ms: options.close_timeout_ms });
        let mut failure = None;
        for (index, queue) in queues.into_iter().enumerate() {
            let lanes = Arc::clone(&core.lanes);
            let name = format!("twinrail-{index}");
            let thread = thread::Builder::new().name(name).spawn(move || lanes.run(index, queue));
            if let Err(source) = thread {
                core.lanes.thread_ends();
                failure = Some(ConnectError::System { what: "no thread for a queue", source });
            }
        }
        match failure {
            None => Ok(Self { core }),
            Some(error) => Err(error),
        }
    }

    /// Takes a buffer of `length` bytes from the arena. Reuse it: taking one is cheap, but not free.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn buffer(&self, length: usize) -> Result<Buffer, ArenaError> {
        self.core.arena.take(length)
    }

    /// Reads `buffer.len()` bytes at `offset`. After an error the buffer's content is anything.
    pub async fn read(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        self.transfer(Opcode::READ, Flags::NONE, offset, buffer).await
    }

    /// Writes the buffer at `offset`. Done, every later read sees it; only a flush makes it durable.
    pub async fn write(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        self.transfer(Opcode::WRITE, Flags::NONE, offset, buffer).await
    }

    /// Writes the buffer at `offset`; done when it is on stable storage.
    pub async fn write_fua(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        self.transfer(Opcode::WRITE, Flags::FUA, offset, buffer).await
    }

    /// Compares the volume at `offset` with the buffer's first half and, if they are equal, writes its second
    /// half there; atomic against every other command. Half a buffer is at most half of
    /// [`Geometry::max_transfer`].
    pub async fn compare_and_write(&self, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        let whole = buffer.len();
        let request = Request::compare_and_write(offset, buffer);
        if let Err(rejection) = request.check(&self.geometry(), self.session().read_only()) {
            return (returned(request), Err(rejection.into()));
        }
        let mut divided = returned(request).divide();
        let outcome = match divided.next(whole) {
            Some(piece) => self.command(Request::compare_and_write(offset, piece)).await,
            None => Err(Rejection::Empty { opcode: Opcode::COMPARE_AND_WRITE, offset }.into()),
        };
        (whole_again(divided), outcome.map(|_| ()))
    }

    /// Puts every write of the session that has completed on stable storage.
    ///
    /// # Errors
    /// See [`Error`]; after [`Status::FLUSH_FAILED`] the volume must be attached anew.
    pub async fn flush(&self) -> Result<(), Error> {
        self.command(Request::flush()).await.map(|_| ())
    }

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// See [`Error`]; a range of more than 1 GiB may be done in part.
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<(), Error> {
        let fua = if options.fua { Flags::FUA } else { Flags::NONE };
        let keep = if options.keep_allocated { Flags::NO_UNMAP } else { Flags::NONE };
        self.change_space(offset, length, |at, piece| Request::write_zeroes(at, piece).with_flags(fua.with(keep))).await
    }

    /// Says that the content of a range is no longer needed. What it reads as from then on is open.
    ///
    /// # Errors
    /// See [`Error`]; a range of more than 1 GiB may be done in part.
    pub async fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.change_space(offset, length, Request::discard).await
    }

    async fn change_space(&self, offset: u64, length: u64, request: impl Fn(u64, u64) -> Request) -> Result<(), Error> {
        let opcode = request(offset, length).opcode;
        self.check(opcode, offset, length)?;
        for (at, piece) in pieces(offset, length, MAX_SPACE_RANGE) {
            self.command(request(at, piece)).await?;
        }
        Ok(())
    }

    /// The extents of a range, in order, together as long as it is; neighbours differ.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>, Error> {
        const OPCODE: Opcode = Opcode::BLOCK_STATUS;
        self.check(OPCODE, offset, length)?;
        let mut extents = Vec::<Extent>::new();
        let mut buffer = self.buffer(ANSWER_BYTES)?;
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let asked = (end - at).min(MAX_SPACE_RANGE);
            let (back, received) = self.ask(buffer, |answer| Request::block_status(at, asked, answer)).await;
            buffer = back;
            let before = at;
            for extent in Extent::decode(&buffer[..received?], asked) {
                let extent = extent.map_err(|_| protocol(OPCODE, "extents that don't fit the range"))?;
                at += extent.length;
                match extents.last_mut() {
                    Some(last) if last.flags == extent.flags => last.length += extent.length,
                    _ => extents.push(extent),
                }
            }
            if at == before {
                return Err(protocol(OPCODE, "no extents"));
            }
        }
        Ok(extents)
    }

    /// The CRC32C of a range, computed at the target: only the number moves.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn verify(&self, offset: u64, length: u64) -> Result<u32, Error> {
        self.check(Opcode::VERIFY, offset, length)?;
        let mut crc = 0;
        for (at, piece) in pieces(offset, length, MAX_VERIFY_RANGE) {
            let result = self.command(Request::verify(at, piece)).await?.result;
            let next = u32::try_from(result).map_err(|_| protocol(Opcode::VERIFY, "a CRC32C of more than 32 bits"))?;
            crc = crc32c::crc32c_combine(crc, next, piece as usize);
        }
        Ok(crc)
    }

    /// Asks the target again what the volume is.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn identify(&self) -> Result<VolumeInfo, Error> {
        let buffer = self.buffer(ANSWER_BYTES)?;
        let (buffer, received) = self.ask(buffer, Request::identify).await;
        let answer = &buffer[..received?];
        // The answer is what ATTACHED brings.
        let payload = Payload { length: answer.len() as u32, crc: crc32c(answer) };
        match Handshake::decode(0x44, payload, answer) {
            Ok(Handshake::Attached(attached)) => Ok(VolumeInfo::from_attached(&attached)),
            _ => Err(protocol(Opcode::IDENTIFY, "no description of a volume")),
        }
    }

    /// How long a command takes there and back that gives the storage nothing to do.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn ping(&self) -> Result<Duration, Error> {
        let buffer = self.buffer(ANSWER_BYTES)?;
        let begun = Instant::now();
        let (_, received) = self.ask(buffer, Request::identify).await;
        received.map(|_| begun.elapsed())
    }

    /// Reads into memory of the caller's, by way of the arena. The copy is counted.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn read_at(&self, offset: u64, destination: &mut [u8]) -> Result<(), Error> {
        self.check(Opcode::READ, offset, destination.len() as u64)?;
        let (mut at, mut rest) = (offset, destination);
        let mut staging = self.staging(rest.len())?;
        while !rest.is_empty() {
            staging.truncate(rest.len());
            let (back, result) = self.read(at, staging).await;
            staging = back;
            result?;
            let (part, left) = rest.split_at_mut(staging.len());
            part.copy_from_slice(&staging);
            self.core.metrics.unregistered_bytes().inc_by(staging.len() as u64);
            (at, rest) = (at + staging.len() as u64, left);
        }
        Ok(())
    }

    /// Writes from memory of the caller's, by way of the arena. The copy is counted.
    ///
    /// # Errors
    /// See [`Error`]; after an error it may be written in part.
    pub async fn write_at(&self, offset: u64, source: &[u8]) -> Result<(), Error> {
        self.check(Opcode::WRITE, offset, source.len() as u64)?;
        let (mut at, mut rest) = (offset, source);
        let mut staging = self.staging(rest.len())?;
        while !rest.is_empty() {
            staging.truncate(rest.len());
            let (part, left) = rest.split_at(staging.len());
            staging.copy_from_slice(part);
            self.core.metrics.unregistered_bytes().inc_by(staging.len() as u64);
            let (back, result) = self.write(at, staging).await;
            staging = back;
            result?;
            (at, rest) = (at + part.len() as u64, left);
        }
        Ok(())
    }

    /// A buffer to copy through: as long as asked, if the arena has that much; else shorter.
    fn staging(&self, length: usize) -> Result<Buffer, ArenaError> {
        let block = self.geometry().logical_block as usize;
        let mut length = length.min(STAGING_BYTES).min(self.core.arena.longest());
        loop {
            match self.buffer(length) {
                Err(ArenaError::Exhausted { .. }) if length > block => length = (length / 2).next_multiple_of(block),
                other => return other,
            }
        }
    }

    /// Ends the session in order: nothing new is taken, what is in flight ends, and the target confirms that
    /// nothing of it acts any more. Does not flush.
    ///
    /// # Errors
    /// [`Error::Timeout`] when that takes longer than [`Options::close_timeout_ms`]: the connections are cut
    /// then. [`Error::Ended`] when the session had ended already.
    pub async fn close(&self) -> Result<(), Error> {
        let (lanes, timeout_ms) = (&self.core.lanes, self.core.close_timeout_ms);
        lanes.close(timeout_ms);
        poll_fn(|context| if lanes.poll_stopped(context.waker()) { Poll::Ready(()) } else { Poll::Pending }).await;
        match self.session().end() {
            None | Some(PathEnd::Closed) => Ok(()),
            Some(PathEnd::Aborted) => Err(Error::Timeout { what: "closing the volume", timeout_ms }),
            Some(end) => Err(Error::Ended { end: end.clone() }),
        }
    }

    /// What the target told at the attach, with the current size.
    #[must_use]
    pub fn info(&self) -> VolumeInfo {
        self.session().info()
    }

    /// Size, block sizes and longest transfer in bytes, as they are now.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.session().geometry()
    }

    /// The target's name, for people.
    #[must_use]
    pub fn target_name(&self) -> &str {
        self.session().target_name()
    }

    /// The session's id.
    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.session().id()
    }

    /// How the volume is held.
    #[must_use]
    pub fn mode(&self) -> AttachMode {
        self.session().mode()
    }

    /// The session that the volume is attached by.
    #[must_use]
    pub fn session(&self) -> &Session {
        self.core.lanes.session()
    }

    /// Queues of the session.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.core.lanes.count()
    }

    /// Commands that may be in flight. More than these wait in the order in which they came.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.core.lanes.cells().count()
    }

    /// The arena that buffers come from.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.core.arena
    }

    /// The numbers.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.core.metrics
    }

    /// Checks the range of a call, however long; its commands are checked again one by one.
    fn check(&self, opcode: Opcode, offset: u64, length: u64) -> Result<(), Rejection> {
        check_range(opcode, offset, length, &self.geometry(), self.session().read_only())
    }

    /// Turns a call down that comes after the closing began: it doesn't even wait for a cell.
    fn check_open(&self, opcode: Opcode) -> Result<(), Rejection> {
        if self.core.lanes.is_closing() { Err(Rejection::Closed { opcode }) } else { Ok(()) }
    }

    /// Reads or writes a buffer, in several pieces if one command can't hold it.
    async fn transfer(&self, opcode: Opcode, flags: Flags, offset: u64, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        let checked = self.check(opcode, offset, buffer.len() as u64).and_then(|()| self.check_open(opcode));
        if let Err(rejection) = checked {
            return (buffer, Err(rejection.into()));
        }
        let cells = self.core.lanes.cells();
        let longest = self.geometry().max_transfer as usize;
        let mut divided = buffer.divide();
        let mut flying: [Option<Flying<'_>>; PIECES] = [const { None }; PIECES];
        let (mut launched, mut ended, mut at) = (0, 0, offset);
        let mut result = Ok(());
        loop {
            while result.is_ok() && launched - ended < PIECES && divided.rest() > 0 {
                // The first piece waits for its turn; the others don't wait while there are some to wait for.
                let cell = match cells.try_acquire() {
                    Some(cell) => cell,
                    None if launched == ended => cells.acquire().await,
                    None => break,
                };
                let Some(piece) = divided.next(longest) else { break };
                let (length, crc) = (piece.len() as u64, (opcode == Opcode::WRITE).then(|| crc32c(&piece)));
                let request = Request { opcode, flags, offset: at, length, buffer: Some(piece), crc, token: 0 };
                match self.launch(cell, request) {
                    Ok(flight) => flying[launched % PIECES] = Some(flight),
                    Err(error) => {
                        result = Err(error);
                        break;
                    }
                }
                launched += 1;
                at += length;
            }
            let Some(flight) = flying[ended % PIECES].take() else { break };
            ended += 1;
            let outcome = self.judge(opcode, flight.ended().await);
            result = result.and(outcome.map(|_| ()));
        }
        (whole_again(divided), result)
    }

    /// A command whose answer goes into `buffer`; gives the answer's length.
    async fn ask(&self, buffer: Buffer, request: impl FnOnce(Buffer) -> Request) -> (Buffer, Result<usize, Error>) {
        let mut divided = buffer.divide();
        let received = match divided.next(ANSWER_BYTES) {
            Some(piece) => self.command(request(piece)).await.map(|outcome| outcome.received as usize),
            None => Ok(0),
        };
        (whole_again(divided), received)
    }

    async fn command(&self, request: Request) -> Result<Outcome, Error> {
        request.check(&self.geometry(), self.session().read_only())?;
        self.check_open(request.opcode)?;
        let (opcode, cell) = (request.opcode, self.core.lanes.cells().acquire().await);
        let flight = self.launch(cell, request)?;
        self.judge(opcode, flight.ended().await)
    }

    fn launch(&self, cell: CellId, request: Request) -> Result<Flying<'_>, Error> {
        let opcode = request.opcode;
        self.core.lanes.launch(cell, request).map_err(|_closing| Rejection::Closed { opcode }.into())
    }

    fn judge(&self, opcode: Opcode, outcome: Outcome) -> Result<Outcome, Error> {
        let end = || self.session().end().cloned().unwrap_or(PathEnd::Closed);
        match outcome.status {
            Status::OK => Ok(outcome),
            Status::CONNECTION_LOST if outcome.unsent => Err(Error::ConnectionLost { opcode, end: end() }),
            status => Err(Error::of(opcode, status, outcome.result, end)),
        }
    }
}

/// The buffer of a request that was not sent.
fn returned(request: Request) -> Buffer {
    match request.buffer {
        Some(buffer) => buffer,
        None => unreachable!("it was made with one"),
    }
}

/// The buffer, after every command with a piece of it has ended.
fn whole_again(divided: crate::arena::Divided) -> Buffer {
    match divided.whole() {
        Ok(buffer) => buffer,
        // Here no flight is left, and a command drops its piece before it tells its end.
        Err(_) => unreachable!("a command has ended and still holds its piece"),
    }
}

fn protocol(opcode: Opcode, detail: &'static str) -> Error {
    Error::Protocol { opcode, detail }
}

/// A range in pieces of at most `longest` bytes.
fn pieces(offset: u64, length: u64, longest: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..length.div_ceil(longest)).map(move |n| (offset + n * longest, (length - n * longest).min(longest)))
}
