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
    /// Nothing seen.
    pub(crate) const EMPTY: Self = Self { row_max: f32::NEG_INFINITY, row_sum: 0.0 };

    /// The maximum to subtract: −inf − −inf would be NaN.
    #[inline(always)]
    pub(crate) fn base(self) -> f32 {
        if self.row_max == f32::NEG_INFINITY { 0.0 } else { self.row_max }
    }
}

/// `e^x` of one number, to the bits that a vector of it has.
#[inline(always)]
pub(crate) fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than sixteen lanes.
    unsafe { s.store(lanes.as_mut_ptr(), exp(s, s.splat(x))) };
    lanes[0]
}

/// A query's block of scores to probabilities, in place, rounded to `round` when that is a 16-bit type, and
/// its running state. What was summed before is to be multiplied by `alpha`.
pub(crate) struct SoftmaxRow<'a> {
    /// [`BLOCK_KEYS`], −inf where a key is hidden or there is none.
    pub(crate) scores: *mut f32,
    pub(crate) state: &'a mut RowSums,
    pub(crate) alpha: &'a mut f32,
    pub(crate) round: DType,
}

impl<S: Simd> Op<S> for SoftmaxRow<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { scores, state, alpha, round } = self;
        let old = state.row_max;
        // SAFETY: a block of scores is whole vectors.
        unsafe {
            let mut most = s.splat(f32::NEG_INFINITY);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                // A NaN leaves the maximum alone and shows in P.
                most = s.max(s.load(scores.add(at)), most);
            }
            let most = s.largest(most);
            state.row_max = if most > old { most } else { old };
            let base = state.base();
            *alpha = if old == state.row_max { 1.0 } else { exp_one(s, old - base) };
            let mut sum = s.splat(0.0);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                let p = exp(s, s.sub(s.load(scores.add(at)), s.splat(base)));
                sum = s.add(sum, p);
                let kept = match round {
                    DType::Bf16 => s.round_to_bf16(p),
                    DType::F16 => s.round_to_f16(p),
                    _ => p,
                };
                s.store(scores.add(at), kept);
            }
            state.row_sum = state.row_sum * *alpha + s.sum(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::simd::Portable;

    /// Twice, so that the second block rescales.
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
}
