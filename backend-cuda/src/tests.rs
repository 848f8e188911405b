//! Measured tiles in a backend, and whether it can measure.

use fmha_core::tune::{TileClass, Tune as _, TunedTile, TunedTiles};
use fmha_core::{
    AnyProblem, BwdProblem, CombineProblem, DType, Dims, FmhaBackend as _, FwdProblem, PlanOptions, Shape,
    ValidBwd,
};
use fmha_gpu::{Backend, Kernel, tuned_kernels};
use fmha_kernels_cuda as text;

use crate::backend;
use crate::kernels::Cuda;
use crate::kernels::tests::of_lengths;
use fmha_kernels_cuda::nvidia::DeviceFacts;
use fmha_kernels_cuda::sm90_bwd::recipe::Sm90Bwd;

#[test]
fn a_tile_is_kept_under_the_kernel_that_is_tuned_on_the_device() {
    let fwd = of_lengths([512, 512], [4, 4], 128, "0").validate().unwrap();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let options = PlanOptions::default();
    let tiles = <Sm90Bwd as Kernel<ValidBwd, Cuda>>::about().tiles.unwrap();
    let (of_fwd, of_bwd) = (TileClass::of_fwd(&fwd), (tiles.class)(&bwd, &options));
    for (arch, problem, label, class) in [
        ("sm_90a", AnyProblem::Forward(&fwd), text::sm90::NAME, &of_fwd),
        ("sm_100a", AnyProblem::Forward(&fwd), text::sm100::NAME, &of_fwd),
        ("sm_90a", AnyProblem::Backward(&bwd), text::sm90_bwd::LABEL, &of_bwd),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let load = || {
            let folder = Some(folder.path().to_owned());
            TunedTiles::load_from(folder, "a device", &tuned_kernels::<Cuda>(), &text::headers())
        };
        let facts = DeviceFacts { tuned: load(), ..DeviceFacts::stated(arch).unwrap() };
        let backend = backend("a device".to_owned(), facts, None).unwrap();
        let tile = vec![("block_m".to_owned(), "128".to_owned())];
        let kept = TunedTile { tile, seconds: 1.0, default_seconds: 2.0 };
        let path = backend.keep(problem, &options, kept.clone()).unwrap();
        assert!(path.starts_with(folder.path()) && path.exists());
        let labels = [text::sm90::NAME, text::sm100::NAME, text::sm90_bwd::LABEL];
        for known in labels {
            let expected = (known == label).then_some(&kept);
            assert_eq!(load().get(known, class), expected, "{arch}, {known}");
        }
    }
}

const DIMS: Dims = Dims::batch(1).seqlens(512, 512).heads(4, 4).head_dim(128);

fn pretend(arch: &str) -> Backend<Cuda> {
    backend(format!("cuda ({arch}, no device)"), DeviceFacts::stated(arch).unwrap(), None).unwrap()
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
    // `ping_pong` is a tile field of Hopper, `load_max` one of Blackwell, which sm_103a and sm_110a set.
    assert_eq!(value("sm_90a", "ping_pong").as_deref(), Some("at_issue"));
    assert_eq!(value("sm_100a", "ping_pong"), None);
    let load_max = ["sm_90a", "sm_100a", "sm_103a", "sm_110a"].map(|arch| value(arch, "load_max"));
    assert_eq!(load_max, [None, Some("0".to_owned()), Some("1".to_owned()), Some("1".to_owned())]);

    for arch in ["sm_80", "sm_90a", "sm_100a", "sm_120a"] {
        let backend = pretend(arch);
        let names = |problem, options: &PlanOptions| {
            let knobs = backend.knobs(problem, options)?;
            assert!(knobs.iter().all(|(_, values)| !values.is_empty()));
            Ok::<_, fmha_core::Error>(knobs.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
        };
        for options in [options.clone(), options.clone().kernel("sm80")] {
            let tile = backend.default_tile(AnyProblem::Forward(&fwd), &options).unwrap();
            let knobs = names(AnyProblem::Forward(&fwd), &options).unwrap();
            assert_eq!(tile.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), knobs, "{arch} {options:?}");
            assert!(options.kernel.is_none() || knobs.contains(&"fragments_ahead"), "{arch}: {knobs:?}");
        }
        let backward = names(AnyProblem::Backward(&bwd), &options);
        assert_eq!(backward.is_ok_and(|knobs| knobs.contains(&"edges_apart")), arch == "sm_90a");
    }

    // Measured tiles replace the kernel's own choice, whatever fields the options set.
    let hopper = pretend("sm_90a");
    let set = options.clone().tile([("block_m", "240")]);
    let of = |options| hopper.default_tile(AnyProblem::Backward(&bwd), options).unwrap();
    assert!(!of(&options).is_empty());
    assert_eq!(of(&set), of(&options));
    assert!(hopper.plan_bwd(&bwd, &set).is_err());

    // A head dimension that no kernel with tiles supports.
    let wide = Dims { head_dim_qk: 584, ..DIMS };
    let wide = FwdProblem::batch(DType::Bf16, wide).validate().unwrap();
    for arch in ["sm_90a", "sm_100a"] {
        assert!(pretend(arch).default_tile(AnyProblem::Forward(&wide), &options).is_err());
    }
    assert!(pretend("sm_100a").default_tile(AnyProblem::Backward(&bwd), &options).is_err());
}

#[test]
fn what_merges_has_no_tile_and_where_there_is_no_folder_none_is_kept() {
    let backend = pretend("sm_90a");
    let combine =
        CombineProblem::new(2, DType::F32, DType::Bf16, Shape { batch: 1, seq: 8, head: 2, dim: 64 })
            .validate()
            .unwrap();
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
