//! Assignment of heads to rows: ratios of query to kv heads that are no powers of 2, and rows that end one row
//! after a tile.

use fmha_core::{Bias, BwdProblem, DType, Dims, FwdProblem};

use super::edges::{data, group, masked};
use crate::case::Case;
use crate::tensors::Lengths;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ratio in [3, 5, 6, 7] {
        for num_heads_kv in [2, 3] {
            ratios(ratio, num_heads_kv, &mut cases);
        }
    }
    for ratio in [2, 5, 16] {
        // All query heads share one kv head.
        let name = format!("heads/mqa/bf16/h{ratio}/s9x70/b");
        let problem = masked(DType::Bf16, dims(9, 70, ratio, 1), "b");
        push(&mut cases, name, problem, Lengths::default());
    }
    for dtype in [DType::F16, DType::Bf16] {
        for (seqlen_q, ratio) in
            [(65, 1), (129, 1), (193, 1), (257, 1), (33, 2), (65, 2), (43, 3), (65, 3), (13, 5), (9, 7)]
        {
            row_blocks(dtype, seqlen_q, ratio, &mut cases);
        }
    }
    cases
}

fn dims(seqlen_q: u32, seqlen_k: u32, ratio: u32, num_heads_kv: u32) -> Dims {
    Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(ratio * num_heads_kv, num_heads_kv).head_dim(64)
}

fn push(cases: &mut Vec<Case>, name: String, problem: FwdProblem, lengths: Lengths) {
    let data = data(&name);
    cases.push(Case::forward(name, problem, lengths, data));
}

/// Cases with so few queries that kernels pack a kv head's query heads into one tile, and with so many that they
/// need not; slopes and sinks depend on the query head, K and V on the kv head.
fn ratios(ratio: u32, num_heads_kv: u32, cases: &mut Vec<Case>) {
    for dtype in [DType::F32, DType::Bf16] {
        for (seqlen_q, seqlen_k) in [(3, 70), (70, 45)] {
            let dims = dims(seqlen_q, seqlen_k, ratio, num_heads_kv);
            let what = format!("{dtype}/ratio{ratio}kv{num_heads_kv}/s{seqlen_q}x{seqlen_k}");
            push(cases, format!("heads/batch/{what}"), masked(dtype, dims, "0"), Lengths::default());
            let sequences = [(seqlen_q, seqlen_k - 9), (seqlen_q / 2, seqlen_k)];
            let problem = group(dtype, dims, &sequences, "0");
            push(cases, format!("heads/group/{what}"), problem, Lengths::packed(&sequences));

            let mut problem = masked(dtype, dims, "0");
            problem.score.sink = true;
            push(cases, format!("heads/sinks/{what}"), problem, Lengths::default());
            let mut problem = masked(dtype, dims, "0");
            problem.score.bias = Bias::Alibi { per_batch: true };
            push(cases, format!("heads/alibi/{what}"), problem, Lengths::default());
        }
        let problem = BwdProblem::new(masked(dtype, dims(33, 20, ratio, num_heads_kv), "b"));
        let name = format!("heads/backward/{dtype}/ratio{ratio}kv{num_heads_kv}");
        let data = data(&name);
        cases.push(Case::backward(name, problem, Lengths::default(), data));
    }
}

/// A launch for packed sequences needs another block of rows for a single row after the last full block.
fn row_blocks(dtype: DType, seqlen_q: u32, ratio: u32, cases: &mut Vec<Case>) {
    let sequences = [(seqlen_q, 40), (1, 9), (seqlen_q, 33)];
    let dims = Dims { batch: 3, ..dims(seqlen_q, 40, ratio, 2) };
    for mask in ["0", "b"] {
        let name = format!("heads/row_blocks/{dtype}/q{seqlen_q}/ratio{ratio}/{mask}");
        push(cases, name, group(dtype, dims, &sequences, mask), Lengths::packed(&sequences));
    }
}
