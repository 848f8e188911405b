//! Edge cases: empty and single rows, tile borders, hidden rows, odd strides, large scores, NaN next to data.

use fmha_core::{
    Bias, BiasBroadcast, DType, Dims, ElementwiseBias, FwdProblem, MaskSpec, Shape, Strides, VLayout,
};

use crate::case::{Body, Case, Plant, WIDE, seed_of};
use crate::init::Init;
use crate::tensor::Operand;
use crate::tensors::{Data, Lengths};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    lengths(&mut cases);
    tiles(&mut cases);
    short_queries(&mut cases);
    masks(&mut cases);
    strides(&mut cases);
    packed_columns(&mut cases);
    numbers(&mut cases);
    poison(&mut cases);
    growth(&mut cases);
    head_dims(&mut cases);
    cases
}

fn dims(seqlen_q: u32, seqlen_k: u32, head_dim: u32) -> Dims {
    Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(4, 2).head_dim(head_dim)
}

/// Makes a problem with LSE and a mask.
pub(super) fn masked(dtype: DType, dims: Dims, mask: &str) -> FwdProblem {
    let mut problem = FwdProblem::batch(dtype, dims);
    problem.mask = mask.parse().unwrap_or(MaskSpec::NONE);
    problem.write_lse = true;
    problem
}

/// Makes packed sequences of the given (queries, keys), with LSE and a mask.
pub(super) fn group(dtype: DType, dims: Dims, sequences: &[(u32, u32)], mask: &str) -> FwdProblem {
    let dims = Dims { batch: sequences.len() as u32, ..dims };
    let mut problem = FwdProblem::group(dtype, dims);
    problem.mask = mask.parse().unwrap_or(MaskSpec::NONE);
    problem.write_lse = true;
    problem
}

pub(super) fn data(name: &str) -> Data {
    Data { seed: seed_of(name), ..Data::default() }
}

fn push(cases: &mut Vec<Case>, name: String, problem: FwdProblem, lengths: Lengths) {
    let data = data(&name);
    cases.push(Case::forward(name, problem, lengths, data));
}

/// Adds a forward case with numbers of kind `init`.
fn push_of(cases: &mut Vec<Case>, init: Init, name: String, problem: FwdProblem) {
    let data = Data { init, ..data(&name) };
    cases.push(Case::forward(name, problem, Lengths::default(), data));
}

/// Adds a forward case with a value planted.
fn push_planted(cases: &mut Vec<Case>, name: String, problem: FwdProblem, plant: Plant) {
    let data = data(&name);
    let mut case = Case::forward(name, problem, Lengths::default(), data);
    if let Body::Forward(forward) = &mut case.body {
        forward.plant = plant;
    }
    cases.push(case);
}

/// Lengths 0 and 1, in a batch and packed.
fn lengths(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for mask in ["0", "b", "t", "b:2,1"] {
            for (q, k) in [(0, 0), (0, 5), (5, 0), (1, 1), (1, 2), (2, 1), (1, 257)] {
                let name = format!("edges/lengths/{dtype}/s{q}x{k}/{mask}");
                push(cases, name, masked(dtype, dims(q, k, 64), mask), Lengths::default());
            }
            if matches!(mask, "0" | "b") {
                let none = masked(dtype, Dims { batch: 0, ..dims(5, 40, 64) }, mask);
                push(cases, format!("edges/no_sequences/{dtype}/{mask}"), none, Lengths::default());
            }
            let sequences = [(0, 7), (3, 0), (0, 0), (1, 1), (17, 5), (5, 33), (0, 0)];
            let mut problem = FwdProblem::group(dtype, Dims { batch: 7, ..dims(17, 33, 32) });
            problem.mask = mask.parse().unwrap_or(MaskSpec::NONE);
            problem.write_lse = true;
            let name = format!("edges/group_with_empty_sequences/{dtype}/{mask}");
            push(cases, name, problem.clone(), Lengths::packed(&sequences));

            problem.score.sink = true;
            let name = format!("edges/group_with_empty_sequences_and_sinks/{dtype}/{mask}");
            push(cases, name, problem, Lengths::packed(&sequences));
        }
        let mut problem = masked(dtype, dims(9, 9, 32), "b");
        (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true);
        let lengths = Lengths { seqused_q: vec![0, 9], seqused_k: vec![9, 0], ..Lengths::default() };
        push(cases, format!("edges/nothing_used/{dtype}"), problem, lengths);
    }
}

