//! The forward problem: every fact of a call except its pointers.

pub mod block_scales;
mod blocks;
pub mod built_in;
pub mod bwd;
mod cache;
mod cache_scales;
mod code;
pub mod combine;
pub mod dropout;
pub mod dtype;
pub mod fp8;
mod groups;
pub mod kv;
pub mod layout;
mod lists;
pub mod mask;
pub mod masks;
pub mod operation;
mod part;
pub mod quantize;
mod rows;
pub mod score;
mod second;
mod strides;

use crate::dropout::keep_threshold;
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::expr::Function;
use crate::kv::{Append, Rotary};
pub use blocks::BlockScales;
pub(crate) use blocks::{BYTE, SCALE_NAMES};
pub(crate) use cache_scales::CACHE_SCALE_NAMES;
pub use cache_scales::CacheScales;
pub use code::{CapturedGrad, CapturedTensor, Code, PartNumber};
pub use groups::{CacheUse, DTypes, Dropout, Layouts, Scales, Score, SmallOutputs, TensorStrides};
pub use lists::{KeyLists, ListEntries, ListLength};
pub use part::Part;
pub use rows::CacheRows;
pub use second::SecondCache;
pub(crate) use strides::{MAX_EXTENT_BYTES, check_input, check_output, check_unit_stride, check_v};

use crate::layout::{KvLayout, QLayout, Shape, Strides, Totals, VLayout};
use crate::mask::MaskSpec;
use crate::masks::{BlockLists, Intervals, MaskBits, Masks};
use crate::score::{Bias, BiasBroadcast, Descale};
use crate::setters::setters;

/// The sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Number of sequences.
    #[doc(alias = "b")]
    pub batch: u32,
    /// Number of queries of a sequence; with packed rows, an upper bound over the sequences.
    #[doc(alias = "max_seqlen_q")]
    pub seqlen_q: u32,
    /// Number of keys of a sequence; with packed rows or pages, an upper bound over the sequences.
    #[doc(alias = "max_seqlen_k")]
    pub seqlen_k: u32,
    /// Number of query heads, a multiple of `num_heads_kv`.
    pub num_heads_q: u32,
    /// Number of key and value heads.
    pub num_heads_kv: u32,
    /// Number of elements of a query's or key's row.
    pub head_dim_qk: u32,
    /// Number of elements of a value's or output's row.
    pub head_dim_v: u32,
}

impl Dims {
    /// Sizes of `batch` sequences. The other sizes are 0 until the rest of a chain gives them:
    /// `Dims::batch(2).seqlens(128, 512).heads(8, 2).head_dim(64)`.
    #[must_use]
    pub const fn batch(batch: u32) -> Self {
        let (seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v) = (0, 0, 0, 0, 0, 0);
        Self { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v }
    }

    /// Queries and keys of a sequence.
    #[must_use]
    pub const fn seqlens(self, seqlen_q: u32, seqlen_k: u32) -> Self {
        Self { seqlen_q, seqlen_k, ..self }
    }

    /// Query heads, and heads of K and V.
    #[must_use]
    pub const fn heads(self, num_heads_q: u32, num_heads_kv: u32) -> Self {
        Self { num_heads_q, num_heads_kv, ..self }
    }

    /// Elements of a row of Q and K, and of a row of V and O.
    #[must_use]
    pub const fn head_dims(self, head_dim_qk: u32, head_dim_v: u32) -> Self {
        Self { head_dim_qk, head_dim_v, ..self }
    }

    /// Elements of a row of each tensor.
    #[must_use]
    pub const fn head_dim(self, head_dim: u32) -> Self {
        self.head_dims(head_dim, head_dim)
    }
}

/// Longest sequence, and most rows of a packed tensor: 2^31 - 65536. The index of a tile's last row may lie beyond
/// the sequence, and must fit 31 bits in every kernel.
pub const MAX_SEQLEN: u32 = i32::MAX.unsigned_abs() - 0xFFFF;

