//! The Hopper forward kernel: its tile, its schedule, its workspace, its boxes.

use fmha_core::fields::Takes;
use fmha_core::functions::max;
use fmha_core::memory::Size;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::Candidates;
use fmha_core::{
    DType, Dims, FwdProblem, MaskKind, VLayout, Workspace, abi_enum, abi_functions, abi_memory, abi_spec,
};

use crate::operands::{page_keys, swizzle_span};
use crate::round_up;
use crate::schedule::{FOLD_ALIGN, SHARES_AT, UnitOfWork, WORK_BYTES, WORK_SLOTS};
pub use crate::schedule::{TileOrder, TileSchedule};
use crate::split::{self, Cut, RowsAtOnce, Shares};
use crate::tile_list;

mod accepts;
mod check;
mod cost;
mod entries;
pub mod recipe;
mod table;
mod values;

pub use accepts::{accepts, reads_pages_by_tma};
pub(crate) use accepts::{odd_bias_stride, reads_as_it_lies, takes};
pub use cost::{LEAST_GAIN_OF_ORDER, LEAST_GAIN_OF_SHAPE};
pub use entries::{fwd, fwd_masked, fwd_of_arriving_keys};
use table::adds_wide_elements;
pub(crate) use table::micros_of_few;
pub use table::{
    PREPARE_BEFORE_ROWS, PREPARE_BESIDE_ROWS, PREPARED_BYTES, choose_tile, choose_tile_in_parts,
    default_tile, walk_of_few, ways_of_few,
};
pub use values::{PREPARE_NAME, PREPARE_THREADS, PrepareV, PreparedValues, prepare_values};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm90";

/// Header that the kernel's entry includes.
pub const HEADER: &str = "fmha/sm90/fwd/fwd.cuh";

/// Device header of the kernel under masks as data (tensors).
const MASKED_HEADER: &str = "fmha/sm90/fwd/fwd_masked.cuh";

/// Whether consumer warpgroups issue their products alternately, so that one's products overlap another's
/// exponentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PingPong {
    /// Each warpgroup issues its products as soon as it can.
    Off,
    /// The next warpgroup may issue when this one's products are issued.
    AtIssue,
    /// The next warpgroup may issue when this one's maxima of a block are there, so that their exponentials
    /// do not coincide.
    AfterMax,
}

abi_enum!(PingPong { Off, AtIssue, AfterMax });

/// Whether the next tile's first scores are started with this tile's last output, and where that tile's Q lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lookahead {
    /// The next tile's scores are not started early.
    Off,
    /// Q lies in a second buffer.
    SecondQ,
    /// Q lies in pieces of 64 rows with one spare piece: this needs less shared memory than a second Q.
    SparePiece,
}

abi_enum!(Lookahead { Off, SecondQ, SparePiece });

/// Type of the product P V, and how its sums are added to O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueProduct {
    /// Product of V's own type, summed over all blocks by the tensor cores: in f32 for 16-bit types, with
    /// some 14 bits for FP8.
    Direct,
    /// Product of f16: a V of FP8 is converted to f16 in shared memory, exactly; the sums are f32.
    F16,
    /// Product in FP8, whose sums are added to O in f32 registers after each block of keys, while the next block's
    /// S is computed.
    Flushed,
    /// Product of FP8, added to O as with `Flushed`, but before the next block's S is started: until then the
    /// sums use the registers of S.
    FlushedFirst,
}

abi_enum!(ValueProduct { Direct, F16, Flushed, FlushedFirst });

