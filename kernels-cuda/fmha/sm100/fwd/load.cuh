// The load role: one thread keeps TMA fed, in the order in which the issue role takes blocks.
//
//   Q, K(0) .. K(blocks ahead - 1), then V(i), K(i + blocks ahead) for each block, over the tile's end into the next
#pragma once
#include <fmha/common/scheduler.cuh>
#include <fmha/common/zero_rows.cuh>
#include <fmha/sm100/fwd/issue.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile>
struct Loader {
  using Shared = Smem<spec, tile>;
  static constexpr int q_tiles = Shared::q_tiles, blocks_ahead = Issuer<spec, tile>::blocks_ahead;

  // Where a tile's key blocks are; in registers, so that a load follows its slot's release at once.
  struct Keys {
    int32_t i_head_kv, storage_batch, k_row, last_block, num_band_blocks, last_sink_block, first_dirty;
    int32_t next, end;  // blocks of the tile

    FMHA_DEVICE void begin(const Work& work) {
      i_head_kv = work.i_head_kv;
      storage_batch = work.storage_batch;
      k_row = work.k_row;
      last_block = work.last_block;
      num_band_blocks = work.num_band_blocks;
      last_sink_block = work.last_sink_block;
      first_dirty = work.first_dirty;
      next = 0;
      end = work.num_blocks;
    }
    FMHA_DEVICE int32_t row() const {
      const int32_t block = spec.sink_columns && next >= num_band_blocks ? last_sink_block - (next - num_band_blocks)
                                                                         : last_block - next;
      // A tile without keys has block -1: rows before the tensor, zeros.
      return block < 0 ? -tile.block_n : k_row + block * tile.block_n;
    }
  };

  const FwdParams& p;
  const Maps& maps;
  Shared& smem;
  Slot<tile.stages> ring;
  Slot<kWorkSlots> k_work, v_work;
  Keys k = {}, v = {};
  uint32_t q_phase = 1, zero_phase = 1;
  int32_t ask_at = 0;
  bool more = true;

  FMHA_DEVICE void ask() const { ptx::barrier_arrive<kWorkWanted, 64>(); }

  FMHA_DEVICE void load_q(const Work& work) {
    using Tile = typename Shared::QTile;
    const int32_t head_in_group = work.i_head - work.i_head_kv * p.gqa_ratio;
#pragma unroll
    for (int q = 0; q < q_tiles; ++q) {
      ptx::mbarrier_wait_parity(smem.q_empty[q], q_phase);
      ptx::mbarrier_arrive_expect_tx(smem.q_full[q], Tile::tile_bytes);
      const int32_t row = work.q_row + query_of<tile>(p, work.first_row + q * kRows);
#pragma unroll
      for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
        ptx::cp_async_bulk_tensor_5d(smem.q[q].address() + chunk * Tile::chunk_bytes, maps.q, smem.q_full[q],
                                     chunk * Tile::span, head_in_group, row, work.i_head_kv, work.storage_batch,
                                     ptx::CacheHint::EvictFirst);
      }
    }
    q_phase ^= 1;
  }

  // `columns`: the keys of a row lie side by side, [dim, keys].
  template <bool columns, class Tile>
  FMHA_DEVICE void load_block(const Tile& to, const TensorMap& map, Barrier& full, const Keys& keys) {
    ptx::mbarrier_wait_parity(smem.kv_empty[ring.index], ring.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Tile::tile_bytes);
    const int32_t row = keys.row();
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(to.address() + chunk * Tile::chunk_bytes, map, full,
                                   chunk * Tile::span + (columns ? row : 0), columns ? 0 : row, keys.i_head_kv,
                                   keys.storage_batch, ptx::CacheHint::EvictLast);
    }
    ring.advance();
  }

  // The tile whose K comes next, and its Q.
  FMHA_DEVICE void begin_k() {
    ptx::mbarrier_wait_parity(smem.work_full[k_work.index], k_work.phase);
    const Work& work = smem.work[k_work.index];
    k.begin(work);
    k_work.advance();
    more = k.end > 0;
    if (!more) return;
    // Some blocks before the end: earlier, the tile would be held while others idle; later, its planning would show.
    ask_at = max(k.end - 3, 1);
    load_q(work);
  }
  FMHA_DEVICE void load_k() {
    if (k.next == k.end && more) begin_k();
    if (!more) return;
    load_block<false>(smem.kv[ring.index].k(), maps.k, smem.kv_full[ring.index], k);
    if (++k.next == ask_at) ask();
  }
  FMHA_DEVICE bool begin_v() {
    ptx::mbarrier_wait_parity(smem.work_full[v_work.index], v_work.phase);
    v.begin(smem.work[v_work.index]);
    ptx::mbarrier_arrive_if(smem.work_empty[v_work.index], true);
    v_work.advance();
    return v.end > 0;
  }
  FMHA_DEVICE void load_v() {
    const bool raw = v.next == 0 && v.first_dirty < tile.block_n;
    const int32_t slot = ring.index;
    load_block<Shared::v_columns>(smem.kv[slot].v(), maps.v, raw ? smem.kv_raw[slot] : smem.kv_full[slot], v);
    if (raw) tell_zero_role(slot, v.first_dirty);
    ++v.next;
  }
  FMHA_DEVICE void tell_zero_role(int32_t slot, int32_t first_row) {
    ptx::mbarrier_wait_parity(smem.zero_empty, zero_phase);
    zero_phase ^= 1;
    smem.zero.slot = slot;
    smem.zero.first_row = first_row;
    ptx::mbarrier_arrive_if(smem.zero_full, true);
  }

  FMHA_DEVICE void run() {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    ask();
#pragma unroll 1
    for (int i = 0; i < blocks_ahead; ++i) load_k();
    while (begin_v()) {
#pragma unroll 1
      while (v.next < v.end) {
        load_v();
        load_k();
      }
    }
    tell_zero_role(-1, 0);
  }
};

// The zero role: V rows that are not the sequence's (padding, another sequence) may hold anything, NaN included, and
// NaN times their P of 0 would be NaN in O. They stand in a tile's first block alone, which this warp zeroes before it
// is announced.
template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE void zero_values(Smem<spec, tile>& smem) {
  using Shared = Smem<spec, tile>;
  const int32_t lane = threadIdx.x % 32;
  uint32_t phase = 0, raw_phases = 0;  // of kv_raw a bit a slot: only where rows are to be zeroed is there a phase
  while (true) {
    ptx::mbarrier_wait_parity(smem.zero_full, phase);
    phase ^= 1;
    const int32_t slot = ptx::uniform(smem.zero.slot), first_row = smem.zero.first_row;
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.zero_empty, lane == 0);
    if (slot < 0) return;
    ptx::mbarrier_wait_parity(smem.kv_raw[slot], raw_phases >> slot & 1);
    raw_phases ^= 1u << slot;
    if constexpr (Shared::v_columns) {
      zero_columns(smem.kv[slot].v(), first_row, lane, 32);
    } else {
      zero_rows(smem.kv[slot].v(), first_row, lane, 32);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.kv_full[slot], lane == 0);
  }
}

}  // namespace fmha::sm100
