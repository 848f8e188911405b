//! The Hopper kernel: which problems it takes, its tile, its tensor maps.

use fmha_core::error::{ProblemError, Refusal, Result};
use fmha_core::fields::knob_values;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::{TileClass, TileOptions};
use fmha_core::{Accuracy, PlanOptions, Promises, VLayout, ValidFwd, Workspace, bind};
use fmha_kernels_cuda::schedule::TileSchedule;
use fmha_kernels_cuda::sm90::{self, Sm90Tile};

use super::maps::{Boxes, Maps};
use super::tile::settle;
use super::{Choice, DeviceFacts, FwdCall, FwdKernel, FwdRecipe, Launch, Named};
use crate::driver::Grid;
use crate::steps::{Step, exactly};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sm90 {
    chosen: Option<(Sm90Tile, TileSchedule)>,
}

/// What TMA and 16-byte stores ask of addresses.
const ALIGN: u64 = 16;

impl Named for Sm90 {
    fn name(&self) -> &'static str {
        "sm90"
    }
}

impl FwdRecipe for Sm90 {
    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<FwdKernel>, Refusal> {
        let refuse = |reason: String| Refusal::new("sm90", reason);
        if facts.arch != "sm_90a" {
            return Err(refuse(format!("the device is {}, not sm_90a", facts.arch)));
        }
        sm90::accepts(problem)?;
        let spec = FwdSpec::of(problem);
        let mut own = sm90::choose_tile(problem);
        if options.accuracy == Accuracy::Exact {
            (own.lazy_rescale_log2, own.skip_row_max) = (0, false);
        }
        if options.batch_invariant {
            own.make_batch_invariant(&spec);
        }
        let set = |fields: &TileOptions| {
            let mut tile = own;
            fields.iter().try_for_each(|(key, value)| tile.set(key, value))?;
            tile.check(&spec, problem.gqa_ratio())?;
            if let (Some((axis, stride)), true) = (sm90::odd_bias_stride(problem), tile.bias_stages > 0) {
                return Err(format!(
                    "tile bias_stages={}: bias.{axis} stride {stride} is not a positive multiple of 8 below 2^39, as TMA needs",
                    tile.bias_stages
                ));
            }
            facts.has_shared(&tile, tile.smem_bytes(&spec))?;
            Ok(tile)
        };
        // Tiles are measured as a plan without options has them.
        let as_measured = options.accuracy == Accuracy::Fast && !options.batch_invariant;
        let tuned = facts.tuned.get(sm90::NAME, &TileClass::of_fwd(problem)).filter(|_| as_measured);
        let (tile, tile_from) = settle(&options.tile, tuned, set).map_err(refuse)?;
        let smem_bytes = tile.smem_bytes(&spec).unsigned_abs();
        let schedule = tile.schedule(problem).map_err(refuse)?;
        let grid = Grid {
            dependent: tile.dependent_launch,
            ..Grid::new(tile.grid(&schedule, facts.num_sms), tile.num_threads().unsigned_abs())
        };
        Ok(Choice {
            kernel: Sm90 { chosen: Some((tile, schedule)) }.into(),
            launches: vec![Launch {
                kernel: self.name(),
                source: sm90::fwd(&spec, &tile),
                grid,
                smem_bytes,
                tiles: u64::from(schedule.num_tiles.unsigned_abs()),
                // One CTA an SM: two would not find the registers.
                tiles_at_once: facts.num_sms.into(),
            }],
            // The tile counter.
            workspace: Workspace::zeroed(tile.counter_bytes(&schedule, facts.num_sms)),
            promises: Promises {
                deterministic: true,
                batch_invariant: tile.is_batch_invariant(&spec),
                graph_capturable: true,
                accuracy: accuracy(&tile),
                score_sums: facts.score_sums.of(problem.dtype_qk),
            },
            details: vec![
                ("tile", format!("{} x {}, {} stages", tile.block_m, tile.block_n, tile.stages)),
                tile_from.detail(),
                ("order", format!("{:?}, L2 groups of {} heads", tile.order, schedule.heads_per_l2_group)),
                ("schedule", schedule_words(&tile)),
            ],
        })
    }

    fn takes_addresses(&self, call: &FwdCall<'_>) -> Result<(), ProblemError> {
        let tile = self.chosen.map(|(tile, _)| tile);
        let stores_vectors = tile.is_some_and(|tile| tile.vector_store);
        let brings_bias = tile.is_some_and(|tile| tile.bias_stages > 0);
        let loads = match tile {
            Some(tile) if tile.copy_bytes > 0 => u64::from(tile.copy_bytes.unsigned_abs()),
            _ => ALIGN,
        };
        let args = call.args;
        // A tensor without rows may lie anywhere.
        let has_keys = call.problem.shape_k().seq > 0;
        for (name, address, align, matters) in [
            ("q", args.q.as_ptr() as u64, loads, true),
            ("k", args.k_slice().as_ptr() as u64, loads, has_keys),
            ("v", args.v_slice().as_ptr() as u64, loads, has_keys),
            ("o", args.o.as_mut_ptr() as u64, ALIGN, stores_vectors),
            ("bias", args.score.bias.as_ref().map_or(0, |bias| bias.as_ptr() as u64), ALIGN, brings_bias),
        ] {
            if matters && address & (align - 1) != 0 {
                return Err(ProblemError::new(
                    name,
                    format!(
                        "{name} starts at {address:#x}, which is no multiple of the {align} bytes that kernel sm90 needs"
                    ),
                ));
            }
        }
        Ok(())
    }

