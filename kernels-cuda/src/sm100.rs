//! The Blackwell forward kernel: its tile, its schedule, its entry.

use std::borrow::Cow;

use fmha_core::abi::AbiLiteral as _;
use fmha_core::fields::Takes;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::{FwdSpec, KvKind};
use fmha_core::{
    Bias, BlockFormat, DType, FwdProblem, MaskKind, Refusal, VLayout, Workspace, abi_spec, cache_update,
    scale_params,
};

use crate::maps::stored_types;
use crate::operands::{
    has_odd_pages, keys_of_v_begin_anywhere, page_keys, stores_vectors, strides, swizzle_span,
};
use crate::round_up;
use crate::schedule::{self, TileOrder, TileSchedule, UnitOfWork, WORK_BYTES, WORK_SLOTS};
use crate::{sm90, split, tile_list, tree_mask};

mod check;
mod few;
pub mod modelled;
pub mod recipe;
pub mod units;

pub use few::ways as ways_of_few;

pub use crate::sm90::MAX_SMEM_BYTES;

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm100";

/// Header that the kernel's entry includes.
pub const HEADER: &str = "fmha/sm100/fwd/fwd.cuh";

/// Device header of the kernel under masks as data (tensors).
const MASKED_HEADER: &str = "fmha/sm100/fwd/fwd_masked.cuh";
/// Device header of the kernel over scales of blocks (MXFP8, NVFP4).
const SCALED_HEADER: &str = "fmha/sm100/fwd/fwd_scaled.cuh";
/// Device header of the kernel under a tree mask.
const TREE_HEADER: &str = "fmha/sm100/fwd/fwd_tree.cuh";

/// Architectures that the kernel is compiled for.
pub const ARCHS: [&str; 3] = ["sm_100a", "sm_103a", "sm_110a"];

/// Architectures whose `tcgen05.ld` reduces.
pub const REDUCING_ARCHS: [&str; 2] = ["sm_103a", "sm_110a"];

/// Architecture whose special-function units compute twice as many exponentials a clock.
pub const FAST_EXP_ARCH: &str = "sm_103a";

/// Columns of tensor memory, all of which one CTA allocates.
pub const TMEM_COLUMNS: i32 = 512;

abi_spec! {
    /// Tile of the Blackwell kernel: its tuning parameters.
    pub struct Sm100Tile {
        /// Query rows of a CTA: 128 or 256, 128 to a softmax warpgroup.
        pub block_m: i32 = Takes::among(&[128, 256]).tuned(),
        /// Keys of a block: a multiple of 32 up to 128.
        pub block_n: i32 = Takes::multiples(32, 64, 128).tuned(),
        /// Blocks of K or V in shared memory at a time.
        pub stages: i32 = Takes::within(1, 16).tuned_over(&[2, 3, 4, 5, 6, 8]),
        /// Order in which CTAs take tiles.
        pub order: TileOrder = Takes::all().tuned(),
        /// O is rescaled only if a maximum grew by more than this, in log2; with 0, if it grew at all.
        pub lazy_rescale_log2: i32 = Takes::within(0, 11).tuned_over(&[0, 8]),
        /// Number of pairs, of each 16 pairs of exponentials, that are computed as polynomials on the multiply-add
        /// pipe.
        pub exp2_polynomial_pairs: i32 = Takes::within(0, 16).tuned_over(&[0, 1, 2, 3, 4, 6]),
        /// Whether the loads of S from tensor memory also find its maximum, on sm_103a and sm_110a.
        pub load_max: bool = Takes::all().tuned(),
        /// Whether rows are (query, head of a kv head's group) pairs, so that a short query fills a tile.
        pub pack_gqa: bool = Takes::all().tuned(),
        /// Whether O is stored 16 bytes at a time; otherwise by elements.
        pub vector_store: bool,
        /// 0: TMA loads Q, K and V. Otherwise two warps copy this many bytes at a time, which must divide every
        /// stride and address of Q, K and V: 16, 8, 4, or fewer (by elements).
        pub copy_bytes: i32 = Takes::among(&[0, 1, 2, 4, 8, 16]),
        /// Split-KV: keys of a part, a multiple of `block_n`; a second kernel merges the parts. 0: a tile
        /// sees all keys.
        pub split_keys: i32 = Takes::multiples(32, 0, 1 << 24).tuned_over(&[0, 256, 512, 1024]),
        /// Number of CTAs (1 or 2) whose tensor cores compute as one; each has query tiles of its own and half of
        /// every block of keys.
        pub cluster: i32 = Takes::within(1, 2).tuned(),
        /// Whether the CTAs of a cluster have neighbouring heads of a kv head's group; otherwise neighbouring query
        /// rows.
        pub cluster_heads: bool = Takes::nothing(),
        /// Whether the grid may start while the one before it in the stream ends (programmatic dependent launch).
        /// It sets up its barriers first, and then waits for the other grid's writes.
        pub dependent_launch: bool = Takes::all().tuned(),
        /// Whether, with `pack_gqa`, a group's heads do not divide a query tile's 128 rows: the tile then has whole
        /// groups, and its remaining rows are padding.
        pub whole_groups: bool = Takes::nothing(),
        /// Keys of a page that one TMA instruction loads, a multiple of 8; 0: the keys of a block lie in a row, or are
        /// copied.
        pub page_keys: i32 = Takes::nothing(),
        /// Number of CTAs that walk equal shares of all tiles' blocks, with `split_keys` keys each at least;
        /// 0: a CTA walks a tile, or a part of one.
        pub shares: i32 = Takes::within(0, 1 << 16),
        /// Whether parts, with `split_keys`, have a fixed number of keys, counted from each sequence's first;
        /// otherwise the number follows from the longest sequence.
        pub fixed_parts: bool = Takes::all(),
        /// Number of elements of a row of Q, K and P, and of keys of V, that share a scale: 32 for MXFP8, 16 for NVFP4;
        /// 0 without scales.
        pub scale_block: i32 = Takes::nothing(),
    }
}

