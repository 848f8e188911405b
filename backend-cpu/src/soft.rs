//! The battery's forward cases of bf16 on instruction sets in software: the code around dot products and tiles is
//! tested on a machine whose processor has neither. Properties of the real instructions are not tested: AMX treats
//! subnormal numbers as 0.

use fmha_conformance::Regex;
use fmha_conformance::case::{Case, matching};
use fmha_conformance::report::run_cases;
use fmha_conformance::run::Options;
use fmha_core::{
    DType, Device, DeviceMemory, FmhaBackend, PlanOptions, Planned, Result, Roofline, ValidBwd, ValidCombine,
    ValidFwd,
};

use crate::simd::{Simd, SoftDots, SoftTiles};
use crate::{Config, CpuBackend, Isa, plan};

/// A backend that plans as for a real instruction set, and runs forward calls with a software set.
struct Soft<S> {
    plans: CpuBackend,
    s: S,
}

impl<S: Simd> Soft<S> {
    fn new(s: S, isa: Isa) -> Self {
        let portable = CpuBackend::with(Config { isa: Some(Isa::Portable), threads: None }).unwrap();
        Self { plans: CpuBackend { isa, name: format!("{isa}, in software"), ..portable }, s }
    }
}

// SAFETY: as the CPU backend itself; the tile is of its kernels, whose instructions `S` has in software.
unsafe impl<S: Simd + 'static> FmhaBackend for Soft<S> {
    fn kind(&self) -> &'static str {
        self.plans.kind()
    }

    fn name(&self) -> &str {
        self.plans.name()
    }

    fn roofline(&self, dtype: DType) -> Roofline {
        self.plans.roofline(dtype)
    }

    fn kernels(&self) -> Vec<&'static str> {
        self.plans.kernels()
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self.plans.memory()
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<Planned<ValidFwd>> {
        plan::forward(&self.plans, self.s, problem, options)
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<Planned<ValidBwd>> {
        self.plans.plan_bwd(problem, options)
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<Planned<ValidCombine>> {
        self.plans.plan_combine(problem, options)
    }
}

/// Cases of bf16 of some families: one in `count`, chosen by their seeds, from number `index` on.
fn part(families: &str, index: u64, count: u64) -> impl Iterator<Item = Case> {
    let filter = Regex::new(&format!("^({families})/.*bf16")).unwrap();
    let mut cases = matching(Some(&filter));
    cases.retain(|case| (case.data().seed >> 20) % count == index);
    cases.into_iter()
}

fn keeps_the_contract<S: Simd>(s: S, isa: Isa, cases: impl Iterator<Item = Case>, at_least: u64) {
    let cases: Vec<Case> = cases.collect();
    let report = run_cases(&Device::new(Soft::new(s, isa)), &cases, &Options::default(), &|_, _, _| ());
    for case in report.failures() {
        println!("FAILED {}\n  {}", case.name, case.text);
    }
    println!("battery {}: {}", report.device, report.summary);
    assert!(report.summary.passed > at_least, "{}", report.summary);
    assert_eq!((report.summary.failed, report.summary.refused), (0, 0));
}

// Most of the surrounding code is shared by both software sets, so each runs half of the cases that both support.

#[test]
fn dot_products_in_software_keep_the_contract() {
    keeps_the_contract(SoftDots, Isa::Avx512Bf16, part("edges|rare", 0, 2), 200);
}

#[test]
fn tiles_in_software_keep_the_contract() {
    let cases = part("edges|rare", 1, 2).chain(part("decode", 0, 3));
    keeps_the_contract(SoftTiles::FUSED, Isa::Amx, cases, 350);
}

#[test]
#[ignore = "two minutes, of which half a minute's cases are in CI: cargo xtask test --all"]
fn dot_products_and_tiles_in_software_keep_all_of_the_contract() {
    keeps_the_contract(SoftDots, Isa::Avx512Bf16, part("edges|rare", 0, 1), 500);
    keeps_the_contract(SoftTiles::FUSED, Isa::Amx, part("edges|rare|decode", 0, 1), 1000);
}
