//! The recipe for wide heads and latent attention on Hopper: supported problems, tile, launches.

use fmha_core::abi::FwdParams;
use fmha_core::error::{Refusal, Result};
use fmha_core::fields::knob_values;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, DevSlice, PlanOptions, Promises, Shape, Strides, ValidFwd};
use fmha_gpu::{About, Choice, Grid, Kernel, Launch, Launches, Operand, Stage, Steps, Tiles, update};

use crate::lists::{self, TokenParams};
use crate::nvidia::{DeviceFacts, FwdCall, Nvidia};
use crate::operands::{ALIGN, refuse_row_invariant};
use crate::sm90::recipe::needs;
use crate::sm90_mla::{self as text, MlaSchedule, Sm90MlaTile};
use crate::split::{self, RowsAtOnce, launch as parts};
use crate::tma::{EncodeTensorMap, TensorMap, TensorMapFacts};

/// The kernel with its tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm90Mla {
    tile: Sm90MlaTile,
    schedule: MlaSchedule,
}

/// The merging kernel's name in plans.
const MERGE_NAME: &str = "sm90_mla_merge";
/// The name of the kernel that updates the cache.
const UPDATE_NAME: &str = "sm90_mla_update";

impl<V: Nvidia> Kernel<ValidFwd, V> for Sm90Mla {
    type Tile = Sm90MlaTile;

