//! Types of the elements in a call's memory.

use std::fmt;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use bytemuck::NoUninit;
use half::{bf16, f16};

use crate::block_scales::{E2m1Pair, E8m0};
use crate::dtype::DType;
use crate::fp8::{E4m3Fn, E4m3Fnuz, E5m2, E5m2Fnuz};

/// The type of the elements of a [`DevSlice`](crate::DevSlice).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElemType {
    /// Bytes without a known type, such as those of a buffer or a file. A call assumes the type that its problem has.
    Bytes,
    /// Numbers of a tensor's data type, or f32 numbers of an array.
    Number(DType),
    /// 32-bit integers: lengths, offsets and page numbers.
    I32,
    /// Unsigned 32-bit words: of a tree mask, and ends and flags of pieces of keys.
    U32,
    /// Pairs of E2M1 numbers, one byte each.
    E2m1Pair,
    /// Scales of blocks: powers of two in one byte each.
    E8m0,
    /// Scratch bytes of a workspace. They may hold anything, such as another process's data, so only a kernel that
    /// has written them reads them.
    Scratch,
}

impl ElemType {
    /// Whether memory of this type can be used where `wanted` is required.
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
            Self::Bytes | Self::Scratch | Self::E2m1Pair | Self::E8m0 => 1,
            Self::Number(dtype) => dtype.size_bytes(),
            Self::I32 | Self::U32 => 4,
        }
    }

    /// Type of memory after it is declared as `elem`. A known type stays, except that i32 and u32 replace each
    /// other.
    pub(crate) fn retyped(self, elem: Self) -> Self {
        match (self, elem) {
            (Self::Bytes, _) | (Self::I32 | Self::U32, Self::I32 | Self::U32) => elem,
            (known, _) => known,
        }
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
            Self::E2m1Pair => f.write_str("pairs of e2m1"),
            Self::E8m0 => f.write_str("e8m0"),
            Self::Scratch => f.write_str("a workspace"),
        }
    }
}

/// Type of a buffer's elements, and whether a call or the user set it. A call sets the type of its outputs, and a
/// later call may set another. Memory that was uploaded or allocated with a type can only be written as that type.
#[derive(Debug)]
pub(crate) struct Told(AtomicU8);

impl Told {
    /// Bit that is set if a call has set the type.
    const BY_A_CALL: u8 = 1 << 7;
    /// Element types that are not numbers; those of numbers follow.
    const OTHERS: [ElemType; 6] = [
        ElemType::Bytes,
        ElemType::I32,
        ElemType::U32,
        ElemType::Scratch,
        ElemType::E2m1Pair,
        ElemType::E8m0,
    ];

    pub(crate) fn new(elem: ElemType) -> Self {
        Self(AtomicU8::new(Self::code(elem)))
    }

    fn code(elem: ElemType) -> u8 {
        match elem {
            ElemType::Bytes => 0,
            ElemType::I32 => 1,
            ElemType::U32 => 2,
            ElemType::Scratch => 3,
            ElemType::E2m1Pair => 4,
            ElemType::E8m0 => 5,
            ElemType::Number(dtype) => Self::OTHERS.len() as u8 + dtype as u8,
        }
    }

    /// Element type of the memory, for a call that reads it.
    pub(crate) fn read(&self) -> ElemType {
        let code = usize::from(self.0.load(Relaxed) & !Self::BY_A_CALL);
        match code.checked_sub(Self::OTHERS.len()) {
            None => Self::OTHERS[code],
            Some(number) => ElemType::Number(DType::ALL[number]),
        }
    }

    /// Element type of the memory, for a call that writes it.
    pub(crate) fn written(&self) -> ElemType {
        if self.is_by_a_call() { ElemType::Bytes } else { self.read() }
    }

    pub(crate) fn is_by_a_call(&self) -> bool {
        self.0.load(Relaxed) & Self::BY_A_CALL != 0
    }

    /// Records that a call writes elements of this type.
    pub(crate) fn write(&self, elem: ElemType) {
        if self.written() == ElemType::Bytes {
            self.0.store(Self::code(elem) | Self::BY_A_CALL, Relaxed);
        }
    }
}

/// A Rust type that a slice's elements can have. `u8`, and `u64` for aligned bytes, are [`ElemType::Bytes`].
pub trait Elem: NoUninit + sealed::Sealed {
    /// Type of the element at run time.
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
    E2m1Pair = ElemType::E2m1Pair,
    E8m0 = ElemType::E8m0,
    i32 = ElemType::I32,
    u32 = ElemType::U32,
    u8 = ElemType::Bytes,
    u64 = ElemType::Bytes,
}
