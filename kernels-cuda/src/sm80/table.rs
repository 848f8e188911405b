//! Choice of a tile by the head dimensions and by a multiprocessor's resources.

use fmha_core::spec::{BiasKind, CodeKind, FwdSpec};
use fmha_core::{FwdProblem, VLayout};

use super::{
    LAG_LOG2, MOST_SHARES, Sm80Tile, is_whole_copies, is_whole_steps, most_copied, padded_dim, takes_tma,
    value_parts,
};
use crate::operands::{stores_vectors, strides};
use crate::split::price::{self, CONSTANTS, Keys, Walk};
use crate::{lists, split};

/// Limits of the device that a tile must fit, and the number of multiprocessors to fill.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Dynamic shared memory that one CTA can have, bytes. A multiprocessor has 1 KiB more, and spends 1 KiB
    /// on each CTA.
    pub smem_bytes: i32,
    /// Number of multiprocessors.
    pub num_sms: u32,
}

impl Room {
    /// Number of CTAs with this much shared memory that a multiprocessor holds.
    pub(crate) const fn ctas(self, smem_bytes: i32) -> i32 {
        (self.smem_bytes + 1024) / (smem_bytes + 1024)
    }
}

/// The tile for a problem that the kernel [`accepts`](super::accepts), on a device with these limits.
#[must_use]
pub fn choose_tile(problem: &FwdProblem, room: Room) -> Sm80Tile {
    let mut tile = own_tile(problem, room);
    if problem.cache.dtype.is_some() {
        let mut twin = problem.clone();
        twin.cache.dtype = None;
        tile.take_order_of(&own_tile(&twin, room), &FwdSpec::of(problem), room);
    }
    tile
}

/// The tile for a problem, without regard to other calls.
fn own_tile(problem: &FwdProblem, room: Room) -> Sm80Tile {
    if !problem.walks_lists() {
        return tile_of_rows(problem, room);
    }
    let mut tokens = lists::of_tokens(problem);
    let mut tile = tile_of_rows(&tokens, room);
    // With several tiles for a token's heads, the schedule treats each tile as a token.
    let blocks = problem.gqa_ratio().div_ceil(tile.block_m.unsigned_abs());
    tokens.dims.batch = tokens.dims.batch.saturating_mul(blocks);
    tokens.dims.num_heads_q = tokens.dims.num_heads_kv * problem.gqa_ratio().div_ceil(blocks);
    tile.pack_gqa = true;
    tile = deal(&tokens, tile, room);
    (tile.block_in_page, tile.fixed_parts) = (false, tile.split_keys > 0);
    // Strides are those of the call, not of the problem with one sequence per token.
    (tile.copy_bytes, tile.vector_store) = (copy_bytes(problem), stores_vectors(problem));
    tile
}

/// Rows of a tile that unites the lists of several tokens: a warp has sixteen, and computes the steps of their tokens.
const ROWS_OF_UNION: i32 = 64;

/// The tile whose rows are several tokens' and walk the union of their lists of blocks.
///
/// # Errors
/// What of the problem has no union.
pub fn united_tile(problem: &FwdProblem, room: Room) -> Result<Sm80Tile, String> {
    let spec = FwdSpec::of(problem);
    let size = lists::blocks_of_union(problem, ROWS_OF_UNION)?;
    let mut tile = table_tile(&spec, room, false, 0);
    (tile.block_m, tile.warps, tile.pack_gqa, tile.unites) = (ROWS_OF_UNION, 4, true, true);
    // Keys of a step that no list names are multiplied too.
    tile.block_n = tile.block_n.min(size.next_multiple_of(32).min(128).cast_signed());
    tile.fast_softcap &= problem.score.softcap.is_some_and(|cap| (1e-3..=64.0).contains(&cap));
    tile.place_blocks(problem);
    (tile.copy_bytes, tile.vector_store) = (copy_bytes(problem), stores_vectors(problem));
    tile.fill(&spec, room);
    Ok(tile)
}

