//! The Hopper forward kernel: its tile, its schedule, its entry.

use fmha_core::abi::AbiLiteral as _;
use fmha_core::fields::Takes;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::{BiasKind, FwdSpec, KvKind};
use fmha_core::{Bias, DType, FwdProblem, MaskKind, Refusal, Strides, VLayout, abi_spec};

use crate::schedule::{self, UnitOfWork};
pub use crate::schedule::{TileOrder, TileSchedule};
use crate::wgmma::{self, OperandA, Sums, WgmmaShape};

mod knobs;

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm90";

/// The header that its entry includes.
pub const HEADER: &str = "fmha/sm90/fwd/fwd.cuh";

abi_spec! {
    /// How the kernel computes.
    pub struct Sm90Tile {
        /// Query rows of a CTA: 64, 128 or 192, 64 to a consumer warpgroup.
        pub block_m: i32 = Takes::among(&[64, 128, 192]).tuned(),
        /// Keys of a block: a multiple of 16 up to 256.
        pub block_n: i32 = Takes::multiples(16, 16, 256).tuned_over(&[64, 80, 96, 112, 128, 144, 160, 176, 192]),
        /// Blocks of K, and of V, in shared memory at a time.
        pub stages: i32 = Takes::within(1, 8).tuned_over(&[2, 3, 4]),
        /// How CTAs come by their tiles.
        pub order: TileOrder = Takes::all().tuned(),
        /// Consumer warpgroups issue their products in turn, one's under another's exponentials.
        pub ping_pong: bool = Takes::all().tuned(),
        /// With `ping_pong`: the turn is passed on when a block's maxima are there, so that the warpgroups'
        /// exponentials do not coincide; else when its products are issued.
        pub turn_after_max: bool = Takes::all().tuned(),
        /// The next tile's first scores are started with this tile's last output; Q has two buffers.
        pub lookahead: bool = Takes::all().tuned(),
        /// Q lies in pieces of 64 rows, and lookahead has one spare piece and no second Q: less shared memory.
        pub split_q: bool = Takes::all().tuned(),
        /// O is rescaled only when a maximum grew by more than this, in log2; 0: when it grew.
        pub lazy_rescale_log2: i32 = Takes::within(0, 11).tuned_over(&[0, 8]),
        /// How many of a thread's `block_n / 2` exponentials ptxas must place before the wait for
        /// `P V`; 0: where it likes.
        pub wait_anchor: i32 = Takes::within(0, 128).tuned_over(&[0, 16, 32, 40, 48]),
        /// Every n-th exponential is a polynomial on the multiply-add pipe; 0: none.
        pub exp2_polynomial_every: i32 = Takes::within(0, 128).tuned_over(&[0, 4, 8]),
        /// Blocks that no mask cuts skip the row-max reduction and reuse the running maximum; their row sums tell
        /// afterwards whether it was high enough. Warp-specialised kernels only.
        pub skip_row_max: bool = Takes::all().tuned(),
        /// With `skip_row_max`: where a row's maximum is above that of a quarter of its keys by more than this, in
        /// log2, before the first block that would skip, the warpgroup takes exact maxima throughout the tile.
        pub exact_max_spread_log2: i32 = Takes::within(1, 126).tuned_over(&[8, 11]),
        /// With `skip_row_max`: after so many blocks, then three times as many as before, the warpgroup votes again
        /// whether the rest of the tile takes exact maxima, since running maxima had to be raised.
        pub vote_after: i32 = Takes::within(1, 1 << 20).tuned_over(&[2, 4, 16]),
        /// Rows are (query, head of a kv head's group) pairs, so that a short query fills a tile.
        pub pack_gqa: bool = Takes::all().tuned(),
        /// Soft-capped scores by one exponential and one reciprocal, for caps of 1e-3 to 64; else to f32's accuracy at
        /// any cap.
        pub fast_softcap: bool,
        /// O, whose rows are whole 16 bytes and begin on such, is stored 16 bytes at a time (FP8: 4 or 2); else element by
        /// element.
        pub vector_store: bool,
        /// 0: TMA loads. Else three warps copy so many bytes at a time, which divide every
        /// stride and address of Q, K and V: 16, 8, 4, or 2 (element by element).
        pub copy_bytes: i32 = Takes::among(&[0, 2, 4, 8, 16]),
        /// A warpgroup loads and the others consume. Else every warpgroup consumes, and one thread also
        /// refills shared memory, `stages` blocks ahead.
        pub warp_specialised: bool,
        /// CTAs that share the loads of K and V: 1 or 2.
        pub cluster: i32 = Takes::within(1, 2).tuned(),
        /// A cluster's CTAs have the same query rows of neighbouring heads of a kv head's group; else
        /// neighbouring query rows of one head.
        pub cluster_heads: bool = Takes::all().tuned(),
        /// Q is held in registers through a tile, not read from shared memory by each product.
        pub q_in_registers: bool = Takes::all().tuned(),
        /// `Q K` is summed in f16. Inputs of f16 only.
        pub f16_scores: bool,
        /// `P V` is summed in f16, beyond whose 65504 it is infinite. Inputs of f16 only.
        pub f16_output: bool,
        /// FP8's P V, which the tensor cores sum in some 14 bits, is added to O in f32 registers after so many blocks of
        /// keys; 0: never.
        pub flush_every: i32 = Takes::within(0, 64).tuned_over(&[1, 2, 4]),
        /// With `flush_every=1`: columns of O that are summed at a time, where registers are short; 0: all of them.
        pub output_columns: i32 = Takes::multiples(32, 0, 256),
        /// With `flush_every=1`: a block's P V is summed, and added to O, before the next block's S is started, whose
        /// registers it has until then; else beside it.
        pub output_first: bool,
        /// Blocks of an elementwise bias of 16 bits that TMA brings into shared memory, each warpgroup's rows by
        /// themselves; 0: threads read their elements from memory.
        pub bias_stages: i32 = Takes::within(0, 4).tuned_over(&[1, 2]),
        /// The grid may start while the one before it in the stream ends (programmatic dependent launch);
        /// it sets up its barriers and then waits for that one's memory.
        pub dependent_launch: bool = Takes::all().tuned(),
    }
}

