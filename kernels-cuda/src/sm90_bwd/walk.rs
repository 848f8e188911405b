//! How a tile goes: the loop of the consume role, the way of dQ to its sums, and where these become dQ.

use fmha_core::abi_enum;

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
    /// At 256: both consumers have the CTA's 64 keys, and each 32 of the queries of S and a half of the
    /// dimension of dQ, dK and dV.
    SplitDims,
    /// The same by two CTAs of a cluster, which have neighbouring key blocks, send each other their dS, and each add a half
    /// of dQ's dimension for both; the next block's scores are started before this block's products are done.
    InClusters,
    /// The same at 192, whose thirds two consumers cannot share out: one has dK, the other dV, of all columns.
    GradientEach,
}

impl BwdWalk {
    pub(super) const ALL: [Self; 7] = [
        Self::InOrder,
        Self::LateDp,
        Self::EarlyScores,
        Self::HalfBlocks,
        Self::SplitDims,
        Self::InClusters,
        Self::GradientEach,
    ];

    /// Whether consumers share out the dimension, and so have all keys of a CTA.
    #[must_use]
    pub const fn splits_dims(self) -> bool {
        matches!(self, Self::SplitDims | Self::InClusters | Self::GradientEach)
    }

    /// Whether the next block's scores are under way while this block's gradients are.
    pub(super) const fn has_next_scores(self) -> bool {
        matches!(self, Self::EarlyScores | Self::InClusters | Self::GradientEach)
    }

    /// CTAs of a cluster.
    #[must_use]
    pub const fn cluster(self) -> i32 {
        if matches!(self, Self::InClusters | Self::GradientEach) { 2 } else { 1 }
    }

    /// Of a block's queries, whose scores are made one after the other.
    pub(super) const fn score_parts(self) -> i32 {
        if matches!(self, Self::HalfBlocks) { 2 } else { 1 }
    }
}

abi_enum!(BwdWalk { InOrder, LateDp, EarlyScores, HalfBlocks, SplitDims, InClusters, GradientEach });

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
