// The load role: one thread keeps the copy engine fed.
#pragma once
#include <fmha/ptx/barrier.cuh>
#include <fmha/sm90/clean.cuh>

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

  // Where a tile's key blocks are; in registers, so that a load follows its slot's release at once.
  struct Keys {
    int32_t i_head_kv, storage_batch, k_row, last_block, num_band_blocks, last_sink_block;
    bool dirty;

    FMHA_DEVICE explicit Keys(const Work& work)
        : i_head_kv(work.i_head_kv), storage_batch(work.storage_batch), k_row(work.k_row),
          last_block(work.last_block), num_band_blocks(work.num_band_blocks), last_sink_block(work.last_sink_block),
          dirty(work.first_dirty < tile.block_n) {}

    FMHA_DEVICE int32_t row(int32_t i) const {
      const int32_t block = spec.sink_columns && i >= num_band_blocks ? last_sink_block - (i - num_band_blocks)
                                                                      : last_block - i;
      // A tile without keys has block -1: rows before the tensor, zeros.
      return block < 0 ? -tile.block_n : k_row + block * tile.block_n;
    }
  };

  template <class Tile>
  FMHA_DEVICE void load_block(Tile (&tiles)[tile.stages], const TensorMap& map, Barrier& full,
                              Barrier (&empty)[tile.stages], Slot<tile.stages>& slot, const Keys& keys, int32_t i) {
    const int32_t row = keys.row(i);
    ptx::mbarrier_wait_parity(empty[slot.index], slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Tile::tile_bytes);
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(tiles[slot.index].address() + chunk * Tile::chunk_bytes, map, full,
                                   chunk * Tile::span, row, keys.i_head_kv, keys.storage_batch,
                                   ptx::CacheHint::EvictLast);
    }
    slot.advance();
  }
  FMHA_DEVICE void load_k(const Keys& keys, int32_t i) {
    load_block(smem.k, maps.k, smem.k_full[k_slot.index], smem.k_empty, k_slot, keys, i);
  }
  FMHA_DEVICE void load_v(const Keys& keys, int32_t i) {
    Barrier& full = keys.dirty && i == 0 ? smem.v_raw[v_slot.index] : smem.v_full[v_slot.index];
    load_block(smem.v, maps.v, full, smem.v_empty, v_slot, keys, i);
  }

  FMHA_DEVICE void ask() const { ptx::barrier_arrive<kWorkWanted, 64>(); }

  // The next tile, once it is planned: its Q and first K. Returns its number of blocks.
  FMHA_DEVICE int32_t begin_tile() {
    ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
    const Work& work = smem.work[work_slot.index];
    if (work.num_blocks > 0) {
      load_q(work);
      load_k(Keys(work), 0);
    }
    return work.num_blocks;
  }

  FMHA_DEVICE void run() {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    ask();
    int32_t num_blocks = begin_tile();
    while (num_blocks > 0) {
      const Keys keys(smem.work[work_slot.index]);
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], true);
      work_slot.advance();
      // Some blocks before the end: earlier, the tile would be held while others idle; later, its
      // planning would show.
      const int32_t ask_at = max(num_blocks - 3, 0);
#pragma unroll 1
      for (int32_t i = 0; i < num_blocks - 1; ++i) {
        if (i == ask_at) ask();
        load_k(keys, i + 1);
        load_v(keys, i);
      }
      if (num_blocks == 1) ask();
      // K runs one block ahead of V, over the tile's end too, unless the single Q buffer forbids: that
      // is free only after the tile's last scores.
      const int32_t last = num_blocks - 1;
      if constexpr (tile.lookahead) {
        num_blocks = begin_tile();
        load_v(keys, last);
      } else {
        load_v(keys, last);
        num_blocks = begin_tile();
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
  } else if (threadIdx.x / 32 == 2) {
    Cleaner<spec, tile> cleaner{smem};
    cleaner.run();
  }
}

}  // namespace fmha::sm90
