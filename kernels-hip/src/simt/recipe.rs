//! The kernel that computes every forward problem.

use crate::simt;
use fmha_core::{Call, PlanOptions, Refusal, ResourceUsage, Result, ValidFwd, bind};
use fmha_gpu::{Choice, Kernel, Launch, Launches, Recipe, Steps, deterministic_rows};

use crate::cache_update::launch as update;
use crate::device::{Amd, Device, DeviceFacts, launch, lay_out};

/// Takes every forward problem, a wave to a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Simt {
    device: Option<Device>,
}

impl<V: Amd> Recipe<ValidFwd, V> for Simt {
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
    ) -> Result<Choice<Kernel<ValidFwd, V>>, Refusal> {
        let arch = facts.device.arch;
        let spec = simt::accept(problem, arch, options)?;
        let workgroups = simt::num_workgroups(problem, arch);
        Ok(Choice {
            kernel: Kernel::new(Self { device: Some(facts.device) }),
            launches: Launches::new(
                update::launch_before(problem),
                launch(simt::NAME, simt::source(&spec), workgroups, simt::NUM_THREADS),
                [],
            ),
            workspace: update::workspace(problem, 0),
            // A row is one wave's, its keys in one order, whatever the other rows are.
            promises: deterministic_rows(),
            details: vec![("tile", format!("a wave to a row, {} keys at a time", arch.wave_threads()))],
        })
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.device, launch, usage);
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let whole = bind::fwd_params(call.problem, call.args);
        // SAFETY: the caller's promise; the workspace is as large as the plan said.
        let mut params = unsafe { update::run(steps, call, &whole, 0)? };
        // SAFETY: the kernel takes one FwdParams; core saw that its memory covers the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
