//! The launch before a forward kernel that updates the cache it reads, for every kernel that has one.

use crate::cache_update;
use fmha_core::abi::FwdParams;
use fmha_core::error::Result;
use fmha_core::{ValidFwd, Workspace};
use fmha_gpu::{Driver, Grid, Launch, Step, exactly};

use crate::nvidia::{DeviceFacts, FwdCall, row_launch};

/// The launch, under the name of `kernel` in plans, where the problem wants one.
pub(crate) fn launch_before(kernel: &'static str, problem: &ValidFwd, facts: &DeviceFacts) -> Option<Launch> {
    cache_update::is_wanted(problem).then(|| {
        let grid = Grid::new(cache_update::grid(problem, facts.num_sms), cache_update::NUM_THREADS);
        row_launch(kernel, cache_update::update(problem), grid, facts)
    })
}

/// A kernel's `own` workspace with that of the launch behind it.
///
/// # Errors
/// That both together are too large.
pub(crate) fn workspace(problem: &ValidFwd, own: Workspace) -> Result<Workspace, String> {
    if !cache_update::is_wanted(problem) {
        return Ok(own);
    }
    let bytes = place(own)
        .checked_add(cache_update::workspace_bytes(problem))
        .filter(|&bytes| bytes < 1 << 62)
        .ok_or("the workspace would be 2^62 bytes or more")?;
    Ok(Workspace { bytes, ..own })
}

/// Where the launch's part of the workspace begins, behind the kernel's own.
fn place(own: Workspace) -> u64 {
    own.bytes.next_multiple_of(256)
}

/// Queues the launch, the first of the steps `before` the kernel, if the call has one; returns the arguments of what comes
/// after it, and the steps that are left before the kernel.
///
/// # Safety
/// As [`fmha_core::Launch::launch`]; the steps and the workspace are those of a plan of [`launch_before`] and [`workspace`]
/// with the same `own`.
///
/// # Errors
/// What the driver said, or that queries have no room to be turned.
pub(crate) unsafe fn run<'s, D: Driver>(
    before: &'s [Step<D>],
    call: &FwdCall<'_>,
    mut whole: FwdParams,
    own: Workspace,
) -> Result<(FwdParams, &'s [Step<D>])> {
    if !cache_update::is_wanted(call.problem) {
        return Ok((whole, before));
    }
    let (step, left) = before.split_at(before.len().min(1));
    let [step] = exactly(step)?;
    let at = whole.workspace.0 + place(own);
    let (mut update, forward) = cache_update::bind(call.problem, call.args, &whole, at);
    // SAFETY: the kernel takes FwdParams and CacheUpdate; `check_fwd` saw that the memory of both covers the problem, and the
    // workspace is as large as the plan says.
    unsafe { step.launch(&mut [(&raw mut whole).cast(), (&raw mut update).cast()], call.stream)? };
    Ok((forward, left))
}
