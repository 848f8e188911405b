//! Tests of scores and masks as code, forward and backward, against float64.

#![allow(clippy::unwrap_used)]

use fmha_core::expr::draw::{self, CAPTURED, Draw, Kind, NUMBERS};
use fmha_core::expr::{Function, Number, Stored};
use fmha_core::reference::{Precision, backward, forward};
use fmha_core::{
    BwdArgs, BwdProblem, CapturedGrad, CapturedTensor, DType, DevSlice, DevSliceMut, Device, Dims, Error,
    FwdArgs, FwdProblem, MaskSpec, PlanOptions, ScoreArgs,
};

const DIMS: Dims = Dims::batch(2).seqlens(37, 53).heads(4, 2).head_dims(24, 16);

fn noise(count: u64, seed: u64) -> Vec<f32> {
    let mut draw = Draw::new(seed);
    (0..count).map(|_| draw.unit() as f32 * 1.5).collect()
}

/// Problems of seeds from this number on have a slope for each head.
const OF_HEADS: u64 = 300;

/// Memory of the tensors that functions capture.
struct Memory {
    /// Captured tensors in 64-bit words, so that every type is aligned.
    tensors: Vec<(CapturedTensor, Vec<u64>)>,
    numbers: Vec<Number>,
}

impl Memory {
    fn new(problem: &FwdProblem, seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let mut tensors = vec![];
        for (name, stored, rank) in CAPTURED {
            if problem.code.stored(name).is_none() {
                continue;
            }
            let mut shape: Vec<u32> = (0..rank).map(|_| 2 + draw.below(9) as u32).collect();
            if name == "slopes" && seed >= OF_HEADS {
                shape = vec![problem.dims.num_heads_q];
            }
            let tensor = CapturedTensor::dense(name, &shape);
            let mut bytes: Vec<u8> = vec![];
            for _ in 0..tensor.num_elems() {
                match stored {
                    Stored::F32 => bytes.extend((draw.unit() as f32).to_ne_bytes()),
                    Stored::Bf16 => bytes.extend(half::bf16::from_f64(draw.unit()).to_ne_bytes()),
                    Stored::I32 => bytes.extend((draw.below(9) as i32 - 2).to_ne_bytes()),
                    _ => bytes.push(draw.below(3) as u8),
                }
            }
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            let words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
            tensors.push((tensor, words.collect()));
        }
        let numbers = problem.code.numbers().into_iter().map(|(name, _)| {
            let float = name == NUMBERS[0].0;
            if float { Number::Float(draw.unit() as f32) } else { Number::Int(draw.below(9) as i64 - 4) }
        });
        let numbers = numbers.collect();
        Self { tensors, numbers }
    }

    fn slices(&self) -> Vec<DevSlice<'_>> {
        self.tensors.iter().map(|(_, words)| DevSlice::host(words)).collect()
    }
}

/// Largest difference, divided by the largest expected value or by 1.
fn error(found: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let size = wanted.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    found.iter().zip(wanted).fold(0.0f64, |most, (&a, &b)| {
        let difference = (f64::from(a) - b).abs() / size;
        if difference.is_nan() { f64::INFINITY } else { most.max(difference) }
    })
}

/// Runs a problem forward and backward and compares all results with float64.
fn check(device: &Device, problem: FwdProblem, seed: u64) {
    check_gradients(device, problem, seed, true);
}

