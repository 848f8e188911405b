//! The kernel that computes every spec.

use fmha_core::error::{Refusal, Result};
use fmha_core::spec::FwdSpec;
use fmha_core::{PlanOptions, ValidFwd};
use fmha_kernels_cuda::simt;

use super::{Call, Choice, DeviceFacts, ROW_CTAS_PER_SM, Recipe};
use crate::driver::{Grid, Kernel as Loaded};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Simt;

impl Recipe for Simt {
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
    ) -> Result<Choice, Refusal> {
        if let Some((key, value)) = options.tile.first() {
            return Err(Refusal::new(self.name(), format!("tile {key}={value}: it has no tile to set")));
        }
        let grid = Grid::new(simt::grid(problem, facts.num_sms), simt::NUM_THREADS);
        Ok(Choice {
            source: simt::fwd(&FwdSpec::of(problem)),
            grid,
            smem_bytes: 0,
            workspace_bytes: 0,
            tiles: grid.ctas.into(),
            tiles_at_once: u64::from(ROW_CTAS_PER_SM * facts.num_sms),
            details: vec![("tile", "a warp to a row, 32 keys at a time".to_owned())],
            kernel: (*self).into(),
        })
    }

    fn launch(&self, loaded: &Loaded, call: &Call<'_>) -> Result<()> {
        let mut params = call.params;
        let mut arguments = [(&raw mut params).cast()];
        // SAFETY: the kernel takes one FwdParams; `check_fwd` saw that its memory covers the problem.
        unsafe { loaded.launch(call.grid, &mut arguments, call.stream) }
    }
}
