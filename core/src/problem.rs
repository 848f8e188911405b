//! The forward problem: every fact of a call but its pointers.

use crate::dropout::keep_threshold;
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::layout::{Shape, Strides, VLayout};
use crate::mask::MaskSpec;
use crate::score::{Bias, BiasBroadcast, Descale};
use crate::seq::SeqMode;

/// The sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Sequences.
    #[doc(alias = "b")]
    pub batch: u32,
    /// Queries of a sequence; in group mode an upper bound over the sequences.
    #[doc(alias = "max_seqlen_q")]
    pub seqlen_q: u32,
    /// Keys of a sequence; in group mode an upper bound over the sequences.
    #[doc(alias = "max_seqlen_k")]
    pub seqlen_k: u32,
    /// Query heads, a multiple of `num_heads_kv`.
    pub num_heads_q: u32,
    /// Key and value heads.
    pub num_heads_kv: u32,
    /// Elements of a query's or key's row.
    pub head_dim_qk: u32,
    /// Elements of a value's or output's row.
    pub head_dim_v: u32,
}

/// Largest head dimension that is a sound problem; which sizes a kernel takes is its own to say.
pub const MAX_HEAD_DIM: u32 = 1024;

/// A forward call without its pointers. [`validate`](Self::validate) it, then plan it.
///
/// Shapes: Q `[batch, seqlen_q, num_heads_q, head_dim_qk]`, K `[batch, seqlen_k, num_heads_kv,
/// head_dim_qk]`, V `[batch, seqlen_k, num_heads_kv, head_dim_v]`, O `[batch, seqlen_q,
/// num_heads_q, head_dim_v]`; in group mode batch and sequence are one axis of `total_q` or
/// `total_k` rows. Every tensor has strides of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct FwdProblem {
    /// Equal extents, or packed sequences.
    pub mode: SeqMode,
    /// The sizes.
    pub dims: Dims,
    /// Whether `seqused_q` gives each sequence's logical number of queries.
    pub seqused_q: bool,
    /// Whether `seqused_k` gives each sequence's logical number of keys.
    pub seqused_k: bool,
    /// The type of Q and K.
    pub dtype_qk: DType,
    /// The type of V: that of Q and K, or f16/bf16 beside FP8 Q and K (the hybrid scheme).
    pub dtype_v: DType,
    /// The type of O.
    pub dtype_o: DType,
    /// Strides of Q.
    pub q: Strides,
    /// Strides of K.
    pub k: Strides,
    /// Strides of V.
    pub v: Strides,
    /// Strides of O. No two elements share an address.
    pub o: Strides,
    /// Which axis of V has stride 1.
    pub v_layout: VLayout,
    /// Which keys a query sees.
    pub mask: MaskSpec,
    /// Multiplies `Q K^T`; `None` = `1 / sqrt(head_dim_qk)`. Any finite number.
    #[doc(alias = "sm_scale")]
    pub softmax_scale: Option<f32>,
    /// `softcap * tanh(S / softcap)`, before the bias. Finite and positive.
    pub softcap: Option<f32>,
    /// What is added to a score.
    pub bias: Bias,
    /// Whether a learnable sink f32 `[num_heads_q]` enters the denominator.
    pub sink: bool,
    /// Probability that a `P` is dropped: `0 <= p_drop < 1`.
    pub p_drop: f32,
    /// What FP8 Q is multiplied by.
    pub descale_q: Descale,
    /// What FP8 K is multiplied by.
    pub descale_k: Descale,
    /// What FP8 V is multiplied by.
    pub descale_v: Descale,
    /// Whether FP8 O is multiplied by a number `scale_o`, f32 `[1]`, before it is rounded.
    pub scale_o: bool,
    /// Whether LSE is written: f32 `[batch, num_heads_q, seqlen_q]`, or `[num_heads_q, total_q]`.
    #[doc(alias = "softmax_lse")]
    pub write_lse: bool,
    /// Whether the dropout keep mask is written, for tests: u8 `[batch, num_heads_q, seqlen_q,
    /// seqlen_k]`, 1 = kept; positions beyond a sequence's lengths are not written.
    pub write_keep_mask: bool,
}

impl FwdProblem {
    /// Batch mode, contiguous b·s·h·d, one type throughout; every option off. Set the rest by field.
    #[must_use]
    pub fn batch(dtype: DType, dims: Dims) -> Self {
        Self::new(SeqMode::Batch, dtype, dims)
    }

    /// Group mode (varlen): `total_q` and `total_k` packed rows, contiguous s·h·d. The lengths of
    /// `dims` are upper bounds.
    #[doc(alias = "varlen")]
    #[must_use]
    pub fn group(dtype: DType, dims: Dims, total_q: u32, total_k: u32) -> Self {
        Self::new(SeqMode::Group { total_q, total_k }, dtype, dims)
    }

