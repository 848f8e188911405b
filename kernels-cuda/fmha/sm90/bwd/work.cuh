// A tile of the backward: a key block of one kv head, and the query blocks that see it.
#pragma once
#include <fmha/bwd.h>
#include <fmha/mask.h>
#include <fmha/ptx/grid.cuh>
#include <fmha/seq.h>
#include <fmha/sm90/bwd/config.cuh>

namespace fmha::sm90::bwd {

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_part;                // of the kv head's query heads, where tiles share them (`head_parts`)
  int32_t i_head_kv, key_block;  // the block counted in those of clusters, whose CTAs walk the same query blocks
  Range keys;          // of the sequence; empty: the sequence has no such block
  Range cluster_keys;  // those of all CTAs of the cluster
  Range q_blocks;      // those with a query that sees one of the cluster's keys
  Range uncut;         // first queries of a consumer's columns that see all keys of a whole block
};

// Of the keys of the cluster's other CTA, in the sequence.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t first_key_of_other(const Work& work) {
  return work.keys.begin + (cluster_rank(tile) == 0 ? tile.block_n : -tile.block_n);
}

// Calls `run` for each tile of this CTA: its own, and where CTAs are persistent those that the load role claims. Of each
// warp `signals` is true in one lane of those that call.
template <Sm90BwdTile tile, class Shared, class Run>
FMHA_DEVICE void for_each_tile(const Sm90BwdSchedule& schedule, Shared& smem, bool signals, Run run) {
  if constexpr (!tile.persistent && tile.split_dims && tile.direct_dq) {
    // Once: a loop, since ptxas spills without one (0 bytes and 300).
#pragma unroll 1
    for (int32_t index = blockIdx.x; index < schedule.num_tiles; index += gridDim.x) run(index);
  } else if constexpr (!tile.persistent) {
    run(int32_t(blockIdx.x));
  } else {
    Slot<kClaimSlots> slot;
    while (true) {
      ptx::mbarrier_wait_parity(smem.claim_full[slot.index], slot.phase);
      const int32_t index = smem.claims[slot.index];
      __syncwarp(__activemask());
      ptx::mbarrier_arrive_if(smem.claim_empty[slot.index], signals);
      if (index >= schedule.num_tiles) return;
      run(index);
      slot.advance();
    }
  }
}

// From a tile's keys alone, so that a step has one comparison for it: as `block_class` finds out, some forty instructions,
// with nothing under way beside them.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE Range uncut_queries(const Work& work) {
  if (work.keys.end - work.keys.begin < tile.block_n) return {0, 0};
  Range uncut = {0, kUnboundedHi};
  if constexpr (spec.fwd.mask != MaskKind::Full) uncut.begin = work.keys.end - 1 - work.band.hi;
  if constexpr (spec.fwd.mask == MaskKind::Band) {
    const int32_t last = work.keys.begin - work.band.lo;  // the last query that still sees the first key
    const bool seen_by_all = last >= work.span.seqlen_q - 1 || work.keys.end <= work.band.sink_columns;
    if (!seen_by_all) uncut.end = last - num_columns(tile) + 2;
  }
  return uncut;
}

// Whether key blocks take turns at the sums of dQ.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool takes_turns() {
  return spec.deterministic;
}
// Whether who comes first to a query block stores its dQ, so that nobody has to put zeros there before.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr bool counts_blocks() {
  return takes_turns<spec>() || tile.first_stores;
}
template <BwdSpec spec>
FMHA_DEVICE constexpr bool takes_turns_masked() {
  return takes_turns<spec>() && spec.fwd.mask != MaskKind::Full;
}

// A key block of a kv head, the heads of all sequences counted.
struct Place {
  int32_t head, key_block;
};

// The order of turns with a mask: head after head, of each the last key block first, since a query block's key blocks add in
// that order and each begins at its diagonal, a step behind its successor. The longest of a head is then its last, and so
// would be the launch's. So every eighth kv head goes the other way, its key blocks from the first one on and its queries
// from the last one down, and these heads come at the end, side by side: CTAs get there one by one, as those turns want it,
// and the shortest are the last. TFLOP/s, causal, S 8192: D 128 506 to 525, D 256 463 to 487.
constexpr int32_t kUpwardPeriod = 8;
FMHA_DEVICE bool goes_upward(int32_t i_head_kv) { return i_head_kv % kUpwardPeriod == kUpwardPeriod - 1; }
FMHA_DEVICE Place place_in_turns(int32_t index, int32_t num_key_blocks, int32_t batch, int32_t num_heads_kv) {
  const int32_t upward = num_heads_kv / kUpwardPeriod, downward = num_heads_kv - upward;  // of a sequence
  const int32_t within = index - batch * downward * num_key_blocks;
  if (within < 0) {
    const int32_t i_head = index / num_key_blocks, i_batch = i_head / downward, nth = i_head - i_batch * downward;
    const int32_t head = i_batch * num_heads_kv + nth + nth / (kUpwardPeriod - 1);
    return {head, num_key_blocks - 1 - (index - i_head * num_key_blocks)};
  }
  const int32_t side_by_side = batch * upward, key_block = within / side_by_side;
  const int32_t i_head = within - key_block * side_by_side, i_batch = i_head / upward, nth = i_head - i_batch * upward;
  return {i_batch * num_heads_kv + nth * kUpwardPeriod + kUpwardPeriod - 1, key_block};
}

