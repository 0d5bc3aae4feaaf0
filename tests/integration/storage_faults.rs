//! Storage that fails, is full or is slow: a status of our own, the truth about flushes, and peace for everybody else.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use twinrail_protocol::wire::AttachMode;
use twinrail_protocol::{Flags, Opcode, Status};
use twinrail_tests::wire::Queue;
use twinrail_tests::{Target, is_root, run, scratch, skip, twinrail};

const MIB: u64 = 1 << 20;

/// A target in which faults may be injected.
fn faulty(volumes: &[&str], args: &[&str]) -> Target {
    Target::builder(volumes).args(&["--allow-fault-injection"]).args(args).start()
}

/// A volume in a file with faults.
fn file_volume(directory: &Path, faults: &str) -> String {
    format!("disk0={},size=4M,inject={faults}", directory.join("disk0.img").display())
}

fn attach(target: &Target, volume: &str) -> Queue {
    Queue::attach(target.address, volume, AttachMode::EXCLUSIVE)
}

#[test]
fn an_io_error_is_a_status_of_its_command_and_of_no_other() {
    let directory = scratch();
    let target = faulty(&[&file_volume(directory.path(), "read-error@1M..2M+write-error@2M..3M")], &[]);
    let mut queue = attach(&target, "disk0");
    let content = vec![3; MIB as usize];
    for (mebibyte, opcode, status) in [
        (0, Opcode::WRITE, Status::OK),
        (1, Opcode::WRITE, Status::OK),
        (2, Opcode::WRITE, Status::IO_ERROR),
        (3, Opcode::WRITE, Status::OK),
        (0, Opcode::READ, Status::OK),
        (1, Opcode::READ, Status::IO_ERROR),
        (1, Opcode::VERIFY, Status::IO_ERROR),
        (2, Opcode::READ, Status::OK),
        (2, Opcode::WRITE_ZEROES, Status::IO_ERROR),
        (2, Opcode::DISCARD, Status::IO_ERROR),
        (3, Opcode::WRITE_ZEROES, Status::OK),
    ] {
        let payload = if opcode == Opcode::WRITE { &content[..] } else { &[] };
        assert_eq!(queue.status(opcode, (mebibyte * MIB, MIB), payload), status, "{opcode} of mebibyte {mebibyte}");
    }
    let pair = vec![3; 8192];
    assert_eq!(queue.status(Opcode::COMPARE_AND_WRITE, (2 * MIB, 4096), &pair), Status::IO_ERROR);
    queue.close();
    let scrape =
        target.scrape_until("the errors", |s| s.sum("twinrail_target_commands_total", &[("result", "storage")]) == 6.0);
    assert!(scrape.sum("twinrail_target_storage_errors_total", &[("volume", "disk0")]) >= 6.0, "{}", scrape.text);
    assert!(target.process.log().contains("disk0"), "the log doesn't name the volume");
    // And people are told what to do.
    let complaint = twinrail(["read", &target.url("disk0"), "--offset", "1M", "--length", "4k"]).complaint();
    assert!(complaint.contains("io_error") && complaint.contains("I/O error"), "{complaint}");
}

#[test]
fn a_full_disk_is_no_space_and_goes_on_when_there_is_room_again() {
    let directory = scratch();
    let target = faulty(&[&file_volume(directory.path(), "no-space@1M..")], &[]);
    let mut queue = attach(&target, "disk0");
    assert_eq!(queue.status(Opcode::WRITE, (0, 4096), &[1; 4096]), Status::OK);
    assert_eq!(queue.status(Opcode::WRITE, (MIB, 4096), &[1; 4096]), Status::NO_SPACE);
    assert_eq!(queue.status(Opcode::READ, (MIB, 4096), &[]), Status::OK);
    queue.close();
    let run = twinrail(["write", &target.url("disk0"), "/dev/zero", "--offset", "1M", "--length", "4k"]);
    assert_eq!(run.code, Some(1));
    let complaint = run.complaint();
    assert!(complaint.contains("no_space") && complaint.contains("make room"), "{complaint}");
}

