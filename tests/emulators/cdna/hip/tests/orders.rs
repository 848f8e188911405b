//! The backward on MFMA, and decode's merge of parts, have equal bits in whatever order their workgroups run.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../../amd/mod.rs"]
mod amd;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{BwdProblem, DType, Dims, FwdProblem, PlanOptions};
use fmha_emu_cdna::{Checks, Recording};

const ARCH: &str = "gfx942";
const SEEDS: u64 = 10;

/// Several workgroups in each launch, of unlike work: lengths that end within tiles, a causal mask, groups of heads.
fn cases() -> [(&'static str, Case); 2] {
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
    let decode = masked(Dims { seqlen_q: 3, ..dims });
    [
        ("cdna_bwd", Case::backward("orders", backward, Lengths::default(), data())),
        ("cdna_decode", Case::forward("orders", decode, Lengths::default(), data())),
    ]
}

#[test]
fn ten_orders_of_workgroups_give_equal_bits() {
    let folder = std::env::temp_dir().join(format!("fmha-orders-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // SAFETY: the only test of this program, and no other thread of it runs yet.
    unsafe { std::env::set_var(Recording::FOLDER_VARIABLE, &folder) };
    let Some(backend) = amd::open(ARCH, "orders of workgroups") else { return };
    let mut of_several = 0;
    for (kernel, case) in cases() {
        let mut plan = PlanOptions::default().kernel(kernel).deterministic(true);
        if kernel == "cdna_decode" {
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
    // Delta, two products or more and what is behind them; parts and their merge.
    assert!(of_several >= 5, "{of_several} launches of several workgroups");
}
