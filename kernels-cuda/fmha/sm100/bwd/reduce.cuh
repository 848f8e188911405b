// The reduce role: a warpgroup adds each block's dQ, a thread a query, from tensor memory to sums in memory: in no
// order, or in that of the blocks of keys.
#pragma once
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/sm100/bwd/order.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, class SeenKeys>
FMHA_DEVICE void add_dq(const BwdParams& p, Smem<spec, tile>& smem, uint32_t tmem, const Work& work,
                        const SeenKeys& seen) {
  using Sums = DqSums<spec>;
  constexpr int chunk = 32;
  const int32_t row = threadIdx.x % kBlock;
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp
  QuerySteps<SeenKeys> blocks{work, seen};
#pragma unroll 1
  for (int32_t i = 0; i < work.num_steps; ++i) {
    const QueryBlock block = blocks.next();
    float* sums = Sums::block_of(p, work.span, block.i_head, block.first);
    const bool there = block.first + row < work.span.seqlen_q;
    ptx::mbarrier_wait_parity(smem.dq_full, i & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if constexpr (spec.deterministic) Turn::at(p, work, block).wait(position_at(work, block.first));
#pragma unroll
    for (int c = 0; c < Sums::dim; c += chunk) {
      uint32_t words[chunk];
      ptx::tcgen05_ld(words, tmem + TmemPlan<spec>::dq + c);
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(words);
      if (c + chunk == Sums::dim) {
        ptx::tcgen05_fence_before_thread_sync();
        __syncwarp();
        ptx::mbarrier_arrive_if(smem.dq_read, signals);
      }
      if (there) {
#pragma unroll
        for (int e = 0; e < chunk; e += 4) {
          ptx::red_global_add_v4_f32(sums + Sums::index_of(row, c + e), float_of(words[e]), float_of(words[e + 1]),
                                     float_of(words[e + 2]), float_of(words[e + 3]));
        }
      }
      __syncwarp();
    }
    if constexpr (spec.deterministic) Turn::at(p, work, block).end();
  }
  ptx::mbarrier_arrive_if(smem.done, signals);
}

}  // namespace fmha::sm100::bwd
