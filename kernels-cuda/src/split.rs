//! Split-KV: a short query's keys are split into parts, each computed as a separate tile, whose O and LSE a second
//! kernel merges.
//!
//! The device decides where the parts of a sequence end: from its own length and the number of parts of the longest
//! (`common/part_keys.cuh`), or such that all CTAs have equally many blocks of keys, for any lengths
//! (`common/shares.cuh`). The host needs no lengths, and a graph of a call can be replayed with other lengths.

pub(crate) mod launch;
pub mod measured;
pub mod price;

use fmha_core::abi::{AbiStruct as _, DevPtr, FwdParams, View};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, FwdProblem, KvLayout, QLayout, abi_struct};

use crate::schedule::{self, SHARES_AT, SHARES_HEADER};
use crate::{lists, tree_mask};

/// Fewest keys of a part: at head dimension 128 in 16 bits its K and V are 128 KB; writing and reading the partial
/// results of eight rows adds 6 %.
const LEAST_KEYS: i32 = 256;

/// Most parts of a sequence: longer sequences have longer parts.
const MOST_PARTS: u32 = 128;

/// Offset of the parts in the workspace. The tile counter comes first, then the record of how shares were assigned.
const FIRST_BYTE: u64 = 4 * SHARES_AT;

abi_struct! {
    /// Kernel argument with the partial results: one part after another, each `[batch, num_heads_q, seqlen_q]`.
    /// Packed sequences have this layout too, since their number of rows is unknown to the plan.
    pub struct KvParts {
        /// O, `row` elements a row.
        pub o: DevPtr<f32>,
        /// Natural log-sum-exp.
        pub lse: DevPtr<f32>,
        /// Record of how shares were assigned to CTAs (`common/shares.cuh`), if parts end where shares end.
        pub shares: DevPtr<i32>,
        /// Elements from row to row of `o`: a multiple of 4.
        pub row: i32,
        /// Parts of the longest sequence; no sequence has more.
        pub count: i32,
        /// Keys of a block; a part consists of whole blocks.
        pub block_n: i32,
        /// Fixed number of keys of a part; 0 if it follows from `count`.
        pub keys: i32,
        /// First query whose parts a launch computes.
        pub first_row: i32,
        /// Number of queries, in every sequence and head, whose parts a launch computes.
        pub num_rows: i32,
        /// Query heads of a tile's rows. This field and those below are used if parts end where CTAs' shares end.
        pub heads: i32,
        /// Rows of a tile.
        pub block_m: i32,
        /// Tiles of a head's or group's rows.
        pub row_blocks: i32,
        /// Number of tiles of a sequence.
        pub tiles: i32,
    }
}

/// Division of all tiles' blocks of keys into equal shares, one for each CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// Number of CTAs that have a share.
    pub count: u32,
    /// Rows of a tile.
    pub block_m: u32,
    /// Whether rows are (query, head of a kv head's group) pairs.
    pub pack_gqa: bool,
}

impl Shares {
    /// Number of query heads of a tile's rows.
    fn heads(self, problem: &FwdProblem) -> u32 {
        if self.pack_gqa { problem.gqa_ratio() } else { 1 }
    }

    /// Number of tiles for the rows of a head, or of its group.
    fn row_blocks(self, problem: &FwdProblem) -> u32 {
        problem.dims.seqlen_q.saturating_mul(self.heads(problem)).div_ceil(self.block_m).max(1)
    }

    /// Number of tiles of a sequence.
    fn tiles_of_sequence(self, problem: &FwdProblem) -> u64 {
        u64::from(problem.dims.num_heads_q / self.heads(problem).max(1)) * u64::from(self.row_blocks(problem))
    }

    /// Number of tiles of a call.
    fn tiles(self, problem: &FwdProblem) -> u64 {
        u64::from(problem.dims.batch).saturating_mul(self.tiles_of_sequence(problem))
    }

    /// Number of rows of all parts: a part ends where a share or a tile ends.
    fn part_rows(self, problem: &FwdProblem) -> u64 {
        let rows = u64::from(self.heads(problem)) * u64::from(problem.dims.seqlen_q);
        self.tiles(problem).saturating_add(self.count.into()).saturating_mul(rows)
    }

