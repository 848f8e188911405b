//! Masks as data in host memory: whether they show a pair, a row or a tile.

use std::ops::Range;

use super::{BlockList, BlockLists, FOUR_BYTES, Intervals, LIST_NAMES, MaskBits};
use crate::args::{DevSlice, MaskArgs};
use crate::error::{ProblemError, ensure};
use crate::layout::{Shape, Strides};
use crate::mask::{BlockClass, MaskBand};
use crate::problem::{FwdProblem, ValidFwd};
use crate::seq::SeqSpan;

/// Whether masks as data (tensors) show a key to a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// The key is hidden.
    No,
    /// The masks as data show the key; a mask as code, if any, still decides.
    Asked,
    /// The key is visible: its block is in the full list, for which a mask as code is not evaluated.
    Full,
}

/// The masks of a call.
#[derive(Clone, Debug)]
pub struct HostMasks<'a> {
    problem: &'a FwdProblem,
    intervals: Option<(Intervals, Words<'a>)>,
    bits: Option<(MaskBits, Words<'a>)>,
    blocks: Option<ListedBlocks>,
}

/// A tensor of 4-byte numbers.
#[derive(Clone, Copy, Debug)]
struct Words<'a> {
    bytes: &'a [u8],
    strides: Strides,
}

impl<'a> Words<'a> {
    fn of(
        name: &'static str,
        slice: Option<&DevSlice<'a>>,
        strides: Strides,
        shape: Shape,
    ) -> Result<Self, ProblemError> {
        let bytes = slice
            .and_then(DevSlice::as_host)
            .ok_or_else(|| ProblemError::new(name, format!("{name} is missing or not in host memory")))?;
        let wanted = ValidFwd::extent_bytes(strides, shape, FOUR_BYTES);
        ensure!(
            bytes.len() as u64 >= wanted,
            name,
            "{name} has {} bytes, but its extents and strides reach {wanted}",
            bytes.len()
        );
        Ok(Self { bytes, strides })
    }

    /// The number at these indices of (batch, seq, head, dim).
    fn at(&self, batch: u32, seq: u32, head: u32, dim: u32) -> u32 {
        let at = self.strides.offset(batch, seq, head, dim) as usize * 4;
        self.bytes.get(at..at + 4).map_or(0, bytemuck::pod_read_unaligned)
    }
}

/// The listed blocks of keys of each block of queries, ascending, each with whether it is in the full list.
#[derive(Clone, Debug)]
struct ListedBlocks {
    lists: BlockLists,
    blocks_q: u32,
    /// First block of each (sequence, head, block of queries) in the list.
    starts: Vec<usize>,
    blocks: Vec<(u32, bool)>,
}

impl<'a> HostMasks<'a> {
    /// The masks of a call whose arguments have passed the check; `None` if it has no masks as data.
    ///
    /// # Errors
    /// A tensor that is missing, too small or not in host memory.
    pub fn of(
        problem: &'a FwdProblem,
        args: &MaskArgs<'a>,
        total_q: Option<u32>,
    ) -> Result<Option<Self>, ProblemError> {
        let masks = &problem.masks;
        if masks.is_empty() {
            return Ok(None);
        }
        let totals = crate::layout::Totals { total_q, ..crate::layout::Totals::NONE };
        let intervals = masks.intervals.map(|intervals| {
            let shape = problem.shape_intervals(&intervals, totals);
            let words = Words::of("intervals", args.intervals.as_ref(), intervals.strides, shape)?;
            Ok::<_, ProblemError>((intervals, words))
        });
        let bits = masks.bits.map(|bits| {
            let shape = problem.shape_mask_bits(&bits, totals);
            let words = Words::of("mask_bits", args.bits.as_ref(), bits.strides, shape)?;
            Ok::<_, ProblemError>((bits, words))
        });
        let blocks = masks.block_lists.map(|lists| ListedBlocks::of(problem, lists, args));
        Ok(Some(Self {
            problem,
            intervals: intervals.transpose()?,
            bits: bits.transpose()?,
            blocks: blocks.transpose()?,
        }))
    }

    /// Whether a visible block may come from the full list, for which no other mask is evaluated.
    #[must_use]
    pub fn has_full_blocks(&self) -> bool {
        self.blocks.as_ref().is_some_and(|blocks| blocks.lists.full.is_some())
    }

