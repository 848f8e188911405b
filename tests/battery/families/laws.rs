//! Cases of pairs of calls whose results must agree.

use fmha_core::{Bias, DType, Dims, FwdProblem};

use super::edges::{data, masked};
use crate::case::{Body, Case, Forward, Plant};
use crate::law::{Law, LawKind};
use crate::tensors::Lengths;

const KINDS: [(&str, LawKind); 10] = [
    ("group_of_equal_lengths_is_batch", LawKind::GroupIsBatch),
    ("column_major_v_is_row_major_v", LawKind::ColMajorIsRowMajor),
    ("any_layout_gives_the_same", LawKind::AnyLayout),
    ("gqa_is_mha_with_keys_repeated", LawKind::GqaIsMha),
    ("permuted_batch_permutes_the_output", LawKind::PermutedBatch),
    ("twice_gives_the_same_bits", LawKind::Twice),
    ("a_recorded_call_replays_with_new_lengths", LawKind::Recorded),
    ("a_window_of_everything_is_no_mask", LawKind::WideWindowIsNone),
    ("two_parts_combine_to_the_whole", LawKind::SplitsCombine(2)),
    ("five_parts_combine_to_the_whole", LawKind::SplitsCombine(5)),
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let dtypes = [DType::F32, DType::F16, DType::Bf16, DType::E4m3Fn, DType::E5m2Fnuz];
    for (law, kind) in KINDS {
        for dtype in dtypes {
            for (seqlen_q, seqlen_k, head_dim) in [(33, 47, 64), (70, 130, 32), (1, 200, 128)] {
                for mask in masks(kind) {
                    let dims = Dims::batch(3).seqlens(seqlen_q, seqlen_k).heads(4, 2).head_dim(head_dim);
                    let name = format!("laws/{law}/{dtype}/s{seqlen_q}x{seqlen_k}/d{head_dim}/{mask}");
                    let mut problem = masked(dtype, dims, mask);
                    modify(&mut problem, kind);
                    let forward = Forward {
                        problem,
                        lengths: lengths(kind, dims),
                        data: data(&name),
                        plant: Plant::Nothing,
                    };
                    cases.push(Case { name, body: Body::Law(Box::new(Law { forward, kind })) });
                }
            }
        }
    }
    cases
}

fn masks(kind: LawKind) -> &'static [&'static str] {
    match kind {
        LawKind::WideWindowIsNone => &["0"],
        // Only generic coordinates let the mask move with the keys.
        LawKind::SplitsCombine(_) => &["0", "g:30,12"],
        _ => &["0", "b", "b:9,3"],
    }
}

/// Sequences get different lengths if the law is about them; otherwise all rows are in use.
fn lengths(kind: LawKind, dims: Dims) -> Lengths {
    if kind != LawKind::Recorded {
        return Lengths::default();
    }
    let some = |most: u32| [most, most / 2, 0].map(u32::cast_signed).to_vec();
    let others = |most: u32| [most / 3, most, 1].map(u32::cast_signed).to_vec();
    Lengths { seqused_q: some(dims.seqlen_q), seqused_k: others(dims.seqlen_k), ..Lengths::default() }
}

/// Adds modifiers of the contract for which the law holds.
fn modify(problem: &mut FwdProblem, kind: LawKind) {
    match kind {
        LawKind::GroupIsBatch | LawKind::Twice => {
            problem.dropout.p_drop = 0.2;
            problem.score.sink = true;
            problem.score.bias = Bias::Alibi { per_batch: true };
        }
        LawKind::ColMajorIsRowMajor | LawKind::AnyLayout => problem.score.softcap = Some(9.0),
        LawKind::GqaIsMha => problem.score.bias = Bias::Alibi { per_batch: false },
        LawKind::Recorded => (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true),
        _ => {}
    }
}
