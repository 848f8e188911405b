//! The backward kernels of mma.sync, for every architecture from sm_80 on.

use fmha_core::bwd_workspace::{BwdWorkspace, DqSums};
use fmha_core::error::{Refusal, Result};
use fmha_core::mask::MaskKind;
use fmha_core::masks::mask_data_params;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::{Candidates, TileOptions};
use fmha_core::{Accuracy, Dims, PlanOptions, Promises, VLayout, ValidBwd, Workspace, bind};
use fmha_gpu::{About, Choice, Facts as _, Grid, Kernel, Launch, Launches, Operand, RowKernel, Stage, Steps};

use crate::nvidia::{BwdCall, DeviceFacts, Nvidia, row_launch};
use crate::operands::refuse_unlike_rows;
use crate::sm80_bwd::{BwdSums, Sm80BwdTile};
use crate::{row_order, sm80, sm80_bwd};

/// The backward kernels of a plan, with the numbers that their launches need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm80Bwd {
    workspace: BwdWorkspace,
    copy_bytes: u64,
    stores_vectors: bool,
}

/// The tiles of a problem's launches, and how dQ is summed.
pub struct Tiles {
    /// Candidates for summing dQ; `true` is one pass.
    ways: Candidates<bool>,
    one_pass: bool,
    /// One tile for each launch, dQ's first.
    tiles: Vec<Sm80BwdTile>,
}

impl<V: Nvidia> Kernel<ValidBwd, V> for Sm80Bwd {
    type Tile = Tiles;

    fn about() -> About<ValidBwd> {
        About {
            computes_code: true,
            reads_masks: true,
            computes_code_beside_masks: true,
            ..About::new(sm80::NAME)
        }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        crate::sm80::recipe::needs(facts)
    }

