//! The greatest scores of a row.

use std::cmp::Ordering;
use std::ops::Range;

use crate::error::Result;
use crate::host_memory::reserve;

/// The order in which keys are chosen: greater scores first, equal scores by position, NaN last. The order is
/// total, so equal scores give the same list on every backend.
#[must_use]
pub fn before(a: (f32, u32), b: (f32, u32)) -> Ordering {
    let scores = match (a.0.is_nan(), b.0.is_nan()) {
        (false, false) => b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal),
        (a, b) => a.cmp(&b),
    };
    scores.then(a.1.cmp(&b.1))
}

/// Writes the positions of the `list.len()` candidates with the greatest scores, or of all if there are fewer,
/// ascending, followed by -1. `scores[j]` is the score of key `j`; candidates without a score are left out.
///
/// # Errors
/// Memory that the system refuses, before anything is written.
pub fn choose(scores: &[f32], candidates: Range<u32>, list: &mut [i32]) -> Result<()> {
    let candidates = within(scores, candidates);
    let mut keys: Vec<(f32, u32)> = reserve(candidates.len())?;
    keys.extend(candidates.map(|j| (scores[j as usize], j)));
    // The order has no equal elements, so an unstable sort gives the same result as a stable one.
    keys.sort_unstable_by(|&a, &b| before(a, b));
    keys.truncate(list.len());
    write(&mut keys, list);
    Ok(())
}

/// Chooses blocks as [`choose`] does keys. Blocks of `forced` that are candidates are chosen before all others, in
/// the order of `forced`.
///
/// # Errors
/// Memory that the system refuses, before anything is written.
pub fn choose_blocks(scores: &[f32], candidates: Range<u32>, forced: &[u32], list: &mut [i32]) -> Result<()> {
    let candidates = within(scores, candidates);
    let mut chosen: Vec<(f32, u32)> = reserve(candidates.len())?;
    for &block in forced {
        let is_new = candidates.contains(&block) && chosen.iter().all(|&(_, other)| other != block);
        if is_new && chosen.len() < list.len() {
            chosen.push((scores[block as usize], block));
        }
    }
    let num_forced = chosen.len();
    for block in candidates {
        if chosen[..num_forced].iter().all(|&(_, other)| other != block) {
            chosen.push((scores[block as usize], block));
        }
    }
    chosen[num_forced..].sort_unstable_by(|&a, &b| before(a, b));
    chosen.truncate(list.len());
    write(&mut chosen, list);
    Ok(())
}

/// The candidates that have a score.
fn within(scores: &[f32], candidates: Range<u32>) -> Range<u32> {
    let all = u32::try_from(scores.len()).unwrap_or(u32::MAX);
    candidates.start.min(all)..candidates.end.min(all)
}

fn write(keys: &mut [(f32, u32)], list: &mut [i32]) {
    keys.sort_unstable_by_key(|&(_, key)| key);
    for (at, entry) in list.iter_mut().enumerate() {
        *entry = keys.get(at).map_or(-1, |&(_, key)| key.cast_signed());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;

    fn chosen<const K: usize>(scores: &[f32], candidates: Range<u32>) -> [i32; K] {
        let mut list = [7; K];
        choose(scores, candidates, &mut list).unwrap();
        list
    }

    #[test]
    fn candidates_without_a_score_are_left_out() {
        assert_eq!(chosen::<3>(&[1.0, 2.0], 0..9), [0, 1, -1]);
        let mut list = [7; 2];
        choose_blocks(&[1.0], 3..5, &[4], &mut list).unwrap();
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
        choose_blocks(&[0.0, 9.0, 8.0, 7.0, 1.0], 0..5, &[0, 4, 4, 6], &mut list).unwrap();
        assert_eq!(list, [0, 1, 4]);
        choose_blocks(&[0.0, 9.0], 0..1, &[1, 0], &mut list).unwrap();
        assert_eq!(list, [0, -1, -1]);
        let mut short = [0];
        choose_blocks(&[0.0, 9.0, 8.0], 0..3, &[2, 0], &mut short).unwrap();
        assert_eq!(short, [2]);
    }
}
