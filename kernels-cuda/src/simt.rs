//! The kernel that computes every forward spec, slowly.

use fmha_core::FwdProblem;
use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::FwdSpec;

/// Threads of a CTA; a warp computes one row at a time.
pub const NUM_THREADS: u32 = 128;

/// CTAs to launch on a device of `num_sms` multiprocessors: enough to fill it, none without a row.
#[must_use]
pub fn grid(problem: &FwdProblem, num_sms: u32) -> u32 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    crate::row_grid(rows, NUM_THREADS, num_sms)
}

/// The kernel for a spec: one argument, [`FwdParams`](fmha_core::abi::FwdParams); no dynamic shared
/// memory, no workspace, no tensor maps.
#[must_use]
pub fn fwd(spec: &FwdSpec) -> KernelSource {
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", spec)];
    let entry = Entry {
        include: "fmha/simt/fwd.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ FwdParams p",
        call: "simt::fwd<kSpec>(p);",
    };
    crate::source(entry.render(), [])
}
