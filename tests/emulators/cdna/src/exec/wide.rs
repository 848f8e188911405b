//! Vector arithmetic with 64-bit values, with carries, and the division helpers.

use super::lanes::{put, put64, source, source_hi};
use super::valu::{binary, frexp, ldexp, ternary};
use crate::error::Exec;
use crate::inst::Inst;
use crate::op::Op;
use crate::wave::{LANES, Lanes, Wave};

/// Source `k` as 64-bit lanes.
#[inline(always)]
fn wide(wave: &Wave, inst: &Inst, k: usize) -> [u64; LANES] {
    let (mut room_lo, mut room_hi) = (Lanes::ZERO, Lanes::ZERO);
    let lo = source(wave, inst, k, &mut room_lo);
    let hi = source_hi(wave, inst, k, &mut room_hi);
    std::array::from_fn(|l| u64::from(lo.0[l]) | u64::from(hi.0[l]) << 32)
}

#[inline(always)]
fn narrow(wave: &Wave, inst: &Inst, k: usize) -> [u32; LANES] {
    let mut room = Lanes::ZERO;
    source(wave, inst, k, &mut room).0
}

#[inline(always)]
fn store(wave: &mut Wave, inst: &Inst, f: impl Fn(usize) -> u64) {
    let (mut lo, mut hi) = (Lanes::ZERO, Lanes::ZERO);
    for l in 0..LANES {
        let value = f(l);
        lo.0[l] = value as u32;
        hi.0[l] = (value >> 32) as u32;
    }
    put64(wave, inst, &lo, &hi);
}

fn f64s(wave: &Wave, inst: &Inst, k: usize) -> [f64; LANES] {
    wide(wave, inst, k).map(f64::from_bits)
}

/// The clamp modifier: into [0, 1], NaN to 0.
fn saturate64(x: f64) -> f64 {
    if x > 1.0 {
        1.0
    } else if x > 0.0 {
        x
    } else {
        0.0
    }
}

/// f64 results with their output modifiers.
fn store_f64(wave: &mut Wave, inst: &Inst, f: impl Fn(usize) -> f64) {
    store(wave, inst, |l| {
        let value =
            f(l) * if inst.omod == 0 { 1.0 } else { [1.0, 2.0, 4.0, 0.5][usize::from(inst.omod & 3)] };
        (if inst.clamp { saturate64(value) } else { value }).to_bits()
    });
}

/// Sets the lane mask `inst.sdst` where `f` says so; inactive lanes get 0.
#[inline(always)]
fn set_mask(wave: &mut Wave, inst: &Inst, f: impl Fn(usize) -> bool) {
    let mut mask = 0u64;
    for l in 0..LANES {
        mask |= u64::from(f(l)) << l;
    }
    let mask = mask & wave.exec();
    wave.set_mask(inst.sdst, mask);
}

/// Sum or difference with carry in and out.
#[inline(always)]
fn carry(wave: &mut Wave, inst: &Inst, carry_in: bool, f: impl Fn(u32, u32, u32) -> (u32, bool)) {
    let mask = if carry_in { wave.scalar64(inst.src[2]) } else { 0 };
    let (a, b) = (narrow(wave, inst, 0), narrow(wave, inst, 1));
    let mut out = Lanes::ZERO;
    let mut carries = 0u64;
    for l in 0..LANES {
        let (value, carry) = f(a[l], b[l], (mask >> l & 1) as u32);
        out.0[l] = value;
        carries |= u64::from(carry) << l;
    }
    let carries = carries & wave.exec();
    put(wave, inst, out);
    wave.set_mask(inst.sdst, carries);
}

#[inline(always)]
fn add(a: u32, b: u32, c: u32) -> (u32, bool) {
    let sum = u64::from(a) + u64::from(b) + u64::from(c);
    (sum as u32, sum >> 32 != 0)
}

#[inline(always)]
fn sub(a: u32, b: u32, c: u32) -> (u32, bool) {
    let difference = i64::from(a) - i64::from(b) - i64::from(c);
    (difference as u32, difference < 0)
}

dispatch! {
    /// Executes a 64-bit or carrying instruction; `false` when it is none of these.
    pub(crate) fn wide_ops / wide_avx2 / wide_body(wave: &mut Wave, inst: &Inst) -> Exec<bool>
}