impl Sm100Tile {
    /// Query tiles of 128 rows, a softmax warpgroup each.
    #[must_use]
    pub const fn num_q_tiles(&self) -> i32 {
        self.block_m / 128
    }

    /// The tile in a spec's table for single CTAs in place of pairs of CTAs: for few rows, where copies replace TMA,
    /// and where rows must have the bits of calls that only single CTAs compute.
    #[must_use]
    pub fn alone(self, spec: &FwdSpec) -> Self {
        if self.cluster == 1 {
            return self;
        }
        let tile = Self { block_n: LONE_BLOCK_N, cluster: 1, ..self };
        Self { stages: most_stages(spec, &tile), ..tile }
    }

    /// The tile of a spec's table over scales of so many elements: a tile for single CTAs, with the most keys a block
    /// for which tensor memory has room beside scales.
    #[must_use]
    pub fn with_scales(self, spec: &FwdSpec, scale_block: i32) -> Self {
        let most_keys = if self.cluster > 1 { TMEM_COLUMNS / 4 } else { self.block_n };
        let of = |block_m, block_n| Self { scale_block, cluster: 1, block_m, block_n, stages: 2, ..self };
        let fits = |tile: &Self| {
            tile.tmem_columns(spec) <= TMEM_COLUMNS
                && tile.smem_bytes(spec) <= MAX_SMEM_BYTES
                && tile.check_transposition(spec).is_ok()
        };
        // A step of a product of pairs has 64 keys.
        let keys = || {
            let whole = |keys: &i32| *keys <= most_keys && (scale_block != 16 || keys % 64 == 0);
            [128, 96, 64].into_iter().filter(whole)
        };
        let rows = [self.block_m, 128].into_iter();
        let tile = rows.flat_map(|rows| keys().map(move |keys| of(rows, keys))).find(fits);
        let tile = tile.unwrap_or(of(128, if scale_block == 16 { 64 } else { 32 }));
        Self { stages: most_stages(spec, &tile), ..tile }
    }

    /// Whether two elements share a byte, as in NVFP4.
    #[must_use]
    pub const fn has_pairs(&self) -> bool {
        self.scale_block == 16
    }

    /// Whether pairs of V lie along its rows, while products read pairs of keys: a warp transposes each block.
    #[must_use]
    pub fn transposes_v(&self, spec: &FwdSpec) -> bool {
        self.has_pairs() && spec.v_layout == VLayout::RowMajor
    }

    /// Checks that a lane has registers for its part of a block of V that it transposes.
    ///
    /// # Errors
    /// A text with the keys of a block, and the registers.
    fn check_transposition(&self, spec: &FwdSpec) -> Result<(), String> {
        // A thread of a warp takes units of 8 keys and 16 elements of the head, 16 registers each.
        let units = self.block_n / 8 * (sm90::padded_dim(spec.head_dim_v) / 16);
        let registers = (units + 31) / 32 * 16;
        let most = if self.num_q_tiles() == 2 { 48 } else { 64 };
        if self.transposes_v(spec) && registers > most {
            return Err(format!(
                "block_n={} block_m={} with rows of pairs of head_dim_v {}: a lane transposes {registers} registers, \
                 which are more than {most}",
                self.block_n, self.block_m, spec.head_dim_v
            ));
        }
        Ok(())
    }

    /// Bytes or elements of a row of Q and K in shared memory: where pairs share bytes, whole steps of a product.
    pub(crate) const fn row_of_qk(&self, spec: &FwdSpec) -> i32 {
        if self.has_pairs() { bytes_of_pairs(spec.head_dim_qk) } else { sm90::padded_dim(spec.head_dim_qk) }
    }