abi_spec! {
    /// Tile of the kernel: how it computes.
    pub struct Sm90Tile {
        /// Query rows of a CTA: 64, 128 or 192, 64 to a consumer warpgroup.
        pub block_m: i32 = Takes::among(&[64, 128, 192]).tuned(),
        /// Keys of a block: a multiple of 16 up to 256.
        pub block_n: i32 = Takes::multiples(16, 16, 256).tuned_over(&[64, 80, 96, 112, 128, 144, 160, 176, 192]),
        /// Blocks of K, and of V, in shared memory at a time.
        pub stages: i32 = Takes::within(1, 8).tuned_over(&[2, 3, 4]),
        /// Order in which CTAs take tiles.
        pub order: TileOrder = Takes::all().tuned(),
        /// Whether warpgroups issue products to the tensor cores alternately.
        pub ping_pong: PingPong = Takes::all().tuned(),
        /// Whether the next tile's first scores are started with this tile's last output.
        pub lookahead: Lookahead = Takes::all().tuned(),
        /// O is rescaled only when a maximum grew by more than this, in log2; 0: when it grew.
        pub lazy_rescale_log2: i32 = Takes::within(0, 11).tuned_over(&[0, 8]),
        /// Number of a thread's `block_n / 2` exponentials that ptxas must place before the wait for `P V`;
        /// 0: ptxas decides.
        pub wait_anchor: i32 = Takes::within(0, 128).tuned_over(&[0, 16, 32, 40, 48]),
        /// Whether blocks that no mask cuts skip the row-max reduction and reuse the running maximum; their row
        /// sums show afterwards whether it was high enough.
        pub skip_row_max: bool = Takes::all().tuned(),
        /// Limit in log2 for `skip_row_max`: if a row's maximum exceeds that of a quarter of its keys by more, the
        /// warpgroup takes exact maxima throughout the tile. Tested before the first block that would skip.
        pub exact_max_spread_log2: i32 = Takes::within(1, 126).tuned_over(&[8, 11]),
        /// Number of blocks after which, with `skip_row_max`, the warpgroup votes again whether the rest of the
        /// tile takes exact maxima, because running maxima had to be raised; the next vote is after three times as
        /// many.
        pub vote_after: i32 = Takes::within(1, 1 << 20).tuned_over(&[2, 4, 16]),
        /// Rows are (query, head of a kv head's group) pairs, so that a short query fills a tile.
        pub pack_gqa: bool = Takes::all().tuned(),
        /// Whether, with `pack_gqa`, a group's heads do not divide `block_m`: a tile then has whole groups, and its
        /// remaining rows are padding.
        pub whole_groups: bool = Takes::nothing(),
        /// Whether scores are soft-capped with one exponential and one reciprocal, for caps of 1e-3 to 64; otherwise to
        /// f32's accuracy for every cap.
        pub fast_softcap: bool,
        /// Whether O is stored 16 bytes at a time (FP8: 4 or 2), which needs rows that are multiples of 16 bytes
        /// and begin at such addresses; otherwise by elements.
        pub vector_store: bool,
        /// 0: TMA loads Q, K and V. Otherwise three warps copy this many bytes at a time, which must divide every
        /// stride and address of Q, K and V: 16, 8, 4, or 2 (by elements).
        pub copy_bytes: i32 = Takes::among(&[0, 2, 4, 8, 16]),
        /// Keys of a page that one TMA instruction loads, a multiple of 8; 0 if a block's keys are contiguous, or
        /// warps copy them.
        pub page_keys: i32 = Takes::nothing(),
        /// Type of K and V in memory: Q's, or FP8 under a 16-bit Q, which two warps convert in shared memory.
        pub stored: DType = Takes::nothing(),
        /// Number of unconverted blocks of K and V of an FP8 cache in shared memory; 0 for other caches.
        pub raw_stages: i32 = Takes::nothing(),
        /// Number of CTAs (1 or 2) that share the loads of K and V.
        pub cluster: i32 = Takes::within(1, 2).tuned(),
        /// Whether a cluster's CTAs have equal query rows of neighbouring heads of a kv head's group; otherwise
        /// neighbouring query rows of one head.
        pub cluster_heads: bool = Takes::all().tuned(),
        /// Whether Q is held in registers during a tile; otherwise each product reads it from shared memory.
        pub q_in_registers: bool = Takes::all().tuned(),
        /// Type of the product P V.
        pub pv: ValueProduct,
        /// Where a row-major V of FP8 is converted to the layout that the products P V need; every place gives
        /// equal bits.
        pub prepare_v: PrepareV = Takes::all().tuned(),
        /// Number of columns of O that a flushed P V sums at a time, if registers are short; 0: all columns.
        pub output_columns: i32 = Takes::multiples(32, 0, 256),
        /// Number of blocks of an elementwise 16-bit bias that TMA loads into shared memory ahead, separately for each
        /// warpgroup's rows; 0: threads read their elements from memory.
        pub bias_stages: i32 = Takes::within(0, 4).tuned_over(&[1, 2]),
        /// Whether the grid may start while the previous grid of the stream ends (programmatic dependent launch). It
        /// sets up its barriers, and then waits for the previous grid's writes.
        pub dependent_launch: bool = Takes::all().tuned(),
        /// Split-KV: keys of a part, a multiple of `block_n`; a second kernel merges the parts. 0: a tile
        /// sees all keys.
        pub split_keys: i32 = Takes::multiples(16, 0, 1 << 24).tuned_over(&[0, 512, 1024, 2048, 4096]),
        /// Whether parts, with `split_keys`, have so many keys of every sequence, counted from its first;
        /// else they follow the longest one.
        pub fixed_parts: bool = Takes::all(),
        /// Whether a CTA processes all parts of its rows (with this many keys each, like `fixed_parts`) and merges them
        /// itself, with the same bits as a second kernel would; 0 if not.
        pub fold_keys: i32 = Takes::multiples(16, 0, 1 << 24),
        /// Whether the merged result of a CTA's parts lies in shared memory; otherwise it lies in the workspace.
        pub fold_in_shared: bool = Takes::all(),
        /// Number of CTAs that walk equal shares of all tiles' blocks, with `split_keys` keys each at least;
        /// 0: a CTA walks a tile, or a part of one.
        pub shares: i32 = Takes::within(0, MOST_SHARES),
    }
}

