//! The tables: the problems whose kernels a bundle has.

use crate::bwd::{BwdProblem, ValidBwd};
use crate::dtype::DType;
use crate::error::ProblemError;
use crate::mask::{MaskAlign, MaskShape, MaskSpec};
use crate::problem::{Dims, FwdProblem, ValidFwd};

/// Queries and keys.
type Lengths = (u32, u32);

/// Short ones in the middle of what Hopper's tiles differ for; a backward has a launch whose tile is by the number of queries (dQ's) and
/// one by that of keys.
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

/// A problem of a table.
#[derive(Clone, Debug)]
pub struct TableEntry<P = ValidFwd> {
    /// `bf16/d128x128/causal/batch/lse/q2048k2048/gqa4`.
    pub name: String,
    /// What a backend is asked to plan.
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
/// Scores have no bias, cap or sink; tensors are dense, b·s·h·d. A backend plans them all; what it
/// compiles, each kernel once, is the table of its architecture.
///
/// # Errors
/// None for the table as it stands: each problem is validated.
pub fn forward_table() -> Result<Vec<TableEntry>, ProblemError> {
    const DIMS: [(u32, u32); 6] = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
    const HEADS_Q: u32 = 32;
    const WINDOW: MaskShape =
        MaskShape::Window { left: Some(512), right: Some(0), align: MaskAlign::BottomRight };
    let window = MaskSpec { shape: WINDOW, sink_columns: 0 };
    let masks = [("full", MaskSpec::NONE), ("causal", MaskSpec::CAUSAL), ("window", window)];
    let mut table = Vec::new();
    for dtype in [DType::F16, DType::Bf16] {
        for (head_dim_qk, head_dim_v) in DIMS {
            for (mask_name, mask) in masks {
                for (group, write_lse) in [(false, true), (false, false), (true, true), (true, false)] {
                    for &(seqlen_q, seqlen_k) in &LENGTHS {
                        for num_heads_kv in [32, 8, 4] {
                            let dims = Dims {
                                batch: 2,
                                seqlen_q,
                                seqlen_k,
                                num_heads_q: HEADS_Q,
                                num_heads_kv,
                                head_dim_qk,
                                head_dim_v,
                            };
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
