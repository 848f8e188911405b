// The schedule role: which tile a CTA works on next, and what that tile is. One thread, asked by the
// load role, resolves order, sequence and mask once for all.
//
// Order: sections of heads whose K and V stay in the L2 together; in a section the row blocks with
// the most keys first, every head's in turn.
#pragma once
#include <fmha/mask.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/seq.h>
#include <fmha/sm90/config.cuh>

namespace fmha::sm90 {

// The i-th key block of a tile.
FMHA_DEVICE int32_t block_at(const Work& work, int32_t i) {
  return i < work.num_band_blocks ? work.last_block - i : work.last_sink_block - (i - work.num_band_blocks);
}

// Whether a block can be hidden from one CTA of a cluster and not from the other.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE constexpr bool can_hide_blocks() {
  return tile.cluster > 1 && !tile.cluster_heads && spec.mask != MaskKind::Full && !spec.sink_columns;
}

// Tile `index` of the order, resolved; num_blocks 0 if its sequence has no such rows.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE Work resolve_tile(const FwdParams& p, const Sm90Schedule& schedule, int32_t index) {
  const int32_t section_tiles = schedule.heads_per_section * schedule.num_m_blocks;
  const int32_t section = index / section_tiles, within = index - section * section_tiles;
  const int32_t first_head = section * schedule.heads_per_section;
  const int32_t num_heads = min(schedule.heads_per_section, schedule.num_heads - first_head);
  const int32_t i_m = within / num_heads, head = first_head + within - i_m * num_heads;
  const int32_t m_block = spec.mask == MaskKind::Full ? i_m : schedule.num_m_blocks - 1 - i_m;

  Work work;
  constexpr int heads_at_once = tile.cluster_heads ? tile.cluster : 1;
  const int32_t heads = (tile.pack_gqa ? p.num_heads_kv : p.num_heads_q) / heads_at_once;
  work.i_batch = head / heads;
  work.i_head = (head - work.i_batch * heads) * heads_at_once + (tile.cluster_heads ? cluster_rank(tile) : 0);
  work.i_head_kv = tile.pack_gqa ? work.i_head : work.i_head / p.gqa_ratio;
  if (tile.pack_gqa) work.i_head *= p.gqa_ratio;

  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, work.i_batch);
  work.storage_batch = span.storage_batch;
  work.q_row = span.q_row;
  work.k_row = span.k_row;
  work.seqlen_q = span.seqlen_q;
  work.seqlen_k = span.seqlen_k;
  // The CTAs of a cluster walk the same key blocks: those that any of their rows sees.
  constexpr int cluster_rows = tile.block_m * (tile.cluster_heads ? 1 : tile.cluster);
  const int32_t cluster_row = m_block * cluster_rows;
  work.first_row = cluster_row + (tile.cluster_heads ? 0 : cluster_rank(tile) * tile.block_m);
  work.num_blocks = 0;
  const int32_t num_rows = span.seqlen_q * (tile.pack_gqa ? p.gqa_ratio : 1);
  if (cluster_row >= num_rows) return work;

  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
  const int32_t last_row = min(cluster_row + cluster_rows, num_rows) - 1;
  const Range queries = {query_of<tile>(p, cluster_row), query_of<tile>(p, last_row) + 1};
  const Range keys = k_range(band, queries, span.seqlen_k);
  const Range sinks = spec.sink_columns ? sink_range(band, queries, span.seqlen_k) : Range{0, 0};
  const int32_t first_block = keys.begin / tile.block_n;
  work.lo = band.lo;
  work.hi = band.hi;
  work.sink_columns = band.sink_columns;
  work.last_block = ceil_div(keys.end, tile.block_n) - 1;
  work.num_band_blocks = keys.empty() ? 0 : work.last_block + 1 - first_block;
  // Blocks that the band walks already show their sink columns too.
  work.last_sink_block = ceil_div(sinks.end, tile.block_n) - 1;
  if (work.num_band_blocks > 0) work.last_sink_block = min(work.last_sink_block, first_block - 1);
  work.num_blocks = work.num_band_blocks + work.last_sink_block + 1;
  if (work.num_blocks == 0) {  // no key at all: one block outside the tensor, zeros that are hidden
    work.num_blocks = work.num_band_blocks = 1;
    work.last_block = -1;
  }

  work.num_hidden = 0;
  if constexpr (can_hide_blocks<spec, tile>()) {
    const int32_t own_last = query_of<tile>(p, work.first_row + tile.block_m - 1);
    const int32_t own_blocks = max(own_last + band.hi + tile.block_n, 0) / tile.block_n;
    work.num_hidden = clamp(work.last_block + 1 - own_blocks, 0, work.num_blocks - 1);
  }

  // Keys that no query of the sequence sees. Beyond the tensor, in block -1 too, the copy engine has put
  // zeros.
  const int32_t live_end = min(span.seqlen_k, span.seqlen_q + band.hi);
  const bool zeros_follow = spec.kv_layout == KvKind::Strided && !p.seqused_k && live_end == span.seqlen_k;
  const int32_t first_block_begin = block_at(work, 0) * tile.block_n;
  work.first_dirty = zeros_follow || work.last_block < 0 ? tile.block_n
                                                         : clamp(live_end - first_block_begin, 0, tile.block_n);
  return work;
}