/// Lengths one below and one above the sizes of kernels' tiles.
fn tiles(cases: &mut Vec<Case>) {
    for dtype in [DType::F32, DType::Bf16] {
        for mask in ["0", "b", "b:40,0"] {
            for (q, k) in [
                (63, 64),
                (65, 63),
                (127, 129),
                (129, 127),
                (128, 191),
                (193, 176),
                (15, 255),
                (257, 31),
                (128, 193),
            ] {
                let mut dims = dims(q, k, 64);
                dims.batch = 1;
                dims.num_heads_q = 2;
                dims.num_heads_kv = 1;
                let name = format!("edges/off_tile/{dtype}/s{q}x{k}/{mask}");
                push(cases, name, masked(dtype, dims, mask), Lengths::default());
            }
        }
        // More bands: a window that skips blocks on both sides; sinks of several blocks; whole blocks of rows
        // without keys; keys that end before a window does on the right.
        for (q, k, mask) in [
            (600, 1100, "b"),
            (1023, 513, "t"),
            (300, 2049, "b:513,0,7"),
            (600, 1100, "b:200,30"),
            (300, 1400, "b:300,0,300"),
            (600, 100, "b"),
            (300, 200, "b:300,150"),
        ] {
            let mut dims = dims(q, k, 128);
            (dims.batch, dims.num_heads_q, dims.num_heads_kv) = (1, 1, 1);
            let name = format!("edges/long/{dtype}/s{q}x{k}/{mask}");
            push(cases, name, masked(dtype, dims, mask), Lengths::default());
        }
        // K and V have blocks of different width, which a kernel may load in different ways.
        let unlike =
            Dims { batch: 1, num_heads_q: 2, num_heads_kv: 1, head_dim_v: 128, ..dims(300, 600, 192) };
        push(
            cases,
            format!("edges/long/{dtype}/s300x600/d192x128/b"),
            masked(dtype, unlike, "b"),
            Lengths::default(),
        );
        // There are few multiprocessors, so that each computes several tiles of several blocks.
        let mut dims = dims(300, 700, 64);
        (dims.batch, dims.num_heads_q, dims.num_heads_kv) = (1, 3, 3);
        push(cases, format!("edges/tile_after_tile/{dtype}/0"), masked(dtype, dims, "0"), Lengths::default());
    }
}

/// A few queries over many keys, which a kernel may split: masks that hide a whole part, lengths that end before a
/// part, hidden NaN next to visible keys.
fn short_queries(cases: &mut Vec<Case>) {
    for dtype in [DType::F32, DType::Bf16] {
        // The last case has more sink columns than queries.
        for (q, k, mask) in [(1, 600, "0"), (3, 1100, "b:300,0"), (5, 700, "t"), (3, 1100, "b:300,0,200")] {
            let name = format!("edges/short_query/{dtype}/s{q}x{k}/{mask}");
            push(cases, name, masked(dtype, dims(q, k, 64), mask), Lengths::default());
        }
        let name = format!("edges/short_query_beside_nan/{dtype}");
        push_planted(cases, name, masked(dtype, dims(1, 600, 128), "b:199,0"), Plant::HiddenKeys);
        let name = format!("edges/short_query_beside_nan/{dtype}/s3x600");
        push_planted(cases, name, masked(dtype, dims(3, 600, 128), "b:199,0"), Plant::HiddenKeys);
        let sequences = [(3, 1100), (0, 700), (1, 0), (2, 255), (3, 513)];
        let packed = group(dtype, dims(3, 1100, 64), &sequences, "b");
        push(cases, format!("edges/short_query_packed/{dtype}"), packed, Lengths::packed(&sequences));
        let used = masked(dtype, dims(2, 800, 64), "b").seqused_k(true).sink(true);
        let lengths = Lengths { seqused_k: vec![0, 530], ..Lengths::default() };
        push(cases, format!("edges/short_query_used/{dtype}"), used, lengths);
    }
    // LSE is so large that rows are recomputed where their parts are merged; K's and V's heads have different widths.
    for dtype in [DType::F16, DType::Bf16] {
        let sizes = Dims { head_dim_v: 24, ..dims(2, 600, 40) };
        let far = masked(dtype, sizes, "b").softmax_scale(1e8);
        push(cases, format!("edges/short_query_far/{dtype}"), far, Lengths::default());
    }
}