    /// Masks of one sequence and query head.
    #[must_use]
    pub fn head(&'a self, span: &SeqSpan, i_head: u32) -> HeadMasks<'a> {
        HeadMasks { masks: self, span: *span, i_head }
    }
}

impl ListedBlocks {
    fn of(problem: &FwdProblem, lists: BlockLists, args: &MaskArgs<'_>) -> Result<Self, ProblemError> {
        let shape = problem.shape_block_lists(&lists, 1);
        let read = |list: Option<BlockList>, [counts, indices]: [&'static str; 2], slices: [_; 2]| {
            let Some(list) = list else { return Ok(None) };
            let [of_counts, of_indices]: [&Option<DevSlice<'_>>; 2] = slices;
            let rows = Shape { dim: list.max_blocks, ..shape };
            Ok::<_, ProblemError>(Some((
                Words::of(counts, of_counts.as_ref(), list.counts, shape)?,
                Words::of(indices, of_indices.as_ref(), list.indices, rows)?,
                list.max_blocks,
            )))
        };
        let partial = read(lists.partial, LIST_NAMES[0], [&args.kv_num_blocks, &args.kv_indices])?;
        let full = read(lists.full, LIST_NAMES[1], [&args.full_kv_num_blocks, &args.full_kv_indices])?;
        let first_block = i64::from(problem.first_block_k());
        let (mut starts, mut blocks) = (vec![0], vec![]);
        for batch in 0..shape.batch {
            for head in 0..shape.head {
                for row in 0..shape.seq {
                    let first = blocks.len();
                    for (list, is_full) in [(&partial, false), (&full, true)] {
                        let Some((counts, indices, most)) = list else { continue };
                        let count = counts.at(batch, row, head, 0).cast_signed().clamp(0, most.cast_signed());
                        for at in 0..count.unsigned_abs() {
                            // An index before or behind the call's keys names a block without keys.
                            let block = i64::from(indices.at(batch, row, head, at).cast_signed());
                            if let Ok(block) = u32::try_from(block - first_block) {
                                blocks.push((block, is_full));
                            }
                        }
                    }
                    // A block that is in both lists counts as full.
                    blocks[first..].sort_unstable_by_key(|&(block, is_full)| (block, !is_full));
                    starts.push(blocks.len());
                }
            }
        }
        Ok(Self { lists, blocks_q: shape.seq, starts, blocks })
    }

    fn row(&self, batch: u32, head: u32, i: u32) -> &[(u32, bool)] {
        let row = i / self.lists.block_q;
        let batch = if self.lists.axes.per_batch { batch as usize } else { 0 };
        let at =
            (batch * self.lists.axes.heads as usize + head as usize) * self.blocks_q as usize + row as usize;
        match self.starts.get(at..at + 2) {
            Some(&[first, last]) => &self.blocks[first..last],
            _ => &[],
        }
    }
}

/// The masks of one sequence and query head.
#[derive(Clone, Copy, Debug)]
pub struct HeadMasks<'a> {
    masks: &'a HostMasks<'a>,
    span: SeqSpan,
    i_head: u32,
}

impl HeadMasks<'_> {
    /// Whether the masks as data (tensors) show key `j` to query `i`.
    #[must_use]
    pub fn shown(&self, i: u32, j: u32) -> Shown {
        let mut shown = Shown::No;
        self.runs(i, j..j + 1, |_, what| shown = what);
        shown
    }

    /// Splits `keys` of query `i` into runs of equal visibility, ascending and without gaps.
    pub fn runs(&self, i: u32, keys: Range<u32>, mut each: impl FnMut(Range<u32>, Shown)) {
        let Some(blocks) = &self.masks.blocks else { return self.asked(i, keys, &mut each) };
        let head = blocks.lists.axes.head(&self.masks.problem.dims, self.i_head);
        let size = blocks.lists.block_k;
        let row = blocks.row(self.span.i_batch, head, i);
        let first = row.partition_point(|&(block, _)| block < keys.start / size);
        let mut at = keys.start;
        for &(block, is_full) in &row[first..] {
            let begin = block.saturating_mul(size).max(at);
            let end = block.saturating_add(1).saturating_mul(size).min(keys.end);
            if begin >= keys.end {
                break;
            }
            if begin >= end {
                continue;
            }
            if at < begin {
                each(at..begin, Shown::No);
            }
            if is_full {
                each(begin..end, Shown::Full);
            } else {
                self.asked(i, begin..end, &mut each);
            }
            at = end;
        }
        if at < keys.end {
            each(at..keys.end, Shown::No);
        }
    }

