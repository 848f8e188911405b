//! Tensor maps: what `cuTensorMapEncodeTiled` accepts and how a tile lies in shared memory. PTX ISA 5.5.

use crate::fault::{Fault, FaultKind};

/// Swizzle of a tile in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Swizzle {
    None,
    B32,
    B64,
    B128,
}

impl Swizzle {
    /// The bytes of a row that one pattern spans.
    pub(crate) fn span(self) -> u32 {
        match self {
            Self::None => 16,
            Self::B32 => 32,
            Self::B64 => 64,
            Self::B128 => 128,
        }
    }

    /// Real place of the byte at `address`: 16-byte chunks are exchanged by the row's number.
    #[inline(always)]
    pub(crate) fn apply(self, address: u32) -> u32 {
        match self {
            Self::None => address,
            Self::B32 => address ^ (address >> 3 & 0x10),
            Self::B64 => address ^ (address >> 3 & 0x30),
            Self::B128 => address ^ (address >> 3 & 0x70),
        }
    }
}

/// A tiled tensor map. Dimension 0 is the innermost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// `CUtensorMapDataType`.
    pub data_type: u8,
    /// Dimensions, 1 to 5.
    pub rank: u8,
    /// Device address of the tensor.
    pub address: u64,
    /// Elements of each dimension.
    pub dims: [u64; 5],
    /// Bytes between neighbours of dimensions 1 to 4.
    pub strides: [u64; 4],
    /// Elements of the tile in each dimension.
    pub box_dims: [u32; 5],
    /// Traversal strides.
    pub element_strides: [u32; 5],
    /// `CUtensorMapInterleave`.
    pub interleave: u8,
    /// `CUtensorMapSwizzle`.
    pub swizzle: u8,
    /// Fill out-of-range elements with NaN instead of zero.
    pub nan_fill: bool,
}

/// The first bytes of an encoded map. The rest of the encoding is this emulator's own.
const MAGIC: u32 = 0x7e4a_50a7;

fn refuse(text: impl Into<String>) -> Fault {
    Fault::new(FaultKind::Descriptor, format!("tensor map: {}", text.into()))
}

impl TensorMap {
    /// Bytes of one element.
    #[must_use]
    pub fn element_bytes(&self) -> u32 {
        match self.data_type {
            0 => 1,
            1 | 6 | 9 => 2,
            4 | 5 | 8 => 8,
            _ => 4,
        }
    }

    pub(crate) fn swizzle_mode(&self) -> Swizzle {
        match self.swizzle {
            1 => Swizzle::B32,
            2 => Swizzle::B64,
            3 => Swizzle::B128,
            _ => Swizzle::None,
        }
    }

    /// Checks the documented rules of `cuTensorMapEncodeTiled`.
    ///
    /// # Errors
    /// Names the field and the number that the driver would refuse.
    pub fn validate(&self) -> Result<(), Fault> {
        let rank = usize::from(self.rank);
        if !(1..=5).contains(&rank) {
            return Err(refuse(format!("rank {rank} is not 1 to 5")));
        }
        if self.data_type > 12 {
            return Err(refuse(format!("data type {} is not supported here", self.data_type)));
        }
        if self.swizzle > 3 {
            return Err(refuse(format!("swizzle mode {} is not supported here", self.swizzle)));
        }
        if self.interleave != 0 {
            return Err(refuse(format!("interleave {} is not supported here", self.interleave)));
        }
        if !self.address.is_multiple_of(16) {
            return Err(refuse(format!("globalAddress {:#x} is no multiple of 16", self.address)));
        }
        let size = u64::from(self.element_bytes());
        for i in 0..rank {
            if self.dims[i] == 0 || self.dims[i] > 1 << 32 {
                return Err(refuse(format!("globalDim[{i}] {} is not in 1..=2^32", self.dims[i])));
            }
            if self.box_dims[i] == 0 || self.box_dims[i] > 256 {
                return Err(refuse(format!("boxDim[{i}] {} is not in 1..=256", self.box_dims[i])));
            }
            if self.element_strides[i] == 0 || self.element_strides[i] > 8 {
                return Err(refuse(format!(
                    "elementStrides[{i}] {} is not in 1..=8",
                    self.element_strides[i]
                )));
            }
        }
        for (i, &stride) in self.strides[..rank - 1].iter().enumerate() {
            if stride % 16 != 0 || stride >= 1 << 40 {
                return Err(refuse(format!("globalStrides[{i}] {stride} is no multiple of 16 below 2^40")));
            }
            let least = if i == 0 { self.dims[0] * size } else { self.strides[i - 1] };
            // A stride of 0 repeats one row; an H200's driver (580.159) takes it.
            if i == 0 && stride != 0 && stride < least {
                return Err(refuse(format!(
                    "globalStrides[0] {stride} is less than the {least} bytes of a row"
                )));
            }
        }
        let inner = u64::from(self.box_dims[0]) * size;
        if inner % 16 != 0 {
            return Err(refuse(format!("boxDim[0] spans {inner} bytes, no multiple of 16")));
        }
        let span = u64::from(self.swizzle_mode().span());
        if self.swizzle != 0 && inner > span {
            return Err(refuse(format!(
                "inner box of {inner} bytes is wider than the swizzle span of {span} bytes"
            )));
        }
        Ok(())
    }