/// Largest head dimension of a valid problem; each kernel has its own limits below it.
pub const MAX_HEAD_DIM: u32 = 1024;

/// A forward call without its pointers. [`validate`](Self::validate) it, then plan it.
///
/// Shapes: Q `[batch, seqlen_q, num_heads_q, head_dim_qk]`, K `[batch, seqlen_k, num_heads_kv,
/// head_dim_qk]`, V `[batch, seqlen_k, num_heads_kv, head_dim_v]`, O `[batch, seqlen_q,
/// num_heads_q, head_dim_v]`; packed, batch and sequence are one axis of `total_q` or `total_k` rows;
/// paged, K and V are `[num_pages, page_size, ..]`. Every tensor has strides of its own.
///
/// Fields are grouped; the setters have the contract's names, which errors use too: `problem.score.softcap` is
/// read, and `problem.softcap(30.0)` is the problem with it.
///
/// ```
/// use fmha_core::{DType, Dims, FwdProblem, MaskSpec};
///
/// let dims = Dims::batch(1).seqlens(4, 9).heads(2, 1).head_dim(8);
/// let problem = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).softcap(30.0).write_lse(true);
/// assert!(problem.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FwdProblem {
    /// Sizes of the problem.
    pub dims: Dims,
    /// Layouts of the tensors, and which of their rows are in use.
    pub layout: Layouts,
    /// Element types of the tensors.
    pub dtypes: DTypes,
    /// Strides of each tensor.
    pub strides: TensorStrides,
    /// The mask: which keys a query sees.
    pub mask: MaskSpec,
    /// Lists of the keys that each query uses, instead of all keys.
    pub lists: Option<KeyLists>,
    /// A second cache in the same softmax.
    pub second: Option<SecondCache>,
    /// Masks that tensors give (intervals, bits, lists of blocks); they hide keys of the band.
    pub masks: Masks,
    /// Modifiers of a score before the softmax.
    pub score: Score,
    /// Score and mask functions.
    pub code: Code,
    /// Dropout: which elements of P are dropped.
    pub dropout: Dropout,
    /// Factors of FP8 tensors.
    pub scales: Scales,
    /// Scales by blocks of Q, K and V.
    pub block_scales: Option<BlockScales>,
    /// Changes to the KV cache and to how it is read: append, rotary embedding, tree mask.
    pub cache: CacheUse,
    /// Position of this call within a larger whole that it is a part of.
    pub part: Part,
    /// Whether LSE is written: f32 `[batch, num_heads_q, seqlen_q]`, or `[num_heads_q, total_q]`.
    #[doc(alias = "softmax_lse")]
    pub write_lse: bool,
    /// Optional small outputs, such as row maxima and sums of probabilities.
    pub outputs: SmallOutputs,
    /// Number of pieces in which K and V arrive while the call runs, at most [`MAX_ARRIVALS`]; 0 if they are
    /// complete before the call. [`Arrivals`](crate::Arrivals) has the operands.
    pub arrivals: u32,
}

/// Largest number of pieces in which K and V may arrive: each has one bit of a 64-bit word.
pub const MAX_ARRIVALS: u32 = 64;

impl FwdProblem {
    /// A problem in batch mode, contiguous b·s·h·d, with one type throughout and every option off. Setters turn
    /// options on.
    #[must_use]
    pub fn batch(dtype: DType, dims: Dims) -> Self {
        Self::new(QLayout::Batch, KvLayout::Strided, dtype, dims)
    }

    /// A problem in group mode (varlen): packed Q and K, contiguous s·h·d. The lengths of `dims` are upper bounds;
    /// the numbers of rows are given with the tensors ([`Totals`]).
    #[doc(alias = "varlen")]
    #[must_use]
    pub fn group(dtype: DType, dims: Dims) -> Self {
        Self::new(QLayout::Packed, KvLayout::Packed, dtype, dims)
    }

