//! Decode on MFMA.

use crate::{CdnaDecodeTile, Device, cdna_decode};
use fmha_core::tune::{TileClass, TileOptions};
use fmha_core::{
    Accuracy, Call, PlanOptions, ProblemError, Promises, Refusal, ResourceUsage, Result, ValidFwd, bind,
};
use fmha_gpu::{
    AnyAddress, Choice, Kernel, Launch, Launches, Recipe, Steps, Tiled, Tunable, deterministic_rows, exactly,
    settle,
};

use crate::cache_update::launch as update;
use crate::device::{Amd, DeviceFacts, launch, lay_out};

/// The forward of short queries over long caches, split over the keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct CdnaDecode {
    chosen: Option<Chosen>,
}

#[derive(Clone, Copy, Debug)]
struct Chosen {
    kernel: cdna_decode::CdnaDecode,
    device: Device,
    /// Whether a part has so many keys whatever else is in the call.
    is_batch_invariant: bool,
}

impl CdnaDecode {
    /// What is launched, and what it promises.
    fn choice<V: Amd>(chosen: Chosen, problem: &ValidFwd) -> Choice<Kernel<ValidFwd, V>> {
        let kernel = chosen.kernel;
        let main = launch(cdna_decode::NAME, kernel.source(), kernel.workgroups(), kernel.num_threads());
        let update = update::launch_before(problem);
        let merge = launch(
            cdna_decode::MERGE,
            kernel.merge_source(),
            kernel.merge_workgroups(),
            cdna_decode::MERGE_THREADS,
        );
        Choice {
            kernel: Kernel::new(Self { chosen: Some(chosen) }),
            launches: Launches::new(update, main, [merge]),
            workspace: update::workspace(problem, kernel.workspace_bytes()),
            // A row's keys have one order in each part, and its parts too; tiles and parts begin at its first key.
            promises: Promises { batch_invariant: chosen.is_batch_invariant, ..deterministic_rows() },
            details: kernel.details(problem),
        }
    }
}

impl<V: Amd> Recipe<ValidFwd, V> for CdnaDecode {
    fn name(&self) -> &'static str {
        cdna_decode::NAME
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidFwd, V>>, Refusal> {
        let set = |tile: &TileOptions| {
            cdna_decode::accept(problem, facts.device, &options.clone().tile(tile.clone()))
        };
        // Tiles are measured as a plan without options has them.
        let as_measured = options.accuracy == Accuracy::Fast && !options.batch_invariant;
        let tuned = facts.tuned.get(cdna_decode::NAME, &TileClass::of_fwd(problem)).filter(|_| as_measured);
        let (kernel, tile_from) = settle(&options.tile, tuned, set)?;
        let chosen = Chosen { kernel, device: facts.device, is_batch_invariant: options.batch_invariant };
        let mut choice = Self::choice(chosen, problem);
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.chosen.map(|chosen| chosen.device), launch, usage);
    }

    fn takes_addresses(&self, call: &Call<'_, ValidFwd>) -> Result<(), ProblemError> {
        self.chosen.map_or(Ok(()), |chosen| chosen.kernel.takes_addresses(call.problem, call.args))
    }

    fn for_any_address(&self, problem: &ValidFwd) -> AnyAddress<ValidFwd, V> {
        let other = self
            .chosen
            .and_then(|chosen| Some(Chosen { kernel: chosen.kernel.for_any_address()?, ..chosen }));
        match other {
            None => AnyAddress::Itself,
            Some(other) => {
                AnyAddress::Other(Box::new(Self::choice(other, problem)), "the same kernel by elements")
            }
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let Some(Chosen { kernel, .. }) = self.chosen else {
            return Err(ProblemError::new("plan", "plan: kernel cdna_decode has 0 tiles chosen").into());
        };
        let [merge] = exactly(steps.after())?;
        let whole = bind::fwd_params(call.problem, call.args);
        // SAFETY: the caller's promise; the workspace is as large as the plan said.
        let fwd = unsafe { update::run(steps, call, &whole, kernel.workspace_bytes())? };
        let mut params = kernel.params(call.problem, call.args, &fwd, fwd.workspace.0);
        // SAFETY: both kernels take one CdnaDecodeParams, whose size they assert; core saw that its memory covers the
        // problem, and the workspace is as large as the plan said.
        unsafe {
            steps.main().launch(&mut [(&raw mut params).cast()], call.stream)?;
            merge.launch(&mut [(&raw mut params).cast()], call.stream)
        }
    }

    fn tunable(&self) -> Option<&dyn Tunable<ValidFwd, V>> {
        Some(self)
    }
}

impl<V: Amd> Tiled<ValidFwd, V> for CdnaDecode {
    type Tile = CdnaDecodeTile;

    const HEADERS: &'static [&'static str] = &[cdna_decode::HEADER];

    fn table_tiles(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Vec<CdnaDecodeTile>, Refusal> {
        let own = PlanOptions::default();
        let options = options.kernel.iter().fold(own, |own, name| own.kernel(name.clone()));
        cdna_decode::accept(problem, facts.device, &options).map(|chosen| vec![chosen.tile])
    }
}
