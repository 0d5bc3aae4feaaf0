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
mod metrics;
mod output;
mod ping;
mod progress;
mod range;
mod read;
mod size;
mod sums;
mod verify;
mod write;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return exit::from_clap(&error),
    };
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    log()?;
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

/// What the library has to say goes to stderr if somebody asked for it by `RUST_LOG`: whatever ends a command
/// is in its last line anyway.
fn log() -> anyhow::Result<()> {
    use tracing_subscriber::EnvFilter;
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(text) if !text.is_empty() => {
            EnvFilter::try_new(&text).map_err(|e| exit::usage(format!("RUST_LOG can't be `{text}`: {e}")))?
        }
        _ => EnvFilter::new("off"),
    };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    Ok(())
}
