//! The forward kernel of every NVIDIA GPU from sm_80 on: its tile, its entry.

use fmha_core::abi::AbiLiteral as _;
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::memory::Size;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{
    DType, FwdProblem, KvLayout, Refusal, VLayout, Workspace, abi_functions, abi_memory, abi_spec,
};

use crate::operands::{
    keys_of_v_begin_anywhere, odd_stride, refuse_faint_alibi, refuse_long_sequences, strides, swizzle_span,
};
use crate::schedule::{self, TileSchedule, UnitOfWork};
use crate::split::{self, Cut, RowsAtOnce, Shares};
use crate::{lists, round_up, tree_mask, within};

pub mod recipe;
mod table;

pub use table::{Room, choose_tile, default_tile, united_tile, ways_of_few};

/// Most rows of a short query. A short query's tile packs the heads of a group if that saves rows, and its keys may be
/// split.
pub const MOST_SHORT_ROWS: u32 = 64;

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm80";

/// Log2 of the factor by which scores may exceed the running maximum before it is raised, for 16-bit P: P up to 2^8 is
/// as exact there as P up to 1, and f32 sums have room.
pub(crate) const LAG_LOG2: i32 = 8;

/// Blocks of K, and of V, in shared memory at a time, at most.
const MOST_STAGES: i32 = 4;

/// Most CTAs among which all tiles' blocks of keys are divided in equal shares.
const MOST_SHARES: i32 = 1 << 16;

/// Header that the kernel's entry includes.
pub const HEADER: &str = "fmha/sm80/fwd/fwd.cuh";
/// Device header of the kernel that loads K and V by TMA.
pub const TMA_HEADER: &str = "fmha/sm80/fwd/tma.cuh";
/// Device header of the kernel under a tree mask.
const TREE_HEADER: &str = "fmha/sm80/fwd/fwd_tree.cuh";
/// Device header of the kernel under masks as data (tensors).
const MASKED_HEADER: &str = "fmha/sm80/fwd/fwd_masked.cuh";
/// Device header of the kernel over lists of keys.
const LISTS_HEADER: &str = "fmha/sm80/fwd/fwd_lists.cuh";
/// Device header of the kernel over two caches.
const TWO_CACHES_HEADER: &str = "fmha/sm80/fwd/fwd_two_caches.cuh";

