//! Kernels in which a warp takes rows one after another: those that every vendor has, and the one that writes dropout's
//! keep mask.

use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_gpu::{Grid, Launch, RowKernel, Stage};

use crate::nvidia::{DeviceFacts, row_launch};

/// Threads of a CTA.
const NUM_THREADS: u32 = 128;

/// The backward's text over lists of keys.
const LISTS_BWD: &str = "fmha/simt/lists_bwd.cuh";

/// The text under masks as data.
const MASKED: &str = "fmha/simt/masked.cuh";

/// Source text of a row kernel for a spec.
#[must_use]
pub fn source(kernel: RowKernel, spec: &dyn Literal) -> KernelSource {
    let (include, params, call) = match kernel {
        RowKernel::Simt => ("fmha/simt/fwd.cuh", "FwdParams p", "simt::fwd<kSpec>(p);"),
        RowKernel::SimtLists => (
            "fmha/simt/lists.cuh",
            "FwdParams p, const __grid_constant__ ListParams lists",
            "simt::fwd_lists<kSpec>(p, lists);",
        ),
        RowKernel::SimtListsStats => (
            LISTS_BWD,
            "BwdParams p, const __grid_constant__ ListParams lists",
            "simt::bwd_lists_stats<kSpec>(p, lists);",
        ),
        RowKernel::SimtListsBwd => (
            LISTS_BWD,
            "BwdParams p, const __grid_constant__ ListParams lists",
            "simt::bwd_lists<kSpec>(p, lists);",
        ),
        RowKernel::SimtStats => ("fmha/simt/bwd.cuh", "BwdParams p", "simt::bwd_stats<kSpec>(p);"),
        RowKernel::SimtBwd => ("fmha/simt/bwd.cuh", "BwdParams p", "simt::bwd<kSpec>(p);"),
        RowKernel::MaskedSimt => (
            MASKED,
            "FwdParams p, const __grid_constant__ MaskDataParams m",
            "simt::masked_fwd<kSpec>(p, m);",
        ),
        RowKernel::ScaledSimt => (
            "fmha/simt/scaled.cuh",
            "FwdParams p, const __grid_constant__ BlockScaleParams scales",
            "simt::scaled_fwd<kSpec>(p, scales);",
        ),
        RowKernel::MaskedSimtStats => (
            MASKED,
            "BwdParams p, const __grid_constant__ MaskDataParams m",
            "simt::masked_bwd_stats<kSpec>(p, m);",
        ),
        RowKernel::MaskedSimtBwd => (
            MASKED,
            "BwdParams p, const __grid_constant__ MaskDataParams m",
            "simt::masked_bwd<kSpec>(p, m);",
        ),
        RowKernel::SimtCaptured => ("fmha/simt/bwd.cuh", "BwdParams p", "simt::bwd_captured<kSpec>(p);"),
        RowKernel::Combine => ("fmha/combine.cuh", "CombineParams p", "combine::merge<kSpec>(p);"),
        RowKernel::UpdateCache => (
            "fmha/common/update_cache.cuh",
            "FwdParams p, const __grid_constant__ CacheUpdate update",
            "cache::Update<kSpec, cache::Warp>{p, update}.run();",
        ),
    };
    entry(include, params, call, spec)
}

fn entry(include: &str, params: &str, call: &str, spec: &dyn Literal) -> KernelSource {
    let entry = Entry {
        include,
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: &format!("const __grid_constant__ {params}"),
        call,
    };
    crate::source(entry.render(), || {
        [
            fmha_core::cache_update::header(),
            fmha_core::lists::header(),
            fmha_core::masks::header(),
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
