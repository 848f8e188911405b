//! What a call's choices cost, by a model: how many tiles share a kv head's query heads, how dQ comes to its sums and where they
//! become dQ, and where delta is made.
//!
//! A multiprocessor takes tiles one after another, each a key block against the query blocks that see it, of
//! its query heads. Few long tiles leave multiprocessors idle at the end; many short ones leave more sums of
//! dK and dV to write, read and add. The numbers were fitted to the rows of `measured.tsv`, which tests hold the choices to.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fmha_core::spec::BwdSpec;
use fmha_core::tune::Candidates;
use fmha_core::{BwdProblem, MaskKind, QLayout};

use super::{BwdWalk, DqFinish, DqPath, Sm90BwdTile, padded_dim};

/// Rate of a multiprocessor that always has a tile, TFLOP/s of the padded head dimension's operations: a
/// 132nd of an H200's. From long full rows.
fn tflops_of_sm(dim: i32, walk: BwdWalk) -> f64 {
    let device = match (dim, walk) {
        (64, _) => 600.0,
        (128, _) => 655.0,
        (192, BwdWalk::HalfBlocks) => 640.0,
        (192, _) => 400.0,
        _ => 525.0,
    };
    device / 132.0
}

/// Of a masked call's longest tile, the part for which the launch waits at its end, and for tiles that have
/// come apart from those whose Q and dO they share in the L2.
const TAIL_BEHIND_MASK: f64 = 0.22;

/// Microseconds a megabyte of f32 sums of dK and dV, written and read again.
const SUMS_MICROS_A_MB: f64 = 0.5;

/// More tiles of unlike length a multiprocessor than this come out even but for the tail: they are not gone
/// through one by one.
const EVEN_TILES: usize = 4;

/// Another number of parts than the rule's is taken where the model has it faster by more than this: more
/// than its own error.
pub(super) const LEAST_GAIN: f64 = 0.05;

/// The candidates for a problem, from `least` parts on, each a divisor of the GQA ratio; none where lengths
/// are not the problem's.
pub(super) fn head_parts(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
    num_sms: u32,
    least: u32,
) -> Candidates<u32> {
    if problem.fwd.layout.q == QLayout::Packed {
        return Candidates::default();
    }
    let ratio = problem.fwd.gqa_ratio();
    let steps = steps_of_key_blocks(tile, problem);
    let divides = (least..=ratio).filter(|&parts| ratio.is_multiple_of(parts));
    Candidates::of(divides.map(|parts| (parts, micros(tile, problem, spec, num_sms, &steps, parts))))
}

/// Of each key block (of a cluster) of a head, how many query blocks see it.
fn steps_of_key_blocks(tile: &Sm90BwdTile, problem: &BwdProblem) -> Vec<u32> {
    let dims = problem.fwd.dims;
    let keys = (tile.block_n * tile.walk.cluster()).unsigned_abs();
    let rows = tile.block_m.unsigned_abs();
    let band = problem.fwd.mask.band(dims.seqlen_q, dims.seqlen_k);
    // Where a query block's key blocks begin and end, summed up at last.
    let mut changes = vec![0_i64; dims.seqlen_k.div_ceil(keys) as usize + 1];
    for first in (0..dims.seqlen_q).step_by(rows as usize) {
        let queries = first..(first + rows).min(dims.seqlen_q);
        let range = band.k_range(queries.clone(), dims.seqlen_k);
        let sinks = band.sink_range(queries, dims.seqlen_k);
        let (begin, end) = (range.start / keys, range.end.div_ceil(keys));
        let sinks_end = sinks.end.div_ceil(keys).min(if range.is_empty() { u32::MAX } else { begin });
        for (begin, end) in [(begin, end), (sinks.start / keys, sinks_end)] {
            if begin < end {
                changes[begin as usize] += 1;
                changes[end as usize] -= 1;
            }
        }
    }
    changes.pop();
    let mut seen = 0;
    changes
        .into_iter()
        .map(|change| {
            seen += change;
            u32::try_from(seen).unwrap_or(0)
        })
        .collect()
}

/// What the model says of a number of parts.
pub(super) fn of_parts(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
    num_sms: u32,
    parts: u32,
) -> f64 {
    micros(tile, problem, spec, num_sms, &steps_of_key_blocks(tile, problem), parts)
}

fn micros(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
    num_sms: u32,
    steps: &[u32],
    parts: u32,
) -> f64 {
    let dims = problem.fwd.dims;
    let dim = padded_dim(spec);
    let heads_a_tile = problem.fwd.gqa_ratio() / parts;
    let heads = dims.batch as usize * dims.num_heads_kv as usize * parts as usize;
    let work: u64 = steps.iter().map(|&steps| u64::from(steps)).sum::<u64>() * heads as u64;
    let units = (num_sms / tile.walk.cluster().unsigned_abs()).max(1);
    let even = work as f64 / f64::from(units);
    let longest = steps.iter().copied().max().map_or(0.0, f64::from);
    let tail = if problem.fwd.mask.kind() == MaskKind::Full { 0.0 } else { TAIL_BEHIND_MASK };
    let tiles = steps.len() * heads;
    let are_alike = steps.iter().all(|&of_one| Some(&of_one) == steps.first());
    let last = if are_alike {
        tiles.div_ceil(units as usize) as f64 * longest
    } else if tiles > EVEN_TILES * units as usize {
        even
    } else {
        f64::from(end_of_last(steps, heads, units))
    };
    let flops_a_step = 10.0 * f64::from(tile.block_m) * f64::from(tile.block_n) * f64::from(dim);
    let step_micros = flops_a_step / tflops_of_sm(dim, tile.walk) * 1e-6;
    let key_rows = f64::from(dims.batch) * f64::from(dims.num_heads_kv) * f64::from(dims.seqlen_k);
    let sums_mb = if parts > 1 { f64::from(parts) * key_rows * f64::from(dim) * 16.0 * 1e-6 } else { 0.0 };
    let in_steps = last.max(even + tail * longest);
    in_steps * f64::from(heads_a_tile) * step_micros + sums_mb * SUMS_MICROS_A_MB
}

