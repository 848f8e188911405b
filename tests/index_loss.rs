//! The loss that trains an indexer, and its gradients, on every backend against the definition in f64. Emulated
//! devices, and the CPU.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_conformance::apart::run_test;
use fmha_core::cache::{Bundle, CompiledKernel, embed};
use fmha_core::source::KernelSource;
use fmha_core::sparse::{Candidates, IndexArgs, IndexCall, IndexLossProblem, IndexProblem, index_losses};
use fmha_core::{AnyProblem, DType, DevSlice, Device, Error, IndexLossArgs, PlanOptions};

/// Numbers by a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % end
    }

    /// A number of few digits, -1 to 1: products of rows are exact in f32, so that no slope of relu is in doubt.
    fn number(&mut self) -> f32 {
        self.below(33) as f32 / 16.0 - 1.0
    }
}

/// The bytes of a number in a type.
fn bytes_of(dtype: DType, x: f32) -> Vec<u8> {
    match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        // Codes of -1, -0.5, 0, 0.5 and 1, and NaN.
        _ if x.is_nan() => vec![0x7f],
        _ => vec![[0xb8, 0xb0, 0, 0x30, 0x38][((x + 1.0) * 2.0) as usize]],
    }
}

/// A loss and its operands.
#[derive(Clone)]
struct Case {
    name: &'static str,
    problem: IndexLossProblem,
    q: Vec<u8>,
    k: Vec<u8>,
    weights: Vec<f32>,
    scale: Vec<f32>,
    indices: Vec<i32>,
    target: Vec<f32>,
    dloss: Vec<f32>,
}

/// Outputs of a call; empty where one is not wanted.
#[derive(Clone, Debug, PartialEq)]
struct Written {
    loss: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dweights: Vec<f32>,
}

/// A number as the definition has it, and the sum of its terms' magnitudes.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    terms: f64,
}

impl Sum {
    fn add(&mut self, factor: f64, of: f64, at_most: f64) {
        self.value += factor * of;
        self.terms += at_most * of.abs();
    }
}

impl Case {
    /// Lists in every form: entries below 0 and past the keys, keys that stand twice, a list without keys, one whose
    /// target is 0. Key 0 and all that is absent is NaN.
    fn new(name: &'static str, problem: IndexLossProblem, seed: u64) -> Self {
        let mut random = Random(seed);
        let (rows, keys, topk) = (problem.rows() as usize, problem.keys() as usize, problem.topk as usize);
        let (heads, dim) = (problem.num_heads as usize, problem.head_dim as usize);
        let mut elems = |dtype: DType, count: usize, absent: &dyn Fn(usize) -> bool| -> Vec<u8> {
            let number = |at| if absent(at) { f32::NAN } else { random.number() };
            (0..count).flat_map(number_of(dtype, number)).collect()
        };
        let first_of =
            |at: usize| problem.seqlen_k > 1 && (at / dim).is_multiple_of(problem.seqlen_k as usize);
        let q = elems(problem.dtype_q, rows * heads * dim, &|_| false);
        let k = elems(problem.dtype_k, keys * dim, &first_of);
        let weights = (0..rows * heads).map(|_| random.number() / 4.0).collect();
        let scale =
            if problem.k_scale { (0..keys).map(|_| 0.5 + random.number().abs()).collect() } else { vec![] };
        let (mut indices, mut target) = (vec![0; rows * topk], vec![0.0; rows * topk]);
        for (at, (entry, of_entry)) in indices.iter_mut().zip(&mut target).enumerate() {
            let (row, n) = (at / topk, at % topk);
            let span = problem.seqlen_k.max(1);
            *entry = match random.below(9) {
                _ if row % 5 == 3 => -1,
                0 => -1 - random.below(3) as i32,
                1 => (problem.seqlen_k + random.below(3)) as i32,
                // Key 1 stands in a list several times.
                2 if span > 1 => 1,
                _ if span > 1 => (1 + (random.below(span) + n as u32) % (span - 1)) as i32,
                _ => 0,
            };
            let is_there = u32::try_from(*entry).is_ok_and(|j| j < problem.seqlen_k);
            let share = if row % 5 == 4 { 0.0 } else { random.below(64) as f32 / 16.0 };
            *of_entry = if is_there { share } else { f32::NAN };
        }
        let dloss =
            if problem.has_dloss { (0..rows).map(|_| random.number() * 3.0).collect() } else { vec![] };
        Self { name, problem, q, k, weights, scale, indices, target, dloss }
    }

