//! Split-KV's second launch, which sm80, sm90 and sm100 have in common.

use crate::schedule::TileSchedule;
use crate::split::{self, Cut, KvParts, Merging, RowsAtOnce};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, ValidFwd};
use fmha_gpu::{Grid, Launch};

use crate::nvidia::{DeviceFacts, row_launch};

/// Merges the parts of a problem's keys, of so many `queries` at a time, under the name of `kernel` in plans. It starts while the
/// parts' grid ends where the device can do so.
pub(crate) fn merge(
    kernel: &'static str,
    problem: &ValidFwd,
    (cut, queries, stored): (Cut, u32, DType),
    facts: &DeviceFacts,
) -> Launch {
    let merging = Merging::new(problem, cut, stored, facts.instructions.tma);
    // A launch of its own writes the keep mask.
    let spec = FwdSpec { write_keep_mask: false, ..FwdSpec::of(problem) };
    let tree = problem.cache.tree_mask;
    let source = if tree { split::merge_tree(&spec, merging) } else { split::merge(&spec, merging) };
    let groups = merging.grid(problem, queries, facts.num_sms);
    let grid = Grid { dependent: merging.dependent, ..Grid::new(groups, split::MERGE_THREADS) };
    row_launch(kernel, source, grid, facts)
}

/// The launches of a call in parts: which row blocks each has, and where in the workspace their parts lie.
pub(crate) fn launches(
    problem: &ValidFwd,
    cut: Cut,
    at_once: RowsAtOnce,
    schedule: TileSchedule,
    workspace: u64,
) -> impl Iterator<Item = (TileSchedule, KvParts)> {
    let RowsAtOnce { blocks, queries } = at_once;
    let all = problem.dims.seqlen_q;
    (0..all.div_ceil(queries.max(1))).map(move |n| {
        let first = n * queries;
        let rows = schedule.of_blocks((n * blocks).cast_signed(), blocks.cast_signed());
        (rows, cut.parts(problem, first..all.min(first + queries), workspace))
    })
}

/// How keys are cut, for plans; `None` where they are not.
pub(crate) fn words(cut: Cut) -> Option<String> {
    if let Some(shares) = cut.shares {
        return Some(format!(
            "keys of all sequences in {} equal shares of {} at least, merged",
            shares.count, cut.keys
        ));
    }
    let of = if cut.fixed { "of every sequence " } else { "" };
    (cut.keys > 0).then(|| format!("keys {of}in parts of {}, merged", cut.keys))
}
