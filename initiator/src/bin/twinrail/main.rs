//! `twinrail`: the initiator's command line. Each subcommand has a room of its own; what they share is how a
//! volume is attached ([`attach`]), which ranges may be asked for ([`range`]), how long work is divided among
//! threads ([`crew`]) and how the command ends ([`exit`]).

mod attach;
mod bench;
mod copy;
mod crew;
mod exit;
mod info;
mod interrupt;
mod log;
mod metrics;
mod number;
mod outage;
mod output;
mod ping;
mod progress;
mod range;
mod read;
mod size;
mod streams;
mod sums;
mod transfer;
mod usage;
mod verify;
mod write;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::interrupt::Interrupt;

/// Use volumes of a Twinrail target.
#[derive(Parser)]
#[command(name = "twinrail", version, after_help = exit::HELP, max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tell what a volume is and what was agreed on with its target
    Info(info::Arguments),
    /// Measure round trips to the target's reactors, without work at the storage
    Ping(ping::Arguments),
    /// Read a range of a volume into a file or to stdout
    Read(read::Arguments),
    /// Write a file or stdin to a range of a volume
    Write(write::Arguments),
    /// Copy a file or stdin to a volume, a volume to a file or stdout, or a volume to another
    ///
    /// Holes stay holes, many requests are in flight, the data is flushed at the end, and the target's
    /// checksums of the volume are compared with those of the data that went through here.
    Copy(copy::Arguments),
    /// Compute a volume's checksums at its target, or compare a volume with a file, moving no data
    Verify(verify::Arguments),
    /// Measure how fast a volume is
    ///
    /// Each queue has a thread and a connection, and keeps its depth in flight. The first half second isn't
    /// counted. A bench that only reads attaches read-only; one that writes DESTROYS what is on the volume.
    Bench(bench::Arguments),
    /// Print the table of the initiator's metrics in Markdown
    MetricsTable,
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => return exit::from_clap(&error),
    };
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn parse<W: Into<OsString> + Clone>(words: impl IntoIterator<Item = W>) -> Result<Arguments, clap::Error> {
    // `--offset -1` has a wrong value: `-1` isn't an option that nobody knows.
    let mut command = Arguments::command().mut_subcommands(|command| {
        command.mut_args(|arg| {
            let named = arg.get_long().is_some() && arg.get_action().takes_values();
            if named { arg.allow_negative_numbers(true) } else { arg }
        })
    });
    let mut found = command.try_get_matches_from_mut(words)?;
    Arguments::from_arg_matches_mut(&mut found).map_err(|error| error.format(&mut command))
}

fn run(command: Command) -> anyhow::Result<()> {
    log::begin()?;
    let interrupt = Interrupt::listen()?;
    match command {
        Command::Info(arguments) => info::run(&arguments),
        Command::Ping(arguments) => ping::run(&arguments, &interrupt),
        Command::Read(arguments) => read::run(&arguments, &interrupt),
        Command::Write(arguments) => write::run(&arguments, &interrupt),
        Command::Copy(arguments) => copy::run(&arguments, &interrupt),
        Command::Verify(arguments) => verify::run(&arguments, &interrupt),
        Command::Bench(arguments) => bench::run(&arguments, &interrupt),
        Command::MetricsTable => metrics::print_table(),
    }
}
