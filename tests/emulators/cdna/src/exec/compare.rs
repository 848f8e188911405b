//! Vector comparisons: a lane mask into VCC, another pair, or EXEC too.

use super::lanes::{source, source_hi};
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{EXEC, Inst};
use crate::num::f16;
use crate::wave::{LANES, Lanes, Wave};

dispatch! {
    /// Executes a VOPC instruction; its opcode is `inst.imm`.
    pub(crate) fn compare / compare_avx2 / compare_body(wave: &mut Wave, inst: &Inst) -> Exec
}

/// Opcode layout (CDNA3 ISA, VOPC): type in the upper bits, bit 4 writes EXEC, predicate in the lower.
#[inline(always)]
fn compare_body(wave: &mut Wave, inst: &Inst) -> Exec {
    let opcode = inst.imm as u32 & 0xff;
    let predicate = opcode & 15;
    let (mut room_a, mut room_b) = (Lanes::ZERO, Lanes::ZERO);
    let (mut room_ah, mut room_bh) = (Lanes::ZERO, Lanes::ZERO);
    let a = source(wave, inst, 0, &mut room_a);
    let b = source(wave, inst, 1, &mut room_b);
    let f32_of = f32::from_bits;
    let mask = match opcode >> 4 & !1 {
        // v_cmp_class is 0x10..=0x15: f32, f64, f16, each with its EXEC-writing twin.
        0x0 => {
            let b = *b;
            match predicate >> 1 {
                0 => lanes(|l| {
                    class(f64::from(f32_of(a.0[l])), subnormal32(a.0[l]), quiet32(a.0[l])) & b.0[l] != 0
                }),
                2 => lanes(|l| {
                    let bits = a.0[l] as u16;
                    let subnormal = bits & 0x7c00 == 0 && bits & 0x3ff != 0;
                    class(f64::from(f16::to_f32(bits)), subnormal, bits & 0x200 != 0) & b.0[l] != 0
                }),
                _ => {
                    let hi = source_hi(wave, inst, 0, &mut room_ah);
                    lanes(|l| {
                        let x = wide(a, hi, l);
                        let value = f64::from_bits(x);
                        class(value, value.is_subnormal(), x & 1 << 51 != 0) & b.0[l] != 0
                    })
                }
            }
        }
        0x2 => floats(predicate, |l| (f16::to_f32(a.0[l] as u16), f16::to_f32(b.0[l] as u16))),
        0x4 => floats(predicate, |l| (f32_of(a.0[l]), f32_of(b.0[l]))),
        0x6 => {
            let ah = source_hi(wave, inst, 0, &mut room_ah);
            let bh = source_hi(wave, inst, 1, &mut room_bh);
            floats(predicate, |l| (f64::from_bits(wide(a, ah, l)), f64::from_bits(wide(b, bh, l))))
        }
        0xa if predicate < 8 => integers(predicate, |l| (a.0[l] as i16, b.0[l] as i16)),
        0xa => integers(predicate, |l| (a.0[l] as u16, b.0[l] as u16)),
        0xc if predicate < 8 => integers(predicate, |l| (a.0[l] as i32, b.0[l] as i32)),
        0xc => integers(predicate, |l| (a.0[l], b.0[l])),
        0xe => {
            let ah = source_hi(wave, inst, 0, &mut room_ah);
            let bh = source_hi(wave, inst, 1, &mut room_bh);
            if predicate < 8 {
                integers(predicate, |l| (wide(a, ah, l) as i64, wide(b, bh, l) as i64))
            } else {
                integers(predicate, |l| (wide(a, ah, l), wide(b, bh, l)))
            }
        }
        _ => return Err(Stop::new(FaultKind::UnknownInstruction, inst.name)),
    };
    let mask = mask & wave.exec();
    wave.set_mask(inst.sdst, mask);
    if inst.name.starts_with("v_cmpx") {
        wave.set_s64(EXEC, mask);
    }
    Ok(())
}

#[inline(always)]
fn wide(lo: &Lanes, hi: &Lanes, l: usize) -> u64 {
    u64::from(lo.0[l]) | u64::from(hi.0[l]) << 32
}

#[inline(always)]
fn lanes(f: impl Fn(usize) -> bool) -> u64 {
    let mut mask = 0;
    for l in 0..LANES {
        mask |= u64::from(f(l)) << l;
    }
    mask
}

#[inline(always)]
fn floats<T: PartialOrd>(predicate: u32, pair: impl Fn(usize) -> (T, T)) -> u64 {
    match predicate {
        0 => 0,
        1 => lanes(|l| pair(l).0 < pair(l).1),
        2 => lanes(|l| pair(l).0 == pair(l).1),
        3 => lanes(|l| pair(l).0 <= pair(l).1),
        4 => lanes(|l| pair(l).0 > pair(l).1),
        5 => lanes(|l| pair(l).0 < pair(l).1 || pair(l).0 > pair(l).1),
        6 => lanes(|l| pair(l).0 >= pair(l).1),
        7 => lanes(|l| pair(l).0.partial_cmp(&pair(l).1).is_some()),
        // The upper eight comparisons do not mirror the lower eight: a NaN makes them true.
        8 => !lanes(|l| pair(l).0.partial_cmp(&pair(l).1).is_some()),
        9 => !lanes(|l| pair(l).0 >= pair(l).1),
        10 => !lanes(|l| pair(l).0 < pair(l).1 || pair(l).0 > pair(l).1),
        11 => !lanes(|l| pair(l).0 > pair(l).1),
        12 => !lanes(|l| pair(l).0 <= pair(l).1),
        13 => !lanes(|l| pair(l).0 == pair(l).1),
        14 => !lanes(|l| pair(l).0 < pair(l).1),
        _ => !0,
    }
}

#[inline(always)]
fn integers<T: Ord>(predicate: u32, pair: impl Fn(usize) -> (T, T)) -> u64 {
    match predicate & 7 {
        0 => 0,
        1 => lanes(|l| pair(l).0 < pair(l).1),
        2 => lanes(|l| pair(l).0 == pair(l).1),
        3 => lanes(|l| pair(l).0 <= pair(l).1),
        4 => lanes(|l| pair(l).0 > pair(l).1),
        5 => lanes(|l| pair(l).0 != pair(l).1),
        6 => lanes(|l| pair(l).0 >= pair(l).1),
        _ => !0,
    }
}

fn subnormal32(bits: u32) -> bool {
    bits & 0x7f80_0000 == 0 && bits & 0x7f_ffff != 0
}

fn quiet32(bits: u32) -> bool {
    bits & 0x40_0000 != 0
}

/// The class bit of a number: signalling NaN, quiet NaN, −inf, −normal, −subnormal, −0, +0, +subnormal, +normal, +inf.
fn class(value: f64, subnormal: bool, quiet: bool) -> u32 {
    let positive = value.is_sign_positive();
    let bit = if value.is_nan() {
        u32::from(quiet)
    } else if value.is_infinite() {
        if positive { 9 } else { 2 }
    } else if value == 0.0 {
        if positive { 6 } else { 5 }
    } else if subnormal {
        if positive { 7 } else { 4 }
    } else if positive {
        8
    } else {
        3
    };
    1 << bit
}
