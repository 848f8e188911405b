//! The recipes, a family for each operation, and what they know of a device. What each accepts, its tile, its entry and
//! its grid stand beside the device text, in `fmha-kernels-hip`.

mod cdna;
mod cdna_bwd;
mod cdna_decode;
mod combine;
mod rdna;
mod simt;
mod simt_bwd;
mod update;

use fmha_core::tune::TunedTiles;
use fmha_core::{DType, ResourceUsage, Result, Roofline, ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{Facts, Family, Grid, Kernel, Launch, Vendor, tuned_kernels};
use fmha_kernels_hip::{self as text, Arch, Device};

use crate::Installed;
use crate::driver::{DeviceInfo, Driver};
use cdna::Cdna;
use cdna_bwd::CdnaBwd;
use cdna_decode::CdnaDecode;
use combine::Merge;
use rdna::Rdna;
use simt::Simt;
use simt_bwd::SimtBwd;

/// AMD's seat.
pub(crate) struct Rocm;

impl Vendor for Rocm {
    const KIND: &'static str = "rocm";

    type Driver = Driver;
    type Toolchain = Installed;
    type Facts = DeviceFacts;
}

impl Family<ValidFwd> for Rocm {
    fn recipes() -> Vec<Kernel<ValidFwd, Self>> {
        vec![
            Kernel::new(CdnaDecode::default()),
            Kernel::new(Cdna::default()),
            Kernel::new(Rdna::default()),
            Kernel::new(Simt::default()),
        ]
    }
}

impl Family<ValidBwd> for Rocm {
    fn recipes() -> Vec<Kernel<ValidBwd, Self>> {
        vec![Kernel::new(CdnaBwd::default()), Kernel::new(SimtBwd::default())]
    }
}

impl Family<ValidCombine> for Rocm {
    fn recipes() -> Vec<Kernel<ValidCombine, Self>> {
        vec![Kernel::new(Merge::default())]
    }
}

pub(crate) type Steps = fmha_gpu::Steps<Driver>;

/// What a choice depends on besides the problem.
pub(crate) struct DeviceFacts {
    pub(crate) device: Device,
    pub(crate) tuned: TunedTiles,
}

impl DeviceFacts {
    /// What the driver says of a device; an emulated one has no tiles of its own.
    ///
    /// # Errors
    /// [`Error::NoDevice`](fmha_core::Error::NoDevice) for an architecture that the kernels do not know; a value of
    /// `FMHA_CACHE_DIR` that is not UTF-8.
    pub(crate) fn of(info: &DeviceInfo, emulated: bool) -> Result<Self> {
        let arch = Arch::from_gcn_name(&info.gcn_arch_name)?;
        let num_compute_units = info.num_compute_units;
        let tuned = if emulated {
            TunedTiles::default()
        } else {
            // What tiles are kept for.
            let device = format!("{}, {}, {num_compute_units} compute units", info.name, arch.name());
            TunedTiles::load(&device, &tuned_kernels::<Rocm>(), &text::headers())?
        };
        Ok(Self { device: Device { arch, num_compute_units }, tuned })
    }

    /// An architecture without a device.
    pub(crate) fn stated(arch: Arch) -> Self {
        let device = Device { arch, num_compute_units: arch.num_compute_units() };
        Self { device, tuned: TunedTiles::default() }
    }
}

impl Facts for DeviceFacts {
    fn arch(&self) -> &str {
        self.device.arch.name()
    }

    fn roofline(&self, dtype: DType) -> Roofline {
        self.device.arch.roofline(dtype)
    }

    fn tuned(&self) -> &TunedTiles {
        &self.tuned
    }
}

/// A launch of which nothing is known but its workgroups: what a compiled kernel takes of a compute unit says how many
/// of them there are room for.
fn launch(
    kernel: &'static str,
    source: fmha_core::source::KernelSource,
    groups: u64,
    threads: u32,
) -> Launch {
    // A recipe refuses problems of more workgroups.
    let grid = Grid::new(u32::try_from(groups).unwrap_or(u32::MAX), threads);
    Launch { kernel, source, grid, shared_bytes: 0, tiles: groups, tiles_at_once: 1 }
}

/// Of a kernel whose workgroups have one piece of work each.
fn lay_out(device: Option<Device>, launch: &mut Launch, usage: Option<&ResourceUsage>) {
    if let Some(device) = device {
        launch.tiles_at_once =
            device.grid(usage, launch.grid.groups.into(), launch.grid.threads).tiles_at_once;
    }
}