    /// The map in 128 bytes, as [`decode`](Self::decode) reads them.
    #[must_use]
    pub fn encode(&self) -> [u8; 128] {
        let mut out = [0u8; 128];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..9].copy_from_slice(&[
            self.data_type,
            self.rank,
            self.interleave,
            self.swizzle,
            self.nan_fill.into(),
        ]);
        out[16..24].copy_from_slice(&self.address.to_le_bytes());
        for i in 0..5 {
            out[24 + 4 * i..28 + 4 * i].copy_from_slice(&(self.dims[i].wrapping_sub(1) as u32).to_le_bytes());
            out[48 + 2 * i..50 + 2 * i].copy_from_slice(&(self.box_dims[i] as u16).to_le_bytes());
            out[58 + i] = self.element_strides[i] as u8;
        }
        for i in 0..4 {
            out[64 + 8 * i..72 + 8 * i].copy_from_slice(&self.strides[i].to_le_bytes());
        }
        out
    }

    /// Reads an encoded map: this emulator's own, or one in the hardware's layout.
    ///
    /// # Errors
    /// The bytes are neither.
    pub fn decode(bytes: &[u8; 128]) -> Result<Self, Fault> {
        let word =
            |at: usize, n: usize| bytes[at..at + n].iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
        if word(0, 4) != u64::from(MAGIC) {
            return Self::from_hardware(&word);
        }
        Ok(Self {
            data_type: bytes[4],
            rank: bytes[5],
            interleave: bytes[6],
            swizzle: bytes[7],
            nan_fill: bytes[8] != 0,
            address: word(16, 8),
            dims: std::array::from_fn(|i| word(24 + 4 * i, 4) + 1),
            strides: std::array::from_fn(|i| word(64 + 8 * i, 8)),
            box_dims: std::array::from_fn(|i| word(48 + 2 * i, 2) as u32),
            element_strides: std::array::from_fn(|i| u32::from(bytes[58 + i])),
        })
    }

    /// Reads a map in the hardware's layout, which is not documented; programs whose compiler writes maps
    /// itself (the CUTLASS DSL) have it. Fields found by comparing such maps with what was asked for: tiled,
    /// without interleave.
    fn from_hardware(word: &impl Fn(usize, usize) -> u64) -> Result<Self, Fault> {
        let bits = |at: usize, from: u32, count: u32| word(at, 4) >> from & ((1 << count) - 1);
        let rank = bits(8, 4, 3) + 1;
        // `CUtensorMapDataType` of each code that was seen or lies between two that were.
        let data_type = [0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11].get(bits(8, 7, 4) as usize);
        let (Some(&data_type), true, 1..=5) = (data_type, bits(8, 0, 4) == 2 && bits(8, 11, 2) == 0, rank)
        else {
            return Err(refuse(format!(
                "the 128 bytes begin with {:#x}, {:#x}: no encoded map",
                word(0, 8),
                word(8, 8)
            )));
        };
        let map = Self {
            data_type,
            rank: rank as u8,
            interleave: 0,
            swizzle: bits(8, 13, 2) as u8,
            nan_fill: bits(8, 15, 1) != 0,
            address: word(0, 8),
            dims: std::array::from_fn(|i| word(32 + 4 * i, 4) + 1),
            // The upper four bits of each lie together behind the lower ones.
            strides: std::array::from_fn(|i| (word(12 + 4 * i, 4) | bits(28, 4 * i as u32, 4) << 32) << 4),
            box_dims: std::array::from_fn(|i| word(55 + i, 1) as u32 + 1),
            element_strides: std::array::from_fn(|i| bits(52, 3 * i as u32, 3) as u32 + 1),
        };
        map.validate()?;
        Ok(map)
    }

    /// Elements that a box holds along dimension `i`.
    pub(crate) fn box_elements(&self, i: usize) -> u32 {
        self.box_dims[i].div_ceil(self.element_strides[i])
    }

    /// Bytes of one tile in shared memory.
    pub(crate) fn box_bytes(&self) -> u32 {
        (0..usize::from(self.rank)).map(|i| self.box_elements(i)).product::<u32>() * self.element_bytes()
    }

    /// Sets one field, as `tensormap.replace` does; false when the field is unknown.
    pub(crate) fn replace(&mut self, field: u8, dim: u8, value: u64) -> bool {
        let dim = usize::from(dim);
        match field {
            0 => self.address = value,
            1 => self.rank = value as u8 + 1,
            2 if dim < 5 => self.box_dims[dim] = value as u32,
            3 if dim < 5 => self.dims[dim] = value & 0xffff_ffff,
            4 if dim < 4 => self.strides[dim] = value,
            5 if dim < 5 => self.element_strides[dim] = value as u32,
            6 => self.data_type = value as u8,
            8 => self.swizzle = value as u8,
            9 => self.nan_fill = value != 0,
            _ => return false,
        }
        true
    }
}
