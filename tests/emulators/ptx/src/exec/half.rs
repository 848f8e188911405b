//! Arithmetic on 16-bit elements: halves, alone or in pairs, and whole numbers.

use super::alu::{fmax, fmin, row_or_zero};
use super::warp::Warp;
use crate::fp::{self, Round};
use crate::op::{Code, Hf, Inst, Sf};

pub(crate) fn half_to_f32(bits: u16, bf16: bool) -> f32 {
    if bf16 { fp::bf16_to_f32(bits) } else { fp::f16_to_f32(bits) }
}

pub(crate) fn f32_to_half(x: f32, bf16: bool) -> u16 {
    if bf16 { fp::f32_to_bf16(x) } else { fp::f32_to_f16(x) }
}

pub(super) const F16_LEAST_NORMAL: f32 = 1.0 / 16384.0;

pub(super) fn half(warp: &mut Warp, inst: &Inst, mask: u32) {
    let Code::Half { f, bf16, lanes, ftz, sat } = inst.code else { return };
    let [a, b, c] = [0, 1, 2].map(|i| row_or_zero(warp, inst.src[i]));
    let z = |v: u16| if ftz && v & 0x7c00 == 0 && !bf16 { v & 0x8000 } else { v };
    let one = |a: u16, b: u16, c: u16| -> u16 {
        let nan = half_to_f32(a, bf16).is_nan();
        match f {
            Hf::Abs | Hf::Neg if nan => return 0x7fff,
            Hf::Abs => return z(a) & 0x7fff,
            Hf::Neg => return z(a) ^ 0x8000,
            _ => {}
        }
        let (x, y, w) = (half_to_f32(z(a), bf16), half_to_f32(z(b), bf16), half_to_f32(z(c), bf16));
        let fma = || {
            let exact = fp::fma_odd(f64::from(x), f64::from(y), f64::from(w));
            fp::encode(exact, if bf16 { fp::BF16 } else { fp::F16 }, Round::Rn, false) as u16
        };
        let r = z(match f {
            Hf::Fma => fma(),
            // The product is flushed by its value before it is rounded.
            Hf::Mul if ftz && !bf16 && (x * y).abs() < F16_LEAST_NORMAL => f32_to_half((x * y) * 0.0, bf16),
            Hf::FmaRelu => {
                let r = fma();
                // Negative results become +0, NaN stays.
                if r & 0x8000 != 0 && !half_to_f32(r, bf16).is_nan() { 0 } else { r }
            }
            _ => f32_to_half(
                match f {
                    Hf::Add => x + y,
                    Hf::Sub => x - y,
                    Hf::Mul => x * y,
                    Hf::MinNan | Hf::MaxNan if x.is_nan() || y.is_nan() => fp::NAN,
                    Hf::Min | Hf::MinNan => fmin(x, y),
                    Hf::Max | Hf::MaxNan => fmax(x, y),
                    Hf::Ex2 => f64::from(x).exp2() as f32,
                    _ => f64::from(x).tanh() as f32,
                },
                bf16,
            ),
        });
        if !sat {
            return r;
        }
        // NaN saturates to 0.
        let value = half_to_f32(r, bf16);
        if value > 0.0 { f32_to_half(value.min(1.0), bf16) } else { 0 }
    };
    let r = std::array::from_fn(|i| {
        let low = u32::from(one(a[i] as u16, b[i] as u16, c[i] as u16));
        if lanes == 1 {
            return low;
        }
        low | u32::from(one((a[i] >> 16) as u16, (b[i] >> 16) as u16, (c[i] >> 16) as u16)) << 16
    });
    warp.set(inst.dst[0], &r, mask);
}

pub(super) fn short(warp: &mut Warp, inst: &Inst, mask: u32, f: Sf, signed: bool) {
    let [a, b, c] = [0, 1, 2].map(|i| row_or_zero(warp, inst.src[i]));
    let v = |x: u32| if signed { i32::from(x as u16 as i16) } else { i32::from(x as u16) };
    let r = std::array::from_fn(|i| {
        let (x, y, raw_c) = (v(a[i]), v(b[i]), c[i]);
        let product = x.wrapping_mul(y);
        let r = match f {
            Sf::MulWide => return product as u32,
            Sf::MadWide => return (product as u32).wrapping_add(raw_c),
            Sf::Add => x.wrapping_add(y),
            Sf::Sub => x.wrapping_sub(y),
            Sf::Mul => product,
            Sf::MulHi if signed => product >> 16,
            Sf::MulHi => ((product as u32) >> 16) as i32,
            Sf::Mad => product.wrapping_add(v(raw_c)),
            Sf::Div => x.checked_div(y).unwrap_or(-1),
            Sf::Rem => x.checked_rem(y).unwrap_or(x),
            Sf::Min => x.min(y),
            Sf::Max => x.max(y),
            Sf::Neg => x.wrapping_neg(),
            Sf::Abs => x.wrapping_abs(),
            // Amounts are 32-bit and clamp at 16.
            Sf::Shr => x >> b[i].min(16),
            Sf::Shl => x << b[i].min(16),
            Sf::Not => !x,
        };
        r as u32 & 0xffff
    });
    warp.set(inst.dst[0], &r, mask);
}
