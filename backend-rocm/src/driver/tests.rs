//! What the driver keeps of dropped things, over the emulator's library: it looks every handle up.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::{DeviceMemory as _, Queues as _};
use fmha_kernels_hip::Arch;

use super::*;
use crate::compile::tests::kernel;
use crate::driver::graph::{Event, Graph};
use crate::memory::RocmMemory;

fn driver() -> Option<Driver> {
    crate::emulated(Arch::Gfx942, 0).map_err(|error| println!("absent: no test double: {error}")).ok()
}

/// The double sees every access, and its events tell the host's time; of a device neither is so.
#[test]
fn only_the_test_double_checks_bounds_and_only_a_device_has_a_clock() {
    let Some(double) = driver() else { return };
    let device = Driver { emulated: false, ..double.clone() };
    assert_eq!((double.emulated(), device.emulated()), (true, false));
    assert_eq!((double.has_clock(), device.has_clock()), (false, true));
    let checks_bounds = |driver| RocmMemory(driver).checks_bounds();
    assert_eq!([Some(double), Some(device), None].map(checks_bounds), [true, false, false]);
}

#[test]
fn memory_that_was_given_back_is_gone() {
    let Some(driver) = driver() else { return };
    let address = driver.alloc(64).unwrap();
    // SAFETY: the double knows its addresses from all others.
    let read = || unsafe { driver.download(address, &mut [0; 64]) };
    assert!(read().is_ok());
    driver.free(address);
    assert!(read().unwrap_err().to_string().starts_with("hipMemcpyDtoH failed with 1:"));
}

#[test]
fn events_graphs_and_modules_are_gone_when_dropped() {
    let Some(driver) = driver() else { return };
    let hip = driver.hip();
    let event = Event::new(&driver).unwrap();
    let gone = event.handle();
    // SAFETY: the double looks the handle up.
    let record = || unsafe { hip.hipEventRecord.unwrap()(gone, std::ptr::null_mut()) };
    assert_eq!(record(), 0);
    drop(event);
    assert_ne!(record(), 0, "an event is still there");

    let stream = driver.create_stream().unwrap();
    let graph = Graph::capture(&driver, stream, || Ok(())).unwrap();
    let gone = graph.handle();
    // SAFETY: as above.
    let launch = || unsafe { hip.hipGraphLaunch.unwrap()(gone, handle(stream)) };
    assert_eq!(launch(), 0);
    drop(graph);
    assert_ne!(launch(), 0, "a graph is still there");
    driver.destroy_stream(stream).unwrap();

    let Some(code) = kernel() else { return };
    let function = driver.load(&code, "fmha_kernel").unwrap();
    let gone = function.module;
    let mut found: Handle = std::ptr::null_mut();
    // SAFETY: as above.
    let mut find = || unsafe { (hip.hipModuleGetFunction)(&raw mut found, gone, c"fmha_kernel".as_ptr()) };
    assert_eq!(find(), 0);
    drop(function);
    assert_ne!(find(), 0, "a module is still there");
}
