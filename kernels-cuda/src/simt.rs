//! The kernels that compute every spec, slowly.

pub mod recipe;
pub mod recipe_bwd;

use fmha_core::FwdProblem;
use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::{BwdSpec, FwdSpec};

/// The kernel's name in plans.
pub const NAME: &str = "simt";

/// Threads of a CTA; a warp computes one row at a time.
pub const NUM_THREADS: u32 = 128;

/// CTAs to launch on a device of `num_sms` multiprocessors: enough to fill it, none without a row.
#[must_use]
pub fn grid(problem: &FwdProblem, num_sms: u32) -> u32 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    row_grid(rows, num_sms)
}

/// CTAs that take `num_rows` rows in turn.
#[must_use]
pub fn row_grid(num_rows: u64, num_sms: u32) -> u32 {
    crate::row_grid(num_rows, NUM_THREADS, num_sms)
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
    crate::source(entry.render(), || [])
}

/// The first of backward's two kernels: LSE in log2 and delta of each query row, into the workspace. One argument,
/// [`BwdParams`](fmha_core::abi::BwdParams), as of the second.
#[must_use]
pub fn bwd_stats(spec: &BwdSpec) -> KernelSource {
    backward(spec, "simt::bwd_stats<kSpec>(p);")
}

/// The second: every gradient, a warp to a row.
#[must_use]
pub fn bwd(spec: &BwdSpec) -> KernelSource {
    backward(spec, "simt::bwd<kSpec>(p);")
}

fn backward(spec: &BwdSpec, call: &str) -> KernelSource {
    let entry = Entry {
        include: "fmha/simt/bwd.cuh",
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ BwdParams p",
        call,
    };
    crate::source(entry.render(), || [])
}
