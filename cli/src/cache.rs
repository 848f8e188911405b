//! The options of a KV cache: pages, new rows, positions, a narrower type, a tree of drafted tokens.

use clap::Args;
use fmha::{Append, BlockFormat, CacheScales, DType, Dims, FwdProblem, KvLayout, Rotary, RotaryPairs};

use crate::failure::Failure;
use crate::options::{at_least_0, at_least_1, dtype};

/// Options for a KV cache, besides reading it in place.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache (made-up data, --mode 0)")]
pub(super) struct CacheOptions {
    /// Rows of a page: K and V lie in scattered pages; 0 = they do not
    #[arg(long, visible_alias = "page_block_size", value_name = "N", default_value = "0", value_parser = at_least_0("page_size"), allow_negative_numbers = true)]
    page_size: u32,

    /// New rows of each sequence, written to the cache first; the cache has seqlen_k minus this many before,
    /// or --seqused-k; 0 = none
    #[arg(long, visible_alias = "s_knew", value_name = "N", default_value = "0", value_parser = at_least_0("append"), allow_negative_numbers = true)]
    append: u32,

    /// Number of leading elements of Q's and the new keys' rows that are rotated by their positions; 0 = none
    #[arg(long = "rotary", visible_alias = "rotary_dim", value_name = "DIM", default_value = "0", value_parser = at_least_0("rotary_dim"), allow_negative_numbers = true)]
    rotary_dim: u32,

    /// Rotate pairs of neighbours (GPT-J), not i with i + DIM / 2 (GPT-NeoX)
    #[arg(long, visible_alias = "rotary_interleaved")]
    interleaved: bool,

    /// Rows of the rotary tables (default: as many as there are positions)
    #[arg(long, value_name = "N", value_parser = at_least_1("max_pos"), allow_negative_numbers = true)]
    max_pos: Option<u32>,

    /// FP8 type of the cache with 16-bit queries, with the factors of --qscale: fp8, bf8, ...
    #[arg(long = "cache-type", value_name = "TYPE", value_parser = dtype("cache_type"))]
    dtype_cache: Option<DType>,

    /// Scales of an FP8 cache's rows (--cache-type), each for N rows of a kv head, in place of --qscale; 0 = none
    #[arg(long, value_name = "N", default_value = "0", value_parser = at_least_0("cache_scales"), allow_negative_numbers = true)]
    cache_scales: u32,

    /// Q, K and V in a format with scales by blocks, whose values are of --prec (bf16, fp32): mxfp8_e4m3, mxfp8_e5m2 or
    /// nvfp4
    #[arg(long, value_name = "FORMAT", value_parser = block_format)]
    pub(super) block_scales: Option<BlockFormat>,

    /// V is the first elements of K's rows (MLA)
    #[arg(long)]
    v_in_k: bool,

    /// The queries are a binary tree of drafted tokens: each sees its ancestors and all keys before (--mask b)
    #[arg(long)]
    tree: bool,
}

/// Lengths and positions that follow from the cache's options.
#[derive(Clone, Debug, Default)]
pub(super) struct CachePlaces {
    /// `[batch, max_pages]`, the last page first; empty where nothing is paged.
    pub(super) block_table: Vec<i32>,
    pub(super) max_pages: u32,
    pub(super) num_pages: Option<u32>,
    /// Words of the tree mask, u32 `[batch, seqlen_q, words]`; empty without one.
    pub(super) tree_mask: Vec<i32>,
}

fn block_format(text: &str) -> Result<BlockFormat, String> {
    text.parse().map_err(|error: fmha::ProblemError| error.text)
}

