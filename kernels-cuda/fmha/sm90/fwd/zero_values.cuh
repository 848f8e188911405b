// The zero role: V rows that are not the sequence's (padding, another sequence) may hold anything, NaN included, and
// NaN times their P of 0 would be NaN in O. Only a tile's first block has such rows. A warp of the load role's
// warpgroup zeroes them before it announces the block to the consumers.
#pragma once
#include <fmha/common/zero_rows.cuh>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
struct ZeroRole {
  using Shared = Smem<spec, tile>;
  Shared& smem;
  Slot<tile.stages> v_slot;
  Slot<kWorkSlots> work_slot;
  uint32_t raw_phases = 0;  // a bit a stage: v_raw completes a phase only where rows of a block are to be zeroed

  FMHA_DEVICE void zero(int32_t first_row) {
    const int32_t stage = v_slot.index, lane = threadIdx.x % 32;
    ptx::mbarrier_wait_parity(smem.v_raw[stage], raw_phases >> stage & 1);
    raw_phases ^= 1u << stage;
    if constexpr (Shared::v_columns) {
      zero_columns(smem.v[stage], first_row, lane, 32);
    } else {
      zero_rows(smem.v[stage], first_row, lane, 32);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.v_full[stage], lane == 0);
  }

  FMHA_DEVICE void run() {
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      const int32_t num_blocks = smem.work[work_slot.index].num_blocks;
      const int32_t first_dirty = smem.work[work_slot.index].first_dirty;
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], threadIdx.x % 32 == 0);
      work_slot.advance();
      if (num_blocks == 0) return;
      if (first_dirty < tile.block_n) zero(first_dirty);
      v_slot.advance_by(num_blocks);
    }
  }
};

}  // namespace fmha::sm90
