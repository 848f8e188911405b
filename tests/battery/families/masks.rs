//! Masks as data: random intervals, bits and block lists, combined with each other, the band and code.
//!
//! Rows of a sequence come in stretches of one kind (all keys, none, a document, a window with sinks, drawn
//! endpoints), so that tiles of every size are whole, cut and empty. Endpoints decrease, are negative and lie past
//! the keys; indices past a row's count and memory between rows are garbage.

use fmha_core::expr::draw::{self, Kind};
use fmha_core::{
    Bias, BiasBroadcast, BlockLists, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, Intervals,
    MaskAxes, MaskBits, Part, QLayout, Shape, Strides,
};

use super::decode::in_pages;
use super::edges::{data, group, masked};
use crate::case::{Backward, Body, Case};
use crate::init::mix;
use crate::tensors::{Lengths, MaskNumbers};

const VARIANTS: [&str; 16] = [
    "batch",
    "group",
    "used",
    "window",
    "softcap",
    "alibi",
    "bias",
    "sink",
    "dropout",
    "few_queries",
    "strides",
    "wide_heads",
    "code",
    "paged",
    "long",
    "part",
];

const KINDS: [&str; 6] = ["intervals", "bits", "partial", "full", "lists", "all"];

/// Packed sequences: without queries, without keys, of one tile and of several.
const SEQUENCES: [(u32, u32); 5] = [(0, 9), (33, 70), (17, 0), (70, 130), (1, 130)];

const DTYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut seed = 0;
    for variant in VARIANTS {
        for kind in KINDS {
            seed += 1;
            let dtype = DTYPES[if variant == "batch" { 0 } else { seed as usize % 3 }];
            let (problem, lengths) = problem(dtype, variant, kind, seed);
            let name = format!("masks/forward/{dtype}/{variant}/{kind}");
            let drawn = data(&name);
            cases.push(Case::forward(name, problem.clone(), lengths.clone(), drawn));
            if variant == "paged" {
                continue;
            }
            let name = format!("masks/backward/{dtype}/{variant}/{kind}");
            let drawn = data(&name);
            cases.push(Case::backward(name, BwdProblem::new(problem), lengths, drawn));
        }
    }
    ordered(&mut cases);
    cases
}

/// Gradients with ordered sums: several tiles of keys add to a query, with lists that leave out some.
fn ordered(cases: &mut Vec<Case>) {
    let drawn = [
        ("keys", "intervals", 301),
        ("keys", "all", 302),
        ("group", "lists", 303),
        ("wide_heads", "all", 304),
    ];
    for (variant, kind, seed) in drawn {
        let (problem, lengths) = problem(DType::Bf16, variant, kind, seed);
        let name = format!("masks/backward/bf16/ordered/{variant}/{kind}");
        let data = data(&name);
        let problem = BwdProblem::new(problem);
        let body = Backward { problem, lengths, data, deterministic: true, planted: Vec::new() };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
    }
}

