//! The choice of keys or blocks as a problem that a device plans: the source of the scores (an indexer or the
//! caller), keys or blocks, and the number of greatest scores to choose in each row.

use std::ops::Range;

use super::{BlockOverlap, Candidates};
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::problem::{MAX_HEAD_DIM, MAX_SEQLEN};
use crate::setters::setters;

/// Most heads of an indexer.
pub const MAX_INDEX_HEADS: u32 = 4096;

/// Layout of an indexer's keys in memory. Strides are in elements; each row of `head_dim` elements is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexKeys {
    /// Keys with a batch axis, `[batch, seqlen_k, head_dim]`.
    Batch,
    /// Pages of `page_size` keys, which a block table i32 `[batch, max_pages]` names.
    Paged {
        /// Number of keys of a page.
        page_size: u32,
        /// Number of pages of k.
        num_pages: u32,
        /// Number of entries of a sequence in the block table.
        max_pages: u32,
    },
}

/// Strides of an indexer's keys and of their scales, in elements of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexStrides {
    /// Stride from one sequence, or page, to the next.
    pub outer: u64,
    /// Stride from one key to the next.
    pub key: u64,
}

/// An indexer: `I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Indexer {
    /// Number of heads of q; k has one, which all of them share.
    pub num_heads: u32,
    /// Number of elements of a row of q and k.
    pub head_dim: u32,
    /// The type of q.
    pub dtype_q: DType,
    /// The type of k.
    pub dtype_k: DType,
    /// Whether each key has an f32 scale.
    pub k_scale: bool,
    /// Layout of the keys.
    pub keys: IndexKeys,
    /// Strides of k.
    pub strides_k: IndexStrides,
    /// Strides of the scales; not read if keys have no scales.
    pub strides_scale: IndexStrides,
}

/// Source of the scores: an indexer, or the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoreSource {
    /// An indexer computes the scores.
    Index(Indexer),
    /// The caller gives the scores, f32 `[batch, seqlen_q, seqlen_k]`.
    Given,
}

/// How the score of a block follows from those of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockScore {
    /// The greatest score of a block's candidates; NaN if one is NaN, -inf for a block without candidates.
    Maximum {
        /// Number of keys of a block.
        block: u32,
    },
    /// Sums of given probabilities of compressed blocks, which are the "keys" of the problem
    /// ([`block_sums`](super::block_sums)).
    Sum {
        /// Sizes of the compressed blocks and of the blocks that are chosen.
        overlap: BlockOverlap,
        /// Number of blocks that may be chosen.
        num_blocks: u32,
    },
}

/// Choice of blocks instead of keys, and which blocks are chosen whatever their score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ChosenBlocks {
    /// A block's score.
    pub score: BlockScore,
    /// Number of a row's first candidates that are always chosen.
    pub first: u32,
    /// Number of a row's last candidates that are always chosen.
    pub last: u32,
}

/// Kind of the candidates: [`Candidates`] without its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CandidateKind {
    /// All keys of a sequence are candidates.
    All,
    /// Keys up to a query's own position; the last query has the position of the last key.
    #[default]
    Causal,
    /// Keys `first .. end` of each query.
    Ranges,
}

impl From<Candidates<'_>> for CandidateKind {
    fn from(candidates: Candidates<'_>) -> Self {
        match candidates {
            Candidates::All => Self::All,
            Candidates::Causal => Self::Causal,
            Candidates::Ranges { .. } => Self::Ranges,
        }
    }
}

/// A choice without its pointers: the `topk` greatest scores of each row (ties: lower position first; NaN last), as
/// positions in ascending order, followed by -1.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ChooseProblem {
    /// Number of sequences.
    pub batch: u32,
    /// Number of queries of a sequence.
    pub seqlen_q: u32,
    /// Number of keys of a sequence; an upper bound if `seqused_k` gives the numbers.
    pub seqlen_k: u32,
    /// Number of entries of each row's list; 0 if no list is written.
    pub topk: u32,
    /// Source of the scores.
    pub source: ScoreSource,
    /// Keys among which a query may choose. For sums of blocks the candidates are blocks, and `Causal` is not
    /// allowed.
    pub candidates: CandidateKind,
    /// Whether each sequence has a length of its own, i32 `[batch]`.
    pub seqused_k: bool,
    /// Choice of blocks; `None`: keys are chosen.
    pub blocks: Option<ChosenBlocks>,
    /// Whether the scores of the keys or blocks are written, f32 `[batch, seqlen_q, seqlen_k]` or `[..,
    /// num_blocks]`: -inf for a key that is no candidate.
    pub write_scores: bool,
}