    fn about() -> About<ValidFwd> {
        let tiles = Tiles::of_forward::<Sm90MlaTile>(text::NAME, &[text::HEADER]);
        About {
            tiles: Some(tiles),
            takes_lists: true,
            takes_second: true,
            reads_cache_rows: true,
            reads_masks: true,
            ..About::new(text::NAME)
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
        Ok(vec![knob_values(&text::choose_tile(problem, facts.num_sms))])
    }

    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Sm90MlaTile, Refusal> {
        let refuse = |reason: String| Refusal::new(text::NAME, reason);
        text::accepts(problem)?;
        refuse_row_invariant(options, text::NAME)?;
        if options.kernel.is_none() && options.tile.is_empty() {
            text::leave_narrow(problem).map_err(refuse)?;
        }
        let is_named = |name: &str| fields.iter().any(|(key, _)| key == name);
        // A caller who sets another way to split keys does not want shares.
        let names_parts = ["split_keys", "cluster", "fold_parts"].into_iter().any(is_named);
        let names_none = fields.iter().any(|(key, value)| key == "shares" && value == "0");
        let is_unshared = names_parts && !is_named("shares") || names_none || options.batch_invariant;
        let mut own = if is_unshared {
            text::choose_tile_in_parts(problem, facts.num_sms)
        } else {
            text::choose_tile(problem, facts.num_sms)
        };
        if options.accuracy == Accuracy::Exact {
            own.lazy_rescale_log2 = 0;
        }
        // The number of parts depends on the batch.
        if options.batch_invariant {
            own.split_keys = 0;
        }
        let fitted = |mut tile: Sm90MlaTile| {
            fields.iter().try_for_each(|(key, value)| tile.set(key, value))?;
            // Folding is turned off, unless the caller has set it, if there are no parts to fold.
            if (tile.split_keys == 0 || tile.cluster > 1 || tile.shares > 0) && !is_named("fold_parts") {
                tile.fold_parts = 1;
            }
            tile.check(problem)?;
            facts.has_room_for(&tile, tile.smem_bytes(&FwdSpec::of(problem)), tile.ctas_of_cluster())?;
            Ok(tile)
        };
        fitted(own).map_err(refuse)
    }

    fn plan(
        tile: Sm90MlaTile,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(text::NAME, reason);
        let spec = spec_of(problem);
        let is_split = tile.split_keys > 0;
        let schedule = tile.schedule(problem).map_err(refuse)?;
        // Parts are f32 in the workspace, which begin on 16 bytes.
        let (own_spec, own_tile) = if is_split {
            (split::part_spec(&spec), Sm90MlaTile { vector_store: true, ..tile })
        } else {
            (spec, tile)
        };
        let ctas = own_tile.grid(&own_spec, schedule.num_tiles, facts.num_sms);
        let main = Launch {
            stage: Stage::Main,
            kernel: text::NAME,
            source: text::fwd(&own_spec, &own_tile),
            grid: Grid::new(ctas.max(1), text::NUM_THREADS),
            shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
            tiles: u64::from(schedule.num_tiles.unsigned_abs()),
            tiles_at_once: facts.num_sms.into(),
        };
        let merge =
            parts::merge(MERGE_NAME, problem, (tile.cut(), problem.dims.seqlen_q, tile.stored), facts);
        let update = update::launch_before(UPDATE_NAME, problem, facts).map_err(refuse)?;
        let workspace = update::workspace(problem, tile.workspace(problem)).map_err(refuse)?;
        Ok(Choice {
            kernel: Self { tile, schedule },
            launches: Launches::new(update, main, merge),
            workspace,
            promises: Promises {
                deterministic: true,
                // Batch invariance: a row's blocks begin at multiples of 64 keys, and blocks that only other rows
                // see add zeros; but how its keys are split depends on the rest of the call, and so does whether a
                // list is split.
                batch_invariant: !is_split && (!problem.walks_lists() || options.batch_invariant),
                row_invariant: false,
                graph_capturable: true,
                accuracy: if tile.lazy_rescale_log2 == 0 { Accuracy::Exact } else { Accuracy::Fast },
                score_sums: facts.score_sums.of(problem.dtypes.qk),
            },
            details: vec![
                ("tile", format!("64 x 64, {}", if tile.v_in_k { "2 stages" } else { "1 stage" })),
                ("order", order_words(problem, &tile, own_tile.walks_tiles(&own_spec))),
                ("schedule", schedule_words(&tile, &schedule)),
            ],
        })
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        let Self { tile, .. } = self;
        // A tensor without rows may lie anywhere.
        let has_keys = problem.shape_k().seq > 0;
        match operand {
            // With a rotary embedding, kernels read rotated queries from the workspace.
            Operand::Q if problem.cache.rotary.is_none() => ALIGN,
            Operand::K if has_keys => ALIGN,
            Operand::V if has_keys && !tile.v_in_k => ALIGN,
            Operand::SecondK | Operand::SecondV => ALIGN,
            Operand::O if tile.vector_store && tile.split_keys == 0 => ALIGN,
            _ => 1,
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let (Self { tile, schedule }, fwd) = (*self, steps.main());
        let maps = Maps::of::<V::Driver>(call, &tile)?;
        let listed = TokenParams::of(call);
        // SAFETY: the caller keeps the contract of `launch`; the plan's workspace was made for the same tile.
        let whole = unsafe { update::run(steps, call, tile.workspace(call.problem))? };
        let main = |params: &mut FwdParams, _| {
            let (mut schedule, mut listed) = (schedule, listed);
            // A kernel over all keys has one argument fewer; the driver reads as many as a kernel declares.
            let mut arguments = [
                (&raw mut *params).cast(),
                (&raw const maps).cast_mut().cast(),
                (&raw mut schedule).cast(),
                listed.as_mut_ptr(),
            ];
            // SAFETY: the kernel takes FwdParams, Maps, MlaSchedule and, over lists, ListParams, over two caches
            // TwoCachesParams; `check_fwd` saw that the memory covers the problem.
            unsafe { fwd.launch(&mut arguments, call.stream) }
        };
        let in_parts = (tile.cut(), RowsAtOnce::all(call.problem));
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { parts::run(steps, call, whole, in_parts, main) }
    }
}

/// A kernel argument: the tensor maps of K and V.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct Maps {
    pub(crate) k: TensorMap,
    pub(crate) v: TensorMap,
}

impl Maps {
    /// Tensor maps of a call whose K and V are loaded by copies: no kernel reads them.
    pub(crate) const UNREAD: Self = Self { k: TensorMap::UNREAD, v: TensorMap::UNREAD };

