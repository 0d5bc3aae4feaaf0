//! What a person says about a volume: `disk0=/srv/disk0.img,size=10G,write-through`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use twinrail_protocol::limits::{LOGICAL_BLOCK_RANGE, MAX_VOLUME_NAME};

use super::faults::{FaultError, Faults};
use crate::mapping::Pages;

/// How long a target waits by default for the one that holds its backing: a predecessor that was killed
/// holds it until the kernel has finished its writes.
pub const DEFAULT_LOCK_WAIT: Duration = Duration::from_secs(60);
/// Largest payload of one command in bytes, by default.
pub const DEFAULT_MAX_TRANSFER: u32 = 1 << 20;

/// What a volume's bytes are to be kept in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A regular file or a block device.
    File(PathBuf),
    /// Memory; gone when the target ends.
    Memory,
    /// Nothing; for measuring.
    Null,
}

impl Backing {
    /// Reads `memory`, `null` or a path. A file of such a name is written `./memory`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text {
            "memory" => Self::Memory,
            "null" => Self::Null,
            path => Self::File(path.into()),
        }
    }
}

/// What a volume is to be.
#[derive(Clone, Debug)]
pub struct VolumeSpec {
    /// Its name: 1 to 64 of `A-Z a-z 0-9 . _ -`.
    pub name: String,
    /// Where the bytes are.
    pub backing: Backing,
    /// Size in bytes; the backing's own when there is none. A missing file is made of this size.
    pub size: Option<u64>,
    /// Nobody may write.
    pub read_only: bool,
    /// A completed write is on stable storage.
    pub write_through: bool,
    /// Smallest addressable unit in bytes; the smallest that the backing allows when there is none.
    pub logical_block: Option<u32>,
    /// Largest payload of one command in bytes.
    pub max_transfer: u32,
    /// Faults to inject. The caller refuses them unless fault injection was allowed.
    pub faults: Option<Arc<Faults>>,
    /// How long to wait for another target that holds the backing.
    pub lock_wait: Duration,
    /// What memory is made of. The target's to set, for all volumes.
    pub pages: Pages,
}

/// What is wrong with a volume as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No `=` between name and backing.
    #[error("{text:?} is no volume: write NAME=PATH, NAME=memory or NAME=null, then options behind commas")]
    NoBacking {
        /// What was written.
        text: String,
    },
    /// The name can't be one.
    #[error("{name:?} can't be a volume's name: use 1 to {MAX_VOLUME_NAME} of A-Z a-z 0-9 . _ -")]
    BadName {
        /// What was written.
        name: String,
    },
    /// No such option.
    #[error("volume {name}: there is no option {option:?}{}", did_you_mean(.nearest))]
    UnknownOption {
        /// The volume.
        name: String,
        /// What was written.
        option: String,
        /// The nearest right name.
        nearest: Option<&'static str>,
    },
    /// An option twice.
    #[error("volume {name}: option {option:?} is given twice")]
    Twice {
        /// The volume.
        name: String,
        /// The option.
        option: &'static str,
    },
    /// The value of an option is wrong.
    #[error("volume {name}: {option:?} {want}")]
    BadValue {
        /// The volume.
        name: String,
        /// The option, with its value.
        option: String,
        /// What is wanted.
        want: &'static str,
    },
    /// The faults to inject are wrong.
    #[error("volume {name}: inject: {error}")]
    Inject {
        /// The volume.
        name: String,
        /// What is wrong.
        error: FaultError,
    },
    /// Memory and null have no size of their own.
    #[error("volume {name}: {backing} has no size of its own: add size=, such as size=1G")]
    SizeMissing {
        /// The volume.
        name: String,
        /// `memory` or `null`.
        backing: &'static str,
    },
    /// Memory and null have no stable storage to write through to.
    #[error("volume {name}: a {backing} volume can't be write-through: it keeps nothing when the target ends")]
    NeverStable {
        /// The volume.
        name: String,
        /// `memory` or `null`.
        backing: &'static str,
    },
}

const OPTIONS: [&str; 7] =
    ["size", "read-only", "write-through", "logical-block", "max-transfer", "inject", "lock-wait-ms"];
const WANT_SIZE: &str = "needs a size: bytes, or a number with K, M, G or T behind it, and more than 0";
const WANT_NOTHING: &str = "takes no value: it is there or it isn't";
const WANT_BLOCK: &str = "needs a power of two from 512 to 65536";
const WANT_TIME: &str = "needs milliseconds";

