//! A volume's UUID, bound to its backing: the same file or disk has the same one after a restart, and
//! another file under the same name has another. An initiator that comes back is refused then, instead of
//! writing to a disk that isn't the one it knew.

use std::path::{Path, PathBuf};

use rustix::fs::{Statx, StatxFlags};
use rustix::rand::{GetRandomFlags, getrandom};
use twinrail_protocol::VolumeId;

/// UUID of a regular file: its file system's device, its inode, and when that was made (inodes are used again).
pub(super) fn of_file(stat: &Statx) -> VolumeId {
    let mut hash = Fnv1a::new("twinrail volume: file");
    hash.number(u64::from(stat.stx_dev_major));
    hash.number(u64::from(stat.stx_dev_minor));
    hash.number(stat.stx_ino);
    if stat.stx_mask & StatxFlags::BTIME.bits() != 0 {
        hash.number(stat.stx_btime.tv_sec.cast_unsigned());
        hash.number(u64::from(stat.stx_btime.tv_nsec));
    }
    hash.uuid()
}

/// UUID of a block device: its serial number and partition where the kernel tells them, since the device number may be
/// another one after a reboot; else that number.
pub(super) fn of_block_device(major: u32, minor: u32) -> VolumeId {
    let directory = sysfs(major, minor);
    // The disk's own directory, or the parent's for a partition.
    let names = ["wwid", "device/wwid", "serial", "device/serial", "dm/uuid", "../wwid", "../device/wwid", "../serial"];
    let serial = names.iter().find_map(|name| read(&directory.join(name)));
    let mut hash = Fnv1a::new("twinrail volume: block device");
    match serial {
        Some(serial) => {
            hash.bytes(serial.as_bytes());
            hash.bytes(read(&directory.join("partition")).unwrap_or_default().as_bytes());
        }
        None => {
            hash.number(u64::from(major));
            hash.number(u64::from(minor));
        }
    }
    hash.uuid()
}

/// A new UUID, for what doesn't outlive the process.
pub(super) fn random() -> std::io::Result<VolumeId> {
    let mut bytes = [0; 16];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(VolumeId(stamp(bytes, 4)))
}

/// Where the kernel tells of a block device.
pub(super) fn sysfs(major: u32, minor: u32) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// A word from sysfs; nothing when there is none or it is empty.
pub(super) fn read(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Sets the version and the variant bits of RFC 9562.
fn stamp(mut bytes: [u8; 16], version: u8) -> [u8; 16] {
    bytes[6] = bytes[6] & 0x0f | version << 4;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

/// FNV-1a of 128 bits. Not against an attacker: whoever may choose the backing may choose its content too.
/// It must never change, or every volume would have another UUID after an update.
struct Fnv1a(u128);

impl Fnv1a {
    const OFFSET: u128 = 0x6c62272e07bb014262b821756295c58d;
    const PRIME: u128 = 0x0000000001000000000000000000013b;

    fn new(kind: &str) -> Self {
        let mut hash = Self(Self::OFFSET);
        hash.bytes(kind.as_bytes());
        hash
    }

    /// The length goes in first, so that no two lists of fields run together.
    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.mix(bytes);
    }

    fn number(&mut self, number: u64) {
        self.mix(&number.to_le_bytes());
    }

    fn mix(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(Self::PRIME);
        }
    }

    fn uuid(&self) -> VolumeId {
        VolumeId(stamp(self.0.to_be_bytes(), 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a_of_128_bits() {
        let mut hash = Fnv1a(Fnv1a::OFFSET);
        hash.mix(b"a");
        assert_eq!(hash.0, 0xd228cb696f1a8caf78912b704e4a8964, "the published value for \"a\"");
    }

    #[test]
    fn an_update_of_the_target_gives_no_volume_another_uuid() {
        let id = of_block_device(u32::MAX, 7);
        assert_eq!(id, of_block_device(u32::MAX, 7));
        assert_ne!(id, of_block_device(u32::MAX, 8));
        assert_eq!(id.to_string(), "9118e64d-d171-8702-9db7-91d0f6b52d44");
    }

    #[test]
    fn random_uuids_differ_and_say_that_they_are_random() {
        let (a, b) = (random().unwrap(), random().unwrap());
        assert_ne!(a, b);
        assert_eq!(a.0[6] >> 4, 4);
        assert_eq!(a.0[8] >> 6, 2);
    }
}
