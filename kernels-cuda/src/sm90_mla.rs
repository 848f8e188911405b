//! Wide heads on Hopper: rows of Q and K up to 576 elements and of V up to 512. Latent attention (MLA, absorbed),
//! whose values are the first 512 elements of its keys, is one case.

pub mod recipe;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _};
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{Bias, DType, Dims, FwdProblem, KvLayout, Refusal, VLayout, Workspace, abi_spec, abi_struct};

use crate::operands::{refuse_faint_alibi, refuse_long_sequences, refuse_many_rows, stores_vectors, strides};
use crate::schedule::{self, TileSchedule};
use crate::split::Shares;
use crate::split::price::{PriceOfUnlike, in_waves};
use crate::wgmma::{self, OperandA, Sums, WgmmaShape};
use crate::{lists, split};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm90_mla";

/// Header that the kernel's entry includes.
pub const HEADER: &str = "fmha/sm90/mla/fwd.cuh";

/// Rows of a CTA: (query, head) pairs.
pub const ROWS: u32 = 64;
/// Keys of a block.
pub const KEYS: u32 = 64;

/// Most elements of a row of K, and in the next constant of V: those of latent attention.
pub(crate) const DIM_QK: u32 = 576;
pub(crate) const DIM_V: u32 = 512;

/// Head dimension up to which `sm90` computes a problem, of Q and K and of V.
pub(crate) const NARROW: u32 = 256;

/// Most CTAs among which all sequences' blocks of keys are divided in equal shares.
const MOST_SHARES: i32 = 1 << 16;

/// Threads of a CTA.
pub const NUM_THREADS: u32 = 384;

/// Columns of a chunk, the piece of a row that one swizzled tile in shared memory has.
const SPAN: i32 = 64;

/// Bytes of a chunk of 64 rows or keys.
const CHUNK_BYTES: i32 = SPAN * ROWS as i32 * 2;

abi_spec! {
    /// Tile of the kernel: how it computes.
    pub struct Sm90MlaTile {
        /// Whether TMA loads K and V, 64 keys at once, which must lie in one page; otherwise threads copy all rows.
        pub by_tma: bool = Takes::all().tuned(),
        /// Number of CTAs (1 or 2) with neighbouring tiles of rows that share the data that TMA loads.
        pub cluster: i32 = Takes::within(1, 2).tuned(),
        /// O is rescaled only when a maximum grew by more than this, in log2; 0: when it grew.
        pub lazy_rescale_log2: i32 = Takes::within(0, 11).tuned_over(&[0, 8]),
        /// Whether O is stored 16 bytes at a time, which needs rows that are multiples of 16 bytes and begin at
        /// such addresses; otherwise by elements.
        pub vector_store: bool,
        /// Whether V is the first elements of K's rows and is read once with them; otherwise V is read separately,
        /// even if it lies in K.
        pub v_in_k: bool = Takes::nothing(),
        /// Type of K and V in memory: Q's type, or FP8, which is converted on the way to shared memory.
        pub stored: DType = Takes::nothing(),
        /// Whether keys come from a token's list: a tile then has heads of one token and gathers the keys' rows.
        pub listed: bool = Takes::nothing(),
        /// Whether keys come from two caches: those of the first for a token, then those of the second.
        pub two_caches: bool = Takes::nothing(),
        /// Bytes of a key's row, 584 or 656, if the cache has rows of bytes; 0 if rows have elements of type `stored`.
        pub row_bytes: i32 = Takes::nothing(),
        /// Split-KV: keys of a part, a multiple of 64; a second kernel merges the parts. 0: a tile sees all keys.
        pub split_keys: i32 = Takes::multiples(64, 0, 1 << 24).tuned_over(&[0, 256, 512, 1024, 2048]),
        /// CTAs of a cluster that have the same rows and fold their parts of a split in shared memory, before the
        /// second kernel merges what is left: 1, 2, 4 or 8.
        pub fold_parts: i32 = Takes::within(1, 8).tuned_over(&[1, 2, 4, 8]),
        /// Number of CTAs that walk equal shares of all sequences' blocks, with `split_keys` keys each at least;
        /// 0: a CTA walks a tile, or a part of one.
        pub shares: i32 = Takes::within(0, MOST_SHARES),
    }
}

abi_struct! {
    /// Kernel argument that counts the tiles.
    pub struct MlaSchedule {
        /// Number of tiles of 64 rows of the longest query, rounded up to whole clusters.
        pub num_m_blocks: i32,
        /// Number of parts of the longest sequence's keys that are merged; a cluster that folds its parts counts as
        /// one.
        pub num_parts: i32,
        /// Number of tiles: for each part of each kv head of each sequence.
        pub num_tiles: i32,
        /// Most keys that a token attends to, if the kernel reads lists of keys.
        pub most_keys: i32,
    }
}

impl Sm90MlaTile {
    /// How the tile divides the keys into parts.
    #[must_use]
    pub const fn cut(&self) -> split::Cut {
        // Every token's list is divided into parts in the same way.
        let folded = self.fold_parts;
        let shares = Shares { count: self.shares.unsigned_abs(), block_m: ROWS, pack_gqa: true };
        split::Cut {
            keys: self.split_keys * folded,
            block_n: KEYS as i32 * folded,
            fixed: self.listed,
            shares: if self.shares > 0 { Some(shares) } else { None },
        }
    }

