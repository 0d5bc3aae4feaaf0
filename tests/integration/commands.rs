//! What the commands do to a volume, on every kind of backing.

use std::thread;

use rustix::process::Signal;
use twinrail_initiator::{AttachMode, Error, ExtentFlags, Options, VolumeUrl, ZeroOptions, blocking};
use twinrail_protocol::{Flags, Opcode, Status};
use twinrail_tests::wire::Queue;
use twinrail_tests::{Random, Target, image, scratch};

const MIB: u64 = 1 << 20;

fn attach(target: &Target, volume: &str, mode: AttachMode, queues: u16) -> blocking::Volume {
    let url: VolumeUrl = target.url(volume).parse().unwrap();
    blocking::Volume::connect(&url, Options { mode, queues, arena_bytes: 8 << 20, ..Options::default() }).unwrap()
}

#[test]
fn compare_and_write_adds_up_under_contention_of_many_initiators_and_queues() {
    const INITIATORS: u64 = 4;
    const QUEUES: u16 = 2;
    const THREADS: u64 = 2;
    const INCREMENTS: u64 = 100;
    let directory = scratch();
    let volume = format!("disk0={},size=1M", directory.path().join("disk0.img").display());
    let target = Target::builder(&[&volume]).args(&["--reactors", "2"]).start();
    let volumes: Vec<_> = (0..INITIATORS).map(|_| attach(&target, "disk0", AttachMode::SHARED, QUEUES)).collect();
    let block = volumes[0].info().geometry.logical_block as usize;

    let increment = |volume: &blocking::Volume| {
        let mut seen = vec![0; block];
        volume.read_at(0, &mut seen).unwrap();
        loop {
            let count = u64::from_le_bytes(seen[..8].try_into().unwrap());
            let mut buffer = volume.buffer(2 * block).unwrap();
            buffer[..block].copy_from_slice(&seen);
            buffer[block..].fill(0);
            buffer[block..block + 8].copy_from_slice(&(count + 1).to_le_bytes());
            match volume.compare_and_write(0, buffer).1 {
                Ok(()) => return,
                Err(Error::CompareFailed { offset }) => {
                    assert!(offset < block as u64);
                    volume.read_at(0, &mut seen).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    thread::scope(|scope| {
        for volume in &volumes {
            for _ in 0..THREADS {
                scope.spawn(|| (0..INCREMENTS).for_each(|_| increment(volume)));
            }
        }
    });
    let mut last = vec![0; block];
    volumes[0].read_at(0, &mut last).unwrap();
    assert_eq!(u64::from_le_bytes(last[..8].try_into().unwrap()), INITIATORS * THREADS * INCREMENTS);
    for volume in volumes {
        volume.close().unwrap();
    }
    target.stop();
}

/// More of them than a reactor's mailbox has room for, all in one turn of its loop.
#[test]
fn a_reactor_does_not_wait_for_room_in_its_own_mailbox() {
    const QUEUES: u64 = 600;
    // It looks at all queues in each turn, and never sleeps.
    let args = ["--reactors", "1", "--arena", "512M", "--spin-us", "1000000"];
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&args).start();
    let mut queues: Vec<_> = (0..QUEUES).map(|_| Queue::attach(target.address, "disk0", AttachMode::SHARED)).collect();
    for _ in 0..2 {
        queues.iter_mut().for_each(|queue| assert_eq!(queue.status(Opcode::READ, (0, 512), &[]), Status::OK));
    }
    target.process.signal(Signal::STOP);
    for queue in &mut queues {
        for slot in 0..32 {
            queue.send(slot, Opcode::COMPARE_AND_WRITE, Flags::NONE, (u64::from(slot) * 512, 512), &[0; 1024]);
        }
    }
    target.process.signal(Signal::CONT);
    for queue in &mut queues {
        for _ in 0..32 {
            assert_eq!(queue.reply().0.status, Status::OK);
        }
    }
}

#[test]
fn compare_and_write_that_finds_something_else_names_the_byte_and_writes_nothing() {
    let target = Target::serve(&["disk0=memory,size=1M"]);
    let volume = attach(&target, "disk0", AttachMode::EXCLUSIVE, 1);
    volume.write_at(4096, &[7; 4096]).unwrap();
    let mut buffer = volume.buffer(8192).unwrap();
    buffer[..4096].fill(7);
    buffer[1234] = 8;
    buffer[4096..].fill(9);
    let error = volume.compare_and_write(4096, buffer).1.unwrap_err();
    assert!(matches!(error, Error::CompareFailed { offset: 5330 }), "{error}");
    let mut content = [0; 4096];
    volume.read_at(4096, &mut content).unwrap();
    assert_eq!(content, [7; 4096]);
    volume.close().unwrap();
}

#[test]
fn zeroes_and_discards_free_space_and_block_status_tells_what_is_there() {
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let target = Target::serve(&[&format!("disk0={},size=8M", path.display())]);
    let volume = attach(&target, "disk0", AttachMode::EXCLUSIVE, 1);

    // Nothing was written: one hole.
    let extents = volume.block_status(0, 8 * MIB).unwrap();
    assert_eq!(extents.len(), 1, "{extents:?}");
    assert!(extents[0].flags.has(ExtentFlags::HOLE) && extents[0].flags.has(ExtentFlags::ZERO));

    let content = Random::new(1).bytes(6 * MIB as usize);
    volume.write_at(MIB, &content).unwrap();
    volume.flush().unwrap();
    let full = image::allocated_bytes(&path);
    assert!(full >= 6 * MIB);

    // Discard and write zeroes, which may unmap, give space back; one that keeps its allocation doesn't.
    volume.discard(MIB, MIB).unwrap();
    volume.write_zeroes(3 * MIB, MIB, ZeroOptions { fua: true, keep_allocated: false }).unwrap();
    volume.write_zeroes(5 * MIB, MIB, ZeroOptions { fua: false, keep_allocated: true }).unwrap();
    volume.flush().unwrap();
    let left = image::allocated_bytes(&path);
    assert!(left <= full - 2 * MIB && left >= full - 2 * MIB - 65536, "{full} bytes before, {left} after");

    let mut expected = vec![0; 8 * MIB as usize];
    expected[MIB as usize..7 * MIB as usize].copy_from_slice(&content);
    for zeroed in [1, 3, 5] {
        expected[zeroed * MIB as usize..(zeroed + 1) * MIB as usize].fill(0);
    }
    let mut found = vec![1; 8 * MIB as usize];
    volume.read_at(0, &mut found).unwrap();
    assert!(found == expected, "the content isn't what was written, zeroed and discarded");

    // The extents cover the volume, and where they say hole there are zeros.
    let extents = volume.block_status(0, 8 * MIB).unwrap();
    let mut at = 0;
    for extent in &extents {
        let end = at + extent.length as usize;
        let hole = extent.flags.has(ExtentFlags::HOLE);
        assert!(!hole || expected[at..end].iter().all(|&byte| byte == 0), "{extents:?}");
        at = end;
    }
    assert_eq!(at as u64, 8 * MIB);
    let is_hole = |offset: u64| {
        let mut end = 0;
        let extent = extents.iter().find(|extent| {
            end += extent.length;
            offset < end
        });
        extent.unwrap().flags.has(ExtentFlags::HOLE)
    };
    for (offset, hole) in [(0, true), (MIB, true), (2 * MIB, false), (3 * MIB, true), (4 * MIB, false), (7 * MIB, true)]
    {
        assert_eq!(is_hole(offset), hole, "at {offset}: {extents:?}");
    }
    volume.close().unwrap();
    target.stop();
}

#[test]
fn a_volume_in_memory_and_one_of_a_file_end_with_the_same_content() {
    let directory = scratch();
    let file = format!("file={},size=4M,logical-block=4096", directory.path().join("a.img").display());
    let target = Target::serve(&[&file, "memory=memory,size=4M,logical-block=4096"]);
    let volumes = ["file", "memory"].map(|name| attach(&target, name, AttachMode::EXCLUSIVE, 2));
    let mut random = Random::new(20);
    let mut model = vec![0u8; 4 * MIB as usize];
    for _ in 0..300 {
        let offset = random.below(1024) * 4096;
        let length = (1 + random.below(64)).min(1024 - offset / 4096) * 4096;
        let range = offset as usize..(offset + length) as usize;
        if random.below(3) == 0 {
            let options = ZeroOptions { fua: random.below(2) == 0, keep_allocated: random.below(2) == 0 };
            model[range].fill(0);
            volumes.iter().for_each(|volume| volume.write_zeroes(offset, length, options).unwrap());
        } else {
            random.fill(&mut model[range.clone()]);
            volumes.iter().for_each(|volume| volume.write_at(offset, &model[range.clone()]).unwrap());
        }
    }
    for volume in volumes {
        let mut found = vec![0; model.len()];
        volume.read_at(0, &mut found).unwrap();
        assert!(found == model, "the content differs from the model's");
        assert_eq!(volume.verify(0, 4 * MIB).unwrap(), twinrail_protocol::crc32c(&model));
        volume.close().unwrap();
    }
}

#[test]
fn a_write_is_seen_by_every_queue_and_every_reader() {
    let target = Target::builder(&["disk0=memory,size=1M"]).args(&["--reactors", "2"]).start();
    let writer = attach(&target, "disk0", AttachMode::EXCLUSIVE, 2);
    let reader = attach(&target, "disk0", AttachMode::READ_ONLY, 2);
    let mut found = [0; 4096];
    for round in 0..2000u32 {
        let content = [round as u8; 4096];
        writer.write_at(0, &content).unwrap();
        for volume in [&writer, &reader] {
            volume.read_at(0, &mut found).unwrap();
            assert!(found == content, "round {round} isn't seen (I4)");
        }
    }
    reader.close().unwrap();
    writer.close().unwrap();
}
