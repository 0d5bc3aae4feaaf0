//! SPEC.md is true: its tables say what the code says, and nothing is missing on either side.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;

use twinrail_protocol::limits::{self, HEADER_LEN};
use twinrail_protocol::wire::{Control, EventCode, Fault, Frame, VolumeFlags};
use twinrail_protocol::{Epoch, Flags, Opcode, Status, crc32c};

const SPEC: &str = include_str!("../SPEC.md");

/// The rows of the first table after a heading, without its two head lines, as cells without backticks.
fn table(heading: &str) -> Vec<Vec<String>> {
    let mut lines = SPEC.lines().skip_while(|l| l.trim_start_matches('#').trim() != heading || !l.starts_with('#'));
    assert!(lines.next().is_some(), "SPEC.md has no heading {heading:?}");
    let rows: Vec<_> =
        lines.skip_while(|l| !l.starts_with('|')).take_while(|l| l.starts_with('|')).map(cells).collect();
    assert!(rows.len() > 2, "SPEC.md has no table under {heading:?}");
    rows[2..].to_vec()
}

/// The rows of the table whose head begins with these cells.
fn table_with_head(head: &[&str]) -> Vec<Vec<String>> {
    let mut lines = SPEC.lines().skip_while(|l| !l.starts_with('|') || !cells(l).iter().eq(head.iter().copied()));
    assert!(lines.next().is_some(), "SPEC.md has no table with the head {head:?}");
    lines.skip(1).take_while(|l| l.starts_with('|')).map(cells).collect()
}

fn cells(line: &str) -> Vec<String> {
    line.trim_matches('|').split('|').map(|c| c.trim().replace('`', "")).collect()
}

fn number(cell: &str) -> u64 {
    let parsed = match cell.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => cell.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{cell:?} is no number"))
}

/// The first two columns: numbers and names.
fn numbered(rows: &[Vec<String>]) -> Vec<(u64, String)> {
    rows.iter().map(|row| (number(&row[0]), row[1].clone())).collect()
}

/// The names of the public constants in a stretch of source, so that no new one is forgotten here.
fn constants(source: &str, from: &str) -> BTreeSet<String> {
    let (_, block) = source.split_once(from).unwrap();
    let block = block.split("\n}").next().unwrap();
    let names = block.lines().filter_map(|l| l.trim().strip_prefix("pub const ").filter(|l| !l.starts_with("fn ")));
    names.filter_map(|l| l.split_once(':')).map(|(name, _)| name.to_owned()).collect()
}

/// Compares a table with constants of the code; `constants` are all that the source has.
fn compare(rows: &[Vec<String>], code: &[(u64, &str)], mut constants: BTreeSet<String>, no_rows: &[&str]) {
    let code: Vec<_> = code.iter().map(|&(n, name)| (n, name.to_owned())).collect();
    assert_eq!(numbered(rows), code);
    no_rows.iter().for_each(|name| assert!(constants.remove(*name), "{name} is gone"));
    assert_eq!(code.into_iter().map(|(_, name)| name.to_uppercase()).collect::<BTreeSet<_>>(), constants);
}

#[test]
fn statuses() {
    let code: Vec<_> = Status::ALL.iter().map(|s| (u64::from(s.0), s.name().to_owned())).collect();
    assert_eq!(numbered(&table("Statuses")), code);
}

#[test]
fn opcodes() {
    let code: Vec<_> = Opcode::ALL.iter().map(|o| (u64::from(o.0), o.name().to_owned())).collect();
    assert_eq!(numbered(&table("Commands")), code);
}

#[test]
fn flags() {
    let code = [("PAYLOAD_FOLLOWS", Flags::PAYLOAD_FOLLOWS), ("FUA", Flags::FUA), ("NO_UNMAP", Flags::NO_UNMAP)];
    let source = constants(include_str!("../src/opcode.rs"), "impl Flags {");
    compare(&table("Flags"), &code.map(|(name, flag)| (flag.0.into(), name)), source, &["NONE"]);
}

#[test]
fn volume_flags() {
    let code = [
        ("READ_ONLY", VolumeFlags::READ_ONLY),
        ("WRITE_THROUGH", VolumeFlags::WRITE_THROUGH),
        ("ROTATIONAL", VolumeFlags::ROTATIONAL),
        ("DISCARD", VolumeFlags::DISCARD),
        ("VOLATILE", VolumeFlags::VOLATILE),
    ];
    let source = constants(include_str!("../src/wire/handshake.rs"), "impl VolumeFlags {");
    let rows = table_with_head(&["volume flag", "name", "meaning"]);
    compare(&rows, &code.map(|(name, flag)| (flag.0.into(), name)), source, &[]);
}

