//! Wide heads and latent attention on Blackwell: which problems it takes, its tile, its launches.

use fmha_core::abi::FwdParams;
use fmha_core::error::{Refusal, Result};
use fmha_core::fields::knob_values;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, ScoreSums, ValidFwd};
use fmha_gpu::{About, Choice, Grid, Kernel, Launch, Launches, Operand, Stage, Steps, Tiles, update};

use crate::lists::{self, TokenParams};
use crate::nvidia::{DeviceFacts, FwdCall, Nvidia};
use crate::operands::{ALIGN, refuse_row_invariant};
use crate::sm90_mla::MlaSchedule;
use crate::sm90_mla::recipe::Maps;
use crate::sm100::modelled;
use crate::sm100::recipe::needs;
use crate::sm100_mla::gathered::{self, GatheredRows};
use crate::sm100_mla::{self as text, Sm100MlaTile, units};
use crate::split::{self, RowsAtOnce, launch as parts};

/// The kernel with its tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm100Mla {
    tile: Sm100MlaTile,
    schedule: MlaSchedule,
}

/// The merging kernel's name in plans.
const MERGE_NAME: &str = "sm100_mla_merge";
/// The name of the kernel that updates the cache.
const UPDATE_NAME: &str = "sm100_mla_update";

impl<V: Nvidia> Kernel<ValidFwd, V> for Sm100Mla {
    type Tile = Sm100MlaTile;

    fn about() -> About<ValidFwd> {
        let tiles = Tiles::of_forward::<Sm100MlaTile>(text::NAME, &[text::HEADER]);
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
    ) -> Result<Sm100MlaTile, Refusal> {
        fit_like(problem, problem, facts, options, fields)
    }

