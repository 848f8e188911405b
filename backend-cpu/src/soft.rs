//! The battery's forward cases of bf16 on instruction sets in software: what surrounds dot products and tiles keeps the contract
//! on a machine whose processor has neither. Not what only the instructions do: AMX takes subnormal numbers for 0.

use fmha_conformance::Regex;
use fmha_conformance::report::run;
use fmha_conformance::run::Options;
use fmha_core::{
    DType, Device, DeviceMemory, FmhaBackend, PlanOptions, Planned, Result, Roofline, ValidBwd, ValidCombine,
    ValidFwd,
};

use crate::simd::{Simd, SoftDots, SoftTiles};
use crate::{Config, CpuBackend, Isa, plan};

/// A backend that plans as with an instruction set and runs forward calls with one in software.
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

fn keeps_the_contract<S: Simd>(s: S, isa: Isa, families: &str) {
    let filter = Regex::new(&format!("^({families})/.*bf16")).unwrap();
    let report = run(&Device::new(Soft::new(s, isa)), Some(&filter), &Options::default(), &|_, _, _| ());
    for case in report.failures() {
        println!("FAILED {}\n  {}", case.name, case.text);
    }
    println!("battery {}: {}", report.device, report.summary);
    assert!(report.summary.passed > 400, "{}", report.summary);
    assert_eq!((report.summary.failed, report.summary.refused), (0, 0));
}

#[test]
fn dot_products_in_software_keep_the_contract() {
    keeps_the_contract(SoftDots, Isa::Avx512Bf16, "edges|rare");
}

#[test]
fn tiles_in_software_keep_the_contract() {
    keeps_the_contract(SoftTiles::FUSED, Isa::Amx, "edges|rare|decode");
}