// Tile `index` of the order: L2 head groups; in a group the key blocks with the most queries first, which masks leave to the
// first ones, every head's in turn. Turns with a mask have an order of their own.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE Work resolve_work(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index) {
  const int32_t num_key_blocks = schedule.num_key_blocks / tile.cluster, i_cluster = index / tile.cluster;
  const int32_t group_tiles = schedule.heads_per_l2_group * num_key_blocks;
  const int32_t group = i_cluster / group_tiles, within = i_cluster - group * group_tiles;
  const int32_t first_head = group * schedule.heads_per_l2_group;
  const int32_t num_heads = min(schedule.heads_per_l2_group, schedule.num_heads - first_head);
  const int32_t i_block = within / num_heads;
  int32_t head = first_head + within - i_block * num_heads, i_part = 0;
  if constexpr (tile.head_parts) {
    const int32_t part = head;
    head = part / schedule.num_head_parts;
    i_part = part - head * schedule.num_head_parts;
  }
  int32_t key_block = i_block;
  if constexpr (takes_turns_masked<spec>()) {
    const Place place = place_in_turns(i_cluster, num_key_blocks, p.fwd.batch, p.fwd.num_heads_kv);
    head = place.head;
    key_block = place.key_block;
  }
  const int32_t cluster_key = key_block * cluster_keys(tile);
  const int32_t first_key = cluster_key + (index - i_cluster * tile.cluster) * tile.block_n;
  const int32_t i_batch = head / p.fwd.num_heads_kv;
  Work work;
  work.i_part = i_part;
  work.i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  work.key_block = key_block;
  work.span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  work.band = resolve_band(p.fwd.mask, work.span.seqlen_q, work.span.seqlen_k);
  work.keys = {first_key, min(first_key + tile.block_n, work.span.seqlen_k)};
  work.cluster_keys = {cluster_key, min(cluster_key + cluster_keys(tile), work.span.seqlen_k)};
  work.q_blocks = {0, 0};
  if (!work.cluster_keys.empty()) {
    const Range queries = query_range(work.band, work.cluster_keys, work.span.seqlen_q);
    if (!queries.empty()) work.q_blocks = {queries.begin / tile.block_m, ceil_div(queries.end, tile.block_m)};
  }
  work.uncut = uncut_queries<spec, tile>(work);
  return work;
}

// Turns at the sums of dQ, so that they have one order. Each query block's turns are counted in memory; a key block adds
// when those before it have. Nobody waits for a CTA that cannot be running: the order is such that CTAs that start
// together meet at no block.
//
// With a mask, a query block's key blocks add from the last to the first, or in heads that go upward from the first to the
// last, and are launched so (`place_in_turns`). Without one, key blocks begin at query blocks that are `stride`
// apart, in groups of CTAs that run at a time (as DASH shifts them: arXiv 2601.21824).
struct Turns {
  int32_t first, size, stride;  // of the key block's group; stride 0: all begin at the first query block
};
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE Turns turns_of(const Sm90BwdSchedule& schedule, const Work& work) {
  // From the sequence's own length, so that its bits do not depend on the batch.
  const int32_t num_blocks = ceil_div(work.span.seqlen_k, cluster_keys(tile));
  const int32_t group = ceil_div(num_blocks, ceil_div(num_blocks, schedule.num_sms / tile.cluster));
  const int32_t first = work.key_block / group * group, size = min(group, num_blocks - first);
  return {first, size, (work.q_blocks.end - work.q_blocks.begin) / size};
}

// How many key blocks add to a query block before this one does.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t turn_at(const Sm90BwdSchedule& schedule, const Work& work, int32_t block) {
  if constexpr (takes_turns_masked<spec>()) {
    const int32_t first_query = block * tile.block_m;
    const Range queries = {first_query, min(first_query + tile.block_m, work.span.seqlen_q)};
    // As query_range has it, seen from the queries: nobody waits for a turn that nobody takes.
    const bool has_width = work.band.lo <= work.band.hi;
    const Range keys = has_width ? k_range(work.band, queries, work.span.seqlen_k) : Range{0, 0};
    const int32_t band_end = keys.empty() ? 0 : ceil_div(keys.end, cluster_keys(tile));
    const int32_t band_begin = keys.empty() ? 0 : keys.begin / cluster_keys(tile);
    // Sink columns before the band.
    const int32_t sink_end = has_width ? sink_range(work.band, queries, work.span.seqlen_k).end
                                       : max(min(work.band.sink_columns, queries.end + work.band.hi), 0);
    int32_t sinks = ceil_div(sink_end, cluster_keys(tile));
    if (!keys.empty()) sinks = min(sinks, band_begin);
    // Of the key blocks that add, from the first one on.
    const bool in_band = !keys.empty() && work.key_block >= band_begin;
    const int32_t nth = in_band ? sinks + work.key_block - band_begin : work.key_block;
    return goes_upward(work.i_head_kv) ? nth : sinks + band_end - band_begin - 1 - nth;
  } else {
    const Turns turns = turns_of<spec, tile>(schedule, work);
    const int32_t member = work.key_block - turns.first;
    if (turns.stride == 0) return work.key_block;
    // Members up to `begun` have come by this block when the others have yet to wrap round.
    const int32_t begun = min((block - work.q_blocks.begin) / turns.stride, turns.size - 1);
    return turns.first + (member <= begun ? begun - member : begun + turns.size - member);
  }
}

