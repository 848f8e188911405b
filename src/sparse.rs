//! Choosing the keys of a model that is trained sparse. [`index_lists`] chooses on the processor; a list is what
//! [`KeyLists`](crate::KeyLists) and [`SeqArgs::indices`](crate::SeqArgs::indices) take. The other functions compute by
//! definition, on one thread.
//!
//! On any device [`Device::plan_choose`](crate::Device::plan_choose) plans a [`ChooseProblem`]: an indexer's scores or
//! given ones, of keys or of blocks, and the lists of the greatest. The plan says how much workspace a run needs.
//! [`Device::plan_index_loss`](crate::Device::plan_index_loss) plans an [`IndexLossProblem`]: the loss that trains an
//! indexer, and its gradients.
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

use fmha_core::Error;
use fmha_core::host_memory::filled;
use fmha_cpu::CpuBackend;

pub use fmha_core::sparse::{
    BlockOverlap, BlockScore, CandidateKind, Candidates, ChooseProblem, ChosenBlocks, IndexArgs, IndexCall,
    IndexGradients, IndexKeys, IndexLossProblem, IndexProblem, IndexStrides, Indexer, ScoreSource,
    ValidChoose, ValidIndexLoss, block_maxima, block_sums, choose, choose_blocks, index_gradients,
    index_loss, index_losses,
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

/// The processor, opened once; a forked child makes its own threads.
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
