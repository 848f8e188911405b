//! Arithmetic that adds the products of a score.

use num_traits::Float;

/// Arithmetic that adds the products of a score, from which LSE follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScoreSums {
    /// Sums in f32: additions in any order, each rounded.
    #[default]
    F32,
    /// Sums of a matrix unit that adds some products to the sum so far in one step. First the unit truncates each
    /// of these terms towards zero, at a fixed number of bits below the largest exponent, where a product's
    /// exponent is the sum of its factors' exponents. Then it truncates their sum to that number of significant
    /// bits, or to those of f32 if they are fewer. Such errors do not cancel: they grow with the largest partial
    /// sum, not with the score.
    Cut {
        /// Number of products that are summed in one step.
        products: u8,
        /// Number of bits kept, counted from the largest exponent.
        bits: u8,
    },
}

impl ScoreSums {
    /// Significant bits that a sum keeps.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::F32 => f32::MANTISSA_DIGITS,
            // A sum that keeps more bits than f32 has is rounded to f32.
            Self::Cut { bits, .. } if bits as u32 > f32::MANTISSA_DIGITS => f32::MANTISSA_DIGITS,
            Self::Cut { bits, .. } => bits as u32,
        }
    }

    /// Computes `sum_d a[d] b[d]` in the order of a [`Cut`](Self::Cut), for operands whose products are exact in f64;
    /// for other kinds of sums, adds one product after the other in the operands' own type.
    pub(crate) fn dot<T: Float>(self, a: &[T], b: &[T]) -> T {
        let Self::Cut { products, bits } = self else {
            return in_order(a, [b])[0];
        };
        let wide = |x: T| x.to_f64().unwrap_or(f64::NAN);
        let width = usize::from(products.max(1));
        let sum = a.chunks(width).zip(b.chunks(width)).fold(0.0, |sum: f64, (a, b)| {
            let factors = || a.iter().zip(b).map(|(&a, &b)| (wide(a), wide(b)));
            let largest = factors()
                .filter(|&(a, b)| a != 0.0 && b != 0.0)
                .fold(exponent(sum), |largest, (a, b)| largest.max(exponent(a) + exponent(b)));
            let unit = 2f64.powi(largest + 1 - i32::from(bits));
            let terms = factors().map(|(a, b)| cut(a * b, unit));
            let sum = terms.fold(cut(sum, unit), |sum, term| sum + term);
            cut(sum, 2f64.powi(exponent(sum) + 1 - self.bits() as i32))
        });
        T::from(sum).unwrap_or_else(T::nan)
    }
}

/// The dot product of `a` with each of `rows`, of equal lengths, one product after the other. Eight rows at once
/// take little longer than one, because in one row each addition waits for the previous one.
pub(crate) fn in_order<T: Float, const N: usize>(a: &[T], rows: [&[T]; N]) -> [T; N] {
    let rows = rows.map(|row| &row[..a.len()]);
    let mut sums = [T::zero(); N];
    for (d, &a) in a.iter().enumerate() {
        for (sum, row) in sums.iter_mut().zip(rows) {
            *sum = *sum + a * row[d];
        }
    }
    sums
}

/// The exponent of the leading bit; for zero, below that of every product.
fn exponent(x: f64) -> i32 {
    const BIAS: i32 = 1023;
    (x.to_bits() >> 52 & 0x7ff) as i32 - BIAS
}

/// Truncates towards zero to whole units; zero, infinity and NaN stay as they are.
fn cut(x: f64, unit: f64) -> f64 {
    if x == 0.0 || !x.is_finite() { x } else { (x / unit).trunc() * unit }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP8: ScoreSums = ScoreSums::Cut { products: 2, bits: 14 };

    #[test]
    fn what_lies_below_the_last_bit_of_the_largest_is_cut_towards_zero() {
        let small = 2f32.powi(-13);
        assert_eq!(FP8.dot(&[1.0, 1.5 * small], &[1.0, 1.0]), 1.0 + small);
        assert_eq!(FP8.dot(&[-1.0, -1.5 * small], &[1.0, 1.0]), -1.0 - small);
        assert_eq!(FP8.dot(&[2.0, 1.5 * small], &[1.0, 1.0]), 2.0);
        assert_eq!(ScoreSums::F32.dot(&[2.0, 1.5 * small], &[1.0, 1.0]), 2.0 + 1.5 * small);
    }

    #[test]
    fn exponents_of_factors_decide_and_a_sum_is_cut_again() {
        // The product 1.5 * 1.5 has exponent 0 by its factors though it is above 2: 2^-13 is kept within the step,
        // and lost in a sum above 2.
        let small = 2f32.powi(-13);
        assert_eq!(FP8.dot(&[1.5, small], &[1.5, 1.0]), 2.25);
        let two_steps = [1.5, small, -1.5, 0.0];
        assert_eq!(FP8.dot(&two_steps, &[1.5, 1.0, 1.5, 0.0]), 0.0);
        let one_step = ScoreSums::Cut { products: 4, bits: 14 };
        assert_eq!(one_step.dot(&two_steps, &[1.5, 1.0, 1.5, 0.0]), small);
    }

    #[test]
    fn rows_at_once_have_the_bits_of_each_alone() {
        let of = |seed: u32| {
            (0..77u32).map(|d| ((d * 37 + seed * 11) % 101) as f32 / 7.0 - 6.0).collect::<Vec<f32>>()
        };
        let (a, rows) = (of(0), [1, 2, 3, 4, 5, 6, 7, 8].map(of));
        let alone = |row: &Vec<f32>| a.iter().zip(row).fold(0.0, |sum, (a, b)| sum + a * b);
        assert_eq!(in_order(&a, rows.each_ref().map(Vec::as_slice)), rows.each_ref().map(alone));
    }

    #[test]
    fn a_products_exponent_is_the_sum_of_its_factors_and_that_of_zero_is_none() {
        let small = 2f32.powi(-8);
        assert_eq!(FP8.dot(&[1.0], &[small]), small);
        // The number 2^-10 lies below the last bit of 4 * 4, though not of 4 / 4.
        let wide = ScoreSums::Cut { products: 3, bits: 14 };
        assert_eq!(wide.dot(&[4.0, -4.0, 2f32.powi(-10)], &[4.0, 4.0, 1.0]), 0.0);
        let tiny = 2f64.powi(-40);
        assert_eq!(FP8.dot(&[2f64.powi(1000), tiny], &[0.0, 1.0]), tiny);
    }

    #[test]
    fn a_sum_that_cancels_keeps_what_its_largest_part_lost() {
        let tiny = 2f32.powi(-14);
        assert_eq!(FP8.dot(&[1.0, tiny, -1.0, tiny], &[1.0; 4]), 0.0);
        // A second step starts from a small sum, and truncates nothing.
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
        let f16 = ScoreSums::Cut { products: 3, bits: 26 };
        assert_eq!((f16.bits(), FP8.bits()), (24, 14));
        let half_unit = 2f32.powi(-24);
        assert_eq!(f16.dot(&[1.0, half_unit], &[1.0; 2]), 1.0, "a sum is cut, not rounded");
        assert_eq!(f16.dot(&[1.0, half_unit, half_unit], &[1.0; 3]), 1.0 + 2.0 * half_unit);
        assert_eq!(f16.dot(&[1.0, half_unit / 8.0, half_unit / 8.0], &[1.0; 3]), 1.0);
    }
}
