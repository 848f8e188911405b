//! The tables of problems whose kernels a bundle contains.

use crate::bwd::{BwdProblem, ValidBwd};
use crate::dtype::DType;
use crate::error::ProblemError;
use crate::layout::{QLayout, Strides};
use crate::mask::{MaskAlign, MaskShape, MaskSpec};
use crate::problem::{Dims, FwdProblem, Score, ValidFwd};

/// Lengths of a problem: queries and keys.
type Lengths = (u32, u32);

/// Lengths of the table's problems. The short ones lie in the middle of the ranges for which Hopper has different
/// tiles. In the backward, dQ's tile depends on the number of queries, the other launch's on the number of keys.
const LENGTHS: [Lengths; 9] = [
    (1, 4096),
    (96, 96),
    (128, 128),
    (192, 192),
    (208, 208),
    (512, 512),
    (2048, 2048),
    (4096, 4096),
    (16384, 16384),
];

const DTYPES: [DType; 2] = [DType::F16, DType::Bf16];
const DIMS: [(u32, u32); 6] = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
const HEADS_Q: u32 = 32;
const HEADS_KV: [u32; 3] = [32, 8, 4];

const fn sizes(lengths: Lengths, num_heads_kv: u32, head_dims: (u32, u32)) -> Dims {
    let ((seqlen_q, seqlen_k), (head_dim_qk, head_dim_v)) = (lengths, head_dims);
    Dims { batch: 2, seqlen_q, seqlen_k, num_heads_q: HEADS_Q, num_heads_kv, head_dim_qk, head_dim_v }
}

/// A problem of a table.
#[derive(Clone, Debug)]
pub struct TableEntry<P = ValidFwd> {
    /// `bf16/d128x128/causal/batch/lse/q2048k2048/gqa4`.
    pub name: String,
    /// Problem that the backend plans.
    pub problem: P,
}

/// Plain attention in every combination of:
///
/// - f16 and bf16;
/// - `head_dim_qk` x `head_dim_v`: 64, 96, 128, 192 and 256 square, and 192 x 128;
/// - no mask, causal (bottom right), a window of 512 before and none after;
/// - batch and group mode, with and without LSE;
/// - one query over 4096 keys, and 96, 128, 192, 208, 512, 2048, 4096 and 16384 queries and keys: a backend
///   may choose other tiles for other lengths;
/// - 32 query heads over 32, 8 or 4 kv heads.
///
/// Scores have no bias, cap or sink; tensors are dense, b·s·h·d. A backend plans every problem; the kernels that it
/// compiles, each once, are the table of its architecture.
///
/// # Errors
/// None for the table as it stands: each problem is validated.
pub fn forward_table() -> Result<Vec<TableEntry>, ProblemError> {
    const WINDOW: MaskShape =
        MaskShape::Window { left: Some(512), right: Some(0), align: MaskAlign::BottomRight };
    let window = MaskSpec { shape: WINDOW, sink_columns: 0 };
    let masks = [("full", MaskSpec::NONE), ("causal", MaskSpec::CAUSAL), ("window", window)];
    let mut table = Vec::new();
    for dtype in DTYPES {
        for (head_dim_qk, head_dim_v) in DIMS {
            for (mask_name, mask) in masks {
                for (group, write_lse) in [(false, true), (false, false), (true, true), (true, false)] {
                    for &(seqlen_q, seqlen_k) in &LENGTHS {
                        for num_heads_kv in HEADS_KV {
                            let dims = sizes((seqlen_q, seqlen_k), num_heads_kv, (head_dim_qk, head_dim_v));
                            let problem = if group {
                                FwdProblem::group(dtype, dims)
                            } else {
                                FwdProblem::batch(dtype, dims)
                            };
                            let problem = problem.clone().mask(mask).write_lse(write_lse);
                            table.push(TableEntry {
                                name: format!(
                                    "{dtype}/d{head_dim_qk}x{head_dim_v}/{mask_name}/{}/{}/q{seqlen_q}k{seqlen_k}/gqa{}",
                                    if group { "group" } else { "batch" },
                                    if write_lse { "lse" } else { "no-lse" },
                                    HEADS_Q / num_heads_kv,
                                ),
                                problem: problem.validate()?,
                            });
                        }
                    }
                }
            }
        }
    }
    Ok(table)
}

