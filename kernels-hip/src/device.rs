//! Facts of a device on which the choice of kernel and tile depends, and how many workgroups the device holds.

use fmha_core::source::{KernelSource, Literal};
use fmha_core::tune::TunedTiles;
use fmha_core::{DType, Refusal, ResourceUsage, Result, Roofline};
use fmha_gpu::{Facts, Launch, RowKernel, Stage, Vendor, tuned_kernels};

use crate::arch::Arch;
use crate::rows::row_launch;

macro_rules! refuse {
    ($kernel:expr, $($reason:tt)+) => {
        return Err(fmha_core::Refusal::new($kernel, format!($($reason)+)))
    };
}
pub(crate) use refuse;

/// Facts of a device that choices depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    /// Architecture of the device.
    pub(crate) arch: Arch,
    /// Number of compute units.
    pub(crate) num_compute_units: u32,
}

impl Device {
    /// Number of workgroups of this many threads that the device holds at a time, for a kernel with these
    /// resources.
    pub(crate) fn workgroups_at_once(&self, usage: Option<&ResourceUsage>, threads: u32) -> u64 {
        let per_compute_unit = usage.map_or(1, |usage| self.arch.workgroups_per_compute_unit(usage, threads));
        (self.num_compute_units * per_compute_unit).into()
    }
}

/// A backend whose device facts are those that this crate's kernels need.
pub trait Amd: Vendor<Facts = DeviceFacts> {}

impl<V: Vendor<Facts = DeviceFacts>> Amd for V {}

/// Facts of a device that choices depend on.
pub struct DeviceFacts {
    /// The device.
    pub(crate) device: Device,
    /// Measured tiles of the device.
    pub(crate) tuned: TunedTiles,
}

impl DeviceFacts {
    /// The architecture, from which the compiler's options follow.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.device.arch
    }

    /// Facts of a device called `name`, of an architecture as HIP names it; an emulated device has no tiles
    /// of its own.
    ///
    /// # Errors
    /// [`Error::NoDevice`](fmha_core::Error::NoDevice) for an architecture without kernels; a value of
    /// `FMHA_CACHE_DIR` that is not UTF-8.
    pub fn of<V: Amd>(
        name: &str,
        gcn_arch_name: &str,
        num_compute_units: u32,
        emulated: bool,
    ) -> Result<Self> {
        let arch = Arch::from_gcn_name(gcn_arch_name)?;
        let tuned = if emulated {
            TunedTiles::default()
        } else {
            // The device name under which measured tiles are stored.
            let device = format!("{}, {}, {num_compute_units} compute units", name, arch.name());
            TunedTiles::load(&device, &tuned_kernels::<V>(), &crate::headers())?
        };
        Ok(Self { device: Device { arch, num_compute_units }, tuned })
    }

    /// An architecture without a device.
    #[must_use]
    pub fn stated(arch: Arch) -> Self {
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

    fn row_group(&self) -> (&'static str, u32) {
        ("a wave", self.device.arch.wave_threads())
    }

    fn groups_at_once(&self) -> u32 {
        self.device.num_compute_units
    }

    fn row_launch(
        &self,
        at: (Stage, &'static str),
        kernel: RowKernel,
        spec: &dyn Literal,
        rows: [u64; 2],
    ) -> Result<Launch, String> {
        row_launch(self.device, at, kernel, spec, rows)
    }

    /// Adjusts the launch of a kernel whose workgroups have one work item each.
    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        launch.tiles_at_once = self.device.workgroups_at_once(usage, launch.grid.threads);
    }
}

/// A launch described only by its workgroups: how many run at a time follows later from the compiled kernel's
/// resources.
pub(crate) fn launch(
    stage: Stage,
    kernel: &'static str,
    source: KernelSource,
    groups: u64,
    threads: u32,
) -> Launch {
    // Recipes have already refused problems that need more workgroups.
    let grid = fmha_gpu::Grid::new(u32::try_from(groups).unwrap_or(u32::MAX), threads);
    Launch { stage, kernel, source, grid, shared_bytes: 0, tiles: groups, tiles_at_once: 1 }
}

/// Checks that the architecture has the kernel's matrix unit: WMMA on RDNA, MFMA on CDNA.
///
/// # Errors
/// The architecture.
pub(crate) fn needs_unit(arch: Arch, is_wmma: bool) -> Result<(), String> {
    match (is_wmma, arch.is_rdna()) {
        (true, false) => Err(format!("{} has no WMMA", arch.name())),
        (false, true) => Err(format!("{} has no MFMA: not on RDNA", arch.name())),
        _ => Ok(()),
    }
}

/// Checks that a kernel on MFMA runs on a CDNA device.
///
/// # Errors
/// The architecture.
pub(crate) fn needs_mfma(arch: Arch, kernel: &'static str) -> Result<(), Refusal> {
    needs_unit(arch, false).map_err(|why| Refusal::new(kernel, why))
}

/// Checks that a kernel on WMMA runs on an RDNA device.
///
/// # Errors
/// The architecture.
pub(crate) fn needs_wmma(arch: Arch, kernel: &'static str) -> Result<(), Refusal> {
    needs_unit(arch, true).map_err(|why| Refusal::new(kernel, why))
}
