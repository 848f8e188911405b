//! The tile: its fields, how consumers divide its work, and what follows from its way to sum dQ.

use fmha_core::fields::Takes;
use fmha_core::spec::BwdSpec;
use fmha_core::{abi_functions, abi_spec};

use super::spec::{modifies_score, own_width, padded_dim};
use super::walk::{BwdWalk, DqFinish, DqPath};
use crate::round_up;
use crate::sm90::MAX_SMEM_BYTES;

abi_spec! {
    /// Tile of the backward kernels.
    pub struct Sm90BwdTile {
        /// Query rows of a block: a multiple of 16.
        pub block_m: i32 = Takes::multiples(16, 16, 256).tuned_over(&[64, 80, 96, 128]),
        /// Keys of a CTA: 64 for each consumer warpgroup, or 64 that all consumers share.
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
        /// How a key block's dQ is added to the sums of dQ.
        pub dq_path: DqPath = Takes::all().tuned(),
        /// Where the f32 sums of dQ are converted to dQ.
        pub dq_finish: DqFinish = Takes::all().tuned(),
        /// Registers of a thread outside the consumers; the consumers have the rest.
        pub load_registers: i32 = Takes::among(&[24, 40]).tuned(),
        /// Whether a kv head's query heads are divided among several tiles, whose sums of dK and dV a separate
        /// launch rounds; otherwise one tile processes all of them.
        pub head_parts: bool = Takes::all(),
        /// Whether blocks that a mask or the end of the keys cuts have a loop of their own.
        pub edges_apart: bool = Takes::all().tuned(),
        /// Number of exponentials, of each 16, that are computed as polynomials on the multiply-add pipe.
        pub exp2_polynomials: i32 = Takes::within(0, 8).tuned_over(&[0, 2, 4, 6]),
        /// Whether there is one CTA per multiprocessor that processes key blocks one after another; otherwise one
        /// CTA per key block.
        pub persistent: bool = Takes::all().tuned(),
        /// Whether soft-caps use `tanh(y) = 1 - 2 / (1 + exp(2 y))`; otherwise a `tanh` that is exact for small
        /// scores too.
        pub fast_softcap: bool = Takes::all(),
        /// Whether O and dO are read 16 bytes at a time; otherwise by elements.
        pub vector_load: bool = Takes::nothing(),
        /// Whether gradients are stored 16 bytes at a time; otherwise by elements.
        pub vector_store: bool = Takes::nothing(),
    }
}

/// Queries of a consumer's S where dimensions are split.
pub(super) const SPLIT_QUERIES: i32 = 32;

/// The padded head dimension at which consumers compute dQ transposed, and divide it by its dimension.
pub(super) const TRANSPOSED_DQ_DIM: i32 = 128;

pub(super) const fn transposes_dq(padded_dim: i32) -> bool {
    padded_dim == TRANSPOSED_DQ_DIM
}

abi_functions! {
    pub(super) fn tile_text() of tile: Sm90BwdTile {
        /// Number of consumer warpgroups. Each has 64 keys of the block; or, with divided dimensions, all of its 64
        /// keys with 32 of the queries of S and a part of the dimension of dQ, dK and dV, or with one of dK and dV.
        pub const fn num_consumers(&self) -> i32 {
            if self.walk.splits_dims() { self.block_m / SPLIT_QUERIES } else { self.block_n / 64 }
        }

        /// Threads of a CTA of the main kernel: the consumers, and one warpgroup that loads and stores.
        pub const fn num_threads(&self) -> i32 {
            128 * (1 + self.num_consumers())
        }

        /// Whether each key block has separate sums of dQ.
        pub const fn keeps_dq_apart(&self) -> bool {
            matches!(self.dq_path, DqPath::Apart)
        }

        /// Whether consumers add dQ from their registers.
        pub const fn adds_from_registers(&self) -> bool {
            matches!(self.dq_path, DqPath::Registers) || (self.keeps_dq_apart() && self.walk.splits_dims())
        }

        /// Whether the main kernel converts the sums of dQ to dQ.
        pub const fn finishes_dq(&self) -> bool {
            !matches!(self.dq_finish, DqFinish::Launch)
        }

        /// Whether the main kernel also computes delta.
        pub const fn makes_delta(&self) -> bool {
            matches!(self.dq_finish, DqFinish::BesideWithDelta)
        }

        /// Whether P has a single slot: with `GradientEach` dQ needs shared memory before it is stored, and P of a
        /// block is stored only after P of the previous block was read.
        pub(super) const fn has_one_probs(&self) -> bool {
            matches!(self.walk, BwdWalk::GradientEach) && !self.adds_from_registers()
        }
    }
}

