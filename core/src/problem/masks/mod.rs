//! Masks as data: key intervals, bits and block lists, read where a kernel runs.
//!
//! A pair is visible if each of them and the problem's band show it. A key inside a block of the full list is shown
//! whatever intervals, bits and a mask as code say; a key inside no listed block is hidden.

mod check;
mod device;
mod host;
#[cfg(test)]
mod tests;

pub use check::check_masks;
pub use device::{MaskDataParams, MaskTensor, header, mask_data_params};
pub use host::{HeadMasks, HostMasks, Shown};

use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::layout::{QLayout, Shape, Strides, Totals};
use crate::problem::{Dims, FwdProblem, MAX_SEQLEN, check_input};

/// A type of 4 bytes, the element size of i32 and u32 masks.
const FOUR_BYTES: DType = DType::F32;

/// Masks that tensors give: intervals of keys, bits, lists of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Masks {
    /// Ranges of keys for each query row.
    pub intervals: Option<Intervals>,
    /// A bit for each query and key.
    pub bits: Option<MaskBits>,
    /// Blocks of queries and keys.
    pub block_lists: Option<BlockLists>,
}

/// Batch and head axes of a mask, besides rows and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskAxes {
    /// Whether each sequence of a batch has a mask of its own. Packed sequences always have their own.
    pub per_batch: bool,
    /// Number of heads of the mask: 1, `num_heads_kv` or `num_heads_q`; for block lists 1 or `num_heads_q`.
    pub heads: u32,
}

impl MaskAxes {
    /// One mask for all sequences and heads.
    pub const SHARED: Self = Self { per_batch: false, heads: 1 };

    /// Index of the mask head that applies to a query head.
    #[must_use]
    pub fn head(self, dims: &Dims, i_head: u32) -> u32 {
        match self.heads {
            1 => 0,
            heads if heads == dims.num_heads_q => i_head,
            heads => i_head / (dims.num_heads_q / heads.max(1)).max(1),
        }
    }
}

/// An even number of endpoints for each query row, i32. With E(-1) = 0 and E(m) = min(max(F(m), E(m - 1)), seqlen_k),
/// row i sees key j iff E(2p) <= j < E(2p + 1) for some p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Intervals {
    /// Batch and head axes: which sequences and heads have intervals of their own.
    pub axes: MaskAxes,
    /// Number of endpoints of a row: two for each interval.
    pub endpoints: u32,
    /// Strides of `batch`, `head`, `dim` (from endpoint to endpoint) and `seq` (from query to query), at least 0.
    /// Packed rows follow one another along `seq`.
    pub strides: Strides,
}

/// A bit for each query and key, in u32 words: bit `j % 32` of word `j / 32`, 1 = seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskBits {
    /// Batch and head axes: which sequences and heads have bits of their own.
    pub axes: MaskAxes,
    /// Strides of `batch`, `head`, `seq` (from query to query) and `dim` (from word to word), at least 0.
    pub strides: Strides,
}

/// Which blocks of keys each block of queries sees. Blocks count from query 0 and key 0 of each sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockLists {
    /// Batch and head axes: which sequences and heads have lists of their own. Packed calls have a batch axis too.
    pub axes: MaskAxes,
    /// Number of queries of a block.
    pub block_q: u32,
    /// Number of keys of a block.
    pub block_k: u32,
    /// Blocks in which the other masks decide each pair: `kv_num_blocks` and `kv_indices`.
    pub partial: Option<BlockList>,
    /// Blocks that are visible as a whole, within lengths and band: `full_kv_num_blocks` and `full_kv_indices`.
    pub full: Option<BlockList>,
}

/// A count for each block of queries, i32 `[batch or 1, heads, blocks_q]`, and that many indices of blocks of keys,
/// i32 `[batch or 1, heads, blocks_q, max_blocks]`. Indices past the count are never read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockList {
    /// Capacity of a row, in indices.
    pub max_blocks: u32,
    /// Strides `batch`, `head` and `seq` of the counts, at least 0.
    pub counts: Strides,
    /// Strides of the indices; `dim` is the stride from one index to the next.
    pub indices: Strides,
}

/// Strides of a contiguous tensor `[batch, head, seq, dim]`.
fn bhsd(shape: Shape) -> Strides {
    let dim = i64::from(shape.dim);
    let head = dim * i64::from(shape.seq);
    Strides { batch: head * i64::from(shape.head), head, seq: dim, dim: 1 }
}

impl Intervals {
    /// Intervals with contiguous endpoints `[batch or 1, heads, endpoints, seqlen_q]`.
    #[must_use]
    pub fn batch(problem: &FwdProblem, axes: MaskAxes, endpoints: u32) -> Self {
        Self::of_rows(problem.dims.seqlen_q, axes, endpoints)
    }

    /// Intervals with contiguous endpoints `[heads, endpoints, total_q]` for packed rows.
    #[must_use]
    pub fn packed(total_q: u32, heads: u32, endpoints: u32) -> Self {
        Self::of_rows(total_q, MaskAxes { per_batch: false, heads }, endpoints)
    }

