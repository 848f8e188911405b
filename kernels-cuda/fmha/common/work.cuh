// A tile of work: which rows of which sequence and head, and which key blocks they see.
//
// `tile` is any architecture's tile; of its fields block_m, block_n, cluster, cluster_heads and pack_gqa are read.
#pragma once
#include <fmha/common/part_keys.cuh>
#include <fmha/mask.h>
#include <fmha/seq.h>
#include <fmha/tile_schedule.h>

namespace fmha {

// Rank of this CTA in its cluster. The CTAs of a cluster have neighbouring query blocks of one head, or the same query
// block of neighbouring heads (`cluster_heads`).
template <auto tile>
FMHA_DEVICE int32_t cluster_rank() { return tile.cluster > 1 ? blockIdx.x % tile.cluster : 0; }

// The query of a row: with packed heads a row is (query, head of the group).
template <auto tile>
FMHA_DEVICE int32_t query_of(const FwdParams& p, int32_t row) {
  return tile.pack_gqa ? row / p.gqa_ratio : row;
}

// Whether packed heads leave rows of a tile unused: a tile has whole groups of heads, and its other rows are padding.
template <auto tile>
FMHA_DEVICE constexpr bool whole_groups() {
  if constexpr (requires { tile.whole_groups; }) {
    return tile.whole_groups;
  } else if constexpr (requires { tile.unites; }) {
    return tile.unites;
  } else {
    return false;
  }
}

// Number of a tile's rows that exist in the sequence.
template <auto tile>
FMHA_DEVICE int32_t rows_of_tile(const FwdParams& p) {
  return whole_groups<tile>() ? tile.block_m / p.gqa_ratio * p.gqa_ratio : tile.block_m;
}

// The next tile of one CTA. The schedule role computes it once for all roles.
struct Work {
  int32_t num_blocks;   // key blocks, at least 1; 0: there is no more work
  int32_t i_batch, i_head, i_head_kv;
  int32_t first_row;    // of the tile; with packed heads a row is (query, head of the group)
  int32_t storage_batch, q_row, k_row, seqlen_q, seqlen_k;
  int32_t lo, hi, sink_columns;
  int32_t last_block;   // blocks go down from this one,
  int32_t num_band_blocks;    // this many,
  int32_t last_sink_block;    // then down from this one
  int32_t num_hidden;   // of the blocks, from the first, so many only the cluster's other CTA sees
  int32_t first_dirty;  // rows of the first V block from here on are to be zeroed; block_n: none
  int32_t part;         // of the keys, in the order in which the merge finds them; shown_blocks.cuh says what lists have
};
static_assert(sizeof(Work) == kWorkBytes, "Work: host and device disagree");

// Keys of a part of the longest sequence in split-KV, where a tile sees one part of its sequence's keys; 0: it sees
// all of them, as every tile of an architecture without this field.
template <auto tile>
FMHA_DEVICE constexpr int split_keys() {
  if constexpr (requires { tile.split_keys; }) {
    return tile.split_keys;
  } else {
    return 0;
  }
}

// Split-KV in parts of `split_keys` keys of every sequence, whatever the longest's length, so that a row's bits do
// not depend on the batch around it; else parts follow the longest sequence.
template <auto tile>
FMHA_DEVICE constexpr bool fixed_parts() {
  if constexpr (requires { tile.fixed_parts; }) {
    return tile.fixed_parts;
  } else {
    return false;
  }
}

// Split-KV in parts that end where CTAs' equal shares of all tiles' blocks do (shares.cuh).
template <auto tile>
FMHA_DEVICE constexpr bool in_shares() {
  if constexpr (requires { tile.shares; }) {
    return tile.shares > 0;
  } else {
    return false;
  }
}

// Number of parts into which the longest sequence's keys are split.
template <auto tile>
FMHA_DEVICE int32_t most_parts(const FwdParams& p) { return max(ceil_div(p.seqlen_k, split_keys<tile>()), 1); }

// Keys of a part of a sequence.
template <auto tile>
FMHA_DEVICE int32_t part_keys(const FwdParams& p, int32_t seqlen_k) {
  if constexpr (fixed_parts<tile>()) {
    return split_keys<tile>();
  } else {
    return keys_of_a_part(seqlen_k, most_parts<tile>(p), tile.block_n);
  }
}

// The keys of a part, below `seqlen_k`.
template <auto tile>
FMHA_DEVICE Range keys_of_part(const FwdParams& p, int32_t part, int32_t seqlen_k) {
  const int32_t keys = part_keys<tile>(p, seqlen_k);
  return {min(part * keys, seqlen_k), min((part + 1) * keys, seqlen_k)};
}

// Range of keys that a tile processes: those of its part, and it reads no others.
template <auto tile>
FMHA_DEVICE Range keys_of_work(const FwdParams& p, const Work& work) {
  if constexpr (split_keys<tile>() == 0) {
    return {0, work.seqlen_k};
  } else if constexpr (in_shares<tile>()) {
    const int32_t end = (work.last_block + 1) * tile.block_n;
    return {max(end - work.num_band_blocks * tile.block_n, 0), min(end, work.seqlen_k)};
  } else {
    return keys_of_part<tile>(p, work.part, work.seqlen_k);
  }
}

// The mask of a tile's rows.
template <FwdSpec spec>
using MaskOf = KnownMask<spec.mask, spec.sink_columns>;
template <FwdSpec spec>
FMHA_DEVICE MaskOf<spec> mask_of(const Work& work, int32_t seqlen_k) {
  return {{work.lo, work.hi, work.sink_columns}, seqlen_k};
}

// The i-th key block of a tile.
FMHA_DEVICE int32_t block_at(const Work& work, int32_t i) {
  return i < work.num_band_blocks ? work.last_block - i : work.last_sink_block - (i - work.num_band_blocks);
}

// The end of the keys that some query of a sequence sees.
FMHA_DEVICE int32_t end_of_seen_keys(const MaskBand& band, int32_t seqlen_q, int32_t seqlen_k) {
  return min(seqlen_k, seqlen_q + band.hi);
}

// Whether a mask can hide a block from one CTA of a cluster and show it to the other.
template <FwdSpec spec, auto tile>
FMHA_DEVICE constexpr bool can_hide_blocks() {
  return tile.cluster > 1 && !tile.cluster_heads && spec.mask != MaskKind::Full && !spec.sink_columns;
}

// Rows of a tile's first V block, `block`, from which on no query of the sequence sees a key. Beyond the tensor, in
// block -1 too, TMA has put zeros.
template <FwdSpec spec, auto tile>
FMHA_DEVICE int32_t first_dirty_of(const FwdParams& p, const Work& work, int32_t block) {
  const int32_t live_end = end_of_seen_keys({work.lo, work.hi, work.sink_columns}, work.seqlen_q, work.seqlen_k);
  const bool zeros_follow = spec.kv_layout == KvKind::Strided && !p.seqused_k && live_end == work.seqlen_k;
  return zeros_follow || work.last_block < 0 ? tile.block_n : clamp(live_end - block * tile.block_n, 0, tile.block_n);
}

// Coordinates of a tile: its sequence, its head (the kv head where heads are packed, the pair of heads in a cluster of
// two), and its block of rows.
struct TileAt {
  int32_t i_batch, head, m_block;
};

// Computes the work of a tile. `own` is the range of keys that it processes: a part of the sequence's keys, or all of
// them.
template <FwdSpec spec, auto tile>
FMHA_DEVICE Work resolve_rows(const FwdParams& p, const TileAt& at, const Range& own) {
  Work work;
  constexpr int heads_at_once = tile.cluster_heads ? tile.cluster : 1;
  work.i_batch = at.i_batch;
  work.part = 0;
  work.i_head = at.head * heads_at_once + (tile.cluster_heads ? cluster_rank<tile>() : 0);
  work.i_head_kv = tile.pack_gqa ? work.i_head : work.i_head / p.gqa_ratio;
  if (tile.pack_gqa) work.i_head *= p.gqa_ratio;

  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, work.i_batch);
  work.storage_batch = span.storage_batch;
  work.q_row = span.q_row;
  work.k_row = span.k_row;
  work.seqlen_q = span.seqlen_q;
  work.seqlen_k = span.seqlen_k;
  // The CTAs of a cluster walk the same key blocks: those that any row of the cluster sees.
  const int32_t cluster_rows = rows_of_tile<tile>(p) * (tile.cluster_heads ? 1 : tile.cluster);
  const int32_t cluster_row = at.m_block * cluster_rows;
  work.first_row = cluster_row + (tile.cluster_heads ? 0 : cluster_rank<tile>() * tile.block_m);
  work.num_blocks = 0;
  const int32_t num_rows = span.seqlen_q * (tile.pack_gqa ? p.gqa_ratio : 1);
  if (cluster_row >= num_rows) return work;

  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
  const int32_t last_row = min(cluster_row + cluster_rows, num_rows) - 1;
  const Range queries = {query_of<tile>(p, cluster_row), query_of<tile>(p, last_row) + 1};
  Range keys = k_range(band, queries, span.seqlen_k);
  if constexpr (split_keys<tile>() > 0) {
    static_assert(!spec.sink_columns && split_keys<tile>() % tile.block_n == 0, "a part is whole blocks of the band's");
    // A part without visible keys writes nothing, since the merge computes which parts a row sees and reads no others.
    // A row that sees no key has the first part. With equal shares the merge reads all parts of a tile.
    if (!in_shares<tile>() && own.begin > 0 && own.begin >= keys.end) return work;
    keys = {max(keys.begin, own.begin), min(keys.end, own.end)};
  }
  const Range sinks = spec.sink_columns ? sink_range(band, queries, span.seqlen_k) : Range{0, 0};
  const int32_t first_block = keys.begin / tile.block_n;
  work.lo = band.lo;
  work.hi = band.hi;
  work.sink_columns = band.sink_columns;
  work.last_block = ceil_div(keys.end, tile.block_n) - 1;
  work.num_band_blocks = keys.empty() ? 0 : work.last_block + 1 - first_block;
  // Blocks inside the band show their sink columns anyway, so the separate sink blocks end before the band.
  work.last_sink_block = ceil_div(sinks.end, tile.block_n) - 1;
  if (work.num_band_blocks > 0) work.last_sink_block = min(work.last_sink_block, first_block - 1);
  work.num_blocks = work.num_band_blocks + work.last_sink_block + 1;
  if (work.num_blocks == 0) {  // no key at all: one block outside the tensor, zeros that are hidden
    work.num_blocks = work.num_band_blocks = 1;
    work.last_block = -1;
    if constexpr (split_keys<tile>() > 0) {
      // A part whose keys are all hidden still has one block.
      if (span.seqlen_k > 0) work.last_block = own.begin / tile.block_n;
    }
  }

