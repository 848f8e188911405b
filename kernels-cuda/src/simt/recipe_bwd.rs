//! The kernels that compute every backward spec.

use crate::simt;
use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace};
use fmha_core::error::{Refusal, Result};
use fmha_core::spec::BwdSpec;
use fmha_core::{PlanOptions, ValidBwd, Workspace, bind};
use fmha_gpu::{Choice, Grid, Kernel, Launches, Recipe, Steps, deterministic_rows, exactly};

use crate::nvidia::{BwdCall, BwdKernel, DeviceFacts, Nvidia, row_launch};

/// Takes every backward problem, a warp to a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SimtBwd {
    chosen: Option<BwdWorkspace>,
}

impl<V: Nvidia> Recipe<ValidBwd, V> for SimtBwd {
    fn name(&self) -> &'static str {
        simt::NAME
    }

    fn is_fallback(&self) -> bool {
        true
    }

    fn choose(
        &self,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<BwdKernel<V>>, Refusal> {
        options.refuse_tile(simt::NAME)?;
        // Nothing is padded: a block is a row.
        let workspace = BwdWorkspace::new(problem, 1, None, 0)
            .ok_or_else(|| Refusal::new(simt::NAME, "the workspace would be 2^62 bytes or more"))?;
        let spec = BwdSpec::of(problem);
        let launch = |kernel, source, rows| {
            let grid = Grid::new(simt::row_grid(rows, facts.num_sms), simt::NUM_THREADS);
            row_launch(kernel, source, grid, facts)
        };
        let rows = BwdRows::of(problem);
        Ok(Choice {
            kernel: Kernel::new(SimtBwd { chosen: Some(workspace) }),
            launches: Launches::new(
                [launch("simt_bwd_stats", simt::bwd_stats(&spec), rows.queries)],
                launch(simt::NAME, simt::bwd(&spec), rows.all()),
                [],
            ),
            workspace: Workspace { bytes: workspace.bytes, zeroed_bytes: 0 },
            promises: deterministic_rows(),
            details: vec![("tile", "a warp to a row, 32 pairs at a time".to_owned())],
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        let ([stats], rows) = (exactly(steps.before())?, steps.main());
        let workspace = fmha_gpu::chosen(self.chosen, "simt")?;
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = workspace.bind(bind::bwd_params(call.problem, call.args), address);
        let mut arguments = [(&raw mut params).cast()];
        // SAFETY: both kernels take one BwdParams; `check_bwd` saw that its memory covers the problem, and the workspace
        // is as large as the plan said.
        unsafe {
            stats.launch(&mut arguments, call.stream)?;
            rows.launch(&mut arguments, call.stream)
        }
    }
}
