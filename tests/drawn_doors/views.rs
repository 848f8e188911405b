//! Drawn calls through `fmha`'s functions on slices and on views.

use fmha::{Attention, AttentionOutput, Backend, Element, TensorView, TensorViewMut};
use fmha_conformance::case::Body;
use fmha_conformance::check::{Selection, check_fwd, intact_fwd};
use fmha_conformance::tensor::Operand;
use fmha_conformance::tensors::{Data, HostFwd, Lengths};
use fmha_conformance::verdict::Verdict;
use fmha_core::{DType, DropoutSeed, FwdProblem, MemorySpace, PlanOptions};
use half::{bf16, f16};

use super::{cases, cpu, held};

/// Fields of [`Attention`] for a problem.
fn options_of(problem: &FwdProblem, dropout: DropoutSeed) -> Attention {
    Attention::new(problem.dims)
        .mask(problem.mask)
        .softmax_scale(problem.score.softmax_scale)
        .softcap(problem.score.softcap)
        .dropout(problem.dropout.p_drop, dropout)
        .backend(Backend::Cpu)
}

/// Drawn problem without what [`Attention`] can not express, in one type, with batches of the longest lengths.
fn plain(drawn: &FwdProblem, dtype: DType) -> FwdProblem {
    options_of(drawn, DropoutSeed::default()).problem(dtype)
}

/// Plain problem with the drawn types and strides, where the strides have a batch axis: views can express both.
fn with_views(drawn: &FwdProblem) -> FwdProblem {
    let plain = plain(drawn, drawn.dtypes.qk);
    let mut problem = plain.clone().dtype_v(drawn.dtypes.v).dtype_o(drawn.dtypes.o);
    if (drawn.layout.q, drawn.layout.kv) == (plain.layout.q, plain.layout.kv) {
        (problem.strides, problem.layout.v) = (drawn.strides, drawn.layout.v);
    }
    problem
}

fn checked(mut host: HostFwd, lse: &[f32]) -> Result<Verdict, String> {
    host.operands.expect_mut(Operand::Lse).elems_mut().copy_from_slice(bytemuck::cast_slice(lse));
    let plan = cpu().plan_fwd(&host.problem, &PlanOptions::default()).unwrap();
    host.score_sums = plan.promises().score_sums;
    let mut verdict = check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(intact_fwd(&host));
    Ok(verdict)
}

fn by_views(drawn: &FwdProblem, data: Data) -> Result<Verdict, String> {
    let mut host = HostFwd::new(with_views(drawn), &Lengths::default(), data).unwrap();
    let options = options_of(&host.problem, host.dropout);
    let of = |operand| {
        let tensor = host.operands.expect(operand);
        let first = tensor.elems().as_ptr();
        // SAFETY: the tensor holds every element of its shape and strides, and nothing writes it before the call ends.
        unsafe { TensorView::from_raw(MemorySpace::Host, first, tensor.dtype, tensor.shape, tensor.strides) }
    };
    let (q, k, v) = (of(Operand::Q), of(Operand::K), of(Operand::V));
    let (dtype, shape, strides, mut bytes) = {
        let o = host.operands.expect(Operand::O);
        (o.dtype, o.shape, o.strides, o.elems().to_vec())
    };
    // SAFETY: the memory is as large as O's elements, and nothing else uses it before the call ends.
    let o = unsafe { TensorViewMut::from_raw(MemorySpace::Host, bytes.as_mut_ptr(), dtype, shape, strides) };
    let lse = fmha::attention_into(&q, &k, &v, o, &options).map_err(|error| error.to_string())?;
    host.operands.expect_mut(Operand::O).elems_mut().copy_from_slice(&bytes);
    checked(host, &lse)
}

fn by_slices_of<T: Element>(drawn: &FwdProblem, data: Data) -> Result<Verdict, String> {
    let mut host = HostFwd::new(plain(drawn, T::DTYPE), &Lengths::default(), data).unwrap();
    let options = options_of(&host.problem, host.dropout);
    let of = |operand| -> Vec<T> {
        let bytes = host.operands.expect(operand).elems();
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    };
    let (q, k, v) = (of(Operand::Q), of(Operand::K), of(Operand::V));
    let AttentionOutput { o, lse } =
        fmha::attention(&q, &k, &v, &options).map_err(|error| error.to_string())?;
    host.operands.expect_mut(Operand::O).elems_mut().copy_from_slice(bytemuck::cast_slice(&o));
    checked(host, &lse)
}

fn by_slices(drawn: &FwdProblem, data: Data) -> Result<Verdict, String> {
    match drawn.dtypes.qk {
        DType::F16 => by_slices_of::<f16>(drawn, data),
        DType::Bf16 => by_slices_of::<bf16>(drawn, data),
        _ => by_slices_of::<f32>(drawn, data),
    }
}

/// Forward problem of a drawn call, or that of its backward call.
pub(super) fn forward_of(body: &Body) -> Option<(&FwdProblem, Data)> {
    match body {
        Body::Forward(case) => Some((&case.problem, case.data)),
        Body::Backward(case) => Some((&case.problem.fwd, case.data)),
        _ => None,
    }
}

#[test]
fn drawn_calls_on_views_are_right_and_write_nothing_between_rows() {
    let results = cases(60).into_iter().filter_map(|(name, body)| {
        let (problem, data) = forward_of(&body)?;
        Some((name, by_views(problem, data)))
    });
    held(&results.collect::<Vec<_>>(), 50, "views");
}

#[test]
fn drawn_calls_on_slices_are_right() {
    let results = cases(60).into_iter().filter_map(|(name, body)| {
        let (problem, data) = forward_of(&body)?;
        Some((name, by_slices(problem, data)))
    });
    held(&results.collect::<Vec<_>>(), 50, "slices");
}