pub(super) fn problem(dtype: DType, variant: &str, kind: &str, seed: u64) -> (FwdProblem, Lengths) {
    let head_dim = if variant == "wide_heads" { 128 } else { 32 };
    let dims = Dims {
        batch: 2,
        seqlen_q: if variant == "few_queries" { 3 } else { 150 },
        seqlen_k: match variant {
            "long" => 1500,
            "keys" => 700,
            _ => 205,
        },
        num_heads_q: 4,
        num_heads_kv: 2,
        head_dim_qk: head_dim,
        head_dim_v: if variant == "wide_heads" { 128 } else { 24 },
    };
    let (mut problem, mut lengths) = (masked(dtype, dims, "0"), Lengths::default());
    match variant {
        "group" => {
            let dims = Dims { seqlen_q: 70, seqlen_k: 130, ..dims };
            problem = group(dtype, dims, &SEQUENCES, "b");
            lengths = Lengths::packed(&SEQUENCES);
        }
        "used" => {
            problem = problem.seqused_q(true).seqused_k(true);
            (lengths.seqused_q, lengths.seqused_k) = (vec![150, 41], vec![99, 205]);
        }
        "window" => problem = masked(dtype, dims, "b:90,3,2"),
        "part" => {
            // The part's first key begins a block in every block size that a part draws.
            let part =
                Part { position_q: 128, position_k: 960, seqlens: Some([300, 1300]), ..Part::default() };
            problem = masked(dtype, dims, "b").part(part);
        }
        "softcap" => problem = problem.softcap(2.0),
        "alibi" => problem = problem.bias(Bias::Alibi { per_batch: false }),
        "bias" => {
            let strides = Strides { batch: 0, seq: 205, head: 150 * 205, dim: 1 };
            let broadcast = BiasBroadcast::OneHead;
            problem =
                problem.bias(Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides }));
        }
        "sink" => problem = problem.sink(true),
        "dropout" => problem = problem.p_drop(0.3),
        "code" => {
            problem = problem.score_code(draw::score(seed, Kind::Bare).ok());
            problem = problem.mask_code(draw::mask(seed, Kind::Bare).ok());
        }
        "paged" => {
            problem = problem.seqused_k(true);
            lengths.seqused_k = vec![205, 77];
            (problem, lengths) = in_pages(problem, 16, lengths, &format!("masks/{kind}"));
        }
        _ => {}
    }
    let gap = if variant == "strides" { 3 } else { 0 };
    draw_kind(&mut problem, &mut lengths, kind, gap, seed);
    (problem, lengths)
}

/// Adds masks of a kind to a problem, dense in memory.
pub(super) fn draw(problem: &mut FwdProblem, lengths: &mut Lengths, kind: &str, seed: u64) {
    draw_kind(problem, lengths, kind, 0, seed);
}

fn draw_kind(problem: &mut FwdProblem, lengths: &mut Lengths, kind: &str, gap: i64, seed: u64) {
    let dims = problem.dims;
    let per_batch = seed.is_multiple_of(2);
    let heads = |of: u64| [1, dims.num_heads_kv, dims.num_heads_q][(of % 3) as usize];
    if matches!(kind, "intervals" | "all") {
        let axes = MaskAxes { per_batch, heads: heads(seed) };
        draw_intervals(problem, lengths, axes, gap, seed);
    }
    if matches!(kind, "bits" | "all") {
        let axes = MaskAxes { per_batch: !per_batch, heads: heads(seed / 3) };
        draw_bits(problem, lengths, axes, gap, seed);
    }
    if matches!(kind, "partial" | "full" | "lists" | "all") {
        let axes = MaskAxes { per_batch, heads: if seed.is_multiple_of(2) { 1 } else { dims.num_heads_q } };
        let has = [kind != "full", kind != "partial"];
        draw_lists(problem, lengths, (axes, has), gap, seed);
    }
}

/// Draws a pseudo-random word for some coordinates.
fn word(seed: u64, at: [u32; 4]) -> u64 {
    at.into_iter().fold(mix(seed), |word, x| mix(word ^ u64::from(x)))
}

/// Makes a tensor's numbers; the memory between them is garbage.
fn numbers(shape: Shape, strides: Strides, mut of: impl FnMut([u32; 4]) -> i32) -> Vec<i32> {
    let mut numbers = vec![i32::MIN + 7; strides.extent(shape).unwrap_or(0) as usize];
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.head).map(move |h| (b, h))) {
        for (s, d) in (0..shape.seq).flat_map(|s| (0..shape.dim).map(move |d| (s, d))) {
            numbers[strides.offset(b, s, h, d) as usize] = of([b, s, h, d]);
        }
    }
    numbers
}

/// Strides with `gap` numbers between neighbours on the second innermost axis, and after each head.
fn spread(strides: Strides, shape: Shape, gap: i64) -> Strides {
    if gap == 0 {
        return strides;
    }
    let seq = i64::from(shape.dim) * 2 + gap;
    let head = seq * i64::from(shape.seq) + gap;
    Strides { batch: head * i64::from(shape.head) + gap, head, seq, dim: 2 }
}

