//! The closed family of forward kernels: which of them takes a problem. What each accepts, its tile, its
//! entry and its grid stand beside the device text, in `fmha-kernels-hip`.

use fmha_core::source::KernelSource;
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdArgs, FwdProblem, PlanOptions, ProblemError, Refusal, ResourceUsage};
use fmha_kernels_hip::{Device, Grid, cdna, simt};

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

    /// Takes the operands where they lie, or names the first that it does not.
    pub(crate) fn takes_addresses(
        &self,
        problem: &FwdProblem,
        args: &FwdArgs<'_>,
    ) -> Result<(), ProblemError> {
        match self {
            Self::Cdna(cdna) => cdna.takes_addresses(problem, args),
            Self::Simt(_) => Ok(()),
        }
    }

    /// The kernel that takes any address, where it is another one.
    pub(crate) fn for_any_address(&self, problem: &FwdProblem) -> Option<Self> {
        match self {
            Self::Cdna(cdna) => cdna.for_any_address(problem).map(Self::Cdna),
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
