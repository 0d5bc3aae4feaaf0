//! Tells whoever looks at stderr that there is no connection, and when it is back.

use std::time::Duration;

use twinrail_initiator::Session;

use crate::output::{complain, on_one_line};

/// How often it is looked: a person doesn't notice so short a time.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// From when on it is worth a line, and how long a connection has to be back for another.
const WORTH_A_LINE: Duration = Duration::from_secs(1);

/// What is known of the outages of one session.
pub(crate) struct Watch {
    session: Session,
    /// A line was said, for an outage that began then.
    told_since_ns: Option<u64>,
    /// Since when the connection is back.
    back_ns: Option<u64>,
}

impl Watch {
    pub(crate) fn new(session: Session) -> Self {
        Self { session, told_since_ns: None, back_ns: None }
    }

    /// For how long there has been no connection.
    pub(crate) fn cut_off(&self) -> Duration {
        let since_ns = self.session.outage().map(|outage| outage.since_ns);
        since_ns.map_or(Duration::ZERO, |since_ns| self.since(since_ns))
    }

    fn since(&self, then_ns: u64) -> Duration {
        Duration::from_nanos(self.session.now_ns().saturating_sub(then_ns))
    }

    /// Looks, and says what is worth a line.
    pub(crate) fn look(&mut self) {
        if self.session.end().is_some() || self.session.is_closing() {
            return;
        }
        let target = self.session.target();
        match (self.session.outage(), self.told_since_ns) {
            (Some(outage), None) if self.since(outage.since_ns) >= WORTH_A_LINE => {
                let so_far = self.since(outage.since_ns).as_secs();
                let limit = match self.session.fail_fast() {
                    Some(limit) => format!("waiting up to {} s", limit.as_secs_f64()),
                    None => "waiting for ever".to_owned(),
                };
                let reason = on_one_line(&outage.reason);
                complain(format_args!(
                    "twinrail: no connection to {target} for {so_far} s ({reason}); {limit} (--fail-fast)"
                ));
                (self.told_since_ns, self.back_ns) = (Some(outage.since_ns), None);
            }
            (Some(_), _) => self.back_ns = None,
            (None, Some(since_ns)) => {
                // Connections that come and go are none.
                let back_ns = *self.back_ns.get_or_insert(self.session.now_ns());
                if self.since(back_ns) >= WORTH_A_LINE {
                    let lasted = Duration::from_nanos(back_ns.saturating_sub(since_ns)).as_secs_f64();
                    complain(format_args!("twinrail: the connection to {target} is back after {lasted:.1} s"));
                    self.told_since_ns = None;
                }
            }
            (None, None) => {}
        }
    }
}
