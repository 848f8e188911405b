//! The kernel that merges partial results.

use crate::combine;
use fmha_core::{Call, PlanOptions, Refusal, ResourceUsage, Result, ValidCombine, Workspace, bind};
use fmha_gpu::{Choice, Kernel, Launch, Launches, Recipe, Steps, deterministic_rows};

use crate::device::{Amd, Device, DeviceFacts, launch, lay_out};

/// Merges parts that the caller brings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Merge {
    device: Option<Device>,
}

impl<V: Amd> Recipe<ValidCombine, V> for Merge {
    fn name(&self) -> &'static str {
        combine::NAME
    }

    fn choose(
        &self,
        problem: &ValidCombine,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidCombine, V>>, Refusal> {
        options.refuse_tile(combine::NAME)?;
        let spec = combine::accept(problem)?;
        let (source, workgroups) = (combine::source(&spec), combine::num_workgroups(problem));
        Ok(Choice {
            kernel: Kernel::new(Self { device: Some(facts.device) }),
            launches: Launches::from(launch(combine::NAME, source, workgroups, combine::NUM_THREADS)),
            workspace: Workspace::NONE,
            // A row is merged in the order of its parts.
            promises: deterministic_rows(),
            details: Vec::new(),
        })
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.device, launch, usage);
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidCombine>) -> Result<()> {
        let mut params = bind::combine_params(call.problem, call.args);
        // SAFETY: the kernel takes one CombineParams; core saw that its memory covers the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
