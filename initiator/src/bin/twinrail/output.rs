//! What goes to stdout.

use std::io::{self, Write};

use anyhow::Context;
use serde::Serialize;

use crate::exit::ReaderGone;

/// Prints a line, or several.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    written(writeln!(out, "{text}").and_then(|()| out.flush()))
}

/// Prints one JSON object in one line.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string(value).context("the result can't be written as JSON")?)
}

/// The result of a write to stdout.
pub(crate) fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        result => result.context("stdout can't be written"),
    }
}