    /// Largest number of parts of a tile, if other sequences may be short.
    fn most_parts(self, problem: &FwdProblem, block_n: u32) -> u32 {
        let parts = u64::from(self.count) / self.tiles_of_sequence(problem).max(1) + 2;
        problem.dims.seqlen_k.div_ceil(block_n).max(1).min(parts.min(u32::MAX.into()) as u32)
    }

    /// Whether the device's 32-bit counters can count this many blocks.
    #[must_use]
    pub fn takes(self, problem: &FwdProblem, block_n: u32) -> bool {
        let blocks = u64::from(problem.dims.seqlen_k.div_ceil(block_n).max(1));
        // The first row of a part is counted from its tile's first head.
        let rows = u64::from(problem.dims.num_heads_q) * u64::from(problem.dims.seqlen_q);
        // CTAs whose shares would not cover a whole stretch of a sequence's tiles get no share.
        let (count, of_sequence) = (u64::from(self.count), self.tiles_of_sequence(problem).max(1));
        let taken = count - count % of_sequence;
        self.tiles(problem).saturating_mul(blocks) < 1 << 30 && rows < 1 << 30 && 8 * taken >= 7 * count
    }
}

/// Bytes of the record of how shares were assigned, rounded up to 16, so that the parts' O may follow.
fn dealt_bytes(problem: &FwdProblem) -> u64 {
    (4 * (SHARES_HEADER + u64::from(problem.dims.batch) + 1)).next_multiple_of(16)
}

/// How a tile divides the keys of sequences among CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Keys of a part of the longest sequence; with `fixed`, of every sequence. 0 if keys are not split.
    pub keys: i32,
    /// Keys of a block; a part has whole blocks.
    pub block_n: i32,
    /// Whether parts are counted from each sequence's first key, whatever the longest length.
    pub fixed: bool,
    /// Equal shares of all tiles' blocks, each with at least `keys` keys, if parts end where shares end.
    pub shares: Option<Shares>,
}

impl Cut {
    /// Number of parts that a launch has for each sequence, by the longest sequence; 1 if keys are not split, or if
    /// each CTA has a share.
    #[must_use]
    pub fn num_parts(self, problem: &FwdProblem) -> u32 {
        let keys = self.keys.unsigned_abs();
        if keys == 0 || self.shares.is_some() { 1 } else { problem.most_walked_keys().div_ceil(keys).max(1) }
    }

    /// Workspace bytes for the parts of this many queries, with the tile counter's bytes before them; 0 without
    /// parts.
    #[must_use]
    pub fn workspace_bytes(self, problem: &FwdProblem, queries: u32) -> u64 {
        if self.keys == 0 {
            return 0;
        }
        self.part_rows(problem, queries)
            .saturating_mul(row_bytes(problem))
            .saturating_add(FIRST_BYTE + self.dealt_bytes(problem) + 16)
    }

    /// Number of rows in all parts of this many queries.
    fn part_rows(self, problem: &FwdProblem, queries: u32) -> u64 {
        match self.shares {
            Some(shares) => shares.part_rows(problem),
            None => rows_of(problem, queries, self.num_parts(problem)),
        }
    }

    fn dealt_bytes(self, problem: &FwdProblem) -> u64 {
        if self.shares.is_some() { dealt_bytes(problem) } else { 0 }
    }

    /// The number of row blocks of a call's queries that one launch computes, so that their parts fit the workspace.
    /// Without fixed parts queries are short, and one launch computes all.
    #[must_use]
    pub fn rows_at_once(self, problem: &FwdProblem, block_m: i32, pack_gqa: bool) -> RowsAtOnce {
        let ratio = if pack_gqa { problem.gqa_ratio() } else { 1 };
        let block_m = block_m.unsigned_abs();
        let queries = problem.dims.seqlen_q;
        // Smallest number of row blocks that ends with a whole query.
        let blocks = if block_m.is_multiple_of(ratio) { 1 } else { ratio };
        let step = RowsAtOnce { blocks, queries: blocks * block_m / ratio };
        let all = queries.div_ceil(step.queries).max(1);
        let bytes =
            rows_of(problem, step.queries, self.num_parts(problem)).saturating_mul(row_bytes(problem));
        let fitting = if self.fixed { MOST_BYTES / bytes.max(1) } else { u64::from(all) };
        let steps = fitting.clamp(1, all.into()) as u32;
        RowsAtOnce { blocks: step.blocks * steps, queries: (step.queries * steps).min(queries) }
    }