abi_spec! {
    /// Tile of the kernel: the choices with which it computes a problem.
    pub struct Sm80Tile {
        /// Query rows of a CTA.
        pub block_m: i32 = Takes::among(&[16, 32, 64, 128]).tuned(),
        /// Keys of a block.
        pub block_n: i32 = Takes::multiples(16, 16, 128).tuned_over(&[32, 48, 64, 80, 96, 128]),
        /// Number of warps of a CTA, which share its rows: 16 or 32 rows per warp are fast.
        pub warps: i32 = Takes::among(&[1, 2, 4, 8]).tuned(),
        /// Number of warps that have equal rows, each with a part of O's columns, if O's columns do not fit one
        /// warp's registers.
        pub value_parts: i32 = Takes::nothing(),
        /// Blocks of K, and of V, in shared memory at a time.
        pub stages: i32 = Takes::within(1, MOST_STAGES).tuned_over(&[1, 2, 3]),
        /// Number of CTAs that a multiprocessor should hold, which limits a thread's registers.
        pub ctas: i32 = Takes::within(1, 12).tuned_over(&[1, 2, 3]),
        /// Number of fragments of K and V that a warp reads from shared memory ahead of the products that use them.
        pub fragments_ahead: i32 = Takes::within(0, 4).tuned_over(&[0, 1, 2]),
        /// O is rescaled only when a maximum grew by more than this, in log2; 0: when it grew.
        pub lazy_rescale_log2: i32 = Takes::within(0, 11).tuned_over(&[0, 8]),
        /// Rows are (query, head of a kv head's group) pairs, so that a short query fills a tile.
        pub pack_gqa: bool = Takes::all().tuned(),
        /// Whether scores are soft-capped with one exponential and one reciprocal, for caps of 1e-3 to 64;
        /// otherwise to f32's accuracy for every cap.
        pub fast_softcap: bool,
        /// Whether O is stored 16 bytes at a time (FP8: 2), which needs rows that are multiples of 16 bytes and
        /// begin at such addresses; otherwise by elements.
        pub vector_store: bool,
        /// Bytes of a copy, which must divide every stride and address of Q, K and V; 2: by elements.
        pub copy_bytes: i32 = Takes::among(&[2, 4, 8, 16]),
        /// Whether each block's keys lie in one page: blocks divide the page.
        pub block_in_page: bool = Takes::nothing(),
        /// Whether 16-bit rows in shared memory are padded with zeros to multiples of 128 bytes. Few lanes of a warp's
        /// copies then need addresses of other rows.
        pub whole_spans: bool = Takes::nothing(),
        /// Type of K and V in memory: Q's type, or FP8, which is converted on the way to shared memory.
        pub stored: DType = Takes::nothing(),
        /// Split-KV: keys of a part, a multiple of `block_n`; a second kernel merges the parts. 0: a tile
        /// sees all keys.
        pub split_keys: i32 = Takes::multiples(16, 0, 1 << 24).tuned_over(&[0, 64, 256, 512, 1024]),
        /// Whether, with `split_keys`, parts have this number of keys in every sequence, counted from its first key;
        /// otherwise the number follows from the longest sequence.
        pub fixed_parts: bool = Takes::all(),
        /// Number of equal shares of all tiles' blocks that CTAs walk, with `split_keys` keys each at least;
        /// 0: a CTA walks a tile, or a part of one.
        pub shares: i32 = Takes::within(0, MOST_SHARES),
        /// Number of shares that a CTA processes one after another, if a multiprocessor holds fewer CTAs than
        /// shares.
        pub shares_a_cta: i32 = Takes::within(1, 64),
        /// Whether the device has an instruction to convert e4m3, in which a cache may be stored.
        pub converts_fp8: bool = Takes::nothing(),
        /// Whether the next grid, which merges the parts, may start while this one ends (programmatic dependent
        /// launch).
        pub launches_merge: bool = Takes::nothing(),
        /// Whether K and V are loaded by TMA, which an extra warp issues; otherwise all warps copy.
        pub tma: bool = Takes::all(),
        /// Whether V is the first columns of K's rows, so that a block of K serves as V too and is loaded once.
        pub v_in_k: bool = Takes::nothing(),
        /// Bytes of a key's row, 584 or 656, if the cache has rows of bytes, which are copied unchanged and
        /// converted in shared memory; 0 if rows have elements of type `stored`.
        pub row_bytes: i32 = Takes::nothing(),
        /// Whether a tile over lists of blocks has the rows of several tokens, and walks the union of their lists;
        /// otherwise it has heads of one token.
        pub unites: bool = Takes::all(),
        /// Words of shared memory for the lists of the tokens that a tile unites, and for the steps of their union.
        pub list_words: i32 = Takes::nothing(),
    }
}

abi_functions! {
    pub(crate) fn rows_text() {
        /// A 16-bit head dimension rounded up to whole steps of a product, as in the tiles.
        pub const fn padded_dim(dim: i32) -> i32 {
            round_up(dim, 16)
        }

        /// Elements of a row rounded up to whole steps of a product, 32 bytes, as in the tiles. Copies fill the
        /// rest with zeros.
        pub const fn padded_row(dim: i32, dtype: DType) -> i32 {
            round_up(dim, 32 / dtype.size_bytes() as i32)
        }
    }
}

