// Latent attention (DeepSeek's MLA, absorbed) on Hopper: keys of 576 elements, whose first 512 are the values, of few kv heads,
// in most models one, with 16 to 128 query heads each.
//
// A CTA has 64 rows, (query, head) pairs, and one part of the keys, which are read into shared memory once. That two warpgroups
// share the rows, and each computes every second block's scores for both, is the idea of FlashMLA (DeepSeek, 2025): consume.cuh.
#pragma once
#include <fmha/ptx/grid.cuh>
#include <fmha/sm90/mla/epilogue.cuh>
#include <fmha/sm90/mla/load.cuh>

namespace fmha::mla {

template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void consume(const FwdParams& p, const MlaSchedule& schedule, const Work& work, Smem& smem) {
  ptx::setmaxnreg_inc<Regs::consume>();
  if (ptx::uniform(threadIdx.x / kWarpgroup) == 1) {
    Consumer<spec, tile, 0> consumer{p, work, smem};
    consumer.run();
    store(consumer, schedule);
  } else {
    Consumer<spec, tile, 1> consumer{p, work, smem};
    consumer.run();
    store(consumer, schedule);
  }
}

template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void fwd(const FwdParams& p, const ptx::TensorMap& map, const MlaSchedule& schedule) {
  static_assert(spec.head_dim_qk == kDimQk && spec.head_dim_v == kDimV, "sm90_mla: rows of 576, values of 512");
  static_assert(spec.dtype_qk == spec.dtype_v && size_bytes(spec.dtype_qk) == 2 && !is_fp8(spec.dtype_qk),
                "sm90_mla: one 16-bit type");
  static_assert(!is_fp8(spec.dtype_o) && !spec.dropout && !modifies_score(spec) && !spec.sink_columns,
                "sm90_mla: nothing but a band and a sink modifies scores");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem& smem = *reinterpret_cast<Smem*>(raw);
  if (threadIdx.x == 0) {
    if constexpr (tile.box_rows > 0) ptx::prefetch_tensormap(map);
    ptx::mbarrier_init(smem.q_full, kWarpgroup);
    for (int slot = 0; slot < 2; ++slot) {
      for (int half = 0; half < 2; ++half) {
        ptx::mbarrier_init(smem.k_full[slot][half], kWarpgroup);
        ptx::mbarrier_init(smem.k_empty[slot][half], kWarpgroup / 32);
      }
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // The merge's CTAs find no room before these end, and wait for all of them.
  if constexpr (tile.split_keys > 0) ptx::launch_dependents();
  const Work work = resolve<spec, (tile.split_keys > 0)>(p, schedule, blockIdx.x);
  if (!work.has_rows) return;
  if (ptx::uniform(threadIdx.x / kWarpgroup) == 0) {
    ptx::setmaxnreg_dec<Regs::load>();
    // Keys that no other CTA reads need not stay in the L2.
    const ptx::CacheHint hint = schedule.num_m_blocks > 1 ? ptx::CacheHint::EvictLast : ptx::CacheHint::EvictFirst;
    Loader<spec, tile> loader{p, map, work, smem, hint};
    loader.run();
  } else {
    consume<spec, tile>(p, schedule, work, smem);
  }
}

}  // namespace fmha::mla
