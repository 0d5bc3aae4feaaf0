//! Whether volumes have backings of their own. Found out before any of them is opened: one that found its backing
//! locked couldn't tell this target from another process, and would wait for it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::open_error::OpenError;
use super::spec::{Backing, VolumeSpec};

/// What makes a backing the same one, whatever its path: links of both kinds lead to one of these.
#[derive(PartialEq, Eq, Hash)]
enum Backed {
    /// A file, by device and inode.
    File(u64, u64),
    /// A block device, by its number: several nodes may lead to it.
    Device(u64),
    /// A file that is to be made, by its directory and name.
    Missing(PathBuf, OsString),
}

impl Backed {
    /// Nothing if there can't be one: opening it says why.
    fn by(path: &Path) -> Option<Self> {
        if let Ok(found) = std::fs::metadata(path) {
            return Some(match found.file_type().is_block_device() {
                true => Self::Device(found.rdev()),
                false => Self::File(found.dev(), found.ino()),
            });
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(Self::Missing(parent.canonicalize().ok()?, path.file_name()?.to_owned()))
    }
}

/// Sees to it that no two volumes have one backing; those that are only read may.
///
/// # Errors
/// [`OpenError::SameBacking`], for the first two.
pub fn check_backings(specs: &[VolumeSpec]) -> Result<(), OpenError> {
    let mut seen: HashMap<Backed, (&VolumeSpec, &Path)> = HashMap::new();
    for spec in specs {
        let Backing::File(path) = &spec.backing else { continue };
        let Some(backed) = Backed::by(path) else { continue };
        let (first, first_path) = *seen.entry(backed).or_insert((spec, path));
        let both_read = first.read_only && spec.read_only;
        if !std::ptr::eq(first, spec) && !both_read {
            return Err(OpenError::SameBacking {
                volumes: [first.name.clone(), spec.name.clone()],
                paths: [first_path.to_owned(), path.clone()],
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::testing::loop_device;

    fn check(volumes: &[String]) -> Result<(), String> {
        let specs: Vec<_> = volumes.iter().map(|text| VolumeSpec::parse(text).unwrap()).collect();
        check_backings(&specs).map_err(|error| error.to_string())
    }

    #[test]
    fn one_backing_of_two_volumes_is_seen_through_links_of_both_kinds() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let volume = |name: &str, path: &str, options: &str| format!("{name}={}{options}", at(path).display());
        std::fs::write(at("disk.img"), [0; 4096]).unwrap();
        std::fs::hard_link(at("disk.img"), at("hard.img")).unwrap();
        std::os::unix::fs::symlink(at("disk.img"), at("soft.img")).unwrap();
        std::os::unix::fs::symlink(directory.path(), at("here")).unwrap();
        for path in ["disk.img", "hard.img", "soft.img", "here/disk.img"] {
            let text = check(&[volume("a", "disk.img", ",read-only"), volume("b", path, "")]).unwrap_err();
            assert!(text.contains("volumes \"a\" and \"b\"") && text.contains(path), "{text}");
            check(&[volume("a", "disk.img", ",read-only"), volume("b", path, ",read-only")]).unwrap();
        }
        // Files that aren't there yet, too.
        let text = check(&[volume("a", "new.img", ",size=1M"), volume("b", "here/new.img", ",size=1M")]).unwrap_err();
        assert!(text.contains("volumes \"a\" and \"b\""), "{text}");
        std::fs::write(at("other.img"), [0; 4096]).unwrap();
        check(&[volume("a", "disk.img", ""), volume("b", "other.img", ""), volume("c", "new.img", ",size=1M")])
            .unwrap();
        check(&["a=memory,size=1M".into(), "b=memory,size=1M".into()]).unwrap();
    }

    #[test]
    fn one_block_device_of_two_volumes_is_seen_too() {
        let Some(device) = loop_device(1 << 20) else { return };
        let volume = |name: &str| format!("{name}={}", device.path().display());
        let text = check(&[volume("a"), volume("b")]).unwrap_err();
        assert!(text.contains("volumes \"a\" and \"b\""), "{text}");
    }
}
