//! The CUDA driver, with only the calls that attention needs; none is made before [`open`] has found the library.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;

use fmha_core::DType;
use fmha_core::error::{Error, Result};
use fmha_gpu::Grid;
use fmha_kernels_cuda::nvidia::DeviceInfo;
use fmha_kernels_cuda::tma::{EncodeTensorMap, TensorMap, TensorMapFacts};

/// Converts a driver's status to a [`Result`] that names the call.
#[inline]
fn check(call: &'static str, status: sys::Status) -> Result<()> {
    if status == sys::CUDA_SUCCESS { Ok(()) } else { Err(failure(call, status)) }
}

#[cold]
fn failure(call: &'static str, status: sys::Status) -> Error {
    let mut words = std::ptr::null();
    let error_string = sys::functions().and_then(|driver| driver.cuGetErrorString);
    // SAFETY: `words` is a valid place for a pointer; the driver's strings are static.
    let known = error_string.is_some_and(|get| unsafe { get(status, &raw mut words) } == sys::CUDA_SUCCESS);
    let text = if known && !words.is_null() {
        // SAFETY: the driver gave a NUL-terminated static string.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    } else {
        "unknown error".to_owned()
    };
    Error::Driver { call, code: status, text }
}

#[cold]
fn lacking(call: &'static str) -> Error {
    let text = "the driver's library has no such function".to_owned();
    Error::Driver { call, code: sys::CUDA_ERROR_NOT_FOUND, text }
}

/// Calls a driver function by name and checks its answer.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match sys::functions().and_then(|driver| driver.$function) {
            // SAFETY: each caller here passes places and handles that live across the call.
            Some(function) => check(stringify!($function), unsafe { function($($argument),*) }),
            None => Err(lacking(stringify!($function))),
        }
    };
}

mod calls;
mod mapped;
mod sys;
#[cfg(test)]
mod tests;

/// One GPU, with its primary context retained.
#[derive(Debug)]
pub(crate) struct Device {
    /// Whether the driver is the emulator's.
    pub(crate) emulated: bool,
    context: sys::Handle,
    handle: sys::DeviceHandle,
    /// Properties of the device, from the driver.
    pub(crate) info: DeviceInfo,
    /// The newest version of CUDA that the driver supports.
    pub(crate) driver_version: (i32, i32),
}

// SAFETY: a primary context may be current in any thread; the driver locks inside.
unsafe impl Send for Device {}
// SAFETY: a primary context may be current in any thread; the driver locks inside.
unsafe impl Sync for Device {}

/// Opens the driver, the test double (`emulated`) or the real one, and device `ordinal`.
///
/// # Errors
/// [`Error::NoDevice`] if there is no driver library or no such device; what the driver said.
pub(crate) fn open(ordinal: usize, emulated: bool) -> Result<Device> {
    sys::load().map_err(|said| Error::NoDevice(format!("no CUDA driver on the loader's path: {said}")))?;
    if let Err(error) = call!(cuInit(0)) {
        return Err(Error::NoDevice(format!("the CUDA driver has no device: {error}")));
    }
    let mut count = 0;
    call!(cuDeviceGetCount(&raw mut count))?;
    if ordinal >= count.unsigned_abs() as usize {
        return Err(Error::NoDevice(format!("there is no CUDA device {ordinal}: the driver has {count}")));
    }
    let mut handle = 0;
    call!(cuDeviceGet(&raw mut handle, ordinal as i32))?;
    let mut name = [0u8; 256];
    call!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, handle))?;
    let name =
        CStr::from_bytes_until_nul(&name).map_or_else(|_| "?".into(), CStr::to_string_lossy).into_owned();
    let attribute = |attribute| {
        let mut value = 0;
        call!(cuDeviceGetAttribute(&raw mut value, attribute, handle)).map(|()| value)
    };
    use sys::attribute as a;
    let capability = (attribute(a::COMPUTE_CAPABILITY_MAJOR)?, attribute(a::COMPUTE_CAPABILITY_MINOR)?);
    let num_sms = attribute(a::MULTIPROCESSOR_COUNT)?.unsigned_abs();
    let smem_bytes = attribute(a::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.unsigned_abs();
    let memory = (attribute(a::MEMORY_CLOCK_RATE)?, attribute(a::GLOBAL_MEMORY_BUS_WIDTH)?);
    let clock_khz = attribute(a::CLOCK_RATE)?;
    let mut version = 0;
    call!(cuDriverGetVersion(&raw mut version))?;
    let driver_version = parts_of_version(version);
    let mut context = std::ptr::null_mut();
    call!(cuDevicePrimaryCtxRetain(&raw mut context, handle))?;
    Ok(Device {
        emulated,
        context,
        handle,
        info: DeviceInfo { name, capability, num_sms, smem_bytes, memory, clock_khz },
        driver_version,
    })
}

/// Splits the driver's version number: 12080 is 12.8.
fn parts_of_version(version: i32) -> (i32, i32) {
    (version / 1000, version % 1000 / 10)
}

impl Drop for Device {
    fn drop(&mut self) {
        // The driver may already be unloaded when the process ends, and no caller is left to report an error to.
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.handle));
    }
}

/// The device's context is current in this thread while this value lives; dropping it makes the caller's context
/// current again.
#[must_use = "the context is the caller's again at once"]
pub(crate) struct Entered {
    /// Context of the caller; `None` if the device's own was current.
    callers: Option<sys::Handle>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(callers) = self.callers {
            // The context was current a moment ago. If it has been destroyed since, there is nothing to restore.
            let _ = call!(cuCtxSetCurrent(callers));
        }
    }
}

