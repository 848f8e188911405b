//! Attention on host slices in one call: the way in for newcomers.

use bytemuck::{AnyBitPattern, NoUninit};
use fmha_core::{
    DType, Dims, DropoutSeed, Error, FwdArgs, FwdProblem, MaskSpec, PlanOptions, ProblemError, Result,
};
use half::{bf16, f16};

use crate::memory::{Input, Output, zeros};
use crate::registry::{Backend, Device};

/// What to compute. [`Attention::new`] has every option off; set the rest by field.
///
/// This is the common part of what there is: for packed sequences, bias, sinks, strides, FP8 and
/// gradients build an [`FwdProblem`] and plan it on a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// The sizes.
    pub dims: Dims,
    /// Which keys a query sees: [`MaskSpec::CAUSAL`], or parsed from text such as `b:128,0`.
    pub mask: MaskSpec,
    /// Multiplies `Q K^T`; `None` = `1 / sqrt(head_dim_qk)`.
    pub softmax_scale: Option<f32>,
    /// `softcap * tanh(S / softcap)`.
    pub softcap: Option<f32>,
    /// Probability that a `P` is dropped.
    pub p_drop: f32,
    /// Where the dropout generator stands.
    pub dropout: DropoutSeed,
    /// Whether a kernel that is correct but far from fast may serve where no fast one takes the
    /// problem.
    pub allow_fallback: bool,
    /// Which backend [`attention`] runs on: its device is opened once and kept.
    pub backend: Backend,
}

impl Attention {
    /// Full attention over `dims` on the best device.
    #[must_use]
    pub fn new(dims: Dims) -> Self {
        Self {
            dims,
            mask: MaskSpec::NONE,
            softmax_scale: None,
            softcap: None,
            p_drop: 0.0,
            dropout: DropoutSeed::default(),
            allow_fallback: false,
            backend: Backend::Auto,
        }
    }

    /// The problem it stands for: batch mode, contiguous b·s·h·d, LSE written.
    #[must_use]
    pub fn problem(&self, dtype: DType) -> FwdProblem {
        FwdProblem {
            mask: self.mask,
            softmax_scale: self.softmax_scale,
            softcap: self.softcap,
            p_drop: self.p_drop,
            write_lse: true,
            ..FwdProblem::batch(dtype, self.dims)
        }
    }
}

/// What [`attention`] computes.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput<T> {
    /// O `[batch, seqlen_q, num_heads_q, head_dim_v]`, contiguous.
    pub o: Vec<T>,
    /// LSE `[batch, num_heads_q, seqlen_q]`: natural log; −inf for a row that sees no key.
    pub lse: Vec<f32>,
}

