//! The Hopper backward kernels: their tile, their workspace, their entries.

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, ArrivalParams, DevPtr};
use fmha_core::fields::{FieldValue as _, Takes};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::{BiasKind, BwdSpec, FwdSpec};
use fmha_core::tune::Candidates;
use fmha_core::{
    Bias, BwdProblem, DType, MaskKind, QLayout, Refusal, Shape, Strides, VLayout, abi_enum, abi_spec,
    abi_struct,
};

use crate::schedule::{L2_GROUP_BYTES, heads_per_l2_group};
use crate::sm90::MAX_SMEM_BYTES;
use crate::wgmma::{self, OperandA, Sums, WgmmaShape};

mod cost;
pub mod recipe;

/// The kernels' name in plans and refusals.
pub const NAME: &str = "sm90";

/// What their measured tiles are kept under: [`NAME`] is the forward kernel's too.
pub const LABEL: &str = "sm90-bwd";

/// The headers that their entries include.
pub const HEADERS: [&str; 6] = [
    "fmha/sm90/bwd/preprocess.cuh",
    "fmha/sm90/bwd/main.cuh",
    "fmha/sm90/bwd/postprocess.cuh",
    "fmha/sm90/bwd/head_sums.cuh",
    "fmha/sm90/bwd/repair.cuh",
    "fmha/sm90/bwd/dbias.cuh",
];

/// The loop of the consume role: what a consumer has of keys and of the dimension, and how the products of a
/// block follow each other (`consume/`, a file each).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BwdWalk {
    /// To head dimension 128: 64 keys and the whole dimension; a query block after another, dP started beside
    /// the scores.
    InOrder,
    /// The same, with dP started when P is made, which leaves modifiers its registers.
    LateDp,
    /// The same, with the next block's scores started before this block's dK is waited for; two blocks of Q
    /// are then held at a time, and a third stage hides their loading.
    EarlyScores,
    /// From 129 to 192, where both dimensions together are at most 320: P and dS of half of a block's queries at a time.
    HalfBlocks,
    /// Beyond 128: all consumers have the CTA's 64 keys, and each 32 of the queries of S and a part of the
    /// dimension of dQ, dK and dV.
    SplitDims,
    /// The same, with the next block's scores started before this block's products are done.
    SplitEarly,
    /// The same at 256 by two CTAs of a cluster, which have neighbouring key blocks, send each other their
    /// dS, and each add a half of dQ's dimension for both.
    InClusters,
    /// The same at 192, whose thirds two consumers cannot share out: one has dK, the other dV, of all columns.
    GradientEach,
}

impl BwdWalk {
    const ALL: [Self; 8] = [
        Self::InOrder,
        Self::LateDp,
        Self::EarlyScores,
        Self::HalfBlocks,
        Self::SplitDims,
        Self::SplitEarly,
        Self::InClusters,
        Self::GradientEach,
    ];

    /// Whether consumers share out the dimension, and so have all keys of a CTA.
    #[must_use]
    pub const fn splits_dims(self) -> bool {
        matches!(self, Self::SplitDims | Self::SplitEarly | Self::InClusters | Self::GradientEach)
    }

    /// Whether the next block's scores are under way while this block's gradients are.
    const fn has_next_scores(self) -> bool {
        matches!(self, Self::EarlyScores | Self::SplitEarly | Self::InClusters | Self::GradientEach)
    }

    /// Whether consumers compute dQ transposed, and share it out by its dimension, for a padded head dimension.
    const fn transposes_dq(self, dim: i32) -> bool {
        dim == 128 || dim == 192 && self.splits_dims() && self.cluster() == 1
    }

    /// CTAs of a cluster.
    #[must_use]
    pub const fn cluster(self) -> i32 {
        if matches!(self, Self::InClusters | Self::GradientEach) { 2 } else { 1 }
    }

    /// Of a block's queries, whose scores are made one after the other.
    const fn score_parts(self) -> i32 {
        if matches!(self, Self::HalfBlocks) { 2 } else { 1 }
    }
}

abi_enum!(BwdWalk {
    InOrder,
    LateDp,
    EarlyScores,
    HalfBlocks,
    SplitDims,
    SplitEarly,
    InClusters,
    GradientEach,
});

/// How a key block's share of dQ comes to the sums in memory (`dq/`). In deterministic calls additions have
/// an order, and the first of it stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqPath {
    /// Consumers add from their registers.
    Registers,
    /// The store warp adds from shared memory; else than in an order to zeros that preprocess has written.
    StoreWarp,
    /// Of the key blocks that add to a query block's dQ the store warp of the first to come stores, the
    /// others' add behind it.
    FirstStores,
    /// Each key block stores sums of its own, by whichever of the two ways its walk has, and the launch that finishes dQ
    /// adds them in the order that they would have been added in: of deterministic calls, whose bits it does not
    /// change. No key block waits for another; but each reads as many numbers as it writes.
    Apart,
}

abi_enum!(DqPath { Registers, StoreWarp, FirstStores, Apart });

/// Where the sums of dQ become dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqFinish {
    /// In a launch after the main kernel.
    Launch,
    /// In the main kernel, by a warp of its own, while the L2 may still have them. Of persistent CTAs.
    Beside,
    /// The same; while no dQ waits for it, the warp makes LSE in log2 and delta of all heads' rows but those
    /// of the first tiles, which preprocess makes.
    BesideWithDelta,
}

abi_enum!(DqFinish { Launch, Beside, BesideWithDelta });

abi_spec! {
    /// How the kernels compute.
    pub struct Sm90BwdTile {
        /// Query rows of a block: a multiple of 16.
        pub block_m: i32 = Takes::multiples(16, 16, 256).tuned_over(&[64, 80, 96, 128]),
        /// Keys of a CTA: 64 to a consumer warpgroup, or 64 to all.
        pub block_n: i32 = Takes::among(&[64, 128]),
        /// Blocks of Q in shared memory at a time.
        pub stages_q: i32 = Takes::within(1, 4).tuned_over(&[2, 3]),
        /// Blocks of dO in shared memory at a time.
        pub stages_dout: i32 = Takes::within(1, 4),
        /// Blocks of dS in shared memory at a time.
        pub stages_ds: i32 = Takes::within(1, 4),
        /// Steps of dBias that are in shared memory at a time: K, V, Q and dO of each.
        pub stages_dbias: i32 = Takes::within(1, 4),
        /// The loop of the consume role.
        pub walk: BwdWalk = Takes::all().tuned(),
        /// How dQ comes to its sums.
        pub dq_path: DqPath = Takes::all().tuned(),
        /// Where the sums become dQ.
        pub dq_finish: DqFinish = Takes::all().tuned(),
        /// Registers of a thread beside the consumers, who have the others.
        pub load_registers: i32 = Takes::among(&[24, 32, 40]).tuned_over(&[24, 40]),
        /// A kv head's query heads are shared out to several tiles, whose dK and dV a launch of its own rounds; else one
        /// tile walks all of them.
        pub head_parts: bool = Takes::all(),
        /// Blocks that a mask or the end of the keys cuts have a loop of their own.
        pub edges_apart: bool = Takes::all().tuned(),
        /// Of each 16 exponentials, how many are polynomials on the multiply-add pipe.
        pub exp2_polynomials: i32 = Takes::within(0, 8).tuned_over(&[0, 2, 4, 6]),
        /// A CTA to a multiprocessor, which claims key block after key block; else a CTA to a key block.
        pub persistent: bool = Takes::all().tuned(),
        /// Soft-caps by `tanh(y) = 1 - 2 / (1 + exp(2 y))`; else by a `tanh` that small scores lose nothing in.
        pub fast_softcap: bool = Takes::all(),
        /// O and dO are read 16 bytes at a time; else element by element.
        pub vector_load: bool = Takes::nothing(),
        /// Gradients are stored 16 bytes at a time; else element by element.
        pub vector_store: bool = Takes::nothing(),
    }
}

abi_struct! {
    /// How the work is cut, as an argument of the kernels.
    pub struct Sm90BwdSchedule {
        /// Key blocks of all kv heads of all sequences.
        pub num_tiles: i32,
        /// Key blocks of the longest sequence.
        pub num_key_blocks: i32,
        /// Sequences times kv heads.
        pub num_heads: i32,
        /// Heads of an L2 head group, whose tiles run before the next group's: their Q, dO and sums of dQ share the L2.
        pub heads_per_l2_group: i32,
        /// Query blocks of the longest sequence.
        pub num_q_blocks: i32,
        /// Blocks of dBias, over the axes that it has; 0 where it is not wanted.
        pub num_bias_blocks: i32,
        /// Multiprocessors: CTAs that run at a time.
        pub num_sms: i32,
        /// Parts of a kv head's query heads, where tiles share them.
        pub num_head_parts: i32,
        /// Parts of the query blocks of each of these.
        pub num_query_parts: i32,
        /// Of packed sequences whose additions have an order, each with parts by its own queries: so many for each where it has few
        /// tiles, else four times as many.
        pub least_queries_of_part: i32,
        /// And the key blocks of all parts of a kv head that are few.
        pub few_tiles_of_head: i32,
        /// With ordered additions to dQ, of so many heads the key blocks of one are launched beside those of others, and
        /// behind a mask walk their queries from the last one down. Without a mask all heads, which is 1, or none.
        pub side_by_side_period: i32,
        /// Behind a mask, so many of them at a time.
        pub side_by_side_heads: i32,
        /// With ordered additions to dQ and no mask, key blocks (of clusters) that run at a time and begin their
        /// walks apart; 0: as many as a packed sequence's own length gives.
        pub key_blocks_in_group: i32,
        /// Where the main kernel makes delta: query heads of all sequences whose rows preprocess takes care
        /// of; else all of them.
        pub num_first_query_heads: i32,
        /// Their query blocks.
        pub num_first_q_blocks: i32,
        /// With `head_parts` f32 sums of dK and dV, and where additions to them have an order how many there are of each of a
        /// tile's consumer warps; set at each run.
        pub head_sums: DevPtr<f32>,
    }
}

