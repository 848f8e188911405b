//! Number formats: conversion with every rounding of the ISA, and the approximate functions.
//!
//! Everything narrower than double precision goes through [`encode`], which rounds a double once. A double that
//! stands for an inexact value must be rounded to odd first ([`fma_odd`]): then rounding again is exact.

/// Rounding modes of PTX.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Round {
    /// Nearest, ties to even.
    #[default]
    Rn,
    /// Towards zero.
    Rz,
    /// Towards minus infinity.
    Rm,
    /// Towards plus infinity.
    Rp,
    /// Nearest, ties away from zero.
    Rna,
}

/// A binary format of sign, exponent and mantissa.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    man: u32,
    bias: i32,
    /// Largest finite pattern without its sign.
    max: u32,
    inf: Option<u32>,
    nan: u32,
    sign: u32,
}

pub(crate) const F32: Format =
    Format { man: 23, bias: 127, max: 0x7f7f_ffff, inf: Some(0x7f80_0000), nan: 0x7fff_ffff, sign: 31 };
pub(crate) const F16: Format =
    Format { man: 10, bias: 15, max: 0x7bff, inf: Some(0x7c00), nan: 0x7fff, sign: 15 };
pub(crate) const BF16: Format =
    Format { man: 7, bias: 127, max: 0x7f7f, inf: Some(0x7f80), nan: 0x7fff, sign: 15 };
pub(crate) const E4M3: Format = Format { man: 3, bias: 7, max: 0x7e, inf: None, nan: 0x7f, sign: 7 };
pub(crate) const E5M2: Format = Format { man: 2, bias: 15, max: 0x7b, inf: Some(0x7c), nan: 0x7f, sign: 7 };
/// Four bits, without NaN: a NaN is converted to the largest number.
pub(crate) const E2M1: Format = Format { man: 1, bias: 1, max: 7, inf: None, nan: 7, sign: 3 };
/// Single precision with a ten-bit mantissa, kept in the upper bits of a word by [`tf32`].
const TF32: Format = Format { man: 10, bias: 127, max: 0x3fbff, inf: Some(0x3fc00), nan: 0x3ffff, sign: 18 };

/// Rounds a non-negative value to an integer.
fn round_magnitude(v: f64, negative: bool, round: Round) -> f64 {
    match round {
        Round::Rn => v.round_ties_even(),
        Round::Rna => v.round(),
        Round::Rz => v.trunc(),
        Round::Rm => {
            if negative {
                v.ceil()
            } else {
                v.floor()
            }
        }
        Round::Rp => {
            if negative {
                v.floor()
            } else {
                v.ceil()
            }
        }
    }
}

fn pow2(e: i32) -> f64 {
    f64::from_bits(((e + 1023).clamp(1, 2046) as u64) << 52)
}

/// Rounds `x` to `format`; `satfinite` turns overflow (and infinities) into the largest finite number.
pub(crate) fn encode(x: f64, format: Format, round: Round, satfinite: bool) -> u32 {
    let negative = x.is_sign_negative();
    let sign = u32::from(negative) << format.sign;
    if x.is_nan() {
        return format.nan;
    }
    let overflow = || match (satfinite, format.inf) {
        (true, _) => format.max,
        (false, None) => format.nan,
        (false, Some(inf)) => inf,
    };
    let a = x.abs();
    if a == 0.0 {
        return sign;
    }
    if a.is_infinite() {
        return sign | overflow();
    }
    let e = ((a.to_bits() >> 52) as i32) - 1023;
    let e = e.max(1 - format.bias);
    let r = round_magnitude(a * pow2(format.man as i32 - e), negative, round) as u64;
    let code = (((e + format.bias - 1) as u64) << format.man) + r;
    if code > u64::from(format.max) {
        let stays_finite = match round {
            Round::Rz => true,
            Round::Rm => !negative,
            Round::Rp => negative,
            Round::Rn | Round::Rna => false,
        };
        return sign | if stays_finite { format.max } else { overflow() };
    }
    sign | code as u32
}

/// `x * y + z` as a double rounded to odd. `x * y` must be exact in a double.
pub(crate) fn fma_odd(x: f64, y: f64, z: f64) -> f64 {
    let p = x * y;
    let s = p + z;
    if !s.is_finite() {
        return s;
    }
    let bb = s - p;
    let err = (p - (s - bb)) + (z - bb);
    if err == 0.0 || s.to_bits() & 1 == 1 {
        return s;
    }
    // The exact value lies between s and its neighbour on err's side; that neighbour has an odd mantissa.
    let away = (err > 0.0) == (s > 0.0);
    f64::from_bits(if s == 0.0 {
        s.to_bits()
    } else if away {
        s.to_bits() + 1
    } else {
        s.to_bits() - 1
    })
}

#[inline(always)]
pub(crate) fn flush(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits }
}

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to nearest even, branch-free so that it vectorises.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { 0x7fff } else { rounded }
}

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // A multiplication renormalises subnormals; infinities and NaN are beyond its range and fixed after.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((254 - 15) << 23);
    let special = (bits & 0x7c00) == 0x7c00;
    let fixed = if special { scaled.to_bits() | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(fixed | u32::from(bits & 0x8000) << 16)
}

