//! Vector arithmetic on 32-bit values.

use super::lanes::{deliver, destination, operand};
use crate::error::Exec;
use crate::inst::Inst;
use crate::num::func;
use crate::op::Op;
use crate::wave::{LANES, VREGS, Wave};

/// Lanes that a loop handles at a time: one vector register of the host. Sources are read before the result is written,
/// so that source and destination may be one register.
const STEP: usize = 8;

#[inline(always)]
fn take(wave: &Wave, at: usize, step: usize) -> [u32; STEP] {
    let mut out = [0; STEP];
    out.copy_from_slice(&wave.v[at].0[step * STEP..(step + 1) * STEP]);
    out
}

#[inline(always)]
fn give(wave: &mut Wave, at: usize, step: usize, values: [u32; STEP]) {
    wave.v[at].0[step * STEP..(step + 1) * STEP].copy_from_slice(&values);
}

#[inline(always)]
pub(super) fn unary(wave: &mut Wave, inst: &Inst, f: impl Fn(u32) -> u32) {
    let a = operand(wave, inst, 0);
    let out = destination(wave, inst);
    for step in 0..LANES / STEP {
        let a = take(wave, a, step);
        let mut values = [0; STEP];
        for i in 0..STEP {
            values[i] = f(a[i]);
        }
        give(wave, out, step, values);
    }
    deliver(wave, inst, out);
}

#[inline(always)]
pub(super) fn binary(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32) -> u32) {
    let a = operand(wave, inst, 0);
    let b = operand(wave, inst, 1);
    let out = destination(wave, inst);
    for step in 0..LANES / STEP {
        let (a, b) = (take(wave, a, step), take(wave, b, step));
        let mut values = [0; STEP];
        for i in 0..STEP {
            values[i] = f(a[i], b[i]);
        }
        give(wave, out, step, values);
    }
    deliver(wave, inst, out);
}

#[inline(always)]
pub(super) fn ternary(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) {
    let a = operand(wave, inst, 0);
    let b = operand(wave, inst, 1);
    let c = operand(wave, inst, 2);
    three(wave, inst, [a, b, c], f);
}

/// The old destination is the third source.
#[inline(always)]
pub(super) fn accumulate(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) {
    let a = operand(wave, inst, 0);
    let b = operand(wave, inst, 1);
    three(wave, inst, [a, b, usize::from(inst.vdst) % VREGS], f);
}

#[inline(always)]
fn three(wave: &mut Wave, inst: &Inst, sources: [usize; 3], f: impl Fn(u32, u32, u32) -> u32) {
    let out = destination(wave, inst);
    for step in 0..LANES / STEP {
        let a = take(wave, sources[0], step);
        let b = take(wave, sources[1], step);
        let c = take(wave, sources[2], step);
        let mut values = [0; STEP];
        for i in 0..STEP {
            values[i] = f(a[i], b[i], c[i]);
        }
        give(wave, out, step, values);
    }
    deliver(wave, inst, out);
}

#[inline(always)]
fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// Signed low 24 bits.
#[inline(always)]
fn i24(value: u32) -> i32 {
    (value << 8) as i32 >> 8
}

#[inline(always)]
fn u24(value: u32) -> u32 {
    value & 0xff_ffff
}

#[inline(always)]
fn med3<T: PartialOrd + Copy>(a: T, b: T, c: T) -> T {
    let (lo, hi) = if a < b { (a, b) } else { (b, a) };
    if c < lo {
        lo
    } else if c > hi {
        hi
    } else {
        c
    }
}

dispatch! {
    /// Executes a vector instruction of one result register; `false` when it is none of these.
    pub(crate) fn valu / valu_avx2 / valu_body(wave: &mut Wave, inst: &Inst) -> Exec<bool>
}

