//! What may block for long, on two threads of the volume's own: one syncs, one changes and tells
//! allocation. A slow or hung disk then holds up its own volume and no reactor.
//!
//! **Syncs are one at a time per volume.** All that arrived before one begins are covered by it; those that
//! arrive during it wait for the next. That also guards I5: the kernel reports a failed write-back once per
//! open file, so that of two syncs at once the second could succeed over lost data. For the same reason FUA
//! without O_DIRECT is a write and then a [`Work::Sync`] here. With O_DIRECT the reactor writes synchronously
//! (`RWF_DSYNC`): no data of the volume is ever in the page cache, so there is no write-back error that such a
//! write could take away from a sync.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use twinrail_protocol::wire::{Extent, ExtentFlags};
use twinrail_protocol::{Range, Status, limits};

use super::{Access, Answer, ErrorLog, Fault, Faults, FileStore, HOLE, Store, push_extent, status_of};
use crate::reactor::mailbox::{Mailbox, Message};

/// Jobs that may wait for one thread; far more than a well-behaved set of sessions has under way.
const CAPACITY: usize = 4096;

/// What a keeper can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Put on stable storage every change that storage has ended before. Also what follows a write with FUA.
    Sync,
    /// Make the range read as zeros.
    WriteZeroes {
        /// Where.
        range: Range,
        /// Whether the range may lose its allocation.
        may_unmap: bool,
        /// Answer only when it is on stable storage.
        fua: bool,
    },
    /// The content is no longer needed. An advice: where the storage can't, nothing happens.
    Discard {
        /// Where.
        range: Range,
        /// Answer only when it is on stable storage.
        fua: bool,
    },
    /// Tell what is allocated and what reads as zeros.
    BlockStatus {
        /// Where.
        range: Range,
    },
}

/// Work, and whom to tell.
#[derive(Debug)]
pub struct Job {
    /// What to do.
    pub work: Work,
    /// What the asker calls it.
    pub ticket: u64,
    /// Gets `Message::Stored` when it has ended.
    pub to: Arc<Mailbox>,
}

impl Job {
    fn end(self, answer: Answer) {
        self.to.send(Message::Stored { ticket: self.ticket, answer });
    }
}

/// What the threads work on; shared with the volume.
#[derive(Debug)]
pub(super) struct Charge {
    /// Name of the volume.
    pub(super) name: String,
    pub(super) store: Store,
    pub(super) read_only: bool,
    pub(super) write_through: bool,
    pub(super) logical_block: u32,
    pub(super) failed_syncs: Arc<AtomicU64>,
    pub(super) faults: Option<Arc<Faults>>,
    pub(super) errors: Arc<ErrorLog>,
}

/// What the threads are told.
#[derive(Debug)]
enum Order {
    Job(Job),
    /// Sync for a thread that waits.
    SyncNow(SyncSender<Result<(), Status>>),
    /// Do what was ordered before, then end.
    Stop,
}

/// The two threads of a volume. They end with it.
#[derive(Debug)]
pub struct Keeper {
    // The order counts: the sync thread ends last, since jobs of the other one may end with a sync.
    space: Lane,
    sync: Lane,
}

impl Keeper {
    /// Starts the threads.
    pub(super) fn start(charge: Charge) -> io::Result<Self> {
        let charge = Arc::new(charge);
        let syncer = Arc::clone(&charge);
        let sync = Lane::start(format!("sync/{}", charge.name), move |orders| syncer.keep_syncing(&orders))?;
        let onward = sync.orders.clone();
        let name = format!("space/{}", charge.name);
        let space = Lane::start(name, move |orders| charge.keep_space(&orders, &onward))?;
        Ok(Self { space, sync })
    }

    /// Gives the keeper a job. Neither waits nor allocates.
    ///
    /// # Errors
    /// The job itself when too many wait, or the keeper has stopped.
    pub fn submit(&self, job: Job) -> Result<(), Job> {
        let lane = if job.work == Work::Sync { &self.sync } else { &self.space };
        match lane.orders.try_send(Order::Job(job)) {
            Err(TrySendError::Full(Order::Job(job)) | TrySendError::Disconnected(Order::Job(job))) => Err(job),
            _ => Ok(()),
        }
    }