    /// Outputs of the definition, with a bound of errors for each number, where products' gradients are rounded to
    /// `unit` of their size.
    fn expected(&self, unit: f64) -> [Vec<(f64, f64)>; 4] {
        let problem = &self.problem;
        let (heads, dim, topk) =
            (problem.num_heads as usize, problem.head_dim as usize, problem.topk as usize);
        // SAFETY: the slices are of vectors that outlive the call, of the types that the problem says.
        let (q, k) = unsafe {
            let slice = |bytes: &Vec<u8>, dtype| {
                DevSlice::from_raw(fmha_core::MemorySpace::Host, bytes.as_ptr(), bytes.len() as u64, dtype)
            };
            (slice(&self.q, problem.dtype_q), slice(&self.k, problem.dtype_k))
        };
        let index = IndexProblem {
            batch: problem.batch,
            seqlen_q: problem.seqlen_q,
            seqlen_k: problem.seqlen_k,
            num_heads: problem.num_heads,
            head_dim: problem.head_dim,
            dtype_q: problem.dtype_q,
            dtype_k: problem.dtype_k,
        };
        let k_scale = problem.k_scale.then_some(&self.scale[..]);
        let args = IndexArgs { q, k, weights: &self.weights, k_scale, candidates: Candidates::All };
        let call = IndexCall::new(index, args).unwrap();
        let (losses, d_scores) = index_losses(&call, (&self.indices, topk), &self.target).unwrap();
        let rows = call.rows();
        let mut dq = vec![Sum::default(); rows * heads * dim];
        let mut dk = vec![Sum::default(); problem.keys() as usize * dim];
        let mut dweights = vec![Sum::default(); rows * heads];
        for row in 0..rows {
            let factor = f64::from(*self.dloss.get(row).unwrap_or(&1.0));
            let listed = |at: &usize| {
                u32::try_from(self.indices[*at]).ok().filter(|&j| j < problem.seqlen_k).map(|j| (*at, j))
            };
            let all = row * topk..(row + 1) * topk;
            let weight: f64 =
                all.clone().filter_map(|at| listed(&at)).map(|(at, _)| f64::from(self.target[at])).sum();
            for (at, j) in all.filter_map(|at| listed(&at)) {
                let d_score = f64::from(d_scores[at]) * factor;
                // q - p is at most q + p, which bounds what it loses where both are nearly equal.
                let share = if weight == 0.0 { 0.0 } else { f64::from(self.target[at]) / weight };
                let at_most = (f64::from(d_scores[at].abs()) + 2.0 * share) * factor.abs();
                for h in 0..heads {
                    let product = call.product(row, h, j);
                    dweights[row * heads + h].add(d_score, product.max(0.0), at_most);
                    if product <= 0.0 {
                        continue;
                    }
                    let weight = call.weight(row, h);
                    for d in 0..dim {
                        let of_k = call.k_at(row, j, d) * weight;
                        dq[(row * heads + h) * dim + d].add(d_score, of_k, at_most);
                        dk[call.key(row, j) * dim + d].add(d_score, call.q_at(row, h, d) * weight, at_most);
                    }
                }
            }
        }
        const EXACT: f64 = 1.0 / 65536.0;
        let bounded = |sums: Vec<Sum>, unit: f64| {
            sums.into_iter().map(|sum| (sum.value, sum.terms * unit + 1e-30)).collect::<Vec<_>>()
        };
        let losses = losses.into_iter().map(|loss| (loss, 1e-5 * (1.0 + loss.abs()))).collect();
        [losses, bounded(dq, unit + EXACT), bounded(dk, unit + EXACT), bounded(dweights, EXACT)]
    }

