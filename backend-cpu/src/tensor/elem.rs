//! Element types as Rust types, so that loops over elements are compiled for one type each.

use fmha_core::DType;
use fmha_core::fp8::{E4m3Fn, E4m3Fnuz, E5m2, E5m2Fnuz};
use half::{bf16, f16};
use once_cell::race::OnceBox;

use crate::simd::Simd;

/// The value of every FP8 byte.
pub(crate) fn fp8_table(dtype: DType) -> &'static [f32; 256] {
    /// A conversion table, created without a lock, since a fork at that moment would leave a lock held.
    type Table = OnceBox<[f32; 256]>;
    static TABLES: [Table; 4] = [const { OnceBox::new() }; 4];
    let of = |at: usize, value: fn(u8) -> f32| {
        TABLES[at].get_or_init(|| Box::new(std::array::from_fn(|b| value(b as u8))))
    };
    match dtype {
        DType::E5m2 => of(0, |bits| E5m2::from_bits(bits).to_f32()),
        DType::E4m3Fnuz => of(1, |bits| E4m3Fnuz::from_bits(bits).to_f32()),
        DType::E5m2Fnuz => of(2, |bits| E5m2Fnuz::from_bits(bits).to_f32()),
        _ => of(3, |bits| E4m3Fn::from_bits(bits).to_f32()),
    }
}

/// An element type as a Rust type, so that loops over elements are compiled for one type each.
pub(crate) trait Elem: Copy {
    const BYTES: usize;
    /// # Safety
    /// An element is readable there.
    unsafe fn one(self, at: *const u8) -> f32;
    /// # Safety
    /// A whole vector of elements is readable there.
    unsafe fn vector<S: Simd>(self, s: S, at: *const u8) -> S::V;

    /// Whether [`unit`](Self::unit) returns elements at even places first, and those at odd ones second.
    const EVEN_ODD: bool = false;
    /// Whether elements are bf16.
    const IS_BF16: bool = false;

    /// Two vectors of elements, in the order that is cheapest to convert.
    ///
    /// # Safety
    /// Two whole vectors of elements are readable there.
    #[inline(always)]
    unsafe fn unit<S: Simd>(self, s: S, at: *const u8) -> [S::V; 2] {
        // SAFETY: promised by the caller: two whole vectors of elements are readable there.
        unsafe { [self.vector(s, at), self.vector(s, at.add(S::LANES * Self::BYTES))] }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct OfF32;
#[derive(Clone, Copy)]
pub(crate) struct OfF16;
#[derive(Clone, Copy)]
pub(crate) struct OfBf16;
/// FP8 elements, with a table of the value of every byte.
#[derive(Clone, Copy)]
pub(crate) struct OfFp8(pub(crate) &'static [f32; 256]);

/// Implements an element type that vectors load by one instruction: its bits, and the conversion of one number and
/// of a vector.
macro_rules! vector_elem {
    ($name:ident, $bits:ty, $one:expr, $vector:ident) => {
        impl Elem for $name {
            const BYTES: usize = size_of::<$bits>();

            #[inline(always)]
            unsafe fn one(self, at: *const u8) -> f32 {
                // SAFETY: the caller keeps the contract of `one`.
                $one(unsafe { at.cast::<$bits>().read_unaligned() })
            }

            #[inline(always)]
            unsafe fn vector<S: Simd>(self, s: S, at: *const u8) -> S::V {
                // SAFETY: the caller keeps the contract of `vector`.
                unsafe { s.$vector(at.cast()) }
            }
        }
    };
}

vector_elem!(OfF32, f32, std::convert::identity, load);
vector_elem!(OfF16, u16, |bits| f16::from_bits(bits).to_f32(), load_f16);

impl Elem for OfBf16 {
    const BYTES: usize = 2;
    const EVEN_ODD: bool = true;
    const IS_BF16: bool = true;

    #[inline(always)]
    unsafe fn one(self, at: *const u8) -> f32 {
        // SAFETY: the caller keeps the contract of `one`; so for the two below.
        bf16::from_bits(unsafe { at.cast::<u16>().read_unaligned() }).to_f32()
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, s: S, at: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of `vector`.
        unsafe { s.load_bf16(at.cast()) }
    }

    #[inline(always)]
    unsafe fn unit<S: Simd>(self, s: S, at: *const u8) -> [S::V; 2] {
        // SAFETY: the caller keeps the contract of `unit`.
        unsafe { s.load_bf16_even_odd(at.cast()) }
    }
}

impl Elem for OfFp8 {
    const BYTES: usize = 1;

    #[inline(always)]
    unsafe fn one(self, at: *const u8) -> f32 {
        // SAFETY: the caller keeps the contract of `one`.
        self.0[usize::from(unsafe { at.read() })]
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, s: S, at: *const u8) -> S::V {
        let mut lanes = [0.0; 16];
        // SAFETY: the caller keeps the contract of `vector`; no vector has more than sixteen lanes.
        unsafe {
            for (i, lane) in lanes[..S::LANES].iter_mut().enumerate() {
                *lane = self.one(at.add(i));
            }
            s.load(lanes.as_ptr())
        }
    }
}

/// Expands `$body` once for each element type; the type is chosen at run time.
macro_rules! of_type {
    ($dtype:expr, $elem:ident => $body:expr) => {
        match $dtype {
            fmha_core::DType::F32 => {
                let $elem = $crate::tensor::elem::OfF32;
                $body
            }
            fmha_core::DType::F16 => {
                let $elem = $crate::tensor::elem::OfF16;
                $body
            }
            fmha_core::DType::Bf16 => {
                let $elem = $crate::tensor::elem::OfBf16;
                $body
            }
            fp8 => {
                let $elem = $crate::tensor::elem::OfFp8($crate::tensor::fp8_table(fp8));
                $body
            }
        }
    };
}

pub(crate) use of_type;
