// The correct role: a warpgroup rescales O where a row's maximum has grown, and stores O at a tile's end. Each thread
// has a row of each query tile.
//
// The correction role also announces that O may be written: a tile's first P V waits until the O before is stored.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/f32x2.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/fwd/output.cuh>
#include <fmha/sm100/fwd/pair.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile, class SeenKeys, class Scales>
struct CorrectRole {
  using Shared = Smem<spec, tile>;
  using Tmem = TmemPlan<spec, tile>;
  static constexpr int q_tiles = Shared::q_tiles, chunk = 16, num_chunks = Shared::dim_v / chunk;

  const FwdParams& p;
  Shared& smem;
  const SeenKeys& seen;
  const Scales& scales;
  const uint32_t tmem;  // at the warp's lanes
  const int32_t row_in_tile = threadIdx.x % kRows;
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp

  ScoreSlot<q_tiles> slot;
  Slot<kWorkSlots> work_slot;
  uint32_t stats_phase[q_tiles] = {};
  uint32_t o_phase[q_tiles] = {};

  // Reads the softmax role's message about this thread's row.
  FMHA_DEVICE float take_stats(int q) {
    ptx::mbarrier_wait_parity(smem.stats_full[q], stats_phase[q]);
    stats_phase[q] ^= 1;
    return smem.stats[q][0][row_in_tile];
  }
  FMHA_DEVICE void release_stats(int q) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.stats_empty[q], signals);
  }
  FMHA_DEVICE void wait_output(int q) {
    ptx::mbarrier_wait_parity(smem.o_full[q], o_phase[q]);
    o_phase[q] ^= 1;
    ptx::tcgen05_fence_after_thread_sync();
  }
  FMHA_DEVICE void release_output(int q) const {
    ptx::tcgen05_fence_before_thread_sync();
    arrive_at_leader_if<tile>(smem.p_full[q_tiles == 2 ? q : slot.index], signals);
  }

  // Rescales O of query tile `q`. O is left alone where no row of the warp has a new maximum: a factor of 1 would not
  // change it.
  FMHA_DEVICE void rescale(int q) {
    const float correction = take_stats(q);
    release_stats(q);
    if (!__any_sync(ptx::kAllLanes, correction != 1.f)) {
      // The barrier's phase advances whether it is waited for or not, so the parity is counted here.
      if (q_tiles == 1) wait_output(q);
      return;
    }
    // With two query tiles no wait is needed: the scores of these statistics were announced after the output that would
    // be waited for.
    if (q_tiles == 1) {
      wait_output(q);
    } else {
      ptx::tcgen05_fence_after_thread_sync();
    }
#pragma unroll
    for (int c = 0; c < num_chunks; ++c) {
      uint32_t words[chunk];
      ptx::tcgen05_ld(words, tmem + Tmem::o(q) + c * chunk);
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(words);
#pragma unroll
      for (int e = 0; e < chunk; e += 2) {
        const ptx::F32x2 x = ptx::mul_f32x2({float_of(words[e]), float_of(words[e + 1])}, {correction, correction});
        words[e] = bits_of(x.low);
        words[e + 1] = bits_of(x.high);
      }
      ptx::tcgen05_st(tmem + Tmem::o(q) + c * chunk, words);
    }
    ptx::tcgen05_wait_st();
  }

  FMHA_DEVICE void finish(int q) {
    const float row_sum = take_stats(q), row_max = smem.stats[q][1][row_in_tile];
    release_stats(q);
    wait_output(q);
    const Work& work = smem.work[work_slot.index];
    const int32_t row = first_row_of<tile>(work, q) + row_in_tile;
    store_row<spec, tile>(p, work, row, row_sum, row_max, tmem + Tmem::o(q), seen, scales);
  }

  FMHA_DEVICE void run() {
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      const int32_t num_blocks = ptx::uniform(smem.work[work_slot.index].num_blocks);
      if (num_blocks == 0) break;
      BlockRange blocks[q_tiles];
#pragma unroll
      for (int q = 0; q < q_tiles; ++q) blocks[q] = blocks_of<spec, tile, SeenKeys>(p, smem.work[work_slot.index], q);
#pragma unroll 1
      for (int32_t i = 0; i < num_blocks; ++i) {
#pragma unroll
        for (int q = 0; q < q_tiles; ++q) {
          if (!ptx::uniform(blocks[q].has(i))) continue;
          // The first product of a tile overwrites O, so nothing is rescaled before it.
          if (i > blocks[q].begin) rescale(q);
          release_output(q);
        }
        slot.advance();
      }
#pragma unroll
      for (int q = 0; q < q_tiles; ++q) finish(q);
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], signals);
      work_slot.advance();
    }
    ptx::tcgen05_fence_before_thread_sync();
    if constexpr (is_pair(tile)) {
#pragma unroll
      for (uint32_t rank = 0; rank < tile.cluster; ++rank) ptx::mbarrier_arrive_at_if(smem.o_read, rank, signals);
    } else {
      ptx::mbarrier_arrive_if(smem.o_read, signals);
    }
  }
};

template <FwdSpec spec, Sm100Tile tile, class SeenKeys, class Scales>
FMHA_DEVICE void correct(const FwdParams& p, Smem<spec, tile>& smem, const SeenKeys& seen, const Scales& scales,
                         uint32_t tmem) {
  ptx::setmaxnreg_dec<regs(tile).correct>();
  CorrectRole<spec, tile, SeenKeys, Scales> role{p, smem, seen, scales, tmem};
  role.run();
}

}  // namespace fmha::sm100
