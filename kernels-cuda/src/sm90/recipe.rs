//! The Hopper forward kernel's recipe: which problems it supports, its tile and its tensor maps.

use fmha_core::abi::{DevPtr, FwdParams};
use fmha_core::error::{Refusal, Result};
use fmha_core::fields::{FieldValue, knob_values};
use fmha_core::masks::mask_data_params;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::{Candidates, TileOptions};
use fmha_core::{Accuracy, PlanOptions, Promises, ValidFwd, Workspace, bind};
use fmha_gpu::{About, Choice, Grid, Kernel, Launch, Launches, Operand, Stage, Steps, Tiles};

use crate::maps::{BlocksOfV, Boxes, Maps};
use crate::nvidia::{DeviceFacts, FwdCall, Nvidia, row_launch};
use crate::operands::{ALIGN, alignment, has_odd_pages, refuse_row_invariant};
use crate::row_order;
use crate::schedule::TileSchedule;
use crate::sm80::{self, Room, recipe::room};
use crate::sm90::{self, PingPong, PrepareV, PreparedValues, Sm90Tile, TileOrder, ValueProduct};
use crate::sm90_widened;
use crate::split::{self, launch as parts};
use crate::tile_list::{self, MaskCode, TileListPlan, TileOf};

/// The merging kernel's name in plans.
const MERGE_NAME: &str = "sm90_merge";

/// The forward on wgmma, with its tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm90 {
    tile: Sm90Tile,
    schedule: TileSchedule,
    values: Option<ValuesPlan>,
    list: Option<TileListPlan>,
}

/// Parameters of a V that is prepared in the workspace, and the offsets of its parts there.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ValuesPlan {
    values: PreparedValues,
    counts: u64,
    blocks: u64,
}

impl ValuesPlan {
    /// Places prepared values after the tile counter; returns the whole workspace too.
    fn new(values: PreparedValues, tile: &Sm90Tile, spec: &FwdSpec, counter_bytes: u64) -> (Self, Workspace) {
        let counts = counter_bytes;
        let zeroed_bytes = counts + values.counts_bytes(tile);
        // The blocks begin at multiples of 128 bytes, the L2's lines.
        let blocks = zeroed_bytes.next_multiple_of(128);
        let bytes = blocks + values.blocks_bytes(spec, tile);
        (Self { values, counts, blocks }, Workspace { bytes, zeroed_bytes })
    }

    /// Addresses of the prepared values in a workspace.
    fn at(&self, address: u64) -> PreparedValues {
        let (blocks, counts) = (DevPtr::new(address + self.blocks), DevPtr::new(address + self.counts));
        PreparedValues { blocks, counts, ..self.values }
    }

    fn map(&self, tile: &Sm90Tile, spec: &FwdSpec, address: u64) -> BlocksOfV {
        let [rows, columns] = tile.prepared_block(spec);
        let dims = [columns, rows, self.values.num_blocks, self.values.num_heads];
        BlocksOfV {
            address: address + self.blocks,
            dtype: tile.prepared_type(spec),
            dims: dims.map(|extent| u64::from(extent.unsigned_abs())),
        }
    }
}

/// The reason why a problem of few queries is left to `sm80`: the [price](split::price) of `sm80` is lower, or higher
/// by at most the factor `NEARLY`. `sm80` reads an FP8 cache in place, which for this kernel a launch must convert
/// first; and one kernel must serve both types of a cache, so that their bits are equal (CONTRACT.md).
#[must_use]
pub fn leaves_to_sm80(problem: &ValidFwd, room: Room) -> Option<String> {
    /// Largest time of `sm80`, relative to this kernel's, for which a problem is left to it.
    const NEARLY: f64 = 1.03;
    let ours = sm90::choose_tile_in_parts(problem, room.num_sms);
    let ours = sm90::micros_of_few(problem, &ours, room.num_sms)?;
    let theirs = sm80::choose_tile(problem, room).micros(problem, room);
    (theirs < NEARLY * ours).then(|| format!("it would take {ours:.0} us, sm80 {theirs:.0}"))
}

