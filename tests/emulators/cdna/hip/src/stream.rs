//! Streams and events. Work has run when the call that queued it returns, so there is never anything to wait for but
//! the report of a fault.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::LazyLock;
use std::time::Instant;

use crate::runtime::{Stream, current, put, state, wait};
use crate::status::{Call, Status, report};

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

unsafe fn create(stream: *mut usize) -> Call {
    current()?;
    let mut state = state();
    let handle = state.handle();
    state.streams.insert(handle, Stream::default());
    // SAFETY: the caller gives a place for the handle or null.
    unsafe { put(stream, handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreate(stream: *mut usize) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { create(stream) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithFlags(stream: *mut usize, _flags: c_uint) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { create(stream) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithPriority(
    stream: *mut usize,
    _flags: c_uint,
    _priority: c_int,
) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { create(stream) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamDestroy(stream: usize) -> Status {
    if stream <= 2 {
        return report(Err(Status::INVALID_HANDLE));
    }
    report(state().streams.remove(&stream).map(drop).ok_or(Status::INVALID_HANDLE))
}

fn synchronize(stream: usize) -> Call {
    if state().stream(stream)?.capture.is_some() {
        return Err(Status::CAPTURE_UNSUPPORTED);
    }
    wait()
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamSynchronize(stream: usize) -> Status {
    report(synchronize(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamQuery(stream: usize) -> Status {
    report(synchronize(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> Status {
    let mut state = state();
    let known = state.events.contains_key(&event);
    report(state.stream(stream).map(|_| ()).and(if known { Ok(()) } else { Err(Status::INVALID_HANDLE) }))
}

unsafe fn create_event(event: *mut usize) -> Call {
    current()?;
    let mut state = state();
    let handle = state.handle();
    state.events.insert(handle, None);
    // SAFETY: the caller gives a place for the handle or null.
    unsafe { put(event, handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreate(event: *mut usize) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { create_event(event) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreateWithFlags(event: *mut usize, _flags: c_uint) -> Status {
    // SAFETY: as HIP says.
    report(unsafe { create_event(event) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventRecord(event: usize, stream: usize) -> Status {
    let now = START.elapsed().as_secs_f64();
    let mut state = state();
    let capturing = match state.stream(stream) {
        Ok(stream) => stream.capture.is_some(),
        Err(status) => return report(Err(status)),
    };
    report(match state.events.get_mut(&event) {
        Some(time) => {
            // A captured record happens when the graph runs, and nothing here asks for its time.
            if !capturing {
                *time = Some(now);
            }
            Ok(())
        }
        None => Err(Status::INVALID_HANDLE),
    })
}

fn recorded(event: usize) -> Call {
    let known = state().events.contains_key(&event);
    if known { wait() } else { Err(Status::INVALID_HANDLE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventSynchronize(event: usize) -> Status {
    report(recorded(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventQuery(event: usize) -> Status {
    report(recorded(event))
}

/// Milliseconds of the host's clock: the emulator's speed, not a GPU's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventElapsedTime(milliseconds: *mut f32, start: usize, stop: usize) -> Status {
    let state = state();
    let time = |event: usize| {
        let time = *state.events.get(&event).ok_or(Status::INVALID_HANDLE)?;
        time.ok_or(Status::INVALID_HANDLE)
    };
    let elapsed = time(start).and_then(|from| Ok((time(stop)? - from) * 1e3));
    // SAFETY: the caller gives a place for the time or null.
    report(elapsed.and_then(|ms| unsafe { put(milliseconds, ms as f32) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventDestroy(event: usize) -> Status {
    report(state().events.remove(&event).map(drop).ok_or(Status::INVALID_HANDLE))
}

/// Calls back at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipLaunchHostFunc(
    stream: usize,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> Status {
    let known = state().stream(stream).map(|s| s.capture.is_some());
    match (known, function) {
        (Ok(false), Some(function)) => {
            // SAFETY: the caller gave a function and what it takes.
            unsafe { function(data) };
            Status::SUCCESS
        }
        (Ok(true), _) => report(Err(Status::NOT_SUPPORTED)),
        (Err(status), _) => report(Err(status)),
        (_, None) => report(Err(Status::INVALID_VALUE)),
    }
}
