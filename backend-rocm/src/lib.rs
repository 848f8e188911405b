//! The AMD backend: HIP found at run time, kernels on MFMA compiled at first use.
//!
//! Verified in emulation, never on hardware.
//!
//! [`open`] opens a device of the machine, or an emulated one; [`pretend`] plans and compiles for an architecture
//! without a device. The recipes are in `fmha-kernels-hip`; HIP's functions are called in `driver` alone.
//! Everything else is in `fmha-gpu`.

mod compile;
mod driver;
mod emulated;
mod kernels;
mod resources;

use std::sync::{Arc, OnceLock};

use fmha_core::cache::{self, ImageKind};
use fmha_core::{Device, Result};
use fmha_gpu::{Backend, Toolchain};

pub use crate::emulated::emulated_launches;
pub use crate::resources::Resources;
pub use fmha_kernels_hip::Arch;

use crate::compile::{COMPILE_OPTIONS, Compiler};
use crate::driver::{Driver, search};
use crate::kernels::Rocm;
use fmha_kernels_hip::DeviceFacts;

/// Opens device `ordinal` of the machine, or with `emulate` a device of the emulator, for the architectures
/// of [`Arch`]. The emulator's driver library lies in `FMHA_EMULATOR_DIR` or next to the program.
///
/// # Errors
/// [`Error::NoDevice`](fmha_core::Error::NoDevice) with every library that was tried, or the driver's text; a
/// bundle of `FMHA_BUNDLE` that is not complete.
pub fn open(ordinal: usize, emulate: Option<&str>) -> Result<Device> {
    let driver = match emulate {
        None => Driver::open(search::hip()?, ordinal, false)?,
        Some(arch) => emulated::open(Arch::from_gcn_name(arch)?, ordinal)?,
    };
    let info = driver.info()?;
    let emulated = if emulate.is_some() { ", emulated" } else { "" };
    let name = format!(
        "rocm:{ordinal} ({}, {}, {} compute units, HIP {}{emulated})",
        info.name, info.gcn_arch_name, info.num_compute_units, info.runtime_version
    );
    let facts =
        DeviceFacts::of::<Rocm>(&info.name, &info.gcn_arch_name, info.num_compute_units, emulate.is_some())?;
    backend(name, facts, Some(driver))
}

/// Makes a backend without a device: it plans for `arch`, one of [`Arch`]'s names, compiles if there is a compiler,
/// and runs nothing.
///
/// # Errors
/// [`Error::NoDevice`](fmha_core::Error::NoDevice) for an architecture without kernels; a bundle of `FMHA_BUNDLE`
/// that is not whole.
pub fn pretend(arch: &str) -> Result<Device> {
    let arch = Arch::from_gcn_name(arch)?;
    backend(format!("rocm ({}, no device)", arch.name()), DeviceFacts::stated(arch), None)
}

fn backend(name: String, facts: DeviceFacts, driver: Option<Driver>) -> Result<Device> {
    let of_arch = compile::options_of(facts.arch());
    let flags = COMPILE_OPTIONS.iter().chain(of_arch).map(|&flag| flag.to_owned()).collect();
    let (clang, driver) = (Installed::default(), driver.map(Arc::new));
    let backend: Backend<Rocm> = Backend::new(name, facts, clang, driver, (flags, ImageKind::Machine))?;
    Ok(Device::new(backend))
}

/// The compiler that is installed, a clang or hipRTC, once it has been searched for.
#[derive(Default)]
struct Installed(OnceLock<Compiler>);

impl Toolchain for Installed {
    fn compiler(&self) -> Result<&dyn cache::Compiler> {
        if let Some(compiler) = self.0.get() {
            return Ok(compiler);
        }
        let found = Compiler::find()?;
        Ok(self.0.get_or_init(|| found))
    }
}
