//! Clocks that each unit needs for 128 rows and 128 keys, of each CTA of a pair: docs/kernels/sm100-mla.md has the
//! table. Modelled, never measured.

use fmha_core::spec::FwdSpec;
use fmha_core::{FwdProblem, KvLayout, ListLength, MaskKind};

use super::{CTAS, KEYS, ROWS, Sm100MlaTile};
use crate::nvidia::DeviceFacts;
use crate::sm90_mla::MlaSchedule;
use crate::sm100::modelled::{self, Overlap, START_ROWS, Walk};
use crate::sm100::units::{
    L2_BYTES, PAIRS, PRODUCTS, SHARED_BYTES, TENSOR_MEMORY_BYTES, Units, exponentials,
};

/// Columns of a chunk, to which rows are filled with zeros.
const SPAN: i32 = 64;
/// Columns of one product of the output, of both CTAs.
const GROUP: i32 = 256;

/// Units of the forward, without modifiers.
#[must_use]
pub fn forward(spec: &FwdSpec, tile: &Sm100MlaTile, arch: &str) -> Units {
    let up = |dim: i32, to: i32| f64::from((dim + to - 1) / to * to);
    let (qk, v) = (up(spec.head_dim_qk, SPAN), up(spec.head_dim_v, GROUP));
    let ctas = f64::from(CTAS);
    let (rows, keys) = (f64::from(ROWS) / ctas, f64::from(KEYS));
    // The CTA's keys of K, and all keys of its columns of V, in 16 bits.
    let (of_k, of_v) = (2.0 * keys / ctas * qk, 2.0 * keys * v / ctas);
    let of_p = 2.0 * rows * keys * v / f64::from(GROUP);
    let brought = of_k + of_v;
    // Codes are written, read, and written as 16 bits.
    let of_codes = if tile.stored.is_fp8() { brought } else { 0.0 };
    let read = 2.0 * rows * qk + brought + of_p;
    Units {
        tensor: PAIRS * (qk + v) / PRODUCTS / ctas,
        exp: PAIRS / ctas / exponentials(arch),
        floats: 2.0 * PAIRS / ctas / 128.0,
        shared: (read + brought + of_codes) / SHARED_BYTES,
        tensor_memory: 4.0 * PAIRS / ctas / TENSOR_MEMORY_BYTES,
        loads: brought * tile.stored.size_bytes() as f64 / 2.0 / L2_BYTES,
    }
}

/// Work of the launch; `None` where the model does not hold: parts of keys, copies, lengths that the device alone
/// knows, or a device whose clock is not known.
#[must_use]
pub fn walk(
    problem: &FwdProblem,
    tile: &Sm100MlaTile,
    schedule: &MlaSchedule,
    facts: &DeviceFacts,
) -> Option<Walk> {
    let Some(lists) = problem.lists else {
        return walk_of_all(problem, tile, schedule, facts);
    };
    let layout = problem.layout;
    let known = !layout.seqused_q && lists.length == ListLength::Whole;
    if !known || tile.split_keys > 0 || !tile.by_tma {
        return None;
    }
    let blocks = f64::from(schedule.most_keys.unsigned_abs().div_ceil(KEYS));
    of_tiles(problem, tile, schedule, facts, (blocks, true))
}

/// Work over all keys, where whole tiles of rows see those of a band.
fn walk_of_all(
    problem: &FwdProblem,
    tile: &Sm100MlaTile,
    schedule: &MlaSchedule,
    facts: &DeviceFacts,
) -> Option<Walk> {
    let rows = problem.dims.seqlen_q.saturating_mul(problem.gqa_ratio());
    let known = modelled::is_modelled(problem) && problem.layout.kv == KvLayout::Strided;
    if !known || tile.split_keys > 0 || !tile.by_tma || !rows.is_multiple_of(ROWS) {
        return None;
    }
    let queries = f64::from((ROWS / problem.gqa_ratio()).max(1));
    let blocks = modelled::blocks(problem, queries) / f64::from(schedule.num_tiles.max(1));
    of_tiles(problem, tile, schedule, facts, (blocks, problem.mask.kind() == MaskKind::Full))
}

fn of_tiles(
    problem: &FwdProblem,
    tile: &Sm100MlaTile,
    schedule: &MlaSchedule,
    facts: &DeviceFacts,
    (blocks, equal): (f64, bool),
) -> Option<Walk> {
    Some(Walk {
        // Scores run a block ahead, of one tile of rows.
        overlap: Overlap::OneTile,
        units: forward(&FwdSpec::of(problem), tile, &facts.arch),
        tiles: f64::from(schedule.num_tiles.max(1)),
        at_once: f64::from(facts.num_sms / CTAS),
        blocks,
        starts: f64::from(ROWS) / START_ROWS,
        equal,
        hertz: modelled::hertz(facts)?,
    })
}

/// Operations of a call: those of the pairs that a band shows, or of all entries of lists.
pub(crate) fn flops(problem: &FwdProblem) -> f64 {
    let dims = problem.dims;
    let a_pair = 2 * (dims.head_dim_qk + dims.head_dim_v);
    if !problem.walks_lists() {
        return modelled::flops(problem, a_pair);
    }
    let rows = f64::from(dims.batch) * f64::from(dims.seqlen_q) * f64::from(dims.num_heads_q);
    rows * f64::from(problem.most_walked_keys()) * f64::from(a_pair)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use fmha_core::{DType, Dims, KeyLists};

    use super::*;

    /// The page's tables.
    #[test]
    fn a_block_costs_the_clocks_of_the_page() {
        let tile = Sm100MlaTile {
            by_tma: true,
            box_keys: 1,
            lazy_rescale_log2: 8,
            vector_store: true,
            split_keys: 0,
            listed: true,
            two_caches: false,
            row_bytes: 0,
            stored: DType::Bf16,
        };
        for (qk, stored, tensor, shared, loads) in [
            (576, DType::Bf16, 2176.0, 3008.0, 2176.0),
            (512, DType::Bf16, 2048.0, 2816.0, 2048.0),
            (576, DType::E4m3Fn, 2176.0, 4096.0, 1088.0),
        ] {
            let spec = FwdSpec { head_dim_v: 512, ..FwdSpec::plain(DType::Bf16, qk, MaskKind::Full) };
            let units = forward(&spec, &Sm100MlaTile { stored, ..tile }, "sm_100a");
            assert_eq!([units.tensor, units.shared, units.loads], [tensor, shared, loads], "{qk} {stored}");
            assert_eq!(units.exp, 512.0);
        }
    }

    /// The page's times of whole lists.
    #[test]
    fn lists_take_the_time_of_the_page() {
        let facts = DeviceFacts::stated("sm_100a").unwrap();
        for (qk, micros) in [(576, "1779"), (512, "1684")] {
            let dims = Dims::batch(1).seqlens(4096, 65536).heads(128, 1).head_dims(qk, 512);
            let problem = FwdProblem::batch(DType::Bf16, dims);
            let lists = KeyLists::new(&problem, 2048);
            let problem = problem.lists(lists);
            let tile = crate::sm100_mla::choose_tile(&problem, facts.num_sms);
            let schedule = tile.schedule(&problem).unwrap();
            let walk = walk(&problem, &tile, &schedule, &facts).unwrap();
            assert_eq!(format!("{:.0}", 1e6 * walk.seconds(&modelled::CONSTANTS)), micros, "{walk:?}");
            assert_eq!(flops(&problem), 2.0 * 4096.0 * 128.0 * 2048.0 * f64::from(qk + 512));
        }
    }
}
