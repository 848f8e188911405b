//! Arithmetic on whole rows. Written as plain loops over 32 lanes that the compiler turns into vector code; the
//! whole dispatch is compiled twice, once for AVX2 with FMA.

use super::compare::{combine_bits, compare_f32, compare_rows};
use super::half::{half, half_to_f32, short};
use super::warp::{Row, Warp, WideRow};
use super::wide::{carry, double, mixed};
use crate::fp::{self, Round, flush};
use crate::op::{Code, Inst, Reg, Slow, Wf};

/// Executes `inst` for the lanes of `mask` if it is pure arithmetic; false when it is something else.
#[inline(always)]
pub(crate) fn execute(warp: &mut Warp, inst: &Inst, mask: u32, simd: bool) -> bool {
    #[cfg(target_arch = "x86_64")]
    if simd {
        // SAFETY: `simd` is only true when `detect` has found AVX2 and FMA on this processor.
        return unsafe { execute_avx2(warp, inst, mask) };
    }
    let _ = simd;
    dispatch(warp, inst, mask)
}

/// Whether the vector path may run here.
pub(crate) fn detect() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn execute_avx2(warp: &mut Warp, inst: &Inst, mask: u32) -> bool {
    dispatch(warp, inst, mask)
}

#[inline(always)]
fn dispatch(warp: &mut Warp, inst: &Inst, mask: u32) -> bool {
    match inst.code {
        Code::W { f, ftz } => word(warp, inst, mask, f, ftz),
        Code::D(f) => double(warp, inst, mask, f),
        Code::SetP { cmp, ty, combine, ftz } => {
            let bits = compare_rows(warp, inst, cmp, ty, ftz);
            let (mut p, mut q) = (bits, !bits);
            if let Some(op) = combine {
                let c = warp.p[inst.src[2].row()];
                (p, q) = (combine_bits(op, p, c), combine_bits(op, q, c));
            }
            warp.set_pred(inst.dst[0], p, mask);
            if inst.dst[1].is_some() {
                warp.set_pred(inst.dst[1], q, mask);
            }
        }
        Code::Pred(op) => {
            let a = warp.pred(inst.src[0], false);
            let b = warp.pred(inst.src[1], false);
            warp.set_pred(inst.dst[0], combine_bits(op, a, b), mask);
        }
        Code::Sel => {
            let p = warp.p[inst.src[2].row()];
            if inst.dst[0].is_double() {
                let (a, b) = (&warp.d[inst.src[0].row()], &warp.d[inst.src[1].row()]);
                let r = each_wide(|i| if p >> i & 1 != 0 { a[i] } else { b[i] });
                warp.set_wide(inst.dst[0], &r, mask);
            } else {
                let (a, b) = (&warp.w[inst.src[0].row()], &warp.w[inst.src[1].row()]);
                let r = each(|i| if p >> i & 1 != 0 { a[i] } else { b[i] });
                warp.set(inst.dst[0], &r, mask);
            }
        }
        Code::X(f) => mixed(warp, inst, mask, f),
        Code::Cvt(cvt) => super::convert::execute(warp, inst, cvt, mask),
        Code::Half { .. } => half(warp, inst, mask),
        Code::Rare(f) => super::rare::execute(warp, inst, f, mask),
        Code::Short { f, signed } => short(warp, inst, mask, f, signed),
        Code::WSlow(slow) => {
            let [a, b, c] = [0, 1, 2].map(|i| row_or_zero(warp, inst.src[i]));
            let r = std::array::from_fn(|i| slow_float(slow, a[i], b[i], c[i]));
            warp.set(inst.dst[0], &r, mask);
        }
        Code::Mixed { slow, bf16 } => {
            let rows = [0, 1, 2].map(|i| row_or_zero(warp, inst.src[i]));
            let halves = inst.src.iter().filter(|reg| reg.is_some()).count() - 1;
            let r = std::array::from_fn(|i| {
                let [a, b, c] = std::array::from_fn(|n| {
                    let bits = rows[n][i];
                    if n < halves { half_to_f32(bits as u16, bf16).to_bits() } else { bits }
                });
                slow_float(slow, a, b, c)
            });
            warp.set(inst.dst[0], &r, mask);
        }
        Code::Pair32(slow) => {
            let [a, b, c] =
                [0, 1, 2].map(|i| if inst.src[i].is_some() { warp.d[inst.src[i].row()] } else { [0; 32] });
            let r = std::array::from_fn(|i| {
                let low = slow_float(slow, a[i] as u32, b[i] as u32, c[i] as u32);
                let high = slow_float(slow, (a[i] >> 32) as u32, (b[i] >> 32) as u32, (c[i] >> 32) as u32);
                u64::from(high) << 32 | u64::from(low)
            });
            warp.set_wide(inst.dst[0], &r, mask);
        }
        Code::Set { cmp, ty, float, ftz } => {
            let bits = compare_rows(warp, inst, cmp, ty, ftz);
            let one = if float { 1.0f32.to_bits() } else { u32::MAX };
            let r = std::array::from_fn(|i| if bits >> i & 1 != 0 { one } else { 0 });
            warp.set(inst.dst[0], &r, mask);
        }
        Code::PairSetP { cmp, bf16 } => {
            let (a, b) = (warp.w[inst.src[0].row()], warp.w[inst.src[1].row()]);
            for half in 0..2 {
                let get = |v: u32| half_to_f32((v >> (16 * half)) as u16, bf16);
                let bits = (0..32).fold(0, |m, i| m | u32::from(compare_f32(cmp, get(a[i]), get(b[i]))) << i);
                if inst.dst[half].is_some() {
                    warp.set_pred(inst.dst[half], bits, mask);
                }
            }
        }
        Code::Slct { float } => {
            let c = warp.w[inst.src[2].row()];
            let pick = |i: usize| if float { f32::from_bits(c[i]) >= 0.0 } else { c[i] as i32 >= 0 };
            if inst.dst[0].is_double() {
                let (a, b) = (warp.d[inst.src[0].row()], warp.d[inst.src[1].row()]);
                warp.set_wide(inst.dst[0], &std::array::from_fn(|i| if pick(i) { a[i] } else { b[i] }), mask);
            } else {
                let (a, b) = (warp.w[inst.src[0].row()], warp.w[inst.src[1].row()]);
                warp.set(inst.dst[0], &std::array::from_fn(|i| if pick(i) { a[i] } else { b[i] }), mask);
            }
        }
        Code::Carry { .. } => carry(warp, inst, mask),
        _ => return false,
    }
    true
}

