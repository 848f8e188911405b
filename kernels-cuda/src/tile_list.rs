//! Lists of the blocks of keys that tiles of queries see under masks as data, or of the blocks of queries that see
//! tiles of keys: one small launch makes them in the workspace before the kernel that walks them.

use fmha_core::abi::{AbiStruct as _, DevPtr};
use fmha_core::expr::{Function, Node, Variable};
use fmha_core::masks::Masks;
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::spec::{CodeKind, FwdSpec};
use fmha_core::{FwdProblem, KvLayout, MaskKind, QLayout, Refusal, Workspace, abi_struct};
use fmha_gpu::{Grid, Launch, Stage};

use crate::nvidia::{DeviceFacts, row_launch};
use crate::schedule;

/// The launch's name in plans.
pub const NAME: &str = "tile_list";

/// Threads of a CTA of that launch.
const THREADS: u32 = 256;

/// Last parameters of an entry that walks lists.
pub(crate) const PARAMS: &str =
    ", const __grid_constant__ MaskDataParams masks, const __grid_constant__ TileList list";

abi_struct! {
    /// Blocks of each tile, a kernel argument: of keys for a tile of queries, of queries for a tile of keys. A row
    /// is of a sequence, a head of the masks and a tile.
    pub struct TileList {
        /// How many blocks of a row are cut, and how many are whole.
        pub counts: DevPtr<i32>,
        /// Blocks of a row: those that are cut from its begin up, whole ones from its end down.
        pub blocks: DevPtr<i32>,
        /// Tiles of the longest sequence.
        pub num_tiles: i32,
        /// Blocks that a row has room for.
        pub max_blocks: i32,
        /// Heads of a sequence's lists; 0 where all sequences have the same.
        pub heads_of_batch: i32,
        /// Query heads to one of them.
        pub heads_ratio: i32,
    }
}

/// Rows of a tile: queries or keys. The list of a tile has blocks of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileOf {
    /// Queries, as forward.
    Queries,
    /// Keys, as backward.
    Keys,
}

/// Lists of a problem's tiles, and where they lie in the workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TileListPlan {
    list: TileList,
    of: TileOf,
    block: [i32; 2],
    rows: u32,
    counts: u64,
    blocks: u64,
}

/// Bytes of lists, at most: they grow with the square of the length, and `sm80` serves the same masks without any.
const MOST_BYTES: u64 = 4 << 30;

impl TileListPlan {
    /// Lists of tiles and blocks of `block_m` queries and `block_n` keys behind `before` of the workspace, and the
    /// whole workspace.
    ///
    /// # Errors
    /// 2^30 rows or more, with the fields that make them.
    pub(crate) fn new(
        problem: &FwdProblem,
        of: TileOf,
        block: [i32; 2],
        before: Workspace,
    ) -> Result<(Self, Workspace), String> {
        let dims = problem.dims;
        let heads = heads_of(&problem.masks);
        let queries = dims.seqlen_q.div_ceil(block[0].unsigned_abs());
        let keys = dims.seqlen_k.div_ceil(block[1].unsigned_abs());
        let (tiles, blocks) = if of == TileOf::Queries { (queries, keys) } else { (keys, queries) };
        let max_blocks = blocks.max(1);
        let batch = if shared_by_batch(problem) { dims.batch.min(1) } else { dims.batch };
        let rows = u64::from(batch) * u64::from(heads) * u64::from(tiles);
        if rows >= 1 << 30 {
            return Err(format!(
                "seqlen_q {}, seqlen_k {}, {heads} heads of masks and batch {} make {rows} lists of tiles, not below 2^30",
                dims.seqlen_q, dims.seqlen_k, dims.batch
            ));
        }
        // Whole lines of the L2.
        let counts = before.bytes.next_multiple_of(128);
        let blocks = (counts + 8 * rows).next_multiple_of(128);
        let list = TileList {
            counts: DevPtr::NULL,
            blocks: DevPtr::NULL,
            num_tiles: tiles.max(1).cast_signed(),
            max_blocks: max_blocks.cast_signed(),
            heads_of_batch: if shared_by_batch(problem) { 0 } else { heads.cast_signed() },
            heads_ratio: (dims.num_heads_q / heads.max(1)).max(1).cast_signed(),
        };
        let bytes = blocks + 4 * rows * u64::from(max_blocks);
        if bytes > MOST_BYTES {
            return Err(format!(
                "lists of tiles would take {bytes} bytes of workspace, more than {MOST_BYTES}"
            ));
        }
        Ok((Self { list, of, block, rows: rows as u32, counts, blocks }, Workspace { bytes, ..before }))
    }

