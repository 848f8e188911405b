//! Cost of a call's choices, by a model: how many tiles share a kv head's query heads, how dQ is added to its sums,
//! which launch converts the sums to dQ, and which launch computes delta.
//!
//! A multiprocessor computes tiles one after another, each a key block with the query blocks that see it, for some
//! query heads. Few long tiles leave multiprocessors idle at the end; many short tiles give more sums of dK and dV
//! to write, read and add. The numbers were fitted to the rows of `measured.tsv`, against which tests check the
//! choices.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fmha_core::spec::BwdSpec;
use fmha_core::tune::Candidates;
use fmha_core::{BwdProblem, MaskKind, QLayout};

use super::head_parts::HeadParts;
use super::spec::{own_width, padded_dim};
use super::tile::Sm90BwdTile;
use super::walk::{BwdWalk, DqFinish, DqPath};
use crate::tile_list;

/// Rate of one multiprocessor that always has a tile, in TFLOP/s of its [operations](operations_of_pair): 1/132 of
/// an H200's, from long full rows.
fn tflops_of_sm(dim: i32, walk: BwdWalk) -> f64 {
    let device = match (dim, walk) {
        (64, _) => 600.0,
        (128, _) => 655.0,
        (192, BwdWalk::HalfBlocks) => 555.0,
        // Fitted to the time of steps: 2.19 us for 64 queries and 64 keys.
        (192, _) => 474.0,
        _ => 525.0,
    };
    device / 132.0
}

/// Operations of a tile for one query and one key: five products, each with its number of columns.
fn operations_of_pair(tile: &Sm90BwdTile, spec: &BwdSpec) -> f64 {
    let dim = padded_dim(spec);
    let (qk, v) = (own_width(spec.fwd.head_dim_qk), own_width(spec.fwd.head_dim_v));
    let splits_gradients = tile.walk.splits_dims() && tile.walk != BwdWalk::GradientEach;
    let (dk, dv) = if splits_gradients { (dim, dim) } else { (qk, v) };
    f64::from(2 * (qk + v + dk + dv + tile.dq_dim(spec)))
}

/// Share of a masked call's longest tile for which the launch waits at its end. It also covers tiles that no longer
/// run at the same time as the tiles with which they share Q and dO in the L2.
const TAIL_BEHIND_MASK: f64 = 0.22;

/// Microseconds per megabyte of the f32 sums of dK and dV to which parts of a kv head add: once for clearing and
/// the last read, and once for each part. Measured on an H200, D 128, a head's queries in one part and two: B2 H16
/// S1024 causal 74 and 127 us (34 MB), B1 H8 S2048 full 93 and 118 (17).
const SUMS_MICROS_A_MB: f64 = 0.7;
const ADDED_SUMS_MICROS_A_MB: f64 = 0.39;

/// Microseconds of the launch that rounds the f32 sums of dK and dV.
const SUMS_MICROS: f64 = 4.0;

/// Microseconds from a tile's last product to the next tile's first.
const TILE_MICROS: f64 = 2.0;

/// Tiles of different length per multiprocessor above which the load counts as even except for the tail: the model
/// does not simulate them one by one.
const EVEN_TILES: usize = 4;

/// Modelled gain above which another number of parts replaces that of the rule; it exceeds the model's error.
const LEAST_GAIN: f64 = 0.05;

/// Least gain at which the model's number of parts replaces the rule's: 0 for packed sequences, for whose
/// lengths the rule was not made.
pub(super) fn least_gain(problem: &BwdProblem) -> f64 {
    if problem.fwd.layout.q == QLayout::Packed { 0.0 } else { LEAST_GAIN }
}

/// Shares for packed sequences, whose lengths a plan does not know: the share of all tiles of the longest
/// length that have work, and the share of the longest tile that may end the launch, since the longest
/// sequence may come last. The first share is an estimate, the second is fitted: with the whole of the
/// longest tile B3 H64/4 full of 160 to 485 has 16 parts (143 us; 8 132, 4 127), B2 H48/16 of 448 and 783
/// three (192; one 178), an H200.
pub(super) const PACKED_SHARE: f64 = 0.5;
const PACKED_TAIL: f64 = 0.5;