    /// Puts everything on stable storage, and waits for it: for the end of a drain, when all jobs are
    /// answered and all writes have ended.
    ///
    /// # Errors
    /// FLUSH_FAILED, also when the keeper has stopped.
    pub fn final_sync(&self) -> Result<(), Status> {
        let (done, ended) = sync_channel(1);
        self.sync.orders.send(Order::SyncNow(done)).map_err(|_| Status::FLUSH_FAILED)?;
        ended.recv().map_err(|_| Status::FLUSH_FAILED)?
    }

    /// Ends the threads once they have done the jobs they have, and waits for that: for as long as the disk
    /// takes. Only for when nobody submits any more. Dropping does the same.
    pub fn stop(&self) {
        self.space.stop();
        self.sync.stop();
    }
}

/// A thread and the queue that it serves; it ends with this.
#[derive(Debug)]
struct Lane {
    orders: SyncSender<Order>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Lane {
    fn start(name: String, run: impl FnOnce(Receiver<Order>) + Send + 'static) -> io::Result<Self> {
        let (orders, taken) = sync_channel(CAPACITY);
        let thread = std::thread::Builder::new().name(name).spawn(move || run(taken))?;
        Ok(Self { orders, thread: Mutex::new(Some(thread)) })
    }

    fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = self.orders.send(Order::Stop);
            let _ = thread.join();
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Charge {
    /// The sync thread.
    fn keep_syncing(&self, orders: &Receiver<Order>) {
        let mut covered = Vec::with_capacity(CAPACITY);
        let mut waiting = Vec::new();
        let mut stop = false;
        while !stop {
            // Everything that is there before the sync begins is covered by it.
            let mut next = orders.recv().ok();
            stop = next.is_none();
            while let Some(order) = next {
                match order {
                    Order::Job(job) => covered.push(job),
                    Order::SyncNow(done) => waiting.push(done),
                    Order::Stop => stop = true,
                }
                next = if covered.len() < CAPACITY { orders.try_recv().ok() } else { None };
            }
            if covered.is_empty() && waiting.is_empty() {
                continue;
            }
            let result = self.sync();
            for job in covered.drain(..) {
                job.end(result.map_or_else(Answer::Failed, |()| Answer::Done));
            }
            for done in waiting.drain(..) {
                let _ = done.send(result);
            }
        }
    }

    /// The space thread. What must be on stable storage goes on to the sync thread, which then answers.
    fn keep_space(&self, orders: &Receiver<Order>, sync: &SyncSender<Order>) {
        while let Ok(Order::Job(job)) = orders.recv() {
            let answer = self.space(job.work);
            let changed = matches!(answer, Answer::Done);
            if changed && self.must_sync(job.work) {
                if let Err(refused) = sync.send(Order::Job(Job { work: Work::Sync, ..job }))
                    && let Order::Job(job) = refused.0
                {
                    job.end(Answer::Failed(Status::FLUSH_FAILED));
                }
            } else {
                job.end(answer);
            }
        }
    }

    fn must_sync(&self, work: Work) -> bool {
        match work {
            Work::WriteZeroes { fua, .. } | Work::Discard { fua, .. } => fua || self.write_through,
            Work::Sync | Work::BlockStatus { .. } => false,
        }
    }

    /// One sync. A failure is counted before anybody hears of it, and never tried again as if it could
    /// still succeed: the kernel has dropped what it couldn't write.
    fn sync(&self) -> Result<(), Status> {
        let (delay, fail) = self.faults.as_ref().map_or_else(Default::default, |faults| faults.before_sync());
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let result = match &self.store {
            _ if fail => Err(Errno::IO),
            Store::File(file) if !self.read_only => rustix::fs::fdatasync(&**file),
            Store::File(_) | Store::Memory(_) | Store::Null => Ok(()),
        };
        result.map_err(|errno| {
            self.failed_syncs.fetch_add(1, Ordering::SeqCst);
            self.errors.report("sync", None, &errno);
            Status::FLUSH_FAILED
        })
    }

    /// Bytes of the range before the first on which a fault injected for a test lies, if an answer may tell of them
    /// alone; else nothing or all.
    fn good_bytes(&self, work: Work, range: Range) -> u64 {
        let bad = self.faults.as_ref().and_then(|faults| faults.first_bad(Access::Read, range));
        match (work, bad) {
            (Work::BlockStatus { .. }, Some(bad)) => bad - bad % u64::from(self.logical_block) - range.offset(),
            (Work::BlockStatus { .. }, None) => range.length(),
            _ => 0,
        }
    }

    fn space(&self, work: Work) -> Answer {
        let (operation, access, range) = match work {
            Work::Sync => return Answer::Done,
            Work::WriteZeroes { range, .. } => ("write zeroes", Access::Write, range),
            Work::Discard { range, .. } => ("discard", Access::Write, range),
            Work::BlockStatus { range } => ("block status", Access::Read, range),
        };
        let fault = self.faults.as_ref().map_or(Fault::Nothing, |faults| faults.before(access, range));
        let good = self.good_bytes(work, range);
        match fault {
            Fault::Nothing => {}
            Fault::Delay(delay) => std::thread::sleep(delay),
            Fault::Fail(_) if good > 0 => {}
            Fault::Fail(status) => {
                self.errors.report(operation, Some(range.offset()), &"injected");
                return Answer::Failed(status);
            }
        }
        let whole = match &self.store {
            Store::File(file) => reaches(file, range),
            Store::Memory(_) | Store::Null => Ok(()),
        };
        let result = whole.and_then(|()| match (&self.store, work) {
            (_, Work::Sync) => Ok(Answer::Done),
            (Store::File(file), Work::WriteZeroes { may_unmap, .. }) => {
                write_zeroes(file, range, may_unmap).map(|()| Answer::Done)
            }
            (Store::File(file), Work::Discard { .. }) => discard(file, range).map(|()| Answer::Done),
            (Store::File(file), Work::BlockStatus { .. }) => {
                extents(file, range, self.logical_block).map(|extents| Answer::Extents(begin_of(extents, good)))
            }
            (Store::Memory(memory), Work::BlockStatus { .. }) => {
                Ok(Answer::Extents(begin_of(memory.extents(range), good)))
            }
            (Store::Memory(memory), _) => {
                memory.zero(range);
                Ok(Answer::Done)
            }
            (Store::Null, Work::BlockStatus { .. }) => Ok(Answer::Extents(vec![Extent { length: good, flags: HOLE }])),
            (Store::Null, _) => Ok(Answer::Done),
        });
        result.unwrap_or_else(|error| {
            self.errors.report(operation, Some(range.offset()), &error);
            Answer::Failed(status_of(&error))
        })
    }
}

/// The first `length` bytes of a list of extents.
fn begin_of(mut extents: Vec<Extent>, length: u64) -> Vec<Extent> {
    let mut left = length;
    extents.retain_mut(|extent| {
        extent.length = extent.length.min(left);
        left -= extent.length;
        extent.length > 0
    });
    extents
}

/// Somebody may have cut the file since it was opened. What lies behind its end is lost, not a hole.
fn reaches(file: &FileStore, range: Range) -> io::Result<()> {
    if file.is_block_device() || file.file().metadata()?.len() >= range.end() {
        return Ok(());
    }
    Err(io::Error::other("the backing is shorter than the volume: somebody has cut it"))
}

/// Makes the range read as zeros, by the cheapest way that the storage knows and the caller allows. On a
/// block device the kernel turns the same calls into commands of the device.
fn write_zeroes(file: &FileStore, range: Range, may_unmap: bool) -> io::Result<()> {
    let punched = may_unmap && fallocate(file, FallocateFlags::PUNCH_HOLE, range)?;
    if punched || fallocate(file, FallocateFlags::ZERO_RANGE, range)? {
        return Ok(());
    }
    let mut position = range.offset();
    while position < range.end() {
        let length = (range.end() - position).min(ZEROS.0.len() as u64);
        match rustix::io::pwrite(file, &ZEROS.0[..length as usize], position) {
            // No device writes nothing and calls it success, but this must not go round for ever.
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => position += written as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Frees the range where the storage can.
fn discard(file: &FileStore, range: Range) -> io::Result<()> {
    fallocate(file, FallocateFlags::PUNCH_HOLE, range).map(|_supported| ())
}

/// Gives `false` when the storage can't do that.
fn fallocate(file: &FileStore, how: FallocateFlags, range: Range) -> io::Result<bool> {
    loop {
        match rustix::fs::fallocate(file, how | FallocateFlags::KEEP_SIZE, range.offset(), range.length()) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What the file system knows of the range. Moves the file's position, which nobody uses: all other I/O
/// names its own.
fn extents(file: &FileStore, range: Range, logical_block: u32) -> io::Result<Vec<Extent>> {
    if file.is_block_device() {
        return Ok(all_data(range));
    }
    extents_by(range, logical_block, |to| rustix::fs::seek(file, to))
}

fn all_data(range: Range) -> Vec<Extent> {
    vec![Extent { length: range.length(), flags: ExtentFlags::DATA }]
}

/// The same by way of `seek`. Where it fails, as it does over a bad sector of the file system, the answer ends with
/// what was learned before: the next question begins there, and has the error.
fn extents_by(
    range: Range,
    logical_block: u32,
    mut seek: impl FnMut(SeekFrom) -> Result<u64, Errno>,
) -> io::Result<Vec<Extent>> {
    let block = u64::from(logical_block);
    let mut extents = Vec::new();
    let mut position = range.offset();
    while position < range.end() {
        let data = match seek(SeekFrom::Data(position)) {
            // A file system's block may be smaller than the volume's: one with any data in it counts as data.
            Ok(data) => (data - data % block).clamp(position, range.end()),
            Err(Errno::NXIO) => range.end(),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(all_data(range)),
            Err(_) if !extents.is_empty() => break,
            Err(errno) => return Err(errno.into()),
        };
        if data > position && !push_extent(&mut extents, data - position, HOLE) {
            break;
        }
        if data == range.end() {
            break;
        }
        let hole = match seek(SeekFrom::Hole(data)) {
            Ok(hole) => hole.next_multiple_of(block).clamp(data + block, range.end()),
            // The data that was there a moment ago was cut off.
            Err(Errno::NXIO) => range.end(),
            Err(_) if !extents.is_empty() => break,
            Err(errno) => return Err(errno.into()),
        };
        if !push_extent(&mut extents, hole - data, ExtentFlags::DATA) {
            break;
        }
        position = hole;
    }
    Ok(extents)
}

/// A multiple of every logical block, in bytes.
const ZEROS_LEN: usize = *limits::LOGICAL_BLOCK_RANGE.end() as usize;

/// What is written where the storage can't make zeros itself; aligned for any direct I/O.
static ZEROS: Zeros = Zeros([0; ZEROS_LEN]);

#[repr(align(4096))]
struct Zeros([u8; ZEROS_LEN]);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::testing::{Mount, loop_device};
    use crate::volume::{Volume, VolumeIndex, VolumeSpec};
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::Path;

    fn open(text: &str) -> Volume {
        Volume::open(VolumeIndex(0), &VolumeSpec::parse(text).unwrap(), &|| false).unwrap()
    }

    /// A volume in a file of `size` bytes full of ones.
    fn filled(directory: &Path, size: usize, options: &str) -> Volume {
        let path = directory.join("disk.img");
        std::fs::write(&path, vec![1; size]).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        open(&format!("disk0={}{options}", path.display()))
    }

    fn range(volume: &Volume, offset: u64, length: u64) -> Range {
        volume.geometry.range(offset, length, u64::MAX).unwrap()
    }

    fn submit(volume: &Volume, to: &Arc<Mailbox>, ticket: u64, work: Work) {
        volume.keeper.submit(Job { work, ticket, to: Arc::clone(to) }).unwrap();
    }

    /// Waits for the next answer, as a reactor does.
    fn answer(mailbox: &Mailbox) -> (u64, Answer) {
        loop {
            if let Some(Message::Stored { ticket, answer }) = mailbox.take() {
                return (ticket, answer);
            }
            if mailbox.fall_asleep() {
                let mut fds = [rustix::event::PollFd::new(mailbox, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
                mailbox.wake_up();
            }
        }
    }

    fn run(volume: &Volume, work: Work) -> Answer {
        let mailbox = Mailbox::new().unwrap();
        submit(volume, &mailbox, 7, work);
        let (ticket, answer) = answer(&mailbox);
        assert_eq!(ticket, 7);
        answer
    }

    fn extents_of(volume: &Volume, offset: u64, length: u64) -> Vec<(u64, bool)> {
        match run(volume, Work::BlockStatus { range: range(volume, offset, length) }) {
            Answer::Extents(extents) => extents.iter().map(|e| (e.length, e.flags == HOLE)).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn failed(answer: &Answer, status: Status) -> bool {
        matches!(answer, Answer::Failed(failed) if *failed == status)
    }

    #[test]
    fn syncs_that_wait_are_covered_by_one() {
        let faults = Arc::new(Faults::parse("sync-error@2").unwrap());
        let failed_syncs = Arc::new(AtomicU64::new(0));
        let charge = Charge {
            name: "disk0".into(),
            store: Store::Null,
            read_only: false,
            write_through: false,
            logical_block: 512,
            failed_syncs: Arc::clone(&failed_syncs),
            faults: Some(Arc::clone(&faults)),
            errors: Arc::new(ErrorLog::new("disk0")),
        };
        for (syncs, all_failed) in [(1, false), (2, true), (3, false)] {
            let mailbox = Mailbox::new().unwrap();
            let (orders, taken) = sync_channel(CAPACITY);
            for ticket in 0..100 {
                orders.send(Order::Job(Job { work: Work::Sync, ticket, to: Arc::clone(&mailbox) })).unwrap();
            }
            orders.send(Order::Stop).unwrap();
            charge.keep_syncing(&taken);
            assert_eq!(faults.syncs(), syncs);
            for expected in 0..100 {
                let (ticket, answer) = answer(&mailbox);
                assert_eq!((ticket, failed(&answer, Status::FLUSH_FAILED)), (expected, all_failed));
            }
        }
        assert_eq!(failed_syncs.load(Ordering::SeqCst), 1, "a failed sync is counted once, however many it covered");
    }

    /// The second one's data may have reached the disk after the sync that is under way looked at it.
    #[test]
    fn a_sync_that_arrives_during_another_is_not_covered_by_it() {
        let volume = open("n=null,size=1M,inject=sync-error@1+sync-delay-ms=50");
        let faults = volume.faults.as_ref().unwrap();
        let mailbox = Mailbox::new().unwrap();
        submit(&volume, &mailbox, 1, Work::Sync);
        while faults.syncs() < 1 {
            std::thread::yield_now();
        }
        submit(&volume, &mailbox, 2, Work::Sync);
        let (first, second) = (answer(&mailbox), answer(&mailbox));
        assert!(first.0 == 1 && failed(&first.1, Status::FLUSH_FAILED), "{first:?}");
        assert!(second.0 == 2 && matches!(second.1, Answer::Done), "{second:?}");
        assert_eq!(faults.syncs(), 2);
    }

    #[test]
    fn a_failed_sync_is_counted_before_anybody_hears_of_it() {
        let volume = open("n=null,size=1M,inject=sync-error@..");
        let mailbox = Mailbox::new().unwrap();
        for count in 1..200 {
            submit(&volume, &mailbox, count, Work::Sync);
            let (_, answer) = answer(&mailbox);
            assert!(failed(&answer, Status::FLUSH_FAILED));
            assert_eq!(volume.failed_syncs(), count);
        }
        assert_eq!(volume.keeper.final_sync(), Err(Status::FLUSH_FAILED));
        assert_eq!(volume.failed_syncs(), 200);
    }

    #[test]
    fn i5_a_backing_that_was_cut_is_an_error_and_not_a_hole() {
        let directory = tempfile::tempdir().unwrap();
        let volume = filled(directory.path(), 1 << 20, "");
        let Store::File(file) = &volume.store else { panic!("not a file") };
        file.file().set_len(65536).unwrap();
        for work in [
            Work::BlockStatus { range: range(&volume, 131_072, 65536) },
            Work::WriteZeroes { range: range(&volume, 131_072, 65536), may_unmap: true, fua: false },
            Work::Discard { range: range(&volume, 131_072, 65536), fua: false },
        ] {
            assert!(failed(&run(&volume, work), Status::IO_ERROR), "{work:?}");
        }
        assert!(matches!(run(&volume, Work::BlockStatus { range: range(&volume, 0, 65536) }), Answer::Extents(_)));
    }

    #[test]
    fn changes_with_fua_end_with_a_sync_and_others_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let volume = filled(directory.path(), 1 << 20, ",inject=sync-error@2..");
        let zeroes = |fua| Work::WriteZeroes { range: range(&volume, 0, 65536), may_unmap: true, fua };
        let discard = |fua| Work::Discard { range: range(&volume, 65536, 65536), fua };
        let faults = volume.faults.as_ref().unwrap();
        assert!(matches!(run(&volume, zeroes(false)), Answer::Done));
        assert!(matches!(run(&volume, discard(false)), Answer::Done));
        assert_eq!(faults.syncs(), 0);
        assert!(matches!(run(&volume, zeroes(true)), Answer::Done));
        assert_eq!(faults.syncs(), 1);
        assert!(failed(&run(&volume, zeroes(true)), Status::FLUSH_FAILED));
        assert!(failed(&run(&volume, discard(true)), Status::FLUSH_FAILED));
        assert_eq!(volume.failed_syncs(), 2);
    }

    #[test]
    fn every_change_of_a_write_through_volume_ends_with_a_sync() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let text = format!("disk0={},size=1M,write-through,inject=sync-error@1", path.display());
        let volume = match Volume::open(VolumeIndex(0), &VolumeSpec::parse(&text).unwrap(), &|| false) {
            Err(error @ crate::volume::OpenError::WriteThroughCached { .. }) => {
                println!("skipped: {error}");
                return;
            }
            opened => opened.unwrap(),
        };
        assert!(volume.write_through());
        let discard = Work::Discard { range: range(&volume, 0, 65536), fua: false };
        assert!(failed(&run(&volume, discard), Status::FLUSH_FAILED));
        assert!(matches!(run(&volume, discard), Answer::Done));
    }

    #[test]
    fn zeroed_ranges_read_as_zeros_and_keep_or_lose_their_allocation() {
        let directory = tempfile::tempdir().unwrap();
        let volume = filled(directory.path(), 1 << 20, "");
        let check = std::fs::File::open(directory.path().join("disk.img")).unwrap();
        let blocks = || check.metadata().unwrap().blocks() * 512;
        let read = |offset, length| {
            let mut out = vec![9; length];
            check.read_exact_at(&mut out, offset).unwrap();
            out
        };
        let before = blocks();
        let kept = Work::WriteZeroes { range: range(&volume, 512, 262144), may_unmap: false, fua: false };
        assert!(matches!(run(&volume, kept), Answer::Done));
        assert_eq!(read(0, 512), [1; 512]);
        assert!(read(512, 262144).iter().all(|&byte| byte == 0));
        assert_eq!(read(512 + 262144, 512), [1; 512]);
        assert!(blocks() >= before);

        let lost = Work::WriteZeroes { range: range(&volume, 524288, 262144), may_unmap: true, fua: false };
        assert!(matches!(run(&volume, lost), Answer::Done));
        assert!(read(524288, 262144).iter().all(|&byte| byte == 0));
        assert!(blocks() < before);
        assert_eq!(check.metadata().unwrap().len(), 1 << 20, "the size stays");

        let discarded = Work::Discard { range: range(&volume, 786432, 131072), fua: false };
        assert!(matches!(run(&volume, discarded), Answer::Done));
        let holes = extents_of(&volume, 524288, 524288);
        assert_eq!(holes, [(262144 + 131072, true), (131072, false)], "neighbours are one extent");
    }

    #[test]
    fn block_status_stops_at_what_a_reply_can_hold() {
        let directory = tempfile::tempdir().unwrap();
        let size = 8192 * (limits::MAX_EXTENTS as u64 + 10);
        let path = directory.path().join("disk.img");
        let volume = open(&format!("disk0={},size={size}", path.display()));
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for hole in (0..size).step_by(8192) {
            file.write_all_at(&[1; 4096], hole + 4096).unwrap();
        }
        let extents = extents_of(&volume, 0, size);
        assert_eq!(extents.len(), limits::MAX_EXTENTS);
        assert!(extents.iter().enumerate().all(|(i, extent)| *extent == (4096, i % 2 == 0)), "{extents:?}");
        assert_eq!(extents_of(&volume, 512, 512), [(512, true)]);
        assert_eq!(extents_of(&volume, size - 512, 512), [(512, false)]);
    }

    #[test]
    fn a_bad_sector_ends_a_block_status_and_fails_only_the_one_that_begins_there() {
        let volume = open("m=memory,size=1M,inject=read-error@70000");
        let status = |offset| {
            let length = (1 << 20) - offset;
            run(&volume, Work::BlockStatus { range: range(&volume, offset, length) })
        };
        let bad = 70_000 / 512 * 512;
        assert!(matches!(status(0), Answer::Extents(extents) if extents == [Extent { length: bad, flags: HOLE }]));
        assert!(failed(&status(bad), Status::IO_ERROR));
        assert!(matches!(status(bad + 512), Answer::Extents(_)));

        // The same when the file system says so: data at 0 and 8192, then the map can't be read.
        let seek = |to| match to {
            SeekFrom::Data(0) => Ok(0),
            SeekFrom::Hole(0) => Ok(4096),
            SeekFrom::Data(4096) => Ok(8192),
            _ => Err(Errno::IO),
        };
        let found = extents_by(range(&volume, 0, 1 << 20), 512, seek).unwrap();
        assert_eq!(found.iter().map(|extent| extent.length).collect::<Vec<_>>(), [4096, 4096]);
        let error = extents_by(range(&volume, 8192, 1 << 19), 512, seek).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    /// An initiator may skip a hole; half a block of data in it would be lost.
    #[test]
    fn extents_are_whole_logical_blocks() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let volume = open(&format!("disk0={},size=1M,logical-block=64K", path.display()));
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[1; 4096], 65536 + 8192).unwrap();
        assert_eq!(extents_of(&volume, 0, 1 << 20), [(65536, true), (65536, false), ((1 << 20) - 131072, true)]);
    }

    #[test]
    fn where_the_storage_cannot_zero_zeros_are_written() {
        // tmpfs knows holes but no zero range.
        let Some(mount) = Mount::tmpfs("size=1m") else { return };
        let path = mount.path().join("disk.img");
        let volume = open(&format!("disk0={},size=8M", path.display()));
        let zeroes = |offset, may_unmap| {
            run(&volume, Work::WriteZeroes { range: range(&volume, offset, 196608), may_unmap, fua: false })
        };
        assert!(matches!(zeroes(65536, false), Answer::Done));
        assert_eq!(extents_of(&volume, 0, 1 << 20), [(65536, true), (196608, false), ((1 << 20) - 262144, true)]);
        assert!(matches!(zeroes(65536, true), Answer::Done));
        assert_eq!(extents_of(&volume, 0, 1 << 20), [(1 << 20, true)]);

        let too_much = Work::WriteZeroes { range: range(&volume, 0, 8 << 20), may_unmap: false, fua: false };
        assert!(failed(&run(&volume, too_much), Status::NO_SPACE));
    }

    #[test]
    fn a_block_device_is_zeroed_and_discarded_too() {
        let Some(device) = loop_device(1 << 20) else { return };
        std::fs::File::options().write(true).open(device.path()).unwrap().write_all_at(&[1; 1 << 20], 0).unwrap();
        let volume = open(&format!("disk0={}", device.path().display()));
        for (offset, may_unmap) in [(4096, false), (65536, true)] {
            let zeroes = Work::WriteZeroes { range: range(&volume, offset, 4096), may_unmap, fua: true };
            assert!(matches!(run(&volume, zeroes), Answer::Done));
        }
        let discard = Work::Discard { range: range(&volume, 131072, 4096), fua: true };
        assert!(matches!(run(&volume, discard), Answer::Done));
        assert_eq!(extents_of(&volume, 0, 1 << 20), [(1 << 20, false)]);
        let Store::File(file) = &volume.store else { panic!("a device is a file") };
        let mut out = Box::new(Zeros([9; ZEROS_LEN]));
        for (offset, byte) in [(0, 1), (4096, 0), (8192, 1), (65536, 0), (69632, 1)] {
            file.file().read_exact_at(&mut out.0[..4096], offset).unwrap();
            assert!(out.0[..4096].iter().all(|&b| b == byte), "at {offset}");
        }
    }

    #[test]
    fn memory_and_null_do_the_same_jobs() {
        let memory = open("m=memory,size=1M");
        let Store::Memory(store) = &memory.store else { panic!("memory is memory") };
        store.write(65536, &[1; 131072]);
        assert_eq!(extents_of(&memory, 0, 1 << 20), [(65536, true), (131072, false), ((1 << 20) - 196608, true)]);
        let zeroes = Work::WriteZeroes { range: range(&memory, 65536, 65536), may_unmap: false, fua: true };
        assert!(matches!(run(&memory, zeroes), Answer::Done));
        let discard = Work::Discard { range: range(&memory, 131072, 65536), fua: true };
        assert!(matches!(run(&memory, discard), Answer::Done));
        assert_eq!(extents_of(&memory, 0, 1 << 20), [(1 << 20, true)]);
        assert!(matches!(run(&memory, Work::Sync), Answer::Done));

        let null = open("n=null,size=1T");
        assert_eq!(extents_of(&null, 0, 1 << 40), [(1 << 40, true)]);
        assert!(matches!(run(&null, Work::Discard { range: range(&null, 0, 1 << 20), fua: true }), Answer::Done));
        assert_ne!(memory.id, null.id);
        assert!(memory.flags.has(twinrail_protocol::wire::VolumeFlags::VOLATILE));
    }

    #[test]
    fn a_hung_change_neither_holds_up_a_sync_nor_grows_the_queue() {
        let volume = open("m=memory,size=1M");
        let Store::Memory(store) = &volume.store else { panic!("memory is memory") };
        let store = Arc::clone(store);
        let held = store.hold_zeroing();
        let mailbox = Mailbox::new().unwrap();
        let job = |ticket| {
            let work = Work::Discard { range: range(&volume, 0, 65536), fua: false };
            Job { work, ticket, to: Arc::clone(&mailbox) }
        };
        // One may be with the thread already.
        let accepted = (0..).take_while(|&ticket| volume.keeper.submit(job(ticket)).is_ok()).count();
        assert!((CAPACITY..=CAPACITY + 1).contains(&accepted), "{accepted}");
        let back = volume.keeper.submit(job(99));
        assert!(accepted == CAPACITY || matches!(back, Err(Job { ticket: 99, .. })));
        assert!(matches!(run(&volume, Work::Sync), Answer::Done));
        drop(held);
        volume.keeper.stop();
        let answered = std::iter::from_fn(|| mailbox.take()).count();
        assert!(answered >= accepted, "every job accepted is answered, also by a keeper that stops");
        assert!(volume.keeper.submit(job(100)).is_err());
        assert_eq!(volume.keeper.final_sync(), Err(Status::FLUSH_FAILED));
    }

    #[test]
    fn injected_errors_hit_the_keeper_s_work() {
        let volume = open("m=memory,size=1M,inject=no-space@64K..128K+read-error@0");
        let zeroes = |offset| {
            run(&volume, Work::WriteZeroes { range: range(&volume, offset, 65536), may_unmap: true, fua: false })
        };
        assert!(matches!(zeroes(0), Answer::Done));
        assert!(failed(&zeroes(65536), Status::NO_SPACE));
        let status = run(&volume, Work::BlockStatus { range: range(&volume, 0, 512) });
        assert!(failed(&status, Status::IO_ERROR));
    }
}
