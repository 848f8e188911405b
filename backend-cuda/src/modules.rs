//! From a kernel's source to a loaded kernel: this process' memory, then the cache of `fmha-core`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fmha_core::cache::{Cache, CompiledKernel, ImageKind, KernelJob, Origin, SourceKey};
use fmha_core::error::{Error, Result};
use fmha_core::source::{ENTRY, KernelSource};
use fmha_kernels_cuda::COMPILE_OPTIONS;

use crate::driver::{Device, Kernel};
use crate::nvrtc::nvrtc;

/// Kernels that this process has, by what they were compiled from.
pub(crate) struct Modules {
    arch: String,
    /// Where they are loaded; none where a backend only plans.
    device: Option<Arc<Device>>,
    cache: Cache,
    /// The double of the driver reads PTX and no machine code.
    image: ImageKind,
    modules: Mutex<HashMap<(SourceKey, u32), Arc<Module>>>,
}

/// A compiled kernel, loaded where there is a device.
pub(crate) struct Module {
    pub(crate) compiled: Arc<CompiledKernel>,
    pub(crate) origin: Origin,
    loaded: Option<Kernel>,
}

impl Module {
    /// What can be launched.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there is no device.
    pub(crate) fn loaded(&self) -> Result<&Kernel> {
        self.loaded.as_ref().ok_or_else(no_device)
    }
}

/// A backend that only plans was asked for more.
pub(crate) fn no_device() -> Error {
    Error::NoDevice("this backend only plans: it has no device".to_owned())
}

impl Modules {
    /// # Errors
    /// A bundle of `FMHA_BUNDLE` that is not whole.
    pub(crate) fn new(arch: &str, device: Option<Arc<Device>>, interprets: bool) -> Result<Self> {
        let image = if interprets { ImageKind::Assembly } else { ImageKind::Machine };
        Ok(Self {
            arch: arch.to_owned(),
            device,
            cache: Cache::from_env()?,
            image,
            modules: Mutex::default(),
        })
    }

    /// What is compiled for a source.
    pub(crate) fn job(&self, kernel: &'static str, source: KernelSource) -> KernelJob {
        let flags = COMPILE_OPTIONS.iter().map(|&option| option.to_owned()).collect();
        KernelJob { kernel, arch: self.arch.clone(), flags, source, image: self.image }
    }

    /// Finds or compiles.
    pub(crate) fn compile(&self, job: &KernelJob) -> Result<(Arc<CompiledKernel>, Origin)> {
        self.cache.get(job, nvrtc)
    }

    /// The kernel of a source, found or compiled at its first use, launched with `smem_bytes` of
    /// dynamic shared memory.
    pub(crate) fn load(
        &self,
        kernel: &'static str,
        source: KernelSource,
        smem_bytes: u32,
    ) -> Result<Arc<Module>> {
        let job = self.job(kernel, source);
        let key = (job.key(), smem_bytes);
        // A panic elsewhere while the lock was held leaves a map that is still sound.
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&key) {
            return Ok(Arc::clone(module));
        }
        let (compiled, origin) = self.compile(&job)?;
        let loaded = match (&self.device, compiled.image(self.image)) {
            (Some(device), Some(image)) => Some(device.load(image, ENTRY, smem_bytes)?),
            _ => None,
        };
        let module = Arc::new(Module { compiled, origin, loaded });
        modules.insert(key, Arc::clone(&module));
        Ok(module)
    }
}
