//! The battery's forward cases of bf16 on instruction sets in software: what surrounds dot products and tiles keeps the contract
//! on a machine whose processor has neither. Not what only the instructions do: AMX takes subnormal numbers for 0.

use fmha_conformance::Regex;
use fmha_conformance::report::run;
use fmha_conformance::run::Options;
use fmha_core::{
    BwdArgs, BwdPlan, CombineArgs, CombinePlan, DType, DeviceMemory, FmhaBackend, FwdArgs, FwdPlan,
    PlanOptions, Result, Roofline, Stream, ValidBwd, ValidCombine, ValidFwd,
};

use crate::simd::{Simd, SoftDots, SoftTiles};
use crate::{Config, CpuBackend, Isa};

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

impl<S: Simd> FmhaBackend for Soft<S> {
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

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        self.plans.plan_fwd(problem, options)
    }

    fn run_fwd(&self, plan: &FwdPlan, args: &mut FwdArgs<'_>, _stream: Stream) -> Result<()> {
        self.plans.checked_fwd(plan, args, |call| call.run(self.s, self.plans.own_threads()?))
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
        self.plans.plan_bwd(problem, options)
    }

    fn run_bwd(&self, plan: &BwdPlan, args: &mut BwdArgs<'_>, stream: Stream) -> Result<()> {
        self.plans.run_bwd(plan, args, stream)
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        self.plans.plan_combine(problem, options)
    }

    fn run_combine(&self, plan: &CombinePlan, args: &mut CombineArgs<'_>, stream: Stream) -> Result<()> {
        self.plans.run_combine(plan, args, stream)
    }
}

fn keeps_the_contract<S: Simd>(s: S, isa: Isa, families: &str) {
    let filter = Regex::new(&format!("^({families})/.*bf16")).unwrap();
    let report = run(&Soft::new(s, isa), Some(&filter), &Options::default(), &|_, _, _| ());
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
