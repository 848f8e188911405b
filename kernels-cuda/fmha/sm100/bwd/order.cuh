// The order in which blocks of keys add to dQ of a block of queries, in calls with ordered sums: the order of their
// launch, which begins with the first keys. So a CTA waits only for CTAs of its head that were launched before it.
#pragma once
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/flag.cuh>
#include <fmha/sm100/bwd/work.cuh>

namespace fmha::sm100::bwd {

// Number of key blocks before the CTA's own that add to the block of queries at `first_query`, to which the CTA adds
// too. Key blocks of sink columns always add; key blocks of the band add from the first one on that reaches
// `first_query`: `query_range`, seen from the queries.
FMHA_DEVICE int32_t position_at(const Work& work, int32_t first_query) {
  const int32_t own = work.keys.begin / kBlock, sinks = ceil_div(work.band.sink_columns, kBlock);
  const int32_t first = max(first_query + work.band.lo, 0) / kBlock;
  const int32_t of_band = work.band.lo <= work.band.hi ? max(own - max(sinks, first), 0) : 0;
  return min(own, sinks) + of_band;
}

// Number of key blocks that add before this CTA to the query block that `steps` returned last. Lists of blocks store
// this rank.
template <int queries, class SeenKeys>
FMHA_DEVICE int32_t position_of(const Work& work, const SeenKeys& seen, const QuerySteps<queries, SeenKeys>& steps,
                                const QueryBlock& block) {
  if constexpr (SeenKeys::has_tile_list) return seen.rank(steps.row, steps.place(steps.at - 1));
  else return position_at(work, block.first);
}

// The place of a CTA in the order of additions: all threads of the reduce role wait until the CTA may add to a block of
// queries, and afterwards release the next CTA.
struct Turn {
  int32_t* const added;  // number of key blocks that have added
  static constexpr int kBarrier = 2, kThreads = 32 * kReduceWarps;

  // Counter of key blocks that have added to a query block. Only calls with ordered sums have counters.
  template <int queries>
  FMHA_DEVICE static Turn at(const BwdParams& p, const Work& work, const QueryBlock& block) {
    return {p.dq_semaphores + stats_offset(p, work.span, block.i_head, block.first) / queries};
  }
  FMHA_DEVICE void wait(int32_t position) const {
    if (threadIdx.x == 0) {
      while (ptx::ld_acquire_gpu(added) < position) {
      }
    }
    ptx::bar_sync<kThreads>(kBarrier);
  }
  FMHA_DEVICE void end() const {
    ptx::bar_sync<kThreads>(kBarrier);
    if (threadIdx.x == 0) ptx::red_release_gpu_add(added, 1);
    __syncwarp();
  }
};

}  // namespace fmha::sm100::bwd