    /// Makes a problem of these layouts, contiguous, of one type throughout, with every option off.
    #[must_use]
    pub fn new(q_layout: QLayout, kv_layout: KvLayout, dtype: DType, dims: Dims) -> Self {
        let dtype_o = if dtype.is_fp8() { DType::Bf16 } else { dtype };
        let unset = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
        let (descale, v) = (Descale::None, VLayout::RowMajor);
        let mut problem = Self {
            dims,
            layout: Layouts { q: q_layout, kv: kv_layout, v, seqused_q: false, seqused_k: false },
            dtypes: DTypes { qk: dtype, v: dtype, o: dtype_o },
            strides: TensorStrides { q: unset, k: unset, v: unset, o: unset },
            mask: MaskSpec::NONE,
            lists: None,
            second: None,
            masks: Masks::default(),
            score: Score { softmax_scale: None, softcap: None, bias: Bias::None, sink: false },
            code: Code::default(),
            dropout: Dropout { p_drop: 0.0, write_keep_mask: false },
            scales: Scales { descale_q: descale, descale_k: descale, descale_v: descale, scale_o: false },
            block_scales: None,
            cache: CacheUse::default(),
            part: Part::default(),
            write_lse: false,
            outputs: SmallOutputs::default(),
            arrivals: 0,
        };
        problem.strides.q = Strides::bshd(problem.shape_q());
        problem.strides.k = Strides::bshd(problem.shape_k());
        problem.strides.v = Strides::bshd(problem.shape_v());
        problem.strides.o = Strides::bshd(problem.shape_o());
        problem
    }

    setters! {
        /// Sets the sizes. Strides stay as they are.
        dims: Dims => dims;
        /// Layout of Q and O in memory.
        q_layout: QLayout => layout.q;
        /// Layout of K and V in memory.
        kv_layout: KvLayout => layout.kv;
        /// Axis of V that has stride 1.
        v_layout: VLayout => layout.v;
        /// Whether a call gives `seqused_q`, the number of queries in use of each sequence.
        seqused_q: bool => layout.seqused_q;
        /// Whether a call gives `seqused_k`, the number of keys in use of each sequence.
        seqused_k: bool => layout.seqused_k;
        /// The type of Q, and of K in products with it.
        dtype_qk: DType => dtypes.qk;
        /// The type of V: that of Q and K, or f16 or bf16 with FP8 Q and K.
        dtype_v: DType => dtypes.v;
        /// The type of O.
        dtype_o: DType => dtypes.o;
        /// Strides of Q.
        strides_q: Strides => strides.q;
        /// Strides of K.
        strides_k: Strides => strides.k;
        /// Strides of V.
        strides_v: Strides => strides.v;
        /// Strides of O.
        strides_o: Strides => strides.o;
        /// The mask: which keys a query sees.
        mask: MaskSpec => mask;
        /// The keys that each query lists, in place of all keys.
        lists: impl Into<Option<KeyLists>> => lists;
        /// A second cache in the same softmax.
        second: impl Into<Option<SecondCache>> => second;
        /// Ranges of keys for each query row.
        intervals: impl Into<Option<Intervals>> => masks.intervals;
        /// A mask with one bit for each query and key.
        mask_bits: impl Into<Option<MaskBits>> => masks.bits;
        /// Lists of the blocks of keys that each block of queries sees.
        block_lists: impl Into<Option<BlockLists>> => masks.block_lists;
        /// Factor of `Q K^T`; `None` = `1 / sqrt(head_dim_qk)`.
        softmax_scale: impl Into<Option<f32>> => score.softmax_scale;
        /// Cap of `softcap * tanh(S / softcap)`, which is applied before the bias.
        softcap: impl Into<Option<f32>> => score.softcap;
        /// Bias that is added to a score.
        bias: Bias => score.bias;
        /// Whether a learnable sink enters the denominator.
        sink: bool => score.sink;
        /// Function that modifies a scaled score.
        score_code: impl Into<Option<Function>> => code.score;
        /// Mask function: which pairs are visible.
        mask_code: impl Into<Option<Function>> => code.mask;
        /// The tensors that the functions capture.
        captured: Vec<CapturedTensor> => code.captured;
        /// Probability that a `P` is dropped.
        p_drop: f32 => dropout.p_drop;
        /// Whether and how FP8 Q is scaled.
        descale_q: Descale => scales.descale_q;
        /// Whether and how FP8 K is scaled.
        descale_k: Descale => scales.descale_k;
        /// Whether and how FP8 V is scaled.
        descale_v: Descale => scales.descale_v;
        /// Whether FP8 O is multiplied by a number before it is rounded.
        scale_o: bool => scales.scale_o;
        /// Scales by blocks of Q, K and V (MXFP8, NVFP4).
        block_scales: impl Into<Option<BlockScales>> => block_scales;
        /// FP8 type of the stored K and V under a 16-bit Q.
        dtype_cache: impl Into<Option<DType>> => cache.dtype;
        /// Format of K's rows if they are bytes that include their own scales.
        cache_rows: impl Into<Option<CacheRows>> => cache.rows;
        /// Scales of the rows of an FP8 cache.
        cache_scales: impl Into<Option<CacheScales>> => cache.scales;
        /// Whether V is the first `head_dim_v` elements of K's rows.
        v_in_k: bool => cache.v_in_k;
        /// New keys and values to write to the cache first.
        append: impl Into<Option<Append>> => cache.append;
        /// Rotary embedding of Q and of new keys.
        rotary: impl Into<Option<Rotary>> => cache.rotary;
        /// Whether a tree mask replaces the causal mask among the last keys.
        tree_mask: bool => cache.tree_mask;
        /// Position of the call in a larger whole of which it is a part.
        part: Part => part;
        /// Whether LSE is written.
        write_lse: bool => write_lse;
        /// Whether each row's greatest score is written.
        row_max: bool => outputs.row_max;
        /// Whether each head's greatest score is written.
        head_max: bool => outputs.head_max;
        /// Whether each key's sum of probabilities is written.
        key_sum: bool => outputs.key_sum;
        /// Number of pieces in which K and V arrive while the call runs.
        arrivals: u32 => arrivals;
        /// Whether the dropout keep mask is written.
        write_keep_mask: bool => dropout.write_keep_mask;
    }

