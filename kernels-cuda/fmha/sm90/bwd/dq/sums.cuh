// dQ's sums: f32 numbers of each query block in global memory, to which every key block that sees it adds. This header
// has the counters by which CTAs announce how many have added, and the order of additions where they have one;
// docs/kernels/sm90-bwd-dq.md has the protocol: which warp writes, which waits, in which memory order, and why no CTAs
// wait in a circle.
//
//   output.cuh      a consumer's share, from registers to shared memory or by its own additions
//   store.cuh       the store warp: bulk copies from shared memory to the sums
//   semaphore.cuh   warps that poll and release a query block's semaphore for those two
//   finish.cuh      the sums to dQ, when all key blocks of a head have added theirs
#pragma once
#include <fmha/bwd.h>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

// How the first CTA that adds to a query block starts its sums.
enum class DqStart {
  Zeros,       // preprocess has written zeros; all add, in any order
  FirstStores, // the CTA that comes first stores, the others add behind it in any order
  Ordered,     // CTAs add in one order, of which the first stores
  Apart,       // each key block stores sums of its own, which finishing adds in the same order
};
template <BwdSpec spec, Sm90BwdTile tile>
constexpr DqStart kDqStart = keeps_dq_apart(tile) ? DqStart::Apart
                             : spec.deterministic ? DqStart::Ordered
                             : tile.dq_path == DqPath::FirstStores ? DqStart::FirstStores
                                                                   : DqStart::Zeros;
// Whether additions to a query block have a fixed order: CTAs wait for each other, or a later launch adds. Key blocks
// then also walk their queries in one fixed order, so that dK and dV have the same bits in every run.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool is_ordered() {
  return spec.deterministic;
}
template <BwdSpec spec>
FMHA_DEVICE constexpr bool is_ordered_behind_mask() {
  return is_ordered<spec>() && spec.fwd.mask != MaskKind::Full;
}
// Whether CTAs wait for each other's additions. They are then launched in the order of the additions.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr bool launches_in_order() {
  return is_ordered_behind_mask<spec>() && kDqStart<spec, tile> == DqStart::Ordered;
}
// Whether a query block has a semaphore.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr bool has_semaphores() {
  return kDqStart<spec, tile> == DqStart::FirstStores || kDqStart<spec, tile> == DqStart::Ordered;
}

// Offset of a key block's sums of dQ from those of the first key block. Only with DqStart::Apart does each key block
// have sums of its own.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int64_t part_of_sums(const BwdParams& p, int32_t key_block) {
  if constexpr (!keeps_dq_apart(tile)) return 0;
  return key_block * p.stats_head * p.fwd.num_heads_q * Shape<spec, tile>::dq_dim;
}

// ---- Counters in global memory. Preprocess clears them.

// Semaphore of the query block whose first row among those of `lse_log2`, `delta` and the sums is `first_row`.
// Ordered: the number of CTAs that have added. FirstStores: one of the three states.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t* dq_semaphore(const BwdParams& p, int64_t first_row) {
  return p.dq_semaphores + first_row / tile.block_m;
}
constexpr int32_t kUntouched = 0, kStoring = 1, kStored = 2;

// The dynamic schedulers' counters: the next tile, the next query block whose dQ is to be finished, the next whose
// delta is to be made.
constexpr int32_t kNextTile = 0, kNextDqBlock = 1, kNextDeltaBlock = 2, kNumSchedulers = 3;

// Number of CTAs for each query block in the launch that finishes dQ.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr int finish_ctas() {
  using S = Shape<spec, tile>;
  if (keeps_dq_apart(tile)) return ceil_div(S::dq_block, 4 * kPartFours * kRowThreads);
  return finishes_dq(tile) ? 1 : max(1, S::dq_block / ((S::transposes_dq ? 32 : 16) * kRowThreads));
}

// Flags of non-finite values: one per consumer warp of each tile for its dK and dV, then one per query block for its
// dQ, or one per CTA that finishes a part of it.
FMHA_DEVICE int32_t* non_finite_keys(const BwdParams& p) { return p.non_finite; }
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t* non_finite_queries(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  return p.non_finite + int64_t(schedule.num_tiles) * num_consumer_warps(tile);
}