/// Masks of every alignment over different lengths: rows that see nothing, and windows that contain nothing.
fn masks(cases: &mut Vec<Case>) {
    let masks = [
        "t",
        "b",
        "t:0,0",
        "b:0,0",
        "t:-1,0",
        "b:-1,-1",
        "t:0,-1",
        "b:3,0",
        "t:0,3",
        "b:200,200",
        "g:0,0",
        "g:1,1",
        "g:-5,20",
        "g:9,-8",
        "g:100,-100",
        "g:-100,200",
        "t:0,0,1",
        "b:1,0,5",
        "t:2,0,300",
        "b:1,2,9",
        "g:0,-3,4",
    ];
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for mask in masks {
            for (q, k, shape) in [(40, 40, "sq_eq_sk"), (90, 33, "sq_gt_sk"), (21, 77, "sq_lt_sk")] {
                let name = format!("edges/mask_{shape}/{dtype}/{mask}");
                push(cases, name, masked(dtype, dims(q, k, 32), mask), Lengths::default());
                if dtype == DType::F32 {
                    let mut problem = masked(dtype, dims(q, k, 32), mask);
                    problem.score.sink = true;
                    let name = format!("edges/mask_{shape}_sinks/{dtype}/{mask}");
                    push(cases, name, problem, Lengths::default());
                }
            }
        }
    }
}

/// Strides that are odd, nested in another order, 0, or invalid where no element uses them.
fn strides(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        let odd = |shape: Shape, pad: i64| {
            let head = i64::from(shape.dim) + pad;
            let seq = head * i64::from(shape.head) + 1;
            Strides { batch: seq * i64::from(shape.seq) + 7, seq, head, dim: 1 }
        };
        let mut problem = masked(dtype, dims(19, 23, 33), "b");
        problem.strides.q = odd(problem.shape_q(), 1);
        problem.strides.k = odd(problem.shape_k(), 3);
        problem.strides.v = odd(problem.shape_v(), 2);
        problem.strides.o = odd(problem.shape_o(), 5);
        push(cases, format!("edges/odd_strides/{dtype}"), problem, Lengths::default());

        // Layouts [seq, head, batch, dim] and [head, batch, seq, dim].
        let mut problem = masked(dtype, dims(19, 23, 16), "b");
        let sbhd = |s: Shape| {
            let (dim, batch, head) = (i64::from(s.dim), i64::from(s.batch), i64::from(s.head));
            Strides { batch: dim, head: dim * batch, seq: dim * batch * head, dim: 1 }
        };
        (problem.strides.q, problem.strides.k) = (sbhd(problem.shape_q()), sbhd(problem.shape_k()));
        (problem.strides.v, problem.strides.o) = (sbhd(problem.shape_v()), sbhd(problem.shape_o()));
        push(cases, format!("edges/batch_inside_sequence/{dtype}"), problem, Lengths::default());

        for (what, batch, head) in
            [("batch", true, false), ("head", false, true), ("batch_and_head", true, true)]
        {
            let mut problem = masked(dtype, dims(19, 23, 16), "0");
            for strides in [&mut problem.strides.k, &mut problem.strides.v] {
                strides.batch *= i64::from(!batch);
                strides.head *= i64::from(!head);
            }
            let name = format!("edges/stride_0_over_{what}/{dtype}");
            push(cases, name, problem, Lengths::default());
        }
        let mut problem = masked(dtype, dims(19, 23, 16), "0");
        (problem.strides.k.seq, problem.strides.v.seq, problem.strides.q.seq) = (0, 0, 0);
        push(cases, format!("edges/stride_0_over_sequence/{dtype}"), problem, Lengths::default());

        let one = Dims { batch: 1, num_heads_q: 1, num_heads_kv: 1, ..dims(1, 1, 24) };
        let mut problem = masked(dtype, one, "b");
        let bogus = Strides { batch: i64::MIN, seq: i64::MAX, head: -17, dim: 1 };
        (problem.strides.q, problem.strides.k, problem.strides.v, problem.strides.o) =
            (bogus, bogus, bogus, bogus);
        push(cases, format!("edges/bogus_strides_of_ones/{dtype}"), problem, Lengths::default());

        let mut problem = masked(dtype, Dims { head_dim_qk: 1, head_dim_v: 1, ..dims(9, 11, 1) }, "b");
        (problem.strides.q.dim, problem.strides.k.dim, problem.strides.v.dim, problem.strides.o.dim) =
            (-3, 1 << 40, 0, i64::MAX);
        push(cases, format!("edges/bogus_dim_stride_of_one/{dtype}"), problem, Lengths::default());

        let mut problem = FwdProblem::group(dtype, Dims { batch: 1, ..dims(9, 11, 8) });
        for strides in
            [&mut problem.strides.q, &mut problem.strides.k, &mut problem.strides.v, &mut problem.strides.o]
        {
            strides.batch = -(1 << 50);
        }
        let lengths = Lengths::packed(&[(9, 11)]);
        push(cases, format!("edges/bogus_batch_stride_when_packed/{dtype}"), problem, lengths);
    }
}

