//! The kernel that merges partial results.

use fmha_core::error::{Refusal, Result};
use fmha_core::spec::CombineSpec;
use fmha_core::{PlanOptions, ValidCombine, Workspace, bind};
use fmha_gpu::{Choice, Grid, Kernel, Launches, Recipe, deterministic_rows};
use fmha_kernels_cuda::combine;

use super::{CombineCall, CombineKernel, Cuda, DeviceFacts, Steps, row_launch};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Merge;

impl Recipe<ValidCombine, Cuda> for Merge {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn choose(
        &self,
        problem: &ValidCombine,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<CombineKernel>, Refusal> {
        if let Some((key, value)) = options.tile.first() {
            return Err(Refusal::new(self.name(), format!("tile {key}={value}: it has no tile to set")));
        }
        combine::accepts(problem)?;
        let grid = Grid::new(combine::grid(problem, facts.num_sms), combine::NUM_THREADS);
        Ok(Choice {
            kernel: Kernel::new(*self),
            launches: Launches::from(row_launch(
                self.name(),
                combine::merge(&CombineSpec::of(problem)),
                grid,
                facts,
            )),
            workspace: Workspace::NONE,
            // A row is merged by one thread group, in the order of its parts.
            promises: deterministic_rows(),
            details: Vec::new(),
        })
    }

    unsafe fn launch(&self, steps: &Steps, call: &CombineCall<'_>) -> Result<()> {
        let merge = steps.main();
        let mut params = bind::combine_params(call.problem, call.args);
        // SAFETY: the kernel takes one CombineParams; `check_combine` saw that its memory covers the
        // problem.
        unsafe { merge.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
