//! Compile-time facts of a problem: those that change a kernel's instructions or registers.

use crate::abi_enum;
use crate::abi_spec;
use crate::bwd::BwdProblem;
use crate::combine::{CombineProblem, Merge};
use crate::dtype::DType;
use crate::fields::{FieldValue, Fields as _};
use crate::layout::{KvLayout, QLayout, VLayout};
use crate::mask::MaskKind;
use crate::problem::{Code, FwdProblem};
use crate::score::Bias;

/// Kind of layout of K and V: [`KvLayout`] without its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvKind {
    /// Equal extents, a batch axis.
    Strided,
    /// Packed sequences, located by `cu_seqlens_k`.
    Packed,
    /// Keys lie in pages, found by a block table.
    Paged,
}

impl From<KvLayout> for KvKind {
    fn from(layout: KvLayout) -> Self {
        match layout {
            KvLayout::Strided => KvKind::Strided,
            KvLayout::Packed => KvKind::Packed,
            KvLayout::Paged { .. } => KvKind::Paged,
        }
    }
}

/// Kind of bias that is added to a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasKind {
    /// Scores have no bias.
    None,
    /// Scores have a bias that is a tensor of one number for each pair.
    Elementwise,
    /// A slope times the distance from the diagonal.
    Alibi,
}

/// Which functions a call has as code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeKind {
    /// The call has no function.
    None,
    /// The call has a score function.
    Score,
    /// The call has a mask function.
    Mask,
    /// The call has a score function and a mask function.
    Both,
}

impl From<&Code> for CodeKind {
    fn from(code: &Code) -> Self {
        match (&code.score, &code.mask) {
            (None, None) => CodeKind::None,
            (Some(_), None) => CodeKind::Score,
            (None, Some(_)) => CodeKind::Mask,
            (Some(_), Some(_)) => CodeKind::Both,
        }
    }
}

abi_enum!(CodeKind { None, Score, Mask, Both });
abi_enum!(QLayout { Batch, Packed });
abi_enum!(KvKind { Strided, Packed, Paged });
abi_enum!(Merge { ByLse, Sum, AddTo });
abi_enum!(BiasKind { None, Elementwise, Alibi });

abi_spec! {
    /// Compile-time facts of a forward kernel. Run-time numbers (lengths, strides, scale, bounds) are in
    /// [`FwdParams`](crate::abi::FwdParams); each kernel's tile has its tuning parameters.
    pub struct FwdSpec {
        /// Type of Q and K.
        pub dtype_qk: DType,
        /// Type of V, and of P.
        pub dtype_v: DType,
        /// Type of O.
        pub dtype_o: DType,
        /// Type of the elementwise bias; F32 if there is none.
        pub dtype_bias: DType,
        /// Elements of a query's or key's row.
        pub head_dim_qk: i32,
        /// Number of elements of a value's or output's row.
        pub head_dim_v: i32,
        /// Layout of Q and O.
        pub q_layout: QLayout,
        /// Layout of K and V.
        pub kv_layout: KvKind,
        /// Axis of V that has stride 1.
        pub v_layout: VLayout,
        /// Which bounds the mask has.
        pub mask: MaskKind,
        /// Whether some leading keys stay visible below the band's lower bound.
        pub sink_columns: bool,
        /// Kind of bias that is added to a score.
        pub bias: BiasKind,
        /// Which functions the problem has, a score's or a mask's; their text is `fmha/code.h`.
        pub code: CodeKind,
        /// Whether scores are soft-capped.
        pub softcap: bool,
        /// Whether a learnable sink enters the denominator.
        pub sink: bool,
        /// Whether probabilities are dropped.
        pub dropout: bool,
        /// Whether `softmax_scale` is negative. A kernel that takes the maximum before scaling must then take the
        /// maximum of `-S`.
        pub negative_scale: bool,
        /// Whether LSE is written.
        pub write_lse: bool,
        /// Whether the dropout keep mask is written.
        pub write_keep_mask: bool,
    }
}