/// Shared memory that one CTA can have, bytes.
pub const MAX_SMEM_BYTES: i32 = 232_448;

impl Sm90Tile {
    /// Consumer warpgroups.
    #[must_use]
    pub const fn num_consumers(&self) -> i32 {
        self.block_m / 64
    }

    /// Rows of Q that are loaded at once.
    #[must_use]
    pub const fn q_rows(&self) -> i32 {
        if self.split_q { 64 } else { self.block_m }
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn num_threads(&self) -> i32 {
        128 * (self.warp_specialised as i32 + self.num_consumers())
    }

    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &FwdSpec) -> i32 {
        let (qk, v) = (padded_dim(spec.head_dim_qk), padded_dim(spec.head_dim_v));
        let q_buffers = match (self.split_q, self.lookahead) {
            (true, _) => self.num_consumers() + 1,
            (false, true) => 2,
            (false, false) => 1,
        };
        let (size_qk, size_v) = (elem_bytes(spec.dtype_qk), elem_bytes(spec.dtype_v));
        let q = q_buffers * tile_bytes(self.q_rows(), qk * size_qk);
        // V twice where it is turned: as it comes, and turned.
        let copies_of_v = if turns_v(spec) { 2 } else { 1 };
        let k_and_v =
            tile_bytes(self.block_n, qk * size_qk) + copies_of_v * tile_bytes(self.block_n, v * size_v);
        let kv = self.stages * k_and_v;
        let bias_slots = self.num_consumers() * self.bias_stages;
        let bias = bias_slots * tile_bytes(64, self.block_n * 2);
        let bias_barriers = if bias_slots > 0 { 2 * bias_slots } else { 2 };
        let barriers = 8 * (2 * q_buffers + 6 * self.stages + bias_barriers + 8);
        let work = (3 * 18 + 1) * 4;
        (q + kv + bias + barriers + work + 1023) / 1024 * 1024
    }

    /// The order of tiles for a problem's maximal lengths.
    ///
    /// # Errors
    /// More tiles than a schedule counts.
    pub fn schedule(&self, problem: &FwdProblem) -> Result<TileSchedule, String> {
        let (heads, row_blocks) = if self.cluster_heads { (self.cluster, 1) } else { (1, self.cluster) };
        TileSchedule::new(
            problem,
            UnitOfWork { rows: self.block_m * row_blocks, heads, pack_gqa: self.pack_gqa, kv_parts: 1 },
        )
    }

