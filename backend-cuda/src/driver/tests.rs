//! Objects made and destroyed through the driver, on the test double. No compiler is needed.

use std::time::{Duration, Instant};

use fmha_core::Queues as _;
use fmha_gpu::Driver as _;

use super::*;
use crate::emulated;
use crate::kernels::Cuda;
use fmha_kernels_cuda::nvidia::DeviceFacts;

fn device() -> Device {
    emulated::install("sm_90a").unwrap();
    open(0, true).unwrap()
}

#[test]
fn a_version_of_cuda_has_two_numbers() {
    assert_eq!([12080, 13000, 13010, 9020].map(parts_of_version), [(12, 8), (13, 0), (13, 1), (9, 2)]);
}

#[test]
fn a_failure_has_the_call_the_code_and_the_drivers_words() {
    let _device = device();
    let error = failure("cuInit", 1);
    let Error::Driver { call, code, text } = error else { panic!("{error}") };
    assert_eq!((call, code, &*text), ("cuInit", 1, "invalid argument"));
}

#[test]
fn the_facts_of_a_device_follow_from_what_the_driver_says_of_it() {
    let mut device = device();
    // Facts of an H200, as the driver reports them.
    (device.info.num_sms, device.info.clock_khz, device.info.memory) = (132, 1_980_000, (3_201_000, 6144));
    device.info.name = "NVIDIA H200".to_owned();
    let facts = DeviceFacts::of::<Cuda>(&device.info).unwrap();
    assert_eq!((&*facts.arch, facts.num_sms, facts.smem_bytes), ("sm_90a", 132, device.info.smem_bytes));
    assert_eq!(facts.device, "NVIDIA H200, sm_90a, 132 SMs");
    // An H200's peaks: 4096 operations per clock and multiprocessor; 768 bytes twice per memory clock.
    assert_eq!(facts.roofline.flops_per_second, Some(4096.0 * 132.0 * 1.98e9));
    assert_eq!(facts.roofline.bytes_per_second, Some(768.0 * 2.0 * 3.201e9));
    // Tuned tiles are stored under the device's name, if there is a cache folder.
    assert_ne!(facts.tuned, fmha_core::tune::TunedTiles::default());
    for (capability, arch) in [((10, 0), "sm_100a"), ((8, 9), "sm_89")] {
        device.info.capability = capability;
        let facts = DeviceFacts::of::<Cuda>(&device.info).unwrap();
        assert_eq!((&*facts.arch, facts.roofline.flops_per_second), (arch, None));
    }
}

#[test]
fn what_is_freed_or_destroyed_is_gone() {
    let device = Arc::new(device());
    // SAFETY: the double knows its addresses and handles from all others, here and below.
    let copies = |address: u64| unsafe { device.read(address as *const u8, &mut [0; 64]) };
    let address = device.alloc(64).unwrap();
    copies(address).unwrap();
    // SAFETY: the double knows its addresses and handles from all others, here and below.
    unsafe { device.free(address) };
    assert!(copies(address).is_err());

    let (stream, event) = (device.create_stream().unwrap(), device.create_event().unwrap());
    // SAFETY: the double knows its addresses and handles from all others, here and below.
    unsafe {
        device.synchronize(stream).unwrap();
        device.record_event(event, stream).unwrap();
        device.wait_event(stream, event).unwrap();
        let graph = device.capture(stream, &mut || Ok(())).unwrap();
        device.replay(graph, stream).unwrap();
        device.destroy_graph(graph);
        assert!(device.replay(graph, stream).is_err());
        device.destroy_event(event);
        assert!(device.record_event(event, stream).is_err());
        device.destroy_stream(stream).unwrap();
        assert!(device.destroy_stream(stream).is_err() && device.synchronize(stream).is_err());
    }

    let _entered = device.enter().unwrap();
    let ptx = b".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry nothing()\n{\n\tret;\n}\n";
    let kernel = device.load(ptx, "nothing", 0).unwrap();
    let handle = kernel.module;
    drop(kernel);
    assert!(call!(cuModuleUnload(handle)).is_err());
}

/// Elapsed seconds between events have a lower bound, and are less than those of a surrounding pair.
#[test]
fn seconds_between_events_are_seconds() {
    let device = Arc::new(device());
    let (start, stop) = (device.create_event().unwrap(), device.create_event().unwrap());
    let around = Instant::now();
    let waited = Duration::from_millis(2);
    // SAFETY: live handles, and the default stream.
    let seconds = unsafe {
        device.record_event(start, 0).unwrap();
        std::thread::sleep(waited);
        device.record_event(stop, 0).unwrap();
        device.seconds_between(start, stop).unwrap()
    };
    // The driver gives milliseconds in an f32, which has 24 bits.
    assert!(seconds >= waited.as_secs_f64() * (1.0 - 1e-6), "{seconds}");
    assert!(seconds <= around.elapsed().as_secs_f64() * (1.0 + 1e-6), "{seconds}");
}

#[test]
fn only_the_test_double_checks_bounds_and_only_a_device_has_a_clock() {
    let mut device = device();
    for emulated in [false, true] {
        device.emulated = emulated;
        assert_eq!((device.is_emulated(), device.has_clock()), (emulated, !emulated));
    }
}

#[test]
fn a_maps_swizzle_is_as_wide_as_its_boxs_rows() {
    use sys::tensor_map as t;
    for (dtype, elems, swizzle) in [
        (DType::Bf16, 16, t::SWIZZLE_32B),
        (DType::Bf16, 32, t::SWIZZLE_64B),
        (DType::Bf16, 64, t::SWIZZLE_128B),
        (DType::E4m3Fn, 32, t::SWIZZLE_32B),
        (DType::E4m3Fn, 128, t::SWIZZLE_128B),
    ] {
        let facts = TensorMapFacts {
            name: "q",
            dtype,
            address: 0,
            dims: [128, 1],
            strides_bytes: [256],
            box_dims: [elems, 1],
        };
        assert_eq!(super::swizzle(&facts), swizzle, "{elems} of {dtype}");
    }
}