    fn run(&self, device: &Device, options: &PlanOptions) -> Written {
        let problem = self.problem.validate().unwrap();
        let plan = device.plan_index_loss(&problem, options).unwrap();
        if let Some(kernel) = &options.kernel {
            assert_eq!(plan.kernel(), kernel);
        }
        let memory = device.memory();
        let q = memory.place(&self.q[..]).unwrap().typed(problem.dtype_q);
        let k = memory.place(&self.k[..]).unwrap().typed(problem.dtype_k);
        let [weights, target] = [&self.weights, &self.target].map(|x| memory.place(&x[..]).unwrap());
        let indices = memory.place(&self.indices[..]).unwrap();
        let scale = problem.k_scale.then(|| memory.place(&self.scale[..]).unwrap());
        let dloss = problem.has_dloss.then(|| memory.place(&self.dloss[..]).unwrap());
        let (rows, heads, dim) = (problem.rows(), u64::from(problem.num_heads), u64::from(problem.head_dim));
        let mut host = [
            (problem.write_loss, rows),
            (problem.write_dq, rows * heads * dim),
            (problem.write_dk, problem.keys() * dim),
            (problem.write_dweights, rows * heads),
        ]
        .map(|(wanted, count)| vec![f32::NAN; if wanted { count as usize } else { 0 }]);
        let mut made = host.each_ref().map(|values| memory.place(&values[..]).unwrap());
        let [loss, dq, dk, dweights] = &mut made;
        let mut scratch = memory.workspace(plan.workspace()).unwrap();
        let operands = [q.slice(), k.slice(), weights.slice()];
        let mut args = IndexLossArgs::new(operands, indices.slice(), target.slice())
            .k_scale(scale.as_ref().map(|it| it.slice()))
            .dloss(dloss.as_ref().map(|it| it.slice()))
            .loss(problem.write_loss.then(|| loss.slice_mut()))
            .dq(problem.write_dq.then(|| dq.slice_mut()))
            .dk(problem.write_dk.then(|| dk.slice_mut()))
            .dweights(problem.write_dweights.then(|| dweights.slice_mut()))
            .workspace(scratch.as_mut().map(|it| it.slice_mut()));
        let stream = device.default_stream();
        plan.run(&mut args, &stream).unwrap();
        stream.synchronize().unwrap();
        for (from, to) in made.iter().zip(&mut host) {
            memory.download(from, to).unwrap();
        }
        let [loss, dq, dk, dweights] = host;
        Written { loss, dq, dk, dweights }
    }

    /// Holds a kernel, or the one that the device chooses, to the definition: with sums in any order, and in one.
    fn holds(&self, device: &Device, kernel: &str) {
        let unit = if ["simt", "cpu-index-loss"].contains(&kernel) { 0.0 } else { 1.0 / 256.0 };
        let expected = self.expected(unit);
        for ordered in [false, true] {
            let options =
                PlanOptions::default().kernel(kernel).allow_fallback(kernel == "simt").deterministic(ordered);
            let found = self.run(device, &options);
            let name = format!("{} on {} by {kernel}, ordered {ordered}", self.name, device.name());
            let all =
                [("loss", &found.loss), ("dq", &found.dq), ("dk", &found.dk), ("dweights", &found.dweights)];
            for ((what, found), wanted) in all.into_iter().zip(&expected) {
                for (at, (&found, &(wanted, bound))) in found.iter().zip(wanted).enumerate() {
                    let off = (f64::from(found) - wanted).abs();
                    assert!(
                        off <= bound,
                        "{name}: {what}[{at}] is {found}, should be {wanted} within {bound:e}"
                    );
                }
            }
            if ordered {
                assert_eq!(self.run(device, &options), found, "{name}: a second run has other bits");
            }
        }
    }
}

/// The bytes of numbers by their place.
fn number_of(dtype: DType, mut number: impl FnMut(usize) -> f32) -> impl FnMut(usize) -> Vec<u8> {
    move |at| {
        let x = number(at);
        bytes_of(dtype, if dtype.is_fp8() && !x.is_nan() { (x * 2.0).round() / 2.0 } else { x })
    }
}

fn of(sizes: [u32; 4], heads: [u32; 2], dtypes: [DType; 2]) -> IndexLossProblem {
    IndexLossProblem::new(sizes, heads, dtypes).write_dq(true).write_dk(true).write_dweights(true)
}

const BF16: [DType; 2] = [DType::Bf16; 2];

/// Cases of the kernels on matrix units.
fn matrix_cases() -> Vec<Case> {
    let small = of([2, 6, 70, 40], [16, 32], BF16);
    let cases = [
        ("64 heads of 128", of([1, 5, 90, 100], [64, 128], BF16).dloss(true)),
        ("20 heads of 40", of([2, 5, 50, 70], [20, 40], BF16).dloss(true)),
        ("128 heads of 64", of([1, 3, 40, 33], [128, 64], BF16)),
        ("32 heads of 256", of([1, 2, 40, 20], [32, 256], BF16)),
        ("one head, one entry", of([2, 5, 9, 1], [1, 8], BF16)),
        ("keys alone", small.write_loss(false).write_dq(false).write_dweights(false)),
        ("queries alone", small.write_loss(false).write_dk(false).write_dweights(false)),
        ("weights alone", small.write_dq(false).write_dk(false)),
        ("the loss alone", small.write_dq(false).write_dk(false).write_dweights(false)),
    ];
    let cases = cases.into_iter().zip(1..).map(|((name, problem), seed)| Case::new(name, problem, seed));
    cases.chain([infinite()]).collect()
}

