//! Random problems, run on the backend and by the definition, compared under the contract's error bound.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its share; a test that cannot go on fails"
)]

use fmha_core::reference::{self, Precision};
use fmha_core::{
    Bias, BwdArgs, BwdProblem, DType, DevSlice, DevSliceMut, Device, DropoutSeed, FwdArgs, FwdProblem,
    PlanOptions, ScoreArgs, ScoreSums, SeqArgs, SeqSpan, Shape, Strides, Totals, ValidFwd,
};

/// Random generator SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws an approximately normal number.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// Memory of a tensor, with NaN in gaps and in all rows that are not in use.
#[derive(Clone)]
pub struct Tensor {
    pub bytes: Vec<u64>,
    pub dtype: DType,
    pub strides: Strides,
}

impl Tensor {
    pub fn poisoned(dtype: DType, strides: Strides, shape: Shape) -> Self {
        let bytes = ValidFwd::extent_bytes(strides, shape, dtype) as usize;
        let size = dtype.size_bytes() as usize;
        let mut pattern = [0u8; 8];
        for at in (0..8).step_by(size) {
            dtype.write(f64::NAN, &mut pattern[at..]);
        }
        Self { bytes: vec![u64::from_le_bytes(pattern); bytes.div_ceil(8) + 1], dtype, strides }
    }

    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.bytes)
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.bytes)
    }

    fn at(&self, b: u32, s: u32, h: u32, d: u32) -> usize {
        self.strides.offset(b, s, h, d) as usize * self.dtype.size_bytes() as usize
    }

    pub fn get(&self, b: u32, s: u32, h: u32, d: u32) -> f64 {
        self.dtype.read(&self.bytes()[self.at(b, s, h, d)..])
    }

    pub fn set(&mut self, b: u32, s: u32, h: u32, d: u32, value: f64) {
        let (at, dtype) = (self.at(b, s, h, d), self.dtype);
        dtype.write(value, &mut self.bytes_mut()[at..]);
    }

    pub fn fill(&mut self, spans: &[SeqSpan], queries: bool, heads: u32, dim: u32, random: &mut Random) {
        for span in spans {
            let (first, count) =
                if queries { (span.q_row, span.seqlen_q) } else { (span.k_row, span.seqlen_k) };
            for s in first..first + count {
                for h in 0..heads {
                    for d in 0..dim {
                        self.set(span.q_batch, s, h, d, random.normal());
                    }
                }
            }
        }
    }

    pub fn slice(&self) -> DevSlice<'_> {
        DevSlice::host(&self.bytes)
    }

    pub fn slice_mut(&mut self) -> DevSliceMut<'_> {
        DevSliceMut::host(&mut self.bytes)
    }
}

/// Operands of a call.
#[derive(Clone)]
pub struct Inputs {
    pub problem: FwdProblem,
    pub spans: Vec<SeqSpan>,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub bias: Option<Tensor>,
    pub slopes: Vec<f32>,
    pub sink: Vec<f32>,
    pub descales: [Vec<f32>; 3],
    pub scale_o: Vec<f32>,
    pub totals: Totals,
    pub cu_q: Vec<i32>,
    pub cu_k: Vec<i32>,
    pub used_q: Vec<i32>,
    pub used_k: Vec<i32>,
}

/// For Q and K, the number of rows that a sequence has in memory, and the number of rows in use.
pub type Lengths = [(u32, u32); 2];