/// A file system of a few mebibytes; gone with this.
struct SmallFileSystem {
    path: PathBuf,
}

impl SmallFileSystem {
    fn mount(path: PathBuf) -> Option<Self> {
        std::fs::create_dir(&path).unwrap();
        let mounted = run("mount", ["-t", "tmpfs", "-o", "size=4m", "tmpfs", path.to_str().unwrap()]);
        (mounted.code == Some(0)).then_some(Self { path })
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = run("umount", ["--lazy", self.path.to_str().unwrap()]);
    }
}

#[test]
fn a_file_system_that_runs_full_fails_the_writes_that_do_not_fit_and_nothing_else() {
    if !is_root() {
        return skip("only root may mount a file system of 4 MiB");
    }
    let directory = scratch();
    let Some(small) = SmallFileSystem::mount(directory.path().join("small")) else {
        return skip("no tmpfs can be mounted here");
    };
    let volume = format!("disk0={},size=16M", small.path.join("disk0.img").display());
    let target = Target::serve(&[&volume, "disk1=memory,size=1M"]);
    let (mut queue, mut other) = (attach(&target, "disk0"), attach(&target, "disk1"));
    let mut written = Vec::new();
    for mebibyte in 0..16 {
        match queue.status(Opcode::WRITE, (mebibyte * MIB, MIB), &vec![mebibyte as u8 + 1; MIB as usize]) {
            Status::OK => written.push(mebibyte),
            status => assert_eq!(status, Status::NO_SPACE),
        }
        assert_eq!(other.status(Opcode::WRITE, (0, 4096), &[1; 4096]), Status::OK);
    }
    assert!((1..=4).contains(&written.len()), "{written:?} fit into 4 MiB");
    for &mebibyte in &written {
        let (reply, payload) = queue.call(Opcode::READ, Flags::NONE, (mebibyte * MIB, MIB), &[]);
        assert_eq!(reply.status, Status::OK);
        assert!(payload == vec![mebibyte as u8 + 1; MIB as usize]);
    }
    // Room is made, and it goes on.
    assert_eq!(queue.status(Opcode::DISCARD, (written[0] * MIB, MIB), &[]), Status::OK);
    assert_eq!(queue.status(Opcode::WRITE, (15 * MIB, MIB / 2), &vec![9; MIB as usize / 2]), Status::OK);
    assert_eq!(queue.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
    queue.close();
    other.close();
    target.scrape_until("the storage errors", |s| {
        s.sum("twinrail_target_storage_errors_total", &[("volume", "disk0")]) == (16 - written.len()) as f64
    });
    target.stop();
}

#[test]
fn i5_a_full_disk_is_no_failed_sync_for_a_write_with_fua() {
    if !is_root() {
        return skip("only root may mount a file system of 4 MiB");
    }
    let directory = scratch();
    let Some(small) = SmallFileSystem::mount(directory.path().join("small")) else {
        return skip("no tmpfs can be mounted here");
    };
    let target = Target::serve(&[&format!("disk0={},size=16M", small.path.join("disk0.img").display())]);
    let mut queue = attach(&target, "disk0");
    let full = (0..16).any(|mebibyte| {
        let payload = vec![1; MIB as usize];
        match queue.call(Opcode::WRITE, Flags::FUA, (mebibyte * MIB, MIB), &payload).0.status {
            Status::OK => false,
            status => {
                assert_eq!(status, Status::NO_SPACE);
                true
            }
        }
    });
    assert!(full, "16 MiB fit into 4");
    // What was written before is safe, and may be said to be.
    assert_eq!(queue.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
    queue.close();
    let scrape = target.scrape_until("the storage error", |s| {
        s.sum("twinrail_target_storage_errors_total", &[("volume", "disk0")]) == 1.0
    });
    assert_eq!(scrape.sum("twinrail_target_failed_syncs_total", &[("volume", "disk0")]), 0.0);
}

#[test]
fn a_compare_and_write_of_a_bad_sector_fails_and_a_block_status_ends_before_it() {
    let directory = scratch();
    let target = faulty(&[&file_volume(directory.path(), "read-error@1M..2M")], &[]);
    let mut queue = attach(&target, "disk0");
    assert_eq!(queue.status(Opcode::COMPARE_AND_WRITE, (MIB, 4096), &[0; 8192]), Status::IO_ERROR);
    assert_eq!(queue.status(Opcode::COMPARE_AND_WRITE, (0, 4096), &[0; 8192]), Status::OK);
    let (reply, extents) = queue.call(Opcode::BLOCK_STATUS, Flags::NONE, (0, 4 * MIB), &[]);
    assert_eq!(reply.status, Status::OK);
    let lengths = extents.chunks_exact(16).map(|extent| u64::from_le_bytes(extent[..8].try_into().unwrap()));
    assert_eq!(lengths.sum::<u64>(), MIB);
    assert_eq!(queue.status(Opcode::BLOCK_STATUS, (MIB, MIB), &[]), Status::IO_ERROR);
    assert_eq!(queue.status(Opcode::BLOCK_STATUS, (2 * MIB, MIB), &[]), Status::OK);
    queue.close();
    target.scrape_until("two errors", |s| s.sum("twinrail_target_storage_errors_total", &[("volume", "disk0")]) == 2.0);
}

#[test]
fn i5_after_a_failed_sync_no_flush_of_a_session_with_unflushed_writes_succeeds() {
    let directory = scratch();
    let target = faulty(&[&file_volume(directory.path(), "sync-error@2")], &[]);
    let shared = || Queue::attach(target.address, "disk0", AttachMode::SHARED);
    let (mut dirty, mut clean) = (shared(), shared());
    // The first sync is fine; what it covers is safe.
    assert_eq!(clean.status(Opcode::WRITE, (MIB, 4096), &[1; 4096]), Status::OK);
    assert_eq!(clean.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
    // The second one fails, while one session has a write that wasn't flushed.
    assert_eq!(dirty.status(Opcode::WRITE, (0, 4096), &[2; 4096]), Status::OK);
    assert_eq!(dirty.status(Opcode::FLUSH, (0, 0), &[]), Status::FLUSH_FAILED);
    // The disk is well again, and that session's flushes go on failing; the other's don't.
    for _ in 0..3 {
        assert_eq!(dirty.status(Opcode::FLUSH, (0, 0), &[]), Status::FLUSH_FAILED);
        assert_eq!(clean.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
    }
    assert_eq!(dirty.status(Opcode::WRITE, (0, 4096), &[3; 4096]), Status::OK);
    assert_eq!(dirty.status(Opcode::FLUSH, (0, 0), &[]), Status::FLUSH_FAILED);
    // Until it is detached.
    dirty.close();
    let mut again = shared();
    assert_eq!(again.status(Opcode::WRITE, (0, 4096), &[4; 4096]), Status::OK);
    assert_eq!(again.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
    again.close();
    clean.close();
    target.scrape_until("one failed sync", |s| {
        s.sum("twinrail_target_failed_syncs_total", &[("volume", "disk0")]) == 1.0
    });
    let info = twinrail(["info", "--json", &target.url("disk0")]).json();
    assert_eq!(info["failed_syncs"], 1, "{info}");
}

#[test]
fn i5_a_write_with_fua_whose_sync_fails_is_not_acknowledged() {
    let directory = scratch();
    let target = faulty(&[&file_volume(directory.path(), "sync-error@..")], &[]);
    let mut queue = attach(&target, "disk0");
    // A write with FUA goes to the disk by itself; WRITE ZEROES and DISCARD need a sync.
    for opcode in [Opcode::WRITE_ZEROES, Opcode::DISCARD] {
        let (reply, _) = queue.call(opcode, Flags::FUA, (0, 4096), &[]);
        assert_eq!(reply.status, Status::FLUSH_FAILED, "{opcode}");
    }
    queue.close();
}

#[test]
fn i5_a_change_with_fua_beside_a_sync_that_fails_is_not_acknowledged() {
    // The failed sync may have lost it, and the next one, which succeeds, doesn't hear of that.
    let target = faulty(&["disk0=memory,size=1M,inject=sync-error@1+sync-delay-ms=500"], &[]);
    let shared = || Queue::attach(target.address, "disk0", AttachMode::SHARED);
    let (mut flusher, mut writer) = (shared(), shared());
    flusher.send(0, Opcode::FLUSH, Flags::NONE, (0, 0), &[]);
    flusher.send(1, Opcode::READ, Flags::NONE, (0, 512), &[]);
    assert_eq!(flusher.reply().0.opcode, Opcode::READ);
    // Done by the other thread of the volume: by then the sync has begun.
    for _ in 0..20 {
        assert_eq!(writer.status(Opcode::DISCARD, (0, 65536), &[]), Status::OK);
    }
    let (reply, _) = writer.call(Opcode::WRITE_ZEROES, Flags::FUA, (0, 4096), &[]);
    assert_eq!(reply.status, Status::FLUSH_FAILED);
    assert_eq!(flusher.reply().0.status, Status::FLUSH_FAILED);
    // And one that begins afterwards is.
    let (reply, _) = writer.call(Opcode::WRITE_ZEROES, Flags::FUA, (0, 4096), &[]);
    assert_eq!(reply.status, Status::OK);
    target.scrape_until("one failed sync", |s| {
        s.sum("twinrail_target_failed_syncs_total", &[("volume", "disk0")]) == 1.0
    });
}

#[test]
fn a_slow_disk_never_stalls_the_queue_of_another_volume() {
    const DELAY: Duration = Duration::from_millis(1000);
    let directory = scratch();
    let ms = DELAY.as_millis();
    let faults = format!("read-delay-ms={ms}+write-delay-ms={ms}+sync-delay-ms={ms}");
    let volumes = [file_volume(directory.path(), &faults), "disk1=memory,size=1M".into()];
    let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
    // One reactor, so that the two queues can't but meet.
    let target = faulty(&volumes, &["--reactors", "1"]);
    let (mut slow, mut fast) = (attach(&target, "disk0"), attach(&target, "disk1"));
    let begun = Instant::now();
    // More than its slots' worth of every kind of work.
    let depth = slow.granted_slots;
    for slot in 0..depth {
        let (offset, payload) = (u64::from(slot) * 65536, vec![1; 65536]);
        match slot % 4 {
            0 => slow.send(slot, Opcode::READ, Flags::NONE, (offset, 65536), &[]),
            1 => slow.send(slot, Opcode::WRITE, Flags::NONE, (offset, 65536), &payload),
            2 => slow.send(slot, Opcode::WRITE_ZEROES, Flags::FUA, (offset, 65536), &[]),
            _ => slow.send(slot, Opcode::FLUSH, Flags::NONE, (0, 0), &[]),
        }
    }
    for round in 0..500u64 {
        let range = (round % 256 * 4096, 4096);
        assert_eq!(fast.status(Opcode::WRITE, range, &[2; 4096]), Status::OK);
        assert_eq!(fast.status(Opcode::READ, range, &[]), Status::OK);
        assert_eq!(fast.status(Opcode::FLUSH, (0, 0), &[]), Status::OK);
    }
    let fast_took = begun.elapsed();
    fast.close();
    for _ in 0..depth {
        assert_eq!(slow.reply().0.status, Status::OK);
    }
    assert!(begun.elapsed() >= DELAY, "the slow disk wasn't slow");
    assert!(fast_took < DELAY, "1500 commands of the other volume took {fast_took:?}");
    println!("1500 commands took {fast_took:?} beside a disk that takes {DELAY:?} for each");
    slow.close();
}
