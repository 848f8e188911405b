//! Two emulated devices in one process, and what the backend leaves of the calling thread's state. No
//! compiler is needed. Emulated, never run on hardware.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::c_int;

use fmha_core::{DevBuffer, FmhaBackend as _, Stream, Workspace};
use fmha_rocm::RocmBackend;
use libloading::{Library, Symbol};

/// An emulated device, or a word that it is absent.
fn device(arch: &str) -> Option<RocmBackend> {
    RocmBackend::open(0, Some(arch)).map_err(|error| println!("absent: no emulated {arch}: {error}")).ok()
}

/// The emulator's library, which the backends have opened from the same place.
fn library() -> Library {
    const FILE: &str = "libfmha_emu_amdhip64.so";
    let program = std::env::current_exe().unwrap();
    let path = program.ancestors().skip(1).map(|folder| folder.join(FILE)).find(|path| path.exists());
    // SAFETY: it is open already, so nothing runs.
    unsafe { Library::new(path.unwrap()) }.unwrap()
}

fn current(hip: &Library) -> c_int {
    let mut device = -1;
    // SAFETY: the type is HIP's.
    let get: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
        unsafe { hip.get(b"hipGetDevice") }.unwrap();
    // SAFETY: a place for an int.
    assert_eq!(unsafe { get(&raw mut device) }, 0);
    device
}

fn set_current(hip: &Library, device: c_int) {
    // SAFETY: the type is HIP's.
    let set: Symbol<'_, unsafe extern "C" fn(c_int) -> c_int> = unsafe { hip.get(b"hipSetDevice") }.unwrap();
    // SAFETY: it takes any number.
    assert_eq!(unsafe { set(device) }, 0);
}

fn upload(backend: &RocmBackend, byte: u8) -> DevBuffer {
    let mut buffer = backend.memory().alloc(64).unwrap();
    backend.memory().upload(&[byte; 64], &mut buffer).unwrap();
    buffer
}

fn download(backend: &RocmBackend, buffer: &DevBuffer) -> [u8; 64] {
    let mut bytes = [0; 64];
    backend.memory().download(buffer, &mut bytes).unwrap();
    bytes
}

#[test]
fn two_devices_of_one_process_have_memory_streams_and_events_of_their_own() {
    let (Some(one), Some(two)) = (device("gfx942"), device("gfx90a")) else { return };
    let backends = [one, two];
    let buffers = [upload(&backends[0], 3), upload(&backends[1], 9)];
    let streams = backends.each_ref().map(|backend| backend.create_stream().unwrap());
    // In turns, so that each call finds the other's device behind it.
    for _ in 0..2 {
        for (at, backend) in backends.iter().enumerate() {
            assert_eq!(download(backend, &buffers[at]), [[3; 64], [9; 64]][at]);
            let (start, stop) = (backend.create_event().unwrap(), backend.create_event().unwrap());
            start.record(streams[at]).unwrap();
            stop.record(streams[at]).unwrap();
            assert!(stop.milliseconds_since(&start).unwrap() >= 0.0);
            backend.memory().synchronize(streams[at]).unwrap();
            backend.memory().synchronize(Stream::DEFAULT).unwrap();
        }
    }
    for (backend, stream) in backends.iter().zip(streams) {
        backend.destroy_stream(stream).unwrap();
    }
}

#[test]
fn the_threads_device_is_the_callers_again_after_each_call() {
    let Some(backend) = device("gfx942") else { return };
    let hip = library();
    // Not the one that the backend opened, which is gfx942's.
    for callers in [0, 2] {
        set_current(&hip, callers);
        let still = |what: &str| assert_eq!(current(&hip), callers, "after {what}");
        let buffer = upload(&backend, 1);
        still("alloc and upload");
        download(&backend, &buffer);
        still("download");
        drop(backend.memory().workspace(Workspace::zeroed(64)).unwrap());
        still("workspace");
        let stream = backend.create_stream().unwrap();
        still("create_stream");
        let event = backend.create_event().unwrap();
        event.record(stream).unwrap();
        still("an event's record");
        event.milliseconds_since(&event).unwrap();
        still("an event's time");
        let graph = backend.capture(stream, || Ok(())).unwrap();
        still("capture");
        // SAFETY: it names no memory.
        unsafe { graph.launch(stream).unwrap() };
        still("a graph's launch");
        drop((graph, event));
        still("drops");
        backend.memory().synchronize(stream).unwrap();
        backend.memory().synchronize(Stream::DEFAULT).unwrap();
        still("synchronize");
        backend.destroy_stream(stream).unwrap();
        still("destroy_stream");
        drop(device("gfx90a").unwrap());
        still("open");
    }
}
