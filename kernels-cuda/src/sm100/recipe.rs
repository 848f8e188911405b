//! The Blackwell forward kernel's recipe: which problems it supports, its tile and its tensor maps.

use std::ffi::c_void;

use fmha_core::abi::{FwdParams, View};
use fmha_core::error::{Refusal, Result};
use fmha_core::fields::knob_values;
use fmha_core::masks::mask_data_params;
use fmha_core::scale_params::block_scale_params;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, ScoreSums, ValidFwd, Workspace};
use fmha_gpu::{About, Choice, Grid, Kernel, Launch, Launches, Operand, Stage, Steps, Tiles, update};

use crate::maps::{Boxes, Maps};
use crate::nvidia::{DeviceFacts, FwdCall, Nvidia};
use crate::operands::{alignment, refuse_row_invariant};
use crate::schedule::TileSchedule;
use crate::sm100::{self, Sm100Tile, modelled, units};
use crate::split::{self, launch as parts};
use crate::tile_list::{self, MaskCode, TileListPlan, TileOf};
use crate::tree_mask;

/// The merging kernel's name in plans.
const MERGE_NAME: &str = "sm100_merge";
/// The name of the kernel that updates the cache.
const UPDATE_NAME: &str = "sm100_update";

/// The forward on tcgen05, with its tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm100 {
    tile: Sm100Tile,
    schedule: TileSchedule,
    list: Option<TileListPlan>,
    /// The kernel's own part of the workspace; the part of the cache update follows it.
    own: Workspace,
}

impl Sm100 {
    /// Whether parts of the keys end at fixed numbers, wherever a mask begins.
    pub(crate) fn has_fixed_parts(&self) -> bool {
        self.tile.fixed_parts
    }
}

impl<V: Nvidia> Kernel<ValidFwd, V> for Sm100 {
    type Tile = Sm100Tile;