    fn launch(&self, steps: &[Step], call: &FwdCall<'_>) -> Result<()> {
        let [fwd] = exactly(steps)?;
        let Some((tile, mut schedule)) = self.chosen else {
            return Err(ProblemError::new("plan", "plan: kernel sm90 has 0 tiles chosen").into());
        };
        let mut maps = match tile.copy_bytes {
            0 => fwd.maps.of(call, &boxes(call.problem, &tile))?,
            _ => Maps::UNREAD,
        };
        let mut params = bind::fwd_params(call.problem, call.args);
        let mut arguments = [(&raw mut params).cast(), (&raw mut maps).cast(), (&raw mut schedule).cast()];
        // SAFETY: the kernel takes FwdParams, Maps and TileSchedule; `check_fwd` saw that the memory
        // covers the problem, and the maps were made for the same extents.
        unsafe { fwd.launch(&mut arguments, call.stream) }
    }
}

/// Exact where every block's maxima are taken, and every row is rescaled to its own.
fn accuracy(tile: &Sm90Tile) -> Accuracy {
    let exact = tile.lazy_rescale_log2 == 0 && !tile.skip_row_max;
    if exact { Accuracy::Exact } else { Accuracy::Fast }
}

fn schedule_words(tile: &Sm90Tile) -> String {
    let mut words = vec![format!("{} consumer warpgroups", tile.num_consumers())];
    words.extend(tile.ping_pong.then(|| "ping-pong".to_owned()));
    words.extend(tile.lookahead.then(|| "next tile's first product early".to_owned()));
    words.extend(tile.split_q.then(|| "Q in pieces".to_owned()));
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.extend(tile.skip_row_max.then(|| {
        format!(
            "no row-max reduction inside the mask, unless scores lie 2^{} apart or rows are raised (votes from {} blocks on)",
            tile.exact_max_spread_log2, tile.vote_after
        )
    }));
    words.extend(tile.pack_gqa.then(|| "query heads packed".to_owned()));
    words.extend((tile.copy_bytes > 0).then(|| format!("loads by copies of {} bytes", tile.copy_bytes)));
    words.extend((!tile.warp_specialised).then(|| "no load role".to_owned()));
    let of = if tile.cluster_heads { "heads" } else { "query blocks" };
    words.extend((tile.cluster > 1).then(|| format!("clusters of {} {of}", tile.cluster)));
    words.extend(tile.q_in_registers.then(|| "Q in registers".to_owned()));
    words.extend(tile.f16_scores.then(|| "scores summed in f16".to_owned()));
    words.extend(tile.f16_output.then(|| "O summed in f16".to_owned()));
    words.extend(tile.f16_values.then(|| "V brought to f16, P V summed in f32".to_owned()));
    words.extend(tile.flush.then(|| {
        let parts = match tile.output_columns {
            0 => String::new(),
            columns => format!(", {columns} columns at a time"),
        };
        format!("P V summed in 14 bits and added to f32 after each {} keys{parts}", tile.block_n)
    }));
    words.extend((tile.bias_stages > 0).then(|| format!("bias by TMA, {} blocks", tile.bias_stages)));
    words.extend(tile.dependent_launch.then(|| "starts while the grid before ends".to_owned()));
    words.join(", ")
}

/// The knobs of the tile that the table gives, as [`Sm90Tile::set`] takes them.
///
/// # Errors
/// Why the kernel does not take the problem.
pub(crate) fn own_tile(problem: &ValidFwd, facts: &DeviceFacts) -> Result<TileOptions, Refusal> {
    Sm90::default().choose(problem, facts, &PlanOptions::default())?;
    Ok(knob_values(&sm90::choose_tile(problem)))
}

/// What TMA brings at once.
pub(super) fn boxes(problem: &ValidFwd, tile: &Sm90Tile) -> Boxes {
    let heads = if tile.pack_gqa { problem.gqa_ratio() as i32 } else { 1 };
    let (q, v) = (problem.dims.head_dim_qk as i32, problem.dims.head_dim_v as i32);
    Boxes {
        q: [Sm90Tile::box_dim(q, problem.dtype_qk), heads, tile.q_rows() / heads, 1, 1],
        k: tile.kv_box(q, problem.dtype_qk, false),
        v: tile.kv_box(v, problem.dtype_v, problem.v_layout == VLayout::ColMajor),
        bias: (tile.bias_stages > 0).then(|| tile.bias_box()),
    }
}
