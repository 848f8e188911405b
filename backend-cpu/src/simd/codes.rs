//! Tables that convert 8-bit codes to 16-bit numbers.

use fmha_core::DType;

use super::Simd;

/// A table with a 16-bit number for each byte: all low bytes, then all high bytes.
#[derive(Clone)]
pub(crate) struct BytePlanes {
    pub(super) planes: [[u8; 256]; 2],
    pub(super) parts: Option<CodeParts>,
}

/// The 16-bit number of an FP8 code times a descale, from the parts of the code: the mantissa selects one of a few
/// numbers, and the exponent is added to the exponent of that number. This works because rounding commutes with
/// multiplication by a power of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CodeParts {
    /// Low bytes and high bytes of those numbers, by mantissa: first for exponent 0 with a leading one, then
    /// for subnormal codes, then for infinite and NaN codes.
    pub(super) numbers: [[u8; 16]; 2],
    /// Mask of the mantissa's bits, then mask of the exponent's bits.
    pub(super) mantissa: u8,
    pub(super) exponent: u8,
    /// Factor that moves the exponent's bits to their place in the number.
    pub(super) places: u16,
    /// Mask of the bits that are all set in infinite and NaN codes.
    pub(super) special: u8,
    /// Offset of subnormal and of special codes in `numbers`, added to the mantissa. An offset with bit 7 set
    /// has no entry: the number then has the bits of `or`.
    pub(super) to_subnormal: u8,
    pub(super) to_special: u8,
    pub(super) or: u8,
}

impl CodeParts {
    /// Parts for codes of `from` that become `wide` of type `to`; `None` if the parts would convert some code
    /// wrongly.
    fn new(from: DType, to: DType, wide: &impl Fn(u8) -> u16) -> Option<Self> {
        let (mantissa, exponent, special, to_subnormal, to_special, or) = match from {
            DType::E4m3Fn => (0x07, 0x78, 0x7f, 8, 0x80, 0xff),
            DType::E5m2 => (0x03, 0x7c, 0x7c, 4, 8, 0),
            _ => return None,
        };
        // Both types have the sign at bit 7; bf16 has seven bits of mantissa, f16 ten.
        let (infinity, bits) = if to == DType::F16 { (0x7c00, 10) } else { (0x7f80, 7) };
        let places = 1 << (bits - u32::from(mantissa).count_ones());
        let mut numbers = [[0; 16]; 2];
        let mut put = |at: u8, number: u16| {
            for (numbers, byte) in numbers.iter_mut().zip(number.to_le_bytes()) {
                numbers[usize::from(at)] = byte;
            }
        };
        // An exponent in the middle of the range, so that the number is not subnormal.
        let middle = exponent & 0x40;
        for at in 0..=mantissa {
            put(at, wide(middle | at).wrapping_sub(u16::from(middle) * places));
            put(to_subnormal + at, wide(at));
            if to_special < 16 {
                put(to_special + at, wide(special | at));
            }
        }
        let parts = Self { numbers, mantissa, exponent, places, special, to_subnormal, to_special, or };
        let is_nan = |bits: u16| bits & 0x7fff > infinity;
        let same = |code: u8| {
            let (found, wanted) = (parts.of(code), wide(code));
            found == wanted || is_nan(found) && is_nan(wanted)
        };
        (0..=u8::MAX).all(same).then_some(parts)
    }

    /// Converts a code of 8 bits to its number of 16 bits.
    pub(crate) fn of(&self, code: u8) -> u16 {
        let is_special = code & self.special == self.special;
        let exponent = if is_special { 0 } else { code & self.exponent };
        let is_subnormal = code & self.exponent == 0;
        let at = code & self.mantissa
            | if is_subnormal { self.to_subnormal } else { 0 }
            | if is_special { self.to_special } else { 0 };
        let number = if at < 16 { self.numbers.map(|bytes| bytes[usize::from(at)]) } else { [0; 2] };
        let number = number.map(|byte| if is_special { byte | self.or } else { byte });
        let sign = u16::from(code & 0x80) << 8;
        (u16::from_le_bytes(number) ^ sign).wrapping_add(u16::from(exponent) * self.places)
    }
}

impl BytePlanes {
    /// Table that converts codes of type `from` to numbers of type `to`, as `wide` does for one code.
    pub(crate) fn of_codes(from: DType, to: DType, wide: impl Fn(u8) -> u16) -> Self {
        Self { parts: CodeParts::new(from, to, &wide), ..Self::new(wide) }
    }

    /// Table of what `wide` returns for each code.
    pub(crate) fn new(wide: impl Fn(u8) -> u16) -> Self {
        let mut planes = [[0; 256]; 2];
        for byte in 0..=u8::MAX {
            let [low, high] = wide(byte).to_le_bytes();
            (planes[0][usize::from(byte)], planes[1][usize::from(byte)]) = (low, high);
        }
        Self { planes, parts: None }
    }

    /// The number that a byte stands for.
    pub(crate) fn of(&self, byte: u8) -> u16 {
        let [low, high] = &self.planes;
        u16::from_le_bytes([low[usize::from(byte)], high[usize::from(byte)]])
    }

    /// Whether 0 converts to 0 and the top bit of a byte changes only the top bit of its number, as in FP8 types
    /// with a negative zero. The first 128 entries then describe the whole table.
    pub(crate) fn is_odd(&self) -> bool {
        (0..0x80).all(|byte| self.of(byte | 0x80) == self.of(byte) ^ 0x8000) && self.of(0) & 0x7fff == 0
    }

    /// The lower 128 numbers.
    #[inline(always)]
    pub(crate) fn lower<S: Simd>(&self, s: S) -> [S::V; 4] {
        let mut lower = [s.splat(0.0); 4];
        for (n, lower) in lower.iter_mut().enumerate() {
            // SAFETY: half a plane is two vectors where there is `widen_codes`, at most two elsewhere.
            *lower = unsafe { s.load(self.planes[n / 2].as_ptr().add(n % 2 * 64).cast()) };
        }
        lower
    }
}

/// Tables for [`Simd::widen_codes`], as many vectors as the instruction set needs: halves of planes, or the numbers
/// of [`CodeParts`] in order. Each table has its own vector: extracting tables from a shared vector at each use
/// made AVX2 three times as slow.
pub(crate) type Tables<V> = [V; 9];
