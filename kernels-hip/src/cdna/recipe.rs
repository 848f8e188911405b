//! The forward on MFMA.

use crate::{CdnaTile, Device, cdna};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, PlanOptions, ProblemError, Refusal, ResourceUsage, Result, ValidFwd, Workspace, bind};
use fmha_gpu::{
    AnyAddress, Choice, Kernel, Launch, Launches, Recipe, Steps, Tiled, Tunable, deterministic_rows,
    settle_fwd,
};

use crate::device::{Amd, DeviceFacts, launch};

/// The forward on MFMA.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cdna {
    chosen: Option<(cdna::Cdna, Device)>,
}

impl Cdna {
    /// What is launched, and what it promises.
    fn choice<V: Amd>(chosen: cdna::Cdna, problem: &ValidFwd, device: Device) -> Choice<Kernel<ValidFwd, V>> {
        let tiles = chosen.num_tiles(problem);
        let threads = cdna::num_threads(&chosen.tile).unsigned_abs();
        Choice {
            kernel: Kernel::new(Self { chosen: Some((chosen, device)) }),
            launches: Launches::from(launch(cdna::NAME, chosen.source(), tiles, threads)),
            workspace: Workspace::NONE,
            // A row is one wave's, its keys in one order, and every tile's maxima are taken.
            promises: deterministic_rows(),
            details: chosen.details(),
        }
    }
}

impl<V: Amd> Recipe<ValidFwd, V> for Cdna {
    fn name(&self) -> &'static str {
        cdna::NAME
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidFwd, V>>, Refusal> {
        let set =
            |tile: &TileOptions| cdna::accept(problem, facts.device, &options.clone().tile(tile.clone()));
        let (chosen, tile_from) = settle_fwd(cdna::NAME, problem, facts, options, set)?;
        let mut choice = Self::choice(chosen, problem, facts.device);
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        let Some((chosen, device)) = self.chosen else { return };
        launch.tiles_at_once = device.grid(usage, 0, launch.grid.threads).tiles_at_once;
        let workgroups = chosen.workgroups(launch.tiles, launch.tiles_at_once);
        launch.grid.groups = u32::try_from(workgroups).unwrap_or(u32::MAX);
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
        let mut params = cdna::Cdna::params(call.problem, &bind::fwd_params(call.problem, call.args));
        // SAFETY: the kernel takes one CdnaParams, whose size it asserts; core saw that its memory covers the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) }
    }

    fn tunable(&self) -> Option<&dyn Tunable<ValidFwd, V>> {
        Some(self)
    }
}

impl<V: Amd> Tiled<ValidFwd, V> for Cdna {
    type Tile = CdnaTile;

    const HEADERS: &'static [&'static str] = &[cdna::HEADER];

    fn table_tiles(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<CdnaTile>, Refusal> {
        cdna::accept(problem, facts.device, &PlanOptions::default()).map(|chosen| vec![chosen.tile])
    }
}