    fn of_rows(rows: u32, axes: MaskAxes, endpoints: u32) -> Self {
        let (row, head) = (i64::from(rows), i64::from(rows) * i64::from(endpoints));
        let strides = Strides { batch: head * i64::from(axes.heads), head, dim: row, seq: 1 };
        Self { axes, endpoints, strides }
    }
}

impl MaskBits {
    /// Bits in contiguous words `[batch or 1, heads, seqlen_q, words]`, or `[heads, total_q, words]` for packed rows.
    #[must_use]
    pub fn dense(problem: &FwdProblem, axes: MaskAxes, totals: Totals) -> Self {
        let unset = Self { axes, strides: Strides { batch: 0, seq: 0, head: 0, dim: 1 } };
        Self { strides: bhsd(problem.shape_mask_bits(&unset, totals)), ..unset }
    }
}

impl BlockLists {
    /// Contiguous block lists in torch's layout, with this capacity for each row; `None` for a list that is absent.
    #[must_use]
    pub fn dense(
        problem: &FwdProblem,
        axes: MaskAxes,
        [block_q, block_k]: [u32; 2],
        partial: Option<u32>,
        full: Option<u32>,
    ) -> Self {
        let mut lists = Self { axes, block_q, block_k, partial: None, full: None };
        let list = |lists: &Self, max_blocks: u32| {
            let counts = problem.shape_block_lists(lists, 1);
            BlockList { max_blocks, counts: bhsd(counts), indices: bhsd(Shape { dim: max_blocks, ..counts }) }
        };
        lists.partial = partial.map(|most| list(&lists, most));
        lists.full = full.map(|most| list(&lists, most));
        lists
    }
}

impl Masks {
    /// Whether the problem has no masks as data (tensors).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Names of the masks that are given.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let has = [
            ("intervals", self.intervals.is_some()),
            ("mask_bits", self.bits.is_some()),
            ("block_lists", self.block_lists.is_some()),
        ];
        has.into_iter().filter_map(|(name, has)| has.then_some(name))
    }

    /// Refuses a problem for kernels that read no masks as data.
    ///
    /// # Errors
    /// A mask as data.
    pub fn refuse(&self, kernel: &str) -> Result<(), Refusal> {
        match self.names().next() {
            None => Ok(()),
            Some(name) => Err(Refusal::new(kernel, format!("{name}: a mask as data is not in this kernel"))),
        }
    }
}

impl FwdProblem {
    /// Shape of the intervals: `seq` is the query, `dim` the endpoint.
    #[must_use]
    pub fn shape_intervals(&self, intervals: &Intervals, totals: Totals) -> Shape {
        Shape { dim: intervals.endpoints, ..self.mask_rows(intervals.axes, totals) }
    }

    /// Shape of the bits: `seq` is the query, `dim` the word. In a part of a larger call words begin at the whole's
    /// first key, and reach to the call's last one.
    #[must_use]
    pub fn shape_mask_bits(&self, bits: &MaskBits, totals: Totals) -> Shape {
        let keys = self.part.position_k.saturating_add(self.dims.seqlen_k);
        Shape { dim: keys.div_ceil(32), ..self.mask_rows(bits.axes, totals) }
    }

    /// Index in block lists of the block that begins at the call's first key.
    pub(crate) fn first_block_k(&self) -> u32 {
        self.masks.block_lists.map_or(0, |lists| self.part.position_k / lists.block_k.max(1))
    }

    /// Number of keys of the whole sequence of which the call has `seqlen_k`.
    fn whole_seqlen_k(&self, seqlen_k: u32) -> u32 {
        match self.part.seqlens {
            Some([_, whole]) => whole,
            None => self.part.position_k.saturating_add(seqlen_k),
        }
    }

    /// Shape of the lists' indices with this capacity per row: `seq` is the block of queries.
    #[must_use]
    pub fn shape_block_lists(&self, lists: &BlockLists, max_blocks: u32) -> Shape {
        Shape {
            batch: if lists.axes.per_batch { self.dims.batch } else { 1 },
            seq: self.dims.seqlen_q.div_ceil(lists.block_q.max(1)),
            head: lists.axes.heads,
            dim: max_blocks,
        }
    }

    fn mask_rows(&self, axes: MaskAxes, totals: Totals) -> Shape {
        let packed = self.layout.q == QLayout::Packed;
        Shape {
            batch: if axes.per_batch && !packed { self.dims.batch } else { 1 },
            seq: if packed { totals.total_q.unwrap_or(0) } else { self.dims.seqlen_q },
            head: axes.heads,
            dim: 1,
        }
    }

    /// Whether code or masks as data decide each pair within the band.
    #[must_use]
    pub fn asks_pairs(&self) -> bool {
        !self.code.is_empty() || !self.masks.is_empty()
    }

