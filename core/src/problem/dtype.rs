//! Number types of a tensor's elements.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::error::ProblemError;
use crate::fp8::{E4m3Fn, E4m3Fnuz, E5m2, E5m2Fnuz};

/// The type of a tensor's elements.
///
/// The four FP8 types are different types: bits of one are never read as bits of another. NVIDIA
/// and gfx950 compute in the OCP forms, gfx942 in the FNUZ forms; [`crate::fp8`] converts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// OCP E4M3: bias 7, largest 448, NaN, no infinity.
    E4m3Fn,
    /// OCP E5M2: bias 15, largest 57344, NaN and infinities.
    E5m2,
    /// FNUZ E4M3: bias 8, largest 240, one NaN (0x80), no infinity, no −0.
    E4m3Fnuz,
    /// FNUZ E5M2: bias 16, largest 57344, one NaN (0x80), no infinity, no −0.
    E5m2Fnuz,
}

impl DType {
    /// Every type, in the order of the support table.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F16, DType::Bf16, DType::E4m3Fn, DType::E5m2, DType::E4m3Fnuz, DType::E5m2Fnuz];

    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> u64 {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::E4m3Fn | DType::E5m2 | DType::E4m3Fnuz | DType::E5m2Fnuz => 1,
        }
    }

    /// Whether this is one of the four FP8 types.
    #[must_use]
    pub const fn is_fp8(self) -> bool {
        self.size_bytes() == 1
    }

    /// The name in the command, in files and in errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::E4m3Fn => "e4m3fn",
            DType::E5m2 => "e5m2",
            DType::E4m3Fnuz => "e4m3fnuz",
            DType::E5m2Fnuz => "e5m2fnuz",
        }
    }

    /// The largest finite value.
    #[must_use]
    pub const fn max_finite(self) -> f64 {
        match self {
            DType::F32 => f32::MAX as f64,
            DType::F16 => 65504.0,
            DType::Bf16 => 3.389_531_389_251_535_5e38,
            DType::E4m3Fn => 448.0,
            DType::E5m2 | DType::E5m2Fnuz => 57344.0,
            DType::E4m3Fnuz => 240.0,
        }
    }

    /// Half a unit in the last place of 1: the relative error of one rounding to this type.
    #[must_use]
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => 5.960_464_477_539_063e-8,
            DType::F16 => 4.882_812_5e-4,
            DType::Bf16 => 3.906_25e-3,
            DType::E4m3Fn | DType::E4m3Fnuz => 6.25e-2,
            DType::E5m2 | DType::E5m2Fnuz => 1.25e-1,
        }
    }

    /// Reads one element from its little-endian bytes. Exact: every type here embeds in f64.
    ///
    /// `bytes` holds at least [`size_bytes`](Self::size_bytes) bytes; more are ignored.
    #[must_use]
    pub fn read(self, bytes: &[u8]) -> f64 {
        match self {
            DType::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
            DType::F16 => f64::from(f16::from_le_bytes([bytes[0], bytes[1]])),
            DType::Bf16 => f64::from(bf16::from_le_bytes([bytes[0], bytes[1]])),
            DType::E4m3Fn => f64::from(E4m3Fn::from_bits(bytes[0]).to_f32()),
            DType::E5m2 => f64::from(E5m2::from_bits(bytes[0]).to_f32()),
            DType::E4m3Fnuz => f64::from(E4m3Fnuz::from_bits(bytes[0]).to_f32()),
            DType::E5m2Fnuz => f64::from(E5m2Fnuz::from_bits(bytes[0]).to_f32()),
        }
    }

    /// Writes `value`, rounded to nearest even, into the element's little-endian bytes.
    ///
    /// FP8 saturates at [`max_finite`](Self::max_finite) (infinities too; NaN stays NaN); the wider
    /// types overflow to infinity as IEEE 754 says.
    pub fn write(self, value: f64, bytes: &mut [u8]) {
        match self {
            DType::F32 => bytes[..4].copy_from_slice(&(value as f32).to_le_bytes()),
            DType::F16 => bytes[..2].copy_from_slice(&f16::from_f32(round_to_odd(value)).to_le_bytes()),
            DType::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f32(round_to_odd(value)).to_le_bytes()),
            DType::E4m3Fn => bytes[0] = E4m3Fn::from_f64_saturating(value).to_bits(),
            DType::E5m2 => bytes[0] = E5m2::from_f64_saturating(value).to_bits(),
            DType::E4m3Fnuz => bytes[0] = E4m3Fnuz::from_f64_saturating(value).to_bits(),
            DType::E5m2Fnuz => bytes[0] = E5m2Fnuz::from_f64_saturating(value).to_bits(),
        }
    }

    /// The nearest value of this type (ties to even), as f64: the value read back after storing `value`.
    #[must_use]
    pub fn round(self, value: f64) -> f64 {
        let mut bytes = [0; 4];
        self.write(value, &mut bytes);
        self.read(&bytes)
    }
}

