// The role that keeps turns for consumers who add dQ to memory themselves: one thread waits for a block's turn, lets them add,
// and says that the turn is over when what they added is there for all.
#pragma once
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void keep_turns(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  uint32_t phase = 0;
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index);
    for (QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work); blocks.more(); blocks.advance()) {
      int32_t* turns = turns_of_block<tile>(p, first_row_of<tile>(p, work, blocks));
      const int32_t turn = turn_at<spec, tile>(schedule, work, blocks.current);
      // Each CTA of a cluster counts for itself.
      while (ptx::ld_acquire_gpu(turns) < tile.cluster * turn) {
      }
      smem.is_first_turn = turn == 0;
      ptx::mbarrier_arrive_if(smem.dq_empty[0], true);
#pragma unroll
      for (int c = 0; c < num_consumers(tile); ++c) ptx::mbarrier_wait_parity(smem.dq_full[c], phase);
      ptx::red_release_gpu_add(turns, 1);
      phase ^= 1;
    }
  });
}

}  // namespace fmha::sm90::bwd
