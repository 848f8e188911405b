//! Lists of tiles (`fmha_gpu::tile_list`), as NVIDIA launches what makes them.

use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdProblem, MaskKind, MaskSpec, Refusal};
use fmha_gpu::{Grid, Launch, Stage};

use crate::nvidia::{DeviceFacts, row_launch};
use crate::schedule;

pub use fmha_gpu::tile_list::{ListsTiles, NAME, THREADS, TileList, TileOf, reads_head, serve};
pub(crate) use fmha_gpu::tile_list::{TileListPlan, code_beside_lists, header};

/// Last parameters of an entry that walks lists.
pub(crate) const PARAMS: &str =
    ", const __grid_constant__ MaskDataParams masks, const __grid_constant__ TileList list";

impl ListsTiles for DeviceFacts {
    fn list_tiles(
        &self,
        spec: &FwdSpec,
        of: TileOf,
        block: [i32; 2],
        has_function: bool,
        lists: u32,
    ) -> Launch {
        let source = list_tiles(spec, of, block, has_function);
        row_launch((Stage::ListTiles, NAME), source, Grid::new(lists, THREADS), self)
    }
}

/// Spec of a problem that lists [`serve`]. They hide keys as a band does: the text of a mask's kind knows that V may
/// have a hidden NaN.
pub(crate) fn spec(problem: &FwdProblem) -> FwdSpec {
    let spec = FwdSpec::of(problem);
    let mask = if spec.mask == MaskKind::Full { MaskKind::Upper } else { spec.mask };
    FwdSpec { mask, code: code_beside_lists(problem), ..spec }
}

/// The band by which tiles are ordered and a call is priced: where masks that the host does not read hide pairs, the
/// causal one, under which tiles differ in length too.
pub(crate) fn band_of_tiles(problem: &FwdProblem) -> MaskSpec {
    let hides = !problem.masks.is_empty() || problem.code.mask.is_some();
    if hides && problem.mask.kind() == MaskKind::Full { MaskSpec::CAUSAL } else { problem.mask }
}

/// Refuses masks that lists of one head's tiles do not have: types of 8 bits, and a mask as code that reads the head
/// beside masks as data.
///
/// # Errors
/// The type, or the mask.
pub(crate) fn refuse(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    if serve(problem) && (problem.dtypes.qk.is_fp8() || problem.dtypes.v.is_fp8()) {
        let dtype = problem.dtypes.qk;
        return Err(Refusal::new(
            kernel,
            format!("dtype_qk {dtype} beside masks, of which it has lists in 16 bits"),
        ));
    }
    if !problem.masks.is_empty() && reads_head(problem) {
        return Err(Refusal::new(kernel, "mask as code that reads the head beside masks as data".to_owned()));
    }
    Ok(())
}

/// Name in plans of the launch that gives blocks their places in the order of additions.
const RANK_NAME: &str = "tile_ranks";

/// Launch behind the one that makes lists of tiles of keys, which [have an order](TileListPlan::ordered).
pub(crate) fn rank_launch(spec: &FwdSpec, block_n: i32, plan: &TileListPlan, facts: &DeviceFacts) -> Launch {
    let grid = Grid::new(plan.groups(), THREADS);
    row_launch((Stage::RankTiles, RANK_NAME), rank_tiles(spec, block_n), grid, facts)
}

/// Kernel of that launch: arguments as of [`list_tiles`].
#[must_use]
pub fn rank_tiles(spec: &FwdSpec, block_n: i32) -> KernelSource {
    let entry = Entry {
        include: "fmha/common/tile_list.cuh",
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({THREADS}, 2)"),
        params: &format!("const __grid_constant__ FwdParams p{PARAMS}"),
        call: &format!("rank_tiles<TileListCta, kSpec, {block_n}>(p, list);"),
    };
    crate::source(entry.render(), || [schedule::header(), fmha_core::masks::header(), header()])
}

/// The kernel of that launch. Of the spec it reads how Q, K and V lie. `has_function`: a mask as code joins the
/// masks as data.
#[must_use]
pub fn list_tiles(
    spec: &FwdSpec,
    of: TileOf,
    [block_m, block_n]: [i32; 2],
    has_function: bool,
) -> KernelSource {
    let entry = Entry {
        include: "fmha/common/tile_list.cuh",
        constants: &[("kSpec", spec)],
        // Two CTAs: else ptxas aims at four and spills.
        bounds: &format!("__launch_bounds__({THREADS}, 2)"),
        params: &format!("const __grid_constant__ FwdParams p{PARAMS}"),
        call: &format!(
            "static_assert(TileListCta::threads == {THREADS}, \"host and device disagree\"); \
             list_tiles<TileListCta, kSpec, {block_m}, {block_n}, {}, {has_function}>(p, masks, list);",
            of == TileOf::Keys
        ),
    };
    crate::source(entry.render(), || [schedule::header(), fmha_core::masks::header(), header()])
}
