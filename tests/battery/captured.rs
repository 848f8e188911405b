//! Scores and masks as code with captured tensors, forward and backward, against float64. The family `code/` tests
//! functions without captures; this file adds tensors, numbers and their gradients.

use bytemuck::{NoUninit, Zeroable, cast_slice};
use fmha_core::expr::draw::Draw;
use fmha_core::expr::{Function, Number, Stored, Type};
use fmha_core::reference::{Precision, backward, forward};
use fmha_core::{
    BwdArgs, BwdProblem, CapturedGrad, CapturedTensor, DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims,
    Elem, Error, FwdArgs, FwdProblem, Intervals, MaskArgs, MaskAxes, PlanOptions, ScoreArgs, Strides,
};
use half::{bf16, f16};

/// Element type of Q, K, V, O and their gradients.
pub trait Operand: Elem + bytemuck::AnyBitPattern + Into<f64> + Copy {
    /// The type as a value at run time.
    const DTYPE: DType;
    /// Largest error of a row, relative to 1 or its largest element.
    const TOLERANCE: f64;
    /// The number of this type that is nearest to `x`.
    fn of(x: f32) -> Self;
}
impl Operand for f32 {
    const DTYPE: DType = DType::F32;
    const TOLERANCE: f64 = 1e-4;
    fn of(x: f32) -> Self {
        x
    }
}
impl Operand for f16 {
    const DTYPE: DType = DType::F16;
    const TOLERANCE: f64 = 6e-3;
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}
impl Operand for bf16 {
    const DTYPE: DType = DType::Bf16;
    const TOLERANCE: f64 = 4e-2;
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// Rows that hold NaN: the first function picks rows of K and V, the second rows of Q and dO.
pub type Hidden = (fn(usize) -> bool, fn(usize) -> bool);

/// One forward and one backward call of a function with captures.
#[derive(Clone, Debug)]
pub struct Check {
    /// Problem of the case. The extents of the tensors that its functions capture are random.
    pub problem: FwdProblem,
    /// Seed of all numbers.
    pub seed: u64,
    /// Rows of K and V, or of Q and dO, that hold NaN: rows that the mask hides completely.
    pub hidden: Option<Hidden>,
    /// Whether gradients are computed, and which of the captured tensors have one.
    pub gradients: Gradients,
    /// Whether intervals of keys hide pairs too; they are random, an interval for each query.
    pub has_intervals: bool,
}

/// Gradients that the backward computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// The case has no backward.
    None,
    /// dQ, dK and dV.
    Operands,
    /// Gradients of Q, K and V, and of every captured float tensor that the score reads.
    Captured,
}

/// Tensors that functions capture, on the host and on the device.
struct Memory {
    tensors: Vec<(CapturedTensor, Vec<u64>)>,
    numbers: Vec<Number>,
}

impl Memory {
    fn new(problem: &FwdProblem, seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let mut tensors = vec![];
        let functions = || problem.code.score.iter().chain(&problem.code.mask);
        for capture in functions().flat_map(Function::captures) {
            let fmha_core::expr::CaptureKind::Tensor { stored, rank } = capture.kind else { continue };
            if tensors.iter().any(|(tensor, _): &(CapturedTensor, _)| tensor.name == capture.name) {
                continue;
            }
            let shape: Vec<u32> = (0..rank).map(|_| 2 + draw.below(9) as u32).collect();
            let tensor = CapturedTensor::dense(capture.name.clone(), &shape);
            let mut bytes: Vec<u8> = vec![];
            for _ in 0..tensor.num_elems() {
                match stored {
                    Stored::F32 => bytes.extend((draw.unit() as f32).to_ne_bytes()),
                    Stored::F16 => bytes.extend(f16::from_f64(draw.unit()).to_ne_bytes()),
                    Stored::Bf16 => bytes.extend(bf16::from_f64(draw.unit()).to_ne_bytes()),
                    Stored::I32 => bytes.extend((draw.below(9) as i32 - 2).to_ne_bytes()),
                    Stored::I64 => bytes.extend((draw.below(9) as i64 - 2).to_ne_bytes()),
                    Stored::Bool => bytes.push(draw.below(3) as u8),
                }
            }
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            let words = bytes
                .chunks_exact(8)
                .map(|word| word.iter().rev().fold(0, |all, &b| all << 8 | u64::from(b)));
            tensors.push((tensor, words.collect()));
        }
        let numbers = problem.code.numbers().into_iter().map(|(_, kind)| match kind {
            Type::Float => Number::Float(draw.unit() as f32),
            _ => Number::Int(draw.below(9) as i64 - 4),
        });
        let numbers = numbers.collect();
        Self { tensors, numbers }
    }
}

