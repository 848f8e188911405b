// The store role: one thread adds each query block's dQ to the f32 sums in memory.
#pragma once
#include <fmha/ptx/bulk.cuh>
#include <fmha/ptx/flag.cuh>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

// A turn whose additions are under way: said when they are done. They are by the time that the next block's dQ is there, and
// this thread does not wait for them while it could hand the shared memory back.
FMHA_DEVICE void end_turn(int32_t*& open_turn) {
  if (open_turn == nullptr) return;
  ptx::cp_async_bulk_wait_group<0>();
  ptx::fence_proxy_async_global();
  ptx::red_release_gpu_add(open_turn, 1);
  open_turn = nullptr;
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void store_dq(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  using S = Shape<spec, tile>;
  constexpr uint32_t share_bytes = S::dq_share * sizeof(float);
  uint32_t phase = 0;
  int32_t* open_turn = nullptr;
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index);
    for (QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work); blocks.more(); blocks.advance()) {
      const int64_t row = first_row_of<tile>(p, work, blocks);
      float* sums = p.dq_sums + row * S::dim;
      int32_t* turns = turns_of_block<tile>(p, row);
      bool is_first = false;  // stores, so that nobody has to put zeros there before
      if constexpr (takes_turns<spec>()) {
        const int32_t turn = turn_at<spec, tile>(schedule, work, blocks.current);
        ptx::mbarrier_wait_parity(smem.dq_full[S::consumers - 1], phase);
        // Before this turn is waited for: who has it may wait for that one.
        end_turn(open_turn);
        while (ptx::ld_acquire_gpu(turns) != turn) {
        }
        ptx::fence_proxy_async_global();
        is_first = turn == 0;
      }
#pragma unroll
      for (int c = 0; c < S::consumers; ++c) {
        ptx::mbarrier_wait_parity(smem.dq_full[c], phase);
        float* to = sums + c * S::dq_share;
        if (is_first) {
          ptx::cp_async_bulk_store(to, ptx::shared_address(smem.dq[c]), share_bytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(to, ptx::shared_address(smem.dq[c]), share_bytes);
        }
        ptx::cp_async_bulk_commit_group();
      }
      ptx::cp_async_bulk_wait_group_read<0>();
#pragma unroll
      for (int c = 0; c < S::consumers; ++c) ptx::mbarrier_arrive_if(smem.dq_empty[c], true);
      phase ^= 1;
      if constexpr (takes_turns<spec>()) open_turn = turns;
    }
    if constexpr (takes_turns<spec>()) end_turn(open_turn);
  });
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace fmha::sm90::bwd