/// Packed sequences whose keys begin at any element of a column-major V, which kernels may copy 16 bytes or more at
/// a time.
fn packed_columns(cases: &mut Vec<Case>) {
    let sequences = [(20, 15), (33, 2), (5, 15), (70, 64)];
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::E4m3Fn, DType::E5m2] {
        for (head_dim, mask) in [(64, "0"), (128, "b"), (136, "g:1,9"), (256, "b")] {
            let mut problem = group(dtype, dims(70, 64, head_dim), &sequences, mask);
            let lengths = Lengths::packed(&sequences);
            problem.layout.v = VLayout::ColMajor;
            problem.strides.v = Strides::bhds(problem.extents(lengths.totals).v);
            let name = format!("edges/packed_columns/{dtype}/d{head_dim}/{mask}");
            push(cases, name, problem, lengths);
        }
    }
}

/// Inputs with large scores, outliers, integers, or constants.
fn numbers(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for init in Init::ALL {
            for mask in ["0", "b", "b:20,0"] {
                for (q, k) in [(50, 50), (33, 130)] {
                    let name = format!("edges/numbers/{init}/{dtype}/s{q}x{k}/{mask}");
                    push_of(cases, init, name, masked(dtype, dims(q, k, 64), mask));
                }
            }
        }
        for scale in [0.0, -0.5, 4.0, 1e-30] {
            let mut problem = masked(dtype, dims(20, 30, 32), "b");
            problem.score.softmax_scale = Some(scale);
            push(cases, format!("edges/scale/{dtype}/{scale:e}"), problem, Lengths::default());
        }
        for cap in [0.01, 1.0, 50.0, 1e6] {
            let mut problem = masked(dtype, dims(20, 30, 32), "b");
            problem.score.softcap = Some(cap);
            let name = format!("edges/softcap/{dtype}/{cap:e}");
            push_of(cases, Init::HugeLogits, name, problem);
        }
        // Bias rows that begin at multiples of 16 bytes and others; full key blocks, and an incomplete last one;
        // heads that may be packed, whose bias rows are not adjacent, and heads that may not.
        for (seqlen_k, mask) in [(288, "0"), (288, "b"), (283, "0"), (283, "b")] {
            for heads in ["", "/mha"] {
                let mut dims = dims(200, seqlen_k, 64);
                if !heads.is_empty() {
                    dims.num_heads_kv = dims.num_heads_q;
                }
                let problem = with_bias(masked(dtype, dims, mask), 0);
                let name = format!("edges/bias/{dtype}/k{seqlen_k}/{mask}{heads}");
                push(cases, name, problem, Lengths::default());
            }
        }
        // Biases that threads load: rows at 16 bytes that end within a block, with fewer keys than queries; rows
        // that begin 28 bytes after a multiple of 32; rows at 16 bytes of heads that are not aligned.
        for (what, seqlen_q, seqlen_k, gap) in
            [("amid_block", 400, 280, 0), ("rows_of_540_bytes", 200, 270, 0), ("odd_heads", 200, 288, 1)]
        {
            let problem = with_bias(masked(dtype, dims(seqlen_q, seqlen_k, 64), "0"), gap);
            push(cases, format!("edges/bias_by_threads/{dtype}/{what}"), problem, Lengths::default());
        }
        // The memory after the last row of a single head's bias belongs to no tensor.
        let lone = Dims { num_heads_q: 1, num_heads_kv: 1, ..dims(200, 283, 64) };
        let problem = with_bias(masked(dtype, lone, "0"), 0);
        push(cases, format!("edges/bias_of_one_head/{dtype}"), problem, Lengths::default());
        // The first sequence has no queries: neither its bias, nor memory before it, may be read.
        let sequences = [(0, 128), (5, 128)];
        let problem = with_bias(group(dtype, dims(5, 128, 64), &sequences, "0"), 0);
        push(cases, format!("edges/bias_of_no_query/{dtype}"), problem, Lengths::packed(&sequences));
        // The sink's weight vanishes beside the row's only key.
        let sunk = masked(dtype, dims(9, 9, 64), "t").sink(true).softmax_scale(50.0);
        push(cases, format!("edges/sink_far_below_one_key/{dtype}"), sunk.clone(), Lengths::default());
        // Scores so large that the maximum is subtracted before scaling: the only key must have a weight of exactly
        // 1.
        let sunk = sunk.clone().softmax_scale(1e8);
        push(cases, format!("edges/sink_far_below_one_key/{dtype}/scale_1e8"), sunk, Lengths::default());
        // Sinks larger than any score, with queries that see keys and some that see none.
        for sink in [1e10, -1e10, -1e30, 1e30] {
            let sunk = masked(dtype, dims(19, 9, 64), "b").sink(true);
            let name = format!("edges/far_sink/{dtype}/{sink:e}");
            push_planted(cases, name, sunk, Plant::At(Operand::Sink, [0, 0, 0, 1], sink));
        }
        let dropout = |p_drop: f32, (q, k): (u32, u32)| {
            masked(dtype, dims(q, k, 32), "b").p_drop(p_drop).write_keep_mask(true)
        };
        for p_drop in [1e-9, 0.5, 0.999] {
            let name = format!("edges/dropout/{dtype}/{p_drop:e}");
            push(cases, name, dropout(p_drop, (37, 45)), Lengths::default());
        }
        let name = format!("edges/dropout/{dtype}/more_queries");
        push(cases, name, dropout(0.5, (45, 37)), Lengths::default());
    }
}