/// A tensor on the host, and its copy on the device.
struct Both<T> {
    host: Vec<T>,
    there: DevBuffer,
}

impl<T: Elem + NoUninit + bytemuck::AnyBitPattern + Zeroable> Both<T> {
    fn new(device: &Device, host: Vec<T>) -> Result<Self, Error> {
        let there = device.memory().place(&host)?;
        Ok(Self { host, there })
    }
    fn read(&mut self, device: &Device) -> Result<(), Error> {
        device.memory().download(&self.there, &mut self.host)
    }
}

fn off<T: Into<f64> + Copy>(found: &[T], wanted: &[f64]) -> f64 {
    let size = wanted.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    found.iter().zip(wanted).fold(0.0f64, |most, (&a, &b)| {
        let difference = (a.into() - b).abs() / size;
        if difference.is_nan() { f64::INFINITY } else { most.max(difference) }
    })
}

impl Check {
    /// Runs the check, with operands of type `T`.
    ///
    /// # Errors
    /// The result that is wrong and by how much, or the refusal.
    pub fn run<T: Operand>(&self, device: &Device, options: &PlanOptions) -> Result<(), String> {
        let text = format!("seed {}: {:?}", self.seed, self.problem.code);
        self.compare::<T>(device, options).map_err(|error| format!("{text}: {error}"))
    }

