//! The tile for a problem, from a table with measurements; among the ways to sum dQ, the cheapest by the model.

use fmha_core::spec::{BiasKind, BwdSpec};
use fmha_core::tune::Candidates;
use fmha_core::{BwdProblem, DType, MaskKind, QLayout};

use super::accepts::odd_stride;
use super::check::fits_half_blocks;
use super::cost;
use super::spec::{num_modifiers, padded_dim};
use super::tile::Sm90BwdTile;
use super::walk::{BwdWalk, DqFinish, DqPath};
use crate::tile_list;

/// The tile for a problem that the kernels [`accept`](super::accepts), and its spec.
#[must_use]
pub fn choose_tile(problem: &BwdProblem, spec: &BwdSpec) -> Sm90BwdTile {
    let fwd = &problem.fwd;
    let dims = fwd.dims;
    let mut tile = default_tile(spec);
    // For larger caps, 2 c / (1 + exp(2 y / c)) loses accuracy for y far below c: its error is some 3e-7 c.
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
    // Among the ways to sum dQ that the table's tile supports, the cheapest by the model is taken.
    if let Some(best) = dq_candidates_of(&tile, problem, spec).cheapest(0.0) {
        (tile.dq_path, tile.dq_finish) = best.choice;
    }
    let apart = tile.with_dq_apart(spec);
    // Lists decide which key blocks have sums of a query block, but finishing reads the sums of all, so lists
    // exclude separate sums.
    let may_be_apart = spec.deterministic && !tile_list::serve(fwd);
    if may_be_apart && cost::wants_dq_apart(&tile, &apart, problem, spec) {
        tile = apart;
    }
    let is_full = spec.fwd.mask == MaskKind::Full;
    // Finishing dQ and computing delta beside the products spill with 24 registers (254 bytes at D 128 causal, with 40
    // none), and the consumers have enough in 232: S 512 causal 263 and 269, delta beside 4k 578 and 585. Dropout's do
    // not: 431 and 428.
    let measured = padded_dim(spec) <= 128 && (dims.seqlen_k <= 4096 || tile.makes_delta());
    if num_modifiers(spec) == 0 && tile.dq_path == DqPath::FirstStores && measured {
        tile.load_registers = 40;
    }
    // Larger steps are fewer, at the price of 56 bytes spilled: S 4096, 8192 and 16384 605, 639, 657 and 604, 645, 666
    // (an H100).
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

/// Whether the second CTA of a cluster of 128 keys would often have no keys: in short sequences that are packed or
/// that end in a cluster's first half. On an H200, D 256, with clusters and without: packed B3 H32/4 causal of 72
/// to 167 74 and 66 us, B64 H4 of 33 to 252 112 and 106; B32 H16 full of 48 97 and 83, 100 173 and 176, 128 179 and
/// 189, 155 296 and 276, 192 312 and 293, 256 397 and 415, 320 590 and 559; B3 H16/1 S448 in a window 94 and 97,
/// packed B4 H15/3 causal of 248 to 704 141 and 144.
fn half_a_cluster_is_idle(problem: &BwdProblem) -> bool {
    let keys = problem.fwd.dims.seqlen_k;
    let is_packed = problem.fwd.layout.q == QLayout::Packed;
    if is_packed { keys <= 256 } else { keys <= 320 && keys.div_ceil(64) % 2 == 1 }
}

/// The ways to sum dQ that a call may use, with modelled times: how dQ is added to its sums, and which launch
/// converts them to dQ. Fewer than two if the other fields leave no choice.
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
    // Computing delta in the main kernel is only supported for scores without modifiers other than dropout. A band
    // leaves each block few keys, and packed sequences may be short: packed 32/8 causal ran at 548 TFLOP/s without
    // and 535 with it.
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
        // Preprocess computes all of delta if the main kernel would compute it for only few heads.
        let makes_delta =
            !way.makes_delta() || may_make_delta && cost::first_heads(&way, problem, spec) <= 0.5;
        (fitted == way && makes_delta).then_some(way)
    });
    Candidates::of(fitting.map(|way| ((way.dq_path, way.dq_finish), cost::of_dq(&way, problem, spec))))
}

