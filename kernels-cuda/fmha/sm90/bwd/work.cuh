// A tile of the backward: a key block of one kv head, and the query blocks that see it.
#pragma once
#include <fmha/bwd.h>
#include <fmha/common/rows_behind.cuh>
#include <fmha/mask.h>
#include <fmha/row_bwd.h>
#include <fmha/ptx/grid.cuh>
#include <fmha/seq.h>
#include <fmha/sm90/bwd/config.cuh>

namespace fmha::sm90::bwd {

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_part;                // of the kv head's queries, where tiles share them (`head_parts`)
  int32_t i_head_kv, key_block;  // the block counted in those of clusters, whose CTAs walk the same query blocks
  Range keys;          // of the sequence; empty: the sequence has no such block
  Range cluster_keys;  // those of all CTAs of the cluster
  Range q_blocks;      // those with a query that sees one of the cluster's keys
  Range uncut;         // first queries of a consumer's columns that see all keys of a whole block
};

// First key, counted in the sequence, of the other CTA of the cluster.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t first_key_of_other(const Work& work) {
  return work.keys.begin + (cluster_rank<tile>() == 0 ? tile.block_n : -tile.block_n);
}

// Calls `run` for each tile of this CTA: its own, and where CTAs are persistent those whose index the load role takes
// from the scheduler's counter. `signals` is true in one lane of each calling warp.
template <Sm90BwdTile tile, class Shared, class Run>
FMHA_DEVICE void for_each_tile(const Sm90BwdSchedule& schedule, Shared& smem, bool signals, Run run) {
  if constexpr (!tile.persistent && splits_dims(tile) && adds_from_registers(tile)) {
    // A loop of one iteration: without it ptxas spills 300 bytes, with it none.
#pragma unroll 1
    for (int32_t index = blockIdx.x; index < schedule.num_tiles; index += gridDim.x) run(index);
  } else if constexpr (!tile.persistent) {
    run(int32_t(blockIdx.x));
  } else {
    Slot<kTileIndexSlots> slot;
    while (true) {
      Barrier &full = smem.tile_index_full[slot.index], &empty = smem.tile_index_empty[slot.index];
      if constexpr (in_clusters(tile)) {
        ptx::mbarrier_wait_parity_cluster(full, slot.phase);
      } else {
        ptx::mbarrier_wait_parity(full, slot.phase);
      }
      const int32_t index = smem.tile_index[slot.index] + cluster_rank<tile>();
      __syncwarp(__activemask());
      ptx::mbarrier_arrive_if(empty, signals);
      if (index >= schedule.num_tiles) return;
      run(index);
      slot.advance();
    }
  }
}

// `Work::uncut`, from a tile's keys alone, so that a step has one comparison for it: `block_class` takes some forty
// instructions, with nothing under way beside them.
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

// Whether rows may have to be computed again: a mask hides a key from some queries of a block and not from others, and
// through the tensor cores 0 times its infinity, or that of a query, reaches all.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool repairs() {
  return spec.fwd.mask != MaskKind::Full;
}

// Whether queries of a large LSE are left to the launch behind (repair.cuh), and have P of 0 before: a branch for
// them in the loop over query blocks costs 2 to 10 %. Where scores are modified, preprocess measures such queries and
// the loop finds them.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool leaves_far_queries() {
  return !modifies_score(spec.fwd);
}
// LSE from which on a query's scores are measured from an origin. Where scores are products alone, the rounding of
// their sums is as large as that of LSE: below 2^17, where half of LSE's last place is a hundredth of P, nothing is
// gained.
template <BwdSpec spec>
FMHA_DEVICE bool has_origin(float lse) {
  return is_far(lse) && (modifies_score(spec.fwd) || abs_of(lse) >= 131072.f);
}

// Waits until the launch before has ended: each launch may start earlier, but must not touch memory before.
FMHA_DEVICE void wait_for_launch_before() {
  ptx::launch_dependents();
  ptx::wait_for_grids_before();
}

FMHA_DEVICE int32_t num_q_blocks_of_all(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  return schedule.num_q_blocks * p.fwd.num_heads_q * p.fwd.batch;
}

// Parts of a kv head's queries, shared out to `num_parts` tiles with `head_parts`: by query heads, and each of these
// parts by query blocks.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t num_parts(const Sm90BwdSchedule& schedule) {
  return tile.head_parts ? schedule.num_head_parts * schedule.num_query_parts : 1;
}

// Whether a sequence has parts by its own lengths, while the schedule's are by the longest: so it is for packed
// sequences whose additions have an order, so that a sequence's bits do not depend on the batch. Parts beyond a
// sequence's own are empty tiles.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr bool has_own_parts() {
  return tile.head_parts && spec.deterministic && spec.fwd.q_layout == QLayout::Packed;
}
// Whether each part has sums of dK and dV of its own, which a launch adds in their order (head_sums.cuh): in all calls
// but those whose sequences have parts of their own, which add to the same sums one after another. So dK and dV have
// the same bits in every run, deterministic or not: `deterministic` orders the additions to dQ alone.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr bool keeps_head_sums_apart() {
  return tile.head_parts && !has_own_parts<spec, tile>();
}
// Number of f32 sums of dV and dK of one key; the function below gives the number for all keys.
template <BwdSpec spec, Sm90BwdTile tile>
constexpr int kHeadSumsRow = 2 * Shape<spec, tile>::dim;
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int64_t num_head_sums(const Sm90BwdSchedule& schedule) {
  const int32_t blocks = schedule.num_tiles / (keeps_head_sums_apart<spec, tile>() ? 1 : num_parts<tile>(schedule));
  return int64_t(blocks) * tile.block_n * kHeadSumsRow<spec, tile>;
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t num_head_parts(const Sm90BwdSchedule& schedule, const SeqSpan& span) {
  if constexpr (!tile.head_parts) return 1;
  if constexpr (!has_own_parts<spec, tile>()) return schedule.num_head_parts;
  const int32_t key_blocks = ceil_div(span.seqlen_k, tile.block_n);
  int32_t parts = schedule.num_head_parts;
  while (parts > 1) {
    // A part has four times as many queries where a sequence has many tiles.
    const int32_t rows = key_blocks * parts <= schedule.few_tiles_of_head ? parts : 4 * parts;
    if (span.seqlen_q >= int64_t(schedule.least_queries_of_part) * rows) break;
    parts = parts % 2 == 0 ? parts / 2 : 1;
  }
  return parts;
}

// Number of query heads of a tile, and the index of its first head.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t num_query_heads(const BwdParams& p, const Sm90BwdSchedule& schedule, const SeqSpan& span) {
  return p.fwd.gqa_ratio / num_head_parts<spec, tile>(schedule, span);
}
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t first_query_head(const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work) {
  const int32_t of_heads = tile.head_parts ? work.i_part / schedule.num_query_parts : 0;
  return work.i_head_kv * p.fwd.gqa_ratio + of_heads * num_query_heads<spec, tile>(p, schedule, work.span);
}

// Dropout's factor 1 / (1 - p_drop) is in every term of dS but delta's, so dS is made without it, delta being divided,
// and the gradients are multiplied. Not of f16, whose small numbers have fewer bits.
template <BwdSpec spec>
FMHA_DEVICE constexpr bool leaves_dropout_factor() {
  return spec.fwd.dropout && spec.fwd.dtype_qk == DType::Bf16;
}
template <BwdSpec spec>
FMHA_DEVICE float dropout_factor_of_ds(const FwdParams& p) {
  return leaves_dropout_factor<spec>() ? p.dropout_scale : 1.f;
}

}  // namespace fmha::sm90::bwd
