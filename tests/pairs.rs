//! The pairwise recipe, counted where it matters: on the fast kernels, which refuse some levels and so thin its rows out.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use fmha_conformance::deal::jobs;
use fmha_conformance::definition;
use fmha_core::{FmhaBackend, PlanOptions};
use fmha_cuda::CudaBackend;
use fmha_rocm::RocmBackend;

/// (axis, level, later axis, level).
type Pair = [usize; 4];

fn pairs(levels: &[usize]) -> impl Iterator<Item = Pair> {
    let axes = levels.len();
    (0..axes).flat_map(move |a| (a + 1..axes).map(move |b| [a, levels[a], b, levels[b]]))
}

/// Pairs of levels, each of which the fast kernels of `backend` take in some case, that they take in none.
fn unmet(backend: &dyn FmhaBackend) -> Vec<Pair> {
    let options = PlanOptions { allow_fallback: false, ..PlanOptions::default() };
    let (mut met, mut taken) = (BTreeSet::new(), BTreeSet::new());
    let mut all = BTreeSet::new();
    for (case, levels) in definition::with_levels() {
        all.extend(pairs(&levels));
        if !jobs(&case, backend, &options).is_empty() {
            met.extend(pairs(&levels));
            taken.extend(levels.into_iter().enumerate());
        }
    }
    assert!(met.len() > 1000, "{}: {} pairs", backend.name(), met.len());
    let takes = |axis, level| taken.contains(&(axis, level));
    all.difference(&met).copied().filter(|&[a, x, b, y]| takes(a, x) && takes(b, y)).collect()
}

/// A type of FP8, whose rows are few: its pairs with one other level at a time are met, and more is not promised.
#[test]
fn every_pair_of_levels_that_fast_kernels_take_meets_in_a_case_on_one() {
    let cuda = ["sm_90a"].map(|arch| Box::new(CudaBackend::pretend(arch).unwrap()) as Box<dyn FmhaBackend>);
    let rocm = ["gfx90a", "gfx942", "gfx950"]
        .map(|arch| Box::new(RocmBackend::pretend(arch).unwrap()) as Box<dyn FmhaBackend>);
    for backend in cuda.into_iter().chain(rocm) {
        let unmet = unmet(&*backend);
        assert!(unmet.is_empty(), "{}: (axis, level, axis, level): {unmet:?}", backend.name());
    }
}
