//! The kernel that merges partial results.

use fmha_core::error::{Refusal, Result};
use fmha_core::spec::CombineSpec;
use fmha_core::{Accuracy, PlanOptions, Promises, ScoreSums, ValidCombine, Workspace, bind};
use fmha_kernels_cuda::combine;

use super::{Choice, CombineCall, CombineKernel, CombineRecipe, DeviceFacts, Launch, Named, ROW_CTAS_PER_SM};
use crate::driver::Grid;
use crate::steps::{Step, exactly};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Merge;

impl Named for Merge {
    fn name(&self) -> &'static str {
        "combine"
    }
}

impl CombineRecipe for Merge {
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
            kernel: (*self).into(),
            launches: vec![Launch {
                kernel: self.name(),
                source: combine::merge(&CombineSpec::of(problem)),
                grid,
                smem_bytes: 0,
                tiles: grid.ctas.into(),
                tiles_at_once: u64::from(ROW_CTAS_PER_SM * facts.num_sms),
            }],
            workspace: Workspace::NONE,
            // A row is merged by one thread group, in the order of its parts.
            promises: Promises {
                deterministic: true,
                batch_invariant: true,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: ScoreSums::F32,
            },
            details: Vec::new(),
        })
    }

    fn launch(&self, steps: &[Step], call: &CombineCall<'_>) -> Result<()> {
        let [merge] = exactly(steps)?;
        let mut params = bind::combine_params(call.problem, call.args);
        // SAFETY: the kernel takes one CombineParams; `check_combine` saw that its memory covers the
        // problem.
        unsafe { merge.launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