    /// Bytes or elements that one column of V has for the keys of a block.
    const fn keys_in_column(&self) -> i32 {
        if self.has_pairs() { self.block_n / 2 } else { self.block_n }
    }

    /// Adapts the tile to masks as data: its rows have one head, and its key blocks come from a list. Lists differ in
    /// length, so tiles are taken dynamically. Tile sizes match the sizes of the caller's block lists where they can.
    fn take_lists(&mut self, problem: &FwdProblem, spec: &FwdSpec) {
        *self = self.alone(spec);
        (self.pack_gqa, self.split_keys, self.order) = (false, 0, TileOrder::Dynamic);
        self.vector_store = stores_vectors(problem);
        if let Some(lists) = problem.masks.block_lists {
            let divides = |keys: &i32| lists.block_k.is_multiple_of(keys.unsigned_abs());
            let may_be = |keys: &i32| *keys <= self.block_n && (!self.has_pairs() || keys % 64 == 0);
            let met = [128, 96, 64].into_iter().filter(may_be).find(divides);
            self.block_n = met.unwrap_or(self.block_n);
            if lists.block_q < 256 {
                self.block_m = 128;
            }
        }
        self.stages = most_stages(spec, self);
    }

    /// Threads of a CTA: the softmax warpgroups, one warpgroup for correction and stores, and one of single-warp
    /// roles.
    #[must_use]
    pub const fn num_threads(&self) -> i32 {
        128 * (self.num_q_tiles() + 2)
    }

    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    #[must_use]
    pub fn smem_bytes(&self, spec: &FwdSpec) -> i32 {
        self.stages * self.slot_bytes(spec) + self.fixed_smem_bytes(spec)
    }

    /// A slot of the ring of K and V blocks.
    fn slot_bytes(&self, spec: &FwdSpec) -> i32 {
        let (k, v) = (
            tile_bytes(self.block_n / self.cluster, self.row_of_qk(spec), spec.dtype_qk),
            tile_bytes(self.keys_in_column(), sm90::padded_dim(spec.head_dim_v) / self.cluster, spec.dtype_v),
        );
        let rows = if self.transposes_v(spec) { self.block_n * bytes_of_pairs(spec.head_dim_v) } else { 0 };
        k.max(v).max(rows)
    }

    /// Bytes that do not grow with the stages: Q, statistics, work, barriers.
    const fn fixed_smem_bytes(&self, spec: &FwdSpec) -> i32 {
        let tiles = self.num_q_tiles();
        let q = tiles * tile_bytes(128, self.row_of_qk(spec), spec.dtype_qk);
        let scales = round_up(512 * self.scale_tiles(spec), 1024);
        let stats = tiles * 2 * 128 * 4;
        // Barriers: those of S and P, of the last tile's O, of the slots of work, of the zero role, and of a pair's
        // tile index.
        let barriers = 8 * (5 * tiles + 3 * self.stages + 3 * 2 + 1 + 2 * WORK_SLOTS + 2 + 2);
        let work = WORK_SLOTS * WORK_BYTES + 4 * 4;
        scales + q + round_up(stats + barriers + work, 1024)
    }

    /// Number of tiles in shared memory that have scales, each for 128 rows.
    const fn scale_tiles(&self, spec: &FwdSpec) -> i32 {
        let [qk, v, p] = self.words_of_scales(spec);
        let slot = if qk > v { qk } else { v };
        let of_p = if self.has_pairs() { 2 * p } else { p };
        if self.scale_block == 0 { 0 } else { self.num_q_tiles() * qk + self.stages * slot + of_p }
    }

    /// Columns of tensor memory for S, O and scales; scales of K and V blocks have two buffers each.
    #[must_use]
    pub const fn tmem_columns(&self, spec: &FwdSpec) -> i32 {
        let [qk, v, p] = self.words_of_scales(spec);
        // P in E2M1 has scales of its own in each score slot.
        let of_p = if self.has_pairs() { 2 * p } else { self.num_q_tiles() };
        let scales = 4 * (self.num_q_tiles() * qk + 2 * qk + 2 * v + of_p);
        let scales = if self.scale_block == 0 { 0 } else { scales };
        2 * self.block_n + self.num_q_tiles() * sm90::padded_dim(spec.head_dim_v) + scales
    }

    /// Words of four scales that a row of Q or K has, tiles of 128 columns of a block of V, and words of a row of P.
    pub(crate) const fn words_of_scales(&self, spec: &FwdSpec) -> [i32; 3] {
        let (qk, v) = (sm90::padded_dim(spec.head_dim_qk), (sm90::padded_dim(spec.head_dim_v) + 127) / 128);
        if self.has_pairs() {
            let p = self.block_n / 64;
            [(spec.head_dim_qk + 63) / 64, v * p, p]
        } else {
            [(qk + 127) / 128, v, 1]
        }
    }