    /// Splits keys into runs by the intervals and bits.
    fn asked(&self, i: u32, keys: Range<u32>, each: &mut impl FnMut(Range<u32>, Shown)) {
        let Some((intervals, words)) = &self.masks.intervals else { return self.bits(i, keys, each) };
        let head = intervals.axes.head(&self.masks.problem.dims, self.i_head);
        let (batch, row) = self.place(intervals.axes.per_batch, i);
        let first_key = self.masks.problem.part.position_k.cast_signed();
        let endpoint = |at: u32| words.at(batch, row, head, at).cast_signed().max(0) - first_key;
        let (mut at, mut before) = (keys.start, 0);
        for pair in 0..intervals.endpoints / 2 {
            let begin = endpoint(2 * pair).max(before);
            let end = endpoint(2 * pair + 1).max(begin);
            before = end;
            let (begin, end) = (begin.unsigned_abs().max(at), end.unsigned_abs().min(keys.end));
            if begin >= keys.end {
                break;
            }
            if begin >= end {
                continue;
            }
            if at < begin {
                each(at..begin, Shown::No);
            }
            self.bits(i, begin..end, each);
            at = end;
        }
        if at < keys.end {
            each(at..keys.end, Shown::No);
        }
    }

    fn bits(&self, i: u32, keys: Range<u32>, each: &mut impl FnMut(Range<u32>, Shown)) {
        let Some((bits, words)) = &self.masks.bits else { return each(keys, Shown::Asked) };
        let head = bits.axes.head(&self.masks.problem.dims, self.i_head);
        let (batch, row) = self.place(bits.axes.per_batch, i);
        let first_word = self.masks.problem.part.position_k / 32;
        let mut at = keys.start;
        while at < keys.end {
            let word = words.at(batch, row, head, first_word + at / 32) >> (at % 32);
            let is_seen = word & 1 != 0;
            let alike = if is_seen { word.trailing_ones() } else { word.trailing_zeros() };
            let end = (at + alike.min(32 - at % 32)).min(keys.end);
            each(at..end, if is_seen { Shown::Asked } else { Shown::No });
            at = end;
        }
    }

    /// The batch index and the row at which a query's mask data lie.
    fn place(&self, per_batch: bool, i: u32) -> (u32, u32) {
        let SeqSpan { q_batch, q_row, .. } = self.span;
        (if per_batch { q_batch } else { 0 }, q_row + i)
    }

    /// Class of a tile under the masks as data: all, some or none of its pairs are visible. `Inside`: these masks show
    /// the whole tile; a mask as code is either irrelevant or still to be evaluated.
    #[must_use]
    pub fn class(&self, rows: Range<u32>, keys: Range<u32>) -> BlockClass {
        let (mut some_seen, mut some_hidden) = (false, false);
        for i in rows {
            self.runs(i, keys.clone(), |_, shown| match shown {
                Shown::No => some_hidden = true,
                Shown::Asked | Shown::Full => some_seen = true,
            });
            if some_seen && some_hidden {
                return BlockClass::Edge;
            }
        }
        if some_seen { BlockClass::Inside } else { BlockClass::Skipped }
    }

    /// Number of pairs of the sequence that these masks and the band show.
    #[must_use]
    pub fn pairs(&self, band: &MaskBand) -> u64 {
        let SeqSpan { seqlen_q, seqlen_k, .. } = self.span;
        let mut pairs = 0;
        for i in 0..seqlen_q {
            for keys in [band.sink_range(i..i + 1, seqlen_k), band.row_range(i, seqlen_k)] {
                if keys.is_empty() {
                    continue;
                }
                self.runs(i, keys, |run, shown| {
                    pairs += if shown == Shown::No { 0 } else { run.len() as u64 };
                });
            }
        }
        pairs
    }

    /// Range of keys outside which no query of `rows` sees a key.
    #[must_use]
    pub fn hull(&self, rows: Range<u32>, seqlen_k: u32) -> Range<u32> {
        let mut hull = seqlen_k..0;
        for i in rows {
            self.runs(i, 0..seqlen_k, |keys, shown| {
                if shown != Shown::No {
                    hull = hull.start.min(keys.start)..hull.end.max(keys.end);
                }
            });
        }
        hull
    }
}
