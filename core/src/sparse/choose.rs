//! The greatest scores of a row.

use std::cmp::Ordering;
use std::ops::Range;

/// The order in which keys are chosen: greater scores first, equal ones by their positions, NaN last of all. It is
/// total, so the same scores give the same list everywhere.
#[must_use]
pub fn before(a: (f32, u32), b: (f32, u32)) -> Ordering {
    let scores = match (a.0.is_nan(), b.0.is_nan()) {
        (false, false) => b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal),
        (a, b) => a.cmp(&b),
    };
    scores.then(a.1.cmp(&b.1))
}

/// The `list.len()` candidates of greatest score, or all where there are fewer: their positions ascending, and -1 after
/// them. `scores[j]` is that of key `j`; candidates that have none are left out.
pub fn choose(scores: &[f32], candidates: Range<u32>, list: &mut [i32]) {
    let candidates = within(scores, candidates);
    let mut keys: Vec<(f32, u32)> = candidates.map(|j| (scores[j as usize], j)).collect();
    keys.sort_by(|&a, &b| before(a, b));
    keys.truncate(list.len());
    write(keys.into_iter().map(|(_, j)| j).collect(), list);
}

/// Chooses blocks as [`choose`] does; those of `forced` that are candidates come before all others, the first
/// of them first.
pub fn choose_blocks(scores: &[f32], candidates: Range<u32>, forced: &[u32], list: &mut [i32]) {
    let candidates = within(scores, candidates);
    let mut chosen: Vec<u32> = Vec::new();
    for &block in forced {
        if candidates.contains(&block) && !chosen.contains(&block) && chosen.len() < list.len() {
            chosen.push(block);
        }
    }
    let rest = candidates.filter(|block| !chosen.contains(block));
    let mut rest: Vec<(f32, u32)> = rest.map(|block| (scores[block as usize], block)).collect();
    rest.sort_by(|&a, &b| before(a, b));
    let more = list.len() - chosen.len();
    chosen.extend(rest.into_iter().take(more).map(|(_, block)| block));
    write(chosen, list);
}

/// The candidates that have a score.
fn within(scores: &[f32], candidates: Range<u32>) -> Range<u32> {
    let all = u32::try_from(scores.len()).unwrap_or(u32::MAX);
    candidates.start.min(all)..candidates.end.min(all)
}

fn write(mut keys: Vec<u32>, list: &mut [i32]) {
    keys.sort_unstable();
    for (at, entry) in list.iter_mut().enumerate() {
        *entry = keys.get(at).map_or(-1, |&key| key.cast_signed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen<const K: usize>(scores: &[f32], candidates: Range<u32>) -> [i32; K] {
        let mut list = [7; K];
        choose(scores, candidates, &mut list);
        list
    }

    #[test]
    fn candidates_without_a_score_are_left_out() {
        assert_eq!(chosen::<3>(&[1.0, 2.0], 0..9), [0, 1, -1]);
        let mut list = [7; 2];
        choose_blocks(&[1.0], 3..5, &[4], &mut list);
        assert_eq!(list, [-1, -1]);
    }

    #[test]
    fn the_greatest_are_chosen_and_equal_scores_by_position() {
        let scores = [1.0, 5.0, -1.0, 5.0, 5.0, 2.0];
        assert_eq!(chosen(&scores, 0..6), [1, 3]);
        assert_eq!(chosen(&scores, 0..6), [1, 3, 4, 5]);
        assert_eq!(chosen(&scores, 2..5), [3, 4]);
        assert_eq!(chosen(&scores, 2..5), [2, 3, 4, -1, -1]);
        assert_eq!(chosen(&scores, 3..3), [-1, -1]);
        assert_eq!(chosen(&[0.0, -0.0, 0.0], 0..3), [0, 1]);
    }

    #[test]
    fn nan_comes_after_every_number() {
        let scores = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -3.0];
        assert_eq!(chosen(&scores, 0..5), [1, 2, 4]);
        assert_eq!(chosen(&scores, 0..5), [0, 1, 2, 4]);
    }

    #[test]
    fn forced_blocks_are_in_whatever_they_score() {
        let mut list = [0; 3];
        choose_blocks(&[0.0, 9.0, 8.0, 7.0, 1.0], 0..5, &[0, 4, 4, 6], &mut list);
        assert_eq!(list, [0, 1, 4]);
        choose_blocks(&[0.0, 9.0], 0..1, &[1, 0], &mut list);
        assert_eq!(list, [0, -1, -1]);
        let mut short = [0];
        choose_blocks(&[0.0, 9.0, 8.0], 0..3, &[2, 0], &mut short);
        assert_eq!(short, [2]);
    }
}
