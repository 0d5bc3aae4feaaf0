//! How the command ends: one line that says why, and a code that scripts can branch on.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use twinrail_initiator::{ConnectError, Error, PathEnd, Rejection, Status};

use crate::output::{self, ReaderGone};
use crate::streams;
use crate::usage::Usage;

/// The part of `--help` about exit codes.
pub(crate) const HELP: &str = "\
Exit codes:
  0    done
  1    the operation failed: an I/O error, a checksum or comparison that differs, a full disk;
       also, without a word, when the reader of stdout went away
  2    a wrong argument or address; nothing was done
  3    the target can't be reached, is about to stop, or isn't one
  4    the target refuses the volume: unknown, held by another, read-only, no permission
  5    the session was lost: no connection for as long as --fail-fast allows, a target that was
       restarted, another writer that took the volume; whether the last changes were executed
       is unknown
  130  interrupted by SIGINT or SIGTERM: what is in flight is finished first, within 10 s, or
       within a second if there is no connection; a second signal ends it at once";

/// The codes of [`HELP`], which never change their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Code {
    Failed = 1,
    Usage = 2,
    Unreachable = 3,
    Refused = 4,
    Lost = 5,
    Interrupted = 130,
}

/// SIGINT or SIGTERM came.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Says why on stderr.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<Interrupted>() {
        output::complain(format_args!("twinrail: {Interrupted}"));
    } else if !error.is::<ReaderGone>() {
        output::complain(format_args!("twinrail: {}", line(error)));
    }
    ExitCode::from(code(error) as u8)
}

/// The code of an error: that of the first in its chain that has one.
pub(crate) fn code(error: &anyhow::Error) -> Code {
    let found = error.chain().find_map(|cause| {
        let connect = cause.downcast_ref::<ConnectError>().map(code_of_connect);
        let command = || cause.downcast_ref::<Error>().map(code_of_command);
        // Whichever way the path ended, a queue says so with nothing in flight too.
        let path = || cause.is::<PathEnd>().then_some(Code::Lost);
        let usage = || cause.is::<Usage>().then_some(Code::Usage);
        let interrupted = || cause.is::<Interrupted>().then_some(Code::Interrupted);
        connect.or_else(command).or_else(path).or_else(usage).or_else(interrupted)
    });
    found.unwrap_or(Code::Failed)
}

fn code_of_connect(error: &ConnectError) -> Code {
    match error {
        ConnectError::Option(_) => Code::Usage,
        ConnectError::Memory(_) | ConnectError::System { .. } => Code::Failed,
        ConnectError::Refused { status: Status::DRAINING | Status::SHUTDOWN, .. } => Code::Unreachable,
        ConnectError::Refused { .. } | ConnectError::WrongVolume { .. } | ConnectError::Authentication { .. } => {
            Code::Refused
        }
        _ => Code::Unreachable,
    }
}

fn code_of_command(error: &Error) -> Code {
    match error {
        Error::Rejected(Rejection::Memory(_)) => Code::Failed,
        Error::Rejected(_) => Code::Usage,
        Error::Target { status, .. } if ends_the_session(*status) => Code::Lost,
        Error::OutcomeUnknown { .. } | Error::ConnectionLost { .. } | Error::Ended { .. } | Error::Timeout { .. } => {
            Code::Lost
        }
        Error::Target { .. } | Error::CompareFailed { .. } | Error::Protocol { .. } => Code::Failed,
    }
}

/// Whether a status is about the session or its connection, and not about the command that it answers.
fn ends_the_session(status: Status) -> bool {
    matches!(status.0 >> 8, 3 | 4)
}

/// An error and its causes in one line. Many errors have the words of their cause in their own.
fn line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(|cause| cause.to_string()) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    output::on_one_line(&line)
}

/// Ends for what clap has to say: a text that was asked for, or an error in the form of ours.
pub(crate) fn from_clap(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let printed = streams::stdout_is_open()
            .and_then(|()| output::written(error.print().and_then(|()| std::io::stdout().flush())));
        return printed.map_or_else(|error| report(&error), |()| ExitCode::SUCCESS);
    }
    output::complain(format_args!("twinrail: {}", clap_line(&error.render().to_string())));
    ExitCode::from(Code::Usage as u8)
}

