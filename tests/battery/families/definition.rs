//! Small sizes against the reference: every pair of levels of all axes, and random rows.

use fmha_core::DType;

use super::pairwise::{Levels, pairwise};
use super::recipe::{AXES, DTYPES, axis, random_levels, recipe};
use crate::case::{Case, seed_of};

/// Number of series of pairwise rows: each series contains every pair once more, with other levels besides.
const SERIES: u64 = 5;
const RANDOM: u64 = 500;
/// Types that every fast kernel supports: they have series of their own, so that all pairs of the other axes'
/// levels occur on fast kernels too. Some of these kernels write no keep mask, and support column-major V only in
/// rows of whole 16 bytes.
const FAST: [DType; 2] = [DType::F16, DType::Bf16];
/// Indices of lengths for which a column-major V, also packed, has rows of whole 16 bytes.
const WHOLE_COLUMNS: [usize; 3] = [4, 7, 9];

pub(crate) fn cases() -> Vec<Case> {
    rows().into_iter().map(|(name, levels)| case(&name, &levels)).collect()
}

fn case(name: &str, levels: &Levels) -> Case {
    let made = recipe(levels, seed_of(name));
    Case::forward(format!("{name}/{}", made.label), made.problem, made.lengths, made.data)
}

/// The cases, each with its level on each axis of `AXES`.
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
    let fast = (0..3).flat_map(|series| fast_of(Series::Rows(series)));
    pairs
        .chain(random)
        .chain(fast)
        .chain(fast_of(Series::Columns))
        .chain(fast_of(Series::WithoutDropout))
        .chain(fast_masks())
        .collect()
}

/// Series of problems that nearly every fast kernel supports.
#[derive(Clone, Copy, PartialEq)]
enum Series {
    /// V is row-major, and no keep mask is written.
    Rows(u64),
    /// V is column-major, with rows that are a multiple of 16 bytes.
    Columns,
    /// Keep masks are written in calls without dropout.
    WithoutDropout,
}

fn fast_of(series: Series) -> impl Iterator<Item = (String, Levels)> {
    let mut axes = AXES;
    (axes[axis::DTYPE], axes[axis::V_LAYOUT], axes[axis::WRITES]) = (FAST.len(), 1, 2);
    let (name, seed) = match series {
        Series::Rows(seed) => (format!("fast{seed}"), seed),
        Series::Columns => ("fast_columns".to_owned(), 0),
        Series::WithoutDropout => ("fast_without_dropout".to_owned(), 0),
    };
    match series {
        Series::Rows(_) => {}
        // Sequences have no gaps and rows no padding: both may end within 16 bytes.
        Series::Columns => {
            (axes[axis::SEQUENCES], axes[axis::LENGTHS], axes[axis::LAYOUT]) = (3, WHOLE_COLUMNS.len(), 2);
        }
        Series::WithoutDropout => (axes[axis::DROPS], axes[axis::WRITES]) = (2, 3),
    }
    pairwise(&axes, 0xfa57 + seed).into_iter().enumerate().map(move |(row, mut levels)| {
        let dtype = FAST[levels[axis::DTYPE]];
        levels[axis::DTYPE] = DTYPES.iter().position(|one| *one == dtype).unwrap_or_default();
        if series == Series::Columns {
            levels[axis::V_LAYOUT] = 1;
            levels[axis::LENGTHS] = WHOLE_COLUMNS[levels[axis::LENGTHS]];
        }
        (format!("definition/{name}_{row:03}"), levels)
    })
}

/// FP8 with every mask, otherwise plain: fast kernels support few of the pairwise rows of these types, most of
/// which have odd strides.
fn fast_masks() -> impl Iterator<Item = (String, Levels)> {
    [DType::E4m3Fn, DType::E5m2].into_iter().flat_map(|dtype| {
        (0..AXES[axis::MASK]).map(move |mask| {
            let mut levels = vec![0; AXES.len()];
            levels[axis::DTYPE] = DTYPES.iter().position(|one| *one == dtype).unwrap_or_default();
            (levels[axis::MASK], levels[axis::LENGTHS]) = (mask, mask % AXES[axis::LENGTHS]);
            (format!("definition/fast_masks_{dtype}_{mask:02}"), levels)
        })
    })
}

/// The first level on each axis except the two of `pair`, to test whether a kernel supports that pair.
#[must_use]
pub fn plain_with(dtype: usize, pair: [usize; 4]) -> Case {
    let mut levels = vec![0; AXES.len()];
    levels[axis::DTYPE] = dtype;
    let [a, x, b, y] = pair;
    (levels[a], levels[b]) = (x, y);
    case(&format!("definition/plain_{pair:?}"), &levels)
}
