//! Rows that kernels recompute, in every mode and with every modifier: scores that overflow at the running maximum,
//! rows reached by a hidden NaN or infinity, blocks without any weight.

use fmha_core::{Bias, BiasBroadcast, DType, Dims, ElementwiseBias, FwdProblem, MaskSpec, Strides, VLayout};

use super::edges::{data, group, masked};
use crate::case::{Body, Case, Plant};
use crate::init::Init;
use crate::tensor::Operand;
use crate::tensors::{Data, Lengths};

/// Reasons for which a kernel recomputes rows.
const CAUSES: [(&str, Init, Cause); 6] = [
    ("rising", Init::Rising, Cause::Scores),
    ("towering", Init::Towering, Cause::Scores),
    ("nan_in_v", Init::Normal, Cause::NanInV),
    ("infinity_in_v", Init::Normal, Cause::InfinityInV),
    ("infinitely_far", Init::Normal, Cause::InfinitelyFar),
    ("large_in_v", Init::Normal, Cause::LargeInV),
];

#[derive(Clone, Copy, PartialEq)]
enum Cause {
    Scores,
    NanInV,
    InfinityInV,
    InfinitelyFar,
    /// Data for which the weighted sums of some rows overflow f32, and those of others do not.
    LargeInV,
}

/// Names of the variants of the call in which the rare value is written.
const VARIANTS: [&str; 20] = [
    "batch",
    "unmasked",
    "f32_output",
    "group",
    "gaps",
    "ratio4",
    "ratio4_few_rows",
    "ratio3_group",
    "negative_scale",
    "negative_scale_group",
    "column_major_v",
    "column_major_v_group",
    "window",
    "sink_columns",
    "softcap",
    "bias",
    "narrow_bias",
    "alibi",
    "sink",
    "dropout",
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for variant in VARIANTS {
            // A score of -inf times a negative scale is +inf, for which softmax is undefined.
            let is_taken = |cause| match cause {
                Cause::InfinitelyFar => !variant.starts_with("negative_scale"),
                Cause::LargeInV => matches!(variant, "batch" | "unmasked" | "group"),
                _ => variant != "unmasked",
            };
            for cause in CAUSES.into_iter().filter(|cause| is_taken(cause.2)) {
                cases.push(case(dtype, variant, cause));
            }
        }
    }
    // The tensor that is read again has type FP8, and P has the range of FP8 or of f16.
    for dtype in [DType::E4m3Fn, DType::E5m2] {
        for variant in ["batch", "group", "negative_scale"] {
            cases.extend(CAUSES[..3].iter().map(|&cause| case(dtype, variant, cause)));
        }
    }
    for dtype in [DType::F32, DType::Bf16] {
        // An even column of O leaves f32, where the others of this cause have an odd one: threads have two
        // side by side. And, where blocks skip the row-max reduction, a column of V beside a key of the block
        // that raises the maximum.
        for (what, variant, init, key) in [
            ("even_column", "batch", Init::Normal, [1, 375, 0, 4]),
            ("rising_unmasked", "unmasked", Init::Rising, [1, 20, 0, 5]),
        ] {
            let name = format!("rare/large_in_v/{dtype}/{what}");
            let (problem, lengths) = problem(dtype, variant);
            let data = Data { init, ..data(&name) };
            cases.push(planted(name, problem, lengths, data, Plant::At(Operand::V, key, dtype.max_finite())));
        }
    }
    // A query that sees only one key has that key's V, even if it is the largest number.
    for dtype in [DType::F32, DType::Bf16] {
        let name = format!("rare/large_in_v/{dtype}/lone_key");
        let problem = masked(dtype, dims(), "t");
        let plant = Plant::At(Operand::V, [1, 0, 0, 5], dtype.max_finite());
        let data = data(&name);
        cases.push(planted(name, problem, Lengths::default(), data, plant));
    }
    // A scale that is subnormal in f32, and a query whose scores become about 0.5 with it.
    for (mask, plain) in [("0", true), ("b", true), ("b", false)] {
        let mut problem = masked(DType::Bf16, dims(), mask);
        problem.score.softmax_scale = Some(1e-38);
        if !plain {
            problem.score.bias = Bias::Alibi { per_batch: false };
        }
        let name = format!("rare/subnormal_scale/bf16/{mask}/{}", if plain { "plain" } else { "alibi" });
        let data = data(&name);
        cases.push(planted(
            name,
            problem,
            Lengths::default(),
            data,
            Plant::At(Operand::Q, [1, 65, 0, 3], 5e37),
        ));
    }
    far_scores(&mut cases);
    large_values(&mut cases);
    for dtype in [DType::F16, DType::Bf16] {
        for (seqlen_q, seqlen_k) in [(20, 600), (70, 130)] {
            let mut problem = masked(dtype, Dims { seqlen_q, seqlen_k, ..dims() }, "0");
            problem.score.softmax_scale = Some(1.0);
            let name = format!("rare/faint_weights/{dtype}/s{seqlen_q}x{seqlen_k}");
            let data = Data { init: Init::ConstantV, ..data(&name) };
            cases.push(planted(name, problem, Lengths::default(), data, Plant::FaintWeights { score: 12.0 }));
        }
    }
    cases
}

