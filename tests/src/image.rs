//! Large files: made, and compared.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::Random;

const MIB: usize = 1 << 20;

/// Makes a file as disk images are: some of its mebibytes are holes, some written with zeros, some with data, some
/// half and half. The same seed makes the same file.
///
/// # Panics
/// When the file can't be written.
pub fn make(path: &Path, size: u64, seed: u64) {
    let mut file = File::create(path).unwrap();
    file.set_len(size).unwrap();
    let mut random = Random::new(seed);
    let mut buffer = vec![0; MIB];
    for offset in (0..size).step_by(MIB) {
        let length = usize::try_from(size - offset).map_or(MIB, |left| left.min(MIB));
        let chunk = &mut buffer[..length];
        match random.below(4) {
            0 => continue,
            1 => chunk.fill(0),
            2 => random.fill(chunk),
            _ => {
                random.fill(&mut chunk[..length / 2]);
                chunk[length / 2..].fill(0);
            }
        }
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(chunk).unwrap();
    }
}

/// Demands that two files begin with the same `size` bytes.
///
/// # Panics
/// When they don't; the first byte that differs is named.
pub fn assert_same(a: &Path, b: &Path, size: u64) {
    let (mut left, mut right) = (File::open(a).unwrap(), File::open(b).unwrap());
    let (mut x, mut y) = (vec![0; MIB], vec![0; MIB]);
    for offset in (0..size).step_by(MIB) {
        let length = usize::try_from(size - offset).map_or(MIB, |left| left.min(MIB));
        left.read_exact(&mut x[..length]).unwrap_or_else(|error| panic!("{}: {error}", a.display()));
        right.read_exact(&mut y[..length]).unwrap_or_else(|error| panic!("{}: {error}", b.display()));
        if let Some(at) = (0..length).find(|&i| x[i] != y[i]) {
            panic!("{} and {} differ at byte {}", a.display(), b.display(), offset + at as u64);
        }
    }
}

/// Bytes that a file takes on the disk.
///
/// # Panics
/// When there is no such file.
#[must_use]
pub fn allocated_bytes(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}
