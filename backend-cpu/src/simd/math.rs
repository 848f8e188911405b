//! Elementary functions on vectors.

use super::Simd;

/// `e^x`, within 1.2 units in the last place; 0 below −87.7, infinity above 88.8; NaN stays NaN.
///
/// Reduction by a two-part ln 2 (Cody and Waite, "Software Manual for the Elementary Functions",
/// 1980), then `1 + r + r^2 p(r)` with a quartic p fitted for least relative error on
/// |r| <= ln 2 / 2 (3.1e-9 before rounding).
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Bounds first and x second: a NaN in x passes through both.
    let x = s.min(s.splat(89.0), s.max(s.splat(-88.2), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HIGH), x);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let p = s.splat(1.381_459_6e-3);
    let p = s.fma(p, r, s.splat(8.368_717e-3));
    let p = s.fma(p, r, s.splat(4.166_839e-2));
    let p = s.fma(p, r, s.splat(1.666_652_1e-1));
    let p = s.fma(p, r, s.splat(4.999_999_3e-1));
    let p = s.fma(s.mul(r, r), p, r);
    let power = s.power_of_two(n);
    s.fma(p, power, power)
}

/// `tanh x`, within 3 units in the last place; NaN stays NaN.
///
/// Below 0.625 an odd polynomial (fitted, 1.5e-10 before rounding), so that small scores keep their
/// relative accuracy; above it `1 - 2 / (e^{2x} + 1)`.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let magnitude = s.abs(x);
    let y = s.mul(x, x);
    let p = s.splat(2.147_537e-3);
    let p = s.fma(p, y, s.splat(-8.182_674e-3));
    let p = s.fma(p, y, s.splat(2.170_296_7e-2));
    let p = s.fma(p, y, s.splat(-5.394_720_5e-2));
    let p = s.fma(p, y, s.splat(1.333_321e-1));
    let p = s.fma(p, y, s.splat(-3.333_333e-1));
    let small = s.fma(s.mul(p, y), x, x);

    let one = s.splat(1.0);
    let e = exp(s, s.add(magnitude, magnitude));
    let large = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    let signed = s.select_le(s.splat(0.0), x, large, s.sub(s.splat(0.0), large));
    s.select_le(magnitude, s.splat(0.625), small, signed)
}
