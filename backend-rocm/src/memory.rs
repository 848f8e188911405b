//! Device memory for callers who have none of their own.

use fmha_core::cache::only_plans;
use fmha_core::{DevBuffer, DeviceMemory, MemorySpace, ProblemError, Result, Stream};

use crate::driver::Driver;

/// Memory of one device, or of none where the backend only pretends.
pub(crate) struct RocmMemory(pub(crate) Option<Driver>);

impl RocmMemory {
    pub(crate) fn driver(&self) -> Result<&Driver> {
        self.0.as_ref().ok_or_else(only_plans)
    }
}

impl DeviceMemory for RocmMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    fn checks_bounds(&self) -> bool {
        self.0.as_ref().is_some_and(Driver::emulated)
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        let driver = self.driver()?.clone();
        let address = driver.alloc(bytes)?;
        let free = Box::new(move |address| driver.free(address));
        // SAFETY: hipMalloc gave these bytes to us alone; `free` gives them back.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Device, address, bytes, free) })
    }

    fn upload(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        covers("to", bytes.len(), to)?;
        // SAFETY: `to` covers the bytes, and is borrowed alone: no queued work may use it.
        unsafe { self.driver()?.upload(bytes, to.as_ptr()) }
    }

    fn download(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        covers("from", bytes.len(), from)?;
        // SAFETY: `from` covers the bytes.
        unsafe { self.driver()?.download(from.as_ptr(), bytes) }
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.driver()?.synchronize(stream)
    }
}

fn covers(name: &'static str, bytes: usize, buffer: &DevBuffer) -> Result<()> {
    if bytes as u64 <= buffer.bytes() {
        return Ok(());
    }
    Err(ProblemError::new(name, format!("{name} has {} bytes, but {bytes} are copied", buffer.bytes()))
        .into())
}