    /// CTAs to launch.
    #[must_use]
    pub fn grid(&self, schedule: &TileSchedule, num_sms: u32) -> u32 {
        let tiles = schedule.num_tiles.max(1).unsigned_abs();
        let cluster = self.cluster.unsigned_abs();
        cluster * if self.order == TileOrder::Single { tiles } else { tiles.min(num_sms / cluster) }
    }

    /// Leaves registers to what changes scores or P: smaller blocks, no next tile's product, no second way through a
    /// block.
    fn take_registers(&mut self, spec: &FwdSpec) {
        self.block_n = self.block_n.min(if widest(spec) > 192 { 64 } else { 96 });
        (self.lookahead, self.split_q, self.wait_anchor, self.skip_row_max) = (false, false, 0, false);
    }

    /// What FP8 changes of a tile of 16-bit types. With every row's maximum, since scores of 8-bit elements are not
    /// computed again. Registers, of which a thread has 232 (three warpgroups: 160), decide: of S
    /// `block_n / 2`, of O `head_dim_v / 2`, as many again for what is not flushed yet (or those of `output_columns`), of P
    /// `block_n / 8`.
    ///
    /// Sums modelled at 128k keys (docs/kernels/sm90-fwd.md), V of mean 1, where they hurt most, O's relative error: f32 7e-4,
    /// flushed after each block 1.0e-3, two 1.8e-3, four 4.2e-3, never 0.58. bf16 rounds O itself by 1.7e-3.
    ///
    /// TFLOP/s below: one H200, e4m3, full, S 8192.
    const fn take_fp8(&mut self, spec: &FwdSpec) {
        self.skip_row_max = false;
        self.lazy_rescale_log2 = 0;
        if !spec.dtype_v.is_fp8() {
            return;
        }
        (self.block_m, self.block_n, self.wait_anchor, self.flush_every, self.output_columns) =
            match (padded_dim(spec.head_dim_qk), padded_dim(spec.head_dim_v)) {
                // Two warpgroups 428 before, three 616; 160 keys, output first 629, beside the next S 632 with spills.
                (..=64, 64) if matches!(spec.mask, MaskKind::Full) => (192, 160, 0, 1, 32),
                (..=64, 64) => (192, 128, 16, 1, 0),
                // The turn passed on after the maximum, beside the usual: never flushed 918 and 838, each other block
                // 845 and 755; each block, the usual 834.
                (_, 64 | 96 | 128) => (128, 128, 32, 1, 0),
                // 64 columns at a time: spills of 8 to 16 bytes in some.
                (_, 160 | 192 | 224) => (128, 128, 0, 1, 32),
                // Beside the next S: 96 keys 956, with 64 columns at a time 1029, 64 keys 884; output first 1111.
                _ => (128, 128, 0, 1, 64),
            };
        let v = padded_dim(spec.head_dim_v);
        self.output_first = v > 192 || self.block_n == 160;
        self.turn_after_max = v <= 128 && self.block_m == 128;
        (self.lookahead, self.split_q) = (v <= 192, false);
    }

    /// What an elementwise bias of 16 bits changes: it takes shared memory, which lookahead or keys give.
    fn take_bias(&mut self, spec: &FwdSpec) {
        self.bias_stages = 1;
        match widest(spec) {
            ..=96 => {}
            128 => (self.block_n, self.wait_anchor, self.split_q) = (128, 32, true),
            _ => {
                self.block_n = self.block_n.min(96);
                (self.lookahead, self.split_q, self.wait_anchor) = (false, false, 0);
            }
        }
        // Above D 192, and of three warpgroups' 160 registers where a mask cuts blocks, it spills beside the bias.
        self.skip_row_max &= widest(spec) <= 192 && (self.block_m < 192 || spec.mask == MaskKind::Full);
    }

    /// What dropout changes, beside nothing else: two bits a score are known before it, and few registers more are
    /// taken than without it.
    ///
    /// Causal bf16 on an H200, TFLOP/s: D 64 152 with three warpgroups and 96 keys, 156 with lookahead, 178 with two, 128
    /// keys and no row-max reductions; D 128 275 with 96 keys, 278 with lookahead and 128, 292 without row-max reductions.
    fn take_dropout(&mut self, spec: &FwdSpec) {
        let plain = *self;
        self.take_registers(spec);
        if let dim @ (64 | 128) = widest(spec) {
            (self.block_m, self.block_n, self.lookahead) = (128, 128, true);
            (self.wait_anchor, self.skip_row_max) = (dim / 4, plain.skip_row_max);
        }
    }

