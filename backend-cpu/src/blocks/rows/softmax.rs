//! The online softmax of a row.

use fmha_core::DType;

use super::BLOCK_KEYS;
use crate::simd::{Op, Simd, exp};

/// The running state of one query.
#[derive(Clone, Copy)]
pub(crate) struct RowSums {
    pub(crate) row_max: f32,
    pub(crate) row_sum: f32,
}

impl RowSums {
    /// Statistics before any key is seen.
    pub(crate) const EMPTY: Self = Self { row_max: f32::NEG_INFINITY, row_sum: 0.0 };

    /// The maximum to subtract: −inf − −inf would be NaN.
    #[inline(always)]
    pub(crate) fn base(self) -> f32 {
        if self.row_max == f32::NEG_INFINITY { 0.0 } else { self.row_max }
    }

    /// Raises the running maximum to a block's maximum. Returns an exponent x: earlier sums must be multiplied by
    /// `e^x`; x is 0 if the maximum did not change.
    #[inline(always)]
    fn raise_to(&mut self, most: f32) -> f32 {
        let old = self.row_max;
        self.row_max = if most > old { most } else { old };
        if old == self.row_max { 0.0 } else { old - self.base() }
    }
}

/// `e^x` of one number, bit-equal to a vector's lane.
#[inline(always)]
pub(crate) fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than sixteen lanes.
    unsafe { s.store(lanes.as_mut_ptr(), exp(s, s.splat(x))) };
    lanes[0]
}

/// Converts a query's block of scores to probabilities, in place, rounded to `round` if that is a 16-bit type, and
/// updates its running state. Earlier sums must then be multiplied by `alpha`.
pub(crate) struct SoftmaxRow<'a> {
    /// Scores of [`BLOCK_KEYS`] keys, −inf where a key is hidden or absent.
    pub(crate) scores: *mut f32,
    pub(crate) state: &'a mut RowSums,
    pub(crate) alpha: &'a mut f32,
    pub(crate) round: DType,
}

impl<S: Simd> Op<S> for SoftmaxRow<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { scores, state, alpha, round } = self;
        // SAFETY: a block of scores.
        unsafe {
            let fall = state.raise_to(largest_of_block(s, scores));
            *alpha = if fall == 0.0 { 1.0 } else { exp_one(s, fall) };
            state.row_sum = state.row_sum * *alpha + exponentials(s, scores, state.base(), round);
        }
    }
}

/// Rows that are processed together: their factors fill at least one vector.
const TOGETHER: usize = 16;

/// [`SoftmaxRow`] for rows that see all of a block, in steps that interleave with other work. Bits are equal to
/// [`SoftmaxRow`]'s, and no branch depends on whether a row has a new maximum.
pub(crate) struct SoftmaxRows<'a> {
    /// [`BLOCK_KEYS`] for each row.
    pub(crate) scores: *mut f32,
    pub(crate) sums: &'a mut [RowSums],
    /// Factor of each row's earlier sums, with room for a multiple of sixteen rows.
    pub(crate) alpha: *mut f32,
    pub(crate) round: DType,
    /// Number of steps, the number of work items due for each row, and the number of steps done.
    steps: usize,
    due: usize,
    done: usize,
}

impl<'a> SoftmaxRows<'a> {
    pub(crate) fn new(scores: *mut f32, sums: &'a mut [RowSums], alpha: *mut f32, round: DType) -> Self {
        Self { scores, sums, alpha, round, steps: 1, due: 0, done: 0 }
    }

    /// Updates the maxima and the factors of the earlier sums.
    #[inline(always)]
    pub(super) fn begin<S: Simd>(&mut self, s: S, steps: usize) {
        self.steps = steps.max(1);
        for (n, sums) in self.sums.chunks_mut(TOGETHER).enumerate() {
            let mut fall = [0.0f32; TOGETHER];
            // SAFETY: a block of scores is whole vectors; sixteen factors.
            unsafe {
                for (row, (sums, fall)) in sums.iter_mut().zip(&mut fall).enumerate() {
                    let scores = self.scores.add((n * TOGETHER + row) * BLOCK_KEYS);
                    *fall = sums.raise_to(largest_of_block(s, scores));
                }
                for at in (0..TOGETHER).step_by(S::LANES) {
                    s.store(self.alpha.add(n * TOGETHER + at), exp(s, s.load(fall.as_ptr().add(at))));
                }
            }
        }
    }

    /// Processes the rows that are due after each of the product's steps.
    #[inline(always)]
    pub(super) fn go_on<S: Simd>(&mut self, s: S) {
        self.due += self.sums.len();
        while self.due >= self.steps {
            self.due -= self.steps;
            self.row(s);
        }
    }

    /// Processes the rows that are left.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&mut self, s: S) {
        while self.done < self.sums.len() {
            self.row(s);
        }
    }

    /// Processes the next row of scores.
    #[inline(always)]
    fn row<S: Simd>(&mut self, s: S) {
        let Some(sums) = self.sums.get_mut(self.done) else { return };
        // SAFETY: a row's scores and factor.
        unsafe {
            let scores = self.scores.add(self.done * BLOCK_KEYS);
            let sum = exponentials(s, scores, sums.base(), self.round);
            sums.row_sum = sums.row_sum * *self.alpha.add(self.done) + sum;
        }
        self.done += 1;
    }
}

