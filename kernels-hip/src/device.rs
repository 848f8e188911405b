//! What a recipe knows of a device, and how a launch lies over it.

use fmha_core::{Refusal, ResourceUsage};

use crate::arch::Arch;

macro_rules! refuse {
    ($kernel:expr, $($reason:tt)+) => {
        return Err(fmha_core::Refusal::new($kernel, format!($($reason)+)))
    };
}
pub(crate) use refuse;

/// What a choice depends on besides the problem.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// Its architecture.
    pub arch: Arch,
    /// Its compute units.
    pub num_compute_units: u32,
}

/// How a launch lies over a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    /// Workgroups of the launch.
    pub workgroups: u64,
    /// Of one workgroup.
    pub threads: u32,
    /// Pieces of work.
    pub tiles: u64,
    /// Of these, as many as the device works on at a time.
    pub tiles_at_once: u64,
}

impl Device {
    /// Of a kernel whose workgroups have one piece of work each.
    #[must_use]
    pub fn grid(&self, usage: Option<&ResourceUsage>, workgroups: u64, threads: u32) -> Grid {
        let per_compute_unit = usage.map_or(1, |usage| self.arch.workgroups_per_compute_unit(usage, threads));
        let tiles_at_once = (self.num_compute_units * per_compute_unit).into();
        Grid { workgroups, threads, tiles: workgroups, tiles_at_once }
    }
}

/// A kernel on MFMA runs on CDNA alone.
pub(crate) fn needs_mfma(arch: Arch, kernel: &'static str) -> Result<(), Refusal> {
    if arch.is_rdna() {
        refuse!(kernel, "{} has no MFMA: not on RDNA", arch.name());
    }
    Ok(())
}
