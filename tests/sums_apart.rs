//! Sums of dQ that Hopper's key blocks store separately give every gradient the bits of ordered additions. Emulated.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::{BwdArgs, BwdProblem, DType, Device, Dims, FwdArgs, FwdProblem, PlanOptions};
use half::bf16;

/// Query heads, kv heads, queries, keys, mask: one kv head of two adds upward, and walks begin apart without
/// a mask. Head dimension 64, additions from registers and by the store warp.
const PROBLEMS: [([u32; 4], &str); 2] = [([4, 2, 300, 520], "b"), ([1, 1, 560, 390], "0")];

fn numbers(count: usize, seed: usize) -> Vec<bf16> {
    let of = |i: usize| ((i + seed).wrapping_mul(0x9E37_79B1) >> 20 & 0xff) as f32 / 128.0 - 1.0;
    (0..count).map(|i| bf16::from_f32(of(i))).collect()
}

/// Computes dQ, dK and dV in f32 with the given tile fields.
fn gradients(device: &Device, problem: &BwdProblem, tile: &[(&str, &str)]) -> [Vec<f32>; 3] {
    let fwd = problem.fwd.clone().validate().unwrap();
    let options = PlanOptions::default().kernel("sm90");
    let tile: Vec<_> = tile.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let plan_fwd = device.plan_fwd(&fwd, &options).unwrap();
    let plan_bwd = device
        .plan_bwd(&problem.clone().validate().unwrap(), &options.deterministic(true).tile(tile))
        .unwrap();
    let memory = device.memory();
    let shapes = [problem.fwd.shape_q(), problem.fwd.shape_k(), problem.fwd.shape_v()];
    let count = |n: usize| shapes[n].num_elems() as usize;
    let input = |n: usize, seed| memory.place(&numbers(count(n), seed)).unwrap();
    let inputs = [input(0, 1), input(1, 2), input(2, 3)];
    let (mut o, dout) = (input(0, 4), input(0, 5));
    let mut grads = [0, 1, 2].map(|n| memory.alloc(4 * count(n) as u64).unwrap());
    let mut lse = memory.alloc(4 * (count(0) / 64) as u64).unwrap();
    let mut scratch = memory.workspace(plan_fwd.workspace()).unwrap();
    let stream = device.default_stream();
    let [q, k, v] = inputs.each_ref().map(|buffer| buffer.slice());
    let mut args = FwdArgs::new(q, k, v, o.slice_mut())
        .lse(lse.slice_mut())
        .workspace(scratch.as_mut().map(|buffer| buffer.slice_mut()));
    plan_fwd.run(&mut args, &stream).unwrap();
    let mut scratch = memory.workspace(plan_bwd.workspace()).unwrap();
    let mut args = BwdArgs::new(
        [q, k, v],
        [o.slice(), lse.slice(), dout.slice()],
        grads.each_mut().map(|buffer| buffer.slice_mut()),
    )
    .workspace(scratch.as_mut().map(|buffer| buffer.slice_mut()));
    plan_bwd.run(&mut args, &stream).unwrap();
    stream.synchronize().unwrap();
    [0, 1, 2].map(|n| {
        let mut all = vec![0_f32; count(n)];
        memory.download(&grads[n], &mut all).unwrap();
        all
    })
}

#[test]
fn sums_apart_have_the_bits_of_ordered_additions() {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    let device = fmha_cuda::open(0, Some("sm_90a")).unwrap();
    for ([num_heads_q, num_heads_kv, seqlen_q, seqlen_k], mask) in PROBLEMS {
        let dims =
            Dims { batch: 1, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk: 64, head_dim_v: 64 };
        let fwd = FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap()).write_lse(true);
        let mut problem = BwdProblem::new(fwd);
        problem.dtype_grad = DType::F32;
        let apart = gradients(&device, &problem, &[("dq_path", "apart")]);
        let ordered = gradients(&device, &problem, &[("dq_path", "registers"), ("persistent", "false")]);
        assert!(apart == ordered, "{mask}");
        assert!(apart.iter().flatten().all(|x| x.is_finite()), "{mask}");
    }
}
