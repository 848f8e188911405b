// Attention forward on Hopper: one warpgroup loads, one to three consume.
//
// The schedule of FlashAttention-3 (Shah et al., 2024). Of the first warpgroup's warps one loads
// (load.cuh), one plans tiles (scheduler.cuh), one zeroes what is not the sequence's (clean.cuh).
#pragma once
#include <fmha/sm90/consume.cuh>
#include <fmha/sm90/load.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void init_barriers(Smem<spec, tile>& smem) {
  constexpr int warps = num_consumer_warps(tile);
  for (int i = 0; i < Smem<spec, tile>::q_buffers; ++i) {
    ptx::mbarrier_init(smem.q_full[i], 1);
    ptx::mbarrier_init(smem.q_empty[i], warps);
  }
  for (int i = 0; i < tile.stages; ++i) {
    ptx::mbarrier_init(smem.k_full[i], 1);
    ptx::mbarrier_init(smem.k_empty[i], warps);
    ptx::mbarrier_init(smem.v_full[i], 1);
    ptx::mbarrier_init(smem.v_raw[i], 1);
    ptx::mbarrier_init(smem.v_empty[i], warps);
  }
  for (int i = 0; i < kWorkSlots; ++i) {
    ptx::mbarrier_init(smem.work_full[i], 1);
    ptx::mbarrier_init(smem.work_empty[i], warps + 2);
  }
  ptx::fence_mbarrier_init();
}

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void fwd(const FwdParams& p, const Maps& maps, const Sm90Schedule& schedule) {
  static_assert(spec.dtype_qk == spec.dtype_v, "sm90: Q, K and V share a type");
  static_assert(spec.dtype_qk == DType::F16 || spec.dtype_qk == DType::Bf16, "sm90: 16-bit types");
  static_assert(spec.v_layout == VLayout::RowMajor, "sm90: V is row-major");
  static_assert(!spec.dropout && !spec.write_keep_mask, "sm90: no dropout");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  if (ptx::uniform(threadIdx.x / mma::kWarpgroup) == 0) {
    load<spec, tile>(p, maps, schedule, smem);
  } else {
    consume<spec, tile>(p, smem);
  }
}

}  // namespace fmha::sm90