    /// So that a row's bits depend on its own sequence alone, in a call of any lengths: the blocks of keys that the
    /// spec's table has, and no decision that rows share. What remains (rows of a CTA, clusters, packed heads, the
    /// order) changes no row's arithmetic.
    pub fn make_batch_invariant(&mut self, spec: &FwdSpec) {
        let table = default_tile(spec);
        (self.block_n, self.wait_anchor) = (table.block_n, table.wait_anchor);
        self.skip_row_max = false;
    }

    /// Whether a row's bits depend on its own sequence alone.
    #[must_use]
    pub fn is_batch_invariant(&self, spec: &FwdSpec) -> bool {
        !self.skip_row_max && self.block_n == default_tile(spec).block_n
    }

    /// Workspace bytes, zero before each launch.
    #[must_use]
    pub fn counter_bytes(&self, schedule: &TileSchedule, num_sms: u32) -> u64 {
        let cluster = self.cluster.unsigned_abs();
        schedule.counter_bytes(self.order, self.grid(schedule, num_sms) / cluster)
    }

    /// The inner box of the tensor maps of Q and K (`head_dim_qk`) or V (`head_dim_v`), elements; in bytes it is the
    /// swizzle.
    #[must_use]
    pub const fn box_dim(head_dim: i32, dtype: DType) -> i32 {
        swizzle_span(padded_dim(head_dim), dtype)
    }

    /// The box of the tensor map of K, or of V: a CTA's share of a block. Row-major `(dim, keys)`; of a
    /// column-major V (`columns`) `(keys, dim)`.
    #[must_use]
    pub const fn kv_box(&self, head_dim: i32, dtype: DType, columns: bool) -> [i32; 4] {
        if columns {
            [swizzle_span(self.block_n, dtype), padded_dim(head_dim) / self.cluster, 1, 1]
        } else {
            [Self::box_dim(head_dim, dtype), self.block_n / self.cluster, 1, 1]
        }
    }

    /// The box of the bias's tensor map `(key, query, head, batch)`: a swizzle's keys of a warpgroup's rows.
    #[must_use]
    pub const fn bias_box(&self) -> [i32; 4] {
        [swizzle_span(self.block_n, DType::Bf16), 64, 1, 1]
    }
}

/// A head dimension as the tiles have it; TMA fills the rest with zeros.
#[must_use]
pub const fn padded_dim(head_dim: i32) -> i32 {
    if head_dim <= 64 { 64 } else { (head_dim + 31) / 32 * 32 }
}

/// Of the widest swizzle that divides a row, in elements.
const fn swizzle_span(elems: i32, dtype: DType) -> i32 {
    let size = elem_bytes(dtype);
    let row_bytes = elems * size;
    let span_bytes = if row_bytes % 128 == 0 {
        128
    } else if row_bytes % 64 == 0 {
        64
    } else {
        32
    };
    span_bytes / size
}

const fn elem_bytes(dtype: DType) -> i32 {
    dtype.size_bytes() as i32
}

const fn tile_bytes(rows: i32, row_bytes: i32) -> i32 {
    (rows * row_bytes + 1023) / 1024 * 1024
}

/// Whether V is turned in shared memory: as the device's function of that name.
const fn turns_v(spec: &FwdSpec) -> bool {
    spec.dtype_v.is_fp8() && matches!(spec.v_layout, VLayout::RowMajor)
}

/// Whether the kernel computes this problem, and if not, why. Addresses, which a problem has not, must
/// be multiples of 16.
///
/// # Errors
/// The first fact that it does not take.
pub fn accepts(problem: &FwdProblem) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    problem.refuse_mixed_layouts(NAME)?;
    problem.refuse_cache_updates(NAME)?;
    let (qk, v) = (problem.dtype_qk, problem.dtype_v);
    let wide = |dtype| matches!(dtype, DType::F16 | DType::Bf16);
    let fp8 = |dtype| matches!(dtype, DType::E4m3Fn | DType::E5m2);
    if !(wide(qk) && v == qk || fp8(qk) && (fp8(v) || wide(v))) {
        return refuse(format!(
            "dtype_qk {qk} with dtype_v {v} is not one 16-bit type, OCP FP8, or OCP FP8 with a 16-bit V"
        ));
    }
    let dims = problem.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > 256 {
            return refuse(format!("{field} {dim} is larger than 256"));
        }
    }
    if problem.write_keep_mask {
        return refuse("write_keep_mask: it skips the blocks that the mask hides".to_owned());
    }
    for (field, length) in [("seqlen_q", dims.seqlen_q), ("seqlen_k", dims.seqlen_k)] {
        if length >= 1 << 29 {
            return refuse(format!("{field} {length} is not below 2^29"));
        }
    }
    let can_copy = problem.v_layout == VLayout::RowMajor && !fp8(qk);
    if let (Some((name, axis, stride, multiple)), false) = (odd_stride(problem), can_copy) {
        return refuse(format!(
            "{name}.{axis} stride {stride} is not a multiple of {multiple} below 2^40 bytes, as TMA needs, which \
             alone loads FP8 and a column-major V"
        ));
    }
    Ok(())
}

