//! The loss that trains an indexer as a problem that a device plans: which scores, which lists, and what is written.

use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::problem::{MAX_HEAD_DIM, MAX_SEQLEN};
use crate::setters::setters;
use crate::sparse::MAX_INDEX_HEADS;

/// An indexer's loss over lists without its pointers: for each query [`index_loss`](super::index_loss) of the scores
/// `I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h]` that its list has, and the gradients of q, k and w. All tensors are
/// contiguous; all outputs are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexLossProblem {
    /// Sequences.
    pub batch: u32,
    /// Queries of a sequence.
    pub seqlen_q: u32,
    /// Keys of a sequence.
    pub seqlen_k: u32,
    /// Entries of each query's list.
    pub topk: u32,
    /// Heads of q; k has one, which all of them share.
    pub num_heads: u32,
    /// Elements of a row of q and k.
    pub head_dim: u32,
    /// The type of q.
    pub dtype_q: DType,
    /// The type of k.
    pub dtype_k: DType,
    /// Whether each key has an f32 scale. The gradient of k is then that of its rows after scaling.
    pub k_scale: bool,
    /// Whether each query's gradients are multiplied by a number of its own.
    pub has_dloss: bool,
    /// Whether the loss of each query is written.
    pub write_loss: bool,
    /// Whether the gradient of q is written.
    pub write_dq: bool,
    /// Whether the gradient of k is written.
    pub write_dk: bool,
    /// Whether the gradient of the weights is written.
    pub write_dweights: bool,
}

impl IndexLossProblem {
    /// The loss alone, of keys without scales.
    #[must_use]
    pub const fn new(
        [batch, seqlen_q, seqlen_k, topk]: [u32; 4],
        [num_heads, head_dim]: [u32; 2],
        [dtype_q, dtype_k]: [DType; 2],
    ) -> Self {
        Self {
            batch,
            seqlen_q,
            seqlen_k,
            topk,
            num_heads,
            head_dim,
            dtype_q,
            dtype_k,
            k_scale: false,
            has_dloss: false,
            write_loss: true,
            write_dq: false,
            write_dk: false,
            write_dweights: false,
        }
    }

    setters! {
        /// Whether each key has an f32 scale.
        k_scale: bool => k_scale;
        /// Whether each query's gradients are multiplied by a number of its own.
        dloss: bool => has_dloss;
        /// Whether the loss of each query is written.
        write_loss: bool => write_loss;
        /// Whether the gradient of q is written.
        write_dq: bool => write_dq;
        /// Whether the gradient of k is written.
        write_dk: bool => write_dk;
        /// Whether the gradient of the weights is written.
        write_dweights: bool => write_dweights;
    }

    /// Queries of all sequences, each with one list.
    #[must_use]
    pub fn rows(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.seqlen_q)
    }

    /// Keys of all sequences.
    #[must_use]
    pub fn keys(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.seqlen_k)
    }

    /// Whether any gradient is written.
    #[must_use]
    pub fn has_gradients(&self) -> bool {
        self.write_dq || self.write_dk || self.write_dweights
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidIndexLoss, ProblemError> {
        let Self { batch, seqlen_q, seqlen_k, topk, num_heads, head_dim, .. } = self;
        for (field, value) in
            [("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("topk", topk)]
        {
            ensure!(value <= MAX_SEQLEN, field, "{field} {value} is larger than {MAX_SEQLEN}");
        }
        let most = u64::from(MAX_SEQLEN);
        for (of, rows, length) in [("seqlen_q", self.rows(), seqlen_q), ("seqlen_k", self.keys(), seqlen_k)] {
            ensure!(rows <= most, "batch", "batch {batch} of {of} {length}: {rows} rows, more than {most}");
        }
        let heads = 1..=MAX_INDEX_HEADS;
        ensure!(
            heads.contains(&num_heads),
            "num_heads",
            "num_heads {num_heads} is not in 1..={MAX_INDEX_HEADS}"
        );
        let dims = 1..=MAX_HEAD_DIM;
        ensure!(dims.contains(&head_dim), "head_dim", "head_dim {head_dim} is not in 1..={MAX_HEAD_DIM}");
        for (name, dtype) in [("dtype_q", self.dtype_q), ("dtype_k", self.dtype_k)] {
            let is_e5m2 = matches!(dtype, DType::E5m2 | DType::E5m2Fnuz);
            ensure!(!is_e5m2, name, "{name} {dtype} is not f32, f16, bf16 or e4m3");
        }
        ensure!(
            self.write_loss || self.has_gradients(),
            "write_loss",
            "write_loss false without a gradient: nothing is computed"
        );
        ensure!(
            !self.has_dloss || self.has_gradients(),
            "has_dloss",
            "has_dloss true without a gradient, which it multiplies"
        );
        Ok(ValidIndexLoss(self))
    }
}

/// A problem of an indexer's loss that contradicts itself nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidIndexLoss(IndexLossProblem);

impl std::ops::Deref for ValidIndexLoss {
    type Target = IndexLossProblem;

    fn deref(&self) -> &IndexLossProblem {
        &self.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_loss_names_the_field_that_contradicts() {
        let sound = IndexLossProblem::new([2, 3, 5, 4], [2, 8], [DType::Bf16; 2]);
        assert_eq!((sound.rows(), sound.keys(), sound.has_gradients()), (6, 10, false));
        sound.write_dk(true).write_loss(false).validate().unwrap();
        for (problem, field, said) in [
            (IndexLossProblem { num_heads: 0, ..sound }, "num_heads", "num_heads 0 is not in 1..="),
            (IndexLossProblem { head_dim: 0, ..sound }, "head_dim", "head_dim 0 is not in 1..="),
            (IndexLossProblem { seqlen_q: u32::MAX, ..sound }, "seqlen_q", "seqlen_q 4294967295"),
            (IndexLossProblem { batch: MAX_SEQLEN, ..sound }, "batch", "of seqlen_q 3"),
            (IndexLossProblem { dtype_k: DType::E5m2, ..sound }, "dtype_k", "dtype_k e5m2"),
            (sound.write_loss(false), "write_loss", "nothing is computed"),
            (sound.dloss(true), "has_dloss", "without a gradient"),
        ] {
            let error = problem.validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.text.contains(said), "{error}");
        }
    }
}
