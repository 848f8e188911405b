//! Device memory for callers that do not allocate their own.

use std::sync::Arc;

use fmha_core::cache::only_plans;
use fmha_core::{DevBuffer, DeviceMemory, MemorySpace, ProblemError, Result};

use crate::driver::Driver;

/// Memory of one device; empty if a backend only plans and has no device.
pub(crate) struct Memory<D> {
    pub(crate) driver: Option<Arc<D>>,
}

impl<D: Driver> Memory<D> {
    fn driver(&self) -> Result<&Arc<D>> {
        self.driver.as_ref().ok_or_else(only_plans)
    }

    /// Fills the buffer with zeros, since safe code may read it and it may hold another process's data.
    fn cleared(&self, mut buffer: DevBuffer) -> Result<DevBuffer> {
        self.zero(&mut buffer)?;
        Ok(buffer)
    }
}

impl<D: Driver> DeviceMemory for Memory<D> {
    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    fn checks_bounds(&self) -> bool {
        self.driver.as_ref().is_some_and(|driver| driver.is_emulated())
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        // SAFETY: cleared before anybody has it.
        self.cleared(unsafe { self.alloc_uncleared(bytes) }?)
    }

    unsafe fn alloc_uncleared(&self, bytes: u64) -> Result<DevBuffer> {
        let driver = Arc::clone(self.driver()?);
        let address = driver.alloc(bytes)?;
        // SAFETY: `alloc` gave the address out, and the buffer gives it back once.
        let free = Box::new(move |address: *mut u8| unsafe { driver.free(address as u64) });
        // SAFETY: the driver gave this memory to this buffer alone, until `free`.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Device, address as *mut u8, bytes, free) })
    }

    fn alloc_at_edge(&self, bytes: u64, at_end: bool) -> Result<Option<DevBuffer>> {
        let driver = self.driver()?;
        if driver.is_emulated() {
            return Ok(None);
        }
        driver.alloc_at_edge(bytes, at_end)?.map(|buffer| self.cleared(buffer)).transpose()
    }

    fn upload_bytes(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        fits("to", bytes.len(), to)?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: `to` covers the bytes, and is borrowed alone: no queued work may use it.
        unsafe { self.driver()?.upload(bytes, to.as_ptr() as u64) }
    }

    fn zero(&self, buffer: &mut DevBuffer) -> Result<()> {
        fits("buffer", 0, buffer)?;
        if buffer.bytes() == 0 {
            return Ok(());
        }
        let driver = self.driver()?;
        // SAFETY: the buffer is borrowed alone, so no queued work may use it, and 0 is the default stream.
        unsafe {
            driver.zero(buffer.as_ptr(), buffer.bytes(), 0)?;
            driver.synchronize(0)
        }
    }

    fn download_bytes(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        fits("from", bytes.len(), from)?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: `from` covers the bytes.
        unsafe { self.driver()?.read(from.as_ptr(), bytes) }
    }
}

fn fits(name: &'static str, wanted: usize, buffer: &DevBuffer) -> Result<()> {
    let there = buffer.bytes();
    if buffer.space() != MemorySpace::Device {
        let text = format!("{name} of {there} bytes is host memory, and not a device's");
        return Err(ProblemError::new(name, text).into());
    }
    if wanted as u64 <= there {
        return Ok(());
    }
    Err(ProblemError::new(name, format!("{name} has {there} bytes, but {wanted} are to be copied")).into())
}
