// The load role: one thread decides what comes next and keeps the copy engine fed.
#pragma once
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
  Slot<2> work_slot;

  FMHA_DEVICE void publish(const Work& work) {
    ptx::mbarrier_wait_parity(smem.work_empty[work_slot.index], work_slot.phase ^ 1);
    smem.work[work_slot.index] = work;
    ptx::mbarrier_arrive_if(smem.work_full[work_slot.index], true);
    work_slot.advance();
  }

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
                              Barrier (&empty)[tile.stages], Slot<tile.stages>& slot, const Work& work, int32_t block) {
    ptx::mbarrier_wait_parity(empty[slot.index], slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full[slot.index], Tile::tile_bytes);
    // A tile without keys has block -1: rows before the tensor, zeros.
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
    load_block(smem.k, maps.k, smem.k_full, smem.k_empty, k_slot, work, block_at(work, i));
  }
  FMHA_DEVICE void load_v(const Work& work, int32_t i) {
    load_block(smem.v, maps.v, smem.v_full, smem.v_empty, v_slot, work, block_at(work, i));
  }

  FMHA_DEVICE void run(const Sm90Schedule& schedule) {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    Scheduler<spec, tile> scheduler{int32_t(blockIdx.x), int32_t(gridDim.x)};
    Work work = scheduler.next(p, schedule);
    publish(work);
    while (work.num_blocks > 0) {
      load_q(work);
      load_k(work, 0);
      Work next;
      // Two blocks before the end: earlier, a drawn tile would be held while others idle; later, the
      // lengths' latency would show.
      const int32_t look = max(work.num_blocks - 3, 0);
#pragma unroll 1
      for (int32_t i = 0; i < work.num_blocks; ++i) {
        if (i == look) next = scheduler.next(p, schedule);
        if (i + 1 < work.num_blocks) load_k(work, i + 1);
        load_v(work, i);
      }
      // Not before all loads are under way: a slot comes free at the previous tile's end, which with
      // `lookahead` waits for this tile's first block.
      publish(next);
      work = next;
    }
  }
};

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void load(const FwdParams& p, const Maps& maps, const Sm90Schedule& schedule, Smem<spec, tile>& smem) {
  ptx::setmaxnreg_dec<regs(tile).load>();
  if (threadIdx.x == 0) {
    Loader<spec, tile> loader{p, maps, smem};
    loader.run(schedule);
  }
}

}  // namespace fmha::sm90