// Counter of the key blocks that have added all their terms to a tile's query heads, for one of these heads and over
// all sequences. A main kernel that finishes dQ uses it.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t* done_key_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t head) {
  int32_t* first = p.non_finite;
  if constexpr (repairs<spec>())
    first = non_finite_queries<tile>(p, schedule) + num_q_blocks_of_all(p, schedule) * finish_ctas<spec, tile>();
  return first + head / (tile.head_parts ? p.fwd.gqa_ratio / schedule.num_head_parts : p.fwd.gqa_ratio);
}

// Counter of a query head's blocks whose LSE and delta are computed, for a main kernel that computes delta. Preprocess
// computes those of the first heads, which are not counted.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t* made_query_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t head) {
  return done_key_blocks<spec, tile>(p, schedule, 0) + schedule.num_heads + head;
}

// Flag of a query block that has far queries (large LSE), where a later launch computes them. Preprocess writes the
// flag, or the main kernel if it computes delta. Blocks beyond their sequence have no valid flag.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t* far_queries(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t q_block) {
  int32_t* first = done_key_blocks<spec, tile>(p, schedule, 0);
  if constexpr (finishes_dq(tile)) first += schedule.num_heads;
  if constexpr (makes_delta(tile)) first += p.fwd.batch * p.fwd.num_heads_q;
  return first + q_block;
}

// ---- The order of additions.

// A key block of a kv head, where heads of all sequences are numbered together. Key blocks are counted upward from the
// first one, or downward from the last one.
struct Place {
  int32_t head, nth_block;
  bool is_upward;
};

// Order in which key blocks are launched behind a mask: head after head, the last key block of each head first, since
// a query block's key blocks add in that order and each begins at its diagonal, a step behind its successor. A head's
// longest key block is then its last, and would be the launch's last. So every eighth head goes the other way, its
// key blocks from the first one on and its queries from the last one down. These heads come at the end, side by side:
// CTAs get there one by one, as their order needs it, and the shortest are the last. TFLOP/s, causal, S 8192: D 128
// 506 to 525, D 256 463 to 487. With short sequences every other head goes so, as many heads at a time as have Q, dO
// and sums in the L2. With fewer heads the last one of a sequence goes so; where a sequence's keys are far more than
// its queries, all of them do (`Sm90BwdSchedule::side_by_side_period`): the key blocks see the same few query blocks,
// and those of a head that run together would wait for each other at each.
//
// Heads here are the parts of kv heads, where tiles share these, or `parts_together` of them, which go the same way one
// after another or all upward side by side: all parts of a kv head where sequences have parts of their own
// (`has_own_parts`), whatever their number.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool goes_upward(const Sm90BwdSchedule& schedule, const Work& work) {
  const int32_t period = schedule.side_by_side_period;
  int32_t head = work.i_head_kv;
  if constexpr (tile.head_parts) head = (head * num_parts<tile>(schedule) + work.i_part) / schedule.parts_together;
  return head % period == period - 1;
}
// Place of tile `index` in the launch order. Each of a sequence's `num_heads` heads has `parts` parts.
FMHA_DEVICE Place place_in_order(const Sm90BwdSchedule& schedule, int32_t index, int32_t num_key_blocks, int32_t batch,
                                 int32_t num_heads, int32_t parts) {
  const int32_t period = schedule.side_by_side_period, tiles = parts * num_key_blocks;  // of a head
  const int32_t upward = num_heads / period, downward = num_heads - upward;             // of a sequence
  const int32_t within = index - batch * downward * tiles;
  if (within < 0) {
    const int32_t i_head = index / tiles, i_batch = i_head / downward, nth = i_head - i_batch * downward;
    const int32_t head = i_batch * num_heads + nth + nth / (period - 1);
    const int32_t in_head = index - i_head * tiles, part = in_head / num_key_blocks;
    return {head * parts + part, in_head - part * num_key_blocks, false};
  }
  const int32_t group = within / (schedule.side_by_side_heads * tiles);
  const int32_t first = group * schedule.side_by_side_heads, in_group = within - first * tiles;
  const int32_t side_by_side = min(schedule.side_by_side_heads, batch * upward - first) * parts;
  const int32_t nth_block = in_group / side_by_side, in_block = in_group - nth_block * side_by_side;
  const int32_t i_head = first + in_block / parts, part = in_block % parts;
  const int32_t i_batch = i_head / upward, nth = i_head - i_batch * upward;
  return {(i_batch * num_heads + nth * period + period - 1) * parts + part, nth_block, true};
}

