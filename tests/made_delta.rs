//! Delta that Hopper's main kernel computes beside the products is as accurate as Delta from a launch before. Emulated.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_conformance::case::{Backward, Body, Case};
use fmha_conformance::run::{Options, Outcome, tile_fields};
use fmha_conformance::tensor::Operand;
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{BwdProblem, DType, Dims, FwdProblem, PlanOptions};

/// Multiprocessors of the emulated device: few, so that a launch has more kv heads than run at once.
const MULTIPROCESSORS: u32 = 16;

/// Sequences, query heads, kv heads, queries, keys, head dimension, mask, type. The first 33 kv heads of one
/// key block, or 17 of two, are those of preprocess, with these multiprocessors.
const PROBLEMS: [([u32; 6], &str, DType); 6] = [
    ([5, 8, 8, 70, 70, 64], "b", DType::Bf16),
    ([3, 13, 13, 130, 60, 128], "0", DType::F16),
    ([3, 26, 13, 66, 66, 96], "b", DType::Bf16),
    ([2, 10, 10, 140, 200, 72], "b:150,3", DType::F16),
    ([2, 9, 9, 200, 140, 128], "b", DType::Bf16),
    ([3, 13, 13, 1, 5, 64], "0", DType::Bf16),
];

#[test]
fn gradients_are_right_with_delta_made_beside_the_products() {
    // SAFETY: this test is alone in its process, and nothing has read the environment yet.
    unsafe { std::env::set_var("FMHA_EMULATE_SMS", MULTIPROCESSORS.to_string()) };
    let backend = match fmha_cuda::open(0, Some("sm_90a")) {
        Ok(backend) => backend,
        Err(error) => return println!("absent: {error}"),
    };
    for (at, ([batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, dim], mask, dtype)) in
        PROBLEMS.into_iter().enumerate()
    {
        // The load warp's number of registers is no property of a problem, so each of two numbers is tried with three
        // problems.
        let registers = ["24", "40"][at % 2];
        let dims =
            Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk: dim, head_dim_v: dim };
        let mut fwd = FwdProblem::batch(dtype, dims);
        fwd.mask = mask.parse().unwrap();
        let name = format!(
            "delta/b{batch}/h{num_heads_q}kv{num_heads_kv}/s{seqlen_q}x{seqlen_k}/d{dim}/{mask}/{dtype}"
        );
        // The last sequence's last query head has a query with two keys far above all others: its LSE is about 2.6e5.
        let (b, h, kv) = (batch - 1, num_heads_q - 1, num_heads_kv - 1);
        let far = [(Operand::Q, [b, 47, h, 1], 32000.0)];
        let keys = [9, 10].map(|key| (Operand::K, [b, key, kv, 1], 64.0));
        let is_long = seqlen_q > 47 && seqlen_k > 10;
        let planted = far.into_iter().chain(keys).filter(|_| is_long).collect();
        let (problem, lengths, data) = (BwdProblem::new(fwd), Lengths::default(), Data::default());
        let body = Backward { problem, lengths, data, deterministic: false, planted };
        let case = Case { name: name.clone(), body: Body::Backward(Box::new(body)) };
        let tile = tile_fields(&format!(
            "dq_path=first_stores,dq_finish=beside_with_delta,load_registers={registers}"
        ));
        let plan = PlanOptions::default().tile(tile).kernel("sm90");
        let (outcome, said) = case.run(&backend, &Options { plan, ..Options::default() });
        if said.contains("libnvrtc") && outcome == Outcome::Failed {
            return println!("absent: {said}");
        }
        assert_eq!(outcome, Outcome::Passed, "{name}, {registers} registers: {said}");
    }
}