/// Threads of a CTA of the kernels before and after the main one.
pub const ROW_THREADS: u32 = 256;

/// Four numbers each of dQ, so many times, that a thread adds up where key blocks keep their sums apart.
const PART_FOURS: u32 = 2;

/// How tiles share a kv head's queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadParts {
    /// Parts of its query heads: a divisor of the GQA ratio.
    pub heads: u32,
    /// Parts of the query blocks of each of these.
    pub queries: u32,
}

/// Heads of a sequence of which ordered additions behind a mask have one go from the last query down: of packed
/// sequences, and of long ones.
const SIDE_BY_SIDE_PERIOD: u32 = 8;

/// Of short ones half: their longest key blocks begin when the others' shortest are done. By a simulation of the
/// order, of the rate without order, with one of eight and with one of two: B1 H40/8 S4224 D128 0.66 and 1.0
/// (measured with one of eight 0.74), B2 H16/8 S1792 D64 0.69 and 1.0 (0.71), B1 H16/8 S2008 D256 0.69 and 1.0
/// (0.73).
const SHORT_PERIOD: u32 = 2;

/// What half of a short sequence's heads have of Q, dO and the sums of dQ, at most: key blocks of heads side by side
/// come to a query block one long after the other, so these are to stay in the L2. B3 H48/24 packed, S 3520 to 6912,
/// D 128, an H100, with half of the heads upward 0.76 of the rate without order.
const SHORT_BYTES: i64 = 20 << 20;

/// Where half of the heads go upward, they are launched side by side in groups of so many at least, since key blocks
/// that begin together wait for each other at their first query block.
const LEAST_SIDE_BY_SIDE: i64 = 16;

/// Heads that a deterministic call's sequence is to have, its kv heads being shared out where it has fewer, from so
/// many queries and keys on.
const ORDERED_HEADS: u32 = 8;
const LEAST_KEYS_IN_PARTS: u32 = 4096;

/// Heads that a packed one has at most, where it has fewer than [`ORDERED_HEADS`]; and the tiles up to which its parts may have
/// half of the steps that repay the sums, else twice as many. By the sequence's own length, so that a batch that fills the
/// multiprocessors loses little by it. An H200, in one part, in parts of half of these steps, and of twice as many: B8 H5/1 of 130
/// to 768 143, 76 and 143 us, B4 H48/3 causal of 105 to 376 225, 96 and 142, but B8 H48/3 causal of 384 to 1920 1138, 978 and 837,
/// and of eight kv heads B64 H64/8 of 27 to 209 352, 420 and 352.
const PACKED_HEADS: u32 = 16;
const FEW_TILES: u32 = 64;

/// Tiles that it is to have, likewise, as far as each keeps the steps that repay its sums
/// ([`cost::least_steps_of_part`]): a batch of many is slower by its sums alone, a batch of one faster by as much as
/// multiprocessors were idle. An H200, in parts whatever their steps (48 tiles for fewer than 32) and so: B32 H40/8 S64 D128 169 and
/// 77 us, B16 H40/8 S64/355 D160 349 and 127, B3 H16/1 S448 D256 in a window 335 and 100, B1 H32/2 S1024 causal 167 and 113;
/// but B16 H15/3 S1792 D64 1109 and 1185.
/// Behind a mask twice as many, whose longest is twice the average, where steps are half as many again; and of fewer than that
/// four times as many, where steps are [`MANY_STEPS`] of what repays the sums.
const ORDERED_TILES: u32 = 64;
const MANY_STEPS: u32 = 6;

/// Bytes of Q, dO and the sums of dQ of heads whose groups of ordered key blocks run side by side without a mask: in
/// the L2.
const ORDERED_L2_BYTES: i64 = 40 << 20;

/// CTAs that round a key block's sums with `head_parts`, or add its parts': they divide `block_n`.
pub const HEAD_SUMS_CTAS: u32 = 8;

/// Tile indices that are known at a time: the tile at work, and its successor, which is loaded meanwhile.
const TILE_INDEX_SLOTS: i32 = 2;

/// Registers of a consumer's accumulators that leave room for the rest.
const MAX_ACCUMULATORS: i32 = 216;

/// Queries of a consumer's S where dimensions are split.
const SPLIT_QUERIES: i32 = 32;

impl Sm90BwdTile {
    /// Gives up what holds two products at a time, where dimensions are whole: some modifiers want those
    /// registers (bytes that ptxas spills of D 64 with an elementwise bias: 500, then 0; of D 128 with
    /// soft-cap, bias and dropout: 320, then 0; of D 64 with a soft-cap 40, with dropout 50).
    fn take_registers(&mut self) {
        (self.walk, self.edges_apart, self.exp2_polynomials) = (BwdWalk::LateDp, false, 0);
    }

    /// Consumer warpgroups.
    #[must_use]
    pub const fn num_consumers(&self) -> i32 {
        if self.walk.splits_dims() { self.block_m / SPLIT_QUERIES } else { self.block_n / 64 }
    }

    /// Queries of a consumer's S; columns of its dK and of its dV, or of the one that it has and none.
    const fn consumer_columns(&self, spec: &BwdSpec) -> (i32, i32, i32) {
        let dim = padded_dim(spec);
        let (qk, v) = (own_width(spec.fwd.head_dim_qk), own_width(spec.fwd.head_dim_v));
        if matches!(self.walk, BwdWalk::GradientEach) {
            (SPLIT_QUERIES, if qk > v { qk } else { v }, 0)
        } else if self.walk.splits_dims() {
            let columns = dim / self.num_consumers();
            (SPLIT_QUERIES, columns, columns)
        } else {
            (self.block_m / self.walk.score_parts(), qk, v)
        }
    }

    /// dQ's dimension among its sums.
    const fn dq_dim(&self, spec: &BwdSpec) -> i32 {
        if self.walk.score_parts() > 1 { own_width(spec.fwd.head_dim_qk) } else { padded_dim(spec) }
    }

    /// Columns of a consumer's share of dQ, of all CTAs of its cluster.
    const fn dq_columns(&self, spec: &BwdSpec) -> i32 {
        if matches!(self.walk, BwdWalk::GradientEach) {
            // A chunk; the third one's halves are multiplied as the whole.
            64 * self.walk.cluster()
        } else if self.walk.transposes_dq(padded_dim(spec)) {
            self.block_m
        } else if self.walk.splits_dims() || self.walk.score_parts() > 1 {
            self.dq_dim(spec) / self.num_consumers()
        } else {
            padded_dim(spec)
        }
    }

    /// V's dimension in shared memory: that of Q and K, or where there is no room for it its own.
    const fn v_columns(&self, spec: &BwdSpec) -> i32 {
        if self.walk.score_parts() > 1 { round_up(spec.fwd.head_dim_v, 64) } else { padded_dim(spec) }
    }

    /// Threads of a CTA of the main kernel.
    #[must_use]
    pub const fn num_threads(&self) -> i32 {
        128 * (1 + self.num_consumers())
    }

    /// Whether P have one place, those of a block after those of another.
    const fn has_one_probs(&self) -> bool {
        matches!(self.walk, BwdWalk::GradientEach) && !self.adds_from_registers()
    }

    /// Shared memory of dS; and of P, where consumers need each other's.
    const fn ds_bytes(&self) -> i32 {
        let of_probs = if self.has_one_probs() {
            1
        } else if self.walk.splits_dims() {
            self.stages_ds
        } else {
            0
        };
        (self.stages_ds + of_probs) * tile_bytes(self.block_m, self.block_n)
    }

    /// Shared memory of what a CTA holds of the other one of its cluster: columns of K, and dS.
    const fn other_bytes(&self, dim: i32) -> i32 {
        if self.walk.cluster() == 1 {
            return 0;
        }
        tile_bytes(self.block_n, round_up(dim / self.walk.cluster(), 64))
            + self.stages_ds * tile_bytes(self.block_m, self.block_n)
    }

    /// Rows of Q and dO that a CTA loads at a time.
    #[must_use]
    pub const fn loaded_rows(&self) -> i32 {
        self.block_m / self.walk.cluster()
    }

