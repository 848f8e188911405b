//! `cvt`. PTX ISA 9.7.9.21.

use super::warp::{Row, Warp, lanes};
use crate::ast::Ty;
use crate::fp::{self, Round, flush};
use crate::op::{Cvt, Inst};

/// Executes one `cvt` for the lanes of `mask`.
#[inline(always)]
pub(crate) fn execute(warp: &mut Warp, inst: &Inst, cvt: Cvt, mask: u32) {
    let plain = cvt.round == Round::Rn && !cvt.relu && !cvt.satfinite && !cvt.ftz;
    match (cvt.to, cvt.from) {
        (Ty::Bf16x2, Ty::F32) if plain => pack_halves(warp, inst, mask, fp::f32_to_bf16),
        (Ty::F16x2, Ty::F32) if plain => pack_halves(warp, inst, mask, fp::f32_to_f16),
        (Ty::U64 | Ty::S64, Ty::U32) => {
            let r = warp.wide(inst.src[0]);
            warp.set_wide(inst.dst[0], &r, mask);
        }
        (Ty::U64 | Ty::S64, Ty::S32) if !cvt.sat => {
            let mut r = warp.wide(inst.src[0]);
            r.iter_mut().for_each(|v| *v = extend(*v, Ty::S32));
            warp.set_wide(inst.dst[0], &r, mask);
        }
        (Ty::U32 | Ty::S32, Ty::U64 | Ty::S64) if !cvt.sat => {
            let r = warp.d[inst.src[0].row()].map(|v| v as u32);
            warp.set(inst.dst[0], &r, mask);
        }
        (Ty::U32 | Ty::S32, Ty::U32 | Ty::S32) if !cvt.sat => {
            let a = warp.wide(inst.src[0]);
            for i in lanes(mask) {
                warp.put(inst.dst[0], i, extend(a[i], cvt.to));
            }
        }
        _ => general(warp, inst, cvt, mask),
    }
}

#[inline(always)]
fn pack_halves(warp: &mut Warp, inst: &Inst, mask: u32, f: impl Fn(f32) -> u16) {
    let (a, b) = (&warp.w[inst.src[0].row()], &warp.w[inst.src[1].row()]);
    // The first source is the upper half.
    let mut r: Row = [0; 32];
    for i in 0..32 {
        r[i] = u32::from(f(f32::from_bits(a[i]))) << 16 | u32::from(f(f32::from_bits(b[i])));
    }
    warp.set(inst.dst[0], &r, mask);
}

/// The low bits of `v` that `ty` has, extended to 64 bits as `ty` says.
fn extend(v: u64, ty: Ty) -> u64 {
    match (ty.bytes(), ty.is_signed()) {
        (1, true) => i64::from(v as i8) as u64,
        (1, false) => v & 0xff,
        (2, true) => i64::from(v as i16) as u64,
        (2, false) => v & 0xffff,
        (4, true) => i64::from(v as i32) as u64,
        (4, false) => v & 0xffff_ffff,
        _ => v,
    }
}

fn general(warp: &mut Warp, inst: &Inst, cvt: Cvt, mask: u32) {
    let a = warp.wide(inst.src[0]);
    let b = if cvt.packed { warp.wide(inst.src[1]) } else { [0; 32] };
    for i in lanes(mask) {
        let r = if cvt.packed {
            pair(cvt, f64::from(f32::from_bits(a[i] as u32)), f64::from(f32::from_bits(b[i] as u32)))
        } else if matches!(cvt.to, Ty::E4m3x2 | Ty::E5m2x2) {
            let half = |v: u64| f64::from(super::half::half_to_f32(v as u16, cvt.from == Ty::Bf16x2));
            pair(cvt, half(a[i] >> 16), half(a[i]))
        } else if matches!(cvt.to, Ty::F16x2 | Ty::Bf16x2) {
            widen_fp8(cvt, a[i] as u16)
        } else if let Some(nan) = nan_of(cvt, a[i]) {
            nan
        } else if cvt.from.is_float() {
            from_float(cvt, source(cvt, a[i]))
        } else {
            from_int(cvt, extend(a[i], cvt.from))
        };
        // A signed result in a wider register is sign-extended; 16-bit rows keep their upper half zero.
        let r = if inst.dst[0].is_double() || cvt.widen { extend(r, cvt.to) } else { narrow(r, cvt.to) };
        warp.put(inst.dst[0], i, r);
    }
}

/// Result of a NaN where that is no canonical one: cut off and made quiet from double precision, only shifted
/// from bfloat16, all ones as TF32 (cut off, where ties go away from zero).
fn nan_of(cvt: Cvt, v: u64) -> Option<u64> {
    if !cvt.from.is_float() || !source(cvt, v).is_nan() {
        return None;
    }
    let single = v >> 32 & 0x8000_0000 | 0x7fc0_0000 | v >> 29 & 0x3f_ffff;
    match (cvt.from, cvt.to) {
        (Ty::F64, Ty::F32) => Some(single),
        (Ty::F64, Ty::F16) => Some(single >> 16 & 0x8000 | 0x7c00 | single >> 13 & 0x3ff),
        (Ty::F64, Ty::S32) => Some(0x8000_0000),
        (Ty::Bf16, Ty::F32) => Some((v & 0xffff) << 16),
        (Ty::F32, Ty::Tf32) if cvt.round == Round::Rna => Some(v & !0x1fff),
        (Ty::F32, Ty::Tf32) => Some(0x7fff_e000),
        _ => None,
    }
}

