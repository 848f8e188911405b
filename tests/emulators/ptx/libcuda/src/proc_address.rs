//! `cuGetProcAddress`: names to the functions of this library.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::error::{INVALID_VALUE, NOT_FOUND, Result, SUCCESS};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
}

const LAZY_NOLOAD: c_int = 1 | 4;

/// The newest suffix of a function that this library exports.
fn find(name: &str) -> *mut c_void {
    // SAFETY: the soname of this very library, which is loaded; nothing is opened again.
    let own = unsafe { dlopen(c"libcuda.so".as_ptr(), LAZY_NOLOAD) };
    for suffix in ["_v4", "_v3", "_v2", ""] {
        let full = format!("{name}{suffix}\0");
        // SAFETY: a zero-terminated name, looked up in a library that is loaded (or in the program when null).
        let at = unsafe { dlsym(own, full.as_ptr().cast()) };
        if !at.is_null() {
            return at;
        }
    }
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    status: *mut c_uint,
) -> Result {
    if name.is_null() || out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a zero-terminated name.
    let found = find(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
    // SAFETY: not null; output parameters of the driver API.
    unsafe {
        out.write(found);
        if !status.is_null() {
            status.write(c_uint::from(found.is_null()));
        }
    }
    if found.is_null() { NOT_FOUND } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuGetProcAddress_v2(name, out, version, flags, std::ptr::null_mut()) }
}
