//! The forward on WMMA.

use crate::Device;
use crate::rdna::{self, RdnaTile};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, PlanOptions, ProblemError, Refusal, ResourceUsage, Result, ValidFwd, Workspace, bind};
use fmha_gpu::{
    AnyAddress, Choice, Kernel, Launch, Launches, Recipe, Steps, Tiled, Tunable, deterministic_rows,
    settle_fwd,
};

use crate::device::{Amd, DeviceFacts, launch, lay_out};

/// The forward on WMMA.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rdna {
    chosen: Option<(rdna::Rdna, Device)>,
}

impl Rdna {
    /// What is launched, and what it promises.
    fn choice<V: Amd>(chosen: rdna::Rdna, problem: &ValidFwd, device: Device) -> Choice<Kernel<ValidFwd, V>> {
        let main = launch(rdna::NAME, chosen.source(), chosen.num_tiles(problem), chosen.num_threads());
        Choice {
            kernel: Kernel::new(Self { chosen: Some((chosen, device)) }),
            launches: Launches::from(main),
            workspace: Workspace::NONE,
            // A row is one wave's, its keys in one order, and every tile's maxima are taken.
            promises: deterministic_rows(),
            details: chosen.details(),
        }
    }
}

impl<V: Amd> Recipe<ValidFwd, V> for Rdna {
    fn name(&self) -> &'static str {
        rdna::NAME
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidFwd, V>>, Refusal> {
        let set =
            |tile: &TileOptions| rdna::accept(problem, facts.device, &options.clone().tile(tile.clone()));
        let (chosen, tile_from) = settle_fwd(rdna::NAME, problem, facts, options, set)?;
        let mut choice = Self::choice(chosen, problem, facts.device);
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.chosen.map(|(_, device)| device), launch, usage);
    }

    fn takes_addresses(&self, call: &Call<'_, ValidFwd>) -> Result<(), ProblemError> {
        self.chosen.map_or(Ok(()), |(chosen, _)| chosen.takes_addresses(call.problem, call.args))
    }

    fn for_any_address(&self, problem: &ValidFwd) -> AnyAddress<ValidFwd, V> {
        let other = self.chosen.and_then(|(chosen, device)| Some((chosen.for_any_address(problem)?, device)));
        match other {
            None => AnyAddress::Itself,
            Some((other, device)) => {
                let choice = Self::choice(other, problem, device);
                AnyAddress::Other(Box::new(choice), "the same kernel by elements")
            }
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let mut params = rdna::Rdna::params(call.problem, &bind::fwd_params(call.problem, call.args));
        // SAFETY: the kernel takes one CdnaParams, whose size it asserts; core saw that its memory covers the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) }
    }

    fn tunable(&self) -> Option<&dyn Tunable<ValidFwd, V>> {
        Some(self)
    }
}

impl<V: Amd> Tiled<ValidFwd, V> for Rdna {
    type Tile = RdnaTile;

    const HEADERS: &'static [&'static str] = &[rdna::HEADER];

    fn runs_on(&self, facts: &DeviceFacts) -> bool {
        facts.device.arch.is_rdna()
    }

    fn table_tiles(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<RdnaTile>, Refusal> {
        rdna::accept(problem, facts.device, &PlanOptions::default()).map(|chosen| vec![chosen.tile])
    }
}
