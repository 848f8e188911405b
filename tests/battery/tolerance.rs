//! Bound of a result's distance from the reference.
//!
//! The contract promises `max |O - O_ref| <= 2 max |O_same - O_ref| + eps` (gradients: 3), with
//! `O_ref` in f64 and `O_same` the plain algorithm in the input's precision. `O_same` is one draw of
//! the rounding errors that any sound kernel makes; over many elements its largest is a fair measure,
//! over few it may be exact by luck. So `eps` is what the errors of one element can be:
//!
//! - Storing O rounds once: at most `u_out |O|`, or half the smallest subnormal.
//! - P (backward: P and dS) is rounded to the input's type: independent errors of at most `u_inner`
//!   in the terms of a sum move it by `u_inner` times its *spread*, the root of the sum of their
//!   squares; twice that is beyond three standard deviations of a rounding error (`u / sqrt 3`).
//! - f32 arithmetic: a score of size `logits` is off by a few `u_32 logits`, so its exponential is
//!   off by that share, and the exponential itself and the sums by a few `u_32`.
//!
//! Far rows (`reference::is_far`) have scores that f32 tells apart to a tenth at most, so that their P may be
//! anything; but P are shares of 1: of an element's terms in far rows that last share is their own size, not
//! more. Elements that such terms are in are judged apart from all others, whose bounds they leave alone.
//!
//! The largest error is insensitive: a gain of 1 % hides in bf16. The root mean square is not: over
//! `count` elements that of `O_same` is known to a share of `1 / sqrt(count)`, so `rmse <= 2 rmse_same`
//! with an `eps` that shrinks alike. f32's part does not shrink: an approximate `exp` may be biased.

use fmha_core::DType;

/// Inputs of a bound, over the elements that are checked together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Yardstick {
    /// Factor of the plain algorithm's error: 2, or 3 for gradients.
    pub factor: f64,
    /// Largest error of the plain algorithm in the input's precision.
    pub max_same: f64,
    /// Root mean square error of the plain algorithm in the input's precision.
    pub rmse_same: f64,
    /// Unit roundoff of the stored type.
    pub u_out: f64,
    /// Smallest subnormal of the stored type.
    pub tiny_out: f64,
    /// Unit roundoff of P and dS.
    pub u_inner: f64,
    /// Largest magnitude of the reference, and its root mean square.
    pub reference: MaxRms,
    /// Largest spread, and its root mean square.
    pub spread: MaxRms,
    /// Bound of the scores' magnitude, far rows excluded.
    pub logits: f64,
    /// Largest size of an element's terms in far rows, and its root mean square.
    pub far: MaxRms,
    /// Bound of the scores' magnitude in far rows.
    pub far_logits: f64,
    /// Number of elements.
    pub count: u64,
}

/// Largest magnitude and root mean square of some numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MaxRms {
    /// The largest magnitude.
    pub max: f64,
    /// The root mean square of the magnitudes.
    pub rms: f64,
}

/// Largest errors that a tensor's elements may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// The largest error of one element.
    pub max: f64,
    /// The largest root mean square of the errors.
    pub rmse: f64,
}

/// Relative error of f32 arithmetic from a score of size `logits` to its share of a sum.
#[must_use]
pub fn f32_error(logits: f64) -> f64 {
    8.0 * DType::F32.unit_roundoff() * (2.0 + logits)
}

/// Largest errors that the elements measured in `y` may have, as the module's text derives them.
#[must_use]
pub fn bound(y: &Yardstick) -> Bound {
    let f32_share = f32_error(y.logits);
    let far_share = f32_error(y.far_logits).min(1.0);
    let size = |m: fn(&MaxRms) -> f64| m(&y.spread).max(m(&y.reference));
    let store = |m: fn(&MaxRms) -> f64| y.u_out * m(&y.reference) + y.tiny_out / 2.0;
    let max = |m: &MaxRms| m.max;
    let rms = |m: &MaxRms| m.rms;
    let eps_max = store(max) + 2.0 * y.u_inner * y.spread.max + f32_share * size(max) + far_share * y.far.max;
    let shrinking = (store(rms) + 2.0 * y.u_inner * y.spread.rms) / (y.count.max(1) as f64).sqrt();
    let eps_rmse = shrinking + f32_share * size(rms) + far_share * y.far.rms;
    Bound { max: y.factor * y.max_same + eps_max, rmse: y.factor * y.rmse_same + eps_rmse }
}

/// Bound on an LSE's distance from the reference: LSE is computed in f32 whatever the inputs, and stored in
/// f32. A matrix unit that sums scores shorter, as a plan says, has done so in `max_same` too.
#[must_use]
pub fn lse_bound(max_same: f64, logits: f64, max_lse: f64) -> Bound {
    let max = 2.0 * max_same + f32_error(logits + max_lse);
    Bound { max, rmse: max }
}

/// Smallest subnormal number of a type; half of it is the largest error of storing a number near 0.
#[must_use]
pub fn smallest_subnormal(dtype: DType) -> f64 {
    2f64.powi(match dtype {
        DType::F32 => -149,
        DType::F16 => -24,
        DType::Bf16 => -133,
        DType::E4m3Fn => -9,
        DType::E5m2 => -16,
        DType::E4m3Fnuz => -10,
        DType::E5m2Fnuz => -17,
    })
}

/// The least accepted cosine between a forward result and the reference, however inaccurate the plain algorithm is:
/// a lower limit besides the relative rule, far above what any of these types needs.
#[must_use]
pub fn least_cosine(u_out: f64, u_inner: f64) -> f64 {
    let u = u_out.max(u_inner).max(1e-5);
    1.0 - u * u - 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yardstick(dtype: DType, count: u64) -> Yardstick {
        let u = dtype.unit_roundoff();
        Yardstick {
            factor: 2.0,
            max_same: 0.7 * u,
            rmse_same: 0.4 * u * 0.25,
            u_out: u,
            tiny_out: smallest_subnormal(dtype),
            u_inner: u,
            reference: MaxRms { max: 1.0, rms: 0.25 },
            spread: MaxRms { max: 1.0, rms: 0.25 },
            logits: 10.0,
            far: MaxRms::default(),
            far_logits: 0.0,
            count,
        }
    }

    #[test]
    fn a_gain_of_one_percent_is_beyond_the_bound_of_every_wide_type() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let bound = bound(&yardstick(dtype, 4096));
            assert!(bound.rmse < 0.01 * 0.25, "{dtype}: {bound:?}");
        }
    }

    #[test]
    fn one_rounding_of_an_element_is_within_it_though_the_plain_algorithm_was_exact() {
        for dtype in DType::ALL {
            let lucky = Yardstick { max_same: 0.0, rmse_same: 0.0, ..yardstick(dtype, 1) };
            let lucky = Yardstick { reference: MaxRms { max: 1.0, rms: 1.0 }, ..lucky };
            let bound = bound(&lucky);
            assert!(bound.max >= dtype.unit_roundoff() && bound.rmse >= dtype.unit_roundoff(), "{dtype}");
        }
    }
}
