//! The kernels' entries, the grids of the other launches, and the header shared with the host.

use fmha_core::BwdProblem;
use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, ArrivalParams};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::BwdSpec;

use super::schedule::Sm90BwdSchedule;
use super::shared_memory::TILE_INDEX_SLOTS;
use super::spec::{leaves_far_queries, padded_dim, repairs};
use super::tile::{SPLIT_QUERIES, Sm90BwdTile, TRANSPOSED_DQ_DIM, tile_text, transposes_dq};
use super::walk::{BwdWalk, DqFinish, DqPath, walk_text};
use crate::wgmma::{self, OperandA, Sums, WgmmaShape};
use crate::{tile_list, within};

/// Threads of a CTA of the kernels before and after the main one.
pub const ROW_THREADS: u32 = 256;

/// Number of groups of four elements of dQ that a thread adds up if key blocks have separate sums.
const PART_FOURS: u32 = 2;

/// CTAs that round a key block's sums with `head_parts`, or add its parts' sums; the number divides `block_n`.
pub const HEAD_SUMS_CTAS: u32 = 8;

/// The main kernel. Its arguments are `BwdParams`, five tensor maps and `Sm90BwdSchedule`.
#[must_use]
pub fn main(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    with_maps(["main"; 2], ("Smem", tile.smem_bytes(spec)), (spec, tile), ["", ""])
}

/// Main kernel under masks as data. It has the arguments [`MaskDataParams`](fmha_core::masks::MaskDataParams) and
/// [`TileList`](tile_list::TileList) after the others.
#[must_use]
pub fn masked_main(spec: &BwdSpec, tile: &Sm90BwdTile, has_function: bool) -> KernelSource {
    let more = [tile_list::PARAMS, ", masks, list"];
    with_maps(
        ["masked", &format!("masked_main<kSpec, kTile, {has_function}>")],
        ("Smem", tile.smem_bytes(spec)),
        (spec, tile),
        more,
    )
}

/// [`preprocess`] under masks as data, with [`MaskDataParams`](fmha_core::masks::MaskDataParams) as an additional
/// argument.
#[must_use]
pub fn masked_preprocess(spec: &BwdSpec, tile: &Sm90BwdTile, has_function: bool) -> KernelSource {
    rows_at_once(["masked", &format!("masked_preprocess<kSpec, kTile, {has_function}>")], spec, tile, None)
}

/// [`repair`] under masks as data, with [`MaskDataParams`](fmha_core::masks::MaskDataParams) as an additional
/// argument.
#[must_use]
pub fn masked_repair(spec: &BwdSpec, tile: &Sm90BwdTile, has_function: bool) -> KernelSource {
    // Two CTAs per multiprocessor: with four the kernel spills when masks are evaluated.
    rows_at_once(["masked", &format!("masked_repair<kSpec, kTile, {has_function}>")], spec, tile, Some(2))
}

/// Main kernel for keys that arrive while it runs, with the argument [`ArrivalParams`] after the others.
#[must_use]
pub fn main_of_arriving_keys(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    let more =
        [", const __grid_constant__ ArrivalParams arrivals", ", ArrivingKeys<ArrivalParams>(arrivals)"];
    with_maps(["main"; 2], ("Smem", tile.smem_bytes(spec)), (spec, tile), more)
}

/// The kernel of dBias, which needs only the results of the first launch. Arguments are those of the main kernel,
/// with values for [its own tile](Sm90BwdTile::of_dbias).
#[must_use]
pub fn dbias(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    with_maps(["dbias"; 2], ("BiasSmem", tile.dbias_smem_bytes(spec)), (spec, tile), ["", ""])
}

/// Instance of a function template for an entry's spec and tile, unless `name` contains template arguments.
fn instance(name: &str) -> String {
    if name.ends_with('>') { name.to_owned() } else { format!("{name}<kSpec, kTile>") }
}