// The query blocks of a tile, one query head of the group after another.
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
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t num_query_heads(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  return tile.head_parts ? p.fwd.gqa_ratio / schedule.num_head_parts : p.fwd.gqa_ratio;
}
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t first_query_head(const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work) {
  return work.i_head_kv * p.fwd.gqa_ratio + work.i_part * num_query_heads<tile>(p, schedule);
}
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE QueryBlocks query_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work) {
  const int32_t num_heads = num_query_heads<tile>(p, schedule), first_head = first_query_head<tile>(p, schedule, work);
  const bool none = work.q_blocks.empty();
  int32_t start = work.q_blocks.begin;
  if constexpr (counts_blocks<spec, tile>() && spec.fwd.mask == MaskKind::Full) {
    if (!none) {
      const Turns turns = turns_of<spec, tile>(schedule, work);
      start += (work.key_block - turns.first) * turns.stride;
    }
  }
  bool is_downward = false;
  if constexpr (takes_turns_masked<spec>()) {
    is_downward = goes_upward(work.i_head_kv);
    if (is_downward) start = work.q_blocks.end - 1;
  }
  return {work.q_blocks, start, none ? first_head : first_head + num_heads, first_head, start, is_downward};
}

// A block's first row among those of `lse_log2`, `delta` and the sums of dQ; and where its turns are counted.
template <Sm90BwdTile tile>
FMHA_DEVICE int64_t first_row_of(const BwdParams& p, const Work& work, const QueryBlocks& blocks) {
  return stats_offset(p, work.span, blocks.i_head, blocks.current * tile.block_m);
}
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t* turns_of_block(const BwdParams& p, int64_t first_row) {
  return p.turns + first_row / tile.block_m;
}

// Whether rows may have to be computed again: a mask hides a key from some queries of a block and not from others, and
// through the tensor cores 0 times its infinity, or that of a query, reaches all.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool repairs() {
  return spec.fwd.mask != MaskKind::Full;
}

// Every launch starts while the one before it ends, and waits here for all of it before it touches memory.
FMHA_DEVICE void wait_for_launch_before() {
  ptx::launch_dependents();
  ptx::wait_for_grids_before();
}

// What is not finite of dQ, a number to each query block of a head; before them those of the consumer warps of each tile.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t* suspect_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  return p.suspects + int64_t(schedule.num_tiles) * num_consumer_warps(tile);
}

FMHA_DEVICE int32_t num_q_blocks_of_all(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  return schedule.num_q_blocks * p.fwd.num_heads_q * p.fwd.batch;
}

// With `finishes_dq`: how many of the key blocks of a tile's query heads are done, for one of those heads, of all sequences
// counted. Behind what is not finite.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t* done_key_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t head) {
  int32_t* first = p.suspects;
  if constexpr (repairs<spec>()) first = suspect_blocks<tile>(p, schedule) + num_q_blocks_of_all(p, schedule);
  return first + head / num_query_heads<tile>(p, schedule);
}

// What CTAs claim, as `BwdParams::claimed` counts it.
constexpr int32_t kClaimOfTiles = 0, kClaimOfDq = 1, kClaimOfDelta = 2, kNumClaims = 3;

// With `delta_beside`: of how many of a query head's blocks LSE and delta are made; of the first heads nobody counts. Behind the
// key blocks that are done.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t* made_query_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t head) {
  return done_key_blocks<spec, tile>(p, schedule, 0) + schedule.num_heads + head;
}

// Dropout's factor 1 / (1 - p_drop) is in every term of dS but delta's, so dS is made without it, delta being divided, and the
// gradients are multiplied. Not of f16, whose small numbers have fewer bits.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool leaves_dropout_factor() {
  return spec.fwd.dropout && spec.fwd.dtype_qk == DType::Bf16;
}
template <BwdSpec spec>
FMHA_DEVICE float dropout_factor_of_ds(const FwdParams& p) {
  return leaves_dropout_factor<spec>() ? p.dropout_scale : 1.f;
}

// Whether rows of a block that lie behind its sequence may hold anything: TMA has put zeros only behind the tensor.
template <BwdSpec spec>
FMHA_DEVICE bool may_be_dirty(const BwdParams& p) {
  return spec.fwd.q_layout == QLayout::Packed || spec.fwd.kv_layout != KvKind::Strided || p.fwd.seqused_q || p.fwd.seqused_k;
}

}  // namespace fmha::sm90::bwd
