//! Every kernel of a plan compiles: all sources of plans of drawn problems are compiled, for every architecture,
//! without a device. A problem without a kernel is refused by the plan, with a reason, and never by a compiler.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use fmha_conformance::case::{Body, Case, Drawn};
use fmha_core::cache::KernelJob;
use fmha_core::{
    Accuracy, AnyProblem, BwdProblem, Device, Dims, Error, FwdProblem, PlanOptions, ValidBwd, ValidFwd,
};
use rayon::prelude::*;

const ARCHS: [&str; 11] = [
    "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx90a", "gfx942", "gfx950", "gfx1100",
    "gfx1201",
];

/// Seed of the problems in CI's sample, and of a longer run without a seed of its own.
const SEED: &str = "58";

fn pretend(arch: &str) -> Device {
    let device = if arch.starts_with("sm_") { fmha_cuda::pretend(arch) } else { fmha_rocm::pretend(arch) };
    device.unwrap()
}

/// Further plan options for a drawn problem: every combination in turn.
fn options(index: usize) -> PlanOptions {
    let bit = |at: usize| index >> at & 1 == 1;
    let accuracy = if bit(0) { Accuracy::Exact } else { Accuracy::Fast };
    PlanOptions::default().accuracy(accuracy).batch_invariant(bit(1) && bit(2)).allow_fallback(!bit(3))
}

#[allow(clippy::large_enum_variant, reason = "a handful of them")]
enum Valid {
    Forward(ValidFwd),
    Backward(ValidBwd),
}

impl Valid {
    fn of(case: &Case) -> Self {
        match &case.body {
            Body::Backward(backward) => Self::Backward(backward.problem.clone().validate().unwrap()),
            _ => Self::Forward(case.problem().unwrap().clone().validate().unwrap()),
        }
    }

