//! README.md is true: its commands are run, its names and numbers compared with the programs.

use std::fs;
use std::path::Path;
use std::process::Command;

use twinrail_tests::command::finish;
use twinrail_tests::{Process, program, run, scratch, source_root, twinrail};

fn readme() -> String {
    fs::read_to_string(source_root().join("README.md")).unwrap()
}

/// The fenced blocks, each with the words behind its fence.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut parts = text.split("\n```");
    parts.next();
    while let (Some(block), Some(_after)) = (parts.next(), parts.next()) {
        let (info, body) = block.split_once('\n').unwrap();
        blocks.push((info.to_owned(), body.to_owned()));
    }
    blocks
}

/// The one block with these words.
fn block(info: &str) -> String {
    let mut found = blocks(&readme()).into_iter().filter(|(words, _)| words == info);
    let (Some((_, body)), None) = (found.next(), found.next()) else { panic!("README.md has not one block {info:?}") };
    body
}

/// A shell in a directory, with our programs in its path.
fn shell(directory: &Path, script: &str) -> Command {
    let folder = program("twinrail").parent().unwrap().to_owned();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", script]).env("PATH", path).current_dir(directory);
    command
}

#[test]
fn every_fenced_block_is_of_a_kind_that_a_test_knows() {
    for (info, body) in blocks(&readme()) {
        let known = ["sh build", "sh target", "sh initiator", "sh checks", "sh bench", "sh options", "text"];
        assert!(known.contains(&info.as_str()), "no test reads the block {info:?}:\n{body}");
    }
}

#[test]
fn the_first_session_by_hand_works_as_it_is_written() {
    let directory = scratch();
    // In the text each side has its default port; here each has a free one.
    let target = block("sh target");
    assert_eq!(target.matches("twinrail-target serve").count(), 1, "{target}");
    let target = target
        .replace("twinrail-target serve", "exec twinrail-target serve --listen 127.0.0.1:0 --metrics 127.0.0.1:0");
    let process = Process::start_command(shell(directory.path(), &target));
    let behind =
        |words: &'static str| process.wait_for(words, |line| Some(line.split_once(words)?.1.trim().to_owned()));
    let (metrics, address) = (behind("metrics on "), behind("listening on "));
    let initiator = block("sh initiator");
    assert!(initiator.contains("twinrail://127.0.0.1/") && initiator.contains("127.0.0.1:9450"), "{initiator}");
    let initiator = initiator.replace("twinrail://127.0.0.1/", &format!("twinrail://{address}/"));
    let initiator = initiator.replace("127.0.0.1:9450", &metrics);
    finish(shell(directory.path(), &initiator)).succeeded();
}

#[test]
fn the_commands_that_are_named_exist() {
    for line in ["sh build", "sh checks", "sh bench"]
        .iter()
        .flat_map(|info| block(info).lines().map(str::to_owned).collect::<Vec<_>>())
    {
        let line = line.split(" #").next().unwrap().trim().to_owned();
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("cargo"), Some(_)) | (None, _) => {}
            (Some(path), _) => assert!(source_root().join(path).exists(), "{line}: there is no {path}"),
        }
    }
}

#[test]
fn exit_codes_are_those_of_the_help() {
    let help = twinrail(["--help"]).text();
    let readme = readme();
    let (_, codes) = help.split_once("Exit codes:").unwrap();
    let mut count = 0;
    for line in codes.lines() {
        if let Some(code) = line.split_whitespace().next().filter(|word| word.parse::<u8>().is_ok()) {
            assert!(readme.contains(&format!("\n| {code} |")), "exit code {code} isn't in README.md");
            count += 1;
        }
    }
    assert_eq!(count, 7, "{help}");
    let section = readme.split("| exit code |").nth(1).unwrap().split("\n\n").next().unwrap();
    assert_eq!(section.lines().filter(|line| line.starts_with("| ")).count(), count, "{section}");
}

#[test]
fn subcommands_and_volume_options_are_those_of_the_programs() {
    let readme = readme();
    let help = twinrail(["--help"]).text();
    for name in ["info", "ping", "read", "write", "copy", "verify", "bench"] {
        assert!(readme.contains(&format!("`twinrail {name}`")), "{name} isn't in README.md");
        assert!(help.lines().any(|line| line.trim_start().starts_with(name)), "{name} isn't in the help");
    }
    // Each option in the table of volumes is accepted, with the value that stands there.
    let rows = readme.split("| volume option |").nth(1).unwrap().split("\n\n").next().unwrap();
    let directory = scratch();
    let mut options = 0;
    for row in rows.lines().filter(|line| line.starts_with("| `")) {
        let option = row.split('`').nth(1).unwrap();
        let spec = match option {
            "size=10G" => "disk0=disk0.img".to_owned(),
            _ => "disk0=disk0.img,size=1M".to_owned(),
        };
        let file = directory.path().join("target.toml");
        fs::write(&file, "").unwrap();
        // A target that is told of a wrong option says so before it looks at anything else: at the address here,
        // which is none.
        let args = ["serve", "--listen", "nowhere", "--allow-fault-injection", "--volume", &format!("{spec},{option}")];
        let complaint = run(program("twinrail-target"), args).complaint();
        assert!(complaint.contains("nowhere"), "{complaint}");
        assert_eq!(complaint.trim().lines().count(), 1, "{option} is refused: {complaint}");
        options += 1;
    }
    assert!(options >= 6, "{rows}");
}

#[test]
fn numbers_are_those_of_the_code() {
    use twinrail_target::config::{DEFAULT_METRICS_PORT, DEFAULT_PORT};
    let readme = readme();
    assert_eq!((DEFAULT_PORT, DEFAULT_METRICS_PORT), (4450, 9450));
    for number in ["4450", "9450"] {
        assert!(readme.contains(number), "README.md doesn't name port {number}");
    }
    let version = run(program("twinrail"), ["--version"]).text();
    assert!(readme.contains(version.trim().rsplit(' ').next().unwrap()), "README.md doesn't name {version}");
    let manifest = fs::read_to_string(source_root().join("Cargo.toml")).unwrap();
    let rust = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap().trim_matches('"');
    assert!(readme.contains(&format!("Rust {rust}")), "README.md doesn't name Rust {rust}");
}

#[test]
fn every_file_that_a_document_links_to_is_there() {
    for document in ["README.md", "CHANGELOG.md", "tests/README.md", "deploy/METRICS.md"] {
        let path = source_root().join(document);
        let text = fs::read_to_string(&path).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split([')', '#']).next().unwrap()) {
            let there = link.is_empty() || link.contains("://") || path.parent().unwrap().join(link).exists();
            assert!(there, "{document} links to {link}");
        }
    }
}
