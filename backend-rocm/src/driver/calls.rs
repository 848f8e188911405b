//! The driver's calls in the form in which core and `fmha-gpu` use them: memory, streams, launches, and events and
//! graphs, which a library may lack; calling them is then an error.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use fmha_core::{Error, Queues, Result};
use fmha_gpu::{Driver as GpuDriver, Grid};

use super::sys::Handle;
use super::{Driver, Function, Selected};

/// `hipStreamNonBlocking`: a stream that does not wait for the default one.
const NON_BLOCKING: c_uint = 1;
/// `hipStreamCaptureModeThreadLocal`: calls of other threads do not invalidate the capture.
const CAPTURE_MODE: c_int = 1;
/// `hipStreamCaptureStatusNone`: the stream is not capturing, so queued work runs.
const CAPTURE_STATUS_NONE: c_int = 0;

macro_rules! optional {
    ($driver:expr, $name:ident) => {
        $driver.hip.$name.ok_or_else(|| Error::NoDevice(format!("libamdhip64 lacks {}", stringify!($name))))
    };
}

// SAFETY: hipMalloc gives memory of the device to one owner, and the streams are that device's.
unsafe impl GpuDriver for Driver {
    type Kernel = Function;
    type Kept = ();
    type Entered<'a> = Selected<'a>;

    fn is_emulated(&self) -> bool {
        self.emulated
    }

