// The forward of fwd.cuh with K and V loaded by TMA, which one warp beside the consumers issues. It runs on sm_90 and
// later, GeForce among them, whose tensor cores take mma.sync. Consumers spend no instruction on addresses of K and
// V, and wait at no barrier of the CTA.
//
//   warp that loads   K(i): waits for k_empty    V(i): waits for v_empty
//   consumers         k_full: S = Q K(i)^T, softmax, k_empty    v_full: O += P V(i), v_empty
//
// A ring has `stages` slots; with one, K(i + 1) arrives during the exponentials and P V of block i. The consumers
// copy Q, once a tile, so that no shape of Q needs a map.
#pragma once
#include <fmha/common/zero_rows.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/sm80/fwd/fwd.cuh>

namespace fmha::sm80 {

// Tensor maps as the host encodes them: K and V `(dim, row, head, batch)`, a column-major V `(row, dim, head,
// batch)`.
struct Maps {
  ptx::TensorMap unread_q, k, v;
};

constexpr int kConsumersBarrier = 1;

// Loads a block of the tile's keys by TMA. One thread calls it.
template <int block_n, bool columns, class Tile>
FMHA_DEVICE void load_block(const Tile& to, const ptx::TensorMap& map, ptx::Barrier& full, const Work& work, int32_t i) {
  const int32_t block = block_at(work, i);
  // A tile without keys has block -1: rows before the tensor, where TMA reads zeros.
  const int32_t row = block < 0 ? -block_n : work.k_row + block * block_n;
  ptx::mbarrier_arrive_expect_tx(full, Tile::tile_bytes);
#pragma unroll
  for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
    const int32_t c0 = chunk * Tile::span;
    ptx::cp_async_bulk_tensor_4d(to.address() + chunk * Tile::chunk_bytes, map, full, columns ? row + c0 : c0, columns ? 0 : row,
                                 work.i_head_kv, work.storage_batch, ptx::CacheHint::EvictLast);
  }
}

// Work of the warp that issues the TMA loads.
template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void load_by_tma(const Work& work, const Maps& maps, Smem<spec, tile>& smem) {
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t s = i % tile.stages;
    const uint32_t emptied = i / tile.stages & 1 ^ 1;
    ptx::mbarrier_wait_parity(smem.k_empty[s], emptied);
    load_block<tile.block_n, false>(smem.k[s], maps.k, smem.k_full[s], work, i);
    ptx::mbarrier_wait_parity(smem.v_empty[s], emptied);
    load_block<tile.block_n, Smem<spec, tile>::v_columns>(smem.v[s], maps.v, smem.v_full[s], work, i);
  }
}

// Writes zeros to rows of V's first block for keys that no query of the sequence sees, whose V may be NaN.
template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void zero_unseen(const Work& work, Smem<spec, tile>& smem) {
  if (work.first_dirty >= tile.block_n) return;
  if constexpr (Smem<spec, tile>::v_columns) {
    zero_columns(smem.v[0], work.first_dirty, threadIdx.x, num_consumers(tile));
  } else {
    zero_rows(smem.v[0], work.first_dirty, threadIdx.x, num_consumers(tile));
  }
  // Orders these writes before the TMA load that writes the slot next.
  ptx::fence_proxy_async();
  ptx::bar_sync<num_consumers(tile)>(kConsumersBarrier);
}

template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void fwd_tma(const FwdParams& p, const TileSchedule& schedule, const Maps& maps, const EveryKey& keys = {}) {
  static_assert(tile.tma && tile.split_keys == 0 && tile.value_parts == 1, "sm80: whole sequences, warps with rows of their own");
  static_assert(spec.kv_layout != KvKind::Paged && !widens_cache(spec, tile), "sm80: TMA brings rows one after another, as they are");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if (int32_t(blockIdx.x) >= schedule.num_tiles) return;
  const Work work = resolve_tile<spec, shared(tile)>(p, schedule, blockIdx.x);
  if (work.num_blocks == 0) return;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < tile.stages; ++s) {
      ptx::mbarrier_init(smem.k_full[s], 1);
      ptx::mbarrier_init(smem.v_full[s], 1);
      ptx::mbarrier_init(smem.k_empty[s], tile.warps);
      ptx::mbarrier_init(smem.v_empty[s], tile.warps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= num_consumers(tile)) {
    if (threadIdx.x == num_consumers(tile)) load_by_tma<spec, tile>(work, maps, smem);
    return;
  }

  const Loader<spec, tile> loader{p, work, smem, keys};
  Consumer<spec, tile, EveryKey> consumer{p, work, smem, keys};
  loader.load_q();
  ptx::cp_async_commit_group();
  consumer.begin();
  ptx::cp_async_wait_group<0>();
  ptx::bar_sync<num_consumers(tile)>(kConsumersBarrier);
  const bool announces = threadIdx.x % 32 == 0;
  // Two plain integers in place of a Slot, which has more members: they would be spilled at head dimension 128.
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t block = block_at(work, i), s = i % tile.stages;
    const uint32_t filled = i / tile.stages & 1;
    const bool computes = !consumer.is_hidden(block);
    ptx::mbarrier_wait_parity(smem.k_full[s], filled);
    if (computes) consumer.score(smem.k[s], block);
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.k_empty[s], announces);
    ptx::mbarrier_wait_parity(smem.v_full[s], filled);
    if (i == 0) zero_unseen<spec, tile>(work, smem);
    if (computes) consumer.accumulate(smem.v[s]);
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.v_empty[s], announces);
  }
  store(consumer);
}

}  // namespace fmha::sm80
