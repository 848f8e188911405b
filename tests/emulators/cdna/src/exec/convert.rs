//! Conversions between number formats, and arithmetic on single f16 and 16-bit integers.

use super::lanes::{put, put64, source, source_hi};
use super::valu::{accumulate, binary, ldexp, ternary, unary};
use crate::elf::Arch;
use crate::error::Exec;
use crate::inst::{Inst, Src};
use crate::num::{bf16, f16, fp8::Format, func};
use crate::op::Op;
use crate::wave::{LANES, Lanes, Wave};

#[inline(always)]
fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// Low half as f16.
#[inline(always)]
pub(super) fn h(bits: u32) -> f32 {
    f16::to_f32(bits as u16)
}

/// Rounded to f16, in the low half.
#[inline(always)]
pub(super) fn to_h(value: f32) -> u32 {
    u32::from(f16::from_f32(value))
}

/// Rounding an exact f32 result to f16 is right for sums, products and roots: f32 has more than twice f16's bits plus
/// two. A fused multiply-add needs the double's width.
#[inline(always)]
pub(super) fn fma_h(a: u32, b: u32, c: u32) -> u32 {
    let exact = f64::from(h(a)) * f64::from(h(b)) + f64::from(h(c));
    to_h(odd_f32(exact))
}

/// Converts to f32, with the last bit set if anything was lost: rounding that to f16 rounds once.
#[inline(always)]
fn odd_f32(x: f64) -> f32 {
    let near = x as f32;
    let back = f64::from(near);
    if back == x || !near.is_finite() {
        return near;
    }
    let towards_zero = if back.abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(towards_zero | 1)
}

dispatch! {
    /// Executes a conversion or a 16-bit operation; `false` when it is none of these.
    pub(crate) fn convert / convert_avx2 / convert_body(wave: &mut Wave, inst: &Inst, arch: Arch) -> Exec<bool>
}

