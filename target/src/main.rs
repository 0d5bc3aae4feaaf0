//! `twinrail-target`: serves volumes to Twinrail initiators. A thin shell around the library.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use twinrail_target::config::{Config, ConfigError, Settings};
use twinrail_target::control::Server;
use twinrail_target::metrics;

/// Threads of the control plane: handshakes and metrics need few.
const CONTROL_THREADS: usize = 2;

/// Serves volumes to Twinrail initiators.
#[derive(Parser)]
#[command(name = "twinrail-target", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve volumes until SIGTERM or SIGINT
    Serve(Box<Serve>),
    /// Say whether a configuration file is right, and what isn't
    CheckConfig {
        /// The file
        file: PathBuf,
    },
    /// Print what is counted and measured, as a table in Markdown
    MetricsTable,
}

#[derive(Args)]
struct Serve {
    /// Configuration file; the command line wins over it, volumes and allowed names are added
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Volume to serve: NAME=PATH, NAME=memory or NAME=null, then options behind commas, such as
    /// disk0=/srv/disk0.img,size=10G; may be given several times
    #[arg(long = "volume", value_name = "SPEC")]
    volumes: Vec<String>,
    #[command(flatten)]
    settings: Settings,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("twinrail-target: {error:#}");
            // 2 as for a wrong command line: trying again changes nothing.
            ExitCode::from(if error.is::<ConfigError>() { 2 } else { 1 })
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Serve(serve) => {
            let Serve { config, volumes, settings } = *serve;
            let config = Config::load(config.as_deref(), settings, &volumes)?;
            start_log(&config.log)?;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(CONTROL_THREADS)
                .thread_name("control")
                .enable_all()
                .build()
                .context("the control plane can't be started")?;
            let served = runtime.block_on(Server::run(config));
            // A blocking call that hangs on a dead disk must not keep the process from ending.
            runtime.shutdown_background();
            Ok(served?)
        }
        Command::CheckConfig { file } => {
            let config = Config::load(Some(&file), Settings::default(), &[])?;
            println!("{}: ok, volumes: {}", file.display(), config.volumes.len());
            Ok(())
        }
        Command::MetricsTable => {
            print!("{}", metrics::markdown_table());
            Ok(())
        }
    }
}

fn start_log(filter: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("--log: {filter:?} is no filter"))?;
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).with_writer(std::io::stderr).init();
    Ok(())
}