/// Entry with tensor maps. `file` defines the function `name`; `more` is an additional parameter and its argument.
fn with_maps(
    [file, name]: [&str; 2],
    (smem, smem_bytes): (&str, i32),
    (spec, tile): (&BwdSpec, &Sm90BwdTile),
    more: [&str; 2],
) -> KernelSource {
    let (threads, cluster) = (tile.num_threads(), tile.walk.cluster());
    let call = format!(
        "static_assert(sizeof(sm90::bwd::{smem}<kSpec, kTile>) == {smem_bytes}, \"{smem}: host and device disagree\"); \
         static_assert(sm90::bwd::num_threads(kTile) == {threads}, \"threads: host and device disagree\"); \
         static_assert(sm90::bwd::cluster_size(kTile) == {cluster}, \"cluster: host and device disagree\"); \
         sm90::bwd::{}(p, maps, schedule{});",
        instance(name),
        more[1],
    );
    let clusters = if cluster > 1 { format!("__cluster_dims__({cluster}, 1, 1) ") } else { String::new() };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: &format!("fmha/sm90/bwd/{file}.cuh"),
        constants: &constants,
        bounds: &format!("{clusters}__launch_bounds__({threads}, 1)"),
        params: &format!(
            "const __grid_constant__ BwdParams p, const __grid_constant__ sm90::bwd::Maps maps, \
             const __grid_constant__ Sm90BwdSchedule schedule{}",
            more[0]
        ),
        call: &call,
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || rendered(&spec, &tile))
}

/// The kernel before the main one. Its arguments are `BwdParams` and `Sm90BwdSchedule`; it has a CTA for each query
/// block of a query head.
#[must_use]
pub fn preprocess(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    rows("preprocess", spec, tile)
}

/// Kernel after the main one, with the main kernel's arguments.
#[must_use]
pub fn postprocess(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    // Separate sums need registers for the parts in flight: by default ptxas would give 80.
    rows_at_once(["postprocess"; 2], spec, tile, tile.keeps_dq_apart().then_some(2))
}

impl Sm90BwdTile {
    /// Number of CTAs for a query block in the launch that finishes dQ: each thread handles one piece, so that none
    /// waits for memory twice. D 256, two sequences of 480, 8 heads: 20 us of 57 with one CTA.
    #[must_use]
    pub const fn finish_ctas(&self, spec: &BwdSpec) -> i32 {
        let dim = padded_dim(spec);
        let of_block = self.block_m * self.dq_dim(spec);
        if self.keeps_dq_apart() {
            return (of_block as u32).div_ceil(4 * PART_FOURS * ROW_THREADS) as i32;
        }
        let piece = if transposes_dq(dim) { 32 } else { 16 };
        let ctas = of_block / (piece * ROW_THREADS as i32);
        if self.finishes_dq() || ctas < 1 { 1 } else { ctas }
    }
}

/// The kernel that adds up dK and dV after the main one with `head_parts`. It has the main kernel's arguments, and a
/// CTA for each key block of a kv head.
#[must_use]
pub fn head_sums(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    rows("head_sums", spec, tile)
}

/// The repair kernel, which runs last with [`repair_ctas`] CTAs. It has the main kernel's arguments.
#[must_use]
pub fn repair(spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    // Four CTAs per multiprocessor: most calls have nothing to repair, and the launch then takes as long as its
    // number of waves.
    rows_at_once(["repair"; 2], spec, tile, Some(4))
}

/// CTAs of [`repair`], 0 if it has nothing to do. One for each kv head of each sequence and one for each head's
/// sink, for far queries; and one warp for each query block and each tile, for non-finite rows.
#[must_use]
pub fn repair_ctas(problem: &BwdProblem, spec: &BwdSpec, schedule: &Sm90BwdSchedule, q_blocks: u32) -> u32 {
    let dims = problem.fwd.dims;
    let sinks = if spec.write_dsink { dims.num_heads_q } else { 0 };
    let of_far_queries = if leaves_far_queries(spec) { dims.batch * dims.num_heads_kv + sinks } else { 0 };
    let warps = if repairs(spec) { q_blocks + schedule.num_tiles.unsigned_abs() } else { 0 };
    of_far_queries + warps.div_ceil(ROW_THREADS / 32)
}