// Tile `index` under lists of blocks of queries: the same order, but downward heads too run some beside each other, as
// many as an L2 head group has. Key blocks whose walks begin at the same query block, as without a diagonal, wait for
// each other there, and fewer of a head's run at a time. docs/kernels/sm90-bwd-dq.md has the modelled times.
FMHA_DEVICE Place place_by_lists(const Sm90BwdSchedule& schedule, int32_t index, int32_t num_key_blocks, int32_t batch,
                                 int32_t num_heads) {
  const int32_t period = schedule.side_by_side_period, upward = num_heads / period, downward = num_heads - upward;
  const int32_t within = index - batch * downward * num_key_blocks;
  const bool is_upward = within >= 0;
  const int32_t of_sequence = is_upward ? upward : downward, nth_tile = is_upward ? within : index;
  const int32_t at_a_time = is_upward ? schedule.side_by_side_heads : schedule.heads_per_l2_group;
  const int32_t first = nth_tile / (at_a_time * num_key_blocks) * at_a_time;
  const int32_t side_by_side = min(at_a_time, batch * of_sequence - first);
  const int32_t in_group = nth_tile - first * num_key_blocks;
  const int32_t nth_block = in_group / side_by_side, i_head = first + in_group - nth_block * side_by_side;
  const int32_t i_batch = i_head / of_sequence, nth = i_head - i_batch * of_sequence;
  const int32_t head = is_upward ? nth * period + period - 1 : nth + nth / max(period - 1, 1);
  return {i_batch * num_heads + head, nth_block, is_upward};
}

// Without a mask, key blocks begin their walks at query blocks that are `stride` apart, in groups of CTAs that run at a
// time (as DASH shifts them: arXiv 2601.21824), so that CTAs that start together meet at no query block.
struct Stagger {
  int32_t first, size, stride;  // of the key block's group; stride 0: all begin at the first query block
};
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE Stagger stagger_of(const Sm90BwdSchedule& schedule, const Work& work) {
  // The stagger follows from the sequence's own length, so that its bits do not depend on the batch.
  const int32_t num_blocks = ceil_div(work.span.seqlen_k, cluster_keys(tile));
  int32_t group = ceil_div(num_blocks, ceil_div(num_blocks, schedule.num_sms / cluster_size(tile)));
  if constexpr (is_ordered<spec>()) {
    if (schedule.key_blocks_in_group > 0) group = schedule.key_blocks_in_group;
  }
  const int32_t first = work.key_block / group * group, size = min(group, num_blocks - first);
  // Where heads are launched side by side, the CTAs of a group do not run at the same time, so their walks are not
  // staggered.
  const int32_t stride = schedule.side_by_side_period == 1 ? 0 : (work.q_blocks.end - work.q_blocks.begin) / size;
  return {first, size, stride};
}

