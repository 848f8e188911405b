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
    // Operands of `min` and `max`: the bound first and x second, so that a NaN in x passes through both.
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

/// `2^x` for x up to 127, with a relative error of 3e-7. The results are rounded to bf16, but the logarithm of
/// their sum is not: with a quartic (2.6e-6) the LSE of equal scores had that whole error. 0 below −126.5; NaN
/// stays NaN.
///
/// `2^n q(r)` with a quintic q fitted for least relative error on |r| <= 1/2 (7.5e-8 before rounding).
#[inline(always)]
pub(crate) fn exp2_coarse<S: Simd>(s: S, x: S::V) -> S::V {
    // Operands of `max`: the bound first and x second, so that a NaN in x passes through.
    let bounded = s.max(s.splat(-127.0), x);
    let n = s.round(bounded);
    let r = s.sub(bounded, n);
    let q = s.splat(1.327_647_2e-3);
    let q = s.fma(q, r, s.splat(9.675_541e-3));
    let q = s.fma(q, r, s.splat(5.550_713e-2));
    let q = s.fma(q, r, s.splat(2.402_212e-1));
    let q = s.fma(q, r, s.splat(6.931_469_4e-1));
    let q = s.fma(q, r, s.splat(1.000_000_1));
    s.mul(q, s.power_of_two(n))
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
    // tanh(x) is 1 in f32 from |x| = 10 on. `exp` gets 2 |x|, limited to 40, since above 88 it would overflow.
    let e = exp(s, s.min(s.splat(40.0), s.add(magnitude, magnitude)));
    let large = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    let signed = s.select_le(s.splat(0.0), x, large, s.sub(s.splat(0.0), large));
    s.select_le(magnitude, s.splat(0.625), small, signed)
}

#[cfg(test)]
mod tests {
    use super::super::{Op, Portable, Simd};
    use super::*;

    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        Exp2Coarse,
        Tanh,
    }

    /// Applies a function of one vector to a slice.
    struct Map<'a> {
        function: Function,
        x: &'a mut [f32],
    }

    impl<S: Simd> Op<S> for Map<'_> {
        #[inline(always)]
        fn call(self, s: S) {
            for chunk in self.x.chunks_exact_mut(S::LANES) {
                // SAFETY: a chunk is a vector.
                unsafe {
                    let x = s.load(chunk.as_ptr());
                    let y = match self.function {
                        Function::Exp => exp(s, x),
                        Function::Exp2Coarse => s.exp2_coarse(x),
                        Function::Tanh => tanh(s, x),
                    };
                    s.store(chunk.as_mut_ptr(), y);
                }
            }
        }
    }

    fn map<S: Simd>(s: S, function: Function, mut x: Vec<f32>) -> Vec<f32> {
        x.resize(x.len().next_multiple_of(16), 0.0);
        s.run(Map { function, x: &mut x });
        x
    }

    fn worst_ulps<S: Simd>(s: S, function: Function, low: f32, high: f32) -> f64 {
        const POINTS: usize = 200_000;
        let x: Vec<f32> = (0..POINTS).map(|i| low + (high - low) * i as f32 / POINTS as f32).collect();
        let y = map(s, function, x.clone());
        x.iter().zip(&y).fold(0.0, |worst, (&x, &y)| {
            let x = f64::from(x);
            let exact = match function {
                Function::Exp => x.exp(),
                Function::Exp2Coarse => x.exp2(),
                Function::Tanh => x.tanh(),
            };
            // The spacing of f32 at the exact value.
            let ulp =
                2f64.powi((exact.abs().log2().floor() as i32).saturating_sub(23)).max(f64::MIN_POSITIVE);
            worst.max((f64::from(y) - exact).abs() / ulp)
        })
    }

    fn keeps_its_errors<S: Simd>(s: S) {
        assert!(worst_ulps(s, Function::Exp, -87.0, 88.0) < 1.2);
        assert!(worst_ulps(s, Function::Exp, -1.0, 1.0) < 1.2);
        // 3e-7 is 2.5 to 5 units in the last place.
        assert!(worst_ulps(s, Function::Exp2Coarse, -1.0, 1.0) < 5.0);
        assert!(worst_ulps(s, Function::Exp2Coarse, -126.0, 20.0) < 5.0);
        assert!(worst_ulps(s, Function::Tanh, -9.0, 9.0) < 3.0);
        assert!(worst_ulps(s, Function::Tanh, 1e-4, 0.7) < 3.0);
    }

    fn keeps_its_limits<S: Simd>(s: S) {
        let y = map(s, Function::Exp, vec![f32::NEG_INFINITY, -90.0, 0.0, 89.0, f32::INFINITY, f32::NAN]);
        assert_eq!(y[..5], [0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY]);
        assert!(y[5].is_nan());
        let y = map(s, Function::Exp2Coarse, vec![f32::NEG_INFINITY, 0.0, f32::NAN, -1e30]);
        assert!(y[0] == 0.0 && (y[1] - 1.0).abs() < 3e-7 && y[2].is_nan() && y[3] == 0.0);
        let y = map(s, Function::Tanh, vec![f32::NEG_INFINITY, -0.0, 0.0, f32::INFINITY, f32::NAN]);
        assert_eq!(y[..4], [-1.0, 0.0, 0.0, 1.0]);
        assert!(y[4].is_nan());
    }

    fn holds<S: Simd>(s: S) {
        keeps_its_errors(s);
        keeps_its_limits(s);
    }

    #[test]
    fn exp_and_tanh_keep_their_errors_and_limits() {
        holds(Portable);
        #[cfg(target_arch = "x86_64")]
        {
            super::super::Avx2::detect().into_iter().for_each(holds);
            super::super::Avx512::detect().into_iter().for_each(holds);
            super::super::Amx::detect().into_iter().for_each(holds);
        }
        #[cfg(target_arch = "aarch64")]
        super::super::Neon::detect().into_iter().for_each(holds);
    }
}
