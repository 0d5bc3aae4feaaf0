//! Targets that can't start: a message that names the thing and the remedy, an exit code, and nothing left behind.

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use twinrail_tests::{Target, is_root, scratch, skip};

/// What a target says that can't serve this.
fn complaint(volume: &str, args: &[&str]) -> String {
    let mut process = Target::builder(&[volume]).args(args).launch();
    let status = process.wait();
    let log = process.log();
    assert!(matches!(status.code(), Some(1..=100)), "it should have failed in order: {status}\n{log}");
    assert!(!log.contains("panicked"), "{log}");
    assert!(!log.contains("control: listening on"), "it served before it knew that it can't:\n{log}");
    log
}

/// Whether a user without rights can reach the program.
fn reachable_for_others() -> bool {
    let reachable = std::process::Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "test", "-x"])
        .arg(twinrail_tests::program("twinrail-target"))
        .status();
    reachable.is_ok_and(|status| status.success())
}

#[test]
fn a_missing_file_is_named_and_how_to_make_it() {
    let directory = scratch();
    let path = directory.path().join("nowhere.img");
    let log = complaint(&format!("disk0={}", path.display()), &[]);
    assert!(log.contains(&format!("{} doesn't exist", path.display())), "{log}");
    assert!(log.contains("truncate -s") && log.contains("size="), "{log}");
    // With a size it is made.
    let target = Target::serve(&[&format!("disk0={},size=3M", path.display())]);
    assert_eq!(path.metadata().unwrap().len(), 3 << 20);
    target.stop();
}

#[test]
fn a_file_in_a_missing_directory_is_not_made() {
    let directory = scratch();
    let log = complaint(&format!("disk0={}/no/where.img,size=1M", directory.path().display()), &[]);
    assert!(log.contains("directory doesn't exist"), "{log}");
}

#[test]
fn a_file_smaller_than_a_block_is_refused() {
    let directory = scratch();
    let path = directory.path().join("tiny.img");
    File::create(&path).unwrap().set_len(100).unwrap();
    let log = complaint(&format!("disk0={}", path.display()), &[]);
    assert!(log.contains("tiny.img holds 100 bytes, less than one block"), "{log}");
    // One that has less than was asked for.
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let log = complaint(&format!("disk0={},size=2M", path.display()), &[]);
    assert!(log.contains("more than the 1048576 bytes of") && log.contains("truncate -s 2097152"), "{log}");
}

#[test]
fn a_directory_and_a_character_device_are_no_volumes() {
    let directory = scratch();
    let log = complaint(&format!("disk0={}", directory.path().display()), &[]);
    assert!(log.contains("is a directory: name a file in it"), "{log}");
    let log = complaint("disk0=/dev/null", &[]);
    assert!(log.contains("/dev/null is neither a regular file nor a block device"), "{log}");
}

