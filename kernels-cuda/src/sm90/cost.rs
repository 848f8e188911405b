//! Models the cost of a forward call for tiles of several shapes and, under a mask, for each order of the tiles.
//!
//! A worker (a CTA or a cluster) computes tiles one after another, each with some blocks of keys. A fixed order costs
//! nothing, but leaves workers idle if tiles differ in length; a counter balances them, but must be cleared by a step
//! before the launch. The numbers were fitted to `measured.tsv`, against which a test checks the choices; the rates are
//! an H200's.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fmha_core::spec::FwdSpec;
use fmha_core::tune::Candidates;
use fmha_core::{FwdProblem, KvLayout, MaskKind, QLayout};

use super::table::{default_tile, modifies, widest};
use super::{PrepareV, Sm90Tile, TileOrder, product_dim, spec_of};
use crate::schedule::TileSchedule;

/// Rate of one multiprocessor in a long loop over blocks, in TFLOP/s of its products: 1/132 of an H200's.
fn tflops_of_sm(dim: i32, is_fp8: bool) -> f64 {
    let device = match (dim, is_fp8) {
        (..=64, false) => 640.0,
        (65..=128, false) => 790.0,
        (129..=192, false) => 820.0,
        (_, false) => 850.0,
        (..=64, true) => 690.0,
        (65..=128, true) => 930.0,
        (129..=192, true) => 1050.0,
        (_, true) => 1150.0,
    };
    device / 132.0
}

/// Fraction of the rate of `tflops_of_sm` that a tile with this many rows reaches: with a single warpgroup no products
/// overlap its exponentials. Fitted to calls that take as long as their longest tile.
fn share_of_rate(block_m: i32, row: i32, is_fp8: bool) -> f64 {
    match (row, block_m) {
        (128, 128) if is_fp8 => 0.95,
        (256, 64) if is_fp8 => 0.62,
        (64, 128) if is_fp8 => 0.72,
        (96, 128) if is_fp8 => 0.80,
        (96, 64) if is_fp8 => 0.50,
        (64, 128) => 0.88,
        (64, 64) => 0.54,
        (96, 128) => 0.93,
        (_, 64) => 0.70,
        _ => 1.0,
    }
}

/// Fixed cost of a block, in units of one key.
const KEYS_BESIDE: f64 = 8.0;

/// Least relative gain for which another shape is chosen.
pub const LEAST_GAIN_OF_SHAPE: f64 = 0.05;

/// Microseconds of a launch in addition to its tiles.
const LAUNCH_MICROS: f64 = 3.0;
/// Microseconds of a tile in addition to its blocks: its first loads, and its end.
const TILE_MICROS: f64 = 1.2;
/// Microseconds of the counter of dynamic orders: the launch waits for the step that clears it.
const COUNTER_MICROS: f64 = 3.0;

/// Most rounds of tiles that the model simulates one by one: with more rounds a fixed order never won, and planning
/// must be quick.
const MOST_ROUNDS: u32 = 8;

/// Least gain for which a fixed order is chosen: it cannot balance differences that the model lacks, such as rows
/// that take exact maxima.
pub const LEAST_GAIN_OF_ORDER: f64 = 0.02;

/// Whether every sequence has the problem's lengths.
fn knows_lengths(problem: &FwdProblem) -> bool {
    let layout = problem.layout;
    (layout.q, layout.kv) == (QLayout::Batch, KvLayout::Strided) && !layout.seqused_q && !layout.seqused_k
}

/// Whether a call's tiles may have either order: with a causal mask, and with FP8 without a mask, where a dynamic
/// order is better if many tiles often rescale.
pub(super) fn has_orders(problem: &FwdProblem) -> bool {
    match problem.mask.kind() {
        MaskKind::Upper => true,
        MaskKind::Full => problem.dtypes.v.is_fp8(),
        MaskKind::Band => false,
    }
}

/// The orders that a call's tiles may have, the tile's own first. Empty if the table's rule decides: for windows,
/// for unmasked 16-bit calls, for packed lengths, and for clusters.
pub(super) fn orders(tile: &Sm90Tile, problem: &FwdProblem, num_sms: u32) -> Candidates<TileOrder> {
    let Ok(schedule) = tile.schedule(problem) else { return Candidates::default() };
    let tiles = schedule.num_tiles.unsigned_abs();
    let in_rounds = (num_sms + 1..=MOST_ROUNDS * num_sms).contains(&tiles);
    if !knows_lengths(problem)
        || !has_orders(problem)
        || !in_rounds
        || tile.cluster != 1
        || tile.order != TileOrder::Dynamic
    {
        return Candidates::default();
    }
    Candidates::of([TileOrder::Dynamic, TileOrder::Static].map(|order| {
        let tile = Sm90Tile { order, ..*tile };
        (order, micros(&tile, problem, &schedule, num_sms))
    }))
}

