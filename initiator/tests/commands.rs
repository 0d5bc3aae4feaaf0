//! Every command, small and large, against the fake target.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../examples/first_light.rs"]
#[allow(dead_code, reason = "its `main` is for people")]
mod example;
mod fake;

use std::sync::atomic::Ordering;

use fake::{Fake, Setup};
use twinrail_initiator::{
    AttachMode, Error, Extent, ExtentFlags, Opcode, Options, Rejection, Status, Volume, VolumeUrl, ZeroOptions,
    blocking,
};
use twinrail_protocol::{Geometry, crc32c};

fn options() -> Options {
    Options { queues: 2, depth: 32, ..Options::default() }
}

fn attach(fake: &Fake) -> blocking::Volume {
    let url: VolumeUrl = fake.url().parse().unwrap();
    blocking::Volume::connect(&url, options()).unwrap()
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i * 13 + i / 509) as u8 ^ seed).collect()
}

#[test]
fn what_is_written_is_read_small_and_large() {
    // A long piece doesn't fit the window: the target asks for it.
    let fake = Fake::start(Setup { data_window: 128 << 10, ..Setup::default() });
    let volume = attach(&fake);
    let mut offset = 512;
    // In the capsule, above it, one transfer, several, more than fly at once.
    for (seed, length) in [512, 4096, 4608, 256 << 10, (256 << 10) + 512, 3 << 20].into_iter().enumerate() {
        let data = pattern(length, seed as u8);
        let mut buffer = volume.buffer(length).unwrap();
        buffer.copy_from_slice(&data);
        let (mut buffer, result) = volume.write(offset, buffer);
        result.unwrap();
        assert_eq!(fake.shared.disk.lock().unwrap()[offset as usize..][..length], data);
        buffer.fill(0);
        let (buffer, result) = volume.read(offset, buffer);
        result.unwrap();
        assert!(*buffer == *data, "{length} bytes at {offset}");
        offset += length as u64;
    }
    assert_eq!(fake.seen().fetched.load(Ordering::SeqCst), 1 + 1 + 12);
    volume.close().unwrap();
    assert_eq!(fake.seen().closes.load(Ordering::SeqCst), 1);
}

#[test]
fn the_example_of_the_front_page_runs() {
    let fake = Fake::start(Setup::default());
    example::first_light(&fake.url().parse().unwrap()).unwrap();
    assert!(fake.shared.disk.lock().unwrap()[..4096].iter().all(|&b| b == 0x42));
    assert_eq!(fake.seen().closes.load(Ordering::SeqCst), 1);
}

#[test]
fn all_commands_do_what_they_say() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake);
    let mut buffer = volume.buffer(1024).unwrap();
    buffer.fill(5);
    let (buffer, result) = volume.write_fua(0, buffer);
    result.unwrap();
    volume.flush().unwrap();
    assert_eq!((fake.seen().fua.load(Ordering::SeqCst), fake.seen().flushes.load(Ordering::SeqCst)), (1, 1));

    volume.write_zeroes(4096, 8192, ZeroOptions { fua: true, keep_allocated: true }).unwrap();
    volume.discard(65536, 4096).unwrap();
    let disk = fake.shared.disk.lock().unwrap().clone();
    assert!(disk[4096..12288].iter().all(|&b| b == 0) && disk[65536..69632].iter().all(|&b| b == 0));

    let mut pair = volume.buffer(1024).unwrap();
    pair[..512].fill(5);
    pair[512..].fill(6);
    let (mut pair, result) = volume.compare_and_write(512, pair);
    result.unwrap();
    assert!(fake.shared.disk.lock().unwrap()[512..1024].iter().all(|&b| b == 6));
    pair[..512].fill(6);
    pair[100] = 7;
    let (_, result) = volume.compare_and_write(512, pair);
    assert_eq!(result, Err(Error::CompareFailed { offset: 612 }));

    let extents = volume.block_status(0, 1 << 17).unwrap();
    let extent = |length, flags| Extent { length, flags };
    let (data, zero) = (ExtentFlags::DATA, ExtentFlags::ZERO);
    let expected = [
        extent(4096, data),
        extent(8192, zero),
        extent(65536 - 12288, data),
        extent(4096, zero),
        extent((1 << 17) - 69632, data),
    ];
    assert_eq!(extents, expected);

    let whole = fake.shared.setup.geometry.size;
    let crc = crc32c(&fake.shared.disk.lock().unwrap());
    assert_eq!(volume.verify(0, whole).unwrap(), crc);
    let info = volume.identify().unwrap();
    assert_eq!(info, volume.info());
    assert_eq!((info.geometry, info.queues, volume.as_async().target_name()), (fake.shared.setup.geometry, 4, "fake"));
    assert!(volume.ping().unwrap().as_nanos() > 0);
    drop(buffer);
    let arena = volume.as_async().arena();
    assert_eq!(arena.free_bytes(), arena.total_bytes());
    volume.close().unwrap();
}