/// A key whose products are -inf, which relu makes 0, and heads that do not fill a product's rows.
fn infinite() -> Case {
    let problem = of([1, 3, 9, 12], [20, 16], BF16).write_dq(false).write_dk(false);
    let mut case = Case::new("an infinite key", problem, 30);
    for first in case.q.chunks_exact_mut(2 * 16) {
        first[..2].copy_from_slice(&bytes_of(DType::Bf16, -0.5));
    }
    case.k[2 * 16..][..2].copy_from_slice(&bytes_of(DType::Bf16, f32::INFINITY));
    case
}

/// Cases of every backend's kernel that takes every problem.
fn all_cases() -> Vec<Case> {
    use DType::{E4m3Fn, F16, F32};
    let cases = [
        ("f32", of([2, 6, 40, 70], [3, 5], [F32; 2]).dloss(true)),
        ("f16", of([1, 5, 100, 40], [40, 24], [F16; 2])),
        ("bf16 queries, f32 keys", of([2, 5, 30, 33], [2, 33], [DType::Bf16, F32])),
        ("fp8 with scales", of([2, 5, 34, 20], [4, 32], [DType::Bf16, E4m3Fn]).k_scale(true)),
        ("one key", of([2, 2, 1, 3], [2, 4], [F32; 2])),
        ("no entries", of([1, 3, 4, 0], [2, 4], [F32; 2])),
        ("no keys", of([1, 3, 0, 4], [2, 4], [F32; 2])),
        ("no queries", of([2, 0, 5, 4], [2, 4], [F32; 2])),
    ];
    cases.into_iter().zip(50..).map(|((name, problem), seed)| Case::new(name, problem, seed)).collect()
}

#[test]
fn the_cpu_computes_the_definition() {
    let cpu = Device::new(fmha_cpu::CpuBackend::new().unwrap());
    for case in all_cases().iter().chain(&matrix_cases()) {
        case.holds(&cpu, "cpu-index-loss");
    }
}

/// Every `step`-th case of each kind; matrix units on `kernel`.
fn all_hold(device: &Device, kernel: &str, step: usize) {
    // Waves have sums of whole rows on AMD's.
    let most = if kernel.starts_with("sm") { 256 } else { 128 };
    let cases = matrix_cases().into_iter().filter(|case| case.problem.head_dim <= most);
    cases.step_by(step).for_each(|case| case.holds(device, kernel));
    all_cases().iter().step_by(step).for_each(|case| case.holds(device, "simt"));
    // A matrix unit has no sums for these, and says so by its name.
    let problem = all_cases()[3].problem.validate().unwrap();
    let error = device.plan_index_loss(&problem, &PlanOptions::default()).err().unwrap().to_string();
    assert!(error.contains(kernel) && error.contains("dtype_k e4m3"), "{error}");
}

fn nvidia(arch: &str, step: usize) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    match fmha_cuda::open(0, Some(arch)) {
        Ok(device) => all_hold(&device, "sm80_index_loss", step),
        Err(Error::NoDevice(reason)) => println!("absent: {reason}"),
        Err(error) => panic!("{arch}: {error}"),
    }
}

#[test]
fn sm80_computes_the_definition() {
    nvidia("sm_80", 1);
}

/// Name of the test that does what another one asks of a process of its own.
const OWN: &str = "the_work_of_this_process";

#[test]
fn the_work_of_this_process() {
    if let Ok(arch) = std::env::var("INDEX_LOSS_ARCH") {
        nvidia(&arch, 3);
    }
    if let Ok(fault) = std::env::var("INDEX_LOSS_FAULT") {
        is_found(&FAULTS[fault.parse::<usize>().unwrap()]);
    }
}

/// A process emulates one architecture of NVIDIA's. Every access is ordered by vector clocks, so that a missing wait is
/// an error.
#[test]
fn hopper_computes_the_definition() {
    run_test(OWN, &[("INDEX_LOSS_ARCH", "sm_90a"), ("FMHA_EMULATE_MODE", "hb")]).unwrap();
}

