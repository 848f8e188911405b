//! Small outputs of the forward (each row's and each head's greatest score, and each key's sum of probabilities)
//! for random calls, compared with float64, for every instruction set.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use fmha_core::expr::Function;
use fmha_core::reference::{Precision, forward};
use fmha_core::{
    Bias, BiasBroadcast, DType, DevSlice, DevSliceMut, Device, Dims, ElementwiseBias, FwdArgs, FwdProblem,
    Intervals, MaskArgs, MaskAxes, MaskSpec, PlanOptions, Strides,
};
use fmha_cpu::{Config, CpuBackend, Isa};
use support::{Inputs, Lengths, Random, Tensor};

fn backend(isa: Isa, threads: usize) -> Device {
    Device::new(CpuBackend::with(Config { threads: Some(threads), isa: Some(isa) }).unwrap())
}

/// A random problem, its lengths, and the endpoints of its intervals, if any.
fn drawn(seed: u64) -> (FwdProblem, Vec<Lengths>, Vec<i32>) {
    let mut random = Random(seed);
    let mut below = |n: u64| (random.next() % n) as u32;
    let (kv, group) = (1 + below(2), 1 + below(3));
    let dims = Dims::batch(1 + below(3))
        .seqlens(1 + below(90), 1 + below(150))
        .heads(kv * group, kv)
        .head_dims([8, 32, 40][below(3) as usize], 16);
    let dtype = [DType::F32, DType::F16, DType::Bf16][below(3) as usize];
    let packed = below(3) == 0;
    let mut problem = if packed { FwdProblem::group(dtype, dims) } else { FwdProblem::batch(dtype, dims) };
    let lengths: Vec<Lengths> = (0..dims.batch)
        .map(|_| {
            let (q, k) = (below(u64::from(dims.seqlen_q) + 1), below(u64::from(dims.seqlen_k) + 1));
            [(q, q), (k, k)]
        })
        .filter(|_| packed)
        .collect();
    let masks = [MaskSpec::NONE, MaskSpec::CAUSAL, "t:7,3".parse().unwrap(), "b:20,0,4".parse().unwrap()];
    problem = problem.mask(masks[below(4) as usize]).sink(below(2) == 1).write_lse(below(2) == 1);
    problem = problem.softcap((below(3) == 0).then_some(1.5)).p_drop(if below(3) == 0 { 0.25 } else { 0.0 });
    let heads = dims.num_heads_q;
    let bias = match below(4) {
        0 => Bias::Alibi { per_batch: true },
        1 => Bias::Elementwise(ElementwiseBias {
            dtype: DType::F32,
            broadcast: BiasBroadcast::of_axes(false, true),
            strides: Strides {
                batch: 0,
                head: i64::from(dims.seqlen_q) * i64::from(dims.seqlen_k),
                seq: dims.seqlen_k.into(),
                dim: 1,
            },
        }),
        _ => Bias::None,
    };
    problem = problem.bias(bias);
    let mut endpoints = vec![];
    if below(3) == 0 && !packed {
        let intervals = Intervals::batch(&problem, MaskAxes { per_batch: false, heads }, 4);
        problem = problem.intervals(intervals);
        let count = heads as usize * 4 * dims.seqlen_q as usize;
        endpoints = (0..count).map(|_| below(u64::from(dims.seqlen_k) + 8).cast_signed() - 4).collect();
    } else if below(3) == 0 {
        let score: Function = "s * 1.5 - 0.01 * abs(q - k)".parse().unwrap();
        let mask: Function = "(q + k) % 3 != 0 or k < 2".parse().unwrap();
        problem = problem.score_code(score).mask_code(mask);
    }
    let wanted = 1 + below(7);
    problem = problem.row_max(wanted & 1 != 0).head_max(wanted & 2 != 0).key_sum(wanted & 4 != 0);
    (problem, lengths, endpoints)
}

fn close(ours: f32, exact: f64, what: &str) {
    let ours = f64::from(ours);
    let fine = ours == exact || (ours - exact).abs() <= 2e-5 * (1.0 + exact.abs());
    assert!(fine, "{what}: {ours}, not {exact}");
}