    /// Dynamic shared memory of a CTA of the main kernel; the entry asserts that the device agrees.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &BwdSpec) -> i32 {
        let dim = padded_dim(spec);
        let of_v = self.v_columns(spec);
        let keys = tile_bytes(self.block_n, dim) + tile_bytes(self.block_n, of_v) + self.other_bytes(dim);
        let queries =
            self.stages_q * tile_bytes(self.block_m, dim) + self.stages_dout * tile_bytes(self.block_m, of_v);
        let ds = self.ds_bytes();
        let dq_bytes = round_up(4 * self.block_m * self.dq_dim(spec), 1024);
        let dq = if self.adds_from_registers() { 1024 } else { dq_bytes / self.walk.cluster() };
        let sums = if self.finishes_dq() { dq_bytes } else { 0 };
        let stats = 4 * self.block_m * (self.stages_q + self.stages_dout);
        // Of each warp four quads and the queries of a block: the device's `DropoutParts`.
        let parts = if spec.fwd.dropout && matches!(self.walk, BwdWalk::LateDp) {
            round_up(4 * self.num_consumers() * (4 * 16 + 8 * self.block_m), 1024)
        } else {
            0
        };
        // Behind the barriers the tiles' indices, and a flag.
        let words = 4 * (TILE_INDEX_SLOTS + 1);
        parts + round_up(keys + queries + ds + dq + sums + stats + 8 * self.num_barriers() + words, 1024)
    }

    /// The main kernel's mbarriers, and how many there are of each: the device's `Smem`.
    #[must_use]
    pub const fn barriers(&self) -> [(&'static str, i32); 18] {
        let (of_q, of_dout, of_ds) = (self.stages_q, self.stages_dout, self.stages_ds);
        let of_dq = self.num_consumers();
        [
            ("k_full", 1),
            ("v_full", 1),
            ("kv_empty", 1),
            ("q_full", of_q),
            ("q_empty", of_q),
            ("dout_full", of_dout),
            ("dout_empty", of_dout),
            ("other_ds_full", of_ds),
            ("other_ds_empty", of_ds),
            ("probs_empty", 1),
            ("dq_full", of_dq),
            ("dq_empty", of_dq),
            ("sums_full", 1),
            ("dq_admitted", 1),
            ("dq_added", 1),
            ("dq_added_seen", 1),
            ("tile_index_full", TILE_INDEX_SLOTS),
            ("tile_index_empty", TILE_INDEX_SLOTS),
        ]
    }

    const fn num_barriers(&self) -> i32 {
        let barriers = self.barriers();
        let (mut i, mut sum) = (0, 0);
        while i < barriers.len() {
            sum += barriers[i].1;
            i += 1;
        }
        sum
    }

    /// The tile of dBias' kernel: it keeps its own sums beside S and dP, and so has fewer queries in a block,
    /// which divide the main kernel's, since that lays the rows' numbers out.
    #[must_use]
    pub const fn of_dbias(&self) -> Self {
        Self {
            block_m: if self.block_m % 64 == 0 { 64 } else { self.block_m },
            block_n: 128,
            walk: BwdWalk::InOrder,
            dq_path: DqPath::StoreWarp,
            dq_finish: DqFinish::Launch,
            head_parts: false,
            load_registers: 24,
            ..*self
        }
    }

    /// Dynamic shared memory of a CTA of dBias' kernel, of its [tile](Self::of_dbias); the entry asserts that
    /// the device agrees.
    #[must_use]
    pub const fn dbias_smem_bytes(&self, spec: &BwdSpec) -> i32 {
        let dim = padded_dim(spec);
        let step = 2 * tile_bytes(self.block_n, dim) + 2 * tile_bytes(self.block_m, dim);
        round_up(self.stages_dbias * (step + 8 * self.block_m + 16), 1024)
    }

    /// Whether the tile can be compiled for a spec, and if not, why.
    ///
    /// # Errors
    /// The first field that does not fit, with its number.
    pub fn check(&self, spec: &BwdSpec) -> Result<(), String> {
        let dim = padded_dim(spec);
        let Self { block_m, block_n, .. } = *self;
        if block_m < 16 || block_m % 16 != 0 || block_m > 256 {
            return Err(format!("block_m {block_m} is not a multiple of 16 from 16 to 256"));
        }
        let walk = self.walk;
        let (set, v) = (walk.name(), spec.fwd.head_dim_v);
        let takes_dims = match walk {
            BwdWalk::InOrder | BwdWalk::LateDp | BwdWalk::EarlyScores => dim <= 128,
            BwdWalk::HalfBlocks => fits_half_blocks(spec),
            BwdWalk::SplitDims | BwdWalk::SplitEarly => dim > 128,
            BwdWalk::InClusters => dim == 256,
            BwdWalk::GradientEach => dim == 192,
        };
        if !takes_dims {
            return Err(format!("walk {set}: not for a padded head dimension of {dim} with a V of {v}"));
        }
        let keys = if walk.splits_dims() { 64 } else { 128 };
        if block_n != keys {
            return Err(format!("block_n {block_n} is not {keys}: walk {set}"));
        }
        // Without a mask ordered key blocks of a group wait for each other: a tile whose index is taken ahead
        // would wait behind its own CTA's present one.
        if spec.deterministic && !self.keeps_dq_apart() && self.persistent && spec.fwd.mask == MaskKind::Full
        {
            return Err(
                "persistent true: without a mask, ordered sums of dQ want all key blocks of a group at work"
                    .to_owned(),
            );
        }
        if self.dq_path == DqPath::FirstStores && spec.deterministic {
            return Err(
                "dq_path first_stores: not with deterministic, whose additions have an order".to_owned()
            );
        }
        if self.keeps_dq_apart() && !spec.deterministic {
            return Err("dq_path apart: it is for deterministic, whose additions have an order".to_owned());
        }
        // A CTA of the launch that adds them has 64 pieces of 16 dims by two queries; eight queries of the transpose at 192 are 48.
        if self.keeps_dq_apart() && dim == 192 && walk.transposes_dq(dim) {
            return Err(format!("dq_path apart: not with walk {set} at a padded head dimension of {dim}"));
        }
        if self.finishes_dq() && !self.may_finish_dq(spec) {
            return Err(format!(
                "dq_finish {}: not with dq_path registers, walk half_blocks, deterministic, nor without persistent",
                self.dq_finish.name()
            ));
        }
        if self.makes_delta() && !self.may_make_delta(spec) {
            return Err(
                "dq_finish beside_with_delta: it is for dq_path first_stores, vector_load, whole 32 of block_m and scores \
                 without bias or softcap"
                    .to_owned(),
            );
        }
        // Three consumers of 160 leave 32; of two, half the rest is to be whole eights.
        let of_three = self.num_consumers() == 3;
        if of_three != (self.load_registers == 32) {
            let wanted = if of_three { "32" } else { "24 or 40" };
            let consumers = self.num_consumers();
            return Err(format!(
                "load_registers {} is not {wanted} beside {consumers} consumers",
                self.load_registers
            ));
        }
        let in_parts = walk.score_parts() > 1;
        if in_parts && self.adds_from_registers() {
            return Err("dq_path registers: walk half_blocks hands dQ to the store warp".to_owned());
        }
        if (in_parts || walk == BwdWalk::GradientEach) && self.edges_apart {
            return Err(format!("edges_apart true: walk {set} has one loop"));
        }
        // Two consumers with half of 256 each, or with a gradient each, or three with a third of 192.
        let split_over = if dim == 192 && walk.cluster() == 1 { 96 } else { 64 };
        if walk.splits_dims() && block_m != split_over {
            return Err(format!("block_m {block_m} is not {split_over}: the padded head dimension is {dim}"));
        }
        for (field, stages) in [
            ("stages_q", self.stages_q),
            ("stages_dout", self.stages_dout),
            ("stages_ds", self.stages_ds),
            ("stages_dbias", self.stages_dbias),
        ] {
            if !(1..=4).contains(&stages) {
                return Err(format!("{field} {stages} is not from 1 to 4"));
            }
        }
        let may_store = walk == BwdWalk::GradientEach && self.dq_path == DqPath::StoreWarp;
        if walk.has_next_scores() && walk.splits_dims() && !self.adds_from_registers() && !may_store {
            return Err(format!("dq_path {}: walk {set} adds dQ from registers", self.dq_path.name()));
        }
        if matches!(walk, BwdWalk::SplitEarly | BwdWalk::GradientEach) && self.stages_dout < 2 {
            return Err(format!(
                "stages_dout {}: walk {set} holds two blocks of dO at a time",
                self.stages_dout
            ));
        }
        // The next block's are stored while this one's are read. P, which has one place where dQ is stored, is told by dS's slot.
        if walk == BwdWalk::GradientEach && self.stages_ds != 2 {
            return Err(format!("stages_ds {}: walk {set} holds two blocks of dS at a time", self.stages_ds));
        }
        if walk.has_next_scores() && self.stages_q < 2 {
            return Err(format!("stages_q {}: walk {set} holds two blocks of Q at a time", self.stages_q));
        }
        // 16 rows of 64 columns of each warp at a time.
        let staged = 4 * self.num_consumers() * 16 * 64 * 2;
        if self.vector_store && spec.dtype_grad != DType::F32 && staged > self.ds_bytes() {
            return Err(format!(
                "stages_ds {}: dK and dV leave through the {} bytes of dS, and want {staged}",
                self.stages_ds,
                self.ds_bytes()
            ));
        }
        let (what, shared_out) =
            if walk.transposes_dq(dim) { ("the padded head dimension", dim) } else { ("block_m", block_m) };
        let rows_of_all = (walk.splits_dims() || in_parts) && !walk.transposes_dq(dim);
        let wanted = if rows_of_all { 64 } else { 64 * self.num_consumers() };
        if shared_out != wanted {
            return Err(format!(
                "{what} {shared_out} is not 64 for each of {} consumers",
                self.num_consumers()
            ));
        }
        let (queries, of_dk, of_dv) = self.consumer_columns(spec);
        // Four calls of the generator, of eight queries each; in two halves where the next scores are early.
        let decided = if walk == BwdWalk::EarlyScores { 64 } else { 32 };
        if spec.fwd.dropout && queries % decided != 0 {
            return Err(format!(
                "block_m {block_m}: of a consumer's {queries} queries dropout decides {decided} at a time"
            ));
        }
        let accumulators = queries.max(self.dq_columns(spec) / 2) + (of_dk + of_dv) / 2;
        if accumulators > MAX_ACCUMULATORS {
            return Err(format!(
                "block_m {block_m}: {accumulators} accumulators a thread are more than {MAX_ACCUMULATORS}"
            ));
        }
        Ok(())
    }

    /// Whether consumers add dQ from their registers.
    #[must_use]
    pub const fn adds_from_registers(&self) -> bool {
        matches!(self.dq_path, DqPath::Registers) || self.keeps_dq_apart() && self.walk.splits_dims()
    }

    /// The same with each key block's sums of dQ apart: CTAs are persistent as they are without an order.
    fn with_dq_apart(&self, spec: &BwdSpec) -> Self {
        let without_order = default_tile(&BwdSpec { deterministic: false, ..*spec });
        Self { dq_path: DqPath::Apart, persistent: without_order.persistent, ..*self }
    }

    /// Whether each key block has sums of dQ of its own.
    #[must_use]
    pub const fn keeps_dq_apart(&self) -> bool {
        matches!(self.dq_path, DqPath::Apart)
    }

    /// Sums of dQ of a query row: those of each key block (of a cluster), or one.
    #[must_use]
    pub fn dq_parts(&self, problem: &BwdProblem) -> u32 {
        let keys = (self.block_n * self.walk.cluster()).unsigned_abs();
        if self.keeps_dq_apart() { problem.fwd.dims.seqlen_k.div_ceil(keys).max(1) } else { 1 }
    }

    /// Bytes of the sums of dQ of all its rows, 2^64 - 1 of more.
    fn dq_bytes(&self, problem: &BwdProblem, spec: &BwdSpec) -> u64 {
        let dims = problem.fwd.dims;
        let rows =
            u64::from(dims.batch).saturating_mul(u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q));
        let row_bytes = 4 * u64::from(padded_dim(spec).unsigned_abs()) * u64::from(self.dq_parts(problem));
        rows.saturating_mul(row_bytes)
    }

    /// Whether the sums of dQ that key blocks have apart are few enough.
    ///
    /// # Errors
    /// More than 4 GiB of them.
    pub fn check_room_for_dq(&self, problem: &BwdProblem, spec: &BwdSpec) -> Result<(), String> {
        let bytes = self.dq_bytes(problem, spec);
        if self.keeps_dq_apart() && bytes > 4 << 30 {
            let parts = self.dq_parts(problem);
            return Err(format!(
                "dq_path apart: sums of dQ of {parts} key blocks are {bytes} bytes, more than 4 GiB"
            ));
        }
        Ok(())
    }

    /// Whether the main kernel finishes dQ.
    #[must_use]
    pub const fn finishes_dq(&self) -> bool {
        !matches!(self.dq_finish, DqFinish::Launch)
    }

    /// Whether it makes delta too.
    #[must_use]
    pub const fn makes_delta(&self) -> bool {
        matches!(self.dq_finish, DqFinish::BesideWithDelta)
    }

    /// Whether the main kernel may finish dQ, but for room in shared memory.
    const fn may_finish_dq(&self, spec: &BwdSpec) -> bool {
        self.persistent
            && !self.adds_from_registers()
            && !spec.deterministic
            && self.walk.score_parts() == 1
            && self.walk.cluster() == 1
    }

    /// Whether the warp that finishes dQ has the room and the time for delta: where preprocess has no zeros to write
    /// either. Modified scores of some rows are measured from an origin, for which preprocess alone has the registers.
    fn may_make_delta(&self, spec: &BwdSpec) -> bool {
        let fits = matches!(self.dq_path, DqPath::FirstStores) && self.vector_load && self.block_m % 32 == 0;
        fits && !modifies_score(spec)
    }

    /// Takes the nearest finish of dQ that the other fields allow and shared memory has room for: a launch of
    /// its own where the main kernel may not finish it, and delta by preprocess where that may not make it.
    pub fn fit_finish(&mut self, spec: &BwdSpec) {
        if self.makes_delta() && !self.may_make_delta(spec) {
            self.dq_finish = DqFinish::Beside;
        }
        if self.finishes_dq() && !(self.may_finish_dq(spec) && self.smem_bytes(spec) <= MAX_SMEM_BYTES) {
            self.dq_finish = DqFinish::Launch;
        }
    }

    /// CTAs of the launch that finishes dQ to a query block: a piece of it for each of their threads, so that none waits
    /// for memory twice. D 256, two sequences of 480, 8 heads: 20 us of 57 with one.
    #[must_use]
    pub const fn finish_ctas(&self, spec: &BwdSpec) -> i32 {
        let dim = padded_dim(spec);
        let of_block = self.block_m * self.dq_dim(spec);
        if self.keeps_dq_apart() {
            return (of_block as u32).div_ceil(4 * PART_FOURS * ROW_THREADS) as i32;
        }
        let piece = if self.walk.transposes_dq(dim) { 32 } else { 16 };
        let ctas = of_block / (piece * ROW_THREADS as i32);
        if self.finishes_dq() || ctas < 1 { 1 } else { ctas }
    }

    /// Flags, one to each consumer warp of each tile and one to each CTA that finishes dQ, or each query block: whether its dK
    /// and dV, or its dQ, have a number that is not finite. None without [`repairs`].
    #[must_use]
    pub fn num_non_finite_flags(&self, spec: &BwdSpec, schedule: &Sm90BwdSchedule, q_blocks: u32) -> u64 {
        if repairs(spec) {
            let of_queries = u64::from(q_blocks) * u64::from(self.finish_ctas(spec).unsigned_abs());
            4 * u64::from((self.num_consumers() * schedule.num_tiles).unsigned_abs()) + of_queries
        } else {
            0
        }
    }

    /// Whether tiles are to share a kv head's queries: where the [model](Self::head_parts_candidates) has it faster.
    /// Deterministic calls by a rule of their own, which no batch changes.
    #[must_use]
    pub fn wants_head_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> bool {
        let parts = self.parts(problem, spec, num_sms);
        parts.heads * parts.queries > 1
    }

    /// In how many parts a kv head's queries may be shared out to tiles, with what the model says of each; the first is
    /// that of the rule. Empty for deterministic calls.
    #[must_use]
    pub fn head_parts_candidates(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
    ) -> Candidates<HeadParts> {
        if spec.deterministic || num_sms == 0 {
            return Candidates::default();
        }
        let ratio = problem.fwd.gqa_ratio();
        let tiles = self.tiles_of_all_heads(problem);
        let by_rule = if tiles < 2 * u64::from(num_sms) { self.parts_by_rule(problem, num_sms) } else { 1 };
        // Many tiles fill the multiprocessors as they are. The main kernel finishes dQ by heads, whole ones.
        let is_packed = problem.fwd.layout.q == QLayout::Packed;
        let share = if is_packed { cost::PACKED_SHARE } else { 1.0 };
        let with_work = share * tiles as f64 * f64::from(ratio);
        let few_tiles = tiles > 0 && with_work < 4.0 * f64::from(num_sms) && !self.finishes_dq();
        let queries: &[u32] = match problem.fwd.mask.kind() {
            _ if !few_tiles => &[1],
            // An H200, in one part, two and four: B2 H2 D168 of 2734 and 8736 918, 888 and 842 us; behind a mask B2 H3 D64 of 2560 and
            // 3200 81, 78 and more, B2 H8 of 1001 and 1280 70 and 87; B8 H5/1 of 130 to 768 in five parts and ten 59 and 69.
            MaskKind::Full if is_packed && ratio == 1 => &[1, 4],
            _ if is_packed => &[1],
            _ => &[1, 2, 3, 4],
        };
        let heads = std::iter::once(by_rule)
            .chain((1..=ratio).filter(|&parts| parts != by_rule && ratio.is_multiple_of(parts)));
        let parts = heads.flat_map(|heads| queries.iter().map(move |&queries| HeadParts { heads, queries }));
        cost::head_parts(self, problem, spec, num_sms, parts)
    }

    /// Microseconds that the main kernel takes, by the model, where `parts` tiles share a kv head's query
    /// heads: a divisor of the GQA ratio.
    #[must_use]
    pub fn model_of_head_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32, parts: u32) -> f64 {
        cost::of_parts(self, problem, spec, num_sms, HeadParts { heads: parts, queries: 1 })
    }

    fn tiles_of_all_heads(&self, problem: &BwdProblem) -> u64 {
        let dims = problem.fwd.dims;
        let keys = u64::from(dims.seqlen_k.div_ceil(self.block_n.unsigned_abs()));
        keys * u64::from(dims.num_heads_kv) * u64::from(dims.batch)
    }

    /// Of a kv head's query heads: so many parts of equal size that each multiprocessor has some three tiles,
    /// behind a mask, where their lengths differ, four. Of MQA 32/1, S 8192, causal, 2, 4 and 8 parts 522,
    /// 569 and 596 TFLOP/s; full, S 4096, 4 and 8 616 and 592.
    fn parts_by_rule(&self, problem: &BwdProblem, num_sms: u32) -> u32 {
        let ratio = problem.fwd.gqa_ratio();
        let tiles = if problem.fwd.mask.kind() == MaskKind::Full { 3 } else { 4 };
        let wanted = (tiles * u64::from(num_sms)).div_ceil(self.tiles_of_all_heads(problem).max(1));
        let divides = |&parts: &u32| ratio.is_multiple_of(parts) && u64::from(parts) >= wanted;
        (1..ratio).find(divides).unwrap_or(ratio)
    }

    /// Parts of a deterministic call: from the heads and the lengths, never the batch, so that a sequence has the same
    /// bits in any; of packed ones the longest's, the device going by each one's own (`has_own_parts`). Where
    /// sequences are long, enough for eight heads, of which one goes the other way; where lengths are equal enough for
    /// [`ORDERED_TILES`].
    fn ordered_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> u32 {
        let dims = problem.fwd.dims;
        if problem.fwd.layout.q == QLayout::Packed {
            let (most, least) = self.parts_of_packed(problem, spec);
            return parts_of_queries(dims.seqlen_q, most, least);
        }
        let of_tiles = self.parts_for_tiles(problem, spec, [dims.seqlen_q, dims.seqlen_k]);
        let [seqlen_q, seqlen_k] = lengths_of_whole(problem);
        let is_long = seqlen_q.min(seqlen_k) >= LEAST_KEYS_IN_PARTS;
        if is_long { of_tiles.max(self.parts_of_long(problem, spec, num_sms)) } else { of_tiles }
    }

    /// The most parts of a packed sequence, and the queries that it has for each: whatever the batch has.
    fn parts_of_packed(&self, problem: &BwdProblem, spec: &BwdSpec) -> (u32, u32) {
        let ratio = problem.fwd.gqa_ratio();
        let heads = problem.fwd.dims.num_heads_kv.max(1);
        let mut most =
            if heads < ORDERED_HEADS { divisor_from(ratio, PACKED_HEADS.div_ceil(heads)) } else { 1 };
        let rows = cost::least_steps_of_part(self, spec) * self.block_m.unsigned_abs() / 2;
        // A window leaves a key no more queries than it has room for.
        let bounds = problem.fwd.mask.bounds();
        if let (Some(lo), Some(hi)) = (bounds.lo, bounds.hi) {
            let width = u32::try_from((hi - lo).max(0)).unwrap_or(u32::MAX);
            most = parts_of_queries(width, most, rows.div_ceil(ratio.max(1)));
        }
        let is_full = problem.fwd.mask.kind() == MaskKind::Full;
        (most, (rows * if is_full { 1 } else { 2 }).div_ceil(ratio.max(1)))
    }

    /// As many as give a long sequence eight heads.
    fn parts_of_long(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> u32 {
        let ratio = problem.fwd.gqa_ratio();
        let kv_heads = problem.fwd.dims.num_heads_kv.max(1);
        let of_heads = divisor_from(ratio, ORDERED_HEADS.div_ceil(kv_heads));
        match problem.fwd.mask.kind() {
            // A window leaves a key few products.
            MaskKind::Band => 1,
            MaskKind::Upper => of_heads,
            // All key blocks are alike, and heads are wanted for groups that fill the multiprocessors alone.
            MaskKind::Full => {
                let rounds = |parts: u32| {
                    let (groups, heads) = self.ordered_groups(problem, spec, num_sms, parts);
                    f64::from(groups) / f64::from(heads)
                };
                if rounds(of_heads) <= 0.85 * rounds(1) { of_heads } else { 1 }
            }
        }
    }

    /// As many as give a sequence of these lengths [`ORDERED_TILES`], each with the steps that repay its sums.
    fn parts_for_tiles(&self, problem: &BwdProblem, spec: &BwdSpec, [seqlen_q, seqlen_k]: [u32; 2]) -> u32 {
        let ratio = problem.fwd.gqa_ratio();
        let key_blocks = seqlen_k.div_ceil(self.block_n.unsigned_abs()).max(1);
        let tiles = key_blocks.saturating_mul(problem.fwd.dims.num_heads_kv.max(1));
        let band = problem.fwd.mask.band(seqlen_q, seqlen_k);
        let (q, k) = (i64::from(seqlen_q), i64::from(seqlen_k));
        let is_full = problem.fwd.mask.kind() == MaskKind::Full;
        // Queries that see a key, on average.
        let rows = if is_full {
            q
        } else if q > k {
            k / 2
        } else {
            q - q * q / (2 * k).max(1)
        };
        let width = (band.hi - band.lo).max(0);
        let steps = rows.min(width) / i64::from(self.block_m)
            + i64::from(!is_full || q % i64::from(self.block_m) > 0);
        let least = i64::from(cost::least_steps_of_part(self, spec));
        let of = |wanted: u32, least: i64| {
            let mut parts = divisor_from(ratio, wanted.div_ceil(tiles));
            while parts > 1 && !(ratio.is_multiple_of(parts) && steps * i64::from(ratio / parts) >= least) {
                parts -= 1;
            }
            parts
        };
        let mut parts = of(ORDERED_TILES, least);
        if !is_full {
            parts = parts.max(of(2 * ORDERED_TILES, least + least / 2));
        }
        if tiles < 2 * ORDERED_TILES {
            parts = parts.max(of(4 * ORDERED_TILES, i64::from(MANY_STEPS) * least));
        }
        parts
    }

    /// Of a deterministic call without a mask: in how many groups a head's key blocks (of clusters) run, a group at a
    /// time, and groups of how many heads side by side. A head's 82 key blocks leave 50 of 132 multiprocessors to the
    /// next head, whose others have yet to run, and it waits for them: two groups of 41, three heads side by side,
    /// leave nine. By the heads of a sequence, of which there are `parts` to a kv head, whatever the batch.
    fn ordered_groups(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32, parts: u32) -> (u32, u32) {
        let dims = problem.fwd.dims;
        let cluster = self.walk.cluster().unsigned_abs();
        let units = (num_sms / cluster).max(1);
        let key_blocks = dims.seqlen_k.div_ceil(self.block_n.unsigned_abs() * cluster).max(1);
        // Q and dO, and the sums of dQ: of one query head of a tile at a time.
        let head_bytes = i64::from(dims.seqlen_q) * i64::from(padded_dim(spec)) * 8;
        let near = u32::try_from(ORDERED_L2_BYTES / head_bytes.max(1)).unwrap_or(u32::MAX);
        let heads = (dims.num_heads_kv * parts).min(near).max(1);
        let least = key_blocks.div_ceil(units);
        let of = |groups: u32| {
            let side_by_side = (units / key_blocks.div_ceil(groups)).clamp(1, heads);
            (groups, side_by_side)
        };
        let rounds = |(groups, heads): (u32, u32)| f64::from(groups) / f64::from(heads);
        (least + 1..=key_blocks.min(least + 7)).fold(of(least), |best, groups| {
            if rounds(of(groups)) < 0.95 * rounds(best) { of(groups) } else { best }
        })
    }

    /// Whether key blocks wait for each other, to add to dQ in an order.
    const fn waits_in_order(&self, spec: &BwdSpec) -> bool {
        spec.deterministic && !self.keeps_dq_apart()
    }

    /// As many parts as the model takes, or the rule where the model knows no lengths.
    fn parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> HeadParts {
        let of_heads = |heads| HeadParts { heads, queries: 1 };
        if spec.deterministic {
            return of_heads(self.ordered_parts(problem, spec, num_sms));
        }
        let modelled = self.head_parts_candidates(problem, spec, num_sms);
        let is_short = self.tiles_of_all_heads(problem) < 2 * u64::from(num_sms);
        let by_rule = || of_heads(if is_short { self.parts_by_rule(problem, num_sms) } else { 1 });
        modelled.cheapest(cost::least_gain(problem)).map_or_else(by_rule, |best| best.choice)
    }

    fn num_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> HeadParts {
        let one = HeadParts { heads: 1, queries: 1 };
        if !self.head_parts {
            return one;
        }
        let best = self.parts(problem, spec, num_sms);
        // A tile that was asked to share takes the cheapest way to.
        let modelled = self.head_parts_candidates(problem, spec, num_sms);
        let shared = modelled.iter().filter(|candidate| candidate.choice != one);
        let cheapest = shared.min_by(|a, b| a.micros.total_cmp(&b.micros)).map(|candidate| candidate.choice);
        if best == one { cheapest.unwrap_or(one) } else { best }
    }

    /// The f32 sums of dK and dV in bytes, those of a key block or, of deterministic calls of equal lengths, of each of its tiles, and
    /// how many additions a key block's have had; 0 where each tile has a kv head's query heads alone.
    #[must_use]
    pub fn head_sums_bytes(&self, spec: &BwdSpec, schedule: &Sm90BwdSchedule) -> u64 {
        let parts = (schedule.num_head_parts * schedule.num_query_parts).unsigned_abs().max(1);
        let apart = spec.deterministic && spec.fwd.q_layout == QLayout::Batch;
        let tiles = u64::from(schedule.num_tiles.unsigned_abs() / if apart { 1 } else { parts });
        let sums = u64::from(self.block_n.unsigned_abs()) * 8 * u64::from(padded_dim(spec).unsigned_abs());
        let counts = 16 * u64::from(self.num_consumers().unsigned_abs());
        if self.head_parts { tiles * (sums + counts) } else { 0 }
    }

    /// Heads, or parts of them, whose tiles run before the next ones'.
    fn heads_per_l2_group(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
        parts: HeadParts,
    ) -> i64 {
        let dims = problem.fwd.dims;
        let cluster_keys = (self.block_n * self.walk.cluster()).unsigned_abs();
        let keys = dims.seqlen_k.div_ceil(cluster_keys) * self.walk.cluster().unsigned_abs();
        // Masked, key blocks differ in length, and the last head's longest would end alone; ordered additions
        // want a head's one after another. Causal on an H200, a head at a time and in groups, TFLOP/s: D 128
        // 337, 344 at 1k, 518, 542 at 4k, 575, 600 at 8k, 633, 635 at 16k; D 64 484, 493 at 4k; D 256 337,
        // 348 at 2k. D 64 at 512 207, 201.
        let in_groups =
            problem.fwd.mask.kind() != MaskKind::Full && !self.waits_in_order(spec) && dims.seqlen_k >= 1024;
        let heads_of_sequence = dims.num_heads_kv * parts.heads * parts.queries;
        let row_bytes = i64::from(dims.head_dim_qk) * 6 + i64::from(dims.head_dim_v) * 2;
        let head_bytes =
            i64::from(dims.seqlen_q) * i64::from(problem.fwd.gqa_ratio() / parts.heads) * row_bytes;
        // Some two tiles to a multiprocessor, or the launch ends with few heads' longest ones.
        let least = i64::from(2 * num_sms).div_euclid(i64::from(keys.max(1))) + 1;
        let group_bytes = if in_groups { L2_GROUP_BYTES.max(least * head_bytes) } else { 0 };
        let num_heads = i64::from(dims.batch) * i64::from(heads_of_sequence);
        heads_per_l2_group(num_heads, head_bytes, 1, group_bytes)
    }

    /// How the work of a problem is cut.
    ///
    /// # Errors
    /// More tiles than a grid can have.
    pub fn schedule(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
    ) -> Result<Sm90BwdSchedule, Refusal> {
        let dims = problem.fwd.dims;
        let blocks = |rows: u32, block: i32| rows.div_ceil(block.unsigned_abs());
        let cluster = self.walk.cluster().unsigned_abs();
        let keys = blocks(dims.seqlen_k, self.block_n * self.walk.cluster()) * cluster;
        let queries = blocks(dims.seqlen_q, self.block_m);
        let count = |name: &str, blocks: u32, heads: u32| {
            let all = u64::from(blocks) * u64::from(heads) * u64::from(dims.batch);
            // Launches beside the main one have up to eight CTAs a block.
            i32::try_from(all).ok().filter(|&all| all < 1 << 28).ok_or_else(|| {
                Refusal::new(NAME, format!("{name}: {all} blocks of all heads are 2^28 or more"))
            })
        };
        count("seqlen_q", queries, dims.num_heads_q)?;
        let bias_shape = match (problem.dbias, problem.fwd.score.bias) {
            (Some(_), Bias::Elementwise(bias)) => Some(problem.fwd.shape_bias(bias.broadcast)),
            _ => None,
        };
        let bias_blocks = bias_shape.map_or(0, |shape| {
            u64::from(shape.batch) * u64::from(shape.head) * u64::from(keys) * u64::from(queries)
        });
        let num_bias_blocks = i32::try_from(bias_blocks)
            .map_err(|_| Refusal::new(NAME, format!("dbias: {bias_blocks} blocks of it are 2^31 or more")))?;
        let parts_of_heads = self.num_parts(problem, spec, num_sms);
        let (_, least_queries_of_part) = self.parts_of_packed(problem, spec);
        let HeadParts { heads: parts, queries: query_parts } = parts_of_heads;
        let heads_of_sequence = dims.num_heads_kv * parts * query_parts;
        let num_heads = i64::from(dims.batch) * i64::from(heads_of_sequence);
        let in_l2 = self.heads_per_l2_group(problem, spec, num_sms, parts_of_heads);
        // Some two tiles to a multiprocessor.
        let least = i64::from(2 * num_sms).div_euclid(i64::from(keys.max(1))) + 1;
        let is_packed = problem.fwd.layout.q == QLayout::Packed;
        // Ordered additions: key blocks of a head that are at work together would wait for each other at each of few query
        // blocks, so those of all heads come side by side. 64 queries over 11931 keys of D 256: 0.17 of the rate without order.
        let key_blocks = keys / cluster;
        let at_a_time = (num_sms / cluster).max(1);
        let group = key_blocks.div_ceil(key_blocks.div_ceil(at_a_time).max(1));
        let is_side_by_side =
            spec.deterministic && !is_packed && problem.fwd.mask.kind() == MaskKind::Full && queries < group;
        // The device's `place_in_order`. A part of a whole adds to dQ in the whole's order, and has its bits.
        let [seqlen_q, seqlen_k] = lengths_of_whole(problem);
        let all_upward = !is_packed && u64::from(seqlen_q) * 2 < u64::from(seqlen_k);
        // Q and dO, and the sums of dQ.
        let row_bytes = 2 * i64::from(dims.head_dim_qk + dims.head_dim_v) + 4 * i64::from(padded_dim(spec));
        let head_bytes = i64::from(dims.seqlen_q) * row_bytes;
        let side_by_side_bytes =
            i64::from(heads_of_sequence / SHORT_PERIOD) * i64::from(seqlen_q) * row_bytes;
        let is_short = !is_packed && side_by_side_bytes <= SHORT_BYTES;
        let side_by_side_period = match problem.fwd.mask.kind() {
            MaskKind::Full if is_side_by_side => 1,
            MaskKind::Full => SIDE_BY_SIDE_PERIOD,
            _ if all_upward => 1,
            // Whose parts go the same way.
            _ if is_packed => dims.num_heads_kv.clamp(1, SIDE_BY_SIDE_PERIOD),
            _ if is_short => heads_of_sequence.clamp(1, SHORT_PERIOD),
            _ => heads_of_sequence.clamp(1, SIDE_BY_SIDE_PERIOD),
        };
        let (mut key_blocks_in_group, mut side_by_side_heads) = (0, 0);
        let heads_per_l2_group = if is_side_by_side && self.waits_in_order(spec) {
            num_heads
        } else if !spec.deterministic {
            in_l2
        } else if problem.fwd.mask.kind() != MaskKind::Full {
            let parts_together = if is_packed { i64::from(parts) } else { 1 };
            let upward = (num_heads / parts_together / i64::from(side_by_side_period.max(1))).max(1);
            let near = L2_GROUP_BYTES.checked_div(head_bytes).unwrap_or(upward).max(LEAST_SIDE_BY_SIDE);
            let near = (near / parts_together).max(1);
            let at_a_time = if side_by_side_period <= SHORT_PERIOD { near } else { upward };
            // As many in each group.
            let groups = (upward + at_a_time - 1).div_euclid(at_a_time);
            side_by_side_heads = (upward + groups - 1).div_euclid(groups);
            in_l2
        } else if is_packed {
            in_l2
        } else {
            let (groups, heads) = self.ordered_groups(problem, spec, num_sms, parts);
            key_blocks_in_group = key_blocks.div_ceil(groups.max(1));
            // Which heads run side by side changes no bits: as many as the batch has, of those that the L2 has room for.
            let of_batch = i64::from(at_a_time) / i64::from(key_blocks_in_group.max(1));
            let near = (ORDERED_L2_BYTES / head_bytes.max(1)).max(heads.into());
            if self.waits_in_order(spec) { of_batch.min(near).clamp(1, num_heads.max(1)) } else { in_l2 }
        };
        // Those of the first tiles.
        let first_heads =
            if self.makes_delta() { heads_per_l2_group.max(least).min(num_heads) } else { num_heads };
        let first_query_heads =
            first_heads / i64::from(query_parts) * i64::from(problem.fwd.gqa_ratio() / parts);
        Ok(Sm90BwdSchedule {
            num_first_query_heads: first_query_heads as i32,
            num_first_q_blocks: (first_query_heads * i64::from(queries)) as i32,
            num_bias_blocks,
            num_heads: num_heads as i32,
            heads_per_l2_group: heads_per_l2_group as i32,
            num_tiles: count("seqlen_k", keys, heads_of_sequence)?,
            num_key_blocks: keys as i32,
            num_q_blocks: queries as i32,
            num_sms: num_sms as i32,
            num_head_parts: parts as i32,
            num_query_parts: query_parts as i32,
            few_tiles_of_head: (FEW_TILES / dims.num_heads_kv.max(1)) as i32,
            least_queries_of_part: least_queries_of_part.min(1 << 30) as i32,
            side_by_side_period: side_by_side_period as i32,
            side_by_side_heads: side_by_side_heads as i32,
            key_blocks_in_group: key_blocks_in_group as i32,
            head_sums: DevPtr::NULL,
        })
    }
}

