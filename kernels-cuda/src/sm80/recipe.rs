//! The recipe of the forward kernel on mma.sync, for every architecture from sm_80 on: supported problems and tile.

use fmha_core::abi::FwdParams;
use fmha_core::error::{Refusal, Result};
use fmha_core::fields::knob_values;
use fmha_core::masks::mask_data_params;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, VLayout, ValidFwd};
use fmha_gpu::{About, Choice, Grid, Kernel, Launch, Launches, Operand, Stage, Steps, Tiles, update};

use crate::lists::{self, TokenParams};
use crate::maps::{Boxes, Maps};
use crate::nvidia::{DeviceFacts, FwdCall, Nvidia};
use crate::operands::refuse_unlike_rows;
use crate::row_order;
use crate::rows::keep_mask;
use crate::schedule::TileSchedule;
use crate::sm80::{self, Room, Sm80Tile};
use crate::split::{self, launch as parts};
use crate::tree_mask;

/// The kernel with its tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm80 {
    tile: Sm80Tile,
    schedule: TileSchedule,
}

/// The merging kernel's name in plans.
const MERGE_NAME: &str = "sm80_merge";
/// The name of the kernel that updates the cache.
const UPDATE_NAME: &str = "sm80_update";
/// The name of the kernel that writes dropout's keep mask.
const KEEP_MASK_NAME: &str = "sm80_keep_mask";

impl Sm80 {
    /// Whether parts of the keys end at fixed numbers, wherever a mask begins.
    pub(crate) fn has_fixed_parts(&self) -> bool {
        self.tile.fixed_parts
    }
}

impl<V: Nvidia> Kernel<ValidFwd, V> for Sm80 {
    type Tile = Sm80Tile;