fn narrow(r: u64, ty: Ty) -> u64 {
    match ty {
        Ty::S8 => u64::from(i16::from(r as i8) as u16),
        _ if ty.bytes() == 1 => r & 0xff,
        _ if ty.bytes() == 2 => r & 0xffff,
        _ => r,
    }
}

fn source(cvt: Cvt, v: u64) -> f64 {
    match cvt.from {
        Ty::F16 => f64::from(fp::f16_to_f32(v as u16)),
        Ty::Bf16 => f64::from(fp::bf16_to_f32(v as u16)),
        Ty::F64 => f64::from_bits(v),
        _ => f64::from(f32::from_bits(if cvt.ftz { flush(v as u32) } else { v as u32 })),
    }
}

fn from_float(cvt: Cvt, x: f64) -> u64 {
    let x = if cvt.integral && cvt.to.is_float() { integral(x, cvt.round) } else { x };
    let x = if cvt.sat && cvt.to.is_float() { if x > 0.0 { x.min(1.0) } else { 0.0 } } else { x };
    let x = if cvt.relu { relu(x) } else { x };
    match cvt.to {
        Ty::F64 => x.to_bits(),
        Ty::F32 => {
            let bits = fp::encode(x, fp::F32, cvt.round, false);
            u64::from(if cvt.ftz { flush(bits) } else { bits })
        }
        Ty::F16 => u64::from(fp::encode(x, fp::F16, cvt.round, cvt.satfinite)),
        Ty::Bf16 => u64::from(fp::encode(x, fp::BF16, cvt.round, cvt.satfinite)),
        Ty::Tf32 => u64::from(fp::tf32(x as f32, cvt.round)),
        _ => {
            let x = integral(x, cvt.round);
            let bits = cvt.to.bytes() * 8;
            if x.is_nan() {
                // NaN becomes 0 below 64 bits and the sign bit at 64.
                return if bits == 64 { 1 << 63 } else { 0 };
            }
            if cvt.to.is_signed() {
                let limit = 1i128 << (bits - 1);
                (x as i128).clamp(-limit, limit - 1) as i64 as u64
            } else {
                (x as i128).clamp(0, (1i128 << bits) - 1) as u64
            }
        }
    }
}

/// Replaces negative numbers and -0 by +0; NaN stays.
fn relu(x: f64) -> f64 {
    if x <= 0.0 { 0.0 } else { x }
}

fn integral(x: f64, round: Round) -> f64 {
    match round {
        Round::Rn => x.round_ties_even(),
        Round::Rz => x.trunc(),
        Round::Rm => x.floor(),
        Round::Rp => x.ceil(),
        Round::Rna => x.round(),
    }
}

fn from_int(cvt: Cvt, v: u64) -> u64 {
    let signed = cvt.from.is_signed();
    if cvt.to.is_float() {
        // Up to 53 bits a double is exact; longer integers are rounded to odd on the way.
        let magnitude = if signed { (v as i64).unsigned_abs() } else { v };
        let shift = 64u32.saturating_sub(magnitude.leading_zeros()).saturating_sub(53);
        let sticky = u64::from(shift > 0 && magnitude & ((1 << shift) - 1) != 0);
        let odd = ((magnitude >> shift) | sticky) as f64 * (1u64 << shift) as f64;
        let x = if signed && (v as i64) < 0 { -odd } else { odd };
        if cvt.to == Ty::F64 && cvt.round == Round::Rn {
            return (if signed { v as i64 as f64 } else { v as f64 }).to_bits();
        }
        return from_float(Cvt { integral: false, ..cvt }, x);
    }
    if !cvt.sat {
        return extend(v, cvt.to);
    }
    let value = if signed { i128::from(v as i64) } else { i128::from(v) };
    let bits = cvt.to.bytes() * 8;
    if cvt.to.is_signed() {
        let limit = 1i128 << (bits - 1);
        value.clamp(-limit, limit - 1) as i64 as u64
    } else {
        value.clamp(0, (1i128 << bits) - 1) as u64
    }
}

/// Two singles to a packed pair: the first source goes to the upper half.
fn pair(cvt: Cvt, high: f64, low: f64) -> u64 {
    let (format, bits, saturates) = match cvt.to {
        Ty::F16x2 => (fp::F16, 16, cvt.satfinite),
        Ty::Bf16x2 => (fp::BF16, 16, cvt.satfinite),
        Ty::E4m3x2 => (fp::E4M3, 8, true),
        Ty::E2m1x2 => (fp::E2M1, 4, true),
        _ => (fp::E5M2, 8, true),
    };
    let one = |x: f64| {
        let x = if cvt.relu { relu(x) } else { x };
        u64::from(fp::encode(x, format, cvt.round, saturates))
    };
    one(high) << bits | one(low)
}

/// `cvt.rn.f16x2.e4m3x2` and its like.
fn widen_fp8(cvt: Cvt, v: u16) -> u64 {
    let one = |b: u8| {
        let x = if cvt.from == Ty::E4m3x2 { fp::e4m3_to_f32(b) } else { fp::e5m2_to_f32(b) };
        let x = if cvt.relu { relu(x.into()) as f32 } else { x };
        u64::from(if cvt.to == Ty::F16x2 { fp::f32_to_f16(x) } else { fp::f32_to_bf16(x) })
    };
    one((v >> 8) as u8) << 16 | one(v as u8)
}
