//! Which ranges of a volume a person may ask for.

use std::fmt;

use twinrail_initiator::Geometry;

use crate::usage::usage;

/// A range in bytes: of a volume, of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Range {
    /// First byte behind it.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.length
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at byte {}", self.length, self.offset)
    }
}

/// `--offset` and `--length`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct RangeArguments {
    /// First byte on the volume, a multiple of its block; 64k, 1M and so on are understood
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = crate::size::parse)]
    pub(crate) offset: u64,
    /// Number of bytes [default: as many as there are]
    #[arg(long, value_name = "BYTES", value_parser = crate::size::parse)]
    pub(crate) length: Option<u64>,
}

impl RangeArguments {
    /// The range on a volume; both of its ends must lie on blocks.
    pub(crate) fn in_whole_blocks(&self, geometry: &Geometry) -> anyhow::Result<Range> {
        let range = self.starting_at_a_block(geometry)?;
        aligned(&format!("--length {}", range.length), range.length, geometry)?;
        Ok(range)
    }

    /// The range on a volume; it must begin on a block.
    pub(crate) fn starting_at_a_block(&self, geometry: &Geometry) -> anyhow::Result<Range> {
        let (Self { offset, length }, size) = (*self, geometry.size);
        aligned(&format!("--offset {offset}"), offset, geometry)?;
        let Some(most) = size.checked_sub(offset).filter(|&most| most > 0) else {
            return Err(usage(format!("--offset {offset} lies behind the end of the volume, which has {size} bytes")));
        };
        let length = length.unwrap_or(most);
        if length == 0 {
            return Err(usage("--length 0 is nothing: give a length, or leave it out for all there is"));
        }
        if length > most {
            let text = format!("--length {length} ends behind the volume, which has {size} bytes");
            return Err(usage(format!("{text}: {most} are the most from --offset {offset}")));
        }
        Ok(Range { offset, length })
    }
}

/// Refuses a value that isn't a multiple of the volume's block, naming the nearest that are; `what` has it in
/// words.
pub(crate) fn aligned(what: &str, value: u64, geometry: &Geometry) -> anyhow::Result<()> {
    let block = u64::from(geometry.logical_block);
    let below = value - value % block;
    if below == value {
        return Ok(());
    }
    let above = below.checked_add(block).filter(|&above| above <= geometry.size);
    let below = Some(below).filter(|&below| below > 0 || what.starts_with("--offset"));
    let nearest = match (below, above) {
        (Some(below), Some(above)) => format!("{below} and {above} are the nearest that are"),
        (Some(one), None) | (None, Some(one)) => format!("{one} is the nearest that is"),
        (None, None) => "none fits".to_owned(),
    };
    Err(usage(format!("{what} isn't a multiple of the volume's block of {block} bytes: {nearest}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Code, code};

    const GEOMETRY: Geometry =
        Geometry { size: 1 << 20, logical_block: 4096, physical_block: 4096, max_transfer: 1 << 17 };

    fn whole(offset: u64, length: Option<u64>) -> anyhow::Result<Range> {
        RangeArguments { offset, length }.in_whole_blocks(&GEOMETRY)
    }

    fn refused(offset: u64, length: Option<u64>) -> String {
        let error = whole(offset, length).unwrap_err();
        assert_eq!(code(&error), Code::Usage);
        error.to_string()
    }

    #[test]
    fn the_rest_of_the_volume_is_the_default() {
        assert_eq!(whole(0, None).unwrap(), Range { offset: 0, length: 1 << 20 });
        assert_eq!(whole(8192, None).unwrap(), Range { offset: 8192, length: (1 << 20) - 8192 });
        assert_eq!(whole(8192, Some(4096)).unwrap().end(), 12288);
    }

    #[test]
    fn unaligned_ends_are_refused_with_the_nearest_that_would_do() {
        let text = refused(5000, None);
        assert!(text.contains("--offset 5000") && text.contains("4096 bytes: 4096 and 8192 are"), "{text}");
        assert!(refused(100, None).contains("0 and 4096 are the nearest"));
        assert!(refused(0, Some(100)).contains("--length 100") && refused(0, Some(100)).contains(": 4096 is the"));
        assert!(refused((1 << 20) - 1, None).ends_with(": 1044480 and 1048576 are the nearest that are"));
    }

    #[test]
    fn ranges_behind_the_end_are_refused_with_what_is_there() {
        assert!(refused(1 << 20, None).contains("which has 1048576 bytes"));
        assert!(refused(u64::MAX - 4095, None).contains("behind the end"));
        assert!(refused(4096, Some(1 << 20)).contains("1044480 are the most"));
        assert!(refused(4096, Some(u64::MAX - 4095)).contains("1044480 are the most"));
        assert!(refused(0, Some(0)).contains("--length 0"));
    }

    #[test]
    fn a_copy_may_end_within_a_block() {
        let range = RangeArguments { offset: 4096, length: Some(100) }.starting_at_a_block(&GEOMETRY).unwrap();
        assert_eq!(range, Range { offset: 4096, length: 100 });
    }
}