    /// The order of tiles for a problem's maximal lengths.
    ///
    /// # Errors
    /// More tiles than a schedule counts.
    pub fn schedule(&self, problem: &FwdProblem) -> Result<TileSchedule, String> {
        let (heads, row_blocks) = if self.cluster_heads { (self.cluster, 1) } else { (1, self.cluster) };
        TileSchedule::new(
            problem,
            UnitOfWork {
                rows: self.rows_of_tile(problem) * row_blocks,
                heads,
                pack_gqa: self.pack_gqa,
                kv_parts: self.cut(problem).num_parts(problem) as i32,
            },
        )
    }

    /// How the tile divides the keys of sequences into parts.
    #[must_use]
    pub fn cut(&self, problem: &FwdProblem) -> split::Cut {
        let shares = (self.shares > 0).then(|| split::Shares {
            count: self.shares.unsigned_abs(),
            block_m: self.rows_of_tile(problem).unsigned_abs(),
            pack_gqa: self.pack_gqa,
        });
        split::Cut { keys: self.split_keys, block_n: self.block_n, fixed: self.fixed_parts, shares }
    }

    /// Number of queries whose parts lie in the workspace at a time.
    #[must_use]
    pub fn rows_at_once(&self, problem: &FwdProblem) -> split::RowsAtOnce {
        self.cut(problem).rows_at_once(problem, self.rows_of_tile(problem), self.pack_gqa)
    }

    /// Makes a row's bits depend on its own sequence alone: no pairs of CTAs, which have other blocks of keys, and
    /// parts with a fixed number of keys if a sequence may be long enough for several.
    #[must_use]
    pub fn batch_invariant(self, problem: &FwdProblem) -> Self {
        let tile = Self { split_keys: 0, shares: 0, fixed_parts: false, ..self.alone(&spec_of(problem)) };
        let whole = tile_list::serve(problem) || problem.block_scales.is_some();
        let keys = if whole { 0 } else { split::fixed_keys(problem, tile.block_n) };
        if keys == 0 {
            return tile;
        }
        // Row blocks are launched in several steps, and only the first finds the counter zero, so no counter is used.
        Self {
            split_keys: keys,
            fixed_parts: true,
            order: TileOrder::Static,
            dependent_launch: false,
            ..tile
        }
    }

    /// Rows of a tile that are rows of a sequence.
    #[must_use]
    pub fn rows_of_tile(&self, problem: &FwdProblem) -> i32 {
        let ratio = problem.gqa_ratio().max(1).cast_signed();
        if self.whole_groups { self.block_m / ratio * ratio } else { self.block_m }
    }

    /// Sets the fields that follow from the others, from the number of query heads per kv head, and from the page
    /// size.
    pub fn place(&mut self, problem: &FwdProblem) {
        self.whole_groups = self.pack_gqa && !128_u32.is_multiple_of(problem.gqa_ratio().max(1));
        self.page_keys = if self.copy_bytes == 0 { page_keys(problem, self.block_n) } else { 0 };
        // Rows of parts have the kernel's own layout; rows of O that do not fit vectors are stored by elements,
        // whatever the user asked.
        self.vector_store = self.split_keys > 0 || self.vector_store && stores_vectors(problem);
    }

    /// Number of CTAs to launch.
    #[must_use]
    pub fn grid(&self, schedule: &TileSchedule, num_sms: u32) -> u32 {
        if self.shares > 0 {
            return self.shares.unsigned_abs();
        }
        let tiles = schedule.num_tiles.max(1).unsigned_abs();
        let cluster = self.cluster.unsigned_abs();
        cluster * if self.order == TileOrder::Single { tiles } else { tiles.min(num_sms / cluster) }
    }

    /// Workspace: the tile counter, zero before each launch, and the parts of a split.
    #[must_use]
    pub fn workspace(&self, problem: &FwdProblem, schedule: &TileSchedule, num_sms: u32) -> Workspace {
        let workers = self.grid(schedule, num_sms) / self.cluster.unsigned_abs();
        let zeroed_bytes = schedule.counter_bytes(self.order, workers);
        let parts = self.cut(problem).workspace_bytes(problem, self.rows_at_once(problem).queries);
        Workspace { bytes: parts.max(zeroed_bytes), zeroed_bytes }
    }

    /// The box of the tensor map of Q: (dim, heads of a group, rows, kv heads, batch).
    #[must_use]
    pub const fn q_box(&self, spec: &FwdSpec, gqa_ratio: i32) -> [i32; 5] {
        let heads = if self.pack_gqa { gqa_ratio } else { 1 };
        let dim = swizzle_span(self.row_of_qk(spec), spec.dtype_qk);
        [dim, heads, 128 / heads, 1, 1]
    }

