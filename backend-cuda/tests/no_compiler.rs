//! A process that finds no compiler and no compiled kernels. This program has only one test, since all tests would
//! share the environment.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::error::Error;
use fmha_core::{DType, Device, Dims, FwdProblem, PlanOptions};

#[test]
fn a_plan_for_no_device_is_there_without_a_compiler_and_one_for_a_device_is_not() {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: this program's only test, before any other thread that reads the environment.
    unsafe {
        std::env::set_var("FMHA_NVRTC", folder.path().join("none.so"));
        std::env::set_var("FMHA_CACHE_DIR", folder.path());
    }
    let dims = Dims::batch(1).seqlens(64, 64).heads(1, 1).head_dim(64);
    let problem = FwdProblem::batch(DType::F16, dims).validate().unwrap();
    let plan = |backend: &Device| backend.plan_fwd(&problem, &PlanOptions::default());

    let plans = plan(&fmha_cuda::pretend("sm_90a").unwrap()).unwrap();
    assert!(plans.explain().code.starts_with("none: "), "{}", plans.explain().code);
    assert_eq!((plans.kernel(), plans.explain().resources), ("sm90", None));
    assert_eq!(plans.explain().launch.unwrap().groups, 1);

    let runs = plan(&fmha_cuda::open(0, Some("sm_90a")).unwrap()).unwrap_err();
    assert!(matches!(runs, Error::NoDevice(_)) && runs.to_string().contains("none.so"), "{runs}");
}
