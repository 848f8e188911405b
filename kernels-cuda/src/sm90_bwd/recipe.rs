//! The Hopper backward's recipe: its launches, workspace and tensor maps.

use fmha_core::abi::DevPtr;
use fmha_core::bwd_workspace::BwdWorkspace;
use fmha_core::error::{Refusal, Result};
use fmha_core::fields::{FieldValue as _, Fields as _, knob_values};
use fmha_core::masks::mask_data_params;
use fmha_core::source::KernelSource;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, Shape, Strides, VLayout, ValidBwd, Workspace, bind};
use fmha_gpu::{
    About, Choice, Facts as _, Grid, Kernel, Launch, Launches, Operand, RowKernel, Stage, Steps, Tiles,
};

use crate::nvidia::{BwdCall, DeviceFacts, Nvidia, row_launch};
use crate::operands::{ALIGN, refuse_row_invariant};
use crate::row_order;
use crate::sm80::recipe::room;
use crate::sm80_bwd::{self, BwdSums};
use crate::sm90::recipe::needs;
use crate::sm90_bwd::{self, BwdWalk, DqFinish, DqPath, HeadParts, Sm90BwdSchedule, Sm90BwdTile, as_it_lies};
use crate::tile_list::{self, MaskCode, TileListPlan, TileOf};
use crate::tma::{EncodeTensorMap, TensorMap, TensorMapFacts};

/// The backward on wgmma, with the row launches before and after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm90Bwd {
    tile: Sm90BwdTile,
    schedule: Sm90BwdSchedule,
    deterministic: bool,
    /// The schedule of the kernel of dBias, if dBias is wanted.
    dbias: Option<Sm90BwdSchedule>,
    workspace: BwdWorkspace,
    /// Offset in the workspace of the sums of dK and dV to which the parts of kv heads add.
    head_sums: u64,
    /// List of the blocks of queries that each key block processes under masks as data (tensors).
    list: Option<TileListPlan>,
}

/// The main kernel's second argument: its tensor maps.
#[repr(C, align(128))]
struct Maps {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    dout: TensorMap,
    o: TensorMap,
}

impl<V: Nvidia> Kernel<ValidBwd, V> for Sm90Bwd {
    type Tile = Sm90BwdTile;

    fn about() -> About<ValidBwd> {
        let tiles = Tiles::of_backward::<Sm90BwdTile>(sm90_bwd::LABEL, &sm90_bwd::HEADERS);
        About {
            tiles: Some(tiles),
            waits_for_keys: true,
            reads_masks: true,
            computes_code: true,
            computes_code_beside_masks: true,
            ..About::new(sm90_bwd::NAME)
        }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs(facts)
    }