    /// Whether a CTA processes several tiles: those of its share; over lists of keys, if registers allow it, as in the
    /// device text's function of this name.
    #[must_use]
    pub const fn walks_tiles(&self, spec: &FwdSpec) -> bool {
        let walks_list = self.listed
            && !self.two_caches
            && !self.stored.is_fp8()
            && !spec.softcap
            && spec.dtype_o.size_bytes() == 2
            && self.vector_store;
        self.shares > 0 || walks_list
    }

    /// Number of CTAs for so many tiles, on a device of `num_sms` multiprocessors.
    #[must_use]
    pub fn grid(&self, spec: &FwdSpec, num_tiles: i32, num_sms: u32) -> u32 {
        let tiles = num_tiles.unsigned_abs();
        match self.shares {
            1.. => self.shares.unsigned_abs(),
            _ if self.walks_tiles(spec) => tiles.min(num_sms),
            _ => tiles,
        }
    }

    /// Sets one field from its name and value.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.set_field(name, value).map_err(|text| format!("tile {text}"))
    }

    /// Checks that the tile's way of loading works for the problem's keys.
    ///
    /// # Errors
    /// A text with the field and what is incompatible with it.
    pub fn check(&self, problem: &FwdProblem) -> Result<(), String> {
        self.check_fold()?;
        self.check_shares(problem)?;
        if !self.by_tma {
            return match self.cluster {
                ..=1 => Ok(()),
                cluster => Err(format!("tile cluster={cluster} with by_tma=0: a cluster loads by TMA")),
            };
        }
        if self.listed {
            return Err("tile by_tma=1 beside lists of keys: their rows are gathered one by one".to_owned());
        }
        if self.stored.is_fp8() {
            return Err(format!(
                "tile by_tma=1: a cache of {} is widened on its way, which TMA does not",
                self.stored
            ));
        }
        if let Some(page_size) = page_without_whole_boxes(problem) {
            return Err(format!(
                "tile by_tma=1: pages of {page_size} rows are no whole boxes of {KEYS}, as TMA brings them"
            ));
        }
        Ok(())
    }

    /// Checks that CTAs can fold their parts as the tile's fields say.
    fn check_fold(&self) -> Result<(), String> {
        let folded = self.fold_parts;
        if folded == 1 {
            return Ok(());
        }
        let why = if !folded.unsigned_abs().is_power_of_two() {
            "CTAs of a cluster are 1, 2, 4 or 8".to_owned()
        } else if self.split_keys == 0 {
            "split_keys=0 makes no parts".to_owned()
        } else if self.split_keys > (1 << 24) / folded {
            format!("split_keys={} are more than 2^24 keys together", self.split_keys)
        } else if self.cluster > 1 {
            format!("cluster={} has other CTAs", self.cluster)
        } else if self.listed {
            "parts of a list are not folded".to_owned()
        } else if !self.v_in_k {
            "the room for O is that of K with V in it".to_owned()
        } else {
            return Ok(());
        };
        Err(format!("tile fold_parts={folded}: {why}"))
    }

    /// Checks that CTAs can walk shares as the tile's fields say.
    fn check_shares(&self, problem: &FwdProblem) -> Result<(), String> {
        split::check_shares(self.shares, self.split_keys, self.listed)?;
        if self.shares > 0 && self.ctas_of_cluster() > 1 {
            return Err(format!(
                "tile shares={} with cluster={} and fold_parts={}: a CTA walks a share by itself",
                self.shares, self.cluster, self.fold_parts
            ));
        }
        if self.shares > 0 {
            self.has_registers_to_walk(problem)
                .map_err(|why| format!("tile shares={}: {why}", self.shares))?;
        }
        split::check(problem, self.cut())
    }

    /// Checks that registers allow a CTA to walk several parts.
    fn has_registers_to_walk(&self, problem: &FwdProblem) -> Result<(), String> {
        let score = &problem.score;
        if score.bias != Bias::None || !problem.code.is_empty() {
            return Err("a walk has no registers beside a bias or a function of scores".to_owned());
        }
        match (self.stored.is_fp8(), self.v_in_k, score.softcap) {
            (true, false, _) => Err(format!("a walk has no registers over K and V of {} apart", self.stored)),
            (true, _, Some(cap)) => {
                Err(format!("a walk has no registers over {} beside a soft-cap of {cap}", self.stored))
            }
            _ => Ok(()),
        }
    }

    /// Number of CTAs of a cluster.
    #[must_use]
    pub const fn ctas_of_cluster(&self) -> i32 {
        self.cluster * self.fold_parts
    }

    /// Dynamic shared memory of a CTA: Q, and two blocks of K, with P where K's rows leave no room for it; or one
    /// block of K, one of V and P. The entry asserts that the device agrees.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &FwdSpec) -> i32 {
        let (k, v) = (chunks(spec.head_dim_qk), 2 * chunks_of_half(spec));
        let blocks = if !self.v_in_k {
            k + v + 1
        } else if k > v {
            2 * k
        } else {
            2 * k + 1
        };
        // Scales of two blocks' rows, 16 bytes a row.
        let scales = if self.row_bytes > 0 { 2 * 16 * KEYS as i32 } else { 0 };
        // A maximum, a sum and two words for each row and part.
        let folded = if self.fold_parts > 1 { 16 * ROWS as i32 * self.fold_parts } else { 0 };
        (k + blocks) * CHUNK_BYTES + 2048 + scales + folded
    }

    /// Workspace: the parts of a split.
    #[must_use]
    pub fn workspace(&self, problem: &FwdProblem) -> Workspace {
        Workspace { bytes: self.cut().workspace_bytes(problem, problem.dims.seqlen_q), zeroed_bytes: 0 }
    }

    /// The tiles of a problem's maximal lengths.
    ///
    /// # Errors
    /// More tiles than a grid has.
    pub fn schedule(&self, problem: &FwdProblem) -> Result<MlaSchedule, String> {
        let num_parts = self.cut().num_parts(problem);
        let most_keys = problem.most_walked_keys().cast_signed();
        if problem.walks_lists() {
            let TileSchedule { num_tiles, num_m_blocks, .. } = lists::schedule(problem, ROWS, num_parts)?;
            return Ok(MlaSchedule { num_m_blocks, num_parts: num_parts as i32, num_tiles, most_keys });
        }
        let (units, num_m_blocks) = units(problem, self.cluster);
        let num_tiles =
            units.saturating_mul(u64::from(num_parts)).saturating_mul(self.fold_parts.unsigned_abs().into());
        if num_tiles > MAX_TILES {
            let Dims { batch, seqlen_q, num_heads_q, .. } = problem.dims;
            return Err(format!(
                "batch {batch}, seqlen_q {seqlen_q} and num_heads_q {num_heads_q} make {num_tiles} tiles, more than {MAX_TILES}"
            ));
        }
        Ok(MlaSchedule {
            num_m_blocks: num_m_blocks as i32,
            num_parts: num_parts as i32,
            num_tiles: num_tiles as i32,
            most_keys,
        })
    }
}