    /// Number of keys that one TMA instruction loads: a whole block, or a page's part of it.
    const fn keys_of_box(&self) -> i32 {
        if self.page_keys > 0 { self.page_keys } else { self.block_n }
    }

    /// The box of the tensor map of K: (dim, keys, heads, batch or page).
    #[must_use]
    pub const fn k_box(&self, spec: &FwdSpec) -> [i32; 4] {
        let dim = swizzle_span(self.row_of_qk(spec), spec.dtype_qk);
        [dim, self.keys_of_box() / self.cluster, 1, 1]
    }

    /// The box of the tensor map of V: (dim, keys, heads, batch); of a column-major V (keys, dim, heads, batch).
    #[must_use]
    pub fn v_box(&self, spec: &FwdSpec) -> [i32; 4] {
        let dim = sm90::padded_dim(spec.head_dim_v) / self.cluster;
        match spec.v_layout {
            VLayout::RowMajor if self.has_pairs() => {
                [swizzle_span(bytes_of_pairs(spec.head_dim_v), spec.dtype_v), self.keys_of_box(), 1, 1]
            }
            VLayout::RowMajor => [swizzle_span(dim, spec.dtype_v), self.keys_of_box(), 1, 1],
            VLayout::ColMajor => [swizzle_span(self.keys_in_column(), spec.dtype_v), dim, 1, 1],
        }
    }
}

/// The problem as its tensors lie in memory: those of MXFP8 have FP8 elements, those of NVFP4 bytes, and scales that
/// are an argument of their own. Any other problem is itself.
fn as_stored(problem: &FwdProblem) -> Cow<'_, FwdProblem> {
    if problem.block_scales.is_none() {
        return Cow::Borrowed(problem);
    }
    let mut stored = problem.clone();
    stored.block_scales = None;
    [stored.dtypes.qk, _, stored.dtypes.v] = stored_types(problem);
    Cow::Owned(stored)
}

/// Bytes of a row whose elements share them by two, in whole steps of a product.
const fn bytes_of_pairs(dim: i32) -> i32 {
    round_up(dim, 64) / 2
}

const fn tile_bytes(rows: i32, padded: i32, dtype: DType) -> i32 {
    round_up(rows * padded * dtype.size_bytes() as i32, 1024)
}

/// Checks that the kernel computes this problem. Addresses, which are not part of a problem, must be multiples of
/// 16.
///
/// # Errors
/// The first fact that the kernel does not support.
pub fn accepts(problem: &FwdProblem) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    if let Some(scales) = problem.block_scales {
        let format = scales.format;
        if format == BlockFormat::Nvfp4 {
            takes_pairs(problem).or_else(&refuse)?;
        }
        if problem.cache.tree_mask {
            let queries = problem.dims.seqlen_q;
            return refuse(format!(
                "tree_mask of {queries} queries beside block_scales {format} is not taken"
            ));
        }
    }
    sm90::takes(&as_stored(problem), NAME)?;
    cache_update::takes(problem, NAME)?;
    if let Some(cache) = problem.cache.dtype {
        return refuse(format!(
            "dtype_cache {cache} beside {}: sm100_widened brings it to 16 bits",
            problem.dtypes.qk
        ));
    }
    tile_list::refuse(problem, NAME)?;
    if tile_list::serve(problem) {
        problem.refuse_mixed_layouts(NAME)?;
        problem.refuse_cache_updates(NAME)?;
    }
    let o = problem.dtypes.o;
    if o.is_fp8() && !matches!(o, DType::E4m3Fn | DType::E5m2) {
        return refuse(format!("dtype_o {o} is not f16, bf16, f32 or OCP FP8"));
    }
    // A subnormal factor of the exponents counts as 0 in this architecture's multiply-adds, so such scales are
    // refused for bf16; with other types all scores are 0 at such a scale.
    let scale = problem.resolved_softmax_scale();
    let is_subnormal = scale != 0.0 && scale.abs() * std::f32::consts::LOG2_E < f32::MIN_POSITIVE;
    if stored_types(problem)[0] == DType::Bf16
        && is_subnormal
        && problem.score.softcap.is_none()
        && problem.score.bias == Bias::None
    {
        return refuse(format!("softmax_scale {scale:e} is subnormal in log2"));
    }
    Ok(())
}

/// Checks that products support these pairs of elements (E2M1).
///
/// # Errors
/// The field that they do not support, and its number.
fn takes_pairs(problem: &FwdProblem) -> Result<(), String> {
    let dim = problem.dims.head_dim_qk;
    if !dim.is_multiple_of(2) {
        return Err(format!(
            "head_dim_qk {dim} beside block_scales nvfp4: a pair of elements is half another's"
        ));
    }
    Ok(())
}

