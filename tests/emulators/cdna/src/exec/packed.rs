//! VOP3P: two 16-bit or two 32-bit operations at once, mixed precision, dot products.

use super::convert::{fma_h, h, to_h};
use super::lanes::{masked, put64};
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Inst, Src, Ty};
use crate::num::{bf16, f16, func};
use crate::op::Op;
use crate::wave::{LANES, Lanes, Wave};

/// Halves of source `k`, each in its own lanes, with `op_sel` and signs applied.
#[inline(always)]
fn halves(wave: &Wave, inst: &Inst, k: usize) -> (Lanes, Lanes) {
    let raw = match inst.src[k] {
        Src::V(reg) => *wave.vreg(reg),
        other => Lanes::splat(wave.scalar(other)),
    };
    let pick = |select: u8, negate: u8| {
        let shift = if select >> k & 1 == 1 { 16 } else { 0 };
        let sign = if negate >> k & 1 == 1 && inst.src_ty[k] == Ty::F16x2 { 0x8000 } else { 0 };
        let mut out = raw;
        for lane in &mut out.0 {
            *lane = (*lane >> shift & 0xffff) ^ sign;
        }
        out
    };
    (pick(inst.op_sel, inst.neg), pick(inst.op_sel_hi, inst.neg_hi))
}

/// The two f32 of source `k`.
#[inline(always)]
fn pair(wave: &Wave, inst: &Inst, k: usize) -> (Lanes, Lanes) {
    let pick = |select: u8, negate: u8| {
        let high = select >> k & 1 == 1;
        let raw = match inst.src[k] {
            Src::V(reg) => *wave.vreg(reg + u16::from(high)),
            Src::S(reg) => Lanes::splat(wave.s[usize::from(reg + u8::from(high)) & 127]),
            other => Lanes::splat((wave.scalar64(other) >> if high { 32 } else { 0 }) as u32),
        };
        if negate >> k & 1 == 0 {
            return raw;
        }
        let mut out = raw;
        for lane in &mut out.0 {
            *lane ^= 0x8000_0000;
        }
        out
    };
    (pick(inst.op_sel, inst.neg), pick(inst.op_sel_hi, inst.neg_hi))
}

#[inline(always)]
fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

#[inline(always)]
fn packed32(wave: &mut Wave, inst: &Inst, sources: usize, op: impl Fn(f32, f32, f32) -> f32) {
    let (a_lo, a_hi) = pair(wave, inst, 0);
    let (b_lo, b_hi) = pair(wave, inst, 1);
    let (c_lo, c_hi) = if sources > 2 { pair(wave, inst, 2) } else { (Lanes::ZERO, Lanes::ZERO) };
    let (mut lo, mut hi) = (Lanes::ZERO, Lanes::ZERO);
    for l in 0..LANES {
        lo.0[l] = op(f(a_lo.0[l]), f(b_lo.0[l]), f(c_lo.0[l])).to_bits();
        hi.0[l] = op(f(a_hi.0[l]), f(b_hi.0[l]), f(c_hi.0[l])).to_bits();
    }
    if inst.clamp {
        for lane in lo.0.iter_mut().chain(&mut hi.0) {
            *lane = func::saturate(f(*lane)).to_bits();
        }
    }
    if wave.flushes_f32() {
        for lane in lo.0.iter_mut().chain(&mut hi.0) {
            *lane = func::flush(f(*lane)).to_bits();
        }
    }
    put64(wave, inst, &lo, &hi);
}

#[inline(always)]
fn packed16(wave: &mut Wave, inst: &Inst, sources: usize, op: impl Fn(u32, u32, u32) -> u32) {
    let (a_lo, a_hi) = halves(wave, inst, 0);
    let (b_lo, b_hi) = halves(wave, inst, 1);
    let (c_lo, c_hi) = if sources > 2 { halves(wave, inst, 2) } else { (Lanes::ZERO, Lanes::ZERO) };
    let mut out = Lanes::ZERO;
    for l in 0..LANES {
        let lo = op(a_lo.0[l], b_lo.0[l], c_lo.0[l]) & 0xffff;
        let hi = op(a_hi.0[l], b_hi.0[l], c_hi.0[l]) & 0xffff;
        out.0[l] = lo | hi << 16;
    }
    if inst.clamp && inst.dst_ty == Ty::F16x2 {
        let clamp = |x: u32| to_h(func::saturate(h(x)));
        for lane in &mut out.0 {
            *lane = clamp(*lane & 0xffff) | clamp(*lane >> 16) << 16;
        }
    }
    let exec = wave.exec();
    masked(wave.vreg_mut(inst.vdst), &out, exec);
}

/// Source `k` of `v_fma_mix`: f32, or the half that `op_sel` names; `neg_hi` stands for absolute value.
#[inline(always)]
fn mix(wave: &Wave, inst: &Inst, k: usize) -> [f32; LANES] {
    let raw = match inst.src[k] {
        Src::V(reg) => *wave.vreg(reg),
        other => Lanes::splat(wave.scalar(other)),
    };
    let half = inst.op_sel_hi >> k & 1 == 1;
    let shift = if inst.op_sel >> k & 1 == 1 { 16 } else { 0 };
    let mut out = [0f32; LANES];
    for l in 0..LANES {
        out[l] = if half { f16::to_f32((raw.0[l] >> shift) as u16) } else { f(raw.0[l]) };
    }
    if inst.neg_hi >> k & 1 == 1 {
        out = out.map(f32::abs);
    }
    if inst.neg >> k & 1 == 1 {
        out = out.map(|x| -x);
    }
    out
}