/// Every `step`-th case on an architecture of AMD's.
fn amd_holds(arch: &str, step: usize) {
    let Some(device) = amd::open(arch, "an indexer's loss") else { return };
    all_hold(&device, matrix_kernel(arch), step);
}

/// The kernel on an architecture's matrix unit.
fn matrix_kernel(arch: &str) -> &'static str {
    match arch {
        _ if arch.starts_with("sm_") => "sm80_index_loss",
        _ if arch.starts_with("gfx9") => "cdna_index_loss",
        _ => "rdna_index_loss",
    }
}

#[test]
fn cdna_and_rdna_compute_the_definition() {
    amd_holds("gfx942", 2);
    amd_holds("gfx1100", 3);
}

#[test]
#[ignore = "the sample's cases again: cargo xtask test --all"]
fn every_amd_device_computes_the_definition() {
    for arch in ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"] {
        amd_holds(arch, 1);
    }
}

/// A fault in a header: architecture, name, the text, what stands in its place, and the case that finds it.
type Fault = (&'static str, &'static str, &'static str, &'static str, &'static str);

const FAULTS: [Fault; 7] = [
    ("sm_80", "fmha/index_loss.h", "weight += is_listed ?", "weight += entry < p.topk ?", "20 heads of 40"),
    (
        "sm_80",
        "fmha/sm80/index/loss.cuh",
        "// Keys are read to the end.\n      __syncthreads();",
        "",
        "20 heads of 40",
    ),
    ("sm_80", "fmha/sm80/index/loss.cuh", "times > 1; ++entry", "false; ++entry", "20 heads of 40"),
    ("sm_80", "fmha/sm80/index/loss.cuh", "parts; ++part) sum", "1; ++part) sum", "20 heads of 40"),
    ("sm_80", "fmha/sm80/index/loss.cuh", "h < heads) sums", "true) sums", "an infinite key"),
    ("gfx942", "fmha/amd/index_loss.h", "there ? term : 0.f", "term", "20 heads of 40"),
    ("gfx942", "fmha/amd/index_loss.h", "if (!repeated[at])", "if (true)", "20 heads of 40"),
];

fn open(arch: &str) -> Option<Device> {
    if arch.starts_with("gfx") {
        return amd::open(arch, "a fault in an indexer's loss");
    }
    fmha_cuda::nvrtc::nvrtc().ok().and_then(|_| fmha_cuda::open(0, Some(arch)).ok())
}

/// Holds that a case passes on the sound kernels, and not with the fault in them.
fn is_found(&(arch, name, text, put, case): &Fault) {
    let Some(device) = open(arch) else { return println!("absent") };
    let case = matrix_cases().into_iter().find(|it| it.name == case).unwrap();
    let kernel = matrix_kernel(arch);
    case.holds(&device, kernel);
    let compiler = device.precompiler().unwrap();
    let problem = case.problem.validate().unwrap();
    let mut broken = Vec::new();
    for ordered in [false, true] {
        let options = PlanOptions::default().kernel(kernel).deterministic(ordered);
        for job in compiler.jobs(AnyProblem::IndexLoss(&problem), &options).unwrap() {
            let mut headers = job.source.headers().to_vec();
            let Some(header) = headers.iter_mut().find(|header| header.name == name) else { continue };
            assert_eq!(header.text.matches(text).count(), 1, "{name}: `{text}`");
            header.text = header.text.replace(text, put).into();
            let mut other = job.clone();
            other.source = KernelSource::with(job.source.entry.clone(), headers);
            let kernel = compiler.precompile(&other).unwrap();
            broken.push(CompiledKernel { key: job.key(), ..(*kernel).clone() }.into());
        }
    }
    assert!(!broken.is_empty(), "no kernel of {} includes {name}", case.name);
    // Devices that are opened from here on take the broken kernels.
    embed(Bundle::new("planted", broken));
    let device = open(arch).unwrap();
    let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.holds(&device, kernel)));
    assert!(held.is_err(), "{}: `{put}` in {name} is not found", case.name);
}

#[test]
fn each_planted_fault_is_found() {
    for (at, fault) in FAULTS.iter().enumerate() {
        let said = run_test(OWN, &[("INDEX_LOSS_FAULT", &at.to_string()), ("FMHA_EMULATE_MODE", "hb")]);
        assert!(said.is_ok(), "{fault:?}: {said:?}");
    }
}
