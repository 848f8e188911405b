//! Cases of rows that two calls share: their bits must be equal if the plan promises it.

use crate::case::{Body, Case, Forward, Plant};
use crate::law::{Law, LawKind};
use crate::rows::{BLOCKS, PAIRS, SHORT, draw, draw_training};
use crate::tensors::Data;

/// Number of cases, of [`PAIRS`] pairs each. `tests/row_invariant.rs` draws more.
const CASES: u64 = 4;

/// Seed of the training calls: three blocks of keys, a kv head's two query heads, one packed call, different
/// positions.
const GRADIENTS: u64 = 3625;

pub(crate) fn cases() -> Vec<Case> {
    (0..CASES).map(case).chain([gradients()]).collect()
}

/// Training calls of several blocks of keys, packed and in a batch.
fn gradients() -> Case {
    let (story, [view, _]) = draw_training(GRADIENTS, &BLOCKS);
    let (problem, lengths) = view.problem(&story);
    let data = Data { seed: story.seed, ..Data::default() };
    let forward = Forward { problem, lengths, data, plant: Plant::Nothing };
    let body = Body::Law(Box::new(Law { forward, kind: LawKind::GradientsOfCalls(GRADIENTS) }));
    Case { name: "rows/gradients".to_owned(), body }
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