/// Most CTAs among which all tiles' blocks of keys are divided in equal shares.
const MOST_SHARES: i32 = 1 << 16;

/// Most unconverted blocks of an FP8 cache in shared memory: some 64 KB are then in flight.
const MOST_RAW_STAGES: i32 = 4;

/// Shared memory that one CTA can have, bytes.
pub const MAX_SMEM_BYTES: i32 = 232_448;

abi_functions! {
    fn rows_text() {
        /// A head dimension rounded up as in the tiles, for 8-bit elements and along columns; TMA fills the rest
        /// with zeros.
        pub const fn padded_dim(dim: i32) -> i32 {
            if dim <= 64 { 64 } else { round_up(dim, 32) }
        }

        /// Columns of a row in shared memory. A 16-bit row is rounded up to whole swizzles of 128 bytes if it has
        /// more than 128 columns, and if rows in memory do not begin at the L2's 32-byte sectors: 64-byte pieces of
        /// every second head would then span three sectors, often in two cache lines. D 136 causal at 11456 queries
        /// takes 880 us with 160 columns and 620 with 192; D 144, whose rows begin on sectors, takes 618 and 578
        /// (H200).
        const fn tile_dim(dim: i32, dtype: DType) -> i32 {
            let whole = dim > 128 || (dim > 64 && dim % 16 != 0);
            if whole && dtype.size_bytes() == 2 { round_up(dim, 64) } else { padded_dim(dim) }
        }

        /// Columns that products compute: for 16-bit types whole steps of the head dimension, not the padding of
        /// rows.
        const fn product_dim(dim: i32, dtype: DType) -> i32 {
            if dtype.size_bytes() == 2 { round_up(dim, 16) } else { padded_dim(dim) }
        }
    }
}

