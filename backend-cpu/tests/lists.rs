//! Lists of keys with every instruction set of this processor: the battery's cases. The crate's own tests run them
//! with the baseline's vectors.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_conformance::case::{Case, all};
use fmha_conformance::report::run_cases;
use fmha_conformance::run::Options;
use fmha_core::Device;
use fmha_cpu::{Config, CpuBackend, Isa};

/// Instruction sets to test. The sets of AVX-512 share these kernels, so one of them represents all.
const SETS: [Isa; 3] = [Isa::Neon, Isa::Avx2, Isa::Avx512];

/// Number of parts into which the cases are divided. Each set runs one part, since the battery runs all cases on
/// the processor's best set.
const PARTS: usize = 4;

#[test]
fn every_set_keeps_the_contract_over_lists_of_keys() {
    keep_the_contract(|at| at.is_multiple_of(PARTS));
}

#[test]
#[ignore = "the other cases on each set: cargo xtask test --all"]
fn every_set_keeps_the_contract_over_lists_of_keys_in_the_other_cases() {
    keep_the_contract(|at| !at.is_multiple_of(PARTS));
}

/// Runs the cases whose index in the family `takes` accepts.
fn keep_the_contract(takes: fn(usize) -> bool) {
    let mut family = all();
    family.retain(|case| case.name.starts_with("lists/"));
    let cases: Vec<Case> =
        family.into_iter().enumerate().filter(|(at, _)| takes(*at)).map(|(_, case)| case).collect();
    for isa in SETS.into_iter().filter(|isa| isa.is_available()) {
        let config = Config { isa: Some(isa), threads: Some(2) };
        let device = Device::new(CpuBackend::with(config).unwrap());
        let report = run_cases(&device, &cases, &Options::default(), &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}", case.name, case.text);
        }
        println!("{isa}: {}", report.summary);
        assert_eq!(report.summary.passed, cases.len() as u64, "{isa}: {}", report.summary);
    }
}
