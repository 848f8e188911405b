//! Rows of one sequence in two calls: the same bits where a plan promises them.

use crate::case::{Body, Case, Forward, Plant};
use crate::law::{Law, LawKind};
use crate::rows::{PAIRS, SHORT, draw};
use crate::tensors::Data;

/// Cases, of [`PAIRS`] pairs each. `tests/row_invariant.rs` draws more.
const CASES: u64 = 4;

pub(crate) fn cases() -> Vec<Case> {
    (0..CASES).map(case).collect()
}

fn case(at: u64) -> Case {
    let first = 1 + at * PAIRS;
    let (story, [view, _]) = draw(first, &SHORT);
    let (problem, lengths) = view.problem(&story);
    let data = Data { seed: story.seed, ..Data::default() };
    let forward = Forward { problem, lengths, data, plant: Plant::Nothing };
    let body = Body::Law(Box::new(Law { forward, kind: LawKind::RowsOfCalls(first) }));
    Case { name: format!("rows/pairs_from_{first}"), body }
}
