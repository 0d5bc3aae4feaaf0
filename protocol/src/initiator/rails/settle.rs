//! How long a fresh RDMA path is watched before it serves: eager, but damped.

use super::settings::Settings;

/// Counts the flaps of the RDMA rail: times that it failed while another rail worked.
#[derive(Clone, Copy, Debug)]
pub struct Settle {
    first_us: u64,
    max_us: u64,
    stable_us: u64,
    flaps: u32,
    excused: bool,
}

impl Settle {
    pub(super) fn new(settings: &Settings) -> Self {
        let Settings { settle_us, settle_max_us, stable_us, .. } = *settings;
        Self { first_us: settle_us, max_us: settle_max_us, stable_us: stable_us.max(1), flaps: 0, excused: false }
    }

    /// RDMA has served for this many microseconds, and serves no more.
    pub(super) fn served(&mut self, for_us: u64) {
        let calm = u32::try_from(for_us / self.stable_us).unwrap_or(u32::MAX);
        self.flaps = self.flaps.saturating_sub(calm);
    }

    /// It failed while another rail worked.
    pub(super) fn flapped(&mut self) {
        self.flaps = self.flaps.saturating_add(1);
        self.excused = false;
    }

    /// It was lost while no rail worked: it comes back without being watched.
    pub(super) fn excused(&mut self) {
        self.excused = true;
    }

    /// How many microseconds the next path is watched. Before the first flap there is no reason to wait.
    #[must_use]
    pub fn wait_us(&self) -> u64 {
        match self.flaps {
            0 => 0,
            _ if self.excused => 0,
            n => self.first_us.saturating_mul(1 << (n - 1).min(32)).min(self.max_us),
        }
    }

    /// Flaps that still count.
    #[must_use]
    pub fn flaps(&self) -> u32 {
        self.flaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    #[test]
    fn each_flap_doubles_the_wait_up_to_a_minute() {
        let mut s = Settle::new(&Settings::DEFAULT);
        assert_eq!(s.wait_us(), 0);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            s.flapped();
            assert_eq!(s.wait_us(), seconds * SECOND);
        }
        (0..100).for_each(|_| s.flapped());
        assert_eq!(s.wait_us(), 60 * SECOND);
    }

    #[test]
    fn a_rail_that_serves_for_minutes_is_trusted_again() {
        let mut s = Settle::new(&Settings::DEFAULT);
        (0..4).for_each(|_| s.flapped());
        s.served(59 * SECOND);
        assert_eq!(s.wait_us(), 8 * SECOND);
        s.served(120 * SECOND);
        assert_eq!(s.wait_us(), 2 * SECOND);
        s.served(3_600 * SECOND);
        assert_eq!((s.wait_us(), s.flaps()), (0, 0));
    }

    #[test]
    fn what_no_rail_survived_costs_no_wait_but_old_flaps_are_not_forgotten() {
        let mut s = Settle::new(&Settings::DEFAULT);
        (0..3).for_each(|_| s.flapped());
        s.excused();
        assert_eq!(s.wait_us(), 0);
        s.flapped();
        assert_eq!(s.wait_us(), 8 * SECOND);
    }
}
