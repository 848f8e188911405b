//! How the products of a score are added.

use num_traits::Float;

/// How the products of a score, of which LSE is made, are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScoreSums {
    /// In f32, in any order, each sum rounded.
    #[default]
    F32,
    /// By a matrix unit that adds some products to the sum so far in one step, and first cuts each of them
    /// towards zero to so many significant bits below the largest one's exponent. Such errors do not
    /// cancel: they grow with the largest sum on the way, not with the score.
    Cut {
        /// Products of a step.
        products: u8,
        /// Significant bits that the largest of them keeps.
        bits: u8,
    },
}

impl ScoreSums {
    /// Significant bits that a sum keeps.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::F32 => f32::MANTISSA_DIGITS,
            // What is added up is then an f32.
            Self::Cut { bits, .. } if bits as u32 > f32::MANTISSA_DIGITS => f32::MANTISSA_DIGITS,
            Self::Cut { bits, .. } => bits as u32,
        }
    }

    /// `sum_d a[d] b[d]` as a [`Cut`](Self::Cut) adds it, of operands whose products are exact in f64; else one
    /// product after the other in the operands' own type.
    pub(crate) fn dot<T: Float>(self, a: &[T], b: &[T]) -> T {
        let Self::Cut { products, bits } = self else {
            return a.iter().zip(b).fold(T::zero(), |sum, (&a, &b)| sum + a * b);
        };
        let wide = |x: T| x.to_f64().unwrap_or(f64::NAN);
        let width = usize::from(products.max(1));
        let sum = a.chunks(width).zip(b.chunks(width)).fold(0.0, |sum: f64, (a, b)| {
            let terms = || a.iter().zip(b).map(|(&a, &b)| wide(a) * wide(b));
            let largest = terms().fold(sum.abs(), |largest, term| largest.max(term.abs()));
            let Some(unit) = unit_of(largest, bits) else { return terms().fold(sum, |sum, term| sum + term) };
            let cut = |x: f64| (x / unit).trunc() * unit;
            let sum = terms().fold(cut(sum), |sum, term| sum + cut(term));
            unit_of(sum, f32::MANTISSA_DIGITS as u8).map_or(sum, |unit| (sum / unit).trunc() * unit)
        });
        T::from(sum).unwrap_or_else(T::nan)
    }
}

/// The last of `bits` significant bits of `x`; none where it has no exponent.
fn unit_of(x: f64, bits: u8) -> Option<f64> {
    let exponent = (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    // A product of two f32 is zero or far above the least normal f64.
    (exponent > -1000 && exponent < 1024).then(|| 2f64.powi(exponent + 1 - i32::from(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP8: ScoreSums = ScoreSums::Cut { products: 2, bits: 14 };

    #[test]
    fn what_lies_below_the_last_bit_of_the_largest_is_cut_towards_zero() {
        let small = 2f32.powi(-13);
        assert_eq!(FP8.dot(&[1f32, 1.5 * small], &[1.0, 1.0]), 1.0 + small);
        assert_eq!(FP8.dot(&[1.0, -1.5 * small], &[1.0, 1.0]), 1.0 - small);
        assert_eq!(FP8.dot(&[2.0, 1.5 * small], &[1.0, 1.0]), 2.0);
        assert_eq!(ScoreSums::F32.dot(&[2.0, 1.5 * small], &[1.0, 1.0]), 2.0 + 1.5 * small);
    }

    #[test]
    fn a_sum_that_cancels_keeps_what_its_largest_part_lost() {
        let tiny = 2f32.powi(-14);
        assert_eq!(FP8.dot(&[1.0, tiny, -1.0, tiny], &[1.0; 4]), 0.0);
        // In another step the sum so far is small, and nothing is lost.
        assert_eq!(FP8.dot(&[1.0, -1.0, tiny, tiny], &[1.0; 4]), 2.0 * tiny);
    }

    #[test]
    fn zeros_infinities_and_nan_are_what_they_are() {
        assert_eq!(FP8.dot(&[0.0; 3], &[1.0; 3]), 0.0);
        assert_eq!(FP8.dot(&[f32::INFINITY, 1.0], &[1.0; 2]), f32::INFINITY);
        assert!(FP8.dot(&[f32::NAN, 1.0], &[1.0; 2]).is_nan());
        assert_eq!(FP8.dot(&[f32::MAX, f32::MAX], &[2.0; 2]), f32::INFINITY);
        let subnormal = f32::from_bits(1);
        assert_eq!(FP8.dot(&[subnormal], &[1.0]), subnormal);
    }

    #[test]
    fn bits_beyond_those_of_f32_are_of_the_step_alone() {
        assert_eq!(ScoreSums::Cut { products: 16, bits: 26 }.bits(), 24);
        assert_eq!(FP8.bits(), 14);
        let f16 = ScoreSums::Cut { products: 2, bits: 26 };
        let (half_unit, unit) = (2f32.powi(-24), 2f32.powi(-23));
        assert_eq!(f16.dot(&[1.0, half_unit], &[1.0; 2]), 1.0, "a sum is cut, not rounded");
        assert_eq!(f16.dot(&[1.0, unit], &[1.0; 2]), 1.0 + unit);
    }
}
