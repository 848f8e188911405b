//! The kernel that merges partial results.

pub mod recipe;

use fmha_core::CombineProblem;
use fmha_core::Refusal;
use fmha_core::abi::MAX_PARTS;
use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::CombineSpec;

/// The kernel's name in plans.
pub const NAME: &str = "combine";

/// Threads of a CTA; a warp merges one row at a time.
pub const NUM_THREADS: u32 = 128;

/// Whether one launch merges this, and if not, why.
///
/// # Errors
/// More parts than [`MAX_PARTS`].
pub fn accepts(problem: &CombineProblem) -> Result<(), Refusal> {
    if problem.num_parts as usize > MAX_PARTS {
        let reason = format!("num_parts {} is larger than {MAX_PARTS}", problem.num_parts);
        return Err(Refusal::new("combine", reason));
    }
    Ok(())
}

/// CTAs to launch on a device of `num_sms` multiprocessors: enough to fill it, none without a row.
#[must_use]
pub fn grid(problem: &CombineProblem, num_sms: u32) -> u32 {
    crate::row_grid(problem.lse_elems(), NUM_THREADS, num_sms)
}

/// The kernel for a spec: one argument, [`CombineParams`](fmha_core::abi::CombineParams).
#[must_use]
pub fn merge(spec: &CombineSpec) -> KernelSource {
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", spec)];
    let entry = Entry {
        include: "fmha/combine.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ CombineParams p",
        call: "combine::merge<kSpec>(p);",
    };
    crate::source(entry.render(), || [])
}
