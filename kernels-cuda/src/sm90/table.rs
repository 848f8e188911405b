//! Choice of a tile: one row of the table for each head dimension, adjusted for modifiers, FP8 and few rows.

use fmha_core::spec::{BiasKind, CodeKind, FwdSpec, KvKind};

use fmha_core::{DType, FwdProblem, MaskKind, VLayout};

use super::values::block_bytes;
use super::{
    Lookahead, MAX_SMEM_BYTES, PingPong, PrepareV, Sm90Tile, TileOrder, ValueProduct, elem_bytes,
    odd_bias_stride, padded_dim, reads_pages_by_tma, spec_of, tile_dim,
};
use crate::operands::{odd_stride, stores_vectors, strides};
use crate::split;
use crate::split::price::{self, CONSTANTS, Keys, Walk};
use crate::tile_list;

/// The tile for a problem that the kernel accepts.
#[must_use]
pub fn choose_tile(problem: &FwdProblem) -> Sm90Tile {
    choose_tile_as(problem, None)
}

/// The tile for a problem, with packed heads of a group if `packs` says so; a tile that does not support this stays
/// unchanged.
pub(super) fn choose_tile_as(problem: &FwdProblem, packs: Option<bool>) -> Sm90Tile {
    let spec = spec_of(problem);
    let dims = problem.dims;
    let mut tile = default_tile(&spec);
    let ratio = problem.gqa_ratio() as i32;
    let seqlen_q = i64::from(dims.seqlen_q);

    tile.copy_bytes = copy_bytes(problem);
    if tile.copy_bytes > 0 || problem.layout.kv.is_paged() {
        // Three warpgroups would leave too few registers to the threads that copy or look up pages.
        tile.block_m = tile.block_m.min(128);
    }
    // A short query packs the heads of a group if that saves a tenth of the rows.
    if (2..=64).contains(&ratio) {
        let block_m = i64::from(tile.block_m);
        let apart = (seqlen_q + block_m - 1) / block_m * i64::from(ratio);
        // Number of queries of a tile that has whole groups of heads.
        let queries = block_m / i64::from(ratio);
        let packed = (seqlen_q + queries - 1) / queries;
        // A group that does not fill its tiles has a tile that no bundle contains, which pays off only for few
        // queries over a cache.
        let is_decode = i64::from(dims.seqlen_k) > seqlen_q
            || problem.layout.seqused_k && seqlen_q * i64::from(ratio) <= 64;
        let fills = 64 % ratio == 0 || is_decode;
        tile.pack_gqa = packs.unwrap_or(fills && packed * 10 <= apart * 9);
        if tile.pack_gqa && 64 % ratio != 0 && tile.splits_q() {
            tile.lookahead = Lookahead::Off;
        }
    }
    let takes_128_rows = !tile.pack_gqa || 128 % ratio == 0;
    // Measured on an H200, TFLOP/s, the larger tile first: full D 128 bf16 502 and 585 at 512, 735 and 751 at 2k, f16
    // 588 and 592 at 3328; causal D 64 bf16 250 and 269 at 512, 330 and 362 at 1k, 457 and 433 at 2k.
    match (widest(&spec), spec.mask) {
        (128, _) if tile.block_m == 192 && wasted_by_192_rows(seqlen_q) && takes_128_rows => {
            (tile.block_m, tile.block_n, tile.wait_anchor) = (128, 128, 32);
            // Four stages of FP8 fit with smaller blocks, but not with blocks of this size.
            tile.stages = tile.stages.min(3);
        }
        (128, MaskKind::Full) if !modifies(&spec) && tile.pv != ValueProduct::F16 && dims.seqlen_k < 4096 => {
            (tile.block_n, tile.wait_anchor) = (128, 32);
        }
        // A third of a tile of 192 rows would be empty: TFLOP/s at B64 H16 bf16 with 192 and with 128 rows: 154 and
        // 168 (with four stages 165) at length 128 (cuDNN 167), 261 and 316 (with four stages 315) at 256 (302);
        // 398 and 366 at 512.
        (64, MaskKind::Full) if !modifies(&spec) && wasted_by_192_rows(seqlen_q) && takes_128_rows => {
            tile.block_m = 128;
        }
        (64, MaskKind::Upper) if dims.seqlen_k <= 1024 && !(tile.pack_gqa && 128 % ratio != 0) => {
            tile.block_m = 128;
        }
        _ => {}
    }
    take_short_rows(problem, &spec, &mut tile);
    if sees_few_keys(problem, &spec) {
        tile.skip_row_max = false;
    }
    let rows = if tile.pack_gqa { seqlen_q * i64::from(ratio) } else { seqlen_q };
    if rows <= 64 && (!tile.pack_gqa || rows <= i64::from(64 / ratio * ratio)) {
        tile.block_m = 64;
    }
    tile.place(problem);

    // For larger caps, 2 c / (1 + exp(2 y / c)) loses accuracy for y far below c: its error is some 3e-7 c.
    if problem.score.softcap.is_some_and(|cap| !(1e-3..=64.0).contains(&cap)) {
        tile.fast_softcap = false;
        tile.take_registers(&spec);
    }
    if tile.bias_stages > 0 && (tile.copy_bytes > 0 || tile.pack_gqa || odd_bias_stride(problem).is_some()) {
        tile.bias_stages = 0;
        tile.take_registers(&spec);
    }
    if tile.copy_bytes == 0 {
        share_loads(problem, &spec, &mut tile);
    }
    prepare_values_once(problem, &spec, &mut tile);

    tile.vector_store &= stores_vectors(problem);
    if tile_list::serve(problem) {
        tile.take_lists(problem, &spec);
    }
    tile.place(problem);
    tile
}

