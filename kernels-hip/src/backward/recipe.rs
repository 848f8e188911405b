//! The recipe of the backward kernels, `cdna_bwd` and `rdna_bwd`: launches of products between two by rows.

use crate::backward::{Backward, MatrixBwdTile, Unit, accept, num_threads};
use crate::rows;
use fmha_core::fields::knob_values;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::{TileClass, TileOptions};
use fmha_core::{Call, PlanOptions, Refusal, Result, ValidBwd, Workspace, bind};
use fmha_gpu::{
    About, AnyAddress, Choice, Kernel, Launches, Operand, Stage, Steps, Tiles, deterministic_rows,
};

use crate::device::{Amd, DeviceFacts, launch};

/// The backward on matrix instructions.
pub(crate) struct Products<U>(Backward<U>);

impl<V: Amd, U: Unit> Kernel<ValidBwd, V> for Products<U> {
    type Tile = Backward<U>;

    fn about() -> About<ValidBwd> {
        let tiles = Tiles::of_backward::<MatrixBwdTile>(U::NAME, const { &[U::HEADER] });
        // Sums have one order whether it is asked for or not.
        let class = |problem: &ValidBwd, _: &PlanOptions| {
            TileClass::of_bwd(problem, &BwdSpec { deterministic: true, ..BwdSpec::of(problem) })
        };
        About { tiles: Some(Tiles { class, ..tiles }), computes_code: true, ..About::new(U::NAME) }
    }

    fn own_tiles(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<TileOptions>, Refusal> {
        let kernel = accept::<U>(problem, facts.device, &PlanOptions::default())?;
        Ok(kernel.tiles.iter().map(knob_values).collect())
    }

    fn fit(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Backward<U>, Refusal> {
        accept::<U>(problem, facts.device, &options.clone().tile(fields.clone()))
    }

    fn plan(
        kernel: Backward<U>,
        problem: &ValidBwd,
        _: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let mut products = Vec::new();
        for tile in &kernel.tiles {
            let (workgroups, threads) = (Backward::<U>::workgroups(problem, tile), num_threads::<U>(tile));
            let most = u64::from(u32::MAX / threads);
            if workgroups > most {
                let text = format!(
                    "lengths, heads and batch make {workgroups} workgroups of {} rows, more than {most}",
                    tile.rows
                );
                return Err(Refusal::new(U::NAME, text));
            }
            // dQ's launch is first, since every problem has one.
            let stage = if products.is_empty() { Stage::Main } else { Stage::Gradients };
            products.push(launch(stage, U::launch(tile.sums), kernel.source(tile), workgroups, threads));
        }
        let by_rows =
            |stage, kernel, source, workgroups| launch(stage, kernel, source, workgroups, rows::NUM_THREADS);
        let stats = by_rows(Stage::Prepare, U::STATS, kernel.stats_source(), kernel.stats_workgroups());
        let rest = by_rows(Stage::Repair, U::REST, kernel.rest_source(), kernel.rest_workgroups(problem));
        let main = products.remove(0);
        let (bytes, zeroed_bytes) = kernel.workspace_bytes();
        Ok(Choice {
            launches: Launches::new([stats], main, products.into_iter().chain([rest])),
            workspace: Workspace { bytes, zeroed_bytes },
            // A row's gradients are one wave's sums, over blocks of its own sequence that begin at its first row.
            promises: deterministic_rows(),
            details: kernel.details(),
            kernel: Self(kernel),
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        self.0.alignment(problem, operand)
    }

    fn for_any_address(
        &self,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> AnyAddress<ValidBwd, V> {
        AnyAddress::by_element::<Self>(self.0.for_any_address(), problem, facts, options)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = self.0.params(call.problem, &bind::bwd_params(call.problem, call.args), address);
        let mut rows = params.bwd;
        for step in steps.iter() {
            let argument = match step.stage {
                Stage::Prepare | Stage::Repair => (&raw mut rows).cast(),
                _ => (&raw mut params).cast(),
            };
            // SAFETY: launches by rows take one BwdParams, those of products one MatrixBwdParams; core saw that its
            // memory covers the problem, and the workspace is as large as the plan said.
            unsafe { step.launch(&mut [argument], call.stream)? };
        }
        Ok(())
    }
}