/// Bytes of a copy: the most that divide all strides.
fn copy_bytes(problem: &FwdProblem) -> i32 {
    let divides = |&bytes: &i32| {
        strides(problem).all(|(name, _, stride)| is_whole_copies(problem, bytes, (name, stride)))
    };
    [16, 8, 4, 2].into_iter().filter(|&bytes| bytes <= most_copied(problem)).find(divides).unwrap_or(2)
}

/// Whether a block of K serves as V too: with lists, whose rows are gathered one by one.
fn shares_blocks(problem: &FwdProblem) -> bool {
    let dims = problem.dims;
    let whole_spans = dims.head_dim_qk.is_multiple_of(64) && dims.head_dim_v.is_multiple_of(64);
    let is_of_16_bits = !problem.stored_k().is_fp8() && !problem.dtypes.qk.is_fp8();
    problem.walks_lists() && problem.cache.v_in_k && whole_spans && is_of_16_bits
}

/// The tile for rows that walk the keys of their sequence, or of their list where each token is a sequence.
fn tile_of_rows(problem: &FwdProblem, room: Room) -> Sm80Tile {
    let spec = FwdSpec::of(problem);
    let dims = problem.dims;
    let mut tile = table_tile(&spec, room, shares_blocks(problem), lists::row_bytes(problem));
    if !problem.masks.is_empty() {
        // Masks as data are evaluated for the rows of a warp, so rows have one head, and sequences are not split.
        return Sm80Tile { stored: problem.stored_k(), ..tile };
    }
    tile = packed(problem, tile);
    if let Some(short) = short_tile(problem, tile, room) {
        tile = deal(problem, short, room);
    } else if rows_of_group(problem, &tile) <= MOST_SHARED_ROWS
        && i64::from(dims.seqlen_q) <= MOST_SHARED_QUERIES
        && tile.value_parts == 1
    {
        // More rows than a short query's use several tiles of 64, if sequences of different lengths can be divided
        // into shares.
        let shared = deal(problem, Sm80Tile { block_m: 64, warps: 4, ..tile }, room);
        if shared.split_keys > 0 {
            tile = shared;
        }
    }

    // For larger caps, 2 c / (1 + exp(2 y / c)) loses accuracy for y far below c: its error is some 3e-7 c.
    tile.fast_softcap &= problem.score.softcap.is_some_and(|cap| (1e-3..=64.0).contains(&cap));
    tile.place_blocks(problem);
    tile.copy_bytes = copy_bytes(problem);

    tile.vector_store = stores_vectors(problem);
    tile
}

/// The tile with the heads of a group packed, if that saves a tenth of the rows.
fn packed(problem: &FwdProblem, tile: Sm80Tile) -> Sm80Tile {
    let (ratio, seqlen_q) = (i64::from(problem.gqa_ratio()), i64::from(problem.dims.seqlen_q));
    let blocks = |rows: i64| (rows + i64::from(tile.block_m) - 1) / i64::from(tile.block_m);
    let pack_gqa = ratio > 1 && blocks(seqlen_q * ratio) * 10 <= blocks(seqlen_q) * ratio * 9;
    Sm80Tile { pack_gqa, stored: problem.stored_k(), ..tile }
}

/// Number of rows that share keys: the query rows of a head, or of a group whose heads are packed.
fn rows_of_group(problem: &FwdProblem, tile: &Sm80Tile) -> i64 {
    i64::from(problem.dims.seqlen_q) * if tile.pack_gqa { i64::from(problem.gqa_ratio()) } else { 1 }
}

