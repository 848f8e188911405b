// The load role: one thread keeps the copy engine fed.
#pragma once
#include <fmha/ptx/barrier.cuh>
#include <fmha/sm90/scheduler.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
struct Loader {
  using Shared = Smem<spec, tile>;
  const FwdParams& p;
  const Maps& maps;
  Shared& smem;
  Slot<Shared::q_buffers> q_slot;
  Slot<tile.stages> k_slot, v_slot;
  Slot<kWorkSlots> work_slot;

  FMHA_DEVICE void load_q(const Work& work) {
    using Tile = typename Shared::QTile;
    Barrier& full = smem.q_full[q_slot.index];
    ptx::mbarrier_wait_parity(smem.q_empty[q_slot.index], q_slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Tile::tile_bytes);
    const int32_t head_in_group = work.i_head - work.i_head_kv * p.gqa_ratio;
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_5d(smem.q[q_slot.index].address() + chunk * Tile::chunk_bytes, maps.q, full,
                                   chunk * Tile::span, head_in_group,
                                   work.q_row + query_of<tile>(p, work.first_row), work.i_head_kv,
                                   work.storage_batch, ptx::CacheHint::EvictFirst);
    }
    q_slot.advance();
  }

  template <class Tile>
  FMHA_DEVICE void load_block(Tile (&tiles)[tile.stages], const TensorMap& map, Barrier (&full)[tile.stages],
                              Barrier (&empty)[tile.stages], Slot<tile.stages>& slot, const Work& work, int32_t i) {
    ptx::mbarrier_wait_parity(empty[slot.index], slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full[slot.index], Tile::tile_bytes);
    // A tile without keys has block -1: rows before the tensor, zeros.
    const int32_t block = block_at(work, i);
    const int32_t row = block < 0 ? -tile.block_n : work.k_row + block * tile.block_n;
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(tiles[slot.index].address() + chunk * Tile::chunk_bytes, map, full[slot.index],
                                   chunk * Tile::span, row, work.i_head_kv, work.storage_batch,
                                   ptx::CacheHint::EvictLast);
    }
    slot.advance();
  }
  FMHA_DEVICE void load_k(const Work& work, int32_t i) {
    load_block(smem.k, maps.k, smem.k_full, smem.k_empty, k_slot, work, i);
  }
  FMHA_DEVICE void load_v(const Work& work, int32_t i) {
    load_block(smem.v, maps.v, smem.v_full, smem.v_empty, v_slot, work, i);
  }

  FMHA_DEVICE void ask() const { ptx::barrier_arrive<kWorkWanted, 64>(); }

  // K runs one block ahead of V, over the tile's end too: at `last` the next tile's Q and K begin.
  FMHA_DEVICE void load_next_k(const Work& work, const Work& next, int32_t i, bool last) {
    if (last && next.num_blocks == 0) return;
    if (last) load_q(next);
    load_k(last ? next : work, last ? 0 : i + 1);
  }

  FMHA_DEVICE void run() {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    ask();
    // Before the first tile stands one of no blocks, at whose end the first begins.
    int32_t num_blocks = 0, i = -1, ask_at = 0;
    Slot<kWorkSlots> next_slot;
#pragma unroll 1
    while (true) {
      if (i == ask_at) ask();
      const Work& work = smem.work[work_slot.index];
      const Work& next = smem.work[next_slot.index];
      const bool last = i + 1 == num_blocks;
      if constexpr (!tile.lookahead) {
        // The single Q buffer is free only after the tile's last scores: V goes first.
        if (i >= 0) load_v(work, i);
      }
      if (last) ptx::mbarrier_wait_parity(smem.work_full[next_slot.index], next_slot.phase);
      load_next_k(work, next, i, last);
      if constexpr (tile.lookahead) {
        if (i >= 0) load_v(work, i);
      }
      ++i;
      if (last) {
        if (num_blocks > 0) ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], true);
        num_blocks = next.num_blocks;
        if (num_blocks == 0) return;
        work_slot = next_slot;
        next_slot.advance();
        i = 0;
        // Some blocks before the end: earlier, the tile would be held while others idle; later, its
        // resolution would show.
        ask_at = max(num_blocks - 3, 0);
      }
    }
  }
};

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void load(const FwdParams& p, const Maps& maps, const Sm90Schedule& schedule, Smem<spec, tile>& smem) {
  ptx::setmaxnreg_dec<regs(tile).load>();
  if (threadIdx.x == 0) {
    Loader<spec, tile> loader{p, maps, smem};
    loader.run();
  } else if (threadIdx.x == 32) {
    schedule_tiles<spec, tile>(p, schedule, smem);
  }
}

}  // namespace fmha::sm90
