//! Split-KV's second launch, which sm80, sm90 and sm100 have in common.

use fmha_core::spec::FwdSpec;
use fmha_core::{DType, ValidFwd};
use fmha_gpu::{Grid, Launch};
use fmha_kernels_cuda::split::{self, Merging};

use super::DeviceFacts;

/// CTAs of the merging kernel that a multiprocessor holds at a time: 256 threads each, of 2048.
const CTAS_PER_SM: u32 = 8;

/// Merges the parts of a problem's keys, `keys` each, under the name of `kernel` in plans. It starts while the parts' grid
/// ends where the device can do so.
pub(super) fn merge(
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
    Launch {
        kernel,
        source,
        grid: Grid { dependent: merging.dependent, ..Grid::new(groups, split::MERGE_THREADS) },
        shared_bytes: 0,
        tiles: groups.into(),
        tiles_at_once: u64::from(CTAS_PER_SM * facts.num_sms),
    }
}