/// A tile with fewer rows than the table's, just enough for a short query: 16 per warp.
fn short_tile(problem: &FwdProblem, table: Sm80Tile, room: Room) -> Option<Sm80Tile> {
    let spec = FwdSpec::of(problem);
    let rows = rows_of_group(problem, &table);
    let block_m = [16, 32, 64].into_iter().find(|&block_m| rows <= i64::from(block_m))?;
    if block_m >= table.block_m {
        return None;
    }
    let warps = (block_m / 16 * table.value_parts).min(table.warps);
    let mut tile = Sm80Tile { block_m, warps, ..table };
    // Whole spans only help with few rows: with more, products with the zeros beyond the head dimension take too
    // long.
    tile.whole_spans = block_m <= 32 && has_broken_spans(&spec, &tile);
    // A single warp converts an FP8 element in registers once for both of its groups of 16 rows.
    let one_warp = Sm80Tile { warps: 1, ..tile };
    if block_m == 32 && one_warp.reads_raw_blocks(&spec) {
        tile.warps = 1;
    }
    // Few warps wait for their gathers, so more CTAs with small blocks keep more gathers in flight.
    if tile.v_in_k && block_m <= 32 {
        tile.block_n = tile.block_n.min(32);
    }
    tile.fill(&spec, room);
    if tile.reads_raw_blocks(&spec) {
        tile.take_raw_blocks(&spec, room);
    }
    if block_m <= 32 && tile.value_parts == 1 && padded_dim(spec.head_dim_qk.max(spec.head_dim_v)) > 128 {
        tile.take_small_blocks(&spec, room);
    }
    Some(tile)
}

/// All ways to divide the keys of a short query's tile; empty if the query is not short.
#[must_use]
pub fn ways_of_few(problem: &FwdProblem, room: Room) -> Vec<Sm80Tile> {
    let table = packed(problem, default_tile(&FwdSpec::of(problem), room));
    short_tile(problem, table, room).map_or_else(Vec::new, |tile| ways(problem, tile, room))
}

/// Whether 16-bit rows end within a 128-byte line, so that the swizzle's spans are 32 or 64 bytes.
fn has_broken_spans(spec: &FwdSpec, tile: &Sm80Tile) -> bool {
    let dims = [spec.head_dim_qk, spec.head_dim_v];
    let is_of_16_bits = !spec.dtype_qk.is_fp8() && !spec.dtype_v.is_fp8() && !tile.stored.is_fp8();
    let is_plain = is_of_16_bits && spec.v_layout == VLayout::RowMajor && tile.value_parts == 1;
    is_plain && dims.iter().all(|&dim| (65..=256).contains(&dim)) && dims.iter().any(|dim| dim % 64 != 0)
}

/// The tile for long sequences of a spec.
///
/// A thread has 255 registers: with `r` groups of sixteen rows per warp O needs `r * head_dim_v / 2`, S `r *
/// block_n / 2`. Two groups per warp halve the reads of K and V from shared memory, which with one group take as
/// long as the products (an ldmatrix of 512 bytes feeds two products; either takes four clocks of an A100's
/// multiprocessor).
#[must_use]
pub fn default_tile(spec: &FwdSpec, room: Room) -> Sm80Tile {
    table_tile(spec, room, false, 0)
}