abi_functions! {
    fn tile_text() of tile: Sm80Tile {
        /// Number of threads that compute; all of them also load, unless an extra warp issues TMA.
        pub const fn num_consumers(&self) -> i32 {
            32 * self.warps
        }

        /// Threads of a CTA.
        pub const fn num_threads(&self) -> i32 {
            self.num_consumers() + if self.tma { 32 } else { 0 }
        }

        /// Elements of a row of Q, K or V in shared memory: whole 128-byte spans of the swizzle, if a warp's copies
        /// should have them.
        const fn tile_dim(&self, dim: i32, dtype: DType) -> i32 {
            if self.whole_spans { round_up(dim, 64) } else { padded_row(dim, dtype) }
        }

        /// Whether K and V come from an FP8 cache under 16-bit queries.
        const fn widens_cache(&self, spec: &FwdSpec) -> bool {
            self.stored.is_fp8() && !spec.dtype_qk.is_fp8()
        }

        /// Whether blocks of an FP8 cache are loaded unconverted, and converted in shared memory for the products,
        /// one block at a time.
        const fn widens_blocks(&self, spec: &FwdSpec) -> bool {
            self.widens_cache(spec) && self.copy_bytes >= 4
        }

        /// Whether rings hold unconverted blocks of an FP8 cache.
        const fn has_raw_blocks(&self, spec: &FwdSpec) -> bool {
            self.widens_blocks(spec) && self.row_bytes == 0
        }

        /// Whether rings hold blocks of K and V in the type of the products.
        const fn has_own_blocks(&self, spec: &FwdSpec) -> bool {
            !self.widens_blocks(spec) && self.row_bytes == 0
        }

        /// Whether the products read FP8 blocks unconverted (`fp8_product.cuh`): one warp has all rows, and each
        /// lane reads whole words. A warp's registers then hold at most 32 * 128 elements of O.
        pub(crate) const fn reads_raw_blocks(&self, spec: &FwdSpec) -> bool {
            self.widens_blocks(spec)
                && self.warps == 1
                && spec.head_dim_qk % 16 == 0
                && spec.head_dim_v % 64 == 0
                && self.block_m * spec.head_dim_v <= 32 * 128
        }
    }
}

abi_memory! {
    fn memory_text() as SmemParts;
    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    pub const fn smem_bytes(&self, spec: &FwdSpec) of tile: Sm80Tile {
        /// Part of the dropout generator's work that is equal for all rows, one set for each warp.
        quads: "DropoutQuads" [self.warps] if spec.dropout => Size::of(512, 16);
        /// Barrier of a block of K: TMA's bytes have arrived.
        k_full: "ptx::Barrier" [self.stages] if self.tma => Size::BARRIER;
        /// Barrier of a block of V: TMA's bytes have arrived.
        v_full: "ptx::Barrier" [self.stages] if self.tma => Size::BARRIER;
        /// Barrier of a slot of K: the block has been read; one arrival per consumer warp.
        k_empty: "ptx::Barrier" [self.stages] if self.tma => Size::BARRIER;
        /// Barrier of a slot of V: the block has been read; one arrival per consumer warp.
        v_empty: "ptx::Barrier" [self.stages] if self.tma => Size::BARRIER;
        q: "QTile<spec, tile>" => self.qk_size(spec, self.block_m);
        /// Ring of unconverted rows of bytes, which include their scales.
        rows: "BytesTile<tile.block_n, tile.row_bytes>" [self.stages] if self.row_bytes > 0
            => Size::of(self.block_n * round_up(self.row_bytes, 16), 16);
        /// The block of an FP8 cache, or of rows of bytes, that is converted to the type of the products.
        wide: "WideBlock<spec, tile>"
            if self.row_bytes > 0 || (self.widens_blocks(spec) && !self.reads_raw_blocks(spec))
            => self.qk_size(spec, self.block_n).or(self.v_size(spec));
        /// Ring of unconverted blocks of K from an FP8 cache.
        raw_k: "RawBlock<spec, tile, spec.head_dim_qk>" [self.stages] if self.has_raw_blocks(spec)
            => Size::of(self.block_n * self.tile_dim(spec.head_dim_qk, spec.dtype_qk), 16);
        /// Ring of unconverted blocks of V from an FP8 cache.
        raw_v: "RawBlock<spec, tile, spec.head_dim_v>" [self.stages] if self.has_raw_blocks(spec)
            => Size::of(self.block_n * self.tile_dim(spec.head_dim_v, spec.dtype_qk), 16);
        /// Ring of blocks of K, which also serve as V if V is the first columns of K's rows.
        k: "KTile<spec, tile>" [self.stages] if self.has_own_blocks(spec) => self.qk_size(spec, self.block_n);
        /// Ring of blocks of V.
        v: "VTile<spec, tile>" [self.stages] if self.has_own_blocks(spec) && !self.v_in_k => self.v_size(spec);
        /// The lists of the tokens that the tile unites, sorted, and the steps of their union.
        lists: "Array<int32_t, tile.list_words>" if self.unites => Size::of(4 * self.list_words, 4);
    }
}

