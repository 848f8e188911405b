//! Inputs of the programs: words that a seed and a position decide.

use fmha_core::DType;

/// Content of a word of input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Any bits; every fourth word an edge of two's complement or of a shift.
    Bits,
    /// Any single, subnormals and NaNs among them; every fourth one an edge.
    F32,
    /// Singles in a range.
    Range(f32, f32),
    /// Any pair of halves; the lower one counts through all 65536.
    Halves,
    /// Small whole numbers of this type, as many as fit: their products and sums are exact in any order.
    Whole(Element),
    /// Numbers in −1..1 of this type, as many as fit.
    Unit(Element),
}

/// Types of matrix elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the PTX type of that name")]
pub enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    S8,
    U8,
}

impl Element {
    /// The name in an instruction.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::Tf32 => "tf32",
            Element::E4m3 => "e4m3",
            Element::E5m2 => "e5m2",
            Element::S8 => "s8",
            Element::U8 => "u8",
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 => 4,
            _ => 1,
        }
    }

    fn encode(self, value: f64) -> u32 {
        let dtype = match self {
            Element::F16 => DType::F16,
            Element::Bf16 => DType::Bf16,
            Element::E4m3 => DType::E4m3Fn,
            Element::E5m2 => DType::E5m2,
            // The bits below tf32's mantissa are not read.
            Element::Tf32 => return (value as f32).to_bits(),
            Element::S8 | Element::U8 => return u32::from(value as i8 as u8),
        };
        let mut bytes = [0; 4];
        dtype.write(value, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

const EDGES: [u32; 12] =
    [0, 1, 2, 31, 32, 33, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0xffff, 0x8000, 0x7f80_0000];

const FLOAT_EDGES: [f32; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1e-40,
    -1e-40,
    f32::MAX,
    f32::MIN_POSITIVE,
    0.1,
    65504.0,
    65520.0,
    448.0,
    464.0,
];

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
pub(crate) fn mix(counter: u64) -> u64 {
    let z = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Fill {
    /// Word `index` of a row of input.
    #[must_use]
    pub fn word(self, seed: u64, index: u32) -> u32 {
        let random = mix(seed ^ mix(u64::from(index)));
        let (high, low) = ((random >> 32) as u32, random as u32);
        let edge = high.is_multiple_of(4);
        match self {
            Fill::Bits if edge => EDGES[low as usize % EDGES.len()],
            Fill::Bits => low >> (high >> 8 & 31),
            Fill::F32 if edge => FLOAT_EDGES[low as usize % FLOAT_EDGES.len()].to_bits(),
            // Half of them with an exponent near 1, so that sums and products meet.
            Fill::F32 if high & 8 == 0 => low & 0x807f_ffff | (112 + (high >> 8 & 31)) << 23,
            Fill::F32 => low,
            Fill::Range(least, most) => {
                let unit = (low >> 8) as f32 / (1u32 << 24) as f32;
                (least + unit * (most - least)).to_bits()
            }
            Fill::Halves => index & 0xffff | low << 16,
            Fill::Whole(element) => {
                let least = if element == Element::U8 { 0 } else { -2 };
                pack(element, |e| f64::from((random >> (8 * e) & 255) as u8 % 5) + f64::from(least))
            }
            Fill::Unit(element) => pack(element, |e| {
                let part = mix(random ^ u64::from(e)) >> 40;
                part as f64 / f64::from(1u32 << 23) - 1.0
            }),
        }
    }
}

fn pack(element: Element, value: impl Fn(u32) -> f64) -> u32 {
    let bits = 8 * element.bytes();
    (0..32 / bits).fold(0, |word, e| word | element.encode(value(e)) << (bits * e))
}