impl Indexer {
    /// An indexer over contiguous keys without scales.
    #[must_use]
    pub fn new(num_heads: u32, head_dim: u32, dtype_q: DType, dtype_k: DType, seqlen_k: u32) -> Self {
        let dense = |dim: u32| IndexStrides { outer: u64::from(seqlen_k) * u64::from(dim), key: dim.into() };
        Self {
            num_heads,
            head_dim,
            dtype_q,
            dtype_k,
            k_scale: false,
            keys: IndexKeys::Batch,
            strides_k: dense(head_dim),
            strides_scale: dense(1),
        }
    }

    setters! {
        /// Whether each key has an f32 scale.
        k_scale: bool => k_scale;
        /// Strides of k.
        strides_k: IndexStrides => strides_k;
        /// Strides of the scales.
        strides_scale: IndexStrides => strides_scale;
    }

    /// Sets keys in pages, which are contiguous and densely packed unless strides are set.
    #[must_use]
    pub fn paged(self, page_size: u32, num_pages: u32, max_pages: u32) -> Self {
        let keys = IndexKeys::Paged { page_size, num_pages, max_pages };
        let dense = |dim: u32| IndexStrides { outer: u64::from(page_size) * u64::from(dim), key: dim.into() };
        Self { keys, strides_k: dense(self.head_dim), strides_scale: dense(1), ..self }
    }

    /// Number of sequences or pages, and number of keys of each.
    fn extents(&self, batch: u32, seqlen_k: u32) -> [u32; 2] {
        match self.keys {
            IndexKeys::Batch => [batch, seqlen_k],
            IndexKeys::Paged { page_size, num_pages, .. } => [num_pages, page_size],
        }
    }

    fn check(&self, seqlen_k: u32) -> Result<(), ProblemError> {
        let Self { num_heads, head_dim, dtype_q, keys, .. } = *self;
        let heads = 1..=MAX_INDEX_HEADS;
        ensure!(
            heads.contains(&num_heads),
            "num_heads",
            "num_heads {num_heads} is not in 1..={MAX_INDEX_HEADS}"
        );
        let dims = 1..=MAX_HEAD_DIM;
        ensure!(dims.contains(&head_dim), "head_dim", "head_dim {head_dim} is not in 1..={MAX_HEAD_DIM}");
        for (name, dtype) in [("dtype_q", dtype_q), ("dtype_k", self.dtype_k)] {
            let is_e5m2 = matches!(dtype, DType::E5m2 | DType::E5m2Fnuz);
            ensure!(!is_e5m2, name, "{name} {dtype} is not f32, f16, bf16 or e4m3");
        }
        if let IndexKeys::Paged { page_size, num_pages, max_pages } = keys {
            let sizes = 1..=MAX_SEQLEN;
            ensure!(
                sizes.contains(&page_size),
                "page_size",
                "page_size {page_size} is not in 1..={MAX_SEQLEN}"
            );
            for (field, value) in [("num_pages", num_pages), ("max_pages", max_pages)] {
                ensure!(value <= MAX_SEQLEN, field, "{field} {value} is larger than {MAX_SEQLEN}");
            }
            ensure!(
                num_pages >= 1 || seqlen_k == 0,
                "num_pages",
                "num_pages 0: there are no pages for seqlen_k {seqlen_k}"
            );
            let keys = u64::from(max_pages) * u64::from(page_size);
            ensure!(
                keys >= u64::from(seqlen_k),
                "max_pages",
                "max_pages {max_pages} of page_size {page_size}: {keys} keys, fewer than seqlen_k {seqlen_k}"
            );
        }
        let most = 1u64 << 40;
        for (field, strides) in [("strides_k", self.strides_k), ("strides_scale", self.strides_scale)] {
            for (axis, stride) in [("outer", strides.outer), ("key", strides.key)] {
                ensure!(stride <= most, field, "{field}.{axis} {stride} is larger than {most}");
            }
        }
        Ok(())
    }
}

impl ChosenBlocks {
    /// Blocks of this many keys; a block's score is the greatest of its candidates.
    #[must_use]
    pub const fn maximum(block: u32) -> Self {
        Self { score: BlockScore::Maximum { block }, first: 0, last: 0 }
    }

    /// Blocks whose score is a sum of given probabilities of compressed blocks.
    #[must_use]
    pub const fn sum(overlap: BlockOverlap, num_blocks: u32) -> Self {
        Self { score: BlockScore::Sum { overlap, num_blocks }, first: 0, last: 0 }
    }

    setters! {
        /// Number of a row's first candidates that are always chosen.
        first: u32 => first;
        /// Number of a row's last candidates that are always chosen.
        last: u32 => last;
    }
}