    fn enter(&self) -> Result<Selected<'_>> {
        self.select()
    }

    /// HIP aligns allocated memory to 256 bytes.
    fn alloc(&self, bytes: u64) -> Result<u64> {
        let _selected = self.select()?;
        let size = usize::try_from(bytes.max(1)).map_err(|_| Error::System {
            what: format!("{bytes} bytes of device memory"),
            text: "more than an address can express".to_owned(),
        })?;
        let mut address: Handle = std::ptr::null_mut();
        // SAFETY: `address` is a pointer to fill.
        let status = unsafe { (self.hip.hipMalloc)(&raw mut address, size) };
        self.check("hipMalloc", status)?;
        Ok(address as u64)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's promise. There is no caller to report a failure to.
        unsafe { (self.hip.hipFree)(address as Handle) };
    }

    /// Copies to the device and waits. Without the wait the driver's call may return once the bytes are staged, and
    /// streams that do not wait for the default one could read too early.
    unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<()> {
        let _selected = self.select()?;
        // SAFETY: the caller promised `to`; `bytes` is a slice.
        let status = unsafe { (self.hip.hipMemcpyHtoD)(to as Handle, bytes.as_ptr().cast(), bytes.len()) };
        self.check("hipMemcpyHtoD", status)?;
        // SAFETY: the default stream is always there.
        self.check("hipStreamSynchronize", unsafe { (self.hip.hipStreamSynchronize)(std::ptr::null_mut()) })
    }

    /// The kernels of this backend use no dynamic LDS.
    fn load(self: &Arc<Self>, image: &[u8], entry: &str, _lds_bytes: u32) -> Result<Function> {
        Driver::load(self, image, entry)
    }

    unsafe fn launch(
        kernel: &Function,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: u64,
    ) -> Result<()> {
        let driver = &kernel.driver;
        // SAFETY: HIP copies the arguments before it returns; they are the kernel's, as the caller promised.
        let status = unsafe {
            (driver.hip.hipModuleLaunchKernel)(
                kernel.function,
                grid.groups,
                1,
                1,
                grid.threads,
                1,
                1,
                0,
                stream as Handle,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver.check("hipModuleLaunchKernel", status)
    }
}

impl Queues for Driver {
    fn create_stream(&self) -> Result<u64> {
        let _selected = self.select()?;
        let mut stream: Handle = std::ptr::null_mut();
        // SAFETY: `stream` is a pointer to fill.
        let status = unsafe { (self.hip.hipStreamCreateWithFlags)(&raw mut stream, NON_BLOCKING) };
        self.check("hipStreamCreateWithFlags", status)?;
        Ok(stream as u64)
    }

    unsafe fn destroy_stream(&self, stream: u64) -> Result<()> {
        let _selected = self.select()?;
        // SAFETY: the caller keeps the contract of `destroy_stream`.
        let status = unsafe { (self.hip.hipStreamDestroy)(stream as Handle) };
        self.check("hipStreamDestroy", status)
    }

    unsafe fn synchronize(&self, stream: u64) -> Result<()> {
        let _selected = self.select()?;
        if stream == 0 {
            // SAFETY: no arguments.
            let status = unsafe { (self.hip.hipDeviceSynchronize)() };
            return self.check("hipDeviceSynchronize", status);
        }
        // SAFETY: the caller keeps the contract of `synchronize`.
        let status = unsafe { (self.hip.hipStreamSynchronize)(stream as Handle) };
        self.check("hipStreamSynchronize", status)
    }

    unsafe fn zero(&self, address: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        let _selected = self.select()?;
        // SAFETY: the caller keeps the contract of `zero`.
        let status =
            unsafe { (self.hip.hipMemsetAsync)(address.cast(), 0, bytes as usize, stream as Handle) };
        self.check("hipMemsetAsync", status)
    }

    unsafe fn copy_bytes(&self, from: *const u8, to: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        let _selected = self.select()?;
        let copy = optional!(self, hipMemcpyDtoDAsync)?;
        // SAFETY: the caller keeps the contract of `copy_bytes`.
        let status = unsafe { copy(to.cast(), from.cast_mut().cast(), bytes as usize, stream as Handle) };
        self.check("hipMemcpyDtoDAsync", status)
    }

    unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        let _selected = self.select()?;
        // SAFETY: the caller promised `from`; `to` is a slice.
        let status =
            unsafe { (self.hip.hipMemcpyDtoH)(to.as_mut_ptr().cast(), from.cast_mut().cast(), to.len()) };
        self.check("hipMemcpyDtoH", status)
    }

    fn create_event(&self) -> Result<u64> {
        let _selected = self.select()?;
        let create = optional!(self, hipEventCreate)?;
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: `event` is a pointer to fill.
        self.check("hipEventCreate", unsafe { create(&raw mut event) })?;
        Ok(event as u64)
    }

    unsafe fn destroy_event(&self, event: u64) {
        if let Some(destroy) = self.hip.hipEventDestroy {
            // SAFETY: the caller keeps the contract of `destroy_event`.
            unsafe { destroy(event as Handle) };
        }
    }

    unsafe fn record_event(&self, event: u64, stream: u64) -> Result<()> {
        let _selected = self.select()?;
        let record = optional!(self, hipEventRecord)?;
        // SAFETY: the caller keeps the contract of `record_event`.
        self.check("hipEventRecord", unsafe { record(event as Handle, stream as Handle) })
    }

    unsafe fn wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let _selected = self.select()?;
        let wait = optional!(self, hipStreamWaitEvent)?;
        // SAFETY: the caller keeps the contract of `wait_event`.
        self.check("hipStreamWaitEvent", unsafe { wait(stream as Handle, event as Handle, 0) })
    }

    unsafe fn synchronize_event(&self, event: u64) -> Result<()> {
        let _selected = self.select()?;
        let synchronize = optional!(self, hipEventSynchronize)?;
        // SAFETY: the caller keeps the contract of `synchronize_event`.
        self.check("hipEventSynchronize", unsafe { synchronize(event as Handle) })
    }

    unsafe fn seconds_between(&self, start: u64, stop: u64) -> Result<f64> {
        let _selected = self.select()?;
        let elapsed = optional!(self, hipEventElapsedTime)?;
        let mut milliseconds = 0.0f32;
        // SAFETY: the caller keeps the contract of `seconds_between`.
        let status = unsafe { elapsed(&raw mut milliseconds, start as Handle, stop as Handle) };
        self.check("hipEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    fn has_clock(&self) -> bool {
        !self.emulated
    }

    /// Whether the stream is being captured. A library that lacks this function cannot capture.
    unsafe fn is_capturing(&self, stream: u64) -> Result<bool> {
        let Some(is_capturing) = self.hip.hipStreamIsCapturing else { return Ok(false) };
        let _selected = self.select()?;
        let mut status = CAPTURE_STATUS_NONE;
        // SAFETY: the caller keeps the contract of `is_capturing`.
        let said = unsafe { is_capturing(stream as Handle, &raw mut status) };
        self.check("hipStreamIsCapturing", said)?;
        Ok(status != CAPTURE_STATUS_NONE)
    }

    unsafe fn capture(&self, stream: u64, queue: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        let _selected = self.select()?;
        let (begin, end, instantiate, destroy) = (
            optional!(self, hipStreamBeginCapture)?,
            optional!(self, hipStreamEndCapture)?,
            optional!(self, hipGraphInstantiate)?,
            optional!(self, hipGraphDestroy)?,
        );
        let stream = stream as Handle;
        // SAFETY: the caller keeps the contract of `capture`.
        self.check("hipStreamBeginCapture", unsafe { begin(stream, CAPTURE_MODE) })?;
        let queued = queue();
        let mut graph: Handle = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, whether or not `queue` succeeded.
        let ended = self.check("hipStreamEndCapture", unsafe { end(stream, &raw mut graph) });
        queued.and(ended)?;
        let mut executable: Handle = std::ptr::null_mut();
        // SAFETY: `graph` was captured; the error node and the log are optional.
        let status =
            unsafe { instantiate(&raw mut executable, graph, std::ptr::null_mut(), std::ptr::null_mut(), 0) };
        // SAFETY: the executable graph is a copy; this one is used no more.
        unsafe { destroy(graph) };
        self.check("hipGraphInstantiate", status)?;
        Ok(executable as u64)
    }

    unsafe fn replay(&self, graph: u64, stream: u64) -> Result<()> {
        let _selected = self.select()?;
        let launch = optional!(self, hipGraphLaunch)?;
        // SAFETY: the caller keeps the contract of `replay`.
        self.check("hipGraphLaunch", unsafe { launch(graph as Handle, stream as Handle) })
    }

    unsafe fn destroy_graph(&self, graph: u64) {
        if let Some(destroy) = self.hip.hipGraphExecDestroy {
            // SAFETY: the caller keeps the contract of `destroy_graph`.
            unsafe { destroy(graph as Handle) };
        }
    }
}