#[test]
fn memory_of_the_caller_is_copied_and_counted() {
    let fake = Fake::start(Setup::default());
    let url: VolumeUrl = fake.url().parse().unwrap();
    // Less memory than one call moves.
    let options = Options { arena_bytes: 2 << 20, ..options() };
    let volume = blocking::Volume::connect(&url, options).unwrap();
    let data = pattern(5 << 20, 3);
    volume.write_at(1024, &data).unwrap();
    let mut back = vec![0; data.len()];
    // Fragmented, it is done in smaller pieces.
    let _held: Vec<_> = (0..3).map(|_| volume.buffer(256 << 10).unwrap()).collect();
    volume.read_at(1024, &mut back).unwrap();
    assert!(data == back);
    let text = volume.as_async().metrics().render();
    assert!(text.contains("copied_bytes_total{reason=\"unregistered\"} 10485760\n"), "{text}");
    assert_eq!(volume.read_at(0, &mut []), Err(Rejection::Empty { opcode: Opcode::READ, offset: 0 }.into()));
}

#[test]
fn bad_requests_are_turned_down_here_and_name_the_remedy() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake);
    let before = fake.seen().commands.load(Ordering::SeqCst);
    let (buffer, result) = volume.read(1, volume.buffer(512).unwrap());
    let error = result.unwrap_err();
    assert!(error.to_string().contains("block of 512 bytes"), "{error}");
    assert_eq!(buffer.len(), 512, "the buffer comes back");
    let size = fake.shared.setup.geometry.size;
    let (_, result) = volume.write(size, buffer);
    assert!(matches!(result, Err(Error::Rejected(Rejection::OutOfRange { .. }))));
    assert!(volume.write_zeroes(0, 0, ZeroOptions::default()).is_err());
    assert!(volume.discard(0, 100).is_err());
    assert!(volume.verify(size - 512, 1024).is_err());
    let (_, result) = volume.compare_and_write(0, volume.buffer((256 << 10) + 1024).unwrap());
    assert!(result.unwrap_err().to_string().contains("131072 is the most"));
    let (_, result) = volume.compare_and_write(0, volume.buffer(512).unwrap());
    assert!(result.unwrap_err().to_string().contains("multiples"));
    assert_eq!(fake.seen().commands.load(Ordering::SeqCst), before, "nothing was sent");
}

#[test]
fn a_reader_changes_nothing() {
    let fake = Fake::start(Setup::default());
    let url: VolumeUrl = fake.url().parse().unwrap();
    let options = Options { mode: AttachMode::READ_ONLY, ..options() };
    let volume = blocking::Volume::connect(&url, options).unwrap();
    let (buffer, result) = volume.write(0, volume.buffer(512).unwrap());
    assert_eq!(result, Err(Rejection::ReadOnly { opcode: Opcode::WRITE }.into()));
    volume.read(0, buffer).1.unwrap();
    volume.flush().unwrap();
}

#[test]
fn a_status_of_the_target_is_told_with_what_to_do() {
    let fake = Fake::start(Setup::default());
    let volume = attach(&fake);
    *fake.mischief().flush_status.lock().unwrap() = Some(Status::FLUSH_FAILED);
    let error = volume.flush().unwrap_err();
    assert_eq!(error, Error::Target { opcode: Opcode::FLUSH, status: Status::FLUSH_FAILED });
    assert!(error.to_string().contains("write again what was not flushed"));
    volume.flush().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_callers_than_slots_are_all_served() {
    let geometry = Geometry { size: 4 << 20, ..Setup::default().geometry };
    let fake = Fake::start(Setup { depth: 4, granted_slots: 3, geometry, ..Setup::default() });
    let url: VolumeUrl = fake.url().parse().unwrap();
    let volume = Volume::connect(&url, options()).await.unwrap();
    assert_eq!((volume.queues(), volume.depth()), (2, 8));
    let tasks: Vec<_> = (0..64u64)
        .map(|task| {
            let volume = volume.clone();
            tokio::spawn(async move {
                let mut buffer = volume.buffer(8192).unwrap();
                for round in 0..20u8 {
                    buffer.fill(task as u8 ^ round);
                    let (back, result) = volume.write(task * 8192, buffer).await;
                    result.unwrap();
                    let (back, result) = volume.read(task * 8192, back).await;
                    result.unwrap();
                    assert!(back.iter().all(|&b| b == task as u8 ^ round));
                    buffer = back;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    volume.close().await.unwrap();
    assert_eq!(volume.flush().await, Err(Rejection::Closed { opcode: Opcode::FLUSH }.into()));
    assert_eq!(volume.arena().free_bytes(), volume.arena().total_bytes());
}
