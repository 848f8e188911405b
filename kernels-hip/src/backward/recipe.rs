//! The recipe of the backward kernels `cdna_bwd` and `rdna_bwd`: launches of products between two launches that
//! work row by row, and under masks as data first the launches that make lists of tiles.

use crate::backward::{Backward, MaskedBwdParams, MatrixBwdTile, Unit, accept, num_threads};
use crate::rows;
use fmha_core::fields::knob_values;
use fmha_core::masks::mask_data_params;
use fmha_core::spec::{BwdSpec, FwdSpec};
use fmha_core::tune::{TileClass, TileOptions};
use fmha_core::{Call, PlanOptions, Promises, Refusal, Result, ValidBwd, Workspace, bind};
use fmha_gpu::tile_list::{TileList, TileListPlan};
use fmha_gpu::{
    About, AnyAddress, Choice, Facts as _, Kernel, Launches, Operand, RowKernel, Stage, Steps, Tiles,
    deterministic_rows,
};

use crate::device::{Amd, DeviceFacts, launch};

/// The backward kernel on matrix instructions.
pub(crate) struct Products<U> {
    kernel: Backward<U>,
    /// Lists of tiles under masks as data, and which list each launch of products reads.
    lists: Vec<TileListPlan>,
    list_of_launch: Vec<usize>,
}

impl<V: Amd, U: Unit> Kernel<ValidBwd, V> for Products<U> {
    type Tile = Backward<U>;

