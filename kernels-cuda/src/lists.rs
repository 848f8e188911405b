//! Lists of keys, and two caches, as arguments of tiled kernels, in which a tile has the query heads of one token and
//! kv head, and reads that token's keys.

use std::ffi::c_void;

use fmha_core::lists::{ListParams, list_params};
use fmha_core::mask::MaskKind;
use fmha_core::second::{TwoCachesParams, two_caches_params};
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdProblem, KeyLists, ListEntries, VLayout};
pub(crate) use fmha_gpu::lists::{of_tokens, takes_places};

use crate::nvidia::FwdCall;
use crate::operands::strides;
use crate::schedule::{MAX_TILES, TileSchedule};

/// Last parameter of a kernel over lists of keys, as C++ text.
pub(crate) const PARAM: &str = ", const __grid_constant__ ListParams lists";

/// Last parameter of an entry over two caches.
pub(crate) const TWO_PARAM: &str = ", const __grid_constant__ TwoCachesParams caches";

/// Bytes of a key's row if the cache has rows of bytes, otherwise 0.
pub(crate) fn row_bytes(problem: &FwdProblem) -> i32 {
    problem.cache.rows.map_or(0, |rows| rows.row_bytes().cast_signed())
}

/// Checks that rows of bytes can be read by copies of 16 bytes.
///
/// # Errors
/// A distance between pages that is not a multiple of 16 bytes.
pub(crate) fn takes_row_strides(problem: &FwdProblem) -> Result<(), String> {
    let Some(rows) = problem.cache.rows else { return Ok(()) };
    match strides(problem).find(|(name, _, stride)| *name == "k" && stride % 16 != 0) {
        None => Ok(()),
        Some((_, axis, stride)) => Err(format!(
            "k.{axis} stride {stride} is not a multiple of 16 bytes, as copies of cache_rows of {} bytes need",
            rows.row_bytes()
        )),
    }
}

/// Last argument of a kernel over tokens' keys.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant, reason = "a run makes it on its stack: a box would allocate")]
pub(crate) enum TokenParams {
    /// The keys come from lists over one cache.
    Lists(ListParams),
    /// The keys come from two caches.
    Two(TwoCachesParams),
}

impl TokenParams {
    /// The token argument of a call's kernel. A call without lists and without a second cache gets a value that no
    /// kernel reads.
    pub(crate) fn of(call: &FwdCall<'_>) -> Self {
        match two_caches_params(call.problem, call.args) {
            Some(two) => Self::Two(two),
            None => Self::Lists(list_params(call.problem, &call.args.seq)),
        }
    }

    /// Address of the argument.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        match self {
            Self::Lists(lists) => (&raw mut *lists).cast(),
            Self::Two(two) => (&raw mut *two).cast(),
        }
    }
}

/// Spec of a kernel over lists: keys are masked by their place in the list, and absent keys are loaded as zeros.
pub(crate) fn spec(spec: FwdSpec) -> FwdSpec {
    FwdSpec { mask: MaskKind::Full, sink_columns: false, ..spec }
}

/// Keys of a group, which the lists that a tile unites name all or none of.
const GROUP_KEYS: u32 = 8;

/// Words of shared memory for the lists of a tile of several tokens, at most.
const MOST_LIST_WORDS: u64 = 1 << 14;

/// Keys of a block of a problem whose lists tiles of `block_m` rows can unite.
///
/// # Errors
/// The entries, heads or caches of which there is no union.
pub(crate) fn blocks_of_union(problem: &FwdProblem, block_m: i32) -> Result<u32, String> {
    let refuse =
        |what: String| Err(format!("unites=1 {what}: tiles unite the lists of blocks of several tokens"));
    let Some(KeyLists { entries: ListEntries::Blocks { size }, topk, .. }) = problem.lists else {
        return refuse("without lists of blocks".to_owned());
    };
    if !size.is_multiple_of(GROUP_KEYS) {
        return refuse(format!("with blocks of {size} keys, not whole {GROUP_KEYS}"));
    }
    if problem.walks_caches() || problem.cache.rows.is_some() || problem.layout.v != VLayout::RowMajor {
        return refuse("beside a second cache, cache_rows or a column-major V".to_owned());
    }
    if problem.dims.head_dim_v > 256 || problem.dims.head_dim_qk > 256 {
        return refuse(format!(
            "with rows of {} elements",
            problem.dims.head_dim_qk.max(problem.dims.head_dim_v)
        ));
    }
    let ratio = problem.gqa_ratio();
    if ratio * 2 > block_m.unsigned_abs() {
        return refuse(format!("with block_m={block_m} and {ratio} heads to a kv head"));
    }
    let words = words(problem, block_m, 16);
    if words > MOST_LIST_WORDS {
        return refuse(format!("with topk {topk}, whose lists take {words} words or more"));
    }
    Ok(size)
}

/// Words of shared memory for the sorted lists of a tile's tokens, and for the most steps that their union can have: a
/// step has a block of keys and what of it is listed.
fn words(problem: &FwdProblem, block_m: i32, block_n: i32) -> u64 {
    let Some(KeyLists { entries: ListEntries::Blocks { size }, topk, .. }) = problem.lists else { return 0 };
    let block_n = block_n.unsigned_abs().max(1);
    let steps = if size.is_multiple_of(block_n) {
        size.div_euclid(block_n)
    } else if block_n.is_multiple_of(size.max(1)) {
        1
    } else {
        size.div_ceil(block_n) + 1
    };
    let tokens = block_m.unsigned_abs().div_euclid(problem.gqa_ratio().max(1));
    let entries = u64::from(tokens) * u64::from(topk);
    // Few lengths, so that few kernels serve all lists.
    (entries * (1 + 2 * u64::from(steps)) + 3).next_multiple_of(256)
}

/// [`words`] of a problem whose lists the tile unites.
pub(crate) fn words_of_union(problem: &FwdProblem, block_m: i32, block_n: i32) -> i32 {
    words(problem, block_m, block_n).min(1 << 24) as i32
}

/// Schedule of the tiles of every token, sequences of the longest's; `rows` heads of a group to a tile, and
/// the parts of a list tiles of their own.
///
/// # Errors
/// More tiles than a schedule counts.
pub(crate) fn schedule(problem: &FwdProblem, rows: u32, kv_parts: u32) -> Result<TileSchedule, String> {
    let dims = problem.dims;
    let num_m_blocks = u64::from(dims.seqlen_q) * u64::from(problem.gqa_ratio().div_ceil(rows.max(1)));
    let heads = u64::from(dims.batch) * u64::from(dims.num_heads_kv);
    let num_heads = heads.saturating_mul(kv_parts.into());
    let num_tiles = num_heads.saturating_mul(num_m_blocks);
    if num_tiles > MAX_TILES.unsigned_abs() {
        return Err(format!(
            "batch {}, seqlen_q {} and num_heads_q {} make {num_tiles} tiles of {rows} heads of a token, more than \
             {MAX_TILES}",
            dims.batch, dims.seqlen_q, dims.num_heads_q
        ));
    }
    Ok(TileSchedule {
        num_tiles: num_tiles as i32,
        num_m_blocks: num_m_blocks as i32,
        first_m_block: 0,
        num_heads: num_heads as i32,
        heads_per_l2_group: 1,
    })
}
