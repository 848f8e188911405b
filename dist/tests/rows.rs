//! Rows of one sequence over ranks and on one device: the same bits, where parts of the keys are cut between ranks'
//! pieces and within them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha::{DType, PlanOptions};
use fmha_conformance::execute::run_fwd;
use fmha_conformance::rows::{Bounds, Keys, Story, View, differing, draw, is_far_apart};
use fmha_conformance::tensors::Lengths;
use fmha_dist::{Error, Options, Partition, Problem, Scheme};

/// Keys of the CPU's parts; rows over ranks have no pages and no lengths used in part.
const BOUNDS: Bounds = Bounds {
    dtypes: &[DType::Bf16, DType::F16, DType::F32],
    part: 512,
    most_rows: 200,
    dims: &[8, 16, 33],
    fp8_caches: false,
    rare: &[],
    forced: true,
};

/// A drawn pair, the second of which goes over ranks: packed, or one sequence with a batch axis.
fn over_ranks(seed: u64) -> (Story, [View; 2]) {
    let (story, [alone, view]) = draw(seed, &BOUNDS);
    let packed = view.keys == Keys::Packed || !view.others.is_empty();
    let keys = if packed { Keys::Packed } else { Keys::Strided };
    let view = View { keys, packed, spare: 0, unmasked: false, lse: true, ..view };
    (story, [alone, view])
}

/// The problem of a call ([`View`]) over `ranks` ranks.
fn problem(view: &View, story: &Story, ranks: u32) -> Problem {
    let (whole, lengths) = view.problem(story);
    let Lengths { cu_seqlens_q, cu_seqlens_k, .. } = lengths;
    let cu = |cu: Vec<i32>| cu.into_iter().map(i32::unsigned_abs).collect::<Vec<_>>();
    let (cu_q, cu_k) = (cu(cu_seqlens_q), cu(cu_seqlens_k));
    let rows = |cu: &[u32], len: u32| cu.last().copied().unwrap_or(len);
    let sides = [rows(&cu_q, whole.dims.seqlen_q), rows(&cu_k, whole.dims.seqlen_k)];
    let split = |rows| match story.seed % 2 {
        0 => Partition::contiguous(rows, ranks),
        _ => Partition::zig_zag(rows, ranks),
    };
    let [q, k] = sides.map(split);
    let problem = Problem::new(whole, q).keys(k);
    if view.packed { problem.packed(cu_q, cu_k) } else { problem }
}

/// First difference between rows of a random problem ([`Story`]) on one device and over ranks.
fn differs(story: &Story, views: &[View; 2], options: &Options, ranks: u32) -> Result<Option<String>, Error> {
    let mut over_ranks = views[1].host(story).unwrap();
    support::forward(&mut over_ranks, &problem(&views[1], story, ranks), options, 1)?;
    let mut alone = views[0].host(story).unwrap();
    let device = support::device();
    let plan = device.plan_fwd(&alone.problem, &PlanOptions::default().row_invariant(true)).unwrap();
    run_fwd(&device, &plan, &mut alone).unwrap();
    Ok(differing(story, views, [&alone, &over_ranks]))
}

fn asked(scheme: Scheme) -> Options {
    Options::default().scheme(scheme).kernels(PlanOptions::default().row_invariant(true))
}

#[test]
fn a_row_has_the_same_bits_over_ranks_as_in_every_call_of_one_device() {
    let mut far = 0;
    for seed in 1..=48 {
        let (story, views) = over_ranks(seed);
        let ranks = [1, 2, 3, 4, 8][seed as usize % 5];
        far += u64::from(ranks > 1 && is_far_apart(&story, &views, BOUNDS.part));
        let said = differs(&story, &views, &asked(Scheme::Gather), ranks).unwrap();
        assert_eq!(said, None, "pair {seed} over {ranks} ranks\n{story:#?}\n{views:#?}");
    }
    assert!(far >= 16, "{far} of 48 rows see three parts or more, over ranks");
}

/// The search finds what it searches for: `ring` merges a row's keys by ranks, not by parts.
#[test]
fn rows_over_ranks_differ_where_nobody_asks_for_equal_rows() {
    let options = Options::default().scheme(Scheme::Ring);
    let differ = (1..=24).filter(|&seed| {
        let (story, views) = over_ranks(seed);
        differs(&story, &views, &options, 3).unwrap().is_some()
    });
    let count = differ.count();
    assert!(count >= 5, "{count} of 24 pairs differ");
}

#[test]
fn schemes_that_do_not_promise_equal_rows_refuse_them_by_name() {
    let (story, views) = over_ranks(2);
    for scheme in [Scheme::Ring, Scheme::Mixed, Scheme::Ulysses, Scheme::Decode] {
        assert!(!scheme.has_rows_of_one_device(), "{scheme}");
        let error = differs(&story, &views, &asked(scheme), 2).unwrap_err().text;
        assert!(error.contains("row_invariant true is not kept"), "{scheme}: {error}");
    }
    assert!(Scheme::Gather.has_rows_of_one_device());
}
