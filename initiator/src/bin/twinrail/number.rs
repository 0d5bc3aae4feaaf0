//! Numbers as people write them, within bounds.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// Reads whole numbers from `least` to `most`.
pub(crate) fn whole<T>(least: T, most: T) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Copy + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("it must be a whole number from {least} to {most}"))
    }
}

/// Reads spans of time, from `least` to `most` seconds.
pub(crate) fn seconds(
    least: f64,
    most: f64,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| {
        let seconds = text.parse().ok().filter(|seconds| (least..=most).contains(seconds));
        let span = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        span.ok_or_else(|| format!("it must be a number of seconds from {least} to {most}, like 5 or 0.5"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_bounds_or_no_number_is_told_the_bounds() {
        let queues = whole(1u16, 64);
        assert_eq!((queues("1"), queues("64")), (Ok(1), Ok(64)));
        for bad in ["0", "65", "-1", "x", "", "1.5", "99999999999999999999"] {
            assert!(queues(bad).is_err_and(|error| error.contains("from 1 to 64")), "{bad}");
        }
    }

    #[test]
    fn times_are_bounded() {
        let span = seconds(0.0, 3600.0);
        assert_eq!((span("0"), span("0.5")), (Ok(Duration::ZERO), Ok(Duration::from_millis(500))));
        for bad in ["-1", "NaN", "inf", "1e300", "3600.1", "5s", ""] {
            assert!(span(bad).is_err_and(|error| error.contains("from 0 to 3600")), "{bad}");
        }
        assert!(seconds(0.001, 10.0)("0").is_err_and(|error| error.contains("from 0.001 to 10")));
    }
}
