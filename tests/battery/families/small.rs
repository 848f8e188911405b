//! Small outputs of forward: each row's and each head's greatest score, and each key's sum of probabilities, singly
//! or all together, with every mask, modifier and layout. The family `code` has them with functions.

use fmha_core::{DType, Dims, FwdProblem};

use super::decode::in_pages;
use super::edges::{data, group, masked};
use super::{backward, code, masks};
use crate::case::{Case, Plant};
use crate::tensor::Operand;
use crate::tensors::Lengths;

/// Packed sequences: without queries, without keys, of one tile and of several.
const SEQUENCES: [(u32, u32); 5] = [(0, 9), (33, 70), (17, 0), (70, 65), (1, 130)];

const WIDE: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// Makes the problem return the small outputs that the bits of `which` choose.
fn wanting(problem: FwdProblem, which: u32) -> FwdProblem {
    problem.row_max(which & 1 != 0).head_max(which & 2 != 0).key_sum(which & 4 != 0)
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let dims = |head_dim| Dims::batch(2).seqlens(70, 130).heads(4, 2).head_dim(head_dim);
    let mut push = |name: String, problem: FwdProblem, lengths| {
        let data = data(&name);
        cases.push(Case::forward(name, problem, lengths, data));
    };
    for dtype in WIDE {
        for (which, head_dim, mask) in
            [(1, 64, "0"), (2, 64, "b"), (4, 64, "b"), (7, 128, "b"), (7, 40, "b:20,3,4"), (5, 256, "t:7,3")]
        {
            let name = format!("small/mask/{dtype}/d{head_dim}/{mask}/{which}");
            push(name, wanting(masked(dtype, dims(head_dim), mask), which), Lengths::default());
        }
        for modifier in ["softcap", "dropout", "sink", "bias_16", "alibi", "softcap_alibi_sink"] {
            let name = format!("small/modifier/{dtype}/{modifier}");
            let fwd = backward::modified(masked(dtype, dims(64), "b"), modifier).fwd;
            push(name, wanting(fwd, 7), Lengths::default());
        }
        let name = format!("small/scale/{dtype}/negative");
        push(name, wanting(masked(dtype, dims(64), "b").softmax_scale(-0.2), 7), Lengths::default());
        let name = format!("small/lengths/{dtype}/packed");
        push(name, wanting(group(dtype, dims(64), &SEQUENCES, "b"), 7), Lengths::packed(&SEQUENCES));
        let used = masked(dtype, dims(64), "b").seqused_q(true).seqused_k(true);
        let lengths = Lengths { seqused_q: vec![70, 41], seqused_k: vec![99, 130], ..Lengths::default() };
        push(format!("small/lengths/{dtype}/used"), wanting(used, 7), lengths);
        let name = format!("small/lengths/{dtype}/few_queries");
        push(name, wanting(masked(dtype, Dims { seqlen_q: 3, ..dims(128) }, "b"), 7), Lengths::default());
        let name = format!("small/lengths/{dtype}/no_queries");
        push(name, wanting(masked(dtype, Dims { seqlen_q: 0, ..dims(64) }, "b"), 7), Lengths::default());
        let name = format!("small/lengths/{dtype}/paged");
        let paged = masked(dtype, dims(64), "b").seqused_k(true);
        let lengths = Lengths { seqused_k: vec![99, 130], ..Lengths::default() };
        let (paged, lengths) = in_pages(paged, 16, lengths, &name);
        push(name, wanting(paged, 7), lengths);
    }
    for (at, variant) in
        ["batch", "group", "used", "window", "bias", "sink", "strides", "paged"].into_iter().enumerate()
    {
        for (nth, kind) in ["intervals", "bits", "lists"].into_iter().enumerate() {
            let dtype = WIDE[(at + nth) % 3];
            let (problem, lengths) = masks::problem(dtype, variant, kind, (3 * at + nth) as u64);
            push(format!("small/masks/{dtype}/{variant}/{kind}"), wanting(problem, 7), lengths);
        }
    }
    for (nth, kind) in ["intervals", "bits", "full", "lists", "all"].into_iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][nth % 2];
        let (problem, lengths) = masks::problem(dtype, "code", kind, 40 + nth as u64);
        push(format!("small/masks/{dtype}/code/{kind}"), wanting(problem, 7), lengths);
    }
    for (at, variant) in ["batch", "group", "softcap", "alibi", "sink", "window"].into_iter().enumerate() {
        for (nth, what) in ["score", "mask", "both"].into_iter().enumerate() {
            let dtype = WIDE[(at + nth) % 3];
            let (problem, lengths) = code::problem(dtype, variant, what, (3 * at + nth) as u64);
            push(format!("code/small/{dtype}/{variant}/{what}"), wanting(problem, 7), lengths);
        }
    }
    for dtype in [DType::E4m3Fn, DType::E4m3Fnuz] {
        push(format!("small/fp8/{dtype}"), wanting(masked(dtype, dims(64), "b"), 7), Lengths::default());
    }
    // A query's NaN reaches its row's maximum, its head's maximum, and the sums of keys that the row sees; a key's
    // NaN reaches the rows that see it.
    for (operand, what) in [(Operand::Q, "query"), (Operand::K, "key")] {
        let name = format!("small/nan/bf16/{what}");
        let mut case = Case::forward(
            name.clone(),
            wanting(masked(DType::Bf16, dims(64), "b"), 7),
            Lengths::default(),
            data(&name),
        );
        if let crate::case::Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::At(operand, [0, 50, 1, 3], f64::NAN);
        }
        cases.push(case);
    }
    cases
}
