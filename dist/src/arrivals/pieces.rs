//! Keys of the whole in pieces.

use std::ops::Range;

use fmha::MAX_ARRIVALS;

use crate::problem::Whole;

/// Rows of keys that come at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Rank that owns the rows.
    pub(crate) owner: u32,
    /// Rows of the whole.
    pub(crate) rows: Range<u32>,
    /// Row of the piece's first row in the owner's own tensor.
    pub(crate) own_row: u32,
}

/// Bytes of a piece's K and V, at least: a copy takes some microseconds to begin, and NVLink carries 8 MiB in 25.
const LEAST_BYTES: u64 = 8 << 20;

/// Rows that a piece's end is a multiple of, where it may be: most blocks of keys then lie in one piece.
const ROWS: u32 = 128;

/// Cuts all keys of the whole into pieces, in row order. Every rank makes equal cuts.
///
/// # Errors
/// More runs than a kernel takes pieces.
pub(crate) fn pieces(whole: &Whole, row_bytes: u64) -> Result<Vec<Piece>, String> {
    let mut runs: Vec<(u32, Range<u32>, u32)> = Vec::new();
    for rank in 0..whole.ranks {
        let keys = whole.k.pieces(rank).into_iter();
        runs.extend(keys.map(|run| (rank, run.whole_row..run.whole_row + run.rows(), run.row)));
    }
    runs.sort_unstable_by_key(|(_, rows, _)| rows.start);
    let most = MAX_ARRIVALS as usize;
    if runs.is_empty() || runs.len() > most {
        return Err(format!("{} runs of keys are none or more than {most}", runs.len()));
    }
    let each = (most / runs.len()) as u64;
    let mut all = Vec::new();
    for (owner, rows, own_row) in runs {
        let count = u64::from(rows.end - rows.start);
        // A run that begins between two such rows has a piece more.
        let parts = (count * row_bytes / LEAST_BYTES).clamp(1, each.saturating_sub(1).max(1));
        let step = u32::try_from(count.div_ceil(parts)).unwrap_or(u32::MAX).next_multiple_of(ROWS);
        let mut begin = rows.start;
        while begin < rows.end {
            let end = (begin + step) / ROWS * ROWS;
            let end = if parts > 1 && end > begin { end.min(rows.end) } else { rows.end };
            all.push(Piece { owner, rows: begin..end, own_row: own_row + (begin - rows.start) });
            begin = end;
        }
    }
    if all.len() > most {
        return Err(format!("{} pieces of keys are more than {most}", all.len()));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use fmha::{DType, Dims, FwdProblem};

    use super::*;
    use crate::partition::Partition;
    use crate::problem::Problem;

    fn whole(tokens: u32, partition: Partition) -> Whole {
        let dims = Dims::batch(1).seqlens(tokens, tokens).heads(1, 1).head_dim(8);
        let ranks = partition.ranks();
        Whole::new(&Problem::new(FwdProblem::batch(DType::Bf16, dims), partition), 0, ranks).unwrap()
    }

    #[test]
    fn pieces_follow_each_other_over_all_rows_and_are_those_of_their_owners() {
        for (tokens, ranks) in [(300, 2), (131072, 2), (100_003, 3), (524_288, 8), (7, 8)] {
            let partition = Partition::zig_zag(tokens, ranks);
            let all = pieces(&whole(tokens, partition.clone()), 4096).unwrap();
            assert!(all.len() <= MAX_ARRIVALS as usize, "{tokens}, {ranks}: {} pieces", all.len());
            let mut next = 0;
            for piece in &all {
                assert!(piece.rows.start == next && piece.rows.end > next, "{tokens}, {ranks}: {piece:?}");
                next = piece.rows.end;
                let run =
                    partition.runs(piece.owner).iter().find(|run| run.contains(&piece.rows.start)).unwrap();
                assert!(piece.rows.end <= run.end);
                assert!(
                    piece.rows.end == run.end || piece.rows.end % ROWS == 0,
                    "{tokens}, {ranks}: {piece:?}"
                );
                let before: u32 = partition
                    .runs(piece.owner)
                    .iter()
                    .filter(|other| other.start < run.start)
                    .map(|other| other.end - other.start)
                    .sum();
                assert_eq!(piece.own_row, before + piece.rows.start - run.start);
            }
            assert_eq!(next, tokens);
        }
        // 128k tokens of 4 KiB, 512 MiB, in as many pieces as there are bits, or one fewer a run.
        assert!(pieces(&whole(131072, Partition::zig_zag(131072, 2)), 4096).unwrap().len() >= 56);
        let refused = pieces(&whole(1000, Partition::zig_zag(1000, 40)), 4096).unwrap_err();
        assert_eq!(refused, "80 runs of keys are none or more than 64");
    }
}
