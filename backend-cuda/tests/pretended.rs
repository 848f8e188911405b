//! A backend without a device: what it says of itself, its tiles and its kernels. Nothing is compiled.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::cache::Precompile as _;
use fmha_core::tune::{Tune as _, TunedTile};
use fmha_core::{
    AnyProblem, BwdProblem, CombineProblem, DType, Dims, FmhaBackend as _, FwdProblem, Operation,
    PlanOptions, Shape,
};
use fmha_cuda::CudaBackend;

const DIMS: Dims = Dims {
    batch: 1,
    seqlen_q: 512,
    seqlen_k: 512,
    num_heads_q: 4,
    num_heads_kv: 4,
    head_dim_qk: 128,
    head_dim_v: 128,
};

fn merged() -> CombineProblem {
    CombineProblem::new(2, DType::F32, DType::Bf16, Shape { batch: 1, seq: 8, head: 2, dim: 64 })
}

fn pretend(arch: &str) -> CudaBackend {
    CudaBackend::pretend(arch).unwrap()
}

#[test]
fn it_says_what_it_is_and_what_it_has() {
    let backend = pretend("sm_90a");
    assert_eq!((backend.kind(), backend.name()), ("cuda", "cuda (sm_90a, no device)"));
    // `sm90`, `sm80` and `simt` are kernels of two operations each.
    assert_eq!(backend.kernels(), ["sm100", "sm90", "sm80", "simt", "combine"]);
    assert!(backend.precompiler().is_some());
    assert!(backend.tuner().is_none() && backend.queues().is_none(), "it runs nothing");
    let [bf16, fp8] =
        [DType::Bf16, DType::E4m3Fn].map(|dtype| backend.roofline(dtype).flops_per_second.unwrap());
    assert_eq!(fp8, 2.0 * bf16);
    let memory = backend.memory();
    assert!(!memory.checks_bounds());
    assert!(memory.alloc(1).is_err() && memory.alloc_at_edge(1, true).is_err());
    assert!(memory.synchronize(fmha_core::Stream::DEFAULT).is_err());
    assert_eq!(fmha_cuda::emulated_launches(), None);
}

/// Here no double is installed: where the machine has no driver, that is what is said.
#[test]
fn a_process_without_a_double_has_the_machines_driver_or_none() {
    if let Err(error) = CudaBackend::open(0, None) {
        assert!(!error.to_string().contains("emulated"), "{error}");
    }
}

#[test]
fn each_device_has_the_knobs_and_the_tiles_of_its_kernels() {
    let fwd = FwdProblem::batch(DType::Bf16, DIMS).validate().unwrap();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let options = PlanOptions::default();
    let value = |arch: &str, knob: &str| {
        let tile = pretend(arch).default_tile(AnyProblem::Forward(&fwd), &options).unwrap();
        tile.into_iter().find_map(|(name, value)| (name == knob).then_some(value))
    };
    // A knob of Hopper's tile, and one of Blackwell's, whose later part alone loads maxima.
    assert_eq!(value("sm_90a", "ping_pong").as_deref(), Some("1"));
    assert_eq!(value("sm_100a", "ping_pong"), None);
    let load_max = ["sm_90a", "sm_100a", "sm_103a"].map(|arch| value(arch, "load_max"));
    assert_eq!(load_max, [None, Some("0".to_owned()), Some("1".to_owned())]);

    for (arch, tunes_backward) in [("sm_80", false), ("sm_90a", true), ("sm_100a", false), ("sm_120a", false)]
    {
        let backend = pretend(arch);
        let names = |operation| {
            let knobs = backend.knobs(operation);
            assert!(knobs.iter().all(|(_, values)| !values.is_empty()));
            knobs.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        let tile = backend.default_tile(AnyProblem::Forward(&fwd), &options).unwrap();
        assert_eq!(tile.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), names(Operation::Forward));
        assert_eq!(names(Operation::Backward).contains(&"edges_apart"), tunes_backward);
        assert_eq!(names(Operation::Combine), [""; 0]);
    }

    // The kernel's own tile, whatever the options set of it.
    let hopper = pretend("sm_90a");
    let set = PlanOptions { tile: vec![("block_m".to_owned(), "240".to_owned())], ..options.clone() };
    let of = |options| hopper.default_tile(AnyProblem::Backward(&bwd), options).unwrap();
    assert!(!of(&options).is_empty());
    assert_eq!(of(&set), of(&options));
    assert!(hopper.plan_bwd(&bwd, &set).is_err());

    let wide = Dims { head_dim_qk: 512, ..DIMS };
    let wide = FwdProblem::batch(DType::Bf16, wide).validate().unwrap();
    for arch in ["sm_90a", "sm_100a"] {
        assert!(pretend(arch).default_tile(AnyProblem::Forward(&wide), &options).is_err());
    }
    assert!(pretend("sm_100a").default_tile(AnyProblem::Backward(&bwd), &options).is_err());
}

#[test]
fn what_merges_has_no_tile_and_where_there_is_no_folder_none_is_kept() {
    let backend = pretend("sm_90a");
    let combine = merged().validate().unwrap();
    let options = PlanOptions::default();
    let kept = || TunedTile { tile: Vec::new(), seconds: 1.0, default_seconds: 2.0 };
    let problem = AnyProblem::Combine(&combine);
    for error in [
        backend.default_tile(problem, &options).unwrap_err(),
        backend.keep(problem, &options, kept()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("0 of its kernels have a tile to tune"), "{error}");
    }
    let fwd = FwdProblem::batch(DType::Bf16, DIMS).validate().unwrap();
    assert!(backend.keep(AnyProblem::Forward(&fwd), &options, kept()).is_err());
}

#[test]
fn the_jobs_of_a_plan_are_its_launches() {
    let fwd = FwdProblem::batch(DType::Bf16, DIMS).validate().unwrap();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let combine = merged().validate().unwrap();
    for (arch, problem, names) in [
        ("sm_90a", AnyProblem::Forward(&fwd), &["sm90"][..]),
        ("sm_100a", AnyProblem::Forward(&fwd), &["sm100"]),
        ("sm_90a", AnyProblem::Backward(&bwd), &["preprocess", "sm90"]),
        ("sm_90a", AnyProblem::Combine(&combine), &["combine"]),
    ] {
        let jobs = pretend(arch).jobs(problem, &PlanOptions::default()).unwrap();
        assert!(jobs.iter().all(|job| job.arch == arch));
        assert_eq!(jobs.iter().map(|job| job.kernel).collect::<Vec<_>>(), names);
    }
}
