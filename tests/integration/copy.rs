//! Images copied into a volume and out again by `twinrail copy`.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use twinrail_tests::command::finish;
use twinrail_tests::{Process, Target, image, program, scratch, twinrail};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_1_gib_image_copied_in_and_out_is_identical() {
    let directory = scratch();
    let [original, volume, back] = ["original.img", "volume.img", "back.img"].map(|name| directory.path().join(name));
    image::make(&original, GIB, 1);
    let target = Target::serve(&[&format!("disk0={},size=1G", volume.display())]);
    twinrail(["copy", text(&original), &target.url("disk0")]).succeeded();
    twinrail(["verify", &target.url("disk0"), text(&original)]).succeeded();
    twinrail(["copy", &target.url("disk0"), text(&back)]).succeeded();
    image::assert_same(&original, &back, GIB);
    let scrape = target.scrape();
    let written = scrape.sum("twinrail_target_written_bytes_total", &[]);
    assert!(written < 0.8 * GIB as f64, "holes and zeros were sent: {written} bytes");
    target.stop();
    image::assert_same(&original, &volume, GIB);
    for copy in [&volume, &back] {
        let (was, is) = (image::allocated_bytes(&original), image::allocated_bytes(copy));
        assert!(is <= was + 8 * MIB, "{} has fewer holes: {is} bytes on the disk, {was} before", copy.display());
    }
}

#[test]
fn a_copy_killed_in_the_middle_and_started_again_ends_identical() {
    const SIZE: u64 = 256 * MIB;
    let directory = scratch();
    let [original, volume] = ["original.img", "volume.img"].map(|name| directory.path().join(name));
    image::make(&original, SIZE, 2);
    // The one that was killed holds the volume for its lease.
    let args = ["--allow-fault-injection", "--lease-ms", "500"];
    // Slow enough to be met in its middle.
    let spec = format!("disk0={},size=256M,inject=write-delay-ms=50", volume.display());
    let target = Target::builder(&[&spec]).args(&args).start();
    let url = target.url("disk0");
    let written = |s: &twinrail_tests::Scrape| s.sum("twinrail_target_written_bytes_total", &[]);
    for (round, mark) in [(1.0, 8 * MIB), (2.0, 24 * MIB)] {
        let before = written(&target.scrape());
        let slowly = ["copy", text(&original), &url, "--queues", "1", "--depth", "2"];
        let mut copy = Process::start(program("twinrail"), slowly);
        target.scrape_until("half a copy", |s| written(s) - before >= mark as f64);
        assert!(copy.is_running(), "round {round}: the copy was over before it could be killed:\n{}", copy.log());
        copy.signal(Signal::KILL);
        assert_eq!(copy.wait().code(), None);
        target.scrape_until("that the session is over", |s| s.sum("twinrail_target_sessions", &[]) == 0.0);
    }
    twinrail(["copy", text(&original), &url]).succeeded();
    twinrail(["verify", &url, text(&original)]).succeeded();
    target.stop();
    image::assert_same(&original, &volume, SIZE);
}

#[test]
fn a_copy_over_old_content_leaves_nothing_of_it() {
    const SIZE: u64 = 32 * MIB;
    let directory = scratch();
    let [first, second, volume] = ["first.img", "second.img", "volume.img"].map(|name| directory.path().join(name));
    image::make(&first, SIZE, 3);
    image::make(&second, SIZE, 4);
    let target = Target::serve(&[&format!("disk0={},size=32M", volume.display())]);
    twinrail(["copy", text(&first), &target.url("disk0")]).succeeded();
    twinrail(["copy", text(&second), &target.url("disk0")]).succeeded();
    target.stop();
    image::assert_same(&second, &volume, SIZE);
}

#[test]
fn a_copy_comes_from_a_pipe_and_goes_into_one() {
    const SIZE: u64 = 40 * MIB;
    let directory = scratch();
    let original = directory.path().join("original.img");
    image::make(&original, SIZE, 5);
    let target = Target::serve(&["disk0=memory,size=40M"]);
    let mut cat = Command::new("cat").arg(&original).stdout(Stdio::piped()).spawn().unwrap();
    let mut copy = Command::new(program("twinrail"));
    copy.args(["copy", "-", &target.url("disk0")]).stdin(cat.stdout.take().unwrap());
    finish(copy).succeeded();
    assert!(cat.wait().unwrap().success());
    let out = twinrail(["copy", &target.url("disk0"), "-"]);
    out.succeeded();
    assert!(out.stdout == std::fs::read(&original).unwrap(), "what came out of the pipe isn't what went in");
}

#[test]
fn a_copy_of_an_image_that_is_too_large_writes_nothing() {
    let directory = scratch();
    let original = directory.path().join("original.img");
    image::make(&original, 8 * MIB, 6);
    let target = Target::serve(&["disk0=memory,size=4M"]);
    let complaint = twinrail(["copy", text(&original), &target.url("disk0")]).complaint();
    assert!(complaint.contains("8388608") && complaint.contains("4194304"), "{complaint}");
    assert_eq!(target.scrape().sum("twinrail_target_written_bytes_total", &[]), 0.0);
}

#[test]
fn a_verify_finds_a_single_bit_and_its_place() {
    use std::os::unix::fs::FileExt;
    let directory = scratch();
    let original = directory.path().join("original.img");
    image::make(&original, 8 * MIB, 7);
    let target = Target::serve(&["disk0=memory,size=8M"]);
    twinrail(["copy", text(&original), &target.url("disk0")]).succeeded();
    twinrail(["verify", &target.url("disk0"), text(&original)]).succeeded();
    let file = File::options().read(true).write(true).open(&original).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5_000_000).unwrap();
    file.write_all_at(&[byte[0] ^ 4], 5_000_000).unwrap();
    let run = twinrail(["verify", &target.url("disk0"), text(&original)]);
    assert_eq!(run.code, Some(1));
    let complaint = run.complaint();
    // Its block: a multiple of 512 or 4096.
    assert!(["4999680", "4997120"].iter().any(|block| complaint.contains(block)), "{complaint}");
}