abi_functions! {
    fn tile_text() of tile: Sm90Tile {
        /// Number of consumer warpgroups, of 64 rows each; one more warpgroup loads.
        pub const fn num_consumers(&self) -> i32 {
            self.block_m / 64
        }

        /// Threads of a CTA.
        pub const fn num_threads(&self) -> i32 {
            128 * (1 + self.num_consumers())
        }

        /// Whether Q lies in pieces of a warpgroup's rows, with one spare piece.
        pub const fn splits_q(&self) -> bool {
            matches!(self.lookahead, Lookahead::SparePiece)
        }

        /// Whether the next tile's first scores are started with this tile's last output; Q then has a second buffer,
        /// or lies in pieces.
        pub const fn looks_ahead(&self) -> bool {
            !matches!(self.lookahead, Lookahead::Off)
        }

        /// Number of rows of Q that are loaded at once.
        pub const fn q_rows(&self) -> i32 {
            if self.splits_q() { 64 } else { self.block_m }
        }

        /// Number of buffers for Q, each of `q_rows` rows.
        const fn q_buffers(&self) -> i32 {
            match self.lookahead {
                Lookahead::SparePiece => self.num_consumers() + 1,
                Lookahead::SecondQ => 2,
                Lookahead::Off => 1,
            }
        }

        /// Whether a block's P V of 8-bit operands is added to O in f32 registers.
        pub const fn flushes_output(&self) -> bool {
            matches!(self.pv, ValueProduct::Flushed | ValueProduct::FlushedFirst)
        }

        /// Whether an 8-bit V is converted to f16 in shared memory (`widen_values.cuh`), so that P V is a product of
        /// f16.
        const fn widens_v(&self, spec: &FwdSpec) -> bool {
            spec.dtype_v.is_fp8() && matches!(self.pv, ValueProduct::F16)
        }

        /// Type of the operands of the product P V.
        const fn operand_v(&self, spec: &FwdSpec) -> DType {
            if self.widens_v(spec) { DType::F16 } else { spec.dtype_v }
        }

        /// Whether a row-major V is transposed in shared memory: wgmma reads 8-bit tiles only along rows, which for
        /// V must be the keys (`turn_values.cuh`).
        const fn turns_v(&self, spec: &FwdSpec) -> bool {
            self.operand_v(spec).is_fp8() && matches!(spec.v_layout, VLayout::RowMajor)
        }

        /// Whether V is prepared once for all tiles in the workspace, in the layout for the products
        /// (`prepare_values.cuh`).
        const fn takes_prepared_v(&self) -> bool {
            !matches!(self.prepare_v, PrepareV::InTile)
        }

        /// Whether V, if not prepared in the workspace, is in shared memory twice: as loaded, and in the layout for
        /// the products (`value_role.cuh`).
        const fn prepares_v(&self, spec: &FwdSpec) -> bool {
            !self.takes_prepared_v() && (self.widens_v(spec) || self.turns_v(spec))
        }

        /// Number of columns of V's rows in shared memory, or of its transposed rows if the products read it along
        /// the keys.
        const fn dim_v(&self, spec: &FwdSpec) -> i32 {
            if matches!(spec.v_layout, VLayout::ColMajor) || self.turns_v(spec) {
                padded_dim(spec.head_dim_v)
            } else {
                tile_dim(spec.head_dim_v, spec.dtype_v)
            }
        }

        /// Slots of a warpgroup's bias for one block.
        const fn num_bias_slots(&self) -> i32 {
            self.num_consumers() * self.bias_stages
        }
    }
}

abi_memory! {
    fn memory_text() as SmemParts;
    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    pub const fn smem_bytes(&self, spec: &FwdSpec) of tile: Sm90Tile {
        /// O in f32 of the parts of the keys so far, and their maxima and sums, where a CTA merges its rows' parts
        /// (`folded_output.cuh`). It is the first member, so that its address needs no computation.
        fold: "FoldPlace<spec, tile>" if self.fold_in_shared
            => Size::tile(round_up(4 * self.block_m * (product_dim(spec.head_dim_v, spec.dtype_v) + 2), 1024));
        /// V as it lies in memory, before it is prepared for the products.
        raw: "RawTile<spec, tile>" [self.stages] if self.prepares_v(spec)
            => Size::tile(self.block_n * padded_dim(spec.head_dim_v));
        /// Unconverted blocks of K and V of an FP8 cache, in the order in which they are loaded.
        cache: "RawBlock<spec, tile>" [self.raw_stages] => Size::tile(self.block_n * widest_row(spec));
        /// The bias of the next blocks, in tiles of one warpgroup's 64 rows.
        bias: "BiasTile<tile>" [self.num_bias_slots()] => Size::tile(64 * self.block_n * 2);
        /// Part of the dropout generator's work that is equal for all rows, one set for each consumer warp.
        quads: "DropoutQuads" [4 * self.num_consumers()] if spec.dropout => Size::of(512, 16);
        /// Q in one piece, or in pieces of one warpgroup's 64 rows.
        q: "QTile<spec, tile>" [self.q_buffers()]
            => Size::tile(self.q_rows() * tile_dim(spec.head_dim_qk, spec.dtype_qk) * elem_bytes(spec.dtype_qk));
        k: "KTile<spec, tile>" [self.stages]
            => Size::tile(self.block_n * tile_dim(spec.head_dim_qk, spec.dtype_qk) * elem_bytes(spec.dtype_qk));
        v: "VTile<spec, tile>" [self.stages]
            => Size::tile(self.block_n * self.dim_v(spec) * elem_bytes(self.operand_v(spec)));
        /// Barrier for Q: TMA bytes, or the arrivals of the threads that copied it.
        q_full: "Barrier" [self.q_buffers()] => Size::BARRIER;
        /// Barrier of a slot of Q that has been read: one arrival per warp that reads Q.
        q_empty: "Barrier" [self.q_buffers()] => Size::BARRIER;
        /// Barrier for one K block: TMA bytes, or the arrivals of the threads that copied it.
        k_full: "Barrier" [self.stages] => Size::BARRIER;
        /// Barrier of a slot of K that has been read: one arrival per consumer warp of the cluster.
        k_empty: "Barrier" [self.stages] => Size::BARRIER;
        /// Barrier of a V block that is ready for the products: TMA bytes, or after `v_raw` the arrivals of the zero or
        /// value role.
        v_full: "Barrier" [self.stages] => Size::BARRIER;
        /// Barrier for one V block that must still be prepared or partly zeroed, or for an unconverted block.
        v_raw: "Barrier" [max(self.stages, self.raw_stages)] => Size::BARRIER;
        /// Barrier of an unprepared block that has been read: one arrival per warp that prepares V, or converts K and
        /// V.
        v_raw_empty: "Barrier" [max(self.stages, self.raw_stages)] => Size::BARRIER;
        /// Barrier of a slot of V that has been read: one arrival per consumer warp of the cluster.
        v_empty: "Barrier" [self.stages] => Size::BARRIER;
        /// Barrier of a warpgroup's bias for one block: TMA bytes.
        bias_full: "Barrier" [max(self.num_bias_slots(), 1)] => Size::BARRIER;
        /// Barrier of a warpgroup's bias that has been read: one arrival per warp of the warpgroup.
        bias_empty: "Barrier" [max(self.num_bias_slots(), 1)] => Size::BARRIER;
        /// Barrier of a slot of the tile queue: the schedule role arrives when it has written the next tile.
        work_full: "Barrier" [WORK_SLOTS] => Size::BARRIER;
        /// Barrier with one arrival per warp that reads the tile index: consumers, load, zero or value, bias.
        work_empty: "Barrier" [WORK_SLOTS] => Size::BARRIER;
        /// Barrier at which the first CTA's schedule role arrives when it has written the second CTA's `claimed`: one
        /// arrival.
        claimed_full: "Barrier" => Size::BARRIER;
        /// Barrier at which the second CTA's schedule role arrives when it has read `claimed`: one arrival.
        claimed_empty: "Barrier" => Size::BARRIER;
        work: "Work" [WORK_SLOTS] => Size::of(WORK_BYTES, 4);
        /// Index of the next tile.
        claimed: "int32_t" => Size::WORD;
        /// A word that is stored and never read.
        unread: "uint32_t" => Size::WORD;
        /// One byte for each warp, 1 if it raised running maxima (`consume.cuh`).
        raised: "RaisedWarps" [self.num_consumers()] => Size::words(2);
    }
}

