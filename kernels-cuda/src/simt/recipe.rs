//! The kernel that computes every spec.

use crate::simt;
use fmha_core::error::{Refusal, Result};
use fmha_core::spec::FwdSpec;
use fmha_core::{PlanOptions, ValidFwd, Workspace, bind};
use fmha_gpu::{Choice, Grid, Kernel, Launches, Recipe, Steps, deterministic_rows};

use crate::nvidia::{DeviceFacts, FwdCall, FwdKernel, Nvidia, row_launch};

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
        problem.refuse_cache_updates(simt::NAME)?;
        options.refuse_tile(simt::NAME)?;
        let grid = Grid::new(simt::grid(problem, facts.num_sms), simt::NUM_THREADS);
        Ok(Choice {
            kernel: Kernel::new(*self),
            launches: Launches::from(row_launch(simt::NAME, simt::fwd(&FwdSpec::of(problem)), grid, facts)),
            workspace: Workspace::NONE,
            // A row is one warp's, its keys in one order, whatever the other rows are.
            promises: deterministic_rows(),
            details: vec![("tile", "a warp to a row, 32 keys at a time".to_owned())],
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let fwd = steps.main();
        let mut params = bind::fwd_params(call.problem, call.args);
        // SAFETY: the kernel takes one FwdParams; `check_fwd` saw that its memory covers the problem.
        unsafe { fwd.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