    /// The parts of `queries` of every sequence and head, in a workspace.
    #[must_use]
    pub fn parts(self, problem: &FwdProblem, queries: std::ops::Range<u32>, workspace: u64) -> KvParts {
        let num_rows = queries.len() as u32;
        let lse = workspace + FIRST_BYTE + self.dealt_bytes(problem);
        let o = (lse + self.part_rows(problem, num_rows) * 4).next_multiple_of(16);
        let shares = self.shares.unwrap_or(Shares { count: 0, block_m: 1, pack_gqa: false });
        KvParts {
            o: DevPtr::new(o),
            lse: DevPtr::new(lse),
            row: row_elems(problem),
            count: self.num_parts(problem) as i32,
            block_n: self.block_n,
            keys: if self.fixed { self.keys } else { 0 },
            first_row: queries.start as i32,
            num_rows: num_rows as i32,
            heads: if self.shares.is_some() { shares.heads(problem) as i32 } else { 0 },
            block_m: shares.block_m as i32,
            row_blocks: shares.row_blocks(problem) as i32,
            tiles: shares.tiles_of_sequence(problem) as i32,
            shares: DevPtr::new(workspace + FIRST_BYTE),
        }
    }
}

/// The queries, and the row blocks, whose parts are in the workspace at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsAtOnce {
    /// Number of row blocks of every head.
    pub blocks: u32,
    /// Number of queries of every sequence.
    pub queries: u32,
}

/// Most bytes for the parts of several row blocks in the workspace: one launch writes them and the next reads them.
const MOST_BYTES: u64 = 256 << 20;

/// Keys of a part of a batch-invariant plan, counted from a sequence's first key, as whole blocks. The number is
/// larger than needed to fill a device: a long query, whose last token must be bit-equal to that token alone,
/// writes and reads a row of O for each part. Only this constant decides the size.
pub const FIXED_KEYS: i32 = 2048;

/// Keys of a part of a batch-invariant plan in blocks of `block_n`; 0 if every sequence has one part. Keys are
/// split only if one part rounds like an unsplit sequence: a sink and an 8-bit O are handled differently by a
/// merge.
#[must_use]
pub fn fixed_keys(problem: &FwdProblem, block_n: i32) -> i32 {
    let is_cut = splits(problem).is_ok()
        && !problem.score.sink
        && !problem.dtypes.o.is_fp8()
        && !problem.dtypes.qk.is_fp8();
    let keys = FIXED_KEYS.unsigned_abs().next_multiple_of(block_n.unsigned_abs());
    if is_cut && problem.dims.seqlen_k > keys { keys as i32 } else { 0 }
}

impl RowsAtOnce {
    /// Every query of a problem.
    #[must_use]
    pub fn all(problem: &FwdProblem) -> Self {
        Self { blocks: i32::MAX.unsigned_abs(), queries: problem.dims.seqlen_q }
    }
}

impl KvParts {
    /// The arguments of the forward kernel when it computes parts: its O and LSE are the parts' (each part has a
    /// batch of sequences), instead of those of the `whole` call.
    #[must_use]
    pub fn params(&self, whole: &FwdParams) -> FwdParams {
        let (rows, row) = (i64::from(self.num_rows), i64::from(self.row));
        // Number of heads of a part: with shares, a part belongs to one tile.
        let heads = i64::from(if self.heads > 0 { self.heads } else { whole.num_heads_q });
        // Pointers are moved back, so that query indices count from the sequence's first query.
        let first = i64::from(self.first_row);
        let o = DevPtr::new(self.o.0.wrapping_sub((first * row * 4).cast_unsigned()));
        let lse = DevPtr::new(self.lse.0.wrapping_sub((first * 4).cast_unsigned()));
        let o = View { data: o, batch: heads * rows * row, row, head: rows * row, dim: 1 };
        FwdParams { o, lse, lse_batch: heads * rows, lse_head: rows, ..*whole }
    }
}

/// Elements of a partial row of O, rounded up for 16-byte stores.
fn row_elems(problem: &FwdProblem) -> i32 {
    problem.dims.head_dim_v.next_multiple_of(4) as i32
}

/// Number of rows of all parts together, if each part has `queries` queries.
fn rows_of(problem: &FwdProblem, queries: u32, parts: u32) -> u64 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(queries);
    rows.saturating_mul(parts.into())
}