// Walks the order for one CTA (or one cluster).
template <FwdSpec spec, Sm90Tile tile>
struct Scheduler {
  Smem<spec, tile>& smem;
  int32_t round = 0;
  uint32_t drawn_phase = 0;

  FMHA_DEVICE int32_t num_workers() const { return gridDim.x / tile.cluster; }

  FMHA_DEVICE int32_t static_index() const {
    const int32_t worker = blockIdx.x / tile.cluster, first = round * num_workers();
    // Masked tiles differ in length: who had the longest of a round has the shortest of the next.
    const bool backwards = spec.mask != MaskKind::Full && (round & 1);
    return first + (backwards ? num_workers() - 1 - worker : worker);
  }

  // The counter in the workspace is 0 before the first launch, and again after each.
  FMHA_DEVICE int32_t draw(const FwdParams& p, const Sm90Schedule& schedule) const {
    int32_t* counter = static_cast<int32_t*>(p.workspace);
    const int32_t index = num_workers() + atomicAdd(counter, 1);
    if (index == schedule.num_tiles + num_workers() - 1) *counter = 0;  // the last draw of all
    return index;
  }

  // The first CTA of a cluster draws for both.
  FMHA_DEVICE int32_t draw_together(const FwdParams& p, const Sm90Schedule& schedule) {
    int32_t index;
    if (cluster_rank(tile) == 0) {
      index = draw(p, schedule);
      ptx::mbarrier_wait_parity_cluster(smem.drawn_empty, drawn_phase ^ 1);
      ptx::st_shared_at(smem.drawn, 1, index);
      ptx::mbarrier_arrive_release_at(smem.drawn_full, 1);
    } else {
      ptx::mbarrier_wait_parity_cluster(smem.drawn_full, drawn_phase);
      index = smem.drawn;
      ptx::mbarrier_arrive_release_at(smem.drawn_empty, 0);
    }
    drawn_phase ^= 1;
    return index;
  }

  FMHA_DEVICE int32_t next_index(const FwdParams& p, const Sm90Schedule& schedule) {
    const bool first = round == 0;
    const int32_t index = static_index();
    ++round;
    if (first || tile.order == TileOrder::Static) return index;
    if (tile.order == TileOrder::Single) return schedule.num_tiles;
    return tile.cluster > 1 ? draw_together(p, schedule) : draw(p, schedule);
  }

  // The next tile that has rows; num_blocks 0 when there is none.
  FMHA_DEVICE Work next(const FwdParams& p, const Sm90Schedule& schedule) {
    while (true) {
      const int32_t index = next_index(p, schedule);
      if (index >= schedule.num_tiles) break;
      const Work work = resolve_tile<spec, tile>(p, schedule, index);
      if (work.num_blocks > 0) return work;
    }
    Work none;
    none.num_blocks = 0;
    return none;
  }
};

// Named barrier: the load role wants the next tile. Not an mbarrier, whose waiter would poll through
// every tile.
constexpr int kWorkWanted = 7;

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void schedule_tiles(const FwdParams& p, const Sm90Schedule& schedule, Smem<spec, tile>& smem) {
  Scheduler<spec, tile> scheduler{smem};
  Slot<kWorkSlots> slot;
  bool more = true;
  while (more) {
    ptx::barrier_sync<kWorkWanted, 64>();
    const Work work = scheduler.next(p, schedule);
    ptx::mbarrier_wait_parity(smem.work_empty[slot.index], slot.phase ^ 1);
    smem.work[slot.index] = work;
    ptx::mbarrier_arrive_if(smem.work_full[slot.index], true);
    slot.advance();
    more = work.num_blocks > 0;
  }
}

}  // namespace fmha::sm90