fn draw_intervals(problem: &mut FwdProblem, lengths: &mut Lengths, axes: MaskAxes, gap: i64, seed: u64) {
    let endpoints = [2, 4, 6][(seed % 3) as usize];
    let total_q = lengths.totals.total_q;
    let mut intervals = match (problem.layout.q, total_q) {
        (QLayout::Packed, Some(total_q)) => Intervals::packed(total_q, axes.heads, endpoints),
        _ => Intervals::batch(problem, axes, endpoints),
    };
    let shape = problem.shape_intervals(&intervals, lengths.totals);
    intervals.strides = spread(intervals.strides, shape, gap);
    let (seqlen_k, first_key) = (problem.dims.seqlen_k.cast_signed(), problem.part.position_k.cast_signed());
    let reach = u64::from(problem.dims.seqlen_k.max(205));
    let drawn = |[b, i, h, m]: [u32; 4]| {
        // A stretch of 37 rows has one kind of interval.
        let stretch = i / 37;
        let kind = word(seed, [b, h, stretch, 9]) % 6;
        let edge = |n: u32| (word(seed, [b, h, stretch, 10 + n]) % (reach - 15)) as i32;
        let i = i.cast_signed();
        let endpoint: i32 = match (kind, m) {
            // An interval begins at 0. It ends after every key (kind 0), or grows with the row (kind 5).
            (0 | 5, 0) => 0,
            (0, 1) => i32::MAX,
            // The row sees a document.
            (1, 0) => edge(0).min(edge(1)),
            (1, 1) => edge(0).max(edge(1)) + 15,
            // A window after sinks, which needs two intervals.
            (2, 0) if endpoints > 2 => 0,
            (2, 1) if endpoints > 2 => 4,
            (2, 0 | 2) => i - 20,
            (2, 1 | 3) => i + 3,
            // The row sees no key.
            (3, _) => edge(0),
            // Endpoints are drawn for each row, in any order, and may lie outside of the keys.
            (4, m) => (word(seed, [b, h, i.unsigned_abs(), m]) % (reach + 55)) as i32 - 30,
            (5, 1) => edge(0) + i / 3,
            // The rest of the pairs is unused.
            _ => seqlen_k + 5,
        };
        endpoint.saturating_add(first_key)
    };
    lengths.masks.intervals = numbers(shape, intervals.strides, drawn);
    problem.masks.intervals = Some(intervals);
}

fn draw_bits(problem: &mut FwdProblem, lengths: &mut Lengths, axes: MaskAxes, gap: i64, seed: u64) {
    let mut bits = MaskBits::dense(problem, axes, lengths.totals);
    let shape = problem.shape_mask_bits(&bits, lengths.totals);
    bits.strides = spread(bits.strides, shape, gap);
    let drawn = |[b, i, h, w]: [u32; 4]| {
        let block = word(seed, [b, h, i / 41, 100 + w / 3]);
        match block % 4 {
            0 => 0,
            1 => -1,
            _ => word(seed, [b, h, i, w]) as i32,
        }
    };
    lengths.masks.bits = numbers(shape, bits.strides, drawn);
    problem.masks.bits = Some(bits);
}