fn rows(name: &str, spec: &BwdSpec, tile: &Sm90BwdTile) -> KernelSource {
    rows_at_once([name; 2], spec, tile, None)
}

/// An entry of the function `name` in `file`, with masks as data as an argument if there are any. Launch bounds
/// leave registers for at least this many CTAs per multiprocessor.
fn rows_at_once(
    [file, name]: [&str; 2],
    spec: &BwdSpec,
    tile: &Sm90BwdTile,
    ctas: Option<u32>,
) -> KernelSource {
    let ctas = ctas.map_or_else(String::new, |ctas| format!(", {ctas}"));
    let [param, argument] = if file == "masked" {
        [", const __grid_constant__ MaskDataParams masks", ", masks"]
    } else {
        [""; 2]
    };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: &format!("fmha/sm90/bwd/{file}.cuh"),
        constants: &constants,
        bounds: &format!("__launch_bounds__({ROW_THREADS}{ctas})"),
        params: &format!(
            "const __grid_constant__ BwdParams p, const __grid_constant__ Sm90BwdSchedule schedule{param}"
        ),
        call: &format!("sm90::bwd::{}(p, schedule{argument});", instance(name)),
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || rendered(&spec, &tile))
}

fn rendered(spec: &BwdSpec, tile: &Sm90BwdTile) -> [Header; 4] {
    let dtype = spec.fwd.dtype_qk;
    let (queries, of_dk, of_dv) = tile.consumer_columns(spec);
    let shape = |n, a| WgmmaShape { dtype, n, a, sums: Sums::F32 };
    let operand = if tile.walk.splits_dims() { OperandA::Shared } else { OperandA::Registers };
    let dq = tile.dq_columns(spec) / tile.walk.cluster();
    let mut shapes = vec![shape(queries, OperandA::Shared), shape(of_dk, operand)];
    if of_dv > 0 {
        shapes.push(shape(of_dv, operand));
    }
    shapes.push(shape(dq, OperandA::Shared));
    if tile.walk.score_parts() > 1 {
        // Shapes of products for three chunks of dQ's columns: a whole chunk, half of one, and dK with dS from shared
        // memory.
        shapes.extend([64, dq - 64, of_dk].map(|n| shape(n, OperandA::Shared)));
    }
    [wgmma::header(&shapes), host_header(), fmha_core::masks::header(), tile_list::header()]
}

/// `fmha/sm90_bwd_host.h`: the types that this file shares with the device.
fn host_header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}{}{}{}\n{}\n{}\n\
         // Threads of a CTA of the kernels before and after the main one.\n\
         constexpr int kRowThreads = {ROW_THREADS};\n\
         // Four numbers each of dQ, so many times, that one adds up where key blocks keep their sums apart.\n\
         constexpr int kPartFours = {PART_FOURS};\n\
         // CTAs that add the parts of a key block.\n\
         constexpr int kHeadSumsCtas = {HEAD_SUMS_CTAS};\n\
         // Tile indices that are known at a time: the tile at work, and its successor, which is loaded meanwhile.\n\
         constexpr int kTileIndexSlots = {TILE_INDEX_SLOTS};\n\
         // The padded head dimension whose dQ is computed transposed.\n\
         constexpr int kTransposedDqDim = {TRANSPOSED_DQ_DIM};\n\
         // Queries of a step of split dimensions.\n\
         constexpr int kSplitQueries = {SPLIT_QUERIES};\n\n{}\n}}  // namespace fmha\n",
        BwdWalk::c_definition(),
        DqPath::c_definition(),
        DqFinish::c_definition(),
        Sm90BwdTile::c_definition(),
        Sm90BwdSchedule::c_definition(),
        ArrivalParams::c_definition(),
        within("sm90::bwd", &[walk_text(), tile_text()]),
    );
    Header::rendered("fmha/sm90_bwd_host.h", text)
}