    fn own_tiles(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Vec<TileOptions>, Refusal> {
        let without_tile = options.clone().tile(Vec::<(String, String)>::new());
        <Self as Kernel<ValidBwd, V>>::choose(problem, facts, &without_tile)?;
        Ok(vec![knob_values(&table_tile(problem, &spec_of(problem, options), facts))])
    }

    fn fit(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Sm90BwdTile, Refusal> {
        sm90_bwd::accepts(problem)?;
        if options.row_invariant && !row_order::has_gradients_of_wgmma(problem, facts) {
            refuse_row_invariant(options, sm90_bwd::NAME)?;
        }
        let spec = spec_of(problem, options);
        let own = match options.row_invariant {
            true => sm90_bwd::choose_tile(problem, &spec).in_row_order(problem),
            false => table_tile(problem, &spec, facts),
        };
        fitted(own, fields, problem, &spec, facts).map_err(|reason| Refusal::new(sm90_bwd::NAME, reason))
    }

    fn plan(
        tile: Sm90BwdTile,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(sm90_bwd::NAME, reason);
        let spec = spec_of(problem, options);
        let schedule = match options.row_invariant {
            true => tile.schedule_in_row_order(problem, &spec, facts.num_sms)?,
            false => tile.schedule(problem, &spec, facts.num_sms)?,
        };
        let dbias = problem.dbias.map(|_| tile.of_dbias());
        let dbias_schedule = dbias.map(|dbias| dbias.schedule(problem, &spec, facts.num_sms)).transpose()?;
        let dims = problem.fwd().dims;
        let q_blocks = schedule.num_q_blocks.unsigned_abs() * dims.num_heads_q * dims.batch;
        let workspace = tile
            .workspace(problem, &spec, &schedule, q_blocks)
            .and_then(|workspace| workspace.with_captured(problem, 1))
            .ok_or_else(|| refuse("the workspace would be 2^62 bytes or more".to_owned()))?;
        // The sums of dK and dV of kv heads' parts follow the rest of the workspace.
        let head_sums = workspace.bytes.next_multiple_of(ALIGN);
        let bytes = head_sums + tile.head_sums_bytes(&spec, &schedule);
        let (list, bytes) = match tile_list::serve(problem.fwd()) {
            false => (None, bytes),
            true => {
                let before = Workspace { bytes, zeroed_bytes: 0 };
                let block = [tile.block_m, tile.block_n];
                let (mut list, mut all) =
                    TileListPlan::new(problem.fwd(), TileOf::Keys, block, before).map_err(refuse)?;
                if spec.deterministic {
                    (list, all) = list.ordered(all).map_err(refuse)?;
                }
                (list, all) = list.in_bits(problem.fwd(), all);
                (Some(list), all.bytes)
            }
        };
        let has_function = list.is_some_and(|list| list.code() == MaskCode::Asked);
        let ranks = list
            .filter(|_| spec.deterministic)
            .map(|list| tile_list::rank_launch(&spec.fwd, tile.block_n, &list, facts));
        let lists = list.map(|list| tile_list::launches(&list, problem.fwd(), &spec.fwd, facts)).transpose();
        let lists = lists.map_err(refuse)?.into_iter().flatten().chain(ranks);
        let masked = list.is_some();
        let own = |source: KernelSource| match &list {
            Some(list) => tile_list::behind(list, problem.fwd(), source),
            None => source,
        };
        let tiles = schedule.num_tiles.unsigned_abs();
        let grid = |ctas: u32, threads: u32| Grid { dependent: true, ..Grid::new(ctas.max(1), threads) };
        let rows = |at, source, blocks: u32| Launch {
            tiles: blocks.into(),
            ..row_launch(at, source, grid(blocks, sm90_bwd::ROW_THREADS), facts)
        };
        // CTAs that finish dQ come first, unless the main kernel finishes it; CTAs for dSink, one a head, follow.
        let finished = if tile.finishes_dq() { 0 } else { q_blocks * tile.finish_ctas(&spec).unsigned_abs() };
        let sinks = if problem.write_dsink { dims.num_heads_q } else { 0 };
        let postprocess = (!tile.finishes_dq() || problem.write_dsink).then(|| {
            rows((Stage::FinishDq, "postprocess"), sm90_bwd::postprocess(&spec, &tile), finished + sinks)
        });
        let sums = tile.head_parts.then(|| {
            let parts = (schedule.num_head_parts * schedule.num_query_parts).unsigned_abs();
            let blocks = tiles / parts.max(1);
            rows(
                (Stage::HeadSums, "head_sums"),
                sm90_bwd::head_sums(&spec, &tile),
                blocks * sm90_bwd::HEAD_SUMS_CTAS,
            )
        });
        let repairs = sm90_bwd::repairs(&spec) || sm90_bwd::leaves_far_queries(&spec);
        let repair = repairs.then(|| {
            let ctas = sm90_bwd::repair_ctas(problem, &spec, &schedule, q_blocks);
            let source = if masked {
                own(sm90_bwd::masked_repair(&spec, &tile, has_function))
            } else {
                sm90_bwd::repair(&spec, &tile)
            };
            rows((Stage::Repair, "repair"), source, ctas)
        });
        let captured = captured_launches(problem, &workspace, facts, true).map_err(refuse)?;
        let zeroed_bytes = if captured.is_empty() { 0 } else { workspace.bytes };
        let is_ordered = captured.is_empty();
        let keeps_rows = options.row_invariant && tile == tile.in_row_order(problem);
        let cluster = tile.walk.cluster().unsigned_abs();
        let at_a_time = (facts.num_sms / cluster).max(1) * cluster;
        let ctas = if tile.persistent { tiles.min(at_a_time) } else { tiles };
        Ok(Choice {
            kernel: Self {
                tile,
                schedule,
                deterministic: spec.deterministic,
                dbias: dbias_schedule,
                workspace,
                head_sums,
                list,
            },
            launches: Launches::new(
                lists.chain([rows(
                    (Stage::Prepare, "preprocess"),
                    match masked {
                        true => own(sm90_bwd::masked_preprocess(&spec, &tile, has_function)),
                        false => sm90_bwd::preprocess(&spec, &tile),
                    },
                    schedule.num_first_q_blocks.unsigned_abs(),
                )]),
                Launch {
                    stage: Stage::Main,
                    kernel: sm90_bwd::NAME,
                    source: match problem.fwd().arrivals {
                        _ if masked => own(sm90_bwd::masked_main(&spec, &tile, has_function)),
                        0 => sm90_bwd::main(&spec, &tile),
                        _ => sm90_bwd::main_of_arriving_keys(&spec, &tile),
                    },
                    grid: grid(ctas, tile.num_threads().unsigned_abs()),
                    shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
                    tiles: tiles.into(),
                    tiles_at_once: facts.num_sms.into(),
                },
                postprocess.into_iter().chain(sums).chain(repair).chain(captured).chain(
                    dbias.zip(dbias_schedule).map(|(dbias, schedule)| {
                        let blocks = schedule.num_bias_blocks.unsigned_abs();
                        Launch {
                            stage: Stage::Dbias,
                            kernel: "dbias",
                            source: sm90_bwd::dbias(&spec, &dbias),
                            grid: Grid::new(
                                blocks.clamp(1, facts.num_sms),
                                dbias.num_threads().unsigned_abs(),
                            ),
                            shared_bytes: dbias.dbias_smem_bytes(&spec).unsigned_abs(),
                            tiles: blocks.into(),
                            tiles_at_once: facts.num_sms.into(),
                        }
                    }),
                ),
            ),
            workspace: Workspace { bytes, zeroed_bytes },
            promises: Promises {
                // Sums of dK and dV are ordered in every call. Unordered sums of dQ are deterministic only if a
                // single key block adds to them. Gradients of captured tensors are added in global memory in
                // arbitrary order.
                deterministic: is_ordered
                    && (spec.deterministic || schedule.num_key_blocks <= tile.walk.cluster()),
                batch_invariant: keeps_rows,
                row_invariant: keeps_rows,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: facts.score_sums.of(problem.fwd().dtypes.qk),
            },
            details: details(problem, facts, (&spec, &tile, &schedule))
                .into_iter()
                .chain(list.map(|list| ("lists of tiles", list.words())))
                .collect(),
        })
    }

    /// The number of tiles decides whether tiles share a kv head's queries.
    fn tiles_of_other_sizes(&self, problem: &ValidBwd) -> Vec<TileOptions> {
        let Self { tile, deterministic: false, .. } = *self else { return Vec::new() };
        let spec = BwdSpec::of(problem);
        let mut shared = Sm90BwdTile { head_parts: !tile.head_parts, ..tile };
        shared.fit_finish(&spec);
        let fits = shared.check(&spec).is_ok() && problem.fwd().dims.seqlen_q > 0;
        // Tuning does not vary this tile field, since it follows from the sizes alone.
        let head_parts = ("head_parts".to_owned(), shared.head_parts.to_string());
        fits.then(|| knob_values(&shared).into_iter().chain([head_parts]).collect()).into_iter().collect()
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        let Self { tile, .. } = self;
        let has_keys = problem.fwd().dims.seqlen_k > 0;
        let matters = match operand {
            Operand::Q | Operand::Dout => true,
            Operand::K | Operand::V => has_keys,
            Operand::O => tile.vector_load,
            Operand::Dq => tile.vector_store,
            Operand::Dk | Operand::Dv => tile.vector_store && has_keys,
            Operand::Bias | Operand::SecondK | Operand::SecondV => false,
        };
        if matters { ALIGN } else { 1 }
    }

    fn lists(&self) -> &[TileListPlan] {
        self.list.as_slice()
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        let Self { tile, mut schedule, workspace, head_sums, list, .. } = *self;
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        schedule.head_sums = DevPtr::new(address + head_sums);
        let mut params = workspace.bind(bind::bwd_params(call.problem, call.args), address);
        let mut masks = mask_data_params(call.problem.fwd(), &call.args.masks);
        let (mut list, is_built) = list.map(|plan| plan.of_call(&call.args.masks, address)).unzip();
        if let (Some(plan), Some(list)) = (&self.list, &list) {
            masks = plan.masks(masks, list);
        }
        let (has_queries, has_tiles) = (schedule.num_q_blocks > 0, schedule.num_tiles > 0);
        for step in steps.iter() {
            let has_work = match step.stage {
                Stage::Main | Stage::HeadSums => has_tiles,
                stage if stage.makes_lists() => has_tiles && has_queries && is_built == Some(false),
                // Without queries the gradients of captured tensors are zeros, which must still be written.
                Stage::Captured => true,
                // Without queries dQ has no rows, dK and dV are zeros, and dSink is 0, which must still be written.
                Stage::FinishDq => has_queries || call.problem.write_dsink,
                Stage::Dbias => self.dbias.is_some_and(|schedule| schedule.num_bias_blocks > 0),
                _ => has_queries,
            };
            if !has_work {
                continue;
            }
            if let (true, Some(list)) = (step.stage.makes_lists(), &mut list) {
                let mut arguments =
                    [(&raw mut params.fwd).cast(), (&raw mut masks).cast(), (&raw mut *list).cast()];
                // SAFETY: the kernel takes FwdParams, MaskDataParams and TileList; `check_bwd` saw that the memory
                // covers the problem, and the workspace is as large as the plan said.
                unsafe { step.launch(&mut arguments, call.stream)? };
                continue;
            }
            let (mut tile, mut schedule) = (tile, schedule);
            if let (Stage::Dbias, Some(of_dbias)) = (step.stage, self.dbias) {
                (tile, schedule) = (tile.of_dbias(), of_dbias);
            }
            if !matches!(step.stage, Stage::Main | Stage::Dbias) {
                let mut arguments =
                    [(&raw mut params).cast(), (&raw mut schedule).cast(), (&raw mut masks).cast()];
                let count = if list.is_some() { 3 } else { 2 };
                // SAFETY: the kernel takes BwdParams and Sm90BwdSchedule, and under masks as data, if it evaluates
                // them, MaskDataParams; `check_bwd` saw that the memory covers the problem, and the workspace is as
                // large as the plan said.
                unsafe { step.launch(&mut arguments[..count], call.stream)? };
                continue;
            }
            let mut maps = maps::<V::Driver>(call, &tile)?;
            let fwd = call.problem.fwd();
            if let (Stage::Main, Some(list)) = (step.stage, &mut list) {
                let mut arguments = [
                    (&raw mut params).cast(),
                    (&raw mut maps).cast(),
                    (&raw mut schedule).cast(),
                    (&raw mut masks).cast(),
                    (&raw mut *list).cast(),
                ];
                // SAFETY: the kernel takes these arguments, which were made for the same extents; under masks as data
                // it takes the masks and their lists too.
                unsafe { step.launch(&mut arguments, call.stream)? };
                continue;
            }
            let mut arrivals = bind::arrival_params(fwd, &call.args.seq);
            let mut arguments = [
                (&raw mut params).cast(),
                (&raw mut maps).cast(),
                (&raw mut schedule).cast(),
                (&raw mut arrivals).cast(),
            ];
            let count = if fwd.arrivals > 0 { 4 } else { 3 };
            // SAFETY: the kernel takes BwdParams and Maps, made for the same extents, and ArrivalParams if keys arrive
            // while it runs.
            unsafe { step.launch(&mut arguments[..count], call.stream)? };
        }
        Ok(())
    }
}

/// The launches for gradients of captured tensors, after all others: those of `sm80`, which read statistics of rows
/// in `sm80`'s layout. `makes_stats`: a launch must compute these first.
pub(crate) fn captured_launches(
    problem: &ValidBwd,
    workspace: &BwdWorkspace,
    facts: &DeviceFacts,
    makes_stats: bool,
) -> Result<Vec<Launch>, String> {
    let (elems, _) = workspace.captured();
    if elems == 0 {
        return Ok(Vec::new());
    }
    let spec = BwdSpec::of(problem);
    let dims = problem.fwd().dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    let stats = (Stage::Gradients, "sm80_stats");
    let mut launches = Vec::new();
    if makes_stats {
        launches.push(facts.row_launch(stats, RowKernel::SimtStats, &spec, [rows, 0])?);
    }
    let tiles = sm80_bwd::choose_tiles(problem, &spec, room(facts), false);
    for tile in tiles.iter().filter(|tile| tile.sums == BwdSums::Captured) {
        facts.has_room_for(tile, tile.smem_bytes(&spec), 1)?;
        launches.push(sm80_bwd::recipe::launch_of(problem, &spec, tile, facts)?);
    }
    let finish = (Stage::Captured, "sm80_finish_captured");
    launches.push(facts.row_launch(finish, RowKernel::SimtCaptured, &spec, [elems.div_ceil(32), 0])?);
    Ok(launches)
}

/// The tile with some fields set, if it fits the problem and the device.
///
/// # Errors
/// A text that names the fields and numbers that do not go together.
fn fitted(
    mut tile: Sm90BwdTile,
    fields: &TileOptions,
    problem: &ValidBwd,
    spec: &BwdSpec,
    facts: &DeviceFacts,
) -> Result<Sm90BwdTile, String> {
    fields.iter().try_for_each(|(key, value)| tile.set_field(key, value))?;
    let dims = problem.fwd().dims;
    // The kernel before the main one clears the counter that gives tiles to persistent CTAs, and the sums to which
    // parts of a kv head add.
    tile.persistent &= dims.seqlen_q > 0;
    tile.head_parts &= dims.seqlen_q > 0;
    // A value that the caller sets stays, and `check` refuses it if need be.
    if !fields.iter().any(|(key, _)| *key == "dq_finish") {
        tile.fit_finish(spec);
    }
    // Without keys there are no tiles, so no CTA of the main kernel would finish dQ.
    if dims.seqlen_k == 0 {
        tile.dq_finish = DqFinish::Launch;
    }
    if tile_list::serve(problem.fwd()) {
        if tile.head_parts && fields.iter().any(|(key, _)| *key == "head_parts") {
            return Err(
                "head_parts true beside masks as data, whose lists are of one head's tiles".to_owned()
            );
        }
        tile.head_parts = false;
        if !matches!(tile.walk, BwdWalk::InOrder | BwdWalk::LateDp) {
            return Err(format!(
                "walk {} beside masks as data, whose lists are walked in order",
                tile.walk.name()
            ));
        }
    }
    tile.check(spec)?;
    tile.check_room_for_dq(problem, spec)?;
    let dbias_bytes = problem.dbias.map_or(0, |_| tile.of_dbias().dbias_smem_bytes(spec));
    facts.has_room_for(&tile, tile.smem_bytes(spec).max(dbias_bytes), tile.walk.cluster())?;
    Ok(tile)
}

/// The details that a plan prints.
fn details(
    problem: &ValidBwd,
    facts: &DeviceFacts,
    (spec, tile, schedule): (&BwdSpec, &Sm90BwdTile, &Sm90BwdSchedule),
) -> Vec<(&'static str, String)> {
    let modelled = tile.head_parts_candidates(problem, spec, facts.num_sms);
    let dq_ways = sm90_bwd::dq_candidates(problem, spec);
    vec![
        ("tile", format!("{} queries x {} keys", tile.block_m, tile.block_n)),
        ("stages", format!("{} Q, {} dO, {} dS", tile.stages_q, tile.stages_dout, tile.stages_ds)),
        (
            "dQ",
            match tile.dq_parts(problem) {
                1 => "f32 sums in memory".to_owned(),
                parts => format!("f32 sums in memory, of {parts} key blocks apart"),
            },
        ),
        ("launches", "start while the one before ends".to_owned()),
    ]
    .into_iter()
    .chain(tile.head_parts.then(|| {
        let (heads, parts) = (problem.fwd().gqa_ratio(), schedule.num_head_parts);
        let queries = match schedule.num_query_parts {
            1 => String::new(),
            queries => format!(", and their queries by {queries} each"),
        };
        ("query heads", format!("{heads} of a kv head shared by {parts} tiles{queries}"))
    }))
    .chain((!modelled.is_empty()).then(|| {
        (
            "tiles to a kv head",
            modelled.words(|parts| {
                let HeadParts { heads, queries } = parts;
                if *queries == 1 { format!("{heads}:") } else { format!("{heads} by {queries}:") }
            }),
        )
    }))
    .chain((dq_ways.iter().count() > 1).then(|| {
        let name = |(path, finish): &(DqPath, DqFinish)| format!("{}, {}", path.name(), finish.name());
        ("ways of dQ", dq_ways.words(name))
    }))
    .chain(tile.makes_delta().then(|| {
        let first = schedule.num_first_query_heads;
        ("delta", format!("of {first} query heads before the products, of the others beside them"))
    }))
    .chain((tile.walk.cluster() > 1).then(|| ("clusters", format!("{} key blocks", tile.walk.cluster()))))
    .collect()
}

/// The spec of the launches. A row-invariant plan always uses the text with a mask, so that a row has equal bits
/// with a mask and without.
fn spec_of(problem: &ValidBwd, options: &PlanOptions) -> BwdSpec {
    let spec = sm90_bwd::masked_spec(problem);
    match options.row_invariant {
        true => BwdSpec { deterministic: true, fwd: row_order::under_a_mask(spec.fwd), ..spec },
        false => BwdSpec { deterministic: options.deterministic, ..spec },
    }
}

/// The table's tile for a problem on a device.
pub(crate) fn table_tile(problem: &ValidBwd, spec: &BwdSpec, facts: &DeviceFacts) -> Sm90BwdTile {
    let tile = sm90_bwd::choose_tile(problem, spec);
    if tile_list::serve(problem.fwd()) {
        // With lists one tile processes all query heads of a kv head.
        return Sm90BwdTile { head_parts: false, ..tile };
    }
    Sm90BwdTile { head_parts: tile.wants_head_parts(problem, spec, facts.num_sms), ..tile }
}

/// Encodes the tensor maps of a call.
fn maps<D: EncodeTensorMap>(call: &BwdCall<'_>, tile: &Sm90BwdTile) -> Result<Maps> {
    let [q, k, v, dout, o] = map_facts(call, tile);
    Ok(Maps {
        q: q.encode::<D>()?,
        k: k.encode::<D>()?,
        v: v.encode::<D>()?,
        dout: dout.encode::<D>()?,
        o: o.encode::<D>()?,
    })
}

/// Contents of the tensor maps of Q, K, V, dO and O, `(dim, row, head, batch)`. If no warp loads O by TMA, its map
/// is that of dO, since a map may not support O's strides.
#[must_use]
pub fn map_facts(call: &BwdCall<'_>, tile: &Sm90BwdTile) -> [TensorMapFacts<4, 3>; 5] {
    map_facts_of(call, [tile.loaded_rows(), tile.block_n], tile.makes_delta())
}

/// Contents of the tensor maps for boxes of `query_rows` queries and `key_rows` keys; a column-major V has
/// boxes of 64 keys and all elements.
pub(crate) fn map_facts_of(
    call: &BwdCall<'_>,
    [query_rows, key_rows]: [i32; 2],
    brings_o: bool,
) -> [TensorMapFacts<4, 3>; 5] {
    let (problem, args) = (call.problem, call.args);
    let fwd = problem.fwd();
    let extents = fwd.extents(args.seq.totals);
    let k_address = args.k.as_ptr() as u64;
    let facts = |name, address: u64, strides: Strides, shape: Shape, rows: i32| {
        let of = (name, fwd.dtypes.qk);
        TensorMapFacts::of_rows(of, [address, k_address], shape, strides, [64, rows, 1, 1])
    };
    let dout = || facts("dout", args.dout.as_ptr() as u64, problem.dout, extents.o, query_rows);
    let o = || facts("o", args.o.as_ptr() as u64, fwd.strides.o, extents.o, query_rows);
    let (v_strides, v_shape) = as_it_lies(fwd.layout.v, fwd.strides.v, extents.v);
    let v_rows = match fwd.layout.v {
        VLayout::RowMajor => key_rows,
        VLayout::ColMajor => fwd.dims.head_dim_v.next_multiple_of(64).cast_signed(),
    };
    [
        facts("q", args.q.as_ptr() as u64, fwd.strides.q, extents.q, query_rows),
        facts("k", k_address, fwd.strides.k, extents.k, key_rows),
        facts("v", args.v.as_ptr() as u64, v_strides, v_shape, v_rows),
        dout(),
        if brings_o { o() } else { dout() },
    ]
}
