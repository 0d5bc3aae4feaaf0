//! A line per event, for people. Costs one branch when it is off.

use std::fmt::Arguments;

use crate::clock::Time;

/// Where the lines go.
#[derive(Debug, Default)]
pub struct Trace {
    on: bool,
    lines: Vec<String>,
}

impl Trace {
    /// A trace that keeps its lines if `on`.
    #[must_use]
    pub fn new(on: bool) -> Self {
        Self { on, lines: Vec::new() }
    }

    /// Whether lines are kept.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Adds a line. Use the macro [`crate::note`], which doesn't even build the arguments when the trace is off.
    #[cold]
    pub fn line(&mut self, now: Time, who: Arguments<'_>, what: Arguments<'_>) {
        let (seconds, micros) = (now / 1_000_000, now % 1_000_000);
        self.lines.push(format!("{seconds:>4}.{micros:06}  {who:<12} {what}", who = who.to_string()));
    }

    /// The lines so far.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// Forgets the lines.
    pub fn clear(&mut self) {
        self.lines.clear();
    }
}

/// `note!(ground, "target", "crashes with {} in flight", n)`: a line of the trace, if it is on.
#[macro_export]
macro_rules! note {
    ($ground:expr, $who:expr, $($what:tt)*) => {
        if $ground.trace.is_on() {
            let now = $ground.clock.now();
            $ground.trace.line(now, format_args!("{}", $who), format_args!($($what)*));
        }
    };
}
