// The order of tiles among CTAs, and of query blocks within a tile.
#pragma once
#include <fmha/bwd.h>
#include <fmha/common/seen_keys.cuh>
#include <fmha/mask.h>
#include <fmha/seq.h>
#include <fmha/sm90/bwd/dq/sums.cuh>

namespace fmha::sm90::bwd {

// Query blocks of a tile, one query head of the group after another.
struct QueryBlocks {
  Range range;
  int32_t start, end_head;
  int32_t i_head, current;
  bool is_downward;  // from the last one to the first

  FMHA_DEVICE int32_t count() const { return (range.end - range.begin) * (end_head - i_head); }  // before any advance
  FMHA_DEVICE bool more() const { return i_head < end_head; }
  FMHA_DEVICE void advance() {
    if (is_downward) {
      current = (current == range.begin ? range.end : current) - 1;
    } else if (++current == range.end) {
      current = range.begin;
    }
    if (current == start) ++i_head;
  }
};
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE QueryBlocks query_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work,
                                     const EveryKey& = {}) {
  const int32_t num_heads = num_query_heads<spec, tile>(p, schedule, work.span);
  const int32_t first_head = first_query_head<spec, tile>(p, schedule, work);
  const bool none = work.q_blocks.empty();
  int32_t start = work.q_blocks.begin;
  // Key blocks start at different query blocks, so that their CTAs do not all wait for one another at the first one.
  if constexpr ((has_semaphores<spec, tile>() || is_ordered<spec>()) && spec.fwd.mask == MaskKind::Full) {
    if (!none) {
      const Stagger stagger = stagger_of<spec, tile>(schedule, work);
      start += (work.key_block - stagger.first) * stagger.stride;
    }
  }
  bool is_downward = false;
  if constexpr (is_ordered_behind_mask<spec>()) {
    is_downward = goes_upward<spec, tile>(schedule, work);
    if (is_downward) start = work.q_blocks.end - 1;
  }
  return {work.q_blocks, start, none ? first_head : first_head + num_heads, first_head, start, is_downward};
}

// Tile `index` of the order: L2 head groups; in a group the key blocks with the most queries first (a mask leaves
// them to the first key blocks), and for each key block all heads. Ordered additions behind a mask have a launch
// order of their own.
// `is_listed`: the main kernel walks lists. `keys`: which keys queries see; with lists `q_blocks` says only whether
// there are blocks.
template <BwdSpec spec, Sm90BwdTile tile, class Keys = EveryKey, bool is_listed = Keys::has_tile_list>
FMHA_DEVICE Work resolve_work(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index,
                              const Keys& keys = {}) {
  const int32_t num_key_blocks = schedule.num_key_blocks / cluster_size(tile), i_cluster = index / cluster_size(tile);
  const int32_t group_tiles = schedule.heads_per_l2_group * num_key_blocks;
  const int32_t group = i_cluster / group_tiles, within = i_cluster - group * group_tiles;
  const int32_t first_head = group * schedule.heads_per_l2_group;
  const int32_t num_heads = min(schedule.heads_per_l2_group, schedule.num_heads - first_head);
  const int32_t i_block = within / num_heads;
  int32_t head = first_head + within - i_block * num_heads, i_part = 0;
  int32_t nth_block = i_block;
  bool is_upward = true;
  if constexpr (launches_in_order<spec, tile>() && is_listed) {
    const Place place = place_by_lists(schedule, index, num_key_blocks, p.fwd.batch, p.fwd.num_heads_kv);
    head = place.head;
    nth_block = place.nth_block;
    is_upward = place.is_upward;
  } else if constexpr (launches_in_order<spec, tile>()) {
    const int32_t parts = num_parts<tile>(schedule), parts_together = tile.head_parts ? schedule.parts_together : 1;
    const Place place = place_in_order(schedule, i_cluster, num_key_blocks, p.fwd.batch,
                                       p.fwd.num_heads_kv * parts / parts_together, parts_together);
    head = place.head;
    nth_block = place.nth_block;
    is_upward = place.is_upward;
  }
  // `head` counts parts of kv heads where each kv head is divided into parts.
  if constexpr (tile.head_parts) {
    const int32_t part = head;
    head = part / num_parts<tile>(schedule);
    i_part = part - head * num_parts<tile>(schedule);
  }
  const int32_t i_batch = head / p.fwd.num_heads_kv;
  Work work;
  work.i_part = i_part;
  work.i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  work.span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  if constexpr (has_own_parts<spec, tile>()) {
    if (i_part >= num_head_parts<spec, tile>(schedule, work.span)) work.span.seqlen_k = 0;
  }
  work.key_block = is_upward ? nth_block : num_key_blocks - 1 - nth_block;
  const int32_t cluster_key = work.key_block * cluster_keys(tile);
  const int32_t first_key = cluster_key + (index - i_cluster * cluster_size(tile)) * tile.block_n;
  work.band = resolve_band(p.fwd.mask, work.span.seqlen_q, work.span.seqlen_k);
  work.keys = {first_key, min(first_key + tile.block_n, work.span.seqlen_k)};
  work.cluster_keys = {cluster_key, min(cluster_key + cluster_keys(tile), work.span.seqlen_k)};
  work.q_blocks = {0, 0};
  if (!work.cluster_keys.empty()) {
    const Range queries = query_range(work.band, work.cluster_keys, work.span.seqlen_q);
    if (!queries.empty()) work.q_blocks = {queries.begin / tile.block_m, ceil_div(queries.end, tile.block_m)};
    if constexpr (tile.head_parts) {
      // Parts by query blocks have the same bounds for all key blocks, so that each query block belongs to one part.
      const int32_t q_parts = schedule.num_query_parts, i_q_part = i_part % q_parts;
      const int32_t num_blocks = ceil_div(work.span.seqlen_q, tile.block_m);
      work.q_blocks.begin = max(work.q_blocks.begin, num_blocks * i_q_part / q_parts);
      work.q_blocks.end = min(work.q_blocks.end, num_blocks * (i_q_part + 1) / q_parts);
    }
  }
  if constexpr (Keys::has_tile_list) {
    if (!work.q_blocks.empty()) work.q_blocks = {0, query_blocks<spec, tile>(p, schedule, work, keys).more()};
  } else {
    work.uncut = uncut_queries<spec, tile>(work);
  }
  return work;
}

// Number of a query block's first row in `lse_log2`, `delta` and the sums of dQ.
template <Sm90BwdTile tile>
FMHA_DEVICE int64_t first_row_of(const BwdParams& p, const Work& work, const QueryBlocks& blocks) {
  return stats_offset(p, work.span, blocks.i_head, blocks.current * tile.block_m);
}

}  // namespace fmha::sm90::bwd