/// Whether a kv head has so many rows that the problem is not left to `sm80`: its price, and so the kernel, would
/// depend on the batch.
fn has_many_rows(problem: &ValidFwd) -> bool {
    problem.dims.seqlen_q.saturating_mul(problem.gqa_ratio()) > sm80::MOST_SHORT_ROWS
}

/// Rows of a warp of `sm80`, which was timed over pages while this kernel was not: up to this many rows stay there
/// at any price.
const ROWS_OF_A_WARP: u32 = 16;

/// Refuses calls that are left to `sm80`.
fn leave_to_parts(problem: &ValidFwd, facts: &DeviceFacts, row_invariant: bool) -> Result<(), String> {
    // Calls with FP8 queries were never measured.
    let is_paged = problem.layout.kv.is_paged();
    let is_fp8 = problem.dtypes.qk.is_fp8();
    let taken = (is_paged || !is_fp8) && sm80::accepts(problem, facts.instructions.converts_fp8).is_ok();
    if taken && is_paged && !sm90::reads_pages_by_tma(problem) {
        return Err(format!(
            "page_size {}, or a stride of K or V: TMA brings no boxes of these pages, which sm80 copies",
            problem.layout.kv.page_size().unwrap_or(0)
        ));
    }
    if !taken || has_many_rows(problem) || problem.arrivals > 0 {
        return Ok(());
    }
    let rows = problem.dims.seqlen_q.saturating_mul(problem.gqa_ratio());
    if is_paged && rows <= ROWS_OF_A_WARP {
        // Fixed parts give few CTAs, each of which waits for its copies: over 4096 keys in pages of 64, an H200's sm80
        // took 72 us for one token, this kernel 29 us for sixteen.
        if row_invariant {
            return Ok(());
        }
        return Err(format!("{rows} rows of a kv head over pages: a warp of sm80 has them all"));
    }
    if is_fp8 {
        return Err(format!(
            "dtype_qk {} in pages, few rows: sm80 reads them where they lie",
            problem.dtypes.qk
        ));
    }
    leaves_to_sm80(problem, room(facts)).map_or(Ok(()), Err)
}

/// Leaves an FP8 cache to the launch that converts it once, if several tiles of rows would each convert it again,
/// unless that needs a large workspace. Bits are equal either way.
fn leave_to_widened(problem: &ValidFwd) -> Result<(), String> {
    /// Most rows (queries times heads) of a kv head for which one tile suffices.
    const MOST_ROWS: u32 = 128;
    let rows = problem.dims.seqlen_q.saturating_mul(problem.gqa_ratio());
    if rows <= MOST_ROWS || !sm90_widened::has_room(problem) {
        return Ok(());
    }
    Err(format!(
        "dtype_cache: {rows} rows of a kv head would each {MOST_ROWS} widen its keys, sm90_widened once"
    ))
}

/// Refuses pages that TMA does not read, and FP8 queries, in plans where a row's bits must depend on its sequence
/// alone: one kernel must then compute all calls over pages of this size, whatever the batch and the number of queries.
fn leave_pages(problem: &ValidFwd, facts: &DeviceFacts) -> Result<(), String> {
    let is_ours = !problem.dtypes.qk.is_fp8() && sm90::reads_pages_by_tma(problem);
    match sm80::accepts(problem, facts.instructions.converts_fp8) {
        Ok(()) if !is_ours => Err(format!(
            "batch_invariant: dtype_qk {} over pages of {} rows: sm80 has all calls over these",
            problem.dtypes.qk,
            problem.layout.kv.page_size().unwrap_or(0)
        )),
        _ => Ok(()),
    }
}