/// Bytes of a partial row's O and LSE.
fn row_bytes(problem: &FwdProblem) -> u64 {
    4 + 4 * u64::from(row_elems(problem).unsigned_abs())
}

/// Checks that a problem's keys can be split.
///
/// # Errors
/// The field that forbids it.
pub fn splits(problem: &FwdProblem) -> Result<(), String> {
    // Sink columns in a list are treated like all other keys.
    if problem.mask.sink_columns > 0 && !problem.walks_lists() {
        return Err(format!(
            "sink_columns {}: they are not in the part of the keys beside them",
            problem.mask.sink_columns
        ));
    }
    Ok(())
}

/// Checks that a tile's shares are compatible with its other fields for splitting.
///
/// # Errors
/// The three fields.
pub(crate) fn check_shares(shares: i32, split_keys: i32, fixed_parts: bool) -> Result<(), String> {
    if shares > 0 && (split_keys == 0 || fixed_parts) {
        return Err(format!(
            "tile shares={shares} with split_keys={split_keys} and fixed_parts={}: shares have so many keys at least, \
             and no fixed number",
            i32::from(fixed_parts)
        ));
    }
    Ok(())
}

/// Checks that a problem's keys can be split in this way.
///
/// # Errors
/// The tile's field, and the property of the problem that forbids it.
pub(crate) fn check(problem: &FwdProblem, cut: Cut) -> Result<(), String> {
    if cut.keys > 0 {
        splits(problem).map_err(|why| format!("tile split_keys={}: {why}", cut.keys))?;
    }
    match cut.shares {
        Some(shares) if !shares.takes(problem, cut.block_n.unsigned_abs()) => {
            Err(format!("tile shares={}: they count fewer than 2^30 blocks of keys", shares.count))
        }
        _ => Ok(()),
    }
}

/// Most lengths that each CTA of a launch with shares reads: 32 at a time, two or three times.
pub(crate) const MOST_SCANNED: u32 = 1024;

/// Number of keys that the queries of the longest sequence see.
pub(crate) fn seen_keys(problem: &FwdProblem) -> u32 {
    let dims = problem.dims;
    let band = problem.mask.band(dims.seqlen_q, dims.seqlen_k);
    let keys = band.k_range(0..dims.seqlen_q, dims.seqlen_k);
    keys.end.saturating_sub(keys.start)
}

/// Whether all sequences have the problem's lengths, or there is only one sequence.
pub(crate) fn has_like_lengths(problem: &FwdProblem) -> bool {
    let layout = problem.layout;
    problem.dims.batch <= 1
        || (layout.q, layout.kv) == (QLayout::Batch, KvLayout::Strided)
            && !layout.seqused_q
            && !layout.seqused_k
}

/// Keys of a part for a short query, with blocks of `block_n` keys; 0: too few keys to split.
#[must_use]
pub fn split_keys(problem: &FwdProblem, block_n: i32) -> i32 {
    if splits(problem).is_err() {
        return 0;
    }
    let seqlen_k = problem.dims.seqlen_k;
    let mut keys = LEAST_KEYS.unsigned_abs().next_multiple_of(block_n.unsigned_abs());
    if seqlen_k < 2 * keys {
        return 0;
    }
    while seqlen_k.div_ceil(keys) > MOST_PARTS {
        keys *= 2;
    }
    keys as i32
}

/// Fewest queries for which keys are not split unless there are two whole parts.
const MANY_QUERIES: u32 = 33;

/// Whether the keys of a few queries may be split if that is cheaper. For other problems [`is_never_cut`] promises
/// that no batch splits them.
pub(crate) fn may_be_cut(problem: &FwdProblem, block_n: u32) -> bool {
    let dims = problem.dims;
    let is_short = split_keys(problem, block_n.cast_signed()) == 0;
    splits(problem).is_ok() && dims.seqlen_k >= 2 * block_n && !(is_short && dims.seqlen_q >= MANY_QUERIES)
}

