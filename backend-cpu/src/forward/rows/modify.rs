//! Changes to a row's block of scores before the softmax, and to its weights after the softmax.

use crate::blocks::BLOCK_KEYS;
use crate::score::HeadScore;
use crate::simd::{Op, Simd, tanh};

/// Soft-cap, bias and ALiBi of a row's block of scores.
pub(super) struct Modify<'a> {
    pub(super) head: &'a HeadScore,
    pub(super) i: u32,
    pub(super) j: u32,
    pub(super) count: usize,
    pub(super) scores: *mut f32,
}

impl<S: Simd> Op<S> for Modify<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { head, i, j, count, scores } = self;
        // SAFETY: a row's block of scores; the bias has an element for each query and key.
        unsafe {
            if let Some(softcap) = head.softcap {
                let cap = s.splat(softcap);
                for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                    let x = s.div(s.load(scores.add(at)), cap);
                    s.store(scores.add(at), s.mul(cap, tanh(s, x)));
                }
            }
            for key in 0..count {
                if let Some(bias) = head.bias {
                    *scores.add(key) += bias.get(i as usize, j as usize + key);
                }
                if let Some(distance) = head.alibi_term(i, j + key as u32) {
                    *scores.add(key) += distance;
                }
            }
        }
    }
}

/// Sets the weights of dropped keys to 0; `1 / (1 - p_drop)` is a factor of the whole row.
pub(super) fn drop_weights(head: &HeadScore, i: u32, j: u32, count: usize, weights: *mut f32) {
    for key in 0..count {
        if !head.keep.keep(i, j + key as u32) {
            // SAFETY: a row's block of weights.
            unsafe { *weights.add(key) = 0.0 };
        }
    }
}
