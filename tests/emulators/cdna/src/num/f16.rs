//! IEEE binary16, as bits.

/// f32 to f16, to nearest even.
#[inline(always)]
pub(crate) fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    // NaN, quiet, keeps its upper payload.
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff) as u16;
    // A number below 2^-14 becomes subnormal: adding 0.5 puts its last kept bit at the float's last bit.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits()) as u16;
    let odd = (magnitude >> 13) & 1;
    let normal = (magnitude.wrapping_add(odd).wrapping_add(0xc800_0fff) >> 13) as u16;
    let result = if magnitude > 0x7f80_0000 {
        nan
    } else if magnitude >= 0x477f_f000 {
        0x7c00
    } else if magnitude < 0x3880_0000 {
        small
    } else {
        normal
    };
    result | sign
}

/// f32 to f16, towards zero: finite numbers never become infinite.
#[inline(always)]
pub(crate) fn from_f32_rtz(value: f32) -> u16 {
    let nearest = from_f32(value);
    let back = to_f32(nearest);
    let beyond = back.abs() > value.abs();
    nearest - u16::from(beyond)
}

/// f16 to f32, exact.
#[inline(always)]
pub(crate) fn to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let shifted = magnitude << 13;
    let normal = shifted + ((127 - 15) << 23);
    // A value below 2^-14 is multiplied by a power of two, which is exact.
    let subnormal = (f32::from_bits(shifted + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let special = shifted | 0x7f80_0000;
    let value = if magnitude >= 0x7c00 {
        special
    } else if magnitude < 0x400 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(value | sign)
}

/// Subnormals become zero of the same sign.
#[inline(always)]
pub(crate) fn flush(bits: u16) -> u16 {
    if bits & 0x7c00 == 0 { bits & 0x8000 } else { bits }
}

/// A half of each of 64 registers to f32: with the host's own instruction where there is one.
#[inline(always)]
pub(crate) fn widen(registers: &[u32; 64], shift: u32, out: &mut [f32; 64]) {
    #[cfg(target_arch = "x86_64")]
    if crate::exec::has_avx2() {
        // SAFETY: the host has the features that the function is compiled for.
        unsafe { widen_f16c(registers, shift, out) };
        return;
    }
    for (to, from) in out.iter_mut().zip(registers) {
        *to = to_f32((from >> shift) as u16);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn widen_f16c(registers: &[u32; 64], shift: u32, out: &mut [f32; 64]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    for (to, from) in out.chunks_exact_mut(8).zip(registers.chunks_exact(8)) {
        let mut halves = [0u16; 8];
        for i in 0..8 {
            halves[i] = (from[i] >> shift) as u16;
        }
        // SAFETY: both sides have the 16 and 32 bytes that are read and written.
        unsafe {
            let packed = _mm_loadu_si128(halves.as_ptr().cast::<__m128i>());
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(packed));
        }
    }
}
