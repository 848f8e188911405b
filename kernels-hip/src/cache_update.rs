//! The launch before a forward kernel that updates its KV cache ([`fmha_core::cache_update`]): its grid, its entry.

pub(crate) mod launch;

use fmha_core::FwdProblem;
use fmha_core::cache_update::{CacheSpec, header, num_rows};
use fmha_core::source::{Entry, KernelSource};

/// The launch's name in plans.
pub(crate) const NAME: &str = "cdna_update";
/// Threads of a workgroup; a wave takes a row at a time.
pub(crate) const NUM_THREADS: u32 = 256;
const WAVES: u64 = 4;
/// Workgroups, at most: a wave of many takes several rows.
const MOST_WORKGROUPS: u64 = 1 << 14;

/// Workgroups of the launch.
#[must_use]
pub(crate) fn num_workgroups(problem: &FwdProblem) -> u64 {
    num_rows(problem).div_ceil(WAVES).min(MOST_WORKGROUPS)
}

/// The kernel: arguments `FwdParams` of the call, [`CacheUpdate`](fmha_core::cache_update::CacheUpdate).
#[must_use]
pub(crate) fn source(problem: &FwdProblem) -> KernelSource {
    let spec = CacheSpec::of(problem);
    let entry = Entry {
        include: "fmha/cdna/decode/update.h",
        constants: &[("kSpec", &spec)],
        bounds: &crate::group_of(NUM_THREADS),
        params: "FwdParams p, CacheUpdate update",
        call: "cache::Update<kSpec, cache::Wave>{p, update}.run();",
    };
    KernelSource::new(entry.render(), || {
        let mut headers = crate::headers();
        headers.push(header());
        headers
    })
}
