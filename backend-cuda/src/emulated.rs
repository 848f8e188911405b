//! The emulated device: a test double of the driver's library that replaces the real one.
//!
//! The double is opened by path and has the soname of the driver, so a later search of the loader for the
//! driver, as in `driver::sys`, finds the double. A process has one driver: it cannot use a real device and
//! an emulated one together.

use std::ffi::{CString, c_char, c_int};
use std::path::Path;

use fmha_core::emulators::{Double, launches_of};
use fmha_core::error::{Error, ProblemError, Result};
use fmha_kernels_cuda::nvidia::DeviceFacts;
use libloading::Library;
use once_cell::sync::OnceCell;

/// The double's library.
const DRIVER: Double = Double { file: "libfmha_emu_libcuda.so", package: "fmha-emu-libcuda" };

/// The double that this process runs on, and its architecture.
static DOUBLE: OnceCell<(Library, String)> = OnceCell::new();

/// Loads the double for `arch` instead of the driver, before the driver's first use.
///
/// # Errors
/// [`Error::NoDevice`] for an unknown architecture, or if the double's file is not found or does not open;
/// [`Error::Problem`] if this process emulates another architecture already.
pub(crate) fn install(arch: &str) -> Result<()> {
    // Names are checked before the search for the double, which may build it. Each emulated device has a name;
    // `sm_90` also stands for `sm_90a`.
    for name in arch.split(',') {
        let stated = |name: &str| DeviceFacts::stated(name).map(drop);
        stated(name).or_else(|refused| stated(&format!("{name}a")).map_err(|_| refused))?;
    }
    let (_, installed) = DOUBLE.get_or_try_init(|| {
        let path = &DRIVER.find()?;
        let does_not_serve = |why: String| Error::NoDevice(format!("{}: {why}", path.display()));
        // SAFETY: the double's initialisers only set up itself.
        let library =
            unsafe { open(path) }.map_err(|error| does_not_serve(format!("does not open: {error}")))?;
        let name = CString::new(arch).map_err(|error| does_not_serve(error.to_string()))?;
        // SAFETY: the double's own function has this type, and reads the text before it returns.
        let status = unsafe {
            library
                .get::<unsafe extern "C" fn(*const c_char) -> c_int>(b"fmha_emu_choose\0")
                .map(|choose| choose(name.as_ptr()))
        };
        match status {
            Ok(0) => Ok((library, arch.to_owned())),
            Ok(_) => Err(does_not_serve(format!("it emulates no {arch}"))),
            Err(error) => Err(does_not_serve(error.to_string())),
        }
    })?;
    if installed == arch {
        return Ok(());
    }
    let text = format!("emulate {arch}: this process emulates {installed} already");
    Err(ProblemError::new("emulate", text).into())
}

/// Opens a library with global visibility: libraries opened later find its functions by name.
///
/// # Safety
/// Its initialisers may run in this process.
#[cfg(unix)]
unsafe fn open(path: &Path) -> std::result::Result<Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: the caller promises that the library's initialisers may run in this process.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map(Into::into)
}

/// Opens a library.
///
/// # Safety
/// Its initialisers may run in this process.
#[cfg(not(unix))]
unsafe fn open(path: &Path) -> std::result::Result<Library, libloading::Error> {
    // SAFETY: the caller promises that the library's initialisers may run in this process.
    unsafe { Library::new(path) }
}

/// Whether this process runs on the emulator's driver library.
pub(crate) fn is_installed() -> bool {
    DOUBLE.get().is_some()
}

/// Launches on the double since the last call (at most 64), as a JSON array, oldest first: `kernel`, `grid`,
/// `block`, `counters` and `instructions` by name. The call clears them. `None` if this process uses no
/// double.
#[must_use]
pub fn emulated_launches() -> Option<String> {
    let (library, _) = DOUBLE.get()?;
    // SAFETY: the double's own functions have these types.
    let (launches, forget) = unsafe {
        (
            library.get::<unsafe extern "C" fn() -> *mut c_char>(b"fmha_emu_launches\0").ok()?,
            library.get::<unsafe extern "C" fn(*mut c_char)>(b"fmha_emu_forget\0").ok()?,
        )
    };
    // SAFETY: the double gives a string that lives until `forget` is called with it.
    Some(unsafe { launches_of(*launches, *forget) })
}