    /// Tensor maps of a call. No kernel reads them if threads copy, and none reads V's if V lies in K.
    ///
    /// # Errors
    /// What the driver refuses.
    fn of<D: EncodeTensorMap>(call: &FwdCall<'_>, tile: &Sm90MlaTile) -> Result<Self> {
        if !tile.by_tma {
            return Ok(Self::UNREAD);
        }
        let k = map_of_k::<D>(call, text::KEYS)?;
        let v = if tile.v_in_k { TensorMap::UNREAD } else { map_of_v::<D>(call, text::KEYS)? };
        Ok(Self { k, v })
    }

    /// Maps of boxes of so many keys, of K and of V, which may lie in K.
    ///
    /// # Errors
    /// What the driver refuses.
    pub(crate) fn both<D: EncodeTensorMap>(call: &FwdCall<'_>, keys: u32) -> Result<Self> {
        Ok(Self { k: map_of_k::<D>(call, keys)?, v: map_of_v::<D>(call, keys)? })
    }
}

/// Tensor map of boxes with 64 columns and `rows` rows.
fn map_of_rows<D: EncodeTensorMap>(
    call: &FwdCall<'_>,
    (name, slice): (&'static str, DevSlice<'_>),
    (shape, strides): (Shape, Strides),
    keys: u32,
) -> Result<TensorMap> {
    let addresses = [slice.as_ptr() as u64, call.args.q.as_ptr() as u64];
    let box_dims = [64, keys.cast_signed(), 1, 1];
    TensorMapFacts::of_rows((name, call.problem.dtypes.qk), addresses, shape, strides, box_dims).encode::<D>()
}
fn map_of_k<D: EncodeTensorMap>(call: &FwdCall<'_>, keys: u32) -> Result<TensorMap> {
    let shape = call.problem.extents(call.args.seq.totals).k;
    map_of_rows::<D>(call, ("k", call.args.k_slice()), (shape, call.problem.strides.k), keys)
}
fn map_of_v<D: EncodeTensorMap>(call: &FwdCall<'_>, keys: u32) -> Result<TensorMap> {
    let shape = call.problem.extents(call.args.seq.totals).v;
    map_of_rows::<D>(call, ("v", call.args.v_slice()), (shape, call.problem.strides.v), keys)
}

/// Spec of the main kernel.
fn spec_of(problem: &ValidFwd) -> FwdSpec {
    let spec = FwdSpec::of(problem);
    if problem.walks_lists() { lists::spec(spec) } else { spec }
}

fn order_words(problem: &ValidFwd, tile: &Sm90MlaTile, walks: bool) -> String {
    let walk = if walks { "CTAs walk tiles" } else { "a CTA a tile" };
    match problem.lists {
        _ if problem.second.is_some() => {
            let keys = problem.most_walked_keys();
            format!("{walk}, those of a token side by side, walks {keys} keys of two caches")
        }
        Some(lists) => {
            format!("{walk}, those of a token side by side, gathers {} entries", lists.topk)
        }
        None if problem.walks_lists() => {
            format!("{walk}, those of a token side by side, walks {} keys", problem.most_walked_keys())
        }
        None if tile.shares > 0 => "a CTA a share, row blocks of a sequence side by side".to_owned(),
        None => "a CTA a tile, row blocks of a part side by side".to_owned(),
    }
}

fn schedule_words(tile: &Sm90MlaTile, schedule: &MlaSchedule) -> String {
    let of_v = if tile.v_in_k { "K read once for its values too" } else { "K and V read by themselves" };
    let mut words = vec![format!("{of_v}, 2 consumer warpgroups")];
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.push(if tile.by_tma {
        format!("TMA of {} keys at a time", text::KEYS)
    } else if tile.stored.is_fp8() {
        format!("loads of 16 bytes, widened from {}", tile.stored)
    } else {
        "loads by copies of 16 bytes".to_owned()
    });
    words.extend((tile.cluster > 1).then(|| format!("clusters of {} row blocks", tile.cluster)));
    words.extend(if tile.shares > 0 {
        parts::words(tile.cut())
    } else {
        (tile.split_keys > 0)
            .then(|| format!("keys in {} parts of {}, merged", schedule.num_parts, tile.cut().keys))
    });
    words.extend((tile.fold_parts > 1).then(|| format!("folded by clusters of {} CTAs", tile.fold_parts)));
    words.join(", ")
}
