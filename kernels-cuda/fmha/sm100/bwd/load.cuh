// The load role: one lane of a warp issues all TMA loads.
//
// Order of the loads: K, Q(0), V, dO(0), then Q(i), dO(i) of each block of queries; K and V only where they are in
// shared memory.
//
// Rows beyond a sequence may hold another sequence's data or anything, and 0 times NaN is NaN. In a sequence's last
// block the whole warp therefore writes zeros to such rows before it announces the block. V's rows need no zeros: each
// reaches only the dP of its own key.
#pragma once
#include <fmha/common/rows_behind.cuh>
#include <fmha/common/zero_rows.cuh>
#include <fmha/ptx/bulk.cuh>
#include <fmha/sm100/bwd/work.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, Part part, class SeenKeys>
struct Loader {
  using Shared = Smem<spec, tile, part>;

  const BwdParams& p;
  const Maps& maps;
  Shared& smem;
  const Work& work;
  const SeenKeys& seen;
  const int32_t lane = threadIdx.x % 32;
  uint32_t raw_phase = 0;

  // Loads a tile. `columns`: rows of the tile are elements of the tensor's rows.
  template <bool columns = false, class Tile>
  FMHA_DEVICE void start(const Tile& to, const TensorMap& map, Barrier& full, int32_t i_batch, int32_t row, int32_t i_head,
                         ptx::CacheHint hint) const {
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      const int32_t along = chunk * Tile::span;
      ptx::cp_async_bulk_tensor_4d(to.address() + chunk * Tile::chunk_bytes, map, full, columns ? row + along : along,
                                   columns ? 0 : row, i_head, i_batch, hint);
    }
  }

  // Loads a tile whose first `there` rows are in the sequence. The barrier `full` also expects `more` further bytes.
  template <class Tile>
  FMHA_DEVICE void load(const Tile& to, const TensorMap& map, Barrier& full, uint32_t more, int32_t i_batch, int32_t row,
                        int32_t i_head, int32_t there, ptx::CacheHint hint) {
    const bool dirty = there < Tile::rows && has_rows_behind<spec>(p);
    if (lane == 0) {
      Barrier& first = dirty ? smem.raw : full;
      ptx::mbarrier_arrive_expect_tx(first, Tile::tile_bytes + (dirty ? 0 : more));
      start(to, map, first, i_batch, row, i_head, hint);
    }
    if (!dirty) return;
    __syncwarp();
    ptx::mbarrier_wait_parity(smem.raw, raw_phase);
    raw_phase ^= 1;
    zero_rows(to, there, lane, 32);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, more);
  }

  FMHA_DEVICE int32_t key_batch() const { return spec.fwd.kv_layout == KvKind::Packed ? 0 : work.span.i_batch; }
  FMHA_DEVICE void load_k() {
    load(smem.k, maps.k, smem.k_full, 0, key_batch(), work.span.k_row + work.keys.begin, work.i_head_kv,
         work.keys.end - work.keys.begin, ptx::CacheHint::EvictFirst);
  }
  FMHA_DEVICE void load_v() const {
    if (lane != 0) return;
    ptx::mbarrier_arrive_expect_tx(smem.v_full, KeyValueTile<spec>::tile_bytes);
    start<kColumnMajor<spec>>(smem.v, maps.v, smem.v_full, key_batch(), work.span.k_row + work.keys.begin,
                             work.i_head_kv, ptx::CacheHint::EvictFirst);
  }
  FMHA_DEVICE void load_queries(const auto& to, const TensorMap& map, Barrier& full, uint32_t more, const QueryBlock& block) {
    load(to, map, full, more, work.span.storage_batch, work.span.q_row + block.first, block.i_head,
         work.span.seqlen_q - block.first, ptx::CacheHint::EvictLast);
  }

  FMHA_DEVICE void load_q(const Slot<tile.stages_q>& slot, const QueryBlock& block) {
    constexpr uint32_t bytes = Shared::queries * sizeof(float);
    ptx::mbarrier_wait_parity(smem.q_empty[slot.index], slot.phase ^ 1);
    Barrier& full = smem.q_full[slot.index];
    load_queries(smem.q[slot.index], maps.q, full, 3 * bytes, block);
    if (lane != 0) return;
    const typename Shared::Stats& stats = smem.stats[slot.index];
    const int64_t at = stats_offset(p, work.span, block.i_head, block.first);
    ptx::cp_async_bulk(ptx::shared_address(stats.lse_log2), p.lse_log2 + at, bytes, full);
    ptx::cp_async_bulk(ptx::shared_address(stats.delta), p.delta + at, bytes, full);
    ptx::cp_async_bulk(ptx::shared_address(stats.origin), p.score_origin + at, bytes, full);
  }
  FMHA_DEVICE void load_dout(const Slot<tile.stages_dout>& slot, const QueryBlock& block) {
    ptx::mbarrier_wait_parity(smem.dout_empty[slot.index], slot.phase ^ 1);
    load_queries(smem.dout[slot.index], maps.dout, smem.dout_full[slot.index], 0, block);
  }

  FMHA_DEVICE void run() {
    if (lane == 0) {
      ptx::prefetch_tensormap(maps.q);
      ptx::prefetch_tensormap(maps.k);
      ptx::prefetch_tensormap(maps.v);
      ptx::prefetch_tensormap(maps.dout);
    }
    Slot<tile.stages_q> q;
    Slot<tile.stages_dout> dout;
    QuerySteps<Shared::queries, SeenKeys> blocks{work, seen};
#pragma unroll 1
    for (int32_t i = 0; i < work.num_steps; ++i) {
      const QueryBlock block = blocks.next();
      if constexpr (!TmemPlan<spec, part>::has_k) {
        if (i == 0) load_k();
      }
      load_q(q, block);
      if constexpr (has_dk(part) && !TmemPlan<spec, part>::has_v) {
        if (i == 0) load_v();
      }
      load_dout(dout, block);
      q.advance();
      dout.advance();
    }
  }
};

}  // namespace fmha::sm100::bwd