/// The strides in bytes, with the tensor and the axis.
fn stride_bytes(problem: &FwdProblem) -> impl Iterator<Item = (&'static str, &'static str, i64)> {
    let [qk, _, v] = stored_types(problem);
    strides(problem).map(move |(name, axis, stride)| {
        let size = if name == "v" { v } else { qk }.size_bytes() as i64;
        (name, axis, stride.saturating_mul(size))
    })
}

/// Whether TMA supports every stride (multiples of 16 bytes below 2^40), and every box begins at a multiple of 16
/// bytes.
fn tma_loads(problem: &FwdProblem, block_n: i32) -> bool {
    !keys_of_v_begin_anywhere(problem)
        && !has_odd_pages(problem, block_n)
        && stride_bytes(problem).all(|(_, _, bytes)| bytes % 16 == 0 && bytes < 1 << 40)
}

/// Largest number of bytes that threads can copy at a time.
fn most_copied(problem: &FwdProblem) -> i32 {
    let size_of_v = stored_types(problem)[2].size_bytes() as i64;
    let most = if keys_of_v_begin_anywhere(problem) { size_of_v } else { 16 };
    let divides = |&bytes: &i64| stride_bytes(problem).all(|(_, _, stride)| stride % bytes == 0);
    [16, 8, 4, 2].into_iter().filter(|&bytes| bytes <= most).find(divides).unwrap_or(1) as i32
}

/// Checks that the tile's way of loading supports a problem's strides.
///
/// # Errors
/// A text that names the tile's field and the stride.
pub fn check_loads(problem: &FwdProblem, tile: &Sm100Tile) -> Result<(), String> {
    let unit = i64::from(if tile.copy_bytes == 0 { 16 } else { tile.copy_bytes });
    let odd =
        |&(_, _, bytes): &(&str, &str, i64)| bytes % unit != 0 || tile.copy_bytes == 0 && bytes >= 1 << 40;
    if let Some((name, axis, bytes)) = stride_bytes(problem).find(odd) {
        return Err(format!(
            "tile copy_bytes={}: {name}.{axis} stride of {bytes} bytes is not a multiple of {unit} below 2^40",
            tile.copy_bytes
        ));
    }
    if tile.copy_bytes == 0 && has_odd_pages(problem, tile.block_n) {
        return Err(format!(
            "tile copy_bytes=0: pages of {} keys, v_layout {:?}, in blocks of {}, are not boxes of 8 rows and more",
            problem.layout.kv.page_size().unwrap_or(0),
            problem.layout.v,
            tile.block_n
        ));
    }
    let by_tma = tile.copy_bytes == 0 && keys_of_v_begin_anywhere(problem);
    if by_tma || tile.copy_bytes > most_copied(problem) {
        return Err(format!(
            "tile copy_bytes={} with a packed column-major V, whose sequences begin at any element: from 1 to {}",
            tile.copy_bytes,
            most_copied(problem)
        ));
    }
    Ok(())
}

/// The tile for a problem that the kernel [`accepts`], on one of [`ARCHS`] with so many multiprocessors.
#[must_use]
pub fn choose_tile(problem: &FwdProblem, arch: &str, num_sms: u32) -> Sm100Tile {
    let spec = spec_of(problem);
    let dims = problem.dims;
    let mut tile = default_tile(&spec);
    if let Some(scales) = problem.block_scales {
        tile = tile.with_scales(&spec, scales.format.block_size().cast_signed());
    }
    if arch == FAST_EXP_ARCH {
        tile.exp2_polynomial_pairs = 0;
    }
    tile.load_max = REDUCING_ARCHS.contains(&arch);
    let ratio = i64::from(problem.gqa_ratio());
    let seqlen_q = i64::from(dims.seqlen_q);
    let fills = 128 % ratio == 0;

    // For a short query the heads of a group are packed into a tile if that saves a tenth of the rows. A group that
    // does not fill its tiles has a tile that no bundle contains, which pays off only for few queries over a cache.
    if ratio > 1 && (fills || ratio <= 128 && few::are_few(problem)) {
        let block_m = i64::from(if fills { tile.block_m } else { 128 });
        let queries = block_m / ratio;
        let apart = (seqlen_q + block_m - 1) / block_m * ratio;
        let packed = (seqlen_q + queries - 1) / queries;
        tile.pack_gqa = packed * 10 <= apart * 9;
    }
    let rows = if tile.pack_gqa { seqlen_q * ratio } else { seqlen_q };
    let copies = !tma_loads(problem, if tile.cluster == 1 { tile.block_n } else { LONE_BLOCK_N });
    let is_paged = problem.layout.kv.is_paged();
    if rows <= 128
        || copies
        || is_paged
        || problem.cache.tree_mask
        || few::are_few(problem)
        || !pairs_pay(&spec, dims.seqlen_k)
    {
        tile = tile.alone(&spec);
    }
    if tile.block_m > 128 && (rows <= 128 || tile.pack_gqa && !fills) {
        tile.block_m = 128;
        tile.stages = most_stages(&spec, &tile);
    }

    if copies {
        tile.copy_bytes = most_copied(problem);
    }
    tile.place(problem);
    let has_lists = tile_list::serve(problem);
    let walks_parts = !has_lists && problem.block_scales.is_none();
    if walks_parts && (rows <= 128 || few::are_few(problem)) {
        tile = few::deal(problem, tile, num_sms);
    }
    if has_lists {
        tile.take_lists(problem, &spec);
    }
    tile.place(problem);
    tile
}