impl FwdSpec {
    /// The compile-time facts of a problem.
    #[must_use]
    pub fn of(problem: &FwdProblem) -> Self {
        let (bias, dtype_bias) = match problem.score.bias {
            Bias::None => (BiasKind::None, DType::F32),
            Bias::Elementwise(bias) => (BiasKind::Elementwise, bias.dtype),
            Bias::Alibi { .. } => (BiasKind::Alibi, DType::F32),
        };
        let mask = problem.mask.kind();
        Self {
            dtype_qk: problem.dtypes.qk,
            dtype_v: problem.dtypes.v,
            dtype_o: problem.dtypes.o,
            dtype_bias,
            head_dim_qk: problem.dims.head_dim_qk as i32,
            head_dim_v: problem.dims.head_dim_v as i32,
            q_layout: problem.layout.q,
            kv_layout: problem.layout.kv.into(),
            v_layout: problem.layout.v,
            mask,
            // Without a lower bound the band hides no key that a sink column could show, so sink columns are dropped.
            sink_columns: mask == MaskKind::Band && problem.mask.sink_columns > 0,
            bias,
            code: CodeKind::from(&problem.code),
            softcap: problem.score.softcap.is_some(),
            sink: problem.score.sink,
            dropout: problem.drops(),
            negative_scale: problem.resolved_softmax_scale() < 0.0,
            write_lse: problem.write_lse,
            write_keep_mask: problem.dropout.write_keep_mask,
        }
    }

    /// The spec of a plain call with one type, for examples and tests.
    #[must_use]
    pub const fn plain(dtype: DType, head_dim: i32, mask: MaskKind) -> Self {
        Self {
            dtype_qk: dtype,
            dtype_v: dtype,
            dtype_o: dtype,
            dtype_bias: DType::F32,
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
            q_layout: QLayout::Batch,
            kv_layout: KvKind::Strided,
            v_layout: VLayout::RowMajor,
            mask,
            sink_columns: false,
            bias: BiasKind::None,
            code: CodeKind::None,
            softcap: false,
            sink: false,
            dropout: false,
            negative_scale: false,
            write_lse: true,
            write_keep_mask: false,
        }
    }
}

/// A spec inside another spec is set by its own fields, not as a whole.
impl FieldValue for FwdSpec {
    fn names() -> Vec<String> {
        Vec::new()
    }

    fn of_name(_: &str) -> Option<Self> {
        None
    }

    fn name(&self) -> String {
        self.named_values()
            .into_iter()
            .map(|(field, value)| format!("{field}={value}"))
            .collect::<Vec<_>>()
            .join(",")
    }
}

abi_spec! {
    /// Compile-time facts of a backward kernel. Run-time numbers are in [`BwdParams`](crate::abi::BwdParams).
    pub struct BwdSpec {
        /// The forward call. A backward kernel ignores its outputs, so their fields have fixed values here.
        pub fwd: FwdSpec,
        /// Type of dQ, dK and dV.
        pub dtype_grad: DType,
        /// Type of dBias; F32 if it is not wanted.
        pub dtype_dbias: DType,
        /// Whether the bias' gradient is written.
        pub write_dbias: bool,
        /// Whether the sinks' gradient is written.
        pub write_dsink: bool,
        /// Whether gradients of tensors that the score function captures are written.
        pub write_dcaptured: bool,
        /// Whether there is a gradient of LSE.
        pub has_dlse: bool,
        /// Whether gradients are added in a fixed order, so that every run gives equal bits.
        pub deterministic: bool,
    }
}

impl BwdSpec {
    /// The compile-time facts of a problem, without a fixed order of sums: the plan sets that.
    #[must_use]
    pub fn of(problem: &BwdProblem) -> Self {
        let fwd = FwdSpec { write_lse: true, write_keep_mask: false, ..FwdSpec::of(&problem.fwd) };
        Self {
            fwd,
            dtype_grad: problem.dtype_grad,
            dtype_dbias: problem.dbias.map_or(DType::F32, |dbias| dbias.dtype),
            write_dbias: problem.dbias.is_some(),
            write_dsink: problem.write_dsink,
            write_dcaptured: !problem.dcaptured.is_empty(),
            has_dlse: problem.has_dlse,
            deterministic: false,
        }
    }

