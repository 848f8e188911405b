//! Dropout by position: the same mask on every device and in every kernel.

use crate::args::ScoreArgs;
use crate::error::ProblemError;
use crate::problem::FwdProblem;

/// One block of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#[must_use]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let product = |multiplier: u32, word: u32| {
            let wide = u64::from(multiplier) * u64::from(word);
            ((wide >> 32) as u32, wide as u32)
        };
        let (high0, low0) = product(MULTIPLIERS[0], counter[0]);
        let (high1, low1) = product(MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

/// Position of the random generator, chosen per call, so that a training step never repeats a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DropoutSeed {
    /// The key of the generator.
    pub seed: u64,
    /// The last word of the counter (its low 32 bits).
    pub offset: u64,
}

impl ScoreArgs<'_> {
    /// Position of the generator for a call; 0 without dropout.
    ///
    /// # Errors
    /// A problem with dropout but a call without a seed: all calls would then use one mask.
    #[inline]
    pub fn seed(&self, problem: &FwdProblem) -> Result<DropoutSeed, ProblemError> {
        let p_drop = problem.dropout.p_drop;
        match self.dropout {
            Some(seed) => Ok(seed),
            None if p_drop > 0.0 => Err(ProblemError::new(
                "dropout",
                format!("dropout has no seed, but p_drop is {p_drop}: calls without one would drop alike"),
            )),
            None => Ok(DropoutSeed::default()),
        }
    }
}

/// The keep decision for every score of one (batch, head).
///
/// Decides by position alone: key j, query i inside the sequence, the sequence's index and the
/// query head. `keep iff word < floor((1 - p_drop) * 2^32)`.
#[derive(Clone, Copy, Debug)]
pub struct KeepMask {
    key: [u32; 2],
    head: u32,
    offset: u32,
    threshold: u64,
    position_q: u32,
    position_k: u32,
}

impl KeepMask {
    /// The keep mask of sequence `i_batch` and query head `i_head`.
    #[must_use]
    pub fn new(p_drop: f32, at: DropoutSeed, i_batch: u32, i_head: u32, num_heads_q: u32) -> Self {
        Self {
            key: [at.seed as u32, (at.seed >> 32) as u32],
            head: i_batch.wrapping_mul(num_heads_q).wrapping_add(i_head),
            offset: at.offset as u32,
            threshold: keep_threshold(p_drop),
            position_q: 0,
            position_k: 0,
        }
    }

    /// Mask of a call whose query 0 and key 0 stand at these positions of the sequence.
    #[must_use]
    pub fn from(self, position_q: u32, position_k: u32) -> Self {
        Self { position_q, position_k, ..self }
    }

    /// Keep flags of keys `4 * j_quad .. 4 * j_quad + 4` for query `i`: one call of the generator.
    #[must_use]
    #[inline]
    pub fn quad(&self, i: u32, j_quad: u32) -> [bool; 4] {
        let i = i.wrapping_add(self.position_q);
        let words = |j_quad: u32| philox4x32_10([j_quad, i, self.head, self.offset], self.key);
        let first = j_quad.wrapping_add(self.position_k / 4);
        let kept = |word: u32| u64::from(word) < self.threshold;
        match (self.position_k % 4) as usize {
            0 => words(first).map(kept),
            // The four keys lie in two groups of four of the sequence.
            skipped => {
                let (one, two) = (words(first), words(first.wrapping_add(1)));
                std::array::from_fn(|word| {
                    let at = skipped + word;
                    kept(if at < 4 { one[at] } else { two[at - 4] })
                })
            }
        }
    }

    /// Whether the score of query `i` and key `j` is kept.
    #[must_use]
    pub fn keep(&self, i: u32, j: u32) -> bool {
        self.quad(i, j / 4)[(j % 4) as usize]
    }
}

/// Threshold `floor((1 - p_drop) * 2^32)`, in 64 bits, since it is 2^32 (keep all) if `p_drop` is 0.
#[must_use]
pub fn keep_threshold(p_drop: f32) -> u64 {
    ((1.0 - f64::from(p_drop)) * 4_294_967_296.0) as u64
}

/// Factor `1 / (1 - p_drop)` by which a kept probability is multiplied.
#[must_use]
pub fn keep_scale(p_drop: f32) -> f64 {
    1.0 / (1.0 - f64::from(p_drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        let ones = u32::MAX;
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn four_keys_share_one_call_of_the_generator_and_each_has_its_own_word() {
        let mask = KeepMask::new(0.5, DropoutSeed { seed: 1, offset: 2 }, 1, 1, 4);
        for (i, j) in (0..20).flat_map(|i| (0..20).map(move |j| (i, j))) {
            let words = philox4x32_10([j / 4, i, 5, 2], [1, 0]);
            assert_eq!(mask.keep(i, j), words[j as usize % 4] < 1 << 31, "{i} {j}");
        }
    }

    #[test]
    fn what_is_kept_makes_up_for_what_is_not() {
        assert_eq!([0.0, 0.5, 0.75].map(keep_scale), [1.0, 2.0, 4.0]);
    }

    #[test]
    fn the_share_kept_is_one_minus_p() {
        for p_drop in [0.0, 0.1, 0.5, 0.9] {
            let mask = KeepMask::new(p_drop, DropoutSeed { seed: 7, offset: 3 }, 1, 2, 4);
            let kept = (0..100)
                .flat_map(|i| (0..100).map(move |j| (i, j)))
                .filter(|&(i, j)| mask.keep(i, j))
                .count();
            let expected = 10_000.0 * (1.0 - f64::from(p_drop));
            assert!((kept as f64 - expected).abs() <= 4.0 * 50.0, "p_drop {p_drop}: {kept}");
            assert!(p_drop > 0.0 || kept == 10_000);
        }
    }

    #[test]
    fn a_word_that_is_the_threshold_is_dropped_and_the_one_below_it_kept() {
        let at = DropoutSeed { seed: 9, offset: 4 };
        let word = |i: u32| philox4x32_10([0, i, 0, 4], [9, 0])[0];
        // A word in the uppermost 2^24 is 2^32 - n with an n that f32 represents exactly: the threshold of p_drop = n /
        // 2^32.
        let i = (0..10_000).find(|&i| word(i) > 0xff00_0000).unwrap();
        let n = word(i).wrapping_neg();
        let p_drop = |n: u32| n as f32 / 4_294_967_296.0;
        assert_eq!(keep_threshold(p_drop(n)), u64::from(word(i)));
        let keeps = |n| KeepMask::new(p_drop(n), at, 0, 0, 1).keep(i, 0);
        assert_eq!([keeps(n), keeps(n - 1)], [false, true]);
    }

    #[test]
    fn every_coordinate_of_the_counter_matters() {
        let base = |i_batch, i_head, offset| {
            let mask = KeepMask::new(0.5, DropoutSeed { seed: 1, offset }, i_batch, i_head, 4);
            (0..64).map(|j| mask.keep(5, j)).collect::<Vec<_>>()
        };
        assert_ne!(base(0, 0, 0), base(1, 0, 0));
        assert_ne!(base(0, 0, 0), base(0, 1, 0));
        assert_ne!(base(0, 0, 0), base(0, 0, 1));
        assert_eq!(base(0, 4, 0), base(1, 0, 0));
    }
}
