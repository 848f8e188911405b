// Attention backward on Hopper, its main kernel: dK and dV of a key block, and its share of dQ.
//
// The design is that of FlashAttention-3's backward (Shah et al., 2024). A CTA keeps a key block's K and V and walks
// the query blocks; dK and dV stay in registers, dQ is added to sums in memory at each step. One thread of the first
// warpgroup loads (load.cuh), one may store dQ (dq/store.cuh), one or two may poll and release dQ's semaphores
// (dq/semaphore.cuh), and a warp may make delta (make_delta.cuh) and finish dQ (dq/finish.cuh); the others consume
// (consume.cuh). The launch before is preprocess.cuh, the one after postprocess.cuh.
#pragma once
#include <fmha/sm90/bwd/consume.cuh>
#include <fmha/sm90/bwd/dq/finish.cuh>
#include <fmha/sm90/bwd/dq/semaphore.cuh>
#include <fmha/sm90/bwd/dq/store.cuh>
#include <fmha/sm90/bwd/load.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void init_barriers(Smem<spec, tile>& smem) {
  constexpr int warps = num_consumer_warps(tile);
  ptx::mbarrier_init(smem.k_full, 1);
  ptx::mbarrier_init(smem.v_full, 1);
  ptx::mbarrier_init(smem.kv_empty, warps);
  for (int i = 0; i < tile.stages_q; ++i) {
    ptx::mbarrier_init(smem.q_full[i], 1);
    ptx::mbarrier_init(smem.q_empty[i], warps * cluster_size(tile));
  }
  for (int i = 0; i < tile.stages_dout; ++i) {
    ptx::mbarrier_init(smem.dout_full[i], 1);
    ptx::mbarrier_init(smem.dout_empty[i], warps * cluster_size(tile));
  }
  for (int i = 0; i < num_consumers(tile); ++i) {
    ptx::mbarrier_init(smem.dq_full[i], 4);
    ptx::mbarrier_init(smem.dq_empty[i], 1);
  }
  if constexpr (in_clusters(tile)) {
    for (int i = 0; i < tile.stages_ds; ++i) {
      ptx::mbarrier_init(smem.other_ds_full[i], 1);
      ptx::mbarrier_init(smem.other_ds_empty[i], warps);
    }
  }
  if constexpr (has_one_probs(tile)) ptx::mbarrier_init(smem.probs_empty, 4);
  if constexpr (finishes_dq(tile)) ptx::mbarrier_init(smem.sums_full, 1);
  ptx::mbarrier_init(smem.dq_admitted, 1);
  ptx::mbarrier_init(smem.dq_added, 1);
  ptx::mbarrier_init(smem.dq_added_seen, 1);
  for (int i = 0; i < kTileIndexSlots; ++i) {
    ptx::mbarrier_init(smem.tile_index_full[i], 1);
    const bool is_told_by_other = in_clusters(tile) && cluster_rank<tile>() == 0;
    ptx::mbarrier_init(smem.tile_index_empty[i], warps + kNumDqThreads<spec, tile> + is_told_by_other);
  }
  ptx::fence_mbarrier_init();
}

template <BwdSpec spec, Sm90BwdTile tile, class ArrivedKeys = AllKeysHere, class SeenKeys = EveryKey>
FMHA_DEVICE void main(const BwdParams& p, const Maps& maps, const Sm90BwdSchedule& schedule, ArrivedKeys arrived = {},
                      const SeenKeys& seen = {}) {
  static_assert(spec.fwd.dtype_qk == spec.fwd.dtype_v && spec.fwd.dtype_o == spec.fwd.dtype_v,
                "sm90 backward: Q, K, V and dO share a type");
  static_assert(spec.fwd.dtype_qk == DType::F16 || spec.fwd.dtype_qk == DType::Bf16, "sm90 backward: 16-bit types");
  using S = Shape<spec, tile>;
  static_assert(S::dq_rows == mma::kRows * S::consumers && S::dq_block == tile.block_m * S::dq_dim,
                "a consumer has 64 rows of dQ, or of its transpose");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if (threadIdx.x == 0) init_barriers(smem);
  if constexpr (in_clusters(tile)) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  wait_for_launch_before();
  if (ptx::uniform(threadIdx.x / mma::kWarpgroup) == 0) {
    ptx::setmaxnreg_dec<tile.load_registers>();
    const int32_t warp = ptx::uniform(threadIdx.x / 32);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (warp == 0 && first_lane) load<spec, tile>(p, maps, schedule, arrived, seen, smem);
    if constexpr (!adds_from_registers(tile)) {
      if (warp == 1 && first_lane) store_dq<spec, tile>(p, schedule, smem, seen);
      if constexpr (kDqStart<spec, tile> == DqStart::Ordered) {
        if (warp == 2 && first_lane) poll_order<spec, tile>(p, schedule, smem, seen);
        if (warp == 3 && first_lane) release_order<spec, tile>(p, schedule, smem, seen);
      } else if constexpr (kDqStart<spec, tile> == DqStart::FirstStores) {
        if (warp == 2 && first_lane) poll_first_stores<spec, tile>(p, schedule, smem, seen);
      }
      if constexpr (finishes_dq(tile)) {
        if (warp == 3) Finisher<spec, tile>{p, maps, schedule, smem}.run();
      }
    } else if constexpr (kDqStart<spec, tile> == DqStart::Ordered) {
      if (warp == 1 && first_lane) poll_order_for_consumers<spec, tile>(p, schedule, smem, seen);
    }
  } else {
    ptx::setmaxnreg_inc<consume_regs(tile)>();
    consume<spec, tile>(p, schedule, smem, seen);
    if constexpr (finishes_dq(tile)) Finisher<spec, tile>{p, maps, schedule, smem}.run_from_memory();
  }
  // Waits until the other CTA has sent and received all its data: a CTA's shared memory must exist until then.
  if constexpr (in_clusters(tile)) ptx::cluster_sync();
}

}  // namespace fmha::sm90::bwd
