//! The Blackwell backward's recipe: its launches, workspace and tensor maps.

use std::ffi::c_void;

use fmha_core::bwd_workspace::{BwdWorkspace, DqSums};
use fmha_core::error::{Refusal, Result};
use fmha_core::masks::mask_data_params;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, MaskKind, PlanOptions, Promises, ValidBwd, Workspace, bind};
use fmha_gpu::{
    About, Choice, Facts as _, Grid, Kernel, Launch, Launches, Operand, ReadsValues, RowKernel, Stage, Steps,
};

use crate::nvidia::{BwdCall, DeviceFacts, Nvidia, row_launch};
use crate::operands::ALIGN;
use crate::sm80;
use crate::sm80_bwd::{self, BwdSums};
use crate::sm90_bwd::masked_spec;
use crate::sm90_bwd::recipe::{captured_launches, map_facts_of};
use crate::sm90_widened::NAME_OF_SM100;
use crate::sm100::modelled::{self, Overlap, Walk};
use crate::sm100_bwd::{self, BLOCK, Sm100BwdTile, units};
use crate::tile_list::{self, TileListPlan, TileOf};
use crate::tma::{EncodeTensorMap, TensorMap};

/// The backward on tcgen05, with the row launches before and after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm100Bwd {
    tile: Sm100BwdTile,
    workspace: BwdWorkspace,
    /// List of the blocks of queries that each block of keys processes under masks as data (tensors).
    list: Option<TileListPlan>,
}

/// The main launch's second argument: its tensor maps.
#[repr(C, align(128))]
struct Maps {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    dout: TensorMap,
}

impl<V: Nvidia> ReadsValues<V> for Sm100Bwd {
    const OF_VALUES: &'static str = NAME_OF_SM100;
}

impl<V: Nvidia> Kernel<ValidBwd, V> for Sm100Bwd {
    type Tile = Sm100BwdTile;

    fn about() -> About<ValidBwd> {
        About {
            reads_masks: true,
            computes_code: true,
            computes_code_beside_masks: true,
            ..About::new(sm100_bwd::NAME)
        }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        crate::sm100::recipe::needs(facts)
    }

