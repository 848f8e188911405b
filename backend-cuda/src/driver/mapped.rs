//! Device memory next to unmapped addresses: an access past it stops the launch (CUDA Driver API, "Virtual
//! Memory Management"). For tests: each allocation takes megabytes.

use std::sync::Arc;

use fmha_core::error::Result;

use super::{Device, check, lacking, sys};

/// Alignment of the memory. Kernels and copies work with it as with any larger alignment.
const ALIGN: u64 = 16;

/// A mapped range between two reserved, unmapped ones; dropping it releases all three.
#[derive(Debug)]
pub(crate) struct Mapped {
    device: Arc<Device>,
    /// Start of the reserved range: a granule, the mapped range, a granule.
    base: u64,
    granule: u64,
    mapped_bytes: u64,
    /// The memory behind the mapped range, once it is mapped.
    handle: Option<sys::MemoryHandle>,
    /// Address of the allocated bytes.
    pub(crate) address: u64,
}

impl Mapped {
    /// Allocates `bytes` that begin, or with `at_end` end, at unmapped addresses. Up to 15 unused bytes may follow
    /// the end, so that the first byte is aligned.
    ///
    /// # Errors
    /// An error of the driver.
    pub(crate) fn new(device: &Arc<Device>, bytes: u64, at_end: bool) -> Result<Self> {
        let _entered = device.enter()?;
        let location = sys::MemLocation { kind: sys::MEM_LOCATION_DEVICE, id: device.handle };
        let prop = sys::MemAllocationProp {
            kind: sys::MEM_ALLOCATION_PINNED,
            handle_types: 0,
            location,
            win32_metadata: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let mut granule = 0;
        call!(cuMemGetAllocationGranularity(
            &raw mut granule,
            &raw const prop,
            sys::MEM_GRANULARITY_MINIMUM
        ))?;
        let mapped_bytes = bytes.max(1).next_multiple_of(granule as u64);
        let reserved = mapped_bytes as usize + 2 * granule;
        let mut base = 0;
        call!(cuMemAddressReserve(&raw mut base, reserved, 0, 0, 0))?;
        let first = base + granule as u64;
        let address = if at_end { (first + mapped_bytes - bytes) / ALIGN * ALIGN } else { first };
        let device = Arc::clone(device);
        // From here on, dropping the value releases what has been made so far.
        let mut mapped = Self { device, base, granule: granule as u64, mapped_bytes, handle: None, address };
        let mut handle = 0;
        call!(cuMemCreate(&raw mut handle, mapped_bytes as usize, &raw const prop, 0))?;
        if let Err(error) = call!(cuMemMap(first, mapped_bytes as usize, 0, handle, 0)) {
            let _ = call!(cuMemRelease(handle));
            return Err(error);
        }
        mapped.handle = Some(handle);
        let access = sys::MemAccessDesc { location, flags: sys::MEM_ACCESS_READWRITE };
        call!(cuMemSetAccess(first, mapped_bytes as usize, &raw const access, 1))?;
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Memory that cannot be released is gone: the driver has freed it with its context.
        let Ok(_entered) = self.device.enter() else { return };
        if let Some(handle) = self.handle {
            let _ = call!(cuMemUnmap(self.base + self.granule, self.mapped_bytes as usize));
            let _ = call!(cuMemRelease(handle));
        }
        let _ = call!(cuMemAddressFree(self.base, (self.mapped_bytes + 2 * self.granule) as usize));
    }
}
