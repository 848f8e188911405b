//! HIP's functions with `Result`; only this folder calls the driver.

mod calls;
pub(crate) mod search;
pub(crate) mod sys;

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::Arc;

use fmha_core::{Error, Result};

use self::sys::{DeviceProperties, Handle, Hip, HipStatus};

/// The driver and one of its devices.
#[derive(Clone)]
pub(crate) struct Driver {
    hip: Arc<Hip>,
    ordinal: c_int,
    /// Whether `hip` is the emulator's library, whose events carry the emulator's time.
    emulated: bool,
}

/// Properties of a device, from the driver.
#[derive(Clone, Debug)]
pub(crate) struct DeviceInfo {
    /// Name of the device, such as `AMD Instinct MI300X`.
    pub(crate) name: String,
    /// Architecture with features, such as `gfx942:sramecc+:xnack-`.
    pub(crate) gcn_arch_name: String,
    pub(crate) num_compute_units: u32,
    /// HIP's version number, 0 if the library does not report one.
    pub(crate) runtime_version: i32,
}

impl Driver {
    /// Initialises `hip`, the emulator's or a device's, and finds device `ordinal`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the driver's words.
    pub(crate) fn open(hip: Hip, ordinal: usize, emulated: bool) -> Result<Self> {
        let driver = Self { hip: Arc::new(hip), ordinal: 0, emulated };
        // SAFETY: HIP's own entry; no arguments but a flag that must be 0.
        let status = unsafe { (driver.hip.hipInit)(0) };
        let no_device = |error| Error::NoDevice(format!("rocm: HIP has no device: {error}"));
        driver.check("hipInit", status).map_err(no_device)?;
        driver.at(ordinal)
    }

    /// The device with the next ordinal.
    ///
    /// # Errors
    /// [`Error::NoDevice`] after the last.
    pub(crate) fn next(&self) -> Result<Self> {
        self.at(usize::try_from(self.ordinal).map_or(usize::MAX, |ordinal| ordinal + 1))
    }

    fn at(&self, ordinal: usize) -> Result<Self> {
        let mut count: c_int = 0;
        // SAFETY: `count` is a c_int.
        let status = unsafe { (self.hip.hipGetDeviceCount)(&raw mut count) };
        self.check("hipGetDeviceCount", status)
            .map_err(|error| Error::NoDevice(format!("rocm: HIP has no device: {error}")))?;
        match c_int::try_from(ordinal) {
            Ok(ordinal) if ordinal < count => Ok(Self { ordinal, ..self.clone() }),
            _ => Err(Error::NoDevice(format!(
                "ordinal {ordinal} is not below HIP's number of devices {count}"
            ))),
        }
    }

    /// The device's name and architecture.
    ///
    /// # Errors
    /// An error of the driver; [`Error::NoDevice`] for libraries before ROCm 6.
    pub(crate) fn info(&self) -> Result<DeviceInfo> {
        let Some(get) = self.hip.hipGetDevicePropertiesR0600 else {
            return Err(Error::NoDevice(
                "libamdhip64 has no hipGetDevicePropertiesR0600: it is older than ROCm 6.0".to_owned(),
            ));
        };
        let mut properties = Box::new(DeviceProperties([0; DeviceProperties::BYTES]));
        // SAFETY: the struct has room for HIP's; see its size.
        let status = unsafe { get(&raw mut *properties, self.ordinal) };
        self.check("hipGetDevicePropertiesR0600", status)?;
        let text = |at: usize| {
            let bytes = &properties.0[at..at + 256];
            CStr::from_bytes_until_nul(bytes)
                .map_or_else(|_| String::new(), |c| c.to_string_lossy().into_owned())
        };
        let at = DeviceProperties::MULTI_PROCESSOR_COUNT;
        let count: [u8; 4] = std::array::from_fn(|i| properties.0[at + i]);
        let mut runtime_version = 0;
        if let Some(version) = self.hip.hipRuntimeGetVersion {
            // SAFETY: writes one c_int. Absence of a version is no error: it stays 0.
            unsafe { version(&raw mut runtime_version) };
        }
        Ok(DeviceInfo {
            name: text(DeviceProperties::NAME),
            gcn_arch_name: text(DeviceProperties::GCN_ARCH_NAME),
            num_compute_units: u32::from_ne_bytes(count),
            runtime_version,
        })
    }

    /// Loads a code object and finds the kernel `entry` in it.
    pub(crate) fn load(&self, image: &[u8], entry: &str) -> Result<Function> {
        let _selected = self.select()?;
        let name = CString::new(entry).map_err(|_| Error::System {
            what: format!("kernel {entry:?}"),
            text: "a symbol has no NUL".to_owned(),
        })?;
        let mut function =
            Function { driver: self.clone(), module: std::ptr::null_mut(), function: std::ptr::null_mut() };
        // SAFETY: `image` is a complete ELF file, which contains its own size.
        let status = unsafe { (self.hip.hipModuleLoadData)(&raw mut function.module, image.as_ptr().cast()) };
        self.check("hipModuleLoadData", status)?;
        // SAFETY: the module is loaded; the name ends in NUL.
        let status = unsafe {
            (self.hip.hipModuleGetFunction)(&raw mut function.function, function.module, name.as_ptr())
        };
        self.check("hipModuleGetFunction", status)?;
        Ok(function)
    }

    /// Makes the device current in this thread while the returned value lives.
    pub(super) fn select(&self) -> Result<Selected<'_>> {
        let mut current: c_int = 0;
        // SAFETY: `current` is a c_int.
        self.check("hipGetDevice", unsafe { (self.hip.hipGetDevice)(&raw mut current) })?;
        if current == self.ordinal {
            return Ok(Selected { hip: &self.hip, callers: None });
        }
        // SAFETY: `open` saw that the ordinal exists.
        self.check("hipSetDevice", unsafe { (self.hip.hipSetDevice)(self.ordinal) })?;
        Ok(Selected { hip: &self.hip, callers: Some(current) })
    }

    pub(super) fn check(&self, call: &'static str, status: HipStatus) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: HIP returns a static C string for every code, known or not.
        let text = unsafe { owned((self.hip.hipGetErrorString)(status)) };
        Err(Error::Driver { call, code: status, text })
    }
}

/// A device is current in this thread while this value lives; dropping it makes the caller's device current again.
#[must_use = "the device is the caller's again at once"]
pub(super) struct Selected<'a> {
    hip: &'a Hip,
    /// Device that was current before; `None` if it was this one.
    callers: Option<c_int>,
}

impl Drop for Selected<'_> {
    fn drop(&mut self) {
        if let Some(callers) = self.callers {
            // SAFETY: the caller's device was current a moment ago, so it exists.
            unsafe { (self.hip.hipSetDevice)(callers) };
        }
    }
}

/// A loaded kernel.
pub(crate) struct Function {
    driver: Driver,
    module: Handle,
    function: Handle,
}

// SAFETY: handles of the driver, which is thread-safe; nothing here is changed after loading.
unsafe impl Send for Function {}
// SAFETY: handles of the driver, which is thread-safe; nothing here is changed after loading.
unsafe impl Sync for Function {}

impl Drop for Function {
    fn drop(&mut self) {
        if !self.module.is_null() {
            // A module that cannot be unloaded is left to the driver to free.
            let _selected = self.driver.select();
            // SAFETY: loaded by `load`, unloaded once.
            unsafe { (self.driver.hip.hipModuleUnload)(self.module) };
        }
    }
}

/// Copies the driver's text.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller promised that `text` is null or a C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