impl Inputs {
    /// Random operands; `lengths` are those of each sequence, empty for full ones.
    pub fn random(problem: FwdProblem, lengths: &[Lengths], seed: u64) -> Self {
        let mut random = Random(seed);
        let dims = problem.dims;
        let prefix = |side: usize| {
            let mut sums = vec![0];
            for lengths in lengths {
                sums.push(sums[sums.len() - 1] + lengths[side].0 as i32);
            }
            sums
        };
        let used = |side: usize| lengths.iter().map(|lengths| lengths[side].1 as i32).collect::<Vec<_>>();
        let (cu_q, cu_k, used_q, used_k) = (prefix(0), prefix(1), used(0), used(1));
        let totals = match problem.layout.q {
            fmha_core::QLayout::Batch => Totals::NONE,
            fmha_core::QLayout::Packed => {
                let [total_q, total_k] =
                    [0, 1].map(|side| lengths.iter().map(|lengths| lengths[side].0).sum());
                Totals::packed(total_q, total_k)
            }
        };
        let seq = SeqArgs::default()
            .totals(totals)
            .cu_seqlens_q(DevSlice::host(&cu_q))
            .cu_seqlens_k(DevSlice::host(&cu_k))
            .seqused_q(DevSlice::host(&used_q))
            .seqused_k(DevSlice::host(&used_k));
        let spans = fmha_core::seq::spans(&problem, &seq).unwrap();
        let mut q = Tensor::poisoned(problem.dtypes.qk, problem.strides.q, problem.extents(totals).q);
        let mut k = Tensor::poisoned(problem.dtypes.qk, problem.strides.k, problem.extents(totals).k);
        let mut v = Tensor::poisoned(problem.dtypes.v, problem.strides.v, problem.extents(totals).v);
        q.fill(&spans, true, dims.num_heads_q, dims.head_dim_qk, &mut random);
        k.fill(&spans, false, dims.num_heads_kv, dims.head_dim_qk, &mut random);
        v.fill(&spans, false, dims.num_heads_kv, dims.head_dim_v, &mut random);
        let bias = match problem.score.bias {
            Bias::Elementwise(wanted) => {
                let shape = problem.shape_bias(wanted.broadcast);
                let mut bias = Tensor::poisoned(wanted.dtype, wanted.strides, shape);
                for b in 0..shape.batch {
                    for h in 0..shape.head {
                        for i in 0..shape.seq {
                            for j in 0..shape.dim {
                                bias.set(b, i, h, j, random.normal());
                            }
                        }
                    }
                }
                Some(bias)
            }
            _ => None,
        };
        let mut numbers = |count: usize, low: f64, high: f64| {
            (0..count).map(|_| (low + (high - low) * random.unit()) as f32).collect::<Vec<_>>()
        };
        let (batch, heads) = (dims.batch as usize, dims.num_heads_q as usize);
        let slopes = match problem.score.bias {
            Bias::Alibi { per_batch } => numbers(if per_batch { batch * heads } else { heads }, 0.01, 0.5),
            _ => vec![],
        };
        let sink = numbers(if problem.score.sink { heads } else { 0 }, -1.0, 2.0);
        let descales = [problem.scales.descale_q, problem.scales.descale_k, problem.scales.descale_v]
            .map(|kind| numbers(kind.num_elems(dims.batch, dims.num_heads_kv) as usize, 0.5, 1.5));
        let scale_o = if problem.scales.scale_o { vec![1.75] } else { vec![] };
        Self {
            problem,
            spans,
            q,
            k,
            v,
            bias,
            slopes,
            sink,
            descales,
            scale_o,
            totals,
            cu_q,
            cu_k,
            used_q,
            used_k,
        }
    }

    pub fn seq(&self) -> SeqArgs<'_> {
        let group = self.totals.total_q.is_some();
        SeqArgs::default()
            .totals(self.totals)
            .cu_seqlens_q(group.then(|| DevSlice::host(&self.cu_q)))
            .cu_seqlens_k(group.then(|| DevSlice::host(&self.cu_k)))
            .seqused_q(self.problem.layout.seqused_q.then(|| DevSlice::host(&self.used_q)))
            .seqused_k(self.problem.layout.seqused_k.then(|| DevSlice::host(&self.used_k)))
    }

    pub fn score(&self) -> ScoreArgs<'_> {
        fn some(numbers: &[f32]) -> Option<DevSlice<'_>> {
            (!numbers.is_empty()).then(|| DevSlice::host(numbers))
        }
        ScoreArgs::default()
            .bias(self.bias.as_ref().map(Tensor::slice))
            .alibi_slopes(some(&self.slopes))
            .sink(some(&self.sink))
            .descale_q(some(&self.descales[0]))
            .descale_k(some(&self.descales[1]))
            .descale_v(some(&self.descales[2]))
            .dropout(DropoutSeed { seed: 0x1234_5678_9abc, offset: 5 })
    }
}

/// Outputs of a forward call.
pub struct Outputs {
    pub o: Tensor,
    pub lse: Vec<f32>,
    pub keep: Vec<u8>,
}

pub fn run_fwd(backend: &Device, inputs: &Inputs, options: &PlanOptions) -> Outputs {
    let problem = inputs.problem.clone().validate().unwrap();
    let plan = backend.plan_fwd(&problem, options).unwrap();
    let mut o = Tensor::poisoned(problem.dtypes.o, problem.strides.o, problem.extents(inputs.totals).o);
    let mut lse = vec![f32::NAN; problem.extents(inputs.totals).lse_elems as usize];
    let mut keep = vec![9; problem.keep_mask_bytes() as usize];
    let mut args = FwdArgs::new(inputs.q.slice(), inputs.k.slice(), inputs.v.slice(), o.slice_mut())
        .lse(problem.write_lse.then(|| DevSliceMut::host(&mut lse)))
        .keep_mask(problem.dropout.write_keep_mask.then(|| DevSliceMut::host(&mut keep)))
        .seq(inputs.seq())
        .score(inputs.score())
        .scale_o(problem.scales.scale_o.then(|| DevSlice::host(&inputs.scale_o)));
    plan.run(&mut args, &backend.default_stream()).unwrap();
    Outputs { o, lse, keep }
}