  work.num_hidden = 0;
  if constexpr (can_hide_blocks<spec, tile>()) {
    const int32_t own_last = query_of<tile>(p, work.first_row + tile.block_m - 1);
    const int32_t own_blocks = ceil_div(row_range(band, own_last, span.seqlen_k).end, tile.block_n);
    work.num_hidden = clamp(work.last_block + 1 - own_blocks, 0, work.num_blocks - 1);
  }

  work.first_dirty = first_dirty_of<spec, tile>(p, work, block_at(work, 0));
  return work;
}

// Resolves tile `index` of the order; num_blocks is 0 if its sequence does not have these rows.
template <FwdSpec spec, auto tile>
FMHA_DEVICE Work resolve_tile(const FwdParams& p, const TileSchedule& schedule, int32_t index) {
  const int32_t group_tiles = schedule.heads_per_l2_group * schedule.num_m_blocks;
  const int32_t group = index / group_tiles, within = index - group * group_tiles;
  const int32_t first_head = group * schedule.heads_per_l2_group;
  const int32_t num_heads = min(schedule.heads_per_l2_group, schedule.num_heads - first_head);
  const int32_t i_m = within / num_heads;
  int32_t head = first_head + within - i_m * num_heads;
  int32_t part = 0;
  if constexpr (split_keys<tile>() > 0) {
    const int32_t num_parts = most_parts<tile>(p), head_and_part = head;
    head = head_and_part / num_parts;
    part = head_and_part - head * num_parts;
  }
  const int32_t m_block = schedule.first_m_block + (spec.mask == MaskKind::Full ? i_m : schedule.num_m_blocks - 1 - i_m);

  constexpr int heads_at_once = tile.cluster_heads ? tile.cluster : 1;
  const int32_t heads = (tile.pack_gqa ? p.num_heads_kv : p.num_heads_q) / heads_at_once, i_batch = head / heads;
  const TileAt at = {i_batch, head - i_batch * heads, m_block};
  if constexpr (split_keys<tile>() == 0) {
    return resolve_rows<spec, tile>(p, at, {});
  } else {
    const int32_t seqlen_k = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch).seqlen_k;
    const Range own = keys_of_part<tile>(p, part, seqlen_k);
    Work work;
    if (part > 0 && own.empty()) {
      work.num_blocks = 0;
    } else {
      work = resolve_rows<spec, tile>(p, at, own);
    }
    work.part = part;
    return work;
  }
}

}  // namespace fmha