impl VolumeSpec {
    /// A volume with every option at its default.
    ///
    /// # Errors
    /// [`SpecError::BadName`].
    pub fn new(name: &str, backing: Backing) -> Result<Self, SpecError> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.len() > MAX_VOLUME_NAME || !name.chars().all(good) {
            return Err(SpecError::BadName { name: name.into() });
        }
        Ok(Self {
            name: name.into(),
            backing,
            size: None,
            read_only: false,
            write_through: false,
            logical_block: None,
            max_transfer: DEFAULT_MAX_TRANSFER,
            faults: None,
            lock_wait: DEFAULT_LOCK_WAIT,
            pages: Pages::default(),
        })
    }

    /// Reads `NAME=BACKING[,OPTION[=VALUE]]...`.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let (name, backing) = match first.split_once('=') {
            Some((name, backing)) if !backing.is_empty() => (name, backing),
            _ => return Err(SpecError::NoBacking { text: text.into() }),
        };
        let mut spec = Self::new(name, Backing::parse(backing))?;
        let mut seen = Vec::new();
        for part in parts {
            let option = spec.set(part)?;
            if seen.contains(&option) {
                return Err(SpecError::Twice { name: spec.name, option });
            }
            seen.push(option);
        }
        spec.check()?;
        Ok(spec)
    }

    /// Sets one option, written as in [`Self::parse`]; gives its name.
    ///
    /// # Errors
    /// When there is no such option, or not with this value.
    pub fn set(&mut self, part: &str) -> Result<&'static str, SpecError> {
        let (word, value) = match part.split_once('=') {
            Some((word, value)) => (word, Some(value)),
            None => (part, None),
        };
        let Some(option) = OPTIONS.into_iter().find(|option| *option == word) else {
            let (name, option, nearest) = (self.name.clone(), word.into(), nearest(word, &OPTIONS));
            return Err(SpecError::UnknownOption { name, option, nearest });
        };
        let bad = |want| SpecError::BadValue { name: self.name.clone(), option: part.into(), want };
        let size = || value.and_then(parse_size).filter(|&size| size > 0).ok_or_else(|| bad(WANT_SIZE));
        let short = || u32::try_from(size()?).map_err(|_| bad(WANT_SIZE));
        let flag = || value.is_none().then_some(true).ok_or_else(|| bad(WANT_NOTHING));
        match option {
            "size" => self.size = Some(size()?),
            "read-only" => self.read_only = flag()?,
            "write-through" => self.write_through = flag()?,
            "logical-block" => {
                let right = |block: &u32| block.is_power_of_two() && LOGICAL_BLOCK_RANGE.contains(block);
                self.logical_block = Some(short().ok().filter(right).ok_or_else(|| bad(WANT_BLOCK))?);
            }
            "max-transfer" => self.max_transfer = short()?,
            "inject" => {
                let inject = |error| SpecError::Inject { name: self.name.clone(), error };
                self.faults = Some(Arc::new(Faults::parse(value.unwrap_or_default()).map_err(inject)?));
            }
            _ => {
                let wait_ms = value.and_then(|ms| ms.parse().ok()).ok_or_else(|| bad(WANT_TIME))?;
                self.lock_wait = Duration::from_millis(wait_ms);
            }
        }
        Ok(option)
    }

    /// Checks what depends on more than one option.
    ///
    /// # Errors
    /// When memory or null has no size, or is to be write-through.
    pub fn check(&self) -> Result<(), SpecError> {
        let backing = match self.backing {
            Backing::File(_) => return Ok(()),
            Backing::Memory => "memory",
            Backing::Null => "null",
        };
        let name = self.name.clone();
        match (self.size, self.write_through) {
            (None, _) => Err(SpecError::SizeMissing { name, backing }),
            (Some(_), true) => Err(SpecError::NeverStable { name, backing }),
            (Some(_), false) => Ok(()),
        }
    }
}

/// Reads bytes, or a number with one of `K M G T` behind it, for powers of 1024.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let (number, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        b't' | b'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    if !number.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The candidate that `word` was most likely meant to be; none when it is like none of them.
#[must_use]
pub fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    // More than a third of the letters wrong is no slip of the finger.
    let distances = candidates.iter().map(|&candidate| (distance(word, candidate), candidate));
    distances.min().filter(|(distance, candidate)| distance * 3 <= candidate.len()).map(|(_, candidate)| candidate)
}

/// The end of a message about an unknown name.
pub(super) fn did_you_mean(nearest: &Option<&str>) -> String {
    nearest.map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
}