/// The tile with some fields set, if it fits the problem and the device.
///
/// # Errors
/// A text that names the fields and numbers that do not go together.
fn fitted(
    mut tile: Sm90Tile,
    fields: &TileOptions,
    problem: &ValidFwd,
    facts: &DeviceFacts,
    spec: &FwdSpec,
) -> Result<Sm90Tile, String> {
    fields.iter().try_for_each(|(key, value)| tile.set(key, value))?;
    tile.place(problem);
    if problem.cache.dtype.is_some() {
        tile.take_raw_stages(spec)?;
    }
    tile.check(spec, problem.gqa_ratio())?;
    if let (Some((axis, stride)), true) = (sm90::odd_bias_stride(problem), tile.bias_stages > 0) {
        return Err(format!(
            "tile bias_stages={}: bias.{axis} stride {stride} is not a positive multiple of 8 below 2^39, as TMA needs",
            tile.bias_stages
        ));
    }
    if tile_list::serve(problem) {
        for (field, is_set) in [
            ("cluster", tile.cluster > 1),
            ("pack_gqa", tile.pack_gqa),
            ("split_keys", tile.split_keys > 0),
            ("fold_keys", tile.fold_keys > 0),
            ("bias_stages", tile.bias_stages > 0),
            ("prepare_v", tile.prepare_v != PrepareV::InTile),
            ("block_m=192", tile.block_m > 128),
        ] {
            if is_set {
                return Err(format!(
                    "tile {field} beside masks as data, whose lists are of one head's tiles"
                ));
            }
        }
    }
    if tile.copy_bytes == 0 && has_odd_pages(problem, tile.block_n) {
        return Err(format!(
            "tile copy_bytes=0: pages of {} keys are not boxes of 8 rows and more",
            problem.layout.kv.page_size().unwrap_or(0)
        ));
    }
    split::check(problem, tile.cut(problem))?;
    facts.has_room_for(&tile, tile.smem_bytes(spec), tile.cluster)?;
    if problem.arrivals > 0 && (!tile.waits_for_keys() || tile_list::serve(problem)) {
        return Err(format!("arrivals {}: its tile does not wait for pieces of keys", problem.arrivals));
    }
    Ok(tile)
}

/// The table's tile with the cheapest shape and order by the model, and the fields that the user set.
fn own_tile(problem: &ValidFwd, facts: &DeviceFacts) -> Priced {
    let mut tile = sm90::choose_tile_in_parts(problem, facts.num_sms);
    if tile_list::serve(problem) {
        return (tile, Candidates::default(), Candidates::default());
    }
    let shapes = tile.shapes(problem, facts.num_sms);
    if let Some(best) = shapes.cheapest(sm90::LEAST_GAIN_OF_SHAPE) {
        tile = tile.of_shape(best.choice);
    }
    let orders = tile.orders(problem, facts.num_sms);
    tile.order = orders.cheapest(sm90::LEAST_GAIN_OF_ORDER).map_or(tile.order, |best| best.choice);
    (tile, shapes, orders)
}

/// A tile, and the shapes and orders among which it was chosen, if they have prices.
pub(crate) type Priced = (Sm90Tile, Candidates<(i32, i32)>, Candidates<TileOrder>);

impl Sm90 {
    /// Whether parts of the keys end at fixed numbers, wherever a mask begins.
    pub(crate) fn has_fixed_parts(&self) -> bool {
        self.tile.fixed_parts || self.tile.fold_keys > 0
    }
}

impl<V: Nvidia> Kernel<ValidFwd, V> for Sm90 {
    type Tile = Priced;

    fn about() -> About<ValidFwd> {
        let tiles = Tiles::of_forward::<Sm90Tile>(sm90::NAME, &[sm90::HEADER]);
        About {
            tiles: Some(tiles),
            waits_for_keys: true,
            computes_code: true,
            reads_masks: true,
            computes_code_beside_masks: true,
            ..About::new(sm90::NAME)
        }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs(facts)
    }