/// [`Sm90Tile::copy_bytes`] for a problem: 0 if TMA supports its strides, otherwise the most bytes that divide
/// every stride.
fn copy_bytes(problem: &FwdProblem) -> i32 {
    let by_tma = !problem.layout.kv.is_paged() || reads_pages_by_tma(problem);
    if odd_stride(problem).is_none() && by_tma {
        return 0;
    }
    let divides = |&bytes: &i32| strides(problem).all(|(_, _, stride)| stride * 2 % i64::from(bytes) == 0);
    [16, 8, 4].into_iter().find(divides).unwrap_or(2)
}

/// The tile for a problem on a device with this many multiprocessors: that of [`choose_tile`], with keys in parts
/// or shares if that is cheaper.
#[must_use]
pub fn choose_tile_in_parts(problem: &FwdProblem, num_sms: u32) -> Sm90Tile {
    let whole = choose_tile(problem);
    if tile_list::serve(problem) {
        return whole;
    }
    if is_decode(problem) {
        let priced = ways(problem, whole, num_sms)
            .into_iter()
            .filter_map(|way| Some((micros_of_few(problem, &way, num_sms)?, way)));
        return price::cheapest(priced).unwrap_or(whole);
    }
    let Ok(schedule) = whole.schedule(problem) else { return whole };
    let mut tile = Sm90Tile { skip_row_max: false, ..whole };
    let fills = schedule.num_tiles.unsigned_abs() >= num_sms;
    let dims = problem.dims;
    let is_long = dims.seqlen_k >= LEAST_SPLIT && dims.seqlen_k / KEYS_TO_A_QUERY >= dims.seqlen_q;
    if fills || !is_long || !tile.takes_parts() || split::splits(problem).is_err() {
        return whole;
    }
    let cost = CostOfParts::new(problem, &tile, schedule.num_tiles.unsigned_abs(), num_sms);
    let seqlen_k = dims.seqlen_k;
    let block_n = tile.block_n.unsigned_abs();
    let keys_of = |parts: u32| seqlen_k.div_ceil(parts).next_multiple_of(block_n);
    let best = (2..=MOST_PARTS)
        .map(keys_of)
        .map(|keys| (keys, cost.seconds(keys, seqlen_k.div_ceil(keys))))
        .fold((0, WORTH_A_MERGE * cost.seconds(seqlen_k, 1)), |best, next| {
            if next.1 < 0.98 * best.1 { next } else { best }
        });
    if best.0 == 0 {
        return whole;
    }
    tile.split_keys = best.0 as i32;
    tile.launch_beside_merge();
    tile
}

/// Most queries of a sequence whose keys CTAs divide into equal shares.
const MOST_SHARED_QUERIES: u32 = 32;

/// Whether a problem has few queries over many keys, for which the [price] was made.
fn is_decode(problem: &FwdProblem) -> bool {
    let dims = problem.dims;
    let is_cache = dims.seqlen_k > dims.seqlen_q || problem.layout.seqused_k;
    is_cache && dims.seqlen_q <= MOST_SHARED_QUERIES && !problem.dtypes.qk.is_fp8()
}

/// Microseconds of a call with few queries, by the [price]; `None` for other problems.
pub(crate) fn micros_of_few(problem: &FwdProblem, tile: &Sm90Tile, num_sms: u32) -> Option<f64> {
    Some(price::micros(problem, &walk_of_few(problem, tile)?, num_sms))
}

/// Description of a tile's work for the price of few queries; `None` for other problems.
#[must_use]
pub fn walk_of_few(problem: &FwdProblem, tile: &Sm90Tile) -> Option<Walk> {
    let whole = Sm90Tile { split_keys: 0, shares: 0, ..*tile };
    let tiles = whole.schedule(problem).ok().filter(|_| is_decode(problem))?.num_tiles;
    Some(Walk {
        rates: CONSTANTS.sm90,
        tiles: tiles.unsigned_abs() / problem.dims.batch.max(1),
        rows: tile.block_m.unsigned_abs(),
        block_n: tile.block_n.unsigned_abs(),
        ctas: 1,
        keys: Keys::of(tile.split_keys, tile.shares),
    })
}

/// All ways to divide the keys of a tile of few queries among CTAs.
#[must_use]
pub fn ways_of_few(problem: &FwdProblem, num_sms: u32) -> Vec<Sm90Tile> {
    ways(problem, choose_tile(problem), num_sms)
}