    #[allow(clippy::too_many_lines, reason = "one call, read straight down")]
    fn compare<T: Operand>(&self, device: &Device, options: &PlanOptions) -> Result<(), String> {
        let said = |error: Error| error.to_string();
        let memory = Memory::new(&self.problem, self.seed);
        let captured: Vec<CapturedTensor> = memory.tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let mut draw = Draw::new(self.seed + 1000);
        let mut problem = self.problem.clone().captured(captured).write_lse(true);
        let mut intervals: Vec<u64> = Vec::new();
        if self.has_intervals {
            let of_all = MaskAxes { per_batch: false, heads: 1 };
            let shape = Intervals::batch(&problem, of_all, 2);
            problem = problem.intervals(shape);
            intervals = drawn_intervals(&problem.dims, &mut draw);
        }
        let fwd = problem.validate().map_err(|e| e.to_string())?;
        let dims = fwd.dims;
        let mut noise =
            |count: u64| -> Vec<T> { (0..count).map(|_| T::of(draw.unit() as f32 * 1.5)).collect() };
        let [mut q, mut k, mut v, mut dout] = [fwd.shape_q(), fwd.shape_k(), fwd.shape_v(), fwd.shape_o()]
            .map(|shape| noise(shape.num_elems()));
        if let Some((keys, queries)) = self.hidden {
            let fill = |tensor: &mut [T], seqlen: u32, row: u32, hides: fn(usize) -> bool| {
                for (at, row) in tensor.chunks_exact_mut(row as usize).enumerate() {
                    if hides(at % seqlen as usize) {
                        row.fill(T::of(f32::NAN));
                    }
                }
            };
            fill(&mut q, dims.seqlen_q, dims.num_heads_q * dims.head_dim_qk, queries);
            fill(&mut dout, dims.seqlen_q, dims.num_heads_q * dims.head_dim_v, queries);
            fill(&mut k, dims.seqlen_k, dims.num_heads_kv * dims.head_dim_qk, keys);
            fill(&mut v, dims.seqlen_k, dims.num_heads_kv * dims.head_dim_v, keys);
        }
        let place = |host: Vec<T>| Both::new(device, host).map_err(said);
        let [q, k, v, dout] = [place(q)?, place(k)?, place(v)?, place(dout)?];
        let mut o = place(vec![T::of(f32::NAN); fwd.shape_o().num_elems() as usize])?;
        let rows = (dims.batch * dims.num_heads_q * dims.seqlen_q) as usize;
        let mut lse = Both::new(device, vec![f32::NAN; rows]).map_err(said)?;
        let there: Result<Vec<DevBuffer>, Error> = memory
            .tensors
            .iter()
            .map(|(_, words)| device.memory().place(cast_slice::<u64, u8>(words)))
            .collect();
        let there = there.map_err(said)?;
        let slices: Vec<DevSlice<'_>> = there.iter().map(DevBuffer::slice).collect();
        let on_host: Vec<DevSlice<'_>> =
            memory.tensors.iter().map(|(_, words)| DevSlice::host(words)).collect();
        let score = ScoreArgs::default().captured(&slices).numbers(&memory.numbers);
        let host_score = ScoreArgs::default().captured(&on_host).numbers(&memory.numbers);
        let of_intervals = device.memory().place(&intervals).map_err(said)?;
        let [masks, host_masks] = [of_intervals.slice(), DevSlice::host(&intervals)]
            .map(|slice| MaskArgs::default().intervals(self.has_intervals.then_some(slice)));

        let stream = device.default_stream();
        let plan = device.plan_fwd(&fwd, options).map_err(said)?;
        let mut workspace = device.memory().workspace(plan.workspace()).map_err(said)?;
        {
            let mut args =
                FwdArgs::new(q.there.slice(), k.there.slice(), v.there.slice(), o.there.slice_mut())
                    .score(score)
                    .masks(masks)
                    .lse(lse.there.slice_mut())
                    .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
            plan.run(&mut args, &stream).map_err(said)?;
        }
        device.synchronize().map_err(said)?;
        o.read(device).map_err(said)?;
        lse.read(device).map_err(said)?;
        let [hq, hk, hv] = [&q, &k, &v].map(|x| DevSlice::host(&x.host));
        let mut unused = vec![T::of(0.0); o.host.len()];
        let args =
            FwdArgs::new(hq, hk, hv, DevSliceMut::host(&mut unused)).score(host_score).masks(host_masks);
        for head in forward(&fwd, &args, Precision::Exact).map_err(|e| e.to_string())? {
            for i in 0..head.span.seqlen_q {
                let at = fwd.strides.o.offset(head.span.q_batch, i, head.i_head, 0) as usize;
                let dim = dims.head_dim_v as usize;
                let row = off(&o.host[at..at + dim], &head.o[i as usize * dim..][..dim]);
                if row > T::TOLERANCE {
                    return Err(format!("O of head {} row {i} is off by {row}", head.i_head));
                }
                let found = f64::from(lse.host[head.span.lse_index(&fwd, head.i_head, i)]);
                let wanted = head.lse[i as usize];
                let near = (found - wanted).abs() <= 1e-3 * wanted.abs().max(1.0);
                if found != wanted && !near {
                    return Err(format!("LSE of head {} row {i} is {found}, not {wanted}", head.i_head));
                }
            }
        }
        if self.gradients == Gradients::None {
            return Ok(());
        }

        let wanted: Vec<CapturedGrad> = fwd
            .code
            .score
            .iter()
            .flat_map(Function::captures)
            .filter(|capture| {
                self.gradients == Gradients::Captured
                    && capture.kind.value_type() == Type::Float
                    && fwd.code.tensor(&capture.name).is_some()
            })
            .map(|capture| CapturedGrad { name: capture.name.clone(), dtype: DType::F32 })
            .collect();
        let bwd = BwdProblem::new((*fwd).clone()).dcaptured(wanted.clone());
        let bwd = bwd.validate().map_err(|error| error.to_string())?;
        let plan = device.plan_bwd(&bwd, options).map_err(said)?;
        let blank = |count: u64| place(vec![T::of(f32::NAN); count as usize]);
        let mut dq = blank(fwd.shape_q().num_elems())?;
        let mut dk = blank(fwd.shape_k().num_elems())?;
        let mut dv = blank(fwd.shape_v().num_elems())?;
        let mut sums = vec![];
        for elems in bwd.captured_elems() {
            sums.push(Both::new(device, vec![f32::NAN; elems as usize]).map_err(said)?);
        }
        let mut workspace = device.memory().workspace(plan.workspace()).map_err(said)?;
        {
            let inputs = [q.there.slice(), k.there.slice(), v.there.slice()];
            let of_forward = [o.there.slice(), lse.there.slice(), dout.there.slice()];
            let grads = [dq.there.slice_mut(), dk.there.slice_mut(), dv.there.slice_mut()];
            let mut args = BwdArgs::new(inputs, of_forward, grads)
                .score(score)
                .masks(masks)
                .dcaptured(sums.iter_mut().map(|sum| sum.there.slice_mut()).collect())
                .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
            plan.run(&mut args, &stream).map_err(said)?;
        }
        device.synchronize().map_err(said)?;
        for gradient in [&mut dq, &mut dk, &mut dv] {
            gradient.read(device).map_err(said)?;
        }
        for sum in &mut sums {
            sum.read(device).map_err(said)?;
        }
        let of_forward = [DevSlice::host(&o.host), DevSlice::host(&lse.host), DevSlice::host(&dout.host)];
        let [mut a, mut b, mut c] = [&dq, &dk, &dv].map(|x| x.host.clone());
        let mut blanks: Vec<Vec<f32>> = sums.iter().map(|sum| sum.host.clone()).collect();
        let grads = [DevSliceMut::host(&mut a), DevSliceMut::host(&mut b), DevSliceMut::host(&mut c)];
        let args = BwdArgs::new([hq, hk, hv], of_forward, grads)
            .score(host_score)
            .masks(host_masks)
            .dcaptured(blanks.iter_mut().map(|sum| DevSliceMut::host(sum)).collect());
        let exact = backward(&bwd, &args, Precision::Exact).map_err(|error| error.to_string())?;
        let rows = |name: &str, found: &[T], strides: Strides, dim: u32, wanted: &[(_, u32, Vec<f64>)]| {
            for (span, head, wanted) in wanted {
                let span: &fmha_core::SeqSpan = span;
                for (row, wanted) in wanted.chunks_exact(dim as usize).enumerate() {
                    let batch = if name == "dQ" { span.q_batch } else { span.k_batch };
                    let at = strides.offset(batch, row as u32, *head, 0) as usize;
                    let off = off(&found[at..at + dim as usize], wanted);
                    if off > T::TOLERANCE * 2.0 {
                        return Err(format!("{name} of head {head} row {row} is off by {off}"));
                    }
                }
            }
            Ok(())
        };
        rows("dQ", &dq.host, bwd.dq, dims.head_dim_qk, &exact.dq)?;
        rows("dK", &dk.host, bwd.dk, dims.head_dim_qk, &exact.dk)?;
        rows("dV", &dv.host, bwd.dv, dims.head_dim_v, &exact.dv)?;
        for ((grad, found), wanted) in wanted.iter().zip(&sums).zip(&exact.dcaptured) {
            let off = off(&found.host, wanted);
            if off > T::TOLERANCE * 2.0 {
                let found = &found.host;
                return Err(format!("gradient of {} is off by {off}: {found:?}, not {wanted:?}", grad.name));
            }
        }
        Ok(())
    }
}

