//! Result codes, by their names in `cuda.h`.

use std::ffi::{CStr, c_char};

pub(crate) type Result = u32;

pub(crate) const SUCCESS: Result = 0;
pub(crate) const INVALID_VALUE: Result = 1;
pub(crate) const NOT_INITIALIZED: Result = 3;
pub(crate) const INVALID_DEVICE: Result = 101;
pub(crate) const INVALID_CONTEXT: Result = 201;
pub(crate) const NO_BINARY_FOR_GPU: Result = 209;
pub(crate) const INVALID_PTX: Result = 218;
pub(crate) const FILE_NOT_FOUND: Result = 301;
pub(crate) const INVALID_HANDLE: Result = 400;
pub(crate) const NOT_FOUND: Result = 500;
pub(crate) const NOT_READY: Result = 600;
pub(crate) const LAUNCH_OUT_OF_RESOURCES: Result = 701;
pub(crate) const LAUNCH_FAILED: Result = 719;
pub(crate) const NOT_SUPPORTED: Result = 801;
pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Result = 900;

const NAMES: &[(Result, &CStr, &CStr)] = &[
    (SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (
        NO_BINARY_FOR_GPU,
        c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        c"no kernel image is available for execution on the device",
    ),
    (INVALID_PTX, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (FILE_NOT_FOUND, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found"),
    (INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (
        LAUNCH_OUT_OF_RESOURCES,
        c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        c"too many resources requested for launch",
    ),
    (
        LAUNCH_FAILED,
        c"CUDA_ERROR_LAUNCH_FAILED",
        c"unspecified launch failure (emulated: see the report on stderr)",
    ),
    (NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported (by the emulated driver)"),
    (
        STREAM_CAPTURE_UNSUPPORTED,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
];

fn find(code: Result) -> Option<&'static (Result, &'static CStr, &'static CStr)> {
    NAMES.iter().find(|(c, ..)| *c == code)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(code: Result, out: *mut *const c_char) -> Result {
    let name = find(code).map_or(c"CUDA_ERROR_UNKNOWN", |(_, n, _)| n);
    // SAFETY: the caller passes a place for one pointer, as the driver API demands.
    unsafe { put(out, name.as_ptr()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(code: Result, out: *mut *const c_char) -> Result {
    let text = find(code).map_or(c"unknown error", |(.., t)| t);
    // SAFETY: the caller passes a place for one pointer, as the driver API demands.
    unsafe { put(out, text.as_ptr()) }
}

/// Writes an output parameter; a null place is the caller's error.
///
/// # Safety
/// `out` is null or valid for a write of `T`.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised that it is valid for a write.
    unsafe { out.write(value) };
    SUCCESS
}
