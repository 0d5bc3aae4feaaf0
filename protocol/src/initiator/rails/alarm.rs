//! No path at all: commands are held, people hear of it early, and with fail-fast the session ends.

use super::action::Action;
use super::{Rails, Service};

const NEVER: u64 = u64::MAX;

impl Rails {
    /// Since when there is no path, or none that answers.
    fn trouble_since_us(&self) -> Option<u64> {
        match &self.service {
            Service::Serving(serving) => serving.suspicion.nobody_since_us(),
            Service::Switching(switch) => Some(switch.trouble_us),
        }
    }

    /// Since when commands are held: there is no path, or none that answers. Paths that completed no command and
    /// didn't last are no interruption.
    #[must_use]
    pub fn held_since_us(&self) -> Option<u64> {
        match &self.service {
            Service::Serving(serving) => serving.suspicion.nobody_since_us(),
            Service::Switching(switch) => Some(switch.unserved_us),
        }
    }

    fn give_up_us(&self) -> u64 {
        match (self.held_since_us(), self.settings.fail_fast_us) {
            (Some(since_us), Some(limit_us)) => since_us.saturating_add(limit_us),
            _ => NEVER,
        }
    }

    /// Whether that has lasted long enough to be called trouble.
    pub(super) fn in_trouble(&self, now_us: u64) -> bool {
        self.trouble_since_us().is_some_and(|since_us| now_us >= since_us.saturating_add(self.settings.alarm_us))
    }

    pub(super) fn sound_alarm(&mut self, now_us: u64) {
        let trouble_us = self.trouble_since_us();
        if let Some(since_us) = self.alarmed_us
            && trouble_us != Some(since_us)
        {
            self.alarmed_us = None;
            self.actions.push_back(Action::AlarmOver { lasted_us: now_us.saturating_sub(since_us) });
        }
        let Some(since_us) = trouble_us else { return };
        if self.alarmed_us.is_none() && self.in_trouble(now_us) {
            self.alarmed_us = Some(since_us);
            self.actions.push_back(Action::Alarm { since_us });
        }
        if now_us >= self.give_up_us() {
            self.actions.push_back(Action::GiveUp);
        }
    }

    pub(super) fn alarm_due_us(&self) -> u64 {
        let trouble_us = self.trouble_since_us();
        if self.alarmed_us.is_some() && self.alarmed_us != trouble_us {
            return 0;
        }
        let Some(since_us) = trouble_us else { return NEVER };
        let alarm_us = self.settings.alarm_us;
        let alarm_us = if self.alarmed_us.is_some() { NEVER } else { since_us.saturating_add(alarm_us) };
        alarm_us.min(self.give_up_us())
    }
}
