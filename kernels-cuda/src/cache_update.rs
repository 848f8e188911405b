//! The launch before a forward kernel that updates its KV cache ([`fmha_core::cache_update`]): its grid, its entry.

pub(crate) mod launch;

pub use fmha_core::cache_update::{CacheSpec, CacheUpdate, bind, is_wanted, workspace_bytes};
use fmha_core::cache_update::{header, num_rows};

use fmha_core::FwdProblem;
use fmha_core::source::{Entry, KernelSource, Literal};

/// Threads of a CTA; a warp takes a row at a time.
pub const NUM_THREADS: u32 = 128;

/// CTAs of the launch.
#[must_use]
pub fn grid(problem: &FwdProblem, num_sms: u32) -> u32 {
    crate::row_grid(num_rows(problem), NUM_THREADS, num_sms)
}

/// The kernel: arguments `FwdParams` of the call, [`CacheUpdate`].
#[must_use]
pub fn update(problem: &FwdProblem) -> KernelSource {
    let spec = CacheSpec::of(problem);
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", &spec)];
    let entry = Entry {
        include: "fmha/common/update_cache.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ CacheUpdate update",
        call: "cache::Update<kSpec, cache::Warp>{p, update}.run();",
    };
    crate::source(entry.render(), || [header()])
}
