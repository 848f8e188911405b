//! The backward problem: a forward problem, and the types and strides of its gradients.

use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::layout::{Strides, Totals, VLayout};
use crate::problem::{
    CapturedGrad, CapturedTensor, Extents, FwdProblem, ValidFwd, check_input, check_output, check_unit_stride,
};
use crate::score::Bias;
use crate::setters::setters;

/// The gradient of an elementwise bias: shaped like the bias, summed over its broadcast axes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BiasGrad {
    /// Type of the gradient: f32, f16 or bf16.
    pub dtype: DType,
    /// Strides of `batch`, `head`, `seq` (the query) and `dim` (the key, 1). No two elements share an address.
    pub strides: Strides,
}

/// A backward call without its pointers: dQ, dK, dV (and dBias, dSink) from dO, O and LSE.
///
/// Gradients of FP8 tensors, and of tensors with scales by blocks, are those of their dequantised values.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BwdProblem {
    /// The forward call. Its `write_lse`, `write_keep_mask` and `scale_o` are ignored.
    pub fwd: FwdProblem,
    /// The type of dQ, dK and dV: f32, f16 or bf16.
    pub dtype_grad: DType,
    /// Strides of dO, which has O's shape and type.
    pub dout: Strides,
    /// Strides of dQ.
    pub dq: Strides,
    /// Strides of dK.
    pub dk: Strides,
    /// Strides of dV, which is row-major for every layout of V.
    pub dv: Strides,
    /// The gradient of the elementwise bias, if wanted. All of it is written: 0 where no score used an element.
    pub dbias: Option<BiasGrad>,
    /// Gradients of tensors that the score function captures, in the order of
    /// [`BwdArgs::dcaptured`](crate::BwdArgs::dcaptured).
    pub dcaptured: Vec<CapturedGrad>,
    /// Whether the gradient of the sinks is written, f32 `[num_heads_q]`.
    pub write_dsink: bool,
    /// Whether the caller gives a gradient of LSE, so that LSE is differentiated too.
    pub has_dlse: bool,
}

impl BwdProblem {
    /// Number of elements of each gradient in [`dcaptured`](Self::dcaptured), those of tensors that the score
    /// function reads.
    #[must_use]
    pub fn captured_elems(&self) -> impl ExactSizeIterator<Item = u64> {
        let code = &self.fwd.code;
        self.dcaptured.iter().map(|wanted| code.tensor(&wanted.name).map_or(0, CapturedTensor::num_elems))
    }

    /// Makes a backward problem whose gradients have the inputs' type (bf16 for FP8, the values' for scales by blocks)
    /// and strides (contiguous b·s·h·d for a column-major or overlapping tensor, and beside scales by blocks), with
    /// every option off. Setters turn options on.
    #[must_use]
    pub fn new(fwd: FwdProblem) -> Self {
        // With scales by blocks, strides of stored elements count bytes, and two NVFP4 numbers share one.
        let in_blocks = fwd.block_scales.is_some();
        let like = |strides: Strides, shape| {
            if strides.is_injective(shape) && !in_blocks { strides } else { Strides::bshd(shape) }
        };
        let dv = match fwd.layout.v {
            VLayout::RowMajor => like(fwd.strides.v, fwd.shape_v()),
            VLayout::ColMajor => Strides::bshd(fwd.shape_v()),
        };
        Self {
            dtype_grad: if fwd.dtypes.qk.is_fp8() { DType::Bf16 } else { fwd.dtypes.qk },
            dout: fwd.strides.o,
            dq: like(fwd.strides.q, fwd.shape_q()),
            dk: like(fwd.strides.k, fwd.shape_k()),
            dv,
            dbias: None,
            dcaptured: vec![],
            write_dsink: false,
            has_dlse: false,
            fwd,
        }
    }

    /// Refuses gradients that kernels over lists of keys do not compute: of a bias, of functions and of captured
    /// tensors.
    ///
    /// # Errors
    /// Lists of keys together with one of these gradients.
    pub fn refuse_gradients_beside_lists(&self, kernel: &str) -> Result<(), Refusal> {
        let Some(lists) = &self.fwd.lists else { return Ok(()) };
        let beside = if self.dbias.is_some() {
            "dbias".to_owned()
        } else if let Err(refusal) = self.fwd.code.refuse(kernel) {
            refusal.reason
        } else {
            return Ok(());
        };
        Err(Refusal::new(
            kernel,
            format!("{beside} beside indices of topk {} is not in this kernel", lists.topk),
        ))
    }

