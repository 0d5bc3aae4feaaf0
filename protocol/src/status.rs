//! Statuses on the wire (SPEC.md, "Statuses"): ours, never an errno.

use core::fmt;

/// How a command, a handshake or a connection ended. Unknown values survive as values (I9).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $label:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// Every status of this version, in the order of its number.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The name used in logs, JSON and metric labels; `unknown` for a value of another version.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                    _ => "unknown",
                }
            }
        }
    };
}

statuses! {
    /// Done.
    OK = 0, "ok";

    // The request itself is wrong: nothing was executed.
    /// The opcode isn't one of this version.
    UNKNOWN_OPCODE = 0x0101, "unknown_opcode";
    /// A flag isn't one of this version, or doesn't go with the opcode.
    BAD_FLAGS = 0x0102, "bad_flags";
    /// Offset or length isn't a multiple of the logical block.
    MISALIGNED = 0x0103, "misaligned";
    /// The range ends behind the end of the volume.
    OUT_OF_RANGE = 0x0104, "out_of_range";
    /// The range is longer than one command may have.
    TOO_LARGE = 0x0105, "too_large";
    /// The range is empty.
    ZERO_LENGTH = 0x0106, "zero_length";
    /// The length of the payload doesn't fit the command.
    BAD_PAYLOAD_LENGTH = 0x0107, "bad_payload_length";
    /// The volume, or this attach of it, is read-only.
    READ_ONLY = 0x0108, "read_only";
    /// The payload doesn't match its CRC32C; a retry is a new sequence.
    PAYLOAD_CRC = 0x0109, "payload_crc";
    /// A retry doesn't match the command that it repeats.
    RETRY_MISMATCH = 0x010a, "retry_mismatch";

    // Storage.
    /// The storage below reported an I/O error.
    IO_ERROR = 0x0201, "io_error";
    /// The storage below has no space left.
    NO_SPACE = 0x0202, "no_space";
    /// A sync failed since this session attached: what it wrote and didn't flush may be lost (I5).
    FLUSH_FAILED = 0x0203, "flush_failed";
    /// COMPARE AND WRITE found something else; the result is the offset of the first difference.
    COMPARE_FAILED = 0x0204, "compare_failed";
    /// The storage below can't do this.
    NOT_SUPPORTED = 0x0205, "not_supported";

    // Handshake and session.
    /// No volume has this name.
    UNKNOWN_VOLUME = 0x0301, "unknown_volume";
    /// Other sessions hold the volume in a mode that doesn't go with this one.
    VOLUME_HELD = 0x0302, "volume_held";
    /// The volume has another UUID than the one expected.
    WRONG_VOLUME = 0x0303, "wrong_volume";
    /// The target has no such session, or another instance of its slot table.
    SESSION_LOST = 0x0304, "session_lost";
    /// The secret isn't the session's.
    BAD_SECRET = 0x0305, "bad_secret";
    /// The epoch isn't greater than the queue's.
    STALE_EPOCH = 0x0306, "stale_epoch";
    /// Another writer attached since: this session may not come back.
    PREEMPTED = 0x0307, "preempted";
    /// The target is about to leave.
    DRAINING = 0x0308, "draining";
    /// A limit of the target's configuration is reached.
    LIMIT_REACHED = 0x0309, "limit_reached";
    /// The initiator's name isn't among those allowed.
    NOT_ALLOWED = 0x030a, "not_allowed";
    /// An option of the handshake has a value that can't be served.
    BAD_PARAMETER = 0x030b, "bad_parameter";
    /// The volume can only be attached read-only.
    VOLUME_READ_ONLY = 0x030c, "volume_read_only";
    /// For one lease after its start the target takes back recorded holders only.
    GRACE = 0x030d, "grace";
    /// Only holders of the session's current secret may do this: it was taken over.
    TAKEN_OVER = 0x030e, "taken_over";

    // The connection ends: the peer broke a rule, or silence.
    /// The first bytes aren't Twinrail's.
    BAD_MAGIC = 0x0401, "bad_magic";
    /// The two sides have no protocol version in common.
    UNSUPPORTED_VERSION = 0x0402, "unsupported_version";
    /// A header doesn't match its own CRC32C.
    HEADER_CRC = 0x0403, "header_crc";
    /// A frame's fields contradict its kind, or reserved bytes aren't zero.
    MALFORMED = 0x0404, "malformed";
    /// A frame of a kind that isn't allowed here.
    UNEXPECTED_FRAME = 0x0405, "unexpected_frame";
    /// A command in a slot that wasn't granted, or that is busy with another one.
    CREDIT_OVERRUN = 0x0406, "credit_overrun";
    /// More payload sent without being asked for than the data window allows.
    WINDOW_OVERRUN = 0x0407, "window_overrun";
    /// More control requests under way than allowed.
    CONTROL_OVERRUN = 0x0408, "control_overrun";
    /// Nothing came in time.
    TIMEOUT = 0x0409, "timeout";
    /// Newer connections needed the place of this unfinished handshake.
    CROWDED_OUT = 0x040a, "crowded_out";
    /// The connection was closed or broken by the other side.
    CONNECTION_LOST = 0x040b, "connection_lost";
    /// The side that says so is shutting down.
    SHUTDOWN = 0x040c, "shutdown";
    /// A newer path of the queue took its place.
    SUPERSEDED = 0x040d, "superseded";
    /// The session was closed in order.
    CLOSED = 0x040e, "closed";

    // Said by the initiator to its caller, never on the wire.
    /// The session was lost while the command was out: it may have been executed, or may yet be, or not.
    OUTCOME_UNKNOWN = 0x0501, "outcome_unknown";
}

impl Status {
    /// Whether this is [`Status::OK`].
    #[inline]
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::OK
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({:#06x})", self.name(), self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            "unknown" => write!(f, "unknown status {:#06x}", self.0),
            name => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_each_used_once() {
        for (i, a) in Status::ALL.iter().enumerate() {
            assert_ne!(a.name(), "unknown");
            for b in &Status::ALL[i + 1..] {
                assert!(a.0 < b.0, "{a:?} and {b:?} are out of order");
                assert_ne!(a.name(), b.name());
            }
        }
    }
}
