//! Comparisons of rows.

use super::half::half_to_f32;
use super::warp::Warp;
use crate::ast::Ty;
use crate::fp::flush;
use crate::op::{BoolOp, Cmp, Inst};

#[inline(always)]
#[allow(clippy::neg_cmp_op_on_partial_ord, reason = "the unordered forms are the negated opposites")]
pub(super) fn compare_f32(cmp: Cmp, a: f32, b: f32) -> bool {
    let unordered = a.is_nan() || b.is_nan();
    match cmp {
        Cmp::Eq => a == b,
        Cmp::Ne => a != b && !unordered,
        Cmp::Lt => a < b,
        Cmp::Le => a <= b,
        Cmp::Gt => a > b,
        Cmp::Ge => a >= b,
        Cmp::Equ => a == b || unordered,
        Cmp::Neu => a != b,
        Cmp::Ltu => !(a >= b),
        Cmp::Leu => !(a > b),
        Cmp::Gtu => !(a <= b),
        Cmp::Geu => !(a < b),
        Cmp::Num => !unordered,
        Cmp::Nan => unordered,
    }
}

#[inline(always)]
pub(super) fn compare_rows(warp: &Warp, inst: &Inst, cmp: Cmp, ty: Ty, ftz: bool) -> u32 {
    macro_rules! bits {
        (|$i:ident| $e:expr) => {{
            let mut m = 0u32;
            for $i in 0..32 {
                m |= u32::from($e) << $i;
            }
            m
        }};
    }
    macro_rules! ints {
        ($a:expr, $b:expr, $ty:ty) => {
            match cmp {
                Cmp::Eq | Cmp::Equ => bits!(|i| $a[i] as $ty == $b[i] as $ty),
                Cmp::Ne | Cmp::Neu => bits!(|i| $a[i] as $ty != $b[i] as $ty),
                Cmp::Lt | Cmp::Ltu => bits!(|i| ($a[i] as $ty) < $b[i] as $ty),
                Cmp::Le | Cmp::Leu => bits!(|i| $a[i] as $ty <= $b[i] as $ty),
                Cmp::Gt | Cmp::Gtu => bits!(|i| $a[i] as $ty > $b[i] as $ty),
                Cmp::Ge | Cmp::Geu => bits!(|i| $a[i] as $ty >= $b[i] as $ty),
                Cmp::Num => u32::MAX,
                Cmp::Nan => 0,
            }
        };
    }
    let (x, y) = (inst.src[0].row(), inst.src[1].row());
    match ty.bytes() {
        8 => {
            let (a, b) = (&warp.d[x], &warp.d[y]);
            if ty == Ty::F64 {
                let f = |v: u64| f64::from_bits(v);
                return bits!(|i| {
                    let (a, b) = (f(a[i]), f(b[i]));
                    let nan = a.is_nan() || b.is_nan();
                    // An order of two doubles, told by three single values.
                    let sign =
                        if nan { f32::NAN } else { f32::from(u8::from(a > b)) - f32::from(u8::from(a < b)) };
                    compare_f32(cmp, sign, 0.0)
                });
            }
            if ty.is_signed() { ints!(a, b, i64) } else { ints!(a, b, u64) }
        }
        4 => {
            let (a, b) = (&warp.w[x], &warp.w[y]);
            if ty == Ty::F32 {
                let f = |v: u32| f32::from_bits(if ftz { flush(v) } else { v });
                match cmp {
                    Cmp::Lt => bits!(|i| f(a[i]) < f(b[i])),
                    Cmp::Gt => bits!(|i| f(a[i]) > f(b[i])),
                    _ => bits!(|i| compare_f32(cmp, f(a[i]), f(b[i]))),
                }
            } else if ty.is_signed() {
                ints!(a, b, i32)
            } else {
                ints!(a, b, u32)
            }
        }
        _ => {
            let (a, b) = (&warp.w[x], &warp.w[y]);
            match ty {
                Ty::F16 | Ty::Bf16 => {
                    let f = |v: u32| half_to_f32(v as u16, ty == Ty::Bf16);
                    bits!(|i| compare_f32(cmp, f(a[i]), f(b[i])))
                }
                Ty::S16 | Ty::S8 => ints!(a, b, i16),
                _ => ints!(a, b, u16),
            }
        }
    }
}

pub(super) fn combine_bits(op: BoolOp, a: u32, b: u32) -> u32 {
    match op {
        BoolOp::And => a & b,
        BoolOp::Or => a | b,
        BoolOp::Xor => a ^ b,
        BoolOp::Not => !a,
        BoolOp::Mov => a,
    }
}