/// The tile for long sequences of a spec. `v_in_k`: a block of K serves as V. `row_bytes`: bytes of a key's row if
/// the cache has rows of bytes, otherwise 0.
fn table_tile(spec: &FwdSpec, room: Room, v_in_k: bool, row_bytes: i32) -> Sm80Tile {
    let widest = padded_dim(spec.head_dim_qk).max(padded_dim(spec.head_dim_v));
    let modifies = spec.softcap || spec.bias != BiasKind::None || spec.dropout || spec.code != CodeKind::None;
    // Candidates of (rows, keys, warps), best first. Score modifiers need registers.
    let candidates: &[(i32, i32, i32)] = match widest {
        ..=128 if modifies => &[(128, 64, 8), (64, 64, 4)],
        // Separate sums of P V, which FP8 needs, take registers: above 64, 128 keys or 32 rows per warp would
        // spill.
        ..=64 if spec.dtype_v.is_fp8() => &[(128, 64, 4), (64, 64, 4)],
        65..=128 if spec.dtype_v.is_fp8() => &[(128, 64, 8), (64, 64, 4)],
        ..=64 => &[(128, 128, 4), (128, 64, 4), (64, 64, 4)],
        65..=128 => &[(128, 64, 4), (64, 64, 4)],
        129..=192 => &[(128, 64, 8), (64, 48, 4)],
        193..=256 => &[(128, 64, 8), (64, 48, 4), (64, 32, 4)],
        // Two blocks fit in shared memory, even if they must be small: one is loaded while the other is multiplied.
        257.. if v_in_k => &[(64, 64, 4), (64, 32, 4), (32, 32, 2), (32, 16, 2), (16, 16, 1)],
        // Two or three warps have the same rows, and each a part of O's columns.
        _ => &[(64, 32, 4), (32, 32, 2), (32, 16, 2), (16, 16, 1)],
    };
    let columns_of_16_bits = spec.v_layout == VLayout::ColMajor && !spec.dtype_v.is_fp8();
    let value_parts = value_parts(spec.head_dim_v.unsigned_abs()).unwrap_or(1);
    let of = |&(block_m, block_n, warps): &(i32, i32, i32)| Sm80Tile {
        block_m,
        block_n,
        warps: warps * value_parts,
        value_parts,
        stages: 1,
        ctas: 1,
        // A column-major V with up to 128 dimensions spills 24 bytes if fragments are read one or two ahead.
        fragments_ahead: if columns_of_16_bits && (65..=128).contains(&widest) { 0 } else { 1 },
        // P of 8 bits needs its whole range, so the maximum may not lag.
        lazy_rescale_log2: if spec.dtype_v.is_fp8() { 0 } else { LAG_LOG2 },
        pack_gqa: false,
        fast_softcap: spec.softcap && spec.bias == BiasKind::None,
        vector_store: false,
        copy_bytes: 16,
        block_in_page: true,
        whole_spans: false,
        stored: spec.dtype_qk,
        split_keys: 0,
        fixed_parts: false,
        shares: 0,
        shares_a_cta: 1,
        converts_fp8: false,
        launches_merge: false,
        tma: false,
        v_in_k,
        row_bytes,
        unites: false,
        list_words: 0,
    };
    // Rows of bytes are converted into a separate block, so one block of them may be in flight meanwhile.
    let least_stages = if v_in_k && row_bytes == 0 { 2 } else { 1 };
    let fits = |tile: &Sm80Tile| {
        Sm80Tile { stages: least_stages, ..*tile }.smem_bytes(spec) <= room.smem_bytes
            && is_whole_steps(tile.block_n, spec.dtype_v)
    };
    let last = of(&candidates[candidates.len() - 1]);
    let mut tile = candidates.iter().map(of).find(fits).unwrap_or(last);
    tile.fill(spec, room);
    tile
}

impl Sm80Tile {
    /// Number of heads with tiles of their own: the heads of a group share tiles if they are packed.
    const fn heads(&self, problem: &FwdProblem) -> u32 {
        if self.pack_gqa { problem.dims.num_heads_kv } else { problem.dims.num_heads_q }
    }

    /// Description of this tile's work for the price of few queries.
    #[must_use]
    pub fn walk(&self, problem: &FwdProblem) -> Walk {
        let dims = problem.dims;
        let group = if self.pack_gqa { problem.gqa_ratio() } else { 1 };
        let row_blocks = dims.seqlen_q.saturating_mul(group).div_ceil(self.block_m.unsigned_abs().max(1));
        Walk {
            rates: CONSTANTS.sm80,
            tiles: self.heads(problem).saturating_mul(row_blocks),
            rows: self.block_m.unsigned_abs(),
            block_n: self.block_n.unsigned_abs(),
            ctas: self.ctas.unsigned_abs(),
            keys: Keys::of(self.split_keys, self.shares),
        }
    }