/// Whether a problem's keys are never split, in any batch and for any lengths, so that its bits do not depend on
/// either even without the option. `changes_kernel`: the number of tiles may decide which kernel computes few rows.
pub(crate) fn is_never_cut(problem: &FwdProblem, block_n: i32, changes_kernel: bool) -> bool {
    let dims = problem.dims;
    let few_rows = dims.seqlen_q.saturating_mul(problem.gqa_ratio()) <= crate::sm80::MOST_SHORT_ROWS;
    let is_short = split_keys(problem, block_n) == 0;
    if few_rows && changes_kernel {
        return false;
    }
    splits(problem).is_err()
        || dims.seqlen_k < 2 * block_n.unsigned_abs()
        || is_short && !few_rows && dims.seqlen_q >= MANY_QUERIES
}

/// Spec that the forward kernel is compiled for if it computes parts: O is f32, and the learnable sink is added in the
/// merge.
#[must_use]
pub fn part_spec(spec: &FwdSpec) -> FwdSpec {
    FwdSpec { dtype_o: DType::F32, write_lse: true, sink: false, ..*spec }
}

/// Warps that run at the same time on a multiprocessor, with 80 registers a lane; the next constant is for a large
/// device.
const WARPS_A_MULTIPROCESSOR: u32 = 24;
const WARPS_AT_ONCE: u64 = WARPS_A_MULTIPROCESSOR as u64 * 132;

/// Greatest number of warps that share a row.
const MOST_WARPS: u32 = 8;

/// Shape of the launch that merges the parts of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merging {
    /// K and V as stored, from which a row with very large scores is recomputed.
    pub stored: DType,
    /// Bytes of a key's row if caches have rows of bytes, otherwise 0.
    pub row_bytes: u32,
    /// Warps that share a row: 1, 2, 4 or 8.
    pub warps: u32,
    /// Whether the grid is launched to start while that of the parts ends (programmatic dependent launch, from
    /// sm_90 on).
    pub dependent: bool,
    /// Whether keys are divided where the CTAs' equal shares end.
    pub in_shares: bool,
    /// Whether parts of a fixed number of keys are merged one after another (`common/fold.cuh`), with a row's
    /// columns divided among warps; otherwise the parts are divided among warps.
    pub folds: bool,
}

impl Merging {
    /// Merge of a problem's parts. A warp loads about eight parts of a row at once, and the warps' sums are added
    /// in order. Fixed parts, except those of lists, are merged one after another by any number of warps with equal
    /// bits: by four warps if rows alone leave warps idle.
    #[must_use]
    pub fn new(problem: &FwdProblem, cut: Cut, stored: DType, dependent: bool) -> Self {
        let rows = rows_of(problem, problem.dims.seqlen_q, 1);
        let row_bytes = lists::row_bytes(problem).unsigned_abs();
        if cut.fixed && !problem.walks_lists() {
            let warps = if rows.saturating_mul(4) <= WARPS_AT_ONCE { 4 } else { 1 };
            return Self { stored, row_bytes, warps, dependent, in_shares: false, folds: true };
        }
        let parts = match cut.shares {
            Some(shares) => shares.most_parts(problem, cut.block_n.unsigned_abs()),
            None => cut.num_parts(problem),
        };
        let mut warps = parts.div_ceil(8).next_power_of_two().min(MOST_WARPS);
        // A warp loads two parts of a wide row at once; if rows leave warps idle, several share a row. Over lists the
        // order of sums must not depend on the batch.
        if problem.dims.head_dim_v > 256 && !problem.walks_lists() {
            let idle = |warps: u32| rows.saturating_mul(warps.into()) <= WARPS_AT_ONCE / 2;
            while warps < parts.div_ceil(2).min(MOST_WARPS) && idle(warps) {
                warps *= 2;
            }
        }
        // Rows with few parts are many: a warp for each part of the longest row would cost them a wave of idle warps.
        while cut.shares.is_some() && warps > 1 && rows.saturating_mul(warps.into()) > WARPS_AT_ONCE {
            warps /= 2;
        }
        Self { stored, row_bytes, warps, dependent, in_shares: cut.shares.is_some(), folds: false }
    }

    /// Number of CTAs of the merging kernel for this many `queries` of every sequence and head.
    #[must_use]
    pub fn grid(&self, problem: &FwdProblem, queries: u32, num_sms: u32) -> u32 {
        let rows = rows_of(problem, queries, 1);
        crate::row_grid(rows, self.threads() / self.warps, num_sms)
    }

