//! Device and host memory, pools, copies and fills.

use std::ffi::{c_int, c_uchar, c_uint, c_ushort, c_void};

use crate::context::{context_of, current_device};
use crate::error::{INVALID_VALUE, Result, SUCCESS, put};
use crate::graph::{Node, submit};
use crate::state::{Handle, state};

/// The default pool's handle.
const DEFAULT_POOL: Handle = 0xb0;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, bytes: usize) -> Result {
    if bytes == 0 {
        return INVALID_VALUE;
    }
    let address = state().device.alloc(bytes as u64);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, address) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: u64) -> Result {
    let mut state = state();
    state.land_copies();
    if address == 0 || state.device.free(address) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocAsync(out: *mut u64, bytes: usize, _stream: Handle) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuMemAlloc_v2(out, bytes) }
}

/// While its stream is captured the memory stays: the graph will use it again.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeAsync(address: u64, stream: Handle) -> Result {
    if state().capturing(stream).is_some() {
        return SUCCESS;
    }
    cuMemFree_v2(address)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocFromPoolAsync(
    out: *mut u64,
    bytes: usize,
    _pool: Handle,
    _s: Handle,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuMemAlloc_v2(out, bytes) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolCreate(out: *mut Handle, _props: *const c_void) -> Result {
    let mut s = state();
    let handle = s.handle();
    s.pools.insert(handle, ());
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolDestroy(pool: Handle) -> Result {
    if state().pools.remove(&pool).is_some() { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolTrimTo(_pool: Handle, _bytes: usize) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolSetAttribute(
    _pool: Handle,
    _attribute: c_uint,
    _value: *const c_void,
) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolGetAttribute(
    _pool: Handle,
    attribute: c_uint,
    value: *mut c_void,
) -> Result {
    let live = state().device.live_bytes();
    match attribute {
        // The reuse switches are 32-bit, thresholds and sizes 64-bit.
        // SAFETY: an output parameter whose width the attribute fixes.
        1..=3 => unsafe { put(value.cast::<c_int>(), 1) },
        // SAFETY: an output parameter whose width the attribute fixes.
        4 => unsafe { put(value.cast::<u64>(), 0) },
        // SAFETY: an output parameter whose width the attribute fixes.
        5..=8 => unsafe { put(value.cast::<u64>(), live) },
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetDefaultMemPool(out: *mut Handle, _device: c_int) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, DEFAULT_POOL) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetMemPool(out: *mut Handle, _device: c_int) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, DEFAULT_POOL) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceSetMemPool(_device: c_int, _pool: Handle) -> Result {
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result {
    let all = 141usize << 30;
    let used = state().device.live_bytes() as usize;
    // SAFETY: output parameters of the driver API.
    unsafe { put(free, all.saturating_sub(used)).max(put(total, all)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    bytes: *mut usize,
    address: u64,
) -> Result {
    let Some((start, size)) = state().device.allocation(address) else { return INVALID_VALUE };
    // SAFETY: output parameters of the driver API; either may be null.
    unsafe {
        put(base, start);
        put(bytes, size as usize);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttribute(
    out: *mut c_void,
    attribute: c_uint,
    address: u64,
) -> Result {
    let Some((start, size)) = state().device.allocation(address) else { return INVALID_VALUE };
    match attribute {
        // SAFETY: an output parameter whose width the attribute fixes.
        1 => unsafe { put(out.cast::<usize>(), context_of(current_device())) },
        // SAFETY: an output parameter whose width the attribute fixes.
        2 => unsafe { put(out.cast::<c_uint>(), 2) },
        // SAFETY: an output parameter whose width the attribute fixes.
        3 => unsafe { put(out.cast::<u64>(), address) },
        // SAFETY: an output parameter whose width the attribute fixes.
        9 => unsafe { put(out.cast::<c_int>(), current_device() as c_int) },
        // SAFETY: an output parameter whose width the attribute fixes.
        11 => unsafe { put(out.cast::<u64>(), start) },
        // SAFETY: an output parameter whose width the attribute fixes.
        12 => unsafe { put(out.cast::<usize>(), size as usize) },
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostAlloc(
    out: *mut *mut c_void,
    bytes: usize,
    _flags: c_uint,
) -> Result {
    let mut block = vec![0u128; bytes.div_ceil(16).max(1)].into_boxed_slice();
    let address = block.as_mut_ptr();
    state().host.insert(address as usize, block);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, address.cast()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuMemHostAlloc(out, bytes, 0) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeHost(address: *mut c_void) -> Result {
    if state().host.remove(&(address as usize)).is_some() { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostGetFlags(out: *mut c_uint, _address: *mut c_void) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 0) }
}

/// Work that the default stream does while the caller waits.
fn run_at_once(node: &Node) -> Result {
    state().land_copies();
    node.run()
}

/// Copy from pageable memory: it returns when the bytes are staged, as the real driver may: they arrive
/// before the default stream's next work, and before a thread that waits for that stream goes on, but other
/// streams can be faster.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Result {
    {
        let mut state = state();
        let pinned = state.host.contains_key(&(from as usize));
        let room = state.device.allocation(to).map(|(start, size)| start + size - to);
        if !pinned && state.sticky.is_none() && room.is_some_and(|room| bytes as u64 <= room) {
            // SAFETY: the caller gave `bytes` readable bytes at `from`.
            let staged = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
            state.staged.push((to, staged));
            return SUCCESS;
        }
    }
    run_at_once(&Node::HostToDevice { to, from: from as usize, bytes })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Result {
    run_at_once(&Node::DeviceToHost { to: to as usize, from, bytes })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> Result {
    run_at_once(&Node::DeviceToDevice { to, from, bytes })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: Handle,
) -> Result {
    submit(stream, Node::HostToDevice { to, from: from as usize, bytes })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: Handle,
) -> Result {
    submit(stream, Node::DeviceToHost { to: to as usize, from, bytes })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> Result {
    submit(stream, Node::DeviceToDevice { to, from, bytes })
}

fn fill(to: u64, pattern: u32, width: usize, count: usize) -> Node {
    Node::Fill { to, pattern, width, count }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) -> Result {
    run_at_once(&fill(to, value.into(), 1, count))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) -> Result {
    run_at_once(&fill(to, value.into(), 2, count))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) -> Result {
    run_at_once(&fill(to, value, 4, count))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: Handle) -> Result {
    submit(stream, fill(to, value.into(), 1, count))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: Handle) -> Result {
    submit(stream, fill(to, value.into(), 2, count))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: Handle) -> Result {
    submit(stream, fill(to, value, 4, count))
}
