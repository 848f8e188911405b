//! Random problems at the library's door: each is refused with its field and number, or planned and run
//! on tensors of exactly its extents; nothing panics, nothing else happens.

use fmha::{
    Backend, Bias, BiasBroadcast, DType, Descale, DevSlice, DevSliceMut, Dims, ElementwiseBias, Error,
    FwdArgs, FwdProblem, KvLayout, MaskSpec, PlanOptions, QLayout, Strides, Totals, VLayout, ValidFwd,
};
use proptest::prelude::*;
use proptest::sample::select;

fn cases(per_second: u32) -> ProptestConfig {
    let seconds = std::env::var(fmha_core::env::FUZZ_SECONDS.name);
    let seconds: u32 = seconds.map_or(1, |seconds| seconds.parse().unwrap());
    let cases = per_second.saturating_mul(seconds.max(1));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Small, or where a type's range ends.
fn size() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => 0u32..9,
        2 => select(vec![16, 17, 31, 64]),
        1 => select(vec![1024, 1025, 65_536, i32::MAX as u32, 1 << 31, u32::MAX]),
    ]
}

fn dims() -> impl Strategy<Value = Dims> {
    (size(), size(), size(), (size(), 1u32..4), size(), size()).prop_map(|(batch, q, k, heads, qk, v)| {
        Dims::batch(batch).seqlens(q, k).heads(heads.0.wrapping_mul(heads.1), heads.0).head_dims(qk, v)
    })
}

fn stride() -> impl Strategy<Value = i64> {
    prop_oneof![4 => 0i64..200, 1 => select(vec![-1, 1 << 31, 1 << 40, i64::MAX, i64::MIN])]
}

/// Random strides of a tensor; `None`: the contiguous ones.
fn strides() -> impl Strategy<Value = Option<Strides>> {
    let odd = (stride(), stride(), stride(), prop_oneof![4 => Just(1), 1 => stride()])
        .prop_map(|(batch, seq, head, dim)| Some(Strides { batch, seq, head, dim }));
    prop_oneof![4 => Just(None), 1 => odd]
}

fn real() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -3f32..3.0,
        1 => select(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-45, 0.999_999_94]),
    ]
}

fn dtype() -> impl Strategy<Value = DType> {
    select(DType::ALL.to_vec())
}

fn problem() -> impl Strategy<Value = FwdProblem> {
    let layouts = (
        prop_oneof![3 => Just(QLayout::Batch), 1 => Just(QLayout::Packed)],
        prop_oneof![
            3 => Just(KvLayout::Strided),
            1 => Just(KvLayout::Packed),
            1 => size().prop_map(|page_size| KvLayout::Paged { page_size })
        ],
    );
    let types = (dtype(), prop::option::of(dtype()), prop::option::of(dtype()));
    let mask = select(vec!["0", "t", "b", "b:2,0", "t:-1,3,2", "g:2,2", "g:-2147483648,2147483647", "b:0,0"]);
    let score = (prop::option::of(real()), prop::option::of(real()), real(), any::<[bool; 6]>(), 0..4, mask);
    let layout = (strides(), strides(), strides(), strides(), any::<bool>());
    (layouts, types, dims(), score, layout).prop_map(|(layouts, types, dims, score, layout)| {
        let (scale, softcap, p_drop, flags, bias, mask) = score;
        let mut problem = FwdProblem::new(layouts.0, layouts.1, types.0, dims);
        problem.dtypes.v = types.1.unwrap_or(problem.dtypes.v);
        problem.dtypes.o = types.2.unwrap_or(problem.dtypes.o);
        problem.strides.q = layout.0.unwrap_or(problem.strides.q);
        problem.strides.k = layout.1.unwrap_or(problem.strides.k);
        problem.strides.v = layout.2.unwrap_or(problem.strides.v);
        problem.strides.o = layout.3.unwrap_or(problem.strides.o);
        if layout.4 && flags[5] {
            problem.layout.v = VLayout::ColMajor;
        }
        problem.mask = mask.parse::<MaskSpec>().unwrap();
        problem.score.softmax_scale = scale;
        problem.score.softcap = softcap;
        problem.dropout.p_drop = if flags[4] { p_drop } else { 0.0 };
        problem.score.bias = match bias {
            0 => Bias::None,
            1 => Bias::Alibi { per_batch: flags[3] },
            _ => {
                let broadcast = if flags[3] { BiasBroadcast::OneHead } else { BiasBroadcast::OneOne };
                let strides = Strides::bhsd(problem.shape_bias(broadcast));
                Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides })
            }
        };
        problem.score.sink = flags[0];
        problem.write_lse = flags[1];
        if flags[2] && problem.dtypes.qk.is_fp8() {
            problem.scales.descale_q = Descale::PerTensor;
        }
        problem
    })
}

