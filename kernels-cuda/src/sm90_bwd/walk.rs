//! The walk of a tile (the loop of the consume role), how dQ is added to its sums, and which launch converts these
//! to dQ.

use fmha_core::{abi_enum, abi_functions};

/// The loop of the consume role: which keys and which part of the dimension a consumer has, and the order of a
/// block's products (`consume/`, a file each).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BwdWalk {
    /// For head dimensions up to 128: a consumer has 64 keys and the whole dimension, processes one query block
    /// after another, and starts dP together with the scores.
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
    /// `SplitDims` in a cluster of two CTAs with neighbouring key blocks. They exchange their dS, and each adds
    /// half of dQ's dimension for both. The next block's scores start before this block's products end.
    InClusters,
    /// `InClusters` at head dimension 192, whose thirds two consumers cannot divide: one consumer computes dK, the
    /// other dV, with all columns.
    GradientEach,
}

abi_functions! {
    pub(super) fn walk_text() of walk: BwdWalk {
        /// Whether consumers divide the head dimension, so that each has all keys of the CTA.
        pub const fn splits_dims(&self) -> bool {
            matches!(self, BwdWalk::SplitDims | BwdWalk::InClusters | BwdWalk::GradientEach)
        }

        /// Number of CTAs of a cluster.
        pub const fn cluster(&self) -> i32 {
            if matches!(self, BwdWalk::InClusters | BwdWalk::GradientEach) { 2 } else { 1 }
        }
    }
}

impl BwdWalk {
    /// Whether the next block's scores are computed while this block's gradients are.
    pub(super) const fn has_next_scores(self) -> bool {
        matches!(self, Self::EarlyScores | Self::InClusters | Self::GradientEach)
    }

    /// Number of parts of a block's queries whose scores are computed one after the other.
    pub(super) const fn score_parts(self) -> i32 {
        if matches!(self, Self::HalfBlocks) { 2 } else { 1 }
    }
}

abi_enum!(BwdWalk { InOrder, LateDp, EarlyScores, HalfBlocks, SplitDims, InClusters, GradientEach });

/// How a key block's share of dQ is added to the sums in global memory (`dq/`). In deterministic calls additions
/// are ordered, and the first one is a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqPath {
    /// Consumers add dQ to memory from their registers.
    Registers,
    /// The store warp adds dQ from shared memory. Without an order it adds to zeros that preprocess has written.
    StoreWarp,
    /// The store warp of the first key block to reach a query block stores its dQ; the other key blocks'
    /// store warps add to it.
    FirstStores,
    /// Each key block stores its dQ to memory of its own, from registers or by the store warp. A later launch adds
    /// what all key blocks stored, in one fixed order, so that every run gives equal bits; for deterministic calls.
    /// No key block waits for another, but this memory is written and read once more.
    Apart,
}

abi_enum!(DqPath { Registers, StoreWarp, FirstStores, Apart });

/// Where the f32 sums of dQ are converted to dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqFinish {
    /// A launch after the main kernel converts the sums to dQ.
    Launch,
    /// An extra warp in the main kernel finishes dQ, while the sums may still be in the L2. For persistent CTAs.
    Beside,
    /// An extra warp in the main kernel, as with `Beside`. While no dQ is ready, it computes LSE in log2 and delta
    /// for all rows except those of the first tiles' heads, which preprocess computes.
    BesideWithDelta,
}

abi_enum!(DqFinish { Launch, Beside, BesideWithDelta });
