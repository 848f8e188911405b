//! Captured tensors that reach beyond 2^31 elements, by strides and by extents, with gradients.
//!
//! Memory between the elements that are read is reserved and never touched, so a test takes some pages of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_core::expr::draw::Draw;
use fmha_core::expr::{Function, Stored};
use fmha_core::reference::{Precision, backward, forward};
use fmha_core::{
    BwdArgs, BwdProblem, CapturedGrad, CapturedTensor, DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims,
    FwdArgs, FwdProblem, PlanOptions, ScoreArgs,
};
use half::bf16;

const QUERIES: u32 = 3;
const KEYS: u32 = 40;

/// Elements from one row of `far` to the next: more than 31 bits count, and in bytes more than 32 bits.
const STRIDE: i64 = (1 << 31) + 77;

/// Elements of `wide`, more than 31 bits count.
const EXTENT: u32 = 3_000_000_000;

/// Score whose index has a constant beyond 31 bits.
const FAR_CONSTANT: &str = "wide: bool[_]; s + select(wide[k + 2900000000], 1.0, 0.0)";

/// Text of a score, its captured tensor, and the ranges of elements that it reads.
struct Case {
    score: &'static str,
    tensor: CapturedTensor,
    stored: Stored,
    read: Vec<(u64, u64)>,
    has_gradient: bool,
}

fn cases() -> Vec<Case> {
    let keys = u64::from(KEYS);
    // The three rows lie far apart. A row's number is used as an index that is never negative, and as one that may be.
    let rows = (0..3).map(|row| (row * STRIDE.unsigned_abs(), keys)).collect();
    let far = CapturedTensor { name: "far".into(), shape: vec![3, KEYS], strides: vec![STRIDE, 1] };
    let wide = CapturedTensor { name: "wide".into(), shape: vec![EXTENT], strides: vec![1] };
    let extent = u64::from(EXTENT);
    vec![
        Case {
            score: "far: bf16[_, _]; s + far[q, k] + 0.5 * far[q - 1, k]",
            tensor: far,
            stored: Stored::Bf16,
            read: rows,
            has_gradient: true,
        },
        Case {
            score: "wide: bool[_]; s + select(wide[k], 0.5, 0.0) + select(wide[k - 50], 0.25, 0.0) \
                    + select(wide[q * 4000000000 + 10 - k], 2.0, 0.0)",
            tensor: wide.clone(),
            stored: Stored::Bool,
            read: vec![(0, keys), (extent - 64, 64)],
            has_gradient: false,
        },
        Case {
            score: FAR_CONSTANT,
            tensor: wide,
            stored: Stored::Bool,
            read: vec![(2_900_000_000, keys)],
            has_gradient: false,
        },
    ]
}

/// Makes a captured tensor in a device's memory, written only where it is read and reserved elsewhere.
fn capture(device: &Device, case: &Case, stretches: &[Vec<u8>]) -> DevBuffer {
    let size = case.stored.size_bytes();
    let memory = device.memory();
    // SAFETY: every element that a call reads is written below; nothing downloads the buffer.
    let buffer = unsafe { memory.alloc_uncleared(case.tensor.extent_elems() * size) }.unwrap();
    for (&(first, _), bytes) in case.read.iter().zip(stretches) {
        let place = buffer.as_ptr().wrapping_add((first * size) as usize);
        // SAFETY: the stretch lies in the buffer, which outlives it, and nothing else uses it.
        let mut stretch = unsafe {
            DevBuffer::from_raw(buffer.slice().space(), place, bytes.len() as u64, Box::new(|_| ()))
        };
        memory.upload_bytes(bytes, &mut stretch).unwrap();
    }
    buffer
}

fn off(found: &[f32], wanted: &[f64]) -> f64 {
    found.iter().zip(wanted).fold(0.0f64, |most, (&a, &b)| most.max((f64::from(a) - b).abs()))
}

/// Checks that forward and gradients of each case on a device equal those in float64.
fn holds(device: &Device, kernel: Option<&str>) {
    cases().iter().for_each(|case| case_holds(case, device, kernel));
}

