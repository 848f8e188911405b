//! What the elements of a call's memory are.

use std::fmt;

use bytemuck::NoUninit;
use half::{bf16, f16};

use crate::dtype::DType;
use crate::fp8::{E4m3Fn, E4m3Fnuz, E5m2, E5m2Fnuz};

/// The type of the elements of a [`DevSlice`](crate::DevSlice).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElemType {
    /// Bytes whose type was not told: a buffer's, a file's, a raw pointer's. A call reads them as what its problem says.
    Bytes,
    /// Numbers of a tensor, or of an f32 array.
    Number(DType),
    /// Lengths, offsets and pages.
    I32,
    /// Words of a tree mask; ends and flags of pieces of keys.
    U32,
    /// A workspace's bytes: they hold anything, another process's numbers among it, so nothing but a kernel that has
    /// written them reads them.
    Scratch,
}

impl ElemType {
    /// Whether memory of this type serves where `wanted` is.
    #[must_use]
    #[inline]
    pub fn serves(self, wanted: Self) -> bool {
        self == wanted
            || self == Self::Bytes
            || wanted == Self::Scratch
            || wanted == Self::Bytes && self != Self::Scratch
    }

    /// Bytes of an element.
    #[must_use]
    pub fn size_bytes(self) -> u64 {
        match self {
            Self::Bytes | Self::Scratch => 1,
            Self::Number(dtype) => dtype.size_bytes(),
            Self::I32 | Self::U32 => 4,
        }
    }

    /// The type of memory that is to be read as `elem`: a workspace stays one.
    pub(crate) fn retyped(self, elem: Self) -> Self {
        if self == Self::Scratch { self } else { elem }
    }
}

impl From<DType> for ElemType {
    fn from(dtype: DType) -> Self {
        Self::Number(dtype)
    }
}

impl fmt::Display for ElemType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("bytes"),
            Self::Number(dtype) => dtype.fmt(f),
            Self::I32 => f.write_str("i32"),
            Self::U32 => f.write_str("u32"),
            Self::Scratch => f.write_str("a workspace"),
        }
    }
}

/// A Rust type that a slice's elements can have. `u8`, and `u64` where bytes are to be aligned, are [`ElemType::Bytes`].
pub trait Elem: NoUninit + sealed::Sealed {
    /// Its type at run time.
    const TYPE: ElemType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elems {
    ($($elem:ty = $value:expr),* $(,)?) => {$(
        impl sealed::Sealed for $elem {}
        impl Elem for $elem {
            const TYPE: ElemType = $value;
        }
    )*};
}
elems! {
    f32 = ElemType::Number(DType::F32),
    f16 = ElemType::Number(DType::F16),
    bf16 = ElemType::Number(DType::Bf16),
    E4m3Fn = ElemType::Number(DType::E4m3Fn),
    E5m2 = ElemType::Number(DType::E5m2),
    E4m3Fnuz = ElemType::Number(DType::E4m3Fnuz),
    E5m2Fnuz = ElemType::Number(DType::E5m2Fnuz),
    i32 = ElemType::I32,
    u32 = ElemType::U32,
    u8 = ElemType::Bytes,
    u64 = ElemType::Bytes,
}