    /// Microseconds of few queries, by the [price].
    #[must_use]
    pub fn micros(&self, problem: &FwdProblem, room: Room) -> f64 {
        price::micros(problem, &self.walk(problem), room.num_sms)
    }

    /// Takes the properties that decide a row's bits, blocks of keys and parts, from the tile of the call on a
    /// 16-bit cache, so that both have equal bits (CONTRACT.md, "KV caches"); then uses as many stages and CTAs as
    /// fit.
    fn take_order_of(&mut self, twin: &Self, spec: &FwdSpec, room: Room) {
        (self.block_n, self.split_keys, self.shares) = (twin.block_n, twin.split_keys, twin.shares);
        if twin.shares > 0 {
            (self.block_m, self.warps, self.stages) = (twin.block_m, twin.warps, twin.stages);
            return self.take_ctas_of_shares(spec, room);
        }
        // The conversion of elements in registers is the bottleneck, not memory, so more warps with one block each are
        // better.
        let most = if self.reads_raw_blocks(spec) { 1 } else { self.stages.max(twin.stages) };
        let of = |stages| Self { stages, ..*self };
        let fits = |stages: &i32| of(*stages).smem_bytes(spec) <= room.smem_bytes;
        self.stages = (1..=most).rev().find(fits).unwrap_or(1);
        self.ctas = room.ctas(self.smem_bytes(spec)).clamp(1, self.ctas.max(1));
    }

    /// Sets the CTAs per multiprocessor to the number of shares or, if it holds fewer, to a number with which each
    /// CTA has equally many shares.
    fn take_ctas_of_shares(&mut self, spec: &FwdSpec, room: Room) {
        let num_sms = room.num_sms.max(1) as i32;
        let wanted = (self.shares / num_sms).max(1);
        let held =
            room.ctas(self.smem_bytes(spec)).clamp(1, MAX_REGISTERS / (32 * self.warps * LEAST_REGISTERS));
        self.shares_a_cta = (wanted + held - 1) / held;
        self.ctas = (wanted + self.shares_a_cta - 1) / self.shares_a_cta;
    }

    /// Sets blocks of 32 keys in one stage: wide rows with blocks of 64 keys need so many registers and so much
    /// code that FP8 with 196 sequences of 3000 keys and D 256 took 2500 us on an H200, with 32 keys 630; 16
    /// sequences of 4096 16-bit keys took 160 and 151.
    fn take_small_blocks(&mut self, spec: &FwdSpec, room: Room) {
        let warps = if self.block_m == 32 { 2 } else { 1 };
        (self.block_n, self.warps, self.stages) = (32, warps, 1);
        self.ctas = room.ctas(self.smem_bytes(spec)).clamp(1, 8 / warps);
    }

    /// Sets the shape for shares: small blocks and many CTAs, each of which waits for its own block.
    fn take_shape_of_shares(&mut self, spec: &FwdSpec, room: Room) {
        let widest = padded_dim(spec.head_dim_qk).max(padded_dim(spec.head_dim_v));
        let (block_n, warps, stages, a_multiprocessor) = match (self.block_m, widest) {
            (16, ..=64) => (64, 1, 1, 8),
            (16, _) => (32, 1, 1, 8),
            (32, ..=64) => (64, 2, 1, 6),
            (32, ..=128) => (32, 2, 1, 6),
            (32, _) => (32, 2, 1, 4),
            (_, ..=128) => (64, 4, 1, 3),
            _ => (32, 4, 2, 2),
        };
        (self.block_n, self.warps, self.stages) = (block_n, warps, stages);
        self.shares = a_multiprocessor * room.num_sms as i32;
        self.take_ctas_of_shares(spec, room);
    }

