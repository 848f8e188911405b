//! Source of a plan's tile: the user, a measurement, or the kernel's own table.

use fmha_core::spec::BwdSpec;
use fmha_core::tune::{TileClass, TunedTile, TunedTiles};
use fmha_core::{Accuracy, BwdProblem, DType, Dims, FwdProblem, PlanOptions, ValidBwd, ValidFwd};
use fmha_gpu::{TileFrom, tuned_kernels};
use fmha_kernels_cuda::{sm90, sm90_bwd, sm100};

use super::{Cuda, choose};
use fmha_kernels_cuda::nvidia::DeviceFacts;
use fmha_kernels_cuda::sm90::recipe::Sm90;
use fmha_kernels_cuda::sm90_bwd::recipe::Sm90Bwd;
use fmha_kernels_cuda::sm100::recipe::Sm100;

fn fwd() -> ValidFwd {
    let dims = Dims::batch(2).seqlens(4096, 4096).heads(16, 16).head_dim(128);
    FwdProblem::batch(DType::Bf16, dims).validate().unwrap()
}

fn bwd() -> ValidBwd {
    BwdProblem::new(FwdProblem::clone(&fwd())).validate().unwrap()
}

/// Facts of an H200 for which one measured tile is stored.
fn facts(label: &str, class: &TileClass, (knob, value): (&str, &str)) -> DeviceFacts {
    let folder = tempfile::tempdir().unwrap();
    let headers = fmha_kernels_cuda::headers();
    let tuned = tuned_kernels::<Cuda>();
    let load = || TunedTiles::load_from(Some(folder.path().to_owned()), "an H200", &tuned, &headers);
    let tile = vec![(knob.to_owned(), value.to_owned())];
    load().keep(label, class, TunedTile { tile, seconds: 1.0, default_seconds: 1.1 }).unwrap();
    DeviceFacts { tuned: load(), ..DeviceFacts::stated("sm_90a").unwrap() }
}

fn tile_of<'a>(details: &'a [(&'static str, String)]) -> (&'a str, TileFrom) {
    let detail = |name| &*details.iter().find(|(known, _)| *known == name).unwrap().1;
    let tuned = detail("tile from") == TileFrom::Tuned.detail().1;
    (detail("tile"), if tuned { TileFrom::Tuned } else { TileFrom::Table })
}

#[test]
fn a_backward_plan_has_the_tile_that_was_kept_for_its_class_where_it_fits() {
    let class = TileClass::of_bwd(&bwd(), &BwdSpec::of(&bwd()));
    let kept = |block_m| facts(sm90_bwd::LABEL, &class, ("block_m", block_m));
    let user_sets = PlanOptions::default().tile([("stages_q", "2")]);
    for (facts, options, expected) in [
        (kept("80"), PlanOptions::default(), ("80 queries x 128 keys", TileFrom::Tuned)),
        (
            kept("80"),
            PlanOptions::default().accuracy(Accuracy::Exact),
            ("80 queries x 128 keys", TileFrom::Tuned),
        ),
        (kept("80"), user_sets, ("64 queries x 128 keys", TileFrom::Table)),
        (kept("80"), PlanOptions::default().deterministic(true), ("64 queries x 128 keys", TileFrom::Table)),
        // The stored tile needs too many accumulators for this kernel; an earlier version accepted it.
        (kept("128"), PlanOptions::default(), ("64 queries x 128 keys", TileFrom::Table)),
        // The tile is stored under the label of the forward.
        (
            facts(sm90::NAME, &class, ("block_m", "80")),
            PlanOptions::default(),
            ("64 queries x 128 keys", TileFrom::Table),
        ),
    ] {
        let choice = choose::<Sm90Bwd, _>(&bwd(), &facts, &options).unwrap();
        assert_eq!(tile_of(&choice.details), expected, "{options:?}");
    }
}

#[test]
fn a_forward_plan_has_the_tile_that_was_kept_for_its_class_where_it_fits() {
    let class = TileClass::of_fwd(&fwd());
    let chosen = |facts: &DeviceFacts, accuracy| {
        let options = PlanOptions::default().accuracy(accuracy);
        choose::<Sm90, _>(&fwd(), facts, &options).unwrap().details
    };
    let of_table = chosen(&DeviceFacts::stated("sm_90a").unwrap(), Accuracy::Fast);
    let (table, from) = tile_of(&of_table);
    assert_eq!(from, TileFrom::Table);

    let kept = facts(sm90::NAME, &class, ("block_n", "112"));
    let (fast, exact) = (chosen(&kept, Accuracy::Fast), chosen(&kept, Accuracy::Exact));
    assert!(tile_of(&fast).0.starts_with("128 x 112"), "{fast:?}");
    assert_eq!(tile_of(&fast).1, TileFrom::Tuned);
    assert_eq!(tile_of(&exact).1, TileFrom::Table, "it was measured with lazy rescaling");

    let unfit = facts(sm90::NAME, &class, ("stages", "8"));
    assert_eq!(tile_of(&chosen(&unfit, Accuracy::Fast)), (table, TileFrom::Table));
}

#[test]
fn a_blackwell_plan_has_the_tile_that_was_kept_where_it_was_measured_as_it_is_planned() {
    let class = TileClass::of_fwd(&fwd());
    let kept = facts(sm100::NAME, &class, ("lazy_rescale_log2", "0"));
    let kept = DeviceFacts { tuned: kept.tuned, ..DeviceFacts::stated("sm_100a").unwrap() };
    for (accuracy, batch_invariant, expected) in [
        (Accuracy::Fast, false, TileFrom::Tuned),
        (Accuracy::Fast, true, TileFrom::Table),
        (Accuracy::Exact, false, TileFrom::Table),
        (Accuracy::Exact, true, TileFrom::Table),
    ] {
        let options = PlanOptions::default().accuracy(accuracy).batch_invariant(batch_invariant);
        let details = choose::<Sm100, _>(&fwd(), &kept, &options).unwrap().details;
        assert_eq!(tile_of(&details).1, expected, "{accuracy}, batch-invariant {batch_invariant}");
    }
}
