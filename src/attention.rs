//! Attention on host slices in one call: the simplest interface.

use fmha_core::{
    DType, DevSliceMut, Device, Dims, DropoutSeed, Error, FwdArgs, FwdProblem, MaskSpec, PlanOptions,
    ProblemError, Result, Shape, Totals, VLayout,
};

use crate::memory::{Input, Output, zeros};
use crate::registry::Backend;
use crate::view::{Element, TensorView, TensorViewMut};

/// Problem of [`attention`]. [`Attention::new`] has every option off; the setters turn them on.
///
/// [`Attention`] covers common calls. For packed sequences, bias, sinks, strides, FP8 and gradients build an
/// [`FwdProblem`] and plan it on a backend.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attention {
    /// Sizes of the tensors.
    pub dims: Dims,
    /// Mask: the keys that a query sees. [`MaskSpec::CAUSAL`], or parsed from text such as `b:128,0`.
    pub mask: MaskSpec,
    /// Factor of `Q K^T`; `None` means `1 / sqrt(head_dim_qk)`.
    pub softmax_scale: Option<f32>,
    /// Soft-cap: scores S become `softcap * tanh(S / softcap)`.
    pub softcap: Option<f32>,
    /// Probability that an element of P is dropped.
    pub p_drop: f32,
    /// Position of dropout's random generator. A call with `p_drop` above 0 must set it.
    pub dropout: Option<DropoutSeed>,
    /// Whether a kernel that is correct but far from fast may serve where no fast one supports the problem, such as f32
    /// on a GPU. If false, the problem is refused with every kernel's reason.
    pub allow_fallback: bool,
    /// Backend that computes [`attention`]. Its device is opened once and kept.
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
            dropout: None,
            allow_fallback: false,
            backend: Backend::Auto,
        }
    }

    /// Full attention over these tensors, whose shapes are its sizes.
    #[must_use]
    pub fn of(q: &TensorView<'_>, k: &TensorView<'_>, v: &TensorView<'_>) -> Self {
        Self::new(
            Dims::batch(q.shape.batch)
                .seqlens(q.shape.seq, k.shape.seq)
                .heads(q.shape.head, k.shape.head)
                .head_dims(q.shape.dim, v.shape.dim),
        )
    }

    /// Sets the mask: [`MaskSpec::CAUSAL`], or parsed from text such as `b:128,0`.
    #[must_use]
    pub fn mask(mut self, mask: MaskSpec) -> Self {
        self.mask = mask;
        self
    }

    /// Sets the factor of `Q K^T`. Only `None` means `1 / sqrt(head_dim_qk)`, so 0 is 0.
    #[must_use]
    pub fn softmax_scale(mut self, softmax_scale: impl Into<Option<f32>>) -> Self {
        self.softmax_scale = softmax_scale.into();
        self
    }

    /// Sets the soft-cap: scores S become `softcap * tanh(S / softcap)`.
    #[must_use]
    pub fn softcap(mut self, softcap: impl Into<Option<f32>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Sets the probability that an element of P is dropped, and the random generator's position.
    #[must_use]
    pub fn dropout(mut self, p_drop: f32, seed: DropoutSeed) -> Self {
        (self.p_drop, self.dropout) = (p_drop, Some(seed));
        self
    }

    /// Whether a kernel that is correct but far from fast may serve.
    #[must_use]
    pub fn allow_fallback(mut self, allow_fallback: bool) -> Self {
        self.allow_fallback = allow_fallback;
        self
    }

    /// Sets the backend of [`attention`].
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Problem that these options describe: a batch of contiguous b·s·h·d tensors, with LSE written.
    #[must_use]
    pub fn problem(&self, dtype: DType) -> FwdProblem {
        FwdProblem::batch(dtype, self.dims)
            .mask(self.mask)
            .softmax_scale(self.softmax_scale)
            .softcap(self.softcap)
            .p_drop(self.p_drop)
            .write_lse(true)
    }
}

/// Result of [`attention`].
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput<T> {
    /// O `[batch, seqlen_q, num_heads_q, head_dim_v]`, contiguous.
    pub o: Vec<T>,
    /// LSE `[batch, num_heads_q, seqlen_q]`: natural log; −inf for a row that sees no key.
    pub lse: Vec<f32>,
}

/// Attention over contiguous tensors in host memory: Q `[batch, seqlen_q, num_heads_q,
/// head_dim_qk]`, K `[batch, seqlen_k, num_heads_kv, head_dim_qk]`, V `[batch, seqlen_k,
/// num_heads_kv, head_dim_v]`.
///
/// The function works on every machine and is not the fast way: each call plans anew, and copies the tensors to a
/// device and back. A [plan](crate::FwdPlan) is made once, and works on tensors where they lie. A GPU's fast kernels
/// take 16 bits; the slow one, which takes f32, serves where [`Attention::allow_fallback`] is set.
///
/// # Errors
/// [`Error::Problem`] when sizes and slices do not fit, with the field and the numbers;
/// [`Error::NoDevice`] when the chosen backend is absent; what the backend said.
pub fn attention<T: Element>(q: &[T], k: &[T], v: &[T], options: &Attention) -> Result<AttentionOutput<T>> {
    let device = options.backend.clone().open()?;
    attention_on(&device, q, k, v, options)
}

