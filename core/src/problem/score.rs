//! Steps between `Q K^T` and the softmax, and the scales of FP8 tensors.

use crate::dtype::DType;
use crate::layout::{Shape, Strides};

/// Term that is added to a score after the soft-cap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bias {
    /// Scores have no bias.
    None,
    /// An elementwise term `bias[b, h, i, j]`.
    Elementwise(ElementwiseBias),
    /// A term that grows with the distance, `-slope * |i + diag - j|`, with `diag` from the mask's alignment
    /// ([`MaskSpec::alibi_align`](crate::MaskSpec::alibi_align)). Slopes are f32 `[num_heads_q]` or `[batch,
    /// num_heads_q]`.
    Alibi {
        /// Whether the slopes have a batch axis.
        per_batch: bool,
    },
}

/// A bias tensor `[batch or 1, num_heads_q or 1, seqlen_q, seqlen_k]`.
///
/// In group mode the last two axes have the maximal lengths, and an element is addressed by positions inside its
/// sequence, so one bias serves sequences of different lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ElementwiseBias {
    /// Type of the bias: f32, or the input's type.
    pub dtype: DType,
    /// Which of the batch and head axes are broadcast, with extent 1.
    pub broadcast: BiasBroadcast,
    /// Strides of `batch`, `head`, `seq` (the query) and `dim` (the key, stride 1). The stride of a broadcast axis
    /// is unused.
    pub strides: Strides,
}

/// The extents of a bias over batch and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasBroadcast {
    /// One matrix for all sequences and heads.
    OneOne,
    /// One matrix per query head.
    OneHead,
    /// One matrix per sequence, for all of its query heads.
    BatchOne,
    /// One matrix per sequence and query head.
    BatchHead,
}

impl BiasBroadcast {
    /// All kinds of broadcast.
    pub const ALL: [BiasBroadcast; 4] =
        [BiasBroadcast::OneOne, BiasBroadcast::OneHead, BiasBroadcast::BatchOne, BiasBroadcast::BatchHead];

    /// Whether each sequence, and each query head, has its own matrix.
    #[must_use]
    pub fn axes(self) -> (bool, bool) {
        match self {
            BiasBroadcast::OneOne => (false, false),
            BiasBroadcast::OneHead => (false, true),
            BiasBroadcast::BatchOne => (true, false),
            BiasBroadcast::BatchHead => (true, true),
        }
    }

    /// The kind of bias with these axes.
    #[must_use]
    pub fn of_axes(per_batch: bool, per_head: bool) -> Self {
        match (per_batch, per_head) {
            (false, false) => BiasBroadcast::OneOne,
            (false, true) => BiasBroadcast::OneHead,
            (true, false) => BiasBroadcast::BatchOne,
            (true, true) => BiasBroadcast::BatchHead,
        }
    }

    /// The bias' shape for a problem's extents.
    #[must_use]
    pub fn shape(self, batch: u32, num_heads_q: u32, seqlen_q: u32, seqlen_k: u32) -> Shape {
        let (per_batch, per_head) = self.axes();
        let (batch, head) = (if per_batch { batch } else { 1 }, if per_head { num_heads_q } else { 1 });
        Shape { batch, seq: seqlen_q, head, dim: seqlen_k }
    }

    /// The (batch, head) index into the bias for a (batch, head) of the problem.
    #[must_use]
    pub fn index(self, i_batch: u32, i_head: u32) -> (u32, u32) {
        let (per_batch, per_head) = self.axes();
        (if per_batch { i_batch } else { 0 }, if per_head { i_head } else { 0 })
    }
}

/// Factors of an FP8 tensor's elements: f32 numbers on the device.
#[doc(alias = "scale_inv")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Descale {
    /// No factor: stored values are used as they are.
    None,
    /// One number for the whole tensor, `[1]`.
    PerTensor,
    /// One number for each sequence and kv head, `[batch, num_heads_kv]`.
    PerKvHead,
}

impl Descale {
    /// Number of f32 factors.
    #[must_use]
    pub fn num_elems(self, batch: u32, num_heads_kv: u32) -> u64 {
        match self {
            Descale::None => 0,
            Descale::PerTensor => 1,
            Descale::PerKvHead => u64::from(batch) * u64::from(num_heads_kv),
        }
    }

    /// Index of the factor of a (batch, kv head).
    #[must_use]
    pub fn index(self, i_batch: u32, i_head_kv: u32, num_heads_kv: u32) -> usize {
        match self {
            Descale::None | Descale::PerTensor => 0,
            Descale::PerKvHead => i_batch as usize * num_heads_kv as usize + i_head_kv as usize,
        }
    }
}
