// The load role: one thread issues all TMA loads.
#pragma once
#include <fmha/common/arrivals.cuh>
#include <fmha/ptx/bulk.cuh>
#include <fmha/ptx/flag.cuh>
#include <fmha/sm90/bwd/order.cuh>

namespace fmha::sm90::bwd {

template <class Tile>
FMHA_DEVICE void load_rows(const Tile& to, const TensorMap& map, Barrier& full, int32_t i_batch, int32_t row,
                           int32_t i_head, ptx::CacheHint hint, int32_t first_column = 0,
                           int32_t to_next_column = Tile::span) {
  // The loading thread has 24 registers, too few for the addresses of many chunks at once, so such a loop is not
  // unrolled.
#pragma unroll(Tile::num_chunks > 2 ? 1 : Tile::num_chunks)
  for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
    ptx::cp_async_bulk_tensor_4d(to.address() + chunk * Tile::chunk_bytes, map, full, first_column + chunk * to_next_column,
                                 row, i_head, i_batch, hint);
  }
}
// Loads the same rows into both CTAs of a cluster; each CTA loads half of them, by multicast.
template <class Tile>
FMHA_DEVICE void load_rows_together(const Tile& to, const TensorMap& map, Barrier& full, int32_t i_batch, int32_t row,
                                    int32_t i_head, ptx::CacheHint hint, int32_t rank) {
  constexpr uint16_t both = 3;
  const int32_t first = rank * (Tile::rows / 2);
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
    const uint32_t address = to.address() + chunk * Tile::chunk_bytes + first * Tile::span_bytes;
    ptx::cp_async_bulk_tensor_4d_multicast(address, map, full, chunk * Tile::span, row + first, i_head, i_batch, both,
                                           hint);
  }
}

// Batch coordinate of K and V in their tensor maps.
template <BwdSpec spec>
FMHA_DEVICE int32_t k_batch_of(const SeqSpan& span) {
  return spec.fwd.kv_layout == KvKind::Packed ? 0 : span.i_batch;
}

// The load role. `ArrivedKeys` waits for keys that other devices copy while the kernel runs, if there are any;
// `SeenKeys` says which keys queries see.
template <BwdSpec spec, Sm90BwdTile tile, class ArrivedKeys, class SeenKeys>
struct Loader {
  using S = Shape<spec, tile>;
  const BwdParams& p;
  const Maps& maps;
  const Sm90BwdSchedule& schedule;
  Smem<spec, tile>& smem;
  ArrivedKeys& arrived;
  const SeenKeys& seen;
  Slot<tile.stages_q> q_slot;
  Slot<tile.stages_dout> dout_slot;
  uint32_t tile_phase = 0;

  // Loads a row statistic (LSE or delta) for each query of a block.
  template <class Tile, int stages>
  FMHA_DEVICE void load_queries(Tile (&tiles)[stages], float (&row_stats)[stages][tile.block_m],
                                Barrier (&full)[stages], Barrier (&empty)[stages], Slot<stages>& slot,
                                const TensorMap& map, const float* stats, const Work& work,
                                const QueryBlocks& blocks) const {
    constexpr uint32_t stats_bytes = tile.block_m * sizeof(float);
    const int32_t i = slot.index, first_query = blocks.current * tile.block_m;
    ptx::mbarrier_wait_parity(empty[i], slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full[i], Tile::tile_bytes + stats_bytes);
    const int32_t row = work.span.q_row + first_query;
    if constexpr (in_clusters(tile)) {
      load_rows_together(tiles[i], map, full[i], work.span.storage_batch, row, blocks.i_head, ptx::CacheHint::EvictLast,
                         cluster_rank<tile>());
    } else {
      load_rows(tiles[i], map, full[i], work.span.storage_batch, row, blocks.i_head, ptx::CacheHint::EvictLast);
    }
    const float* rows = stats + stats_offset(p, work.span, blocks.i_head, first_query);
    ptx::cp_async_bulk(ptx::shared_address(row_stats[i]), rows, stats_bytes, full[i]);
    slot.advance();
  }

  // Waits until a head's LSE and delta are computed, if the main kernel computes them.
  FMHA_DEVICE void wait_for_delta(const Work& work, int32_t i_head) const {
    const int32_t head = work.span.i_batch * p.fwd.num_heads_q + i_head;
    if (head < schedule.num_first_query_heads) return;
    const int32_t* made = made_query_blocks<spec, tile>(p, schedule, head);
    while (ptx::ld_acquire_gpu(made) < schedule.num_q_blocks) {
    }
    ptx::fence_proxy_async_global();
  }