#[test]
fn events() {
    let code = [("resized", EventCode::RESIZED), ("draining", EventCode::DRAINING), ("credit", EventCode::CREDIT)];
    let source = constants(include_str!("../src/wire/frame.rs"), "impl EventCode {");
    let rows = table_with_head(&["event", "name", "value"]);
    compare(&rows, &code.map(|(name, event)| (event.0.into(), name)), source, &["NONE"]);
}

#[test]
fn limits() {
    macro_rules! shown {
        ($($name:ident)*) => { [$((stringify!($name).to_owned(), format!("{:?}", limits::$name))),*] };
    }
    let code = shown! {
        HEADER_LEN MAX_HANDSHAKE_PAYLOAD MAX_CONTROL_PAYLOAD MAX_DEPTH MAX_QUEUES IN_CAPSULE_RANGE DEFAULT_IN_CAPSULE
        MAX_TRANSFER_RANGE MAX_SPACE_RANGE MAX_VERIFY_RANGE LOGICAL_BLOCK_RANGE CONTROL_CREDIT MAX_NAME
        MAX_VOLUME_NAME MAX_TEXT MAX_PORTALS MAX_EXTENTS
    };
    let spec: Vec<_> = table("Limits").into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(spec, code);
    let source = constants(include_str!("../src/limits.rs"), "\n");
    assert_eq!(code.into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>(), source);
}

/// Each of the 256 kinds is known to the code if and only if the table has it.
#[test]
fn kinds() {
    let rows = table_with_head(&["kind", "name", "from", "payload at most"]);
    let spec = numbered(&rows);
    for kind in 0..=u8::MAX {
        let mut header = [0; HEADER_LEN];
        header[0] = kind;
        let crc = crc32c(&header[..60]);
        header[60..].copy_from_slice(&crc.to_le_bytes());
        let decoded = Frame::decode(&header);
        let row = spec.iter().find(|(number, _)| *number == kind.into());
        assert_eq!(decoded == Err(Fault::UnexpectedKind(kind)), row.is_none(), "kind {kind:#04x}");
        if let (Ok(Frame::Control(Control { kind, epoch: Epoch(0), .. })), Some((_, name))) = (decoded, row) {
            assert_eq!(format!("{kind:?}").to_lowercase(), name.replace('_', ""));
        }
    }
}

/// A table that left bytes out, or counted them twice, would be no layout.
#[test]
fn layouts_have_no_gaps() {
    let lines: Vec<_> = SPEC.lines().collect();
    let heads = (0..lines.len()).filter(|&i| lines[i] == "| offset | size | field | value |");
    let mut layouts = 0;
    for head in heads {
        layouts += 1;
        let rows: Vec<_> = lines[head + 2..].iter().take_while(|l| l.starts_with('|')).map(|l| cells(l)).collect();
        let mut at = number(&rows[0][0]);
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(number(&row[0]), at, "line {}: {row:?}", head + 3 + i);
            match row[1].parse::<u64>() {
                Ok(size) => at += size,
                Err(_) => assert_eq!(i + 1, rows.len(), "only the last field has no fixed size: {row:?}"),
            }
        }
        // Headers end at 64 bytes and their bodies where the payload's length stands.
        match (number(&rows[0][0]), rows.last().unwrap()[2].as_str()) {
            (0, "header_crc") => assert_eq!(at, HEADER_LEN as u64),
            (24, _) => assert_eq!(at, 52, "{rows:?}"),
            (start, _) => assert_eq!(start, 0, "{rows:?}"),
        }
    }
    assert_eq!(layouts, 18, "a layout is missing, or new and not looked at here");
}

#[test]
fn invariants_are_listed_once_and_in_order() {
    let listed: Vec<_> =
        SPEC.lines().filter_map(|l| l.strip_prefix("- **I")?.split_once(' ')).map(|(n, _)| n).collect();
    assert_eq!(listed, ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]);
}

/// The names of statuses in running text are names of the table.
#[test]
fn statuses_named_in_rules_exist() {
    let names: BTreeSet<_> = Status::ALL.iter().map(|s| s.name()).collect();
    for row in table("What ends a connection (I9)") {
        for name in row[1].split(';').map(str::trim).filter(|name| !name.contains(' ')) {
            assert!(names.contains(name), "{name}");
        }
    }
}