/// Compares like [`check`], with gradients of captured tensors if `is_captured`. Returns the plans' descriptions of
/// functions.
fn check_gradients(device: &Device, problem: FwdProblem, seed: u64, is_captured: bool) -> [String; 2] {
    let text = format!("seed {seed}: {:?}", problem.code);
    let memory = Memory::new(&problem, seed);
    let captured: Vec<CapturedTensor> = memory.tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
    let fwd = problem.captured(captured).write_lse(true).validate().unwrap_or_else(|e| panic!("{text}: {e}"));
    let floats = fwd.code.captured.iter().filter(|tensor| {
        fwd.code.score.as_ref().is_some_and(|score| {
            score.captures().iter().any(|capture| {
                capture.name == tensor.name && capture.kind.value_type() == fmha_core::expr::Type::Float
            })
        })
    });
    let wanted: Vec<CapturedGrad> = floats
        .filter(|_| is_captured)
        .map(|tensor| CapturedGrad { name: tensor.name.clone(), dtype: DType::F32 })
        .collect();
    let [q, k, v, dout] = [(fwd.shape_q(), 1), (fwd.shape_k(), 2), (fwd.shape_v(), 3), (fwd.shape_o(), 4)]
        .map(|(shape, salt)| noise(shape.num_elems(), seed * 8 + salt));
    let slices = memory.slices();
    let score = ScoreArgs::default().captured(&slices).numbers(&memory.numbers);
    let mut o = vec![f32::NAN; fwd.shape_o().num_elems() as usize];
    let mut lse = vec![f32::NAN; (DIMS.batch * DIMS.num_heads_q * fwd.dims.seqlen_q) as usize];
    let stream = device.default_stream();
    let plan = device.plan_fwd(&fwd, &PlanOptions::default()).unwrap();
    let inputs = [&q, &k, &v].map(|x| DevSlice::host(x));
    let [sq, sk, sv] = inputs;
    let mut args =
        FwdArgs::new(sq, sk, sv, DevSliceMut::host(&mut o)).score(score).lse(DevSliceMut::host(&mut lse));
    plan.run(&mut args, &stream).unwrap_or_else(|e| panic!("{text}: {e}"));
    let of_forward_plan = words(plan.details());
    let exact = forward(&fwd, &args, Precision::Exact).unwrap();
    for head in &exact {
        for i in 0..head.span.seqlen_q {
            let at = fwd.strides.o.offset(head.span.q_batch, i, head.i_head, 0) as usize;
            let dim = DIMS.head_dim_v as usize;
            let row = error(&o[at..at + dim], &head.o[i as usize * dim..][..dim]);
            assert!(row < 2e-5, "{text}: O of head {} row {i} is off by {row}", head.i_head);
            let (found, wanted) =
                (f64::from(lse[head.span.lse_index(&fwd, head.i_head, i)]), head.lse[i as usize]);
            assert!(
                found == wanted || (found - wanted).abs() < 2e-5 * wanted.abs().max(1.0),
                "{text}: LSE of head {} row {i} is {found}, not {wanted}",
                head.i_head
            );
        }
    }

    let bwd = BwdProblem::new((*fwd).clone()).dcaptured(wanted.clone()).validate().unwrap();
    let plan = device.plan_bwd(&bwd, &PlanOptions::default()).unwrap();
    let mut grads =
        [fwd.shape_q(), fwd.shape_k(), fwd.shape_v()].map(|s| vec![f32::NAN; s.num_elems() as usize]);
    let elems = |grad: &CapturedGrad| {
        fwd.code.captured.iter().find(|tensor| tensor.name == grad.name).unwrap().num_elems() as usize
    };
    let mut dcaptured: Vec<Vec<f32>> = wanted.iter().map(|grad| vec![f32::NAN; elems(grad)]).collect();
    let of_forward = [&o, &lse, &dout].map(|x| DevSlice::host(x));
    let mut args = BwdArgs::new(inputs, of_forward, grads.each_mut().map(|x| DevSliceMut::host(x)))
        .score(score)
        .dcaptured(dcaptured.iter_mut().map(|x| DevSliceMut::host(x)).collect());
    plan.run(&mut args, &stream).unwrap_or_else(|e| panic!("{text}: {e}"));
    let of_plans = [of_forward_plan, words(plan.details())];
    let exact = backward(&bwd, &args, Precision::Exact).unwrap();
    drop(args);
    let [dq, dk, dv] = &grads;
    for (name, found, strides, dim, wanted) in [
        ("dQ", dq, bwd.dq, DIMS.head_dim_qk, &exact.dq),
        ("dK", dk, bwd.dk, DIMS.head_dim_qk, &exact.dk),
        ("dV", dv, bwd.dv, DIMS.head_dim_v, &exact.dv),
    ] {
        for (span, head, wanted) in wanted {
            for (row, wanted) in wanted.chunks_exact(dim as usize).enumerate() {
                let batch = if name == "dQ" { span.q_batch } else { span.k_batch };
                let at = strides.offset(batch, row as u32, *head, 0) as usize;
                let off = error(&found[at..at + dim as usize], wanted);
                assert!(off < 1e-4, "{text}: {name} of head {head} row {row} is off by {off}");
            }
        }
    }
    for ((grad, found), wanted) in wanted.iter().zip(&dcaptured).zip(&exact.dcaptured) {
        let off = error(found, wanted);
        assert!(off < 1e-4, "{text}: gradient of {} is off by {off}: {found:?}, not {wanted:?}", grad.name);
    }
    of_plans
}