impl ChooseProblem {
    /// A choice of `topk` keys for each query; candidates are causal.
    #[must_use]
    pub fn new(batch: u32, seqlen_q: u32, seqlen_k: u32, topk: u32, source: ScoreSource) -> Self {
        Self {
            batch,
            seqlen_q,
            seqlen_k,
            topk,
            source,
            candidates: CandidateKind::Causal,
            seqused_k: false,
            blocks: None,
            write_scores: false,
        }
    }

    setters! {
        /// Keys among which a query may choose.
        candidates: impl Into<CandidateKind> => candidates;
        /// Whether each sequence has a length of its own.
        seqused_k: bool => seqused_k;
        /// Choice of blocks instead of keys.
        blocks: impl Into<Option<ChosenBlocks>> => blocks;
        /// Whether scores are written.
        write_scores: bool => write_scores;
    }

    /// Number of rows of q, each with one list.
    #[must_use]
    pub fn rows(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.seqlen_q)
    }

    /// The indexer, if the scores come from one.
    #[must_use]
    pub fn indexer(&self) -> Option<&Indexer> {
        match &self.source {
            ScoreSource::Index(indexer) => Some(indexer),
            ScoreSource::Given => None,
        }
    }

    /// Number of keys or blocks that a row may choose from.
    #[must_use]
    pub fn num_entries(&self) -> u32 {
        match self.blocks.map(|blocks| blocks.score) {
            None => self.seqlen_k,
            Some(BlockScore::Maximum { block }) => self.seqlen_k.div_ceil(block.max(1)),
            Some(BlockScore::Sum { num_blocks, .. }) => num_blocks,
        }
    }

    /// The keys (or, for sums, blocks) among which the query at `row` may choose. `used`: number of keys of its
    /// sequence; `range`: for [`CandidateKind::Ranges`] the first candidate and one past the last.
    #[must_use]
    pub fn candidates_of(&self, row: u64, used: u32, range: [i32; 2]) -> Range<u32> {
        let sums = matches!(self.blocks.map(|blocks| blocks.score), Some(BlockScore::Sum { .. }));
        let length = if sums { self.num_entries() } else { used.min(self.seqlen_k) };
        match self.candidates {
            CandidateKind::All => 0..length,
            CandidateKind::Causal => {
                let i = i64::try_from(row % u64::from(self.seqlen_q.max(1))).unwrap_or(i64::MAX);
                let end = i + 1 + i64::from(length) - i64::from(self.seqlen_q);
                0..end.clamp(0, length.into()) as u32
            }
            CandidateKind::Ranges => {
                let inside = |key: i32| key.max(0).unsigned_abs().min(length);
                let [first, end] = range.map(inside);
                first..end.max(first)
            }
        }
    }

    /// Bytes of q, k, the scales and the block table that a call touches.
    #[doc(hidden)]
    #[must_use]
    pub fn index_bytes(&self, indexer: &Indexer) -> [u64; 4] {
        let rows = self.rows().saturating_mul(indexer.num_heads.into());
        let q = rows.saturating_mul(u64::from(indexer.head_dim) * indexer.dtype_q.size_bytes());
        let [outer, keys] = indexer.extents(self.batch, self.seqlen_k).map(u64::from);
        let reach = |strides: IndexStrides, dim: u64, size: u64| {
            if outer == 0 || keys == 0 {
                return 0;
            }
            let last =
                strides.outer.saturating_mul(outer - 1).saturating_add(strides.key.saturating_mul(keys - 1));
            last.saturating_add(dim).saturating_mul(size)
        };
        let k = reach(indexer.strides_k, indexer.head_dim.into(), indexer.dtype_k.size_bytes());
        let scale = if indexer.k_scale { reach(indexer.strides_scale, 1, 4) } else { 0 };
        let table = match indexer.keys {
            IndexKeys::Batch => 0,
            IndexKeys::Paged { max_pages, .. } => u64::from(self.batch) * u64::from(max_pages) * 4,
        };
        [q, k, scale, table]
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidChoose, ProblemError> {
        let Self { batch, seqlen_q, seqlen_k, topk, .. } = self;
        for (field, value) in
            [("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("topk", topk)]
        {
            ensure!(value <= MAX_SEQLEN, field, "{field} {value} is larger than {MAX_SEQLEN}");
        }
        let (rows, most) = (self.rows(), u64::from(MAX_SEQLEN));
        ensure!(rows <= most, "batch", "batch {batch} of seqlen_q {seqlen_q}: {rows} rows, more than {most}");
        if let ScoreSource::Index(indexer) = &self.source {
            indexer.check(seqlen_k)?;
        }
        if let Some(blocks) = &self.blocks {
            match blocks.score {
                BlockScore::Maximum { block } => {
                    ensure!(block >= 1, "block", "block {block} is not at least 1");
                }
                BlockScore::Sum { overlap, num_blocks } => {
                    overlap.check()?;
                    ensure!(
                        num_blocks <= MAX_SEQLEN,
                        "num_blocks",
                        "num_blocks {num_blocks} is larger than {MAX_SEQLEN}"
                    );
                    ensure!(
                        self.source == ScoreSource::Given,
                        "source",
                        "source index: sums of blocks are of given probabilities"
                    );
                    ensure!(
                        self.candidates != CandidateKind::Causal,
                        "candidates",
                        "candidates causal: those of sums are blocks, as ranges or all of them"
                    );
                    ensure!(!self.seqused_k, "seqused_k", "seqused_k true: sums of blocks have no lengths");
                }
            }
            let forced = u64::from(blocks.first) + u64::from(blocks.last);
            ensure!(
                forced <= u64::from(topk) || topk == 0,
                "blocks",
                "blocks.first {} and blocks.last {} are more than topk {topk}",
                blocks.first,
                blocks.last
            );
        }
        ensure!(
            topk > 0 || self.write_scores,
            "topk",
            "topk 0 without write_scores: neither a list nor scores are written"
        );
        let writes_its_source =
            self.source == ScoreSource::Given && self.blocks.is_none() && self.write_scores;
        ensure!(!writes_its_source, "write_scores", "write_scores true: given scores are there already");
        Ok(ValidChoose(self))
    }
}

/// A choice without contradictions, made by [`ChooseProblem::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct ValidChoose(ChooseProblem);

impl std::ops::Deref for ValidChoose {
    type Target = ChooseProblem;

    fn deref(&self) -> &ChooseProblem {
        &self.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn index(topk: u32) -> ChooseProblem {
        let indexer = Indexer::new(4, 32, DType::Bf16, DType::Bf16, 100);
        ChooseProblem::new(2, 3, 100, topk, ScoreSource::Index(indexer))
    }

    fn refused(problem: ChooseProblem) -> String {
        problem.validate().unwrap_err().text
    }

    #[test]
    fn a_choice_names_the_field_that_contradicts() {
        assert!(index(5).validate().is_ok());
        assert_eq!(refused(index(0)), "topk 0 without write_scores: neither a list nor scores are written");
        let blocks = ChosenBlocks::maximum(16).first(1).last(2);
        assert_eq!(refused(index(2).blocks(blocks)), "blocks.first 1 and blocks.last 2 are more than topk 2");
        assert_eq!(refused(index(2).blocks(ChosenBlocks::maximum(0))), "block 0 is not at least 1");
        let given = ChooseProblem::new(2, 3, 100, 4, ScoreSource::Given);
        assert_eq!(
            refused(given.clone().write_scores(true)),
            "write_scores true: given scores are there already"
        );
        let overlap = BlockOverlap { compressed: 32, stride: 16, selected: 64 };
        assert!(
            refused(given.clone().blocks(ChosenBlocks::sum(overlap, 9))).starts_with("candidates causal")
        );
        let indexer = Indexer::new(0, 32, DType::Bf16, DType::Bf16, 100);
        let of = |indexer| ChooseProblem::new(1, 1, 100, 4, ScoreSource::Index(indexer));
        assert_eq!(refused(of(indexer)), "num_heads 0 is not in 1..=4096");
        let paged = Indexer::new(1, 32, DType::Bf16, DType::Bf16, 100).paged(16, 9, 6);
        let no_pages = Indexer::new(1, 32, DType::Bf16, DType::Bf16, 100).paged(16, 0, 7);
        assert_eq!(refused(of(no_pages)), "num_pages 0: there are no pages for seqlen_k 100");
        assert_eq!(refused(of(paged)), "max_pages 6 of page_size 16: 96 keys, fewer than seqlen_k 100");
        assert_eq!(
            refused(of(Indexer::new(1, 32, DType::E5m2, DType::Bf16, 100))),
            "dtype_q e5m2 is not f32, f16, bf16 or e4m3"
        );
    }

    #[test]
    fn candidates_end_at_a_querys_position_and_at_the_length() {
        let problem = index(5);
        assert_eq!(problem.candidates_of(4, 100, [0; 2]), 0..99);
        assert_eq!(problem.candidates_of(0, 2, [0; 2]), 0..0);
        let ranges = index(5).candidates(CandidateKind::Ranges);
        assert_eq!(ranges.candidates_of(1, 40, [-3, 90]), 0..40);
        assert_eq!(ranges.candidates_of(1, 40, [50, 10]), 40..40);
    }
}
