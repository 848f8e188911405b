// Wide heads on Hopper, whose O takes the registers of two warpgroups: rows of Q and K of up to 576 elements and of V
// of up to 512; among them latent attention (DeepSeek's MLA, absorbed), whose values are the first 512 elements of
// its keys, of few kv heads, in most models one, with 16 to 128 query heads each.
//
// A CTA has 64 rows, (query, head) pairs, and one part of the keys, which are read into shared memory once. That two
// warpgroups share the rows, and each computes every second block's scores for both, is the idea of FlashMLA
// (DeepSeek, 2025): consume.cuh.
#pragma once
#include <fmha/ptx/grid.cuh>
#include <fmha/sm90/mla/epilogue.cuh>
#include <fmha/sm90/mla/load.cuh>

namespace fmha::mla {

template <FwdSpec spec, Sm90MlaTile tile, class Keys>
FMHA_DEVICE void consume(const FwdParams& p, const Work& work, Smem<spec, tile>& smem, const Keys& keys) {
  ptx::setmaxnreg_inc<regs(tile).consume>();
  if (ptx::uniform(threadIdx.x / kWarpgroup) == 1) {
    Consumer<spec, tile, 0> consumer{p, work, smem};
    consumer.run();
    store(consumer, keys);
  } else {
    Consumer<spec, tile, 1> consumer{p, work, smem};
    consumer.run();
    store(consumer, keys);
  }
}

// Prepares the CTA's barriers.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE Smem<spec, tile>& begin(const Maps& maps) {
  static_assert(spec.head_dim_qk <= 576 && spec.head_dim_v <= 512, "sm90_mla: rows of 576 elements, values of 512");
  static_assert(spec.dtype_qk == spec.dtype_v && size_bytes(spec.dtype_qk) == 2 && !is_fp8(spec.dtype_qk),
                "sm90_mla: one 16-bit type");
  static_assert(!is_fp8(spec.dtype_o) && !spec.dropout && !spec.sink_columns && spec.v_layout == VLayout::RowMajor,
                "sm90_mla: O of 16 or 32 bits, no dropout, no sink columns, rows of V");
  static_assert(regs(tile).load + 2 * regs(tile).consume <= 3 * kLaunchRegs, "sm90_mla: registers of all threads");
  using Shared = Smem<spec, tile>;
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& smem = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    if constexpr (tile.by_tma) {
      ptx::prefetch_tensormap(maps.k);
      if constexpr (!tile.v_in_k) ptx::prefetch_tensormap(maps.v);
    }
    ptx::mbarrier_init(smem.q_full, kWarpgroup);
    for (int part = 0; part < Shared::P::parts; ++part) {
      ptx::mbarrier_init(smem.full[part], kWarpgroup);
      ptx::mbarrier_init(smem.empty[part], tile.cluster * kWarpgroup / 32);
    }
    if constexpr (tile.listed) {
      for (Barrier& told : smem.list.told) ptx::mbarrier_init(told, kWarpgroup / 32);
      ptx::mbarrier_init(smem.list.counted, 1);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (tile.cluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  // The merge's CTAs find no room before these end, and wait for all of them.
  if constexpr (tile.split_keys > 0) ptx::launch_dependents();
  return smem;
}

// Deals the roles out. Keys that no other tile of rows reads (`alone`) need not stay in the L2.
template <FwdSpec spec, Sm90MlaTile tile, class Keys = EveryKey>
FMHA_DEVICE void attend(const FwdParams& p, const Maps& maps, const Work& work, Smem<spec, tile>& smem, bool alone,
                        const Keys& keys = {}) {
  if (ptx::uniform(threadIdx.x / kWarpgroup) == 0) {
    ptx::setmaxnreg_dec<regs(tile).load>();
    const ptx::CacheHint hint = alone ? ptx::CacheHint::EvictFirst : ptx::CacheHint::EvictLast;
    Loader<spec, tile, Keys> loader{p, maps, work, smem, hint, keys};
    loader.run();
  } else {
    consume<spec, tile>(p, work, smem, keys);
  }
  // A CTA stays until the other has received what it loads for it, and it what the other loads for it.
  if constexpr (tile.cluster > 1) ptx::cluster_sync();
}

template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void fwd(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule) {
  Smem<spec, tile>& smem = begin<spec, tile>(maps);
  const Work work = resolve<spec, tile>(p, schedule, blockIdx.x);
  if (!work.has_rows) return;
  attend<spec, tile>(p, maps, work, smem, schedule.num_m_blocks <= tile.cluster);
}

// The kernel over lists of keys: a tile has up to 64 query heads of one token and kv head, and gathers the rows that
// the token's list names.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule, const ListParams& lists) {
  static_assert(tile.listed && !tile.by_tma && tile.cluster == 1, "sm90_mla: rows of a list are gathered one by one");
  static_assert(spec.mask == MaskKind::Full, "sm90_mla: lists hide keys by their places");
  static_assert(spec.bias == BiasKind::None, "sm90_mla: a place in a list is not a position");
  Smem<spec, tile>& smem = begin<spec, tile>(maps);
  const Work work = resolve_token<spec, tile>(p, schedule, lists, blockIdx.x);
  if (!work.has_rows) return;
  attend<spec, tile>(p, maps, work, smem, true, keys_of_token(p, lists, work));
}

}  // namespace fmha::mla