fn case_holds(case: &Case, device: &Device, kernel: Option<&str>) {
    let host = fmha::Backend::Cpu.open().unwrap();
    let dims = Dims::batch(1).seqlens(QUERIES, KEYS).heads(1, 1).head_dim(8);
    let problem = FwdProblem::batch(DType::F32, dims)
        .write_lse(true)
        .score_code(case.score.parse::<Function>().unwrap())
        .captured(vec![case.tensor.clone()]);
    let fwd = problem.clone().validate().unwrap();
    let wanted: Vec<CapturedGrad> = case
        .has_gradient
        .then(|| CapturedGrad { name: case.tensor.name.clone(), dtype: DType::F32 })
        .into_iter()
        .collect();
    let bwd = BwdProblem::new(problem).dcaptured(wanted).validate().unwrap();
    let mut draw = Draw::new(11);
    let stretches: Vec<Vec<u8>> = case
        .read
        .iter()
        .map(|&(_, count)| {
            (0..count)
                .flat_map(|_| match case.stored {
                    Stored::Bool => vec![draw.below(2) as u8],
                    _ => bf16::from_f64(draw.unit()).to_ne_bytes().to_vec(),
                })
                .collect()
        })
        .collect();
    let mut noise = |count: u32| (0..count).map(|_| draw.unit() as f32).collect::<Vec<f32>>();
    let [q, dout] = [8 * QUERIES; 2].map(&mut noise);
    let [k, v] = [8 * KEYS; 2].map(&mut noise);
    let [there, here] = [device, &host].map(|device| capture(device, case, &stretches));
    let place = |numbers: &[f32]| device.memory().place(numbers).unwrap();
    let [tq, tk, tv, tdout] = [&q, &k, &v, &dout].map(|numbers| place(numbers));
    let [mut to, mut tdq] = [&q; 2].map(|like| place(&vec![f32::NAN; like.len()]));
    let [mut tdk, mut tdv] = [&k; 2].map(|like| place(&vec![f32::NAN; like.len()]));
    let mut tlse = place(&[f32::NAN; QUERIES as usize]);
    let mut sum = place(&[f32::NAN; 3 * KEYS as usize]);
    let (slices, host_slices) = ([there.slice()], [here.slice()]);
    let score = ScoreArgs::default().captured(&slices);
    let host_score = ScoreArgs::default().captured(&host_slices);
    let options = PlanOptions::default().allow_fallback(true);
    let options = if let Some(kernel) = kernel { options.kernel(kernel) } else { options };
    let stream = device.default_stream();
    let plan = device.plan_fwd(&fwd, &options).unwrap();
    let mut workspace = device.memory().workspace(plan.workspace()).unwrap();
    let mut args = FwdArgs::new(tq.slice(), tk.slice(), tv.slice(), to.slice_mut())
        .score(score)
        .lse(tlse.slice_mut())
        .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    plan.run(&mut args, &stream).unwrap();
    let plan = device.plan_bwd(&bwd, &options).unwrap();
    let mut workspace = device.memory().workspace(plan.workspace()).unwrap();
    let grads = [tdq.slice_mut(), tdk.slice_mut(), tdv.slice_mut()];
    let given = [to.slice(), tlse.slice(), tdout.slice()];
    let mut args = BwdArgs::new([tq.slice(), tk.slice(), tv.slice()], given, grads)
        .score(score)
        .dcaptured(case.has_gradient.then(|| sum.slice_mut()).into_iter().collect::<Vec<_>>())
        .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    plan.run(&mut args, &stream).unwrap();
    device.synchronize().unwrap();

    let read = |from: &DevBuffer, count: usize| {
        let mut numbers = vec![0f32; count];
        device.memory().download(from, &mut numbers).unwrap();
        numbers
    };
    let [hq, hk, hv, hdout] = [&q, &k, &v, &dout].map(|numbers| DevSlice::host(numbers));
    let (o, lse) = (read(&to, q.len()), read(&tlse, QUERIES as usize));
    let mut blank = vec![0f32; q.len()];
    let args = FwdArgs::new(hq, hk, hv, DevSliceMut::host(&mut blank)).score(host_score);
    let exact = forward(&fwd, &args, Precision::Exact).unwrap().remove(0);
    let what = format!("{} on {}", case.score, device.name());
    assert!(off(&o, &exact.o) < 1e-5 && off(&lse, &exact.lse) < 1e-5, "{what}: {o:?}");
    let [mut a, mut b, mut c] = [&q, &k, &v].map(Clone::clone);
    let mut blank = vec![0f32; 3 * KEYS as usize];
    let grads = [&mut a, &mut b, &mut c].map(|numbers| DevSliceMut::host(&mut numbers[..]));
    let args = BwdArgs::new([hq, hk, hv], [DevSlice::host(&o), DevSlice::host(&lse), hdout], grads)
        .score(host_score)
        .dcaptured(
            case.has_gradient.then(|| DevSliceMut::host(&mut blank[..])).into_iter().collect::<Vec<_>>(),
        );
    let exact = backward(&bwd, &args, Precision::Exact).unwrap();
    for (name, found, wanted) in [
        ("dQ", read(&tdq, q.len()), &exact.dq[0].2),
        ("dK", read(&tdk, k.len()), &exact.dk[0].2),
        ("dV", read(&tdv, v.len()), &exact.dv[0].2),
    ] {
        assert!(off(&found, wanted) < 1e-4, "{what}: {name} is {found:?}");
    }
    for wanted in &exact.dcaptured {
        let found = read(&sum, 3 * KEYS as usize);
        assert!(wanted.iter().any(|&x| x.abs() > 1e-3) && off(&found, wanted) < 1e-4, "{what}: {found:?}");
    }
}

