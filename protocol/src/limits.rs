//! Limits of version 1 of the protocol (SPEC.md, "Limits"). Nothing from a peer is allocated or
//! looped over before it was held against one of them.

/// Length of every header in bytes.
pub const HEADER_LEN: usize = 64;
/// Longest payload of a handshake frame in bytes: an ACTIVATE with a report of [`MAX_DEPTH`] slots.
pub const MAX_HANDSHAKE_PAYLOAD: usize = 18 * 1024;
/// Longest payload of a control frame in bytes (the text of a DISCONNECT).
pub const MAX_CONTROL_PAYLOAD: usize = 512;
/// Most slots of one queue.
pub const MAX_DEPTH: u16 = 256;
/// Most queues of one session.
pub const MAX_QUEUES: u16 = 64;
/// Smallest and largest in-capsule size in bytes that may be agreed on.
pub const IN_CAPSULE_RANGE: core::ops::RangeInclusive<u32> = 4096..=16384;
/// The in-capsule size in bytes that is asked for by default.
pub const DEFAULT_IN_CAPSULE: u32 = 4096;
/// Smallest and largest payload in bytes of one command that may be agreed on.
pub const MAX_TRANSFER_RANGE: core::ops::RangeInclusive<u32> = 65536..=16 * 1024 * 1024;
/// Longest range in bytes of WRITE ZEROES, DISCARD and BLOCK STATUS.
pub const MAX_SPACE_RANGE: u64 = 1 << 30;
/// Longest range in bytes of VERIFY: it reads all of it, and shares the disk with others.
pub const MAX_VERIFY_RANGE: u64 = 64 << 20;
/// Smallest and largest logical block in bytes.
pub const LOGICAL_BLOCK_RANGE: core::ops::RangeInclusive<u32> = 512..=65536;
/// Unanswered control requests that each side may have under way.
pub const CONTROL_CREDIT: u16 = 4;
/// Longest name of an initiator or a target in bytes.
pub const MAX_NAME: usize = 223;
/// Longest name of a volume in bytes.
pub const MAX_VOLUME_NAME: usize = 64;
/// Longest text that goes with a refusal in bytes.
pub const MAX_TEXT: usize = 480;
/// Most RDMA portals that a target tells.
pub const MAX_PORTALS: usize = 8;
/// Most extents in the reply to BLOCK STATUS.
pub const MAX_EXTENTS: usize = DEFAULT_IN_CAPSULE as usize / crate::wire::Extent::LEN;

const _: () = {
    assert!(MAX_HANDSHAKE_PAYLOAD >= 64 + MAX_DEPTH as usize * HEADER_LEN);
    assert!(MAX_HANDSHAKE_PAYLOAD >= 64 + MAX_DEPTH as usize * (HEADER_LEN + 4));
    assert!(MAX_TEXT + 16 <= MAX_CONTROL_PAYLOAD);
    assert!(*IN_CAPSULE_RANGE.end() <= *MAX_TRANSFER_RANGE.start());
};