/// The device's rule (`num_head_parts`) of few tiles: the most parts, halved until so many queries are left for each.
fn parts_of_queries(queries: u32, most: u32, least: u32) -> u32 {
    let mut parts = most;
    while parts > 1 && u64::from(queries) < u64::from(least) * u64::from(parts) {
        parts = fewer_parts(parts);
    }
    parts
}

/// Half of the parts, which divides the GQA ratio as they do, or one.
const fn fewer_parts(parts: u32) -> u32 {
    if parts.is_multiple_of(2) { parts / 2 } else { 1 }
}

/// The least divisor of a GQA ratio that is so many, or the ratio.
fn divisor_from(ratio: u32, wanted: u32) -> u32 {
    (1..ratio).find(|&parts| ratio.is_multiple_of(parts) && parts >= wanted).unwrap_or(ratio)
}

/// Queries and keys of a sequence, of the whole one where the call has a part of it.
fn lengths_of_whole(problem: &BwdProblem) -> [u32; 2] {
    let dims = problem.fwd.dims;
    problem.fwd.part.seqlens.unwrap_or([dims.seqlen_q, dims.seqlen_k])
}

/// Whether a mask may hide a key or a query from some of a block and not from all, so that 0 times its infinity reaches
/// rows that it must not; such rows are computed again.
#[must_use]
pub fn repairs(spec: &BwdSpec) -> bool {
    spec.fwd.mask != MaskKind::Full
}

