//! Partitions: the rows of the whole that each rank has, and the pieces of sequences among them.

use std::ops::Range;

use crate::error::{Error, Result};

/// Rows of an axis that each rank has: runs `[begin, end)`, ascending. Rows are positions of every sequence
/// of a batch, or the rows of a packed tensor, where a run may span sequences. A rank's own tensor has the
/// rows of its runs one after another. Lengths may differ, and a rank may have nothing.
///
/// ```
/// use fmha_dist::Partition;
///
/// assert_eq!(Partition::contiguous(10, 4).runs(1), [3..6]);
/// // Causal: the first rows see least and the last ones most, so a rank takes one run from either end.
/// assert_eq!(Partition::zig_zag(10, 2).runs(0), [0..3, 8..10]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    rows: u32,
    runs: Vec<Vec<Range<u32>>>,
    replicated: bool,
}

/// One of `parts` runs that `rows` are cut into, whose lengths differ by one at most, the longer ones first.
fn cut(rows: u32, parts: u64, part: u64) -> Range<u32> {
    let (each, more) = (u64::from(rows) / parts, u64::from(rows) % parts);
    let at = |part: u64| (part * each + part.min(more)) as u32;
    at(part)..at(part + 1)
}

impl Partition {
    /// One run for each rank, in the order of the ranks.
    #[must_use]
    pub fn contiguous(rows: u32, ranks: u32) -> Self {
        let own = |rank: u32| vec![cut(rows, ranks.into(), rank.into())];
        Self { rows, runs: (0..ranks).map(own).collect(), replicated: false }
    }

    /// Twice as many runs as ranks; rank r has the r-th and the r-th from the end: equal work under a causal mask.
    #[must_use]
    pub fn zig_zag(rows: u32, ranks: u32) -> Self {
        let parts = 2 * u64::from(ranks);
        let pair = |rank: u32| [rank.into(), parts - 1 - u64::from(rank)].map(|part| cut(rows, parts, part));
        Self { rows, runs: (0..ranks).map(|rank| pair(rank).into()).collect(), replicated: false }
    }

    /// Every rank has all rows: the queries of a step of decoding.
    #[must_use]
    pub fn replicated(rows: u32, ranks: u32) -> Self {
        Self {
            rows,
            runs: (0..ranks).map(|_| std::iter::once(0..rows).collect()).collect(),
            replicated: true,
        }
    }

    /// Makes a partition of these runs, by rank. Empty runs are left out, and runs that touch are merged.
    ///
    /// # Errors
    /// A rank whose runs do not ascend, a row that two ranks have or none has, with its number.
    pub fn new(rows: u32, runs: Vec<Vec<Range<u32>>>) -> Result<Self> {
        let mut all: Vec<(Range<u32>, u32)> = Vec::new();
        for (rank, runs) in (0..).zip(&runs) {
            let mut end = 0;
            for run in runs.iter().filter(|run| !run.is_empty()) {
                if run.start < end {
                    let text = format!(
                        "runs {}..{} begins before {end}, where the run before ends",
                        run.start, run.end
                    );
                    return Err(Error::new(rank, "runs", text));
                }
                end = run.end;
                all.push((run.clone(), rank));
            }
        }
        all.sort_unstable_by_key(|(run, _)| run.start);
        let mut next = 0;
        let last = std::iter::once((rows..rows, 0));
        for (run, rank) in all.into_iter().chain(last) {
            if run.start != next {
                let what = if run.start > next { "no rank has" } else { "two ranks have" };
                return Err(Error::new(rank, "runs", format!("runs: {what} row {}", next.min(run.start))));
            }
            next = run.end;
        }
        if next != rows {
            return Err(Error::new(0, "runs", format!("runs end at {next}, but there are {rows} rows")));
        }
        Ok(Self { rows, runs, replicated: false }.merged())
    }

    fn merged(mut self) -> Self {
        for runs in &mut self.runs {
            let mut merged: Vec<Range<u32>> = Vec::new();
            for run in runs.drain(..).filter(|run| !run.is_empty()) {
                match merged.last_mut() {
                    Some(last) if last.end == run.start => last.end = run.end,
                    _ => merged.push(run),
                }
            }
            *runs = merged;
        }
        self
    }