/// All ways to divide the keys of a tile of few queries: not at all, into parts of several lengths, and into equal
/// shares.
fn ways(problem: &FwdProblem, whole: Sm90Tile, num_sms: u32) -> Vec<Sm90Tile> {
    let mut cut = Sm90Tile { skip_row_max: false, ..whole };
    if !cut.takes_parts() || !split::may_be_cut(problem, cut.block_n.unsigned_abs()) {
        return vec![whole];
    }
    cut.launch_beside_merge();
    let seqlen_k = problem.dims.seqlen_k;
    let block_n = cut.block_n.unsigned_abs();
    let parts = price::keys_of_parts(seqlen_k, block_n, MOST_PARTS)
        .map(|keys| Sm90Tile { split_keys: keys.cast_signed(), ..cut });
    [whole].into_iter().chain(parts).chain(in_shares(problem, cut, num_sms)).collect()
}

/// The tile whose CTAs have equal shares of all sequences' blocks, if the problem allows shares.
fn in_shares(problem: &FwdProblem, cut: Sm90Tile, num_sms: u32) -> Option<Sm90Tile> {
    let mut tile = Sm90Tile { block_m: cut.block_m.min(128), ..cut };
    tile.place(problem);
    (tile.split_keys, tile.shares) = (tile.block_n, num_sms.cast_signed());
    let is_batch = (2..=split::MOST_SCANNED).contains(&problem.dims.batch);
    let takes = |shares: split::Shares| shares.takes(problem, tile.block_n.unsigned_abs());
    tile.cut(problem).shares.filter(|&shares| is_batch && takes(shares)).map(|_| tile)
}

/// Whether CTAs that process and merge all parts of their rows are faster, by the model, than one CTA for each part
/// and a merging launch: the longest tile, or an even share of all tiles' keys, against an even share, half a part,
/// and the traffic of the parts.
pub(super) fn folds_parts(problem: &FwdProblem, tile: &Sm90Tile, keys_of_part: i32, num_sms: u32) -> bool {
    let spec = spec_of(problem);
    let may_fold = !spec.sink && !spec.sink_columns && !spec.dtype_o.is_fp8() && !spec.dtype_qk.is_fp8();
    let whole = Sm90Tile { split_keys: 0, shares: 0, ..*tile };
    let Ok(schedule) = whole.schedule(problem) else { return false };
    if !may_fold || tile_list::serve(problem) {
        return false;
    }
    let tiles = schedule.num_tiles.unsigned_abs() * tile.cluster.unsigned_abs();
    let cost = CostOfParts::new(problem, tile, tiles, num_sms);
    let dims = problem.dims;
    let band = problem.mask.band(dims.seqlen_q, dims.seqlen_k);
    let seen = |query: u32| {
        let keys = band.k_range(query..query + 1, dims.seqlen_k);
        f64::from(keys.end.saturating_sub(keys.start))
    };
    let last = dims.seqlen_q.max(1) - 1;
    let [first, middle, last] = [0, last / 2, last].map(seen);
    let (mean, longest) = ((first + 2.0 * middle + last) / 4.0, first.max(middle).max(last));
    let keys_of_part = f64::from(keys_of_part);
    let share = f64::from(tiles) * mean / f64::from(num_sms);
    let folding = share.max(longest) * cost.seconds_per_key;
    let in_memory = mean / keys_of_part * cost.part_bytes / 2e12 + 2e-6;
    let apart = (share + keys_of_part.min(longest) / 2.0) * cost.seconds_per_key + in_memory;
    folding <= apart
}

/// Fewest keys of a sequence that are split; the next constant is the fewest as a multiple of its queries. On an
/// H200, 4 heads of 2048 queries and keys took 44.5 us in two parts, 29.7 unsplit; 2 heads of 4096 were equal.
const LEAST_SPLIT: u32 = 1024;
const KEYS_TO_A_QUERY: u32 = 8;

/// Largest modelled time with parts, relative to the time without, for which parts are chosen. The model is too
/// inexact for masks' ends and small calls to allow more.
const WORTH_A_MERGE: f64 = 0.75;

/// Parts of a sequence's keys, at most.
const MOST_PARTS: u32 = 128;

/// Modelled time of a call of few tiles in parts, fitted to an H200.
struct CostOfParts {
    tiles: u32,
    num_sms: u32,
    /// Time per key of a CTA that has the device to itself.
    seconds_per_key: f64,
    /// Time that memory needs for one key of every tile, with all multiprocessors at work.
    memory_seconds_per_key: f64,
    /// Bytes of a part's O.
    part_bytes: f64,
}

