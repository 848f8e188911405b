//! The kernel that merges partial results.

use crate::combine;
use fmha_core::error::{Refusal, Result};
use fmha_core::spec::CombineSpec;
use fmha_core::{PlanOptions, ValidCombine, Workspace, bind};
use fmha_gpu::{Choice, Grid, Kernel, Launches, Recipe, Steps, deterministic_rows};

use crate::nvidia::{CombineCall, CombineKernel, DeviceFacts, Nvidia, row_launch};

/// Merges parts that the caller brings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merge;

impl<V: Nvidia> Recipe<ValidCombine, V> for Merge {
    fn name(&self) -> &'static str {
        combine::NAME
    }

    fn choose(
        &self,
        problem: &ValidCombine,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<CombineKernel<V>>, Refusal> {
        options.refuse_tile(combine::NAME)?;
        combine::accepts(problem)?;
        let grid = Grid::new(combine::grid(problem, facts.num_sms), combine::NUM_THREADS);
        Ok(Choice {
            kernel: Kernel::new(*self),
            launches: Launches::from(row_launch(
                combine::NAME,
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

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &CombineCall<'_>) -> Result<()> {
        let merge = steps.main();
        let mut params = bind::combine_params(call.problem, call.args);
        // SAFETY: the kernel takes one CombineParams; `check_combine` saw that its memory covers the
        // problem.
        unsafe { merge.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