/// Modes: fully visible rows, rows cut by a mask, packed rows, and few queries over many keys.
const MODES: [(&str, &str, (u32, u32)); 5] = [
    ("unmasked", "0", (70, 133)),
    ("causal", "b", (70, 133)),
    ("window", "b:40,3", (70, 133)),
    ("group", "b", (70, 133)),
    ("decode", "b", (1, 600)),
];

fn in_mode(
    dtype: DType,
    (mode, mask, (seqlen_q, seqlen_k)): (&str, &str, (u32, u32)),
) -> (FwdProblem, Lengths) {
    let dims = Dims { seqlen_q, seqlen_k, ..dims() };
    if mode != "group" {
        return (masked(dtype, dims, mask), Lengths::default());
    }
    let sequences = [(seqlen_q, seqlen_k), (seqlen_q - 37, seqlen_k - 29)];
    (group(dtype, dims, &sequences, mask), Lengths::packed(&sequences))
}

/// Rows whose biases are all one finite number near f32's limits, and sinks and soft-caps of such numbers: times
/// log2(e) each overflows f32.
fn far_scores(cases: &mut Vec<Case>) {
    let most = f64::from(f32::MAX);
    let of_bf16 = DType::Bf16.max_finite();
    // The numbers are in the bias or in the sink; the last case has both.
    let numbers = [
        ("bias_lowest", Some(-most), None),
        ("bias_lowest_of_bf16", Some(-of_bf16), None),
        ("bias_0.7_of_lowest", Some(-0.7 * most), None),
        ("bias_largest", Some(most), None),
        ("sink_largest", None, Some(most)),
        ("sink_3e38", None, Some(3e38)),
        ("sink_lowest", None, Some(-most)),
        ("bias_and_sink_lowest", Some(-most), Some(-most)),
        ("bias_and_sink_largest", Some(of_bf16), Some(of_bf16)),
    ];
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for mode in MODES {
            // Each number is tried under one mask. Other modes try those that use every way to recompute a row.
            let everywhere = ["bias_lowest", "bias_and_sink_lowest"];
            let whole = mode.0 == "causal";
            for (what, bias, sink) in numbers {
                if !whole && (dtype == DType::F16 || !everywhere.contains(&what)) {
                    continue;
                }
                // A 16-bit bias is loaded by another path; f16 cannot represent such a number.
                for narrow in [false, true] {
                    if narrow && (dtype != DType::Bf16 || bias.is_none_or(|bias| bias.abs() > of_bf16)) {
                        continue;
                    }
                    let name =
                        format!("rare/far/{what}/{dtype}{}/{}", if narrow { "/narrow" } else { "" }, mode.0);
                    let (mut problem, lengths) = in_mode(dtype, mode);
                    problem.score.sink = sink.is_some();
                    if bias.is_some() {
                        let broadcast = BiasBroadcast::BatchHead;
                        let strides = Strides::bhsd(problem.shape_bias(broadcast));
                        let dtype = if narrow { dtype } else { DType::F32 };
                        problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides });
                    }
                    let data = data(&name);
                    cases.push(planted(name, problem, lengths, data, Plant::FarRows { bias, sink }));
                }
            }
            // A soft-cap far above the scores leaves them unchanged; one far below makes them all tiny.
            for (cap, init) in [(f32::MAX, Init::Normal), (1e-40, Init::Integers)] {
                if !whole && (dtype == DType::F16 || cap < 1.0) {
                    continue;
                }
                let name = format!("rare/far/softcap_{cap:e}/{dtype}/{}", mode.0);
                let (mut problem, lengths) = in_mode(dtype, mode);
                problem.score.softcap = Some(cap);
                let data = Data { init, ..data(&name) };
                cases.push(planted(name, problem, lengths, data, Plant::Nothing));
            }
        }
    }
}

/// Weights of similar size whose products with V overflow f32 before the division by their sum.
fn large_values(cases: &mut Vec<Case>) {
    let most = |dtype: DType| dtype.max_finite();
    for (dtype, what, value) in [
        (DType::F32, "1e37", 1e37),
        (DType::F32, "largest", most(DType::F32)),
        (DType::Bf16, "1e37", 1e37),
        (DType::Bf16, "3.3e38", 3.3e38),
        (DType::Bf16, "largest", most(DType::Bf16)),
    ] {
        for mode in MODES {
            for with in ["", "/sink", "/dropout", "/f32_output"] {
                if !with.is_empty() && mode.0 != "causal" {
                    continue;
                }
                // Dropout doubles the kept P, and only f32 can represent the result.
                if with == "/dropout" && what != "1e37" || with == "/f32_output" && dtype == DType::F32 {
                    continue;
                }
                let name = format!("rare/large_values/{what}/{dtype}{with}/{}", mode.0);
                let (mut problem, lengths) = in_mode(dtype, mode);
                problem.score.softmax_scale = Some(0.0);
                match with {
                    "/sink" => problem.score.sink = true,
                    "/dropout" => problem.dropout.p_drop = 0.5,
                    "/f32_output" => problem.dtypes.o = DType::F32,
                    _ => {}
                }
                let data = data(&name);
                cases.push(planted(name, problem, lengths, data, Plant::LargeValues(value)));
            }
        }
    }
}