/// Problem with a bias of the inputs' type for each head, with gaps of `gap` elements between heads.
fn with_bias(mut problem: FwdProblem, gap: i64) -> FwdProblem {
    let (dtype, broadcast) = (problem.dtypes.qk, BiasBroadcast::OneHead);
    let mut strides = Strides::bhsd(problem.shape_bias(broadcast));
    strides.head += gap;
    problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides });
    problem
}

/// NaN and infinity: hidden ones must reach nothing, visible ones exactly the results that depend on them.
fn poison(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for mask in ["t", "b:2,0", "g:4,-9", "t:3,1", "g:1,2,3"] {
            let name = format!("edges/nan_in_keys_nobody_sees/{dtype}/{mask}");
            push_planted(cases, name, masked(dtype, dims(20, 75, 32), mask), Plant::HiddenKeys);
        }
        for (what, operand, at) in [
            ("q", Operand::Q, [1, 7, 2, 3]),
            ("k", Operand::K, [0, 11, 1, 0]),
            // The memory after V's last head belongs to no tensor.
            ("v", Operand::V, [1, 9, 1, 5]),
        ] {
            for (value, text) in [(f64::NAN, "nan"), (f64::INFINITY, "inf")] {
                // An infinite score makes its row NaN by inf - inf; the result of an infinite Q depends on signs
                // that a softmax of infinities does not define.
                if value.is_infinite() && operand != Operand::V {
                    continue;
                }
                for mask in ["0", "t", "b:4,0", "b"] {
                    let name = format!("edges/{text}_in_{what}/{dtype}/{mask}");
                    let problem = masked(dtype, dims(30, 40, 16), mask);
                    push_planted(cases, name, problem, Plant::At(operand, at, value));
                }
            }
        }
        // The last row and column of a block of 64 keys, which the last queries see.
        let name = format!("edges/nan_in_the_last_element_of_a_block/{dtype}");
        let plant = Plant::At(Operand::V, [1, 63, 1, 63], f64::NAN);
        push_planted(cases, name, masked(dtype, dims(70, 70, 64), "t"), plant);
        // The column is in a group of four columns, after the first two.
        let name = format!("edges/nan_in_a_late_column/{dtype}");
        let plant = Plant::At(Operand::V, [1, 63, 1, 40], f64::NAN);
        push_planted(cases, name, masked(dtype, dims(70, 70, 64), "t"), plant);
        // Recomputed rows see sink columns: without a band, or more of them than queries.
        for (row, mask) in [(9, "g:0,-3,12"), (38, "b:4,0,36")] {
            let name = format!("edges/nan_beside_sink_columns/{dtype}/{mask}");
            let plant = Plant::At(Operand::V, [1, row, 1, 5], f64::NAN);
            push_planted(cases, name, masked(dtype, dims(30, 40, 16), mask), plant);
        }
        // The next sequence's NaN lies in the block in which this sequence's keys end, and no mask makes rows be
        // recomputed.
        let sequences = [(30, 40), (30, 40)];
        let name = format!("edges/nan_in_the_next_sequence/{dtype}");
        let problem = group(dtype, dims(30, 40, 16), &sequences, "0");
        let mut case = Case::forward(name.clone(), problem, Lengths::packed(&sequences), data(&name));
        if let Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::At(Operand::V, [0, 43, 1, 5], f64::NAN);
        }
        cases.push(case);
    }
}

