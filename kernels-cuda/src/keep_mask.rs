//! The launch that writes dropout's keep mask beside a forward kernel that does not.

use fmha_core::FwdProblem;
use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::FwdSpec;

/// Threads of a CTA; a warp writes one row at a time.
pub const NUM_THREADS: u32 = 128;

/// The kernel: [`FwdParams`](fmha_core::abi::FwdParams), of which it reads where sequences lie and what dropout has.
#[must_use]
pub fn write(spec: &FwdSpec) -> KernelSource {
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", spec)];
    let entry = Entry {
        include: "fmha/common/keep_mask.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ FwdParams p",
        call: "write_keep_mask<kSpec>(p);",
    };
    crate::source(entry.render(), || [])
}

/// CTAs of the launch.
#[must_use]
pub fn grid(problem: &FwdProblem, num_sms: u32) -> u32 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    crate::row_grid(rows, NUM_THREADS, num_sms)
}