/// Whether queries of a large LSE are left to [`repair`], with P of 0 before: those of scores that nothing modifies. A
/// branch for them in the main kernel's loop costs 2 to 10 %.
#[must_use]
pub fn leaves_far_queries(spec: &BwdSpec) -> bool {
    !modifies_score(spec)
}

/// CTAs of [`repair`], which has none where nothing is left to it: one to a kv head of each sequence and to a head's sink,
/// for far queries; and a warp to each query block and each tile, for rows that are not finite.
#[must_use]
pub fn repair_ctas(problem: &BwdProblem, spec: &BwdSpec, schedule: &Sm90BwdSchedule, q_blocks: u32) -> u32 {
    let dims = problem.fwd.dims;
    let sinks = if spec.write_dsink { dims.num_heads_q } else { 0 };
    let of_far_queries = if leaves_far_queries(spec) { dims.batch * dims.num_heads_kv + sinks } else { 0 };
    let warps = if repairs(spec) { q_blocks + schedule.num_tiles.unsigned_abs() } else { 0 };
    of_far_queries + warps.div_ceil(ROW_THREADS / 32)
}

/// Both head dimensions as the tiles have them; TMA fills the rest with zeros.
#[must_use]
pub const fn padded_dim(spec: &BwdSpec) -> i32 {
    let (qk, v) = (spec.fwd.head_dim_qk, spec.fwd.head_dim_v);
    let dim = if qk > v { qk } else { v };
    round_up(dim, 64)
}