/// Description of the functions in a plan's details.
fn words(details: &[(&str, String)]) -> String {
    details.iter().find(|(name, _)| *name == "functions").map(|(_, words)| words.clone()).unwrap_or_default()
}

fn device() -> Device {
    Device::new(fmha_cpu::CpuBackend::new().unwrap())
}

#[test]
fn drawn_scores_and_masks_have_the_results_and_gradients_of_float64() {
    let device = device();
    for seed in 0..40u64 {
        let mut problem = FwdProblem::batch(DType::F32, DIMS);
        if seed % 4 != 3 {
            problem = problem.score_code(draw::score(seed, Kind::Tame).unwrap());
        }
        if seed % 4 != 0 {
            problem = problem.mask_code(draw::mask(seed, Kind::Tame).unwrap());
        }
        problem = match seed % 3 {
            0 => problem.mask(MaskSpec::CAUSAL),
            1 => problem.softcap(3.0),
            _ => problem.sink(false),
        };
        check(&device, problem, seed);
    }
}

/// Forms of functions that people write.
#[test]
fn common_forms_have_the_results_and_gradients_of_float64() {
    let device = device();
    for (seed, (score, mask)) in [
        ("slopes: f32[_]; s + slopes[h] * (k - q)", "k <= q + (seqlen_k - seqlen_q)"),
        ("3 * tanh(s / 3)", "q // 8 == k // 8"),
        ("table: bf16[_, _]; s + table[h, k - q]", "ids: i32[_]; ids[q] == ids[k] or k < 3"),
        ("select(abs(q - k) < 9, s, -inf)", "true"),
        ("s * sigmoid(s)", "k > 100"),
        ("gain: f32[]; rate: float; s * exp(gain[]) + rate", "shift: int; k - q >= shift"),
        ("sqrt(abs(s) + 1) + log(s * s + 1)", "(k % 3 == 0) or (q & 1 == 1)"),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = FwdProblem::batch(DType::F32, DIMS)
            .score_code(score.parse::<Function>().unwrap())
            .mask_code(mask.parse::<Function>().unwrap());
        check(&device, problem.clone(), 100 + seed as u64);
        // A score of -inf hides its pair, although the soft-cap afterwards would make the score finite.
        check(&device, problem.softcap(9.0), 200 + seed as u64);
    }
}