    /// Q's shape (and dQ's) as known at planning: for a packed tensor, a sequence of the longest length.
    /// [`extents`](Self::extents) gives the whole tensor's.
    #[must_use]
    pub fn shape_q(&self) -> Shape {
        self.longest().q
    }

    /// K's shape (and dK's) as known at planning: for a packed tensor, one sequence of the longest length; for a
    /// paged one, the pages of one such sequence.
    #[must_use]
    pub fn shape_k(&self) -> Shape {
        self.longest().k
    }

    /// V's shape (and dV's) as known at planning, like [`shape_k`](Self::shape_k).
    #[must_use]
    pub fn shape_v(&self) -> Shape {
        self.longest().v
    }

    /// O's shape (and dO's) as known at planning, like [`shape_q`](Self::shape_q).
    #[must_use]
    pub fn shape_o(&self) -> Shape {
        self.longest().o
    }

    /// Extents of the tensors if they had as many packed rows or pages as the longest sequence needs, at least two.
    fn longest(&self) -> Extents {
        let Dims { seqlen_q, seqlen_k, .. } = self.dims;
        let pages = self.layout.kv.page_size().map_or(0, |size| seqlen_k.div_ceil(size.max(1)));
        let [total_q, total_k, num_pages] = [seqlen_q, seqlen_k, pages].map(|count| Some(count.max(2)));
        self.extents(Totals { total_q, total_k, num_pages, total_new: None })
    }

    /// The smallest extents that a call may have: two for packed rows and for pages, since the stride from one to
    /// the next is then used. The call's own extents may be below the upper bounds of the lengths, and are checked
    /// at the call.
    pub(crate) fn fewest(&self) -> Extents {
        let two = Some(2);
        self.extents(Totals { total_q: two, total_k: two, num_pages: two, total_new: None })
    }

