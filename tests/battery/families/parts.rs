//! Calls that are a part of a larger one: mask, ALiBi and dropout see the positions, sequence and head of the whole.

use fmha_core::expr::draw::{self, Kind};
use fmha_core::{Bias, BwdProblem, DType, Dims, FwdProblem, Part};

use super::edges::{data, masked};
use crate::case::Case;
use crate::tensors::Lengths;

/// First keys of a part: at the start of a group of four keys, which one call of dropout's generator decides, and
/// inside one.
const POSITIONS_K: [(u32, &str); 2] = [(132, "quad"), (133, "between_quads")];

/// Other positions in a group of four keys, tried with one mask only.
const REST_OF_QUAD: [(u32, &str); 2] = [(134, "two_on"), (135, "three_on")];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for at in POSITIONS_K {
            for modifier in ["alibi", "dropout", "alibi_dropout"] {
                for mask in ["0", "b", "t:150,20,140"] {
                    // The whole has lengths of its own, or ends where the part ends.
                    for end in [(Some([300, 411]), "inside"), (None, "at_the_end")] {
                        cases.extend(both_ways(dtype, at, modifier, mask, end));
                    }
                }
            }
        }
        for end in [(Some([300, 411]), "inside"), (None, "at_the_end")] {
            cases.extend(both_ways(dtype, POSITIONS_K[1], "code", "b", end));
        }
        for at in REST_OF_QUAD {
            cases.extend(both_ways(dtype, at, "dropout", "b", (Some([300, 411]), "inside")));
        }
    }
    cases
}

/// The forward and the backward case of a part whose keys begin at `position_k`.
fn both_ways(
    dtype: DType,
    (position_k, place): (u32, &str),
    modifier: &str,
    mask: &str,
    (seqlens, end): (Option<[u32; 2]>, &str),
) -> [Case; 2] {
    let part = Part { position_q: 70, position_k, seqlens, batch: 3, head: 4, num_heads_q: Some(11) };
    let problem = part_of(dtype, mask, modifier, part);
    let name = format!("parts/{dtype}/{modifier}/{mask}/{place}/{end}");
    let numbers = data(&name);
    let backward = format!("backward/{name}");
    let numbers_of_backward = data(&backward);
    [
        Case::forward(name, problem.clone(), Lengths::default(), numbers),
        Case::backward(backward, BwdProblem::new(problem), Lengths::default(), numbers_of_backward),
    ]
}

fn part_of(dtype: DType, mask: &str, modifier: &str, part: Part) -> FwdProblem {
    let dims = Dims::batch(2).seqlens(75, 150).heads(2, 1).head_dim(64);
    let mut problem = masked(dtype, dims, mask).part(part);
    if modifier.contains("alibi") {
        problem.score.bias = Bias::Alibi { per_batch: false };
    }
    if modifier == "code" {
        problem.code.score = draw::score(5, Kind::Bare).ok();
        problem.code.mask = draw::mask(5, Kind::Bare).ok();
    }
    if modifier.contains("dropout") {
        problem.dropout.p_drop = 0.3;
    }
    problem
}