impl Sm80Tile {
    /// Size of a tile with this many rows of Q or K.
    const fn qk_size(&self, spec: &FwdSpec, rows: i32) -> Size {
        let dtype = spec.dtype_qk;
        Size::tile(rows * self.tile_dim(spec.head_dim_qk, dtype) * dtype.size_bytes() as i32)
    }

    /// Size of a block of V.
    const fn v_size(&self, spec: &FwdSpec) -> Size {
        let dtype = spec.dtype_v;
        Size::tile(self.block_n * self.tile_dim(spec.head_dim_v, dtype) * dtype.size_bytes() as i32)
    }

    /// The order of tiles for a problem's maximal lengths.
    ///
    /// # Errors
    /// More tiles than a schedule counts.
    pub fn schedule(&self, problem: &FwdProblem) -> Result<TileSchedule, String> {
        if self.unites {
            let rows = self.block_m - self.block_m % problem.gqa_ratio().cast_signed().max(1);
            return TileSchedule::new(problem, UnitOfWork { rows, heads: 1, pack_gqa: true, kv_parts: 1 });
        }
        let kv_parts = self.cut().num_parts(problem);
        if problem.walks_lists() {
            return lists::schedule(problem, self.block_m.unsigned_abs(), kv_parts);
        }
        let kv_parts = kv_parts as i32;
        TileSchedule::new(
            problem,
            UnitOfWork { rows: self.block_m, heads: 1, pack_gqa: self.pack_gqa, kv_parts },
        )
    }

    /// How the tile divides the keys of sequences into parts.
    #[must_use]
    pub const fn cut(&self) -> Cut {
        let shares = Shares {
            count: self.shares.unsigned_abs(),
            block_m: self.block_m.unsigned_abs(),
            pack_gqa: self.pack_gqa,
        };
        Cut {
            keys: self.split_keys,
            block_n: self.block_n,
            fixed: self.fixed_parts,
            shares: if self.shares > 0 { Some(shares) } else { None },
        }
    }

    /// How many queries of a call have their parts in the workspace at the same time.
    #[must_use]
    pub fn rows_at_once(&self, problem: &FwdProblem) -> RowsAtOnce {
        // Lists of keys are divided into parts where tokens are few.
        if problem.walks_lists() {
            return RowsAtOnce::all(problem);
        }
        self.cut().rows_at_once(problem, self.block_m, self.pack_gqa)
    }

    /// Workspace: the parts of a split.
    #[must_use]
    pub fn workspace(&self, problem: &FwdProblem) -> Workspace {
        let bytes = self.cut().workspace_bytes(problem, self.rows_at_once(problem).queries);
        Workspace { bytes, zeroed_bytes: 0 }
    }

    /// Makes a row's bits depend on its own sequence alone: blocks have a fixed number of keys in every call, and
    /// parts a fixed number of keys in every sequence. If there are few CTAs, each loads more blocks ahead, which
    /// changes no sum.
    pub fn make_batch_invariant(&mut self, problem: &FwdProblem, room: Room, block_n: i32) {
        if problem.walks_lists() {
            // Parts follow the number of tokens; a list's blocks do not.
            (self.split_keys, self.fixed_parts) = (0, false);
            return;
        }
        let spec = FwdSpec::of(problem);
        let has_other_blocks = block_n != default_tile(&spec, room).block_n;
        self.block_n = block_n;
        self.whole_spans = false;
        if has_other_blocks {
            // Scores of larger blocks need registers, so a warp has sixteen rows.
            self.warps = (self.block_m / 16 * self.value_parts).min(8);
        }
        if self.shares > 0 || has_other_blocks {
            // Shares use more stages than these block sizes leave room for, so the stages are set again.
            self.fill(&spec, room);
        }
        self.split_keys = split::fixed_keys(problem, self.block_n);
        (self.fixed_parts, self.shares, self.shares_a_cta) = (self.split_keys > 0, 0, 1);
        let tiles = self.schedule(problem).map_or(u32::MAX, |schedule| schedule.num_tiles.unsigned_abs());
        // Loads as many blocks ahead as fit: with one block a CTA waits for each load.
        for stages in (self.stages + 1..=MOST_STAGES).rev() {
            let ctas = room.ctas(Self { stages, ..*self }.smem_bytes(&spec));
            if ctas >= 1 && tiles <= room.num_sms * ctas.unsigned_abs() {
                (self.stages, self.ctas) = (stages, ctas.min(self.ctas));
                self.share_columns(problem);
                return;
            }
        }
    }

