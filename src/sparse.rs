//! Choosing the keys of a model that is trained sparse. [`index_lists`] chooses on the processor; a list is what
//! [`KeyLists`](crate::KeyLists) and [`SeqArgs::indices`](crate::SeqArgs::indices) take. The other functions compute by
//! definition; blocks and losses are small beside attention.
//!
//! On any device [`Device::plan_choose`](crate::Device::plan_choose) plans a [`ChooseProblem`]: an indexer's scores or
//! given ones, of keys or of blocks, and the lists of the greatest. The plan says how much workspace a run needs.
//!
//! ```
//! use fmha::sparse::{Candidates, IndexArgs, IndexCall, IndexProblem, index_lists};
//! use fmha::{DType, DevSlice};
//!
//! let problem = IndexProblem {
//!     batch: 1, seqlen_q: 1, seqlen_k: 3, num_heads: 1, head_dim: 2, dtype_q: DType::F32, dtype_k: DType::F32,
//! };
//! let (q, k) = ([1.0f32, 0.0], [0.5f32, 0.0, -1.0, 0.0, 2.0, 0.0]);
//! let args = IndexArgs {
//!     q: DevSlice::host(&q), k: DevSlice::host(&k), weights: &[1.0], k_scale: None, candidates: Candidates::Causal,
//! };
//! let lists = index_lists(&IndexCall::new(problem, args)?, 2)?;
//! assert_eq!(lists, [0, 2]);
//! # Ok::<(), fmha::Error>(())
//! ```

use std::sync::OnceLock;

use fmha_core::host_memory::filled;
use fmha_core::{Error, ProblemError};
use fmha_cpu::CpuBackend;

pub use fmha_core::sparse::{
    BlockOverlap, BlockScore, CandidateKind, Candidates, ChooseProblem, ChosenBlocks, IndexArgs, IndexCall,
    IndexGradients, IndexKeys, IndexProblem, IndexStrides, Indexer, ScoreSource, ValidChoose, block_maxima,
    block_sums, choose, choose_blocks, index_gradients, index_loss,
};

/// The scores of an indexer, f32 `[batch, seqlen_q, seqlen_k]`; -inf where a key is no candidate of a query.
///
/// # Errors
/// Memory that the system refuses, or an invalid environment variable.
pub fn index_scores(call: &IndexCall<'_>) -> Result<Vec<f32>, Error> {
    let mut scores = filled(call.rows().saturating_mul(call.problem().seqlen_k as usize), 0.0)?;
    cpu()?.index_scores(call, &mut scores)?;
    Ok(scores)
}

/// The lists that those scores choose, i32 `[batch, seqlen_q, topk]`: the `topk` candidates of greatest score of each
/// query, equal ones by position, NaN last, in ascending position with -1 after them. The same scores give the same
/// lists on every run, with any number of threads.
///
/// # Errors
/// As [`index_scores`].
pub fn index_lists(call: &IndexCall<'_>, topk: u32) -> Result<Vec<i32>, Error> {
    let mut indices = filled(call.rows().saturating_mul(topk as usize), 0)?;
    cpu()?.index_lists(call, topk, &mut indices)?;
    Ok(indices)
}

/// Losses of an indexer over lists `[batch, seqlen_q, topk]`, and the gradients of their sum by the lists' scores: for
/// each query [`index_loss`] of the scores that its list has, against its part of `target`, f32 of the lists' shape.
/// [`index_gradients`] makes gradients of q, k and w of these. An entry that is negative, or not below `seqlen_k`, is
/// absent; the call's candidates are not asked. By definition, on one thread.
///
/// ```
/// use fmha::sparse::{Candidates, IndexArgs, IndexCall, IndexProblem, index_gradients, index_losses};
/// use fmha::{DType, DevSlice};
///
/// let problem = IndexProblem {
///     batch: 1, seqlen_q: 1, seqlen_k: 3, num_heads: 1, head_dim: 1, dtype_q: DType::F32, dtype_k: DType::F32,
/// };
/// let (q, k) = ([1.0f32], [2.0f32, 3.0, 2.0]);
/// let args = IndexArgs {
///     q: DevSlice::host(&q), k: DevSlice::host(&k), weights: &[1.0], k_scale: None, candidates: Candidates::All,
/// };
/// let (call, lists) = (IndexCall::new(problem, args)?, [0, 2, -1]);
/// // Scores 2 and 2 are probabilities 1/2 and 1/2; the target's are 1/4 and 3/4.
/// let (losses, d_scores) = index_losses(&call, (&lists, 3), &[1.0, 3.0, 9.0])?;
/// assert!((losses[0] - (0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln())).abs() < 1e-9);
/// assert_eq!(d_scores, [0.25, -0.25, 0.0]);
/// assert_eq!(index_gradients(&call, (&lists, 3), &d_scores)?.k, [0.25, 0.0, -0.25]);
/// # Ok::<(), fmha::Error>(())
/// ```
///
/// # Errors
/// Lists or a target of another length than the call's tokens ask for; memory that the system refuses.
pub fn index_losses(
    call: &IndexCall<'_>,
    (indices, topk): (&[i32], usize),
    target: &[f32],
) -> Result<(Vec<f64>, Vec<f32>), Error> {
    let (rows, problem) = (call.rows(), call.problem());
    let wanted = rows.saturating_mul(topk);
    for (field, length) in [("indices", indices.len()), ("target", target.len())] {
        if length != wanted {
            let text = format!("{field} has {length} elements, but {wanted} are wanted");
            return Err(ProblemError::new(field, text).into());
        }
    }
    let (mut losses, mut gradients) = (filled(rows, 0.0)?, filled(wanted, 0.0)?);
    let mut scores = filled(topk, 0f32)?;
    for (row, loss) in losses.iter_mut().enumerate() {
        let list = row * topk..(row + 1) * topk;
        for (score, &entry) in scores.iter_mut().zip(&indices[list.clone()]) {
            *score = match u32::try_from(entry).ok().filter(|&j| j < problem.seqlen_k) {
                None => f32::NEG_INFINITY,
                Some(j) => {
                    let relu = |x: f64| if x <= 0.0 { 0.0 } else { x };
                    let heads = 0..problem.num_heads as usize;
                    heads.map(|h| relu(call.product(row, h, j)) * call.weight(row, h)).sum::<f64>() as f32
                }
            };
        }
        *loss = index_loss(&scores, &target[list.clone()], &mut gradients[list])?;
    }
    Ok((losses, gradients))
}

/// Backend of the processor, opened once. A forked child makes its own threads.
fn cpu() -> Result<&'static CpuBackend, Error> {
    static CPU: OnceLock<CpuBackend> = OnceLock::new();
    match CPU.get() {
        Some(cpu) => Ok(cpu),
        None => {
            let cpu = CpuBackend::new()?;
            Ok(CPU.get_or_init(|| cpu))
        }
    }
}
