//! Arithmetic on 64-bit rows, between the files, and with carries.

use super::alu::{bfe, mul_hi_s, mul_hi_u};
use super::warp::{Warp, WideRow};
use crate::op::{Code, Df, Inst, Wf, Xf};

#[inline(always)]
pub(super) fn double(warp: &mut Warp, inst: &Inst, mask: u32, f: Df) {
    macro_rules! ints {
        (|$a:ident, $b:ident, $c:ident| $e:expr) => {{
            let row = |i: usize| if inst.src[i].is_some() { inst.src[i].row() } else { inst.src[0].row() };
            let (x, y, z) = (&warp.d[row(0)], &warp.d[row(1)], &warp.d[row(2)]);
            let mut r: WideRow = [0; 32];
            for i in 0..32 {
                let ($a, $b, $c) = (x[i], y[i], z[i]);
                let _ = ($b, $c);
                r[i] = $e;
            }
            warp.set_wide(inst.dst[0], &r, mask);
        }};
    }
    macro_rules! floats {
        (|$a:ident, $b:ident, $c:ident| $e:expr) => {
            ints!(|a, b, c| {
                let ($a, $b, $c) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
                let _ = ($b, $c);
                f64::to_bits($e)
            })
        };
    }
    match f {
        Df::Mov => ints!(|a, b, c| a),
        Df::Add => ints!(|a, b, c| a.wrapping_add(b)),
        Df::Sub => ints!(|a, b, c| a.wrapping_sub(b)),
        Df::Mul => ints!(|a, b, c| a.wrapping_mul(b)),
        Df::Mad => ints!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Df::And => ints!(|a, b, c| a & b),
        Df::Or => ints!(|a, b, c| a | b),
        Df::Xor => ints!(|a, b, c| a ^ b),
        Df::Not => ints!(|a, b, c| !a),
        Df::Brev => ints!(|a, b, c| a.reverse_bits()),
        Df::MulHiS => ints!(|a, b, c| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
        Df::MulHiU => ints!(|a, b, c| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        Df::DivS => ints!(|a, b, c| if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 }),
        Df::DivU => ints!(|a, b, c| a.checked_div(b).unwrap_or(u64::MAX)),
        Df::RemS => ints!(|a, b, c| if b == 0 { u64::MAX } else { (a as i64).wrapping_rem(b as i64) as u64 }),
        Df::RemU => ints!(|a, b, c| a.checked_rem(b).unwrap_or(u64::MAX)),
        Df::AbsS => ints!(|a, b, c| (a as i64).wrapping_abs() as u64),
        Df::Neg => ints!(|a, b, c| a.wrapping_neg()),
        Df::MinS => ints!(|a, b, c| (a as i64).min(b as i64) as u64),
        Df::MaxS => ints!(|a, b, c| (a as i64).max(b as i64) as u64),
        Df::MinU => ints!(|a, b, c| a.min(b)),
        Df::MaxU => ints!(|a, b, c| a.max(b)),
        Df::FAdd => floats!(|a, b, c| a + b),
        Df::FSub => floats!(|a, b, c| a - b),
        Df::FMul => floats!(|a, b, c| a * b),
        Df::FFma => floats!(|a, b, c| a.mul_add(b, c)),
        Df::FDiv => floats!(|a, b, c| a / b),
        Df::FRcp => floats!(|a, b, c| 1.0 / a),
        Df::FSqrt => floats!(|a, b, c| a.sqrt()),
        Df::FMin => floats!(|a, b, c| a.min(b)),
        Df::FMax => floats!(|a, b, c| a.max(b)),
        // A NaN is only made quiet.
        Df::FAbs => ints!(|a, b, c| if f64::from_bits(a).is_nan() { a | 1 << 51 } else { a & !(1 << 63) }),
        Df::FNeg => ints!(|a, b, c| if f64::from_bits(a).is_nan() { a | 1 << 51 } else { a ^ 1 << 63 }),
    }
}

pub(super) fn mixed(warp: &mut Warp, inst: &Inst, mask: u32, f: Xf) {
    let [a, b, c] = [0, 1, 2].map(|i| if inst.src[i].is_some() { warp.wide(inst.src[i]) } else { [0; 32] });
    let s = |v: u64| i64::from(v as u32 as i32);
    let word = |warp: &mut Warp, f: &dyn Fn(usize) -> u32| {
        warp.set(inst.dst[0], &std::array::from_fn(f), mask);
    };
    let r: WideRow = match f {
        Xf::MulWideS => std::array::from_fn(|i| s(a[i]).wrapping_mul(s(b[i])) as u64),
        Xf::MulWideU => std::array::from_fn(|i| a[i].wrapping_mul(b[i])),
        Xf::MadWideS => std::array::from_fn(|i| (s(a[i]).wrapping_mul(s(b[i])) as u64).wrapping_add(c[i])),
        Xf::MadWideU => std::array::from_fn(|i| a[i].wrapping_mul(b[i]).wrapping_add(c[i])),
        Xf::ShlD => std::array::from_fn(|i| if b[i] > 63 { 0 } else { a[i] << b[i] }),
        Xf::ShrDU => std::array::from_fn(|i| if b[i] > 63 { 0 } else { a[i] >> b[i] }),
        Xf::ShrDS => std::array::from_fn(|i| ((a[i] as i64) >> b[i].min(63)) as u64),
        Xf::BfeDU => std::array::from_fn(|i| bfe(a[i], b[i] as u32, c[i] as u32, 64, false)),
        Xf::BfeDS => std::array::from_fn(|i| bfe(a[i], b[i] as u32, c[i] as u32, 64, true)),
        Xf::BfiD => {
            let d = warp.wide(inst.src[3]);
            std::array::from_fn(|i| {
                // Position and length have eight bits.
                let (pos, len) = (c[i] & 255, d[i] & 255);
                let field = if len > 63 { u64::MAX } else { (1 << len) - 1 };
                let placed = |bits: u64| if pos > 63 { 0 } else { bits << pos };
                b[i] & !placed(field) | placed(a[i]) & placed(field)
            })
        }
        Xf::PopcD => return word(warp, &|i| a[i].count_ones()),
        Xf::ClzD => return word(warp, &|i| a[i].leading_zeros()),
        Xf::BfindDU => return word(warp, &|i| 63u32.wrapping_sub(a[i].leading_zeros())),
        Xf::BfindDS => {
            return word(warp, &|i| {
                63u32.wrapping_sub((a[i] ^ ((a[i] as i64) >> 63) as u64).leading_zeros())
            });
        }
    };
    warp.set_wide(inst.dst[0], &r, mask);
}

pub(super) fn carry(warp: &mut Warp, inst: &Inst, mask: u32) {
    let Code::Carry { subtract, carry_in, carry_out, wide, product } = inst.code else { return };
    let (mut a, mut b) = (warp.wide(inst.src[0]), warp.wide(inst.src[1]));
    if let Some(f) = product {
        for i in 0..32 {
            let (x, y) = (a[i] as u32, b[i] as u32);
            a[i] = u64::from(match f {
                Wf::MulHiS => mul_hi_s(x, y),
                Wf::MulHiU => mul_hi_u(x, y),
                _ => x.wrapping_mul(y),
            });
        }
        b = warp.wide(inst.src[2]);
    }
    let mut flags = 0;
    let bits = if wide { 64 } else { 32 };
    let r: WideRow = std::array::from_fn(|i| {
        let cin = u128::from(carry_in && warp.carry >> i & 1 != 0);
        let (x, y) = (u128::from(a[i]), u128::from(b[i]));
        let sum = if subtract { x.wrapping_sub(y).wrapping_sub(cin) } else { x + y + cin };
        flags |= u32::from(sum >> bits & 1 != 0) << i;
        sum as u64
    });
    if wide {
        warp.set_wide(inst.dst[0], &r, mask);
    } else {
        warp.set(inst.dst[0], &r.map(|v| v as u32), mask);
    }
    if carry_out {
        warp.carry = warp.carry & !mask | flags & mask;
    }
}