    fn about() -> About<ValidFwd> {
        let tiles = Tiles::of_forward::<Sm80Tile>(sm80::NAME, &[sm80::HEADER, sm80::TMA_HEADER]);
        About {
            computes_code: true,
            tiles: Some(tiles),
            reads_masks: true,
            computes_code_beside_masks: true,
            takes_lists: true,
            takes_second: true,
            reads_cache_rows: true,
            ..About::new(sm80::NAME)
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
        Ok(vec![knob_values(&own_tile(problem, facts, &PlanOptions::default()))])
    }

    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Sm80Tile, Refusal> {
        fit_like(problem, problem, facts, options, fields)
    }

    fn plan(
        tile: Sm80Tile,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(sm80::NAME, reason);
        let spec = spec_of(problem, options, &tile);
        let is_split = tile.split_keys > 0;
        let schedule = tile.schedule(problem).map_err(refuse)?;
        let at_once = tile.rows_at_once(problem);
        let num_tiles = schedule.of_blocks(0, at_once.blocks.cast_signed()).num_tiles;
        let own_spec = if is_split { split::part_spec(&spec) } else { spec };
        let tree = problem.cache.tree_mask;
        let source = match (tree, problem.masks.is_empty()) {
            _ if problem.walks_caches() => sm80::fwd_two_caches(&own_spec, &tile),
            _ if problem.lists.is_some() => sm80::fwd_lists(&own_spec, &tile),
            (true, _) => sm80::fwd_tree(&own_spec, &tile),
            (false, false) => sm80::fwd_masked(&own_spec, &tile),
            (false, true) => sm80::fwd(&own_spec, &tile),
        };
        let main = Launch {
            stage: Stage::Main,
            kernel: sm80::NAME,
            source,
            grid: Grid::new(
                match tile.shares {
                    0 => num_tiles.max(1).unsigned_abs(),
                    shares => shares.unsigned_abs().div_ceil(tile.shares_a_cta.unsigned_abs()),
                },
                tile.num_threads().unsigned_abs(),
            ),
            shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
            tiles: u64::from(schedule.num_tiles.unsigned_abs()),
            tiles_at_once: u64::from(tile.ctas.unsigned_abs() * facts.num_sms),
        };
        let merge = parts::merge(MERGE_NAME, problem, (tile.cut(), at_once.queries, tile.stored), facts);
        let update = update::launch_before(UPDATE_NAME, problem, facts).map_err(refuse)?;
        let dims = problem.dims;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let keep_mask =
            problem.dropout.write_keep_mask.then(|| keep_mask(KEEP_MASK_NAME, &spec, rows, facts));
        let workspace = update::workspace(problem, tile.workspace(problem)).map_err(refuse)?;
        Ok(Choice {
            kernel: Self { tile, schedule },
            launches: Launches::new(update.into_iter().chain(keep_mask), main, merge),
            workspace,
            promises: Promises {
                deterministic: true,
                // Batch invariance: a row's key blocks begin at the sequence's first key and have a size given by
                // the head dimensions; blocks that only other rows see are skipped or add zeros. It does not hold
                // if a short query's keys may be split, since a long one's are not, unless parts have a fixed
                // number of keys.
                batch_invariant: (!is_split || tile.fixed_parts && !problem.walks_lists())
                    && (problem.walks_lists() || tile.block_n == invariant_block(problem, facts, options))
                    && (options.batch_invariant
                        || !problem.walks_lists()
                            && split::is_never_cut(problem, tile.block_n, facts.instructions.wgmma)),
                row_invariant: options.row_invariant
                    && !problem.walks_lists()
                    && (!is_split || tile.fixed_parts)
                    && tile.block_n == invariant_block(problem, facts, options),
                graph_capturable: true,
                accuracy: if tile.lazy_rescale_log2 == 0 { Accuracy::Exact } else { Accuracy::Fast },
                score_sums: facts.score_sums.of(problem.dtypes.qk),
            },
            details: vec![
                ("tile", format!("{} x {}, {} stages", tile.block_m, tile.block_n, tile.stages)),
                ("order", order_words(problem, &schedule, &tile)),
                ("schedule", schedule_words(&tile, problem.cache.dtype.is_some())),
            ],
        })
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        let Self { tile, .. } = self;
        // A tensor without rows may lie anywhere.
        let has_keys = problem.shape_k().seq > 0;
        let loads = |name| u64::from(sm80::bytes_at_a_time(problem, name, tile.copy_bytes).unsigned_abs());
        match operand {
            // With a rotary embedding, kernels read rotated queries from the workspace.
            Operand::Q if problem.cache.rotary.is_none() => loads("q"),
            Operand::K | Operand::SecondK | Operand::SecondV if tile.row_bytes > 0 && has_keys => 16,
            Operand::K if has_keys => loads("k"),
            Operand::V if has_keys => loads("v"),
            Operand::SecondK => loads("k"),
            Operand::SecondV => loads("v"),
            Operand::O if tile.vector_store && tile.split_keys == 0 => 16,
            _ => 1,
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let (Self { tile, schedule }, fwd) = (*self, steps.main());
        // SAFETY: the caller keeps the contract of `launch`; the plan's workspace was made for the same tile.
        let mut whole = unsafe { update::run(steps, call, tile.workspace(call.problem))? };
        if call.problem.cache.tree_mask {
            whole = tree_mask::without_upper_end(&whole);
        }
        let tree = tree_mask::bind(call.problem, call.args);
        let masks = mask_data_params(call.problem, &call.args.masks);
        let listed = TokenParams::of(call);
        let has_masks = !call.problem.masks.is_empty();
        let by_tma = tile.tma && tile.split_keys == 0;
        let maps = match by_tma {
            true => fwd.kept.of::<V::Driver>(call, None, || boxes(call.problem, &tile))?,
            false => Maps::UNREAD,
        };
        let in_parts = (tile.cut(), tile.rows_at_once(call.problem));
        let main = |params: &mut FwdParams, (first, count)| {
            let (mut rows, mut tree, mut masks) = (schedule.of_blocks(first, count), tree, masks);
            let mut listed = listed;
            // Kernels without a tree, masks or lists have one argument fewer; the driver reads as many as a kernel
            // declares.
            let last = match (by_tma, has_masks) {
                _ if call.problem.walks_lists() => listed.as_mut_ptr(),
                (true, _) => (&raw const maps).cast_mut().cast(),
                (false, true) => (&raw mut masks).cast(),
                (false, false) => (&raw mut tree).cast(),
            };
            let mut arguments = [(&raw mut *params).cast(), (&raw mut rows).cast(), last];
            // SAFETY: the kernel takes FwdParams, TileSchedule and, under a tree mask, TreeMask, under masks as data
            // MaskDataParams, over lists ListParams, over two caches TwoCachesParams, or, where TMA loads, Maps, which
            // were made for the same extents; `check_fwd` saw that the memory covers the problem.
            unsafe { fwd.launch(&mut arguments, call.stream) }
        };
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { parts::run(steps, call, whole, in_parts, main) }
    }
}

/// The tile for a problem, with some fields set. It equals that of `like`, the same problem with another cache layout.
///
/// # Errors
/// The field that the kernel does not take, and its number.
pub(crate) fn fit_like(
    like: &ValidFwd,
    problem: &ValidFwd,
    facts: &DeviceFacts,
    options: &PlanOptions,
    fields: &TileOptions,
) -> Result<Sm80Tile, Refusal> {
    let refuse = |reason: String| Refusal::new(sm80::NAME, reason);
    sm80::accepts(problem, facts.instructions.converts_fp8)?;
    sm80::refuse_full_lists_beside_code(problem)?;
    if options.row_invariant && facts.instructions.wgmma && problem.layout.v == VLayout::ColMajor {
        return Err(refuse(
            "row_invariant beside a column-major V: its blocks of keys are other than sm90's".to_owned(),
        ));
    }
    if options.row_invariant {
        refuse_unlike_rows(problem, sm80::NAME)?;
    }
    if options.row_invariant && !problem.masks.is_empty() {
        return Err(refuse(
            "row_invariant: masks as data are asked for whole sequences, whose keys other calls have in parts"
                .to_owned(),
        ));
    }
    let mut own = own_tile(like, facts, options);
    // A tile of one token has few rows: several tokens' starts from another.
    if let Some((name, value)) = fields.iter().find(|(name, _)| *name == "unites") {
        let mut asked = own;
        asked.set(name, value).map_err(refuse)?;
        if asked.unites {
            own = sm80::united_tile(like, room(facts)).map_err(refuse)?;
        }
    }
    if like.strides != problem.strides || like.layout.kv != problem.layout.kv {
        let copies = own_tile(problem, facts, options);
        (own.copy_bytes, own.vector_store) = (copies.copy_bytes, copies.vector_store);
        own.tma &= copies.tma;
    }
    if options.accuracy == Accuracy::Exact {
        own.lazy_rescale_log2 = 0;
    }
    if options.batch_invariant && (problem.masks.is_empty() || problem.walks_lists()) {
        own.make_batch_invariant(problem, room(facts), invariant_block(problem, facts, options));
    }
    fitted(own, fields, problem, facts).map_err(refuse)
}

/// Keys of a block in every call whose bits must not depend on the batch: those of the spec's table, or those of
/// `sm90`'s blocks where that kernel may compute other calls with the same rows.
fn invariant_block(problem: &ValidFwd, facts: &DeviceFacts, options: &PlanOptions) -> i32 {
    let shared = if options.row_invariant { row_order::shared_block(problem, facts) } else { None };
    shared.unwrap_or_else(|| sm80::default_tile(&FwdSpec::of(problem), room(facts)).block_n)
}

/// Spec of the main kernel. With dropout the kernel reads a keep mask that another launch writes.
fn spec_of(problem: &ValidFwd, options: &PlanOptions, tile: &Sm80Tile) -> FwdSpec {
    let spec = FwdSpec { write_keep_mask: false, ..FwdSpec::of(problem) };
    // With masks as data the spec says that keys are hidden, as a band would, so that the kernel handles NaN in
    // hidden rows of V.
    if tile.unites {
        return row_order::under_a_mask(spec);
    }
    if problem.walks_lists() {
        return lists::spec(spec);
    }
    if !problem.masks.is_empty() || options.row_invariant { row_order::under_a_mask(spec) } else { spec }
}

/// Lanes of a warp.
const WARP_LANES: i32 = 32;

/// The tile with some fields set, if it fits the problem and the device.
///
/// # Errors
/// A text that names the fields and numbers that do not go together.
fn fitted(
    mut tile: Sm80Tile,
    fields: &TileOptions,
    problem: &ValidFwd,
    facts: &DeviceFacts,
) -> Result<Sm80Tile, String> {
    fields.iter().try_for_each(|(key, value)| tile.set(key, value))?;
    if tile.unites {
        lists::blocks_of_union(problem, tile.block_m)?;
        let rows = tile.block_m * tile.value_parts / tile.warps.max(1);
        if rows > WARP_LANES {
            return Err(format!(
                "unites=1 beside block_m={} and warps={}: {rows} rows a warp, more than its {WARP_LANES} lanes, of \
                 which each follows a row's list",
                tile.block_m, tile.warps
            ));
        }
    }
    tile.place_blocks(problem);
    tile.converts_fp8 =
        facts.instructions.converts_fp8 && (problem.cache.dtype.is_some() || tile.row_bytes > 0);
    tile.launches_merge = tile.split_keys > 0 && facts.instructions.tma;
    tile.check()?;
    tile.check_loads(problem)?;
    if problem.walks_lists() {
        let is_cut = tile.split_keys > 0;
        if tile.fixed_parts != is_cut && fields.iter().any(|(key, _)| *key == "fixed_parts") {
            return Err(format!(
                "fixed_parts={} beside lists of keys: parts of a list are fixed",
                tile.fixed_parts
            ));
        }
        tile.fixed_parts = is_cut;
        if tile.unites && is_cut {
            return Err(format!(
                "split_keys={} beside unites=1: a tile walks all of its union",
                tile.split_keys
            ));
        }
        let alone =
            [("shares", tile.shares, 0), ("pack_gqa", tile.pack_gqa.into(), 1), ("tma", tile.tma.into(), 0)];
        for (field, value, wanted) in alone {
            if value != wanted {
                return Err(format!(
                    "{field}={value} beside lists of keys: a tile has one token's heads, {field}={wanted}"
                ));
            }
        }
    }
    if !problem.masks.is_empty() && !problem.walks_lists() {
        for (field, value) in [
            ("split_keys", tile.split_keys),
            ("shares", tile.shares),
            ("pack_gqa", tile.pack_gqa.into()),
            ("tma", tile.tma.into()),
        ] {
            if value != 0 {
                return Err(format!(
                    "{field}={value} beside masks as data, which are asked for whole sequences by head"
                ));
            }
        }
    }
    facts.needs(!tile.tma || facts.instructions.tma, "TMA")?;
    split::check(problem, tile.cut())?;
    facts.has_room_for(&tile, tile.smem_bytes(&FwdSpec::of(problem)), 1)?;
    Ok(tile)
}

pub(crate) fn room(facts: &DeviceFacts) -> Room {
    Room { smem_bytes: i32::try_from(facts.smem_bytes).unwrap_or(i32::MAX), num_sms: facts.num_sms }
}

/// Whether K and V should be loaded by TMA if possible: on devices whose tensor cores have only mma.sync (GeForce).
/// Hopper and Blackwell have kernels of their own, and this kernel serves what those refuse.
fn prefers_tma(facts: &DeviceFacts) -> bool {
    let has = facts.instructions;
    has.tma && !has.wgmma && !has.tcgen05
}

/// The table's tile, with K and V loaded by TMA if that is better: for unsplit keys, and not for parts of a
/// batch-invariant plan.
fn own_tile(problem: &ValidFwd, facts: &DeviceFacts, options: &PlanOptions) -> Sm80Tile {
    let tile = sm80::choose_tile(problem, room(facts));
    let has_parts =
        options.batch_invariant && split::fixed_keys(problem, invariant_block(problem, facts, options)) > 0;
    if prefers_tma(facts) && problem.masks.is_empty() && !problem.walks_lists() && !has_parts {
        tile.by_tma(problem, room(facts)).unwrap_or(tile)
    } else {
        tile
    }
}

/// Boxes of the tensor maps. The map of Q is not read.
fn boxes(problem: &ValidFwd, tile: &Sm80Tile) -> Boxes {
    let spec = FwdSpec::of(problem);
    let [k, v] = sm80::boxes(&spec, tile);
    Boxes { q: [k[0], 1, 1, 1, 1], k, v, bias: None, prepared_v: None, turned_q: None }
}

/// Checks that the device has the instructions that the kernels use.
///
/// # Errors
/// The architecture, and what it lacks.
pub(crate) fn needs(facts: &DeviceFacts) -> Result<(), String> {
    facts.needs(facts.instructions.mma_sync, "cp.async with mma.sync of bf16")
}

fn order_words(problem: &ValidFwd, schedule: &TileSchedule, tile: &Sm80Tile) -> String {
    match problem.lists {
        _ if problem.second.is_some() => {
            let keys = problem.most_walked_keys();
            format!("a CTA a tile, tiles of a token side by side, walks {keys} keys of two caches")
        }
        Some(lists) if tile.unites => {
            let tokens = tile.block_m.unsigned_abs().div_euclid(problem.gqa_ratio().max(1));
            format!(
                "a CTA a tile of {tokens} tokens, walks the union of their lists of {} entries",
                lists.topk
            )
        }
        Some(lists) => format!("a CTA a tile, tiles of a token side by side, gathers {} entries", lists.topk),
        None if problem.walks_lists() => {
            format!("a CTA a tile, tiles of a token side by side, walks {} keys", problem.most_walked_keys())
        }
        None => format!("a CTA a tile, L2 groups of {} heads", schedule.heads_per_l2_group),
    }
}

fn schedule_words(tile: &Sm80Tile, widens: bool) -> String {
    let mut words = vec![format!("{} warps, {} CTAs a multiprocessor", tile.warps, tile.ctas)];
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.extend(tile.pack_gqa.then(|| "query heads packed".to_owned()));
    words.extend(tile.tma.then(|| "loads by TMA".to_owned()));
    words.extend((tile.copy_bytes < 16).then(|| format!("loads by copies of {} bytes", tile.copy_bytes)));
    words.extend(widens.then(|| format!("K and V widened from {}", tile.stored)));
    words.extend(
        (tile.row_bytes > 0).then(|| format!("K and V widened from rows of {} bytes", tile.row_bytes)),
    );
    words.extend(parts::words(tile.cut()));
    words.join(", ")
}
