// The bias role: one thread brings the bias of 16 bits by TMA, each warpgroup's 64 rows of a block in a slot of their
// own, `bias_stages` blocks ahead, across a tile's end too.
#pragma once
#include <fmha/common/work.cuh>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
struct BiasRole {
  const FwdParams& p;
  const TensorMap& map;
  Smem<spec, tile>& smem;
  Slot<tile.bias_stages> slot;
  Slot<kWorkSlots> work_slot;

  FMHA_DEVICE void load(const Work& work, int32_t block, int32_t warpgroup) {
    using Tile = BiasTile<tile>;
    const int32_t at = warpgroup * tile.bias_stages + slot.index;
    ptx::mbarrier_wait_parity(smem.bias_empty[at], slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(smem.bias_full[at], Tile::tile_bytes);
    // A bias that all heads or all sequences share has a stride of 0 in that dimension, and extent 1 in the tensor map.
    const int32_t i_head = p.bias.head == 0 ? 0 : work.i_head, i_batch = p.bias.batch == 0 ? 0 : work.i_batch;
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(smem.bias[at].address() + chunk * Tile::chunk_bytes, map, smem.bias_full[at],
                                   block * tile.block_n + chunk * Tile::span, work.first_row + warpgroup * mma::kRows,
                                   i_head, i_batch, ptx::CacheHint::EvictFirst);
    }
  }

  FMHA_DEVICE void run() {
    ptx::prefetch_tensormap(map);
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      const Work work = smem.work[work_slot.index];
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], true);
      work_slot.advance();
      if (work.num_blocks == 0) return;
#pragma unroll 1
      for (int32_t i = 0; i < work.num_blocks; ++i) {
        // A tile without keys has block -1: columns before the tensor, where TMA reads zeros.
        for (int32_t w = 0; w < num_consumers(tile); ++w) load(work, block_at(work, i), w);
        slot.advance();
      }
    }
  }
};

}  // namespace fmha::sm90
