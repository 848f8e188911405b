//! The Hopper kernel: which problems it takes, its tile, its tensor maps.

use fmha_core::abi::FwdParams;
use fmha_core::error::{ProblemError, Refusal, Result};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, PlanOptions, SeqMode, Shape, Strides, ValidFwd};
use fmha_kernels_cuda::sm90::{self, Sm90Schedule, Sm90Tile};

use super::{Call, Choice, DeviceFacts, Recipe};
use crate::driver::{Grid, Kernel as Loaded, TensorMap, TensorMapFacts};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sm90 {
    chosen: Option<(Sm90Tile, Sm90Schedule)>,
}

/// The kernel's second argument.
#[repr(C, align(128))]
struct Maps {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
}

/// What the copy engine and 16-byte stores ask of addresses.
const ALIGN: u64 = 16;

impl Recipe for Sm90 {
    fn name(&self) -> &'static str {
        "sm90"
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice, Refusal> {
        let refuse = |reason: String| Refusal::new("sm90", reason);
        if facts.arch != "sm_90a" {
            return Err(refuse(format!("the device is {}, not sm_90a", facts.arch)));
        }
        sm90::accepts(problem)?;
        let spec = FwdSpec::of(problem);
        let mut tile = sm90::choose_tile(problem);
        for (key, value) in &options.tile {
            set(&mut tile, key, value).map_err(refuse)?;
        }
        let smem_bytes = tile.smem_bytes(&spec).unsigned_abs();
        if smem_bytes > facts.smem_bytes {
            return Err(refuse(format!(
                "{tile:?} takes {smem_bytes} bytes of shared memory, {} are there",
                facts.smem_bytes
            )));
        }
        let schedule = tile.schedule(problem);
        let grid =
            Grid { ctas: tile.grid(&schedule, facts.num_sms), threads: tile.num_threads().unsigned_abs() };
        Ok(Choice {
            source: sm90::fwd(&spec, &tile),
            grid,
            smem_bytes,
            workspace_bytes: tile.workspace_bytes(),
            tiles: u64::from(schedule.num_tiles.unsigned_abs()),
            // One CTA an SM: two would not find the registers.
            tiles_at_once: facts.num_sms.into(),
            details: vec![
                ("tile", format!("{} x {}, {} stages", tile.block_m, tile.block_n, tile.stages)),
                ("order", format!("{:?}, {} heads a section", tile.order, schedule.heads_per_section)),
                ("schedule", schedule_words(&tile)),
            ],
            kernel: Sm90 { chosen: Some((tile, schedule)) }.into(),
        })
    }

    fn takes_addresses(&self, params: &FwdParams) -> Result<(), ProblemError> {
        let stores_vectors = self.chosen.is_some_and(|(tile, _)| tile.vector_store);
        for (name, view, matters) in [
            ("q", params.q, true),
            ("k", params.k, params.seqlen_k > 0),
            ("v", params.v, params.seqlen_k > 0),
            ("o", params.o, stores_vectors),
        ] {
            let address = view.data.0;
            if matters && !address.is_multiple_of(ALIGN) {
                return Err(ProblemError::new(
                    name,
                    format!(
                        "{name} starts at {address:#x}, which is no multiple of the {ALIGN} bytes that kernel sm90 needs"
                    ),
                ));
            }
        }
        Ok(())
    }

    fn launch(&self, loaded: &Loaded, call: &Call<'_>) -> Result<()> {
        let Some((tile, schedule)) = self.chosen else {
            return Err(ProblemError::new("plan", "plan: kernel sm90 has 0 tiles chosen").into());
        };
        let mut maps = maps(call, &tile)?;
        let (mut params, mut schedule) = (call.params, schedule);
        let mut arguments = [(&raw mut params).cast(), (&raw mut maps).cast(), (&raw mut schedule).cast()];
        // SAFETY: the kernel takes FwdParams, Maps and Sm90Schedule; `check_fwd` saw that the memory
        // covers the problem, and the maps were made for the same extents.
        unsafe { loaded.launch(call.grid, &mut arguments, call.stream) }
    }
}

fn schedule_words(tile: &Sm90Tile) -> String {
    let mut words = vec![format!("{} consumer warpgroups", tile.num_consumers())];
    words.extend(tile.ping_pong.then(|| "ping-pong".to_owned()));
    words.extend(tile.lookahead.then(|| "next tile's first product early".to_owned()));
    words
        .extend((tile.lazy_rescale_log2 > 0).then(|| format!("rescale beyond 2^{}", tile.lazy_rescale_log2)));
    words.extend(tile.pack_gqa.then(|| "query heads packed".to_owned()));
    words.join(", ")
}

