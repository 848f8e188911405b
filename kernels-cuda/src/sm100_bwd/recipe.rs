//! The Blackwell backward: its launches, its workspace, its tensor maps.

use fmha_core::bwd_workspace::{BwdWorkspace, DqSums};
use fmha_core::error::{Refusal, Result};
use fmha_core::spec::BwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, ValidBwd, Workspace, bind};
use fmha_gpu::{About, Choice, Facts as _, Grid, Kernel, Launch, Launches, Operand, RowKernel, Stage, Steps};

use crate::nvidia::{BwdCall, DeviceFacts, Nvidia, row_launch};
use crate::operands::ALIGN;
use crate::sm80;
use crate::sm80_bwd::{self, BwdSums};
use crate::sm90_bwd::recipe::map_facts_of;
use crate::sm100_bwd::{self, BLOCK, Sm100BwdTile};
use crate::tma::{EncodeTensorMap, TensorMap};

/// The backward on tcgen05, its rows before and after.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm100Bwd {
    tile: Sm100BwdTile,
    workspace: BwdWorkspace,
}

/// The main launch's second argument.
#[repr(C, align(128))]
struct Maps {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    dout: TensorMap,
}

impl<V: Nvidia> Kernel<ValidBwd, V> for Sm100Bwd {
    type Tile = Sm100BwdTile;

    fn about() -> About<ValidBwd> {
        About::new(sm100_bwd::NAME)
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
        let (of_rows, spec) = (BwdSpec::of(problem), spec_of(problem, options));
        let is_ordered = spec.deterministic;
        let sums = DqSums { dim: sm100_bwd::dq_dim(&spec), parts: 1, has_semaphores: is_ordered };
        let workspace = BwdWorkspace::new(problem, BLOCK, Some(sums), 0)
            .ok_or_else(|| refuse("the workspace would be 2^62 bytes or more".to_owned()))?;
        let dims = problem.fwd().dims;
        let grids = sm100_bwd::grid(problem).zip(sm100_bwd::finish_grid(problem));
        let (ctas, finishing) = grids.ok_or_else(|| refuse(sm80_bwd::recipe::too_many_tiles(dims)))?;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let stats = facts
            .row_launch((Stage::Prepare, "sm100_stats"), RowKernel::SimtStats, &of_rows, [rows, 0])
            .map_err(refuse)?;
        let main = Launch {
            stage: Stage::Main,
            kernel: sm100_bwd::NAME,
            source: sm100_bwd::main(&spec, &tile),
            grid: Grid::new(ctas.max(1), sm100_bwd::THREADS),
            shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
            tiles: ctas.into(),
            // One CTA an SM: it takes all of tensor memory.
            tiles_at_once: facts.num_sms.into(),
        };
        let finish = row_launch(
            (Stage::FinishDq, "sm100_finish_dq"),
            sm100_bwd::finish_dq(&of_rows),
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
        Ok(Choice {
            kernel: Self { tile, workspace },
            launches: Launches::new([stats], main, [finish].into_iter().chain(dsink).chain(dbias)),
            workspace: Workspace { bytes: workspace.bytes, zeroed_bytes: workspace.bytes },
            promises: Promises {
                // Sums of dQ without an order are deterministic only where a single block of keys adds to
                // them.
                deterministic: is_ordered || dims.seqlen_k <= BLOCK,
                batch_invariant: is_ordered && options.tile.is_empty(),
                row_invariant: false,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: facts.score_sums.of(problem.fwd().dtypes.qk),
            },
            details: vec![
                ("tile", format!("{BLOCK} queries x {BLOCK} keys")),
                ("stages", format!("{} Q, {} dO", tile.stages_q, tile.stages_dout)),
                ("dQ", format!("f32 sums in memory, in {} order", if is_ordered { "one" } else { "no" })),
            ],
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        let fwd = problem.fwd();
        let (has_queries, has_keys) = (fwd.shape_q().seq > 0, fwd.shape_k().seq > 0);
        let matters = match operand {
            Operand::Q | Operand::Dout => has_queries,
            Operand::K | Operand::V => has_keys,
            Operand::Dk | Operand::Dv => self.tile.vector_store && has_keys,
            Operand::O | Operand::Bias | Operand::Dq => false,
        };
        if matters { ALIGN } else { 1 }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = self.workspace.bind(bind::bwd_params(call.problem, call.args), address);
        for step in steps.iter() {
            if step.stage != Stage::Main {
                // SAFETY: the kernel takes BwdParams; `check_bwd` saw that its memory covers the problem, and the
                // workspace is as large as the plan said.
                unsafe { step.launch(&mut [(&raw mut params).cast()], call.stream)? };
            } else if call.problem.fwd().dims.seqlen_k > 0 {
                // Without keys there is no block of them, nor a tensor for the maps.
                let mut maps = maps::<V::Driver>(call)?;
                let mut arguments = [(&raw mut params).cast(), (&raw mut maps).cast()];
                // SAFETY: the kernel takes BwdParams, as above, and Maps, made for the same extents.
                unsafe { step.launch(&mut arguments, call.stream)? };
            }
        }
        Ok(())
    }
}

/// Spec that a problem's main kernel is compiled for. A sequence has the same bits of ordered sums in any
/// batch: blocks begin at its own first rows.
fn spec_of(problem: &ValidBwd, options: &PlanOptions) -> BwdSpec {
    BwdSpec { deterministic: options.deterministic || options.batch_invariant, ..BwdSpec::of(problem) }
}

/// The tensor maps, by boxes of 64 columns; of a column-major V, of 64 keys.
fn maps<D: EncodeTensorMap>(call: &BwdCall<'_>) -> Result<Maps> {
    let rows = BLOCK.cast_signed();
    let [q, k, v, dout, _] = map_facts_of(call, [rows, rows], false);
    Ok(Maps { q: q.encode::<D>()?, k: k.encode::<D>()?, v: v.encode::<D>()?, dout: dout.encode::<D>()? })
}
