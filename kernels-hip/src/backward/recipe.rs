//! The recipe of the backward kernels, `cdna_bwd` and `rdna_bwd`: launches of products between two by rows.

use crate::backward::{Backward, MatrixBwdTile, Unit, accept, num_threads};
use crate::simt;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::{TileClass, TileOptions};
use fmha_core::{Call, PlanOptions, ProblemError, Refusal, ResourceUsage, Result, ValidBwd, Workspace, bind};
use fmha_gpu::{
    AnyAddress, Choice, Kernel, Launch, Launches, Recipe, Steps, Tiled, Tunable, deterministic_rows, settle,
};

use crate::device::{Amd, Device, DeviceFacts, launch, lay_out};

/// The backward on matrix instructions.
#[derive(Clone, Debug)]
pub(crate) struct Products<U> {
    chosen: Option<(Backward<U>, Device)>,
}

impl<U> Default for Products<U> {
    fn default() -> Self {
        Self { chosen: None }
    }
}

impl<U: Unit> Products<U> {
    /// What is launched, and what it promises.
    fn choice<V: Amd>(
        chosen: Backward<U>,
        problem: &ValidBwd,
        device: Device,
    ) -> Result<Choice<Kernel<ValidBwd, V>>, Refusal> {
        let mut products = Vec::new();
        for tile in &chosen.tiles {
            let (workgroups, threads) = (Backward::<U>::workgroups(problem, tile), num_threads::<U>(tile));
            let most = u64::from(u32::MAX / threads);
            if workgroups > most {
                let text = format!(
                    "lengths, heads and batch make {workgroups} workgroups of {} rows, more than {most}",
                    tile.rows
                );
                return Err(Refusal::new(U::NAME, text));
            }
            products.push(launch(U::launch(tile.sums), chosen.source(tile), workgroups, threads));
        }
        let rows = |kernel, source, workgroups| launch(kernel, source, workgroups, simt::NUM_THREADS);
        let stats = rows(U::STATS, chosen.stats_source(), chosen.stats_workgroups());
        let rest = rows(U::REST, chosen.rest_source(), chosen.rest_workgroups(problem));
        // dQ's, of which every problem has one.
        let main = products.remove(0);
        let (bytes, zeroed_bytes) = chosen.workspace_bytes();
        let details = chosen.details();
        Ok(Choice {
            kernel: Kernel::new(Self { chosen: Some((chosen, device)) }),
            launches: Launches::new([stats], main, products.into_iter().chain([rest])),
            workspace: Workspace { bytes, zeroed_bytes },
            // A row's gradients are one wave's sums, over blocks of its own sequence that begin at its first row.
            promises: deterministic_rows(),
            details,
        })
    }
}

impl<V: Amd, U: Unit> Recipe<ValidBwd, V> for Products<U> {
    fn name(&self) -> &'static str {
        U::NAME
    }

    fn choose(
        &self,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidBwd, V>>, Refusal> {
        let set =
            |tile: &TileOptions| accept::<U>(problem, facts.device, &options.clone().tile(tile.clone()));
        let tuned = facts.tuned.get(U::NAME, &class_of(problem));
        let (chosen, tile_from) = settle(&options.tile, tuned, set)?;
        let mut choice = Self::choice(chosen, problem, facts.device)?;
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.chosen.as_ref().map(|&(_, device)| device), launch, usage);
    }

    fn takes_addresses(&self, call: &Call<'_, ValidBwd>) -> Result<(), ProblemError> {
        self.chosen.as_ref().map_or(Ok(()), |(chosen, _)| chosen.takes_addresses(call.problem, call.args))
    }

    fn for_any_address(&self, problem: &ValidBwd) -> AnyAddress<ValidBwd, V> {
        let other = self
            .chosen
            .as_ref()
            .and_then(|(chosen, device)| Self::choice(chosen.for_any_address()?, problem, *device).ok());
        match other {
            None => AnyAddress::Itself,
            Some(choice) => AnyAddress::Other(Box::new(choice), "the same kernel by elements"),
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let (chosen, _) = fmha_gpu::chosen(self.chosen.as_ref(), U::NAME)?;
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = chosen.params(call.problem, &bind::bwd_params(call.problem, call.args), address);
        let mut rows = params.bwd;
        let num = steps.len();
        for (at, step) in steps.iter().enumerate() {
            let of_rows = at == 0 || at + 1 == num;
            let argument = if of_rows { (&raw mut rows).cast() } else { (&raw mut params).cast() };
            // SAFETY: the first and the last launch take one BwdParams, the others one MatrixBwdParams; core saw that its
            // memory covers the problem, and the workspace is as large as the plan said.
            unsafe { step.launch(&mut [argument], call.stream)? };
        }
        Ok(())
    }

    fn tunable(&self) -> Option<&dyn Tunable<ValidBwd, V>> {
        Some(self)
    }
}

/// Sums have one order whether it is asked for or not.
fn class_of(problem: &ValidBwd) -> TileClass {
    TileClass::of_bwd(problem, &BwdSpec { deterministic: true, ..BwdSpec::of(problem) })
}

impl<V: Amd, U: Unit> Tiled<ValidBwd, V> for Products<U> {
    type Tile = MatrixBwdTile;

    const HEADERS: &'static [&'static str] = &[U::HEADER];

    fn table_tiles(
        &self,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<MatrixBwdTile>, Refusal> {
        accept::<U>(problem, facts.device, &PlanOptions::default()).map(|chosen| chosen.tiles)
    }

    fn class(&self, problem: &ValidBwd, _: &PlanOptions) -> TileClass {
        class_of(problem)
    }
}
