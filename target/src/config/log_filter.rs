//! What may be said about logging. The library that does it takes any word for the name of a module, so that a slip
//! of the finger would silence everything.

use crate::volume::spec::nearest;

const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
/// What logs here. `twinrail` stands for all of it.
const CRATE: &str = "twinrail_target";

/// What is wrong with a filter, and what would be right.
pub(super) fn bad_filter(filter: &str) -> Option<String> {
    filter.split(',').find_map(|part| bad_part(part.trim())).map(|what| {
        format!(
            "log is {filter:?}: {what}; give a level ({}), or levels of modules behind it, such as \
             \"info,{CRATE}::control=debug\"",
            LEVELS.join(", ")
        )
    })
}

fn bad_part(part: &str) -> Option<String> {
    let is_level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level));
    let no_level = |word: &str| match nearest(&word.to_lowercase(), &LEVELS) {
        Some(near) => format!("there is no level {word:?}, did you mean {near:?}?"),
        None => format!("there is no level {word:?}"),
    };
    match part.split_once('=') {
        None if part.is_empty() => Some("it has an empty part".into()),
        None => (!is_level(part)).then(|| no_level(part)),
        Some((module, _)) if !is_module(module) => Some(format!("there is no module {module:?} that logs")),
        Some((_, level)) => (!is_level(level)).then(|| no_level(level)),
    }
}

fn is_module(name: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    let (first, rest) = name.split_once("::").map_or((name, None), |(first, rest)| (first, Some(rest)));
    match rest {
        None => first == CRATE || first == "twinrail",
        Some(rest) => first == CRATE && rest.split("::").all(plain),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_would_silence_everything_is_refused() {
        for good in [
            "info",
            "WARN",
            "off",
            "info,twinrail_target::control=debug",
            "twinrail=trace, error",
            "twinrail_target=off",
        ] {
            assert_eq!(bad_filter(good), None, "{good}");
        }
        for (bad, what) in [
            ("nonsense", "no level \"nonsense\";"),
            ("debgu", "did you mean \"debug\"?"),
            ("", "empty part"),
            ("info,", "empty part"),
            ("info,twinrail_targt=debug", "no module \"twinrail_targt\""),
            ("twinrail_target::=debug", "no module"),
            ("twinrail_target=debag", "did you mean \"debug\"?"),
            ("twinrail_target=debug=x", "no level \"debug=x\""),
            ("info,[span]=debug", "no module \"[span]\""),
        ] {
            let text = bad_filter(bad).unwrap();
            assert!(text.contains(what) && text.contains("give a level (error, warn"), "{bad:?}: {text}");
        }
    }
}