    fn plan(
        tile: Sm100MlaTile,
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
            (split::part_spec(&spec), Sm100MlaTile { vector_store: true, ..tile })
        } else {
            (spec, tile)
        };
        let tiles = schedule.num_tiles.unsigned_abs();
        let main = Launch {
            stage: Stage::Main,
            kernel: text::NAME,
            source: text::fwd(&own_spec, &own_tile),
            grid: Grid::new(tiles.max(1) * text::CTAS, text::NUM_THREADS),
            shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
            tiles: u64::from(tiles),
            // One CTA an SM: it takes all of tensor memory.
            tiles_at_once: u64::from(facts.num_sms / text::CTAS),
        };
        let cut = (tile.cut(), problem.dims.seqlen_q, tile.stored);
        let merge = parts::merge(MERGE_NAME, problem, cut, facts);
        let update = update::launch_before(UPDATE_NAME, problem, facts).map_err(refuse)?;
        let workspace = update::workspace(problem, tile.workspace(problem)).map_err(refuse)?;
        Ok(Choice {
            kernel: Self { tile, schedule },
            launches: Launches::new(update, main, merge),
            workspace,
            promises: Promises {
                deterministic: true,
                // A row's blocks begin at multiples of 128 keys, and those that only other rows see add zeros; but how
                // its keys are split depends on what else is in the call, and so does whether a list is split.
                batch_invariant: !is_split && (!tile.listed || options.batch_invariant),
                row_invariant: false,
                graph_capturable: true,
                accuracy: if tile.lazy_rescale_log2 == 0 { Accuracy::Exact } else { Accuracy::Fast },
                score_sums: ScoreSums::F32,
            },
            details: [
                ("tile", format!("{} x {} in a pair of CTAs", text::ROWS, text::KEYS)),
                ("order", order_words(problem)),
                ("schedule", schedule_words(&tile, &schedule)),
                (
                    "tensor memory",
                    format!("{} of {} columns", tile.tmem_columns(&spec), crate::sm100::TMEM_COLUMNS),
                ),
            ]
            .into_iter()
            .chain(modelled::details(
                &units::forward(&spec, &tile, &facts.arch),
                units::walk(problem, &tile, &schedule, facts),
                units::flops(problem),
            ))
            .collect(),
        })
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        let Self { tile, .. } = self;
        // A tensor without rows may lie anywhere.
        let has_keys = problem.shape_k().seq > 0;
        match operand {
            // Turned queries lie in the workspace.
            Operand::Q if problem.cache.rotary.is_none() => ALIGN,
            Operand::K | Operand::V if has_keys => ALIGN,
            Operand::SecondK | Operand::SecondV => ALIGN,
            Operand::O if tile.vector_store && tile.split_keys == 0 => ALIGN,
            _ => 1,
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let (Self { tile, schedule }, fwd) = (*self, steps.main());
        let (maps, gathered) = match (tile.by_tma, tile.listed) {
            (false, _) => (Maps::UNREAD, GatheredRows::UNREAD),
            (true, false) => {
                (Maps::both::<V::Driver>(call, tile.box_keys.unsigned_abs())?, GatheredRows::UNREAD)
            }
            (true, true) => gathered::maps::<V::Driver>(call)?,
        };
        let listed = TokenParams::of(call);
        // SAFETY: the caller keeps the contract of `launch`; the plan's workspace was made for the same tile.
        let whole = unsafe { update::run(steps, call, tile.workspace(call.problem))? };
        let main = |params: &mut FwdParams, _| {
            let (mut schedule, mut listed, mut gathered) = (schedule, listed, gathered);
            // A kernel over all keys has two arguments fewer, one over two caches one; the driver reads as many as a
            // kernel declares.
            let mut arguments = [
                (&raw mut *params).cast(),
                (&raw const maps).cast_mut().cast(),
                (&raw mut schedule).cast(),
                listed.as_mut_ptr(),
                (&raw mut gathered).cast(),
            ];
            // SAFETY: the kernel takes FwdParams, Maps and MlaSchedule, and over lists ListParams and GatheredRows,
            // over two caches TwoCachesParams; `check_fwd` saw that the memory covers the problem.
            unsafe { fwd.launch(&mut arguments, call.stream) }
        };
        let in_parts = (tile.cut(), RowsAtOnce::all(call.problem));
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
) -> Result<Sm100MlaTile, Refusal> {
    let refuse = |reason: String| Refusal::new(text::NAME, reason);
    text::accepts(problem)?;
    refuse_row_invariant(options, text::NAME)?;
    let own = text::choose_tile(problem, facts.num_sms);
    let mut tile = Sm100MlaTile { split_keys: text::choose_tile(like, facts.num_sms).split_keys, ..own };
    if options.accuracy == Accuracy::Exact {
        tile.lazy_rescale_log2 = 0;
    }
    // The number of parts depends on the batch.
    if options.batch_invariant {
        tile.split_keys = 0;
    }
    let fitted = |mut tile: Sm100MlaTile| {
        fields.iter().try_for_each(|(key, value)| tile.set(key, value))?;
        tile.check(problem)?;
        facts.has_room_for(&tile, tile.smem_bytes(&FwdSpec::of(problem)), text::CTAS as i32)?;
        Ok(tile)
    };
    fitted(tile).map_err(refuse)
}

/// Spec of the main kernel.
fn spec_of(problem: &ValidFwd) -> FwdSpec {
    let spec = FwdSpec::of(problem);
    if problem.walks_lists() { lists::spec(spec) } else { spec }
}

fn order_words(problem: &ValidFwd) -> String {
    match problem.lists {
        _ if problem.walks_caches() => {
            let keys = problem.most_walked_keys();
            format!("a pair a tile, those of a token side by side, walks {keys} keys of two caches")
        }
        Some(lists) => {
            format!("a pair a tile, those of a token side by side, gathers {} entries", lists.topk)
        }
        None => "a pair a tile, row blocks of a part side by side".to_owned(),
    }
}

fn schedule_words(tile: &Sm100MlaTile, schedule: &MlaSchedule) -> String {
    let mut words = vec!["a pair reads K and V once, scores a block ahead".to_owned()];
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.push(if tile.by_tma && tile.listed {
        "TMA gathers 4 rows at a time".to_owned()
    } else if tile.by_tma {
        format!("TMA of {} keys at a time", tile.box_keys)
    } else if tile.row_bytes > 0 {
        format!("loads of 16 bytes, widened from rows of {} bytes", tile.row_bytes)
    } else if tile.stored.is_fp8() {
        format!("loads of 16 bytes, widened from {}", tile.stored)
    } else {
        "loads by copies of 16 bytes".to_owned()
    });
    words.extend(
        (tile.split_keys > 0)
            .then(|| format!("keys in {} parts of {}, merged", schedule.num_parts, tile.split_keys)),
    );
    words.join(", ")
}
