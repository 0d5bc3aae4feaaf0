//! The configuration file: TOML, read so that everything wrong in it can be told with its line.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{ConfigError, Problem, Settings};
use crate::volume::spec::nearest;
use crate::volume::{Backing, VolumeSpec};

/// A file that was read, with the lines on which its options stand.
#[derive(Debug, Default)]
pub struct ConfigFile {
    path: PathBuf,
    lines: BTreeMap<String, usize>,
    /// The options.
    pub(super) settings: Settings,
    /// The volumes.
    pub(super) volumes: Vec<GivenVolume>,
}

/// A volume as the file or the command line asks for it.
#[derive(Debug)]
pub(super) struct GivenVolume {
    /// Where.
    pub(super) place: String,
    pub(super) spec: VolumeSpec,
    /// Whether it has a value of its own for these; else the target's holds.
    pub(super) has_max_transfer: bool,
    pub(super) has_lock_wait: bool,
}

/// The key of the volumes' tables.
const VOLUME: &str = "volume";
/// Options of a volume that stand in its table under the names that they have on the command line, with
/// `_` for `-`.
const VOLUME_OPTIONS: [&str; 7] =
    ["size", "read_only", "write_through", "logical_block", "max_transfer", "inject", "lock_wait_ms"];
/// Exactly one of these says where a volume's bytes are.
const BACKINGS: [&str; 3] = ["path", "memory", "null"];

impl ConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// The file can't be read, isn't TOML, has unknown options or values of wrong types.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| {
            let text = format!("the configuration can't be read: {error}");
            ConfigError(vec![Problem { place: Some(path.display().to_string()), text }])
        })?;
        Self::parse(path, &text)
    }

    /// Reads the text of a file; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let reader = Reader { path, text };
        let table = DeTable::parse(text).map_err(|error| reader.errors([(reader.line_of(&error), text_of(&error))]))?;
        // By line.
        let mut problems = BTreeMap::new();
        let keys = Settings::keys();
        let known: Vec<&str> = keys.iter().map(String::as_str).chain([VOLUME]).collect();
        let mut file = Self { path: path.into(), ..Self::default() };
        for (key, value) in table.get_ref() {
            let name: &str = key.get_ref();
            let line = reader.line(key.span());
            if !known.contains(&name) {
                let remedy = match nearest(name, &known) {
                    Some(near) => format!("did you mean {near:?}?"),
                    None => "the options are listed by `twinrail-target serve --help`".into(),
                };
                problems.insert(line, format!("there is no option {name:?}; {remedy}"));
            } else if name == VOLUME {
                file.read_volumes(&reader, value, &mut problems);
            } else {
                file.lines.insert(name.into(), line);
            }
        }
        match toml::from_str::<Settings>(text) {
            Ok(settings) => file.settings = settings,
            Err(error) => drop(problems.insert(reader.line_of(&error), text_of(&error))),
        }
        match problems.is_empty() {
            true => Ok(file),
            false => Err(reader.errors(problems)),
        }
    }

    fn read_volumes(
        &mut self,
        reader: &Reader<'_>,
        value: &Spanned<DeValue<'_>>,
        problems: &mut BTreeMap<usize, String>,
    ) {
        let tables = match value.get_ref() {
            DeValue::Array(tables) => tables.iter().map(|table| (table, table.get_ref().as_table())).collect(),
            _ => vec![(value, None)],
        };
        for (value, table) in tables {
            let line = reader.line(value.span());
            let Some(table) = table else {
                let text = "`volume` is no list of tables; begin each volume with a line [[volume]]";
                problems.insert(line, text.into());
                continue;
            };
            match read_volume(reader, table) {
                Ok(spec) => self.volumes.push(GivenVolume {
                    place: reader.place(line),
                    spec,
                    has_max_transfer: table.contains_key("max_transfer"),
                    has_lock_wait: table.contains_key("lock_wait_ms"),
                }),
                Err((at, text)) => drop(problems.insert(at.unwrap_or(line), text)),
            }
        }
    }

    /// File and line on which an option stands, if it does.
    pub(super) fn place(&self, key: &str) -> Option<String> {
        self.lines.get(key).map(|line| format!("{}:{line}", self.path.display()))
    }
}

