//! Alignment and strides: each operand misaligned while the others are aligned, each with strides of its own, and
//! column-major V with an incomplete last tile.

use fmha_core::{Bias, BiasBroadcast, DType, Dims, ElementwiseBias, FwdProblem, Strides, VLayout};

use super::edges::{data, masked};
use crate::case::{Body, Case, Plant};
use crate::tensor::Operand;
use crate::tensors::{Lengths, padded};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        ragged_columns(dtype, &mut cases);
    }
    for dtype in [DType::F32, DType::Bf16] {
        apart(dtype, &mut cases);
    }
    cases
}

fn dims(seqlen_q: u32, seqlen_k: u32, head_dim: u32) -> Dims {
    Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(2, 1).head_dim(head_dim)
}

/// Rows of V^T that end inside a tile of keys: contiguous rows, of which the last ends the tensor, and rows with
/// NaN between them.
fn ragged_columns(dtype: DType, cases: &mut Vec<Case>) {
    for head_dim in [64, 128] {
        // The last tile has few keys, most of a tile's keys, or all.
        for seqlen_k in [129, 200, 256, 300, 333] {
            for (gap, what) in [(0, "dense"), (3, "odd_gap"), (8, "gap")] {
                let mut problem = masked(dtype, dims(40, seqlen_k, head_dim), "0");
                let dim = i64::from(seqlen_k) + gap;
                let head = dim * i64::from(head_dim);
                problem.layout.v = VLayout::ColMajor;
                problem.strides.v = Strides { batch: head, seq: 1, head, dim };
                let name = format!("addresses/ragged_columns/{dtype}/k{seqlen_k}/d{head_dim}/{what}");
                let data = data(&name);
                cases.push(Case::forward(name, problem, Lengths::default(), data));
            }
        }
    }
}

/// One operand has an odd address or odd strides, and the others do not.
fn apart(dtype: DType, cases: &mut Vec<Case>) {
    let everything = || {
        let mut problem = masked(dtype, dims(37, 150, 64), "b");
        let broadcast = BiasBroadcast::OneHead;
        let strides = Strides::bhsd(problem.shape_bias(broadcast));
        problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
        problem
    };
    let tensors = [("q", Operand::Q), ("k", Operand::K), ("v", Operand::V), ("o", Operand::O)];
    for (what, operand) in tensors.into_iter().chain([("lse", Operand::Lse), ("bias", Operand::Bias)]) {
        let name = format!("addresses/shifted_apart/{dtype}/{what}");
        let problem =
            if operand == Operand::Bias { everything() } else { masked(dtype, dims(37, 150, 64), "b") };
        let data = data(&name);
        let mut case = Case::forward(name, problem, Lengths::default(), data);
        if let Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::Shifted(operand, 1);
        }
        cases.push(case);
    }
    for (what, operand) in tensors {
        let mut problem = masked(dtype, dims(37, 150, 64), "b");
        let shape = match operand {
            Operand::Q => problem.shape_q(),
            Operand::K => problem.shape_k(),
            Operand::V => problem.shape_v(),
            _ => problem.shape_o(),
        };
        *strides_of(&mut problem, operand) = padded(shape, 1);
        let name = format!("addresses/strided_apart/{dtype}/{what}");
        let data = data(&name);
        cases.push(Case::forward(name, problem, Lengths::default(), data));
    }
}

fn strides_of(problem: &mut FwdProblem, operand: Operand) -> &mut Strides {
    match operand {
        Operand::Q => &mut problem.strides.q,
        Operand::K => &mut problem.strides.k,
        Operand::V => &mut problem.strides.v,
        _ => &mut problem.strides.o,
    }
}