/// Typical forms from practice: a score and a mask each; an empty text means none.
pub const FORMS: [(&str, &str); 9] = [
    ("slopes: f32[_]; s + slopes[h] * (k - q)", "k <= q + (seqlen_k - seqlen_q)"),
    ("3 * tanh(s / 3)", "q // 8 == k // 8"),
    ("table: bf16[_, _]; s + table[h, k - q]", "ids: i32[_]; ids[q] == ids[k] or k < 3"),
    ("select(abs(q - k) < 9, s, -inf)", ""),
    ("s * sigmoid(s)", "k > 100"),
    ("gain: f32[]; rate: float; s * exp(gain[]) + rate", "shift: int; k - q >= shift"),
    ("sqrt(abs(s) + 1) + log(s * s + 1)", "(k % 3 == 0) or (q & 1 == 1)"),
    ("", "ids: i64[_]; gate: bool[_]; ids[q] <= ids[k] and gate[k]"),
    ("table: f16[_]; s + erf(table[k - q]) * pow(abs(s) + 1, 0.5) + sin(100 * s)", ""),
];

/// A check of each of [`FORMS`], and one of a mask that hides rows of NaN.
///
/// # Panics
/// Never: the texts are functions.
#[must_use]
pub fn checks(problem: &FwdProblem, gradients: Gradients) -> Vec<Check> {
    let with = |score: &str, mask: &str| {
        let function = |text: &str| (!text.is_empty()).then(|| text.parse().ok()).flatten();
        problem.clone().score_code(function(score)).mask_code(function(mask))
    };
    let of = |problem, seed, hidden| Check { problem, seed, hidden, gradients, has_intervals: false };
    let mut all: Vec<Check> =
        FORMS.iter().zip(100..).map(|(&(score, mask), seed)| of(with(score, mask), seed, None)).collect();
    let (score, mask) = FORMS[3];
    // A score of -infinity hides its pair, although the later soft-cap would make it finite.
    all.push(of(with(score, mask).softcap(9.0), 200, None));
    let (score, mask) = FORMS[2];
    all.push(of(with(score, mask).softcap(2.0), 201, None));
    let hides: Hidden = (|row| row % 5 == 2, |row| row == 7);
    let mask = "k % 5 != 2 and q != 7";
    all.push(of(with("", mask), 300, Some(hides)));
    all.push(of(with("s * 0.5", mask).softcap(3.0), 301, Some(hides)));
    all
}