    fn new(mode: SeqMode, dtype: DType, dims: Dims) -> Self {
        let mut problem = Self {
            mode,
            dims,
            seqused_q: false,
            seqused_k: false,
            dtype_qk: dtype,
            dtype_v: dtype,
            dtype_o: if dtype.is_fp8() { DType::Bf16 } else { dtype },
            q: Strides { batch: 0, seq: 0, head: 0, dim: 1 },
            k: Strides { batch: 0, seq: 0, head: 0, dim: 1 },
            v: Strides { batch: 0, seq: 0, head: 0, dim: 1 },
            o: Strides { batch: 0, seq: 0, head: 0, dim: 1 },
            v_layout: VLayout::RowMajor,
            mask: MaskSpec::NONE,
            softmax_scale: None,
            softcap: None,
            bias: Bias::None,
            sink: false,
            p_drop: 0.0,
            descale_q: Descale::None,
            descale_k: Descale::None,
            descale_v: Descale::None,
            scale_o: false,
            write_lse: false,
            write_keep_mask: false,
        };
        problem.q = Strides::bshd(problem.shape_q());
        problem.k = Strides::bshd(problem.shape_k());
        problem.v = Strides::bshd(problem.shape_v());
        problem.o = Strides::bshd(problem.shape_o());
        problem
    }

    /// Physical batch extent and rows of Q and O.
    fn rows_q(&self) -> (u32, u32) {
        match self.mode {
            SeqMode::Batch => (self.dims.batch, self.dims.seqlen_q),
            SeqMode::Group { total_q, .. } => (1, total_q),
        }
    }

    /// Physical batch extent and rows of K and V.
    fn rows_k(&self) -> (u32, u32) {
        match self.mode {
            SeqMode::Batch => (self.dims.batch, self.dims.seqlen_k),
            SeqMode::Group { total_k, .. } => (1, total_k),
        }
    }

    /// Physical shape of Q (and dQ).
    #[must_use]
    pub fn shape_q(&self) -> Shape {
        let (batch, seq) = self.rows_q();
        Shape { batch, seq, head: self.dims.num_heads_q, dim: self.dims.head_dim_qk }
    }

    /// Physical shape of K (and dK).
    #[must_use]
    pub fn shape_k(&self) -> Shape {
        let (batch, seq) = self.rows_k();
        Shape { batch, seq, head: self.dims.num_heads_kv, dim: self.dims.head_dim_qk }
    }

    /// Physical shape of V (and dV).
    #[must_use]
    pub fn shape_v(&self) -> Shape {
        let (batch, seq) = self.rows_k();
        Shape { batch, seq, head: self.dims.num_heads_kv, dim: self.dims.head_dim_v }
    }

    /// Physical shape of O (and dO).
    #[must_use]
    pub fn shape_o(&self) -> Shape {
        let (batch, seq) = self.rows_q();
        Shape { batch, seq, head: self.dims.num_heads_q, dim: self.dims.head_dim_v }
    }