/// The backward of the problems of [`forward_table`] that have LSE.
///
/// # Errors
/// As there.
pub fn backward_table() -> Result<Vec<TableEntry<ValidBwd>>, ProblemError> {
    let backward = forward_table()?.into_iter().filter(|entry| entry.problem.write_lse).map(|entry| {
        let problem = BwdProblem::new(FwdProblem::clone(&entry.problem)).validate()?;
        Ok(TableEntry { name: entry.name, problem })
    });
    backward.collect()
}

/// The problems of [`forward_table`] that differ from this one only in sizes and in the width of a window, nearest
/// first. Empty unless the problem is plain attention of dense rows.
pub(crate) fn of_other_sizes(problem: &FwdProblem) -> Vec<ValidFwd> {
    let plain = |dims: Dims| {
        let plain = match problem.layout.q {
            QLayout::Batch => FwdProblem::batch(problem.dtypes.qk, dims),
            QLayout::Packed => FwdProblem::group(problem.dtypes.qk, dims),
        };
        let score = Score { softmax_scale: problem.score.softmax_scale, ..plain.score };
        FwdProblem { score, ..plain.mask(problem.mask).write_lse(problem.write_lse) }
    };
    let own = problem.dims;
    let head_dims = (own.head_dim_qk, own.head_dim_v);
    let strides = problem.strides;
    let is_plain = FwdProblem { strides, ..plain(own) } == *problem;
    let is_dense = [strides.q, strides.k, strides.v, strides.o].into_iter().all(has_whole_rows);
    if !(is_plain && is_dense && DTYPES.contains(&problem.dtypes.qk) && DIMS.contains(&head_dims)) {
        return Vec::new();
    }
    let all = LENGTHS.iter().flat_map(|&lengths| HEADS_KV.map(|heads| sizes(lengths, heads, head_dims)));
    let far = |a: u32, b: u32| (f64::from(a.max(1)) / f64::from(b.max(1))).ln().abs();
    let ratio = |dims: &Dims| dims.num_heads_q / dims.num_heads_kv.max(1);
    let distance = |dims: &Dims| {
        far(dims.seqlen_q, own.seqlen_q) + far(dims.seqlen_k, own.seqlen_k) + far(ratio(dims), ratio(&own))
    };
    let mut all: Vec<Dims> = all.collect();
    all.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    all.into_iter().filter_map(|dims| plain(dims).validate().ok()).collect()
}

/// Problems of [`backward_table`] with other sizes, as [`of_other_sizes`] gives them for the forward.
pub(crate) fn of_other_sizes_bwd(problem: &BwdProblem) -> Vec<ValidBwd> {
    let BwdProblem { dout, dq, dk, dv, .. } = *problem;
    let plain = BwdProblem { dout, dq, dk, dv, ..BwdProblem::new(problem.fwd.clone()) };
    if plain != *problem || ![dout, dq, dk, dv].into_iter().all(has_whole_rows) {
        return Vec::new();
    }
    let all = of_other_sizes(&problem.fwd).into_iter();
    all.filter_map(|fwd| BwdProblem::new(FwdProblem::clone(&fwd)).validate().ok()).collect()
}

/// Whether every row begins at a multiple of 16 bytes, as in the tables' tensors. A kernel's tile then depends on
/// the strides in the same way.
fn has_whole_rows(strides: Strides) -> bool {
    let Strides { batch, seq, head, dim } = strides;
    dim == 1
        && [batch, seq, head].into_iter().all(|stride| (0..1 << 36).contains(&stride) && stride % 8 == 0)
        && seq > 0
        && head > 0
}