    /// Threads of a CTA: few, so that its registers fit besides the CTAs of the parts, and its code is loaded when
    /// they end.
    #[must_use]
    pub fn threads(&self) -> u32 {
        32 * self.warps.max(4)
    }
}

/// The merging kernel. Its arguments are [`FwdParams`] of the whole call, and [`KvParts`].
#[must_use]
pub fn merge(spec: &FwdSpec, merging: Merging) -> KernelSource {
    merging_kernel(spec, merging, KeysOfRows::Band)
}

/// Merging kernel under a tree mask, with a [`TreeMask`](crate::tree_mask::TreeMask) as an additional argument.
#[must_use]
pub fn merge_tree(spec: &FwdSpec, merging: Merging) -> KernelSource {
    merging_kernel(spec, merging, KeysOfRows::Tree)
}

/// Merging kernel over lists of keys, with [`ListParams`](fmha_core::lists::ListParams) as an additional argument.
#[must_use]
pub fn merge_lists(spec: &FwdSpec, merging: Merging) -> KernelSource {
    merging_kernel(spec, merging, KeysOfRows::Lists)
}

/// Merging kernel over two caches, with [`TwoCachesParams`](fmha_core::second::TwoCachesParams) as an additional
/// argument.
#[must_use]
pub fn merge_two_caches(spec: &FwdSpec, merging: Merging) -> KernelSource {
    merging_kernel(spec, merging, KeysOfRows::TwoCaches)
}

/// Which keys a recomputed row sees.
#[derive(Clone, Copy, Debug)]
enum KeysOfRows {
    Band,
    Tree,
    Lists,
    TwoCaches,
}

fn merging_kernel(spec: &FwdSpec, merging: Merging, keys: KeysOfRows) -> KernelSource {
    let Merging { stored, row_bytes, warps, dependent, in_shares, folds } = merging;
    let threads = merging.threads();
    let (include, last_param, function, arguments) = match keys {
        KeysOfRows::Band if folds => ("fmha/common/fold_parts.cuh", "", "fold", "p, parts"),
        KeysOfRows::Tree if folds => {
            ("fmha/common/fold_tree.cuh", tree_mask::PARAM, "fold_tree", "p, parts, tree")
        }
        KeysOfRows::Band => ("fmha/common/merge_parts.cuh", "", "merge", "p, parts"),
        KeysOfRows::Tree => ("fmha/common/merge_tree.cuh", tree_mask::PARAM, "merge_tree", "p, parts, tree"),
        KeysOfRows::Lists => ("fmha/common/merge_lists.cuh", lists::PARAM, "merge_lists", "p, parts, lists"),
        KeysOfRows::TwoCaches => {
            let header = "fmha/common/merge_two_caches.cuh";
            (header, lists::TWO_PARAM, "merge_two_caches", "p, parts, caches")
        }
    };
    // The spec of the whole call is needed: a row of very large scores is recomputed from Q, K and V.
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kStored", &stored)];
    let entry = Entry {
        include,
        constants: &constants,
        // With fewer registers the kernel spills a few bytes; with more, fewer warps fit.
        bounds: &format!("__launch_bounds__({threads}, {})", WARPS_A_MULTIPROCESSOR * 32 / threads),
        params: &format!(
            "const __grid_constant__ FwdParams p, const __grid_constant__ KvParts parts{last_param}"
        ),
        call: &format!(
            "split::{function}<kSpec, kStored, {threads}, {warps}, {dependent}{}>({arguments});",
            match row_bytes {
                _ if folds => String::new(),
                0 => format!(", {in_shares}"),
                bytes => format!(", {in_shares}, {bytes}"),
            }
        ),
    };
    crate::source(entry.render(), || {
        [
            schedule::header(),
            header(),
            tree_mask::header(),
            fmha_core::lists::header(),
            fmha_core::masks::header(),
            fmha_core::second::header(),
        ]
    })
}

/// `fmha/kv_parts.h`: the types that merging kernels share with the host.
pub(crate) fn header() -> Header {
    let definitions = [KvParts::c_definition()];
    Header::shared("fmha/kv_parts.h", "fmha", &["fmha/tile_schedule.h"], &definitions)
}

#[cfg(test)]
mod tests {
    use fmha_core::{Dims, MaskSpec};

    use super::*;

    fn decode(batch: u32, heads: u32, seqlen_k: u32) -> FwdProblem {
        let dims = Dims::batch(batch).seqlens(1, seqlen_k).heads(heads, 1).head_dim(128);
        FwdProblem::batch(DType::Bf16, dims)
    }

