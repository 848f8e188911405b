// The value role: two warps bring a V of 8 bits from one ring of shared memory to another, in the form that the
// products take: widened to f16, or transposed. V rows that are not the sequence's are zeroed first, as zero_values.cuh
// does for other types.
#pragma once
#include <fmha/common/zero_rows.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/sm90/fwd/turn_values.cuh>
#include <fmha/sm90/fwd/widen_values.cuh>

namespace fmha::sm90 {

// Named barrier behind which the zeros of both of the role's warps are visible to both. Its number lies above those
// of the votes.
constexpr int kValuesZeroed = 12;

template <FwdSpec spec, Sm90Tile tile>
struct ValueRole {
  using Shared = Smem<spec, tile>;
  Shared& smem;
  Slot<tile.stages> slot;  // of the ring of raw blocks and of that of prepared ones, which have as many
  Slot<kWorkSlots> work_slot;

  FMHA_DEVICE void block(int32_t first_dirty) {
    const int32_t stage = slot.index;
    auto& raw = smem.raw[stage];
    ptx::mbarrier_wait_parity(smem.v_raw[stage], slot.phase);
    if (first_dirty < tile.block_n) {
      const int32_t rank = threadIdx.x % (32 * kValueWarps);
      if constexpr (spec.v_layout == VLayout::ColMajor) {
        zero_columns(raw, first_dirty, rank, 32 * kValueWarps);
      } else {
        zero_rows(raw, first_dirty, rank, 32 * kValueWarps);
      }
      ptx::bar_sync<32 * kValueWarps>(kValuesZeroed);
    }
    ptx::mbarrier_wait_parity(smem.v_empty[stage], slot.phase ^ 1);
    __syncwarp();
    // Several loads are issued before the first store, so that stores do not wait for single loads.
    constexpr int batch = num_consumers(tile) > 2 ? 2 : 4;
    if constexpr (Shared::turned) {
      turn_values<batch>(raw, smem.v[stage]);
    } else {
      widen_values<spec.dtype_v, batch>(raw, smem.v[stage]);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    const bool signals = threadIdx.x % 32 == 0;
    ptx::mbarrier_arrive_if(smem.v_full[stage], signals);
    ptx::mbarrier_arrive_if(smem.v_raw_empty[stage], signals);
    slot.advance();
  }

  FMHA_DEVICE void run() {
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      const int32_t num_blocks = ptx::uniform(smem.work[work_slot.index].num_blocks);
      const int32_t first_dirty = ptx::uniform(smem.work[work_slot.index].first_dirty);
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], threadIdx.x % 32 == 0);
      work_slot.advance();
      if (num_blocks == 0) return;
      block(first_dirty);
#pragma unroll 1
      for (int32_t i = 1; i < num_blocks; ++i) block(tile.block_n);
    }
  }
};

}  // namespace fmha::sm90