/// The strides that are used, but those of 1 between the elements of a row.
pub(crate) fn strides(problem: &FwdProblem) -> impl Iterator<Item = (&'static str, &'static str, i64)> {
    let operands = [
        ("q", problem.q, problem.shape_q(), true),
        ("k", problem.k, problem.shape_k(), true),
        ("v", problem.v, problem.shape_v(), problem.v_layout == VLayout::RowMajor),
    ];
    operands.into_iter().flat_map(|(name, strides, shape, rows)| {
        let inner = if rows { ("seq", strides.seq, shape.seq) } else { ("dim", strides.dim, shape.dim) };
        [("batch", strides.batch, shape.batch), inner, ("head", strides.head, shape.head)]
            .into_iter()
            .filter(|&(_, _, extent)| extent > 1)
            .map(move |(axis, stride, _)| (name, axis, stride))
    })
}

/// The first stride that TMA does not take, and what it would have to be a multiple of: of 16 bytes.
fn odd_stride(problem: &FwdProblem) -> Option<(&'static str, &'static str, i64, i64)> {
    strides(problem).find_map(|(name, axis, stride)| {
        let size = i64::from(elem_bytes(if name == "v" { problem.dtype_v } else { problem.dtype_qk }));
        let odd = stride % (16 / size) != 0 || stride >= (1 << 40) / size;
        odd.then_some((name, axis, stride, 16 / size))
    })
}

/// [`Sm90Tile::copy_bytes`] for a problem: 0 where TMA takes its strides, else the most bytes
/// that divide every one.
pub(crate) fn copy_bytes(problem: &FwdProblem) -> i32 {
    if odd_stride(problem).is_none() {
        return 0;
    }
    let divides = |&bytes: &i32| strides(problem).all(|(_, _, stride)| stride * 2 % i64::from(bytes) == 0);
    [16, 8, 4].into_iter().find(divides).unwrap_or(2)
}

/// The first stride of an elementwise bias that TMA does not take, if there is one.
#[must_use]
pub fn odd_bias_stride(problem: &FwdProblem) -> Option<(&'static str, i64)> {
    let Bias::Elementwise(bias) = problem.bias else {
        return None;
    };
    let shape = problem.shape_bias(bias.broadcast);
    let Strides { batch, seq, head, .. } = bias.strides;
    // A map has one head or one batch where their stride is 0, but all the rows.
    [("seq", seq, shape.seq, 1), ("head", head, shape.head, 0), ("batch", batch, shape.batch, 0)]
        .into_iter()
        .find(|&(_, stride, extent, least)| {
            extent > 1 && (stride < least || stride % 8 != 0 || stride >= 1 << 39)
        })
        .map(|(axis, stride, ..)| (axis, stride))
}