    /// Sets two small blocks, and as many warps as fit: conversion in registers takes time, which other warps hide.
    /// An H200, 16 sequences of 32768 keys in e4m3, us: 64 keys, one and two stages, 683 and 709; 32 keys and two
    /// or three stages 454 and 456.
    fn take_raw_blocks(&mut self, spec: &FwdSpec, room: Room) {
        (self.block_n, self.stages) = (self.block_n.min(32), 2);
        self.ctas = room.ctas(self.smem_bytes(spec)).clamp(1, 8);
    }

    /// Returns this tile with K and V loaded by TMA, if TMA can load them, the tile has 64 rows or more, and the
    /// barriers fit the shared memory. A CTA then has an extra warp, so one CTA of eight warps replaces two of
    /// four, which would leave a thread 200 registers. Nine warps leave 168, with which head dimensions above 192
    /// spill.
    #[must_use]
    pub fn by_tma(self, problem: &FwdProblem, room: Room) -> Option<Self> {
        let spec = FwdSpec::of(problem);
        let whole = self.split_keys == 0 && self.value_parts == 1 && self.copy_bytes == 16 && self.warps >= 4;
        if !whole || takes_tma(problem).is_err() || (self.ctas > 1 && self.block_m < 128) {
            return None;
        }
        let warps = if self.ctas > 1 { 8 } else { self.warps };
        if warps == 8 && spec.head_dim_qk.max(spec.head_dim_v) > 192 {
            return None;
        }
        let of = |stages| Self { tma: true, ctas: 1, warps, stages, fragments_ahead: 1, ..self };
        [2, 1].map(of).into_iter().find(|tile| tile.smem_bytes(&spec) <= room.smem_bytes)
    }

    /// Sets as many CTAs per multiprocessor as registers allow (two of four warps), and then as many stages, up to
    /// two, as fit: a second CTA's products overlap the first one's loads, while a second stage only starts loads
    /// earlier. Blocks of 128 keys have one: an H200's D 64 causal at 4096 keys 272 TFLOP/s, with two stages 266,
    /// in blocks of 64 keys 243.
    pub(super) fn fill(&mut self, spec: &FwdSpec, room: Room) {
        let by_registers = (8 / self.warps).max(1);
        let table = *self;
        let of = |stages| Self { stages, ..table }.smem_bytes(spec);
        self.ctas = by_registers.min(room.ctas(of(1))).max(1);
        self.stages = if self.block_n <= 64 && room.ctas(of(2)) >= self.ctas { 2 } else { 1 };
    }
}

/// Approximate number of parts of the longest sequence's keys if CTAs have equal shares. With some 700 parts a row, a
/// call of 3 sequences of 4/1 heads, 5 tokens and up to 35163 keys took 51 us, FlashAttention-3's 27.
const MOST_PARTS_IN_SHARES: u32 = 128;

/// Largest number of parts of a sequence's keys: two batches of a merging warp's loads.
const MOST_PARTS: u32 = 256;

/// Most rows of a kv head's group for which sequences of different lengths are divided into shares; the next constant
/// is the limit for queries.
const MOST_SHARED_ROWS: i64 = 512;
const MOST_SHARED_QUERIES: i64 = 32;

/// Registers of a multiprocessor; the next constant is the fewest per thread for a short query.
const MAX_REGISTERS: i32 = 65536;
const LEAST_REGISTERS: i32 = 128;

/// The tile with the cheapest way to divide a short query's keys.
fn deal(problem: &FwdProblem, tile: Sm80Tile, room: Room) -> Sm80Tile {
    let priced = ways(problem, tile, room).into_iter().map(|way| (way.micros(problem, room), way));
    price::cheapest(priced).unwrap_or(tile)
}

/// All ways to divide the keys of a tile of few queries: not at all, into parts of several lengths, and into equal
/// shares.
fn ways(problem: &FwdProblem, tile: Sm80Tile, room: Room) -> Vec<Sm80Tile> {
    let whole = Sm80Tile { split_keys: 0, shares: 0, shares_a_cta: 1, ..tile };
    let seqlen_k = problem.dims.seqlen_k;
    let block_n = tile.block_n.unsigned_abs();
    if !split::may_be_cut(problem, block_n) {
        return vec![whole];
    }
    let parts = price::keys_of_parts(seqlen_k, block_n, MOST_PARTS)
        .map(|keys| Sm80Tile { split_keys: keys.min(1 << 23).cast_signed(), ..whole });
    let shared = in_shares(problem, whole, room);
    [whole].into_iter().chain(parts).chain(shared).collect()
}