    /// Shape of an elementwise bias with this broadcast.
    #[must_use]
    pub fn shape_bias(&self, broadcast: BiasBroadcast) -> Shape {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, .. } = self.dims;
        broadcast.shape(batch, num_heads_q, seqlen_q, seqlen_k)
    }

    /// Elements of LSE (and dLSE).
    #[must_use]
    pub fn lse_elems(&self) -> u64 {
        let (batch, seq) = self.rows_q();
        u64::from(batch) * u64::from(seq) * u64::from(self.dims.num_heads_q)
    }

    /// Bytes of the dropout keep mask.
    #[must_use]
    pub fn keep_mask_bytes(&self) -> u64 {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, .. } = self.dims;
        [batch, num_heads_q, seqlen_q, seqlen_k].iter().map(|&n| u64::from(n)).product()
    }

    /// The scale in force: the caller's, or `1 / sqrt(head_dim_qk)`.
    #[must_use]
    pub fn resolved_softmax_scale(&self) -> f32 {
        self.softmax_scale.unwrap_or_else(|| 1.0 / (self.dims.head_dim_qk as f32).sqrt())
    }

    /// Query heads per key and value head.
    #[must_use]
    pub fn gqa_ratio(&self) -> u32 {
        self.dims.num_heads_q / self.dims.num_heads_kv
    }

    /// Whether any score can be dropped.
    #[must_use]
    pub fn drops(&self) -> bool {
        keep_threshold(self.p_drop) < 1 << 32
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidFwd, ProblemError> {
        self.check_dims()?;
        self.check_dtypes()?;
        self.check_layouts()?;
        self.check_score()?;
        Ok(ValidFwd(self))
    }

    fn check_dims(&self) -> Result<(), ProblemError> {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v } =
            self.dims;
        for (field, value) in [("batch", batch), ("num_heads_q", num_heads_q), ("num_heads_kv", num_heads_kv)]
        {
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
        for (field, value) in [("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)] {
            ensure!(value <= MOST, field, "{field} {value} is larger than {MOST}");
        }
        if let SeqMode::Group { total_q, total_k } = self.mode {
            for (field, value) in [("total_q", total_q), ("total_k", total_k)] {
                ensure!(value <= MOST, field, "{field} {value} is larger than {MOST}");
            }
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
        Ok(())
    }

    fn check_dtypes(&self) -> Result<(), ProblemError> {
        let (qk, v, o) = (self.dtype_qk, self.dtype_v, self.dtype_o);
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
            ("descale_q", self.descale_q, qk),
            ("descale_k", self.descale_k, qk),
            ("descale_v", self.descale_v, v),
        ] {
            ensure!(
                descale == Descale::None || dtype.is_fp8(),
                field,
                "{field} is given, but that tensor is {dtype}, not FP8"
            );
        }
        ensure!(!self.scale_o || o.is_fp8(), "scale_o", "scale_o is given, but dtype_o is {o}, not FP8");
        if let Bias::Elementwise(bias) = self.bias {
            let takes = |dtype| {
                dtype == DType::F32
                    || dtype == qk && !qk.is_fp8()
                    || dtype == v && hybrid
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
        check_input("q", self.q, self.shape_q(), self.dtype_qk)?;
        check_input("k", self.k, self.shape_k(), self.dtype_qk)?;
        check_unit_stride("q", "dim", self.q.dim, self.dims.head_dim_qk)?;
        check_unit_stride("k", "dim", self.k.dim, self.dims.head_dim_qk)?;
        check_v("v", self.v, self.v_layout, self.shape_v(), self.dtype_v)?;
        check_output("o", self.o, self.shape_o(), self.dtype_o)?;
        if let Bias::Elementwise(bias) = self.bias {
            let shape = self.shape_bias(bias.broadcast);
            check_input("bias", bias.strides, shape, bias.dtype)?;
            check_unit_stride("bias", "dim", bias.strides.dim, shape.dim)?;
        }
        Ok(())
    }

    fn check_score(&self) -> Result<(), ProblemError> {
        if let Some(scale) = self.softmax_scale {
            ensure!(scale.is_finite(), "softmax_scale", "softmax_scale {scale} is not finite");
        }
        if let Some(softcap) = self.softcap {
            ensure!(
                softcap.is_finite() && softcap > 0.0,
                "softcap",
                "softcap {softcap} is not finite and positive"
            );
        }
        let p_drop = self.p_drop;
        ensure!((0.0..1.0).contains(&p_drop), "p_drop", "p_drop {p_drop} is not in 0 <= p_drop < 1");
        Ok(())
    }
}

/// A forward problem that contradicts itself nowhere. It cannot be made otherwise than by
/// [`FwdProblem::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct ValidFwd(FwdProblem);

impl std::ops::Deref for ValidFwd {
    type Target = FwdProblem;

    fn deref(&self) -> &FwdProblem {
        &self.0
    }
}

impl ValidFwd {
    /// Bytes from a tensor's first element to its last, both included: what its memory must cover.
    ///
    /// `shape` and `strides` are those of a tensor that validation saw.
    #[must_use]
    pub fn extent_bytes(strides: Strides, shape: Shape, dtype: DType) -> u64 {
        strides.extent(shape).map_or(u64::MAX, |elems| elems * dtype.size_bytes())
    }
}

/// Bytes that a tensor may span: half of what a pointer difference can express.
const MAX_EXTENT_BYTES: u64 = 1 << 62;

/// Strides that stay non-negative and inside the address range.
pub(crate) fn check_input(
    name: &'static str,
    strides: Strides,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    if let Some((axis, stride)) = strides.negative_axis(shape) {
        return Err(ProblemError::new(name, format!("{name}.{axis} stride {stride} is negative")));
    }
    let fits = strides.extent(shape).is_some_and(|elems| elems <= MAX_EXTENT_BYTES / dtype.size_bytes());
    ensure!(fits, name, "{name} strides {strides:?} reach beyond 2^62 bytes over {shape:?}");
    Ok(())
}

/// Outputs: rows of stride 1, and no element twice.
pub(crate) fn check_output(
    name: &'static str,
    strides: Strides,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    check_input(name, strides, shape, dtype)?;
    check_unit_stride(name, "dim", strides.dim, shape.dim)?;
    ensure!(
        strides.is_injective(shape),
        name,
        "{name} strides {strides:?} give two elements of {shape:?} one address"
    );
    Ok(())
}

/// V: stride 1 where its layout says.
pub(crate) fn check_v(
    name: &'static str,
    strides: Strides,
    layout: VLayout,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    check_input(name, strides, shape, dtype)?;
    match layout {
        VLayout::RowMajor => check_unit_stride(name, "dim", strides.dim, shape.dim),
        VLayout::ColMajor => check_unit_stride(name, "seq", strides.seq, shape.seq),
    }
}

pub(crate) fn check_unit_stride(
    name: &'static str,
    axis: &str,
    stride: i64,
    extent: u32,
) -> Result<(), ProblemError> {
    ensure!(stride == 1 || extent <= 1, name, "{name}.{axis} stride {stride} is not 1");
    Ok(())
}