/// The tile for a problem that the kernel [`accepts`].
#[must_use]
pub fn choose_tile(problem: &FwdProblem) -> Sm90Tile {
    let spec = FwdSpec::of(problem);
    let dims = problem.dims;
    let mut tile = default_tile(&spec);
    let ratio = problem.gqa_ratio() as i32;
    let seqlen_q = i64::from(dims.seqlen_q);

    tile.copy_bytes = copy_bytes(problem);
    if tile.copy_bytes > 0 {
        // Beside three warpgroups the threads that copy would have too few registers.
        tile.block_m = tile.block_m.min(128);
    }
    // A short query: the heads of a group side by side, where that saves a tenth of the rows.
    if ratio > 1 && tile.block_m % ratio == 0 {
        let block_m = i64::from(tile.block_m);
        let apart = (seqlen_q + block_m - 1) / block_m * i64::from(ratio);
        let packed = (seqlen_q * i64::from(ratio) + block_m - 1) / block_m;
        tile.pack_gqa = packed * 10 <= apart * 9;
        if tile.pack_gqa && 64 % ratio != 0 && tile.split_q {
            (tile.split_q, tile.lookahead) = (false, false);
        }
    }
    let takes_128_rows = !tile.pack_gqa || 128 % ratio == 0;
    // Measured on an H200, TFLOP/s, the larger tile first: full D 128 bf16 502 and 585 at 512, 735 and 751 at 2k, f16
    // 588 and 592 at 3328; causal D 64 bf16 250 and 269 at 512, 330 and 362 at 1k, 457 and 433 at 2k.
    match (widest(&spec), spec.mask) {
        (128, MaskKind::Full) if !modifies(&spec) && dims.seqlen_k < 4096 => {
            (tile.block_n, tile.wait_anchor) = (128, 32);
        }
        // Of 192 rows a third would be empty: B64 H16 bf16 153 and 167, with four stages 170, at 128 (cuDNN 163), 253 and
        // 292, with four stages 287, at 256 (304); 398 and 366 at 512.
        (64, MaskKind::Full)
            if !modifies(&spec)
                && !spec.dtype_qk.is_fp8()
                && wasted_by_192_rows(seqlen_q)
                && takes_128_rows =>
        {
            tile.block_m = 128;
            if dims.seqlen_k <= 128 {
                tile.stages = 4;
            }
        }
        (64, MaskKind::Upper) if dims.seqlen_k <= 1024 && !(tile.pack_gqa && 128 % ratio != 0) => {
            tile.block_m = 128;
        }
        _ => {}
    }
    let rows = if tile.pack_gqa { seqlen_q * i64::from(ratio) } else { seqlen_q };
    if rows <= 64 && (!tile.pack_gqa || 64 % ratio == 0) {
        tile.block_m = 64;
    }

    // Beyond, 2 c / (1 + exp(2 y / c)) loses what of y is far below c: its error is some 3e-7 c.
    if problem.softcap.is_some_and(|cap| !(1e-3..=64.0).contains(&cap)) {
        tile.fast_softcap = false;
        tile.take_registers(&spec);
    }
    if tile.bias_stages > 0 && (tile.copy_bytes > 0 || tile.pack_gqa || odd_bias_stride(problem).is_some()) {
        tile.bias_stages = 0;
        tile.take_registers(&spec);
    }
    if tile.copy_bytes == 0 {
        share_loads(problem, &spec, &mut tile);
    }

    let strides = problem.o;
    let shape = problem.shape_o();
    let sixteen_bytes = 16 / elem_bytes(spec.dtype_o);
    let whole = |stride: i64, extent: u32| extent <= 1 || stride % i64::from(sixteen_bytes) == 0;
    tile.vector_store &= dims.head_dim_v.is_multiple_of(sixteen_bytes.unsigned_abs())
        && whole(strides.batch, shape.batch)
        && whole(strides.seq, shape.seq)
        && whole(strides.head, shape.head);
    tile
}

/// Whether tiles of 192 query rows compute a fifth more rows than those of 128.
const fn wasted_by_192_rows(seqlen_q: i64) -> bool {
    (seqlen_q + 191) / 192 * 192 * 5 >= (seqlen_q + 127) / 128 * 128 * 6
}

/// Whether scores or P are changed on the way.
fn modifies(spec: &FwdSpec) -> bool {
    modifies_score(spec) || spec.dropout
}

/// Whether scores are.
fn modifies_score(spec: &FwdSpec) -> bool {
    spec.softcap || spec.bias != BiasKind::None
}

/// Whether that takes few registers: a soft-cap alone, or ALiBi alone.
fn modifies_lightly(spec: &FwdSpec) -> bool {
    let alone = spec.softcap != (spec.bias == BiasKind::Alibi);
    alone && spec.bias != BiasKind::Elementwise && !spec.dropout
}

/// Whether TMA can bring the bias: of 16 bits, and not beside a soft-cap, which wants natural scores first.
fn adds_wide_elements(spec: &FwdSpec) -> bool {
    spec.bias == BiasKind::Elementwise && !spec.softcap && spec.dtype_bias.size_bytes() == 2
}

/// The larger head dimension, as the tiles have it.
fn widest(spec: &FwdSpec) -> i32 {
    padded_dim(spec.head_dim_qk).max(padded_dim(spec.head_dim_v))
}

