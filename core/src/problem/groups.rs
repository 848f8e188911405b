//! Groups of fields of a forward problem.

use super::{CacheRows, CacheScales};
use crate::dtype::DType;
use crate::error::Refusal;
use crate::kv::{Append, Rotary};
use crate::layout::{KvLayout, QLayout, Strides, VLayout};
use crate::score::{Bias, Descale};

/// Layouts of the tensors, and whether sequences use only a part of their rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Layouts {
    /// Layout of Q and O.
    pub q: QLayout,
    /// Layout of K and V.
    pub kv: KvLayout,
    /// Axis of V with stride 1.
    pub v: VLayout,
    /// Whether a call gives `seqused_q`, the number of queries in use of each sequence.
    pub seqused_q: bool,
    /// Whether a call gives `seqused_k`, the number of keys in use of each sequence.
    pub seqused_k: bool,
}

/// The types of the tensors' elements.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DTypes {
    /// Type of Q, and of K in the product with Q: `dtype_qk`.
    pub qk: DType,
    /// Type of V, `dtype_v`: that of Q and K, or f16 or bf16 with FP8 Q and K (the hybrid scheme).
    pub v: DType,
    /// Type of O: `dtype_o`.
    pub o: DType,
}

/// Strides of the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TensorStrides {
    /// Strides of Q.
    pub q: Strides,
    /// Strides of K.
    pub k: Strides,
    /// Strides of V.
    pub v: Strides,
    /// Strides of O. No two elements share an address.
    pub o: Strides,
}

/// Steps between the product `Q K^T` and the softmax, in the order of the fields, and the sink.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Score {
    /// Factor of `Q K^T`; `None` = `1 / sqrt(head_dim_qk)`. Any finite number is valid, also 0.
    #[doc(alias = "sm_scale")]
    pub softmax_scale: Option<f32>,
    /// Cap of `softcap * tanh(S / softcap)`, which is applied before the bias. Finite and positive.
    pub softcap: Option<f32>,
    /// Term that is added to a score.
    pub bias: Bias,
    /// Whether a learnable sink f32 `[num_heads_q]` enters the denominator.
    pub sink: bool,
}

/// Choice of the elements of P that are dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Dropout {
    /// Probability that a `P` is dropped: `0 <= p_drop < 1`.
    pub p_drop: f32,
    /// Whether the keep mask is written, for tests: u8 `[batch, num_heads_q, seqlen_q, seqlen_k]`, 1 = kept; positions
    /// beyond a sequence's lengths are not written.
    pub write_keep_mask: bool,
}

/// Numbers that a forward call writes besides O and LSE, f32. They have no gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SmallOutputs {
    /// Whether each row's greatest score over its visible keys is written, with LSE's shape: the score after scale,
    /// function, soft-cap and bias, without the sink; -inf for a row that sees no key.
    pub row_max: bool,
    /// Whether the greatest of a head's row maxima is written, `[num_heads_q]`; -inf where no row sees a key.
    pub head_max: bool,
    /// Whether the sum over queries of each key's probability, before dropout, is written: `[batch, num_heads_q,
    /// seqlen_k]`, 0 for a key beyond its sequence.
    pub key_sum: bool,
}

impl SmallOutputs {
    /// Whether no small output is written.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Name of the first small output that is written.
    #[must_use]
    pub fn first(self) -> Option<&'static str> {
        let wanted = [("row_max", self.row_max), ("head_max", self.head_max), ("key_sum", self.key_sum)];
        wanted.into_iter().find_map(|(name, wanted)| wanted.then_some(name))
    }

    /// Refuses small outputs, for a kernel that writes none.
    ///
    /// # Errors
    /// The first small output of the problem.
    pub fn refuse(self, kernel: &str) -> Result<(), Refusal> {
        match self.first() {
            None => Ok(()),
            Some(name) => Err(Refusal::new(kernel, format!("{name} is not written by this kernel"))),
        }
    }
}

/// Factors of FP8 tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Scales {
    /// Scaling of FP8 Q when it is read.
    pub descale_q: Descale,
    /// Scaling of FP8 K when it is read.
    pub descale_k: Descale,
    /// Scaling of FP8 V when it is read.
    pub descale_v: Descale,
    /// Whether FP8 O is multiplied by a number `scale_o`, f32 `[1]`, before it is rounded.
    pub scale_o: bool,
}

/// How a call uses its KV cache besides reading it, and how the cache is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CacheUse {
    /// FP8 type of the stored K and V under a 16-bit Q: `dtype_cache`. `None`: K and V have their own types. Each
    /// element is multiplied by its descale and rounded to `dtype_qk` when it is read.
    pub dtype: Option<DType>,
    /// Scales of K and V in `dtype` by rows, one for each token and head or block of tokens: `cache_scales`. `None`: a
    /// scale of the whole tensor or of a kv head (`descale_k`), or none.
    pub scales: Option<CacheScales>,
    /// Format of K's rows where they are bytes with scales of their own: `cache_rows`. Strides of K are in bytes then.
    /// `None`: rows of elements.
    pub rows: Option<CacheRows>,
    /// Whether V is the first `head_dim_v` elements of K's rows (MLA) instead of a tensor of its own.
    pub v_in_k: bool,
    /// New keys and values, written to the cache before attention.
    pub append: Option<Append>,
    /// Rotary embedding of Q and of new keys.
    pub rotary: Option<Rotary>,
    /// Whether a tree mask, u32 `[batch, seqlen_q, words]` or packed `[total_q, words]` with `words =
    /// ceil(seqlen_q / 32)`, replaces the causal mask among a sequence's last `seqlen_q` keys: bit `n % 32` of word
    /// `n / 32` shows the n-th of them. All keys before are seen.
    pub tree_mask: bool,
}