/// The tile whose CTAs have equal shares of all sequences' blocks, if possible.
fn in_shares(problem: &FwdProblem, tile: Sm80Tile, room: Room) -> Option<Sm80Tile> {
    let spec = FwdSpec::of(problem);
    let mut shared = tile;
    shared.take_shape_of_shares(&spec, room);
    // A row of the longest sequence has at most MOST_PARTS_IN_SHARES parts.
    let least = split::seen_keys(problem).div_ceil(MOST_PARTS_IN_SHARES);
    let blocks = least.div_ceil(shared.block_n.unsigned_abs()).max(1);
    // A power of two is used, so that few kernels serve all lengths.
    shared.split_keys = shared.block_n << blocks.ilog2();
    let fits = shared.value_parts == 1
        && !problem.walks_lists()
        && problem.dims.batch > 1
        && shared.smem_bytes(&spec) <= room.smem_bytes
        && shared.shares <= MOST_SHARES
        && is_whole_steps(shared.block_n, spec.dtype_v)
        && problem.dims.batch <= split::MOST_SCANNED
        && shared.cut().shares.is_some_and(|shares| shares.takes(problem, shared.block_n.unsigned_abs()));
    fits.then_some(shared)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use fmha_core::{DType, Dims, MaskKind};

    use super::*;

    const ROOMS: [Room; 4] = [
        Room { smem_bytes: 166_912, num_sms: 108 },
        Room { smem_bytes: 101_376, num_sms: 82 },
        Room { smem_bytes: 101_376, num_sms: 128 },
        Room { smem_bytes: 232_448, num_sms: 132 },
    ];

    #[test]
    fn the_table_s_tiles_fit_every_device() {
        for room in ROOMS {
            for qk in (16..=256).step_by(8) {
                for v in (16..=256).step_by(8) {
                    for (softcap, dropout) in [(false, false), (true, false), (true, true)] {
                        let plain = FwdSpec::plain(DType::F16, qk, MaskKind::Full);
                        let spec = FwdSpec { head_dim_v: v, softcap, dropout, ..plain };
                        let tile = default_tile(&spec, room);
                        tile.check().unwrap();
                        let bytes = tile.smem_bytes(&spec);
                        assert!(bytes <= room.smem_bytes, "{qk}/{v}: {bytes} of {room:?}, {tile:?}");
                        assert!(room.ctas(bytes) >= tile.ctas, "{qk}/{v}: {tile:?}");
                    }
                }
            }
            for (qk, v, parts) in [(512, 512, 2), (576, 512, 2), (576, 576, 3), (384, 384, 2), (320, 64, 1)] {
                let spec = FwdSpec { head_dim_v: v, ..FwdSpec::plain(DType::F16, qk, MaskKind::Full) };
                let tile = default_tile(&spec, room);
                tile.check().unwrap();
                assert!(tile.smem_bytes(&spec) <= room.smem_bytes, "{qk}/{v}: {room:?}, {tile:?}");
                assert_eq!(tile.value_parts, parts);
            }
        }
    }

    /// A problem with `tokens` tokens, each with 2048 listed keys, over latent rows of 576 elements.
    fn latent_lists(batch: u32, tokens: u32, heads: u32) -> FwdProblem {
        let dims = Dims::batch(batch).seqlens(tokens, 65536).heads(heads, 1).head_dims(576, 512);
        let mut problem = FwdProblem::batch(DType::Bf16, dims);
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        let lists = fmha_core::KeyLists::new(&problem, 2048);
        problem.lists(lists)
    }

    #[test]
    fn tiles_of_lists_fit_every_device_and_share_k_s_blocks() {
        for room in ROOMS {
            for heads in [1, 5, 16, 32, 64, 128] {
                let problem = latent_lists(1, 4096, heads);
                let (tile, spec) = (choose_tile(&problem, room), FwdSpec::of(&problem));
                assert!(tile.v_in_k && tile.pack_gqa && !tile.block_in_page && tile.shares == 0, "{tile:?}");
                assert!(tile.smem_bytes(&spec) <= room.smem_bytes, "{heads} heads, {room:?}: {tile:?}");
                assert!(room.ctas(tile.smem_bytes(&spec)) >= tile.ctas, "{heads} heads, {room:?}: {tile:?}");
                tile.check().unwrap();
                assert_eq!(tile.split_keys, 0, "many tokens fill the device");
            }
        }
        // One block's gather is in flight while another block's products are computed.
        for (room, block_n) in [(ROOMS[0], 32), (ROOMS[3], 64)] {
            let tile = choose_tile(&latent_lists(1, 4096, 128), room);
            assert_eq!((tile.block_m, tile.block_n, tile.stages), (64, block_n, 2), "{room:?}");
        }
        // The call has two pairs of tiles, so few that their lists are divided into parts.
        let few = choose_tile(&latent_lists(2, 1, 128), ROOMS[3]);
        assert!(few.split_keys > 0 && few.fixed_parts && 2048 / few.split_keys >= 4, "{few:?}");
        let schedule = few.schedule(&latent_lists(2, 1, 128)).unwrap();
        assert_eq!(
            schedule.num_tiles,
            2 * 2 * (2048_i32.div_euclid(few.split_keys) + i32::from(2048 % few.split_keys > 0))
        );
    }

    /// Keys for which [`split::is_never_cut`] returns true are never split: plans then promise batch invariance
    /// without being asked.
    #[test]
    fn keys_that_are_said_to_be_never_cut_are_cut_in_no_batch() {
        let mut never = 0;
        for (seqlen_q, ratio) in [(1, 1), (1, 8), (16, 4), (32, 1), (33, 1), (40, 4), (64, 1), (100, 2)] {
            for seqlen_k in [8, 100, 127, 128, 300, 500, 600, 5000] {
                for (batch, used) in [(1, false), (1, true), (7, false), (7, true), (300, true)] {
                    let dims =
                        Dims::batch(batch).seqlens(seqlen_q, seqlen_k).heads(2 * ratio, 2).head_dim(128);
                    let mut problem = FwdProblem::batch(DType::Bf16, dims);
                    problem.layout.seqused_k = used;
                    for room in ROOMS {
                        let tile = choose_tile(&problem, room);
                        let block_n = default_tile(&FwdSpec::of(&problem), room).block_n;
                        if tile.block_n == block_n && split::is_never_cut(&problem, block_n, false) {
                            never += 1;
                            assert_eq!(tile.split_keys, 0, "{dims:?} {room:?}");
                        }
                    }
                }
            }
        }
        assert!(never > 100, "{never}");
    }

    #[test]
    fn a_short_query_s_keys_are_cut_where_tiles_are_few() {
        let decode = |batch, seqlen_k| {
            let dims = Dims::batch(batch).seqlens(1, seqlen_k).heads(32, 8).head_dim(128);
            choose_tile(&FwdProblem::batch(DType::Bf16, dims), ROOMS[3])
        };
        let one = decode(1, 32768);
        assert!(one.pack_gqa && one.block_m == 16 && one.warps == 1, "{one:?}");
        assert!(one.split_keys > 0 && one.split_keys % one.block_n == 0, "{one:?}");
        assert_eq!(decode(1024, 32768).split_keys, 0);
        assert!(decode(1, 300).split_keys > 0);
        assert_eq!(decode(1, 150).split_keys, 0);
    }
}
