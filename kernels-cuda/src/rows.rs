//! Kernels in which a warp takes rows one after another: those that every vendor has, and the one that writes dropout's
//! keep mask.

use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_gpu::{Grid, Launch, OwnText, RowKernel, Stage};

use crate::nvidia::{DeviceFacts, row_launch};

/// Threads of a CTA.
const NUM_THREADS: u32 = 128;
/// Threads of a CTA that chooses keys: `ChooseCta::threads`.
const CHOOSING_THREADS: u32 = 1024;

/// Source text of a row kernel for a spec.
#[must_use]
pub fn source(kernel: RowKernel, spec: &dyn Literal) -> KernelSource {
    let [include, params, call] = kernel.shared_text().unwrap_or_else(|own| match own {
        OwnText::Combine => ["fmha/combine.cuh", "CombineParams p", "combine::merge<kSpec>(p);"],
        OwnText::Choose => {
            ["fmha/common/choose.cuh", "ChooseParams p", "choose::choose_rows<choose::ChooseCta, kSpec>(p);"]
        }
        OwnText::UpdateCache => [
            "fmha/common/update_cache.cuh",
            "FwdParams p, CacheUpdate update",
            "cache::Update<kSpec, cache::Warp>{p, update}.run();",
        ],
    });
    let threads = if kernel == RowKernel::Choose { CHOOSING_THREADS } else { NUM_THREADS };
    entry_of(threads, include, params, call, spec)
}

fn entry(include: &str, params: &str, call: &str, spec: &dyn Literal) -> KernelSource {
    entry_of(NUM_THREADS, include, params, call, spec)
}

fn entry_of(threads: u32, include: &str, params: &str, call: &str, spec: &dyn Literal) -> KernelSource {
    let params: Vec<_> = params.split(", ").map(|param| format!("const __grid_constant__ {param}")).collect();
    let entry = Entry {
        include,
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({threads})"),
        params: &params.join(", "),
        call,
    };
    crate::source(entry.render(), || {
        [
            fmha_core::cache_update::header(),
            fmha_core::choose_params::header(),
            fmha_core::lists::header(),
            fmha_core::second::header(),
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

/// Launch of the choice of keys, a CTA to a row.
pub(crate) fn choose(
    at: (Stage, &'static str),
    spec: &dyn Literal,
    rows: u64,
    facts: &DeviceFacts,
) -> Result<Launch, String> {
    let groups = i32::try_from(rows).map_err(|_| format!("rows {rows} are more than a grid has CTAs"))?;
    let grid = Grid::new(groups.unsigned_abs(), CHOOSING_THREADS);
    Ok(row_launch(at, source(RowKernel::Choose, spec), grid, facts))
}

/// The launch that writes the keep mask beside a forward kernel that does not, of so many rows: it reads where
/// sequences lie and what dropout has.
pub(crate) fn keep_mask(name: &'static str, spec: &FwdSpec, rows: u64, facts: &DeviceFacts) -> Launch {
    let source = entry("fmha/common/keep_mask.cuh", "FwdParams p", "write_keep_mask<kSpec>(p);", spec);
    launch((Stage::KeepMask, name), source, rows, facts)
}