/// The tile for long sequences of a spec.
#[must_use]
pub fn default_tile(spec: &BwdSpec) -> Sm90BwdTile {
    let dim = padded_dim(spec);
    let full = spec.fwd.mask == MaskKind::Full;
    let modifiers = num_modifiers(spec);
    let in_parts = fits_half_blocks(spec);
    // The comments below give TFLOP/s on an H200, bf16, S 4096.
    let (block_m, walk) = match dim {
        // Without early scores 547, with 521; causal, with polynomials, 478 and 435, and 464 with dQ late.
        64 => (128, BwdWalk::InOrder),
        // Edges apart, without it and an early dV 615, with both 605; causal 521 and 516; with dropout 408
        // and 356. Deterministic, S 8192, 582 and 548; causal 508 and 484 (635 and 608 with semaphores polled
        // by threads of their own).
        128 => (64, BwdWalk::InOrder),
        // S 8192, 555; causal 522. As with a wider V, 315 and 280.
        192 if in_parts => (64, BwdWalk::HalfBlocks),
        // B4 H8 S4096 D 192 2397 us; causal 1290. Without a cluster, 96 queries to 64 keys, 2720 and 1464.
        192 => (64, BwdWalk::GradientEach),
        // A single CTA: ptxas serialises the products of clusters here (C7514).
        _ if spec.deterministic && spec.fwd.dropout && full && spec.fwd.head_dim_qk < 256 => {
            (64, BwdWalk::SplitDims)
        }
        // 491; causal 439. A CTA without another 426, 393.
        _ => (64, BwdWalk::InClusters),
    };
    let split_dims = walk.splits_dims();
    let hands_over = walk == BwdWalk::GradientEach && spec.deterministic;
    let dq_path = if split_dims && !hands_over || (dim == 64 && spec.deterministic) {
        // Deterministic at D 64, S 8192, 525 of 485, 541 of 521 without a mask; at D 128 503, and stored 608.
        // D 192, 2580 us and stored 2327, causal 1315 and 1209; without an order 2367 and 2326, 1208 and
        // 1193, but shorter 338 and 354, 198 and 204.
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
        // Consumers of clusters need no more than 232 registers; with 24 the thread that takes tile indices spills
        // 140 bytes, and the polling thread 96.
        load_registers: if walk.cluster() > 1 { 40 } else { 24 },
        head_parts: false,
        // Deterministic key blocks are launched in the order of their additions, or take their indices in it:
        // D 128 causal 508 of 494, D 64 488 of 484 but at S 2048 355 of 376. D 256, B4 H8 S4096, 2837 us and
        // persistent 2812, causal 1537 and 1512, in an order 1558 and 1508; 85 queries over 32576 keys, 1456
        // and 1128.
        persistent: !spec.deterministic || (matches!(dim, 128 | 256) && !full),
        fast_softcap: spec.fwd.softcap,
        vector_load: true,
        vector_store: spec.dtype_grad != DType::F32,
    };
    // At D 64 one modifier already needs too many registers, unless it is ALiBi.
    let wants_registers = modifiers > 1 || (dim == 64 && modifiers == 1 && spec.fwd.bias != BiasKind::Alibi);
    if !split_dims && !in_parts && wants_registers {
        tile.take_registers();
        tile.persistent &= !(dim == 64 && full);
    }
    tile.fit_finish(spec);
    tile
}

impl Sm90BwdTile {
    /// Turns off settings that keep two products in flight, for walks with undivided dimensions, because some
    /// modifiers need those registers (bytes that ptxas spills of D 64 with an elementwise bias: 500, then 0; of D
    /// 128 with soft-cap, bias and dropout: 320, then 0; of D 64 with a soft-cap 40, with dropout 50).
    fn take_registers(&mut self) {
        (self.walk, self.edges_apart, self.exp2_polynomials) = (BwdWalk::LateDp, false, 0);
    }

    /// Returns this tile with the settings for row invariance: exponentials computed by a polynomial have other
    /// bits, and which elements use it depends on a query's place in its block.
    pub(super) fn in_row_order(&self, problem: &BwdProblem) -> Self {
        let head_parts = problem.fwd.dims.seqlen_q > 0 && Self::parts_in_row_order(problem) > 1;
        Self { exp2_polynomials: 0, head_parts, ..*self }
    }

    /// Returns this tile with separate sums of dQ for each key block: CTAs are then persistent, as with unordered
    /// sums.
    fn with_dq_apart(&self, spec: &BwdSpec) -> Self {
        let without_order = default_tile(&BwdSpec { deterministic: false, ..*spec });
        Self { dq_path: DqPath::Apart, persistent: without_order.persistent, ..*self }
    }
}
