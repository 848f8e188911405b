//! What a backend keeps of tiles that were measured, and whether it measures.

use fmha_core::tune::{TileClass, Tune as _, TunedTile, TunedTiles};
use fmha_core::{AnyProblem, BwdProblem, FwdProblem, PlanOptions, Queues as _};
use fmha_kernels_cuda as text;

use crate::kernels::plans::of_lengths;
use crate::kernels::{TUNED_KERNELS, sm90_bwd};
use crate::{CudaBackend, CudaMemory};

#[test]
fn a_tile_is_kept_under_the_kernel_that_is_tuned_on_the_device() {
    let fwd = of_lengths([512, 512], [4, 4], 128, "0").validate().unwrap();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let options = PlanOptions::default();
    let (of_fwd, of_bwd) = (TileClass::of_fwd(&fwd), sm90_bwd::tile_class(&bwd, &options));
    for (arch, problem, label, class) in [
        ("sm_90a", AnyProblem::Forward(&fwd), text::sm90::NAME, &of_fwd),
        ("sm_100a", AnyProblem::Forward(&fwd), text::sm100::NAME, &of_fwd),
        ("sm_90a", AnyProblem::Backward(&bwd), text::sm90_bwd::LABEL, &of_bwd),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let load = || {
            let folder = Some(folder.path().to_owned());
            TunedTiles::load_from(folder, "a device", &TUNED_KERNELS, &text::headers())
        };
        let mut backend = CudaBackend::pretend(arch).unwrap();
        backend.facts.tuned = load();
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

#[test]
fn all_devices_but_emulated_ones_have_a_clock() {
    for emulated in [false, true] {
        assert_eq!(CudaMemory { device: None, emulated }.has_clock(), !emulated);
    }
}
