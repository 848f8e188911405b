//! The kernels: each file has what it accepts, its tile, its entry, its grid.

pub(crate) mod cdna;
pub(crate) mod combine;
mod order;
pub(crate) mod simt;
pub(crate) mod simt_bwd;

use fmha_core::source::KernelSource;
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdArgs, FwdProblem, PlanOptions, Refusal, ResourceUsage};

use crate::arch::Arch;

/// What a choice depends on besides the problem.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) arch: Arch,
    pub(crate) num_compute_units: u32,
}

/// How a launch lies over a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) workgroups: u64,
    /// Of one workgroup.
    pub(crate) threads: u32,
    /// Pieces of work.
    pub(crate) tiles: u64,
    /// Of these, as many as the device works on at a time.
    pub(crate) tiles_at_once: u64,
}

impl Device {
    /// Of a kernel whose workgroups have one piece of work each.
    pub(crate) fn grid(&self, usage: Option<&ResourceUsage>, workgroups: u64, threads: u32) -> Grid {
        let per_compute_unit = usage.map_or(1, |usage| self.arch.workgroups_per_compute_unit(usage, threads));
        let tiles_at_once = (self.num_compute_units * per_compute_unit).into();
        Grid { workgroups, threads, tiles: workgroups, tiles_at_once }
    }
}

/// A forward kernel, chosen for a problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Forward {
    Cdna(cdna::Cdna),
    Simt(FwdSpec),
}

/// A forward kernel and why those before it refused.
pub(crate) struct Choice {
    pub(crate) forward: Forward,
    pub(crate) refusals: Vec<Refusal>,
}

impl Forward {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Cdna(..) => cdna::NAME,
            Self::Simt(_) => simt::NAME,
        }
    }

    pub(crate) fn source(&self) -> KernelSource {
        match self {
            Self::Cdna(cdna) => cdna.source(),
            Self::Simt(spec) => simt::source(spec),
        }
    }

    /// The rows that a plan prints.
    pub(crate) fn details(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Cdna(cdna) => cdna.details(),
            Self::Simt(_) => vec![("tile", "a wave to a row, 64 keys at a time".to_owned())],
        }
    }

    /// Its launch on a device, for a compiled kernel that takes this of it.
    pub(crate) fn grid(&self, problem: &FwdProblem, device: Device, usage: Option<&ResourceUsage>) -> Grid {
        match self {
            Self::Cdna(cdna) => {
                let room = device.grid(usage, 0, cdna::num_threads(&cdna.tile).unsigned_abs());
                let (tiles, workgroups) = cdna.tiles_and_workgroups(problem, room.tiles_at_once);
                Grid { workgroups, tiles, ..room }
            }
            Self::Simt(_) => device.grid(usage, simt::num_workgroups(problem), simt::NUM_THREADS),
        }
    }

    /// The kernel that takes these pointers, where it is another one.
    pub(crate) fn for_addresses(&self, problem: &FwdProblem, args: &FwdArgs<'_>) -> Option<Self> {
        match self {
            Self::Cdna(cdna) => cdna.for_addresses(problem, args).map(Self::Cdna),
            Self::Simt(_) => None,
        }
    }
}

/// The first kernel that takes the problem, best first; the slow one where the caller allows or names it.
///
/// # Errors
/// Every refusal.
pub(crate) fn select(
    problem: &FwdProblem,
    device: Device,
    options: &PlanOptions,
) -> Result<Choice, Vec<Refusal>> {
    let asked = options.kernel.as_deref();
    let mut refusals = Vec::new();
    if asked.is_none_or(|name| name == cdna::NAME) {
        match cdna::accept(problem, device, options) {
            Ok(cdna) => return Ok(Choice { forward: Forward::Cdna(cdna), refusals }),
            Err(refusal) => refusals.push(refusal),
        }
    }
    if asked == Some(simt::NAME) || asked.is_none() && options.allow_fallback {
        match simt::accept(problem, options) {
            Ok(spec) => return Ok(Choice { forward: Forward::Simt(spec), refusals }),
            Err(refusal) => refusals.push(refusal),
        }
    } else if asked.is_none() {
        refusals.push(Refusal::new(simt::NAME, "it is the slow fallback, and allow_fallback is false"));
    }
    if let (Some(name), true) = (asked, refusals.is_empty()) {
        let reason = format!("there is no such forward kernel (known: {}, {})", cdna::NAME, simt::NAME);
        refusals.push(Refusal::new(name, reason));
    }
    Err(refusals)
}

macro_rules! refuse {
    ($kernel:expr, $($reason:tt)+) => {
        return Err(fmha_core::Refusal::new($kernel, format!($($reason)+)))
    };
}
pub(crate) use refuse;

/// `name=value` of `PlanOptions::tile` as a number.
pub(crate) fn number(kernel: &str, name: &str, value: &str) -> Result<i32, Refusal> {
    value.parse().map_err(|_| Refusal::new(kernel, format!("tile {name}={value} is not a number")))
}
