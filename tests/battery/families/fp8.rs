//! FP8: both schemes, every descale, every output type, V both ways.

use fmha_core::{DType, Descale, Dims, FwdProblem, Shape, Strides, VLayout};

use super::edges::{data, group, masked};
use crate::case::{Body, Case, Plant};
use crate::init::Init;
use crate::tensor::Operand;
use crate::tensors::{Data, Lengths, padded};

const FP8: [DType; 4] = [DType::E4m3Fn, DType::E5m2, DType::E4m3Fnuz, DType::E5m2Fnuz];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FP8 {
        for dtype_v in [dtype, DType::F16, DType::Bf16] {
            for (kind, descale) in
                [("plain", Descale::None), ("tensor", Descale::PerTensor), ("head", Descale::PerKvHead)]
            {
                for dtype_o in [DType::F16, DType::Bf16, DType::F32, dtype] {
                    for (layout, mask) in [(VLayout::RowMajor, "b"), (VLayout::ColMajor, "0")] {
                        let scheme = if dtype_v == dtype { "all".into() } else { format!("v_{dtype_v}") };
                        let letter = if layout == VLayout::RowMajor { 'r' } else { 'c' };
                        let name = format!("fp8/{scheme}/{dtype}/o_{dtype_o}/descale_{kind}/{letter}/{mask}");
                        let mut problem = small(dtype, mask);
                        problem.dtypes.v = dtype_v;
                        problem.dtypes.o = dtype_o;
                        problem.scales.scale_o = dtype_o.is_fp8();
                        (problem.scales.descale_q, problem.scales.descale_k) = (descale, descale);
                        if dtype_v.is_fp8() {
                            problem.scales.descale_v = descale;
                        }
                        if layout == VLayout::ColMajor {
                            problem.layout.v = layout;
                            problem.strides.v = Strides::bhds(problem.shape_v());
                        }
                        let data = data(&name);
                        cases.push(Case::forward(name, problem, Lengths::default(), data));
                    }
                }
            }
        }
        for init in Init::ALL {
            let name = format!("fp8/numbers/{init}/{dtype}");
            let data = Data { init, ..data(&name) };
            cases.push(Case::forward(name, small(dtype, "b"), Lengths::default(), data));
        }
        for head_dim in [1, 5, 16, 31, 64, 100, 128, 192, 256] {
            let mut dims = small(dtype, "b").dims;
            (dims.head_dim_qk, dims.head_dim_v) = (head_dim, head_dim);
            let name = format!("fp8/head_dim/{dtype}/d{head_dim}");
            let data = data(&name);
            cases.push(Case::forward(name, masked(dtype, dims, "b"), Lengths::default(), data));
        }
        // Rows of O end within a word.
        let dims = Dims { head_dim_qk: 31, head_dim_v: 31, ..small(dtype, "b").dims };
        let odd = masked(dtype, dims, "b").dtype_o(dtype).scale_o(true);
        let name = format!("fp8/head_dim/{dtype}/d31_o_fp8");
        cases.push(Case::forward(name.clone(), odd, Lengths::default(), data(&name)));
        // Beyond the type's range a scaled O must saturate, not wrap or become NaN. Query 0 sees key 0 alone, and
        // one element of its V is the type's largest number.
        let mut problem = small(dtype, "t");
        problem.dtypes.o = dtype;
        problem.scales.scale_o = true;
        problem.scales.descale_v = Descale::PerTensor;
        let data = data(dtype.name());
        for (what, sign) in [("", 1.0), ("_below", -1.0)] {
            let (problem, name) = (problem.clone(), format!("fp8/output_saturates{what}/{dtype}"));
            let mut case = Case::forward(name, problem, Lengths::default(), data);
            if let Body::Forward(forward) = &mut case.body {
                forward.plant = Plant::At(Operand::V, [1, 0, 1, 9], sign * dtype.max_finite());
            }
            cases.push(case);
        }
    }
    blocks(&mut cases);
    cases
}

