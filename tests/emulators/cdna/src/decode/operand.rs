//! Source operands: registers, inline constants, the literal that may follow the instruction.

use crate::inst::{Src, Ty};

/// High words of the addresses of LDS and of private memory in flat addressing.
pub(crate) const SHARED_APERTURE: u32 = 0x0001_0000;
pub(crate) const PRIVATE_APERTURE: u32 = 0x0002_0000;

/// Reads operands and remembers whether a literal was taken.
pub(super) struct Source<'w> {
    words: &'w [u32],
    /// Words of the encoding, without the literal.
    base: usize,
    literal: bool,
}

impl<'w> Source<'w> {
    pub(super) fn new(words: &'w [u32], base: usize) -> Self {
        Self { words, base, literal: false }
    }

    /// Bytes of the instruction.
    pub(super) fn size(&self) -> u8 {
        4 * (self.base + usize::from(self.literal)) as u8
    }

    pub(super) fn literal(&mut self) -> Option<u32> {
        self.literal = true;
        self.words.get(self.base).copied()
    }

    /// The operand with that number, 0..=511 (CDNA3 ISA, "SSRC" and "SRC0" tables).
    pub(super) fn read(&mut self, code: u32, ty: Ty) -> Option<Src> {
        Some(match code {
            0..=127 => Src::S(code as u8),
            128 => Src::K(0, 0),
            129..=192 => integer(code as i32 - 128, ty),
            193..=208 => integer(192 - code as i32, ty),
            235 | 236 => Src::K(0, SHARED_APERTURE),
            237 | 238 => Src::K(0, PRIVATE_APERTURE),
            240..=248 => float(code - 240, ty),
            251 => Src::Vccz,
            252 => Src::Execz,
            253 => Src::Scc,
            255 => literal(self.literal()?, ty),
            256..=511 => Src::V(code as u16 - 256),
            _ => return None,
        })
    }
}

fn integer(value: i32, ty: Ty) -> Src {
    match ty {
        Ty::B64 | Ty::F64 | Ty::Mask => Src::K(value as u32, (value >> 31) as u32),
        // A constant feeds the low one of two packed f32; op_sel_hi chooses what the high one reads.
        _ => Src::K(value as u32, 0),
    }
}

fn literal(word: u32, ty: Ty) -> Src {
    match ty {
        Ty::F64 => Src::K(0, word),
        // Upper bits are zeros: clang writes a 64-bit constant as one literal where it has 32 bits without a sign.
        _ => Src::K(word, 0),
    }
}

fn float(index: u32, ty: Ty) -> Src {
    const VALUES: [f64; 9] = [0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.159_154_943_091_895_32];
    let value = VALUES[index as usize];
    match ty {
        Ty::F64 | Ty::B64 | Ty::Mask => {
            let bits = value.to_bits();
            Src::K(bits as u32, (bits >> 32) as u32)
        }
        Ty::F16 | Ty::B16 | Ty::F16x2 | Ty::B16x2 => {
            Src::K(u32::from(crate::num::f16::from_f32(value as f32)), 0)
        }
        Ty::Bf16x2 => Src::K((value as f32).to_bits() >> 16, 0),
        _ => Src::K((value as f32).to_bits(), 0),
    }
}
