//! Tensor of a caller as a binding describes it: address, type, sizes and strides. The memory is borrowed.

use std::ffi::c_void;

/// Most axes that a tensor of any operator has.
pub const MAX_DIMS: usize = 5;

/// Type of offsets and lengths. It and the following types are none of attention's operands.
pub const I32: i32 = 100;
/// Type of keep masks: bytes.
pub const U8: i32 = 101;
/// Type of a tree mask's words.
pub const U32: i32 = 102;
/// Type that NumPy gives an array without a named type. No operand has it; a refusal spells its name.
pub const F64: i32 = 103;
/// Type of tensors that functions capture: i64.
pub const I64: i32 = 104;
/// Type of tensors that functions capture: bytes, true iff not 0.
pub const BOOL: i32 = 105;
/// Any other type that no operand of attention has.
pub const OTHER: i32 = -1;

/// Device of a tensor's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Device {
    /// Kind of device: 0 host memory; 1 NVIDIA; 2 AMD; 3 torch's `meta` device, which has no memory, so that a call is
    /// checked and not run.
    pub kind: i32,
    /// Index of the device among those of its kind, from 0.
    pub index: i32,
}

impl Device {
    /// The name by which the library opens this device.
    #[must_use]
    pub fn name(self) -> String {
        match self.kind {
            0 => "cpu".to_owned(),
            1 => format!("cuda:{}", self.index),
            2 => format!("rocm:{}", self.index),
            3 => "meta".to_owned(),
            other => format!("device of kind {other}"),
        }
    }
}

/// A borrowed tensor. `ctypes` fills the same struct, field by field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Tensor {
    /// Address of the first element; null for an absent tensor or one without elements.
    pub data: *mut c_void,
    /// Sizes of the tensor's axes, outermost first. Only the first `num_dims` count.
    pub sizes: [i64; MAX_DIMS],
    /// Strides of the tensor's axes, in elements.
    pub strides: [i64; MAX_DIMS],
    /// Number of axes; -1 for an absent tensor.
    pub num_dims: i32,
    /// Code of the element type: `FMHA_F16` and its like, or [`I32`], [`U8`], [`U32`], [`I64`], [`BOOL`], [`OTHER`].
    pub dtype: i32,
    /// Device of the memory.
    pub device: Device,
}

impl Tensor {
    /// An absent tensor.
    pub const ABSENT: Self = Self {
        data: std::ptr::null_mut(),
        sizes: [0; MAX_DIMS],
        strides: [0; MAX_DIMS],
        num_dims: -1,
        dtype: OTHER,
        device: Device { kind: 0, index: 0 },
    };

    /// A contiguous tensor of the given shape whose memory is never read.
    #[must_use]
    pub fn described(sizes: &[i64], dtype: i32, device: Device) -> Self {
        let mut tensor = Self { num_dims: sizes.len() as i32, dtype, device, ..Self::ABSENT };
        if !sizes.contains(&0) {
            tensor.data = std::ptr::without_provenance_mut(256);
        }
        tensor.sizes[..sizes.len()].copy_from_slice(sizes);
        let mut stride = 1;
        for (to, &size) in tensor.strides[..sizes.len()].iter_mut().zip(sizes).rev() {
            *to = stride;
            stride = stride.saturating_mul(size.max(1));
        }
        tensor
    }

    /// Address of the tensor. A tensor without elements gets a non-null address too, since null means an absent tensor.
    #[must_use]
    pub fn address(&self) -> *mut c_void {
        match self.data.is_null() && self.shape().contains(&0) {
            true => std::ptr::without_provenance_mut(256),
            false => self.data,
        }
    }

    /// The tensor, or `None` where it is absent.
    #[must_use]
    pub fn given(&self) -> Option<&Self> {
        (self.num_dims >= 0).then_some(self)
    }

    /// Sizes of the tensor's axes, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.sizes[..usize::try_from(self.num_dims).unwrap_or(0).min(MAX_DIMS)]
    }

    /// Strides of the tensor's axes, in elements.
    #[must_use]
    pub fn steps(&self) -> &[i64] {
        &self.strides[..self.shape().len()]
    }

    /// Number of elements of memory from the tensor's first element to its last, both included.
    #[must_use]
    pub fn spanned_elems(&self) -> i64 {
        let steps = self.shape().iter().zip(self.steps());
        steps.fold(1, |sum: i64, (&size, &stride)| {
            sum.saturating_add(size.saturating_sub(1).max(0).saturating_mul(stride.max(0)))
        })
    }

    /// Whether its elements lie one after another in the order of their indices.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.shape().iter().zip(self.steps()).rev() {
            if size != 1 && stride != expected {
                return self.shape().contains(&0);
            }
            expected *= size;
        }
        true
    }
}

/// Whether a type has 8 bits.
#[must_use]
pub fn is_fp8(dtype: i32) -> bool {
    (fmha_c::FMHA_E4M3FN..=fmha_c::FMHA_E5M2FNUZ).contains(&dtype)
}

/// Bytes of an element; 0 for a type that no operand has, which errors then refuse by name.
#[must_use]
pub fn element_bytes(dtype: i32) -> i64 {
    match dtype {
        fmha_c::FMHA_F16 | fmha_c::FMHA_BF16 => 2,
        fmha_c::FMHA_F32 | I32 | U32 => 4,
        I64 => 8,
        U8 | BOOL => 1,
        dtype if is_fp8(dtype) => 1,
        _ => 0,
    }
}

/// The name of an element type, as errors state it.
#[must_use]
pub fn dtype_name(dtype: i32) -> &'static str {
    match dtype {
        fmha_c::FMHA_F16 => "float16",
        fmha_c::FMHA_BF16 => "bfloat16",
        fmha_c::FMHA_F32 => "float32",
        fmha_c::FMHA_E4M3FN => "float8_e4m3fn",
        fmha_c::FMHA_E5M2 => "float8_e5m2",
        fmha_c::FMHA_E4M3FNUZ => "float8_e4m3fnuz",
        fmha_c::FMHA_E5M2FNUZ => "float8_e5m2fnuz",
        I32 => "int32",
        U8 => "uint8",
        U32 => "uint32",
        F64 => "float64",
        I64 => "int64",
        BOOL => "bool",
        _ => "a type that no operand has",
    }
}
