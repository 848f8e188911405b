//! The real kernel of Hopper, recorded through the driver's double, broken at each synchronising instruction.
//!
//! The whole table, of every variant of the kernel, is `cargo xtask mutation`.
#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

use std::path::Path;

use fmha_conformance::case::Case;
use fmha_conformance::init::Init;
use fmha_conformance::run::{Options, Outcome, tile_fields};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{DType, Dims, FwdProblem, MaskSpec, PlanOptions};

fn causal(num_heads: u32, seqlen_q: u32, seqlen_k: u32) -> Case {
    let dims = Dims {
        batch: 1,
        num_heads_q: num_heads,
        num_heads_kv: num_heads,
        seqlen_q,
        seqlen_k,
        head_dim_qk: 128,
        head_dim_v: 128,
    };
    let problem = FwdProblem::batch(DType::Bf16, dims).mask("b".parse::<MaskSpec>().unwrap());
    let data = Data { init: Init::Normal, seed: 7, room: fmha_conformance::tensor::Room::default() };
    Case::forward(
        format!("causal, {num_heads} heads, {seqlen_q} queries, {seqlen_k} keys"),
        problem,
        Lengths::default(),
        data,
    )
}

#[test]
fn every_synchronising_instruction_of_the_hopper_kernel_is_missed_when_broken() {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        println!("absent: {reason}");
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutation");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    // SAFETY: this test is alone in its process, and nothing else reads the environment yet.
    unsafe {
        std::env::set_var("FMHA_EMULATE_SMS", "1");
        std::env::set_var("FMHA_EMULATE_RECORD", &folder);
    }
    let backend = fmha_cuda::open(0, Some("sm_90a")).unwrap();
    // One text for all, though the table gives few keys another.
    let tile = tile_fields("lookahead=second_q,skip_row_max=true,ping_pong=at_issue");
    let options = Options { plan: PlanOptions::default().kernel("sm90").tile(tile), ..Options::default() };
    // Long tiles; then tiles of two blocks before tiles of one, in both buffers of Q; then diagonals that
    // begin inside a block, so that no warpgroup's wait is covered by the turn it takes from one that has
    // waited already.
    for case in [causal(1, 600, 600), causal(4, 200, 200), causal(3, 200, 200), causal(3, 138, 202)] {
        let (outcome, text) = case.run(&backend, &options);
        assert_eq!(outcome, Outcome::Passed, "{}: {text}", case.name);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../..");
    let mut words = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        words.push(format!("causal, D 128={}", entry.unwrap().path().display()));
    }
    assert_eq!(words.len(), 4);
    words.sort();
    let path = |name: &str| root.join(name).display().to_string();
    for (option, value) in [
        ("--schedules", "2".to_owned()),
        ("--wrappers", "fmha/ptx/".to_owned()),
        ("--sources", path("kernels-cuda")),
        ("--reasons", path("tests/evidence/sm90-mutation.reasons")),
    ] {
        words.extend([option.to_owned(), value]);
    }
    fmha_emu_ptx::mutation::run(words.into_iter()).unwrap();
}
