//! Split-KV's second launch, which sm80, sm90 and sm100 have in common.

use crate::split::{self, Merging};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, ValidFwd};
use fmha_gpu::{Grid, Launch};

use crate::nvidia::{DeviceFacts, row_launch};

/// Merges the parts of a problem's keys, `keys` each, under the name of `kernel` in plans. It starts while the parts' grid
/// ends where the device can do so.
pub(crate) fn merge(
    kernel: &'static str,
    problem: &ValidFwd,
    (keys, stored): (i32, DType),
    facts: &DeviceFacts,
) -> Launch {
    let merging = Merging::new(problem, keys, stored, facts.instructions.tma);
    // A launch of its own writes the keep mask.
    let spec = FwdSpec { write_keep_mask: false, ..FwdSpec::of(problem) };
    let tree = problem.cache.tree_mask;
    let source = if tree { split::merge_tree(&spec, merging) } else { split::merge(&spec, merging) };
    let groups = merging.grid(problem, facts.num_sms);
    let grid = Grid { dependent: merging.dependent, ..Grid::new(groups, split::MERGE_THREADS) };
    row_launch(kernel, source, grid, facts)
}
