//! What goes to stdout, and complaints to stderr.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use crate::streams;
use crate::usage::usage;

/// The reader of our stdout has gone. It knows, so nobody has to be told.
#[derive(Debug)]
pub(crate) struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout went away")
    }
}

impl std::error::Error for ReaderGone {}

/// Prints a line, or several.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    streams::stdout_is_open()?;
    let mut out = io::stdout().lock();
    written(writeln!(out, "{text}").and_then(|()| out.flush()))
}

/// Prints one JSON object in one line.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string(value).context("the result can't be written as JSON")?)
}

/// Prints a result: as one JSON object for a script, in words for a person.
pub(crate) fn tell(result: &(impl Serialize + fmt::Display), json: bool) -> anyhow::Result<()> {
    if json { print_json(result) } else { print(&result.to_string()) }
}

/// Refuses `--json` where stdout, which `-` is, gets the data.
pub(crate) fn keep_json_apart(json: bool, data: &Path) -> anyhow::Result<()> {
    match json && data.as_os_str() == "-" {
        true => Err(usage("--json goes to stdout, and so would the data: name a file for it")),
        false => Ok(()),
    }
}

/// The result of a write to stdout.
pub(crate) fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        result => result.context("stdout can't be written"),
    }
}

/// Words of a target in one line: a terminal shall not obey them.
pub(crate) fn on_one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Says something on stderr. Nobody is left to hear of it when that fails: the exit code says the rest.
pub(crate) fn complain(text: impl fmt::Display) {
    let _unheard = writeln!(io::stderr(), "{text}");
}
