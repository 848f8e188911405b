//! The pairwise recipe, counted where it matters: on the fast kernels, which refuse some levels and so thin
//! its rows out.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use fmha_conformance::case::Case;
use fmha_conformance::deal::jobs;
use fmha_conformance::definition;
use fmha_core::{Device, PlanOptions};

/// Pair of levels: (axis, level, later axis, level).
type Pair = [usize; 4];

fn pairs(levels: &[usize]) -> impl Iterator<Item = Pair> {
    let axes = levels.len();
    (0..axes).flat_map(move |a| (a + 1..axes).map(move |b| [a, levels[a], b, levels[b]]))
}

/// Pairs of levels that no case has on `backend`'s fast kernels, although these kernels support the pair with some type
/// and the first level of every other axis.
fn unmet(backend: &Device) -> Vec<Pair> {
    let options = PlanOptions::default().allow_fallback(false);
    let takes = |case: &Case| !jobs(case, backend, &options).is_empty();
    let (mut met, mut all) = (BTreeSet::new(), BTreeSet::new());
    for (case, levels) in definition::with_levels() {
        all.extend(pairs(&levels));
        if takes(&case) {
            met.extend(pairs(&levels));
        }
    }
    assert!(met.len() > 1000, "{}: {} pairs", backend.name(), met.len());
    let of_dtype = |pair: &Pair| if pair[0] == 0 { pair[1]..pair[1] + 1 } else { 0..7 };
    let taken = |pair: &&Pair| of_dtype(pair).any(|dtype| takes(&definition::plain_with(dtype, **pair)));
    let unmet: Vec<Pair> = all.difference(&met).filter(taken).copied().collect();
    println!("{}: {} of {} pairs of levels meet on fast kernels", backend.name(), met.len(), all.len());
    unmet
}

#[test]
fn every_pair_of_levels_that_fast_kernels_take_meets_in_a_case_on_one() {
    let cuda = ["sm_90a"].map(|arch| fmha_cuda::pretend(arch).unwrap());
    let rocm = ["gfx90a", "gfx942", "gfx950"].map(|arch| fmha_rocm::pretend(arch).unwrap());
    let mut missing = Vec::new();
    for backend in cuda.into_iter().chain(rocm) {
        let unmet = unmet(&backend);
        if !unmet.is_empty() {
            missing.push(format!("{}: (axis, level, axis, level): {unmet:?}", backend.name()));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