/// The spec of a problem.
#[must_use]
pub fn spec_of(problem: &FwdProblem) -> FwdSpec {
    let stored = as_stored(problem);
    if tile_list::serve(problem) { tile_list::spec(&stored) } else { FwdSpec::of(&stored) }
}

/// The tile for long sequences of a spec.
#[must_use]
pub fn default_tile(spec: &FwdSpec) -> Sm100Tile {
    let (qk, v) = (sm90::padded_dim(spec.head_dim_qk), sm90::padded_dim(spec.head_dim_v));
    // Two query tiles fill tensor memory with their S and O up to head_dim_v 128, and up to 160 with fewer keys per
    // block. Wider head dimensions have one query tile and scores of two blocks at a time. With fewer keys per
    // block, reading Q for each block's product would take longer in shared memory than the product itself. From
    // 224 on, a ring of blocks of 128 keys only fits beside Q in a pair of CTAs, each of which holds half of a
    // block.
    let (block_m, block_n, cluster) = match (qk.max(v), v) {
        (..=128, _) | (..=192, ..=128) => (256, 128, 1),
        (..=160, _) => (256, 96, 1),
        (..=192, _) => (128, 128, 1),
        _ if halves_v(spec) => (128, 128, 2),
        _ => (128, LONE_BLOCK_N, 1),
    };
    let full = spec.mask == MaskKind::Full;
    let tile = Sm100Tile {
        block_m,
        block_n,
        stages: 2,
        order: if full && spec.kv_layout == KvKind::Strided { TileOrder::Static } else { TileOrder::Dynamic },
        // In 16 bits P up to 2^8 is as exact as P up to 1, and f32 sums have room for it; an 8-bit P uses its whole
        // range already.
        lazy_rescale_log2: if spec.dtype_v.is_fp8() { 0 } else { 8 },
        exp2_polynomial_pairs: polynomial_pairs(qk.max(v), spec.dtype_v.is_fp8()),
        load_max: false,
        pack_gqa: false,
        vector_store: spec.head_dim_v % 8 == 0,
        copy_bytes: 0,
        split_keys: 0,
        cluster,
        cluster_heads: false,
        dependent_launch: true,
        whole_groups: false,
        page_keys: 0,
        shares: 0,
        fixed_parts: false,
        scale_block: 0,
    };
    Sm100Tile { stages: most_stages(spec, &tile), ..tile }
}

/// Whether a pair of CTAs is faster than two single CTAs, if the table has pairs. A pair computes more pairs that
/// the mask hides, some 96 keys per row on the diagonal: by the model a pair saves as much at 6300 keys
/// (docs/kernels/sm100-fwd.md).
const fn pairs_pay(spec: &FwdSpec, seqlen_k: u32) -> bool {
    match spec.mask {
        MaskKind::Full => true,
        MaskKind::Upper => seqlen_k >= 6144,
        MaskKind::Band => false,
    }
}

/// Keys of a block, for a wide head dimension in a single CTA.
const LONE_BLOCK_N: i32 = 64;

/// Whether half of V's columns is whole swizzle spans of 32 bytes or more.
fn halves_v(spec: &FwdSpec) -> bool {
    let row_bytes = sm90::padded_dim(spec.head_dim_v) * spec.dtype_v.size_bytes() as i32;
    spec.v_layout == VLayout::ColMajor || row_bytes % 64 == 0
}

/// Share of exponentials that are computed as polynomials on the multiply-add pipe, chosen such that this pipe, the
/// special-function unit and the tensor cores finish at about the same time by their rates
/// (docs/kernels/sm100-fwd.md). Modelled, not measured.
const fn polynomial_pairs(widest: i32, fp8: bool) -> i32 {
    match widest {
        ..=96 => 4,
        97..=160 if fp8 => 4,
        97..=160 => 2,
        _ => 0,
    }
}

/// The largest number of stages, up to 8, that fits the shared memory with this tile.
fn most_stages(spec: &FwdSpec, tile: &Sm100Tile) -> i32 {
    let fits = |stages: &i32| Sm100Tile { stages: *stages, ..*tile }.smem_bytes(spec) <= MAX_SMEM_BYTES;
    (2..=8).rev().find(fits).unwrap_or(1)
}

