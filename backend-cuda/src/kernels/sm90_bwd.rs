//! The Hopper backward kernel, which is not written: a place in the family, and its refusal.

use fmha_core::error::{ProblemError, Refusal, Result};
use fmha_core::{PlanOptions, ValidBwd};

use super::{BwdCall, BwdKernel, BwdRecipe, Choice, DeviceFacts, Named};
use crate::steps::Step;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sm90Bwd;

impl Named for Sm90Bwd {
    fn name(&self) -> &'static str {
        "sm90_bwd"
    }
}

impl BwdRecipe for Sm90Bwd {
    fn choose(&self, _: &ValidBwd, _: &DeviceFacts, _: &PlanOptions) -> Result<Choice<BwdKernel>, Refusal> {
        Err(Refusal::new(self.name(), "backward: 0 of its kernels are written"))
    }

    fn launch(&self, _: &[Step], _: &BwdCall<'_>) -> Result<()> {
        Err(ProblemError::new("plan", "plan: kernel sm90_bwd has 0 steps").into())
    }
}
