//! `simt`: every forward problem, a wave to a row. Correct for all, fast for none.

pub(crate) mod recipe;

use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdProblem, PlanOptions, Refusal};

use crate::arch::Arch;
use crate::device::refuse;

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "simt";
/// Threads of a workgroup.
pub(crate) const NUM_THREADS: u32 = 256;

/// Rows of a workgroup: a wave to each.
#[must_use]
pub(crate) const fn rows_of_a_workgroup(arch: Arch) -> u64 {
    (NUM_THREADS / arch.wave_threads()) as u64
}

/// Whether the kernel computes this problem.
///
/// # Errors
/// The number that is too large, or a tile that it has not.
pub(crate) fn accept(problem: &FwdProblem, arch: Arch, options: &PlanOptions) -> Result<FwdSpec, Refusal> {
    if let Some(cache) = problem.cache.dtype {
        refuse!(NAME, "dtype_cache {cache} beside {} is not taken", problem.dtypes.qk);
    }
    if problem.cache.tree_mask {
        refuse!(NAME, "tree_mask of {} queries is not taken", problem.dims.seqlen_q);
    }
    fmha_core::cache_update::takes(problem, NAME)?;
    options.refuse_tile(NAME)?;
    let (workgroups, most) = (num_workgroups(problem, arch), u64::from(u32::MAX / NUM_THREADS));
    if workgroups > most {
        refuse!(NAME, "seqlen_q, num_heads_q and batch make {workgroups} workgroups, more than {most}");
    }
    Ok(FwdSpec::of(problem))
}

/// Workgroups of a launch.
#[must_use]
pub(crate) fn num_workgroups(problem: &FwdProblem, arch: Arch) -> u64 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    rows.div_ceil(rows_of_a_workgroup(arch))
}

/// What is compiled.
#[must_use]
pub(crate) fn source(spec: &FwdSpec) -> KernelSource {
    let entry = Entry {
        include: "fmha/simt/fwd.h",
        constants: &[("kSpec", spec)],
        bounds: &crate::group_of(NUM_THREADS),
        params: "FwdParams p",
        call: "simt::fwd<kSpec>(p);",
    };
    KernelSource::new(entry.render(), crate::headers)
}
