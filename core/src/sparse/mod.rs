//! Choosing the keys of a model that is trained sparse: scores of an indexer and of blocks, the greatest of them,
//! and the indexer's loss. Each function here computes by definition, in f64; a backend's functions have the same
//! names.
//!
//! ```text
//! index_scores      I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h]       DeepSeek-V3.2's indexer (arXiv 2512.02556)
//! choose            the k greatest of a row, as a list of keys
//! block_maxima      a block's greatest score                           MiniMax-M3's block selection
//! block_sums        a block's share of coarser probabilities           NSA (arXiv 2502.11089, equation 9)
//! choose_blocks     the k greatest blocks, some of them whatever they score
//! index_loss        KL divergence of a list's scores from attention's probabilities, and its gradient
//! index_losses      the losses of a call's lists, and the gradients of their scores
//! index_gradients   the gradients of q, k and w from those of the scores
//! ```
//!
//! A [`ChooseProblem`] describes such a choice, an [`IndexLossProblem`] a loss with its gradients, for a
//! [`Device`](crate::Device), which plans it.
//!
//! A list from [`choose`] is in the form that [`KeyLists`](crate::KeyLists) takes: ascending positions, followed by
//! -1.

mod blocks;
mod choose;
mod index;
mod loss;
mod problem;
mod train;

pub use blocks::{BlockOverlap, block_maxima, block_sums};
pub use choose::{before, choose, choose_blocks};
pub use index::{Candidates, IndexArgs, IndexCall, IndexProblem, index_scores};
pub use loss::{IndexGradients, index_gradients, index_loss, index_losses};
pub use problem::{
    BlockScore, CandidateKind, ChooseProblem, ChosenBlocks, IndexKeys, IndexStrides, Indexer,
    MAX_INDEX_HEADS, ScoreSource, ValidChoose,
};
pub use train::{IndexLossProblem, ValidIndexLoss};