/// A row, lane by lane. A plain loop: closures of `array::from_fn` are compiled without the vector features.
#[inline(always)]
fn each(f: impl Fn(usize) -> u32) -> Row {
    let mut r = [0; 32];
    for (i, v) in r.iter_mut().enumerate() {
        *v = f(i);
    }
    r
}

/// Row of the 64-bit values that `f` gives for each lane.
#[inline(always)]
fn each_wide(f: impl Fn(usize) -> u64) -> WideRow {
    let mut r = [0; 32];
    for (i, v) in r.iter_mut().enumerate() {
        *v = f(i);
    }
    r
}

#[inline(always)]
pub(super) fn row_or_zero(warp: &Warp, reg: Reg) -> Row {
    if reg.is_some() { warp.w[reg.row()] } else { [0; 32] }
}

#[inline(always)]
fn word(warp: &mut Warp, inst: &Inst, mask: u32, f: Wf, ftz: bool) {
    // A macro, not a function of a closure: closures lose the vector features of the function around them.
    macro_rules! ints {
        (|$a:ident, $b:ident, $c:ident| $e:expr) => {{
            // Absent operands read as the first, which the function ignores.
            let row = |i: usize| if inst.src[i].is_some() { inst.src[i].row() } else { inst.src[0].row() };
            let (x, y, z) = (&warp.w[row(0)], &warp.w[row(1)], &warp.w[row(2)]);
            let mut r: Row = [0; 32];
            for i in 0..32 {
                let ($a, $b, $c) = (x[i], y[i], z[i]);
                let _ = ($b, $c);
                r[i] = $e;
            }
            warp.set(inst.dst[0], &r, mask);
        }};
    }
    macro_rules! floats {
        (|$a:ident, $b:ident, $c:ident| $e:expr) => {
            if ftz {
                ints!(|a, b, c| {
                    let ($a, $b, $c) =
                        (f32::from_bits(flush(a)), f32::from_bits(flush(b)), f32::from_bits(flush(c)));
                    let _ = ($b, $c);
                    flush(canonical($e))
                })
            } else {
                ints!(|a, b, c| {
                    let ($a, $b, $c) = (f32::from_bits(a), f32::from_bits(b), f32::from_bits(c));
                    let _ = ($b, $c);
                    canonical($e)
                })
            }
        };
    }
    match f {
        Wf::Mov => ints!(|a, b, c| a),
        Wf::Add => ints!(|a, b, c| a.wrapping_add(b)),
        Wf::Sub => ints!(|a, b, c| a.wrapping_sub(b)),
        Wf::Mul => ints!(|a, b, c| a.wrapping_mul(b)),
        Wf::Mad => ints!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Wf::And => ints!(|a, b, c| a & b),
        Wf::Or => ints!(|a, b, c| a | b),
        Wf::Xor => ints!(|a, b, c| a ^ b),
        Wf::Not => ints!(|a, b, c| !a),
        Wf::Shl => ints!(|a, b, c| if b > 31 { 0 } else { a << (b & 31) }),
        Wf::ShrU => ints!(|a, b, c| if b > 31 { 0 } else { a >> (b & 31) }),
        Wf::ShrS => ints!(|a, b, c| ((a as i32) >> b.min(31)) as u32),
        Wf::MinS => ints!(|a, b, c| (a as i32).min(b as i32) as u32),
        Wf::MaxS => ints!(|a, b, c| (a as i32).max(b as i32) as u32),
        Wf::MinU => ints!(|a, b, c| a.min(b)),
        Wf::MaxU => ints!(|a, b, c| a.max(b)),
        Wf::FAdd => floats!(|a, b, c| a + b),
        Wf::FSub => floats!(|a, b, c| a - b),
        Wf::FMul => floats!(|a, b, c| a * b),
        Wf::FFma => floats!(|a, b, c| a.mul_add(b, c)),
        Wf::FMin => floats!(|a, b, c| fmin(a, b)),
        Wf::FMax => floats!(|a, b, c| fmax(a, b)),
        Wf::FMin3 => floats!(|a, b, c| fmin(fmin(a, b), c)),
        Wf::FMax3 => floats!(|a, b, c| fmax(fmax(a, b), c)),
        Wf::FMax3Nan => {
            floats!(|a, b, c| if a.is_nan() || b.is_nan() || c.is_nan() {
                fp::NAN
            } else {
                fmax(fmax(a, b), c)
            });
        }
        Wf::FMinNan => floats!(|a, b, c| if a.is_nan() || b.is_nan() { fp::NAN } else { fmin(a, b) }),
        Wf::FMaxNan => floats!(|a, b, c| if a.is_nan() || b.is_nan() { fp::NAN } else { fmax(a, b) }),
        Wf::FEx2 => floats!(|a, b, c| fp::ex2(a)),
        Wf::FDiv => floats!(|a, b, c| a / b),
        Wf::FRcp => floats!(|a, b, c| 1.0 / a),
        Wf::FSqrt => floats!(|a, b, c| a.sqrt()),
        Wf::FRsqrt => floats!(|a, b, c| (1.0 / f64::from(a).sqrt()) as f32),
        Wf::FLg2 => floats!(|a, b, c| f64::from(a).log2() as f32),
        Wf::FTanh => floats!(|a, b, c| f64::from(a).tanh() as f32),
        Wf::FSin => floats!(|a, b, c| f64::from(a).sin() as f32),
        Wf::FCos => floats!(|a, b, c| f64::from(a).cos() as f32),
        Wf::FAbs => floats!(|a, b, c| a.abs()),
        Wf::FNeg => floats!(|a, b, c| -a),
        Wf::FCopysign => ints!(|a, b, c| b & 0x7fff_ffff | a & 0x8000_0000),
        Wf::MulHiS => ints!(|a, b, c| mul_hi_s(a, b)),
        Wf::MulHiU => ints!(|a, b, c| mul_hi_u(a, b)),
        Wf::MadHiS => ints!(|a, b, c| mul_hi_s(a, b).wrapping_add(c)),
        Wf::MadHiU => ints!(|a, b, c| mul_hi_u(a, b).wrapping_add(c)),
        Wf::Mul24S => ints!(|a, b, c| (((a << 8) as i32 >> 8).wrapping_mul((b << 8) as i32 >> 8)) as u32),
        Wf::Mul24U => ints!(|a, b, c| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)),
        Wf::SadS => ints!(|a, b, c| (a as i32).abs_diff(b as i32).wrapping_add(c)),
        Wf::SadU => ints!(|a, b, c| a.abs_diff(b).wrapping_add(c)),
        // Division by zero, and its rest, are all ones on an H200; PTX leaves it open.
        Wf::DivS => ints!(|a, b, c| if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 }),
        Wf::DivU => ints!(|a, b, c| a.checked_div(b).unwrap_or(u32::MAX)),
        Wf::RemS => ints!(|a, b, c| if b == 0 { u32::MAX } else { (a as i32).wrapping_rem(b as i32) as u32 }),
        Wf::RemU => ints!(|a, b, c| a.checked_rem(b).unwrap_or(u32::MAX)),
        Wf::AbsS => ints!(|a, b, c| (a as i32).wrapping_abs() as u32),
        Wf::Neg => ints!(|a, b, c| a.wrapping_neg()),
        Wf::Cnot => ints!(|a, b, c| u32::from(a == 0)),
        Wf::ShfL => ints!(|a, b, c| (wide(b, a) << c.min(32) >> 32) as u32),
        Wf::ShfR => ints!(|a, b, c| (wide(b, a) >> c.min(32)) as u32),
        Wf::ShfLWrap => ints!(|a, b, c| (wide(b, a) << (c & 31) >> 32) as u32),
        Wf::ShfRWrap => ints!(|a, b, c| (wide(b, a) >> (c & 31)) as u32),
        Wf::Popc => ints!(|a, b, c| a.count_ones()),
        Wf::Clz => ints!(|a, b, c| a.leading_zeros()),
        Wf::Brev => ints!(|a, b, c| a.reverse_bits()),
        Wf::BfindU => ints!(|a, b, c| 31u32.wrapping_sub(a.leading_zeros())),
        Wf::BfindShiftU => ints!(|a, b, c| if a == 0 { u32::MAX } else { a.leading_zeros() }),
        Wf::BfindS => {
            ints!(|a, b, c| 31u32.wrapping_sub((a ^ ((a as i32) >> 31) as u32).leading_zeros()));
        }
        Wf::BfindShiftS => {
            ints!(|a, b, c| match a ^ ((a as i32) >> 31) as u32 {
                0 => u32::MAX,
                bits => bits.leading_zeros(),
            });
        }
        // Position and length have eight bits here, all of theirs in the 64-bit form.
        Wf::BfeU => ints!(|a, b, c| bfe(u64::from(a), b & 255, c & 255, 32, false) as u32),
        Wf::BfeS => ints!(|a, b, c| bfe(i64::from(a as i32) as u64, b & 255, c & 255, 32, true) as u32),
        Wf::Prmt => ints!(|a, b, c| prmt(a, b, c)),
        Wf::Bfi => {
            let d = warp.w[inst.src[3].row()];
            let [a, b, c] = [0, 1, 2].map(|i| warp.w[inst.src[i].row()]);
            let r = std::array::from_fn(|i| {
                let (pos, len) = (c[i] & 255, d[i] & 255);
                let field = if len >= 32 { u64::from(u32::MAX) } else { (1u64 << len) - 1 };
                let hole = if pos >= 32 { 0 } else { (field << pos) as u32 };
                let put = if pos >= 32 { 0 } else { (u64::from(a[i]) << pos) as u32 };
                b[i] & !hole | put & hole
            });
            warp.set(inst.dst[0], &r, mask);
        }
        Wf::Lop3 => {
            let table = warp.w[inst.src[3].row()][0];
            ints!(|a, b, c| {
                let pick = |bit: u32, m: u32| if table >> bit & 1 != 0 { m } else { 0 };
                pick(0, !a & !b & !c)
                    | pick(1, !a & !b & c)
                    | pick(2, !a & b & !c)
                    | pick(3, !a & b & c)
                    | pick(4, a & !b & !c)
                    | pick(5, a & !b & c)
                    | pick(6, a & b & !c)
                    | pick(7, a & b & c)
            });
        }
    }
}

