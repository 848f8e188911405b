//! The kernel that computes every spec.

use crate::simt;
use fmha_core::error::{Refusal, Result};
use fmha_core::spec::FwdSpec;
use fmha_core::{PlanOptions, ValidFwd, Workspace, bind, cache_update};
use fmha_gpu::{Choice, Grid, Kernel, Launches, Recipe, Steps, deterministic_rows};

use crate::cache_update::launch as update;
use crate::nvidia::{DeviceFacts, FwdCall, FwdKernel, Nvidia, row_launch};

/// The name of the kernel that updates the cache.
const UPDATE_NAME: &str = "simt_update";

/// Takes every forward problem, a warp to a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simt;

impl<V: Nvidia> Recipe<ValidFwd, V> for Simt {
    fn name(&self) -> &'static str {
        simt::NAME
    }

    fn is_fallback(&self) -> bool {
        true
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<FwdKernel<V>>, Refusal> {
        if let Some(cache) = problem.cache.dtype {
            let text = format!("dtype_cache {cache} beside {} is not taken", problem.dtypes.qk);
            return Err(Refusal::new(simt::NAME, text));
        }
        if problem.cache.tree_mask {
            let text = format!("tree_mask of {} queries is not taken", problem.dims.seqlen_q);
            return Err(Refusal::new(simt::NAME, text));
        }
        cache_update::takes(problem, simt::NAME)?;
        options.refuse_tile(simt::NAME)?;
        let grid = Grid::new(simt::grid(problem, facts.num_sms), simt::NUM_THREADS);
        Ok(Choice {
            kernel: Kernel::new(*self),
            launches: Launches::new(
                update::launch_before(UPDATE_NAME, problem, facts),
                row_launch(simt::NAME, simt::fwd(&FwdSpec::of(problem)), grid, facts),
                [],
            ),
            workspace: update::workspace(problem, Workspace::NONE)
                .map_err(|text| Refusal::new(simt::NAME, text))?,
            // A row is one warp's, its keys in one order, whatever the other rows are.
            promises: deterministic_rows(),
            details: vec![("tile", "a warp to a row, 32 keys at a time".to_owned())],
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let fwd = steps.main();
        let whole = bind::fwd_params(call.problem, call.args);
        // SAFETY: the caller's promise; the workspace is as large as the plan said.
        let (mut params, _) = unsafe { update::run(steps.before(), call, whole, Workspace::NONE)? };
        // SAFETY: the kernel takes one FwdParams; `check_fwd` saw that its memory covers the problem.
        unsafe { fwd.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