/// Rows of several key blocks with growing maxima, also with NaN and infinity: a softmax that rarely checks its
/// maxima must notice.
fn growth(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for init in Init::GROWING {
            for mask in ["0", "b", "b:350,2"] {
                for (q, k, head_dim) in [
                    (70, 600, 47),
                    (70, 600, 64),
                    (70, 600, 128),
                    (260, 260, 128),
                    (300, 270, 128),
                    (40, 500, 200),
                ] {
                    let name = format!("edges/growth/{init}/{dtype}/s{q}x{k}/d{head_dim}/{mask}");
                    push_of(cases, init, name, masked(dtype, dims(q, k, head_dim), mask));
                }
            }
        }
        // The lag of a running maximum is counted in scaled scores.
        for mask in ["0", "b", "b:350,2"] {
            let mut problem = masked(dtype, dims(70, 600, 64), mask);
            problem.score.softmax_scale = Some(4.0);
            push(cases, format!("edges/growth/scale_4/{dtype}/{mask}"), problem, Lengths::default());
        }
        // Scores so large that half the last place of one is a weight of many powers of two: ties, and maxima
        // that rise.
        for (scale, init) in [
            (1e6, Init::Rising),
            (1e6, Init::Towering),
            (1e8, Init::Normal),
            (1e8, Init::Integers),
            (1e8, Init::Rising),
            (1e8, Init::Towering),
            (-1e8, Init::Integers),
        ] {
            for mask in ["0", "b"] {
                let mut problem = masked(dtype, dims(70, 600, 64), mask);
                problem.score.softmax_scale = Some(scale);
                let name = format!("edges/growth/scale_{scale:e}/{init}/{dtype}/{mask}");
                push_of(cases, init, name, problem);
            }
        }
        // The next sequence's queries, in the first sequence's row block, have large scores too and end much earlier.
        let sequences = [(70, 600), (58, 30), (40, 300)];
        let mut problem = group(dtype, dims(70, 600, 64), &sequences, "b");
        problem.score.softmax_scale = Some(1e8);
        push(
            cases,
            format!("edges/growth/scale_1e8/normal/{dtype}/group"),
            problem,
            Lengths::packed(&sequences),
        );
        // Scores are so far apart, for so long, that a kernel may stop guessing maxima.
        for mask in ["0", "b"] {
            let name = format!("edges/growth/huge_logits/{dtype}/s300x1500/d128/{mask}");
            push_of(cases, Init::HugeLogits, name, masked(dtype, dims(300, 1500, 128), mask));
        }
        // A block of visible scores is all -inf, as the first or the last block that a kernel processes.
        for (begin, end) in [(0, 350), (250, 600)] {
            for mask in ["0", "b", "b:350,2"] {
                let name = format!("edges/growth/infinitely_far_{begin}_to_{end}/{dtype}/{mask}");
                let problem = masked(dtype, dims(70, 600, 64), mask);
                push_planted(cases, name, problem, Plant::FarBelow { begin, end, key: f64::INFINITY });
            }
        }
        // The keys processed first are so far below the rest that rounding their maximum times the scale would make
        // P 2^(10^21).
        for mask in ["0", "b"].iter().filter(|_| dtype != DType::F16) {
            let problem = masked(dtype, dims(70, 600, 64), mask);
            let far_below = Plant::FarBelow { begin: 300, end: 600, key: 1e30 };
            push_planted(cases, format!("edges/growth/far_below/{dtype}/{mask}"), problem, far_below);
        }
        for (what, operand, at) in [
            ("q", Operand::Q, [1, 7, 2, 3]),
            ("k", Operand::K, [0, 301, 1, 0]),
            ("v", Operand::V, [1, 20, 0, 5]),
        ] {
            for mask in ["0", "b", "b:350,2"] {
                let name = format!("edges/growth/nan_in_{what}/{dtype}/{mask}");
                let problem = masked(dtype, dims(70, 600, 64), mask);
                push_planted(cases, name, problem, Plant::At(operand, at, f64::NAN));
            }
        }
    }
}