/// NaN results are canonical on the hardware.
#[inline(always)]
fn canonical(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

/// The smaller, the number when one is NaN, -0 below +0.
#[inline(always)]
pub(super) fn fmin(a: f32, b: f32) -> f32 {
    let r = if a < b { a } else { b };
    let zero = f32::from_bits(a.to_bits() | b.to_bits());
    let r = if a == 0.0 && b == 0.0 { zero } else { r };
    if b.is_nan() { a } else { r }
}

#[inline(always)]
pub(super) fn fmax(a: f32, b: f32) -> f32 {
    let r = if a > b { a } else { b };
    let zero = f32::from_bits(a.to_bits() & b.to_bits());
    let r = if a == 0.0 && b == 0.0 { zero } else { r };
    if b.is_nan() { a } else { r }
}

fn wide(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[inline(always)]
pub(super) fn mul_hi_s(a: u32, b: u32) -> u32 {
    ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
}

#[inline(always)]
pub(super) fn mul_hi_u(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

pub(super) fn bfe(a: u64, pos: u32, len: u32, width: u32, signed: bool) -> u64 {
    if len == 0 {
        return 0;
    }
    let sign_at = pos.saturating_add(len - 1).min(width - 1);
    let sign = signed && a >> sign_at & 1 != 0;
    let body = if pos >= width { 0 } else { (a & (u64::MAX >> (64 - width))) >> pos };
    let keep = (sign_at + 1).saturating_sub(pos).min(64);
    let field = if keep == 0 { 0 } else { u64::MAX >> (64 - keep) };
    body & field | if sign { !field } else { 0 }
}

#[inline(always)]
fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = wide(b, a);
    let mut r = 0;
    for i in 0..4 {
        let s = selector >> (4 * i) & 15;
        let byte = (bytes >> (8 * (s & 7))) as u32 & 255;
        let byte = if s & 8 != 0 { if byte & 128 != 0 { 255 } else { 0 } } else { byte };
        r |= byte << (8 * i);
    }
    r
}

fn slow_float(slow: Slow, a: u32, b: u32, c: u32) -> u32 {
    let z = |v: u32| if slow.ftz { flush(v) } else { v };
    let (a, b, c) = (f32::from_bits(z(a)), f32::from_bits(z(b)), f32::from_bits(z(c)));
    let r = if slow.round == Round::Rn {
        canonical(match slow.f {
            Wf::FAdd => a + b,
            Wf::FSub => a - b,
            Wf::FMul => a * b,
            _ => a.mul_add(b, c),
        })
    } else {
        let (a, b, c) = (f64::from(a), f64::from(b), f64::from(c));
        // A sum that cancels is -0 towards minus infinity.
        let cancels = |x: f64, y: f64| {
            slow.round == Round::Rm && x + y == 0.0 && (x.is_sign_negative() || y.is_sign_negative())
        };
        let exact = match slow.f {
            Wf::FAdd if cancels(a, b) => -0.0,
            Wf::FSub if cancels(a, -b) => -0.0,
            Wf::FFma if cancels(a * b, c) => -0.0,
            Wf::FAdd => fp::fma_odd(a, 1.0, b),
            Wf::FSub => fp::fma_odd(a, 1.0, -b),
            Wf::FMul => a * b,
            _ => fp::fma_odd(a, b, c),
        };
        fp::encode(exact, fp::F32, slow.round, false)
    };
    let r = z(r);
    if !slow.sat {
        return r;
    }
    let x = f32::from_bits(r);
    if x > 0.0 { x.min(1.0).to_bits() } else { 0 }
}
