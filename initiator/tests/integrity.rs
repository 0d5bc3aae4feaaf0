//! I7: payloads that are damaged on their way, in both directions.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fake;

use std::sync::atomic::Ordering;

use fake::{Fake, Setup};
use twinrail_initiator::{Error, Opcode, Options, Status, VolumeUrl, blocking};

fn attach(fake: &Fake) -> blocking::Volume {
    let url: VolumeUrl = fake.url().parse().unwrap();
    blocking::Volume::connect(&url, Options { queues: 1, ..Options::default() }).unwrap()
}

/// What the volume has counted, once its thread has passed it on.
fn counted(volume: blocking::Volume, series: &str) -> u64 {
    let metrics = volume.as_async().metrics().clone();
    volume.close().unwrap();
    let text = metrics.render();
    let line = text.lines().find_map(|line| line.strip_prefix(series)).unwrap_or_else(|| panic!("no {series}"));
    line.trim().parse().unwrap()
}

const CRC_READ: &str = "twinrail_initiator_payload_crc_mismatches_total{op=\"read\",rail=\"tcp\"}";
const CRC_WRITE: &str = "twinrail_initiator_payload_crc_mismatches_total{op=\"write\",rail=\"tcp\"}";
const RESUBMISSIONS: &str = "twinrail_initiator_resubmissions_total{rail=\"tcp\"}";

#[test]
fn i7_a_read_that_was_damaged_is_repeated() {
    for length in [512, 128 << 10] {
        let fake = Fake::start(Setup::default());
        let volume = attach(&fake);
        fake.mischief().damage_reads.store(3, Ordering::SeqCst);
        let (buffer, result) = volume.read(4096, volume.buffer(length).unwrap());
        result.unwrap();
        assert!(buffer[..] == fake.shared.disk.lock().unwrap()[4096..4096 + length]);
        assert_eq!(counted(volume.clone(), CRC_READ), 3);
        assert_eq!(counted(volume, RESUBMISSIONS), 3);
    }
}

#[test]
fn i7_a_read_that_is_damaged_four_times_fails_and_the_next_one_works() {
    for length in [512, 128 << 10] {
        let fake = Fake::start(Setup::default());
        let volume = attach(&fake);
        fake.mischief().damage_reads.store(4, Ordering::SeqCst);
        let (buffer, result) = volume.read(4096, volume.buffer(length).unwrap());
        assert_eq!(result, Err(Error::Target { opcode: Opcode::READ, status: Status::PAYLOAD_CRC }));
        volume.read(4096, buffer).1.unwrap();
        assert_eq!(counted(volume.clone(), CRC_READ), 4);
        assert_eq!(counted(volume, RESUBMISSIONS), 3);
    }
}

#[test]
fn i7_a_write_that_was_damaged_is_repeated_and_executed_once_whole() {
    // In the capsule, in the window, and asked for.
    for (length, data_window) in [(512, 512 << 10), (128 << 10, 512 << 10), (128 << 10, 1024)] {
        let fake = Fake::start(Setup { data_window, ..Setup::default() });
        let volume = attach(&fake);
        fake.mischief().damage_writes.store(3, Ordering::SeqCst);
        let mut buffer = volume.buffer(length).unwrap();
        buffer.fill(0x5a);
        let (_, result) = volume.write(8192, buffer);
        result.unwrap();
        let disk = fake.shared.disk.lock().unwrap().clone();
        assert!(disk[8192..8192 + length].iter().all(|&b| b == 0x5a));
        assert_eq!(counted(volume.clone(), CRC_WRITE), 3);
        assert_eq!(counted(volume, RESUBMISSIONS), 3);
    }
}

#[test]
fn i7_a_write_that_is_damaged_four_times_fails_and_wrote_nothing() {
    let fake = Fake::start(Setup::default());
    let before = fake.shared.disk.lock().unwrap().clone();
    let volume = attach(&fake);
    fake.mischief().damage_writes.store(4, Ordering::SeqCst);
    let (buffer, result) = volume.write(0, volume.buffer(64 << 10).unwrap());
    assert_eq!(result, Err(Error::Target { opcode: Opcode::WRITE, status: Status::PAYLOAD_CRC }));
    assert!(*fake.shared.disk.lock().unwrap() == before);
    volume.write(0, buffer).1.unwrap();
    assert_eq!(counted(volume, RESUBMISSIONS), 3);
}