/// Elements of a row of K and V in shared memory: a cache of 8-bit elements has as many as one of 16-bit elements.
const fn widest_row(spec: &FwdSpec) -> i32 {
    max(tile_dim(spec.head_dim_qk, spec.dtype_qk), tile_dim(spec.head_dim_v, spec.dtype_v))
}

impl Sm90Tile {
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
    pub fn cut(&self, problem: &FwdProblem) -> Cut {
        let shares = (self.shares > 0).then(|| Shares {
            count: self.shares.unsigned_abs(),
            block_m: self.rows_of_tile(problem).unsigned_abs(),
            pack_gqa: self.pack_gqa,
        });
        Cut { keys: self.split_keys, block_n: self.block_n, fixed: self.fixed_parts, shares }
    }

    /// Sets the fields that follow from other fields, from the number of query heads per kv head, and from the page
    /// size.
    pub fn place(&mut self, problem: &FwdProblem) {
        let ratio = problem.gqa_ratio().max(1);
        self.whole_groups = self.pack_gqa && !self.block_m.unsigned_abs().is_multiple_of(ratio);
        self.page_keys = if self.copy_bytes == 0 { page_keys(problem, self.block_n) } else { 0 };
    }

    /// The tile with an equal order of keys, and so equal bits, for a cache stored in FP8: it is loaded unconverted
    /// and converted in shared memory, which [needs room](Self::take_raw_stages).
    #[must_use]
    pub const fn over_narrow_cache(self, stored: DType) -> Self {
        let lookahead = Lookahead::Off;
        Self { stored, cluster: 1, cluster_heads: false, bias_stages: 0, lookahead, ..self }
    }

