//! The four 8-bit floating-point types.
//!
//! E4M3FN and E5M2 are those of the OCP 8-bit Floating Point Specification (revision 1.0, sections 5.2 and 5.3);
//! the FNUZ forms, with a bias one larger, one NaN and no −0, are those of Noune et al., "8-bit Numerical Formats
//! for Deep Neural Networks" (arXiv 2206.02915), which gfx942 computes in. A FNUZ byte read as OCP is off by a
//! factor of two and turns −0 into NaN. So these are four types, and going from one to another is always a
//! conversion.

/// Parameters of an 8-bit format.
struct Format {
    mantissa_bits: u32,
    bias: i32,
    /// Largest finite magnitude, as bits without the sign.
    max_bits: u8,
    /// The NaN that conversions produce.
    nan_bits: u8,
    /// Whether the format is FNUZ: 0x80 is the only NaN, and there is no −0.
    fnuz: bool,
}

impl Format {
    const fn max_finite(&self) -> f64 {
        self.magnitude(self.max_bits)
    }

    /// The value of the bits of a finite number without its sign.
    const fn magnitude(&self, bits: u8) -> f64 {
        let exponent = (bits >> self.mantissa_bits) as i32;
        let mantissa = (bits & ((1 << self.mantissa_bits) - 1)) as f64;
        let one = (1 << self.mantissa_bits) as f64;
        if exponent == 0 {
            mantissa / one * power_of_two(1 - self.bias)
        } else {
            (1.0 + mantissa / one) * power_of_two(exponent - self.bias)
        }
    }

    fn decode(&self, bits: u8) -> f32 {
        let (sign, magnitude) = (bits & 0x80, bits & 0x7f);
        if self.fnuz {
            if bits == 0x80 {
                return f32::NAN;
            }
        } else if magnitude > self.max_bits {
            // E5M2 has infinity directly above its largest finite value; all larger bit patterns are NaN.
            let infinity = self.mantissa_bits == 2 && magnitude == self.max_bits + 1;
            let value = if infinity { f32::INFINITY } else { f32::NAN };
            return if sign == 0 { value } else { -value };
        }
        let value = self.magnitude(magnitude) as f32;
        if sign == 0 { value } else { -value }
    }

    /// Rounds to nearest even and saturates; NaN stays NaN.
    fn encode_saturating(&self, value: f64) -> u8 {
        if value.is_nan() {
            return self.nan_bits;
        }
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = value.abs().min(self.max_finite());
        // The spacing of the format around `magnitude`: a power of two, subnormals included.
        let exponent = exponent_of(magnitude).max(1 - self.bias);
        let spacing = power_of_two(exponent - self.mantissa_bits.cast_signed());
        let units = (magnitude / spacing).round_ties_even();
        // A carry out of the mantissa increments the exponent correctly without extra code, because the bits of
        // consecutive magnitudes are consecutive integers; `units` counts steps of `spacing`.
        let biased = exponent + self.bias - 1;
        let bits = (biased << self.mantissa_bits) as u32 + units as u32;
        match (bits as u8).min(self.max_bits) {
            0 if self.fnuz => 0,
            bits => bits | sign,
        }
    }
}