    fn about() -> About<ValidBwd> {
        let tiles = Tiles::of_backward::<MatrixBwdTile>(U::NAME, const { &[U::HEADER] });
        // Sums always have a fixed order, whether the plan asks for it or not.
        let class = |problem: &ValidBwd, _: &PlanOptions| {
            TileClass::of_bwd(problem, &BwdSpec { deterministic: true, ..BwdSpec::of(problem) })
        };
        About {
            tiles: Some(Tiles { class, ..tiles }),
            computes_code: true,
            reads_masks: true,
            computes_code_beside_masks: true,
            ..About::new(U::NAME)
        }
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
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let fwd = problem.fwd();
        let (bytes, zeroed_bytes) = kernel.workspace_bytes();
        let mut workspace = Workspace { bytes, zeroed_bytes };
        let (mut lists, mut list_of_launch) = (Vec::<TileListPlan>::new(), Vec::new());
        for (of, block) in kernel.tiles.iter().filter_map(|tile| kernel.list(tile)) {
            let place = lists.iter().position(|list| list.is_of(of, block));
            list_of_launch.push(place.unwrap_or(lists.len()));
            if place.is_none() {
                let list;
                (list, workspace) = TileListPlan::new(fwd, of, block, workspace)
                    .map_err(|text| Refusal::new(U::NAME, text))?;
                lists.push(list);
            }
        }
        let spec = FwdSpec::of(fwd);
        let list_launches: Vec<_> = lists.iter().map(|list| list.launch(&spec, facts)).collect();
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
            // The launch of dQ is first and counts as the main one, since every problem has it.
            let stage = if products.is_empty() { Stage::Main } else { Stage::Gradients };
            products.push(launch(stage, U::launch(tile.sums), kernel.source(tile), workgroups, threads));
        }
        let by_rows =
            |stage, kernel, source, workgroups| launch(stage, kernel, source, workgroups, rows::NUM_THREADS);
        let stats = by_rows(Stage::Prepare, U::STATS, kernel.stats_source(), kernel.stats_workgroups());
        let rest = by_rows(Stage::Repair, U::REST, kernel.rest_source(), kernel.rest_workgroups(problem));
        let elems = kernel.captured_elems();
        let finish = (elems > 0).then(|| {
            let groups = [elems.div_ceil(facts.device.arch.wave_threads().into()), 0];
            facts.row_launch(
                (Stage::Captured, U::FINISH_CAPTURED),
                RowKernel::SimtCaptured,
                kernel.rows_spec(),
                groups,
            )
        });
        let finish = finish.transpose().map_err(|text| Refusal::new(U::NAME, text))?;
        let main = products.remove(0);
        let mut details = kernel.details();
        details.extend(lists.iter().map(|list| ("tile lists", list.words())));
        Ok(Choice {
            launches: Launches::new(
                [stats].into_iter().chain(list_launches),
                main,
                products.into_iter().chain([rest]).chain(finish),
            ),
            workspace,
            // Row invariance holds without lists: one wave sums a row's gradients, over blocks that begin at the
            // first row of its own sequence; with lists the order depends on the tile. A block of which a row sees
            // nothing adds zeros to its sums, so other rows of the workgroup change no bit.
            promises: Promises {
                batch_invariant: lists.is_empty(),
                row_invariant: options.row_invariant && lists.is_empty() && fwd.code.is_empty(),
                // Gradients of captured tensors are added in global memory in arbitrary order.
                deterministic: elems == 0,
                ..deterministic_rows()
            },
            details,
            kernel: Self { kernel, lists, list_of_launch },
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        self.kernel.alignment(problem, operand)
    }

    fn for_any_address(
        &self,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> AnyAddress<ValidBwd, V> {
        AnyAddress::by_element::<Self>(self.kernel.for_any_address(), problem, facts, options)
    }

    fn lists(&self) -> &[TileListPlan] {
        &self.lists
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params =
            self.kernel.params(call.problem, &bind::bwd_params(call.problem, call.args), address);
        let mut rows = params.bwd;
        let mut masks = mask_data_params(call.problem.fwd(), &call.args.masks);
        let (lists, are_built): (Vec<TileList>, Vec<bool>) =
            self.lists.iter().map(|plan| plan.of_call(&call.args.masks, address)).unzip();
        let mut unmade = lists.clone().into_iter().zip(are_built);
        let mut of_launches = self.list_of_launch.iter();
        for step in steps.iter() {
            let is_masked = !lists.is_empty();
            let count = if is_masked { 2 } else { 1 };
            match step.stage {
                Stage::Captured => {
                    // SAFETY: the row launch takes one BwdParams; core saw that its memory covers the problem, and
                    // the workspace is as large as the plan says.
                    unsafe { step.launch(&mut [(&raw mut rows).cast()], call.stream)? };
                }
                Stage::Prepare | Stage::Repair => {
                    let mut arguments = [(&raw mut rows).cast(), (&raw mut masks).cast()];
                    // SAFETY: row launches take one BwdParams, and MaskDataParams under masks as data; core saw
                    // that their memory covers the problem, and the workspace is as large as the plan says.
                    unsafe { step.launch(&mut arguments[..count], call.stream)? };
                }
                Stage::ListTiles => {
                    let Some((mut list, false)) = unmade.next() else { continue };
                    let mut arguments =
                        [(&raw mut rows.fwd).cast(), (&raw mut masks).cast(), (&raw mut list).cast()];
                    // SAFETY: the kernel takes FwdParams, MaskDataParams and TileList; core saw that the memory covers
                    // the problem, and the workspace is as large as the plan said.
                    unsafe { step.launch(&mut arguments, call.stream)? };
                }
                _ if is_masked => {
                    let list = of_launches.next().and_then(|&at| lists.get(at));
                    let Some(&list) = list else { continue };
                    let mut masked = MaskedBwdParams { bwd: params, masks, list };
                    // SAFETY: under masks as data launches of products take one MaskedBwdParams; core saw that its
                    // memory covers the problem, and the workspace is as large as the plan said.
                    unsafe { step.launch(&mut [(&raw mut masked).cast()], call.stream)? };
                }
                // SAFETY: launches of products take one MatrixBwdParams; core saw that its memory covers the problem,
                // and the workspace is as large as the plan said.
                _ => unsafe { step.launch(&mut [(&raw mut params).cast()], call.stream)? },
            }
        }
        Ok(())
    }
}
