//! Storage that tests need and only root can make. Where it can't be made the test says why and passes.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Runs a command; its output, or why not.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

fn or_say<T>(result: Result<T, String>) -> Option<T> {
    result.inspect_err(|error| println!("skipped: {error}")).ok()
}

/// A mounted file system; unmounted when dropped.
pub(super) struct Mount {
    directory: TempDir,
}

impl Mount {
    pub(super) fn tmpfs(options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        or_say(run(Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(directory.path())))?;
        Some(Self { directory })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn remount(&self, options: &str) {
        run(Command::new("mount").arg("-o").arg(format!("remount,{options}")).arg(self.path())).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: a test that failed may still have a file open.
        let _ = run(Command::new("umount").arg("-l").arg(self.path()));
    }
}

/// A loop device over a file; detached when dropped.
pub(super) struct LoopDevice {
    path: PathBuf,
    _directory: TempDir,
}

pub(super) fn loop_device(size: u64) -> Option<LoopDevice> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("backing.img");
    std::fs::File::create(&file).unwrap().set_len(size).unwrap();
    let path = or_say(run(Command::new("losetup").args(["--find", "--show"]).arg(file)))?;
    Some(LoopDevice { path: path.into(), _directory: directory })
}

impl LoopDevice {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = run(Command::new("losetup").arg("--detach").arg(&self.path));
    }
}
