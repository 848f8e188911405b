//! Two emulated devices in one process, and the calling thread's state after a call of the backend. No compiler is
//! needed. Emulated, never run on hardware.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::c_int;
use std::time::{Duration, Instant};

use fmha_core::emulators::Double;
use fmha_core::{
    AnyProblem, BwdProblem, DType, DevBuffer, Device, Dims, Error, FwdProblem, PlanOptions, Stream, Workspace,
};
use fmha_rocm::Arch;
use libloading::{Library, Symbol};

mod support;

/// An emulated device; `None`, with a message, if the emulator is absent.
fn device(arch: &str) -> Option<Device> {
    fmha_rocm::open(0, Some(arch)).map_err(|error| println!("absent: no emulated {arch}: {error}")).ok()
}

/// The emulator's library, opened from the path that the backends use.
fn library() -> Library {
    let double = Double { file: "libfmha_emu_amdhip64.so", package: "fmha-emu-hip" };
    // SAFETY: the library is open already, so none of its initialisers run.
    unsafe { Library::new(double.find().unwrap()) }.unwrap()
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
    // SAFETY: the function accepts any number.
    assert_eq!(unsafe { set(device) }, 0);
}

fn upload(backend: &Device, byte: u8) -> DevBuffer {
    let mut buffer = backend.memory().alloc(64).unwrap();
    backend.memory().upload(&[byte; 64], &mut buffer).unwrap();
    buffer
}

fn download(backend: &Device, buffer: &DevBuffer) -> [u8; 64] {
    let mut bytes = [0; 64];
    backend.memory().download(buffer, &mut bytes).unwrap();
    bytes
}

#[test]
fn two_devices_of_one_process_have_memory_streams_and_events_of_their_own() {
    let (Some(one), Some(two)) = (device("gfx942"), device("gfx90a")) else { return };
    let backends = [one, two];
    let buffers = [upload(&backends[0], 3), upload(&backends[1], 9)];
    let streams = backends.each_ref().map(|backend| backend.stream().unwrap());
    // Calls alternate, so that each one finds the other device current.
    for _ in 0..2 {
        for (at, backend) in backends.iter().enumerate() {
            assert_eq!(download(backend, &buffers[at]), [[3; 64], [9; 64]][at]);
            let (start, stop) = (backend.event().unwrap(), backend.event().unwrap());
            start.record(&streams[at]).unwrap();
            stop.record(&streams[at]).unwrap();
            assert!(stop.seconds_since(&start).unwrap() >= 0.0);
            streams[at].synchronize().unwrap();
            backend.synchronize().unwrap();
        }
    }
}

#[test]
fn the_threads_device_is_the_callers_again_after_each_call() {
    let Some(backend) = device("gfx942") else { return };
    let hip = library();
    // The caller's current device is another one than the backend's gfx942.
    for callers in [0, 2] {
        set_current(&hip, callers);
        let still = |what: &str| assert_eq!(current(&hip), callers, "after {what}");
        let buffer = upload(&backend, 1);
        still("alloc and upload");
        download(&backend, &buffer);
        still("download");
        drop(backend.memory().workspace(Workspace::zeroed(64)).unwrap());
        still("workspace");
        let stream = backend.stream().unwrap();
        still("stream");
        let event = backend.event().unwrap();
        event.record(&stream).unwrap();
        stream.wait(&event).unwrap();
        still("an event's record");
        event.seconds_since(&event).unwrap();
        still("an event's time");
        let graph = stream.capture(|| Ok(())).unwrap();
        still("capture");
        // SAFETY: it names no memory.
        unsafe { graph.replay(&stream).unwrap() };
        still("replay");
        drop((graph, event));
        still("drops");
        stream.synchronize().unwrap();
        backend.synchronize().unwrap();
        still("synchronize");
        drop(stream);
        still("a dropped stream");
        drop(device("gfx90a").unwrap());
        still("open");
    }
}

#[test]
fn each_architecture_has_its_device_which_says_what_it_is() {
    for arch in Arch::ALL {
        let units = arch.num_compute_units();
        let Some(backend) = device(arch.name()) else { return };
        let (start, middle) = (format!("rocm:0 (fmha emulator ({0}), {0}", arch.name()), backend.name());
        assert!(middle.starts_with(&start), "{middle}");
        assert!(middle.contains(&format!(", {units} compute units, HIP ")), "{middle}");
        assert!(middle.ends_with(", emulated)"), "{middle}");
    }
}