/// A head dimension as products take it, 16 at a time.
const fn own_width(dim: i32) -> i32 {
    round_up(dim, 16)
}

/// Whether [`BwdWalk::HalfBlocks`] has registers for dK and dV of 64 keys, and three chunks of dQ to share out.
const fn fits_half_blocks(spec: &BwdSpec) -> bool {
    let (qk, v) = (spec.fwd.head_dim_qk, spec.fwd.head_dim_v);
    qk > 128 && padded_dim(spec) == 192 && own_width(qk) + own_width(v) <= 320
}

const fn round_up(a: i32, b: i32) -> i32 {
    (a + b - 1) / b * b
}

const fn tile_bytes(rows: i32, dim: i32) -> i32 {
    round_up(rows * dim * 2, 1024)
}

/// Whether the kernels compute this problem, and if not, why. Addresses, which a problem has not, must be multiples of
/// 16.
///
/// # Errors
/// The first fact that they do not take.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    takes(problem, NAME)
}

/// The same of any kernel of 16-bit products whose operands come by TMA, in its name.
pub(crate) fn takes(problem: &BwdProblem, name: &'static str) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(name, reason));
    problem.fwd.refuse_dropout_between_quads(name)?;
    let fwd = &problem.fwd;
    let (qk, v) = (fwd.dtypes.qk, fwd.dtypes.v);
    if qk.is_fp8() || v.is_fp8() {
        return refuse(format!("backward: dtype_qk {qk} with dtype_v {v}: its products are of 16-bit types"));
    }
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk || fwd.dtypes.o != qk {
        return refuse(format!(
            "backward: dtype_qk {qk}, dtype_v {v}, dtype_o {} are not three times f16 or three times bf16",
            fwd.dtypes.o
        ));
    }
    let dims = fwd.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > 256 {
            return refuse(format!("backward: {field} {dim} is larger than 256"));
        }
    }
    if fwd.layout.v == VLayout::ColMajor {
        return refuse("backward: v_layout col-major: its products read V along its rows".to_owned());
    }
    for (field, length) in [("seqlen_q", dims.seqlen_q), ("seqlen_k", dims.seqlen_k)] {
        if length >= 1 << 29 {
            return refuse(format!("backward: {field} {length} is not below 2^29"));
        }
    }
    let read = [
        ("q", fwd.strides.q, fwd.shape_q()),
        ("k", fwd.strides.k, fwd.shape_k()),
        ("v", fwd.strides.v, fwd.shape_v()),
        ("dout", problem.dout, fwd.shape_o()),
    ];
    for (name, strides, shape) in read {
        if let Some((axis, stride)) = odd_stride(strides, shape) {
            return refuse(format!(
                "backward: {name}.{axis} stride {stride} is not a multiple of 8 below 2^39, as TMA needs"
            ));
        }
    }
    Ok(())
}