fn dims() -> Dims {
    Dims {
        batch: 2,
        seqlen_q: 70,
        // A column-major V with these lengths, also packed, has rows of whole 16 bytes, which fast kernels support.
        seqlen_k: 424,
        num_heads_q: 2,
        num_heads_kv: 1,
        head_dim_qk: 64,
        head_dim_v: 64,
    }
}

fn planted(name: String, problem: FwdProblem, lengths: Lengths, data: Data, plant: Plant) -> Case {
    let mut case = Case::forward(name, problem, lengths, data);
    if let Body::Forward(forward) = &mut case.body {
        forward.plant = plant;
    }
    case
}

fn case(dtype: DType, variant: &str, (what, init, cause): (&str, Init, Cause)) -> Case {
    let name = format!("rare/{what}/{dtype}/{variant}");
    let (problem, lengths) = problem(dtype, variant);
    // For packed sequences, the second sequence's first row of K and V.
    let (batch, first) = match lengths.cu_seqlens_k.get(1) {
        Some(&row) => (0, row.unsigned_abs()),
        None => (1, 0),
    };
    // The mask shows this key to the later queries of a tile, and hides it from the others.
    let key = [batch, first + 375, 0, 5];
    let plant = match cause {
        Cause::Scores => Plant::Nothing,
        // Plants in a late column too, for kernels that look at some columns of O.
        Cause::NanInV if dtype == DType::E5m2 || matches!(variant, "batch" | "ratio4" | "alibi") => {
            Plant::At(Operand::V, [batch, first + 375, 0, problem.dims.head_dim_v - 5], f64::NAN)
        }
        Cause::NanInV => Plant::At(Operand::V, key, f64::NAN),
        Cause::InfinityInV => Plant::At(Operand::V, key, f64::INFINITY),
        Cause::InfinitelyFar => Plant::FarBelow { begin: 128, end: 300, key: f64::INFINITY },
        Cause::LargeInV => Plant::At(Operand::V, key, dtype.max_finite()),
    };
    let data = Data { init, ..data(&name) };
    planted(name, problem, lengths, data, plant)
}

fn problem(dtype: DType, variant: &str) -> (FwdProblem, Lengths) {
    let mut dims = dims();
    match variant {
        "ratio4" | "ratio4_few_rows" => dims.num_heads_q = 4,
        "ratio3_group" => (dims.num_heads_q, dims.num_heads_kv) = (6, 2),
        // Heads are not packed here, so the bias may be loaded by TMA.
        "narrow_bias" => dims.num_heads_kv = 2,
        _ => {}
    }
    if variant == "ratio4_few_rows" {
        dims.seqlen_q = 50;
    }
    let packed = ["group", "gaps", "ratio3_group", "negative_scale_group", "column_major_v_group"];
    let (mut problem, mut lengths) = if packed.contains(&variant) {
        let sequences = [(dims.seqlen_q - 5, 336), (dims.seqlen_q, 424)];
        (group(dtype, dims, &sequences, "b"), Lengths::packed(&sequences))
    } else {
        (masked(dtype, dims, "b"), Lengths::default())
    };
    match variant {
        "f32_output" => problem.dtypes.o = DType::F32,
        "gaps" => {
            (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true);
            (lengths.seqused_q, lengths.seqused_k) = (vec![50, 66], vec![330, 415]);
        }
        "negative_scale" | "negative_scale_group" => problem.score.softmax_scale = Some(-0.2),
        "column_major_v" | "column_major_v_group" => {
            // Extents of all rows, which lie side by side, not of the longest sequence's.
            let v = problem.extents(lengths.totals).v;
            (problem.layout.v, problem.strides.v) = (VLayout::ColMajor, Strides::bhds(v));
        }
        "unmasked" => problem.mask = MaskSpec::NONE,
        "window" => problem.mask = "b:300,2".parse().unwrap_or(MaskSpec::NONE),
        "sink_columns" => problem.mask = "b:100,0,30".parse().unwrap_or(MaskSpec::NONE),
        "softcap" => problem.score.softcap = Some(30.0),
        "bias" | "narrow_bias" => {
            let broadcast = BiasBroadcast::BatchHead;
            let strides = Strides::bhsd(problem.shape_bias(broadcast));
            let of_bias = if variant == "bias" { DType::F32 } else { dtype };
            problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: of_bias, broadcast, strides });
        }
        "alibi" => problem.score.bias = Bias::Alibi { per_batch: true },
        "sink" => problem.score.sink = true,
        "dropout" => problem.dropout.p_drop = 0.2,
        _ => {}
    }
    (problem, lengths)
}
