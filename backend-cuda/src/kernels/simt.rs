//! The kernel that computes every spec.

use fmha_core::error::{Refusal, Result};
use fmha_core::spec::FwdSpec;
use fmha_core::{PlanOptions, ValidFwd, Workspace, bind};
use fmha_gpu::{Choice, Grid, Kernel, Launch, Launches, Recipe, deterministic_rows};
use fmha_kernels_cuda::simt;

use super::{Cuda, DeviceFacts, FwdCall, FwdKernel, ROW_CTAS_PER_SM, Steps};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Simt;

impl Recipe<ValidFwd, Cuda> for Simt {
    fn name(&self) -> &'static str {
        "simt"
    }

    fn is_fallback(&self) -> bool {
        true
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<FwdKernel>, Refusal> {
        problem.refuse_cache_updates(self.name())?;
        if let Some((key, value)) = options.tile.first() {
            return Err(Refusal::new(self.name(), format!("tile {key}={value}: it has no tile to set")));
        }
        let grid = Grid::new(simt::grid(problem, facts.num_sms), simt::NUM_THREADS);
        Ok(Choice {
            kernel: Kernel::new(*self),
            launches: Launches::from(Launch {
                kernel: self.name(),
                source: simt::fwd(&FwdSpec::of(problem)),
                grid,
                shared_bytes: 0,
                tiles: grid.groups.into(),
                tiles_at_once: u64::from(ROW_CTAS_PER_SM * facts.num_sms),
            }),
            workspace: Workspace::NONE,
            // A row is one warp's, its keys in one order, whatever the other rows are.
            promises: deterministic_rows(),
            details: vec![("tile", "a warp to a row, 32 keys at a time".to_owned())],
        })
    }

    unsafe fn launch(&self, steps: &Steps, call: &FwdCall<'_>) -> Result<()> {
        let fwd = steps.main();
        let mut params = bind::fwd_params(call.problem, call.args);
        // SAFETY: the kernel takes one FwdParams; `check_fwd` saw that its memory covers the problem.
        unsafe { fwd.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
