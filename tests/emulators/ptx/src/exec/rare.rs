//! Functions of words that kernels rarely use: packed whole numbers, saturation, byte permutations by mode. PTX ISA
//! 9.7.1, 9.7.2, 9.7.3 and 9.7.9. Where the ISA leaves bits open they are an H200's.

use super::warp::Warp;
use crate::fp;
use crate::op::{Inst, Prmt, Rare};

pub(super) fn execute(warp: &mut Warp, inst: &Inst, f: Rare, mask: u32) {
    let rows = [0, 1, 2].map(|i| if inst.src[i].is_some() { warp.w[inst.src[i].row()] } else { [0; 32] });
    if let Rare::TestFinite | Rare::TestSubnormal = f {
        let holds = |x: f32| if f == Rare::TestFinite { x.is_finite() } else { x.is_subnormal() };
        let bits = (0..32).fold(0, |bits, i| bits | u32::from(holds(f32::from_bits(rows[0][i]))) << i);
        warp.set_pred(inst.dst[0], bits, mask);
        return;
    }
    let r = std::array::from_fn(|i| word(f, rows[0][i], rows[1][i], rows[2][i]));
    warp.set(inst.dst[0], &r, mask);
}

fn word(f: Rare, a: u32, b: u32, c: u32) -> u32 {
    let (x, y) = (a as i32, b as i32);
    match f {
        Rare::AddSat => x.saturating_add(y) as u32,
        Rare::SubSat => x.saturating_sub(y) as u32,
        Rare::MinRelu => x.min(y).max(0) as u32,
        Rare::MaxRelu => x.max(y).max(0) as u32,
        Rare::Mul24HiS => ((i64::from(x << 8 >> 8) * i64::from(y << 8 >> 8)) >> 16) as u32,
        Rare::Mul24HiU => ((u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)) >> 16) as u32,
        Rare::Prmt(mode) => permute(mode, a, b, c & 3),
        Rare::Dot { halves, high, signed } => dot([a, b, c], halves, high, signed),
        Rare::PairAdd => pair(|i| half(a, i).wrapping_add(half(b, i))),
        Rare::PairMin { signed } => {
            pair(|i| if before(half(a, i), half(b, i), signed) { half(a, i) } else { half(b, i) })
        }
        Rare::PairMax { signed } => {
            pair(|i| if before(half(a, i), half(b, i), signed) { half(b, i) } else { half(a, i) })
        }
        Rare::SignMin | Rare::SignMax => {
            let (p, q) = (f32::from_bits(a & 0x7fff_ffff), f32::from_bits(b & 0x7fff_ffff));
            let r = if f == Rare::SignMin { p.min(q) } else { p.max(q) };
            if r.is_nan() { fp::NAN.to_bits() } else { r.to_bits() | (a ^ b) & 0x8000_0000 }
        }
        Rare::Pack { bits, signed } => {
            let (least, most) =
                if signed { (-1 << (bits - 1), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) };
            let part = |v: i32| v.clamp(least, most) as u32 & ((1 << bits) - 1);
            let above = if bits == 8 { c << 16 } else { 0 };
            above | part(x) << bits | part(y)
        }
        Rare::TestFinite | Rare::TestSubnormal => 0,
    }
}

fn half(word: u32, i: u32) -> u16 {
    (word >> (16 * i)) as u16
}

fn pair(f: impl Fn(u32) -> u16) -> u32 {
    u32::from(f(1)) << 16 | u32::from(f(0))
}

fn before(a: u16, b: u16, signed: bool) -> bool {
    if signed { (a as i16) < b as i16 } else { a < b }
}

/// Byte `i` of the result is byte `at(i)` of `b` above `a`.
fn permute(mode: Prmt, a: u32, b: u32, c: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |r, i: u32| {
        let at = match mode {
            Prmt::Forward => c + i,
            Prmt::Backward => c.wrapping_sub(i) & 7,
            Prmt::Replicate8 => c,
            Prmt::ClampLeft => i.max(c),
            Prmt::ClampRight => i.min(c),
            Prmt::Replicate16 => 2 * (c & 1) + (i & 1),
        };
        r | ((bytes >> (8 * at) & 255) as u32) << (8 * i)
    })
}

/// `dp4a` and `dp2a`: bytes of `b` with bytes, or halves, of `a`.
fn dot([a, b, c]: [u32; 3], halves: bool, high: bool, [signed_a, signed_b]: [bool; 2]) -> u32 {
    let byte = |word: u32, i: u32, signed: bool| {
        let byte = (word >> (8 * i)) as u8;
        if signed { i32::from(byte as i8) } else { i32::from(byte) }
    };
    let terms = if halves { 2 } else { 4 };
    (0..terms).fold(c, |sum, i| {
        let x = match (halves, signed_a) {
            (false, signed) => byte(a, i, signed),
            (true, true) => i32::from(half(a, i) as i16),
            (true, false) => i32::from(half(a, i)),
        };
        sum.wrapping_add(x.wrapping_mul(byte(b, if high { i + 2 } else { i }, signed_b)) as u32)
    })
}
