//! Handles of destroyed objects, with the emulator's library, which checks every handle.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::Queues as _;
use fmha_gpu::Driver as _;
use fmha_kernels_hip::Arch;

use super::sys::Handle;
use super::*;
use crate::compile::tests::kernel;

fn driver() -> Option<Arc<Driver>> {
    let driver = crate::emulated::open(Arch::Gfx942, 0);
    driver.map(Arc::new).map_err(|error| println!("absent: no test double: {error}")).ok()
}

/// Only the test double checks bounds, and only a device has a clock: the double checks every access, and its
/// events carry the host's time.
#[test]
fn only_the_test_double_checks_bounds_and_only_a_device_has_a_clock() {
    let Some(double) = driver() else { return };
    let device = Driver { emulated: false, ..Driver::clone(&double) };
    assert_eq!((double.is_emulated(), device.is_emulated()), (true, false));
    assert_eq!((double.has_clock(), device.has_clock()), (false, true));
}

#[test]
fn memory_that_was_given_back_is_gone() {
    let Some(driver) = driver() else { return };
    let address = driver.alloc(64).unwrap();
    // SAFETY: the double recognises its own addresses among all others.
    let read = || unsafe { driver.read(address as *const u8, &mut [0; 64]) };
    assert!(read().is_ok());
    // SAFETY: the double recognises its own addresses among all others.
    unsafe { driver.free(address) };
    assert!(read().unwrap_err().to_string().starts_with("hipMemcpyDtoH failed with 1:"));
}

#[test]
fn what_was_destroyed_and_modules_that_were_dropped_are_gone() {
    let Some(driver) = driver() else { return };
    let hip = &driver.hip;
    let (stream, event) = (driver.create_stream().unwrap(), driver.create_event().unwrap());
    // SAFETY: the double looks every handle up.
    unsafe {
        driver.record_event(event, stream).unwrap();
        driver.wait_event(stream, event).unwrap();
        driver.synchronize_event(event).unwrap();
        let graph = driver.capture(stream, &mut || Ok(())).unwrap();
        driver.replay(graph, stream).unwrap();
        driver.destroy_graph(graph);
        assert!(driver.replay(graph, stream).is_err(), "a graph is still there");
        driver.destroy_event(event);
        assert!(driver.record_event(event, stream).is_err(), "an event is still there");
        driver.destroy_stream(stream).unwrap();
        assert!(driver.destroy_stream(stream).is_err(), "a stream is still there");
    }

    let Some(code) = kernel() else { return };
    let function = Driver::load(&driver, &code, "fmha_kernel").unwrap();
    let gone = function.module;
    let mut found: Handle = std::ptr::null_mut();
    // SAFETY: the double looks every handle up.
    let mut find = || unsafe { (hip.hipModuleGetFunction)(&raw mut found, gone, c"fmha_kernel".as_ptr()) };
    assert_eq!(find(), 0);
    drop(function);
    assert_ne!(find(), 0, "a module is still there");
}