/// What clap says in several paragraphs, up to its usage, in one line.
fn clap_line(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let said = text.split("\n\n").take_while(|part| !part.starts_with("Usage:") && !part.starts_with("For more"));
    let said: Vec<String> = said.map(|part| part.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    if said.is_empty() || text.starts_with("Use volumes") {
        // No subcommand: clap answers with the whole help.
        return "no command is given; `twinrail --help` lists them".to_owned();
    }
    format!("{} (see `--help`)", said.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::usage;
    use anyhow::Context;
    use clap::CommandFactory;
    use twinrail_initiator::{Endpoint, Opcode, PathEnd};

    #[test]
    fn each_kind_of_error_has_its_code() {
        let target = || Endpoint { host: "shelf".into(), port: 4450 };
        let source = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let unreachable = ConnectError::Resolve { target: target(), source: source() };
        let refused =
            ConnectError::WrongVolume { target: target(), expected: Default::default(), found: Default::default() };
        let lost = Error::OutcomeUnknown { opcode: Opcode::WRITE, end: PathEnd::ClosedByTarget };
        let failed = Error::Target { opcode: Opcode::READ, status: Status::IO_ERROR };
        let preempted = Error::Target { opcode: Opcode::WRITE, status: Status::PREEMPTED };
        let leaving = ConnectError::Refused {
            target: target(),
            stage: twinrail_initiator::connect::Stage::Dial,
            status: Status::DRAINING,
            text: String::new(),
            retry_after_ms: 0,
            versions: (1, 1),
        };
        let cases: [(anyhow::Error, Code); 9] = [
            (leaving.into(), Code::Unreachable),
            (unreachable.into(), Code::Unreachable),
            (refused.into(), Code::Refused),
            (anyhow::Error::from(lost).context("copying"), Code::Lost),
            (failed.into(), Code::Failed),
            (preempted.into(), Code::Lost),
            (usage("no"), Code::Usage),
            (Interrupted.into(), Code::Interrupted),
            (source().into(), Code::Failed),
        ];
        for (error, expected) in cases {
            assert_eq!(code(&error), expected, "{error:#}");
            let number = (expected as u8).to_string();
            assert!(HELP.lines().any(|line| line.trim_start().starts_with(&number)), "{number} isn't in the help");
        }
    }

    #[test]
    fn a_path_that_ended_with_nothing_in_flight_was_an_operation_that_failed() {
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let text = "the target stops".to_owned();
        let ends = [
            PathEnd::from(reset),
            PathEnd::ClosedByTarget,
            PathEnd::Disconnected { status: Status::SHUTDOWN, text },
            PathEnd::Sibling,
        ];
        for end in ends {
            assert_eq!(code(&end.clone().into()), Code::Lost, "{end}");
            assert_eq!(code(&Error::Ended { end }.into()), Code::Lost);
        }
        for status in [Status::SHUTDOWN, Status::DRAINING, Status::SESSION_LOST, Status::CONNECTION_LOST] {
            assert_eq!(code(&Error::Target { opcode: Opcode::READ, status }.into()), Code::Lost, "{status}");
        }
    }

    #[test]
    fn a_cause_that_was_named_already_is_not_named_twice() {
        let source = std::io::Error::other("it rains");
        let inner = ConnectError::Resolve { target: Endpoint { host: "shelf".into(), port: 1 }, source };
        let error = Err::<(), _>(inner).context("twinrail://shelf/d").unwrap_err();
        let line = line(&error);
        assert!(line.starts_with("twinrail://shelf/d: shelf:1: "), "{line}");
        assert_eq!(line.matches("it rains").count(), 1, "{line}");
    }

    #[test]
    fn what_a_target_says_stays_in_one_line_and_commands_no_terminal() {
        assert_eq!(line(&usage("a\n\u{1b}[2Jb")), "a  [2Jb");
    }

    #[test]
    fn clap_is_brought_into_one_line() {
        let say = |words: &[&str]| match crate::parse(words) {
            Ok(_) => panic!("{words:?} pass"),
            Err(error) => clap_line(&error.render().to_string()),
        };
        let line = say(&["twinrail", "info", "nbd://host/disk"]);
        assert!(line.contains("`nbd://host/disk` is not the address of a volume"), "{line}");
        let line = say(&["twinrail", "bench"]);
        assert!(line.contains("<URL>") && !line.contains("Usage"), "{line}");
        let line = say(&["twinrail", "ping", "--cuont", "3", "twinrail://h/d"]);
        assert!(line.contains("'--cuont'") && line.contains("--count"), "{line}");
        assert!(!line.contains('\n'));
        let line = say(&["twinrail", "read", "twinrail://h/d", "--offset", "-1"]);
        assert!(line.contains("`-1` is no size in bytes"), "{line}");
        assert!(say(&["twinrail"]).contains("no command"), "{}", say(&["twinrail"]));
    }

    #[test]
    fn arguments_are_consistent() {
        crate::Arguments::command().debug_assert();
    }
}