#[inline(always)]
fn valu_body(wave: &mut Wave, inst: &Inst) -> Exec<bool> {
    match inst.op {
        Op::VMovB32 | Op::VAccvgprReadB32 | Op::VAccvgprWriteB32 | Op::VAccvgprMovB32 => {
            unary(wave, inst, |a| a);
        }
        Op::VNop => {}
        Op::VCndmaskB32 => {
            let mask = wave.scalar64(inst.src[2]);
            let a = operand(wave, inst, 0);
            let b = operand(wave, inst, 1);
            let out = destination(wave, inst);
            for step in 0..LANES / STEP {
                let (a, b) = (take(wave, a, step), take(wave, b, step));
                let bits = (mask >> (step * STEP)) as u32;
                let mut values = a;
                for i in 0..STEP {
                    values[i] = if bits >> i & 1 == 1 { b[i] } else { a[i] };
                }
                give(wave, out, step, values);
            }
            deliver(wave, inst, out);
        }

        Op::VAddF32 => binary(wave, inst, |a, b| (f(a) + f(b)).to_bits()),
        Op::VSubF32 => binary(wave, inst, |a, b| (f(a) - f(b)).to_bits()),
        Op::VSubrevF32 => binary(wave, inst, |a, b| (f(b) - f(a)).to_bits()),
        Op::VMulF32 => binary(wave, inst, |a, b| (f(a) * f(b)).to_bits()),
        Op::VMulLegacyF32 => {
            binary(wave, inst, |a, b| if f(a) == 0.0 || f(b) == 0.0 { 0 } else { (f(a) * f(b)).to_bits() });
        }
        Op::VMinF32 => binary(wave, inst, |a, b| f(a).min(f(b)).to_bits()),
        Op::VMaxF32 => binary(wave, inst, |a, b| f(a).max(f(b)).to_bits()),
        Op::VFmaF32 | Op::VFmamkF32 | Op::VFmaakF32 => {
            ternary(wave, inst, |a, b, c| f(a).mul_add(f(b), f(c)).to_bits());
        }
        Op::VFmacF32 => accumulate(wave, inst, |a, b, c| f(a).mul_add(f(b), f(c)).to_bits()),
        Op::VMadF32 | Op::VMadmkF32 | Op::VMadakF32 => {
            ternary(wave, inst, |a, b, c| (f(a) * f(b) + f(c)).to_bits());
        }
        Op::VMacF32 => accumulate(wave, inst, |a, b, c| (f(a) * f(b) + f(c)).to_bits()),
        Op::VMin3F32 => ternary(wave, inst, |a, b, c| f(a).min(f(b)).min(f(c)).to_bits()),
        Op::VMax3F32 => ternary(wave, inst, |a, b, c| f(a).max(f(b)).max(f(c)).to_bits()),
        Op::VMed3F32 => ternary(wave, inst, |a, b, c| {
            if f(a).is_nan() || f(b).is_nan() || f(c).is_nan() {
                f(a).min(f(b)).min(f(c)).to_bits()
            } else {
                med3(f(a), f(b), f(c)).to_bits()
            }
        }),
        // IEEE 754-2019 minimum and maximum: a NaN wins.
        Op::VMinimum3F32 => ternary(wave, inst, |a, b, c| {
            let nan = f(a).is_nan() || f(b).is_nan() || f(c).is_nan();
            if nan { f32::NAN.to_bits() } else { f(a).min(f(b)).min(f(c)).to_bits() }
        }),
        Op::VMaximum3F32 => ternary(wave, inst, |a, b, c| {
            let nan = f(a).is_nan() || f(b).is_nan() || f(c).is_nan();
            if nan { f32::NAN.to_bits() } else { f(a).max(f(b)).max(f(c)).to_bits() }
        }),

        Op::VExpF32 => unary(wave, inst, |a| func::exp2(f(a)).to_bits()),
        Op::VLogF32 => unary(wave, inst, |a| func::log2(f(a)).to_bits()),
        Op::VRcpF32 | Op::VRcpIflagF32 => unary(wave, inst, |a| func::rcp(f(a)).to_bits()),
        Op::VRsqF32 => unary(wave, inst, |a| func::rsq(f(a)).to_bits()),
        Op::VSqrtF32 => unary(wave, inst, |a| f(a).sqrt().to_bits()),
        // Arguments are in revolutions.
        Op::VSinF32 => unary(wave, inst, |a| (turns(f(a)).sin() as f32).to_bits()),
        Op::VCosF32 => unary(wave, inst, |a| (turns(f(a)).cos() as f32).to_bits()),
        Op::VFractF32 => unary(wave, inst, |a| {
            // The result stays below 1 even where x - floor x rounds to 1.
            (f(a) - f(a).floor()).min(f32::from_bits(0x3f7f_ffff)).to_bits()
        }),
        Op::VTruncF32 => unary(wave, inst, |a| f(a).trunc().to_bits()),
        Op::VCeilF32 => unary(wave, inst, |a| f(a).ceil().to_bits()),
        Op::VFloorF32 => unary(wave, inst, |a| f(a).floor().to_bits()),
        Op::VRndneF32 => unary(wave, inst, |a| f(a).round_ties_even().to_bits()),
        Op::VLdexpF32 => binary(wave, inst, |a, b| ldexp(f(a), b as i32).to_bits()),
        Op::VFrexpMantF32 => unary(wave, inst, |a| frexp(f(a)).0.to_bits()),
        Op::VFrexpExpI32F32 => unary(wave, inst, |a| frexp(f(a)).1 as u32),

        Op::VAddU32 if inst.clamp => binary(wave, inst, u32::saturating_add),
        Op::VSubU32 if inst.clamp => binary(wave, inst, u32::saturating_sub),
        Op::VSubrevU32 if inst.clamp => binary(wave, inst, |a, b| b.saturating_sub(a)),
        Op::VSubrevU32 => binary(wave, inst, |a, b| b.wrapping_sub(a)),
        Op::VAddI32 if inst.clamp => {
            binary(wave, inst, |a, b| (a as i32).saturating_add(b as i32) as u32);
        }
        Op::VAddU32 | Op::VAddI32 => binary(wave, inst, u32::wrapping_add),
        Op::VSubI32 if inst.clamp => {
            binary(wave, inst, |a, b| (a as i32).saturating_sub(b as i32) as u32);
        }
        Op::VSubU32 | Op::VSubI32 => binary(wave, inst, u32::wrapping_sub),
        Op::VMulLoU32 => binary(wave, inst, u32::wrapping_mul),
        Op::VMulHiU32 => binary(wave, inst, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        Op::VMulHiI32 => {
            binary(wave, inst, |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
        }
        Op::VMulU32U24 => binary(wave, inst, |a, b| u24(a).wrapping_mul(u24(b))),
        Op::VMulI32I24 => binary(wave, inst, |a, b| i24(a).wrapping_mul(i24(b)) as u32),
        Op::VMulHiU32U24 => {
            binary(wave, inst, |a, b| ((u64::from(u24(a)) * u64::from(u24(b))) >> 32) as u32);
        }
        Op::VMulHiI32I24 => {
            binary(wave, inst, |a, b| ((i64::from(i24(a)) * i64::from(i24(b))) >> 32) as u32);
        }
        Op::VMadU32U24 => {
            ternary(wave, inst, |a, b, c| u24(a).wrapping_mul(u24(b)).wrapping_add(c));
        }
        Op::VMadI32I24 => {
            ternary(wave, inst, |a, b, c| (i24(a).wrapping_mul(i24(b)) as u32).wrapping_add(c));
        }
        Op::VMinI32 => binary(wave, inst, |a, b| (a as i32).min(b as i32) as u32),
        Op::VMaxI32 => binary(wave, inst, |a, b| (a as i32).max(b as i32) as u32),
        Op::VMinU32 => binary(wave, inst, u32::min),
        Op::VMaxU32 => binary(wave, inst, u32::max),
        Op::VMin3I32 => ternary(wave, inst, |a, b, c| (a as i32).min(b as i32).min(c as i32) as u32),
        Op::VMax3I32 => ternary(wave, inst, |a, b, c| (a as i32).max(b as i32).max(c as i32) as u32),
        Op::VMin3U32 => ternary(wave, inst, |a, b, c| a.min(b).min(c)),
        Op::VMax3U32 => ternary(wave, inst, |a, b, c| a.max(b).max(c)),
        Op::VMed3I32 => ternary(wave, inst, |a, b, c| med3(a as i32, b as i32, c as i32) as u32),
        Op::VMed3U32 => ternary(wave, inst, med3),

        Op::VLshlrevB32 => binary(wave, inst, |a, b| b << (a & 31)),
        Op::VLshrrevB32 => binary(wave, inst, |a, b| b >> (a & 31)),
        Op::VAshrrevI32 => binary(wave, inst, |a, b| ((b as i32) >> (a & 31)) as u32),
        Op::VAndB32 => binary(wave, inst, |a, b| a & b),
        Op::VOrB32 => binary(wave, inst, |a, b| a | b),
        Op::VXorB32 => binary(wave, inst, |a, b| a ^ b),
        Op::VXnorB32 => binary(wave, inst, |a, b| !(a ^ b)),
        Op::VNotB32 => unary(wave, inst, |a| !a),
        Op::VBfrevB32 => unary(wave, inst, u32::reverse_bits),
        Op::VFfbhU32 => unary(wave, inst, |a| if a == 0 { !0 } else { a.leading_zeros() }),
        Op::VFfblB32 => unary(wave, inst, |a| if a == 0 { !0 } else { a.trailing_zeros() }),
        Op::VFfbhI32 => unary(wave, inst, |a| {
            let folded = a ^ ((a as i32) >> 31) as u32;
            if folded == 0 { !0 } else { folded.leading_zeros() }
        }),
        Op::VBcntU32B32 => binary(wave, inst, |a, b| a.count_ones().wrapping_add(b)),
        Op::VBfmB32 => binary(wave, inst, |a, b| ((1u32 << (a & 31)) - 1) << (b & 31)),
        Op::VBfeU32 => ternary(wave, inst, |a, b, c| {
            let (offset, width) = (b & 31, c & 31);
            a >> offset & ((1u32 << width) - 1)
        }),
        Op::VBfeI32 => ternary(wave, inst, bfe_i32),
        Op::VBfiB32 => ternary(wave, inst, |a, b, c| a & b | !a & c),
        Op::VAlignbitB32 => {
            ternary(wave, inst, |a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (c & 31)) as u32);
        }
        Op::VAlignbyteB32 => {
            ternary(wave, inst, |a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (8 * (c & 3))) as u32);
        }
        Op::VPermB32 => ternary(wave, inst, perm),
        Op::VLshlAddU32 => ternary(wave, inst, |a, b, c| (a << (b & 31)).wrapping_add(c)),
        Op::VAddLshlU32 => ternary(wave, inst, |a, b, c| a.wrapping_add(b) << (c & 31)),
        Op::VAdd3U32 => ternary(wave, inst, |a, b, c| a.wrapping_add(b).wrapping_add(c)),
        Op::VLshlOrB32 => ternary(wave, inst, |a, b, c| a << (b & 31) | c),
        Op::VAndOrB32 => ternary(wave, inst, |a, b, c| a & b | c),
        Op::VOr3B32 => ternary(wave, inst, |a, b, c| a | b | c),
        Op::VXadU32 => ternary(wave, inst, |a, b, c| (a ^ b).wrapping_add(c)),
        Op::VBitop3B32 => {
            let table = inst.imm as u32;
            ternary(wave, inst, |a, b, c| bitop3(table, a, b, c));
        }
        Op::VBitop3B16 => {
            let table = inst.imm as u32;
            ternary(wave, inst, |a, b, c| bitop3(table, a, b, c) & 0xffff);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Fraction of a turn in radians, as f64.
#[inline(always)]
fn turns(x: f32) -> f64 {
    f64::from(x).fract() * std::f64::consts::TAU
}

#[inline(always)]
pub(super) fn ldexp(x: f32, power: i32) -> f32 {
    let power = power.clamp(-400, 400);
    (f64::from(x) * f64::from_bits(((power + 1023) as u64) << 52)) as f32
}

/// Mantissa in [0.5, 1) and exponent; zero, infinity and NaN have exponent 0.
#[inline(always)]
pub(super) fn frexp(x: f32) -> (f32, i32) {
    if x == 0.0 || !x.is_finite() {
        return (x, 0);
    }
    let wide = f64::from(x).to_bits();
    let exponent = (wide >> 52 & 0x7ff) as i32 - 1022;
    let mantissa = f64::from_bits(wide & !(0x7ff << 52) | 1022 << 52);
    (mantissa as f32, exponent)
}

#[inline(always)]
pub(super) fn bfe_i32(a: u32, b: u32, c: u32) -> u32 {
    let (offset, width) = (b & 31, c & 31);
    if width == 0 {
        return 0;
    }
    let field = a >> offset;
    let shift = 32 - width;
    ((field << shift) as i32 >> shift) as u32
}

/// Byte permute: selectors 0-3 from `b`, 4-7 from `a`, 8-11 sign bytes, 12 zero, above 0xff.
#[inline(always)]
fn perm(a: u32, b: u32, selectors: u32) -> u32 {
    let both = u64::from(a) << 32 | u64::from(b);
    let mut out = 0;
    for byte in 0..4 {
        let select = selectors >> (8 * byte) & 0xff;
        let value = match select {
            0..=7 => (both >> (8 * select) & 0xff) as u32,
            8..=11 => {
                // Sign of the four 16-bit halves.
                let sign = both >> (16 * (select - 8) + 15) & 1;
                if sign == 1 { 0xff } else { 0 }
            }
            12 => 0,
            _ => 0xff,
        };
        out |= value << (8 * byte);
    }
    out
}

/// Any function of three bits, by its truth table: bit `4 a + 2 b + c`.
#[inline(always)]
fn bitop3(table: u32, a: u32, b: u32, c: u32) -> u32 {
    let mut out = 0;
    for row in 0..8u32 {
        if table >> row & 1 == 1 {
            let a = if row & 4 != 0 { a } else { !a };
            let b = if row & 2 != 0 { b } else { !b };
            let c = if row & 1 != 0 { c } else { !c };
            out |= a & b & c;
        }
    }
    out
}
