// The clean role: V rows that are not the sequence's (padding, another sequence) may hold anything, NaN
// included, which times their P of 0 would spread. They stand in a tile's first block alone; a warp that
// the load role has to spare zeroes them before the block is announced.
#pragma once
#include <fmha/mma/register_product.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/sm90/scheduler.cuh>

namespace fmha::sm90 {

// Zeros the keys from `begin` on of a [dim, keys] tile, 8 at a time, by `num_threads` of which this is `rank`.
template <class Tile>
FMHA_DEVICE void clean_columns(const Tile& tile, int32_t begin, int32_t rank, int32_t num_threads) {
  const int32_t first_word = begin / 8, words = Tile::dim / 8 - first_word;
#pragma unroll 1
  for (int32_t at = rank; at < Tile::rows * words; at += num_threads) {
    const int32_t row = at / words, word = first_word + at - row * words;
    const uint32_t address = tile.address() + mma::word_offset<Tile>(row, 8 * word);
    if (8 * word >= begin) {
      ptx::st_shared_v4_zero(address);
    } else {
      for (int32_t k = begin - 8 * word; k < 8; ++k) ptx::st_shared_u16(address + 2 * k, 0);
    }
  }
}

// Likewise the rows from `first_row` on of a [keys, dim] tile.
template <class Tile>
FMHA_DEVICE void clean_rows(const Tile& tile, int32_t first_row, int32_t rank, int32_t num_threads) {
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
    const uint32_t base = tile.address() + chunk * Tile::chunk_bytes;
    for (uint32_t at = first_row * Tile::span_bytes + rank * 16; at < Tile::chunk_bytes; at += num_threads * 16)
      ptx::st_shared_v4_zero(base + at);
  }
}

template <FwdSpec spec, Sm90Tile tile>
struct Cleaner {
  using Shared = Smem<spec, tile>;
  Shared& smem;
  Slot<tile.stages> v_slot;
  Slot<kWorkSlots> work_slot;
  uint32_t raw_phases = 0;  // a bit a stage: v_raw completes only where a block is cleaned

  FMHA_DEVICE void clean(int32_t first_row) {
    const int32_t stage = v_slot.index, lane = threadIdx.x % 32;
    ptx::mbarrier_wait_parity(smem.v_raw[stage], raw_phases >> stage & 1);
    raw_phases ^= 1u << stage;
    if constexpr (Shared::v_columns) {
      clean_columns(smem.v[stage], first_row, lane, 32);
    } else {
      clean_rows(smem.v[stage], first_row, lane, 32);
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
      if (first_dirty < tile.block_n) clean(first_dirty);
      v_slot.advance_by(num_blocks);
    }
  }
};

}  // namespace fmha::sm90