    /// Adds a second warp to the only warp of sixteen rows: both compute S, and each has half of O's columns. Done
    /// if few CTAs leave the multiprocessor idle; it changes no sum.
    fn share_columns(&mut self, problem: &FwdProblem) {
        let is_wide = problem.dims.head_dim_v.is_multiple_of(128) && problem.dims.head_dim_v <= 256;
        let is_plain = problem.cache.dtype.is_none() && !self.v_in_k && !problem.dtypes.v.is_fp8();
        if self.block_m == 16 && self.value_parts == 1 && is_wide && is_plain {
            (self.warps, self.value_parts) = (2, 2);
        }
    }

    /// Sets one field from its name and value. If `block_n` changes, parts of the keys are rounded to whole blocks;
    /// setting unsplit keys or fixed parts turns shares off.
    ///
    /// # Errors
    /// A text that names the field, the value and the allowed values.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let block_n = self.block_n;
        self.set_field(name, value).map_err(|text| format!("tile {text}"))?;
        if block_n != self.block_n {
            self.split_keys = round_up(self.split_keys, self.block_n);
        }
        if (name == "split_keys" && self.split_keys == 0) || (name == "fixed_parts" && self.fixed_parts) {
            self.shares = 0;
        }
        Ok(())
    }

    /// Sets the fields that depend on where a problem's keys lie.
    pub fn place_blocks(&mut self, problem: &FwdProblem) {
        self.row_bytes = lists::row_bytes(problem);
        self.block_in_page = blocks_in_pages(problem, self.block_n);
        self.stored = problem.stored_k();
        self.list_words =
            if self.unites { lists::words_of_union(problem, self.block_m, self.block_n) } else { 0 };
    }

    /// Checks that the kernel can be compiled with these fields.
    ///
    /// # Errors
    /// A text that names the fields and numbers that do not go together.
    pub fn check(&self) -> Result<(), String> {
        let warps = self.warps / self.value_parts;
        if warps == 0 || self.block_m % (16 * warps) != 0 || self.warps % self.value_parts != 0 {
            return Err(format!(
                "tile block_m={} with warps={}: a warp has whole sixteens of rows, beside {} others that have them too",
                self.block_m,
                self.warps,
                self.value_parts - 1
            ));
        }
        if self.tma && (self.split_keys > 0 || self.value_parts > 1) {
            return Err(format!(
                "tile tma=1 with split_keys={} and value_parts={}: TMA brings whole sequences, for warps with rows of their own",
                self.split_keys, self.value_parts
            ));
        }
        split::check_shares(self.shares, self.split_keys, self.fixed_parts)?;
        if self.num_threads() * self.ctas > MAX_THREADS {
            return Err(format!(
                "tile warps={} with ctas={}: a multiprocessor holds {MAX_THREADS} threads at least",
                self.warps, self.ctas
            ));
        }
        if self.split_keys % self.block_n != 0 {
            return Err(format!(
                "tile split_keys={} is not a multiple of block_n={}",
                self.split_keys, self.block_n
            ));
        }
        Ok(())
    }

    /// Checks that the tile's copies support a problem's strides and the alignment of its rows.
    ///
    /// # Errors
    /// A text that names the tile's field and the stride.
    pub fn check_loads(&self, problem: &FwdProblem) -> Result<(), String> {
        let bytes = self.copy_bytes;
        if !is_whole_steps(self.block_n, problem.dtypes.v) {
            return Err(format!(
                "tile block_n={} with dtype_v {}: P V contracts 32 keys at a time",
                self.block_n, problem.dtypes.v
            ));
        }
        if self.tma {
            takes_tma(problem).map_err(|reason| format!("tile tma=1: {reason}"))?;
        }
        let odd = |&(name, _, stride): &(&str, &str, i64)| !is_whole_copies(problem, bytes, (name, stride));
        if let Some((name, axis, stride)) = strides(problem).find(odd) {
            return Err(format!(
                "tile copy_bytes={bytes}: {name}.{axis} stride {stride} is not whole copies"
            ));
        }
        if bytes > most_copied(problem) {
            return Err(format!(
                "tile copy_bytes={bytes} with a packed column-major V, whose sequences begin at any element: at most 2"
            ));
        }
        Ok(())
    }
}

