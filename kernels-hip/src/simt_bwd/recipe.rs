//! The kernels that compute every backward problem.

use crate::{simt, simt_bwd};
use fmha_core::{Call, PlanOptions, Refusal, ResourceUsage, Result, ValidBwd, Workspace, bind};
use fmha_gpu::{Choice, Kernel, Launch, Launches, Recipe, Steps, deterministic_rows, exactly};

use crate::device::{Amd, Device, DeviceFacts, launch, lay_out};

/// Takes every backward problem, a wave to a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SimtBwd {
    chosen: Option<(simt_bwd::SimtBwd, Device)>,
}

impl<V: Amd> Recipe<ValidBwd, V> for SimtBwd {
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
    ) -> Result<Choice<Kernel<ValidBwd, V>>, Refusal> {
        let arch = facts.device.arch;
        let chosen = simt_bwd::accept(problem, arch, options)?;
        let rows = |kernel, source, workgroups| launch(kernel, source, workgroups, simt::NUM_THREADS);
        Ok(Choice {
            kernel: Kernel::new(Self { chosen: Some((chosen, facts.device)) }),
            launches: Launches::new(
                [rows(simt_bwd::STATS, chosen.stats_source(), chosen.stats_workgroups())],
                rows(simt::NAME, chosen.source_of_rows(), chosen.workgroups()),
                [],
            ),
            workspace: Workspace { bytes: chosen.workspace.bytes, zeroed_bytes: 0 },
            promises: deterministic_rows(),
            details: vec![("tile", format!("a wave to a row, {} pairs at a time", arch.wave_threads()))],
        })
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.chosen.map(|(_, device)| device), launch, usage);
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let (chosen, _) = fmha_gpu::chosen(self.chosen, "simt")?;
        let [stats] = exactly(steps.before())?;
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = chosen.workspace.bind(bind::bwd_params(call.problem, call.args), address);
        let mut arguments = [(&raw mut params).cast()];
        // SAFETY: both kernels take one BwdParams; core saw that its memory covers the problem, and the workspace is as
        // large as the plan said.
        unsafe {
            stats.launch(&mut arguments, call.stream)?;
            steps.main().launch(&mut arguments, call.stream)
        }
    }
}
