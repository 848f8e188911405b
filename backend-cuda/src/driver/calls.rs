//! The driver's calls in the form in which core and `fmha-gpu` use them: memory, streams, events, graphs, launches.

use std::ffi::c_void;
use std::sync::Arc;

use fmha_core::{DevBuffer, MemorySpace, Peers, Queues, Result, Word};
use fmha_gpu::{Driver, Grid};

use super::mapped::Mapped;
use super::{Device, Entered, Kernel, check, lacking, sys};
use fmha_kernels_cuda::maps::LastMaps;

// SAFETY: the driver gives memory of the context's device to one owner, and the streams are that context's.
unsafe impl Driver for Device {
    type Kernel = Kernel;
    type Kept = LastMaps;
    type Entered<'a> = Entered;

    fn is_emulated(&self) -> bool {
        self.emulated
    }

    fn peers(&self) -> Option<&dyn Peers> {
        Some(self)
    }

    fn enter(&self) -> Result<Entered> {
        Device::enter(self)
    }

    fn alloc(&self, bytes: u64) -> Result<u64> {
        let _entered = self.enter()?;
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, bytes.max(1) as usize))?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        // A buffer that cannot be freed is gone: the driver has freed it with its context.
        let _ = self.enter().and_then(|_entered| call!(cuMemFree_v2(address)));
    }

    /// Copies to the device and waits. Without the wait the driver's call returns once bytes from pageable memory
    /// are staged (CUDA Driver API, "API synchronization behavior"), and streams that do not wait for the default
    /// one could read too early.
    unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()))?;
        call!(cuStreamSynchronize(std::ptr::null_mut()))
    }

    fn alloc_at_edge(self: &Arc<Self>, bytes: u64, at_end: bool) -> Result<Option<DevBuffer>> {
        let mapped = Mapped::new(self, bytes, at_end)?;
        let address = mapped.address as *mut u8;
        let free = Box::new(move |_| drop(mapped));
        // SAFETY: the driver gave this memory to us alone, until `mapped` is dropped.
        Ok(Some(unsafe { DevBuffer::from_raw(MemorySpace::Device, address, bytes, free) }))
    }

    fn load(self: &Arc<Self>, image: &[u8], entry: &str, shared_bytes: u32) -> Result<Kernel> {
        Device::load(self, image, entry, shared_bytes)
    }

    unsafe fn launch(kernel: &Kernel, grid: Grid, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { kernel.launch(grid, arguments, stream) }
    }
}

impl Queues for Device {
    fn create_stream(&self) -> Result<u64> {
        let _entered = self.enter()?;
        let mut stream = std::ptr::null_mut();
        call!(cuStreamCreate(&raw mut stream, sys::STREAM_NON_BLOCKING))?;
        Ok(stream as u64)
    }

