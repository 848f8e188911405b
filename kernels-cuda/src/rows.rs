//! Kernels in which a warp takes rows one after another: those that every vendor has, and the one that writes dropout's
//! keep mask.

use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_gpu::{Grid, Launch, OwnText, RowKernel, Stage};

use crate::nvidia::{DeviceFacts, row_launch};

/// Threads of a CTA.
const NUM_THREADS: u32 = 128;

/// Source text of a row kernel for a spec.
#[must_use]
pub fn source(kernel: RowKernel, spec: &dyn Literal) -> KernelSource {
    let [include, params, call] = kernel.shared_text().unwrap_or_else(|own| match own {
        OwnText::Combine => ["fmha/combine.cuh", "CombineParams p", "combine::merge<kSpec>(p);"],
        OwnText::UpdateCache => [
            "fmha/common/update_cache.cuh",
            "FwdParams p, CacheUpdate update",
            "cache::Update<kSpec, cache::Warp>{p, update}.run();",
        ],
    });
    entry(include, params, call, spec)
}

fn entry(include: &str, params: &str, call: &str, spec: &dyn Literal) -> KernelSource {
    let params: Vec<_> = params.split(", ").map(|param| format!("const __grid_constant__ {param}")).collect();
    let entry = Entry {
        include,
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: &params.join(", "),
        call,
    };
    crate::source(entry.render(), || {
        [
            fmha_core::cache_update::header(),
            fmha_core::lists::header(),
            fmha_core::masks::header(),
            fmha_core::small_outputs::header(),
            fmha_core::scale_params::header(),
        ]
    })
}

/// Launch of a row kernel over `rows` rows.
pub(crate) fn launch(
    at: (Stage, &'static str),
    source: KernelSource,
    rows: u64,
    facts: &DeviceFacts,
) -> Launch {
    let grid = Grid::new(crate::row_grid(rows, NUM_THREADS, facts.num_sms), NUM_THREADS);
    row_launch(at, source, grid, facts)
}

/// The launch that writes the keep mask beside a forward kernel that does not, of so many rows: it reads where
/// sequences lie and what dropout has.
pub(crate) fn keep_mask(name: &'static str, spec: &FwdSpec, rows: u64, facts: &DeviceFacts) -> Launch {
    let source = entry("fmha/common/keep_mask.cuh", "FwdParams p", "write_keep_mask<kSpec>(p);", spec);
    launch((Stage::KeepMask, name), source, rows, facts)
}