/// Clusters of two that load half of K and V each, where that was measured to gain: half the traffic from the L2,
/// whose energy the tensor cores then have.
///
/// TFLOP/s on an H200, bf16, the lone CTA first. D 128 full 766 and 767 at 4k; causal 733 and 725 at 4k, 784 and 784 at
/// 8k, 807 and 814 at 16k; a group's heads 784 and 795 at 8k. D 192 at 8k: full 832 and 838, causal 803 and 815;
/// 192/128 824 and 829, 797 and 803. D 256 full 823 and 829 at 4k, 850 and 855 at 16k; causal 756 and 754 at 4k, and in
/// clusters it spills. D 64, whose three warpgroups of two CTAs wait for each other, before: 569 and 527.
fn share_loads(problem: &FwdProblem, spec: &FwdSpec, tile: &mut Sm90Tile) {
    let dims = problem.dims;
    let plain = spec.kv_layout == KvKind::Strided && !modifies(spec) && !spec.dtype_qk.is_fp8();
    if !plain || tile.pack_gqa || tile.block_m != 128 {
        return;
    }
    let pairs_of_heads = problem.gqa_ratio().is_multiple_of(2);
    let least = match (widest(spec), spec.mask) {
        (128 | 256, MaskKind::Full) => 4096,
        (192, MaskKind::Full | MaskKind::Upper) => 8192,
        (128, MaskKind::Upper) if pairs_of_heads => 8192,
        (128, MaskKind::Upper) => 16384,
        _ => return,
    };
    if dims.seqlen_q.min(dims.seqlen_k) < least {
        return;
    }
    tile.cluster = 2;
    tile.order = TileOrder::Dynamic;
    tile.cluster_heads = pairs_of_heads && (widest(spec), spec.mask) == (128, MaskKind::Upper);
    if (padded_dim(spec.head_dim_v), widest(spec), spec.mask) == (128, 192, MaskKind::Upper) {
        tile.wait_anchor = 24;
    }
}

/// The tile for long sequences of a spec.
#[must_use]
#[allow(clippy::match_same_arms, reason = "a table: a row a head dimension")]
pub fn default_tile(spec: &FwdSpec) -> Sm90Tile {
    let (qk, v) = (padded_dim(spec.head_dim_qk), padded_dim(spec.head_dim_v));
    let full = spec.mask == MaskKind::Full;
    // (block_m, block_n, lookahead, wait_anchor)
    let (block_m, block_n, lookahead, wait_anchor) = match qk.max(v) {
        // Anchor 0: full 559 beside 572 at 2k, 618 beside 640 at 16k; causal alike.
        64 => (192, 128, true, 16),
        // Two warpgroups and 176 keys: 645 beside 680 at 8k. Anchor 0: 733 beside 739; causal 702 beside 706.
        96 => (192, 112, true, 28),
        128 if full => (128, 160, true, 40),
        // 144 keys: 8k 773 beside 784.
        128 => (128, 128, true, 32),
        160 => (128, 112, false, 0),
        192 if v <= 128 => (128, 128, false, 32),
        // 112 keys, which leave no room to look ahead: 8k full 831 beside 838, causal 808 beside 815.
        192 => (128, 96, true, 0),
        // 80 keys: full 551 beside 571 at 512, 849 beside 849 at 16k. Without lookahead: full 573 beside 607 at 512,
        // 703 beside 720 at 1k, 853 beside 855 at 16k; causal 360 beside 376, 530 beside 537.
        _ => (128, 64, true, 0),
    };
    // Beside sums of FP8 that are not flushed yet a soft-cap alone spills too.
    let heavy = modifies(spec) && (!modifies_lightly(spec) || spec.dtype_v.is_fp8());
    let mut tile = Sm90Tile {
        block_m,
        block_n,
        stages: 2,
        // Of unlike tiles a fixed order leaves up to a fifth of the SMs idle: 16k causal, D 128, 576
        // TFLOP/s fixed, 729 dynamic.
        order: if full && spec.kv_layout == KvKind::Strided { TileOrder::Static } else { TileOrder::Dynamic },
        ping_pong: true,
        turn_after_max: false,
        lookahead,
        // Where there is no room for a second Q.
        split_q: qk.max(v) >= 192 && lookahead,
        // Full masks: 8 has 13 % more RMSE than exact maxima with outliers in the input, 6 has 8 %, and they are equally
        // fast. Causal ones, whose first rows start from few keys, bf16 D 128: 354 with 6, 368 with 8 at 512; 358 and 362
        // with 8 and 11 at 512, 504 and 509 at 1k, 756 and 759 at 8k; Q four times as large 0.256 and 0.238 ms.
        lazy_rescale_log2: if full { 6 } else { 11 },
        wait_anchor,
        exp2_polynomial_every: 0,
        // Without and with, bf16, full: D 64 605 and 618 at 16k, D 128 571 and 585 at 512, 781 and 795 at 16k, D 256
        // 838 and 849; causal: D 64 352 and 362 at 1k, D 128 357 and 369 at 512, 615 and 642 at 2k, 785 and 802.
        // A window of 512 keys has two or three such blocks: 469 and 463.
        skip_row_max: spec.mask != MaskKind::Band,
        // Simulated, independent normal scores of standard deviation s: with a threshold of 2^6 (full) 25 blocks raise a
        // warpgroup's maxima 0.5 times at s = 2 and 6.5 times at 3, with 2^11 31 blocks 0.1 times at 3 and 2 times at 4. At
        // 8 and 11 the tile is exact with s = 3 and 4, and is not with 2 and 3.
        exact_max_spread_log2: if full { 8 } else { 11 },
        vote_after: 4,
        pack_gqa: false,
        fast_softcap: spec.softcap && spec.bias == BiasKind::None,
        vector_store: spec.dtype_o != DType::F32,
        copy_bytes: 0,
        warp_specialised: true,
        cluster: 1,
        cluster_heads: false,
        q_in_registers: false,
        f16_scores: false,
        f16_output: false,
        flush_every: 0,
        output_columns: 0,
        output_first: false,
        bias_stages: 0,
        // Back to back on an H200, bf16, D 128, us a call without and with: 6.6 and 5.9 (B1 H4 S128), 11.2 and 10.2
        // (B1 H16 S512), 34.2 and 33.4 (B8 H16 S512).
        dependent_launch: true,
    };
    if spec.dtype_qk.is_fp8() {
        tile.take_fp8(spec);
    }
    if adds_wide_elements(spec) && !spec.dropout {
        tile.take_bias(spec);
    } else if spec.dropout && !modifies_score(spec) && !spec.dtype_v.is_fp8() {
        tile.take_dropout(spec);
    } else if heavy {
        tile.take_registers(spec);
    }
    tile
}

