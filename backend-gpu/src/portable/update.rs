//! The launches before a forward kernel: one updates the cache that the kernel reads; one writes the keep mask, if
//! the kernel does not.

use fmha_core::abi::FwdParams;
use fmha_core::cache_update::{CacheSpec, bind, is_wanted, num_rows, workspace_bytes};
use fmha_core::{Call, Result, ValidFwd, Workspace};

use super::RowKernel;
use crate::driver::Driver;
use crate::launches::{Launch, Stage};
use crate::recipe::Facts;
use crate::steps::Steps;

/// The launch that updates the cache, with this name, if the problem needs one.
///
/// # Errors
/// More groups than a grid has.
pub fn launch_before(
    name: &'static str,
    problem: &ValidFwd,
    facts: &impl Facts,
) -> Result<Option<Launch>, String> {
    let launch = || {
        let (spec, rows) = (CacheSpec::of(problem), [num_rows(problem), 0]);
        facts.row_launch((Stage::UpdateCache, name), RowKernel::UpdateCache, &spec, rows)
    };
    is_wanted(problem).then(launch).transpose()
}

/// A kernel's `own` workspace followed by that of the cache update.
///
/// # Errors
/// The limit that both together exceed.
pub fn workspace(problem: &ValidFwd, own: Workspace) -> Result<Workspace, String> {
    if !is_wanted(problem) {
        return Ok(own);
    }
    let bytes = place(own)
        .checked_add(workspace_bytes(problem))
        .filter(|&bytes| bytes < 1 << 62)
        .ok_or("the workspace would be 2^62 bytes or more")?;
    Ok(Workspace { bytes, ..own })
}

/// Offset of the cache update's part of the workspace, after the kernel's own part.
fn place(own: Workspace) -> u64 {
    own.bytes.next_multiple_of(256)
}

/// Queues those launches before a forward kernel that the plan has; returns the parameters for the kernel.
///
/// # Safety
/// As [`fmha_core::Launch::launch`]; the steps and the workspace are those of a plan of [`launch_before`] and
/// [`workspace`] with the same `own`.
///
/// # Errors
/// An error of the driver.
pub unsafe fn run<D: Driver>(
    steps: &Steps<D>,
    call: &Call<'_, ValidFwd>,
    own: Workspace,
) -> Result<FwdParams> {
    let mut params = fmha_core::bind::fwd_params(call.problem, call.args);
    // If a launch before has converted the cache, the cache itself has been updated already.
    if is_wanted(call.problem) {
        // SAFETY: the caller keeps the contract of this function, which is that of `run_alone`.
        params = unsafe { run_alone(steps, call, own)? };
    }
    if let Some(step) = steps.at(Stage::KeepMask) {
        // SAFETY: the kernel takes FwdParams; core saw that the keep mask covers the problem.
        unsafe { step.launch(&mut [(&raw mut params).cast()], call.stream)? };
    }
    Ok(params)
}

/// Queues the launch that updates the cache, if the plan has it; returns the parameters for the kernel that follows.
///
/// # Safety
/// As [`run`].
///
/// # Errors
/// An error of the driver.
pub unsafe fn run_alone<D: Driver>(
    steps: &Steps<D>,
    call: &Call<'_, ValidFwd>,
    own: Workspace,
) -> Result<FwdParams> {
    let mut params = fmha_core::bind::fwd_params(call.problem, call.args);
    let Some(step) = steps.at(Stage::UpdateCache) else { return Ok(params) };
    let (mut update, updated) = bind(call.problem, call.args, &params, params.workspace.0 + place(own));
    // SAFETY: the kernel takes FwdParams and CacheUpdate; core saw that the memory of both covers the problem, and the
    // workspace is as large as the plan says.
    unsafe { step.launch(&mut [(&raw mut params).cast(), (&raw mut update).cast()], call.stream)? };
    Ok(updated)
}