  FMHA_DEVICE void load_tile(const Work& work) {
    arrived.wait(work.span.k_row + work.keys.begin, tile.block_n);
    if constexpr (in_clusters(tile)) arrived.wait(work.span.k_row + first_key_of_other<tile>(work), tile.block_n);
    const int32_t k_row = work.span.k_row + work.keys.begin;
    const int32_t k_batch = k_batch_of<spec>(work.span);
    bool first = true;
    int32_t head_of_delta = -1;
    for (auto blocks = query_blocks<spec, tile>(p, schedule, work, seen); blocks.more(); blocks.advance()) {
      if constexpr (makes_delta(tile)) {
        if (blocks.i_head != head_of_delta) wait_for_delta(work, blocks.i_head);
        head_of_delta = blocks.i_head;
      }
      load_queries(smem.q, smem.lse_log2, smem.q_full, smem.q_empty, q_slot, maps.q, p.lse_log2, work, blocks);
      // K and V are loaded after Q, whose slot becomes free earlier; the product S may start before V has arrived.
      if (first) {
        ptx::mbarrier_wait_parity(smem.kv_empty, tile_phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(smem.k_full, S::KTile::tile_bytes);
        load_rows(smem.k, maps.k, smem.k_full, k_batch, k_row, work.i_head_kv, ptx::CacheHint::EvictFirst);
        constexpr uint32_t other_bytes = in_clusters(tile) ? S::OtherKTile::tile_bytes : 0;
        ptx::mbarrier_arrive_expect_tx(smem.v_full, S::VTile::tile_bytes + other_bytes);
        load_rows(smem.v, maps.v, smem.v_full, k_batch, k_row, work.i_head_kv, ptx::CacheHint::EvictFirst);
        if constexpr (in_clusters(tile)) {
          const int32_t first_column = cluster_rank<tile>() * (S::gradient_each ? 64 : S::cluster_columns);
          load_rows(smem.other_k, maps.k, smem.v_full, k_batch, work.span.k_row + first_key_of_other<tile>(work),
                    work.i_head_kv, ptx::CacheHint::EvictFirst, first_column, S::gradient_each ? 128 - first_column : 64);
        }
        first = false;
      }
      load_queries(smem.dout, smem.delta, smem.dout_full, smem.dout_empty, dout_slot, maps.dout, p.delta, work, blocks);
    }
    tile_phase ^= 1;
  }
};

template <BwdSpec spec, Sm90BwdTile tile, class ArrivedKeys, class SeenKeys>
FMHA_DEVICE void load(const BwdParams& p, const Maps& maps, const Sm90BwdSchedule& schedule, ArrivedKeys arrived,
                      const SeenKeys& seen, Smem<spec, tile>& smem) {
  Loader<spec, tile, ArrivedKeys, SeenKeys> loader{p, maps, schedule, smem, arrived, seen};
  const auto load_tile = [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index, seen);
    if (!work.q_blocks.empty()) loader.load_tile(work);
  };
  if constexpr (!tile.persistent) {
    load_tile(blockIdx.x);
  } else if (cluster_rank<tile>() > 0) {
    // The first CTA of a cluster takes the tile index for both. The other CTA tells it by an arrival that all its
    // threads have read a slot, before it writes the slot again. A separate thread makes this arrival, since its memory
    // order makes the arriving thread wait for its own stores.
    Slot<kTileIndexSlots> slot;
    for (int32_t round = 0;; ++round, slot.advance()) {
      if (round >= kTileIndexSlots) {
        ptx::mbarrier_wait_parity(smem.tile_index_empty[slot.index], slot.phase ^ 1);
        ptx::mbarrier_arrive_release_at(smem.tile_index_empty[slot.index], 0);
      }
      ptx::mbarrier_wait_parity_cluster(smem.tile_index_full[slot.index], slot.phase);
      const int32_t index = smem.tile_index[slot.index] + cluster_rank<tile>();
      if (index >= schedule.num_tiles) return;
      load_tile(index);
    }
  } else {
    Slot<kTileIndexSlots> slot;
    // A CTA's first index comes from the counter too where warps wait for a head's tiles (dq/finish.cuh): otherwise a
    // tile would belong to a CTA that may not run yet.
    constexpr bool counts_all = finishes_dq(tile);
    int32_t index = counts_all ? atomicAdd(p.schedulers + kNextTile, 1) : int32_t(blockIdx.x);
    while (true) {
      if constexpr (in_clusters(tile)) {
        ptx::mbarrier_wait_parity_cluster(smem.tile_index_empty[slot.index], slot.phase ^ 1);
      } else {
        ptx::mbarrier_wait_parity(smem.tile_index_empty[slot.index], slot.phase ^ 1);
      }
      smem.tile_index[slot.index] = index;
      ptx::mbarrier_arrive_if(smem.tile_index_full[slot.index], true);
      if constexpr (in_clusters(tile)) {
        ptx::st_shared_at(smem.tile_index[slot.index], 1, index);
        ptx::mbarrier_arrive_release_at(smem.tile_index_full[slot.index], 1);
      }
      if (index >= schedule.num_tiles) return;
      load_tile(index);
      index = (counts_all ? 0 : gridDim.x) + atomicAdd(p.schedulers + kNextTile, 1) * cluster_size(tile);
      slot.advance();
    }
  }
}

}  // namespace fmha::sm90::bwd