    fn fit(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Sm100BwdTile, Refusal> {
        let refuse = |reason: String| Refusal::new(sm100_bwd::NAME, reason);
        sm100_bwd::accepts(problem)?;
        let spec = spec_of(problem, options);
        let mut tile = sm100_bwd::choose_tile(problem, &spec);
        for (key, value) in fields {
            tile.set(key, value).map_err(refuse)?;
        }
        facts.has_room_for(&tile, tile.smem_bytes(&spec), 1).map_err(refuse)?;
        Ok(tile)
    }

    fn plan(
        tile: Sm100BwdTile,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(sm100_bwd::NAME, reason);
        let (of_rows, spec) = (masked_spec(problem), spec_of(problem, options));
        let is_ordered = spec.deterministic;
        let sums = DqSums { dim: sm100_bwd::dq_dim(&spec), parts: 1, has_semaphores: is_ordered };
        let dims = problem.fwd().dims;
        let (qk, v) = (dims.head_dim_qk.cast_signed(), dims.head_dim_v.cast_signed());
        let (queries, in_two) = (sm100_bwd::queries(qk), sm100_bwd::in_two(qk, v));
        let workspace = BwdWorkspace::new(problem, queries.unsigned_abs(), Some(sums), 0)
            .and_then(|workspace| workspace.with_captured(problem, 1))
            .ok_or_else(|| refuse("the workspace would be 2^62 bytes or more".to_owned()))?;
        let grids = sm100_bwd::grid(problem).zip(sm100_bwd::finish_grid(problem));
        let (ctas, finishing) = grids.ok_or_else(|| refuse(sm80_bwd::recipe::too_many_tiles(dims)))?;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let zeroed_bytes = workspace.bytes;
        let (list, bytes) = match tile_list::serve(problem.fwd()) {
            false => (None, zeroed_bytes),
            true => {
                let before = Workspace { bytes: zeroed_bytes, zeroed_bytes };
                let block = [queries, BLOCK.cast_signed()];
                let (mut list, mut all) =
                    TileListPlan::new(problem.fwd(), TileOf::Keys, block, before).map_err(refuse)?;
                if is_ordered {
                    (list, all) = list.ordered(all).map_err(refuse)?;
                }
                (Some(list), all.bytes)
            }
        };
        let has_function = problem.fwd().code.mask.is_some();
        let lists = list.map(|list| list.launch(&of_rows.fwd, facts));
        let ranks = list.filter(|_| is_ordered);
        let ranks = ranks.map(|list| tile_list::rank_launch(&of_rows.fwd, BLOCK.cast_signed(), &list, facts));
        let at = (Stage::Prepare, "sm100_stats");
        let stats = match list {
            None => facts.row_launch(at, RowKernel::SimtStats, &of_rows, [rows, 0]).map_err(refuse)?,
            Some(_) => {
                let threads = sm100_bwd::STATS_THREADS;
                let grid = Grid::new(crate::row_grid(rows, threads, facts.num_sms), threads);
                row_launch(at, sm100_bwd::masked_stats(&of_rows, has_function), grid, facts)
            }
        };
        let main = Launch {
            stage: Stage::Main,
            kernel: sm100_bwd::NAME,
            source: match list {
                None => sm100_bwd::main(&spec, &tile),
                Some(_) => sm100_bwd::masked_main(&spec, &tile, has_function),
            },
            grid: Grid::new(ctas.max(1), sm100_bwd::THREADS),
            shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
            tiles: ctas.into(),
            // One CTA an SM: it takes all of tensor memory.
            tiles_at_once: facts.num_sms.into(),
        };
        let finish = row_launch(
            (Stage::FinishDq, "sm100_finish_dq"),
            match list {
                None => sm100_bwd::finish_dq(&of_rows),
                Some(_) => sm100_bwd::masked_finish_dq(&of_rows, has_function),
            },
            Grid::new(finishing.max(1), sm80_bwd::FINISH_THREADS),
            facts,
        );
        let dsink = problem.write_dsink.then(|| {
            let grid = Grid::new(dims.num_heads_q.max(1), sm80_bwd::DSINK_THREADS);
            row_launch((Stage::Gradients, "sm80_dsink"), sm80_bwd::dsink(&of_rows), grid, facts)
        });
        let dbias = sm80_bwd::choose_tiles(problem, &of_rows, sm80::recipe::room(facts), false);
        let dbias = dbias.into_iter().find(|tile| tile.sums == BwdSums::DBias);
        let dbias = dbias
            .map(|tile| sm80_bwd::recipe::launch_of(problem, &of_rows, &tile, facts))
            .transpose()
            .map_err(refuse)?;
        // Gradients of captured tensors are added in global memory, in arbitrary order.
        let captured = captured_launches(problem, &workspace, facts, false).map_err(refuse)?;
        let in_order = captured.is_empty();
        let behind = [finish].into_iter().chain(dsink).chain(dbias).chain(captured);
        Ok(Choice {
            kernel: Self { tile, workspace, list },
            launches: Launches::new(lists.into_iter().chain(ranks).chain([stats]), main, behind),
            workspace: Workspace { bytes, zeroed_bytes },
            promises: Promises {
                // Unordered sums of dQ are deterministic only if a single block of keys adds to them.
                deterministic: in_order && (is_ordered || dims.seqlen_k <= BLOCK),
                // With lists the order of a row's sums depends on its tile, since blocks that are partly masked for any
                // row of the tile come first.
                batch_invariant: list.is_none() && in_order && is_ordered && options.tile.is_empty(),
                row_invariant: false,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: facts.score_sums.of(problem.fwd().dtypes.qk),
            },
            details: vec![
                ("tile", format!("{queries} queries x {BLOCK} keys")),
                ("stages", format!("{} Q, {} dO", tile.stages_q, tile.stages_dout)),
                ("dQ", format!("f32 sums in memory, in {} order", if is_ordered { "one" } else { "no" })),
            ]
            .into_iter()
            .chain(in_two.then(|| ("gradients", "dK and dQ of a CTA, dV of another".to_owned())))
            .chain(list.map(|list| ("lists of tiles", list.words())))
            .chain(modelled::details(
                &units::backward(&spec, &facts.arch),
                walk_of(problem, &spec, ctas, facts),
                modelled::flops(problem.fwd(), 2 * (3 * dims.head_dim_qk + 2 * dims.head_dim_v)),
            ))
            .collect(),
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        let fwd = problem.fwd();
        let (has_queries, has_keys) = (fwd.shape_q().seq > 0, fwd.shape_k().seq > 0);
        let matters = match operand {
            Operand::Q | Operand::Dout => has_queries,
            Operand::K | Operand::V => has_keys,
            Operand::Dk | Operand::Dv => self.tile.vector_store && has_keys,
            Operand::O | Operand::Bias | Operand::Dq | Operand::SecondK | Operand::SecondV => false,
        };
        if matters { ALIGN } else { 1 }
    }

    fn lists(&self) -> &[TileListPlan] {
        self.list.as_slice()
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = self.workspace.bind(bind::bwd_params(call.problem, call.args), address);
        let dims = call.problem.fwd().dims;
        let mut masks = mask_data_params(call.problem.fwd(), &call.args.masks);
        let (mut list, is_built) = self.list.map(|plan| plan.of_call(&call.args.masks, address)).unzip();
        for step in steps.iter() {
            let asks_masks = list.is_some() && matches!(step.stage, Stage::Prepare | Stage::FinishDq);
            match (step.stage, &mut list) {
                // Without queries or keys the lists have no tiles, and no kernel reads them.
                (stage, Some(list))
                    if stage.makes_lists()
                        && dims.seqlen_q > 0
                        && dims.seqlen_k > 0
                        && is_built == Some(false) =>
                {
                    let mut arguments =
                        [(&raw mut params.fwd).cast(), (&raw mut masks).cast(), (&raw mut *list).cast()];
                    // SAFETY: the kernel takes FwdParams, MaskDataParams and TileList; `check_bwd` saw that the memory
                    // covers the problem, and the workspace is as large as the plan said.
                    unsafe { step.launch(&mut arguments, call.stream)? };
                }
                // Lists are skipped if a mask object has made them, or if no kernel reads them.
                (stage, _) if stage.makes_lists() => {}
                // Without keys there is no block of keys, and no tensor for the maps.
                (Stage::Main, _) if dims.seqlen_k == 0 => {}
                (Stage::Main, list) => {
                    let mut maps = maps::<V::Driver>(call)?;
                    let of_tiles: *mut c_void =
                        list.as_mut().map_or(std::ptr::null_mut(), |list| (&raw mut *list).cast());
                    let mut arguments =
                        [(&raw mut params).cast(), (&raw mut maps).cast(), (&raw mut masks).cast(), of_tiles];
                    let count = if of_tiles.is_null() { 2 } else { 4 };
                    // SAFETY: the kernel takes BwdParams, as below, and Maps, made for the same extents, and under
                    // masks MaskDataParams and TileList.
                    unsafe { step.launch(&mut arguments[..count], call.stream)? };
                }
                _ => {
                    let mut arguments = [(&raw mut params).cast(), (&raw mut masks).cast()];
                    let count = if asks_masks { 2 } else { 1 };
                    // SAFETY: the kernel takes BwdParams and, under masks as data, MaskDataParams; `check_bwd` saw that
                    // its memory covers the problem, and the workspace is as large as the plan said.
                    unsafe { step.launch(&mut arguments[..count], call.stream)? };
                }
            }
        }
        Ok(())
    }
}

/// Work of the main launch, as the model of its time sees it.
fn walk_of(problem: &ValidBwd, spec: &BwdSpec, ctas: u32, facts: &DeviceFacts) -> Option<Walk> {
    let (fwd, dims) = (problem.fwd(), problem.fwd().dims);
    if !modelled::is_modelled(fwd) || ctas == 0 {
        return None;
    }
    // The two CTAs of a block of keys share the clocks of its units.
    let in_two = sm100_bwd::in_two(dims.head_dim_qk.cast_signed(), dims.head_dim_v.cast_signed());
    let parts = if in_two { 2.0 } else { 1.0 };
    let tiles = f64::from(ctas) / parts;
    let rows = f64::from(dims.batch) * f64::from(dims.num_heads_q) * f64::from(dims.seqlen_q);
    let cut = f64::from(BLOCK.max(sm100_bwd::queries(dims.head_dim_qk.cast_signed()).unsigned_abs()));
    Some(Walk {
        overlap: Overlap::Backward,
        units: units::backward(spec, &facts.arch),
        tiles,
        at_once: f64::from(facts.num_sms) / parts,
        blocks: modelled::blocks(fwd, cut) / tiles,
        // The start's cost was fitted to pairs of CTAs, of which both start together on 256 queries.
        starts: 2.0 * rows / modelled::START_ROWS / tiles,
        equal: fwd.mask.kind() == MaskKind::Full,
        hertz: modelled::hertz(facts)?,
    })
}

/// Spec that a problem's main kernel is compiled for. With ordered sums a sequence has the same bits in any batch,
/// since blocks begin at its own first rows.
fn spec_of(problem: &ValidBwd, options: &PlanOptions) -> BwdSpec {
    BwdSpec { deterministic: options.deterministic || options.batch_invariant, ..masked_spec(problem) }
}

/// Encodes the tensor maps, with boxes of 64 columns; for a column-major V, of 64 keys.
fn maps<D: EncodeTensorMap>(call: &BwdCall<'_>) -> Result<Maps> {
    let queries = sm100_bwd::queries(call.problem.fwd().dims.head_dim_qk.cast_signed());
    let [q, k, v, dout, _] = map_facts_of(call, [queries, BLOCK.cast_signed()], false);
    Ok(Maps { q: q.encode::<D>()?, k: k.encode::<D>()?, v: v.encode::<D>()?, dout: dout.encode::<D>()? })
}