/// Cases of head dimensions, each with its own padding.
fn head_dims(cases: &mut Vec<Case>) {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for head_dim in (1..=40).chain([47, 63, 65, 79, 95, 100, 127, 129, 160, 191, 200, 255, 256]) {
            let mut dims = dims(18, 35, head_dim);
            (dims.batch, dims.num_heads_q) = (1, 2);
            let name = format!("edges/head_dim/{dtype}/d{head_dim}");
            push(cases, name, masked(dtype, dims, "b"), Lengths::default());
            let mut other = dims;
            other.head_dim_v = 257 - head_dim;
            let name = format!("edges/head_dim/{dtype}/d{head_dim}x{}", other.head_dim_v);
            push(cases, name, masked(dtype, other, "0"), Lengths::default());
        }
    }
    let many = Dims { batch: 5, num_heads_q: 24, num_heads_kv: 3, ..dims(7, 9, 16) };
    push(cases, "edges/many_heads/f32".into(), masked(DType::F32, many, "b"), Lengths::default());
    // A prime number of heads: the last L2 head group is smaller.
    let prime = Dims { batch: 1, num_heads_q: 37, num_heads_kv: 37, ..dims(130, 40, 16) };
    push(cases, "edges/prime_heads/bf16".into(), masked(DType::Bf16, prime, "b"), Lengths::default());
    let packed = FwdProblem::group(DType::Bf16, Dims { batch: 40, ..dims(3, 4, 16) });
    push(cases, "edges/many_sequences/bf16".into(), packed, Lengths::packed(&[(3, 4); 40]));
}
