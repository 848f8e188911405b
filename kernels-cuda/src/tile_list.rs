//! Lists of tiles (`fmha_gpu::tile_list`), as NVIDIA launches what makes them.

use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::FwdSpec;
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
             list_tiles<kSpec, {block_m}, {block_n}, {}, {has_function}>(p, masks, list);",
            of == TileOf::Keys
        ),
    };
    crate::source(entry.render(), || [schedule::header(), fmha_core::masks::header(), header()])
}