    /// Lists in a workspace.
    pub(crate) fn at(&self, address: u64) -> TileList {
        let (counts, blocks) = (DevPtr::new(address + self.counts), DevPtr::new(address + self.blocks));
        TileList { counts, blocks, ..self.list }
    }

    /// The launch that makes them: arguments `FwdParams`, [`MaskDataParams`](fmha_core::masks::MaskDataParams),
    /// [`TileList`].
    pub(crate) fn launch(&self, spec: &FwdSpec, has_function: bool, facts: &DeviceFacts) -> Launch {
        let source = list_tiles(spec, self.of, self.block, has_function);
        row_launch((Stage::ListTiles, NAME), source, Grid::new(self.rows, THREADS), facts)
    }

    /// Words of a plan: how many lists there are.
    pub(crate) fn words(&self) -> String {
        let what = if self.of == TileOf::Queries { "keys" } else { "queries" };
        format!(
            "{} of up to {} blocks of {what}, made on the device before each run",
            self.rows, self.list.max_blocks
        )
    }
}

/// Whether lists of tiles serve a problem: one with masks as data, or with a mask as code that does not read the
/// head, so that one list serves all heads.
#[must_use]
pub fn serve(problem: &FwdProblem) -> bool {
    // A function alone over keys that arrive while the call runs is asked pair by pair: lists do not wait.
    let is_listed = problem.code.mask.is_some() && !reads_head(problem) && problem.arrivals == 0;
    !problem.masks.is_empty() || is_listed
}

/// Whether the mask as code reads the head.
#[must_use]
pub fn reads_head(problem: &FwdProblem) -> bool {
    problem.code.mask.as_ref().is_some_and(|mask| reads(mask, Variable::Head))
}

/// Whether all sequences of a batch see the same: they are of one length, and no mask is one's own.
fn shared_by_batch(problem: &FwdProblem) -> bool {
    let FwdProblem { layout, masks, .. } = problem;
    let is_even = layout.q == QLayout::Batch
        && layout.kv == KvLayout::Strided
        && !layout.seqused_q
        && !layout.seqused_k;
    let own = [
        masks.intervals.is_some_and(|it| it.axes.per_batch),
        masks.bits.is_some_and(|it| it.axes.per_batch),
        masks.block_lists.is_some_and(|it| it.axes.per_batch),
        problem.code.mask.as_ref().is_some_and(|mask| reads(mask, Variable::Batch)),
    ];
    is_even && !own.contains(&true)
}

/// Whether a function reads a property of the pair.
fn reads(function: &Function, variable: Variable) -> bool {
    function.graph().nodes().contains(&Node::Variable(variable))
}

/// The functions that scores are computed by where lists ask the mask.
pub(crate) fn code_beside_lists(problem: &FwdProblem) -> CodeKind {
    if problem.code.score.is_some() { CodeKind::Score } else { CodeKind::None }
}

/// Spec of a problem that lists [`serve`]. They hide keys as a band does: the text of a mask's kind knows that V may
/// have a hidden NaN.
pub(crate) fn spec(problem: &FwdProblem) -> FwdSpec {
    let spec = FwdSpec::of(problem);
    let mask = if spec.mask == MaskKind::Full { MaskKind::Upper } else { spec.mask };
    FwdSpec { mask, code: code_beside_lists(problem), ..spec }
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

/// Heads that have lists of their own: those of the mask that has the most.
fn heads_of(masks: &Masks) -> u32 {
    let intervals = masks.intervals.map(|it| it.axes);
    let axes = [intervals, masks.bits.map(|it| it.axes), masks.block_lists.map(|it| it.axes)];
    axes.into_iter().flatten().map(|axes| axes.heads).max().unwrap_or(1)
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
            "static_assert(kTileListThreads == {THREADS}, \"host and device disagree\"); \
             list_tiles<kSpec, {block_m}, {block_n}, {}, {has_function}>(p, masks, list);",
            of == TileOf::Keys
        ),
    };
    crate::source(entry.render(), || [schedule::header(), fmha_core::masks::header(), header()])
}

/// `fmha/tile_list.h`: what this file shares with the device.
pub(crate) fn header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}\n}}  // namespace fmha\n",
        TileList::c_definition()
    );
    Header::rendered("fmha/tile_list.h", text)
}
