//! Sizes in bytes, as people write and read them.

use std::fmt;

const UNITS: [(&str, u32); 4] = [("k", 10), ("m", 20), ("g", 30), ("t", 40)];

/// Reads `4096`, `4k`, `1M`, `64KiB`, `2GiB`: powers of 1024 all.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &lower[digits.len()..] {
        "" | "b" => Some(0),
        unit => UNITS.iter().find(|(name, _)| matches!(unit.strip_prefix(name), Some("" | "ib"))).map(|unit| unit.1),
    };
    let number: Option<u64> = digits.parse().ok();
    let size = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    size.ok_or_else(|| format!("`{text}` is no size in bytes: write a number like 4096, 64k, 1M, 2G or 1T"))
}

/// Shows a size in the unit that suits it.
pub(crate) struct Shown(pub(crate) u64);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        match UNITS.iter().rev().find(|(_, shift)| bytes >= 1 << shift) {
            None => write!(f, "{bytes} bytes"),
            Some((name, shift)) => {
                let name = if *name == "k" { "Ki".to_owned() } else { name.to_uppercase() + "i" };
                match bytes % (1 << shift) {
                    0 => write!(f, "{} {name}B", bytes >> shift),
                    _ => write!(f, "{:.2} {name}B", bytes as f64 / (1u64 << shift) as f64),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let good = [("0", 0), ("4096", 4096), ("4k", 4096), ("64KiB", 65536), ("1M", 1 << 20), ("2gib", 2 << 30)];
        for (text, size) in good {
            assert_eq!(parse(text), Ok(size), "{text}");
        }
        assert_eq!(parse("16T"), Ok(16 << 40));
        for text in ["", "k", "-1", "1.5G", "4kk", "4 k", "1e3", "99999999999999999999", "99999999T", "0x10"] {
            assert!(parse(text).is_err_and(|error| error.contains(text) && error.contains("64k")), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        let shown = |bytes| Shown(bytes).to_string();
        assert_eq!(shown(512), "512 bytes");
        assert_eq!(shown(65536), "64 KiB");
        assert_eq!(shown(1_500_000), "1.43 MiB");
        assert_eq!(shown(1 << 40), "1 TiB");
    }
}
