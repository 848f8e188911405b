//! Walk of a tile: the loop of the consume role, the path of dQ to its sums, and where these become dQ.

use fmha_core::{abi_enum, abi_functions};

/// The loop of the consume role: which keys and which part of the dimension a consumer has, and the order of a
/// block's products (`consume/`, a file each).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BwdWalk {
    /// Head dimensions to 128: a consumer has 64 keys and the whole dimension, walks one query block after
    /// another, and starts dP beside the scores.
    InOrder,
    /// `InOrder` with dP started when P is made, which leaves more registers for modifiers.
    LateDp,
    /// `InOrder` with the next block's scores started before the wait for this block's dK. Two blocks of Q
    /// are held at a time, and a third stage hides their loading.
    EarlyScores,
    /// Head dimensions 129 to 192, both together at most 320: P and dS of half of a block's queries at a
    /// time.
    HalfBlocks,
    /// Head dimension 256: both consumers have the CTA's 64 keys. Each has 32 of the queries of S, and half
    /// of the dimension of dQ, dK and dV.
    SplitDims,
    /// `SplitDims` by the two CTAs of a cluster, which have neighbouring key blocks. They send each other
    /// their dS, and each adds half of dQ's dimension for both. The next block's scores are started before
    /// this block's products are done.
    InClusters,
    /// `InClusters` at head dimension 192, whose thirds two consumers cannot share out: one consumer has dK,
    /// the other dV, of all columns.
    GradientEach,
}

abi_functions! {
    pub(super) fn walk_text() of walk: BwdWalk {
        /// Whether consumers share out the dimension, and so have all keys of a CTA.
        pub const fn splits_dims(&self) -> bool {
            matches!(self, BwdWalk::SplitDims | BwdWalk::InClusters | BwdWalk::GradientEach)
        }

        /// CTAs of a cluster.
        pub const fn cluster(&self) -> i32 {
            if matches!(self, BwdWalk::InClusters | BwdWalk::GradientEach) { 2 } else { 1 }
        }
    }
}

impl BwdWalk {
    /// Whether the next block's scores are under way while this block's gradients are.
    pub(super) const fn has_next_scores(self) -> bool {
        matches!(self, Self::EarlyScores | Self::InClusters | Self::GradientEach)
    }

    /// Parts of a block's queries whose scores are made one after the other.
    pub(super) const fn score_parts(self) -> i32 {
        if matches!(self, Self::HalfBlocks) { 2 } else { 1 }
    }
}

abi_enum!(BwdWalk { InOrder, LateDp, EarlyScores, HalfBlocks, SplitDims, InClusters, GradientEach });

/// Path of a key block's share of dQ to the sums in memory (`dq/`). In deterministic calls additions have an
/// order, and the first of it stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqPath {
    /// Consumers add from their registers.
    Registers,
    /// The store warp adds from shared memory; without an order, to zeros that preprocess has written.
    StoreWarp,
    /// The store warp of the first key block to reach a query block stores its dQ; the other key blocks'
    /// store warps add to it.
    FirstStores,
    /// Each key block stores sums of its own, from registers or by the store warp, as its walk has it. The
    /// launch that finishes dQ adds them in the deterministic order, so the bits do not change; for
    /// deterministic calls. No key block waits for another, but as many numbers are read as are written.
    Apart,
}

abi_enum!(DqPath { Registers, StoreWarp, FirstStores, Apart });

/// Place where the sums of dQ become dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqFinish {
    /// A launch after the main kernel.
    Launch,
    /// A warp of its own in the main kernel, while the L2 may still hold the sums. For persistent CTAs.
    Beside,
    /// A warp in the main kernel, as with `Beside`. While no dQ is ready, the warp makes LSE in log2 and
    /// delta of all heads' rows but those of the first tiles, which preprocess makes.
    BesideWithDelta,
}

abi_enum!(DqFinish { Launch, Beside, BesideWithDelta });