    /// Rows of the whole.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.runs.len() as u32
    }

    /// The runs of a rank; none of a rank that there is not.
    #[must_use]
    pub fn runs(&self, rank: u32) -> &[Range<u32>] {
        self.runs.get(rank as usize).map_or(&[], Vec::as_slice)
    }

    /// Rows of a rank's own tensor.
    #[must_use]
    pub fn rows_of(&self, rank: u32) -> u32 {
        self.runs(rank).iter().map(|run| run.end - run.start).sum()
    }

    /// Copies a rank's own tensor out of the whole `[batch, rows]`, whose rows have `row_bytes` bytes. For an
    /// LSE, pass `batch * heads` and 4.
    ///
    /// # Panics
    /// If `whole` is shorter than that.
    #[must_use]
    pub fn split(&self, whole: &[u8], batch: u32, row_bytes: u64, rank: u32) -> Vec<u8> {
        self.places(batch, row_bytes, rank).flat_map(|(at, _)| whole[at].iter().copied()).collect()
    }

    /// Copies a rank's own tensor into the whole, the inverse of [`split`](Self::split).
    ///
    /// # Panics
    /// If one of them is shorter than `split` needs it.
    pub fn join(&self, whole: &mut [u8], own: &[u8], batch: u32, row_bytes: u64, rank: u32) {
        for (at, own_at) in self.places(batch, row_bytes, rank) {
            whole[at].copy_from_slice(&own[own_at]);
        }
    }

    /// Bytes in the whole, and in a rank's own.
    fn places(
        &self,
        batch: u32,
        row_bytes: u64,
        rank: u32,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let mut own = 0;
        (0..u64::from(batch))
            .flat_map(move |sequence| self.runs(rank).iter().map(move |run| (sequence, run)))
            .map(move |(sequence, run)| {
                let first = (sequence * u64::from(self.rows) + u64::from(run.start)) * row_bytes;
                let bytes = u64::from(run.end - run.start) * row_bytes;
                own += bytes;
                let range = |end: u64| (end - bytes) as usize..end as usize;
                (range(first + bytes), range(own))
            })
    }

    /// Whether every rank has all rows.
    #[must_use]
    pub fn is_replicated(&self) -> bool {
        self.replicated
    }
}

/// A stretch of positions that one rank has, of one packed sequence or of every sequence of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The sequences.
    pub(crate) sequences: Range<u32>,
    /// Positions in the whole sequence.
    pub(crate) positions: Range<u32>,
    /// The first position's row in the rank's own tensor.
    pub(crate) row: u32,
    /// Row of the first position in the whole tensor.
    pub(crate) whole_row: u32,
    /// Length of the whole sequence.
    pub(crate) seqlen: u32,
}

impl Piece {
    /// Number of positions.
    pub(crate) fn rows(&self) -> u32 {
        self.positions.end - self.positions.start
    }

    /// Number of sequences.
    pub(crate) fn num_sequences(&self) -> u32 {
        self.sequences.end - self.sequences.start
    }

    /// Copy of the piece with its sequences and no positions.
    pub(crate) fn without_rows(&self) -> Self {
        Self { positions: 0..0, row: 0, whole_row: 0, ..self.clone() }
    }
}

/// One side of the problem, queries or keys: its sequences, and the rows of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    /// Sequences of a batch, or of the packed tensor.
    pub(crate) batch: u32,
    /// Packed: the first row of each sequence, and the end.
    pub(crate) cu_seqlens: Option<Vec<u32>>,
    pub(crate) partition: Partition,
}

impl Axis {
    /// Sequences of a tensor: those of the batch, 1 where they are packed.
    pub(crate) fn tensor_batch(&self) -> u32 {
        if self.cu_seqlens.is_some() { 1 } else { self.batch }
    }

    /// Units of attention: every packed sequence alone, a batch together. Each has its sequences and its
    /// rows.
    fn sequences(&self) -> Vec<(Range<u32>, Range<u32>)> {
        match &self.cu_seqlens {
            None => vec![(0..self.batch, 0..self.partition.rows)],
            Some(cu) => (0..).zip(cu.windows(2)).map(|(at, ends)| (at..at + 1, ends[0]..ends[1])).collect(),
        }
    }