    /// The spec of a plain call's backward, as [`FwdSpec::plain`].
    #[must_use]
    pub const fn plain(dtype: DType, head_dim: i32, mask: MaskKind) -> Self {
        Self {
            fwd: FwdSpec::plain(dtype, head_dim, mask),
            dtype_grad: dtype,
            dtype_dbias: DType::F32,
            write_dbias: false,
            write_dsink: false,
            write_dcaptured: false,
            has_dlse: false,
            deterministic: false,
        }
    }
}

abi_spec! {
    /// Compile-time facts of a combine kernel.
    pub struct CombineSpec {
        /// Type of the parts' O.
        pub dtype_part: DType,
        /// Type of the combined O.
        pub dtype_o: DType,
        /// Number of elements of a row.
        pub head_dim_v: i32,
        /// How partial results are merged.
        pub merge: Merge,
    }
}

impl CombineSpec {
    /// The compile-time facts of a problem.
    #[must_use]
    pub fn of(problem: &CombineProblem) -> Self {
        Self {
            dtype_part: problem.dtype_part,
            dtype_o: problem.dtype_o,
            head_dim_v: problem.head_dim_v as i32,
            merge: problem.merge,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Dims;

    fn problem() -> FwdProblem {
        let dims = Dims::batch(2).seqlens(3, 5).heads(4, 2).head_dims(16, 8);
        FwdProblem::batch(DType::Bf16, dims)
    }

    #[test]
    fn a_kernel_has_sink_columns_where_a_lower_bound_hides_keys_that_they_show() {
        for (mask, sink_columns) in [("b:2,1", 0), ("b", 4), ("b:-1,0", 4)] {
            let mut problem = problem();
            problem.mask = mask.parse().unwrap();
            problem.mask.sink_columns = sink_columns;
            assert!(!FwdSpec::of(&problem).sink_columns, "{mask} with {sink_columns}");
        }
        let mut problem = problem();
        problem.mask = "b:2,1,4".parse().unwrap();
        let spec = FwdSpec::of(&problem);
        assert_eq!((spec.mask, spec.sink_columns), (MaskKind::Band, true));
    }

    #[test]
    fn a_scale_is_negative_below_zero_alone() {
        let negative = |scale| FwdSpec::of(&problem().softmax_scale(scale)).negative_scale;
        assert_eq!([None, Some(0.5), Some(0.0), Some(-0.5)].map(negative), [false, false, false, true]);
    }

    /// Backward specs are equal for forward calls with different outputs, since one backward kernel serves them
    /// all.
    #[test]
    fn what_a_forward_call_writes_is_alike_in_every_backward_spec() {
        let spec = |write_lse, write_keep_mask| {
            BwdSpec::of(&BwdProblem::new(problem().write_lse(write_lse).write_keep_mask(write_keep_mask)))
        };
        let fwd = spec(false, true).fwd;
        assert!(fwd.write_lse && !fwd.write_keep_mask);
        assert_eq!(spec(false, true), spec(true, false));
    }

    #[test]
    fn a_spec_within_a_spec_is_named_by_its_fields_and_cannot_be_set() {
        let mut spec = BwdSpec::of(&BwdProblem::new(problem()));
        let (field, value) = &spec.named_values()[0];
        assert_eq!(*field, "fwd");
        assert!(value.starts_with("dtype_qk=bf16,dtype_v=bf16,dtype_o=bf16,dtype_bias=f32,"), "{value}");
        assert!(
            value.contains(",head_dim_qk=16,head_dim_v=8,") && value.ends_with(",write_keep_mask=0"),
            "{value}"
        );
        assert_eq!(FwdSpec::names(), Vec::<String>::new());
        let error = spec.set_field("fwd", value).unwrap_err();
        assert!(error.starts_with("fwd=dtype_qk=bf16,"), "{error}");
    }
}