#[test]
fn a_file_without_permission_is_named_and_nothing_else_tried() {
    let directory = scratch();
    let path = directory.path().join("secret.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let volume = format!("disk0={}", path.display());
    let modes = |directory_mode, file_mode| {
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(directory_mode)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(file_mode)).unwrap();
    };
    let mut builder = Target::builder(&[&volume]).args(&["--arena", "8M", "--reactors", "1"]);
    if is_root() {
        // Root may do anything: as somebody else then.
        if !reachable_for_others() {
            return skip("root may open anything, and user 65534 can't reach the program (or there is no setpriv)");
        }
        builder = builder.under(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    }
    for (file_mode, access) in [(0o000, "reading and writing"), (0o444, "reading and writing")] {
        modes(0o755, file_mode);
        let mut process = builder.launch();
        let status = process.wait();
        let log = process.log();
        assert!(matches!(status.code(), Some(1..=100)), "{status}\n{log}");
        assert!(log.contains(&format!("no permission to open {} for {access}", path.display())), "{log}");
        assert!(log.contains("change its mode or owner") && log.contains("read-only"), "{log}");
    }
}

#[test]
fn a_volume_locked_by_another_target_is_waited_for_and_then_named() {
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let volume = format!("disk0={},size=1M", path.display());
    let first = Target::serve(&[&volume]);
    let log = complaint(&volume, &["--lock-wait-ms", "300"]);
    assert!(log.contains("disk0.img is still in use by another process after 0.3 s"), "{log}");
    assert!(log.contains("fuser") && log.contains("lock-wait-ms"), "{log}");

    // One that waits says so, and serves as soon as the first has gone.
    let second = Target::builder(&[&volume]).args(&["--lock-wait-ms", "60000"]).launch();
    let waits = second.wait_for("that it waits", |line| line.contains("wait").then(|| line.to_owned()));
    assert!(waits.contains("disk0.img"), "{waits}");
    assert!(!second.log().contains("listening on"));
    first.stop();
    let _line = second.wait_for_line("listening on");
}

#[test]
fn two_volumes_on_one_file_are_refused() {
    let directory = scratch();
    let path = directory.path().join("disk0.img");
    let volume = format!("a={},size=1M", path.display());
    // At once: the target that holds the lock is this one, and no other process is to blame.
    let begun = Instant::now();
    for second in ["disk0.img", "hard.img", "soft.img"] {
        let log = complaint(&volume, &["--volume", &format!("b={}", directory.path().join(second).display())]);
        assert!(log.contains("volumes \"a\" and \"b\" have the same backing") && log.contains(second), "{log}");
        assert!(!log.contains("another process"), "{log}");
        if second == "disk0.img" {
            File::create(&path).unwrap().set_len(1 << 20).unwrap();
            std::fs::hard_link(&path, directory.path().join("hard.img")).unwrap();
            std::os::unix::fs::symlink("disk0.img", directory.path().join("soft.img")).unwrap();
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "it waited for itself: {:?}", begun.elapsed());
}

#[test]
fn a_limit_of_locked_memory_that_is_too_low_is_told_once_with_the_remedy() {
    let mut wrapper = vec!["prlimit", "--memlock=65536:65536"];
    if is_root() {
        if !reachable_for_others() {
            return skip("the limit doesn't hold for root, and user 65534 can't reach the program (or no setpriv)");
        }
        wrapper.extend(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    }
    let mut process = Target::builder(&["disk0=memory,size=1M"]).under(&wrapper).launch();
    // A kernel that counts rings otherwise may let it serve.
    let said = process.wait_for("that it can't start, or serves", |line| {
        ["twinrail-target: ", "listening on"].iter().any(|text| line.contains(text)).then(|| line.to_owned())
    });
    if said.contains("listening on") {
        return skip("the kernel lets a target with 64 KiB of locked memory start");
    }
    assert_eq!(process.wait().code(), Some(1));
    assert!(said.contains("limit of locked memory"), "{said}");
    assert_eq!(said.matches("Cannot allocate memory").count(), 1, "{said}");
}

#[test]
fn reserved_huge_pages_that_are_not_there_are_told_with_the_remedy() {
    let free = std::fs::read_to_string("/proc/meminfo").unwrap();
    if !free.lines().any(|line| line.starts_with("HugePages_Free:") && line.ends_with(" 0")) {
        return skip("this machine has reserved huge pages that are free, or none at all to reserve");
    }
    let log = complaint("disk0=null,size=1M", &["--huge-pages", "--reactors", "1"]);
    assert!(log.contains("32 free huge pages of 2 MiB are needed") && log.contains("vm.nr_hugepages"), "{log}");
    let log = complaint("disk0=memory,size=4M", &["--huge-pages", "--reactors", "1"]);
    assert!(log.contains("volume disk0") && log.contains("2 free huge pages"), "{log}");
}

#[test]
fn a_log_filter_and_a_congestion_control_that_mean_nothing_are_refused() {
    let log = complaint("disk0=memory,size=1M", &["--log", "nonsense"]);
    assert!(log.contains("--log: log is \"nonsense\"") && log.contains("give a level (error, warn"), "{log}");
    let log = complaint("disk0=memory,size=1M", &["--congestion", "nosuch"]);
    assert!(log.contains("--congestion: congestion is \"nosuch\"") && log.contains("\"system\""), "{log}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let log = complaint("disk0=memory,size=1M", &["--listen", &address]);
    assert!(log.contains(&address) && log.contains("in use") && log.contains("--listen"), "{log}");
    let log = complaint("disk0=memory,size=1M", &["--metrics", &address]);
    assert!(log.contains(&address) && log.contains("in use") && log.contains("--metrics"), "{log}");
}

#[test]
fn a_port_in_use_leaves_the_volume_free_for_the_next() {
    let directory = scratch();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let volume = format!("disk0={},size=1M", directory.path().join("disk0.img").display());
    let _log = complaint(&volume, &["--listen", &taken.local_addr().unwrap().to_string()]);
    // Not at once: the kernel gives a ring's files back a moment after its process has ended.
    Target::builder(&[&volume]).args(&["--lock-wait-ms", "20000"]).start().stop();
}

#[test]
fn a_file_that_every_host_could_reach_needs_names_of_initiators() {
    let log = complaint("disk0=memory,size=1M", &["--listen", "0.0.0.0:0"]);
    assert!(log.contains("--allow NAME") && log.contains("a name is no proof"), "{log}");
}

#[test]
fn faults_are_injected_only_into_a_target_that_was_told_so() {
    let log = complaint("disk0=memory,size=1M,inject=write-error@..", &[]);
    assert!(log.contains("--allow-fault-injection"), "{log}");
}
