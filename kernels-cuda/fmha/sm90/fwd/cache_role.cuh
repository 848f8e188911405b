// The cache role: two warps widen blocks of K and V, which TMA loads as 8-bit elements into one ring of shared memory,
// to 16 bits in the ring that the products read, and multiply them by their descale. The bits equal those of a cache
// that was widened before (common/widen_cache.cuh). Blocks are taken in the order of their loads: K runs one block
// ahead of V.
#pragma once
#include <fmha/common/widen.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/sm90/fwd/widen_values.cuh>

namespace fmha::sm90 {

// Blocks of 8-bit elements as they lie in the cache, with as many columns as the widened blocks. TMA fills columns that
// the cache lacks.
template <FwdSpec spec, Sm90Tile tile>
using RawK = SmemTile<uint8_t, tile.block_n, Smem<spec, tile>::dim_qk>;
template <FwdSpec spec, Sm90Tile tile>
using RawV = SmemTile<uint8_t, tile.block_n, Smem<spec, tile>::dim_v>;

template <FwdSpec spec, Sm90Tile tile>
struct CacheRole {
  using Shared = Smem<spec, tile>;
  const FwdParams& p;
  Shared& smem;
  Slot<max(tile.raw_stages, 1)> raw_slot;
  Slot<tile.stages> k_slot, v_slot;
  Slot<kWorkSlots> work_slot;

  // The part of a tile's work that this role needs, kept in registers.
  struct Blocks {
    int32_t num_blocks, first_dirty;
    float k_factor, v_factor;
  };

  // Number of loads from shared memory that widen_rows issues before it stores their elements.
  static constexpr int batch = num_consumers(tile) > 1 ? 2 : 4;

  template <class Raw, class Wide>
  FMHA_DEVICE void widen(Wide& wide, Barrier& full, Barrier& empty, uint32_t phase, float factor, int32_t end) {
    const Raw& raw = reinterpret_cast<const Raw&>(smem.cache[raw_slot.index]);
    ptx::mbarrier_wait_parity(smem.v_raw[raw_slot.index], raw_slot.phase);
    ptx::mbarrier_wait_parity(empty, phase ^ 1);
    __syncwarp();
    widen_rows<batch>(raw, wide, [&](uint32_t address, int32_t row, uint32_t first, uint32_t second) {
      const uint32_t eight[2] = {first, second};
      uint32_t words[4];
      fmha::widen_word<tile.stored, spec.dtype_qk, true>(eight, factor, words);
      // Rows of V that are not the sequence's may hold NaN, and NaN times their P of 0 would be NaN in O.
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = row < end ? words[i] : 0;
      ptx::st_shared_v4(address, words);
    });
    ptx::fence_proxy_async();
    __syncwarp();
    const bool signals = threadIdx.x % 32 == 0;
    ptx::mbarrier_arrive_if(full, signals);
    ptx::mbarrier_arrive_if(smem.v_raw_empty[raw_slot.index], signals);
    raw_slot.advance();
  }
  FMHA_DEVICE void widen_k(const Blocks& blocks) {
    const int32_t i = k_slot.index;
    widen<RawK<spec, tile>>(smem.k[i], smem.k_full[i], smem.k_empty[i], k_slot.phase, blocks.k_factor, tile.block_n);
    k_slot.advance();
  }
  FMHA_DEVICE void widen_v(const Blocks& blocks, int32_t i_block) {
    const int32_t i = v_slot.index, end = i_block == 0 ? blocks.first_dirty : tile.block_n;
    widen<RawV<spec, tile>>(smem.v[i], smem.v_full[i], smem.v_empty[i], v_slot.phase, blocks.v_factor, end);
    v_slot.advance();
  }

  // Waits for the next tile, and widens its first block of K.
  FMHA_DEVICE Blocks begin() {
    ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
    const Work& work = smem.work[work_slot.index];
    Blocks blocks = {ptx::uniform(work.num_blocks), ptx::uniform(work.first_dirty), 1.f, 1.f};
    if (blocks.num_blocks > 0) {
      blocks.k_factor = scalar_of(p.descale_k, work.i_batch, work.i_head_kv, 1.f);
      blocks.v_factor = scalar_of(p.descale_v, work.i_batch, work.i_head_kv, 1.f);
    }
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], threadIdx.x % 32 == 0);
    work_slot.advance();
    if (blocks.num_blocks > 0) widen_k(blocks);
    return blocks;
  }

  FMHA_DEVICE void run() {
    Blocks blocks = begin();
    while (blocks.num_blocks > 0) {
#pragma unroll 1
      for (int32_t i = 0; i < blocks.num_blocks - 1; ++i) {
        widen_k(blocks);
        widen_v(blocks, i);
      }
      const Blocks own = blocks;
      if constexpr (looks_ahead(tile)) {
        blocks = begin();
        widen_v(own, own.num_blocks - 1);
      } else {
        widen_v(own, own.num_blocks - 1);
        blocks = begin();
      }
    }
  }
};

}  // namespace fmha::sm90
