//! `combine`: merges partial results, an element a thread.

pub(crate) mod recipe;

use fmha_core::abi::MAX_PARTS;
use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::CombineSpec;
use fmha_core::{CombineProblem, Refusal};

use crate::device::refuse;

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "combine";
/// Threads of a workgroup.
pub(crate) const NUM_THREADS: u32 = 256;

/// Whether the kernel computes this problem.
///
/// # Errors
/// The number that is too large.
pub(crate) fn accept(problem: &CombineProblem) -> Result<CombineSpec, Refusal> {
    let parts = problem.num_parts;
    if parts as usize > MAX_PARTS {
        refuse!(NAME, "num_parts {parts} is larger than {MAX_PARTS}");
    }
    let workgroups = num_workgroups(problem);
    if workgroups > u64::from(u32::MAX / NUM_THREADS) {
        refuse!(
            NAME,
            "batch, seqlen_q, num_heads_q and head_dim_v make {workgroups} workgroups, more than {}",
            u32::MAX / NUM_THREADS
        );
    }
    Ok(CombineSpec::of(problem))
}

/// Workgroups of a launch.
#[must_use]
pub(crate) fn num_workgroups(problem: &CombineProblem) -> u64 {
    problem.shape().num_elems().div_ceil(NUM_THREADS.into())
}

/// What is compiled.
#[must_use]
pub(crate) fn source(spec: &CombineSpec) -> KernelSource {
    let entry = Entry {
        include: "fmha/combine.h",
        constants: &[("kSpec", spec)],
        bounds: &crate::group_of(NUM_THREADS),
        params: "CombineParams p",
        call: "combine<kSpec>(p);",
    };
    KernelSource::new(entry.render(), crate::headers)
}
