//! State of the calling thread after a call of the backend, and whether work is done when calls return, on the test
//! double of the driver. No compiler is needed.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::{c_int, c_void};

use fmha_core::{DType, DevBuffer, Device, MemorySpace, Stream, Workspace};
use libloading::os::unix::{Library, Symbol};

type Status = c_int;
type Handle = usize;

fn device() -> Device {
    fmha_cuda::open(0, Some("sm_90a")).unwrap()
}

/// Looks up a function of the driver that the backend has opened.
///
/// # Safety
/// `T` is the function's type in cuda.h.
unsafe fn driver<T>(name: &str) -> Symbol<T> {
    // SAFETY: the caller promises that `T` is its type in cuda.h.
    unsafe { Library::this().get(name.as_bytes()) }.unwrap()
}

fn current() -> Handle {
    let mut context = 0;
    // SAFETY: the type is cuda.h's; a place for a handle.
    let status =
        unsafe { driver::<unsafe extern "C" fn(*mut Handle) -> Status>("cuCtxGetCurrent")(&raw mut context) };
    assert_eq!(status, 0);
    context
}

fn set_current(context: Handle) {
    // SAFETY: the type is cuda.h's; the double takes any handle.
    assert_eq!(unsafe { driver::<unsafe extern "C" fn(Handle) -> Status>("cuCtxSetCurrent")(context) }, 0);
}

#[test]
fn the_threads_context_is_the_callers_again_after_each_call() {
    let backend = device();
    let memory = backend.memory();
    // The caller's current context: none, or another device's.
    for callers in [0, 0xabc0] {
        set_current(callers);
        let still = |what: &str| assert_eq!(current(), callers, "after {what}");
        let mut buffer = memory.alloc(64).unwrap();
        still("alloc");
        memory.upload(&[1u8; 64], &mut buffer).unwrap();
        still("upload");
        memory.download(&buffer, &mut [0u8; 64]).unwrap();
        still("download");
        drop(memory.workspace(Workspace::zeroed(64)).unwrap());
        still("workspace");
        let stream = backend.stream().unwrap();
        still("stream");
        stream.synchronize().unwrap();
        still("synchronize");
        let mut inside = usize::MAX;
        let queue = || {
            inside = current();
            Ok(())
        };
        stream.seconds(queue).unwrap();
        still("seconds");
        assert_eq!(inside, callers, "while the caller's own work is queued");
        let recording = stream.capture(|| Ok(())).unwrap();
        still("capture");
        let event = backend.event().unwrap();
        event.record(&stream).unwrap();
        stream.wait(&event).unwrap();
        event.synchronize().unwrap();
        drop(event);
        still("an event");
        // SAFETY: it names no memory.
        unsafe { recording.replay(&stream).unwrap() };
        still("replay");
        drop(recording);
        still("a dropped recording");
        drop(stream);
        still("a dropped stream");
        drop(buffer);
        still("a dropped buffer");
    }
}

#[test]
fn a_buffer_is_made_zeros_to_its_last_byte() {
    let backend = device();
    let memory = backend.memory();
    for bytes in [0, 1, 4099] {
        let mut buffer = memory.alloc(bytes).unwrap();
        memory.upload(&vec![7u8; bytes as usize], &mut buffer).unwrap();
        memory.zero(&mut buffer).unwrap();
        let mut seen = vec![9u8; bytes as usize];
        memory.download(&buffer, &mut seen).unwrap();
        assert_eq!(seen, vec![0; bytes as usize]);
    }
    let nothing = std::ptr::NonNull::dangling().as_ptr();
    // SAFETY: 0 bytes, which are never freed.
    let mut of_the_host = unsafe { DevBuffer::from_raw(MemorySpace::Host, nothing, 0, Box::new(|_| ())) };
    let refused = memory.zero(&mut of_the_host).unwrap_err().to_string();
    assert!(refused.contains("host memory"), "{refused}");
}

/// New device memory is zeroed, so it does not show data of other processes, and scratch is not read.
#[test]
fn new_memory_is_zeros_and_scratch_is_not_read() {
    let backend = device();
    let memory = backend.memory();
    for bytes in [1usize, 64, 4099] {
        let mut seen = vec![9u8; bytes];
        memory.download(&memory.alloc(bytes as u64).unwrap(), &mut seen).unwrap();
        assert_eq!(seen, vec![0; bytes]);
        // SAFETY: the double's own poison.
        let uncleared = unsafe { memory.alloc_uncleared(bytes as u64) }.unwrap();
        memory.download(&uncleared, &mut seen).unwrap();
        assert_eq!(seen, vec![0xff; bytes], "the double has poison where nobody has written");
    }
    let scratch = memory.workspace(Workspace { bytes: 64, zeroed_bytes: 0 }).unwrap().unwrap();
    let refused = memory.download(&scratch, &mut [0u8; 64]).unwrap_err().to_string();
    assert!(refused.contains("from has elements of a workspace"), "{refused}");
}

#[test]
fn what_is_uploaded_is_there_for_every_stream_when_the_call_returns() {
    let backend = device();
    let memory = backend.memory();
    let stream = backend.stream().unwrap();
    let (mut buffer, mut seen) = (memory.alloc(64).unwrap(), [0u8; 64]);
    memory.upload(&[0u8; 64], &mut buffer).unwrap();
    backend.synchronize().unwrap();
    memory.upload(&[7u8; 64], &mut buffer).unwrap();
    type Copy = unsafe extern "C" fn(*mut c_void, u64, usize, Handle) -> Status;
    // SAFETY: the type is cuda.h's; both sides have 64 bytes.
    let status = unsafe {
        driver::<Copy>("cuMemcpyDtoHAsync_v2")(
            seen.as_mut_ptr().cast(),
            buffer.as_ptr() as u64,
            seen.len(),
            stream.as_raw() as Handle,
        )
    };
    assert_eq!(status, 0);
    stream.synchronize().unwrap();
    assert_eq!(seen, [7; 64]);
}

#[test]
fn the_double_says_that_it_is_one_and_gives_back_what_was_made_on_it() {
    let backend = device();
    assert!(backend.name().ends_with("sm_90a, emulated)"), "{}", backend.name());
    assert_eq!(backend.roofline(DType::Bf16).source, "emulated: it has no speed");
    let real = fmha_cuda::open(0, None).unwrap_err().to_string();
    assert!(real.contains("this process runs on an emulated CUDA device"), "{real}");
    let memory = backend.memory();
    assert!(!backend.has_clock() && memory.checks_bounds() && backend.tuner().is_some());
    assert!(memory.alloc_at_edge(64, true).unwrap().is_none());

    let stream = backend.stream().unwrap();
    let handle = stream.as_raw();
    // SAFETY: live as long as `stream` is; then the double knows it no more.
    let again = unsafe { Stream::from_raw(&backend, handle) };
    again.synchronize().unwrap();
    drop(stream);
    assert!(again.synchronize().is_err());

    let mut buffer = memory.alloc(64).unwrap();
    let texts = [
        memory.upload(&[0u8; 65], &mut buffer).unwrap_err().to_string(),
        memory.download(&buffer, &mut [0u8; 65]).unwrap_err().to_string(),
    ];
    for (text, name) in texts.iter().zip(["to", "from"]) {
        assert!(text.contains(&format!("{name} has 64 bytes, but 65 are to be copied")), "{text}");
    }
}