/// Query rows and keys of tiles, besides the tile's own, of calls that differ from the problem only in sizes: fewer
/// rows if tiles are few, and without a mask other keys if blocks are few.
pub(super) fn shapes_of_other_sizes(
    tile: &Sm90Tile,
    problem: &FwdProblem,
    spec: &FwdSpec,
) -> Vec<(i32, i32)> {
    if !takes_shapes(tile, problem, spec) {
        return Vec::new();
    }
    let (rows, keys) = (tile.block_m, tile.block_n);
    let taken = |&shape: &_| tile.of_shape(shape).check(spec, problem.gqa_ratio()).is_ok();
    if spec.dtype_v.is_fp8() {
        // With fewer rows, registers have room for more keys than the table's tile has at D 128.
        let keys = if widest(spec) == 128 { keys.max(128) } else { keys };
        let lower = [(128, keys), (64, keys)].into_iter().filter(|&(lower, _)| lower < rows);
        return lower.filter(taken).collect();
    }
    let heights = [128, 64].into_iter().filter(|&lower| lower < rows).map(|lower| (lower, keys));
    // Only at D 128 do registers have room for more keys than the table's tile has.
    let more = (widest(spec) == 128 && rows == 128).then_some(keys + 16);
    let widths = [keys - 16, keys - 32].into_iter().filter(|&fewer| fewer >= 48).chain(more);
    let is_full = spec.mask == MaskKind::Full;
    let widths = widths.filter(|_| is_full).map(|width| (rows, width));
    heights.chain(widths).filter(taken).collect()
}

/// The shapes that a call's tiles may have, its own first. Empty if the table decides: if keys are split or shared,
/// scores are modified, lengths are packed, or tiles are many. If tiles are few, fewer rows are faster, since the
/// longest tile decides; if blocks of keys are few and there is no mask, a block size that fills the last block is
/// faster.
pub(super) fn shapes(tile: &Sm90Tile, problem: &FwdProblem, num_sms: u32) -> Candidates<(i32, i32)> {
    let spec = spec_of(problem);
    let dims = problem.dims;
    if dims.seqlen_q == 0 || dims.seqlen_k == 0 {
        return Candidates::default();
    }
    let own = (tile.block_m, tile.block_n);
    // A call of one or two blocks takes hardly more time than its launch.
    let has_walk = dims.seqlen_k > 2 * own.1.unsigned_abs();
    let is_short = dims.seqlen_k.div_ceil(own.1.unsigned_abs()) <= MOST_SHORT_BLOCKS;
    let is_of_these_sizes = |&(rows, keys): &(i32, i32)| {
        let takes_keys = keys == own.1 || is_short && dims.seqlen_k > own.1.unsigned_abs();
        if rows == own.0 { takes_keys } else { has_walk }
    };
    let beside = shapes_of_other_sizes(tile, problem, &spec);
    let shapes = [own].into_iter().chain(beside.into_iter().filter(is_of_these_sizes));
    let priced = shapes.filter_map(|shape| {
        let tile = tile.of_shape(shape);
        let schedule = tile.schedule(problem).ok()?;
        let in_rounds = schedule.num_tiles.unsigned_abs() <= MOST_ROUNDS * num_sms;
        in_rounds.then(|| (shape, micros(&tile, problem, &schedule, num_sms)))
    });
    let priced: Vec<_> = priced.collect();
    let has_own = priced.first().is_some_and(|&(shape, _)| shape == own);
    if has_own && priced.len() > 1 { Candidates::of(priced) } else { Candidates::default() }
}

/// Whether a call of any lengths may have tiles of other shapes.
fn takes_shapes(tile: &Sm90Tile, problem: &FwdProblem, spec: &FwdSpec) -> bool {
    knows_lengths(problem)
        && spec.mask != MaskKind::Band
        && !modifies(spec)
        && tile.prepare_v == PrepareV::InTile
        && tile.copy_bytes == 0
        && tile.split_keys == 0
        && tile.cluster == 1
}

/// Largest number of key blocks for which the waste in the last block matters.
const MOST_SHORT_BLOCKS: u32 = 16;