/// A `[[volume]]` table, or what is wrong with it and on which line.
fn read_volume(reader: &Reader<'_>, table: &DeTable<'_>) -> Result<VolumeSpec, (Option<usize>, String)> {
    let missing = |text: &str| (None, text.to_owned());
    let name = table.get("name").ok_or_else(|| missing("a volume has no name; add name = \"...\""))?;
    let not_text = |value: &Spanned<DeValue<'_>>, key: &str| {
        (Some(reader.line(value.span())), format!("{key} must be a text in quotation marks"))
    };
    let name = name.get_ref().as_str().ok_or_else(|| not_text(name, "name"))?;
    let whole = |error: crate::volume::SpecError| (None, error.to_string());
    // The backing is found below; any will do until then.
    let mut spec = VolumeSpec::new(name, Backing::Null).map_err(whole)?;
    let mut backings = Vec::new();
    for (key, value) in table {
        let (key, at): (&str, _) = (key.get_ref(), Some(reader.line(key.span())));
        match (key, value.get_ref()) {
            ("name", _) => {}
            ("path", DeValue::String(path)) => backings.push(Backing::File(PathBuf::from(path.as_ref()))),
            ("path", _) => return Err(not_text(value, "path")),
            ("memory", DeValue::Boolean(true)) => backings.push(Backing::Memory),
            ("null", DeValue::Boolean(true)) => backings.push(Backing::Null),
            ("memory" | "null", DeValue::Boolean(false)) => {}
            ("memory" | "null", _) => return Err((at, format!("{key} must be true or false"))),
            (option, value) if VOLUME_OPTIONS.contains(&option) => {
                let option = option.replace('_', "-");
                let part = match value {
                    DeValue::Boolean(false) => continue,
                    DeValue::Boolean(true) => option,
                    DeValue::Integer(number) => format!("{option}={}", number.as_str()),
                    DeValue::String(text) => format!("{option}={text}"),
                    other => return Err((at, format!("{key} can't be a {}", other.type_str()))),
                };
                spec.set(&part).map_err(|error| (at, error.to_string()))?;
            }
            (key, _) => {
                let known: Vec<&str> = [&["name"][..], &BACKINGS, &VOLUME_OPTIONS].concat();
                let remedy = match nearest(key, &known) {
                    Some(near) => format!("did you mean {near:?}?"),
                    None => format!("it may have {}", known.join(", ")),
                };
                return Err((at, format!("a volume has no option {key:?}; {remedy}")));
            }
        }
    }
    match <[Backing; 1]>::try_from(backings) {
        Ok([backing]) => spec.backing = backing,
        Err(_) => {
            let text = "needs exactly one of path = \"...\", memory = true, null = true";
            return Err((None, format!("volume {name:?} {text}")));
        }
    }
    spec.check().map_err(whole)?;
    Ok(spec)
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Reader<'_> {
    fn line(&self, span: Range<usize>) -> usize {
        self.text.as_bytes().iter().take(span.start).filter(|&&b| b == b'\n').count() + 1
    }

    fn place(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }

    fn errors(&self, problems: impl IntoIterator<Item = (usize, String)>) -> ConfigError {
        let place = |line| Some(self.place(line));
        ConfigError(problems.into_iter().map(|(line, text)| Problem { place: place(line), text }).collect())
    }

    fn line_of(&self, error: &toml::de::Error) -> usize {
        error.span().map_or(1, |span| self.line(span))
    }
}

fn text_of(error: &toml::de::Error) -> String {
    error.message().trim().replace('\n', "; ")
}
