// Who keeps turns at the sums of dQ, so that nobody who adds stands and waits for memory: its answer to whether a turn has
// come, and what a release takes.
#pragma once
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

// Calls `keep` with each turn of this CTA: its counter in memory, and how many add before.
template <BwdSpec spec, Sm90BwdTile tile, class Keep>
FMHA_DEVICE void for_each_turn(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem, Keep keep) {
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index);
    for (QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work); blocks.more(); blocks.advance()) {
      keep(turns_of_block<tile>(p, first_row_of<tile>(p, work, blocks)),
           turn_at<spec, tile>(schedule, work, blocks.current));
    }
  });
}

template <Sm90BwdTile tile>
FMHA_DEVICE void wait_for_turn(const int32_t* turns, int32_t turn) {
  // Each CTA of a cluster counts for itself.
  while (ptx::ld_acquire_gpu(turns) < tile.cluster * turn) {
  }
}

// Without turns: of those who come by a query block the first one stores its dQ, and the others add when that is there. Nobody
// waits in a circle: who is to store has everything but its own products.
constexpr int32_t kNobody = 0, kOneComes = 1, kStored = 2;  // a block's number

FMHA_DEVICE bool comes_first(int32_t* number) {
  if (ptx::ld_acquire_gpu(number) == kStored) return false;
  if (atomicCAS(number, kNobody, kOneComes) == kNobody) return true;
  while (ptx::ld_acquire_gpu(number) != kStored) {
  }
  return false;
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void announce_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  uint32_t phase = 0;
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index);
    for (QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work); blocks.more(); blocks.advance()) {
      const bool is_first = comes_first(turns_of_block<tile>(p, first_row_of<tile>(p, work, blocks)));
      ptx::fence_proxy_async_global();
      ptx::mbarrier_wait_parity(smem.dq_empty[0], phase ^ 1);  // the block before is under way
      smem.is_first_turn = is_first;
      ptx::mbarrier_arrive_if(smem.turn_come, true);
      phase ^= 1;
    }
  });
}

// For consumers who add dQ from their registers: one thread waits for a block's turn, lets them add, and counts it when what
// they added is there for all.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void keep_turns(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  uint32_t phase = 0;
  for_each_turn(p, schedule, smem, [&](int32_t* turns, int32_t turn) {
    wait_for_turn<tile>(turns, turn);
    smem.is_first_turn = turn == 0;
    ptx::mbarrier_arrive_if(smem.dq_empty[0], true);
#pragma unroll
    for (int c = 0; c < num_consumers(tile); ++c) ptx::mbarrier_wait_parity(smem.dq_full[c], phase);
    ptx::red_release_gpu_add(turns, 1);
    phase ^= 1;
  });
}

// For a thread that stores dQ: one thread waits for the next turn while it has this one, and one counts turns that are over.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void announce_turns(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  uint32_t phase = 0;
  for_each_turn(p, schedule, smem, [&](int32_t* turns, int32_t turn) {
    wait_for_turn<tile>(turns, turn);
    ptx::fence_proxy_async_global();
    ptx::mbarrier_wait_parity(smem.dq_empty[0], phase ^ 1);  // the turn before is under way
    smem.is_first_turn = turn == 0;
    ptx::mbarrier_arrive_if(smem.turn_come, true);
    phase ^= 1;
  });
}
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void count_turns(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  uint32_t phase = 0;
  for_each_turn(p, schedule, smem, [&](int32_t* turns, int32_t) {
    ptx::mbarrier_wait_parity(smem.turn_over, phase);
    ptx::mbarrier_arrive_if(smem.turn_counted, true);
    ptx::fence_proxy_async_global();
    ptx::red_release_gpu_add(turns, 1);
    phase ^= 1;
  });
}

}  // namespace fmha::sm90::bwd