/// Plans functions that kernels have built in, of more queries than keys too, and beside a band of the call.
#[test]
fn functions_that_kernels_have_built_in_are_computed_as_such() {
    let device = device();
    let shorter = Dims { seqlen_q: DIMS.seqlen_k + 4, ..DIMS };
    let square = Dims { seqlen_q: DIMS.seqlen_k, ..DIMS };
    let alibi = "slopes: f32[_]; s + slopes[h] * (k - q)";
    let capped = "slopes: f32[_]; 2 * tanh(s / 2) + -slopes[h] * abs(q - k)";
    for (seed, (dims, score, mask, band, forward, backward)) in [
        (DIMS, "", "k <= q", "0", "the mask is the band t", ""),
        (shorter, "", "k <= q", "0", "the mask is the band t", ""),
        (DIMS, "", "k <= q", "b", "the mask is the band t", ""),
        (DIMS, "", "q - k <= 9 and k - q <= 3", "0", "the mask is the band t:9,3", ""),
        (shorter, "", "k > q - 9 and q >= k + 2", "0", "the mask is the band b:4,2", ""),
        (DIMS, "", "k - q <= seqlen_k - seqlen_q", "0", "the mask is the band b", ""),
        (DIMS, "", "k <= q and k % 3 != 1", "0", "the mask is the band t and `k % 3 != 1`", ""),
        (DIMS, "3 * tanh(s / 3)", "", "b", "the score is softcap 3", ""),
        (DIMS, "s * 0.5", "k <= q", "0", "the mask is the band t; the score is softmax_scale 0.1", ""),
        (square, alibi, "k <= q", "0", "the mask is the band t; the score is ALiBi by slopes", "t"),
        (DIMS, alibi, "k <= q", "0", "the mask is the band t; the score is ALiBi by slopes", "t"),
        (DIMS, alibi, "k <= q + 3", "0", "the mask is the band t:-1,3", ""),
        (
            square,
            alibi,
            "k <= q and k % 2 == 0",
            "0",
            "the mask is the band t and `k % 2 == 0`; the score",
            "t",
        ),
        (square, capped, "", "0", "the score is ALiBi by slopes, softcap 2", "t"),
        (
            square,
            capped,
            "ids: i32[_]; ids[q] == ids[k]",
            "b",
            "the score is ALiBi by slopes, softcap 2",
            "t",
        ),
        (DIMS, capped, "", "t", "the score is ALiBi by slopes, softcap 2", "t"),
        (DIMS, capped, "", "0", "", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let of = |text: &str| if text.is_empty() { None } else { Some(text.parse::<Function>().unwrap()) };
        let problem = FwdProblem::batch(DType::F32, dims)
            .mask(band.parse().unwrap())
            .score_code(of(score))
            .mask_code(of(mask));
        let seed = OF_HEADS + seed as u64;
        let said = check_gradients(&device, problem.clone(), seed, false);
        let fits = |said: &String| said.starts_with(forward) && said.is_empty() == forward.is_empty();
        assert!(said.iter().all(fits), "{score} {mask} {band}: {said:?}");
        // Slopes whose gradients are wanted remain captured tensors.
        let learned = check_gradients(&device, problem, seed, true);
        assert!(!learned[1].contains("ALiBi"), "{learned:?}");
        assert_eq!(learned[0].contains("ALiBi"), !backward.is_empty(), "{learned:?}");
    }
}

#[test]
fn causal_as_code_has_the_bits_of_the_built_in() {
    let device = device();
    let [q, k, v] = [DIMS.num_heads_q, DIMS.num_heads_kv, DIMS.num_heads_kv]
        .map(|heads| noise(u64::from(DIMS.batch * DIMS.seqlen_k * heads * DIMS.head_dim_qk), heads.into()));
    let run = |problem: FwdProblem| {
        let problem = problem.validate().unwrap();
        let mut o = vec![f32::NAN; problem.shape_o().num_elems() as usize];
        let [q, k, v] = [&q, &k, &v].map(|x| DevSlice::host(x));
        let plan = device.plan_fwd(&problem, &PlanOptions::default()).unwrap();
        plan.run(&mut FwdArgs::new(q, k, v, DevSliceMut::host(&mut o)), &device.default_stream()).unwrap();
        o
    };
    let built_in = run(FwdProblem::batch(DType::F32, DIMS).mask(MaskSpec::CAUSAL));
    // The quotient prevents that the function is recognised as a band.
    let code = "(k - q) * 2 // 2 <= seqlen_k - seqlen_q".parse::<Function>().unwrap();
    assert_eq!(run(FwdProblem::batch(DType::F32, DIMS).mask_code(code)), built_in);
}

/// A NaN that code hides reaches nothing: NaN is placed in each tensor where a mask hides it, and in the derivative
/// of its soft-cap.
#[test]
fn a_nan_that_code_hides_reaches_nothing() {
    hidden_nan_reaches_nothing(None);
    hidden_nan_reaches_nothing(Some(3.0));
}

fn hidden_nan_reaches_nothing(softcap: Option<f32>) {
    let device = device();
    let dims = Dims { num_heads_q: 1, num_heads_kv: 1, batch: 1, head_dim_v: 24, ..DIMS };
    let mask: Function = "k % 5 != 2 and q != 7".parse().unwrap();
    let fwd = FwdProblem::batch(DType::F32, dims).softcap(softcap).mask_code(mask).write_lse(true);
    let fwd = fwd.validate().unwrap();
    let hidden = |row: usize| row % 5 == 2;
    let mut inputs = [fwd.shape_q(), fwd.shape_k(), fwd.shape_v()].map(|shape| noise(shape.num_elems(), 5));
    for (tensor, hides) in inputs.iter_mut().zip([|row| row == 7, hidden, hidden]) {
        tensor
            .chunks_exact_mut(24)
            .enumerate()
            .filter(|(row, _)| hides(*row))
            .for_each(|(_, row)| row.fill(f32::NAN));
    }
    let mut dout = noise(fwd.shape_o().num_elems(), 6);
    dout[7 * 24..8 * 24].fill(f32::NAN);
    let (mut o, mut lse) = (vec![f32::NAN; 37 * 24], vec![f32::NAN; 37]);
    let [q, k, v] = [&inputs[0], &inputs[1], &inputs[2]].map(|x| DevSlice::host(x));
    let plan = device.plan_fwd(&fwd, &PlanOptions::default()).unwrap();
    let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o)).lse(DevSliceMut::host(&mut lse));
    plan.run(&mut args, &device.default_stream()).unwrap();
    assert!(o.iter().all(|x| x.is_finite()));
    assert!(o[7 * 24..8 * 24].iter().all(|&x| x == 0.0) && lse[7] == f32::NEG_INFINITY);
    let bwd = BwdProblem::new((*fwd).clone()).validate().unwrap();
    let mut grads = [37, 53, 53].map(|rows| vec![f32::NAN; rows * 24]);
    let of_forward = [&o, &lse, &dout].map(|x| DevSlice::host(x));
    let mut args = BwdArgs::new([q, k, v], of_forward, grads.each_mut().map(|x| DevSliceMut::host(x)));
    device.plan_bwd(&bwd, &PlanOptions::default()).unwrap().run(&mut args, &device.default_stream()).unwrap();
    drop(args);
    for grad in &grads {
        assert!(grad.iter().all(|x| x.is_finite()));
    }
    assert!(
        grads[1].chunks_exact(24).enumerate().all(|(row, dk)| !hidden(row) || dk.iter().all(|&x| x == 0.0))
    );
}