/// Largest difference, and largest magnitude of the reference.
#[derive(Default)]
pub struct Error {
    pub ours: f64,
    pub same: f64,
    pub most: f64,
}

impl Error {
    pub fn add(&mut self, ours: f64, same: f64, exact: f64) {
        if !exact.is_finite() {
            let alike = ours == exact || ours.is_nan() && exact.is_nan();
            self.ours = if alike { self.ours } else { f64::INFINITY };
            return;
        }
        // The comparison fails for a NaN, which `max` alone would ignore.
        let difference = (ours - exact).abs();
        self.ours = if difference.is_nan() { f64::INFINITY } else { self.ours.max(difference) };
        self.same = self.same.max((same - exact).abs());
        self.most = self.most.max(exact.abs());
    }

    /// Checks the error against the bound. `lse` is the largest magnitude of the LSE that a backward call reads, and 0
    /// in forward: LSE and the score minus it are each rounded by a unit of that size, which changes P.
    pub fn check(&self, factor: f64, lse: f64, what: &str) {
        // Terms are of size 1 and more (normal inputs, whole dot products) even where they cancel.
        let units = 8.0 + 2.0 * lse;
        let allowed = factor * self.same + units * DType::F32.unit_roundoff() * self.most.max(1.0);
        assert!(self.ours <= allowed, "{what}: error {:e}, allowed {allowed:e}", self.ours);
    }
}

/// O and LSE of the definition: exact, and in the input's precision. They are made once for all instruction sets.
pub struct Definition {
    exact: Vec<reference::HeadForward>,
    same: Vec<reference::HeadForward>,
}

impl Definition {
    pub fn of(inputs: &Inputs) -> Self {
        let mut unused = [0u64; 1];
        let unused = DevSliceMut::host(&mut unused);
        let args = FwdArgs::new(inputs.q.slice(), inputs.k.slice(), inputs.v.slice(), unused)
            .seq(inputs.seq())
            .score(inputs.score());
        let forward = |precision| reference::forward(&inputs.problem, &args, precision).unwrap();
        Self { exact: forward(Precision::Exact), same: forward(Precision::AsInput(ScoreSums::F32)) }
    }
}

/// Forward against the definition: O, LSE, and that nothing but logical rows is written.
pub fn check_fwd(backend: &Device, inputs: &Inputs, definition: &Definition, what: &str) {
    let problem = &inputs.problem;
    let outputs = run_fwd(backend, inputs, &PlanOptions::default());
    let Definition { exact, same } = definition;
    let (mut error_o, mut error_lse) = (Error::default(), Error::default());
    let mut o = outputs.o;
    let scale_o = inputs.scale_o.first().map_or(1.0, |&scale| f64::from(scale));
    for (exact, same) in exact.iter().zip(same) {
        let span = exact.span;
        for i in 0..span.seqlen_q {
            for d in 0..problem.dims.head_dim_v {
                let at = i as usize * problem.dims.head_dim_v as usize + d as usize;
                let row = span.q_row + i;
                let ours = o.get(span.q_batch, row, exact.i_head, d);
                let round =
                    |x: f64| if problem.dtypes.o.is_fp8() { problem.dtypes.o.round(x * scale_o) } else { x };
                let limit = problem.dtypes.o.max_finite();
                let clamp =
                    |x: f64| if problem.dtypes.o.is_fp8() { (x * scale_o).clamp(-limit, limit) } else { x };
                error_o.add(ours, round(same.o[at]), clamp(exact.o[at]));
                o.set(span.q_batch, row, exact.i_head, d, f64::NAN);
            }
            if problem.write_lse {
                let index = span.lse_index(problem, exact.i_head, i);
                let (exact, same) = (exact.lse[i as usize], same.lse[i as usize]);
                error_lse.add(f64::from(outputs.lse[index]), same, exact);
            }
        }
    }
    error_o.check(2.0, 0.0, &format!("{what}: O"));
    error_lse.check(2.0, 0.0, &format!("{what}: LSE"));
    let untouched = Tensor::poisoned(problem.dtypes.o, problem.strides.o, problem.extents(inputs.totals).o);
    assert!(o.bytes == untouched.bytes, "{what}: a row beyond the lengths was written");
}

/// Outputs of a backward call.
#[derive(PartialEq)]
pub struct Gradients {
    pub dq: Vec<u64>,
    pub dk: Vec<u64>,
    pub dv: Vec<u64>,
    pub dbias: Vec<u64>,
    pub dsink: Vec<f32>,
}

