//! Device and host memory.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_uint, c_void};

use crate::graph::Node;
use crate::runtime::{current, devices, owner, put, state, submit, wait};
use crate::status::{Call, Status, report};

/// Device addresses have this bit; no host pointer in user space does.
fn is_device(address: usize) -> bool {
    address as u64 >> 47 & 1 == 1
}

/// Copies bytes between device and host, in any direction.
///
/// # Safety
/// A side that is no device address is host memory, valid for `bytes`.
pub(crate) unsafe fn copy(to: usize, from: usize, bytes: usize) -> Call {
    if bytes == 0 {
        return Ok(());
    }
    let device = |address: usize| owner(address as u64).ok_or(Status::INVALID_VALUE);
    let read = |to: &mut [u8]| device(from)?.memory.read(from as u64, to).map_err(|_| Status::INVALID_VALUE);
    match (is_device(to), is_device(from)) {
        (false, false) => {
            // SAFETY: both sides are host memory, as the caller promised.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        }
        (true, false) => {
            // SAFETY: the caller promised `bytes` readable bytes.
            let from = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
            device(to)?.memory.write(to as u64, from).map_err(|_| Status::INVALID_VALUE)?;
        }
        (false, true) => {
            // SAFETY: the caller promised `bytes` writable bytes; u8 has no invalid values.
            read(unsafe { std::slice::from_raw_parts_mut(to as *mut u8, bytes) })?;
        }
        (true, true) => {
            let source = device(from)?;
            device(to)?
                .memory
                .copy_from(to as u64, &source.memory, from as u64, bytes)
                .map_err(|_| Status::INVALID_VALUE)?;
        }
    }
    Ok(())
}

pub(crate) fn fill(to: u64, value: u32, width: usize, count: usize) -> Call {
    let device = owner(to).ok_or(Status::INVALID_VALUE)?;
    let bytes: Vec<u8> = value.to_le_bytes()[..width].repeat(count);
    device.memory.write(to, &bytes).map_err(|_| Status::INVALID_VALUE)
}

/// A kind that contradicts what the addresses are; 4 lets the addresses decide.
fn check_direction(to: usize, from: usize, kind: c_int) -> Call {
    let fits = match kind {
        0 => !is_device(to) && !is_device(from),
        1 => is_device(to) && !is_device(from),
        2 => !is_device(to) && is_device(from),
        3 => is_device(to) && is_device(from),
        4 => true,
        _ => false,
    };
    if fits { Ok(()) } else { Err(Status::INVALID_MEMCPY_DIRECTION) }
}

fn copy_async(to: usize, from: usize, bytes: usize, stream: usize) -> Call {
    if to == 0 || from == 0 {
        return if bytes == 0 { Ok(()) } else { Err(Status::INVALID_VALUE) };
    }
    submit(stream, Node::Copy { to, from, bytes })
}

unsafe fn allocate(address: *mut usize, bytes: usize) -> Call {
    let device = current()?;
    let at = if bytes == 0 { 0 } else { device.memory.alloc(bytes) as usize };
    // SAFETY: the caller gives a place for the address or null.
    unsafe { put(address, at) }
}

fn release(address: usize) -> Call {
    if address == 0 {
        return Ok(());
    }
    let device = owner(address as u64).ok_or(Status::INVALID_VALUE)?;
    device.memory.free(address as u64).map_err(|_| Status::INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMalloc(address: *mut usize, bytes: usize) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { allocate(address, bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMallocAsync(address: *mut usize, bytes: usize, _stream: usize) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { allocate(address, bytes) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipFree(address: usize) -> Status {
    // hipFree waits for the device.
    report(release(address).and_then(|()| wait()))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipFreeAsync(address: usize, _stream: usize) -> Status {
    report(release(address))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpy(to: usize, from: usize, bytes: usize, kind: c_int) -> Status {
    report(
        check_direction(to, from, kind).and_then(|()| copy_async(to, from, bytes, 0)).and_then(|()| wait()),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyAsync(to: usize, from: usize, bytes: usize, kind: c_int, stream: usize) -> Status {
    report(check_direction(to, from, kind).and_then(|()| copy_async(to, from, bytes, stream)))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyWithStream(
    to: usize,
    from: usize,
    bytes: usize,
    kind: c_int,
    stream: usize,
) -> Status {
    let copied = check_direction(to, from, kind).and_then(|()| copy_async(to, from, bytes, stream));
    report(copied.and_then(|()| wait()))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyHtoD(to: usize, from: usize, bytes: usize) -> Status {
    hipMemcpy(to, from, bytes, 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyDtoH(to: usize, from: usize, bytes: usize) -> Status {
    hipMemcpy(to, from, bytes, 2)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyDtoD(to: usize, from: usize, bytes: usize) -> Status {
    hipMemcpy(to, from, bytes, 3)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyHtoDAsync(to: usize, from: usize, bytes: usize, stream: usize) -> Status {
    hipMemcpyAsync(to, from, bytes, 1, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyDtoHAsync(to: usize, from: usize, bytes: usize, stream: usize) -> Status {
    hipMemcpyAsync(to, from, bytes, 2, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemcpyDtoDAsync(to: usize, from: usize, bytes: usize, stream: usize) -> Status {
    hipMemcpyAsync(to, from, bytes, 3, stream)
}

fn set(to: usize, value: c_int, width: usize, count: usize, stream: usize) -> Call {
    if count == 0 {
        return Ok(());
    }
    submit(stream, Node::Fill { to: to as u64, value: value as u32, width, count })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemset(to: usize, value: c_int, bytes: usize) -> Status {
    report(set(to, value, 1, bytes, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetAsync(to: usize, value: c_int, bytes: usize, stream: usize) -> Status {
    report(set(to, value, 1, bytes, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD8(to: usize, value: u8, count: usize) -> Status {
    report(set(to, c_int::from(value), 1, count, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD16(to: usize, value: u16, count: usize) -> Status {
    report(set(to, c_int::from(value), 2, count, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD32(to: usize, value: c_int, count: usize) -> Status {
    report(set(to, value, 4, count, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD32Async(to: usize, value: c_int, count: usize, stream: usize) -> Status {
    report(set(to, value, 4, count, stream))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostMalloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Status {
    let Ok(layout) = Layout::from_size_align(bytes.max(1), 4096) else { return Status::INVALID_VALUE };
    // SAFETY: the size is not zero.
    let pointer = unsafe { alloc(layout) };
    if pointer.is_null() {
        return report(Err(Status(2)));
    }
    state().host.insert(pointer as usize, layout);
    // SAFETY: the caller gives a place for the pointer or null.
    report(unsafe { put(address, pointer.cast()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostFree(address: *mut c_void) -> Status {
    if address.is_null() {
        return Status::SUCCESS;
    }
    match state().host.remove(&(address as usize)) {
        Some(layout) => {
            // SAFETY: `hipHostMalloc` allocated it with that layout, and it is freed once: it has left the table.
            unsafe { dealloc(address.cast(), layout) };
            Status::SUCCESS
        }
        None => report(Err(Status::INVALID_VALUE)),
    }
}

/// Free and total memory in bytes: what is allocated of 192 GiB, whatever the host has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
    let used: usize = devices().iter().map(|d| d.memory.allocated_bytes()).sum();
    let all = crate::device::TOTAL_MEMORY;
    // SAFETY: the caller gives places for both or null.
    report(unsafe { put(free, all.saturating_sub(used)).and_then(|()| put(total, all)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetAddressRange(
    base: *mut usize,
    bytes: *mut usize,
    address: usize,
) -> Status {
    let found = owner(address as u64).and_then(|d| d.memory.allocation_of(address as u64));
    report(found.ok_or(Status::INVALID_DEVICE_POINTER).and_then(|(start, size)| {
        // SAFETY: the caller gives places for both or null.
        unsafe { put(base, start as usize).and_then(|()| put(bytes, size)) }
    }))
}