/// Number of parts of O's columns that fit a warp's registers, in whole spans of V's swizzle.
fn value_parts(head_dim_v: u32) -> Option<i32> {
    (1..=3)
        .find(|&parts| match parts {
            1 => head_dim_v <= 256,
            _ => head_dim_v.is_multiple_of(64 * parts) && head_dim_v / parts <= 256,
        })
        .map(|parts| parts as i32)
}

/// Widest rows of Q and K.
pub const MOST_DIM_QK: u32 = 576;

/// Smallest number of threads that a multiprocessor of these architectures holds.
const MAX_THREADS: i32 = 1536;

/// Whether products of P V contract blocks of this many keys in whole steps; 8-bit types have steps of 32 keys.
const fn is_whole_steps(block_n: i32, dtype_v: DType) -> bool {
    block_n % (32 / dtype_v.size_bytes() as i32) == 0
}

/// Checks that the kernel computes this problem, on a device that can convert and multiply OCP FP8 or on one that
/// cannot.
///
/// # Errors
/// The first fact that the kernel does not support.
pub fn accepts(problem: &FwdProblem, converts_fp8: bool) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    problem.refuse_dropout_between_quads(NAME)?;
    if !problem.masks.is_empty() {
        problem.refuse_cache_beside_masks(NAME)?;
    }
    lists::takes_places(problem, NAME).map_err(|reason| Refusal::new(NAME, reason))?;
    lists::takes_row_strides(problem).map_err(|reason| Refusal::new(NAME, reason))?;
    if let Some(cache) = problem.cache.dtype {
        if !matches!(cache, DType::E4m3Fn | DType::E5m2) {
            return refuse(format!("dtype_cache {cache} is not one of the 2 OCP types"));
        }
        if problem.layout.v == VLayout::ColMajor {
            return refuse(format!(
                "dtype_cache {cache} with v_layout col-major: it is widened along its rows"
            ));
        }
    }
    let (qk, v, o) = (problem.dtypes.qk, problem.dtypes.v, problem.dtypes.o);
    if qk.is_fp8() {
        takes_fp8(problem, converts_fp8).map_err(|reason| Refusal::new(NAME, reason))?;
    } else if !matches!(qk, DType::F16 | DType::Bf16) || v != qk {
        return refuse(format!("dtype_qk {qk} with dtype_v {v} is not one 16-bit type"));
    }
    if o.is_fp8() && (!matches!(o, DType::E4m3Fn | DType::E5m2) || !converts_fp8) {
        return refuse(format!("dtype_o {o}: OCP FP8 is converted to from sm_89 on, others are not"));
    }
    let dims = problem.dims;
    if dims.head_dim_qk > MOST_DIM_QK {
        return refuse(format!("head_dim_qk {} is larger than {MOST_DIM_QK}", dims.head_dim_qk));
    }
    if value_parts(dims.head_dim_v).is_none() {
        return refuse(format!("head_dim_v {} is above 256, and not 384, 512 or 576", dims.head_dim_v));
    }
    refuse_faint_alibi(problem, NAME)?;
    refuse_long_sequences(problem, NAME)
}

/// Checks that Q and K are FP8, and V is of a type that the products support with FP8.
fn takes_fp8(problem: &FwdProblem, multiplies_fp8: bool) -> Result<(), String> {
    let (qk, v, dims) = (problem.dtypes.qk, problem.dtypes.v, problem.dims);
    let takes = |dtype| matches!(dtype, DType::E4m3Fn | DType::E5m2);
    if !takes(qk) || (v.is_fp8() && v != qk) || !(v.is_fp8() || matches!(v, DType::F16 | DType::Bf16)) {
        return Err(format!(
            "dtype_qk {qk} with dtype_v {v} is not OCP FP8, all of it or beside a V of 16 bits"
        ));
    }
    if !multiplies_fp8 {
        return Err(format!("dtype_qk {qk}: mma.sync multiplies FP8 from sm_89 on"));
    }
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > 256 {
            return Err(format!("{field} {dim} is larger than 256, in FP8"));
        }
    }
    Ok(())
}

