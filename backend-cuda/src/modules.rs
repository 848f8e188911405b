//! From a kernel's source to a loaded kernel: this process' memory, the disk, the compiler.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fmha_core::env;
use fmha_core::error::{Error, Result};
use fmha_core::source::{ENTRY, KernelSource};
use fmha_kernels_cuda::COMPILE_OPTIONS;

use crate::driver::{Device, Kernel};
use crate::nvrtc::nvrtc;

/// Kernels that this process has loaded, by what they were compiled from.
pub(crate) struct Modules {
    device: Arc<Device>,
    loaded: Mutex<HashMap<String, Arc<Kernel>>>,
    /// Whether the driver is the double, which reads PTX and no machine code.
    interprets: bool,
}

impl Modules {
    pub(crate) fn new(device: Arc<Device>, interprets: bool) -> Self {
        Self { device, loaded: Mutex::default(), interprets }
    }

    /// Whether kernels are interpreted.
    pub(crate) fn interprets(&self) -> bool {
        self.interprets
    }

    /// The kernel of a source, compiled at its first use.
    pub(crate) fn load(
        &self,
        name: &str,
        source: &KernelSource,
        arch: &str,
        smem_bytes: u32,
    ) -> Result<Arc<Kernel>> {
        let key = format!("{arch} {}\n{}", COMPILE_OPTIONS.join(" "), source.entry);
        // A panic elsewhere while the lock was held leaves a map that is still sound.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.get(&key) {
            return Ok(Arc::clone(kernel));
        }
        // An interpreter's reports name source lines.
        let more: &[&str] = if self.interprets { &["-lineinfo"] } else { &[] };
        let compiled = nvrtc()?.compile(source, arch, more).map_err(|log| Error::Compile {
            kernel: name.to_owned(),
            dumped: dump(name, source, &log),
            log,
        })?;
        let image = if self.interprets { &compiled.ptx } else { &compiled.cubin };
        let kernel = Arc::new(self.device.load(image, ENTRY, smem_bytes)?);
        loaded.insert(key, Arc::clone(&kernel));
        Ok(kernel)
    }
}

/// Writes a source that did not compile, and the compiler's words, where a reader can find them.
fn dump(name: &str, source: &KernelSource, log: &str) -> PathBuf {
    let folder =
        env::DUMP.get().map_or_else(|| std::env::temp_dir().join("fmha-dump"), PathBuf::from).join(name);
    let write = || -> std::io::Result<()> {
        for header in &source.headers {
            let path = folder.join(&*header.name);
            std::fs::create_dir_all(path.parent().unwrap_or(&folder))?;
            std::fs::write(path, &*header.text)?;
        }
        std::fs::write(folder.join("entry.cu"), &source.entry)?;
        std::fs::write(folder.join("log.txt"), log)
    };
    // The error that follows carries the log itself; a dump that fails must not hide it.
    let _ = write();
    folder
}
