//! What CUDA adds to the cache of loaded kernels: NVRTC, and the driver's way to take an image.

use std::sync::Arc;

use fmha_core::cache::{self, Compiler, ImageKind, Loader, Target};
use fmha_core::error::Result;
use fmha_core::source::ENTRY;
use fmha_kernels_cuda::COMPILE_OPTIONS;

use crate::driver::{Device, Kernel};
use crate::nvrtc;

pub(crate) type Modules = cache::Modules<CudaLoader>;
pub(crate) type Module = cache::Module<Kernel>;

/// Compiles for one architecture, and loads onto its device where there is one.
pub(crate) struct CudaLoader {
    arch: String,
    device: Option<Arc<Device>>,
}

impl Loader for CudaLoader {
    type Kernel = Kernel;

    fn compiler(&self) -> Result<&dyn Compiler> {
        let driver = self.device.as_ref().map(|device| device.driver_version);
        Ok(nvrtc::suiting(&self.arch, driver)?)
    }

    fn load(&self, image: &[u8], smem_bytes: u32) -> Result<Option<Kernel>> {
        self.device.as_ref().map(|device| device.load(image, ENTRY, smem_bytes)).transpose()
    }
}

/// No kernels yet. The double of the driver (`interprets`) reads PTX and no machine code.
///
/// # Errors
/// A bundle of `FMHA_BUNDLE` that is not whole.
pub(crate) fn modules(arch: &str, device: Option<Arc<Device>>, interprets: bool) -> Result<Modules> {
    // Source lines for profilers and for the interpreter's reports: the code stays the same, and so a
    // bundle's kernel serves both.
    let flags = COMPILE_OPTIONS.iter().chain(&["-lineinfo"]).map(|&flag| flag.to_owned()).collect();
    let image = if interprets { ImageKind::Assembly } else { ImageKind::Machine };
    let target = Target { arch: arch.to_owned(), flags, image };
    Modules::from_env(target, CudaLoader { arch: arch.to_owned(), device })
}
