//! An indexer's loss as its launches take it.

use crate::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, Untyped};
use crate::args::{DevSlice, DevSliceMut, IndexLossArgs};
use crate::dtype::DType;
use crate::source::Header;
use crate::sparse::IndexLossProblem;
use crate::{abi_spec, abi_struct};

abi_spec! {
    /// Facts for which the launches of an indexer's loss are compiled.
    pub struct IndexLossSpec {
        /// q.
        pub dtype_q: DType,
        /// k.
        pub dtype_k: DType,
        /// Heads of q.
        pub num_heads: i32,
        /// Elements of a row of q and k.
        pub head_dim: i32,
        /// Whether each key has a scale.
        pub k_scale: bool,
    }
}

impl IndexLossSpec {
    /// The compile-time facts of a problem.
    #[must_use]
    pub fn of(problem: &IndexLossProblem) -> Self {
        Self {
            dtype_q: problem.dtype_q,
            dtype_k: problem.dtype_k,
            num_heads: problem.num_heads as i32,
            head_dim: problem.head_dim as i32,
            k_scale: problem.k_scale,
        }
    }
}

abi_struct! {
    /// Parameters of the launches of an indexer's loss. Rows are queries of all sequences.
    pub struct IndexLossParams {
        /// `[rows, num_heads, head_dim]`.
        pub q: DevPtr<Untyped>,
        /// `[batch, seqlen_k, head_dim]`.
        pub k: DevPtr<Untyped>,
        /// `[rows, num_heads]`.
        pub weights: DevPtr<f32>,
        /// Factors of keys, `[batch, seqlen_k]`.
        pub k_scale: DevPtr<f32>,
        /// Lists, `[rows, topk]`.
        pub indices: DevPtr<i32>,
        /// Targets of the entries, `[rows, topk]`.
        pub target: DevPtr<f32>,
        /// Factors of gradients, `[rows]`; null: 1.
        pub dloss: DevPtr<f32>,
        /// Output: losses, `[rows]`; null: not wanted.
        pub loss: DevPtr<f32>,
        /// Output: gradients of q, shaped like it; null: not wanted.
        pub dq: DevPtr<f32>,
        /// Output: gradients of keys, shaped like k; null: not wanted.
        pub dk: DevPtr<f32>,
        /// Output: gradients of weights, shaped like them; null: not wanted.
        pub dweights: DevPtr<f32>,
        /// Scores of the entries, `[rows, topk]`, -inf where one is absent; then the gradients of scores, 0 there.
        pub scores: DevPtr<f32>,
        /// Sequences.
        pub batch: i32,
        /// Queries of a sequence.
        pub seqlen_q: i32,
        /// Keys of a sequence.
        pub seqlen_k: i32,
        /// Entries of each list.
        pub topk: i32,
    }
}

/// The argument of a loss's launches, whose scores lie at an address. `args` have passed
/// [`check_index_loss`](crate::args::check_index_loss).
#[must_use]
pub fn index_loss_params(
    problem: &IndexLossProblem,
    args: &IndexLossArgs<'_>,
    scores: u64,
) -> IndexLossParams {
    let given = |slice: &Option<DevSlice<'_>>| slice.map_or(0, |slice| slice.as_ptr() as u64);
    let written =
        |slice: &Option<DevSliceMut<'_>>| slice.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
    IndexLossParams {
        q: DevPtr::new(args.q.as_ptr() as u64),
        k: DevPtr::new(args.k.as_ptr() as u64),
        weights: DevPtr::new(args.weights.as_ptr() as u64),
        k_scale: DevPtr::new(given(&args.k_scale)),
        indices: DevPtr::new(args.indices.as_ptr() as u64),
        target: DevPtr::new(args.target.as_ptr() as u64),
        dloss: DevPtr::new(given(&args.dloss)),
        loss: DevPtr::new(written(&args.loss)),
        dq: DevPtr::new(written(&args.dq)),
        dk: DevPtr::new(written(&args.dk)),
        dweights: DevPtr::new(written(&args.dweights)),
        scores: DevPtr::new(scores),
        batch: problem.batch.cast_signed(),
        seqlen_q: problem.seqlen_q.cast_signed(),
        seqlen_k: problem.seqlen_k.cast_signed(),
        topk: problem.topk.cast_signed(),
    }
}

/// `fmha/index_loss_params.h`: what this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [IndexLossSpec::c_definition(), IndexLossParams::c_definition()];
    Header::shared("fmha/index_loss_params.h", "fmha", &["fmha/spec.h"], &definitions)
}
