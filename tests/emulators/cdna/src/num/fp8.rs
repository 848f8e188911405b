//! 8-bit floats: OCP e4m3fn and e5m2 (gfx950), their FNUZ forms (gfx942), and the smaller OCP MX formats.

use std::sync::LazyLock;

use crate::elf::Arch;

/// A float format of eight bits or fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    pub(crate) exponent_bits: u32,
    pub(crate) mantissa_bits: u32,
    pub(crate) bias: i32,
    pub(crate) specials: Specials,
}

/// Which codes are no numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Specials {
    /// Encoding as in IEEE 754: the highest exponent is infinity and NaN.
    Ieee,
    /// Only exponent and mantissa all ones is NaN; no infinity.
    AllOnesNan,
    /// Only 0x80 is NaN; no infinity, no negative zero.
    Fnuz,
    /// Every code is a number.
    None,
}

impl Format {
    pub(crate) const E4M3_OCP: Self =
        Self { exponent_bits: 4, mantissa_bits: 3, bias: 7, specials: Specials::AllOnesNan };
    pub(crate) const E5M2_OCP: Self =
        Self { exponent_bits: 5, mantissa_bits: 2, bias: 15, specials: Specials::Ieee };
    pub(crate) const E4M3_FNUZ: Self =
        Self { exponent_bits: 4, mantissa_bits: 3, bias: 8, specials: Specials::Fnuz };
    pub(crate) const E5M2_FNUZ: Self =
        Self { exponent_bits: 5, mantissa_bits: 2, bias: 16, specials: Specials::Fnuz };
    pub(crate) const E2M3: Self =
        Self { exponent_bits: 2, mantissa_bits: 3, bias: 1, specials: Specials::None };
    pub(crate) const E3M2: Self =
        Self { exponent_bits: 3, mantissa_bits: 2, bias: 3, specials: Specials::None };
    pub(crate) const E2M1: Self =
        Self { exponent_bits: 2, mantissa_bits: 1, bias: 1, specials: Specials::None };

    /// Format that an architecture calls `fp8`.
    pub(crate) fn fp8(arch: Arch) -> Self {
        if matches!(arch, Arch::Gfx950 | Arch::Gfx1201) { Self::E4M3_OCP } else { Self::E4M3_FNUZ }
    }

    /// Format that an architecture calls `bf8`.
    pub(crate) fn bf8(arch: Arch) -> Self {
        if matches!(arch, Arch::Gfx950 | Arch::Gfx1201) { Self::E5M2_OCP } else { Self::E5M2_FNUZ }
    }

    /// Bits of a code, sign included.
    pub(crate) fn bits(self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    fn nan(self) -> u8 {
        match self.specials {
            Specials::Fnuz => 0x80,
            Specials::Ieee | Specials::AllOnesNan => 0x7f,
            Specials::None => (1 << (self.bits() - 1)) - 1,
        }
    }

    /// The number that a code stands for.
    pub(crate) fn decode(self, code: u8) -> f32 {
        let sign_bit = self.bits() - 1;
        let sign = if code >> sign_bit & 1 == 1 { -1.0 } else { 1.0 };
        let exponent = u32::from(code) >> self.mantissa_bits & ((1 << self.exponent_bits) - 1);
        let mantissa = u32::from(code) & ((1 << self.mantissa_bits) - 1);
        let top_exponent = (1 << self.exponent_bits) - 1;
        let top_mantissa = (1 << self.mantissa_bits) - 1;
        match self.specials {
            Specials::Fnuz if code == 0x80 => return f32::NAN,
            Specials::AllOnesNan if exponent == top_exponent && mantissa == top_mantissa => {
                return f32::NAN;
            }
            Specials::Ieee if exponent == top_exponent => {
                return if mantissa == 0 { sign * f32::INFINITY } else { f32::NAN };
            }
            _ => {}
        }
        let step = f32::from_bits(((127 - self.mantissa_bits as i32) as u32) << 23);
        let (significand, power) = if exponent == 0 {
            (mantissa as f32 * step, 1 - self.bias)
        } else {
            (1.0 + mantissa as f32 * step, exponent as i32 - self.bias)
        };
        sign * significand * (power as f32).exp2()
    }

    /// Rounds to nearest even. Overflow gives NaN, or infinity where the format has one: the conversion
    /// instructions do not saturate. `extra` is added below the last kept bit before truncating, for
    /// stochastic rounding.
    pub(crate) fn encode(self, value: f32, stochastic: Option<u32>) -> u8 {
        let sign = if value.is_sign_negative() { 1u8 << (self.bits() - 1) } else { 0 };
        if value.is_nan() {
            return self.nan();
        }
        let overflow = match self.specials {
            Specials::Ieee => sign | (((1 << self.exponent_bits) - 1) << self.mantissa_bits) as u8,
            Specials::None => sign | ((1 << (self.bits() - 1)) - 1) as u8,
            Specials::Fnuz => 0x80,
            Specials::AllOnesNan => sign | 0x7f,
        };
        if value.is_infinite() {
            return overflow;
        }
        let bits = value.to_bits() & 0x7fff_ffff;
        if bits == 0 {
            return if self.specials == Specials::Fnuz { 0 } else { sign };
        }
        // f32 subnormals are far below every format's smallest number.
        let exponent = (bits >> 23) as i32 - 127;
        let significand = u64::from(bits & 0x7f_ffff) | if bits >> 23 == 0 { 0 } else { 1 << 23 };
        let smallest = 1 - self.bias;
        let lost = 23 - self.mantissa_bits as i32 + (smallest - exponent).max(0);
        let lost = lost.min(40) as u32;
        let rounded = match stochastic {
            Some(random) => (significand + (u64::from(random) >> (32 - lost.min(32)))) >> lost,
            None => {
                let half = 1u64 << (lost - 1);
                let odd = significand >> lost & 1;
                (significand + half - 1 + odd) >> lost
            }
        };
        let base = (exponent.max(smallest) + self.bias - 1) as u64;
        let code = (base << self.mantissa_bits) + rounded;
        let largest = match self.specials {
            Specials::Fnuz => 0x7f,
            Specials::AllOnesNan => 0x7e,
            Specials::Ieee => u64::from(overflow & 0x7f) - 1,
            Specials::None => u64::from(overflow & 0x7f) & ((1 << (self.bits() - 1)) - 1),
        };
        if code > largest {
            return overflow;
        }
        if code == 0 && self.specials == Specials::Fnuz {
            return 0;
        }
        sign | code as u8
    }

    /// The 256 numbers of the 8-bit formats.
    pub(crate) fn table(self) -> &'static [f32; 256] {
        static TABLES: LazyLock<[[f32; 256]; 4]> = LazyLock::new(|| {
            [Format::E4M3_OCP, Format::E5M2_OCP, Format::E4M3_FNUZ, Format::E5M2_FNUZ]
                .map(|format| std::array::from_fn(|code| format.decode(code as u8)))
        });
        match (self.specials == Specials::Fnuz, self.mantissa_bits) {
            (false, 3) => &TABLES[0],
            (false, _) => &TABLES[1],
            (true, 3) => &TABLES[2],
            (true, _) => &TABLES[3],
        }
    }
}