/// Sets one field of the tile from the command's words.
fn set(tile: &mut Sm90Tile, key: &str, value: &str) -> Result<(), String> {
    let number = || value.parse::<i32>().map_err(|_| format!("tile {key}={value} is no whole number"));
    let flag = || match value {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(format!("tile {key}={value} is neither 0 nor 1")),
    };
    match key {
        "block_m" => {
            tile.block_m = number()?;
            if ![64, 128, 192].contains(&tile.block_m) {
                return Err(format!("tile block_m={value} is not 64, 128 or 192"));
            }
        }
        "block_n" => {
            tile.block_n = number()?;
            if tile.block_n % 16 != 0 || !(16..=256).contains(&tile.block_n) {
                return Err(format!("tile block_n={value} is no multiple of 16 in 16..=256"));
            }
        }
        "stages" => {
            tile.stages = number()?;
            if !(1..=8).contains(&tile.stages) {
                return Err(format!("tile stages={value} is not in 1..=8"));
            }
        }
        "order" => {
            tile.order = match value {
                "single" => sm90::TileOrder::Single,
                "static" => sm90::TileOrder::Static,
                "dynamic" => sm90::TileOrder::Dynamic,
                _ => return Err(format!("tile order={value} is not single, static or dynamic")),
            }
        }
        "ping_pong" => tile.ping_pong = flag()?,
        "lookahead" => tile.lookahead = flag()?,
        "lazy_rescale_log2" => tile.lazy_rescale_log2 = number()?,
        "wait_anchor" => tile.wait_anchor = number()?,
        "exp2_polynomial_every" => tile.exp2_polynomial_every = number()?,
        "pack_gqa" => tile.pack_gqa = flag()?,
        _ => {
            return Err(format!(
                "tile {key}={value}: there is no such field (known: block_m, block_n, stages, order, ping_pong, \
                 lookahead, lazy_rescale_log2, wait_anchor, exp2_polynomial_every, pack_gqa)"
            ));
        }
    }
    Ok(())
}

/// The tensor maps: Q `(dim, head in group, row, kv head, batch)`, K and V `(dim, row, head, batch)`.
fn maps(call: &Call<'_>, tile: &Sm90Tile) -> Result<Maps> {
    let problem = call.problem;
    let dims = problem.dims;
    let ratio = problem.gqa_ratio();
    let bf16 = problem.dtype_qk == DType::Bf16;
    let packed = matches!(problem.mode, SeqMode::Group { .. });
    // The driver wants a stride for an axis of one too: any that it takes.
    let bytes = |stride: i64, extent: u32| if extent > 1 { stride.unsigned_abs() * 2 } else { 1 << 20 };
    let batch_bytes = |stride: i64, shape: Shape| if packed { 1 << 20 } else { bytes(stride, shape.batch) };

    let q = problem.shape_q();
    let q_address = call.args.q.as_ptr() as u64;
    let rows_in_box =
        if tile.pack_gqa { tile.block_m.unsigned_abs() / ratio } else { tile.block_m.unsigned_abs() };
    let q_map = TensorMapFacts {
        name: "q",
        bf16,
        address: q_address,
        dims: [q.dim, ratio, q.seq.max(1), dims.num_heads_kv, q.batch].map(u64::from),
        strides_bytes: [
            bytes(problem.q.head, ratio),
            bytes(problem.q.seq, q.seq),
            bytes(problem.q.head * i64::from(ratio), dims.num_heads_kv),
            batch_bytes(problem.q.batch, q),
        ],
        box_dims: [
            Sm90Tile::box_dim(q.dim as i32).unsigned_abs(),
            if tile.pack_gqa { ratio } else { 1 },
            rows_in_box,
            1,
            1,
        ],
    };
    let kv_map = |name, address: u64, strides: Strides, shape: Shape| TensorMapFacts {
        name,
        bf16,
        // A tensor without rows is never read, but a map needs an address.
        address: if shape.seq == 0 { q_address } else { address },
        dims: [shape.dim, shape.seq.max(1), shape.head, shape.batch].map(u64::from),
        strides_bytes: [
            bytes(strides.seq, shape.seq),
            bytes(strides.head, shape.head),
            batch_bytes(strides.batch, shape),
        ],
        box_dims: [Sm90Tile::box_dim(shape.dim as i32).unsigned_abs(), tile.block_n.unsigned_abs(), 1, 1],
    };
    let k_map = kv_map("k", call.args.k.as_ptr() as u64, problem.k, problem.shape_k());
    let v_map = kv_map("v", call.args.v.as_ptr() as u64, problem.v, problem.shape_v());
    Ok(Maps { q: q_map.encode()?, k: k_map.encode()?, v: v_map.encode()? })
}