impl CostOfParts {
    /// One CTA of 64 rows of D 128 walks a key in 7.3 ns (a head of 4096 and 32768 keys in 38 and 247 us);
    /// products run at 6.3 TFLOP/s a multiprocessor.
    fn new(problem: &FwdProblem, tile: &Sm90Tile, tiles: u32, num_sms: u32) -> Self {
        let dims = problem.dims;
        let row_elems = f64::from(dims.head_dim_qk + dims.head_dim_v);
        let key_bytes = f64::from(elem_bytes(problem.dtypes.qk)) * row_elems;
        let by_products = f64::from(tile.block_m) * 2.0 * row_elems / 6.3e12;
        let heads = f64::from(dims.batch) * f64::from(dims.num_heads_kv);
        let rows = f64::from(dims.batch) * f64::from(dims.num_heads_q) * f64::from(dims.seqlen_q);
        Self {
            tiles,
            num_sms,
            seconds_per_key: (key_bytes / 70e9).max(by_products),
            memory_seconds_per_key: heads * key_bytes / 4.4e12,
            part_bytes: rows * 4.0 * f64::from(dims.head_dim_v),
        }
    }

    /// Modelled time. A wave of CTAs adds 1 us to begin and end; a second launch adds 2 us, and reading and writing
    /// the parts.
    fn seconds(&self, keys: u32, parts: u32) -> f64 {
        let waves = f64::from((self.tiles * parts).div_ceil(self.num_sms));
        let walk = waves * (f64::from(keys) * self.seconds_per_key + 1e-6);
        let memory = f64::from(keys * parts) * self.memory_seconds_per_key;
        let merge = if parts > 1 { 2e-6 + f64::from(parts) * (self.part_bytes / 2e12 + 10e-9) } else { 0.0 };
        walk.max(memory) + merge
    }
}

/// Adjusts the tile to few keys. At most one block could skip its row-max reduction, and without that path the
/// kernel's code is a third smaller, so that less of it is loaded. At D 64 the tiles are nearly equal, so no
/// counter is used.
///
/// TFLOP/s on an H200, bf16, B64 H16, before and after (cuDNN): D 64 full 128 keys 164, 168 (167), 256 keys
/// 289, 316 (302); causal 74, 79 (79) and 159, 166 (163), at 512 248 and 204; D 128 full 203, 208 (208) and
/// 439, 446 (418). D 128 causal gains by neither alone: 100, 100 (101) and 213, 205 (225); without lookahead
/// too 102 (102) and 217 (225). There its warpgroups have no order either: 224 and 225 (223), the other
/// figures of that run level.
fn take_short_rows(problem: &FwdProblem, spec: &FwdSpec, tile: &mut Sm90Tile) {
    let dims = problem.dims;
    if dims.seqlen_k > 256 || dims.seqlen_k > 2 * tile.block_n.unsigned_abs() || modifies(spec) {
        return;
    }
    match (widest(spec), spec.mask) {
        (64, MaskKind::Full | MaskKind::Upper) => {
            tile.skip_row_max = false;
            if dims.seqlen_q <= 256 && spec.kv_layout == KvKind::Strided {
                tile.order = TileOrder::Static;
            }
        }
        (_, MaskKind::Full) => tile.skip_row_max = false,
        (128, MaskKind::Upper) => {
            (tile.skip_row_max, tile.lookahead, tile.ping_pong) = (false, Lookahead::Off, PingPong::Off);
        }
        _ => {}
    }
}

/// Whether a causal call's queries see so few keys on average that exact maxima throughout cost nothing: a tile
/// then has no vote, which helps inputs with widely spread scores.
///
/// An H200, bf16, microseconds without and with them, normal inputs and outliers. D 128: B32 H16 S512 102.8,
/// 99.0 and 108.0, 99.0; B16 H16 S1024 141.9, 140.8 and 145.9, 140.0; B10 H16 S1536 172.4, 174.3 and 181.8,
/// 174.2; packed to 1008 150.2, 149.0 and 155.5, 148.6. Normal: D 80 at 512 94.8, 93.0, at 1024 137.2, 137.9;
/// D 64 74.7, 72.6 and 105.1, 105.5.
fn sees_few_keys(problem: &FwdProblem, spec: &FwdSpec) -> bool {
    let most = match (widest(spec), spec.mask) {
        (128, MaskKind::Upper) => 512,
        (64 | 96, MaskKind::Upper) => 256,
        _ => return false,
    };
    let dims = problem.dims;
    let seen = dims.seqlen_k - dims.seqlen_q.min(dims.seqlen_k) / 2;
    seen <= most && !modifies(spec) && !spec.dtype_qk.is_fp8()
}

/// Fewest query rows of a kv head for which its V is prepared once, by spare warps or by a launch before, instead
/// of again in each tile.
pub const PREPARE_BESIDE_ROWS: u64 = 4096;
/// Fewest query rows of a kv head for which a launch before prepares V; [`PREPARE_BESIDE_ROWS`] is the limit for
/// spare warps.
pub const PREPARE_BEFORE_ROWS: u64 = 8192;

/// Most bytes of workspace for a prepared V.
pub const PREPARED_BYTES: u64 = 1 << 30;