/// Random intervals of keys, `[2, seqlen_q]`, two numbers to a word: one query in eight sees no key.
fn drawn_intervals(dims: &Dims, draw: &mut Draw) -> Vec<u64> {
    let rows = dims.seqlen_q as usize;
    let mut numbers = vec![0u32; (2 * rows).next_multiple_of(2)];
    for row in 0..rows {
        let begin = draw.below(dims.seqlen_k as usize / 2);
        numbers[row] = begin as u32;
        numbers[rows + row] = if draw.below(8) == 0 { 0 } else { (begin + 1 + draw.below(40)) as u32 };
    }
    numbers.chunks_exact(2).map(|pair| u64::from(pair[1]) << 32 | u64::from(pair[0])).collect()
}

/// Runs checks of bf16 operands with gradients of what the score captures, beside intervals: alone, with a mask as
/// code, and with scores so large that kernels measure each row's from an origin of its own.
///
/// # Errors
/// The result that is wrong, or the refusal.
pub fn run_beside_intervals(device: &Device, options: &PlanOptions) -> Result<(), String> {
    let dims = Dims { seqlen_q: 70, seqlen_k: 150, head_dim_qk: 64, head_dim_v: 64, ..ODD };
    let far = "table: f32[_, _]; s + table[h, k - q] + 20000";
    for (seed, (score, mask)) in [(400, (FORMS[2].0, "")), (401, FORMS[0]), (402, (far, ""))] {
        let mask_code = (!mask.is_empty()).then(|| mask.parse().ok()).flatten();
        let problem =
            FwdProblem::batch(DType::Bf16, dims).score_code(score.parse().ok()).mask_code(mask_code);
        let gradients = Gradients::Captured;
        Check { problem, seed, hidden: None, gradients, has_intervals: true }.run::<bf16>(device, options)?;
    }
    Ok(())
}

/// Odd extents, none of which is a multiple of a tile.
const ODD: Dims = Dims::batch(2).seqlens(37, 53).heads(4, 2).head_dims(24, 16);

/// Runs every `step`-th check with f32 operands.
///
/// # Errors
/// The result that is wrong, or the refusal.
pub fn run_f32(
    device: &Device,
    options: &PlanOptions,
    gradients: Gradients,
    step: usize,
) -> Result<(), String> {
    for check in checks(&FwdProblem::batch(DType::F32, ODD), gradients).iter().step_by(step) {
        check.run::<f32>(device, options)?;
    }
    Ok(())
}

/// Runs every `step`-th check with f16 operands of odd extents, and with bf16 operands of several blocks.
///
/// # Errors
/// The result that is wrong, or the refusal.
pub fn run_16_bits(
    device: &Device,
    options: &PlanOptions,
    gradients: Gradients,
    step: usize,
) -> Result<(), String> {
    let dims = ODD;
    for check in checks(&FwdProblem::batch(DType::F16, dims), gradients).iter().step_by(step) {
        check.run::<f16>(device, options)?;
    }
    let long = Dims { seqlen_q: 70, seqlen_k: 150, head_dim_qk: 64, head_dim_v: 64, ..dims };
    for check in checks(&FwdProblem::batch(DType::Bf16, long), gradients).iter().skip(1 % step).step_by(step)
    {
        check.run::<bf16>(device, options)?;
    }
    Ok(())
}