#[test]
fn what_is_captured_is_checked_by_name() {
    let base = || FwdProblem::batch(DType::F32, DIMS);
    let code = |text: &str| text.parse::<Function>().unwrap();
    let slopes = "slopes: f32[_]; s + slopes[h]";
    for (problem, error) in [
        (base().score_code(code("k <= q")), "score `k <= q` is a bool: it is a mask"),
        (base().mask_code(code("s + 1")), "mask `s + 1.0` is a number, not a bool"),
        (
            base().score_code(code(slopes)),
            "captured slopes: the function reads f32[_], of which no extents are given",
        ),
        (
            base().score_code(code(slopes)).captured(vec![CapturedTensor::dense("slopes", &[2, 2])]),
            "captured slopes has 2 axes, but is read as f32[_]",
        ),
        (
            base().score_code(code(slopes)).captured(vec![CapturedTensor::dense("slopes", &[0])]),
            "captured slopes: extent 0 of axis 0 is not at least 1",
        ),
        (
            base().captured(vec![CapturedTensor::dense("slopes", &[4])]),
            "captured slopes is a tensor that no function reads",
        ),
        (
            base()
                .score_code(code(slopes))
                .mask_code(code("slopes: i32[_]; slopes[q] > k"))
                .captured(vec![CapturedTensor::dense("slopes", &[4])]),
            "captured slopes is f32[_] in the score and i32[_] in the mask",
        ),
    ] {
        assert_eq!(problem.validate().unwrap_err().text, error);
    }
    let fwd = base().score_code(code(slopes)).captured(vec![CapturedTensor::dense("slopes", &[4])]);
    for (name, error) in [
        ("other", "dcaptured other is wanted, but no function captures such a tensor"),
        ("slopes", "dcaptured slopes: e5m2 is not f32, f16 or bf16"),
    ] {
        let grads = vec![CapturedGrad { name: name.to_owned(), dtype: DType::E5m2 }];
        assert_eq!(BwdProblem::new(fwd.clone()).dcaptured(grads).validate().unwrap_err().text, error);
    }
    // The call gets its own arguments.
    let fwd = fwd.validate().unwrap();
    let device = device();
    let plan = device.plan_fwd(&fwd, &PlanOptions::default()).unwrap();
    let [q, k, v] = [fwd.shape_q(), fwd.shape_k(), fwd.shape_v()].map(|s| noise(s.num_elems(), 1));
    let (few, ints, right) = ([0f32; 3], [0i32; 4], [0f32; 4]);
    let (few, ints, right) = ([DevSlice::host(&few)], [DevSlice::host(&ints)], [DevSlice::host(&right)]);
    let number = [Number::Int(1)];
    let cases: [(&[DevSlice<'_>], &[Number], &str); 4] = [
        (&[], &[], "captured: 0 tensors given, but 1 wanted"),
        (&few, &[], "captured has 12 bytes, but its extents and strides reach 16"),
        (&ints, &[], "captured"),
        (&right, &number, "numbers: 1 given, but the functions capture 0"),
    ];
    let ids =
        base().mask_code(code("ids: bool[_]; ids[k]")).captured(vec![CapturedTensor::dense("ids", &[16])]);
    let ids = device.plan_fwd(&ids.validate().unwrap(), &PlanOptions::default()).unwrap();
    let of_ids = "captured ids has elements of";
    // Slopes of a score that is computed as ALiBi keep the caller's name in errors.
    let alibi = base()
        .score_code(code("slopes: f32[_]; s + slopes[h] * (k - q)"))
        .mask_code(code("k <= q"))
        .captured(vec![CapturedTensor::dense("slopes", &[4])]);
    let alibi = device.plan_fwd(&alibi.validate().unwrap(), &PlanOptions::default()).unwrap();
    assert!(words(alibi.details()).contains("ALiBi by slopes"), "{}", words(alibi.details()));
    let more =
        [(&ids, (&right[..], &[][..], of_ids)), (&alibi, (&few[..], &[][..], "captured has 12 bytes"))];
    let cases = cases.into_iter().map(|case| (&plan, case)).chain(more);
    for (plan, (captured, numbers, error)) in cases {
        let mut o = vec![0f32; fwd.shape_o().num_elems() as usize];
        let [q, k, v] = [&q, &k, &v].map(|x| DevSlice::host(x));
        let score = ScoreArgs::default().captured(captured).numbers(numbers);
        let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o)).score(score);
        let found = plan.run(&mut args, &device.default_stream()).unwrap_err().to_string();
        assert!(found.starts_with(error), "{found}");
    }
}

