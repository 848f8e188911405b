//! Device memory beside addresses where nothing is mapped: an access past it stops the launch (CUDA Driver API,
//! "Virtual Memory Management"). For tests: each allocation takes megabytes.

use std::ffi::c_int;
use std::sync::Arc;

use fmha_core::error::Result;

use super::{Device, check, sys};

/// Kernels and copies take addresses of this alignment as they take any greater one.
const ALIGN: u64 = 16;

/// A mapped range between two that are reserved and stay unmapped; all of it goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Mapped {
    device: Arc<Device>,
    /// What is reserved: a granule, the mapped range, a granule.
    base: u64,
    granule: u64,
    mapped_bytes: u64,
    /// The memory behind the mapped range, once it is mapped.
    handle: Option<sys::CUmemGenericAllocationHandle>,
    /// The address of the bytes that were asked for.
    pub(crate) address: u64,
}

impl Mapped {
    /// `bytes` that end (`at_end`; but for less than 16 bytes that keep the first one aligned) or begin where nothing is
    /// mapped.
    ///
    /// # Errors
    /// What the driver said.
    pub(crate) fn new(device: &Arc<Device>, bytes: u64, at_end: bool) -> Result<Self> {
        let _entered = device.enter()?;
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: device.handle as c_int,
        };
        let prop = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut granule = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        call!(cuMemGetAllocationGranularity(&raw mut granule, &raw const prop, minimum))?;
        let mapped_bytes = bytes.max(1).next_multiple_of(granule as u64);
        let reserved = mapped_bytes as usize + 2 * granule;
        let mut base = 0;
        call!(cuMemAddressReserve(&raw mut base, reserved, 0, 0, 0))?;
        let first = base + granule as u64;
        let address = if at_end { (first + mapped_bytes - bytes) / ALIGN * ALIGN } else { first };
        let device = Arc::clone(device);
        // From here on, dropping it gives back what there is.
        let mut mapped = Self { device, base, granule: granule as u64, mapped_bytes, handle: None, address };
        let mut handle = 0;
        call!(cuMemCreate(&raw mut handle, mapped_bytes as usize, &raw const prop, 0))?;
        if let Err(error) = call!(cuMemMap(first, mapped_bytes as usize, 0, handle, 0)) {
            let _ = call!(cuMemRelease(handle));
            return Err(error);
        }
        mapped.handle = Some(handle);
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        call!(cuMemSetAccess(first, mapped_bytes as usize, &raw const access, 1))?;
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // What cannot be given back went with its context.
        let Ok(_entered) = self.device.enter() else { return };
        if let Some(handle) = self.handle {
            let _ = call!(cuMemUnmap(self.base + self.granule, self.mapped_bytes as usize));
            let _ = call!(cuMemRelease(handle));
        }
        let _ = call!(cuMemAddressFree(self.base, (self.mapped_bytes + 2 * self.granule) as usize));
    }
}