/// Rounds to f32, an inexact result always to an odd last bit, so that a second rounding to a narrower type
/// gives what one rounding from f64 would (Boldo and Melquiond, "Emulation of FMA and correctly rounded
/// sums", 2008).
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || value.is_nan() {
        return nearest;
    }
    let away_from_zero = f64::from(nearest).abs() > value.abs();
    let truncated = nearest.to_bits() - u32::from(away_from_zero);
    f32::from_bits(truncated | 1)
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = ProblemError;

    /// Reads the names of [`DType::name`] and their common aliases (`fp16`, `half`, `bfloat16`,
    /// `fp32`, `float`, `fp8` = e4m3fn, `bf8` = e5m2).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.to_ascii_lowercase().as_str() {
            "f32" | "fp32" | "float" | "float32" => DType::F32,
            "f16" | "fp16" | "half" | "float16" => DType::F16,
            "bf16" | "bfloat16" => DType::Bf16,
            "e4m3fn" | "e4m3" | "fp8" => DType::E4m3Fn,
            "e5m2" | "bf8" => DType::E5m2,
            "e4m3fnuz" => DType::E4m3Fnuz,
            "e5m2fnuz" => DType::E5m2Fnuz,
            _ => {
                let known = DType::ALL.map(DType::name).join(", ");
                let text = format!("dtype `{text}` is no number type (known: {known})");
                return Err(ProblemError::new("dtype", text));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_from_f64_rounds_once() {
        // The number lies just above the tie between 1 and its successor. Rounding through f32 first would give the
        // tie, which then rounds to even, down to 1.
        let above_tie = 1.0 + f64::from(f16::EPSILON) / 2.0 + 1e-12;
        assert_eq!(DType::F16.round(above_tie), 1.0 + f64::from(f16::EPSILON));
        let above_tie = 1.0 + f64::from(bf16::EPSILON) / 2.0 + 1e-12;
        assert_eq!(DType::Bf16.round(above_tie), 1.0 + f64::from(bf16::EPSILON));
        assert_eq!(DType::F16.round(1e300), f64::INFINITY);
        assert_eq!(DType::F16.round(-65519.0), -65504.0);
    }

    #[test]
    fn an_exact_tie_goes_to_even_and_what_is_just_above_it_up() {
        for (dtype, step) in [(DType::F16, f64::from(f16::EPSILON)), (DType::Bf16, f64::from(bf16::EPSILON))]
        {
            // The tie is exact in f32, so rounding to f32 changes nothing before the rounding to 16 bits.
            let tie = 1.0 + step / 2.0;
            assert_eq!(dtype.round(tie), 1.0, "{dtype}");
            // Truncated to f32, this number becomes the f32 after the tie, whose last bit is odd already.
            let above = tie + f64::from(f32::EPSILON) * 1.25;
            assert_eq!(dtype.round(above), 1.0 + step, "{dtype}");
            assert_eq!(dtype.round(-above), -1.0 - step, "{dtype}");
            assert_eq!(dtype.round(f64::NEG_INFINITY), f64::NEG_INFINITY, "{dtype}");
            assert!(dtype.round(f64::NAN).is_nan(), "{dtype}");
        }
    }

    #[test]
    fn every_name_reads_back() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        let error = "fp7".parse::<DType>().unwrap_err();
        assert!(error.field == "dtype" && error.text.starts_with("dtype `fp7` is"), "{error}");
    }

    #[test]
    fn unit_roundoff_is_half_the_step_at_one() {
        for dtype in DType::ALL {
            let step = 2.0 * dtype.unit_roundoff();
            assert_eq!(dtype.round(1.0 + step), 1.0 + step, "{dtype}");
            assert_eq!(dtype.round(1.0 + step * 0.49), 1.0, "{dtype}");
        }
    }
}