#[test]
fn far_captures_are_read_on_the_cpu() {
    holds(&fmha::Backend::Cpu.open().unwrap(), None);
}

#[test]
fn far_captures_are_read_on_an_emulated_sm_90a() {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    holds(&fmha_cuda::open(0, Some("sm_90a")).unwrap(), Some("simt"));
}

#[test]
fn far_captures_are_read_on_an_emulated_gfx942() {
    if let Some(backend) = amd::open("gfx942", "far captures") {
        holds(&backend, Some("simt"));
    }
}

#[test]
fn far_captures_are_read_on_a_gpu() {
    match fmha_cuda::open(0, None) {
        Ok(backend) => holds(&backend, Some("simt")),
        Err(error) => println!("absent: {error}"),
    }
}

/// The gradient of `wide` on the CPU, whose score reads `KEYS` elements from `first` on: those elements, and whether
/// all others are 0. `None`: the system has too little memory for the sums.
fn gradient_of(first: u64) -> Option<(Vec<f32>, bool)> {
    let device = fmha::Backend::Cpu.open().unwrap();
    let memory = device.memory();
    let count = first + u64::from(KEYS);
    let (size, keys) = (size_of::<bf16>() as u64, KEYS as usize);
    let dims = Dims {
        batch: 1,
        seqlen_q: QUERIES,
        seqlen_k: KEYS,
        num_heads_q: 1,
        num_heads_kv: 1,
        head_dim_qk: 8,
        head_dim_v: 8,
    };
    let score = format!("wide: bf16[_]; s + wide[k + {first}]").parse::<Function>().unwrap();
    let tensor = CapturedTensor { name: "wide".into(), shape: vec![count as u32], strides: vec![1] };
    let problem =
        FwdProblem::batch(DType::F32, dims).write_lse(true).score_code(score).captured(vec![tensor]);
    let fwd = problem.clone().validate().unwrap();
    let wanted = vec![CapturedGrad { name: "wide".into(), dtype: DType::Bf16 }];
    let bwd = BwdProblem::new(problem).dcaptured(wanted).validate().unwrap();
    let mut draw = Draw::new(12);
    let mut noise = |count: u32| (0..count).map(|_| draw.unit() as f32).collect::<Vec<f32>>();
    let [q, dout] = [8 * QUERIES; 2].map(&mut noise);
    let [k, v] = [8 * KEYS; 2].map(&mut noise);
    let [tq, tk, tv, tdout] = [&q, &k, &v, &dout].map(|numbers| memory.place(numbers).unwrap());
    let [mut to, mut tdq, mut tdk, mut tdv] = [&q, &q, &k, &v].map(|like| memory.place(like).unwrap());
    let mut tlse = memory.place(&[0f32; QUERIES as usize]).unwrap();
    let captured = memory.alloc(count * size).ok()?;
    // Sums of 8 bytes an element are reserved by the call, as here: pages are taken where a pair adds to them.
    drop(memory.alloc(count * 8).ok()?);
    let mut sum = memory.alloc(count * size).ok()?;
    let (slices, stream) = ([captured.slice()], device.default_stream());
    let score = ScoreArgs::default().captured(&slices);
    let plan = device.plan_fwd(&fwd, &PlanOptions::default()).unwrap();
    let mut workspace = memory.workspace(plan.workspace()).unwrap();
    let mut args = FwdArgs::new(tq.slice(), tk.slice(), tv.slice(), to.slice_mut())
        .score(score)
        .lse(tlse.slice_mut())
        .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    plan.run(&mut args, &stream).unwrap();
    let plan = device.plan_bwd(&bwd, &PlanOptions::default()).unwrap();
    let mut workspace = memory.workspace(plan.workspace()).unwrap();
    let grads = [tdq.slice_mut(), tdk.slice_mut(), tdv.slice_mut()];
    let given = [to.slice(), tlse.slice(), tdout.slice()];
    let mut args = BwdArgs::new([tq.slice(), tk.slice(), tv.slice()], given, grads)
        .score(score)
        .dcaptured(vec![sum.slice_mut()])
        .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    plan.run(&mut args, &stream).unwrap();
    // SAFETY: the CPU's memory, of so many elements, which the call has written.
    let found = unsafe { std::slice::from_raw_parts(sum.as_ptr().cast::<u16>(), count as usize) };
    let (before, read) = found.split_at(found.len() - keys);
    let read = read.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
    Some((read, before.iter().all(|&bits| bits == 0)))
}

#[test]
#[ignore = "4 GB are written: cargo xtask test --all"]
fn a_gradient_of_more_than_2_to_the_31_elements_is_that_of_a_short_tensor() {
    let Some((far, is_zero_before)) = gradient_of((1 << 31) + 77) else {
        return println!("absent: memory for 2^31 sums in f64");
    };
    let (near, _) = gradient_of(0).unwrap();
    assert!(near.iter().any(|x| x.abs() > 1e-3), "{near:?}");
    assert_eq!(far, near);
    assert!(is_zero_before);
}
