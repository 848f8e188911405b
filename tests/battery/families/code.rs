//! Scores and masks as code, whose expressions are drawn from a seed.

use fmha_core::expr::draw::{self, Kind};
use fmha_core::{Bias, BwdProblem, DType, Dims, FwdProblem};

use super::edges::{data, group, masked};
use crate::case::Case;
use crate::tensors::Lengths;

/// Modifiers of a score, and layouts of the tensors.
const VARIANTS: [&str; 10] = [
    "batch",
    "group",
    "used",
    "softcap",
    "alibi",
    "sink",
    "dropout",
    "window",
    "few_queries",
    "negative_scale",
];

/// Packed sequences: without queries, without keys, with one tile and with several.
const SEQUENCES: [(u32, u32); 5] = [(0, 9), (33, 70), (17, 0), (70, 65), (1, 130)];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut seed = 0;
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for variant in VARIANTS {
            for what in ["score", "mask", "both"] {
                seed += 1;
                let (problem, lengths) = problem(dtype, variant, what, seed);
                let name = format!("code/forward/{dtype}/{variant}/{what}{seed}");
                let drawn = data(&name);
                cases.push(Case::forward(name, problem.clone(), lengths.clone(), drawn));
                let name = format!("code/backward/{dtype}/{variant}/{what}{seed}");
                let drawn = data(&name);
                cases.push(Case::backward(name, BwdProblem::new(problem), lengths, drawn));
            }
        }
    }
    bounds(&mut cases);
    built_in(&mut cases);
    cases
}

/// Masks whose bounds decide most tiles, over tiles of every size: fully visible, hidden and partly masked ones.
fn bounds(cases: &mut Vec<Case>) {
    let dims = Dims::batch(2).seqlens(300, 300).heads(2, 1).head_dim(32);
    // Heads enough that kernels have the mask in bits, of rows that end within a word.
    let of_heads = Dims { num_heads_q: 4, seqlen_q: 290, seqlen_k: 330, ..dims };
    let blocks = "(q // 64 == k // 64 or k // 96 < q // 128) and not (b == 1 and k >= 256)";
    for (what, dims, text) in [
        ("causal", dims, "k <= q"),
        ("window", dims, "abs(q - k) <= 20"),
        ("prefix", dims, "k < 140 or k <= q"),
        ("blocks", dims, blocks),
        ("staircase", dims, "k // 8 <= q // 8"),
        ("ring", dims, "abs(q - k) <= 20 or k == q + 150"),
        ("heads_neighbourhood", of_heads, "abs(q // 17 - k // 17) <= 2 and abs(q % 17 - k % 17) <= 2"),
        ("heads_blocks", of_heads, blocks),
    ] {
        let problem = masked(DType::Bf16, dims, "0").mask_code(text.parse().ok());
        let name = format!("code/forward/bf16/bounds/mask_{what}");
        let drawn = data(&name);
        cases.push(Case::forward(name, problem.clone(), Lengths::default(), drawn));
        let name = format!("code/backward/bf16/bounds/mask_{what}");
        let drawn = data(&name);
        cases.push(Case::backward(name, BwdProblem::new(problem), Lengths::default(), drawn));
    }
}

/// Functions that kernels have built in, whole or in part: of fewer keys than queries, packed, and beside a band.
fn built_in(cases: &mut Vec<Case>) {
    let dims = Dims::batch(2).seqlens(150, 130).heads(4, 2).head_dim(32);
    let longer = Dims { seqlen_q: 70, ..dims };
    let masks = [
        ("mask_causal", dims, "k <= q", "0"),
        ("mask_before", dims, "q - k >= 5 and q - k < 60", "0"),
        ("mask_beyond", longer, "k - q >= 30 and k - q <= 90", "0"),
        ("mask_end", longer, "not (k - q > seqlen_k - seqlen_q)", "0"),
        ("mask_beside", longer, "q + 2 >= k", "b:50,-1"),
        ("mask_dilated", dims, "k <= q and (q - k) % 3 == 0", "0"),
        ("mask_packed", longer, "k <= q + 3", "0"),
        ("mask_packed_end", longer, "k - q <= seqlen_k - seqlen_q", "b"),
    ];
    let scores = [
        ("score_softcap", longer, "3.0 * tanh(s / 3.0)", "b"),
        ("score_scale", longer, "s * 1.5", "t:20,4"),
        ("score_softened_scale", dims, "2.0 * tanh(s * 0.25)", "0"),
    ];
    for (what, dims, text, band) in masks.into_iter().chain(scores) {
        let (mut problem, mut lengths) = (masked(DType::Bf16, dims, band), Lengths::default());
        if what.starts_with("mask_packed") {
            problem = group(DType::Bf16, dims, &SEQUENCES, band);
            lengths = Lengths::packed(&SEQUENCES);
        }
        problem = match what.starts_with("mask") {
            true => problem.mask_code(text.parse().ok()),
            false => problem.score_code(text.parse().ok()),
        };
        let name = format!("code/forward/bf16/built_in/{what}");
        let drawn = data(&name);
        cases.push(Case::forward(name, problem.clone(), lengths.clone(), drawn));
        let name = format!("code/backward/bf16/built_in/{what}");
        let drawn = data(&name);
        cases.push(Case::backward(name, BwdProblem::new(problem), lengths, drawn));
    }
}

pub(super) fn problem(dtype: DType, variant: &str, what: &str, seed: u64) -> (FwdProblem, Lengths) {
    let seqlen_q = if variant == "few_queries" { 3 } else { 70 };
    let dims = Dims::batch(2).seqlens(seqlen_q, 130).heads(4, 2).head_dims(32, 24);
    let (mut problem, mut lengths) = (masked(dtype, dims, "0"), Lengths::default());
    match variant {
        "group" => {
            problem = group(dtype, dims, &SEQUENCES, "b");
            lengths = Lengths::packed(&SEQUENCES);
        }
        "used" => {
            problem = problem.seqused_q(true).seqused_k(true);
            (lengths.seqused_q, lengths.seqused_k) = (vec![70, 41], vec![99, 130]);
        }
        "softcap" => problem = problem.softcap(2.0),
        "alibi" => problem = problem.bias(Bias::Alibi { per_batch: false }),
        "sink" => problem = problem.sink(true),
        "dropout" => problem = problem.p_drop(0.3),
        "window" => problem = masked(dtype, dims, "b:40,3,2"),
        "negative_scale" => problem = problem.softmax_scale(-0.2),
        _ => {}
    }
    // Expressions without captures, which a draw always gives.
    if what != "mask" {
        problem = problem.score_code(draw::score(seed, Kind::Bare).ok());
    }
    if what != "score" {
        problem = problem.mask_code(draw::mask(seed, Kind::Bare).ok());
    }
    (problem, lengths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_has_the_functions_that_its_name_says() {
        for case in cases() {
            let Some(problem) = case.problem() else { panic!("{} has no problem", case.name) };
            let has = (problem.code.score.is_some(), problem.code.mask.is_some());
            let wanted = (!case.name.contains("/mask"), !case.name.contains("/score"));
            assert_eq!(has, wanted, "{}", case.name);
            assert!(problem.code.captured.is_empty() && problem.code.numbers().is_empty(), "{}", case.name);
        }
    }
}
