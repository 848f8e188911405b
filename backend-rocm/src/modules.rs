//! What HIP adds to the cache of loaded kernels: a clang or hipRTC, and the driver's way to take an image.

use std::sync::OnceLock;

use fmha_core::Result;
use fmha_core::cache::{self, ImageKind, Loader, Target};
use fmha_core::source::ENTRY;
use fmha_kernels_hip::Arch;

use crate::compile::{COMPILE_OPTIONS, Compiler};
use crate::driver::{Driver, Function};

pub(crate) type Modules = cache::Modules<HipLoader>;
pub(crate) type Module = cache::Module<Function>;

/// Compiles with what is installed, and loads onto a device where there is one.
pub(crate) struct HipLoader {
    compiler: OnceLock<Compiler>,
    device: Option<Driver>,
}

impl Loader for HipLoader {
    type Kernel = Function;

    fn compiler(&self) -> Result<&dyn cache::Compiler> {
        if let Some(compiler) = self.compiler.get() {
            return Ok(compiler);
        }
        let found = Compiler::find()?;
        Ok(self.compiler.get_or_init(|| found))
    }

    /// Kernels here have no dynamic LDS.
    fn load(&self, image: &[u8], _lds_bytes: u32) -> Result<Option<Function>> {
        self.device.as_ref().map(|driver| driver.load(image, ENTRY)).transpose()
    }
}

/// No kernels yet.
///
/// # Errors
/// A bundle of `FMHA_BUNDLE` that is not whole.
pub(crate) fn modules(arch: Arch, device: Option<Driver>) -> Result<Modules> {
    let target = Target {
        arch: arch.name().to_owned(),
        flags: COMPILE_OPTIONS.iter().map(|&flag| flag.to_owned()).collect(),
        image: ImageKind::Machine,
    };
    Modules::from_env(target, HipLoader { compiler: OnceLock::new(), device })
}
