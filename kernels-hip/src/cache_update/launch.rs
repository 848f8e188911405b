//! The launch before a kernel that updates the cache it reads.

use crate::cache_update as text;
use fmha_core::abi::FwdParams;
use fmha_core::{Call, Result, ValidFwd, Workspace, cache_update};
use fmha_gpu::{Driver, Launch, Steps, exactly};

use crate::device::launch;

/// The launch, where the problem wants one.
pub(crate) fn launch_before(problem: &ValidFwd) -> Option<Launch> {
    cache_update::is_wanted(problem)
        .then(|| launch(text::NAME, text::source(problem), text::num_workgroups(problem), text::NUM_THREADS))
}

/// The workspace of a kernel that takes so many bytes for itself, and of the launch before it.
pub(crate) fn workspace(problem: &ValidFwd, own_bytes: u64) -> Workspace {
    let bytes = match cache_update::is_wanted(problem) {
        true => place(own_bytes).saturating_add(cache_update::workspace_bytes(problem)),
        false => own_bytes,
    };
    Workspace { bytes, zeroed_bytes: 0 }
}

/// Where the launch's part of the workspace begins.
fn place(own_bytes: u64) -> u64 {
    own_bytes.next_multiple_of(256)
}

/// Queues the launch, if there is one; returns the arguments of the kernel behind it.
///
/// # Safety
/// As [`fmha_core::Launch::launch`]; the steps and the workspace are those of a plan of [`launch_before`] and
/// [`workspace`] with the same `own_bytes`.
///
/// # Errors
/// What the driver said.
pub(crate) unsafe fn run<D: Driver>(
    steps: &Steps<D>,
    call: &Call<'_, ValidFwd>,
    whole: &FwdParams,
    own_bytes: u64,
) -> Result<FwdParams> {
    if !cache_update::is_wanted(call.problem) {
        return Ok(*whole);
    }
    let [step] = exactly(steps.before())?;
    let at = whole.workspace.0 + place(own_bytes);
    let (mut update, forward) = cache_update::bind(call.problem, call.args, whole, at);
    let mut whole = *whole;
    // SAFETY: the kernel takes FwdParams and CacheUpdate, whose sizes it asserts; core saw that the memory of both covers
    // the problem.
    unsafe { step.launch(&mut [(&raw mut whole).cast(), (&raw mut update).cast()], call.stream)? };
    Ok(forward)
}
