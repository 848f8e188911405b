//! A caller's own kernels: compiled by the library's NVRTC, stored in its cache, launched on its device. For
//! examples and measurements. The arguments of a kernel are not checked.

use std::ffi::c_void;
use std::sync::Arc;

use fmha_core::cache::{Cache, ImageKind, KernelJob};
use fmha_core::error::{Error, Result};
use fmha_core::source::{ENTRY, KernelSource};
use fmha_core::{DType, ResourceUsage, Stream};
use fmha_gpu::{Facts as _, Grid};
use fmha_kernels_cuda::COMPILE_OPTIONS;
use fmha_kernels_cuda::nvidia::DeviceFacts;
use fmha_kernels_cuda::tma::TensorMapFacts;

use crate::driver::{Device, Kernel};
use crate::kernels::Cuda;
use crate::{driver, emulated, nvrtc};

pub use fmha_kernels_cuda::tma::TensorMap;

/// A device for which a caller's kernels are compiled and on which they are launched.
pub struct OwnKernels {
    device: Arc<Device>,
    arch: String,
    cache: Cache,
}

/// A compiled kernel on its device.
pub struct OwnKernel {
    kernel: Kernel,
    threads: u32,
    /// Resources of the kernel, as the compiler reports them.
    pub resources: ResourceUsage,
}

/// A tensor of four axes with the box that TMA copies; axis 0 is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorBox {
    /// Type of the tensor: f16 or bf16.
    pub dtype: DType,
    /// Address of the buffer on the device: a multiple of 16.
    pub address: u64,
    /// Extents, from axis 0.
    pub dims: [u64; 4],
    /// Strides in bytes, from axis 1: multiples of 16.
    pub strides_bytes: [u64; 3],
    /// Extents of the box in elements, from axis 0 on, each at most 256. Axis 0 has 32, 64 or 128 bytes, the span
    /// of the swizzle.
    pub box_dims: [u32; 4],
}

impl OwnKernels {
    /// Opens device `ordinal`, or with `emulate` the double of that architecture, as [`open`](crate::open) does.
    ///
    /// # Errors
    /// As [`open`](crate::open).
    pub fn open(ordinal: usize, emulate: Option<&str>) -> Result<Self> {
        if let Some(arch) = emulate {
            emulated::install(arch)?;
        }
        let device = Arc::new(driver::open(ordinal, emulate.is_some())?);
        let arch = DeviceFacts::of::<Cuda>(&device.info)?.arch().to_owned();
        Ok(Self { device, arch, cache: Cache::from_env()? })
    }

    /// The architecture for which kernels are compiled, such as `sm_90a`.
    #[must_use]
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// Dynamic shared memory that a CTA may have, bytes.
    #[must_use]
    pub fn smem_bytes(&self) -> u32 {
        self.device.info.smem_bytes
    }

    /// Compiles a source, or finds it in the cache, to be launched with `threads` per CTA and `smem_bytes` of
    /// dynamic shared memory.
    ///
    /// # Errors
    /// An error of the compiler, or no compiler; more shared memory than a CTA may have; an error of the driver.
    pub fn load(
        &self,
        name: &'static str,
        source: KernelSource,
        threads: u32,
        smem_bytes: u32,
    ) -> Result<OwnKernel> {
        if smem_bytes > self.device.info.smem_bytes {
            let most = self.device.info.smem_bytes;
            return Err(Error::NoDevice(format!(
                "{name} takes {smem_bytes} bytes of shared memory; a CTA of {} has {most}",
                self.device.info.name
            )));
        }
        let emulated = self.device.emulated;
        let job = KernelJob {
            kernel: name,
            arch: self.arch.clone(),
            flags: COMPILE_OPTIONS.iter().map(|&flag| flag.to_owned()).collect(),
            source,
            image: if emulated { ImageKind::Assembly } else { ImageKind::Machine },
        };
        let version = (!emulated).then_some(self.device.driver_version);
        let (compiled, _) = self.cache.get(&job, || nvrtc::suiting(&self.arch, version))?;
        let image = compiled.image(job.image).ok_or_else(|| Error::System {
            what: format!("kernel {name} for {}", self.arch),
            text: format!("{} left no {}", compiled.compiler, job.image),
        })?;
        let kernel = self.device.load(image, ENTRY, smem_bytes)?;
        Ok(OwnKernel { kernel, threads, resources: compiled.resources })
    }

    /// The tensor map of a tensor, to be passed as a parameter of the caller's kernel.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn tensor_map(&self, name: &'static str, tensor: TensorBox) -> Result<TensorMap> {
        let TensorBox { dtype, address, dims, strides_bytes, box_dims } = tensor;
        let _entered = self.device.enter()?;
        TensorMapFacts { name, dtype, address, dims, strides_bytes, box_dims }.encode::<Device>()
    }

    /// Queues a launch of `ctas` CTAs of a kernel.
    ///
    /// # Safety
    /// The kernel and the stream are this device's. `arguments` point to the kernel's parameters, in order and of
    /// their types, and the kernel accesses only memory that lives until the launch has completed.
    ///
    /// # Errors
    /// An error of the driver.
    pub unsafe fn launch(
        &self,
        kernel: &OwnKernel,
        ctas: u32,
        arguments: &mut [*mut c_void],
        stream: &Stream,
    ) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { kernel.kernel.launch(Grid::new(ctas, kernel.threads), arguments, stream.as_raw()) }
    }
}