/// A row-major V of FP8 that many tiles read is prepared once: the products wait for no value role, and shared memory
/// has no second ring of V, which another stage takes. The bits of O are those of the same blocks of keys prepared in
/// each tile. Spare warps prepare V beside the tiles if a head's tiles run one after another; where a mask lets tiles
/// of many heads begin at once, these would wait.
///
/// TFLOP/s on an H200, e4m3, in each tile, beside, by a launch. Full: D 128 at 2k, 4k, 8k, 16k 833, 836, 801;
/// 861, 907, -; 906, 954, 938; 932, 990, 978, with 128 rows and keys 4k 907 beside 889, 8k 942, 16k 963; D
/// 256 1008, 1016, 992; 1100, 1140, 1122; 1147, 1206, 1192; 1175, 1244, 1236; D 64 597, 596, 586; 642, 643,
/// 644; 688, 695, 704; 703, 705, 719. Causal at 4k, 8k, 16k: D 128 785, 722, 769; 889, 839, 891; 929, 949,
/// 958; D 256 988, 908, 964; 1087, 1080, 1098; 1141, 1170, 1184; D 64 562, 528, 550; 641, 603, 645; 677, 686,
/// 690. GQA 32/8 at 8k, full 956, 1019, 1004, causal 901, 902, 931.
fn prepare_values_once(problem: &FwdProblem, spec: &FwdSpec, tile: &mut Sm90Tile) {
    let dims = problem.dims;
    let rows = u64::from(dims.seqlen_q) * u64::from(problem.gqa_ratio());
    let (prepare_v, least) = match (widest(spec), spec.mask) {
        // Times of D 192 in us, with V prepared in each tile, by a launch, and beside the tiles: 6912 rows behind 5747
        // keys causal 901, 847; of 2985 rows full 697, 681, 670, of 3360 61.3, 59.0, 60.3.
        (192, MaskKind::Upper) => (PrepareV::Before, PREPARE_BEFORE_ROWS * 7 / 8),
        (192, MaskKind::Full) => (PrepareV::Beside, PREPARE_BESIDE_ROWS * 2 / 3),
        (64, MaskKind::Full) | (_, MaskKind::Upper) => (PrepareV::Before, PREPARE_BEFORE_ROWS),
        (_, MaskKind::Full) => (PrepareV::Beside, PREPARE_BESIDE_ROWS),
        // In a window only few tiles read a block of V.
        (_, MaskKind::Band) => return,
    };
    let of_v = spec.dtype_v.is_fp8() && spec.v_layout == VLayout::RowMajor;
    if !of_v || modifies(spec) || rows < least {
        return;
    }
    let mut once = Sm90Tile { prepare_v, stages: tile.stages.max(3), ..*tile };
    if (widest(spec), once.block_m, prepare_v) == (128, 192, PrepareV::Beside)
        && rows < 2 * least
        && !once.pack_gqa
    {
        (once.block_m, once.block_n, once.wait_anchor, once.stages) = (128, 128, 32, 3);
    }
    let blocks = [dims.batch, dims.num_heads_kv, dims.seqlen_k.div_ceil(once.block_n.unsigned_abs())];
    let bytes = blocks
        .into_iter()
        .fold(block_bytes(spec, &once), |bytes, extent| bytes.saturating_mul(extent.into()));
    if bytes <= PREPARED_BYTES && once.smem_bytes(spec) <= MAX_SMEM_BYTES {
        *tile = once;
    }
}

/// Whether tiles of 192 query rows compute a fifth more rows than tiles of 128.
const fn wasted_by_192_rows(seqlen_q: i64) -> bool {
    (seqlen_q + 191) / 192 * 192 * 5 >= (seqlen_q + 127) / 128 * 128 * 6
}

/// Whether scores, or P, are modified between the products Q K and P V.
pub(super) fn modifies(spec: &FwdSpec) -> bool {
    modifies_score(spec) || spec.dropout
}

/// Whether scores are modified between the products Q K and P V.
fn modifies_score(spec: &FwdSpec) -> bool {
    spec.softcap || spec.bias != BiasKind::None || spec.code != CodeKind::None
}

/// Whether the modifiers need few registers: a soft-cap alone, or ALiBi alone.
fn modifies_lightly(spec: &FwdSpec) -> bool {
    let alone = spec.softcap != (spec.bias == BiasKind::Alibi);
    alone && spec.bias != BiasKind::Elementwise && !spec.dropout && spec.code == CodeKind::None
}

/// Whether TMA can load the bias: 16-bit types, and no soft-cap, which must be applied to unscaled scores first.
pub(super) fn adds_wide_elements(spec: &FwdSpec) -> bool {
    let alone = !spec.softcap && spec.code == CodeKind::None;
    spec.bias == BiasKind::Elementwise && alone && spec.dtype_bias.size_bytes() == 2
}

/// The table's row for a head dimension. Above 128 it is that of the row's length in shared memory.
const fn row_of(head_dim: i32, dtype: DType) -> i32 {
    if head_dim > 128 { tile_dim(head_dim, dtype) } else { padded_dim(head_dim) }
}

/// The table's row for the larger of the two head dimensions.
pub(super) const fn widest(spec: &FwdSpec) -> i32 {
    let (qk, v) = (row_of(spec.head_dim_qk, spec.dtype_qk), row_of(spec.head_dim_v, spec.dtype_v));
    if qk > v { qk } else { v }
}

