//! Kernels in which a warp processes rows one after another: those that every vendor has, and the one that writes
//! dropout's keep mask.

use fmha_core::abi::AbiLiteral as _;
use fmha_core::abi_spec;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
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
            fmha_core::quantize_params::header(),
            fmha_core::index_loss_params::header(),
            fmha_core::lists::header(),
            fmha_core::second::header(),
            fmha_core::masks::header(),
            fmha_core::small_outputs::header(),
            fmha_core::scale_params::header(),
            fmha_core::value_params::header(),
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

abi_spec! {
    /// Spec of the kernel in which a cluster of CTAs makes one row's list of chosen keys.
    pub struct ClusterChoice {
        /// CTAs of a cluster.
        pub ctas: i32,
        /// Scores that a thread has in registers.
        pub held: i32,
    }
}

/// Largest number of CTAs of a cluster; the next constant is the largest number of scores of a thread, since a thread
/// of 1024 has no more registers.
const MOST_CTAS: u32 = 8;
const MOST_HELD: u32 = 32;

/// Fewest keys of a CTA, where a row is divided among several CTAs only for speed.
const LEAST_KEYS: u32 = 4096;

impl ClusterChoice {
    /// The cluster for this many rows of this many entries, with `wanted` CTAs or as many as needed; `None` if a
    /// row does not fit the registers.
    #[must_use]
    pub fn of(rows: u64, entries: u32, num_sms: u32, wanted: Option<u32>) -> Option<Self> {
        let least = entries.div_ceil(CHOOSING_THREADS * MOST_HELD).max(1).next_power_of_two();
        let there = (u64::from(num_sms) / rows.max(1)).clamp(1, MOST_CTAS.into()) as u32;
        let ctas = wanted.unwrap_or(least.max(1 << there.min(entries / LEAST_KEYS).max(1).ilog2()));
        if !(least..=MOST_CTAS).contains(&ctas) || !ctas.is_power_of_two() {
            return None;
        }
        let held = entries.div_ceil(ctas * CHOOSING_THREADS).next_power_of_two().max(4);
        // Two CTAs with 32 scores per thread spill registers; four CTAs hold half as many each.
        if (ctas, held) == (2, MOST_HELD) {
            return if wanted.is_none() { Self::of(rows, entries, num_sms, Some(4)) } else { None };
        }
        Some(Self { ctas: ctas.cast_signed(), held: held.cast_signed() })
    }
}

/// Source text of the kernel in which clusters make lists of chosen keys.
#[must_use]
pub fn cluster_choice(choice: &ClusterChoice) -> KernelSource {
    let clusters =
        if choice.ctas > 1 { format!("__cluster_dims__({}, 1, 1) ", choice.ctas) } else { String::new() };
    let entry = Entry {
        include: "fmha/common/choose_cluster.cuh",
        constants: &[("kSpec", choice)],
        bounds: &format!("{clusters}__launch_bounds__({CHOOSING_THREADS}, 1)"),
        params: "const __grid_constant__ ChooseParams p",
        call: "choose::choose_rows_by_clusters<kSpec>(p);",
    };
    crate::source(entry.render(), || {
        let own = ClusterChoice::c_definition();
        [
            fmha_core::choose_params::header(),
            Header::shared("fmha/choose_cluster_host.h", "fmha", &["fmha/portable.h"], &[own]),
        ]
    })
}

/// The launch that makes lists by clusters, with its description; `None` if the device has no clusters, or a row is
/// too long.
pub(crate) fn lists_by_clusters(
    at: (Stage, &'static str),
    rows: u64,
    entries: u32,
    ctas: Option<u32>,
    facts: &DeviceFacts,
) -> Result<Option<(Launch, String)>, String> {
    if !facts.instructions.tma {
        return Ok(None);
    }
    let Some(choice) = ClusterChoice::of(rows, entries, facts.num_sms, ctas) else {
        let refuse =
            |ctas| format!("tile cluster={ctas}: no clusters of so many CTAs hold rows of {entries}");
        return ctas.map_or(Ok(None), |ctas| Err(refuse(ctas)));
    };
    let groups = rows * u64::from(choice.ctas.unsigned_abs());
    let groups = i32::try_from(groups).map_err(|_| format!("{groups} CTAs are more than a grid has"))?;
    // The grid that makes lists may start while the grid that computes scores ends; it then waits for the scores.
    let grid = Grid { dependent: true, ..Grid::new(groups.unsigned_abs(), CHOOSING_THREADS) };
    let words = format!("clusters of {} CTAs to a row, {} scores of each thread", choice.ctas, choice.held);
    Ok(Some((row_launch(at, cluster_choice(&choice), grid, facts), words)))
}

/// The launch that writes the keep mask for a forward kernel that does not write it, for this many rows: it reads
/// only the sequences' places and the dropout parameters.
pub(crate) fn keep_mask(name: &'static str, spec: &FwdSpec, rows: u64, facts: &DeviceFacts) -> Launch {
    let source = entry("fmha/common/keep_mask.cuh", "FwdParams p", "write_keep_mask<kSpec>(p);", spec);
    launch((Stage::KeepMask, name), source, rows, facts)
}
