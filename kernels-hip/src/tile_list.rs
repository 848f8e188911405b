//! AMD's launches that list, for each tile, the blocks that it sees (`fmha_gpu::tile_list`).

use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::FwdSpec;
use fmha_gpu::tile_list::{ListsTiles, MaskCode, NAME, THREADS, TileOf};
use fmha_gpu::{Launch, Stage};

use crate::device::{DeviceFacts, launch};

impl ListsTiles for DeviceFacts {
    fn list_tiles(&self, spec: &FwdSpec, of: TileOf, block: [i32; 2], code: MaskCode, lists: u32) -> Launch {
        let source = source(spec, of, block, code != MaskCode::None);
        launch(Stage::ListTiles, NAME, source, lists.into(), THREADS)
    }
}

fn source(spec: &FwdSpec, of: TileOf, [block_m, block_n]: [i32; 2], has_function: bool) -> KernelSource {
    let of_keys = of == TileOf::Keys;
    let entry = Entry {
        include: "fmha/amd/tile_list.h",
        constants: &[("kSpec", spec)],
        bounds: &crate::group_of(THREADS),
        params: "FwdParams p, MaskDataParams masks, TileList list",
        call: &format!(
            "static_assert(TileListGroup::threads == {THREADS}, \"host and device disagree\"); \
             list_tiles<TileListGroup, kSpec, {block_m}, {block_n}, {of_keys}, {has_function}>(p, masks, list);"
        ),
    };
    KernelSource::new(entry.render(), crate::headers)
}