/// The first stride in use that is no whole number of 16 bytes of a 16-bit type, or too large for TMA.
pub(crate) fn odd_stride(strides: Strides, shape: Shape) -> Option<(&'static str, i64)> {
    [
        ("batch", strides.batch, shape.batch),
        ("seq", strides.seq, shape.seq),
        ("head", strides.head, shape.head),
    ]
    .into_iter()
    .find(|&(_, stride, extent)| extent > 1 && (stride % 8 != 0 || stride >= 1 << 39))
    .map(|(axis, stride, _)| (axis, stride))
}

/// The tile for a problem that the kernels [`accept`](accepts), and its spec.
#[must_use]
pub fn choose_tile(problem: &BwdProblem, spec: &BwdSpec) -> Sm90BwdTile {
    let fwd = &problem.fwd;
    let dims = fwd.dims;
    let mut tile = default_tile(spec);
    // Beyond, 2 c / (1 + exp(2 y / c)) loses what of y is far below c: its error is some 3e-7 c.
    let slow_softcap = fwd.score.softcap.is_some_and(|cap| !(1e-3..=64.0).contains(&cap));
    if slow_softcap {
        tile.fast_softcap = false;
        if !tile.walk.splits_dims() && tile.walk != BwdWalk::HalfBlocks {
            tile.take_registers();
        }
    }
    if tile.walk == BwdWalk::InClusters && !spec.deterministic && half_a_cluster_is_idle(problem) {
        tile.walk = BwdWalk::SplitDims;
    }
    // The way of dQ that the model has cheapest, of those that the table's tile takes.
    if let Some(best) = dq_candidates_of(&tile, problem, spec).cheapest(0.0) {
        (tile.dq_path, tile.dq_finish) = best.choice;
    }
    let apart = tile.with_dq_apart(spec);
    if spec.deterministic && cost::wants_dq_apart(&tile, &apart, problem, spec) {
        tile = apart;
    }
    let is_full = spec.fwd.mask == MaskKind::Full;
    // Both beside each other spill with 24 registers (254 bytes at D 128 causal, with 40 none), and the
    // consumers have enough in 232: S 512 causal 263 and 269, delta beside 4k 578 and 585. Dropout's do not:
    // 431 and 428.
    let measured = padded_dim(spec) <= 128 && (dims.seqlen_k <= 4096 || tile.makes_delta());
    if num_modifiers(spec) == 0 && tile.dq_path == DqPath::FirstStores && measured {
        tile.load_registers = 40;
    }
    // Fewer steps, at the price of 56 bytes spilled: S 4096, 8192 and 16384 605, 639, 657 and 604, 645, 666 (an H100).
    let is_long = is_full && dims.seqlen_q.min(dims.seqlen_k) >= 8192;
    if is_long && padded_dim(spec) == 128 && num_modifiers(spec) == 0 && !spec.deterministic {
        tile.block_m = 80;
    }
    let whole = |strides, shape| odd_stride(strides, shape).is_none();
    tile.vector_load = dims.head_dim_v.is_multiple_of(8) && whole(fwd.strides.o, fwd.shape_o());
    tile.vector_store = dims.head_dim_qk.is_multiple_of(8)
        && dims.head_dim_v.is_multiple_of(8)
        && whole(problem.dq, fwd.shape_q())
        && whole(problem.dk, fwd.shape_k())
        && whole(problem.dv, fwd.shape_v());
    tile.fit_finish(spec);
    tile
}

/// Whether the second CTA of a cluster of 128 keys would often have none: of short sequences, packed ones or those that end in a
/// cluster's first half. An H200, D 256, with clusters and without: packed B3 H32/4 causal of 72 to 167 74 and 66 us, B64 H4 of 33 to
/// 252 112 and 106; B32 H16 full of 48 97 and 83, 100 173 and 176, 128 179 and 189, 155 296 and 276, 192 312 and 293, 256 397 and
/// 415, 320 590 and 559; B3 H16/1 S448 in a window 94 and 97, packed B4 H15/3 causal of 248 to 704 141 and 144.
fn half_a_cluster_is_idle(problem: &BwdProblem) -> bool {
    let keys = problem.fwd.dims.seqlen_k;
    let is_packed = problem.fwd.layout.q == QLayout::Packed;
    if is_packed { keys <= 256 } else { keys <= 320 && keys.div_ceil(64) % 2 == 1 }
}

/// The ways of dQ that a call may have, with what the model says of each: how it comes to its sums, and where these become dQ. Fewer
/// than two where the other fields leave no choice.
#[must_use]
pub fn dq_candidates(problem: &BwdProblem, spec: &BwdSpec) -> Candidates<(DqPath, DqFinish)> {
    dq_candidates_of(&choose_tile(problem, spec), problem, spec)
}

fn dq_candidates_of(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
) -> Candidates<(DqPath, DqFinish)> {
    let dims = problem.fwd.dims;
    // Delta beside the products is for scores that nothing but dropout changes. A band leaves each block few keys, and packed
    // sequences may be short: packed 32/8 causal 548 TFLOP/s without and 535 with it.
    let of_dropout_alone = num_modifiers(spec) == i32::from(spec.fwd.dropout);
    let may_make_delta = of_dropout_alone
        && spec.fwd.q_layout == QLayout::Batch
        && match spec.fwd.mask {
            MaskKind::Full => true,
            MaskKind::Upper => dims.seqlen_q <= dims.seqlen_k,
            MaskKind::Band => false,
        };
    let stores_first = !spec.deterministic && tile.walk.cluster() == 1 && tile.dq_path != DqPath::Registers;
    let paths: &[DqPath] = if stores_first {
        &[DqPath::FirstStores, DqPath::StoreWarp]
    } else {
        std::slice::from_ref(&tile.dq_path)
    };
    let ways = paths.iter().flat_map(|&dq_path| {
        [DqFinish::Beside, DqFinish::BesideWithDelta, DqFinish::Launch].map(|dq_finish| (dq_path, dq_finish))
    });
    let fitting = ways.filter_map(|(dq_path, dq_finish)| {
        let way = Sm90BwdTile { dq_path, dq_finish, ..*tile };
        let mut fitted = way;
        fitted.fit_finish(spec);
        // Where few heads are left to make delta of, preprocess makes all of it.
        let makes_delta =
            !way.makes_delta() || may_make_delta && cost::first_heads(&way, problem, spec) <= 0.5;
        (fitted == way && makes_delta).then_some(way)
    });
    Candidates::of(fitting.map(|way| ((way.dq_path, way.dq_finish), cost::of_dq(&way, problem, spec))))
}

/// Whether a score is more than a scaled product, so that its rows have origins.
#[must_use]
pub fn modifies_score(spec: &BwdSpec) -> bool {
    spec.fwd.softcap || spec.fwd.bias != BiasKind::None
}

/// How many of bias, soft-cap and dropout there are: each wants registers.
fn num_modifiers(spec: &BwdSpec) -> i32 {
    let FwdSpec { bias, softcap, dropout, .. } = spec.fwd;
    i32::from(bias != BiasKind::None) + i32::from(softcap) + i32::from(dropout)
}

