//! Refusals of each architecture over the battery, planned without a device, are exactly those declared.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_conformance::case::{Body, Case, all};
use fmha_conformance::declared::why;
use fmha_core::{AnyProblem, Device, Error, PlanOptions};

/// Whether a case's own problem is refused; nothing is compiled.
fn is_refused(backend: &Device, case: &Case, options: &PlanOptions) -> bool {
    let compiler = backend.precompiler().unwrap();
    let forward = |problem: &fmha_core::FwdProblem| {
        compiler.jobs(AnyProblem::Forward(&problem.clone().validate().unwrap()), options)
    };
    let jobs = match &case.body {
        Body::Forward(case) => forward(&case.problem),
        Body::Law(law) => forward(&law.forward.problem),
        Body::Backward(backward) => {
            let problem = backward.problem.clone().validate().unwrap();
            compiler.jobs(AnyProblem::Backward(&problem), &backward.options(options))
        }
        Body::Combine(combine) => {
            compiler.jobs(AnyProblem::Combine(&combine.problem.clone().validate().unwrap()), options)
        }
    };
    match jobs {
        Ok(_) => false,
        Err(Error::Unsupported { .. }) => true,
        Err(other) => panic!("{}: {other}", case.name),
    }
}

#[test]
fn what_is_refused_where_a_slow_kernel_may_serve_is_what_is_declared() {
    let options = PlanOptions::default().allow_fallback(true);
    let cuda =
        ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"].map(|arch| (arch, fmha_cuda::pretend(arch)));
    let rocm =
        ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"].map(|arch| (arch, fmha_rocm::pretend(arch)));
    let cases = all();
    for (arch, backend) in cuda.into_iter().chain(rocm) {
        let backend = backend.unwrap();
        let mut refused = 0;
        for case in &cases {
            let declared = why(backend.kind(), &options, case);
            let is_refused = is_refused(&backend, case, &options);
            refused += usize::from(is_refused);
            assert!(!is_refused || declared.is_some(), "{arch} refuses {}, undeclared", case.name);
            // The refused call may be a law's second call. Hopper's own kernels take caches that no other kernel does,
            // and only they and Blackwell's take masks as data beside code.
            let exempt = matches!(case.body, Body::Law(_)) || ["sm_90a", "sm_100a"].contains(&arch);
            assert!(is_refused || declared.is_none() || exempt, "{arch} takes {}: {declared:?}", case.name);
        }
        println!("{arch}: {refused} of {} cases are refused, as declared", cases.len());
    }
}