#[inline(always)]
fn wide_body(wave: &mut Wave, inst: &Inst) -> Exec<bool> {
    match inst.op {
        Op::VMovB64 => {
            let a = wide(wave, inst, 0);
            store(wave, inst, |l| a[l]);
        }
        Op::VLshlAddU64 => {
            let (a, b, c) = (wide(wave, inst, 0), narrow(wave, inst, 1), wide(wave, inst, 2));
            store(wave, inst, |l| (a[l] << (b[l] & 63)).wrapping_add(c[l]));
        }
        Op::VLshlrevB64 => {
            let (a, b) = (narrow(wave, inst, 0), wide(wave, inst, 1));
            store(wave, inst, |l| b[l] << (a[l] & 63));
        }
        Op::VLshrrevB64 => {
            let (a, b) = (narrow(wave, inst, 0), wide(wave, inst, 1));
            store(wave, inst, |l| b[l] >> (a[l] & 63));
        }
        Op::VAshrrevI64 => {
            let (a, b) = (narrow(wave, inst, 0), wide(wave, inst, 1));
            store(wave, inst, |l| ((b[l] as i64) >> (a[l] & 63)) as u64);
        }
        Op::VMadU64U32 => {
            let (a, b, c) = (narrow(wave, inst, 0), narrow(wave, inst, 1), wide(wave, inst, 2));
            let sum = |l: usize| (u64::from(a[l]) * u64::from(b[l])).overflowing_add(c[l]);
            set_mask(wave, inst, |l| sum(l).1);
            store(wave, inst, |l| sum(l).0);
        }
        Op::VMadI64I32 => {
            let (a, b, c) = (narrow(wave, inst, 0), narrow(wave, inst, 1), wide(wave, inst, 2));
            let sum = |l: usize| {
                let product = i64::from(a[l] as i32) * i64::from(b[l] as i32);
                product.overflowing_add(c[l] as i64)
            };
            set_mask(wave, inst, |l| sum(l).1);
            store(wave, inst, |l| sum(l).0 as u64);
        }
        Op::VAddCoU32 => carry(wave, inst, false, add),
        Op::VSubCoU32 => carry(wave, inst, false, sub),
        Op::VSubrevCoU32 => carry(wave, inst, false, |a, b, c| sub(b, a, c)),
        Op::VAddcCoU32 => carry(wave, inst, true, add),
        Op::VSubbCoU32 => carry(wave, inst, true, sub),
        Op::VSubbrevCoU32 => carry(wave, inst, true, |a, b, c| sub(b, a, c)),

        Op::VAddF64 => {
            let (a, b) = (f64s(wave, inst, 0), f64s(wave, inst, 1));
            store_f64(wave, inst, |l| a[l] + b[l]);
        }
        Op::VMulF64 => {
            let (a, b) = (f64s(wave, inst, 0), f64s(wave, inst, 1));
            store_f64(wave, inst, |l| a[l] * b[l]);
        }
        Op::VMinF64 => {
            let (a, b) = (f64s(wave, inst, 0), f64s(wave, inst, 1));
            store_f64(wave, inst, |l| a[l].min(b[l]));
        }
        Op::VMaxF64 => {
            let (a, b) = (f64s(wave, inst, 0), f64s(wave, inst, 1));
            store_f64(wave, inst, |l| a[l].max(b[l]));
        }
        Op::VFmaF64 => {
            let (a, b, c) = (f64s(wave, inst, 0), f64s(wave, inst, 1), f64s(wave, inst, 2));
            store_f64(wave, inst, |l| a[l].mul_add(b[l], c[l]));
        }
        Op::VFmacF64 => {
            let (a, b) = (f64s(wave, inst, 0), f64s(wave, inst, 1));
            let (lo, hi) = (*wave.vreg(inst.vdst), *wave.vreg(inst.vdst + 1));
            store_f64(wave, inst, |l| {
                let c = f64::from_bits(u64::from(lo.0[l]) | u64::from(hi.0[l]) << 32);
                a[l].mul_add(b[l], c)
            });
        }
        Op::VLdexpF64 => {
            let (a, b) = (f64s(wave, inst, 0), narrow(wave, inst, 1));
            store_f64(wave, inst, |l| {
                // Scales in two steps, so that neither factor leaves the range.
                let power = (b[l] as i32).clamp(-2100, 2100);
                let half = power / 2;
                let two = |p: i32| 2f64.powi(p);
                a[l] * two(half) * two(power - half)
            });
        }
        Op::VRcpF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| 1.0 / a[l]);
        }
        Op::VRsqF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| 1.0 / a[l].sqrt());
        }
        Op::VSqrtF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| a[l].sqrt());
        }
        Op::VTruncF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| a[l].trunc());
        }
        Op::VCeilF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| a[l].ceil());
        }
        Op::VFloorF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| a[l].floor());
        }
        Op::VRndneF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| a[l].round_ties_even());
        }
        Op::VFractF64 => {
            let a = f64s(wave, inst, 0);
            store_f64(wave, inst, |l| (a[l] - a[l].floor()).min(1.0 - f64::EPSILON / 2.0));
        }

        // The three steps of a correctly rounded f32 division (CDNA3 ISA, V_DIV_*).
        Op::VDivScaleF32 => {
            let a = narrow(wave, inst, 0);
            let (b, c) = (narrow(wave, inst, 1), narrow(wave, inst, 2));
            let scaled =
                |l: usize| div_scale(f32::from_bits(a[l]), f32::from_bits(b[l]), f32::from_bits(c[l]));
            set_mask(wave, inst, |l| scaled(l).1);
            put(wave, inst, Lanes(std::array::from_fn(|l| scaled(l).0.to_bits())));
        }
        Op::VDivFmasF32 => {
            let vcc = wave.vcc();
            let (a, b, c) = (narrow(wave, inst, 0), narrow(wave, inst, 1), narrow(wave, inst, 2));
            let out = std::array::from_fn(|l| {
                let f = f32::from_bits;
                div_fmas(f(a[l]), f(b[l]), f(c[l]), vcc >> l & 1 == 1).to_bits()
            });
            put(wave, inst, Lanes(out));
        }
        Op::VDivFixupF32 => ternary(wave, inst, |a, b, c| {
            let f = f32::from_bits;
            div_fixup(f(a), f(b), f(c)).to_bits()
        }),
        Op::VMadI32I16 => ternary(wave, inst, |a, b, c| {
            (i32::from(a as i16).wrapping_mul(i32::from(b as i16)) as u32).wrapping_add(c)
        }),
        Op::VMadU32U16 => ternary(wave, inst, |a, b, c| {
            u32::from(a as u16).wrapping_mul(u32::from(b as u16)).wrapping_add(c)
        }),
        Op::VAshrPkI8I32 => ternary(wave, inst, |a, b, c| {
            let sat = |x: u32| ((x as i32) >> (c & 31)).clamp(-128, 127) as u32 & 0xff;
            sat(a) | sat(b) << 8
        }),
        Op::VAshrPkU8I32 => ternary(wave, inst, |a, b, c| {
            let sat = |x: u32| ((x as i32) >> (c & 31)).clamp(0, 255) as u32;
            sat(a) | sat(b) << 8
        }),
        Op::VMbcntLoU32B32 => mbcnt(wave, inst, 0),
        Op::VMbcntHiU32B32 => mbcnt(wave, inst, 32),
        Op::VPackB32F16 => binary(wave, inst, |a, b| a & 0xffff | b << 16),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Set bits of the mask below the lane, in the half that begins at `first`.
