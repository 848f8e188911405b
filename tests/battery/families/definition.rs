//! Small sizes against the reference: every pair of levels of all axes, and random rows.

use super::pairwise::pairwise;
use super::recipe::{AXES, random_levels, recipe};
use crate::case::{Case, seed_of};

/// Series of pairwise rows: each meets every pair once more, beside other levels.
const SERIES: u64 = 5;
const RANDOM: u64 = 500;

pub(crate) fn cases() -> Vec<Case> {
    let pairs = (0..SERIES).flat_map(|series| {
        let rows = pairwise(&AXES, 0x9a1f + series).into_iter().enumerate();
        rows.map(move |(row, levels)| (format!("definition/pairs{series}_{row:03}"), levels))
    });
    let random =
        (0..RANDOM).map(|index| (format!("definition/random_{index:03}"), random_levels(0x5eed, index)));
    pairs
        .chain(random)
        .map(|(name, levels)| {
            let made = recipe(&levels, seed_of(&name));
            Case::forward(format!("{name}/{}", made.label), made.problem, made.lengths, made.data)
        })
        .collect()
}
