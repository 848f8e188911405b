//! Rows of levels that together contain every pair of levels of every two axes.

use crate::init::mix;

/// One level of each axis.
pub(crate) type Levels = Vec<usize>;

/// Few rows that contain every pair of levels of every two axes. The method is greedy, after Cohen et al., "The
/// AETG System" (1997): among some random rows with a missing pair, the one with the most missing pairs is taken.
pub(crate) fn pairwise(axes: &[usize], seed: u64) -> Vec<Levels> {
    let mut missing: Vec<[usize; 4]> = Vec::new();
    for a in 0..axes.len() {
        for b in a + 1..axes.len() {
            missing.extend((0..axes[a]).flat_map(|x| (0..axes[b]).map(move |y| [a, x, b, y])));
        }
    }
    let holds = |row: &Levels, &[a, x, b, y]: &[usize; 4]| row[a] == x && row[b] == y;
    let mut rows = Vec::new();
    let mut word = seed;
    while !missing.is_empty() {
        let best = (0..24)
            .map(|_| {
                word = mix(word);
                let [a, x, b, y] = missing[word as usize % missing.len()];
                let mut row = random(axes, word);
                (row[a], row[b]) = (x, y);
                row
            })
            .max_by_key(|row| missing.iter().filter(|pair| holds(row, pair)).count());
        let Some(best) = best else { break };
        missing.retain(|pair| !holds(&best, pair));
        rows.push(best);
    }
    rows
}

/// Draws a level of each axis from `seed`.
pub(crate) fn random(axes: &[usize], seed: u64) -> Levels {
    axes.iter().enumerate().map(|(axis, &levels)| mix(seed ^ mix(axis as u64)) as usize % levels).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_levels_meets_in_some_row() {
        let axes = [3, 2, 5, 4, 2];
        let rows = pairwise(&axes, 1);
        for a in 0..axes.len() {
            for b in a + 1..axes.len() {
                for (x, y) in (0..axes[a]).flat_map(|x| (0..axes[b]).map(move |y| (x, y))) {
                    assert!(rows.iter().any(|row| row[a] == x && row[b] == y), "{a}={x} {b}={y}");
                }
            }
        }
        assert!(rows.len() < 40, "{}", rows.len());
    }
}
