//! Kernels that a process has loaded on one device, for any vendor.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Cache, CompiledKernel, Compiler, ImageKind, KernelJob, Origin, SourceKey};
use crate::error::{Error, Result};
use crate::source::KernelSource;

/// A vendor's part of the cache of loaded kernels: its compiler, and how its driver loads a kernel.
pub trait Loader: Send + Sync {
    /// A kernel on the device.
    type Kernel: Send + Sync;

    /// The compiler, which is searched for when the first kernel is compiled.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with every place that was looked at.
    fn compiler(&self) -> Result<&dyn Compiler>;

    /// Loads a kernel to the device, to be launched with `shared_bytes` of dynamic shared memory; `None` if a backend
    /// has no device and only plans.
    ///
    /// # Errors
    /// An error of the driver about the image.
    fn load(&self, image: &[u8], shared_bytes: u32) -> Result<Option<Self::Kernel>>;
}

/// Properties that all kernels of one device share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The architecture, as its compiler spells it.
    pub arch: String,
    /// Options that change the code, apart from the architecture.
    pub flags: Vec<String>,
    /// Kind of output that the device runs.
    pub image: ImageKind,
}

/// The kernels that this process has for one device, by the source that each was compiled from.
pub struct Modules<L: Loader> {
    target: Target,
    loader: L,
    cache: Cache,
    loaded: Mutex<Loaded<L::Kernel>>,
    slots: Mutex<Slots<L::Kernel>>,
}

/// Loaded kernels by bytes of dynamic shared memory and by the text of the entry, which contains the kernel's name,
/// its spec and its tile. A plan finds its kernel here without rendering a header.
type Loaded<K> = HashMap<u32, HashMap<String, Arc<Module<K>>>>;

/// Slots by key and bytes of dynamic shared memory.
type Slots<K> = HashMap<(SourceKey, u32), Arc<Slot<K>>>;

/// Place of a kernel, filled by the first thread that needs it; other threads that need this kernel wait meanwhile.
type Slot<K> = Mutex<Option<Arc<Module<K>>>>;

/// A compiled kernel; it is also loaded if there is a device.
#[derive(Debug)]
pub struct Module<K> {
    /// Output of the compiler.
    pub compiled: Arc<CompiledKernel>,
    /// Source of the compiled kernel.
    pub origin: Origin,
    kernel: Option<K>,
}

impl<K> Module<K> {
    /// Loaded kernel, ready to launch.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where a backend only plans.
    pub fn loaded(&self) -> Result<&K> {
        self.kernel.as_ref().ok_or_else(only_plans)
    }
}

/// [`Error::NoDevice`] for a backend that can only plan and was asked to run.
#[must_use]
pub fn only_plans() -> Error {
    Error::NoDevice("this backend only plans: it has no device".to_owned())
}

impl<L: Loader> Modules<L> {
    /// Makes an empty set of kernels; they will come from the bundles, the disk and the compiler of
    /// [`Cache::from_env`].
    ///
    /// # Errors
    /// A bundle of `FMHA_BUNDLE` that is not whole.
    pub fn from_env(target: Target, loader: L) -> Result<Self> {
        Ok(Self::new(target, loader, Cache::from_env()?))
    }

    /// Makes an empty set of kernels; they will come from `cache`.
    #[must_use]
    pub fn new(target: Target, loader: L, cache: Cache) -> Self {
        Self { target, loader, cache, loaded: Mutex::default(), slots: Mutex::default() }
    }

    /// Whether the cache has bundles: see [`Cache::has_bundles`].
    #[must_use]
    pub fn has_bundles(&self) -> bool {
        self.cache.has_bundles()
    }

    /// Compilation job for a source.
    pub fn job(&self, kernel: &'static str, source: KernelSource) -> KernelJob {
        let Target { arch, flags, image } = self.target.clone();
        KernelJob { kernel, arch, flags, source, image }
    }

    /// Finds or compiles the kernel of a job without loading it.
    ///
    /// # Errors
    /// An error of the compiler, or no compiler and no bundle with the kernel.
    pub fn compile(&self, job: &KernelJob) -> Result<(Arc<CompiledKernel>, Origin)> {
        self.cache.get(job, || self.loader.compiler())
    }

    /// The kernel of a source, found or compiled at its first use, to be launched with `shared_bytes` of
    /// dynamic shared memory.
    ///
    /// # Errors
    /// As [`compile`](Self::compile) and [`Loader::load`].
    pub fn load(
        &self,
        kernel: &'static str,
        source: KernelSource,
        shared_bytes: u32,
    ) -> Result<Arc<Module<L::Kernel>>> {
        if let Some(module) = self.loaded(&source, shared_bytes) {
            return Ok(module);
        }
        let job = self.job(kernel, source);
        let module = self.find(&job, shared_bytes)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.entry(shared_bytes).or_default().insert(job.source.entry, Arc::clone(&module));
        Ok(module)
    }

    /// The kernel of a source that this process has loaded already, to be launched with `shared_bytes` of dynamic
    /// shared memory.
    pub fn loaded(&self, source: &KernelSource, shared_bytes: u32) -> Option<Arc<Module<L::Kernel>>> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.get(&shared_bytes)?.get(&source.entry).map(Arc::clone)
    }

    fn find(&self, job: &KernelJob, shared_bytes: u32) -> Result<Arc<Module<L::Kernel>>> {
        // A panic in another thread that held a lock leaves the map and the slot valid, so a poisoned lock is
        // ignored.
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry((job.key(), shared_bytes)).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*slot {
            return Ok(Arc::clone(module));
        }
        let (compiled, origin) = self.compile(job)?;
        let image = compiled.image(self.target.image).ok_or_else(|| Error::System {
            what: format!("kernel {} for {}", compiled.kernel, compiled.arch),
            text: format!("{} left no {}", compiled.compiler, self.target.image),
        })?;
        let kernel = self.loader.load(image, shared_bytes)?;
        Ok(Arc::clone(slot.insert(Arc::new(Module { compiled, origin, kernel }))))
    }
}