/// A Rust type that a tensor's elements can have: `f32`, `f16`, `bf16`.
pub trait Element: NoUninit + AnyBitPattern + Default + sealed::Sealed {
    /// Its [`DType`].
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($elem:ty = $dtype:ident),*) => {$(
        impl sealed::Sealed for $elem {}
        impl Element for $elem {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(f32 = F32, f16 = F16, bf16 = Bf16);

/// Attention over contiguous tensors in host memory: Q `[batch, seqlen_q, num_heads_q,
/// head_dim_qk]`, K `[batch, seqlen_k, num_heads_kv, head_dim_qk]`, V `[batch, seqlen_k,
/// num_heads_kv, head_dim_v]`.
///
/// # Errors
/// [`Error::Problem`] when sizes and slices do not fit, with the field and the numbers;
/// [`Error::NoDevice`] when the chosen backend is absent; what the backend said.
pub fn attention<T: Element>(q: &[T], k: &[T], v: &[T], options: &Attention) -> Result<AttentionOutput<T>> {
    let device = Device::open(options.backend.clone())?;
    attention_on(&device, q, k, v, options)
}

/// As [`attention`], on a device that is already open; `options.backend` plays no part.
///
/// # Errors
/// As [`attention`].
pub fn attention_on<T: Element>(
    device: &fmha_core::Device,
    q: &[T],
    k: &[T],
    v: &[T],
    options: &Attention,
) -> Result<AttentionOutput<T>> {
    let problem = options.problem(T::DTYPE).validate()?;
    for (field, shape, given) in [
        ("q", problem.shape_q(), q.len()),
        ("k", problem.shape_k(), k.len()),
        ("v", problem.shape_v(), v.len()),
    ] {
        if shape.num_elems() != given as u64 {
            let text = format!(
                "{field} has {given} elements, but [{}, {}, {}, {}] are {}",
                shape.batch,
                shape.seq,
                shape.head,
                shape.dim,
                shape.num_elems()
            );
            return Err(Error::Problem(ProblemError::new(field, text)));
        }
    }
    let plan_options = PlanOptions { allow_fallback: options.allow_fallback, ..PlanOptions::default() };
    let plan = device.plan_fwd(&problem, &plan_options)?;
    let mut result = AttentionOutput {
        o: zeros("o", problem.shape_o().num_elems())?,
        lse: zeros("lse", problem.extents(fmha_core::Totals::NONE).lse_elems)?,
    };

    let memory = device.memory();
    let (q, k, v) = (Input::new(memory, q)?, Input::new(memory, k)?, Input::new(memory, v)?);
    let mut o = Output::new(memory, &mut result.o)?;
    let mut lse = Output::new(memory, &mut result.lse)?;
    let mut workspace = memory.workspace(plan.workspace())?;

    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
    args.lse = Some(lse.slice_mut());
    args.score.dropout = options.dropout;
    args.workspace = workspace.as_mut().map(fmha_core::DevBuffer::slice_mut);
    let stream = device.default_stream();
    plan.run(&mut args, &stream)?;
    stream.synchronize()?;
    o.finish(memory)?;
    lse.finish(memory)?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: Dims = Dims {
        batch: 2,
        seqlen_q: 3,
        seqlen_k: 5,
        num_heads_q: 4,
        num_heads_kv: 2,
        head_dim_qk: 8,
        head_dim_v: 6,
    };

    fn tensors<T: Element>(to: impl Fn(f32) -> T) -> (Vec<T>, Vec<T>, Vec<T>) {
        let wave = |count: usize, step: f32| (0..count).map(|i| to((i as f32 * step).sin())).collect();
        (wave(2 * 3 * 4 * 8, 0.7), wave(2 * 5 * 2 * 8, 1.3), wave(2 * 5 * 2 * 6, 0.3))
    }

    fn equals_the_reference<T: Element>(to: impl Fn(f32) -> T, read: impl Fn(T) -> f64, tolerance: f64) {
        let (q, k, v) = tensors(to);
        let options = Attention { mask: MaskSpec::CAUSAL, ..Attention::new(DIMS) };
        let result = attention(&q, &k, &v, &options).unwrap();

        let problem = options.problem(T::DTYPE);
        let mut unused = vec![T::default(); result.o.len()];
        let args = FwdArgs::new(
            fmha_core::DevSlice::host(&q),
            fmha_core::DevSlice::host(&k),
            fmha_core::DevSlice::host(&v),
            fmha_core::DevSliceMut::host(&mut unused),
        );
        let heads =
            fmha_core::reference::forward(&problem, &args, fmha_core::reference::Precision::Exact).unwrap();
        for head in heads {
            for i in 0..3 {
                for d in 0..6 {
                    let at = problem.o.offset(head.span.i_batch, i, head.i_head, d) as usize;
                    let error = (read(result.o[at]) - head.o[(i * 6 + d) as usize]).abs();
                    assert!(error <= tolerance, "{error}");
                }
                let lse = result.lse[head.span.lse_index(&problem, head.i_head, i)];
                assert!((f64::from(lse) - head.lse[i as usize]).abs() <= 1e-5);
            }
        }
    }

    #[test]
    fn attention_on_slices_equals_the_reference_in_every_type() {
        equals_the_reference(|x| x, f64::from, 1e-6);
        equals_the_reference(f16::from_f32, f64::from, 2e-3);
        equals_the_reference(bf16::from_f32, f64::from, 2e-2);
    }

    #[test]
    fn a_slice_that_does_not_fit_is_refused_by_name_and_count() {
        let (q, k, v) = tensors(|x| x);
        let error = attention(&q, &k[1..], &v, &Attention::new(DIMS)).unwrap_err();
        assert_eq!(error.to_string(), "k has 159 elements, but [2, 5, 2, 8] are 160");
        let error = attention(&q, &k, &v[..0], &Attention::new(DIMS)).unwrap_err();
        assert_eq!(error.to_string(), "v has 0 elements, but [2, 5, 2, 6] are 120");
    }
}