/// Modelled microseconds of a call with the problem's largest lengths.
pub(super) fn micros(tile: &Sm90Tile, problem: &FwdProblem, schedule: &TileSchedule, num_sms: u32) -> f64 {
    let cluster = tile.cluster.unsigned_abs();
    let workers = (num_sms / cluster).max(1) as usize;
    let spec = spec_of(problem);
    let row = widest(&spec);
    let dim = product_dim(spec.head_dim_qk, spec.dtype_qk) + product_dim(spec.head_dim_v, spec.dtype_v);
    // The rate of the table's tile already includes its blocks' fixed cost.
    let (keys, of_table) = (f64::from(tile.block_n), f64::from(default_tile(&spec).block_n));
    let keys = keys + KEYS_BESIDE * (1.0 - keys / of_table);
    let flops_a_block = 2.0 * f64::from(tile.block_m) * keys * f64::from(dim);
    let is_fp8 = spec.dtype_v.is_fp8();
    let rate = tflops_of_sm(row, is_fp8) * share_of_rate(tile.block_m, row, is_fp8);
    let block_micros = flops_a_block / rate * 1e-6;
    let lengths: Vec<f64> = blocks_of_rows(tile, problem, schedule)
        .into_iter()
        .map(|blocks| f64::from(blocks) * block_micros + TILE_MICROS)
        .collect();
    let tiles = || tiles_in_order(schedule, &lengths);
    let rounds = schedule.num_tiles.unsigned_abs() / workers as u32;
    let ends = match tile.order {
        _ if rounds > 4 * MOST_ROUNDS => tiles_in_total(schedule, &lengths) / workers as f64,
        TileOrder::Static => end_of_rounds(tiles(), workers, problem.mask.kind() != MaskKind::Full),
        TileOrder::Single | TileOrder::Dynamic => end_of_claims(tiles(), workers),
    };
    let claims = schedule.counter_bytes(tile.order, workers as u32) > 0;
    LAUNCH_MICROS + ends + if claims { COUNTER_MICROS } else { 0.0 }
}

/// Number of key blocks that each block of a head's rows sees, in the order of its tiles.
fn blocks_of_rows(tile: &Sm90Tile, problem: &FwdProblem, schedule: &TileSchedule) -> Vec<u32> {
    let dims = problem.dims;
    let ratio = if tile.pack_gqa { problem.gqa_ratio() } else { 1 };
    let row_blocks = if tile.cluster_heads { 1 } else { tile.cluster };
    let rows = (tile.rows_of_tile(problem) * row_blocks).unsigned_abs();
    let band = problem.mask.band(dims.seqlen_q, dims.seqlen_k);
    let block_n = tile.block_n.unsigned_abs();
    let of_block = |i_block: u32| {
        let first = i_block * rows / ratio;
        let last = ((i_block + 1) * rows).div_ceil(ratio).min(dims.seqlen_q);
        let keys = band.k_range(first..last.max(first), dims.seqlen_k);
        if keys.is_empty() { 0 } else { keys.end.div_ceil(block_n) - keys.start / block_n }
    };
    let blocks = 0..schedule.num_m_blocks.unsigned_abs();
    if problem.mask.kind() == MaskKind::Full {
        blocks.map(of_block).collect()
    } else {
        blocks.rev().map(of_block).collect()
    }
}

/// The tiles in the order of `resolve_tile` (common/work.cuh): L2 head groups one after another, and in a group
/// each block of rows for every head.
fn tiles_in_order<'a>(schedule: &TileSchedule, lengths: &'a [f64]) -> impl Iterator<Item = f64> + use<'a> {
    let (all, group) = (schedule.num_heads.max(0), schedule.heads_per_l2_group.max(1));
    (0..all).step_by(group.unsigned_abs() as usize).flat_map(move |first| {
        let heads = group.min(all - first).unsigned_abs() as usize;
        lengths.iter().flat_map(move |&length| std::iter::repeat_n(length, heads))
    })
}

fn tiles_in_total(schedule: &TileSchedule, lengths: &[f64]) -> f64 {
    f64::from(schedule.num_heads) * lengths.iter().sum::<f64>()
}

/// Time at which the last worker is done if worker t mod `workers` computes tile t; with `backwards` every second round
/// is reversed.
fn end_of_rounds(tiles: impl Iterator<Item = f64>, workers: usize, backwards: bool) -> f64 {
    let mut busy = vec![0.0; workers];
    for (index, length) in tiles.enumerate() {
        let (round, place) = (index / workers, index % workers);
        busy[if backwards && round % 2 == 1 { workers - 1 - place } else { place }] += length;
    }
    busy.into_iter().fold(0.0, f64::max)
}

/// Time at which the last worker is done if each takes the next tile as soon as it is free.
fn end_of_claims(tiles: impl Iterator<Item = f64>, workers: usize) -> f64 {
    // The heap needs an order, which floating-point numbers do not have, so times are whole nanoseconds.
    let mut free: BinaryHeap<Reverse<u64>> = (0..workers).map(|_| Reverse(0)).collect();
    let mut last = 0;
    for length in tiles {
        let Some(mut next) = free.peek_mut() else { break };
        next.0 += (length * 1e3) as u64;
        last = last.max(next.0);
    }
    last as f64 * 1e-3
}