    /// Sets the number of unconverted blocks of an FP8 cache to as many as fit the shared memory besides the rest
    /// of the tile.
    ///
    /// # Errors
    /// A text that none fits.
    pub fn take_raw_stages(&mut self, spec: &FwdSpec) -> Result<(), String> {
        let fits = |&raw_stages: &i32| Self { raw_stages, ..*self }.smem_bytes(spec) <= MAX_SMEM_BYTES;
        let most = (1..=MOST_RAW_STAGES).rev().find(fits);
        self.raw_stages = most.ok_or_else(|| {
            format!(
                "tile block_m={} block_n={} stages={}: shared memory of {MAX_SMEM_BYTES} bytes has no room for a block of a \
                 cache of {} as it lies",
                self.block_m, self.block_n, self.stages, self.stored
            )
        })?;
        Ok(())
    }

    /// Rows of a tile that are rows of a sequence.
    #[must_use]
    pub fn rows_of_tile(&self, problem: &FwdProblem) -> i32 {
        let ratio = problem.gqa_ratio().max(1).cast_signed();
        if self.whole_groups { self.block_m / ratio * ratio } else { self.block_m }
    }

    /// The queries of a call whose parts lie in the workspace at a time.
    #[must_use]
    pub fn rows_at_once(&self, problem: &FwdProblem) -> RowsAtOnce {
        self.cut(problem).rows_at_once(problem, self.rows_of_tile(problem), self.pack_gqa)
    }

    /// Candidates for the order of a call's tiles, with modelled times; the tile's own is first. Empty if the table's
    /// rule decides.
    #[must_use]
    pub fn orders(&self, problem: &FwdProblem, num_sms: u32) -> Candidates<TileOrder> {
        cost::orders(self, problem, num_sms)
    }

    /// Whether calls that differ from the problem only in sizes may have either order of tiles.
    #[must_use]
    pub fn has_orders(problem: &FwdProblem) -> bool {
        cost::has_orders(problem)
    }

    /// Candidates for the query rows and keys of a call's tiles, with modelled times; the tile's own are first. Empty
    /// if the table's rule decides.
    #[must_use]
    pub fn shapes(&self, problem: &FwdProblem, num_sms: u32) -> Candidates<(i32, i32)> {
        cost::shapes(self, problem, num_sms)
    }

    /// The tiles, besides this one and in its order, of calls that differ from the problem only in sizes: with other
    /// shapes, and for shared kv heads both with packed heads of a group and without, which depends on how many rows
    /// packing saves.
    #[must_use]
    pub fn of_other_sizes(&self, problem: &FwdProblem) -> Vec<Self> {
        let spec = spec_of(problem);
        let ratio = problem.gqa_ratio();
        let shaped = |tile: Self| {
            tile.shapes_of_other_sizes(problem).into_iter().map(move |shape| tile.of_shape(shape))
        };
        let other = Self { order: self.order, ..table::choose_tile_as(problem, Some(!self.pack_gqa)) };
        let is_other =
            other.pack_gqa != self.pack_gqa && other.cluster == 1 && other.prepare_v == self.prepare_v;
        let repacked = [other]
            .into_iter()
            .filter(|_| is_other)
            .flat_map(|other| [other].into_iter().chain(shaped(other)));
        shaped(*self).chain(repacked.filter(|tile| tile.check(&spec, ratio).is_ok())).collect()
    }

    /// Query rows and keys of tiles, besides its own, of calls that differ from the problem only in sizes.
    #[must_use]
    pub fn shapes_of_other_sizes(&self, problem: &FwdProblem) -> Vec<(i32, i32)> {
        cost::shapes_of_other_sizes(self, problem, &spec_of(problem))
    }

    /// The tile with this many query rows and keys, at least its own; with more keys it has fewer stages, so that they
    /// hold as many keys as before.
    #[must_use]
    pub const fn of_shape(&self, (block_m, block_n): (i32, i32)) -> Self {
        let block_n = if block_n > 1 { block_n } else { 1 };
        let wait_anchor = self.wait_anchor * block_n / self.block_n;
        let as_many_keys = self.stages * self.block_n / block_n;
        let stages = if as_many_keys < self.stages && as_many_keys >= 2 { as_many_keys } else { self.stages };
        Self { block_m, block_n, stages, wait_anchor, ..*self }
    }

