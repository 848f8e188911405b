//! The kernel that computes every spec.

use fmha_core::error::{Refusal, Result};
use fmha_core::spec::FwdSpec;
use fmha_core::{Accuracy, PlanOptions, Promises, ScoreSums, ValidFwd, Workspace, bind};
use fmha_kernels_cuda::simt;

use super::{Choice, DeviceFacts, FwdCall, FwdKernel, FwdRecipe, Launch, Named, ROW_CTAS_PER_SM};
use crate::driver::Grid;
use crate::steps::{Step, exactly};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Simt;

impl Named for Simt {
    fn name(&self) -> &'static str {
        "simt"
    }

    fn is_fallback(&self) -> bool {
        true
    }
}

impl FwdRecipe for Simt {
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
            kernel: (*self).into(),
            launches: vec![Launch {
                kernel: self.name(),
                source: simt::fwd(&FwdSpec::of(problem)),
                grid,
                smem_bytes: 0,
                tiles: grid.ctas.into(),
                tiles_at_once: u64::from(ROW_CTAS_PER_SM * facts.num_sms),
            }],
            workspace: Workspace::NONE,
            // A row is one warp's, its keys in one order, whatever the other rows are.
            promises: Promises {
                deterministic: true,
                batch_invariant: true,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: ScoreSums::F32,
            },
            details: vec![("tile", "a warp to a row, 32 keys at a time".to_owned())],
        })
    }

    fn launch(&self, steps: &[Step], call: &FwdCall<'_>) -> Result<()> {
        let [fwd] = exactly(steps)?;
        let mut params = bind::fwd_params(call.problem, call.args);
        // SAFETY: the kernel takes one FwdParams; `check_fwd` saw that its memory covers the problem.
        unsafe { fwd.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