/// The kernel for a spec and a tile. The crate's README lists its arguments.
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm100Tile) -> KernelSource {
    let call = format!("{}sm100::fwd<kSpec, kTile>(p, maps, schedule);", assert_smem(spec, tile));
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: if tile.cluster > 1 {
            "__cluster_dims__(kTile.cluster, 1, 1) __launch_bounds__(sm100::num_threads(kTile), 1)"
        } else {
            BOUNDS
        },
        params: OPERANDS,
        call: &call,
    };
    crate::source(entry.render(), || [schedule::header(), host_header()])
}

/// The kernel under masks as data, with `has_function` also under a mask as code. It has the arguments
/// [`MaskDataParams`](fmha_core::masks::MaskDataParams) and [`TileList`](tile_list::TileList) after the others.
#[must_use]
pub fn fwd_masked(spec: &FwdSpec, tile: &Sm100Tile, has_function: bool) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: MASKED_HEADER,
        constants: &constants,
        bounds: BOUNDS,
        params: &format!("{OPERANDS}{}", tile_list::PARAMS),
        call: &format!(
            "{}sm100::fwd_masked<kSpec, kTile, {has_function}>(p, maps, schedule, masks, list);",
            assert_smem(spec, tile)
        ),
    };
    crate::source(entry.render(), || {
        [schedule::header(), host_header(), fmha_core::masks::header(), tile_list::header()]
    })
}

/// The kernel over MXFP8. It has the argument [`BlockScaleParams`](scale_params::BlockScaleParams) after the
/// others.
#[must_use]
pub fn fwd_scaled(spec: &FwdSpec, tile: &Sm100Tile) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: SCALED_HEADER,
        constants: &constants,
        bounds: BOUNDS,
        params: &format!("{OPERANDS}, const __grid_constant__ BlockScaleParams scales"),
        call: &format!(
            "{}sm100::fwd_scaled<kSpec, kTile>(p, maps, schedule, scales);",
            assert_smem(spec, tile)
        ),
    };
    crate::source(entry.render(), || {
        [
            schedule::header(),
            host_header(),
            fmha_core::masks::header(),
            tile_list::header(),
            scale_params::header(),
        ]
    })
}

/// The kernel over scales of blocks and under masks as data, with `has_function` also under a mask as code. It has the
/// arguments of [`fwd_masked`], then [`BlockScaleParams`](scale_params::BlockScaleParams).
#[must_use]
pub fn fwd_masked_scaled(spec: &FwdSpec, tile: &Sm100Tile, has_function: bool) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: SCALED_HEADER,
        constants: &constants,
        bounds: BOUNDS,
        params: &format!("{OPERANDS}{}, const __grid_constant__ BlockScaleParams scales", tile_list::PARAMS),
        call: &format!(
            "{}sm100::fwd_masked_scaled<kSpec, kTile, {has_function}>(p, maps, schedule, masks, list, scales);",
            assert_smem(spec, tile)
        ),
    };
    crate::source(entry.render(), || {
        [
            schedule::header(),
            host_header(),
            fmha_core::masks::header(),
            tile_list::header(),
            scale_params::header(),
        ]
    })
}

/// The kernel under a tree mask, with the argument [`TreeMask`](crate::tree_mask::TreeMask) after the others.
#[must_use]
pub fn fwd_tree(spec: &FwdSpec, tile: &Sm100Tile) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: TREE_HEADER,
        constants: &constants,
        bounds: BOUNDS,
        params: &format!("{OPERANDS}{}", tree_mask::PARAM),
        call: &format!("{}sm100::fwd_tree<kSpec, kTile>(p, maps, schedule, tree);", assert_smem(spec, tile)),
    };
    crate::source(entry.render(), || [schedule::header(), host_header(), tree_mask::header()])
}

/// Parameters that every entry has.
const OPERANDS: &str = "const __grid_constant__ FwdParams p, const __grid_constant__ sm100::Maps maps, \
                        const __grid_constant__ TileSchedule schedule";
/// Launch bounds of an entry whose tile has no pair of CTAs.
const BOUNDS: &str = "__launch_bounds__(sm100::num_threads(kTile), 1)";

/// An entry's assertion that the device agrees on shared memory.
fn assert_smem(spec: &FwdSpec, tile: &Sm100Tile) -> String {
    format!(
        "static_assert(sizeof(sm100::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); ",
        tile.smem_bytes(spec)
    )
}

/// `fmha/sm100_host.h`: the types that this file shares with the device.
fn host_header() -> Header {
    let definitions = [Sm100Tile::c_definition()];
    Header::shared("fmha/sm100_host.h", "fmha", &["fmha/tile_schedule.h"], &definitions)
}