fn check(isa: Isa, seed: u64) {
    let (problem, lengths, endpoints) = drawn(seed);
    let inputs = Inputs::random(problem.clone(), &lengths, seed);
    let valid = problem.clone().validate().unwrap();
    let dims = problem.dims;
    let extents = valid.extents(inputs.totals);
    let mut o = Tensor::poisoned(problem.dtypes.o, problem.strides.o, extents.o);
    let mut lse = vec![f32::NAN; extents.lse_elems as usize];
    let poison = -77.0f32;
    let mut row_max = vec![poison; extents.lse_elems as usize];
    let mut head_max = vec![poison; dims.num_heads_q as usize];
    let mut key_sum = vec![poison; valid.key_sum_elems() as usize];
    let masks = MaskArgs::default().intervals((!endpoints.is_empty()).then(|| DevSlice::host(&endpoints)));
    let outputs = problem.outputs;
    let mut args = FwdArgs::new(inputs.q.slice(), inputs.k.slice(), inputs.v.slice(), o.slice_mut())
        .lse(problem.write_lse.then(|| DevSliceMut::host(&mut lse)))
        .row_max(outputs.row_max.then(|| DevSliceMut::host(&mut row_max)))
        .head_max(outputs.head_max.then(|| DevSliceMut::host(&mut head_max)))
        .key_sum(outputs.key_sum.then(|| DevSliceMut::host(&mut key_sum)))
        .seq(inputs.seq())
        .score(inputs.score())
        .masks(masks);
    let device = backend(isa, 2);
    let plan = device.plan_fwd(&valid, &PlanOptions::default()).unwrap();
    plan.run(&mut args, &device.default_stream()).unwrap();
    let heads = forward(&problem, &args, Precision::Exact).unwrap();
    let mut greatest = vec![f64::NEG_INFINITY; dims.num_heads_q as usize];
    for head in &heads {
        let (span, h) = (head.span, head.i_head as usize);
        for (i, &exact) in head.row_max.iter().enumerate() {
            greatest[h] = greatest[h].max(exact);
            if outputs.row_max {
                let at = span.lse_index(&problem, head.i_head, i as u32);
                close(row_max[at], exact, &format!("{isa} seed {seed}: row_max of head {h}, row {i}"));
                row_max[at] = poison;
            }
        }
        if outputs.key_sum {
            let first = (span.i_batch * dims.num_heads_q + head.i_head) as usize * dims.seqlen_k as usize;
            for key in 0..dims.seqlen_k as usize {
                let exact = head.key_sum.get(key).copied().unwrap_or(0.0);
                let what = format!("{isa} seed {seed}: key_sum of head {h}, key {key}");
                close(key_sum[first + key], exact, &what);
            }
        }
    }
    // Rows outside of all sequences are not written.
    assert!(row_max.iter().all(|&x| x == poison), "{isa} seed {seed}: {row_max:?}");
    if outputs.head_max {
        for (h, (&ours, &exact)) in head_max.iter().zip(&greatest).enumerate() {
            close(ours, exact, &format!("{isa} seed {seed}: head_max of head {h}"));
        }
    }
}

#[test]
fn drawn_calls_have_the_greatest_scores_and_sums_of_keys_of_float64() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        (1..=40).for_each(|seed| check(isa, seed));
    }
}

#[test]
#[ignore = "2,000 drawn calls for each instruction set"]
fn many_drawn_calls_have_the_greatest_scores_and_sums_of_keys_of_float64() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        (1000..3000).for_each(|seed| check(isa, seed));
    }
}

#[test]
fn no_bit_depends_on_threads_or_blocks_of_queries() {
    let dims = Dims::batch(2).seqlens(200, 210).heads(2, 1).head_dims(32, 8);
    let problem = FwdProblem::batch(DType::F32, dims).mask(MaskSpec::CAUSAL).row_max(true).key_sum(true);
    let inputs = Inputs::random(problem.clone(), &[], 5);
    let problem = problem.validate().unwrap();
    let run = |threads, block_m: &str| {
        let mut o = Tensor::poisoned(DType::F32, problem.strides.o, problem.shape_o());
        let (mut row_max, mut key_sum) = (vec![0f32; 800], vec![0f32; 840]);
        let device = backend(Isa::ALL.into_iter().find(|isa| isa.is_available()).unwrap(), threads);
        let options = PlanOptions::default().tile([("block_m", block_m)]);
        let plan = device.plan_fwd(&problem, &options).unwrap();
        let mut args = FwdArgs::new(inputs.q.slice(), inputs.k.slice(), inputs.v.slice(), o.slice_mut())
            .row_max(DevSliceMut::host(&mut row_max))
            .key_sum(DevSliceMut::host(&mut key_sum));
        plan.run(&mut args, &device.default_stream()).unwrap();
        (row_max, key_sum)
    };
    assert_eq!(run(1, "512"), run(3, "96"));
}

#[test]
fn what_small_outputs_do_not_go_with_is_refused_by_name() {
    let dims = Dims::batch(1).seqlens(2, 4).heads(1, 1).head_dim(8);
    let problem = FwdProblem::batch(DType::F32, dims).key_sum(true);
    let lists = fmha_core::KeyLists::new(&problem, 2);
    let refused = problem.clone().lists(lists).validate().unwrap_err().to_string();
    assert!(refused.contains("key_sum is wanted beside indices of topk 2"), "{refused}");
    let tree = problem.clone().mask(MaskSpec::CAUSAL).seqused_k(true).tree_mask(true).validate().unwrap();
    let device = backend(Isa::ALL.into_iter().find(|isa| isa.is_available()).unwrap(), 1);
    let refused = device.plan_fwd(&tree, &PlanOptions::default()).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("key_sum beside tree_mask is not in this kernel"), "{refused}");
    let plan = device.plan_fwd(&problem.validate().unwrap(), &PlanOptions::default()).unwrap();
    let (x, mut o, mut short) = ([0f32; 32], [0f32; 16], [0f32; 3]);
    let slice = DevSlice::host(&x);
    let mut args = FwdArgs::new(DevSlice::host(&x[..16]), slice, slice, DevSliceMut::host(&mut o));
    let refused = plan.run(&mut args, &device.default_stream()).unwrap_err().to_string();
    assert!(refused.contains("key_sum"), "{refused}");
    args.key_sum = Some(DevSliceMut::host(&mut short));
    let refused = plan.run(&mut args, &device.default_stream()).unwrap_err().to_string();
    assert!(refused.contains("key_sum") && refused.contains("16"), "{refused}");
}