    fn about() -> About<ValidFwd> {
        let tiles = Tiles::of_forward::<Sm100Tile>(sm100::NAME, &[sm100::HEADER]);
        About {
            tiles: Some(tiles),
            computes_code: true,
            reads_masks: true,
            computes_code_beside_masks: true,
            reads_block_scales: true,
            ..About::new(sm100::NAME)
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
        Ok(vec![knob_values(&sm100::choose_tile(problem, &facts.arch, facts.num_sms))])
    }

    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Sm100Tile, Refusal> {
        fit_like(problem, problem, facts, options, fields)
    }

    fn plan(
        tile: Sm100Tile,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(sm100::NAME, reason);
        let spec = sm100::spec_of(problem);
        let is_split = tile.split_keys > 0;
        let smem_bytes = tile.smem_bytes(&spec).unsigned_abs();
        let schedule = tile.schedule(problem).map_err(refuse)?;
        let at_once = tile.rows_at_once(problem);
        let of_launch = if is_split { schedule.of_blocks(0, at_once.blocks.cast_signed()) } else { schedule };
        let grid = Grid {
            dependent: tile.dependent_launch,
            ..Grid::new(tile.grid(&of_launch, facts.num_sms), tile.num_threads().unsigned_abs())
        };
        let own_spec = if is_split { split::part_spec(&spec) } else { spec };
        let (list, own) =
            list_of(problem, &tile, tile.workspace(problem, &schedule, facts.num_sms)).map_err(refuse)?;
        let has_function = list.is_some_and(|list| list.code() == MaskCode::Asked);
        let lists = list.map(|list| tile_list::launches(&list, problem, &spec, facts)).transpose();
        let lists = lists.map_err(refuse)?.into_iter().flatten();
        let main = Launch {
            stage: Stage::Main,
            kernel: sm100::NAME,
            source: match &list {
                Some(list) => {
                    let of_kernel = match tile.scale_block {
                        0 => sm100::fwd_masked,
                        _ => sm100::fwd_masked_scaled,
                    };
                    tile_list::behind(list, problem, of_kernel(&own_spec, &tile, has_function))
                }
                None if problem.cache.tree_mask => sm100::fwd_tree(&own_spec, &tile),
                None if tile.scale_block > 0 => sm100::fwd_scaled(&own_spec, &tile),
                None => sm100::fwd(&own_spec, &tile),
            },
            grid,
            shared_bytes: smem_bytes,
            tiles: u64::from(schedule.num_tiles.unsigned_abs()),
            // One CTA per SM, since it allocates all of tensor memory.
            tiles_at_once: u64::from(facts.num_sms / tile.cluster.unsigned_abs()),
        };
        let cut = (tile.cut(problem), at_once.queries, spec.dtype_qk);
        let merge = parts::merge(MERGE_NAME, problem, cut, facts);
        let update = update::launch_before(UPDATE_NAME, problem, facts).map_err(refuse)?;
        Ok(Choice {
            kernel: Self { tile, schedule, list, own },
            launches: Launches::new(lists.chain(update), main, merge),
            workspace: update::workspace(problem, own).map_err(refuse)?,
            promises: Promises {
                deterministic: true,
                // Batch invariance: one thread computes a row, its key blocks begin at the sequence's first key and
                // have a size given by the head dimensions; blocks that only other rows of the tile see add zeros. It
                // does not hold if a short query's keys may be split, since a long one's are not. Nor does it hold with
                // lists, in which blocks that are partly masked for any row of the tile come first.
                batch_invariant: list.is_none()
                    && (!is_split || tile.fixed_parts)
                    && tile.cluster == 1
                    && (options.batch_invariant
                        || split::split_keys(problem, tile.block_n) == 0
                            && sm100::default_tile(&spec).cluster == 1),
                row_invariant: false,
                graph_capturable: true,
                accuracy: if tile.lazy_rescale_log2 == 0 { Accuracy::Exact } else { Accuracy::Fast },
                score_sums: ScoreSums::F32,
            },
            details: vec![
                ("tile", format!("{} x {}, {} stages", tile.block_m, tile.block_n, tile.stages)),
                ("order", format!("{:?}, L2 groups of {} heads", tile.order, schedule.heads_per_l2_group)),
                ("schedule", schedule_words(&tile, problem)),
                ("tensor memory", format!("{} of {} columns", tile.tmem_columns(&spec), sm100::TMEM_COLUMNS)),
            ]
            .into_iter()
            .chain(list.map(|list| ("lists of tiles", list.words())))
            .chain(modelled::details(
                &units::forward(&spec, &tile, &facts.arch),
                modelled::walk(problem, &tile, &schedule, facts),
                modelled::flops(problem, 2 * (problem.dims.head_dim_qk + problem.dims.head_dim_v)),
            ))
            .collect(),
        })
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        let Self { tile, .. } = self;
        match operand {
            // With a rotary embedding, kernels read rotated queries from the workspace.
            Operand::Q if problem.cache.rotary.is_some() => 1,
            _ => alignment(problem, operand, tile.copy_bytes, tile.vector_store && tile.split_keys == 0),
        }
    }

    fn lists(&self) -> &[TileListPlan] {
        self.list.as_slice()
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let (Self { tile, schedule, list, own }, fwd) = (*self, steps.main());
        // SAFETY: the caller keeps the contract of `launch`; the plan's workspace was made for the same part of it.
        let mut whole = unsafe { update::run(steps, call, own)? };
        if call.problem.cache.tree_mask {
            whole = tree_mask::without_upper_end(&whole);
        }
        let tree = tree_mask::bind(call.problem, call.args);
        let turned = call.problem.cache.rotary.map(|_| whole.q);
        let masks = mask_data_params(call.problem, &call.args.masks);
        let scales = block_scale_params(call.problem, &call.args.score);
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
        let maps = match tile.copy_bytes {
            0 => {
                fwd.kept.of_turned::<V::Driver>(call, turned, None, || boxes(call.problem, &tile, turned))?
            }
            _ => Maps::UNREAD,
        };
        let main = |params: &mut FwdParams, (first, count)| {
            let mut rows = schedule.of_blocks(first, count);
            let (mut masks, mut list, mut tree, mut scales) = (masks, list, tree, scales);
            let mut arguments: [*mut c_void; 6] = [std::ptr::null_mut(); 6];
            let mut count = 0;
            let mut add = |argument: *mut c_void| {
                arguments[count] = argument;
                count += 1;
            };
            add((&raw mut *params).cast());
            add((&raw const maps).cast_mut().cast());
            add((&raw mut rows).cast());
            if call.problem.cache.tree_mask {
                add((&raw mut tree).cast());
            }
            if let Some(list) = &mut list {
                add((&raw mut masks).cast());
                add((&raw mut *list).cast());
            }
            if let Some(scales) = &mut scales {
                add((&raw mut *scales).cast());
            }
            // SAFETY: the kernel takes FwdParams, Maps and TileSchedule, under a tree mask TreeMask, under masks
            // MaskDataParams and TileList, and over scales of blocks BlockScaleParams; `check_fwd` saw that the memory
            // covers the problem, and the maps were made for the same extents.
            unsafe { fwd.launch(&mut arguments[..count], call.stream) }
        };
        let in_parts = (tile.cut(call.problem), tile.rows_at_once(call.problem));
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { parts::run(steps, call, whole, in_parts, main) }
    }
}

/// The tile for a problem, equal to that of `like`, the same problem with another cache layout.
///
/// # Errors
/// The field that the kernel does not support, and its value.
pub(crate) fn fit_like(
    like: &ValidFwd,
    problem: &ValidFwd,
    facts: &DeviceFacts,
    options: &PlanOptions,
    fields: &TileOptions,
) -> Result<Sm100Tile, Refusal> {
    let refuse = |reason: String| Refusal::new(sm100::NAME, reason);
    sm100::accepts(problem)?;
    refuse_row_invariant(options, sm100::NAME)?;
    let mut own = sm100::choose_tile(like, &facts.arch, facts.num_sms);
    if like.strides != problem.strides || like.layout.kv != problem.layout.kv {
        let copies = sm100::choose_tile(problem, &facts.arch, facts.num_sms);
        (own.copy_bytes, own.vector_store) = (copies.copy_bytes, copies.vector_store);
    }
    if options.accuracy == Accuracy::Exact {
        own.lazy_rescale_log2 = 0;
    }
    // Merged parts round differently from unsplit keys, which a longer query has; a pair of CTAs, which a short
    // query does not have, uses more keys per block.
    if options.batch_invariant {
        own = own.batch_invariant(like);
        if tile_list::serve(problem) {
            own.block_m = 128;
        }
    }
    fitted(own, fields, problem, facts).map_err(refuse)
}

/// Checks that the device has the instructions that the kernel uses.
///
/// # Errors
/// The architecture, and what it lacks.
pub(crate) fn needs(facts: &DeviceFacts) -> Result<(), String> {
    facts.needs(facts.instructions.tma && facts.instructions.tcgen05, "TMA with tcgen05")
}

/// The tile with some fields set, if it fits the problem and the device.
///
/// # Errors
/// A text with the incompatible fields and their values.
fn fitted(
    mut tile: Sm100Tile,
    fields: &TileOptions,
    problem: &ValidFwd,
    facts: &DeviceFacts,
) -> Result<Sm100Tile, String> {
    let spec = sm100::spec_of(problem);
    fields.iter().try_for_each(|(key, value)| tile.set(key, value))?;
    tile.place(problem);
    tile.check(&spec, problem.gqa_ratio())?;
    if tile_list::serve(problem) {
        tile.check_lists()?;
    }
    sm100::check_loads(problem, &tile)?;
    if tile.load_max {
        let reducing = facts.instructions.reducing_loads;
        facts
            .needs(reducing, "loads from tensor memory that find maxima (sm_103a and sm_110a have)")
            .map_err(|why| format!("tile load_max=1: {why}"))?;
    }
    split::check(problem, tile.cut(problem))?;
    facts.has_room_for(&tile, tile.smem_bytes(&spec), tile.cluster)?;
    Ok(tile)
}

/// Plans the lists of a problem's tiles, if masks need lists, after `before` in the workspace; also returns the
/// whole workspace.
///
/// # Errors
/// More rows or bytes than lists may have.
fn list_of(
    problem: &ValidFwd,
    tile: &Sm100Tile,
    before: Workspace,
) -> Result<(Option<TileListPlan>, Workspace), String> {
    if !tile_list::serve(problem) {
        return Ok((None, before));
    }
    let block = [tile.block_m, tile.block_n];
    let (list, workspace) = TileListPlan::new(problem, TileOf::Queries, block, before)?;
    let (list, workspace) = list.in_bits(problem, workspace);
    Ok((Some(list), workspace))
}

/// Boxes that TMA loads; Q's box is that of the rotated copy if `turned` is given.
pub(crate) fn boxes(problem: &ValidFwd, tile: &Sm100Tile, turned_q: Option<View>) -> Boxes {
    let spec = sm100::spec_of(problem);
    Boxes {
        q: tile.q_box(&spec, problem.gqa_ratio() as i32),
        k: tile.k_box(&spec),
        v: tile.v_box(&spec),
        bias: None,
        prepared_v: None,
        turned_q,
    }
}

fn schedule_words(tile: &Sm100Tile, problem: &ValidFwd) -> String {
    let tiles = if tile.num_q_tiles() == 2 { "two query tiles" } else { "one query tile, two score slots" };
    let mut words = vec![tiles.to_owned()];
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.extend(
        (tile.exp2_polynomial_pairs > 0)
            .then(|| format!("{} of 16 exponentials by a polynomial", tile.exp2_polynomial_pairs)),
    );
    words.extend(tile.load_max.then(|| "maxima by the loads".to_owned()));
    words.extend((tile.copy_bytes > 0).then(|| format!("loads by copies of {} bytes", tile.copy_bytes)));
    words.extend((tile.page_keys > 0).then(|| format!("pages by boxes of {} keys", tile.page_keys)));
    words.extend(parts::words(tile.cut(problem)));
    words.extend((tile.cluster > 1).then(|| "pairs of CTAs".to_owned()));
    words.extend(tile.pack_gqa.then(|| "query heads packed".to_owned()));
    words.extend(tile.whole_groups.then(|| format!("{} rows of whole groups", tile.rows_of_tile(problem))));
    words.extend((tile.scale_block > 0).then(|| format!("scales of {} elements", tile.scale_block)));
    words.extend(tile.dependent_launch.then(|| "starts while the grid before ends".to_owned()));
    words.join(", ")
}