#[inline(always)]
fn convert_body(wave: &mut Wave, inst: &Inst, arch: Arch) -> Exec<bool> {
    match inst.op {
        Op::VCvtF32I32 => unary(wave, inst, |a| (a as i32 as f32).to_bits()),
        Op::VCvtF32U32 => unary(wave, inst, |a| (a as f32).to_bits()),
        // Rust's casts saturate and send NaN to 0, as the hardware does.
        Op::VCvtU32F32 => unary(wave, inst, |a| f(a) as u32),
        Op::VCvtI32F32 => unary(wave, inst, |a| f(a) as i32 as u32),
        Op::VCvtFlrI32F32 => unary(wave, inst, |a| f(a).floor() as i32 as u32),
        Op::VCvtRpiI32F32 => unary(wave, inst, |a| (f(a) + 0.5).floor() as i32 as u32),
        Op::VCvtF32Ubyte0 => unary(wave, inst, |a| ((a & 0xff) as f32).to_bits()),
        Op::VCvtF32Ubyte1 => unary(wave, inst, |a| ((a >> 8 & 0xff) as f32).to_bits()),
        Op::VCvtF32Ubyte2 => unary(wave, inst, |a| ((a >> 16 & 0xff) as f32).to_bits()),
        Op::VCvtF32Ubyte3 => unary(wave, inst, |a| ((a >> 24) as f32).to_bits()),
        Op::VCvtF16F32 => unary(wave, inst, |a| to_h(f(a))),
        Op::VCvtF32F16 => unary(wave, inst, |a| h(a).to_bits()),
        Op::VCvtF16U16 => unary(wave, inst, |a| to_h(f32::from(a as u16))),
        Op::VCvtF16I16 => unary(wave, inst, |a| to_h(f32::from(a as i16))),
        Op::VCvtU16F16 => unary(wave, inst, |a| u32::from(h(a) as u16)),
        Op::VCvtI16F16 => unary(wave, inst, |a| u32::from(h(a) as i16 as u16)),
        Op::VCvtPkrtzF16F32 => binary(wave, inst, |a, b| {
            u32::from(f16::from_f32_rtz(f(a))) | u32::from(f16::from_f32_rtz(f(b))) << 16
        }),
        Op::VCvtPkF16F32 => binary(wave, inst, |a, b| to_h(f(a)) | to_h(f(b)) << 16),
        Op::VCvtPkBf16F32 => {
            binary(wave, inst, |a, b| {
                u32::from(bf16::from_f32(f(a))) | u32::from(bf16::from_f32(f(b))) << 16
            });
        }
        Op::VCvtF32Bf16 => unary(wave, inst, |a| a << 16),
        Op::VCvtPkU16U32 => binary(wave, inst, |a, b| a.min(0xffff) | b.min(0xffff) << 16),
        Op::VCvtPkI16I32 => binary(wave, inst, |a, b| {
            let sat = |x: u32| (x as i32).clamp(-32768, 32767) as u32 & 0xffff;
            sat(a) | sat(b) << 16
        }),
        Op::VCvtF64F32 => to_f64(wave, inst, |a| f64::from(f(a))),
        Op::VCvtF64I32 => to_f64(wave, inst, |a| f64::from(a as i32)),
        Op::VCvtF64U32 => to_f64(wave, inst, f64::from),
        Op::VCvtF32F64 => from_f64(wave, inst, |a| (a as f32).to_bits()),
        Op::VCvtI32F64 => from_f64(wave, inst, |a| a as i32 as u32),
        Op::VCvtU32F64 => from_f64(wave, inst, |a| a as u32),

        Op::VCvtPkFp8F32 => pack_fp8(wave, inst, Format::fp8(arch)),
        Op::VCvtPkBf8F32 => pack_fp8(wave, inst, Format::bf8(arch)),
        Op::VCvtSrFp8F32 => stochastic_fp8(wave, inst, Format::fp8(arch)),
        Op::VCvtSrBf8F32 => stochastic_fp8(wave, inst, Format::bf8(arch)),
        Op::VCvtF32Fp8 | Op::VCvtF32Bf8 => {
            let format = if inst.op == Op::VCvtF32Fp8 { Format::fp8(arch) } else { Format::bf8(arch) };
            let table = format.table();
            // SDWA, or op_sel of the long form, chose the byte.
            let shift = byte_select(inst) * 8;
            let mut bare = inst.clone();
            bare.op_sel = 0;
            unary(wave, &bare, |a| table[(a >> shift & 0xff) as usize].to_bits());
        }
        Op::VCvtPkF32Fp8 | Op::VCvtPkF32Bf8 => {
            let format = if inst.op == Op::VCvtPkF32Fp8 { Format::fp8(arch) } else { Format::bf8(arch) };
            let table = format.table();
            let mut room = Lanes::ZERO;
            let a = *source(wave, inst, 0, &mut room);
            let shift = if inst.op_sel & 1 == 1 { 16 } else { 0 };
            let pick =
                |s: u32| Lanes(std::array::from_fn(|l| table[(a.0[l] >> s & 0xff) as usize].to_bits()));
            put64(wave, inst, &pick(shift), &pick(shift + 8));
        }

        Op::VAddF16 => binary(wave, inst, |a, b| to_h(h(a) + h(b))),
        Op::VSubF16 => binary(wave, inst, |a, b| to_h(h(a) - h(b))),
        Op::VSubrevF16 => binary(wave, inst, |a, b| to_h(h(b) - h(a))),
        Op::VMulF16 => binary(wave, inst, |a, b| to_h(h(a) * h(b))),
        Op::VMinF16 => binary(wave, inst, |a, b| to_h(h(a).min(h(b)))),
        Op::VMaxF16 => binary(wave, inst, |a, b| to_h(h(a).max(h(b)))),
        Op::VFmaF16 => ternary(wave, inst, fma_h),
        Op::VMadF16 => ternary(wave, inst, |a, b, c| to_h(h(to_h(h(a) * h(b))) + h(c))),
        Op::VMacF16 => accumulate(wave, inst, |a, b, c| to_h(h(to_h(h(a) * h(b))) + h(c))),
        Op::VMin3F16 => ternary(wave, inst, |a, b, c| to_h(h(a).min(h(b)).min(h(c)))),
        Op::VMax3F16 => ternary(wave, inst, |a, b, c| to_h(h(a).max(h(b)).max(h(c)))),
        Op::VRcpF16 => unary(wave, inst, |a| to_h(1.0 / h(a))),
        Op::VSqrtF16 => unary(wave, inst, |a| to_h(h(a).sqrt())),
        Op::VRsqF16 => unary(wave, inst, |a| to_h(1.0 / h(a).sqrt())),
        Op::VExpF16 => unary(wave, inst, |a| to_h(func::exp2(h(a)))),
        Op::VLogF16 => unary(wave, inst, |a| to_h(func::log2(h(a)))),
        Op::VFloorF16 => unary(wave, inst, |a| to_h(h(a).floor())),
        Op::VCeilF16 => unary(wave, inst, |a| to_h(h(a).ceil())),
        Op::VTruncF16 => unary(wave, inst, |a| to_h(h(a).trunc())),
        Op::VRndneF16 => unary(wave, inst, |a| to_h(h(a).round_ties_even())),
        Op::VLdexpF16 => binary(wave, inst, |a, b| to_h(ldexp(h(a), i32::from(b as i16)))),

        Op::VAddU16 | Op::VAddI16 if !inst.clamp => binary(wave, inst, |a, b| a.wrapping_add(b) & 0xffff),
        Op::VSubU16 | Op::VSubI16 if !inst.clamp => binary(wave, inst, |a, b| a.wrapping_sub(b) & 0xffff),
        Op::VSubrevU16 if !inst.clamp => binary(wave, inst, |a, b| b.wrapping_sub(a) & 0xffff),
        Op::VMulLoU16 => binary(wave, inst, |a, b| (a & 0xffff).wrapping_mul(b & 0xffff) & 0xffff),
        Op::VMadU16 | Op::VMadI16 if !inst.clamp => {
            ternary(wave, inst, |a, b, c| (a & 0xffff).wrapping_mul(b & 0xffff).wrapping_add(c) & 0xffff);
        }
        Op::VLshlrevB16 => binary(wave, inst, |a, b| b << (a & 15) & 0xffff),
        Op::VLshrrevB16 => binary(wave, inst, |a, b| (b & 0xffff) >> (a & 15)),
        Op::VAshrrevI16 => {
            binary(wave, inst, |a, b| (i32::from(b as i16) >> (a & 15)) as u32 & 0xffff);
        }
        Op::VMin3U16 => ternary(wave, inst, |a, b, c| u32::from((a as u16).min(b as u16).min(c as u16))),
        Op::VMax3U16 => ternary(wave, inst, |a, b, c| u32::from((a as u16).max(b as u16).max(c as u16))),
        Op::VMin3I16 => {
            ternary(wave, inst, |a, b, c| u32::from((a as i16).min(b as i16).min(c as i16) as u16));
        }
        Op::VMax3I16 => {
            ternary(wave, inst, |a, b, c| u32::from((a as i16).max(b as i16).max(c as i16) as u16));
        }
        Op::VMaxU16 => binary(wave, inst, |a, b| (a & 0xffff).max(b & 0xffff)),
        Op::VMinU16 => binary(wave, inst, |a, b| (a & 0xffff).min(b & 0xffff)),
        Op::VMaxI16 => binary(wave, inst, |a, b| u32::from((a as i16).max(b as i16) as u16)),
        Op::VMinI16 => binary(wave, inst, |a, b| u32::from((a as i16).min(b as i16) as u16)),
        _ => return Ok(false),
    }
    Ok(true)
}

