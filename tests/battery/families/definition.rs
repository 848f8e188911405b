//! Small sizes against the reference: every pair of levels of all axes, and random rows.

use fmha_core::DType;

use super::pairwise::{Levels, pairwise};
use super::recipe::{AXES, DTYPES, random_levels, recipe};
use crate::case::{Case, seed_of};

/// Series of pairwise rows: each meets every pair once more, beside other levels.
const SERIES: u64 = 5;
const RANDOM: u64 = 500;
/// The types that every fast kernel takes: a series of their own, so that each pair of the other axes' levels meets
/// there too.
const FAST: [DType; 2] = [DType::F16, DType::Bf16];

pub(crate) fn cases() -> Vec<Case> {
    rows().into_iter().map(|(name, levels)| case(&name, &levels)).collect()
}

fn case(name: &str, levels: &Levels) -> Case {
    let made = recipe(levels, seed_of(name));
    Case::forward(format!("{name}/{}", made.label), made.problem, made.lengths, made.data)
}

/// The cases, each with its level of each of [`AXES`].
#[must_use]
pub fn with_levels() -> Vec<(Case, Vec<usize>)> {
    rows().into_iter().map(|(name, levels)| (case(&name, &levels), levels)).collect()
}

fn rows() -> Vec<(String, Levels)> {
    let pairs = (0..SERIES).flat_map(|series| {
        let rows = pairwise(&AXES, 0x9a1f + series).into_iter().enumerate();
        rows.map(move |(row, levels)| (format!("definition/pairs{series}_{row:03}"), levels))
    });
    let random =
        (0..RANDOM).map(|index| (format!("definition/random_{index:03}"), random_levels(0x5eed, index)));
    let mut axes = AXES;
    axes[0] = FAST.len();
    let fast = pairwise(&axes, 0xfa57).into_iter().enumerate().map(|(row, mut levels)| {
        levels[0] = DTYPES.iter().position(|dtype| *dtype == FAST[levels[0]]).unwrap_or_default();
        (format!("definition/fast_{row:03}"), levels)
    });
    pairs.chain(random).chain(fast).collect()
}