/// Computes [`attention`] on a device that is already open; `options.backend` plays no part.
///
/// # Errors
/// As [`attention`].
pub fn attention_on<T: Element>(
    device: &Device,
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
    let mut elems = zeros("o", problem.shape_o().num_elems())?;
    let [q, k, v] = [(q, problem.shape_q()), (k, problem.shape_k()), (v, problem.shape_v())]
        .map(|(elems, shape)| TensorView::host(elems, shape));
    let o = TensorViewMut::host(&mut elems, problem.shape_o());
    let lse = attention_into_on(device, &q, &k, &v, o, options)?;
    Ok(AttentionOutput { o: elems, lse })
}

/// Computes [`attention`] on tensors with strides of their own, in host memory or in that of the device that
/// runs the call, into the caller's O. Returns LSE `[batch, num_heads_q, seqlen_q]`.
///
/// Tensors in the memory of the backend are worked on where they lie; those in host memory are copied to a
/// device and back. A V whose sequence stride is 1 and whose dim stride is not is column-major. K has the
/// type of Q; V and O may have another, as [`FwdProblem`] says.
///
/// # Errors
/// As [`attention`], and [`Error::Problem`] where a tensor's shape is not that of `options`, or its memory
/// does not cover what its strides reach.
pub fn attention_into(
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
    o: TensorViewMut<'_>,
    options: &Attention,
) -> Result<Vec<f32>> {
    let device = options.backend.clone().open()?;
    attention_into_on(&device, q, k, v, o, options)
}

/// Computes [`attention_into`] on a device that is already open; `options.backend` plays no part.
///
/// # Errors
/// As [`attention_into`].
pub fn attention_into_on(
    device: &Device,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
    o: TensorViewMut<'_>,
    options: &Attention,
) -> Result<Vec<f32>> {
    if k.dtype != q.dtype {
        let text = format!("k is {}, but q is {}", k.dtype, q.dtype);
        return Err(ProblemError::new("k", text).into());
    }
    let problem = options
        .problem(q.dtype)
        .dtype_v(v.dtype)
        .dtype_o(o.dtype)
        .strides_q(q.strides)
        .strides_k(k.strides)
        .strides_v(v.strides)
        .strides_o(o.strides)
        .v_layout(match (v.strides.seq, v.strides.dim) {
            (1, dim) if dim != 1 && v.shape.dim > 1 => VLayout::ColMajor,
            _ => VLayout::RowMajor,
        });
    for (name, shape, wanted) in [
        ("q", q.shape, problem.shape_q()),
        ("k", k.shape, problem.shape_k()),
        ("v", v.shape, problem.shape_v()),
        ("o", o.shape, problem.shape_o()),
    ] {
        has_shape(name, shape, wanted)?;
    }
    let problem = problem.validate()?;
    q.check("q")?;
    k.check("k")?;
    v.check("v")?;
    o.check("o")?;
    let plan = device.plan_fwd(&problem, &PlanOptions::default().allow_fallback(options.allow_fallback))?;
    let mut lse = zeros("lse", problem.extents(Totals::NONE).lse_elems)?;

    let memory = device.memory();
    let (q, k, v) = (Input::new(memory, q.data)?, Input::new(memory, k.data)?, Input::new(memory, v.data)?);
    let mut o = Output::new(memory, o.data)?;
    let mut lse_out = Output::new(memory, DevSliceMut::host(&mut lse))?;
    let mut workspace = memory.workspace(plan.workspace())?;

    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
    args.lse = Some(lse_out.slice_mut());
    args.score.dropout = options.dropout;
    args.workspace = workspace.as_mut().map(fmha_core::DevBuffer::slice_mut);
    let stream = device.default_stream();
    plan.run(&mut args, &stream)?;
    stream.synchronize()?;
    o.finish(memory)?;
    lse_out.finish(memory)?;
    Ok(lse)
}