    /// Extents of the tensors in memory. Totals that the layouts have and `totals` lacks count as 0.
    #[must_use]
    #[inline]
    pub fn extents(&self, totals: Totals) -> Extents {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v } =
            self.dims;
        let (batch_q, seq_q) = match self.layout.q {
            QLayout::Batch => (batch, seqlen_q),
            QLayout::Packed => (1, totals.total_q.unwrap_or(0)),
        };
        let (batch_k, seq_k) = match self.layout.kv {
            KvLayout::Strided => (batch, seqlen_k),
            KvLayout::Packed => (1, totals.total_k.unwrap_or(0)),
            KvLayout::Paged { page_size } => (totals.num_pages.unwrap_or(0), page_size),
        };
        let q = Shape { batch: batch_q, seq: seq_q, head: num_heads_q, dim: head_dim_qk };
        let k = Shape { batch: batch_k, seq: seq_k, head: num_heads_kv, dim: head_dim_qk };
        Extents {
            q,
            k,
            v: Shape { dim: head_dim_v, ..k },
            o: Shape { dim: head_dim_v, ..q },
            lse_elems: Shape { dim: 1, ..q }.num_elems(),
        }
    }

    /// Shape of an elementwise bias with this broadcast.
    #[must_use]
    pub fn shape_bias(&self, broadcast: BiasBroadcast) -> Shape {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, .. } = self.dims;
        broadcast.shape(batch, num_heads_q, seqlen_q, seqlen_k)
    }

    /// Bytes of the dropout keep mask.
    #[must_use]
    pub fn keep_mask_bytes(&self) -> u64 {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, .. } = self.dims;
        Shape { batch, seq: seqlen_q, head: num_heads_q, dim: seqlen_k }.num_elems()
    }

    /// The scale that is used: the caller's, or `1 / sqrt(head_dim_qk)`.
    #[must_use]
    pub fn resolved_softmax_scale(&self) -> f32 {
        self.score.softmax_scale.unwrap_or_else(|| 1.0 / (self.dims.head_dim_qk as f32).sqrt())
    }

    /// Query heads per key and value head; 0 if there are no kv heads, which no valid problem has.
    #[must_use]
    pub fn gqa_ratio(&self) -> u32 {
        self.dims.num_heads_q.checked_div(self.dims.num_heads_kv).unwrap_or(0)
    }

    /// Whether any score can be dropped.
    #[must_use]
    pub fn drops(&self) -> bool {
        keep_threshold(self.dropout.p_drop) < 1 << 32
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidFwd, ProblemError> {
        self.check_dims()?;
        self.check_dtypes()?;
        self.check_block_scales()?;
        self.check_layouts()?;
        self.check_score()?;
        self.code.check()?;
        self.check_cache()?;
        self.check_cache_rows()?;
        self.check_cache_scales()?;
        self.check_part()?;
        self.check_lists()?;
        self.check_masks()?;
        self.check_second()?;
        self.check_outputs()?;
        Ok(ValidFwd(self))
    }

    fn check_outputs(&self) -> Result<(), ProblemError> {
        if let (Some(name), Some(lists)) = (self.outputs.first(), self.lists) {
            let text =
                format!("{name} is wanted beside indices of topk {}, where none is written", lists.topk);
            return Err(ProblemError::new(name, text));
        }
        if let (Some(name), true) = (self.outputs.first(), self.second.is_some() || self.cache.rows.is_some())
        {
            let beside = if self.second.is_some() { "a second cache" } else { "cache_rows" };
            let text = format!("{name} is wanted beside {beside}, where none is written");
            return Err(ProblemError::new(name, text));
        }
        Ok(())
    }

    /// Number of elements of the output `key_sum`.
    #[must_use]
    pub fn key_sum_elems(&self) -> u64 {
        let Dims { batch, seqlen_k, num_heads_q, .. } = self.dims;
        Shape { batch, seq: seqlen_k, head: num_heads_q, dim: 1 }.num_elems()
    }

    fn check_dims(&self) -> Result<(), ProblemError> {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v } =
            self.dims;
        for (field, value) in [("num_heads_q", num_heads_q), ("num_heads_kv", num_heads_kv)] {
            ensure!(value >= 1, field, "{field} {value} is not at least 1");
        }
        for (field, value) in [("head_dim_qk", head_dim_qk), ("head_dim_v", head_dim_v)] {
            ensure!(
                (1..=MAX_HEAD_DIM).contains(&value),
                field,
                "{field} {value} is not in 1..={MAX_HEAD_DIM}"
            );
        }
        const MOST: u32 = i32::MAX.unsigned_abs();
        ensure!(batch <= MOST, "batch", "batch {batch} is larger than {MOST}");
        let arrivals = self.arrivals;
        ensure!(arrivals <= MAX_ARRIVALS, "arrivals", "arrivals {arrivals} is larger than {MAX_ARRIVALS}");
        ensure!(
            arrivals == 0 || self.layout.kv == KvLayout::Strided && self.cache == CacheUse::default(),
            "arrivals",
            "arrivals {arrivals}: keys that come in pieces are strided, and nothing happens to their cache"
        );
        for (field, value) in [("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)] {
            ensure!(value <= MAX_SEQLEN, field, "{field} {value} is larger than {MAX_SEQLEN}");
        }
        if let KvLayout::Paged { page_size } = self.layout.kv {
            ensure!(
                (1..=MAX_SEQLEN).contains(&page_size),
                "page_size",
                "page_size {page_size} is not in 1..={MAX_SEQLEN}"
            );
        }
        ensure!(
            num_heads_q.is_multiple_of(num_heads_kv),
            "num_heads_q",
            "num_heads_q {num_heads_q} is not a multiple of num_heads_kv {num_heads_kv}"
        );
        let heads = u64::from(batch) * u64::from(num_heads_q);
        ensure!(
            heads <= u64::from(MOST),
            "num_heads_q",
            "num_heads_q {num_heads_q} times batch {batch} is {heads}, larger than {MOST}"
        );
        let keep_mask = self.keep_mask_bytes();
        ensure!(
            !self.dropout.write_keep_mask || keep_mask <= MAX_EXTENT_BYTES,
            "write_keep_mask",
            "write_keep_mask: batch {batch}, num_heads_q {num_heads_q}, seqlen_q {seqlen_q} and seqlen_k \
             {seqlen_k} make a mask beyond 2^62 bytes"
        );
        Ok(())
    }

    fn check_dtypes(&self) -> Result<(), ProblemError> {
        let (qk, v, o) = (self.dtypes.qk, self.dtypes.v, self.dtypes.o);
        let hybrid = qk.is_fp8() && matches!(v, DType::F16 | DType::Bf16);
        ensure!(
            v == qk || hybrid,
            "dtype_v",
            "dtype_v {v} does not go with dtype_qk {qk} (the same type, or f16 or bf16 beside FP8 Q and K)"
        );
        ensure!(
            !o.is_fp8() || o == qk,
            "dtype_o",
            "dtype_o {o} does not go with dtype_qk {qk} (f32, f16, bf16, or the type of FP8 Q and K)"
        );
        for (field, descale, dtype) in [
            ("descale_q", self.scales.descale_q, qk),
            ("descale_k", self.scales.descale_k, self.stored_k()),
            ("descale_v", self.scales.descale_v, self.stored_v()),
        ] {
            ensure!(
                descale == Descale::None || dtype.is_fp8() || self.block_scales.is_some(),
                field,
                "{field} is given, but that tensor is {dtype}, not FP8"
            );
        }
        ensure!(
            !self.scales.scale_o || o.is_fp8(),
            "scale_o",
            "scale_o is given, but dtype_o is {o}, not FP8"
        );
        if let Bias::Elementwise(bias) = self.score.bias {
            let takes = |dtype| {
                dtype == DType::F32
                    || dtype == qk && !qk.is_fp8()
                    || qk.is_fp8() && matches!(dtype, DType::F16 | DType::Bf16)
            };
            ensure!(
                takes(bias.dtype),
                "bias.dtype",
                "bias.dtype {} does not go with dtype_qk {qk} (f32, or the input's 16-bit type)",
                bias.dtype
            );
        }
        Ok(())
    }

    fn check_layouts(&self) -> Result<(), ProblemError> {
        self.check_tensors(&self.fewest())?;
        if let Bias::Elementwise(bias) = self.score.bias {
            let shape = self.shape_bias(bias.broadcast);
            check_input("bias", bias.strides, shape, bias.dtype)?;
            check_unit_stride("bias", "dim", bias.strides.dim, shape.dim)?;
        }
        Ok(())
    }

    /// Checks the strides of tensors that have these extents.
    fn check_tensors(&self, extents: &Extents) -> Result<(), ProblemError> {
        if let Some(scales) = &self.block_scales {
            self.check_scaled_tensors(scales, extents)?;
            return check_output("o", self.strides.o, extents.o, self.dtypes.o);
        }
        check_input("q", self.strides.q, extents.q, self.dtypes.qk)?;
        let (k, dtype_k) = self.k_in_memory(extents.k);
        let (v, dtype_v) = self.v_in_memory(extents.v);
        check_input("k", self.strides.k, k, dtype_k)?;
        check_unit_stride("q", "dim", self.strides.q.dim, extents.q.dim)?;
        check_unit_stride("k", "dim", self.strides.k.dim, k.dim)?;
        check_v("v", self.strides.v, self.layout.v, v, dtype_v)?;
        self.check_written_cache(extents.k, extents.v)?;
        self.check_scale_strides(extents.k, extents.v)?;
        check_output("o", self.strides.o, extents.o, self.dtypes.o)
    }

    /// The checked extents of a call's tensors, for packed and paged tensors whose sizes planning does not have.
    ///
    /// # Errors
    /// A total that is missing, given without need or too large, and strides that do not go with it.
    #[inline]
    pub(crate) fn checked_extents(&self, totals: Totals) -> Result<Extents, ProblemError> {
        self.check_totals(totals)?;
        let extents = self.extents(totals);
        if totals != Totals::NONE {
            self.check_tensors(&extents)?;
            self.check_list_strides(totals)?;
            self.check_mask_tensors(totals)?;
        }
        Ok(extents)
    }

    fn check_score(&self) -> Result<(), ProblemError> {
        if let Some(scale) = self.score.softmax_scale {
            ensure!(scale.is_finite(), "softmax_scale", "softmax_scale {scale} is not finite");
        }
        if let Some(softcap) = self.score.softcap {
            ensure!(
                softcap.is_finite() && softcap > 0.0,
                "softcap",
                "softcap {softcap} is not finite and positive"
            );
        }
        let p_drop = self.dropout.p_drop;
        ensure!((0.0..1.0).contains(&p_drop), "p_drop", "p_drop {p_drop} is not in 0 <= p_drop < 1");
        Ok(())
    }
}

/// Extents in memory of a call's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Extents of Q, and of dQ.
    pub q: Shape,
    /// Extents of K, and of dK.
    pub k: Shape,
    /// Extents of V, and of dV.
    pub v: Shape,
    /// Extents of O, and of dO.
    pub o: Shape,
    /// Number of elements of LSE, and of dLSE.
    pub lse_elems: u64,
}

/// A forward problem without contradictions. Only [`FwdProblem::validate`] makes one.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidFwd(FwdProblem);

impl std::ops::Deref for ValidFwd {
    type Target = FwdProblem;

    fn deref(&self) -> &FwdProblem {
        &self.0
    }
}

impl ValidFwd {
    /// Bytes of memory that a tensor needs: from its first element to its last, both included. `shape` and
    /// `strides` belong to a validated tensor.
    #[must_use]
    #[inline]
    pub fn extent_bytes(strides: Strides, shape: Shape, dtype: DType) -> u64 {
        strides.extent(shape).map_or(u64::MAX, |elems| elems.saturating_mul(dtype.size_bytes()))
    }
}