#[inline(always)]
fn dot2(wave: &mut Wave, inst: &Inst, widen: impl Fn(u32) -> f32, accumulate: bool) {
    let (a_lo, a_hi) = halves(wave, inst, 0);
    let (b_lo, b_hi) = halves(wave, inst, 1);
    let c = match inst.src[2] {
        _ if accumulate => *wave.vreg(inst.vdst),
        Src::V(reg) => *wave.vreg(reg),
        other => Lanes::splat(wave.scalar(other)),
    };
    let mut out = Lanes::ZERO;
    for l in 0..LANES {
        let sum = widen(a_hi.0[l]).mul_add(widen(b_hi.0[l]), f(c.0[l]));
        out.0[l] = widen(a_lo.0[l]).mul_add(widen(b_lo.0[l]), sum).to_bits();
    }
    let exec = wave.exec();
    masked(wave.vreg_mut(inst.vdst), &out, exec);
}

dispatch! {
    /// Executes a packed instruction; `false` when it is none of these.
    pub(crate) fn packed / packed_avx2 / packed_body(wave: &mut Wave, inst: &Inst) -> Exec<bool>
}

#[inline(always)]
fn packed_body(wave: &mut Wave, inst: &Inst) -> Exec<bool> {
    let integer_clamp = inst.clamp && inst.src_ty[0] == Ty::B16x2;
    if integer_clamp {
        return Err(Stop::new(FaultKind::UnknownInstruction, format!("clamp on {}", inst.name)));
    }
    match inst.op {
        Op::VPkFmaF32 => packed32(wave, inst, 3, f32::mul_add),
        Op::VPkMulF32 => packed32(wave, inst, 2, |a, b, _| a * b),
        Op::VPkAddF32 => packed32(wave, inst, 2, |a, b, _| a + b),
        Op::VPkMovB32 => {
            // The low result takes op_sel's choice of source 0, the high one op_sel's choice of source 1.
            let (lo, _) = pair(wave, inst, 0);
            let (hi, _) = pair(wave, inst, 1);
            put64(wave, inst, &lo, &hi);
        }
        Op::VPkFmaF16 => packed16(wave, inst, 3, fma_h),
        Op::VPkMulF16 => packed16(wave, inst, 2, |a, b, _| to_h(h(a) * h(b))),
        Op::VPkAddF16 => packed16(wave, inst, 2, |a, b, _| to_h(h(a) + h(b))),
        Op::VPkMinF16 => packed16(wave, inst, 2, |a, b, _| to_h(h(a).min(h(b)))),
        Op::VPkMaxF16 => packed16(wave, inst, 2, |a, b, _| to_h(h(a).max(h(b)))),
        Op::VPkMinimum3F16 => packed16(wave, inst, 3, |a, b, c| {
            let nan = h(a).is_nan() || h(b).is_nan() || h(c).is_nan();
            if nan { 0x7e00 } else { to_h(h(a).min(h(b)).min(h(c))) }
        }),
        Op::VPkMaximum3F16 => packed16(wave, inst, 3, |a, b, c| {
            let nan = h(a).is_nan() || h(b).is_nan() || h(c).is_nan();
            if nan { 0x7e00 } else { to_h(h(a).max(h(b)).max(h(c))) }
        }),
        Op::VPkAddU16 | Op::VPkAddI16 => packed16(wave, inst, 2, |a, b, _| a.wrapping_add(b)),
        Op::VPkSubU16 | Op::VPkSubI16 => packed16(wave, inst, 2, |a, b, _| a.wrapping_sub(b)),
        Op::VPkMulLoU16 => packed16(wave, inst, 2, |a, b, _| a.wrapping_mul(b)),
        Op::VPkMadU16 | Op::VPkMadI16 => {
            packed16(wave, inst, 3, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
        }
        Op::VPkLshlrevB16 => packed16(wave, inst, 2, |a, b, _| b << (a & 15)),
        Op::VPkLshrrevB16 => packed16(wave, inst, 2, |a, b, _| b >> (a & 15)),
        Op::VPkAshrrevI16 => {
            packed16(wave, inst, 2, |a, b, _| (i32::from(b as i16) >> (a & 15)) as u32);
        }
        Op::VPkMaxU16 => packed16(wave, inst, 2, |a, b, _| a.max(b)),
        Op::VPkMinU16 => packed16(wave, inst, 2, |a, b, _| a.min(b)),
        Op::VPkMaxI16 => packed16(wave, inst, 2, |a, b, _| (a as i16).max(b as i16) as u32),
        Op::VPkMinI16 => packed16(wave, inst, 2, |a, b, _| (a as i16).min(b as i16) as u32),
        Op::VFmaMixF32 | Op::VFmaMixloF16 | Op::VFmaMixhiF16 => {
            let (a, b, c) = (mix(wave, inst, 0), mix(wave, inst, 1), mix(wave, inst, 2));
            let mut sum = [0f32; LANES];
            for l in 0..LANES {
                sum[l] = a[l].mul_add(b[l], c[l]);
            }
            if inst.clamp {
                sum = sum.map(func::saturate);
            }
            let old = *wave.vreg(inst.vdst);
            let mut out = Lanes::ZERO;
            for l in 0..LANES {
                out.0[l] = match inst.op {
                    Op::VFmaMixF32 => sum[l].to_bits(),
                    Op::VFmaMixloF16 => old.0[l] & 0xffff_0000 | to_h(sum[l]),
                    _ => old.0[l] & 0xffff | to_h(sum[l]) << 16,
                };
            }
            let exec = wave.exec();
            masked(wave.vreg_mut(inst.vdst), &out, exec);
        }
        Op::VDot2F32F16 => dot2(wave, inst, |x| f16::to_f32(x as u16), false),
        Op::VDot2F32Bf16 => dot2(wave, inst, |x| bf16::to_f32(x as u16), false),
        _ => return Ok(false),
    }
    Ok(true)
}