    /// The equivalent problem on Q, K and V after multiplication by their scales, as [`FwdProblem::over_values`] has
    /// it: its gradients are this problem's. `None` without scales by blocks.
    #[must_use]
    pub fn over_values(&self, totals: Totals) -> Option<Self> {
        let fwd = self.fwd.over_values(totals, self.fwd.dims.seqlen_k)?;
        Some(Self { fwd, ..self.clone() })
    }

    setters! {
        /// The type of dQ, dK and dV: f32, f16 or bf16.
        dtype_grad: DType => dtype_grad;
        /// Strides of dO.
        strides_dout: Strides => dout;
        /// Strides of dQ.
        strides_dq: Strides => dq;
        /// Strides of dK.
        strides_dk: Strides => dk;
        /// Strides of dV.
        strides_dv: Strides => dv;
        /// The gradient of the elementwise bias, if wanted.
        dbias: impl Into<Option<BiasGrad>> => dbias;
        /// Gradients of tensors that the score function captures.
        dcaptured: Vec<CapturedGrad> => dcaptured;
        /// Whether the gradient of the sinks is written.
        write_dsink: bool => write_dsink;
        /// Whether the caller gives a gradient of LSE.
        has_dlse: bool => has_dlse;
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidBwd, ProblemError> {
        let fwd = self.fwd.clone().validate()?;
        ensure!(
            !fwd.dtypes.o.is_fp8(),
            "dtype_o",
            "dtype_o {}: there is no gradient of an FP8 O",
            fwd.dtypes.o
        );
        if let Some(second) = &fwd.second {
            let text = format!("second: a second cache of seqlen_k {} has no gradient", second.seqlen_k);
            return Err(ProblemError::new("second", text));
        }
        let grad = self.dtype_grad;
        ensure!(!grad.is_fp8(), "dtype_grad", "dtype_grad {grad} is not f32, f16 or bf16");
        if let Some(page_size) = fwd.layout.kv.page_size() {
            let text = format!("kv_layout: pages of page_size {page_size} have no gradient");
            return Err(ProblemError::new("kv_layout", text));
        }
        if let Err(refusal) = fwd.refuse_cache_updates("backward") {
            return Err(ProblemError::new("fwd", format!("fwd: {} in 1 backward call", refusal.reason)));
        }
        ensure!(!fwd.cache.v_in_k, "v_in_k", "v_in_k true: V has no rows of its own, and no gradient");
        self.check_tensors(&fwd.fewest())?;
        if let Some(dbias) = self.dbias {
            let Bias::Elementwise(bias) = fwd.score.bias else {
                let bias = if fwd.score.bias == Bias::None { "none" } else { "ALiBi" };
                return Err(ProblemError::new("dbias", format!("dbias is wanted, but bias is {bias}")));
            };
            ensure!(!dbias.dtype.is_fp8(), "dbias", "dbias.dtype {} is not f32, f16 or bf16", dbias.dtype);
            check_output("dbias", dbias.strides, fwd.shape_bias(bias.broadcast), dbias.dtype)?;
        }
        fwd.code.check_gradients(&self.dcaptured)?;
        ensure!(
            !self.has_dlse || fwd.lists.is_none_or(|lists| !lists.lse_without_sink),
            "has_dlse",
            "has_dlse true beside lse_without_sink true: an LSE without its sink has no gradient"
        );
        ensure!(fwd.score.sink || !self.write_dsink, "dsink", "dsink is wanted, but sink is false");
        Ok(ValidBwd { fwd, problem: self })
    }

    /// Checks the strides of gradients that have these extents.
    fn check_tensors(&self, extents: &Extents) -> Result<(), ProblemError> {
        let grad = self.dtype_grad;
        check_input("dout", self.dout, extents.o, self.fwd.dtypes.o)?;
        check_unit_stride("dout", "dim", self.dout.dim, extents.o.dim)?;
        check_output("dq", self.dq, extents.q, grad)?;
        check_output("dk", self.dk, extents.k, grad)?;
        check_output("dv", self.dv, extents.v, grad)
    }

    /// The extents of a call's tensors, checked as by [`FwdProblem::checked_extents`], with those of the gradients.
    pub(crate) fn checked_extents(&self, totals: Totals) -> Result<Extents, ProblemError> {
        let extents = self.fwd.checked_extents(totals)?;
        if totals != Totals::NONE {
            self.check_tensors(&extents)?;
        }
        Ok(extents)
    }
}

/// A backward problem without contradictions, made by [`BwdProblem::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct ValidBwd {
    fwd: ValidFwd,
    problem: BwdProblem,
}

impl ValidBwd {
    /// The forward problem, validated.
    #[must_use]
    pub fn fwd(&self) -> &ValidFwd {
        &self.fwd
    }
}

impl std::ops::Deref for ValidBwd {
    type Target = BwdProblem;

    fn deref(&self) -> &BwdProblem {
        &self.problem
    }
}
