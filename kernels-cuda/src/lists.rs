//! Lists of keys as tiles see them: a tile has query heads of one token and kv head, and walks its list.

use fmha_core::mask::MaskKind;
use fmha_core::spec::FwdSpec;
use fmha_core::{Bias, FwdProblem, KvLayout, MaskSpec, QLayout, VLayout};

use crate::schedule::{MAX_TILES, TileSchedule};

/// Last parameter of an entry.
pub(crate) const PARAM: &str = ", const __grid_constant__ ListParams lists";

/// Spec of a kernel over lists, which hides keys by what stands at a place, and whose absent keys come as zeros.
pub(crate) fn spec(spec: FwdSpec) -> FwdSpec {
    FwdSpec { mask: MaskKind::Full, sink_columns: false, ..spec }
}

/// Whether a kernel that sees places in a list, not positions, takes what a problem has beside its lists.
///
/// # Errors
/// What asks for positions, or for columns of V.
pub(crate) fn takes_places(problem: &FwdProblem, kernel: &'static str) -> Result<(), String> {
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

/// A problem over lists with each token as a sequence of one query, whose keys are a list's: what tiles are
/// chosen for.
pub(crate) fn of_tokens(problem: &FwdProblem) -> FwdProblem {
    let mut tokens = problem.clone();
    let dims = &mut tokens.dims;
    (dims.batch, dims.seqlen_q) = (dims.batch.saturating_mul(dims.seqlen_q), 1);
    dims.seqlen_k = problem.most_walked_keys();
    (tokens.layout.q, tokens.layout.kv) = (QLayout::Batch, KvLayout::Strided);
    (tokens.layout.seqused_q, tokens.layout.seqused_k) = (false, false);
    tokens.mask = MaskSpec::NONE;
    tokens
}

/// Schedule of the tiles of every token, sequences of the longest's; `rows` heads of a group to a tile, and
/// the parts of a list tiles of their own.
///
/// # Errors
/// More tiles than a schedule counts.
pub(crate) fn schedule(problem: &FwdProblem, rows: u32, kv_parts: u32) -> Result<TileSchedule, String> {
    let dims = problem.dims;
    let num_m_blocks = u64::from(dims.seqlen_q) * u64::from(problem.gqa_ratio().div_ceil(rows.max(1)));
    let heads = u64::from(dims.batch) * u64::from(dims.num_heads_kv);
    let num_heads = heads.saturating_mul(kv_parts.into());
    let num_tiles = num_heads.saturating_mul(num_m_blocks);
    if num_tiles > MAX_TILES.unsigned_abs() {
        return Err(format!(
            "batch {}, seqlen_q {} and num_heads_q {} make {num_tiles} tiles of {rows} heads of a token, more than \
             {MAX_TILES}",
            dims.batch, dims.seqlen_q, dims.num_heads_q
        ));
    }
    Ok(TileSchedule {
        num_tiles: num_tiles as i32,
        num_m_blocks: num_m_blocks as i32,
        first_m_block: 0,
        num_heads: num_heads as i32,
        heads_per_l2_group: 1,
    })
}