/// Chunks of a row of `dim` elements; zeros fill the last one.
const fn chunks(dim: i32) -> i32 {
    (dim + SPAN - 1) / SPAN
}

/// Number of chunks of V's columns, and so of O's, that a consumer warpgroup has.
const fn chunks_of_half(spec: &FwdSpec) -> i32 {
    (spec.head_dim_v + 2 * SPAN - 1) / (2 * SPAN)
}

/// Most tiles of a grid.
const MAX_TILES: u64 = (1 << 31) - 1;

/// Number of tiles before keys are split, and number of those of one kv head of a sequence, in whole clusters.
fn units(problem: &FwdProblem, cluster: i32) -> (u64, u64) {
    let Dims { batch, seqlen_q, num_heads_kv, .. } = problem.dims;
    let rows = u64::from(seqlen_q) * u64::from(problem.gqa_ratio());
    let num_m_blocks = rows.div_ceil(ROWS.into()).max(1).next_multiple_of(cluster.unsigned_abs().into());
    (u64::from(batch).saturating_mul(num_heads_kv.into()).saturating_mul(num_m_blocks), num_m_blocks)
}

/// Type of K and V in memory.
pub(crate) fn stored(problem: &FwdProblem) -> DType {
    if problem.cache.rows.is_some() {
        DType::E4m3Fn
    } else {
        problem.cache.dtype.unwrap_or(problem.dtypes.qk)
    }
}

/// Rows of a page, if they are not a multiple of a TMA box.
fn page_without_whole_boxes(problem: &FwdProblem) -> Option<u32> {
    match problem.layout.kv {
        KvLayout::Paged { page_size } if !page_size.is_multiple_of(KEYS) => Some(page_size),
        _ => None,
    }
}