/// Bytes of a tensor, if it is small.
fn few(strides: Strides, shape: fmha::Shape, dtype: DType) -> Option<usize> {
    let bytes = ValidFwd::extent_bytes(strides, shape, dtype);
    (bytes < 1 << 20).then_some(bytes as usize)
}

/// Tensors of exactly the problem's extents; `None` where they, or the work, are not small.
struct Tensors {
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    o: Vec<u8>,
    lse: Vec<f32>,
    bias: Vec<u8>,
    heads: Vec<f32>,
    one: [f32; 1],
}

impl Tensors {
    fn of(problem: &ValidFwd) -> Option<Self> {
        let dims = problem.dims;
        let pairs = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let work = pairs.checked_mul(u64::from(dims.seqlen_k))?.checked_mul(64)?;
        // A head without rows is work too.
        let heads = u64::from(dims.batch.max(1)) * u64::from(dims.num_heads_q);
        let work = work.max(heads);
        if work > 1 << 22 || problem.layout.q == QLayout::Packed || problem.layout.kv != KvLayout::Strided {
            return None;
        }
        let extents = problem.extents(Totals::NONE);
        let bias = match problem.score.bias {
            Bias::Elementwise(bias) => few(bias.strides, problem.shape_bias(bias.broadcast), bias.dtype)?,
            _ => 0,
        };
        Some(Self {
            q: vec![0x30; few(problem.strides.q, extents.q, problem.dtypes.qk)?],
            k: vec![0x31; few(problem.strides.k, extents.k, problem.dtypes.qk)?],
            v: vec![0x32; few(problem.strides.v, extents.v, problem.dtypes.v)?],
            o: vec![0; few(problem.strides.o, extents.o, problem.dtypes.o)?],
            lse: vec![0.0; usize::try_from(extents.lse_elems).ok().filter(|&elems| elems < 1 << 18)?],
            bias: vec![0; bias],
            // Sinks and slopes are there without a sequence too.
            heads: vec![0.5; heads as usize],
            one: [0.5],
        })
    }

    fn run(&mut self, plan: &fmha::FwdPlan, backend: &fmha_core::Device) -> Result<(), fmha::Error> {
        let problem = plan.problem();
        let dims = problem.dims;
        let (q, k, v) = (DevSlice::host(&self.q), DevSlice::host(&self.k), DevSlice::host(&self.v));
        let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut self.o));
        args.lse = problem.write_lse.then(|| DevSliceMut::host(&mut self.lse));
        let heads = |count: u32| DevSlice::host(&self.heads[..count as usize]);
        args.score.dropout = Some(fmha::DropoutSeed::default());
        args.score.sink = problem.score.sink.then(|| heads(dims.num_heads_q));
        args.score.descale_q = (problem.scales.descale_q != Descale::None).then(|| DevSlice::host(&self.one));
        match problem.score.bias {
            Bias::None => {}
            Bias::Alibi { per_batch } => {
                let rows = if per_batch { dims.batch } else { 1 };
                args.score.alibi_slopes = Some(heads(rows * dims.num_heads_q));
            }
            Bias::Elementwise(_) => args.score.bias = Some(DevSlice::host(&self.bias)),
        }
        let mut workspace = backend.memory().workspace(plan.workspace())?;
        args.workspace = workspace.as_mut().map(fmha::DevBuffer::slice_mut);
        plan.run(&mut args, &backend.default_stream())
    }
}

/// A refusal has its field's number.
fn has_a_number(error: &dyn std::fmt::Display) -> Result<(), TestCaseError> {
    let text = error.to_string();
    prop_assert!(
        text.contains(|c: char| c.is_ascii_digit()) || ["NaN", "inf"].iter().any(|word| text.contains(word)),
        "no number: {}",
        text
    );
    Ok(())
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn any_problem_is_refused_by_its_number_or_runs(problem in problem()) {
        let backend = Backend::Cpu.open().unwrap();
        let valid = match problem.validate() {
            Ok(valid) => valid,
            Err(error) => return has_a_number(&error),
        };
        let plan = match backend.plan_fwd(&valid, &PlanOptions::default()) {
            Ok(plan) => plan,
            Err(Error::Problem(error)) => return has_a_number(&error),
            Err(error @ Error::Unsupported { .. }) => return has_a_number(&error),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        if let Some(mut tensors) = Tensors::of(&valid) {
            let ran = tensors.run(&plan, &backend);
            // A buffer of bytes may lie at an address that a type does not allow; such a call is refused by
            // its alignment.
            let refused = matches!(&ran, Err(Error::Problem(error)) if error.text.contains("align"));
            prop_assert!(ran.is_ok() || refused, "{:?} of {:?}", ran, valid);
        }
    }
}