    /// Microseconds of a call with the problem's largest lengths, by the model; `None` if there are more tiles than
    /// a schedule counts.
    #[must_use]
    pub fn modelled_micros(&self, problem: &FwdProblem, num_sms: u32) -> Option<f64> {
        Some(cost::micros(self, problem, &self.schedule(problem).ok()?, num_sms))
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

    /// Makes a row's bits depend on its own sequence alone, in a call of any lengths: the tile has the spec's
    /// table's blocks of keys, and makes no decision jointly for several rows. Everything else (rows of a CTA,
    /// clusters, packed heads, the order) does not change a row's arithmetic.
    pub fn make_batch_invariant(&mut self, spec: &FwdSpec) {
        let table = default_tile(spec);
        (self.block_n, self.wait_anchor) = (table.block_n, table.wait_anchor);
        self.skip_row_max = false;
        (self.split_keys, self.fixed_parts, self.fold_keys, self.shares) = (0, false, 0, 0);
        self.fold_in_shared = false;
    }

    /// Adjusts the tile of parts whose merging launch starts early (programmatic dependent launch). Parts are
    /// equally long, so no counter is needed; and for two consecutive launches that both start early the host takes
    /// 5.3 us, for one 4.3 us (an H200 with its host, the least of 4000 calls), at 14.1 and 13.9 us a call in a
    /// burst.
    pub(crate) fn launch_beside_merge(&mut self) {
        (self.order, self.dependent_launch) = (TileOrder::Static, false);
    }

    /// Sets a batch-invariant tile's parts of the keys, if a sequence may be long enough for several. Bits do not
    /// depend on whether CTAs or a second launch merge the parts: the price decides.
    pub fn take_fixed_parts(&mut self, problem: &FwdProblem, num_sms: u32) {
        let keys = split::fixed_keys(problem, self.block_n);
        if keys == 0 {
            return;
        }
        if table::folds_parts(problem, self, keys, num_sms) {
            self.fold_keys = keys;
            self.fold_where_there_is_room(&FwdSpec::of(problem));
            if self.order == TileOrder::Single {
                self.order = TileOrder::Static;
            }
            return;
        }
        (self.cluster, self.cluster_heads, self.prepare_v) = (1, false, PrepareV::InTile);
        self.launch_beside_merge();
        (self.split_keys, self.fixed_parts, self.shares) = (keys, true, 0);
    }

    /// Places the merged parts in shared memory if that has room; they may take the room of the next tile's Q.
    fn fold_where_there_is_room(&mut self, spec: &FwdSpec) {
        let here = Self { fold_in_shared: true, ..*self };
        let without = Self { lookahead: Lookahead::Off, ..here };
        let fits = |tile: &Self| tile.smem_bytes(spec) <= MAX_SMEM_BYTES;
        *self = [here, without].into_iter().find(fits).unwrap_or(*self);
    }

    /// Whether one thread loads K and V. That thread can wait for keys that arrive while the kernel runs.
    #[must_use]
    pub fn waits_for_keys(&self) -> bool {
        self.copy_bytes == 0 && self.split_keys == 0 && self.prepare_v == PrepareV::InTile
    }

    /// Whether a row's bits depend on its own sequence alone.
    #[must_use]
    pub fn is_batch_invariant(&self, spec: &FwdSpec) -> bool {
        (self.split_keys == 0 || self.fixed_parts)
            && !self.skip_row_max
            && self.block_n == default_tile(spec).block_n
    }

    /// Workspace: the tile counter, zeroed before each launch, and the parts of split keys or the parts that CTAs
    /// have merged.
    #[must_use]
    pub fn workspace(&self, problem: &FwdProblem, schedule: &TileSchedule, num_sms: u32) -> Workspace {
        let zeroed_bytes = self.counter_bytes(schedule, num_sms);
        let parts = self.cut(problem).workspace_bytes(problem, self.rows_at_once(problem).queries);
        let folds = self.fold_bytes(problem, self.grid(schedule, num_sms));
        Workspace { bytes: parts.max(folds).max(zeroed_bytes), zeroed_bytes }
    }

    /// Workspace bytes for this many CTAs that merge their own parts, with the bytes before; 0 if CTAs do not
    /// merge.
    fn fold_bytes(&self, problem: &FwdProblem, ctas: u32) -> u64 {
        if self.fold_keys == 0 || self.fold_in_shared {
            return 0;
        }
        let dims = problem.dims;
        let columns = product_dim(dims.head_dim_v.cast_signed(), problem.dtypes.v);
        // Four threads share a row, and each also stores four numbers for its two rows.
        let elems = u64::from(self.block_m.unsigned_abs()) * u64::from(columns.unsigned_abs() + 8);
        4 * SHARES_AT + FOLD_ALIGN + u64::from(ctas) * elems * 4
    }

    /// Bytes at the beginning of the workspace that must be zero before each launch.
    #[must_use]
    pub fn counter_bytes(&self, schedule: &TileSchedule, num_sms: u32) -> u64 {
        let cluster = self.cluster.unsigned_abs();
        schedule.counter_bytes(self.order, self.grid(schedule, num_sms) / cluster)
    }

    /// Extent in elements of the tensor maps' inner box for Q and K (`head_dim_qk`) or V (`head_dim_v`); in bytes
    /// it equals the swizzle span.
    #[must_use]
    pub const fn box_dim(head_dim: i32, dtype: DType) -> i32 {
        swizzle_span(tile_dim(head_dim, dtype), dtype)
    }

    /// The box of the tensor map of K or V: a CTA's share of a block, or a page's part of it. Row-major `(dim,
    /// keys)`; for a column-major V (`columns`) `(keys, dim)`.
    #[must_use]
    pub const fn kv_box(&self, head_dim: i32, dtype: DType, columns: bool) -> [i32; 4] {
        if columns {
            [swizzle_span(self.block_n, dtype), padded_dim(head_dim) / self.cluster, 1, 1]
        } else {
            let keys = if self.page_keys > 0 { self.page_keys } else { self.block_n };
            [Self::box_dim(head_dim, dtype), keys / self.cluster, 1, 1]
        }
    }

    /// The box of the tensor map of V: that of [`Self::kv_box`], or for a prepared V a CTA's share of a block,
    /// `(column, row)`.
    #[must_use]
    pub const fn v_box(&self, spec: &FwdSpec) -> [i32; 4] {
        if let PrepareV::InTile = self.prepare_v {
            return self.kv_box(spec.head_dim_v, spec.dtype_v, matches!(spec.v_layout, VLayout::ColMajor));
        }
        let [rows, columns] = self.prepared_block(spec);
        [swizzle_span(columns, self.operand_v(spec)), rows / self.cluster, 1, 1]
    }

    /// Rows and columns of a prepared block of V: `[keys, dim]` in f16, or `[dim, keys]`.
    #[must_use]
    pub const fn prepared_block(&self, spec: &FwdSpec) -> [i32; 2] {
        let dim = padded_dim(spec.head_dim_v);
        if matches!(self.pv, ValueProduct::F16) { [self.block_n, dim] } else { [dim, self.block_n] }
    }

    /// Element type of a prepared V.
    #[must_use]
    pub const fn prepared_type(&self, spec: &FwdSpec) -> DType {
        self.operand_v(spec)
    }

    /// The boxes of K and V: [`Self::kv_box`] and [`Self::v_box`]; for a cache that is converted, with the cache's
    /// own number of columns.
    #[must_use]
    pub const fn boxes_of_cache(&self, spec: &FwdSpec) -> [[i32; 4]; 2] {
        let (qk, v) = (spec.head_dim_qk, spec.head_dim_v);
        let mut boxes = [self.kv_box(qk, spec.dtype_qk, false), self.v_box(spec)];
        if self.raw_stages > 0 {
            boxes[0][0] = swizzle_span(tile_dim(qk, spec.dtype_qk), self.stored);
            boxes[1][0] = swizzle_span(tile_dim(v, spec.dtype_v), self.stored);
        }
        boxes
    }

    /// The box of the bias's tensor map `(key, query, head, batch)`: as many keys as a swizzle span has, and a
    /// warpgroup's rows.
    #[must_use]
    pub const fn bias_box(&self) -> [i32; 4] {
        [swizzle_span(self.block_n, DType::Bf16), 64, 1, 1]
    }
}

const fn elem_bytes(dtype: DType) -> i32 {
    dtype.size_bytes() as i32
}

/// The spec of a problem. A lower bound that hides no key at the largest lengths, as in a window longer than every
/// sequence, is dropped. B64 H16 S128 D128 in a window of 466 46.7 us, causal 44 (an H200).
#[must_use]
pub fn spec_of(problem: &FwdProblem) -> FwdSpec {
    let spec = FwdSpec::of(problem);
    if tile_list::serve(problem) {
        return tile_list::spec(problem);
    }
    let Dims { seqlen_q, seqlen_k, .. } = problem.dims;
    let is_causal = problem.mask.bounds().hi.is_some() && problem.part.is_whole();
    let hides_nothing = problem.mask.band(seqlen_q, seqlen_k).lo <= 1 - i64::from(seqlen_q);
    if spec.mask == MaskKind::Band && is_causal && hides_nothing {
        FwdSpec { mask: MaskKind::Upper, sink_columns: false, ..spec }
    } else {
        spec
    }
}