    /// Steps of the problem's plan, each with code; `None` where the problem is refused.
    fn plan(&self, device: &Device, options: &PlanOptions) -> Result<Option<Vec<String>>, Error> {
        let codes = match self {
            Self::Forward(problem) => device.plan_fwd(problem, options).map(|plan| codes(plan.steps())),
            Self::Backward(problem) => device.plan_bwd(problem, options).map(|plan| codes(plan.steps())),
        };
        match codes {
            Ok(codes) => Ok(Some(codes)),
            Err(Error::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn codes(steps: &[fmha_core::Step]) -> Vec<String> {
    steps.iter().map(|step| format!("{}: {}", step.kernel, step.explain.code)).collect()
}

fn of_case(case: &Case, options: &PlanOptions) -> PlanOptions {
    match &case.body {
        Body::Backward(backward) => backward.options(options),
        _ => options.clone(),
    }
}

/// Whether the architecture's kernels can be compiled here. If not, a message is printed.
fn has_compiler(arch: &str, device: &Device) -> bool {
    let dims = Dims::batch(1).seqlens(1, 1).heads(1, 1).head_dim(16);
    let problem = FwdProblem::batch(fmha_core::DType::F16, dims).validate().unwrap();
    let compiler = device.precompiler().unwrap();
    let slow = PlanOptions::default().kernel("simt");
    let job: KernelJob = compiler.jobs(AnyProblem::Forward(&problem), &slow).unwrap().remove(0);
    match compiler.precompile(&job) {
        Ok(_) => true,
        Err(error) => {
            println!("absent: {arch}: {error}");
            false
        }
    }
}

/// Plans `case` for an architecture. Returns whether it is supported, or the error.
fn plans(arch: &str, device: &Device, case: &Case, options: &PlanOptions) -> Result<bool, String> {
    let wrong = |error: Error| format!("{arch} {} {options:?}: {error}", case.name);
    match Valid::of(case).plan(device, &of_case(case, options)).map_err(wrong)? {
        None => Ok(false),
        Some(codes) => match codes.iter().find(|code| code.contains(": none")) {
            Some(code) => Err(format!("{arch} {}: {code}", case.name)),
            None => Ok(true),
        },
    }
}

/// Compiles the plans of a seed's cases. Returns how many compiled, and the errors.
fn compile_all(seed: &str, count: usize) -> (usize, Vec<String>) {
    let cases = format!("{seed}:{count}").parse::<Drawn>().unwrap().cases();
    let devices: Vec<_> = ARCHS
        .iter()
        .map(|&arch| (arch, pretend(arch)))
        .filter(|(arch, device)| has_compiler(arch, device))
        .collect();
    let found: Vec<_> = cases
        .par_iter()
        .enumerate()
        .filter_map(|(index, case)| {
            let (arch, device) = devices.get(index % ARCHS.len().min(devices.len().max(1)))?;
            Some(plans(arch, device, case, &options(index / ARCHS.len())))
        })
        .collect();
    let taken = found.iter().filter(|found| **found == Ok(true)).count();
    (taken, found.into_iter().filter_map(Result::err).collect())
}

#[test]
fn a_call_that_a_plan_takes_reaches_no_compilers_error() {
    let cases = format!("{SEED}:200").parse::<Drawn>().unwrap().cases();
    for (at, arch) in ARCHS.into_iter().enumerate() {
        let device = pretend(arch);
        if !has_compiler(arch, &device) {
            continue;
        }
        // Each architecture gets the first of its own cases that it supports.
        let own = cases.iter().enumerate().skip(at).step_by(ARCHS.len());
        let mut taken = own.map(|(index, case)| {
            (
                &case.name,
                plans(arch, &device, case, &options(index)).unwrap_or_else(|wrong| panic!("{wrong}")),
            )
        });
        let (name, _) = taken.find(|(_, taken)| *taken).unwrap();
        println!("{arch}: {name} compiles");
    }
}

/// `FMHA_DRAWN_PLANS` is the number of cases, or SEED:COUNT.
#[test]
#[ignore = "hundreds of kernels are compiled: cargo xtask test --all"]
fn no_call_of_many_that_a_plan_takes_reaches_a_compilers_error() {
    let wanted = fmha_core::env::DRAWN_PLANS.get().unwrap().unwrap_or_else(|| "300".to_owned());
    let (seed, count) = wanted.split_once(':').unwrap_or((SEED, &wanted));
    let (taken, wrong) = compile_all(seed, count.parse().unwrap());
    println!("{taken} plans of {count} drawn calls compile");
    assert!(wrong.is_empty(), "{} do not compile:\n{}", wrong.len(), wrong.join("\n"));
}

/// A spill makes ptxas serialise the products of this backward kernel: the kernel is slower but right, and the plan
/// reports it.
#[test]
fn a_kernel_that_spills_is_planned_and_says_that_it_loses_speed() {
    let device = pretend("sm_90a");
    if !has_compiler("sm_90a", &device) {
        return;
    }
    let dims = Dims::batch(2).seqlens(512, 512).heads(8, 2).head_dim(160);
    let mut fwd =
        FwdProblem::batch(fmha_core::DType::Bf16, dims).mask("b:100,0".parse().unwrap()).write_lse(true);
    fwd.dropout.p_drop = 0.1;
    let problem = BwdProblem::new(fwd).validate().unwrap();
    let plan = device.plan_bwd(&problem, &PlanOptions::default().deterministic(true)).unwrap();
    assert_eq!(plan.kernel(), "sm90");
    let said: Vec<_> = plan.steps().iter().map(|step| step.explain.remarks.as_str()).collect();
    assert!(said.iter().any(|remark| remark.contains("Performance Loss")), "{plan}");
    assert!(plan.to_string().contains("Performance Loss"), "{plan}");
}

/// Kernels of a plan, without those that update a cache or merge results; `None` where the problem is refused.
fn kernels(device: &Device, problem: &ValidFwd, options: &PlanOptions) -> Option<BTreeSet<&'static str>> {
    let jobs = device.precompiler()?.jobs(AnyProblem::Forward(problem), options).ok()?;
    let reads = |kernel: &&str| *kernel != "widen_cache" && !kernel.ends_with("_update");
    Some(jobs.iter().map(|job| job.kernel).filter(reads).collect())
}

/// A quantised cache is read by the kernels that read an equal cache in 16 bits; other kernels would give other bits
/// (CONTRACT.md, "KV caches").
#[test]
fn a_quantised_cache_has_the_kernels_of_its_twin() {
    let cases = fmha_conformance::case::all();
    let quantised = cases.iter().filter_map(|case| {
        let problem = case.problem()?.clone();
        problem.cache.dtype?;
        Some((&case.name, problem.clone().validate().ok()?, problem.over_wide_cache()?.validate().ok()?))
    });
    let quantised: Vec<_> = quantised.collect();
    let compared: usize = ARCHS
        .par_iter()
        .map(|arch| {
            let device = pretend(arch);
            let options = [PlanOptions::default(), PlanOptions::default().batch_invariant(true)];
            let pairs = options.iter().flat_map(|options| quantised.iter().map(move |case| (options, case)));
            let compared = pairs.filter_map(|(options, (name, problem, twin))| {
                let (own, of_twin) = (kernels(&device, problem, options)?, kernels(&device, twin, options)?);
                assert_eq!(own, of_twin, "{arch}: {name}, batch_invariant {}", options.batch_invariant);
                Some(())
            });
            compared.count()
        })
        .sum();
    assert!(compared > 2000, "{compared} plans");
}

#[test]
fn every_gpu_writes_small_outputs_behind_the_kernel_of_the_same_call_and_says_beside_what_not() {
    let dims = Dims::batch(1).seqlens(64, 64).heads(2, 2).head_dim(64);
    for arch in ["sm_80", "sm_90a", "sm_100a", "gfx942", "gfx1100"] {
        let plain = FwdProblem::batch(fmha_core::DType::Bf16, dims);
        let kernel = |problem: &FwdProblem| {
            let problem = problem.clone().validate().unwrap();
            let plan = pretend(arch).plan_fwd(&problem, &PlanOptions::default().allow_fallback(true));
            plan.map(|plan| (plan.kernel().to_owned(), plan.steps().len())).map_err(|error| error.to_string())
        };
        let (of_plain, steps) = kernel(&plain).unwrap();
        for (outputs, more) in [
            (plain.clone().row_max(true), 1),
            (plain.clone().head_max(true), 2),
            (plain.clone().row_max(true).head_max(true).key_sum(true), 3),
        ] {
            assert_eq!(kernel(&outputs), Ok((of_plain.clone(), steps + more)), "{arch}");
        }
        let wanted = plain.clone().head_max(true).seqused_k(true);
        let tree = wanted.clone().mask("b".parse().unwrap()).tree_mask(true);
        let refused = kernel(&tree).unwrap_err();
        assert!(
            refused.contains("head_max beside tree_mask is not written on this device"),
            "{arch}: {refused}"
        );
    }
}
