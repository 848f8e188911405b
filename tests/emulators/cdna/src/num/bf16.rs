//! bfloat16, as bits.

/// f32 to bf16, to nearest even; NaN stays NaN.
#[inline(always)]
pub(crate) fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if value.is_nan() { nan } else { rounded }) as u16
}

/// bf16 to f32, exact.
#[inline(always)]
pub(crate) fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