/// The kernel for a spec and a tile. What it binds is in the crate's README.
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm90Tile) -> KernelSource {
    let smem_assert = format!(
        "static_assert(sizeof(sm90::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); \
         sm90::fwd<kSpec, kTile>(p, maps, schedule);",
        tile.smem_bytes(spec)
    );
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: if tile.cluster > 1 {
            "__cluster_dims__(kTile.cluster, 1, 1) __launch_bounds__(sm90::num_threads(kTile), 1)"
        } else {
            "__launch_bounds__(sm90::num_threads(kTile), 1)"
        },
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ sm90::Maps maps, \
                 const __grid_constant__ TileSchedule schedule",
        call: &smem_assert,
    };
    let sums = |f16| if f16 { Sums::F16 } else { Sums::F32 };
    let (q, scores) =
        (if tile.q_in_registers { OperandA::Registers } else { OperandA::Shared }, sums(tile.f16_scores));
    // Keys that one product of P V contracts, of which a block computed in part has whole steps.
    let depth = 32 / elem_bytes(spec.dtype_v);
    let shapes = [
        WgmmaShape { dtype: spec.dtype_qk, n: tile.block_n, a: q, sums: scores },
        WgmmaShape {
            dtype: spec.dtype_qk,
            n: (tile.block_n / 2 + depth - 1) / depth * depth,
            a: q,
            sums: scores,
        },
        WgmmaShape {
            dtype: spec.dtype_v,
            n: if tile.output_columns > 0 { tile.output_columns } else { padded_dim(spec.head_dim_v) },
            a: OperandA::Registers,
            sums: sums(tile.f16_output),
        },
    ];
    let rendered = [wgmma::header(&shapes), schedule::header(), host_header()];
    crate::source(entry.render(), rendered)
}

/// `fmha/sm90_host.h`: what this file shares with the device.
fn host_header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/tile_schedule.h>\n\nnamespace fmha {{\n\n{}\n}}  // namespace fmha\n",
        Sm90Tile::c_definition()
    );
    Header::rendered("fmha/sm90_host.h", text)
}
