// First keys of a tile's blocks of K or V, for the warps that load them.
#pragma once
#include <fmha/common/scheduler.cuh>
#include <fmha/sm100/fwd/config.cuh>

namespace fmha::sm100 {

// First keys of a tile's blocks, kept in registers, so that a load is issued as soon as its slot is released.
template <FwdSpec spec, Sm100Tile tile, class SeenKeys>
struct BlockKeys {
  int32_t i_head_kv, i_batch, k_row, seqlen_k, last_block, num_band_blocks, last_sink_block, first_dirty;
  int32_t part;       // row of the tile's list
  int32_t next, end;  // blocks of the tile

  FMHA_DEVICE void begin(const Work& work) {
    i_head_kv = work.i_head_kv;
    i_batch = work.i_batch;
    k_row = work.k_row;
    seqlen_k = work.seqlen_k;
    last_block = work.last_block;
    num_band_blocks = work.num_band_blocks;
    last_sink_block = work.last_sink_block;
    first_dirty = work.first_dirty;
    part = work.part;
    next = 0;
    end = work.num_blocks;
  }
  FMHA_DEVICE int32_t block(const SeenKeys& seen) const {
    if constexpr (SeenKeys::has_tile_list) return seen.entry(part, num_band_blocks, next);
    return spec.sink_columns && next >= num_band_blocks ? last_sink_block - (next - num_band_blocks)
                                                        : last_block - next;
  }
  FMHA_DEVICE int32_t row(const SeenKeys& seen) const {
    const int32_t block = this->block(seen);
    // A tile without keys has block -1: rows before the tensor, which TMA reads as zeros.
    return block < 0 ? -tile.block_n : k_row + block * tile.block_n;
  }
  // The batch coordinate of the maps: packed keys have one batch.
  FMHA_DEVICE int32_t batch() const { return spec.kv_layout == KvKind::Packed ? 0 : i_batch; }
  // Where key j lies in memory, for a copy of its row.
  FMHA_DEVICE KvRow place(const FwdParams& p, int32_t j) const {
    return kv_row(p, spec.kv_layout, {i_batch, i_batch, 0, 0, k_row, seqlen_k}, j);
  }
};

}  // namespace fmha::sm100
