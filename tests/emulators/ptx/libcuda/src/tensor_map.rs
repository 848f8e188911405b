//! `cuTensorMapEncodeTiled`.

use std::ffi::{c_uint, c_void};

use fmha_emu_ptx::TensorMap;

use crate::context::has_current;
use crate::error::{INVALID_CONTEXT, INVALID_VALUE, Result, SUCCESS};
use crate::state::state;

/// Reads `n` values, 1 beyond them.
unsafe fn list<T: Copy, U: From<T> + Copy, const N: usize>(from: *const T, n: usize, rest: U) -> [U; N] {
    std::array::from_fn(|i| {
        // SAFETY: the caller says that `n` values lie at `from`.
        if i < n && !from.is_null() { unsafe { from.add(i).read() }.into() } else { rest }
    })
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut [u8; 128],
    data_type: c_uint,
    rank: c_uint,
    address: *const c_void,
    dims: *const u64,
    strides: *const u64,
    box_dims: *const u32,
    element_strides: *const u32,
    interleave: c_uint,
    swizzle: c_uint,
    _promotion: c_uint,
    fill: c_uint,
) -> Result {
    // Behaviour of the driver 580 of an H200.
    if !has_current() {
        return INVALID_CONTEXT;
    }
    if map.is_null() || dims.is_null() || box_dims.is_null() || element_strides.is_null() {
        return INVALID_VALUE;
    }
    if !(map as usize).is_multiple_of(64) {
        eprintln!("emulated driver: tensor map at {map:?} is not aligned to 64 bytes");
        return INVALID_VALUE;
    }
    let n = rank.min(5) as usize;
    // SAFETY: the caller gives `rank` sizes, boxes and element strides, and one stride fewer.
    let encoded = unsafe {
        TensorMap {
            data_type: data_type.min(255) as u8,
            rank: rank.min(255) as u8,
            address: address as u64,
            dims: list(dims, n, 1),
            strides: list(strides, n.saturating_sub(1), 0),
            box_dims: list(box_dims, n, 1),
            element_strides: list(element_strides, n, 1),
            interleave: interleave.min(255) as u8,
            swizzle: swizzle.min(255) as u8,
            nan_fill: fill != 0,
        }
    };
    if let Err(fault) = encoded.validate() {
        state().report("cuTensorMapEncodeTiled", &fault);
        return INVALID_VALUE;
    }
    // SAFETY: not null and aligned; the caller gives room for a CUtensorMap of 128 bytes.
    unsafe { map.write(encoded.encode()) };
    SUCCESS
}