/// Checks the conditions that Hopper's and Blackwell's kernels of wide rows have in common; a refusal names `kernel`.
/// FP8 caches are not checked here.
///
/// # Errors
/// The first fact that they do not take.
pub(crate) fn takes_wide_rows(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(kernel, reason));
    let Dims { head_dim_qk, head_dim_v, seqlen_q, .. } = problem.dims;
    if head_dim_qk > DIM_QK || head_dim_v > DIM_V {
        return refuse(format!(
            "head_dim_qk {head_dim_qk} with head_dim_v {head_dim_v} is larger than {DIM_QK} with {DIM_V}"
        ));
    }
    if head_dim_qk <= NARROW && head_dim_v <= NARROW && problem.cache.dtype.is_none() {
        return refuse(format!(
            "head_dim_qk {head_dim_qk} with head_dim_v {head_dim_v}: neither is larger than {NARROW}"
        ));
    }
    if problem.layout.v == VLayout::ColMajor {
        return refuse("v_layout col-major: rows of V are read".to_owned());
    }
    let (qk, v, o) = (problem.dtypes.qk, problem.dtypes.v, problem.dtypes.o);
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk {
        return refuse(format!("dtype_qk {qk} with dtype_v {v} is not one 16-bit type"));
    }
    if o.is_fp8() {
        return refuse(format!("dtype_o {o} is not of 16 or 32 bits"));
    }
    if problem.cache.tree_mask {
        return refuse(format!("tree_mask of {seqlen_q} queries"));
    }
    lists::takes_places(problem, kernel).map_err(|reason| Refusal::new(kernel, reason))?;
    if !problem.walks_caches() {
        problem.masks.refuse(kernel)?;
    }
    refuse_faint_alibi(problem, kernel)?;
    if problem.drops() || problem.dropout.write_keep_mask {
        return refuse(format!("dropout of p_drop {} is not taken", problem.dropout.p_drop));
    }
    if problem.mask.sink_columns > 0 && !problem.walks_lists() {
        return refuse(format!(
            "sink_columns {}: blocks of keys are those of a band",
            problem.mask.sink_columns
        ));
    }
    refuse_long_sequences(problem, kernel)?;
    refuse_many_rows(problem, 256, kernel)
}

/// Refuses strides that copies of 16 bytes and TMA do not support: those that are not a multiple of the number of
/// elements that `multiple` gives for the operand.
///
/// # Errors
/// The stride.
pub(crate) fn takes_strides(
    problem: &FwdProblem,
    kernel: &'static str,
    multiple: impl Fn(&str) -> i64,
) -> Result<(), Refusal> {
    let odd = |&(name, _, stride): &(&str, &str, i64)| stride % multiple(name) != 0 || stride >= 1 << 39;
    match strides(problem).find(odd) {
        None => Ok(()),
        Some((name, axis, stride)) => Err(Refusal::new(
            kernel,
            format!(
                "{name}.{axis} stride {stride} is not a multiple of {} below 2^39, as copies of 16 bytes and TMA need",
                multiple(name)
            ),
        )),
    }
}

/// Whether the kernel computes this problem, and if not, why.
///
/// # Errors
/// The first fact that it does not take.
pub fn accepts(problem: &FwdProblem) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    let Dims { head_dim_qk, head_dim_v, .. } = problem.dims;
    takes_wide_rows(problem, NAME)?;
    if let Some(cache) = problem.cache.dtype {
        if !matches!(cache, DType::E4m3Fn | DType::E5m2) {
            return refuse(format!("dtype_cache {cache} is not one of the 2 OCP types"));
        }
        if head_dim_qk % 16 != 0 || head_dim_v % 16 != 0 {
            return refuse(format!(
                "dtype_cache {cache} with head_dim_qk {head_dim_qk} and head_dim_v {head_dim_v}: both are not whole copies of 16"
            ));
        }
    }
    let of_fp8 = stored(problem).is_fp8();
    takes_strides(problem, NAME, |name| if name != "q" && of_fp8 { 16 } else { 8 })
}

/// Refuses, unless the caller names this kernel, FP8 caches with head dimensions that `sm90` supports in 16 bits:
/// `sm80` computes those.
///
/// # Errors
/// The head dimensions.
pub fn leave_narrow(problem: &FwdProblem) -> Result<(), String> {
    let Dims { head_dim_qk, head_dim_v, .. } = problem.dims;
    if head_dim_qk <= NARROW && head_dim_v <= NARROW {
        return Err(format!(
            "head_dim_qk {head_dim_qk} with head_dim_v {head_dim_v}: neither is larger than {NARROW}, and sm80 widens"
        ));
    }
    Ok(())
}

/// The tile for a problem that the kernel [`accepts`], on a device of `num_sms` multiprocessors.
#[must_use]
pub fn choose_tile(problem: &FwdProblem, num_sms: u32) -> Sm90MlaTile {
    let tile = choose_tile_in_parts(problem, num_sms);
    in_shares(problem, tile, num_sms).unwrap_or(tile)
}

/// The tile of [`choose_tile`] without shares.
#[must_use]
pub fn choose_tile_in_parts(problem: &FwdProblem, num_sms: u32) -> Sm90MlaTile {
    let listed = problem.walks_lists();
    // A tile's rows are the heads of one token, so keys are split by the number of tokens.
    let of_rows = |problem: &FwdProblem| split_keys(problem, units(problem, 1).0, KEYS, num_sms);
    let split_keys = if listed { of_rows(&lists::of_tokens(problem)) } else { of_rows(problem) };
    let v_in_k = problem.cache.v_in_k && shares_rows(problem.dims, listed);
    let parts = problem.dims.seqlen_k.div_ceil(split_keys.unsigned_abs().max(1));
    Sm90MlaTile {
        by_tma: !listed && !copies_rows(problem, split_keys),
        stored: stored(problem),
        cluster: 1,
        // P up to 2^8 is as exact in 16 bits as P up to 1, and f32 sums have room.
        lazy_rescale_log2: 8,
        v_in_k,
        listed,
        two_caches: problem.walks_caches(),
        row_bytes: lists::row_bytes(problem),
        vector_store: stores_vectors(problem),
        split_keys,
        // Pairs fold their parts faster than the merge reads them; more CTAs wait for each other longer. An odd number
        // of parts would need one more CTA, and so perhaps a second wave.
        fold_parts: if v_in_k && !listed && split_keys > 0 && parts.is_multiple_of(2) { 2 } else { 1 },
        shares: 0,
    }
}