    fn own_tiles(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<TileOptions>, Refusal> {
        <Self as Kernel<ValidFwd, V>>::choose(problem, facts, &PlanOptions::default())?;
        Ok(vec![knob_values(&own_tile(problem, facts).0)])
    }

    fn modelled_micros(problem: &ValidFwd, facts: &DeviceFacts, fields: &TileOptions) -> Option<f64> {
        let (mut tile, ..) = own_tile(problem, facts);
        fields.iter().try_for_each(|(name, value)| tile.set(name, value)).ok()?;
        tile.place(problem);
        tile.check(&sm90::spec_of(problem), problem.gqa_ratio()).ok()?;
        tile.modelled_micros(problem, facts.num_sms)
    }

    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Priced, Refusal> {
        fit_like(problem, problem, facts, options, fields)
    }

    fn plan(
        (tile, shapes, orders): Priced,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(sm90::NAME, reason);
        let spec = spec_of(problem, options);
        let smem_bytes = tile.smem_bytes(&spec).unsigned_abs();
        let schedule = tile.schedule(problem).map_err(refuse)?;
        let at_once = tile.rows_at_once(problem);
        let is_split = tile.split_keys > 0;
        let of_launch = if is_split { schedule.of_blocks(0, at_once.blocks.cast_signed()) } else { schedule };
        let grid = Grid {
            dependent: tile.dependent_launch,
            ..Grid::new(tile.grid(&of_launch, facts.num_sms), tile.num_threads().unsigned_abs())
        };
        // The tile counter, followed by a prepared V.
        let counter_bytes = tile.counter_bytes(&schedule, facts.num_sms);
        let (values, workspace) = match tile.prepare_v {
            PrepareV::InTile => (None, tile.workspace(problem, &schedule, facts.num_sms)),
            PrepareV::Before | PrepareV::Beside => {
                let values = PreparedValues::new(problem, &tile, &schedule, facts.num_sms).map_err(refuse)?;
                let (values, workspace) = ValuesPlan::new(values, &tile, &spec, counter_bytes);
                (Some(values), workspace)
            }
        };
        let block = [tile.block_m, tile.block_n];
        let (list, workspace) = match tile_list::serve(problem) {
            false => (None, workspace),
            true => {
                let (list, workspace) =
                    TileListPlan::new(problem, TileOf::Queries, block, workspace).map_err(refuse)?;
                let (list, workspace) = list.in_bits(problem, workspace);
                (Some(list), workspace)
            }
        };
        let has_function = list.is_some_and(|list| list.code() == MaskCode::Asked);
        let lists = list.map(|list| tile_list::launches(&list, problem, &spec, facts)).transpose();
        let lists = lists.map_err(refuse)?.into_iter().flatten();
        let before = values.filter(|_| tile.prepare_v == PrepareV::Before).map(|plan| {
            let grid = Grid { dependent: true, ..Grid::new(plan.values.grid(), sm90::PREPARE_THREADS) };
            row_launch((Stage::Prepare, sm90::PREPARE_NAME), sm90::prepare_values(&spec, &tile), grid, facts)
        });
        let cut = tile.cut(problem);
        let merge = parts::merge(MERGE_NAME, problem, (cut, at_once.queries, tile.stored), facts);
        let own_spec = if is_split { split::part_spec(&spec) } else { spec };
        // Only one shape and one order keep the promise, so prices do not matter.
        let is_priced = !options.batch_invariant;
        let main = Launch {
            stage: Stage::Main,
            kernel: sm90::NAME,
            source: match (&list, problem.arrivals) {
                (Some(list), _) => {
                    let source = sm90::fwd_masked(&own_spec, &tile, has_function);
                    tile_list::behind(list, problem, source)
                }
                (None, 0) => sm90::fwd(&own_spec, &tile),
                (None, _) => sm90::fwd_of_arriving_keys(&own_spec, &tile),
            },
            grid,
            shared_bytes: smem_bytes,
            tiles: u64::from(schedule.num_tiles.unsigned_abs()),
            // One CTA per SM: two do not fit the registers.
            tiles_at_once: facts.num_sms.into(),
        };
        Ok(Choice {
            kernel: Self { tile, schedule, values, list },
            launches: Launches::new(before.into_iter().chain(lists), main, merge),
            workspace,
            promises: Promises {
                deterministic: true,
                // Batch invariance does not hold if a short query's keys may be split, since a long one's are not,
                // unless parts have a fixed number of keys; nor with lists, where a row's order depends on its tile,
                // since blocks that are partly masked for any row of the tile come first.
                batch_invariant: list.is_none()
                    && tile.is_batch_invariant(&spec)
                    && (options.batch_invariant || split::is_never_cut(problem, tile.block_n, true)),
                row_invariant: options.row_invariant
                    && list.is_none()
                    && row_order::shared_block(problem, facts) == Some(tile.block_n)
                    && tile.is_batch_invariant(&spec),
                graph_capturable: true,
                accuracy: accuracy(&tile),
                score_sums: facts.score_sums.of(problem.dtypes.qk),
            },
            details: vec![
                ("tile", format!("{} x {}, {} stages", tile.block_m, tile.block_n, tile.stages)),
                ("order", format!("{:?}, L2 groups of {} heads", tile.order, schedule.heads_per_l2_group)),
                ("schedule", schedule_words(&tile, problem)),
            ]
            .into_iter()
            .chain(list.map(|list| ("lists of tiles", list.words())))
            .chain(
                (is_priced && !shapes.is_empty())
                    .then(|| ("shapes", shapes.words(|(rows, keys)| format!("{rows} x {keys}")))),
            )
            .chain((is_priced && !orders.is_empty()).then(|| ("orders", orders.words(FieldValue::name))))
            .collect(),
        })
    }

    /// Tiles for other sizes: the order of a masked call's tiles depends on their number, and their shape also on
    /// the number of blocks.
    fn tiles_of_other_sizes(&self, problem: &ValidFwd) -> Vec<TileOptions> {
        let Self { tile, .. } = self;
        let of = |name: &str, value: String| (name.to_owned(), value);
        let other = match (tile.order, tile.cluster) {
            (TileOrder::Dynamic, 1) => TileOrder::Static,
            (TileOrder::Static, 1) => TileOrder::Dynamic,
            _ => return Vec::new(),
        };
        let order = Sm90Tile::has_orders(problem).then(|| of("order", other.name()));
        let others = tile.of_other_sizes(problem).into_iter().map(|tile| knob_values(&tile));
        let in_own_order: Vec<TileOptions> = [TileOptions::default()].into_iter().chain(others).collect();
        let in_the_other = order.into_iter().flat_map(|order| {
            in_own_order.iter().map(move |tile| tile.iter().cloned().chain([order.clone()]).collect())
        });
        let in_the_other: Vec<TileOptions> = in_the_other.collect();
        in_own_order.into_iter().skip(1).chain(in_the_other).collect()
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        let Self { tile, .. } = self;
        match operand {
            Operand::Bias if tile.bias_stages > 0 => ALIGN,
            _ => alignment(problem, operand, tile.copy_bytes, tile.vector_store && tile.split_keys == 0),
        }
    }

    fn lists(&self) -> &[TileListPlan] {
        self.list.as_slice()
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let (Self { tile, schedule, values, list }, fwd) = (*self, steps.main());
        let mut whole = bind::fwd_params(call.problem, call.args);
        let workspace = whole.workspace.0;
        let prepared = values.map(|plan| plan.map(&tile, &FwdSpec::of(call.problem), workspace));
        let maps = match tile.copy_bytes {
            0 => fwd.kept.of::<V::Driver>(call, prepared, || boxes(call.problem, &tile, prepared))?,
            _ => Maps::UNREAD,
        };
        let values = values.map(|plan| plan.at(workspace));
        if let (Some(prepare), Some(mut values)) = (steps.at(Stage::Prepare), values) {
            let mut arguments = [(&raw mut whole).cast(), (&raw mut values).cast()];
            // SAFETY: the kernel takes FwdParams and PreparedValues; `check_fwd` saw that the memory covers
            // the problem, and that the workspace is as large as the plan says.
            unsafe { prepare.launch(&mut arguments, call.stream)? };
        }
        let masks = mask_data_params(call.problem, &call.args.masks);
        let (list, masks) = match list {
            None => (None, masks),
            Some(plan) => {
                // SAFETY: `check_fwd` saw that the memory covers the problem, and that the workspace is as large as
                // the plan says.
                let (list, masks) =
                    unsafe { plan.made(steps, &mut whole, masks, &call.args.masks, call.stream)? };
                (Some(list), masks)
            }
        };
        let arrivals = bind::arrival_params(call.problem, &call.args.seq);
        let main = |params: &mut FwdParams, (first, count)| {
            let mut rows = schedule.of_blocks(first, count);
            let (mut values, mut arrivals) = (values, arrivals);
            if let Some(mut list) = list {
                let mut masks = masks;
                let mut arguments = [
                    (&raw mut *params).cast(),
                    (&raw const maps).cast_mut().cast(),
                    (&raw mut rows).cast(),
                    (&raw mut masks).cast(),
                    (&raw mut list).cast(),
                ];
                // SAFETY: under masks as data the kernel takes FwdParams, Maps, TileSchedule, MaskDataParams and
                // TileList; `check_fwd` saw that the memory covers the problem, and the maps were made for the same
                // extents.
                return unsafe { fwd.launch(&mut arguments, call.stream) };
            }
            let last = match &mut values {
                _ if call.problem.arrivals > 0 => (&raw mut arrivals).cast(),
                Some(values) => (&raw mut *values).cast(),
                None => std::ptr::null_mut(),
            };
            let mut arguments = [
                (&raw mut *params).cast(),
                (&raw const maps).cast_mut().cast(),
                (&raw mut rows).cast(),
                last,
            ];
            let count = 3 + usize::from(call.problem.arrivals > 0 || tile.prepare_v == PrepareV::Beside);
            // SAFETY: the kernel takes FwdParams, Maps, TileSchedule and, where it prepares V, PreparedValues, or for
            // keys that arrive while it runs ArrivalParams; `check_fwd` saw that the memory covers the problem, and the
            // maps were made for the same extents.
            unsafe { fwd.launch(&mut arguments[..count], call.stream) }
        };
        let in_parts = (tile.cut(call.problem), tile.rows_at_once(call.problem));
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { parts::run(steps, call, whole, in_parts, main) }
    }
}

/// The tile for a problem, the one that `like` has: the same problem over a cache that lies otherwise.
///
/// # Errors
/// The field that it does not take, and its number.
pub(crate) fn fit_like(
    like: &ValidFwd,
    problem: &ValidFwd,
    facts: &DeviceFacts,
    options: &PlanOptions,
    fields: &TileOptions,
) -> Result<Priced, Refusal> {
    let refuse = |reason: String| Refusal::new(sm90::NAME, reason);
    sm90::accepts(problem)?;
    let shared_block = if options.row_invariant { row_order::shared_block(problem, facts) } else { None };
    if shared_block.is_none() {
        refuse_row_invariant(options, sm90::NAME)?;
    }
    let is_cached = problem.cache.dtype.is_some();
    if options.kernel.is_none() && is_cached {
        // The call on a 16-bit cache has already decided whether `sm80` computes this call.
        leave_to_widened(problem).map_err(refuse)?;
    } else if options.kernel.is_none() && options.tile.is_empty() {
        let is_paged = problem.layout.kv.is_paged();
        if is_paged && options.batch_invariant && !options.row_invariant {
            leave_pages(problem, facts).map_err(refuse)?;
        } else if is_paged || !options.batch_invariant {
            // Either kernel gives equal bits if the plan is row-invariant.
            leave_to_parts(problem, facts, options.row_invariant).map_err(refuse)?;
        }
    }
    let spec = spec_of(problem, options);
    let twin = match problem.over_wide_cache() {
        Some(twin) => {
            Some(twin.validate().map_err(|error| refuse(format!("the cache in 16 bits: {error}")))?)
        }
        None => None,
    };
    // A quantised cache uses the order of the call on a 16-bit cache.
    let like = twin.as_ref().unwrap_or(like);
    let (mut own, shapes, orders) = own_tile(like, facts);
    if like.strides != problem.strides || like.layout.kv != problem.layout.kv {
        let copies = own_tile(problem, facts).0;
        (own.copy_bytes, own.vector_store) = (copies.copy_bytes, copies.vector_store);
    }
    if options.accuracy == Accuracy::Exact {
        (own.lazy_rescale_log2, own.skip_row_max) = (0, false);
    }
    if options.batch_invariant {
        own.make_batch_invariant(&spec);
        if !tile_list::serve(problem) {
            own.take_fixed_parts(like, facts.num_sms);
        }
        if options.row_invariant {
            own.lazy_rescale_log2 = if own.lazy_rescale_log2 > 0 { row_order::LAG_LOG2 } else { 0 };
        }
    }
    if let Some(stored) = problem.cache.dtype {
        own = own.over_narrow_cache(stored);
    }
    let tile = fitted(own, fields, problem, facts, &spec).map_err(refuse)?;
    Ok((tile, shapes, orders))
}

/// Spec for which a launch is compiled.
fn spec_of(problem: &ValidFwd, options: &PlanOptions) -> FwdSpec {
    let spec = sm90::spec_of(problem);
    if options.row_invariant { row_order::under_a_mask(spec) } else { spec }
}

/// Checks that the device has the instructions of Hopper's kernels.
///
/// # Errors
/// The architecture, and what it lacks.
pub(crate) fn needs(facts: &DeviceFacts) -> Result<(), String> {
    facts.needs(facts.instructions.tma && facts.instructions.wgmma, "TMA with wgmma")
}

/// Exact if the kernel takes the maximum of every block, and rescales every row to its own.
fn accuracy(tile: &Sm90Tile) -> Accuracy {
    let exact = tile.lazy_rescale_log2 == 0 && !tile.skip_row_max;
    if exact { Accuracy::Exact } else { Accuracy::Fast }
}

fn schedule_words(tile: &Sm90Tile, problem: &ValidFwd) -> String {
    let mut words = vec![format!("{} consumer warpgroups", tile.num_consumers())];
    words.extend(match tile.ping_pong {
        PingPong::Off => None,
        PingPong::AtIssue => Some("ping-pong".to_owned()),
        PingPong::AfterMax => Some("ping-pong after a block's maxima".to_owned()),
    });
    words.extend(tile.looks_ahead().then(|| "next tile's first product early".to_owned()));
    words.extend(tile.splits_q().then(|| "Q in pieces".to_owned()));
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.extend(tile.skip_row_max.then(|| {
        format!(
            "no row-max reduction inside the mask, unless scores lie 2^{} apart or rows are raised (votes from {} blocks on)",
            tile.exact_max_spread_log2, tile.vote_after
        )
    }));
    words.extend(tile.pack_gqa.then(|| "query heads packed".to_owned()));
    words.extend((tile.page_keys > 0).then(|| format!("pages by boxes of {} keys", tile.page_keys)));
    words.extend((tile.raw_stages > 0).then(|| {
        format!("a cache of {} widened in shared memory, {} blocks as they lie", tile.stored, tile.raw_stages)
    }));
    words.extend((tile.copy_bytes > 0).then(|| format!("loads by copies of {} bytes", tile.copy_bytes)));
    let of = if tile.cluster_heads { "heads" } else { "query blocks" };
    words.extend((tile.cluster > 1).then(|| format!("clusters of {} {of}", tile.cluster)));
    words.extend(tile.q_in_registers.then(|| "Q in registers".to_owned()));
    words.extend((tile.pv == ValueProduct::F16).then(|| "V brought to f16, P V summed in f32".to_owned()));
    words.extend(match tile.prepare_v {
        PrepareV::InTile => None,
        PrepareV::Before => Some("V prepared in the workspace by a launch before".to_owned()),
        PrepareV::Beside => Some("V prepared in the workspace beside the tiles".to_owned()),
    });
    words.extend(tile.flushes_output().then(|| {
        let parts = match tile.output_columns {
            0 => String::new(),
            columns => format!(", {columns} columns at a time"),
        };
        format!("P V summed in 14 bits and added to f32 after each {} keys{parts}", tile.block_n)
    }));
    words.extend((tile.bias_stages > 0).then(|| format!("bias by TMA, {} blocks", tile.bias_stages)));
    words.extend(parts::words(tile.cut(problem)));
    words.extend((tile.fold_keys > 0).then(|| {
        let place = if tile.fold_in_shared { "shared memory" } else { "the workspace" };
        format!("keys of every sequence in parts of {}, folded by their CTA in {place}", tile.fold_keys)
    }));
    words.extend(tile.dependent_launch.then(|| "starts while the grid before ends".to_owned()));
    words.join(", ")
}

/// Boxes of each tensor that one TMA instruction loads.
#[must_use]
pub fn boxes(problem: &ValidFwd, tile: &Sm90Tile, prepared_v: Option<BlocksOfV>) -> Boxes {
    let heads = if tile.pack_gqa { problem.gqa_ratio() as i32 } else { 1 };
    let q = problem.dims.head_dim_qk as i32;
    let [k, v] = tile.boxes_of_cache(&FwdSpec::of(problem));
    Boxes {
        q: [Sm90Tile::box_dim(q, problem.dtypes.qk), heads, tile.q_rows() / heads, 1, 1],
        k,
        v,
        bias: (tile.bias_stages > 0).then(|| tile.bias_box()),
        prepared_v,
        turned_q: None,
    }
}