fn mbcnt(wave: &mut Wave, inst: &Inst, first: usize) {
    let (a, b) = (narrow(wave, inst, 0), narrow(wave, inst, 1));
    let out = std::array::from_fn(|l| {
        let below = l.saturating_sub(first).min(32);
        let mask = ((1u64 << below) - 1) as u32;
        (a[l] & mask).count_ones().wrapping_add(b[l])
    });
    put(wave, inst, Lanes(out));
}

/// `src0` is the denominator `b` or the numerator `c`, scaled so that the quotient's steps neither overflow
/// nor lose bits; the flag tells `div_fmas` to undo it.
fn div_scale(a: f32, b: f32, c: f32) -> (f32, bool) {
    let exponent = |x: f32| frexp(x).1;
    let quotient = exponent(c) - exponent(b);
    if b == 0.0 || c == 0.0 {
        return (f32::NAN, false);
    }
    let subnormal = |x: f32| x != 0.0 && x.abs() < f32::MIN_POSITIVE;
    let is_denominator = a.to_bits() == b.to_bits();
    if quotient >= 96 {
        return (if is_denominator { ldexp(a, 64) } else { a }, true);
    }
    if subnormal(b) {
        return (ldexp(a, 64), false);
    }
    // The manual's pseudocode has +64 here, which would overflow.
    if subnormal(1.0 / b) && subnormal(c / b) {
        return (if is_denominator { ldexp(a, -64) } else { a }, true);
    }
    if subnormal(1.0 / b) {
        return (ldexp(a, -64), false);
    }
    if subnormal(c / b) {
        return (if is_denominator { a } else { ldexp(a, 64) }, true);
    }
    if exponent(c) - 1 <= -104 {
        return (ldexp(a, 64), false);
    }
    (a, false)
}

/// The last step towards the quotient, whose scale is undone: it was made small if it was large, and large if it was
/// small, which the sum's exponent tells. (The manual's pseudocode has a factor of 2^32 both ways, which would give no
/// quotient.)
fn div_fmas(a: f32, b: f32, c: f32, scaled: bool) -> f32 {
    if !scaled {
        return a.mul_add(b, c);
    }
    // Rounded once, after it is scaled: f64 holds the product and loses nothing of the sum that f32 would keep.
    let sum = f64::from(a) * f64::from(b) + f64::from(c);
    (sum * if c.abs() >= 2.0 { 2f64.powi(64) } else { 2f64.powi(-64) }) as f32
}

/// `quotient` of `numerator / denominator`, special cases put right.
fn div_fixup(quotient: f32, denominator: f32, numerator: f32) -> f32 {
    let negative = denominator.is_sign_negative() != numerator.is_sign_negative();
    let sign = |x: f32| if negative { -x } else { x };
    if numerator.is_nan() {
        numerator
    } else if denominator.is_nan() {
        denominator
    } else if denominator == 0.0 && numerator == 0.0 || denominator.is_infinite() && numerator.is_infinite() {
        f32::NAN
    } else if denominator == 0.0 || numerator.is_infinite() {
        sign(f32::INFINITY)
    } else if denominator.is_infinite() || numerator == 0.0 {
        sign(0.0)
    } else if frexp(numerator).1 - frexp(denominator).1 < -150 {
        // A value below half the smallest subnormal becomes 0.
        sign(0.0)
    } else if frexp(numerator).1 - frexp(denominator).1 > 129 {
        // Beyond the largest number.
        sign(f32::INFINITY)
    } else {
        sign(quotient.abs())
    }
}
