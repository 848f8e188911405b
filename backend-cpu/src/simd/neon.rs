//! AArch64 NEON, part of the baseline: four lanes, thirty-two registers.

use std::arch::aarch64::*;

use half::f16;

use super::{Op, Simd, arithmetic};

/// Advanced SIMD.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    /// Whether this processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

impl Simd for Neon {
    const LANES: usize = 4;
    const TILE_ROWS: usize = 12;
    type V = float32x4_t;
    type Plain = Self;

    #[inline(always)]
    fn plain(self) -> Self {
        self
    }

    #[inline(always)]
    fn run<O: Op<Self>>(self, op: O) {
        #[target_feature(enable = "neon")]
        fn compiled<O: Op<Neon>>(simd: Neon, op: O) {
            op.call(simd);
        }
        // SAFETY: `self` exists because `detect` saw the feature.
        unsafe { compiled(self, op) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: the caller promised four f32.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Self::V) {
        // SAFETY: the caller promised four f32.
        unsafe { vst1q_f32(to, v) }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller promised four rows of four f32 at both ends.
        unsafe {
            let r = [0, 1, 2, 3].map(|i| vld1q_f32(from.add(i * from_step)));
            let (a, b) = (vtrnq_f32(r[0], r[1]), vtrnq_f32(r[2], r[3]));
            let columns = [
                vcombine_f32(vget_low_f32(a.0), vget_low_f32(b.0)),
                vcombine_f32(vget_low_f32(a.1), vget_low_f32(b.1)),
                vcombine_f32(vget_high_f32(a.0), vget_high_f32(b.0)),
                vcombine_f32(vget_high_f32(a.1), vget_high_f32(b.1)),
            ];
            for (c, column) in columns.into_iter().enumerate() {
                vst1q_f32(to.add(c * to_step), column);
            }
        }
    }

    arithmetic! {
        add(a, b) = vaddq_f32;
        sub(a, b) = vsubq_f32;
        mul(a, b) = vmulq_f32;
        div(a, b) = vdivq_f32;
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves. A comparison with NaN is false, so `b` stays.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }

    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vabsq_f32(a) }
    }

    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vrndnq_f32(a) }
    }

    #[inline(always)]
    fn power_of_two(self, n: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)))) }
    }

    #[inline(always)]
    fn select_le(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe { vbslq_f32(vcleq_f32(a, b), yes, no) }
    }

    #[inline(always)]
    fn round_to_bf16(self, a: Self::V) -> Self::V {
        // SAFETY: NEON, as `self` proves.
        unsafe {
            let bits = vreinterpretq_u32_f32(a);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let carried = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let kept = vandq_u32(carried, vdupq_n_u32(0xffff_0000));
            // A NaN's bits could carry into the sign: leave NaN alone.
            vbslq_f32(vceqq_f32(a, a), vreinterpretq_f32_u32(kept), a)
        }
    }

    #[inline(always)]
    fn round_to_f16(self, a: Self::V) -> Self::V {
        let mut lanes = [0.0; 4];
        // SAFETY: four f32 each way.
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), a);
            vld1q_f32(lanes.map(|x| f16::from_f32(x).to_f32()).as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller promised four bf16.
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(from)))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_even_odd(self, from: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller promised eight bf16.
        unsafe {
            let both = vreinterpretq_u32_u16(vld1q_u16(from));
            let odd = vandq_u32(both, vdupq_n_u32(0xffff_0000));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(both)), vreinterpretq_f32_u32(odd)]
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller promised four f16.
        unsafe {
            let bits = from.cast::<[u16; 4]>().read_unaligned();
            vld1q_f32(bits.map(|x| f16::from_bits(x).to_f32()).as_ptr())
        }
    }
}
