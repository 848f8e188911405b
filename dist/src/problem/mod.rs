//! The whole problem, and the rows of each rank.
//!
//! - [`Problem`]: the problem as the caller gives it.
//! - [`Whole`]: checked, as one rank sees it; cut into the problems of [pieces](crate::partition::Piece).
//! - [`Tensor`], [`LseRows`]: where rows lie in a tensor, and which blocks they are.

mod check;
mod tensor;
mod whole;

pub(crate) use tensor::{Kind, LseRows, Tensor};
pub(crate) use whole::{Heads, ScoreOffsets, Whole};

use fmha::{Bias, BiasBroadcast, CapturedGrad, DType, ElementwiseBias, FwdProblem, Masks, Strides};

use crate::agree::AS_OTHERS;
use crate::partition::Partition;

/// Attention over a whole that no rank has: the problem of one device, and which rows each rank has.
///
/// A rank's tensors are contiguous: Q and O `[batch, own rows, num_heads_q, head_dim]`, K and V `[batch, own
/// rows, num_heads_kv, head_dim]`, LSE `[batch, num_heads_q, own rows]`; packed, the batch is no axis, and
/// rows are those of the packed tensor. The strides of `whole` play no part, its bias' apart: an elementwise
/// bias is `[.., own queries, all keys]`. Operands that have no rows (ALiBi's slopes, sinks, descales) are
/// the same on every rank.
///
/// Masks as data and tensors that functions capture are those of one device, whole, on every rank. Functions read
/// places of the whole, and masks as data name its queries and keys. Gradients of captured tensors are the whole's
/// too, on every rank.
///
/// ```
/// use fmha::{DType, Dims, FwdProblem, MaskSpec};
/// use fmha_dist::{Partition, Problem};
///
/// let dims = Dims::batch(1).seqlens(4096, 4096).heads(8, 2).head_dim(64);
/// let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
/// let problem = Problem::new(whole, Partition::zig_zag(4096, 4));
/// assert_eq!(problem.q.rows_of(2), 1024);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// Problem of one device with all rows.
    pub whole: FwdProblem,
    /// Ranks that have each query.
    pub q: Partition,
    /// Ranks that have each key.
    pub k: Partition,
    /// Packed: the first row of each sequence of queries, and the end.
    pub cu_seqlens_q: Option<Vec<u32>>,
    /// Packed: the first row of each sequence of keys, and the end.
    pub cu_seqlens_k: Option<Vec<u32>>,
    /// Captured tensors whose gradients a backward plan writes.
    pub dcaptured: Vec<CapturedGrad>,
    /// Fields that `whole` cannot give on this rank, because it has no queries.
    as_others: AsOthers,
}

/// Operands of queries that a rank without queries takes from the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct AsOthers {
    lse: bool,
    bias: bool,
}

impl Problem {
    /// Queries and keys at the same rows of the same ranks.
    #[must_use]
    pub fn new(whole: FwdProblem, rows: Partition) -> Self {
        Self {
            whole,
            q: rows.clone(),
            k: rows,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            dcaptured: Vec::new(),
            as_others: AsOthers::default(),
        }
    }

    /// Gradients of tensors that the score function captures, for a backward plan: one for each of
    /// [`BwdArgs::dcaptured`](fmha::BwdArgs::dcaptured). Sums over ranks are made in f32, in the order of the ranks,
    /// and rounded once.
    #[must_use]
    pub fn dcaptured(mut self, dcaptured: Vec<CapturedGrad>) -> Self {
        self.dcaptured = dcaptured;
        self
    }

    /// Keys at rows of their own: cross attention, or a cache that is split where the queries are not.
    #[must_use]
    pub fn keys(mut self, k: Partition) -> Self {
        self.k = k;
        self
    }

    /// Packed sequences, whose lengths every rank knows.
    #[must_use]
    pub fn packed(mut self, cu_seqlens_q: Vec<u32>, cu_seqlens_k: Vec<u32>) -> Self {
        (self.cu_seqlens_q, self.cu_seqlens_k) = (Some(cu_seqlens_q), Some(cu_seqlens_k));
        self
    }

    /// Takes from the other ranks whether LSE is written and whether there is an elementwise bias. For a rank
    /// without queries: its empty tensors may have no address that shows it. If no rank knows, `whole`
    /// decides.
    #[must_use]
    pub fn as_others(mut self, lse: bool, bias: bool) -> Self {
        self.as_others = AsOthers { lse, bias };
        self
    }

    /// Whether this rank needs other ranks' answers to know what it computes.
    pub(crate) fn is_open(&self) -> bool {
        self.as_others != AsOthers::default()
    }

