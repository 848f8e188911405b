//! The kernels: each file has what it accepts, its tile, its entry, its grid.

pub(crate) mod cdna;
pub(crate) mod combine;
pub(crate) mod simt;

use fmha_core::source::KernelSource;
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdArgs, FwdProblem, PlanOptions, Refusal};
use fmha_kernels_hip::CdnaTile;

use crate::arch::Arch;

/// A forward kernel, chosen for a problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Forward {
    Cdna(FwdSpec, CdnaTile),
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
            Self::Cdna(spec, tile) => cdna::source(spec, tile),
            Self::Simt(spec) => simt::source(spec),
        }
    }

    /// The rows that a plan prints.
    pub(crate) fn details(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Cdna(spec, tile) => cdna::details(spec, tile),
            Self::Simt(_) => vec![("tile", "a wave to a row, 64 keys at a time".to_owned())],
        }
    }

    /// Workgroups, and the threads of one.
    pub(crate) fn grid(&self, problem: &FwdProblem) -> (u64, u32) {
        match self {
            Self::Cdna(_, tile) => {
                (cdna::num_workgroups(problem, tile).unsigned_abs(), cdna::num_threads(tile).unsigned_abs())
            }
            Self::Simt(_) => (simt::num_workgroups(problem), simt::NUM_THREADS),
        }
    }

    /// The kernel that takes these pointers, where it is another one.
    pub(crate) fn for_addresses(&self, problem: &FwdProblem, args: &FwdArgs<'_>) -> Option<Self> {
        match *self {
            Self::Cdna(spec, tile) => {
                let other = cdna::tile_for(tile, problem, args);
                (other != tile).then_some(Self::Cdna(spec, other))
            }
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
    arch: Arch,
    options: &PlanOptions,
) -> Result<Choice, Vec<Refusal>> {
    let asked = options.kernel.as_deref();
    let mut refusals = Vec::new();
    if asked.is_none_or(|name| name == cdna::NAME) {
        match cdna::accept(problem, arch, options) {
            Ok((spec, tile)) => return Ok(Choice { forward: Forward::Cdna(spec, tile), refusals }),
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
