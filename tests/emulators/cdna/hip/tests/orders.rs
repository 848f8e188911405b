//! The backward on MFMA and on WMMA, and the merges of decode's parts and shares, have equal bits in whatever order
//! their workgroups run.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../../amd/mod.rs"]
mod amd;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{BwdProblem, DType, Dims, FwdProblem, PlanOptions};
use fmha_emu_cdna::{Checks, Recording};

const SEEDS: u64 = 10;

/// Several workgroups in each launch, of unlike work: lengths that end within tiles, a causal mask, groups of heads.
fn cases() -> [(&'static str, &'static str, Case); 6] {
    let dims = Dims {
        batch: 2,
        seqlen_q: 150,
        seqlen_k: 300,
        num_heads_q: 4,
        num_heads_kv: 2,
        head_dim_qk: 64,
        head_dim_v: 64,
    };
    let masked = |dims| FwdProblem::batch(DType::Bf16, dims).mask("b".parse().unwrap());
    let data = || Data { seed: 7, ..Data::default() };
    let backward = BwdProblem::new(masked(dims).sink(true));
    let backward = Case::backward("orders", backward, Lengths::default(), data());
    let decode = masked(Dims { seqlen_q: 3, ..dims });
    let mut unlike = decode.clone();
    (unlike.layout.seqused_k, unlike.dims.batch) = (true, 3);
    let seqused_k = Lengths { seqused_k: vec![0, 300, 130], ..Lengths::default() };
    let unlike = Case::forward("orders", unlike, seqused_k, data());
    let decode = Case::forward("orders", decode, Lengths::default(), data());
    [
        ("gfx942", "cdna_bwd", backward.clone()),
        ("gfx1201", "rdna_bwd", backward),
        ("gfx942", "cdna_decode", decode.clone()),
        ("gfx1201", "rdna_decode", decode),
        ("gfx942", "cdna_decode", unlike.clone()),
        ("gfx1201", "rdna_decode", unlike),
    ]
}

#[test]
fn ten_orders_of_workgroups_give_equal_bits() {
    let folder = std::env::temp_dir().join(format!("fmha-orders-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // SAFETY: the only test of this program, and no other thread of it runs yet.
    unsafe { std::env::set_var(Recording::FOLDER_VARIABLE, &folder) };
    let mut of_several = 0;
    for (arch, kernel, case) in cases() {
        let Some(backend) = amd::open(arch, "orders of workgroups") else { return };
        let mut plan = PlanOptions::default().kernel(kernel).deterministic(true);
        if kernel.ends_with("_decode") {
            plan = plan.tile([("split_keys", "64")]);
        }
        let (outcome, text) = case.run(&backend, &Options { plan, ..Options::default() });
        assert_eq!(outcome, Outcome::Passed, "{kernel}: {text}");
        for file in std::fs::read_dir(&folder).unwrap() {
            let file = file.unwrap().path();
            let launch = Recording::from_bytes(&std::fs::read(&file).unwrap()).unwrap();
            std::fs::remove_file(file).unwrap();
            of_several += u32::from(launch.grid[0] > 3);
            let run = |order| {
                let options = fmha_emu_cdna::Options {
                    checks: Checks::NONE,
                    sequential: true,
                    order,
                    ..Default::default()
                };
                launch.run_as(&launch.code, options).unwrap().memory
            };
            let in_turn = run(None);
            for seed in 0..SEEDS {
                assert!(
                    run(Some(seed)) == in_turn,
                    "{}: another bit in the order of seed {seed}",
                    launch.kernel
                );
            }
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
    // Delta, two products or more and what is behind them, twice; parts and their merge.
    assert!(of_several >= 11, "{of_several} launches of several workgroups");
}