/// Several blocks of keys at the head dimensions of models, with all other features of a tiled kernel. Every stride
/// is a multiple of 16 bytes, as TMA needs.
fn blocks(cases: &mut Vec<Case>) {
    for dtype in FP8 {
        let o_16_bits = |mut problem: FwdProblem| {
            problem.dtypes.o = DType::Bf16;
            problem
        };
        let of = |qk: u32, v: u32, (seqlen_q, seqlen_k): (u32, u32), mask: &str| {
            let dims = Dims::batch(1).seqlens(seqlen_q, seqlen_k).heads(2, 1).head_dims(qk, v);
            o_16_bits(masked(dtype, dims, mask))
        };
        let mut push = |what: &str, problem: FwdProblem, lengths: Lengths, plant: Plant| {
            let name = format!("fp8/blocks/{dtype}/{what}");
            let mut case = Case::forward(name.clone(), problem, lengths, data(&name));
            if let Body::Forward(forward) = &mut case.body {
                forward.plant = plant;
            }
            cases.push(case);
        };
        for (qk, v) in
            [(64, 64), (96, 96), (128, 128), (192, 128), (160, 160), (192, 192), (224, 224), (256, 256)]
        {
            // Wide row-major V is transposed in shared memory. Without a mask no row is recomputed, so an error there
            // is not hidden.
            let turned = (v > 128).then_some(("0", "r"));
            for (mask, letter) in [("0", "c"), ("b", "r")].into_iter().chain(turned) {
                let mut problem = of(qk, v, (150, 610), mask);
                (problem.scales.descale_q, problem.scales.descale_k, problem.scales.descale_v) =
                    (Descale::PerKvHead, Descale::PerKvHead, Descale::PerKvHead);
                if letter == "c" {
                    columns(&mut problem);
                }
                push(&format!("d{qk}x{v}/{mask}/{letter}"), problem, Lengths::default(), Plant::Nothing);
            }
        }
        for (what, dtype_v) in [("v_f16", DType::F16), ("v_bf16", DType::Bf16)] {
            let problem = of(128, 128, (150, 610), "b").dtype_v(dtype_v);
            push(what, problem, Lengths::default(), Plant::Nothing);
        }
        let plain = |mask| of(128, 128, (150, 610), mask);
        for (what, problem) in [
            ("window", plain("b:200,0")),
            ("softcap", plain("b").softcap(2.0)),
            ("dropout", plain("b").p_drop(0.3)),
            ("dropout_of_8_bits", of(256, 256, (150, 610), "b").p_drop(0.8)),
            ("sink", plain("t").sink(true)),
            ("negative_scale", plain("b").softmax_scale(-0.2)),
            ("few_queries", of(128, 128, (3, 610), "b")),
            ("o_f32", plain("0").dtype_o(DType::F32)),
            ("o_fp8", plain("0").dtype_o(dtype).scale_o(true)),
        ] {
            push(what, problem, Lengths::default(), Plant::Nothing);
        }
        // NaN in rows of K and V that no query sees, and in one that some queries see.
        push("nan_nobody_sees", plain("t"), Lengths::default(), Plant::HiddenKeys);
        // NaN after a sequence's keys, without a mask.
        let lengths = Lengths { seqused_k: vec![577], ..Lengths::default() };
        let used = plain("0").seqused_k(true);
        push("nan_behind_the_keys", used.clone(), lengths.clone(), Plant::HiddenKeys);
        // NaN lies within a word of the column-major V, in the last of its rows.
        let mut used = used;
        columns(&mut used);
        push("nan_behind_the_keys_in_columns", used, lengths, Plant::HiddenKeys);
        let (row, kv) = (40, 0);
        let nan_in_v = |column| Plant::At(Operand::V, [0, row, kv, column], f64::NAN);
        let by_head = Descale::PerKvHead;
        let seen = of(128, 128, (150, 150), "t").descale_q(by_head).descale_k(by_head).descale_v(by_head);
        push("nan_in_v", seen.clone(), Lengths::default(), nan_in_v(5));
        // Recomputed rows are scaled and rounded like other rows.
        push("nan_in_v_o_fp8", seen.clone().dtype_o(dtype).scale_o(true), Lengths::default(), nan_in_v(101));
        // Negative descales reverse the order of scores, like a negative scale.
        push(
            "negative_descale",
            plain("b").descale_q(Descale::PerTensor).descale_k(Descale::PerTensor),
            Lengths::default(),
            Plant::At(Operand::DescaleK, [0; 4], -0.75),
        );
        let sequences = [(70, 70), (1, 300), (33, 0), (130, 257)];
        let dims = plain("b").dims;
        let packed = o_16_bits(group(dtype, dims, &sequences, "b"));
        push("group", packed, Lengths::packed(&sequences), Plant::Nothing);
        // The call has two kv heads with four query heads each.
        let sequences = [(40, 70), (1, 200), (33, 0), (65, 157)];
        let of_heads = Dims { num_heads_q: 8, num_heads_kv: 2, ..of(64, 64, (65, 200), "b").dims };
        let packed = o_16_bits(group(dtype, of_heads, &sequences, "b"));
        push("group_of_heads", packed, Lengths::packed(&sequences), Plant::Nothing);
        // Three cases of V with 256 columns: its rows apart in memory; NaN behind the last key; NaN that a mask hides.
        let wide = |mask| of(256, 256, (70, 300), mask);
        let mut apart = wide("0").descale_v(by_head);
        apart.strides.v = padded(apart.shape_v(), 16);
        push("v_apart", apart, Lengths::default(), Plant::Nothing);
        let lengths = Lengths { seqused_k: vec![261], ..Lengths::default() };
        let used = wide("0").seqused_k(true);
        push("nan_behind_wide_keys", used, lengths, Plant::HiddenKeys);
        push("nan_nobody_sees_of_a_wide_v", wide("t"), Lengths::default(), Plant::HiddenKeys);
        push("nan_in_a_wide_v", wide("t"), Lengths::default(), nan_in_v(203));
        // Above 192 dimensions of V, maxima are compared as integers if none is negative.
        for init in Init::OF_MAXIMA {
            let name = format!("fp8/blocks/{dtype}/d256x256/{init}");
            let data = Data { init, ..data(&name) };
            cases.push(Case::forward(name, of(256, 256, (150, 610), "0"), Lengths::default(), data));
        }
        // A weight of 2^-10 is 0 in E4M3FN, unless P is scaled.
        let faint = plain("b").softmax_scale(std::f32::consts::LN_2);
        let name = format!("fp8/blocks/{dtype}/faint_weights");
        let data = Data { init: Init::ConstantV, ..data(&name) };
        let mut case = Case::forward(name, faint, Lengths::default(), data);
        if let Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::FaintWeights { score: 10.0 };
        }
        cases.push(case);
    }
}

/// Stores V as `[batch, head, dim, seq]`, with the keys of a row padded to 16.
fn columns(problem: &mut FwdProblem) {
    let shape = problem.shape_v();
    problem.layout.v = VLayout::ColMajor;
    problem.strides.v = Strides::bhds(Shape { seq: shape.seq.next_multiple_of(16), ..shape });
}

fn small(dtype: DType, mask: &str) -> FwdProblem {
    let dims = Dims::batch(2).seqlens(30, 41).heads(4, 2).head_dim(32);
    masked(dtype, dims, mask)
}