/// # Safety
/// [`BLOCK_KEYS`] f32 are readable at `scores`.
#[inline(always)]
unsafe fn largest_of_block<S: Simd>(s: S, scores: *const f32) -> f32 {
    let mut most = s.splat(f32::NEG_INFINITY);
    for at in (0..BLOCK_KEYS).step_by(S::LANES) {
        // A NaN leaves the maximum alone and shows in P.
        // SAFETY: the caller's promise; a block is whole vectors.
        most = s.max(unsafe { s.load(scores.add(at)) }, most);
    }
    s.largest(most)
}

/// Replaces scores by `e^(score - base)`, rounded to `round` if that is a 16-bit type; returns the sum before
/// rounding.
///
/// # Safety
/// `scores` points to [`BLOCK_KEYS`] f32.
#[inline(always)]
unsafe fn exponentials<S: Simd>(s: S, scores: *mut f32, base: f32, round: DType) -> f32 {
    let mut sum = s.splat(0.0);
    for at in (0..BLOCK_KEYS).step_by(S::LANES) {
        // SAFETY: the caller keeps the contract of `exponentials`; a block is whole vectors.
        unsafe {
            let p = exp(s, s.sub(s.load(scores.add(at)), s.splat(base)));
            sum = s.add(sum, p);
            let kept = match round {
                DType::Bf16 => s.round_to_bf16(p),
                DType::F16 => s.round_to_f16(p),
                _ => p,
            };
            s.store(scores.add(at), kept);
        }
    }
    s.sum(sum)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::simd::Portable;

    /// The softmax runs over two blocks, so that the second one rescales.
    #[test]
    fn probabilities_of_a_row_are_rounded_to_the_type_of_v_and_their_sums_are_not() {
        let softmax = |round: DType| {
            let (mut state, mut alpha) = (RowSums::EMPTY, 0.0);
            let blocks = [3.7, 9.1].map(|scale: f32| {
                let mut scores: [f32; BLOCK_KEYS] =
                    std::array::from_fn(|at| (at * 37 % BLOCK_KEYS) as f32 / BLOCK_KEYS as f32 * scale);
                let (state, alpha) = (&mut state, &mut alpha);
                Portable.run(SoftmaxRow { scores: scores.as_mut_ptr(), state, alpha, round });
                scores
            });
            (blocks.concat(), [state.row_max, state.row_sum, alpha])
        };
        let (exact, state) = softmax(DType::F32);
        let in_f16: Vec<f32> = exact.iter().map(|&p| f16::from_f32(p).to_f32()).collect();
        let in_bf16: Vec<f32> = exact.iter().map(|&p| bf16::from_f32(p).to_f32()).collect();
        assert!(in_f16 != exact && in_bf16 != exact && state[2] < 1.0);
        assert!(softmax(DType::F16) == (in_f16, state));
        assert!(softmax(DType::Bf16) == (in_bf16, state));
    }
    /// Rows processed step by step have bits equal to each alone: twenty rows in seven steps and a rest. The second
    /// block has new maxima for some rows, and one row has no visible keys.
    #[test]
    fn rows_step_by_step_have_the_bits_of_each_alone() {
        const ROWS: usize = 20;
        let (mut alone, mut together) = ([RowSums::EMPTY; ROWS], [RowSums::EMPTY; ROWS]);
        let (mut alphas, mut alpha) = ([0.0f32; ROWS], [0.0f32; 2 * TOGETHER]);
        for scale in [3.7, 9.1, 2.0f32] {
            let score = |at: usize| match at / BLOCK_KEYS {
                7 => f32::NEG_INFINITY,
                row => {
                    ((at * 37 + row * row * 11) % 97) as f32 / 97.0 * if row % 3 == 0 { 3.7 } else { scale }
                }
            };
            let mut one: Vec<f32> = (0..ROWS * BLOCK_KEYS).map(score).collect();
            let mut other = one.clone();
            for (row, (state, alpha)) in alone.iter_mut().zip(&mut alphas).enumerate() {
                let scores = one[row * BLOCK_KEYS..].as_mut_ptr();
                Portable.run(SoftmaxRow { scores, state, alpha, round: DType::Bf16 });
            }
            let mut rows =
                SoftmaxRows::new(other.as_mut_ptr(), &mut together, alpha.as_mut_ptr(), DType::Bf16);
            rows.begin(Portable, 7);
            (0..6).for_each(|_| rows.go_on(Portable));
            assert_eq!(rows.done, 6 * ROWS / 7);
            rows.finish(Portable);
            let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            let states =
                |all: &[RowSums]| all.iter().flat_map(|s| [s.row_max, s.row_sum]).collect::<Vec<f32>>();
            assert_eq!(bits(&one), bits(&other));
            assert_eq!(bits(&alphas), bits(&alpha[..ROWS]));
            assert_eq!(bits(&states(&alone)), bits(&states(&together)));
        }
    }
}