/// Sets clusters of two CTAs that each load half of K and V, where that was measured to be faster: traffic from the L2
/// is halved, and the power that it takes is left to the tensor cores.
///
/// TFLOP/s on an H200, bf16, single CTAs first. D 128 full 766 and 767 at 4k; causal 733 and 725 at 4k, 784 and 784 at
/// 8k, 807 and 814 at 16k; a group's heads 784 and 795 at 8k. D 192 at 8k: full 832 and 838, causal 803 and 815;
/// 192/128 824 and 829, 797 and 803. D 256 full 823 and 829 at 4k, 850 and 855 at 16k; causal 756 and 754 at 4k, and in
/// clusters it spills. D 64, whose three warpgroups of two CTAs wait for each other, before: 569 and 527.
fn share_loads(problem: &FwdProblem, spec: &FwdSpec, tile: &mut Sm90Tile) {
    let dims = problem.dims;
    let plain = spec.kv_layout == KvKind::Strided && !modifies(spec) && !spec.dtype_qk.is_fp8();
    if !plain || tile.pack_gqa || tile.block_m != 128 {
        return;
    }
    let pairs_of_heads = problem.gqa_ratio().is_multiple_of(2);
    let least = match (widest(spec), spec.mask) {
        (128 | 256, MaskKind::Full) => 4096,
        (192, MaskKind::Full | MaskKind::Upper) => 8192,
        // Times of D 200 at 10752: 1187 us with single CTAs, 1062 in clusters; D 248 spills in clusters, as 256 does.
        (256, MaskKind::Upper) if begins_amid_sectors(problem) && dims.head_dim_v <= 240 => 8192,
        (128, MaskKind::Upper) if pairs_of_heads => 8192,
        (128, MaskKind::Upper) => 16384,
        _ => return,
    };
    if dims.seqlen_q.min(dims.seqlen_k) < least {
        return;
    }
    tile.cluster = 2;
    tile.order = TileOrder::Dynamic;
    tile.cluster_heads = pairs_of_heads && (widest(spec), spec.mask) == (128, MaskKind::Upper);
    if (padded_dim(spec.head_dim_v), widest(spec), spec.mask) == (128, 192, MaskKind::Upper) {
        tile.wait_anchor = 24;
    }
}

/// Whether rows of K or V begin in the middle of the L2's 32-byte sectors.
fn begins_amid_sectors(problem: &FwdProblem) -> bool {
    strides(problem).any(|(name, _, stride)| name != "q" && stride % 16 != 0)
}

