//! Scores of blocks.

use std::ops::Range;

use crate::error::{ProblemError, ensure};

/// Writes the greatest score of each block's candidates; -inf for a block without candidates, NaN if one score is
/// NaN.
///
/// `scores[j]` is that of key `j`; block `b` has the keys from `b * block` up to `(b + 1) * block` or the last key.
/// `maxima` has an element for each block.
///
/// # Errors
/// A block of 0 keys, and `maxima` of another length than there are blocks.
pub fn block_maxima(
    scores: &[f32],
    candidates: Range<u32>,
    block: u32,
    maxima: &mut [f32],
) -> Result<(), ProblemError> {
    ensure!(block >= 1, "block", "block {block} is not at least 1");
    let (size, blocks) = (block as usize, scores.len().div_ceil(block as usize));
    ensure!(
        maxima.len() == blocks,
        "maxima",
        "maxima has {} elements, but {blocks} are wanted",
        maxima.len()
    );
    let (first, end) = (candidates.start as usize, (candidates.end as usize).min(scores.len()));
    for (b, maximum) in maxima.iter_mut().enumerate() {
        let keys = (b * size).max(first)..((b + 1) * size).min(end);
        let keys = scores.get(keys).unwrap_or_default();
        *maximum = keys.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a || b.is_nan() { b } else { a });
        if keys.iter().any(|score| score.is_nan()) {
            *maximum = f32::NAN;
        }
    }
    Ok(())
}

/// Sizes of the compressed blocks and of the blocks that are chosen (NSA's l, d and l').
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockOverlap {
    /// Number of tokens of a compressed block: a multiple of `stride`.
    pub compressed: u32,
    /// Number of tokens from the start of a compressed block to the start of the next.
    pub stride: u32,
    /// Number of tokens of a block that can be chosen: a multiple of `stride`.
    pub selected: u32,
}

impl BlockOverlap {
    pub(super) fn check(self) -> Result<(), ProblemError> {
        let Self { compressed, stride, selected } = self;
        ensure!(stride >= 1, "stride", "stride {stride} is not at least 1");
        for (field, value) in [("compressed", compressed), ("selected", selected)] {
            ensure!(
                value >= stride && value.is_multiple_of(stride),
                field,
                "{field} {value} is not a multiple of stride {stride}"
            );
        }
        Ok(())
    }
}

/// Sums the probabilities of compressed blocks over each block's tokens: `sums[j] = sum_m sum_n p[(l' / d) j + m -
/// n]` over `m < l' / d` and `n < l / d`, so a compressed block counts once for each of its strides that lies in
/// block j. The caller adds up the heads that share a selection.
///
/// `probabilities[c]` belongs to the compressed block that begins at token `c * stride`.
///
/// # Errors
/// Sizes that are no multiples of the stride.
pub fn block_sums(
    probabilities: &[f32],
    overlap: BlockOverlap,
    sums: &mut [f32],
) -> Result<(), ProblemError> {
    overlap.check()?;
    let BlockOverlap { compressed, stride, selected } = overlap;
    let (per_block, per_compressed) = (i64::from(selected / stride), i64::from(compressed / stride));
    for (j, sum) in sums.iter_mut().enumerate() {
        let mut total = 0.0f64;
        for m in 0..per_block {
            for n in 0..per_compressed {
                let at = usize::try_from(per_block * j as i64 + m - n).ok();
                total += at.and_then(|at| probabilities.get(at)).map_or(0.0, |&p| f64::from(p));
            }
        }
        *sum = total as f32;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;

    #[test]
    fn a_blocks_maximum_is_of_its_candidates() {
        let scores = [1.0, 3.0, 2.0, -5.0, -4.0, f32::NAN, 9.0];
        let mut maxima = [0.0; 4];
        block_maxima(&scores, 0..7, 2, &mut maxima).unwrap();
        assert_eq!(maxima[..2], [3.0, 2.0]);
        assert!(maxima[2].is_nan() && maxima[3] == 9.0);
        block_maxima(&scores, 2..5, 2, &mut maxima).unwrap();
        assert_eq!(maxima, [f32::NEG_INFINITY, 2.0, -4.0, f32::NEG_INFINITY]);
        let error = block_maxima(&scores, 0..7, 2, &mut maxima[..3]).unwrap_err();
        assert_eq!(error.text, "maxima has 3 elements, but 4 are wanted");
    }

    /// The expected weights count the strides of tokens that a compressed and a chosen block share.
    #[test]
    fn a_compressed_block_counts_once_for_each_stride_of_it_in_a_block() {
        for (compressed, stride, selected) in [(32, 16, 64), (16, 16, 16), (64, 16, 32), (48, 8, 24)] {
            let probabilities: Vec<f32> = (0..40).map(|c| (c * 7 % 13) as f32).collect();
            let mut sums = vec![0.0; 12];
            block_sums(&probabilities, BlockOverlap { compressed, stride, selected }, &mut sums).unwrap();
            for (j, &sum) in sums.iter().enumerate() {
                let block = j as u32 * selected..(j as u32 + 1) * selected;
                let shared = |c: usize| {
                    let tokens = c as u32 * stride..c as u32 * stride + compressed;
                    tokens.end.min(block.end).saturating_sub(tokens.start.max(block.start)) / stride
                };
                let wanted: f32 = probabilities.iter().enumerate().map(|(c, p)| p * shared(c) as f32).sum();
                assert_eq!(sum, wanted, "block {j} of {compressed}, {stride}, {selected}");
            }
        }
        let uneven = BlockOverlap { compressed: 30, stride: 16, selected: 64 };
        assert_eq!(block_sums(&[], uneven, &mut []).unwrap_err().field, "compressed");
    }
}
