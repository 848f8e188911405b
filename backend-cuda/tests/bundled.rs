//! A process with a bundle of the tables' kernels, without a compiler and without a disk cache. This program has
//! only one test, since all tests would share the environment. The bundle's kernels have keys but no code: nothing
//! is compiled.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fmha_core::cache::{Bundle, CompiledKernel, backward_table, embed, forward_table};
use fmha_core::{
    AnyProblem, BwdProblem, DType, Device, Dims, FwdProblem, MaskSpec, Plan, PlanOptions, Problem,
    ResourceUsage,
};

/// Whether the problem is one of the tables' with one type, batch mode and LSE.
fn is_asked_for(name: &str) -> bool {
    name.contains("bf16/") && name.contains("/batch/lse/")
}

/// Bundle of these kernels as `fmha bundle --backward` makes it, each kernel an image of one byte.
fn bundle(of: &Device) -> Bundle {
    let precompiler = of.precompiler().unwrap();
    let mut jobs = BTreeMap::new();
    let mut add = |problem: AnyProblem<'_>, options: &PlanOptions| {
        for job in precompiler.jobs(problem, options).unwrap() {
            jobs.entry(job.source.entry.clone()).or_insert(job);
        }
    };
    for entry in forward_table().unwrap().iter().filter(|entry| is_asked_for(&entry.name)) {
        add(AnyProblem::Forward(&entry.problem), &PlanOptions::default());
    }
    for entry in backward_table().unwrap().iter().filter(|entry| is_asked_for(&entry.name)) {
        for deterministic in [false, true] {
            add(AnyProblem::Backward(&entry.problem), &PlanOptions::default().deterministic(deterministic));
        }
    }
    let kernels = jobs.into_values().map(|job| {
        Arc::new(CompiledKernel {
            key: job.key(),
            kernel: job.kernel.to_owned(),
            arch: job.arch,
            compiler: String::new(),
            own_flags: Vec::new(),
            entry: job.source.entry,
            machine: vec![1],
            assembly: Vec::new(),
            log: String::new(),
            resources: ResourceUsage::default(),
        })
    });
    Bundle::new("tables", kernels)
}

/// The number of kernels that a machine without a compiler lacks, the number of plans, and the number of plans that use
/// another tile than with a compiler.
#[derive(Default)]
struct Found {
    lacking: BTreeSet<String>,
    plans: u32,
    stand_ins: u32,
}

impl Found {
    fn add<P: Problem>(&mut self, name: &str, plan: &Plan<P>) {
        self.plans += 1;
        self.stand_ins += u32::from(plan.details().iter().any(|(name, _)| *name == "stands in"));
        for step in plan.steps() {
            if step.explain.code != "bundle tables" {
                self.lacking.insert(format!("{name}: {} {}", step.kernel, step.explain.code));
            }
        }
    }
}

#[test]
fn a_bundle_serves_calls_of_any_sizes_without_a_compiler() {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: this is the program's only test, and no other thread reads the environment yet.
    unsafe {
        std::env::set_var("FMHA_NVRTC", folder.path().join("none.so"));
        std::env::set_var("FMHA_CACHE_DIR", folder.path());
    }
    let hopper = fmha_cuda::pretend("sm_90a").unwrap();
    embed(bundle(&hopper));
    let narrow: MaskSpec = "b:64,0".parse().unwrap();
    let [mut forward, mut backward, mut ordered] = [Found::default(), Found::default(), Found::default()];
    let options = PlanOptions::default();
    let table = forward_table().unwrap();
    let asked =
        table.iter().filter(|entry| is_asked_for(&entry.name) && entry.name.contains("q512k512/gqa1"));
    for (entry, mask) in asked.flat_map(|entry| [(entry, entry.problem.mask), (entry, narrow)]) {
        for (batch, num_heads_kv, ratio) in [1, 2, 8, 64]
            .into_iter()
            .flat_map(|batch| [(8, 1), (8, 4), (1, 16), (3, 5)].map(|(heads, ratio)| (batch, heads, ratio)))
        {
            for seqlen in [1, 7, 64, 100, 144, 200, 208, 300, 512, 1000, 1024, 1500, 2048, 4096, 9000] {
                let dims = Dims {
                    batch,
                    seqlen_q: seqlen,
                    seqlen_k: seqlen,
                    num_heads_q: num_heads_kv * ratio,
                    num_heads_kv,
                    ..entry.problem.dims
                };
                let name = format!(
                    "{} {mask} B {batch} S {seqlen} H {}/{num_heads_kv}",
                    entry.name, dims.num_heads_q
                );
                let problem = FwdProblem::batch(DType::Bf16, dims).mask(mask).write_lse(true);
                let bwd = BwdProblem::new(problem.clone()).validate().unwrap();
                forward.add(&name, &hopper.plan_fwd(&problem.validate().unwrap(), &options).unwrap());
                backward.add(&name, &hopper.plan_bwd(&bwd, &options).unwrap());
                ordered.add(&name, &hopper.plan_bwd(&bwd, &options.clone().deterministic(true)).unwrap());
            }
        }
    }
    // At D 64 the backward's cost model chooses more ways to sum dQ than the tables' sizes need.
    for (name, most, Found { lacking, plans, stand_ins }) in
        [("forward", 0, forward), ("backward", 100, backward), ("deterministic backward", 0, ordered)]
    {
        println!("{name}: {plans} plans, {stand_ins} with another tile");
        assert!(lacking.is_empty(), "{name}: {} of {plans}: {lacking:#?}", lacking.len());
        assert!(stand_ins <= most, "{name}: {stand_ins} of {plans} with another tile than the model's");
    }
}