/// Letters to insert, delete or exchange, or neighbours to swap, to make one of the other (Damerau-Levenshtein, no
/// letter twice).
fn distance(a: &str, b: &str) -> usize {
    let [a, b]: [Vec<char>; 2] = [a, b].map(|word| word.chars().collect());
    // Rows of the table of distances between the beginnings of both: that of two letters less, of one less, and
    // the one that is being filled in.
    let (mut before_last, mut last): (Vec<usize>, Vec<usize>) = (Vec::new(), (0..=b.len()).collect());
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let changed = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = changed.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(before_last[j - 2] + 1);
            }
            row.push(least);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_read() {
        let text = "disk0=/srv/d.img,size=1G,read-only,write-through,logical-block=4K,max-transfer=256K,\
                    inject=sync-error@1,lock-wait-ms=5";
        let spec = VolumeSpec::parse(text).unwrap();
        assert_eq!(spec.name, "disk0");
        assert_eq!(spec.backing, Backing::File("/srv/d.img".into()));
        assert_eq!((spec.size, spec.logical_block, spec.max_transfer), (Some(1 << 30), Some(4096), 256 << 10));
        assert!(spec.read_only && spec.write_through && spec.faults.is_some());
        assert_eq!(spec.lock_wait, Duration::from_millis(5));
    }

    #[test]
    fn defaults_are_the_careful_ones() {
        let spec = VolumeSpec::parse("m=memory,size=512").unwrap();
        assert_eq!((spec.backing, spec.size), (Backing::Memory, Some(512)));
        assert!(!spec.read_only && !spec.write_through && spec.faults.is_none() && spec.logical_block.is_none());
        assert_eq!(spec.lock_wait, DEFAULT_LOCK_WAIT);
        assert_eq!(VolumeSpec::parse("m=./memory").unwrap().backing, Backing::File("./memory".into()));
    }

    #[test]
    fn each_mistake_is_named_with_its_remedy() {
        let error = |text: &str| VolumeSpec::parse(text).unwrap_err().to_string();
        assert!(error("disk0").contains("write NAME=PATH"));
        assert!(error("disk0=").contains("write NAME=PATH"));
        assert!(error("a/b=/x").contains("\"a/b\" can't be a volume's name"));
        assert!(error(&format!("{}=/x", "n".repeat(65))).contains("1 to 64"));
        assert_eq!(error("d=/x,sise=1G"), r#"volume d: there is no option "sise"; did you mean "size"?"#);
        assert_eq!(error("d=/x,readonly"), r#"volume d: there is no option "readonly"; did you mean "read-only"?"#);
        assert_eq!(error("d=/x,colour=red"), r#"volume d: there is no option "colour""#);
        assert!(error("d=/x,").contains(r#"no option """#));
        assert_eq!(error("d=/x,size=1G,size=2G"), r#"volume d: option "size" is given twice"#);
        for bad in ["size", "size=", "size=0", "size=-1", "size=1X", "size=99999999T", "size=+5"] {
            let message = error(&format!("d=/x,{bad}"));
            assert!(message.starts_with(&format!("volume d: {bad:?} needs a size")), "{message}");
        }
        assert!(error("d=/x,read-only=yes").contains("takes no value"));
        for bad in ["logical-block=1000", "logical-block=256", "logical-block=128K", "logical-block"] {
            assert!(error(&format!("d=/x,{bad}")).contains("power of two from 512 to 65536"));
        }
        assert!(error("d=/x,inject=sync-eror@1").contains("did you mean \"sync-error\"?"));
        assert!(error("d=/x,inject").contains("volume d: inject: "));
        assert!(error("n=null").contains("add size="));
        assert!(error("m=memory,size=1G,write-through").contains("can't be write-through"));
    }

    #[test]
    fn swapped_letters_are_one_slip() {
        assert_eq!(["size", "siez", "sise", "sze", "", "isez"].map(|word| distance(word, "size")), [0, 1, 1, 1, 4, 2]);
        assert_eq!(distance("", "é"), 1);
        assert_eq!(nearest("siez", &["inject", "size"]), Some("size"));
        assert_eq!(nearest("lgo", &["log", "pin"]), Some("log"));
    }

    #[test]
    fn sizes_have_binary_suffixes() {
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(
            ["1k", "1M", "3G", "2T"].map(parse_size),
            [10, 20, 30, 40].map(|s| Some((1 << s) * [0, 1, 1, 3, 2][s / 10]))
        );
        assert_eq!(["", "K", "1.5G", "1KB", "é"].map(parse_size), [None; 5]);
    }
}