#[inline(always)]
fn to_f64(wave: &mut Wave, inst: &Inst, f: impl Fn(u32) -> f64) {
    let mut room = Lanes::ZERO;
    let a = *source(wave, inst, 0, &mut room);
    let bits: [u64; LANES] = std::array::from_fn(|l| f(a.0[l]).to_bits());
    let lo = Lanes(bits.map(|b| b as u32));
    let hi = Lanes(bits.map(|b| (b >> 32) as u32));
    put64(wave, inst, &lo, &hi);
}

#[inline(always)]
fn from_f64(wave: &mut Wave, inst: &Inst, f: impl Fn(f64) -> u32) {
    let (mut room_lo, mut room_hi) = (Lanes::ZERO, Lanes::ZERO);
    let lo = source(wave, inst, 0, &mut room_lo);
    let hi = source_hi(wave, inst, 0, &mut room_hi);
    let out =
        Lanes(std::array::from_fn(|l| f(f64::from_bits(u64::from(lo.0[l]) | u64::from(hi.0[l]) << 32))));
    put(wave, inst, out);
}

/// The long form of the FP8 conversions chooses a byte with `op_sel`: bit 0 the low bit of the byte, bit 1 the high.
fn byte_select(inst: &Inst) -> u32 {
    if inst.sdwa.is_some() {
        return 0;
    }
    u32::from(inst.op_sel & 1) << 1 | u32::from(inst.op_sel >> 1 & 1)
}

/// Two values into one half of the destination; `op_sel` bit 3 chooses it, the other half stays.
fn pack_fp8(wave: &mut Wave, inst: &Inst, format: Format) {
    let high = inst.op_sel & 8 != 0;
    let mut bare = inst.clone();
    bare.op_sel = 0;
    let old = *wave.vreg(inst.vdst);
    let (mut room_a, mut room_b) = (Lanes::ZERO, Lanes::ZERO);
    let a = source(wave, &bare, 0, &mut room_a);
    let b = source(wave, &bare, 1, &mut room_b);
    let out = Lanes(std::array::from_fn(|l| {
        let encode = |x: u32| u32::from(format.encode(f(x), None));
        let pair = encode(a.0[l]) | encode(b.0[l]) << 8;
        if high { old.0[l] & 0xffff | pair << 16 } else { old.0[l] & 0xffff_0000 | pair }
    }));
    put(wave, &bare, out);
}

/// One value into one byte, rounded by the random bits of source 1; `op_sel` bits 3:2 choose the byte.
fn stochastic_fp8(wave: &mut Wave, inst: &Inst, format: Format) {
    let shift = u32::from(inst.op_sel >> 2 & 3) * 8;
    let mut bare = inst.clone();
    bare.op_sel = 0;
    let old = *wave.vreg(inst.vdst);
    let (mut room_a, mut room_b) = (Lanes::ZERO, Lanes::ZERO);
    let a = source(wave, &bare, 0, &mut room_a);
    let b = match inst.src[1] {
        Src::None => &Lanes::ZERO,
        _ => source(wave, &bare, 1, &mut room_b),
    };
    let out = Lanes(std::array::from_fn(|l| {
        let code = u32::from(format.encode(f(a.0[l]), Some(b.0[l])));
        old.0[l] & !(0xff << shift) | code << shift
    }));
    put(wave, &bare, out);
}