// The key blocks that add to a query block under a mask: those of sink columns before the band, and those of the band.
struct AddingBlocks {
  int32_t sinks;  // [0, sinks)
  Range band;
};
template <Sm90BwdTile tile>
FMHA_DEVICE AddingBlocks adding_blocks(const Work& work, int32_t block) {
  const int32_t first_query = block * tile.block_m;
  const Range queries = {first_query, min(first_query + tile.block_m, work.span.seqlen_q)};
  // The range that `query_range` computes, seen from the queries. A key block that adds nothing has no position in the
  // order.
  const bool has_width = work.band.lo <= work.band.hi;
  const Range keys = has_width ? k_range(work.band, queries, work.span.seqlen_k) : Range{0, 0};
  const int32_t band_end = keys.empty() ? 0 : ceil_div(keys.end, cluster_keys(tile));
  const int32_t band_begin = keys.empty() ? 0 : keys.begin / cluster_keys(tile);
  const int32_t sink_end = has_width ? sink_range(work.band, queries, work.span.seqlen_k).end
                                     : max(min(work.band.sink_columns, queries.end + work.band.hi), 0);
  int32_t sinks = ceil_div(sink_end, cluster_keys(tile));
  if (!keys.empty()) sinks = min(sinks, band_begin);
  return {sinks, {band_begin, band_end}};
}

// With ordered additions: the number of key blocks that add to query block `block` before this tile's.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t position_at(const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work, int32_t block) {
  if constexpr (is_ordered_behind_mask<spec>()) {
    const AddingBlocks adding = adding_blocks<tile>(work, block);
    // Position of this key block among those that add, counted from the first one.
    const bool in_band = !adding.band.empty() && work.key_block >= adding.band.begin;
    const int32_t nth = in_band ? adding.sinks + work.key_block - adding.band.begin : work.key_block;
    const int32_t count = adding.sinks + adding.band.end - adding.band.begin;
    return goes_upward<spec, tile>(schedule, work) ? nth : count - 1 - nth;
  } else {
    const Stagger stagger = stagger_of<spec, tile>(schedule, work);
    const int32_t member = work.key_block - stagger.first;
    if (stagger.stride == 0) return work.key_block;
    // Last key block of the group that has passed this query block while the others have not wrapped round yet.
    const int32_t begun = min((block - work.q_blocks.begin) / stagger.stride, stagger.size - 1);
    return stagger.first + (member <= begun ? begun - member : begun + stagger.size - member);
  }
}

// The key blocks that add to a query block, in the order of additions: the inverse of `position_at`.
template <BwdSpec spec, Sm90BwdTile tile>
struct Additions {
  const Sm90BwdSchedule& schedule;
  Work work;  // of any key block of the head
  int32_t block;
  AddingBlocks adding;
  bool is_upward;
  int32_t count;

  FMHA_DEVICE Additions(const BwdParams& p, const Sm90BwdSchedule& schedule, const SeqSpan& span, int32_t i_head,
                        int32_t block)
      : schedule(schedule), block(block), adding{0, {0, 0}}, is_upward(true) {
    work.span = span;
    work.band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
    work.i_head_kv = i_head / p.fwd.gqa_ratio;
    work.i_part = (i_head - work.i_head_kv * p.fwd.gqa_ratio) / num_query_heads<spec, tile>(p, schedule, span);
    work.key_block = 0;
    work.q_blocks = {0, ceil_div(span.seqlen_q, tile.block_m)};
    if constexpr (is_ordered_behind_mask<spec>()) {
      adding = adding_blocks<tile>(work, block);
      is_upward = goes_upward<spec, tile>(schedule, work);
      count = adding.sinks + adding.band.end - adding.band.begin;
    } else {
      count = ceil_div(span.seqlen_k, cluster_keys(tile));
    }
  }
  FMHA_DEVICE int32_t key_block_at(int32_t position) const {
    if constexpr (is_ordered_behind_mask<spec>()) {
      const int32_t nth = is_upward ? position : count - 1 - position;
      return nth < adding.sinks ? nth : adding.band.begin + nth - adding.sinks;
    } else {
      Work at = work;
      at.key_block = position;  // of the group: its positions are its key blocks' numbers
      const Stagger stagger = stagger_of<spec, tile>(schedule, at);
      if (stagger.stride == 0) return position;
      const int32_t within = position - stagger.first;
      const int32_t begun = min((block - work.q_blocks.begin) / stagger.stride, stagger.size - 1);
      return stagger.first + (within <= begun ? begun - within : begun + stagger.size - within);
    }
  }
};

}  // namespace fmha::sm90::bwd