    fn fit(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Tiles, Refusal> {
        let refuse = |reason: String| Refusal::new(sm80::NAME, reason);
        sm80_bwd::accepts(problem)?;
        sm80::refuse_full_lists_beside_code(problem.fwd())?;
        if options.row_invariant {
            refuse_unlike_rows(problem.fwd(), sm80::NAME)?;
        }
        if options.row_invariant && row_order::has_gradients_of_wgmma(problem, facts) {
            return Err(refuse(
                "backward: row_invariant true: rows have the bits of sm90, which sums in another order"
                    .to_owned(),
            ));
        }
        let spec = spec_of(problem);
        let ways = sm80_bwd::ways_of_dq(problem, &spec, facts.num_sms);
        let has_masks = !problem.fwd().masks.is_empty();
        let one_pass = adds_dq(&ways, options, has_masks);
        if one_pass && has_masks {
            return Err(refuse(
                "one_pass=1 beside masks as data, which what finishes dQ does not read".to_owned(),
            ));
        }
        if one_pass {
            sm80_bwd::takes_one_pass(&spec).map_err(refuse)?;
        }
        let mut tiles = sm80_bwd::choose_tiles(problem, &spec, crate::sm80::recipe::room(facts), one_pass);
        for tile in &mut tiles {
            for (key, value) in fields {
                tile.set(key, value).map_err(refuse)?;
            }
            tile.check_loads(problem).map_err(refuse)?;
            tile.check_one_pass(&spec).map_err(refuse)?;
            facts.has_room_for(tile, tile.smem_bytes(&spec), 1).map_err(refuse)?;
        }
        Ok(Tiles { ways, one_pass, tiles })
    }

    fn plan(
        Tiles { ways, one_pass, tiles }: Tiles,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(sm80::NAME, reason);
        let spec = spec_of(problem);
        // Sums of dQ begin at multiples of whole query blocks.
        let (block_m, dq_sums) = match one_pass {
            true => {
                let dim = sm80::padded_dim(spec.fwd.head_dim_qk).unsigned_abs();
                (tiles[0].columns.unsigned_abs(), Some(DqSums { dim, parts: 1, has_semaphores: false }))
            }
            false => (1, None),
        };
        let workspace = BwdWorkspace::new(problem, block_m, dq_sums, 0)
            .and_then(|workspace| workspace.with_captured(problem, 1))
            .ok_or_else(|| refuse("the workspace would be 2^62 bytes or more".to_owned()))?;
        let dims = problem.fwd().dims;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let of_stats = match problem.fwd().masks.is_empty() {
            true => RowKernel::SimtStats,
            false => RowKernel::MaskedSimtStats,
        };
        let stats =
            facts.row_launch((Stage::Prepare, "sm80_stats"), of_stats, &spec, [rows, 0]).map_err(refuse)?;
        let mut sums = Vec::new();
        for tile in &tiles {
            sums.push(launch_of(problem, &spec, tile, facts).map_err(refuse)?);
        }
        if one_pass {
            let blocks = u64::from(dims.seqlen_q.div_ceil(block_m)) * rows / u64::from(dims.seqlen_q.max(1));
            let groups = u32::try_from(blocks).ok().filter(|&ctas| ctas < 1 << 31);
            let groups =
                groups.ok_or_else(|| refuse(format!("{rows} rows of dQ make 2^31 blocks or more")))?;
            let grid = Grid::new(groups.max(1), sm80_bwd::FINISH_THREADS);
            let source = sm80_bwd::finish_dq(&spec, &tiles[0]);
            sums.insert(1, row_launch((Stage::FinishDq, "sm80_finish_dq"), source, grid, facts));
        }
        if problem.write_dsink {
            let grid = Grid::new(dims.num_heads_q.max(1), sm80_bwd::DSINK_THREADS);
            let at = (Stage::Gradients, "sm80_dsink");
            sums.push(row_launch(at, sm80_bwd::dsink(&spec), grid, facts));
        }
        let (captured_elems, _) = workspace.captured();
        if captured_elems > 0 {
            let at = (Stage::Captured, "sm80_finish_captured");
            let launch =
                facts.row_launch(at, RowKernel::SimtCaptured, &spec, [captured_elems.div_ceil(32), 0]);
            sums.push(launch.map_err(refuse)?);
        }
        // The main launch is that of dQ, which every problem has, or that of all three gradients.
        let main = sums.remove(0);
        let of = |tile: &Sm80BwdTile| {
            format!("{} {} x {}, {} stages", tile.sums.name(), tile.rows, tile.columns, tile.stages)
        };
        Ok(Choice {
            kernel: Self {
                workspace,
                copy_bytes: tiles
                    .iter()
                    .map(|tile| u64::from(tile.copy_bytes.unsigned_abs()))
                    .max()
                    .unwrap_or(1),
                stores_vectors: tiles.iter().any(|tile| tile.vector_store),
            },
            launches: Launches::new([stats], main, sums),
            workspace: Workspace {
                bytes: workspace.bytes,
                zeroed_bytes: if one_pass || captured_elems > 0 { workspace.bytes } else { 0 },
            },
            promises: Promises {
                // One warp sums a row's gradients, over blocks that begin at the first row of its own sequence.
                // Gradients of captured tensors are added in global memory in arbitrary order, so they are not
                // deterministic.
                deterministic: !one_pass && captured_elems == 0,
                batch_invariant: options.tile.is_empty() && !one_pass,
                row_invariant: options.row_invariant
                    && options.tile.is_empty()
                    && !one_pass
                    && problem.fwd().masks.is_empty(),
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: facts.score_sums.of(problem.fwd().dtypes.qk),
            },
            details: vec![
                ("tile", tiles.iter().map(of).collect::<Vec<_>>().join("; ")),
                ("sums", sums_words(one_pass).to_owned()),
                ("ways of dQ", ways.words(|&one| if one { "one pass" } else { "two" }.to_owned())),
            ],
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        let fwd = problem.fwd();
        let (has_queries, has_keys) = (fwd.shape_q().seq > 0, fwd.shape_k().seq > 0);
        match operand {
            Operand::Q | Operand::Dout if has_queries => self.copy_bytes,
            Operand::K if has_keys => self.copy_bytes,
            // A column-major V is read element by element.
            Operand::V if has_keys && fwd.layout.v == VLayout::RowMajor => self.copy_bytes,
            Operand::Dq if self.stores_vectors && has_queries => 16,
            Operand::Dk | Operand::Dv if self.stores_vectors && has_keys => 16,
            _ => 1,
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = self.workspace.bind(bind::bwd_params(call.problem, call.args), address);
        let mut masks = mask_data_params(call.problem.fwd(), &call.args.masks);
        // SAFETY: every launch takes BwdParams and, under masks as data, but for dSink's, MaskDataParams; `check_bwd`
        // saw that its memory covers the problem, and the workspace is as large as the plan said.
        unsafe { steps.launch_all(&mut [(&raw mut params).cast(), (&raw mut masks).cast()], call.stream) }
    }
}

/// The launch of a tile; its argument is [`BwdParams`](fmha_core::abi::BwdParams).
///
/// # Errors
/// A launch of 2^31 CTAs or more.
pub(crate) fn launch_of(
    problem: &ValidBwd,
    spec: &BwdSpec,
    tile: &Sm80BwdTile,
    facts: &DeviceFacts,
) -> Result<Launch, String> {
    let ctas = sm80_bwd::grid(problem, tile).ok_or_else(|| too_many_tiles(problem.fwd().dims))?;
    Ok(Launch {
        stage: stage_of(tile.sums),
        kernel: tile.sums.name(),
        source: match problem.fwd().masks.is_empty() {
            true => sm80_bwd::main(spec, tile),
            false => sm80_bwd::masked_main(spec, tile),
        },
        grid: Grid::new(ctas.max(1), tile.num_threads().unsigned_abs()),
        shared_bytes: tile.smem_bytes(spec).unsigned_abs(),
        tiles: ctas.into(),
        tiles_at_once: u64::from(tile.ctas.unsigned_abs() * facts.num_sms),
    })
}

/// Spec for which the launches are compiled. Masks as data hide keys, so the spec says that there is a band.
fn spec_of(problem: &ValidBwd) -> BwdSpec {
    let mut spec = BwdSpec::of(problem);
    if !problem.fwd().masks.is_empty() && spec.fwd.mask == MaskKind::Full {
        spec.fwd.mask = MaskKind::Upper;
    }
    spec
}

/// Stage of the launch that sums these gradients.
fn stage_of(sums: BwdSums) -> Stage {
    match sums {
        BwdSums::Dq | BwdSums::All => Stage::Main,
        BwdSums::DBias => Stage::Dbias,
        BwdSums::Captured => Stage::Captured,
        _ => Stage::Gradients,
    }
}

/// The refusal of a grid that is too large.
pub(crate) fn too_many_tiles(dims: Dims) -> String {
    format!(
        "seqlen_q {}, seqlen_k {}, num_heads_q {} and batch {} make 2^31 tiles or more",
        dims.seqlen_q, dims.seqlen_k, dims.num_heads_q, dims.batch
    )
}

/// Whether dQ is summed in global memory in the launch of dK and dV: as the tile or the model chooses, but never if
/// sums must be ordered.
fn adds_dq(ways: &Candidates<bool>, options: &PlanOptions, has_masks: bool) -> bool {
    match options.tile.iter().find(|(key, _)| key == "one_pass") {
        Some((_, value)) => matches!(value.as_str(), "1" | "true"),
        None => {
            let ordered = options.deterministic || options.batch_invariant || !options.tile.is_empty();
            !ordered
                && !has_masks
                && ways.cheapest(sm80_bwd::LEAST_GAIN_OF_ONE_PASS).is_some_and(|best| best.choice)
        }
    }
}

/// Text for `explain`: how the gradients are summed.
fn sums_words(one_pass: bool) -> &'static str {
    match one_pass {
        true => "dK and dV in registers, dQ in memory, in no order; scores computed once",
        false => "in registers, each row's in one order; scores computed twice",
    }
}