/// The tile for long sequences of a spec.
#[must_use]
#[allow(clippy::match_same_arms, reason = "a table: a row a head dimension")]
pub fn default_tile(spec: &FwdSpec) -> Sm90Tile {
    let v = row_of(spec.head_dim_v, spec.dtype_v);
    let full = spec.mask == MaskKind::Full;
    // The tuple has block_m, block_n, lookahead and wait_anchor.
    let (block_m, block_n, lookahead, wait_anchor) = match widest(spec) {
        // With wait_anchor 0: full 559 beside 572 at 2k, 618 beside 640 at 16k; causal alike. 16: full 587 beside 596,
        // causal 511 beside 517 at 4k.
        64 => (192, 128, true, 8),
        // Two warpgroups and 176 keys: 645 beside 680 at 8k. Anchor 0: 733 beside 739; causal 702 beside 706.
        96 => (192, 112, true, 28),
        128 if full => (128, 160, true, 40),
        // 144 keys: 8k 773 beside 784.
        128 => (128, 128, true, 32),
        // Only FP8 has this row.
        160 => (128, 112, false, 0),
        192 if v <= 128 => (128, 128, false, 32),
        // 112 keys, which leave no room to look ahead: 8k full 831 beside 838, causal 808 beside 815. Causal
        // at 8k with an anchor of 0: 817 beside 815, and 783 beside 808 where scores lie eight times as far
        // apart.
        192 => (128, 96, true, if full { 0 } else { 8 }),
        // 80 keys: full 551 beside 571 at 512, 849 beside 849 at 16k. Without lookahead: full 573 beside 607
        // at 512, 703 beside 720 at 1k, 853 beside 855 at 16k; causal 360 beside 376, 530 beside 537. Causal
        // with an anchor of 0: 754 beside 753 at 4k, and where scores lie far apart 700 beside 727, exact
        // maxima at 8k 748 beside 771.
        _ => (128, 64, true, if full { 0 } else { 16 }),
    };
    let mut tile = Sm90Tile {
        block_m,
        block_n,
        stages: 2,
        // A fixed order of unlike tiles leaves up to a fifth of the SMs idle: 16k causal, D 128, 576 TFLOP/s fixed, 729
        // dynamic. Tiles of D 64 are unlike without a mask too, where some take exact maxima; fixed and dynamic, normal
        // scores and eight times as far apart, bf16: 485, 490 and 421, 449 at 1k, 588, 598 and 482, 549 at 4k, 629, 637
        // and 585, 585 at 8k. D 128 full 574 and 569 at 512, 746 and 749 at 2k; D 256 600 and 592, 783 and 785.
        order: if full && widest(spec) != 64 && spec.kv_layout == KvKind::Strided {
            TileOrder::Static
        } else {
            TileOrder::Dynamic
        },
        ping_pong: PingPong::AtIssue,
        // A tile without room for a second Q looks ahead with a spare piece, or not at all.
        lookahead: match (lookahead, widest(spec) >= 192) {
            (false, _) => Lookahead::Off,
            (true, false) => Lookahead::SecondQ,
            (true, true) => Lookahead::SparePiece,
        },
        // Full masks: 8 has 13 % more RMSE than exact maxima with outliers in the input, 6 has 8 %, and they
        // are equally fast. Causal ones, whose first rows start from few keys, bf16 D 128: 354 with 6, 368
        // with 8 at 512; 358 and 362 with 8 and 11 at 512, 504 and 509 at 1k, 756 and 759 at 8k; Q four times
        // as large 0.256 and 0.238 ms.
        lazy_rescale_log2: if full { 6 } else { 11 },
        wait_anchor,
        // Without and with, bf16, full: D 64 605 and 618 at 16k, D 128 571 and 585 at 512, 781 and 795 at 16k, D 256
        // 838 and 849; causal: D 64 352 and 362 at 1k, D 128 357 and 369 at 512, 615 and 642 at 2k, 785 and 802.
        // A window of 512 keys has two or three such blocks: 469 and 463.
        skip_row_max: spec.mask != MaskKind::Band,
        // Simulated, independent normal scores of standard deviation s: with a threshold of 2^6 (full) 25
        // blocks raise a warpgroup's maxima 0.5 times at s = 2 and 6.5 times at 3, with 2^11 31 blocks 0.1
        // times at 3 and 2 times at 4. At 8 and 11 the tile is exact with s = 3 and 4, and is not with 2 and
        // 3.
        exact_max_spread_log2: if full { 8 } else { 11 },
        vote_after: 4,
        pack_gqa: false,
        fast_softcap: spec.softcap && spec.bias == BiasKind::None && spec.code == CodeKind::None,
        vector_store: spec.dtype_o != DType::F32,
        copy_bytes: 0,
        page_keys: 0,
        stored: spec.dtype_qk,
        raw_stages: 0,
        cluster: 1,
        cluster_heads: false,
        q_in_registers: false,
        pv: ValueProduct::Direct,
        prepare_v: PrepareV::InTile,
        output_columns: 0,
        bias_stages: 0,
        // Back to back on an H200, bf16, D 128, us a call without and with: 6.6 and 5.9 (B1 H4 S128), 11.2 and 10.2
        // (B1 H16 S512), 34.2 and 33.4 (B8 H16 S512).
        dependent_launch: true,
        split_keys: 0,
        fixed_parts: false,
        fold_keys: 0,
        fold_in_shared: false,
        whole_groups: false,
        shares: 0,
    };
    if spec.dtype_v.is_fp8() {
        tile.take_fp8(spec);
    }
    // With FP8, whose sums have accumulators of their own, a soft-cap alone spills too.
    let heavy = modifies(spec) && (!modifies_lightly(spec) || tile.flushes_output());
    if adds_wide_elements(spec) && !spec.dropout {
        tile.take_bias(spec);
    } else if spec.dropout && !modifies_score(spec) && !tile.flushes_output() {
        tile.take_dropout(spec);
    } else if heavy {
        tile.take_registers(spec);
    }
    tile
}

impl Sm90Tile {
    /// Adjusts the tile to masks as data: rows of one head, whose blocks come from a list. Lists differ in length.
    /// Three warpgroups have no registers for the bits of a row. Block sizes match those of the block lists if
    /// possible.
    fn take_lists(&mut self, problem: &FwdProblem, spec: &FwdSpec) {
        (self.pack_gqa, self.cluster, self.cluster_heads) = (false, 1, false);
        (self.prepare_v, self.order) = (PrepareV::InTile, TileOrder::Dynamic);
        self.place(problem);
        if self.bias_stages > 0 {
            self.bias_stages = 0;
            self.take_registers(spec);
        }
        self.block_m = self.block_m.min(128);
        if let Some(lists) = problem.masks.block_lists {
            let divides = |keys: &i32| lists.block_k.is_multiple_of(keys.unsigned_abs());
            let met = [128, 112, 96, 80, 64].into_iter().filter(|&keys| keys <= self.block_n).find(divides);
            self.block_n = met.unwrap_or(self.block_n);
            if lists.block_q == 64 {
                self.block_m = 64;
            }
        }
        self.wait_anchor = self.wait_anchor.min(self.block_n / 2);
    }

    /// Frees registers for score modifiers or dropout: smaller blocks, no lookahead, no second loop for blocks.
    fn take_registers(&mut self, spec: &FwdSpec) {
        self.block_n = self.block_n.min(if widest(spec) > 192 { 64 } else { 96 });
        (self.lookahead, self.wait_anchor, self.skip_row_max) = (Lookahead::Off, 0, false);
    }

