//! Initialisation, devices and contexts.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::error::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Result, SUCCESS, put};
use crate::state::{Handle, device_count, state, state_of};

/// The handle of the first device's context; the others' follow.
const FIRST_CONTEXT: Handle = 0xc0;

/// A device by the number that a caller gave, if there is one.
fn device(number: c_int) -> Option<usize> {
    usize::try_from(number).ok().filter(|&number| number < device_count())
}

pub(crate) fn context_of(device: usize) -> Handle {
    FIRST_CONTEXT + device
}

/// The device whose context the calling thread has; the first where it has none, or an invalid one.
pub(crate) fn current_device() -> usize {
    let current = STACK.with_borrow(|s| s.last().copied().unwrap_or(0));
    current.checked_sub(FIRST_CONTEXT).filter(|&device| device < device_count()).unwrap_or(0)
}

thread_local! {
    static STACK: std::cell::RefCell<Vec<Handle>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(_flags: c_uint) -> Result {
    drop(state());
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(out: *mut c_int) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 13_000) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(out: *mut c_int) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, device_count() as c_int) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(out: *mut c_int, ordinal: c_int) -> Result {
    if device(ordinal).is_none() {
        return INVALID_DEVICE;
    }
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, ordinal) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(out: *mut c_char, len: c_int, number: c_int) -> Result {
    let Some(device) = device(number).filter(|_| !out.is_null() && len > 0) else { return INVALID_VALUE };
    let name = format!("emulated {}", state_of(device).arch.name);
    let n = name.len().min(len as usize - 1);
    // SAFETY: the caller gives `len` bytes, of which at most `len` are written.
    unsafe {
        std::ptr::copy_nonoverlapping(name.as_ptr().cast(), out, n);
        out.add(n).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem_v2(out: *mut usize, _device: c_int) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 141 << 30) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid(out: *mut [u8; 16], number: c_int) -> Result {
    let Some(device) = device(number) else { return INVALID_DEVICE };
    let mut uuid = *b"emulated-by-fmh0";
    uuid[15] += device as u8;
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, uuid) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid_v2(out: *mut [u8; 16], device: c_int) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuDeviceGetUuid(out, device) }
}

#[allow(clippy::match_same_arms, reason = "one line an attribute, in the order of cuda.h")]
/// Value of a `CUdevice_attribute`, by number; 0 for one that is not listed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(
    out: *mut c_int,
    attribute: c_uint,
    number: c_int,
) -> Result {
    let Some(device) = device(number) else { return INVALID_DEVICE };
    let arch = state_of(device).arch;
    let hopper = c_int::from(arch.major >= 9);
    let value = match attribute {
        1..=3 => 1024,          // threads per block, block x, block y
        4 => 64,                // block z
        5 => i32::MAX,          // grid x
        6 | 7 => 65535,         // grid y, z
        8 => 49152,             // shared memory per block without opting in
        9 => 65536,             // constant memory
        10 => 32,               // warp
        12 | 82 => 65536,       // registers per block, per multiprocessor
        13 => 1_830_000,        // clock, kHz
        14 => 512,              // texture alignment
        16 => arch.num_sms,     // multiprocessors
        19 | 31 | 41 | 78 => 1, // host memory, concurrent kernels, unified addresses, priorities
        36 => 3_201_000,        // memory clock, kHz
        37 => 6144,             // memory bus, bits
        38 => arch.l2_bytes,
        39 => {
            if arch.major == 12 {
                1536
            } else {
                2048
            }
        } // threads per multiprocessor
        75 => arch.major,
        76 => arch.minor,
        81 => arch.shared_optin + 1024, // shared memory per multiprocessor
        95 | 115 => 1,                  // cooperative launch, memory pools
        97 => arch.shared_optin,
        106 => {
            if arch.major == 12 {
                24
            } else {
                32
            }
        } // blocks per multiprocessor
        111 => 1024,         // reserved shared memory
        120 | 127 => hopper, // cluster launch, tensor maps
        _ => 0,
    };
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, value) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut Handle, number: c_int) -> Result {
    let Some(device) = device(number) else { return INVALID_DEVICE };
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, context_of(device)) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxSetFlags_v2(_device: c_int, _flags: c_uint) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxReset_v2(number: c_int) -> Result {
    let Some(device) = device(number) else { return INVALID_DEVICE };
    state_of(device).sticky = None;
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    _device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> Result {
    // SAFETY: output parameters of the driver API.
    unsafe { put(flags, 0).max(put(active, 1)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxCreate_v2(out: *mut Handle, _flags: c_uint, number: c_int) -> Result {
    let Some(device) = device(number) else { return INVALID_DEVICE };
    let context = context_of(device);
    STACK.with_borrow_mut(|s| s.push(context));
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, context) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxCreate_v4(
    out: *mut Handle,
    _params: *mut c_void,
    flags: c_uint,
    device: c_int,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuCtxCreate_v2(out, flags, device) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxDestroy_v2(_context: Handle) -> Result {
    STACK.with_borrow_mut(Vec::pop);
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetCurrent(context: Handle) -> Result {
    STACK.with_borrow_mut(|s| {
        s.pop();
        s.push(context);
    });
    SUCCESS
}

/// Whether the calling thread has a context.
pub(crate) fn has_current() -> bool {
    STACK.with_borrow(|s| s.last().is_some_and(|&context| context != 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCurrent(out: *mut Handle) -> Result {
    let current = STACK.with_borrow(|s| s.last().copied().unwrap_or(0));
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, current) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> Result {
    STACK.with_borrow_mut(|s| s.push(context));
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut Handle) -> Result {
    let popped = STACK.with_borrow_mut(Vec::pop).unwrap_or(0);
    if out.is_null() {
        return SUCCESS;
    }
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, popped) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetDevice(out: *mut c_int) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, current_device() as c_int) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSynchronize() -> Result {
    let mut state = state();
    state.land_copies();
    state.sticky.unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetFlags(_flags: c_uint) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetFlags(out: *mut c_uint) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 0) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetApiVersion(_context: Handle, out: *mut c_uint) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 13_000) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetLimit(limit: c_uint, value: usize) -> Result {
    state().limits.insert(limit, value);
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetLimit(out: *mut usize, limit: c_uint) -> Result {
    let value = state().limits.get(&limit).copied().unwrap_or(1024);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, value) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetCacheConfig(_config: c_uint) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCacheConfig(out: *mut c_uint) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 0) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> Result {
    // SAFETY: output parameters of the driver API; either may be null.
    unsafe {
        put(least, 0);
        put(greatest, -5);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxEnablePeerAccess(_context: Handle, _flags: c_uint) -> Result {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceCanAccessPeer(
    out: *mut c_int,
    _device: c_int,
    _peer: c_int,
) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 0) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetPCIBusId(out: *mut c_char, len: c_int, _device: c_int) -> Result {
    let id = b"0000:00:00.0\0";
    if out.is_null() || (len as usize) < id.len() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller gives `len` bytes, and `id` is not longer.
    unsafe { std::ptr::copy_nonoverlapping(id.as_ptr().cast(), out, id.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuProfilerStart() -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuProfilerStop() -> Result {
    SUCCESS
}