    unsafe fn destroy_stream(&self, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuStreamDestroy_v2(stream as sys::Handle))
    }

    unsafe fn synchronize(&self, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuStreamSynchronize(stream as sys::Handle))
    }

    unsafe fn zero(&self, address: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuMemsetD8Async(address as u64, 0, bytes as usize, stream as sys::Handle))
    }

    unsafe fn copy_bytes(&self, from: *const u8, to: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes as usize, stream as sys::Handle))
    }

    unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from as u64, to.len()))
    }

    fn create_event(&self) -> Result<u64> {
        let _entered = self.enter()?;
        let mut event = std::ptr::null_mut();
        call!(cuEventCreate(&raw mut event, sys::EVENT_DEFAULT))?;
        Ok(event as u64)
    }

    unsafe fn destroy_event(&self, event: u64) {
        // An event that cannot be destroyed is gone: the driver has freed it with its context.
        let _ = self.enter().and_then(|_entered| call!(cuEventDestroy_v2(event as sys::Handle)));
    }

    unsafe fn record_event(&self, event: u64, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuEventRecord(event as sys::Handle, stream as sys::Handle))
    }

    unsafe fn wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuStreamWaitEvent(stream as sys::Handle, event as sys::Handle, 0))
    }

    unsafe fn synchronize_event(&self, event: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuEventSynchronize(event as sys::Handle))
    }

    /// The device's clock has a resolution of half a microsecond.
    unsafe fn seconds_between(&self, start: u64, stop: u64) -> Result<f64> {
        let _entered = self.enter()?;
        let mut milliseconds = 0.0f32;
        call!(cuEventElapsedTime(&raw mut milliseconds, start as sys::Handle, stop as sys::Handle))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    fn has_clock(&self) -> bool {
        !self.emulated
    }

    unsafe fn is_capturing(&self, stream: u64) -> Result<bool> {
        let _entered = self.enter()?;
        let mut status = sys::CAPTURE_STATUS_NONE;
        call!(cuStreamIsCapturing(stream as sys::Handle, &raw mut status))?;
        Ok(status != sys::CAPTURE_STATUS_NONE)
    }

    unsafe fn capture(&self, stream: u64, queue: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        let _entered = self.enter()?;
        let stream = stream as sys::Handle;
        call!(cuStreamBeginCapture_v2(stream, sys::CAPTURE_MODE_THREAD_LOCAL))?;
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        let ended = call!(cuStreamEndCapture(stream, &raw mut graph));
        queued.and(ended)?;
        let mut executable = std::ptr::null_mut();
        let instantiated = call!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        // The executable graph is a copy, so the recorded graph may be destroyed.
        call!(cuGraphDestroy(graph))?;
        instantiated?;
        Ok(executable as u64)
    }

    unsafe fn replay(&self, graph: u64, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuGraphLaunch(graph as sys::Handle, stream as sys::Handle))
    }

    unsafe fn destroy_graph(&self, graph: u64) {
        // A graph that cannot be destroyed is gone: the driver has freed it with its context.
        let _ = self.enter().and_then(|_entered| call!(cuGraphExecDestroy(graph as sys::Handle)));
    }
}

impl Peers for Device {
    fn export(&self, buffer: &DevBuffer) -> Result<[u8; 64]> {
        let _entered = self.enter()?;
        let mut name = sys::IpcHandle([0; 64]);
        call!(cuIpcGetMemHandle(&raw mut name, buffer.slice().as_ptr() as u64))?;
        Ok(name.0)
    }

    fn import(&self, name: &[u8; 64]) -> Result<u64> {
        let _entered = self.enter()?;
        let mut address = 0;
        call!(cuIpcOpenMemHandle_v2(&raw mut address, sys::IpcHandle(*name), sys::IPC_LAZY_PEER_ACCESS))?;
        Ok(address)
    }

    unsafe fn release(&self, address: u64) {
        // Memory that cannot be unmapped is gone: the driver has freed it with its context.
        let _ = self.enter().and_then(|_entered| call!(cuIpcCloseMemHandle(address)));
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: u64, stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream as sys::Handle))
    }

    unsafe fn words(&self, words: &[Word], stream: u64) -> Result<()> {
        let _entered = self.enter()?;
        for some in words.chunks(sys::MOST_MEM_OPS) {
            let mut ops: Vec<sys::MemOp> = some.iter().map(sys::MemOp::from).collect();
            call!(cuStreamBatchMemOp_v2(stream as sys::Handle, ops.len() as u32, ops.as_mut_ptr(), 0))?;
        }
        Ok(())
    }

    unsafe fn read_word(&self, at: u64, stream: u64) -> Result<u32> {
        let _entered = self.enter()?;
        let mut word = [0u8; 4];
        call!(cuMemcpyDtoHAsync_v2(word.as_mut_ptr().cast(), at, 4, stream as sys::Handle))?;
        call!(cuStreamSynchronize(stream as sys::Handle))?;
        Ok(u32::from_le_bytes(word))
    }
}