/// Refuses a tensor whose extents differ from the problem's.
fn has_shape(name: &'static str, given: Shape, wanted: Shape) -> Result<(), ProblemError> {
    for (axis, given, wanted) in [
        ("batch", given.batch, wanted.batch),
        ("seq", given.seq, wanted.seq),
        ("head", given.head, wanted.head),
        ("dim", given.dim, wanted.dim),
    ] {
        if given != wanted {
            let text = format!("{name} has {given} along {axis}, but the sizes say {wanted}");
            return Err(ProblemError::new(name, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    const DIMS: Dims = Dims::batch(2).seqlens(3, 5).heads(4, 2).head_dims(8, 6);

    fn tensors<T: Element>(to: impl Fn(f32) -> T) -> (Vec<T>, Vec<T>, Vec<T>) {
        let wave = |count: usize, step: f32| (0..count).map(|i| to((i as f32 * step).sin())).collect();
        (wave(2 * 3 * 4 * 8, 0.7), wave(2 * 5 * 2 * 8, 1.3), wave(2 * 5 * 2 * 6, 0.3))
    }

    fn equals_the_reference<T: Element>(to: impl Fn(f32) -> T, read: impl Fn(T) -> f64, tolerance: f64) {
        let (q, k, v) = tensors(to);
        let options = Attention::new(DIMS).mask(MaskSpec::CAUSAL);
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
                    let at = problem.strides.o.offset(head.span.i_batch, i, head.i_head, d) as usize;
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
    fn a_batch_of_0_gives_empty_results_on_every_device() {
        let options = Attention::new(Dims { batch: 0, ..DIMS }).dropout(0.5, DropoutSeed::default());
        for device in crate::devices().into_iter().filter_map(|device| device.device.ok()) {
            let result = attention_on::<bf16>(&device, &[], &[], &[], &options).unwrap();
            assert_eq!(result, AttentionOutput { o: Vec::new(), lse: Vec::new() });
        }
    }

    #[test]
    fn a_slice_that_does_not_fit_is_refused_by_name_and_count() {
        let (q, k, v) = tensors(|x| x);
        let error = attention(&q, &k[1..], &v, &Attention::new(DIMS)).unwrap_err();
        assert_eq!(error.to_string(), "k has 159 elements, but [2, 5, 2, 8] are 160");
        let error = attention(&q, &k, &v[..0], &Attention::new(DIMS)).unwrap_err();
        assert_eq!(error.to_string(), "v has 0 elements, but [2, 5, 2, 6] are 120");
    }

    #[test]
    fn tensors_with_strides_give_the_bits_of_contiguous_ones_and_what_lies_between_stays() {
        use fmha_core::Strides;

        let (q, k, v) = tensors(|x| x);
        let options = Attention::new(DIMS).mask(MaskSpec::CAUSAL);
        let plain = attention(&q, &k, &v, &options).unwrap();
        let problem = options.problem(DType::F32);
        // K's and V's rows lie in one buffer one after the other, column-major V in another, and O between other data.
        let (shape_k, shape_v, shape_o) = (problem.shape_k(), problem.shape_v(), problem.shape_o());
        let mut kv = Vec::new();
        for (k, v) in k.chunks(8).zip(v.chunks(6)) {
            kv.extend_from_slice(k);
            kv.extend_from_slice(v);
        }
        let fused = Strides { batch: 5 * 2 * 14, seq: 2 * 14, head: 14, dim: 1 };
        let by_column = Strides::bhds(shape_v);
        let mut columns = vec![0f32; v.len()];
        for (at, &x) in v.iter().enumerate() {
            let [b, s, h, d] = [at / 60, at / 12 % 5, at / 6 % 2, at % 6].map(|i| i as u32);
            columns[by_column.offset(b, s, h, d) as usize] = x;
        }
        let apart = Strides { batch: 3 * 4 * 10, seq: 4 * 10, head: 10, dim: 1 };
        let q_view = TensorView::host(&q, problem.shape_q());
        let k_view = TensorView::host_strided(&kv, shape_k, fused);
        for v_view in [
            TensorView::host_strided(&kv[8..], shape_v, fused),
            TensorView::host_strided(&columns, shape_v, by_column),
        ] {
            let mut o = vec![-7f32; 2 * 3 * 4 * 10];
            let o_view = TensorViewMut::host_strided(&mut o, shape_o, apart);
            let lse = attention_into(&q_view, &k_view, &v_view, o_view, &options).unwrap();
            assert_eq!(lse, plain.lse);
            for (row, wanted) in o.chunks(10).zip(plain.o.chunks(6)) {
                assert_eq!((&row[..6], &row[6..]), (wanted, &[-7f32; 4][..]));
            }
        }
    }

    #[test]
    fn a_tensor_of_another_shape_type_or_length_is_refused_by_name_and_number() {
        let (q, k, v) = tensors(|x| x);
        let problem = Attention::new(DIMS).problem(DType::F32);
        let [q, k, v] = [(&q, problem.shape_q()), (&k, problem.shape_k()), (&v, problem.shape_v())]
            .map(|(elems, shape)| TensorView::host(elems, shape));
        let options = Attention::of(&q, &k, &v);
        assert_eq!(options.dims, DIMS);
        let mut o = vec![0f32; 2 * 3 * 4 * 6];
        let mut said = |k: TensorView<'_>, v: TensorView<'_>, shape_o: Shape| {
            let o = TensorViewMut::host(&mut o, shape_o);
            attention_into(&q, &k, &v, o, &options).unwrap_err().to_string()
        };
        let (shape_k, shape_o) = (problem.shape_k(), problem.shape_o());
        assert_eq!(
            said(TensorView { shape: Shape { seq: 4, ..shape_k }, ..k }, v, shape_o),
            "k has 4 along seq, but the sizes say 5"
        );
        assert_eq!(said(k, v, Shape { dim: 5, ..shape_o }), "o has 5 along dim, but the sizes say 6");
        assert_eq!(said(TensorView { dtype: DType::F16, ..k }, v, shape_o), "k is f16, but q is f32");
        let short = TensorView { data: fmha_core::DevSlice::host(&[0f32; 7]), ..v };
        assert_eq!(said(k, short, shape_o), "v has 28 bytes, but its extents and strides reach 480");
    }
}
