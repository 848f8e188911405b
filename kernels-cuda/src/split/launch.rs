//! Parts of the keys, and the merging launch, for all forward kernels.

use fmha_core::abi::FwdParams;
use fmha_core::error::Result;
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, ValidFwd};
use fmha_gpu::{Driver, Grid, Launch, Stage, Steps};

use crate::lists::TokenParams;
use crate::nvidia::{DeviceFacts, FwdCall, row_launch};
use crate::split::{self, Cut, Merging, RowsAtOnce};
use crate::tree_mask;

/// The launch that merges the parts of a problem's keys, for this many `queries` at a time, named after `kernel` in
/// plans; `None` if keys are not split. It starts while the parts' grid ends, if the device supports that.
pub(crate) fn merge(
    kernel: &'static str,
    problem: &ValidFwd,
    (cut, queries, stored): (Cut, u32, DType),
    facts: &DeviceFacts,
) -> Option<Launch> {
    if cut.keys == 0 {
        return None;
    }
    let merging = Merging::new(problem, cut, stored, facts.instructions.tma);
    // Another launch writes the keep mask.
    let spec = FwdSpec { write_keep_mask: false, ..FwdSpec::of(problem) };
    let source = if problem.cache.tree_mask {
        split::merge_tree(&spec, merging)
    } else if problem.walks_caches() {
        split::merge_two_caches(&spec, merging)
    } else if problem.lists.is_some() {
        split::merge_lists(&spec, merging)
    } else {
        split::merge(&spec, merging)
    };
    let groups = merging.grid(problem, queries, facts.num_sms);
    let grid = Grid { dependent: merging.dependent, ..Grid::new(groups, merging.threads()) };
    Some(row_launch((Stage::Merge, kernel), source, grid, facts))
}

/// Queues a kernel for all rows; or, if the plan merges parts of the keys, for some row blocks at a time, each
/// followed by the merge. `main` queues the kernel with its arguments for a number of row blocks, from a first one
/// on.
///
/// # Safety
/// As [`fmha_core::Launch::launch`]; the workspace, in which O and LSE of the parts lie, is that of a plan of the same
/// cut.
///
/// # Errors
/// An error of the driver.
pub(crate) unsafe fn run<D: Driver>(
    steps: &Steps<D>,
    call: &FwdCall<'_>,
    mut whole: FwdParams,
    (cut, at_once): (Cut, RowsAtOnce),
    main: impl Fn(&mut FwdParams, (i32, i32)) -> Result<()>,
) -> Result<()> {
    let Some(merge) = steps.at(Stage::Merge) else { return main(&mut whole, (0, i32::MAX)) };
    let mut tree = tree_mask::bind(call.problem, call.args);
    let mut keys = TokenParams::of(call);
    // A kernel without a tree or lists has one argument fewer; the driver reads as many as a kernel declares.
    let last = if call.problem.walks_lists() { keys.as_mut_ptr() } else { (&raw mut tree).cast() };
    let all = call.problem.dims.seqlen_q;
    for n in 0..all.div_ceil(at_once.queries.max(1)) {
        let first = n * at_once.queries;
        let rows = first..all.min(first + at_once.queries);
        let mut parts = cut.parts(call.problem, rows, whole.workspace.0);
        main(&mut parts.params(&whole), ((n * at_once.blocks).cast_signed(), at_once.blocks.cast_signed()))?;
        let mut arguments = [(&raw mut whole).cast(), (&raw mut parts).cast(), last];
        // SAFETY: the kernel takes FwdParams, KvParts and, under a tree mask, TreeMask, over lists ListParams, over two
        // caches TwoCachesParams;
        // `check_fwd` saw that the memory covers the problem, and that the workspace is as large as the plan says.
        unsafe { merge.launch(&mut arguments, call.stream)? };
    }
    Ok(())
}

/// How keys are split, as plans print it; `None` if they are not split.
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