fn draw_lists(
    problem: &mut FwdProblem,
    lengths: &mut Lengths,
    (axes, [has_partial, has_full]): (MaskAxes, [bool; 2]),
    gap: i64,
    seed: u64,
) {
    let odd = if problem.part.is_whole() { [37, 19] } else { [16, 48] };
    let [block_q, block_k] = [[64, 64], [128, 32], odd, [16, 48], [1, 5]][(seed % 5) as usize];
    let blocks = (problem.part.position_k + problem.dims.seqlen_k).div_ceil(block_k);
    // List capacity, larger than any row needs.
    let room = |has: bool| has.then_some(blocks + 1);
    let mut lists = BlockLists::dense(problem, axes, [block_q, block_k], room(has_partial), room(has_full));
    let what = |[b, row, h]: [u32; 3], block: u32| match word(seed, [b, h, row, 200]) % 8 {
        // Some blocks of queries have no keys, and some see all.
        0 => 2,
        1 => u64::from(has_full),
        _ => word(seed, [b, h, row, 300 + block]) % 3,
    };
    let mut draw = |is_full: bool| {
        let list = if is_full { &mut lists.full } else { &mut lists.partial };
        let Some(mut list) = *list else { return [vec![], vec![]] };
        let shape = problem.shape_block_lists(&lists, list.max_blocks);
        let counted = Shape { dim: 1, ..shape };
        list.counts = spread(list.counts, counted, gap);
        list.indices = spread(list.indices, shape, gap);
        let listed = |at: [u32; 3]| {
            let mut blocks: Vec<u32> =
                (0..blocks).filter(|&block| what(at, block) == u64::from(is_full)).collect();
            // The list's blocks have a random order.
            blocks.sort_unstable_by_key(|&block| word(seed, [at[0], at[1], at[2], 400 + block]));
            blocks
        };
        let counts = numbers(counted, list.counts, |[b, row, h, _]| listed([b, row, h]).len() as i32);
        // A list is drawn once, for its first index, instead of for each of up to 300: that took nine tenths of the
        // time of making the battery's cases, in every program that runs one.
        let mut of_row = Vec::new();
        let indices = numbers(shape, list.indices, |[b, row, h, at]| {
            if at == 0 {
                of_row = listed([b, row, h]);
            }
            of_row.get(at as usize).map_or(i32::MAX - 3, |block| block.cast_signed())
        });
        *(if is_full { &mut lists.full } else { &mut lists.partial }) = Some(list);
        [counts, indices]
    };
    let [partial, full] = [draw(false), draw(true)];
    lengths.masks = MaskNumbers { partial, full, ..std::mem::take(&mut lengths.masks) };
    problem.masks.block_lists = Some(lists);
}

#[cfg(test)]
mod tests {
    use fmha_core::BlockClass;
    use fmha_core::masks::HostMasks;

    use super::*;
    use crate::case::Body;
    use crate::tensor::Operand;
    use crate::tensors::{HostFwd, masks_of};

    #[test]
    fn drawn_masks_show_all_some_and_none_of_a_tile_and_leave_rows_without_keys() {
        let (mut classes, mut empty_rows, mut hidden) = ([0; 3], 0, 0);
        for case in cases() {
            let Body::Forward(forward) = &case.body else { continue };
            let host = HostFwd::new(forward.problem.clone(), &forward.lengths, forward.data).unwrap();
            let args = masks_of(|operand| host.operands.input(operand));
            let masks = HostMasks::of(&host.problem, &args, host.totals.total_q).unwrap().unwrap();
            for span in &host.spans {
                let head = masks.head(span, 1);
                for (i, j) in
                    (0..span.seqlen_q / 16).flat_map(|i| (0..span.seqlen_k / 16).map(move |j| (i, j)))
                {
                    match head.class(i * 16..i * 16 + 16, j * 16..j * 16 + 16) {
                        BlockClass::Skipped => classes[0] += 1,
                        BlockClass::Edge => classes[1] += 1,
                        BlockClass::Inside => classes[2] += 1,
                    }
                }
                empty_rows +=
                    (0..span.seqlen_q).filter(|&i| head.hull(i..i + 1, span.seqlen_k).is_empty()).count();
            }
            let v = host.operands.expect(Operand::V);
            hidden += usize::from(v.get(0, 0, 0, 0).is_nan());
        }
        assert!(classes.iter().all(|&count| count > 500), "{classes:?}");
        assert!(empty_rows > 100 && hidden > 3, "{empty_rows} {hidden}");
    }
}