impl Device {
    /// Makes the device's context current in this thread while the returned value lives.
    pub(crate) fn enter(&self) -> Result<Entered> {
        let mut current = std::ptr::null_mut();
        call!(cuCtxGetCurrent(&raw mut current))?;
        if current == self.context {
            return Ok(Entered { callers: None });
        }
        call!(cuCtxSetCurrent(self.context))?;
        Ok(Entered { callers: Some(current) })
    }

    /// Loads a cubin or PTX, and finds its kernel.
    ///
    /// # Errors
    /// An error of the driver about the image, or an image without such a kernel.
    pub(crate) fn load(self: &Arc<Self>, image: &[u8], kernel: &str, smem_bytes: u32) -> Result<Kernel> {
        let _entered = self.enter()?;
        // The driver reads PTX as a C string, so a NUL is appended; a cubin ignores bytes after its end.
        let mut terminated = image.to_vec();
        terminated.push(0);
        let mut module = std::ptr::null_mut();
        call!(cuModuleLoadData(&raw mut module, terminated.as_ptr().cast()))?;
        let mut loaded =
            Kernel { device: Arc::clone(self), module, function: std::ptr::null_mut(), smem_bytes };
        let symbol = CString::new(kernel).unwrap_or_default();
        call!(cuModuleGetFunction(&raw mut loaded.function, module, symbol.as_ptr()))?;
        if smem_bytes > 0 {
            let attribute = sys::FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            call!(cuFuncSetAttribute(loaded.function, attribute, smem_bytes as i32))?;
        }
        Ok(loaded)
    }
}

/// A loaded kernel.
pub(crate) struct Kernel {
    device: Arc<Device>,
    module: sys::Handle,
    function: sys::Handle,
    smem_bytes: u32,
}

// SAFETY: module and function handles may be used from any thread that has the context.
unsafe impl Send for Kernel {}
// SAFETY: module and function handles may be used from any thread that has the context.
unsafe impl Sync for Kernel {}

impl Drop for Kernel {
    fn drop(&mut self) {
        let unload = || {
            let _entered = self.device.enter()?;
            call!(cuModuleUnload(self.module))
        };
        // A failure to unload is ignored: the driver frees the module with its context.
        let _: Result<()> = unload();
    }
}

impl Kernel {
    /// Queues the kernel in the calling thread's context, which a run enters once for all its launches.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, in order and of the right types, and the device memory that
    /// they point to is as large as the kernel's contract requires.
    pub(crate) unsafe fn launch(&self, grid: Grid, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        let mut dependent = sys::LaunchAttribute {
            id: sys::LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: 1,
            rest: [0; 15],
        };
        let config = sys::LaunchConfig {
            grid: [grid.groups, 1, 1],
            block: [grid.threads, 1, 1],
            shared_bytes: self.smem_bytes,
            stream: stream as sys::Handle,
            attributes: &raw mut dependent,
            num_attributes: grid.dependent.into(),
        };
        call!(cuLaunchKernelEx(
            &raw const config,
            self.function,
            arguments.as_mut_ptr(),
            std::ptr::null_mut()
        ))
    }
}

/// Swizzle mode whose span equals a row of the box.
fn swizzle<const AXES: usize, const STRIDES: usize>(facts: &TensorMapFacts<AXES, STRIDES>) -> c_int {
    match facts.row_bytes() {
        32 => sys::tensor_map::SWIZZLE_32B,
        64 => sys::tensor_map::SWIZZLE_64B,
        _ => sys::tensor_map::SWIZZLE_128B,
    }
}

impl EncodeTensorMap for Device {
    /// The driver refuses to encode a map if the thread has no current context (error 201, seen on an H200 with driver
    /// 580).
    fn encode<const AXES: usize, const STRIDES: usize>(
        facts: &TensorMapFacts<AXES, STRIDES>,
    ) -> Result<TensorMap> {
        use sys::tensor_map as t;
        let mut map = TensorMap([0; 16]);
        let dtype = match facts.dtype {
            DType::Bf16 => t::DATA_TYPE_BFLOAT16,
            DType::F16 => t::DATA_TYPE_FLOAT16,
            _ => t::DATA_TYPE_UINT8,
        };
        let element_strides = [1u32; AXES];
        call!(cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            dtype,
            AXES as u32,
            facts.address as *mut c_void,
            facts.dims.as_ptr(),
            facts.strides_bytes.as_ptr(),
            facts.box_dims.as_ptr(),
            element_strides.as_ptr(),
            t::INTERLEAVE_NONE,
            swizzle(facts),
            // A box reads whole rows of 64 or 128 bytes. With promotion to 256 the L2 reads more than that:
            // 13.6 instead of 11.9 million sectors and 219 instead of 225 TFLOP/s for the forward at B64 H16
            // S256 D128 causal on an H200 (224 with no promotion and with 128 bytes). Long rows, FP8 and
            // backward do not change.
            t::L2_PROMOTION_L2_64B,
            t::FLOAT_OOB_FILL_NONE,
        ))
        .map_err(|error| match error {
            Error::Driver { call, code, text } => {
                Error::Driver { call, code, text: format!("{text}, for {}: {facts:?}", facts.name) }
            }
            other => other,
        })?;
        Ok(map)
    }
}