/// What the ways of dQ cost, at 16k tokens of 16 heads of 128, an H200: 2^25 elements of Q. All but the shares grow with them.
struct OfDq {
    /// Preprocess, where it makes all of delta: O and dO at 3.4 TB/s.
    delta_micros: f64,
    /// Zeros to begin sums with.
    zeros_micros: f64,
    /// The semaphore that the first key block stores behind, of the main kernel.
    semaphore_share: f64,
    /// A launch that finishes dQ.
    finish_micros: f64,
    /// The warp that finishes it beside the products, of the main kernel.
    beside_share: f64,
    /// That warp's work where it makes delta too: the main kernel takes no less.
    beside_with_delta_micros: f64,
}

impl OfDq {
    const fn of(dim: i32, mask: MaskKind) -> Self {
        let is_64 = dim == 64;
        Self {
            delta_micros: 41.0,
            zeros_micros: if is_64 { 17.0 } else { 34.0 },
            semaphore_share: if is_64 { 0.0 } else { 0.0235 },
            finish_micros: 51.0,
            beside_share: if is_64 && matches!(mask, MaskKind::Full) { 0.0335 } else { 0.0 },
            beside_with_delta_micros: if is_64 { 540.0 } else { 465.0 },
        }
    }
}

/// Of a launch that does next to nothing, though it starts while the one before ends.
const LAUNCH_MICROS: f64 = 2.0;

/// Longer sequences choose as these do.
const LONGEST: u32 = 1 << 17;

/// An H200's, whatever the device: the tile is of a table.
const NUM_SMS: u32 = 132;

/// The part of all query heads whose delta preprocess makes where the main kernel makes the others'.
pub(super) fn first_heads(tile: &Sm90BwdTile, problem: &BwdProblem, spec: &BwdSpec) -> f64 {
    let dims = problem.fwd.dims;
    let all = f64::from(dims.batch) * f64::from(dims.num_heads_q);
    let first =
        tile.schedule(problem, spec, NUM_SMS).map(|schedule| f64::from(schedule.num_first_query_heads));
    if all > 0.0 { first.map_or(1.0, |first| first / all) } else { 1.0 }
}

/// Microseconds of a call, to compare ways of dQ by.
pub(super) fn of_dq(tile: &Sm90BwdTile, problem: &BwdProblem, spec: &BwdSpec) -> f64 {
    let mut problem = problem.clone();
    let dims = &mut problem.fwd.dims;
    (dims.seqlen_q, dims.seqlen_k) = (dims.seqlen_q.min(LONGEST), dims.seqlen_k.min(LONGEST));
    let dims = *dims;
    let in_parts = tile.head_parts_candidates(&problem, spec, NUM_SMS);
    let in_one = || of_parts(tile, &problem, spec, NUM_SMS, 1);
    let main = in_parts.cheapest(LEAST_GAIN).map_or_else(in_one, |best| best.micros);
    let rows = f64::from(dims.batch) * f64::from(dims.num_heads_q) * f64::from(dims.seqlen_q);
    let size = rows * f64::from(padded_dim(spec)) / f64::from(1 << 25);
    let costs = OfDq::of(padded_dim(spec), spec.fwd.mask);
    let (begin, semaphores) = match tile.dq_path {
        DqPath::FirstStores => (0.0, costs.semaphore_share),
        DqPath::StoreWarp | DqPath::Registers => (costs.zeros_micros, 0.0),
    };
    let (launch, finish, beside) = match tile.dq_finish {
        DqFinish::Launch => (LAUNCH_MICROS, costs.finish_micros, 0.0),
        DqFinish::Beside | DqFinish::BesideWithDelta => (0.0, 0.0, costs.beside_share),
    };
    let main = main * (1.0 + semaphores + beside);
    let (main, delta) = if tile.makes_delta() {
        let first = first_heads(tile, &problem, spec);
        (main.max(size * (1.0 - first) * costs.beside_with_delta_micros), first * costs.delta_micros)
    } else {
        (main, costs.delta_micros)
    };
    main + launch + size * (delta + begin + finish)
}

/// When the last of `units` has done its tiles, in steps of a tile with one query head: each takes the next
/// tile when it has none, key block after key block of all heads.
fn end_of_last(steps: &[u32], heads: usize, units: u32) -> u32 {
    let mut free: BinaryHeap<Reverse<u32>> = (0..units).map(|_| Reverse(0)).collect();
    let mut last = 0;
    for &steps in steps {
        for _ in 0..heads {
            let Some(Reverse(time)) = free.pop() else { return last };
            last = last.max(time + steps);
            free.push(Reverse(time + steps));
        }
    }
    last
}
