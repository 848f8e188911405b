//! NVIDIA's launches that list, for each tile, the blocks that it sees (`fmha_gpu::tile_list`).

use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdProblem, MaskKind, MaskSpec, Refusal};
use fmha_gpu::{Grid, Launch, Stage};

use crate::nvidia::{DeviceFacts, row_launch};
use crate::schedule;

pub use fmha_gpu::tile_list::{ListsTiles, MaskCode, NAME, THREADS, TileList, TileOf, reads_head, serve};
pub(crate) use fmha_gpu::tile_list::{TileListPlan, code_beside_lists, header};

/// Last parameters of a kernel that reads lists of blocks, as C++ text.
pub(crate) const PARAMS: &str =
    ", const __grid_constant__ MaskDataParams masks, const __grid_constant__ TileList list";

impl ListsTiles for DeviceFacts {
    fn list_tiles(&self, spec: &FwdSpec, of: TileOf, block: [i32; 2], code: MaskCode, lists: u32) -> Launch {
        let source = list_tiles(spec, of, block, code);
        row_launch((Stage::ListTiles, NAME), source, Grid::new(lists, THREADS), self)
    }
}

/// Spec of a problem for which lists [`serve`]. It says that keys are hidden, as a band would, so that the kernel
/// handles NaN in hidden rows of V.
pub(crate) fn spec(problem: &FwdProblem) -> FwdSpec {
    let spec = FwdSpec::of(problem);
    let mask = if spec.mask == MaskKind::Full { MaskKind::Upper } else { spec.mask };
    FwdSpec { mask, code: code_beside_lists(problem), ..spec }
}

/// The band used to order tiles and to price a call. If masks that the host does not read hide pairs, it is the
/// causal band, under which tiles differ in length too.
pub(crate) fn band_of_tiles(problem: &FwdProblem) -> MaskSpec {
    let hides = !problem.masks.is_empty() || problem.code.mask.is_some();
    if hides && problem.mask.kind() == MaskKind::Full { MaskSpec::CAUSAL } else { problem.mask }
}

/// Refuses features that lists of tiles do not support: 8-bit types, and a mask as code that reads the head index
/// together with masks as data.
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

/// Name in plans of the launch that gives each block its place in the order of additions.
const RANK_NAME: &str = "tile_ranks";

/// The launch after the one that lists tiles of keys, which gives their [steps and ranks](TileListPlan::ordered).
pub(crate) fn rank_launch(spec: &FwdSpec, block_n: i32, plan: &TileListPlan, facts: &DeviceFacts) -> Launch {
    let grid = Grid::new(plan.groups(), THREADS);
    row_launch((Stage::RankTiles, RANK_NAME), rank_tiles(spec, block_n), grid, facts)
}

/// The kernel of the launch that ranks tiles. Its arguments are those of [`list_tiles`].
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

/// The text of a kernel that runs after the launches that make lists. A kernel that evaluates no function has one text
/// for all functions.
pub(crate) fn behind(plan: &TileListPlan, problem: &FwdProblem, source: KernelSource) -> KernelSource {
    let asks = plan.code() == MaskCode::Asked || problem.code.score.is_some();
    if asks { source } else { source.without_code() }
}

/// Name in plans of the launch that writes a mask function as bits.
const BITS_NAME: &str = "mask_bits";

/// Number of queries of a warp in that launch, and then of words, as in `fmha/common/function_bits.cuh`.
const ROWS_OF_BITS: u32 = 32;
const WORDS_OF_BITS: u32 = 8;

/// Launches before the kernel that reads lists: the bits of a mask as code, if the plan has them, then the lists.
pub(crate) fn launches(
    plan: &TileListPlan,
    problem: &FwdProblem,
    spec: &FwdSpec,
    facts: &DeviceFacts,
) -> Result<Vec<Launch>, String> {
    let bits = plan.words_of_bits(problem).map(|(words, sequences)| -> Result<Launch, String> {
        let groups = u64::from(problem.dims.seqlen_q.div_ceil(ROWS_OF_BITS)) * u64::from(sequences);
        let warps = groups * u64::from(words.div_ceil(WORDS_OF_BITS));
        let warps = i32::try_from(warps)
            .map_err(|_| format!("mask as code: its bits take {warps} warps, 2^31 or more"))?;
        let ctas = warps.unsigned_abs().div_ceil(THREADS / 32).max(1);
        let source = mask_bits(spec, words);
        Ok(row_launch((Stage::MaskBits, BITS_NAME), source, Grid::new(ctas, THREADS), facts))
    });
    Ok(bits.transpose()?.into_iter().chain([plan.launch(spec, facts)]).collect())
}

/// Kernel that writes a mask as code as bits, `words` for each query; its arguments are those of [`list_tiles`]. It
/// reads only the layouts of Q, K and V from the spec.
#[must_use]
pub fn mask_bits(spec: &FwdSpec, words: u32) -> KernelSource {
    let entry = Entry {
        include: "fmha/common/function_bits.cuh",
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({THREADS})"),
        params: &format!("const __grid_constant__ FwdParams p{PARAMS}"),
        call: &format!(
            "static_assert(FunctionBits::rows == {ROWS_OF_BITS} && FunctionBits::words == {WORDS_OF_BITS}, \
             \"host and device disagree\"); (void)list; \
             FunctionBits{{p, masks}}.run(kSpec.q_layout, kSpec.kv_layout, {words});"
        ),
    };
    crate::source(entry.render(), || [schedule::header(), fmha_core::masks::header(), header()])
}

/// The kernel of the launch that makes lists. It reads only the layouts of Q, K and V from the spec.
#[must_use]
pub fn list_tiles(spec: &FwdSpec, of: TileOf, [block_m, block_n]: [i32; 2], code: MaskCode) -> KernelSource {
    let (has_function, has_bits) = (code == MaskCode::Asked, code == MaskCode::InBits);
    let entry = Entry {
        include: "fmha/common/tile_list.cuh",
        constants: &[("kSpec", spec)],
        // Two CTAs per multiprocessor: by default ptxas aims at four and spills.
        bounds: &format!("__launch_bounds__({THREADS}, 2)"),
        params: &format!("const __grid_constant__ FwdParams p{PARAMS}"),
        call: &format!(
            "static_assert(TileListCta::threads == {THREADS}, \"host and device disagree\"); \
             list_tiles<TileListCta, kSpec, {block_m}, {block_n}, {of_keys}, {has_function}, {has_bits}, {of_keys}>(\
             p, masks, list);",
            of_keys = of == TileOf::Keys
        ),
    };
    crate::source(entry.render(), || [schedule::header(), fmha_core::masks::header(), header()])
}