/// Refuses a full list of blocks together with a mask as code: full blocks must not evaluate the function, but the
/// kernel evaluates it for every pair.
///
/// # Errors
/// The list, and the mask.
pub(crate) fn refuse_full_lists_beside_code(problem: &FwdProblem) -> Result<(), Refusal> {
    let full = problem.masks.block_lists.and_then(|lists| lists.full);
    match full.filter(|_| problem.code.mask.is_some()) {
        None => Ok(()),
        Some(full) => {
            let text = format!(
                "block_lists: a full list of up to {} blocks beside a mask as code, which its blocks do not ask",
                full.max_blocks
            );
            Err(Refusal::new(NAME, text))
        }
    }
}

/// The most bytes per copy when strides allow any number: one element for a column-major packed V, whose contiguous
/// axis is the keys, at which sequences begin anywhere; otherwise 16.
fn most_copied(problem: &FwdProblem) -> i32 {
    if keys_of_v_begin_anywhere(problem) { 2 } else { 16 }
}

/// Checks that TMA can load a problem's K and V: without pages or conversion, at strides that are multiples of 16
/// bytes.
pub(crate) fn takes_tma(problem: &FwdProblem) -> Result<(), String> {
    problem.refuse_mixed_layouts(NAME).map_err(|refusal| refusal.reason)?;
    problem.refuse_cache_updates(NAME).map_err(|refusal| refusal.reason)?;
    if keys_of_v_begin_anywhere(problem) {
        return Err("v_layout col-major with packed keys begins at any element".to_owned());
    }
    match odd_stride(problem) {
        Some((name, axis, stride, multiple)) => {
            Err(format!("{name}.{axis} stride {stride} is not a multiple of {multiple} below 2^40 bytes"))
        }
        None => Ok(()),
    }
}

/// Boxes of K and V as (dim, rows, heads, batch), for a column-major V (rows, dim, heads, batch), if TMA loads
/// them.
#[must_use]
pub fn boxes(spec: &FwdSpec, tile: &Sm80Tile) -> [[i32; 4]; 2] {
    let (qk, v) = (padded_row(spec.head_dim_qk, spec.dtype_qk), padded_row(spec.head_dim_v, spec.dtype_v));
    let of_v = match spec.v_layout {
        VLayout::RowMajor => [swizzle_span(v, spec.dtype_v), tile.block_n, 1, 1],
        VLayout::ColMajor => [swizzle_span(tile.block_n, spec.dtype_v), v, 1, 1],
    };
    [[swizzle_span(qk, spec.dtype_qk), tile.block_n, 1, 1], of_v]
}

/// The kernel for a spec and a tile: arguments `FwdParams`, [`TileSchedule`] and, where TMA loads, three tensor maps.
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm80Tile) -> KernelSource {
    source(spec, tile, Keys::Band)
}

/// The forward kernel under a tree mask, with a [`TreeMask`](tree_mask::TreeMask) as an additional argument.
#[must_use]
pub fn fwd_tree(spec: &FwdSpec, tile: &Sm80Tile) -> KernelSource {
    source(spec, tile, Keys::Tree)
}

/// The kernel under masks as data, with [`MaskDataParams`](fmha_core::masks::MaskDataParams) as an additional
/// argument.
#[must_use]
pub fn fwd_masked(spec: &FwdSpec, tile: &Sm80Tile) -> KernelSource {
    source(spec, tile, Keys::Data)
}

/// The kernel over lists of keys, with [`ListParams`](fmha_core::lists::ListParams) as an additional argument.
#[must_use]
pub fn fwd_lists(spec: &FwdSpec, tile: &Sm80Tile) -> KernelSource {
    source(spec, tile, Keys::Lists)
}

/// The kernel over two caches, with [`TwoCachesParams`](fmha_core::second::TwoCachesParams) as an additional
/// argument.
#[must_use]
pub fn fwd_two_caches(spec: &FwdSpec, tile: &Sm80Tile) -> KernelSource {
    source(spec, tile, Keys::TwoCaches)
}