/// Most queries of a sequence whose keys CTAs divide into equal shares: those of a cache.
const MOST_SHARED_QUERIES: u32 = 32;

/// The tile whose CTAs have equal shares of all sequences' blocks, if sequences may differ in length and its price is
/// lower.
fn in_shares(problem: &FwdProblem, tile: Sm90MlaTile, num_sms: u32) -> Option<Sm90MlaTile> {
    let dims = problem.dims;
    let may_be_shared = !tile.listed
        && !split::has_like_lengths(problem)
        && (2..=split::MOST_SCANNED).contains(&dims.batch)
        && dims.seqlen_q <= MOST_SHARED_QUERIES
        && split::may_be_cut(problem, KEYS);
    let mut shared = Sm90MlaTile {
        split_keys: KEYS.cast_signed(),
        fold_parts: 1,
        shares: num_sms.min(MOST_SHARES.unsigned_abs()).cast_signed(),
        ..tile
    };
    shared.by_tma = !copies_rows(problem, shared.split_keys);
    let units = units(problem, 1).0 as f64;
    let price =
        PriceOfUnlike { units, longest: dims.seqlen_k.div_ceil(KEYS).into(), at_once: num_sms.max(1).into() };
    let fixed = match tile.split_keys {
        0 => price.whole(),
        keys => price.parts(f64::from(dims.seqlen_k.div_ceil(keys.unsigned_abs()))),
    };
    // An FP8 cache must give the bits of the equal 16-bit cache, so both have the same parts: if a kernel for one has
    // no registers for shares, neither uses them.
    let narrow = Sm90MlaTile { stored: DType::E4m3Fn, by_tma: false, ..shared };
    let both_walk = narrow.has_registers_to_walk(problem).is_ok();
    (may_be_shared && both_walk && shared.check(problem).is_ok() && price.shares() < fixed).then_some(shared)
}

/// Whether V in K's rows is read once, together with K: shared memory then has two blocks. With rows of 512
/// elements P has no room in K's block, so without lists V is read separately.
const fn shares_rows(dims: Dims, listed: bool) -> bool {
    dims.head_dim_v == DIM_V && (dims.head_dim_qk == DIM_QK || listed && dims.head_dim_qk == DIM_V)
}

/// Whether threads copy rows of K one by one: for an FP8 cache, if a block of keys is not one TMA box, and if one
/// tile of rows reads all of a long V in K and is limited by memory, where copying whole rows is faster than
/// loading columns of 64 rows.
fn copies_rows(problem: &FwdProblem, split_keys: i32) -> bool {
    let Dims { seqlen_k, head_dim_qk, .. } = problem.dims;
    let one_tile = units(problem, 1).1 == 1;
    problem.cache.dtype.is_some()
        || page_without_whole_boxes(problem).is_some()
        || one_tile && split_keys == 0 && seqlen_k >= 2048 && problem.cache.v_in_k && head_dim_qk == DIM_QK
}

/// Keys of a part in blocks of `keys`, so that tiles, so many `units` of them before keys are split, come in as few
/// waves of `at_once` as their number allows; 0: all keys.
pub(crate) fn split_keys(problem: &FwdProblem, units: u64, keys: u32, at_once: u32) -> i32 {
    if split::splits(problem).is_err() {
        return 0;
    }
    let blocks = u64::from(problem.dims.seqlen_k.div_ceil(keys));
    let at_once = u64::from(at_once.max(1));
    let cost = |blocks_of_part: u64| in_waves(units, blocks, blocks_of_part, at_once);
    // Parts of one wave, of two and of more: beyond, tiles are so many that they come out even.
    let most_parts = (8 * at_once / units.max(1)).clamp(1, 256);
    let best =
        (1..=most_parts.min(blocks)).map(|parts| blocks.div_ceil(parts)).min_by_key(|&part| cost(part));
    match best {
        Some(part) if part < blocks => (part * u64::from(keys)) as i32,
        _ => 0,
    }
}

