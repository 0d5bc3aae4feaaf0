//! What the library has to say goes to stderr if somebody asked for it by `RUST_LOG`: whatever ends a command is in its
//! last line anyway.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::usage::usage;

/// Crates of this program that log something.
const CRATES: [&str; 3] = ["twinrail", "twinrail_initiator", "twinrail_fallback_tcp"];

/// Begins to log.
pub(crate) fn begin() -> anyhow::Result<()> {
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(text) if !text.is_empty() => filter(&text)?,
        _ => EnvFilter::new("off"),
    };
    // Colours are for eyes.
    let seen = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(seen).init();
    Ok(())
}

fn filter(text: &str) -> anyhow::Result<EnvFilter> {
    let refused = |why: &dyn std::fmt::Display| {
        usage(format!("RUST_LOG can't be `{text}`: {why}; write a level like `info`, or `twinrail_initiator=debug`"))
    };
    // A word alone is a level or a crate: one that is neither is a slip of the pen, which would leave everything out.
    // What names a crate of another program beside its level is that program's affair.
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty() && !word.contains(['=', '[', ':']));
    for word in words {
        if word.parse::<LevelFilter>().is_err() && !CRATES.contains(&word) {
            return Err(refused(&format!("`{word}` is neither a level nor a crate of this program")));
        }
    }
    EnvFilter::try_new(text).map_err(|error| refused(&error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Code, code};

    #[test]
    fn rust_log_nonsense_was_taken_for_a_crate_and_logged_nothing() {
        for bad in ["nonsense", "inof", "info,nonsense", "twinrail=verbose", "a=b=c", "=debug"] {
            let error = filter(bad).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("RUST_LOG") && text.contains(bad) && text.contains("`info`"), "{text}");
            assert_eq!(code(&error), Code::Usage);
        }
        for good in ["info", "DEBUG", "off", "twinrail_initiator", "warn,twinrail_initiator::queue=trace", "other=info"]
        {
            assert!(filter(good).is_ok(), "{good}");
        }
    }
}