    /// Refuses a quantised cache or a tree mask together with masks as data, for kernels that do not support these
    /// combinations.
    ///
    /// # Errors
    /// The cache's type, or the tree mask.
    pub fn refuse_cache_beside_masks(&self, kernel: &str) -> Result<(), Refusal> {
        let what = match (self.cache.dtype, self.cache.tree_mask) {
            (Some(dtype), _) => format!("dtype_cache {dtype}"),
            (None, true) => format!("tree_mask of {} queries", self.dims.seqlen_q),
            (None, false) => return Ok(()),
        };
        let names = self.masks.names().collect::<Vec<_>>().join(", ");
        Err(Refusal::new(kernel, format!("{what} beside masks as data ({names}) is not in this kernel")))
    }

    fn check_axes(&self, field: &'static str, axes: MaskAxes, by_kv_head: bool) -> Result<(), ProblemError> {
        let Dims { num_heads_q, num_heads_kv, .. } = self.dims;
        let heads = axes.heads;
        let kv = if by_kv_head { format!(", num_heads_kv {num_heads_kv}") } else { String::new() };
        ensure!(
            heads == 1 || heads == num_heads_q || by_kv_head && heads == num_heads_kv,
            field,
            "{field} has {heads} heads, not 1{kv} or num_heads_q {num_heads_q}"
        );
        Ok(())
    }

    /// Checks those facts of masks as data that are known when planning.
    pub(crate) fn check_masks(&self) -> Result<(), ProblemError> {
        if self.masks.is_empty() {
            return Ok(());
        }
        if let Some(intervals) = self.masks.intervals {
            self.check_axes("intervals", intervals.axes, true)?;
            let endpoints = intervals.endpoints;
            ensure!(
                (2..=MAX_SEQLEN).contains(&endpoints) && endpoints.is_multiple_of(2),
                "intervals",
                "intervals has {endpoints} endpoints a row, which is not an even number from 2 on"
            );
        }
        if let Some(bits) = self.masks.bits {
            self.check_axes("mask_bits", bits.axes, true)?;
        }
        if let Some(lists) = self.masks.block_lists {
            self.check_axes("block_lists", lists.axes, false)?;
            for (name, size) in [("block_q", lists.block_q), ("block_k", lists.block_k)] {
                ensure!(
                    (1..=MAX_SEQLEN).contains(&size),
                    "block_lists",
                    "block_lists.{name} {size} is not in 1..={MAX_SEQLEN}"
                );
            }
            ensure!(
                lists.partial.is_some() || lists.full.is_some(),
                "block_lists",
                "block_lists has 0 lists: kv_num_blocks and full_kv_num_blocks are both absent"
            );
        }
        self.check_masks_of_part()?;
        let two = Some(2);
        self.check_mask_tensors(Totals { total_q: two, ..Totals::NONE })
    }

    /// Checks that a part of a larger call begins where words of bits and blocks do.
    fn check_masks_of_part(&self) -> Result<(), ProblemError> {
        let (position_q, position_k) = (self.part.position_q, self.part.position_k);
        ensure!(
            self.masks.bits.is_none() || position_k.is_multiple_of(32),
            "mask_bits",
            "mask_bits: position_k {position_k} of a part is not a multiple of 32, a word's keys"
        );
        let Some(lists) = self.masks.block_lists else { return Ok(()) };
        for (name, position, block, size) in [
            ("position_q", position_q, "block_q", lists.block_q),
            ("position_k", position_k, "block_k", lists.block_k),
        ] {
            ensure!(
                position.is_multiple_of(size.max(1)),
                "block_lists",
                "block_lists: {name} {position} of a part is not a multiple of {block} {size}"
            );
        }
        Ok(())
    }

    /// Checks the masks' strides over these extents.
    pub(crate) fn check_mask_tensors(&self, totals: Totals) -> Result<(), ProblemError> {
        let check = |name, strides: Strides, shape: Shape| check_input(name, strides, shape, FOUR_BYTES);
        if let Some(intervals) = &self.masks.intervals {
            check("intervals", intervals.strides, self.shape_intervals(intervals, totals))?;
        }
        if let Some(bits) = &self.masks.bits {
            check("mask_bits", bits.strides, self.shape_mask_bits(bits, totals))?;
        }
        let Some(lists) = &self.masks.block_lists else { return Ok(()) };
        for ([counts, indices], list) in LIST_NAMES.into_iter().zip([lists.partial, lists.full]) {
            let Some(list) = list else { continue };
            check(counts, list.counts, self.shape_block_lists(lists, 1))?;
            check(indices, list.indices, self.shape_block_lists(lists, list.max_blocks))?;
        }
        Ok(())
    }
}

/// Names of the tensors of the partial list and of the full list, as in torch.
pub(crate) const LIST_NAMES: [[&str; 2]; 2] =
    [["kv_num_blocks", "kv_indices"], ["full_kv_num_blocks", "full_kv_indices"]];
