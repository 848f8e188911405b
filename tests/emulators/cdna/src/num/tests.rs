//! Tests of number formats against other definitions of them.

use super::fp8::{Format, Specials};
use super::{bf16, f16, func};

/// Numbers all over f32, subnormals, infinities and NaN among them.
fn samples() -> impl Iterator<Item = f32> {
    (0..1u32 << 20).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b1)))
}

#[test]
fn f16_and_bf16_agree_with_the_half_crate() {
    for bits in 0..=u16::MAX {
        let theirs = half::f16::from_bits(bits).to_f32();
        let ours = f16::to_f32(bits);
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "0x{bits:04x}");
    }
    for x in samples() {
        let (ours, theirs) = (f16::from_f32(x), half::f16::from_f32(x));
        assert!(ours == theirs.to_bits() || theirs.is_nan() && f16::to_f32(ours).is_nan(), "{x:e}");
        let (ours, theirs) = (bf16::from_f32(x), half::bf16::from_f32(x));
        assert!(ours == theirs.to_bits() || theirs.is_nan() && bf16::to_f32(ours).is_nan(), "{x:e}");
        let towards_zero = f16::to_f32(f16::from_f32_rtz(x));
        if x.abs() < 65504.0 {
            let next = f16::to_f32(f16::from_f32_rtz(x) + 1);
            assert!(towards_zero.abs() <= x.abs() && x.abs() < next.abs(), "{x:e}: {towards_zero:e}");
        }
    }
}

#[test]
fn widening_64_registers_is_widening_each() {
    let registers: [u32; 64] = std::array::from_fn(|i| (i as u32).wrapping_mul(0x9e37_79b1));
    for shift in [0, 16] {
        let mut out = [0.0; 64];
        f16::widen(&registers, shift, &mut out);
        for (wide, register) in out.iter().zip(registers) {
            let half = half::f16::from_bits((register >> shift) as u16);
            assert!(*wide == half.to_f32() || half.is_nan());
        }
    }
}

const EIGHT_BIT: [Format; 4] = [Format::E4M3_OCP, Format::E5M2_OCP, Format::E4M3_FNUZ, Format::E5M2_FNUZ];

#[test]
fn fp8_formats_have_the_published_extremes() {
    let largest = |f: Format| (0..=255).map(|c| f.decode(c)).filter(|x| x.is_finite()).fold(0f32, f32::max);
    let smallest = |f: Format| (0..=255).map(|c| f.decode(c)).filter(|x| *x > 0.0).fold(f32::MAX, f32::min);
    // OCP 8-bit Floating Point Specification; the FNUZ formats of the CDNA3 ISA.
    assert_eq!(EIGHT_BIT.map(largest), [448.0, 57344.0, 240.0, 57344.0]);
    assert_eq!(EIGHT_BIT.map(smallest), [2f32.powi(-9), 2f32.powi(-16), 2f32.powi(-10), 2f32.powi(-17)]);
    let nans = |f: Format| (0..=255).filter(|c| f.decode(*c).is_nan()).count();
    assert_eq!(EIGHT_BIT.map(nans), [2, 6, 1, 1]);
    assert_eq!(
        [Format::E2M3, Format::E3M2, Format::E2M1].map(|f| f.decode((1 << (f.bits() - 1)) - 1)),
        [7.5, 28.0, 6.0]
    );
}

#[test]
fn fp8_encoding_gives_the_nearest_number_and_on_a_tie_the_even_code() {
    for format in EIGHT_BIT {
        let finite: Vec<(u8, f64)> = (0..0x80u8)
            .map(|code| (code, f64::from(format.decode(code))))
            .filter(|(_, x)| x.is_finite())
            .collect();
        let (_, largest) = finite[finite.len() - 1];
        let step = largest - finite[finite.len() - 2].1;
        let numbers = samples().chain(finite.iter().map(|(_, x)| *x as f32));
        // Ties, halfway between neighbours: 9 bits of significand always suffice.
        let ties = finite.windows(2).map(|w| ((w[0].1 + w[1].1) / 2.0) as f32);
        for x in numbers.chain(ties).filter(|x| !x.is_nan() && f64::from(x.abs()) < largest + step / 2.0) {
            let code = format.encode(x, None);
            let magnitude = f64::from(x.abs());
            let distance = |c: u8| (f64::from(format.decode(c)) - magnitude).abs();
            let best = finite.iter().map(|(_, v)| (v - magnitude).abs()).fold(f64::MAX, f64::min);
            assert_eq!(distance(code & 0x7f), best, "{format:?} {x:e}: 0x{code:02x}");
            let nearest = finite.iter().filter(|(c, _)| distance(*c) == best).count();
            assert!(nearest == 1 || code % 2 == 0, "{format:?} {x:e}: 0x{code:02x}");
            let negative = x.is_sign_negative() && !(format.specials == Specials::Fnuz && code & 0x7f == 0);
            assert_eq!(code >> 7 == 1, negative, "{format:?} {x:e}");
        }
        // Beyond the largest number the instructions do not saturate.
        for x in [largest as f32 * 1.5, f32::INFINITY, f32::MAX] {
            let value = format.decode(format.encode(x, None));
            assert!(!value.is_finite(), "{format:?} {x:e}: {value}");
        }
        assert!(format.decode(format.encode(f32::NAN, None)).is_nan());
    }
}

#[test]
fn exp2_log2_and_rcp_are_within_one_ulp() {
    let ulps = |got: f32, want: f64| {
        let step = f64::from(f32::EPSILON) * 2f64.powi((want.abs().log2().floor() as i32).max(-126));
        (f64::from(got) - want).abs() / step
    };
    for x in samples().filter(|x| x.abs() < 125.0 && x.abs() > 1e-30) {
        assert!(ulps(func::exp2(x), f64::from(x).exp2()) <= 1.0, "exp2 {x:e}: {}", func::exp2(x));
        assert!(ulps(func::rcp(x), 1.0 / f64::from(x)) <= 1.0, "rcp {x:e}");
        if x > 0.0 {
            let want = f64::from(x).log2();
            assert!(want == 0.0 || ulps(func::log2(x), want) <= 1.0, "log2 {x:e}");
        }
    }
    assert_eq!(
        [f32::NEG_INFINITY, -200.0, -127.0, 0.0, 128.0, f32::INFINITY].map(func::exp2),
        [0.0, 0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY]
    );
    assert!(func::exp2(f32::NAN).is_nan());
}