    /// Sets the fields that the ranks have agreed on.
    pub(crate) fn settled(mut self, fields: &[(String, String)]) -> Self {
        let said = |name: &str| fields.iter().find(|(field, _)| field == name).map(|(_, text)| text.as_str());
        if self.as_others.lse && said("write_lse") != Some(AS_OTHERS) {
            self.whole.write_lse = said("write_lse") == Some("true");
        }
        if self.as_others.bias {
            let mut all =
                BiasBroadcast::ALL.into_iter().flat_map(|kind| DType::ALL.map(|dtype| (dtype, kind)));
            let bias = all.find_map(|(dtype, broadcast)| {
                let shape = self.whole.shape_bias(broadcast);
                // Strides of a bias that has no rows here play no part.
                let seq = i64::from(shape.dim);
                let head = seq * i64::from(shape.seq);
                let strides = Strides { batch: head * i64::from(shape.head), seq, head, dim: 1 };
                let bias = Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides });
                (said("bias") == Some(&bias_words(bias))).then_some(bias)
            });
            self.whole.score.bias = bias.unwrap_or(self.whole.score.bias);
        }
        self.as_others = AsOthers::default();
        self
    }

    /// Texts that must be equal on every rank, field by field.
    pub(crate) fn description(&self) -> Vec<(String, String)> {
        let whole = &self.whole;
        let dims = whole.dims;
        let said = |as_others, text| if as_others { AS_OTHERS.to_owned() } else { text };
        // Sizes are compared first: a partition of other rows differs in them before it differs in runs.
        let fields = vec![
            ("batch", dims.batch.to_string()),
            ("seqlen_q", dims.seqlen_q.to_string()),
            ("seqlen_k", dims.seqlen_k.to_string()),
            ("num_heads_q", dims.num_heads_q.to_string()),
            ("num_heads_kv", dims.num_heads_kv.to_string()),
            ("head_dim_qk", dims.head_dim_qk.to_string()),
            ("head_dim_v", dims.head_dim_v.to_string()),
            ("mask", whole.mask.to_string()),
            ("softmax_scale", whole.resolved_softmax_scale().to_string()),
            ("softcap", whole.score.softcap.map_or("none".to_owned(), |softcap| softcap.to_string())),
            ("bias", said(self.as_others.bias, bias_words(whole.score.bias))),
            ("sink", whole.score.sink.to_string()),
            ("score_code", function_words(whole.code.score.as_ref())),
            ("mask_code", function_words(whole.code.mask.as_ref())),
            ("captured", captured_words(whole)),
            ("masks", mask_words(&whole.masks)),
            ("dcaptured", format!("{:?}", self.dcaptured)),
            ("p_drop", whole.dropout.p_drop.to_string()),
            ("dtype_qk", whole.dtypes.qk.to_string()),
            ("dtype_v", whole.dtypes.v.to_string()),
            ("dtype_o", whole.dtypes.o.to_string()),
            ("layout", format!("{:?}", whole.layout)),
            ("scales", format!("{:?}", whole.scales)),
            ("cache", format!("{:?}", whole.cache)),
            ("write_lse", said(self.as_others.lse, whole.write_lse.to_string())),
            ("cu_seqlens_q", format!("{:?}", self.cu_seqlens_q)),
            ("cu_seqlens_k", format!("{:?}", self.cu_seqlens_k)),
            ("partition of queries", format!("{:?}", self.q)),
            ("partition of keys", format!("{:?}", self.k)),
        ];
        fields.into_iter().map(|(field, text)| (field.to_owned(), text)).collect()
    }
}

fn function_words(function: Option<&fmha::expr::Function>) -> String {
    function.map_or("none".to_owned(), ToString::to_string)
}

/// Names and shapes: strides belong to this rank.
fn captured_words(whole: &FwdProblem) -> String {
    let words = |tensor: &fmha::CapturedTensor| format!("{} {:?}", tensor.name, tensor.shape);
    whole.code.captured.iter().map(words).collect::<Vec<_>>().join(", ")
}

/// The masks without their strides, which belong to this rank.
fn mask_words(masks: &Masks) -> String {
    let mut words = Vec::new();
    words.extend(masks.intervals.map(|it| format!("intervals {:?} {}", it.axes, it.endpoints)));
    words.extend(masks.bits.map(|it| format!("mask_bits {:?}", it.axes)));
    words.extend(masks.block_lists.map(|it| {
        let room = [it.partial, it.full].map(|list| list.map(|list| list.max_blocks));
        format!("block_lists {:?} {} x {}, {room:?}", it.axes, it.block_q, it.block_k)
    }));
    words.join(", ")
}

fn bias_words(bias: Bias) -> String {
    match bias {
        // The strides of the bias belong to this rank.
        Bias::Elementwise(bias) => format!("{} {:?}", bias.dtype, bias.broadcast),
        bias => format!("{bias:?}"),
    }
}

/// The gradients that are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gradients {
    pub(crate) dtype: DType,
    pub(crate) dsink: bool,
}
