//! Faults on purpose, for people who test what stands above a volume: a slow or hung disk, a bad sector, a
//! full disk, a sync that fails once. Asked for by a volume's option `inject=`, and only accepted by a
//! target that was started with `--allow-fault-injection`.
//!
//! Rules are joined by `+`; spans of bytes or of syncs are `FIRST..END`, `FIRST..`, `..END`, `..` for all, or one
//! number; the end is not part of it.
//!
//! | rule | what happens |
//! |---|---|
//! | `read-error@4096..8192` | reads that touch these bytes fail with an I/O error; a block status ends before them |
//! | `write-error@..` | so do changes: writes, write zeroes, discards |
//! | `no-space@1G..` | changes that touch these bytes fail for want of space |
//! | `sync-error@1` | the first sync of the volume fails; `@2..` all from the second on |
//! | `read-delay-ms=200` | each read waits so long before it goes to storage |
//! | `write-delay-ms=200` | so does each change |
//! | `sync-delay-ms=500` | so does each sync |
//!
//! A compare and write is a read, then a write.

use std::ops;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use twinrail_protocol::{Range, Status};

use super::spec::{did_you_mean, nearest, parse_size};

/// What is about to go to storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A read.
    Read,
    /// A write, or anything else that changes the range.
    Write,
    /// A read, then a write.
    ReadWrite,
}

impl Access {
    /// Whether it does what `other`, one of the plain two, does.
    fn has(self, other: Self) -> bool {
        self == other || self == Self::ReadWrite
    }
}

/// What is to happen to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It goes to storage now.
    Nothing,
    /// It goes to storage after this time; the rules are not asked again then.
    Delay(Duration),
    /// It doesn't go to storage, and ends with this status.
    Fail(Status),
}

/// The faults of one volume.
#[derive(Debug, Default)]
pub struct Faults {
    errors: Vec<(Access, ops::Range<u64>, Status)>,
    sync_errors: Vec<ops::Range<u64>>,
    read_delay: Duration,
    write_delay: Duration,
    sync_delay: Duration,
    syncs: AtomicU64,
}

/// What is wrong with an `inject=`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// No such rule.
    #[error("there is no fault {word:?} to inject{}", did_you_mean(.nearest))]
    Unknown {
        /// What was written.
        word: String,
        /// The nearest right name.
        nearest: Option<&'static str>,
    },
    /// The part behind the name is wrong.
    #[error("{rule:?}: {want}")]
    BadValue {
        /// What was written.
        rule: String,
        /// What is wanted.
        want: &'static str,
    },
}

const RULES: [&str; 7] =
    ["read-error", "write-error", "no-space", "sync-error", "read-delay-ms", "write-delay-ms", "sync-delay-ms"];

impl Faults {
    /// Reads rules joined by `+`.
    ///
    /// # Errors
    /// The first rule that is wrong.
    pub fn parse(text: &str) -> Result<Self, FaultError> {
        let mut faults = Self::default();
        for rule in text.split('+') {
            let at = rule.find(['@', '=']).unwrap_or(rule.len());
            let (word, value) = rule.split_at(at);
            let span = || {
                let bad = || FaultError::BadValue { rule: rule.into(), want: SPAN };
                value.strip_prefix('@').and_then(parse_span).ok_or_else(bad)
            };
            let delay = || {
                let bad = || FaultError::BadValue { rule: rule.into(), want: DELAY };
                value.strip_prefix('=').and_then(|ms| ms.parse().ok()).map(Duration::from_millis).ok_or_else(bad)
            };
            match word {
                "read-error" => faults.errors.push((Access::Read, span()?, Status::IO_ERROR)),
                "write-error" => faults.errors.push((Access::Write, span()?, Status::IO_ERROR)),
                "no-space" => faults.errors.push((Access::Write, span()?, Status::NO_SPACE)),
                "sync-error" => faults.sync_errors.push(span()?),
                "read-delay-ms" => faults.read_delay = delay()?,
                "write-delay-ms" => faults.write_delay = delay()?,
                "sync-delay-ms" => faults.sync_delay = delay()?,
                _ => return Err(FaultError::Unknown { word: word.into(), nearest: nearest(word, &RULES) }),
            }
        }
        Ok(faults)
    }

    /// What is to happen to a read or a change of this range. An error goes before a delay.
    #[must_use]
    pub fn before(&self, access: Access, range: Range) -> Fault {
        if let Some((_, _, status)) = self.errors(access, range).next() {
            return Fault::Fail(*status);
        }
        let delay = |of, delay| if access.has(of) { delay } else { Duration::ZERO };
        let delay = delay(Access::Read, self.read_delay) + delay(Access::Write, self.write_delay);
        if delay.is_zero() { Fault::Nothing } else { Fault::Delay(delay) }
    }

    /// The first byte of the range whose access is to fail.
    #[must_use]
    pub fn first_bad(&self, access: Access, range: Range) -> Option<u64> {
        self.errors(access, range).map(|(_, span, _)| span.start.max(range.offset())).min()
    }