    /// The pieces of a rank, in the order of its rows. Sequences without rows have none.
    pub(crate) fn pieces(&self, rank: u32) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut row = 0;
        for run in self.partition.runs(rank) {
            for (sequences, rows) in self.sequences() {
                let (first, last) = (run.start.max(rows.start), run.end.min(rows.end));
                if first < last {
                    pieces.push(Piece {
                        sequences,
                        positions: first - rows.start..last - rows.start,
                        row: row + (first - run.start),
                        whole_row: first,
                        seqlen: rows.end - rows.start,
                    });
                }
            }
            row += run.end - run.start;
        }
        pieces
    }

    /// Axis with hosts of `size` neighbouring ranks in place of ranks. A host has the rows of its ranks, in
    /// their order in the whole.
    pub(crate) fn by_hosts(&self, size: u32) -> Result<Self> {
        let host = |ranks: &[Vec<Range<u32>>]| {
            let mut runs: Vec<Range<u32>> = ranks.iter().flatten().cloned().collect();
            runs.sort_unstable_by_key(|run| run.start);
            runs
        };
        let runs = self.partition.runs.chunks(size.max(1) as usize).map(host).collect();
        let partition = Partition::new(self.partition.rows, runs)?;
        Ok(Self { batch: self.batch, cu_seqlens: self.cu_seqlens.clone(), partition })
    }

    /// Every sequence whole, as on a rank that has all of them.
    pub(crate) fn whole(&self) -> Vec<Piece> {
        self.sequences()
            .into_iter()
            .map(|(sequences, rows)| Piece {
                sequences,
                positions: 0..rows.end - rows.start,
                row: rows.start,
                whole_row: rows.start,
                seqlen: rows.end - rows.start,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_one_owner_whatever_divides_what() {
        for rows in [0, 1, 5, 16, 31] {
            for ranks in 1..=8 {
                for partition in [Partition::contiguous(rows, ranks), Partition::zig_zag(rows, ranks)] {
                    let again = Partition::new(rows, partition.runs.clone()).unwrap();
                    assert_eq!(again, partition.merged(), "{rows} over {ranks}");
                    assert_eq!((0..ranks).map(|rank| again.rows_of(rank)).sum::<u32>(), rows);
                }
            }
        }
    }

    #[test]
    fn a_row_that_two_ranks_have_or_none_is_refused_by_its_number() {
        let text = |runs| Partition::new(10, runs).unwrap_err().to_string();
        assert!(text(vec![vec![0..4], vec![5..10]]).contains("no rank has row 4"));
        assert!(text(vec![vec![0..6], vec![5..10]]).contains("two ranks have row 5"));
        assert!(text(vec![vec![0..6], vec![6..9]]).contains("no rank has row 9"));
        assert!(text(vec![vec![6..10, 0..6], vec![]]).contains("begins before 10"));
        assert!(text(vec![vec![0..6], vec![6..12]]).contains("two ranks have row 10"));
    }

    #[test]
    fn a_run_that_spans_packed_sequences_is_a_piece_of_each() {
        let cu_seqlens = Some(vec![0, 3, 3, 10]);
        let axis = Axis { batch: 3, cu_seqlens, partition: Partition::zig_zag(10, 2) };
        let pieces = axis.pieces(1);
        // Rows 3..6 and 6..8, all of the third sequence.
        assert_eq!(pieces.iter().map(|piece| piece.positions.clone()).collect::<Vec<_>>(), [0..3, 3..5]);
        assert!(pieces.iter().all(|piece| piece.sequences == (2..3) && piece.seqlen == 7));
        let pieces = axis.pieces(0);
        assert_eq!(
            pieces.iter().map(|piece| (piece.row, piece.whole_row)).collect::<Vec<_>>(),
            [(0, 0), (3, 8)]
        );
    }

    #[test]
    fn rows_are_cut_for_as_many_ranks_as_there_can_be() {
        let parts = 2 * u64::from(u32::MAX);
        assert_eq!(cut(5, parts, 4), 4..5);
        assert_eq!(cut(5, parts, parts - 1), 5..5);
        assert_eq!(cut(u32::MAX, 2, 1), (1 << 31)..u32::MAX);
    }
}