/// The kernel for a spec and a tile: arguments `FwdParams`, the tensor maps of K and V, [`MlaSchedule`], and over
/// lists of keys [`ListParams`](fmha_core::lists::ListParams), over two caches
/// [`TwoCachesParams`](fmha_core::second::TwoCachesParams).
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm90MlaTile) -> KernelSource {
    // The length of a part is a run-time argument: the compiled text depends only on whether there are parts.
    let tile = Sm90MlaTile { split_keys: tile.split_keys.min(KEYS as i32), ..*tile };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", &tile)];
    let (last_param, call) = if tile.two_caches {
        (lists::TWO_PARAM, "mla::fwd_lists<kSpec, kTile>(p, maps, schedule, caches)")
    } else if tile.listed {
        (lists::PARAM, "mla::fwd_lists<kSpec, kTile>(p, maps, schedule, lists)")
    } else if tile.shares > 0 {
        ("", "mla::fwd_shares<kSpec, kTile>(p, maps, schedule)")
    } else {
        ("", "mla::fwd<kSpec, kTile>(p, maps, schedule)")
    };
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: if tile.ctas_of_cluster() > 1 {
            "__cluster_dims__(mla::ctas_of_cluster(kTile), 1, 1) __launch_bounds__(mla::kNumThreads, 1)"
        } else {
            "__launch_bounds__(mla::kNumThreads, 1)"
        },
        params: &format!(
            "const __grid_constant__ FwdParams p, const __grid_constant__ mla::Maps maps, \
             const __grid_constant__ MlaSchedule schedule{last_param}"
        ),
        call: &format!(
            "static_assert(mla::kNumThreads == {NUM_THREADS} && sizeof(mla::Smem<kSpec, kTile>) <= {} && \
             mla::walks_tiles(kSpec, kTile) == {}, \
             \"host and device disagree\"); {call};",
            tile.smem_bytes(spec),
            tile.walks_tiles(spec)
        ),
    };
    let (dtype, half) = (spec.dtype_qk, chunks_of_half(spec) * SPAN);
    crate::source(entry.render(), move || {
        let sums = Sums::F32;
        let shapes = [
            WgmmaShape { dtype, n: 64, a: OperandA::Shared, sums },
            WgmmaShape { dtype, n: half, a: OperandA::Shared, sums },
            WgmmaShape { dtype, n: half, a: OperandA::Registers, sums },
        ];
        [
            wgmma::header(&shapes),
            schedule::header(),
            fmha_core::lists::header(),
            fmha_core::masks::header(),
            fmha_core::second::header(),
            host_header(),
        ]
    })
}

/// `fmha/sm90_mla_host.h`: the types that this file shares with the device.
fn host_header() -> Header {
    let definitions = [Sm90MlaTile::c_definition(), MlaSchedule::c_definition()];
    Header::shared("fmha/sm90_mla_host.h", "fmha", &["fmha/params.h", "fmha/spec.h"], &definitions)
}

#[cfg(test)]
mod tests {
    use fmha_core::{Append, CacheRows, QLayout, Strides};

    use super::*;

    fn latent(batch: u32, heads: u32, seqlen_k: u32) -> FwdProblem {
        let dims = Dims::batch(batch).seqlens(1, seqlen_k).heads(heads, 1).head_dims(DIM_QK, DIM_V);
        let mut problem = FwdProblem::batch(DType::Bf16, dims);
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        problem
    }

    #[test]
    fn what_is_not_taken_is_refused_with_its_number() {
        assert!(accepts(&latent(2, 16, 100)).is_ok());
        let mut appended = latent(2, 16, 100);
        appended.cache.append = Some(Append::batch(&appended, 1));
        assert!(accepts(&appended).is_ok());
        type Change = fn(&mut FwdProblem);
        let taken: [Change; 6] = [
            |p| (p.dims.head_dim_qk, p.dims.head_dim_v, p.cache.dtype) = (128, 128, Some(DType::E4m3Fn)),
            |p| p.cache.dtype = Some(DType::E4m3Fn),
            |p| p.cache.v_in_k = false,
            |p| p.dims.head_dim_v = 256,
            |p| p.score.softcap = Some(30.0),
            |p| (p.dims.head_dim_qk, p.dims.head_dim_v) = (16, 257),
        ];
        for change in taken {
            let mut problem = latent(2, 16, 100);
            change(&mut problem);
            assert!(accepts(&problem).is_ok(), "{:?}", accepts(&problem));
        }
        let refused: [(&str, Change); 8] = [
            ("head_dim_v 256: neither", |p| (p.dims.head_dim_qk, p.dims.head_dim_v) = (256, 256)),
            ("head_dim_v 520", |p| p.dims.head_dim_v = 520),
            ("v_layout col-major", |p| p.layout.v = VLayout::ColMajor),
            ("dtype_cache e4m3fnuz", |p| p.cache.dtype = Some(DType::E4m3Fnuz)),
            ("k.seq stride 584", |p| (p.cache.dtype, p.strides.k.seq) = (Some(DType::E4m3Fn), 584)),
            ("sink_columns 4", |p| p.mask.sink_columns = 4),
            ("k.seq stride 580", |p| p.strides.k.seq = 580),
            ("dtype_o e4m3fn", |p| p.dtypes.o = DType::E4m3Fn),
        ];
        for (words, change) in refused {
            let mut problem = latent(2, 16, 100);
            change(&mut problem);
            let refusal = accepts(&problem).unwrap_err().to_string();
            assert!(refusal.contains(words) && refusal.contains(NAME), "{words}: {refusal}");
        }
        assert_eq!(latent(1, 1, 1).layout.v, VLayout::RowMajor);
    }

