//! The CUDA backend of `fmha`: finds the driver and NVRTC at run time, and brings the recipes for NVIDIA's devices.
//!
//! [`open`] opens a device of the machine, or an emulated one; [`pretend`] plans and compiles for an architecture
//! without a device. Kernels and the recipes that choose them are `fmha-kernels-cuda`'s; `kernels` connects them to
//! this backend. Only `driver` calls the driver's functions. Everything else is in `fmha-gpu`. [`own`] compiles and
//! launches a caller's own kernels.

mod driver;
mod emulated;
mod kernels;
pub mod nvrtc;
pub mod own;
mod search;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use emulated::emulated_launches;

use fmha_core::cache::{Compiler, ImageKind};
use fmha_core::error::{Error, Result};
use fmha_core::tune::TunedTiles;
use fmha_core::{Device, Roofline};
use fmha_gpu::{Backend, Facts as _, Toolchain};
use fmha_kernels_cuda::COMPILE_OPTIONS;

use fmha_kernels_cuda::nvidia::{DeviceFacts, MatrixSums};
use kernels::Cuda;

/// Opens device `ordinal` through the driver; with `emulate` (`sm_90a`), the test double of a
/// device of that architecture, on which kernels are interpreted.
///
/// # Errors
/// [`Error::NoDevice`] if there is no driver, no such device, or no double; what the driver said; a bundle of
/// `FMHA_BUNDLE` that is not whole.
pub fn open(ordinal: usize, emulate: Option<&str>) -> Result<Device> {
    let emulated = match emulate {
        Some(arch) => {
            emulated::install(arch)?;
            true
        }
        None if emulated::is_installed() => {
            return Err(Error::NoDevice("this process runs on an emulated CUDA device".to_owned()));
        }
        None => false,
    };
    let device = Arc::new(driver::open(ordinal, emulated)?);
    let mut facts = DeviceFacts::of::<Cuda>(&device.info)?;
    if emulated {
        facts.tuned = TunedTiles::default();
        // The interpreter sums in f32, so the stricter bound holds there.
        facts.score_sums = MatrixSums::default();
        facts.roofline = Roofline { source: "emulated: it has no speed".to_owned(), ..Roofline::default() };
    }
    let emulated_words = if emulated { ", emulated" } else { "" };
    let name = format!("cuda:{ordinal} ({}, {}{emulated_words})", device.info.name, facts.arch);
    backend(name, facts, Some(device)).map(Device::new)
}

/// Makes a backend without a device: it plans, and compiles if there is a compiler, for `arch` (`sm_90a`, with an
/// H200's numbers), and runs nothing.
///
/// # Errors
/// [`Error::NoDevice`] for an architecture without known numbers; a bundle of `FMHA_BUNDLE` that is not whole.
pub fn pretend(arch: &str) -> Result<Device> {
    let facts = DeviceFacts::stated(arch)?;
    backend(format!("cuda ({arch}, no device)"), facts, None).map(Device::new)
}

fn backend(name: String, facts: DeviceFacts, device: Option<Arc<driver::Device>>) -> Result<Backend<Cuda>> {
    // Source lines serve profilers and the interpreter's reports. They leave the code unchanged, so a bundle's
    // kernels serve with or without them.
    let flags = COMPILE_OPTIONS.iter().chain(&["-lineinfo"]).map(|&flag| flag.to_owned()).collect();
    // The test double of the driver interprets PTX, and cannot run machine code.
    let interprets = device.as_ref().is_some_and(|device| device.emulated);
    let image = if interprets { ImageKind::Assembly } else { ImageKind::Machine };
    let driver = device.as_ref().map(|device| device.driver_version);
    let nvrtc = Nvrtc { arch: facts.arch().to_owned(), driver };
    Backend::new(name, facts, nvrtc, device, (flags, image))
}

/// The compiler for an architecture: the first one found whose output the driver accepts.
struct Nvrtc {
    arch: String,
    driver: Option<(i32, i32)>,
}

impl Toolchain for Nvrtc {
    fn compiler(&self) -> Result<&dyn Compiler> {
        Ok(nvrtc::suiting(&self.arch, self.driver)?)
    }
}