impl CacheOptions {
    /// Refuses options that do not go with the cache's.
    pub(super) fn fit(&self, is_group: bool, is_given: bool, backward: bool) -> Result<(), Failure> {
        let number = |value: u32| (value > 0).then(|| value.to_string());
        let options = [
            ("page_size", number(self.page_size)),
            ("append", number(self.append)),
            ("rotary", number(self.rotary_dim)),
            ("cache_type", self.dtype_cache.map(|dtype| dtype.to_string())),
            ("cache_scales", number(self.cache_scales)),
            ("block_scales", self.block_scales.map(|format| format.to_string())),
            ("v_in_k", number(self.v_in_k.into())),
            ("tree", number(self.tree.into())),
        ];
        for (name, value) in options.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            let against = [
                (is_group, "--mode 0, and --mode is 1"),
                (is_given, "made-up data, and q, k and v are given"),
                (backward && name != "block_scales", "the forward, and --backward is given"),
            ];
            if let Some((_, with)) = against.into_iter().find(|&(holds, _)| holds) {
                return Err(Failure::wrong(format!("{name} {value} goes with {with}")));
            }
        }
        for (name, on) in [("interleaved", self.interleaved), ("max_pos", self.max_pos.is_some())] {
            if on && self.rotary_dim == 0 {
                let value = self.max_pos.unwrap_or(1);
                return Err(Failure::wrong(format!("{name} {value} goes with --rotary, which is 0")));
            }
        }
        Ok(())
    }

    /// Layout of K and V.
    pub(super) fn kv_layout(&self) -> KvLayout {
        match self.page_size {
            0 => KvLayout::Strided,
            page_size => KvLayout::Paged { page_size },
        }
    }

    /// The type that K or V of this type is stored in.
    pub(super) fn stored(&self, dtype: DType) -> DType {
        self.dtype_cache.unwrap_or(dtype)
    }

    /// Whether the problem needs the length of each sequence in the cache.
    pub(super) fn wants_lengths(&self) -> bool {
        self.append > 0 || self.rotary_dim > 0
    }

    /// Length of each sequence in the cache, if the user gives none.
    pub(super) fn length_before(&self, seqlen_k: u32) -> Result<u32, Failure> {
        seqlen_k
            .checked_sub(self.append)
            .ok_or_else(|| Failure::wrong(format!("append {} is more than seqlen_k {seqlen_k}", self.append)))
    }

    /// Pages and tree of a problem's sequences.
    pub(super) fn places(&self, dims: Dims) -> Result<CachePlaces, Failure> {
        let mut places = CachePlaces::default();
        if self.page_size > 0 {
            let max_pages = dims.seqlen_k.div_ceil(self.page_size).max(1);
            let pages = i32::try_from(i64::from(max_pages) * i64::from(dims.batch)).map_err(|_| {
                Failure::wrong(format!(
                    "page_size {}: {max_pages} pages a sequence are too many",
                    self.page_size
                ))
            })?;
            (places.max_pages, places.num_pages) = (max_pages, Some(pages.unsigned_abs()));
            places.block_table = (0..pages).rev().collect();
        }
        if self.tree {
            places.tree_mask = (0..dims.batch).flat_map(|_| tree(dims.seqlen_q)).collect();
        }
        Ok(places)
    }

    /// Sets the options in a problem.
    pub(super) fn apply(&self, problem: &mut FwdProblem) {
        (problem.cache.dtype, problem.cache.v_in_k, problem.cache.tree_mask) =
            (self.dtype_cache, self.v_in_k, self.tree);
        if self.v_in_k {
            (problem.strides.v, problem.dtypes.v, problem.scales.descale_v) =
                (problem.strides.k, problem.dtypes.qk, problem.scales.descale_k);
        }
        if self.cache_scales > 0 {
            problem.cache.scales = Some(CacheScales::new(problem, self.cache_scales));
        }
        if self.append > 0 {
            problem.cache.append = Some(Append::batch(problem, self.append));
        }
        if self.rotary_dim > 0 {
            let positions = problem.dims.seqlen_k.saturating_add(problem.dims.seqlen_q);
            problem.cache.rotary = Some(Rotary {
                dim: self.rotary_dim,
                pairs: if self.interleaved { RotaryPairs::Interleaved } else { RotaryPairs::Half },
                max_pos: self.max_pos.unwrap_or(positions),
                dtype: DType::F32,
            });
        }
    }
}

/// The words of a binary tree: node i's parent is node (i - 1) / 2.
fn tree(nodes: u32) -> impl Iterator<Item = i32> {
    let words = nodes.div_ceil(32) as usize;
    (0..nodes).flat_map(move |node| {
        let mut row = vec![0u32; words];
        let mut at = node;
        loop {
            row[at as usize / 32] |= 1 << (at % 32);
            match at.checked_sub(1) {
                Some(before) => at = before / 2,
                None => break,
            }
        }
        row.into_iter().map(u32::cast_signed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_sees_itself_and_its_ancestors() {
        let words: Vec<i32> = tree(6).collect();
        assert_eq!(words, [0b1, 0b11, 0b101, 0b1011, 0b1_0011, 0b10_0101]);
        assert_eq!(
            tree(33).skip(64).take(2).collect::<Vec<_>>(),
            [1 << 0 | 1 << 1 | 1 << 3 | 1 << 7 | 1 << 15, 1]
        );
    }
}