    /// Adjusts a tile of 16-bit types for a V of FP8.
    ///
    /// TFLOP/s on an H200, e4m3, S 8192, V brought to f16 beside P of 8 bits and FlashAttention-3: D 64 full
    /// 688, 628, 656, causal 632, 582, 621; D 128 full 878, 885, 986, causal 861, 797, 929; D 256 full 1008,
    /// 1126, 1264. At D 128 with two warpgroups of 144 keys 865, of 128 833, causal 822. With three stages in
    /// another run: D 128 full 875 to 899, causal 863 to 885 (FlashAttention-3 988, 924). In a fixed order
    /// and as they come at 4k and 16k: D 128 full 854, 864 and 920, 928, with four stages 871 and 938 (924,
    /// 994); D 256 full 1058, 1073 and 1110, 1123. D 64 causal with an anchor of 16 and of 0: 539, 552 and
    /// 643, 661 (535, 660).
    fn take_fp8(&mut self, spec: &FwdSpec) {
        self.order = TileOrder::Dynamic;
        if padded_dim(spec.head_dim_v) <= 128 {
            self.pv = ValueProduct::F16;
        }
        if self.pv != ValueProduct::F16 {
            self.take_fp8_products(spec);
        } else if spec.v_layout == VLayout::ColMajor {
            // Along keys, rows are whole swizzle spans of 32 bytes.
            self.block_n = self.block_n / 32 * 32;
        } else if widest(spec) == 128 && !modifies(spec) {
            (self.block_m, self.block_n, self.wait_anchor, self.stages) = (192, 80, 20, 4);
        } else if widest(spec) == 64 {
            self.wait_anchor = 0;
        }
    }

    /// With a P of 8 bits, whose products are summed in some 14 bits: flushed after each block, and with
    /// every block's maxima, since the type leaves P little room above them. Registers, of which a thread has
    /// 232, decide: of S `block_n / 2`, of O `head_dim_v / 2`, those of `output_columns`, of P `block_n / 8`.
    ///
    /// D 256, TFLOP/s: beside the next S 96 keys 956, with 64 columns at a time 1029, 64 keys 884; output
    /// first 1111. D 192, us, 32 columns at a time and 64: 42.6 and 40.2 (B1 H8 S2048 causal), 722.8 and
    /// 697.9 (B32 H24/8 S995). Rescaled where a maximum grew by more than 2^0 and 2^2, D 256: 500 and 494 (B4
    /// H8 S4096), 526 and 520 (B2 H8 S8192 causal), D 192 696 and 679 (B32 H24/8 S995); the needle's relative
    /// error (bench/needle.py) is 8.35e-4 and 8.49e-4, 8.45e-4 and 8.63e-4.
    const fn take_fp8_products(&mut self, spec: &FwdSpec) {
        (self.skip_row_max, self.lazy_rescale_log2) = (false, 2);
        (self.block_n, self.wait_anchor) = (128, 0);
        self.output_columns = if padded_dim(spec.head_dim_v) % 64 == 0 { 64 } else { 32 };
        (self.pv, self.lookahead) = if padded_dim(spec.head_dim_v) > 192 {
            (ValueProduct::FlushedFirst, Lookahead::Off)
        } else {
            (ValueProduct::Flushed, Lookahead::SecondQ)
        };
    }

    /// Adjusts a tile for an elementwise 16-bit bias, which needs shared memory, so lookahead or keys are reduced.
    fn take_bias(&mut self, spec: &FwdSpec) {
        self.bias_stages = 1;
        match widest(spec) {
            // A second Q does not fit with rows of whole swizzles, such as those of D 72.
            ..=96 if tile_dim(spec.head_dim_qk, spec.dtype_qk) > 96 => self.lookahead = Lookahead::Off,
            ..=96 => {}
            128 => (self.block_n, self.wait_anchor, self.lookahead) = (128, 32, Lookahead::SparePiece),
            _ => {
                self.block_n = self.block_n.min(96);
                (self.lookahead, self.wait_anchor) = (Lookahead::Off, 0);
            }
        }
        // `skip_row_max` spills beside the bias above D 192, and with three warpgroups' 160 registers where a
        // mask cuts blocks.
        self.skip_row_max &= widest(spec) <= 192 && (self.block_m < 192 || spec.mask == MaskKind::Full);
    }

    /// Adjusts a tile for dropout as the only modifier: dropout is decided before the scores are known, which takes few
    /// more registers.
    ///
    /// Causal bf16 on an H200, TFLOP/s: D 64 152 with three warpgroups and 96 keys, 156 with lookahead, 178
    /// with two, 128 keys and no row-max reductions; D 128 275 with 96 keys, 278 with lookahead and 128, 292
    /// without row-max reductions.
    fn take_dropout(&mut self, spec: &FwdSpec) {
        let plain = *self;
        self.take_registers(spec);
        if let dim @ (64 | 128) = widest(spec) {
            (self.block_m, self.block_n, self.lookahead) = (128, 128, Lookahead::SecondQ);
            (self.wait_anchor, self.skip_row_max) = (dim / 4, plain.skip_row_max);
        }
    }
}
