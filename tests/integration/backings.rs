//! What a volume's bytes may be kept in.

use std::path::Path;

use twinrail_tests::{Target, image, is_root, program, run, scratch, skip, twinrail};

const MIB: u64 = 1 << 20;

/// A file as a block device; gone with this.
struct LoopDevice {
    name: String,
}

impl LoopDevice {
    fn attach(file: &Path) -> Option<Self> {
        let made = run("losetup", ["--find", "--show", "--direct-io=on", file.to_str().unwrap()]);
        (made.code == Some(0)).then(|| Self { name: made.text().trim().to_owned() })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = run("losetup", ["--detach", &self.name]);
    }
}

#[test]
fn a_block_device_is_served_and_held_alone() {
    if !is_root() {
        return skip("only root may make a block device");
    }
    let directory = scratch();
    let [original, backing] = ["original.img", "backing.img"].map(|name| directory.path().join(name));
    image::make(&original, 16 * MIB, 30);
    std::fs::File::create(&backing).unwrap().set_len(16 * MIB).unwrap();
    let Some(device) = LoopDevice::attach(&backing) else {
        return skip("no loop device can be had here");
    };
    let volume = format!("disk0={}", device.name);
    let target = Target::serve(&[&volume]);
    let info = twinrail(["info", "--json", &target.url("disk0")]).json();
    assert_eq!(info["size_bytes"], 16 * MIB, "{info}");
    twinrail(["copy", original.to_str().unwrap(), &target.url("disk0")]).succeeded();
    twinrail(["verify", &target.url("disk0"), original.to_str().unwrap()]).succeeded();

    let mut second = Target::builder(&[&volume]).args(&["--lock-wait-ms", "200"]).launch();
    assert!(matches!(second.wait().code(), Some(1..=100)));
    assert!(second.log().contains(&format!("{} is still in use", device.name)), "{}", second.log());
    target.stop();
    image::assert_same(&original, Path::new(&device.name), 16 * MIB);
    // A device doesn't grow.
    let mut larger = Target::builder(&[&format!("{volume},size=32M")]).launch();
    assert!(matches!(larger.wait().code(), Some(1..=100)));
    assert!(larger.log().contains("is a block device and can't grow"), "{}", larger.log());
}

#[test]
fn a_file_survives_its_target_and_has_the_same_uuid_again() {
    let directory = scratch();
    let [original, path] = ["original.img", "disk0.img"].map(|name| directory.path().join(name));
    image::make(&original, 8 * MIB, 31);
    let volume = format!("disk0={},size=8M", path.display());
    let target = Target::serve(&[&volume]);
    let id = |target: &Target| twinrail(["info", "--json", &target.url("disk0")]).json()["id"].clone();
    let before = id(&target);
    twinrail(["copy", original.to_str().unwrap(), &target.url("disk0")]).succeeded();
    target.stop();
    let target = Target::serve(&[&volume]);
    assert_eq!(id(&target), before);
    twinrail(["verify", &target.url("disk0"), original.to_str().unwrap()]).succeeded();
}

#[test]
fn a_target_killed_in_the_middle_of_writes_leaves_the_volume_to_its_successor() {
    use rustix::process::Signal;
    use twinrail_tests::Process;
    let directory = scratch();
    let [original, path] = ["original.img", "disk0.img"].map(|name| directory.path().join(name));
    image::make(&original, 64 * MIB, 32);
    let volume = format!("disk0={},size=64M", path.display());
    let slow = format!("{volume},inject=write-delay-ms=50");
    let mut target = Target::builder(&[&slow]).args(&["--allow-fault-injection"]).start();
    let words = ["copy", original.to_str().unwrap(), &target.url("disk0"), "--queues", "1", "--depth", "2"];
    let mut copy = Process::start(program("twinrail"), words);
    target.scrape_until("a part of the copy", |s| s.sum("twinrail_target_written_bytes_total", &[]) > 4e6);
    target.process.signal(Signal::KILL);
    let _killed = target.process.wait();
    // Whoever copies is told, in words and by the code that means it.
    assert_eq!(copy.wait().code(), Some(5), "{}", copy.log());
    assert!(copy.log().contains("unknown") || copy.log().contains("lost"), "{}", copy.log());
    let target = Target::serve(&[&volume]);
    twinrail(["copy", original.to_str().unwrap(), &target.url("disk0")]).succeeded();
    twinrail(["verify", &target.url("disk0"), original.to_str().unwrap()]).succeeded();
    target.stop();
    image::assert_same(&original, &path, 64 * MIB);
}

#[test]
fn a_write_through_volume_needs_no_flush_and_says_so() {
    let directory = scratch();
    let volume = format!("disk0={},size=4M,write-through", directory.path().join("disk0.img").display());
    let target = Target::builder(&[&format!("{volume},inject=sync-error@..")]).args(&["--allow-fault-injection"]);
    let target = target.start();
    let info = twinrail(["info", "--json", &target.url("disk0")]).json();
    assert!(info["flags"].as_array().unwrap().iter().any(|flag| flag == "write-through"), "{info}");
    // Writes go to the disk by themselves: no sync is asked for, which would fail here.
    twinrail(["write", &target.url("disk0"), "/dev/zero", "--length", "1M", "--flush"]).succeeded();
    assert_eq!(target.scrape().sum("twinrail_target_failed_syncs_total", &[]), 0.0);
}

#[test]
fn memory_and_null_volumes_say_that_they_keep_nothing() {
    let target = Target::serve(&["memory=memory,size=1M", "null=null,size=1T"]);
    for (volume, size) in [("memory", MIB), ("null", 1 << 40)] {
        let info = twinrail(["info", "--json", &target.url(volume)]).json();
        assert!(info["flags"].as_array().unwrap().iter().any(|flag| flag == "volatile"), "{info}");
        assert_eq!(info["size_bytes"], size);
        twinrail(["write", &target.url(volume), "/dev/urandom", "--length", "64k"]).succeeded();
    }
    let read = |volume: &str| twinrail(["read", &target.url(volume), "--length", "64k"]).stdout;
    assert!(read("null").iter().all(|&byte| byte == 0) && read("memory").iter().any(|&byte| byte != 0));
}

#[test]
fn a_read_only_file_is_served_read_only_and_by_as_many_targets_as_want_it() {
    let directory = scratch();
    let path = directory.path().join("original.img");
    image::make(&path, 4 * MIB, 33);
    let volume = format!("disk0={},read-only", path.display());
    let targets = [0, 1].map(|_| Target::builder(&[&volume]).args(&["--lock-wait-ms", "100"]).start());
    for target in &targets {
        twinrail(["verify", &target.url("disk0"), path.to_str().unwrap()]).succeeded();
    }
    // Who would write has to wait for the readers to end.
    let mut writer = Target::builder(&[&format!("disk0={}", path.display())]).args(&["--lock-wait-ms", "100"]).launch();
    assert!(matches!(writer.wait().code(), Some(1..=100)), "{}", writer.log());
    assert!(writer.log().contains("still in use"), "{}", writer.log());
}
