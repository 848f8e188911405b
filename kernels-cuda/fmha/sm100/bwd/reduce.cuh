// The reduce role: a warpgroup adds each block's dQ from tensor memory to sums in memory, one query a thread. Additions
// have no order, or the order of the key blocks. A wide head's dQ comes in two parts, transposed, with one element of
// the head a thread.
#pragma once
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/sm100/bwd/order.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, Part part, class SeenKeys>
FMHA_DEVICE void add_dq(const BwdParams& p, Smem<spec, tile, part>& smem, uint32_t tmem, const Work& work,
                        const SeenKeys& seen) {
  using Of = Shape<spec>;
  using Sums = DqSums<spec>;
  constexpr int chunk = 32, columns = Of::is_wide ? Of::queries : Of::dim_qk;
  const int32_t row = threadIdx.x % kBlock;
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp
  const int32_t num_steps = has_dk(part) ? work.num_steps : 0;
  QuerySteps<Of::queries, SeenKeys> blocks{work, seen};
#pragma unroll 1
  for (int32_t i = 0; i < num_steps; ++i) {
    const QueryBlock block = blocks.next();
    float* sums = Sums::block_of(p, work.span, block.i_head, block.first);
    const int32_t num_queries = work.span.seqlen_q - block.first;
#pragma unroll 1
    for (int dq_part = 0; dq_part < Of::dq_parts; ++dq_part) {
      ptx::mbarrier_wait_parity(smem.dq_full, Of::dq_parity(i, dq_part));
      ptx::tcgen05_fence_after_thread_sync();
      if constexpr (spec.deterministic) {
        if (dq_part == 0) Turn::at<Of::queries>(p, work, block).wait(position_of(work, seen, blocks, block));
      }
      // The second part overlaps the first: elements that the first part has added are skipped.
      const int32_t element = Of::first_of(dq_part) + row;
      const bool there = Of::is_wide ? element >= dq_part * kBlock && element < Sums::dim : row < num_queries;
#pragma unroll
      for (int c = 0; c < columns; c += chunk) {
        uint32_t words[chunk];
        ptx::tcgen05_ld(words, tmem + TmemPlan<spec, part>::dq + c);
        ptx::tcgen05_wait_ld();
        ptx::tcgen05_loaded(words);
        if (c + chunk == columns) {
          ptx::tcgen05_fence_before_thread_sync();
          __syncwarp();
          ptx::mbarrier_arrive_if(smem.dq_read, signals);
        }
        if (there) {
#pragma unroll
          for (int e = 0; e < chunk; e += 4) {
            if (Of::is_wide && c + e >= num_queries) continue;
            const int32_t at = Of::is_wide ? Sums::index_of(c + e, element) : Sums::index_of(row, c + e);
            ptx::red_global_add_v4_f32(sums + at, float_of(words[e]), float_of(words[e + 1]), float_of(words[e + 2]),
                                       float_of(words[e + 3]));
          }
        }
        __syncwarp();
      }
    }
    if constexpr (spec.deterministic) Turn::at<Of::queries>(p, work, block).end();
  }
  ptx::mbarrier_arrive_if(smem.done, signals);
}

}  // namespace fmha::sm100::bwd
