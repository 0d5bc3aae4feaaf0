//! How a source is cut into pieces: data in pieces of one request, holes in long ones.

/// Longest piece of zeros in bytes: progress is seen, and a signal, after each.
const LONGEST_ZEROS: u64 = 256 << 20;

/// What a stretch of a source has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Data,
    Zeros,
}

/// A stretch of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// First byte, counted from the beginning of what is copied.
    pub(super) offset: u64,
    /// Length in bytes: whole blocks, but for the end of the source.
    pub(super) length: u64,
    pub(super) content: Content,
}

/// What is known of a source without reading it.
pub(super) trait Map {
    /// What there is at `offset`, and the first byte behind it; never before `offset + 1`.
    fn look(&mut self, offset: u64) -> anyhow::Result<(Content, u64)>;
}

/// Cuts a source into pieces, first to last.
#[derive(Debug)]
pub(super) struct Pieces<M> {
    map: M,
    /// Bytes in all.
    total: u64,
    /// Longest piece of data in bytes.
    longest: u64,
    /// Pieces begin and end on multiples of it, in bytes.
    block: u64,
    position: u64,
    /// What there is at the position, and until where.
    here: (Content, u64),
}

impl<M: Map> Pieces<M> {
    /// `longest` is a multiple of `block`.
    pub(super) fn new(map: M, total: u64, longest: u64, block: u64) -> Self {
        debug_assert!(longest > 0 && longest.is_multiple_of(block));
        Self { map, total, longest, block, position: 0, here: (Content::Data, 0) }
    }

    /// The next piece; nothing at the end.
    pub(super) fn next(&mut self) -> anyhow::Result<Option<Piece>> {
        let (offset, whole) = (self.position, self.total - self.total % self.block);
        if offset == self.total {
            return Ok(None);
        }
        let (length, content) = if offset == whole {
            // The part of a block at the end is read, whatever it is: its block has to be put together.
            (self.total - whole, Content::Data)
        } else {
            if offset >= self.here.1 {
                self.here = self.map.look(offset)?;
            }
            // Holes shrink to whole blocks and data grows to them.
            let (content, until) = match self.here {
                (Content::Zeros, until) if until - until % self.block > offset => {
                    (Content::Zeros, (until - until % self.block).min(offset.saturating_add(LONGEST_ZEROS)))
                }
                (_, until) => {
                    let grid = offset - offset % self.longest + self.longest;
                    let until = until.max(offset + 1).checked_next_multiple_of(self.block).unwrap_or(u64::MAX);
                    (Content::Data, until.min(grid))
                }
            };
            (until.min(whole) - offset, content)
        };
        self.position += length;
        Ok(Some(Piece { offset, length, content }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ends of stretches that are data and zeros in turn, data first.
    struct Turns(Vec<u64>);

    impl Map for Turns {
        fn look(&mut self, offset: u64) -> anyhow::Result<(Content, u64)> {
            let turn = self.0.iter().position(|&end| end > offset);
            let turn = turn.unwrap_or_else(|| panic!("{offset} is behind the end"));
            Ok((if turn % 2 == 0 { Content::Data } else { Content::Zeros }, self.0[turn]))
        }
    }

    /// A source of which nothing is known.
    struct AllData;

    impl Map for AllData {
        fn look(&mut self, _offset: u64) -> anyhow::Result<(Content, u64)> {
            Ok((Content::Data, u64::MAX))
        }
    }

    fn cut<M: Map>(map: M, total: u64, longest: u64, block: u64) -> Vec<Piece> {
        let mut pieces = Pieces::new(map, total, longest, block);
        std::iter::from_fn(|| pieces.next().unwrap()).collect()
    }

    fn data(offset: u64, length: u64) -> Piece {
        Piece { offset, length, content: Content::Data }
    }

    fn zeros(offset: u64, length: u64) -> Piece {
        Piece { offset, length, content: Content::Zeros }
    }

    #[test]
    fn data_comes_in_pieces_of_one_request() {
        assert_eq!(cut(AllData, 2500, 1024, 512), [data(0, 1024), data(1024, 1024), data(2048, 0x200 - 60)]);
        assert_eq!(cut(AllData, 1024, 1024, 512), [data(0, 1024)]);
        assert_eq!(cut(AllData, 100, 1024, 512), [data(0, 100)]);
        assert_eq!(cut(AllData, 0, 1024, 512), []);
    }

    #[test]
    fn holes_shrink_to_whole_blocks_and_data_grows_to_them() {
        // Data to 600, zeros to 3000, data to 3100, zeros to 4096.
        let pieces = cut(Turns(vec![600, 3000, 3100, 4096]), 4096, 4096, 512);
        assert_eq!(pieces, [data(0, 1024), zeros(1024, 1536), data(2560, 512), data(3072, 512), zeros(3584, 512)]);
    }

    #[test]
    fn a_hole_smaller_than_a_block_is_data() {
        let pieces = cut(Turns(vec![100, 400, 512, 1024]), 1024, 1024, 512);
        assert_eq!(pieces, [data(0, 512), zeros(512, 512)]);
    }

    #[test]
    fn a_source_that_ends_in_a_hole_within_a_block_has_its_end_read() {
        assert_eq!(cut(Turns(vec![512, 2000]), 2000, 1024, 512), [data(0, 512), zeros(512, 1024), data(1536, 464)]);
    }

    #[test]
    fn long_holes_are_cut() {
        let pieces = cut(Turns(vec![0, 1 << 40]), 1 << 30, 1 << 20, 4096);
        assert_eq!(pieces.len(), 4);
        assert!(pieces.iter().all(|piece| piece.content == Content::Zeros && piece.length == LONGEST_ZEROS));
    }

    proptest! {
        #[test]
        fn pieces_cover_the_source_once_and_no_data_is_taken_for_zeros(
            ends in prop::collection::vec(1u64..3000, 1..12),
            shift in 0u32..4,
            per_piece in 1u64..5,
        ) {
            let ends: Vec<u64> = ends.iter().scan(0, |end, length| { *end += length; Some(*end) }).collect();
            let (total, block) = (*ends.last().unwrap(), 64u64 << shift);
            let longest = block * per_piece;
            let mut position = 0;
            for piece in cut(Turns(ends.clone()), total, longest, block) {
                prop_assert_eq!(piece.offset, position);
                prop_assert!(piece.length > 0);
                position += piece.length;
                let last = position == total;
                prop_assert!(piece.length.is_multiple_of(block) || last);
                match piece.content {
                    Content::Data => prop_assert!(piece.length <= longest),
                    Content::Zeros => {
                        let turn = ends.iter().position(|&end| end > piece.offset).unwrap();
                        prop_assert!(turn % 2 == 1 && position <= ends[turn]);
                    }
                }
            }
            prop_assert_eq!(position, total);
        }
    }
}
