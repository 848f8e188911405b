//! The emulated device: a test double of HIP's library, opened by path.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::OnceLock;

use fmha_core::Result;
use fmha_core::emulators::{Double, launches_of};
use fmha_kernels_hip::Arch;
use libloading::Library;

use crate::driver::{Driver, search};

const HIP: Double = Double { file: "libfmha_emu_amdhip64.so", package: "fmha-emu-hip" };

/// Path of the test double that this process runs on.
static DOUBLE: OnceLock<PathBuf> = OnceLock::new();

/// Opens the `ordinal`-th of the double's devices with architecture `arch`.
///
/// # Errors
/// [`Error::NoDevice`](fmha_core::Error::NoDevice) if the double's file is not found or does not open, or has no
/// such device.
pub(crate) fn open(arch: Arch, ordinal: usize) -> Result<Driver> {
    let path = HIP.find()?;
    let mut driver = Driver::open(search::hip_at(std::slice::from_ref(&path))?, 0, true)?;
    DOUBLE.get_or_init(|| path);
    let mut left = ordinal;
    loop {
        if driver.info()?.gcn_arch_name.split(':').next() == Some(arch.name()) {
            if left == 0 {
                return Ok(driver);
            }
            left -= 1;
        }
        driver = driver.next()?;
    }
}

/// Launches on the double since the last call (none at the first call, which starts the count), as a JSON
/// array, oldest first, at most 64: `kernel`, `grid`, `block`, `counters` and `instructions` by name. `None`
/// if this process uses no double.
#[must_use]
pub fn emulated_launches() -> Option<String> {
    let path = DOUBLE.get()?;
    // SAFETY: the double is open already, and this only adds a handle to it.
    let library = unsafe { Library::new(path) }.ok()?;
    // SAFETY: the double's own functions have these types.
    let (launches, forget) = unsafe {
        (
            library.get::<unsafe extern "C" fn() -> *mut c_char>(b"fmhaEmulatorLaunches\0").ok()?,
            library.get::<unsafe extern "C" fn(*mut c_char)>(b"fmhaEmulatorForget\0").ok()?,
        )
    };
    // SAFETY: the double gives a string that lives until `forget` is called with it.
    Some(unsafe { launches_of(*launches, *forget) })
}