    #[test]
    fn parts_depend_on_the_length_alone_and_are_at_most_128() {
        for (seqlen_k, expected) in [
            (0, 0),
            (511, 0),
            (512, 256),
            (32768, 256),
            (32769, 512),
            (1 << 20, 8192),
            (i32::MAX as u32, 1 << 24),
        ] {
            for (batch, heads) in [(1, 1), (64, 1), (1, 8)] {
                let keys = split_keys(&decode(batch, heads, seqlen_k), 128);
                assert_eq!(keys, expected, "{batch} sequences of {seqlen_k} keys, {heads} heads");
                assert!(keys == 0 || seqlen_k.div_ceil(keys as u32) <= MOST_PARTS);
            }
        }
        for block_n in [32, 64, 96, 128] {
            assert_eq!(split_keys(&decode(1, 1, 5000), block_n) % block_n, 0);
        }
    }

    #[test]
    fn which_calls_have_fixed_parts_depends_on_no_batch_and_no_number_of_queries() {
        let part = FIXED_KEYS.unsigned_abs();
        for (seqlen_k, keys) in [(1, 0), (part, 0), (part + 1, FIXED_KEYS), (1 << 20, FIXED_KEYS)] {
            for queries in [1, 4096] {
                let mut problem = decode(3, 8, seqlen_k);
                problem.dims.seqlen_q = queries;
                assert_eq!(fixed_keys(&problem, 128), keys, "{queries} queries, {seqlen_k} keys");
                assert_eq!(fixed_keys(&problem.clone().sink(true), 128), 0);
                assert_eq!(fixed_keys(&problem.clone().dtype_o(DType::E4m3Fn), 128), 0);
                let cut = Cut { keys, block_n: 128, fixed: true, shares: None };
                assert!(cut.num_parts(&problem) * part >= seqlen_k);
                let merging = Merging::new(&problem, cut, DType::Bf16, true);
                assert!(merging.folds, "sums of a row are added in an order of their own by each count");
            }
        }
    }

    /// A long query is computed in several launches, whose parts fit the workspace: every row block and every query
    /// occurs once.
    #[test]
    fn a_long_query_is_some_row_blocks_at_a_time() {
        for (heads, queries, pack_gqa, block_m) in
            [(1, 5000, false, 128), (3, 5000, true, 64), (8, 700, true, 128)]
        {
            let mut problem = decode(4, 24, 65536);
            (problem.dims.num_heads_kv, problem.dims.seqlen_q) = (24 / heads, queries);
            let cut = Cut { keys: 2048, block_n: 128, fixed: true, shares: None };
            let at_once = cut.rows_at_once(&problem, block_m, pack_gqa);
            assert!(
                at_once.queries < queries && cut.workspace_bytes(&problem, at_once.queries) < 2 * MOST_BYTES
            );
            let rows = at_once.blocks * block_m.unsigned_abs();
            assert_eq!(rows, at_once.queries * if pack_gqa { heads } else { 1 }, "whole queries");
            let short = Cut { fixed: false, ..cut }.rows_at_once(&problem, block_m, pack_gqa);
            assert_eq!(short.queries, queries, "parts by the longest sequence are all at once");
            let last = queries / at_once.queries * at_once.queries;
            let parts = cut.parts(&problem, last..queries, 0x1000);
            assert_eq!((parts.first_row as u32, parts.num_rows as u32), (last, queries - last));
        }
    }

    #[test]
    fn the_workspace_holds_every_part_and_they_lie_apart() {
        let problem = decode(3, 5, 700).mask(MaskSpec::CAUSAL);
        let mut tile = crate::sm100::choose_tile(&problem, "sm_100a", 148);
        (tile.split_keys, tile.shares) = (256, 0);
        let (cut, queries) = (tile.cut(&problem), problem.dims.seqlen_q);
        let parts = cut.parts(&problem, 0..queries, 0x1000);
        let rows = 3 * 5 * 3;
        assert!(parts.o.0 >= parts.lse.0 + rows * 4 && parts.lse.0 >= 0x1000 + 4);
        assert!(parts.o.0 + rows * 128 * 4 <= 0x1000 + cut.workspace_bytes(&problem, queries));
    }
}