    #[test]
    fn parts_fill_one_wave_where_there_are_few_tiles_and_are_none_where_there_are_many() {
        for (batch, heads, seqlen_k, parts) in [
            // The expected numbers are parts that are merged: pairs of CTAs fold theirs if the number of parts is even.
            (1, 16, 32768, 64),
            (16, 16, 8192, 4),
            (44, 16, 8192, 3),
            (64, 16, 8192, 1),
            (66, 128, 8192, 1),
            (132, 16, 8192, 1),
        ] {
            let problem = latent(batch, heads, seqlen_k);
            let tile = choose_tile(&problem, 132);
            let schedule = tile.schedule(&problem).unwrap();
            assert_eq!(schedule.num_parts, parts, "{batch} sequences of {seqlen_k} keys: {tile:?}");
            assert!(schedule.num_tiles <= 132);
        }
    }

    #[test]
    fn unlike_sequences_are_walked_in_shares_of_all_multiprocessors() {
        for (batch, heads, seqlen_k) in [(8, 16, 65536), (64, 16, 65536), (16, 128, 65536), (66, 128, 8192)] {
            let like = latent(batch, heads, seqlen_k);
            let mut unlike = like.clone();
            unlike.layout.seqused_k = true;
            let mut paged = unlike.clone();
            paged.layout.kv = KvLayout::Paged { page_size: 64 };
            let mut narrow = unlike.clone();
            narrow.cache.dtype = Some(DType::E4m3Fn);
            for problem in [unlike, paged, narrow] {
                let tile = choose_tile(&problem, 132);
                assert_eq!((tile.shares, tile.split_keys, tile.fold_parts), (132, 64, 1), "{problem:?}");
                assert_eq!(tile.check(&problem), Ok(()));
                assert_eq!(tile.grid(&FwdSpec::of(&problem), 1, 132), 132);
            }
            assert_eq!(choose_tile(&like, 132).shares, 0, "all of a length: {batch} of {seqlen_k}");
        }
        for (batch, seqlen_q, seqlen_k) in [(1, 1, 65536), (1025, 1, 65536), (8, 33, 65536), (8, 1, 127)] {
            let mut problem = latent(batch, 16, seqlen_k);
            (problem.dims.seqlen_q, problem.layout.seqused_k) = (seqlen_q, true);
            assert_eq!(choose_tile(&problem, 132).shares, 0, "{batch} of {seqlen_q} and {seqlen_k}");
        }
    }

    #[test]
    fn shares_are_refused_by_name_beside_what_a_walk_does_not_take() {
        let mut problem = latent(8, 16, 65536);
        problem.layout.seqused_k = true;
        let tile = choose_tile(&problem, 132);
        type Change = fn(&mut Sm90MlaTile);
        let refused: [(&str, Change); 3] = [
            ("shares=132 with split_keys=0", |tile| tile.split_keys = 0),
            ("shares=132 with cluster=2 and fold_parts=1", |tile| tile.cluster = 2),
            ("shares=132 with cluster=1 and fold_parts=2", |tile| tile.fold_parts = 2),
        ];
        for (words, change) in refused {
            let mut changed = Sm90MlaTile { by_tma: true, ..tile };
            change(&mut changed);
            let text = changed.check(&problem).unwrap_err();
            assert!(text.contains(words), "{words}: {text}");
        }
        let mut biased = problem.clone();
        biased.score.bias = Bias::Alibi { per_batch: false };
        assert!(
            tile.check(&biased).unwrap_err().contains("shares=132: a walk has no registers beside a bias")
        );
        assert_eq!(choose_tile(&biased, 132).shares, 0);
        let mut narrow = problem.clone();
        (narrow.cache.dtype, narrow.score.softcap) = (Some(DType::E4m3Fn), Some(30.0));
        assert_eq!(choose_tile(&narrow, 132).shares, 0);
        let asked = Sm90MlaTile { stored: DType::E4m3Fn, by_tma: false, ..tile };
        assert!(asked.check(&narrow).unwrap_err().contains("beside a soft-cap of 30"));
        // The 16-bit twin has no shares by default either, but may have shares if they are asked for.
        narrow.cache.dtype = None;
        assert_eq!(choose_tile(&narrow, 132).shares, 0);
        tile.check(&narrow).unwrap();
    }

    fn latent_lists(batch: u32, tokens: u32, heads: u32, topk: u32) -> FwdProblem {
        let mut problem = latent(batch, heads, 65536);
        problem.dims.seqlen_q = tokens;
        let lists = fmha_core::KeyLists::new(&problem, topk);
        problem.lists(lists)
    }