/// Prices of those numbers of parts among the given ones that the problem allows.
pub(super) fn head_parts(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
    num_sms: u32,
    parts: impl Iterator<Item = HeadParts>,
) -> Candidates<HeadParts> {
    let whole = steps_of_key_blocks(tile, problem, 1);
    Candidates::of(parts.map(|parts| {
        let shared = (parts.queries > 1).then(|| steps_of_key_blocks(tile, problem, parts.queries));
        (parts, micros(tile, problem, spec, num_sms, shared.as_ref().unwrap_or(&whole), parts))
    }))
}

/// Number of query blocks that see each key block (of a cluster) of a head, part after part of `query_parts`
/// parts.
fn steps_of_key_blocks(tile: &Sm90BwdTile, problem: &BwdProblem, query_parts: u32) -> Vec<u32> {
    let dims = problem.fwd.dims;
    let keys = (tile.block_n * tile.walk.cluster()).unsigned_abs();
    let rows = tile.block_m.unsigned_abs();
    let band = problem.fwd.mask.band(dims.seqlen_q, dims.seqlen_k);
    let (num_blocks, num_keys) = (dims.seqlen_q.div_ceil(rows), dims.seqlen_k.div_ceil(keys) as usize);
    let mut steps = Vec::with_capacity(num_keys * query_parts as usize);
    for part in 0..query_parts {
        // Changes in the number of key blocks from one query block to the next; the running sum gives the numbers.
        let mut changes = vec![0_i64; num_keys + 1];
        for block in num_blocks * part / query_parts..num_blocks * (part + 1) / query_parts {
            let first = block * rows;
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
        steps.extend(changes.into_iter().map(|change| {
            seen += change;
            u32::try_from(seen).unwrap_or(0)
        }));
    }
    steps
}

/// Largest share of the sums of dK and dV in a part's steps, where the batch fills the multiprocessors. It gives
/// the fewest steps of a part in an ordered call, which must not depend on the batch.
const MOST_SUMS_OF_PART: f64 = 0.52;
pub(super) fn least_steps_of_part(tile: &Sm90BwdTile, spec: &BwdSpec) -> u32 {
    let mb = f64::from(tile.block_n) * f64::from(padded_dim(spec)) * 16.0 * 1e-6;
    // Microseconds of a part's sums at one multiprocessor's share of the memory rate, if each part has sums of its
    // own.
    let sums = mb * 0.25 * f64::from(NUM_SMS);
    (sums / (MOST_SUMS_OF_PART * step_micros(tile, spec))).ceil() as u32
}

/// Microseconds in which a tile processes one query block against its keys.
fn step_micros(tile: &Sm90BwdTile, spec: &BwdSpec) -> f64 {
    let flops = f64::from(tile.block_m) * f64::from(tile.block_n) * operations_of_pair(tile, spec);
    flops / tflops_of_sm(padded_dim(spec), tile.walk) * 1e-6
}

/// Megabytes of sums that stay in the L2.
const NEAR_SUMS_MB: f64 = 40.0;

/// Most bytes of separate sums of dQ, one for each key block, that a call may have.
pub(super) const MOST_APART_BYTES: u64 = 256 << 20;

/// Microseconds between the additions of two key blocks to one query block, by the store warp. Measured on an H200
/// with rows whose key blocks all begin at one of few query blocks: B8 H2/1 S128/15872 D128 causal 413 us, 124
/// additions, B8 H1 S191/10560 283, 83.
const ADDITION_MICROS: f64 = 3.2;

/// Fewest key blocks that begin at one query block for which the model counts the chain of their additions: shorter
/// chains are within the model's error.
const LEAST_MEETING: f64 = 12.0;

/// Microseconds per megabyte of separate sums of dQ, which are written and read: beyond the L2's capacity, and
/// within. Derived from the memory rate; on an H200, D 128, more than unordered sums: 65 MB 29 us, 130 MB 42, 145
/// MB 54, 23 MB 9.
const APART_MICROS_A_MB: f64 = 0.5;
const NEAR_APART_MICROS_A_MB: f64 = 0.2;

/// Whether a deterministic call is faster with separate sums of dQ for each key block than with ordered additions.
/// Both have equal bits, so the choice may depend on the batch. The lengths of packed sequences are unknown here.
/// From registers an addition takes 2.3 us, and the sums apart were slower: B4 H2 S345/5631 D64 causal 119 us for
/// 106, B2 H32/8 S118/1856 D56 65 for 59, an H200.
pub(super) fn wants_dq_apart(
    ordered: &Sm90BwdTile,
    apart: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
) -> bool {
    let dims = problem.fwd.dims;
    let bytes = apart.dq_bytes(problem, spec);
    let is_packed = problem.fwd.layout.q == QLayout::Packed;
    if is_packed
        || ordered.walk.splits_dims()
        || ordered.adds_from_registers()
        || bytes > MOST_APART_BYTES
        || bytes == 0
    {
        return false;
    }
    let parts = ordered.ordered_parts(problem, spec, NUM_SMS);
    let steps = steps_of_key_blocks(ordered, problem, 1);
    let micros = |tile| micros(tile, problem, spec, NUM_SMS, &steps, HeadParts { heads: parts, queries: 1 });
    // Number of key blocks whose loops begin at one query block; without a mask they are spread over the query
    // blocks.
    let keys = f64::from(ordered.block_n * ordered.walk.cluster());
    let rows_of_block = ordered.block_m.unsigned_abs().min(dims.seqlen_q);
    let meeting = match problem.fwd.mask.kind() {
        MaskKind::Full if dims.seqlen_q >= dims.seqlen_k => 1.0,
        MaskKind::Full => steps.len() as f64,
        _ => {
            let band = problem.fwd.mask.band(dims.seqlen_q, dims.seqlen_k);
            band.k_range(0..rows_of_block, dims.seqlen_k).len() as f64 / keys
        }
    };
    if meeting < LEAST_MEETING {
        return false;
    }
    let heads = f64::from(dims.batch) * f64::from(dims.num_heads_kv) * f64::from(parts);
    let units = f64::from(NUM_SMS) / f64::from(ordered.walk.cluster());
    // Number of heads that are processed at the same time: all heads, if they are launched side by side.
    let at_a_time = heads.min(units);
    let longest = steps.iter().copied().max().map_or(0.0, f64::from);
    let heads_a_tile = f64::from(problem.fwd.gqa_ratio() / parts);
    let tile_micros = longest * heads_a_tile * step_micros(ordered, spec);
    let waits = meeting.min(units / at_a_time) * ADDITION_MICROS;
    let in_order =
        micros(ordered).max(heads * meeting * ADDITION_MICROS / at_a_time).max(tile_micros + waits);
    let work: f64 = steps.iter().copied().map(f64::from).sum();
    let mb = work
        * f64::from(ordered.block_m)
        * 4.0
        * f64::from(padded_dim(spec))
        * 1e-6
        * f64::from(dims.batch)
        * f64::from(dims.num_heads_q);
    let near = mb.min(NEAR_SUMS_MB);
    let alone = micros(apart) + near * NEAR_APART_MICROS_A_MB + (mb - near) * APART_MICROS_A_MB;
    alone < 0.9 * in_order
}

/// Modelled cost of dividing a kv head's queries into this number of parts.
pub(super) fn of_parts(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
    num_sms: u32,
    parts: HeadParts,
) -> f64 {
    micros(tile, problem, spec, num_sms, &steps_of_key_blocks(tile, problem, parts.queries), parts)
}

fn micros(
    tile: &Sm90BwdTile,
    problem: &BwdProblem,
    spec: &BwdSpec,
    num_sms: u32,
    steps: &[u32],
    parts: HeadParts,
) -> f64 {
    let dims = problem.fwd.dims;
    let dim = padded_dim(spec);
    let heads_a_tile = problem.fwd.gqa_ratio() / parts.heads;
    let is_packed = problem.fwd.layout.q == QLayout::Packed;
    let batch = if is_packed { (f64::from(dims.batch) * PACKED_SHARE).ceil() as u32 } else { dims.batch };
    let heads = batch as usize * dims.num_heads_kv as usize * parts.heads as usize;
    let work: u64 = steps.iter().map(|&steps| u64::from(steps)).sum::<u64>() * heads as u64;
    let units = (num_sms / tile.walk.cluster().unsigned_abs()).max(1);
    let even = work as f64 / f64::from(units);
    let longest = steps.iter().copied().max().map_or(0.0, f64::from);
    let tail = match problem.fwd.mask.kind() {
        _ if is_packed => PACKED_TAIL,
        MaskKind::Full => 0.0,
        _ => TAIL_BEHIND_MASK,
    };
    let tiles = steps.len() * heads;
    let are_alike = steps.iter().all(|&of_one| Some(&of_one) == steps.first());
    let rounds = tiles.div_ceil(units as usize);
    let group = tile.heads_per_l2_group(problem, spec, num_sms, parts).unsigned_abs() as usize;
    let heads_at_a_time = (group / parts.queries as usize).max(1);
    let last = if is_packed {
        // Shorter tiles fill the multiprocessors that would be idle.
        longest
    } else if are_alike {
        rounds as f64 * longest
    } else if tiles > EVEN_TILES * units as usize {
        even
    } else {
        f64::from(end_of_last(steps, heads, heads_at_a_time, units))
    };
    let step_micros = step_micros(tile, spec);
    let key_rows = f64::from(batch) * f64::from(dims.num_heads_kv) * f64::from(dims.seqlen_k);
    let num_parts = parts.heads * parts.queries;
    let sums = if num_parts > 1 {
        let mb = key_rows * f64::from(dim) * 8.0 * 1e-6;
        SUMS_MICROS + mb * (SUMS_MICROS_A_MB + f64::from(num_parts) * ADDED_SUMS_MICROS_A_MB)
    } else {
        0.0
    };
    let in_steps = last.max(even + tail * longest);
    in_steps * f64::from(heads_a_tile) * step_micros + rounds as f64 * TILE_MICROS + sums
}

/// Constants for the ways to sum dQ, for 16k tokens of 16 heads of 128 on an H200: 2^25 elements of Q. All but the
/// shares are proportional to that number.
struct OfDq {
    /// Time of preprocess if it computes all of delta: it reads O and dO at 3.4 TB/s.
    delta_micros: f64,
    /// Writes of the zeros that sums begin with.
    zeros_micros: f64,
    /// Share of the main kernel's time that the semaphore of first stores adds.
    semaphore_share: f64,
    /// Wait of later additions for a query block's first store.
    semaphore_micros: f64,
    /// Microseconds of the launch that finishes dQ.
    finish_micros: f64,
    /// Share of the main kernel's time that is added by the warp that finishes dQ at the same time as the products.
    beside_share: f64,
    /// Time of that warp if it computes delta too: the main kernel takes at least as long.
    beside_with_delta_micros: f64,
}

impl OfDq {
    const fn of(dim: i32, mask: MaskKind) -> Self {
        let is_64 = dim == 64;
        Self {
            delta_micros: 41.0,
            zeros_micros: if is_64 { 17.0 } else { 34.0 },
            semaphore_share: if is_64 { 0.0 } else { 0.0235 },
            semaphore_micros: if is_64 { 4.0 } else { 0.0 },
            finish_micros: 51.0,
            beside_share: if is_64 && matches!(mask, MaskKind::Full) { 0.028 } else { 0.0 },
            beside_with_delta_micros: if is_64 { 540.0 } else { 465.0 },
        }
    }
}

/// Number of consecutive first stores of a tile that its other steps hide; each further one adds time, since the
/// next store waits until it is in memory. On an H200: 4423 queries over 192 keys D 128 with 35 consecutive stores,
/// the main kernel took 233 us, with sums zeroed before 175 us.
const HIDDEN_FIRST_STORES: f64 = 2.0;
const FIRST_STORE_MICROS: f64 = 1.65;

/// Microseconds of a launch that does almost nothing, even if it starts early.
const LAUNCH_MICROS: f64 = 2.0;

/// Microseconds at the launch's end if a warp finishes dQ at the same time as the products and must load a query
/// block's sums from memory. D 128, by a separate launch and by the warp: B3 H2 S987 48.1 and 57.7 us, B4 H8 S344
/// 36.2 and 40.7, B1 H8 S1602 causal 75.5 and 82.7.
const BESIDE_MICROS: f64 = 11.0;

/// Longest sequence that is simulated; longer ones use the choice for this length.
const LONGEST: u32 = 1 << 17;

/// Multiprocessors of an H200, used for every device, since the tile is from a table.
const NUM_SMS: u32 = 132;

/// Share of the query heads whose delta preprocess computes, if the main kernel computes that of the others.
pub(super) fn first_heads(tile: &Sm90BwdTile, problem: &BwdProblem, spec: &BwdSpec) -> f64 {
    let dims = problem.fwd.dims;
    let all = f64::from(dims.batch) * f64::from(dims.num_heads_q);
    let first =
        tile.schedule(problem, spec, NUM_SMS).map(|schedule| f64::from(schedule.num_first_query_heads));
    if all > 0.0 { first.map_or(1.0, |first| first / all) } else { 1.0 }
}

/// Microseconds of first stores that no other step hides: without a mask the key blocks of a head begin as far
/// apart as its query blocks allow; with a mask they begin where the mask does.
fn first_stores_micros(tile: &Sm90BwdTile, problem: &BwdProblem) -> f64 {
    if problem.fwd.mask.kind() != MaskKind::Full {
        return 0.0;
    }
    let dims = problem.fwd.dims;
    let key_blocks = f64::from(dims.seqlen_k.div_ceil(tile.block_n.unsigned_abs()).max(1));
    let in_a_row = f64::from(dims.seqlen_q.div_ceil(tile.block_m.unsigned_abs())) / key_blocks;
    let tiles = f64::from(dims.batch) * f64::from(dims.num_heads_q) * key_blocks;
    (in_a_row - HIDDEN_FIRST_STORES).max(0.0) * FIRST_STORE_MICROS * tiles / f64::from(NUM_SMS)
}

/// Modelled microseconds of a call, by which the ways to add dQ are compared.
pub(super) fn of_dq(tile: &Sm90BwdTile, problem: &BwdProblem, spec: &BwdSpec) -> f64 {
    let mut problem = problem.clone();
    problem.fwd.mask = tile_list::band_of_tiles(&problem.fwd);
    let is_packed = problem.fwd.layout.q == QLayout::Packed;
    let dims = &mut problem.fwd.dims;
    (dims.seqlen_q, dims.seqlen_k) = (dims.seqlen_q.min(LONGEST), dims.seqlen_k.min(LONGEST));
    let dims = *dims;
    let in_parts = tile.head_parts_candidates(&problem, spec, NUM_SMS);
    let in_one = || of_parts(tile, &problem, spec, NUM_SMS, HeadParts { heads: 1, queries: 1 });
    let main = in_parts.cheapest(least_gain(&problem)).map_or_else(in_one, |best| best.micros);
    let share = if is_packed { PACKED_SHARE } else { 1.0 };
    let rows = share * f64::from(dims.batch) * f64::from(dims.num_heads_q) * f64::from(dims.seqlen_q);
    let size = rows * f64::from(padded_dim(spec)) / f64::from(1 << 25);
    let costs = OfDq::of(padded_dim(spec), spec.fwd.mask);
    let (begin, semaphores, waits) = match tile.dq_path {
        DqPath::FirstStores => {
            let waits = first_stores_micros(tile, &problem) + costs.semaphore_micros;
            (0.0, costs.semaphore_share, waits)
        }
        DqPath::Apart => (0.0, 0.0, 0.0),
        DqPath::StoreWarp | DqPath::Registers => (costs.zeros_micros, 0.0, 0.0),
    };
    let (launch, finish, beside) = match tile.dq_finish {
        DqFinish::Launch => (LAUNCH_MICROS, costs.finish_micros, 0.0),
        DqFinish::Beside | DqFinish::BesideWithDelta => (BESIDE_MICROS, 0.0, costs.beside_share),
    };
    let main = main * (1.0 + semaphores + beside) + waits;
    let (main, delta) = if tile.makes_delta() {
        let first = first_heads(tile, &problem, spec);
        (main.max(size * (1.0 - first) * costs.beside_with_delta_micros), first * costs.delta_micros)
    } else {
        (main, costs.delta_micros)
    };
    main + launch + size * (delta + begin + finish)
}

/// Time at which the last of `units` ends, in steps of a tile with one query head. Each takes the next tile when it
/// is free: key blocks one after another for all heads of an L2 head group, then the next group.
fn end_of_last(steps: &[u32], heads: usize, heads_at_a_time: usize, units: u32) -> u32 {
    let mut free: BinaryHeap<Reverse<u32>> = (0..units).map(|_| Reverse(0)).collect();
    let mut last = 0;
    for first in (0..heads).step_by(heads_at_a_time) {
        for &steps in steps {
            for _ in first..(first + heads_at_a_time).min(heads) {
                let Some(Reverse(time)) = free.pop() else { return last };
                last = last.max(time + steps);
                free.push(Reverse(time + steps));
            }
        }
    }
    last
}