#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let a = bits & 0x7fff_ffff;
    let normal = (a.wrapping_sub(112 << 23).wrapping_add(0xfff + ((a >> 13) & 1)) >> 13) as u16;
    // Adding 0.5 puts the rounding point of f16 subnormals at bit 0.
    let subnormal = (f32::from_bits(a) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits()) as u16;
    let finite = if a < 113 << 23 { subnormal } else { normal };
    let out = if a >= 0x477f_f000 { 0x7c00 } else { finite };
    if a > 0x7f80_0000 { 0x7fff } else { sign | out }
}

/// Decodes one byte of E4M3.
pub(crate) fn e4m3_to_f32(b: u8) -> f32 {
    let sign = if b & 0x80 == 0 { 1.0 } else { -1.0 };
    let (e, m) = (i32::from(b >> 3 & 15), f32::from(b & 7));
    sign * match (e, b & 7) {
        (15, 7) => f32::NAN,
        (0, _) => m * 2f32.powi(-9),
        _ => (8.0 + m) * 2f32.powi(e - 10),
    }
}

/// Decodes one byte of E5M2.
pub(crate) fn e5m2_to_f32(b: u8) -> f32 {
    f16_to_f32(u16::from(b) << 8)
}

/// Tables of both FP8 formats.
pub(crate) fn fp8_table(e5m2: bool) -> &'static [f32; 256] {
    static TABLES: std::sync::OnceLock<[[f32; 256]; 2]> = std::sync::OnceLock::new();
    let tables = TABLES.get_or_init(|| {
        [std::array::from_fn(|i| e4m3_to_f32(i as u8)), std::array::from_fn(|i| e5m2_to_f32(i as u8))]
    });
    &tables[usize::from(e5m2)]
}

/// Single precision rounded to TF32, still a single-precision pattern.
pub(crate) fn tf32(x: f32, round: Round) -> u32 {
    if x.is_nan() {
        return 0x7fff_ffff;
    }
    encode(f64::from(x), TF32, round, false) << 13
}

/// `ex2.approx`: below 2^-22 relative, the documented bound; vectorises.
#[inline(always)]
pub(crate) fn ex2(x: f32) -> f32 {
    let c = x.clamp(-152.0, 129.0);
    // The sum is so large that it has no fraction, and its last bits are the whole number.
    let sum = c + 12_582_912.0;
    let f = c - (sum - 12_582_912.0);
    let mut p = 1.525_273_4e-5f32;
    for k in [1.540_353e-4f32, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0] {
        p = fma32(p, f, k);
    }
    let n = (sum.to_bits() as i32).wrapping_sub(12_582_912f32.to_bits() as i32);
    let half = n >> 1;
    let s1 = f32::from_bits((half.wrapping_add(127) << 23) as u32);
    let s2 = f32::from_bits((n.wrapping_sub(half).wrapping_add(127) << 23) as u32);
    if x.is_nan() { f32::from_bits(0x7fff_ffff) } else { p * s1 * s2 }
}

#[inline(always)]
pub(crate) fn fma32(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// NaN of the hardware.
pub(crate) const NAN: f32 = f32::from_bits(0x7fff_ffff);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_survive_a_round_trip_and_equal_the_half_crate() {
        for bits in 0..=u16::MAX {
            let ours = f16_to_f32(bits);
            let theirs = half::f16::from_bits(bits).to_f32();
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
            if !ours.is_nan() {
                assert_eq!(f32_to_f16(ours), bits);
                assert_eq!(encode(f64::from(ours), F16, Round::Rn, false), u32::from(bits));
            }
        }
    }

    #[test]
    fn fast_conversions_equal_the_general_one() {
        let mut state = 1u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = f32::from_bits((state >> 32) as u32);
            if x.is_nan() {
                continue;
            }
            assert_eq!(u32::from(f32_to_f16(x)), encode(f64::from(x), F16, Round::Rn, false), "{x:e}");
            assert_eq!(u32::from(f32_to_bf16(x)), encode(f64::from(x), BF16, Round::Rn, false), "{x:e}");
        }
    }

    #[test]
    fn e4m3_has_no_infinity_and_saturates_at_448() {
        assert_eq!(encode(1e9, E4M3, Round::Rn, true), 0x7e);
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert_eq!(encode(f64::NAN, E4M3, Round::Rn, true), 0x7f);
        for b in (0..=0x7e).chain(0x80..=0xfe) {
            assert_eq!(encode(f64::from(e4m3_to_f32(b)), E4M3, Round::Rn, true), u32::from(b));
        }
    }

    #[test]
    fn directed_rounding_brackets_the_exact_sum() {
        let (a, b) = (1.0f64, f64::from(f32::from_bits(1)));
        let odd = fma_odd(a, 1.0, b);
        assert_eq!(f32::from_bits(encode(odd, F32, Round::Rm, false)), 1.0);
        assert_eq!(f32::from_bits(encode(odd, F32, Round::Rp, false)), 1.0 + f32::EPSILON);
    }

    #[test]
    fn ex2_stays_within_the_documented_error() {
        let mut worst = 0.0f64;
        for i in -126_000..127_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp2();
            worst = worst.max(((f64::from(ex2(x)) - exact) / exact).abs());
        }
        assert!(worst < 2f64.powf(-22.5), "{worst:e}");
        assert_eq!(ex2(f32::NEG_INFINITY), 0.0);
        assert_eq!(ex2(f32::INFINITY), f32::INFINITY);
    }
}
