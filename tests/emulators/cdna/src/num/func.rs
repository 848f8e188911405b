//! exp2, log2 and their kind. The hardware's results are within an ulp or so of the true value and not specified to the
//! bit; these are computed in double precision and rounded once.

/// 2^x. The instruction knows no subnormals: what would be one is zero.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Far outside, the clamp gives overflow to infinity or a result that is flushed below.
    let clamped = f64::from(x.clamp(-200.0, 200.0));
    let whole = (clamped + ROUND) - ROUND;
    let t = (clamped - whole) * std::f64::consts::LN_2;
    // e^t for |t| <= 0.347: the first omitted term is below 2^-30 of the result, an eighth of half an f32 ulp.
    let series = 1.0
        + t * (1.0
            + t * (0.5
                + t * (1.0 / 6.0 + t * (1.0 / 24.0 + t * (1.0 / 120.0 + t * (1.0 / 720.0 + t / 5040.0))))));
    let scale = f64::from_bits((((whole as i32) + 1023) as u64) << 52);
    let result = (series * scale) as f32;
    let result = if result < f32::MIN_POSITIVE { 0.0 } else { result };
    if x.is_nan() { x } else { result }
}

/// Adding and subtracting this rounds a double of moderate size to an integer.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// log2 x, a subnormal argument taken as zero.
#[inline(always)]
pub(crate) fn log2(x: f32) -> f32 {
    f64::from(flush(x)).log2() as f32
}

/// Subnormals become zero of the same sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.to_bits() & 0x7f80_0000 == 0 { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// 1 / x, subnormals taken and given as zero.
#[inline(always)]
pub(crate) fn rcp(x: f32) -> f32 {
    flush(1.0 / flush(x))
}

/// 1 / sqrt x.
#[inline(always)]
pub(crate) fn rsq(x: f32) -> f32 {
    (1.0 / f64::from(flush(x)).sqrt()) as f32
}