    /// The errors that an access to this range meets.
    fn errors(&self, access: Access, range: Range) -> impl Iterator<Item = &(Access, ops::Range<u64>, Status)> {
        let touched = move |span: &ops::Range<u64>| range.offset() < span.end && span.start < range.end();
        self.errors.iter().filter(move |(of, span, _)| access.has(*of) && touched(span))
    }

    /// How long the next sync is to wait before it begins, and whether it is to fail then.
    #[must_use]
    pub fn before_sync(&self) -> (Duration, bool) {
        let count = self.syncs.fetch_add(1, Ordering::SeqCst) + 1;
        (self.sync_delay, self.sync_errors.iter().any(|span| span.contains(&count)))
    }

    /// Syncs that have begun.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::SeqCst)
    }
}

const SPAN: &str = "needs a span behind an @: FIRST..END, FIRST.., ..END, .. or one number";
const DELAY: &str = "needs milliseconds behind an =";

fn parse_span(text: &str) -> Option<ops::Range<u64>> {
    let Some((first, end)) = text.split_once("..") else {
        let one = parse_size(text)?;
        return Some(one..one.checked_add(1)?);
    };
    let first = if first.is_empty() { 0 } else { parse_size(first)? };
    let end = if end.is_empty() { u64::MAX } else { parse_size(end)? };
    (first < end).then_some(first..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use twinrail_protocol::Geometry;

    fn range(offset: u64, length: u64) -> Range {
        let geometry = Geometry { size: 1 << 30, logical_block: 512, physical_block: 512, max_transfer: 1 << 20 };
        geometry.range(offset, length, length).unwrap()
    }

    #[test]
    fn errors_hit_what_touches_their_span_and_nothing_else() {
        let faults = Faults::parse("read-error@4096..8192+write-error@..512+no-space@1M..").unwrap();
        let read = |offset, length| faults.before(Access::Read, range(offset, length));
        let write = |offset, length| faults.before(Access::Write, range(offset, length));
        assert_eq!(read(0, 4096), Fault::Nothing);
        assert_eq!(read(0, 4608), Fault::Fail(Status::IO_ERROR));
        assert_eq!(read(7680, 1024), Fault::Fail(Status::IO_ERROR));
        assert_eq!(read(8192, 512), Fault::Nothing);
        assert_eq!(write(4096, 4096), Fault::Nothing);
        assert_eq!(write(0, 4096), Fault::Fail(Status::IO_ERROR));
        assert_eq!(write((1 << 20) - 512, 512), Fault::Nothing);
        assert_eq!(write((1 << 20) - 512, 1024), Fault::Fail(Status::NO_SPACE));
    }

    #[test]
    fn delays_are_for_their_own_kind_and_an_error_goes_first() {
        let faults = Faults::parse("read-delay-ms=200+write-error@0+write-delay-ms=300").unwrap();
        assert_eq!(faults.before(Access::Read, range(0, 512)), Fault::Delay(Duration::from_millis(200)));
        assert_eq!(faults.before(Access::Write, range(0, 512)), Fault::Fail(Status::IO_ERROR));
        assert_eq!(faults.before(Access::Write, range(512, 512)), Fault::Delay(Duration::from_millis(300)));
    }

    #[test]
    fn a_compare_and_write_meets_the_faults_of_a_read_and_of_a_write() {
        let faults = Faults::parse("read-error@4096..8192+no-space@8192..+read-delay-ms=2+write-delay-ms=3").unwrap();
        let both = |offset| faults.before(Access::ReadWrite, range(offset, 512));
        assert_eq!(both(4096), Fault::Fail(Status::IO_ERROR));
        assert_eq!(both(8192), Fault::Fail(Status::NO_SPACE));
        assert_eq!(both(0), Fault::Delay(Duration::from_millis(5)));
    }

    #[test]
    fn syncs_are_counted_from_one() {
        let faults = Faults::parse("sync-error@2+sync-error@4..+sync-delay-ms=5").unwrap();
        let failed: Vec<_> = (0..5).map(|_| faults.before_sync().1).collect();
        assert_eq!(failed, [false, true, false, true, true]);
        assert_eq!(faults.before_sync().0, Duration::from_millis(5));
        assert_eq!(faults.syncs(), 6);
    }

    #[test]
    fn a_wrong_rule_is_named_with_the_nearest_right_one() {
        let error = Faults::parse("read-eror@..").unwrap_err();
        assert_eq!(error.to_string(), r#"there is no fault "read-eror" to inject; did you mean "read-error"?"#);
        for text in ["", "sync-error", "sync-error=1", "read-error@9..9", "read-error@x..", "sync-delay-ms@5"] {
            assert!(Faults::parse(text).is_err(), "{text}");
        }
        let error = Faults::parse("sync-delay-ms=soon").unwrap_err().to_string();
        assert_eq!(error, r#""sync-delay-ms=soon": needs milliseconds behind an ="#);
    }
}