/// Means of selecting a row's keys besides lengths: a mask that hides keys, lists of keys, or two caches.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keys {
    Band,
    Tree,
    Data,
    Lists,
    TwoCaches,
}

fn source(spec: &FwdSpec, tile: &Sm80Tile, keys: Keys) -> KernelSource {
    let (include, last_param, call) = if keys == Keys::Tree {
        (TREE_HEADER, tree_mask::PARAM, "fwd_tree<kSpec, kTile>(p, schedule, tree)")
    } else if keys == Keys::Data {
        let param = ", const __grid_constant__ MaskDataParams masks";
        (MASKED_HEADER, param, "fwd_masked<kSpec, kTile>(p, schedule, masks)")
    } else if keys == Keys::Lists {
        let of_token = "fwd_lists<kSpec, kTile>(p, schedule, lists)";
        let of_union = "fwd_union<kSpec, kTile>(p, schedule, lists)";
        (LISTS_HEADER, lists::PARAM, if tile.unites { of_union } else { of_token })
    } else if keys == Keys::TwoCaches {
        (TWO_CACHES_HEADER, lists::TWO_PARAM, "fwd_two_caches<kSpec, kTile>(p, schedule, caches)")
    } else if tile.tma {
        (TMA_HEADER, ", const __grid_constant__ sm80::Maps maps", "fwd_tma<kSpec, kTile>(p, schedule, maps)")
    } else {
        (HEADER, "", "fwd<kSpec, kTile>(p, schedule)")
    };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include,
        constants: &constants,
        bounds: "__launch_bounds__(sm80::num_threads(kTile), kTile.ctas)",
        params: &format!(
            "const __grid_constant__ FwdParams p, const __grid_constant__ TileSchedule schedule{last_param}"
        ),
        call: &format!(
            "static_assert(sizeof(sm80::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); \
             sm80::{call};",
            tile.smem_bytes(spec)
        ),
    };
    crate::source(entry.render(), || {
        [
            schedule::header(),
            host_header(),
            Header::shared("fmha/sm80_memory.h", "fmha::sm80", &[], &[memory_text()]),
            tree_mask::header(),
            fmha_core::masks::header(),
            fmha_core::lists::header(),
            fmha_core::second::header(),
        ]
    })
}

/// `fmha/sm80_host.h`: the types that this file shares with the device.
fn host_header() -> Header {
    let definitions = [Sm80Tile::c_definition(), within("sm80", &[rows_text(), tile_text()])];
    Header::shared("fmha/sm80_host.h", "fmha", &["fmha/num.h", "fmha/tile_schedule.h"], &definitions)
}

/// Q's, K's or V's type in memory.
fn stored(problem: &FwdProblem, name: &str) -> DType {
    match name {
        "q" => problem.dtypes.qk,
        // Rows of bytes have strides in bytes.
        _ if problem.cache.rows.is_some() => DType::E4m3Fn,
        "k" => problem.stored_k(),
        _ => problem.cache.dtype.unwrap_or(problem.dtypes.v),
    }
}

/// Required alignment of the addresses of Q, K or V for copies of this many bytes: FP8 whose rows begin anywhere is
/// read byte by byte.
#[must_use]
pub fn bytes_at_a_time(problem: &FwdProblem, name: &str, copy_bytes: i32) -> i32 {
    if stored(problem, name).is_fp8() && copy_bytes == 2 { 1 } else { copy_bytes }
}

/// Whether a stride of an operand is a multiple of this many bytes.
fn is_whole_copies(problem: &FwdProblem, bytes: i32, (name, stride): (&str, i64)) -> bool {
    let size = stored(problem, name).size_bytes() as i64;
    stride.wrapping_mul(size) % i64::from(bytes_at_a_time(problem, name, bytes)) == 0
}

/// Whether no block of this many keys lies in two pages.
fn blocks_in_pages(problem: &FwdProblem, block_n: i32) -> bool {
    match problem.layout.kv {
        KvLayout::Paged { page_size } => page_size.is_multiple_of(block_n.unsigned_abs()),
        KvLayout::Strided | KvLayout::Packed => true,
    }
}
