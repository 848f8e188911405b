//! FP8: both schemes, every descale, every output type, V both ways.

use fmha_core::{DType, Descale, Dims, FwdProblem, Strides, VLayout};

use super::edges::{data, masked};
use crate::case::{Body, Case, Plant};
use crate::init::Init;
use crate::tensor::Operand;
use crate::tensors::{Data, Lengths};

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
                        problem.dtype_v = dtype_v;
                        problem.dtype_o = dtype_o;
                        problem.scale_o = dtype_o.is_fp8();
                        (problem.descale_q, problem.descale_k) = (descale, descale);
                        if dtype_v.is_fp8() {
                            problem.descale_v = descale;
                        }
                        if layout == VLayout::ColMajor {
                            problem.v_layout = layout;
                            problem.v = Strides::bhds(problem.shape_v());
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
        // Beyond the type's range: a scaled O saturates, it does not wrap or become NaN. Query 0 sees key 0 alone, and
        // one element of its V is the type's largest number.
        let mut problem = small(dtype, "t");
        problem.dtype_o = dtype;
        problem.scale_o = true;
        problem.descale_v = Descale::PerTensor;
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
    cases
}

fn small(dtype: DType, mask: &str) -> FwdProblem {
    let dims = Dims {
        batch: 2,
        seqlen_q: 30,
        seqlen_k: 41,
        num_heads_q: 4,
        num_heads_kv: 2,
        head_dim_qk: 32,
        head_dim_v: 32,
    };
    masked(dtype, dims, mask)
}