/// The tile for long sequences of a spec.
#[must_use]
pub fn default_tile(spec: &BwdSpec) -> Sm90BwdTile {
    let dim = padded_dim(spec);
    let full = spec.fwd.mask == MaskKind::Full;
    let modifiers = num_modifiers(spec);
    let in_parts = fits_half_blocks(spec);
    // TFLOP/s on an H200, bf16, S 4096.
    let (block_m, walk) = match dim {
        // Without early scores 547, with 521; causal, with polynomials, 478 and 435, and 464 with dQ late.
        64 => (128, BwdWalk::InOrder),
        // Edges apart, without it and an early dV 615, with both 605; causal 521 and 516; with dropout 408
        // and 356. Deterministic, S 8192, 582 and 548; causal 508 and 484 (635 and 608 with semaphores polled
        // by threads of their own).
        128 => (64, BwdWalk::InOrder),
        // S 8192, 555; causal 522. As with a wider V, 315 and 280.
        192 if in_parts => (64, BwdWalk::HalfBlocks),
        // B4 H8 S4096 D 192 2397 us; causal 1290. By split_early, 96 queries a block, 2720 and 1464.
        192 => (64, BwdWalk::GradientEach),
        // 491; causal 439. A CTA without another 426, 393.
        _ => (64, BwdWalk::InClusters),
    };
    let split_dims = walk.splits_dims();
    let hands_over = walk == BwdWalk::GradientEach && spec.deterministic;
    let dq_path = if split_dims && !hands_over || (dim == 64 && spec.deterministic) {
        // Deterministic at D 64, S 8192, 525 of 485, 541 of 521 without a mask; at D 128 503, and stored 608. D 192, 2580 us and
        // stored 2327, causal 1315 and 1209; without an order 2367 and 2326, 1208 and 1193, but shorter 338 and 354, 198 and 204.
        DqPath::Registers
    } else if spec.deterministic {
        DqPath::StoreWarp
    } else {
        DqPath::FirstStores
    };
    let mut tile = Sm90BwdTile {
        block_m,
        block_n: if split_dims { 64 } else { 128 },
        stages_q: 2,
        // A V of three chunks leaves room for one block of dO.
        stages_dout: if dim == 256 || (in_parts && spec.fwd.head_dim_v > 128) { 1 } else { 2 },
        stages_ds: if in_parts { 1 } else { 2 },
        stages_dbias: if dim > 128 { 1 } else { 2 },
        walk,
        dq_path,
        dq_finish: DqFinish::Beside,
        // At D 128 a second loop of the early order spills: 492 of 603, causal 494 of 505.
        edges_apart: !split_dims && !in_parts,
        // 557 of 547; causal 478 of 462; at D 128 without early scores causal 523 of 504, edges apart as
        // well. Of D 192 with V of 128 none, 2 and 4: 534, 555, 546; causal 522, 522, 514.
        exp2_polynomials: if split_dims || modifiers > 0 {
            0
        } else if in_parts {
            2
        } else {
            4
        },
        // The consumers of clusters have enough in 232; with 24 the thread that claims tiles spills 140 bytes, that polls 96.
        load_registers: if walk.cluster() > 1 { 40 } else { 24 },
        head_parts: false,
        // Deterministic key blocks are launched in the order of their additions, or take their indices in it:
        // D 128 causal 508 of 494, D 64 488 of 484 but at S 2048 355 of 376.
        // D 256, B4 H8 S4096, 2837 us and persistent 2812, causal 1537 and 1512, in an order 1558 and 1508; 85 queries over 32576
        // keys, 1456 and 1128.
        persistent: !spec.deterministic || (matches!(dim, 128 | 256) && !full),
        fast_softcap: spec.fwd.softcap,
        vector_load: true,
        vector_store: spec.dtype_grad != DType::F32,
    };
    // At D 64 one is too many already, but for ALiBi.
    let wants_registers = modifiers > 1 || (dim == 64 && modifiers == 1 && spec.fwd.bias != BiasKind::Alibi);
    if !split_dims && !in_parts && wants_registers {
        tile.take_registers();
        tile.persistent &= !(dim == 64 && full);
    }
    tile.fit_finish(spec);
    tile
}

/// The main kernel: arguments `BwdParams`, five tensor maps, `Sm90BwdSchedule`.
#[must_use]
pub fn main(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    with_maps("main", ("Smem", tile.smem_bytes(spec)), (spec, tile), ["", ""])
}

/// The same of keys that come while it runs: [`ArrivalParams`] behind its other arguments.
#[must_use]
pub fn main_of_arriving_keys(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    let more =
        [", const __grid_constant__ ArrivalParams arrivals", ", ArrivingKeys<ArrivalParams>(arrivals)"];
    with_maps("main", ("Smem", tile.smem_bytes(spec)), (spec, tile), more)
}

/// `more`: a parameter, and its argument.
fn with_maps(
    name: &str,
    (smem, smem_bytes): (&str, i32),
    (spec, tile): (&BwdSpec, &Sm90BwdTile),
    more: [&str; 2],
) -> KernelSource {
    let (threads, cluster) = (tile.num_threads(), tile.walk.cluster());
    let call = format!(
        "static_assert(sizeof(sm90::bwd::{smem}<kSpec, kTile>) == {smem_bytes}, \"{smem}: host and device disagree\"); \
         static_assert(sm90::bwd::num_threads(kTile) == {threads}, \"threads: host and device disagree\"); \
         static_assert(sm90::bwd::cluster_size(kTile) == {cluster}, \"cluster: host and device disagree\"); \
         sm90::bwd::{name}<kSpec, kTile>(p, maps, schedule{});",
        more[1],
    );
    let clusters = if cluster > 1 { format!("__cluster_dims__({cluster}, 1, 1) ") } else { String::new() };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: &format!("fmha/sm90/bwd/{name}.cuh"),
        constants: &constants,
        bounds: &format!("{clusters}__launch_bounds__({threads}, 1)"),
        params: &format!(
            "const __grid_constant__ BwdParams p, const __grid_constant__ sm90::bwd::Maps maps, \
             const __grid_constant__ Sm90BwdSchedule schedule{}",
            more[0]
        ),
        call: &call,
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || rendered(&spec, &tile))
}

/// The kernel before the main one: arguments `BwdParams`, `Sm90BwdSchedule`; a CTA to a query block of a query head.
#[must_use]
pub fn preprocess(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    rows("preprocess", spec, tile)
}

/// The kernel after the main one, likewise.
#[must_use]
pub fn postprocess(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    // Sums apart want registers for the parts that are under way: of its own ptxas gives it 80.
    rows_at_once("postprocess", spec, tile, tile.keeps_dq_apart().then_some(2))
}

/// The kernel after that, of [`repair_ctas`] CTAs: arguments likewise.
#[must_use]
pub fn repair(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    // Four CTAs a multiprocessor: most calls find nothing to repair, and then the launch is as long as its CTAs take turns.
    rows_at_once("repair", spec, tile, Some(4))
}

/// The kernel after the main one with `head_parts`: arguments likewise, a CTA to a key block of a kv head.
#[must_use]
pub fn head_sums(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    rows("head_sums", spec, tile)
}

/// The kernel of dBias, which wants nothing but what the first one leaves: arguments as of the main one, all of them by
/// [its own tile](Sm90BwdTile::of_dbias).
#[must_use]
pub fn dbias(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    with_maps("dbias", ("BiasSmem", tile.dbias_smem_bytes(spec)), (spec, tile), ["", ""])
}

fn rows(name: &str, spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    rows_at_once(name, spec, tile, None)
}

/// With registers for so many CTAs to a multiprocessor at least.
fn rows_at_once(name: &str, spec: &BwdSpec, tile: &Sm90BwdTile, ctas: Option<u32>) -> KernelSource {
    let ctas = ctas.map_or_else(String::new, |ctas| format!(", {ctas}"));
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: &format!("fmha/sm90/bwd/{name}.cuh"),
        constants: &constants,
        bounds: &format!("__launch_bounds__({ROW_THREADS}{ctas})"),
        params: "const __grid_constant__ BwdParams p, const __grid_constant__ Sm90BwdSchedule schedule",
        call: &format!("sm90::bwd::{name}<kSpec, kTile>(p, schedule);"),
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || rendered(&spec, &tile))
}

fn rendered(spec: &BwdSpec, tile: &Sm90BwdTile) -> [Header; 2] {
    let dtype = spec.fwd.dtype_qk;
    let (queries, of_dk, of_dv) = tile.consumer_columns(spec);
    let shape = |n, a| WgmmaShape { dtype, n, a, sums: Sums::F32 };
    let operand = if tile.walk.splits_dims() { OperandA::Shared } else { OperandA::Registers };
    let dq = tile.dq_columns(spec) / tile.walk.cluster();
    let mut shapes = vec![shape(queries, OperandA::Shared), shape(of_dk, operand)];
    if of_dv > 0 {
        shapes.push(shape(of_dv, operand));
    }
    shapes.push(shape(dq, OperandA::Shared));
    if tile.walk.score_parts() > 1 {
        // A chunk of dQ's columns, half of one, and dK with dS from shared memory.
        shapes.extend([64, dq - 64, of_dk].map(|n| shape(n, OperandA::Shared)));
    }
    [wgmma::header(&shapes), host_header()]
}

/// `fmha/sm90_bwd_host.h`: what this file shares with the device.
fn host_header() -> Header {
    // The walks of which something holds, as C++ has it.
    let any_of = |holds: &dyn Fn(BwdWalk) -> bool| {
        let walks: Vec<_> = BwdWalk::ALL.into_iter().filter(|&walk| holds(walk)).collect();
        let words: Vec<_> = walks.iter().map(|walk| format!("walk == {}", walk.c_literal())).collect();
        if words.is_empty() { "false".to_owned() } else { words.join(" || ") }
    };
    let transposes: Vec<_> = [64, 128, 192, 256]
        .map(|dim| format!("dim == {dim} && ({})", any_of(&|walk| walk.transposes_dq(dim))))
        .to_vec();
    let text = format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}{}{}{}\n{}\n{}\n\
         // Threads of a CTA of the kernels before and after the main one.\n\
         constexpr int kRowThreads = {ROW_THREADS};\n\
         // Four numbers each of dQ, so many times, that one adds up where key blocks keep their sums apart.\n\
         constexpr int kPartFours = {PART_FOURS};\n\
         // CTAs that add the parts of a key block.\n\
         constexpr int kHeadSumsCtas = {HEAD_SUMS_CTAS};\n\
         // Tile indices that are known at a time: the tile at work, and its successor, which is loaded meanwhile.\n\
         constexpr int kTileIndexSlots = {TILE_INDEX_SLOTS};\n\
         constexpr bool bwd_splits_dims(BwdWalk walk) {{ return {}; }}\n\
         constexpr bool bwd_transposes_dq(BwdWalk walk, int32_t dim) {{\n  return {};\n}}\n\n}}  // namespace fmha\n",
        BwdWalk::c_definition(),
        DqPath::c_definition(),
        DqFinish::c_definition(),
        Sm90BwdTile::c_definition(),
        Sm90BwdSchedule::c_definition(),
        ArrivalParams::c_definition(),
        any_of(&BwdWalk::splits_dims),
        transposes.join(" ||\n         "),
    );
    Header::rendered("fmha/sm90_bwd_host.h", text)
}