const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// floor(log2(x)) of a non-negative finite value; very small for 0.
fn exponent_of(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

macro_rules! fp8_type {
    ($(#[$doc:meta])* $name:ident, $format:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            const FORMAT: Format = $format;

            /// The largest finite value.
            pub const MAX: f32 = Self::FORMAT.max_finite() as f32;

            /// Makes a number from bits of this format.
            #[must_use]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The number's bits.
            #[must_use]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The number as f32; the conversion is exact.
            #[must_use]
            pub fn to_f32(self) -> f32 {
                Self::FORMAT.decode(self.0)
            }

            /// The nearest value, ties to even; `None` where that would overflow or `value` is an
            /// infinity. NaN gives NaN.
            #[must_use]
            pub fn from_f64_checked(value: f64) -> Option<Self> {
                // Values up to half a step beyond the largest finite still round to it.
                let max = Self::FORMAT.max_finite();
                let step = power_of_two(exponent_of(max) - Self::FORMAT.mantissa_bits.cast_signed());
                (value.is_nan() || value.abs() < max + step / 2.0).then(|| Self::from_f64_saturating(value))
            }

            /// The nearest value, ties to even; a value beyond the largest finite one becomes that one with its
            /// sign. NaN gives NaN.
            #[must_use]
            pub fn from_f64_saturating(value: f64) -> Self {
                Self(Self::FORMAT.encode_saturating(value))
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> f32 {
                value.to_f32()
            }
        }
    };
}

fp8_type!(
    /// OCP E4M3: bias 7, largest 448, NaN at 0x7f and 0xff, no infinity.
    E4m3Fn,
    Format { mantissa_bits: 3, bias: 7, max_bits: 0x7e, nan_bits: 0x7f, fnuz: false }
);
fp8_type!(
    /// OCP E5M2: bias 15, largest 57344, infinities at 0x7c and 0xfc.
    E5m2,
    Format { mantissa_bits: 2, bias: 15, max_bits: 0x7b, nan_bits: 0x7e, fnuz: false }
);
fp8_type!(
    /// FNUZ E4M3: bias 8, largest 240, NaN at 0x80 only.
    E4m3Fnuz,
    Format { mantissa_bits: 3, bias: 8, max_bits: 0x7f, nan_bits: 0x80, fnuz: true }
);
fp8_type!(
    /// FNUZ E5M2: bias 16, largest 57344, NaN at 0x80 only.
    E5m2Fnuz,
    Format { mantissa_bits: 2, bias: 16, max_bits: 0x7f, nan_bits: 0x80, fnuz: true }
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that every finite byte survives decode and encode, and that a value between two neighbours rounds to
    /// the nearer, a tie to the even one.
    fn rounds_to_nearest_even(decode: fn(u8) -> f32, encode: fn(f64) -> u8, max_bits: u8) {
        for bits in 0..max_bits {
            let (low, high) = (f64::from(decode(bits)), f64::from(decode(bits + 1)));
            assert_eq!(encode(low), bits);
            assert_eq!(encode(high), bits + 1);
            let middle = f64::midpoint(low, high);
            assert_eq!(encode(middle), bits + (bits & 1), "tie between {low} and {high}");
            let quarter = (high - low) / 4.0;
            assert_eq!(encode(middle - quarter), bits);
            assert_eq!(encode(middle + quarter), bits + 1);
            if low > 0.0 {
                assert_eq!(encode(-low), bits | 0x80);
            }
        }
    }

    #[test]
    fn every_finite_value_round_trips_and_ties_go_to_even() {
        rounds_to_nearest_even(|b| E4m3Fn(b).to_f32(), |v| E4m3Fn::from_f64_saturating(v).0, 0x7e);
        rounds_to_nearest_even(|b| E5m2(b).to_f32(), |v| E5m2::from_f64_saturating(v).0, 0x7b);
        rounds_to_nearest_even(|b| E4m3Fnuz(b).to_f32(), |v| E4m3Fnuz::from_f64_saturating(v).0, 0x7f);
        rounds_to_nearest_even(|b| E5m2Fnuz(b).to_f32(), |v| E5m2Fnuz::from_f64_saturating(v).0, 0x7f);
    }

    #[test]
    fn landmark_values_are_those_of_the_specifications() {
        assert_eq!((E4m3Fn::MAX, E5m2::MAX, E4m3Fnuz::MAX, E5m2Fnuz::MAX), (448.0, 57344.0, 240.0, 57344.0));
        assert_eq!(E4m3Fn::from_bits(0x38).to_f32(), 1.0);
        assert_eq!(E5m2::from_bits(0x3c).to_f32(), 1.0);
        assert_eq!(E4m3Fnuz::from_bits(0x40).to_f32(), 1.0);
        assert_eq!(E5m2Fnuz::from_bits(0x40).to_f32(), 1.0);
        assert_eq!(E4m3Fn::from_bits(0x01).to_f32(), 2f32.powi(-9));
        assert_eq!(E4m3Fnuz::from_bits(0x01).to_f32(), 2f32.powi(-10));
        assert_eq!(E5m2::from_bits(0x01).to_f32(), 2f32.powi(-16));
        assert_eq!(E5m2Fnuz::from_bits(0x01).to_f32(), 2f32.powi(-17));
        assert!(E4m3Fn::from_bits(0x7f).to_f32().is_nan());
        assert!(E4m3Fnuz::from_bits(0x80).to_f32().is_nan());
        assert_eq!(E5m2::from_bits(0x7c).to_f32(), f32::INFINITY);
        assert_eq!(E5m2::from_bits(0xfc).to_f32(), f32::NEG_INFINITY);
    }

    #[test]
    fn fnuz_has_no_negative_zero() {
        assert_eq!(E4m3Fnuz::from_f64_saturating(-0.0).to_bits(), 0);
        assert_eq!(E5m2Fnuz::from_f64_saturating(-1e-30).to_bits(), 0);
        assert_eq!(E4m3Fn::from_f64_saturating(-0.0).to_bits(), 0x80);
    }

    #[test]
    fn overflow_is_refused_when_checked_and_clamped_when_saturating() {
        assert_eq!(E4m3Fn::from_f64_checked(463.9).map(E4m3Fn::to_bits), Some(0x7e));
        assert_eq!(E4m3Fn::from_f64_checked(464.0), None);
        assert_eq!(E4m3Fnuz::from_f64_checked(f64::INFINITY), None);
        assert_eq!(E4m3Fnuz::from_f64_saturating(1e9).to_f32(), 240.0);
        assert_eq!(E5m2::from_f64_saturating(f64::NEG_INFINITY).to_f32(), -57344.0);
        assert!(E4m3Fn::from_f64_saturating(f64::NAN).to_f32().is_nan());
    }
}