/// The backward's tiles can be tuned. Fields in which the backward's launches differ are left to each launch; at
/// head dim 128 all launches have equal fields.
#[test]
fn the_backwards_tiles_can_be_tuned() {
    let Some(backend) = device("gfx942") else { return };
    let dims = Dims::batch(2).seqlens(300, 500).heads(8, 4).head_dim(128);
    let own = |seqlen_k| {
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, Dims { seqlen_k, ..dims }));
        let problem = problem.validate().unwrap();
        let (problem, options) = (AnyProblem::Backward(&problem), PlanOptions::default());
        let tuner = backend.tuner().unwrap();
        let knobs = tuner.knobs(problem, &options).unwrap();
        assert_eq!(knobs.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["rows", "columns", "stages"]);
        let own = tuner.default_tile(problem, &options).unwrap();
        own.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
    };
    assert_eq!(own(500), "rows=256,columns=32,stages=2");
    // Tiles for few keys have four waves, and a compute unit holds two such workgroups.
    assert_eq!(own(100), "columns=32");
}

#[test]
fn devices_after_the_last_are_refused_with_how_many_there_are() {
    if device("gfx942").is_none() {
        return;
    }
    // The double has one device of each architecture, so there is no second gfx942.
    let Err(Error::NoDevice(text)) = fmha_rocm::open(1, Some("gfx942")) else { panic!("there is a second") };
    let all = Arch::ALL.len();
    assert_eq!(text, format!("ordinal {all} is not below HIP's number of devices {all}"));
}

#[test]
#[ignore = "a process of the test below, which starts it with three devices, two of them alike"]
fn a_process_with_two_devices_alike() {
    for ordinal in [0, 1] {
        let backend = fmha_rocm::open(ordinal, Some("gfx942")).unwrap();
        assert!(backend.name().starts_with(&format!("rocm:{ordinal} (")), "{}", backend.name());
        assert_eq!(download(&backend, &upload(&backend, 7)), [7; 64]);
    }
    assert!(matches!(fmha_rocm::open(2, Some("gfx942")), Err(Error::NoDevice(_))));
}

#[test]
fn devices_are_counted_among_those_of_their_architecture() {
    if device("gfx942").is_none() {
        return;
    }
    support::in_a_process("a_process_with_two_devices_alike", &[("FMHA_EMULATE", "gfx942,gfx90a,gfx942")]);
}

#[test]
fn a_stream_that_was_ended_is_refused_and_the_default_one_goes_on() {
    let Some(backend) = device("gfx942") else { return };
    let streams = [backend.stream().unwrap(), backend.stream().unwrap()];
    for stream in streams {
        // SAFETY: live as long as `stream` is; then the double knows it no more.
        let again = unsafe { Stream::from_raw(&backend, stream.as_raw()) };
        again.synchronize().unwrap();
        drop(stream);
        let error = again.synchronize().unwrap_err().to_string();
        assert!(error.starts_with("hipStreamSynchronize failed with 400"), "{error}");
        backend.synchronize().unwrap();
    }
}

/// Elapsed time between events lies between the wait inside and the host's time around, since the double's events
/// carry the host's time.
#[test]
fn a_span_lies_between_the_wait_in_it_and_the_time_around_it_and_has_two_ends() {
    const WAIT: Duration = Duration::from_millis(2);
    let Some(backend) = device("gfx942") else { return };
    let around = Instant::now();
    let wait = || {
        std::thread::sleep(WAIT);
        Ok(())
    };
    let seconds = backend.default_stream().seconds(wait).unwrap();
    // The driver gives milliseconds in an f32.
    let (least, most) = (WAIT.as_secs_f64() * (1.0 - 1e-6), around.elapsed().as_secs_f64() * (1.0 + 1e-6));
    assert!(least <= seconds && seconds <= most, "{seconds} is not from {least} to {most}");
    let (start, stop) = (backend.event().unwrap(), backend.event().unwrap());
    start.record(&backend.default_stream()).unwrap();
    let error = stop.seconds_since(&start).unwrap_err().to_string();
    assert!(error.starts_with("hipEventElapsedTime failed"), "{error}");
}

/// New device memory is zeroed, so it does not show data of other processes, and scratch is not read.
#[test]
fn new_memory_is_zeros_and_scratch_is_not_read() {
    let Some(backend) = device("gfx942") else { return };
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
fn copies_that_are_longer_than_their_buffer_are_refused() {
    let Some(backend) = device("gfx942") else { return };
    let memory = backend.memory();
    let mut buffer = upload(&backend, 5);
    let error = memory.upload(&[1u8; 65], &mut buffer).unwrap_err();
    assert_eq!(error.to_string(), "to has 64 bytes, but 65 are to be copied");
    let error = memory.download(&buffer, &mut [0u8; 65]).unwrap_err();
    assert_eq!(error.to_string(), "from has 64 bytes, but 65 are to be copied");
    assert_eq!(download(&backend, &buffer), [5; 64]);
}

#[test]
fn a_backend_without_a_device_has_neither_memory_nor_queues() {
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let only_plans = "this backend only plans: it has no device";
    for error in [
        backend.memory().alloc(64).map(drop),
        backend.synchronize(),
        backend.default_stream().synchronize(),
        backend.stream().map(drop),
        backend.event().map(drop),
    ] {
        assert!(error.unwrap_err().to_string().ends_with(only_plans));
    }
    assert!(!backend.has_streams() && !backend.has_clock());
}
