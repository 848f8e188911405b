//! Lists of keys for tiled kernels: a tile has the query heads of one token and kv head, and reads the keys of its
//! list.

use fmha_core::masks::Masks;
use fmha_core::{Bias, FwdProblem, KvLayout, MaskSpec, QLayout, VLayout};

/// Checks that a problem with lists has no option that needs key positions, for a kernel that only has places in a
/// list.
///
/// # Errors
/// The option that needs positions, or a column-major V.
pub fn takes_places(problem: &FwdProblem, kernel: &'static str) -> Result<(), String> {
    let Some(lists) = &problem.lists else { return Ok(()) };
    let beside = if problem.score.bias != Bias::None {
        format!("bias {:?}", problem.score.bias)
    } else if problem.drops() {
        format!("p_drop {}", problem.dropout.p_drop)
    } else if problem.layout.v == VLayout::ColMajor {
        "v_layout col-major".to_owned()
    } else if let Err(refusal) = problem.code.refuse(kernel) {
        refusal.reason
    } else {
        return Ok(());
    };
    Err(format!("{beside} beside indices of topk {} is not in this kernel", lists.topk))
}

/// The problem over lists with each token as a sequence of one query whose keys are those of its list. Tiles are
/// chosen for this problem.
#[must_use]
pub fn of_tokens(problem: &FwdProblem) -> FwdProblem {
    let mut tokens = problem.clone();
    let dims = &mut tokens.dims;
    (dims.batch, dims.seqlen_q) = (dims.batch.saturating_mul(dims.seqlen_q), 1);
    dims.seqlen_k = problem.most_walked_keys();
    (tokens.layout.q, tokens.layout.kv) = (QLayout::Batch, KvLayout::Strided);
    (tokens.layout.seqused_q, tokens.layout.seqused_k) = (false, false);
    (tokens.mask, tokens.masks) = (MaskSpec::NONE, Masks::default());
    tokens
}
