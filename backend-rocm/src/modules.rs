//! From a kernel's source to a loaded kernel: this process' memory, then the cache of `fmha-core`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fmha_core::Result;
use fmha_core::cache::{Cache, CompiledKernel, ImageKind, KernelJob, Origin};
use fmha_core::source::{ENTRY, KernelSource};

use crate::arch::Arch;
use crate::compile::{COMPILE_OPTIONS, Compiler};
use crate::driver::{Driver, Function};

/// A compiled kernel, loaded where there is a device.
pub(crate) struct Module {
    pub(crate) compiled: Arc<CompiledKernel>,
    pub(crate) origin: Origin,
    pub(crate) function: Option<Function>,
}

/// A kernel, once somebody has compiled it; whoever wants the same one meanwhile waits.
type Slot = Mutex<Option<Arc<Module>>>;

/// Kernels that this process has, by entry text: the headers are the same for all.
pub(crate) struct Modules {
    arch: Arch,
    cache: Cache,
    compiler: OnceLock<Compiler>,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
}

impl Modules {
    /// # Errors
    /// A bundle of `FMHA_BUNDLE` that is not whole.
    pub(crate) fn new(arch: Arch) -> Result<Self> {
        Ok(Self { arch, cache: Cache::from_env()?, compiler: OnceLock::new(), slots: Mutex::default() })
    }

    fn compiler(&self) -> Result<&Compiler> {
        if let Some(compiler) = self.compiler.get() {
            return Ok(compiler);
        }
        let found = Compiler::find()?;
        Ok(self.compiler.get_or_init(|| found))
    }

    /// What is compiled for a source.
    pub(crate) fn job(&self, kernel: &'static str, source: KernelSource) -> KernelJob {
        let flags = COMPILE_OPTIONS.iter().map(|&option| option.to_owned()).collect();
        KernelJob { kernel, arch: self.arch.name().to_owned(), flags, source, image: ImageKind::Machine }
    }

    /// Finds or compiles.
    ///
    /// # Errors
    /// What the compiler said, or that there is none.
    pub(crate) fn compile(&self, job: &KernelJob) -> Result<(Arc<CompiledKernel>, Origin)> {
        self.cache.get(job, || self.compiler())
    }

    /// Finds or compiles, and loads onto `device`.
    ///
    /// # Errors
    /// What the compiler or the driver said.
    pub(crate) fn load(
        &self,
        kernel: &'static str,
        source: KernelSource,
        device: Option<&Driver>,
    ) -> Result<Arc<Module>> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(source.entry.clone()).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*slot {
            return Ok(Arc::clone(module));
        }
        let (compiled, origin) = self.compile(&self.job(kernel, source))?;
        let function = device.map(|driver| driver.load(&compiled.machine, ENTRY)).transpose()?;
        Ok(Arc::clone(slot.insert(Arc::new(Module { compiled, origin, function }))))
    }
}