impl Sm90BwdTile {
    /// Number of queries of a consumer's S; then of columns of its dK and of its dV, one of which is 0 if it
    /// computes only the other.
    pub(super) const fn consumer_columns(&self, spec: &BwdSpec) -> (i32, i32, i32) {
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

    /// Number of columns of the sums of dQ.
    pub(super) const fn dq_dim(&self, spec: &BwdSpec) -> i32 {
        if self.walk.score_parts() > 1 { own_width(spec.fwd.head_dim_qk) } else { padded_dim(spec) }
    }

    /// Number of columns of dQ that one consumer adds, over all CTAs of its cluster.
    pub(super) const fn dq_columns(&self, spec: &BwdSpec) -> i32 {
        if matches!(self.walk, BwdWalk::GradientEach) {
            // Each consumer has a chunk of 64 columns. Both halves of the third chunk are multiplied as a whole.
            64 * self.walk.cluster()
        } else if transposes_dq(padded_dim(spec)) {
            self.block_m
        } else if self.walk.splits_dims() || self.walk.score_parts() > 1 {
            self.dq_dim(spec) / self.num_consumers()
        } else {
            padded_dim(spec)
        }
    }

    /// V's dimension in shared memory: padded to that of Q and K, or its own if there is no room.
    pub(super) const fn v_columns(&self, spec: &BwdSpec) -> i32 {
        if self.walk.score_parts() > 1 { round_up(spec.fwd.head_dim_v, 64) } else { padded_dim(spec) }
    }

    /// Rows of Q and dO that a CTA loads at a time.
    #[must_use]
    pub const fn loaded_rows(&self) -> i32 {
        self.block_m / self.walk.cluster()
    }

    /// The tile of dBias' kernel: it keeps sums besides S and dP, so its blocks have fewer queries, a divisor of
    /// the main kernel's number, which determines the layout of row statistics.
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
}

impl Sm90BwdTile {
    /// Whether key blocks wait for each other so that they add to dQ in a fixed order.
    pub(super) const fn waits_in_order(&self, spec: &BwdSpec) -> bool {
        spec.deterministic && !self.keeps_dq_apart()
    }

    /// Whether the main kernel may finish dQ, if shared memory has room.
    pub(super) const fn may_finish_dq(&self, spec: &BwdSpec) -> bool {
        self.persistent
            && !self.adds_from_registers()
            && !spec.deterministic
            && self.walk.score_parts() == 1
            && self.walk.cluster() == 1
    }

    /// Whether the warp that finishes dQ has the room and the time to compute delta too. Preprocess must then have no
    /// zeros to write either. It is not possible where scores are modified: some rows need an origin, and only
    /// preprocess has registers to compute it.
    pub(super) fn may_make_delta(&self, spec: &BwdSpec) -> bool {
        let fits = matches!(self.dq_path, DqPath::FirstStores) && self.vector_load && self.block_m % 32 == 0;
        fits && !modifies_score(spec)
    }

    /// Sets the way to finish dQ that is nearest to the present one and compatible with the other fields and the
    /// shared memory: a separate launch if the main kernel cannot finish it, and delta by preprocess if the main
    /// kernel cannot compute it.
    pub fn fit_finish(&mut self, spec: &BwdSpec) {
        if self.makes_delta() && !self.may_make_delta(spec) {
            self.dq_finish = DqFinish::Beside;
        }
        if self.finishes_dq() && !(self.may_finish_dq(spec) && self.smem_bytes(spec) <= MAX_SMEM_BYTES) {
            self.dq_finish = DqFinish::Launch;
        }
    }
}