    #[test]
    fn lists_are_taken_beside_what_needs_no_position_and_other_rows_are_refused_by_name() {
        type Change = fn(&mut FwdProblem);
        let taken: [Change; 6] = [
            |p| p.cache.dtype = Some(DType::E4m3Fn),
            |p| p.score.sink = true,
            |p| p.score.softcap = Some(30.0),
            |p| p.mask = fmha_core::MaskSpec::CAUSAL,
            |p| p.dims.head_dim_qk = 512,
            |p| p.cache.v_in_k = false,
        ];
        for change in taken {
            let mut problem = latent_lists(2, 3, 128, 2048);
            change(&mut problem);
            assert!(accepts(&problem).is_ok(), "{:?}", accepts(&problem));
            let tile = choose_tile(&problem, 132);
            assert!(tile.listed && !tile.by_tma && tile.v_in_k == problem.cache.v_in_k, "{tile:?}");
            assert_eq!(tile.check(&problem), Ok(()));
            let asked = Sm90MlaTile { by_tma: true, ..tile };
            assert!(asked.check(&problem).unwrap_err().contains("by_tma=1 beside lists of keys"));
            assert!(tile.smem_bytes(&FwdSpec::of(&problem)) <= 227 << 10);
        }
        let refused: [(&str, Change); 4] = [
            ("bias Alibi { per_batch: false } beside indices of topk 2048", |p| {
                p.score.bias = fmha_core::Bias::Alibi { per_batch: false };
            }),
            ("v_layout col-major", |p| p.layout.v = VLayout::ColMajor),
            ("dtype_cache e4m3fnuz", |p| p.cache.dtype = Some(DType::E4m3Fnuz)),
            ("head_dim_v 128: neither", |p| (p.dims.head_dim_qk, p.dims.head_dim_v) = (128, 128)),
        ];
        for (words, change) in refused {
            let mut problem = latent_lists(2, 3, 128, 2048);
            change(&mut problem);
            let refusal = accepts(&problem).unwrap_err().to_string();
            assert!(refusal.contains(words) && refusal.contains(NAME), "{words}: {refusal}");
        }
    }

    #[test]
    fn rows_of_bytes_are_taken_where_pages_begin_on_copies() {
        let problem = |rows: CacheRows, page_size| {
            let dims = Dims { head_dim_qk: rows.head_dim_qk(), ..latent(2, 128, 65536).dims };
            let layout = KvLayout::Paged { page_size };
            let mut problem = FwdProblem::new(QLayout::Batch, layout, DType::Bf16, dims);
            problem = problem.v_in_k(true).cache_rows(rows);
            problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
            problem.strides.v = problem.strides.k;
            problem
        };
        for rows in [CacheRows::Bytes656, CacheRows::Bytes584] {
            let every = problem(rows, 64);
            let lists = fmha_core::KeyLists::new(&every, 2048);
            for (problem, two_caches) in [(every.clone().lists(lists), false), (every.clone(), true)] {
                let problem = problem.validate().unwrap();
                accepts(&problem).unwrap();
                let tile = choose_tile(&problem, 132);
                assert_eq!((tile.listed, tile.two_caches, tile.v_in_k), (true, two_caches, true), "{tile:?}");
                assert_eq!(tile.row_bytes.unsigned_abs(), rows.row_bytes());
                assert!(tile.smem_bytes(&FwdSpec::of(&problem)) <= 227 << 10);
            }
        }
        accepts(&problem(CacheRows::Bytes656, 5)).unwrap();
        let refusal = accepts(&problem(CacheRows::Bytes584, 5)).unwrap_err().to_string();
        assert!(refusal.contains("k.batch stride 2920 is not a multiple of 16"), "{refusal}");
        let refusal = crate::sm80::accepts(&problem(CacheRows::Bytes584, 5), true).unwrap_err().to_string();
        assert!(refusal.contains("k.batch stride 2920 is not a multiple of 16 bytes"), "{refusal}");
    }

    #[test]
    fn lists_have_a_tile_for_64_heads_of_each_token_and_parts_where_tokens_are_few() {
        for (batch, tokens, heads, parts, tiles) in [
            (1, 4096, 128, 1, 8192),
            (1, 4096, 16, 1, 4096),
            (128, 1, 128, 1, 256),
            (1, 1, 128, 32, 64),
            (2, 3, 70, 11, 132),
        ] {
            let problem = latent_lists(batch, tokens, heads, 2048);
            let schedule = choose_tile(&problem, 132).schedule(&problem).unwrap();
            assert_eq!(
                (schedule.num_parts, schedule.num_tiles),
                (parts, tiles),
                "{batch} x {tokens} x {heads}"
            );
        }
    }

    #[test]
    fn rows_are_copied_where_one_tile_of_them_reads_long_keys_once() {
        for (batch, heads, seqlen_k, by_tma) in
            [(132, 16, 4096, false), (66, 128, 8192, true), (16, 16, 8192, true), (132, 16, 130, true)]
        {
            let tile = choose_tile(&latent(batch, heads, seqlen_k), 132);
            assert_eq!(tile.by_tma, by_tma, "{batch} of {heads} heads");
        }
    }

    #[test]
    fn boxes_of_tma_lie_in_one_page() {
        for (page_size, are_whole) in [(1, false), (16, false), (96, false), (64, true), (192, true)] {
            let mut problem = latent(1, 128, 100);
            problem.layout.kv = KvLayout::Paged { page_size };
            let tile = choose_tile(&problem, 132);
            assert_eq!(tile.by_tma, are_whole, "pages of {page_size}");
            assert_eq!(tile.check(&problem), Ok(()));
            let asked = Sm90MlaTile { by_tma: true, ..tile };
            assert_eq!(asked.check(&problem).is_ok(), are_whole, "pages of {page_size}");
        }
    }
}