/// Backward, from O and LSE of the backend's own forward; `check` compares with the definition.
pub fn run_bwd(backend: &Device, inputs: &Inputs, problem: BwdProblem, check: Option<&str>) -> Gradients {
    let mut forward = inputs.clone();
    forward.problem = problem.fwd.clone().write_lse(true);
    let outputs = run_fwd(backend, &forward, &PlanOptions::default());
    let valid = problem.validate().unwrap();
    let fwd = valid.fwd();
    let dims = fwd.dims;
    let mut random = Random(99);
    let mut dout = Tensor::poisoned(fwd.dtypes.o, valid.dout, fwd.extents(inputs.totals).o);
    dout.fill(&inputs.spans, true, dims.num_heads_q, dims.head_dim_v, &mut random);
    let dlse: Vec<f32> = (0..fwd.extents(inputs.totals).lse_elems).map(|_| random.normal() as f32).collect();
    let mut dq = Tensor::poisoned(valid.dtype_grad, valid.dq, fwd.extents(inputs.totals).q);
    let mut dk = Tensor::poisoned(valid.dtype_grad, valid.dk, fwd.extents(inputs.totals).k);
    let mut dv = Tensor::poisoned(valid.dtype_grad, valid.dv, fwd.extents(inputs.totals).v);
    let mut dbias = match (valid.dbias, fwd.score.bias) {
        (Some(wanted), Bias::Elementwise(bias)) => {
            Some(Tensor::poisoned(wanted.dtype, wanted.strides, fwd.shape_bias(bias.broadcast)))
        }
        _ => None,
    };
    let mut dsink = vec![f32::NAN; dims.num_heads_q as usize];
    let mut args = BwdArgs::new(
        [inputs.q.slice(), inputs.k.slice(), inputs.v.slice()],
        [outputs.o.slice(), DevSlice::host(&outputs.lse), dout.slice()],
        [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()],
    )
    .dlse(valid.has_dlse.then(|| DevSlice::host(&dlse)))
    .dbias(dbias.as_mut().map(Tensor::slice_mut))
    .dsink(valid.write_dsink.then(|| DevSliceMut::host(&mut dsink)))
    .seq(inputs.seq())
    .score(inputs.score());
    let plan = backend.plan_bwd(&valid, &PlanOptions::default()).unwrap();
    plan.run(&mut args, &backend.default_stream()).unwrap();
    let wanted = check.map(|what| {
        let exact = reference::backward(&valid, &args, Precision::Exact).unwrap();
        let same = reference::backward(&valid, &args, Precision::AsInput(ScoreSums::F32)).unwrap();
        (what, exact, same)
    });
    if let Some((what, exact, same)) = wanted {
        let finite = outputs.lse.iter().map(|lse| f64::from(lse.abs())).filter(|lse| lse.is_finite());
        let largest_lse = finite.fold(0.0, f64::max);
        for (name, ours, exact, same, queries) in [
            ("dQ", &dq, &exact.dq, &same.dq, true),
            ("dK", &dk, &exact.dk, &same.dk, false),
            ("dV", &dv, &exact.dv, &same.dv, false),
        ] {
            let dim = if name == "dV" { dims.head_dim_v } else { dims.head_dim_qk } as usize;
            let mut error = Error::default();
            for ((span, head, exact), (_, _, same)) in exact.iter().zip(same) {
                let first = if queries { span.q_row } else { span.k_row };
                for (at, (&exact, &same)) in exact.iter().zip(same).enumerate() {
                    let (row, d) = (first + (at / dim) as u32, (at % dim) as u32);
                    error.add(ours.get(span.q_batch, row, *head, d), same, exact);
                }
            }
            error.check(3.0, largest_lse, &format!("{what}: {name}"));
        }
        if let (Some(ours), Bias::Elementwise(bias)) = (&dbias, fwd.score.bias) {
            let shape = fwd.shape_bias(bias.broadcast);
            let mut error = Error::default();
            for (at, (&exact, &same)) in exact.dbias.iter().zip(&same.dbias).enumerate() {
                let (j, i) = (at as u32 % shape.dim, at as u32 / shape.dim % shape.seq);
                let head = at as u32 / shape.dim / shape.seq;
                error.add(ours.get(head / shape.head, i, head % shape.head, j), same, exact);
            }
            error.check(3.0, largest_lse, &format!("{what}: dBias"));
        }
        if valid.write_dsink {
            let mut error = Error::default();
            for (h, (&exact, &same)) in exact.dsink.iter().zip(&same.dsink).enumerate() {
                error.add(f64::from(dsink[h]), same, exact);
            }
            error.check(3.0, largest_lse, &format!("{what}: dSink"));
        }
    }
    let dbias = dbias.map_or(vec![], |dbias| dbias.bytes);
    Gradients {
        dq: dq.bytes,
        dk: dk.bytes,
        dv: dv.bytes,
        dbias,
        dsink: if valid.write_dsink { dsink } else { vec![] },
    }
}