#[test]
fn a_tree_mask_is_refused_beside_code() {
    let causal: Function = "k <= q".parse().unwrap();
    let problem =
        FwdProblem::batch(DType::F32, DIMS).mask_code(causal).mask(MaskSpec::CAUSAL).tree_mask(true);
    let planned = device().plan_fwd(&problem.validate().unwrap(), &PlanOptions::default());
    let Err(Error::Unsupported { refusals, .. }) = planned else { panic!("it is planned") };
    assert_eq!(refusals[0].reason, "mask as code is not in this kernel beside tree_mask");
}

/// Gradients of captured tensors have equal bits for any number of threads, since sums over pairs have a fixed
/// order.
#[test]
fn gradients_of_captured_tensors_have_the_same_bits_on_any_number_of_threads() {
    let table = CapturedTensor::dense("table", &[3, 5]);
    let score: Function = "table: f32[_, _]; s + table[h, q - k] * s".parse().unwrap();
    let fwd = FwdProblem::batch(DType::F32, DIMS).score_code(score).captured(vec![table]).write_lse(true);
    let grad = CapturedGrad { name: "table".to_owned(), dtype: DType::F32 };
    let bwd = BwdProblem::new(fwd).dcaptured(vec![grad]).validate().unwrap();
    let fwd = bwd.fwd();
    let [q, k, v, dout, table] = [
        fwd.shape_q().num_elems(),
        fwd.shape_k().num_elems(),
        fwd.shape_v().num_elems(),
        fwd.shape_o().num_elems(),
        15,
    ]
    .map(|count| noise(count, count));
    let captured = [DevSlice::host(&table)];
    let score = ScoreArgs::default().captured(&captured);
    let mut all: Vec<Vec<f32>> = vec![];
    for threads in [1, 2, 3, 7] {
        let config = fmha_cpu::Config { threads: Some(threads), isa: None };
        let device = Device::new(fmha_cpu::CpuBackend::with(config).unwrap());
        let (mut o, mut lse) = (dout.clone(), vec![0f32; 2 * 4 * 37]);
        let inputs = [&q, &k, &v].map(|x| DevSlice::host(x));
        let [sq, sk, sv] = inputs;
        let mut args =
            FwdArgs::new(sq, sk, sv, DevSliceMut::host(&mut o)).lse(DevSliceMut::host(&mut lse)).score(score);
        let stream = device.default_stream();
        device.plan_fwd(fwd, &PlanOptions::default()).unwrap().run(&mut args, &stream).unwrap();
        let mut grads = [q.clone(), k.clone(), v.clone()];
        let mut dtable = vec![f32::NAN; 15];
        let of_forward = [&o, &lse, &dout].map(|x| DevSlice::host(x));
        let mut args = BwdArgs::new(inputs, of_forward, grads.each_mut().map(|x| DevSliceMut::host(x)))
            .score(score)
            .dcaptured(vec![DevSliceMut::host(&mut dtable)]);
        device.plan_bwd(&bwd, &PlanOptions::default()).unwrap().run(&mut args, &stream).unwrap();
        drop(args);
        let [dq, dk, dv] = grads;
        all.push([dq, dk, dv, dtable].concat());
    }
    assert!(all.iter().all(|gradients| *gradients == all[0]));
}
