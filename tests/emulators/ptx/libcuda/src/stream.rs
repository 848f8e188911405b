//! Streams, events and capture.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::time::Instant;

use crate::error::{
    INVALID_HANDLE, INVALID_VALUE, NOT_READY, Result, STREAM_CAPTURE_UNSUPPORTED, SUCCESS, put,
};
use crate::graph::{Node, submit};
use crate::state::{Handle, Stream, state};

/// Handles that name the default streams.
fn is_default(stream: Handle) -> bool {
    stream <= 2
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(out: *mut Handle, flags: c_uint) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuStreamCreateWithPriority(out, flags, 0) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreateWithPriority(
    out: *mut Handle,
    flags: c_uint,
    priority: c_int,
) -> Result {
    let mut s = state();
    let handle = s.handle();
    // CU_STREAM_NON_BLOCKING.
    let non_blocking = flags & 1 == 1;
    s.streams.insert(handle, Stream { capture: None, priority, non_blocking });
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Result {
    if state().streams.remove(&stream).is_some() { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(stream: Handle) -> Result {
    let mut s = state();
    if s.capturing(stream).is_some() {
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    if !is_default(stream) && !s.streams.contains_key(&stream) {
        return INVALID_HANDLE;
    }
    if s.follows_default(stream) {
        s.land_copies();
    }
    s.sticky.unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamQuery(stream: Handle) -> Result {
    cuStreamSynchronize(stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(stream: Handle, _event: Handle, _flags: c_uint) -> Result {
    if is_default(stream) || state().streams.contains_key(&stream) { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCtx(_stream: Handle, out: *mut Handle) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 0xc0) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetFlags(_stream: Handle, out: *mut c_uint) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, 1) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetPriority(stream: Handle, out: *mut c_int) -> Result {
    let priority = state().streams.get(&stream).map_or(0, |s| s.priority);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, priority) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamAttachMemAsync(
    _stream: Handle,
    _address: u64,
    _bytes: usize,
    _flags: c_uint,
) -> Result {
    SUCCESS
}

/// `CUstreamBatchMemOpParams`, of waits and writes.
#[repr(C)]
pub(crate) struct MemOp {
    operation: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    rest: [u64; 2],
}

/// Waits for equality and writes, of 32 bits.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamBatchMemOp_v2(
    stream: Handle,
    count: c_uint,
    ops: *const MemOp,
    _flags: c_uint,
) -> Result {
    // SAFETY: the caller gives so many steps.
    let ops = unsafe { std::slice::from_raw_parts(ops, count as usize) };
    for op in ops {
        let (at, value) = (op.address, op.value as u32);
        let node = match (op.operation, op.flags) {
            (1, 1) => Node::Await { at, value },
            (2, 0) => Node::Write { at, value },
            _ => return INVALID_VALUE,
        };
        match submit(stream, node) {
            SUCCESS => {}
            failed => return failed,
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamBeginCapture_v2(stream: Handle, _mode: c_uint) -> Result {
    let mut s = state();
    match s.streams.get_mut(&stream) {
        Some(found) if found.capture.is_none() => {
            found.capture = Some(Vec::new());
            SUCCESS
        }
        Some(_) => INVALID_VALUE,
        None => STREAM_CAPTURE_UNSUPPORTED,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamEndCapture(stream: Handle, out: *mut Handle) -> Result {
    let mut s = state();
    let Some(nodes) = s.streams.get_mut(&stream).and_then(|found| found.capture.take()) else {
        return INVALID_VALUE;
    };
    let handle = s.handle();
    s.graphs.insert(handle, nodes);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, out: *mut c_uint) -> Result {
    let capturing = state().capturing(stream).is_some();
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, c_uint::from(capturing)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: Handle,
    status: *mut c_uint,
    id: *mut c_ulonglong,
    graph: *mut Handle,
    dependencies: *mut *const Handle,
    count: *mut usize,
) -> Result {
    let capturing = state().capturing(stream).is_some();
    // SAFETY: output parameters of the driver API; all but the first may be null.
    unsafe {
        put(id, stream as c_ulonglong);
        put(graph, 0);
        put(dependencies, std::ptr::null());
        put(count, 0);
        put(status, c_uint::from(capturing))
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(out: *mut Handle, _flags: c_uint) -> Result {
    let mut s = state();
    let handle = s.handle();
    s.events.insert(handle, None);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(event: Handle) -> Result {
    if state().events.remove(&event).is_some() { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Result {
    let mut state = state();
    if state.follows_default(stream) {
        state.land_copies();
    }
    match state.events.get_mut(&event) {
        Some(at) => {
            *at = Some(Instant::now());
            SUCCESS
        }
        None => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) -> Result {
    cuEventRecord(event, stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(event: Handle) -> Result {
    if state().events.contains_key(&event) { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventSynchronize(event: Handle) -> Result {
    cuEventQuery(event)
}

/// Time of the host between the two records: the emulator's, never a device's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime_v2(out: *mut f32, start: Handle, end: Handle) -> Result {
    let s = state();
    let (Some(a), Some(b)) = (s.events.get(&start), s.events.get(&end)) else { return INVALID_HANDLE };
    let (Some(a), Some(b)) = (a, b) else { return NOT_READY };
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, b.saturating_duration_since(*a).as_secs_f32() * 1e3) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime(out: *mut f32, start: Handle, end: Handle) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuEventElapsedTime_v2(out, start, end) }
}
